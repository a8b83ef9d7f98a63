//! The daemon: accepts connections, admits sessions, and gives each session to a worker.
//!
//! - [`listen`]: listening sockets;
//! - [`handshake`]: the first message of a connection;
//! - [`queue`]: clients that wait for a worker; [`placement`]: which devices a session gets; [`accounts`]: what principals hold;
//! - [`pool`]: worker processes, from their start to their end;
//! - [`status`]: the status for `rgpuctl status`.
//!
//! The daemon never touches a device, nor any byte of a session after its handshake. What one client or worker does wrong cannot affect another.

mod accounts;
mod handshake;
mod listen;
mod placement;
mod pool;
mod queue;
mod status;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{SigSet, Signal};

use self::accounts::Account;
use self::handshake::Control;
use self::pool::{Managed, Pool, Stage, Worker};
use self::queue::Nudge;
use crate::config::Serve;
use crate::cuda_ipc::{Shares, Token};
use crate::worker_protocol::{Counters, Kind, Limits};

/// The daemon's state.
struct Server {
    options: Serve,
    state: Mutex<State>,
    /// Notified whenever the state changes.
    changed: Condvar,
    /// Wakes the queue's thread.
    nudge: Nudge,
}

#[derive(Default)]
struct State {
    /// Workers for sessions that use devices.
    gpu: Pool,
    /// Workers for sessions that only query NVML.
    nvml: Pool,
    /// Every worker process, by process id.
    workers: HashMap<u32, Managed>,
    /// By the worker's process id.
    sessions: HashMap<u32, Session>,
    tokens: HashMap<Token, Arc<Worker>>,
    shares: Shares,
    /// The backend and devices that workers serve, once one has been ready.
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
    limits: Limits,
    /// Numbers of its devices.
    devices: Vec<u32>,
    account: Account,
    token: Token,
    /// For telling the client why its session ended if the worker no longer can.
    control: Arc<Control>,
    /// Whether the worker has the connection. Before that, the client can still be given to another worker.
    begun: bool,
    /// Whether the worker has reported the session's end.
    ended: bool,
}

impl Server {
    /// Numbers of the devices that it shares, once a worker has said how many there are.
    fn devices(&self, state: &State) -> Vec<u32> {
        let shared = &self.options.worker.backing.devices;
        let count = state.serving.as_ref().map_or(0, |(_, names)| names.len() as u32);
        if shared.is_empty() { (0..count).collect() } else { shared.clone() }
    }

    fn new(options: Serve) -> anyhow::Result<Server> {
        Ok(Server { options, state: Mutex::default(), changed: Condvar::new(), nudge: Nudge::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The version and host of this `rgpu-server`, for display.
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
    // The log gets a descriptor of its own, because a worker's standard error becomes its client's. In tests, where several logs are started, the first one stays.
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
    // Before any thread starts: all threads inherit the mask, so that only this one gets the signals.
    ending.thread_block().context("blocking signals")?;

    // Each session's shared memory needs descriptors; in the software backend, so does each allocation.
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
        // Wakes the main thread, which waits for this signal.
        let _ = nix::sys::signal::kill(nix::unistd::getpid(), Signal::SIGTERM);
    })?;
    let signal = ending.wait().context("waiting for a signal")?;
    if let Some(fatal) = server.lock().fatal.clone() {
        bail!(fatal);
    }
    tracing::info!("{signal}: accepting no new sessions; waiting for the running ones to end");
    drain(&server);
    drop(files);
    Ok(())
}

/// Gives sessions time to end by themselves, then ends them. Workers without a session are killed at once: clients that wait for them are refused, and no context that is still being
/// created is waited for.
fn drain(server: &Server) {
    let mut state = server.lock();
    state.draining = true;
    let unused: Vec<_> = state.workers.values().filter(|managed| managed.stage != Stage::Serving).collect();
    unused.iter().for_each(|managed| managed.worker.kill());
    if !unused.is_empty() {
        tracing::info!("killed {} workers without a session", unused.len());
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
        tracing::warn!("ending {running} sessions that are still running");
        // Each worker tells its client before it exits.
        state.workers.values().for_each(|managed| managed.worker.hang_up());
        wait(state, Duration::from_secs(2));
    } else {
        drop(state);
    }
    // Workers whose session has ended only have to exit, which takes the driver some time.
    server.lock().workers.values().for_each(|managed| managed.worker.kill());
}
