//! What each principal holds. The daemon enforces the limits shared by all sessions of a principal, and of a
//! client with all of its leases.
//!
//! A worker asks for each charge against such a limit. A session's account is what it was granted minus what
//! it returned, and ends with its worker. So a worker that lies gets no more than its principal's limit, and
//! takes nothing from other principals.

pub(super) mod account;
pub(super) mod imports;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use self::account::Account;
use self::imports::Import;
use super::session::Session;
use super::state::State;
use crate::limits::{Limits, MOST_DEVICES, Resource};
use crate::worker_protocol::{Refusal, Reply, Token};

impl State {
    /// Bytes of a resource that count against a session's limit, which it shares with others. A lease has its
    /// own limit of device memory besides its client's; page-locked memory is its client's. Saturates, so
    /// that a nonexistent resource is never free.
    fn total(&self, limits: &Limits, resource: Resource) -> u64 {
        let counted = |session: &Session| match resource {
            Resource::Device(number) => session.account.counts(number),
            Resource::Pinned => session.account.record.granted(resource),
        };
        let sum =
            |sessions: &mut dyn Iterator<Item = &Session>| sessions.map(counted).fold(0, u64::saturating_add);
        let of_client = || self.sessions.of(limits.owner());
        let client = sum(&mut of_client());
        match resource {
            Resource::Pinned => client,
            Resource::Device(_) => {
                let principal =
                    sum(&mut of_client().filter(|session| session.limits.principal == limits.principal));
                against_both(principal, client, limits)
            }
        }
    }

    /// Handles a worker's request for bytes of its principal's limit. `shared`: the token of memory that it
    /// imports.
    pub(super) fn charge(
        &mut self,
        worker: u32,
        request: u64,
        resource: Resource,
        bytes: u64,
        shared: Option<Token>,
    ) -> Reply {
        let import = shared.and_then(|token| Some((token, self.import(worker, &token, resource, bytes)?)));
        let Some(session) = self.sessions.get(&worker) else { return Reply::Refused(Refusal::Unknown) };
        let Account { record, may_repeat, .. } = &session.account;
        if *may_repeat && record.has_done(request, resource, bytes) {
            return Reply::Charged;
        }
        let (client, limit) = (session.limits.owner().to_owned(), session.limits.total.of(resource));
        let more = if import.is_some() { 0 } else { bytes };
        let most = self.total(&session.limits, resource).checked_add(more).filter(|sum| *sum <= limit);
        let after = record.granted(resource).checked_add(bytes).filter(|_| record.has(resource));
        let (Some(_), Some(after)) = (most, after) else { return Reply::Refused(Refusal::Full) };
        // What is imported is on the device already.
        let room = import.map_or_else(|| self.has_room(worker, resource, bytes), |_| Ok(true));
        let Ok(room) = room else { return Reply::Refused(Refusal::Full) };
        let Some(session) = self.sessions.get_mut(&worker) else { return Reply::Refused(Refusal::Unknown) };
        if import.is_none() {
            // Also if there is room: the device may have less than is known here.
            session.account.note_wanted(resource, bytes, Instant::now());
        }
        if !room {
            return Reply::Refused(Refusal::Crowded);
        }
        let record = &session.account.record;
        record.change(request, resource, bytes, after);
        if let Some((token, import)) = import {
            session.account.imports.add(token, import);
        }
        self.publish(&client, devices_of(resource));
        Reply::Charged
    }

    /// What a worker imports, if it counts for the session that shares it.
    fn import(&self, worker: u32, token: &Token, resource: Resource, bytes: u64) -> Option<Import> {
        let (owner, device, size) = self.shares.memory(token, &self.origin_of(worker)?)?;
        let is_it = resource == Resource::Device(device) && bytes == size;
        // A token covers no more than counts for whoever shares it.
        let owned = self.sessions.get(&owner)?.account.counted(device);
        let new = self.sessions.get(&worker)?.account.imports.may_add(token);
        (is_it && bytes <= owned && new).then_some(Import { device, bytes, elsewhere: true })
    }

