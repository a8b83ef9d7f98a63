//! The thread that carries out the [`Arbiter`]'s decisions: it reads the sessions' meters and sets their
//! gates. It does the same for their memory ([`super::swap`]).
//!
//! It sleeps while no two principals have work for the same devices and nobody waits for memory. The bell
//! that workers ring wakes it. (While a principal without work is held back, it looks once a second, and when
//! that ends.)

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use handover::clock;
use nix::poll::PollTimeout;

use super::arbiter::{Arbiter, Clock, Gate, View};
use super::session::Session;
use super::state::{Server, State};
use super::swap;
use crate::limits::MOST_DEVICES;
use crate::worker_protocol::Kind;

/// Milliseconds between two steps while sessions wait for room on a device.
const MEMORY_TICK: u16 = 10;
/// Minimum time between two steps, and the minimum multiple of a step's duration, however often workers ring.
const LEAST: Duration = Duration::from_micros(50);
const REST: u32 = 4;

/// Starts the thread.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let files = swap::Files::start(server)?;
    let server = Arc::clone(server);
    std::thread::Builder::new()
        .name("rgpu-turns".into())
        .spawn(move || run(&server, &files))
        .context("starting turns")?;
    Ok(())
}

fn run(server: &Server, files: &swap::Files) {
    let virtual_time = server.options.worker.backing.software_imitate.block_us > 0;
    let clock = if virtual_time { Clock::Reported } else { Clock::Observed };
    let mut arbiter = Arbiter::new(clock);
    let mut with_turns = true;
    let begun = Instant::now();
    let mut waits_for_memory = false;
    loop {
        let turns = arbiter.next_within().map(|ns| ns.div_ceil(1_000_000).try_into().unwrap_or(u16::MAX));
        let soonest = [turns, waits_for_memory.then_some(MEMORY_TICK)].into_iter().flatten().min();
        server.bell.wait(soonest.map_or(PollTimeout::NONE, PollTimeout::from));
        let since = Instant::now();
        let now = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // With NVIDIA's Multi-Process Service all kernels run at the same time.
        let had_turns = std::mem::replace(&mut with_turns, !server.mps_runs.load(Ordering::Relaxed));
        if with_turns {
            step(&mut server.lock(), &mut arbiter, now);
        } else if had_turns {
            arbiter = Arbiter::new(clock);
            server.lock().end_turns();
        }
        waits_for_memory = swap::step(server, files);
        std::thread::sleep(LEAST.max(since.elapsed() * REST));
    }
}

impl State {
    fn end_turns(&mut self) {
        self.charged.clear();
        self.sessions.values_mut().for_each(|session| session.account.set_gate(Gate::Open));
    }

    /// The weight of a session's client for all its leases together.
    fn client_weight(&self, session: &Session) -> u32 {
        let lease = session.lease.and_then(|lease| self.leases.0.get(&lease));
        lease.map_or(0, |lease| lease.client_weight).max(session.limits.weight)
    }
}

/// One step: reads all meters once, and sets all gates.
fn step(state: &mut State, arbiter: &mut Arbiter, now: u64) {
    let takes_part = |session: &Session| session.kind == Kind::Gpu && session.begun && !session.ended;
    let sessions = || state.sessions.iter().filter(|(_, session)| takes_part(session));
    let views: Vec<View<'_>> = sessions()
        .map(|(worker, session)| {
            let meter = session.account.meter();
            // Before the other figures: see the worker.
            let unfinished = meter.unfinished.load(Ordering::Acquire) > 0;
            View {
                worker: *worker,
                began: clock::to_ns(session.since),
                principal: &session.limits.principal,
                owner: session.limits.owner(),
                weight: session.limits.weight,
                client_weight: state.client_weight(session),
                priority: session.limits.priority,
                devices: session
                    .devices
                    .iter()
                    .filter(|n| (**n as usize) < MOST_DEVICES)
                    .fold(0, |all, n| all | 1 << n),
                issued: meter.issued.load(Ordering::Relaxed),
                unfinished,
                finished: meter.finished.load(Ordering::Relaxed),
                longest: meter.longest.load(Ordering::Relaxed),
                waits: meter.waits.load(Ordering::Acquire) != 0,
                reported: meter.gpu_ns.load(Ordering::Relaxed),
            }
        })
        .collect();
    let gates = arbiter.step(now, &views);
    let principals: BTreeSet<&str> = views.iter().map(|view| view.principal).collect();
    let charged: HashMap<String, u64> =
        principals.into_iter().map(|name| (name.to_owned(), arbiter.charged(name))).collect();
    for (worker, gate) in gates {
        if let Some(session) = state.sessions.get_mut(&worker) {
            session.account.set_gate(gate);
        }
    }
    state.note_charged(&charged);
    state.charged = charged;
}
