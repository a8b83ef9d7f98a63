//! Worker processes: the daemon starts them ahead of need and watches them until they end.

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
use crate::config::Serve;
use crate::cuda_ipc::{Refusal, Reply, Shared, Token, origin};
use crate::worker_protocol::{self, FromWorker, Kind, ToWorker};

/// How long to wait after a worker failed to start. Doubled for each failure in a row, up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause after a failure.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// After this many failures in a row, waiting clients are refused.
pub(super) const GIVE_UP: u32 = 5;
/// How long to wait before the next try on a device without memory for another context. The end of a session shortens it.
const FULL_PAUSE: Duration = Duration::from_secs(1);
/// Device memory that a context takes, in bytes, with a margin. On an H100 it is 530 MiB.
const CONTEXT: u64 = 640 << 20;

/// A worker process.
pub(super) struct Worker {
    pid: u32,
    socket: OwnedFd,
}

impl Worker {
    /// A worker for tests, without a process, that never reads its messages.
    #[cfg(test)]
    pub(super) fn fake(pid: u32) -> Arc<Worker> {
        let (socket, other_end) = worker_protocol::pair().unwrap();
        std::mem::forget(other_end);
        Arc::new(Worker { pid, socket })
    }

    /// Its process id.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Answers one of the worker's requests.
    fn answer(&self, request: u64, reply: Reply, fd: Option<&OwnedFd>) {
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        // The watcher notices when the worker is gone.
        let _ = worker_protocol::send(self.socket.as_fd(), &ToWorker::Reply { request, reply }, &fds);
    }

    /// Sends a message with descriptors.
    pub(super) fn send(&self, message: &ToWorker, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        worker_protocol::send(self.socket.as_fd(), message, fds)
    }

    /// Closes the connection to the worker, which then tells its session and exits.
    pub(super) fn hang_up(&self) {
        // It may have ended already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Write);
    }

    /// Kills the worker.
    pub(super) fn kill(&self) {
        // The caller holds the state's lock, and the worker is in the table: it has not been waited for, so the process id is still its own.
        let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGKILL);
    }
}

/// A worker process and its stage.
pub(super) struct Managed {
    pub(super) worker: Arc<Worker>,
    kind: Kind,
    pub(super) stage: Stage,
}

/// The stages of a worker, which it goes through in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It is starting.
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
    /// Clients that wait for a worker, in order of arrival.
    pub(super) queue: VecDeque<Parked>,
    /// Number of workers that are starting.
    pub(super) starting: usize,
    /// Number of sessions that have begun.
    pub(super) begun: u64,
    /// When a session last began or a worker last became ready.
    pub(super) moved: Option<Instant>,
    /// Number of workers in a row that failed to start.
    pub(super) failures: u32,
    /// Number of workers that failed to start.
    pub(super) failed: u64,
    /// Why the last one failed.
    pub(super) last_failure: String,
    /// Whether the device had no memory for another context at the last try.
    full: bool,
    /// No worker is started before this time.
    not_before: Option<Instant>,
    /// Free bytes on the device when the last worker became ready, if no worker has ended since.
    free: Option<u64>,
}

/// Starts the thread that keeps the pools filled. That thread starts every worker, because the kernel kills a worker when the thread that started it ends.
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

/// The next step for a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Start a worker now.
    Start(Kind),
    /// A worker is needed, but may not start before this time.
    At(Instant),
}

/// The next step for all pools. A worker that can start now comes before one that has to wait.
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

