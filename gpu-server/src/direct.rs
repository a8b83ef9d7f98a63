//! Direct connections from and to workers of other servers, which carry copies between GPUs.
//! [`protocol::ops::direct`] has the client's requests.
//!
//! ```text
//!  sending worker                                                          receiving worker
//!   stream: device ─▶ buffer ─ thread of the connection ─▶ socket ─ thread ─▶ buffer ─▶ device: stream
//! ```
//!
//! A connection is one-way. Each end has buffers for [`PIECES`](protocol::ops::direct::PIECES) pieces, which
//! CUDA registers when they are first used. Nothing waits for a buffer: the sending end refuses a piece for
//! which it has none, and the receiving end stops reading.
//!
//! A piece that has arrived waits until the client lands it, unless the client has said in advance where it
//! goes ([`Expected`]): then the thread that receives it starts its copy to the device, too. Receiving like
//! this and [sending at once](Directs::send_now) both work while the dispatcher is busy ([`near`]). Whole
//! copies go in the same way, without the client in between ([`series`]).
//!
//! If both operators allow it and both ends have a device, pieces take [`verbs`] instead of the socket, which
//! stays open: its end is the connection's. The buffers and everything around them are the same.
//!
//! The daemons connect and accept, because workers have no network. `parent/direct.rs` says how far they
//! trust a ticket. The peer is another server's worker, which its client may have taken over: the worst it
//! can do is send wrong bytes for this session's client, or none.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

mod awake;
mod buffers;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod in_place;
mod incoming;
mod near;
mod outgoing;
mod series;
mod verbs;

use host_bridge::framing::{Address, watch_peer};
use host_bridge::stream::Stream;
use host_bridge::verbs::Settings;
use identity::{Fingerprint, Identity, Secret, tls};
use protocol::Status;
use protocol::device::{Answer, untext};
use protocol::handle::{ContextId, StreamId};
use protocol::link::{Hello, MAGIC, Welcome, greeting, purpose};
use protocol::ops::direct::{
    DirectCloseReply, DirectMemoryReply, DirectOfferReply, DirectOpenReply, DirectPrepareReply,
    DirectReceive, DirectSendNow, DirectTicket, MAX_ADDRESSES, MAX_DIRECTS,
};
use protocol::version::{OURS, Version};
use zerocopy::{FromZeros, IntoBytes};

use self::buffers::{Common, Pool};
use self::in_place::Blocks;
pub use self::incoming::Incoming;
use self::incoming::{Expected, Failures};
use self::near::{Copies, Motion, Named};
pub use self::near::{Memory as PieceMemory, MirrorCarrier, Near, Still};
pub use self::outgoing::Outgoing;
pub use self::series::Series;
use self::verbs::Verbs;
use crate::cuda_ipc::Broker;
use crate::driver::call::Pending;
use crate::driver::gpu::{Block, Carrier, Preparer};
use crate::driver::rows::Rows;
use crate::lock::lock;
use crate::worker_protocol::Token;

/// How long setting up a connection may take, from the connected socket on, and then the first message over
/// verbs.
const WITHIN: Duration = Duration::from_secs(10);
/// A peer that accepts nothing, or stops in the middle of a piece, for this long is lost.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long memory that is freed waits for pieces that are just being copied from or to it. Longer in tests,
/// whose machine may be busy.
const COPIED_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 240 } else { 5 });

