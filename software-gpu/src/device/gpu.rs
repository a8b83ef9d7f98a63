//! The GPU: its memory, its workers and the sticky error.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::device::child_launch::Child;
use crate::device::launch::{KernelRun, Pool};
use crate::device::module::{self, Function, Module};
use crate::error::{Error, Result};
use crate::machine::hardware::Hardware;
use crate::machine::launcher::LaunchConfig;
use crate::machine::memory::{Memory, is_of_module};
use crate::machine::properties::{FaultSink, GpuConfig, Properties};

pub(crate) struct Inner {
    pub hardware: Arc<Hardware>,
    pool: Arc<Pool>,
    fault: FaultSink,
    failed: AtomicBool,
    sticky: Mutex<Option<Error>>,
    epoch: Instant,
}

impl AsRef<Memory> for Inner {
    fn as_ref(&self) -> &Memory {
        &self.hardware.memory
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.pool.shut_down();
    }
}

/// A GPU in software. Clones refer to the same GPU. Its workers end with its last handle and stream; its
/// memory lasts until its last module and function are dropped, too.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) inner: Arc<Inner>,
}

impl Gpu {
    /// Creates a GPU and starts its workers.
    pub fn new(config: GpuConfig) -> Result<Gpu> {
        let hardware = Arc::new(Hardware::new(&config));
        let workers = hardware.properties.multiprocessors as usize;
        Ok(Gpu {
            inner: Arc::new(Inner {
                hardware,
                pool: Pool::start(workers)?,
                fault: config.fault,
                failed: AtomicBool::new(false),
                sticky: Mutex::new(None),
                epoch: Instant::now(),
            }),
        })
    }

    /// The GPU's properties.
    pub fn properties(&self) -> &Properties {
        &self.inner.hardware.properties
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.inner.hardware.memory
    }

    /// Nanoseconds since the GPU was created. Events use this clock.
    pub fn now_ns(&self) -> u64 {
        self.inner.epoch.elapsed().as_nanos() as u64
    }

    /// Warp instructions executed by all finished blocks. Each is one instruction for up to 32 threads.
    pub fn warp_instructions(&self) -> u64 {
        self.inner.hardware.executed.load(Ordering::Relaxed)
    }

    /// Free and total memory in bytes.
    pub fn memory_info(&self) -> (u64, u64) {
        self.memory().info()
    }

    /// Backs the addresses `addr..addr + size` with zeroed memory. Both must be multiples of
    /// [`crate::GRANULE`], and the range must be within [`crate::FIRST_ADDRESS`]`..`[`crate::LAST_ADDRESS`].
    /// The memory becomes accessible when [`Gpu::place`] makes allocations in it.
    pub fn map(&self, addr: u64, size: u64) -> Result<()> {
        self.status()?;
        self.memory().map(addr, size)
    }

    /// Removes a mapping, which must be given exactly as it was made and must contain no allocation.
    pub fn unmap(&self, addr: u64, size: u64) -> Result<()> {
        self.memory().unmap(addr, size)
    }

    /// Makes `addr..addr + size` an allocation that kernels and copies can access. It can have any size and
    /// alignment and span several mappings, but must be entirely mapped and not overlap another allocation.
    /// The memory keeps its contents.
    pub fn place(&self, addr: u64, size: u64) -> Result<()> {
        self.status()?;
        self.memory().place(addr, size)
    }

    /// Removes the allocation that begins at `addr` and returns its size.
    pub fn release(&self, addr: u64) -> Result<u64> {
        self.memory().release(addr)
    }

    /// Allocates memory at an address that the GPU chooses, outside the range of [`Gpu::map`].
    pub fn allocate(&self, size: u64) -> Result<u64> {
        self.inner.hardware.memory.allocate_module(size)
    }

    /// Frees memory from [`Gpu::allocate`].
    pub fn free(&self, addr: u64) -> Result<()> {
        self.inner.hardware.memory.free_module(addr)
    }

    /// Sets how many bytes kernels can have allocated with `malloc` at once, including the overhead of each
    /// allocation (16 bytes, and rounding up to 16). The default is 8 MiB (`cudaLimitMallocHeapSize`).
    /// Existing allocations are not affected.
    pub fn set_heap_limit(&self, bytes: u64) {
        self.memory().set_heap_limit(bytes);
    }

    /// The address and size of the allocation that contains `addr`, if it is a module's or from
    /// [`Gpu::allocate`].
    pub fn module_allocation(&self, addr: u64) -> Option<(u64, u64)> {
        if is_of_module(addr) { self.allocation(addr) } else { None }
    }

    /// The address and size of the allocation that contains `addr`.
    pub fn allocation(&self, addr: u64) -> Option<(u64, u64)> {
        self.memory().find(addr).map(|hit| (hit.start, hit.end - hit.start))
    }

    /// Like [`Gpu::map`], but backed by a file from `offset` on, which must be a multiple of
    /// [`crate::GRANULE`]. Everyone who maps the file shares the memory. The file must not shrink. The memory
    /// does not count as this GPU's; use [`Gpu::charge`] to count it.
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

    /// Removes the file from a mapping that [`Gpu::map_file`] created, given exactly as it was created. The
    /// mapping and its allocations stay. Until [`Gpu::bring_back`], accesses to them end the process.
    pub fn set_aside(&self, addr: u64, size: u64) -> Result<()> {
        self.memory().set_aside(addr, size)
    }

