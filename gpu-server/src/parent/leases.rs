//! Leases: GPUs that a client has for a time, whether or not it has sessions there.
//!
//! - A lease belongs to a principal. Its sessions show the lease's key in their first message, and the lease
//!   then [narrows](Lease::narrow) their [`Limits`]: devices, memory, weight, exclusive use. Nothing else
//!   enforces a lease, so it cannot give more than the policy does.
//! - [Placement](super::placement) counts a lease like a session that is always there.
//! - A lease ends if it is not renewed in time, if its owner or the operator releases it, or if its owner may
//!   no longer use the server. Its sessions end with it.
//! - A daemon keeps its leases for its successor ([`super::takeover`]).

pub(super) mod table;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use host_bridge::ask::{self, Wish};
use identity::Secret;

use self::table::{Lease, LeaseId, UNKNOWN, account, at_most};
use super::control::Refused;
use super::placement::NoDevice;
use super::refusals::Reason;
use super::state::{Server, State};
use super::trust::Principal;
use super::{ends, queue};
use crate::cuda_ipc::random_token;
use crate::limits::Limits;
use crate::policy::Grant;
use crate::worker_protocol::Kind;

/// What is new about a new lease.
struct Fresh {
    /// Random.
    id: LeaseId,
    /// Random.
    key: Secret,
    now: Instant,
}

/// What leases need to know about a GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    pub(super) number: u32,
    pub(super) name: String,
    /// Bytes of memory, if known.
    pub(super) memory: Option<u64>,
}

impl State {
    /// Grants a client a lease. `gpus`: those that the server shares; `most`: how many leases there may be of
    /// all clients together.
    fn lease(
        &mut self,
        gpus: &[Known],
        grant: &Grant,
        who: &Principal,
        wish: &Wish,
        most: usize,
        Fresh { id, key, now }: Fresh,
    ) -> Result<&Lease, Refused> {
        let (limits, leasing) = (&grant.limits, &grant.leasing);
        let held = self.leases.all().filter(|lease| lease.account == limits.principal).count();
        check_rules(grant, held, wish.gpus as usize, wish.exclusive)?;
        if self.leases.0.len() >= most {
            let why = format!("the server has its maximum of {most} leases (--max-leases)");
            return Err(Refused(Reason::ServerFull, why));
        }
        if self.leases.has(id) {
            return Err(Refused(Reason::Failed, "another lease has this number; ask again".into()));
        }
        let not_allowed = |why: String| Err(Refused(Reason::NotAllowed, why));
        let (longest, rule) = &leasing.seconds;
        if wish.seconds > *longest {
            return not_allowed(format!("a lease lasts for at most {longest} s ({rule}); it can be renewed"));
        }
        if wish.weight > limits.weight {
            let (wanted, own) = (wish.weight, limits.weight);
            return not_allowed(format!("a weight of {wanted}, and this client's is {own} (weight)"));
        }
        let total = limits.total.device_memory;
        if total > 0 && wish.memory > total {
            let wanted = wish.memory;
            return not_allowed(format!(
                "{wanted} bytes on each GPU, and this client may have {total} (client_memory_limit)"
            ));
        }
        let exclusive = wish.exclusive || limits.exclusive;
        let devices = self.place_lease(gpus, grant, wish, exclusive, id)?;
        // What the rules give may be more than there is.
        let there = gpus.iter().filter(|gpu| devices.contains(&gpu.number));
        let largest = there.map(|gpu| gpu.memory.unwrap_or(u64::MAX)).max().unwrap_or(u64::MAX);
        let memory = if wish.memory > 0 { wish.memory } else { total.min(largest) };
        let lease = Lease {
            id,
            key: key.0,
            principal: who.name.clone(),
            holder: Some(who.clone()),
            account: limits.principal.clone(),
            name: wish.name.clone(),
            devices,
            exclusive,
            memory,
            weight: if wish.weight > 0 { wish.weight } else { limits.weight },
            client_weight: limits.weight,
            lasts: Duration::from_secs(wish.seconds),
            granted: now,
            renewed: now,
        };
        self.leases_granted += 1;
        Ok(self.leases.0.entry(id).or_insert(lease))
    }

