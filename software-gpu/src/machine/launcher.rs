//! What a launch is made of, and what a kernel can start that runs after it (CUDA dynamic parallelism).

use crate::machine::memory::{Memory, Plane};

/// `cudaErrorInvalidValue` and `cudaErrorMemoryAllocation`.
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const MEMORY_ALLOCATION: u32 = 2;

/// The dimensions and options of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Number of threads per block in each dimension.
    pub block: [u32; 3],
    /// Dynamic shared memory per block in bytes.
    pub dynamic_shared: u32,
    /// Whether all blocks must be resident at once, so that they can wait for each other.
    pub cooperative: bool,
    /// Number of blocks per cluster in each dimension. With `None`, the kernel's required size, or one block.
    pub cluster: Option<[u32; 3]>,
}

impl LaunchConfig {
    /// A one-dimensional launch without dynamic shared memory.
    pub fn linear(blocks: u32, threads: u32) -> LaunchConfig {
        LaunchConfig {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            dynamic_shared: 0,
            cooperative: false,
            cluster: None,
        }
    }
}

/// Takes what a kernel starts. Each error is one of the runtime's codes.
pub(crate) trait Launcher: Send + Sync {
    /// Allocates a parameter buffer for a launch of the function with this address, and returns the buffer's.
    fn draft(&self, function: u64, config: LaunchConfig) -> Result<u64, u32>;

    /// Makes the launch that [`Launcher::draft`] prepared, and frees the buffer.
    fn launch(&self, parameters: u64, stream: u64) -> Result<(), u32>;

    /// Starts a copy or fill.
    fn transfer(&self, transfer: Transfer, stream: u64) -> Result<(), u32>;
}

/// A copy or fill of `height` rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub to: Plane,
    pub from: Source,
    pub width: u64,
    pub height: u64,
}

/// The source of a [`Transfer`]'s bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Memory(Plane),
    Value(u8),
}

impl Transfer {
    /// Whether all rows are in accessible memory.
    pub fn is_inside(&self, memory: &Memory) -> bool {
        let there = |plane: Plane| {
            let last = self.height.saturating_sub(1).checked_mul(plane.pitch);
            let end = last.and_then(|last| last.checked_add(self.width));
            let nothing = self.width == 0 || self.height == 0;
            nothing || end.is_some_and(|bytes| memory.host_range(plane.addr, bytes).is_ok())
        };
        there(self.to)
            && match self.from {
                Source::Memory(from) => there(from),
                Source::Value(_) => true,
            }
    }
}
