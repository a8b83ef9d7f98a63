//! Counts what a guest's memory costs this host: a guest is refused more than its share, and the process
//! stays within its limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::refusal::{Refusal, no_resources};

/// Mappings that a process needs besides those of channels: libraries, heaps, and two for each thread's
/// stack.
const OTHER_MAPPINGS: usize = 16 << 10;
/// Linux's default limit, if it doesn't report one.
const MAX_MAP_COUNT: usize = 65530;

/// Something that is limited.
#[derive(Debug)]
struct Limited {
    used: AtomicUsize,
    limit: usize,
}

impl Limited {
    fn new(limit: usize) -> Arc<Limited> {
        Arc::new(Limited { used: AtomicUsize::new(0), limit })
    }

    fn charge(self: &Arc<Self>, count: usize) -> Result<Charge, usize> {
        let more = |used: usize| used.checked_add(count).filter(|sum| *sum <= self.limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Charge { from: self.clone(), count }),
            Err(used) => Err(used),
        }
    }

    /// Counts what already exists, even beyond the limit: nothing more is granted until enough is released.
    fn count(self: &Arc<Self>, count: usize) -> Charge {
        self.used.fetch_add(count, Ordering::Relaxed);
        Charge { from: self.clone(), count }
    }
}

/// Counts against a limit until it is dropped.
#[derive(Debug)]
pub struct Charge {
    from: Arc<Limited>,
    count: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.from.used.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// The limits of one guest.
#[derive(Debug)]
pub struct Budget {
    /// Pieces of registered memory.
    pieces: Arc<Limited>,
    /// Mappings of channels.
    mappings: Arc<Limited>,
}

impl Budget {
    /// `max_pieces` is configured; the kernel limits a process's mappings.
    pub fn new(max_pieces: usize) -> Budget {
        let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let allowed = allowed.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT);
        Budget::with(max_pieces, allowed.saturating_sub(OTHER_MAPPINGS))
    }

    fn with(max_pieces: usize, max_mappings: usize) -> Budget {
        Budget { pieces: Limited::new(max_pieces), mappings: Limited::new(max_mappings) }
    }

    /// Whether nothing is charged.
    #[cfg(any(test, fuzzing))]
    pub fn is_unused(&self) -> bool {
        [&self.pieces, &self.mappings].iter().all(|limited| limited.used.load(Ordering::SeqCst) == 0)
    }

    /// A region of `count` pieces.
    pub fn region(&self, count: usize) -> Result<Charge, Refusal> {
        self.pieces.charge(count).map_err(|used| {
            no_resources(format!(
                "a region of {count} pieces of guest memory: the guest has registered {used} pieces, the limit is {} (limits.max_registered_extents)",
                self.pieces.limit
            ))
        })
    }

    /// A region of `count` pieces that a predecessor has granted.
    pub fn inherited_region(&self, count: usize) -> Charge {
        self.pieces.count(count)
    }

    /// A channel that needs `count` mappings.
    pub fn channel(&self, count: usize) -> Result<Charge, Refusal> {
        self.mappings.charge(count).map_err(|used| {
            no_resources(format!(
                "a channel of {count} pieces of guest memory: the guest's channels have {used} pieces, and this host maps at most {}: end programs in the guest, or raise vm.max_map_count on the host",
                self.mappings.limit
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_mappings_can_be_used_again() {
        let budget = Budget::with(10, 4);
        let held = budget.region(7).unwrap();
        let refusal = budget.region(4).unwrap_err();
        assert!(refusal.1.contains("registered 7 pieces, the limit is 10"), "{}", refusal.1);
        assert!(budget.region(usize::MAX).is_err());
        let rest = budget.region(3).unwrap();
        let inherited = budget.inherited_region(5);
        drop(held);
        assert!(budget.region(3).unwrap_err().1.contains("registered 8 pieces"));
        drop(inherited);
        budget.region(7).unwrap();
        drop(rest);
        assert!(budget.channel(4).is_ok() && budget.channel(5).unwrap_err().1.contains("at most 4"));
    }
}
