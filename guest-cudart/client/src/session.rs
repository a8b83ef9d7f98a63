//! The channel as this process uses it: appends records and receives replies and progress.
//!
//! A process has one session for each of its servers, all opened on first use. [`Session::append`] takes tens
//! of nanoseconds: it encodes into a thread-local buffer, locks the ring, writes, and checks whether the host
//! side sleeps. [`Session::submit`] also takes a reply slot; [`Pending::wait`] polls it for a limited time
//! and then sleeps.
//!
//! **Loss.** A waiting thread checks the channel's state whenever it wakes, and at least every
//! [`LIVENESS_CHECK`]. Once the session is lost, one line on stderr gives the reason, and every call fails
//! immediately: with the sticky error of a context if there is one, or with `CUDA_ERROR_DEVICE_UNAVAILABLE`.
//!
//! **Fork.** A child has no session: its calls fail with `CUDA_ERROR_NOT_INITIALIZED` and do not touch the
//! parent's.

mod opening;

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use self::opening::Opener;
use crate::arena::Arena;
use crate::counters::{self, COUNTERS, add};
use crate::log::setting;
use crate::polling::Poll;
use crate::port::descriptor::{ForChild, Uncancelled};
use crate::port::{self, Port, PortError};
use crate::reply_slots::{LEFT_BY_ADDITIONAL, LEFT_BY_ROOM, LEFT_BY_WAITS, ReplySlots};
use crate::seq::Seq;
use crate::servers::{self, Choice};
use crate::{activity, lock, log, queue};
use protocol::Status;
use protocol::channel::{
    Full, Geometry, Header, MAX_CONTEXTS, MAX_RECORD, MAX_SERVERS, NO_SLOT, Producer, Progress,
    RECORD_HEADER, ReplySlot, RingMemory, SleepFlag, SlotState, State,
};
use protocol::handle::ContextId;
use protocol::link::wish;
use protocol::ops::context::DeviceOutput;
use protocol::ops::device::{SessionInfo, host_of};
use protocol::ops::{Op, SyncOp, decode_reply, encode};
use protocol::trace::{RECORDER, Stage};
use protocol::version::OURS;

/// If answers take longer than this, the server is [far](Session::is_far) away.
const FAR: Duration = Duration::from_micros(500);
/// How often a sleeping thread checks that the host side is alive.
pub(crate) const LIVENESS_CHECK: Duration = Duration::from_millis(250);

/// A session with one of the process's servers.
pub struct Session {
    /// Its index among the process's sessions.
    index: usize,
    port: Box<dyn Port>,
    geometry: Geometry,
    /// Minor number of the version that the session speaks.
    minor: u16,
    header: &'static Header,
    progress: &'static Progress,
    producer: Mutex<Producer<'static>>,
    slots: ReplySlots,
    poll: Poll,
    arena: Arena,
    /// Held while the host is asked to register or map memory that it may know already.
    registering: Mutex<()>,
    /// The shortest time in microseconds in which a command was answered; `u32::MAX` before the first.
    fastest: AtomicU32,
    /// Set when the host side has disappeared without publishing a loss.
    dead: AtomicBool,
    /// When the session began, and how many nanoseconds after that a thread has last looked whether the host
    /// side is there.
    since: Instant,
    looked: AtomicU64,
    loss_reported: AtomicBool,
    /// Whether a message has reported that the link to the server is interrupted.
    interruption_reported: AtomicBool,
    server: OnceLock<String>,
    /// How many bytes of kernel output (`printf`) were passed on, out of those that the progress area
    /// reports.
    output_printed: AtomicU64,
    /// Held while passing on kernel output.
    output_lock: Mutex<()>,
}

static FORKED: AtomicBool = AtomicBool::new(false);
static DESCRIPTORS: ForChild = ForChild::none();
static SESSIONS: OnceLock<Vec<&'static Session>> = OnceLock::new();

thread_local! {
    static REQUEST: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static REPLY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// Replies that this thread has requested and not received yet.
    static EXPECTED_REPLIES: Cell<usize> = const { Cell::new(0) };
}

/// Changes the number of replies that this thread still expects, and returns the old number.
fn count_expected(by: isize) -> usize {
    // A thread that is being destroyed is no longer counted.
    EXPECTED_REPLIES.try_with(|due| due.replace(due.get().saturating_add_signed(by))).unwrap_or(0)
}

