//! What the threads of a worker share of a `verbs` session.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::thread::Thread;
use std::time::Duration;

use nix::sys::eventfd::EventFd;
use protocol::link::{DataGrant, DataSent, FrameHeader, RegionKey, frame};
use zerocopy::IntoBytes;

use super::keys::Keys;
use crate::endpoint::end::{Farewell, Lost};
use crate::endpoint::incoming::{Bridge, Inbox};
use crate::endpoint::link::Link as Links;
use crate::endpoint::planned_slots::{Freed, PlannedSlots};
use crate::endpoint::stream::{Records, put, put_executed};
use crate::endpoint::wake::StopEvent;
use crate::framing::FrameReader;
use crate::stream::Stream;
use crate::verbs::{Link, Registration, Settings, Slab};

/// Bytes of a slot: half a MiB of data, and a page for the header before it.
pub(super) const SLOT_SIZE: u32 = (512 << 10) + 4096;
/// Slots of a session that are used in turn. Those for granted data come behind them.
pub(super) const SLOTS: u32 = 48;
/// The most bytes of one write to the client, and the size of a buffer that is lent out.
pub(super) const CHUNK: usize = 512 << 10;
/// Such buffers.
pub(super) const BUFFERS: usize = 16;
/// Calls of [`VerbsClient::send`] at once that wait for adopted memory to have left.
pub(super) const SENDS: usize = 64;
/// Writes longer than this are signalled each: their completion is nothing beside their transfer.
pub(super) const SIGNALLED: usize = 32 << 10;

/// The side of every other thread.
pub struct VerbsClient {
    pub(super) this: Weak<VerbsClient>,
    /// Dropped before the memory that it uses.
    pub(super) engine: Mutex<Engine>,
    /// There is room: in queues, credits or buffers. For the threads counted in [`Engine::waiters`].
    pub(super) room: Condvar,
    /// Memory of the driver's that writes may go out of directly.
    pub(super) adopted: OnceLock<Registration>,
    pub(super) buffers: Slab,
    pub(super) slots: Slab,
    /// The links that there were, of which [`Engine::link`] knows the last.
    pub(super) links: Links,
    /// The control connection, if there is one now. Changed only under the engine's lock.
    pub(super) control: Mutex<Option<Arc<Stream>>>,
    /// Raised for the pump when there are other connections to watch.
    pub(super) changed: EventFd,
    pub(super) link_changes: OnceLock<Box<dyn Fn(bool) + Send + Sync>>,
    pub(super) before_news: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub(super) announcing: Mutex<()>,
    pub(super) settings: Settings,
    /// The client's address, for messages.
    pub(super) peer: String,
    pub(super) slot_count: u32,
    pub(super) ring: Arc<PlannedSlots>,
    /// Data that waits for grants.
    pub(super) inbox: Arc<Inbox>,
    pub(super) arrived: Mutex<Vec<u8>>,
    /// Whether there may be something in `arrived`, to be polled: bytes that were put there.
    pub(super) waiting: AtomicUsize,
    pub(super) came: Condvar,
    /// Whether the dispatcher is to rest once more before it sleeps on.
    pub(super) roused: AtomicBool,
    pub(super) executed: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) copied: AtomicU64,
    /// How often the dispatcher has taken completions.
    pub(super) helped: AtomicU64,
    pub(super) pump: OnceLock<Thread>,
    /// Somebody is ending the session.
    pub(super) ending: AtomicBool,
    pub(super) end: OnceLock<Option<Lost>>,
    pub(super) stop: StopEvent,
    pub(super) farewell: Farewell,
}

