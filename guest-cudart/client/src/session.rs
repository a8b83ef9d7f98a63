//! The channel as this process uses it: records go in, answers and progress come out.
//!
//! One session for a process, opened at the first use. [`Session::append`] takes tens of nanoseconds: encode into a buffer of the thread, take the ring's lock,
//! write, ask whether the host side sleeps. [`Session::submit`] also takes a reply slot, and [`Pending::wait`] polls it for a bounded time and then
//! sleeps.
//!
//! **Loss.** Whoever waits looks at the channel's state again whenever it wakes, and at least every [`LOOK`]; once the session is
//! lost, every call answers `CUDA_ERROR_DEVICE_UNAVAILABLE` at once, and one line on stderr has said why.
//!
//! **Fork.** A child has no session: its calls answer `CUDA_ERROR_NOT_INITIALIZED` and touch nothing of its parent's.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::arena::Arena;
use crate::counters::{self, COUNTERS, add};
use crate::port::{self, Port, PortError};
use crate::{lock, log, turn};
use protocol::Status;
use protocol::channel::{
    Full, Geometry, Header, MAX_RECORD, NO_SLOT, Producer, Progress, RECORD_HEADER, ReplySlot, RingMemory,
    SleepFlag, SlotState, State,
};
use protocol::link::wish;
use protocol::ops::context::DeviceOutput;
use protocol::ops::{Op, SyncOp, decode_reply, encode};
use protocol::trace::{RECORDER, Stage};
use protocol::version::OURS;

/// How often a sleeper looks whether the host side is still there.
pub(crate) const LOOK: Duration = Duration::from_millis(250);

/// A process's session.
pub struct Session {
    port: Box<dyn Port>,
    geometry: Geometry,
    /// Minor number of the version that the session speaks.
    minor: u16,
    header: &'static Header,
    progress: &'static Progress,
    producer: Mutex<Producer<'static>>,
    slots: Slots,
    poll: Poll,
    arena: Arena,
    /// The host side is gone without having said so.
    dead: AtomicBool,
    loss_said: AtomicBool,
    server: OnceLock<String>,
    /// Bytes of kernels' output that were passed on, out of those that the progress area tells of.
    shown: AtomicU64,
    /// Held by who passes them on.
    showing: Mutex<()>,
}

static FORKED: AtomicBool = AtomicBool::new(false);
static DESCRIPTORS: [AtomicI32; 4] = [const { AtomicI32::new(-1) }; 4];
static GLOBAL: OnceLock<&'static Session> = OnceLock::new();

thread_local! {
    static REQUEST: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static REPLY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// Answers that this thread has asked for and not waited for yet.
    static DUE: Cell<usize> = const { Cell::new(0) };
}

/// Changes the number of answers that this thread has yet to wait for, and says what it was.
fn count_due(by: isize) -> usize {
    // A thread that is being torn down counts no more.
    DUE.try_with(|due| due.replace(due.get().saturating_add_signed(by))).unwrap_or(0)
}

/// Whether this process is a child of one that had a session.
#[inline]
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// The process's session, if it was opened.
#[inline]
pub fn current() -> Option<&'static Session> {
    GLOBAL.get().copied()
}

/// What a session is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Everything: the server gives it a device.
    Compute,
    /// NVML's questions alone, for which the server needs no device.
    Nvml,
}

