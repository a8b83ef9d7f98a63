//! Page-locked buffers between devices and data that travels over the network (or is where no device can
//! access it).
//!
//! A transfer knows from the beginning which slot each of its chunks will use
//! ([`slots`](crate::driver::slots)). All of its device work is enqueued in its stream at once. Three words
//! for each slot, which count the slot's uses, order that work with the network:
//!
//! ```text
//!  in:   network fills slot ─ host word = n ─▶ stream: wait(host ≥ n), copy to device, write(gpu = n) ─▶ the network may fill it again
//!  out:  stream: wait(free ≥ n−1), copy from device, write(gpu = n) ─▶ sender sends it
//!                all is queued, and that it was sent ─ host word = n ─▶ the stream continues
//!                   the client has it, or it was copied ─ free word = n ─▶ the stream may fill it again
//! ```
//!
//! Data may have to be sent again when a connection is lost, so it stays in its slot until the client has
//! acknowledged it. If acknowledgements do not arrive, a sender with nothing to send has it copied instead.
//! So no stream waits for them for long, and while they do arrive, hardly anything is copied.
//!
//! So a stream waits only for the network, the dispatcher never waits, and a stream whose data is late delays
//! only itself. Towards the client it waits only until the data has its place in the transport, from where it
//! goes out before everything that depends on it
//! (`docs/decisions/0160-data-is-announced-before-it-is-sent.md`).
//!
//! A worker allocates the slots' memory, 56 MiB, before its session begins, so that the first copy is fast.
//! When nothing has been transferred for [`IDLE`], it frees the memory. The next transfer allocates it again.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::driver::call::Result;
use host_bridge::endpoint::{Grants, Held, Landing, Mapped, Sink, Unacknowledged};
use protocol::Status;
use protocol::polling::{COMPLETER_BUSY, COMPLETER_BUSY_NETWORK, PollTime};

use std::ptr::NonNull;

use super::api::{Api, CUcontext, CUdeviceptr};
use super::fence::{ALREADY_REGISTERED, Completer, Health, Pinned, Word, Words, nap_precisely};
use crate::driver::slots::{self, Flow, Slots, Use};

/// Number of reply slots that have a buffer of their own for small answers.
const ANSWERS: usize = 64;
/// Size of such a buffer, in bytes.
pub(super) const ANSWER: usize = 4 << 10;
/// Number of sending threads of one transfer: as many as the client has data connections, within these
/// limits. Over TLS each thread also seals what it sends, so a fast link needs one for each connection.
const SENDERS: RangeInclusive<usize> = 4..=8;
/// How long a sender checks for something to send before it naps, if others send the same transfer with it.
/// One that sends a short transfer alone checks for as long as the completer does: a program waits for it.
const PATIENCE: Duration = Duration::from_micros(100);
/// How long sent data waits in its slots for any acknowledgement before it is copied.
const SETTLE: Duration = Duration::from_millis(1);
/// The time between two checks of a sender when nothing is ready.
const NAP: Duration = Duration::from_micros(20);

/// The slots' memory is freed when nothing was transferred for this long.
const IDLE: Duration = Duration::from_secs(10);

/// The slots, the words that guard them, and the sending threads.
pub(super) struct Staging {
    api: &'static Api,
    /// Buffers for small answers.
    answers: Mutex<Pinned>,
    answers_at: NonNull<u8>,
    words: Vec<Slot>,
    slots: Slots,
    /// The context in which everything here is registered. It outlives contexts made by the program.
    home: Mutex<Registered>,
    block: Mutex<Holding>,
    /// The first ones are started with the first block, and further ones when a transfer has use for them.
    senders: Mutex<Vec<Sender<Job>>>,
    /// The senders that look for chunks and send none at the moment, a bit for each.
    looking: AtomicU32,
    /// Whether a transfer has begun since the first sender last checked.
    used: AtomicBool,
    /// Whether the session has begun. From then on the memory is freed when it is idle.
    begun: AtomicBool,
    over: AtomicBool,
}

// SAFETY: `answers_at` points into memory that is never unmapped, and a block's memory lives as long as the
// block; who uses which part is the protocol of `slots` and of the words.
unsafe impl Send for Staging {}
// SAFETY: what `Send` relies on holds for shared use as well: locks, atomics, and the protocol of `slots` and
// of the words.
unsafe impl Sync for Staging {}

