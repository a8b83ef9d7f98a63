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
//! Workers without a session, waiting clients, and connections without a first message are not kept, and
//! sessions whose clients were not welcomed are ended. Bridges connect again.

pub(super) mod kept;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use handover::{Inherited, clock};
use sandbox::Process;
use serde::Deserialize;

use self::kept::{PARTS, Saved, SavedDaemon, name, parse_share};
use super::accounts::ALL_DEVICES;
use super::accounts::account::Account;
use super::accounts::imports::Imports;
use super::host::host_name;
use super::leases::table::LeaseId;
use super::listen::canonical;
use super::record::{Record, Succession};
use super::session::{Leaving, Session};
use super::state::{Server, State};
use super::text::printable;
use super::watch::start_watching;
use super::workers::{Managed, Stage, Worker};
use super::{audit, ends, leases};
use crate::config::Backend;
use crate::cuda_ipc::Sharer;
use crate::policy::current_name;
use crate::shared_event;
use crate::worker_protocol::{FORMAT, Kind, OLDEST, Shared, ToWorker, Token};

/// How long waiting clients may delay an upgrade.
const QUEUE_WITHIN: Duration = Duration::from_secs(5);
/// Maximum time for workers without a session to end. The driver may take long.
const UNUSED_WITHIN: Duration = Duration::from_secs(30);
/// The beginning of every record, in any version.
#[derive(Deserialize)]
struct Head {
    format: u32,
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
    if let Ok(mut saved) = server.succession.record.read::<SavedDaemon>()
        && (OLDEST..=FORMAT).contains(&saved.format)
    {
        // The operator may have chosen another backend or other devices meanwhile. Then the first worker says
        // which there are.
        let backing = &server.options.worker.backing;
        let others = saved.chosen.take().is_some_and(|chosen| chosen != backing.chosen());
        saved.serving.take_if(|(backend, _)| {
            let another = Backend::from_str(backend, false) != Ok(backing.backend);
            // Earlier versions did not say which device has which number.
            let unknown = backend == "cuda" && saved.listed.is_empty();
            others || unknown || (backing.backend != Backend::Auto && another)
        });
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
                kept::forget(server, worker);
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
    server.lock().pass_on_taken_imports();
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
    // The rules may have changed meanwhile, and the daemon before may have ended a lease, but not its
    // sessions yet.
    let leases: BTreeSet<LeaseId> = server.lock().leases.all().map(|lease| lease.id).collect();
    ends::end_sessions(server, true, |principal, lease| {
        let over = lease.filter(|id| !leases.contains(id));
        let over = over.map(|id| format!("the lease {id} of this session has ended"));
        over.or_else(|| server.may_not_go_on(principal))
    });
    leases::end_forbidden(server);
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
    if !(OLDEST..=FORMAT).contains(&record.read::<Head>().map_err(unreadable)?.format) {
        let why = "rgpu-server was replaced by a version that cannot go on with it".to_owned();
        return Err(Gone { saved: None, why });
    }
    let mut saved = Box::new(Saved::read(&record).map_err(unreadable)?);
    if saved.unwelcomed {
        // While its worker has the client's connection, the client waits for its welcome. Without, it tries
        // again. If this fails, the worker has ended by itself.
        drop(server.confining.adopt(&saved.process, alive));
        saved.ended = true;
        return Err(Gone { saved: Some(saved), why: "it had not begun".to_owned() });
    }
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
            let host = host_name();
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
        kept::forget(server, worker.pid());
    })?;
    // The watcher notices when the worker is gone.
    let _ = worker.send(&ToWorker::TakenOver, &[terms.as_fd()]);
    Ok(())
}

