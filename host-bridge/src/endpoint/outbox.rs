//! Bulk data that goes out over data connections, and is kept until the bridge has it.
//!
//! A connection may be lost at any byte, so what was sent is kept until the bridge has it. It is kept where
//! it is: in a buffer that the driver was [lent](super::Outgoing::lend), or in the driver's own memory, which
//! it [lets be sent in place](super::Outgoing::send_held). Such memory may be scarce, so its owner can have
//! the transport [copy](Unacknowledged::copy) what it still holds when there is nothing better to do. What is
//! kept is bounded: whoever has more to send waits.
//!
//! The driver's memory would limit what is on its way over a long link. So where the way to the bridge is
//! long, data is copied before it is sent.
//!
//! What is for the same bytes of the client's memory goes out in one stream, in order, as long as some of it
//! may be under way ([`routes`]).
//!
//! Over a slow link data is compressed where that takes less time ([`compression`](crate::compression)), by
//! the thread that sends it and before anything else happens to it. Then its compressed bytes alone are kept:
//! they are what may have to be sent again, and are never made twice.

mod downlink;
mod routes;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use protocol::link::{ACKNOWLEDGE_OUT, COMPRESSED_FLAG, DataHeader, MAX_DATA};
use zerocopy::IntoBytes;

use self::downlink::Downlink;
use self::routes::Routes;
pub(super) use self::routes::{At, begin, behind};
use super::end::Lost;
use super::link::Connection;
use crate::compression::{CompressUse, Compression, SAMPLE, compress};
use crate::framing::{BadAcknowledgement, shortest_round_trip};
use crate::journal::{Journal, Piece};

/// The streams of the data connections to the bridge.
pub(super) struct Outbox {
    streams: Vec<Stream>,
    /// Most bytes that one stream keeps.
    limit: u64,
    /// `None`: there is one stream.
    routes: Option<Mutex<Routes>>,
    /// How fast the link is. `None`: nothing is compressed.
    downlink: Option<Mutex<Downlink>>,
    pub(super) bytes: AtomicU64,
    /// Bytes that were copied to be kept.
    pub(super) copied: AtomicU64,
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
    /// The way over its connection is long, as the kernel knows it.
    far: AtomicBool,
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

/// How far the bridge is, as far as its acknowledgements tell: how long a chunk takes until it is
/// acknowledged, without the time for its own bytes, which is a matter of the link's rate and not of its
/// length. The shortest time of recent chunks. One at a time is watched, and only if nothing else of the
/// stream is on its way when it leaves: what comes behind it tells how long bytes take.
///
/// The kernel knows the length of the way to whoever it is connected with ([`Stream::far`]), which may be a
/// relay before the bridge.
#[derive(Default)]
struct Distance {
    watched: Option<Watched>,
    shortest: Option<Duration>,
    /// When something last arrived.
    arrived: Option<Instant>,
}

/// A chunk until it is known how long it took.
struct Watched {
    /// Where in the stream it begins and ends, and when it was given out.
    begin: u64,
    end: u64,
    since: Instant,
    /// How much of the stream had arrived when all of it had, and when that was.
    there: Option<(u64, Instant)>,
}

/// Above this time, driver memory that waits for the bridge would hold up the driver. Below, what a copy
/// costs is more.
const FAR: Duration = Duration::from_millis(1);
/// After so long without data the session may have another path.
const FORGET: Duration = Duration::from_secs(10);
/// The time for so many bytes does not count.
const SHORT: u64 = 64 << 10;

impl Distance {
    pub(super) fn is_far(&self) -> bool {
        self.shortest.is_some_and(|shortest| shortest >= FAR)
    }

    /// A chunk is given out that is the stream's bytes from `begin` to `end`, while nothing else of it is on
    /// its way.
    fn leaves(&mut self, begin: u64, end: u64, now: Instant) {
        if self.arrived.is_some_and(|arrived| now.saturating_duration_since(arrived) > FORGET) {
            *self = Distance::default();
        }
        self.watched = Some(Watched { begin, end, since: now, there: None });
    }

    /// The bridge has the first `upto` bytes. `more`: others are on their way.
    fn arrives(&mut self, upto: u64, more: bool, now: Instant) {
        self.arrived = Some(now);
        let Some(watched) = self.watched.as_mut().filter(|watched| watched.end <= upto) else { return };
        let (there, then) = *watched.there.get_or_insert((upto, now));
        let (own, behind) = (there - watched.begin, upto.saturating_sub(there));
        if more && behind < own && own > SHORT {
            return;
        }
        let mut time = then.saturating_duration_since(watched.since);
        self.watched = None;
        if own > SHORT && behind > 0 {
            let bytes_take =
                now.saturating_duration_since(then).mul_f64(1f64.min(own as f64 / behind as f64));
            time = time.saturating_sub(bytes_take);
        } else if own > SHORT && time >= FAR {
            // Its own bytes may have taken all of that.
            return;
        }
        self.shortest = Some(self.shortest.map_or(time, |shortest| shortest.min(time)));
    }

