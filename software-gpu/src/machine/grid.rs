//! A grid: the state that all threads of a launch share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::machine::hardware::Hardware;
use crate::machine::launcher::{LaunchConfig, Launcher};
use crate::machine::row::Line;

/// What a launch's threads read. Only `failed` changes.
pub(crate) struct Grid {
    pub hardware: Arc<Hardware>,
    pub launcher: Arc<dyn Launcher>,
    pub config: LaunchConfig,
    pub params: Vec<Line>,
    pub param_bytes: u32,
    /// Shared memory per block in bytes, static and dynamic.
    pub shared_bytes: u32,
    /// Number of blocks per cluster in each dimension, and whether the launch or the kernel gave it.
    pub cluster: [u32; 3],
    pub explicit_cluster: bool,
    pub grid_id: u64,
    /// Device memory for the grid barrier of a cooperative launch, freed with the grid; 0 for other launches.
    pub workspace: u64,
    /// Whether a thread has faulted.
    pub failed: AtomicBool,
}

impl Grid {
    /// Whether the kernel must stop as soon as possible.
    #[inline(always)]
    pub fn stopping(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || self.hardware.cancelled.load(Ordering::Relaxed)
    }

    /// The number of clusters in one dimension.
    pub fn clusters(&self, dimension: usize) -> u32 {
        self.config.grid[dimension] / self.cluster[dimension]
    }
}

impl Drop for Grid {
    fn drop(&mut self) {
        if self.workspace != 0 {
            // Cannot fail: the allocator returned this address, and it is freed once.
            let _ = self.hardware.memory.free_module(self.workspace);
        }
    }
}
