//! The GPU: its configuration, its properties, its workers and its sticky error.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::device::children::Child;
use crate::device::launch::{KernelRun, LaunchConfig, Pool};
use crate::device::memory::Memory;
use crate::device::module::{self, Function, Module};
use crate::device::stream::Stream;
use crate::device::texts::Texts;
use crate::device::texture::Textures;
use crate::error::{Error, Result};

/// Receives what kernels print, in whole `printf` calls.
pub type PrintfSink = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Receives the error that ends a GPU's work: see [`GpuConfig::fault`].
pub type FaultSink = Arc<dyn Fn(&Error) + Send + Sync>;

/// How to make a [`Gpu`].
#[derive(Clone)]
pub struct GpuConfig {
    /// The name that [`Properties`] report.
    pub name: String,
    /// Memory in bytes: the most that can be mapped at a time, the modules' own included.
    pub memory_bytes: u64,
    /// Threads that run kernels. 0: one for each CPU.
    pub workers: usize,
    /// What device `printf` writes to. The default is the process's standard output.
    pub printf: PrintfSink,
    /// Told once, when a kernel or an enqueued closure fails, before anybody else can learn of it. The default does nothing.
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
                // Nobody is left to tell if standard output is closed.
                let _ = out.write_all(text).and_then(|()| out.flush());
            }),
            fault: Arc::new(|_| {}),
        }
    }
}

/// What the GPU is and how far it reaches. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Compute capability: that of the newest architecture whose PTX it runs.
    pub compute_capability: (u32, u32),
    /// Memory in all.
    pub total_memory: u64,
    /// Multiprocessors: its worker threads.
    pub multiprocessors: u32,
    /// Threads of a warp.
    pub warp_size: u32,
    /// Threads of a block at most.
    pub max_threads_per_block: u32,
    /// Blocks of a cluster at most; 8 are what every GPU with clusters has.
    pub max_cluster_blocks: u32,
    /// Threads that can be resident on a multiprocessor.
    pub max_threads_per_multiprocessor: u32,
    /// Blocks that can be resident on a multiprocessor.
    pub max_blocks_per_multiprocessor: u32,
    /// Each dimension of a block at most.
    pub max_block: [u32; 3],
    /// Each dimension of a grid at most.
    pub max_grid: [u32; 3],
    /// Shared memory of a block without opting in.
    pub shared_per_block: u32,
    /// Shared memory of a block at most.
    pub shared_per_block_optin: u32,
    /// Shared memory of a multiprocessor.
    pub shared_per_multiprocessor: u32,
    /// Shared memory that the system takes of each block.
    pub shared_reserved_per_block: u32,
    /// 32-bit registers of a block at most.
    pub registers_per_block: u32,
    /// Constant memory of a module at most.
    pub constant_memory: u32,
    /// Frequency of `clock64()` in kHz: it counts nanoseconds.
    pub clock_khz: u32,
    /// Local memory of a thread at most.
    pub max_local_per_thread: u32,
    /// Bytes of parameters of a kernel at most.
    pub max_parameter_bytes: u32,
}

impl Properties {
    /// Those of the GPU that is made by `config`.
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
            max_cluster_blocks: crate::lower::MAX_CLUSTER,
            max_threads_per_multiprocessor: 2048,
            max_blocks_per_multiprocessor: 32,
            max_block: [1024, 1024, 64],
            max_grid: [0x7fff_ffff, 65535, 65535],
            shared_per_block: 48 << 10,
            shared_per_block_optin: 227 << 10,
            shared_per_multiprocessor: 228 << 10,
            shared_reserved_per_block: 1 << 10,
            registers_per_block: crate::lower::BLOCK_REGISTERS,
            constant_memory: 64 << 10,
            clock_khz: 1_000_000,
            max_local_per_thread: 512 << 10,
            max_parameter_bytes: 32764,
        }
    }
}

pub(crate) struct Inner {
    pub properties: Properties,
    pub printf: PrintfSink,
    fault: FaultSink,
    pub memory: Memory,
    pub pool: Arc<Pool>,
    pub textures: Textures,
    /// Of errors.
    pub texts: Texts,
    pub cancelled: AtomicBool,
    /// Warp instructions of finished blocks.
    pub executed: AtomicU64,
    failed: AtomicBool,
    sticky: Mutex<Option<Error>>,
    epoch: Instant,
}