pub(super) struct Engine {
    pub(super) link: Link,
    /// The bridge's attempt that has brought it; 0 for the first.
    pub(super) attempt: u32,
    pub(super) reader: FrameReader,
    /// Bytes of the bridge's stream that have come, and of which it was told.
    pub(super) came: u64,
    pub(super) told_came: u64,
    pub(super) control_reader: FrameReader,
    /// Records that have come, to be looked at for their data.
    pub(super) records: Records,
    pub(super) body: Vec<u8>,
    /// The client's memories that may be written.
    pub(super) keys: Keys,
    /// Writes under way for each call of [`VerbsClient::send`] that waits for them, and the places that are
    /// free.
    pub(super) sends: Vec<usize>,
    pub(super) free_sends: Vec<usize>,
    pub(super) lent_buffers: LentBuffers,
    /// Threads that wait for room: without any, telling of it would be a system call for nobody.
    pub(super) waiters: usize,
    /// `executed` as the client was last told.
    pub(super) told: u64,
    /// The pump sleeps for as long as nothing happens: it is to be woken if requests are posted that may take
    /// too long.
    pub(super) unwatched: bool,
    /// Slots for granted data that were emptied, of which the bridge has not been told.
    pub(super) emptied: Vec<u32>,
}

/// The buffers that are lent out, by number.
pub(super) struct LentBuffers {
    free: Vec<usize>,
    /// Of each that is on its way: its queue, and to where so many of its bytes go.
    going: [Option<(usize, Target, u64)>; BUFFERS],
}

impl LentBuffers {
    pub(super) fn new() -> LentBuffers {
        LentBuffers { free: (0..BUFFERS).collect(), going: [None; BUFFERS] }
    }

    /// Takes one that is free.
    pub(super) fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// It is free again.
    pub(super) fn give_back(&mut self, number: usize) {
        self.going[number] = None;
        self.free.push(number);
    }

    /// How many are free.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// Its bytes leave.
    pub(super) fn goes(&mut self, number: usize, queue: usize, to: Target, len: u64) {
        self.going[number] = Some((queue, to, len));
    }

    /// Whether something for some of these bytes is on its way over another queue: it may come later than
    /// what leaves over this one now.
    pub(super) fn may_overtake(&self, queue: usize, to: Target, len: u64) -> bool {
        self.going.iter().flatten().any(|(of, at, length)| {
            let overlaps =
                at.offset < to.offset.saturating_add(len) && to.offset < at.offset.saturating_add(*length);
            *of != queue && at.region == to.region && overlaps
        })
    }
}

/// A place in the client's memory. What its address and its key are depends on the bridge's process.
#[derive(Debug, Clone, Copy)]
pub(in crate::endpoint) struct Target {
    pub(super) region: u32,
    pub(super) offset: u64,
}

impl Target {
    /// The place so many bytes behind it.
    pub(in crate::endpoint) fn behind(self, bytes: u64) -> Target {
        Target { offset: self.offset.saturating_add(bytes), ..self }
    }
}

/// The address and the key of a place in a memory.
pub(super) fn place(key: &RegionKey, offset: u64) -> (u64, u32) {
    (key.address.wrapping_add(offset), key.key)
}

impl Engine {
    /// A place as a write names it. (That of a region without a key is refused by the bridge's device.)
    pub(super) fn address(&self, Target { region, offset }: Target) -> (u64, u32) {
        self.keys.get(region).map_or((0, 0), |key| place(&key, offset))
    }

    /// Bytes of the bridge's stream whose frames were acted on.
    pub(super) fn processed(&self) -> u64 {
        self.came - self.reader.buffered() as u64
    }
}