/// The next step for one pool: it needs a worker for each waiting client and the spare ones. At most as many start at the same time as there are cores, and as fit into the device's memory.
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
    // After a failure, or on a full device, one worker at a time is tried.
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
    /// A worker could not be started or died before it was ready.
    fn fail(&mut self, now: Instant, why: String) {
        self.failed += 1;
        self.last_failure = why;
        if self.full {
            self.not_before = Some(now + FULL_PAUSE);
        } else {
            self.failures = self.failures.saturating_add(1);
            self.not_before =
                Some(now + FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(MAX_PAUSE));
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
    let (ours, theirs) = worker_protocol::pair().context("creating a socket pair")?;
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
        .context("starting a thread for a worker");
    if let Err(e) = watching {
        // No thread would notice its end. It exits by itself when its socket is closed.
        server.lock().workers.remove(&worker.pid);
        return Err(e);
    }
    let prepare = ToWorker::Prepare { kind, options: server.options.worker.clone() };
    // The watcher notices when the worker is gone.
    let _ = worker_protocol::send(worker.socket.as_fd(), &prepare, &[]);
    Ok(())
}

fn spawn(server: &Server, socket: &OwnedFd) -> anyhow::Result<Child> {
    let fd = socket.as_raw_fd();
    let parent = nix::unistd::getpid();
    // The executable that this process was started from, even if the file has been replaced since.
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
        // SAFETY: a plain system call on a descriptor that this process holds open.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // What the driver maps by itself, such as managed variables, needs addresses that are free in the client, too. Programs map at the top of the address space, so a worker
        // maps at the bottom (personality(2), setarch(8) -L). If the call is refused, the usual layout remains.
        // SAFETY: a plain system call.
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

/// Receives a worker's messages until it ends.
fn watch(server: &Arc<Server>, worker: &Arc<Worker>, mut child: Child) {
    let pid = worker.pid;
    let mut broken = None;
    loop {
        let (message, fds) = match worker_protocol::receive::<FromWorker>(worker.socket.as_fd()) {
            Ok(Some((message, fds))) => (message, fds),
            Ok(None) => break,
            Err(e) => {
                tracing::warn!(worker = pid, "invalid message from a worker: {e}");
                break;
            }
        };
        let mut state = server.lock();
        match message {
            FromWorker::Ready { backend, devices, free } => match become_ready(&mut state, worker) {
                Ok(kind) => {
                    log_devices(&mut state, backend, devices);
                    state.pool_mut(kind).succeed(Instant::now(), free);
                    let keep = keep_idle(&mut state, &server.options, worker, kind);
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
                    tracing::error!(worker = pid, "a worker cannot start: {reason}");
                    if first && kind == Kind::Gpu {
                        state.fatal = Some(reason.clone());
                    }
                    // Memory can only become free when another session or worker on the device ends.
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
            FromWorker::Charge { request, resource, bytes } => {
                let reply = state.charge(pid, resource, bytes);
                drop(state);
                worker.answer(request, reply, None);
                continue;
            }
            FromWorker::Discharge { resource, bytes } => {
                state.discharge(pid, resource, bytes);
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
    remove_worker(&mut server.lock(), pid, clean, &how, broken);
    // Its devices may be what a client waits for.
    queue::serve(server, Kind::Gpu);
    server.changed.notify_all();
    server.nudge.nudge();
}

/// A worker reports that it is ready. Only a worker that is starting may do so; another one must not get a session, let alone a second one.
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
            tracing::error!(worker = worker.pid, ?stage, "a worker reported twice that it is ready; killed");
            Err("reported twice that it is ready".into())
        }
        None => Err("is unknown".into()),
    }
}

fn log_devices(state: &mut State, backend: String, devices: Vec<String>) {
    if state.serving.is_none() {
        tracing::info!("serving {} device(s) with {backend}: {}", devices.len(), devices.join(", "));
        state.serving = Some((backend, devices));
    }
}

/// Keeps a worker that is ready, unless no client needs it any more.
fn keep_idle(state: &mut State, options: &Serve, worker: &Arc<Worker>, kind: Kind) -> bool {
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
            tracing::warn!(worker = pid, "a session has reached its maximum of shared objects");
            Reply::Refused(refusal)
        }
        Err(e) => {
            tracing::error!("cannot read random numbers: {e}");
            Reply::Refused(Refusal::Full)
        }
    }
}

fn open(state: &State, pid: u32, token: &Token) -> (Reply, Option<Arc<OwnedFd>>) {
    match origin_of(state, pid).and_then(|origin| state.shares.find(token, pid, &origin)) {
        Some((what, fd, own)) => (Reply::Opened { what, own }, fd),
        None => {
            tracing::info!(worker = pid, "a session asked for a shared object that its client does not have");
            (Reply::Refused(Refusal::Unknown), None)
        }
    }
}

fn remove_worker(state: &mut State, pid: u32, clean: bool, how: &str, broken: Option<String>) {
    let starting = state.starting(pid);
    let kind = state.workers.remove(&pid).map_or(Kind::Gpu, |managed| managed.kind);
    state.shares.remove_all_of(pid);
    let draining = state.draining;
    let pool = state.pool_mut(kind);
    pool.idle.retain(|w| w.pid != pid);
    // The worker's device memory is free again.
    pool.free = None;
    if starting.is_some() {
        pool.starting -= 1;
        if !draining {
            pool.fail(Instant::now(), broken.unwrap_or_else(|| format!("it {how}")));
        }
    } else if pool.full {
        // There may be room now.
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
    state.publish(&session.limits.principal);
    if !session.ended {
        state.sessions_lost += 1;
        state.workers_crashed += 1;
        let seconds = session.since.elapsed().as_secs();
        let (client, program) = (&session.client, &session.program);
        tracing::error!(worker = pid, client, program, seconds, "session lost: its worker {how}");
        let reason = format!("the worker of this session on {} {how}", super::host_name());
        // On a thread of its own, because the client may be slow and the state is locked.
        let control = session.control;
        let farewell =
            std::thread::Builder::new().name("rgpu-bye".into()).spawn(move || control.bye(&reason));
        if farewell.is_err() {
            tracing::debug!(
                "cannot start a thread to tell a client; it learns of the end by its closed connection"
            );
        }
    }
}

impl State {
    /// The kind of a worker that is starting.
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
            state.pool_mut(kind).queue.push_back(Parked::fake());
        }
    }

    fn starting_worker(state: &mut State, pid: u32, kind: Kind) -> Arc<Worker> {
        let worker = Worker::fake(pid);
        let managed = Managed { worker: Arc::clone(&worker), kind, stage: Stage::Starting };
        state.workers.insert(pid, managed);
        state.pool_mut(kind).starting += 1;
        worker
    }

    #[test]
    fn a_worker_starts_for_each_waiting_client_and_each_spare_one() {
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
    fn a_private_server_keeps_one_worker_ready_until_its_first_session() {
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
    fn after_failures_workers_start_one_at_a_time_with_growing_pauses() {
        let (mut state, mut now) = (State::default(), Instant::now());
        let options = options(&[]);
        waiting(&mut state, 8, Kind::Gpu);
        let mut pause = Duration::ZERO;
        for failure in 1..8 {
            starting_worker(&mut state, failure, Kind::Gpu);
            remove_worker(&mut state, failure, false, "exited", None);
            let Some(Next::At(when)) = next(&state, &options, Kind::Gpu, 16, Instant::now()) else {
                panic!("no pause after {failure} failures")
            };
            let longer = when.saturating_duration_since(Instant::now());
            assert!(longer > pause || longer > MAX_PAUSE / 2);
            (pause, now) = (longer, when);
            assert_eq!(started(&mut state, &options, Kind::Gpu, 16, now), 1);
            state.gpu.starting = 0;
        }
        state.gpu.succeed(now, None);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 16, now), 10);
    }

    #[test]
    fn a_pause_of_gpu_workers_does_not_delay_nvml_workers() {
        let (mut state, options) = (State::default(), options(&[]));
        starting_worker(&mut state, 1, Kind::Gpu);
        remove_worker(&mut state, 1, false, "exited", None);
        let now = Instant::now();
        assert!(matches!(next_of_all(&state, &options, 16, now), Some(Next::At(_))));
        waiting(&mut state, 1, Kind::Nvml);
        assert_eq!(next_of_all(&state, &options, 16, now), Some(Next::Start(Kind::Nvml)));
    }

    #[test]
    fn a_full_device_is_tried_again_when_a_worker_ends() {
        let (mut state, options) = (State::default(), options(&[]));
        waiting(&mut state, 8, Kind::Gpu);
        starting_worker(&mut state, 1, Kind::Gpu);
        state.gpu.full = true;
        remove_worker(&mut state, 1, true, "exited", Some("no memory for its context".into()));
        assert_eq!(state.gpu.failures, 0);
        let now = Instant::now();
        assert!(matches!(next(&state, &options, Kind::Gpu, 16, now), Some(Next::At(_))));
        let other = starting_worker(&mut state, 2, Kind::Gpu);
        become_ready(&mut state, &other).unwrap();
        remove_worker(&mut state, 2, true, "exited", None);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 16, now), 1);
    }

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
    fn a_ready_worker_that_no_client_needs_is_dismissed() {
        let (mut state, options) = (State::default(), options(&["--workers=1"]));
        let workers: Vec<_> = (0..3).map(|pid| starting_worker(&mut state, pid, Kind::Gpu)).collect();
        let kept: Vec<bool> = workers
            .iter()
            .map(|worker| {
                become_ready(&mut state, worker).unwrap();
                keep_idle(&mut state, &options, worker, Kind::Gpu)
            })
            .collect();
        assert_eq!(kept, [true, false, false]);
        assert_eq!(state.gpu.idle.len(), 1);
    }
}
