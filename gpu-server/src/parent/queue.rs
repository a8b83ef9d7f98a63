//! The queue of clients that wait for a worker. A client's sessions are served in order of arrival, and
//! whoever has fewer sessions comes first, so that one with many does not make others wait.
//!
//! ```text
//!  handshake ── join ──▶ queue ── serve ──▶ worker          (on the thread that adds a client or a worker)
//!                          │
//!                    rgpu-queue: tells each client its position once a second, drops clients that hung up,
//!                                and refuses clients when nothing has happened for too long
//! ```
//!
//! The same thread sees when the client of a session over `local` is gone, or a session has ended, and kills
//! a worker that stays.
//!
//! A waiting connection costs a descriptor but no thread. Only its worker reads from it. Messages to it are
//! sent under the state's lock without blocking, so a position is never sent after the welcome.

pub(super) mod parked;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use identity::Fingerprint;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::pipe2;
use protocol::device::{Answer, text};
use protocol::link::Welcome;

use self::parked::Parked;
use super::accounts::ALL_DEVICES;
use super::accounts::account::Account;
use super::control::{Control, Refused, welcome};
use super::grants;
use super::leases::table::UNKNOWN;
use super::placement::NoDevice;
use super::refusals::Reason;
use super::session::{Leaving, Presence, Session};
use super::state::{Server, State};
use super::takeover::kept;
use super::workers::{GIVE_UP, Stage, Worker};
use crate::config::Serve;
use crate::limits::Limits;
use crate::worker_protocol::{Counters, Kind, ToWorker, Transport, Visitor};

/// How often waiting clients are told their position.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How long the worker of a session over `local` may stay when the client is gone. It ends by itself within 5
/// seconds, whatever its driver does (decision 14), unless it is stopped, hangs, or does not want to. The
/// client's host waits for it for 10 seconds before it lets a guest reuse the memory that it shares with the
/// worker.
const LEAVES_WITHIN: Duration = Duration::from_secs(8);
/// How long any other worker may stay when it has reported its session's end, or has closed its connection.
/// It still has to keep what its client sent last ([the cache](crate::cache)), and the driver takes long to
/// end a process that has much memory. One that stayed for good would have its devices and their memory
/// without counting for its client.
pub(super) const EXITS_WITHIN: Duration = Duration::from_secs(60);

/// Adds a client to the queue, and serves it if a worker is ready.
pub(super) fn join(server: &Server, kind: Kind, mut parked: Parked) -> Result<(), Refused> {
    {
        let mut state = server.lock();
        if state.draining() {
            return Err(shutting_down());
        }
        // A client revoked after this point is found in the queue.
        if let Some(why) = server.may_not_begin(&parked.principal) {
            return Err(Refused(Reason::NotAllowed, why));
        }
        // The same applies to leases that end after this point.
        if parked.lease.is_some_and(|lease| !state.leases.has(lease)) {
            return Err(Refused(Reason::NoLease, UNKNOWN.into()));
        }
        let most = server.options.max_sessions;
        // A waiting client will become a session, so both count. One that has ended does not: its worker will
        // be gone in a moment. So that a client which begins and ends many cannot fill the machine with
        // those, there are at most as many again.
        let sessions = state.sessions.values().filter(|session| session.kind == kind);
        let own = sessions.clone().filter(|session| session.limits.owner() == parked.limits.owner()).count();
        let (all, waiting) = (sessions.clone().count(), state.pool(kind).queue.len());
        let running = sessions.filter(|session| !session.ended).count();
        if running + waiting >= most || all + waiting >= 2 * most {
            let reason = format!("the server has its maximum of {most} sessions (--max-sessions)");
            return Err(Refused(Reason::ServerFull, reason));
        }
        // Neither does one client fill it, whatever its workers say.
        if own >= 2 * (most - most / 8) {
            let reason =
                format!("{own} sessions of this client, which have ended, are still being taken down");
            return Err(Refused(Reason::ClientFull, reason));
        }
        // Without a rule, there is room left for other clients.
        let limit = parked.limits.sessions.map_or(most - most / 8, |limit| limit as usize);
        if limit > 0 && state.sessions_of(parked.limits.owner(), kind) >= limit {
            let rule = &parked.rules.sessions;
            let reason = format!("this client has its maximum of {limit} sessions ({rule})");
            return Err(Refused(Reason::ClientFull, reason));
        }
        // Checked last: a client that is refused for another reason has begun no session.
        if let Some((most, rule)) = &parked.rules.sessions_per_minute
            && !state.paces.take(parked.limits.owner(), *most, Instant::now())
        {
            let reason = format!(
                "this client has begun {most} sessions within a minute, which is its maximum ({rule})"
            );
            return Err(Refused(Reason::Pace, reason));
        }
        let before = state.place_in_queue(parked.limits.owner(), kind);
        let pool = state.pool_mut(kind);
        parked.failures = pool.failed;
        if before > 0 || pool.idle.is_empty() {
            tracing::info!(
                client = parked.client,
                program = parked.program,
                before,
                "a session waits for a worker"
            );
        }
        pool.queue.insert(before, parked);
    }
    serve(server, kind);
    server.changed.notify_all();
    server.nudge.nudge();
    Ok(())
}

