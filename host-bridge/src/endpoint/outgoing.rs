//! Bulk data that goes out over data connections.
//!
//! A connection may be lost at any byte, so what was sent is kept until the bridge has it. It is kept where
//! it is: in a buffer that the driver was [lent](Outgoing::lend), or in the driver's own memory, which it
//! [lets be sent in place](Outgoing::send_held). Such memory may be scarce, so its owner can have the
//! transport [copy](Unacknowledged::copy) what it still holds when there is nothing better to do. What is
//! kept is bounded: whoever has more to send waits.
//!
//! The driver's memory would limit what is on its way over a long link. So where the bridge takes long to say
//! that it has something, data is copied before it is sent.
//!
//! Over a slow link data is compressed where that takes less time ([`compression`](crate::compression)), by the thread that sends it
//! and before anything else happens to it. Then its compressed bytes alone are kept: they are what may have to
//! be sent again, and are never made twice.

mod downlink;

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use protocol::link::{ACKNOWLEDGE_OUT, COMPRESSED_FLAG, DataHeader, MAX_DATA};
use zerocopy::IntoBytes;

use self::downlink::Downlink;
use super::Lost;
use super::link::Connection;
use super::tcp::TcpClient;
use super::verbs::{Target, VerbsClient};
use crate::compression::{CompressUse, Compression, SAMPLE, compress};
use crate::framing::BadAcknowledgement;
use crate::journal::{Journal, Piece};

/// The streams of the data connections to the bridge.
pub(super) struct Outbox {
    streams: Vec<Stream>,
    /// Most bytes that one stream keeps.
    limit: u64,
    /// How fast the link is. `None`: nothing is compressed.
    downlink: Option<Mutex<Downlink>>,
    pub(super) bytes: AtomicU64,
}

/// One of them.
struct Stream {
    kept: Mutex<Kept>,
    /// One chunk is compressed at a time.
    compressor: Mutex<Compressor>,
    /// Room has come in the journal, or the session is over.
    changed: Condvar,
    /// The connection; held while sending, so that the stream's bytes leave in order.
    turn: Mutex<Option<Connection>>,
    /// Bytes of the stream that the bridge has.
    arrived: AtomicU64,
}

/// When chunks of one stream are compressed, and memory for what becomes of one.
struct Compressor {
    rule: Compression,
    made: Vec<u8>,
}

/// What one stream keeps.
#[derive(Default)]
struct Kept {
    journal: Journal<Arc<Chunk>>,
    /// Buffers to be used again, and their bytes: fresh memory costs more than a copy.
    free: Vec<Vec<u8>>,
    free_bytes: usize,
    distance: Distance,
    over: bool,
}

/// How long the bridge takes to say that it has something: the shortest time of recent ones. One chunk at a
/// time is watched.
#[derive(Default)]
struct Distance {
    /// Where in the stream the watched chunk ends, and when it was given out.
    watched: Option<(u64, Instant)>,
    shortest: Option<Duration>,
    /// When a watched chunk last arrived.
    arrived: Option<Instant>,
}

/// Above this time, driver memory that waits for the bridge would hold up the driver. Below, what a copy
/// costs is more.
const FAR: Duration = Duration::from_millis(1);
/// After so long without data the session may have another path.
const FORGET: Duration = Duration::from_secs(10);

impl Distance {
    fn is_far(&self) -> bool {
        self.shortest.is_some_and(|shortest| shortest >= FAR)
    }

    /// A chunk is given out that ends at `end` of the stream.
    fn leaves(&mut self, end: u64, now: Instant) {
        if self.watched.is_some() {
            return;
        }
        if self.arrived.is_some_and(|arrived| now.saturating_duration_since(arrived) > FORGET) {
            *self = Distance::default();
        }
        self.watched = Some((end, now));
    }

    /// The bridge has the first `upto` bytes.
    fn arrives(&mut self, upto: u64, now: impl FnOnce() -> Instant) {
        let Some((_, begun)) = self.watched.take_if(|(end, _)| *end <= upto) else { return };
        let now = now();
        let time = now.saturating_duration_since(begun);
        self.shortest = Some(self.shortest.map_or(time, |shortest| shortest.min(time)));
        self.arrived = Some(now);
    }

    /// The connection has changed.
    fn forget(&mut self) {
        *self = Distance::default();
    }
}

/// Most bytes of buffers that a stream has for its next chunks: what a bridge acknowledges at a time, and a
/// little more.
const MOST_FREE: usize = 2 * ACKNOWLEDGE_OUT as usize;
/// Shorter data is always copied instead of held: many short copies would wait for the places of one another.
const HELD_FROM: usize = 64 << 10;
/// Smaller buffers are not worth keeping.
const LEAST_FREE: usize = 4 << 10;

/// A header and its bytes.
struct Chunk {
    header: DataHeader,
    body: Body,
}

/// What stands before a chunk's bytes: a header, and of compressed ones their number.
struct Head {
    bytes: [u8; HEADER + size_of::<u32>()],
    len: usize,
}

