//! Textures and surfaces: the host's description of what a kernel samples.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use crate::error::{Error, Result};

/// The format of a texel's channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelFormat {
    /// Unsigned integers of 8, 16 or 32 bits.
    Unsigned(u32),
    /// Signed integers of 8, 16 or 32 bits.
    Signed(u32),
    /// Floating-point numbers of 16 or 32 bits.
    Float(u32),
}

impl ChannelFormat {
    /// Bits per channel.
    pub fn bits(self) -> u32 {
        match self {
            ChannelFormat::Unsigned(n) | ChannelFormat::Signed(n) | ChannelFormat::Float(n) => n,
        }
    }
}

/// An image in device memory, stored in rows of texels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Device address of the first texel.
    pub address: u64,
    /// Number of texels in each dimension; 1 for a dimension that the image does not have.
    pub size: [u32; 3],
    /// Number of layers of this size; 1 if it is not layered. A cube map has six per cube: the faces +x, -x,
    /// +y, -y, +z and -z.
    pub layers: u32,
    /// Bytes from one row to the next.
    pub row_pitch: u64,
    /// Bytes from one plane or layer to the next.
    pub slice_pitch: u64,
    /// The format of each channel.
    pub format: ChannelFormat,
    /// Channels per texel: 1, 2 or 4.
    pub channels: u32,
}

impl Image {
    /// Bytes per texel.
    pub fn texel_bytes(&self) -> u64 {
        u64::from(self.channels * self.format.bits() / 8)
    }

    /// Checks that the description is consistent.
    pub(crate) fn check(&self) -> Result<()> {
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

/// What a coordinate outside the image refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddressMode {
    /// The image repeated. Without normalized coordinates, like [`AddressMode::Clamp`].
    #[default]
    Wrap,
    /// The nearest texel.
    Clamp,
    /// The image repeated and mirrored. Without normalized coordinates, like [`AddressMode::Clamp`].
    Mirror,
    /// The border color.
    Border,
}

/// How a texture is read. The default reads the nearest texel of any level, and wraps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// For each dimension; ignored for a seamless cube map.
    pub address: [AddressMode; 3],
    /// Whether to filter linearly between texels, instead of reading the nearest one.
    pub linear: bool,
    /// Whether coordinates range from 0 to 1, instead of up to the number of texels.
    pub normalized: bool,
    /// Whether 8-bit and 16-bit integers are read as floats from 0 (or -1) to 1.
    pub normalized_read: bool,
    /// Whether red, green and blue are sRGB. Only for 8-bit unsigned channels with a normalized read.
    pub srgb: bool,
    /// The border color.
    pub border: [f32; 4],
    /// Whether to filter linearly between levels, instead of reading the nearest one.
    pub mip_linear: bool,
    /// Added to the level that an instruction gives or that results from its gradients.
    pub level_bias: f32,
    /// The lowest and highest level that can be read.
    pub level_range: [f32; 2],
    /// Whether linear filtering continues across the edges of a cube map's faces.
    pub seamless: bool,
    /// Whether filtering is anisotropic. That is not implemented: instructions with gradients fail for such a
    /// texture. Others ignore the setting.
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
    /// Checks that texels of this format can be read with these settings.
    pub(crate) fn check(&self, format: ChannelFormat) -> Result<()> {
        let whole = !matches!(format, ChannelFormat::Float(_));
        if self.linear && whole && !(self.normalized_read && format.bits() < 32) {
            return Err(Error::InvalidArgument(format!("integers ({format:?}) cannot be filtered")));
        }
        if self.srgb && !(format == ChannelFormat::Unsigned(8) && self.normalized_read) {
            return Err(Error::InvalidArgument(format!("{format:?} cannot be read as sRGB")));
        }
        Ok(())
    }
}

/// A texture, or a surface, which ignores the sampler.
pub(crate) struct Texture {
    /// At least one level, the largest first.
    pub levels: Vec<Image>,
    pub sampler: Sampler,
}

/// A GPU's textures and surfaces, by handle.
#[derive(Default)]
pub(crate) struct Textures {
    map: RwLock<HashMap<u64, Arc<Texture>>>,
    next: AtomicU64,
}

impl Textures {
    pub fn add(&self, texture: Texture) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.map.write().unwrap_or_else(|e| e.into_inner()).insert(handle, Arc::new(texture));
        handle
    }

    pub fn get(&self, handle: u64) -> Option<Arc<Texture>> {
        self.map.read().unwrap_or_else(|e| e.into_inner()).get(&handle).cloned()
    }

    /// Whether there was one to remove.
    pub fn remove(&self, handle: u64) -> bool {
        self.map.write().unwrap_or_else(|e| e.into_inner()).remove(&handle).is_some()
    }
}
