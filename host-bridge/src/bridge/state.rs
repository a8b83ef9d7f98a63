//! What a session and its transport share: the channel's memory, the doorbell, counters, and how the session
//! ended.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::Status;
use protocol::channel::{Completed, Header, State};
use protocol::device::{Extent, untext};
use protocol::link::wish;
use protocol::trace::Recorder;
use protocol::version::{OURS, Version};

use super::counters::Counters;
use super::link::Link;
use crate::log_limit::LogLimit;
use crate::memory::{ChannelView, Memories, MemoryError};

/// For lines about sessions that begin or are lost. A device process has those of one guest or user, who can
/// cause as many as they like.
pub(super) static SESSION_LINES: LogLimit = LogLimit::new(200);

/// A channel's memory, checked and mapped, with what is needed to pass it on.
#[derive(Debug)]
pub struct ChannelMemory {
    /// The memories that the extents count in.
    pub memories: Memories,
    /// The channel's extents, in order.
    pub extents: Vec<Extent>,
    /// Bytes in all.
    pub size: u64,
    /// The channel, contiguous.
    pub view: ChannelView,
    /// The version that the client and this host speak.
    pub version: Version,
    /// Process id that the client gave, for display.
    pub pid: u32,
    /// Program name that the client gave, for display.
    pub program: String,
    /// What kind of session the client asks for: bits of [`wish`](protocol::link::wish).
    pub wishes: u32,
    /// Most seconds for which the session may be interrupted; 0: as long as the server keeps it.
    pub lost_after: u32,
    /// The place of the server that the client asks for among those that it is offered.
    pub server: u32,
    /// The name of the server that it asks for instead; empty: none.
    pub asked_server: String,
    /// The doorbell of the session to come.
    pub doorbell: Arc<EventFd>,
}

impl ChannelMemory {
    /// Maps the extents as a channel and checks the header that the client has written there.
    pub fn new(memories: Memories, extents: Vec<Extent>, size: u64) -> Result<ChannelMemory, MemoryError> {
        let view = memories.view(&extents, size)?;
        let fields = view.fields();
        // The names go into logs: nothing in them may steer a terminal.
        let plain =
            |name: String| -> String { name.chars().map(|c| if c.is_control() { '?' } else { c }).collect() };
        let program = plain(untext(&fields.program));
        let (server, asked_server) = (fields.server, plain(view.header().asked_server()));
        let doorbell = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| MemoryError::Doorbell { source: e.into() })?;
        let (version, pid, wishes) = (OURS.at_most(fields.version).version(), fields.pid, fields.wishes);
        let lost_after = fields.lost_after;
        Ok(ChannelMemory {
            memories,
            extents,
            size,
            view,
            version,
            pid,
            program,
            wishes,
            lost_after,
            server,
            asked_server,
            doorbell: Arc::new(doorbell),
        })
    }

    /// Whether the client can be told that its session waits in a queue.
    pub fn may_wait(&self) -> bool {
        self.wishes & wish::MAY_WAIT != 0
    }

    /// Tells the client how many servers it is offered.
    pub fn tell_servers(&self, servers: u32) {
        self.view.header().set_servers(servers);
    }

    /// Tells the client that its session waits in the queue of the server of that name, and how many come
    /// first.
    pub fn tell_waiting(&self, server: &str, ahead: u32) {
        self.view.header().set_waiting(server, ahead);
    }

    /// Tells a client that was made to wait that it gets no session. It sleeps on the word at
    /// [`Header::STATE_OFFSET`], and is woken by the caller.
    pub fn tell_refused(&self, reason: &str) {
        self.view.header().set_lost(reason);
    }

    /// Tells a process of this host that its session is over, and wakes its threads.
    pub fn tell_lost_by_futex(&self, reason: &str) {
        tell_lost(&self.view, reason, |offset| futex_wake(self, offset));
    }

    /// Wakes a process of this host that sleeps on the state.
    pub fn wake_by_futex(&self) {
        futex_wake(self, Header::STATE_OFFSET);
    }
}

