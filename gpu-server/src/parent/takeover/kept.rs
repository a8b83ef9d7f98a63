//! What a daemon keeps of its sessions, and of itself, for its successor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use handover::clock;
use protocol::Status;
use sandbox::{Description, Process};
use serde::{Deserialize, Serialize};

use crate::driver::cuda::nvml::Devices;
use crate::driver::listed::Listed;
use crate::limits::Limits;
use crate::parent::accounts::imports::Import;
use crate::parent::audit::hex;
use crate::parent::leases::table::{Lease, LeaseId, Leases};
use crate::parent::record::{Record, Succession};
use crate::parent::session::Session;
use crate::parent::state::{Illness, Server, State};
use crate::parent::trust::SavedPrincipal;
use crate::parent::workers::Worker;
use crate::worker_protocol::{Counters, FORMAT, Kind, Shared, Token};

/// The text of a session's record.
#[derive(Serialize, Deserialize)]
pub(super) struct Saved {
    pub(super) format: u32,
    /// How many daemons the session has had.
    pub(super) daemons: u32,
    pub(super) process: Description,
    pub(super) kind: Kind,
    pub(super) client: String,
    pub(super) program: String,
    pub(super) pid: u32,
    pub(super) transport: String,
    pub(super) peer: String,
    /// Times are ns of CLOCK_MONOTONIC.
    pub(super) since: u64,
    pub(super) parked: Option<u64>,
    pub(super) counters: Counters,
    pub(super) limits: Limits,
    pub(super) lease: Option<LeaseId>,
    pub(super) devices: Vec<u32>,
    pub(super) token: Token,
    pub(super) secret: [u8; 32],
    pub(super) principal: SavedPrincipal,
    pub(super) encrypted: bool,
    pub(super) data_connections: (u32, u32),
    pub(super) attempt: u32,
    pub(super) resumed: u64,
    #[serde(default)]
    pub(super) unwelcomed: bool,
    pub(super) overrun: bool,
    pub(super) ended: bool,
    pub(super) lost: bool,
    /// Events of other sessions that it has opened, and its slot in each. Further ones are added to the
    /// text.
    pub(super) opened: Vec<(Token, u16)>,
    /// Memory of other sessions that it has, if nothing has changed since this was written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) imports: Vec<(Token, Import)>,
}

impl Saved {
    /// What a record says of a session.
    pub(super) fn read(record: &Record) -> io::Result<Saved> {
        let (mut saved, opened) = record.read_all::<Saved, (Token, u16)>()?;
        saved.opened.extend(opened);
        if let Some(link) = record.link() {
            (saved.parked, saved.attempt, saved.resumed) = (link.parked, link.attempt, link.resumed);
        }
        Ok(saved)
    }
}

/// The text of the daemon's own record.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct SavedDaemon {
    pub(super) format: u32,
    pub(super) serving: Option<(String, Vec<String>)>,
    /// NVIDIA's devices by number, if that daemon saved them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) listed: Vec<Listed>,
    /// The options behind them, if that daemon saved them.
    #[serde(default)]
    pub(super) chosen: Option<(Vec<u32>, u32)>,
    /// By device: the problem, since when, whether it is permanent, and the error for programs.
    pub(super) ill: Vec<(u32, String, u64, bool, Option<u32>)>,
    /// Counts of sessions begun and lost, workers crashed, kernels overrun, leases granted.
    pub(super) counts: [u64; 5],
    pub(super) leases: Vec<Lease>,
    pub(super) ended: Vec<(Token, String)>,
}

/// The name under which a part of a worker is kept.
pub(super) fn name(worker: u32, what: &str) -> String {
    format!("worker-{worker}-{what}")
}

/// What is kept of each worker, by the last part of its name.
pub(super) const PARTS: [&str; 4] = ["record", "socket", "meter", "alive"];

/// Keeps a session that has begun for a successor. If that fails, the session will not survive a crash of the
/// daemon, so it is only logged.
pub(in crate::parent) fn keep(server: &Server, state: &mut State, worker: &Worker, meter: &OwnedFd) {
    let pid = worker.pid();
    let Some(session) = state.sessions.get_mut(&pid) else { return };
    session.kept = true;
    state.save(pid);
    let Some(session) = state.sessions.get(&pid) else { return };
    let store = &server.succession.store;
    let keep = || -> io::Result<()> {
        let [record, socket, meters, alive] = PARTS.map(|part| name(pid, part));
        // The record comes last: if it is there, everything is.
        store.keep(&socket, worker.socket())?;
        store.keep(&meters, meter)?;
        worker.alive().map_or(Ok(()), |fd| store.keep(&alive, fd))?;
        store.keep(&record, session.account.record())
    };
    if let Err(e) = keep() {
        tracing::warn!(worker = pid, "cannot keep the session for another daemon: {e}");
    }
}