    /// Restarts the time of a client's lease, which from now on has no more than the rules give the client
    /// now. What the rules forbid is refused, and ends with its time.
    fn renew(
        &mut self,
        grant: &Grant,
        who: &Principal,
        key: &Secret,
        now: Instant,
    ) -> Result<Lease, Refused> {
        let found = self.leases.find(&key.0, &who.name).cloned();
        let mut lease = found.ok_or_else(|| Refused(Reason::NoLease, UNKNOWN.into()))?;
        let earlier = |other: &&Lease| {
            other.account == lease.account && (other.granted, other.id) < (lease.granted, lease.id)
        };
        let before = || self.leases.all().filter(earlier);
        let gpus: BTreeSet<&u32> = before().flat_map(|other| &other.devices).chain(&lease.devices).collect();
        check_rules(grant, before().count(), gpus.len(), lease.exclusive)?;
        lease.check_devices(grant)?;
        let limits = &grant.limits;
        lease.memory = at_most(lease.memory, limits.total.device_memory);
        lease.weight = lease.weight.min(limits.weight);
        lease.client_weight = limits.weight;
        lease.lasts = lease.lasts.min(Duration::from_secs(grant.leasing.seconds.0));
        lease.renewed = now;
        // It may have another key or certificate by now.
        lease.holder = Some(who.clone());
        self.leases.0.insert(lease.id, lease.clone());
        Ok(lease)
    }

    /// The devices of a new lease.
    fn place_lease(
        &self,
        gpus: &[Known],
        grant: &Grant,
        wish: &Wish,
        exclusive: bool,
        id: LeaseId,
    ) -> Result<Vec<u32>, Refused> {
        let (count, limits) = (wish.gpus as usize, &grant.limits);
        if gpus.is_empty() {
            let why = "the server has not found its GPUs yet: no worker was ready so far".to_owned();
            return Err(Refused(Reason::LeaseTaken, why));
        }
        let model = wish.model.to_lowercase();
        let fits = |gpu: &&Known| {
            (limits.devices.is_empty() || limits.devices.contains(&gpu.number))
                && (wish.devices.is_empty() || wish.devices.contains(&gpu.number))
                && gpu.name.to_lowercase().contains(&model)
                && gpu.memory.is_none_or(|bytes| bytes >= wish.memory)
        };
        let fitting: Vec<&Known> = gpus.iter().filter(fits).collect();
        if fitting.len() < count {
            let why = format!(
                "{count} such GPUs are asked for, and the server has {} that this client may use",
                fitting.len()
            );
            return Err(Refused(Reason::NoDevice, why));
        }
        // A promise to more than one lease must hold for all of them.
        let total = limits.total.device_memory;
        let has_room = |gpu: &&&Known| {
            // Without a wish, what the rules give, as far as it is there. 0: they give no amount.
            let there = total.min(gpu.memory.unwrap_or(u64::MAX));
            let memory = if wish.memory > 0 { wish.memory } else { there };
            let promised = |of| self.leases.promised(gpu.number, of).saturating_add(memory);
            exclusive
                || gpu.memory.is_none_or(|bytes| promised(None) <= bytes)
                    && (total == 0 || promised(Some(&limits.principal)) <= total)
        };
        let mut room: Vec<u32> = fitting.iter().filter(has_room).map(|gpu| gpu.number).collect();
        let taken = |why: String| Refused(Reason::LeaseTaken, why);
        // What the client has already is part of what it may have.
        let (most, own) = (limits.most_devices(), self.usable_devices_of(limits));
        if most > 0 && count > most.saturating_sub(own.len()) {
            room.retain(|number| !exclusive && own.contains(number));
            if room.len() < count {
                let own = own.len();
                let why = format!("{count} GPUs, and this client may have {most}, and has {own}");
                return Err(Refused(Reason::ClientFull, too_many(grant, why)));
            }
        }
        if room.len() < count {
            let free = room.len();
            return Err(taken(format!(
                "{count} GPUs are asked for, and {free} have so much memory that no lease was promised"
            )));
        }
        let all: Vec<u32> = gpus.iter().map(|gpu| gpu.number).collect();
        // What exclusive clients in the queue wait for is kept for them.
        let mut reserved = Vec::new();
        for parked in &self.gpu.queue {
            let _ = self.place_asked(&all, Kind::Gpu, &parked.limits, &parked.devices, &mut reserved);
        }
        let own = Limits {
            principal: account(&limits.principal, id),
            devices: room,
            device_count: wish.gpus,
            exclusive,
            ..Limits::default()
        };
        match self.place(&all, Kind::Gpu, &own, &mut reserved) {
            Ok(devices) if devices.len() == count => Ok(devices),
            Ok(devices) => Err(taken(format!(
                "{count} GPUs are asked for, and {} are free of exclusive use",
                devices.len()
            ))),
            Err(NoDevice::Wait(why)) => Err(taken(why)),
            Err(NoDevice::Never(why)) => Err(Refused(Reason::NoDevice, why)),
        }
    }

