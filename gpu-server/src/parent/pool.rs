//! Worker processes: started ahead of need, watched until they end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::Pid;

use super::queue::{self, Parked};
use super::{Server, State};
use crate::cli::Serve;
use crate::ipc::{self, FromWorker, Kind, ToWorker};
use crate::share::{Refusal, Reply, Shared, Token, origin};

/// After a worker failed to prepare, the next is tried after this long, doubled for each failure in a row up to [`MOST`].
const FIRST: Duration = Duration::from_millis(250);
const MOST: Duration = Duration::from_secs(10);
/// After so many failures in a row, whoever waits is refused.
pub(super) const GIVE_UP: u32 = 5;
/// On a device without memory for another context, the next is tried after this long, or when a session ends.
const FULL: Duration = Duration::from_secs(1);
/// Bytes of device memory that a context takes, with some to spare: 530 MiB on an H100.
const CONTEXT: u64 = 640 << 20;

/// A worker process.
pub(super) struct Worker {
    pid: u32,
    socket: OwnedFd,
}

impl Worker {
    /// One that is no process, and never reads what it is sent.
    #[cfg(test)]
    pub(super) fn made_up(pid: u32) -> Arc<Worker> {
        let (socket, other_end) = ipc::pair().unwrap();
        std::mem::forget(other_end);
        Arc::new(Worker { pid, socket })
    }

    /// Its process id.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Answers one of its requests.
    fn answer(&self, request: u64, reply: Reply, fd: Option<&OwnedFd>) {
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        // A worker that is gone is seen by its watcher.
        let _ = ipc::send(self.socket.as_fd(), &ToWorker::Reply { request, reply }, &fds);
    }

    /// Sends it a message with a descriptor.
    pub(super) fn send(&self, message: &ToWorker, fd: BorrowedFd<'_>) -> io::Result<()> {
        ipc::send(self.socket.as_fd(), message, &[fd])
    }

    /// Closes the connection to it: it then ends by itself, its session told.
    pub(super) fn hang_up(&self) {
        // It may have ended already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Write);
    }

    /// Ends it at once.
    pub(super) fn kill(&self) {
        // Called with the state's lock held and the worker in its table: it has not been waited for, so the id is still its own.
        let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGKILL);
    }
}

/// A worker process and how far it has come.
pub(super) struct Managed {
    pub(super) worker: Arc<Worker>,
    kind: Kind,
    pub(super) stage: Stage,
}

/// How far a worker has come. It never goes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It prepares.
    Starting,
    /// It is, or was, ready for a session.
    Idle,
    /// It has its session.
    Serving,
}

/// The workers of one kind that have no session, and the clients that wait for them.
#[derive(Default)]
pub(super) struct Pool {
    /// Ready for a session.
    pub(super) idle: VecDeque<Arc<Worker>>,
    /// Waiting for one of these, in the order in which they came.
    pub(super) queue: VecDeque<Parked>,
    /// Workers that prepare.
    pub(super) starting: usize,
    /// Sessions that had a worker, ever.
    pub(super) begun: u64,
    /// When a session began or a worker became ready last.
    pub(super) moved: Option<Instant>,
    /// Workers that failed to prepare, one after the other.
    pub(super) failures: u32,
    /// Workers that failed to prepare, ever.
    pub(super) failed: u64,
    /// Why the last of them did.
    pub(super) last_failure: String,
    /// The device had no memory for another context when one was last made: what else is running has it.
    full: bool,
    /// No worker is started before.
    not_before: Option<Instant>,
    /// Bytes that were free on the device when the last worker became ready, if nothing has ended since.
    free: Option<u64>,
}

/// Keeps the pools filled from now on. Every worker is started by the one thread that this makes, because the kernel ends them when that thread ends.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    std::thread::Builder::new()
        .name("rgpu-pool".into())
        .spawn(move || keep(&server))
        .context("starting the pool")?;
    Ok(())
}

