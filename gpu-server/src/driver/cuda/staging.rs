//! Page-locked buffers between devices and data that comes or goes over the network (or lies where no device can reach it).
//!
//! A transfer borrows some slots of the pool and uses them in turn: chunk *c* takes slot *c mod k*. All its device work is enqueued at once, in its stream;
//! what orders it against the network are two words for each slot, counting that slot's uses:
//!
//! ```text
//!  in:   network fills slot ─ host word = n ─▶ stream: wait(host ≥ n), copy to device, write(gpu = n) ─▶ the network may fill it again
//!  out:  stream: wait(host ≥ n−1), copy from device, write(gpu = n) ─▶ lane sends it ─ host word = n ─▶ the stream may fill it again
//! ```
//!
//! So a stream waits for nothing but the network, the dispatcher waits for nothing but a free slot, and a stream whose data is late holds back only itself.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use host_bridge::endpoint::{Grants, Landing, Mapped, Sink};
use protocol::Status;

use std::ptr::NonNull;

use super::api::{Api, CUdeviceptr};
use super::fence::{Completer, Health, Pinned, Word, Words};

/// Bytes of a slot.
pub(super) const SLOT: usize = 1 << 20;
const SLOTS: usize = 32;
/// Slots of one transfer at most.
const MOST: usize = 8;
/// Threads that send, and so data connections that one transfer can fill.
const LANES: usize = 4;
/// A lane naps this long between looks when nothing is ready.
const NAP: Duration = Duration::from_micros(20);

/// The pool, and the lanes.
pub(super) struct Staging {
    memory: Mutex<Pinned>,
    base: NonNull<u8>,
    slots: Vec<Slot>,
    free: Mutex<Vec<(usize, u64)>>,
    freed: Condvar,
    lanes: Vec<Mutex<Sender<Arc<Departure>>>>,
    over: AtomicBool,
}

