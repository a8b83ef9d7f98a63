//! Bulk data that comes in over data connections, and where it lands.
//!
//! ```text
//!  connection ──reader──▶ header (seq, piece, offset, len) ──▶ the landing that the command's driver gave ──▶ bytes, in place
//! ```
//!
//! A reader thread for each connection reads a chunk's header, asks the command's [`Landing`] for room, and receives straight into it. No chunk waits in a connection for its
//! stream to go on: everything behind it would wait as well, perhaps even what the stream waits for. So the bridge sends what there is room for:
//! - what was **granted**: a landing says how far it has room ([`Incoming::land`]), and as room comes free, how far then ([`Grants`]);
//! - a little of each piece **eagerly**, so that short data need not wait for a grant. Where a command's turn has not come, or where its landing has no room yet, eager
//!   bytes are set aside in memory; the session's eager bytes are bounded, and exceeding the bound is a protocol violation. Over a long distance a bridge sends most of its
//!   data so: grants come a round trip late there.
//!
//! A bridge that sends more than it may, without saying that it is eager, waits: in its connection.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use protocol::link::{
    DATA_FLAGS, DataGrant, DataHeader, EAGER, EAGER_FLAG, EAGER_PIECE, HASH_FLAG, KEEP_FLAG, KNOWN_FLAG,
    MAX_DATA,
};
use protocol::polling;
use zerocopy::{FromZeros, IntoBytes};

use super::Lost;
use super::cache::{Blocks, Hash};
use crate::shared::SharedBytes;
use crate::stream::Stream;

/// How long eager bytes wait in their connection for a command that is about to be executed, before they are set aside: setting aside costs a copy.
const BRIEFLY: Duration = Duration::from_millis(1);
/// How long a connection's thread polls for its next chunk, and for the command of the one that it has, before it sleeps. The chunks of one transfer come soon after one another.
fn linger() -> Duration {
    static TIME: OnceLock<Duration> = OnceLock::new();
    *TIME.get_or_init(|| polling::DATA_CONNECTION.here())
}

/// Runs of data that a bridge may have asked for ahead of their commands' turn.
const MAX_ASKED: usize = 1 << 16;

/// Where a command's incoming bytes go. Called by the connections' reader threads and by threads that grant, at the same time.
pub trait Landing: Send + Sync {
    /// Room for bytes from `offset` of the data on, at least 1 and at most `len` of them, all of them granted. Never waits. `None`: nobody wants them any more.
    ///
    /// The caller writes the whole room, once, then calls [`landed`](Self::landed); no other call is given overlapping room in between.
    fn room(&self, offset: u64, len: usize) -> Option<(NonNull<u8>, usize)>;

    /// The bytes of a room are there.
    fn landed(&self, offset: u64, len: usize);

    /// There will be no more bytes: the session has ended.
    fn lost(&self);
}

/// The bridge, as told from here.
pub(crate) trait Bridge: Send + Sync {
    /// It may send so much.
    fn grant(&self, grant: DataGrant);
    /// So many eager bytes have found their place.
    fn placed(&self, bytes: u64);
    /// It has violated the protocol.
    fn wrong(&self, what: &str);
}

/// Data that a command reads, on its way. Dropped unused, its bytes are thrown away as they come.
pub struct Incoming {
    hub: Arc<Inbox>,
    key: (u64, u32),
    len: u64,
    late: bool,
    used: bool,
}

impl std::fmt::Debug for Incoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Incoming(command {}, piece {}, {} bytes)", self.key.0, self.key.1, self.len)
    }
}

impl Incoming {
    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same data, to be read by the client's side no sooner than it is granted ([`protocol::data::HostIn::Late`]).
    pub fn late(mut self) -> Incoming {
        self.late = true;
        self
    }

    /// Whether nothing may be granted before the command's stream has come to it.
    pub fn is_late(&self) -> bool {
        self.late
    }

    /// Lets the bytes land, of which there is room for the first `window` (for late data: once that is granted). They may come from now on.
    pub fn land(mut self, landing: Arc<dyn Landing>, window: u64) -> Grants {
        self.used = true;
        let (hub, key, len) = (Arc::clone(&self.hub), self.key, self.len);
        hub.expect(key, len, landing, if self.late { 0 } else { window }, self.late);
        Grants { hub, key, len }
    }

