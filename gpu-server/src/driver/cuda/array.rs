//! Arrays, textures and surfaces.
//!
//! The driver's handles stay here: a client names arrays by its own numbers. Textures and surfaces it names by the driver's numbers, which kernels need; those that are not
//! this session's are refused.

use std::collections::HashMap;

use cudarc::driver::sys::CUmemorytype;
use protocol::Status;
use protocol::handle::{ArrayId, ContextId};
use protocol::ops::Answer;
use protocol::ops::array::*;

use super::Cuda;
use super::api::{
    CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY3D_DESCRIPTOR, CUarray, CUmipmappedArray, ResourceDesc,
    TextureDesc, ViewDesc,
};
use super::copies::blank;
use crate::driver::call::Call;
use crate::driver::quota::Charge;
use crate::driver::rows::Rows;
use crate::driver::session::Session;

/// `CUresourcetype`.
const OF_ARRAY: u32 = 0;
const OF_MIPMAPPED: u32 = 1;
const OF_LINEAR: u32 = 2;
const OF_ROWS: u32 = 3;

/// What a session has of this chapter.
#[derive(Default)]
pub(super) struct Arrays {
    arrays: HashMap<u32, Array>,
    /// Context of each texture.
    textures: HashMap<u64, u32>,
    /// Context of each surface.
    surfaces: HashMap<u64, u32>,
}

struct Array {
    context: u32,
    shape: ArrayShape,
    /// The elements' bytes; none for a level, whose elements are its mipmapped array's.
    _charge: Option<Charge>,
    kind: Kind,
}

enum Kind {
    Plain(CUarray),
    /// Of so many levels; a bit for each that has a name.
    Mipmapped {
        handle: CUmipmappedArray,
        levels: u32,
        named: u64,
    },
    /// A level of the mipmapped array of this name.
    Level {
        handle: CUarray,
        of: u32,
        level: u32,
    },
}

impl Arrays {
    /// A context's arrays are gone, and all that was made of them.
    pub(super) fn forget(&mut self, context: u32) {
        self.arrays.retain(|_, array| array.context != context);
        self.textures.retain(|_, of| *of != context);
        self.surfaces.retain(|_, of| *of != context);
    }

