//! A warp: its threads' registers, and the interpreter's loop.
//!
//! Threads that are at the same place form a *group*, which executes together. A branch on which the lanes differ
//! splits a group; groups that meet at the same instruction of the same frame merge. Of several groups that can
//! run, the one deepest in calls and then the one at the lowest instruction goes first, which lets the others
//! catch up and reconverge; one that jumps backwards many times while others wait makes room for them,
//! so that threads of a warp may wait for each other (locks), as independent thread scheduling promises.

use crate::error::Fault;
use crate::exec::block::BlockContext;
use crate::exec::rows::{self, LANES};
use crate::lower::program::{Code, Flow, Inst, Kind, Line, NONE, barrier, joint};

/// Turns (see [`Group`]) after which a group lets the warp's others run.
const PATIENCE: u32 = 4096;
/// What a jump backwards counts when memory that others write was looked at since the last.
const SPIN_COST: u32 = 256;
/// Calls deeper than this are a stack overflow even if they need no local memory.
const MAX_DEPTH: u32 = 20_000;

/// Where a group stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// At a warp-wide instruction whose members are the lanes of this mask: it waits for all of them.
    Converge(u32),
    /// At a barrier, until its phase passes this one.
    Barrier {
        id: u32,
        phase: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Group {
    pc: u32,
    mask: u32,
    frame: u32,
    state: State,
    /// Jumps backwards since it last made room; those that look like waiting count more.
    turns: u32,
}

/// One activation of a function, shared by the groups in it.
struct Frame {
    code: *const Code,
    rows: Vec<Line>,
    parent: u32,
    return_pc: u32,
    /// The call's arguments in the caller's code: index of its extension.
    call_ext: u32,
    depth: u32,
    /// Where this call's local memory begins, in each thread's.
    local_base: u32,
    /// Local memory that `alloca` took beyond the function's own.
    extra: u32,
    /// Lanes that are in this call or in one that it made.
    lanes: u32,
}

/// How a turn of a warp ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// All threads have exited.
    Done,
    /// Every group waits at a block barrier.
    Blocked,
    /// It had its share of instructions.
    Paused,
    /// The warp's fault is set.
    Fault,
}

/// Local memory of a warp's threads.
#[derive(Default)]
pub(crate) struct LocalMemory {
    bytes: Vec<u64>,
    /// Bytes of each thread.
    pub stride: u32,
}

impl LocalMemory {
    /// Makes room for `size` bytes in each thread.
    fn reserve(&mut self, size: u32) {
        if size <= self.stride {
            return;
        }
        let stride = size.next_power_of_two().max(64);
        let words = stride as usize / 8;
        let mut bytes = vec![0u64; words * LANES];
        let old = self.stride as usize / 8;
        for l in 0..LANES {
            bytes[l * words..l * words + old].copy_from_slice(&self.bytes[l * old..(l + 1) * old]);
        }
        self.bytes = bytes;
        self.stride = stride;
    }

    /// The host address of a thread's byte `offset`, if `size` bytes are there.
    #[inline(always)]
    pub fn at(&mut self, lane: usize, offset: u64, size: u32) -> Option<*mut u8> {
        if offset + u64::from(size) > u64::from(self.stride) || offset > u64::from(u32::MAX) {
            return None;
        }
        let index = lane * self.stride as usize + offset as usize;
        // SAFETY: `lane` is below 32 and the offset below the stride, so the byte is in `bytes`.
        Some(unsafe { self.bytes.as_mut_ptr().cast::<u8>().add(index) })
    }
}