/// What a write's token says when it is done: a buffer is free, or (with this bit) a waiting call's write has
/// left.
pub(super) const SEND: u64 = 1 << 32;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl VerbsClient {
    pub(super) fn lock(&self) -> MutexGuard<'_, Engine> {
        lock(&self.engine)
    }

    /// Appends to the stream and sends what can go. Waits while more than enough is waiting already.
    pub(super) fn say(&self, fill: impl FnOnce(&mut Engine)) {
        let mut engine = self.lock();
        while !engine.link.has_room() && self.end.get().is_none() {
            engine = self.wait_for_room(engine);
        }
        if self.end.get().is_none() {
            // What was executed goes along: a message of its own only before the dispatcher sleeps.
            self.put_executed(&mut engine);
            fill(&mut engine);
            self.flush(engine);
        }
    }

    /// Appends what was executed, if the bridge does not know it. True: it did not.
    pub(super) fn put_executed(&self, engine: &mut Engine) -> bool {
        let now = self.executed.load(Ordering::Acquire);
        let news = now > engine.told;
        if news {
            engine.told = now;
            put_executed(engine.link.out(), now);
        }
        news
    }

    pub(super) fn flush(&self, mut engine: MutexGuard<'_, Engine>) {
        if let Err(e) = engine.link.flush() {
            drop(engine);
            self.failed(e);
        }
    }

    pub(super) fn flush_executed(&self) {
        let mut engine = self.lock();
        if self.end.get().is_none() && self.put_executed(&mut engine) {
            self.flush(engine);
        }
    }

    pub(in crate::endpoint) fn data_sent(&self, seq: u64, bytes: u64) {
        self.say(|engine| {
            put(engine.link.out(), frame::DATA_SENT, &[DataSent { seq, bytes }.as_bytes()]);
            engine.keys.sent(seq);
        });
    }

    pub(super) fn over(&self) -> Lost {
        self.end.get().cloned().flatten().unwrap_or_else(|| Lost::new("the session is over"))
    }

    /// Waits until `take` gives something, which it tries when there may be room. `None`: the session has
    /// ended.
    pub(super) fn wait_for<T>(&self, mut take: impl FnMut(&mut Engine) -> Option<T>) -> Option<T> {
        let mut engine = self.lock();
        while self.end.get().is_none() {
            let taken = take(&mut engine);
            if engine.unwatched && engine.link.waits() {
                engine.unwatched = false;
                let _ = self.changed.write(1);
            }
            if taken.is_some() {
                return taken;
            }
            engine = self.wait_for_room(engine);
        }
        None
    }

    /// Waits until room has come, or a while.
    pub(super) fn wait_for_room<'e>(&self, mut engine: MutexGuard<'e, Engine>) -> MutexGuard<'e, Engine> {
        engine.waiters += 1;
        let waited = self.room.wait_timeout(engine, Duration::from_millis(100));
        engine = waited.unwrap_or_else(|e| e.into_inner()).0;
        engine.waiters -= 1;
        engine
    }

    /// Ends the session, once. The farewell goes first: as soon as the dispatcher sees the end, this process
    /// may exit.
    pub(super) fn finish(&self, end: Option<Lost>) {
        if self.ending.swap(true, Ordering::AcqRel) {
            // Another thread is at it, and waits for nothing before it is done.
            self.end.wait();
            return;
        }
        let reason = end.as_ref().map(|Lost { reason }| reason.as_str());
        // A bridge whose session survives its connections must know that its farewell has come.
        let said = reason.or_else(|| self.links.survives().then_some(""));
        if let (Some(said), Some(control)) = (said, lock(&self.control).clone()) {
            let header = FrameHeader { kind: frame::BYE, len: said.len() as u32 };
            // The peer may be the one that is gone.
            let _ = control.send_bytes(&[header.as_bytes(), said.as_bytes()].concat());
        }
        self.links.close();
        let _ = self.end.set(end);
        self.stop.raise();
        self.ring.close();
        self.inbox.close();
        // Under the locks, so that nobody misses it between a look and a wait.
        drop(lock(&self.arrived));
        self.came.notify_all();
        self.room.notify_all();
        self.farewell.call();
    }
}

impl Bridge for VerbsClient {
    fn grant(&self, grant: DataGrant) {
        self.say(|engine| put(engine.link.out(), frame::DATA_GRANT, &[grant.as_bytes()]));
    }

    fn placed(&self, _bytes: u64) {}

    fn wrong(&self, what: &str) {
        self.finish(Some(Lost::new(format!("the bridge sent {what}"))));
    }
}

impl Freed for VerbsClient {
    fn freed(&self) {
        if self.end.get().is_none() {
            let mut engine = self.lock();
            self.announce(&mut engine);
            self.flush(engine);
        }
    }
}
