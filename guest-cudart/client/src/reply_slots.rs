//! The channel's reply slots: taking one for an operation, and freeing it after its reply.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

use protocol::Status;
use protocol::channel::ReplySlot;

use crate::lock;
use crate::session::{LIVENESS_CHECK, Session};

/// How many slots [additional](ReplySlots::are_plentiful) replies leave free.
pub(crate) const LEFT_BY_ADDITIONAL: u32 = 20;
/// How many slots are left free by waits that may take as long as the program wants. The other calls, which
/// the program may need to end these waits, find theirs among them.
pub(crate) const LEFT_BY_WAITS: u32 = 16;
/// The same for a question for room in a stream, without which a call that ends these waits cannot go on. A
/// page fault may need a slot before there is room.
pub(crate) const LEFT_BY_ROOM: u32 = 4;

/// The reply slots. Only the first 64 are used.
pub(crate) struct ReplySlots {
    pub(crate) all: &'static [ReplySlot],
    /// A bit for each free slot.
    free: AtomicU64,
    /// A bit for each slot whose reply has not been received and is no longer needed.
    abandoned: AtomicU64,
    waiting: AtomicUsize,
    queue: Mutex<()>,
    came: Condvar,
}

impl ReplySlots {
    pub(crate) fn new(all: &'static [ReplySlot]) -> ReplySlots {
        let free = if all.len() >= 64 { u64::MAX } else { (1 << all.len()) - 1 };
        ReplySlots {
            all,
            free: AtomicU64::new(free),
            abandoned: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            queue: Mutex::new(()),
            came: Condvar::new(),
        }
    }

    fn try_acquire(&self) -> Option<usize> {
        self.try_acquire_leaving(0)
    }

    /// Takes a slot if more than this many are free.
    pub(crate) fn try_acquire_leaving(&self, leaving: u32) -> Option<usize> {
        let mut free = self.free.load(Ordering::Relaxed);
        while free.count_ones() > leaving {
            let bit = free & free.wrapping_neg();
            match self.free.compare_exchange_weak(free, free & !bit, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return Some(bit.trailing_zeros() as usize),
                Err(now) => free = now,
            }
        }
        None
    }

    pub(crate) fn acquire(&self, session: &Session) -> Result<usize, Status> {
        if let Some(slot) = self.try_acquire() {
            return Ok(slot);
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut queue = lock(&self.queue);
        let got = loop {
            // Under the lock that `sweep` takes.
            if self.reclaim() > 1 {
                self.came.notify_all();
            }
            if let Some(slot) = self.try_acquire() {
                break Ok(slot);
            }
            if let Err(status) = session.check() {
                break Err(status);
            }
            queue = self
                .came
                .wait_timeout(queue, LIVENESS_CHECK)
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        };
        drop(queue);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        got
    }

    /// Gives up on the reply in a slot. The host owns the slot until it has replied.
    pub(crate) fn abandon(&self, slot: usize) {
        self.abandoned.fetch_or(1 << slot, Ordering::SeqCst);
        self.sweep();
    }

    /// Frees abandoned slots whose replies have arrived.
    pub(crate) fn sweep(&self) {
        if self.reclaim() != 0 && self.waiting.load(Ordering::SeqCst) != 0 {
            let _queue = lock(&self.queue);
            self.came.notify_all();
        }
    }

    /// Like [`sweep`](Self::sweep), but without waking threads that wait for a slot. Returns how many it
    /// freed.
    fn reclaim(&self) -> u32 {
        let (mut abandoned, mut freed) = (self.abandoned.load(Ordering::Relaxed), 0);
        while abandoned != 0 {
            let slot = abandoned.trailing_zeros() as usize;
            abandoned &= abandoned - 1;
            freed += u32::from(self.take_back(slot));
        }
        freed
    }

    /// Frees an abandoned slot if its reply has arrived. Returns whether it did.
    fn take_back(&self, slot: usize) -> bool {
        while self.all[slot].is_done() {
            if !self.claim(slot) {
                return false;
            }
            if self.free_claimed(slot) {
                return true;
            }
        }
        false
    }

    /// Takes an abandoned slot away from other threads. Returns false if another thread has done so.
    fn claim(&self, slot: usize) -> bool {
        let bit = 1 << slot;
        self.abandoned.fetch_and(!bit, Ordering::SeqCst) & bit != 0
    }

    /// Frees a claimed slot, or leaves it abandoned: since this thread has looked at it, others may have
    /// freed it, used it again, and abandoned that reply.
    fn free_claimed(&self, slot: usize) -> bool {
        let is_done = self.all[slot].is_done();
        let to = if is_done { &self.free } else { &self.abandoned };
        to.fetch_or(1 << slot, Ordering::SeqCst);
        is_done
    }

    pub(crate) fn release(&self, slot: usize) {
        self.free.fetch_or(1 << slot, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) != 0 {
            let _queue = lock(&self.queue);
            self.came.notify_one();
        }
    }

    /// Whether enough slots are free that a thread that already waits for a reply may take another one
    /// without starving threads that have none.
    pub(crate) fn are_plentiful(&self) -> bool {
        self.free.load(Ordering::Relaxed).count_ones() > LEFT_BY_ADDITIONAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a request whose reply is not needed any more.
    fn ask_and_abandon(slots: &ReplySlots) -> usize {
        let slot = slots.try_acquire().unwrap();
        slots.all[slot].prepare();
        slots.abandon(slot);
        slot
    }

    #[test]
    fn a_slot_that_another_thread_uses_again_stays_the_hosts_until_its_reply() {
        // SAFETY: a slot is made of atomic numbers, for which zeros are valid.
        let all: &[ReplySlot] = unsafe { Box::leak(Box::new_zeroed_slice(64)).assume_init_ref() };
        let slots = ReplySlots::new(all);
        let slot = ask_and_abandon(&slots);
        all[slot].complete(1, Status::SUCCESS, &[]);
        // One thread sees the reply. Before it goes on, another one frees the slot and takes it again.
        assert!(all[slot].is_done());
        slots.sweep();
        assert_eq!(ask_and_abandon(&slots), slot);
        assert!(slots.claim(slot) && !slots.free_claimed(slot));
        assert_ne!(slots.try_acquire(), Some(slot), "the host will write its reply there");
        all[slot].complete(2, Status::SUCCESS, &[]);
        slots.sweep();
        assert_eq!(slots.try_acquire(), Some(slot));
    }
}
