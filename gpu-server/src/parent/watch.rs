//! Workers' messages to the daemon, and their ends. A thread for each worker receives its messages.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use host_bridge::framing;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::Signal;
use protocol::ops::nvml::MOST_PROCESSES;
use sandbox::Process;

use super::accounts::ALL_DEVICES;
use super::host::host_name;
use super::pool::keep_idle;
use super::session::Session;
use super::state::{Server, State};
use super::takeover::kept;
use super::text::printable;
use super::workers::{Stage, Worker};
use super::{direct, queue};
use crate::config::Serve;
use crate::cuda_ipc::{MAX_OF_SESSION, Sharer};
use crate::driver::cuda::nvml::Devices;
use crate::driver::listed::Listed;
use crate::worker_protocol::{self, Counters, FromWorker, Kind, Refusal, Reply, Shared, Token};

/// Starts the thread that receives a worker's messages until it ends.
pub(super) fn start_watching(
    server: &Arc<Server>,
    worker: &Arc<Worker>,
    process: Process,
) -> anyhow::Result<()> {
    let (server, worker) = (Arc::clone(server), Arc::clone(worker));
    std::thread::Builder::new()
        .name("rgpu-watch".into())
        .spawn(move || watch(&server, &worker, process))
        .context("starting a thread for a worker")?;
    Ok(())
}

/// How a process ended, after "it".
pub(super) fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name = Signal::try_from(signal).map_or_else(|_| String::new(), |s| format!(" ({s})"));
            format!("was killed by signal {signal}{name}")
        }
        (None, Some(code)) => format!("exited with status {code}"),
        (None, None) => "ended".into(),
    }
}

/// Describes the end of a process whose status is unknown.
fn unknown(e: &io::Error) -> String {
    match e.raw_os_error() {
        Some(libc::ECHILD) => {
            "has ended; how is not known, because the daemon that had started it crashed".into()
        }
        _ => format!("has ended; how is not known: {e}"),
    }
}