    /// Returns bytes that a worker gives back, at most what it was granted.
    pub(super) fn discharge(
        &mut self,
        worker: u32,
        request: u64,
        resource: Resource,
        bytes: u64,
        shared: Option<Token>,
    ) {
        let Some(session) = self.sessions.get_mut(&worker) else { return };
        let _ = shared.and_then(|token| session.account.imports.remove(&token));
        let Account { record, imports, may_repeat, .. } = &session.account;
        if *may_repeat && record.has_done(request, resource, bytes) {
            return;
        }
        if record.has(resource) {
            // What counts for another session comes back with its token.
            let kept = match resource {
                Resource::Device(number) => imports.elsewhere(number),
                Resource::Pinned => 0,
            };
            let left = record.granted(resource).saturating_sub(bytes).max(kept);
            record.change(request, resource, bytes, left);
        }
        let client = session.limits.owner().to_owned();
        self.publish(&client, devices_of(resource));
        self.pass_on_imports(shared);
    }

    /// Memory is no longer shared under these tokens, or a session has freed it: if others still have it, it
    /// counts for one of them.
    pub(super) fn pass_on_imports(&mut self, tokens: impl IntoIterator<Item = Token>) {
        // There may be thousands, and everybody waits for this.
        let mut left: HashSet<Token> = tokens.into_iter().filter(|token| !self.shares.has(token)).collect();
        for imports in self.sessions.values().map(|session| &session.account.imports) {
            for token in imports.among(&left) {
                if imports.get(&token).is_some_and(|import| !import.elsewhere) {
                    left.remove(&token);
                }
            }
        }
        let mut changed = BTreeSet::new();
        for session in self.sessions.values_mut() {
            for token in session.account.imports.among(&left) {
                session.account.imports.count_here(&token);
                let device = session.account.imports.get(&token).map(|import| import.device);
                changed.extend(device.map(|device| (session.limits.owner().to_owned(), device)));
                left.remove(&token);
            }
        }
        for (client, device) in changed {
            self.publish(&client, devices_of(Resource::Device(device)));
        }
    }

    /// Sessions were taken over from the previous daemon: the ones that shared memory with them may be gone.
    pub(super) fn pass_on_taken_imports(&mut self) {
        let all = self.sessions.values().flat_map(|session| session.account.imports.all());
        let tokens: Vec<Token> = all.map(|(token, _)| token).collect();
        self.pass_on_imports(tokens);
    }

    /// Tells the workers of a client's sessions what counts against their limits on these devices.
    pub(super) fn publish(&self, client: &str, devices: Range<usize>) {
        let sessions = || self.sessions.of(client);
        let (mut all, mut of_principals) = ([0u64; MOST_DEVICES], HashMap::new());
        for session in sessions() {
            let own = of_principals.entry(&session.limits.principal).or_insert([0u64; MOST_DEVICES]);
            for number in devices.clone() {
                let bytes = session.account.counts(number as u32);
                (all[number], own[number]) =
                    (all[number].saturating_add(bytes), own[number].saturating_add(bytes));
            }
        }
        for session in sessions() {
            let own = of_principals.get(&session.limits.principal).unwrap_or(&all);
            for number in devices.clone() {
                let held = against_both(own[number], all[number], &session.limits);
                session.account.terms.total_held[number].store(held, Ordering::Relaxed);
            }
        }
    }
}

/// All devices.
pub(super) const ALL_DEVICES: Range<usize> = 0..MOST_DEVICES;

/// The device on which a change of a resource counts, if it is memory of one. A client may make thousands of
/// changes in a second, and everybody waits for each.
fn devices_of(resource: Resource) -> Range<usize> {
    match resource {
        Resource::Device(number) if (number as usize) < MOST_DEVICES => number as usize..number as usize + 1,
        _ => 0..0,
    }
}

