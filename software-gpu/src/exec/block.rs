//! A block: its shared memory and its barriers.

use std::sync::Arc;

use crate::device::launch::KernelRun;
use crate::device::memory::{FoundAllocation, Memory};
use crate::error::{Error, Fault, Location};
use crate::exec::cluster::ClusterContext;
use crate::exec::rows::LANES;
use crate::exec::warp::Warp;
use crate::lower::program::{Line, Program, RESERVED_BYTES};

/// One of a block's 16 barriers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Barrier {
    arrived: u32,
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
    run: *const KernelRun,
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
        run: &KernelRun,
        index: [u32; 3],
        cluster: *mut ClusterContext,
        rank: u32,
        mut shared: Vec<Line>,
    ) -> BlockContext {
        shared.clear();
        shared.resize((run.shared_bytes as usize).div_ceil(size_of::<Line>()), Line([0; 64]));
        BlockContext {
            run,
            index,
            cluster,
            rank,
            shared,
            shared_bytes: run.shared_bytes,
            reserved: [Line([0; 64]); RESERVED_BYTES as usize / size_of::<Line>()],
            barriers: [Barrier::default(); 16],
            live: run.config.block.iter().product(),
            local_limit: run.gpu.properties.max_local_per_thread,
            hit: FoundAllocation { start: 1, end: 0, delta: 0 },
            generation: 0,
        }
    }

    /// Starts a turn. The launch must outlive it.
    pub fn begin(&mut self, run: &KernelRun) {
        self.run = run;
    }

    /// The current launch.
    #[inline(always)]
    pub fn run(&self) -> &KernelRun {
        // SAFETY: `begin` set the pointer from a reference that outlives the turn.
        unsafe { &*self.run }
    }

    /// The cluster that contains the block.
    pub fn cluster(&mut self) -> &mut ClusterContext {
        // SAFETY: the cluster owns its blocks and outlives them, and only the worker that runs it touches it.
        unsafe { &mut *self.cluster }
    }

    /// The module's code.
    pub fn program(&self) -> &Program {
        &self.run().program
    }

    /// Global memory.
    #[inline(always)]
    pub fn memory(&self) -> &Memory {
        &self.run().gpu.memory
    }

    /// Counts threads that arrive at a barrier; the last one completes it.
    pub fn arrive(&mut self, id: u32, expected: u32, threads: u32, set: u32) {
        let barrier = &mut self.barriers[id as usize];
        barrier.arrived += threads;
        barrier.set += set;
        barrier.expected = expected;
        self.complete(id as usize);
    }

    fn complete(&mut self, id: usize) {
        let live = self.live;
        let barrier = &mut self.barriers[id];
        let expected = if barrier.expected == 0 { live } else { barrier.expected };
        if barrier.arrived > 0 && barrier.arrived >= expected {
            barrier.popc = barrier.set;
            barrier.all = barrier.set == barrier.arrived;
            barrier.arrived = 0;
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

    /// The error for a fault of one of the block's threads.
    pub fn report(&self, warp: &Warp, fault: Fault, lane: u32) -> Error {
        let code = warp.code();
        let lane = lane as usize % LANES;
        Error::Kernel {
            fault,
            location: Arc::new(Location {
                kernel: self.run().code.name.clone(),
                function: code.name.clone(),
                ptx_line: code.insts.get(warp.pc as usize).map_or(0, |i| i.line),
                block: self.index,
                thread: [warp.tid[0][lane], warp.tid[1][lane], warp.tid[2][lane]],
            }),
        }
    }
}
