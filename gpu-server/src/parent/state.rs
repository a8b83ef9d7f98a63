//! The daemon's state, which its threads share: its sessions, its workers, its clients.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::Context;
use handover::Inherited;
use protocol::Status;

use super::asks::waiting::Asks;
use super::audit::Audit;
use super::bells::{Bell, Nudge};
use super::control::{Control, Refused, welcome};
use super::direct::tickets::Tickets;
use super::drain::progress::Drain;
use super::gpus::Gpus;
use super::leases::table::Leases;
use super::mps;
use super::pace::Paces;
use super::queue::parked::Parked;
use super::record::Succession;
use super::refusals::{LogLimits, Reason, Refusals};
use super::residency::Swapping;
use super::scrape::totals::{Settled, Waits};
use super::sessions::Sessions;
use super::trust::{Principal, Trust};
use super::workers::{Managed, Pool, Stage, Worker};
use crate::cache::{self, store::Store};
use crate::config::Serve;
use crate::confinement::Confining;
use crate::cuda_ipc::Shares;
use crate::driver::cuda::nvml::Devices;
use crate::policy::{Grant, Policy};
use crate::worker_protocol::{Kind, Token};

/// The daemon's state.
pub(super) struct Server {
    pub(super) options: Serve,
    pub(super) confining: Confining,
    pub(super) state: Mutex<State>,
    /// Notified whenever the state changes.
    pub(super) changed: Condvar,
    /// Notified when NVML is to be asked for the workers' memory.
    pub(super) measuring: Condvar,
    /// Wakes the queue's thread.
    pub(super) nudge: Nudge,
    /// Identifies clients over TLS. `None`: the server doesn't use TLS.
    pub(super) trust: Option<Trust>,
    pub(super) policy: Mutex<Arc<Policy>>,
    pub(super) audit: Audit,
    /// Wakes the thread that gives principals their turns.
    pub(super) bell: Bell,
    /// Client data that need not be sent again.
    pub(super) cache: Option<Store>,
    /// What the next daemon inherits.
    pub(super) succession: Succession,
    pub(super) gpus: Gpus,
    /// Refusals so far, and how long sessions waited for a worker.
    pub(super) refusals: Refusals,
    pub(super) waits: Waits,
    pub(super) asks: Asks,
    /// Whether NVIDIA's Multi-Process Service runs, so that there are no turns.
    pub(super) mps_runs: AtomicBool,
    /// For lines that clients, and anybody who reaches the port, can cause.
    pub(super) log_limits: LogLimits,
}

/// What changes while the daemon runs.
#[derive(Default)]
pub(super) struct State {
    /// Workers for sessions that use devices.
    pub(super) gpu: Pool,
    /// Workers for sessions that only query NVML.
    pub(super) nvml: Pool,
    /// Every worker process, by process id.
    pub(super) workers: HashMap<u32, Managed>,
    /// By the worker's process id.
    pub(super) sessions: Sessions,
    pub(super) tokens: HashMap<Token, Arc<Worker>>,
    /// For direct connections from other servers.
    pub(super) tickets: Tickets,
    /// Why sessions ended that their clients may try to resume, latest last.
    pub(super) ended: VecDeque<(Token, String)>,
    pub(super) shares: Shares,
    pub(super) leases: Leases,
    /// The backend and devices that workers serve, once a worker has been ready.
    pub(super) serving: Option<(String, Vec<String>)>,
    /// All devices of NVIDIA's driver, by number, once a worker that serves them has been ready.
    pub(super) known: Arc<Devices>,
    /// The options behind those that are served ([`Backing::chosen`](crate::config::Backing::chosen)), for
    /// the next daemon.
    pub(super) chosen: (Vec<u32>, u32),
    pub(super) paces: Paces,
    /// How often the rules for clients were read again.
    pub(super) rules_read: u64,
    /// Why nothing can be served at all.
    pub(super) fatal: Option<String>,
    /// Set once the daemon is shutting down.
    pub(super) drain: Option<Drain>,
    /// A signal has told the daemon to end.
    pub(super) told_to_end: bool,
    /// Another program is about to take over.
    pub(super) upgrading: bool,
    /// Set for that: no worker starts and no session begins.
    pub(super) closed: bool,
    /// Unhealthy devices, by number.
    pub(super) ill: BTreeMap<u32, Illness>,
    /// Where sessions' device memory is, if it can be moved.
    pub(super) swapping: Option<Swapping>,
    /// Whether to ask NVML for the workers' memory.
    pub(super) measure: bool,
    /// GPU time charged to principals, in ns.
    pub(super) charged: HashMap<String, u64>,
    /// The same since the start of the daemon, and what ended sessions have done.
    pub(super) charged_ever: metrics::Ledger<u64>,
    pub(super) settled: metrics::Ledger<Settled>,
    pub(super) sessions_begun: u64,
    pub(super) sessions_lost: u64,
    pub(super) workers_crashed: u64,
    /// Sessions that ended because a kernel ran too long.
    pub(super) kernels_overrun: u64,
    pub(super) leases_granted: u64,
}

impl State {
    pub(super) fn pool(&self, kind: Kind) -> &Pool {
        match kind {
            Kind::Gpu => &self.gpu,
            Kind::Nvml => &self.nvml,
        }
    }

    /// Whether no session may begin any more.
    pub(super) fn stopped(&self) -> bool {
        self.draining() || self.closed
    }

