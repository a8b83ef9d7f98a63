//! Clients that wait for a worker: parked connections, served in the order in which they came.
//!
//! ```text
//!  handshake ── join ──▶ queue ── serve ──▶ worker          (by whichever thread adds a client or a worker)
//!                          │
//!                    rgpu-queue: tells each client its place once a second, drops those that hung up,
//!                                and refuses when nothing has gone on for too long
//! ```
//!
//! A parked connection costs a descriptor and no thread. Nothing is read from it until its worker does. What is sent to it is sent under the state's lock and without blocking,
//! so a place never follows the welcome.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::device::Answer;
use protocol::link::Welcome;

use super::handshake::{Control, Refused, refuse, welcome};
use super::pool::{GIVE_UP, Stage, Worker};
use super::{Server, Session, State, Token};
use crate::ipc::{Counters, Kind, ToWorker, Transport};

/// How often waiting clients are told their place.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// A client that waits for a worker.
pub(super) struct Parked {
    pub(super) connection: Arc<Control>,
    pub(super) peer: String,
    pub(super) client: String,
    pub(super) program: String,
    pub(super) pid: u32,
    pub(super) transport: Transport,
    pub(super) data_connections: u32,
    pub(super) token: Token,
    /// The client understands messages about its place in the queue.
    pub(super) may_wait: bool,
    pub(super) since: Instant,
    /// When it was last told its place.
    pub(super) told: Option<Instant>,
    /// How many workers had failed when it came.
    pub(super) failures: u64,
}

#[cfg(test)]
impl Parked {
    /// One of nobody.
    pub(super) fn made_up() -> Parked {
        let (connection, _) = std::os::unix::net::UnixStream::pair().unwrap();
        Parked {
            connection: Arc::new(Control::Local(connection)),
            peer: "this host".into(),
            client: "test".into(),
            program: "a test".into(),
            pid: 0,
            transport: Transport::Local,
            data_connections: 0,
            token: [0; 16],
            may_wait: true,
            since: Instant::now(),
            told: None,
            failures: 0,
        }
    }
}

/// Wakes the queue's thread.
pub(super) struct Nudge(EventFd);

impl Nudge {
    pub(super) fn new() -> anyhow::Result<Nudge> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Nudge(EventFd::from_value_and_flags(0, flags).context("an eventfd for the queue")?))
    }

    pub(super) fn nudge(&self) {
        // The only failure is a counter at its end, in which case the thread is awake.
        let _ = self.0.write(1);
    }
}

/// Puts a client at the end of the queue, and serves it if a worker is ready for it.
pub(super) fn join(server: &Server, kind: Kind, mut parked: Parked) -> Result<(), Refused> {
    {
        let mut state = server.lock();
        if state.draining {
            return Err(shutting_down());
        }
        let most = server.options.max_sessions;
        // Those that wait will be sessions, so no more may wait than may begin.
        let taken = state.sessions.values().filter(|session| session.kind == kind).count()
            + state.pool(kind).queue.len();
        if taken >= most {
            let reason = format!("the server already has its {most} sessions (--max-sessions)");
            return Err(Refused(Answer::NoResources, reason));
        }
        let pool = state.pool_mut(kind);
        parked.failures = pool.failed;
        let before = pool.queue.len();
        if before > 0 || pool.idle.is_empty() {
            tracing::info!(
                client = parked.client,
                program = parked.program,
                before,
                "a session waits for a worker"
            );
        }
        pool.queue.push_back(parked);
    }
    serve(server, kind);
    server.changed.notify_all();
    server.nudge.nudge();
    Ok(())
}