fn keep(server: &Arc<Server>) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).max(2);
    loop {
        let kind = {
            let mut state = server.lock();
            loop {
                let now = Instant::now();
                match next_of_all(&state, &server.options, cores, now) {
                    Some(Next::Start(kind)) => {
                        state.pool_mut(kind).starting += 1;
                        break kind;
                    }
                    Some(Next::At(when)) => {
                        let pause = when.saturating_duration_since(now);
                        let waited = server.changed.wait_timeout(state, pause);
                        state = waited.unwrap_or_else(|e| e.into_inner()).0;
                    }
                    None => state = server.changed.wait(state).unwrap_or_else(|e| e.into_inner()),
                }
            }
        };
        if let Err(e) = start_one(server, kind) {
            tracing::error!("cannot start a worker: {e:#}");
            let mut state = server.lock();
            let pool = state.pool_mut(kind);
            pool.starting -= 1;
            pool.fail(Instant::now(), format!("{e:#}"));
            drop(state);
            server.nudge.nudge();
        }
    }
}

/// What is to be done for a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Start a worker now.
    Start(Kind),
    /// One is needed, but not started before then.
    At(Instant),
}

/// A worker that can start now comes before one that has to wait.
fn next_of_all(state: &State, options: &Serve, cores: usize, now: Instant) -> Option<Next> {
    let all: Vec<Next> =
        Kind::ALL.into_iter().filter_map(|kind| next(state, options, kind, cores, now)).collect();
    let start = all.iter().find(|next| matches!(next, Next::Start(_))).copied();
    start.or_else(|| {
        let times = all.iter().filter_map(|next| match next {
            Next::At(when) => Some(*when),
            Next::Start(_) => None,
        });
        times.min().map(Next::At)
    })
}

/// As many workers as clients wait for, and the spare ones; no more at a time than there are cores, nor than the device has memory for.
fn next(state: &State, options: &Serve, kind: Kind, cores: usize, now: Instant) -> Option<Next> {
    if state.draining || state.fatal.is_some() {
        return None;
    }
    let pool = state.pool(kind);
    let spare = match kind {
        Kind::Nvml => 0,
        Kind::Gpu if pool.begun == 0 => options.first_workers.unwrap_or(options.workers),
        Kind::Gpu => options.workers,
    };
    if pool.idle.len() + pool.starting >= pool.queue.len() + spare {
        return None;
    }
    // After a failure, or on a device that is full, one worker at a time tries.
    let careful = pool.failures > 0 || pool.full;
    let fit = pool.free.map_or(usize::MAX, |free| usize::try_from(free / CONTEXT).unwrap_or(usize::MAX));
    let most = if careful { 1 } else { cores.min(fit.max(1)) };
    if pool.starting >= most {
        return None;
    }
    match pool.not_before {
        Some(when) if when > now => Some(Next::At(when)),
        _ => Some(Next::Start(kind)),
    }
}

impl Pool {
    /// A worker could not be started, or died before it was ready.
    fn fail(&mut self, now: Instant, why: String) {
        self.failed += 1;
        self.last_failure = why;
        if self.full {
            self.not_before = Some(now + FULL);
        } else {
            self.failures = self.failures.saturating_add(1);
            self.not_before = Some(now + FIRST.saturating_mul(1 << self.failures.min(10)).min(MOST));
        }
    }

    /// A worker became ready.
    fn succeed(&mut self, now: Instant, free: Option<u64>) {
        (self.failures, self.full, self.not_before, self.free) = (0, false, None, free);
        self.last_failure.clear();
        self.moved = Some(now);
    }
}

