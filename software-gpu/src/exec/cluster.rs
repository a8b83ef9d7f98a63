//! A cluster: blocks that run together, access each other's shared memory and share a barrier. Most clusters
//! have one block.
//!
//! One worker at a time runs a whole cluster, so shared memory never has concurrent users.

use crate::device::launch::KernelRun;
use crate::error::{Error, Fault};
use crate::exec::block::BlockContext;
use crate::exec::rows::LANES;
use crate::exec::warp::{Turn, Warp};
use crate::lower::program::Line;

/// Instructions that a warp runs before the cluster's next warp runs.
const QUANTUM: u64 = 20_000;

/// The state that a cluster's threads share.
pub(crate) struct ClusterContext {
    /// Its blocks by rank.
    blocks: Vec<*mut BlockContext>,
    /// Number of threads that have not exited.
    live: u32,
    /// Number of threads that have arrived at the barrier.
    arrived: u32,
    /// Counts completions of the barrier.
    pub phase: u64,
}

impl ClusterContext {
    /// The block with a rank.
    pub fn block(&self, rank: u32) -> Option<*mut BlockContext> {
        self.blocks.get(rank as usize).copied()
    }

    /// Counts threads that arrive at the barrier; the last one completes it.
    pub fn arrive(&mut self, threads: u32) {
        self.arrived += threads;
        self.complete();
    }

    /// Counts threads that exit, for which the barrier no longer waits. `arrived` of them had arrived in the
    /// current phase.
    pub fn exit(&mut self, threads: u32, arrived: u32) {
        self.live -= threads;
        self.arrived -= arrived;
        self.complete();
    }

    fn complete(&mut self) {
        if self.arrived > 0 && self.arrived == self.live {
            self.arrived = 0;
            self.phase += 1;
        }
    }
}

/// How a cluster's turn ended.
pub(crate) enum Outcome {
    /// Every thread has exited.
    Finished,
    /// Its time slice ended.
    Yielded,
    /// A thread faulted.
    Failed(Error),
}

/// Memory of finished clusters, reused for new ones.
#[derive(Default)]
pub(crate) struct Scratch {
    shared: Vec<Vec<Line>>,
}

impl Scratch {
    /// Takes over a finished cluster's memory.
    #[expect(clippy::boxed_local, reason = "the box is what the caller has, and what goes")]
    pub fn recycle(&mut self, mut cluster: Box<Cluster>) {
        self.shared.extend(cluster.blocks.iter_mut().map(|block| std::mem::take(&mut block.shared)));
    }
}

/// A cluster that runs or waits to run.
pub(crate) struct Cluster {
    #[expect(clippy::vec_box, reason = "warps and the cluster point at the blocks, which must not move")]
    blocks: Vec<Box<BlockContext>>,
    context: Box<ClusterContext>,
    /// The warps of all blocks, by rank.
    warps: Vec<Warp>,
    executed: u64,
}

// SAFETY: the raw pointers in a cluster and its warps point to its own boxed contexts, its own frames, and
// the launch and program, which are shared read-only and outlive it. Nothing is tied to a thread.
unsafe impl Send for Cluster {}

impl Cluster {
    /// A cluster before its first instruction; `index` is its position in the grid, in clusters.
    pub fn new(run: &KernelRun, index: [u32; 3], scratch: &mut Scratch) -> Box<Cluster> {
        let dim = run.config.block;
        let threads: u32 = dim.iter().product();
        let size = run.cluster;
        let count: u32 = size.iter().product();
        let mut context = Box::new(ClusterContext {
            blocks: Vec::with_capacity(count as usize),
            live: threads * count,
            arrived: 0,
            phase: 0,
        });
        let cluster: *mut ClusterContext = &mut *context;
        let mut blocks = Vec::with_capacity(count as usize);
        let each = threads.div_ceil(LANES as u32);
        let mut warps = Vec::with_capacity((each * count) as usize);
        for rank in 0..count {
            let inside = [rank % size[0], rank / size[0] % size[1], rank / size[0] / size[1]];
            let at = std::array::from_fn(|i| index[i] * size[i] + inside[i]);
            let shared = scratch.shared.pop().unwrap_or_default();
            let mut block = Box::new(BlockContext::new(run, at, cluster, rank, shared));
            let pointer: *mut BlockContext = &mut *block;
            context.blocks.push(pointer);
            blocks.push(block);
            warps.extend((0..each).map(|i| Warp::new(pointer, i, dim, &run.code)));
        }
        Box::new(Cluster { blocks, context, warps, executed: 0 })
    }

    /// Number of warp instructions executed so far.
    pub fn executed(&self) -> u64 {
        self.executed
    }

    /// The number of completed phases of all barriers.
    fn phases(&self) -> u64 {
        let blocks = self.blocks.iter().flat_map(|block| &block.barriers);
        self.context.phase + blocks.map(|barrier| barrier.phase).sum::<u64>()
    }

    /// The outcome for a fault of a warp's thread.
    fn report(&self, warp: usize, fault: Fault, lane: u32) -> Outcome {
        let warp = &self.warps[warp];
        // SAFETY: a warp's block belongs to this cluster.
        Outcome::Failed(unsafe { &*warp.block }.report(warp, fault, lane))
    }

    /// Runs the cluster for about `budget` warp instructions.
    pub fn run(&mut self, run: &KernelRun, budget: u64) -> Outcome {
        for block in &mut self.blocks {
            block.begin(run);
        }
        let end = self.executed + budget;
        loop {
            let mut progress = false;
            let phases = self.phases();
            let mut i = 0;
            while i < self.warps.len() {
                if run.stopping() {
                    return self.report(0, Fault::Cancelled, 0);
                }
                match self.warps[i].run(QUANTUM, &mut self.executed) {
                    Turn::Done => {
                        self.warps.remove(i);
                        progress = true;
                        continue;
                    }
                    Turn::Paused => progress = true,
                    Turn::Blocked => {}
                    Turn::Fault => {
                        let (fault, lane) = self.warps[i].fault.take().unwrap_or((Fault::Trap, 0));
                        return self.report(i, fault, lane);
                    }
                }
                i += 1;
            }
            if self.warps.is_empty() {
                return Outcome::Finished;
            }
            if !progress && self.phases() == phases {
                return self.report(0, Fault::Deadlock, 0);
            }
            if self.executed >= end {
                return Outcome::Yielded;
            }
        }
    }
}
