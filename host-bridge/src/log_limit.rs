//! Rate-limited logging, so that whoever causes a line cannot flood the log.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A token bucket for lines that one guest, connection or group of strangers causes.
#[derive(Debug)]
pub struct LogLimit {
    burst: u32,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    left: u32,
    /// `None`: nothing was taken yet.
    filled: Option<Instant>,
    suppressed: u64,
}

/// How often a token is added.
const REFILL: Duration = Duration::from_secs(1);

/// How many lines were left out before one that is written, as the end of that line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotShown(u64);

impl fmt::Display for NotShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " ({} earlier messages not shown)", self.0) }
    }
}

impl Default for LogLimit {
    /// For refusals and mistakes, of which the first ones say enough.
    fn default() -> LogLimit {
        LogLimit::new(10)
    }
}

impl LogLimit {
    /// A full bucket of `burst` lines, to which one is added each second.
    pub const fn new(burst: u32) -> LogLimit {
        LogLimit { burst, bucket: Mutex::new(Bucket { left: burst, filled: None, suppressed: 0 }) }
    }

    /// Takes a token. If a line may be written: what to write at its end.
    pub fn allow(&self) -> Option<NotShown> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<NotShown> {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let filled = *bucket.filled.get_or_insert(now);
        let periods = now.saturating_duration_since(filled).as_secs() / REFILL.as_secs();
        if periods > 0 {
            let more = u32::try_from(periods).unwrap_or(u32::MAX);
            bucket.left = self.burst.min(bucket.left.saturating_add(more));
            bucket.filled = Some(now);
        }
        if bucket.left == 0 {
            bucket.suppressed += 1;
            return None;
        }
        bucket.left -= 1;
        Some(NotShown(std::mem::take(&mut bucket.suppressed)))
    }

    /// Logs a warning if a line may be written.
    pub fn warn(&self, who: &str, what: &str) {
        if let Some(not_shown) = self.allow() {
            tracing::warn!("{who}: {what}{not_shown}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_limited_and_counted() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let shown = (0..1000).filter(|_| limit.allow_at(start).is_some()).count();
        assert_eq!(shown, 10);
        assert_eq!(limit.allow_at(start + REFILL), Some(NotShown(990)));
        assert_eq!(limit.allow_at(start + REFILL), None);
        assert_eq!(
            limit.allow_at(start + 20 * REFILL).map(|n| n.to_string()).unwrap(),
            " (1 earlier messages not shown)"
        );
        assert_eq!(limit.allow_at(start + 20 * REFILL).map(|n| n.to_string()).unwrap(), "");
    }
}
