//! Rate-limited logging, so that a guest cannot flood the log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const BURST: u32 = 10;
const REFILL: Duration = Duration::from_secs(1);

/// A token bucket. Each guest or connection has its own.
#[derive(Debug)]
pub struct LogLimit(Mutex<Bucket>);

#[derive(Debug)]
struct Bucket {
    left: u32,
    filled: Instant,
    suppressed: u64,
}

impl LogLimit {
    /// A full bucket.
    pub fn new() -> LogLimit {
        LogLimit(Mutex::new(Bucket { left: BURST, filled: Instant::now(), suppressed: 0 }))
    }

    /// Takes a token. If a line may be written, returns the number of lines suppressed since the last one.
    pub fn allow(&self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<u64> {
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let periods = now.saturating_duration_since(bucket.filled).as_secs() / REFILL.as_secs();
        if periods > 0 {
            bucket.left = BURST.min(bucket.left.saturating_add(u32::try_from(periods).unwrap_or(u32::MAX)));
            bucket.filled = now;
        }
        if bucket.left == 0 {
            bucket.suppressed += 1;
            return None;
        }
        bucket.left -= 1;
        Some(std::mem::take(&mut bucket.suppressed))
    }

    /// Logs a warning if a line may be written.
    pub fn warn(&self, who: &str, what: &str) {
        match self.allow() {
            Some(0) => tracing::warn!("{who}: {what}"),
            Some(suppressed) => tracing::warn!("{who}: {what} ({suppressed} earlier messages not shown)"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_limited_and_counted() {
        let limit = LogLimit::new();
        let start = Instant::now();
        let shown = (0..1000).filter(|_| limit.allow_at(start).is_some()).count();
        assert_eq!(shown, BURST as usize);
        assert_eq!(limit.allow_at(start + REFILL), Some(1000 - u64::from(BURST)));
        assert_eq!(limit.allow_at(start + REFILL), None);
    }
}
