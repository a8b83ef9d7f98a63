//! Serves the daemon's counters as metrics.
//!
//! A worker is trusted no more than elsewhere. Its reports are values under its own principal's name, and
//! every name that a client chooses goes through a [ledger](metrics::Ledger), which bounds their number. What
//! a session has done is added to the ledger when it is over ([`State::settle`]); running sessions are added
//! when somebody asks.

pub(super) mod totals;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use handover::Inherited;
use metrics::serve::Listener;
use metrics::{Place, Samples};

use self::totals::Settled;
use super::families as f;
use super::host::host_name;
use super::listen::{Files, bind_unix};
use super::session::Session;
use super::state::{Server, State};
use crate::cache::store::Figures;
use crate::driver::cuda::nvml::readings::Reading;
use crate::worker_protocol::Kind;

/// How long a scrape waits for NVML.
const NVML_WITHIN: Duration = Duration::from_secs(1);

impl State {
    /// Adds a session that is over, and whose worker has ended.
    pub(super) fn settle(&mut self, session: &Session) {
        self.settled.value(&session.key, Instant::now()).add(session);
        self.settle_moved(session);
    }

    /// Notes the total time that the arbiter has charged to principals since they have had sessions.
    pub(super) fn note_charged(&mut self, charged: &HashMap<String, u64>) {
        let now = Instant::now();
        for (principal, ns) in charged {
            let more = ns.saturating_sub(self.charged.get(principal).copied().unwrap_or(0));
            if more > 0 {
                let mut sessions = self.sessions.values();
                let session = sessions.find(|session| session.limits.principal == *principal);
                let owner = session.map_or(principal.as_str(), |session| session.limits.owner());
                let key = self.charged_ever.enter_for(owner, [principal, "", ""], now);
                let sum = self.charged_ever.value(&key, now);
                *sum = sum.saturating_add(more);
            }
        }
    }
}

/// Starts serving metrics, if the options ask for it.
pub(super) fn start(
    server: &Arc<Server>,
    inherited: &mut Inherited,
    files: &mut Files,
) -> anyhow::Result<()> {
    let options = &server.options.metrics;
    options.check()?;
    let Some(place) = &options.listen else { return Ok(()) };
    let (listener, token) = match place {
        Place::Unix(path) => (Listener::Unix(bind_unix(server, path, 0o660, inherited, files)?), None),
        Place::Tcp(host, port) => {
            let listener = Listener::tcp(host, *port);
            let listener = listener.with_context(|| format!("cannot serve metrics at {place}"))?;
            (listener, options.token_file.clone())
        }
    };
    let started = SystemTime::now();
    let of_server = Arc::clone(server);
    metrics::serve::start(listener, token, move || collect(&of_server, started).text())
        .context("starting to serve metrics")?;
    tracing::info!("serving metrics at {place}");
    Ok(())
}

