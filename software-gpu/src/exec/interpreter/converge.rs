//! Where threads wait for each other: warp-wide instructions, whose lanes may arrive at different
//! instructions, and block barriers.

use super::{Group, Interpreter, State, Step, lanes_equal};
use crate::error::Fault;
use crate::exec::rows;
use crate::machine::program::{Inst, Kind, NONE, barrier, joint};
use crate::machine::row::{LANES, Line};

/// The lanes of a warp that have arrived at a barrier in one of its phases. All are set once the warp counts
/// as a whole.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counted {
    phase: u64,
    lanes: u32,
}

impl Interpreter {
    /// Executes the warp-wide instruction at which group `first` waits, once all its members wait at such an
    /// instruction. They may be at different instructions of the program.
    pub(super) fn finish_converging(&mut self, first: usize, members: u32) {
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
        if members & self.warp.live & !lanes != 0 {
            return;
        }
        if inst.kind == Kind::Converge {
            let saved = self.current;
            if joined.len() == 1 {
                self.current = first;
                self.enter();
                // SAFETY: the lowering emits the operands that the handler expects.
                unsafe { (inst.exec)(&mut self.warp, &inst, lanes) };
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

    /// The instruction that a group is at.
    pub(super) fn instruction_of(&self, group: &Group) -> &Inst {
        // SAFETY: the launch keeps the program alive; a waiting group is at a valid instruction.
        unsafe { &(&(*self.frames[group.frame as usize].code).insts)[group.pc as usize] }
    }

    /// Executes a warp-wide instruction for groups at different instructions: gathers their operands in
    /// scratch rows and distributes the results.
    pub(super) fn execute_jointly(&mut self, inst: &Inst, joined: &[usize], lanes: u32) {
        const ROW: usize = 256;
        let roles = joint::roles(inst.flags);
        let mut scratch = vec![Line([0; 64]); roles.len() * ROW / 64];
        let base: *mut u8 = scratch.as_mut_ptr().cast();
        let groups: Vec<(Group, Inst)> =
            joined.iter().map(|&i| (self.groups[i], self.instruction_of(&self.groups[i]).clone())).collect();
        // SAFETY: each role gives the width of the rows that the lowering emitted. A row of the scratch
        // memory is large enough and aligned for the widest.
        unsafe {
            for (&index, (group, own)) in joined.iter().zip(&groups) {
                self.current = index;
                self.enter();
                for (n, role) in roles.iter().enumerate() {
                    let to = base.add(n * ROW);
                    match role {
                        joint::Role::In32 => {
                            let row: [u32; LANES] = rows::get(&self.warp, own.r[n]);
                            for l in (0..LANES).filter(|l| group.mask >> l & 1 != 0) {
                                to.cast::<u32>().add(l).write(row[l]);
                            }
                        }
                        joint::Role::In64 => {
                            let row: [u64; LANES] = rows::get(&self.warp, own.r[n]);
                            for l in (0..LANES).filter(|l| group.mask >> l & 1 != 0) {
                                to.cast::<u64>().add(l).write(row[l]);
                            }
                        }
                        joint::Role::InPred => {
                            // The only immediate of such an instruction negates its predicate.
                            let bits = rows::pred(&self.warp, own.r[n]);
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
            self.warp.bases[0] = base;
            (inst.exec)(&mut self.warp, &all, lanes);
            for (&index, (group, own)) in joined.iter().zip(&groups) {
                self.current = index;
                self.enter();
                for (n, role) in roles.iter().enumerate().filter(|(n, _)| own.r[*n] != NONE) {
                    let from = base.add(n * ROW).cast::<u32>();
                    match role {
                        joint::Role::Out32 => {
                            rows::put(&self.warp, own.r[n], group.mask, &from.cast::<[u32; LANES]>().read());
                        }
                        joint::Role::OutPred => rows::put_pred(&self.warp, own.r[n], group.mask, from.read()),
                        _ => {}
                    }
                }
            }
        }
    }

    pub(super) fn barrier(&mut self, inst: &Inst, mask: u32, active: u32) -> Step {
        let pc = self.pc;
        // SAFETY: the lowering guarantees u32 rows, and a predicate for a reduction.
        let (ids, counts, bits) = unsafe {
            let ids: [u32; LANES] = rows::get(&self.warp, inst.r[0]);
            let counts: [u32; LANES] =
                if inst.r[1] == NONE { [0; LANES] } else { rows::get(&self.warp, inst.r[1]) };
            let bits = if inst.r[2] >= barrier::RED_POPC { rows::pred(&self.warp, inst.r[3]) } else { 0 };
            (ids, counts, if inst.imm == 1 { !bits } else { bits })
        };
        let lane = mask.trailing_zeros() as usize;
        let (id, count) = (ids[lane], counts[lane]);
        let same = lanes_equal(&ids, id, mask) & lanes_equal(&counts, count, mask);
        if same != mask {
            // Lanes that name different barriers arrive at them one after the other.
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
            return self.fault(Fault::IllegalInstruction(format!("barrier {id} does not exist")), lane);
        }
        if count % 32 != 0 {
            return self.fault(
                Fault::IllegalInstruction(format!("invalid thread count {count} of a barrier")),
                lane,
            );
        }
        let phase = self.warp.block().barriers[id as usize].phase;
        let set = bits & mask;
        self.warp.block().arrive(id, count, mask.count_ones(), set.count_ones());
        if count != 0 {
            let seen = &mut self.counted[id as usize];
            if seen.phase != phase || seen.lanes & mask != 0 {
                *seen = Counted { phase, lanes: 0 };
            }
            seen.lanes |= mask;
            self.count_whole_warp(id);
        }
        if inst.r[2] == barrier::ARRIVE {
            return Step::Continue;
        }
        if mask != active {
            self.split(active & !mask, pc + 1);
        }
        self.groups[self.current].state = State::Barrier { id, phase };
        Step::Schedule
    }

    /// Counts the lanes that have exited or never existed at a barrier that counts threads, once all others
    /// have arrived: such a barrier counts whole warps.
    fn count_whole_warp(&mut self, id: u32) {
        let Counted { phase, lanes } = self.counted[id as usize];
        let waits = self.warp.block().barriers[id as usize].phase == phase;
        if waits && lanes != 0 && lanes != u32::MAX && self.warp.live & !lanes == 0 {
            self.counted[id as usize].lanes = u32::MAX;
            self.warp.block().arrive_absent(id, lanes.count_zeros());
        }
    }

    /// Counts this warp at the barriers that have waited for lanes that have now exited.
    pub(super) fn leave_counted_barriers(&mut self) {
        for id in 0..self.counted.len() as u32 {
            self.count_whole_warp(id);
        }
    }

    /// Wakes a group whose barrier has completed.
    pub(super) fn finish_barrier(&mut self, index: usize, id: u32) {
        let group = self.groups[index];
        let frame = &mut self.frames[group.frame as usize];
        // SAFETY: the launch keeps the program alive.
        let inst = unsafe { &(&(*frame.code).insts)[group.pc as usize] };
        let kind = inst.r[2];
        if kind >= barrier::RED_POPC {
            let done = self.warp.block().barriers[id as usize];
            let saved = self.current;
            self.current = index;
            self.enter();
            // SAFETY: the lowering gives a reduction a u32 row (popc) or a predicate.
            unsafe {
                match kind {
                    barrier::RED_POPC => rows::put(&self.warp, inst.r[4], group.mask, &[done.popc; LANES]),
                    _ => {
                        let holds = if kind == barrier::RED_AND { done.all } else { done.popc != 0 };
                        rows::put_pred(&self.warp, inst.r[4], group.mask, if holds { u32::MAX } else { 0 });
                    }
                }
            }
            self.current = saved;
        }
        let group = &mut self.groups[index];
        group.pc += 1;
        group.state = State::Ready;
    }
}
