//! Direct connections from and to workers of other servers, which carry copies between GPUs.
//! [`protocol::ops::direct`] has the client's requests.
//!
//! ```text
//!  sending worker                                                          receiving worker
//!   stream: device ─▶ buffer ─ thread of the connection ─▶ socket ─ thread ─▶ buffer ─▶ device: stream
//! ```
//!
//! A connection is one-way. Each end has buffers for [`PIECES`] pieces, which CUDA registers when they are
//! first used. Nothing waits for a buffer: the sending end refuses a piece for which it has none, and the
//! receiving end stops reading.
//!
//! A piece that has arrived waits until the client lands it, unless the client has said in advance where it goes
//! ([`Expected`]): then the thread that receives it starts its copy to the device, too. That, and what is
//! [sent at once](Directs::send_now), goes on while the dispatcher is busy ([`near`]).
//!
//! If both operators allow it and both ends have a device, pieces take [`verbs`] instead of the socket, which
//! stays open: its end is the connection's. The buffers and everything around them are the same.
//!
//! The daemons connect and accept, because workers have no network. `parent/direct.rs` says how far they
//! trust a ticket. The peer is another server's worker, which its client may have taken over: the worst it
//! can do is send wrong bytes for this session's client, or none.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod near;
mod verbs;

use host_bridge::endpoint::Mapped;
use host_bridge::framing::{Address, watch_peer};
use host_bridge::stream::Stream;
use host_bridge::verbs::{Pieces, Settings};
use identity::{Fingerprint, Identity, Secret, tls};
use protocol::Status;
use protocol::device::{Answer, untext};
use protocol::handle::ContextId;
use protocol::link::{DirectHeader, Hello, MAGIC, Welcome, greeting, purpose};
use protocol::ops::direct::{
    DirectArrivalReply, DirectCloseReply, DirectFailuresReply, DirectOfferReply, DirectOpenReply,
    DirectPrepareReply, DirectReceive, DirectSendNow, DirectTicket, MAX_ADDRESSES, MAX_DIRECTS, MAX_PIECE,
    PIECES,
};
use protocol::version::{OURS, Version};
use zerocopy::{FromZeros, IntoBytes};

use self::near::{Motion, Named};
pub use self::near::{Near, Still};
use self::verbs::{Bell, Memory, Verbs};
use crate::cuda_ipc::{Broker, Token};
use crate::driver::call::Pending;
use crate::driver::gpu::{Carrier, Preparer};
use crate::driver::rows::Rows;

/// How long setting up a connection may take, from the connected socket on, and then the first message over
/// verbs.
const WITHIN: Duration = Duration::from_secs(10);
/// A peer that accepts nothing, or stops in the middle of a piece, for this long is lost.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum number of answers that a client may wait for on one connection.
const MAX_WAITING: usize = 64;
/// Buffers that are made ready for a connection in advance. It has no others then.
const PREPARED: usize = PIECES / 4 * 3;
/// Maximum number of pieces that a client may expect on one connection.
const MAX_EXPECTED: usize = 1024;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session's direct connections.
pub struct Directs {
    identity: Arc<Identity>,
    broker: Arc<Broker>,
    table: Mutex<Table>,
    /// Connections that have not yet shown whose they are.
    strangers: AtomicUsize,
    /// How connections use verbs. `None`: they use their sockets only.
    verbs: Option<Verbs>,
    bytes: Arc<Common>,
    failures: Arc<Failures>,
    motion: Arc<Motion>,
    /// Whether a connection was ever prepared.
    prepared: AtomicBool,
}

/// Connections on which an expected piece will not come.
#[derive(Default)]
struct Failures(Mutex<(Vec<u32>, Option<Pending>)>);

impl Failures {
    /// A connection has failed.
    fn tell(&self, direct: u32) {
        let mut state = lock(&self.0);
        state.0.push(direct);
        Self::answer(&mut state);
    }

    fn answer((failed, waiting): &mut (Vec<u32>, Option<Pending>)) {
        if !failed.is_empty()
            && let Some(pending) = waiting.take()
        {
            pending.answer(Ok(DirectFailuresReply { directs: std::mem::take(failed) }));
        }
    }
}

/// What a session's connections share.
#[derive(Default)]
struct Common {
    /// Bytes of pieces sent and received.
    all: AtomicU64,
    /// Those of them that went over verbs.
    over_verbs: AtomicU64,
    /// Buffers of closed connections. CUDA would wait for running kernels if they were released, and others
    /// will need them.
    spare: Mutex<Vec<Arc<Memory>>>,
}

#[derive(Default)]
struct Table {
    /// By the client's numbers. `None`: being opened, or refused.
    outgoing: HashMap<u32, Option<Arc<Outgoing>>>,
    incoming: HashMap<u32, Arc<Incoming>>,
    /// Unused tickets by their names.
    offers: HashMap<Token, Offer>,
}

/// Who may use a ticket.
#[derive(Clone)]
struct Offer {
    direct: u32,
    key: Fingerprint,
    secret: [u8; 32],
}