    /// Lets the bytes come as a queue of chunks on the heap, about `bound` bytes at a time.
    pub fn into_queue(self, bound: usize) -> ChunkQueue {
        let (len, late, bound) = (self.len, self.late, bound.max(1) as u64);
        let shared = Arc::new(Queue { state: Mutex::default(), changed: Condvar::new() });
        let grants = self.land(Arc::<Queue>::clone(&shared), bound);
        ChunkQueue { shared, grants, bound, taken: 0, granted: if late { 0 } else { bound }, left: len }
    }

    /// Waits for all the bytes. To be used for short data only: it takes its length in memory (which the caller has checked).
    pub fn collect(self) -> Result<Vec<u8>, Lost> {
        let mut all = vec![0; self.len as usize];
        let mut queue = self.into_queue(MAX_DATA as usize);
        while let Some(chunk) = queue.next_chunk()? {
            let at = chunk.offset as usize;
            all[at..at + chunk.bytes.len()].copy_from_slice(&chunk.bytes);
        }
        Ok(all)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.used {
            self.hub.unwanted(self.key);
        }
    }
}

/// Says how much room a landing has.
#[derive(Clone)]
pub struct Grants {
    hub: Arc<Inbox>,
    key: (u64, u32),
    len: u64,
}

impl std::fmt::Debug for Grants {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grants(command {}, piece {})", self.key.0, self.key.1)
    }
}

impl Grants {
    /// There is room for all bytes before this offset. Never less than before.
    pub fn upto(&self, offset: u64) {
        self.hub.grant(self.key, offset.min(self.len));
    }

    /// Nobody wants the rest: it is to come and be thrown away, by a landing that gives no room.
    pub fn all(&self) {
        self.upto(u64::MAX);
    }
}

/// Some bytes of a command's data.
#[derive(Debug)]
pub struct Chunk {
    /// Where in the data they belong.
    pub offset: u64,
    /// The bytes.
    pub bytes: Box<[u8]>,
}

/// A command's data as chunks, in the order in which they come (not always that of their offsets).
#[derive(Debug)]
pub struct ChunkQueue {
    shared: Arc<Queue>,
    grants: Grants,
    /// Bytes that may lie here at a time.
    bound: u64,
    taken: u64,
    granted: u64,
    left: u64,
}

impl ChunkQueue {
    /// The next chunk; waits for it. `Ok(None)`: all bytes have come. For late data the first call says that the stream has come to it.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk>, Lost> {
        if self.left == 0 {
            return Ok(None);
        }
        // In steps, so that not every chunk costs the bridge a message.
        let now = self.taken + self.bound;
        if now >= self.granted + (self.bound / 4).max(1) {
            self.granted = now;
            self.grants.upto(now);
        }
        let mut state = self.shared.lock();
        loop {
            if let Some(chunk) = state.chunks.pop_front() {
                drop(state);
                let n = chunk.bytes.len() as u64;
                self.left = self.left.saturating_sub(n);
                self.taken += n;
                return Ok(Some(chunk));
            }
            if state.over {
                return Err(Lost::new("the session ended before the data came"));
            }
            state.waited_for = true;
            state = self.shared.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl Drop for ChunkQueue {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
        if self.left > 0 {
            self.grants.all();
        }
    }
}

#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    /// Room given out, by offset.
    filling: HashMap<u64, Box<[u8]>>,
    chunks: VecDeque<Chunk>,
    /// A thread waits for a chunk.
    waited_for: bool,
    over: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Landing for Queue {
    fn room(&self, offset: u64, len: usize) -> Option<(NonNull<u8>, usize)> {
        let mut state = self.lock();
        if state.over || state.filling.contains_key(&offset) {
            return None;
        }
        let mut bytes = vec![0u8; len].into_boxed_slice();
        // The box stays where it is on the heap until `landed` takes it out.
        let at = NonNull::new(bytes.as_mut_ptr());
        state.filling.insert(offset, bytes);
        at.map(|at| (at, len))
    }

    fn landed(&self, offset: u64, _len: usize) {
        let mut state = self.lock();
        if let Some(bytes) = state.filling.remove(&offset) {
            state.chunks.push_back(Chunk { offset, bytes });
        }
        let wake = std::mem::take(&mut state.waited_for);
        drop(state);
        if wake {
            self.changed.notify_all();
        }
    }

    fn lost(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }
}

/// What all data connections of a session share: which command expects what.
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
    /// Commands up to this have been executed: what they did not ask for, nobody will.
    executed: AtomicU64,
    /// What an execution may concern: threads that wait for one, and pieces kept for commands whose turn has not come. Each is counted before it looks, and the dispatcher
    /// looks after it has executed, so one sees the other.
    waiting: AtomicUsize,
    bridge: OnceLock<Weak<dyn Bridge>>,
    /// Raised whenever a thread that waits for a command or for room may look again.
    changes: AtomicU64,
    /// Most eager bytes that may await their place.
    limit: u64,
    pub(super) bytes: AtomicU64,
    /// Bytes that were set aside and then copied to where they belong.
    pub(super) copied: AtomicU64,
    /// What the bridge need not send, in a session with a cache.
    blocks: OnceLock<Arc<Blocks>>,
}

