//! Device memory that streams free, each in its own order.
//!
//! ```text
//!  slab ├─ in use ─┼─ pending of A ─┼─ in use ─┼─ pending of B ─┼─ free ─┤
//! ```
//!
//! A slab is one allocation as the server knows it; the program's allocations in it are known only to this
//! process. So a range can be used anew while the server still holds back work that uses it.
//!
//! What a stream frees is pending until the stream has passed the free. Until then only that stream can have
//! it again, at once and in any size, because whatever it does next comes behind all that used the memory:
//! ranges that it has freed are merged with each other and with free ones beside them. Then it is free, for
//! all streams. A slab that is entirely free can be given back.
//!
//! Memory that is not part of a slab is pending as a whole when a stream has freed it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::ranges::FreeRanges;
use crate::seq::Seq;

/// The slabs of one device's memory. `S` is whose free it is.
#[derive(Debug)]
pub(crate) struct Ordered<S> {
    slabs: BTreeMap<u64, Slab>,
    /// Those without bytes in use or pending.
    empty: BTreeSet<u64>,
    /// What no stream uses, except in what is pending as a whole.
    free: FreeRanges,
    pending: BTreeMap<S, Pending>,
}

#[derive(Debug)]
struct Slab {
    size: u64,
    /// Bytes in use or pending.
    used: u64,
    /// An allocation outside slabs that was freed.
    whole: bool,
}

/// What was freed by one `S`.
#[derive(Debug, Default)]
struct Pending {
    /// What it can have again, merged.
    ranges: FreeRanges,
    /// What is pending as a whole: sizes and addresses.
    whole: BTreeSet<(u64, u64)>,
    /// The same bytes, by where the stream frees them.
    parts: BTreeMap<u64, Part>,
    /// The starts of these in the order of their marks.
    by_mark: BTreeSet<(u64, u64)>,
}

#[derive(Debug, Clone, Copy)]
struct Part {
    len: u64,
    mark: Seq,
}

impl Pending {
    fn put(&mut self, start: u64, len: u64, mark: Seq) {
        self.parts.insert(start, Part { len, mark });
        self.by_mark.insert((mark.in_timeline(), start));
    }

    /// Removes a range. Its ends may be inside of parts.
    fn take(&mut self, range: Range<u64>) {
        self.ranges.remove(range.start, range.end - range.start);
        while let Some((&start, &Part { len, mark })) = self.parts.range(..range.end).next_back()
            && start + len > range.start
        {
            self.parts.remove(&start);
            self.by_mark.remove(&(mark.in_timeline(), start));
            if start + len > range.end {
                self.put(range.end, start + len - range.end, mark);
            }
            if start < range.start {
                self.put(start, range.start - start, mark);
            }
        }
    }
}

impl<S> Ordered<S> {
    /// No memory.
    pub(crate) fn new() -> Self {
        Ordered {
            slabs: BTreeMap::new(),
            empty: BTreeSet::new(),
            free: FreeRanges::new(),
            pending: BTreeMap::new(),
        }
    }
}