/// The state of a warp.
pub(crate) struct Warp {
    /// The present frame's rows and the present function's constants.
    pub bases: [*mut u8; 2],
    /// The block that this warp is part of.
    pub block: *mut BlockContext,
    /// Position in the block.
    pub index: u32,
    /// `threadIdx` of each lane.
    pub tid: [[u32; LANES]; 3],
    /// Threads that have not exited.
    pub live: u32,
    pub local: LocalMemory,
    /// Start of the present call's local memory.
    pub local_base: u32,
    /// Set by instructions that may look for what another thread does: atomics, volatile loads, sleeps.
    pub spinning: bool,
    /// Set when a handler returns [`Flow::Fault`]: what happened, and to which lane.
    pub fault: Option<(Fault, u32)>,
    /// The present instruction; for fault reports.
    pub pc: u32,
    pub code: *const Code,
    groups: Vec<Group>,
    frames: Vec<Frame>,
    free_frames: Vec<u32>,
    current: usize,
    /// Lowest place where another group of the present frame waits ahead.
    stop: u32,
}

impl Warp {
    /// A warp at the start of a kernel.
    pub fn new(block: *mut BlockContext, index: u32, block_dim: [u32; 3], code: &Code) -> Warp {
        let threads = block_dim.iter().product::<u32>();
        let first = index * LANES as u32;
        let count = (threads - first).min(LANES as u32);
        let live = if count == 32 { u32::MAX } else { (1 << count) - 1 };
        let mut tid = [[0; LANES]; 3];
        for l in 0..LANES {
            let n = first + l as u32;
            tid[0][l] = n % block_dim[0];
            tid[1][l] = n / block_dim[0] % block_dim[1];
            tid[2][l] = n / block_dim[0] / block_dim[1];
        }
        let mut warp = Warp {
            bases: [std::ptr::null_mut(); 2],
            block,
            index,
            tid,
            live,
            local: LocalMemory::default(),
            local_base: 0,
            spinning: false,
            fault: None,
            pc: 0,
            code,
            groups: vec![Group { pc: 0, mask: live, frame: 0, state: State::Ready, turns: 0 }],
            frames: Vec::new(),
            free_frames: Vec::new(),
            current: 0,
            stop: NONE,
        };
        warp.local.reserve(code.local_bytes);
        warp.frames.push(Frame {
            code,
            rows: vec![Line([0; 64]); code.frame_bytes as usize / 64],
            parent: NONE,
            return_pc: 0,
            call_ext: 0,
            depth: 0,
            local_base: 0,
            extra: 0,
            lanes: live,
        });
        warp
    }

    /// The block's state.
    #[inline(always)]
    pub fn block(&mut self) -> &mut BlockContext {
        // SAFETY: the block owns its warps and outlives them, never moves its context, and only the worker
        // that runs this warp touches it.
        unsafe { &mut *self.block }
    }

    /// The function that is executing.
    pub fn code(&self) -> &Code {
        // SAFETY: the launch holds the program whose functions these are.
        unsafe { &*self.code }
    }

    /// Records a fault of a lane.
    #[cold]
    pub fn set_fault(&mut self, fault: Fault, lane: usize) -> Flow {
        self.fault = Some((fault, lane as u32));
        Flow::Fault
    }

    /// Makes the group's frame the present one.
    fn enter(&mut self) {
        let frame = &mut self.frames[self.groups[self.current].frame as usize];
        self.code = frame.code;
        self.local_base = frame.local_base;
        // SAFETY: the launch holds the program.
        let consts = unsafe { &(*frame.code).consts };
        self.bases = [frame.rows.as_mut_ptr().cast(), consts.as_ptr().cast_mut().cast()];
    }