/// A session's direct connections.
pub struct Directs {
    identity: Arc<Identity>,
    broker: Arc<Broker>,
    table: Mutex<Table>,
    /// Connections that have not yet shown whose they are.
    strangers: AtomicUsize,
    /// How connections use verbs. `None`: they use their sockets only.
    verbs: Option<Verbs>,
    /// Device memory that is sent from where it is.
    blocks: Blocks,
    bytes: Arc<Common>,
    failures: Arc<Failures>,
    motion: Arc<Motion>,
    /// Whether a connection was ever prepared, and whether one ever carried a box.
    prepared: AtomicBool,
    boxes: AtomicBool,
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
    /// The connections of a session whose worker has this key. `rdma`: how they may use verbs. `in_place`:
    /// over verbs, short copies are sent from device memory if that is possible.
    pub fn new(
        identity: Arc<Identity>,
        broker: Arc<Broker>,
        rdma: Option<Settings>,
        in_place: bool,
    ) -> Arc<Directs> {
        let verbs = rdma.map(Verbs::new);
        let (table, strangers, bytes, failures, motion, prepared, boxes) = Default::default();
        Arc::new(Directs {
            identity,
            broker,
            table,
            strangers,
            verbs,
            blocks: Blocks::new(in_place),
            bytes,
            failures,
            motion,
            prepared,
            boxes,
        })
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
                if queue.is_some() {
                    directs.blocks.log_why_off();
                }
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
        // All of a session's connections may be opened at the same moment.
        if self.strangers.fetch_add(1, Ordering::AcqRel) >= MAX_DIRECTS {
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

    /// Makes a connection ready for pieces that are copied without the dispatcher. Answers when its buffers
    /// are there.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection.
    pub fn prepare(
        &self,
        direct: u32,
        outgoing: bool,
        near: Near,
        later: impl FnOnce() -> Pending,
    ) -> Result<(), Status> {
        self.with_named(direct, outgoing, |named| named.prepare(near))?;
        self.prepared.store(true, Ordering::Release);
        let (pool, answer) = (self.pool(direct, outgoing)?, later());
        start(move || {
            pool.prepare();
            answer.answer(Ok(DirectPrepareReply {}));
        })
    }

    /// Makes a prepared connection ready for pieces in device memory as well, and names this memory, address
    /// and size. Answers when its buffers are page-locked.
    ///
    /// # Errors
    /// As [`name`](Self::name).
    pub fn prepare_device(
        &self,
        (direct, outgoing): (u32, bool),
        carrier: Arc<dyn Carrier>,
        ready: Preparer,
        part: (u64, u64),
        later: impl FnOnce() -> Pending,
    ) -> Result<(), Status> {
        self.with_named(direct, outgoing, |named| {
            named.set_device(carrier);
            named.name(part, PieceMemory::Device)
        })??;
        let (pool, answer) = (self.pool(direct, outgoing)?, later());
        start(move || {
            pool.lock_pages(&ready);
            answer.answer(Ok(DirectMemoryReply {}));
        })
    }

    fn pool(&self, direct: u32, outgoing: bool) -> Result<Arc<Pool>, Status> {
        Ok(if outgoing {
            Arc::clone(&self.outgoing(direct)?.pool)
        } else {
            Arc::clone(&self.incoming(direct)?.pool)
        })
    }

    fn with_named<T>(&self, direct: u32, outgoing: bool, f: impl FnOnce(&Named) -> T) -> Result<T, Status> {
        Ok(if outgoing { f(&self.outgoing(direct)?.named) } else { f(&self.incoming(direct)?.named) })
    }

    /// The context and the stream that a connection was prepared for.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if it was not.
    pub fn place(&self, direct: u32, outgoing: bool) -> Result<(ContextId, StreamId), Status> {
        self.with_named(direct, outgoing, Named::place)?
    }

    /// Whether a connection's pieces can be in device memory.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection.
    pub fn has_device(&self, direct: u32, outgoing: bool) -> Result<bool, Status> {
        self.with_named(direct, outgoing, Named::has_device)
    }

    /// Names memory for a connection's pieces: address and size.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection or it was not prepared for this kind of memory,
    /// `OUT_OF_MEMORY` for too many parts.
    pub fn name(
        &self,
        direct: u32,
        outgoing: bool,
        part: (u64, u64),
        memory: PieceMemory,
    ) -> Result<(), Status> {
        self.with_named(direct, outgoing, |named| named.name(part, memory))?
    }

    /// Forgets what was named with this address and size.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection or it was not prepared, `INVALID_VALUE` if there is
    /// nothing to forget.
    pub fn unname(&self, direct: u32, outgoing: bool, part: (u64, u64)) -> Result<(), Status> {
        self.with_named(direct, outgoing, |named| named.unname(part))?
    }

    /// Device memory is about to be freed. No piece begins to use it any more, and no piece of a box is being
    /// copied.
    pub fn forget(&self, address: u64, size: u64) {
        if !self.is_prepared() && !self.boxes.load(Ordering::Acquire) {
            return;
        }
        let (mut used, mut over_verbs) = (Vec::new(), Vec::new());
        {
            let table = lock(&self.table);
            for outgoing in table.outgoing.values().flatten() {
                outgoing.named.forget(address, size);
                let reading = outgoing.forget(address, size);
                if outgoing.domain.is_some() && !reading.is_empty() {
                    over_verbs.push(Arc::clone(outgoing));
                }
                used.extend(reading);
            }
            for incoming in table.incoming.values() {
                incoming.named.forget(address, size);
                used.extend(incoming.forget(address, size));
            }
        }
        self.blocks.forget(address, size);
        // They wait for nothing but the other end, if they are sent from this memory. On a device that has
        // failed they may not end.
        let are_over = || used.iter().all(|copies: &Arc<Copies>| copies.wait(COPIED_WITHIN));
        if !are_over() && !over_verbs.is_empty() {
            // Without the connection, nobody reads the memory.
            over_verbs.iter().for_each(|outgoing| outgoing.abort());
            are_over();
        }
    }

    /// Whether a connection was ever prepared, so that there can be pieces that the dispatcher must not
    /// delay.
    #[inline]
    pub fn is_prepared(&self) -> bool {
        self.prepared.load(Ordering::Acquire)
    }

    /// Sends a piece. `seq` is the command's. Any thread may call this, and nothing has happened after an
    /// error.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection or it was not prepared, `INVALID_VALUE` for memory
    /// that was not named, `NOT_READY` while memory [is still](Self::hold_still).
    pub fn send_now(&self, op: &DirectSendNow, seq: u64) -> Result<(), Status> {
        let outgoing = self.outgoing(op.direct)?;
        let moving = self.motion.begin().ok_or(Status::NOT_READY)?;
        outgoing.named.with(op.src, op.len, |carrier, memory| {
            let mut sending = outgoing.piece(op.number);
            sending.by_processor = memory == PieceMemory::Mirror;
            // Not an error: the other end learns that the piece does not come.
            let Some(buffer) = sending.fill(op.len) else { return Ok(()) };
            let copying = outgoing.copies.begin();
            let end = move |status| {
                sending.finish(status);
                drop((copying, moving));
            };
            let rows = Rows::line(op.src, op.len);
            match memory {
                PieceMemory::Device => carrier.carry(&rows, 0, buffer, seq, Box::new(end)),
                // The processor copies these, and the connection's own thread has the time for it.
                PieceMemory::Mirror => {
                    let carrier = Arc::clone(carrier);
                    outgoing.run(move || carrier.carry(&rows, 0, buffer, seq, Box::new(end)));
                }
            }
            Ok(())
        })
    }

    /// Receives a piece when it comes. Otherwise as [`send_now`](Self::send_now), and with errors of
    /// [`Incoming::expect`].
    pub fn receive(&self, op: &DirectReceive, seq: u64) -> Result<(), Status> {
        let incoming = self.incoming(op.direct)?;
        // While a piece is expected, memory does not leave.
        let _moving = self.motion.begin().ok_or(Status::NOT_READY)?;
        let expected = incoming.named.with(op.dst, op.len, |carrier, memory| {
            Ok(Expected { to: Rows::line(op.dst, op.len), memory, seq, carrier: Arc::clone(carrier) })
        })?;
        incoming.expect(op.number, expected)
    }

    /// Whether short copies may be sent from device memory.
    pub fn sends_in_place(&self) -> bool {
        self.verbs.is_some() && self.blocks.are_used()
    }

    /// Sends a box, without the client: see [`DirectSendAll`](protocol::ops::direct::DirectSendAll). Over
    /// verbs, that of a short copy is sent from where it is, if `give` gives the memory of the granules
    /// around it. 0: it has no granules.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such connection, `NOT_READY` while memory [is
    /// still](Self::hold_still), `OUT_OF_MEMORY` if too many boxes wait.
    pub fn send_all(
        &self,
        direct: u32,
        series: Series,
        granule: u64,
        give: impl FnOnce(u64, u64) -> Result<Block, Status>,
    ) -> Result<(), Status> {
        let outgoing = self.outgoing(direct)?;
        let moving = self.motion.begin().ok_or(Status::NOT_READY)?;
        self.boxes.store(true, Ordering::Release);
        let line = outgoing.domain.as_ref().zip(series.line());
        let found = line.and_then(|(domain, line)| self.blocks.find(domain, line, granule, give));
        outgoing.send_all(series, moving, found)
    }

    /// Receives a box. Otherwise as [`send_all`](Self::send_all), and with errors of
    /// [`Incoming::receive_all`].
    pub fn receive_all(
        &self,
        direct: u32,
        series: Series,
        later: impl FnOnce() -> Pending,
    ) -> Result<(), Status> {
        let incoming = self.incoming(direct)?;
        // While a box is awaited, memory does not leave.
        let _moving = self.motion.begin().ok_or(Status::NOT_READY)?;
        self.boxes.store(true, Ordering::Release);
        incoming.receive_all(series, later)
    }

    /// While the result exists, no piece is copied but by the dispatcher. `None`: a piece is being copied, or
    /// a client expects one that has not come. Of a box, it expects them only as long as some come.
    pub fn hold_still(&self) -> Option<Still> {
        let (table, now) = (lock(&self.table), Instant::now());
        let Some(still) = self.motion.stop() else {
            table.outgoing.values().flatten().for_each(|outgoing| outgoing.abort_if_stuck(now));
            return None;
        };
        table.incoming.values().for_each(|incoming| incoming.give_up_idle(now));
        let is_still = !table.incoming.values().any(|incoming| incoming.expects());
        is_still.then(|| self.blocks.forget_all()).map(|()| still)
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

    /// Closes a connection to another server once what was sent is out. Answers when nothing is being copied
    /// from the device any more.
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

#[cfg(test)]
mod tests;