/// The process's session, opened now if it was not yet; the process waits while the server serves others first.
///
/// A failure is said on stderr, and is final for this process: a program whose first call failed does not expect the next to succeed, and would go on with what the first did not
/// give it.
pub fn open() -> Result<&'static Session, Status> {
    if forked() {
        return Err(Status::NOT_INITIALIZED);
    }
    if let Some(session) = GLOBAL.get() {
        return Ok(session);
    }
    /// The process that was refused, and its error. A child of it may try for itself.
    static REFUSED: Mutex<Option<(u32, Status)>> = Mutex::new(None);
    let mut refused = lock(&REFUSED);
    if let Some(session) = GLOBAL.get() {
        return Ok(session);
    }
    if let Some((process, status)) = *refused
        && process == std::process::id()
    {
        return Err(status);
    }
    let geometry = Geometry::with_arena(arena_size());
    match port::open(geometry.size).and_then(|port| Session::over(port, geometry, Purpose::Compute)) {
        Ok(session) => {
            for (slot, fd) in DESCRIPTORS.iter().zip(session.port.descriptors()) {
                slot.store(fd, Ordering::Relaxed);
            }
            // SAFETY: `in_child` does only what may be done between fork and exec: it stores to atomics and closes descriptors.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            counters::print_at_exit("pid");
            counters::trace_to_exit();
            Ok(GLOBAL.get_or_init(|| session))
        }
        Err(error) => {
            let (status, name) = match error {
                PortError::Nothing { .. } | PortError::NoSocket { .. } | PortError::Permission { .. } => {
                    (Status::NO_DEVICE, "no device")
                }
                _ => (Status::DEVICE_UNAVAILABLE, "devices unavailable"),
            };
            log::error(format_args!(
                "{}. Every CUDA call of this process answers \"{name}\" from now on",
                error.line()
            ));
            *refused = Some((std::process::id(), status));
            Err(status)
        }
    }
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
    for slot in &DESCRIPTORS {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: the child's copy of a descriptor of the session, which the child never uses again.
            unsafe { libc::close(fd) };
        }
    }
}

/// Size of the arena in bytes: 32 MiB, or `RGPU_ARENA_MIB`.
fn arena_size() -> usize {
    let asked = std::env::var("RGPU_ARENA_MIB").ok().and_then(|value| value.trim().parse::<usize>().ok());
    asked.unwrap_or(32).clamp(4, 1024) << 20
}