/// How the client's sleeping threads are reached.
#[derive(Clone)]
pub enum Wakeup {
    /// They sleep by futex on words of the channel (a process of this host).
    Futex,
    /// A call wakes all of them (a guest: the `WAKE` event). It must not block.
    Call(Arc<dyn Fn() + Send + Sync>),
}

impl std::fmt::Debug for Wakeup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Wakeup::Futex => "Futex",
            Wakeup::Call(_) => "Call",
        })
    }
}

type OnLost = Box<dyn FnOnce(&str) + Send>;

/// See the module's text.
pub struct SessionState {
    /// The channel.
    pub channel: ChannelMemory,
    /// Rings when the client has appended records while the other end slept. A native client holds this
    /// descriptor too, so nothing here may depend on the state in which it leaves it: it is watched
    /// edge-triggered and never read.
    pub doorbell: Arc<EventFd>,
    /// What was done so far.
    pub counters: Counters,
    /// Per-command timestamps, for latency analysis.
    pub trace: Recorder,
    /// The server's address, for messages.
    pub server: String,
    /// The connection that carries it.
    pub(super) link: Link,
    wakeup: Wakeup,
    ended: OnceLock<String>,
    on_lost: Mutex<Option<OnLost>>,
    telling: Mutex<Telling>,
}

/// Whether a client can be told that its session is over: that takes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Telling {
    /// It can.
    Now,
    /// Once its session goes on ([`SessionState::unpause`]). `true`: it is to be told then.
    Later(bool),
    /// Its memory is somebody else's.
    Never,
}

impl std::fmt::Debug for SessionState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionState")
            .field("server", &self.server)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl SessionState {
    pub(super) fn new(
        channel: ChannelMemory,
        server: String,
        wakeup: Wakeup,
        on_lost: OnLost,
    ) -> SessionState {
        let doorbell = Arc::clone(&channel.doorbell);
        let (counters, ended, on_lost) = (Counters::default(), OnceLock::new(), Mutex::new(Some(on_lost)));
        let telling = Mutex::new(Telling::Now);
        let trace = Recorder::default();
        if crate::trace::folder().is_some() {
            trace.start();
        }
        SessionState {
            channel,
            doorbell,
            counters,
            trace,
            server,
            link: Link::default(),
            wakeup,
            ended,
            on_lost,
            telling,
        }
    }

    fn telling(&self) -> MutexGuard<'_, Telling> {
        self.telling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client's memory is not touched from now on.
    pub(super) fn pause(&self) {
        let mut telling = self.telling();
        if *telling == Telling::Now {
            *telling = Telling::Later(false);
        }
    }

    /// The client's memory is the client's again. A client whose session has ended meanwhile is told.
    pub(super) fn unpause(&self) {
        let before = std::mem::replace(&mut *self.telling(), Telling::Now);
        if let (Telling::Later(true), Some(reason)) = (before, self.ended()) {
            self.tell_client(reason);
        }
    }

    /// The client's memory is somebody else's, and not touched any more.
    pub(super) fn seal(&self) {
        *self.telling() = Telling::Never;
    }

    /// Whether the client's memory must not be touched now.
    pub(super) fn is_paused(&self) -> bool {
        *self.telling() != Telling::Now
    }

    /// Rings the doorbell, on a guest's behalf. (A process rings by itself.)
    pub fn ring(&self) {
        // The only failure is a counter at its end, in which case the doorbell is ringing already.
        let _ = self.doorbell.write(1);
    }

    /// Why the session ended, if it has.
    pub fn ended(&self) -> Option<&str> {
        self.ended.get().map(String::as_str)
    }

    /// The channel's header.
    pub fn header(&self) -> &Header {
        self.channel.view.header()
    }

    /// Whether the answer to command `seq` was given in this slot, or may have been.
    pub(super) fn was_completed(&self, slot: u16, seq: u64) -> bool {
        self.channel.view.slot(slot).is_some_and(|slot| slot.was_completed(seq) != Completed::No)
    }

    /// Whether threads are reached by futex.
    pub fn futex(&self) -> bool {
        matches!(self.wakeup, Wakeup::Futex)
    }

    /// The session ended against the client's will: tells the client, wakes all its threads, tells the
    /// daemon. Only the first call does anything.
    ///
    /// The transport calls this as the last thing that it does with the channel.
    pub fn lose(&self, reason: &str) {
        if self.ended.set(reason.to_owned()).is_err() {
            return;
        }
        if let Some(not_shown) = SESSION_LINES.allow() {
            tracing::warn!(server = %self.server, program = %self.channel.program, pid = self.channel.pid, "session lost: {reason}{not_shown}");
        }
        self.tell_client(reason);
        let on_lost = self.on_lost.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(on_lost) = on_lost {
            on_lost(reason);
        }
    }

    /// The session ended as this side asked: the client's threads are woken, the daemon is not called.
    pub(super) fn end(&self, reason: &str) {
        if self.ended.set(reason.to_owned()).is_ok() {
            tracing::debug!(server = %self.server, program = %self.channel.program, pid = self.channel.pid, "session closed: {reason}");
            self.tell_client(reason);
        }
    }

    fn tell_client(&self, reason: &str) {
        let mut telling = self.telling();
        match &mut *telling {
            Telling::Now => {}
            Telling::Later(told) => {
                *told = true;
                return;
            }
            Telling::Never => return,
        }
        let mut waker = self.waker();
        tell_lost(&self.channel.view, reason, |offset| waker.wake(offset));
    }

    /// Collects wake-ups; what has to be called is called when the waker is dropped.
    pub fn waker(&self) -> Waker<'_> {
        Waker { session: self, call: false }
    }
}