/// The current memory of the slots.
#[derive(Default)]
struct Holding {
    block: Option<Arc<Block>>,
    /// Whether the RDMA device uses the memory, too, so that it is never freed.
    forever: bool,
}

/// Memory for all slots, registered with CUDA. Each transfer holds a reference.
struct Block {
    api: &'static Api,
    at: NonNull<u8>,
    /// The context in which it was registered last.
    context: Mutex<Registered>,
}

/// The context in which memory is registered.
struct Registered(CUcontext);

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for Registered {}
// SAFETY: plain memory that lives as long as this; who uses which part is the protocol of `slots` and of the
// words.
unsafe impl Send for Block {}
// SAFETY: shared use changes only what its mutex guards; who uses which part of the memory is the protocol of
// `slots` and of the words.
unsafe impl Sync for Block {}

impl Block {
    /// Allocates memory and registers it with the current context.
    fn new(api: &'static Api) -> Result<Block> {
        // SAFETY: a fresh anonymous mapping.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                slots::BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        let at = if at == libc::MAP_FAILED { None } else { NonNull::new(at.cast::<u8>()) };
        let context = Mutex::new(Registered(std::ptr::null_mut()));
        let block = Block { api, at: at.ok_or(Status::OUT_OF_MEMORY)?, context };
        block.register()?;
        Ok(block)
    }

    /// Registers the memory with the current context. Called again if that context is reset.
    fn register(&self) -> Result {
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: writes a context handle; then the memory is this block's, page-aligned, and unregistered
        // before it is unmapped. Flags: portable, device-mapped.
        unsafe {
            self.api.context_current(&mut current)?;
            match self.api.host_register(self.at.as_ptr().cast(), slots::BYTES, 3) {
                Ok(()) | Err(ALREADY_REGISTERED) => {}
                Err(status) => return Err(status),
            }
        }
        self.context.lock().unwrap_or_else(|e| e.into_inner()).0 = current;
        Ok(())
    }

    /// Frees the memory. The driver may wait for unfinished work first.
    fn release(self) {
        let context = self.context.into_inner().unwrap_or_else(|e| e.into_inner()).0;
        // SAFETY: a context of this process (the driver refuses one that was destroyed), memory registered
        // there, and a mapping that nobody uses any more.
        unsafe {
            let unregistered = self
                .api
                .context_set(context)
                .and_then(|()| self.api.host_unregister(self.at.as_ptr().cast()));
            // If the driver still has the memory registered, it must stay mapped.
            if unregistered.is_ok() {
                libc::munmap(self.at.as_ptr().cast(), slots::BYTES);
            }
        }
    }
}

/// A message to a sender.
enum Job {
    /// Send this.
    Send(Arc<Departure>),
    /// Start checking whether the memory is idle and can be released.
    Look,
}

struct Slot {
    /// Written by the host, awaited by streams.
    host: Word,
    /// The same, towards the client: the last use whose data need not be kept any more.
    free: Word,
    /// Written by streams, awaited by the host.
    gpu: Arc<Word>,
}

impl Staging {
    /// Makes everything except the slots' memory. It must be [registered](Self::register).
    pub(super) fn new(api: &'static Api, words: &Arc<Words>) -> Result<Arc<Staging>> {
        let answers = Pinned::new(ANSWERS * ANSWER)?;
        let words = (0..slots::COUNT)
            .map(|_| Ok(Slot { host: words.take()?, free: words.take()?, gpu: words.take().map(Arc::new)? }))
            .collect::<Result<_>>()?;
        Ok(Arc::new(Staging {
            api,
            answers_at: answers.host(0),
            answers: Mutex::new(answers),
            words,
            slots: Slots::default(),
            home: Mutex::new(Registered(std::ptr::null_mut())),
            block: Mutex::default(),
            senders: Mutex::default(),
            looking: AtomicU32::new(0),
            used: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            over: AtomicBool::new(false),
        }))
    }