impl Directs {
    /// The connections of a session whose worker has this key. `rdma`: how they may use verbs.
    pub fn new(identity: Arc<Identity>, broker: Arc<Broker>, rdma: Option<Settings>) -> Arc<Directs> {
        let verbs = rdma.map(Verbs::new);
        let (table, strangers, bytes, failures, motion, prepared) = Default::default();
        Arc::new(Directs { identity, broker, table, strangers, verbs, bytes, failures, motion, prepared })
    }

    /// The key with which this worker opens connections.
    pub fn key(&self) -> [u8; 32] {
        self.identity.fingerprint().0
    }

    /// Bytes of pieces sent and received.
    pub fn bytes(&self) -> u64 {
        self.bytes.all.load(Ordering::Relaxed)
    }

    /// Those of them that went over verbs.
    pub fn bytes_over_verbs(&self) -> u64 {
        self.bytes.over_verbs.load(Ordering::Relaxed)
    }

    /// Makes a ticket for a worker with this key. Returns at once, and answers `later`.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for a number already used, `OUT_OF_MEMORY` beyond [`MAX_DIRECTS`].
    pub fn offer(
        self: &Arc<Directs>,
        direct: u32,
        key: [u8; 32],
        later: impl FnOnce() -> Pending,
    ) -> Result<(), Status> {
        {
            let mut table = lock(&self.table);
            may_be_new(table.incoming.contains_key(&direct), table.incoming.len())?;
            let failures = Some((direct, Arc::clone(&self.failures)));
            table.incoming.insert(direct, Arc::new(Incoming::new(Arc::clone(&self.bytes), failures)));
        }
        let (directs, answer) = (Arc::clone(self), later());
        let offer = move || {
            let made = directs.broker.ticket().map(|made| {
                let (key, secret) = (Fingerprint(key), made.secret);
                lock(&directs.table).offers.insert(made.token, Offer { direct, key, secret });
                let ticket = DirectTicket {
                    token: made.token,
                    secret,
                    key: directs.key(),
                    encrypted: made.encrypted,
                    addresses: made.addresses,
                };
                DirectOfferReply { ticket }
            });
            if made.is_err() {
                directs.close_incoming(direct);
            }
            answer.answer(made);
        };
        start(offer)
    }

    fn close_incoming(&self, direct: u32) {
        let incoming = lock(&self.table).incoming.get(&direct).cloned();
        incoming.inspect(|incoming| incoming.close());
    }

    /// Opens a connection with a ticket. Returns at once.
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub fn open(
        self: &Arc<Directs>,
        direct: u32,
        ticket: DirectTicket,
        later: impl FnOnce() -> Pending,
    ) -> Result<(), Status> {
        {
            let mut table = lock(&self.table);
            may_be_new(table.outgoing.contains_key(&direct), table.outgoing.len())?;
            table.outgoing.insert(direct, None);
        }
        let (directs, answer) = (Arc::clone(self), later());
        let open = move || {
            let opened = directs.connect(&ticket).and_then(|(stream, agreed)| {
                let queue = verbs::offer(directs.verbs.as_ref(), &stream, agreed);
                let queue = queue.map_err(|e| format!("the connection was lost: {e}"))?;
                let (over, queue) = match queue {
                    Ok(queue) => ("verbs".to_owned(), Some(queue)),
                    Err(why) => (format!("its socket, because {why}"), None),
                };
                let outgoing = Outgoing::start(stream, queue, Arc::clone(&directs.bytes));
                let outgoing = outgoing.map_err(|e| format!("cannot start a thread: {e}"))?;
                Ok((outgoing, over))
            });
            let refusal = match opened {
                Ok((outgoing, over)) => {
                    match lock(&directs.table).outgoing.get_mut(&direct) {
                        Some(place) => *place = Some(outgoing),
                        // The client has closed it meanwhile.
                        None => outgoing.end(),
                    }
                    tracing::info!(direct, over, "a direct connection to another server is open");
                    String::new()
                }
                Err(why) => {
                    tracing::info!(direct, "no direct connection to another server: {why}");
                    // Short enough for a reply.
                    why.chars().take(1024).collect()
                }
            };
            answer.answer(Ok(DirectOpenReply { refusal }));
        };
        start(open)
    }

    /// Connects to the first of a ticket's addresses where that is allowed and possible.
    fn connect(&self, ticket: &DirectTicket) -> Result<(Stream, Version), String> {
        if ticket.addresses.is_empty() || ticket.addresses.len() > MAX_ADDRESSES {
            return Err(format!("a ticket with {} addresses", ticket.addresses.len()));
        }
        let mut failed = Vec::new();
        for text in &ticket.addresses {
            let connected = text.parse::<Address>().map_err(|e| e.to_string()).and_then(|address| {
                let encrypted = ticket.encrypted && matches!(address, Address::Tcp(..));
                let socket = self.broker.connect(text, encrypted)?;
                self.show(socket, ticket, encrypted).map_err(|e| format!("{address}: {e}"))
            });
            match connected {
                Ok(shown) => return Ok(shown),
                Err(why) if !failed.contains(&why) => failed.push(why),
                Err(_) => {}
            }
        }
        Err(failed.join("; "))
    }

