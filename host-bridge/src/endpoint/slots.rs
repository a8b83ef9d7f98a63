//! Which slots of a `verbs` session the bridge may write, and when it is told of freed ones.

/// Freed slots of which the bridge is told together.
const BATCH: usize = 8;

/// The slots as the worker knows them.
#[derive(Debug)]
pub(super) struct Slots {
    in_use: Vec<bool>,
    /// How many are.
    used: usize,
    /// Freed, and the bridge does not know.
    freed: Vec<u32>,
}

impl Slots {
    pub(super) fn new(count: u32) -> Slots {
        Slots { in_use: vec![false; count as usize], used: 0, freed: Vec::with_capacity(count as usize) }
    }

    /// The bridge has written a slot. False: there is no such slot, or it was not the bridge's to write.
    pub(super) fn take(&mut self, slot: u32) -> bool {
        match self.in_use.get_mut(slot as usize) {
            Some(used) if !*used => {
                *used = true;
                self.used += 1;
                true
            }
            _ => false,
        }
    }

    /// A slot that was taken is free again. When the bridge must be told, `tell` gets all that it does not know of. It need not as long as it has half of the slots and
    /// others will be freed after this one.
    pub(super) fn free(&mut self, slot: u32, tell: impl FnOnce(&[u32])) {
        // Until it is announced the bridge may not write it, so it stays marked.
        self.used = self.used.saturating_sub(1);
        self.freed.push(slot);
        let half = self.in_use.len() / 2;
        if self.used == 0 || self.freed.len() >= BATCH || self.used + self.freed.len() > half {
            tell(&self.freed);
            for slot in self.freed.drain(..) {
                if let Some(used) = self.in_use.get_mut(slot as usize) {
                    *used = false;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_slot_is_the_workers_until_the_bridge_is_told() {
        let mut slots = Slots::new(48);
        assert!(slots.take(3) && slots.take(4));
        assert!(!slots.take(3) && !slots.take(48) && !slots.take(u32::MAX));
        slots.free(3, |_| panic!("another one follows"));
        assert!(!slots.take(3));
        let mut told = Vec::new();
        slots.free(4, |freed| told.extend_from_slice(freed));
        assert_eq!(told, [3, 4]);
        assert!(slots.take(3));
    }

    proptest! {
        /// However slots come and go: the bridge never has less than half of them while it does not know of a free one, and knows of all when none is in use.
        #[test]
        fn the_bridge_never_waits_for_slots_that_are_free(
            count in 2u32..64, steps in prop::collection::vec(any::<(bool, u8)>(), 0..500)
        ) {
            let mut slots = Slots::new(count);
            let mut bridge: Vec<u32> = (0..count).collect();
            let mut used = Vec::new();
            for (take, which) in steps {
                if take && !bridge.is_empty() {
                    let slot = bridge.swap_remove(usize::from(which) % bridge.len());
                    prop_assert!(slots.take(slot));
                    used.push(slot);
                } else if !take && !used.is_empty() {
                    let slot = used.swap_remove(usize::from(which) % used.len());
                    slots.free(slot, |freed| bridge.extend_from_slice(freed));
                }
                let unknown = count as usize - bridge.len() - used.len();
                prop_assert!(!used.is_empty() || unknown == 0);
                // Taking more may bring it below, but then the next one that is freed is told.
                if !take && unknown > 0 {
                    prop_assert!(bridge.len() >= count as usize / 2, "{unknown} of {count} unknown, {} left", bridge.len());
                }
            }
        }
    }
}