/// A worker has ended: keeps nothing of it any more.
pub(in crate::parent) fn forget(server: &Server, worker: u32) {
    PARTS.iter().for_each(|part| server.succession.store.forget(&name(worker, part)));
}

/// The name under which a shared object is kept. It contains everything known about the object.
pub(in crate::parent) fn share_name(token: &Token, owner: u32, what: &Shared) -> String {
    let token = hex(token);
    match what {
        Shared::Memory { device, size } => format!("share-{token}-{owner}-memory-{device}-{size}"),
        Shared::Event { .. } => format!("share-{token}-{owner}-event"),
    }
}

/// Parses a name from [`share_name`], without its first part.
pub(super) fn parse_share(name: &str) -> Option<(Token, u32, Shared)> {
    let mut parts = name.split('-');
    let token = u128::from_str_radix(parts.next().filter(|hex| hex.len() == 32)?, 16).ok()?.to_be_bytes();
    let owner = parts.next()?.parse().ok()?;
    let what = match (parts.next()?, parts.next(), parts.next()) {
        ("memory", Some(device), Some(size)) => {
            Shared::Memory { device: device.parse().ok()?, size: size.parse().ok()? }
        }
        ("event", None, None) => Shared::Event { slot: 0 },
        _ => return None,
    };
    parts.next().is_none().then_some((token, owner, what))
}

impl State {
    /// Saves what a successor must know of a session after a change.
    pub(in crate::parent) fn save(&self, worker: u32) {
        if let Err(e) = self.write(worker, false) {
            tracing::warn!(worker, "cannot save a session for another daemon: {e}");
        }
    }

    /// The same for a successor that takes over now, before anything else changes.
    pub(super) fn save_all(&self, worker: u32) {
        // There may be too many imports. Then they count for each session that has them.
        if self.write(worker, true).is_err() {
            self.save(worker);
        }
    }

    fn write(&self, worker: u32, all: bool) -> io::Result<()> {
        let Some((session, process)) = self.kept(worker) else { return Ok(()) };
        let imports = session.account.imports.all().filter(|_| all).collect();
        let saved = Saved {
            format: FORMAT,
            daemons: session.daemons,
            process: process.clone(),
            kind: session.kind,
            client: session.client.clone(),
            program: session.program.clone(),
            pid: session.pid,
            transport: session.transport.to_owned(),
            peer: session.peer.clone(),
            since: clock::to_ns(session.since),
            parked: session.parked.map(clock::to_ns),
            counters: session.counters,
            limits: session.limits.clone(),
            lease: session.lease,
            devices: session.devices.clone(),
            token: session.token,
            secret: session.secret.0,
            principal: session.principal.save(),
            encrypted: session.encrypted,
            data_connections: session.data_connections,
            attempt: session.attempt,
            resumed: session.resumed,
            unwelcomed: session.unwelcomed,
            overrun: session.overrun,
            ended: session.ended,
            lost: session.lost,
            opened: session.opened.clone(),
            imports,
        };
        session.account.record().set_link(session.link());
        session.account.record().write(&saved)
    }

    /// Saves the state of a session's links.
    pub(in crate::parent) fn save_link(&self, worker: u32) {
        // Its client can change that all the time, and others wait for this.
        if let Some((session, _)) = self.kept(worker) {
            session.account.record().set_link(session.link());
        }
    }

    /// A client is about to be welcomed to its session.
    pub(in crate::parent) fn welcomes(&mut self, worker: u32) {
        let Some(session) = self.sessions.get_mut(&worker) else { return };
        session.unwelcomed = false;
        self.save(worker);
    }

    /// Saves that a session has opened another event, its last.
    pub(in crate::parent) fn save_opened(&self, worker: u32) {
        let Some((session, _)) = self.kept(worker) else { return };
        // There may be thousands, and others wait for this.
        let added = session.opened.last().map(|opened| session.account.record().add(opened));
        if !matches!(added, Some(Ok(()))) {
            self.save(worker);
        }
    }

    /// A session that is kept for a successor, and its worker's process.
    fn kept(&self, worker: u32) -> Option<(&Session, &Description)> {
        let (session, managed) = (self.sessions.get(&worker)?, self.workers.get(&worker)?);
        managed.worker.process().filter(|_| session.kept).map(|process| (session, process))
    }

