//! Which side has which block of a piece of managed memory. Only bookkeeping: no pages, no device.
//!
//! A piece is divided into blocks. A block is the device's, or the host has a copy of it: clean while the
//! program has only read it, otherwise dirty. Work of the device takes all of them back, dirty ones with
//! their bytes. Consecutive faults are answered with longer and longer runs of blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::read_ahead::{Streak, Stretch};

/// Size of a block of managed memory, in bytes.
pub(crate) const BLOCK: u64 = 64 << 10;
/// How often a block that a device keeps changing is read again.
pub(super) const MOST_READINGS: usize = 8;
/// Size of a block of pinned memory, in bytes: a page, because a program may poll a word while the device
/// works.
pub(crate) const SMALL: u64 = client::pages::PAGE as u64;
/// Maximum size of a run of pinned memory that may have a word that the program polls, and not a part of a
/// longer sequence.
pub(super) const SHORT: u64 = 2 * SMALL;
/// Maximum bytes that one fault fetches, of managed and of pinned memory.
const LONGEST: u64 = 4 << 20;
const LONGEST_SMALL: u64 = 1 << 20;

/// Contiguous bytes: whole blocks, except at the end of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub address: u64,
    pub len: u64,
}

impl Run {
    pub fn range(&self) -> Range<u64> {
        self.address..self.address + self.len
    }

    pub fn meets(&self, range: &Range<u64>) -> bool {
        self.address < range.end && range.start < self.address + self.len
    }
}

/// What a fault needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nothing: the access will succeed now.
    Nothing,
    /// The device's bytes, which are all zero.
    Zeroes(Run),
    /// The device's bytes.
    Fetch(Run),
    /// Write access to the host's copy.
    Allow(Run),
}

/// The blocks of a piece.
#[derive(Debug)]
pub(crate) struct Blocks {
    base: u64,
    size: u64,
    /// Bytes of a block.
    grain: u64,
    /// The blocks that the host has: their numbers, and whether they are dirty.
    host: BTreeMap<u64, bool>,
    /// Whether the device's bytes are all zero, and no work has been enqueued since that was known.
    zero: bool,
    fetched: Streak,
    allowed: Streak,
    /// Blocks with words for which the program waits. Each is given alone.
    polled: BTreeSet<u64>,
}

impl Blocks {
    /// All blocks are the device's. `zero`: whether they are known to be zero. `grain`: the size of a block.
    pub fn new(base: u64, size: u64, grain: u64, zero: bool) -> Blocks {
        let (fetched, allowed) = <(Streak, Streak)>::default();
        let (host, polled) = <(BTreeMap<_, _>, BTreeSet<_>)>::default();
        Blocks { base, size, grain, host, zero, fetched, allowed, polled }
    }

    /// Whether the device's bytes are known to be zero.
    pub fn is_zero(&self) -> bool {
        self.zero
    }

    /// Whether the device's next work changes anything here.
    pub fn is_held(&self) -> bool {
        self.zero || !self.host.is_empty()
    }

    fn run(&self, first: u64, count: u64) -> Run {
        let address = self.base + first * self.grain;
        Run { address, len: (count * self.grain).min(self.base + self.size - address) }
    }

    /// Numbers of the blocks that a range touches.
    fn numbers(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.clamp(self.base, self.base + self.size) - self.base;
        let start = range.start.clamp(self.base, self.base + self.size) - self.base;
        start / self.grain..end.div_ceil(self.grain)
    }

    /// The block of an address.
    pub fn block(&self, address: u64) -> Run {
        self.run((address - self.base) / self.grain, 1)
    }

    /// What an access needs. Recorded only when it [is given](Self::given).
    pub fn fault(&self, address: u64, write: bool) -> Answer {
        let at = (address - self.base) / self.grain;
        let all = self.size.div_ceil(self.grain);
        let streak = if self.host.contains_key(&at) { &self.allowed } else { &self.fetched };
        let longest = if self.grain == SMALL { LONGEST_SMALL } else { LONGEST };
        let most = if self.polled.contains(&at) { 1 } else { longest / self.grain };
        let Stretch { len, down } = streak.longest(at, most);
        // As far as the blocks are like this one, and the program waits for words in none of the others.
        let alike = |wanted: Option<bool>| {
            let fits =
                |n: &u64| self.host.get(n).copied() == wanted && (*n == at || !self.polled.contains(n));
            let (low, high) = (at.saturating_sub(len - 1), (at + len).min(all));
            match down {
                false => self.run(at, (at..high).take_while(fits).count() as u64),
                true => {
                    let count = (low..=at).rev().take_while(fits).count() as u64;
                    self.run(at + 1 - count, count)
                }
            }
        };
        match self.host.get(&at) {
            None if self.zero => Answer::Zeroes(alike(None)),
            None => Answer::Fetch(alike(None)),
            Some(false) if write => Answer::Allow(alike(Some(false))),
            Some(_) => Answer::Nothing,
        }
    }