fn start_one(server: &Arc<Server>, kind: Kind) -> anyhow::Result<()> {
    let (ours, theirs) = ipc::pair().context("a socket pair")?;
    let child = spawn(server, &theirs)?;
    drop(theirs);
    let worker = Arc::new(Worker { pid: child.id(), socket: ours });
    {
        let mut state = server.lock();
        let managed = Managed { worker: Arc::clone(&worker), kind, stage: Stage::Starting };
        state.workers.insert(worker.pid, managed);
        if state.draining {
            worker.kill();
        }
    }
    let watcher = Arc::clone(server);
    let watched = Arc::clone(&worker);
    let watching = std::thread::Builder::new()
        .name("rgpu-watch".into())
        .spawn(move || watch(&watcher, &watched, child))
        .context("a thread for a worker");
    if let Err(e) = watching {
        // Nobody would notice its end. It ends by itself, as its socket is closed.
        server.lock().workers.remove(&worker.pid);
        return Err(e);
    }
    let prepare = ToWorker::Prepare { kind, options: server.options.worker.clone() };
    // A worker that is gone already is seen by its watcher.
    let _ = ipc::send(worker.socket.as_fd(), &prepare, &[]);
    Ok(())
}

fn spawn(server: &Server, socket: &OwnedFd) -> anyhow::Result<Child> {
    let fd = socket.as_raw_fd();
    let parent = nix::unistd::getpid();
    // The file that this process was started from, even if another has taken its name since.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("rgpu-server")
        .args(["worker", "--fd", &fd.to_string(), "--log", &server.options.log])
        .stdin(Stdio::null());
    // Loads a module's functions when they are first used, unless the operator chose otherwise.
    if std::env::var_os("CUDA_MODULE_LOADING").is_none() {
        command.env("CUDA_MODULE_LOADING", "LAZY");
    }
    let before_exec = move || {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        SigSet::empty().thread_set_mask()?;
        // SAFETY: plain system call on a descriptor that this process holds open.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // What the driver maps by itself, managed variables among it, must be free in the client as well: programs have theirs at the top of the addresses, so a worker's
        // lie at the bottom (personality(2), setarch(8) -L). Where it is refused they are where they would be.
        // SAFETY: plain system call.
        unsafe { libc::personality(libc::ADDR_COMPAT_LAYOUT as libc::c_ulong) };
        // The daemon may have died before the request above.
        if nix::unistd::getppid() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes async-signal-safe system calls only, and allocates nothing.
    unsafe { command.pre_exec(before_exec) };
    command.spawn().context("starting a worker process")
}

fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name = Signal::try_from(signal).map_or_else(|_| String::new(), |s| format!(" ({s})"));
            format!("was killed by signal {signal}{name}")
        }
        (None, Some(code)) => format!("exited with status {code}"),
        (None, None) => "ended".into(),
    }
}

/// Follows a worker from its start to its end.
fn watch(server: &Arc<Server>, worker: &Arc<Worker>, mut child: Child) {
    let pid = worker.pid;
    let mut broken = None;
    loop {
        let (message, fds) = match ipc::receive::<FromWorker>(worker.socket.as_fd()) {
            Ok(Some((message, fds))) => (message, fds),
            Ok(None) => break,
            Err(e) => {
                tracing::warn!(worker = pid, "bad message from a worker: {e}");
                break;
            }
        };
        let mut state = server.lock();
        match message {
            FromWorker::Ready { backend, devices, free } => match become_ready(&mut state, worker) {
                Ok(kind) => {
                    tell_serving(&mut state, backend, devices);
                    state.pool_mut(kind).succeed(Instant::now(), free);
                    let keep = take_in(&mut state, &server.options, worker, kind);
                    drop(state);
                    if keep {
                        queue::serve(server, kind);
                    }
                }
                Err(why) => {
                    broken = Some(why);
                    worker.kill();
                    break;
                }
            },
            FromWorker::Failed { reason, full } => {
                let first = state.serving.is_none();
                if let Some(kind) = state.starting(pid) {
                    tracing::error!(worker = pid, "a worker cannot prepare: {reason}");
                    if first && kind == Kind::Gpu {
                        state.fatal = Some(reason.clone());
                    }
                    // Without another session on the device, waiting for memory would be in vain.
                    let others = state.sessions.values().any(|session| session.kind == Kind::Gpu)
                        || !state.gpu.idle.is_empty();
                    state.pool_mut(kind).full = full && others;
                    broken = Some(reason);
                }
            }
            FromWorker::Share { request, what } => {
                let reply = share(&mut state, pid, what, fds.into_iter().next());
                drop(state);
                worker.answer(request, reply, None);
                continue;
            }
            FromWorker::Open { request, token } => {
                let (reply, fd) = open(&state, pid, &token);
                drop(state);
                worker.answer(request, reply, fd.as_deref());
                continue;
            }
            FromWorker::Unshare { token } => state.shares.remove(&token, pid),
            FromWorker::Counters(counters) => {
                if let Some(session) = state.sessions.get_mut(&pid) {
                    session.counters = counters;
                }
            }
            FromWorker::Ended { lost, counters } => {
                let mut counted = false;
                if let Some(session) = state.sessions.get_mut(&pid).filter(|session| !session.ended) {
                    session.ended = true;
                    session.counters = counters;
                    counted = lost.is_some();
                    let (client, program) = (&session.client, &session.program);
                    match &lost {
                        None => tracing::info!(
                            worker = pid,
                            client,
                            program,
                            commands = counters.commands,
                            "session ends"
                        ),
                        Some(why) => tracing::warn!(worker = pid, client, program, "session lost: {why}"),
                    }
                }
                state.sessions_lost += u64::from(counted);
            }
        }
        server.changed.notify_all();
    }
    let ended = child.wait();
    let how = ended.as_ref().map_or_else(|e| e.to_string(), |status| describe(*status));
    let clean = ended.is_ok_and(|status| status.success());
    bury(&mut server.lock(), pid, clean, &how, broken);
    server.changed.notify_all();
    server.nudge.nudge();
}