/// Gives ready workers to waiting clients, first come, first served.
pub(super) fn serve(server: &Server, kind: Kind) {
    loop {
        let (worker, parked, session) = {
            let mut state = server.lock();
            if state.draining {
                return;
            }
            let pool = state.pool_mut(kind);
            let (Some(_), Some(_)) = (pool.idle.front(), pool.queue.front()) else { return };
            let (Some(worker), Some(parked)) = (pool.idle.pop_front(), pool.queue.pop_front()) else {
                return;
            };
            pool.moved = Some(Instant::now());
            pool.begun += 1;
            if let Some(managed) = state.workers.get_mut(&worker.pid()) {
                managed.stage = Stage::Serving;
            }
            state.tokens.insert(parked.token, Arc::clone(&worker));
            state.sessions.insert(worker.pid(), session_of(&parked, kind));
            state.sessions_begun += 1;
            let message = ToWorker::Session {
                transport: parked.transport,
                program: parked.program.clone(),
                client: parked.client.clone(),
            };
            (worker, parked, message)
        };
        let sent = worker.send(&session, parked.connection.as_fd());
        let mut state = server.lock();
        // A worker that has died meanwhile has taken its entry with it.
        let stands = sent.is_ok()
            && state.sessions.get_mut(&worker.pid()).is_some_and(|s| {
                s.begun = true;
                true
            });
        if stands {
            drop(state);
            begin(&worker, &parked);
            continue;
        }
        tracing::debug!(worker = worker.pid(), "a ready worker was gone");
        state.sessions.remove(&worker.pid());
        state.tokens.remove(&parked.token);
        state.sessions_begun -= 1;
        let pool = state.pool_mut(kind);
        pool.begun -= 1;
        pool.queue.push_front(parked);
    }
}

fn session_of(parked: &Parked, kind: Kind) -> Session {
    Session {
        kind,
        client: parked.client.clone(),
        program: parked.program.clone(),
        pid: parked.pid,
        transport: match parked.transport {
            Transport::Verbs { .. } => "verbs",
            _ => parked.connection.transport(),
        },
        peer: parked.peer.clone(),
        since: Instant::now(),
        counters: Counters::default(),
        token: parked.token,
        control: Arc::clone(&parked.connection),
        begun: false,
        ended: false,
    }
}

fn begin(worker: &Worker, parked: &Parked) {
    let Parked { peer, client, program, pid, .. } = parked;
    tracing::info!(peer, client, program, pid, worker = worker.pid(), "session begins");
    let welcome = welcome(Answer::Ok, parked.token, parked.data_connections, "");
    if let Err(e) = parked.connection.say(&welcome) {
        tracing::debug!(peer, client, program, "a client cannot be welcomed: {e}");
        // The worker notices, and ends.
        parked.connection.shut_down();
    }
}

/// Starts the thread that looks after those who wait.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    std::thread::Builder::new()
        .name("rgpu-queue".into())
        .spawn(move || {
            loop {
                let gone = wait(&server);
                look_after(&server, &gone, Instant::now());
            }
        })
        .context("starting the queue")?;
    Ok(())
}

/// Sleeps until a parked connection is closed, a second has passed for those who wait, or somebody nudges. Returns the closed ones.
fn wait(server: &Server) -> Vec<Arc<Control>> {
    let parked: Vec<Arc<Control>> = {
        let state = server.lock();
        Kind::ALL
            .iter()
            .flat_map(|kind| &state.pool(*kind).queue)
            .map(|p| Arc::clone(&p.connection))
            .collect()
    };
    let mut watched = vec![PollFd::new(server.nudge.0.as_fd(), PollFlags::POLLIN)];
    // What a client may send already is the worker's to read. nix has no name for this event.
    let hung_up = PollFlags::from_bits_retain(libc::POLLRDHUP);
    watched.extend(parked.iter().map(|c| PollFd::new(c.as_fd(), hung_up)));
    let limit = if parked.is_empty() {
        PollTimeout::NONE
    } else {
        PollTimeout::from(u16::try_from(TELL_EVERY.as_millis()).unwrap_or(u16::MAX))
    };
    match poll(&mut watched, limit) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(e) => {
            tracing::error!("watching the clients that wait: {e}");
            std::thread::sleep(TELL_EVERY);
        }
    }
    let closed: Vec<bool> =
        watched[1..].iter().map(|w| w.revents().is_none_or(|events| !events.is_empty())).collect();
    drop(watched);
    // Nudges that came together count as one.
    let _ = server.nudge.0.read();
    parked.into_iter().zip(closed).filter(|(_, closed)| *closed).map(|(parked, _)| parked).collect()
}

