//! CUDA IPC: memory and events that sessions of one client share, named by tokens that cannot be guessed.
//!
//! ```text
//!  worker A ── Share{what} + descriptor ──▶ parent: token ◀── Open{token} ── worker B
//!           ◀────────── token ─────────────        └── what + descriptor ──▶
//! ```
//!
//! A session may open what sessions of the same *origin* have shared: those of one client that come from the
//! same virtual machine, or from the native programs of the same host, over the same link ([`origin`]). A
//! token is valid until its owner revokes it or ends. Objects that other sessions have opened by then stay
//! valid, because those sessions hold their own descriptors.

use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use protocol::Status;

use crate::limits::Resource;
use crate::shared_event::{self, SLOTS};
use crate::worker_protocol::{self, FromWorker, Process, Refusal, Reply, Shared, Token};

/// How long a worker waits for a connection that its daemon makes.
const CONNECT_WITHIN: Duration = Duration::from_secs(60);

/// Maximum number of objects that one session may share at a time, and of events of others that it may have
/// opened while they are shared.
pub const MAX_OF_SESSION: usize = 8192;

type Answered = (Reply, Option<OwnedFd>);

/// A ticket that the daemon has made.
pub struct MadeTicket {
    /// Its name.
    pub token: Token,
    /// Its secret.
    pub secret: [u8; 32],
    /// Whether connections over TCP are under TLS.
    pub encrypted: bool,
    /// Where this server listens.
    pub addresses: Vec<String>,
}

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
        // The daemon answers at once. If it has crashed, its successor answers. If there is none, the
        // connection ends, and so does this wait.
        self.ask_and(message, fd, |answered| answered.recv().ok())
    }

    fn ask_and(
        &self,
        message: impl FnOnce(u64) -> FromWorker,
        fd: Option<&OwnedFd>,
        wait: impl FnOnce(&Receiver<Answered>) -> Option<Answered>,
    ) -> Result<Answered, Status> {
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
        let received = sent.ok().and_then(|()| wait(&answered));
        self.lock().asked.remove(&request);
        received.ok_or(Status::DEVICE_UNAVAILABLE)
    }

    /// Shares an object with the client's other sessions.
    pub fn share(&self, what: Shared, fd: Option<&OwnedFd>) -> Result<Token, Status> {
        match self.ask(|request| FromWorker::Share { request, what }, fd)?.0 {
            Reply::Shared(token) => Ok(token),
            Reply::Refused(_) => Err(Status::OUT_OF_MEMORY),
            _ => Err(Status::UNKNOWN),
        }
    }

    /// Charges bytes to the principal. `shared`: the token of memory that another session shares.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` when its limit leaves less than that; `NOT_READY` when the device has no room now.
    pub fn charge(&self, resource: Resource, bytes: u64, shared: Option<Token>) -> Result<(), Status> {
        match self.ask(|request| FromWorker::Charge { request, resource, bytes, shared }, None)?.0 {
            Reply::Charged => Ok(()),
            Reply::Refused(Refusal::Crowded) => Err(Status::NOT_READY),
            Reply::Refused(_) => Err(Status::OUT_OF_MEMORY),
            _ => Err(Status::UNKNOWN),
        }
    }

    /// Requests a ticket for a direct connection to this session.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the session has as many as it may.
    pub fn ticket(&self) -> Result<MadeTicket, Status> {
        match self.ask(|request| FromWorker::Ticket { request }, None)?.0 {
            Reply::Ticket { token, secret, encrypted, addresses } => {
                Ok(MadeTicket { token, secret, encrypted, addresses })
            }
            Reply::Refused(_) => Err(Status::OUT_OF_MEMORY),
            _ => Err(Status::UNKNOWN),
        }
    }

    /// Requests a connection to another server and waits for it.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn connect(&self, address: &str, encrypted: bool) -> Result<OwnedFd, String> {
        let address = address.to_owned();
        // A daemon that is replaced while it connects does not answer.
        let wait = |answered: &Receiver<Answered>| answered.recv_timeout(CONNECT_WITHIN).ok();
        match self.ask_and(|request| FromWorker::Connect { request, address, encrypted }, None, wait) {
            Ok((Reply::Connected, Some(socket))) => Ok(socket),
            Ok((Reply::NotConnected(why), _)) => Err(why),
            _ => Err("the daemon does not answer".into()),
        }
    }

    /// The client's programs that use the device with this number, as processes in this PID namespace see
    /// them.
    ///
    /// # Errors
    /// `DEVICE_UNAVAILABLE` if the daemon is gone.
    pub fn processes(&self, device: u32, namespace: u64) -> Result<Vec<Process>, Status> {
        match self.ask(|request| FromWorker::Processes { request, device, namespace }, None)?.0 {
            Reply::Processes(all) => Ok(all),
            _ => Err(Status::UNKNOWN),
        }
    }

    /// Returns charged bytes.
    pub fn discharge(&self, resource: Resource, bytes: u64, shared: Option<Token>) {
        let request = {
            let mut state = self.lock();
            state.next += 1;
            state.next
        };
        let message = FromWorker::Discharge { request, resource, bytes, shared };
        // If the daemon is gone, nothing is counted.
        let _ = worker_protocol::send(self.daemon.as_fd(), &message, &[]);
    }

    /// Opens a shared object. Returns the object, its descriptor, and whether this session shared it. A token
    /// that names no object of this client gives `INVALID_VALUE`.
    pub fn open(&self, token: Token) -> Result<(Shared, Option<OwnedFd>, bool), Status> {
        match self.ask(|request| FromWorker::Open { request, token }, None)? {
            (Reply::Opened { what, own }, fd) => Ok((what, fd, own)),
            (Reply::Refused(Refusal::Unknown), _) => Err(Status::INVALID_VALUE),
            (Reply::Refused(Refusal::Full), _) => Err(Status::OUT_OF_MEMORY),
            _ => Err(Status::UNKNOWN),
        }
    }

    /// Revokes a token.
    pub fn unshare(&self, token: Token) {
        // If the daemon is gone, so are its tokens.
        let _ = worker_protocol::send(self.daemon.as_fd(), &FromWorker::Unshare { token }, &[]);
    }

    /// Delivers an answer from the daemon.
    pub fn deliver(&self, request: u64, reply: Reply, fd: Option<OwnedFd>) {
        let asked = self.lock().asked.remove(&request);
        if let Some(asked) = asked {
            // The asking thread may have given up.
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

/// A session's origin. Sessions of different origins cannot open each other's objects. `principal` is the
/// verified client; `peer` is the other end of the link as the daemon saw it; `client` is the name that the
/// bridge gave.
pub fn origin(principal: &str, peer: &str, client: &str) -> String {
    let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
    format!("{principal} {host}/{client}")
}

/// The daemon's table of shared objects.
#[derive(Default)]
pub struct Shares {
    all: HashMap<Token, Share>,
    /// How many of them each session and each client has. Nobody may have to count them all.
    of_owners: HashMap<u32, usize>,
    of_accounts: HashMap<String, usize>,
    /// How many slots each session has in events of others.
    slots: HashMap<u32, usize>,
}

/// A session that shares something.
#[derive(Clone)]
pub struct Sharer {
    /// The process ID of its worker.
    pub worker: u32,
    /// Its client's account ([`Limits::owner`](crate::limits::Limits::owner)).
    pub account: String,
    /// Its [`origin`].
    pub origin: String,
}

struct Share {
    owner: u32,
    account: String,
    origin: String,
    what: Shared,
    fd: Option<Arc<OwnedFd>>,
    /// For an event: the session of each slot.
    slots: Vec<u32>,
}

impl Shares {
    /// Adds an object and returns its token.
    pub fn add(
        &mut self,
        sharer: Sharer,
        what: Shared,
        fd: Option<OwnedFd>,
    ) -> io::Result<Result<Token, Refusal>> {
        let of_owner = self.of_owners.get(&sharer.worker).copied().unwrap_or(0);
        let of_account = self.of_accounts.get(&sharer.account).copied().unwrap_or(0);
        // No client can take all of them from the others, whatever its bridges call themselves.
        if of_owner >= MAX_OF_SESSION || of_account >= max_total() / 4 || self.all.len() >= max_total() {
            return Ok(Err(Refusal::Full));
        }
        // An event that will be settled later must really be one.
        if what == (Shared::Event { slot: 0 })
            && fd.as_ref().is_none_or(|fd| shared_event::check(fd).is_err())
        {
            return Ok(Err(Refusal::Unknown));
        }
        let token = random_token()?;
        let slots = vec![sharer.worker];
        self.insert(token, sharer, what, fd, slots);
        Ok(Ok(token))
    }

    fn insert(&mut self, token: Token, sharer: Sharer, what: Shared, fd: Option<OwnedFd>, slots: Vec<u32>) {
        let Sharer { worker: owner, account, origin } = sharer;
        *self.of_owners.entry(owner).or_default() += 1;
        *self.of_accounts.entry(account.clone()).or_default() += 1;
        self.all.insert(token, Share { owner, account, origin, what, fd: fd.map(Arc::new), slots });
    }

    fn take(&mut self, token: &Token) -> Option<Share> {
        let share = self.all.remove(token)?;
        fewer(&mut self.of_owners, &share.owner);
        fewer(&mut self.of_accounts, &share.account);
        share.slots.iter().skip(1).for_each(|session| fewer(&mut self.slots, session));
        Some(share)
    }

    /// An object of the previous daemon.
    pub fn restore(&mut self, token: Token, sharer: Sharer, what: Shared, fd: OwnedFd) {
        let mut slots = vec![sharer.worker];
        if let Shared::Event { .. } = what {
            // Sessions that have ended had slots, too. These are settled, so that whoever got one would seem
            // to have finished everything. Slots of sessions that go on are noted by `restore_slot`.
            slots.resize(shared_event::used(&fd).unwrap_or_default().max(1), 0);
        }
        self.insert(token, sharer, what, Some(fd), slots);
    }

    /// A slot of an event that another session had opened before this daemon started.
    pub fn restore_slot(&mut self, token: &Token, slot: u16, session: u32) {
        let Some(share) = self.all.get_mut(token) else { return };
        if usize::from(slot) < SLOTS {
            // The slots in between belong to sessions that have ended.
            share.slots.resize(share.slots.len().max(usize::from(slot) + 1), 0);
            let before = std::mem::replace(&mut share.slots[usize::from(slot)], session);
            if slot > 0 {
                fewer(&mut self.slots, &before);
                *self.slots.entry(session).or_default() += 1;
            }
        }
    }

    /// What a session shares, and under which tokens.
    pub fn of(&self, owner: u32) -> impl Iterator<Item = (&Token, &Shared)> {
        let own = self.all.iter().filter(move |(_, share)| share.owner == owner);
        own.map(|(token, share)| (token, &share.what))
    }

    /// Whether this token names an event.
    pub fn has_event(&self, token: &Token) -> bool {
        self.all.get(token).is_some_and(|share| matches!(share.what, Shared::Event { .. }))
    }

    /// Whether something is shared under this token.
    pub fn has(&self, token: &Token) -> bool {
        self.all.contains_key(token)
    }

    /// The session that shares device memory under a token, and the memory's device and size, for a session
    /// of `origin`.
    pub fn memory(&self, token: &Token, origin: &str) -> Option<(u32, u32, u64)> {
        let share = self.all.get(token).filter(|share| share.origin == origin)?;
        match share.what {
            Shared::Memory { device, size } => Some((share.owner, device, size)),
            Shared::Event { .. } => None,
        }
    }

    /// The session that shares something under this token.
    pub fn owner(&self, token: &Token) -> Option<u32> {
        self.all.get(token).map(|share| share.owner)
    }

    /// How many slots a session has in events that others share.
    pub fn opened(&self, session: u32) -> usize {
        self.slots.get(&session).copied().unwrap_or(0)
    }

    /// The sessions that share something.
    pub fn owners(&self) -> impl Iterator<Item = u32> {
        self.all.values().map(|share| share.owner)
    }

    /// An object's descriptor, if it has one.
    pub fn file(&self, token: &Token) -> Option<Arc<OwnedFd>> {
        self.all.get(token)?.fd.clone()
    }

    /// Opens an object for a session of `origin`.
    pub fn open(
        &mut self,
        token: &Token,
        asker: u32,
        origin: &str,
    ) -> Result<(Shared, Option<Arc<OwnedFd>>, bool), Refusal> {
        let share = self.all.get_mut(token).filter(|share| share.origin == origin).ok_or(Refusal::Unknown)?;
        let own = share.owner == asker;
        let mut what = share.what.clone();
        if let Shared::Event { slot } = &mut what
            && !own
        {
            if share.slots.len() >= SLOTS {
                return Err(Refusal::Full);
            }
            *slot = share.slots.len() as u16;
            share.slots.push(asker);
            *self.slots.entry(asker).or_default() += 1;
        }
        Ok((what, share.fd.clone(), own))
    }

    /// Revokes a token at its owner's request and returns its object. A request from another session does
    /// nothing.
    pub fn remove(&mut self, token: &Token, owner: u32) -> Option<Shared> {
        self.all.get(token).filter(|share| share.owner == owner)?;
        self.take(token).map(|share| share.what)
    }

    /// Removes every object of an ended session and settles its events, so that nobody waits for them.
    pub fn remove_all_of(&mut self, owner: u32) {
        for share in self.all.values_mut().filter(|share| matches!(share.what, Shared::Event { .. })) {
            let Share { slots, fd, .. } = share;
            for (slot, session) in slots.iter_mut().enumerate().filter(|(_, session)| **session == owner) {
                // Another session's worker may get this number.
                *session = 0;
                let settled = fd.as_ref().map(|fd| shared_event::settle(fd, slot as u16));
                if let Some(Err(e)) = settled {
                    tracing::warn!("settling the events of a session that has ended: {e}");
                }
            }
        }
        self.slots.remove(&owner);
        let own: Vec<Token> = self.of(owner).map(|(token, _)| *token).collect();
        own.iter().for_each(|token| drop(self.take(token)));
    }
}

/// Counts one less.
fn fewer<K: Eq + Hash>(counts: &mut HashMap<K, usize>, of: &K) {
    if let Some(count) = counts.get_mut(of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(of);
        }
    }
}

/// Maximum number of shared objects: a quarter of the descriptors that the daemon may have. As many again
/// keep them for its successor; the rest are for connections and workers.
fn max_total() -> usize {
    nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)
        .map_or(256, |(soft, _)| usize::try_from(soft / 4).unwrap_or(usize::MAX))
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
    use crate::shared_event::SharedEvent;

    const WHAT: Shared = Shared::Memory { device: 1, size: 2 << 20 };

    /// A session of a client, with an origin of the same name.
    fn of(worker: u32, client: &str) -> Sharer {
        Sharer { worker, account: client.into(), origin: client.into() }
    }

    #[test]
    fn only_the_same_origin_opens_a_token() {
        let mut shares = Shares::default();
        let token = shares
            .add(Sharer { origin: origin("a", "10.0.0.1:4000", "vm1"), ..of(7, "a") }, WHAT, None)
            .unwrap()
            .unwrap();
        assert!(
            shares
                .open(&token, 8, &origin("a", "10.0.0.1:1", "vm1"))
                .is_ok_and(|(what, _, own)| what == WHAT && !own)
        );
        assert!(shares.open(&token, 7, &origin("a", "10.0.0.1:5000", "vm1")).is_ok_and(|(_, _, own)| own));
        for other in [
            origin("a", "10.0.0.1:4000", "vm2"),
            origin("a", "10.0.0.2:4000", "vm1"),
            origin("b", "10.0.0.1:4000", "vm1"),
            String::new(),
        ] {
            assert!(shares.open(&token, 8, &other).is_err(), "{other}");
        }
        let mut guess = token;
        guess[15] ^= 1;
        assert!(shares.open(&guess, 8, "10.0.0.1/vm1").is_err());
    }

    #[test]
    fn only_its_owner_revokes_a_token() {
        let mut shares = Shares::default();
        let first = shares.add(of(7, "a"), WHAT, None).unwrap().unwrap();
        let second = shares.add(of(7, "a"), WHAT, None).unwrap().unwrap();
        assert_ne!(first, second);
        shares.remove(&first, 8);
        assert!(shares.open(&first, 8, "a").is_ok());
        shares.remove(&first, 7);
        assert!(shares.open(&first, 8, "a").is_err());
        shares.remove_all_of(7);
        assert!(shares.open(&second, 8, "a").is_err());
    }

    #[test]
    fn each_opening_of_an_event_gets_a_slot_and_an_ended_session_leaves_nothing_to_wait_for() {
        let event = SharedEvent::new().unwrap();
        let mut shares = Shares::default();
        let file = || Some(event.file().try_clone().unwrap());
        let what = Shared::Event { slot: 0 };
        let token = shares.add(of(7, "a"), what.clone(), file()).unwrap().unwrap();
        assert_eq!(shares.add(of(7, "a"), what.clone(), None).unwrap(), Err(Refusal::Unknown));
        assert!(shares.open(&token, 7, "a").is_ok_and(|(opened, _, own)| own && opened == what));
        let mut opened = |session| {
            let (Shared::Event { slot }, Some(file), false) = shares.open(&token, session, "a").unwrap()
            else {
                panic!("not another session's event");
            };
            SharedEvent::open(file.try_clone().unwrap(), slot).unwrap()
        };
        let (eighth, ninth) = (opened(8), opened(9));
        let of_eighth = eighth.record();
        let moment = ninth.last().unwrap();
        shares.remove_all_of(9);
        assert!(!moment.has_come());
        shares.remove_all_of(8);
        assert!(moment.has_come());
        let of_seventh = event.record();
        let moment = ninth.last().unwrap();
        assert!(!moment.has_come());
        shares.remove_all_of(7);
        assert!(moment.has_come());
        drop((of_eighth, of_seventh));
    }

    #[test]
    fn the_slot_of_a_session_that_ended_under_an_earlier_daemon_is_not_given_again() {
        let event = SharedEvent::new().unwrap();
        let file = || event.file().try_clone().unwrap();
        let what = Shared::Event { slot: 0 };
        let mut shares = Shares::default();
        let token = shares.add(of(7, "a"), what.clone(), Some(file())).unwrap().unwrap();
        assert!(shares.open(&token, 8, "a").is_ok_and(|(opened, ..)| opened == Shared::Event { slot: 1 }));
        shares.remove_all_of(8);
        // The next daemon knows only of sessions that go on.
        let mut shares = Shares::default();
        shares.restore(token, of(7, "a"), what, file());
        let Ok((Shared::Event { slot }, Some(opened), false)) = shares.open(&token, 9, "a") else {
            panic!("not another session's event");
        };
        let ninth = SharedEvent::open(opened.try_clone().unwrap(), slot).unwrap();
        let running = ninth.record();
        assert!(!event.last().unwrap().has_come(), "slot {slot} was settled");
        drop(running);
        assert!(event.last().unwrap().has_come());
    }

    #[test]
    fn an_event_is_opened_no_more_often_than_it_has_slots() {
        let event = SharedEvent::new().unwrap();
        let mut shares = Shares::default();
        let file = event.file().try_clone().unwrap();
        let token = shares.add(of(7, "a"), Shared::Event { slot: 0 }, Some(file)).unwrap().unwrap();
        (1..SLOTS).for_each(|_| assert!(shares.open(&token, 8, "a").is_ok()));
        assert_eq!(shares.open(&token, 8, "a").map(drop), Err(Refusal::Full));
    }

    #[test]
    fn refused_beyond_the_maximum_of_a_session() {
        let mut shares = Shares::default();
        let most = MAX_OF_SESSION.min(max_total() / 4);
        let add = |shares: &mut Shares| shares.add(of(7, "a"), WHAT, None).unwrap();
        let tokens: Vec<Token> = (0..most).map(|_| add(&mut shares).unwrap()).collect();
        assert_eq!(add(&mut shares), Err(Refusal::Full));
        // Other clients still have their share.
        let other = shares.add(of(8, "b"), WHAT, None).unwrap().unwrap();
        // There is as much room again as becomes free.
        assert!(shares.remove(&tokens[0], 8).is_none() && shares.remove(&tokens[0], 7).is_some());
        assert!(add(&mut shares).is_ok() && add(&mut shares).is_err());
        shares.remove_all_of(7);
        shares.remove(&other, 8);
        assert!(shares.of_owners.is_empty() && shares.of_accounts.is_empty() && shares.all.is_empty());
    }

    #[test]
    fn slots_in_events_of_others_are_counted_until_these_or_the_session_end() {
        let event = SharedEvent::new().unwrap();
        let file = || event.file().try_clone().unwrap();
        let mut shares = Shares::default();
        let mut add = || shares.add(of(7, "a"), Shared::Event { slot: 0 }, Some(file())).unwrap().unwrap();
        let (first, second) = (add(), add());
        for (asker, token) in [(7, first), (8, first), (8, second), (8, second), (9, second)] {
            shares.open(&token, asker, "a").unwrap();
        }
        let counts = |shares: &Shares| [7, 8, 9].map(|session| shares.opened(session));
        assert_eq!(counts(&shares), [0, 3, 1]);
        shares.remove(&second, 7);
        assert_eq!(counts(&shares), [0, 1, 0]);
        shares.remove_all_of(8);
        assert_eq!(counts(&shares), [0; 3]);
        // Also those that a daemon before has given.
        shares.restore(second, of(7, "a"), Shared::Event { slot: 0 }, file());
        shares.restore_slot(&second, 1, 9);
        assert_eq!(counts(&shares), [0, 0, 1]);
        shares.remove_all_of(7);
        assert!(shares.slots.is_empty());
    }

    #[test]
    fn a_connection_that_the_daemon_could_not_make_is_an_error_with_its_words() {
        let (ours, theirs) = worker_protocol::pair().unwrap();
        let broker = Broker::new(Arc::new(ours));
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| broker.connect("tcp:a:1", true));
            let received = worker_protocol::receive::<FromWorker>(theirs.as_fd()).unwrap();
            let Some((FromWorker::Connect { request, address, encrypted: true }, _)) = received else {
                panic!("{received:?}");
            };
            assert_eq!(address, "tcp:a:1");
            broker.deliver(request, Reply::NotConnected("no".into()), None);
            assert_eq!(asking.join().unwrap().map(drop), Err("no".into()));
        });
        // An answer that brings no connection is not one, either.
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| broker.connect("tcp:a:1", true));
            let received = worker_protocol::receive::<FromWorker>(theirs.as_fd()).unwrap();
            let Some((FromWorker::Connect { request, .. }, _)) = received else { panic!("{received:?}") };
            broker.deliver(request, Reply::Connected, None);
            assert!(asking.join().unwrap().is_err());
        });
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
