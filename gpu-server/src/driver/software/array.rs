//! Arrays, textures and surfaces: elements row after row in memory of the device's own, which no client can name; levels of a mipmapped array one after the other.

use std::collections::HashMap;

use protocol::Status;
use protocol::handle::{ArrayId, ContextId};
use protocol::ops::Answer;
use protocol::ops::array::*;
use protocol::ops::copy::{CopyOps, MemcpyDtoD3D, Pitched};
use software_gpu::{AddressMode, ChannelFormat, Image, Sampler};

use super::{Software, code};
use crate::driver::call::Call;
use crate::driver::quota::Charge;
use crate::driver::rows::Rows;
use crate::driver::session::Session;

/// `CUresourcetype`.
const OF_ARRAY: u32 = 0;
const OF_MIPMAPPED: u32 = 1;
const OF_LINEAR: u32 = 2;
const OF_ROWS: u32 = 3;
/// `CU_TRSF_…`.
const READ_AS_INTEGER: u32 = 1;
const NORMALIZED_COORDINATES: u32 = 2;
const SRGB: u32 = 0x10;
const DISABLE_TRILINEAR: u32 = 0x20;
const SEAMLESS_CUBEMAP: u32 = 0x40;
const KNOWN_FLAGS: u32 =
    READ_AS_INTEGER | NORMALIZED_COORDINATES | SRGB | DISABLE_TRILINEAR | SEAMLESS_CUBEMAP;
/// Levels of a mipmapped array begin at multiples of this.
const LEVEL_ALIGN: u64 = 512;
/// What an array that has no memory needs is a multiple of this, as on NVIDIA's GPUs.
const MAP_ALIGN: u64 = 64 << 10;
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
    /// Of memory that is its own: a level has none, nor does an array whose memory is mapped later.
    charge: Option<Charge>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    /// Of so many levels; a bit for each that has a name.
    Mipmapped {
        levels: u32,
        named: u64,
    },
    /// A level of the mipmapped array of this name.
    Level {
        of: u32,
        level: u32,
    },
}

/// Bytes before a level of a mipmapped array; before the one after the last: of all of it.
fn before_level(shape: &ArrayShape, level: u32) -> Option<u64> {
    (0..level).try_fold(0u64, |sum, n| {
        sum.checked_add(shape.level(n).bytes()?)?.checked_next_multiple_of(LEVEL_ALIGN)
    })
}