    fn holding(&self) -> MutexGuard<'_, Holding> {
        self.block.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Registers the existing memory with the current context, which becomes the home. Called again if that
    /// context is reset. Memory that is allocated later is registered there as well.
    pub(super) fn register(&self) -> Result {
        let mut home = self.home.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: writes a context handle.
        unsafe { self.api.context_current(&mut home.0) }?;
        drop(home);
        self.answers.lock().unwrap_or_else(|e| e.into_inner()).register(self.api)?;
        self.holding().block.as_ref().map_or(Ok(()), |block| block.register())
    }

    /// The slots' memory. It is allocated now if necessary and registered in the [home](Self::home) context,
    /// because the program may destroy the current one during the session, and the registration would end
    /// with it. The driver would then treat the memory as pageable and read a slot before its data has
    /// arrived.
    fn block(self: &Arc<Staging>) -> Result<Arc<Block>> {
        let mut holding = self.holding();
        if let Some(block) = &holding.block {
            return Ok(Arc::clone(block));
        }
        self.start_senders(*SENDERS.start()).map_err(|_| Status::OPERATING_SYSTEM)?;
        let home = self.home.lock().unwrap_or_else(|e| e.into_inner()).0;
        // SAFETY: a primary context, which is live while it is the home: `register` replaces it when it is
        // reset.
        let block = Arc::new(unsafe { self.api.within(home, || Block::new(self.api)) }?);
        holding.block = Some(Arc::clone(&block));
        drop(holding);
        self.look();
        Ok(block)
    }

    /// Allocates the slots' memory before the first transfer.
    pub(super) fn prepare(self: &Arc<Staging>) -> Result {
        self.block().map(|_| ())
    }

    /// The session has begun.
    pub(super) fn begin_session(&self) {
        self.begun.store(true, Ordering::Release);
        self.look();
    }

    fn senders(&self) -> MutexGuard<'_, Vec<Sender<Job>>> {
        self.senders.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn look(&self) {
        if let Some(first) = self.senders().first() {
            // A sender ends only with the process.
            let _ = first.send(Job::Look);
        }
    }

    /// Starts senders until there are so many.
    fn start_senders(self: &Arc<Staging>, count: usize) -> std::io::Result<()> {
        let mut senders = self.senders();
        while senders.len() < count {
            let (to_sender, jobs) = channel();
            let (run, number) = (Arc::clone(self), senders.len());
            let thread = std::thread::Builder::new().name(format!("rgpu-send-{number}"));
            thread.spawn(move || run.run_sender(number, &jobs))?;
            senders.push(to_sender);
        }
        Ok(())
    }

    /// The slots' memory. From now on it is never freed.
    pub(super) fn keep_area(self: &Arc<Staging>) -> Result<(NonNull<u8>, usize)> {
        let block = self.block()?;
        let mut holding = self.holding();
        holding.forever = true;
        holding.block = Some(Arc::clone(&block));
        Ok((block.at, slots::BYTES))
    }

    /// Whether the first sender should check later whether the memory is idle.
    fn may_release(&self) -> bool {
        let holding = self.holding();
        self.begun.load(Ordering::Acquire) && holding.block.is_some() && !holding.forever
    }

