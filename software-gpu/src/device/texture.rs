//! The textures and surfaces of a GPU.

use crate::device::gpu::Gpu;
use crate::error::{Error, Result};
use crate::machine::texture::{Image, Sampler, Texture};

impl Gpu {
    /// Creates a texture and returns the handle that kernels use (`cudaTextureObject_t`). The caller keeps
    /// ownership of the memory: reading a texture whose memory was released is an illegal address.
    pub fn create_texture(&self, image: Image, sampler: Sampler) -> Result<u64> {
        self.create_mipmapped_texture(&[image], sampler)
    }

    /// Creates a texture with several levels, the largest first. Each level is half the size of the one
    /// before in every dimension, rounded down but at least 1; the number of layers stays. Instructions
    /// without a level read the first, or the lowest one in [`Sampler::level_range`].
    pub fn create_mipmapped_texture(&self, levels: &[Image], sampler: Sampler) -> Result<u64> {
        let Some(first) = levels.first() else {
            return Err(Error::InvalidArgument("a texture needs at least one level".into()));
        };
        sampler.check(first.format)?;
        for (n, level) in levels.iter().enumerate() {
            level.check()?;
            let smaller = first.size.map(|size| size.checked_shr(n as u32).unwrap_or(0).max(1));
            let like = (level.size, level.format, level.channels, level.layers);
            if like != (smaller, first.format, first.channels, first.layers) {
                return Err(Error::InvalidArgument(format!(
                    "level {n} is {level:?} instead of size {smaller:?}"
                )));
            }
        }
        Ok(self.inner.hardware.textures.add(Texture { levels: levels.to_vec(), sampler }))
    }

    /// Creates a surface (`cudaSurfaceObject_t`). It can be one level of a mipmapped array.
    pub fn create_surface(&self, image: Image) -> Result<u64> {
        self.create_texture(image, Sampler::default())
    }

    /// Destroys a texture or surface.
    pub fn destroy_texture(&self, handle: u64) -> Result<()> {
        if !self.inner.hardware.textures.remove(handle) {
            return Err(Error::InvalidArgument(format!("no texture or surface {handle}")));
        }
        Ok(())
    }
}