/// A worker says that it is ready. Only one that was preparing can be: any other is not to be trusted with a session, least of all with a second one.
fn become_ready(state: &mut State, worker: &Worker) -> Result<Kind, String> {
    match state.workers.get_mut(&worker.pid) {
        Some(managed) if managed.stage == Stage::Starting => {
            managed.stage = Stage::Idle;
            let kind = managed.kind;
            state.pool_mut(kind).starting -= 1;
            Ok(kind)
        }
        Some(managed) => {
            let stage = managed.stage;
            tracing::error!(worker = worker.pid, ?stage, "a worker says again that it is ready: killed");
            Err("said twice that it was ready".into())
        }
        None => Err("is not known".into()),
    }
}

fn tell_serving(state: &mut State, backend: String, devices: Vec<String>) {
    if state.serving.is_none() {
        tracing::info!("serving {} device(s) by {backend}: {}", devices.len(), devices.join(", "));
        state.serving = Some((backend, devices));
    }
}

/// Keeps a worker that is ready, unless nobody needs it: those whom it was started for may have left.
fn take_in(state: &mut State, options: &Serve, worker: &Arc<Worker>, kind: Kind) -> bool {
    let draining = state.draining;
    let pool = state.pool_mut(kind);
    let spare = match kind {
        Kind::Gpu => options.workers.max(options.first_workers.unwrap_or(0)),
        Kind::Nvml => 0,
    };
    if draining || pool.idle.len() >= pool.queue.len() + spare {
        worker.hang_up();
        return false;
    }
    pool.idle.push_back(Arc::clone(worker));
    true
}

fn origin_of(state: &State, pid: u32) -> Option<String> {
    state.sessions.get(&pid).map(|session| origin(&session.peer, &session.client))
}

fn share(state: &mut State, pid: u32, what: Shared, fd: Option<OwnedFd>) -> Reply {
    let Some(origin) = origin_of(state, pid) else { return Reply::Refused(Refusal::Unknown) };
    match state.shares.add(pid, origin, what, fd) {
        Ok(Ok(token)) => Reply::Shared(token),
        Ok(Err(refusal)) => {
            tracing::warn!(worker = pid, "a session shares more than can be kept");
            Reply::Refused(refusal)
        }
        Err(e) => {
            tracing::error!("no random numbers: {e}");
            Reply::Refused(Refusal::Full)
        }
    }
}

