//! From one daemon to the next: what a daemon keeps for its successor, how the successor takes over, and how
//! a daemon hands over to another program.
//!
//! ```text
//!  serve ──▶ keep: socket, meter, record of the session ──▶ handover::Store
//!                                                              │ crash: the service manager restarts the daemon
//!  upgrade ── SIGUSR2, rgpuctl upgrade ── save, exec ──────────┤
//!                                                              ▼
//!                                      take_over: sessions, shared objects, accounts, devices' health ──▶ listen
//! ```
//!
//! A worker is identified by the previous daemon's socket to it, which nobody else has. It says nothing about
//! itself, so it cannot claim anything: its client, its limits and charges, and the session's secret are in
//! the session's [`Record`], which only daemons have. The worker doesn't notice that its daemon is gone as
//! long as it needs nothing from it: its messages wait in the socket. A daemon consumes a message only after
//! handling it, so its successor finds the one that it was killed over.
//!
//! Workers without a session, waiting clients, and connections without a first message are not kept. Bridges
//! connect again.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use handover::{Inherited, Store, clock};
use protocol::Status;
use sandbox::Process;
use serde::{Deserialize, Serialize};

use super::accounts::Account;
use super::audit::hex;
use super::health::Illness;
use super::leases::{Lease, LeaseId, Leases};
use super::record::Record;
use super::trust::SavedPrincipal;
use super::watch::start_watching;
use super::workers::{Managed, Stage, Worker};
use super::{Server, Session, State, ends, leases};
use crate::cuda_ipc::origin;
use crate::limits::Limits;
use crate::shared_event;
use crate::worker_protocol::{Counters, FORMAT, Kind, Shared, ToWorker, Token};

/// How long waiting clients may delay an upgrade.
const QUEUE_WITHIN: Duration = Duration::from_secs(5);
/// Maximum time for workers without a session to end. The driver may take long.
const UNUSED_WITHIN: Duration = Duration::from_secs(30);
/// The name of the daemon's own record.
const DAEMON: &str = "daemon";

/// The text of a session's record.
#[derive(Serialize, Deserialize)]
struct Saved {
    format: u32,
    /// How many daemons the session has had.
    daemons: u32,
    process: sandbox::Description,
    kind: Kind,
    client: String,
    program: String,
    pid: u32,
    transport: String,
    peer: String,
    /// Times are ns of CLOCK_MONOTONIC.
    since: u64,
    parked: Option<u64>,
    counters: Counters,
    limits: Limits,
    lease: Option<LeaseId>,
    devices: Vec<u32>,
    token: Token,
    secret: [u8; 32],
    principal: SavedPrincipal,
    encrypted: bool,
    data_connections: (u32, u32),
    attempt: u32,
    resumed: u64,
    overrun: bool,
    ended: bool,
    lost: bool,
    /// Events of other sessions that it has opened, and its slot in each.
    opened: Vec<(Token, u16)>,
}

/// The beginning of every record, in any version.
#[derive(Deserialize)]
struct Head {
    format: u32,
}

/// The text of the daemon's own record.
#[derive(Default, Serialize, Deserialize)]
struct SavedDaemon {
    format: u32,
    serving: Option<(String, Vec<String>)>,
    /// By device: the problem, since when, whether it is permanent, and the error for programs.
    ill: Vec<(u32, String, u64, bool, Option<u32>)>,
    /// Counts of sessions begun and lost, workers crashed, kernels overrun, leases granted.
    counts: [u64; 5],
    leases: Vec<Lease>,
    ended: Vec<(Token, String)>,
}

/// The transition from this program to the next one.
pub(super) struct Succession {
    pub(super) store: Store,
    /// The daemon's own record.
    record: Record,
    /// The file that this program was started from. It may have been replaced since.
    program: PathBuf,
}

impl Succession {
    /// Continues with the previous daemon's record, if there was one.
    pub(super) fn new(inherited: &mut Inherited) -> io::Result<Succession> {
        let store = Store::new();
        let before = inherited.remove(DAEMON).map(Record::open);
        let record = match before {
            Some(Ok(record)) => record,
            before => {
                if let Some(Err(e)) = before {
                    tracing::warn!("cannot read the previous daemon's record: {e}");
                    store.forget(DAEMON);
                }
                Record::new()?
            }
        };
        store.keep(DAEMON, &record)?;
        Ok(Succession { store, record, program: std::env::current_exe()? })
    }
}