/// All current values.
fn collect(server: &Server, started: SystemTime) -> Samples {
    // Before the lock: NVML may be slow.
    let readings = server.gpus.fresh(NVML_WITHIN);
    let mut samples = Samples::default();
    let since_epoch = started.duration_since(UNIX_EPOCH).unwrap_or_default();
    samples.add(&f::STARTED, &[], since_epoch.as_secs_f64());
    for (reason, count) in server.refusals.all() {
        samples.add(&f::REFUSALS, &[reason.name()], count);
    }
    for (kind, waits) in Kind::ALL.into_iter().zip(&server.waits.0) {
        samples.add(&f::WAITED, &[kind.name()], waits.clone());
    }
    if let Some(cache) = &server.cache {
        let Figures { bytes, limits, hits, misses, saved, damaged, failed, .. } = cache.figures();
        for (family, value) in [
            (&f::CACHE_SIZE, bytes),
            (&f::CACHE_LIMIT, limits.all),
            (&f::CACHE_HITS, hits),
            (&f::CACHE_MISSES, misses),
            (&f::CACHE_SAVED, saved),
            (&f::CACHE_DAMAGED, damaged),
            (&f::CACHE_FAILED, failed),
        ] {
            samples.add(family, &[], value);
        }
    }
    if let Some(missing) = server.audit.missing() {
        samples.add(&f::AUDIT_LOST, &[], missing);
    }
    let state = server.lock();
    let backend = state.serving.as_ref().map_or("", |(backend, _)| backend.as_str());
    samples.add(&f::INFO, &[env!("CARGO_PKG_VERSION"), backend], 1u64);
    samples.add(&f::DRAINING, &[], state.draining());
    samples.add(&f::SESSIONS_LIMIT, &[], server.options.max_sessions);
    samples.add(&f::WORKERS_CRASHED, &[], state.workers_crashed);
    samples.add(&f::KERNELS_OVERRUN, &[], state.kernels_overrun);
    samples.add(&f::LEASES_LIMIT, &[], server.options.max_leases);
    samples.add(&f::LEASES_GRANTED, &[], state.leases_granted);
    let mut owners: BTreeMap<&str, u64> = BTreeMap::new();
    state.leases.all().for_each(|lease| *owners.entry(&lease.principal).or_default() += 1);
    owners.into_iter().for_each(|(principal, leases)| samples.add(&f::LEASES, &[principal], leases));
    if let Some(swapping) = &state.swapping {
        let [left, returned] = state.moved();
        for (family, value) in [
            (&f::SWAP_LIMIT, server.options.worker.swap.memory),
            (&f::SWAP_KEPT, state.kept_for_swap()),
            (&f::SWAPPED_OUT, left),
            (&f::SWAPPED_IN, returned),
            (&f::SWAP_HELD_BACK, swapping.held_back),
        ] {
            samples.add(family, &[], value);
        }
    }
    queue(&mut samples, &state);
    sessions(&mut samples, &state, &readings);
    gpus(&mut samples, server, &state, &readings);
    samples
}

fn queue(samples: &mut Samples, state: &State) {
    for kind in Kind::ALL {
        let pool = state.pool(kind);
        samples.add(&f::WAITING, &[kind.name()], pool.queue.len());
        let longest = pool.queue.iter().map(|parked| parked.since.elapsed()).max().unwrap_or_default();
        samples.add(&f::WAITING_LONGEST, &[kind.name()], longest.as_secs_f64());
        samples.add(&f::WORKERS_FAILED, &[kind.name()], pool.failed);
    }
    for managed in state.workers.values() {
        samples.add(&f::WORKERS, &[managed.kind.name(), managed.stage.name()], 1u64);
    }
}

fn sessions(samples: &mut Samples, state: &State, readings: &[Reading]) {
    for (key, settled) in state.settled.rows() {
        count(samples, key.labels(), settled);
    }
    for (worker, session) in state.sessions.iter().filter(|(_, session)| session.begun) {
        let names = session.key.labels();
        let [principal, client, program] = names;
        let mut own = Settled::default();
        own.add(session);
        count(samples, names, &own);
        let labels = [principal, client, program, session.kind.name(), session.transport];
        samples.add(&f::SESSIONS, &labels, 1u64);
        samples.add(&f::SESSIONS_PARKED, &names, session.parked.is_some());
        for number in &session.devices {
            let labels = [principal, client, program, &number.to_string()];
            samples.add(&f::MEMORY, &labels, session.account.held(*number as usize));
            samples.add(&f::MEMORY_AWAY, &labels, session.account.away(*number));
            let reading = readings.iter().find(|reading| reading.device == *number);
            if let Some(percent) = reading.and_then(|reading| reading.processes.get(worker)) {
                samples.add(&f::SM_UTILIZATION, &labels, f64::from(*percent) / 100.0);
            }
        }
    }
    let mut limited: Vec<(&str, u64)> = state
        .sessions
        .values()
        .map(|session| (session.key.labels()[0], session.limits.total.device_memory))
        .filter(|(_, limit)| *limit > 0)
        .collect();
    limited.sort_unstable();
    limited.dedup_by_key(|(principal, _)| *principal);
    for (principal, limit) in limited {
        samples.add(&f::MEMORY_LIMIT, &[principal], limit);
    }
    for (client, (limit, held)) in clients(state) {
        samples.add(&f::CLIENT_MEMORY_LIMIT, &[client], limit);
        for (number, held) in held {
            samples.add(&f::CLIENT_MEMORY, &[client, &number.to_string()], held);
        }
    }
    for (key, ns) in state.charged_ever.rows() {
        samples.add(&f::SHARED_TIME, &key.labels()[..1], *ns as f64 / 1e9);
    }
}