/// Receives a worker's messages until it ends.
fn watch(server: &Arc<Server>, worker: &Arc<Worker>, mut process: Process) {
    let pid = worker.pid();
    // Why it was ended: it broke the protocol, or it reported that it cannot serve.
    let (mut broken, mut failed) = (None, None);
    let mut budget = Budget::new(Instant::now());
    let (mut first, mut unheard) = (true, false);
    loop {
        let pause = budget.take(Instant::now());
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        // The message stays in the socket until it was handled: if this daemon crashes meanwhile, its
        // successor receives it again.
        let received = worker_protocol::peek::<FromWorker>(worker.socket().as_fd());
        let (mut message, fds) = match received {
            Ok(Some((message, fds))) => (message, fds),
            Ok(None) => break,
            // The message stays the next one, and the worker is innocent.
            Err(e) if framing::lacks_descriptors(&e) => {
                if !std::mem::replace(&mut unheard, true) {
                    let why = "this process cannot open more descriptors (LimitNOFILE)";
                    tracing::error!(worker = pid, "a worker is not heard: {why}: {e}");
                }
                // What it has is needed, so one that has ended is not kept for its last messages.
                if hangs_up_within(worker, UNHEARD_PAUSE) {
                    break;
                }
                continue;
            }
            Err(e) => {
                broken = Some(format!("sent an invalid message: {e}"));
                break;
            }
        };
        let mut state = server.lock();
        // A worker's message is checked like a client's, because the worker may be compromised.
        if let Err(why) = check(&state, pid, &mut message) {
            broken = Some(why);
            break;
        }
        if !std::mem::replace(&mut first, false) {
            state.sessions.get_mut(&pid).into_iter().for_each(|session| session.account.heard());
        }
        let wakes = wakes_others(&message);
        match message {
            FromWorker::Sandbox(_) => {}
            FromWorker::Ready { backend, devices, all, free, key } => {
                match become_ready(&mut state, worker) {
                    Ok(kind) => {
                        worker.set_key(key);
                        log_devices(&mut state, &server.options, pid, (backend, devices), all);
                        state.save_daemon(&server.succession, false);
                        state.pool_mut(kind).succeed(Instant::now(), free);
                        server.want_measurement(&mut state);
                        // Before it can have a session: a successor takes over workers with a session, which
                        // don't send this again.
                        let _ = worker_protocol::consume(worker.socket().as_fd());
                        let keep = keep_idle(&mut state, &server.options, worker, kind);
                        drop(state);
                        if keep {
                            queue::serve(server, kind);
                        }
                        server.changed.notify_all();
                        continue;
                    }
                    Err(why) => {
                        broken = Some(why);
                        break;
                    }
                }
            }
            FromWorker::Failed { reason, full } => {
                // Sessions of a previous daemon may go on without new ones, and what the operator wanted of
                // an upgrade can be corrected by another one.
                let first =
                    state.serving.is_none() && state.sessions.is_empty() && !server.succession.executed;
                if let Some(kind) = state.starting(pid) {
                    tracing::error!(worker = pid, "a worker cannot start: {reason}");
                    if first && kind == Kind::Gpu {
                        state.fatal = Some(reason.clone());
                    }
                    // Memory becomes free only when another session or worker on the device ends.
                    let others = state.sessions.values().any(|session| session.kind == Kind::Gpu)
                        || !state.gpu.idle.is_empty();
                    state.pool_mut(kind).full = full && others;
                }
                failed = Some(reason);
                break;
            }
            FromWorker::Share { request, what } => {
                let reply = share(server, &mut state, pid, what, fds.into_iter().next());
                log_refused(server, &state, pid, "share an object", &reply);
                worker.answer(request, reply, None);
            }
            FromWorker::Open { request, token } => {
                let (reply, fd) = open(&mut state, pid, &token);
                log_refused(server, &state, pid, "open a shared object", &reply);
                worker.answer(request, reply, fd.as_deref());
            }
            FromWorker::Charge { request, resource, bytes, shared } => {
                let reply = state.charge(pid, request, resource, bytes, shared);
                worker.answer(request, reply, None);
            }
            FromWorker::Discharge { request, resource, bytes, shared } => {
                state.discharge(pid, request, resource, bytes, shared);
            }
            FromWorker::Ticket { request } => {
                // Reading this machine's addresses takes long, and the kernel may keep a reader waiting.
                drop(state);
                let addresses = direct::addresses(server);
                state = server.lock();
                let reply = direct::ticket(server, &mut state.tickets, worker, addresses);
                worker.answer(request, reply, None);
            }
            FromWorker::Connect { request, address, encrypted } => {
                direct::serve(server, worker, request, &address, encrypted);
            }
            FromWorker::Processes { request, device, namespace } => {
                worker.answer(request, state.processes(pid, device, namespace), None);
            }
            FromWorker::Unshare { token } => {
                if let Some(what) = state.shares.remove(&token, pid) {
                    state.pass_on_imports([token]);
                    server.succession.store.forget(&kept::share_name(&token, pid, &what));
                }
            }
            FromWorker::Counters(counters) => {
                if let Some(session) = state.sessions.get_mut(&pid).filter(|session| !session.ended) {
                    session.counters = counters;
                }
                server.want_measurement(&mut state);
            }
            FromWorker::Link { up } => {
                if let Some(session) = state.sessions.get_mut(&pid).filter(|session| !session.ended) {
                    session.parked = (!up).then(|| session.parked.unwrap_or_else(Instant::now));
                    session.resumed += u64::from(up);
                }
                state.save_link(pid);
            }
            FromWorker::Overrun => {
                let session = state.sessions.get_mut(&pid);
                if let Some(session) = session.filter(|session| !session.ended && !session.overrun) {
                    session.overrun = true;
                    let (client, program) = (&session.client, &session.program);
                    let (principal, seconds) = (&session.limits.principal, session.limits.kernel_seconds);
                    tracing::warn!(
                        worker = pid,
                        client,
                        program,
                        principal,
                        "a kernel has run for {seconds} s (--kernel-seconds): its session ends"
                    );
                    state.kernels_overrun += 1;
                    state.save(pid);
                }
            }
            FromWorker::Ended { lost, counters } => {
                ended(&mut state, pid, lost.as_deref(), counters);
                // From now on the worker has to go.
                server.nudge.nudge();
            }
        }
        // Only this thread reads the worker's socket, so this consumes the message just handled.
        let _ = worker_protocol::consume(worker.socket().as_fd());
        if wakes {
            server.changed.notify_all();
        }
    }
    if let Some(why) = &broken {
        tracing::error!(worker = pid, "a worker {why}; killed");
    }
    // It may be about to exit by itself, but that cannot be relied on, and nobody listens to it any more.
    if broken.is_some() {
        worker.kill();
    }
    direct::forget(pid);
    let broken = broken.or(failed);
    take_down(server, worker, broken.clone());
    let ended = process.wait();
    let mut how = ended.as_ref().map_or_else(unknown, |status| describe(*status));
    if process.group().is_some_and(sandbox::Group::ran_out_of_memory) {
        how.push_str(": it used more memory of the server's machine than it may (--worker-memory)");
    }
    // Its user ID and its group can be reused after this.
    drop(process);
    let clean = ended.is_ok_and(|status| status.success());
    {
        let mut state = server.lock();
        for name in state.shares.of(pid).map(|(token, what)| kept::share_name(token, pid, what)) {
            server.succession.store.forget(&name);
        }
        if let Some((session, reason)) = remove_worker(&mut state, pid, clean, &how, broken) {
            kept::forget(server, pid);
            state.save_daemon(&server.succession, false);
            server.audit.ended(&session, session.lost, &reason);
        }
    }
    // Others may be waiting for its devices or its turn.
    queue::serve_all(server);
    server.bell.ring();
    server.changed.notify_all();
    server.nudge.nudge();
}