impl Session {
    /// A session over a port whose channel has the size of `geometry`: writes the header, connects, and waits its turn. It lives as long as the process.
    pub fn over(
        port: Box<dyn Port>,
        geometry: Geometry,
        purpose: Purpose,
    ) -> Result<&'static Session, PortError> {
        let base = port.channel().base();
        assert_eq!(port.channel().len(), geometry.size, "the port made another channel than was asked for");
        // SAFETY: the mapping is as long as the geometry says and page-aligned, its parts do not overlap, everything in these parts is an
        // atomic, and the mapping is never unmapped: the port lives in the session, which is never freed.
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
        port.connect()?;
        turn::wait(header, &*port)?;
        let (version, fingerprint) = header.session_version();
        let version = OURS.agree(version, fingerprint).map_err(|mismatch| PortError::Refused {
            path: port.path().to_owned(),
            what: "another version of rgpu",
            reason: mismatch.describe("the host speaks", "these libraries speak"),
        })?;
        // SAFETY: inside the mapping, as above.
        let arena = Arena::new(unsafe { base.add(geometry.arena_offset) }, geometry.arena_size);
        Ok(Box::leak(Box::new(Session {
            header,
            progress,
            producer: Mutex::new(Producer::new(header, RingMemory::new(ring))),
            slots: Slots::new(slots),
            poll: Poll::from_environment(),
            arena,
            dead: AtomicBool::new(false),
            loss_said: AtomicBool::new(false),
            server: OnceLock::new(),
            shown: AtomicU64::new(0),
            showing: Mutex::new(()),
            geometry,
            minor: version.minor,
            port,
        })))
    }

    /// The port, for pinned memory.
    pub fn port(&self) -> &dyn Port {
        &*self.port
    }

    /// The staging arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// What the host side publishes.
    #[inline]
    pub fn progress(&self) -> &Progress {
        self.progress
    }

    /// The server's name, for the message that says that it was lost.
    pub fn set_server(&self, server: &str) {
        let _ = self.server.set(server.to_owned());
    }

    /// `Ok` while the session stands.
    ///
    /// # Errors
    /// `NOT_INITIALIZED` in a forked child; `DEVICE_UNAVAILABLE` when the session is lost.
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

    /// Says once on stderr that the session is lost.
    #[cold]
    fn loss(&self) -> Status {
        if !self.loss_said.swap(true, Ordering::Relaxed) {
            let reason = match self.header.state() {
                State::Lost => self.header.reason(),
                _ => self.port.why_dead(),
            };
            let server = self.server.get().map_or("the GPU server", |server| server.as_str());
            log::error(format_args!(
                "the session with {server} is lost: {reason}. Every CUDA call answers \"devices unavailable\" from now on"
            ));
        }
        Status::DEVICE_UNAVAILABLE
    }

    fn look(&self) {
        if !self.port.alive() {
            self.dead.store(true, Ordering::Relaxed);
        }
    }

    /// Sleeps while a word of the channel has a value, at most [`LOOK`], and sees to it that a dead host is noticed.
    fn sleep(&self, offset: u64, expected: u32) {
        add(&COUNTERS.sleeps, 1);
        let begin = Instant::now();
        if self.port.wait(offset, expected, LOOK) {
            add(&COUNTERS.interrupts, 1);
        }
        if begin.elapsed() >= LOOK / 2 {
            self.look();
        }
    }

    /// Appends an operation that is not answered; returns its `seq`.
    #[inline]
    pub fn append<'a, T: Op<'a>>(&self, op: &T) -> Result<u64, Status> {
        self.record(op, NO_SLOT)
    }

    /// The `seq` of the record that was appended last, by any thread; 0 before the first.
    pub fn last_seq(&self) -> u64 {
        lock(&self.producer).last_seq()
    }

    #[inline]
    fn record<'a, T: Op<'a>>(&self, op: &T, slot: u16) -> Result<u64, Status> {
        self.check()?;
        // Decided at compile time for an operation that every version has.
        if T::INFO.since > 0 && T::INFO.since > self.minor {
            return Err(Status::NOT_SUPPORTED);
        }
        let push = |buffer: &mut Vec<u8>| {
            buffer.clear();
            encode(op, buffer);
            self.push(T::INFO.opcode, slot, buffer)
        };
        // A thread that is being torn down has no buffer any more.
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
        RECORDER.note_at(Stage::Appended, seq, opcode, began);
        if self.header.host_sleep.take() {
            RECORDER.note(Stage::Rung, seq, opcode);
            add(&COUNTERS.doorbells, 1);
            self.port.kick();
        }
        Ok(seq)
    }

    /// The lock stays taken meanwhile: records of other threads come after this one.
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

    /// Appends an operation that is answered; the answer is waited for by [`Pending::wait`].
    pub fn submit<'a, T: SyncOp<'a>>(&self, op: &T) -> Result<Pending<'_, T::Reply>, Status> {
        self.check()?;
        add(&COUNTERS.round_trips, 1);
        if count_due(1) == 0 {
            add(&COUNTERS.exchanges, 1);
        }
        let slot = self.slots.acquire(self).inspect_err(|_| _ = count_due(-1))?;
        self.slots.all[slot].prepare();
        match self.record(op, slot as u16) {
            Ok(seq) => Ok(Pending {
                session: self,
                slot,
                seq,
                name: T::INFO.name,
                waited: false,
                reply: PhantomData,
            }),
            Err(status) => {
                count_due(-1);
                self.slots.release(slot);
                Err(status)
            }
        }
    }

    /// Whether reply slots are plentiful: enough that a thread that already waits for one answer may take another without keeping
    /// the last from those that have none.
    pub fn has_free_slot(&self) -> bool {
        self.slots.free.load(Ordering::Relaxed).count_ones() > 8
    }

    /// Appends an operation whose answer the program will ask for later, if at all. Nobody waits, so no round trip is counted. `None`: reply slots are scarce, and nothing was
    /// appended.
    pub fn submit_ahead<'a, T: SyncOp<'a>>(&self, op: &T) -> Result<Option<Ahead<'_, T::Reply>>, Status> {
        self.check()?;
        self.slots.sweep();
        let Some(slot) = self.has_free_slot().then(|| self.slots.try_acquire()).flatten() else {
            return Ok(None);
        };
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

    /// Appends an operation and waits for its answer.
    pub fn call<'a, T: SyncOp<'a>>(&self, op: &T) -> Result<T::Reply, Status> {
        self.submit(op)?.wait()
    }

    /// Waits until `done` says so; it is asked again whenever the progress area may have changed.
    pub fn wait_progress(&self, done: impl FnMut() -> bool) -> Result<(), Status> {
        let result = self.await_progress(done);
        self.show_output();
        result
    }

    /// Passes on what kernels have printed, if there is something new. When this returns, all of it that was there at the call has been printed.
    #[inline]
    pub fn show_output(&self) {
        if self.progress.output() != self.shown.load(Ordering::Acquire) {
            self.fetch_output();
        }
    }

    #[cold]
    fn fetch_output(&self) {
        // One at a time, so that pieces keep their order; the others wait, for they must not return before it is out.
        let _turn = lock(&self.showing);
        loop {
            let (there, shown) = (self.progress.output(), self.shown.load(Ordering::Relaxed));
            if there == shown {
                return;
            }
            match self.submit(&DeviceOutput {}).and_then(Pending::wait_alone) {
                Ok(reply) if !reply.text.0.is_empty() || reply.dropped > 0 => {
                    if reply.dropped > 0 {
                        log::warn(format_args!(
                            "{} bytes that kernels printed were dropped: the program waited for its kernels too seldom",
                            reply.dropped
                        ));
                    }
                    print(reply.error, &reply.text.0);
                    self.shown.store(shown + reply.text.0.len() as u64 + reply.dropped, Ordering::Release);
                }
                // Nothing more will come: the session is lost, or a server miscounts.
                _ => self.shown.store(there, Ordering::Release),
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

    /// Waits for the answer in a slot, frees the slot, and decodes the answer.
    fn take_reply<R>(&self, slot: usize, seq: u64, name: &'static str) -> Result<R, Status>
    where
        R: for<'r> protocol::wire::Wire<'r>,
    {
        let finish = |payload: &mut Vec<u8>| {
            payload.clear();
            // A slot that was not answered is the lost host's for ever.
            let status = self.await_slot(slot, payload)?;
            RECORDER.note(Stage::Woken, seq, 0);
            self.slots.release(slot);
            if status == Status::DEVICE_UNAVAILABLE {
                self.check()?;
            }
            status.ok()?;
            decode_reply::<R>(payload).map_err(|error| {
                log::error(format_args!(
                    "the answer to {name} does not decode ({error}): the server is of another build"
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

    /// Whether the answer in a slot is there; if so its payload is in `payload`.
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
                // Had it polled a little longer, it would have paid: a limit that once fell must be able to rise again.
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

/// Prints through the C library's own streams, as NVIDIA's driver does: so it keeps its order with what the program prints.
fn print(error: bool, text: &[u8]) {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
        static stderr: *mut libc::FILE;
    }
    // SAFETY: the C library's own streams, and a live buffer of that length. Nobody is left to tell when they are closed.
    unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), if error { stderr } else { stdout }) };
}

/// The name of this program, for people.
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

/// An answer that is due. Dropped without having been waited for, it waits: its slot is the host's until then.
#[must_use]
pub struct Pending<'s, R> {
    session: &'s Session,
    slot: usize,
    seq: u64,
    name: &'static str,
    waited: bool,
    reply: PhantomData<R>,
}

impl<R: for<'r> protocol::wire::Wire<'r>> Pending<'_, R> {
    /// The command's `seq`.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Waits for the answer.
    pub fn wait(self) -> Result<R, Status> {
        let session = self.session;
        let result = self.wait_alone();
        session.show_output();
        result
    }

    /// As [`Pending::wait`], for the operation that fetches what kernels have printed.
    fn wait_alone(mut self) -> Result<R, Status> {
        let session = self.session;
        let (slot, seq, name) = (self.slot, self.seq, self.name);
        self.waited = true;
        drop(self);
        session.take_reply(slot, seq, name)
    }
}

impl<R> Drop for Pending<'_, R> {
    fn drop(&mut self) {
        count_due(-1);
        if !self.waited && self.session.await_slot(self.slot, &mut Vec::new()).is_ok() {
            self.session.slots.release(self.slot);
        }
    }
}

/// An answer that was asked for before the program asks: see [`Session::submit_ahead`]. Dropping it never waits.
pub struct Ahead<'s, R> {
    session: &'s Session,
    slot: usize,
    seq: u64,
    name: &'static str,
    taken: bool,
    reply: PhantomData<R>,
}

impl<R: for<'r> protocol::wire::Wire<'r>> Ahead<'_, R> {
    /// The answer. If it has yet to come, this waits for it, and that is a round trip.
    pub fn take(mut self) -> Result<R, Status> {
        let session = self.session;
        self.taken = true;
        if !session.slots.all[self.slot].is_done() {
            add(&COUNTERS.round_trips, 1);
            if count_due(0) == 0 {
                add(&COUNTERS.exchanges, 1);
            }
        }
        let reply = session.take_reply(self.slot, self.seq, self.name);
        session.show_output();
        reply
    }
}

impl<R> Drop for Ahead<'_, R> {
    fn drop(&mut self) {
        if !self.taken {
            self.session.slots.leave(self.slot);
        }
    }
}

