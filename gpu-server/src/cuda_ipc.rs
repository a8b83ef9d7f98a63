//! CUDA IPC: memory and events that sessions of one client share, named by tokens that cannot be guessed.
//!
//! ```text
//!  worker A ── Share{what} + descriptor ──▶ parent: token ◀── Open{token} ── worker B
//!           ◀────────── token ─────────────        └── what + descriptor ──▶
//! ```
//!
//! A session may open what sessions of the same *origin* have shared: the same virtual machine, or the native clients of the same host, over the same link ([`origin`]).
//! A token is valid until its owner revokes it or ends. What other sessions have opened by then remains valid, because they hold descriptors of their own.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use protocol::Status;
use serde::{Deserialize, Serialize};

use crate::worker_protocol::{self, FromWorker, Resource};

/// Names a shared object.
pub type Token = [u8; 16];

/// The daemon answers at once. After this long without an answer, it counts as gone.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of objects that one session may share at a time.
pub const MAX_OF_SESSION: usize = 8192;

/// A shared object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shared {
    /// Device memory, with its descriptor.
    Memory {
        /// The device's number on this server, the same in every worker.
        device: u32,
        /// Bytes.
        size: u64,
    },
    /// An interprocess event.
    Event {
        /// The device's number.
        device: u32,
        /// The driver's own handle, if it has one; otherwise the event comes with a descriptor.
        handle: Vec<u8>,
    },
}

/// Why a token is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// It names no object that this client may open.
    Unknown,
    /// The session, its principal, or the daemon has reached its maximum.
    Full,
}

/// The daemon's answer.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To a request to share.
    Shared(Token),
    /// To a request to open, with a descriptor if what is shared has one.
    Opened {
        /// The object.
        what: Shared,
        /// Whether the session that opens it has shared it itself.
        own: bool,
    },
    /// To a request to charge bytes.
    Charged,
    /// The request is refused.
    Refused(Refusal),
}

type Answered = (Reply, Option<OwnedFd>);

/// Sends a worker's requests to the daemon.
pub struct Broker {
    daemon: Arc<OwnedFd>,
    state: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    asked: HashMap<u64, Sender<Answered>>,
    closed: bool,
}

impl Broker {
    /// A broker that uses the socket to the daemon.
    pub fn new(daemon: Arc<OwnedFd>) -> Arc<Broker> {
        Arc::new(Broker { daemon, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, message: impl FnOnce(u64) -> FromWorker, fd: Option<&OwnedFd>) -> Result<Answered, Status> {
        let (answer, answered) = channel();
        let request = {
            let mut state = self.lock();
            if state.closed {
                return Err(Status::DEVICE_UNAVAILABLE);
            }
            state.next += 1;
            let request = state.next;
            state.asked.insert(request, answer);
            request
        };
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        let sent = worker_protocol::send(self.daemon.as_fd(), &message(request), &fds);
        let received = sent.ok().and_then(|()| answered.recv_timeout(ANSWER_WITHIN).ok());
        self.lock().asked.remove(&request);
        received.ok_or(Status::DEVICE_UNAVAILABLE)
    }

    /// Shares an object with the client's other sessions.
    pub fn share(&self, what: Shared, fd: Option<&OwnedFd>) -> Result<Token, Status> {
        match self.ask(|request| FromWorker::Share { request, what }, fd)?.0 {
            Reply::Shared(token) => Ok(token),
            Reply::Refused(_) => Err(Status::OUT_OF_MEMORY),
            Reply::Opened { .. } | Reply::Charged => Err(Status::UNKNOWN),
        }
    }

    /// Charges bytes to the principal.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` when its limit leaves less than that.
    pub fn charge(&self, resource: Resource, bytes: u64) -> Result<(), Status> {
        match self.ask(|request| FromWorker::Charge { request, resource, bytes }, None)?.0 {
            Reply::Charged => Ok(()),
            Reply::Refused(_) => Err(Status::OUT_OF_MEMORY),
            Reply::Shared(_) | Reply::Opened { .. } => Err(Status::UNKNOWN),
        }
    }

    /// Gives charged bytes back.
    pub fn discharge(&self, resource: Resource, bytes: u64) {
        // A daemon that is gone counts nothing.
        let _ = worker_protocol::send(self.daemon.as_fd(), &FromWorker::Discharge { resource, bytes }, &[]);
    }

    /// Opens a shared object. Returns the object, its descriptor, and whether this session has shared it itself. A token that names no object of this client gives `INVALID_VALUE`.
    pub fn open(&self, token: Token) -> Result<(Shared, Option<OwnedFd>, bool), Status> {
        match self.ask(|request| FromWorker::Open { request, token }, None)? {
            (Reply::Opened { what, own }, fd) => Ok((what, fd, own)),
            (Reply::Refused(Refusal::Unknown), _) => Err(Status::INVALID_VALUE),
            (Reply::Refused(Refusal::Full), _) => Err(Status::OUT_OF_MEMORY),
            (Reply::Shared(_) | Reply::Charged, _) => Err(Status::UNKNOWN),
        }
    }

    /// Revokes a token.
    pub fn unshare(&self, token: Token) {
        // A daemon that is gone has no tokens.
        let _ = worker_protocol::send(self.daemon.as_fd(), &FromWorker::Unshare { token }, &[]);
    }

    /// Delivers an answer from the daemon.
    pub fn deliver(&self, request: u64, reply: Reply, fd: Option<OwnedFd>) {
        let asked = self.lock().asked.remove(&request);
        if let Some(asked) = asked {
            // The thread that asked may have given up.
            let _ = asked.send((reply, fd));
        }
    }

    /// Ends all waits because the daemon is gone.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.asked.clear();
    }
}

/// The origin of a session. Sessions of different origins cannot open each other's objects. `peer` is the other end of the link as the daemon saw it, `client` is the name that the bridge gave.
pub fn origin(peer: &str, client: &str) -> String {
    let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
    format!("{host}/{client}")
}

/// The daemon's table of shared objects.
#[derive(Default)]
pub struct Shares(HashMap<Token, Share>);

struct Share {
    owner: u32,
    origin: String,
    what: Shared,
    fd: Option<Arc<OwnedFd>>,
}

impl Shares {
    /// Adds an object and returns its token.
    pub fn add(
        &mut self,
        owner: u32,
        origin: String,
        what: Shared,
        fd: Option<OwnedFd>,
    ) -> io::Result<Result<Token, Refusal>> {
        let of_owner = self.0.values().filter(|share| share.owner == owner).count();
        if of_owner >= MAX_OF_SESSION || self.0.len() >= max_total() {
            return Ok(Err(Refusal::Full));
        }
        let token = random_token()?;
        self.0.insert(token, Share { owner, origin, what, fd: fd.map(Arc::new) });
        Ok(Ok(token))
    }

