//! Arrays, textures and surfaces: elements row after row in memory of the device's own, which no client can name.

use std::collections::HashMap;

use protocol::Status;
use protocol::handle::{ArrayId, ContextId};
use protocol::ops::Answer;
use protocol::ops::array::*;
use protocol::ops::copy::{CopyOps, MemcpyDtoD3D, Pitched};
use software_gpu::{AddressMode, ChannelFormat, Image, Sampler};

use super::{Software, code};
use crate::driver::call::Call;
use crate::driver::rows::Rows;

/// `CUresourcetype`.
const OF_ARRAY: u32 = 0;
const OF_LINEAR: u32 = 2;
const OF_ROWS: u32 = 3;
/// `CU_TRSF_…`.
const READ_AS_INTEGER: u32 = 1;
const NORMALIZED_COORDINATES: u32 = 2;
const KNOWN_FLAGS: u32 = READ_AS_INTEGER | NORMALIZED_COORDINATES | DISABLE_TRILINEAR;
const DISABLE_TRILINEAR: u32 = 0x20;
/// Texels of a texture of linear memory: what CUDA reports for every GPU of today.
const MAX_LINEAR: u64 = 1 << 28;

/// What a session has of this chapter.
#[derive(Default)]
pub(super) struct Arrays {
    arrays: HashMap<u32, Array>,
    /// Context of each texture and surface; each is of one device only.
    handles: HashMap<(u32, u64), u32>,
}

struct Array {
    context: u32,
    device: u32,
    shape: ArrayShape,
    address: u64,
    bytes: u64,
}

impl Arrays {
    pub(super) fn bytes(&self) -> u64 {
        self.arrays.values().map(|array| array.bytes).sum()
    }

    fn get(&self, id: ArrayId) -> Result<&Array, Status> {
        self.arrays.get(&id.0).ok_or(Status::INVALID_HANDLE)
    }
}

impl Array {
    /// Bytes of a row, rows, and slices.
    fn extent(&self) -> [u64; 3] {
        // Checked when the array was made.
        self.shape.extent().unwrap_or_default()
    }

    /// A box in it as memory, if it lies inside.
    fn memory(&self, at: [u64; 3], extent: [u64; 3]) -> Result<Pitched, Status> {
        let whole = self.extent();
        let inside = (0..3).all(|d| at[d].checked_add(extent[d]).is_some_and(|end| end <= whole[d]));
        if !inside {
            return Err(Status::INVALID_VALUE);
        }
        let (pitch, slice) = (whole[0], whole[0] * whole[1]);
        Ok(Pitched { address: self.address + at[2] * slice + at[1] * pitch + at[0], pitch, slice })
    }

    fn image(&self) -> Result<Image, Status> {
        let [pitch, rows, slices] = self.extent();
        let layered = self.shape.flags & (flag::LAYERED | flag::CUBEMAP) != 0;
        let (planes, layers) = if layered { (1, slices) } else { (slices, 1) };
        let size = |n: u64| u32::try_from(n).map_err(|_| Status::INVALID_VALUE);
        Ok(Image {
            address: self.address,
            size: [size(self.shape.width)?, size(rows)?, size(planes)?],
            layers: size(layers)?,
            row_pitch: pitch,
            slice_pitch: pitch * rows,
            format: format(self.shape.format)?,
            channels: self.shape.channels,
        })
    }
}

fn format(format: u32) -> Result<ChannelFormat, Status> {
    Ok(match format {
        0x01 => ChannelFormat::Unsigned(8),
        0x02 => ChannelFormat::Unsigned(16),
        0x03 => ChannelFormat::Unsigned(32),
        0x08 => ChannelFormat::Signed(8),
        0x09 => ChannelFormat::Signed(16),
        0x0a => ChannelFormat::Signed(32),
        0x10 => ChannelFormat::Float(16),
        0x20 => ChannelFormat::Float(32),
        _ => return Err(Status::NOT_SUPPORTED),
    })
}