fn open(state: &State, pid: u32, token: &Token) -> (Reply, Option<Arc<OwnedFd>>) {
    match origin_of(state, pid).and_then(|origin| state.shares.find(token, pid, &origin)) {
        Some((what, fd, own)) => (Reply::Opened { what, own }, fd),
        None => {
            tracing::info!(worker = pid, "asked for something shared that this client has not");
            (Reply::Refused(Refusal::Unknown), None)
        }
    }
}

fn bury(state: &mut State, pid: u32, clean: bool, how: &str, broken: Option<String>) {
    let starting = state.starting(pid);
    let kind = state.workers.remove(&pid).map_or(Kind::Gpu, |managed| managed.kind);
    state.shares.forget(pid);
    let draining = state.draining;
    let pool = state.pool_mut(kind);
    pool.idle.retain(|w| w.pid != pid);
    // Its memory is free again.
    pool.free = None;
    if starting.is_some() {
        pool.starting -= 1;
        if !draining {
            pool.fail(Instant::now(), broken.unwrap_or_else(|| format!("it {how}")));
        }
    } else if pool.full {
        // A session has ended, or a worker: there may be room now.
        pool.not_before = None;
    }
    let Some(session) = state.sessions.remove(&pid).filter(|session| session.begun) else {
        if !clean && !draining {
            tracing::warn!(worker = pid, "a worker without a session {how}");
            state.workers_crashed += 1;
        }
        return;
    };
    state.tokens.remove(&session.token);
    if !session.ended {
        state.sessions_lost += 1;
        state.workers_crashed += 1;
        let seconds = session.since.elapsed().as_secs();
        let (client, program) = (&session.client, &session.program);
        tracing::error!(worker = pid, client, program, seconds, "session lost: its worker {how}");
        let reason = format!("the worker of this session on {} {how}", super::host_name());
        // In a thread of its own: the client may take its time, and the state is locked.
        let control = session.control;
        let farewell =
            std::thread::Builder::new().name("rgpu-bye".into()).spawn(move || control.bye(&reason));
        if farewell.is_err() {
            tracing::debug!("no thread to tell a client; it learns by its closed connection");
        }
    }
}