    /// Looks an object up for a session of `origin`.
    pub fn find(
        &self,
        token: &Token,
        asker: u32,
        origin: &str,
    ) -> Option<(Shared, Option<Arc<OwnedFd>>, bool)> {
        let share = self.0.get(token).filter(|share| share.origin == origin)?;
        Some((share.what.clone(), share.fd.clone(), share.owner == asker))
    }

    /// Revokes a token at its owner's request. A request from another session does nothing.
    pub fn remove(&mut self, token: &Token, owner: u32) {
        if self.0.get(token).is_some_and(|share| share.owner == owner) {
            self.0.remove(token);
        }
    }

    /// Removes every object of a session that has ended.
    pub fn remove_all_of(&mut self, owner: u32) {
        self.0.retain(|_, share| share.owner != owner);
    }
}

/// Maximum number of shared objects: half of the descriptors that the daemon may have. The other half is for connections and workers.
fn max_total() -> usize {
    nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)
        .map_or(256, |(soft, _)| usize::try_from(soft / 2).unwrap_or(usize::MAX))
}

/// 128 random bits.
pub fn random_token() -> io::Result<Token> {
    use std::io::Read;
    let mut token = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHAT: Shared = Shared::Memory { device: 1, size: 2 << 20 };

    #[test]
    fn only_the_same_origin_opens_a_token() {
        let mut shares = Shares::default();
        let token = shares.add(7, origin("10.0.0.1:4000", "vm1"), WHAT, None).unwrap().unwrap();
        assert!(shares.find(&token, 8, "10.0.0.1/vm1").is_some_and(|(what, _, own)| what == WHAT && !own));
        assert!(shares.find(&token, 7, &origin("10.0.0.1:5000", "vm1")).is_some_and(|(_, _, own)| own));
        for other in [origin("10.0.0.1:4000", "vm2"), origin("10.0.0.2:4000", "vm1"), String::new()] {
            assert!(shares.find(&token, 8, &other).is_none(), "{other}");
        }
        let mut guess = token;
        guess[15] ^= 1;
        assert!(shares.find(&guess, 8, "10.0.0.1/vm1").is_none());
    }

    #[test]
    fn only_its_owner_revokes_a_token() {
        let mut shares = Shares::default();
        let first = shares.add(7, "a".into(), WHAT, None).unwrap().unwrap();
        let second = shares.add(7, "a".into(), WHAT, None).unwrap().unwrap();
        assert_ne!(first, second);
        shares.remove(&first, 8);
        assert!(shares.find(&first, 8, "a").is_some());
        shares.remove(&first, 7);
        assert!(shares.find(&first, 8, "a").is_none());
        shares.remove_all_of(7);
        assert!(shares.find(&second, 8, "a").is_none());
    }

    #[test]
    fn refused_beyond_the_maximum_of_a_session() {
        let mut shares = Shares::default();
        let most = MAX_OF_SESSION.min(max_total());
        for _ in 0..most {
            shares.add(7, "a".into(), WHAT, None).unwrap().unwrap();
        }
        assert_eq!(shares.add(7, "a".into(), WHAT, None).unwrap(), Err(Refusal::Full));
    }

    #[test]
    fn requests_fail_at_once_when_the_daemon_is_gone() {
        let (ours, theirs) = worker_protocol::pair().unwrap();
        let broker = Broker::new(Arc::new(ours));
        drop(theirs);
        broker.close();
        assert_eq!(broker.share(WHAT, None), Err(Status::DEVICE_UNAVAILABLE));
        assert_eq!(broker.open([0; 16]).map(|_| ()), Err(Status::DEVICE_UNAVAILABLE));
    }
}