/// Clients with a limit of device memory: the limit, and what they hold of each device with all of their
/// leases.
fn clients(state: &State) -> BTreeMap<&str, (u64, BTreeMap<u32, u64>)> {
    let mut all: BTreeMap<&str, (u64, BTreeMap<u32, u64>)> = BTreeMap::new();
    for session in state.sessions.values() {
        let limits = &session.limits;
        let (limit, held) = all.entry(limits.owner()).or_default();
        *limit = limits.client_memory.max(*limit);
        for number in &session.devices {
            let sum = held.entry(*number).or_default();
            *sum = sum.saturating_add(session.account.held(*number as usize));
        }
    }
    all.retain(|_, (limit, _)| *limit > 0);
    all
}

/// Adds what sessions under these names have done.
fn count(samples: &mut Samples, names: [&str; 3], done: &Settled) {
    let counters = &done.counters;
    for (family, value) in [
        (&f::SESSIONS_BEGUN, done.sessions),
        (&f::SESSIONS_LOST, done.lost),
        (&f::RESUMES, done.resumed),
        (&f::COMMANDS, counters.commands),
        (&f::LAUNCHES, counters.launches),
        (&f::COPIES, counters.copies),
        (&f::ROUND_TRIPS, counters.round_trips),
        (&f::RECEIVED, counters.bytes_in),
        (&f::SENT, counters.bytes_out),
        (&f::COPIED, counters.bytes_copied),
        (&f::DIRECT, counters.bytes_direct),
        (&f::DIRECT_VERBS, counters.bytes_direct_verbs),
    ] {
        samples.add(family, &names, value);
    }
    samples.add(&f::SESSION_TIME, &names, done.time.as_secs_f64());
}

