//! A block: its shared memory and its barriers.

use std::sync::Arc;

use crate::device::launch::KernelRun;
use crate::device::memory::{Hit, Memory};
use crate::error::{Error, Fault, Location};
use crate::exec::cluster::ClusterContext;
use crate::exec::rows::LANES;
use crate::exec::warp::Warp;
use crate::lower::program::{Line, Program, RESERVED_BYTES};

/// One of a block's 16 barriers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Barrier {
    arrived: u32,
    /// Threads that complete it; 0: all of the block that live.
    expected: u32,
    set: u32,
    /// Counts completions.
    pub phase: u64,
    /// Of the last completed phase, for a reduction: threads whose predicate held, `and` and `or` of them. Which of
    /// these is meant is known to the reader, so the three are kept apart.
    pub popc: u32,
    pub all: bool,
}

/// What the threads of a block share.
pub(crate) struct BlockContext {
    run: *const KernelRun,
    /// `blockIdx`.
    pub index: [u32; 3],
    /// The cluster that it is part of, and its place there.
    pub cluster: *mut ClusterContext,
    pub rank: u32,
    /// Shared memory, static then dynamic.
    pub shared: Vec<Line>,
    /// Bytes of it.
    pub shared_bytes: u32,
    /// The system's own.
    pub reserved: [Line; RESERVED_BYTES as usize / size_of::<Line>()],
    pub barriers: [Barrier; 16],
    /// Threads that have not exited.
    pub live: u32,
    /// Local memory of a thread at most.
    pub local_limit: u32,
    /// The allocation that was last used.
    pub hit: Hit,
    /// The generation of `hit`.
    pub generation: u64,
}

impl BlockContext {
    /// A block at its start, with memory that another block used.
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
            hit: Hit { start: 1, end: 0, delta: 0 },
            generation: 0,
        }
    }

    /// Begins a turn; the launch must outlive it.
    pub fn begin(&mut self, run: &KernelRun) {
        self.run = run;
    }

    /// The launch.
    #[inline(always)]
    pub fn run(&self) -> &KernelRun {
        // SAFETY: `begin` sets the pointer from a reference that outlives the turn.
        unsafe { &*self.run }
    }

    /// The cluster.
    pub fn cluster(&mut self) -> &mut ClusterContext {
        // SAFETY: the cluster owns its blocks and outlives them, and only the worker that runs it touches it.
        unsafe { &mut *self.cluster }
    }

    /// The module.
    pub fn program(&self) -> &Program {
        &self.run().program
    }

    /// Global memory.
    #[inline(always)]
    pub fn memory(&self) -> &Memory {
        &self.run().gpu.memory
    }

    /// Counts threads that arrive at a barrier, and completes it with the last.
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

    /// Counts threads that exit: barriers no longer wait for them.
    pub fn exit(&mut self, threads: u32) {
        self.live -= threads;
        for id in 0..self.barriers.len() {
            if self.barriers[id].expected == 0 {
                self.complete(id);
            }
        }
    }

    /// The error of a fault of one of its warps' threads.
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
