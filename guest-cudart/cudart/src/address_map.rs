//! A map from addresses to entries with lock-free lookups, for what a launch looks up.
//!
//! Open addressing over a power-of-two array of (key, value) pairs, at most half full. Writers hold a lock
//! and publish a larger array when one fills up. Old arrays are kept, because a reader may still be in one;
//! together they are smaller than the current array. Entries live forever. A removed key keeps its slot, with
//! a NULL value.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Slot<T> {
    key: AtomicUsize,
    value: AtomicPtr<T>,
}

struct Slots<T> {
    slots: Box<[Slot<T>]>,
}

impl<T> Slots<T> {
    fn with_capacity(capacity: usize) -> Self {
        let slot = || Slot { key: AtomicUsize::new(0), value: AtomicPtr::new(ptr::null_mut()) };
        Slots { slots: (0..capacity).map(|_| slot()).collect() }
    }

    /// The slot of `key`, or the free slot where it would go. There is always a free one.
    #[inline]
    fn find(&self, key: usize) -> &Slot<T> {
        let mask = self.slots.len() - 1;
        // Fibonacci hashing: host functions are 16-byte aligned, so their low bits do not vary.
        let mut at = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) & mask;
        loop {
            let slot = &self.slots[at];
            let found = slot.key.load(Ordering::Acquire);
            if found == key || found == 0 {
                return slot;
            }
            at = (at + 1) & mask;
        }
    }
}

/// See the module's documentation.
pub(crate) struct AddressMap<T: 'static> {
    slots: AtomicPtr<Slots<T>>,
    writer: Mutex<Writer<T>>,
}

struct Writer<T: 'static> {
    /// The number of keys in the array, including removed ones.
    used: usize,
    /// Values that claimed a key that had one, in order.
    waiting: Vec<(usize, &'static T)>,
}

impl<T: Sync> AddressMap<T> {
    pub(crate) const fn new() -> Self {
        let writer = Writer { used: 0, waiting: Vec::new() };
        AddressMap { slots: AtomicPtr::new(ptr::null_mut()), writer: Mutex::new(writer) }
    }

