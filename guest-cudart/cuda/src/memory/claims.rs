//! Claims on ranges of addresses. Whoever changes what is there, and asks a server for that, has one in the
//! meantime, in place of a lock on the table of all ranges: a server that does not answer must stop nothing
//! that concerns other addresses.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use client::lock;

/// The claimed ranges, no two of which overlap.
pub(crate) struct Claims {
    all: Mutex<Vec<Range<u64>>>,
    /// How many there are, for those who only look.
    count: AtomicUsize,
    ended: Condvar,
}

/// A claimed range. Dropping it ends the claim.
pub(crate) struct Claim {
    of: &'static Claims,
    start: u64,
}

impl Claims {
    pub const fn new() -> Claims {
        Claims { all: Mutex::new(Vec::new()), count: AtomicUsize::new(0), ended: Condvar::new() }
    }

    /// Claims `size` bytes (not 0) at an address. Waits while another thread has a claim on any of them. So
    /// the caller must hold neither an overlapping claim nor a lock that such a thread may need.
    pub fn take(&'static self, start: u64, size: u64) -> Claim {
        let range = start..start.saturating_add(size);
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        let others = |all: &mut Vec<Range<u64>>| all.iter().any(overlaps);
        let all = self.ended.wait_while(lock(&self.all), others);
        let mut all = all.unwrap_or_else(PoisonError::into_inner);
        all.push(range);
        self.count.store(all.len(), Ordering::Release);
        Claim { of: self, start }
    }

    /// Waits while an address is claimed. Returns whether it was.
    pub fn wait(&self, address: u64) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut waited = false;
        let is_claimed = |all: &mut Vec<Range<u64>>| {
            let claimed = all.iter().any(|range| range.contains(&address));
            waited |= claimed;
            claimed
        };
        drop(self.ended.wait_while(lock(&self.all), is_claimed));
        waited
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut all = lock(&self.of.all);
        all.retain(|range| range.start != self.start);
        self.of.count.store(all.len(), Ordering::Release);
        drop(all);
        self.of.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn only_overlapping_claims_wait_for_each_other() {
        static CLAIMS: Claims = Claims::new();
        let first = CLAIMS.take(100, 10);
        // None of these waits.
        drop([CLAIMS.take(90, 10), CLAIMS.take(110, 10), CLAIMS.take(u64::MAX - 1, 100)]);
        assert!(!CLAIMS.wait(99) && !CLAIMS.wait(110));
        let (says, said) = mpsc::channel();
        let other = says.clone();
        let claims = std::thread::spawn(move || {
            let _second = CLAIMS.take(105, 10);
            other.send("claimed").unwrap();
        });
        let waits = std::thread::spawn(move || {
            assert!(CLAIMS.wait(104));
            says.send("free").unwrap();
        });
        assert!(said.recv_timeout(Duration::from_millis(50)).is_err());
        drop(first);
        for _ in 0..2 {
            said.recv_timeout(Duration::from_secs(60)).unwrap();
        }
        claims.join().unwrap();
        waits.join().unwrap();
        assert!(!CLAIMS.wait(105));
    }
}