/// A session restored from its record.
fn session_of(server: &Server, mut saved: Saved, mut account: Account) -> Session {
    account.imports = Imports::restore(saved.imports);
    // Whether it does so for other reasons was up to the options of the daemon before.
    account.asks = saved.limits.total.device_memory > 0;
    // Earlier versions called clients and the accounts of leases otherwise, did not save whose a lease is,
    // and kept names as clients gave them.
    saved.limits.principal = current_name(&saved.limits.principal);
    for name in [&mut saved.client, &mut saved.program] {
        *name = printable(name);
    }
    if let Some(lease) = saved.lease.and_then(|lease| server.lock().leases.0.get(&lease).cloned()) {
        saved.limits.principal = lease.account();
        saved.limits.owner = Some(lease.account);
    }
    let names = [&saved.limits.principal, &saved.client, &saved.program].map(String::as_str);
    let key = server.lock().settled.enter_for(saved.limits.owner(), names, Instant::now());
    let peer = saved.peer.parse().map(|peer| canonical(peer).to_string());
    let transport = ["local", "tcp", "verbs"].into_iter().find(|name| *name == saved.transport);
    Session {
        kind: saved.kind,
        client: saved.client,
        program: saved.program,
        pid: saved.pid,
        transport: transport.unwrap_or("tcp"),
        peer: peer.unwrap_or(saved.peer),
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
        presence: None,
        leaving: Leaving::No,
        attempt: saved.attempt,
        resumed: saved.resumed,
        begun: true,
        unwelcomed: saved.unwelcomed,
        overrun: saved.overrun,
        ended: saved.ended,
        lost: saved.lost,
        daemons: saved.daemons,
        kept: true,
        opened: saved.opened,
        linked: BTreeSet::new(),
    }
}