/// How long a worker that has not said why it ends may stay until another one starts in its place: how it
/// ends may say why.
const SAYS_WHY: Duration = Duration::from_secs(2);

/// Waits until a worker ends that nobody hears any more, and kills it if it does not: a driver whose device
/// fails may never end it.
fn take_down(server: &Server, worker: &Worker, why: Option<String>) {
    if why.is_none() && worker.ends_within(SAYS_WHY) {
        return;
    }
    let why = why.unwrap_or_else(|| "it has closed its connection and does not end".to_owned());
    if fail_to_start(&mut server.lock(), worker.pid(), why) {
        server.changed.notify_all();
        server.nudge.nudge();
    }
    if !worker.ends_within(queue::EXITS_WITHIN) {
        tracing::error!(worker = worker.pid(), "a worker that nobody hears any more does not end; killed");
        worker.kill();
    }
}

/// Whether a message changes something that the daemon's other threads wait for: those that begin and end
/// workers, sessions and leases. A worker can send any number of the others.
fn wakes_others(message: &FromWorker) -> bool {
    matches!(message, FromWorker::Ready { .. } | FromWorker::Failed { .. } | FromWorker::Ended { .. })
}

/// How long to wait until a message is tried again that came with a descriptor for which there was no room.
const UNHEARD_PAUSE: u8 = 100;

/// Waits until a worker has closed its end of the socket, for so many milliseconds at most.
fn hangs_up_within(worker: &Worker, milliseconds: u8) -> bool {
    // Without any event, only the other end's end is reported.
    let mut watched = [PollFd::new(worker.socket().as_fd(), PollFlags::empty())];
    poll(&mut watched, milliseconds).is_ok_and(|ended| ended > 0)
}

/// Messages that a worker may send at once, and per second in the long run. Further ones wait in its socket,
/// so that a flood takes little of the daemon's time.
const MESSAGES: (f64, f64) = (20_000.0, 10_000.0);

/// Limits the rate at which a worker's messages are read.
struct Budget {
    left: f64,
    at: Instant,
}

impl Budget {
    fn new(now: Instant) -> Budget {
        Budget { left: MESSAGES.0, at: now }
    }

    /// Counts one message. Returns how long to wait before reading it.
    fn take(&mut self, now: Instant) -> Duration {
        let earned = now.saturating_duration_since(self.at).as_secs_f64() * MESSAGES.1;
        (self.left, self.at) = ((self.left + earned).min(MESSAGES.0) - 1.0, now);
        Duration::from_secs_f64((-self.left).max(0.0) / MESSAGES.1)
    }
}

/// Maximum length of a worker's text in the log and the status, in characters.
const TEXT: usize = 1024;

/// Makes a worker's text printable, and truncates it.
fn clean(text: &mut String) {
    *text = printable(text).chars().take(TEXT).collect();
}

/// Checks a message against what the daemon knows about the worker. The error describes what the worker did
/// wrong.
fn check(state: &State, pid: u32, message: &mut FromWorker) -> Result<(), String> {
    let Some(stage) = state.workers.get(&pid).map(|managed| managed.stage) else {
        return Err("is unknown".into());
    };
    let serving = |what: &str| match stage {
        Stage::Serving => Ok(()),
        Stage::Starting | Stage::Idle | Stage::Failed => Err(format!("{what} without a session")),
    };
    match message {
        FromWorker::Sandbox(_) => Err("answered a question that nobody asked".into()),
        FromWorker::Ready { backend, devices, all, .. } => {
            clean(backend);
            devices.iter_mut().for_each(clean);
            for Listed { name, uuid, pci } in &mut *all {
                [name, uuid, pci].into_iter().for_each(clean);
            }
            match &state.serving {
                // What the daemon says of its devices, to clients and to operators, would be wrong.
                Some((serving, _)) if serving != backend => {
                    Err(format!("serves devices with {backend}, and not with {serving} like those before it"))
                }
                Some(_) if state.known.listed() != *all => {
                    Err("numbers the devices otherwise than those before it".into())
                }
                _ => Ok(()),
            }
        }
        FromWorker::Failed { reason, .. } => {
            clean(reason);
            match stage {
                Stage::Starting => Ok(()),
                Stage::Idle | Stage::Serving | Stage::Failed => {
                    Err("said that it cannot start after it had started".into())
                }
            }
        }
        FromWorker::Share { .. } | FromWorker::Unshare { .. } => serving("shared an object"),
        FromWorker::Charge { .. } | FromWorker::Discharge { .. } => serving("charged memory"),
        FromWorker::Open { .. } => serving("opened a shared object"),
        FromWorker::Ticket { .. } => serving("asked for a ticket"),
        FromWorker::Connect { address, .. } => {
            clean(address);
            serving("asked for a connection")
        }
        FromWorker::Processes { .. } => serving("asked for processes"),
        FromWorker::Link { .. } => serving("reported its link"),
        FromWorker::Overrun => serving("reported a kernel"),
        FromWorker::Counters(counters) => {
            serving("reported counters")?;
            // After the session's end, a report that was in transit may be older than the last one.
            match state.sessions.get(&pid).filter(|session| !session.ended) {
                Some(session) if counters.is_before(&session.counters) => {
                    Err("reported counters that run backwards".into())
                }
                _ => Ok(()),
            }
        }
        FromWorker::Ended { lost, .. } => {
            lost.iter_mut().for_each(clean);
            serving("ended")
        }
    }
}

