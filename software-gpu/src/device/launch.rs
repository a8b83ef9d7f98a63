//! Launches: the requirements on a launch, and the workers that run its blocks.
//!
//! A worker takes one cluster at a time (usually a single block) and runs it until it finishes or its time
//! slice ends. It then sets the cluster aside and takes another, of this kernel or of one in another stream.
//! This way blocks that wait for each other always make progress (cooperative launches, look-back scans,
//! flags set by another stream).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::device::child_launch::{Child, Children};
use crate::device::module::Function;
use crate::error::{Error, Fault, Location, Result};
use crate::exec::cluster::{Cluster, Outcome, Scratch};
use crate::lower::info::FunctionInfo;
use crate::machine::grid::Grid;
use crate::machine::hardware::Hardware;
use crate::machine::launcher::{LaunchConfig, Launcher};
use crate::machine::program::{Code, Program};
use crate::machine::row::Line;

/// Time slice: the warp instructions after which a cluster yields to others.
const SLICE: u64 = 1 << 20;

/// A checked launch, with the state of its blocks.
pub(crate) struct KernelRun {
    grid: Grid,
    program: Arc<Program>,
    code: Arc<Code>,
    children: Arc<Children>,
    /// The clusters in the grid. The counts below are in clusters too.
    all_clusters: u64,
    resident_limit: u64,
    next: AtomicU64,
    started: AtomicU64,
    finished: AtomicU64,
    suspended: Mutex<VecDeque<Box<Cluster>>>,
    result: Mutex<(bool, Option<Error>)>,
    done: Condvar,
}

static GRID_IDS: AtomicU64 = AtomicU64::new(1);

impl KernelRun {
    pub fn new(
        hardware: &Arc<Hardware>,
        function: &Function,
        config: LaunchConfig,
        params: &[u8],
    ) -> Result<KernelRun> {
        let p = &hardware.properties;
        let info = function.info();
        if let Some(reason) = &info.unsupported {
            return Err(Error::UnsupportedFunction { kernel: info.name.clone(), reason: reason.clone() });
        }
        for i in 0..3 {
            if config.block[i] == 0 || config.block[i] > p.max_block[i] {
                return Err(Error::InvalidArgument(format!("invalid block dimensions {:?}", config.block)));
            }
            if config.grid[i] == 0 || config.grid[i] > p.max_grid[i] {
                return Err(Error::InvalidArgument(format!("invalid grid dimensions {:?}", config.grid)));
            }
        }
        let threads: u64 = config.block.iter().map(|&n| u64::from(n)).product();
        if threads > u64::from(p.max_threads_per_block) {
            return Err(Error::InvalidArgument(format!("invalid block of {threads} threads")));
        }
        if threads > u64::from(info.max_threads) {
            return Err(Error::LaunchOutOfResources(format!(
                "{threads} threads in a block; {} allows {}",
                info.name, info.max_threads
            )));
        }
        if info.required_block != [0; 3] && config.block != info.required_block {
            return Err(Error::InvalidArgument(format!(
                "blocks of {:?} threads; {} requires {:?}",
                config.block, info.name, info.required_block
            )));
        }
        let cluster = cluster_size(&config, info)?;
        let shared_bytes = u64::from(info.shared_bytes) + u64::from(config.dynamic_shared);
        if shared_bytes > u64::from(p.shared_per_block_optin) {
            return Err(Error::InvalidArgument(format!(
                "{shared_bytes} bytes of shared memory; the maximum is {}",
                p.shared_per_block_optin
            )));
        }
        // As in CUDA: more bytes than the kernel takes are an error, and so are none at all; missing bytes
        // are zero.
        let wanted = info.param_bytes as usize;
        if params.len() > wanted {
            let (given, name) = (params.len(), &info.name);
            return Err(Error::LaunchOutOfResources(format!(
                "{given} bytes of parameters; {name} takes {wanted}"
            )));
        }
        if params.is_empty() && wanted > 0 {
            return Err(Error::InvalidArgument(format!("no parameters; {} takes {wanted} bytes", info.name)));
        }
        let mut lines = vec![Line([0; 64]); wanted.div_ceil(size_of::<Line>())];
        for (line, bytes) in lines.iter_mut().zip(params.chunks(size_of::<Line>())) {
            line.0[..bytes.len()].copy_from_slice(bytes);
        }
        // At most 2^63, because the dimensions are bounded.
        let blocks: u64 = config.grid.iter().map(|&n| u64::from(n)).product();
        let size = u64::from(cluster.iter().product::<u32>());
        let resident_limit = u64::from(function.max_resident_blocks(threads as u32, config.dynamic_shared));
        if config.cooperative && blocks > resident_limit {
            return Err(Error::CooperativeLaunchTooLarge { blocks, limit: resident_limit });
        }
        let workspace = config.cooperative.then(|| hardware.allocate(512)).transpose()?;
        let children = Arc::new(Children::new(Arc::clone(hardware), function.module()));
        let grid = Grid {
            hardware: Arc::clone(hardware),
            launcher: Arc::clone(&children) as Arc<dyn Launcher>,
            config,
            params: lines,
            param_bytes: wanted as u32,
            shared_bytes: info.shared_bytes.next_multiple_of(info.dynamic_shared_alignment)
                + config.dynamic_shared,
            cluster,
            explicit_cluster: config.cluster.is_some() || info.required_cluster != [0; 3],
            grid_id: GRID_IDS.fetch_add(1, Ordering::Relaxed),
            workspace,
            failed: AtomicBool::new(false),
        };
        Ok(KernelRun {
            grid,
            program: Arc::clone(function.program()),
            code: Arc::clone(function.code()),
            children,
            all_clusters: blocks / size,
            resident_limit: (resident_limit / size).max(1),
            next: AtomicU64::new(0),
            started: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            suspended: Mutex::new(VecDeque::new()),
            result: Mutex::new((false, None)),
            done: Condvar::new(),
        })
    }