/// Whether this process was forked from one that had a session.
#[inline]
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// The purpose of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Everything; the server assigns it a device.
    Compute,
    /// Only NVML queries, for which the server needs no device.
    Nvml,
}

/// The process's sessions, one for each of its servers in their order, opened if necessary. Waits while a
/// server serves others first.
///
/// A failure is reported on stderr and is final for this process: a program whose first call failed does not
/// expect the next one to succeed, and would continue without what the first should have set up.
pub fn open() -> Result<&'static [&'static Session], Status> {
    if forked() {
        return Err(Status::NOT_INITIALIZED);
    }
    if let Some(sessions) = SESSIONS.get() {
        return Ok(sessions);
    }
    let _uncancelled = Uncancelled::begin();
    /// The process that was refused, and its error. A child process may try again.
    static REFUSED: Mutex<Option<(u32, Status)>> = Mutex::new(None);
    let mut refused = lock(&REFUSED);
    if let Some(sessions) = SESSIONS.get() {
        return Ok(sessions);
    }
    if let Some((process, status)) = *refused
        && process == std::process::id()
    {
        return Err(status);
    }
    match open_all(Geometry::with_arena(arena_size()), Purpose::Compute) {
        Ok(sessions) => {
            let sessions: Vec<&'static Session> =
                sessions.into_iter().map(|session| &*Box::leak(session)).collect();
            DESCRIPTORS.remember(sessions.iter().flat_map(|session| session.port.descriptors()));
            // SAFETY: `in_child` only does what is allowed between fork and exec: it uses atomics and closes
            // descriptors.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            counters::print_at_exit("pid");
            counters::trace_to_exit();
            Ok(SESSIONS.get_or_init(|| sessions))
        }
        Err(error) => {
            let (status, name) = match error {
                PortError::Nothing { .. } | PortError::NoSocket { .. } | PortError::Permission { .. } => {
                    (Status::NO_DEVICE, "no device")
                }
                _ => (Status::DEVICE_UNAVAILABLE, "devices unavailable"),
            };
            let line = error.line();
            let stop = log::full_stop(&line);
            log::error(format_args!("{line}{stop} All CUDA calls of this process will fail with \"{name}\""));
            *refused = Some((std::process::id(), status));
            Err(status)
        }
    }
}

/// Opens a session with each of the process's servers, in their order. Unless `RGPU_SERVERS` names the
/// servers, the first session tells how many there are; the other sessions are opened concurrently. If one
/// cannot be opened, the others are closed.
pub fn open_all(geometry: Geometry, purpose: Purpose) -> Result<Vec<Box<Session>>, PortError> {
    let all = All { named: servers::named()?, geometry, purpose };
    let first = all.open(0, &|_, _| ())?;
    let count = if all.named.is_empty() {
        first.header.servers().clamp(1, MAX_SERVERS as u32) as usize
    } else {
        all.named.len()
    };
    if count == 1 {
        return Ok(vec![first]);
    }
    port::several();
    opening::all(&all, first, count)
}

/// Opens a new session with the server of a lost session.
pub fn open_again(lost: &Session, purpose: Purpose) -> Result<Box<Session>, PortError> {
    let all = All { named: servers::named()?, geometry: lost.geometry, purpose };
    all.open(lost.index, &|_, _| ())
}

/// The sessions with a process's servers.
struct All {
    /// The servers that `RGPU_SERVERS` names.
    named: Vec<String>,
    geometry: Geometry,
    purpose: Purpose,
}

impl Opener for All {
    type Session = Box<Session>;

    fn open(&self, number: usize, waits: &dyn Fn(&str, Duration)) -> Result<Box<Session>, PortError> {
        let choice = Choice { index: number, name: self.named.get(number).map(String::as_str) };
        let port = port::open(self.geometry.size)?;
        Session::in_turn(port, self.geometry, self.purpose, &choice, waits)
    }

    fn name(&self, session: &Box<Session>) -> Option<String> {
        let described = match session.server.get() {
            Some(described) => described.clone(),
            None => {
                let described = session.call(&SessionInfo {}).ok()?.server;
                session.set_server(&described);
                described
            }
        };
        Some(host_of(&described).to_owned())
    }
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
    DESCRIPTORS.close();
}

