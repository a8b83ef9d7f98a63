//! Device memory: places allocations in a device's address window.
//!
//! ```text
//!  window  ├──────── chunk ────────┤ gap ├── chunk ──┤ gap ├ … 1 TiB
//!          │alloc│alloc│ free │alloc│     │   alloc   │
//! ```
//!
//! A chunk is the range that one `MemGrow` backed, and is given back as a whole. That is not waited for,
//! unless the memory is needed again: the server answers only when no stream of the device is held. An
//! allocation lies within one chunk, is placed by best fit, and needs no round trip. One granule between
//! chunks stays unbacked, so that free ranges of two chunks never merge and a kernel that runs past the end
//! of a chunk faults.
//!
//! If answers take long, the next chunks are requested while the program still fills the last one: one chunk
//! at first, and one more each time that the program has to wait for a chunk. The more memory the program
//! has, the larger these chunks are. Sizes above [`MAX_AHEAD`] are requested early only while the program
//! needs the same size again and again, as for the layers of a model.
//!
//! Allocations that streams make and free in their own order are in [slabs](crate::ordered), which are
//! allocations to the server.

use std::collections::{BTreeMap, VecDeque};

use crate::ordered::Ordered;
use crate::ranges::FreeRanges;
use crate::seq::Seq;
use protocol::Status;
use protocol::ops::memory::{DEVICE_PART, WINDOW_SIZE, window};

/// Alignment of allocations in bytes, that of `cuMemAlloc`.
pub const ALIGN: u64 = 512;
/// The smallest chunk in bytes, if the device has that much: a program with a few small allocations makes one
/// request.
const MIN_CHUNK: u64 = 32 << 20;
/// How many bytes of chunks without allocations are kept for later ones, if the program asks for no more.
const MAX_EMPTY: u64 = 256 << 20;

/// Maximum size in bytes of a chunk that is requested before it is needed.
const MAX_AHEAD: u64 = 128 << 20;
/// Maximum number of chunks that are requested before they are needed.
const MOST_AHEAD: usize = 4;
/// Maximum number of bytes in chunks larger than [`MAX_AHEAD`] that are requested before they are needed.
const MAX_REPEATED: u64 = 1 << 30;
/// A chunk that is requested early has at least this fraction of the program's memory, up to [`MAX_AHEAD`].
/// All larger ones together have at most this fraction.
const AHEAD_PART: u64 = 8;
/// The smallest slab in bytes, if the device has that much.
const MIN_SLAB: u64 = 2 << 20;

/// The answer to a `MemGrow` or a `MemShrink`, which was not awaited yet.
pub trait Answer: Send + std::fmt::Debug {
    /// Whether it has arrived.
    fn is_here(&self) -> bool;
    /// Waits for it.
    fn wait(self: Box<Self>) -> Result<(), Status>;
}

/// Backs addresses with memory on the server.
pub trait Backing {
    /// `MemGrow`.
    fn grow(&self, device: u32, address: u64, size: u64) -> Result<(), Status>;
    /// `MemGrow` without waiting for the answer. `None` if waiting is so short that this is not worth it, or
    /// if it is not possible now.
    fn grow_ahead(&self, _device: u32, _address: u64, _size: u64) -> Option<Box<dyn Answer>> {
        None
    }
    /// `MemShrink`.
    fn shrink(&self, device: u32, address: u64, size: u64) -> Result<(), Status>;
    /// `MemShrink` without waiting for the answer. `None`: the memory is already given back.
    fn shrink_ahead(&self, device: u32, address: u64, size: u64) -> Result<Option<Box<dyn Answer>>, Status> {
        self.shrink(device, address, size).map(|()| None)
    }
}

/// An allocation, as its owner described it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation<T> {
    /// Size in bytes, as requested.
    pub size: u64,
    /// Size in bytes, as reserved.
    reserved: u64,
    /// Whether it is in a slab.
    in_slab: bool,
    /// The owner's data.
    pub tag: T,
}

/// Memory that was allocated in a stream's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InOrder {
    /// Its address.
    pub address: u64,
    /// The slab that was made for it, of which the server is to be told: first address and size in bytes.
    pub slab: Option<(u64, u64)>,
}

/// One device's memory. `T` is what its owner knows of an allocation, and `S` in whose order one was freed.
#[derive(Debug)]
pub struct DeviceMemory<T, S> {
    device: u32,
    granule: u64,
    /// The window's first address and its size.
    window: (u64, u64),
    /// Alignment of allocations.
    align: u64,
    /// Addresses of the window outside all chunks.
    addresses: FreeRanges,
    chunks: BTreeMap<u64, Piece>,
    free: FreeRanges,
    /// Bytes of chunks without allocations.
    empty: u64,
    /// Bytes of all allocations: now and at the maximum.
    used: u64,
    used_high: u64,
    /// The chunks that were requested early, in this order, and how many there should be.
    ahead: VecDeque<Requested>,
    depth: usize,
    /// The chunks that are being given back. The server answers when streams of the device have reached what
    /// was before, so only whoever needs the memory waits for it. Their addresses are not used until then.
    leaving: Vec<Requested>,
    /// How often everything was dropped.
    resets: u64,
    /// Size of the chunk that was needed last.
    last: u64,
    /// Set when the server had no more memory: nothing is requested early until memory is given back.
    full: bool,
    allocations: BTreeMap<u64, Allocation<T>>,
    ordered: Ordered<S>,
}

