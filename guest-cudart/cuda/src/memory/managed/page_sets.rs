//! Which pages of pinned memory the program uses together, so that one exchange fetches all of them.
//!
//! The pages that a program has are taken away whenever it learns that work is done, and when it puts new
//! work on a stream. NCCL's thread needs the same few pages again each time. The short runs that the program
//! was given between two such times are a set. The access to one of them then gets the others as well.
//!
//! Nobody sees which of them the program really uses. So a set is forgotten now and then, and the program's
//! next accesses make a new one. Only bookkeeping: no pages, no device.

use std::collections::VecDeque;
use std::ops::Range;

use super::blocks::{Run, SHORT, SMALL};

/// Maximum number of runs of a set.
const MOST: usize = 32;
/// Maximum number of runs that come with another one, and of their bytes.
const MOST_MORE: usize = 15;
const MOST_BYTES: u64 = 64 << 10;
/// Number of sets that are remembered.
const REMEMBERED: usize = 8;
/// How often runs of a set come with another one before it is forgotten.
const TIMES: u32 = 16;

/// The runs that the program was given, by the time when they were taken away.
pub(super) struct PageSets {
    /// Since everything was taken away last.
    now: Set,
    /// Before that, the latest first. Each has at least two runs.
    before: VecDeque<Set>,
    /// Whether everything was taken away after the last run was given.
    over: bool,
}

#[derive(Default)]
struct Set {
    runs: Vec<Run>,
    /// How often runs of it have come with another one.
    times: u32,
}

impl Set {
    fn has(&self, run: &Run) -> bool {
        self.runs.iter().any(|other| other.meets(&run.range()))
    }

    fn add(&mut self, run: Run) {
        if self.runs.len() < MOST && !self.has(&run) {
            self.runs.push(run);
        }
    }
}

impl PageSets {
    pub const fn new() -> PageSets {
        let now = Set { runs: Vec::new(), times: 0 };
        PageSets { now, before: VecDeque::new(), over: false }
    }

    /// What the program has was taken away, or what it has of some memory.
    pub fn taken(&mut self) {
        self.over = true;
    }

    /// An access is about to get a run. Returns what is to come with it: runs of the set that had it last, of
    /// which the program was given nothing since everything was taken away. `has`: whether the program has
    /// something of a run now. `may`: whether a run may come.
    pub fn with(&mut self, run: Run, has: impl Fn(&Run) -> bool, may: impl Fn(&Run) -> bool) -> Vec<Run> {
        if std::mem::take(&mut self.over) {
            self.end(&has);
        }
        if run.len > SHORT {
            return Vec::new();
        }
        self.now.add(run);
        let Some(at) = self.before.iter().position(|set| set.has(&run)) else { return Vec::new() };
        if self.before[at].times >= TIMES {
            self.before.remove(at);
            return Vec::new();
        }
        let set = &mut self.before[at];
        let mut bytes = 0;
        let mut fits = |run: &Run| {
            bytes += run.len;
            bytes <= MOST_BYTES
        };
        // Neighbors may continue a sequence, of which the next access shows how long it is.
        let near = run.address.saturating_sub(SMALL)..run.address + run.len + SMALL;
        let is_new = |other: &Run| !other.meets(&near) && !self.now.has(other) && !has(other);
        let new = set.runs.iter().copied().filter(|other| is_new(other) && may(other));
        let more: Vec<Run> = new.take(MOST_MORE).take_while(&mut fits).collect();
        if !more.is_empty() {
            set.times += 1;
            self.now.times = self.now.times.max(set.times);
            more.iter().for_each(|run| self.now.add(*run));
        }
        more
    }

    /// Begins a new set with what the program still has.
    fn end(&mut self, has: impl Fn(&Run) -> bool) {
        let runs = self.now.runs.iter().copied().filter(has).collect();
        let set = std::mem::replace(&mut self.now, Set { runs, times: 0 });
        if set.runs.len() > 1 {
            self.before.retain(|before| !before.runs.iter().all(|run| set.has(run)));
            self.before.truncate(REMEMBERED - 1);
            self.before.push_front(set);
        }
    }