/// Maximum seconds that the session may be interrupted before it is lost: `RGPU_LOST_AFTER`, or 0 if that is
/// not set, and then the server decides.
fn lost_after() -> u32 {
    port::asked_lost_after().map_or(0, |seconds| seconds as u32)
}

/// Size of the arena in bytes: 32 MiB, or `RGPU_ARENA_MIB`.
fn arena_size() -> usize {
    (setting::number("RGPU_ARENA_MIB", "MiB", 4..=1024).unwrap_or(32) << 20) as usize
}

/// Size in bytes up to which the staging memory grows over a long distance: 256 MiB, or
/// `RGPU_ARENA_MOST_MIB`.
fn most_staging() -> usize {
    (setting::number("RGPU_ARENA_MOST_MIB", "MiB", 0..=16 << 10).unwrap_or(256) << 20) as usize
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "session {}", self.index)
    }
}

/// The process's sessions that [`open`] has opened.
pub(crate) fn opened() -> impl Iterator<Item = &'static Session> {
    SESSIONS.get().into_iter().flatten().copied()
}

impl Session {
    /// A session with the first server over this port, whose channel has the size of `geometry`, for as long
    /// as the process lives.
    pub fn over(
        port: Box<dyn Port>,
        geometry: Geometry,
        purpose: Purpose,
    ) -> Result<&'static Session, PortError> {
        let first = Choice { index: 0, name: None };
        let session = Session::in_turn(port, geometry, purpose, &first, &|_, _| ())?;
        Ok(Box::leak(session))
    }

    /// Creates a session over a port whose channel has the size of `geometry`: writes the header, connects,
    /// and waits until the server is ready. While it is in the server's queue, calls `waits` now and then,
    /// with the server's name and how long it has waited. The session is closed when it is dropped.
    fn in_turn(
        port: Box<dyn Port>,
        geometry: Geometry,
        purpose: Purpose,
        server: &Choice<'_>,
        waits: &dyn Fn(&str, Duration),
    ) -> Result<Box<Session>, PortError> {
        let base = port.channel().base();
        assert_eq!(port.channel().len(), geometry.size, "the port's channel has the wrong size");
        // SAFETY: the mapping is page-aligned and as long as the geometry says, its parts do not overlap, and
        // everything in these parts is an atomic. The port, which unmaps it, lives in the session, and the
        // session gives these references to nobody for longer than it is borrowed.
        let (header, progress, ring, slots) = unsafe {
            (
                &*base.cast::<Header>(),
                &*base.add(geometry.progress_offset).cast::<Progress>(),
                std::slice::from_raw_parts(
                    base.add(geometry.ring_offset).cast::<AtomicU64>(),
                    geometry.ring_size / 8,
                ),
                std::slice::from_raw_parts(
                    base.add(geometry.slots_offset).cast::<ReplySlot>(),
                    geometry.slot_count,
                ),
            )
        };
        header.write_fields(&geometry.fields(std::process::id(), &program()));
        header.set_wishes(match purpose {
            Purpose::Compute => wish::MAY_WAIT,
            Purpose::Nvml => wish::MAY_WAIT | wish::NVML_ONLY,
        });
        header.set_lost_after(lost_after());
        server.write_to(header);
        port.connect()?;
        queue::wait(header, &*port, waits)?;
        let (version, fingerprint) = header.session_version();
        let version = OURS.agree(version, fingerprint).map_err(|mismatch| PortError::Refused {
            path: port.path().to_owned(),
            what: "another version of rgpu",
            reason: mismatch.describe("the host speaks", "these libraries speak"),
        })?;
        // SAFETY: the geometry places the arena inside the mapping.
        let arena =
            Arena::new(unsafe { base.add(geometry.arena_offset) }, geometry.arena_size, most_staging());
        Ok(Box::new(Session {
            index: server.index,
            header,
            progress,
            producer: Mutex::new(Producer::new(header, RingMemory::new(ring))),
            slots: ReplySlots::new(slots),
            poll: Poll::from_environment(),
            arena,
            registering: Mutex::new(()),
            fastest: AtomicU32::new(u32::MAX),
            dead: AtomicBool::new(false),
            since: Instant::now(),
            looked: AtomicU64::new(0),
            loss_reported: AtomicBool::new(false),
            interruption_reported: AtomicBool::new(false),
            server: OnceLock::new(),
            output_printed: AtomicU64::new(0),
            output_lock: Mutex::new(()),
            geometry,
            minor: version.minor,
            port,
        }))
    }

    /// Its index among the process's sessions.
    #[inline]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The port, for pinned memory.
    pub fn port(&self) -> &dyn Port {
        &*self.port
    }

    /// Locks out other threads that would register or map the same memory.
    pub fn registering(&self) -> MutexGuard<'_, ()> {
        lock(&self.registering)
    }

    /// The staging arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// What the host side reports.
    #[inline]
    pub fn progress(&self) -> &Progress {
        self.progress
    }

    /// Sets the server's name for the message that reports its loss.
    pub fn set_server(&self, server: &str) {
        let _ = self.server.set(server.to_owned());
    }

    /// `Ok` while the session is usable.
    ///
    /// # Errors
    ///
    /// `NOT_INITIALIZED` in a forked child; when the session is lost, the sticky error of a context, or else
    /// `DEVICE_UNAVAILABLE`.
    #[inline]
    pub fn check(&self) -> Result<(), Status> {
        if forked() {
            return Err(Status::NOT_INITIALIZED);
        }
        if self.header.state() == State::Ready && !self.dead.load(Ordering::Relaxed) {
            Ok(())
        } else {
            Err(self.loss())
        }
    }

    /// What a call that needed memory of the host returns when there is none: the loss of the session, if
    /// that is why, and else `OUT_OF_MEMORY`, with `what` failed on stderr.
    #[cold]
    pub fn no_memory(&self, what: std::fmt::Arguments<'_>, error: &PortError) -> Status {
        self.check_liveness();
        self.check().err().unwrap_or_else(|| {
            log::warn(format_args!("{what}: {}", error.line()));
            Status::OUT_OF_MEMORY
        })
    }

    /// Reports the loss of the session once on stderr.
    #[cold]
    fn loss(&self) -> Status {
        let errors = (0..MAX_CONTEXTS).filter_map(|id| self.progress.error(ContextId(id))?.get());
        let sticky = errors.filter(|(_, sticky, _)| *sticky).map(|(status, ..)| status).next();
        if !self.loss_reported.swap(true, Ordering::Relaxed) {
            let reason = match self.header.state() {
                State::Lost => self.header.reason(),
                _ => self.port.why_dead(),
            };
            let server = self.server.get().map_or("the GPU server", |server| server.as_str());
            let name = sticky.map_or("\"devices unavailable\"".to_owned(), |status| status.to_string());
            let stop = log::full_stop(&reason);
            log::error(format_args!(
                "the session with {server} is lost: {reason}{stop} All further CUDA calls will fail with {name}"
            ));
        }
        sticky.unwrap_or(Status::DEVICE_UNAVAILABLE)
    }

    fn check_liveness(&self) {
        if !self.port.alive() {
            self.dead.store(true, Ordering::Relaxed);
        }
    }

    /// Sleeps while a word of the channel keeps its value, for at most [`LIVENESS_CHECK`], and detects a dead
    /// host.
    fn sleep(&self, offset: u64, expected: u32) {
        add(&COUNTERS.sleeps, 1);
        let begin = Instant::now();
        let woken = self.port.wait(offset, expected, LIVENESS_CHECK);
        if woken {
            add(&COUNTERS.interrupts, 1);
        }
        if !woken || begin.elapsed() >= LIVENESS_CHECK / 2 {
            self.look_again();
        }
        self.report_interruption();
    }

    /// [Looks](Self::check_liveness) if no thread has looked for a while. Signals may end every sleep early,
    /// so it does not matter how long a sleep was.
    fn look_again(&self) {
        let now = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let looked = self.looked.load(Ordering::Relaxed);
        let due = Duration::from_nanos(now.saturating_sub(looked)) >= LIVENESS_CHECK / 2;
        let relaxed = Ordering::Relaxed;
        if due && self.looked.compare_exchange(looked, now, relaxed, relaxed).is_ok() {
            self.check_liveness();
        }
    }

    /// Reports on stderr when the link to the server is interrupted, and when it works again, once each.
    fn report_interruption(&self) {
        let interrupted = self.header.is_interrupted();
        if interrupted == self.interruption_reported.load(Ordering::Relaxed)
            || self.header.state() != State::Ready
            || self.interruption_reported.swap(interrupted, Ordering::Relaxed) == interrupted
        {
            return;
        }
        let server = self.server.get().map_or("the GPU server", |server| server.as_str());
        if interrupted {
            log::warn(format_args!(
                "the connection to {server} is interrupted: this program waits until it is back (RGPU_LOST_AFTER limits how long)"
            ));
        } else {
            log::warn(format_args!("the connection to {server} is back: this program continues"));
        }
    }

    /// The minimum time for an answer: the shortest time in which a command was answered so far. Zero if none
    /// was.
    pub fn round_trip(&self) -> Duration {
        match self.fastest.load(Ordering::Relaxed) {
            u32::MAX => Duration::ZERO,
            microseconds => Duration::from_micros(microseconds.into()),
        }
    }

    /// Whether the server is so far away that the round-trip time limits the bandwidth, instead of the
    /// copies.
    pub fn is_far(&self) -> bool {
        self.round_trip() >= FAR
    }

    /// Appends an operation without a reply and returns its `seq`.
    #[inline]
    pub fn append<'a, T: Op<'a>>(&self, op: &T) -> Result<Seq, Status> {
        self.record(op, NO_SLOT).map(|number| self.seq(number))
    }

    fn seq(&self, number: u64) -> Seq {
        Seq::new(self.index, number)
    }

    /// The `seq` of the record that any thread appended last; number 0 before the first.
    pub fn last_seq(&self) -> Seq {
        self.seq(lock(&self.producer).last_seq())
    }

    /// Bytes of records that were appended to the ring so far.
    #[inline]
    pub fn appended(&self) -> u64 {
        self.header.appended()
    }

    /// Whether at least half of the ring is free. Otherwise the server may be silent, and the next records
    /// wait for it.
    pub fn has_much_room(&self) -> bool {
        self.header.waiting() <= self.geometry.ring_size as u64 / 2
    }

    /// Whether the source data of a record of this session, and of all before it, has been read.
    pub fn has_released(&self, seq: Seq) -> bool {
        seq.is_reached_at(self.progress.released())
    }

    /// Whether the server knows an operation. Decided at compile time for one that every version has.
    #[inline]
    pub fn knows<'a, T: Op<'a>>(&self) -> bool {
        T::INFO.since == 0 || T::INFO.since <= self.minor
    }

    /// Minor number of the version that the session speaks.
    pub fn minor(&self) -> u16 {
        self.minor
    }

    #[inline]
    fn record<'a, T: Op<'a>>(&self, op: &T, slot: u16) -> Result<u64, Status> {
        self.check()?;
        if !self.knows::<T>() {
            return Err(Status::NOT_SUPPORTED);
        }
        let push = |buffer: &mut Vec<u8>| {
            buffer.clear();
            encode(op, buffer);
            self.push(T::INFO.opcode, slot, buffer)
        };
        // A thread that is being destroyed no longer has its buffer.
        REQUEST
            .try_with(|buffer| match buffer.try_borrow_mut() {
                Ok(mut buffer) => push(&mut buffer),
                Err(_) => push(&mut Vec::new()),
            })
            .unwrap_or_else(|_| push(&mut Vec::new()))
    }

    fn push(&self, opcode: u16, slot: u16, body: &[u8]) -> Result<u64, Status> {
        if body.len() + RECORD_HEADER + 16 > MAX_RECORD {
            return Err(Status::INVALID_VALUE);
        }
        add(&COUNTERS.commands, 1);
        let began = RECORDER.clock();
        let seq = {
            let mut producer = lock(&self.producer);
            match producer.push(opcode, slot, body) {
                Ok(seq) => seq,
                Err(Full) => self.push_when_there_is_room(&mut producer, opcode, slot, body)?,
            }
        };
        let noted = self.seq(seq).in_timeline();
        RECORDER.note_at(Stage::Appended, noted, opcode, began);
        if counters::calls_are_watched() {
            activity::appended(self.seq(seq));
        }
        if self.header.host_sleep.take() {
            RECORDER.note(Stage::Rung, noted, opcode);
            add(&COUNTERS.doorbells, 1);
            self.port.kick();
        }
        Ok(seq)
    }

    /// The lock stays held, so that records of other threads follow this one.
    #[cold]
    fn push_when_there_is_room(
        &self,
        producer: &mut Producer<'_>,
        opcode: u16,
        slot: u16,
        body: &[u8],
    ) -> Result<u64, Status> {
        add(&COUNTERS.ring_full, 1);
        loop {
            let begin = Instant::now();
            while begin.elapsed() < self.poll.brief {
                if let Ok(seq) = producer.push(opcode, slot, body) {
                    return Ok(seq);
                }
                std::hint::spin_loop();
            }
            self.check()?;
            self.header.ring_sleep.announce();
            if let Ok(seq) = producer.push(opcode, slot, body) {
                return Ok(seq);
            }
            self.sleep(Header::RING_SLEEP_OFFSET, SleepFlag::ASLEEP);
        }
    }

    /// Appends an operation with a reply; [`Pending::wait`] receives it.
    #[inline]
    pub fn submit<'a, T: SyncOp<'a>>(&self, op: &T) -> Result<Pending<'_, T::Reply>, Status> {
        self.slot()?.submit(op)
    }

    /// A reply slot. Waits until there is one.
    #[inline]
    pub fn slot(&self) -> Result<Slot<'_>, Status> {
        self.check()?;
        Ok(Slot { session: self, slot: self.slots.acquire(self)? })
    }

    /// A reply slot for a wait that may take as long as the program wants. `None` if so many threads wait
    /// that this one must wait without a slot: see [`wait_progress`](Self::wait_progress).
    #[inline]
    pub fn slot_to_wait(&self) -> Result<Option<Slot<'_>>, Status> {
        self.slot_leaving(LEFT_BY_WAITS)
    }

    /// A reply slot for a question for room in a stream. `None` if there is none now.
    pub fn slot_for_room(&self) -> Result<Option<Slot<'_>>, Status> {
        self.slot_leaving(LEFT_BY_ROOM)
    }

    #[inline]
    fn slot_leaving(&self, leaving: u32) -> Result<Option<Slot<'_>>, Status> {
        self.check()?;
        let slot = self.slots.try_acquire_leaving(leaving);
        Ok(slot.map(|slot| Slot { session: self, slot }))
    }

    /// Whether enough reply slots are free that a thread that already waits for a reply may take another one
    /// without starving threads that have none.
    pub fn has_free_slot(&self) -> bool {
        self.slots.are_plentiful()
    }

    /// Appends an operation whose reply the program may need later. No thread waits yet, so no round trip is
    /// counted. `None` if reply slots are scarce; nothing was appended then.
    pub fn submit_ahead<'a, T: SyncOp<'a>>(&self, op: &T) -> Result<Option<Ahead<'_, T::Reply>>, Status> {
        self.check()?;
        self.slots.sweep();
        let Some(slot) = self.slots.try_acquire_leaving(LEFT_BY_ADDITIONAL) else { return Ok(None) };
        self.slots.all[slot].prepare();
        match self.record(op, slot as u16) {
            Ok(seq) => {
                let (name, taken, reply) = (T::INFO.name, false, PhantomData);
                Ok(Some(Ahead { session: self, slot, seq, name, taken, reply }))
            }
            Err(status) => {
                self.slots.release(slot);
                Err(status)
            }
        }
    }

    /// Appends an operation and waits for its reply.
    pub fn call<'a, T: SyncOp<'a>>(&self, op: &T) -> Result<T::Reply, Status> {
        self.submit(op)?.wait()
    }

    /// Waits until `done` returns true. It is called whenever the progress area may have changed.
    pub fn wait_progress(&self, mut done: impl FnMut() -> bool) -> Result<(), Status> {
        let mut result = Ok(());
        if !done() {
            let begun = Instant::now();
            result = self.await_progress(done);
            add(&COUNTERS.waited_us, begun.elapsed().as_micros() as u64);
        }
        self.show_output();
        result
    }

    /// Passes on new kernel output. When this returns, all output that existed at the call has been printed.
    #[inline]
    pub fn show_output(&self) {
        if self.progress.output() != self.output_printed.load(Ordering::Acquire) {
            self.fetch_output();
        }
    }

    #[cold]
    fn fetch_output(&self) {
        // One thread at a time, to keep the order. Others wait here, because they must not return before the
        // output is printed.
        let _turn = lock(&self.output_lock);
        loop {
            let (there, output_printed) =
                (self.progress.output(), self.output_printed.load(Ordering::Relaxed));
            if there == output_printed {
                return;
            }
            match self.submit(&DeviceOutput {}).and_then(Pending::wait_alone) {
                Ok(reply) if !reply.text.0.is_empty() || reply.dropped > 0 => {
                    if reply.dropped > 0 {
                        log::warn(format_args!(
                            "{} bytes of kernel output were dropped: the program synchronizes too rarely for the amount that its kernels print",
                            reply.dropped
                        ));
                    }
                    print(reply.error, &reply.text.0);
                    self.output_printed
                        .store(output_printed + reply.text.0.len() as u64 + reply.dropped, Ordering::Release);
                }
                // There is no more output: the session is lost, or the server miscounted.
                _ => self.output_printed.store(there, Ordering::Release),
            }
        }
    }

    fn await_progress(&self, mut done: impl FnMut() -> bool) -> Result<(), Status> {
        let begin = Instant::now();
        loop {
            if done() {
                return Ok(());
            }
            self.check()?;
            if begin.elapsed() < self.poll.brief {
                std::hint::spin_loop();
                continue;
            }
            self.header.progress_sleep.announce();
            if done() {
                return Ok(());
            }
            self.check()?;
            self.sleep(Header::PROGRESS_SLEEP_OFFSET, SleepFlag::ASLEEP);
        }
    }

    /// Waits for the reply in a slot, frees the slot, and decodes the reply.
    fn take_reply<R>(&self, slot: usize, seq: u64, name: &'static str) -> Result<R, Status>
    where
        R: for<'r> protocol::wire::Wire<'r>,
    {
        let finish = |payload: &mut Vec<u8>| {
            payload.clear();
            // If this fails, the host is lost and keeps the slot.
            let status = self.await_slot(slot, payload)?;
            RECORDER.note(Stage::Woken, self.seq(seq).in_timeline(), 0);
            self.slots.release(slot);
            if status == Status::DEVICE_UNAVAILABLE {
                self.check()?;
            }
            status.ok()?;
            decode_reply::<R>(payload).map_err(|error| {
                log::error(format_args!(
                    "the reply to {name} cannot be decoded ({error}): the server is a different build; install the same version of rgpu on both sides"
                ));
                Status::UNKNOWN
            })
        };
        REPLY
            .try_with(|buffer| match buffer.try_borrow_mut() {
                Ok(mut buffer) => finish(&mut buffer),
                Err(_) => finish(&mut Vec::new()),
            })
            .unwrap_or_else(|_| finish(&mut Vec::new()))
    }

    /// Waits for the reply in a slot and stores its payload in `payload`.
    fn await_slot(&self, index: usize, payload: &mut Vec<u8>) -> Result<Status, Status> {
        let slot = &self.slots.all[index];
        let begin = Instant::now();
        let (limit, place) = self.poll.begin();
        loop {
            for _ in 0..16 {
                if let Some(completion) = slot.poll(payload) {
                    self.poll.answered(true);
                    return Ok(completion.status);
                }
                std::hint::spin_loop();
            }
            if begin.elapsed() >= limit {
                break;
            }
        }
        drop(place);
        loop {
            if let Some(completion) = slot.poll(payload) {
                // Slightly longer polling would have succeeded, so the limit must be able to rise again.
                self.poll.answered(begin.elapsed() < self.poll.most);
                return Ok(completion.status);
            }
            if slot.announce_sleep() {
                self.check()?;
                self.sleep(self.geometry.slot_offset(index) as u64, SlotState::Sleeping as u32);
            }
        }
    }
}

