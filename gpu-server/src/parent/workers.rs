//! Worker processes from the daemon's point of view.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use identity::Fingerprint;
use nix::sys::socket::{Shutdown, shutdown};
use sandbox::{Description, Handle, Process};

use super::queue::parked::Parked;
use crate::worker_protocol::{self, Kind, Reply, ToWorker};

/// A worker process.
pub(super) struct Worker {
    pid: u32,
    socket: OwnedFd,
    /// What another daemon needs to take it over, if that is possible.
    process: Option<Description>,
    alive: Option<OwnedFd>,
    /// The key of its session's connections, once it is ready.
    key: OnceLock<Fingerprint>,
    /// `None` in tests, where there is no process.
    handle: Option<Handle>,
}

impl Worker {
    /// A worker for tests, without a process, that never reads its messages.
    #[cfg(test)]
    pub(super) fn fake(pid: u32) -> Arc<Worker> {
        Worker::fake_of(pid, None)
    }

    /// The same with what another daemon needs.
    #[cfg(test)]
    pub(super) fn fake_of(pid: u32, process: Option<Description>) -> Arc<Worker> {
        let (socket, other_end) = worker_protocol::pair().unwrap();
        std::mem::forget(other_end);
        Arc::new(Worker { pid, socket, process, alive: None, key: OnceLock::new(), handle: None })
    }

    /// The same with the other end of its socket.
    #[cfg(test)]
    pub(super) fn fake_pair(pid: u32) -> (Arc<Worker>, OwnedFd) {
        let (socket, other_end) = worker_protocol::pair().unwrap();
        let (process, alive, key, handle) = (None, None, OnceLock::new(), None);
        (Arc::new(Worker { pid, socket, process, alive, key, handle }), other_end)
    }

    /// The daemon's side of a process at the other end of `socket`. `described`: what another daemon needs to
    /// take it over, if that is possible; `alive` holds its namespace.
    pub(super) fn new(
        socket: OwnedFd,
        process: &Process,
        described: Option<Description>,
        alive: Option<OwnedFd>,
    ) -> Worker {
        let (pid, handle, key) = (process.pid(), Some(process.handle()), OnceLock::new());
        Worker { pid, socket, process: described, alive, key, handle }
    }

    /// Its process ID.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// What another daemon needs to take it over, besides the [socket](Self::socket): its process, and the
    /// holder of its namespace.
    pub(super) fn process(&self) -> Option<&Description> {
        self.process.as_ref()
    }

    pub(super) fn alive(&self) -> Option<&OwnedFd> {
        self.alive.as_ref()
    }

    /// The daemon's end of their socket.
    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Answers one of the worker's requests.
    pub(super) fn answer(&self, request: u64, reply: Reply, fd: Option<&OwnedFd>) {
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        // The watcher notices when the worker is gone.
        let _ = self.send(&ToWorker::Reply { request, reply }, &fds);
    }

    /// Notes that the worker is ready, with this key for its session's connections. Called only once.
    pub(super) fn set_key(&self, key: Fingerprint) {
        let _ = self.key.set(key);
    }

    /// The key of its session's connections; zero before it is ready.
    pub(super) fn key(&self) -> Fingerprint {
        self.key.get().copied().unwrap_or(Fingerprint([0; 32]))
    }

    /// Sends a message with descriptors, without blocking. A worker that has left so much unread that there
    /// is no room is killed: no thread of the daemon may wait for it.
    pub(super) fn send(&self, message: &ToWorker, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let sent = worker_protocol::try_send(self.socket.as_fd(), message, fds);
        if sent.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
            tracing::error!(worker = self.pid, "a worker does not read its messages; killed");
            self.kill();
        }
        sent
    }

    /// Passes on a connection that anybody may have opened, if the worker has read most of its messages. One
    /// that has not may be busy, and the rest of the room is for messages of the daemon: whoever reaches the
    /// port must not be able to have it killed.
    pub(super) fn offer(&self, message: &ToWorker, connection: BorrowedFd<'_>) -> io::Result<()> {
        if !worker_protocol::has_much_room(&self.socket)? {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "it has many others to read"));
        }
        worker_protocol::try_send(self.socket.as_fd(), message, &[connection])
    }

    /// Closes the connection to the worker, which then tells its session and exits.
    pub(super) fn hang_up(&self) {
        // It may have ended already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Write);
    }

    /// Waits until the worker has ended, for so long at most. Returns whether it has.
    pub(super) fn ends_within(&self, limit: Duration) -> bool {
        self.handle.as_ref().is_some_and(|handle| handle.ends_within(limit).unwrap_or(false))
    }

    /// Kills the worker.
    pub(super) fn kill(&self) {
        self.handle.iter().for_each(Handle::kill);
    }
}

/// How long to wait after a worker failed to start. Doubled for each failure in a row, up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause after a failure.
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(10);
/// After this many failures in a row, waiting clients are refused.
pub(super) const GIVE_UP: u32 = 5;
/// How long to wait before the next try on a device without memory for another context. The end of a session
/// shortens this.
const FULL_PAUSE: Duration = Duration::from_secs(1);
/// A worker process and its stage.
pub(super) struct Managed {
    pub(super) worker: Arc<Worker>,
    pub(super) kind: Kind,
    pub(super) stage: Stage,
    /// Whether it was made for other devices than the currently healthy ones, and so gets no session.
    pub(super) outdated: bool,
    /// Bytes that the process uses according to NVML, by the devices' numbers.
    pub(super) takes: BTreeMap<u32, u64>,
}

impl Managed {
    /// A starting worker.
    pub(super) fn starting(worker: &Arc<Worker>, kind: Kind, outdated: bool) -> Managed {
        Managed { worker: Arc::clone(worker), kind, stage: Stage::Starting, outdated, takes: BTreeMap::new() }
    }

    /// A worker with its session.
    pub(super) fn serving(worker: &Arc<Worker>, kind: Kind) -> Managed {
        Managed { stage: Stage::Serving, ..Managed::starting(worker, kind, false) }
    }
}

#[cfg(test)]
impl Managed {
    /// One for tests, without a process.
    pub(super) fn fake(pid: u32, stage: Stage) -> Managed {
        Managed { stage, ..Managed::starting(&Worker::fake(pid), Kind::Gpu, false) }
    }
}

/// The stages of a worker, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It is starting.
    Starting,
    /// It is, or was, ready for a session.
    Idle,
    /// It has its session.
    Serving,
    /// It could not start, and ends.
    Failed,
}

impl Stage {
    /// Its name in the status.
    pub(super) fn name(self) -> &'static str {
        match self {
            Stage::Starting => "starting",
            Stage::Idle => "ready",
            Stage::Serving => "serving",
            Stage::Failed => "failed",
        }
    }
}

/// The workers of one kind without a session, and the clients that wait for them.
#[derive(Default)]
pub(super) struct Pool {
    /// Ready for a session.
    pub(super) idle: VecDeque<Arc<Worker>>,
    /// Clients that wait for a worker, in the order in which they are served.
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
    pub(super) full: bool,
    /// No worker is started before this time.
    pub(super) not_before: Option<Instant>,
    /// Free bytes on the device when the last worker became ready, if no worker has ended since.
    pub(super) free: Option<u64>,
}

impl Pool {
    /// A worker could not be started, or died before it was ready.
    pub(super) fn fail(&mut self, now: Instant, why: String) {
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
    pub(super) fn succeed(&mut self, now: Instant, free: Option<u64>) {
        (self.failures, self.full, self.not_before, self.free) = (0, false, None, free);
        self.last_failure.clear();
        self.moved = Some(now);
    }
}