    /// Shows a ticket on a connected socket. Returns the version that both ends speak, too.
    fn show(&self, socket: OwnedFd, ticket: &DirectTicket, encrypted: bool) -> io::Result<(Stream, Version)> {
        watch_peer(&socket);
        let stream = if encrypted {
            let config = tls::client_pinning(&self.identity, &[Fingerprint(ticket.key)]);
            let config = config.map_err(io::Error::other)?;
            let name = tls::session_name(&ticket.token);
            Stream::tls_client(socket, &config, name, Instant::now() + WITHIN)?
        } else {
            Stream::from(socket)
        };
        prepare(&stream)?;
        let hello = Hello {
            magic: MAGIC,
            version: OURS.version(),
            purpose: purpose::DIRECT,
            fingerprint: OURS.fingerprint(),
            token: ticket.token,
            secret: ticket.secret,
            ..Hello::new_zeroed()
        };
        stream.write_all(hello.as_bytes())?;
        let mut welcome = Welcome::new_zeroed();
        stream.read_exact(welcome.as_mut_bytes())?;
        let judged = greeting::<Welcome>(welcome.as_bytes(), &OURS);
        let judged = judged.map_err(|e| io::Error::other(e.to_string()))?;
        let (_, agreed) = judged.ok_or(io::ErrorKind::UnexpectedEof)?;
        if welcome.status != Answer::Ok as u32 {
            return Err(io::Error::other(format!("refused: {}", untext(&welcome.reason))));
        }
        stream.set_read_timeout(None)?;
        Ok((stream, agreed))
    }

