//! The daemon: listens, admits, and gives each session to a worker.
//!
//! - [`listen`]: sockets and accepting;
//! - [`handshake`]: the first message of a connection, and what becomes of it;
//! - [`queue`]: clients that wait for a worker;
//! - [`pool`]: worker processes, from their start to their end;
//! - [`status`]: what `rgpuctl status` shows.
//!
//! It never touches a device, nor a byte of a session after its handshake: what a client or a worker does wrong cannot reach another.

mod handshake;
mod listen;
mod pool;
mod queue;
mod status;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{SigSet, Signal};

use self::handshake::Control;
use self::pool::{Managed, Pool, Stage, Worker};
use self::queue::Nudge;
use crate::cli::Serve;
use crate::ipc::{Counters, Kind};
use crate::share::{Shares, Token};

/// The daemon's state.
struct Server {
    options: Serve,
    state: Mutex<State>,
    /// Notified at every change of the state that somebody may wait for.
    changed: Condvar,
    /// Wakes the thread of the queue.
    nudge: Nudge,
}

#[derive(Default)]
struct State {
    /// Workers for sessions that use devices.
    gpu: Pool,
    /// Workers for sessions that only ask NVML's questions.
    nvml: Pool,
    /// Every worker process, by its id.
    workers: HashMap<u32, Managed>,
    /// By the worker's process id.
    sessions: HashMap<u32, Session>,
    tokens: HashMap<Token, Arc<Worker>>,
    shares: Shares,
    /// What workers serve, once one was ready: backend, devices.
    serving: Option<(String, Vec<String>)>,
    /// Why nothing can be served at all.
    fatal: Option<String>,
    draining: bool,
    sessions_begun: u64,
    sessions_lost: u64,
    workers_crashed: u64,
}

impl State {
    fn pool(&self, kind: Kind) -> &Pool {
        match kind {
            Kind::Gpu => &self.gpu,
            Kind::Nvml => &self.nvml,
        }
    }

    fn pool_mut(&mut self, kind: Kind) -> &mut Pool {
        match kind {
            Kind::Gpu => &mut self.gpu,
            Kind::Nvml => &mut self.nvml,
        }
    }
}

/// A session, as the daemon knows it.
struct Session {
    kind: Kind,
    client: String,
    program: String,
    pid: u32,
    transport: &'static str,
    peer: String,
    since: Instant,
    counters: Counters,
    token: Token,
    /// To tell the client why, if the worker cannot any more.
    control: Arc<Control>,
    /// The worker has the connection. Before that, the client can still be given to another.
    begun: bool,
    /// The worker has said that the session is over.
    ended: bool,
}

impl Server {
    fn new(options: Serve) -> anyhow::Result<Server> {
        Ok(Server { options, state: Mutex::default(), changed: Condvar::new(), nudge: Nudge::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// `rgpu-server`'s version and host, for people.
pub fn server_name() -> String {
    format!("rgpu-server {} on {}", env!("CARGO_PKG_VERSION"), host_name())
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".into(), |name| name.trim().to_owned())
}

/// Sends the log to standard error.
pub fn init_log(filter: &str) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|e| {
        eprintln!("rgpu-server: --log {filter:?}: {e}; logging at info");
        EnvFilter::new("info")
    });
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_target(false);
    // A descriptor of its own: a worker's standard error becomes its client's. In tests several logs may come: the first stays.
    let _ = match std::io::stderr().as_fd().try_clone_to_owned() {
        Ok(own) => log.with_writer(std::sync::Arc::new(std::fs::File::from(own))).try_init(),
        Err(_) => log.with_writer(std::io::stderr).try_init(),
    };
}

/// Runs the daemon until it is told to end.
pub fn main(options: Serve) -> anyhow::Result<()> {
    init_log(&options.log);
    let mut ending = SigSet::empty();
    ending.add(Signal::SIGTERM);
    ending.add(Signal::SIGINT);
    // Before any thread is made, so that all of them leave these signals to this one.
    ending.thread_block().context("blocking signals")?;

    // Shared memory of many sessions, and in the software backend every piece of memory, is a descriptor.
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(1 << 16)), hard));
    if let Err(e) = raised {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }

    let server = Arc::new(Server::new(options)?);
    let mut files = listen::Files::default();
    listen::start(&server, &mut files)?;
    if let Some(path) = &server.options.status_socket {
        status::start(&server, path, &mut files)?;
    }
    queue::start(&server)?;
    pool::start(&server)?;
    tracing::info!("{} is listening at {}", server_name(), listen::addresses(&server.options.listen));

    let watched = Arc::clone(&server);
    std::thread::Builder::new().name("rgpu-fatal".into()).spawn(move || {
        let mut state = watched.lock();
        while state.fatal.is_none() {
            state = watched.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        drop(state);
        // Wakes the main thread, which waits for a signal.
        let _ = nix::sys::signal::kill(nix::unistd::getpid(), Signal::SIGTERM);
    })?;
    let signal = ending.wait().context("waiting for a signal")?;
    if let Some(fatal) = server.lock().fatal.clone() {
        bail!(fatal);
    }
    tracing::info!("{signal}: no new sessions; waiting for those that run");
    drain(&server);
    drop(files);
    Ok(())
}

/// Lets sessions end by themselves for a while, then ends them. Workers without a session are killed at once: whoever asked for them is refused, and nobody waits for contexts
/// that are still being made.
fn drain(server: &Server) {
    let mut state = server.lock();
    state.draining = true;
    let unused: Vec<_> = state.workers.values().filter(|managed| managed.stage != Stage::Serving).collect();
    unused.iter().for_each(|managed| managed.worker.kill());
    if !unused.is_empty() {
        tracing::info!("killed {} workers that had no session", unused.len());
    }
    for kind in Kind::ALL {
        state.pool_mut(kind).idle.clear();
    }
    server.changed.notify_all();
    server.nudge.nudge();
    let over = |state: &State| {
        state.sessions.values().all(|session| session.ended)
            && Kind::ALL.iter().all(|kind| state.pool(*kind).queue.is_empty())
    };
    let wait = |mut state: MutexGuard<'_, State>, limit: Duration| {
        let deadline = Instant::now() + limit;
        while !over(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = server.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        drop(state);
    };
    wait(state, Duration::from_secs(server.options.drain_seconds));
    let state = server.lock();
    let running = state.sessions.values().filter(|session| !session.ended).count();
    if running > 0 {
        tracing::warn!("ending {running} sessions that still run");
        // Each tells its client before it goes.
        state.workers.values().for_each(|managed| managed.worker.hang_up());
        wait(state, Duration::from_secs(2));
    } else {
        drop(state);
    }
    // Workers whose session is over have nothing left to do but to end, which takes the driver its time.
    server.lock().workers.values().for_each(|managed| managed.worker.kill());
}
