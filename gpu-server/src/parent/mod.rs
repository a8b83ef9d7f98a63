//! The daemon: accepts connections, admits sessions, and gives each session to a worker.
//!
//! - [`listen`]: listening sockets, and connections without a first message; [`direct`]: connections between
//!   workers of two servers;
//! - [`handshake`]: the first message of a connection;
//! - [`trust`]: who clients are; [`pace`]: how many sessions they begin; the [policy](crate::policy): what
//!   they may use;
//! - [`admin`]: `rgpuctl`'s requests to the daemon; [`audit`]: the audit log;
//! - [`queue`]: clients that wait for a worker; [`placement`]: which devices a session gets; [`accounts`]:
//!   what principals hold; [`memory`]: NVML's figures for that;
//! - [`pool`]: workers that are started in advance; [`workers`]: what the daemon knows about each; [`watch`]:
//!   their messages, and their end;
//! - [`ends`]: sessions that the daemon ends, and why recent sessions ended;
//! - [`health`]: unhealthy devices, which take no new sessions;
//! - [`arbiter`]: which principal's turn it is on a GPU; [`turns`]: the thread that enforces it;
//! - [`leases`]: GPUs that clients have for a time; [`asks`]: client requests that need no session;
//! - [`residency`]: whose memory is on the devices if there isn't enough for all; [`swap`]: carries that out;
//! - [`refusals`]: why clients are refused;
//! - [`gpus`]: NVML's current readings of the devices;
//! - [`status`]: the status for `rgpuctl status`; [`scrape`]: the same and more for Prometheus, with the
//!   definitions in [`families`];
//! - [`drain`]: the daemon's shutdown, and `rgpuctl drain`;
//! - [`takeover`]: from one daemon to the next, and `rgpuctl upgrade`; [`record`]: what one daemon writes
//!   down for the next.
//!
//! The daemon never touches a device, nor any byte of a session after its handshake. One client's or worker's
//! misbehavior cannot affect another.

mod accounts;
mod admin;
mod arbiter;
mod asks;
mod audit;
mod direct;
mod drain;
mod ends;
mod families;
mod gpus;
mod handshake;
mod health;
mod leases;
mod listen;
mod memory;
mod pace;
mod placement;
mod pool;
mod queue;
mod record;
mod refusals;
mod residency;
mod scrape;
mod status;
mod swap;
mod takeover;
mod trust;
mod turns;
mod watch;
mod workers;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::{Context, bail};
use handover::Inherited;
use host_bridge::framing::Address;
use identity::Secret;
use nix::sys::signal::{SigSet, Signal};

use self::accounts::Account;
use self::asks::Asks;
use self::audit::Audit;
use self::direct::Tickets;
use self::drain::Drain;
use self::gpus::Gpus;
use self::handshake::Control;
use self::health::Illness;
use self::leases::{LeaseId, Leases};
use self::pace::Paces;
use self::pool::Pool;
use self::queue::Nudge;
use self::refusals::Refusals;
use self::scrape::{Settled, Waits};
use self::swap::Swapping;
use self::takeover::Succession;
use self::trust::{Principal, Trust};
use self::turns::Bell;
use self::workers::{Managed, Worker};
use crate::cache::{self, store::Store};
use crate::config::Serve;
use crate::confinement::Confining;
use crate::cuda_ipc::Shares;
use crate::limits::Limits;
use crate::policy::Policy;
use crate::worker_protocol::{Counters, Kind, Token};

/// The daemon's state.
struct Server {
    options: Serve,
    confining: Confining,
    state: Mutex<State>,
    /// Notified whenever the state changes.
    changed: Condvar,
    /// Wakes the queue's thread.
    nudge: Nudge,
    /// Identifies clients over TLS. `None`: the server doesn't use TLS.
    trust: Option<Trust>,
    policy: Mutex<Arc<Policy>>,
    audit: Audit,
    /// Wakes the thread that gives principals their turns.
    bell: Bell,
    /// Client data that need not be sent again.
    cache: Option<Store>,
    /// What the next daemon inherits.
    succession: Succession,
    gpus: Gpus,
    /// Refusals so far, and how long sessions waited for a worker.
    refusals: Refusals,
    waits: Waits,
    asks: Asks,
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
    /// For direct connections from other servers.
    tickets: Tickets,
    /// Why sessions ended that their clients may try to resume, latest last.
    ended: VecDeque<(Token, String)>,
    shares: Shares,
    leases: Leases,
    /// The backend and devices that workers serve, once a worker has been ready.
    serving: Option<(String, Vec<String>)>,
    paces: Paces,
    /// Why nothing can be served at all.
    fatal: Option<String>,
    /// Set once the daemon is shutting down.
    drain: Option<Drain>,
    /// Another program is about to take over. Once this is set, no worker starts and no session begins.
    upgrading: bool,
    closed: bool,
    /// Unhealthy devices, by number.
    ill: BTreeMap<u32, Illness>,
    /// Where sessions' device memory is, if it can be moved.
    swapping: Option<Swapping>,
    /// Whether to ask NVML for the workers' memory.
    measure: bool,
    /// GPU time charged to principals, in ns.
    charged: HashMap<String, u64>,
    /// The same since the start of the daemon, and what ended sessions have done.
    charged_ever: metrics::Ledger<u64>,
    settled: metrics::Ledger<Settled>,
    sessions_begun: u64,
    sessions_lost: u64,
    workers_crashed: u64,
    /// Sessions that ended because a kernel ran too long.
    kernels_overrun: u64,
    leases_granted: u64,
}