/// Tells a channel's client that its session is over: all its calls fail with `reason`. `wake` is called with
/// the offset of each word on which its threads may sleep.
pub fn tell_lost(view: &ChannelView, reason: &str, mut wake: impl FnMut(u64)) {
    let header = view.header();
    // A worker that reads the ring itself may have said why already; its words are the better ones.
    if header.state() != State::Lost {
        header.set_lost(reason);
    }
    let geometry = *view.geometry();
    for index in 0..geometry.slot_count {
        let sleeps = view.slot(index as u16).is_some_and(|slot| slot.abandon(Status::DEVICE_UNAVAILABLE));
        if sleeps {
            wake(geometry.slot_offset(index) as u64);
        }
    }
    header.ring_sleep.take();
    header.progress_sleep.take();
    wake(Header::RING_SLEEP_OFFSET);
    wake(Header::PROGRESS_SLEEP_OFFSET);
}

/// Wakes the client's threads: by futex one word at a time, otherwise all by one call for all words together.
#[derive(Debug)]
pub struct Waker<'c> {
    session: &'c SessionState,
    call: bool,
}

impl Waker<'_> {
    /// Wakes the threads that sleep on the word at `offset` of the channel.
    pub fn wake(&mut self, offset: u64) {
        match self.session.wakeup {
            Wakeup::Futex => {
                futex_wake(&self.session.channel, offset);
                self.session.counters.wakes.add(1);
            }
            Wakeup::Call(_) => self.call = true,
        }
    }
}

impl Drop for Waker<'_> {
    fn drop(&mut self) {
        if let (true, Wakeup::Call(call)) = (self.call, &self.session.wakeup) {
            call();
            self.session.counters.wakes.add(1);
        }
    }
}

fn futex_wake(channel: &ChannelMemory, offset: u64) {
    debug_assert!(offset.is_multiple_of(4) && offset + 4 <= channel.size);
    // SAFETY: callers pass offsets of words inside the channel, which its view keeps mapped.
    let word = unsafe { channel.view.base().add(offset as usize) };
    // SAFETY: FUTEX_WAKE reads no memory of ours; the address only names the futex.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// A flag that one thread raises for another, beside a doorbell.
#[derive(Debug, Default)]
pub(super) struct Raised(AtomicBool);

impl Raised {
    pub(super) fn raise(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}

/// Numbers threads for their names.
pub(super) fn thread_name(kind: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{kind}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}
