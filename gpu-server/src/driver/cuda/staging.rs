//! Page-locked buffers between devices and data that comes or goes over the network (or lies where no device can reach it).
//!
//! A transfer knows from the beginning which slot each of its chunks will use ([`slots`](crate::driver::slots)). All its device work is enqueued at once, in its stream;
//! what orders it against the network are two words for each slot, counting that slot's uses:
//!
//! ```text
//!  in:   network fills slot ─ host word = n ─▶ stream: wait(host ≥ n), copy to device, write(gpu = n) ─▶ the network may fill it again
//!  out:  stream: wait(host ≥ n−1), copy from device, write(gpu = n) ─▶ lane sends it ─ host word = n ─▶ the stream may fill it again
//! ```
//!
//! So a stream waits for nothing but the network, the dispatcher waits for nothing, and a stream whose data is late, or that is held up, holds back only itself.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_bridge::endpoint::{Grants, Landing, Mapped, Sink};
use protocol::Status;

use std::ptr::NonNull;

use super::api::{Api, CUdeviceptr};
use super::fence::{Completer, Health, Pinned, Word, Words};
use crate::driver::slots::{self, Flow, Slots, Use};

/// Answers of a few bytes have places of their own, one for each of so many reply slots.
const ANSWERS: usize = 64;
/// Bytes of such a place.
pub(super) const ANSWER: usize = 4 << 10;
/// Threads that send, and so data connections that one transfer can fill.
const LANES: usize = 4;
/// A lane naps this long between looks when nothing is ready.
const NAP: Duration = Duration::from_micros(20);

/// The pool, and the lanes.
pub(super) struct Staging {
    memory: Mutex<Pinned>,
    base: NonNull<u8>,
    words: Vec<Slot>,
    slots: Slots,
    lanes: Vec<Mutex<Sender<Arc<Departure>>>>,
    over: AtomicBool,
}

// SAFETY: `base` points into memory that is never unmapped; who uses which slot is the protocol of `slots` and of the words.
unsafe impl Send for Staging {}
// SAFETY: as above.
unsafe impl Sync for Staging {}

struct Slot {
    /// Written by the host, awaited by streams.
    host: Word,
    /// Written by streams, awaited by the host.
    gpu: Arc<Word>,
}