    /// Merges groups that are at the same place and picks the next to run.
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
                    if self.fault.is_some() {
                        return Some(Turn::Fault);
                    }
                }
                State::Barrier { id, phase } => {
                    if self.block().barriers[id as usize].phase > phase {
                        self.finish_barrier(i, id);
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

    /// Executes the warp-wide instruction at which group `first` waits, if all its members wait at such an instruction,
    /// be it at several places of the program.
    fn finish_converging(&mut self, first: usize, members: u32) {
        let there = self.groups[first];
        let inst = self.instruction_of(&there).clone();
        let joined: Vec<usize> = (0..self.groups.len())
            .filter(|&i| {
                let group = self.groups[i];
                let other = self.instruction_of(&group);
                let same = i == first
                    || (inst.flags >> 4 != joint::ALIGNED
                        && other.kind == inst.kind
                        && other.flags == inst.flags
                        && std::ptr::fn_addr_eq(other.exec, inst.exec));
                group.state == State::Converge(members) && same
            })
            .collect();
        let lanes = joined.iter().fold(0, |m, &i| m | self.groups[i].mask);
        if members & self.live & !lanes != 0 {
            return;
        }
        if inst.kind == Kind::Converge {
            let saved = self.current;
            if joined.len() == 1 {
                self.current = first;
                self.enter();
                // SAFETY: the lowering made the instruction's operands for its handler.
                unsafe { (inst.exec)(self, &inst, lanes) };
            } else {
                self.execute_jointly(&inst, &joined, lanes);
            }
            self.current = saved;
        }
        for i in joined {
            self.groups[i].pc += 1;
            self.groups[i].state = State::Ready;
        }
    }

    /// The instruction at which a group stands.
    fn instruction_of(&self, group: &Group) -> &Inst {
        // SAFETY: the launch holds the program; a group that waits stands at an instruction.
        unsafe { &(&(*self.frames[group.frame as usize].code).insts)[group.pc as usize] }
    }

    /// Executes a warp-wide instruction for groups at different places: their operands are gathered in rows of its own,
    /// and the results given back.
    fn execute_jointly(&mut self, inst: &Inst, joined: &[usize], lanes: u32) {
        const ROW: usize = 256;
        let roles = joint::roles(inst.flags);
        let mut scratch = vec![Line([0; 64]); roles.len() * ROW / 64];
        let base: *mut u8 = scratch.as_mut_ptr().cast();
        let groups: Vec<(Group, Inst)> =
            joined.iter().map(|&i| (self.groups[i], self.instruction_of(&self.groups[i]).clone())).collect();
        // SAFETY: each role names the width of the rows that the lowering gave for it; a row of the scratch memory has room for
        // the widest, and is aligned for it.
        unsafe {
            for (&index, (group, own)) in joined.iter().zip(&groups) {
                self.current = index;
                self.enter();
                for (n, role) in roles.iter().enumerate() {
                    let to = base.add(n * ROW);
                    match role {
                        joint::Role::In32 => {
                            let row: [u32; LANES] = rows::get(self, own.r[n]);
                            for l in (0..LANES).filter(|l| group.mask >> l & 1 != 0) {
                                to.cast::<u32>().add(l).write(row[l]);
                            }
                        }
                        joint::Role::In64 => {
                            let row: [u64; LANES] = rows::get(self, own.r[n]);
                            for l in (0..LANES).filter(|l| group.mask >> l & 1 != 0) {
                                to.cast::<u64>().add(l).write(row[l]);
                            }
                        }
                        joint::Role::InPred => {
                            // The one immediate of such an instruction negates its predicate.
                            let bits = rows::pred(self, own.r[n]);
                            let bits = if own.imm == 1 { !bits } else { bits };
                            *to.cast::<u32>() |= bits & group.mask;
                        }
                        _ => {}
                    }
                }
            }
            let mut all = inst.clone();
            all.imm = 0;
            for n in 0..roles.len() {
                all.r[n] = (n * ROW) as u32;
            }
            self.bases[0] = base;
            (inst.exec)(self, &all, lanes);
            for (&index, (group, own)) in joined.iter().zip(&groups) {
                self.current = index;
                self.enter();
                for (n, role) in roles.iter().enumerate().filter(|(n, _)| own.r[*n] != NONE) {
                    let from = base.add(n * ROW).cast::<u32>();
                    match role {
                        joint::Role::Out32 => {
                            rows::put(self, own.r[n], group.mask, &from.cast::<[u32; LANES]>().read());
                        }
                        joint::Role::OutPred => rows::put_pred(self, own.r[n], group.mask, from.read()),
                        _ => {}
                    }
                }
            }
        }
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

    /// Wakes a group whose barrier is complete.
    fn finish_barrier(&mut self, index: usize, id: u32) {
        let group = self.groups[index];
        let frame = &mut self.frames[group.frame as usize];
        // SAFETY: the launch holds the program.
        let inst = unsafe { &(&(*frame.code).insts)[group.pc as usize] };
        let kind = inst.r[2];
        if kind >= barrier::RED_POPC {
            let done = self.block().barriers[id as usize];
            let saved = self.current;
            self.current = index;
            self.enter();
            // SAFETY: the lowering gives a reduction a row of u32 (popc) or a predicate.
            unsafe {
                match kind {
                    barrier::RED_POPC => rows::put(self, inst.r[4], group.mask, &[done.popc; LANES]),
                    _ => {
                        let holds = if kind == barrier::RED_AND { done.all } else { done.popc != 0 };
                        rows::put_pred(self, inst.r[4], group.mask, if holds { u32::MAX } else { 0 });
                    }
                }
            }
            self.current = saved;
        }
        let group = &mut self.groups[index];
        group.pc += 1;
        group.state = State::Ready;
    }

    /// Splits `mask` off the present group, to go on at `pc`; the rest stays the present group.
    fn split(&mut self, mask: u32, pc: u32) {
        let group = self.groups[self.current];
        self.groups[self.current].mask &= !mask;
        self.groups.push(Group { pc, mask, ..group });
    }

    /// Counts a jump backwards of a group.
    fn turn(&mut self, group: usize) {
        self.groups[group].turns += if std::mem::take(&mut self.spinning) { SPIN_COST } else { 1 };
    }

    /// Runs up to about `quantum` instructions; adds how many to `executed`.
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

    /// Runs the present group until something else must be chosen (`None`) or the turn ends.
    fn run_group(&mut self, left: &mut i64) -> Option<Turn> {
        let Group { mut pc, mask: active, .. } = self.groups[self.current];
        // SAFETY: the launch holds the program.
        let code = unsafe { &*self.code };
        let insts = code.insts.as_slice();
        loop {
            let Some(inst) = insts.get(pc as usize) else {
                self.pc = pc.saturating_sub(1);
                self.set_fault(Fault::InvalidPc(format!("the end of {} was reached", code.name)), 0);
                return Some(Turn::Fault);
            };
            let mut mask = active;
            *left -= 1;
            if inst.guard != NONE {
                // SAFETY: a guard is a predicate's row.
                let bits = unsafe { rows::pred(self, inst.guard) };
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
                // SAFETY: the lowering made the instruction's operands for its handler.
                if unsafe { (inst.exec)(self, inst, mask) } == Flow::Fault {
                    return Some(Turn::Fault);
                }
                pc += 1;
            } else if inst.kind == Kind::Branch && mask == active {
                // The frequent case of control flow: all lanes agree.
                let target = inst.r[0];
                if target <= pc {
                    // Waiting uses up the turn sooner, so that what is waited for can happen.
                    if self.spinning {
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
                    self.spinning = false;
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
                // SAFETY: the lowering gives a row of u32.
                let index: [u32; LANES] = unsafe { rows::get(self, inst.r[1]) };
                let at = inst.r[0] as usize;
                // SAFETY: the launch holds the program.
                let ext = unsafe { &(*self.code).ext };
                let targets = &ext[at + 1..][..ext[at] as usize];
                let mut rest = mask;
                while rest != 0 {
                    let lane = rest.trailing_zeros() as usize;
                    let same = lanes_equal(&index, index[lane], rest);
                    let Some(&target) = targets.get(index[lane] as usize) else {
                        self.set_fault(Fault::InvalidPc(format!("brx.idx to entry {}", index[lane])), lane);
                        return Step::Fault;
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
                // SAFETY: the lowering gives a row of u64.
                let address: [u64; LANES] = unsafe { rows::get(self, inst.r[0]) };
                self.groups[self.current].pc = pc + 1;
                let caller = self.current;
                let mut rest = mask;
                while rest != 0 {
                    let lane = rest.trailing_zeros() as usize;
                    let same = lanes_equal(&address, address[lane], rest);
                    let count = self.block().program().functions.len() as u64;
                    let index = address[lane].wrapping_sub(crate::lower::program::FUNCTION_WINDOW) / 16;
                    if index >= count || !address[lane].is_multiple_of(16) {
                        let what = format!("call of {:#x}, which is no function", address[lane]);
                        self.set_fault(Fault::InvalidPc(what), lane);
                        return Step::Fault;
                    }
                    self.current = caller;
                    self.enter();
                    if self.call(index as usize, inst.r[1], same) == Step::Fault {
                        return Step::Fault;
                    }
                    rest &= !same;
                }
                Step::Schedule
            }
            Kind::Converge | Kind::WarpSync => {
                // SAFETY: the lowering gives a row of u32.
                let members: [u32; LANES] = unsafe { rows::get(self, inst.r[5]) };
                let first = members[mask.trailing_zeros() as usize];
                let same = lanes_equal(&members, first, mask);
                if same == mask && first & self.live & !mask == 0 {
                    // SAFETY: the lowering made the instruction's operands for its handler.
                    if inst.kind == Kind::Converge && unsafe { (inst.exec)(self, inst, mask) } == Flow::Fault
                    {
                        return Step::Fault;
                    }
                    return Step::Continue;
                }
                if mask != active {
                    // The lanes that the guard left out go on by themselves.
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
            Kind::Alloca => self.alloca(inst, mask),
            Kind::StackSave | Kind::StackRestore => {
                let frame = self.groups[self.current].frame as usize;
                let all = self.frames[frame].lanes == mask;
                // SAFETY: the lowering gives a row of the width that `r[2]` says.
                unsafe {
                    if inst.kind == Kind::StackSave {
                        let extra = self.frames[frame].extra;
                        if inst.r[2] == 1 {
                            rows::put(self, inst.r[0], mask, &[extra; LANES]);
                        } else {
                            rows::put(self, inst.r[0], mask, &[u64::from(extra); LANES]);
                        }
                    } else if all {
                        // The lanes' stacks go together: it shrinks when all of them say so.
                        let lane = mask.trailing_zeros() as usize;
                        let saved = if inst.r[2] == 1 {
                            (*rows::row::<u32>(self, inst.r[0]))[lane]
                        } else {
                            (*rows::row::<u64>(self, inst.r[0]))[lane] as u32
                        };
                        self.frames[frame].extra = saved.min(self.frames[frame].extra);
                    }
                }
                Step::Continue
            }
        }
    }

    /// Takes local memory for the rest of a call: the same places for all lanes, as much as the greediest wants.
    fn alloca(&mut self, inst: &Inst, mask: u32) -> Step {
        let frame = self.groups[self.current].frame as usize;
        // SAFETY: the lowering gives rows of 64 bits, or of 32 if `r[2]` is 1.
        let sizes: [u64; LANES] = unsafe {
            if inst.r[2] == 1 {
                let row: [u32; LANES] = rows::get(self, inst.r[1]);
                row.map(u64::from)
            } else {
                rows::get(self, inst.r[1])
            }
        };
        let largest = (0..LANES).filter(|l| mask >> l & 1 != 0).map(|l| sizes[l]).max().unwrap_or(0);
        let base = u64::from(self.local_base + self.code().local_bytes + self.frames[frame].extra);
        let at = base.next_multiple_of(inst.imm as u64);
        let end = at.saturating_add(largest).saturating_add(15) & !15;
        let limit = u64::from(self.block().local_limit);
        if end > limit {
            let lane = mask.trailing_zeros() as usize;
            self.set_fault(Fault::StackOverflow { bytes: end, limit }, lane);
            return Step::Fault;
        }
        self.local.reserve(end as u32);
        self.frames[frame].extra = end as u32 - self.local_base - self.code().local_bytes;
        // SAFETY: as above.
        unsafe {
            if inst.r[2] == 1 {
                rows::put(self, inst.r[0], mask, &[at as u32; LANES]);
            } else {
                rows::put(self, inst.r[0], mask, &[at; LANES]);
            }
        }
        Step::Continue
    }

    fn barrier(&mut self, inst: &Inst, mask: u32, active: u32) -> Step {
        let pc = self.pc;
        // SAFETY: the lowering gives rows of u32, and a predicate to a reduction.
        let (ids, counts, bits) = unsafe {
            let ids: [u32; LANES] = rows::get(self, inst.r[0]);
            let counts: [u32; LANES] =
                if inst.r[1] == NONE { [0; LANES] } else { rows::get(self, inst.r[1]) };
            let bits = if inst.r[2] >= barrier::RED_POPC { rows::pred(self, inst.r[3]) } else { 0 };
            (ids, counts, if inst.imm == 1 { !bits } else { bits })
        };
        let lane = mask.trailing_zeros() as usize;
        let (id, count) = (ids[lane], counts[lane]);
        let same = lanes_equal(&ids, id, mask) & lanes_equal(&counts, count, mask);
        if same != mask {
            // Lanes that name different barriers come to them one after the other.
            self.split(mask & !same, pc);
            if active != mask {
                self.split(active & !mask, pc + 1);
            }
            self.groups[self.current].mask = same;
            return match self.barrier(inst, same, same) {
                Step::Continue => {
                    self.groups[self.current].pc = pc + 1;
                    Step::Schedule
                }
                other => other,
            };
        }
        if id >= 16 {
            self.set_fault(Fault::IllegalInstruction(format!("barrier {id}")), lane);
            return Step::Fault;
        }
        if count % 32 != 0 {
            self.set_fault(Fault::IllegalInstruction(format!("barrier of {count} threads")), lane);
            return Step::Fault;
        }
        let phase = self.block().barriers[id as usize].phase;
        let set = bits & mask;
        self.block().arrive(id, count, mask.count_ones(), set.count_ones());
        if inst.r[2] == barrier::ARRIVE {
            return Step::Continue;
        }
        if mask != active {
            self.split(active & !mask, pc + 1);
        }
        self.groups[self.current].state = State::Barrier { id, phase };
        Step::Schedule
    }

    fn exit(&mut self, mask: u32) {
        self.live &= !mask;
        self.groups[self.current].mask &= !mask;
        let mut frame = self.groups[self.current].frame;
        while frame != NONE {
            self.frames[frame as usize].lanes &= !mask;
            let parent = self.frames[frame as usize].parent;
            if self.frames[frame as usize].lanes == 0 && parent != NONE {
                self.frames[frame as usize].rows = Vec::new();
                self.free_frames.push(frame);
            }
            frame = parent;
        }
        self.block().exit(mask.count_ones());
    }

    /// Starts a call for the lanes of `mask` of the present group, which stays at the instruction after it.
    fn call(&mut self, function: usize, ext: u32, mask: u32) -> Step {
        let Some(callee) = self.block().program().functions.get(function).map(std::sync::Arc::as_ptr) else {
            self.set_fault(Fault::InvalidPc(format!("function {function}")), 0);
            return Step::Fault;
        };
        let caller = self.groups[self.current];
        // SAFETY: the launch holds the program.
        let (callee, code) = unsafe { (&*callee, &*self.frames[caller.frame as usize].code) };
        let lane = mask.trailing_zeros() as usize;
        let depth = self.frames[caller.frame as usize].depth + 1;
        let parent = &self.frames[caller.frame as usize];
        let local_base = parent.local_base + code.local_bytes + parent.extra;
        let needed = u64::from(local_base) + u64::from(callee.local_bytes);
        let limit = u64::from(self.block().local_limit);
        if needed > limit || depth > MAX_DEPTH {
            self.set_fault(Fault::StackOverflow { bytes: needed, limit }, lane);
            return Step::Fault;
        }
        self.local.reserve(needed as u32);
        let list = &code.ext[ext as usize..];
        let (args, rets) = (list[0] as usize, list[1] as usize);
        if args != callee.params.len() || rets > callee.returns.len() {
            let what = format!("call of {} with {args} arguments and {rets} results", callee.name);
            self.set_fault(Fault::InvalidPc(what), lane);
            return Step::Fault;
        }
        let from = self.frames[caller.frame as usize].local_base;
        for (&src, &(dst, size)) in list[2..2 + args].iter().zip(&callee.params) {
            self.copy_local(mask, from + src, local_base + dst, size);
        }
        if let Some(builtin) = callee.builtin {
            let result = callee.returns.first().map_or(0, |r| local_base + r.0);
            if super::builtin::run(self, builtin, mask, local_base, &callee.params, result) == Flow::Fault {
                return Step::Fault;
            }
            for (&dst, &(src, size)) in list[2 + args..2 + args + rets].iter().zip(&callee.returns) {
                self.copy_local(mask, local_base + src, from + dst, size);
            }
            return Step::Schedule;
        }
        let frame = Frame {
            code: callee,
            rows: vec![Line([0; 64]); callee.frame_bytes as usize / 64],
            parent: caller.frame,
            return_pc: caller.pc,
            call_ext: ext,
            depth,
            local_base,
            extra: 0,
            lanes: mask,
        };
        let id = match self.free_frames.pop() {
            Some(id) => {
                self.frames[id as usize] = frame;
                id
            }
            None => {
                self.frames.push(frame);
                self.frames.len() as u32 - 1
            }
        };
        self.groups[self.current].mask &= !mask;
        self.groups.push(Group { pc: 0, mask, frame: id, state: State::Ready, turns: caller.turns });
        Step::Schedule
    }

    /// Returns the present group, which is all of `mask`, to its caller.
    fn leave(&mut self, mask: u32) {
        let id = self.groups[self.current].frame;
        let frame = &self.frames[id as usize];
        let (parent, return_pc, ext, base) =
            (frame.parent, frame.return_pc, frame.call_ext, frame.local_base);
        // SAFETY: the launch holds the program.
        let (callee, code) = unsafe { (&*frame.code, &*self.frames[parent as usize].code) };
        let to = self.frames[parent as usize].local_base;
        let list = &code.ext[ext as usize..];
        let (args, rets) = (list[0] as usize, list[1] as usize);
        for (&dst, &(src, size)) in list[2 + args..2 + args + rets].iter().zip(&callee.returns) {
            self.copy_local(mask, base + src, to + dst, size);
        }
        let frame = &mut self.frames[id as usize];
        frame.lanes &= !mask;
        if frame.lanes == 0 {
            frame.rows = Vec::new();
            self.free_frames.push(id);
        }
        let group = &mut self.groups[self.current];
        group.frame = parent;
        group.pc = return_pc;
    }

    fn copy_local(&mut self, mask: u32, src: u32, dst: u32, size: u32) {
        for l in 0..LANES {
            if mask >> l & 1 != 0
                && let (Some(s), Some(d)) =
                    (self.local.at(l, u64::from(src), size), self.local.at(l, u64::from(dst), size))
            {
                // SAFETY: `at` answers for `size` bytes each; a caller's and its callee's frames are apart.
                unsafe { std::ptr::copy(s, d, size as usize) };
            }
        }
    }
}

/// The lanes of `mask` whose value is `value`.
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