/// Prints through the C library's streams, as NVIDIA's driver does, so that the order with the program's own
/// output is kept.
fn print(error: bool, text: &[u8]) {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
        static stderr: *mut libc::FILE;
    }
    let _uncancelled = Uncancelled::begin();
    // SAFETY: the C library's own streams and a live buffer of that length. Errors are ignored, since the
    // streams may be closed.
    unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), if error { stderr } else { stdout }) };
}

/// The program's name, for display.
fn program() -> String {
    let name = std::env::current_exe()
        .ok()
        .and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()));
    let mut name = name.unwrap_or_default();
    while name.len() > 39 {
        name.pop();
    }
    name
}

/// A reply slot for the next operation of its owner.
#[must_use]
pub struct Slot<'s> {
    session: &'s Session,
    slot: usize,
}

impl<'s> Slot<'s> {
    /// As [`Session::submit`], with this slot.
    #[inline]
    pub fn submit<'a, T: SyncOp<'a>>(self, op: &T) -> Result<Pending<'s, T::Reply>, Status> {
        let Slot { session, slot } = self;
        session.slots.all[slot].prepare();
        let begun = Instant::now();
        // If it fails, dropping this frees the slot.
        let seq = session.record(op, slot as u16)?;
        std::mem::forget(self);
        add(&COUNTERS.round_trips, 1);
        if count_expected(1) == 0 {
            add(&COUNTERS.exchanges, 1);
        }
        let (name, waited, reply) = (T::INFO.name, false, PhantomData);
        Ok(Pending { session, slot, seq, begun, name, waited, reply })
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.session.slots.release(self.slot);
    }
}

