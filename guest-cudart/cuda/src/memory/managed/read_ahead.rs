//! How many blocks of managed or pinned memory one page fault gives.

use std::collections::VecDeque;

/// A sequence that needed so few blocks gets all of them at once: the second fault would cost more than they
/// do.
const FEW: u64 = 2;
/// Number of earlier sequences that are remembered.
const REMEMBERED: usize = 32;

/// A sequence of faults, each at the block after the previous answer, or each at the one before it: where two
/// buffers lie in the same place of a page, glibc's `memcpy` begins at the end on some processors.
#[derive(Debug, Default)]
pub(super) struct Streak {
    begun: u64,
    /// It goes towards lower blocks.
    down: bool,
    /// The last answer.
    len: u64,
    /// All answers.
    total: u64,
    /// What a sequence that began at the same block needed.
    expected: Option<u64>,
    /// Earlier sequences.
    before: VecDeque<Earlier>,
}

#[derive(Debug, Clone, Copy)]
struct Earlier {
    begun: u64,
    down: bool,
    needed: u64,
}

/// What a fault is given: so many blocks from the one of the fault on, upwards or down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub len: u64,
    pub down: bool,
}

impl Streak {
    /// What to give at block `at`, at most `most` blocks. If the faults continue each other: twice as many as
    /// last time, or the rest of what an earlier sequence needed. Otherwise one, or half of what an earlier
    /// sequence needed that began here: the next fault shows whether this one is as long. If it needed few,
    /// all of them.
    pub fn longest(&self, at: u64, most: u64) -> Stretch {
        let (blocks, down) = match (self.continues(at), self.expected) {
            (None, _) => self.earlier(at).map_or((1, false), |earlier| {
                let few = earlier.needed <= FEW;
                (if few { earlier.needed } else { earlier.needed / 2 }, earlier.down)
            }),
            (Some(down), Some(needed)) if needed > self.total => (needed - self.total, down),
            (Some(down), Some(_)) => (self.total / 2, down),
            (Some(down), None) => (self.len * 2, down),
        };
        Stretch { len: blocks.clamp(1, most.max(1)), down }
    }

    /// Records that `len` blocks from `first` on were given.
    pub fn answered(&mut self, first: u64, len: u64) {
        let last = first + len.saturating_sub(1);
        match (self.continues(first), self.continues(last)) {
            (Some(false), _) => {}
            (_, Some(true)) => self.down = true,
            _ => {
                self.end();
                let begins = |at, down| self.earlier(at).is_some_and(|earlier| earlier.down == down);
                self.down = len > 1 && begins(last, true) && !begins(first, false);
                (self.begun, self.total) = (if self.down { last } else { first }, 0);
                self.expected = self.earlier(self.begun).map(|earlier| earlier.needed);
            }
        }
        self.len = len;
        self.total += len;
    }

    /// The program has reason to use something else now. Unless this sequence is shorter than expected, the
    /// next fault does not continue it, even if it is at the next block.
    pub fn may_end(&mut self) {
        if self.expected.is_none_or(|expected| self.total >= expected) {
            self.end();
        }
    }

    /// Whether a block is one of this sequence's.
    pub fn contains(&self, at: u64) -> bool {
        let distance = if self.down { self.begun.checked_sub(at) } else { at.checked_sub(self.begun) };
        self.len > 0 && distance.is_some_and(|distance| distance < self.total)
    }

    fn end(&mut self) {
        if self.len == 0 {
            return;
        }
        // Nobody knows how many blocks of the last answer were used.
        let needed = match self.expected {
            None => self.total - self.len + 1,
            Some(expected) if expected < self.total => self.total - self.len / 2,
            Some(_) => self.total,
        };
        self.before.retain(|earlier| earlier.begun != self.begun);
        self.before.truncate(REMEMBERED - 1);
        self.before.push_front(Earlier { begun: self.begun, down: self.down, needed });
        self.len = 0;
    }

    /// Whether a fault at a block continues this sequence, and then whether that is downwards. A sequence of
    /// one block may go either way.
    fn continues(&self, at: u64) -> Option<bool> {
        let above = at.checked_sub(self.begun) == Some(self.total);
        let below = self.begun.checked_sub(at) == Some(self.total);
        match (above && !self.down, below && (self.down || self.total == 1)) {
            _ if self.len == 0 => None,
            (true, _) => Some(false),
            (_, true) => Some(true),
            _ => None,
        }
    }