/// Drops those that are gone, refuses those that wait in vain, and tells the others their place.
fn look_after(server: &Server, gone: &[Arc<Control>], now: Instant) {
    let mut state = server.lock();
    let draining = state.draining;
    let waited = state.gpu.queue.len() + state.nvml.queue.len();
    for kind in Kind::ALL {
        let held = held_up(&state, kind);
        let patience = Duration::from_secs(server.options.wait_seconds);
        let pool = state.pool_mut(kind);
        let mut kept = VecDeque::with_capacity(pool.queue.len());
        for mut parked in std::mem::take(&mut pool.queue) {
            let Parked { peer, client, program, connection, .. } = &parked;
            if gone.iter().any(|g| Arc::ptr_eq(g, connection)) {
                tracing::info!(peer, client, program, "gave up waiting for a worker");
                continue;
            }
            let since = pool.moved.map_or(parked.since, |moved| moved.max(parked.since));
            let refused = if draining {
                Some(shutting_down())
            } else if pool.failures >= GIVE_UP && pool.failed > parked.failures && pool.starting == 0 {
                Some(Refused(Answer::NoResources, crashing(pool.failures, &pool.last_failure)))
            } else if now.saturating_duration_since(since) >= patience {
                Some(Refused(Answer::NoResources, in_vain(patience, kept.len(), &held)))
            } else {
                None
            };
            if let Some(refused) = refused {
                refuse(connection, peer, client, program, &refused);
                continue;
            }
            let due = parked.told.is_none_or(|told| now.saturating_duration_since(told) >= TELL_EVERY);
            if parked.may_wait && due {
                let place = place(kept.len());
                if let Err(e) = connection.say(&place) {
                    tracing::info!(peer, client, program, "leaves the queue: {e}");
                    continue;
                }
                parked.told = Some(now);
            }
            kept.push_back(parked);
        }
        pool.queue = kept;
    }
    if state.gpu.queue.len() + state.nvml.queue.len() < waited {
        drop(state);
        server.changed.notify_all();
    }
}

fn place(ahead: usize) -> Welcome {
    Welcome { ahead: u32::try_from(ahead).unwrap_or(u32::MAX), ..welcome(Answer::Waiting, [0; 16], 0, "") }
}

fn shutting_down() -> Refused {
    Refused(Answer::Denied, "the server is shutting down".into())
}

fn crashing(failures: u32, why: &str) -> String {
    format!("the last {failures} workers could not be started: {why}; see the log of rgpu-server")
}

fn in_vain(patience: Duration, before: usize, held: &str) -> String {
    format!(
        "no worker became ready within {} s (--wait-seconds), and {before} sessions that came before wait too{held}",
        patience.as_secs()
    )
}

