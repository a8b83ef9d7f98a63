//! What each principal holds. The daemon enforces the limits shared by all sessions of a principal.
//!
//! A worker asks for each charge against such a limit. A session's account is what it was granted minus what
//! it returned, and ends with its worker. So a worker that lies gets no more than its principal's limit, and
//! takes nothing from other principals.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use super::arbiter::Gate;
use super::record::Record;
use super::{State, turns};
use crate::limits::{MOST_DEVICES, Resource};
use crate::pages::{Meter, Page, Terms, gate};
use crate::worker_protocol::{Refusal, Reply};

/// A session's charges, and the pages that it shares with the daemon.
pub(super) struct Account {
    terms: Page<Terms>,
    meter: Page<Meter>,
    /// Granted bytes, and everything else that a successor of this daemon needs.
    record: Record,
    /// Whether the next request may be one that the previous daemon has already carried out.
    may_repeat: bool,
    /// The gate, and how often the session was asked to report its work.
    gate: Gate,
    tells: u32,
    /// Whether there is an order for its memory.
    asked: bool,
}

impl Account {
    /// An empty account, and the descriptors of its pages and of the bell for the worker.
    pub(super) fn open(bell: &turns::Bell) -> io::Result<(Account, [OwnedFd; 3])> {
        let ((terms, terms_fd), (meter, meter_fd)) = (Page::new()?, Page::new()?);
        let record = Record::new()?;
        let account =
            Account { terms, meter, record, may_repeat: false, gate: Gate::Open, tells: 0, asked: false };
        Ok((account, [terms_fd, meter_fd, bell.share()?]))
    }

    /// The account of a session of the previous daemon, the last of `daemons`. Also the descriptor of the
    /// worker's new terms.
    pub(super) fn take_over(meter: &OwnedFd, record: Record, daemons: u32) -> io::Result<(Account, OwnedFd)> {
        let ((terms, terms_fd), meter) = (Page::<Terms>::new()?, Page::adopt(meter)?);
        terms.daemons.store(daemons, Ordering::Relaxed);
        let account =
            Account { terms, meter, record, may_repeat: true, gate: Gate::Open, tells: 0, asked: false };
        Ok((account, terms_fd))
    }

    /// What a successor of this daemon needs.
    pub(super) fn record(&self) -> &Record {
        &self.record
    }

    /// Called when a worker's message has been handled: the next one cannot be a repetition.
    pub(super) fn heard(&mut self) {
        self.may_repeat = false;
    }

    /// The worker's figures.
    pub(super) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Sets the session's gate, and wakes the session if it waits there.
    pub(super) fn set_gate(&mut self, gate: Gate) {
        if gate == self.gate {
            return;
        }
        self.tells = self.tells.wrapping_add(u32::from(gate == Gate::Tell));
        self.gate = gate;
        if let Gate::Metered { allowance, .. } = gate {
            self.terms.allowance.store(allowance, Ordering::Relaxed);
        }
        self.show_gate();
    }

    /// Tells the worker whether to look for an order before its next command.
    pub(super) fn set_asked(&mut self, asked: bool) {
        if std::mem::replace(&mut self.asked, asked) != asked {
            self.show_gate();
        }
    }

    /// Publishes how often sessions have moved device memory.
    pub(super) fn set_moves(&self, moves: u64) {
        self.terms.moves.store(moves, Ordering::Relaxed);
    }

    fn show_gate(&self) {
        let asked = if self.asked { gate::ASKED } else { 0 };
        self.terms.gate.store(turns::word(self.gate, self.tells) | asked, Ordering::Release);
        let at = std::ptr::from_ref(&self.terms.gate);
        // SAFETY: a futex word in a page that stays mapped; the call only wakes its waiters.
        unsafe { libc::syscall(libc::SYS_futex, at, libc::FUTEX_WAKE, i32::MAX) };
    }

