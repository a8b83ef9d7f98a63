//! Arrays, textures and surfaces.

use cudarc::driver::sys::CUmemorytype;
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::array::*;
use protocol::ops::copy::Pitched;

use super::Cuda;
use super::api::{
    CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY3D_DESCRIPTOR, CUarray, CUmipmappedArray, ResourceDesc,
    TextureDesc, ViewDesc,
};
use super::row_copies::{blank, slices_at_once};
use super::streams::Place;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::{AnyArray, CopyEnd, GpuArrays, TextureSource};
use crate::driver::rows::Rows;

/// `CU_RESOURCE_TYPE_ARRAY`.
const OF_ARRAY: u32 = 0;
/// `CU_RESOURCE_TYPE_MIPMAPPED_ARRAY`.
const OF_MIPMAPPED: u32 = 1;

/// An array's handle.
pub struct CudaArray(CUarray);

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CudaArray {}

#[cfg(test)]
impl CudaArray {
    /// One that no driver has made.
    pub fn fake() -> CudaArray {
        CudaArray(std::ptr::null_mut())
    }
}

/// A mipmapped array's handle.
pub struct CudaMipmapped(CUmipmappedArray);

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CudaMipmapped {}

fn description(shape: &ArrayShape) -> Result<CUDA_ARRAY3D_DESCRIPTOR> {
    let size = |n: u64| usize::try_from(n).map_err(|_| Status::INVALID_VALUE);
    Ok(CUDA_ARRAY3D_DESCRIPTOR {
        width: size(shape.width)?,
        height: size(shape.height)?,
        depth: size(shape.depth)?,
        format: shape.format,
        channels: shape.channels,
        flags: shape.flags,
    })
}

fn resource(source: &TextureSource<'_, Cuda>) -> ResourceDesc {
    let mut desc = ResourceDesc::default();
    match source {
        TextureSource::Array { array, .. } => {
            desc.kind = OF_ARRAY;
            desc.words[0] = array.0 as u64;
        }
        TextureSource::Mipmapped { array, .. } => {
            desc.kind = OF_MIPMAPPED;
            desc.words[0] = array.0 as u64;
        }
        TextureSource::Memory { resource: r, memory, is_linear } => {
            desc.kind = r.kind;
            desc.words[0] = r.address;
            desc.words[1] = u64::from(r.format) | u64::from(r.channels) << 32;
            let sizes = if *is_linear { [memory.width, 0, 0] } else { [r.width, r.height, r.pitch] };
            desc.words[2..5].copy_from_slice(&sizes);
        }
    }
    desc
}

impl GpuArrays for Cuda {
    type Array = CudaArray;
    type Mipmapped = CudaMipmapped;

    fn array_bytes(&self, shape: &ArrayShape, levels: u32) -> Result<u64> {
        shape.bytes_of_levels(levels.max(1)).ok_or(Status::INVALID_VALUE)
    }

    fn make_array(&mut self, context: ContextId, shape: &ArrayShape, _bytes: u64) -> Result<CudaArray> {
        let desc = description(shape)?;
        let mut handle: CUarray = std::ptr::null_mut();
        // SAFETY: a complete description; writes a handle.
        let made = unsafe { self.api.array_create(&mut handle, &desc) };
        self.note(context, made).map(|()| CudaArray(handle))
    }

    fn make_mipmapped(
        &mut self,
        context: ContextId,
        shape: &ArrayShape,
        levels: u32,
        _bytes: u64,
    ) -> Result<CudaMipmapped> {
        let desc = description(shape)?;
        let mut handle: CUmipmappedArray = std::ptr::null_mut();
        // SAFETY: a complete description; writes a handle.
        let made = unsafe { self.api.mipmapped_create(&mut handle, &desc, levels) };
        self.note(context, made).map(|()| CudaMipmapped(handle))
    }

    fn array_level(
        &mut self,
        context: ContextId,
        array: &CudaMipmapped,
        _shape: &ArrayShape,
        level: u32,
    ) -> Result<CudaArray> {
        let mut handle: CUarray = std::ptr::null_mut();
        // SAFETY: a live handle; writes a handle.
        let found = unsafe { self.api.mipmapped_level(&mut handle, array.0, level) };
        self.note(context, found).map(|()| CudaArray(handle))
    }

    fn destroy_array(&mut self, context: ContextId, array: CudaArray) -> Result {
        // SAFETY: removed from the session's table. If the client hasn't waited for work that uses it, the
        // driver does.
        let destroyed = unsafe { self.api.array_destroy(array.0) };
        self.note(context, destroyed)
    }

    fn destroy_mipmapped(&mut self, context: ContextId, array: CudaMipmapped) -> Result {
        // SAFETY: removed from the session's table. If the client hasn't waited for work that uses it, the
        // driver does.
        let destroyed = unsafe { self.api.mipmapped_destroy(array.0) };
        self.note(context, destroyed)
    }