    /// The entry of `key`, which must not be zero.
    #[inline]
    pub(crate) fn get(&self, key: usize) -> Option<&'static T> {
        // SAFETY: `insert` publishes an array only once it is complete, and never frees it.
        let slots = unsafe { self.slots.load(Ordering::Acquire).as_ref()? };
        let slot = slots.find(key);
        if slot.key.load(Ordering::Acquire) != key {
            return None;
        }
        // SAFETY: `insert` stores values that are `&'static T`.
        unsafe { slot.value.load(Ordering::Acquire).as_ref() }
    }

    fn writer(&self) -> MutexGuard<'_, Writer<T>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the entry of `key`. A key of zero is ignored.
    pub(crate) fn insert(&self, key: usize, value: &'static T) {
        self.set(&mut self.writer(), key, value);
    }

    /// The same, unless the key has an entry: then `value` takes its place when that is removed.
    pub(crate) fn claim(&self, key: usize, value: &'static T) {
        let mut writer = self.writer();
        if self.get(key).is_some() {
            writer.waiting.push((key, value));
        } else {
            self.set(&mut writer, key, value);
        }
    }

    fn set(&self, writer: &mut Writer<T>, key: usize, value: &'static T) {
        if key == 0 {
            return;
        }
        let used = &mut writer.used;
        let mut current = self.slots.load(Ordering::Acquire);
        // SAFETY: `insert` publishes an array only once it is complete, and never frees it.
        let capacity = unsafe { current.as_ref() }.map_or(0, |slots| slots.slots.len());
        if (*used + 1) * 2 > capacity {
            let larger = Slots::with_capacity((capacity * 2).max(64));
            *used = 0;
            // SAFETY: `insert` publishes an array only once it is complete, and never frees it.
            if let Some(slots) = unsafe { current.as_ref() } {
                for slot in &slots.slots {
                    let value = slot.value.load(Ordering::Acquire);
                    if !value.is_null() {
                        let key = slot.key.load(Ordering::Acquire);
                        let to = larger.find(key);
                        to.value.store(value, Ordering::Relaxed);
                        to.key.store(key, Ordering::Relaxed);
                        *used += 1;
                    }
                }
            }
            current = Box::into_raw(Box::new(larger));
            self.slots.store(current, Ordering::Release);
        }
        // SAFETY: not NULL, because the code above made an array if there was none; arrays are never freed.
        let slot = unsafe { &*current }.find(key);
        if slot.key.load(Ordering::Acquire) == 0 {
            *used += 1;
        }
        slot.value.store(ptr::from_ref(value).cast_mut(), Ordering::Release);
        slot.key.store(key, Ordering::Release);
    }

    /// Removes the entry of `key` if it is still `value`: a new owner may have taken the key since. The next
    /// that has claimed the key gets it.
    pub(crate) fn remove(&self, key: usize, value: &'static T) {
        let mut writer = self.writer();
        // SAFETY: `insert` publishes an array only once it is complete, and never frees it.
        if let Some(slots) = unsafe { self.slots.load(Ordering::Acquire).as_ref() } {
            let slot = slots.find(key);
            let is_same = ptr::eq(slot.value.load(Ordering::Acquire), value);
            if slot.key.load(Ordering::Acquire) == key && is_same {
                let next = writer.waiting.iter().position(|(waiting, _)| *waiting == key);
                let next = next.map(|at| ptr::from_ref(writer.waiting.remove(at).1).cast_mut());
                slot.value.store(next.unwrap_or(ptr::null_mut()), Ordering::Release);
                return;
            }
        }
        writer.waiting.retain(|(waiting, other)| *waiting != key || !ptr::eq(*other, value));
    }

    /// Every entry. This reads the whole array.
    pub(crate) fn values(&self) -> impl Iterator<Item = &'static T> {
        // SAFETY: `insert` publishes an array only once it is complete, and never frees it.
        let slots = unsafe { self.slots.load(Ordering::Acquire).as_ref() };
        slots.into_iter().flat_map(|slots: &'static Slots<T>| slots.slots.iter()).filter_map(|slot| {
            // SAFETY: `insert` stores values that are `&'static T`.
            unsafe { slot.value.load(Ordering::Acquire).as_ref() }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: u64) -> &'static u64 {
        Box::leak(Box::new(value))
    }

    #[test]
    fn entries_survive_growing() {
        let map = AddressMap::new();
        for key in 1..=1000_usize {
            map.insert(key * 16, entry(key as u64));
        }
        assert!((1..=1000_usize).all(|key| map.get(key * 16) == Some(&(key as u64))));
        assert_eq!(map.get(8), None);
        assert_eq!(map.values().count(), 1000);
    }

    #[test]
    fn a_removed_key_can_be_inserted_again() {
        let map = AddressMap::new();
        let first = entry(1);
        map.insert(32, first);
        map.remove(32, first);
        assert_eq!(map.get(32), None);
        map.insert(32, entry(2));
        assert_eq!(map.get(32), Some(&2));
    }

    #[test]
    fn a_first_owner_does_not_remove_a_key_that_was_taken_over() {
        let map = AddressMap::new();
        let first = entry(1);
        map.insert(32, first);
        map.insert(32, entry(2));
        map.remove(32, first);
        assert_eq!(map.get(32), Some(&2));
    }

    #[test]
    fn a_key_goes_to_the_first_that_claims_it_and_then_to_the_next() {
        let map = AddressMap::new();
        let [first, second, third] = [1, 2, 3].map(entry);
        for value in [first, second, third] {
            map.claim(32, value);
        }
        assert_eq!(map.get(32), Some(&1));
        map.remove(32, second);
        map.remove(32, first);
        assert_eq!(map.get(32), Some(&3));
        map.remove(32, third);
        assert_eq!(map.get(32), None);
        map.claim(32, second);
        assert_eq!(map.get(32), Some(&2));
    }

    #[test]
    fn readers_see_whole_entries_while_a_writer_grows_the_map() {
        let map: &'static AddressMap<u64> = Box::leak(Box::new(AddressMap::new()));
        std::thread::scope(|scope| {
            scope.spawn(|| (1..=5000_usize).for_each(|key| map.insert(key * 16, entry(key as u64))));
            for _ in 0..2 {
                scope.spawn(|| {
                    for key in (1..=5000_usize).cycle().take(50_000) {
                        assert!(map.get(key * 16).is_none_or(|value| *value == key as u64));
                    }
                });
            }
        });
        assert_eq!(map.get(80_000), Some(&5000));
    }
}
