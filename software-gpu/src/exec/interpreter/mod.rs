//! Runs a warp's instructions.
//!
//! Threads at the same instruction form a *group*, which executes together. A branch on which lanes differ
//! splits a group; groups that reach the same instruction of the same frame merge. Of several groups that can
//! run, the one deepest in calls, and then the one at the lowest instruction, goes first, so that the others
//! can catch up and reconverge. A group that jumps backwards many times while others wait yields to them.
//! Threads of a warp can therefore wait for each other (locks), as independent thread scheduling promises.
//!
//! `converge` handles groups that wait for each other, `cluster_barrier` waits for other blocks, `calls`
//! calls and stacks. This module chooses groups and runs them.

mod calls;
mod cluster_barrier;
mod converge;

use std::sync::Arc;

use crate::error::{Error, Fault, Location};
use crate::exec::rows;
use crate::machine::block::BlockContext;
use crate::machine::program::{Code, Inst, Kind, NONE, Program};
use crate::machine::row::{LANES, Line};
use crate::machine::warp::{Flow, Warp};
use cluster_barrier::Arrivals;
use converge::Counted;

/// Backward jumps (see [`Group`]) after which a group yields to the warp's other groups.
const PATIENCE: u32 = 4096;
/// How many jumps a backward jump counts as if the loop has read memory that others write.
const SPIN_COST: u32 = 256;
/// Deeper calls are a stack overflow even if they need no local memory.
const MAX_DEPTH: u32 = 20_000;

/// What a group is waiting for, if anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// Waits at a warp-wide instruction for all lanes in this mask.
    Converge(u32),
    /// Waits at a barrier for the end of this phase.
    Barrier {
        id: u32,
        phase: u64,
    },
    /// Waits at the cluster's barrier for the end of this phase.
    Cluster {
        phase: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Group {
    pc: u32,
    mask: u32,
    frame: u32,
    state: State,
    /// Backward jumps since it last yielded; those that look like waiting count more.
    turns: u32,
}

/// An activation of a function, shared by the groups inside it.
struct Frame {
    code: *const Code,
    rows: Vec<Line>,
    parent: u32,
    return_pc: u32,
    /// Where the call's arguments are: an index into the extension of the caller's code.
    call_ext: u32,
    depth: u32,
    /// Where this call's local memory begins in each thread's local memory.
    local_base: u32,
    /// Local memory that `alloca` added to the function's own.
    extra: u32,
    /// Lanes in this call or in calls that it made.
    lanes: u32,
}

/// How a warp's turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// All threads have exited.
    Done,
    /// Every group waits at a block or cluster barrier.
    Blocked,
    /// It used up its share of instructions.
    Paused,
    /// The warp has a fault.
    Fault,
}

/// Runs a warp: its groups, and the functions that they are in.
pub(crate) struct Interpreter {
    warp: Warp,
    program: *const Program,
    /// The current function.
    code: *const Code,
    /// The current instruction.
    pc: u32,
    groups: Vec<Group>,
    /// The first is the kernel's.
    frames: Vec<Frame>,
    free_frames: Vec<u32>,
    /// The size of the rows of all frames in bytes, at most [`MAX_FRAMES`].
    frame_bytes: u32,
    current: usize,
    arrivals: Arrivals,
    /// The lanes that have arrived at each of the block's barriers that count threads.
    counted: [Counted; 16],
    /// The next instruction at which another group of the current frame waits.
    stop: u32,
}

impl Interpreter {
    /// A warp of a block of these dimensions before the first instruction of `kernel`, a function of
    /// `program`.
    pub fn new(
        block: *mut BlockContext,
        index: u32,
        block_dim: [u32; 3],
        program: &Program,
        kernel: &Code,
    ) -> Interpreter {
        let mut warp = Warp::new(block, index, block_dim);
        warp.local.reserve(kernel.local_bytes);
        let live = warp.live;
        let frame = Frame {
            code: kernel,
            rows: vec![Line([0; 64]); kernel.frame_bytes as usize / 64],
            parent: NONE,
            return_pc: 0,
            call_ext: 0,
            depth: 0,
            local_base: 0,
            extra: 0,
            lanes: live,
        };
        Interpreter {
            warp,
            program,
            code: kernel,
            pc: 0,
            groups: vec![Group { pc: 0, mask: live, frame: 0, state: State::Ready, turns: 0 }],
            frames: vec![frame],
            free_frames: Vec::new(),
            frame_bytes: kernel.frame_bytes,
            current: 0,
            arrivals: Arrivals::default(),
            counted: [Counted::default(); 16],
            stop: NONE,
        }
    }