    /// There is nothing in a range any more.
    pub fn forget(&mut self, range: &Range<u64>) {
        for set in self.before.iter_mut().chain([&mut self.now]) {
            set.runs.retain(|run| !run.meets(range));
        }
        self.before.retain(|set| set.runs.len() > 1);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const fn page(n: u64) -> Run {
        Run { address: n * SMALL, len: SMALL }
    }

    /// A program, and the pages that it has.
    struct Program {
        sets: PageSets,
        has: BTreeSet<u64>,
    }

    impl Program {
        fn new() -> Program {
            Program { sets: PageSets::new(), has: BTreeSet::new() }
        }

        /// Accesses pages, and loses all. Returns the number of faults.
        fn step(&mut self, pages: &[u64]) -> usize {
            let faults = pages.iter().filter(|page| self.access(**page).is_some()).count();
            self.lose();
            faults
        }

        /// What came with a page, unless the program had it.
        fn access(&mut self, n: u64) -> Option<Vec<u64>> {
            if self.has.contains(&n) {
                return None;
            }
            let has = |run: &Run| self.has.contains(&(run.address / SMALL));
            let more = self.sets.with(page(n), has, |_| true).into_iter();
            let more: Vec<u64> = more.map(|run| run.address / SMALL).collect();
            assert!([n].iter().chain(&more).all(|page| self.has.insert(*page)), "it has one of {more:?}");
            Some(more)
        }

        fn lose(&mut self) {
            self.has.clear();
            self.sets.taken();
        }
    }

    #[test]
    fn pages_that_were_used_together_come_together() {
        let mut program = Program::new();
        assert_eq!([(); 3].map(|()| program.step(&[3, 9, 5, 7])), [4, 1, 1]);
        // Whichever is first, and with another one from then on.
        assert_eq!([(); 2].map(|()| program.step(&[5, 9, 3, 20, 7])), [2, 1]);
        // With other pages in between.
        assert_eq!(program.step(&[100, 102]), 2);
        assert_eq!(program.step(&[20, 3, 5, 7, 9]), 1);
    }

    #[test]
    fn pages_of_different_times_do_not_come_together() {
        let mut program = Program::new();
        for _ in 0..4 {
            for n in 0..REMEMBERED as u64 / 2 {
                program.step(&[10 * n, 10 * n + 2]);
            }
        }
        assert_eq!(program.access(10), Some(vec![12]));
        program.lose();
        // Slots of a ring, each used alone.
        for n in 0..100 {
            assert_eq!(program.access(200 + n % 10), Some(vec![]));
            program.lose();
        }
    }

    #[test]
    fn what_is_no_longer_used_is_forgotten_in_time() {
        let mut program = Program::new();
        program.step(&[1, 3, 5, 7, 9]);
        let times = (0..).take_while(|_| {
            let more = program.access(1);
            program.lose();
            more.is_some_and(|more| more == [3, 5, 7, 9])
        });
        assert_eq!(times.count(), TIMES as usize);
        assert_eq!(program.access(1), Some(vec![]));
        program.lose();
        // What is used is learned again.
        let faults: usize = (0..10 * (TIMES as usize + 1)).map(|_| program.step(&[1, 3, 5])).sum();
        assert_eq!(faults, 10 * (TIMES as usize + 3));
    }

    #[test]
    fn a_page_comes_along_once() {
        let mut program = Program::new();
        program.step(&[1, 3, 5]);
        assert_eq!(program.access(1), Some(vec![3, 5]));
        // A device has changed these.
        program.has.remove(&1);
        program.has.remove(&3);
        assert_eq!(program.access(1), Some(vec![]));
        assert_eq!(program.access(3), Some(vec![]));
    }

    #[test]
    fn pages_that_stay_with_the_program_remain_in_its_set() {
        let mut program = Program::new();
        assert_eq!([1, 3, 5].map(|n| program.access(n)), [const { Some(vec![]) }; 3]);
        program.has.retain(|n| *n != 1);
        program.sets.taken();
        program.access(1);
        program.lose();
        assert_eq!(program.access(3), Some(vec![5, 1]));
    }

    #[test]
    fn little_comes_along() {
        let mut program = Program::new();
        let many: Vec<u64> = (0..100).map(|n| 2 * n).collect();
        program.step(&many);
        assert_eq!(program.access(0).map(|more| more.len()), Some(MOST_MORE));
        let mut sets = PageSets::new();
        for n in 0..20 {
            sets.with(Run { address: 4 * n * SMALL, len: SHORT }, |_| false, |_| true);
        }
        sets.taken();
        let more = sets.with(page(0), |_| false, |_| true);
        assert_eq!(more.iter().map(|run| run.len).sum::<u64>(), MOST_BYTES);
        assert!(sets.with(Run { address: 1 << 30, len: SHORT + 1 }, |_| false, |_| true).is_empty());
        assert!(!sets.now.has(&Run { address: 1 << 30, len: SHORT + 1 }));
    }

    #[test]
    fn neighbors_do_not_come_along() {
        let mut program = Program::new();
        program.step(&[4, 1, 2, 3, 9]);
        assert_eq!(program.access(2), Some(vec![4, 9]));
        assert_eq!(program.access(3), Some(vec![1]));
        program.lose();
        assert_eq!(program.access(9), Some(vec![2, 4, 3, 1]));
        // Nor does a part of a longer run.
        program.lose();
        program.access(2);
        program.has.clear();
        let both = Run { len: SHORT, ..page(2) };
        assert!(program.sets.with(both, |_| false, |_| true).is_empty());
    }

    #[test]
    fn memory_that_is_gone_does_not_come() {
        let mut program = Program::new();
        program.step(&[1, 3, 5]);
        program.sets.forget(&page(3).range());
        assert_eq!(program.access(1), Some(vec![5]));
        program.lose();
        program.sets.forget(&page(5).range());
        assert_eq!(program.access(1), Some(vec![]));
    }
}
