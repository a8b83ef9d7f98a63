//! Textures and surfaces: what a kernel samples, as the host describes it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use crate::device::gpu::Gpu;
use crate::error::{Error, Result};

/// What one channel of a texel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelFormat {
    /// Whole numbers without a sign, of 8, 16 or 32 bits.
    Unsigned(u32),
    /// Whole numbers with a sign, of 8, 16 or 32 bits.
    Signed(u32),
    /// Floating-point numbers of 16 or 32 bits.
    Float(u32),
}

impl ChannelFormat {
    /// Bits of a channel.
    pub fn bits(self) -> u32 {
        match self {
            ChannelFormat::Unsigned(n) | ChannelFormat::Signed(n) | ChannelFormat::Float(n) => n,
        }
    }
}

/// Texels in device memory, in rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Device address of the first texel.
    pub address: u64,
    /// Texels in each direction; a direction that the image does not have counts as 1.
    pub size: [u32; 3],
    /// Layers, each of them `size` large; 1 if it is not layered. A cube map has six for each cube: the faces toward
    /// +x, -x, +y, -y, +z and -z.
    pub layers: u32,
    /// Bytes from one row to the next.
    pub row_pitch: u64,
    /// Bytes from one plane (or one layer) to the next.
    pub slice_pitch: u64,
    /// What a channel is.
    pub format: ChannelFormat,
    /// Channels of a texel: 1, 2 or 4.
    pub channels: u32,
}

impl Image {
    /// Bytes of a texel.
    pub fn texel_bytes(&self) -> u64 {
        u64::from(self.channels * self.format.bits() / 8)
    }

    /// Whether it makes sense.
    fn check(&self) -> Result<()> {
        let bits = match self.format {
            ChannelFormat::Unsigned(n) | ChannelFormat::Signed(n) => matches!(n, 8 | 16 | 32),
            ChannelFormat::Float(n) => matches!(n, 16 | 32),
        };
        let row = u64::from(self.size[0]) * self.texel_bytes();
        let planes = self.size[2].saturating_mul(self.layers);
        if !bits || !matches!(self.channels, 1 | 2 | 4) || self.size.contains(&0) || self.layers == 0 {
            return Err(Error::InvalidArgument(format!("{self:?}")));
        }
        if self.size[1] > 1 && self.row_pitch < row
            || planes > 1 && self.slice_pitch < self.row_pitch.saturating_mul(self.size[1].into())
        {
            return Err(Error::InvalidArgument(format!("the rows or planes of {self:?} overlap")));
        }
        Ok(())
    }
}

/// What a coordinate outside the image means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddressMode {
    /// The image again. Without normalised coordinates as [`AddressMode::Clamp`].
    #[default]
    Wrap,
    /// The nearest texel.
    Clamp,
    /// The image mirrored. Without normalised coordinates as [`AddressMode::Clamp`].
    Mirror,
    /// The border's colour.
    Border,
}

/// How a texture is read. The default reads the nearest texel, of any level, and wraps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// For each direction; of a seamless cube map it has no meaning.
    pub address: [AddressMode; 3],
    /// Between texels in linear proportion, else the nearest.
    pub linear: bool,
    /// Coordinates go from 0 to 1, else to the number of texels.
    pub normalized: bool,
    /// Whole numbers of 8 or 16 bits are read as floats from 0 (or -1) to 1.
    pub normalized_read: bool,
    /// Red, green and blue are sRGB. Only for unsigned channels of 8 bits with a normalised read.
    pub srgb: bool,
    /// The colour outside.
    pub border: [f32; 4],
    /// Between levels in linear proportion, else the nearest level.
    pub mip_linear: bool,
    /// Added to the level that an instruction gives or that its gradients come to.
    pub level_bias: f32,
    /// The least and the greatest level that is looked at.
    pub level_range: [f32; 2],
    /// Linear filtering goes on beyond the edge of a cube map's face on the neighbouring face.
    pub seamless: bool,
    /// Gradients of unequal length would be filtered along the longer one, which is not implemented: an instruction with
    /// gradients is an error in such a texture, as any other it is read.
    pub anisotropic: bool,
}