/// An expected reply. If dropped early it waits, because the host owns the slot until it has replied.
#[must_use]
pub struct Pending<'s, R> {
    session: &'s Session,
    slot: usize,
    seq: u64,
    begun: Instant,
    name: &'static str,
    waited: bool,
    reply: PhantomData<R>,
}

impl<R: for<'r> protocol::wire::Wire<'r>> Pending<'_, R> {
    /// The command's `seq`.
    pub fn seq(&self) -> Seq {
        self.session.seq(self.seq)
    }

    /// Waits for the reply.
    pub fn wait(self) -> Result<R, Status> {
        let session = self.session;
        let result = self.wait_alone();
        session.show_output();
        result
    }

    /// [`Pending::wait`] for the operation that fetches kernel output.
    fn wait_alone(mut self) -> Result<R, Status> {
        let session = self.session;
        let (slot, seq, name, begun) = (self.slot, self.seq, self.name, self.begun);
        self.waited = true;
        drop(self);
        let reply = session.take_reply(slot, seq, name);
        let took = u32::try_from(begun.elapsed().as_micros()).unwrap_or(u32::MAX);
        add(&COUNTERS.waited_us, took.into());
        if took < session.fastest.load(Ordering::Relaxed) {
            session.fastest.store(took, Ordering::Relaxed);
        }
        reply
    }
}

