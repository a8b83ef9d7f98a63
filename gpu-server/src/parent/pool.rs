//! Workers without a session, which the daemon starts in advance.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::ValueEnum;
use sandbox::{Command, Process, Report};

use super::mps;
use super::queue;
use super::state::{Server, State};
use super::takeover::kept;
use super::watch::{describe, start_watching};
use super::workers::{Managed, Worker};
use crate::config::{Backend, Serve, WorkerOptions};
use crate::worker_protocol::{self, FromWorker, Kind, ToWorker};

/// Device memory for a context in bytes, with a margin. It is 530 MiB on an H100.
const CONTEXT: u64 = 640 << 20;

/// Starts the thread that keeps the pools filled.
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

/// Whether the first worker for sessions that use devices is still to become ready, or to fail.
pub(super) fn first_is_awaited(state: &State, options: &Serve, now: Instant) -> bool {
    let pool = state.pool(Kind::Gpu);
    let settled = pool.moved.is_some() || pool.failed > 0;
    !settled && (pool.starting > 0 || next(state, options, Kind::Gpu, 1, now).is_some())
}

/// The next step for one pool: it needs a worker for each waiting client that could have devices now, and the
/// spare ones. At most as many start at the same time as there are cores, and as fit into the device's
/// memory.
fn next(state: &State, options: &Serve, kind: Kind, cores: usize, now: Instant) -> Option<Next> {
    if state.stopped() || state.fatal.is_some() {
        return None;
    }
    // Without a healthy device, no worker could serve.
    if kind == Kind::Gpu && state.well(options).is_some_and(|well| well.is_empty()) {
        return None;
    }
    let pool = state.pool(kind);
    let spare = match kind {
        Kind::Nvml => 0,
        Kind::Gpu if pool.begun == 0 => options.first_workers.unwrap_or(options.workers),
        Kind::Gpu => options.workers,
    };
    // Clients choose devices, and lease them, before their first session, and only a worker knows them. One
    // that nobody needs ends when it has told them.
    let spare = if kind == Kind::Gpu && state.serving.is_none() { spare.max(1) } else { spare };
    let ready = pool.idle.len() + pool.starting;
    if ready >= spare + state.placeable(options, kind, ready + 1) {
        return None;
    }
    // After a failure, or on a full device, only one worker at a time is tried.
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

fn start_one(server: &Arc<Server>, kind: Kind) -> anyhow::Result<()> {
    let (ours, theirs) = worker_protocol::pair().context("creating a socket pair")?;
    let process = spawn(server, &theirs)?;
    drop(theirs);
    let orders = server.confining.orders(&process);
    let alive = process.alive().map(|alive| alive.try_clone_to_owned()).transpose();
    let alive = alive.context("duplicating a descriptor")?;
    let worker = Arc::new(Worker::new(ours, &process, kept::describe(&process), alive));
    let options = {
        let mut state = server.lock();
        let well = state.well(&server.options).filter(|_| kind == Kind::Gpu);
        // The last healthy device may have failed meanwhile.
        let outdated = well.as_ref().is_some_and(Vec::is_empty);
        state.workers.insert(worker.pid(), Managed::starting(&worker, kind, outdated));
        if state.stopped() || outdated {
            worker.kill();
        }
        for_worker(&state, &server.options.worker, well)
    };
    if let Err(e) = start_watching(server, &worker, process) {
        // No thread would notice its end. Dropping its process has killed it.
        server.lock().workers.remove(&worker.pid());
        return Err(e);
    }
    let prepare = ToWorker::Prepare { orders, pid: worker.pid(), kind, options };
    // The watcher notices when the worker is gone.
    let _ = worker.send(&prepare, &[]);
    Ok(())
}

/// The options of a new worker. `well`: the healthy devices, if some are not.
fn for_worker(state: &State, options: &WorkerOptions, well: Option<Vec<u32>>) -> WorkerOptions {
    let mut options = options.clone();
    options.backing.devices = well.unwrap_or(options.backing.devices);
    options.backing.listed = state.known.listed();
    // `auto` is decided once. If NVIDIA's driver fails later, for example because it was replaced, a worker
    // says so instead of serving a GPU in software.
    let first = state.serving.as_ref().and_then(|(backend, _)| Backend::from_str(backend, false).ok());
    options.backing.backend = first.unwrap_or(options.backing.backend);
    options
}

fn spawn(server: &Server, socket: &OwnedFd) -> anyhow::Result<Process> {
    let fd = socket.as_raw_fd().to_string();
    // The executable that this process was started from, even if the file has been replaced since.
    let program = server.options.sandbox.program.as_deref().unwrap_or(Path::new("/proc/self/exe"));
    let mut command = Command::new(program, "rgpu-server")
        .arguments(["worker", "--fd", &fd, "--log", &server.options.log])
        .without_variables(handover::VARIABLES)
        // The driver's own mappings, such as managed variables, need addresses that are free in the client,
        // too. Programs map at the top of the address space, so a worker maps at the bottom (setarch(8) -L).
        .personality(libc::ADDR_COMPAT_LAYOUT as libc::c_ulong);
    // Loads a module's functions when they are first used, unless the operator chose otherwise.
    if std::env::var_os("CUDA_MODULE_LOADING").is_none() {
        command = command.variable("CUDA_MODULE_LOADING", "LAZY");
    }
    for (name, value) in server.options.mps.iter().flat_map(|folder| mps::variables(folder)) {
        command = command.variable(name, value);
    }
    let confining = &server.confining;
    if confining.on() {
        // One client's compiled code must not reach another, and a worker has no files that outlive it.
        command = command.variable("CUDA_CACHE_DISABLE", "1");
    }
    confining.start(&command, socket.as_fd()).context("starting a worker process")
}

/// Starts a worker only to find out what its sandbox lacks, and waits for its answer.
pub(super) fn probe(server: &Server) -> anyhow::Result<Report> {
    let (ours, theirs) = worker_protocol::pair().context("creating a socket pair")?;
    let mut process = spawn(server, &theirs)?;
    drop(theirs);
    let probe = ToWorker::Probe(server.confining.orders(&process));
    worker_protocol::send(ours.as_fd(), &probe, &[]).context("telling a worker what to do")?;
    let answer = worker_protocol::receive(ours.as_fd()).context("the answer of a worker")?;
    match answer {
        Some((FromWorker::Sandbox(Ok(report)), _)) => Ok(report),
        Some((FromWorker::Sandbox(Err(reason)), _)) => bail!(reason),
        _ => {
            let how = process.wait().map_or_else(|e| e.to_string(), describe);
            bail!("the worker that checks its sandbox {how}")
        }
    }
}

/// Keeps a ready worker, unless no client needs it any more.
pub(super) fn keep_idle(state: &mut State, options: &Serve, worker: &Arc<Worker>, kind: Kind) -> bool {
    let outdated = state.workers.get(&worker.pid()).is_some_and(|managed| managed.outdated);
    let stopped = state.stopped() || outdated;
    if stopped || queue::has_enough(state, options, kind, state.pool(kind).idle.len()) {
        worker.hang_up();
        return false;
    }
    state.pool_mut(kind).idle.push_back(Arc::clone(worker));
    true
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::super::queue::parked::Parked;
    use super::super::queue::tests::session_of_limits;
    use super::super::watch::{become_ready, remove_worker};
    use super::super::workers::MAX_PAUSE;
    use super::*;
    use crate::driver::cuda::nvml::Devices;
    use crate::driver::listed::Listed;
    use crate::limits::Limits;

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

    pub(in super::super) fn starting_worker(state: &mut State, pid: u32, kind: Kind) -> Arc<Worker> {
        let worker = Worker::fake(pid);
        state.workers.insert(pid, Managed::starting(&worker, kind, false));
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
    fn no_worker_starts_for_a_client_that_waits_for_devices() {
        let (mut state, now, options) = (State::default(), Instant::now(), options(&["--workers=2"]));
        state.serving = Some(("software".into(), vec!["a GPU".into()]));
        state.gpu.begun = 1;
        let mut session = session_of_limits(Limits { exclusive: true, ..Limits::test("another") });
        session.devices = vec![0];
        state.sessions.insert(50, session);
        waiting(&mut state, 32, Kind::Gpu);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 64, now), 2);
        state.sessions = Default::default();
        assert_eq!(started(&mut state, &options, Kind::Gpu, 64, now), 32);
    }

    #[test]
    fn the_first_worker_is_awaited_until_it_is_ready_or_has_failed() {
        let now = Instant::now();
        let awaited = |state: &State, flags: &[&str]| first_is_awaited(state, &options(flags), now);
        let mut state = State::default();
        assert!(awaited(&state, &["--workers=0"]) && awaited(&state, &[]));
        let worker = starting_worker(&mut state, 7, Kind::Gpu);
        assert!(awaited(&state, &[]));
        become_ready(&mut state, &worker).unwrap();
        state.gpu.succeed(now, None);
        assert!(!awaited(&state, &[]));
        let mut state = State::default();
        state.gpu.fail(now, "no driver".into());
        assert!(!awaited(&state, &[]));
        // The devices are known, and nobody needs a worker yet.
        let serving = Some(("software".into(), vec!["a GPU".into()]));
        let state = State { serving, ..State::default() };
        assert!(!awaited(&state, &["--workers=0"]) && awaited(&state, &["--workers=1"]));
    }

    #[test]
    fn a_private_server_keeps_one_worker_ready_until_its_first_session() {
        let (mut state, now) = (State::default(), Instant::now());
        let options = options(&["--workers=0", "--first-workers=1"]);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 1);
        (state.gpu.starting, state.gpu.begun) = (0, 1);
        state.serving = Some(("software".into(), vec!["a GPU".into()]));
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 0);
        waiting(&mut state, 3, Kind::Gpu);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 3);
    }

    #[test]
    fn a_server_without_spare_workers_starts_one_that_tells_its_devices() {
        let (mut state, now, options) = (State::default(), Instant::now(), options(&["--workers=0"]));
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 1);
        assert_eq!(started(&mut state, &options, Kind::Nvml, 8, now), 0);
        (state.gpu.starting, state.serving) = (0, Some(("software".into(), vec!["a GPU".into()])));
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 0);
    }

    /// A daemon that has other devices than the one before, of which one was unhealthy.
    #[test]
    fn the_worker_that_tells_the_devices_starts_whatever_was_unhealthy_before() {
        use super::super::state::Illness;

        let (mut state, now, options) = (State::default(), Instant::now(), options(&["--workers=0"]));
        let illness = Illness { why: "a test".into(), since: now, lasting: true, error: None };
        state.ill.insert(1, illness);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 1);
        // If a client waits, another one that does not use that device.
        state.serving = Some(("software".into(), vec!["a".into(), "b".into()]));
        state.gpu.starting = 0;
        waiting(&mut state, 1, Kind::Gpu);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 1);
        assert_eq!(state.well(&options), Some(vec![0]));
        state.serving = Some(("software".into(), vec!["b".into()]));
        state.ill = state.ill.into_values().map(|illness| (0, illness)).collect();
        state.gpu.starting = 0;
        assert_eq!(started(&mut state, &options, Kind::Gpu, 8, now), 0, "none could serve");
    }

    #[test]
    fn later_workers_count_devices_as_the_first_has_listed_them() {
        let known = ["a", "b"].map(Listed::test).to_vec();
        let state = State { known: Arc::new(Devices::new(known.clone())), ..State::default() };
        assert_eq!(for_worker(&state, &options(&[]).worker, None).backing.listed, known);
    }

    #[test]
    fn later_workers_use_the_backend_of_the_first() {
        let (mut state, options) = (State::default(), options(&["--devices=0,1"]).worker);
        let chosen = |state: &State| {
            let chosen = for_worker(state, &options, Some(vec![1])).backing;
            (chosen.backend, chosen.devices)
        };
        assert_eq!(chosen(&state), (Backend::Auto, vec![1]));
        for (name, backend) in [("cuda", Backend::Cuda), ("software", Backend::Software)] {
            state.serving = Some((name.into(), Vec::new()));
            assert_eq!(chosen(&state), (backend, vec![1]));
        }
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
            state.gpu.not_before = None;
            remove_worker(&mut state, failure, false, "exited", None);
            assert!(state.gpu.failures == failure && state.gpu.not_before.is_some());
            // The same failure at a time that is known here.
            state.gpu.failures -= 1;
            state.gpu.fail(now, "it exited".into());
            let Some(Next::At(when)) = next(&state, &options, Kind::Gpu, 16, now) else {
                panic!("no pause after {failure} failures")
            };
            let longer = when - now;
            assert!(longer > pause || longer == MAX_PAUSE);
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
        let now = Instant::now();
        remove_worker(&mut state, 1, false, "exited", None);
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
        let now = Instant::now();
        remove_worker(&mut state, 1, true, "exited", Some("no memory for its context".into()));
        assert_eq!(state.gpu.failures, 0);
        assert!(matches!(next(&state, &options, Kind::Gpu, 16, now), Some(Next::At(_))));
        let other = starting_worker(&mut state, 2, Kind::Gpu);
        become_ready(&mut state, &other).unwrap();
        remove_worker(&mut state, 2, true, "exited", None);
        assert_eq!(started(&mut state, &options, Kind::Gpu, 16, now), 1);
    }

    #[test]
    fn a_ready_worker_that_no_client_needs_is_ended() {
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
