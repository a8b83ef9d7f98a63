//! The word with which a thread asks to be woken.

use super::sync::{AtomicU32, Ordering, fence};

/// 1 while a thread sleeps or is about to; 0 otherwise.
///
/// The sleeping side calls [`announce`](Self::announce), checks once more for what it waits for, and then
/// sleeps while the word is 1 ([`ASLEEP`](Self::ASLEEP)), or calls [`cancel`](Self::cancel) if the wait is
/// over. The waking side makes its change visible, and then wakes the sleeper if [`take`](Self::take) returns
/// true.
///
/// Both sides put a full fence between their write and their read, so at least one of them sees the other's
/// write and no wake-up is lost. Several threads may sleep on one word; all are woken.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct SleepFlag(AtomicU32);

impl SleepFlag {
    /// The word's value while a thread sleeps.
    pub const ASLEEP: u32 = 1;

    /// Announces that the caller is about to sleep. It must check once more before it does.
    pub fn announce(&self) {
        self.0.store(Self::ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Takes the announcement back. Only for a word with a single sleeper. If several threads share the word,
    /// leave the announcement: a spurious wake-up is harmless.
    pub fn cancel(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether a thread sleeps and the caller has to wake it. Call this after publishing the change.
    #[inline]
    pub fn take(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) != 0 && self.0.swap(0, Ordering::AcqRel) != 0
    }

    /// Whether the word still says that a thread sleeps.
    pub fn is_asleep(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}
