//! How a worker waits until a device has room for more memory. The daemon makes room by having other
//! sessions' memory moved away.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::pages::{Meter, Page};

/// How long to wait for room, or for any session's memory to move.
pub const WITHIN: Duration = Duration::from_secs(30);
/// How often to ask again meanwhile.
pub const AGAIN: Duration = Duration::from_millis(10);
/// A session that has not left its devices within this time is no longer counted on, whatever it moves.
pub const LEAVES_WITHIN: Duration = Duration::from_secs(120);

/// How long somebody has waited for room without any session's memory moving.
#[derive(Default)]
pub struct Patience(Option<(u64, Instant)>);

impl Patience {
    /// Whether nothing has moved for too long. `moves`: [`Terms::moves`](crate::pages::Terms::moves).
    pub fn is_over(&mut self, moves: u64, now: Instant) -> bool {
        let (seen, since) = *self.0.get_or_insert((moves, now));
        if seen != moves {
            self.0 = Some((moves, now));
        }
        seen == moves && now.saturating_duration_since(since) > WITHIN
    }
}

/// See the module.
pub struct Room {
    /// Where the worker says that it waits.
    pub meter: Arc<Page<Meter>>,
    /// The daemon's bell.
    pub bell: Arc<OwnedFd>,
}

impl Room {
    /// Wakes the daemon's thread that looks at meters.
    pub fn ring(&self) {
        // Writing fails only when the pipe is full, and then the daemon is awake.
        let _ = nix::unistd::write(&*self.bell, &[1]);
    }

    /// Says that `bytes` more are needed on a device, by its number, until [`end`](Room::end).
    pub fn need(&self, number: u32, bytes: u64) {
        if let Some(needs) = self.meter.memory.needs.get(number as usize) {
            needs.store(bytes, Ordering::Release);
        }
        self.ring();
    }

    /// Nothing more is needed.
    pub fn end(&self) {
        self.meter.memory.needs.iter().for_each(|needs| needs.store(0, Ordering::Release));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_when_nothing_moves() {
        let (mut patience, begun) = (Patience::default(), Instant::now());
        let mut over = |moves, after: Duration| patience.is_over(moves, begun + after);
        assert!(!over(7, Duration::ZERO) && !over(7, WITHIN));
        assert!(!over(8, 2 * WITHIN), "it moves");
        assert!(!over(8, 3 * WITHIN));
        assert!(over(8, 3 * WITHIN + AGAIN));
    }
}
