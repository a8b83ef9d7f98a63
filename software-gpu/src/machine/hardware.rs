//! A GPU as its kernels see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::error::Result;
use crate::machine::error_text::ErrorTexts;
use crate::machine::memory::Memory;
use crate::machine::properties::{GpuConfig, PrintfSink, Properties};
use crate::machine::texture::Textures;

/// What kernels use of a GPU. It lives as long as the GPU, its modules and its launches.
pub(crate) struct Hardware {
    pub properties: Properties,
    pub printf: PrintfSink,
    pub memory: Memory,
    pub textures: Textures,
    /// Names and texts of errors that kernels have asked for.
    pub texts: ErrorTexts,
    /// Whether every kernel must stop.
    pub cancelled: AtomicBool,
    /// Warp instructions executed by finished blocks.
    pub executed: AtomicU64,
}

impl Hardware {
    pub fn new(config: &GpuConfig) -> Hardware {
        Hardware {
            properties: Properties::of(config),
            printf: config.printf.clone(),
            memory: Memory::new(config.memory_bytes),
            textures: Textures::default(),
            texts: ErrorTexts::default(),
            cancelled: AtomicBool::new(false),
            executed: AtomicU64::new(0),
        }
    }

    /// Allocates zeroed memory outside the addresses that the caller chooses.
    pub fn allocate(self: &Arc<Self>, size: u64) -> Result<Allocation> {
        let address = self.memory.allocate_module(size)?;
        Ok(Allocation { hardware: Arc::clone(self), address })
    }
}

/// Memory of the GPU's own, which is freed with this.
pub(crate) struct Allocation {
    hardware: Arc<Hardware>,
    pub address: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // Cannot fail: the allocator returned this address, and it is freed once.
        let _ = self.hardware.memory.free_module(self.address);
    }
}
