//! The configuration of a GPU, and the properties that follow from it.

use std::sync::Arc;

use crate::error::Error;

/// The 32-bit registers that a block can have.
pub(crate) const BLOCK_REGISTERS: u32 = 1 << 16;
/// The most blocks in a cluster.
pub(crate) const MAX_CLUSTER: u32 = 16;
/// The most shared memory of a block in bytes.
pub(crate) const MAX_SHARED: u32 = 227 << 10;
/// The most local memory of a thread in bytes.
pub(crate) const MAX_LOCAL: u32 = 512 << 10;
/// The most parameters of a kernel in bytes.
pub(crate) const MAX_PARAMETERS: u32 = 32764;
/// The most memory in bytes for the registers of a warp's calls, and for a function's constants: for the
/// registers of PTX, of which any number may be declared. Large kernels take some megabytes.
pub(crate) const MAX_FRAMES: u32 = 64 << 20;

/// Receives the output of each `printf` call in a kernel.
pub type PrintfSink = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Receives the GPU's sticky error; see [`GpuConfig::fault`].
pub type FaultSink = Arc<dyn Fn(&Error) + Send + Sync>;

/// The configuration of a [`crate::Gpu`].
#[derive(Clone)]
pub struct GpuConfig {
    /// The name in [`Properties`].
    pub name: String,
    /// Memory size in bytes: how much can be mapped at once, including the modules' memory.
    pub memory_bytes: u64,
    /// Number of threads that run kernels; 0 for one per CPU.
    pub workers: usize,
    /// Receives the output of `printf` in kernels. The default writes to the process's standard output.
    pub printf: PrintfSink,
    /// Called once when a kernel or an enqueued closure fails, before any call returns the error. The default
    /// does nothing.
    pub fault: FaultSink,
}

impl Default for GpuConfig {
    fn default() -> GpuConfig {
        GpuConfig {
            name: "Software GPU".into(),
            memory_bytes: 4 << 30,
            workers: 0,
            printf: Arc::new(|text| {
                use std::io::Write;
                let mut out = std::io::stdout().lock();
                // Ignored: standard output may be closed.
                let _ = out.write_all(text).and_then(|()| out.flush());
            }),
            fault: Arc::new(|_| {}),
        }
    }
}

/// The GPU's properties and limits. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Compute capability: the newest architecture whose PTX it runs.
    pub compute_capability: (u32, u32),
    /// Memory size.
    pub total_memory: u64,
    /// Number of multiprocessors, which is the number of worker threads.
    pub multiprocessors: u32,
    /// Threads per warp.
    pub warp_size: u32,
    /// Maximum threads per block.
    pub max_threads_per_block: u32,
    /// Maximum blocks per cluster. Every GPU with clusters supports 8.
    pub max_cluster_blocks: u32,
    /// Maximum resident threads per multiprocessor.
    pub max_threads_per_multiprocessor: u32,
    /// Maximum resident blocks per multiprocessor.
    pub max_blocks_per_multiprocessor: u32,
    /// Maximum size of each dimension of a block.
    pub max_block: [u32; 3],
    /// Maximum size of each dimension of a grid.
    pub max_grid: [u32; 3],
    /// Maximum shared memory per block without opting in.
    pub shared_per_block: u32,
    /// Maximum shared memory per block.
    pub shared_per_block_optin: u32,
    /// Shared memory per multiprocessor.
    pub shared_per_multiprocessor: u32,
    /// Shared memory per block that is reserved for the system.
    pub shared_reserved_per_block: u32,
    /// Maximum 32-bit registers per block.
    pub registers_per_block: u32,
    /// Maximum constant memory per module.
    pub constant_memory: u32,
    /// Frequency of `clock64()` in kHz. It counts nanoseconds.
    pub clock_khz: u32,
    /// Maximum local memory per thread.
    pub max_local_per_thread: u32,
    /// Maximum parameter bytes per kernel.
    pub max_parameter_bytes: u32,
}

impl Properties {
    /// The properties of a GPU with this configuration.
    pub fn of(config: &GpuConfig) -> Properties {
        let workers = match config.workers {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        Properties {
            name: config.name.clone(),
            compute_capability: (9, 0),
            total_memory: config.memory_bytes,
            multiprocessors: workers as u32,
            warp_size: 32,
            max_threads_per_block: 1024,
            max_cluster_blocks: MAX_CLUSTER,
            max_threads_per_multiprocessor: 2048,
            max_blocks_per_multiprocessor: 32,
            max_block: [1024, 1024, 64],
            max_grid: [0x7fff_ffff, 65535, 65535],
            shared_per_block: 48 << 10,
            shared_per_block_optin: MAX_SHARED,
            shared_per_multiprocessor: 228 << 10,
            shared_reserved_per_block: 1 << 10,
            registers_per_block: BLOCK_REGISTERS,
            constant_memory: 64 << 10,
            clock_khz: 1_000_000,
            max_local_per_thread: MAX_LOCAL,
            max_parameter_bytes: MAX_PARAMETERS,
        }
    }
}