// SAFETY: `base` points into memory that is never unmapped; who uses which slot is the pool's and the words' protocol.
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
        let memory = Pinned::new(api, SLOT * SLOTS)?;
        let base = memory.host(0);
        let slots = (0..SLOTS)
            .map(|_| Ok(Slot { host: words.take()?, gpu: words.take().map(Arc::new)? }))
            .collect::<Result<_, Status>>()?;
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..LANES).map(|_| channel()).unzip();
        let staging = Arc::new(Staging {
            memory: Mutex::new(memory),
            base,
            slots,
            free: Mutex::new((0..SLOTS).map(|i| (i, 0)).collect()),
            freed: Condvar::new(),
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
        (self.base, SLOT * SLOTS)
    }

    /// Nobody waits in here any more.
    pub(super) fn stop(&self) {
        self.over.store(true, Ordering::Release);
        self.freed.notify_all();
    }

    /// Slots for a transfer of `len` bytes in chunks of `chunk`. Waits for at least one: those that are taken are given back by transfers that wait only
    /// for their own data.
    pub(super) fn begin(
        self: &Arc<Staging>,
        len: u64,
        chunk: usize,
        health: &Arc<Health>,
    ) -> Result<Arc<Transfer>, Status> {
        let chunks = len.div_ceil(chunk as u64);
        let wanted = chunks.min(MOST as u64).max(1) as usize;
        let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
        while free.is_empty() {
            if self.over.load(Ordering::Acquire) {
                return Err(Status::DEVICE_UNAVAILABLE);
            }
            free = self.freed.wait(free).unwrap_or_else(|e| e.into_inner());
        }
        let keep = free.len().saturating_sub(wanted);
        let slots = free.split_off(keep);
        let filled = (0..slots.len()).map(|_| Mutex::new(0)).collect();
        Ok(Arc::new(Transfer {
            staging: Arc::clone(self),
            slots,
            filled,
            chunk,
            chunks,
            len,
            health: Arc::clone(health),
            abandoned: AtomicBool::new(false),
        }))
    }

    /// Sends what the transfer's stream puts into its slots to `sink`.
    pub(super) fn send(&self, transfer: Arc<Transfer>, sink: Sink) {
        let left = transfer.chunks as usize;
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
                while *next < job.transfer.chunks && job.try_send(lane, *next) {
                    *next += LANES as u64;
                    worked = true;
                }
                *next < job.transfer.chunks
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

/// A transfer's use of its slots. They go back to the pool with it.
pub(super) struct Transfer {
    staging: Arc<Staging>,
    /// Slots, with the count of their uses before.
    slots: Vec<(usize, u64)>,
    /// Bytes landed of the chunk that each slot is being filled with.
    filled: Vec<Mutex<usize>>,
    chunk: usize,
    chunks: u64,
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
    fn place(&self, chunk: u64) -> (usize, u64) {
        let k = self.slots.len() as u64;
        let (slot, before) = self.slots[(chunk % k) as usize];
        (slot, before + chunk / k + 1)
    }

    fn bytes_of(&self, chunk: u64) -> usize {
        (self.len - chunk * self.chunk as u64).min(self.chunk as u64) as usize
    }

    fn slot(&self, index: usize) -> &Slot {
        &self.staging.slots[index]
    }

    fn at(&self, slot: usize) -> NonNull<u8> {
        // SAFETY: slot < SLOTS, so inside the pool's memory.
        unsafe { self.staging.base.add(slot * SLOT) }
    }

    /// Uses of slot number `i` of this transfer, counted to the end of it.
    fn last_use(&self, i: usize) -> u64 {
        let k = self.slots.len() as u64;
        self.slots[i].1 + (self.chunks + k - 1 - i as u64) / k
    }

    /// The chunks, for a transfer towards the device.
    pub(super) fn inbound(&self) -> impl Iterator<Item = ChunkPlace> + '_ {
        (0..self.chunks).map(|c| self.describe(c, 0))
    }

    /// The chunks, for a transfer from the device.
    pub(super) fn outbound(&self) -> impl Iterator<Item = ChunkPlace> + '_ {
        (0..self.chunks).map(|c| self.describe(c, 1))
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
        (0..self.slots.len()).map(|i| (self.slot(self.slots[i].0).host.address(), self.last_use(i)))
    }

    /// Bytes for which there is room before the stream has taken any.
    pub(super) fn window(&self) -> u64 {
        self.slots.len() as u64 * self.chunk as u64
    }

    /// Grants the network room for more as the stream takes what has come.
    pub(super) fn grant_as_taken(self: &Arc<Transfer>, completer: &Completer, grants: &Grants) {
        let k = self.slots.len() as u64;
        for taken in 0..self.chunks.saturating_sub(k) {
            // Two at a time where that leaves enough under way, so that not every chunk costs a message.
            if k >= 4 && taken % 2 == 0 && taken + k + 1 < self.chunks {
                continue;
            }
            let (slot, uses) = self.place(taken);
            let (grants, upto) = (grants.clone(), (taken + k + 1) * self.chunk as u64);
            let transfer = Arc::clone(self);
            let granted = move |status: Status| {
                if status.is_success() {
                    grants.upto(upto);
                } else {
                    transfer.abandon(&grants);
                }
            };
            completer.when(&self.slot(slot).gpu, uses, &self.health, Box::new(granted));
        }
    }

    /// The stream will not take all of it: what is still to come is thrown away.
    pub(super) fn abandon(&self, grants: &Grants) {
        self.abandoned.store(true, Ordering::Release);
        grants.all();
    }

    /// Waits until the stream has taken what was in a chunk's slot before. False: it will not.
    fn await_slot(&self, offset: u64) -> bool {
        let (slot, uses) = self.place(offset / self.chunk as u64);
        let begun = Instant::now();
        while self.slot(slot).gpu.get() + 1 < uses {
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
        let (slot, uses) = self.place(chunk);
        // The slot's bytes of the chunk before are on the device, or this one would not have been granted; unless the stream will not take any more.
        if self.abandoned.load(Ordering::Acquire) || self.slot(slot).gpu.get() + 1 < uses {
            return None;
        }
        let within = (offset % self.chunk as u64) as usize;
        let room = self.bytes_of(chunk).saturating_sub(within).min(len);
        // SAFETY: within < chunk <= SLOT.
        (room > 0).then(|| (unsafe { self.at(slot).add(within) }, room))
    }

    fn landed(&self, offset: u64, len: usize) {
        let chunk = offset / self.chunk as u64;
        let (slot, uses) = self.place(chunk);
        let number = (chunk % self.slots.len() as u64) as usize;
        let mut filled = self.filled[number].lock().unwrap_or_else(|e| e.into_inner());
        *filled += len;
        if *filled >= self.bytes_of(chunk) {
            *filled = 0;
            self.slot(slot).host.set(uses);
        }
    }

    fn lost(&self) {
        // The session is over. Streams that wait for the rest go on, with whatever is in the slots. (They compare differences, as signed numbers.)
        for (slot, _) in &self.slots {
            self.slot(*slot).host.set(i64::MAX as u64);
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let mut back = Vec::with_capacity(self.slots.len());
        for (i, (slot, _)) in self.slots.iter().enumerate() {
            let uses = self.last_use(i);
            // Where all went well they hold that already; where a context failed, nobody waits for them any more.
            self.slot(*slot).host.set(uses);
            self.slot(*slot).gpu.set(uses);
            back.push((*slot, uses));
        }
        self.staging.free.lock().unwrap_or_else(|e| e.into_inner()).extend(back);
        self.staging.freed.notify_all();
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
        let last_of_slot = chunk + transfer.slots.len() as u64 >= transfer.chunks;
        if !last_of_slot {
            transfer.slot(slot).host.set(uses);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // First the client is told, then the stream goes on: so nothing that depends on the data is told before.
            drop(self.sink.lock().unwrap_or_else(|e| e.into_inner()).take());
            for (i, (slot, _)) in transfer.slots.iter().enumerate() {
                transfer.slot(*slot).host.set(transfer.last_use(i));
            }
        }
        true
    }
}
