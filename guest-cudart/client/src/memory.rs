//! Device memory: places allocations in a device's address window.
//!
//! ```text
//!  window  ├──────── chunk ────────┤ gap ├── chunk ──┤ gap ├ … 1 TiB
//!          │alloc│alloc│ free │alloc│     │   alloc   │
//! ```
//!
//! A chunk is the range that one `MemGrow` backed, and is given back as a whole. An allocation lies within
//! one chunk, is placed by best fit, and needs no round trip. One granule between chunks stays unbacked, so
//! that free ranges of two chunks never merge and a kernel that runs past the end of a chunk faults.

use std::collections::BTreeMap;

use crate::ranges::FreeRanges;
use protocol::Status;
use protocol::ops::memory::{DEVICE_PART, WINDOW_SIZE, window};

/// Alignment of allocations in bytes, that of `cuMemAlloc`.
pub const ALIGN: u64 = 512;
/// The smallest chunk in bytes, if the device has that much: a program with a few small allocations makes one
/// request.
const MIN_CHUNK: u64 = 32 << 20;
/// How many bytes of chunks without allocations are kept for later ones.
const MAX_EMPTY: u64 = 256 << 20;

/// Backs addresses with memory on the server.
pub trait Backing {
    /// `MemGrow`.
    fn grow(&self, device: u32, address: u64, size: u64) -> Result<(), Status>;
    /// `MemShrink`.
    fn shrink(&self, device: u32, address: u64, size: u64) -> Result<(), Status>;
}

/// An allocation, as its owner described it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation<T> {
    /// Size in bytes, as requested.
    pub size: u64,
    /// Size in bytes, as reserved.
    reserved: u64,
    /// The owner's data.
    pub tag: T,
}

/// One device's memory.
#[derive(Debug)]
pub struct DeviceMemory<T> {
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
    empty: u64,
    allocations: BTreeMap<u64, Allocation<T>>,
}

#[derive(Debug)]
struct Piece {
    size: u64,
    used: u64,
}

impl<T> DeviceMemory<T> {
    /// Memory on device `ordinal` only, with nothing backed yet. `granule` is in bytes and a power of two.
    pub fn new(device: u32, granule: u64) -> Self {
        Self::within(device, granule, (window(device), DEVICE_PART), ALIGN)
    }