    /// The connection has changed.
    fn forget(&mut self) {
        *self = Distance::default();
    }
}

/// A connection that has carried fewer bytes sends few in a round trip.
const CARRIED: u64 = 256 << 10;
/// What one sends in its first round trip.
const FIRST: usize = 14 << 10;

/// Most bytes of buffers that a stream has for its next chunks: what a bridge acknowledges at a time, and a
/// little more.
const MOST_FREE: usize = 2 * ACKNOWLEDGE_OUT as usize;
/// Smaller buffers are not worth keeping.
const LEAST_FREE: usize = 4 << 10;

/// A header and its bytes.
struct Chunk {
    header: DataHeader,
    body: Body,
}

/// The stream that a chunk takes, and which bytes it is for. It has to be [appended](Outbox::append).
#[must_use]
pub(super) struct Route {
    stream: usize,
    at: At,
    /// How many bytes.
    pub(super) len: usize,
}

/// What stands before a chunk's bytes: a header, and of compressed ones their number.
struct Head {
    bytes: [u8; HEADER + size_of::<u32>()],
    len: usize,
}

/// Where a chunk's bytes are.
pub(super) enum Body {
    /// In the first bytes of a buffer of this module's.
    Own(Vec<u8>),
    Held(Box<dyn Held>),
    /// All of these are sent in place of the chunk's.
    Compressed(Box<[u8]>),
}

impl Body {
    /// Its bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Body::Own(bytes) => bytes,
            Body::Held(held) => held.bytes(),
            Body::Compressed(bytes) => bytes,
        }
    }
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
        match &self.body {
            Body::Compressed(bytes) => bytes,
            plain => &plain.bytes()[..self.header.len as usize],
        }
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
            far: AtomicBool::new(false),
        }
    }

    /// Whether the way to the bridge is long. `kept`: what this keeps.
    fn is_far(&self, kept: &Kept) -> bool {
        self.far.load(Ordering::Relaxed) || kept.distance.is_far()
    }

    /// A buffer of at least `len` bytes, whose contents are anything.
    fn buffer(&self, len: usize) -> Vec<u8> {
        let free = lock(&self.kept).take_free(len);
        free.unwrap_or_else(|| vec![0; len])
    }
}

impl Outbox {
    /// For a session that has `count` data connections and keeps up to `replay` bytes for them. (A bridge
    /// need not acknowledge less than [`ACKNOWLEDGE_OUT`] of each, so beside that there is room for the
    /// longest chunk at least.) `compress`: when data is compressed.
    pub(super) fn new(count: usize, replay: u64, compress: CompressUse) -> Arc<Outbox> {
        let count = count.max(1);
        let streams = (0..count).map(|_| Stream::new(compress)).collect();
        let limit = (replay / count as u64).max(ACKNOWLEDGE_OUT + (HEADER as u64 + u64::from(MAX_DATA)));
        let downlink = (compress != CompressUse::Never).then(|| Mutex::new(Downlink::new(count)));
        let routes = (count > 1).then(|| Mutex::new(Routes::new()));
        Arc::new(Outbox {
            streams,
            limit,
            routes,
            downlink,
            bytes: AtomicU64::new(0),
            copied: AtomicU64::new(0),
        })
    }