    /// Saves everything else that a successor must know. Includes the reasons for sessions' ends only if
    /// `ended`, because there may be many.
    pub(in crate::parent) fn save_daemon(&self, succession: &Succession, ended: bool) {
        let ill = self.ill.iter().map(|(device, illness)| {
            let Illness { why, since, lasting, error } = illness;
            (*device, why.clone(), clock::to_ns(*since), *lasting, error.map(|status| status.0))
        });
        let mut saved = SavedDaemon {
            format: FORMAT,
            serving: self.serving.clone(),
            listed: self.known.listed(),
            chosen: Some(self.chosen.clone()),
            ill: ill.collect(),
            counts: [
                self.sessions_begun,
                self.sessions_lost,
                self.workers_crashed,
                self.kernels_overrun,
                self.leases_granted,
            ],
            leases: self.leases.all().cloned().collect(),
            ended: if ended { self.ended.iter().cloned().collect() } else { Vec::new() },
        };
        let mut written = succession.record.write(&saved);
        if written.is_err() {
            // Why sessions have ended matters less than leases.
            saved.ended.clear();
            written = succession.record.write(&saved);
        }
        if written.is_err() {
            // The certificates of many leases may be too long. Without them, a successor ends leases only by
            // their owners' names.
            saved.leases.iter_mut().for_each(|lease| lease.holder = None);
            written = succession.record.write(&saved);
        }
        if let Err(e) = written {
            tracing::warn!("cannot save the state for another daemon: {e}");
        }
    }

    /// Restores the previous daemon's state.
    pub(super) fn restore(&mut self, saved: SavedDaemon) {
        self.serving = saved.serving;
        self.known = Arc::new(Devices::new(saved.listed));
        [
            self.sessions_begun,
            self.sessions_lost,
            self.workers_crashed,
            self.kernels_overrun,
            self.leases_granted,
        ] = saved.counts;
        self.leases = Leases::restore(saved.leases);
        self.ended = saved.ended.into();
        // What passes by itself is noticed again if it is still there. Only whoever noticed it says when it
        // is over.
        let lasting = saved.ill.into_iter().filter(|(_, _, _, lasting, _)| *lasting);
        self.ill = lasting
            .map(|(device, why, since, lasting, error)| {
                let (since, error) = (clock::from_ns(since), error.map(Status));
                (device, Illness { why, since, lasting, error })
            })
            .collect();
    }
}