    /// Memory that the process uses on a device beyond what the session has charged.
    pub(super) fn implicit(&self, number: usize) -> u64 {
        self.terms.implicit.get(number).map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// Bytes that the session holds on a device, according to its worker and NVML.
    pub(super) fn held(&self, number: usize) -> u64 {
        let charged = self.meter.held.get(number).map_or(0, |bytes| bytes.load(Ordering::Relaxed));
        charged.saturating_add(self.implicit(number))
    }

    /// Notes how many bytes the session's process uses on a device, according to NVML.
    pub(super) fn measured(&self, number: usize, bytes: u64) {
        if let (Some(implicit), Some(held)) = (self.terms.implicit.get(number), self.meter.held.get(number)) {
            let charged = held.load(Ordering::Relaxed).saturating_sub(self.away(number as u32));
            implicit.store(bytes.saturating_sub(charged), Ordering::Relaxed);
        }
    }
}

impl State {
    /// Bytes of a resource that a principal's sessions hold together. Saturates, so that a nonexistent
    /// resource is never free.
    fn total(&self, principal: &str, resource: Resource) -> u64 {
        let of_principal = self.sessions.values().filter(|session| session.limits.principal == principal);
        of_principal.fold(0, |sum: u64, session| {
            let implicit = match resource {
                Resource::Device(number) => session.account.implicit(number as usize),
                Resource::Pinned => 0,
            };
            sum.saturating_add(session.account.record.granted(resource)).saturating_add(implicit)
        })
    }

    /// Handles a worker's request for bytes of its principal's limit.
    pub(super) fn charge(&mut self, worker: u32, request: u64, resource: Resource, bytes: u64) -> Reply {
        let Some(session) = self.sessions.get(&worker) else { return Reply::Refused(Refusal::Unknown) };
        let Account { record, may_repeat, .. } = &session.account;
        if *may_repeat && record.has_done(request, resource, bytes) {
            return Reply::Charged;
        }
        let (principal, limit) = (&session.limits.principal, session.limits.total.of(resource));
        let most = self.total(principal, resource).checked_add(bytes).filter(|sum| *sum <= limit);
        if most.is_none() || !record.has(resource) {
            return Reply::Refused(Refusal::Full);
        }
        match self.has_room(worker, resource, bytes) {
            Ok(true) => {}
            Ok(false) => return Reply::Refused(Refusal::Crowded),
            Err(()) => return Reply::Refused(Refusal::Full),
        }
        record.change(request, resource, bytes, record.granted(resource) + bytes);
        self.publish(principal);
        Reply::Charged
    }

    /// Returns bytes that a worker gives back, at most what it was granted.
    pub(super) fn discharge(&mut self, worker: u32, request: u64, resource: Resource, bytes: u64) {
        let Some(session) = self.sessions.get(&worker) else { return };
        let Account { record, may_repeat, .. } = &session.account;
        if *may_repeat && record.has_done(request, resource, bytes) {
            return;
        }
        if record.has(resource) {
            record.change(request, resource, bytes, record.granted(resource).saturating_sub(bytes));
        }
        self.publish(&session.limits.principal);
    }