/// What is known about why there is no worker.
fn held_up(state: &State, kind: Kind) -> String {
    let pool = state.pool(kind);
    match pool.last_failure.as_str() {
        "" => String::new(),
        why => format!("; the last worker that could not be started: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_bridge::framing::recv_struct;
    use std::os::unix::net::UnixStream;

    fn server(flags: &[&str]) -> Arc<Server> {
        Arc::new(Server::new(crate::cli::Serve::from_flags(flags)).unwrap())
    }

    fn client(server: &Server, number: u32) -> Result<UnixStream, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = Arc::new(Control::Local(theirs));
        let parked = Parked { connection, pid: number, token: [number as u8; 16], ..Parked::made_up() };
        join(server, Kind::Gpu, parked).map(|()| ours).map_err(|Refused(_, reason)| reason)
    }

    fn heard(client: &UnixStream) -> (Answer, u32, String) {
        let welcome: Welcome = recv_struct(client.as_fd(), &mut Vec::new()).unwrap().unwrap();
        (Answer::from_number(welcome.status), welcome.ahead, protocol::device::untext(&welcome.reason))
    }

    fn ready(server: &Server, pid: u32) {
        server.lock().gpu.idle.push_back(Worker::made_up(pid));
        serve(server, Kind::Gpu);
    }

    #[test]
    fn clients_are_served_in_the_order_in_which_they_came_and_told_their_place() {
        let server = server(&["--max-sessions", "9"]);
        let clients: Vec<UnixStream> = (0..8).map(|number| client(&server, number).unwrap()).collect();
        look_after(&server, &[], Instant::now());
        for (place, client) in (0..).zip(&clients) {
            assert_eq!(heard(client), (Answer::Waiting, place, String::new()));
        }
        for (number, client) in (0..8).zip(&clients) {
            ready(&server, 100 + number);
            assert_eq!(heard(client).0, Answer::Ok);
            assert_eq!(server.lock().sessions[&(100 + number)].pid, number);
        }
        assert!(server.lock().gpu.queue.is_empty() && server.lock().gpu.idle.is_empty());
    }

    #[test]
    fn a_client_that_hangs_up_leaves_the_queue() {
        let server = server(&[]);
        let clients: Vec<UnixStream> = (0..3).map(|number| client(&server, number).unwrap()).collect();
        let mut clients = clients.into_iter();
        drop(clients.next());
        let gone = wait(&server);
        assert_eq!(gone.len(), 1);
        look_after(&server, &gone, Instant::now());
        for (place, client) in (0..).zip(clients) {
            assert_eq!(heard(&client), (Answer::Waiting, place, String::new()));
        }
    }

    #[test]
    fn a_client_that_reads_nothing_leaves_the_queue_in_the_end() {
        let server = server(&["--wait-seconds", "1000000"]);
        let _client = client(&server, 0).unwrap();
        let mut now = Instant::now();
        while !server.lock().gpu.queue.is_empty() {
            now += TELL_EVERY;
            look_after(&server, &[], now);
        }
        assert!(server.lock().sessions.is_empty());
    }

    #[test]
    fn clients_wait_while_others_are_served_and_are_refused_when_nothing_goes_on() {
        let server = server(&["--wait-seconds", "60"]);
        let begun = Instant::now();
        let clients: Vec<UnixStream> = (0..3).map(|number| client(&server, number).unwrap()).collect();
        server.lock().gpu.moved = Some(begun + Duration::from_secs(50));
        look_after(&server, &[], begun + Duration::from_secs(100));
        assert_eq!(server.lock().gpu.queue.len(), 3);
        look_after(&server, &[], begun + Duration::from_secs(111));
        assert!(server.lock().gpu.queue.is_empty());
        heard(&clients[0]);
        let (answer, _, reason) = heard(&clients[0]);
        assert_eq!(answer, Answer::NoResources);
        assert!(reason.contains("within 60 s (--wait-seconds)"), "{reason}");
    }

    #[test]
    fn workers_that_fail_again_and_again_end_in_a_refusal_that_says_why() {
        let server = server(&[]);
        let waits = client(&server, 0).unwrap();
        {
            let mut state = server.lock();
            state.gpu.failures = GIVE_UP;
            state.gpu.failed = GIVE_UP.into();
            state.gpu.last_failure = "it was killed by signal 11".into();
        }
        let late = client(&server, 1).unwrap();
        look_after(&server, &[], Instant::now());
        let (answer, _, reason) = heard(&waits);
        assert!(answer == Answer::NoResources && reason.contains("killed by signal 11"), "{reason}");
        // One that comes later waits until a worker has failed for it, too.
        assert_eq!(heard(&late).0, Answer::Waiting);
        server.lock().gpu.failed += 1;
        look_after(&server, &[], Instant::now());
        assert_eq!(heard(&late).0, Answer::NoResources);
    }

    #[test]
    fn no_more_wait_than_may_be_served() {
        let server = server(&["--max-sessions", "1"]);
        let _first = client(&server, 0).unwrap();
        assert!(client(&server, 1).unwrap_err().contains("--max-sessions"));
    }
}
