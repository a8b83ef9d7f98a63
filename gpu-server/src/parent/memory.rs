//! The thread that asks NVML how much memory each worker uses on each device: contexts, code and local memory
//! are not allocations, but count as well.
//!
//! It asks a second after a worker has become ready or reported counters, or a session has begun, so never
//! while all sessions are idle. It doesn't ask immediately, because the query takes the driver's time on
//! every device, and a session that has just begun would wait for it. What its worker used before is known by
//! then. Software devices have no such memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use handover::clock;
use protocol::ops::nvml::status;

use super::accounts::ALL_DEVICES;
use super::state::{Server, State};
use crate::driver::cuda::nvml::processes::{self, Answer};

/// The delay before a query.
const PAUSE: Duration = Duration::from_secs(1);
/// The same after errors that are not expected for all devices. NVML may never answer here.
const AFTER_ERROR: Duration = Duration::from_secs(60);

/// What NVML answers, by the devices' numbers.
type Answers = BTreeMap<u32, Answer>;
/// Each device's last error that was logged, until NVML has answered.
type Failed = BTreeMap<u32, u32>;

/// Sessions whose memory stays where it is, by worker, and how often each was ordered to move it.
type Settled = HashMap<u32, u64>;

/// Starts the thread.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    let measure = move || {
        let (mut pause, mut failed) = (PAUSE, Failed::new());
        loop {
            let (known, numbers, settled) = {
                let mut state = server.lock();
                while !state.measure {
                    state = server.measuring.wait(state).unwrap_or_else(|e| e.into_inner());
                }
                drop(state);
                std::thread::sleep(pause);
                state = server.lock();
                state.measure = false;
                if state.serving.as_ref().is_none_or(|(backend, _)| backend != "cuda") {
                    continue;
                }
                let numbers = state.well(&server.options).unwrap_or_else(|| state.devices(&server.options));
                (Arc::clone(&state.known), numbers, state.settled())
            };
            let answers = numbers.iter().copied().zip(processes::uses(&known, &numbers)).collect();
            pause = note(&server, &answers, &settled, &mut failed);
        }
    };
    std::thread::Builder::new()
        .name("rgpu-memory".into())
        .spawn(measure)
        .context("starting to measure memory")?;
    Ok(())
}

/// Notes what NVML answers. `settled`: the sessions whose memory stayed where it was when NVML was asked.
/// Returns the delay before the next query.
fn note(server: &Server, answers: &Answers, settled: &Settled, failed: &mut Failed) -> Duration {
    server.lock().measured(answers, settled);
    // A device may be lost before its health is known: the others are measured again.
    let is_expected = |status| matches!(status, status::GPU_IS_LOST | status::NOT_FOUND);
    let mut new = BTreeMap::<u32, Vec<u32>>::new();
    for (device, answer) in answers {
        match answer {
            Ok(_) => drop(failed.remove(device)),
            Err(status) if is_expected(*status) => {
                tracing::debug!(device, "NVML does not report the processes' memory (nvmlReturn_t {status})");
            }
            Err(status) if failed.insert(*device, *status) != Some(*status) => {
                new.entry(*status).or_default().push(*device);
            }
            Err(_) => {}
        }
    }
    for (status, devices) in new {
        tracing::warn!(
            ?devices,
            "NVML does not report the processes' memory (nvmlReturn_t {status}): until it does, its last figures for contexts and code count against limits"
        );
    }
    let fails = |answer: &Answer| answer.as_ref().is_err_and(|status| !is_expected(*status));
    if answers.values().any(fails) && answers.values().all(Result::is_err) { AFTER_ERROR } else { PAUSE }
}

impl Server {
    /// Has NVML asked for the workers' memory.
    pub(super) fn want_measurement(&self, state: &mut State) {
        state.measure = true;
        self.measuring.notify_one();
    }
}

impl State {
    /// The sessions whose memory does not move now.
    fn settled(&self) -> Settled {
        let now = clock::to_ns(Instant::now());
        let orders = |worker| match &self.swapping {
            Some(swapping) => swapping.residency.orders(worker, now),
            None => Some(0),
        };
        self.sessions.keys().filter_map(|worker| Some((*worker, orders(*worker)?))).collect()
    }

