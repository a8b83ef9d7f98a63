//! A grid: the state that all threads of a launch share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::machine::hardware::{Allocation, Hardware};
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
    /// Memory for the barrier of a cooperative launch.
    pub workspace: Option<Allocation>,
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

    /// Where a cooperative launch has its barrier; 0 for other launches.
    pub fn barrier(&self) -> u64 {
        self.workspace.as_ref().map_or(0, |memory| memory.address)
    }
}
