//! Native clients: processes of this host and its containers that speak [`protocol::native`] over a
//! `SOCK_SEQPACKET` socket. The keeper accepts and counts them, and passes each connection to its user's
//! device process.
//!
//! A device process that ends is replaced, and its clients' sessions continue ([`recovery`]).
//!
//! One thread serves one connection, which has one channel. A client's memory is a memfd sealed against
//! shrinking, so a mapping here never loses its pages. A client that misbehaves is answered `INVALID` or
//! disconnected; other clients are not affected.

mod recovery;

use std::collections::{BTreeMap, HashSet};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use host_bridge::bridge::{
    ChannelMemory, ConnectError, Prepared, RegionError, RegionMemory, Session, TransportKind, Turn, Wakeup,
};
use host_bridge::framing::peek_some;
use host_bridge::log_limit::LogLimit;
use host_bridge::memory::Memories;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};
use protocol::device::{Answer, Extent, REGISTER_READ_ONLY, Response, request};
use protocol::link::Memory;
use protocol::native::{MAGIC, Request};
use protocol::version::OURS;
use zerocopy::{FromBytes, IntoBytes};

use crate::config::Native;
use crate::link::{Control, Stored, ToKeeper};
use crate::refusal::{Refusal, invalid, no_resources};
use crate::registry::{Listed, Registry};
use crate::sockets::Stopper;
use crate::stage::Stage;
use recovery::{Leftover, place};

pub use recovery::Answering;
pub use recovery::{client_of, is_region_of};

/// How long the server may hold a destroyed channel's memory before this is logged. The message is repeated
/// at the same interval.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of regions and channels that a process stores with the keeper. The keeper holds up to four
/// descriptors for each, so one user takes at most an eighth of the million that its unit allows.
pub const MAX_STORED: usize = 32768;

/// The open connections, and how to end them.
#[derive(Debug, Default)]
struct Connections {
    /// Connections by number, and whether the process is ending, in which case no more are accepted.
    open: Mutex<(std::collections::HashMap<u64, Stopper>, bool)>,
    changed: Condvar,
}

/// What the keeper has answered, for the threads that wait for it.
#[derive(Debug, Default)]
struct Answers {
    state: Mutex<AnswersState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct AnswersState {
    /// Clients that were answered, whose threads don't know yet.
    given: HashSet<u64>,
    /// No more will come.
    over: bool,
}

impl Answers {
    fn change(&self, change: impl FnOnce(&mut AnswersState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn wait_for(&self, client: u64) -> io::Result<()> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.changed.wait_while(state, |state| !state.given.contains(&client) && !state.over);
        let mut state = wait.unwrap_or_else(PoisonError::into_inner);
        if state.given.remove(&client) { Ok(()) } else { Err(io::Error::other("vhost-rgpu is ending")) }
    }
}

/// The server of one user's programs.
#[derive(Debug)]
pub struct Server {
    config: Native,
    registry: Arc<Registry>,
    control: Arc<Control>,
    connections: Connections,
    /// What predecessors have stored for clients that have not arrived yet.
    restored: Mutex<BTreeMap<u64, Stored>>,
    answers: Answers,
    /// Number of stored items.
    stored: AtomicUsize,
}

impl Server {
    /// A server with this configuration.
    pub fn new(config: Native, registry: Arc<Registry>, control: Arc<Control>) -> Arc<Server> {
        Arc::new(Server {
            config,
            registry,
            control,
            connections: Connections::default(),
            restored: Mutex::default(),
            answers: Answers::default(),
            stored: AtomicUsize::new(0),
        })
    }

    /// Takes over what a predecessor has stored for a client.
    pub fn restore(&self, place: u64, stored: Stored) {
        self.stored.fetch_add(1, Ordering::Relaxed);
        self.restored.lock().unwrap_or_else(PoisonError::into_inner).insert(place, stored);
    }

    /// The keeper has answered a client.
    pub fn answered(&self, number: u64) {
        self.answers.change(|state| {
            state.given.insert(number);
        });
    }

    /// Asks the keeper to answer a client, and waits until it has. The error: this process is ending.
    fn answer(
        &self,
        number: u64,
        status: Answer,
        reason: &str,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let fd = fd.map(|fd| fd.try_clone_to_owned()).transpose()?;
        self.control.tell_keeper(&ToKeeper::Answer { number, status, reason: reason.to_owned(), fd })?;
        self.answers.wait_for(number)
    }

