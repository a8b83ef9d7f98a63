//! Disjoint ranges of addresses.

use std::collections::BTreeMap;

/// Ranges by first address, none touching another's bytes.
#[derive(Debug, Default)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// The range that holds `address`: its first address and size.
    pub fn find(&self, address: u64) -> Option<(u64, u64)> {
        let (start, size) = self.0.range(..=address).next_back()?;
        (address - start < *size).then_some((*start, *size))
    }

    /// Whether one range holds `len` bytes from `address`.
    pub fn holds(&self, address: u64, len: u64) -> bool {
        self.find(address).is_some_and(|(start, size)| len <= size - (address - start))
    }

    /// Whether ranges, one next to the other, hold `len` bytes from `address` together.
    pub fn cover(&self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        let mut at = address;
        while at < end {
            match self.find(at) {
                Some((start, size)) => at = start + size,
                None => return false,
            }
        }
        true
    }

    /// Adds a range. False: it is empty, wraps, or touches another.
    pub fn insert(&mut self, address: u64, size: u64) -> bool {
        let Some(end) = address.checked_add(size).filter(|_| size > 0) else { return false };
        let overlaps = self.0.range(..end).next_back().is_some_and(|(start, other)| start + other > address);
        if !overlaps {
            self.0.insert(address, size);
        }
        !overlaps
    }

    /// Removes the range that begins at `address`; returns its size.
    pub fn remove(&mut self, address: u64) -> Option<u64> {
        self.0.remove(&address)
    }

    /// The size of the range that begins at `address`.
    pub fn at(&self, address: u64) -> Option<u64> {
        self.0.get(&address).copied()
    }

    /// Whether a range has bytes in `size` bytes from `address`.
    pub fn touches(&self, address: u64, size: u64) -> bool {
        let end = address.saturating_add(size);
        self.0.range(..end).next_back().is_some_and(|(start, other)| start + other > address)
    }

    /// All ranges.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|(a, s)| (*a, *s))
    }

    /// Bytes in all.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_are_found() {
        let mut ranges = Ranges::default();
        assert!(ranges.insert(100, 50) && ranges.insert(150, 50));
        for (address, size) in [(100, 1), (99, 2), (199, 5), (0, 1000), (120, 0), (u64::MAX, 2)] {
            assert!(!ranges.insert(address, size), "{address} {size}");
        }
        assert!(
            ranges.holds(100, 50) && ranges.holds(149, 1) && !ranges.holds(149, 2) && !ranges.holds(200, 0)
        );
        assert!(ranges.cover(100, 100) && !ranges.cover(100, 101) && !ranges.cover(u64::MAX, 2));
        assert!(ranges.touches(199, 10) && !ranges.touches(200, 10));
        assert_eq!((ranges.remove(100), ranges.remove(100), ranges.total()), (Some(50), None, 50));
    }
}