/// A worker reports that it is ready. Only a starting worker may do so; no other may get a session, let alone
/// a second one.
pub(super) fn become_ready(state: &mut State, worker: &Worker) -> Result<Kind, String> {
    match state.workers.get_mut(&worker.pid()) {
        Some(managed) if managed.stage == Stage::Starting => {
            managed.stage = Stage::Idle;
            let kind = managed.kind;
            state.pool_mut(kind).starting -= 1;
            Ok(kind)
        }
        Some(_) => Err("reported twice that it is ready".into()),
        None => Err("is unknown".into()),
    }
}

/// The first worker reports which devices there are. It may have contexts on some that a daemon before this
/// one has found unhealthy, and then gets no session.
fn log_devices(
    state: &mut State,
    options: &Serve,
    pid: u32,
    (backend, devices): (String, Vec<String>),
    all: Vec<Listed>,
) {
    if state.serving.is_none() {
        tracing::info!("serving {} device(s) with {backend}: {}", devices.len(), devices.join(", "));
        let before = state.well(options);
        state.serving = Some((backend, devices));
        state.known = Arc::new(Devices::new(all));
        let well = state.well(options).unwrap_or_else(|| state.devices(options));
        let outdated = before.is_none() && well != state.devices(options);
        state.workers.get_mut(&pid).into_iter().for_each(|managed| managed.outdated = outdated);
    }
}

impl State {
    /// The origin of a worker's session.
    pub(super) fn origin_of(&self, pid: u32) -> Option<String> {
        self.sessions.get(&pid).map(Session::origin)
    }

    /// A worker's session as one that shares something.
    pub(super) fn sharer(&self, worker: u32) -> Option<Sharer> {
        let session = self.sessions.get(&worker)?;
        Some(Sharer { worker, account: session.limits.owner().to_owned(), origin: session.origin() })
    }

    /// The programs that use a device, for a worker's session: those of the same principal, machine and PID
    /// namespace, by process id. A program uses a device while it holds memory there.
    fn processes(&self, asker: u32, device: u32, namespace: u64) -> Reply {
        let Some(origin) = self.origin_of(asker) else { return Reply::Processes(Vec::new()) };
        let of_asker = |worker: &u32, session: &Session| {
            session.kind == Kind::Gpu
                && namespace != 0
                && session.account.meter().namespace.load(Ordering::Relaxed) == namespace
                && self.origin_of(*worker).as_ref() == Some(&origin)
        };
        let mut memory = BTreeMap::<u32, u64>::new();
        for (_, session) in self.sessions.iter().filter(|(worker, session)| of_asker(worker, session)) {
            let held = session.account.held(device as usize);
            if held > 0 {
                let of_process = memory.entry(session.pid).or_default();
                *of_process = of_process.saturating_add(held);
            }
        }
        Reply::Processes(memory.into_iter().take(MOST_PROCESSES).collect())
    }
}

/// Logs that a session was refused something, which its program can ask for any number of times.
fn log_refused(server: &Server, state: &State, pid: u32, what: &str, reply: &Reply) {
    let (Reply::Refused(refusal), Some(session)) = (reply, state.sessions.get(&pid)) else { return };
    let (client, program) = (&session.client, &session.program);
    if let Some(not_shown) = server.log_limits.allow(Some(&session.principal.name), Instant::now()) {
        tracing::info!(worker = pid, client, program, "a session may not {what}: {refusal:?}{not_shown}");
    }
}

fn share(server: &Server, state: &mut State, pid: u32, what: Shared, fd: Option<OwnedFd>) -> Reply {
    let Some(sharer) = state.sharer(pid) else { return Reply::Refused(Refusal::Unknown) };
    let name = |token| kept::share_name(token, pid, &what);
    match state.shares.add(sharer, what.clone(), fd) {
        Ok(Ok(token)) => {
            let kept =
                state.shares.file(&token).map(|fd| server.succession.store.keep_if_room(&name(&token), &fd));
            if let Some(Err(e)) = kept {
                tracing::warn!(worker = pid, "cannot keep a shared object for another daemon: {e}");
            }
            Reply::Shared(token)
        }
        Ok(Err(refusal)) => Reply::Refused(refusal),
        Err(e) => {
            tracing::error!("cannot read random numbers: {e}");
            Reply::Refused(Refusal::Full)
        }
    }
}