    /// The module's code.
    fn program(&self) -> &Program {
        // SAFETY: the launch keeps the program alive.
        unsafe { &*self.program }
    }

    /// The function that is executing.
    fn code(&self) -> &Code {
        // SAFETY: the launch keeps alive the program that contains this function.
        unsafe { &*self.code }
    }

    /// Records a fault of a lane.
    #[cold]
    fn fault(&mut self, fault: Fault, lane: usize) -> Step {
        self.warp.set_fault(fault, lane);
        Step::Fault
    }

    /// The fault with which [`Interpreter::run`] ended, and its lane.
    pub fn take_fault(&mut self) -> Option<(Fault, u32)> {
        self.warp.fault.take()
    }

    /// The error for a fault of one of the warp's threads at the current instruction.
    pub fn report(&mut self, fault: Fault, lane: u32) -> Error {
        let lane = lane as usize % LANES;
        let code = self.code();
        let location = Location {
            // SAFETY: the launch keeps the program alive.
            kernel: unsafe { &*self.frames[0].code }.name.clone(),
            function: code.name.clone(),
            ptx_line: code.insts.get(self.pc as usize).map_or(0, |i| i.line),
            block: self.warp.block().index,
            thread: self.warp.tid.map(|lanes| lanes[lane]),
        };
        Error::Kernel { fault, location: Arc::new(location) }
    }

    /// Makes the group's frame the current one.
    fn enter(&mut self) {
        let frame = &mut self.frames[self.groups[self.current].frame as usize];
        self.code = frame.code;
        self.warp.local_base = frame.local_base;
        // SAFETY: the launch keeps the program alive.
        let code = unsafe { &*frame.code };
        self.warp.bases = [frame.rows.as_mut_ptr().cast(), code.consts.as_ptr().cast_mut().cast()];
        self.warp.ext = code.ext.as_slice();
    }

    /// Merges groups at the same instruction and picks the next one to run.
    fn schedule(&mut self) -> Option<Turn> {
        self.groups.retain(|g| g.mask != 0);
        if self.groups.is_empty() {
            return Some(Turn::Done);
        }
        let mut i = 0;
        while i < self.groups.len() {
            let mut j = i + 1;
            while j < self.groups.len() {
                let (a, b) = (self.groups[i], self.groups[j]);
                let stuck = matches!(a.state, State::Barrier { .. });
                if a.pc == b.pc && a.frame == b.frame && a.state == b.state && !stuck {
                    self.groups[i].mask |= b.mask;
                    self.groups[i].turns = a.turns.max(b.turns);
                    self.groups.swap_remove(j);
                } else {
                    j += 1;
                }
            }
            i += 1;
        }
        for i in 0..self.groups.len() {
            match self.groups[i].state {
                State::Ready => {}
                State::Converge(members) => {
                    self.finish_converging(i, members);
                    if self.warp.fault.is_some() {
                        return Some(Turn::Fault);
                    }
                }
                State::Barrier { id, phase } => {
                    if self.warp.block().barriers[id as usize].phase > phase {
                        self.finish_barrier(i, id);
                    }
                }
                State::Cluster { phase } => {
                    if self.warp.block().cluster().phase > phase {
                        self.finish_cluster_wait(i);
                    }
                }
            }
        }
        if !self.pick() {
            return Some(Turn::Blocked);
        }
        self.enter();
        None
    }

    fn pick(&mut self) -> bool {
        for attempt in 0..2 {
            let mut best: Option<(usize, (u32, u32))> = None;
            for (i, group) in self.groups.iter().enumerate() {
                let ready = group.state == State::Ready;
                if !ready || (attempt == 0 && group.turns >= PATIENCE) {
                    continue;
                }
                let depth = self.frames[group.frame as usize].depth;
                let rank = (u32::MAX - depth, group.pc);
                if best.is_none_or(|(_, r)| rank < r) {
                    best = Some((i, rank));
                }
            }
            if let Some((i, _)) = best {
                self.current = i;
                let (frame, pc) = (self.groups[i].frame, self.groups[i].pc);
                let ahead = self.groups.iter().filter(|g| g.frame == frame && g.pc > pc).map(|g| g.pc);
                self.stop = ahead.min().unwrap_or(NONE);
                return true;
            }
            for group in &mut self.groups {
                group.turns = 0;
            }
        }
        false
    }

    /// Splits `mask` off the current group, to continue at `pc`. The current group keeps the rest.
    fn split(&mut self, mask: u32, pc: u32) {
        let group = self.groups[self.current];
        self.groups[self.current].mask &= !mask;
        self.groups.push(Group { pc, mask, ..group });
    }

