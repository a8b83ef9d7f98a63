//! Allocators for the GPU's own address ranges: modules' variables, and kernels' `malloc`.

use std::collections::{BTreeMap, BTreeSet};

/// Free ranges, merged with their neighbors. The smallest that is large enough is used first.
#[derive(Default)]
struct FreeList {
    by_address: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl FreeList {
    fn take(&mut self, size: u64) -> Option<u64> {
        let &(found, addr) = self.by_size.range((size, 0)..).next()?;
        self.remove(addr, found);
        if found > size {
            self.insert(addr + size, found - size);
        }
        Some(addr)
    }

    fn give(&mut self, addr: u64, size: u64) {
        let (mut start, mut end) = (addr, addr + size);
        if let Some((&a, &s)) = self.by_address.range(..addr).next_back()
            && a + s == addr
        {
            self.remove(a, s);
            start = a;
        }
        if let Some(&s) = self.by_address.get(&end) {
            self.remove(end, s);
            end += s;
        }
        self.insert(start, end - start);
    }

    fn insert(&mut self, addr: u64, size: u64) {
        self.by_address.insert(addr, size);
        self.by_size.insert((size, addr));
    }

    fn remove(&mut self, addr: u64, size: u64) {
        self.by_address.remove(&addr);
        self.by_size.remove(&(size, addr));
    }
}

/// A range of addresses, of which the first part is mapped.
pub(super) struct AddressPool {
    base: u64,
    /// The first address that is not mapped yet.
    next: u64,
    end: u64,
    /// Allocation sizes are multiples of this.
    unit: u64,
    /// Inaccessible bytes after each allocation, which catch accesses beyond its end.
    gap: u64,
    free: FreeList,
    /// Bytes in use.
    pub used: u64,
}

impl AddressPool {
    pub fn new(base: u64, end: u64, unit: u64, gap: u64) -> AddressPool {
        AddressPool { base, next: base, end, unit, gap, free: FreeList::default(), used: 0 }
    }

    /// Whether an address is in this range.
    pub fn holds(&self, addr: u64) -> bool {
        (self.base..self.end).contains(&addr)
    }

    /// The bytes that an allocation of `size` takes, unless that overflows.
    pub fn piece(&self, size: u64) -> Option<u64> {
        size.max(1).checked_add(self.gap)?.checked_next_multiple_of(self.unit)
    }

    /// Takes memory that is already mapped.
    pub fn take(&mut self, piece: u64) -> Option<u64> {
        let addr = self.free.take(piece)?;
        self.used += piece;
        Some(addr)
    }

    /// The address where `size` more bytes must be mapped.
    pub fn extend(&self, size: u64) -> Option<u64> {
        self.next.checked_add(size).filter(|&end| end <= self.end).map(|_| self.next)
    }

    /// Adds the memory that [`AddressPool::extend`] asked for.
    pub fn extended(&mut self, size: u64) {
        self.free.give(self.next, size);
        self.next += size;
    }

    /// Gives memory back.
    pub fn give(&mut self, addr: u64, piece: u64) {
        self.free.give(addr, piece);
        self.used -= piece;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_freed_in_any_order_are_merged() {
        let mut list = FreeList::default();
        list.give(0x1000, 0x1000);
        let pieces: Vec<u64> = (0..16).map(|_| list.take(0x100).unwrap()).collect();
        assert_eq!(list.take(1), None);
        for &i in &[3, 0, 15, 7, 1, 2, 14, 8, 9, 4, 6, 5, 10, 13, 11, 12] {
            list.give(pieces[i], 0x100);
        }
        assert_eq!(list.by_address, BTreeMap::from([(0x1000, 0x1000)]));
        assert_eq!(list.by_size, BTreeSet::from([(0x1000, 0x1000)]));
    }
}
