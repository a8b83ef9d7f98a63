//! The connections of a session over `tcp` or `verbs`: those that it has now, and those that take their place
//! when they are lost.
//!
//! ```text
//!             a connection breaks                     the grace period is over
//!   up ──────────────────────────────▶ down (parked) ──────────────────────────▶ session lost
//!    ▲                                    │    ▲
//!    │ all connections of the attempt     │    │ they do not come, or break
//!    └──────────────── resuming ◀─────────┘────┘
//!                         ▲   └── a newer attempt takes the place of an older one, whatever that has come to
//!                         └────── also from up: whoever knows the session's secret may bring new connections at any time
//! ```
//!
//! Links are counted by the bridge's attempts: the first link is 0, and only a higher attempt replaces one. A
//! thread that finds a connection broken names the attempt that it belongs to, so that it cannot harm the
//! next.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use protocol::link::frame;

use super::incoming::DataSource;
use crate::framing::resumed_counts;
use crate::stream::Stream;

/// How long a session is kept at most whose bridge has not shown that it knows of it: its welcome may have
/// been lost with the connection.
const UNKNOWN: Duration = Duration::from_secs(10);
/// Data connections that wait for the others of their attempt, at most.
const MAX_WAITING: usize = 64;
/// A link that is down for less long is not talked about.
const QUIET: Duration = Duration::from_millis(200);

/// One connection of a link.
#[derive(Debug, Clone)]
pub(super) struct Connection {
    pub(super) attempt: u32,
    pub(super) stream: Arc<Stream>,
}

/// Bytes of a stream that have come, and how many of them the bridge was told of.
#[derive(Debug, Default)]
pub(super) struct Counted {
    received: AtomicU64,
    told: AtomicU64,
}

impl Counted {
    /// `n` more bytes have come. Gives how many the bridge was not told of.
    pub(super) fn add(&self, n: u64) -> u64 {
        let received = self.received.fetch_add(n, Ordering::AcqRel) + n;
        received.saturating_sub(self.told.load(Ordering::Relaxed))
    }

    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Acquire)
    }

    pub(super) fn untold(&self) -> u64 {
        self.received().saturating_sub(self.told.load(Ordering::Relaxed))
    }

    /// The bridge is being told of `received` bytes.
    pub(super) fn tell(&self, received: u64) {
        self.told.store(received, Ordering::Relaxed);
    }
}

/// See the module's text.
pub(super) struct Link {
    state: Mutex<LinkState>,
    changed: Condvar,
    grace: Duration,
    /// The bridge has shown that it knows the session's secret.
    introduced: AtomicBool,
}

struct LinkState {
    attempt: u32,
    /// Since when it is down. `None`: it is up.
    down: Option<Instant>,
    connections: Vec<Arc<Stream>>,
    /// Data connections of attempts that are not up, with their indices.
    waiting: Vec<(u32, u32, Stream)>,
    /// A thread counts the grace period.
    watched: bool,
    over: bool,
}

