//! Device processes that fail one after the other.

use std::time::Duration;

/// A device process that ran longer than this has not failed at its start.
pub(super) const HEALTHY: Duration = Duration::from_secs(60);
/// No other device process is started after this many in a row have failed soon after their start.
const MAX_FAILURES: u32 = 8;
/// Pause before another attempt after the second failure. Doubled each time.
const PAUSE: Duration = Duration::from_millis(100);

/// Counts the device processes for one virtual machine or user that have failed in a row.
#[derive(Debug, Default)]
pub(super) struct Failures(u32);

impl Failures {
    /// A device process has ended by itself after it `ran` for so long.
    pub(super) fn count(&mut self, ran: Duration) {
        self.0 = if ran > HEALTHY { 1 } else { self.0 + 1 };
    }

    /// How long to wait before another one is started.
    ///
    /// # Errors
    /// If there should be no other one: why.
    pub(super) fn pause(&self) -> Result<Duration, String> {
        match self.0 {
            0 | 1 => Ok(Duration::ZERO),
            MAX_FAILURES.. => Err(format!("{} device processes in a row have failed", self.0)),
            count => Ok(PAUSE * (1 << (count - 2))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_failures_in_a_row_are_the_last() {
        let mut failures = Failures::default();
        let mut waited = Duration::ZERO;
        for _ in 0..7 {
            failures.count(Duration::ZERO);
            waited += failures.pause().unwrap();
        }
        assert_eq!(waited, Duration::from_millis(6300));
        failures.count(HEALTHY);
        assert!(failures.pause().unwrap_err().starts_with("8 device processes"));
    }

    #[test]
    fn a_process_that_ran_for_long_begins_a_new_row() {
        let mut failures = Failures::default();
        (0..20).for_each(|_| failures.count(HEALTHY + Duration::from_secs(1)));
        assert_eq!(failures.pause(), Ok(Duration::ZERO));
    }
}
