//! Tests of device memory, against a device that checks requests.

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
        let answer: Box<dyn Answer> = Box::new(Answered(self.far.then(|| self.grow(device, address, size))?));
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
    fn shrink_ahead(&self, device: u32, address: u64, size: u64) -> Result<Option<Box<dyn Answer>>, Status> {
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
