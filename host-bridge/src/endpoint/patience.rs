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
pub(super) struct Answers {
    asked: AtomicU32,
    given: AtomicU32,
}

impl Answers {
    /// A command that is to be answered was taken.
    pub(super) fn asked(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// It was answered.
    pub(super) fn given(&self) {
        self.given.fetch_add(1, Ordering::Relaxed);
    }

    fn are_due(&self) -> bool {
        self.asked.load(Ordering::Relaxed) != self.given.load(Ordering::Relaxed)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Patience {
    most: Duration,
    /// The time while a reply is outstanding. It adapts to whether polling pays.
    while_due: PollTime,
}

/// One round of polling.
#[derive(Debug)]
pub(super) struct Looking {
    begun: Instant,
    /// Since this moment no reply is outstanding.
    since: Instant,
    given: u32,
    preempted: i64,
}

impl Patience {
    pub(super) fn new(polling: Polling) -> Patience {
        Patience { most: polling.most, while_due: PollTime::new(polling.while_due.max(polling.most)) }
    }

    /// Begins to poll.
    pub(super) fn begin(&self, answers: &Answers) -> Looking {
        let now = Instant::now();
        let given = answers.given.load(Ordering::Relaxed);
        Looking { begun: now, since: now, given, preempted: preempted() }
    }

    /// Whether to look again.
    #[inline]
    pub(super) fn lasts(&self, looking: &mut Looking, answers: &Answers) -> bool {
        let now = Instant::now();
        let given = answers.given.load(Ordering::Relaxed);
        if given != looking.given {
            (looking.given, looking.since) = (given, now);
        }
        now - looking.since < self.most || (now - looking.begun < self.while_due.get() && answers.are_due())
    }

    /// Ends a round of polling; `found`: a command came. If the thread lost its processor meanwhile, another thread needed it, and polling did not pay.
    pub(super) fn end(&mut self, looking: &Looking, found: bool) {
        if looking.begun.elapsed() <= self.most {
            return;
        }
        if found && preempted() == looking.preempted {
            self.while_due.paid()
        } else {
            self.while_due.wasted()
        }
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

    fn patience(while_due: Duration) -> Patience {
        Patience::new(Polling { most: MOST, while_due })
    }

    #[test]
    fn while_an_answer_is_due_it_looks_for_longer_and_a_little_after() {
        let (patience, answers) = (patience(LONG), Answers::default());
        answers.asked();
        let mut looking = patience.begin(&answers);
        std::thread::sleep(2 * MOST);
        assert!(patience.lasts(&mut looking, &answers));
        answers.given();
        assert!(patience.lasts(&mut looking, &answers));
        std::thread::sleep(2 * MOST);
        assert!(!patience.lasts(&mut looking, &answers));
    }

    #[test]
    fn with_nothing_due_or_no_processors_to_spare_it_sleeps_soon() {
        let answers = Answers::default();
        let mut looking = patience(LONG).begin(&answers);
        std::thread::sleep(2 * MOST);
        assert!(!patience(LONG).lasts(&mut looking, &answers));
        answers.asked();
        assert!(!patience(MOST).lasts(&mut looking, &answers));
        assert!(patience(LONG).lasts(&mut looking, &answers));
    }

    #[test]
    fn what_does_not_pay_gets_shorter() {
        let (mut patience, answers) = (patience(LONG), Answers::default());
        let mut looking = patience.begin(&answers);
        looking.begun -= 2 * MOST;
        for _ in 0..10 {
            patience.end(&looking, false);
        }
        assert_eq!(patience.while_due.get(), LONG / 8);
    }
}