/// Eager bytes that were set aside.
struct Aside {
    offset: u64,
    bytes: Box<[u8]>,
    /// They are to be gathered once they are placed.
    keep: bool,
}

#[derive(Default)]
struct InboxState {
    expected: HashMap<(u64, u32), Expected>,
    /// Eager bytes of commands whose turn has not come, with their offsets.
    early: HashMap<(u64, u32), Vec<Aside>>,
    /// What the bridge has asked for ahead of its command's turn.
    asked: HashSet<(u64, u32)>,
    /// What executed commands beyond `executed` do not want.
    unwanted: HashSet<(u64, u32)>,
    /// Eager bytes that have not found their place.
    eager: u64,
    /// Eager bytes that have, of which the bridge has not been told.
    placed: u64,
    over: bool,
}

struct Expected {
    landing: Arc<dyn Landing>,
    len: u64,
    /// Bytes announced by chunk headers so far.
    announced: u64,
    /// Bytes landed so far.
    landed: u64,
    /// Bytes before this offset have room.
    granted: u64,
    /// Whether the bridge is told what is granted: not of short data, which is eager.
    tell: bool,
    /// Eager bytes beyond what is granted, with their offsets.
    aside: Vec<Aside>,
}

/// What is to be done with bytes that have come.
enum Place {
    /// They go here, so many of them.
    Room(Arc<dyn Landing>, usize),
    /// They are set aside.
    Aside,
    /// Nobody wants them.
    Nowhere,
}

impl Inbox {
    /// For up to `eager` eager bytes, and [`EAGER`] in any case.
    pub(crate) fn new(eager: u64) -> Arc<Inbox> {
        Arc::new(Inbox {
            limit: eager.max(EAGER),
            state: Mutex::default(),
            changed: Condvar::new(),
            executed: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            bridge: OnceLock::new(),
            changes: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            blocks: OnceLock::new(),
        })
    }

    /// The session has a cache. To be called once, before anything comes.
    pub(crate) fn knows(&self, blocks: Arc<Blocks>) {
        // A second one would be the same.
        let _ = self.blocks.set(blocks);
    }

    /// Whether data of a piece may still come for a command.
    fn may_come(&self, key: (u64, u32)) -> bool {
        let state = self.lock();
        state.expected.contains_key(&key)
            || key.0 > self.executed.load(Ordering::SeqCst) && !state.unwanted.contains(&key)
    }

    /// Whom to tell. To be called once, before anything comes.
    pub(crate) fn tell(&self, bridge: Weak<dyn Bridge>) {
        // A second one would be the same.
        let _ = self.bridge.set(bridge);
    }

    fn bridge(&self) -> Option<Arc<dyn Bridge>> {
        self.bridge.get().and_then(Weak::upgrade)
    }

    fn tell_grant(&self, key: (u64, u32), upto: u64) {
        if let Some(bridge) = self.bridge() {
            bridge.grant(DataGrant { seq: key.0, piece: key.1, reserved: 0, upto });
        }
    }

    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn incoming(self: &Arc<Inbox>, seq: u64, piece: u32, len: u64) -> Incoming {
        Incoming { hub: Arc::clone(self), key: (seq, piece), len, late: false, used: len == 0 }
    }

