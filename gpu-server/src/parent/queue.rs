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

use std::collections::{HashMap, VecDeque};
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
/// How long the worker of any other session may stay when it has reported the session's end. It still has to
/// keep what its client sent last ([the cache](crate::cache)), and the driver takes long to end a process
/// that has much memory. One that stayed for good would have its devices and their memory without counting
/// for its client.
const EXITS_WITHIN: Duration = Duration::from_secs(60);

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
        state.publish(parked.limits.owner());
        state.measure = true;
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
    for (pid, session) in sessions {
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
pub(super) mod tests {
    use super::super::bells::Bell;
    use super::super::ends::end_sessions;
    use super::super::trust::Principal;
    use super::super::workers::Managed;
    use super::*;
    use handover::Inherited;
    use host_bridge::framing::recv_struct;
    use std::os::unix::net::UnixStream;

    /// A server with these options that does nothing by itself.
    pub(in crate::parent) fn server(flags: &[&str]) -> Arc<Server> {
        Arc::new(Server::new(crate::config::Serve::from_flags(flags), &mut Inherited::default()).unwrap())
    }

    /// A session with these limits, without a client.
    pub(in crate::parent) fn session_of_limits(limits: Limits) -> Session {
        let (account, _pages) = Account::open(&Bell::new().unwrap()).unwrap();
        let parked = Parked { limits, ..Parked::fake() };
        let key = metrics::Ledger::<()>::default().enter(names(&parked), Instant::now());
        session_of(&parked, Kind::Gpu, Vec::new(), account, key)
    }

    fn client(server: &Server, number: u32) -> Result<UnixStream, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = Arc::new(Control::Local(theirs));
        let parked = Parked { connection, pid: number, token: [number as u8; 16], ..Parked::fake() };
        join(server, Kind::Gpu, parked).map(|()| ours).map_err(|Refused(_, reason)| reason)
    }

    fn heard(client: &UnixStream) -> (Answer, u32, String) {
        let welcome: Welcome = recv_struct(client.as_fd(), &mut Vec::new()).unwrap().unwrap();
        (Answer::from_number(welcome.status), welcome.ahead, protocol::device::untext(&welcome.reason))
    }

    fn ready(server: &Server, pid: u32) {
        server.lock().gpu.idle.push_back(Worker::fake(pid));
        serve(server, Kind::Gpu);
    }

    #[test]
    fn clients_are_served_in_order_and_learn_their_position() {
        let server = server(&["--max-sessions", "9"]);
        let clients: Vec<UnixStream> = (0..8).map(|number| client(&server, number).unwrap()).collect();
        update(&server, &Gone::default(), Instant::now());
        for (place, client) in (0..).zip(&clients) {
            assert_eq!(heard(client), (Answer::Waiting, place, String::new()));
        }
        for (number, client) in (0..8).zip(&clients) {
            ready(&server, 100 + number);
            assert_eq!(heard(client).0, Answer::Ok);
            let session = &server.lock().sessions[&(100 + number)];
            assert_eq!((session.pid, session.unwelcomed), (number, false));
        }
        assert!(server.lock().gpu.queue.is_empty() && server.lock().gpu.idle.is_empty());
    }

    #[test]
    fn who_is_ended_before_its_session_has_begun_is_refused() {
        let server = server(&[]);
        let client = client(&server, 1).unwrap();
        server.lock().gpu.idle.push_back(Worker::fake(100));
        let assigned = assign(&server, Kind::Gpu).unwrap();
        assert_eq!(end_sessions(&server, |_, _| Some("by a test".to_owned())), 1);
        hand_over(&server, Kind::Gpu, assigned);
        assert_eq!(heard(&client), (Reason::NotAllowed.answer(), 0, "by a test".to_owned()));
        assert!(server.lock().sessions.is_empty() && server.lock().gpu.queue.is_empty());
    }

    #[test]
    fn who_has_fewer_sessions_comes_first() {
        let server = server(&["--max-sessions", "20"]);
        let mut clients = Vec::new();
        let mut join = |number: u32, principal: &str| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            clients.push(ours);
            let limits = Limits::test(principal);
            let connection = Arc::new(Control::Local(theirs));
            let parked = Parked { connection, pid: number, limits, ..Parked::fake() };
            super::join(&server, Kind::Gpu, parked).map_err(|Refused(_, reason)| reason)
        };
        let order = || server.lock().gpu.queue.iter().map(|parked| parked.pid).collect::<Vec<_>>();
        for number in 0..5 {
            join(number, "many").unwrap();
        }
        // Behind the first of the others, which would be the first of its principal, too.
        join(10, "few").unwrap();
        join(11, "few").unwrap();
        join(20, "one").unwrap();
        assert_eq!(order(), [0, 10, 20, 1, 11, 2, 3, 4]);
        // Running ones count.
        for pid in 100..103 {
            ready(&server, pid);
        }
        assert_eq!(order(), [1, 11, 2, 3, 4]);
        join(30, "new").unwrap();
        join(12, "few").unwrap();
        assert_eq!(order(), [30, 1, 11, 2, 12, 3, 4]);
    }

    #[test]
    fn sessions_under_all_leases_of_a_client_count_for_its_pace() {
        let server = server(&[]);
        let begin = |principal: &str| {
            let limits = Limits::test(principal);
            let mut rules = Parked::fake().rules;
            rules.sessions_per_minute = Some((1, "sessions_per_minute".into()));
            join(&server, Kind::Gpu, Parked { limits, rules, ..Parked::fake() }).map_err(|r| r.0)
        };
        assert_eq!(begin("a 1"), Ok(()));
        for lease in ["a 2", "a"] {
            assert_eq!(begin(lease), Err(Reason::Pace), "{lease}");
        }
        for other in ["b", "cert:spiffe://x/a", "cert:spiffe://x/b"] {
            assert_eq!(begin(other), Ok(()), "{other}");
        }
    }

    #[test]
    fn one_client_leaves_room_for_others() {
        let server = server(&["--max-sessions", "16"]);
        let _clients: Vec<UnixStream> = (0..14).map(|number| client(&server, number).unwrap()).collect();
        let refused = client(&server, 14).unwrap_err();
        assert!(refused.contains("its maximum of 14 sessions (--client-sessions)"), "{refused}");
        let limits = Limits::test("another");
        join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|r| r.1).unwrap();
    }

    #[test]
    fn leases_give_a_client_no_more_sessions_and_no_better_place_in_the_queue() {
        let server = server(&["--max-sessions", "8"]);
        let begin = |principal: &str, sessions| {
            let limits = Limits { sessions, ..Limits::test(principal) };
            join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|refused| refused.0)
        };
        for _ in 0..6 {
            begin("a", None).unwrap();
        }
        begin("a 1", None).unwrap();
        assert_eq!(begin("a 2", None), Err(Reason::ClientFull));
        begin("b", None).unwrap();
        let order = |server: &Server| {
            let state = server.lock();
            state.gpu.queue.iter().map(|parked| parked.limits.principal.clone()).collect::<Vec<_>>()
        };
        assert_eq!(order(&server), ["a", "b", "a", "a", "a", "a", "a", "a 1"]);
        // The same goes for the limit of a rule.
        let server = self::server(&["--max-sessions", "8"]);
        let begin = |principal: &str, sessions| {
            let limits = Limits { sessions, ..Limits::test(principal) };
            join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|refused| refused.0)
        };
        assert_eq!((begin("a", Some(2)), begin("a 1", Some(2))), (Ok(()), Ok(())));
        for principal in ["a", "a 1", "a 2"] {
            assert_eq!(begin(principal, Some(2)), Err(Reason::ClientFull));
        }
    }

    /// A server of two devices, of which another client has the first for itself, and clients that ask for
    /// that one.
    fn clients_without_a_device(server: &Server, count: u32) -> Vec<(Arc<Control>, UnixStream)> {
        let exclusive = Limits { exclusive: true, devices: vec![0], ..Limits::test("e") };
        let mut session = session_of_limits(exclusive);
        session.devices = vec![0];
        let mut state = server.lock();
        state.serving = Some(("software".into(), vec!["a".into(), "b".into()]));
        state.sessions.insert(50, session);
        drop(state);
        let join = |_| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let connection = Arc::new(Control::Local(theirs));
            let parked = Parked { connection: Arc::clone(&connection), devices: vec![0], ..Parked::fake() };
            join(server, Kind::Gpu, parked).map_err(|refused| refused.1).unwrap();
            (connection, ours)
        };
        (0..count).map(join).collect()
    }

    #[test]
    fn no_workers_are_kept_for_clients_that_wait_for_devices() {
        let server = server(&["--workers=2"]);
        let clients = clients_without_a_device(&server, 3);
        let fill = || server.lock().gpu.idle.extend((100..105).map(Worker::fake));
        let idle = || server.lock().gpu.idle.len();
        fill();
        update(&server, &Gone::default(), Instant::now());
        assert_eq!((idle(), server.lock().gpu.queue.len()), (2, 3));
        // The devices become free, and the clients hang up before they are served.
        server.lock().sessions.remove(&50);
        server.lock().gpu.idle.clear();
        fill();
        let enough = |ready| has_enough(&server.lock(), &server.options, Kind::Gpu, ready);
        assert!(enough(5) && !enough(4));
        let waiting = clients.into_iter().map(|(connection, _)| connection).collect();
        update(&server, &Gone { waiting, ..Gone::default() }, Instant::now());
        assert_eq!((idle(), server.lock().gpu.queue.len()), (2, 0));
    }

    #[test]
    fn a_client_without_a_device_is_told_why_even_if_no_worker_was_ever_ready() {
        let server = server(&["--workers=0", "--wait-seconds=60"]);
        let clients = clients_without_a_device(&server, 1);
        update(&server, &Gone::default(), Instant::now() + Duration::from_secs(61));
        let (answer, _, why) = heard(&clients[0].1);
        assert!(answer == Reason::DevicesTaken.answer() && why.contains("others have devices 0"), "{why}");
    }

    #[test]
    fn a_client_that_waits_begins_by_the_rules_of_then() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clients.toml");
        std::fs::write(&path, "devices = [0, 1]\n").unwrap();
        let server =
            server(&["--backend=software", "--software-devices=2", &format!("--clients={}", path.display())]);
        let read = |rules: &str| {
            std::fs::write(&path, rules).unwrap();
            server.set_policy(crate::parent::state::read_policy(&server.options).unwrap());
        };
        server.lock().serving = Some(("software".into(), vec!["a".into(), "b".into()]));
        let wait = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let principal = Principal::test();
            let grant = grants::of(&server, &server.lock(), Kind::Gpu, &principal, None).map_err(|r| r.1);
            let rules_read = server.lock().rules_read;
            let connection = Arc::new(Control::Local(theirs));
            let mut parked = Parked { connection, principal, rules_read, ..Parked::fake() };
            parked.take(grant.unwrap());
            join(&server, Kind::Gpu, parked).map_err(|r| r.1).unwrap();
            ours
        };
        let client = wait();
        read("devices = [1]\nweight = 7\n");
        ready(&server, 100);
        assert_eq!(heard(&client).0, Answer::Ok);
        {
            let state = server.lock();
            let session = &state.sessions[&100];
            assert_eq!((&session.devices, session.limits.weight), (&vec![1], 7));
        }
        let client = wait();
        read("lease_required = true\n");
        update(&server, &Gone::default(), Instant::now());
        let (answer, _, why) = heard(&client);
        assert!(answer == Reason::NoLease.answer() && why.contains("lease_required"), "{why}");
        assert!(server.lock().gpu.queue.is_empty());
    }

    #[test]
    fn a_client_that_hangs_up_leaves_the_queue() {
        let server = server(&[]);
        let clients: Vec<UnixStream> = (0..3).map(|number| client(&server, number).unwrap()).collect();
        let mut clients = clients.into_iter();
        drop(clients.next());
        let gone = wait(&server);
        assert_eq!((gone.waiting.len(), gone.sharing.len()), (1, 0));
        update(&server, &gone, Instant::now());
        for (place, client) in (0..).zip(clients) {
            assert_eq!(heard(&client), (Answer::Waiting, place, String::new()));
        }
    }

    #[test]
    fn a_session_that_began_while_its_first_connection_was_closed_may_go_on() {
        let server = server(&[]);
        drop(client(&server, 0).unwrap());
        let gone = wait(&server);
        // Meanwhile it is served.
        ready(&server, 100);
        update(&server, &gone, Instant::now());
        update(&server, &Gone::default(), Instant::now() + 2 * LEAVES_WITHIN);
        assert_eq!(server.lock().sessions[&100].leaving, Leaving::No);
    }

    /// A client that waits for both devices for itself, another one behind it that needs one, a ready worker,
    /// and a session with one of the devices.
    fn one_waits_for_devices_that_are_kept_for_another(server: &Server) -> [(Arc<Control>, UnixStream); 2] {
        let mut session = session_of_limits(Limits::test("b"));
        session.devices = vec![0];
        {
            let mut state = server.lock();
            state.serving = Some(("software".into(), vec!["a".into(), "b".into()]));
            state.sessions.insert(50, session);
            state.gpu.idle.push_back(Worker::fake(100));
        }
        let exclusive = Limits { exclusive: true, devices: vec![0, 1], ..Limits::test("e") };
        let clients = [exclusive, Limits::test("s")].map(|limits| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let connection = Arc::new(Control::Local(theirs));
            let principal = Principal::named(&limits.principal);
            let parked = Parked { connection: Arc::clone(&connection), limits, principal, ..Parked::fake() };
            join(server, Kind::Gpu, parked).map_err(|refused| refused.1).unwrap();
            (connection, ours)
        });
        assert_eq!(server.lock().gpu.queue.len(), 2);
        clients
    }

    #[test]
    fn devices_that_are_kept_for_a_client_are_free_when_it_gives_up() {
        let server = server(&[]);
        let [(gone, _), (_, served)] = one_waits_for_devices_that_are_kept_for_another(&server);
        update(&server, &Gone { waiting: vec![gone], ..Gone::default() }, Instant::now());
        assert!(server.lock().gpu.queue.is_empty());
        assert_eq!(heard(&served).0, Answer::Waiting);
        assert_eq!(heard(&served).0, Answer::Ok);
    }

    #[test]
    fn devices_that_are_kept_for_a_client_are_free_when_it_may_no_longer_wait() {
        let server = server(&[]);
        let [(_, refused), (_, served)] = one_waits_for_devices_that_are_kept_for_another(&server);
        let is_revoked = |who: &Principal, _| (who.name == "e").then(|| "by a test".to_owned());
        assert_eq!(end_sessions(&server, is_revoked), 1);
        assert!(server.lock().gpu.queue.is_empty());
        assert_eq!(heard(&refused).0, Reason::NotAllowed.answer());
        assert_eq!(heard(&served).0, Answer::Ok);
    }

    #[test]
    fn a_client_that_reads_nothing_is_dropped_from_the_queue() {
        let server = server(&["--wait-seconds", "1000000"]);
        let _client = client(&server, 0).unwrap();
        let mut now = Instant::now();
        while !server.lock().gpu.queue.is_empty() {
            now += TELL_EVERY;
            update(&server, &Gone::default(), now);
        }
        assert!(server.lock().sessions.is_empty());
    }

    #[test]
    fn clients_are_refused_only_when_no_session_begins_for_too_long() {
        let server = server(&["--wait-seconds", "60"]);
        let begun = Instant::now();
        let clients: Vec<UnixStream> = (0..3).map(|number| client(&server, number).unwrap()).collect();
        server.lock().gpu.moved = Some(begun + Duration::from_secs(50));
        update(&server, &Gone::default(), begun + Duration::from_secs(100));
        assert_eq!(server.lock().gpu.queue.len(), 3);
        update(&server, &Gone::default(), begun + Duration::from_secs(111));
        assert!(server.lock().gpu.queue.is_empty());
        heard(&clients[0]);
        let (answer, _, reason) = heard(&clients[0]);
        assert_eq!(answer, Answer::NoResources);
        assert!(reason.contains("within 60 s (--wait-seconds)"), "{reason}");
    }

    #[test]
    fn clients_are_refused_with_the_reason_when_workers_keep_failing() {
        let server = server(&[]);
        let waits = client(&server, 0).unwrap();
        {
            let mut state = server.lock();
            state.gpu.failures = GIVE_UP;
            state.gpu.failed = GIVE_UP.into();
            state.gpu.last_failure = "it was killed by signal 11".into();
        }
        let late = client(&server, 1).unwrap();
        update(&server, &Gone::default(), Instant::now());
        let (answer, _, reason) = heard(&waits);
        assert!(answer == Answer::NoResources && reason.contains("killed by signal 11"), "{reason}");
        // A later client waits until another worker has failed.
        assert_eq!(heard(&late).0, Answer::Waiting);
        server.lock().gpu.failed += 1;
        update(&server, &Gone::default(), Instant::now());
        assert_eq!(heard(&late).0, Answer::NoResources);
    }

    #[test]
    fn sessions_that_have_ended_count_only_if_there_are_as_many_again() {
        let server = server(&["--max-sessions", "2"]);
        let mut clients = Vec::new();
        for number in 0..4 {
            clients.push(client(&server, number).unwrap());
            ready(&server, 100 + number);
            server.lock().sessions.get_mut(&(100 + number)).unwrap().ended = number < 2;
        }
        assert!(client(&server, 4).unwrap_err().contains("--max-sessions"));
        server.lock().sessions.get_mut(&102).unwrap().ended = true;
        assert!(client(&server, 4).unwrap_err().contains("--max-sessions"));
        server.lock().sessions.remove(&100);
        client(&server, 4).unwrap();
    }

    #[test]
    fn one_client_does_not_fill_the_server_with_sessions_that_have_ended() {
        let server = server(&["--max-sessions", "8"]);
        let begin = |principal: &str| {
            let limits = Limits::test(principal);
            join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|refused| refused.0)
        };
        // Their workers stay.
        for pid in 100..114 {
            begin("a").unwrap();
            ready(&server, pid);
            server.lock().sessions.get_mut(&pid).unwrap().ended = true;
        }
        assert_eq!(begin("a"), Err(Reason::ClientFull));
        assert_eq!(begin("b"), Ok(()));
    }

    #[test]
    fn a_worker_that_stays_after_the_end_of_its_session_is_killed() {
        let server = server(&[]);
        let client = client(&server, 0).unwrap();
        ready(&server, 100);
        server.lock().workers.insert(100, Managed::fake(100, Stage::Serving));
        let leaving = || server.lock().sessions[&100].leaving;
        let now = Instant::now();
        update(&server, &Gone::default(), now);
        assert_eq!(leaving(), Leaving::No);
        server.lock().sessions.get_mut(&100).unwrap().ended = true;
        update(&server, &Gone::default(), now);
        assert_eq!(leaving(), Leaving::Until(now + LEAVES_WITHIN));
        // No client whose memory it could touch waits for any other.
        {
            let mut state = server.lock();
            let session = state.sessions.get_mut(&100).unwrap();
            (session.presence, session.leaving) = (None, Leaving::No);
        }
        update(&server, &Gone::default(), now);
        assert_eq!(leaving(), Leaving::Until(now + EXITS_WITHIN));
        update(&server, &Gone::default(), now + EXITS_WITHIN);
        assert_eq!(leaving(), Leaving::Killed);
        drop(client);
    }

    #[test]
    fn waiting_clients_count_against_the_session_limit() {
        let server = server(&["--max-sessions", "1"]);
        let _first = client(&server, 0).unwrap();
        assert!(client(&server, 1).unwrap_err().contains("--max-sessions"));
    }
}