impl State {
    /// The limits of all sessions of a kind that run.
    fn running_of(&self, kind: Kind) -> impl Iterator<Item = &Limits> {
        let running = self.sessions.values().filter(move |session| session.kind == kind && !session.ended);
        running.map(|session| &session.limits)
    }

    /// The same, with those that wait.
    fn running_or_waiting(&self, kind: Kind) -> impl Iterator<Item = &Limits> {
        self.running_of(kind).chain(self.pool(kind).queue.iter().map(|parked| &parked.limits))
    }

    /// Number of sessions of a client, with all of its leases.
    fn sessions_of(&self, owner: &str, kind: Kind) -> usize {
        self.running_or_waiting(kind).filter(|limits| limits.owner() == owner).count()
    }

    /// The place of a client's next session in the queue: behind all that would be no more than that for
    /// their clients, if the queue were served.
    fn place_in_queue(&self, owner: &str, kind: Kind) -> usize {
        let nth = self.sessions_of(owner, kind);
        let mut counted: HashMap<&str, usize> = HashMap::new();
        for limits in self.running_of(kind) {
            *counted.entry(limits.owner()).or_default() += 1;
        }
        let mut place = 0;
        for (at, parked) in self.pool(kind).queue.iter().enumerate() {
            let count = counted.entry(parked.limits.owner()).or_default();
            if *count <= nth {
                place = at + 1;
            }
            *count += 1;
        }
        place
    }
}

/// The position in the queue of the first client that can have devices now, with their numbers. Refuses
/// clients that never can.
fn first_placeable(server: &Server, state: &mut State, kind: Kind) -> Option<(usize, Vec<u32>)> {
    follow_rules(server, state, kind);
    let all = state.devices(&server.options);
    let mut found = None;
    let mut never = Vec::new();
    for (at, place) in state.places(&all, kind).enumerate() {
        match place {
            Ok(devices) => {
                found = Some((at - never.len(), devices));
                break;
            }
            Err(NoDevice::Wait(_)) => {}
            Err(NoDevice::Never(why)) => never.push((at - never.len(), why)),
        }
    }
    for (at, why) in never {
        if let Some(parked) = state.pool_mut(kind).queue.remove(at) {
            let why = parked.rules.explain(why);
            server.refuse_parked(&parked, &Refused(Reason::NoDevice, why));
        }
    }
    found
}

/// Gives clients that wait what the rules give them now, if they were read again since. Refuses those to whom
/// they give no session.
fn follow_rules(server: &Server, state: &mut State, kind: Kind) {
    let read = state.rules_read;
    if state.pool(kind).queue.iter().all(|parked| parked.rules_read == read) {
        return;
    }
    for mut parked in std::mem::take(&mut state.pool_mut(kind).queue) {
        if parked.rules_read != read {
            parked.rules_read = read;
            match grants::of(server, state, kind, &parked.principal, parked.lease) {
                Ok(grant) => parked.take(grant),
                Err(refused) => {
                    server.refuse_parked(&parked, &refused);
                    continue;
                }
            }
        }
        state.pool_mut(kind).queue.push_back(parked);
    }
}