    /// Wakes the threads that wait for a command or for room. (Waking nobody would be a system call all the same.)
    fn wake(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.changed.notify_all();
        }
    }

    fn expect(&self, key: (u64, u32), len: u64, landing: Arc<dyn Landing>, window: u64, late: bool) {
        let mut state = self.lock();
        if state.over {
            drop(state);
            landing.lost();
            return;
        }
        if len == 0 {
            return;
        }
        let aside = state.early.remove(&key).unwrap_or_default();
        self.waiting.fetch_sub(usize::from(!aside.is_empty()), Ordering::SeqCst);
        let announced = aside.iter().map(|aside| aside.bytes.len() as u64).sum();
        let wild = aside.iter().any(|Aside { offset, bytes, .. }| {
            offset.checked_add(bytes.len() as u64).is_none_or(|end| end > len)
        });
        let tell = state.asked.remove(&key) || late || len > EAGER_PIECE;
        let granted = window.min(len);
        state.expected.insert(key, Expected { landing, len, announced, landed: 0, granted, tell, aside });
        drop(state);
        if wild || announced > len {
            self.wrong(&format!("more data for command {}, piece {}, than its {len} bytes", key.0, key.1));
            return;
        }
        self.wake();
        if tell && granted > 0 {
            self.tell_grant(key, granted);
        }
        self.place_aside(key);
    }

    fn wrong(&self, what: &str) {
        if let Some(bridge) = self.bridge() {
            bridge.wrong(what);
        }
    }

    fn grant(&self, key: (u64, u32), upto: u64) {
        let mut state = self.lock();
        let Some(expected) = state.expected.get_mut(&key).filter(|e| e.granted < upto) else { return };
        expected.granted = upto;
        let tell = expected.tell;
        drop(state);
        self.wake();
        if tell {
            self.tell_grant(key, upto);
        }
        self.place_aside(key);
    }

    /// The bridge has data of this piece that it may not send before it is granted. It says so before it sends the command, because the server may read nothing further while it executes that
    /// until the data is there. The error is what the bridge has done wrong.
    pub(crate) fn ask(&self, key: (u64, u32)) -> Result<(), String> {
        let mut state = self.lock();
        if state.expected.contains_key(&key) || key.0 <= self.executed.load(Ordering::SeqCst) {
            return Err(format!("it asks for data of command {} behind it", key.0));
        }
        if state.asked.len() >= MAX_ASKED {
            return Err(format!("it waits for grants for more than {MAX_ASKED} pieces of data"));
        }
        state.asked.insert(key);
        Ok(())
    }

    /// Whether the bridge waits for a grant of a piece that no driver has asked for yet.
    pub(super) fn is_asked(&self, key: (u64, u32)) -> bool {
        self.lock().asked.contains(&key)
    }

    /// Granted bytes of a piece, which this thread brings by a copy. The error is what the bridge has done wrong.
    pub(super) fn bring(&self, header: &DataHeader, bytes: SharedBytes<'_>) -> Result<(), String> {
        let brought = self.bring_by(header, |at, n, room| {
            // SAFETY: the landing has just given this thread `n` writable bytes of its own.
            unsafe { bytes.part(at, n).copy_to(room) };
        })?;
        self.bytes.fetch_add(brought, Ordering::Relaxed);
        self.copied.fetch_add(brought, Ordering::Relaxed);
        Ok(())
    }

    /// Granted bytes of a piece, which `copy` copies as [`copy_in`] has it. Gives how many were wanted. The error is what the bridge has done wrong.
    fn bring_by(&self, header: &DataHeader, copy: impl Fn(usize, usize, NonNull<u8>)) -> Result<u64, String> {
        let key = (header.seq, header.piece);
        let mut state = self.lock();
        // Nobody wants it any more.
        let Some(expected) = state.expected.get_mut(&key) else { return Ok(0) };
        expected.announce(header).map_err(|e| e.to_string())?;
        if header.offset + u64::from(header.len) > expected.granted {
            return Err(format!("data of command {} beyond what was granted", header.seq));
        }
        let landing = Arc::clone(&expected.landing);
        drop(state);
        copy_in(&*landing, header.offset, header.len as usize, copy);
        self.landed(key, header.len.into());
        Ok(header.len.into())
    }

    /// The bridge refers to bytes that it was told are known here.
    fn bring_known(&self, header: &DataHeader, eager: bool) -> io::Result<()> {
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let key = (header.seq, header.piece);
        let blocks =
            self.blocks.get().ok_or_else(|| wrong("it refers to a cache that there is not".into()))?;
        let Some(bytes) = blocks.take(header) else {
            if self.may_come(key) {
                return Err(wrong(format!("it sends a block of command {} that is not known here", key.0)));
            }
            // Nobody wants it, and so what was found for it may be gone.
            if eager {
                self.lock().eager += u64::from(header.len);
                self.eager_placed(header.len.into());
            }
            return Ok(());
        };
        blocks.passed(header);
        self.copied.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if eager {
            let noted = self.announce(header, true)?;
            return self.set_aside(key, noted, Aside { offset: header.offset, bytes, keep: false });
        }
        let brought = self.bring_by(header, |at, n, room| {
            // SAFETY: the landing has just given this thread `n` writable bytes of its own; `at + n` is at most the chunk's length.
            unsafe { std::ptr::copy_nonoverlapping(bytes[at..at + n].as_ptr(), room.as_ptr(), n) };
        });
        brought.map(drop).map_err(wrong)
    }

    /// The bridge asks whether a block is known here.
    fn ask_known(&self, header: &DataHeader, hash: Hash) -> io::Result<()> {
        match self.blocks.get() {
            Some(blocks) => blocks.ask(header, hash, &|key| self.may_come(key)),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "it asks a cache that there is not")),
        }
    }

    /// Bytes of a piece are where they belong; the server may keep them.
    fn gather(&self, key: (u64, u32), offset: u64, bytes: &[u8]) {
        let len = self.lock().expected.get(&key).map(|expected| expected.len);
        if let (Some(blocks), Some(len)) = (self.blocks.get(), len) {
            blocks.gather(key, len, offset, bytes);
        }
    }

    /// A command that is being executed does not want this piece.
    pub(super) fn unwanted(&self, key: (u64, u32)) {
        let mut state = self.lock();
        state.asked.remove(&key);
        if state.unwanted.insert(key) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
        }
        let early = state.early.remove(&key);
        drop(state);
        self.changed.notify_all();
        if let Some(early) = early {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            self.eager_placed(early.iter().map(|aside| aside.bytes.len() as u64).sum());
        }
        self.tell_grant(key, u64::MAX);
    }

    pub(crate) fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Under the lock, so that nobody is between a look and a wait.
            let mut state = self.lock();
            let mut gone = 0;
            let (early, unwanted) = (state.early.len(), state.unwanted.len());
            state.early.retain(|key, chunks| {
                let keep = key.0 > seq;
                if !keep {
                    gone += chunks.iter().map(|aside| aside.bytes.len() as u64).sum::<u64>();
                }
                keep
            });
            state.unwanted.retain(|key| key.0 > seq);
            let fewer = early + unwanted - state.early.len() - state.unwanted.len();
            self.waiting.fetch_sub(fewer, Ordering::SeqCst);
            drop(state);
            self.changed.notify_all();
            self.eager_placed(gone);
        }
    }

    /// The session is over: all threads that wait for data, or with data, return.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.over = true;
        let expected = std::mem::take(&mut state.expected);
        drop(state);
        self.blocks.get().inspect(|blocks| blocks.close());
        self.changed.notify_all();
        expected.into_values().for_each(|e| e.landing.lost());
    }

    /// So many eager bytes have found their place.
    fn eager_placed(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let mut state = self.lock();
        state.eager = state.eager.saturating_sub(bytes);
        state.placed += bytes;
        let tell = if state.placed >= EAGER / 4 { std::mem::take(&mut state.placed) } else { 0 };
        drop(state);
        if let Some(bridge) = self.bridge().filter(|_| tell > 0) {
            bridge.placed(tell);
        }
    }

    /// Notes a chunk whose header has come. False: its command's turn has not come, so it is to be noted there later.
    fn announce(&self, header: &DataHeader, eager: bool) -> io::Result<bool> {
        let mut state = self.lock();
        if eager {
            state.eager += u64::from(header.len);
            if state.eager > self.limit {
                let text = format!("{} eager bytes where {} are allowed", state.eager, self.limit);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
        }
        match state.expected.get_mut(&(header.seq, header.piece)) {
            Some(expected) => expected.announce(header).map(|()| true),
            None => Ok(false),
        }
    }

    /// What is to be done with `left` bytes from `offset` of a chunk. `noted`: whether the chunk was announced to its command. Waits until that is known, if `wait`; otherwise `None` says that it
    /// is not.
    fn place(
        &self,
        header: &DataHeader,
        eager: bool,
        noted: &mut bool,
        offset: u64,
        left: usize,
        wait: bool,
    ) -> io::Result<Option<Place>> {
        let key = (header.seq, header.piece);
        let begun = Instant::now();
        let mut seen = self.changes.load(Ordering::Acquire);
        let mut state = self.lock();
        // Where others of the piece are aside already, its room does not come soon.
        let stands = state.early.contains_key(&key)
            || state.expected.get(&key).is_some_and(|expected| !expected.aside.is_empty());
        let wait_for_room = wait && !stands;
        let deadline = eager.then(|| if wait_for_room { begun + BRIEFLY } else { begun });
        loop {
            if state.over {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if let Some(expected) = state.expected.get_mut(&key) {
                if !std::mem::replace(noted, true) {
                    expected.announce(header)?;
                }
                if expected.granted > offset {
                    let n = (expected.granted - offset).min(left as u64) as usize;
                    return Ok(Some(Place::Room(Arc::clone(&expected.landing), n)));
                }
            }
            if wait && !(eager && stands) && begun.elapsed() < linger() {
                drop(state);
                while self.changes.load(Ordering::Acquire) == seen && begun.elapsed() < linger() {
                    std::hint::spin_loop();
                }
                seen = self.changes.load(Ordering::Acquire);
                state = self.lock();
                continue;
            }
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let unknown = !state.expected.contains_key(&key);
            if unknown
                && (header.seq <= self.executed.load(Ordering::SeqCst) || state.unwanted.contains(&key))
            {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
                return Ok(Some(Place::Nowhere));
            }
            let patience = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if patience.is_some_and(|patience| patience.is_zero()) {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
                return Ok(Some(Place::Aside));
            }
            if !wait {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
                return Ok(None);
            }
            state = match patience {
                Some(patience) => {
                    self.changed.wait_timeout(state, patience).unwrap_or_else(|e| e.into_inner()).0
                }
                None => self.changed.wait(state).unwrap_or_else(|e| e.into_inner()),
            };
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Keeps eager bytes until there is room for them.
    fn set_aside(&self, key: (u64, u32), noted: bool, aside: Aside) -> io::Result<()> {
        let mut state = self.lock();
        let len = aside.bytes.len() as u64;
        if let Some(expected) = state.expected.get_mut(&key) {
            if !noted {
                let (seq, piece) = key;
                expected.announce(&DataHeader { seq, offset: aside.offset, piece, len: len as u32 })?;
            }
            expected.aside.push(aside);
            drop(state);
            self.place_aside(key);
            return Ok(());
        }
        // Counted before the look, as in `place`.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        if key.0 <= self.executed.load(Ordering::SeqCst) || state.unwanted.contains(&key) {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            drop(state);
            self.eager_placed(len);
            return Ok(());
        }
        let early = state.early.entry(key).or_default();
        // One count for each piece.
        self.waiting.fetch_sub(usize::from(!early.is_empty()), Ordering::SeqCst);
        early.push(aside);
        Ok(())
    }

    /// Places the bytes of a piece that were set aside and have room now.
    fn place_aside(&self, key: (u64, u32)) {
        loop {
            let mut state = self.lock();
            let Some(expected) = state.expected.get_mut(&key) else { return };
            let granted = expected.granted;
            let Some(at) = expected.aside.iter().position(|aside| aside.offset < granted) else { return };
            let Aside { offset, bytes, keep } = expected.aside.swap_remove(at);
            let now = ((granted - offset) as usize).min(bytes.len());
            if now < bytes.len() {
                expected.aside.push(Aside { offset: offset + now as u64, bytes: bytes[now..].into(), keep });
            }
            let landing = Arc::clone(&expected.landing);
            drop(state);
            copy_in(&*landing, offset, now, |at, n, room| {
                // SAFETY: the landing has just given this thread `n` writable bytes of its own; `at + n <= now`.
                unsafe { std::ptr::copy_nonoverlapping(bytes[at..at + n].as_ptr(), room.as_ptr(), n) };
            });
            self.copied.fetch_add(now as u64, Ordering::Relaxed);
            if keep {
                self.gather(key, offset, &bytes[..now]);
            }
            self.landed(key, now as u64);
            self.eager_placed(now as u64);
        }
    }

    fn landed(&self, key: (u64, u32), bytes: u64) {
        let mut state = self.lock();
        if let Some(expected) = state.expected.get_mut(&key) {
            expected.landed += bytes;
            if expected.landed >= expected.len {
                state.expected.remove(&key);
            }
        }
    }

    /// Serves the stream of a data connection until it or the session ends. `acknowledged` is called when the bridge says how much of the other stream it has.
    pub(super) fn read_connection(
        &self,
        source: &impl DataSource,
        mut acknowledged: impl FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut reader = ChunkReader::default();
        loop {
            let starts = reader.is_between_chunks();
            let Some((at, len)) = reader.room(self, true)? else { continue };
            // SAFETY: `room` gives `len` writable bytes to this thread alone until `filled`.
            let room = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) };
            match source.receive(room, starts)? {
                0 if starts => return Ok(()),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => reader.filled(self, n)?.map_or(Ok(()), &mut acknowledged)?,
            }
        }
    }
}