    /// The kind of a starting worker.
    pub(super) fn starting(&self, pid: u32) -> Option<Kind> {
        self.workers.get(&pid).filter(|managed| managed.stage == Stage::Starting).map(|managed| managed.kind)
    }

    pub(super) fn pool_mut(&mut self, kind: Kind) -> &mut Pool {
        match kind {
            Kind::Gpu => &mut self.gpu,
            Kind::Nvml => &mut self.nvml,
        }
    }
}

impl Server {
    pub(super) fn new(options: Serve, inherited: &mut Inherited) -> anyhow::Result<Server> {
        let trust = if Trust::wanted(&options) { Some(Trust::open(&options)?) } else { None };
        let policy = Mutex::new(Arc::new(read_policy(&options)?));
        let audit = Audit::open(options.audit_log.as_deref())?;
        let sockets = options.mps.as_deref().map(mps::sockets);
        let mps_runs = options.mps.is_some().into();
        let confining = Confining::new(&options.sandbox, &options.worker.backing, sockets.as_deref());
        let chosen = options.worker.backing.chosen();
        let (state, changed) = (Mutex::new(State { chosen, ..State::default() }), Condvar::new());
        let succession = Succession::new(inherited).context("what the next daemon gets")?;
        let (nudge, bell) = (Nudge::new()?, Bell::take_or_new(inherited, &succession.store)?);
        let (gpus, refusals, waits, asks) = Default::default();
        let cache = options.cache.open().context("opening the cache (--cache)")?;
        Ok(Server {
            options,
            confining,
            state,
            changed,
            measuring: Condvar::new(),
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
            mps_runs,
            log_limits: LogLimits::default(),
        })
    }

    /// Opens a connection to a client's blocks in the cache and returns the worker's end. `None`: there is no
    /// cache, or it cannot be used.
    pub(super) fn cache_of(&self, client: &str) -> Option<UnixStream> {
        let store = self.cache.as_ref()?;
        let opened = UnixStream::pair().and_then(|(ours, theirs)| {
            // Sessions that have ended may have a connection, too, as long as their workers stay.
            cache::serve(store, client, ours, 2 * self.options.max_sessions)?;
            Ok(theirs)
        });
        opened.inspect_err(|e| tracing::warn!(client, "a session does without the cache: {e}")).ok()
    }

    /// From now on, these are the rules.
    pub(super) fn set_policy(&self, policy: Policy) {
        *self.policy.lock().unwrap_or_else(|e| e.into_inner()) = Arc::new(policy);
        // Whoever has seen this number has these rules, or newer ones.
        self.lock().rules_read += 1;
    }

    /// The rules as they are now.
    pub(super) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// Why a client verified as this principal may begin nothing, if so. Its access may have been revoked
    /// since.
    pub(super) fn may_not_begin(&self, principal: &Principal) -> Option<String> {
        let doubt = self.trust.as_ref().and_then(|trust| trust.doubt(principal));
        doubt.or_else(|| self.not_allowed(&principal.name))
    }

    /// What the rules of now give a client verified as this principal. An error: it may begin nothing.
    pub(super) fn granted(&self, principal: &Principal) -> Result<Grant, Refused> {
        let doubt = self.trust.as_ref().and_then(|trust| trust.doubt(principal));
        let grant = doubt.map_or_else(|| self.policy().grant(&principal.name, &self.options.share), Err);
        grant.map_err(|why| Refused(Reason::NotAllowed, why))
    }

    /// Why sessions and leases of this principal may not go on, if so.
    pub(super) fn may_not_go_on(&self, principal: &Principal) -> Option<String> {
        let revoked = self.trust.as_ref().and_then(|trust| trust.revoked(principal));
        revoked.or_else(|| self.not_allowed(&principal.name))
    }

    /// Why the rules give a principal nothing, if so.
    pub(super) fn not_allowed(&self, principal: &str) -> Option<String> {
        self.policy().grant(principal, &self.options.share).err()
    }

    /// Tells a client why it is refused. `who`: the verified client, if any.
    pub(super) fn refuse(
        &self,
        connection: &Control,
        who: Option<&Principal>,
        peer: &str,
        client: &str,
        program: &str,
        refused: &Refused,
    ) {
        let Refused(cause, reason) = refused;
        self.refusals.count(*cause);
        let client_name = who.map(|who| who.name.as_str());
        if let Some(not_shown) = self.log_limits.allow(client_name, Instant::now()) {
            tracing::info!(peer, client, program, "refused: {reason}{not_shown}");
            self.audit.refused(who, peer, client, program, &format!("{reason}{not_shown}"));
        }
        // The client may be gone already.
        let _ = connection.send_welcome(&welcome(cause.answer(), [0; 16], 0, reason));
    }

    /// Tells a waiting client why it is refused.
    pub(super) fn refuse_parked(&self, parked: &Parked, refused: &Refused) {
        let Parked { connection, principal, peer, client, program, .. } = parked;
        self.refuse(connection, Some(principal), peer, client, program, refused);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A device's problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Illness {
    /// In words, for the log, the status and clients.
    pub(super) why: String,
    pub(super) since: Instant,
    /// Whether it is permanent: the device serves again only after the server was restarted.
    pub(super) lasting: bool,
    /// What CUDA reports to every program on the device.
    pub(super) error: Option<Status>,
}

/// Reads the rules that the options name.
pub(super) fn read_policy(options: &Serve) -> Result<Policy, options::Error> {
    let read = |path: &std::path::PathBuf| Policy::read(path, &options.worker.backing.devices);
    options.clients.as_ref().map_or_else(|| Ok(Policy::default()), read)
}