    /// A lease in list form.
    pub(super) fn row(&self, lease: &Lease, now: Instant) -> ask::Lease {
        let sessions = self.sessions.values().filter(|session| session.lease == Some(lease.id)).count();
        ask::Lease {
            id: lease.id.to_string(),
            principal: lease.principal.clone(),
            name: lease.name.clone(),
            devices: lease.devices.clone(),
            exclusive: lease.exclusive,
            memory: lease.memory,
            weight: lease.weight,
            seconds: now.saturating_duration_since(lease.granted).as_secs(),
            seconds_left: lease.until().saturating_duration_since(now).as_secs(),
            sessions: u32::try_from(sessions).unwrap_or(u32::MAX),
        }
    }

    /// A GPU with its leases and sessions.
    pub(super) fn describe(&self, gpu: Known) -> ask::Gpu {
        let number = gpu.number;
        let users = || self.sessions.values().filter(|session| session.devices.contains(&number));
        let leases = || self.leases.all().filter(|lease| lease.devices.contains(&number));
        let gpu_users = || users().filter(|session| session.kind == Kind::Gpu);
        let held = users().map(|session| session.account.held(number as usize)).fold(0, u64::saturating_add);
        ask::Gpu {
            gpu: number,
            model: gpu.name,
            unhealthy: self.ill.get(&number).map(|illness| illness.why.clone()),
            memory: gpu.memory,
            memory_free: gpu.memory.map(|bytes| bytes.saturating_sub(held)),
            memory_leased: self.leases.promised(number, None),
            sessions: u32::try_from(gpu_users().count()).unwrap_or(u32::MAX),
            leases: u32::try_from(leases().count()).unwrap_or(u32::MAX),
            exclusive: leases().any(|lease| lease.exclusive)
                || gpu_users().any(|session| session.limits.exclusive),
            utilization: None,
        }
    }
}

/// Whether the rules give a client that has `held` leases another one, and so many GPUs.
fn check_rules(grant: &Grant, held: usize, gpus: usize, exclusive: bool) -> Result<(), Refused> {
    let Grant { limits, leasing, .. } = grant;
    let not_allowed = |why: String| Err(Refused(Reason::NotAllowed, why));
    let (most, rule) = &leasing.most;
    if *most == 0 {
        return not_allowed(format!("this client may have no leases ({rule})"));
    }
    if held >= *most as usize {
        let why = format!("this client has its maximum of {most} leases ({rule})");
        return Err(Refused(Reason::ClientFull, why));
    }
    if exclusive && !leasing.exclusive.0 && !limits.exclusive {
        return not_allowed(format!("this client may have no exclusive leases ({})", leasing.exclusive.1));
    }
    let most = limits.most_devices();
    if most > 0 && gpus > most {
        return not_allowed(too_many(grant, format!("{gpus} GPUs, and this client may have {most}")));
    }
    Ok(())
}