    /// Handles a new connection that names a ticket. `welcomed`: the daemon has checked and welcomed it;
    /// otherwise it is under TLS, and nothing has been read from it. Returns at once.
    pub fn knock(self: &Arc<Directs>, token: Token, socket: OwnedFd, welcomed: bool) {
        if self.strangers.fetch_add(1, Ordering::AcqRel) >= PIECES {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("a direct connection was closed: too many others have not shown whose they are");
            return;
        }
        let directs = Arc::clone(self);
        let admit = move || {
            let admitted = directs.admit(&token, socket, welcomed);
            directs.strangers.fetch_sub(1, Ordering::AcqRel);
            match admitted {
                Ok((stream, incoming)) => {
                    tracing::info!("a direct connection of another server is open");
                    let stream = Arc::new(stream);
                    incoming.over(&stream);
                    let why = incoming.read(&stream, directs.verbs.as_ref(), PATIENCE);
                    stream.shut_down();
                    tracing::info!("a direct connection of another server is over: {why}");
                }
                Err(e) => tracing::info!("a direct connection was closed: {e}"),
            }
        };
        if start(admit).is_err() {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn admit(&self, token: &Token, socket: OwnedFd, welcomed: bool) -> io::Result<(Stream, Arc<Incoming>)> {
        let unknown = || io::Error::other("its ticket is unknown, or was used");
        let offer = lock(&self.table).offers.get(token).cloned().ok_or_else(unknown)?;
        watch_peer(&socket);
        let (stream, refused) = if welcomed {
            let stream = Stream::from(socket);
            prepare(&stream)?;
            (stream, None)
        } else {
            let config = tls::server_pinning(&self.identity, offer.key).map_err(io::Error::other)?;
            let stream = Stream::tls_server(socket, &config, Instant::now() + WITHIN)?;
            prepare(&stream)?;
            let mut hello = Hello::new_zeroed();
            stream.read_exact(hello.as_mut_bytes())?;
            (stream, check(&hello, token, &offer).err())
        };
        // Removed only now, so that seeing a ticket's name on the network is not enough to use it up.
        let incoming = {
            let mut table = lock(&self.table);
            let taken = if refused.is_none() { table.offers.remove(token) } else { None };
            taken.and_then(|offer| table.incoming.get(&offer.direct).cloned())
        };
        if !welcomed {
            let answer = if incoming.is_some() { Answer::Ok } else { Answer::Denied };
            let welcome = Welcome { token: *token, ..Welcome::new(answer, "") };
            stream.write_all(welcome.as_bytes())?;
        }
        if let Some(why) = refused {
            return Err(io::Error::other(why));
        }
        stream.set_read_timeout(None)?;
        incoming.map(|incoming| (stream, incoming)).ok_or_else(unknown)
    }

    /// Makes a connection ready for pieces that are copied without the dispatcher, with device memory of `near`.
    /// Answers when its buffers are.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection.
    pub fn prepare(
        &self,
        direct: u32,
        outgoing: bool,
        near: Near,
        ready: Preparer,
        later: impl FnOnce() -> Pending,
    ) -> Result<(), Status> {
        self.with_named(direct, outgoing, |named| named.prepare(near))?;
        let pool = if outgoing {
            Arc::clone(&self.outgoing(direct)?.pool)
        } else {
            Arc::clone(&self.incoming(direct)?.pool)
        };
        self.prepared.store(true, Ordering::Release);
        let answer = later();
        start(move || {
            pool.prepare(&ready);
            answer.answer(Ok(DirectPrepareReply {}));
        })
    }

    fn with_named<T>(&self, direct: u32, outgoing: bool, f: impl FnOnce(&Named) -> T) -> Result<T, Status> {
        Ok(if outgoing { f(&self.outgoing(direct)?.named) } else { f(&self.incoming(direct)?.named) })
    }

    /// The context that a connection was prepared for.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if it was not.
    pub fn context(&self, direct: u32, outgoing: bool) -> Result<ContextId, Status> {
        self.with_named(direct, outgoing, Named::context)?
    }

    /// Names device memory for a connection's pieces, or forgets it: address and size.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection or it was not prepared, `INVALID_VALUE` if there is nothing
    /// to forget, `OUT_OF_MEMORY` for too many parts.
    pub fn name(&self, direct: u32, outgoing: bool, part: (u64, u64), allowed: bool) -> Result<(), Status> {
        self.with_named(direct, outgoing, |named| named.name(part, allowed))?
    }

    /// Device memory is about to be freed. No piece begins to use it any more.
    pub fn forget(&self, address: u64, size: u64) {
        if !self.is_prepared() {
            return;
        }
        let table = lock(&self.table);
        table.outgoing.values().flatten().for_each(|outgoing| outgoing.named.forget(address, size));
        table.incoming.values().for_each(|incoming| incoming.named.forget(address, size));
    }

    /// Whether a connection was ever prepared, so that there can be pieces that the dispatcher must not delay.
    #[inline]
    pub fn is_prepared(&self) -> bool {
        self.prepared.load(Ordering::Acquire)
    }

    /// Sends a piece. `seq` is the command's. Any thread may call this, and nothing has happened after an error.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection or it was not prepared, `INVALID_VALUE` for memory that was
    /// not named, `NOT_READY` while memory [is still](Self::hold_still).
    pub fn send_now(&self, op: &DirectSendNow, seq: u64) -> Result<(), Status> {
        let outgoing = self.outgoing(op.direct)?;
        let moving = self.motion.begin().ok_or(Status::NOT_READY)?;
        outgoing.named.with(op.src, op.len, |carrier| {
            let mut sending = outgoing.piece(op.number);
            // Not an error: the other end learns that the piece does not come.
            let Some(buffer) = sending.fill(op.len) else { return Ok(()) };
            let copying = outgoing.copies.begin();
            let end = move |status| {
                sending.finish(status);
                drop((copying, moving));
            };
            carrier.carry(&Rows::line(op.src, op.len), buffer, seq, Box::new(end));
            Ok(())
        })
    }

    /// Receives a piece when it comes. Otherwise as [`send_now`](Self::send_now), and with errors of
    /// [`Incoming::expect`].
    pub fn receive(&self, op: &DirectReceive, seq: u64) -> Result<(), Status> {
        let incoming = self.incoming(op.direct)?;
        // While a piece is expected, memory does not leave.
        let _moving = self.motion.begin().ok_or(Status::NOT_READY)?;
        let carrier = incoming.named.with(op.dst, op.len, |carrier| Ok(Arc::clone(carrier)))?;
        incoming.expect(op.number, Expected { to: Rows::line(op.dst, op.len), seq, carrier })
    }

    /// While the result exists, no piece is copied but by the dispatcher. `None`: a piece is being copied, or a
    /// client expects one that has not come.
    pub fn hold_still(&self) -> Option<Still> {
        let still = self.motion.stop()?;
        let table = lock(&self.table);
        (!table.incoming.values().any(|incoming| incoming.expects())).then_some(still)
    }

    /// Answers once an expected piece will not come.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the client already waits for that.
    pub fn failures(&self, later: impl FnOnce() -> Pending) -> Result<(), Status> {
        let mut state = lock(&self.failures.0);
        if state.1.is_some() {
            return Err(Status::INVALID_VALUE);
        }
        state.1 = Some(later());
        Failures::answer(&mut state);
        Ok(())
    }

    /// Closes a connection to another server once what was sent is out. Answers when nothing is being copied from
    /// the device any more.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is none.
    pub fn end_outgoing(&self, direct: u32, later: impl FnOnce() -> Pending) -> Result<(), Status> {
        match lock(&self.table).outgoing.remove(&direct).ok_or(Status::INVALID_HANDLE)? {
            Some(outgoing) => {
                outgoing.end();
                outgoing.copies.when_over(later());
            }
            None => later().answer(Ok(DirectCloseReply {})),
        }
        Ok(())
    }

    /// Closes a connection from another server. Answers when nothing is being landed any more.
    ///
    /// # Errors
    /// As [`end_outgoing`](Self::end_outgoing).
    pub fn end_incoming(&self, direct: u32, later: impl FnOnce() -> Pending) -> Result<(), Status> {
        let ended = {
            let mut table = lock(&self.table);
            table.offers.retain(|_, offer| offer.direct != direct);
            table.incoming.remove(&direct)
        };
        ended.ok_or(Status::INVALID_HANDLE)?.end(later());
        Ok(())
    }

    /// A connection to another server.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if this number was never used.
    pub fn outgoing(&self, direct: u32) -> Result<Arc<Outgoing>, Status> {
        lock(&self.table).outgoing.get(&direct).cloned().flatten().ok_or(Status::INVALID_HANDLE)
    }

    /// A connection from another server.
    ///
    /// # Errors
    /// As [`outgoing`](Self::outgoing).
    pub fn incoming(&self, direct: u32) -> Result<Arc<Incoming>, Status> {
        lock(&self.table).incoming.get(&direct).cloned().ok_or(Status::INVALID_HANDLE)
    }
}

fn may_be_new(used: bool, count: usize) -> Result<(), Status> {
    match (used, count) {
        (true, _) => Err(Status::INVALID_HANDLE),
        (false, MAX_DIRECTS..) => Err(Status::OUT_OF_MEMORY),
        (false, _) => Ok(()),
    }
}

fn start(run: impl FnOnce() + Send + 'static) -> Result<(), Status> {
    let started = std::thread::Builder::new().name("rgpu-direct".into()).spawn(run);
    started.map(drop).map_err(|_| Status::OPERATING_SYSTEM)
}

fn prepare(stream: &Stream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    // A Unix socket needs none.
    let _ = stream.set_nodelay();
    stream.set_write_timeout(PATIENCE)?;
    stream.set_read_timeout(Some(WITHIN))
}

/// Whether a connection under TLS with this hello may use a ticket.
fn check(hello: &Hello, token: &Token, offer: &Offer) -> Result<(), String> {
    greeting::<Hello>(hello.as_bytes(), &OURS).map_err(|e| e.to_string())?;
    let good = Secret(offer.secret).matches(&hello.secret) && hello.token == *token;
    if !good || hello.purpose != purpose::DIRECT {
        return Err("it does not have the ticket that it names".into());
    }
    Ok(())
}

/// The buffers of one end of a connection.
struct Pool {
    common: Arc<Common>,
    state: Mutex<PoolState>,
    changed: Condvar,
    /// Rung when a buffer becomes free, for an end over verbs.
    bell: OnceLock<Arc<Bell>>,
}

struct PoolState {
    free: Vec<Arc<Memory>>,
    made: usize,
    most: usize,
    closed: bool,
}

impl Pool {
    fn new(common: &Arc<Common>) -> Arc<Pool> {
        let state = PoolState { free: Vec::new(), made: 0, most: PIECES, closed: false };
        let (state, changed, bell) = (Mutex::new(state), Condvar::new(), OnceLock::new());
        Arc::new(Pool { common: Arc::clone(common), state, changed, bell })
    }

    /// A buffer that no connection has.
    fn fresh(&self) -> Option<Arc<Memory>> {
        if let Some(memory) = lock(&self.common.spare).pop() {
            return Some(memory);
        }
        let memory = Memory::new(MAX_PIECE as usize);
        memory.inspect_err(|e| tracing::warn!("no memory for a direct connection: {e}")).ok()
    }

    /// Makes buffers ready. Nothing that pieces do later calls the driver for them.
    fn prepare(&self, ready: &Preparer) {
        loop {
            {
                let mut state = lock(&self.state);
                if state.closed || state.made >= PREPARED {
                    state.most = state.made;
                    return;
                }
                state.made += 1;
            }
            // Nobody waits for this lock meanwhile: it may take long.
            let memory = self.fresh();
            memory.iter().for_each(|memory| ready(memory.region()));
            let mut state = lock(&self.state);
            match memory {
                Some(memory) => state.free.push(memory),
                None => {
                    state.made -= 1;
                    return;
                }
            }
        }
    }

    /// Takes a buffer, unless all are in use.
    fn try_take(self: &Arc<Pool>) -> Option<Buffer> {
        self.take_from(&mut lock(&self.state))
    }

    fn take_from(self: &Arc<Pool>, state: &mut PoolState) -> Option<Buffer> {
        if state.closed {
            return None;
        }
        let memory = match state.free.pop() {
            Some(memory) => memory,
            None if state.made < state.most => {
                let memory = self.fresh()?;
                state.made += 1;
                memory
            }
            None => return None,
        };
        Some(Buffer { memory, pool: Arc::clone(self) })
    }

    /// Takes a buffer, waiting for one if necessary. `None`: the connection is closed, or there is no memory.
    fn take(self: &Arc<Pool>) -> Option<Buffer> {
        let mut state = lock(&self.state);
        while state.free.is_empty() && state.made >= state.most && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.take_from(&mut state)
    }

    /// Closes the pool: nothing can be taken any more. Other connections get the buffers.
    fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let mut free = std::mem::take(&mut state.free);
        drop(state);
        self.changed.notify_all();
        lock(&self.common.spare).append(&mut free);
    }
}

/// A buffer in use. Dropping it makes it free again.
struct Buffer {
    memory: Arc<Memory>,
    pool: Arc<Pool>,
}

impl Buffer {
    /// Its first `len` bytes.
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        match self.memory.region().runs(0, len as u64).as_deref() {
            // SAFETY: the region belongs to this buffer, and whoever has the buffer has it exclusively: a
            // device is done with it when it is passed on.
            Some([(at, len)]) => unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), *len) },
            _ => &mut [],
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.state);
        if state.closed {
            lock(&self.pool.common.spare).push(Arc::clone(&self.memory));
        } else {
            state.free.push(Arc::clone(&self.memory));
        }
        drop(state);
        self.pool.changed.notify_all();
        self.pool.bell.get().inspect(|bell| bell.ring());
    }
}