/// Where a chunk's bytes are.
enum Body {
    /// In the first bytes of a buffer of this module's.
    Own(Vec<u8>),
    Held(Box<dyn Held>),
    /// All of these are sent in place of the chunk's.
    Compressed(Box<[u8]>),
}

/// Bytes that are sent from where they are, and stay as they are until this is dropped. That happens when the
/// bridge has them, when they were copied ([`Unacknowledged::copy`]), or when the session is over; on any
/// thread, which must not wait there.
pub trait Held: Send + Sync {
    /// The bytes, always the same.
    fn bytes(&self) -> &[u8];
}

const HEADER: usize = size_of::<DataHeader>();

impl Piece for Chunk {
    fn stream_len(&self) -> u64 {
        (self.head().len + self.bytes().len()) as u64
    }
}

impl Chunk {
    fn is_compressed(&self) -> bool {
        matches!(self.body, Body::Compressed(_))
    }

    fn head(&self) -> Head {
        let mut header = self.header;
        let mut head = Head { bytes: [0; HEADER + size_of::<u32>()], len: HEADER };
        if let Body::Compressed(bytes) = &self.body {
            header.len |= COMPRESSED_FLAG;
            head.bytes[HEADER..].copy_from_slice((bytes.len() as u32).as_bytes());
            head.len = head.bytes.len();
        }
        head.bytes[..HEADER].copy_from_slice(header.as_bytes());
        head
    }

    /// What is sent behind its head.
    fn bytes(&self) -> &[u8] {
        let all = match &self.body {
            Body::Own(bytes) => bytes,
            Body::Held(held) => held.bytes(),
            Body::Compressed(bytes) => return bytes,
        };
        &all[..self.header.len as usize]
    }

