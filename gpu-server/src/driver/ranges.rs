//! Disjoint ranges of addresses.

use std::collections::BTreeMap;

/// Non-overlapping ranges by first address. Each has a value `V`.
#[derive(Debug)]
pub struct Ranges<V = ()>(BTreeMap<u64, (u64, V)>);

impl<V> Default for Ranges<V> {
    fn default() -> Self {
        Ranges(BTreeMap::new())
    }
}

impl<V> Ranges<V> {
    /// The range that contains `address`: its first address, its size and its value.
    pub fn find(&self, address: u64) -> Option<(u64, u64, &V)> {
        let (start, (size, value)) = self.0.range(..=address).next_back()?;
        (address - start < *size).then_some((*start, *size, value))
    }

    /// The same, with a mutable value.
    pub fn find_mut(&mut self, address: u64) -> Option<(u64, u64, &mut V)> {
        let (start, (size, value)) = self.0.range_mut(..=address).next_back()?;
        (address - start < *size).then_some((*start, *size, value))
    }

    /// Whether one range contains `len` bytes from `address`.
    pub fn holds(&self, address: u64, len: u64) -> bool {
        self.find(address).is_some_and(|(start, size, _)| len <= size - (address - start))
    }

    /// Whether adjacent ranges together contain `len` bytes from `address`.
    pub fn cover(&self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        let mut at = address;
        while at < end {
            match self.find(at) {
                Some((start, size, _)) => at = start + size,
                None => return false,
            }
        }
        true
    }

    /// Adds a range. Returns false if it is empty, wraps around or overlaps another.
    pub fn insert(&mut self, address: u64, size: u64, value: V) -> bool {
        let fits = size > 0 && address.checked_add(size).is_some() && !self.touches(address, size);
        if fits {
            self.0.insert(address, (size, value));
        }
        fits
    }

    /// Removes the range that begins at `address`.
    pub fn remove(&mut self, address: u64) -> Option<(u64, V)> {
        self.0.remove(&address)
    }

    /// The size of the range that begins at `address`.
    pub fn at(&self, address: u64) -> Option<u64> {
        self.0.get(&address).map(|(size, _)| *size)
    }

    /// Whether any range overlaps `size` bytes from `address`.
    pub fn touches(&self, address: u64, size: u64) -> bool {
        let end = address.saturating_add(size);
        self.0.range(..end).next_back().is_some_and(|(start, (other, _))| start + other > address)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All ranges: first address, size and value.
    pub fn all(&self) -> impl Iterator<Item = (u64, u64, &V)> {
        self.0.iter().map(|(start, (size, value))| (*start, *size, value))
    }

    /// All ranges: first address and size.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|(start, (size, _))| (*start, *size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_are_found() {
        let mut ranges = Ranges::default();
        assert!(ranges.insert(100, 50, 'a') && ranges.insert(150, 50, 'b'));
        for (address, size) in [(100, 1), (99, 2), (199, 5), (0, 1000), (120, 0), (u64::MAX, 2)] {
            assert!(!ranges.insert(address, size, 'c'), "{address} {size}");
        }
        assert!(
            ranges.holds(100, 50) && ranges.holds(149, 1) && !ranges.holds(149, 2) && !ranges.holds(200, 0)
        );
        assert!(ranges.cover(100, 100) && !ranges.cover(100, 101) && !ranges.cover(u64::MAX, 2));
        assert!(ranges.touches(199, 10) && !ranges.touches(200, 10));
        assert_eq!(ranges.find(199), Some((150, 50, &'b')));
        assert_eq!(
            (ranges.remove(100), ranges.remove(100), ranges.at(150)),
            (Some((50, 'a')), None, Some(50))
        );
    }
}
