//! Worker processes: started ahead of need, watched until they end.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::Pid;

use super::{Server, State};
use crate::ipc::{self, FromWorker, ToWorker};
use crate::share::{Refusal, Reply, Shared, Token, origin};

/// After a worker failed to prepare, the next is tried after this long, doubled for each failure in a row up to [`MOST`].
const FIRST: Duration = Duration::from_millis(250);
const MOST: Duration = Duration::from_secs(10);

/// A worker process.
pub(super) struct Worker {
    pid: u32,
    socket: OwnedFd,
}

impl Worker {
    /// One that is no process.
    #[cfg(test)]
    pub(super) fn made_up(pid: u32) -> Arc<Worker> {
        Arc::new(Worker { pid, socket: ipc::pair().unwrap().0 })
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

/// Keeps the pool filled from now on. Every worker is started by the one thread that this makes, because the kernel ends them when that thread ends.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    std::thread::Builder::new()
        .name("rgpu-pool".into())
        .spawn(move || keep(&server))
        .context("starting the pool")?;
    Ok(())
}

fn keep(server: &Arc<Server>) {
    let wanted = server.options.workers.max(1);
    loop {
        let mut state = server.lock();
        while state.draining || state.fatal.is_some() || state.idle.len() + state.starting >= wanted {
            state = server.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        let failures = state.failures;
        if failures > 0 {
            let pause = FIRST.saturating_mul(1 << failures.min(10)).min(MOST);
            drop(
                server
                    .changed
                    .wait_timeout_while(state, pause, |s| !s.draining)
                    .unwrap_or_else(|e| e.into_inner()),
            );
            if server.lock().draining {
                continue;
            }
        } else {
            drop(state);
        }
        server.lock().starting += 1;
        if let Err(e) = start_one(server) {
            tracing::error!("cannot start a worker: {e:#}");
            let mut state = server.lock();
            state.starting -= 1;
            state.failures += 1;
        }
    }
}

fn start_one(server: &Arc<Server>) -> anyhow::Result<()> {
    let (ours, theirs) = ipc::pair().context("a socket pair")?;
    let child = spawn(server, &theirs)?;
    drop(theirs);
    let worker = Arc::new(Worker { pid: child.id(), socket: ours });
    server.lock().workers.insert(worker.pid, Arc::clone(&worker));
    let watcher = Arc::clone(server);
    let watched = Arc::clone(&worker);
    std::thread::Builder::new()
        .name("rgpu-watch".into())
        .spawn(move || watch(&watcher, &watched, child))
        .context("a thread for a worker")?;
    let prepare = ToWorker::Prepare {
        backing: server.options.backing.clone(),
        memory_limit: server.options.memory_limit,
        rdma: server.options.rdma.clone(),
        poll_us: server.options.poll_us,
    };
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
    // Streams that share one of the device's channels wait for each other, also where one waits for its client. Unless somebody chose otherwise:
    for (name, value) in [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_MODULE_LOADING", "LAZY")] {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
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
    let mut prepared = false;
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
            FromWorker::Ready { backend, devices } => {
                prepared = true;
                state.starting -= 1;
                state.failures = 0;
                if state.serving.is_none() {
                    tracing::info!(
                        "serving {} device(s) by {backend}: {}",
                        devices.len(),
                        devices.join(", ")
                    );
                    state.serving = Some((backend, devices));
                }
                if state.draining {
                    worker.hang_up();
                } else {
                    state.idle.push_back(Arc::clone(worker));
                }
            }
            FromWorker::Failed { reason } => {
                tracing::error!(worker = pid, "a worker cannot prepare: {reason}");
                if state.serving.is_none() {
                    state.fatal = Some(reason);
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
                if let Some(session) = state.sessions.get_mut(&pid) {
                    session.ended = true;
                    session.counters = counters;
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
                state.sessions_lost += u64::from(lost.is_some());
            }
        }
        server.changed.notify_all();
    }
    let ended = child.wait();
    let how = ended.as_ref().map_or_else(|e| e.to_string(), |status| describe(*status));
    let clean = ended.is_ok_and(|status| status.success());
    bury(&mut server.lock(), pid, prepared, clean, &how);
    server.changed.notify_all();
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

fn bury(state: &mut State, pid: u32, prepared: bool, clean: bool, how: &str) {
    state.workers.remove(&pid);
    state.idle.retain(|w| w.pid != pid);
    state.shares.forget(pid);
    if !prepared {
        state.starting -= 1;
        state.failures += 1;
    }
    let Some(session) = state.sessions.remove(&pid) else {
        if !clean && !state.draining {
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