/// Whether a pool with so many ready workers has one for each client that could have devices now, and the
/// spare ones.
pub(super) fn has_enough(state: &State, options: &Serve, kind: Kind, ready: usize) -> bool {
    let spare = match kind {
        Kind::Gpu => options.workers.max(options.first_workers.unwrap_or(0)),
        Kind::Nvml => 0,
    };
    ready >= spare && ready >= spare + state.placeable(options, kind, ready + 1)
}

/// Ends ready workers that no client needs any more. They have contexts, which would take memory from others.
fn trim(server: &Server, state: &mut State, kind: Kind) {
    while let Some(fewer) = state.pool(kind).idle.len().checked_sub(1)
        && has_enough(state, &server.options, kind, fewer)
    {
        state.pool_mut(kind).idle.pop_back().inspect(|worker| worker.hang_up());
    }
}

/// Gives ready workers to waiting clients in the order of the queue, except for those whose devices others
/// have.
pub(super) fn serve(server: &Server, kind: Kind) {
    while let Some(assigned) = assign(server, kind) {
        hand_over(server, kind, assigned);
    }
}

/// The same for clients of all kinds: devices may have become free for some of them.
pub(super) fn serve_all(server: &Server) {
    Kind::ALL.into_iter().for_each(|kind| serve(server, kind));
}

/// A client with a worker that does not know of it yet.
struct Assigned {
    worker: Arc<Worker>,
    parked: Parked,
    placed: Vec<u32>,
    message: ToWorker,
    /// The worker's ends of the account.
    pages: [OwnedFd; 3],
}

/// Assigns a ready worker to the next client, if there are both.
fn assign(server: &Server, kind: Kind) -> Option<Assigned> {
    loop {
        let mut state = server.lock();
        if state.stopped() || state.pool(kind).idle.is_empty() && state.ill.is_empty() {
            return None;
        }
        let (at, devices) = first_placeable(server, &mut state, kind)?;
        if state.pool(kind).idle.is_empty() {
            return None;
        }
        let parked = state.pool_mut(kind).queue.remove(at)?;
        let (mut account, pages) = match Account::open(&server.bell) {
            Ok(opened) => opened,
            Err(e) => {
                let why = format!("the server cannot make memory to share with a worker: {e}");
                server.refuse_parked(&parked, &Refused(Reason::Failed, why));
                continue;
            }
        };
        let pool = state.pool_mut(kind);
        let worker = pool.idle.pop_front()?;
        pool.moved = Some(Instant::now());
        pool.begun += 1;
        if let Some(managed) = state.workers.get_mut(&worker.pid()) {
            managed.stage = Stage::Serving;
        }
        state.tokens.insert(parked.token, Arc::clone(&worker));
        let swaps = server.options.worker.swap.on() && kind == Kind::Gpu;
        account.asks = parked.limits.total.device_memory > 0 || swaps;
        let limits = Limits { devices: devices.clone(), ..parked.limits.clone() };
        let key = state.settled.enter_for(parked.limits.owner(), names(&parked), Instant::now());
        state.sessions.insert(worker.pid(), session_of(&parked, kind, devices.clone(), account, key));
        state.measured_before(worker.pid());
        state.publish(parked.limits.owner(), ALL_DEVICES);
        server.want_measurement(&mut state);
        state.sessions_begun += 1;
        let message = ToWorker::Session {
            transport: parked.transport,
            program: parked.program.clone(),
            client: parked.client.clone(),
            door: parked.principal.key.filter(|_| parked.connection.is_encrypted()).map(|key| Visitor {
                key,
                token: parked.token,
                secret: parked.secret.0,
            }),
            limits,
        };
        return Some(Assigned { worker, parked, placed: devices, message, pages });
    }
}