    /// Whether there is room for one more, of whatever kind.
    fn may_grow(&self) -> Result<(), Status> {
        let most = self.arrays.len().max(self.textures.len()).max(self.surfaces.len());
        if most >= MOST { Err(Status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    fn get(&self, id: ArrayId) -> Result<&Array, Status> {
        self.arrays.get(&id.0).ok_or(Status::INVALID_HANDLE)
    }

    /// An array that has elements of its own, and its shape.
    fn plain(&self, id: ArrayId) -> Result<(CUarray, &ArrayShape), Status> {
        let array = self.get(id)?;
        match array.kind {
            Kind::Plain(handle) | Kind::Level { handle, .. } => Ok((handle, &array.shape)),
            Kind::Mipmapped { .. } => Err(Status::INVALID_HANDLE),
        }
    }
}

/// Whether a box lies inside an array.
fn inside(shape: &ArrayShape, at: [u64; 3], extent: [u64; 3]) -> bool {
    shape
        .extent()
        .is_some_and(|whole| (0..3).all(|d| at[d].checked_add(extent[d]).is_some_and(|end| end <= whole[d])))
}

impl Session<Cuda> {
    fn resource(&self, context: ContextId, r: &Resource) -> Result<ResourceDesc, Status> {
        let mut desc = ResourceDesc { kind: r.kind, ..ResourceDesc::default() };
        match r.kind {
            OF_ARRAY | OF_MIPMAPPED => {
                let array = self.arrays.get(r.array)?;
                if array.context != context.0 {
                    return Err(Status::INVALID_HANDLE);
                }
                desc.words[0] = match array.kind {
                    Kind::Plain(handle) | Kind::Level { handle, .. } if r.kind == OF_ARRAY => handle as u64,
                    Kind::Mipmapped { handle, .. } if r.kind == OF_MIPMAPPED => handle as u64,
                    _ => return Err(Status::INVALID_VALUE),
                };
            }
            OF_LINEAR | OF_ROWS => {
                let shape = ArrayShape {
                    width: r.width,
                    height: r.height,
                    depth: 0,
                    format: r.format,
                    channels: r.channels,
                    flags: 0,
                };
                let [row, rows, _] = shape.extent().ok_or(Status::INVALID_VALUE)?;
                let pitch = if r.kind == OF_LINEAR { row } else { r.pitch };
                let span =
                    Rows { at: r.address, pitch, slice: 0, width: row, height: rows, depth: 1 }.sizes()?.1;
                self.check_range(r.address, span, 0)?;
                desc.words[0] = r.address;
                desc.words[1] = u64::from(r.format) | u64::from(r.channels) << 32;
                let sizes = if r.kind == OF_LINEAR { [row, 0, 0] } else { [r.width, r.height, r.pitch] };
                desc.words[2..5].copy_from_slice(&sizes);
            }
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(desc)
    }
}

impl ArrayOps<Call> for Session<Cuda> {
    fn array_create(&mut self, cx: &mut Call, op: ArrayCreate) -> Result<Answer<ArrayCreateReply>, Status> {
        cx.context = op.context;
        self.arrays.may_grow()?;
        if self.arrays.arrays.contains_key(&op.array.0)
            || op.shape.flags & !flag::KNOWN != 0
            || op.levels > op.shape.most_levels()
        {
            return Err(Status::INVALID_VALUE);
        }
        let all = op.shape.bytes_of_levels(op.levels.max(1)).ok_or(Status::INVALID_VALUE)?;
        let bytes = if op.shape.flags & flag::DEFERRED_MAPPING == 0 { all } else { 0 };
        let charge = self.quota.charge(bytes)?;
        self.enter_context(op.context)?;
        let size = |n: u64| usize::try_from(n).map_err(|_| Status::INVALID_VALUE);
        let desc = CUDA_ARRAY3D_DESCRIPTOR {
            width: size(op.shape.width)?,
            height: size(op.shape.height)?,
            depth: size(op.shape.depth)?,
            format: op.shape.format,
            channels: op.shape.channels,
            flags: op.shape.flags,
        };
        let kind = if op.levels == 0 {
            let mut handle: CUarray = std::ptr::null_mut();
            // SAFETY: a whole description; writes a handle.
            let made = unsafe { self.api.array_create(&mut handle, &desc) };
            self.note(op.context, made)?;
            Kind::Plain(handle)
        } else {
            let mut handle: CUmipmappedArray = std::ptr::null_mut();
            // SAFETY: as above.
            let made = unsafe { self.api.mipmapped_create(&mut handle, &desc, op.levels) };
            self.note(op.context, made)?;
            Kind::Mipmapped { handle, levels: op.levels, named: 0 }
        };
        let array = Array { context: op.context.0, shape: op.shape, _charge: Some(charge), kind };
        self.arrays.arrays.insert(op.array.0, array);
        Ok(Answer::Now(ArrayCreateReply {}))
    }

    fn array_level(&mut self, cx: &mut Call, op: ArrayLevel) -> Result<Answer<ArrayLevelReply>, Status> {
        self.arrays.may_grow()?;
        let whole = self.arrays.get(op.mipmapped)?;
        cx.context = ContextId(whole.context);
        let Kind::Mipmapped { handle, levels, named } = whole.kind else {
            return Err(Status::INVALID_HANDLE);
        };
        // A level has one name: so there are no more names than levels.
        if op.level >= levels || named >> op.level & 1 != 0 || self.arrays.arrays.contains_key(&op.array.0) {
            return Err(Status::INVALID_VALUE);
        }
        let (context, shape) = (whole.context, whole.shape.level(op.level));
        self.enter_context(cx.context)?;
        let mut level: CUarray = std::ptr::null_mut();
        // SAFETY: a live handle; writes a handle.
        let found = unsafe { self.api.mipmapped_level(&mut level, handle, op.level) };
        self.note(cx.context, found)?;
        let array = Array {
            context,
            shape,
            _charge: None,
            kind: Kind::Level { handle: level, of: op.mipmapped.0, level: op.level },
        };
        self.arrays.arrays.insert(op.array.0, array);
        let whole = self.arrays.arrays.get_mut(&op.mipmapped.0);
        if let Some(Array { kind: Kind::Mipmapped { named, .. }, .. }) = whole {
            *named |= 1 << op.level;
        }
        Ok(Answer::Now(ArrayLevelReply {}))
    }

    fn array_destroy(&mut self, cx: &mut Call, op: ArrayDestroy) -> Result<(), Status> {
        cx.context = ContextId(self.arrays.get(op.array)?.context);
        self.enter_context(cx.context)?;
        let array = self.arrays.arrays.remove(&op.array.0).ok_or(Status::INVALID_HANDLE)?;
        if let Kind::Level { of, level, .. } = array.kind
            && let Some(Array { kind: Kind::Mipmapped { named, .. }, .. }) = self.arrays.arrays.get_mut(&of)
        {
            *named &= !(1 << level);
        }
        // SAFETY: out of the table; the client has waited for the work that uses it, and the driver waits for what a client that lies has not.
        let destroyed = unsafe {
            match array.kind {
                Kind::Plain(handle) => self.api.array_destroy(handle),
                Kind::Mipmapped { handle, .. } => self.api.mipmapped_destroy(handle),
                // The mipmapped array's.
                Kind::Level { .. } => Ok(()),
            }
        };
        self.arrays
            .arrays
            .retain(|_, level| !matches!(level.kind, Kind::Level { of, .. } if of == op.array.0));
        self.note(cx.context, destroyed)
    }

    fn memcpy_array(&mut self, cx: &mut Call, op: MemcpyArray) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let [width, height, depth] = op.extent;
        if width == 0 || height == 0 || depth == 0 {
            return Ok(());
        }
        let mut ends = Vec::with_capacity(2);
        for end in [&op.src, &op.dst] {
            match end.array {
                Some(id) => {
                    let (handle, shape) = self.arrays.plain(id)?;
                    // A copy to an array that waits for memory would end the context's work.
                    if shape.flags & flag::DEFERRED_MAPPING != 0 || !inside(shape, end.at, op.extent) {
                        return Err(Status::INVALID_VALUE);
                    }
                    ends.push(handle);
                }
                None => {
                    self.check_range(end.memory.address, Rows::of(&end.memory, op.extent).sizes()?.1, 0)?;
                    ends.push(std::ptr::null_mut());
                }
            }
        }
        // A slice at a time: the distance of slices need not be a multiple of the rows' pitch, as one three-dimensional copy would have it.
        for z in 0..depth {
            let mut copy = blank();
            let memory = |end: &ArrayPlace| {
                (end.memory.address + z * end.memory.slice, end.memory.pitch.max(width) as usize)
            };
            let at = |end: &ArrayPlace| (end.at[0] as usize, end.at[1] as usize, (end.at[2] + z) as usize);
            if op.src.array.is_some() {
                copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
                copy.srcArray = ends[0];
                (copy.srcXInBytes, copy.srcY, copy.srcZ) = at(&op.src);
            } else {
                (copy.srcDevice, copy.srcPitch) = memory(&op.src);
                copy.srcHeight = height as usize;
            }
            if op.dst.array.is_some() {
                copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
                copy.dstArray = ends[1];
                (copy.dstXInBytes, copy.dstY, copy.dstZ) = at(&op.dst);
            } else {
                (copy.dstDevice, copy.dstPitch) = memory(&op.dst);
                copy.dstHeight = height as usize;
            }
            (copy.WidthInBytes, copy.Height, copy.Depth) = (width as usize, height as usize, 1);
            // SAFETY: arrays and ranges of this session; the box was found to lie inside each.
            let copied = unsafe { self.api.copy_3d(&copy, place.stream) };
            self.note(place.context, copied)?;
        }
        Ok(())
    }

    fn texture_create(
        &mut self,
        cx: &mut Call,
        op: TextureCreate,
    ) -> Result<Answer<TextureCreateReply>, Status> {
        cx.context = op.context;
        self.arrays.may_grow()?;
        self.enter_context(op.context)?;
        let resource = self.resource(op.context, &op.resource)?;
        let s = &op.sampling;
        let texture = TextureDesc {
            address: s.address,
            filter: s.filter,
            flags: s.flags,
            anisotropy: s.anisotropy,
            level_filter: s.level_filter,
            level_bias: s.level_bias,
            level_clamp: s.level_clamp,
            border: s.border,
            reserved: [0; 12],
        };
        let view = op.view.as_ref().map(|view| ViewDesc {
            format: view.format,
            extent: view.extent.map(|size| size as usize),
            levels: view.levels,
            layers: view.layers,
            reserved: [0; 16],
        });
        let mut handle = 0;
        let view = view.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: whole descriptions of this session's memory and arrays; writes a handle.
        let made = unsafe { self.api.texture_create(&mut handle, &resource, &texture, view) };
        self.note(op.context, made)?;
        self.arrays.textures.insert(handle, op.context.0);
        Ok(Answer::Now(TextureCreateReply { texture: handle }))
    }

    fn texture_destroy(&mut self, cx: &mut Call, op: TextureDestroy) -> Result<(), Status> {
        cx.context = ContextId(self.arrays.textures.remove(&op.texture).ok_or(Status::INVALID_HANDLE)?);
        self.enter_context(cx.context)?;
        // SAFETY: of this session, and out of its table.
        let destroyed = unsafe { self.api.texture_destroy(op.texture) };
        self.note(cx.context, destroyed)
    }

    fn surface_create(
        &mut self,
        cx: &mut Call,
        op: SurfaceCreate,
    ) -> Result<Answer<SurfaceCreateReply>, Status> {
        cx.context = op.context;
        self.arrays.may_grow()?;
        self.enter_context(op.context)?;
        let array = self.arrays.get(op.array)?;
        if array.context != op.context.0 {
            return Err(Status::INVALID_VALUE);
        }
        let mut resource = ResourceDesc { kind: OF_ARRAY, ..ResourceDesc::default() };
        resource.words[0] = self.arrays.plain(op.array)?.0 as u64;
        let mut handle = 0;
        // SAFETY: a whole description of this session's array; writes a handle.
        let made = unsafe { self.api.surface_create(&mut handle, &resource) };
        self.note(op.context, made)?;
        self.arrays.surfaces.insert(handle, op.context.0);
        Ok(Answer::Now(SurfaceCreateReply { surface: handle }))
    }

    fn surface_destroy(&mut self, cx: &mut Call, op: SurfaceDestroy) -> Result<(), Status> {
        cx.context = ContextId(self.arrays.surfaces.remove(&op.surface).ok_or(Status::INVALID_HANDLE)?);
        self.enter_context(cx.context)?;
        // SAFETY: of this session, and out of its table.
        let destroyed = unsafe { self.api.surface_destroy(op.surface) };
        self.note(cx.context, destroyed)
    }

    fn texture_linear_width(
        &mut self,
        cx: &mut Call,
        op: TextureLinearWidth,
    ) -> Result<Answer<TextureLinearWidthReply>, Status> {
        cx.context = ContextId(op.device);
        let device = self.device(op.device)?.handle;
        let mut width = 0;
        // SAFETY: writes one integer.
        unsafe { self.api.texture_linear_width(&mut width, op.format, op.channels, device) }?;
        Ok(Answer::Now(TextureLinearWidthReply { width: width as u64 }))
    }

    fn array_requirements(
        &mut self,
        cx: &mut Call,
        op: ArrayRequirements,
    ) -> Result<Answer<ArrayRequirementsReply>, Status> {
        let array = self.arrays.get(op.array)?;
        cx.context = ContextId(array.context);
        let device = self.device(self.context(cx.context)?.device)?.handle;
        let mut found = CUDA_ARRAY_MEMORY_REQUIREMENTS { size: 0, alignment: 0, reserved: [0; 4] };
        // SAFETY: live handles; writes one structure.
        let asked = unsafe {
            match array.kind {
                Kind::Plain(handle) | Kind::Level { handle, .. } => {
                    self.api.array_requirements(&mut found, handle, device)
                }
                Kind::Mipmapped { handle, .. } => self.api.mipmapped_requirements(&mut found, handle, device),
            }
        };
        self.note(cx.context, asked)?;
        Ok(Answer::Now(ArrayRequirementsReply { size: found.size as u64, alignment: found.alignment as u64 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_that_reaches_out_of_the_array_is_not_inside() {
        let shape = ArrayShape { width: 8, height: 4, depth: 0, format: 0x20, channels: 1, flags: 0 };
        assert!(inside(&shape, [0, 0, 0], [32, 4, 1]));
        assert!(inside(&shape, [28, 3, 0], [4, 1, 1]));
        for (at, extent) in [
            ([4, 0, 0], [32, 4, 1]),
            ([0, 1, 0], [32, 4, 1]),
            ([0, 0, 1], [1, 1, 1]),
            ([u64::MAX, 0, 0], [2, 1, 1]),
            ([0, 0, 0], [33, 1, 1]),
        ] {
            assert!(!inside(&shape, at, extent), "{at:?} {extent:?}");
        }
    }
}