/// So many events are noted of a session at least, or half as many again as it has opened, before its list
/// loses those that are no longer shared.
const TIDIED: usize = 64;

fn open(state: &mut State, pid: u32, token: &Token) -> (Reply, Option<Arc<OwnedFd>>) {
    let Some(origin) = state.origin_of(pid) else { return (Reply::Refused(Refusal::Unknown), None) };
    let State { sessions, shares, .. } = state;
    if let Some(session) = sessions.get_mut(&pid).filter(|_| shares.has_event(token)) {
        let opened = shares.opened(pid);
        if opened >= MAX_OF_SESSION {
            return (Reply::Refused(Refusal::Full), None);
        }
        // Nobody gets a slot of an event that is no longer shared. Everybody waits for this.
        if session.opened.len() >= TIDIED.max(opened + opened / 2) {
            session.opened.retain(|(token, _)| shares.has_event(token));
        }
    }
    match state.shares.open(token, pid, &origin) {
        Ok((what, fd, own)) => {
            let owner = state.shares.owner(token).filter(|_| !own);
            if let (Some(owner), Some(session)) = (owner, state.sessions.get_mut(&pid)) {
                session.linked.insert(owner);
            }
            if let (Shared::Event { slot }, false, Some(session)) = (&what, own, state.sessions.get_mut(&pid))
            {
                session.opened.push((*token, *slot));
                state.save_opened(pid);
            }
            (Reply::Opened { what, own }, fd)
        }
        Err(refusal) => (Reply::Refused(refusal), None),
    }
}

/// A worker reports the end of its session. `lost`: why, if its client did not close it. Only the first
/// report counts: each of two threads of a worker may make one.
fn ended(state: &mut State, pid: u32, lost: Option<&str>, counters: Counters) {
    let Some(session) = state.sessions.get_mut(&pid).filter(|session| !session.ended) else { return };
    (session.ended, session.lost) = (true, lost.is_some());
    if !counters.is_before(&session.counters) {
        session.counters = counters;
    }
    let (client, program, token) = (&session.client, &session.program, session.token);
    match lost {
        None => {
            let commands = counters.commands;
            tracing::info!(worker = pid, client, program, commands, "session ends");
        }
        Some(why) => tracing::warn!(worker = pid, client, program, "session lost: {why}"),
    }
    state.remember_end(token, lost.unwrap_or("the session has ended").to_owned());
    state.note_end_of(pid, lost);
    state.sessions_lost += u64::from(lost.is_some());
    state.save(pid);
}

/// A worker that is starting will not be ready: another one may start in its place, although its process may
/// still be there. Returns whether it was starting.
fn fail_to_start(state: &mut State, pid: u32, why: String) -> bool {
    let Some(kind) = state.starting(pid) else { return false };
    let outdated = state.workers.get_mut(&pid).is_some_and(|managed| {
        managed.stage = Stage::Failed;
        managed.outdated
    });
    // These were killed on purpose.
    let on_purpose = state.stopped() || outdated;
    let pool = state.pool_mut(kind);
    pool.starting -= 1;
    if !on_purpose {
        pool.fail(Instant::now(), why);
    }
    true
}

/// Removes a worker whose process has ended. Returns its session, if it had one, and why that ended.
pub(super) fn remove_worker(
    state: &mut State,
    pid: u32,
    clean: bool,
    how: &str,
    broken: Option<String>,
) -> Option<(Session, String)> {
    fail_to_start(state, pid, broken.unwrap_or_else(|| format!("it {how}")));
    let removed = state.workers.remove(&pid);
    let failed = removed.as_ref().is_some_and(|managed| managed.stage == Stage::Failed);
    let kind = removed.as_ref().map_or(Kind::Gpu, |managed| managed.kind);
    let mut tokens: Vec<Token> = state.shares.of(pid).map(|(token, _)| *token).collect();
    state.shares.remove_all_of(pid);
    state.tickets.remove_all_of(pid);
    // These were killed on purpose.
    let draining = state.stopped() || removed.is_some_and(|managed| managed.outdated);
    let pool = state.pool_mut(kind);
    pool.idle.retain(|w| w.pid() != pid);
    // The worker's device memory is free again.
    pool.free = None;
    if pool.full && !failed {
        // There may be room now.
        pool.not_before = None;
    }
    let session = state.sessions.remove(&pid);
    state.swapping.iter_mut().for_each(|swapping| swapping.residency.gone(pid));
    for other in state.sessions.values_mut() {
        other.linked.remove(&pid);
    }
    tokens.extend(session.iter().flat_map(|session| session.account.imports.all().map(|(token, _)| token)));
    state.pass_on_imports(tokens);
    let Some(mut session) = session.filter(|session| session.begun) else {
        if !clean && !draining {
            tracing::warn!(worker = pid, "a worker without a session {how}");
            state.workers_crashed += 1;
        }
        return None;
    };
    state.tokens.remove(&session.token);
    state.publish(session.limits.owner(), ALL_DEVICES);
    if !session.ended {
        state.sessions_lost += 1;
        state.workers_crashed += 1;
        let seconds = session.since.elapsed().as_secs();
        let (client, program) = (&session.client, &session.program);
        tracing::error!(worker = pid, client, program, seconds, "session lost: its worker {how}");
        let reason = format!("the worker of this session on {} {how}", host_name());
        state.remember_end(session.token, reason.clone());
        state.note_end(&session, Some(&reason));
        session.control.iter().for_each(|control| control.bye(&reason));
        session.lost = true;
    }
    state.settle(&session);
    let reason = state.end_of(&session.token).unwrap_or_default().to_owned();
    Some((session, reason))
}

