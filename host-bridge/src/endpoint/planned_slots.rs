//! A `verbs` session's slots, used in turn.
//!
//! ```text
//!   bridge: chunk n ══ RDMA write ══▶ slot n mod count ─▶ the driver's device reads it there ─▶ free, in order ─▶ SLOTS_FREE
//! ```
//!
//! A command's `In` data arrives in chunks of [`protocol::link::chunk_len`] bytes. The chunks of all
//! commands, in the commands' order, go to the slots in turn. So when a command is executed, it is known
//! where its data will lie, before the data is there. A driver tells its device to wait for a slot and to
//! read it in place, and no CPU touches the bytes.
//!
//! The uses of a slot are numbered as rounds: its first chunk is round 1, the next is round 2. The bridge may
//! write the next round when it was told that the slot is free. A slot is free when its chunk has landed and
//! was *passed*: its command has read it or does not need it. Slots become free in the order of the chunks.
//! If a stream is held up at a chunk, the bridge can fill the other slots and then has to wait. As with
//! `tcp`, that cannot deadlock, because a command's data never waits for the data of a later command. (Data
//! that is granted after its command was received has slots of its own, [`protocol::link::GRANTED_SLOTS`],
//! which are not counted here.)

use std::collections::VecDeque;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};

use protocol::link::{DataHeader, SLOT_DATA, chunk_len};

use super::end::Lost;
use crate::shared::SharedBytes;

/// Number of freed slots that the bridge is told of in one message.
const BATCH: u64 = 8;
/// Maximum number of pieces of data that commands have named and the bridge has not sent. Our own bridge
/// stays far below it.
const MAX_OWED: usize = 1 << 18;

/// Memory of the transport's in which incoming data lies. See the module's text.
#[derive(Debug, Clone, Copy)]
pub struct StagingArea {
    /// Its first byte, at the beginning of a page.
    pub at: NonNull<u8>,
    /// Bytes.
    pub len: usize,
    /// Slots that it is divided into.
    pub slots: usize,
}

/// A driver whose device waits for slots and reads them itself.
pub trait Arrivals: Send + Sync {
    /// The chunk of round `round` has landed in this slot. Called in the order of rounds, with a lock held:
    /// it must not block or call the client.
    fn landed(&self, slot: usize, round: u64);

    /// The last round of this slot that the device has finished reading.
    fn passed(&self, slot: usize) -> u64;

    /// The session has ended: nothing more will land.
    fn lost(&self);
}

/// Notified when slots may have become free.
pub(super) trait Freed: Send + Sync {
    fn freed(&self);
}

/// A session's slots. See the module.
pub(super) struct PlannedSlots {
    at: NonNull<u8>,
    slot_size: usize,
    count: u64,
    queues: u64,
    /// For each slot, the last round that has landed, and the last that a CPU has passed.
    landed: Box<[AtomicU64]>,
    passed: Box<[AtomicU64]>,
    device: OnceLock<Arc<dyn Arrivals>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Runs that no driver has requested yet.
    unasked: AtomicUsize,
    over: AtomicBool,
    /// Number of bytes that have landed.
    pub(super) bytes: AtomicU64,
    freed: Weak<dyn Freed>,
}

// SAFETY: `at` points to memory that its owner keeps as long as this, and belongs to no thread.
unsafe impl Send for PlannedSlots {}
// SAFETY: the slots are accessed through `SharedBytes` and by the device only; everything else is atomic or
// locked.
unsafe impl Sync for PlannedSlots {}

struct State {
    /// Runs in order, from the first that has not completely landed or was not requested.
    plan: VecDeque<Piece>,
    /// Number of the next piece's first chunk.
    next: u64,
    /// Chunks that arrived before their command was known.
    early: Box<[Option<DataHeader>]>,
    /// Number of chunks that have landed.
    arrived: u64,
    /// Chunks before the first number are free again. The bridge knows of those before the second.
    free: u64,
    told: u64,
    /// Chunks that no command needs.
    abandoned: Vec<Range<u64>>,
    /// Of commands up to this, every piece was asked for or abandoned.
    executed: u64,
    /// Buffer for the numbers of freed slots.
    names: Vec<u32>,
}