/// Where the bytes of a data connection's stream come from.
pub(super) trait DataSource {
    /// Receives until `buffer` is full; fewer bytes where the connection broke, none when there will be no more. `starts`: the bytes begin a chunk, which may come much later than the one before.
    fn receive(&self, buffer: &mut [u8], starts: bool) -> io::Result<usize>;
}

const HEADER: usize = size_of::<DataHeader>();
/// A header with the hash behind it.
const WITH_HASH: usize = HEADER + size_of::<Hash>();

/// The stream of a data connection, taken apart into chunks that go where they belong. Bytes may come in any pieces.
pub(crate) struct ChunkReader {
    /// Room for a header, and for the hash behind it if there is one.
    header: [u8; WITH_HASH],
    got: usize,
    /// Bytes of it that are to come.
    whole: usize,
    chunk: Option<Receiving>,
}

impl Default for ChunkReader {
    fn default() -> ChunkReader {
        ChunkReader { header: [0; WITH_HASH], got: 0, whole: HEADER, chunk: None }
    }
}

/// A chunk whose header has come.
struct Receiving {
    header: DataHeader,
    eager: bool,
    /// Its bytes are to be gathered.
    keep: bool,
    /// It was announced to its command.
    noted: bool,
    offset: u64,
    left: usize,
    /// Where its next bytes go, once that is known, and how many of them have come.
    target: Option<Target>,
    filled: usize,
}