#[cfg(test)]
mod tests {
    use super::super::pool::tests::starting_worker;
    use super::super::queue::tests::session_of_limits;
    use super::*;
    use crate::limits::{Limits, Resource};
    use crate::parent::workers::Managed;
    use crate::shared_event::SharedEvent;
    use sandbox::Report;
    use std::collections::BTreeSet;
    use test_kit::eventually;

    #[test]
    fn a_worker_may_report_ready_only_once() {
        let mut state = State::default();
        let worker = starting_worker(&mut state, 7, Kind::Gpu);
        assert_eq!(become_ready(&mut state, &worker), Ok(Kind::Gpu));
        assert_eq!(state.gpu.starting, 0);
        // Neither while it waits for a session, nor while it has one.
        assert!(become_ready(&mut state, &worker).is_err());
        if let Some(managed) = state.workers.get_mut(&7) {
            managed.stage = Stage::Serving;
        }
        assert!(become_ready(&mut state, &worker).is_err());
        assert!(become_ready(&mut state, &Worker::fake(8)).is_err());
        assert_eq!((state.gpu.starting, state.gpu.idle.len()), (0, 0));
    }

    #[test]
    fn a_session_is_linked_with_those_whose_objects_it_has_opened_until_they_end() {
        let mut state = State::default();
        for worker in [1, 2, 3] {
            state.sessions.insert(worker, session_of_limits(Limits::default()));
        }
        let (what, sharer) = (Shared::Memory { device: 0, size: 1 }, state.sharer(1).unwrap());
        let token = state.shares.add(sharer, what, None).unwrap().unwrap();
        for worker in [1, 2] {
            assert!(matches!(open(&mut state, worker, &token).0, Reply::Opened { .. }));
        }
        let linked =
            |state: &State| [1, 2, 3].map(|worker| state.sessions.get(&worker).map(|s| s.linked.clone()));
        let (none, first) = (BTreeSet::new(), BTreeSet::from([1]));
        assert_eq!(linked(&state), [Some(none.clone()), Some(first), Some(none.clone())]);
        // Another worker may get this number.
        remove_worker(&mut state, 1, true, "ended", None);
        assert_eq!(linked(&state), [None, Some(none.clone()), Some(none)]);
    }

    #[test]
    fn a_server_that_has_served_cuda_does_not_take_a_worker_that_serves_in_software() {
        let mut state = State::default();
        starting_worker(&mut state, 7, Kind::Gpu);
        let ready = |state: &State, backend: &str| {
            let (backend, devices, key) = (backend.into(), Vec::new(), identity::Fingerprint([0; 32]));
            check(state, 7, &mut FromWorker::Ready { backend, devices, all: Vec::new(), free: None, key })
        };
        assert_eq!(ready(&state, "software"), Ok(()), "the first one decides");
        state.serving = Some(("cuda".into(), vec!["NVIDIA H100".into()]));
        assert_eq!(ready(&state, "cuda"), Ok(()));
        assert!(ready(&state, "software").unwrap_err().contains("software"));
    }

    #[test]
    fn devices_keep_the_numbers_that_the_first_worker_has_given_them() {
        let (mut state, options) = (State::default(), Serve::from_flags(&[]));
        starting_worker(&mut state, 7, Kind::Gpu);
        let [a, b] = ["a", "b"].map(Listed::test);
        let ready = |state: &State, all: &[Listed]| {
            let (backend, devices, key) = ("cuda".into(), Vec::new(), identity::Fingerprint([0; 32]));
            let all = all.to_vec();
            check(state, 7, &mut FromWorker::Ready { backend, devices, all, free: None, key })
        };
        assert_eq!(ready(&state, std::slice::from_ref(&b)), Ok(()));
        let devices = vec!["a GPU".into(), "a GPU".into()];
        log_devices(&mut state, &options, 7, ("cuda".into(), devices), vec![a.clone(), b.clone()]);
        assert_eq!(ready(&state, &[a, b.clone()]), Ok(()));
        assert!(ready(&state, &[b]).unwrap_err().contains("otherwise"));
    }