struct Piece {
    seq: u64,
    piece: u32,
    len: u64,
    chunk: u64,
    first: u64,
    count: u64,
    landed: u64,
    asked: bool,
}

impl Piece {
    fn header(&self, chunk: u64) -> DataHeader {
        let offset = (chunk - self.first) * self.chunk;
        let len = (self.len - offset).min(self.chunk) as u32;
        DataHeader { seq: self.seq, offset, piece: self.piece, len }
    }
}

impl PlannedSlots {
    /// `count` slots of `slot_size` bytes from `at` on, over `queues` queues.
    ///
    /// # Safety
    /// The memory stays as long as this and everything that [`ask`](Self::ask) gives. Nobody but the peer's
    /// device writes it.
    pub(super) unsafe fn new(
        at: NonNull<u8>,
        slot_size: usize,
        count: usize,
        queues: usize,
        freed: Weak<dyn Freed>,
    ) -> Arc<PlannedSlots> {
        let zeros = || (0..count).map(|_| AtomicU64::new(0)).collect();
        let state = State {
            plan: VecDeque::with_capacity(256),
            next: 0,
            early: vec![None; count].into(),
            arrived: 0,
            free: 0,
            told: 0,
            abandoned: Vec::with_capacity(16),
            executed: 0,
            names: Vec::with_capacity(count),
        };
        Arc::new(PlannedSlots {
            at,
            slot_size,
            count: count as u64,
            queues: queues as u64,
            landed: zeros(),
            passed: zeros(),
            device: OnceLock::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            unasked: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            freed,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn place(&self, chunk: u64) -> (usize, u64) {
        ((chunk % self.count) as usize, chunk / self.count + 1)
    }

    /// Sets the driver whose device waits for slots. Called once, before the first command is executed.
    pub(super) fn watch(&self, device: Arc<dyn Arrivals>) {
        // A second one would lack the first one's state, so the first stays.
        let _ = self.device.set(device);
    }

    /// A command with `len` bytes of `In` data was received. Called in the order of commands.
    ///
    /// # Errors
    /// An earlier protocol violation of the bridge.
    pub(super) fn plan(&self, seq: u64, piece: u32, len: u64) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        let chunk = chunk_len(len, self.queues, (self.slot_size - SLOT_DATA as usize) as u64);
        let count = len.div_ceil(chunk);
        let state = &mut *self.lock();
        while state.plan.front().is_some_and(|p| p.asked && p.landed == p.count) {
            state.plan.pop_front();
        }
        let first = state.next;
        let Some(next) = first.checked_add(count).filter(|_| state.plan.len() < MAX_OWED) else {
            return Err(format!("command {seq} names {len} bytes more than the bridge can be waited for"));
        };
        state.plan.push_back(Piece { seq, piece, len, chunk, first, count, landed: 0, asked: false });
        state.next = next;
        self.unasked.fetch_add(1, Ordering::AcqRel);
        for chunk in first..state.next.min(state.told + self.count) {
            if let Some(header) = state.early[(chunk % self.count) as usize].take() {
                self.land(state, chunk, &header)?;
            }
        }
        Ok(())
    }

    /// The bridge has written this slot.
    ///
    /// # Errors
    /// A protocol violation of the bridge.
    pub(super) fn arrived(&self, slot: u32, header: DataHeader) -> Result<(), String> {
        let in_use = || format!("the bridge wrote slot {slot}, which is in use");
        let landed = self.landed.get(slot as usize).ok_or_else(in_use)?;
        let state = &mut *self.lock();
        let chunk = landed.load(Ordering::Relaxed) * self.count + u64::from(slot);
        let early = &mut state.early[slot as usize];
        if chunk >= state.told + self.count || early.is_some() {
            return Err(in_use());
        }
        if chunk >= state.next {
            *early = Some(header);
            return Ok(());
        }
        self.land(state, chunk, &header)
    }

    fn land(&self, state: &mut State, chunk: u64, header: &DataHeader) -> Result<(), String> {
        let at = state.plan.partition_point(|p| p.first <= chunk);
        let piece = at.checked_sub(1).and_then(|at| state.plan.get_mut(at));
        let due = piece.as_ref().map(|p| p.header(chunk));
        let (slot, round) = self.place(chunk);
        let (Some(piece), true) = (piece, due.is_some_and(|due| due == *header)) else {
            return Err(format!("the bridge wrote {header:?} into slot {slot}, where {due:?} was expected"));
        };
        piece.landed += 1;
        state.arrived += 1;
        self.bytes.fetch_add(header.len.into(), Ordering::Relaxed);
        self.landed[slot].store(round, Ordering::Release);
        if let Some(device) = self.device.get() {
            device.landed(slot, round);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// The data of the command that is being executed. `None` if no such data was announced.
    pub(super) fn ask(self: &Arc<PlannedSlots>, seq: u64, piece: u32, len: u64) -> Option<Placed> {
        if len == 0 {
            return Some(Placed { ring: Arc::clone(self), first: 0, count: 0, chunk: 1, len: 0 });
        }
        let mut state = self.lock();
        let at = state.plan.binary_search_by_key(&(seq, piece), |p| (p.seq, p.piece)).ok()?;
        let found = state.plan.get_mut(at)?;
        if found.asked || found.len != len {
            return None;
        }
        found.asked = true;
        self.unasked.fetch_sub(1, Ordering::AcqRel);
        let Piece { first, count, chunk, .. } = *found;
        Some(Placed { ring: Arc::clone(self), first, count, chunk, len })
    }

    /// Commands up to this have been executed: data of theirs that nobody has asked for, nobody will. True:
    /// there was some, so slots may have become free.
    pub(super) fn executed(&self, seq: u64) -> bool {
        if self.unasked.load(Ordering::Acquire) == 0 {
            return false;
        }
        let State { plan, abandoned, executed, .. } = &mut *self.lock();
        // There may be thousands behind them: the pump reads ahead.
        let first = plan.partition_point(|p| p.seq <= *executed);
        let end = plan.partition_point(|p| p.seq <= seq);
        let before = abandoned.len();
        for piece in plan.range_mut(first..end.max(first)).filter(|p| !p.asked) {
            piece.asked = true;
            self.unasked.fetch_sub(1, Ordering::AcqRel);
            abandoned.push(piece.first..piece.first + piece.count);
        }
        *executed = seq.max(*executed);
        abandoned.len() > before
    }

    fn is_passed(&self, slot: usize, round: u64) -> bool {
        self.passed[slot].load(Ordering::Acquire) >= round
            || self.device.get().is_some_and(|device| device.passed(slot) >= round)
    }

    /// Gives the slots of which the bridge is to be told that they are free, if it is time to tell it. It
    /// need not be told as long as it has half of the slots and others will become free after these.
    pub(super) fn take_free(&self, tell: impl FnOnce(&[u32])) {
        let state = &mut *self.lock();
        while state.free < state.next {
            let (slot, round) = self.place(state.free);
            let landed = self.landed[slot].load(Ordering::Acquire) >= round;
            let abandoned = |chunk| state.abandoned.iter().any(|range| range.contains(&chunk));
            if !landed || !(self.is_passed(slot, round) || abandoned(state.free)) {
                break;
            }
            state.free += 1;
        }
        let free = state.free;
        state.abandoned.retain(|range| range.end > free);
        let (unknown, used) = (state.free - state.told, state.arrived - state.free);
        if unknown > 0 && (used == 0 || unknown >= BATCH || used + unknown > self.count / 2) {
            state.names.clear();
            state.names.extend((state.told..state.free).map(|chunk| (chunk % self.count) as u32));
            state.told = state.free;
            tell(&state.names);
        }
    }

    /// Whether a device may free slots without a notification.
    pub(super) fn awaits_device(&self) -> bool {
        self.device.get().is_some() && {
            let state = self.lock();
            state.arrived > state.free
        }
    }

    /// Ends the session: threads that wait for data return.
    pub(super) fn close(&self) {
        self.over.store(true, Ordering::Release);
        // Under the lock, so that no thread is between its check and its wait.
        drop(self.lock());
        self.changed.notify_all();
        if let Some(device) = self.device.get() {
            device.lost();
        }
    }
}

/// Data that a command reads, in the transport's slots or on its way there. Dropping it frees the slots, read
/// or not.
pub struct Placed {
    ring: Arc<PlannedSlots>,
    first: u64,
    count: u64,
    chunk: u64,
    len: u64,
}

impl std::fmt::Debug for Placed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Placed({} bytes in {} chunks)", self.len, self.count)
    }
}

/// Where a chunk of a command's data will lie.
#[derive(Debug, Clone, Copy)]
pub struct PlacedChunk {
    /// Its offset in the data, in bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub len: usize,
    /// Its first byte.
    pub at: NonNull<u8>,
    /// Its slot. See [`Arrivals`].
    pub slot: usize,
    /// The slot's round. See [`Arrivals`].
    pub round: u64,
}

impl Placed {
    /// Its size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the data is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The chunks in order. A chunk's bytes are there from when its round has landed until it is passed or
    /// this is dropped.
    pub fn chunks(&self) -> impl Iterator<Item = PlacedChunk> + '_ {
        (0..self.count).map(|i| {
            let (slot, round) = self.ring.place(self.first + i);
            let offset = i * self.chunk;
            let begin = slot * self.ring.slot_size + SLOT_DATA as usize;
            // SAFETY: slot < count, and a chunk is never longer than a slot's room for data.
            let at = unsafe { self.ring.at.add(begin) };
            PlacedChunk { offset, len: (self.len - offset).min(self.chunk) as usize, at, slot, round }
        })
    }

    /// Waits for each chunk in turn and calls `read` with its offset and its bytes, for a CPU that copies the
    /// data. A chunk's slot is free when `read` returns. Stops at the first error.
    pub fn read<E: From<Lost>>(
        self,
        mut read: impl FnMut(u64, SharedBytes<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        for chunk in self.chunks() {
            self.wait(&chunk)?;
            // SAFETY: the slots stay mapped as long as `self.ring` (see `PlannedSlots::new`), and only the
            // peer's device writes them. A bridge that writes this one before it was told that it may spoils
            // its own session's data.
            let bytes = unsafe { SharedBytes::new(chunk.at, chunk.len) };
            read(chunk.offset, bytes)?;
            self.ring.passed[chunk.slot].fetch_max(chunk.round, Ordering::AcqRel);
            if let Some(freed) = self.ring.freed.upgrade() {
                freed.freed();
            }
        }
        Ok(())
    }

    fn wait(&self, chunk: &PlacedChunk) -> Result<(), Lost> {
        let there = || self.ring.landed[chunk.slot].load(Ordering::Acquire) >= chunk.round;
        if there() {
            return Ok(());
        }
        let mut state = self.ring.lock();
        while !there() {
            if self.ring.over.load(Ordering::Acquire) {
                return Err(Lost::new("the session ended before the data came"));
            }
            state = self.ring.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        Ok(())
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        let end = self.first + self.count;
        let mut state = self.ring.lock();
        if end <= state.free {
            return;
        }
        state.abandoned.push(self.first..end);
        drop(state);
        if let Some(freed) = self.ring.freed.upgrade() {
            freed.freed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLOT: usize = SLOT_DATA as usize + (64 << 10);

    struct Nobody;
    impl Freed for Nobody {
        fn freed(&self) {}
    }

    fn ring(count: usize) -> (Arc<PlannedSlots>, Vec<u8>) {
        let mut memory = vec![0u8; count * SLOT];
        let at = NonNull::new(memory.as_mut_ptr()).unwrap();
        let freed: Weak<dyn Freed> = Weak::<Nobody>::new();
        // SAFETY: the tests keep the memory as long as the ring.
        (unsafe { PlannedSlots::new(at, SLOT, count, 1, freed) }, memory)
    }

    fn header(seq: u64, offset: u64, len: u32) -> DataHeader {
        DataHeader { seq, offset, piece: 0, len }
    }

    fn told(ring: &PlannedSlots) -> Vec<u32> {
        let mut told = Vec::new();
        ring.take_free(|slots| told.extend_from_slice(slots));
        told
    }

    #[test]
    fn data_that_comes_before_its_command_waits_for_it() {
        let (ring, _memory) = ring(4);
        ring.arrived(0, header(1, 0, 10)).unwrap();
        ring.plan(1, 0, 10).unwrap();
        let placed = ring.ask(1, 0, 10).unwrap();
        assert!(told(&ring).is_empty());
        let mut read = 0;
        placed
            .read::<Lost>(|_, bytes| {
                read += bytes.len();
                Ok(())
            })
            .unwrap();
        assert_eq!((read, told(&ring)), (10, vec![0]));
    }

    #[test]
    fn a_slot_that_is_in_use_is_not_the_bridges_to_write() {
        let (ring, _memory) = ring(2);
        ring.arrived(0, header(1, 0, 10)).unwrap();
        assert!(ring.arrived(0, header(1, 0, 10)).unwrap_err().contains("in use"));
        assert!(ring.arrived(2, header(1, 0, 10)).unwrap_err().contains("in use"));
        ring.plan(1, 0, 10).unwrap();
        assert!(ring.arrived(0, header(2, 0, 10)).unwrap_err().contains("in use"));
    }

    #[test]
    fn a_chunk_that_is_not_the_one_due_ends_the_session() {
        for wrong in
            [header(2, 0, 10), header(1, 1, 10), header(1, 0, 9), DataHeader { piece: 1, ..header(1, 0, 10) }]
        {
            let (ring, _memory) = ring(2);
            ring.plan(1, 0, 10).unwrap();
            assert!(ring.arrived(0, wrong).unwrap_err().contains("was expected"));
            let (early, _memory) = self::ring(2);
            early.arrived(0, wrong).unwrap();
            assert!(early.plan(1, 0, 10).unwrap_err().contains("was expected"));
        }
    }

    #[test]
    fn data_that_nobody_asks_for_makes_room_when_its_command_is_executed() {
        let (ring, _memory) = ring(2);
        ring.plan(1, 0, 10).unwrap();
        ring.plan(2, 0, 10).unwrap();
        ring.arrived(1, header(2, 0, 10)).unwrap();
        assert!(ring.executed(2));
        assert!(told(&ring).is_empty() && ring.ask(1, 0, 10).is_none());
        ring.arrived(0, header(1, 0, 10)).unwrap();
        assert_eq!(told(&ring), [0, 1]);
        // The slots' next rounds.
        ring.plan(3, 0, 10).unwrap();
        ring.arrived(0, header(3, 0, 10)).unwrap();
    }

    #[test]
    fn a_command_that_leaves_nothing_makes_no_room() {
        let (ring, _memory) = ring(8);
        for seq in 2..=6 {
            ring.plan(seq, 0, 10).unwrap();
            ring.plan(seq, 2, 10).unwrap();
        }
        // Whatever of later commands is known already.
        assert!(!ring.executed(1));
        let (asked, _second) = (ring.ask(2, 0, 10).unwrap(), ring.ask(2, 2, 10).unwrap());
        assert!(!ring.executed(2) && ring.ask(2, 1, 10).is_none());
        let _one_of_two = ring.ask(4, 2, 10).unwrap();
        assert!(ring.executed(4), "of 3 and 4");
        assert!(!ring.executed(4) && ring.ask(3, 0, 10).is_none() && ring.ask(4, 0, 10).is_none());
        assert!(ring.ask(5, 0, 10).is_some() && ring.ask(6, 2, 10).is_some());
        assert!(ring.executed(6) && !ring.executed(6));
        drop(asked);
    }

    #[test]
    fn who_waits_for_data_is_let_go_when_the_session_ends() {
        let (ring, _memory) = ring(2);
        ring.plan(1, 0, 10).unwrap();
        let placed = ring.ask(1, 0, 10).unwrap();
        let waiting = std::thread::spawn(move || placed.read::<Lost>(|_, _| Ok(())).is_err());
        ring.close();
        assert!(waiting.join().unwrap());
    }

    #[test]
    fn a_device_is_told_of_rounds_and_frees_slots_by_itself() {
        #[derive(Default)]
        struct Device {
            landed: Mutex<Vec<(usize, u64)>>,
            passed: AtomicU64,
        }
        impl Arrivals for Device {
            fn landed(&self, slot: usize, round: u64) {
                self.landed.lock().unwrap().push((slot, round));
            }
            fn passed(&self, _slot: usize) -> u64 {
                self.passed.load(Ordering::Relaxed)
            }
            fn lost(&self) {}
        }
        let (ring, _memory) = ring(2);
        let device = Arc::new(Device::default());
        ring.watch(device.clone());
        ring.plan(1, 0, 3 * (64 << 10)).unwrap();
        let placed = ring.ask(1, 0, 3 * (64 << 10)).unwrap();
        let places: Vec<_> = placed.chunks().map(|c| (c.slot, c.round)).collect();
        assert_eq!(places, [(0, 1), (1, 1), (0, 2)]);
        ring.arrived(1, header(1, 64 << 10, 64 << 10)).unwrap();
        ring.arrived(0, header(1, 0, 64 << 10)).unwrap();
        assert!(ring.awaits_device() && told(&ring).is_empty());
        device.passed.store(1, Ordering::Relaxed);
        assert_eq!(told(&ring), [0, 1]);
        assert!(!ring.awaits_device());
        ring.arrived(0, header(1, 128 << 10, 64 << 10)).unwrap();
        assert_eq!(*device.landed.lock().unwrap(), [(1, 1), (0, 1), (0, 2)]);
        drop(placed);
        assert_eq!(told(&ring), [0]);
    }

    proptest! {
        /// For all lengths and all orders in which chunks land and are read, the bridge and the server agree
        /// on where each chunk goes, nothing gets stuck, and no slot is written before it is free.
        #[test]
        fn both_sides_agree_where_chunks_go(
            count in 2usize..16,
            lengths in prop::collection::vec(1u64..400_000, 1..40),
            order in prop::collection::vec(any::<u8>(), 1..200),
        ) {
            let (ring, _memory) = ring(count);
            let most = (SLOT - SLOT_DATA as usize) as u64;
            let mut chunks: VecDeque<DataHeader> = VecDeque::new();
            for (i, len) in lengths.iter().enumerate() {
                let chunk = chunk_len(*len, 1, most);
                let mut offset = 0;
                while offset < *len {
                    let now = chunk.min(len - offset);
                    chunks.push_back(header(i as u64 + 1, offset, now as u32));
                    offset += now;
                }
            }
            let mut free: VecDeque<u32> = (0..count as u32).collect();
            let mut flying: Vec<(u32, DataHeader)> = Vec::new();
            let mut order = order.into_iter().cycle();
            let mut planned = 0;
            let mut asked: Vec<Placed> = Vec::new();
            let mut rounds = 0;
            while !chunks.is_empty() || !flying.is_empty() || planned < lengths.len() || !asked.is_empty() {
                // Never the same for ever, however short the given order is.
                let choice = order.next().unwrap().wrapping_add(rounds as u8);
                if choice % 3 == 0 && planned < lengths.len() {
                    let seq = planned as u64 + 1;
                    ring.plan(seq, 0, lengths[planned]).unwrap();
                    if choice % 2 == 0 { asked.push(ring.ask(seq, 0, lengths[planned]).unwrap()); }
                    ring.executed(seq);
                    planned += 1;
                }
                if let (Some(chunk), Some(slot)) = (chunks.front().copied(), free.front().copied()) {
                    chunks.pop_front();
                    free.pop_front();
                    flying.push((slot, chunk));
                }
                if !flying.is_empty() {
                    let (slot, chunk) = flying.swap_remove(usize::from(choice) % flying.len());
                    prop_assert_eq!(ring.arrived(slot, chunk), Ok(()));
                }
                if !asked.is_empty() && choice % 5 == 0 { drop(asked.remove(0)); }
                ring.take_free(|slots| free.extend(slots));
                rounds += 1;
                prop_assert!(rounds < 100_000, "stuck");
            }
            prop_assert_eq!(ring.lock().told, ring.lock().next);
            prop_assert!(ring.lock().abandoned.is_empty());
        }
    }
}