    /// Sends it without its first `skip` bytes.
    fn send(&self, stream: &crate::stream::Stream, skip: usize) -> io::Result<()> {
        let head = self.head();
        let of_head = skip.min(head.len);
        stream.write_both(&head.bytes[of_head..head.len], &self.bytes()[skip - of_head..])
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Kept {
    /// A buffer of at least `len` bytes, and not many more, that was used before.
    fn take_free(&mut self, len: usize) -> Option<Vec<u8>> {
        let index = self.free.iter().rposition(|buffer| (len..=4 * len).contains(&buffer.len()))?;
        let buffer = self.free.swap_remove(index);
        self.free_bytes -= buffer.len();
        Some(buffer)
    }

    /// Keeps a buffer for the next chunks, `most` bytes of them in all.
    fn put_back(&mut self, buffer: Vec<u8>, most: usize) {
        if buffer.len() >= LEAST_FREE && self.free_bytes + buffer.len() <= most {
            self.free_bytes += buffer.len();
            self.free.push(buffer);
        }
    }

    /// Takes out the buffers beyond [`MOST_FREE`] if nothing is on its way.
    fn surplus(&mut self) -> Vec<Vec<u8>> {
        let mut surplus = Vec::new();
        while self.journal.kept() == 0
            && self.free_bytes > MOST_FREE
            && let Some(buffer) = self.free.pop()
        {
            self.free_bytes -= buffer.len();
            surplus.push(buffer);
        }
        surplus
    }
}

impl Stream {
    fn new(compress: CompressUse) -> Stream {
        Stream {
            kept: Mutex::default(),
            compressor: Mutex::new(Compressor { rule: Compression::new(compress), made: Vec::new() }),
            changed: Condvar::new(),
            turn: Mutex::default(),
            arrived: AtomicU64::new(0),
        }
    }

    /// A buffer of at least `len` bytes, whose contents are anything.
    fn buffer(&self, len: usize) -> Vec<u8> {
        let free = lock(&self.kept).take_free(len);
        free.unwrap_or_else(|| vec![0; len])
    }
}

impl Outbox {
    /// For a session that has `count` data connections and keeps up to `replay` bytes for them. (A bridge need not acknowledge less than [`ACKNOWLEDGE_OUT`] of each, so there is room for twice
    /// that at least.) `compress`: when data is compressed.
    pub(super) fn new(count: usize, replay: u64, compress: CompressUse) -> Arc<Outbox> {
        let count = count.max(1);
        let streams = (0..count).map(|_| Stream::new(compress)).collect();
        let limit = (replay / count as u64).max(2 * ACKNOWLEDGE_OUT);
        let downlink = (compress != CompressUse::Never).then(|| Mutex::new(Downlink::new(count)));
        Arc::new(Outbox { streams, limit, downlink, bytes: AtomicU64::new(0) })
    }

    /// Compresses a chunk for the stream that `lane` picks, if that pays.
    fn compressed(&self, lane: usize, plain: &[u8]) -> Option<Box<[u8]>> {
        let len = plain.len() as u64;
        let downlink = self.downlink.as_ref().filter(|_| len >= SAMPLE)?;
        let mut compressor = lock(&self.stream(lane).1.compressor);
        let Compressor { rule, made } = &mut *compressor;
        let mut trial = rule.tries(len, lock(downlink).rate())?;
        let mut pays = |plain| compress(&mut trial, plain, made, Instant::now());
        let (sample, rest) = plain.split_at(SAMPLE as usize);
        let compressed = pays(sample).and_then(|of| if rest.is_empty() { Some(of) } else { pays(plain) });
        rule.tried(&trial, len, compressed.is_some());
        compressed.map(|len| made[..len].into())
    }

    fn stream(&self, lane: usize) -> (usize, &Stream) {
        let number = lane % self.streams.len();
        (number, &self.streams[number])
    }

    /// Appends a chunk to the stream that `lane` picks. Waits for room. Gives the stream's number; the error:
    /// the session is over.
    fn append(&self, lane: usize, header: DataHeader, body: Body) -> Result<usize, Lost> {
        let (number, stream) = self.stream(lane);
        let chunk = Chunk { header, body };
        let (len, is_compressed) = (chunk.stream_len(), chunk.is_compressed());
        let mut kept = lock(&stream.kept);
        while !kept.over && kept.journal.kept() > 0 && kept.journal.kept() + len > self.limit {
            kept = stream.changed.wait(kept).unwrap_or_else(|e| e.into_inner());
        }
        if kept.over {
            return Err(Lost::new("the session is over"));
        }
        kept.journal.push(Arc::new(chunk));
        let end = kept.journal.end();
        let now = Instant::now();
        kept.distance.leaves(end, now);
        if let Some(downlink) = &self.downlink {
            // Under the lock, so that it learns of a stream's chunks in their order.
            lock(downlink).leaves(number, end, is_compressed, now);
        }
        drop(kept);
        self.bytes.fetch_add(header.len.into(), Ordering::Relaxed);
        Ok(number)
    }

    /// Sends what stream `number` has to send, if it has a connection. The error: the attempt whose connection broke.
    pub(super) fn send(&self, number: usize) -> Result<(), (u32, io::Error)> {
        let Some(stream) = self.streams.get(number) else { return Ok(()) };
        let mut turn = lock(&stream.turn);
        let Some(connection) = turn.clone() else { return Ok(()) };
        loop {
            let Some((chunk, skip)) = lock(&stream.kept).journal.take() else { return Ok(()) };
            if let Err(e) = chunk.send(&connection.stream, skip as usize) {
                *turn = None;
                return Err((connection.attempt, e));
            }
        }
    }

    /// The bridge has received the first `upto` bytes of stream `number`.
    pub(super) fn acknowledge(&self, number: usize, upto: u64) -> Result<(), BadAcknowledgement> {
        let Some(stream) = self.streams.get(number) else { return Ok(()) };
        let mut done = Vec::new();
        let mut kept = lock(&stream.kept);
        kept.journal.acknowledge(upto, |chunk| done.push(chunk))?;
        stream.arrived.fetch_max(upto, Ordering::Relaxed);
        kept.distance.arrives(upto, Instant::now);
        if let Some(downlink) = &self.downlink {
            lock(downlink).arrives(number, upto, Instant::now);
        }
        let most = if kept.distance.is_far() { self.limit as usize } else { MOST_FREE };
        // Those of the driver's are dropped without the lock.
        done.retain_mut(|chunk| match Arc::get_mut(chunk).map(|chunk| &mut chunk.body) {
            Some(Body::Own(buffer)) => {
                kept.put_back(std::mem::take(buffer), most);
                false
            }
            _ => true,
        });
        let surplus = kept.surplus();
        drop(kept);
        drop(surplus);
        stream.changed.notify_all();
        Ok(())
    }

    /// A buffer is not needed after all.
    fn give_back(&self, lane: usize, buffer: Vec<u8>) {
        lock(&self.stream(lane).1.kept).put_back(buffer, MOST_FREE);
    }

    /// Whether the bridge takes long to say what it has of the stream that `lane` picks.
    fn is_far(&self, lane: usize) -> bool {
        lock(&self.stream(lane).1.kept).distance.is_far()
    }

    /// Copies what the stream that `lane` picks holds of the driver's.
    fn copy_held(&self, lane: usize) {
        let (_, stream) = self.stream(lane);
        loop {
            let is_held = |chunk: &&mut Arc<Chunk>| matches!(chunk.body, Body::Held(_));
            let held = lock(&stream.kept).journal.pieces_mut().find(is_held).map(|chunk| Arc::clone(chunk));
            let Some(held) = held else { return };
            let bytes = held.bytes();
            let mut buffer = stream.buffer(bytes.len());
            buffer[..bytes.len()].copy_from_slice(bytes);
            let copy = Arc::new(Chunk { header: held.header, body: Body::Own(buffer) });
            // It may have been acknowledged meanwhile.
            let mut kept = lock(&stream.kept);
            let replaced = kept.journal.pieces_mut().find(|chunk| Arc::ptr_eq(chunk, &held));
            let replaced = replaced.map(|place| std::mem::replace(place, copy));
            drop(kept);
            drop(replaced);
        }
    }

    /// Stream `number` leaves its connection, which was shut down.
    pub(super) fn unplug(&self, number: usize) {
        self.streams.get(number).inspect(|stream| *lock(&stream.turn) = None);
    }

    /// Stream `number` goes on over a connection, behind the first `upto` bytes, which the bridge has.
    pub(super) fn plug(
        &self,
        number: usize,
        connection: Connection,
        upto: u64,
    ) -> Result<(), BadAcknowledgement> {
        let Some(stream) = self.streams.get(number) else { return Ok(()) };
        let mut turn = lock(&stream.turn);
        let mut done = Vec::new();
        let mut kept = lock(&stream.kept);
        kept.journal.resume(upto, |chunk| done.push(chunk))?;
        kept.distance.forget();
        if let Some(downlink) = &self.downlink {
            lock(downlink).resumes(number, upto);
        }
        drop(kept);
        *turn = Some(connection);
        drop(turn);
        stream.changed.notify_all();
        Ok(())
    }

    /// The session is over. Threads that wait for room return; those that send do once the connections are shut down.
    pub(super) fn close(&self) {
        for stream in &self.streams {
            let all = std::mem::replace(&mut *lock(&stream.kept), Kept { over: true, ..Kept::default() });
            drop(all);
            stream.changed.notify_all();
            // Whoever sends drops it by itself.
            match stream.turn.try_lock() {
                Ok(mut turn) => *turn = None,
                Err(TryLockError::Poisoned(turn)) => *turn.into_inner() = None,
                Err(TryLockError::WouldBlock) => {}
            }
        }
    }
}

/// What the streams to the bridge keep.
#[derive(Clone)]
pub struct Unacknowledged(Arc<Outbox>);

impl Unacknowledged {
    /// Copies what the lane keeps of memory that is [held](Held), and lets go of that: to be called when the
    /// memory may be needed and the thread has nothing to send.
    pub fn copy(&self, lane: usize) {
        self.0.copy_held(lane);
    }

    /// How many bytes the client has of the stream that the lane picks. While that grows, memory that is held
    /// comes free by itself.
    pub fn arrived(&self, lane: usize) -> u64 {
        self.0.stream(lane).1.arrived.load(Ordering::Relaxed)
    }
}

/// Data that a command writes, to be sent in chunks. When it is dropped the client is told that all has been sent, whatever that was.
pub struct Outgoing {
    way: Way,
    seq: u64,
    piece: u32,
    len: u64,
    sent: AtomicU64,
}

/// How the data goes.
enum Way {
    Tcp {
        client: Weak<TcpClient>,
        outbox: Arc<Outbox>,
    },
    /// By writes to this place of the client's memory.
    Verbs {
        client: Weak<VerbsClient>,
        at: Target,
    },
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outgoing(command {}, piece {}, {} bytes)", self.seq, self.piece, self.len)
    }
}

impl Outgoing {
    pub(super) fn new(
        client: Weak<TcpClient>,
        outbox: Arc<Outbox>,
        seq: u64,
        piece: u32,
        len: u64,
    ) -> Outgoing {
        Outgoing { way: Way::Tcp { client, outbox }, seq, piece, len, sent: AtomicU64::new(0) }
    }

