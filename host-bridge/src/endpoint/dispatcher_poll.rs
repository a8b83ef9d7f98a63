//! How long a dispatcher polls for its next command before it sleeps.
//!
//! Waking a thread takes tens of microseconds, and more than a hundred on a virtual machine whose processors
//! have been idle for a while. A program that waits for its device calls again as soon as it has its answer.
//! So while a reply is outstanding and processors are free, the dispatcher polls for longer: as long as the
//! program's thread and the worker's completer do. Otherwise each copy of a few milliseconds would start late
//! by a wake-up.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use protocol::polling::{self, PollTime};

/// How long a worker's threads poll before they sleep.
#[derive(Debug, Clone, Copy)]
pub struct Polling {
    /// The longest time for which [`Commands::next`](super::Commands::next) polls an empty ring or a silent
    /// connection.
    pub most: Duration,
    /// The same while the client waits for a reply, and will probably call again soon (`local`, `tcp`).
    pub while_due: Duration,
}

impl Default for Polling {
    /// What suits this machine's number of processors.
    fn default() -> Self {
        Polling { most: polling::DISPATCHER.here(), while_due: polling::DISPATCHER_REPLY_DUE.here() }
    }
}

/// Number of replies that a session's client waits for. The dispatcher adds commands; the threads that answer
/// them subtract.
#[derive(Debug, Default)]
pub(super) struct Replies {
    asked: AtomicU32,
    given: AtomicU32,
}

impl Replies {
    /// A `sync` command was taken from the ring.
    pub(super) fn asked(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// A `sync` command was answered.
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
    /// The polling time while a reply is outstanding. It adapts to whether polling pays.
    while_due: PollTime,
}

/// One round of polling.
#[derive(Debug)]
pub(super) struct Round {
    begun: Instant,
    /// When the last outstanding reply was given.
    since: Instant,
    given: u32,
    preempted: i64,
}

impl DispatcherPoll {
    pub(super) fn new(polling: Polling) -> DispatcherPoll {
        DispatcherPoll { most: polling.most, while_due: PollTime::new(polling.while_due.max(polling.most)) }
    }

    /// Starts a round of polling.
    pub(super) fn begin(&self, replies: &Replies) -> Round {
        let now = Instant::now();
        let given = replies.given.load(Ordering::Relaxed);
        Round { begun: now, since: now, given, preempted: preempted() }
    }

    /// Whether to poll once more.
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

    /// Ends a round of polling. `found`: whether a command arrived. If the thread lost its processor
    /// meanwhile, another thread needed it, so polling did not pay.
    pub(super) fn end(&mut self, round: &Round, found: bool) {
        if round.begun.elapsed() <= self.most {
            return;
        }
        if found && preempted() == round.preempted { self.while_due.paid() } else { self.while_due.wasted() }
    }
}

/// How often this thread was preempted.
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