/// A refusal of more GPUs than the rules give, with the rule.
fn too_many(grant: &Grant, why: String) -> String {
    match grant.limits.device_count {
        0 => grant.rules.explain(why),
        _ => format!("{why} (session_devices)"),
    }
}

/// Grants a client a lease, and saves it for a successor of this daemon before the client knows of it.
pub(super) fn take(
    server: &Server,
    gpus: &[Known],
    who: &Principal,
    wish: &Wish,
) -> Result<ask::Answer, Refused> {
    let failed = |e| Refused(Reason::Failed, format!("cannot read random numbers: {e}"));
    let key = Secret::random().map_err(failed)?;
    let [a, b, c, d, ..] = random_token().map_err(failed)?;
    let id = LeaseId(u32::from_le_bytes([a, b, c, d]));
    let mut state = server.lock();
    if state.stopped() {
        return Err(Refused(Reason::Draining, "the server is shutting down".into()));
    }
    // A client that is revoked after this point, or has other rules, is found among the leases.
    let grant = server.granted(who)?;
    let fresh = Fresh { id, key, now: Instant::now() };
    let lease = state.lease(gpus, &grant, who, wish, server.options.max_leases, fresh)?.clone();
    state.save_daemon(&server.succession, true);
    server.audit.leased(&lease);
    let row = state.row(&lease, Instant::now());
    drop(state);
    let principal = &who.name;
    tracing::info!(lease = row.id, principal, devices = ?row.devices, exclusive = row.exclusive, "lease granted");
    server.changed.notify_all();
    Ok(ask::Answer::Lease { lease: row, key: key.to_text() })
}

/// Restarts a lease's time, if the rules still give it to its owner.
pub(super) fn renew(server: &Server, who: &Principal, key: &Secret) -> Result<ask::Answer, Refused> {
    let mut state = server.lock();
    let grant = server.granted(who)?;
    let now = Instant::now();
    let lease = state.renew(&grant, who, key, now)?;
    state.save_daemon(&server.succession, true);
    Ok(ask::Answer::Lease { lease: state.row(&lease, now), key: key.to_text() })
}

/// Ends a client's lease at its request.
pub(super) fn release(server: &Server, principal: &str, key: &Secret) -> Result<ask::Answer, Refused> {
    let id = known(&server.lock(), principal, key)?;
    let sessions = end(server, false, |lease| (lease.id == id).then(|| "was released".to_owned()));
    Ok(ask::Answer::Released { sessions })
}

fn known(state: &State, principal: &str, key: &Secret) -> Result<LeaseId, Refused> {
    let lease = state.leases.find(&key.0, principal).map(|lease| lease.id);
    lease.ok_or_else(|| Refused(Reason::NoLease, UNKNOWN.into()))
}

/// Ends the leases for which `reason` returns one, and their sessions. `lost`: whether their owners did not
/// ask for it. Returns the number of sessions.
pub(super) fn end(server: &Server, lost: bool, reason: impl Fn(&Lease) -> Option<String>) -> usize {
    let mut state = server.lock();
    let over: Vec<(LeaseId, String)> =
        state.leases.all().filter_map(|lease| Some((lease.id, reason(lease)?))).collect();
    if over.is_empty() {
        return 0;
    }
    for (id, why) in &over {
        if let Some(lease) = state.leases.0.remove(id) {
            tracing::info!(lease = %id, principal = lease.principal, "the lease {why}");
            server.audit.lease_ended(&lease, why);
        }
    }
    state.save_daemon(&server.succession, true);
    drop(state);
    let ended = ends::end_sessions(server, lost, |_, lease| {
        let (id, why) = over.iter().find(|(id, _)| Some(*id) == lease)?;
        Some(format!("the lease {id} of this session {why}"))
    });
    // Others may be waiting for its devices.
    queue::serve_all(server);
    ended
}

/// Ends the leases of clients that may no longer use the server, and their sessions. Returns the number of
/// sessions.
pub(super) fn end_forbidden(server: &Server) -> usize {
    end(server, true, |lease| {
        let why = match &lease.holder {
            Some(holder) => server.may_not_go_on(holder),
            None => server.not_allowed(&lease.principal),
        };
        why.map(|why| format!("ended: {why}"))
    })
}

