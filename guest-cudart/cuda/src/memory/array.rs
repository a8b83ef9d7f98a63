//! Arrays and mipmapped arrays, and copies from and to them.
//!
//! Between an array and device memory, or two arrays, a copy is one operation. Between an array and the host there is device memory in between, which the stream gives
//! back when it is done with it: so every form of host memory is copied as [`copy3d`](crate::copy3d) does it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, refuse_form};
use crate::memory::address;
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::{capture, context, driver};
use crate::work::copy::{Copier, Mode, is_device};
use client::handle::ArrayId;
use client::handles::Slab;
use client::ops::array::{
    ArrayCreate, ArrayDestroy, ArrayLevel, ArrayPlace, ArrayRequirements, ArrayShape, MemcpyArray, flag,
};
use client::ops::copy::Pitched;
use client::{Status, lock};

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Array3DDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
pub struct Requirements {
    size: usize,
    alignment: usize,
    reserved: [u32; 4],
}

/// An array, or a level of a mipmapped one.
pub(crate) struct Array {
    pub id: ArrayId,
    pub context: &'static Context,
    pub shape: ArrayShape,
    /// The mipmapped array that it is a level of, which destroys it.
    level_of: Option<Weak<Mipmapped>>,
}

/// A mipmapped array.
pub(crate) struct Mipmapped {
    pub id: ArrayId,
    pub context: &'static Context,
    shape: ArrayShape,
    levels: u32,
    /// Handles of the levels that were asked for.
    told: Mutex<Vec<(u32, usize)>>,
}

static ARRAYS: Slab<Array> = Slab::new(12);

static MIPMAPPED: Slab<Mipmapped> = Slab::new(13);

/// The array that a program's handle names.
pub(crate) fn of(handle: usize) -> Result<Arc<Array>> {
    driver()?;
    ARRAYS.get(handle).ok_or(Status::INVALID_HANDLE)
}

/// The mipmapped array that a program's handle names.
pub(crate) fn mipmapped(handle: usize) -> Result<Arc<Mipmapped>> {
    driver()?;
    MIPMAPPED.get(handle).ok_or(Status::INVALID_HANDLE)
}

fn new_id() -> ArrayId {
    static IDS: AtomicU32 = AtomicU32::new(1);
    ArrayId(IDS.fetch_add(1, Ordering::Relaxed))
}

/// `CUdevice_attribute` numbers of the greatest sizes.
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