    /// Frees the slots' memory if no transfer has used it since the last check.
    fn release_if_idle(&self) {
        let mut holding = self.holding();
        if self.used.swap(false, Ordering::AcqRel) || holding.forever || !self.slots.are_unused() {
            return;
        }
        if let Some(block) = holding.block.take() {
            drop(holding);
            tracing::debug!("the staging memory is idle: released");
            // In its own thread, because senders must not wait. If it cannot be started, the memory
            // stays.
            let _ = std::thread::Builder::new().name("rgpu-release".into()).spawn(move || {
                let mut held = block;
                // The last transfer gives its slots back a moment before it drops its reference to the
                // memory.
                loop {
                    match Arc::try_unwrap(held) {
                        Ok(block) => return block.release(),
                        Err(still) => held = still,
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
    }

    /// Ends all waits.
    pub(super) fn stop(&self) {
        self.over.store(true, Ordering::Release);
        self.slots.stop();
    }

    /// The buffer of [`ANSWER`] bytes for the answer in a reply slot. It belongs to the slot's command until
    /// that is answered. `None`: the slot has no buffer.
    pub(super) fn answer(&self, slot: u16) -> Option<NonNull<u8>> {
        // SAFETY: inside the answers' memory.
        (usize::from(slot) < ANSWERS).then(|| unsafe { self.answers_at.add(usize::from(slot) * ANSWER) })
    }

    /// Takes slots for the flow's next transfer, of `len` bytes. `chunk_in` returns the chunk size for slots
    /// of a given size, both in bytes.
    pub(super) fn begin(
        self: &Arc<Staging>,
        flow: Flow,
        len: u64,
        chunk_in: impl Fn(usize) -> usize,
        health: &Arc<Health>,
    ) -> Result<Arc<Transfer>> {
        let mut chunk = 0;
        let cut = |slot: usize| {
            chunk = chunk_in(slot).min(slot);
            len.div_ceil(chunk as u64)
        };
        self.used.store(true, Ordering::Release);
        let block = self.block()?;
        let uses = self.slots.take(flow, cut).ok_or(Status::DEVICE_UNAVAILABLE)?;
        let mut last: Vec<Use> = Vec::new();
        for used in uses.iter().rev() {
            if last.len() == slots::KINDS[0].count {
                break;
            }
            if !last.iter().any(|known| known.slot == used.slot) {
                last.push(*used);
            }
        }
        let first_again =
            uses.iter().enumerate().position(|(i, used)| uses[..i].iter().any(|u| u.slot == used.slot));
        Ok(Arc::new(Transfer {
            staging: Arc::clone(self),
            block,
            flow,
            own: first_again.unwrap_or(uses.len()) as u64,
            filled: uses.iter().map(|_| AtomicU32::new(0)).collect(),
            uses,
            last,
            chunk,
            len,
            health: Arc::clone(health),
            abandoned: AtomicBool::new(false),
        }))
    }

    /// Starts sending to `sink` what the transfer's stream writes to its slots.
    pub(super) fn send(self: &Arc<Staging>, transfer: Arc<Transfer>, sink: Sink) {
        let lanes = match &sink {
            Sink::Outgoing(outgoing) => outgoing.lanes(),
            Sink::Mapped(_) => 0,
        };
        // No more of them wake up than there are chunks.
        let wanted = lanes.clamp(*SENDERS.start(), *SENDERS.end()).min(transfer.uses.len().max(1));
        // Without a thread for each, those that were started with the transfer's memory send it all.
        let _ = self.start_senders(wanted);
        let senders = self.senders();
        let senders = &senders[..wanted.min(senders.len())];
        let left = transfer.uses.len();
        let job = Arc::new(Departure {
            transfer,
            sink: Mutex::new(Some(Arc::new(sink))),
            next: AtomicU64::new(0),
            left: AtomicUsize::new(left),
            senders: senders.len(),
        });
        for sender in senders {
            // A sender ends only with the process.
            let _ = sender.send(Job::Send(Arc::clone(&job)));
        }
    }

    /// Notes whether a sender looks for chunks.
    fn look_for_chunks(&self, sender: usize, looks: bool) {
        let bit = 1 << sender;
        match looks {
            true => self.looking.fetch_or(bit, Ordering::Relaxed),
            false => self.looking.fetch_and(!bit, Ordering::Relaxed),
        };
    }

    /// A sender's thread. It sends chunks of all transfers that it was given, as long as they have some.
    fn run_sender(&self, sender: usize, jobs: &Receiver<Job>) {
        // A stream waits until its data has been queued, so every delay here delays the stream.
        nap_precisely();
        let bound = COMPLETER_BUSY.here().min(COMPLETER_BUSY_NETWORK.here());
        let mut alone = PollTime::new(bound.max(PATIENCE));
        let mut active: Vec<Arc<Departure>> = Vec::new();
        let mut moved = Instant::now();
        let mut quiet = Quiet { since: moved, arrived: 0 };
        // What was sent in place since it was last copied.
        let mut in_place: Option<Unacknowledged> = None;
        let mut looks = false;
        loop {
            let has_work = !active.is_empty();
            if looks != has_work {
                looks = has_work;
                self.look_for_chunks(sender, looks);
            }
            let new = if !active.is_empty() {
                jobs.try_recv()
            } else if in_place.is_some() {
                // The client's next command acknowledges what has arrived, which saves the copy.
                jobs.recv_timeout(SETTLE).map_err(|e| match e {
                    RecvTimeoutError::Timeout => TryRecvError::Empty,
                    RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                })
            } else if sender == 0 && self.may_release() {
                match jobs.recv_timeout(IDLE) {
                    Ok(job) => Ok(job),
                    Err(RecvTimeoutError::Disconnected) => Err(TryRecvError::Disconnected),
                    Err(RecvTimeoutError::Timeout) => {
                        self.release_if_idle();
                        continue;
                    }
                }
            } else {
                jobs.recv().map_err(|_| TryRecvError::Disconnected)
            };
            match new {
                Ok(Job::Send(job)) => {
                    active.push(job);
                    moved = Instant::now();
                }
                Ok(Job::Look) => {}
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            if self.over.load(Ordering::Acquire) {
                return;
            }
            let is_alone = active.iter().all(|job| job.senders == 1);
            let patience = if is_alone { alone.get().max(PATIENCE) } else { PATIENCE };
            let mut worked = false;
            // One chunk of each at a time, so that a long transfer does not keep a short one waiting.
            active.retain(|job| {
                worked |= job.send_next(sender, &mut in_place);
                !job.is_given_out()
            });
            if worked {
                let now = Instant::now();
                if is_alone {
                    alone.slept(now.saturating_duration_since(moved));
                }
                moved = now;
                quiet.since = moved;
            } else if let Some(kept) =
                in_place.take_if(|kept| quiet.is_long(kept.arrived(sender), Instant::now()))
            {
                // There is nothing better to do, and the slots may be needed. Others need not wait for that.
                self.look_for_chunks(sender, false);
                looks = false;
                kept.copy(sender);
            } else if moved.elapsed() > patience {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// How long a sender has sent nothing, with nothing that it sent arriving.
struct Quiet {
    since: Instant,
    /// What has arrived, as a position in the connection's stream.
    arrived: u64,
}

impl Quiet {
    /// Whether that is long enough to copy what is held. While acknowledgements arrive, however slowly the
    /// client reads, they free the slots, and copies would only take memory bandwidth away from the transfer.
    fn is_long(&mut self, arrived: u64, now: Instant) -> bool {
        if arrived != self.arrived {
            (self.since, self.arrived) = (now, arrived);
        }
        now.saturating_duration_since(self.since) >= SETTLE
    }
}

/// A transfer and its slots. The slots become free with the last transfer of its flow.
pub(super) struct Transfer {
    staging: Arc<Staging>,
    block: Arc<Block>,
    flow: Flow,
    /// The slot of each chunk, and which of its uses this is.
    uses: Vec<Use>,
    /// The last use of each slot.
    last: Vec<Use>,
    /// Number of chunks before the first one that reuses a slot of this transfer.
    own: u64,
    /// Number of bytes of each chunk that have arrived.
    filled: Box<[AtomicU32]>,
    chunk: usize,
    len: u64,
    health: Arc<Health>,
    /// The stream will not process all chunks.
    abandoned: AtomicBool,
}

/// A chunk, for the stream's work.
pub(super) struct ChunkPlace {
    /// Its offset in the data, in bytes.
    pub(super) offset: u64,
    /// Its size in bytes.
    pub(super) len: usize,
    /// The slot's address in this process.
    pub(super) at: NonNull<u8>,
    /// The host's word that the stream waits for before it uses the slot, and its value. Towards the client,
    /// 0 means no wait.
    pub(super) host: (CUdeviceptr, u64),
    /// The word that the stream writes afterwards, and its value.
    pub(super) gpu: (CUdeviceptr, u64),
}

impl Transfer {
    fn chunks(&self) -> u64 {
        self.uses.len() as u64
    }

    fn place(&self, chunk: u64) -> (usize, u64) {
        let used = self.uses[chunk as usize];
        (used.slot, used.number)
    }

    fn bytes_of(&self, chunk: u64) -> usize {
        (self.len - chunk * self.chunk as u64).min(self.chunk as u64) as usize
    }

    fn slot(&self, index: usize) -> &Slot {
        &self.staging.words[index]
    }

    fn at(&self, slot: usize) -> NonNull<u8> {
        // SAFETY: one of the slots, and so inside their memory.
        unsafe { self.block.at.add(slots::offset(slot)) }
    }

    /// Whether the stream has processed the previous contents of a chunk's slot.
    fn is_free(&self, chunk: u64) -> bool {
        let (slot, uses) = self.place(chunk);
        self.slot(slot).gpu.get() + 1 >= uses
    }

    /// The chunks of a transfer to the device.
    pub(super) fn inbound(&self) -> impl Iterator<Item = ChunkPlace> + '_ {
        (0..self.chunks()).map(|chunk| {
            let (slot, uses) = self.place(chunk);
            self.describe(chunk, (self.slot(slot).host.address(), uses))
        })
    }

    /// The chunks of a transfer from the device.
    pub(super) fn outbound(&self) -> impl Iterator<Item = ChunkPlace> + '_ {
        (0..self.chunks()).map(|chunk| {
            let (slot, uses) = self.place(chunk);
            self.describe(chunk, (self.slot(slot).free.address(), uses - 1))
        })
    }

    fn describe(&self, chunk: u64, host: (CUdeviceptr, u64)) -> ChunkPlace {
        let (slot, uses) = self.place(chunk);
        ChunkPlace {
            offset: chunk * self.chunk as u64,
            len: self.bytes_of(chunk),
            at: self.at(slot),
            host,
            gpu: (self.slot(slot).gpu.address(), uses),
        }
    }

    /// The words, with their values, that a stream waits for until everything has been queued to be sent.
    pub(super) fn all_sent(&self) -> impl Iterator<Item = (CUdeviceptr, u64)> + '_ {
        self.last.iter().map(|last| (self.slot(last.slot).host.address(), last.number))
    }

    /// Number of bytes that fit into the slots before the stream has processed any of them, once all work
    /// before this transfer is done.
    pub(super) fn window(&self) -> u64 {
        (self.own * self.chunk as u64).min(self.len)
    }

    /// Number of bytes that fit now. Earlier transfers of the flow may still occupy part of the
    /// [`window`](Self::window).
    pub(super) fn room_now(&self) -> u64 {
        let free = (0..self.own).take_while(|chunk| self.is_free(*chunk)).count();
        (free as u64 * self.chunk as u64).min(self.len)
    }

    /// Grants room for the rest of the data as the stream processes what has arrived. `granted` bytes have
    /// been granted already.
    pub(super) fn grant_as_taken(
        self: &Arc<Transfer>,
        completer: &Arc<Completer>,
        grants: Grants,
        granted: u64,
    ) {
        let next = granted.div_ceil(self.chunk as u64);
        if next >= self.chunks() {
            return;
        }
        // Two chunks at a time if that leaves enough under way, so that not every chunk costs a message.
        let until = if self.own >= 4 { (next + 1).min(self.chunks() - 1) } else { next };
        let (slot, uses) = self.place(until);
        let (transfer, more) = (Arc::clone(self), Arc::clone(completer));
        let granted = move |status: Status| {
            if !status.is_success() {
                return transfer.abandon(&grants);
            }
            // Chunks become free in order.
            let free = (until + 1..transfer.chunks()).take_while(|chunk| transfer.is_free(*chunk)).count();
            let upto = (until + 1 + free as u64) * transfer.chunk as u64;
            grants.upto(upto);
            transfer.grant_as_taken(&more, grants, upto);
        };
        completer.when(&self.slot(slot).gpu, uses - 1, &self.health, Box::new(granted));
    }

    /// Called if the stream has failed. Data that is still arriving is discarded.
    pub(super) fn abandon(&self, grants: &Grants) {
        self.abandoned.store(true, Ordering::Release);
        grants.all();
    }

    /// Called if the driver has refused the stream's work for some chunk of a transfer to the device. Data
    /// that is still arriving is discarded. What the stream waits for it gets when it has processed what
    /// earlier transfers have in the slots. The transfer must be held until the stream has passed its work.
    pub(super) fn abandon_arrivals(self: &Arc<Transfer>, completer: &Completer) {
        self.abandoned.store(true, Ordering::Release);
        for last in &self.last {
            let first = self.uses.iter().find(|used| used.slot == last.slot).unwrap_or(last);
            let (transfer, Use { slot, number }) = (Arc::clone(self), *last);
            let arrive = move |_| transfer.slot(slot).host.raise(number);
            completer.when(&self.slot(slot).gpu, first.number - 1, &self.health, Box::new(arrive));
        }
    }

    /// Called if the driver has refused the stream's work for some chunk of a transfer from the device. No
    /// more chunks are sent. The transfer must be held until the stream has passed its work.
    pub(super) fn abandon_departure(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    /// Waits until the stream has processed the previous contents of a chunk's slot. Returns false if it
    /// never will.
    fn await_slot(&self, offset: u64) -> bool {
        let begun = Instant::now();
        while !self.is_free(offset / self.chunk as u64) {
            let abandoned = self.abandoned.load(Ordering::Acquire);
            if abandoned || self.health.check().is_err() || self.staging.over.load(Ordering::Acquire) {
                return false;
            }
            if begun.elapsed() > Duration::from_micros(50) {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
        true
    }

    /// Copies the bytes of `mapped`, which no device can access, into the slots, in its own thread. With
    /// `when`, the thread waits until that reports that the stream has reached the command. If it reports
    /// that the stream has failed, the bytes are not read.
    pub(super) fn feed(self: &Arc<Transfer>, mapped: Mapped, when: Option<Receiver<Status>>) -> Result {
        let transfer = Arc::clone(self);
        let feeding = std::thread::Builder::new().name("rgpu-feed".into()).spawn(move || {
            if when.is_some_and(|when| !when.recv().is_ok_and(|status| status.is_success())) {
                return;
            }
            let mut at = 0;
            while at < mapped.len() && transfer.await_slot(at as u64) {
                let Some((room, n)) = transfer.room(at as u64, mapped.len() - at) else { return };
                // SAFETY: `room` gives `n` bytes to this thread alone until `landed`.
                mapped.read(at, unsafe { std::slice::from_raw_parts_mut(room.as_ptr(), n) });
                transfer.landed(at as u64, n);
                at += n;
            }
        });
        feeding.map(|_| ()).map_err(|_| Status::OPERATING_SYSTEM)
    }
}

impl Landing for Transfer {
    fn room(&self, offset: u64, len: usize) -> Option<(NonNull<u8>, usize)> {
        let chunk = offset / self.chunk as u64;
        // The previous contents are on the device, or this use would not have been granted, unless the stream
        // was abandoned.
        if self.abandoned.load(Ordering::Acquire) || !self.is_free(chunk) {
            return None;
        }
        let (slot, _) = self.place(chunk);
        let within = (offset % self.chunk as u64) as usize;
        let room = self.bytes_of(chunk).saturating_sub(within).min(len);
        // SAFETY: within < chunk, and the slot holds a whole chunk.
        (room > 0).then(|| (unsafe { self.at(slot).add(within) }, room))
    }

    fn landed(&self, offset: u64, len: usize) {
        let chunk = offset / self.chunk as u64;
        let (slot, uses) = self.place(chunk);
        // The thread that adds the last bytes has seen the other threads' counts, and so their bytes.
        let filled = self.filled[chunk as usize].fetch_add(len as u32, Ordering::AcqRel) as usize + len;
        if filled >= self.bytes_of(chunk) {
            self.slot(slot).host.raise(uses);
        }
    }

    fn lost(&self) {
        // The session is over. Streams that wait for the rest continue with whatever is in the slots. (They
        // compare signed differences.)
        for last in &self.last {
            self.slot(last.slot).host.set(i64::MAX as u64);
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        for last in &self.last {
            // After a successful transfer the words have these values or larger ones. If a context failed,
            // nothing waits for them any more.
            let slot = self.slot(last.slot);
            [&slot.host, &slot.free, &*slot.gpu].into_iter().for_each(|word| word.raise(last.number));
        }
        self.staging.slots.give_back(self.flow);
    }
}

/// A transfer to the client.
struct Departure {
    transfer: Arc<Transfer>,
    /// Ended with the last chunk, which tells the client.
    sink: Mutex<Option<Arc<Sink>>>,
    /// The first chunk that no thread sends or has sent.
    next: AtomicU64,
    /// Number of chunks not sent yet.
    left: AtomicUsize,
    /// Number of threads that send it. Chunks go to them in turn, but if a chunk's thread is busy, to
    /// whichever is free: a slow connection holds up only what it has taken. While all are free, none
    /// is left out, and each connection carries enough for the client to acknowledge it.
    senders: usize,
}

/// A chunk that the stream has written to its slot. When dropped, the slot may be written again.
struct Filled {
    transfer: Arc<Transfer>,
    chunk: u64,
}

impl Held for Filled {
    fn bytes(&self) -> &[u8] {
        let (slot, _) = self.transfer.place(self.chunk);
        let len = self.transfer.bytes_of(self.chunk);
        // SAFETY: the stream has filled the slot, and fills it again only after its free word has risen,
        // which happens when this is dropped. The transfer keeps the memory mapped.
        unsafe { std::slice::from_raw_parts(self.transfer.at(slot).as_ptr(), len) }
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        let (slot, uses) = self.transfer.place(self.chunk);
        self.transfer.slot(slot).free.raise(uses);
    }
}

impl Departure {
    /// Whether every chunk has been sent, or is being sent by some thread.
    fn is_given_out(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.transfer.chunks()
    }

    /// Sends the next chunk if the stream has filled its slot and no other thread is to send it. Notes in
    /// `in_place` that it may be kept there. Returns false if there is none to send. Skips the chunk if the
    /// slot need not be filled any more: then false says that the slot is still in use.
    fn send_next(&self, sender: usize, in_place: &mut Option<Unacknowledged>) -> bool {
        let transfer = &self.transfer;
        let (chunk, skipped) = loop {
            let chunk = self.next.load(Ordering::Relaxed);
            if chunk >= transfer.chunks() {
                return false;
            }
            let turn = (chunk % self.senders as u64) as usize;
            if turn != sender && transfer.staging.looking.load(Ordering::Relaxed) & (1 << turn) != 0 {
                return false;
            }
            // The stream fills slots in order, so if a chunk is not ready, none behind it is.
            let Some(skipped) = self.is_ready(chunk) else { return false };
            let taken = self.next.compare_exchange(chunk, chunk + 1, Ordering::Relaxed, Ordering::Relaxed);
            if taken.is_ok() {
                break (chunk, skipped);
            }
        };
        transfer.staging.look_for_chunks(sender, false);
        let (slot, uses) = transfer.place(chunk);
        let mut leaving = None;
        if skipped {
            transfer.slot(slot).free.raise(uses);
        } else {
            let sink = self.sink.lock().unwrap_or_else(|e| e.into_inner()).clone();
            let filled = Filled { transfer: Arc::clone(transfer), chunk };
            let offset = chunk * transfer.chunk as u64;
            match sink.as_deref() {
                Some(Sink::Outgoing(outgoing)) => {
                    // If the client is gone, the stream continues anyway.
                    leaving = outgoing.send_held(sender, offset, Box::new(filled)).ok();
                    if in_place.is_none() {
                        *in_place = outgoing.unacknowledged();
                    }
                }
                Some(Sink::Mapped(mapped)) => mapped.write(offset as usize, filled.bytes()),
                None => {}
            }
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // The client must hear of the data before anything that depends on it. Once that is queued, the
            // stream may continue. The data leaves meanwhile, and so does the message, if the end of the
            // stream's next work has not taken it along.
            let sink = self.sink.lock().unwrap_or_else(|e| e.into_inner()).take();
            let telling = sink.and_then(Arc::into_inner).map(|sink| match sink {
                Sink::Outgoing(outgoing) => Some(outgoing.end()),
                Sink::Mapped(_) => None,
            });
            for last in &transfer.last {
                transfer.slot(last.slot).host.raise(last.number);
            }
            drop(leaving);
            drop(telling);
        } else {
            drop(leaving);
        }
        transfer.staging.look_for_chunks(sender, true);
        true
    }

    /// Whether a chunk can be given out, and then whether it is skipped.
    fn is_ready(&self, chunk: u64) -> Option<bool> {
        let transfer = &self.transfer;
        let (slot, uses) = transfer.place(chunk);
        let failed = transfer.health.check().is_err();
        let skipped = failed || transfer.abandoned.load(Ordering::Acquire);
        let is_ready = match (failed, skipped) {
            (true, _) => true,
            (false, true) => transfer.slot(slot).free.get() + 1 >= uses,
            (false, false) => transfer.slot(slot).gpu.get() >= uses,
        };
        is_ready.then_some(skipped)
    }
}

#[cfg(test)]
mod tests;