    /// Gives a mapping that was set aside a file again, from the file's beginning.
    pub fn bring_back(&self, addr: u64, size: u64, file: std::os::fd::BorrowedFd<'_>) -> Result<()> {
        self.memory().bring_back(addr, size, file)
    }

    /// The host address of `size` bytes, which must be in one mapping, allocated or not. They are readable
    /// and writable as long as the mapping is not set aside.
    pub fn mapped_range(&self, addr: u64, size: u64) -> Result<*mut u8> {
        self.memory().mapped_range(addr, size)
    }

    /// Counts `size` bytes as used without mapping any.
    pub fn charge(&self, size: u64) -> Result<()> {
        self.memory().charge(size)
    }

    /// Reverses [`Gpu::charge`].
    pub fn discharge(&self, size: u64) {
        self.memory().discharge(size);
    }

    /// Like [`Gpu::place`], for ranges that grow and shrink with their mappings. Adjacent ranges are merged,
    /// so that accesses can cross from one to the other.
    pub fn show(&self, addr: u64, size: u64) -> Result<()> {
        self.status()?;
        self.memory().show(addr, size)
    }

    /// Makes part of a range from [`Gpu::show`] inaccessible again.
    pub fn hide(&self, addr: u64, size: u64) -> Result<()> {
        self.memory().hide(addr, size)
    }

    /// Gives this GPU's kernels and copies access to the memory of `peer` except what [`Gpu::show`] shows,
    /// and keeps `peer` alive until [`Gpu::disable_peer`].
    pub fn enable_peer(&self, peer: &Gpu) {
        self.memory().enable_peer(peer.inner.clone());
    }

    /// Reverses [`Gpu::enable_peer`].
    pub fn disable_peer(&self, peer: &Gpu) {
        self.memory().disable_peer(peer.memory());
    }

    /// Loads PTX text or a fat binary (one container, or several in a row), and places its globals.
    pub fn load_module(&self, image: &[u8]) -> Result<Module> {
        self.link_module(&[image])
    }

    /// Like [`Gpu::load_module`], for several images that are linked: a function or variable that is
    /// `.extern` in one may be defined in another.
    pub fn link_module(&self, images: &[&[u8]]) -> Result<Module> {
        self.status()?;
        Module::load(&self.inner.hardware, images)
    }

    /// Checks whether an image could be loaded, apart from symbols that other images may define.
    pub fn check_image(&self, image: &[u8]) -> Result<()> {
        module::check(&self.inner.hardware, image)
    }

    /// Returns the sticky error if a kernel or an enqueued closure has failed.
    pub fn status(&self) -> Result<()> {
        if !self.inner.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        match &*self.inner.sticky.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Makes `error` the sticky error unless there already is one.
    pub(crate) fn fail(&self, error: Error) {
        let mut sticky = self.inner.sticky.lock().unwrap_or_else(|e| e.into_inner());
        if sticky.is_none() {
            (self.inner.fault)(&error);
            *sticky = Some(error);
        }
        self.inner.failed.store(true, Ordering::Release);
    }

    /// Makes the GPU fail like one with a hardware failure: every operation, including running ones, ends
    /// with this `CUresult`, unless the GPU already has another error.
    pub fn break_down(&self, code: u32) {
        self.fail(Error::Breakdown(code));
        self.cancel();
    }

    /// The `CUresult` of [`Gpu::break_down`], if that is the GPU's error.
    pub fn breakdown(&self) -> Option<u32> {
        match self.status() {
            Err(Error::Breakdown(code)) => Some(code),
            _ => None,
        }
    }

    /// Stops every kernel, now and in the future, with [`crate::Fault::Cancelled`]. Use it to end a program
    /// whose kernel never finishes.
    pub fn cancel(&self) {
        self.inner.hardware.cancelled.store(true, Ordering::Release);
    }

    /// Whether [`Gpu::cancel`] was called, so that an enqueued closure can stop waiting.
    pub fn is_cancelled(&self) -> bool {
        self.inner.hardware.cancelled.load(Ordering::Acquire)
    }

    /// Checks a launch as [`crate::Stream::launch`] does, without running it.
    pub fn check_launch(&self, function: &Function, config: LaunchConfig, params: &[u8]) -> Result<()> {
        KernelRun::new(&self.inner.hardware, function, config, params).map(drop)
    }

    /// Runs a kernel and waits for it. This is for closures on a stream ([`crate::Stream::enqueue`]) that
    /// decide only when they run which kernel to run.
    pub fn run(&self, function: &Function, config: LaunchConfig, params: &[u8]) -> Result<()> {
        self.status()?;
        self.execute(Arc::new(KernelRun::new(&self.inner.hardware, function, config, params)?))
    }

    /// Runs a kernel and its child launches on the workers, and waits for them.
    pub(crate) fn execute(&self, kernel: Arc<KernelRun>) -> Result<()> {
        let mut waiting = vec![Child::Kernel(kernel)];
        while let Some(next) = waiting.pop() {
            match next {
                Child::Kernel(kernel) => {
                    self.inner.pool.execute(Arc::clone(&kernel))?;
                    waiting.extend(kernel.take_children());
                }
                Child::Transfer(transfer) => self.transfer(transfer)?,
            }
        }
        Ok(())
    }
}