    #[test]
    fn a_worker_that_found_devices_of_which_one_was_unhealthy_before_gets_no_session() {
        use super::super::state::Illness;

        let options = Serve::from_flags(&[]);
        for (ill, kept) in [(1, false), (7, true)] {
            let mut state = State::default();
            let illness = Illness { why: "a test".into(), since: Instant::now(), lasting: true, error: None };
            state.ill.insert(ill, illness);
            let worker = starting_worker(&mut state, 7, Kind::Gpu);
            become_ready(&mut state, &worker).unwrap();
            let devices = vec!["a".into(), "b".into()];
            log_devices(&mut state, &options, 7, ("software".into(), devices), Vec::new());
            assert_eq!(keep_idle(&mut state, &options, &worker, Kind::Gpu), kept);
        }
    }

    /// A worker that is starting, which the daemon listens to, and its end of their socket. Its process never
    /// ends by itself.
    fn starting_process(server: &Arc<Server>) -> (Arc<Worker>, OwnedFd) {
        let (ours, theirs) = worker_protocol::pair().unwrap();
        let command = sandbox::Command::new("/bin/sleep", "sleep").arguments(["1000000"]);
        let process = sandbox::start_unconfined(&command, &[]).unwrap();
        let worker = Arc::new(Worker::new(ours, &process, None, None));
        let mut state = server.lock();
        state.workers.insert(worker.pid(), Managed::starting(&worker, Kind::Gpu, false));
        state.gpu.starting += 1;
        drop(state);
        start_watching(server, &worker, process).unwrap();
        (worker, theirs)
    }

    #[test]
    fn another_worker_may_start_while_one_that_could_not_does_not_end() {
        for (said, why) in [(true, "no driver"), (false, "it has closed its connection and does not end")] {
            let server = queue::tests::server(&[]);
            let (worker, socket) = starting_process(&server);
            if said {
                let failed = FromWorker::Failed { reason: why.into(), full: false };
                worker_protocol::send(socket.as_fd(), &failed, &[]).unwrap();
            }
            drop(socket);
            eventually(|| server.lock().gpu.starting == 0);
            let state = server.lock();
            assert!(state.workers.contains_key(&worker.pid()) && state.gpu.last_failure == why);
            drop(state);
            worker.kill();
            eventually(|| server.lock().workers.is_empty());
            let state = server.lock();
            assert_eq!((state.gpu.starting, state.gpu.failed), (0, 1));
        }
    }

    #[test]
    fn a_workers_messages_must_fit_its_stage() {
        let mut state = State::default();
        starting_worker(&mut state, 7, Kind::Gpu);
        let ended = || FromWorker::Ended { lost: None, counters: Counters::default() };
        let wrong = |state: &State, mut message: FromWorker| check(state, 7, &mut message).is_err();
        for stage in [Stage::Starting, Stage::Failed, Stage::Idle] {
            state.workers.get_mut(&7).unwrap().stage = stage;
            assert!(wrong(&state, ended()));
            assert!(wrong(&state, FromWorker::Counters(Counters::default())));
            assert!(wrong(&state, FromWorker::Open { request: 1, token: [0; 16] }));
            assert!(wrong(&state, FromWorker::Unshare { token: [0; 16] }));
            assert!(wrong(&state, FromWorker::Overrun));
            assert!(wrong(&state, FromWorker::Ticket { request: 1 }));
            let address = "tcp:a".into();
            assert!(wrong(&state, FromWorker::Connect { request: 1, address, encrypted: true }));
            let what = Shared::Memory { device: 0, size: 1 };
            assert!(wrong(&state, FromWorker::Share { request: 1, what }));
        }
        assert!(wrong(&state, FromWorker::Failed { reason: String::new(), full: false }));
        assert!(wrong(&state, FromWorker::Sandbox(Ok(Report::default()))));
        state.workers.get_mut(&7).unwrap().stage = Stage::Serving;
        assert!(!wrong(&state, ended()));
        assert!(wrong(&state, FromWorker::Failed { reason: String::new(), full: true }));
    }

    /// The daemon with two sessions, 7 and 8.
    fn two_sessions() -> State {
        let mut state = State::default();
        for pid in [7, 8] {
            state.sessions.insert(pid, session_of_limits(Limits::default()));
        }
        state
    }

    /// Session 7 shares an event.
    fn shared_by_first(state: &mut State, event: &SharedEvent) -> Token {
        let (sharer, file) = (state.sharer(7).unwrap(), event.file().try_clone().unwrap());
        state.shares.add(sharer, Shared::Event { slot: 0 }, Some(file)).unwrap().unwrap()
    }

    #[test]
    fn events_that_are_gone_are_no_longer_noted_as_opened() {
        let (mut state, event) = (two_sessions(), SharedEvent::new().unwrap());
        let share = |state: &mut State| shared_by_first(state, &event);
        let stays = share(&mut state);
        assert!(matches!(open(&mut state, 8, &stays).0, Reply::Opened { .. }));
        for _ in 0..2000 {
            let passes = share(&mut state);
            assert!(matches!(open(&mut state, 8, &passes).0, Reply::Opened { .. }));
            state.shares.remove(&passes, 7);
        }
        let opened = &state.sessions[&8].opened;
        assert!(opened.len() <= TIDIED && opened.contains(&(stays, 1)), "{}", opened.len());
    }