    /// Memory on device `ordinal` at addresses that the host also maps. Allocations are aligned to `page`
    /// bytes.
    pub fn both(device: u32, granule: u64, page: u64) -> Self {
        Self::within(device, granule, (window(device) + DEVICE_PART, WINDOW_SIZE - DEVICE_PART), page)
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
            allocations: BTreeMap::new(),
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

    /// Backed bytes outside all allocations.
    pub fn free_bytes(&self) -> u64 {
        self.free.total()
    }

    /// Allocates `size` bytes (not 0), backing more of the window if needed.
    pub fn alloc(&mut self, size: u64, tag: T, backing: &dyn Backing) -> Result<u64, Status> {
        let reserved = size
            .checked_next_multiple_of(self.align)
            .filter(|r| *r < self.window.1)
            .ok_or(Status::OUT_OF_MEMORY)?;
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
        self.allocations.insert(address, Allocation { size, reserved, tag });
        Ok(address)
    }

    fn grow(&mut self, reserved: u64, backing: &dyn Backing) -> Result<(), Status> {
        let exact = reserved.next_multiple_of(self.granule);
        let wanted = exact.max(MIN_CHUNK.next_multiple_of(self.granule));
        match self.grow_by(wanted, backing) {
            Err(Status::OUT_OF_MEMORY) => {}
            other => return other,
        }
        if self.trim(0, backing)? == 0 && wanted == exact {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.grow_by(exact, backing)
    }

    fn grow_by(&mut self, size: u64, backing: &dyn Backing) -> Result<(), Status> {
        let with_gap = size + self.granule;
        let address = self.addresses.take_best(with_gap).ok_or(Status::OUT_OF_MEMORY)?;
        if let Err(status) = backing.grow(self.device, address, size) {
            self.addresses.insert(address, with_gap);
            return Err(status);
        }
        self.chunks.insert(address, Piece { size, used: 0 });
        self.free.insert(address, size);
        self.empty += size;
        Ok(())
    }

    /// Gives chunks without allocations back until at most `keep` bytes of them are left. Returns how many
    /// bytes were given back. No pending work may use them.
    pub fn trim(&mut self, keep: u64, backing: &dyn Backing) -> Result<u64, Status> {
        let mut gone = 0;
        while self.empty > keep {
            // Largest first, which needs the fewest calls.
            let Some((address, size)) = self
                .chunks
                .iter()
                .filter(|(_, p)| p.used == 0)
                .map(|(a, p)| (*a, p.size))
                .max_by_key(|(_, size)| *size)
            else {
                break;
            };
            backing.shrink(self.device, address, size)?;
            self.chunks.remove(&address);
            self.free.remove(address, size);
            self.addresses.insert(address, size + self.granule);
            self.empty -= size;
            gone += size;
        }
        Ok(gone)
    }

    /// Drops everything, because it is gone on the server too.
    pub fn reset(&mut self) {
        *self = DeviceMemory::within(self.device, self.granule, self.window, self.align);
    }

    /// Frees an allocation; `None` if there is none at this address. No pending work may use it.
    pub fn free(&mut self, address: u64, backing: &dyn Backing) -> Option<Allocation<T>> {
        let allocation = self.allocations.remove(&address)?;
        self.free.insert(address, allocation.reserved);
        if let Some((_, chunk)) = self.chunks.range_mut(..=address).next_back() {
            chunk.used -= allocation.reserved;
            if chunk.used == 0 {
                self.empty += chunk.size;
            }
        }
        if self.empty > MAX_EMPTY {
            // A chunk that cannot be given back stays available; the call still succeeds.
            let _ = self.trim(MAX_EMPTY, backing);
        }
        Some(allocation)
    }

    /// The allocation that contains an address, and its start.
    pub fn find(&self, address: u64) -> Option<(u64, &Allocation<T>)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        (address - base < allocation.size).then_some((*base, allocation))
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
    use std::cell::RefCell;

    /// A device with `limit` bytes of memory that checks requests.
    struct Fake {
        limit: u64,
        backed: RefCell<BTreeMap<u64, u64>>,
    }

    impl Fake {
        fn new(limit: u64) -> Fake {
            Fake { limit, backed: RefCell::default() }
        }
    }

    impl Backing for Fake {
        fn grow(&self, device: u32, address: u64, size: u64) -> Result<(), Status> {
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
        fn shrink(&self, _: u32, address: u64, size: u64) -> Result<(), Status> {
            assert_eq!(self.backed.borrow_mut().remove(&address), Some(size), "a chunk goes back whole");
            Ok(())
        }
    }

    #[test]
    fn small_allocations_grow_the_window_once() {
        let fake = Fake::new(1 << 30);
        let mut memory = DeviceMemory::new(1, 2 << 20);
        for _ in 0..100 {
            memory.alloc(1000, (), &fake).unwrap();
        }
        assert_eq!(fake.backed.borrow().len(), 1);
    }

    #[test]
    fn memory_shared_with_the_host_is_separate_and_page_aligned() {
        let fake = Fake::new(1 << 30);
        let mut both = DeviceMemory::both(1, 2 << 20, 4096);
        for _ in 0..10 {
            let address = both.alloc(5000, (), &fake).unwrap();
            assert!(address.is_multiple_of(4096) && both.holds(address));
            assert!(!DeviceMemory::<()>::new(1, 2 << 20).holds(address));
        }
        assert_eq!(both.chunks().len(), 1);
    }

    #[test]
    fn a_full_device_retries_with_the_exact_size() {
        let fake = Fake::new(4 << 20);
        let mut memory = DeviceMemory::new(0, 2 << 20);
        memory.alloc(3 << 20, (), &fake).unwrap();
        assert_eq!(memory.alloc(3 << 20, (), &fake), Err(Status::OUT_OF_MEMORY));
    }

    #[test]
    fn an_empty_chunk_is_given_back_when_its_memory_is_needed() {
        let fake = Fake::new(64 << 20);
        let mut memory = DeviceMemory::new(0, 2 << 20);
        let first = memory.alloc(40 << 20, (), &fake).unwrap();
        memory.free(first, &fake).unwrap();
        assert!(memory.alloc(60 << 20, (), &fake).is_ok());
    }

    #[test]
    fn huge_sizes_are_out_of_memory() {
        let fake = Fake::new(1 << 30);
        let mut memory = DeviceMemory::new(0, 2 << 20);
        for size in [u64::MAX, 1 << 60, WINDOW_SIZE, u64::MAX - 511] {
            assert_eq!(memory.alloc(size, (), &fake), Err(Status::OUT_OF_MEMORY));
        }
    }

    proptest! {
        #[test]
        fn allocations_are_backed_and_do_not_overlap(steps in proptest::collection::vec((1u64..(9 << 20), any::<u16>()), 1..120)) {
            let fake = Fake::new(160 << 20);
            let mut memory = DeviceMemory::new(2, 2 << 20);
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
            memory.trim(0, &fake).unwrap();
            prop_assert!(fake.backed.borrow().is_empty());
        }
    }
}