enum Target {
    Room(Arc<dyn Landing>, NonNull<u8>, usize),
    Aside(Box<[u8]>),
    /// The command has taken note of them and has no room.
    Unwanted(Vec<u8>),
    /// There is no such command.
    Nowhere(Vec<u8>),
}

// SAFETY: a landing's room belongs to whoever asked for it, on any thread, until it is told that the bytes have landed.
unsafe impl Send for Target {}

impl Target {
    fn bytes(&mut self) -> (NonNull<u8>, usize) {
        match self {
            Target::Room(_, at, len) => (*at, *len),
            Target::Aside(bytes) => (NonNull::from(&mut **bytes).cast(), bytes.len()),
            Target::Unwanted(bytes) | Target::Nowhere(bytes) => {
                (NonNull::from(&mut **bytes).cast(), bytes.len())
            }
        }
    }
}

impl ChunkReader {
    /// Whether the next byte begins a chunk.
    pub(crate) fn is_between_chunks(&self) -> bool {
        self.chunk.is_none() && self.got == 0
    }

    /// Where the next bytes go: at least one. Waits until that is known, if `wait`; otherwise `None` says that it is not. The place is the caller's until it calls [`filled`](Self::filled).
    pub(crate) fn room(&mut self, inbox: &Inbox, wait: bool) -> io::Result<Option<(NonNull<u8>, usize)>> {
        let Some(chunk) = &mut self.chunk else {
            let rest = &mut self.header[self.got..self.whole];
            return Ok(Some((NonNull::from(&mut *rest).cast(), rest.len())));
        };
        if chunk.target.is_none() {
            let Some(place) =
                inbox.place(&chunk.header, chunk.eager, &mut chunk.noted, chunk.offset, chunk.left, wait)?
            else {
                return Ok(None);
            };
            chunk.target = Some(match place {
                Place::Room(landing, n) => match landing.room(chunk.offset, n) {
                    Some((at, room)) => Target::Room(landing, at, room.min(n)),
                    None => Target::Unwanted(vec![0; n]),
                },
                Place::Nowhere => Target::Nowhere(vec![0; chunk.left]),
                Place::Aside => Target::Aside(vec![0; chunk.left].into_boxed_slice()),
            });
        }
        Ok(chunk.target.as_mut().map(|target| {
            let (at, len) = target.bytes();
            // SAFETY: fewer bytes have come than the target has.
            (unsafe { at.add(chunk.filled) }, len - chunk.filled)
        }))
    }