fn gpus(samples: &mut Samples, server: &Server, state: &State, readings: &[Reading]) {
    for number in state.devices(&server.options) {
        let gpu = number.to_string();
        samples.add(&f::GPU_HEALTHY, &[&gpu], !state.ill.contains_key(&number));
        let users = state.sessions.values().filter(|session| session.devices.contains(&number)).count();
        samples.add(&f::GPU_SESSIONS, &[&gpu], users);
        let leases = state.leases.all().filter(|lease| lease.devices.contains(&number)).count();
        samples.add(&f::GPU_LEASES, &[&gpu], leases);
    }
    let host = host_name();
    for reading in readings {
        let gpu = reading.device.to_string();
        let labels = [gpu.as_str(), &reading.uuid, &reading.name, &host];
        let mut add = |family, value: Option<f64>| {
            if let Some(value) = value {
                samples.add(family, &labels, value);
            }
        };
        let mib = |bytes: u64| (bytes >> 20) as f64;
        add(&f::GPU_UTIL, reading.utilization.map(|(gpu, _)| gpu.into()));
        add(&f::MEM_COPY_UTIL, reading.utilization.map(|(_, memory)| memory.into()));
        add(&f::FB_FREE, reading.memory.map(|(free, _)| mib(free)));
        add(&f::FB_USED, reading.memory.map(|(_, used)| mib(used)));
        add(&f::GPU_TEMP, reading.temperature.map(f64::from));
        add(&f::POWER_USAGE, reading.power);
        add(&f::SM_CLOCK, reading.clocks.map(|(multiprocessors, _)| multiprocessors.into()));
        add(&f::MEM_CLOCK, reading.clocks.map(|(_, memory)| memory.into()));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Instant;

    use super::super::queue::tests::session_of_limits;
    use super::*;
    use crate::limits::{Amounts, Limits};
    use crate::worker_protocol::Counters;

    fn text(state: &State) -> String {
        let mut samples = Samples::default();
        sessions(&mut samples, state, &[]);
        samples.text()
    }

    fn value(text: &str, series: &str) -> Option<f64> {
        text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
    }

    fn session(state: &mut State, worker: u32, program: &str, counters: Counters) {
        let mut session = session_of_limits(Limits { principal: "host1".into(), ..Limits::default() });
        session.key = state.settled.enter(["host1", "vm7", program], Instant::now());
        (session.begun, session.counters) = (true, counters);
        state.sessions.insert(worker, session);
    }

    #[test]
    fn counters_do_not_fall_when_a_session_ends() {
        let mut state = State::default();
        let counters = Counters { commands: 7, launches: 3, bytes_in: 100, ..Counters::default() };
        session(&mut state, 1, "train", counters);
        session(&mut state, 2, "train", counters);
        let commands = "rgpu_server_commands_total{principal=\"host1\",client=\"vm7\",program=\"train\"}";
        let begun = commands.replace("commands", "sessions_begun");
        let running = "rgpu_server_sessions{principal=\"host1\",client=\"vm7\",program=\"train\",kind=\"gpu\",transport=\"local\"}";
        let now = text(&state);
        assert_eq!(
            (value(&now, commands), value(&now, &begun), value(&now, running)),
            (Some(14.0), Some(2.0), Some(2.0))
        );
        let ended = state.sessions.remove(&2).unwrap();
        state.settle(&ended);
        let now = text(&state);
        assert_eq!(
            (value(&now, commands), value(&now, &begun), value(&now, running)),
            (Some(14.0), Some(2.0), Some(1.0))
        );
    }

    #[test]
    fn false_reports_stay_under_the_workers_own_principal() {
        let mut state = State::default();
        let most = Counters { commands: u64::MAX, ..Counters::default() };
        session(&mut state, 1, "a", most);
        session(&mut state, 2, "a", most);
        session(&mut state, 3, "b", Counters { commands: 1, ..Counters::default() });
        let now = text(&state);
        let of = |program| {
            format!("rgpu_server_commands_total{{principal=\"host1\",client=\"vm7\",program=\"{program}\"}}")
        };
        assert_eq!(value(&now, &of("a")), Some(u64::MAX as f64));
        assert_eq!(value(&now, &of("b")), Some(1.0));
    }

    #[test]
    fn a_clients_memory_counts_under_all_of_its_leases() {
        let mut state = State::default();
        for (worker, principal) in [(1, "a 01"), (2, "a 02"), (3, "b")] {
            let mut session = session_of_limits(Limits {
                client_memory: if principal == "b" { 0 } else { 20 },
                total: Amounts { device_memory: 20, ..Amounts::default() },
                ..Limits::test(principal)
            });
            session.devices = vec![0];
            session.account.measured(0, 10);
            state.sessions.insert(worker, session);
        }
        let now = text(&state);
        let held = value(&now, "rgpu_server_client_memory_bytes{principal=\"a\",gpu=\"0\"}");
        let limit = value(&now, "rgpu_server_client_memory_limit_bytes{principal=\"a\"}");
        assert_eq!((held, limit), (Some(20.0), Some(20.0)), "{now}");
        assert!(!now.contains("client_memory_bytes{principal=\"b\""), "without a limit: {now}");
    }

    #[test]
    fn charged_time_is_kept_after_a_principals_last_session() {
        let mut state = State::default();
        for charged in
            [&[("a", 1_000_000_000), ("b", 5)][..], &[("a", 1_500_000_000)], &[], &[("a", 500_000_000)]]
        {
            let charged: HashMap<String, u64> =
                charged.iter().map(|(name, ns)| ((*name).to_owned(), *ns)).collect();
            state.note_charged(&charged);
            state.charged = charged;
        }
        let series = "rgpu_server_shared_gpu_time_seconds_total{principal=\"a\"}";
        assert_eq!(value(&text(&state), series), Some(2.0));
    }
}