    /// Tells a principal's workers what it holds on each device.
    pub(super) fn publish(&self, principal: &str) {
        let mut totals = [0u64; MOST_DEVICES];
        let of_principal = || self.sessions.values().filter(|session| session.limits.principal == principal);
        for session in of_principal() {
            for (number, total) in totals.iter_mut().enumerate() {
                let account = &session.account;
                *total = total
                    .saturating_add(account.record.granted(Resource::Device(number as u32)))
                    .saturating_add(account.implicit(number));
            }
        }
        for session in of_principal() {
            for (told, total) in session.account.terms.total_held.iter().zip(totals) {
                told.store(total, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{Amounts, Limits};
    use crate::parent::queue::tests::session_of_limits;
    use std::os::fd::AsFd;

    const DEVICE: Resource = Resource::Device(1);

    fn state(sessions: &[(u32, &str, u64)]) -> State {
        let mut state = State::default();
        for (worker, principal, limit) in sessions {
            let total = Amounts { device_memory: *limit, pinned_memory: *limit };
            let limits = Limits { principal: (*principal).into(), total, ..Limits::default() };
            state.sessions.insert(*worker, session_of_limits(limits));
        }
        state
    }

    fn granted(reply: &Reply) -> bool {
        matches!(reply, Reply::Charged)
    }

    #[test]
    fn only_sessions_of_the_same_principal_share_its_limit() {
        let mut state = state(&[(1, "a", 100), (2, "a", 100), (3, "b", 100)]);
        assert!(granted(&state.charge(1, 1, DEVICE, 60)));
        assert!(!granted(&state.charge(2, 1, DEVICE, 50)) && granted(&state.charge(2, 1, DEVICE, 40)));
        assert!(
            granted(&state.charge(3, 1, DEVICE, 100)) && granted(&state.charge(1, 1, Resource::Pinned, 100))
        );
        assert!(granted(&state.charge(1, 1, Resource::Device(2), 100)), "each device has its own limit");
        let told = |state: &State, worker| {
            state.sessions[&worker].account.terms.total_held[1].load(Ordering::Relaxed)
        };
        assert_eq!((told(&state, 1), told(&state, 2), told(&state, 3)), (100, 100, 100));
        state.sessions.remove(&1);
        state.publish("a");
        assert_eq!(told(&state, 2), 40);
        assert!(granted(&state.charge(2, 1, DEVICE, 60)));
    }

    #[test]
    fn a_worker_returns_at_most_what_it_was_granted() {
        let mut state = state(&[(1, "a", 100), (2, "a", 100)]);
        assert!(granted(&state.charge(2, 1, DEVICE, 90)));
        state.discharge(1, 1, DEVICE, 90);
        assert!(!granted(&state.charge(1, 1, DEVICE, 20)));
        state.discharge(2, 1, DEVICE, u64::MAX);
        assert!(granted(&state.charge(1, 1, DEVICE, 100)));
    }

    #[test]
    fn a_request_that_the_previous_daemon_carried_out_is_not_repeated() {
        let mut state = state(&[(1, "a", 100)]);
        assert!(granted(&state.charge(1, 5, DEVICE, 60)));
        // Killed before it consumed the request. Its successor reads the same request again.
        let account = &state.sessions[&1].account;
        let record = Record::open(account.record.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let (_, meter) = Page::<Meter>::new().unwrap();
        let (taken, _terms) = Account::take_over(&meter, record, 1).unwrap();
        state.sessions.get_mut(&1).unwrap().account = taken;
        assert!(granted(&state.charge(1, 5, DEVICE, 60)) && state.total("a", DEVICE) == 60);
        state.sessions.get_mut(&1).unwrap().account.heard();
        assert!(!granted(&state.charge(1, 5, DEVICE, 60)), "another one with the same number");
        state.discharge(1, 6, DEVICE, 60);
        state.discharge(1, 6, DEVICE, 60);
        assert_eq!(state.total("a", DEVICE), 0);
    }

    #[test]
    fn nonsense_is_refused() {
        let mut state = state(&[(1, "a", 0)]);
        assert!(granted(&state.charge(1, 1, DEVICE, u64::MAX)));
        for (worker, resource, bytes) in
            [(1, DEVICE, 1), (1, Resource::Device(64), 1), (1, Resource::Device(u32::MAX), 0), (9, DEVICE, 1)]
        {
            assert!(!granted(&state.charge(worker, 1, resource, bytes)), "{worker} {resource} {bytes}");
        }
        state.discharge(1, 1, Resource::Device(u32::MAX), 1);
    }

    #[test]
    fn uncharged_memory_of_the_process_counts_against_the_limit() {
        let mut state = state(&[(1, "a", 100)]);
        let account = &state.sessions[&1].account;
        account.meter.held[1].store(20, Ordering::Relaxed);
        account.measured(1, 70);
        assert_eq!(account.held(1), 70);
        assert!(!granted(&state.charge(1, 1, DEVICE, 60)) && granted(&state.charge(1, 1, DEVICE, 50)));
    }
}