impl AsRef<Memory> for Inner {
    fn as_ref(&self) -> &Memory {
        &self.memory
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.pool.shut_down();
    }
}

/// A GPU in software. Cloning gives another handle to the same one; it goes when the last handle, stream,
/// module and function of it is gone.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) inner: Arc<Inner>,
}

impl Gpu {
    /// Makes a GPU and starts its workers.
    pub fn new(config: GpuConfig) -> Result<Gpu> {
        let properties = Properties::of(&config);
        let workers = properties.multiprocessors as usize;
        Ok(Gpu {
            inner: Arc::new(Inner {
                properties,
                printf: config.printf,
                fault: config.fault,
                memory: Memory::new(config.memory_bytes),
                pool: Pool::start(workers)?,
                textures: Textures::default(),
                texts: Texts::default(),
                cancelled: AtomicBool::new(false),
                executed: AtomicU64::new(0),
                failed: AtomicBool::new(false),
                sticky: Mutex::new(None),
                epoch: Instant::now(),
            }),
        })
    }

    /// What this GPU is.
    pub fn properties(&self) -> &Properties {
        &self.inner.properties
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.inner.memory
    }

    /// Nanoseconds since the GPU was made: the clock of events.
    pub fn now_ns(&self) -> u64 {
        self.inner.epoch.elapsed().as_nanos() as u64
    }

    /// Warp instructions executed by all blocks that have finished: each is one instruction for up to 32 threads.
    pub fn warp_instructions(&self) -> u64 {
        self.inner.executed.load(Ordering::Relaxed)
    }

    /// Bytes of memory free, and in all.
    pub fn memory_info(&self) -> (u64, u64) {
        self.memory().info()
    }

    /// Puts zeroed memory behind the addresses `addr..addr + size`. Both are multiples of [`crate::GRANULE`] and
    /// lie within [`crate::FIRST_ADDRESS`]`..`[`crate::LAST_ADDRESS`]. Nothing may be accessed there until
    /// [`Gpu::place`] makes allocations in it.
    pub fn map(&self, addr: u64, size: u64) -> Result<()> {
        self.status()?;
        self.memory().map(addr, size)
    }

    /// Takes back a mapping, named exactly as it was made. It must hold no allocation.
    pub fn unmap(&self, addr: u64, size: u64) -> Result<()> {
        self.memory().unmap(addr, size)
    }

    /// Makes `addr..addr + size` an allocation: kernels and copies may use it from now on. Any size and
    /// alignment; wholly mapped, possibly over several mappings; apart from other allocations. The contents
    /// are what they were.
    pub fn place(&self, addr: u64, size: u64) -> Result<()> {
        self.status()?;
        self.memory().place(addr, size)
    }

    /// Ends the allocation that begins at `addr`; returns its size.
    pub fn release(&self, addr: u64) -> Result<u64> {
        self.memory().release(addr)
    }

    /// Allocates memory at an address of the GPU's own choice, apart from what [`Gpu::map`] maps.
    pub fn allocate(&self, size: u64) -> Result<u64> {
        self.inner.memory.allocate_module(size)
    }

    /// Frees memory of [`Gpu::allocate`].
    pub fn free(&self, addr: u64) -> Result<()> {
        self.inner.memory.free_module(addr)
    }

    /// Bytes that kernels' `malloc` may hand out at a time, with what each allocation costs beside its size (16 bytes, rounded
    /// up to 16). It is 8 MiB until this is called (`cudaLimitMallocHeapSize`). What is handed out already stays.
    pub fn set_heap_limit(&self, bytes: u64) {
        self.memory().set_heap_limit(bytes);
    }

    /// The allocation that holds `addr`: its first address and its size.
    pub fn allocation(&self, addr: u64) -> Option<(u64, u64)> {
        self.memory().find(addr).map(|hit| (hit.start, hit.end - hit.start))
    }