    /// The host has been given a run, which answers an access.
    pub fn given(&mut self, run: Run, write: bool) {
        let numbers = self.numbers(&run.range());
        let first = numbers.start;
        let streak = if self.host.contains_key(&first) { &mut self.allowed } else { &mut self.fetched };
        if !self.polled.contains(&first) {
            streak.answered(first, numbers.end - first);
        }
        self.host.extend(numbers.map(|n| (n, write)));
    }

    /// The host has been given a run to read with another one, which answers an access.
    pub fn came_along(&mut self, run: Run) {
        let numbers = self.numbers(&run.range());
        self.host.extend(numbers.map(|n| (n, false)));
    }

    /// Notes whether the program waits for words in the block of an address.
    pub fn set_polled(&mut self, address: u64, polled: bool) {
        let block = (address - self.base) / self.grain;
        if polled {
            self.polled.insert(block)
        } else {
            self.polled.remove(&block)
        };
    }

    /// Whether the program waits for words in the block of an address, as far as is known.
    pub fn is_polled(&self, address: u64) -> bool {
        self.polled.contains(&((address - self.base) / self.grain))
    }

    /// The program writes to a block, for example that it has read something.
    pub fn writes(&mut self, address: u64) {
        if !self.fetched.contains((address - self.base) / self.grain) {
            self.fetched.may_end();
        }
    }

    /// The program learns that there is something new to read.
    pub fn has_news(&mut self) {
        self.fetched.may_end();
    }

    /// The device has the same bytes again in a range of which the host keeps its copies.
    pub fn cleaned(&mut self, range: &Range<u64>) {
        let numbers = self.numbers(range);
        self.host.range_mut(numbers).for_each(|(_, dirty)| *dirty = false);
    }