/// A buffer that a device uses. Unless the device is known to be [done](InUse::over), its memory is never
/// freed.
pub struct InUse(Option<Buffer>);

impl InUse {
    /// The device is done with it.
    fn over(mut self) -> Option<Buffer> {
        self.0.take()
    }

    /// Releases it if the status says that the device is done; nobody needs its bytes.
    pub fn release(self, status: Status) {
        if status.is_success() {
            drop(self.over());
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            // A new buffer takes its place.
            lock(&buffer.pool.state).made -= 1;
            buffer.pool.changed.notify_all();
            std::mem::forget(buffer);
        }
    }
}

/// The sending end of a connection.
pub struct Outgoing {
    jobs: Mutex<Option<Sender<Job>>>,
    pool: Arc<Pool>,
    /// Rung for each job, if pieces go over verbs.
    bell: Option<Arc<Bell>>,
    named: Named,
    copies: Arc<Copies>,
}

enum Job {
    Piece(u64, Buffer, usize),
    /// This piece will not come.
    Nothing(u64),
}

impl Outgoing {
    fn new(jobs: Sender<Job>, bytes: &Arc<Common>, bell: Option<Arc<Bell>>) -> Outgoing {
        let (jobs, pool) = (Mutex::new(Some(jobs)), Pool::new(bytes));
        let (named, copies) = Default::default();
        Outgoing { jobs, pool, bell, named, copies }
    }