impl Link {
    /// The first link, with its control connection.
    pub(super) fn new(control: Arc<Stream>, grace: Duration) -> Link {
        let state = LinkState {
            attempt: 0,
            down: None,
            connections: vec![control],
            waiting: Vec::new(),
            watched: false,
            over: false,
        };
        let introduced = AtomicBool::new(false);
        Link { state: Mutex::new(state), changed: Condvar::new(), grace, introduced }
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether a session outlives its connections.
    pub(super) fn survives(&self) -> bool {
        !self.grace.is_zero()
    }

    /// A connection has come with the session's secret.
    pub(super) fn introduce(&self) {
        self.introduced.store(true, Ordering::Release);
    }

    /// How long the session waits for its bridge.
    pub(super) fn patience(&self) -> Duration {
        if self.introduced.load(Ordering::Acquire) { self.grace } else { self.grace.min(UNKNOWN) }
    }

    /// Adds a connection to the first link, and calls `install`. No later link begins in between. `None`: the
    /// first one is gone, and the connection with it.
    pub(super) fn join_first<T>(&self, stream: &Arc<Stream>, install: impl FnOnce() -> T) -> Option<T> {
        let mut state = self.lock();
        if state.attempt > 0 || state.down.is_some() || state.over {
            return None;
        }
        state.connections.push(Arc::clone(stream));
        Some(install())
    }

    /// A connection of `attempt` is broken: shuts the data connections down, so that the bridge notices. The
    /// control connection is read to its end: the bridge's farewell may be on it. True: the caller must start
    /// a thread that [counts the grace period](Self::outlasts).
    pub(super) fn lose(&self, attempt: u32) -> bool {
        let mut state = self.lock();
        if state.over || state.attempt != attempt || state.down.is_some() {
            return false;
        }
        state.shut_down(1);
        state.park(Instant::now())
    }

    /// Nothing was sent for a while: gives memory of the connections [back](Stream::rest).
    pub(super) fn rest(&self) {
        self.lock().connections.iter().for_each(|stream| stream.rest());
    }

    /// Whether it is down.
    pub(super) fn is_down(&self) -> bool {
        self.lock().down.is_some()
    }

    /// Begins `attempt`, whose control connection this is, in place of whatever connections there are.
    /// `None`: there was a later one. Otherwise as [`lose`](Self::lose).
    pub(super) fn begin(&self, attempt: u32, control: &Arc<Stream>) -> Option<bool> {
        let mut state = self.lock();
        if state.over || attempt <= state.attempt {
            return None;
        }
        state.shut_down(0);
        state.attempt = attempt;
        state.connections.push(Arc::clone(control));
        state.waiting.retain(|(of, ..)| *of >= attempt);
        let watch = state.park(Instant::now());
        drop(state);
        self.changed.notify_all();
        Some(watch)
    }

    /// Whether this is still the latest attempt of a session that is not over.
    pub(super) fn is_at(&self, attempt: u32) -> bool {
        let state = self.lock();
        !state.over && state.attempt == attempt
    }

    /// Keeps a data connection until the others of its attempt are there.
    pub(super) fn add(&self, attempt: u32, index: u32, stream: Stream) {
        let mut state = self.lock();
        if state.over || attempt < state.attempt || state.waiting.len() >= MAX_WAITING {
            return;
        }
        state.waiting.push((attempt, index, stream));
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for the `count` data connections of an attempt. `None`: they have not come in time, or a later
    /// attempt has begun.
    pub(super) fn data(&self, attempt: u32, count: usize, patience: Duration) -> Option<Vec<Arc<Stream>>> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            if state.over || state.attempt != attempt {
                return None;
            }
            let mut found: Vec<Option<Stream>> = (0..count).map(|_| None).collect();
            let ours = |(of, index, _): &(u32, u32, Stream)| *of == attempt && (*index as usize) < count;
            if (0..count as u32).all(|index| state.waiting.iter().any(|w| ours(w) && w.1 == index)) {
                for (_, index, stream) in state.waiting.extract_if(.., |waiting| ours(waiting)) {
                    found[index as usize] = Some(stream);
                }
                let found: Vec<_> = found.into_iter().flatten().map(Arc::new).collect();
                state.connections.extend(found.iter().cloned());
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Calls `install`, and counts the link as up, unless a later attempt has begun. No later one begins in
    /// between.
    pub(super) fn finish<T, E>(
        &self,
        attempt: u32,
        install: impl FnOnce() -> Result<T, E>,
    ) -> Option<Result<T, E>> {
        let mut state = self.lock();
        if state.over || state.attempt != attempt || state.down.is_none() {
            return None;
        }
        let installed = install();
        if installed.is_ok() {
            state.down = None;
        }
        drop(state);
        self.changed.notify_all();
        Some(installed)
    }

    /// Waits until it has been down for `limit` (true), or is up or the session is over (false). For the one
    /// thread that counts the grace period, which ends with false.
    pub(super) fn outlasts(&self, limit: impl Fn(&Link) -> Duration) -> bool {
        let mut state = self.lock();
        loop {
            let since = match state.down {
                Some(since) if !state.over => since,
                _ => {
                    state.watched = false;
                    return false;
                }
            };
            let left = (since + limit(self)).saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Counts the grace period of a link that is down because of `why`, in a thread of its own. `down` is
    /// called when it is down for so long that it is worth telling, and `lost`, with the reason, if none has
    /// come in time.
    pub(super) fn count_down(&self, why: &str, down: impl FnOnce(), lost: impl FnOnce(&str)) {
        // Most sessions whose connections close have ended: the bridge's farewell comes right behind.
        if self.outlasts(|_| QUIET) {
            tracing::info!("link lost ({why}); the session waits for its bridge");
            down();
        }
        if self.outlasts(Link::patience) {
            lost(&format!(
                "its connections were lost and its bridge has not come back within {} s (--grace-seconds)",
                self.patience().as_secs()
            ));
        }
    }

    /// The session is over.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.over = true;
        state.shut_down(0);
        state.waiting.clear();
        drop(state);
        self.changed.notify_all();
    }
}

impl LinkState {
    /// Threads that send or receive on the connections from number `from` on return. The control connection
    /// is number 0.
    fn shut_down(&mut self, from: usize) {
        for stream in self.connections.drain(from.min(self.connections.len())..) {
            stream.shut_down();
        }
    }

    /// The link is down, perhaps since earlier. True: a thread must be started that counts the grace period.
    fn park(&mut self, now: Instant) -> bool {
        self.down.get_or_insert(now);
        !std::mem::replace(&mut self.watched, true)
    }
}

/// The receiving end of a data connection's stream, over all links.
pub(super) struct DataIn {
    plugged: Mutex<Plugged>,
    changed: Condvar,
    pub(super) counted: Counted,
    /// Data has come since the connection last had nothing more, and not only acknowledgements. Only the
    /// thread that receives uses it.
    owes: AtomicBool,
    /// Calls back: a connection is broken, or has nothing more to read now.
    owner: Box<dyn DataOwner>,
}

#[derive(Default)]
struct Plugged {
    connection: Option<Connection>,
    over: bool,
}

/// Whom a [`DataIn`] tells.
pub(super) trait DataOwner: Send + Sync {
    /// The connection is broken, or was closed between two chunks (`None`): another may follow.
    fn broken(&self, attempt: u32, why: Option<&io::Error>);
    /// So many bytes have come that the bridge was not told of; `idle`: and there are no more now.
    fn received(&self, untold: u64, idle: bool);
}

impl DataIn {
    pub(super) fn new(owner: Box<dyn DataOwner>) -> DataIn {
        let (counted, owes) = (Counted::default(), AtomicBool::new(false));
        DataIn { plugged: Mutex::default(), changed: Condvar::new(), counted, owes, owner }
    }

    fn lock(&self) -> MutexGuard<'_, Plugged> {
        self.plugged.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Goes on over this connection.
    pub(super) fn plug(&self, connection: Connection) {
        self.lock().connection = Some(connection);
        self.changed.notify_all();
    }

    /// Leaves its connection, which was shut down. Gives the bytes of the stream that have come, of which
    /// there are no more now.
    pub(super) fn unplug(&self) -> u64 {
        self.lock().connection = None;
        self.counted.received()
    }

    /// The session is over. Its connection was shut down.
    pub(super) fn close(&self) {
        let mut plugged = self.lock();
        plugged.over = true;
        plugged.connection = None;
        drop(plugged);
        self.changed.notify_all();
    }
}

impl DataSource for DataIn {
    fn receive(&self, buffer: &mut [u8], starts: bool) -> io::Result<usize> {
        let mut plugged = self.lock();
        loop {
            if plugged.over {
                return Ok(0);
            }
            let Some(connection) = plugged.connection.clone() else {
                plugged = self.changed.wait(plugged).unwrap_or_else(|e| e.into_inner());
                continue;
            };
            if starts
                && self.owes.load(Ordering::Relaxed)
                && !super::incoming::look_for_some(&connection.stream)
            {
                self.owes.store(false, Ordering::Relaxed);
                drop(plugged);
                self.owner.received(self.counted.untold(), true);
                plugged = self.lock();
                if plugged.connection.as_ref().is_none_or(|now| now.attempt != connection.attempt) {
                    continue;
                }
            }
            let (got, broken) = receive_whole(&connection.stream, buffer);
            if got > 0 {
                let untold = self.counted.add(got as u64);
                drop(plugged);
                if !starts {
                    self.owes.store(true, Ordering::Relaxed);
                }
                self.owner.received(untold, false);
                return Ok(got);
            }
            plugged.connection = None;
            drop(plugged);
            let closed = starts && broken.kind() == io::ErrorKind::UnexpectedEof;
            self.owner.broken(connection.attempt, Some(&broken).filter(|_| !closed));
            plugged = self.lock();
        }
    }
}

/// Receives until `buffer` is full or the connection is broken. Gives the bytes, and what broke it. One
/// system call, and not one for each time that some have come.
pub(super) fn receive_whole(stream: &Stream, buffer: &mut [u8]) -> (usize, io::Error) {
    let mut got = 0;
    while got < buffer.len() {
        #[cfg(test)]
        super::incoming::tests::CALLS.with(|calls| calls.set(calls.get() + 1));
        match stream.read_whole(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (got, e),
        }
    }
    (got, io::ErrorKind::UnexpectedEof.into())
}

/// The numbers in a bridge's [`frame::RESUMED`].
pub(super) fn resumed(kind: Option<u32>, body: &[u8], streams: usize) -> io::Result<Vec<u64>> {
    let wrong = || {
        let text = format!("a frame of kind {kind:?} with {} bytes where RESUMED was expected", body.len());
        io::Error::new(io::ErrorKind::InvalidData, text)
    };
    resumed_counts(body, streams).filter(|_| kind == Some(frame::RESUMED)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, Arc<Stream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (a, Arc::new(listener.accept().unwrap().0.into()))
    }

    fn is_shut_down(stream: &mut TcpStream) -> bool {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        matches!(io::Read::read(stream, &mut [0]), Ok(0))
    }

    #[test]
    fn only_a_higher_attempt_takes_a_links_place_and_only_its_own_connections_break_it() {
        let [(mut far0, first), (mut far1, second), (_far2, third)] = [pair(), pair(), pair()];
        let link = Link::new(first, Duration::from_secs(60));
        let alone = || link.state.try_lock().is_err();
        assert_eq!(link.join_first(&third, alone), Some(true), "no later link begins meanwhile");
        assert_eq!(link.begin(0, &second), None);
        assert_eq!(link.begin(2, &second), Some(true), "also while the link is up");
        assert!(is_shut_down(&mut far0));
        assert_eq!(link.join_first(&third, || ()), None);
        assert!(!link.lose(0), "a thread that comes late");
        assert_eq!(link.begin(1, &third), None);
        assert_eq!(link.begin(2, &third), None, "twice the same");
        link.add(2, 0, pair().0.into());
        link.add(3, 1, pair().0.into());
        assert_eq!(link.begin(3, &third), Some(false), "the grace period is counted already");
        assert!(is_shut_down(&mut far1));
        assert!(link.data(2, 1, Duration::from_secs(60)).is_none());
        assert!(link.finish(2, || Ok::<_, ()>(())).is_none());
        link.add(3, 0, pair().0.into());
        assert_eq!(link.data(3, 2, Duration::from_secs(60)).unwrap().len(), 2);
        assert_eq!(link.finish(3, || Ok::<_, ()>(())), Some(Ok(())));
        assert!(!link.is_down() && !link.outlasts(|_| Duration::ZERO), "it is up");
        assert!(link.lose(3) && link.is_down());
        assert!(!link.lose(3));
    }

    #[test]
    fn the_grace_period_counts_from_the_loss_whatever_attempts_fail() {
        let link = Link::new(pair().1, Duration::from_millis(300));
        link.lose(0);
        std::thread::scope(|scope| {
            let counting = scope.spawn(|| link.outlasts(Link::patience));
            for attempt in 1.. {
                if counting.is_finished() {
                    break;
                }
                link.begin(attempt, &pair().1);
                assert!(link.data(attempt, 1, Duration::from_millis(10)).is_none());
            }
            assert!(counting.join().unwrap());
        });
        link.close();
        assert!(!link.outlasts(|_| Duration::ZERO));
    }
}