fn name(worker: u32, what: &str) -> String {
    format!("worker-{worker}-{what}")
}

/// What is kept of each worker, by the last part of its name.
const PARTS: [&str; 4] = ["record", "socket", "meter", "alive"];

/// Keeps a session that has begun for a successor. If that fails, the session will not survive a crash of the
/// daemon, so it is only logged.
pub(super) fn keep(server: &Server, state: &mut State, worker: &Worker, meter: &OwnedFd) {
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
pub(super) fn forget(server: &Server, worker: u32) {
    PARTS.iter().for_each(|part| server.succession.store.forget(&name(worker, part)));
}

/// The name under which a shared object is kept. It contains everything known about the object.
pub(super) fn share_name(token: &Token, owner: u32, what: &Shared) -> String {
    let token = hex(token);
    match what {
        Shared::Memory { device, size } => format!("share-{token}-{owner}-memory-{device}-{size}"),
        Shared::Event { .. } => format!("share-{token}-{owner}-event"),
    }
}

/// Parses a name from [`share_name`], without its first part.
fn parse_share(name: &str) -> Option<(Token, u32, Shared)> {
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
    pub(super) fn save(&self, worker: u32) {
        let (Some(session), Some(managed)) = (self.sessions.get(&worker), self.workers.get(&worker)) else {
            return;
        };
        let Some(process) = managed.worker.process().filter(|_| session.kept) else { return };
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
            overrun: session.overrun,
            ended: session.ended,
            lost: session.lost,
            opened: session.opened.clone(),
        };
        if let Err(e) = session.account.record().write(&saved) {
            tracing::warn!(worker, "cannot save a session for another daemon: {e}");
        }
    }

    /// Saves everything else that a successor must know. Includes the reasons for sessions' ends only if
    /// `ended`, because there may be many.
    pub(super) fn save_daemon(&self, succession: &Succession, ended: bool) {
        let ill = self.ill.iter().map(|(device, illness)| {
            let Illness { why, since, lasting, error } = illness;
            (*device, why.clone(), clock::to_ns(*since), *lasting, error.map(|status| status.0))
        });
        let saved = SavedDaemon {
            format: FORMAT,
            serving: self.serving.clone(),
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
        if let Err(e) = succession.record.write(&saved) {
            tracing::warn!("cannot save the state for another daemon: {e}");
        }
    }

    /// Restores the previous daemon's state.
    fn restore(&mut self, saved: SavedDaemon) {
        self.serving = saved.serving;
        [
            self.sessions_begun,
            self.sessions_lost,
            self.workers_crashed,
            self.kernels_overrun,
            self.leases_granted,
        ] = saved.counts;
        self.leases = Leases::restore(saved.leases);
        self.ended = saved.ended.into();
        self.ill = saved
            .ill
            .into_iter()
            .map(|(device, why, since, lasting, error)| {
                let (since, error) = (clock::from_ns(since), error.map(Status));
                (device, Illness { why, since, lasting, error })
            })
            .collect();
    }
}

/// A session that could not be taken over.
struct Gone {
    /// What is known of it.
    saved: Option<Box<Saved>>,
    why: String,
}

/// Notes that a session is over, as far as it is known.
fn note_gone(server: &Server, worker: u32, Gone { saved, why }: Gone) {
    let Some(saved) = saved else {
        tracing::error!(worker, "a session is lost: {why}");
        server.lock().sessions_lost += 1;
        return;
    };
    // One that had ended only had to exit.
    let (lost, token) = (saved.lost || !saved.ended, saved.token);
    if !saved.ended {
        tracing::error!(worker, client = saved.client, program = saved.program, "session lost: {why}");
        let mut state = server.lock();
        state.sessions_lost += 1;
        state.remember_end(token, why.clone());
    }
    let reason = server.lock().end_of(&token).unwrap_or("the session has ended").to_owned();
    match Account::open(&server.bell) {
        Ok((account, _)) => server.audit.ended(&session_of(server, *saved, account), lost, &reason),
        Err(e) => tracing::error!(worker, "cannot write a session's end to the audit log: {e}"),
    }
}

/// Takes over from the previous daemon, if there was one. Nothing may have been accepted before.
pub(super) fn take_over(server: &Arc<Server>, inherited: &mut Inherited) {
    let store = &server.succession.store;
    // A new record has no text.
    if let Ok(saved) = server.succession.record.read::<SavedDaemon>()
        && saved.format == FORMAT
    {
        server.lock().restore(saved);
    }
    server.lock().save_daemon(&server.succession, true);
    let (mut taken, mut gone) = (Vec::new(), Vec::new());
    for rest in inherited.names("worker-") {
        let Some(worker) = rest.strip_suffix("-record").and_then(|worker| worker.parse().ok()) else {
            continue;
        };
        let parts = PARTS.map(|part| inherited.remove(&name(worker, part)));
        match take_worker(server, parts) {
            Ok(found) => taken.push(found),
            Err(session) => {
                let opened = session.saved.as_ref().map(|saved| saved.opened.clone());
                gone.push((worker, opened.unwrap_or_default()));
                note_gone(server, worker, session);
                forget(server, worker);
            }
        }
    }
    for rest in inherited.names("share-") {
        let full = format!("share-{rest}");
        let Some(fd) = inherited.remove(&full) else { continue };
        if !take_share(server, &rest, &full, fd) {
            store.forget(&full);
        }
    }
    restore_slots(&mut server.lock(), &gone);
    // Remains of workers that had not begun or had already ended.
    for rest in inherited.names("worker-") {
        let full = format!("worker-{rest}");
        drop(inherited.remove(&full));
        store.forget(&full);
    }
    // Not earlier: a worker may ask for what another one shares.
    let count = taken.len();
    for found in taken {
        if let Err(e) = begin_watching(server, found) {
            gone.push((0, Vec::new()));
            note_gone(server, 0, Gone { saved: None, why: format!("nobody could watch its worker: {e:#}") });
        }
    }
    if count + gone.len() > 0 {
        let gone = gone.len();
        tracing::info!("took over {count} sessions of the previous daemon; {gone} are over");
    }
    // The rules may have changed meanwhile.
    ends::end_sessions(server, |principal, _| server.unwelcome(principal));
    leases::end(server, |lease| server.not_allowed(&lease.principal));
}

/// A worker taken over with its session, whose messages nobody receives yet.
struct Found {
    process: Process,
    worker: Arc<Worker>,
    /// Its new terms.
    terms: OwnedFd,
}

/// Takes over a worker with its session.
fn take_worker(server: &Server, parts: [Option<OwnedFd>; 4]) -> Result<Found, Gone> {
    let unreadable = |e: io::Error| Gone { saved: None, why: format!("its record cannot be read: {e}") };
    let [Some(record), socket, meter, alive] = parts else {
        return Err(unreadable(io::ErrorKind::NotFound.into()));
    };
    let record = Record::open(record).map_err(unreadable)?;
    if record.read::<Head>().map_err(unreadable)?.format != FORMAT {
        let why = "rgpu-server was replaced by a version that cannot go on with it".to_owned();
        return Err(Gone { saved: None, why });
    }
    let mut saved = Box::new(record.read::<Saved>().map_err(unreadable)?);
    let prepare = || {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let (socket, meter) = (socket.ok_or_else(gone)?, meter.ok_or_else(gone)?);
        let alive_too = alive.as_ref().map(OwnedFd::try_clone).transpose()?;
        let process = server.confining.adopt(&saved.process, alive)?;
        let (account, terms) = Account::take_over(&meter, record, saved.daemons + 1)?;
        let worker = Arc::new(Worker::new(socket, &process, Some(saved.process.clone()), alive_too));
        io::Result::Ok((process, worker, account, terms, meter))
    };
    let (process, worker, account, terms, meter) = match prepare() {
        Ok(prepared) => prepared,
        Err(e) => {
            let host = super::host_name();
            let why =
                format!("the worker of this session on {host} ended while rgpu-server was not running ({e})");
            return Err(Gone { saved: Some(saved), why });
        }
    };
    saved.daemons += 1;
    take_session(server, &worker, session_of(server, *saved, account), &meter);
    Ok(Found { process, worker, terms })
}

/// Starts receiving a worker's messages, and tells it that there is a new daemon.
fn begin_watching(server: &Arc<Server>, found: Found) -> anyhow::Result<()> {
    let Found { process, worker, terms } = found;
    start_watching(server, &worker, process).inspect_err(|_| {
        // Dropping its process has ended the worker.
        let mut state = server.lock();
        if let Some(session) = state.sessions.remove(&worker.pid()) {
            state.tokens.remove(&session.token);
        }
        state.workers.remove(&worker.pid());
        drop(state);
        forget(server, worker.pid());
    })?;
    // The watcher notices when the worker is gone.
    let _ = worker.send(&ToWorker::TakenOver, &[terms.as_fd()]);
    Ok(())
}

/// A session restored from its record.
fn session_of(server: &Server, saved: Saved, account: Account) -> Session {
    let names = [&saved.limits.principal, &saved.client, &saved.program].map(String::as_str);
    let key = server.lock().settled.enter(names, Instant::now());
    let transport = ["local", "tcp", "verbs"].into_iter().find(|name| *name == saved.transport);
    Session {
        kind: saved.kind,
        client: saved.client,
        program: saved.program,
        pid: saved.pid,
        transport: transport.unwrap_or("tcp"),
        peer: saved.peer,
        since: clock::from_ns(saved.since),
        counters: saved.counters,
        key,
        limits: saved.limits,
        lease: saved.lease,
        devices: saved.devices,
        account,
        token: saved.token,
        secret: identity::Secret(saved.secret),
        principal: saved.principal.restore(),
        encrypted: saved.encrypted,
        data_connections: saved.data_connections,
        control: None,
        parked: saved.parked.map(clock::from_ns),
        attempt: saved.attempt,
        resumed: saved.resumed,
        begun: true,
        overrun: saved.overrun,
        ended: saved.ended,
        lost: saved.lost,
        daemons: saved.daemons,
        kept: true,
        opened: saved.opened,
    }
}

/// Adds a session that was taken over to the daemon's tables.
fn take_session(server: &Server, worker: &Arc<Worker>, session: Session, meter: &OwnedFd) {
    let pid = worker.pid();
    let mut state = server.lock();
    let (client, program) = (&session.client, &session.program);
    tracing::info!(worker = pid, client, program, principal = session.principal.name, "session continues");
    let principal = session.limits.principal.clone();
    state.tokens.insert(session.token, Arc::clone(worker));
    state.workers.insert(pid, Managed::serving(worker, session.kind));
    state.sessions.insert(pid, session);
    state.publish(&principal);
    state.measure = true;
    keep(server, &mut state, worker, meter);
}

/// Takes over an object that a session shares. Returns false if its session is gone, or if this is no shared
/// object.
fn take_share(server: &Server, rest: &str, full: &str, fd: OwnedFd) -> bool {
    let Some((token, owner, what)) = parse_share(rest) else { return false };
    let is_event = matches!(what, Shared::Event { .. });
    if is_event && shared_event::check(&fd).is_err() {
        return false;
    }
    let mut state = server.lock();
    let origin = state.sessions.get(&owner).map(|session| origin(&session.peer, &session.client));
    let stays = origin.is_some();
    if stays && let Err(e) = server.succession.store.keep(full, &fd) {
        tracing::warn!(worker = owner, "a shared object cannot be kept for another daemon: {e}");
    }
    // An event of a lost session is settled with that session's other events.
    if stays || is_event {
        state.shares.restore(token, owner, origin.unwrap_or_default(), what, fd);
    }
    stays
}

/// Notes who has opened which event, and settles what lost sessions have left.
fn restore_slots(state: &mut State, gone: &[(u32, Vec<(Token, u16)>)]) {
    let running = state.sessions.iter().map(|(worker, session)| (*worker, session.opened.clone()));
    for (worker, opened) in running.chain(gone.iter().cloned()).collect::<Vec<_>>() {
        for (token, slot) in opened {
            state.shares.restore_slot(&token, slot, worker);
        }
    }
    let owners: BTreeSet<u32> = state.shares.owners().chain(gone.iter().map(|(worker, _)| *worker)).collect();
    for owner in owners.into_iter().filter(|owner| !state.sessions.contains_key(owner)) {
        state.shares.remove_all_of(owner);
    }
}

impl Server {
    /// Whether something prevents another program from taking over now: workers without a session, and
    /// sessions that are just beginning.
    fn unsettled(state: &State) -> bool {
        Kind::ALL.iter().any(|kind| state.pool(*kind).starting > 0)
            || state
                .workers
                .keys()
                .any(|worker| !state.sessions.get(worker).is_some_and(|session| session.begun))
    }
}

/// Executes the installed program, which takes over all sessions. Calls `say` right before. Returns only if
/// that is impossible; this daemon then continues.
pub(super) fn upgrade(server: &Server, say: impl FnOnce(&serde_json::Value)) -> Result<Infallible, String> {
    {
        let mut state = server.lock();
        if state.draining() {
            return Err("the server is shutting down".into());
        }
        if std::mem::replace(&mut state.upgrading, true) {
            return Err("the server is being upgraded already".into());
        }
    }
    server.succession.store.reloading();
    let result = make_way(server, say);
    server.succession.store.ready();
    let mut state = server.lock();
    (state.upgrading, state.closed) = (false, false);
    drop(state);
    server.changed.notify_all();
    server.nudge.nudge();
    result
}

fn make_way(server: &Server, say: impl FnOnce(&serde_json::Value)) -> Result<Infallible, String> {
    let Succession { store, program, .. } = &server.succession;
    let arguments: Vec<OsString> = std::env::args_os().collect();
    handover::can_take_over(program, &arguments, FORMAT)?;
    let waiting = |state: &State| Kind::ALL.iter().any(|kind| !state.pool(*kind).queue.is_empty());
    let wait = |limit: Duration, until: &dyn Fn(&State) -> bool| {
        let deadline = Instant::now() + limit;
        let mut state = server.lock();
        while !until(&state) && !state.draining() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = server.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        state
    };
    // Clients that are still waiting then connect and wait again.
    let mut state = wait(QUEUE_WITHIN, &|state| !waiting(state));
    state.closed = true;
    // They would become children that the next program knows nothing about.
    let unused = state.workers.values().filter(|managed| managed.stage != Stage::Serving);
    unused.for_each(|managed| managed.worker.kill());
    for kind in Kind::ALL {
        state.pool_mut(kind).idle.clear();
    }
    drop(state);
    server.changed.notify_all();
    let state = wait(UNUSED_WITHIN, &|state| !Server::unsettled(state));
    if state.draining() {
        return Err("the server is shutting down".into());
    }
    if Server::unsettled(&state) {
        return Err(format!(
            "workers without a session did not end within {} s; try again",
            UNUSED_WITHIN.as_secs()
        ));
    }
    // From here on nothing changes: every change needs the lock. So no thread that a session needs begins
    // while the program is being executed, when the kernel would refuse it (see `handover::start_thread`).
    state.sessions.keys().for_each(|worker| state.save(*worker));
    state.save_daemon(&server.succession, true);
    server.audit.flush();
    let sessions = state.sessions.len();
    tracing::info!("{} takes over {sessions} sessions", program.display());
    say(&serde_json::json!({ "upgrading": { "sessions": sessions, "version": env!("CARGO_PKG_VERSION") } }));
    let failed = store.exec(program, &arguments);
    drop(state);
    Err(format!("cannot execute {}: {failed}", program.display()))
}

/// Whether this program takes over sessions of a daemon with this [`FORMAT`].
pub(crate) fn takes_over(format: u32) -> anyhow::Result<()> {
    anyhow::ensure!(
        format == FORMAT,
        "this version cannot go on with the running server's sessions (they are of format {format}, and this version's is {FORMAT}): let them finish with rgpuctl drain, and start the server again"
    );
    Ok(())
}

/// What a successor needs to find a worker's process. Without it, the session ends with this daemon.
pub(super) fn describe(process: &Process) -> Option<sandbox::Description> {
    process.describe().inspect_err(|e| tracing::debug!("a worker cannot be described: {e}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