    /// Counts a backward jump of a group.
    fn turn(&mut self, group: usize) {
        self.groups[group].turns += if std::mem::take(&mut self.warp.spinning) { SPIN_COST } else { 1 };
    }

    /// Runs up to about `quantum` instructions and adds their number to `executed`.
    pub fn run(&mut self, quantum: u64, executed: &mut u64) -> Turn {
        let mut left = quantum as i64;
        let turn = loop {
            if let Some(turn) = self.schedule() {
                break turn;
            }
            if let Some(turn) = self.run_group(&mut left) {
                break turn;
            }
        };
        *executed += (quantum as i64 - left) as u64;
        turn
    }

    /// Runs the current group until another must be chosen (`None`) or the turn ends.
    fn run_group(&mut self, left: &mut i64) -> Option<Turn> {
        let Group { mut pc, mask: active, .. } = self.groups[self.current];
        // SAFETY: the launch keeps the program alive.
        let code = unsafe { &*self.code };
        let insts = code.insts.as_slice();
        loop {
            let Some(inst) = insts.get(pc as usize) else {
                self.pc = pc.saturating_sub(1);
                let what = format!("execution ran past the end of {}", code.name);
                self.fault(Fault::InvalidPc(what), 0);
                return Some(Turn::Fault);
            };
            let mut mask = active;
            *left -= 1;
            if inst.guard != NONE {
                // SAFETY: a guard is a predicate row.
                let bits = unsafe { rows::pred(&self.warp, inst.guard) };
                mask &= if inst.guard_negated { !bits } else { bits };
                if mask == 0 {
                    pc += 1;
                    if pc == self.stop {
                        self.groups[self.current].pc = pc;
                        return None;
                    }
                    continue;
                }
            }
            if inst.kind == Kind::Plain {
                self.pc = pc;
                // SAFETY: the lowering emits the operands that the handler expects.
                if unsafe { (inst.exec)(&mut self.warp, inst, mask) } == Flow::Fault {
                    return Some(Turn::Fault);
                }
                pc += 1;
            } else if inst.kind == Kind::Branch && mask == active {
                // Fast path: all lanes agree.
                let target = inst.r[0];
                if target <= pc {
                    // Waiting shortens the turn, so that the thread that is waited for can run.
                    if self.warp.spinning {
                        *left -= i64::from(SPIN_COST);
                    }
                    if *left <= 0 {
                        self.groups[self.current].pc = target;
                        return Some(Turn::Paused);
                    }
                    if self.groups.len() > 1 {
                        self.groups[self.current].pc = target;
                        self.turn(self.current);
                        return None;
                    }
                    self.warp.spinning = false;
                } else if target > self.stop {
                    self.groups[self.current].pc = target;
                    return None;
                }
                pc = target;
            } else {
                self.pc = pc;
                self.groups[self.current].pc = pc;
                match self.control(inst, mask, active) {
                    Step::Continue => pc += 1,
                    Step::Schedule => {
                        if *left <= 0 {
                            return Some(Turn::Paused);
                        }
                        return None;
                    }
                    Step::Fault => return Some(Turn::Fault),
                }
            }
            if pc == self.stop {
                self.groups[self.current].pc = pc;
                return None;
            }
        }
    }

