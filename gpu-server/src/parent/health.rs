//! The thread that watches the devices' health, and the consequences.
//!
//! ```text
//!  NVML, or a test's FIFO ─▶ event ─▶ verdict ─▶ log, status
//!                                        ├─ placement: no new sessions; workers without a session are replaced by others that don't use the device
//!                                        └─ sessions on a lost device get CUDA's error
//! ```
//!
//! Running sessions on an unhealthy device continue until they end by themselves: it **drains**.

use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use protocol::Status;

use super::queue;
use super::state::{Illness, Server, State};
use super::workers::{Stage, Worker};
use crate::config::Serve;
use crate::driver::cuda::nvml::Devices;
use crate::driver::cuda::nvml::health::Watch;
use crate::driver::health::{Event, Verdict};
use crate::worker_protocol::{Kind, ToWorker};

/// The time between attempts to start watching.
const RETRY: Duration = Duration::from_secs(60);

/// Starts the thread.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let watched = Arc::clone(server);
    let watch: Box<dyn FnOnce() + Send> = match &server.options.worker.backing.software_events {
        // Opened for writing, too, so that it doesn't end with the first test's command. Opening never
        // blocks.
        Some(path) => {
            let events = open_fifo(path)?;
            Box::new(move || watch_fifo(&watched, events))
        }
        None => Box::new(move || watch_nvml(&watched)),
    };
    std::thread::Builder::new()
        .name("rgpu-health".into())
        .spawn(watch)
        .context("starting to watch devices")?;
    Ok(())
}

fn open_fifo(path: &Path) -> anyhow::Result<std::fs::File> {
    let open = std::fs::File::options().read(true).write(true).open(path);
    open.with_context(|| format!("--software-events {}", path.display()))
}

/// Waits until a worker has reported which devices the server serves, and which there are.
fn serving(server: &Server) -> (String, Vec<u32>, Arc<Devices>) {
    let mut state = server.lock();
    loop {
        if let Some((backend, _)) = &state.serving {
            return (backend.clone(), state.devices(&server.options), Arc::clone(&state.known));
        }
        state = server.changed.wait(state).unwrap_or_else(|e| e.into_inner());
    }
}

fn watch_fifo(server: &Server, events: std::fs::File) {
    serving(server);
    for line in std::io::BufReader::new(events).lines().map_while(Result::ok) {
        match Event::parse(&line) {
            Some((device, event)) => happened(server, device, event, event.imitated()),
            None => tracing::warn!("--software-events: {line:?} is not an event"),
        }
    }
}

fn watch_nvml(server: &Server) {
    let (backend, numbers, known) = serving(server);
    if backend != "cuda" {
        return;
    }
    let mut warned = false;
    let mut watch = loop {
        match Watch::new(&known, &numbers) {
            Ok(watch) => break watch,
            Err(status) if !warned => {
                warned = true;
                tracing::warn!(
                    "cannot watch the devices' health (nvmlReturn_t {status}); trying again every minute"
                );
            }
            Err(_) => {}
        }
        std::thread::sleep(RETRY);
    };
    tracing::info!("watching the health of device(s) {numbers:?}");
    loop {
        for (device, event) in watch.next() {
            happened(server, device, event, None);
        }
    }
}

/// Handles an event of a device. `imitated`: what its driver would report to programs by itself.
fn happened(server: &Server, device: u32, event: Event, imitated: Option<Status>) {
    let mut state = server.lock();
    if !state.devices(&server.options).contains(&device) {
        tracing::info!(device, "{event}; this server does not share the device");
        return;
    }
    if event.verdict() == Verdict::Note {
        drop(state);
        // Programs can cause any number of them.
        if let Some(not_shown) = server.log_limits.notes.allow() {
            tracing::warn!(device, "{event}{not_shown}");
        }
        return;
    }
    let Some(failing) = state.judge(device, event, imitated, Instant::now()) else { return };
    let message = |status: Status| ToWorker::DeviceFailed { device, status: status.0 };
    for (worker, status) in failing {
        // A worker that has ended needs no message.
        let _ = worker.send(&message(status), &[]);
    }
    state.save_daemon(&server.succession, false);
    drop(state);
    // Workers must be replaced, and waiting clients' prospects may have changed.
    queue::serve_all(server);
    server.changed.notify_all();
    server.nudge.nudge();
}

impl State {
    /// Numbers of the devices that the server shares, once a worker has reported how many there are.
    pub(super) fn devices(&self, options: &Serve) -> Vec<u32> {
        let shared = &options.worker.backing.devices;
        let count = self.serving.as_ref().map_or(0, |(_, names)| names.len() as u32);
        if shared.is_empty() { (0..count).collect() } else { shared.clone() }
    }

    /// Those that take sessions. `None`: all are healthy, or no worker has reported yet which there are.
    pub(super) fn well(&self, options: &Serve) -> Option<Vec<u32>> {
        let devices = self.devices(options);
        let well = |number: &u32| !self.ill.contains_key(number);
        (!self.ill.is_empty() && !devices.is_empty()).then(|| devices.into_iter().filter(well).collect())
    }

