//! Bulk data that comes in over data connections, and where it lands.
//!
//! ```text
//!  connection ──reader──▶ header (seq, piece, offset, len) ──▶ the landing that the command's driver gave ──▶ bytes, in place
//! ```
//!
//! A reader thread for each connection reads a chunk's header, asks the command's [`Landing`] for room, and
//! receives straight into it. No chunk waits in a connection for its stream to go on: everything behind it
//! would wait as well, perhaps even what the stream waits for. So the bridge sends what there is room for:
//! - what was **granted**: a landing says how far it has room ([`Incoming::land`]), and as room comes free,
//!   how far then ([`Grants`]);
//! - a little of each piece **eagerly**, so that short data need not wait for a grant. Where a command's turn
//!   has not come, or where its landing has no room yet, eager bytes are set aside in memory; the session's
//!   eager bytes are bounded, and exceeding the bound is a protocol violation. Over a long distance a bridge
//!   sends most of its data so: grants come a round trip late there.
//!
//! A bridge that sends more than it may, without saying that it is eager, waits: in its connection.
//!
//! `chunk_reader` takes a connection's stream apart; `chunk_queue` is a landing on the heap.

mod chunk_queue;
mod chunk_reader;

use std::collections::btree_map::OccupiedEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use protocol::link::{DataGrant, DataHeader, EAGER, EAGER_PIECE};
use protocol::polling;

use super::cache::{Blocks, Hash};
use crate::shared::SharedBytes;

pub use chunk_queue::{Chunk, ChunkQueue};
#[cfg(test)]
pub(crate) use chunk_reader::ChunkReader;
#[doc(hidden)]
pub use chunk_reader::receive_compressed;
pub(super) use chunk_reader::{DataSource, look_for_some};

/// How long eager bytes wait in their connection for a command that is about to be executed, before they are
/// set aside: setting aside costs a copy.
const BRIEFLY: Duration = Duration::from_millis(1);
/// How long a connection's thread polls for its next chunk, and for the command of the one that it has,
/// before it sleeps. The chunks of one transfer come soon after one another.
fn linger() -> Duration {
    static TIME: OnceLock<Duration> = OnceLock::new();
    *TIME.get_or_init(|| polling::DATA_CONNECTION.here())
}

/// Runs of data that a bridge may have asked for ahead of their commands' turn.
const MAX_ASKED: usize = 1 << 16;

/// Chunks of eager bytes that may be set aside at the same time. Each costs some 200 bytes besides its own,
/// so a bridge that sends single bytes could otherwise make a session take a hundred times what it may.
const MAX_ASIDE: usize = 1 << 20;

/// Where a command's incoming bytes go. Called by the connections' reader threads and by threads that grant,
/// at the same time.
pub trait Landing: Send + Sync {
    /// Room for bytes from `offset` of the data on, at least 1 and at most `len` of them, all of them
    /// granted. Never waits. `None`: nobody wants them any more.
    ///
    /// The caller writes the whole room, once, then calls [`landed`](Self::landed); no other call is given
    /// overlapping room in between.
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

    /// The same data, to be read by the client's side no sooner than it is granted
    /// ([`protocol::data::HostIn::Late`]).
    pub fn late(mut self) -> Incoming {
        self.late = true;
        self
    }

    /// Whether nothing may be granted before the command's stream has come to it.
    pub fn is_late(&self) -> bool {
        self.late
    }

    /// Lets the bytes land, of which there is room for the first `window` (for late data: once that is
    /// granted). They may come from now on.
    pub fn land(mut self, landing: Arc<dyn Landing>, window: u64) -> Grants {
        self.used = true;
        let (hub, key, len) = (Arc::clone(&self.hub), self.key, self.len);
        hub.expect(key, len, landing, if self.late { 0 } else { window }, self.late);
        Grants { hub, key, len }
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

/// What all data connections of a session share: which command expects what.
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
    /// Commands up to this have been executed: what they did not ask for, nobody will.
    executed: AtomicU64,
    /// What an execution may concern: threads that wait for one, and pieces kept for commands whose turn has
    /// not come. Each is counted before it looks, and the dispatcher looks after it has executed, so one sees
    /// the other.
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
    /// Eager bytes of commands whose turn has not come, with their offsets. In order: there may be thousands
    /// behind the one that is executed.
    early: BTreeMap<(u64, u32), Vec<Aside>>,
    /// What the bridge has asked for ahead of its command's turn.
    asked: HashSet<(u64, u32)>,
    /// What executed commands beyond `executed` do not want.
    unwanted: BTreeSet<(u64, u32)>,
    /// Eager bytes that have not found their place.
    eager: u64,
    /// Chunks of them that are set aside.
    aside: usize,
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
        state.expected.contains_key(&key) || !self.is_done(&state, key)
    }

