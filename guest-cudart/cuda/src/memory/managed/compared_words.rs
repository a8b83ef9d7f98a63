//! Pinned memory whose words are compared: in pages that it shares with other memory of the program, which
//! cannot be watched, and in pieces that kernels of several servers or several processes use.
//!
//! A word that differs from the last known value was changed by one side and is sent to the other: the
//! program's changes before work of the device begins, the device's changes before the program learns that
//! work is done, and both periodically while the device works. A word of 8 bytes is never torn. The order of
//! changes to different words is kept only across comparisons.
//!
//! Either side may write data there and then a flag in a page that is watched. So what the program has
//! changed here is sent with what it has changed there, and what devices have changed here is taken before
//! the program gets new bytes there.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::result::Result;
use crate::memory::managed::changes::{change, words};
use crate::memory::managed::{ALL, STATE, State, mirror, pages};
use crate::process::context::{self, Context};
use crate::process::driver::driver;
use crate::process::work_signal::{self, COMPARED_PIECES, WORK};
use client::ops::memory::WordPatch;
use client::{lock, log};

/// The value of [`WORK`] when they were last compared with no work under way.
static COMPARED: AtomicU64 = AtomicU64::new(0);

/// Bytes that are compared with those of one server.
pub(crate) struct Compared {
    /// First address of their pinned piece.
    region: u64,
    context: &'static Context,
    bytes: Range<u64>,
    /// The last value of each word that both sides had. Empty while the device's are unknown: everything is
    /// sent then, as it is at that time.
    known: Vec<u64>,
}

impl Compared {
    pub fn new(region: u64, context: &'static Context, bytes: Range<u64>) -> Compared {
        Compared { region, context, bytes, known: Vec::new() }
    }

    /// Whole pages from `at`, of which both sides had `bytes` last.
    pub fn known(region: u64, context: &'static Context, at: u64, bytes: &[u8]) -> Compared {
        Compared { region, context, bytes: at..at + bytes.len() as u64, known: words(bytes) }
    }

    /// Whether there is still a server to compare with.
    fn is_alive(&self) -> bool {
        !self.context.is_given_up()
    }

    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.bytes.start < range.end && range.start < self.bytes.end
    }

    fn first(&self) -> u64 {
        self.bytes.start & !7
    }

    fn words(&self) -> usize {
        ((self.bytes.end - self.first()).div_ceil(8)) as usize
    }

    fn at(&self, i: usize) -> u64 {
        self.first() + 8 * i as u64
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        // SAFETY: aligned, and in a page of pinned memory, which stays until the piece is released.
        unsafe { AtomicU64::from_ptr(self.at(i) as *mut u64) }
    }

    /// A mask of the bytes of a word that belong to the piece.
    fn mask(&self, i: usize) -> u64 {
        let at = self.at(i);
        let inside = |n: &u64| self.bytes.contains(&(at + n));
        (0..8).filter(inside).fold(0, |mask, n| mask | 0xff << (8 * n))
    }

    /// Whether the program has changed something.
    fn is_changed(&self) -> bool {
        let is_changed =
            |(i, known): (usize, &u64)| (self.word(i).load(Ordering::Acquire) ^ known) & self.mask(i) != 0;
        self.known.is_empty() || self.known.iter().enumerate().any(is_changed)
    }

    /// Returns the program's changes, and makes them the known values.
    fn changes(&mut self) -> Vec<WordPatch> {
        let mut changes = Vec::new();
        let mut known = std::mem::take(&mut self.known);
        for i in 0..self.words() {
            let (address, mask, now) = (self.at(i), self.mask(i), self.word(i).load(Ordering::Acquire));
            match known.get_mut(i) {
                Some(known) => {
                    changes.extend(change(address, *known, now, mask));
                    *known = now;
                }
                None => {
                    changes.push(WordPatch { address, mask, value: now });
                    known.push(now);
                }
            }
        }
        self.known = known;
        changes
    }

    /// The words that the device has changed.
    fn differing(&self, device: &[u64]) -> impl Iterator<Item = usize> {
        let both = self.known.iter().zip(device).enumerate();
        both.filter(|(i, (known, there))| (**there ^ **known) & self.mask(*i) != 0).map(|(i, _)| i)
    }

    /// Whether the device has changed something.
    fn differs(&self, device: &[u64]) -> bool {
        self.differing(device).next().is_some()
    }

    /// Applies the device's changes. Returns whether there were any.
    fn take(&mut self, device: &[u64]) -> bool {
        let differing: Vec<usize> = self.differing(device).collect();
        // As when sending, words that stand alone come last.
        let mut rows: Vec<&[usize]> = differing.chunk_by(|a, b| a + 1 == *b).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.len()));
        let mut changed = false;
        for i in rows.concat() {
            let (mask, known, there) = (self.mask(i), self.known[i], device[i]);
            let taken = self.word(i).fetch_update(Ordering::AcqRel, Ordering::Acquire, |here| {
                // If the program has changed it meanwhile, its change stays and is sent next time.
                ((here ^ known) & mask == 0).then_some(here & !mask | there & mask)
            });
            if taken.is_ok() {
                self.known[i] = known & !mask | there & mask;
                changed = true;
            }
        }
        changed
    }
}