    /// `queue`: what pieces go over, instead of the socket.
    fn start(stream: Stream, queue: Option<Pieces<Buffer>>, bytes: Arc<Common>) -> io::Result<Arc<Outgoing>> {
        let (jobs, due) = channel();
        let due = Jobs { due, last: 0, over: false };
        let bell = queue.is_some().then(Bell::new).transpose()?.map(Arc::new);
        let outgoing = Arc::new(Outgoing::new(jobs, &bytes, bell.clone()));
        let own = Arc::clone(&outgoing);
        std::thread::Builder::new().name("rgpu-direct".into()).spawn(move || {
            let why = match (queue, bell) {
                (Some(queue), Some(bell)) => verbs::send(&stream, queue, due, &bell, &bytes),
                _ => send(&stream, due, &bytes),
            };
            stream.shut_down();
            drop(lock(&own.jobs).take());
            own.pool.close();
            if let Err(e) = why {
                tracing::info!("a direct connection to another server is over: {e}");
            }
        })?;
        Ok(outgoing)
    }

    /// Closes it once everything before is sent.
    fn end(&self) {
        // The thread sees the end of its queue after the last job.
        drop(lock(&self.jobs).take());
        self.bell.iter().for_each(|bell| bell.ring());
    }

    /// Begins to send a piece, which must be [filled](Sending::fill) and [finished](Sending::finish). If it
    /// is dropped before that, the other end learns that it will not come.
    pub fn piece(self: &Arc<Outgoing>, number: u64) -> Sending {
        Sending { outgoing: Arc::clone(self), number, len: 0, buffer: None }
    }

    fn push(&self, job: Job) {
        if let Some(jobs) = &*lock(&self.jobs) {
            // The connection may just have been lost.
            let _ = jobs.send(job);
        }
        self.bell.iter().for_each(|bell| bell.ring());
    }
}

/// What is to be sent. Numbers ascend on a connection. Streams may reach their pieces in another order; then
/// the other end learns of a gap, and the client repeats the copy.
struct Jobs {
    due: Receiver<Job>,
    last: u64,
    /// There will be no more.
    over: bool,
}

/// A piece's header, and its bytes if it has any.
type Piece = (DirectHeader, Option<(Buffer, usize)>);

impl Jobs {
    /// The next piece, if there is one now.
    fn now(&mut self) -> Option<Piece> {
        loop {
            match self.due.try_recv() {
                Ok(job) => {
                    if let Some(piece) = self.judge(job) {
                        return Some(piece);
                    }
                }
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => {
                    self.over = true;
                    return None;
                }
            }
        }
    }

    /// A job's piece. `None`: it comes too late.
    fn judge(&mut self, job: Job) -> Option<Piece> {
        let (number, piece) = match job {
            Job::Piece(number, buffer, len) => (number, Some((buffer, len))),
            Job::Nothing(number) => (number, None),
        };
        if number <= self.last {
            return None;
        }
        self.last = number;
        let len = piece.as_ref().map_or(0, |(_, len)| *len as u32);
        Some((DirectHeader { number, len, reserved: 0 }, piece))
    }
}