    /// Whether a piece that no command expects will be expected by none any more.
    fn is_done(&self, state: &InboxState, key: (u64, u32)) -> bool {
        key.0 <= self.executed.load(Ordering::SeqCst) || state.unwanted.contains(&key)
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

    /// Wakes the threads that wait for a command or for room. (Waking nobody would be a system call all the
    /// same.)
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

    /// The bridge has data of this piece that it may not send before it is granted. It says so before it
    /// sends the command, because the server may read nothing further while it executes that until the data
    /// is there. The error is what the bridge has done wrong.
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

    /// Granted bytes of a piece, which this thread brings by a copy. The error is what the bridge has done
    /// wrong.
    pub(super) fn bring(&self, header: &DataHeader, bytes: SharedBytes<'_>) -> Result<(), String> {
        let brought = self.bring_by(header, |at, n, room| {
            // SAFETY: the landing has just given this thread `n` writable bytes of its own.
            unsafe { bytes.part(at, n).copy_to(room) };
        })?;
        self.bytes.fetch_add(brought, Ordering::Relaxed);
        self.copied.fetch_add(brought, Ordering::Relaxed);
        Ok(())
    }

    /// Granted bytes of a piece, which `copy` copies as [`copy_in`] has it. Gives how many were wanted. The
    /// error is what the bridge has done wrong.
    fn bring_by(&self, header: &DataHeader, copy: impl Fn(usize, usize, NonNull<u8>)) -> Result<u64, String> {
        let key = (header.seq, header.piece);
        let mut state = self.lock();
        let beyond = || Err(format!("data of command {} beyond what was granted", header.seq));
        let Some(expected) = state.expected.get_mut(&key) else {
            // Nobody wants it any more, or nobody has asked for it yet.
            return if state.over || self.is_done(&state, key) { Ok(0) } else { beyond() };
        };
        expected.announce(header).map_err(|e| e.to_string())?;
        if header.offset + u64::from(header.len) > expected.granted {
            return beyond();
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
            // SAFETY: the landing has just given this thread `n` writable bytes of its own; `at + n` is at
            // most the chunk's length.
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
            self.lock().aside -= early.len();
            self.eager_placed(early.iter().map(|aside| aside.bytes.len() as u64).sum());
        }
        self.tell_grant(key, u64::MAX);
    }

    pub(crate) fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Under the lock, so that nobody is between a look and a wait.
            let mut state = self.lock();
            let (mut gone, mut fewer) = (0, 0);
            let is_done = |early: &OccupiedEntry<'_, (u64, u32), Vec<Aside>>| {
                #[cfg(test)]
                tests::LOOKS.with(|looks| looks.set(looks.get() + 1));
                early.key().0 <= seq
            };
            while let Some(early) = state.early.first_entry().filter(is_done) {
                let chunks = early.remove();
                gone += chunks.iter().map(|aside| aside.bytes.len() as u64).sum::<u64>();
                state.aside -= chunks.len();
                fewer += 1;
            }
            while state.unwanted.first().is_some_and(|key| key.0 <= seq) {
                state.unwanted.pop_first();
                fewer += 1;
            }
            let waiting = self.waiting.fetch_sub(fewer, Ordering::SeqCst) - fewer;
            // Beside the pieces that are kept.
            let wake = waiting > state.early.len() + state.unwanted.len();
            drop(state);
            if wake {
                self.changed.notify_all();
            }
            self.eager_placed(gone);
        }
    }

    /// Waits until the cache has what has come for it, at most this long. The session is over.
    pub(crate) fn finish_cache(&self, limit: Duration) {
        self.blocks.get().inspect(|blocks| blocks.finish(limit));
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

    /// Notes a chunk whose header has come. False: its command's turn has not come, so it is to be noted
    /// there later.
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

    /// What is to be done with `left` bytes from `offset` of a chunk. `noted`: whether the chunk was
    /// announced to its command. Waits until that is known, if `wait`; otherwise `None` says that it is not.
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
            if unknown && self.is_done(&state, key) {
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
            let bounded = state.one_more_aside();
            drop(state);
            bounded?;
            self.place_aside(key);
            return Ok(());
        }
        // Counted before the look, as in `place`.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        if self.is_done(&state, key) {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            drop(state);
            self.eager_placed(len);
            return Ok(());
        }
        let early = state.early.entry(key).or_default();
        // One count for each piece.
        self.waiting.fetch_sub(usize::from(!early.is_empty()), Ordering::SeqCst);
        early.push(aside);
        state.one_more_aside()
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
            let rest = now < bytes.len();
            if rest {
                expected.aside.push(Aside { offset: offset + now as u64, bytes: bytes[now..].into(), keep });
            }
            let landing = Arc::clone(&expected.landing);
            state.aside -= usize::from(!rest);
            drop(state);
            copy_in(&*landing, offset, now, |at, n, room| {
                // SAFETY: the landing has just given this thread `n` writable bytes of its own; `at + n <=
                // now`.
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
}

impl InboxState {
    /// A chunk was set aside.
    fn one_more_aside(&mut self) -> io::Result<()> {
        self.aside += 1;
        if self.aside <= MAX_ASIDE {
            return Ok(());
        }
        let text = format!("more than {MAX_ASIDE} chunks of eager bytes wait for room");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
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

/// Has `len` bytes copied to where a landing has room for all of them. `copy(at, n, room)` copies `n` bytes
/// from `at` on to `room`, which is this thread's alone until it returns.
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