impl State {
    fn pool(&self, kind: Kind) -> &Pool {
        match kind {
            Kind::Gpu => &self.gpu,
            Kind::Nvml => &self.nvml,
        }
    }

    /// Whether no session may begin any more.
    fn stopped(&self) -> bool {
        self.draining() || self.closed
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
    /// Its name in metrics.
    key: metrics::Key,
    limits: Limits,
    /// The lease under which it runs.
    lease: Option<LeaseId>,
    /// Numbers of its devices.
    devices: Vec<u32>,
    account: Account,
    token: Token,
    secret: Secret,
    principal: Principal,
    /// Data connections that it was granted, and those of its first link without TLS.
    data_connections: (u32, u32),
    /// Whether its connections use TLS.
    encrypted: bool,
    /// For telling the client why its session ended if the worker no longer can. Replaced whenever the
    /// session is resumed without TLS. `None`: the previous daemon had it.
    control: Option<Arc<Control>>,
    /// Since when it has no link.
    parked: Option<Instant>,
    /// The latest of its links, and how often it resumed over new connections.
    attempt: u32,
    resumed: u64,
    /// Whether the worker has the connection. Before that, the client can still be given to another worker.
    begun: bool,
    /// Whether a kernel has run too long.
    overrun: bool,
    /// Whether the worker has reported the session's end, or the daemon has decided it.
    ended: bool,
    /// Whether it ended without its client closing it.
    lost: bool,
    /// How many daemons it has had before this one.
    daemons: u32,
    /// Whether it is kept for the next daemon.
    kept: bool,
    /// Events of other sessions that it has opened, and its slot in each.
    opened: Vec<(Token, u16)>,
}

impl Server {
    fn new(options: Serve, inherited: &mut Inherited) -> anyhow::Result<Server> {
        let network = options.listen.iter().any(|address| matches!(address, Address::Tcp(..)));
        let trust = if network && !options.insecure { Some(Trust::open(&options)?) } else { None };
        let policy = Mutex::new(Arc::new(read_policy(&options)?));
        let audit = Audit::open(options.audit_log.as_deref())?;
        let confining = Confining::new(&options.sandbox, &options.worker.backing);
        let (state, changed) = (Mutex::default(), Condvar::new());
        let succession = Succession::new(inherited).context("what the next daemon gets")?;
        let (nudge, bell) = (Nudge::new()?, Bell::take_or_new(inherited, &succession.store)?);
        let (gpus, refusals, waits, asks) = Default::default();
        let cache = options.cache.open().context("opening the cache (--cache)")?;
        Ok(Server {
            options,
            confining,
            state,
            changed,
            nudge,
            bell,
            succession,
            gpus,
            refusals,
            waits,
            asks,
            trust,
            policy,
            audit,
            cache,
        })
    }

    /// Opens a connection to a client's blocks in the cache and returns the worker's end. `None`: there is no
    /// cache, or it cannot be used.
    fn cache_of(&self, client: &str) -> Option<UnixStream> {
        let store = self.cache.as_ref()?;
        let opened = UnixStream::pair().and_then(|(ours, theirs)| {
            cache::serve(store, client, ours)?;
            Ok(theirs)
        });
        opened.inspect_err(|e| tracing::warn!(client, "a session does without the cache: {e}")).ok()
    }

    /// The rules as they are now.
    fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// Why a client verified as this principal may have no session, if so. Its access may have been revoked
    /// since.
    fn unwelcome(&self, principal: &Principal) -> Option<String> {
        if let Some(why) = self.trust.as_ref().and_then(|trust| trust.doubt(principal)) {
            return Some(why);
        }
        self.not_allowed(&principal.name)
    }