    fn take_restored(&self, client: u64) -> BTreeMap<u64, Stored> {
        let mut all = self.restored.lock().unwrap_or_else(PoisonError::into_inner);
        let mut own = all.split_off(&place(client, None));
        all.append(&mut own.split_off(&place(client + 1, None)));
        own
    }

    /// Stores something for a successor.
    fn store(&self, place: u64, stored: io::Result<Stored>) -> Result<(), Refusal> {
        let one_more = |stored| (stored < MAX_STORED).then_some(stored + 1);
        if self.stored.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err() {
            return Err(no_resources(format!("this user's programs have {MAX_STORED} channels and regions")));
        }
        let told = self.store_again(place, stored);
        if told.is_err() {
            self.stored.fetch_sub(1, Ordering::Relaxed);
        }
        told
    }

    /// Replaces something that was stored.
    fn store_again(&self, place: u64, stored: io::Result<Stored>) -> Result<(), Refusal> {
        let tell = |stored| self.control.tell_keeper(&ToKeeper::Store { channel: place, stored });
        let told = stored.and_then(tell);
        told.map_err(|e| no_resources(format!("this host cannot remember it: {e}")))
    }

    fn unstore(&self, place: u64) {
        self.stored.fetch_sub(1, Ordering::Relaxed);
        // Without a keeper there is no successor.
        let _ = self.control.tell_keeper(&ToKeeper::Forget { channel: place });
    }

    /// Serves a client that the keeper has accepted, in its own thread. `again`: whether another process
    /// has served it before.
    pub fn serve(
        self: &Arc<Self>,
        number: u64,
        who: String,
        socket: OwnedFd,
        answering: Answering,
        again: bool,
    ) {
        // Even if serving fails or panics: otherwise the keeper would count the connection against the limit
        // forever.
        let gone = Arc::new(Gone(self.clone(), number));
        let open = Open(self.clone(), number);
        if let Err(why) = self.admit(number, &socket) {
            tracing::warn!("{who}: refused: {why}");
            let _ = answer(&socket, Answer::NoResources, &why, None);
            return;
        }
        let server = self.clone();
        let spawned = std::thread::Builder::new().name(format!("native-{number}")).spawn(move || {
            tracing::debug!("{who}: connected");
            let gone = gone;
            let stored = Connection {
                server: &server,
                socket: &socket,
                answering,
                again,
                number,
                who,
                limit: LogLimit::default(),
                gone: &gone,
                channel: None,
                stored: 0,
            }
            .serve();
            // First. The session may hold the other for longer.
            drop(open);
            // The keeper drops everything with the client, and must know of its end before others may store
            // as much.
            server.stored.fetch_sub(stored, Ordering::Relaxed);
            drop(gone);
        });
        if let Err(e) = spawned {
            tracing::error!("native socket: cannot start a thread for a client: {e}");
        }
    }

    /// Ends every connection, and waits up to `patience` for their sessions to end.
    pub fn drain(&self, patience: Duration) {
        let mut open = self.connections.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.1 = true;
        open.0.values().for_each(Stopper::stop);
        // Nobody reads the keeper's messages any more.
        self.answers.change(|state| state.over = true);
        let wait = self.connections.changed.wait_timeout_while(open, patience, |open| !open.0.is_empty());
        let (open, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if !open.0.is_empty() {
            tracing::error!(
                "{} native clients' sessions have not ended within {} s",
                open.0.len(),
                patience.as_secs()
            );
        }
    }

    fn admit(&self, number: u64, socket: &OwnedFd) -> Result<(), String> {
        let mut open = self.connections.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.1 {
            return Err("the daemon is ending".to_owned());
        }
        let stopper =
            Stopper::for_connection(socket).map_err(|e| format!("this host is short of descriptors: {e}"))?;
        open.0.insert(number, stopper);
        Ok(())
    }

    fn close(&self, number: u64) {
        let closed = self.connections.open.lock().unwrap_or_else(PoisonError::into_inner).0.remove(&number);
        // The keeper also has the connection, which would otherwise stay open.
        closed.iter().for_each(Stopper::stop);
        self.connections.changed.notify_all();
    }
}

/// Removes a connection from its server's table when dropped.
struct Open(Arc<Server>, u64);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close(self.1);
        // Without a keeper, there is no successor.
        let _ = self.0.control.tell_keeper(&ToKeeper::Left { number: self.1 });
    }
}

/// Tells the keeper when dropped that a client is gone. Its session holds this until the server knows of the
/// session's end ([`SessionConfig::until_told`]). So the keeper has another process tell the server if this
/// one ends before that, and lets none end that has not.
///
/// [`SessionConfig::until_told`]: host_bridge::bridge::SessionConfig::until_told
struct Gone(Arc<Server>, u64);

impl Drop for Gone {
    fn drop(&mut self) {
        // Without a keeper, nobody counts any more.
        let _ = self.0.control.tell_keeper(&ToKeeper::Gone { number: self.1 });
    }
}

struct Connection<'s> {
    server: &'s Server,
    socket: &'s OwnedFd,
    answering: Answering,
    /// Whether the next request may already have been carried out by another process that has not answered
    /// it.
    again: bool,
    number: u64,
    who: String,
    limit: LogLimit,
    /// For its session.
    gone: &'s Arc<Gone>,
    channel: Option<(Arc<Session>, Listed)>,
    /// Number of items stored for it.
    stored: usize,
}