    /// Compresses a chunk for the stream that `lane` picks, if that pays.
    pub(super) fn compressed(&self, lane: usize, plain: &[u8]) -> Option<Box<[u8]>> {
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

    /// The stream for the first bytes from `at` of the client's memory on, and for how many of `len`: the one
    /// that `lane` picks, unless what is under way for some of them is in another one.
    pub(super) fn route(&self, lane: usize, at: At, len: usize) -> Route {
        let wish = lane % self.streams.len();
        let Some(routes) = &self.routes else { return Route { stream: wish, at, len } };
        let arrived = |stream: usize| self.streams[stream].arrived.load(Ordering::Relaxed);
        let (stream, len) = lock(routes).choose(wish, at, len as u64, arrived);
        Route { stream, at, len: len as usize }
    }

    /// Whether the driver's memory that goes this way may be held until it has arrived. Only the thread whose
    /// lane picks a stream looks after what that holds ([`Unacknowledged`]).
    pub(super) fn may_hold(&self, lane: usize, route: &Route) -> bool {
        route.stream == lane % self.streams.len() && !self.is_far(lane)
    }

    /// A copy of the first bytes of these, as many as go this way.
    pub(super) fn copy(&self, route: &Route, bytes: &[u8]) -> Body {
        let mut buffer = self.streams[route.stream].buffer(route.len);
        buffer[..route.len].copy_from_slice(&bytes[..route.len]);
        self.copied.fetch_add(route.len as u64, Ordering::Relaxed);
        Body::Own(buffer)
    }

    /// Appends a chunk to its stream. Waits for room. Gives the stream's number; the error: the session is
    /// over.
    pub(super) fn append(&self, route: Route, header: DataHeader, body: Body) -> Result<usize, Lost> {
        let Route { stream: number, at, len: of_memory } = route;
        let stream = &self.streams[number];
        let chunk = Chunk { header, body };
        let (len, is_compressed) = (chunk.stream_len(), chunk.is_compressed());
        let mut kept = lock(&stream.kept);
        while !kept.over && kept.journal.kept() > 0 && kept.journal.kept() + len > self.limit {
            kept = stream.changed.wait(kept).unwrap_or_else(|e| e.into_inner());
        }
        if kept.over {
            return Err(Lost::new("the session is over"));
        }
        let (begin, is_alone) = (kept.journal.end(), kept.journal.kept() == 0);
        kept.journal.push(Arc::new(chunk));
        let end = kept.journal.end();
        let now = Instant::now();
        if is_alone {
            kept.distance.leaves(begin, end, now);
        }
        if let Some(downlink) = &self.downlink {
            // Under the lock, so that it learns of a stream's chunks in their order.
            lock(downlink).leaves(number, end, is_compressed, now);
        }
        drop(kept);
        if let Some(routes) = &self.routes {
            lock(routes).queued(at, of_memory as u64, end);
        }
        self.bytes.fetch_add(header.len.into(), Ordering::Relaxed);
        Ok(number)
    }

    /// Sends what stream `number` has to send, if it has a connection. The error: the attempt whose
    /// connection broke.
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

    /// Whether stream `number` has something to send.
    pub(super) fn waits(&self, number: usize) -> bool {
        self.streams.get(number).is_some_and(|stream| lock(&stream.kept).journal.next().is_some())
    }

    /// The bridge has received the first `upto` bytes of stream `number`.
    pub(super) fn acknowledge(&self, number: usize, upto: u64) -> Result<(), BadAcknowledgement> {
        let Some(stream) = self.streams.get(number) else { return Ok(()) };
        let mut done = Vec::new();
        let mut kept = lock(&stream.kept);
        kept.journal.acknowledge(upto, |chunk| done.push(chunk))?;
        stream.arrived.fetch_max(upto, Ordering::Relaxed);
        let more = kept.journal.kept() > 0;
        kept.distance.arrives(upto, more, Instant::now());
        if let Some(downlink) = &self.downlink {
            lock(downlink).arrives(number, upto, Instant::now);
        }
        let most = if stream.is_far(&kept) { self.limit as usize } else { MOST_FREE };
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

    /// The number of streams.
    pub(super) fn lanes(&self) -> usize {
        self.streams.len()
    }

    /// The lane whose stream keeps the least that has not arrived.
    pub(super) fn idlest_lane(&self) -> usize {
        let kept = |lane: &usize| lock(&self.stream(*lane).1.kept).journal.kept();
        (0..self.streams.len()).min_by_key(kept).unwrap_or(0)
    }

    /// A buffer of at least `len` bytes for the stream that `lane` picks, whose contents are anything.
    pub(super) fn buffer(&self, lane: usize, len: usize) -> Vec<u8> {
        self.stream(lane).1.buffer(len)
    }

    /// Something is not needed after all.
    pub(super) fn give_back(&self, lane: usize, body: Body) {
        if let Body::Own(buffer) = body {
            lock(&self.stream(lane).1.kept).put_back(buffer, MOST_FREE);
        }
    }

    /// In parts of how many bytes to send so many, over all streams in turn from the one that `lane` picks.
    /// `None`: better all over that one.
    pub(super) fn part(&self, lane: usize, len: usize) -> Option<usize> {
        let (_, stream) = self.stream(lane);
        let fits = stream.far.load(Ordering::Relaxed) && len > FIRST && len <= CARRIED as usize;
        let fresh = fits && lock(&stream.kept).journal.end() < CARRIED;
        let part = len.div_ceil(self.streams.len()).max(FIRST);
        (fresh && part < len).then_some(part)
    }

    /// Whether the way of the stream that `lane` picks is long.
    fn is_far(&self, lane: usize) -> bool {
        let (_, stream) = self.stream(lane);
        stream.is_far(&lock(&stream.kept))
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
            self.copied.fetch_add(bytes.len() as u64, Ordering::Relaxed);
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
        stream.arrived.fetch_max(upto, Ordering::Relaxed);
        kept.distance.forget();
        if let Some(downlink) = &self.downlink {
            lock(downlink).resumes(number, upto);
        }
        drop(kept);
        let time = shortest_round_trip(connection.stream.as_fd());
        stream.far.store(time.is_some_and(|time| time >= FAR), Ordering::Relaxed);
        *turn = Some(connection);
        drop(turn);
        stream.changed.notify_all();
        Ok(())
    }

    /// The session is over. Threads that wait for room return; those that send do once the connections are
    /// shut down.
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
pub struct Unacknowledged(pub(super) Arc<Outbox>);

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