    /// Why the rules give a principal nothing, if so.
    fn not_allowed(&self, principal: &str) -> Option<String> {
        self.policy().grant(principal, &self.options.share).err()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(fuzzing)]
pub use self::listen::fuzzing::handshake_any;
pub(crate) use self::takeover::takes_over;

/// Checks the options and what they name, and returns the rules for clients.
pub fn check(options: &Serve) -> anyhow::Result<Policy> {
    options.metrics.check()?;
    Ok(read_policy(options)?)
}

/// Reads the rules that the options name.
fn read_policy(options: &Serve) -> Result<Policy, options::Error> {
    let read = |path: &std::path::PathBuf| Policy::read(path, &options.worker.backing.devices);
    options.clients.as_ref().map_or_else(|| Ok(Policy::default()), read)
}

/// Reloads what the operator may change while the server runs: its key and certificates, and the rules for
/// clients. If something is invalid, the old version stays in effect. Sessions of clients that may no longer
/// have any are ended; others keep the limits with which they began.
fn reload(server: &Server) {
    server.succession.store.reloading();
    server.audit.reopen();
    match server.trust.as_ref().map(Trust::reload) {
        Some(Ok(true)) => tracing::warn!(
            "this server has another key: clients that joined it trust the one before, and have to join again"
        ),
        Some(Ok(false)) | None => {}
        Some(Err(e)) => tracing::error!("the server's key and certificates stay as they were: {e:#}"),
    }
    match read_policy(&server.options) {
        Ok(policy) => *server.policy.lock().unwrap_or_else(|e| e.into_inner()) = Arc::new(policy),
        Err(e) => {
            let why = host_bridge::framing::with_causes(&e);
            tracing::error!("the rules for clients stay as they were: {why}");
        }
    }
    let (groups, clients) = server.policy().counts();
    let ended = ends::end_sessions(server, |principal, _| server.unwelcome(principal))
        + leases::end(server, |lease| server.not_allowed(&lease.principal));
    tracing::info!(groups, clients, ended, "SIGHUP: read keys, certificates and rules for clients again");
    server.succession.store.ready();
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
    // The log gets a descriptor of its own, because a worker's standard error becomes its client's. In tests,
    // which start several logs, the first one stays.
    let _ = match std::io::stderr().as_fd().try_clone_to_owned() {
        Ok(own) => log.with_writer(std::sync::Arc::new(std::fs::File::from(own))).try_init(),
        Err(_) => log.with_writer(std::io::stderr).try_init(),
    };
}

/// Runs the daemon until it is told to end.
pub fn main(options: Serve) -> anyhow::Result<()> {
    let mut inherited = Inherited::take();
    init_log(&options.log);
    let mut ending = SigSet::empty();
    ending.add(Signal::SIGTERM);
    ending.add(Signal::SIGINT);
    ending.add(Signal::SIGHUP);
    ending.add(Signal::SIGUSR2);
    // Before any thread starts: all threads inherit the mask, so that signals wait for the thread that
    // handles them.
    ending.thread_block().context("blocking signals")?;

    // Each session's shared memory needs descriptors; in the software backend, so does each allocation.
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(1 << 16)), hard));
    if let Err(e) = raised {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }

    let server = Arc::new(Server::new(options, &mut inherited)?);
    match &server.trust {
        Some(trust) => tracing::info!("this server's key has the fingerprint {}", trust.fingerprint()),
        None if server.options.insecure => tracing::warn!(
            "--insecure: connections over tcp are neither encrypted nor authenticated; everybody who can reach the port can use the GPUs"
        ),
        None => {}
    }
    swap::prepare(&server)?;
    takeover::take_over(&server, &mut inherited);
    let report = pool::probe(&server)?;
    if !report.missing.is_empty() {
        tracing::warn!("workers run without: {report}");
    }
    let mut files = listen::Files::default();
    listen::drop_others(&server, &mut inherited);
    listen::start(&server, &mut inherited, &mut files)?;
    if let Some(path) = &server.options.admin_socket {
        admin::start(&server, path, &mut inherited, &mut files)?;
    }
    if let Some(path) = &server.options.status_socket {
        status::start(&server, path, &mut inherited, &mut files)?;
    }
    scrape::start(&server, &mut inherited, &mut files)?;
    gpus::start(&server)?;
    queue::start(&server)?;
    leases::start(&server)?;
    asks::start(&server)?;
    turns::start(&server)?;
    memory::start(&server)?;
    health::start(&server)?;
    pool::start(&server)?;
    tracing::info!("{} is listening at {}", server_name(), listen::addresses(&server.options.listen));
    server.succession.store.ready();

    let told = Arc::clone(&server);
    std::thread::Builder::new().name("rgpu-signals".into()).spawn(move || {
        while let Ok(signal) = ending.wait() {
            if signal == Signal::SIGHUP {
                reload(&told);
                continue;
            }
            if signal == Signal::SIGUSR2 {
                let Err(why) = takeover::upgrade(&told, |_| ());
                tracing::error!("SIGUSR2: not upgraded: {why}");
                continue;
            }
            tracing::info!("{signal}");
            drain::within(&told, told.options.drain_seconds);
        }
    })?;
    let mut state = server.lock();
    while state.fatal.is_none() && !state.draining() {
        state = server.changed.wait(state).unwrap_or_else(|e| e.into_inner());
    }
    if let Some(fatal) = state.fatal.clone() {
        bail!(fatal);
    }
    drop(state);
    drain::drain(&server);
    server.audit.flush();
    // The next daemon starts from scratch.
    server.succession.store.forget_all();
    drop(files);
    Ok(())
}