    fn runs(&self, range: &Range<u64>, wanted: impl Fn(bool) -> bool) -> Vec<Run> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (n, dirty) in self.host.range(self.numbers(range)) {
            match runs.last_mut() {
                _ if !wanted(*dirty) => {}
                Some((first, count)) if *first + *count == *n => *count += 1,
                _ => runs.push((*n, 1)),
            }
        }
        runs.into_iter().map(|(first, count)| self.run(first, count)).collect()
    }

    /// What must be sent to the device before it works on a range.
    pub fn dirty(&self, range: &Range<u64>) -> Vec<Run> {
        self.runs(range, |dirty| dirty)
    }

    /// The host's copies in a range.
    pub fn held(&self, range: &Range<u64>) -> Vec<Run> {
        self.runs(range, |_| true)
    }

    /// Gives a range back to the device, which may change it.
    pub fn taken(&mut self, range: &Range<u64>) {
        let numbers = self.numbers(range);
        let held: Vec<u64> = self.host.range(numbers.clone()).map(|(n, _)| *n).collect();
        for n in held {
            self.host.remove(&n);
        }
        if !numbers.is_empty() {
            self.zero = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BASE: u64 = 0x2000_0000_1000;

    #[test]
    fn faults_in_a_row_are_answered_with_longer_and_longer_runs() {
        let mut blocks = Blocks::new(BASE, 1 << 30, BLOCK, false);
        let mut at = BASE;
        let mut lengths = Vec::new();
        for _ in 0..9 {
            let Answer::Fetch(run) = blocks.fault(at, false) else { panic!() };
            blocks.given(run, false);
            lengths.push(run.len / BLOCK);
            at += run.len;
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        let Answer::Fetch(run) = blocks.fault(BASE + (500 << 20), false) else { panic!() };
        assert_eq!(run.len, BLOCK);
    }

    #[test]
    fn faults_that_go_down_are_answered_with_longer_runs_that_end_there() {
        let mut blocks = Blocks::new(BASE, 1 << 20, SMALL, false);
        // glibc copies the first bytes first, and then from the end.
        let mut faults = vec![0];
        faults.extend((0..128).rev());
        let (mut runs, mut given) = (Vec::new(), BTreeSet::new());
        for at in faults {
            if given.contains(&at) {
                continue;
            }
            let Answer::Fetch(run) = blocks.fault(BASE + at * SMALL + 8, false) else { panic!() };
            let first = (run.address - BASE) / SMALL;
            assert!((first..first + run.len / SMALL).contains(&at));
            blocks.given(run, false);
            given.extend(first..first + run.len / SMALL);
            runs.push((first, run.len / SMALL));
        }
        assert_eq!(runs, [(0, 1), (127, 1), (125, 2), (121, 4), (113, 8), (97, 16), (65, 32), (1, 64)]);
    }

    #[test]
    fn what_comes_along_answers_no_fault() {
        let mut blocks = Blocks::new(BASE, 1 << 20, SMALL, false);
        let page = |n: u64| Run { address: BASE + n * SMALL, len: SMALL };
        blocks.given(page(10), false);
        blocks.came_along(page(50));
        assert_eq!(blocks.fault(page(10).address, true), Answer::Allow(page(10)));
        assert_eq!(blocks.fault(page(50).address, false), Answer::Nothing);
        assert_eq!(blocks.fault(page(50).address, true), Answer::Allow(page(50)));
        // The next page continues the sequence of the other one only.
        assert_eq!(blocks.fault(page(51).address, false), Answer::Fetch(page(51)));
        assert_eq!(blocks.fault(page(11).address, false), Answer::Fetch(Run { len: 2 * SMALL, ..page(11) }));
        assert_eq!(blocks.held(&(0..u64::MAX)), [page(10), page(50)]);
    }

    #[test]
    fn the_last_block_ends_with_the_piece() {
        let blocks = Blocks::new(BASE, BLOCK + 4096, BLOCK, true);
        let last = Run { address: BASE + BLOCK, len: 4096 };
        assert_eq!(blocks.fault(BASE + BLOCK + 5, true), Answer::Zeroes(last));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Host { at: u64, write: bool },
        Device { start: u64, len: u64, write: bool },
    }

    fn step() -> impl Strategy<Value = Step> {
        const SIZE: u64 = 5 * BLOCK + 8192;
        prop_oneof![
            3 => (0..SIZE, any::<bool>()).prop_map(|(at, write)| Step::Host { at, write }),
            1 => (0..SIZE, 1..SIZE, any::<bool>()).prop_map(|(start, len, write)| Step::Device {
                start,
                len: len.min(SIZE - start),
                write
            }),
        ]
    }

    proptest! {
        /// A machine with three memories of one byte per page: what the program should see, what the device
        /// has, and what the host has.
        #[test]
        fn both_sides_always_see_the_last_write(steps in proptest::collection::vec(step(), 1..200), zero: bool) {
            const PAGES: usize = (5 * BLOCK as usize + 8192) / 4096;
            let page = |address: u64| ((address - BASE) / 4096) as usize;
            let pages = |run: Run| page(run.address)..page(run.address) + (run.len / 4096) as usize;
            let first: u8 = if zero { 0 } else { 1 };
            let (mut right, mut device) = ([first; PAGES], [first; PAGES]);
            let mut host: [Option<(u8, bool)>; PAGES] = [None; PAGES];
            let mut blocks = Blocks::new(BASE, PAGES as u64 * 4096, BLOCK, zero);
            let mut value = 2u8;
            for step in steps {
                value = value.wrapping_add(1).max(2);
                match step {
                    Step::Host { at, write } => {
                        let address = BASE + at;
                        let allowed = |host: &[Option<(u8, bool)>; PAGES]| {
                            host[page(address)].is_some_and(|(_, writable)| writable || !write)
                        };
                        if !allowed(&host) {
                            match blocks.fault(address, write) {
                                Answer::Nothing => prop_assert!(false, "a fault for nothing"),
                                Answer::Zeroes(run) => {
                                    pages(run).for_each(|n| host[n] = Some((0, write)));
                                    blocks.given(run, write);
                                }
                                Answer::Fetch(run) => {
                                    pages(run).for_each(|n| {
                                        assert!(host[n].is_none());
                                        host[n] = Some((device[n], write));
                                    });
                                    blocks.given(run, write);
                                }
                                Answer::Allow(run) => {
                                    pages(run).for_each(|n| host[n] = host[n].map(|(v, _)| (v, true)));
                                    blocks.given(run, write);
                                }
                            }
                        }
                        prop_assert!(allowed(&host));
                        prop_assert_eq!(host[page(address)].map(|(v, _)| v), Some(right[page(address)]));
                        if write {
                            host[page(address)] = Some((value, true));
                            right[page(address)] = value;
                        }
                    }
                    Step::Device { start, len, write } => {
                        let range = BASE + start..BASE + start + len;
                        for run in blocks.dirty(&range) {
                            pages(run).for_each(|n| device[n] = host[n].unwrap().0);
                        }
                        for run in blocks.held(&range) {
                            pages(run).for_each(|n| host[n] = None);
                        }
                        blocks.taken(&range);
                        let touched = page(range.start)..page(range.end - 1) + 1;
                        for n in touched {
                            prop_assert_eq!(device[n], right[n]);
                            if write {
                                (device[n], right[n]) = (value, value);
                            }
                        }
                    }
                }
            }
            prop_assert_eq!(blocks.held(&(0..u64::MAX)).is_empty() && !blocks.zero, !blocks.is_held());
        }
    }
}
