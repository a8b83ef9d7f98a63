//! Addresses of the GPU's own that are handed out in pieces: for modules' variables, and for what kernels allocate.

use std::collections::{BTreeMap, BTreeSet};

/// Free pieces, joined with their neighbours; the smallest that is large enough goes first.
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

/// A range of addresses, of which a part is mapped and handed out.
pub(super) struct Region {
    /// Where nothing is mapped yet.
    next: u64,
    end: u64,
    /// What sizes of pieces are multiples of.
    unit: u64,
    /// Bytes after each allocation that belong to nobody, so that an access beyond it is seen.
    gap: u64,
    free: FreeList,
    /// Bytes of pieces that are handed out.
    pub used: u64,
}

impl Region {
    pub fn new(base: u64, end: u64, unit: u64, gap: u64) -> Region {
        Region { next: base, end, unit, gap, free: FreeList::default(), used: 0 }
    }

    /// Whether an address is one of it.
    pub fn holds(&self, addr: u64) -> bool {
        (self.end - super::memory::WINDOW..self.end).contains(&addr)
    }

    /// Bytes that an allocation takes, if so many are thinkable.
    pub fn piece(&self, size: u64) -> Option<u64> {
        size.max(1).checked_add(self.gap)?.checked_next_multiple_of(self.unit)
    }

    /// Takes a piece of memory that is mapped.
    pub fn take(&mut self, piece: u64) -> Option<u64> {
        let addr = self.free.take(piece)?;
        self.used += piece;
        Some(addr)
    }

    /// Addresses for `size` more bytes that must be mapped and then given.
    pub fn extend(&self, size: u64) -> Option<u64> {
        self.next.checked_add(size).filter(|&end| end <= self.end).map(|_| self.next)
    }

    /// What [`Region::extend`] said is mapped.
    pub fn extended(&mut self, size: u64) {
        self.free.give(self.next, size);
        self.next += size;
    }

    /// Gives back a piece.
    pub fn give(&mut self, addr: u64, piece: u64) {
        self.free.give(addr, piece);
        self.used -= piece;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_that_come_back_in_any_order_are_one_again() {
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