fn sampler(s: &Sampling, format: ChannelFormat) -> Result<Sampler, Status> {
    // sRGB, seamless cube maps, anisotropy and levels are not made here.
    if s.flags & !KNOWN_FLAGS != 0 || s.anisotropy > 1 {
        return Err(Status::NOT_SUPPORTED);
    }
    let mode = |mode: u32| {
        Ok(match mode {
            0 => AddressMode::Wrap,
            1 => AddressMode::Clamp,
            2 => AddressMode::Mirror,
            3 => AddressMode::Border,
            _ => return Err(Status::INVALID_VALUE),
        })
    };
    let whole = !matches!(format, ChannelFormat::Float(_));
    let normalized_read = whole && s.flags & READ_AS_INTEGER == 0 && format.bits() < 32;
    let linear = match s.filter {
        0 => false,
        1 if whole && !normalized_read => return Err(Status::INVALID_VALUE),
        1 => true,
        _ => return Err(Status::INVALID_VALUE),
    };
    Ok(Sampler {
        address: [mode(s.address[0])?, mode(s.address[1])?, mode(s.address[2])?],
        linear,
        normalized: s.flags & NORMALIZED_COORDINATES != 0,
        normalized_read,
        border: s.border.map(f32::from_bits),
        ..Sampler::default()
    })
}

impl Software {
    /// A context's arrays are gone, and all that was made of them.
    pub(super) fn forget_arrays(&mut self, context: u32) {
        let gone: Vec<Array> =
            self.arrays.arrays.extract_if(|_, a| a.context == context).map(|(_, a)| a).collect();
        for array in gone {
            self.free(&array);
        }
        let handles: Vec<(u32, u64)> =
            self.arrays.handles.extract_if(|_, of| *of == context).map(|(handle, _)| handle).collect();
        for (device, handle) in handles {
            if let Ok(device) = self.device(device) {
                // Made here; nothing else destroys it.
                let _ = device.gpu.destroy_texture(handle);
            }
        }
    }

    fn free(&self, array: &Array) {
        if let Ok(device) = self.device(array.device)
            && let Err(error) = device.gpu.free(array.address)
        {
            tracing::warn!("an array's memory: {error}");
        }
    }