impl Connection<'_> {
    /// Serves it to its end. Returns how many items are still stored for it.
    fn serve(mut self) -> usize {
        if !self.again || self.resumes() {
            self.serve_requests();
        }
        let ending = self.server.connections.open.lock().unwrap_or_else(PoisonError::into_inner).1;
        self.end(if ending { "vhost-rgpu is ending" } else { "the client closed its connection" });
        self.stored
    }

    fn resumes(&mut self) -> bool {
        self.resume().unwrap_or_else(|why| {
            tracing::warn!("{}: the session of a process before this one: {why}", self.who);
            self.server.registry.totals.lost.fetch_add(1, Ordering::Relaxed);
            false
        })
    }

    /// Serves requests until the connection ends.
    fn serve_requests(&mut self) {
        let mut fds = Vec::new();
        // One byte more than a request, to detect longer packets.
        let mut packet = [0u8; size_of::<Request>() + 1];
        loop {
            // The request stays in the socket until it is answered, so that a successor finds it.
            let n = match peek_some(self.socket.as_fd(), &mut packet, &mut fds) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    tracing::debug!("{}: {e}", self.who);
                    break;
                }
            };
            let result = self.request(&packet[..n], std::mem::take(&mut fds));
            self.again = false;
            let answer = |status, reason: &str, fd| self.server.answer(self.number, status, reason, fd);
            let (sent, over) = match &result {
                Ok(Done::Registered) => (answer(Answer::Ok, "", None), false),
                Ok(Done::Destroyed) => (answer(Answer::Ok, "", None), true),
                Ok(Done::Created) => {
                    let doorbell = self.channel.as_ref().map(|(session, _)| session.doorbell_fd().as_fd());
                    (answer(Answer::Ok, "", doorbell), false)
                }
                Ok(Done::Answered) => (Ok(()), false),
                Ok(Done::RefusedAfterWaiting) => (Ok(()), true),
                Err(Refusal(status, why)) => {
                    if *status == Answer::Invalid {
                        self.server.registry.totals.malformed.fetch_add(1, Ordering::Relaxed);
                    }
                    self.limit.warn(&self.who, why);
                    (answer(*status, why, None), false)
                }
            };
            if let Err(e) = sent {
                tracing::debug!("{}: {e}", self.who);
                break;
            }
            if over {
                break;
            }
        }
    }

    /// Continues where a predecessor ended. False: the client has no session, and its connection ends. The
    /// error says why the session cannot continue; the client then finds its connection closed.
    fn resume(&mut self) -> Result<bool, String> {
        let mut packet = [0; size_of::<Request>()];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        let there = recv(self.socket.as_raw_fd(), &mut packet, flags);
        let request =
            there.is_ok().then(|| Request::read_from_bytes(&packet).map_or(0, |request| request.kind));
        let restored = self.server.take_restored(self.number);
        self.stored = restored.len();
        let places: Vec<u64> = restored.keys().copied().collect();
        let servers = self.server.config.servers.all();
        let leftover = Leftover::new(restored, servers).map_err(|e| e.to_string())?;
        let unsure = request.is_none() && self.answering.was_interrupted().map_err(|e| e.to_string())?;
        // A later request is the client's first to this process.
        self.again = request.is_some();
        let Some(mut leftover) = leftover else {
            if unsure {
                tracing::warn!("{}: nobody knows whether its request was answered", self.who);
            }
            return Ok(!unsure);
        };
        if let Ok(config) = &mut leftover.server.config {
            config.until_told = Some(self.gone.clone());
        }
        if self.has_hung_up() {
            leftover.end();
            return Ok(false);
        }
        // The client has not been told that it has a channel, or no longer wants it.
        if matches!(request, Some(request::CREATE_CHANNEL | request::DESTROY_CHANNEL)) {
            leftover.end();
            places.into_iter().for_each(|place| self.server.unstore(place));
            self.stored = 0;
            return Ok(true);
        }
        let reason =
            "the process of vhost-rgpu that served this user's programs has ended: start the program again";
        let lost = |leftover: &Leftover, why: String| {
            leftover.end();
            let gone = leftover.server.config().err();
            leftover.channel.tell_lost_by_futex(gone.as_deref().unwrap_or(reason));
            Err(why)
        };
        if unsure {
            return lost(&leftover, "nobody knows whether a request was answered".into());
        }
        let resumed = || -> Result<Session, String> {
            let saved = leftover.saved.as_ref().ok_or("it ended with that process")?;
            let server = leftover.server.config()?;
            let stopper = Stopper::for_connection(self.socket).map_err(|e| e.to_string())?;
            // The channel is mapped once more, because the session has its own mapping.
            let (memories, extents) = own_channel(&leftover.channel).map_err(|refusal| refusal.1)?;
            let mut channel =
                ChannelMemory::new(memories, extents, leftover.channel.size).map_err(|e| e.to_string())?;
            channel.doorbell = leftover.channel.doorbell.clone();
            let (own, on_lost) = (Some(&leftover.regions), Box::new(move |_: &str| stopper.stop()));
            Session::resume(server, saved, channel, own, Wakeup::Futex, on_lost).map_err(|e| e.to_string())
        };
        let session = match resumed() {
            Ok(session) => Arc::new(session),
            Err(_) if leftover.still_waits() => {
                leftover.end();
                return self.ask_again(leftover.channel);
            }
            Err(why) => return lost(&leftover, why),
        };
        let listed = self.server.registry.list_resumed(&self.who, self.number, session.clone());
        // The predecessor may have consumed a doorbell, or been about to wake the client's threads.
        session.doorbell();
        session.wake_all();
        self.channel = Some((session, listed));
        Ok(true)
    }

    /// Whether the client has closed its connection, or a predecessor has.
    fn has_hung_up(&self) -> bool {
        let mut watched = [PollFd::new(self.socket.as_fd(), PollFlags::POLLHUP)];
        poll(&mut watched, PollTimeout::ZERO).is_ok() && watched[0].any().unwrap_or(false)
    }

    /// Asks a server for the session of a client that a predecessor has told to wait. Its place in the
    /// server's queue is a new one. False: it is refused, and has been told. The error says what else is
    /// wrong.
    fn ask_again(&mut self, channel: ChannelMemory) -> Result<bool, String> {
        match self.begin(channel, true) {
            Ok(done) => Ok(!matches!(done, Done::RefusedAfterWaiting)),
            Err(Refusal(_, why)) => Err(why),
        }
    }

    /// Ends the session and releases the client's memory.
    fn end(&mut self, reason: &str) {
        let Some((session, listed)) = self.channel.take() else { return };
        let totals = &self.server.registry.totals;
        let lost = session.over().is_some();
        (if lost { &totals.lost } else { &totals.closed }).fetch_add(1, Ordering::Relaxed);
        let since = Instant::now();
        while session.close(reason, PATIENCE) == host_bridge::bridge::Closed::StillHeld {
            tracing::error!(
                "{}: after {} s the server still holds the client's memory",
                self.who,
                since.elapsed().as_secs()
            );
            // A daemon that is shutting down must not wait for a server.
            if self.server.connections.open.lock().unwrap_or_else(PoisonError::into_inner).1 {
                break;
            }
        }
        drop(listed);
    }

    fn request(&mut self, packet: &[u8], fds: Vec<OwnedFd>) -> Result<Done, Refusal> {
        let request = Request::read_from_bytes(packet)
            .map_err(|_| invalid(format!("a request must be {} bytes long", size_of::<Request>())))?;
        let Request { magic, version, kind, region, flags, offset, size } = request;
        if magic != MAGIC {
            return Err(invalid(format!("a request begins with rGPUnatv, this one begins with {magic:#x}")));
        }
        OURS.check_major(version).map_err(|mismatch| {
            Refusal(Answer::Version, mismatch.describe("the client's libraries speak", "this host speaks"))
        })?;
        match kind {
            request::CREATE_CHANNEL => {
                if self.channel.is_some() {
                    return Err(invalid("this connection already has its channel"));
                }
                let limit = self.server.config.limits.max_channel_size;
                if size > limit {
                    return Err(no_resources(format!(
                        "a channel of {size} bytes, the limit is {limit}: lower RGPU_ARENA_MIB of the program, or raise max_channel_mib of vhost-rgpu"
                    )));
                }
                let (memories, extents) = own_memory(fds, offset, size)?;
                let created = self.create(memories, extents, size);
                if self.channel.is_none() && self.stored > 0 {
                    self.server.unstore(place(self.number, None));
                    self.stored = 0;
                }
                created
            }
            // A predecessor was about to report that it is destroyed.
            request::DESTROY_CHANNEL if self.again && self.channel.is_none() => Ok(Done::Destroyed),
            request::DESTROY_CHANNEL => {
                self.session()?;
                self.end("the client has destroyed the channel");
                Ok(Done::Destroyed)
            }
            request::REGISTER_MEMORY => {
                if flags & !REGISTER_READ_ONLY != 0 {
                    return Err(invalid(format!("unknown flags {flags:#x}")));
                }
                let session = self.session()?;
                let (memories, extents) = own_memory(fds, offset, size)?;
                let read_only = flags & REGISTER_READ_ONLY != 0;
                if self.again && session.wait_for_regions() && session.has_region(region) {
                    session.unregister_region(region)?;
                }
                let place = place(self.number, Some(region));
                // In a local session, the worker itself has the memory.
                let stores = session.transport() != TransportKind::Local && !session.has_region(region);
                if stores {
                    self.server.store(place, recovery::region(&memories, size))?;
                    self.stored += 1;
                }
                let memory = RegionMemory { memories, extents, size, own_memory: true, read_only };
                if let Err(e) = session.register_region(region, memory) {
                    if stores {
                        self.server.unstore(place);
                        self.stored -= 1;
                    }
                    return Err(e.into());
                }
                Ok(Done::Registered)
            }
            request::UNREGISTER_MEMORY => {
                let session = self.session()?;
                match session.unregister_region(region) {
                    Err(RegionError::Unknown(_)) if self.again => {}
                    done => done?,
                }
                if session.transport() != TransportKind::Local {
                    self.server.unstore(place(self.number, Some(region)));
                    self.stored = self.stored.saturating_sub(1);
                }
                Ok(Done::Registered)
            }
            other => Err(Refusal(Answer::Unsupported, format!("unknown request {other}"))),
        }
    }

    fn session(&self) -> Result<Arc<Session>, Refusal> {
        match &self.channel {
            Some((session, _)) => Ok(session.clone()),
            None => Err(invalid("this connection has no channel yet")),
        }
    }

    fn create(&mut self, memories: Memories, extents: Vec<Extent>, size: u64) -> Result<Done, Refusal> {
        self.begin(ChannelMemory::new(memories, extents, size)?, false)
    }

    /// Asks a server for the session of a channel. `answered`: a predecessor has told the client to wait.
    fn begin(&mut self, channel: ChannelMemory, answered: bool) -> Result<Done, Refusal> {
        let stopper = Stopper::for_connection(self.socket)
            .map_err(|e| no_resources(format!("this host is short of descriptors: {e}")))?;
        let (server, mut config) = self.server.config.servers.choose(&channel)?;
        config.until_told = Some(self.gone.clone());
        let refused = |e: &ConnectError| self.server.registry.totals.refuse(e.answer());
        let own = place(self.number, None);
        let waits = recovery::channel((server, &config), &channel, Stage::Waits);
        if answered {
            self.server.store_again(own, waits)?;
        } else {
            self.server.store(own, waits)?;
            self.stored += 1;
        }
        let mut turn = Queued {
            server: self.server,
            number: self.number,
            socket: self.socket,
            channel: &channel,
            answered,
        };
        let connected = Prepared::connect(&config, &channel, &mut turn).inspect_err(refused);
        let waited = turn.answered;
        let refused_after_waiting = |e: &ConnectError| {
            // The client already has its answer. It finds the reason in the channel's header.
            self.limit.warn(&self.who, &e.to_string());
            channel.tell_refused(&e.to_string());
            channel.wake_by_futex();
            Ok(Done::RefusedAfterWaiting)
        };
        let mut prepared = match connected {
            Err(e) if waited => return refused_after_waiting(&e),
            connected => connected?,
        };
        let unsaved = |e: io::Error| no_resources(format!("this host cannot remember the session: {e}"));
        let saved = prepared.save(&channel).map_err(unsaved)?;
        let began = recovery::channel((server, &config), &channel, Stage::Began(saved.as_ref()));
        self.server.store_again(own, began)?;
        drop(saved);
        let opened = match prepared.open().inspect_err(refused) {
            Err(e) if waited => return refused_after_waiting(&e),
            opened => opened?,
        };
        // The end of the session closes the connection, which wakes this thread for cleanup.
        let started =
            opened.start(channel, Wakeup::Futex, Box::new(move |_| stopper.stop())).inspect_err(refused);
        let session = match started {
            Err(e) if waited => {
                // A waiting client notices that the connection was closed.
                self.limit.warn(&self.who, &e.to_string());
                return Ok(Done::RefusedAfterWaiting);
            }
            started => Arc::new(started?),
        };
        let listed = self.server.registry.list(&self.who, self.number, session.clone());
        self.channel = Some((session, listed));
        Ok(if waited { Done::Answered } else { Done::Created })
    }
}