/// The reply slots, of which the first 64 are used.
struct Slots {
    all: &'static [ReplySlot],
    /// A bit for each slot that is free.
    free: AtomicU64,
    /// A bit for each slot whose answer nobody wants any more, and may yet come.
    left: AtomicU64,
    waiting: AtomicUsize,
    queue: Mutex<()>,
    came: Condvar,
}

impl Slots {
    fn new(all: &'static [ReplySlot]) -> Slots {
        let free = if all.len() >= 64 { u64::MAX } else { (1 << all.len()) - 1 };
        Slots {
            all,
            free: AtomicU64::new(free),
            left: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            queue: Mutex::new(()),
            came: Condvar::new(),
        }
    }

    fn try_acquire(&self) -> Option<usize> {
        let mut free = self.free.load(Ordering::Relaxed);
        while free != 0 {
            let bit = free & free.wrapping_neg();
            match self.free.compare_exchange_weak(free, free & !bit, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return Some(bit.trailing_zeros() as usize),
                Err(now) => free = now,
            }
        }
        None
    }

    fn acquire(&self, session: &Session) -> Result<usize, Status> {
        if let Some(slot) = self.try_acquire() {
            return Ok(slot);
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut queue = lock(&self.queue);
        let got = loop {
            // Under the lock that `sweep` takes.
            if self.reclaim() > 1 {
                self.came.notify_all();
            }
            if let Some(slot) = self.try_acquire() {
                break Ok(slot);
            }
            if let Err(status) = session.check() {
                break Err(status);
            }
            queue = self.came.wait_timeout(queue, LOOK).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        };
        drop(queue);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        got
    }

    /// Nobody wants the answer in a slot any more. The slot is the host's until it is there.
    fn leave(&self, slot: usize) {
        self.left.fetch_or(1 << slot, Ordering::SeqCst);
        self.sweep();
    }

    /// Frees the slots that were left and whose answers have come.
    fn sweep(&self) {
        if self.reclaim() != 0 && self.waiting.load(Ordering::SeqCst) != 0 {
            let _queue = lock(&self.queue);
            self.came.notify_all();
        }
    }

    /// As [`sweep`](Self::sweep), without telling those who wait for a slot; says how many it freed.
    fn reclaim(&self) -> u32 {
        let (mut left, mut freed) = (self.left.load(Ordering::Relaxed), 0);
        while left != 0 {
            let (slot, bit) = (left.trailing_zeros() as usize, left & left.wrapping_neg());
            left &= !bit;
            // Whoever takes the bit away frees the slot.
            if self.all[slot].is_done() && self.left.fetch_and(!bit, Ordering::SeqCst) & bit != 0 {
                self.free.fetch_or(bit, Ordering::SeqCst);
                freed += 1;
            }
        }
        freed
    }

    fn release(&self, slot: usize) {
        self.free.fetch_or(1 << slot, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) != 0 {
            let _queue = lock(&self.queue);
            self.came.notify_one();
        }
    }
}

/// How long a thread polls before it sleeps.
///
/// For room and for progress: a short time. For an answer: as long as polling has paid off lately, at most `RGPU_POLL_US`. On a large machine that is as
/// long as a large copy takes, because waking a thread costs as much as copying some megabytes, and a local GPU's driver spins all the while too; but only for a few
/// threads at a time, so that a program with many threads that wait leaves the processors to those that work.
struct Poll {
    most: Duration,
    /// The same for a thread that is one of too many, and for what is not an answer.
    brief: Duration,
    now_ns: AtomicU32,
    polling: AtomicUsize,
    /// Threads that may poll for long at a time.
    places: usize,
}

/// The longest poll that threads beyond [`Poll::places`] are allowed.
const BRIEF: Duration = Duration::from_micros(50);

/// A thread's place among those that poll.
struct Place<'p>(&'p AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Poll {
    fn from_environment() -> Poll {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let asked = std::env::var("RGPU_POLL_US").ok().and_then(|value| value.trim().parse().ok());
        Poll::new(cores, asked)
    }