    #[test]
    fn a_client_with_many_names_leaves_room_for_what_others_share() {
        let server = queue::tests::server(&[]);
        let mut state = server.lock();
        let mut share = |worker: u32, principal: &str| {
            if !state.sessions.contains_key(&worker) {
                let mut session = session_of_limits(Limits::test(principal));
                session.client = format!("name {worker}");
                state.sessions.insert(worker, session);
            }
            let what = Shared::Memory { device: 0, size: 1 };
            matches!(super::share(&server, &mut state, worker, what, None), Reply::Shared(_))
        };
        // Also under leases.
        for worker in 0.. {
            let principal = if worker % 2 == 0 { "a".to_owned() } else { format!("a {worker}") };
            if !share(worker, &principal) {
                break;
            }
            while share(worker, &principal) {}
        }
        assert!(share(u32::MAX, "b"));
    }

    #[test]
    fn a_session_keeps_only_so_many_events_of_others_open() {
        let (mut state, event) = (two_sessions(), SharedEvent::new().unwrap());
        let tokens: Vec<Token> = (0..20).map(|_| shared_by_first(&mut state, &event)).collect();
        let opened = |state: &mut State| {
            tokens
                .iter()
                .flat_map(|token| (0..500).map(move |_| token))
                .take_while(|token| matches!(open(state, 8, token).0, Reply::Opened { .. }))
                .count()
        };
        assert_eq!(opened(&mut state), MAX_OF_SESSION);
        // A refusal costs little, even if some of those that were noted are gone.
        let gone = vec![([9; 16], 1); TIDIED];
        state.sessions.get_mut(&8).unwrap().opened.extend(gone);
        assert!(matches!(open(&mut state, 8, &tokens[19]).0, Reply::Refused(Refusal::Full)));
        assert_eq!(state.sessions[&8].opened.len(), MAX_OF_SESSION + TIDIED, "nobody has looked for them");
        state.shares.remove(&tokens[0], 7);
        assert!(matches!(open(&mut state, 8, &tokens[19]).0, Reply::Opened { .. }), "there is room again");
    }

    #[test]
    fn imported_memory_counts_for_who_has_it_when_the_session_that_shared_it_ends() {
        let (mut state, device) = (two_sessions(), Resource::Device(0));
        assert!(matches!(state.charge(7, 1, device, 60, None), Reply::Charged));
        let (what, sharer) = (Shared::Memory { device: 0, size: 60 }, state.sharer(7).unwrap());
        let token = state.shares.add(sharer, what, None).unwrap().unwrap();
        assert!(matches!(state.charge(8, 1, device, 60, Some(token)), Reply::Charged));
        assert_eq!(state.sessions[&8].account.counted(0), 0);
        remove_worker(&mut state, 7, true, "ended", None);
        assert_eq!(state.sessions[&8].account.counted(0), 60);
    }

    #[test]
    fn the_first_report_of_a_sessions_end_counts() {
        let mut state = State::default();
        state.sessions.insert(7, session_of_limits(Limits::default()));
        let token = state.sessions[&7].token;
        ended(&mut state, 7, Some("a test"), Counters::default());
        ended(&mut state, 7, None, Counters::default());
        assert_eq!(state.end_of(&token), Some("a test"));
        assert!(state.sessions[&7].lost && state.sessions_lost == 1);
    }

    #[test]
    fn what_a_worker_may_send_at_any_time_wakes_no_other_thread() {
        let frequent = [
            FromWorker::Counters(Counters::default()),
            FromWorker::Link { up: true },
            FromWorker::Overrun,
            FromWorker::Unshare { token: [1; 16] },
            FromWorker::Processes { request: 1, device: 0, namespace: 0 },
        ];
        assert!(!frequent.iter().any(wakes_others));
        assert!(wakes_others(&FromWorker::Ended { lost: None, counters: Counters::default() }));
    }

    #[test]
    fn a_flood_of_messages_is_read_at_a_limited_rate() {
        let mut now = Instant::now();
        let mut budget = Budget::new(now);
        let at_once = (0..100_000).take_while(|_| budget.take(now).is_zero()).count();
        assert_eq!(at_once, MESSAGES.0 as usize);
        let start = now;
        (0..MESSAGES.1 as usize).for_each(|_| now += budget.take(now));
        assert!(now - start >= Duration::from_millis(990), "{:?}", now - start);
    }

    #[test]
    fn a_workers_text_cannot_write_lines_of_the_log() {
        let mut text = format!("a\nERROR forged\x1b[2J{}", "x".repeat(5000));
        clean(&mut text);
        assert!(text.starts_with("a?ERROR forged?[2J") && text.len() == TEXT, "{text}");
    }
}