    /// `n` bytes have come to where [`room`](Self::room) said. Gives what the bridge acknowledges, if these bytes say so.
    pub(crate) fn filled(&mut self, inbox: &Inbox, n: usize) -> io::Result<Option<u64>> {
        let Some(chunk) = &mut self.chunk else {
            self.got += n;
            return if self.got == self.whole { self.begin(inbox) } else { Ok(None) };
        };
        chunk.filled += n;
        let whole = chunk.target.as_mut().map_or(0, |target| target.bytes().1);
        if chunk.filled < whole {
            return Ok(None);
        }
        let key = (chunk.header.seq, chunk.header.piece);
        match chunk.target.take() {
            Some(Target::Room(landing, at, _)) => {
                if chunk.keep {
                    // SAFETY: `whole` bytes of the room were filled, and it is this thread's until they have landed.
                    inbox
                        .gather(key, chunk.offset, unsafe { std::slice::from_raw_parts(at.as_ptr(), whole) });
                }
                landing.landed(chunk.offset, whole);
                inbox.landed(key, whole as u64);
            }
            Some(Target::Unwanted(_)) => inbox.landed(key, whole as u64),
            Some(Target::Aside(bytes)) => {
                let (noted, offset, keep) = (chunk.noted, chunk.offset, chunk.keep);
                self.chunk = None;
                return inbox.set_aside(key, noted, Aside { offset, bytes, keep }).map(|()| None);
            }
            Some(Target::Nowhere(_)) | None => {}
        }
        if chunk.eager {
            inbox.eager_placed(whole as u64);
        }
        chunk.offset += whole as u64;
        chunk.left -= whole;
        chunk.filled = 0;
        if chunk.left == 0 {
            self.chunk = None;
        }
        Ok(None)
    }