    fn fail(&self, error: Error) {
        self.result.lock().unwrap_or_else(|e| e.into_inner()).1.get_or_insert(error);
        self.grid.failed.store(true, Ordering::Release);
    }

    fn broken(&self) -> Error {
        let name = &self.code.name;
        let location = Location {
            kernel: name.clone(),
            function: name.clone(),
            ptx_line: 0,
            block: [0; 3],
            thread: [0; 3],
        };
        let fault = Fault::IllegalInstruction("internal error of the software GPU: a worker panicked".into());
        Error::Kernel { fault, location: Arc::new(location) }
    }

    fn cluster_index(&self, linear: u64) -> [u32; 3] {
        let (x, y) = (u64::from(self.grid.clusters(0)), u64::from(self.grid.clusters(1)));
        [(linear % x) as u32, (linear / x % y) as u32, (linear / x / y) as u32]
    }

    fn suspended(&self) -> MutexGuard<'_, VecDeque<Box<Cluster>>> {
        self.suspended.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What it has started that runs after it, the latest first.
    pub fn take_children(&self) -> Vec<Child> {
        self.children.take()
    }

    /// The next cluster to run: a new one as long as another may be resident, else one that was set aside.
    fn take(&self, scratch: &mut Scratch) -> Option<Box<Cluster>> {
        // Other threads change both: a cluster that finishes between the two loads may be counted as started
        // later.
        let finished = self.finished.load(Ordering::Relaxed);
        let resident = self.started.load(Ordering::Relaxed).saturating_sub(finished);
        if resident < self.resident_limit && self.next.load(Ordering::Relaxed) < self.all_clusters {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index < self.all_clusters {
                self.started.fetch_add(1, Ordering::Relaxed);
                let index = self.cluster_index(index);
                return Some(Cluster::new(&self.grid, &self.program, &self.code, index, scratch));
            }
        }
        self.suspended().pop_front()
    }

    /// Whether a worker could run something of this kernel.
    fn has_work(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.all_clusters || !self.suspended().is_empty()
    }

    /// Counts a cluster as finished. Returns true for the last one.
    fn finish_cluster(&self) -> bool {
        self.finished.fetch_add(1, Ordering::AcqRel) + 1 == self.all_clusters
    }

    fn complete(&self) {
        self.result.lock().unwrap_or_else(|e| e.into_inner()).0 = true;
        self.done.notify_all();
    }

