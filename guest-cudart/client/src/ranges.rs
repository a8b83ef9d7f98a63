//! Free ranges of an address space, allocated by best fit and merged with their neighbors. Used for device
//! memory, windows and the arena.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A set of free ranges. No two are adjacent, except at [bounds](FreeRanges::insert_within).
#[derive(Debug, Default)]
pub struct FreeRanges {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    total: u64,
}

impl FreeRanges {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// The total size of all ranges in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    fn put(&mut self, start: u64, len: u64) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
        self.total += len;
    }

    fn take(&mut self, start: u64, len: u64) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
        self.total -= len;
    }

    /// Adds a range, which must not overlap a free one, and merges it with its neighbors.
    pub fn insert(&mut self, start: u64, len: u64) {
        self.insert_within(start, len, 0..u64::MAX);
    }

    /// The same, but merges it only with neighbors in `bounds`, which contain it. No range crosses them.
    pub fn insert_within(&mut self, mut start: u64, mut len: u64, bounds: Range<u64>) {
        if len == 0 {
            return;
        }
        if let Some((before, before_len)) = self.ending_at(start)
            && before >= bounds.start
        {
            self.take(before, before_len);
            start = before;
            len += before_len;
        }
        if start + len < bounds.end
            && let Some(&after_len) = self.by_start.get(&(start + len))
        {
            self.take(start + len, after_len);
            len += after_len;
        }
        self.put(start, len);
    }

    /// The shortest range that is long enough for `len` bytes: start and length.
    pub fn best(&self, len: u64) -> Option<(u64, u64)> {
        self.by_len.range((len, 0)..).next().map(|(len, start)| (*start, *len))
    }

    /// The range that contains an address: start and length.
    pub fn containing(&self, address: u64) -> Option<(u64, u64)> {
        let (start, len) = self.by_start.range(..=address).next_back()?;
        (address - start < *len).then_some((*start, *len))
    }

    /// The range that ends at an address: start and length.
    pub fn ending_at(&self, address: u64) -> Option<(u64, u64)> {
        let (start, len) = self.by_start.range(..address).next_back()?;
        (start + len == address).then_some((*start, *len))
    }

    /// Takes `len` bytes from the start of the shortest range that is long enough.
    pub fn take_best(&mut self, len: u64) -> Option<u64> {
        let (start, found) = self.best(len)?;
        self.take(start, found);
        if found > len {
            self.put(start + len, found - len);
        }
        Some(start)
    }

    /// Removes a range that is entirely free. Returns false if it is not.
    pub fn remove(&mut self, start: u64, len: u64) -> bool {
        let Some((found, found_len)) = self.containing(start) else { return false };
        let (end, found_end) = (start + len, found + found_len);
        if end > found_end {
            return false;
        }
        self.take(found, found_len);
        if found < start {
            self.put(found, start - found);
        }
        if end < found_end {
            self.put(end, found_end - end);
        }
        true
    }

    /// Every range in order: start and length.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_start.iter().map(|(start, len)| (*start, *len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn taken_ranges_do_not_overlap_and_can_be_returned(lens in proptest::collection::vec((1u64..40, any::<u8>()), 1..100)) {
            const SIZE: u64 = 1000;
            let mut free = FreeRanges::new();
            free.insert(0, SIZE);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (len, choice) in lens {
                if choice % 3 == 0 && !held.is_empty() {
                    let (start, len) = held.swap_remove(choice as usize % held.len());
                    free.insert(start, len);
                } else if let Some(start) = free.take_best(len) {
                    prop_assert!(start + len <= SIZE);
                    prop_assert!(held.iter().all(|&(s, l)| start + len <= s || s + l <= start));
                    held.push((start, len));
                } else {
                    prop_assert!(free.iter().all(|(_, l)| l < len));
                }
                prop_assert_eq!(free.total() + held.iter().map(|h| h.1).sum::<u64>(), SIZE);
                let ranges: Vec<_> = free.iter().collect();
                prop_assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "adjacent ranges are merged: {:?}", ranges);
            }
            for (start, len) in held {
                free.insert(start, len);
            }
            prop_assert_eq!(free.iter().collect::<Vec<_>>(), vec![(0, SIZE)]);
        }
    }

    #[test]
    fn a_part_of_a_range_can_be_removed() {
        let mut free = FreeRanges::new();
        free.insert(10, 20);
        assert!(free.remove(15, 5));
        assert_eq!(free.iter().collect::<Vec<_>>(), [(10, 5), (20, 10)]);
        assert!(!free.remove(12, 10));
        assert_eq!(free.total(), 15);
    }

    #[test]
    fn ranges_are_not_merged_across_bounds() {
        let mut free = FreeRanges::new();
        for start in [0, 20, 10, 30] {
            free.insert_within(start, 10, start / 20 * 20..start / 20 * 20 + 20);
        }
        assert_eq!(free.iter().collect::<Vec<_>>(), [(0, 20), (20, 20)]);
        assert_eq!(
            (free.containing(19), free.ending_at(20), free.ending_at(39)),
            (Some((0, 20)), Some((0, 20)), None)
        );
        assert_eq!((free.best(20), free.best(21), free.containing(40)), (Some((0, 20)), None, None));
    }
}
