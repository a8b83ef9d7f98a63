//! The thread that asks NVML how much memory each worker uses on each device: contexts, code and local memory
//! are not allocations, but count as well.
//!
//! It asks a second after a worker has become ready or reported counters, or a session has begun, so never
//! while all sessions are idle. It doesn't ask immediately, because the query takes the driver's time on
//! every device, and a session that has just begun would wait for it. What its worker used before is known by
//! then. Software devices have no such memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use protocol::ops::nvml::status;

use super::state::{Server, State};
use crate::driver::cuda::nvml::processes::{self, Use};

/// The delay before a query.
const PAUSE: Duration = Duration::from_secs(1);
/// The same after an error that is not expected. NVML may never answer here.
const AFTER_ERROR: Duration = Duration::from_secs(60);

/// Starts the thread.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    let measure = move || {
        let (mut pause, mut failed) = (PAUSE, None);
        loop {
            let numbers = {
                let mut state = server.lock();
                while !state.measure {
                    state = server.changed.wait(state).unwrap_or_else(|e| e.into_inner());
                }
                drop(state);
                std::thread::sleep(pause);
                state = server.lock();
                state.measure = false;
                if state.serving.as_ref().is_none_or(|(backend, _)| backend != "cuda") {
                    continue;
                }
                state.well(&server.options).unwrap_or_else(|| state.devices(&server.options))
            };
            pause = note(&server, processes::uses(&numbers), &mut failed);
        }
    };
    std::thread::Builder::new()
        .name("rgpu-memory".into())
        .spawn(measure)
        .context("starting to measure memory")?;
    Ok(())
}

/// Notes what NVML answers. Returns the delay before the next query. `failed`: the last error that was
/// logged, until NVML has answered.
fn note(server: &Server, answer: Result<Vec<Use>, u32>, failed: &mut Option<u32>) -> Duration {
    match answer {
        Ok(uses) => {
            *failed = None;
            server.lock().measured(&uses);
            PAUSE
        }
        // A device may be lost before its health is known: the others are measured again.
        Err(status @ (status::GPU_IS_LOST | status::NOT_FOUND)) => {
            tracing::debug!("NVML does not report the processes' memory (nvmlReturn_t {status})");
            PAUSE
        }
        Err(status) => {
            if failed.replace(status) != Some(status) {
                tracing::warn!(
                    "NVML does not report the processes' memory on a device (nvmlReturn_t {status}): until it does, its last figures for contexts and code count against limits"
                );
            }
            AFTER_ERROR
        }
    }
}

impl State {
    /// Notes NVML's figures for all processes.
    fn measured(&mut self, uses: &[Use]) {
        self.workers.values_mut().for_each(|managed| managed.takes.clear());
        for one in uses {
            if let Some(managed) = self.workers.get_mut(&one.pid) {
                managed.takes.push((one.device, one.bytes));
            }
            if let Some(session) = self.sessions.get(&one.pid) {
                session.account.measured(one.device as usize, one.bytes);
            }
        }
        let principals: BTreeSet<&str> =
            self.sessions.values().map(|session| session.limits.principal.as_str()).collect();
        principals.into_iter().for_each(|principal| self.publish(principal));
    }
    /// A worker's session has begun: its earlier memory use is already known.
    pub(super) fn measured_before(&self, worker: u32) {
        if let (Some(managed), Some(session)) = (self.workers.get(&worker), self.sessions.get(&worker)) {
            for (device, bytes) in &managed.takes {
                session.account.measured(*device as usize, *bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::tests::session_of_limits;
    use super::super::workers::{Managed, Stage};
    use super::*;
    use crate::config::Serve;
    use crate::limits::Limits;
    use handover::Inherited;

    #[test]
    fn an_error_of_nvmls_ends_no_measuring_and_is_logged_once() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        server.lock().sessions.insert(7, session_of_limits(Limits::default()));
        let mut failed = None;
        let used = |bytes| Ok(vec![Use { pid: 7, device: 1, bytes }]);
        let (unknown, uninitialized) = (999, 1);
        for (answer, pause, remembers, held) in [
            (used(400), PAUSE, None, 400),
            (Err(unknown), AFTER_ERROR, Some(unknown), 400),
            (Err(unknown), AFTER_ERROR, Some(unknown), 400),
            (Err(status::GPU_IS_LOST), PAUSE, Some(unknown), 400),
            (Err(uninitialized), AFTER_ERROR, Some(uninitialized), 400),
            (used(500), PAUSE, None, 500),
        ] {
            assert_eq!((note(&server, answer, &mut failed), failed), (pause, remembers));
            assert_eq!(server.lock().sessions[&7].account.held(1), held);
        }
    }

    #[test]
    fn a_workers_earlier_memory_use_counts_from_the_sessions_start() {
        let mut state = State::default();
        state.workers.insert(7, Managed::fake(7, Stage::Idle));
        let measured = |state: &mut State, bytes| state.measured(&[Use { pid: 7, device: 1, bytes }]);
        measured(&mut state, 400);
        measured(&mut state, 500);
        state.sessions.insert(7, session_of_limits(Limits::default()));
        state.measured_before(7);
        assert_eq!(state.sessions[&7].account.held(1), 500);
        measured(&mut state, 600);
        assert_eq!(state.sessions[&7].account.held(1), 600);
    }
}