/// A chunk that was requested early, or is being given back.
#[derive(Debug)]
struct Requested {
    address: u64,
    size: u64,
    answer: Box<dyn Answer>,
}

/// A chunk that is being given back.
#[derive(Debug)]
pub struct GivenBack {
    chunk: Requested,
    resets: u64,
}

impl GivenBack {
    /// Waits for the answer.
    pub fn wait(self) -> Returned {
        let GivenBack { chunk: Requested { address, size, answer }, resets } = self;
        Returned { address, size, resets, answer: answer.wait() }
    }
}

/// A chunk that was given back, or could not be.
#[derive(Debug)]
pub struct Returned {
    address: u64,
    size: u64,
    answer: Result<(), Status>,
    resets: u64,
}

#[derive(Debug)]
struct Piece {
    size: u64,
    used: u64,
}

impl<T, S: Ord> DeviceMemory<T, S> {
    /// Memory on device `ordinal` only, with nothing backed yet, in the window with this number. `granule` is
    /// in bytes and a power of two.
    pub fn new(device: u32, number: u32, granule: u64) -> Self {
        Self::within(device, granule, (window(number), DEVICE_PART), ALIGN)
    }

    /// Memory on device `ordinal` at addresses that the host also maps. Allocations are aligned to `page`
    /// bytes.
    pub fn both(device: u32, number: u32, granule: u64, page: u64) -> Self {
        Self::within(device, granule, (window(number) + DEVICE_PART, WINDOW_SIZE - DEVICE_PART), page)
    }

    fn within(device: u32, granule: u64, window: (u64, u64), align: u64) -> Self {
        let granule = granule.max(align).next_power_of_two();
        let mut addresses = FreeRanges::new();
        addresses.insert(window.0, window.1);
        DeviceMemory {
            device,
            granule,
            window,
            align,
            addresses,
            chunks: BTreeMap::new(),
            free: FreeRanges::new(),
            empty: 0,
            used: 0,
            used_high: 0,
            ahead: VecDeque::new(),
            depth: 1,
            leaving: Vec::new(),
            resets: 0,
            last: 0,
            full: false,
            allocations: BTreeMap::new(),
            ordered: Ordered::new(),
        }
    }

    /// Whether an address is in the window.
    pub fn holds(&self, address: u64) -> bool {
        address.checked_sub(self.window.0).is_some_and(|at| at < self.window.1)
    }

    /// The backed ranges: first address and size of each chunk.
    pub fn chunks(&self) -> Vec<(u64, u64)> {
        self.chunks.iter().map(|(address, chunk)| (*address, chunk.size)).collect()
    }

    /// Backed bytes outside all allocations, as far as the server has answered.
    pub fn free_bytes(&mut self) -> u64 {
        self.take_answered();
        self.take_answers();
        let leaving: u64 = self.leaving.iter().map(|leaving| leaving.size).sum();
        self.free.total() + self.ordered.free_bytes() + leaving
    }

    /// Allocates `size` bytes (not 0), backing more of the window if needed.
    pub fn alloc(&mut self, size: u64, tag: T, backing: &dyn Backing) -> Result<u64, Status> {
        let reserved = self.aligned(size)?;
        let address = self.reserve(reserved, backing)?;
        self.allocations.insert(address, Allocation { size, reserved, in_slab: false, tag });
        Ok(address)
    }

    /// Allocates `size` bytes (not 0) in the order of `by`: from what it has freed itself or what no stream
    /// uses, or in a new slab.
    ///
    /// What `by` has freed may be too small, as when arrays grow with each step. Then the slab has room for
    /// more: as much again as that, but at most half of the allocation.
    pub fn alloc_in_order(
        &mut self,
        by: &S,
        size: u64,
        tag: T,
        backing: &dyn Backing,
    ) -> Result<InOrder, Status> {
        let reserved = self.aligned(size)?;
        let mut slab = None;
        let address = match self.ordered.take(by, reserved) {
            Some(address) => address,
            None => {
                let more = self.ordered.pending_bytes(by).min(reserved / 2);
                let wanted = self.aligned(reserved + more)?.max(MIN_SLAB);
                let made = match self.reserve(wanted, backing) {
                    Err(Status::OUT_OF_MEMORY) if wanted > reserved => {
                        (self.reserve(reserved, backing)?, reserved)
                    }
                    made => (made?, wanted),
                };
                slab = Some(made);
                self.ordered.add(made.0, made.1);
                self.ordered.take(by, reserved).ok_or(Status::OUT_OF_MEMORY)?
            }
        };
        self.allocations.insert(address, Allocation { size, reserved, in_slab: true, tag });
        Ok(InOrder { address, slab })
    }

