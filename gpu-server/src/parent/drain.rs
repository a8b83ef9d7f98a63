//! The daemon's shutdown: it begins no more sessions, gives the running ones some time to end by themselves,
//! and then ends them.
//!
//! SIGTERM and SIGINT start it, and so does `rgpuctl drain`, through the [admin socket](super::admin). There,
//! an operator gets a line of JSON for each of these events:
//!
//! - `{"running": N, "seconds": S}`: N sessions are running and have S seconds. Sent first, and whenever the
//!   time changes; with 0 seconds, they are being ended.
//! - `{"program": …, "client": …, "pid": …, "outcome": "finished" | "lost" | "ended", "reason": …, "running":
//!   N}`: a session is over: it ended by itself, something failed, or its time ran out.
//! - `{"done": {"finished": N, "lost": N, "ended": N}}`: all are over. The connection closes when the process
//!   ends.

pub(super) mod progress;

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use self::progress::{Drain, Outcome};
use super::session::Session;
use super::state::{Server, State};
use super::workers::Stage;
use crate::worker_protocol::Kind;

/// How long operators may take to read the last messages.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long workers have to tell their clients that the time has run out.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long the rest of the shutdown may take on a busy machine.
const REST: Duration = Duration::from_secs(20);

impl State {
    /// Whether the daemon is shutting down.
    pub(super) fn draining(&self) -> bool {
        self.drain.is_some()
    }

    /// Seconds that sessions have left, if the daemon is shutting down.
    pub(super) fn drain_seconds_left(&self) -> Option<u64> {
        self.drain.as_ref().map(Drain::seconds_left)
    }

    /// Number of sessions that have begun and are not over.
    pub(super) fn running(&self) -> usize {
        self.sessions.values().filter(|session| session.begun && !session.ended).count()
    }

    /// See [`Drain::note`].
    pub(super) fn note_end(&mut self, session: &Session, lost: Option<&str>) {
        let running = self.running();
        self.drain.iter_mut().for_each(|drain| drain.note(session, lost, running));
    }

    /// The same for the session that a worker still has.
    pub(super) fn note_end_of(&mut self, worker: u32, lost: Option<&str>) {
        let running = self.running();
        if let (Some(drain), Some(session)) = (&mut self.drain, self.sessions.get(&worker)) {
            drain.note(session, lost, running);
        }
    }
}

/// Starts the shutdown, or changes its time: sessions have `seconds` to end by themselves.
pub(super) fn within(server: &Server, seconds: u64) {
    begin(server, seconds, 0);
}

/// See [`within`]. Also registers this many operators for messages.
fn begin(server: &Server, seconds: u64, operators: usize) {
    // A hundred years are enough, and the sum cannot overflow.
    let time = Duration::from_secs(seconds.min(u32::MAX.into()));
    let until = Instant::now() + time;
    server.succession.store.ends_within(time + FAREWELL + LAST_WORDS + REST);
    let mut state = server.lock();
    let running = state.running();
    let drain = state.drain.get_or_insert_with(|| Drain {
        until,
        over: false,
        ended: Vec::new(),
        done: false,
        told: 0,
    });
    drain.until = until;
    // In the same step, so that the daemon does not end before they have their messages.
    drain.told += operators;
    tracing::info!(
        "shutting down: no new sessions; {running} running sessions have {seconds} s to end by themselves"
    );
    drop(state);
    server.changed.notify_all();
}

