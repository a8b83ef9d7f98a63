//! How long a dispatcher polls for its next command before it sleeps.
//!
//! To be woken takes a thread tens of microseconds, and more than a hundred on a virtual machine whose processors have been idle for a while. A program that waits for its device
//! calls again as soon as it has its answer, so while a reply is outstanding the dispatcher polls for longer, where there are processors to spare: as long as that program's own thread
//! and the worker's completer do. Otherwise each copy of some milliseconds would begin late by the time of a wake-up.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::Polling;
use protocol::polling::PollTime;

/// Replies that a session's client waits for. Counted by the dispatcher, which takes commands, and by the threads that answer them.
#[derive(Debug, Default)]
pub(super) struct Replies {
    asked: AtomicU32,
    given: AtomicU32,
}

impl Replies {
    /// A command that is to be answered was taken.
    pub(super) fn asked(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// It was answered.
    pub(super) fn given(&self) {
        self.given.fetch_add(1, Ordering::Relaxed);
    }

    fn are_outstanding(&self) -> bool {
        self.asked.load(Ordering::Relaxed) != self.given.load(Ordering::Relaxed)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct DispatcherPoll {
    most: Duration,
    /// The time while a reply is outstanding. It adapts to whether polling pays.
    while_due: PollTime,
}

/// One round of polling.
#[derive(Debug)]
pub(super) struct Round {
    begun: Instant,
    /// Since this moment no reply is outstanding.
    since: Instant,
    given: u32,
    preempted: i64,
}

impl DispatcherPoll {
    pub(super) fn new(polling: Polling) -> DispatcherPoll {
        DispatcherPoll { most: polling.most, while_due: PollTime::new(polling.while_due.max(polling.most)) }
    }

    /// Begins to poll.
    pub(super) fn begin(&self, replies: &Replies) -> Round {
        let now = Instant::now();
        let given = replies.given.load(Ordering::Relaxed);
        Round { begun: now, since: now, given, preempted: preempted() }
    }

    /// Whether to look again.
    #[inline]
    pub(super) fn lasts(&self, round: &mut Round, replies: &Replies) -> bool {
        let now = Instant::now();
        let given = replies.given.load(Ordering::Relaxed);
        if given != round.given {
            (round.given, round.since) = (given, now);
        }
        now - round.since < self.most
            || (now - round.begun < self.while_due.get() && replies.are_outstanding())
    }

    /// Ends a round of polling; `found`: a command came. If the thread lost its processor meanwhile, another thread needed it, and polling did not pay.
    pub(super) fn end(&mut self, round: &Round, found: bool) {
        if round.begun.elapsed() <= self.most {
            return;
        }
        if found && preempted() == round.preempted { self.while_due.paid() } else { self.while_due.wasted() }
    }
}

/// How often this thread had to leave its processor to another.
fn preempted() -> i64 {
    // SAFETY: an all-zero rusage is valid, and the call writes nothing else.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_nivcsw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(3600);

    fn poll(while_due: Duration) -> DispatcherPoll {
        DispatcherPoll::new(Polling { most: MOST, while_due })
    }

    #[test]
    fn while_an_answer_is_due_it_looks_for_longer_and_a_little_after() {
        let (poll, replies) = (poll(LONG), Replies::default());
        replies.asked();
        let mut round = poll.begin(&replies);
        std::thread::sleep(2 * MOST);
        assert!(poll.lasts(&mut round, &replies));
        replies.given();
        assert!(poll.lasts(&mut round, &replies));
        std::thread::sleep(2 * MOST);
        assert!(!poll.lasts(&mut round, &replies));
    }

    #[test]
    fn with_nothing_due_or_no_processors_to_spare_it_sleeps_soon() {
        let replies = Replies::default();
        let mut round = poll(LONG).begin(&replies);
        std::thread::sleep(2 * MOST);
        assert!(!poll(LONG).lasts(&mut round, &replies));
        replies.asked();
        assert!(!poll(MOST).lasts(&mut round, &replies));
        assert!(poll(LONG).lasts(&mut round, &replies));
    }

    #[test]
    fn what_does_not_pay_gets_shorter() {
        let (mut poll, replies) = (poll(LONG), Replies::default());
        let mut round = poll.begin(&replies);
        round.begun -= 2 * MOST;
        for _ in 0..10 {
            poll.end(&round, false);
        }
        assert_eq!(poll.while_due.get(), LONG / 8);
    }
}
