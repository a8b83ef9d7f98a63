//! A session's TLS connections. The worker makes a key for them that exists only in its memory. The daemon
//! tells the client the key's fingerprint, and passes on, unread, each connection that names the session.
//!
//! A connection belongs to the session once the client has proven that it owns the key with which it greeted
//! the daemon, and has sent the session's secret. Until then it belongs to nobody: only a few such
//! connections may be pending at a time, none longer than [`WITHIN`]. If there are too many, the oldest one
//! is closed: the client's own take two round trips, and strangers' stay silent.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host_bridge::endpoint::Lost;
use host_bridge::log_limit::LogLimit;
use host_bridge::stream::Stream;
use identity::{Identity, Secret, tls};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::device::Answer;
use protocol::link::{Hello, Welcome, greeting, purpose};
use protocol::version::OURS;
use rustls::ServerConfig;
use zerocopy::{FromZeros, IntoBytes};

use crate::pages::{Page, Terms};
use crate::worker_protocol::{self, ToWorker, Visitor};

/// How long a connection may take to prove that it belongs to the session.
const WITHIN: Duration = Duration::from_secs(10);
/// How long the client may take to open its control connection.
const FIRST_WITHIN: Duration = Duration::from_secs(30);
/// Maximum number of pending connections. Anybody who sees a session's name can open such connections; the
/// client's own are pending only for a moment.
const MAX_PENDING: usize = 64;
/// How many of them may come from one address. A client opens 33 at once.
const MAX_PENDING_OF_ONE: usize = 48;
/// Maximum number of threads for connections. One whose connection was closed ends at once.
const MAX_THREADS: usize = 2 * MAX_PENDING;

/// A connection of the session.
#[derive(Debug)]
pub struct Admitted {
    /// What its client sent on it.
    pub hello: Hello,
    /// The connection.
    pub stream: Stream,
}

/// Whether it is a session's first connection.
pub fn is_control(purpose: u32) -> bool {
    matches!(purpose, purpose::CONTROL | purpose::VERBS)
}

/// A message from the daemon, with its descriptors.
pub type FromDaemon = (ToWorker, Vec<OwnedFd>);

/// Handles an admitted connection.
type Then = Arc<dyn Fn(Admitted) + Send + Sync>;

/// See the module's documentation.
pub struct Door {
    config: Arc<ServerConfig>,
    visitor: Visitor,
    /// Number of the session's data connections.
    data_connections: u32,
    pending: Mutex<Pending>,
    limit: LogLimit,
    state: Mutex<State>,
    /// Raised when a connection has been admitted.
    admitted: EventFd,
}

/// Connections that belong to nobody yet.
#[derive(Default)]
struct Pending {
    /// In the order in which they came: duplicates of their sockets, and the addresses that they come from.
    sockets: BTreeMap<u64, (TcpStream, Option<IpAddr>)>,
    next: u64,
    threads: usize,
}