    /// Notes an event. Returns the workers whose programs must get an error, or `None` if nothing has
    /// changed.
    fn judge(
        &mut self,
        device: u32,
        event: Event,
        imitated: Option<Status>,
        now: Instant,
    ) -> Option<Vec<(Arc<Worker>, Status)>> {
        let before = self.ill.get(&device);
        let (lasting, error) = match event.verdict() {
            Verdict::Note => return None,
            Verdict::Well => {
                if before.is_none_or(|illness| illness.lasting) {
                    return None;
                }
                tracing::info!(device, "healthy again: {event}; it takes new sessions");
                self.ill.remove(&device);
                self.replace_workers();
                return Some(Vec::new());
            }
            Verdict::Pause if before.is_some() => return None,
            Verdict::Pause => (false, None),
            Verdict::Fail { error } => (true, error.or(imitated)),
        };
        let sessions = self.sessions.values().filter(|session| session.devices.contains(&device)).count();
        match before {
            Some(before) if before.lasting && (before.error.is_some() || error.is_none()) => {
                tracing::error!(device, "{event}");
                return None;
            }
            _ => {
                let told = error.map_or("go on", |_| "get CUDA's error");
                tracing::error!(
                    device,
                    "unhealthy: {event}; it takes no new sessions, and its {sessions} running ones {told}"
                );
            }
        }
        self.ill.insert(device, Illness { why: event.to_string(), since: now, lasting, error });
        self.replace_workers();
        let uses = |worker: &u32| {
            self.sessions
                .get(worker)
                .is_some_and(|session| session.begun && session.devices.contains(&device))
        };
        let failing = self.workers.iter().filter(|(pid, _)| error.is_some() && uses(pid));
        Some(failing.filter_map(|(_, managed)| Some((Arc::clone(&managed.worker), error?))).collect())
    }

    /// Errors that CUDA reports on a session's devices, for a session that begins just when a device fails.
    pub(super) fn errors_of(&self, devices: &[u32]) -> Vec<ToWorker> {
        let error = |device: &u32| {
            let status = self.ill.get(device)?.error?.0;
            Some(ToWorker::DeviceFailed { device: *device, status })
        };
        devices.iter().filter_map(error).collect()
    }

    /// Replaces waiting workers, which may have a context on an unhealthy device, or none on one that has
    /// recovered; also if the Multi-Process Service is another one.
    pub(super) fn replace_workers(&mut self) {
        for managed in self.workers.values_mut() {
            if managed.kind == Kind::Gpu && managed.stage != Stage::Serving {
                managed.outdated = true;
                managed.worker.kill();
            }
        }
        self.gpu.idle.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use crate::parent::queue::tests::session_of_limits;

    fn state() -> (State, Serve) {
        let mut state =
            State { serving: Some(("software".into(), vec!["a".into(), "b".into()])), ..State::default() };
        for (worker, device) in [(1, 0), (2, 1)] {
            let mut session = session_of_limits(Limits::default());
            (session.devices, session.begun) = (vec![device], true);
            state.sessions.insert(worker, session);
            let managed = super::super::workers::Managed::fake(worker, Stage::Serving);
            state.workers.insert(worker, managed);
        }
        (state, Serve::from_flags(&[]))
    }

    fn happens(state: &mut State, device: u32, event: Event) -> Option<Vec<(u32, u32)>> {
        let told = state.judge(device, event, event.imitated(), Instant::now())?;
        Some(told.into_iter().map(|(worker, status)| (worker.pid(), status.0)).collect())
    }

    #[test]
    fn only_sessions_on_the_device_get_its_error_and_only_once() {
        let (mut state, options) = state();
        assert_eq!(state.well(&options), None);
        assert_eq!(happens(&mut state, 1, Event::Xid(31)), None);
        assert_eq!(happens(&mut state, 1, Event::Xid(79)), Some(vec![(2, 999)]));
        assert_eq!(happens(&mut state, 1, Event::Lost), None);
        assert_eq!(state.well(&options), Some(vec![0]));
        assert_eq!(state.errors_of(&[0, 1]).len(), 1);
    }

    #[test]
    fn a_device_that_needs_a_reset_drains_and_fails_when_it_gets_worse() {
        let (mut state, _) = state();
        assert_eq!(happens(&mut state, 0, Event::Recovery(1)), Some(vec![]));
        assert_eq!(happens(&mut state, 0, Event::Xid(119)), None);
        assert_eq!(happens(&mut state, 0, Event::Cool), None, "that does not heal it");
        assert_eq!(happens(&mut state, 0, Event::Xid(95)), Some(vec![(1, 214)]));
    }

    #[test]
    fn a_hot_device_takes_sessions_again_when_it_is_cool() {
        let (mut state, options) = state();
        let spare = super::super::workers::Managed::fake(7, Stage::Idle);
        state.gpu.idle.push_back(Arc::clone(&spare.worker));
        state.workers.insert(7, spare);
        assert_eq!(happens(&mut state, 0, Event::Hot), Some(vec![]));
        assert_eq!(state.well(&options), Some(vec![1]));
        assert!(state.gpu.idle.is_empty() && state.workers[&7].outdated);
        assert_eq!(happens(&mut state, 0, Event::Hot), None);
        assert_eq!(happens(&mut state, 0, Event::Cool), Some(vec![]));
        assert_eq!(state.well(&options), None);
    }
}