    /// The same, if nothing more has to be reserved.
    pub fn alloc_again(&mut self, by: &S, size: u64, tag: T) -> Option<u64> {
        let reserved = self.aligned(size).ok()?;
        let address = self.ordered.take(by, reserved)?;
        self.allocations.insert(address, Allocation { size, reserved, in_slab: true, tag });
        Some(address)
    }

    /// Allocates again what was allocated outside slabs with the same size, and which `by` has freed.
    pub fn alloc_whole_again(&mut self, by: &S, size: u64, tag: T) -> Option<u64> {
        let reserved = self.aligned(size).ok()?;
        let address = self.ordered.take_whole(by, reserved)?;
        self.allocations.insert(address, Allocation { size, reserved, in_slab: false, tag });
        Some(address)
    }

    /// A size in bytes, as reserved.
    fn aligned(&self, size: u64) -> Result<u64, Status> {
        let reserved = size.checked_next_multiple_of(self.align);
        reserved.filter(|reserved| *reserved < self.window.1).ok_or(Status::OUT_OF_MEMORY)
    }

    /// Takes a range of a chunk, backing more of the window if needed.
    fn reserve(&mut self, reserved: u64, backing: &dyn Backing) -> Result<u64, Status> {
        let address = match self.free.take_best(reserved) {
            Some(address) => address,
            None => {
                self.grow(reserved, backing)?;
                self.free.take_best(reserved).ok_or(Status::OUT_OF_MEMORY)?
            }
        };
        if let Some((_, chunk)) = self.chunks.range_mut(..=address).next_back() {
            if chunk.used == 0 {
                self.empty -= chunk.size;
            }
            chunk.used += reserved;
        }
        self.used += reserved;
        self.used_high = self.used_high.max(self.used);
        Ok(address)
    }

