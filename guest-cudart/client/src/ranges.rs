//! Free ranges of an address space: best fit, neighbours joined. Used for device memory, for windows and for the arena.

use std::collections::{BTreeMap, BTreeSet};

/// A set of free ranges, none touching another.
#[derive(Debug, Default)]
pub struct FreeRanges {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    total: u64,
}

impl FreeRanges {
    /// No range at all.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes in all ranges together.
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

    /// Adds a range, which overlaps none that is free, and joins it with its neighbours.
    pub fn insert(&mut self, mut start: u64, mut len: u64) {
        if len == 0 {
            return;
        }
        if let Some((&before, &before_len)) = self.by_start.range(..start).next_back()
            && before + before_len == start
        {
            self.take(before, before_len);
            start = before;
            len += before_len;
        }
        if let Some(&after_len) = self.by_start.get(&(start + len)) {
            self.take(start + len, after_len);
            len += after_len;
        }
        self.put(start, len);
    }

    /// Takes `len` bytes from the shortest range that has them, at its start.
    pub fn take_best(&mut self, len: u64) -> Option<u64> {
        let &(found, start) = self.by_len.range((len, 0)..).next()?;
        self.take(start, found);
        if found > len {
            self.put(start + len, found - len);
        }
        Some(start)
    }

    /// Takes a range away that is free as a whole. False: it is not.
    pub fn remove(&mut self, start: u64, len: u64) -> bool {
        let Some((&found, &found_len)) = self.by_start.range(..=start).next_back() else { return false };
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

    /// Every range, in order: start and length.
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
        fn what_is_taken_overlaps_nothing_and_comes_back(lens in proptest::collection::vec((1u64..40, any::<u8>()), 1..100)) {
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
                prop_assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "neighbours are joined: {:?}", ranges);
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
}