/// What a successor needs to find a worker's process. Without it, the session ends with this daemon.
pub(in crate::parent) fn describe(process: &Process) -> Option<Description> {
    process.describe().inspect_err(|e| tracing::debug!("a worker cannot be described: {e}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{MOST_LEASES, Serve};
    use crate::limits::Resource;
    use crate::parent::accounts::imports::Imports;
    use crate::parent::queue::tests::session_of_limits;
    use crate::parent::trust::Principal;
    use crate::parent::workers::Managed;
    use crate::worker_protocol::Reply;
    use handover::Inherited;
    use host_bridge::ask::{MAX_GPUS, MAX_NAME};
    use std::time::{Duration, Instant};

    #[test]
    fn a_device_that_was_too_hot_is_judged_again_by_the_next_daemon() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        let mut state = server.lock();
        for (device, lasting, error) in [(0, false, None), (1, true, Some(Status(999)))] {
            let illness = Illness { why: "a test".into(), since: Instant::now(), lasting, error };
            state.ill.insert(device, illness);
        }
        state.save_daemon(&server.succession, true);
        let mut next = State::default();
        next.restore(server.succession.record.read().unwrap());
        let ill: Vec<_> = next.ill.iter().map(|(device, illness)| (*device, illness.error)).collect();
        // The next daemon's watch does not know that it has to tell when the first one is cool again.
        assert_eq!(ill, [(1, Some(Status(999)))]);
    }

    #[test]
    fn as_many_leases_as_there_may_be_are_kept_however_long_they_are() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        let mut state = server.lock();
        // As long as certificates may be.
        let holder = Principal::named(&"n".repeat(8000));
        let lease = |number: u64| Lease { id: LeaseId(u32::MAX - number as u32), ..lease(holder.clone()) };
        let all = (0..MOST_LEASES).map(lease).map(|lease| (lease.id, lease));
        state.leases.0.extend(all);
        state.ended.extend((0..256).map(|_| ([255; 16], "a reason".repeat(30))));
        state.save_daemon(&server.succession, true);
        let mut next = State::default();
        next.restore(server.succession.record.read().unwrap());
        assert_eq!(next.leases.all().count() as u64, MOST_LEASES);
    }

    /// A lease that is as long as it may be.
    fn lease(holder: Principal) -> Lease {
        let name = "n".repeat(200);
        Lease {
            id: LeaseId(0),
            key: [255; 32],
            principal: name.clone(),
            holder: Some(holder),
            account: name,
            // Each character takes two bytes of JSON.
            name: "\"".repeat(MAX_NAME),
            devices: (0..MAX_GPUS as u32).collect(),
            exclusive: false,
            memory: u64::MAX,
            weight: 10_000,
            client_weight: 10_000,
            lasts: Duration::from_secs(u32::MAX.into()),
            granted: Instant::now(),
            renewed: Instant::now(),
        }
    }

    #[test]
    fn the_holders_of_leases_are_kept_before_the_reasons_why_sessions_have_ended() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        let mut state = server.lock();
        let lease = |number: u32| Lease { id: LeaseId(number), ..lease(Principal::named(&"n".repeat(8000))) };
        state.leases.0.extend((0..110).map(lease).map(|lease| (lease.id, lease)));
        for number in 0..1024_u128 {
            state.remember_end(number.to_be_bytes(), "a reason ".repeat(100));
        }
        state.save_daemon(&server.succession, true);
        let mut next = State::default();
        next.restore(server.succession.record.read().unwrap());
        assert_eq!(next.leases.all().filter(|lease| lease.holder.is_some()).count(), 110);
    }

    /// A session that is kept for another daemon.
    fn kept(state: &mut State, pid: u32) {
        let process =
            r#"{"process":{"pid":8,"started":1},"guard":null,"isolation":"Root","user":null,"group":null}"#;
        let process = serde_json::from_str(process).unwrap();
        state.workers.insert(pid, Managed::serving(&Worker::fake_of(pid, Some(process)), Kind::Gpu));
        state.sessions.insert(pid, Session { kept: true, ..session_of_limits(Limits::default()) });
        state.save(pid);
    }

    #[test]
    fn imports_are_saved_only_for_a_daemon_that_goes_on_from_there() {
        let (mut state, device) = (State::default(), Resource::Device(0));
        [7, 8].iter().for_each(|pid| kept(&mut state, *pid));
        assert!(matches!(state.charge(7, 1, device, 60, None), Reply::Charged));
        let (what, sharer) = (Shared::Memory { device: 0, size: 60 }, state.sharer(7).unwrap());
        let token = state.shares.add(sharer, what, None).unwrap().unwrap();
        assert!(matches!(state.charge(8, 1, device, 60, Some(token)), Reply::Charged));
        let saved = |state: &State, pid| Saved::read(state.sessions[&pid].account.record()).unwrap().imports;
        state.save_all(8);
        let imports = saved(&state, 8);
        assert_eq!(imports.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [token]);
        assert_eq!(Imports::restore(imports).elsewhere(0), 60);
        // Otherwise it may have given them back by the time that somebody reads this.
        state.save(8);
        assert!(saved(&state, 8).is_empty());
    }

    #[test]
    fn noting_an_opened_event_costs_the_same_however_many_are_open() {
        let mut state = State::default();
        kept(&mut state, 8);
        // Bytes that this thread has written.
        let written = || {
            let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap();
            line.parse::<u64>().unwrap()
        };
        let before = written();
        for slot in 0..2000 {
            state.sessions.get_mut(&8).unwrap().opened.push(([7; 16], slot));
            state.save_opened(8);
        }
        let each = (written() - before) / 2000;
        assert!(each < 200, "{each} bytes");
        let session = &state.sessions[&8];
        assert_eq!(Saved::read(session.account.record()).unwrap().opened, session.opened);
        // Nor do changes of its link.
        let before = written();
        let session = state.sessions.get_mut(&8).unwrap();
        (session.parked, session.attempt, session.resumed) = (Some(Instant::now()), 3, 2);
        state.save_link(8);
        let each = written() - before;
        assert!(each < 200, "{each} bytes");
        let session = &state.sessions[&8];
        let saved = Saved::read(session.account.record()).unwrap();
        assert_eq!((saved.parked.is_some(), saved.attempt, saved.resumed), (true, 3, 2));
        state.save(8);
        assert_eq!(Saved::read(session.account.record()).unwrap().opened, session.opened);
    }

    #[test]
    fn the_name_of_a_shared_object_says_what_it_is() {
        for what in [Shared::Memory { device: 3, size: 1 << 33 }, Shared::Event { slot: 0 }] {
            let name = share_name(&[0xab; 16], 77, &what);
            let parsed = parse_share(name.strip_prefix("share-").unwrap());
            assert_eq!(parsed, Some(([0xab; 16], 77, what)));
        }
        for wrong in [
            "",
            "-",
            "00-1-event",
            "x",
            &format!("{}-1-event-2", "0".repeat(32)),
            &format!("{}-1-memory-2", "0".repeat(32)),
        ] {
            assert_eq!(parse_share(wrong), None, "{wrong}");
        }
    }
}
