//! What each principal holds. The daemon enforces the limits shared by all sessions of a principal.
//!
//! A worker asks for each charge against such a limit. A session's account is what it was granted minus what
//! it returned, and ends with its worker. So a worker that lies gets no more than its principal's limit, and
//! takes nothing from other principals.

pub(super) mod account;

use std::sync::atomic::Ordering;

use self::account::Account;
use super::session::Session;
use super::state::State;
use crate::limits::{Limits, MOST_DEVICES, Resource};
use crate::worker_protocol::{Refusal, Reply};

impl State {
    /// Bytes of a resource that the sessions which share these limits hold together. A lease has its own
    /// limit of device memory, but page-locked memory is its owner's. Saturates, so that a nonexistent
    /// resource is never free.
    fn total(&self, limits: &Limits, resource: Resource) -> u64 {
        let counts = |session: &&Session| match resource {
            Resource::Device(_) => session.limits.principal == limits.principal,
            Resource::Pinned => session.limits.owner() == limits.owner(),
        };
        let counted = self.sessions.values().filter(counts);
        counted.fold(0, |sum: u64, session| {
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
        let most = self.total(&session.limits, resource).checked_add(bytes).filter(|sum| *sum <= limit);
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
    use crate::limits::Amounts;
    use crate::pages::{Meter, Page};
    use crate::parent::queue::tests::session_of_limits;
    use crate::parent::record::Record;
    use std::os::fd::AsFd;

    const DEVICE: Resource = Resource::Device(1);

    fn state(sessions: &[(u32, &str, u64)]) -> State {
        let mut state = State::default();
        for (worker, principal, limit) in sessions {
            let total = Amounts { device_memory: *limit, pinned_memory: *limit };
            let limits = Limits { total, ..Limits::test(principal) };
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
    fn sessions_under_all_leases_of_a_client_share_its_page_locked_memory() {
        let mut state = state(&[
            (1, "a#1", 100),
            (2, "a#2", 100),
            (3, "a", 100),
            (4, "b", 100),
            (5, "x/1", 9),
            (6, "x/2", 9),
        ]);
        assert!(granted(&state.charge(1, 1, Resource::Pinned, 60)));
        for worker in [2, 3] {
            assert!(!granted(&state.charge(worker, 1, Resource::Pinned, 41)));
            assert!(granted(&state.charge(worker, 2, Resource::Pinned, 20)));
        }
        assert!(granted(&state.charge(4, 1, Resource::Pinned, 100)), "another client");
        for worker in [5, 6] {
            assert!(
                granted(&state.charge(worker, 1, Resource::Pinned, 9)),
                "clients whose names have a slash"
            );
        }
        // Memory of the devices is limited for each lease.
        assert!(granted(&state.charge(1, 2, DEVICE, 100)) && granted(&state.charge(2, 3, DEVICE, 100)));
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
        let total = |state: &State| state.total(&state.sessions[&1].limits, DEVICE);
        assert!(granted(&state.charge(1, 5, DEVICE, 60)));
        // Killed before it consumed the request. Its successor reads the same request again.
        let account = &state.sessions[&1].account;
        let record = Record::open(account.record.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let (_, meter) = Page::<Meter>::new().unwrap();
        let (taken, _terms) = Account::take_over(&meter, record, 1).unwrap();
        state.sessions.get_mut(&1).unwrap().account = taken;
        assert!(granted(&state.charge(1, 5, DEVICE, 60)) && total(&state) == 60);
        state.sessions.get_mut(&1).unwrap().account.heard();
        assert!(!granted(&state.charge(1, 5, DEVICE, 60)), "another one with the same number");
        state.discharge(1, 6, DEVICE, 60);
        state.discharge(1, 6, DEVICE, 60);
        assert_eq!(total(&state), 0);
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
        account.meter().held[1].store(20, Ordering::Relaxed);
        account.measured(1, 70);
        assert_eq!(account.held(1), 70);
        assert!(!granted(&state.charge(1, 1, DEVICE, 60)) && granted(&state.charge(1, 1, DEVICE, 50)));
    }
}