    pub(super) fn over_verbs(client: Weak<VerbsClient>, seq: u64, at: Target, len: u64) -> Outgoing {
        Outgoing { way: Way::Verbs { client, at }, seq, piece: 0, len, sent: AtomicU64::new(0) }
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The lane whose data connection carries the least that has not arrived. For a thread that sends over all
    /// of them in turn: the slowest one must not hold up the others.
    pub fn idlest_lane(&self) -> usize {
        match &self.way {
            Way::Tcp { outbox, .. } => {
                let kept = |lane: &usize| lock(&outbox.stream(*lane).1.kept).journal.kept();
                (0..outbox.streams.len()).min_by_key(kept).unwrap_or(0)
            }
            Way::Verbs { .. } => 0,
        }
    }

    /// A buffer of `len` bytes at most (fewer where the transport's are shorter) that goes out without being
    /// copied, for [`send_lent`](Self::send_lent) with the same `lane`. Its contents are anything. May wait
    /// until one is free.
    pub fn lend(&self, lane: usize, len: usize) -> Result<Lent, Lost> {
        match &self.way {
            Way::Tcp { outbox, .. } => {
                let len = len.min(MAX_DATA as usize);
                let buffer = outbox.stream(lane).1.buffer(len);
                Ok(Lent(Lending::Own { buffer, len }))
            }
            Way::Verbs { client, .. } => {
                let client = client.upgrade().ok_or_else(|| Lost::new("the session is over"))?;
                Ok(Lent(Lending::Registered(client.lend(len)?)))
            }
        }
    }

    /// Sends a buffer's bytes, which belong at `offset`, over the data connection that `lane` picks, where
    /// there are several: chunks of several lanes travel side by side. Returns when they have been handed to
    /// the network, or will be once the session has a link again. Bytes beyond the data's end are not sent.
    pub fn send_lent(&self, lane: usize, offset: u64, lent: Lent) -> Result<(), Lost> {
        let room = self.len.saturating_sub(offset).min(lent.len() as u64) as usize;
        if room == 0 {
            return Ok(());
        }
        match (&self.way, lent.0) {
            (Way::Verbs { at, .. }, Lending::Registered(lent)) => {
                lent.send(self.seq, at.behind(offset), room)?;
                self.sent.fetch_add(room as u64, Ordering::Relaxed);
                Ok(())
            }
            (Way::Tcp { outbox, .. }, Lending::Own { buffer, .. }) => {
                let body = match outbox.compressed(lane, &buffer[..room]) {
                    Some(compressed) => {
                        outbox.give_back(lane, buffer);
                        Body::Compressed(compressed)
                    }
                    None => Body::Own(buffer),
                };
                self.send_chunk(lane, offset, room, body)
            }
            // A buffer of another session's.
            _ => Ok(()),
        }
    }

    /// Sends all of the data, which a CPU has made: a table, say. Nothing of it counts as copied.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Lost> {
        let mut at = 0;
        while at < bytes.len() {
            let mut lent = self.lend(0, bytes.len() - at)?;
            let room = lent.bytes();
            let end = at + room.len();
            room.copy_from_slice(&bytes[at..end]);
            self.send_lent(0, at as u64, lent)?;
            at = end;
        }
        Ok(())
    }

