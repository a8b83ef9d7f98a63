//! Runs the warps of a cluster's blocks in turns.
//!
//! One worker at a time runs a whole cluster, so shared memory never has concurrent users.

use crate::error::{Error, Fault};
use crate::exec::interpreter::{Interpreter, Turn};
use crate::machine::block::{BlockContext, ClusterContext};
use crate::machine::grid::Grid;
use crate::machine::program::{Code, Program};
use crate::machine::row::{LANES, Line};

/// Instructions that a warp runs before the cluster's next warp runs.
const QUANTUM: u64 = 20_000;

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
    warps: Vec<Interpreter>,
    executed: u64,
}

// SAFETY: the raw pointers in a cluster and its warps point to its own boxed contexts, its own frames, and
// the grid and program, which are shared read-only and outlive it. Nothing is tied to a thread.
unsafe impl Send for Cluster {}

impl Cluster {
    /// A cluster before the first instruction of `kernel`, a function of `program`. `index` is its position
    /// in the grid, in clusters. The program must outlive it.
    pub fn new(
        grid: &Grid,
        program: &Program,
        kernel: &Code,
        index: [u32; 3],
        scratch: &mut Scratch,
    ) -> Box<Cluster> {
        let dim = grid.config.block;
        let threads: u32 = dim.iter().product();
        let size = grid.cluster;
        let count: u32 = size.iter().product();
        let mut context = Box::new(ClusterContext::new(threads * count));
        let cluster: *mut ClusterContext = &mut *context;
        let mut blocks = Vec::with_capacity(count as usize);
        let each = threads.div_ceil(LANES as u32);
        let mut warps = Vec::with_capacity((each * count) as usize);
        for rank in 0..count {
            let inside = [rank % size[0], rank / size[0] % size[1], rank / size[0] / size[1]];
            let at = std::array::from_fn(|i| index[i] * size[i] + inside[i]);
            let shared = scratch.shared.pop().unwrap_or_default();
            let mut block = Box::new(BlockContext::new(grid, at, cluster, rank, shared));
            let pointer: *mut BlockContext = &mut *block;
            context.blocks.push(pointer);
            blocks.push(block);
            warps.extend((0..each).map(|i| Interpreter::new(pointer, i, dim, program, kernel)));
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

    /// Runs the cluster for about `budget` warp instructions.
    pub fn run(&mut self, grid: &Grid, budget: u64) -> Outcome {
        for block in &mut self.blocks {
            block.begin(grid);
        }
        let end = self.executed + budget;
        loop {
            let mut progress = false;
            let phases = self.phases();
            let mut i = 0;
            while i < self.warps.len() {
                if grid.stopping() {
                    return Outcome::Failed(self.warps[0].report(Fault::Cancelled, 0));
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
                        let (fault, lane) = self.warps[i].take_fault().unwrap_or((Fault::Trap, 0));
                        return Outcome::Failed(self.warps[i].report(fault, lane));
                    }
                }
                i += 1;
            }
            if self.warps.is_empty() {
                return Outcome::Finished;
            }
            if !progress && self.phases() == phases {
                return Outcome::Failed(self.warps[0].report(Fault::Deadlock, 0));
            }
            if self.executed >= end {
                return Outcome::Yielded;
            }
        }
    }
}
