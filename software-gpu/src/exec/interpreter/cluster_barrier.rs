//! The cluster barrier, whose arrive and wait are separate instructions.

use super::{Interpreter, State, Step};
use crate::error::Fault;

/// The lanes of a warp that have arrived at the cluster's barrier.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arrivals {
    /// Lanes that have arrived but not waited yet.
    outstanding: u32,
    /// The lowest bit of the phase in which each of them arrived. A lane can be at most one phase behind.
    odd: u32,
}

impl Arrivals {
    /// The lanes in `mask` that have arrived in this phase.
    fn at(self, mask: u32, phase: u64) -> u32 {
        let same = if phase & 1 != 0 { self.odd } else { !self.odd };
        self.outstanding & same & mask
    }
}

impl Interpreter {
    /// `barrier.cluster.arrive`.
    pub(super) fn cluster_arrive(&mut self, mask: u32) -> Step {
        let twice = self.arrivals.outstanding & mask;
        if twice != 0 {
            let what = "barrier.cluster.arrive without barrier.cluster.wait after the previous one".into();
            return self.fault(Fault::IllegalInstruction(what), twice.trailing_zeros() as usize);
        }
        let cluster = self.warp.block().cluster();
        let odd = cluster.phase & 1 != 0;
        cluster.arrive(mask.count_ones());
        self.arrivals.outstanding |= mask;
        self.arrivals.odd = if odd { self.arrivals.odd | mask } else { self.arrivals.odd & !mask };
        Step::Continue
    }

    /// `barrier.cluster.wait`: lanes whose phase has completed continue; the others wait.
    pub(super) fn cluster_wait(&mut self, mask: u32, active: u32) -> Step {
        let phase = self.warp.block().cluster().phase;
        let waiting = self.arrivals.at(mask, phase);
        self.arrivals.outstanding &= !(mask & !waiting);
        if waiting == 0 {
            return Step::Continue;
        }
        self.split(active & !waiting, self.pc + 1);
        self.groups[self.current].state = State::Cluster { phase };
        Step::Schedule
    }

    /// Wakes a group whose phase of the barrier has completed.
    pub(super) fn finish_cluster_wait(&mut self, index: usize) {
        let group = &mut self.groups[index];
        self.arrivals.outstanding &= !group.mask;
        group.pc += 1;
        group.state = State::Ready;
    }

    /// Tells the cluster that threads have exited.
    pub(super) fn leave_cluster(&mut self, mask: u32) {
        let arrivals = self.arrivals;
        let cluster = self.warp.block().cluster();
        cluster.exit(mask.count_ones(), arrivals.at(mask, cluster.phase).count_ones());
    }
}