    fn copy_array(
        &self,
        _cx: &Call,
        place: &Place,
        src: &CopyEnd<'_, CudaArray>,
        dst: &CopyEnd<'_, CudaArray>,
        extent: [u64; 3],
    ) -> Result {
        let [width, height, depth] = extent;
        // An array's slices can always be copied at once, like packed ones.
        let packed = Pitched { address: 0, pitch: width, slice: width * height };
        let rows = |end: &CopyEnd<'_, CudaArray>| match end {
            CopyEnd::Array { .. } => Rows::of(&packed, extent),
            CopyEnd::Memory { memory, .. } => Rows::of(memory, extent),
        };
        // Unlike in a three-dimensional copy, the slice pitch need not be a multiple of the row pitch.
        let (slices, from, to) = slices_at_once(&rows(src), &rows(dst));
        for z in (0..depth).step_by(slices) {
            let mut copy = blank();
            let of_array = |at: &[u64; 3]| (at[0] as usize, at[1] as usize, (at[2] + z) as usize);
            match src {
                CopyEnd::Array { array, at, .. } => {
                    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
                    copy.srcArray = array.0;
                    (copy.srcXInBytes, copy.srcY, copy.srcZ) = of_array(at);
                }
                CopyEnd::Memory { memory, .. } => {
                    copy.srcDevice = memory.address + z * memory.slice;
                    copy.srcPitch = memory.pitch.max(width) as usize;
                    copy.srcHeight = from;
                }
            }
            match dst {
                CopyEnd::Array { array, at, .. } => {
                    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_ARRAY;
                    copy.dstArray = array.0;
                    (copy.dstXInBytes, copy.dstY, copy.dstZ) = of_array(at);
                }
                CopyEnd::Memory { memory, .. } => {
                    copy.dstDevice = memory.address + z * memory.slice;
                    copy.dstPitch = memory.pitch.max(width) as usize;
                    copy.dstHeight = to;
                }
            }
            (copy.WidthInBytes, copy.Height, copy.Depth) = (width as usize, height as usize, slices);
            // SAFETY: arrays and ranges of this session; the session has checked that the box lies inside
            // each.
            let copied = unsafe { self.api.copy_3d(&copy, place.stream) };
            self.note(place.context, copied)?;
        }
        Ok(())
    }

    fn make_texture(
        &self,
        context: ContextId,
        source: &TextureSource<'_, Cuda>,
        s: &Sampling,
        view: Option<&View>,
    ) -> Result<u64> {
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
        let view = view.map(|view| ViewDesc {
            format: view.format,
            extent: view.extent.map(|size| size as usize),
            levels: view.levels,
            layers: view.layers,
            reserved: [0; 16],
        });
        let mut handle = 0;
        let view = view.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: complete descriptions of this session's memory and arrays; writes a handle.
        let made = unsafe { self.api.texture_create(&mut handle, &resource(source), &texture, view) };
        self.note(context, made).map(|()| handle)
    }

    fn destroy_texture(&mut self, context: ContextId, _device: u32, texture: u64) -> Result {
        // SAFETY: belongs to this session, and removed from its table.
        let destroyed = unsafe { self.api.texture_destroy(texture) };
        self.note(context, destroyed)
    }

    fn make_surface(&self, context: ContextId, array: &CudaArray, shape: &ArrayShape) -> Result<u64> {
        let desc = resource(&TextureSource::Array { array, shape });
        let mut handle = 0;
        // SAFETY: a complete description of this session's array; writes a handle.
        let made = unsafe { self.api.surface_create(&mut handle, &desc) };
        self.note(context, made).map(|()| handle)
    }

    fn destroy_surface(&mut self, context: ContextId, _device: u32, surface: u64) -> Result {
        // SAFETY: belongs to this session, and removed from its table.
        let destroyed = unsafe { self.api.surface_destroy(surface) };
        self.note(context, destroyed)
    }

    fn linear_width(&mut self, device: u32, format: u32, channels: u32) -> Result<u64> {
        let device = self.device(device)?.handle;
        let mut width = 0;
        // SAFETY: writes one integer.
        unsafe { self.api.texture_linear_width(&mut width, format, channels, device) }?;
        Ok(width as u64)
    }

    fn array_requirements(
        &self,
        context: ContextId,
        device: u32,
        array: AnyArray<'_, Cuda>,
        _shape: &ArrayShape,
        _levels: u32,
    ) -> Result<(u64, u64)> {
        let device = self.device(device)?.handle;
        let mut found = CUDA_ARRAY_MEMORY_REQUIREMENTS { size: 0, alignment: 0, reserved: [0; 4] };
        // SAFETY: live handles; writes one structure.
        let asked = unsafe {
            match array {
                AnyArray::Plain(array) => self.api.array_requirements(&mut found, array.0, device),
                AnyArray::Mipmapped(array) => self.api.mipmapped_requirements(&mut found, array.0, device),
            }
        };
        self.note(context, asked)?;
        Ok((found.size as u64, found.alignment as u64))
    }
}
