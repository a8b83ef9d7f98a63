//! What sessions of one client share: memory and events, under tokens that cannot be guessed.
//!
//! ```text
//!  worker A ── Share{what} + descriptor ──▶ parent: token ◀── Open{token} ── worker B
//!           ◀────────── token ─────────────        └── what + descriptor ──▶
//! ```
//!
//! A session may open what sessions of the same *origin* have shared: the same virtual machine, or the same host's native clients, over the same link ([`origin`]).
//! A token lives until its owner takes it back or ends; what others have opened by then stays theirs, because they hold descriptors of their own.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use protocol::Status;
use serde::{Deserialize, Serialize};

use crate::ipc::{self, FromWorker};

/// Names what is shared.
pub type Token = [u8; 16];

/// The daemon answers at once; this long without an answer means that it is gone.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Things that one session may share at a time.
pub const MOST_OF_SESSION: usize = 8192;

/// What is shared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shared {
    /// Memory of a device; its descriptor comes along.
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
        /// The driver's own handle, where it has one; a descriptor comes along where not.
        handle: Vec<u8>,
    },
}

/// Why a token is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// It names nothing that this client may open.
    Unknown,
    /// The session, or the daemon, shares as much as it can.
    Full,
}

/// The daemon's answer.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To a request to share.
    Shared(Token),
    /// To a request to open, with a descriptor if what is shared has one.
    Opened {
        /// What it is.
        what: Shared,
        /// Whether the asking session shares it itself.
        own: bool,
    },
    /// It is refused.
    Refused(Refusal),
}

type Answered = (Reply, Option<OwnedFd>);

/// A worker's way to the daemon.
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
    /// Over the socket to the daemon.
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
        let sent = ipc::send(self.daemon.as_fd(), &message(request), &fds);
        let received = sent.ok().and_then(|()| answered.recv_timeout(ANSWER_WITHIN).ok());
        self.lock().asked.remove(&request);
        received.ok_or(Status::DEVICE_UNAVAILABLE)
    }

    /// Shares something with the client's other sessions.
    pub fn share(&self, what: Shared, fd: Option<&OwnedFd>) -> Result<Token, Status> {
        match self.ask(|request| FromWorker::Share { request, what }, fd)?.0 {
            Reply::Shared(token) => Ok(token),
            Reply::Refused(_) => Err(Status::OUT_OF_MEMORY),
            Reply::Opened { .. } => Err(Status::UNKNOWN),
        }
    }

    /// Opens what has been shared: what it is, its descriptor, and whether this session shares it itself. A token that names nothing for this client is `INVALID_VALUE`.
    pub fn open(&self, token: Token) -> Result<(Shared, Option<OwnedFd>, bool), Status> {
        match self.ask(|request| FromWorker::Open { request, token }, None)? {
            (Reply::Opened { what, own }, fd) => Ok((what, fd, own)),
            (Reply::Refused(Refusal::Unknown), _) => Err(Status::INVALID_VALUE),
            (Reply::Refused(Refusal::Full), _) => Err(Status::OUT_OF_MEMORY),
            (Reply::Shared(_), _) => Err(Status::UNKNOWN),
        }
    }

    /// Takes a token back.
    pub fn unshare(&self, token: Token) {
        // A daemon that is gone has forgotten it.
        let _ = ipc::send(self.daemon.as_fd(), &FromWorker::Unshare { token }, &[]);
    }

    /// Hands on an answer of the daemon's.
    pub fn deliver(&self, request: u64, reply: Reply, fd: Option<OwnedFd>) {
        let asked = self.lock().asked.remove(&request);
        if let Some(asked) = asked {
            // Whoever asked may have given up.
            let _ = asked.send((reply, fd));
        }
    }

    /// The daemon is gone: nobody waits for it any more.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.asked.clear();
    }
}

/// Whose client a session is: what opens nothing of another's. `peer` is the link's other end as the daemon saw it, `client` the name that the bridge gave.
pub fn origin(peer: &str, client: &str) -> String {
    let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
    format!("{host}/{client}")
}

/// The daemon's table of what is shared.
#[derive(Default)]
pub struct Shares(HashMap<Token, Share>);

struct Share {
    owner: u32,
    origin: String,
    what: Shared,
    fd: Option<Arc<OwnedFd>>,
}

impl Shares {
    /// Enters something; its new token.
    pub fn add(
        &mut self,
        owner: u32,
        origin: String,
        what: Shared,
        fd: Option<OwnedFd>,
    ) -> io::Result<Result<Token, Refusal>> {
        let of_owner = self.0.values().filter(|share| share.owner == owner).count();
        if of_owner >= MOST_OF_SESSION || self.0.len() >= most_in_all() {
            return Ok(Err(Refusal::Full));
        }
        let token = random_token()?;
        self.0.insert(token, Share { owner, origin, what, fd: fd.map(Arc::new) });
        Ok(Ok(token))
    }

    /// Looks something up for a session of `origin`.
    pub fn find(
        &self,
        token: &Token,
        asker: u32,
        origin: &str,
    ) -> Option<(Shared, Option<Arc<OwnedFd>>, bool)> {
        let share = self.0.get(token).filter(|share| share.origin == origin)?;
        Some((share.what.clone(), share.fd.clone(), share.owner == asker))
    }

    /// A token is taken back by its owner; another's request does nothing.
    pub fn remove(&mut self, token: &Token, owner: u32) {
        if self.0.get(token).is_some_and(|share| share.owner == owner) {
            self.0.remove(token);
        }
    }

    /// A session is over.
    pub fn forget(&mut self, owner: u32) {
        self.0.retain(|_, share| share.owner != owner);
    }
}

/// Half of the descriptors that the daemon may have: the rest is for connections and workers.
fn most_in_all() -> usize {
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
    fn a_token_ends_with_its_owner_and_by_its_owner_alone() {
        let mut shares = Shares::default();
        let first = shares.add(7, "a".into(), WHAT, None).unwrap().unwrap();
        let second = shares.add(7, "a".into(), WHAT, None).unwrap().unwrap();
        assert_ne!(first, second);
        shares.remove(&first, 8);
        assert!(shares.find(&first, 8, "a").is_some());
        shares.remove(&first, 7);
        assert!(shares.find(&first, 8, "a").is_none());
        shares.forget(7);
        assert!(shares.find(&second, 8, "a").is_none());
    }

    #[test]
    fn a_session_cannot_share_without_bound() {
        let mut shares = Shares::default();
        let most = MOST_OF_SESSION.min(most_in_all());
        for _ in 0..most {
            shares.add(7, "a".into(), WHAT, None).unwrap().unwrap();
        }
        assert_eq!(shares.add(7, "a".into(), WHAT, None).unwrap(), Err(Refusal::Full));
    }

    #[test]
    fn a_broker_whose_daemon_is_gone_waits_for_nothing() {
        let (ours, theirs) = ipc::pair().unwrap();
        let broker = Broker::new(Arc::new(ours));
        drop(theirs);
        broker.close();
        assert_eq!(broker.share(WHAT, None), Err(Status::DEVICE_UNAVAILABLE));
        assert_eq!(broker.open([0; 16]).map(|_| ()), Err(Status::DEVICE_UNAVAILABLE));
    }
}