impl Default for Sampler {
    fn default() -> Sampler {
        Sampler {
            address: [AddressMode::Wrap; 3],
            linear: false,
            normalized: false,
            normalized_read: false,
            srgb: false,
            border: [0.0; 4],
            mip_linear: false,
            level_bias: 0.0,
            level_range: [0.0, f32::MAX],
            seamless: false,
            anisotropic: false,
        }
    }
}

impl Sampler {
    /// Whether texels of this format can be read so.
    fn check(&self, format: ChannelFormat) -> Result<()> {
        let whole = !matches!(format, ChannelFormat::Float(_));
        if self.linear && whole && !(self.normalized_read && format.bits() < 32) {
            return Err(Error::InvalidArgument(format!("whole numbers ({format:?}) are not filtered")));
        }
        if self.srgb && !(format == ChannelFormat::Unsigned(8) && self.normalized_read) {
            return Err(Error::InvalidArgument(format!("{format:?} is not read as sRGB")));
        }
        Ok(())
    }
}

/// A texture, or a surface: then the sampler has no meaning.
pub(crate) struct Texture {
    /// One at least; the largest first.
    pub levels: Vec<Image>,
    pub sampler: Sampler,
}

/// Those of a GPU, by handle.
#[derive(Default)]
pub(crate) struct Textures {
    map: RwLock<HashMap<u64, Arc<Texture>>>,
    next: AtomicU64,
}

impl Textures {
    fn add(&self, texture: Texture) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.map.write().unwrap_or_else(|e| e.into_inner()).insert(handle, Arc::new(texture));
        handle
    }

    pub fn get(&self, handle: u64) -> Option<Arc<Texture>> {
        self.map.read().unwrap_or_else(|e| e.into_inner()).get(&handle).cloned()
    }
}

impl Gpu {
    /// Makes a texture; the handle is what a kernel gets (`cudaTextureObject_t`). The memory stays the caller's: reading a
    /// texture whose memory is gone is an illegal address.
    pub fn create_texture(&self, image: Image, sampler: Sampler) -> Result<u64> {
        self.create_mipmapped_texture(&[image], sampler)
    }

    /// Makes a texture of several levels, the largest first: each is half as large as the one before in every direction, rounded
    /// down, but 1 at least; layers do not become fewer. An instruction without a level reads the first one, or the least of
    /// [`Sampler::level_range`].
    pub fn create_mipmapped_texture(&self, levels: &[Image], sampler: Sampler) -> Result<u64> {
        let Some(first) = levels.first() else {
            return Err(Error::InvalidArgument("a texture without a level".into()));
        };
        sampler.check(first.format)?;
        for (n, level) in levels.iter().enumerate() {
            level.check()?;
            let smaller = first.size.map(|size| size.checked_shr(n as u32).unwrap_or(0).max(1));
            let like = (level.size, level.format, level.channels, level.layers);
            if like != (smaller, first.format, first.channels, first.layers) {
                return Err(Error::InvalidArgument(format!(
                    "level {n} is {level:?}, not of size {smaller:?}"
                )));
            }
        }
        Ok(self.inner.textures.add(Texture { levels: levels.to_vec(), sampler }))
    }

    /// Makes a surface (`cudaSurfaceObject_t`), of one level of a mipmapped array too.
    pub fn create_surface(&self, image: Image) -> Result<u64> {
        self.create_texture(image, Sampler::default())
    }

    /// Ends a texture or a surface.
    pub fn destroy_texture(&self, handle: u64) -> Result<()> {
        let removed = self.inner.textures.map.write().unwrap_or_else(|e| e.into_inner()).remove(&handle);
        match removed {
            Some(_) => Ok(()),
            None => Err(Error::InvalidArgument(format!("no texture or surface {handle}"))),
        }
    }
}