/// Whether there is something to compare.
pub(crate) fn is_due() -> bool {
    COMPARED_PIECES.load(Ordering::Acquire) != 0
        && WORK.load(Ordering::Acquire) != COMPARED.load(Ordering::Acquire)
}

/// Compares all of them if there may be something new.
#[inline]
pub(crate) fn compare_if_due() {
    if is_due() {
        compare_all();
    }
}

/// Compares all of them. Returns whether either side had changed something.
#[cold]
pub(crate) fn compare_all() -> bool {
    // Work from here on is counted and causes another comparison.
    let work = WORK.load(Ordering::Acquire);
    let over = !context::any_busy();
    let compared = compare();
    if over || compared.is_err() {
        COMPARED.store(work, Ordering::Release);
    }
    compared.unwrap_or_else(|status| {
        log::error(format_args!(
            "pinned memory that kernels have written cannot be fetched from the device ({status})"
        ));
        false
    })
}

/// Attempts to compare without holding the lock while the servers' words are on their way.
const ATTEMPTS: u32 = 3;

fn compare() -> Result<bool> {
    for _ in 0..ATTEMPTS {
        let mut state = lock(&STATE);
        let changed = state.send_compared(&ALL)?;
        let (version, mut there) = (state.version, state.places());
        drop(state);
        let read = read(&mut there);
        let mut state = lock(&STATE);
        // What was sent or taken meanwhile may have been read as it was before.
        if state.version == version {
            if read.is_err() {
                break;
            }
            return state.take_compared(&there).map(|taken| changed || taken);
        }
    }
    lock(&STATE).compare()
}