    /// Notes NVML's figures for all processes. What it does not know stays as it is. So do the figures of
    /// sessions whose memory was moving meanwhile ([`note`]): NVML's would be compared with another place of
    /// it. These are measured again.
    fn measured(&mut self, answers: &Answers, settled: &Settled) {
        let now = self.settled();
        // A session that has begun since was not ordered to move anything then.
        let stays = |pid: &u32| now.get(pid).is_some_and(|orders| settled.get(pid).unwrap_or(&0) == orders);
        self.measure |= self.sessions.keys().any(|pid| !stays(pid));
        let known = answers.iter().filter_map(|(device, answer)| Some((*device, answer.as_ref().ok()?)));
        for (device, uses) in known {
            let figures: HashMap<u32, Option<u64>> = uses.iter().map(|one| (one.pid, one.bytes)).collect();
            // A process that is not listed has no context there any more.
            let of = |pid: &u32| figures.get(pid).copied().unwrap_or(Some(0));
            for (pid, managed) in &mut self.workers {
                match of(pid) {
                    Some(0) => drop(managed.takes.remove(&device)),
                    Some(bytes) => drop(managed.takes.insert(device, bytes)),
                    None => {}
                }
            }
            for (pid, session) in self.sessions.iter().filter(|(pid, _)| stays(pid)) {
                of(pid).inspect(|bytes| session.account.measured(device as usize, *bytes));
            }
        }
        let clients: BTreeSet<&str> = self.sessions.values().map(|session| session.limits.owner()).collect();
        clients.into_iter().for_each(|client| self.publish(client, ALL_DEVICES));
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
    use crate::driver::cuda::nvml::processes::Use;
    use crate::limits::Limits;
    use handover::Inherited;
    use std::sync::atomic::Ordering;

    /// The worker 7 uses as much on a device.
    fn used(device: u32, bytes: u64) -> Answer {
        Ok(vec![Use { pid: 7, device, bytes: Some(bytes) }])
    }

    #[test]
    fn an_error_of_nvmls_ends_no_measuring_and_is_logged_once() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        server.lock().sessions.insert(7, session_of_limits(Limits::default()));
        let mut failed = Failed::new();
        let (unknown, uninitialized) = (999, 1);
        for (answer, pause, remembers, held) in [
            (used(1, 400), PAUSE, None, 400),
            (Err(unknown), AFTER_ERROR, Some(unknown), 400),
            (Err(unknown), AFTER_ERROR, Some(unknown), 400),
            (Err(status::GPU_IS_LOST), PAUSE, Some(unknown), 400),
            (Err(uninitialized), AFTER_ERROR, Some(uninitialized), 400),
            (used(1, 500), PAUSE, None, 500),
        ] {
            assert_eq!(note(&server, &Answers::from([(1, answer)]), &Settled::new(), &mut failed), pause);
            assert_eq!(failed.get(&1).copied(), remembers);
            assert_eq!(server.lock().sessions[&7].account.held(1), held);
        }
    }

