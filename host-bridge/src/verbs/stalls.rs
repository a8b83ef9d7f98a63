//! Requests that a device reports neither as done nor as failed: when they have been under way for so long
//! that new queue pairs are the faster way.
//!
//! A device repeats what is not acknowledged, but on a timer of its own: a card's runs out after 0.3 to 1.1
//! s, that of `rdma_rxe` after 2.1 s, and on each queue at another time. So when a link comes back, its
//! queues go on only then. Whoever can replace them need not wait for that.
//!
//! How long is too long depends on the queue: at least [`LEAST`], and twice as long as its requests took
//! lately. One that took unusually long was perhaps lost and repeated by the device, so it counts for less.
//! If a queue stalls twice and nothing was done between, although the queue pairs carried something, it may
//! be merely slow; then it is twice as long from now on, until requests are done faster. So at least one
//! request is done before a link is replaced so often.

use std::time::{Duration, Instant};

/// No wait is too long before that.
pub(super) const LEAST: Duration = Duration::from_millis(500);
/// Every wait is too long after that.
const MOST: Duration = Duration::from_secs(10);
/// How often a request must be seen to be under way still: a process that did not run for a while has not
/// waited.
const LOOKS: u32 = 4;

/// The waits of a link's queues.
#[derive(Debug)]
pub(super) struct Stalls {
    queues: Vec<Wait>,
}

/// What one queue waits for.
#[derive(Debug, Clone, Copy, Default)]
struct Wait {
    /// About the longest that a request took lately.
    slowest: Duration,
    /// Since when it waits, when it was last looked at, and how often.
    since: Option<(Instant, Instant, u32)>,
    /// A request has been done since then.
    moved: bool,
    /// It has stalled, and no request has been done since.
    stalled: bool,
}

impl Wait {
    fn limit(&self) -> Duration {
        (2 * self.slowest).clamp(LEAST, MOST)
    }
}

impl Stalls {
    pub(super) fn new(queues: usize) -> Stalls {
        Stalls { queues: vec![Wait::default(); queues] }
    }

    /// A request of this queue is done.
    pub(super) fn moved(&mut self, queue: usize) {
        self.queues[queue].moved = true;
    }

    /// Looks at a queue after its completions were taken. `waits`: it has requests under way of which the
    /// device will report when they are done. `carries`: the queue pairs have carried something. True: a
    /// request takes too long.
    pub(super) fn look(
        &mut self,
        queue: usize,
        (waits, carries): (bool, bool),
        now: impl FnOnce() -> Instant,
    ) -> bool {
        let wait = &mut self.queues[queue];
        let limit = wait.limit();
        let moved = std::mem::take(&mut wait.moved);
        if !waits && wait.since.is_none() {
            return false;
        }
        let now = now();
        let Some((since, looked, looks)) = wait.since.filter(|_| !moved) else {
            if let Some((since, ..)) = wait.since {
                let took = now.saturating_duration_since(since).min(limit * 3 / 4);
                (wait.slowest, wait.stalled) = (took.max(wait.slowest / 2), false);
            }
            wait.since = waits.then_some((now, now, 0));
            return false;
        };
        if !waits {
            wait.since = None;
        } else if now.saturating_duration_since(looked) >= limit / LOOKS {
            wait.since = Some((since, now, looks + 1));
            if looks + 1 >= LOOKS {
                if carries && std::mem::replace(&mut wait.stalled, true) {
                    wait.slowest = limit;
                }
                return true;
            }
        }
        false
    }

    /// How long nobody needs to look. `None`: no queue waits.
    pub(super) fn next(&self, now: Instant) -> Option<Duration> {
        let due = |wait: &Wait| Some(wait.since?.1 + wait.limit() / LOOKS);
        Some(self.queues.iter().filter_map(due).min()?.saturating_duration_since(now))
    }

    /// The queue pairs are gone.
    pub(super) fn end(&mut self) {
        for wait in &mut self.queues {
            (wait.since, wait.moved) = (None, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(25);
    const WAITS: (bool, bool) = (true, true);
    const RESTS: (bool, bool) = (false, true);

    /// Looks every 25 ms at a queue that waits, until that is too long and its queue pairs are gone. Gives
    /// the time.
    fn stalls_after(stalls: &mut Stalls, now: &mut Instant, carries: bool) -> Duration {
        let begun = *now;
        while !stalls.look(0, (true, carries), || *now) {
            *now += TICK;
        }
        stalls.end();
        *now - begun
    }

    /// A request takes so long.
    fn takes(stalls: &mut Stalls, now: &mut Instant, time: Duration) {
        assert!(!stalls.look(0, WAITS, || *now));
        *now += time;
        stalls.moved(0);
        assert!(!stalls.look(0, RESTS, || *now));
    }

    #[test]
    fn a_request_that_takes_much_longer_than_others_is_too_slow() {
        let (mut stalls, mut now) = (Stalls::new(2), Instant::now());
        assert!(!stalls.look(0, RESTS, || now) && stalls.next(now).is_none());
        assert_eq!(stalls_after(&mut stalls, &mut now, true), LEAST);
        assert!(!stalls.look(0, WAITS, || now));
        assert_eq!(stalls.next(now), Some(LEAST / LOOKS));
        (0..9).for_each(|_| takes(&mut stalls, &mut now, 12 * TICK));
        assert_eq!(stalls_after(&mut stalls, &mut now, true), 24 * TICK);
        // After faster ones, that does not count any more; and what is idle does not wait.
        for _ in 0..2 {
            takes(&mut stalls, &mut now, TICK);
            now += MOST;
        }
        assert_eq!(stalls_after(&mut stalls, &mut now, true), LEAST);
    }

    #[test]
    fn one_request_that_was_lost_and_repeated_changes_little() {
        let (mut stalls, mut now) = (Stalls::new(1), Instant::now());
        takes(&mut stalls, &mut now, MOST);
        assert_eq!(stalls.queues[0].limit(), LEAST * 3 / 2);
        takes(&mut stalls, &mut now, TICK);
        assert_eq!(stalls.queues[0].limit(), LEAST);
    }

    #[test]
    fn a_queue_that_stalls_again_and_again_gets_more_time_until_a_request_is_done() {
        let (mut stalls, mut now) = (Stalls::new(1), Instant::now());
        for times in [1, 1, 2, 4, 8, 16, 20, 20] {
            assert_eq!(stalls_after(&mut stalls, &mut now, true), (times * LEAST).min(MOST));
            // Queue pairs that carry nothing say nothing about the queue.
            let limit = stalls.queues[0].limit().as_millis();
            assert!(stalls_after(&mut stalls, &mut now, false).as_millis().abs_diff(limit) < 100);
            assert_eq!(stalls.queues[0].limit().as_millis(), limit);
        }
        (0..6).for_each(|_| takes(&mut stalls, &mut now, TICK));
        assert_eq!(stalls_after(&mut stalls, &mut now, true), LEAST);
    }

    #[test]
    fn a_process_that_did_not_run_has_not_waited() {
        let (mut stalls, now) = (Stalls::new(1), Instant::now());
        assert!(!stalls.look(0, WAITS, || now));
        for minutes in 1..u64::from(LOOKS) {
            assert!(!stalls.look(0, WAITS, || now + Duration::from_secs(60 * minutes)));
        }
        assert!(stalls.look(0, WAITS, || now + Duration::from_secs(3600)));
    }
}