    fn wait(&self) -> Result<()> {
        let mut result = self.result.lock().unwrap_or_else(|e| e.into_inner());
        while !result.0 {
            result = self.done.wait(result).unwrap_or_else(|e| e.into_inner());
        }
        match result.1.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// The cluster size of a launch.
fn cluster_size(config: &LaunchConfig, info: &FunctionInfo) -> Result<[u32; 3]> {
    let required = Some(info.required_cluster).filter(|&r| r != [0; 3]);
    let Some(size) = config.cluster.or(required) else {
        if info.cluster_must_be_given {
            return Err(Error::InvalidClusterSize(format!(
                "{} needs a cluster size from the launch",
                info.name
            )));
        }
        return Ok([1; 3]);
    };
    let blocks = size.iter().fold(1, |all: u32, &n| all.saturating_mul(n));
    let divides = (0..3).all(|i| size[i] > 0 && config.grid[i].is_multiple_of(size[i]));
    if !divides || blocks > info.max_cluster_blocks || required.is_some_and(|r| r != size) {
        let (grid, most) = (config.grid, info.max_cluster_blocks);
        let requires = required.map_or(String::new(), |r| format!("; {} requires {r:?}", info.name));
        return Err(Error::InvalidClusterSize(format!(
            "clusters of {size:?} blocks in a grid of {grid:?} blocks, at most {most} per cluster{requires}"
        )));
    }
    Ok(size)
}

#[derive(Default)]
struct PoolState {
    kernels: VecDeque<Arc<KernelRun>>,
    shut_down: bool,
}

/// A GPU's worker threads.
pub(crate) struct Pool {
    state: Mutex<PoolState>,
    work: Condvar,
}

impl Pool {
    pub fn start(workers: usize) -> Result<Arc<Pool>> {
        let pool = Arc::new(Pool { state: Mutex::new(PoolState::default()), work: Condvar::new() });
        for i in 0..workers {
            let worker = Arc::clone(&pool);
            std::thread::Builder::new()
                .name(format!("sgpu-worker-{i}"))
                .spawn(move || worker.work())
                .map_err(|e| Error::Host { what: "a worker thread".into(), error: e.to_string() })?;
        }
        Ok(pool)
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Makes the workers exit once they have nothing left to do.
    pub fn shut_down(&self) {
        self.lock().shut_down = true;
        self.work.notify_all();
    }

    pub fn execute(&self, kernel: Arc<KernelRun>) -> Result<()> {
        self.lock().kernels.push_back(Arc::clone(&kernel));
        self.work.notify_all();
        kernel.wait()
    }

    /// The next kernel with work, which moves to the end of the queue.
    fn next_kernel(&self) -> Option<Arc<KernelRun>> {
        let mut state = self.lock();
        loop {
            for _ in 0..state.kernels.len() {
                if let Some(kernel) = state.kernels.pop_front() {
                    let ready = kernel.has_work();
                    state.kernels.push_back(Arc::clone(&kernel));
                    if ready {
                        return Some(kernel);
                    }
                }
            }
            if state.shut_down {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn work(&self) {
        let mut scratch = Scratch::default();
        while let Some(kernel) = self.next_kernel() {
            let mut budget: u64 = SLICE;
            while let Some(mut cluster) = kernel.take(&mut scratch) {
                let outcome = if kernel.grid.failed.load(Ordering::Acquire) {
                    Outcome::Finished
                } else {
                    // A bug in this crate ends the kernel but not the threads that wait for it.
                    let turn = std::panic::AssertUnwindSafe(|| cluster.run(&kernel.grid, budget));
                    std::panic::catch_unwind(turn).unwrap_or_else(|_| Outcome::Failed(kernel.broken()))
                };
                match outcome {
                    Outcome::Yielded => {
                        kernel.suspended().push_back(cluster);
                        self.work.notify_one();
                        break;
                    }
                    Outcome::Finished => budget = budget.saturating_sub(cluster.executed()).max(1 << 12),
                    Outcome::Failed(error) => kernel.fail(error),
                }
                kernel.grid.hardware.executed.fetch_add(cluster.executed(), Ordering::Relaxed);
                scratch.recycle(cluster);
                if kernel.finish_cluster() {
                    self.lock().kernels.retain(|k| !Arc::ptr_eq(k, &kernel));
                    kernel.complete();
                    break;
                }
                if budget <= 1 << 12 {
                    break;
                }
            }
        }
    }
}
