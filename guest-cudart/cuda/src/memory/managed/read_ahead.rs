//! How many blocks of managed or pinned memory one page fault gives.

use std::collections::VecDeque;

/// Number of earlier sequences that are remembered.
const REMEMBERED: usize = 32;

/// A sequence of faults, each at the block after the previous answer.
#[derive(Debug, Default)]
pub(super) struct Streak {
    begun: u64,
    next: u64,
    /// The last answer.
    len: u64,
    /// All answers.
    total: u64,
    /// What a sequence that began at the same block needed.
    expected: Option<u64>,
    /// Where earlier sequences began, and what each needed.
    before: VecDeque<(u64, u64)>,
}

impl Streak {
    /// How many blocks to give at block `at`, at most `most`. If the faults continue each other: twice as
    /// many as last time, or the rest of what an earlier sequence needed. Otherwise one, or half of what an
    /// earlier sequence needed that began here: the next fault shows whether this one is as long.
    pub fn longest(&self, at: u64, most: u64) -> u64 {
        let blocks = match self.expected {
            _ if !self.continues(at) => self.earlier(at).map_or(1, |needed| needed / 2),
            Some(needed) if needed > self.total => needed - self.total,
            Some(_) => self.total / 2,
            None => self.len * 2,
        };
        blocks.clamp(1, most.max(1))
    }

    /// Records that `len` blocks were given at block `at`.
    pub fn answered(&mut self, at: u64, len: u64) {
        if !self.continues(at) {
            self.end();
            (self.begun, self.total, self.expected) = (at, 0, self.earlier(at));
        }
        (self.next, self.len) = (at + len, len);
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
        self.len > 0 && (self.begun..self.next).contains(&at)
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
        self.before.retain(|(begun, _)| *begun != self.begun);
        self.before.truncate(REMEMBERED - 1);
        self.before.push_front((self.begun, needed));
        self.len = 0;
    }

    fn continues(&self, at: u64) -> bool {
        self.len > 0 && at == self.next
    }

    fn earlier(&self, at: u64) -> Option<u64> {
        self.before.iter().find(|(begun, _)| *begun == at).map(|(_, needed)| *needed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answers to faults from `at` to `end`. Then something else follows.
    fn read(streak: &mut Streak, mut at: u64, end: u64) -> Vec<u64> {
        let mut answers = Vec::new();
        while at < end {
            let len = streak.longest(at, 256);
            streak.answered(at, len);
            answers.push(len);
            at += len;
        }
        streak.end();
        answers
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
            assert_eq!(streak.longest(at, 256), len);
            streak.answered(at, len);
            streak.may_end();
        }
    }

    #[test]
    fn a_sequence_that_becomes_shorter_is_given_less_each_time() {
        let mut streak = Streak::default();
        read(&mut streak, 0, 16);
        let answers: Vec<_> = (0..5).map(|_| read(&mut streak, 0, 1)).collect();
        assert_eq!(answers, [[8], [4], [2], [1], [1]]);
    }
}
