//! How long to look for work before sleeping: a time between nothing and a configured bound, that follows how well polling has paid lately.

use std::time::Duration;

/// The bound that suits a machine with `cores` processors: polling on one that the client needs costs more than it saves.
pub fn default_bound(cores: usize) -> Duration {
    Duration::from_micros(match cores {
        0 | 1 => 0,
        2 | 3 => 20,
        _ => 50,
    })
}

/// The adaptive polling time of one relay.
#[derive(Debug, Clone, Copy)]
pub struct PollTime {
    bound: Duration,
    now: Duration,
}

impl PollTime {
    /// Polls for at most `bound`; begins there.
    pub fn new(bound: Duration) -> PollTime {
        PollTime { bound, now: bound }
    }

    /// How long to poll now.
    #[inline]
    pub fn get(&self) -> Duration {
        self.now
    }

    /// Work came while polling: it pays, so poll for longer.
    #[inline]
    pub fn paid(&mut self) {
        self.now = (self.now * 2).min(self.bound);
    }

    /// No work came: poll for a shorter time, down to an eighth of the bound, so that a burst is still noticed.
    pub fn wasted(&mut self) {
        self.now = (self.now / 2).max(self.bound / 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_stays_between_an_eighth_of_the_bound_and_the_bound() {
        let bound = Duration::from_micros(80);
        let mut time = PollTime::new(bound);
        for _ in 0..10 {
            time.wasted();
        }
        assert_eq!(time.get(), bound / 8);
        for _ in 0..10 {
            time.paid();
        }
        assert_eq!(time.get(), bound);
    }

    #[test]
    fn a_bound_of_zero_never_polls() {
        let mut time = PollTime::new(Duration::ZERO);
        time.paid();
        time.wasted();
        assert_eq!(time.get(), Duration::ZERO);
    }
}