impl Arrays {
    /// Whether there is room for one more, of whatever kind.
    fn may_grow(&self) -> Result<(), Status> {
        let full = self.arrays.len() >= MOST || self.handles.len() >= MOST;
        if full { Err(Status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    fn get(&self, id: ArrayId) -> Result<&Array, Status> {
        self.arrays.get(&id.0).ok_or(Status::INVALID_HANDLE)
    }

    /// An array that has elements of its own.
    fn plain(&self, id: ArrayId) -> Result<&Array, Status> {
        let array = self.get(id)?;
        if matches!(array.kind, Kind::Mipmapped { .. }) { Err(Status::INVALID_HANDLE) } else { Ok(array) }
    }
}

impl Array {
    /// Bytes of a row, rows, and slices.
    fn extent(&self) -> [u64; 3] {
        // Checked when the array was made.
        self.shape.extent().unwrap_or_default()
    }

    /// A level of a mipmapped array.
    fn level(&self, of: u32, level: u32) -> Result<Array, Status> {
        let Kind::Mipmapped { levels, .. } = self.kind else { return Err(Status::INVALID_HANDLE) };
        if level >= levels {
            return Err(Status::INVALID_VALUE);
        }
        let before = before_level(&self.shape, level).ok_or(Status::INVALID_VALUE)?;
        Ok(Array {
            shape: self.shape.level(level),
            address: self.address + before,
            charge: None,
            kind: Kind::Level { of, level },
            context: self.context,
            device: self.device,
        })
    }

    /// A box in it as memory, if it lies inside.
    fn memory(&self, at: [u64; 3], extent: [u64; 3]) -> Result<Pitched, Status> {
        if self.shape.flags & flag::DEFERRED_MAPPING != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let whole = self.extent();
        let inside = (0..3).all(|d| at[d].checked_add(extent[d]).is_some_and(|end| end <= whole[d]));
        if !inside {
            return Err(Status::INVALID_VALUE);
        }
        let (pitch, slice) = (whole[0], whole[0] * whole[1]);
        Ok(Pitched { address: self.address + at[2] * slice + at[1] * pitch + at[0], pitch, slice })
    }

    /// What textures and surfaces of it look at: its levels, or its only one.
    fn images(&self) -> Result<Vec<Image>, Status> {
        match self.kind {
            Kind::Mipmapped { levels, .. } => {
                (0..levels).map(|level| self.level(0, level)?.image()).collect()
            }
            _ => Ok(vec![self.image()?]),
        }
    }

    fn image(&self) -> Result<Image, Status> {
        if self.shape.flags & flag::DEFERRED_MAPPING != 0 {
            return Err(Status::INVALID_VALUE);
        }
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

/// The format and the channels of a `CUresourceViewFormat`; block-compressed ones are not made here.
fn view_format(format: u32) -> Result<(ChannelFormat, u32), Status> {
    let kind = format.checked_sub(1).ok_or(Status::INVALID_VALUE)?;
    let channels = [1, 2, 4][kind as usize % 3];
    let format = match kind / 3 {
        0 => ChannelFormat::Unsigned(8),
        1 => ChannelFormat::Signed(8),
        2 => ChannelFormat::Unsigned(16),
        3 => ChannelFormat::Signed(16),
        4 => ChannelFormat::Unsigned(32),
        5 => ChannelFormat::Signed(32),
        6 => ChannelFormat::Float(16),
        7 => ChannelFormat::Float(32),
        _ => return Err(Status::NOT_SUPPORTED),
    };
    Ok((format, channels))
}

/// The levels, and the layers of them, that a view shows, in the format that it gives them.
fn viewed(images: &[Image], shape: &ArrayShape, view: &View) -> Result<Vec<Image>, Status> {
    let cube = shape.flags & flag::CUBEMAP != 0;
    let first = images.first().ok_or(Status::INVALID_VALUE)?;
    let [top, bottom] = match view.layers {
        // The six faces of a cube are no layers.
        [0, 0] if cube && shape.flags & flag::LAYERED == 0 => [0, 5],
        _ if cube && shape.flags & flag::LAYERED == 0 => return Err(Status::INVALID_VALUE),
        layers => layers,
    };
    if view.levels[0] > view.levels[1]
        || top > bottom
        || bottom >= first.layers
        || view.extent != [shape.width, shape.height, shape.depth]
    {
        return Err(Status::INVALID_VALUE);
    }
    // What a GPU shows of some of the layers of cubes depends on more than is known here.
    if cube && [top, bottom] != [0, first.layers - 1] {
        return Err(Status::NOT_SUPPORTED);
    }
    // Levels that are not there are the last one.
    let [from, to] = view.levels.map(|level| (level as usize).min(images.len() - 1));
    let (format, channels) = view_format(view.format)?;
    let mut seen = images[from..=to].to_vec();
    for image in &mut seen {
        let stored = image.texel_bytes();
        (image.format, image.channels) = (format, channels);
        if image.texel_bytes() != stored {
            return Err(Status::INVALID_VALUE);
        }
        image.address += u64::from(top) * image.slice_pitch;
        image.layers = bottom - top + 1;
    }
    Ok(seen)
}

fn sampler(s: &Sampling, format: ChannelFormat, mipmapped: bool) -> Result<Sampler, Status> {
    if s.flags & !KNOWN_FLAGS != 0 {
        return Err(Status::INVALID_VALUE);
    }
    // Trilinear filtering of such a texture has shortcuts of its own, whatever the instruction.
    let anisotropic = s.anisotropy > 1;
    if anisotropic && mipmapped && s.level_filter != 0 {
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
    let linear = |filter: u32| match filter {
        0 => Ok(false),
        1 if whole && !normalized_read => Err(Status::INVALID_VALUE),
        1 => Ok(true),
        _ => Err(Status::INVALID_VALUE),
    };
    let sampler = Sampler {
        address: [mode(s.address[0])?, mode(s.address[1])?, mode(s.address[2])?],
        linear: linear(s.filter)?,
        // Levels have no other coordinates.
        normalized: s.flags & NORMALIZED_COORDINATES != 0 || mipmapped,
        normalized_read,
        // Of other texels it says nothing.
        srgb: s.flags & SRGB != 0 && normalized_read && format == ChannelFormat::Unsigned(8),
        border: s.border.map(f32::from_bits),
        seamless: s.flags & SEAMLESS_CUBEMAP != 0,
        anisotropic,
        ..Sampler::default()
    };
    // Where there is one level, nothing is said of levels.
    Ok(if mipmapped {
        // A GPU takes whole numbers of two levels in proportion as well, rounded as it does it.
        if s.level_filter == 1 && whole && !normalized_read {
            return Err(Status::NOT_SUPPORTED);
        }
        Sampler {
            mip_linear: linear(s.level_filter)?,
            level_bias: f32::from_bits(s.level_bias),
            level_range: s.level_clamp.map(f32::from_bits),
            ..sampler
        }
    } else {
        sampler
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
        if array.charge.is_none() {
            return;
        }
        if let Ok(device) = self.device(array.device)
            && let Err(error) = device.gpu.free(array.address)
        {
            tracing::warn!("an array's memory: {error}");
        }
    }
}

impl Session<Software> {
    /// What a texture is of: one level, or several.
    fn images(&self, context: ContextId, r: &Resource) -> Result<Vec<Image>, Status> {
        let device = self.context(context)?.device;
        match r.kind {
            OF_ARRAY | OF_MIPMAPPED => {
                let array = self.arrays.get(r.array)?;
                if array.context != context.0 {
                    return Err(Status::INVALID_HANDLE);
                }
                if matches!(array.kind, Kind::Mipmapped { .. }) != (r.kind == OF_MIPMAPPED) {
                    return Err(Status::INVALID_VALUE);
                }
                array.images()
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
                Ok(vec![Image {
                    address: r.address,
                    size: [size(r.width)?, size(rows)?, 1],
                    layers: 1,
                    row_pitch: pitch,
                    slice_pitch: pitch.saturating_mul(rows),
                    format: format(r.format)?,
                    channels: r.channels,
                }])
            }
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

impl ArrayOps<Call> for Session<Software> {
    fn array_create(&mut self, cx: &mut Call, op: ArrayCreate) -> Result<Answer<ArrayCreateReply>, Status> {
        cx.context = op.context;
        let device = self.context(op.context)?.device;
        self.arrays.may_grow()?;
        if self.arrays.arrays.contains_key(&op.array.0)
            || op.shape.flags & !flag::KNOWN != 0
            || op.levels > op.shape.most_levels()
            || !op.shape.is_whole_cubes()
        {
            return Err(Status::INVALID_VALUE);
        }
        format(op.shape.format)?;
        let (kind, bytes) = match op.levels {
            0 => (Kind::Plain, op.shape.bytes()),
            levels => (Kind::Mipmapped { levels, named: 0 }, before_level(&op.shape, levels)),
        };
        let bytes = bytes.ok_or(Status::INVALID_VALUE)?;
        let charge = self.quota.charge(bytes)?;
        let gpu = &self.device(device)?.gpu;
        if bytes > gpu.properties().total_memory {
            return Err(Status::OUT_OF_MEMORY);
        }
        let deferred = op.shape.flags & flag::DEFERRED_MAPPING != 0;
        let (address, charge) =
            if deferred { (0, None) } else { (gpu.allocate(bytes).map_err(|e| code(&e))?, Some(charge)) };
        let array = Array { context: op.context.0, device, shape: op.shape, address, charge, kind };
        self.arrays.arrays.insert(op.array.0, array);
        Ok(Answer::Now(ArrayCreateReply {}))
    }

    fn array_level(&mut self, cx: &mut Call, op: ArrayLevel) -> Result<Answer<ArrayLevelReply>, Status> {
        self.arrays.may_grow()?;
        if self.arrays.arrays.contains_key(&op.array.0) {
            return Err(Status::INVALID_VALUE);
        }
        let whole = self.arrays.arrays.get_mut(&op.mipmapped.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(whole.context);
        let level = whole.level(op.mipmapped.0, op.level)?;
        // A level has one name: so there are no more names than levels.
        let Kind::Mipmapped { named, .. } = &mut whole.kind else { return Err(Status::INVALID_HANDLE) };
        if *named >> op.level & 1 != 0 {
            return Err(Status::INVALID_VALUE);
        }
        *named |= 1 << op.level;
        self.arrays.arrays.insert(op.array.0, level);
        Ok(Answer::Now(ArrayLevelReply {}))
    }

    fn array_destroy(&mut self, cx: &mut Call, op: ArrayDestroy) -> Result<(), Status> {
        cx.context = ContextId(self.arrays.get(op.array)?.context);
        let array = self.arrays.arrays.remove(&op.array.0).ok_or(Status::INVALID_HANDLE)?;
        if let Kind::Level { of, level } = array.kind
            && let Some(Array { kind: Kind::Mipmapped { named, .. }, .. }) = self.arrays.arrays.get_mut(&of)
        {
            *named &= !(1 << level);
        }
        self.free(&array);
        // Its levels go with it.
        self.arrays
            .arrays
            .retain(|_, level| !matches!(level.kind, Kind::Level { of, .. } if of == op.array.0));
        Ok(())
    }

    fn memcpy_array(&mut self, cx: &mut Call, op: MemcpyArray) -> Result<(), Status> {
        let memory = |end: &ArrayPlace| match end.array {
            Some(id) => self.arrays.plain(id)?.memory(end.at, op.extent),
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
        self.arrays.may_grow()?;
        let mut images = self.images(op.context, &op.resource)?;
        if let Some(view) = &op.view {
            // Memory is not viewed otherwise than it is described.
            if !matches!(op.resource.kind, OF_ARRAY | OF_MIPMAPPED) {
                return Err(Status::INVALID_VALUE);
            }
            images = viewed(&images, &self.arrays.get(op.resource.array)?.shape, view)?;
        }
        let format = images.first().ok_or(Status::INVALID_VALUE)?.format;
        let sampler = sampler(&op.sampling, format, op.resource.kind == OF_MIPMAPPED)?;
        let device = self.context(op.context)?.device;
        let texture =
            self.device(device)?.gpu.create_mipmapped_texture(&images, sampler).map_err(|e| code(&e))?;
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
        self.arrays.may_grow()?;
        let array = self.arrays.plain(op.array)?;
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
        if array.shape.flags & flag::DEFERRED_MAPPING == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let levels = if let Kind::Mipmapped { levels, .. } = array.kind { levels } else { 1 };
        let size = before_level(&array.shape, levels).and_then(|n| n.checked_next_multiple_of(MAP_ALIGN));
        let size = size.ok_or(Status::INVALID_VALUE)?;
        Ok(Answer::Now(ArrayRequirementsReply { size, alignment: MAP_ALIGN }))
    }
}