/// What counts against a session's limit of device memory if its principal holds so much, and its client so
/// much with all leases: as much as leaves it what both limits leave.
fn against_both(principal: u64, client: u64, limits: &Limits) -> u64 {
    match (limits.total.device_memory, limits.client_memory) {
        (0, _) | (_, 0) => principal,
        (own, all) => principal.max(client.saturating_sub(all.saturating_sub(own))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Amounts;
    use crate::pages::{Meter, Page};
    use crate::parent::accounts::imports::Imports;
    use crate::parent::queue::tests::session_of_limits;
    use crate::parent::record::Record;
    use crate::worker_protocol::Shared;
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

    /// Bytes of [`DEVICE`] that count for a session's principal.
    fn total(state: &State, worker: u32) -> u64 {
        state.total(&state.sessions[&worker].limits, DEVICE)
    }

    /// The same, as the session's worker was told.
    fn told(state: &State, worker: u32) -> u64 {
        state.sessions[&worker].account.terms.total_held[1].load(Ordering::Relaxed)
    }

    #[test]
    fn only_sessions_of_the_same_principal_share_its_limit() {
        let mut state = state(&[(1, "a", 100), (2, "a", 100), (3, "b", 100)]);
        assert!(granted(&state.charge(1, 1, DEVICE, 60, None)));
        assert!(
            !granted(&state.charge(2, 1, DEVICE, 50, None)) && granted(&state.charge(2, 1, DEVICE, 40, None))
        );
        assert!(
            granted(&state.charge(3, 1, DEVICE, 100, None))
                && granted(&state.charge(1, 1, Resource::Pinned, 100, None))
        );
        assert!(
            granted(&state.charge(1, 1, Resource::Device(2), 100, None)),
            "each device has its own limit"
        );
        assert_eq!((told(&state, 1), told(&state, 2), told(&state, 3)), (100, 100, 100));
        state.sessions.remove(&1);
        state.publish("a", ALL_DEVICES);
        assert_eq!(told(&state, 2), 40);
        assert!(granted(&state.charge(2, 1, DEVICE, 60, None)));
    }

    #[test]
    fn a_change_is_told_for_its_device_only() {
        let mut state = state(&[(1, "a", 100), (2, "a", 100)]);
        let untouched = |state: &State| {
            let total = &state.sessions[&2].account.terms.total_held;
            (0..MOST_DEVICES).filter(|number| total[*number].load(Ordering::Relaxed) == 7).count()
        };
        for told in &state.sessions[&2].account.terms.total_held {
            told.store(7, Ordering::Relaxed);
        }
        assert!(granted(&state.charge(1, 1, Resource::Pinned, 60, None)));
        assert_eq!(untouched(&state), MOST_DEVICES);
        assert!(granted(&state.charge(1, 2, DEVICE, 60, None)));
        assert_eq!((told(&state, 2), untouched(&state)), (60, MOST_DEVICES - 1));
        state.discharge(1, 3, DEVICE, 60, None);
        assert_eq!((told(&state, 2), untouched(&state)), (0, MOST_DEVICES - 1));
    }

    #[test]
    fn sessions_under_all_leases_of_a_client_share_its_page_locked_memory() {
        let mut state = state(&[
            (1, "a 1", 100),
            (2, "a 2", 100),
            (3, "a", 100),
            (4, "b", 100),
            (5, "x/1", 9),
            (6, "x/2", 9),
        ]);
        assert!(granted(&state.charge(1, 1, Resource::Pinned, 60, None)));
        for worker in [2, 3] {
            assert!(!granted(&state.charge(worker, 1, Resource::Pinned, 41, None)));
            assert!(granted(&state.charge(worker, 2, Resource::Pinned, 20, None)));
        }
        assert!(granted(&state.charge(4, 1, Resource::Pinned, 100, None)), "another client");
        for worker in [5, 6] {
            assert!(
                granted(&state.charge(worker, 1, Resource::Pinned, 9, None)),
                "clients whose names have a slash"
            );
        }
        // Memory of the devices is limited for each lease.
        assert!(
            granted(&state.charge(1, 2, DEVICE, 100, None))
                && granted(&state.charge(2, 3, DEVICE, 100, None))
        );
    }

    #[test]
    fn sessions_under_all_leases_and_outside_share_their_clients_memory() {
        let mut state = state(&[(1, "a 1", 60), (2, "a 2", 60), (3, "a", 100), (4, "b", 100)]);
        for session in state.sessions.values_mut() {
            session.limits.client_memory = 100;
        }
        assert!(
            !granted(&state.charge(1, 1, DEVICE, 61, None)) && granted(&state.charge(1, 1, DEVICE, 60, None))
        );
        assert!(
            !granted(&state.charge(3, 1, DEVICE, 41, None)) && granted(&state.charge(3, 1, DEVICE, 30, None))
        );
        // Of each limit, what is left of both.
        assert_eq!([1, 2, 3].map(|worker| told(&state, worker)), [60, 50, 90]);
        assert!(
            !granted(&state.charge(2, 1, DEVICE, 11, None)) && granted(&state.charge(2, 1, DEVICE, 10, None))
        );
        assert!(granted(&state.charge(4, 1, DEVICE, 100, None)), "another client");
        state.discharge(3, 2, DEVICE, 30, None);
        assert_eq!([1, 2, 3].map(|worker| told(&state, worker)), [60, 30, 70]);
        assert!(
            !granted(&state.charge(2, 2, DEVICE, 31, None)) && granted(&state.charge(2, 2, DEVICE, 30, None))
        );
    }

    #[test]
    fn imported_memory_counts_once_for_whoever_still_has_it() {
        let mut state = state(&[(1, "a", 100), (2, "a", 100), (3, "a", 100)]);
        assert!(granted(&state.charge(1, 1, DEVICE, 60, None)));
        let (what, sharer) = (Shared::Memory { device: 1, size: 60 }, state.sharer(1).unwrap());
        let token = state.shares.add(sharer, what, None).unwrap().unwrap();
        for worker in [2, 3] {
            assert!(granted(&state.charge(worker, 1, DEVICE, 60, Some(token))));
        }
        assert_eq!((total(&state, 2), told(&state, 2)), (60, 60));
        // A worker that lies gets no more for it.
        state.discharge(2, 2, DEVICE, 60, None);
        assert!(!granted(&state.charge(2, 3, DEVICE, 41, None)) && total(&state, 2) == 60);
        // The session that shares it frees it, and then one after the other that has it.
        state.shares.remove(&token, 1);
        state.pass_on_imports([token]);
        state.discharge(1, 2, DEVICE, 60, None);
        assert_eq!(total(&state, 2), 60);
        state.discharge(2, 4, DEVICE, 60, Some(token));
        assert_eq!(total(&state, 2), 60);
        state.discharge(3, 2, DEVICE, 60, Some(token));
        assert_eq!(total(&state, 2), 0);
    }

    #[test]
    fn what_a_session_shared_that_an_upgrade_has_lost_counts_for_one_that_has_it() {
        let mut state = state(&[(2, "a", 100), (3, "a", 100)]);
        for worker in [2, 3] {
            assert!(granted(&state.charge(worker, 1, DEVICE, 50, None)));
            let import = Import { device: 1, bytes: 50, elsewhere: true };
            let imports = Imports::restore(vec![([7; 16], import)]);
            state.sessions.get_mut(&worker).unwrap().account.imports = imports;
        }
        state.pass_on_taken_imports();
        assert_eq!((total(&state, 2), told(&state, 3)), (50, 50));
    }

    #[test]
    fn only_what_another_session_of_the_client_shares_counts_there() {
        let mut state = state(&[(1, "a", 100), (2, "a", 100)]);
        assert!(granted(&state.charge(1, 1, DEVICE, 60, None)));
        let mut share = |size| {
            let what = Shared::Memory { device: 1, size };
            state.shares.add(state.sharer(1).unwrap(), what, None).unwrap().unwrap()
        };
        let (token, too_much) = (share(60), share(61));
        for (resource, bytes, token) in [
            (DEVICE, 61, token),
            (Resource::Device(2), 101, token),
            (DEVICE, 61, too_much),
            (DEVICE, 60, [0; 16]),
        ] {
            assert!(!granted(&state.charge(2, 1, resource, bytes, Some(token))), "{resource} {bytes}");
        }
        // Nor does what the other session has only imported itself.
        assert!(granted(&state.charge(2, 1, DEVICE, 60, Some(token))));
        let (what, sharer) = (Shared::Memory { device: 1, size: 60 }, state.sharer(2).unwrap());
        let again = state.shares.add(sharer, what, None).unwrap().unwrap();
        assert!(!granted(&state.charge(1, 2, DEVICE, 60, Some(again))));
        state.discharge(2, 2, DEVICE, 60, Some(token));
        state.sessions.get_mut(&2).unwrap().client = "another".into();
        assert!(!granted(&state.charge(2, 1, DEVICE, 60, Some(token))));
    }

    #[test]
    fn a_worker_returns_at_most_what_it_was_granted() {
        let mut state = state(&[(1, "a", 100), (2, "a", 100)]);
        assert!(granted(&state.charge(2, 1, DEVICE, 90, None)));
        state.discharge(1, 1, DEVICE, 90, None);
        assert!(!granted(&state.charge(1, 1, DEVICE, 20, None)));
        state.discharge(2, 1, DEVICE, u64::MAX, None);
        assert!(granted(&state.charge(1, 1, DEVICE, 100, None)));
    }

    #[test]
    fn a_request_that_the_previous_daemon_carried_out_is_not_repeated() {
        let mut state = state(&[(1, "a", 100)]);
        assert!(granted(&state.charge(1, 5, DEVICE, 60, None)));
        // Killed before it consumed the request. Its successor reads the same request again.
        let account = &state.sessions[&1].account;
        let record = Record::open(account.record.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let (_, meter) = Page::<Meter>::new().unwrap();
        let (taken, _terms) = Account::take_over(&meter, record, 1).unwrap();
        state.sessions.get_mut(&1).unwrap().account = taken;
        assert!(granted(&state.charge(1, 5, DEVICE, 60, None)) && total(&state, 1) == 60);
        state.sessions.get_mut(&1).unwrap().account.heard();
        assert!(!granted(&state.charge(1, 5, DEVICE, 60, None)), "another one with the same number");
        state.discharge(1, 6, DEVICE, 60, None);
        state.discharge(1, 6, DEVICE, 60, None);
        assert_eq!(total(&state, 1), 0);
    }

    #[test]
    fn nonsense_is_refused() {
        let mut state = state(&[(1, "a", 0)]);
        assert!(granted(&state.charge(1, 1, DEVICE, u64::MAX, None)));
        for (worker, resource, bytes) in
            [(1, DEVICE, 1), (1, Resource::Device(64), 1), (1, Resource::Device(u32::MAX), 0), (9, DEVICE, 1)]
        {
            assert!(!granted(&state.charge(worker, 1, resource, bytes, None)), "{worker} {resource} {bytes}");
        }
        state.discharge(1, 1, Resource::Device(u32::MAX), 1, None);
    }

    #[test]
    fn a_worker_that_says_it_has_charged_more_than_it_was_granted_hides_nothing() {
        let mut state = state(&[(1, "a", 100)]);
        let account = &mut state.sessions.get_mut(&1).unwrap().account;
        account.asks = true;
        account.meter().held[1].store(u64::MAX, Ordering::Relaxed);
        account.measured(1, 70);
        assert_eq!((account.implicit(1), account.held(1)), (70, 70));
        assert!(
            !granted(&state.charge(1, 1, DEVICE, 31, None)) && granted(&state.charge(1, 1, DEVICE, 30, None))
        );
    }

    #[test]
    fn uncharged_memory_of_the_process_counts_against_the_limit() {
        let mut state = state(&[(1, "a", 100)]);
        let account = &state.sessions[&1].account;
        account.meter().held[1].store(20, Ordering::Relaxed);
        account.measured(1, 70);
        assert_eq!(account.held(1), 70);
        assert!(
            !granted(&state.charge(1, 1, DEVICE, 60, None)) && granted(&state.charge(1, 1, DEVICE, 50, None))
        );
    }
}