impl Pending {
    /// Adds a connection, for which a thread begins. Closes an older one if there are too many. Gives its
    /// number; `None`: not even that helps.
    fn add(&mut self, socket: &OwnedFd) -> io::Result<Option<u64>> {
        if self.threads >= MAX_THREADS {
            return Ok(None);
        }
        let socket = TcpStream::from(socket.try_clone()?);
        let from = socket.peer_addr().ok().map(|address| address.ip());
        let of_one = self.sockets.iter().filter(|(_, (_, other))| *other == from);
        let oldest = if of_one.clone().count() >= MAX_PENDING_OF_ONE {
            of_one.map(|(number, _)| *number).next()
        } else if self.sockets.len() >= MAX_PENDING {
            self.sockets.keys().next().copied()
        } else {
            None
        };
        if let Some((oldest, _)) = oldest.and_then(|oldest| self.sockets.remove(&oldest)) {
            // It may be over already.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let number = self.next;
        (self.next, self.threads) = (number + 1, self.threads + 1);
        self.sockets.insert(number, (socket, from));
        Ok(Some(number))
    }

    /// Its thread is done with it.
    fn remove(&mut self, number: u64) {
        self.sockets.remove(&number);
        self.threads -= 1;
    }
}

#[derive(Default)]
struct State {
    /// Whether the control connection was admitted, and the indices of the admitted data connections.
    control: bool,
    data: Vec<u32>,
    /// Admitted connections that nobody has taken yet.
    waiting: Vec<Admitted>,
    then: Option<Then>,
}

impl Door {
    /// Admits the visitor's connections to a session with this many data connections.
    pub fn new(identity: &Identity, visitor: Visitor, data_connections: u32) -> Result<Arc<Door>, Lost> {
        let failed = |e: String| Lost::new(format!("preparing the session's connections: {e}"));
        let config = tls::server_pinning(identity, visitor.key).map_err(|e| failed(e.to_string()))?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let admitted = EventFd::from_value_and_flags(0, flags).map_err(|e| failed(e.to_string()))?;
        let (pending, limit, state) = (Mutex::default(), LogLimit::default(), Mutex::default());
        Ok(Arc::new(Door { config, visitor, data_connections, pending, limit, state, admitted }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles a new connection. Returns immediately.
    pub fn knock(self: &Arc<Door>, socket: OwnedFd) {
        let closed = |why: &str| self.limit.warn("closed a connection that named this session", why);
        let number = match self.pending().add(&socket) {
            Ok(Some(number)) => number,
            Ok(None) => return closed("too many others are pending"),
            Err(e) => return closed(&e.to_string()),
        };
        let door = Arc::clone(self);
        let begun = std::thread::Builder::new().name("rgpu-door".into()).spawn(move || {
            let result = door.admit(socket);
            // Nobody closes it from here on.
            door.pending().remove(number);
            match result {
                Ok(admitted) => door.let_in(admitted),
                Err(e) => {
                    if let Some(not_shown) = door.limit.allow() {
                        tracing::info!("closed a connection that named this session: {e}{not_shown}");
                    }
                }
            }
        });
        if let Err(e) = begun {
            self.pending().remove(number);
            closed(&format!("cannot start a thread for it: {e}"));
        }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(&self, socket: OwnedFd) -> io::Result<Admitted> {
        let deadline = Instant::now() + WITHIN;
        let stream = Stream::tls_server(socket, &self.config, deadline)?;
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_nonblocking(false)?;
        stream.set_nodelay()?;
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(left)?;
        let mut hello = Hello::new_zeroed();
        stream.read_exact(hello.as_mut_bytes())?;
        stream.set_read_timeout(None)?;
        let refused = self.check(&hello).err();
        let (answer, reason) =
            refused.as_ref().map_or((Answer::Ok, ""), |(answer, reason)| (*answer, reason.as_str()));
        let welcome = Welcome {
            token: self.visitor.token,
            data_connections: self.data_connections,
            ..Welcome::new(answer, reason)
        };
        stream.write_all(welcome.as_bytes())?;
        match refused {
            None => Ok(Admitted { hello, stream }),
            Some((_, reason)) => Err(io::Error::other(reason)),
        }
    }

    /// Whether a connection with this hello belongs to the session, and the session doesn't have it yet.
    fn check(&self, hello: &Hello) -> Result<(), (Answer, String)> {
        greeting::<Hello>(hello.as_bytes(), &OURS).map_err(|e| (Answer::Version, e.to_string()))?;
        let secret = Secret(self.visitor.secret).matches(&hello.secret);
        if !secret || hello.token != self.visitor.token {
            return Err((Answer::Denied, "the session has another secret".into()));
        }
        let mut state = self.lock();
        match hello.purpose {
            purpose if is_control(purpose) && !state.control => state.control = true,
            purpose if is_control(purpose) => {
                return Err((Answer::NoResources, "the session already has its control connection".into()));
            }
            // If connections replace lost ones, the session itself takes those of the last attempt.
            purpose::RESUME | purpose::END => {}
            purpose::DATA if hello.index < self.data_connections && hello.attempt > 0 => {}
            purpose::DATA if hello.index < self.data_connections && !state.data.contains(&hello.index) => {
                state.data.push(hello.index);
            }
            purpose::DATA => {
                let reason =
                    format!("the session already has all of its {} data connections", self.data_connections);
                return Err((Answer::NoResources, reason));
            }
            other => return Err((Answer::Invalid, format!("purpose {other} is not one of a session's"))),
        }
        Ok(())
    }

    fn let_in(&self, admitted: Admitted) {
        let mut state = self.lock();
        if let Some(then) = state.then.clone() {
            // Others are admitted meanwhile.
            drop(state);
            return then(admitted);
        }
        state.waiting.push(admitted);
        // A full counter means that it is already raised.
        let _ = self.admitted.write(1);
    }

    /// Calls `then` for each waiting connection, and for each that arrives from now on.
    pub fn open(&self, then: Then) {
        let mut state = self.lock();
        state.then = Some(Arc::clone(&then));
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|admitted| then(admitted));
    }

    /// Waits for the control connection, or for what says that the client's end of it was lost: then it is
    /// one that is closed. Until then, nobody else receives the daemon's messages. Also returns those that
    /// are for the session.
    pub fn control(
        self: &Arc<Door>,
        daemon: &OwnedFd,
        terms: &Page<Terms>,
    ) -> Result<(Stream, Vec<FromDaemon>), Lost> {
        let failed = |e: io::Error| Lost::new(format!("waiting for the client's connections: {e}"));
        let deadline = Instant::now() + FIRST_WITHIN;
        let mut for_session = Vec::new();
        loop {
            {
                let mut state = self.lock();
                let mut purposes = state.waiting.iter().map(|admitted| admitted.hello.purpose);
                if let Some(at) = purposes.clone().position(is_control) {
                    return Ok((state.waiting.swap_remove(at).stream, for_session));
                }
                if purposes.any(|purpose| purpose != purpose::DATA) {
                    return Ok((Stream::closed().map_err(failed)?, for_session));
                }
            }
            let left = deadline.saturating_duration_since(Instant::now()).as_millis();
            if left == 0 {
                let seconds = FIRST_WITHIN.as_secs();
                return Err(Lost::new(format!("the client opened no control connection within {seconds} s")));
            }
            let mut watched = [
                PollFd::new(daemon.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.admitted.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut watched, PollTimeout::from(left as u16)) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return Err(failed(e.into())),
            }
            // This consumes all events.
            let _ = self.admitted.read();
            if watched[0].revents().is_some_and(|events| !events.is_empty()) {
                match worker_protocol::receive::<ToWorker>(daemon.as_fd()).map_err(failed)? {
                    Some((ToWorker::Connection, fds)) => fds.into_iter().for_each(|fd| self.knock(fd)),
                    Some((ToWorker::TakenOver, fds)) => super::taken_over(terms, fds),
                    Some(message) => for_session.push(message),
                    None => return Err(Lost::new("rgpu-server is shutting down")),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_the_daemon_says_before_the_control_connection_comes_is_for_the_session() {
        let identity = Identity::generate().unwrap();
        let visitor = Visitor { key: identity.fingerprint(), token: [1; 16], secret: [2; 32] };
        let door = Door::new(&identity, visitor, 4).unwrap();
        let (daemon, worker) = worker_protocol::pair().unwrap();
        let (terms, _fd) = Page::<Terms>::new().unwrap();
        let waiting = std::thread::spawn({
            let door = Arc::clone(&door);
            move || door.control(&worker, &terms).map_err(|lost| lost.reason)
        });
        worker_protocol::send(daemon.as_fd(), &ToWorker::DeviceFailed { device: 3, status: 719 }, &[])
            .unwrap();
        // A connection that is closed: then the door has received the message before it.
        let (mut client, other) = UnixStream::pair().unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        worker_protocol::send(daemon.as_fd(), &ToWorker::Connection, &[other.as_fd()]).unwrap();
        drop(other);
        let _ = client.read_to_end(&mut Vec::new());
        let hello = Hello { purpose: purpose::CONTROL, ..Hello::new_zeroed() };
        door.let_in(Admitted { hello, stream: Stream::closed().unwrap() });
        let (_control, messages) = waiting.join().unwrap().unwrap();
        assert!(
            matches!(messages[..], [(ToWorker::DeviceFailed { device: 3, status: 719 }, _)]),
            "{messages:?}"
        );
    }

    #[test]
    fn a_connection_is_admitted_while_another_is_being_handled() {
        let identity = Identity::generate().unwrap();
        let visitor = Visitor { key: identity.fingerprint(), token: [1; 16], secret: [2; 32] };
        let door = Door::new(&identity, visitor, 4).unwrap();
        let hello = |purpose| Hello { purpose, ..Hello::new_zeroed() };
        let admitted = |purpose| Admitted { hello: hello(purpose), stream: Stream::closed().unwrap() };
        let looks = Arc::downgrade(&door);
        let (seen, sees) = std::sync::mpsc::channel();
        door.let_in(admitted(purpose::DATA));
        door.open(Arc::new(move |_| {
            let free = looks.upgrade().is_some_and(|door| door.state.try_lock().is_ok());
            seen.send(free).unwrap();
        }));
        door.let_in(admitted(purpose::RESUME));
        assert_eq!(sees.try_iter().collect::<Vec<_>>(), [true, true]);
    }

    #[test]
    fn strangers_who_say_nothing_keep_no_client_out() {
        let (identity, own) = (Identity::generate().unwrap(), Identity::generate().unwrap());
        let visitor = Visitor { key: own.fingerprint(), token: [1; 16], secret: [2; 32] };
        let door = Door::new(&identity, visitor, 4).unwrap();
        let knock = || {
            let (client, other) = UnixStream::pair().unwrap();
            door.knock(other.into());
            client
        };
        let strangers: Vec<UnixStream> = (0..MAX_PENDING).map(|_| knock()).collect();
        let config = tls::client_pinning(&own, &[identity.fingerprint()]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let client = Stream::tls_client(knock().into(), &config, tls::session_name(&[3; 16]), deadline);
        let client = client.unwrap();
        let hello =
            Hello { purpose: purpose::CONTROL, token: [1; 16], secret: [2; 32], ..Hello::new_zeroed() };
        client.write_all(hello.as_bytes()).unwrap();
        // Whatever it says: it was heard.
        client.read_exact(Welcome::new_zeroed().as_mut_bytes()).unwrap();
        assert!(door.pending().sockets.len() <= MAX_PENDING);
        // Theirs are closed in turn.
        let mut first = &strangers[0];
        assert_eq!(first.read_to_end(&mut Vec::new()).unwrap(), 0);
    }
}