    fn earlier(&self, at: u64) -> Option<Earlier> {
        self.before.iter().find(|earlier| earlier.begun == at).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answers to faults from `at` to `end`. Then something else follows.
    fn read(streak: &mut Streak, mut at: u64, end: u64) -> Vec<u64> {
        let mut answers = Vec::new();
        while at < end {
            let Stretch { len, down } = streak.longest(at, 256);
            assert!(!down, "upwards");
            streak.answered(at, len);
            answers.push(len);
            at += len;
        }
        streak.end();
        answers
    }

    /// The same from `last` down to `first`.
    fn read_down(streak: &mut Streak, first: u64, last: u64) -> Vec<u64> {
        let (mut answers, mut left) = (Vec::new(), last + 1);
        while left > first {
            let Stretch { len, down } = streak.longest(left - 1, 256.min(left));
            assert!(down || len == 1, "downwards, once that is known");
            streak.answered(left - len, len);
            answers.push(len);
            left -= len;
        }
        streak.end();
        answers
    }

    #[test]
    fn a_sequence_may_go_down() {
        let mut streak = Streak::default();
        assert_eq!(read_down(&mut streak, 10, 137), [1, 2, 4, 8, 16, 32, 64, 11]);
        assert_eq!(read_down(&mut streak, 300, 300), [1]);
        assert_eq!(read_down(&mut streak, 10, 137), [64, 64]);
        // Down to the first block.
        assert_eq!(read_down(&mut streak, 0, 3), [1, 2, 1]);
        // The same blocks upwards.
        assert_eq!(read(&mut streak, 10, 137), [1, 2, 4, 8, 16, 32, 64]);
    }

    #[test]
    fn what_turns_round_begins_anew() {
        let mut streak = Streak::default();
        for (at, len, down) in [(50, 1, false), (51, 2, false), (49, 1, false), (48, 2, true), (50, 2, false)]
        {
            assert_eq!(streak.longest(at, 256), Stretch { len, down }, "at {at}");
            streak.answered(if down { at + 1 - len } else { at }, len);
        }
        assert!(streak.contains(50) && streak.contains(51) && !streak.contains(49) && !streak.contains(52));
    }

    #[test]
    fn a_sequence_that_is_repeated_is_given_in_halves() {
        let mut streak = Streak::default();
        assert_eq!(read(&mut streak, 10, 138), [1, 2, 4, 8, 16, 32, 64, 128]);
        assert_eq!(read(&mut streak, 300, 301), [1]);
        assert_eq!(read(&mut streak, 10, 138), [64, 64]);
        assert_eq!(read(&mut streak, 10, 138), [64, 64]);
    }

    #[test]
    fn a_sequence_of_few_blocks_that_is_repeated_is_given_at_once() {
        let mut streak = Streak::default();
        assert_eq!(read(&mut streak, 10, 12), [1, 2]);
        assert_eq!(read_down(&mut streak, 20, 21), [1, 2]);
        for _ in 0..3 {
            assert_eq!(read(&mut streak, 10, 12), [2]);
            assert_eq!(read_down(&mut streak, 20, 21), [2]);
        }
        assert_eq!(read(&mut streak, 10, 15), [2, 1, 1, 2], "it was longer this time");
    }

    #[test]
    fn a_sequence_that_becomes_longer_is_given_more_each_time() {
        let mut streak = Streak::default();
        read(&mut streak, 0, 16);
        assert_eq!(read(&mut streak, 0, 25), [8, 8, 8, 12]);
        assert_eq!(read(&mut streak, 0, 25), [15, 15]);
        assert_eq!(read(&mut streak, 0, 25), [15, 15]);
    }

    #[test]
    fn a_sequence_that_is_interrupted_continues() {
        let mut streak = Streak::default();
        read(&mut streak, 0, 32);
        for (at, len) in [(0, 16), (16, 16), (32, 1)] {
            assert_eq!(streak.longest(at, 256), Stretch { len, down: false });
            streak.answered(at, len);
            streak.may_end();
        }
    }

    #[test]
    fn a_sequence_that_becomes_shorter_is_given_less_each_time() {
        let mut streak = Streak::default();
        read(&mut streak, 0, 16);
        let answers: Vec<_> = (0..5).map(|_| read(&mut streak, 0, 1)).collect();
        assert_eq!(answers, [[8], [4], [2], [2], [2]], "down to few");
    }
}
