//! A block: its warps, its shared memory and its barriers.

use std::sync::Arc;

use crate::device::launch::KernelRun;
use crate::device::memory::{Hit, Memory};
use crate::error::{Error, Fault, Location};
use crate::exec::rows::LANES;
use crate::exec::warp::{Turn, Warp};
use crate::lower::program::Program;

/// Instructions that a warp runs before the block's next warp has its turn.
const QUANTUM: u64 = 20_000;

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
    /// Shared memory, static then dynamic.
    pub shared: Vec<u64>,
    /// Bytes of it.
    pub shared_bytes: u32,
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
    /// The launch.
    #[inline(always)]
    pub fn run(&self) -> &KernelRun {
        // SAFETY: `Block::run` sets the pointer from a reference that outlives the turn.
        unsafe { &*self.run }
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
}

/// How a turn of a block ended.
pub(crate) enum Outcome {
    /// Every thread has exited.
    Finished,
    /// Its time is up.
    Yielded,
    /// A thread faulted.
    Failed(Error),
}

/// Memory that blocks leave for the next.
#[derive(Default)]
pub(crate) struct Scratch {
    shared: Vec<u64>,
}

impl Scratch {
    /// Takes a finished block's memory.
    #[expect(clippy::boxed_local, reason = "the box is what the caller has, and what goes")]
    pub fn recycle(&mut self, mut block: Box<Block>) {
        self.shared = std::mem::take(&mut block.context.shared);
    }
}

/// A block that runs or waits to run.
pub(crate) struct Block {
    context: Box<BlockContext>,
    warps: Vec<Warp>,
    executed: u64,
}

// SAFETY: the raw pointers in a block and its warps lead to its own boxed context, its own frames, and the launch
// and program, which are shared read-only and outlive it; nothing is tied to a thread.
unsafe impl Send for Block {}

impl Block {
    /// A block at its start.
    pub fn new(run: &KernelRun, index: [u32; 3], scratch: &mut Scratch) -> Box<Block> {
        let dim = run.config.block;
        let threads: u32 = dim.iter().product();
        let mut shared = std::mem::take(&mut scratch.shared);
        shared.clear();
        shared.resize((run.shared_bytes as usize).div_ceil(16) * 2, 0);
        let mut context = Box::new(BlockContext {
            run,
            index,
            shared,
            shared_bytes: run.shared_bytes,
            barriers: [Barrier::default(); 16],
            live: threads,
            local_limit: run.gpu.properties.max_local_per_thread,
            hit: Hit { start: 1, end: 0, delta: 0 },
            generation: 0,
        });
        let pointer: *mut BlockContext = &mut *context;
        let warps =
            (0..threads.div_ceil(LANES as u32)).map(|i| Warp::new(pointer, i, dim, &run.code)).collect();
        Box::new(Block { context, warps, executed: 0 })
    }

    /// Warp instructions executed so far.
    pub fn executed(&self) -> u64 {
        self.executed
    }

    /// Runs the block for about `budget` warp instructions.
    pub fn run(&mut self, run: &KernelRun, budget: u64) -> Outcome {
        self.context.run = run;
        let end = self.executed + budget;
        loop {
            let mut progress = false;
            let phases: u64 = self.context.barriers.iter().map(|b| b.phase).sum();
            let mut i = 0;
            while i < self.warps.len() {
                if run.stopping() {
                    let warp = &self.warps[0];
                    return Outcome::Failed(self.context.report(warp, Fault::Cancelled, 0));
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
                        let warp = &mut self.warps[i];
                        let (fault, lane) = warp.fault.take().unwrap_or((Fault::Trap, 0));
                        let error = self.context.report(&self.warps[i], fault, lane);
                        return Outcome::Failed(error);
                    }
                }
                i += 1;
            }
            if self.warps.is_empty() {
                return Outcome::Finished;
            }
            let now: u64 = self.context.barriers.iter().map(|b| b.phase).sum();
            if !progress && now == phases {
                return Outcome::Failed(self.context.report(&self.warps[0], Fault::Deadlock, 0));
            }
            if self.executed >= end {
                return Outcome::Yielded;
            }
        }
    }
}

impl BlockContext {
    fn report(&self, warp: &Warp, fault: Fault, lane: u32) -> Error {
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