    fn new(cores: usize, asked_us: Option<u64>) -> Poll {
        let usual = match cores {
            1 => 0,
            2 | 3 => 20,
            4..8 => 50,
            _ => 10_000,
        };
        let most = Duration::from_micros(asked_us.unwrap_or(usual).min(1_000_000));
        Poll {
            most,
            brief: most.min(BRIEF),
            now_ns: AtomicU32::new(most.as_nanos() as u32),
            polling: AtomicUsize::new(0),
            places: (cores / 4).max(1),
        }
    }

    /// How long to poll for an answer now, and the place that is held meanwhile.
    fn begin(&self) -> (Duration, Place<'_>) {
        let others = self.polling.fetch_add(1, Ordering::Relaxed);
        let now = Duration::from_nanos(self.now_ns.load(Ordering::Relaxed).into());
        let limit = if others < self.places { now } else { now.min(self.brief) };
        (limit, Place(&self.polling))
    }

    fn answered(&self, while_polling: bool) {
        let most = self.most.as_nanos() as u32;
        let now = self.now_ns.load(Ordering::Relaxed);
        let next = if while_polling { now.saturating_mul(2).min(most) } else { (now / 2).max(most / 8) };
        if next != now {
            self.now_ns.store(next, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_few_threads_poll_for_long() {
        let poll = Poll::new(16, None);
        let held: Vec<_> = (0..4).map(|_| poll.begin()).collect();
        assert!(held.iter().all(|(limit, _)| *limit == Duration::from_millis(10)));
        assert_eq!(poll.begin().0, BRIEF);
        drop(held);
        assert_eq!(poll.begin().0, Duration::from_millis(10));
    }

    #[test]
    fn polling_that_does_not_pay_gets_shorter_and_what_is_asked_for_counts() {
        let poll = Poll::new(16, Some(80));
        (0..10).for_each(|_| poll.answered(false));
        assert_eq!(poll.begin().0, Duration::from_micros(10));
        (0..10).for_each(|_| poll.answered(true));
        assert_eq!(poll.begin().0, Duration::from_micros(80));
        assert_eq!(Poll::new(64, Some(0)).begin().0, Duration::ZERO);
        assert_eq!(Poll::new(1, None).begin().0, Duration::ZERO);
    }
}