    /// A whole header has come, or a hash behind it.
    fn begin(&mut self, inbox: &Inbox) -> io::Result<Option<u64>> {
        let mut header = DataHeader::new_zeroed();
        header.as_mut_bytes().copy_from_slice(&self.header[..HEADER]);
        if header.len == 0 && header.seq == 0 {
            self.got = 0;
            return Ok(Some(header.offset));
        }
        let has = |flag| header.len & flag != 0;
        let (eager, hash, known, keep) = (has(EAGER_FLAG), has(HASH_FLAG), has(KNOWN_FLAG), has(KEEP_FLAG));
        header.len &= !DATA_FLAGS;
        if header.len == 0 || header.len > MAX_DATA || hash && (eager || known || keep) || known && keep {
            let text = format!("a chunk of {} bytes for command {}", header.len, header.seq);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if hash && self.whole == HEADER {
            self.whole = WITH_HASH;
            return Ok(None);
        }
        (self.got, self.whole) = (0, HEADER);
        if hash {
            let mut hash = Hash::default();
            hash.copy_from_slice(&self.header[HEADER..]);
            return inbox.ask_known(&header, hash).map(|()| None);
        }
        if known {
            return inbox.bring_known(&header, eager).map(|()| None);
        }
        inbox.bytes.fetch_add(header.len.into(), Ordering::Relaxed);
        if let Some(blocks) = inbox.blocks.get() {
            blocks.passed(&header);
        }
        let noted = inbox.announce(&header, eager)?;
        let (offset, left) = (header.offset, header.len as usize);
        self.chunk = Some(Receiving { header, eager, keep, noted, offset, left, target: None, filled: 0 });
        Ok(None)
    }
}

impl Expected {
    /// A chunk's header has come.
    fn announce(&mut self, header: &DataHeader) -> io::Result<()> {
        self.announced += u64::from(header.len);
        let end = header.offset.checked_add(header.len.into());
        if end.is_none_or(|end| end > self.len) || self.announced > self.len {
            let text = format!(
                "command {}, piece {}: {} bytes at {} where {} were expected in all",
                header.seq, header.piece, header.len, header.offset, self.len
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(())
    }
}

/// Looks for the next bytes of a connection for a while. False: none have come.
pub(super) fn look_for_some(stream: &Stream) -> bool {
    let begun = Instant::now();
    loop {
        if stream.is_readable() {
            return true;
        }
        if begun.elapsed() >= linger() {
            return false;
        }
        std::hint::spin_loop();
    }
}

/// Has `len` bytes copied to where a landing has room for all of them. `copy(at, n, room)` copies `n` bytes from `at` on to `room`, which is this thread's alone until it returns.
fn copy_in(landing: &dyn Landing, offset: u64, len: usize, copy: impl Fn(usize, usize, NonNull<u8>)) {
    let mut at = 0;
    while at < len {
        let Some((room, size)) = landing.room(offset + at as u64, len - at) else { return };
        let n = size.min(len - at);
        copy(at, n, room);
        landing.landed(offset + at as u64, n);
        at += n;
    }
}

#[cfg(test)]
pub(super) mod tests;
