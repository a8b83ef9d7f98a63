//! Arrays, textures and surfaces. Their elements are stored row by row in device memory that no client can
//! name, with the levels of a mipmapped array one after another.

use cupti_records::{copy, memory};
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::array::*;
use protocol::ops::copy::Pitched;
use software_gpu::{AddressMode, ChannelFormat, Gpu, Image, Sampler};

use super::activity::What;
use super::streams::Place;
use super::transfer::box_copy;
use super::{Software, code};
use crate::driver::call::{Call, Result};
use crate::driver::gpu::{AnyArray, CopyEnd, GpuArrays, TextureSource};
use crate::driver::rows::Rows;

/// `CU_TRSF_…`.
const READ_AS_INTEGER: u32 = 1;
const NORMALIZED_COORDINATES: u32 = 2;
const SRGB: u32 = 0x10;
const DISABLE_TRILINEAR: u32 = 0x20;
const SEAMLESS_CUBEMAP: u32 = 0x40;
const KNOWN_FLAGS: u32 =
    READ_AS_INTEGER | NORMALIZED_COORDINATES | SRGB | DISABLE_TRILINEAR | SEAMLESS_CUBEMAP;
/// Alignment of a mipmapped array's levels.
const LEVEL_ALIGN: u64 = 512;
/// Granularity of the memory required for an array that has none, as on NVIDIA's GPUs.
const MAP_ALIGN: u64 = 64 << 10;
/// Maximum texels in a texture of linear memory: what CUDA reports for all current GPUs.
const MAX_LINEAR: u64 = 1 << 28;

/// The memory of an array, or of a level of a mipmapped one.
pub struct Elements {
    gpu: Gpu,
    address: u64,
    /// Whether dropping this frees the memory: a level's belongs to its mipmapped array, and an array whose
    /// memory is mapped later has none.
    own: bool,
}

impl Drop for Elements {
    fn drop(&mut self) {
        if self.own
            && let Err(error) = self.gpu.free(self.address)
        {
            tracing::warn!("an array's memory: {error}");
        }
    }
}

/// Bytes before a level of a mipmapped array; for the level after the last, the total size.
fn before_level(shape: &ArrayShape, level: u32) -> Option<u64> {
    (0..level).try_fold(0u64, |sum, n| {
        sum.checked_add(shape.level(n).bytes()?)?.checked_next_multiple_of(LEVEL_ALIGN)
    })
}

/// Bytes per row, rows and slices of an array of this shape.
fn extent(shape: &ArrayShape) -> [u64; 3] {
    shape.extent().unwrap_or_default()
}

impl Elements {
    fn new(gpu: &Gpu, shape: &ArrayShape, bytes: u64) -> Result<Elements> {
        if bytes > gpu.properties().total_memory {
            return Err(Status::OUT_OF_MEMORY);
        }
        let own = shape.flags & flag::DEFERRED_MAPPING == 0;
        let address = if own { gpu.allocate(bytes).map_err(|e| code(&e))? } else { 0 };
        Ok(Elements { gpu: gpu.clone(), address, own })
    }

    /// One level, if these are a mipmapped array's elements.
    fn level(&self, shape: &ArrayShape, level: u32) -> Result<Elements> {
        let before = before_level(shape, level).ok_or(Status::INVALID_VALUE)?;
        Ok(Elements { gpu: self.gpu.clone(), address: self.address + before, own: false })
    }

    /// What textures and surfaces read.
    fn image(&self, shape: &ArrayShape) -> Result<Image> {
        if shape.flags & flag::DEFERRED_MAPPING != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let [pitch, rows, slices] = extent(shape);
        let layered = shape.flags & (flag::LAYERED | flag::CUBEMAP) != 0;
        let (planes, layers) = if layered { (1, slices) } else { (slices, 1) };
        let size = |n: u64| u32::try_from(n).map_err(|_| Status::INVALID_VALUE);
        Ok(Image {
            address: self.address,
            size: [size(shape.width)?, size(rows)?, size(planes)?],
            layers: size(layers)?,
            row_pitch: pitch,
            slice_pitch: pitch * rows,
            format: format(shape.format)?,
            channels: shape.channels,
        })
    }
}

