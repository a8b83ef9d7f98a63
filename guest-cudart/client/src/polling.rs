//! How a program's threads adapt to how well polling pays. The times are in `protocol/src/polling.rs`.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use protocol::polling;

/// How long a thread polls before it sleeps.
///
/// For ring space and progress: briefly. For a reply: as long as polling has recently succeeded, up to
/// `RGPU_POLL_US`. On a large machine that is as long as a large copy takes, because waking a thread costs as
/// much as copying several megabytes, and a local GPU's driver also spins throughout. Only a few threads poll
/// that long at once, so that a program with many waiting threads leaves the processors to working ones.
pub(crate) struct Poll {
    pub(crate) most: Duration,
    /// The limit for further threads, and for waits other than for a reply.
    pub(crate) brief: Duration,
    now_ns: AtomicU32,
    polling: AtomicUsize,
    /// How many threads may poll for long at once.
    max_long_pollers: usize,
}

/// Counts a thread as polling until dropped.
pub(crate) struct PollingThread<'p>(&'p AtomicUsize);

impl Drop for PollingThread<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Poll {
    pub(crate) fn from_environment() -> Poll {
        let cores = polling::processors();
        let asked = log::setting::number("RGPU_POLL_US", "microseconds", 0..=1_000_000);
        Poll::new(cores, asked)
    }

    fn new(cores: usize, asked_us: Option<u64>) -> Poll {
        let usual = polling::CLIENT_REPLY.on(cores);
        let most = asked_us.map_or(usual, |us| Duration::from_micros(us.min(1_000_000)));
        Poll {
            most,
            brief: most.min(polling::CLIENT_BRIEF.on(cores)),
            now_ns: AtomicU32::new(most.as_nanos() as u32),
            polling: AtomicUsize::new(0),
            max_long_pollers: polling::long_polls(cores),
        }
    }

    /// How long to poll for a reply now, with a guard to hold while polling.
    pub(crate) fn begin(&self) -> (Duration, PollingThread<'_>) {
        let others = self.polling.fetch_add(1, Ordering::Relaxed);
        let now = Duration::from_nanos(self.now_ns.load(Ordering::Relaxed).into());
        let limit = if others < self.max_long_pollers { now } else { now.min(self.brief) };
        (limit, PollingThread(&self.polling))
    }

    pub(crate) fn answered(&self, while_polling: bool) {
        let most = self.most.as_nanos() as u32;
        let now = self.now_ns.load(Ordering::Relaxed);
        let next = if while_polling { now.saturating_mul(2).min(most) } else { (now / 2).max(most / 8) };
        if next != now {
            self.now_ns.store(next, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_few_threads_poll_for_long() {
        let poll = Poll::new(16, None);
        let held: Vec<_> = (0..4).map(|_| poll.begin()).collect();
        assert!(held.iter().all(|(limit, _)| *limit == Duration::from_millis(10)));
        assert_eq!(poll.begin().0, polling::CLIENT_BRIEF.on(16));
        drop(held);
        assert_eq!(poll.begin().0, Duration::from_millis(10));
    }

    #[test]
    fn unsuccessful_polling_gets_shorter_and_the_setting_limits_it() {
        let poll = Poll::new(16, Some(80));
        (0..10).for_each(|_| poll.answered(false));
        assert_eq!(poll.begin().0, Duration::from_micros(10));
        (0..10).for_each(|_| poll.answered(true));
        assert_eq!(poll.begin().0, Duration::from_micros(80));
        assert_eq!(Poll::new(64, Some(0)).begin().0, Duration::ZERO);
        assert_eq!(Poll::new(1, None).begin().0, Duration::ZERO);
    }
}