/// A client whose session waits in a server's queue. It is answered immediately, and finds its position in
/// the channel's header.
struct Queued<'c> {
    server: &'c Server,
    number: u64,
    socket: &'c OwnedFd,
    channel: &'c ChannelMemory,
    answered: bool,
}

impl Turn for Queued<'_> {
    fn wait(&mut self, server: &str, ahead: u32) {
        if !self.channel.may_wait() {
            return;
        }
        self.channel.tell_waiting(server, ahead);
        if !std::mem::replace(&mut self.answered, true) {
            // A client that is gone is noticed when its connection is closed.
            let doorbell = Some(self.channel.doorbell.as_fd());
            let _ = self.server.answer(self.number, Answer::Ok, "", doorbell);
        }
    }

    fn has_waited(&self) -> bool {
        self.answered
    }

    fn given_up(&self) -> Option<PollFd<'_>> {
        Some(PollFd::new(self.socket.as_fd(), PollFlags::POLLHUP))
    }
}

/// The outcome of a request.
enum Done {
    Created,
    /// The client was answered before the session began.
    Answered,
    /// The client was told to wait, and then its channel's header says why there is no session.
    RefusedAfterWaiting,
    Registered,
    Destroyed,
}

/// Checks the only descriptor of a request, and maps `size` bytes of it from `offset`. Extents are offsets in
/// the file.
fn own_memory(mut fds: Vec<OwnedFd>, offset: u64, size: u64) -> Result<(Memories, Vec<Extent>), Refusal> {
    let (Some(file), true) = (fds.pop(), fds.is_empty()) else {
        return Err(invalid("this request needs exactly one file descriptor, a memfd"));
    };
    let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map_err(|e| {
        invalid(format!("the descriptor is not a memfd that can be sealed (F_GET_SEALS: {e})"))
    })?;
    if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
        return Err(invalid("the memfd is not sealed against shrinking (F_SEAL_SHRINK)"));
    }
    if size == 0 || !offset.is_multiple_of(4096) || offset.checked_add(size).is_none() {
        return Err(invalid(format!(
            "{size} bytes at offset {offset:#x} are not a range of a memfd that begins at a page boundary"
        )));
    }
    let memory = Memory { addr: offset, size, file_offset: offset };
    Ok((Memories::map(vec![(memory, file)])?, vec![Extent { addr: offset, len: size }]))
}

