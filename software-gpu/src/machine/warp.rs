//! A warp, as its instructions see it.

use crate::error::Fault;
use crate::machine::block::BlockContext;
use crate::machine::local_memory::LocalMemory;
use crate::machine::row::LANES;

/// What the interpreter does after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Flow {
    /// Continues with the next one.
    Next,
    /// Stops, because the warp has a fault.
    Fault,
}

/// The state of a warp that instructions work on.
pub(crate) struct Warp {
    /// The current frame's rows and the current function's constants.
    pub bases: [*mut u8; 2],
    /// The current function's longer operand lists.
    pub ext: *const [u32],
    /// The block that contains this warp.
    pub block: *mut BlockContext,
    /// Index in the block.
    pub index: u32,
    /// `threadIdx` of each lane.
    pub tid: [[u32; LANES]; 3],
    /// Threads that have not exited.
    pub live: u32,
    pub local: LocalMemory,
    /// Start of the current call's local memory.
    pub local_base: u32,
    /// Set by instructions that may be part of a wait for another thread: atomics, volatile loads, sleeps.
    pub spinning: bool,
    /// The fault and its lane. Set when an instruction returns [`Flow::Fault`].
    pub fault: Option<(Fault, u32)>,
    /// The runtime's last error from child launches, for each thread.
    pub launch_errors: [u32; LANES],
}

impl Warp {
    /// A warp of a block of these dimensions, in no function.
    pub fn new(block: *mut BlockContext, index: u32, block_dim: [u32; 3]) -> Warp {
        let threads = block_dim.iter().product::<u32>();
        let first = index * LANES as u32;
        let count = (threads - first).min(LANES as u32);
        let [width, height, _] = block_dim;
        let thread = |lane: usize| first + lane as u32;
        Warp {
            bases: [std::ptr::null_mut(); 2],
            ext: &[],
            block,
            index,
            tid: [
                std::array::from_fn(|l| thread(l) % width),
                std::array::from_fn(|l| thread(l) / width % height),
                std::array::from_fn(|l| thread(l) / width / height),
            ],
            live: if count == 32 { u32::MAX } else { (1 << count) - 1 },
            local: LocalMemory::default(),
            local_base: 0,
            spinning: false,
            fault: None,
            launch_errors: [0; LANES],
        }
    }

    /// The block's state.
    #[inline(always)]
    pub fn block(&mut self) -> &mut BlockContext {
        // SAFETY: the block owns its warps, outlives them and never moves its context, and only the worker
        // that runs this warp accesses it.
        unsafe { &mut *self.block }
    }

    /// The current function's longer operand lists.
    #[inline(always)]
    pub fn ext(&self) -> &[u32] {
        // SAFETY: they are the executing function's, whose program the launch keeps alive.
        unsafe { &*self.ext }
    }

    /// Records a fault of a lane.
    #[cold]
    pub fn set_fault(&mut self, fault: Fault, lane: usize) -> Flow {
        self.fault = Some((fault, lane as u32));
        Flow::Fault
    }
}
