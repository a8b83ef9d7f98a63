//! Arrays and mipmapped arrays.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::abi::result::Result;
use crate::abi::types::Array3DDescriptor;
use crate::process::context::Context;
use crate::process::driver::{self, driver};
use client::Status;
use client::handle::ArrayId;
use client::handles::Slab;
use client::ops::array::{ArrayDestroy, ArrayPlace, ArrayShape, flag};
use client::ops::copy::Pitched;

/// An array, or a level of a mipmapped one.
pub(crate) struct Array {
    pub id: ArrayId,
    pub context: &'static Context,
    pub shape: ArrayShape,
    /// The mipmapped array that it is a level of. Destroying that destroys the level.
    pub level_of: Option<Weak<Mipmapped>>,
}

/// A mipmapped array.
pub(crate) struct Mipmapped {
    pub id: ArrayId,
    pub context: &'static Context,
    pub shape: ArrayShape,
    pub levels: u32,
    /// Handles of the levels that the program has requested.
    pub told: Mutex<Vec<(u32, usize)>>,
}

pub(crate) static ARRAYS: Slab<Array> = Slab::new(12);

pub(crate) static MIPMAPPED: Slab<Mipmapped> = Slab::new(13);

/// The array of a handle.
pub(crate) fn of(handle: usize) -> Result<Arc<Array>> {
    driver()?;
    ARRAYS.get(handle).ok_or(Status::INVALID_HANDLE)
}

/// The mipmapped array of a handle.
pub(crate) fn mipmapped(handle: usize) -> Result<Arc<Mipmapped>> {
    driver()?;
    MIPMAPPED.get(handle).ok_or(Status::INVALID_HANDLE)
}

pub(crate) fn new_id() -> ArrayId {
    static IDS: AtomicU32 = AtomicU32::new(1);
    ArrayId(IDS.fetch_add(1, Ordering::Relaxed))
}

/// `CUdevice_attribute` numbers of the maximum sizes.
mod limit {
    pub const TEXTURE_1D: usize = 21;
    pub const TEXTURE_2D: [usize; 2] = [22, 23];
    pub const TEXTURE_3D: [usize; 3] = [24, 25, 26];
    pub const TEXTURE_2D_LAYERED: [usize; 3] = [27, 28, 29];
    pub const TEXTURE_1D_LAYERED: [usize; 2] = [42, 43];
    pub const TEXTURE_CUBEMAP: usize = 52;
    pub const TEXTURE_2D_MIPMAPPED: [usize; 2] = [73, 74];
    pub const TEXTURE_1D_MIPMAPPED: usize = 77;
    pub const TEXTURE_CUBEMAP_LAYERED: [usize; 2] = [53, 54];
}

/// Checks a description against the device's attributes.
pub(crate) fn shape(context: &Context, d: &Array3DDescriptor, mipmapped: bool) -> Result<ArrayShape> {
    if d.flags & !flag::KNOWN != 0 {
        return refuse_form!(
            "an array with flags beyond layers, cube maps, surfaces, gathers and deferred mapping"
        );
    }
    let [width, height, depth] = [d.width, d.height, d.depth].map(|n| n as u64);
    let shape = ArrayShape { width, height, depth, format: d.format, channels: d.channels, flags: d.flags };
    if shape.element_bytes().is_none() {
        // Video, compressed and normalized formats.
        let known = matches!(d.format, 0x50 | 0x91..=0x9e | 0xb0..=0xcb);
        return if known { refuse_form!("an array of this format") } else { Err(Status::INVALID_VALUE) };
    }
    shape.bytes().ok_or(Status::INVALID_VALUE)?;
    let device = driver::device(context.device as i32)?;
    let at_most = |n: u64, number: usize| n <= device.attribute(number).max(0) as u64;
    let (layered, cube) = (d.flags & flag::LAYERED != 0, d.flags & flag::CUBEMAP != 0);
    let fits = if cube {
        let most = if layered { limit::TEXTURE_CUBEMAP_LAYERED[0] } else { limit::TEXTURE_CUBEMAP };
        shape.is_whole_cubes()
            && at_most(width, most)
            && (!layered || at_most(depth, limit::TEXTURE_CUBEMAP_LAYERED[1]))
    } else if layered && height == 0 {
        depth > 0
            && at_most(width, limit::TEXTURE_1D_LAYERED[0])
            && at_most(depth, limit::TEXTURE_1D_LAYERED[1])
    } else if layered {
        let most = limit::TEXTURE_2D_LAYERED;
        depth > 0 && at_most(width, most[0]) && at_most(height, most[1]) && at_most(depth, most[2])
    } else if depth > 0 {
        // The device also supports other proportions, which only the driver knows. With height 0 there is no
        // depth.
        height > 0
            && [width, height, depth]
                .iter()
                .all(|n| *n <= 2 * device.attribute(limit::TEXTURE_3D[0]).max(0) as u64)
    } else if height > 0 {
        let most = if mipmapped { limit::TEXTURE_2D_MIPMAPPED } else { limit::TEXTURE_2D };
        at_most(width, most[0]) && at_most(height, most[1])
    } else {
        at_most(width, if mipmapped { limit::TEXTURE_1D_MIPMAPPED } else { limit::TEXTURE_1D })
    };
    if fits { Ok(shape) } else { Err(Status::INVALID_VALUE) }
}

/// Drops a context's arrays. `with_server`: the server destroys its own with the context; otherwise this
/// destroys them.
pub(crate) fn forget(context: &'static Context, with_server: bool) {
    let arrays = ARRAYS.remove_where(|array| std::ptr::eq(array.context, context));
    let mipmapped = MIPMAPPED.remove_where(|array| std::ptr::eq(array.context, context));
    if with_server {
        return;
    }
    let whole = arrays.iter().filter(|array| array.level_of.is_none()).map(|array| array.id);
    for array in whole.chain(mipmapped.iter().map(|array| array.id)) {
        // After the session is lost there are no arrays.
        let _ = context.session().append(&ArrayDestroy { array });
    }
}

/// One end of a copy.
pub(crate) enum End {
    /// An array, and a position in it: byte of the row, row, slice.
    Array(Arc<Array>, [u64; 3]),
    /// Device memory.
    Device(Pitched),
}

impl End {
    pub fn place(&self) -> ArrayPlace {
        match self {
            End::Array(array, at) => {
                let memory = Pitched { address: 0, pitch: 0, slice: 0 };
                ArrayPlace { array: Some(array.id), at: *at, memory }
            }
            End::Device(memory) => ArrayPlace { array: None, at: [0; 3], memory: memory.clone() },
        }
    }

    /// Checks that the extent lies in the array.
    pub fn check(&self, extent: [u64; 3]) -> Result {
        let End::Array(array, at) = self else { return Ok(()) };
        let whole = array.shape.extent().ok_or(Status::INVALID_VALUE)?;
        let element = array.shape.element_bytes().ok_or(Status::INVALID_VALUE)?;
        let inside = (0..3).all(|d| at[d].checked_add(extent[d]).is_some_and(|end| end <= whole[d]));
        let aligned = at[0].is_multiple_of(element) && extent[0].is_multiple_of(element);
        if inside && aligned { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }
}