fn format(format: u32) -> Result<ChannelFormat> {
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

/// The format and channels of a `CUresourceViewFormat`. Block-compressed ones are not supported.
fn view_format(format: u32) -> Result<(ChannelFormat, u32)> {
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

/// The levels and layers that a view shows, in its format.
fn viewed(images: &[Image], shape: &ArrayShape, view: &View) -> Result<Vec<Image>> {
    let cube = shape.flags & flag::CUBEMAP != 0;
    let first = images.first().ok_or(Status::INVALID_VALUE)?;
    let [top, bottom] = match view.layers {
        // A cube's six faces are not layers.
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
    // What a GPU shows for a subset of cube layers depends on details that are unknown here.
    if cube && [top, bottom] != [0, first.layers - 1] {
        return Err(Status::NOT_SUPPORTED);
    }
    // Levels beyond the last are clamped to it.
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

fn sampler(s: &Sampling, format: ChannelFormat, mipmapped: bool) -> Result<Sampler> {
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
        // Textures with levels only have normalized coordinates.
        normalized: s.flags & NORMALIZED_COORDINATES != 0 || mipmapped,
        normalized_read,
        // It doesn't apply to other texels.
        srgb: s.flags & SRGB != 0 && normalized_read && format == ChannelFormat::Unsigned(8),
        border: s.border.map(f32::from_bits),
        seamless: s.flags & SEAMLESS_CUBEMAP != 0,
        anisotropic,
        ..Sampler::default()
    };
    // With a single level, levels don't matter.
    Ok(if mipmapped {
        // A GPU also interpolates integers between two levels, with its own rounding, which is not
        // implemented.
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

/// The levels that a texture reads.
fn images(source: &TextureSource<'_, Software>) -> Result<Vec<Image>> {
    match source {
        TextureSource::Array { array, shape } => Ok(vec![array.image(shape)?]),
        TextureSource::Mipmapped { array, shape, levels } => {
            (0..*levels).map(|level| array.level(shape, level)?.image(&shape.level(level))).collect()
        }
        TextureSource::Memory { resource: r, memory, .. } => {
            let size = |n: u64| u32::try_from(n).map_err(|_| Status::INVALID_VALUE);
            Ok(vec![Image {
                address: r.address,
                size: [size(r.width)?, size(memory.height)?, 1],
                layers: 1,
                row_pitch: memory.pitch,
                slice_pitch: memory.pitch.saturating_mul(memory.height),
                format: format(r.format)?,
                channels: r.channels,
            }])
        }
    }
}

impl Software {
    fn gpu_of_context(&self, context: ContextId) -> Result<&Gpu> {
        self.device(self.context(context)?.device).map(|device| &device.gpu)
    }

    /// One end of a copy as memory.
    fn as_memory(&self, end: &CopyEnd<'_, Elements>, extent_of_copy: [u64; 3]) -> Result<(Gpu, Rows)> {
        match end {
            CopyEnd::Array { array, shape, at } => {
                let [pitch, rows, _] = extent(shape);
                let slice = pitch * rows;
                let address = array.address + at[2] * slice + at[1] * pitch + at[0];
                Ok((array.gpu.clone(), Rows::of(&Pitched { address, pitch, slice }, extent_of_copy)))
            }
            CopyEnd::Memory { memory, device } => {
                Ok((self.device(*device)?.gpu.clone(), Rows::of(memory, extent_of_copy)))
            }
        }
    }

    fn destroy_handle(&self, device: u32, handle: u64) -> Result {
        self.device(device)?.gpu.destroy_texture(handle).map_err(|e| code(&e))
    }
}

impl GpuArrays for Software {
    type Array = Elements;
    type Mipmapped = Elements;

    fn array_bytes(&self, shape: &ArrayShape, levels: u32) -> Result<u64> {
        if !shape.is_whole_cubes() {
            return Err(Status::INVALID_VALUE);
        }
        format(shape.format)?;
        let bytes = if levels == 0 { shape.bytes() } else { before_level(shape, levels) };
        bytes.ok_or(Status::INVALID_VALUE)
    }

    fn make_array(&mut self, context: ContextId, shape: &ArrayShape, bytes: u64) -> Result<Elements> {
        Elements::new(self.gpu_of_context(context)?, shape, bytes)
    }

    fn make_mipmapped(
        &mut self,
        context: ContextId,
        shape: &ArrayShape,
        _levels: u32,
        bytes: u64,
    ) -> Result<Elements> {
        Elements::new(self.gpu_of_context(context)?, shape, bytes)
    }

    fn array_level(
        &mut self,
        _context: ContextId,
        array: &Elements,
        shape: &ArrayShape,
        level: u32,
    ) -> Result<Elements> {
        array.level(shape, level)
    }

    fn destroy_array(&mut self, _context: ContextId, _array: Elements) -> Result {
        Ok(())
    }

    fn destroy_mipmapped(&mut self, _context: ContextId, _array: Elements) -> Result {
        Ok(())
    }

    fn copy_array(
        &self,
        cx: &Call,
        place: &Place,
        src: &CopyEnd<'_, Elements>,
        dst: &CopyEnd<'_, Elements>,
        extent: [u64; 3],
    ) -> Result {
        let (from, source) = self.as_memory(src, extent)?;
        let (to, target) = self.as_memory(dst, extent)?;
        let what = || {
            let is_array = |end: &CopyEnd<'_, Elements>| matches!(end, CopyEnd::Array { .. });
            let kind = |array| if array { memory::ARRAY } else { memory::DEVICE };
            let (from, to) = (is_array(src), is_array(dst));
            let copy = match (from, to) {
                (true, true) => copy::ATOA,
                (true, false) => copy::ATOD,
                (false, true) => copy::DTOA,
                (false, false) => copy::DTOD,
            };
            What::copy(copy, [kind(from), kind(to)], What::bytes(&source))
        };
        let timer = self.timer(place, what);
        let work = box_copy(from, source, to, target)?;
        self.enqueue_timed(cx, place, timer, work)
    }

    fn make_texture(
        &self,
        context: ContextId,
        source: &TextureSource<'_, Software>,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64> {
        let mut all = images(source)?;
        if let Some(view) = view {
            match source {
                TextureSource::Array { shape, .. } | TextureSource::Mipmapped { shape, .. } => {
                    all = viewed(&all, shape, view)?;
                }
                // Linear memory cannot have a view.
                TextureSource::Memory { .. } => return Err(Status::INVALID_VALUE),
            }
        }
        let format = all.first().ok_or(Status::INVALID_VALUE)?.format;
        let sampler = sampler(sampling, format, matches!(source, TextureSource::Mipmapped { .. }))?;
        self.gpu_of_context(context)?.create_mipmapped_texture(&all, sampler).map_err(|e| code(&e))
    }

    fn destroy_texture(&mut self, _context: ContextId, device: u32, texture: u64) -> Result {
        self.destroy_handle(device, texture)
    }

    fn make_surface(&self, _context: ContextId, array: &Elements, shape: &ArrayShape) -> Result<u64> {
        array.gpu.create_surface(array.image(shape)?).map_err(|e| code(&e))
    }

    fn destroy_surface(&mut self, _context: ContextId, device: u32, surface: u64) -> Result {
        self.destroy_handle(device, surface)
    }

    fn forget_texture(&mut self, device: u32, handle: u64) {
        // A reset device has none.
        let _ = self.destroy_handle(device, handle);
    }

    fn linear_width(&mut self, _device: u32, texels: u32, _channels: u32) -> Result<u64> {
        format(texels)?;
        Ok(MAX_LINEAR)
    }

    fn array_requirements(
        &self,
        _context: ContextId,
        _device: u32,
        _array: AnyArray<'_, Software>,
        shape: &ArrayShape,
        levels: u32,
    ) -> Result<(u64, u64)> {
        if shape.flags & flag::DEFERRED_MAPPING == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let size = before_level(shape, levels).and_then(|n| n.checked_next_multiple_of(MAP_ALIGN));
        Ok((size.ok_or(Status::INVALID_VALUE)?, MAP_ALIGN))
    }
}