/// Gives a client's connection to its worker, and welcomes the client.
fn hand_over(server: &Server, kind: Kind, assigned: Assigned) {
    let Assigned { worker, parked, placed, message, pages } = assigned;
    let [terms, meter, bell] = &pages;
    let cache = if matches!(parked.transport, Transport::Tcp { .. }) && kind == Kind::Gpu {
        server.cache_of(&parked.principal.name)
    } else {
        None
    };
    let mut fds = vec![parked.connection.as_fd(), terms.as_fd(), meter.as_fd(), bell.as_fd()];
    fds.extend(cache.as_ref().map(|cache| cache.as_fd()));
    // Under TLS the client opens the session's connections itself.
    let sent = worker.send(&message, if parked.connection.is_encrypted() { &fds[1..] } else { &fds });
    let mut state = server.lock();
    // It may have been ended meanwhile.
    let ended = state.end_of(&parked.token).map(str::to_owned);
    // If the worker has died meanwhile, its session has been removed.
    let begun = ended.is_none()
        && sent.is_ok()
        && state.sessions.get_mut(&worker.pid()).is_some_and(|s| {
            s.begun = true;
            true
        });
    if begun {
        // Before the session can end, which the state's lock prevents.
        server.audit.started(&parked, &placed);
        for failed in state.errors_of(&placed) {
            // The watcher notices when the worker is gone.
            let _ = worker.send(&failed, &[]);
        }
        // Before its client knows of it, so that no session that a client has is lost if this daemon is
        // killed. A session that no client has is ended by the next daemon.
        kept::keep(server, &mut state, &worker, meter);
        state.save_daemon(&server.succession, false);
        let grace = parked.limits.grace_seconds.unwrap_or(server.options.worker.grace_seconds);
        let grace = if parked.resumes { grace } else { 0 };
        let presence = begin(&worker, &parked, grace, cache.is_some(), || state.welcomes(worker.pid()));
        if let (Some(presence), Some(session)) = (presence, state.sessions.get_mut(&worker.pid())) {
            session.presence = Some(presence);
        }
        drop(state);
        server.waits.observe(kind, parked.since.elapsed());
        server.bell.ring();
        return;
    }
    state.sessions.remove(&worker.pid());
    state.tokens.remove(&parked.token);
    state.sessions_begun -= 1;
    let pool = state.pool_mut(kind);
    pool.begun -= 1;
    match ended {
        Some(why) => server.refuse_parked(&parked, &Refused(Reason::NotAllowed, why)),
        None => {
            tracing::debug!(worker = worker.pid(), "a ready worker is gone");
            pool.queue.push_front(parked);
        }
    }
}

/// A client's session's labels in metrics.
fn names(parked: &Parked) -> [&str; 3] {
    [&parked.limits.principal, &parked.client, &parked.program]
}

fn session_of(
    parked: &Parked,
    kind: Kind,
    devices: Vec<u32>,
    account: Account,
    key: metrics::Key,
) -> Session {
    Session {
        kind,
        client: parked.client.clone(),
        program: parked.program.clone(),
        pid: parked.pid,
        transport: parked.transport_name(),
        peer: parked.peer.clone(),
        since: Instant::now(),
        counters: Counters::default(),
        key,
        limits: parked.limits.clone(),
        lease: parked.lease,
        devices,
        account,
        token: parked.token,
        secret: parked.secret,
        principal: parked.principal.clone(),
        data_connections: (parked.data_connections, 0),
        encrypted: parked.connection.is_encrypted(),
        control: Some(Arc::clone(&parked.connection)),
        parked: None,
        presence: matches!(*parked.connection, Control::Local(_))
            .then(|| Presence::Connection(Arc::clone(&parked.connection))),
        leaving: Leaving::No,
        attempt: 0,
        resumed: 0,
        begun: false,
        unwelcomed: true,
        overrun: false,
        ended: false,
        lost: false,
        daemons: 0,
        kept: false,
        opened: Vec::new(),
        linked: BTreeSet::new(),
    }
}

/// Welcomes a client, after calling `welcomes`. Gives the presence of one that has taken a pipe for that.
fn begin(
    worker: &Worker,
    parked: &Parked,
    grace: u32,
    cache: bool,
    welcomes: impl FnOnce(),
) -> Option<Presence> {
    let Parked { peer, client, program, pid, principal, .. } = parked;
    tracing::info!(
        peer,
        client,
        program,
        pid,
        principal = principal.name,
        worker = worker.pid(),
        "session begins"
    );
    let key = if parked.connection.is_encrypted() { worker.key() } else { Fingerprint([0; 32]) };
    let welcome = Welcome {
        secret: parked.secret.0,
        grace,
        eager: parked.eager,
        session_key: key.0,
        principal: text(&principal.name),
        cache: cache.into(),
        ..welcome(Answer::Ok, parked.token, parked.data_connections, "")
    };
    // Without one, the connection counts.
    let pipe = parked.takes_presence.then(|| pipe2(OFlag::O_CLOEXEC).ok()).flatten();
    welcomes();
    let sent = match &pipe {
        Some((_, given)) => parked.connection.send_welcome_with(&welcome, given.as_fd()),
        None => parked.connection.send_welcome(&welcome),
    };
    if let Err(e) = sent {
        tracing::debug!(peer, client, program, "cannot send a client its welcome: {e}");
        // The worker notices and ends.
        parked.connection.shut_down();
    }
    pipe.map(|(ours, _)| Presence::Pipe(Arc::new(ours)))
}