/// Carries out the shutdown that [`within`] has started: waits for sessions to end by themselves, then ends
/// them. Workers without a session are killed immediately: clients that wait for them are refused, and
/// contexts still being created are not waited for.
pub(super) fn drain(server: &Server) {
    let mut state = server.lock();
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
    let mut state = wait(server, state, over, |state| state.drain.as_ref().map(|drain| drain.until));
    if let Some(drain) = &mut state.drain {
        drain.over = true;
    }
    // Not earlier: once the service manager knows, it sends no more SIGTERM, which would shorten the time.
    server.succession.store.stopping();
    let running = state.running();
    if running > 0 {
        tracing::warn!("ending {running} sessions that are still running");
        // Each worker tells its client before it exits.
        state.workers.values().for_each(|managed| managed.worker.hang_up());
        server.changed.notify_all();
        let deadline = Instant::now() + FAREWELL;
        state = wait(server, state, over, |_| Some(deadline));
    }
    // Workers whose session has ended only have to exit, which takes the driver some time. All others are
    // stuck.
    state.workers.values().for_each(|managed| managed.worker.kill());
    let stuck: Vec<u32> =
        state.sessions.iter().filter(|(_, session)| !session.ended).map(|(worker, _)| *worker).collect();
    for worker in stuck {
        state.sessions.get_mut(&worker).into_iter().for_each(|session| {
            (session.ended, session.lost) = (true, true);
        });
        state.note_end_of(worker, Some("its worker did not answer"));
    }
    if let Some(drain) = &mut state.drain {
        drain.done = true;
    }
    server.changed.notify_all();
    let all_told = |state: &State| state.drain.as_ref().is_none_or(|drain| drain.told == 0);
    let deadline = Instant::now() + LAST_WORDS;
    let mut state = wait(server, state, all_told, |_| Some(deadline));
    // Sessions of workers whose end nobody waits for. Taken out, so that each end is written once.
    for session in std::mem::take(&mut state.sessions).into_values().filter(|session| session.begun) {
        let reason = state.end_of(&session.token).unwrap_or("rgpu-server has ended");
        server.audit.ended(&session, session.lost, reason);
    }
}

/// Waits until `over`, or until `deadline`, which may change meanwhile.
fn wait<'a>(
    server: &'a Server,
    mut state: MutexGuard<'a, State>,
    over: impl Fn(&State) -> bool,
    deadline: impl Fn(&State) -> Option<Instant>,
) -> MutexGuard<'a, State> {
    while !over(&state) {
        let left = deadline(&state).map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let Some(left) = left.filter(|left| !left.is_zero()) else { break };
        state = server.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
    }
    state
}

/// Shuts down within `seconds` because an operator requested it, and reports on `stream` how each session
/// ends.
pub(super) fn order(server: &Arc<Server>, seconds: u64, stream: UnixStream) -> io::Result<()> {
    begin(server, seconds, 1);
    let telling = Arc::clone(server);
    let thread = std::thread::Builder::new().name("rgpu-drain".into()).spawn(move || {
        if let Err(e) = report(&telling, &stream) {
            tracing::info!("an operator's connection failed; the shutdown continues: {e}");
        }
        told(&telling);
        // It closes with the process, which tells the operator that the server has ended.
        std::mem::forget(stream);
    });
    thread.map(drop).inspect_err(|_| told(server))
}

/// An operator got the last message.
fn told(server: &Server) {
    server.lock().drain.iter_mut().for_each(|drain| drain.told -= 1);
    server.changed.notify_all();
}

fn say(mut stream: &UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reports the sessions' ends to an operator, until none is left.
fn report(server: &Server, stream: &UnixStream) -> io::Result<()> {
    let mut limit = None;
    let mut known = 0;
    loop {
        let mut state = server.lock();
        let (time, ended, done) = loop {
            let running = state.running();
            let Some(drain) = &state.drain else { return Ok(()) };
            let now = Some((drain.until, drain.over && running > 0));
            if now != limit || known < drain.ended.len() || drain.done {
                let time = (now != limit && !drain.done)
                    .then(|| json!({ "running": running, "seconds": drain.seconds_left() }));
                limit = now;
                let done = drain.done.then(|| {
                    let [finished, lost, ended] =
                        [Outcome::Finished, Outcome::Lost, Outcome::Ended].map(|how| drain.count(how));
                    json!({ "done": { "finished": finished, "lost": lost, "ended": ended } })
                });
                break (time, drain.ended[known..].to_vec(), done);
            }
            state = server.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        };
        drop(state);
        known += ended.len();
        ended.iter().try_for_each(|ended| say(stream, ended))?;
        time.iter().chain(&done).try_for_each(|line| say(stream, line))?;
        if done.is_some() {
            return Ok(());
        }
    }
}
