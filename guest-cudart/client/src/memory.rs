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
mod tests;