/// Starts the queue's thread.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    std::thread::Builder::new()
        .name("rgpu-queue".into())
        .spawn(move || {
            loop {
                let gone = wait(&server);
                update(&server, &gone, Instant::now());
            }
        })
        .context("starting the queue")?;
    Ok(())
}

/// Clients that are gone.
#[derive(Default)]
struct Gone {
    /// Those whose connections were closed while they waited, or right after that.
    waiting: Vec<Arc<Control>>,
    /// Those of sessions that share memory with their workers.
    sharing: Vec<Presence>,
}

/// Sleeps until there is something to do: a client has gone, positions must be sent, a worker has had its
/// time to leave, or another thread nudges. Returns the clients that have gone.
fn wait(server: &Server) -> Gone {
    let (waiting, sharing, timed): (Vec<Arc<Control>>, Vec<Presence>, bool) = {
        let state = server.lock();
        let waiting = Kind::ALL.iter().flat_map(|kind| &state.pool(*kind).queue).map(|p| &p.connection);
        let leaving = |session: &Session| match session.leaving {
            Leaving::No => session.ended,
            Leaving::Until(_) => true,
            Leaving::Killed => false,
        };
        let timed = waiting.clone().next().is_some() || state.sessions.values().any(leaving);
        let sharing = state.sessions.values().filter(|session| session.leaving == Leaving::No);
        let sharing = sharing.filter_map(|session| session.presence.clone());
        (waiting.map(Arc::clone).collect(), sharing.collect(), timed)
    };
    let mut watched = vec![PollFd::new(server.nudge.0.as_fd(), PollFlags::POLLIN)];
    watched.extend(waiting.iter().map(|control| control.hung_up()));
    watched.extend(sharing.iter().map(Presence::watched));
    let limit = if timed {
        PollTimeout::from(u16::try_from(TELL_EVERY.as_millis()).unwrap_or(u16::MAX))
    } else {
        PollTimeout::NONE
    };
    match poll(&mut watched, limit) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(e) => {
            tracing::error!("cannot watch the waiting clients: {e}");
            std::thread::sleep(TELL_EVERY);
        }
    }
    let closed: Vec<bool> =
        watched[1..].iter().map(|w| w.revents().is_none_or(|events| !events.is_empty())).collect();
    drop(watched);
    // This consumes all nudges.
    let _ = server.nudge.0.read();
    let (of_waiting, of_sharing) = closed.split_at(waiting.len());
    let waiting = waiting.into_iter().zip(of_waiting).filter(|(_, closed)| **closed);
    let sharing = sharing.into_iter().zip(of_sharing).filter(|(_, closed)| **closed);
    Gone { waiting: waiting.map(|(one, _)| one).collect(), sharing: sharing.map(|(one, _)| one).collect() }
}

/// Kills the workers of sessions that have been over for too long.
fn part(state: &mut State, gone: &[Presence], now: Instant) {
    let State { sessions, workers, .. } = state;
    for (pid, session) in sessions.iter_mut() {
        let is_gone = |presence: &Presence| gone.iter().any(|gone| gone.is(presence));
        match session.leaving {
            Leaving::No if session.ended || session.presence.as_ref().is_some_and(is_gone) => {
                let within = if session.presence.is_some() { LEAVES_WITHIN } else { EXITS_WITHIN };
                session.leaving = Leaving::Until(now + within);
            }
            Leaving::Until(until) if now >= until => {
                let (client, program) = (&session.client, &session.program);
                tracing::error!(
                    worker = pid,
                    client,
                    program,
                    "the worker of a session that is over does not end; killed"
                );
                session.leaving = Leaving::Killed;
                workers.get(pid).inspect(|managed| managed.worker.kill());
            }
            _ => {}
        }
    }
}

