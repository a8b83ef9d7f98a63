//! NVML's current readings of the devices: utilization, memory, temperature, power.
//!
//! A thread queries NVML on demand and at most twice a second, because a query takes the driver's time.
//! Nobody waits for long, because NVML may not answer for a failed device. Software devices have no such
//! figures.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::state::Server;
use crate::driver::cuda::nvml::readings::{self, Reading};

/// Figures younger than this are not queried again.
const FRESH: Duration = Duration::from_millis(500);
/// Older figures are not shown.
const STALE: Duration = Duration::from_secs(10);
/// Reading the status twice within this time counts as watching it. The first read queries no figures,
/// because reading the status is also how to find out whether a daemon is ready.
const WATCHES: Duration = Duration::from_secs(10);

/// The latest figures, and who wants new ones.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    wanted: bool,
    at: Option<Instant>,
    readings: Arc<Vec<Reading>>,
    status_read: Option<Instant>,
}

impl State {
    fn is_fresh(&self, age: Duration) -> bool {
        self.at.is_some_and(|at| at.elapsed() < age)
    }

    fn shown(&self) -> Arc<Vec<Reading>> {
        if self.is_fresh(STALE) { Arc::clone(&self.readings) } else { Arc::default() }
    }
}

impl Gpus {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets figures that stay fresh, for tests.
    #[cfg(test)]
    pub(super) fn set(&self, readings: Vec<Reading>) {
        let mut state = self.lock();
        (state.at, state.readings) = (Some(Instant::now() + 10 * STALE), Arc::new(readings));
    }

    /// Whether somebody waits for figures, for tests.
    #[cfg(test)]
    pub(super) fn wanted(&self) -> bool {
        self.lock().wanted
    }

    fn want(&self, state: &mut State) {
        if !state.is_fresh(FRESH) {
            state.wanted = true;
            self.changed.notify_all();
        }
    }

    /// Fresh figures if they arrive within that time; otherwise the last ones.
    pub(super) fn fresh(&self, within: Duration) -> Arc<Vec<Reading>> {
        let mut state = self.lock();
        self.want(&mut state);
        let waited = self.changed.wait_timeout_while(state, within, |state| !state.is_fresh(FRESH));
        waited.unwrap_or_else(PoisonError::into_inner).0.shown()
    }

    /// The last figures, for the status. Queries new ones if somebody watches the status.
    pub(super) fn watched(&self) -> Arc<Vec<Reading>> {
        let mut state = self.lock();
        if state.status_read.replace(Instant::now()).is_some_and(|last| last.elapsed() < WATCHES) {
            self.want(&mut state);
        }
        state.shown()
    }
}

/// Starts the thread.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    std::thread::Builder::new()
        .name("rgpu-gpus".into())
        .spawn(move || run(&server))
        .context("starting to read the devices' figures")?;
    Ok(())
}

fn run(server: &Server) {
    let gpus = &server.gpus;
    let mut failed = false;
    loop {
        let state = gpus.lock();
        drop(gpus.changed.wait_while(state, |state| !state.wanted).unwrap_or_else(PoisonError::into_inner));
        let (known, numbers) = {
            let state = server.lock();
            let numbers = match &state.serving {
                Some((backend, _)) if backend == "cuda" => state.devices(&server.options),
                _ => Vec::new(),
            };
            (Arc::clone(&state.known), numbers)
        };
        let read = if numbers.is_empty() { Ok(Vec::new()) } else { readings::read(&known, &numbers) };
        if let (Err(status), false) = (&read, failed) {
            tracing::warn!(
                "NVML does not report the devices' figures (nvmlReturn_t {status}): metrics and status lack them"
            );
        }
        failed = read.is_err();
        let mut state = gpus.lock();
        (state.wanted, state.at, state.readings) =
            (false, Some(Instant::now()), Arc::new(read.unwrap_or_default()));
        drop(state);
        gpus.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_figures_that_do_not_arrive() {
        let gpus = Gpus::default();
        assert!(gpus.fresh(Duration::from_millis(1)).is_empty());
        assert!(gpus.lock().wanted);
    }

    #[test]
    fn reading_the_status_once_does_not_query_nvml() {
        let gpus = Gpus::default();
        gpus.watched();
        assert!(!gpus.lock().wanted);
        // However long this test takes, neither was long ago.
        let later = Instant::now() + Duration::from_secs(3600);
        assert!(gpus.lock().status_read.replace(later).is_some_and(|read| read < later));
        gpus.watched();
        assert!(gpus.lock().wanted);
        let reading = Reading { device: 3, ..Reading::default() };
        let mut state = gpus.lock();
        (state.wanted, state.at, state.readings) = (false, Some(later), Arc::new(vec![reading.clone()]));
        drop(state);
        assert_eq!(*gpus.watched(), [reading]);
        assert!(!gpus.lock().wanted);
    }
}