/// What a program asks for, checked as far as the device's attributes tell.
fn shape(context: &Context, d: &Array3DDescriptor, mipmapped: bool) -> Result<ArrayShape> {
    static SAID: AtomicBool = AtomicBool::new(false);
    if d.flags & !flag::KNOWN != 0 {
        return refuse_form(
            "an array with flags beyond layers, cube maps, surfaces, gathers and deferred mapping",
            &SAID,
        );
    }
    let [width, height, depth] = [d.width, d.height, d.depth].map(|n| n as u64);
    let shape = ArrayShape { width, height, depth, format: d.format, channels: d.channels, flags: d.flags };
    if shape.element_bytes().is_none() {
        // Formats of video, compressed and normalized ones.
        let known = matches!(d.format, 0x50 | 0x91..=0x9e | 0xb0..=0xcb);
        return if known {
            refuse_form("an array of this format", &SAID)
        } else {
            Err(Status::INVALID_VALUE)
        };
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
        // The device has an alternate form with other proportions, which the driver knows; height 0 has no depth.
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

unsafe fn create(to: *mut usize, desc: &Array3DDescriptor) -> Result {
    non_null(to)?;
    let (driver, context) = context::ready()?;
    let shape = shape(context, desc, false)?;
    let id = new_id();
    driver.session.call(&ArrayCreate { context: context.id, array: id, shape: shape.clone(), levels: 0 })?;
    let made = ARRAYS.insert(Arc::new(Array { id, context, shape, level_of: None }));
    // SAFETY: not NULL; the program says that it may be written.
    unsafe { put(to, made.ok_or(Status::OUT_OF_MEMORY)?) }
}

/// The server's objects of a context are destroyed with it, or now.
pub(crate) fn forget(driver: &Driver, context: &'static Context, with_server: bool) {
    let arrays = ARRAYS.remove_where(|array| std::ptr::eq(array.context, context));
    let mipmapped = MIPMAPPED.remove_where(|array| std::ptr::eq(array.context, context));
    if with_server {
        return;
    }
    let whole = arrays.iter().filter(|array| array.level_of.is_none()).map(|array| array.id);
    for array in whole.chain(mipmapped.iter().map(|array| array.id)) {
        // A lost session has no arrays.
        let _ = driver.session.append(&ArrayDestroy { array });
    }
}

/// One end of a copy.
pub(crate) enum End {
    /// An array, and the position in it: bytes in a row, row, slice.
    Array(Arc<Array>, [u64; 3]),
    /// Device memory.
    Device(Pitched),
}

impl End {
    fn place(&self) -> ArrayPlace {
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

impl Copier {
    /// A copy with an array at one end or both, and none on the host.
    pub fn with_array(&self, dst: &End, src: &End, extent: [u64; 3]) -> Result {
        dst.check(extent)?;
        src.check(extent)?;
        capture::refuse(&self.stream)?;
        let op = MemcpyArray { stream: self.stream.id, dst: dst.place(), src: src.place(), extent };
        match dst {
            End::Device(to) => {
                let [width, height, depth] = extent.map(|n| n.saturating_sub(1));
                self.put(&op, to.address, depth * to.slice + height * to.pitch + width + 1).map(drop)
            }
            End::Array(..) => self.stream.work(self.driver, &op).map(drop),
        }
    }

    /// Device memory for as long as `work` and the stream use it, packed.
    pub fn by_way_of(&self, extent: [u64; 3], work: impl FnOnce(&Pitched) -> Result) -> Result {
        capture::refuse(&self.stream)?;
        let [width, height, depth] = extent;
        let bytes =
            width.checked_mul(height).and_then(|n| n.checked_mul(depth)).ok_or(Status::INVALID_VALUE)?;
        let context = self.stream.context;
        let address = address::alloc(self.driver, context, context.device, bytes, 0)?;
        let done = work(&Pitched { address, pitch: width, slice: width * height });
        address::free_in_order(self.driver, address, self.stream.clone())?;
        done
    }

    /// Bytes in a row of an array, from or to memory of either kind.
    unsafe fn row(&self, array: usize, offset: usize, memory: u64, bytes: usize, to_array: bool) -> Result {
        let array = of(array)?;
        if bytes == 0 {
            return Ok(());
        }
        let extent = [bytes as u64, 1, 1];
        let end = End::Array(array, [offset as u64, 0, 0]);
        end.check(extent)?;
        let copy = |memory: &Pitched| {
            let memory = End::Device(memory.clone());
            if to_array {
                self.with_array(&end, &memory, extent)
            } else {
                self.with_array(&memory, &end, extent)
            }
        };
        if is_device(self.driver, memory) {
            address::check(self.driver, memory, bytes as u64)?;
            return copy(&Pitched { address: memory, pitch: bytes as u64, slice: bytes as u64 });
        }
        self.by_way_of(extent, |between| {
            // SAFETY: the program says that the host's memory may be read or written over these bytes.
            unsafe {
                if to_array {
                    self.to_device(between.address, memory as *const u8, bytes)?;
                    copy(between)?;
                    self.copied()
                } else {
                    copy(between)?;
                    self.to_host(memory as *mut u8, between.address, bytes)
                }
            }
        })
    }
}

fn requirements(id: ArrayId, shape: &ArrayShape, device: i32, to: *mut Requirements) -> Result {
    non_null(to)?;
    driver::device(device)?;
    // An array that has memory needs none.
    if shape.flags & flag::DEFERRED_MAPPING == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let found = driver()?.session.call(&ArrayRequirements { array: id })?;
    // SAFETY: not NULL; the program says that it may be written.
    unsafe {
        put(
            to,
            Requirements { size: found.size as usize, alignment: found.alignment as usize, reserved: [0; 4] },
        )
    }
}

fn described(shape: &ArrayShape) -> Array3DDescriptor {
    let [width, height, depth] = [shape.width, shape.height, shape.depth].map(|n| n as usize);
    Array3DDescriptor {
        width,
        height,
        depth,
        format: shape.format,
        channels: shape.channels,
        flags: shape.flags,
    }
}

api! {
    fn cuArrayCreate_v2(array: *mut usize, desc: *const ArrayDescriptor) {
        non_null(desc)?;
        let d = *desc;
        create(array, &Array3DDescriptor { width: d.width, height: d.height, depth: 0, format: d.format, channels: d.channels, flags: 0 })
    }

    fn cuArray3DCreate_v2(array: *mut usize, desc: *const Array3DDescriptor) {
        non_null(desc)?;
        create(array, &*desc)
    }

    fn cuArrayDestroy(handle: usize) {
        let driver = driver()?;
        let array = of(handle)?;
        array.context.synchronize()?;
        // Of a level only this handle goes: it may be asked for again.
        if let Some(whole) = array.level_of.as_ref().and_then(Weak::upgrade) {
            lock(&whole.told).retain(|(_, told)| *told != handle);
        }
        ARRAYS.remove(handle).ok_or(Status::INVALID_HANDLE)?;
        driver.session.append(&ArrayDestroy { array: array.id }).map(|_| ())
    }

    fn cuArrayGetDescriptor_v2(desc: *mut ArrayDescriptor, array: usize) {
        non_null(desc)?;
        let d = described(&of(array)?.shape);
        put(desc, ArrayDescriptor { width: d.width, height: d.height, format: d.format, channels: d.channels })
    }

    fn cuArray3DGetDescriptor_v2(desc: *mut Array3DDescriptor, array: usize) {
        non_null(desc)?;
        put(desc, described(&of(array)?.shape))
    }

    fn cuArrayGetMemoryRequirements(to: *mut Requirements, array: usize, device: i32) {
        let array = of(array)?;
        requirements(array.id, &array.shape, device, to)
    }

    fn cuMipmappedArrayCreate(array: *mut usize, desc: *const Array3DDescriptor, levels: u32) {
        non_null(array)?;
        non_null(desc)?;
        let (driver, context) = context::ready()?;
        let shape = shape(context, &*desc, true)?;
        // More levels than halvings are as many as there are.
        let levels = levels.clamp(1, shape.most_levels());
        let id = new_id();
        driver.session.call(&ArrayCreate { context: context.id, array: id, shape: shape.clone(), levels })?;
        let made = MIPMAPPED.insert(Arc::new(Mipmapped { id, context, shape, levels, told: Mutex::default() }));
        put(array, made.ok_or(Status::OUT_OF_MEMORY)?)
    }

    fn cuMipmappedArrayGetLevel(level: *mut usize, array: usize, index: u32) {
        non_null(level)?;
        let driver = driver()?;
        let whole = mipmapped(array)?;
        if index >= whole.levels {
            return Err(Status::INVALID_VALUE);
        }
        let mut told = lock(&whole.told);
        if let Some((_, handle)) = told.iter().find(|(of, _)| *of == index) {
            return put(level, *handle);
        }
        let id = new_id();
        driver.session.call(&ArrayLevel { mipmapped: whole.id, level: index, array: id })?;
        let array = Array { id, context: whole.context, shape: whole.shape.level(index), level_of: Some(Arc::downgrade(&whole)) };
        let handle = ARRAYS.insert(Arc::new(array)).ok_or(Status::OUT_OF_MEMORY)?;
        told.push((index, handle));
        put(level, handle)
    }

    fn cuMipmappedArrayDestroy(handle: usize) {
        let driver = driver()?;
        let array = mipmapped(handle)?;
        array.context.synchronize()?;
        MIPMAPPED.remove(handle).ok_or(Status::INVALID_HANDLE)?;
        for (_, level) in lock(&array.told).drain(..) {
            ARRAYS.remove(level);
        }
        driver.session.append(&ArrayDestroy { array: array.id }).map(|_| ())
    }

    fn cuMipmappedArrayGetMemoryRequirements(to: *mut Requirements, array: usize, device: i32) {
        let array = mipmapped(array)?;
        requirements(array.id, &array.shape, device, to)
    }

    fn cuMemcpyHtoA_v2 / cuMemcpyHtoA_v2_ptds(array: usize, offset: usize, host: usize, bytes: usize) |pt| {
        Copier::new(0, pt, Mode::Sync)?.row(array, offset, host as u64, bytes, true)
    }

    fn cuMemcpyHtoAAsync_v2 / cuMemcpyHtoAAsync_v2_ptsz(array: usize, offset: usize, host: usize, bytes: usize, stream: usize) |pt| {
        Copier::new(stream, pt, Mode::Async)?.row(array, offset, host as u64, bytes, true)
    }

    fn cuMemcpyAtoH_v2 / cuMemcpyAtoH_v2_ptds(host: usize, array: usize, offset: usize, bytes: usize) |pt| {
        Copier::new(0, pt, Mode::Sync)?.row(array, offset, host as u64, bytes, false)
    }

    fn cuMemcpyAtoHAsync_v2 / cuMemcpyAtoHAsync_v2_ptsz(host: usize, array: usize, offset: usize, bytes: usize, stream: usize) |pt| {
        Copier::new(stream, pt, Mode::Async)?.row(array, offset, host as u64, bytes, false)
    }

    fn cuMemcpyDtoA_v2 / cuMemcpyDtoA_v2_ptds(array: usize, offset: usize, device: u64, bytes: usize) |pt| {
        Copier::new(0, pt, Mode::Sync)?.row(array, offset, device, bytes, true)
    }

    fn cuMemcpyAtoD_v2 / cuMemcpyAtoD_v2_ptds(device: u64, array: usize, offset: usize, bytes: usize) |pt| {
        Copier::new(0, pt, Mode::Sync)?.row(array, offset, device, bytes, false)
    }

    fn cuMemcpyAtoA_v2 / cuMemcpyAtoA_v2_ptds(dst: usize, dst_offset: usize, src: usize, src_offset: usize, bytes: usize) |pt| {
        let end = |array, offset: usize| Ok::<_, Status>(End::Array(of(array)?, [offset as u64, 0, 0]));
        let (dst, src) = (end(dst, dst_offset)?, end(src, src_offset)?);
        if bytes == 0 {
            return Ok(());
        }
        Copier::new(0, pt, Mode::Sync)?.with_array(&dst, &src, [bytes as u64, 1, 1])
    }
}
