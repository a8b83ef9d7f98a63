//! A block: its shared memory and its barriers. And a cluster: blocks that run together, access each other's
//! shared memory and share a barrier. Most clusters have one block.

use crate::machine::address::RESERVED_BYTES;
use crate::machine::grid::Grid;
use crate::machine::memory::{FoundAllocation, Memory};
use crate::machine::row::Line;

/// One of a block's 16 barriers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Barrier {
    arrived: u32,
    /// Arrivals of threads that do not exist or have exited: a warp counts as a whole.
    absent: u32,
    /// Threads that complete it; 0 for all threads of the block that have not exited.
    expected: u32,
    set: u32,
    /// Counts completions.
    pub phase: u64,
    /// Results of the last completed phase's reduction: how many threads had a true predicate, and the `and`
    /// and `or` of all predicates. All three are kept because only the reader knows which one it needs.
    pub popc: u32,
    pub all: bool,
}

/// The state that a block's threads share.
pub(crate) struct BlockContext {
    grid: *const Grid,
    /// `blockIdx`.
    pub index: [u32; 3],
    /// The cluster that contains it, and its rank there.
    pub cluster: *mut ClusterContext,
    pub rank: u32,
    /// Shared memory, static then dynamic.
    pub shared: Vec<Line>,
    /// Size of `shared` in bytes.
    pub shared_bytes: u32,
    /// Shared memory reserved for the system.
    pub reserved: [Line; RESERVED_BYTES as usize / size_of::<Line>()],
    pub barriers: [Barrier; 16],
    /// Number of threads that have not exited.
    pub live: u32,
    /// Maximum local memory per thread in bytes.
    pub local_limit: u32,
    /// The allocation that was accessed last.
    pub hit: FoundAllocation,
    /// The memory generation for which `hit` is valid.
    pub generation: u64,
}

impl BlockContext {
    /// A block before its first instruction, in memory recycled from another block.
    pub fn new(
        grid: &Grid,
        index: [u32; 3],
        cluster: *mut ClusterContext,
        rank: u32,
        mut shared: Vec<Line>,
    ) -> BlockContext {
        shared.clear();
        shared.resize((grid.shared_bytes as usize).div_ceil(size_of::<Line>()), Line([0; 64]));
        BlockContext {
            grid,
            index,
            cluster,
            rank,
            shared,
            shared_bytes: grid.shared_bytes,
            reserved: [Line([0; 64]); RESERVED_BYTES as usize / size_of::<Line>()],
            barriers: [Barrier::default(); 16],
            live: grid.config.block.iter().product(),
            local_limit: grid.hardware.properties.max_local_per_thread,
            hit: FoundAllocation { start: 1, end: 0, delta: 0 },
            generation: 0,
        }
    }

    /// Starts a turn. The grid must outlive it.
    pub fn begin(&mut self, grid: &Grid) {
        self.grid = grid;
    }

    /// The current launch's grid.
    #[inline(always)]
    pub fn grid(&self) -> &Grid {
        // SAFETY: `begin` set the pointer from a reference that outlives the turn.
        unsafe { &*self.grid }
    }

    /// The cluster that contains the block.
    pub fn cluster(&mut self) -> &mut ClusterContext {
        // SAFETY: the cluster owns its blocks and outlives them, and only the worker that runs it touches it.
        unsafe { &mut *self.cluster }
    }

    /// Global memory.
    #[inline(always)]
    pub fn memory(&self) -> &Memory {
        &self.grid().hardware.memory
    }

    /// Counts threads that arrive at a barrier; the last one completes it.
    pub fn arrive(&mut self, id: u32, expected: u32, threads: u32, set: u32) {
        let barrier = &mut self.barriers[id as usize];
        barrier.arrived += threads;
        barrier.set += set;
        barrier.expected = expected;
        self.complete(id as usize);
    }

    /// Counts threads that a warp lacks, once its others have arrived at a barrier of so many threads.
    pub fn arrive_absent(&mut self, id: u32, threads: u32) {
        self.barriers[id as usize].absent += threads;
        self.complete(id as usize);
    }

    fn complete(&mut self, id: usize) {
        let live = self.live;
        let barrier = &mut self.barriers[id];
        let expected = if barrier.expected == 0 { live } else { barrier.expected };
        if barrier.arrived > 0 && barrier.arrived + barrier.absent >= expected {
            barrier.popc = barrier.set;
            barrier.all = barrier.set == barrier.arrived;
            barrier.arrived = 0;
            barrier.absent = 0;
            barrier.set = 0;
            barrier.phase += 1;
        }
    }

    /// Counts threads that exit, for which barriers no longer wait.
    pub fn exit(&mut self, threads: u32) {
        self.live -= threads;
        for id in 0..self.barriers.len() {
            if self.barriers[id].expected == 0 {
                self.complete(id);
            }
        }
    }
}

/// The state that a cluster's threads share.
pub(crate) struct ClusterContext {
    /// Its blocks by rank.
    pub blocks: Vec<*mut BlockContext>,
    /// Number of threads that have not exited.
    live: u32,
    /// Number of threads that have arrived at the barrier.
    arrived: u32,
    /// Counts completions of the barrier.
    pub phase: u64,
}

impl ClusterContext {
    /// A cluster of this many threads, whose blocks are to be added.
    pub fn new(threads: u32) -> ClusterContext {
        ClusterContext { blocks: Vec::new(), live: threads, arrived: 0, phase: 0 }
    }

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