/// Adds a session that was taken over to the daemon's tables.
fn take_session(server: &Server, worker: &Arc<Worker>, session: Session, meter: &OwnedFd) {
    let pid = worker.pid();
    let mut state = server.lock();
    let (client, program) = (&session.client, &session.program);
    tracing::info!(worker = pid, client, program, principal = session.principal.name, "session continues");
    let client = session.limits.owner().to_owned();
    state.tokens.insert(session.token, Arc::clone(worker));
    state.workers.insert(pid, Managed::serving(worker, session.kind));
    state.sessions.insert(pid, session);
    state.publish(&client, ALL_DEVICES);
    state.measure = true;
    kept::keep(server, &mut state, worker, meter);
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
    let sharer = state.sharer(owner);
    let stays = sharer.is_some();
    if stays && let Err(e) = server.succession.store.keep_if_room(full, &fd) {
        tracing::warn!(worker = owner, "a shared object cannot be kept for another daemon: {e}");
    }
    // An event of a lost session is settled with that session's other events.
    if stays || is_event {
        let nobody = || Sharer { worker: owner, account: String::new(), origin: String::new() };
        state.shares.restore(token, sharer.unwrap_or_else(nobody), what, fd);
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
    // After a crash, what is known of memory is only who shares it.
    for (worker, session) in state.sessions.iter_mut() {
        let events = session.opened.iter().map(|(token, _)| *token);
        let tokens = events.chain(session.account.imports.all().map(|(token, _)| token));
        session.linked = tokens.filter_map(|token| state.shares.owner(&token)).collect();
        session.linked.remove(worker);
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

/// Starts a thread that [upgrades](upgrade), so that signals and other requests are heard meanwhile.
pub(super) fn start(server: &Arc<Server>, work: impl FnOnce(&Server) + Send + 'static) -> io::Result<()> {
    let server = Arc::clone(server);
    std::thread::Builder::new().name("rgpu-upgrade".into()).spawn(move || work(&server)).map(drop)
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
    // Clients that are still waiting then connect again, and wait at the end of the queue.
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
    // Without the lock: the service manager may be busy, and so may the audit log's disk.
    store.wait_until_sent();
    server.audit.flush(audit::FLUSH_WITHIN);
    let state = wait(UNUSED_WITHIN, &|state| !Server::unsettled(state));
    // A signal that is taken later waits for the lock, and so for the next program.
    if state.draining() || state.told_to_end {
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
    state.sessions.keys().for_each(|worker| state.save_all(*worker));
    state.save_daemon(&server.succession, true);
    server.audit.flush(audit::BRIEFLY);
    let sessions = state.sessions.len();
    tracing::info!("{} takes over {sessions} sessions", program.display());
    say(&serde_json::json!({ "upgrading": { "sessions": sessions, "version": env!("CARGO_PKG_VERSION") } }));
    let failed = store.exec(program, &arguments);
    state.sessions.keys().for_each(|worker| state.save(*worker));
    drop(state);
    Err(format!("cannot execute {}: {failed}", program.display()))
}

/// Whether this program takes over sessions of a daemon with this [`FORMAT`].
pub(crate) fn takes_over(format: u32) -> anyhow::Result<()> {
    anyhow::ensure!(
        (OLDEST..=FORMAT).contains(&format),
        "this version cannot go on with the running server's sessions (they are of format {format}, and this version understands {OLDEST} to {FORMAT}): let them finish with rgpuctl drain, and start the server again"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;
    use crate::config::Serve;
    use crate::driver::cuda::nvml::Devices;
    use crate::driver::listed::Listed;
    use crate::limits::Limits;
    use crate::parent::queue::tests::session_of_limits;
    use crate::worker_protocol::{Counters, FromWorker};

    const KEY: [u8; 32] = [5; 32];
    const OPENED: (Token, u16) = ([3; 16], 2);

    /// What a daemon of the oldest format has saved of a principal.
    fn saved_principal(name: &str) -> Value {
        json!({ "name": name, "key": null, "certificates": null })
    }

    /// The same of a lease.
    fn saved_lease(principal: &str, account: &str) -> Value {
        json!({
            "id": 1, "key": KEY, "principal": principal, "holder": saved_principal(principal),
            "account": account, "name": "a job", "devices": [0], "exclusive": true, "memory": 0, "weight": 100,
            "lasts": { "secs": 60, "nanos": 0 }, "granted": 1, "renewed": 1
        })
    }

    /// The same of itself.
    fn saved_daemon(lease: Value) -> SavedDaemon {
        let saved = json!({
            "format": OLDEST, "serving": ["cuda", ["a GPU"]], "ill": [], "counts": [1, 0, 0, 0, 1],
            "leases": [lease], "ended": []
        });
        from_value(saved).unwrap()
    }

    /// The same of a session, restored. `limits.principal` is an account of `principal`, or of its lease.
    fn restored(server: &Server, principal: &str, peer: &str, lease: Option<(u32, &str)>) -> Session {
        let none = json!({ "device_memory": 0, "pinned_memory": 0 });
        let limits = json!({
            "principal": lease.map_or(principal, |(_, account)| account), "devices": [0], "device_count": 0,
            "exclusive": true, "session": none, "total": none, "sessions": null, "weight": 100, "priority": 0,
            "kernel_seconds": 0, "swappable": true, "grace_seconds": null
        });
        let process = json!({
            "process": { "pid": 8, "started": 1 }, "guard": null, "isolation": "Root", "user": null,
            "group": null
        });
        let saved = json!({
            "format": OLDEST, "daemons": 0, "process": process, "kind": "gpu", "client": "vm7",
            "program": "a\ntest", "pid": 9, "transport": "tcp", "peer": peer, "since": 1, "parked": null,
            "counters": Counters::default(), "limits": limits, "lease": lease.map(|(id, _)| id),
            "devices": [0], "token": Token::default(), "secret": KEY, "principal": saved_principal(principal),
            "encrypted": true, "data_connections": [4, 4], "attempt": 0, "resumed": 0, "overrun": false,
            "ended": false, "lost": false, "opened": [OPENED]
        });
        let (account, _terms) = Account::open(&server.bell).unwrap();
        session_of(server, from_value(saved).unwrap(), account)
    }

    #[test]
    fn a_session_to_which_no_client_was_welcomed_is_ended_so_that_the_client_tries_again() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        let mut worker = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = worker.id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // The 22nd field.
        let started: u64 = stat.split(' ').nth(21).unwrap().parse().unwrap();
        let process = json!({
            "process": { "pid": pid, "started": started }, "guard": null, "isolation": "Root", "user": null,
            "group": null
        });
        let mut state = State::default();
        let process = Some(from_value(process).unwrap());
        state.workers.insert(pid, Managed::serving(&Worker::fake_of(pid, process), Kind::Gpu));
        let session = session_of_limits(Limits::default());
        let record = session.account.record().as_fd().try_clone_to_owned().unwrap();
        state.sessions.insert(pid, Session { kept: true, ..session });
        state.save(pid);
        let next = Record::open(record.try_clone().unwrap()).unwrap();
        let Err(gone) = take_worker(&server, [Some(record), None, None, None]) else { panic!("it goes on") };
        assert!(gone.saved.unwrap().ended, "nobody has lost a session");
        assert!(worker.wait().is_err(), "nobody has ended it, so it has the client's connection");
        state.welcomes(pid);
        assert!(!Saved::read(&next).unwrap().unwelcomed);
    }

    #[test]
    fn a_session_and_its_lease_that_the_oldest_format_saved_are_taken_over() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        server.lock().restore(saved_daemon(saved_lease("host1", "group:g")));
        let session = restored(&server, "host1", "10.0.0.9:4711", Some((1, "group:g/00000001")));
        assert_eq!((session.principal.name.as_str(), session.limits.owner()), ("host1", "group:g"));
        assert_eq!(session.limits.principal, "group:g 00000001");
        assert_eq!(session.program, "a?test");
        assert_eq!(session.opened, [OPENED]);
    }

    #[test]
    fn a_daemon_with_other_devices_than_the_one_before_has_its_own() {
        let server = Server::new(Serve::from_flags(&["--software-devices=2"]), &mut Inherited::default());
        let server = Arc::new(server.unwrap());
        let serving = Some(("software".to_owned(), vec!["a GPU".to_owned()]));
        let restored = |before: (Vec<u32>, u32)| {
            let mut state = server.lock();
            (state.serving, state.chosen) = (serving.clone(), before);
            state.save_daemon(&server.succession, true);
            state.serving = None;
            drop(state);
            take_over(&server, &mut Inherited::default());
            server.lock().serving.clone()
        };
        assert_eq!(restored((Vec::new(), 2)), serving);
        assert_eq!(restored((Vec::new(), 1)), None);
        assert_eq!(restored((vec![0], 2)), None);
    }

    #[test]
    fn gpus_keep_their_numbers_under_another_daemon() {
        let server =
            Arc::new(Server::new(Serve::from_flags(&["--backend=cuda"]), &mut Inherited::default()).unwrap());
        let serving = Some(("cuda".to_owned(), vec!["a GPU".to_owned()]));
        let known = ["a", "b"].map(Listed::test).to_vec();
        let restored = |listed: &[Listed], before: (Vec<u32>, u32)| {
            let mut state = server.lock();
            (state.serving, state.chosen) = (serving.clone(), before);
            state.known = Arc::new(Devices::new(listed.to_vec()));
            state.save_daemon(&server.succession, true);
            (state.serving, state.known) = Default::default();
            drop(state);
            take_over(&server, &mut Inherited::default());
            let state = server.lock();
            (state.serving.clone(), state.known.listed())
        };
        assert_eq!(restored(&known, (Vec::new(), 1)), (serving.clone(), known.clone()));
        assert_eq!(
            restored(&known, (vec![1], 1)),
            (None, known),
            "those that are chosen have their numbers, too"
        );
        assert_eq!(
            restored(&[], (Vec::new(), 1)),
            (None, Vec::new()),
            "an earlier version has not saved them"
        );
    }

    #[test]
    fn a_session_whose_lease_the_daemon_before_has_ended_does_not_go_on() {
        let server = Arc::new(Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap());
        let session = |id| restored(&server, "host1", "10.0.0.9:4711", Some((id, "host1/00000001")));
        let sessions = [(1, session(1)), (2, session(2))];
        let mut state = server.lock();
        state.restore(saved_daemon(saved_lease("host1", "host1")));
        sessions.into_iter().for_each(|(worker, session)| state.sessions.insert(worker, session));
        // Killed after it has saved that.
        state.save_daemon(&server.succession, true);
        drop(state);
        take_over(&server, &mut Inherited::default());
        let ended = [1, 2].map(|worker| server.lock().sessions[&worker].ended);
        assert_eq!(ended, [false, true]);
    }

    #[test]
    fn a_client_without_tls_keeps_what_it_had_under_an_earlier_name() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        let name = "insecure:10.0.0.9";
        let lease = saved_lease("insecure:[::ffff:10.0.0.9]", "insecure:[::ffff:10.0.0.9]");
        server.lock().restore(saved_daemon(lease));
        let lease = server.lock().leases.find(&KEY, name).cloned().expect("the client's lease");
        assert_eq!((lease.account.as_str(), lease.holder.unwrap().name.as_str()), (name, name));
        let session = restored(&server, "insecure:[::ffff:10.0.0.9]", "[::ffff:10.0.0.9]:4711", None);
        assert_eq!((session.principal.name.as_str(), session.limits.owner()), (name, name));
        assert_eq!(session.peer, "10.0.0.9:4711");
    }

    #[test]
    fn a_worker_of_the_oldest_format_is_understood() {
        for what in ["Charge", "Discharge"] {
            let message = json!({ what: { "request": 1, "resource": { "device": 0 }, "bytes": 9 } });
            let (FromWorker::Charge { shared, .. } | FromWorker::Discharge { shared, .. }) =
                from_value(message).unwrap()
            else {
                panic!("{what} is something else")
            };
            assert_eq!(shared, None);
        }
    }

    #[test]
    fn formats_that_nobody_understands_are_not_taken_over() {
        for wrong in [OLDEST - 1, FORMAT + 1] {
            let refused = takes_over(wrong).unwrap_err().to_string();
            assert!(refused.contains(&format!("of format {wrong}")), "{refused}");
        }
        (OLDEST..=FORMAT).for_each(|format| takes_over(format).unwrap());
    }
}