impl<S: Ord> Ordered<S> {
    /// Bytes that every stream can have.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.total()
    }

    /// Bytes that only `by` can have now.
    pub(crate) fn pending_bytes(&self, by: &S) -> u64 {
        self.pending.get(by).map_or(0, |pending| pending.ranges.total())
    }

    /// Whether anything is pending or could be given back.
    pub(crate) fn has_freed(&self) -> bool {
        !self.pending.is_empty() || !self.empty.is_empty()
    }

    /// Adds a slab, which is free.
    pub(crate) fn add(&mut self, start: u64, size: u64) {
        self.slabs.insert(start, Slab { size, used: 0, whole: false });
        self.empty.insert(start);
        self.free.insert_within(start, size, start..start + size);
    }

    /// Takes `len` bytes for `by`: from the shortest range that is long enough, of what it has freed itself
    /// or what is free.
    pub(crate) fn take(&mut self, by: &S, len: u64) -> Option<u64> {
        let own = self.pending.get(by).and_then(|pending| pending.ranges.best(len));
        let best = match (own, self.free.best(len)) {
            (Some(own), Some(free)) => Some(if own.1 <= free.1 { own } else { free }),
            (own, free) => own.or(free),
        };
        let start = best.map(|(start, _)| start).or_else(|| self.joined(by, len))?;
        let slab = self.slab(start)?;
        self.claim(by, start..start + len);
        self.empty.remove(&slab.start);
        Some(start)
    }

    /// The start of the shortest run of ranges that `by` has freed and of free ones that is long enough.
    fn joined(&self, by: &S, len: u64) -> Option<u64> {
        let own = &self.pending.get(by)?.ranges;
        if own.total() + self.free.total() < len {
            return None;
        }
        let (mut best, mut end): (Option<(u64, u64)>, u64) = (None, 0);
        for (start, size) in own.iter() {
            if start < end {
                continue;
            }
            let bounds = self.slab(start)?;
            let before = self.free.ending_at(start).filter(|(before, _)| *before >= bounds.start);
            let run = before.map_or(start, |(before, _)| before);
            end = start + size;
            while end < bounds.end
                && let Some((_, more)) = self.free.containing(end).or_else(|| own.containing(end))
            {
                end += more;
            }
            if end - run >= len && best.is_none_or(|(shortest, _)| end - run < shortest) {
                best = Some((end - run, run));
            }
        }
        best.map(|(_, start)| start)
    }

    /// Takes a range, each byte of which `by` has freed or is free.
    fn claim(&mut self, by: &S, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let mut own = self.pending.get_mut(by).filter(|own| own.ranges.containing(at).is_some());
            let found = own.as_ref().map_or(&self.free, |own| &own.ranges).containing(at);
            let Some((start, len)) = found else { return };
            let part = at..range.end.min(start + len);
            at = part.end;
            match &mut own {
                Some(own) => own.take(part),
                None => {
                    self.free.remove(part.start, part.end - part.start);
                    if let Some((_, slab)) = self.slabs.range_mut(..=part.start).next_back() {
                        slab.used += part.end - part.start;
                    }
                }
            }
        }
    }

    /// Takes an allocation of `len` bytes that `by` has freed and that is pending as a whole.
    pub(crate) fn take_whole(&mut self, by: &S, len: u64) -> Option<u64> {
        let pending = self.pending.get_mut(by)?;
        let (_, start) = *pending.whole.range((len, 0)..=(len, u64::MAX)).next()?;
        pending.whole.remove(&(len, start));
        pending.take(start..start + len);
        self.slabs.remove(&start);
        Some(start)
    }

    /// A range of a slab is used no more.
    pub(crate) fn give(&mut self, start: u64, len: u64) {
        let Some(bounds) = self.slab(start) else { return };
        self.free.insert_within(start, len, bounds);
        self.is_unused(start, len);
    }

    fn is_unused(&mut self, start: u64, len: u64) {
        if let Some((slab, found)) = self.slabs.range_mut(..=start).next_back() {
            found.used -= len;
            if found.used == 0 {
                self.empty.insert(*slab);
            }
        }
    }

    /// A range of a slab is used no more when the stream of `by` has passed the mark.
    pub(crate) fn give_in_order(&mut self, by: S, mark: Seq, start: u64, len: u64) {
        let Some(bounds) = self.slab(start) else { return };
        let pending = self.pending.entry(by).or_default();
        pending.ranges.insert_within(start, len, bounds);
        pending.put(start, len, mark);
    }

    /// The same for an allocation outside slabs.
    pub(crate) fn give_whole_in_order(&mut self, by: S, mark: Seq, start: u64, len: u64) {
        self.slabs.insert(start, Slab { size: len, used: len, whole: true });
        let pending = self.pending.entry(by).or_default();
        pending.whole.insert((len, start));
        pending.put(start, len, mark);
    }

    /// Frees what is pending and whose marks were passed. Of each `S`, it asks for marks in their order, and
    /// only until one was not passed.
    pub(crate) fn pass(&mut self, passed: impl Fn(&S, Seq) -> bool) {
        let mut pending = std::mem::take(&mut self.pending);
        pending.retain(|by, pending| {
            while let Some((_, start)) = pending.by_mark.first()
                && let Some((&start, &Part { len, mark })) = pending.parts.get_key_value(start)
                && passed(by, mark)
            {
                pending.take(start..start + len);
                if pending.whole.remove(&(len, start)) {
                    self.is_unused(start, len);
                } else {
                    self.give(start, len);
                }
            }
            !pending.parts.is_empty()
        });
        self.pending = pending;
    }

    /// Everything that has something pending, with the last of its marks.
    pub(crate) fn waits(&self) -> impl Iterator<Item = (&S, Seq)> {
        self.pending.iter().filter_map(|(by, pending)| {
            let (_, start) = pending.by_mark.last()?;
            Some((by, pending.parts.get(start)?.mark))
        })
    }

    /// A slab that can be given back, and whether it was an allocation outside slabs.
    pub(crate) fn empty(&self) -> Option<(u64, bool)> {
        let start = self.empty.first()?;
        Some((*start, self.slabs.get(start)?.whole))
    }

    /// Removes a slab that can be given back. Returns its size in bytes.
    pub(crate) fn remove_empty(&mut self, start: u64) -> Option<u64> {
        if !self.empty.remove(&start) {
            return None;
        }
        let slab = self.slabs.remove(&start)?;
        if !slab.whole {
            self.free.remove(start, slab.size);
        }
        Some(slab.size)
    }

    /// The slab that contains an address.
    fn slab(&self, address: u64) -> Option<Range<u64>> {
        let (start, slab) = self.slabs.range(..=address).next_back()?;
        (address - start < slab.size).then_some(*start..start + slab.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    /// What a byte is.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Byte {
        /// In no slab.
        Outside,
        Used,
        Free,
        /// Freed by this stream at this mark.
        Pending(usize, u64),
    }

    const STREAMS: usize = 3;
    /// Slabs begin at multiples of this, and may be as large.
    const SLAB: u64 = 40;

    /// Every byte on its own.
    struct Model {
        bytes: Vec<Byte>,
        slabs: BTreeMap<u64, u64>,
        /// The mark that each stream has passed.
        passed: [u64; STREAMS],
    }

    impl Model {
        fn range(&mut self, start: u64, len: u64) -> &mut [Byte] {
            &mut self.bytes[start as usize..(start + len) as usize]
        }

        fn is_anyones(byte: Byte, stream: usize) -> bool {
            byte == Byte::Free || matches!(byte, Byte::Pending(by, _) if by == stream)
        }

        /// The longest run in a slab that a stream can have.
        fn longest(&mut self, stream: usize) -> u64 {
            let slabs = self.slabs.clone();
            let runs = slabs.iter().flat_map(|(start, size)| {
                let bytes = self.range(*start, *size).to_vec();
                bytes
                    .split(|byte| !Self::is_anyones(*byte, stream))
                    .map(|run| run.len() as u64)
                    .collect::<Vec<_>>()
            });
            runs.max().unwrap_or(0)
        }

        fn count(&self, which: impl Fn(Byte) -> bool) -> u64 {
            self.bytes.iter().filter(|byte| which(**byte)).count() as u64
        }
    }

    fn seq(mark: u64) -> Seq {
        Seq::for_tests(0, mark)
    }

    proptest! {
        #[test]
        fn streams_get_what_is_free_and_what_they_have_freed(steps in proptest::collection::vec((0..STREAMS, 1..SLAB, any::<u16>()), 1..200)) {
            let mut model = Model { bytes: vec![Byte::Outside; 400], slabs: BTreeMap::new(), passed: [0; STREAMS] };
            let mut ordered = Ordered::new();
            let mut held: Vec<(u64, u64)> = Vec::new();
            let mut mark = 1;
            for (stream, len, choice) in steps {
                let at = choice as usize / 8;
                match choice % 8 {
                    0..3 => {
                        let longest = model.longest(stream);
                        let taken = ordered.take(&stream, len);
                        prop_assert_eq!(taken.is_some(), len <= longest, "{} of {}", len, longest);
                        if let Some(start) = taken {
                            let range = model.range(start, len);
                            prop_assert!(range.iter().all(|byte| Model::is_anyones(*byte, stream)));
                            range.fill(Byte::Used);
                            prop_assert!(start % SLAB + len <= SLAB, "across slabs");
                            held.push((start, len));
                        } else if let Some(start) = (0..400 / SLAB).map(|n| n * SLAB).find(|at| !model.slabs.contains_key(at)) {
                            let size = if at.is_multiple_of(2) { SLAB } else { len };
                            ordered.add(start, size);
                            model.slabs.insert(start, size);
                            model.range(start, size).fill(Byte::Free);
                        }
                    }
                    3..6 if !held.is_empty() => {
                        let (start, len) = held.swap_remove(at % held.len());
                        if choice % 8 == 3 {
                            ordered.give(start, len);
                            model.range(start, len).fill(Byte::Free);
                        } else {
                            // Some have the same mark.
                            mark += at as u64 % 2;
                            ordered.give_in_order(stream, seq(mark), start, len);
                            model.range(start, len).fill(Byte::Pending(stream, mark));
                        }
                    }
                    6 => {
                        model.passed[stream] = mark - (at as u64 % 4).min(mark);
                        let passed = model.passed;
                        ordered.pass(|by, mark| mark.is_reached_at(passed[*by]));
                        for byte in &mut model.bytes {
                            if matches!(*byte, Byte::Pending(by, mark) if mark <= passed[by]) {
                                *byte = Byte::Free;
                            }
                        }
                    }
                    _ => {
                        let mut empty = Vec::new();
                        while let Some((start, whole)) = ordered.empty() {
                            prop_assert!(!whole);
                            let size = ordered.remove_empty(start);
                            prop_assert_eq!(size, model.slabs.get(&start).copied());
                            empty.push(start);
                        }
                        let all: Vec<(u64, u64)> = model.slabs.iter().map(|(start, size)| (*start, *size)).collect();
                        for (start, size) in all {
                            let is_free = model.range(start, size).iter().all(|byte| *byte == Byte::Free);
                            prop_assert_eq!(is_free, empty.contains(&start));
                            if is_free {
                                model.slabs.remove(&start);
                                model.range(start, size).fill(Byte::Outside);
                            }
                        }
                    }
                }
                prop_assert_eq!(ordered.free_bytes(), model.count(|byte| byte == Byte::Free));
                for stream in 0..STREAMS {
                    let pending = model.count(|byte| matches!(byte, Byte::Pending(by, _) if by == stream));
                    prop_assert_eq!(ordered.pending_bytes(&stream), pending);
                }
            }
            for (start, len) in held {
                ordered.give_in_order(0, seq(mark), start, len);
            }
            ordered.pass(|_, _| true);
            prop_assert!(ordered.waits().next().is_none());
            prop_assert_eq!(ordered.free_bytes(), model.slabs.values().sum::<u64>());
            for start in model.slabs.keys() {
                prop_assert!(ordered.remove_empty(*start).is_some());
            }
            prop_assert_eq!((ordered.free_bytes(), ordered.has_freed()), (0, false));
        }
    }

    #[test]
    fn what_is_pending_as_a_whole_is_never_divided() {
        let mut ordered = Ordered::new();
        ordered.give_whole_in_order('a', seq(1), 0, 10);
        ordered.give_whole_in_order('a', seq(2), 10, 20);
        assert_eq!(
            (ordered.take(&'a', 5), ordered.take_whole(&'a', 15), ordered.take_whole(&'b', 20)),
            (None, None, None)
        );
        assert_eq!(ordered.take_whole(&'a', 20), Some(10));
        ordered.pass(|_, _| true);
        assert_eq!((ordered.take(&'a', 5), ordered.empty()), (None, Some((0, true))));
        assert_eq!((ordered.remove_empty(0), ordered.has_freed()), (Some(10), false));
    }

    #[test]
    fn only_the_first_mark_that_was_not_passed_is_looked_at() {
        const FREES: u64 = 10_000;
        let mut ordered = Ordered::new();
        ordered.add(0, 2 * FREES);
        for at in 0..FREES {
            assert_eq!(ordered.take(&'a', 1), Some(2 * at));
            assert_eq!(ordered.take(&'b', 1), Some(2 * at + 1));
        }
        for at in 0..2 * FREES {
            ordered.give_in_order(if at % 2 == 0 { 'a' } else { 'b' }, seq(at + 1), at, 1);
        }
        let looks = Cell::new(0);
        let pass = |ordered: &mut Ordered<char>, number| {
            ordered.pass(|_, mark| {
                looks.set(looks.get() + 1);
                mark.is_reached_at(number)
            });
            looks.take()
        };
        assert_eq!((pass(&mut ordered, 0), ordered.free_bytes()), (2, 0));
        assert_eq!((pass(&mut ordered, 100), ordered.free_bytes()), (102, 100));
        assert_eq!(pass(&mut ordered, 100), 2);
    }
}