    /// Sends bytes of the driver's, which belong at `offset`, from where they are. Otherwise as
    /// [`send_lent`](Self::send_lent). They may have to be sent again, so they are held for longer than this
    /// takes, unless they are short or the link is long.
    pub fn send_held(&self, lane: usize, offset: u64, held: Box<dyn Held>) -> Result<(), Lost> {
        let bytes = held.bytes();
        let room = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        match &self.way {
            _ if room == 0 => Ok(()),
            Way::Verbs { client, at } => {
                let Some(client) = client.upgrade() else { return Err(Lost::new("the session is over")) };
                client.send(self.seq, at.behind(offset), &bytes[..room])?;
                self.sent.fetch_add(room as u64, Ordering::Relaxed);
                Ok(())
            }
            Way::Tcp { outbox, .. } => {
                let (mut held, mut at) = (Some(held), 0);
                while let Some(all) = held.take() {
                    let end = room.min(at + MAX_DATA as usize);
                    let bytes = &all.bytes()[at..end];
                    let may_be_held = bytes.len() == room && room >= HELD_FROM;
                    let body = match outbox.compressed(lane, bytes) {
                        Some(compressed) => Body::Compressed(compressed),
                        None if may_be_held && !outbox.is_far(lane) => {
                            return self.send_chunk(lane, offset, room, Body::Held(all));
                        }
                        None => {
                            let mut buffer = outbox.stream(lane).1.buffer(bytes.len());
                            buffer[..bytes.len()].copy_from_slice(bytes);
                            Body::Own(buffer)
                        }
                    };
                    // The driver need not wait until the last bytes are sent.
                    held = Some(all).filter(|_| end < room);
                    self.send_chunk(lane, offset + at as u64, end - at, body)?;
                    at = end;
                }
                Ok(())
            }
        }
    }

    /// What was sent and is kept. `None`: the transport keeps nothing.
    pub fn unacknowledged(&self) -> Option<Unacknowledged> {
        match &self.way {
            Way::Tcp { outbox, .. } => Some(Unacknowledged(Arc::clone(outbox))),
            Way::Verbs { .. } => None,
        }
    }

    /// Sends the first `len` bytes of `body`, at most [`MAX_DATA`].
    fn send_chunk(&self, lane: usize, offset: u64, len: usize, body: Body) -> Result<(), Lost> {
        let Way::Tcp { client, outbox } = &self.way else { return Ok(()) };
        let header = DataHeader { seq: self.seq, offset, piece: self.piece, len: len as u32 };
        let stream = outbox.append(lane, header, body)?;
        self.sent.fetch_add(len as u64, Ordering::Relaxed);
        if let (Err((attempt, e)), Some(client)) = (outbox.send(stream), client.upgrade()) {
            client.broken(attempt, Some(&e));
        }
        Ok(())
    }
}

/// A buffer of the transport's, to be filled and sent. Dropped, it is free again.
pub struct Lent(Lending);

enum Lending {
    /// The first `len` bytes of this one.
    Own {
        buffer: Vec<u8>,
        len: usize,
    },
    Registered(Registered),
}

impl Lent {
    fn len(&self) -> usize {
        match &self.0 {
            Lending::Own { len, .. } => *len,
            Lending::Registered(lent) => lent.len,
        }
    }

    /// Its bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Lending::Own { buffer, len } => &mut buffer[..*len],
            Lending::Registered(lent) => lent.bytes(),
        }
    }
}

