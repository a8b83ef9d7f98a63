//! One word by which a sleeper says that it sleeps.

use super::sync::{AtomicU32, Ordering, fence};

/// 1 while someone sleeps, or is about to; 0 otherwise.
///
/// Sleeper: [`announce`](Self::announce); look once more for what it waits for; sleep while the word is 1
/// ([`ASLEEP`](Self::ASLEEP)); or [`cancel`](Self::cancel) when there is something after all.
/// Waker: make the change visible; then, if [`take`](Self::take), wake.
///
/// Both sides put a full fence between their write and their read, so one of the two always sees the other: a wake-up is never lost. Several may
/// sleep on one word; all are woken.
#[repr(transparent)]
#[derive(Debug)]
pub struct SleepFlag(AtomicU32);

impl SleepFlag {
    /// The word's value while someone sleeps.
    pub const ASLEEP: u32 = 1;

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        SleepFlag(AtomicU32::new(0))
    }

    /// Says that the caller is about to sleep. It must look once more before it does.
    pub fn announce(&self) {
        self.0.store(Self::ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that the caller does not sleep. For a word with a single sleeper; where several share it, leave it: a spurious wake-up is harmless.
    pub fn cancel(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether someone sleeps and the caller is the one to wake. To be asked after the change was published.
    #[inline]
    pub fn take(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) != 0 && self.0.swap(0, Ordering::AcqRel) != 0
    }

    /// Whether the word still says that someone sleeps.
    pub fn is_asleep(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}