/// What one server has: a context, the first address, and its bytes, none if the server is lost.
type There = (&'static Context, u64, Vec<u8>);

fn read(there: &mut [There]) -> Result {
    let parts = there.iter_mut().filter(|(.., bytes)| !bytes.is_empty());
    mirror::read_in_order(parts.map(|(context, at, bytes)| (*context, *at, &mut bytes[..])).collect())
}

impl State {
    pub(crate) fn add_compared(&mut self, more: impl IntoIterator<Item = Compared>) {
        work_signal::exchange_by(compare_if_due);
        self.compared.extend(more);
        self.count_compared();
        work_signal::work_came();
    }

    /// Ends the comparing of a region's words, for the contexts that `which` selects.
    pub(crate) fn drop_compared(&mut self, region: u64, which: impl Fn(&'static Context) -> bool) {
        self.compared.retain(|one| one.region != region || !which(one.context));
        self.count_compared();
    }

    fn count_compared(&mut self) {
        self.version += 1;
        COMPARED_PIECES.store(self.compared.len(), Ordering::Release);
    }

    /// Sends the program's changes if there are any in the pages that a range touches, together with what it
    /// has changed in pages that are watched: either may tell kernels that the other is there.
    pub(crate) fn send_compared(&mut self, range: &Range<u64>) -> Result<bool> {
        let mut touched = self.compared.iter().filter(|one| one.touches(range) && one.is_alive());
        if !touched.any(Compared::is_changed) {
            return Ok(false);
        }
        self.publish_with(pages(driver()?)?, true)?;
        Ok(true)
    }

    /// The program's changes, with their servers' contexts. They become the known values.
    pub(super) fn changed_words(&mut self) -> Vec<(&'static Context, Vec<WordPatch>)> {
        let alive = self.compared.iter_mut().filter(|one| one.is_alive());
        let mut changes: Vec<_> = alive.map(|one| (one.context, one.changes())).collect();
        changes.retain(|(_, words)| !words.is_empty());
        self.version += u64::from(!changes.is_empty());
        changes
    }

    fn places(&self) -> Vec<There> {
        let place = |one: &Compared| {
            let size = if one.is_alive() { one.words() * 8 } else { 0 };
            (one.context, one.first(), vec![0; size])
        };
        self.compared.iter().map(place).collect()
    }

    /// Exchanges all changes.
    pub(crate) fn compare(&mut self) -> Result<bool> {
        let changed = self.send_compared(&ALL)?;
        let mut there = self.places();
        if let Err(status) = read(&mut there) {
            let is_lost = |(one, (.., bytes)): (&Compared, &There)| !bytes.is_empty() && !one.is_alive();
            let lost = self.compared.iter().zip(&there).any(is_lost);
            return if lost { self.compare() } else { Err(status) };
        }
        self.take_compared(&there).map(|taken| changed || taken)
    }

    /// Exchanges all changes before the program gets bytes of a device that works. Returns whether there were
    /// any.
    pub(super) fn compare_beside(&mut self) -> Result<bool> {
        if is_due() { self.compare() } else { Ok(false) }
    }

    /// Takes what the devices have changed, as it was read. What one server's device has changed is then also
    /// on its way to the others.
    fn take_compared(&mut self, there: &[There]) -> Result<bool> {
        let device: Vec<Vec<u64>> = there.iter().map(|(.., bytes)| words(bytes)).collect();
        if !self.compared.iter().zip(&device).any(|(one, device)| one.differs(device)) {
            return Ok(false);
        }
        // These words may tell the program that something is in pages that it has from before.
        self.sets.taken();
        self.part(driver()?, |together| together.pinned)?;
        self.version += 1;
        let mut changed = false;
        for (one, device) in self.compared.iter_mut().zip(&device) {
            changed |= one.take(device);
        }
        self.send_compared(&ALL)?;
        Ok(changed)
    }
}

/// Splits a piece into the parts in pages shared with other memory, and the whole pages.
pub(crate) fn cut(bytes: Range<u64>) -> (Vec<Range<u64>>, Option<Range<u64>>) {
    const PAGE: u64 = client::pages::PAGE as u64;
    let whole = bytes.start.next_multiple_of(PAGE)..bytes.end & !(PAGE - 1);
    if whole.is_empty() {
        return (vec![bytes], None);
    }
    let parts = [bytes.start..whole.start, whole.end..bytes.end];
    (parts.into_iter().filter(|part| !part.is_empty()).collect(), Some(whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::handle::ContextId;
    use proptest::prelude::*;

    #[test]
    fn what_the_program_writes_before_the_first_comparison_reaches_the_device() {
        let mut memory = [0u64; 2];
        let base = memory.as_mut_ptr() as u64;
        let context = Context::new(ContextId(0), crate::process::driver::Server::unused(), 0, 0, true);
        // Without the last byte of the second word.
        let mut compared = Compared::new(0, context, base..base + 15);
        memory.fill(u64::MAX - 1);
        assert!(compared.is_changed());
        let sent: Vec<u64> = compared.changes().iter().map(|patch| patch.apply(0)).collect();
        assert_eq!(sent, [u64::MAX - 1, (u64::MAX - 1) & (u64::MAX >> 8)]);
        assert!(!compared.is_changed() && !compared.take(&sent));
        assert_eq!(memory, [u64::MAX - 1; 2]);
    }

    proptest! {
        #[test]
        fn a_piece_is_cut_into_whole_pages_and_less_than_two_of_others(start in 0u64..20000, len in 1u64..40000) {
            let (parts, whole) = cut(start..start + len);
            let mut all: Vec<Range<u64>> = parts.iter().cloned().chain(whole.clone()).collect();
            all.sort_by_key(|part| part.start);
            prop_assert_eq!((all[0].start, all[all.len() - 1].end), (start, start + len));
            prop_assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert!(parts.iter().all(|part| part.end - part.start < 8192));
            prop_assert!(whole.is_none_or(|whole| whole.start % 4096 == 0 && whole.end % 4096 == 0));
        }

        #[test]
        fn both_sides_get_what_the_other_has_written_and_nothing_else_changes(
            start in 0usize..9, len in 1usize..40, steps in proptest::collection::vec((0usize..64, any::<u8>(), any::<bool>()), 0..60),
        ) {
            let mut memory = [0x5555_5555_5555_5555u64; 8];
            let base = memory.as_mut_ptr() as u64;
            let context = Context::new(ContextId(0), crate::process::driver::Server::unused(), 0, 0, true);
            let range = base + start as u64..base + (start + len).min(64) as u64;
            let mut compared = Compared::new(0, context, range.clone());
            let mut device = [0u8; 64];
            let exchange = |compared: &mut Compared, device: &mut [u8; 64]| {
                let first = (compared.first() - base) as usize;
                for patch in compared.changes() {
                    let at = (patch.address - base) as usize;
                    let word = u64::from_le_bytes(device[at..at + 8].try_into().unwrap());
                    device[at..at + 8].copy_from_slice(&patch.apply(word).to_le_bytes());
                }
                let words: Vec<u64> =
                    device[first..].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect();
                compared.take(&words);
            };
            exchange(&mut compared, &mut device);
            let mut expected = [0x55u8; 64];
            for (at, value, by_host) in steps {
                let here = range.contains(&(base + at as u64));
                if by_host {
                    // SAFETY: inside the array, which nothing else uses.
                    unsafe { (base as *mut u8).add(at).write_volatile(value) };
                    expected[at] = value;
                } else if here {
                    device[at] = value;
                    expected[at] = value;
                }
                exchange(&mut compared, &mut device);
            }
            for (at, expected) in expected.iter().enumerate() {
                // SAFETY: inside the array, which nothing else uses.
                prop_assert_eq!(unsafe { (base as *const u8).add(at).read_volatile() }, *expected);
                if range.contains(&(base + at as u64)) {
                    prop_assert_eq!(device[at], *expected);
                }
            }
        }
    }
}