/// The memory of a channel, mapped once more.
fn own_channel(channel: &ChannelMemory) -> Result<(Memories, Vec<Extent>), Refusal> {
    let (memory, file) =
        channel.memories.files().next().ok_or_else(|| invalid("a channel without memory"))?;
    let file =
        file.try_clone().map_err(|e| no_resources(format!("this host is short of descriptors: {e}")))?;
    own_memory(vec![file], memory.file_offset, channel.size)
}

/// Answers a request, or a client that is refused before its first request.
pub fn answer(socket: &OwnedFd, status: Answer, reason: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let response = Response::new(status, reason);
    let raw: Vec<_> = fd.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights };
    // Never blocks: a client may have only one request in progress, so one that doesn't read its answers
    // misbehaves.
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(response.as_bytes())], control, flags, None)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use host_bridge::bridge::SessionConfig;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, send, socketpair};

    use protocol::channel::State;
    use test_kit::channel::in_a_file;
    use test_kit::server::FakeServer;
    use test_kit::until;

    use super::*;
    use crate::config::Limits;
    use crate::link::pair;
    use crate::servers::Servers;

    /// A server of programs whose sessions go there, and the keeper's end of its connection.
    fn server(session: SessionConfig) -> (Arc<Server>, Control) {
        let config = Native {
            socket: "unused".into(),
            access: 0.into(),
            max_channels_per_user: 1,
            servers: Servers::new(session, Vec::new(), Vec::new()),
            limits: Limits {
                max_channels: 1,
                max_extents: 1,
                max_channel_size: 0,
                max_registered: 0,
                max_registered_extents: 1,
            },
        };
        let (keeper, control) = pair().unwrap();
        (Server::new(config, Arc::new(Registry::new()), Arc::new(Control::from(control))), keeper)
    }

    /// Tells nobody that it waits.
    struct Patient;

    impl Turn for Patient {
        fn wait(&mut self, _server: &str, _ahead: u32) {}

        fn given_up(&self) -> Option<PollFd<'_>> {
            None
        }
    }

    #[test]
    fn a_program_that_waits_gets_another_session_in_place_of_one_that_had_begun() {
        let gpus = FakeServer::good();
        let (file, view) = in_a_file(1 << 20, "waits");
        view.header().set_waiting("gpus", 0);
        let (server, _keeper) = server(gpus.config());
        let (memories, extents) = own_memory(vec![file], 0, view.geometry().size as u64).unwrap();
        let channel = ChannelMemory::new(memories, extents, view.geometry().size as u64).unwrap();
        let (index, config) = server.config.servers.choose(&channel).unwrap();
        let mut prepared = Prepared::connect(&config, &channel, &mut Patient).unwrap();
        let saved = prepared.save(&channel).unwrap();
        // The predecessor ends here.
        let began = recovery::channel((index, &config), &channel, Stage::Began(saved.as_ref())).unwrap();
        drop((prepared, saved));
        server.restore(place(7, None), began);
        let (_client, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let answering = memfd_create(c"answering", MFdFlags::MFD_CLOEXEC).unwrap();
        server.serve(7, "a client".into(), theirs, answering.into(), true);
        until("it is told", || view.header().state() != State::Waiting);
        assert_eq!(view.header().state(), State::Ready, "{}", view.header().reason());
        assert_eq!(server.registry.totals.lost.load(Ordering::Relaxed), 0);
        assert_eq!(gpus.programs(), ["waits", "waits"]);
        server.drain(Duration::from_secs(60));
    }

    #[test]
    fn a_process_that_is_told_to_end_does_not_wait_for_the_keepers_answer() {
        let (server, keeper) = server(SessionConfig::new("tcp:127.0.0.1:1".parse().unwrap(), "test"));
        let (client, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let answering = memfd_create(c"answering", MFdFlags::MFD_CLOEXEC).unwrap();
        server.serve(7, "a client".into(), theirs, answering.into(), false);
        // It is not a request, and the keeper is to say so.
        send(client.as_raw_fd(), &[0; size_of::<Request>()], MsgFlags::empty()).unwrap();
        let asked = keeper.next_from_device().unwrap();
        assert!(matches!(asked, Some(ToKeeper::Answer { number: 7, status: Answer::Invalid, .. })));
        server.drain(Duration::from_secs(60));
        let left = server.connections.open.lock().unwrap_or_else(PoisonError::into_inner).0.len();
        assert_eq!(left, 0);
    }
}