impl<R> Drop for Pending<'_, R> {
    fn drop(&mut self) {
        count_expected(-1);
        if !self.waited && self.session.await_slot(self.slot, &mut Vec::new()).is_ok() {
            self.session.slots.release(self.slot);
        }
    }
}

/// A reply that was requested before the program needs it; see [`Session::submit_ahead`]. Dropping it never
/// waits.
pub struct Ahead<'s, R> {
    session: &'s Session,
    slot: usize,
    seq: u64,
    name: &'static str,
    taken: bool,
    reply: PhantomData<R>,
}

impl<R> Ahead<'_, R> {
    /// The command's `seq`.
    pub fn seq(&self) -> Seq {
        self.session.seq(self.seq)
    }

    /// Whether the reply has arrived.
    pub fn is_done(&self) -> bool {
        self.session.slots.all[self.slot].is_done()
    }
}

impl<R: for<'r> protocol::wire::Wire<'r>> Ahead<'_, R> {
    /// The reply. If it has not arrived, this waits for it and counts a round trip.
    pub fn take(mut self) -> Result<R, Status> {
        let session = self.session;
        self.taken = true;
        if !self.is_done() {
            add(&COUNTERS.round_trips, 1);
            if count_expected(0) == 0 {
                add(&COUNTERS.exchanges, 1);
            }
        }
        let begun = Instant::now();
        let reply = session.take_reply(self.slot, self.seq, self.name);
        add(&COUNTERS.waited_us, begun.elapsed().as_micros() as u64);
        session.show_output();
        reply
    }
}

impl<R> Drop for Ahead<'_, R> {
    fn drop(&mut self) {
        if !self.taken {
            self.session.slots.abandon(self.slot);
        }
    }
}