    /// Executes an instruction that is more than its handler. Not inlined, so that the loop in `run_group`
    /// keeps its values in registers.
    #[inline(never)]
    fn control(&mut self, inst: &Inst, mask: u32, active: u32) -> Step {
        let pc = self.pc;
        match inst.kind {
            Kind::Plain => Step::Continue,
            Kind::Branch => {
                self.split(mask, inst.r[0]);
                self.groups[self.current].pc = pc + 1;
                if inst.r[0] <= pc {
                    self.turn(self.groups.len() - 1);
                }
                Step::Schedule
            }
            Kind::BranchIndexed => {
                // SAFETY: the lowering guarantees a u32 row.
                let index: [u32; LANES] = unsafe { rows::get(&self.warp, inst.r[1]) };
                let at = inst.r[0] as usize;
                // SAFETY: the launch keeps the program alive.
                let ext = unsafe { &(*self.code).ext };
                let targets = &ext[at + 1..][..ext[at] as usize];
                let mut rest = mask;
                while rest != 0 {
                    let lane = rest.trailing_zeros() as usize;
                    let same = lanes_equal(&index, index[lane], rest);
                    let Some(&target) = targets.get(index[lane] as usize) else {
                        return self.fault(
                            Fault::InvalidPc(format!(
                                "brx.idx to entry {}, which does not exist",
                                index[lane]
                            )),
                            lane,
                        );
                    };
                    self.split(same, target);
                    rest &= !same;
                }
                self.groups[self.current].pc = pc + 1;
                Step::Schedule
            }
            Kind::Exit => {
                self.exit(mask);
                self.groups[self.current].pc = pc + 1;
                Step::Schedule
            }
            Kind::Return => {
                if self.frames[self.groups[self.current].frame as usize].parent == NONE {
                    self.exit(mask);
                    self.groups[self.current].pc = pc + 1;
                    return Step::Schedule;
                }
                self.groups[self.current].pc = pc + 1;
                self.split(mask, pc);
                self.current = self.groups.len() - 1;
                self.leave(mask);
                Step::Schedule
            }
            Kind::Call => {
                let function = inst.r[0] as usize;
                self.groups[self.current].pc = pc + 1;
                self.call(function, inst.r[1], mask)
            }
            Kind::CallIndirect => {
                // SAFETY: the lowering guarantees a u64 row.
                let address: [u64; LANES] = unsafe { rows::get(&self.warp, inst.r[0]) };
                self.groups[self.current].pc = pc + 1;
                let caller = self.current;
                let mut rest = mask;
                while rest != 0 {
                    let lane = rest.trailing_zeros() as usize;
                    let same = lanes_equal(&address, address[lane], rest);
                    let Some(index) = self.program().addresses.index(address[lane]) else {
                        let what = format!("call of {:#x}, which is not a function", address[lane]);
                        return self.fault(Fault::InvalidPc(what), lane);
                    };
                    self.current = caller;
                    self.enter();
                    if self.call(index, inst.r[1], same) == Step::Fault {
                        return Step::Fault;
                    }
                    rest &= !same;
                }
                Step::Schedule
            }
            Kind::Converge | Kind::WarpSync => {
                // SAFETY: the lowering guarantees a u32 row.
                let members: [u32; LANES] = unsafe { rows::get(&self.warp, inst.r[5]) };
                let first = members[mask.trailing_zeros() as usize];
                let same = lanes_equal(&members, first, mask);
                if same == mask && first & self.warp.live & !mask == 0 {
                    if inst.kind == Kind::WarpSync {
                        return Step::Continue;
                    }
                    // SAFETY: the lowering emits the operands that the handler expects.
                    return match unsafe { (inst.exec)(&mut self.warp, inst, mask) } {
                        Flow::Next => Step::Continue,
                        Flow::Fault => Step::Fault,
                    };
                }
                if mask != active {
                    // The lanes that the guard excludes continue on their own.
                    self.split(active & !mask, pc + 1);
                }
                self.groups[self.current].mask = same;
                self.groups[self.current].state = State::Converge(first);
                let mut rest = mask & !same;
                while rest != 0 {
                    let own = members[rest.trailing_zeros() as usize];
                    let same = lanes_equal(&members, own, rest);
                    self.groups.push(Group {
                        mask: same,
                        state: State::Converge(own),
                        ..self.groups[self.current]
                    });
                    rest &= !same;
                }
                Step::Schedule
            }
            Kind::Barrier => self.barrier(inst, mask, active),
            Kind::ClusterArrive => self.cluster_arrive(mask),
            Kind::ClusterWait => self.cluster_wait(mask, active),
            Kind::Alloca => self.alloca(inst, mask),
            Kind::StackSave | Kind::StackRestore => {
                let frame = self.groups[self.current].frame as usize;
                let all = self.frames[frame].lanes == mask;
                // SAFETY: the lowering guarantees a row of the width in `r[2]`.
                unsafe {
                    if inst.kind == Kind::StackSave {
                        let extra = self.frames[frame].extra;
                        if inst.r[2] == 1 {
                            rows::put(&self.warp, inst.r[0], mask, &[extra; LANES]);
                        } else {
                            rows::put(&self.warp, inst.r[0], mask, &[u64::from(extra); LANES]);
                        }
                    } else if all {
                        // The lanes' stacks move together: they shrink only when all lanes do.
                        let lane = mask.trailing_zeros() as usize;
                        let saved = if inst.r[2] == 1 {
                            (*rows::row::<u32>(&self.warp, inst.r[0]))[lane]
                        } else {
                            (*rows::row::<u64>(&self.warp, inst.r[0]))[lane] as u32
                        };
                        self.frames[frame].extra = saved.min(self.frames[frame].extra);
                    }
                }
                Step::Continue
            }
        }
    }
}

/// The lanes in `mask` whose value is `value`.
#[inline(always)]
fn lanes_equal<T: Copy + PartialEq>(values: &[T; LANES], value: T, mask: u32) -> u32 {
    (0..LANES).fold(0, |m, l| m | u32::from(values[l] == value) << l) & mask
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Continue,
    Schedule,
    Fault,
}