/// A buffer that is registered with the RDMA device.
pub(super) struct Registered {
    client: Arc<VerbsClient>,
    number: usize,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is its owner's alone until it is sent or dropped.
unsafe impl Send for Registered {}

impl Registered {
    /// # Safety
    /// `len` bytes at `at` are initialized, belong to buffer `number` of `client`, and are nobody else's until that buffer is given back.
    pub(super) unsafe fn new(
        client: Arc<VerbsClient>,
        number: usize,
        at: NonNull<u8>,
        len: usize,
    ) -> Registered {
        Registered { client, number, at, len }
    }

    /// Its bytes.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the promise of `new`.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// Writes the first `len` bytes to a place of the client's memory.
    pub(super) fn send(self, seq: u64, at: Target, len: usize) -> Result<(), Lost> {
        let lent = std::mem::ManuallyDrop::new(self);
        // SAFETY: taken out once, of a value that is not dropped.
        let client = unsafe { std::ptr::read(&lent.client) };
        client.send_buffer(seq, at, lent.number, len)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.client.give_back(self.number);
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        let sent = self.sent.load(Ordering::Acquire);
        match &self.way {
            Way::Tcp { client, .. } => {
                if let Some(client) = client.upgrade() {
                    client.data_sent(self.seq, sent);
                }
            }
            Way::Verbs { client, .. } => {
                if let Some(client) = client.upgrade() {
                    client.data_sent(self.seq, sent);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (a, Connection { attempt: 0, stream: Arc::new(listener.accept().unwrap().0.into()) })
    }

    fn outgoing(outbox: &Arc<Outbox>, len: u64) -> Outgoing {
        Outgoing::new(Weak::new(), Arc::clone(outbox), 7, 0, len)
    }

    #[test]
    fn data_waits_for_a_connection_and_is_sent_again_from_any_byte() {
        let outbox = Outbox::new(1, 0, CompressUse::Never);
        outgoing(&outbox, 5).write(b"hello").unwrap();
        // Less than before, too: another process of the bridge knows of whole chunks only.
        for upto in [0, 3, HEADER + 2, HEADER] {
            let (mut ours, theirs) = pair();
            outbox.plug(0, theirs, upto as u64).unwrap();
            outbox.send(0).unwrap();
            let mut received = vec![0; HEADER + 5 - upto];
            ours.read_exact(&mut received).unwrap();
            assert_eq!(&received[received.len() - 3..], b"llo");
            outbox.unplug(0);
        }
        assert!(outbox.acknowledge(0, HEADER as u64 + 6).is_err(), "so much was not sent");
        outbox.acknowledge(0, HEADER as u64 + 5).unwrap();
        assert!(outbox.plug(0, pair().1, HEADER as u64).is_err(), "it had the whole chunk");
    }

    #[test]
    fn what_is_kept_is_bounded_and_room_comes_with_acknowledgements() {
        const LEN: usize = 256 << 10;
        let outbox = Outbox::new(1, 0, CompressUse::Never);
        let (mut ours, theirs) = pair();
        outbox.plug(0, theirs, 0).unwrap();
        let reading = std::thread::spawn(move || std::io::copy(&mut ours, &mut std::io::sink()));
        let bytes = vec![1; LEN];
        let mut sent = 0;
        while lock(&outbox.streams[0].kept).journal.kept() + (LEN as u64 + HEADER as u64) <= outbox.limit {
            outgoing(&outbox, LEN as u64).write(&bytes).unwrap();
            sent += LEN as u64 + HEADER as u64;
        }
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| outgoing(&outbox, LEN as u64).write(&bytes));
            assert!(!waiting.is_finished());
            outbox.acknowledge(0, sent).unwrap();
            waiting.join().unwrap().unwrap();
        });
        assert!(!lock(&outbox.streams[0].kept).free.is_empty());
        outbox.close();
        reading.join().unwrap().unwrap();
    }

    #[test]
    fn a_connection_whose_data_does_not_arrive_is_sent_nothing_more() {
        const LEN: usize = 1000;
        let outbox = Outbox::new(3, 0, CompressUse::Never);
        let connect = |lane| {
            let (ours, theirs) = pair();
            outbox.plug(lane, theirs, 0).unwrap();
            ours
        };
        let _ends: Vec<TcpStream> = (0..3).map(connect).collect();
        let outgoing = outgoing(&outbox, 1 << 40);
        let mut sent = [0; 3];
        for at in 0..30 {
            let lane = outgoing.idlest_lane();
            let lent = outgoing.lend(lane, LEN).unwrap();
            outgoing.send_lent(lane, at * LEN as u64, lent).unwrap();
            sent[lane] += 1;
            // Data arrives late at first, and of the last connection never.
            for lane in if at < 5 { 0..0 } else { 0..2 } {
                outbox.acknowledge(lane, sent[lane] * (HEADER + LEN) as u64).unwrap();
            }
        }
        assert_eq!(sent, [26, 2, 2]);
    }