    #[test]
    fn an_error_on_a_device_hides_no_other_devices_figures() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        server.lock().sessions.insert(7, session_of_limits(Limits::default()));
        server.lock().workers.insert(7, Managed::fake(7, Stage::Idle));
        let mut failed = Failed::new();
        for (answers, pause, expected) in [
            ([used(1, 400), used(2, 40)], PAUSE, [400, 40]),
            ([Err(999), used(2, 50)], PAUSE, [400, 50]),
            ([Err(status::GPU_IS_LOST), used(2, 60)], PAUSE, [400, 60]),
            ([Err(status::GPU_IS_LOST), Err(999)], AFTER_ERROR, [400, 60]),
            ([used(1, 500), Err(999)], PAUSE, [500, 60]),
        ] {
            let answers = [1, 2].into_iter().zip(answers).collect();
            assert_eq!(note(&server, &answers, &Settled::new(), &mut failed), pause);
            let state = server.lock();
            let held = [1, 2].map(|device| state.sessions[&7].account.held(device));
            let takes = BTreeMap::from([(1, expected[0]), (2, expected[1])]);
            assert_eq!((held, &state.workers[&7].takes), (expected, &takes));
        }
        assert_eq!(failed, Failed::from([(2, 999)]));
    }

    #[test]
    fn memory_of_a_context_that_is_gone_counts_no_more() {
        let mut state = State::default();
        state.workers.insert(7, Managed::fake(7, Stage::Idle));
        state.measured(&Answers::from([(0, used(0, 400))]), &Settled::new());
        // Its session has another device, and the worker ends its context on the first.
        state.workers.get_mut(&7).unwrap().stage = Stage::Serving;
        let mut session = session_of_limits(Limits::default());
        session.devices = vec![1];
        state.sessions.insert(7, session);
        state.measured_before(7);
        let held = |state: &State| [0, 1].map(|device| state.sessions[&7].account.held(device));
        assert_eq!(held(&state), [400, 0]);
        let unknown = Ok(vec![Use { pid: 7, device: 0, bytes: None }]);
        state.measured(&Answers::from([(0, unknown), (1, used(1, 500))]), &Settled::new());
        assert_eq!(held(&state), [400, 500], "it has a context there");
        state.measured(&Answers::from([(0, Ok(Vec::new())), (1, used(1, 500))]), &Settled::new());
        assert_eq!(held(&state), [0, 500]);
        // The program has reset the device.
        state.measured(&Answers::from([(0, Ok(Vec::new())), (1, Ok(Vec::new()))]), &Settled::new());
        assert_eq!(held(&state), [0, 0]);
        assert_eq!(state.workers[&7].takes, BTreeMap::new());
    }

    #[test]
    fn a_workers_earlier_memory_use_counts_from_the_sessions_start() {
        let mut state = State::default();
        state.workers.insert(7, Managed::fake(7, Stage::Idle));
        let measured = |state: &mut State, bytes| {
            state.measured(&Answers::from([(1, used(1, bytes))]), &Settled::new());
        };
        measured(&mut state, 400);
        measured(&mut state, 500);
        state.sessions.insert(7, session_of_limits(Limits::default()));
        state.measured_before(7);
        assert_eq!(state.sessions[&7].account.held(1), 500);
        measured(&mut state, 600);
        assert_eq!(state.sessions[&7].account.held(1), 600);
    }

    #[test]
    fn what_moves_while_nvml_is_asked_is_not_taken_for_a_context() {
        use super::super::residency::{Bytes, Residency, Rules, Swapping, View};
        use crate::limits::Resource;

        let mut state = State::default();
        let mut session = session_of_limits(Limits::default());
        (session.begun, session.devices) = (true, vec![0]);
        state.sessions.insert(7, session);
        let rules = Rules { memory: u64::MAX, memory_each: u64::MAX, ..Rules::default() };
        state.swapping = Some(Swapping { residency: Residency::new(rules), ..Swapping::default() });
        let _ = state.charge(7, 1, Resource::Device(0), 60, None);
        let meter = |state: &State, away| {
            let meter = state.sessions[&7].account.meter();
            meter.held[0].store(60, Ordering::Relaxed);
            meter.memory.away[0].store(away, Ordering::Relaxed);
        };
        let implicit = |state: &State| state.sessions[&7].account.implicit(0);
        meter(&state, 0);
        let settled = state.settled();
        state.measured(&Answers::from([(0, used(0, 65))]), &settled);
        assert_eq!((implicit(&state), state.measure), (5, false));
        // It leaves for another session, which begins after NVML has been asked.
        let settled = state.settled();
        let bytes = |bytes| Bytes::from([(0, bytes)]);
        let mut own = View { worker: 7, swap: true, rested: Some(1), ..View::default() };
        (own.on, own.movable) = (bytes(60), bytes(60));
        let other = View { worker: 8, needs: bytes(60), ..View::default() };
        let step = |state: &mut State, own: &View| {
            let now = clock::to_ns(Instant::now());
            let residency = &mut state.swapping.as_mut().unwrap().residency;
            residency.step(now, &bytes(100), &[own.clone(), other.clone()]).orders.len()
        };
        assert_eq!(step(&mut state, &own), 1);
        meter(&state, 60);
        state.measured(&Answers::from([(0, used(0, 65))]), &settled);
        assert_eq!((implicit(&state), state.measure), (5, true));
        // Also if it has left by then, or has been leaving when NVML was asked.
        let while_it_leaves = state.settled();
        (own.on, own.away, own.begun, own.done) = (Bytes::new(), bytes(60), 1, (1, true));
        step(&mut state, &own);
        for before in [settled, while_it_leaves] {
            state.measure = false;
            state.measured(&Answers::from([(0, used(0, 65))]), &before);
            assert_eq!((implicit(&state), state.measure), (5, true));
        }
        let settled = state.settled();
        state.measure = false;
        state.measured(&Answers::from([(0, used(0, 6))]), &settled);
        assert_eq!((implicit(&state), state.measure), (6, false));
    }
}