impl State {
    /// What a worker is for, while it prepares.
    fn starting(&self, pid: u32) -> Option<Kind> {
        self.workers.get(&pid).filter(|managed| managed.stage == Stage::Starting).map(|managed| managed.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(flags: &[&str]) -> Serve {
        Serve::from_flags(flags)
    }

    /// How many workers are started at once.
    fn started(state: &mut State, options: &Serve, kind: Kind, cores: usize, now: Instant) -> usize {
        let mut count = 0;
        while next(state, options, kind, cores, now) == Some(Next::Start(kind)) {
            state.pool_mut(kind).starting += 1;
            count += 1;
        }
        count
    }

    fn waiting(state: &mut State, count: usize, kind: Kind) {
        for _ in 0..count {
            state.pool_mut(kind).queue.push_back(Parked::made_up());
        }
    }

    fn starting_worker(state: &mut State, pid: u32, kind: Kind) -> Arc<Worker> {
        let worker = Worker::made_up(pid);
        let managed = Managed { worker: Arc::clone(&worker), kind, stage: Stage::Starting };
        state.workers.insert(pid, managed);
        state.pool_mut(kind).starting += 1;
        worker
    }

    #[test]
    fn as_many_workers_start_as_clients_wait_for_and_the_spare_ones() {
        let (mut state, now) = (State::default(), Instant::now());
        waiting(&mut state, 32, Kind::Gpu);
        assert_eq!(started(&mut state, &options(&["--workers=2"]), Kind::Gpu, 64, now), 34);
        let mut state = State::default();
        waiting(&mut state, 32, Kind::Gpu);
        assert_eq!(started(&mut state, &options(&[]), Kind::Gpu, 16, now), 16, "no more than cores");
        state.gpu.starting = 0;
        state.gpu.free = Some(5 * CONTEXT + 1);
        assert_eq!(started(&mut state, &options(&[]), Kind::Gpu, 16, now), 5, "no more than fit");
    }

    #[test]
    fn a_private_server_makes_one_worker_ready_and_no_spare_one() {
        let (mut state, now) = (State::default(), Instant::now());
        let options = options(&["--workers=0", "--first-workers=1"]);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 1);
        (state.gpu.starting, state.gpu.begun) = (0, 1);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 0);
        waiting(&mut state, 3, Kind::Gpu);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 3);
    }

    #[test]
    fn workers_for_nvml_start_on_demand_only() {
        let (mut state, now) = (State::default(), Instant::now());
        assert_eq!(started(&mut state, &options(&[]), Kind::Nvml, 8, now), 0);
        waiting(&mut state, 2, Kind::Nvml);
        assert_eq!(started(&mut state, &options(&[]), Kind::Nvml, 8, now), 2);
    }

    #[test]
    fn after_a_failure_workers_start_one_at_a_time_and_later_and_later() {
        let (mut state, mut now) = (State::default(), Instant::now());
        let options = options(&[]);
        waiting(&mut state, 8, Kind::Gpu);
        let mut pause = Duration::ZERO;
        for failure in 1..8 {
            starting_worker(&mut state, failure, Kind::Gpu);
            bury(&mut state, failure, false, "exited", None);
            let Some(Next::At(when)) = next(&state, &options, Kind::Gpu, 16, Instant::now()) else {
                panic!("no pause after {failure} failures")
            };
            let longer = when.saturating_duration_since(Instant::now());
            assert!(longer > pause || longer > MOST / 2);
            (pause, now) = (longer, when);
            assert_eq!(started(&mut state, &options, Kind::Gpu, 16, now), 1);
            state.gpu.starting = 0;
        }
        state.gpu.succeed(now, None);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 16, now), 10);
    }

    #[test]
    fn nvml_does_not_wait_for_the_pause_after_a_failure() {
        let (mut state, options) = (State::default(), options(&[]));
        starting_worker(&mut state, 1, Kind::Gpu);
        bury(&mut state, 1, false, "exited", None);
        let now = Instant::now();
        assert!(matches!(next_of_all(&state, &options, 16, now), Some(Next::At(_))));
        waiting(&mut state, 1, Kind::Nvml);
        assert_eq!(next_of_all(&state, &options, 16, now), Some(Next::Start(Kind::Nvml)));
    }

    #[test]
    fn a_full_device_is_tried_again_when_something_ends() {
        let (mut state, options) = (State::default(), options(&[]));
        waiting(&mut state, 8, Kind::Gpu);
        starting_worker(&mut state, 1, Kind::Gpu);
        state.gpu.full = true;
        bury(&mut state, 1, true, "exited", Some("no memory for its context".into()));
        assert_eq!(state.gpu.failures, 0);
        let now = Instant::now();
        assert!(matches!(next(&state, &options, Kind::Gpu, 16, now), Some(Next::At(_))));
        let other = starting_worker(&mut state, 2, Kind::Gpu);
        become_ready(&mut state, &other).unwrap();
        bury(&mut state, 2, true, "exited", None);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 16, now), 1);
    }

    #[test]
    fn a_worker_is_ready_once() {
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
        assert!(become_ready(&mut state, &Worker::made_up(8)).is_err());
        assert_eq!((state.gpu.starting, state.gpu.idle.len()), (0, 0));
    }

    #[test]
    fn a_worker_that_nobody_waits_for_any_more_is_sent_home() {
        let (mut state, options) = (State::default(), options(&["--workers=1"]));
        let workers: Vec<_> = (0..3).map(|pid| starting_worker(&mut state, pid, Kind::Gpu)).collect();
        let kept: Vec<bool> = workers
            .iter()
            .map(|worker| {
                become_ready(&mut state, worker).unwrap();
                take_in(&mut state, &options, worker, Kind::Gpu)
            })
            .collect();
        assert_eq!(kept, [true, false, false]);
        assert_eq!(state.gpu.idle.len(), 1);
    }
}