/// Sends what arrives in the queue. Returns when the connection is lost.
fn send(stream: &Stream, mut jobs: Jobs, bytes: &Common) -> io::Result<()> {
    while let Ok(job) = jobs.due.recv() {
        let Some((header, piece)) = jobs.judge(job) else { continue };
        stream.write_all(header.as_bytes())?;
        if let Some((mut buffer, len)) = piece {
            stream.write_all(buffer.bytes(len))?;
            bytes.all.fetch_add(len as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// A piece on its way into a buffer of the sending end.
pub struct Sending {
    outgoing: Arc<Outgoing>,
    number: u64,
    len: usize,
    buffer: Option<InUse>,
}

impl Sending {
    /// Where a device should write its `len` bytes. `None`: the connection is lost, or the client has more in
    /// flight than there are buffers.
    pub fn fill(&mut self, len: u64) -> Option<Mapped> {
        let buffer = self.outgoing.pool.try_take()?;
        let mapped = Mapped::of(buffer.memory.region(), len)?;
        (self.len, self.buffer) = (len as usize, Some(InUse(Some(buffer))));
        Some(mapped)
    }

    /// Sends it, if the status says that its bytes are there.
    pub fn finish(mut self, status: Status) {
        if status.is_success()
            && let Some(buffer) = self.buffer.take().and_then(InUse::over)
        {
            self.outgoing.push(Job::Piece(self.number, buffer, self.len));
            self.len = 0;
            self.number = 0;
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.number > 0 {
            self.outgoing.push(Job::Nothing(self.number));
        }
    }
}

/// Where a piece goes that the client expects.
pub struct Expected {
    /// As many bytes as the piece must have.
    pub to: Rows,
    /// The command's, which becomes the progress of the connection's stream.
    pub seq: u64,
    /// What lands it.
    pub carrier: Arc<dyn Carrier>,
}

/// Copies of pieces that are under way at one end, and whom to tell when none is.
#[derive(Default)]
struct Copies(Mutex<(usize, Option<Pending>)>);

impl Copies {
    fn begin(self: &Arc<Copies>) -> Copying {
        lock(&self.0).0 += 1;
        Copying(Arc::clone(self))
    }

    /// Answers when none is under way any more.
    fn when_over(&self, pending: Pending) {
        let mut state = lock(&self.0);
        if state.0 == 0 { pending.answer(Ok(DirectCloseReply {})) } else { state.1 = Some(pending) }
    }
}

/// One of them.
struct Copying(Arc<Copies>);

impl Drop for Copying {
    fn drop(&mut self) {
        let mut state = lock(&self.0.0);
        state.0 -= 1;
        if state.0 == 0
            && let Some(pending) = state.1.take()
        {
            pending.answer(Ok(DirectCloseReply {}));
        }
    }
}

/// The receiving end of a connection.
pub struct Incoming {
    state: Mutex<Arrived>,
    pool: Arc<Pool>,
    bytes: Arc<Common>,
    named: Named,
    copies: Arc<Copies>,
    /// Its number, and who is told if an expected piece will not come.
    failures: Option<(u32, Arc<Failures>)>,
}

#[derive(Default)]
struct Arrived {
    /// Pieces that have arrived but not been landed.
    pieces: BTreeMap<u64, (Buffer, usize)>,
    /// What the client waits for.
    waiting: Vec<(u64, Pending)>,
    /// What the client expects and has not arrived. All have higher numbers than `last`.
    expected: BTreeMap<u64, Expected>,
    /// The last piece that the client has expected.
    expected_last: u64,
    /// An expected piece has not come.
    failed: bool,
    /// The last piece that has arrived or will not.
    last: u64,
    over: bool,
    /// What they come over.
    stream: Option<Arc<Stream>>,
}

impl Arrived {
    /// Whether a piece has arrived, and the next arrived one after it. `None`: it may still arrive.
    fn look(&self, number: u64) -> Option<Result<u64, Status>> {
        if self.pieces.contains_key(&number) {
            let after = self.pieces.keys().skip_while(|at| **at <= number);
            // The peer chooses the numbers, up to the last one that there is.
            let upto = after.fold(number, |upto, at| if at - 1 == upto { *at } else { upto });
            return Some(Ok(upto));
        }
        (self.over || number <= self.last).then_some(Err(Status::DEVICE_UNAVAILABLE))
    }

    /// Answers whatever can be answered.
    fn answer(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        for (number, pending) in waiting {
            match self.look(number) {
                Some(found) => pending.answer(found.map(|upto| DirectArrivalReply { upto })),
                None => self.waiting.push((number, pending)),
            }
        }
    }
}

impl Incoming {
    fn new(bytes: Arc<Common>, failures: Option<(u32, Arc<Failures>)>) -> Incoming {
        Incoming {
            state: Mutex::default(),
            pool: Pool::new(&bytes),
            bytes,
            named: Named::default(),
            copies: Arc::default(),
            failures,
        }
    }

    /// Pieces come over this, unless the connection was closed before it was open.
    fn over(&self, stream: &Arc<Stream>) {
        let mut state = lock(&self.state);
        if state.over {
            stream.shut_down();
        }
        state.stream = Some(Arc::clone(stream));
    }

    /// Lands a piece as soon as it is here. Nothing has happened after an error.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the number is higher than that of all that were expected before;
    /// `OUT_OF_MEMORY` if the client expects too many.
    pub fn expect(&self, number: u64, expected: Expected) -> Result<(), Status> {
        let mut state = lock(&self.state);
        if number <= state.expected_last {
            return Err(Status::INVALID_VALUE);
        }
        if state.expected.len() >= MAX_EXPECTED {
            return Err(Status::OUT_OF_MEMORY);
        }
        state.expected_last = number;
        if state.failed {
            return Ok(());
        }
        if number > state.last && !state.over {
            state.expected.insert(number, expected);
            return Ok(());
        }
        let piece = state.pieces.remove(&number);
        self.land_expected(&mut state, expected, piece);
        Ok(())
    }

    /// Lands an expected piece. `None`: it will not come. The state stays locked, so that pieces are landed in
    /// their order.
    fn land_expected(&self, state: &mut Arrived, expected: Expected, piece: Option<(Buffer, usize)>) {
        let Expected { to, seq, carrier } = expected;
        let piece = piece.filter(|(_, len)| *len as u64 == to.width);
        let bytes = piece.as_ref().and_then(|(buffer, len)| Mapped::of(buffer.memory.region(), *len as u64));
        let (Some((buffer, _)), Some(bytes), false) = (piece, bytes, state.failed) else {
            return self.fail(state);
        };
        let (buffer, copying) = (InUse(Some(buffer)), self.copies.begin());
        let end = move |status| {
            buffer.release(status);
            drop(copying);
        };
        carrier.carry(&to, bytes, seq, Box::new(end));
    }

    /// An expected piece will not come.
    fn fail(&self, state: &mut Arrived) {
        state.expected.clear();
        if !std::mem::replace(&mut state.failed, true)
            && let Some((direct, failures)) = &self.failures
        {
            failures.tell(*direct);
        }
    }

    /// Whether the client expects a piece that has not come, or not landed.
    fn expects(&self) -> bool {
        !lock(&self.state).expected.is_empty() || lock(&self.copies.0).0 > 0
    }

    /// Closes it, and answers when nothing is being landed any more.
    fn end(&self, pending: Pending) {
        let stream = {
            let mut state = lock(&self.state);
            // Nobody is to be told any more.
            state.failed = true;
            state.expected.clear();
            state.stream.take()
        };
        self.close();
        // Its thread returns.
        stream.inspect(|stream| stream.shut_down());
        self.copies.when_over(pending);
    }

    /// Answers once a piece has arrived, or when it cannot arrive any more.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the client waits for too many.
    pub fn arrival(&self, number: u64, later: impl FnOnce() -> Pending) -> Result<(), Status> {
        let mut state = lock(&self.state);
        if state.waiting.len() >= MAX_WAITING {
            return Err(Status::OUT_OF_MEMORY);
        }
        state.waiting.push((number, later()));
        state.answer();
        Ok(())
    }

    /// Takes an arrived piece to land it: its buffer and its bytes.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it has not arrived or was already landed.
    pub fn land(&self, number: u64) -> Result<(InUse, Mapped), Status> {
        let (buffer, len) = lock(&self.state).pieces.remove(&number).ok_or(Status::INVALID_VALUE)?;
        let mapped = Mapped::of(buffer.memory.region(), len as u64).ok_or(Status::INVALID_VALUE)?;
        Ok((InUse(Some(buffer)), mapped))
    }

    /// No more pieces will arrive. Those already here can still be landed.
    fn close(&self) {
        self.pool.close();
        let mut state = lock(&self.state);
        state.over = true;
        if !state.expected.is_empty() {
            self.fail(&mut state);
        }
        state.answer();
    }

    /// Receives pieces until the connection is lost, and returns why. `patience`: how long the peer may pause
    /// in the middle of a piece.
    fn read(&self, stream: &Stream, verbs: Option<&Verbs>, patience: Duration) -> String {
        let why = self.receive(stream, verbs, patience).err();
        self.close();
        why.map_or_else(|| "closed".into(), |e| e.to_string())
    }

    fn receive(&self, stream: &Stream, verbs: Option<&Verbs>, patience: Duration) -> io::Result<()> {
        let mut first = true;
        loop {
            let mut header = DirectHeader::new_zeroed();
            stream.read_exact(header.as_mut_bytes())?;
            if std::mem::take(&mut first) && header == DirectHeader::offer() {
                if let Some(queue) = verbs::answer(verbs, stream, &self.pool)? {
                    return verbs::receive(self, stream, queue);
                }
                continue;
            }
            let len = self.check(&header)?;
            let mut piece = None;
            if len > 0 {
                // The client lands what has arrived, or the session ends.
                let Some(mut buffer) = self.pool.take() else { return Ok(()) };
                stream.set_read_timeout(Some(patience))?;
                stream.read_exact(buffer.bytes(len))?;
                stream.set_read_timeout(None)?;
                piece = Some((buffer, len));
            }
            self.arrived(header.number, piece);
        }
    }

    /// The bytes of the piece that has this header.
    fn check(&self, header: &DirectHeader) -> io::Result<usize> {
        let last = lock(&self.state).last;
        header.check(last).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// A piece has arrived, or will not.
    fn arrived(&self, number: u64, piece: Option<(Buffer, usize)>) {
        let len = piece.as_ref().map_or(0, |(_, len)| *len as u64);
        self.bytes.all.fetch_add(len, Ordering::Relaxed);
        let mut state = lock(&self.state);
        state.last = number;
        let expected = state.expected.remove(&number);
        // Numbers ascend, so these will not come.
        if state.expected.first_key_value().is_some_and(|(first, _)| *first < number) {
            self.fail(&mut state);
        }
        match expected {
            Some(expected) => self.land_expected(&mut state, expected, piece),
            None => drop(piece.and_then(|piece| state.pieces.insert(number, piece))),
        }
        state.answer();
    }
}

#[cfg(test)]
mod tests;