/// Starts the thread that ends expired leases.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    let work = move || {
        loop {
            let now = Instant::now();
            end(&server, true, |lease| (lease.until() <= now).then(|| "was not renewed in time".to_owned()));
            let state = server.lock();
            match state.leases.all().map(Lease::until).min() {
                Some(next) => {
                    let left = next.saturating_duration_since(Instant::now());
                    drop(server.changed.wait_timeout(state, left));
                }
                None => drop(server.changed.wait(state)),
            }
        }
    };
    std::thread::Builder::new().name("rgpu-leases".into()).spawn(work).context("starting to watch leases")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::table::Leases;
    use super::*;
    use crate::config::Serve;
    use crate::parent::queue::tests::session_of_limits;
    use crate::policy::{Leasing, Policy};

    const MEMORY: u64 = 80 << 30;
    /// How many leases the server grants.
    const MOST: usize = 100;

    fn gpus() -> Vec<Known> {
        let known = |number| Known {
            number,
            name: if number < 3 { "NVIDIA H100" } else { "NVIDIA A100" }.into(),
            memory: Some(MEMORY),
        };
        (0..4).map(known).collect()
    }

    /// The policy's grant for a client that may have exclusive leases.
    fn grant(principal: &str) -> Grant {
        let mut grant = Policy::default().grant(principal, &Serve::from_flags(&[]).share).unwrap();
        grant.leasing.exclusive.0 = true;
        grant
    }

    fn ask_by(state: &mut State, grant: &Grant, wish: &Wish, number: u32) -> Result<Lease, (Reason, String)> {
        let (id, key) = (LeaseId(number), Secret([number as u8; 32]));
        let owner = Principal::named(&grant.limits.principal);
        let fresh = Fresh { id, key, now: Instant::now() };
        let lease = state.lease(&gpus(), grant, &owner, wish, MOST, fresh);
        lease.cloned().map_err(|Refused(reason, why)| (reason, why))
    }

    fn wish(gpus: u32, exclusive: bool) -> Wish {
        Wish { gpus, exclusive, seconds: 60, ..Wish::default() }
    }

    #[test]
    fn an_exclusive_lease_admits_only_its_own_sessions() {
        let mut state = State::default();
        let lease = ask_by(&mut state, &grant("a"), &wish(2, true), 1).unwrap();
        assert_eq!(lease.devices, [0, 1]);
        let place = |state: &State, limits: &Limits| {
            state.place(&[0, 1, 2, 3], Kind::Gpu, limits, &mut Vec::new()).ok()
        };
        let other = grant("b").limits;
        assert_eq!(place(&state, &other), Some(vec![2, 3]));
        assert_eq!(place(&state, &grant("a").limits), Some(vec![2, 3]), "not under the lease");
        let mut own = grant("a").limits;
        lease.narrow(&mut own);
        assert_eq!(place(&state, &own), Some(vec![0, 1]));
        let refused = ask_by(&mut state, &grant("b"), &wish(3, false), 2).unwrap_err();
        assert_eq!(refused.0, Reason::LeaseTaken, "{}", refused.1);
        let mut session = session_of_limits(other);
        session.devices = vec![2, 3];
        state.sessions.insert(7, session);
        let refused = ask_by(&mut state, &grant("b"), &wish(1, true), 3).unwrap_err();
        assert_eq!(refused.0, Reason::LeaseTaken, "devices with sessions are not free: {}", refused.1);
        state.sessions = Default::default();
        assert_eq!(ask_by(&mut state, &grant("b"), &wish(2, true), 4).unwrap().devices, [2, 3]);
    }

    #[test]
    fn leases_share_a_device_until_its_memory_is_promised() {
        let mut state = State::default();
        let half = Wish { memory: MEMORY / 2, devices: vec![3], ..wish(1, false) };
        for number in 1..=2 {
            assert_eq!(ask_by(&mut state, &grant("a"), &half, number).unwrap().devices, [3]);
        }
        assert_eq!(ask_by(&mut state, &grant("b"), &half, 3).unwrap_err().0, Reason::LeaseTaken);
        let anywhere = Wish { devices: vec![], ..half };
        assert_eq!(ask_by(&mut state, &grant("b"), &anywhere, 4).unwrap().devices, [0]);
        let huge = Wish { memory: MEMORY + 1, ..wish(1, false) };
        assert_eq!(ask_by(&mut state, &grant("b"), &huge, 5).unwrap_err().0, Reason::NoDevice);
        let mut limits = Limits::default();
        state.leases.all().next().unwrap().narrow(&mut limits);
        assert_eq!(
            (limits.session.device_memory, limits.total.device_memory, limits.principal.as_str()),
            (MEMORY / 2, MEMORY / 2, "a 00000001")
        );
    }

    #[test]
    fn the_policy_bounds_leases_and_refusals_name_the_rule() {
        let mut state = State::default();
        let mut bounded = grant("a");
        bounded.leasing.exclusive.0 = false;
        bounded.leasing.most.0 = 1;
        bounded.leasing.seconds.0 = 100;
        bounded.limits.total.device_memory = 10 << 30;
        bounded.limits.device_count = 2;
        bounded.limits.devices = vec![1, 3];
        for (wish, words) in [
            (wish(1, true), "exclusive_leases"),
            (Wish { seconds: 101, ..wish(1, false) }, "lease_minutes"),
            (Wish { weight: 101, ..wish(1, false) }, "weight"),
            (Wish { memory: 11 << 30, ..wish(1, false) }, "client_memory_limit"),
            (wish(3, false), "session_devices"),
            (Wish { devices: vec![0, 1], ..wish(2, false) }, "has 1"),
            (Wish { model: "h200".into(), ..wish(1, false) }, "has 0"),
        ] {
            let refused = ask_by(&mut state, &bounded, &wish, 1).unwrap_err().1;
            assert!(refused.contains(words), "{refused}");
        }
        let lease =
            ask_by(&mut state, &bounded, &Wish { model: "a100".into(), ..wish(1, false) }, 1).unwrap();
        assert_eq!((lease.devices, lease.memory), (vec![3], 10 << 30));
        let refused = ask_by(&mut state, &bounded, &wish(1, false), 2).unwrap_err();
        assert!(
            refused.0 == Reason::ClientFull && refused.1.contains("maximum of 1 leases"),
            "{}",
            refused.1
        );
        bounded.leasing.most.0 = 0;
        assert_eq!(ask_by(&mut state, &bounded, &wish(1, false), 2).unwrap_err().0, Reason::NotAllowed);
    }

    #[test]
    fn a_clients_leases_and_sessions_together_have_no_more_gpus_than_its_rules_give() {
        for (device_count, exclusive) in [(1, true), (0, true), (1, false)] {
            let mut state = State::default();
            let mut one = grant("a");
            one.leasing.exclusive.0 = false;
            (one.limits.device_count, one.limits.exclusive) = (device_count, exclusive);
            assert_eq!(ask_by(&mut state, &one, &wish(2, false), 1).unwrap_err().0, Reason::NotAllowed);
            let lease = ask_by(&mut state, &one, &wish(1, false), 1).unwrap();
            assert_eq!((&lease.devices, lease.exclusive), (&vec![0], exclusive));
            let second = ask_by(&mut state, &one, &wish(1, false), 2);
            let other = ask_by(&mut state, &one, &Wish { devices: vec![1], ..wish(1, false) }, 3);
            assert_eq!(other.unwrap_err().0, Reason::ClientFull);
            let outside = state.place(&[0, 1, 2, 3], Kind::Gpu, &one.limits, &mut Vec::new());
            if exclusive {
                assert_eq!(second.unwrap_err().0, Reason::ClientFull);
                let Err(NoDevice::Wait(why)) = outside else { panic!("{outside:?}") };
                assert!(why.contains("have devices 0, and it may have 1"), "{why}");
            } else {
                assert_eq!((second.unwrap().devices, outside), (vec![0], Ok(vec![0])), "the same GPU");
            }
            // Of two leases from when it could have two GPUs, the first stays.
            let mut before = one.clone();
            (before.limits.device_count, before.limits.exclusive) = (2, false);
            let two = Wish { devices: vec![2], seconds: 60, ..wish(1, false) };
            ask_by(&mut state, &before, &two, 4).unwrap();
            let mut renew = |number: u8| {
                let key = Secret([number; 32]);
                state.renew(&one, &Principal::named("a"), &key, Instant::now()).map_err(|refused| refused.0)
            };
            assert!(renew(1).is_ok());
            assert_eq!(renew(4).map(drop), Err(Reason::NotAllowed));
        }
        // What its sessions have counts, too.
        let mut state = State::default();
        let mut two = grant("a");
        two.limits.device_count = 2;
        let mut session = session_of_limits(two.limits.clone());
        session.devices = vec![3];
        state.sessions.insert(7, session);
        assert_eq!(ask_by(&mut state, &two, &wish(2, true), 1).unwrap_err().0, Reason::ClientFull);
        assert_eq!(ask_by(&mut state, &two, &wish(1, true), 1).unwrap().devices, [0]);
        assert_eq!(ask_by(&mut state, &two, &wish(1, true), 2).unwrap_err().0, Reason::ClientFull);
    }

    #[test]
    fn rules_that_give_more_memory_than_a_device_has_do_not_keep_its_client_from_it() {
        let mut state = State::default();
        let mut generous = grant("a");
        generous.limits.total.device_memory = 2 * MEMORY;
        let lease = ask_by(&mut state, &generous, &Wish { devices: vec![3], ..wish(1, false) }, 1).unwrap();
        assert_eq!((lease.devices, lease.memory), (vec![3], MEMORY));
        assert_eq!(state.leases.promised(3, None), MEMORY);
        let more = Wish { devices: vec![3], memory: 1, ..wish(1, false) };
        assert_eq!(ask_by(&mut state, &grant("b"), &more, 2).unwrap_err().0, Reason::LeaseTaken);
        assert_eq!(ask_by(&mut state, &generous, &wish(1, true), 3).unwrap().memory, MEMORY);
        let huge = Wish { memory: MEMORY + 1, ..wish(1, false) };
        assert_eq!(ask_by(&mut state, &generous, &huge, 4).unwrap_err().0, Reason::NoDevice);
    }

    #[test]
    fn a_server_with_all_its_leases_names_the_option_and_grants_more_once_one_has_ended() {
        let mut state = State::default();
        let mut many = grant("a");
        many.leasing.most.0 = 1000;
        for number in 0..MOST as u32 {
            ask_by(&mut state, &many, &wish(1, false), number).unwrap();
        }
        let (reason, why) = ask_by(&mut state, &grant("b"), &wish(1, false), 1000).unwrap_err();
        assert!(reason == Reason::ServerFull && why.contains("100 leases (--max-leases)"), "{why}");
        // What will never be granted is refused as such all the same.
        many.leasing.exclusive.0 = false;
        assert_eq!(ask_by(&mut state, &many, &wish(1, true), 1000).unwrap_err().0, Reason::NotAllowed);
        state.leases.0.remove(&LeaseId(7));
        ask_by(&mut state, &grant("b"), &wish(1, false), 1000).unwrap();
    }

    #[test]
    fn rules_that_are_tightened_reach_leases_when_they_are_renewed_and_used() {
        let mut state = State::default();
        let lavish = grant("a");
        let hour = |exclusive| Wish { seconds: 3600, memory: MEMORY / 2, ..wish(1, exclusive) };
        ask_by(&mut state, &lavish, &hour(true), 1).unwrap();
        ask_by(&mut state, &lavish, &Wish { devices: vec![3], ..hour(false) }, 2).unwrap();
        let who = Principal::named("a");
        let mut renew = |grant: &Grant, number: u8| {
            let renewed = state.renew(grant, &who, &Secret([number; 32]), Instant::now());
            renewed.map_err(|Refused(reason, why)| (reason, why))
        };
        let mut tight = Grant {
            leasing: Leasing { exclusive: (false, "line 7".into()), ..lavish.leasing.clone() },
            ..lavish.clone()
        };
        let (reason, why) = renew(&tight, 1).unwrap_err();
        assert!(reason == Reason::NotAllowed && why.contains("line 7"), "{why}");
        renew(&tight, 2).unwrap();
        tight.leasing.most = (1, "line 8".into());
        let (reason, why) = renew(&tight, 2).unwrap_err();
        assert!(reason == Reason::ClientFull && why.contains("line 8"), "{why}");
        // Devices, for sessions, too.
        let mut moved = lavish.clone();
        (moved.limits.devices, moved.rules.devices) = (vec![0], Some("line 9".into()));
        let shared = renew(&lavish, 2).unwrap();
        renew(&moved, 1).unwrap();
        let (reason, why) = renew(&moved, 2).unwrap_err();
        assert!(reason == Reason::NotAllowed && why.contains("GPU 3") && why.contains("line 9"), "{why}");
        assert!(shared.check_devices(&moved).is_err() && shared.check_devices(&lavish).is_ok());
        // Amounts become what the rules give.
        let mut less = lavish.clone();
        (less.limits.weight, less.leasing.seconds.0, less.limits.total.device_memory) = (50, 600, 1 << 30);
        let mut limits = less.limits.clone();
        shared.narrow(&mut limits);
        assert_eq!((limits.weight, limits.total.device_memory), (50, 1 << 30));
        let lease = renew(&less, 2).unwrap();
        assert_eq!((lease.weight, lease.client_weight, lease.memory), (50, 50, 1 << 30));
        assert_eq!(lease.lasts, Duration::from_secs(600));
        assert_eq!(renew(&lavish, 2).unwrap().weight, 50);
    }

    #[test]
    fn a_lease_is_found_only_by_its_owner_with_its_key() {
        let mut state = State::default();
        let hour = Wish { seconds: 3600, ..wish(1, false) };
        ask_by(&mut state, &grant("a"), &hour, 5).unwrap();
        let text = serde_json::to_string(&state.leases.all().collect::<Vec<_>>()).unwrap();
        let next = Leases::restore(serde_json::from_str(&text).unwrap());
        for leases in [&state.leases, &next] {
            let id = |key: u8, who| leases.find(&[key; 32], who).map(|lease| lease.id);
            assert_eq!((id(5, "a"), id(5, "b"), id(6, "a")), (Some(LeaseId(5)), None, None));
            let left = leases.all().next().unwrap().until().saturating_duration_since(Instant::now());
            assert!(left > Duration::from_secs(3000) && left <= Duration::from_secs(3600), "{left:?}");
        }
    }

    proptest! {
        /// Whatever clients request and release, exclusive leases share no device, and shared ones were not
        /// promised more memory than there is.
        #[test]
        fn no_device_is_promised_twice(asked in proptest::collection::vec((0u32..4, 1u32..5, any::<bool>(), 0u64..5, any::<bool>()), 1..60)) {
            let mut state = State::default();
            for (number, (client, gpus, exclusive, quarters, release)) in (0..).zip(asked) {
                let oldest = state.leases.0.keys().next().copied();
                if let Some(id) = oldest.filter(|_| release) {
                    state.leases.0.remove(&id);
                }
                let wish = Wish { memory: quarters * MEMORY / 4, ..wish(gpus, exclusive) };
                if let Ok(lease) = ask_by(&mut state, &grant(&format!("p{client}")), &wish, number) {
                    prop_assert_eq!(lease.devices.len(), gpus as usize);
                }
                for device in 0..4 {
                    let leases: Vec<_> = state.leases.all().filter(|lease| lease.devices.contains(&device)).collect();
                    prop_assert!(leases.len() < 2 || leases.iter().all(|lease| !lease.exclusive));
                    prop_assert!(state.leases.promised(device, None) <= MEMORY);
                }
            }
        }
    }
}