    /// Makes a free range of `reserved` bytes, or as many more as it takes.
    fn grow(&mut self, reserved: u64, backing: &dyn Backing) -> Result<(), Status> {
        let exact = reserved.next_multiple_of(self.granule);
        let wanted = exact.max(MIN_CHUNK.next_multiple_of(self.granule));
        while self.ahead.iter().any(|ahead| ahead.size >= exact) {
            let Some(ahead) = self.ahead.front() else { break };
            let fits = ahead.size >= exact;
            if !ahead.answer.is_here() {
                // The program needs memory faster than answers come.
                self.depth = (self.depth + 1).min(MOST_AHEAD);
            }
            if self.take_ahead() && fits {
                self.ask_ahead(wanted, backing);
                return Ok(());
            }
        }
        match self.grow_by(wanted, backing) {
            Err(Status::OUT_OF_MEMORY) => self.full = true,
            other => {
                if other.is_ok() {
                    self.ask_ahead(wanted, backing);
                }
                return other;
            }
        }
        if !self.trim(0, backing) && wanted == exact {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.grow_by(exact, backing)
    }

    /// Requests the chunks that may be needed next, after a chunk of `wanted` bytes was needed. They never
    /// have more bytes than the program's memory.
    fn ask_ahead(&mut self, wanted: u64, backing: &dyn Backing) {
        let has: u64 = self.chunks.values().map(|chunk| chunk.size).sum();
        let repeats = std::mem::replace(&mut self.last, wanted) == wanted;
        if repeats && wanted > MAX_AHEAD {
            let most = (has / AHEAD_PART).min(MAX_REPEATED);
            let fitting = |memory: &Self| memory.ahead.iter().filter(|ahead| ahead.size >= wanted).count();
            while fitting(self) < self.depth && (fitting(self) as u64 + 1) * wanted <= most {
                if !self.ask(wanted, backing) {
                    return;
                }
            }
        }
        let size = wanted.max(has / AHEAD_PART).clamp(MIN_CHUNK, MAX_AHEAD).next_multiple_of(self.granule);
        let mut asked: u64 = self.ahead.iter().map(|ahead| ahead.size).sum();
        while self.ahead.len() < self.depth && (asked == 0 || asked + size <= has) {
            if !self.ask(size, backing) {
                return;
            }
            asked += size;
        }
    }

    /// Requests a chunk without waiting. Returns whether it did.
    fn ask(&mut self, size: u64, backing: &dyn Backing) -> bool {
        if self.full {
            return false;
        }
        let Some(address) = self.addresses.take_best(size + self.granule) else { return false };
        let Some(answer) = backing.grow_ahead(self.device, address, size) else {
            self.addresses.insert(address, size + self.granule);
            return false;
        };
        self.ahead.push_back(Requested { address, size, answer });
        true
    }

    /// Takes the requested chunks whose answers have come.
    fn take_answered(&mut self) {
        while self.ahead.front().is_some_and(|ahead| ahead.answer.is_here()) {
            self.take_ahead();
        }
    }

    /// Waits for the next requested chunk. Returns whether there is one now.
    fn take_ahead(&mut self) -> bool {
        let Some(Requested { address, size, answer }) = self.ahead.pop_front() else { return false };
        match answer.wait() {
            Ok(()) => self.add_chunk(address, size),
            // The request that needs memory reports the error.
            Err(status) => {
                self.full |= status == Status::OUT_OF_MEMORY;
                self.depth = 1;
                self.addresses.insert(address, size + self.granule);
                return false;
            }
        }
        true
    }

    fn grow_by(&mut self, size: u64, backing: &dyn Backing) -> Result<(), Status> {
        let with_gap = size + self.granule;
        let address = self.addresses.take_best(with_gap).ok_or(Status::OUT_OF_MEMORY)?;
        if let Err(status) = backing.grow(self.device, address, size) {
            self.addresses.insert(address, with_gap);
            return Err(status);
        }
        self.add_chunk(address, size);
        Ok(())
    }

    fn add_chunk(&mut self, address: u64, size: u64) {
        self.chunks.insert(address, Piece { size, used: 0 });
        self.free.insert(address, size);
        self.empty += size;
    }

    /// Gives chunks without allocations back until at most `keep` bytes of them are left, without waiting for
    /// the answers ([`take_leaving`](Self::take_leaving)). What cannot be given back now stays available.
    /// Returns whether the server may have more room than before. No pending work may use the chunks.
    pub fn trim(&mut self, keep: u64, backing: &dyn Backing) -> bool {
        // No stream delays the answers for chunks that were requested early.
        while keep == 0 && !self.ahead.is_empty() {
            self.take_ahead();
        }
        let mut any = self.take_answers();
        while self.empty > keep
            && let Some((address, size)) = self.largest_empty()
        {
            let Ok(later) = backing.shrink_ahead(self.device, address, size) else { break };
            self.chunks.remove(&address);
            self.free.remove(address, size);
            self.empty -= size;
            any = true;
            match later {
                Some(answer) => self.leaving.push(Requested { address, size, answer }),
                None => self.is_returned(address, size),
            }
        }
        any
    }

    /// The chunks that are being given back and whose answers have not come. Whoever takes them waits for the
    /// answers, without a lock on this, and then calls [`returned`](Self::returned) with each.
    pub fn take_leaving(&mut self) -> Vec<GivenBack> {
        self.take_answers();
        let resets = self.resets;
        self.leaving.drain(..).map(|chunk| GivenBack { chunk, resets }).collect()
    }

    /// A chunk was given back, or could not be.
    pub fn returned(&mut self, chunk: Returned) {
        let Returned { address, size, answer, resets } = chunk;
        match answer {
            _ if resets != self.resets => {}
            Ok(()) => self.is_returned(address, size),
            Err(_) => self.add_chunk(address, size),
        }
    }

    /// Takes the answers that have come for chunks that are being given back. Returns false if none have.
    fn take_answers(&mut self) -> bool {
        let (before, resets) = (self.leaving.len(), self.resets);
        let answered: Vec<Requested> = self.leaving.extract_if(.., |chunk| chunk.answer.is_here()).collect();
        for chunk in answered {
            self.returned(GivenBack { chunk, resets }.wait());
        }
        before != self.leaving.len()
    }

    /// The chunk without allocations that has the most bytes: few calls are needed to give these back.
    fn largest_empty(&self) -> Option<(u64, u64)> {
        let empty = self.chunks.iter().filter(|(_, chunk)| chunk.used == 0);
        empty.map(|(address, chunk)| (*address, chunk.size)).max_by_key(|(_, size)| *size)
    }

    fn is_returned(&mut self, address: u64, size: u64) {
        self.addresses.insert(address, size + self.granule);
        self.full = false;
    }

    /// Drops everything, because it no longer exists on the server.
    pub fn reset(&mut self) {
        let resets = self.resets + 1;
        *self = DeviceMemory { resets, ..Self::within(self.device, self.granule, self.window, self.align) };
    }

    /// Frees an allocation; `None` if there is none at this address. No pending work may use it.
    pub fn free(&mut self, address: u64, backing: &dyn Backing) -> Option<Allocation<T>> {
        self.free_and_keep(address, |_| 0, backing)
    }

    /// Like [`free`](Self::free), for memory of which the program keeps more for later allocations. `keep`
    /// says how many bytes more, from the number before this. It is not always called. There are never more
    /// than make the program's memory as large as it once was.
    pub fn free_and_keep(
        &mut self,
        address: u64,
        keep: impl FnOnce(u64) -> u64,
        backing: &dyn Backing,
    ) -> Option<Allocation<T>> {
        let allocation = self.allocations.remove(&address)?;
        if allocation.in_slab {
            self.ordered.give(address, allocation.reserved);
        } else {
            self.unreserve(address, allocation.reserved, keep, backing);
        }
        Some(allocation)
    }

    /// Frees an allocation in the order of `by`, whose stream frees it when it passes the mark; `None` if
    /// there is none at this address.
    pub fn free_in_order(&mut self, address: u64, by: S, mark: Seq) -> Option<Allocation<T>> {
        let allocation = self.allocations.remove(&address)?;
        if allocation.in_slab {
            self.ordered.give_in_order(by, mark, address, allocation.reserved);
        } else {
            self.ordered.give_whole_in_order(by, mark, address, allocation.reserved);
        }
        Some(allocation)
    }

    /// Notes which frees were passed. Of each stream, it asks for marks in their order, and only until one
    /// was not passed.
    pub fn pass(&mut self, passed: impl Fn(&S, Seq) -> bool) {
        self.ordered.pass(passed);
    }

    /// Whether a stream has not passed a free, or there is something to [`give_back`](Self::give_back).
    pub fn has_freed(&self) -> bool {
        self.ordered.has_freed()
    }

    /// All that have freed what was not passed, each with the last mark.
    pub fn waits(&self) -> impl Iterator<Item = (&S, Seq)> {
        self.ordered.waits()
    }

    /// A slab or an allocation outside slabs that can be given back: its address, and whether it is a slab.
    pub fn to_give_back(&self) -> Option<(u64, bool)> {
        self.ordered.empty().map(|(address, whole)| (address, !whole))
    }

    /// Gives that back; the server knows. `keep` as in [`free_and_keep`](Self::free_and_keep).
    pub fn give_back(&mut self, address: u64, keep: impl FnOnce(u64) -> u64, backing: &dyn Backing) {
        if let Some(reserved) = self.ordered.remove_empty(address) {
            self.unreserve(address, reserved, keep, backing);
        }
    }

    fn unreserve(
        &mut self,
        address: u64,
        reserved: u64,
        keep: impl FnOnce(u64) -> u64,
        backing: &dyn Backing,
    ) {
        let before = self.empty.saturating_sub(MAX_EMPTY);
        self.free.insert(address, reserved);
        self.used -= reserved;
        if let Some((_, chunk)) = self.chunks.range_mut(..=address).next_back() {
            chunk.used -= reserved;
            if chunk.used == 0 {
                self.empty += chunk.size;
            }
        }
        if self.empty > MAX_EMPTY {
            let more = keep(before);
            self.keep_only(more, backing);
        }
    }

    /// Gives chunks without allocations back as [`free_and_keep`](Self::free_and_keep) does.
    pub fn keep_only(&mut self, more: u64, backing: &dyn Backing) {
        self.trim(MAX_EMPTY + more.min(self.used_high - self.used), backing);
    }

    /// The allocation that contains an address, and its start.
    pub fn find(&self, address: u64) -> Option<(u64, &Allocation<T>)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        (address - base < allocation.size).then_some((*base, allocation))
    }