impl Staging {
    /// The pool; the current context registers it.
    pub(super) fn new(api: &Api, words: &Arc<Words>) -> Result<Arc<Staging>, Status> {
        let memory = Pinned::new(api, slots::BYTES + ANSWERS * ANSWER)?;
        let base = memory.host(0);
        let words = (0..slots::COUNT)
            .map(|_| Ok(Slot { host: words.take()?, gpu: words.take().map(Arc::new)? }))
            .collect::<Result<_, Status>>()?;
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..LANES).map(|_| channel()).unzip();
        let staging = Arc::new(Staging {
            memory: Mutex::new(memory),
            base,
            words,
            slots: Slots::default(),
            lanes: senders.into_iter().map(Mutex::new).collect(),
            over: AtomicBool::new(false),
        });
        for (lane, jobs) in receivers.into_iter().enumerate() {
            let run = Arc::clone(&staging);
            let thread = std::thread::Builder::new().name(format!("rgpu-lane-{lane}"));
            thread.spawn(move || run.lane(lane, &jobs)).map_err(|_| Status::OPERATING_SYSTEM)?;
        }
        Ok(staging)
    }

    /// See [`Pinned::register`].
    pub(super) fn register(&self, api: &Api) -> Result<(), Status> {
        self.memory.lock().unwrap_or_else(|e| e.into_inner()).register(api)
    }

    /// The pool's memory, which stays to the process's end.
    pub(super) fn area(&self) -> (NonNull<u8>, usize) {
        (self.base, slots::BYTES)
    }

    /// Nobody waits in here any more.
    pub(super) fn stop(&self) {
        self.over.store(true, Ordering::Release);
        self.slots.stop();
    }

    /// The place for the answer in a reply slot, [`ANSWER`] bytes: its command's alone until it is answered. `None`: that slot has none.
    pub(super) fn answer(&self, slot: u16) -> Option<NonNull<u8>> {
        // SAFETY: inside the pool's memory, behind the slots.
        (usize::from(slot) < ANSWERS)
            .then(|| unsafe { self.base.add(slots::BYTES + usize::from(slot) * ANSWER) })
    }

    /// Slots for a transfer of `len` bytes, the next of its flow, whose chunks are as long as `chunk_in` says for slots of a length.
    pub(super) fn begin(
        self: &Arc<Staging>,
        flow: Flow,
        len: u64,
        chunk_in: impl Fn(usize) -> usize,
        health: &Arc<Health>,
    ) -> Result<Arc<Transfer>, Status> {
        let mut chunk = 0;
        let cut = |slot: usize| {
            chunk = chunk_in(slot).min(slot);
            len.div_ceil(chunk as u64)
        };
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

    /// Sends what the transfer's stream puts into its slots to `sink`.
    pub(super) fn send(&self, transfer: Arc<Transfer>, sink: Sink) {
        let left = transfer.uses.len();
        let job = Arc::new(Departure {
            transfer,
            sink: Mutex::new(Some(Arc::new(sink))),
            left: AtomicUsize::new(left),
        });
        for lane in &self.lanes {
            // A lane ends only with the process.
            let _ = lane.lock().unwrap_or_else(|e| e.into_inner()).send(Arc::clone(&job));
        }
    }

    /// A lane's thread: of each job it sends every `LANES`-th chunk.
    fn lane(&self, lane: usize, jobs: &Receiver<Arc<Departure>>) {
        let mut active: Vec<(Arc<Departure>, u64)> = Vec::new();
        let mut moved = Instant::now();
        loop {
            let new = if active.is_empty() {
                jobs.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                jobs.try_recv()
            };
            match new {
                Ok(job) => {
                    active.push((job, lane as u64));
                    moved = Instant::now();
                }
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            if self.over.load(Ordering::Acquire) {
                return;
            }
            let mut worked = false;
            active.retain_mut(|(job, next)| {
                while *next < job.transfer.chunks() && job.try_send(lane, *next) {
                    *next += LANES as u64;
                    worked = true;
                }
                *next < job.transfer.chunks()
            });
            if worked {
                moved = Instant::now();
            } else if moved.elapsed() > Duration::from_micros(100) {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// A transfer's use of its slots. They go back to the pool with its flow's last transfer.
pub(super) struct Transfer {
    staging: Arc<Staging>,
    flow: Flow,
    /// What each chunk uses.
    uses: Vec<Use>,
    /// The last use of each slot.
    last: Vec<Use>,
    /// Chunks before the first that uses a slot of this transfer's again.
    own: u64,
    /// Bytes landed of each chunk.
    filled: Box<[AtomicU32]>,
    chunk: usize,
    len: u64,
    health: Arc<Health>,
    /// The stream does not come to all of it.
    abandoned: AtomicBool,
}

/// One chunk, as streams see it.
pub(super) struct ChunkPlace {
    /// Its offset in the data.
    pub(super) offset: u64,
    /// Its bytes.
    pub(super) len: usize,
    /// The slot in this process.
    pub(super) at: NonNull<u8>,
    /// Word and value that the stream waits for before it touches the slot; in the outgoing direction 0 means no wait.
    pub(super) host: (CUdeviceptr, u64),
    /// Word and value that the stream writes after.
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
        // SAFETY: a slot of the pool's, so inside its memory.
        unsafe { self.staging.base.add(slots::offset(slot)) }
    }

    /// Whether the stream has taken what was in a chunk's slot before.
    fn is_free(&self, chunk: u64) -> bool {
        let (slot, uses) = self.place(chunk);
        self.slot(slot).gpu.get() + 1 >= uses
    }

    /// The chunks, for a transfer towards the device.
    pub(super) fn inbound(&self) -> impl Iterator<Item = ChunkPlace> + '_ {
        (0..self.chunks()).map(|c| self.describe(c, 0))
    }

    /// The chunks, for a transfer from the device.
    pub(super) fn outbound(&self) -> impl Iterator<Item = ChunkPlace> + '_ {
        (0..self.chunks()).map(|c| self.describe(c, 1))
    }

    fn describe(&self, chunk: u64, behind: u64) -> ChunkPlace {
        let (slot, uses) = self.place(chunk);
        ChunkPlace {
            offset: chunk * self.chunk as u64,
            len: self.bytes_of(chunk),
            at: self.at(slot),
            host: (self.slot(slot).host.address(), uses - behind),
            gpu: (self.slot(slot).gpu.address(), uses),
        }
    }

    /// Words and values that a stream waits for until everything has been sent.
    pub(super) fn all_sent(&self) -> impl Iterator<Item = (CUdeviceptr, u64)> + '_ {
        self.last.iter().map(|last| (self.slot(last.slot).host.address(), last.number))
    }

    /// Bytes for which there is room before the stream has come to any, when what is before them on it is done.
    pub(super) fn window(&self) -> u64 {
        (self.own * self.chunk as u64).min(self.len)
    }

    /// Bytes for which there is room now. What the flow's transfers before have in their slots may take a part of the [`window`](Self::window).
    pub(super) fn room_now(&self) -> u64 {
        let free = (0..self.own).take_while(|chunk| self.is_free(*chunk)).count();
        (free as u64 * self.chunk as u64).min(self.len)
    }

    /// Grants the network room for more as the stream takes what has come, from the chunk that begins at `granted` on.
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
        // Two at a time where that leaves enough under way, so that not every chunk costs a message.
        let until = if self.own >= 4 { (next + 1).min(self.chunks() - 1) } else { next };
        let (slot, uses) = self.place(until);
        let (transfer, more) = (Arc::clone(self), Arc::clone(completer));
        let granted = move |status: Status| {
            if !status.is_success() {
                return transfer.abandon(&grants);
            }
            // One chunk is free after the other.
            let free = (until + 1..transfer.chunks()).take_while(|chunk| transfer.is_free(*chunk)).count();
            let upto = (until + 1 + free as u64) * transfer.chunk as u64;
            grants.upto(upto);
            transfer.grant_as_taken(&more, grants, upto);
        };
        completer.when(&self.slot(slot).gpu, uses - 1, &self.health, Box::new(granted));
    }

    /// The stream will not take all of it: what is still to come is thrown away.
    pub(super) fn abandon(&self, grants: &Grants) {
        self.abandoned.store(true, Ordering::Release);
        grants.all();
    }

    /// Waits until the stream has taken what was in a chunk's slot before. False: it will not.
    fn await_slot(&self, offset: u64) -> bool {
        let begun = Instant::now();
        while !self.is_free(offset / self.chunk as u64) {
            if self.health.check().is_err() || self.staging.over.load(Ordering::Acquire) {
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

    /// Lets the bytes of `mapped`, which no device can reach, land here, from a thread of their own.
    pub(super) fn feed(self: &Arc<Transfer>, mapped: Mapped) -> Result<(), Status> {
        let transfer = Arc::clone(self);
        let feeding = std::thread::Builder::new().name("rgpu-feed".into()).spawn(move || {
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
        // The slot's bytes of the use before are on the device, or this one would not have been granted; unless the stream will not take any more.
        if self.abandoned.load(Ordering::Acquire) || !self.is_free(chunk) {
            return None;
        }
        let (slot, _) = self.place(chunk);
        let within = (offset % self.chunk as u64) as usize;
        let room = self.bytes_of(chunk).saturating_sub(within).min(len);
        // SAFETY: within < chunk, which a slot holds.
        (room > 0).then(|| (unsafe { self.at(slot).add(within) }, room))
    }

    fn landed(&self, offset: u64, len: usize) {
        let chunk = offset / self.chunk as u64;
        let (slot, uses) = self.place(chunk);
        // Whoever brings the last bytes has seen the others' counts, and so their bytes.
        let filled = self.filled[chunk as usize].fetch_add(len as u32, Ordering::AcqRel) as usize + len;
        if filled >= self.bytes_of(chunk) {
            self.slot(slot).host.set(uses);
        }
    }

    fn lost(&self) {
        // The session is over. Streams that wait for the rest go on, with whatever is in the slots. (They compare differences, as signed numbers.)
        for last in &self.last {
            self.slot(last.slot).host.set(i64::MAX as u64);
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        for last in &self.last {
            // Where all went well they hold that already, or more; where a context failed, nobody waits for them any more.
            let slot = self.slot(last.slot);
            [&slot.host, &*slot.gpu].into_iter().filter(|word| word.get() < last.number).for_each(|word| {
                word.set(last.number);
            });
        }
        self.staging.slots.give_back(self.flow);
    }
}

/// A transfer on its way out.
struct Departure {
    transfer: Arc<Transfer>,
    /// Taken when the last chunk has been sent, which tells the client.
    sink: Mutex<Option<Arc<Sink>>>,
    /// Chunks not yet sent.
    left: AtomicUsize,
}

impl Departure {
    /// Sends a chunk if the stream has filled its slot. False: not yet.
    fn try_send(&self, lane: usize, chunk: u64) -> bool {
        let transfer = &self.transfer;
        let (slot, uses) = transfer.place(chunk);
        let failed = transfer.health.check().is_err();
        if transfer.slot(slot).gpu.get() < uses && !failed {
            return false;
        }
        if !failed {
            let sink = self.sink.lock().unwrap_or_else(|e| e.into_inner()).clone();
            // SAFETY: the stream has filled the slot and fills it again only after its host word has risen.
            let bytes =
                unsafe { std::slice::from_raw_parts(transfer.at(slot).as_ptr(), transfer.bytes_of(chunk)) };
            let offset = chunk * transfer.chunk as u64;
            match sink.as_deref() {
                // A client that is gone takes nothing; the stream goes on all the same.
                Some(Sink::Outgoing(outgoing)) => drop(outgoing.send(lane, offset, bytes)),
                Some(Sink::Mapped(mapped)) => mapped.write(offset as usize, bytes),
                None => {}
            }
        }
        let last_of_slot = transfer.last.contains(&Use { slot, number: uses });
        if !last_of_slot {
            transfer.slot(slot).host.set(uses);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // First the client is told, then the stream goes on: so nothing that depends on the data is told before.
            drop(self.sink.lock().unwrap_or_else(|e| e.into_inner()).take());
            for last in &transfer.last {
                transfer.slot(last.slot).host.set(last.number);
            }
        }
        true
    }
}
