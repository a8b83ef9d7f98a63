//! Chooses a session's devices when a worker is ready for it.
//!
//! - No session gets an unhealthy device ([`super::health`]).
//! - A session gets as many devices as its limits say, of those they allow: the ones that the fewest sessions
//!   use.
//! - Sessions of one principal get the same devices, so that its processes can share memory. If they ask for
//!   different ones, they together get no more than one of them would. If they have more, because a device
//!   was ill for a time, new ones get those that most of them use.
//! - A [lease](super::leases) counts like a session of a principal of its own that is always there, and what
//!   it has is part of what its client may have. Its sessions get all of its devices, whoever waits for them.
//! - An exclusive principal's devices serve nobody else while it has a session. It waits until enough devices
//!   are unused by others. Meanwhile no later client gets the devices that it waits for, so that it doesn't
//!   wait forever, except one whose sessions have the same devices: they may be processes of one program.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::state::State;
use crate::config::Serve;
use crate::limits::Limits;
use crate::worker_protocol::Kind;

/// Why a session gets no devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoDevice {
    /// Others have them now.
    Wait(String),
    /// It never will get any.
    Never(String),
}

fn list(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

impl State {
    /// Places a session, leaving the devices in `reserved` free. The numbers are in the server's order.
    ///
    /// # Errors
    /// If it gets none now. Adds the devices that an exclusive session waits for to `reserved`.
    pub(super) fn place(
        &self,
        all: &[u32],
        kind: Kind,
        limits: &Limits,
        reserved: &mut Vec<u32>,
    ) -> Result<Vec<u32>, NoDevice> {
        let allowed: Vec<u32> =
            all.iter().copied().filter(|n| limits.devices.is_empty() || limits.devices.contains(n)).collect();
        if allowed.is_empty() {
            let (asked, shared) = (list(&limits.devices), list(all));
            return Err(NoDevice::Never(format!(
                "the policy gives this client devices {asked}, but the server shares devices {shared}"
            )));
        }
        let (well, ill): (Vec<u32>, Vec<u32>) =
            allowed.iter().partition(|number| !self.ill.contains_key(number));
        let allowed = match kind {
            // NVML reports on an unhealthy device if there is no other.
            Kind::Nvml if well.is_empty() => allowed,
            _ => well,
        };
        if allowed.is_empty() {
            let reasons = ill.iter().filter_map(|number| Some((number, self.ill.get(number)?)));
            let reasons: Vec<String> =
                reasons.map(|(number, illness)| format!("device {number}: {}", illness.why)).collect();
            let why = format!("no healthy device is left for this client: {}", reasons.join("; "));
            let lasting =
                ill.iter().all(|number| self.ill.get(number).is_some_and(|illness| illness.lasting));
            return Err(if lasting { NoDevice::Never(why) } else { NoDevice::Wait(why) });
        }
        // Under a lease: nobody else gets them for itself while that lasts.
        if limits.owner.is_some() {
            return Ok(allowed);
        }
        let gpu_sessions = || self.sessions.values().filter(|session| session.kind == Kind::Gpu);
        let wanted = match limits.device_count {
            0 if limits.exclusive => limits.devices.len().clamp(1, allowed.len()),
            0 => allowed.len(),
            count => (count as usize).min(allowed.len()),
        };
        if limits.exclusive || limits.device_count > 0 {
            let own = || gpu_sessions().filter(|session| session.limits.principal == limits.principal);
            let uses = |number: u32| own().filter(|session| session.devices.contains(&number)).count();
            let mut same: Vec<u32> = allowed.iter().copied().filter(|number| uses(*number) > 0).collect();
            // Stable: among equally used devices, the first.
            same.sort_by_key(|number| Reverse(uses(*number)));
            same.truncate(wanted);
            if !same.is_empty() {
                same.sort_unstable();
                return Ok(same);
            }
        }
        // Others that use devices, and whether exclusively: sessions, and leases with or without sessions.
        let sessions = gpu_sessions().filter(|session| session.limits.principal != limits.principal);
        let sessions = sessions.map(|session| (&session.devices, session.limits.exclusive));
        let leases = self.leases.all().filter(|lease| lease.account() != limits.principal);
        let others: Vec<(&Vec<u32>, bool)> =
            sessions.chain(leases.map(|lease| (&lease.devices, lease.exclusive))).collect();
        let users = |number: u32| others.iter().filter(|(devices, _)| devices.contains(&number)).count();
        let held =
            |number: u32| others.iter().any(|(devices, exclusive)| *exclusive && devices.contains(&number));
        let open: Vec<u32> = allowed.iter().copied().filter(|n| !held(*n) && !reserved.contains(n)).collect();
        // What its client has already is part of what it may have.
        let (most, mut own) = (limits.most_devices(), BTreeSet::new());
        let mut wanted = wanted;
        if most > 0 && kind == Kind::Gpu {
            own = self.usable_devices_of(limits);
            let again = if limits.exclusive { 0 } else { open.iter().filter(|n| own.contains(n)).count() };
            wanted = wanted.min(again + most.saturating_sub(own.len()));
            if wanted == 0 {
                let (own, allowed) = (own.into_iter().collect::<Vec<_>>(), list(&allowed));
                return Err(NoDevice::Wait(format!(
                    "none of devices {allowed}: the client's other sessions and its leases have devices {}, and it may have {most}",
                    list(&own)
                )));
            }
        }
        let least_used = |mut numbers: Vec<u32>| {
            // Stable: among equally used devices, the first.
            numbers.sort_by_key(|number| (!own.contains(number), users(*number)));
            numbers.truncate(wanted);
            allowed.iter().copied().filter(|number| numbers.contains(number)).collect::<Vec<u32>>()
        };
        if kind == Kind::Nvml || !limits.exclusive {
            let devices = least_used(open);
            return if devices.is_empty() {
                Err(NoDevice::Wait(format!("others have devices {} for themselves", list(&allowed))))
            } else {
                Ok(devices)
            };
        }
        let free: Vec<u32> = open.iter().copied().filter(|number| users(*number) == 0).collect();
        if free.len() >= wanted {
            return Ok(least_used(free));
        }
        reserved.extend(least_used(open));
        let why = format!(
            "it needs {wanted} of devices {} for itself, and {} are free of others",
            list(&allowed),
            free.len()
        );
        Err(NoDevice::Wait(why))
    }
}

impl State {
    /// The healthy devices, of those that the limits allow, of a client's sessions and leases together.
    pub(super) fn usable_devices_of(&self, limits: &Limits) -> BTreeSet<u32> {
        let sessions = self.sessions.of(limits.owner()).filter(|session| session.kind == Kind::Gpu);
        let leases = self.leases.all().filter(|lease| lease.account == limits.owner());
        let own = sessions.map(|session| &session.devices).chain(leases.map(|lease| &lease.devices));
        let allowed = |n: &u32| limits.devices.is_empty() || limits.devices.contains(n);
        own.flatten().copied().filter(|n| allowed(n) && !self.ill.contains_key(n)).collect()
    }

    /// How many clients in the queue could have devices now, but no more than `most`.
    pub(super) fn placeable(&self, options: &Serve, kind: Kind, most: usize) -> usize {
        self.places(&self.devices(options), kind).filter(Result::is_ok).take(most).count()
    }

    /// What each client in the queue would get now, in their order. `all`: the server's devices. While these
    /// are not known, everybody gets what there will be.
    pub(super) fn places<'s>(
        &'s self,
        all: &'s [u32],
        kind: Kind,
    ) -> impl Iterator<Item = Result<Vec<u32>, NoDevice>> + 's {
        let mut reserved = Vec::new();
        self.pool(kind).queue.iter().map(move |parked| match all {
            [] => Ok(Vec::new()),
            _ => self.place_asked(all, kind, &parked.limits, &parked.devices, &mut reserved),
        })
    }

    /// [Places](Self::place) a session that asks for certain devices, in the order in which it asks for them.
    /// Nobody gets more by asking than without.
    pub(super) fn place_asked(
        &self,
        all: &[u32],
        kind: Kind,
        limits: &Limits,
        asked: &[u32],
        reserved: &mut Vec<u32>,
    ) -> Result<Vec<u32>, NoDevice> {
        if asked.is_empty() {
            return self.place(all, kind, limits, reserved);
        }
        let shared = |n: &u32| all.contains(n) && (limits.devices.is_empty() || limits.devices.contains(n));
        if let Some(other) = asked.iter().find(|number| !shared(number)) {
            let mine: Vec<u32> = all.iter().copied().filter(shared).collect();
            return Err(NoDevice::Never(format!(
                "the client asks for device {other}, but the server shares devices {} with it",
                list(&mine)
            )));
        }
        let most = limits.most_devices() as u32;
        // Of equally used devices it gets those that it names first.
        let placed = self.place(asked, kind, &Limits { device_count: most, ..limits.clone() }, reserved)?;
        let (placed, others): (Vec<u32>, Vec<u32>) = asked.iter().partition(|number| placed.contains(number));
        if most > 0 || others.is_empty() || kind == Kind::Nvml {
            return Ok(placed);
        }
        let lasting = others.iter().any(|number| self.ill.get(number).is_some_and(|illness| illness.lasting));
        let why = format!("of the devices that the client asks for, {} cannot be used now", list(&others));
        Err(if lasting { NoDevice::Never(why) } else { NoDevice::Wait(why) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parent::leases::table::{Lease, LeaseId};
    use crate::parent::queue::tests::session_of_limits;
    use crate::parent::state::Illness;
    use std::time::Instant;

    const ALL: [u32; 4] = [0, 1, 2, 3];

    fn limits(principal: &str, exclusive: bool, devices: &[u32], device_count: u32) -> Limits {
        let principal = principal.into();
        Limits { principal, exclusive, devices: devices.to_vec(), device_count, ..Limits::default() }
    }

    /// Places a session and begins it.
    fn begin(state: &mut State, worker: u32, limits: Limits) -> Result<Vec<u32>, NoDevice> {
        begin_asked(state, worker, limits, &[])
    }

    /// The same for one that asks for these devices, if any.
    fn begin_asked(
        state: &mut State,
        worker: u32,
        limits: Limits,
        asked: &[u32],
    ) -> Result<Vec<u32>, NoDevice> {
        let devices = state.place_asked(&ALL, Kind::Gpu, &limits, asked, &mut Vec::new())?;
        let mut session = session_of_limits(limits);
        session.devices.clone_from(&devices);
        state.sessions.insert(worker, session);
        Ok(devices)
    }

    fn waits(result: &Result<Vec<u32>, NoDevice>) -> bool {
        matches!(result, Err(NoDevice::Wait(_)))
    }

    #[test]
    fn an_exclusive_device_serves_nobody_else_and_the_others_are_shared() {
        let mut state = State::default();
        assert_eq!(begin(&mut state, 1, limits("a", true, &[2], 0)), Ok(vec![2]));
        assert_eq!(begin(&mut state, 2, limits("b", false, &[], 0)), Ok(vec![0, 1, 3]));
        assert!(waits(&begin(&mut state, 3, limits("c", false, &[2], 0))));
        assert_eq!(begin(&mut state, 4, limits("a", true, &[2], 0)), Ok(vec![2]), "the same principal");
        state.sessions.remove(&1);
        assert!(waits(&begin(&mut state, 3, limits("c", false, &[2], 0))));
        state.sessions.remove(&4);
        assert_eq!(begin(&mut state, 3, limits("c", false, &[2], 0)), Ok(vec![2]));
    }

    #[test]
    fn an_exclusive_client_waits_until_a_device_is_free_and_nobody_overtakes_it() {
        let mut state = State::default();
        for (worker, device) in (0..4).zip(ALL) {
            begin(&mut state, worker, limits(&format!("p{worker}"), false, &[device], 0)).unwrap();
        }
        let mut reserved = Vec::new();
        let exclusive = limits("x", true, &[], 0);
        assert!(waits(&state.place(&ALL, Kind::Gpu, &exclusive, &mut reserved)));
        assert_eq!(reserved, [0]);
        let late = limits("late", false, &[], 0);
        assert_eq!(state.place(&ALL, Kind::Gpu, &late, &mut reserved), Ok(vec![1, 2, 3]));
        state.sessions.remove(&2);
        assert_eq!(begin(&mut state, 9, exclusive), Ok(vec![2]));
    }

    #[test]
    fn a_session_under_a_lease_has_all_of_its_devices_whoever_waits_for_them() {
        for devices in [vec![0], vec![0, 1]] {
            let mut state = State::default();
            state.leases.0.insert(LeaseId(1), Lease::fake(LeaseId(1), "b", &devices));
            let mut reserved = Vec::new();
            let all = &ALL[..2];
            let exclusive = limits("x", true, &[0], 0);
            assert!(waits(&state.place(all, Kind::Gpu, &exclusive, &mut reserved)));
            assert_eq!(reserved, [0]);
            let mut under = limits("b", false, &[], 0);
            state.leases.0[&LeaseId(1)].narrow(&mut under);
            assert_eq!(state.place(all, Kind::Gpu, &under, &mut reserved), Ok(devices.clone()));
            assert_eq!(state.place(all, Kind::Gpu, &limits("c", false, &[], 0), &mut reserved), Ok(vec![1]));
        }
    }

    #[test]
    fn sessions_get_the_least_used_devices_and_those_of_one_principal_the_same() {
        let mut state = State::default();
        assert_eq!(begin(&mut state, 1, limits("a", false, &[], 2)), Ok(vec![0, 1]));
        assert_eq!(begin(&mut state, 2, limits("b", false, &[], 1)), Ok(vec![2]));
        assert_eq!(begin(&mut state, 3, limits("c", false, &[], 2)), Ok(vec![0, 3]));
        assert_eq!(begin(&mut state, 4, limits("a", false, &[], 2)), Ok(vec![0, 1]));
        assert_eq!(begin(&mut state, 5, limits("d", false, &[1], 7)), Ok(vec![1]));
        let nvml = state.place(&ALL, Kind::Nvml, &limits("a", false, &[], 2), &mut Vec::new());
        assert_eq!(nvml, Ok(vec![0, 1]));
    }

    #[test]
    fn a_device_that_is_not_well_gets_no_session_and_a_client_without_another_is_told_why() {
        let mut state = State::default();
        let ill = |lasting| Illness { why: "Xid 79".into(), since: Instant::now(), lasting, error: None };
        assert_eq!(begin(&mut state, 1, limits("a", false, &[], 2)), Ok(vec![0, 1]));
        state.ill.insert(1, ill(true));
        assert_eq!(begin(&mut state, 2, limits("a", false, &[], 2)), Ok(vec![0]), "what is left of the same");
        assert_eq!(begin(&mut state, 3, limits("b", false, &[], 0)), Ok(vec![0, 2, 3]));
        let refused = begin(&mut state, 4, limits("c", false, &[1], 0));
        let Err(NoDevice::Never(why)) = refused else { panic!("{refused:?}") };
        assert!(why.contains("device 1: Xid 79"), "{why}");
        state.ill.insert(1, ill(false));
        assert!(waits(&begin(&mut state, 4, limits("c", false, &[1], 0))), "it may be well again");
        let nvml = state.place(&ALL, Kind::Nvml, &limits("c", false, &[1], 0), &mut Vec::new());
        assert_eq!(nvml, Ok(vec![1]));
    }

    #[test]
    fn a_session_gets_the_devices_that_it_asks_for_in_its_order_and_no_more_than_the_policy_allows() {
        let mut state = State::default();
        let place = |state: &State, limits: &Limits, asked: &[u32]| {
            state.place_asked(&ALL, Kind::Gpu, limits, asked, &mut Vec::new())
        };
        assert_eq!(place(&state, &limits("a", false, &[], 0), &[3, 1]), Ok(vec![3, 1]));
        assert_eq!(place(&state, &limits("a", false, &[], 0), &[]), Ok(ALL.to_vec()));
        assert_eq!(place(&state, &limits("a", false, &[], 1), &[3, 1]), Ok(vec![3]));
        assert_eq!(
            place(&state, &limits("a", true, &[], 0), &[2, 3]),
            Ok(vec![2]),
            "one is what it would have"
        );
        for (limits, asked) in
            [(limits("a", false, &[], 0), [0, 4]), (limits("a", false, &[0, 1], 0), [0, 2])]
        {
            let Err(NoDevice::Never(why)) = place(&state, &limits, &asked) else { panic!("{asked:?}") };
            assert!(why.contains(&format!("asks for device {}", asked[1])), "{why}");
        }
        let illness = Illness { why: "Xid 79".into(), since: Instant::now(), lasting: true, error: None };
        state.ill.insert(1, illness);
        let refused = place(&state, &limits("a", false, &[], 0), &[3, 1]);
        assert!(matches!(refused, Err(NoDevice::Never(_))), "fewer than it asks for would be a surprise");
    }

    #[test]
    fn devices_that_the_server_does_not_share_are_refused_with_both_lists() {
        let never = State::default().place(&ALL, Kind::Gpu, &limits("a", false, &[7], 0), &mut Vec::new());
        let Err(NoDevice::Never(why)) = never else { panic!("{never:?}") };
        assert!(why.contains("devices 7") && why.contains("0, 1, 2, 3"), "{why}");
    }

    #[test]
    fn sessions_that_ask_for_different_devices_get_no_more_than_their_client_may_have() {
        let illness = || Illness { why: "Xid 79".into(), since: Instant::now(), lasting: true, error: None };
        for limits_of_one in [limits("a", true, &[], 0), limits("a", false, &[], 1)] {
            let mut state = State::default();
            let ask = |state: &mut State, asked: &[u32]| begin_asked(state, 1, limits_of_one.clone(), asked);
            assert_eq!(ask(&mut state, &[0]), Ok(vec![0]));
            let other = state.place_asked(&ALL, Kind::Gpu, &limits_of_one, &[1], &mut Vec::new());
            let Err(NoDevice::Wait(why)) = other else { panic!("{other:?}") };
            assert!(why.contains("devices 1") && why.contains("have devices 0"), "{why}");
            let nvml = state.place_asked(&ALL, Kind::Nvml, &limits_of_one, &[1], &mut Vec::new());
            assert_eq!(nvml, Ok(vec![1]), "it only reads");
            assert_eq!(ask(&mut state, &[1, 0]), Ok(vec![0]));
            assert_eq!(ask(&mut state, &[]), Ok(vec![0]));
            // A device that cannot be used does not keep it from another one.
            state.ill.insert(0, illness());
            assert_eq!(begin_asked(&mut state, 2, limits_of_one.clone(), &[1]), Ok(vec![1]));
            // It is well again, and the sessions that have it go on.
            state.ill.clear();
            assert_eq!(begin(&mut state, 3, limits_of_one.clone()), Ok(vec![0]));
            state.sessions.remove(&1);
            assert_eq!(begin_asked(&mut state, 4, limits_of_one.clone(), &[1, 0]), Ok(vec![1]));
            state.sessions.remove(&3);
            assert_eq!(begin(&mut state, 5, limits_of_one.clone()), Ok(vec![1]));
        }
        // One that may have several can ask for them one after the other.
        let mut state = State::default();
        let two = limits("a", true, &[1, 2], 0);
        assert_eq!(begin_asked(&mut state, 1, two.clone(), &[2]), Ok(vec![2]));
        assert_eq!(begin_asked(&mut state, 2, two.clone(), &[1]), Ok(vec![1]));
        assert_eq!(begin(&mut state, 3, two), Ok(vec![1, 2]), "what its sessions have together");
        let mut state = State::default();
        let two = limits("a", false, &[], 2);
        assert_eq!(begin_asked(&mut state, 1, two.clone(), &[3]), Ok(vec![3]));
        assert_eq!(begin_asked(&mut state, 2, two.clone(), &[0, 1]), Ok(vec![0]), "only one more");
        assert!(waits(&begin_asked(&mut state, 3, two.clone(), &[1])));
        state.sessions.remove(&1);
        assert_eq!(begin_asked(&mut state, 3, two, &[1]), Ok(vec![1]));
    }
}