    /// Whether the allocation at `base` is in a slab, so that the server does not know it.
    pub fn is_in_slab(&self, base: u64) -> bool {
        self.allocations.get(&base).is_some_and(|allocation| allocation.in_slab)
    }

    /// The owner's data of the allocation at `base`.
    pub fn tag_mut(&mut self, base: u64) -> Option<&mut T> {
        self.allocations.get_mut(&base).map(|allocation| &mut allocation.tag)
    }

    /// The addresses of allocations whose data `which` selects.
    pub fn addresses_where(&self, which: impl Fn(&T) -> bool) -> Vec<u64> {
        self.allocations.iter().filter(|(_, a)| which(&a.tag)).map(|(address, _)| *address).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::{Cell, RefCell};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    type Memory = DeviceMemory<(), char>;

    /// A device with `limit` bytes of memory that checks requests.
    struct Fake {
        limit: u64,
        backed: RefCell<BTreeMap<u64, u64>>,
        far: bool,
        /// Whether streams delay what is given back.
        held: Arc<AtomicBool>,
        owed: RefCell<Vec<(u64, u64)>>,
        /// Requests that were waited for.
        waits: Cell<usize>,
    }

    impl Fake {
        fn new(limit: u64) -> Fake {
            Fake {
                limit,
                backed: RefCell::default(),
                far: false,
                held: Arc::default(),
                owed: RefCell::default(),
                waits: Cell::new(0),
            }
        }

        fn far(limit: u64) -> Fake {
            Fake { far: true, ..Fake::new(limit) }
        }

        fn backed(&self) -> u64 {
            self.backed.borrow().values().sum()
        }

        /// What is given back from now on waits for streams, or no longer does.
        fn hold(&self, held: bool) {
            self.held.store(held, Ordering::Relaxed);
            for (address, size) in self.owed.take() {
                self.shrink(0, address, size).unwrap();
            }
        }
    }

    /// Given back when it is not held any more.
    #[derive(Debug)]
    struct Returning(Arc<AtomicBool>);

    impl Answer for Returning {
        fn is_here(&self) -> bool {
            !self.0.load(Ordering::Relaxed)
        }
        fn wait(self: Box<Self>) -> Result<(), Status> {
            assert!(self.is_here(), "it is waited for");
            Ok(())
        }
    }

    #[derive(Debug)]
    struct Answered(Result<(), Status>);

    impl Answer for Answered {
        fn is_here(&self) -> bool {
            true
        }
        fn wait(self: Box<Self>) -> Result<(), Status> {
            self.0
        }
    }

    impl Backing for Fake {
        fn grow_ahead(&self, device: u32, address: u64, size: u64) -> Option<Box<dyn Answer>> {
            let waits = self.waits.get();
            let answer: Box<dyn Answer> =
                Box::new(Answered(self.far.then(|| self.grow(device, address, size))?));
            self.waits.set(waits);
            Some(answer)
        }
        fn grow(&self, device: u32, address: u64, size: u64) -> Result<(), Status> {
            self.waits.set(self.waits.get() + 1);
            let mut backed = self.backed.borrow_mut();
            assert!(address >= window(device) && address + size <= window(device) + WINDOW_SIZE);
            assert!(address.is_multiple_of(2 << 20) && size.is_multiple_of(2 << 20));
            assert!(backed.iter().all(|(a, s)| a + s <= address || address + size <= *a), "backed twice");
            if backed.values().sum::<u64>() + size > self.limit {
                return Err(Status::OUT_OF_MEMORY);
            }
            backed.insert(address, size);
            Ok(())
        }
        fn shrink_ahead(
            &self,
            device: u32,
            address: u64,
            size: u64,
        ) -> Result<Option<Box<dyn Answer>>, Status> {
            if self.held.load(Ordering::Relaxed) {
                self.owed.borrow_mut().push((address, size));
            } else {
                self.shrink(device, address, size)?;
            }
            Ok(Some(Box::new(Returning(self.held.clone()))))
        }
        fn shrink(&self, _: u32, address: u64, size: u64) -> Result<(), Status> {
            assert_eq!(self.backed.borrow_mut().remove(&address), Some(size), "a chunk goes back whole");
            Ok(())
        }
    }

    #[test]
    fn small_allocations_grow_the_window_once() {
        let fake = Fake::new(1 << 30);
        let mut memory = Memory::new(1, 1, 2 << 20);
        for _ in 0..100 {
            memory.alloc(1000, (), &fake).unwrap();
        }
        assert_eq!(fake.backed.borrow().len(), 1);
    }

    #[test]
    fn memory_shared_with_the_host_is_separate_and_page_aligned() {
        let fake = Fake::new(1 << 30);
        let mut both = Memory::both(1, 1, 2 << 20, 4096);
        for _ in 0..10 {
            let address = both.alloc(5000, (), &fake).unwrap();
            assert!(address.is_multiple_of(4096) && both.holds(address));
            assert!(!Memory::new(1, 1, 2 << 20).holds(address));
        }
        assert_eq!(both.chunks().len(), 1);
    }

    #[test]
    fn a_full_device_retries_with_the_exact_size() {
        let fake = Fake::new(4 << 20);
        let mut memory = Memory::new(0, 0, 2 << 20);
        memory.alloc(3 << 20, (), &fake).unwrap();
        assert_eq!(memory.alloc(3 << 20, (), &fake), Err(Status::OUT_OF_MEMORY));
    }

    #[test]
    fn an_empty_chunk_is_given_back_when_its_memory_is_needed() {
        let fake = Fake::new(64 << 20);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let first = memory.alloc(40 << 20, (), &fake).unwrap();
        memory.free(first, &fake).unwrap();
        assert!(memory.alloc(60 << 20, (), &fake).is_ok());
    }

    #[test]
    fn memory_is_given_back_without_waiting_and_its_addresses_are_used_when_it_is() {
        const SIZE: u64 = 300 << 20;
        let fake = Fake::new(700 << 20);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let first = memory.alloc(SIZE, (), &fake).unwrap();
        fake.hold(true);
        memory.free(first, &fake).unwrap();
        assert_eq!((memory.leaving.len(), memory.chunks().len(), memory.free_bytes()), (1, 0, SIZE));
        let second = memory.alloc(SIZE, (), &fake).unwrap();
        assert_ne!(first, second);
        fake.hold(false);
        assert_eq!((memory.free_bytes(), memory.leaving.len()), (0, 0));
        let third = memory.alloc(SIZE, (), &fake).unwrap();
        assert_eq!(first, third);
        memory.free(second, &fake).unwrap();
        assert!(memory.alloc(SIZE + (100 << 20), (), &fake).is_ok());
        // A chunk that cannot be given back stays.
        memory.free(third, &fake).unwrap();
        memory.leaving.last_mut().unwrap().answer = Box::new(Answered(Err(Status::UNKNOWN)));
        assert_eq!((memory.free_bytes(), memory.chunks().len()), (SIZE, 2));
    }

    #[test]
    fn a_program_keeps_as_much_as_it_asks_for() {
        const SIZE: u64 = 300 << 20;
        let fake = Fake::new(4 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let [first, second, third] = [(); 3].map(|()| memory.alloc(SIZE, (), &fake).unwrap());
        memory.free_and_keep(first, |before| SIZE + before, &fake).unwrap();
        assert_eq!((fake.backed(), memory.alloc(SIZE, (), &fake)), (3 * SIZE, Ok(first)));
        memory.free_and_keep(first, |_| SIZE, &fake).unwrap();
        // What asks for nothing takes nothing from the others.
        memory.free_and_keep(second, |before| before, &fake).unwrap();
        assert_eq!(fake.backed(), 2 * SIZE);
        memory.free(third, &fake).unwrap();
        assert_eq!((fake.backed(), memory.free_bytes()), (0, 0));
    }

    #[test]
    fn a_program_keeps_no_more_than_it_once_had() {
        let fake = Fake::new(16 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        // None fits into the memory of those before it.
        for mib in 300..330 {
            let address = memory.alloc(mib << 20, (), &fake).unwrap();
            memory.free_and_keep(address, |_| u64::MAX, &fake).unwrap();
            assert!(fake.backed() <= MAX_EMPTY + (mib << 20), "{} bytes", fake.backed());
        }
    }

    #[test]
    fn arrays_that_grow_while_no_free_is_passed_need_few_slabs() {
        let fake = Fake::new(64 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let mut slabs = 0;
        for step in 0..100 {
            let made = memory.alloc_in_order(&'a', (256 + step) << 20, (), &fake).unwrap();
            slabs += usize::from(made.slab.is_some());
            memory.free_in_order(made.address, 'a', Seq::for_tests(0, step + 1)).unwrap();
        }
        assert!(slabs == 2 && fake.backed() <= 2 * (356 << 20), "{slabs} slabs, {} bytes", fake.backed());
        memory.pass(|_, _| true);
        while let Some((address, true)) = memory.to_give_back() {
            memory.give_back(address, |_| 0, &fake);
        }
        assert!(!memory.has_freed() && memory.free_bytes() == fake.backed());
        memory.trim(0, &fake);
        assert_eq!(fake.backed(), 0);
    }

    #[test]
    fn a_slab_is_no_larger_than_a_full_device_allows() {
        let fake = Fake::new(4 << 20);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let mut alloc = |size| memory.alloc_in_order(&'a', size, (), &fake).map(|made| made.slab.unwrap().1);
        assert_eq!(
            [alloc(3 << 20), alloc(100), alloc(2 << 20)],
            [Ok(3 << 20), Ok(512), Err(Status::OUT_OF_MEMORY)]
        );
    }

    #[test]
    fn an_allocation_outside_slabs_that_a_stream_has_freed_is_used_again_only_as_it_was() {
        let fake = Fake::new(1 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let address = memory.alloc(5000, (), &fake).unwrap();
        memory.free_in_order(address, 'a', Seq::for_tests(0, 1)).unwrap();
        assert!(memory.find(address).is_none());
        let others = [memory.alloc_again(&'a', 5000, ()), memory.alloc_whole_again(&'b', 5000, ())];
        assert_eq!((others, memory.alloc_whole_again(&'a', 5100, ())), ([None; 2], Some(address)));
        memory.free_in_order(address, 'a', Seq::for_tests(0, 2)).unwrap();
        memory.pass(|_, mark| mark == Seq::for_tests(0, 2));
        assert_eq!(memory.to_give_back(), Some((address, false)));
    }

    #[test]
    fn a_chunk_that_is_given_back_does_not_wait_for_an_earlier_one() {
        let fake = Fake::new(1 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let both = [300_u64 << 20, 350 << 20].map(|size| memory.alloc(size, (), &fake).unwrap());
        fake.hold(true);
        for address in both {
            memory.free(address, &fake).unwrap();
        }
        memory.leaving[0].answer = Box::new(Returning(Arc::new(AtomicBool::new(true))));
        fake.hold(false);
        assert_eq!((memory.free_bytes(), memory.leaving.len()), (300 << 20, 1));
    }

    #[test]
    fn a_far_server_is_waited_for_once() {
        let fake = Fake::far(4 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        for _ in 0..30 {
            memory.alloc(20 << 20, (), &fake).unwrap();
        }
        assert_eq!(fake.waits.get(), 1);
        // An allocation that does not fit into the requested chunks waits.
        memory.alloc(200 << 20, (), &fake).unwrap();
        assert_eq!(fake.waits.get(), 2);
        // The number of bytes outside allocations is known and bounded.
        assert_eq!(memory.free_bytes() + 800 * (1 << 20), fake.backed());
        assert!(memory.free_bytes() < 30 * (12 << 20) + 2 * MAX_AHEAD, "{}", memory.free_bytes());
    }

    #[test]
    fn large_sizes_are_requested_early_only_while_they_repeat() {
        let fake = Fake::far(64 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let mut waits = Vec::new();
        for _ in 0..20 {
            memory.alloc(256 << 20, (), &fake).unwrap();
            waits.push(fake.waits.get());
        }
        // Once an eighth of what the program has is such a chunk, it waits no more.
        assert!(waits[19] <= 9 && waits[19] == waits[10], "{waits:?}");
        assert!(memory.free_bytes() <= 20 * (256 << 20) / AHEAD_PART + MAX_AHEAD, "{}", memory.free_bytes());
        // The next size waits, and no second chunk of it is requested.
        let (free, before) = (memory.free_bytes(), fake.waits.get());
        memory.alloc(512 << 20, (), &fake).unwrap();
        assert_eq!(fake.waits.get(), before + 1);
        assert!(memory.free_bytes() <= free + MAX_AHEAD, "{free} {}", memory.free_bytes());
        // Sizes above the limit always wait.
        for i in 2..5 {
            memory.alloc(2 << 30, (), &fake).unwrap();
            assert_eq!(fake.waits.get(), before + i);
        }
    }

    /// A server whose answers take ten times as long as the program takes from one allocation to the next.
    #[derive(Debug, Default)]
    struct Clock {
        now: AtomicU64,
        waits: AtomicU64,
    }

    impl Clock {
        const ANSWER: u64 = 10;

        fn wait_until(&self, time: u64) {
            if self.now.fetch_max(time, Ordering::Relaxed) < time {
                self.waits.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    #[derive(Debug)]
    struct Later(Arc<Clock>, u64);

    impl Answer for Later {
        fn is_here(&self) -> bool {
            self.0.now.load(Ordering::Relaxed) >= self.1
        }
        fn wait(self: Box<Self>) -> Result<(), Status> {
            self.0.wait_until(self.1);
            Ok(())
        }
    }

    struct Far(Arc<Clock>);

    impl Backing for Far {
        fn grow(&self, _: u32, _: u64, _: u64) -> Result<(), Status> {
            self.0.wait_until(self.0.now.load(Ordering::Relaxed) + Clock::ANSWER);
            Ok(())
        }
        fn grow_ahead(&self, _: u32, _: u64, _: u64) -> Option<Box<dyn Answer>> {
            let answered = self.0.now.load(Ordering::Relaxed) + Clock::ANSWER;
            Some(Box::new(Later(self.0.clone(), answered)))
        }
        fn shrink(&self, _: u32, _: u64, _: u64) -> Result<(), Status> {
            Ok(())
        }
    }

    #[test]
    fn a_program_that_allocates_faster_than_answers_come_soon_waits_no_more() {
        let clock = Arc::new(Clock::default());
        let far = Far(clock.clone());
        let mut memory = Memory::new(0, 0, 2 << 20);
        let waits: Vec<u64> = (0..200)
            .map(|_| {
                memory.alloc(20 << 20, (), &far).unwrap();
                clock.now.fetch_add(1, Ordering::Relaxed);
                clock.waits.load(Ordering::Relaxed)
            })
            .collect();
        assert!(waits[199] <= 12 && waits[199] == waits[100], "{waits:?}");
        // At most a few chunks are unused.
        assert!(memory.free_bytes() <= (MOST_AHEAD as u64 + 1) * MAX_AHEAD + 40 * (12 << 20));
    }

    #[test]
    fn chunks_requested_early_are_given_back_when_memory_is_needed() {
        let fake = Fake::far(128 << 20);
        let mut memory = Memory::new(0, 0, 2 << 20);
        let first = memory.alloc(32 << 20, (), &fake).unwrap();
        assert_eq!(fake.backed(), 64 << 20);
        memory.alloc(96 << 20, (), &fake).unwrap();
        assert_eq!(fake.backed(), 128 << 20);
        assert_eq!(memory.alloc(2 << 20, (), &fake), Err(Status::OUT_OF_MEMORY));
        memory.free(first, &fake).unwrap();
        assert!(memory.alloc(32 << 20, (), &fake).is_ok());
    }

    #[test]
    fn huge_sizes_are_out_of_memory() {
        let fake = Fake::new(1 << 30);
        let mut memory = Memory::new(0, 0, 2 << 20);
        for size in [u64::MAX, 1 << 60, WINDOW_SIZE, u64::MAX - 511] {
            assert_eq!(memory.alloc(size, (), &fake), Err(Status::OUT_OF_MEMORY));
        }
    }

    proptest! {
        #[test]
        fn allocations_are_backed_and_do_not_overlap(far in any::<bool>(), steps in proptest::collection::vec((1u64..(9 << 20), any::<u16>()), 1..120)) {
            let fake = Fake { far, ..Fake::new(160 << 20) };
            let mut memory = Memory::new(2, 2, 2 << 20);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (size, choice) in steps {
                if choice % 5 < 2 && !held.is_empty() {
                    let (address, size) = held.swap_remove(choice as usize % held.len());
                    prop_assert_eq!(memory.free(address, &fake).map(|a| a.size), Some(size));
                    prop_assert!(memory.free(address, &fake).is_none());
                    prop_assert!(memory.find(address).is_none_or(|(base, _)| base != address));
                    continue;
                }
                let Ok(address) = memory.alloc(size, (), &fake) else { continue };
                prop_assert_eq!(address % ALIGN, 0);
                prop_assert!(held.iter().all(|&(a, s)| address + size <= a || a + s <= address));
                prop_assert!(fake.backed.borrow().iter().any(|(a, s)| *a <= address && address + size <= a + s));
                prop_assert_eq!(memory.find(address + size - 1).map(|(base, _)| base), Some(address));
                held.push((address, size));
            }
            let backed: u64 = fake.backed.borrow().values().sum();
            let reserved: u64 = held.iter().map(|(_, s)| s.next_multiple_of(ALIGN)).sum();
            prop_assert_eq!(memory.free_bytes(), backed - reserved);
            for (address, _) in held {
                memory.free(address, &fake).unwrap();
            }
            memory.trim(0, &fake);
            prop_assert!(fake.backed.borrow().is_empty());
        }
    }
}