    fn image(&self, context: ContextId, r: &Resource) -> Result<Image, Status> {
        let device = self.context(context)?.device;
        match r.kind {
            OF_ARRAY => {
                let array = self.arrays.get(r.array)?;
                if array.context != context.0 {
                    return Err(Status::INVALID_HANDLE);
                }
                array.image()
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
                self.checked(r.address, span, device)?;
                let size = |n: u64| u32::try_from(n).map_err(|_| Status::INVALID_VALUE);
                Ok(Image {
                    address: r.address,
                    size: [size(r.width)?, size(rows)?, 1],
                    layers: 1,
                    row_pitch: pitch,
                    slice_pitch: pitch.saturating_mul(rows),
                    format: format(r.format)?,
                    channels: r.channels,
                })
            }
            1 => Err(Status::NOT_SUPPORTED),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn end_handle(&mut self, cx: &mut Call, handle: u64) -> Result<(), Status> {
        let found = self.arrays.handles.iter().find(|((_, known), _)| *known == handle);
        let (key, context) = found.map(|(key, context)| (*key, *context)).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(context);
        self.arrays.handles.remove(&key);
        self.device(key.0)?.gpu.destroy_texture(handle).map_err(|e| code(&e))
    }
}

impl ArrayOps<Call> for Software {
    fn array_create(&mut self, cx: &mut Call, op: ArrayCreate) -> Result<Answer<ArrayCreateReply>, Status> {
        cx.context = op.context;
        let device = self.context(op.context)?.device;
        if self.arrays.arrays.contains_key(&op.array.0) || op.shape.flags & !flag::KNOWN != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let bytes = op.shape.bytes().ok_or(Status::INVALID_VALUE)?;
        if op.levels != 0 || op.shape.flags & flag::CUBEMAP != 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        let held = super::super::Backend::device_memory(self);
        if self.memory_limit > 0 && bytes > self.memory_limit.saturating_sub(held) {
            return Err(Status::OUT_OF_MEMORY);
        }
        let address = self.device(device)?.gpu.allocate(bytes).map_err(|e| code(&e))?;
        let array = Array { context: op.context.0, device, shape: op.shape, address, bytes };
        self.arrays.arrays.insert(op.array.0, array);
        Ok(Answer::Now(ArrayCreateReply {}))
    }

    fn array_destroy(&mut self, cx: &mut Call, op: ArrayDestroy) -> Result<(), Status> {
        cx.context = ContextId(self.arrays.get(op.array)?.context);
        let array = self.arrays.arrays.remove(&op.array.0).ok_or(Status::INVALID_HANDLE)?;
        self.free(&array);
        Ok(())
    }

    fn memcpy_array(&mut self, cx: &mut Call, op: MemcpyArray) -> Result<(), Status> {
        let memory = |end: &ArrayPlace| match end.array {
            Some(id) => self.arrays.get(id)?.memory(end.at, op.extent),
            None => Ok(end.memory.clone()),
        };
        let (src, dst) = (memory(&op.src)?, memory(&op.dst)?);
        self.memcpy_dtod_3d(cx, MemcpyDtoD3D { stream: op.stream, dst, src, extent: op.extent })
    }

    fn texture_create(
        &mut self,
        cx: &mut Call,
        op: TextureCreate,
    ) -> Result<Answer<TextureCreateReply>, Status> {
        cx.context = op.context;
        let image = self.image(op.context, &op.resource)?;
        if op.view.as_ref().is_some_and(|view| view.format != 0) {
            return Err(Status::NOT_SUPPORTED);
        }
        let sampler = sampler(&op.sampling, image.format)?;
        let device = self.context(op.context)?.device;
        let texture = self.device(device)?.gpu.create_texture(image, sampler).map_err(|e| code(&e))?;
        self.arrays.handles.insert((device, texture), op.context.0);
        Ok(Answer::Now(TextureCreateReply { texture }))
    }

    fn texture_destroy(&mut self, cx: &mut Call, op: TextureDestroy) -> Result<(), Status> {
        self.end_handle(cx, op.texture)
    }

    fn surface_create(
        &mut self,
        cx: &mut Call,
        op: SurfaceCreate,
    ) -> Result<Answer<SurfaceCreateReply>, Status> {
        cx.context = op.context;
        let array = self.arrays.get(op.array)?;
        if array.context != op.context.0 {
            return Err(Status::INVALID_VALUE);
        }
        let (image, device) = (array.image()?, array.device);
        let surface = self.device(device)?.gpu.create_surface(image).map_err(|e| code(&e))?;
        self.arrays.handles.insert((device, surface), op.context.0);
        Ok(Answer::Now(SurfaceCreateReply { surface }))
    }

    fn surface_destroy(&mut self, cx: &mut Call, op: SurfaceDestroy) -> Result<(), Status> {
        self.end_handle(cx, op.surface)
    }

    fn texture_linear_width(
        &mut self,
        _cx: &mut Call,
        op: TextureLinearWidth,
    ) -> Result<Answer<TextureLinearWidthReply>, Status> {
        self.device(op.device)?;
        format(op.format)?;
        Ok(Answer::Now(TextureLinearWidthReply { width: MAX_LINEAR }))
    }

    fn array_requirements(
        &mut self,
        cx: &mut Call,
        op: ArrayRequirements,
    ) -> Result<Answer<ArrayRequirementsReply>, Status> {
        let array = self.arrays.get(op.array)?;
        cx.context = ContextId(array.context);
        Ok(Answer::Now(ArrayRequirementsReply { size: array.bytes, alignment: 512 }))
    }
}