/// Drops clients that are gone, refuses those that have waited too long, and tells the others their position.
fn update(server: &Server, gone: &Gone, now: Instant) {
    let mut state = server.lock();
    part(&mut state, &gone.sharing, now);
    let draining = state.draining();
    let waited = state.gpu.queue.len() + state.nvml.queue.len();
    for kind in Kind::ALL {
        follow_rules(server, &mut state, kind);
        let failure = last_failure(&state, kind);
        let patience = Duration::from_secs(server.options.wait_seconds);
        let moved = state.pool(kind).moved;
        let is_late = |parked: &Parked| {
            let since = moved.map_or(parked.since, |moved| moved.max(parked.since));
            now.saturating_duration_since(since) >= patience
        };
        let mut places = Vec::new();
        if state.pool(kind).queue.iter().any(is_late) {
            places.extend(state.places(&state.devices(&server.options), kind).map(Result::err));
        }
        let mut places = places.into_iter();
        let pool = state.pool_mut(kind);
        let mut kept = VecDeque::with_capacity(pool.queue.len());
        for mut parked in std::mem::take(&mut pool.queue) {
            let place = places.next().flatten();
            let Parked { peer, client, program, connection, .. } = &parked;
            if gone.waiting.iter().any(|g| Arc::ptr_eq(g, connection)) {
                tracing::info!(peer, client, program, "gave up waiting for a worker");
                continue;
            }
            let refused = if draining {
                Some(shutting_down())
            } else if pool.failures >= GIVE_UP && pool.failed > parked.failures && pool.starting == 0 {
                Some(Refused(Reason::WorkersFail, crashing(pool.failures, &pool.last_failure)))
            } else if is_late(&parked) {
                let within = patience.as_secs();
                Some(match place {
                    Some(NoDevice::Wait(why) | NoDevice::Never(why)) => {
                        let why = parked.rules.explain(why);
                        let why = format!(
                            "its devices did not become free within {within} s (--wait-seconds): {why}"
                        );
                        Refused(Reason::DevicesTaken, why)
                    }
                    None => Refused(Reason::WaitedTooLong, waited_too_long(patience, kept.len(), &failure)),
                })
            } else {
                None
            };
            if let Some(refused) = refused {
                server.refuse_parked(&parked, &refused);
                continue;
            }
            let time_to_tell =
                parked.told.is_none_or(|told| now.saturating_duration_since(told) >= TELL_EVERY);
            if parked.may_wait && time_to_tell {
                let position = position(kept.len());
                if let Err(e) = connection.send_welcome(&position) {
                    tracing::info!(peer, client, program, "dropped from the queue: {e}");
                    continue;
                }
                parked.told = Some(now);
            }
            kept.push_back(parked);
        }
        pool.queue = kept;
        trim(server, &mut state, kind);
    }
    if state.gpu.queue.len() + state.nvml.queue.len() < waited {
        drop(state);
        // Devices may have been kept for those who left.
        serve_all(server);
        server.changed.notify_all();
    }
}

fn position(ahead: usize) -> Welcome {
    Welcome { ahead: u32::try_from(ahead).unwrap_or(u32::MAX), ..welcome(Answer::Waiting, [0; 16], 0, "") }
}

fn shutting_down() -> Refused {
    Refused(Reason::Draining, "the server is shutting down".into())
}

fn crashing(failures: u32, why: &str) -> String {
    format!("the last {failures} workers could not be started: {why}; see the log of rgpu-server")
}

fn waited_too_long(patience: Duration, before: usize, failure: &str) -> String {
    format!(
        "no worker became ready within {} s (--wait-seconds), and {before} earlier sessions are waiting, too{failure}",
        patience.as_secs()
    )
}

/// The latest reason why a worker could not be started, as the end of a sentence.
fn last_failure(state: &State, kind: Kind) -> String {
    let pool = state.pool(kind);
    match pool.last_failure.as_str() {
        "" => String::new(),
        why => format!("; the last worker could not be started: {why}"),
    }
}

#[cfg(test)]
pub(super) mod tests;