    #[test]
    fn who_waits_for_room_is_let_go_at_the_end() {
        let outbox = Outbox::new(1, 0, CompressUse::Never);
        let bytes = vec![1; 4 << 20];
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let outgoing = outgoing(&outbox, 64 << 20);
                (0..16).try_for_each(|_| outgoing.write(&bytes))
            });
            while outbox.bytes.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            outbox.close();
            assert!(sending.join().unwrap().is_err());
        });
    }

    /// Memory that a test looks after.
    struct Slot(&'static [u8], Arc<AtomicU64>);

    impl Held for Slot {
        fn bytes(&self) -> &[u8] {
            self.0
        }
    }

    impl Drop for Slot {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn over_a_long_link_nothing_is_held_and_buffers_are_kept_for_as_long_as_data_flows() {
        const LEN: usize = 1 << 20;
        static BYTES: [u8; LEN] = [5; LEN];
        let outbox = Outbox::new(1, 64 << 20, CompressUse::Never);
        let (mut ours, theirs) = pair();
        outbox.plug(0, theirs, 0).unwrap();
        let reading = std::thread::spawn(move || std::io::copy(&mut ours, &mut std::io::sink()));
        let free: Arc<AtomicU64> = Arc::default();
        let outgoing = outgoing(&outbox, 16 * LEN as u64);
        let hold = |number: usize| {
            let held = Box::new(Slot(&BYTES, Arc::clone(&free)));
            outgoing.send_held(0, (number * LEN) as u64, held).unwrap();
        };
        let whole = (HEADER + LEN) as u64;
        let kept = || lock(&outbox.streams[0].kept);
        hold(0);
        assert_eq!(free.load(Ordering::Relaxed), 0, "it is not known yet how far the bridge is");
        // Only the clock tells the module how far it is.
        kept().distance.watched = Some((whole, Instant::now().checked_sub(FAR).unwrap()));
        outbox.acknowledge(0, whole).unwrap();
        assert!(kept().distance.is_far());
        (1..16).for_each(hold);
        assert_eq!(free.load(Ordering::Relaxed), 16, "all were copied, the first one has arrived");
        outbox.acknowledge(0, 15 * whole).unwrap();
        assert_eq!(kept().free_bytes, 14 * LEN, "the next chunks have their buffers");
        outbox.acknowledge(0, 16 * whole).unwrap();
        assert!(kept().free_bytes <= MOST_FREE);
        outbox.close();
        reading.join().unwrap().unwrap();
    }

    /// The bytes that come behind the first `upto` of the stream, `count` of them.
    fn sent_again(outbox: &Outbox, upto: u64, count: usize) -> Vec<u8> {
        outbox.unplug(0);
        let (mut ours, theirs) = pair();
        outbox.plug(0, theirs, upto).unwrap();
        outbox.send(0).unwrap();
        let mut received = vec![0; count];
        ours.read_exact(&mut received).unwrap();
        received
    }

    #[test]
    fn what_was_compressed_is_kept_as_it_was_sent_and_memory_of_the_drivers_is_free_at_once() {
        const LEN: usize = 256 << 10;
        static BYTES: [u8; LEN] = [5; LEN];
        let outbox = Outbox::new(1, 0, CompressUse::Always);
        let free: Arc<AtomicU64> = Arc::default();
        let whole = outgoing(&outbox, 2 * LEN as u64 + 100);
        whole.send_held(0, 0, Box::new(Slot(&BYTES, Arc::clone(&free)))).unwrap();
        assert_eq!(free.load(Ordering::Relaxed), 1);
        let mut lent = whole.lend(0, LEN).unwrap();
        lent.bytes().fill(6);
        whole.send_lent(0, LEN as u64, lent).unwrap();
        // Its buffer is the next one.
        let mut lent = whole.lend(0, LEN).unwrap();
        assert!(lock(&outbox.streams[0].kept).free.is_empty() && lent.bytes() == [6; LEN]);
        drop(lent);
        // Short data is left as it is.
        whole.send_held(0, 2 * LEN as u64, Box::new(Slot(&BYTES[..100], Arc::clone(&free)))).unwrap();
        let kept = lock(&outbox.streams[0].kept).journal.kept();
        assert!(kept < 5000, "{kept} bytes for {LEN} twice");
        assert_eq!(outbox.bytes.load(Ordering::Relaxed), 2 * LEN as u64 + 100);
        let stream = sent_again(&outbox, 0, kept as usize);
        let mut rest = stream.as_slice();
        for (offset, byte) in [(0, 5), (LEN, 6)] {
            let header =
                DataHeader { seq: 7, offset: offset as u64, piece: 0, len: LEN as u32 | COMPRESSED_FLAG };
            let (head, behind) = rest.split_at(HEADER + 4);
            assert_eq!(head[..HEADER], *header.as_bytes());
            let len = u32::from_le_bytes(head[HEADER..].try_into().unwrap());
            let (compressed, behind) = behind.split_at(len as usize);
            assert!(lz4_flex::block::decompress(compressed, LEN).unwrap() == [byte; LEN]);
            rest = behind;
        }
        assert_eq!(rest.len(), HEADER + 100);
        // Cut anywhere, it goes on with the same bytes.
        for upto in 0..kept {
            let again = sent_again(&outbox, upto, (kept - upto) as usize);
            assert!(again == stream[upto as usize..], "cut behind {upto} bytes");
            if upto % 100 == 99 {
                // A bridge that has a chunk wholly need not get any of it again.
                outbox.acknowledge(0, upto + 1).unwrap();
            }
        }
    }

    #[test]
    fn nothing_is_compressed_while_the_link_is_not_known_or_once_it_is_known_as_fast() {
        const LEN: usize = 1 << 20;
        let outbox = Outbox::new(1, 64 << 20, CompressUse::Auto);
        let (bytes, whole) = (vec![1; LEN], outgoing(&outbox, 1 << 40));
        let mut at = 0;
        let mut kept_of = |rate: Option<u64>| {
            *lock(outbox.downlink.as_ref().unwrap()) = Downlink::that_carries(rate);
            let before = lock(&outbox.streams[0].kept).journal.kept();
            whole.send_held(0, at, Box::new(Slot(Vec::leak(bytes.clone()), Arc::default()))).unwrap();
            at += LEN as u64;
            lock(&outbox.streams[0].kept).journal.kept() - before
        };
        let plain = (HEADER + LEN) as u64;
        assert_eq!([kept_of(None), kept_of(Some(1 << 30)), kept_of(Some(u64::MAX))], [plain; 3]);
        assert!(kept_of(Some(1_000_000)) < plain / 100);
        assert_eq!([kept_of(None), kept_of(Some(1 << 30))], [plain; 2]);
        let never = Outbox::new(1, 64 << 20, CompressUse::Never);
        outgoing(&never, LEN as u64).write(&bytes).unwrap();
        assert_eq!(lock(&never.streams[0].kept).journal.kept(), plain);
    }

    #[test]
    fn the_shortest_time_says_how_far_the_bridge_is_until_the_path_may_be_another() {
        let begin = Instant::now();
        let mut distance = Distance::default();
        assert!(!distance.is_far());
        distance.leaves(10, begin);
        distance.leaves(20, begin + FAR * 5);
        distance.arrives(9, || unreachable!("the watched one has not arrived"));
        distance.arrives(10, || begin + FAR);
        assert!(distance.is_far());
        // A short time counts, a longer one later does not.
        distance.leaves(30, begin + FAR);
        distance.arrives(40, || begin + FAR + FAR / 2);
        assert!(!distance.is_far());
        distance.leaves(50, begin + FAR * 2);
        distance.arrives(50, || begin + FAR * 9);
        assert!(!distance.is_far());
        let later = begin + FAR * 9 + FORGET * 2;
        distance.leaves(60, later);
        distance.arrives(60, || later + FAR);
        assert!(distance.is_far());
    }

    #[test]
    fn memory_is_held_until_its_bytes_have_arrived_or_were_copied() {
        const LEN: usize = HELD_FROM;
        static BYTES: [[u8; LEN]; 3] = [[1; LEN], [2; LEN], [3; LEN]];
        let outbox = Outbox::new(1, 0, CompressUse::Never);
        let (mut ours, theirs) = pair();
        outbox.plug(0, theirs, 0).unwrap();
        let free: Arc<AtomicU64> = Arc::default();
        let given_back = || free.load(Ordering::Relaxed);
        let outgoing = outgoing(&outbox, 3 * LEN as u64 + 2);
        let hold = |offset: usize, bytes| {
            outgoing.send_held(0, offset as u64, Box::new(Slot(bytes, Arc::clone(&free)))).unwrap();
        };
        let whole = HEADER + LEN;
        std::thread::scope(|scope| {
            let reading = scope.spawn(move || {
                let mut received = vec![0; 3 * whole];
                ours.read_exact(&mut received).unwrap();
                received
            });
            BYTES.iter().enumerate().for_each(|(number, bytes)| hold(number * LEN, bytes));
            let received = reading.join().unwrap();
            let arrived = || outgoing.unacknowledged().unwrap().arrived(0);
            assert_eq!((received[HEADER], received[whole - 1], given_back(), arrived()), (1, 1, 0, 0));
            outbox.acknowledge(0, whole as u64).unwrap();
            assert_eq!((given_back(), arrived()), (1, whole as u64));
            outgoing.unacknowledged().unwrap().copy(0);
            assert_eq!(given_back(), 3);
            // The copies are sent again.
            outbox.unplug(0);
            let (mut ours, theirs) = pair();
            outbox.plug(0, theirs, whole as u64 + 1).unwrap();
            let reading = scope.spawn(move || {
                let mut again = vec![0; 2 * whole - 1];
                ours.read_exact(&mut again).unwrap();
                again
            });
            outbox.send(0).unwrap();
            assert!(reading.join().unwrap() == received[whole + 1..]);
        });
        // What is beyond the data's end is neither sent nor held, nor is short data held.
        hold(3 * LEN + 2, b"none");
        assert_eq!(given_back(), 4);
        hold(3 * LEN, b"xy");
        assert_eq!(given_back(), 5);
        hold(0, &BYTES[0]);
        assert_eq!(given_back(), 5);
        outbox.close();
        assert_eq!(given_back(), 6);
    }
}