    /// As [`Gpu::map`], with a file's bytes from `offset` (a multiple of [`crate::GRANULE`]) as the memory: others that map the same file share
    /// it. The file must not shrink. It does not count as this GPU's memory; [`Gpu::charge`] makes it.
    pub fn map_file(
        &self,
        addr: u64,
        size: u64,
        file: std::os::fd::BorrowedFd<'_>,
        offset: u64,
    ) -> Result<()> {
        self.status()?;
        self.memory().map_file(addr, size, file, offset)
    }

    /// Counts `size` bytes as used without mapping any.
    pub fn charge(&self, size: u64) -> Result<()> {
        self.memory().charge(size)
    }

    /// Takes back what [`Gpu::charge`] counted.
    pub fn discharge(&self, size: u64) {
        self.memory().discharge(size);
    }

    /// As [`Gpu::place`], for ranges that grow and shrink with their mappings: one that touches another is joined with it, so that accesses may cross.
    pub fn show(&self, addr: u64, size: u64) -> Result<()> {
        self.status()?;
        self.memory().show(addr, size)
    }

    /// Ends the access to a part of what [`Gpu::show`] made accessible.
    pub fn hide(&self, addr: u64, size: u64) -> Result<()> {
        self.memory().hide(addr, size)
    }

    /// Lets this GPU's kernels and copies into all memory of `peer`. It keeps `peer` alive until [`Gpu::disable_peer`].
    pub fn enable_peer(&self, peer: &Gpu) {
        self.memory().enable_peer(peer.inner.clone());
    }

    /// Takes back what [`Gpu::enable_peer`] allowed.
    pub fn disable_peer(&self, peer: &Gpu) {
        self.memory().disable_peer(peer.memory());
    }

    /// Loads PTX text or a fat binary (container, or several after each other), and places its globals.
    pub fn load_module(&self, image: &[u8]) -> Result<Module> {
        self.link_module(&[image])
    }

    /// As [`Gpu::load_module`], for several images that are linked with each other: a function or a variable that one declares `.extern` is another's.
    pub fn link_module(&self, images: &[&[u8]]) -> Result<Module> {
        self.status()?;
        Module::load(self, images)
    }

    /// Whether an image could be loaded, as far as that can be told without the others that it may be linked with.
    pub fn check_image(&self, image: &[u8]) -> Result<()> {
        module::check(self, image)
    }

    /// A new stream.
    pub fn stream(&self) -> Stream {
        Stream::new(self.clone())
    }

    /// The sticky error, if a kernel or an enqueued closure has failed.
    pub fn status(&self) -> Result<()> {
        if !self.inner.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        match &*self.inner.sticky.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Makes `error` sticky, unless there is one.
    pub(crate) fn fail(&self, error: Error) {
        let mut sticky = self.inner.sticky.lock().unwrap_or_else(|e| e.into_inner());
        if sticky.is_none() {
            (self.inner.fault)(&error);
            *sticky = Some(error);
        }
        self.inner.failed.store(true, Ordering::Release);
    }

    /// Stops every kernel, now and from now on, with [`crate::Fault::Cancelled`]: for ending a program whose
    /// kernel does not end.
    pub fn cancel(&self) {
        self.inner.cancelled.store(true, Ordering::Release);
    }

    /// Whether [`Gpu::cancel`] was called: an enqueued closure that waits for something need wait no more.
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.load(Ordering::Acquire)
    }

    /// Runs a kernel and waits for its end: for closures on a stream ([`crate::Stream::enqueue`]) that find out only then what there is to run.
    pub fn run(&self, function: &Function, config: LaunchConfig, params: &[u8]) -> Result<()> {
        self.status()?;
        self.execute(Arc::new(KernelRun::new(self, function, config, params)?))
    }

    /// Runs a kernel on the workers, and all that it launches, and waits for their end.
    pub(crate) fn execute(&self, kernel: Arc<KernelRun>) -> Result<()> {
        let mut waiting = vec![Child::Kernel(kernel)];
        while let Some(next) = waiting.pop() {
            match next {
                Child::Kernel(kernel) => {
                    self.inner.pool.execute(Arc::clone(&kernel))?;
                    waiting.extend(kernel.take_children());
                }
                Child::Transfer(transfer) => transfer.run(self)?,
            }
        }
        Ok(())
    }
}
