//! Blocks that host and device have at the same time: a program waits for a word that a kernel writes, or a
//! kernel waits for a word that the program writes.
//!
//! For pinned memory, an access of the host while the device works is answered at once with the current
//! bytes, and those bytes are remembered. A thread takes the blocks away again after a moment. Bytes that
//! differ from the remembered ones by then were written by the program and go to the device word by word.
//! Bytes that the device writes are found at the next access. So each side sees the other's changes within
//! about a millisecond, and neither side waits.
//!
//! Managed memory is shared like this only while the device waits for this process on one stream and may work
//! on others. Such a block is taken away when the stream goes on, when other work is put on a stream, and
//! when the program learns that work is done. Only the bytes that the program changed go to the device; what
//! kernels wrote beside them stays.
//!
//! Ordering of the device's writes: a block is read until two readings are the same, and before it is given,
//! the other blocks that the host has are read again or taken away, so that it has none that the device has
//! changed. So the program never sees a later write of the device before an earlier one. Where the program
//! reads one block after the other, several are fetched at once, and read only once.
//!
//! Ordering of the program's writes: it can write to one block at a time, or to a few in a row if it writes
//! them one after the other. Before it can write elsewhere, its changes there are sent, and it can only read
//! these blocks. The order of its writes to words of the same blocks is unknown.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Once, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::result::Result;
use crate::memory::managed::blocks::{Answer, Run, SMALL};
use crate::memory::managed::{STATE, State, mirror, page_faults, pages, partial_pages};
use crate::memory::transfer::Transfer;
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::work_signal::{self, CAME};
use client::ops::memory::{HostPatch, MOST_PATCHES, WordPatch};
use client::pages::{Fault, Pages};
use client::{lock, log};

/// Minimum time that the host keeps a block.
const WHILE: Duration = Duration::from_micros(100);
/// Maximum number of runs that the host has at once.
const MOST: usize = 8;
/// Maximum size of a run that is read again when another one is given. Longer ones are taken away.
const READ_AGAIN: u64 = 2 * SMALL;
/// How often a block that the device keeps changing is read again.
const MOST_READINGS: usize = 8;
/// Maximum number of bytes that the program can write to at a time.
const WRITABLE: u64 = 64 << 10;

/// A run that the host was given while the device worked.
pub(crate) struct Together {
    /// First address of the piece.
    pub base: u64,
    /// Whether the piece is pinned memory, where each side soon sees what the other writes.
    pinned: bool,
    run: Run,
    /// The bytes when the host was given them, or when its changes were last sent.
    before: Vec<u8>,
}

/// The bytes of a run that the host has, which it cannot change from now on.
fn written<'p>(pages: &'p Pages, run: &Run) -> Result<&'p [u8]> {
    let (at, len) = (run.address as usize, run.len as usize);
    pages.forbid_writes(at, len).map_err(page_faults::failed)?;
    // SAFETY: present pages, which stay until their piece is released, and that nobody changes now.
    Ok(unsafe { std::slice::from_raw_parts(pages.bytes(at), len) })
}

impl Together {
    fn range(&self) -> Range<u64> {
        self.run.address..self.run.address + self.run.len
    }

    /// The bytes of a part of it when the host was given them, or when they were last sent.
    fn before_of(&mut self, part: &Run) -> &mut [u8] {
        let first = (part.address - self.run.address) as usize;
        &mut self.before[first..first + part.len as usize]
    }

    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.run.address < range.end && range.start < self.run.address + self.run.len
    }
}

/// The longest pause between comparisons.
const SELDOM: Duration = Duration::from_millis(5);

/// Wakes the thread, and starts it if necessary.
pub(crate) fn start(driver: &'static Driver) {
    static START: Once = Once::new();
    START.call_once(|| {
        let thread = std::thread::Builder::new().name("rgpu-pages-part".into());
        if let Err(error) = thread.spawn(move || serve(driver)) {
            log::error(format_args!("cannot start a thread for pinned memory that kernels use: {error}; `ulimit -u` limits threads"));
        }
    });
}

/// Answers an access to pinned memory. `busy`: whether the device may be using it.
pub(crate) fn answer(
    driver: &'static Driver,
    pages: &'static Pages,
    fault: &Fault,
    buffer: &mut Vec<u8>,
    busy: bool,
) {
    if !busy {
        return page_faults::answer(pages, fault, buffer);
    }
    start(driver);
    let mut state = lock(&STATE);
    let given = state.give_together(driver, pages, fault);
    drop(state);
    page_faults::finish(pages, fault, given);
}

/// The thread that takes back runs given to the host while the device worked, and compares pages that cannot
/// be watched.
fn serve(driver: &'static Driver) {
    let (mut pause, mut seldom) = (WHILE, WHILE);
    loop {
        let given = lock(&STATE).together.iter().any(|together| together.pinned);
        if !given && !partial_pages::is_due() {
            seldom = WHILE;
            let came = CAME.1.wait_while(lock(&CAME.0), |came| !*came);
            *came.unwrap_or_else(PoisonError::into_inner) = false;
            continue;
        }
        std::thread::sleep(if given { pause } else { seldom });
        let begin = Instant::now();
        take_all(driver, |together| together.pinned);
        // The program has a block for at least as long as moving it takes.
        pause = WHILE.max(begin.elapsed() * 2);
        if partial_pages::is_due() {
            seldom = if partial_pages::compare_all() { WHILE } else { (seldom * 2).min(SELDOM) };
        }
    }
}

/// Number of runs that the host was given while the device worked.
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// Called when work has finished, before the program learns of it, so that the program sees what the work has
/// written.
#[inline]
pub(crate) fn after_wait(driver: &'static Driver) {
    if GIVEN.load(Ordering::SeqCst) != 0 {
        take_all(driver, |_| true);
    }
    if partial_pages::is_due() {
        partial_pages::compare_all();
    }
}

#[cold]
fn take_all(driver: &'static Driver, which: impl Fn(&Together) -> bool) {
    if let Err(status) = lock(&STATE).part(driver, which) {
        log::error(format_args!(
            "the program's changes of pinned or managed memory cannot be sent to the device ({status}): kernels may read old values"
        ));
    }
}

impl State {
    /// Takes away the runs that `which` selects, and sends the program's changes to the device.
    pub(crate) fn part(&mut self, driver: &'static Driver, which: impl Fn(&Together) -> bool) -> Result {
        let (gone, rest) = std::mem::take(&mut self.together).into_iter().partition(which);
        self.together = rest;
        let mut gone: Vec<Together> = gone;
        let taken = gone.iter_mut().try_for_each(|together| self.take_away(driver, together));
        // After they are gone, because a thread that reads 0 lets the program continue without taking the
        // lock.
        GIVEN.store(self.together.len(), Ordering::SeqCst);
        taken
    }

    fn take_away(&mut self, driver: &'static Driver, together: &mut Together) -> Result {
        let pages = pages(driver)?;
        let (base, pinned, run, range) = (together.base, together.pinned, together.run, together.range());
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        let (context, dirty) = (piece.context, piece.blocks.dirty(&range));
        for part in &dirty {
            let now = written(pages, part)?;
            let before = together.before_of(part);
            if pinned {
                send(context, changes(part.address, before, now))?;
            } else {
                self.overwrite(base, part, before, now)?;
            }
        }
        pages.clear(run.address as usize, run.len as usize).map_err(page_faults::failed)?;
        let Some((_, piece)) = self.pieces.get_mut(&base) else { return Ok(()) };
        piece.blocks.taken(&range);
        if !piece.blocks.is_held() {
            self.held.remove(&base);
            self.counted();
        }
        Ok(())
    }

    /// Copies only those bytes of a run to the device that the program has changed.
    fn overwrite(&mut self, base: u64, run: &Run, before: &[u8], now: &[u8]) -> Result {
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        let stream = self.mover(piece.context)?;
        let transfer = Transfer { stream: &stream };
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        for part in piece.parts_in(run) {
            let within = (part.start - run.address) as usize..(part.end - run.address) as usize;
            for row in rows(&before[within.clone()], &now[within.clone()]) {
                let bytes = &now[within.start + row.start..within.start + row.end];
                // SAFETY: bytes of present pages that nobody changes now; they are read before the call
                // returns.
                unsafe {
                    transfer.send(part.start + row.start as u64, bytes.as_ptr(), bytes.len(), |_, _| Ok(()))
                }?;
            }
        }
        stream.synchronize()
    }

    /// Gives the host what an access to managed memory needs, although work may be changing other bytes of
    /// the same block.
    pub(crate) fn give_beside_work(
        &mut self,
        pages: &Pages,
        fault: &Fault,
        buffer: &mut Vec<u8>,
    ) -> Result<bool> {
        let Some((base, answer)) = self.answer(fault) else { return Ok(false) };
        match answer {
            Answer::Nothing => {}
            Answer::Allow(run) => {
                self.given(base, run, true);
                pages.allow_writes(run.address as usize, run.len as usize).map_err(page_faults::failed)?;
            }
            Answer::Zeroes(run) | Answer::Fetch(run) => {
                self.announce();
                self.fetch(base, run, buffer)?;
                self.given(base, run, fault.write);
                pages.fill(run.address as usize, buffer, fault.write).map_err(page_faults::failed)?;
                self.together.push(Together { base, pinned: false, run, before: buffer.clone() });
            }
        }
        Ok(true)
    }

    /// Called before bytes are fetched for the host while the device works. From now on, a thread that learns
    /// that work has finished takes them away again.
    fn announce(&self) {
        GIVEN.store(self.together.len() + 1, Ordering::SeqCst);
    }

    /// Sends the program's changes, after which it cannot write to any pinned memory that it was given while
    /// the device worked. Otherwise its changes of two blocks could reach the device in the wrong order.
    pub(crate) fn publish(&mut self, pages: &Pages) -> Result {
        for together in self.together.iter_mut().filter(|together| together.pinned) {
            let Some((_, piece)) = self.pieces.get_mut(&together.base) else { continue };
            let range = together.range();
            for run in piece.blocks.dirty(&range) {
                let now = written(pages, &run)?;
                let before = together.before_of(&run);
                send(piece.context, changes(run.address, before, now))?;
                before.copy_from_slice(now);
            }
            piece.blocks.cleaned(&range);
        }
        Ok(())
    }

    fn give_together(&mut self, driver: &'static Driver, pages: &Pages, fault: &Fault) -> Result<bool> {
        let Some((base, answer)) = self.answer(fault) else { return Ok(false) };
        match answer {
            Answer::Nothing => {}
            Answer::Allow(run) => self.let_write(pages, base, run)?,
            Answer::Zeroes(run) | Answer::Fetch(run) => {
                self.announce();
                let before = self.fetch_after_others(driver, base, run)?;
                self.given(base, run, false);
                pages.fill(run.address as usize, &before, false).map_err(page_faults::failed)?;
                self.together.push(Together { base, pinned: true, run, before });
                if fault.write {
                    self.let_write(pages, base, run)?;
                }
                work_signal::wake();
            }
        }
        Ok(true)
    }

    /// Lets the program write to the beginning of a run that it can read, and to nothing else.
    fn let_write(&mut self, pages: &Pages, base: u64, run: Run) -> Result {
        self.publish(pages)?;
        let run = Run { len: run.len.min(WRITABLE), ..run };
        self.given(base, run, true);
        pages.allow_writes(run.address as usize, run.len as usize).map_err(page_faults::failed)
    }

    /// Reads the device's bytes of a run, and then takes away those runs that the host was given before and
    /// that have become old by then, and surplus ones.
    fn fetch_after_others(&mut self, driver: &'static Driver, base: u64, run: Run) -> Result<Vec<u8>> {
        let (pinned, managed): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.together).into_iter().partition(|together| together.pinned);
        self.together = managed;
        let oldest = pinned.len().saturating_sub(MOST - 1);
        let of = |together: &Together| self.pieces.get(&together.base).map(|(_, piece)| piece.context);
        let mut gone: Vec<Together> = Vec::new();
        let mut others: Vec<(&'static Context, Together, Vec<u8>)> = Vec::new();
        for (i, together) in pinned.into_iter().enumerate() {
            match of(&together).filter(|_| i >= oldest && together.run.len <= READ_AGAIN) {
                Some(context) => {
                    let now = vec![0; together.run.len as usize];
                    others.push((context, together, now));
                }
                None => gone.push(together),
            }
        }
        let mut bytes = vec![0; run.len as usize];
        let read = match self.pieces.get(&base) {
            Some((_, piece)) => read_settled(piece.context, run, &mut bytes, &mut others),
            None => Ok(()),
        };
        for (_, together, now) in others {
            if read.is_ok() && now == together.before { &mut self.together } else { &mut gone }
                .push(together);
        }
        let taken = gone.iter_mut().try_for_each(|together| self.take_away(driver, together));
        read.and(taken).map(|()| bytes)
    }
}

/// Reads a run, and after it the others. A single block, which may contain a word that the program polls, is
/// read until nothing has changed between two readings: bytes that are read one after the other could contain
/// a later write of the device and lack an earlier one.
fn read_settled(
    context: &Context,
    run: Run,
    bytes: &mut [u8],
    others: &mut [(&'static Context, Together, Vec<u8>)],
) -> Result {
    let mut again = vec![0; if run.len <= SMALL { bytes.len() } else { 0 }];
    for _ in 0..MOST_READINGS {
        let own = [&mut *bytes, &mut again[..]].map(|bytes| (context, run.address, bytes));
        let after =
            others.iter_mut().map(|(context, other, now)| (*context, other.run.address, &mut now[..]));
        mirror::read_in_order(own.into_iter().chain(after))?;
        if again.is_empty() || *bytes == again[..] {
            break;
        }
        bytes.copy_from_slice(&again);
    }
    Ok(())
}

/// Sends changed words. It is not known which of them the program changed last. Most likely it is those that
/// stand alone, such as flags, so they go last.
pub(crate) fn send(context: &Context, mut words: Vec<WordPatch>) -> Result {
    words.sort_by_key(|patch| patch.address);
    let mut rows: Vec<&[WordPatch]> = words.chunk_by(|a, b| a.address + 8 == b.address).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.len()));
    for words in rows.concat().chunks(MOST_PATCHES) {
        context.session().append(&HostPatch { context: context.id, words: words.to_vec() })?;
    }
    Ok(())
}

/// The words of 8 bytes that differ, from `address`, a multiple of 8.
fn changes(address: u64, before: &[u8], now: &[u8]) -> Vec<WordPatch> {
    let words = |bytes: &[u8]| -> Vec<u64> {
        bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect()
    };
    let (before, now) = (words(before), words(now));
    let each = before.iter().zip(&now).enumerate();
    each.filter_map(|(i, (before, now))| change(address + 8 * i as u64, *before, *now, u64::MAX)).collect()
}

/// Maximum number of rows for changes that are described byte by byte.
const FEW: usize = 1024;

/// Where bytes differ, as rows of bytes. If there are many, as rows of 8-byte words, which neighboring
/// changes mostly fill.
fn rows(before: &[u8], now: &[u8]) -> Vec<Range<usize>> {
    let of = |grain: usize| {
        let mut rows: Vec<Range<usize>> = Vec::new();
        for (i, (before, now)) in before.chunks(grain).zip(now.chunks(grain)).enumerate() {
            if before == now {
                continue;
            }
            let (start, end) = (i * grain, i * grain + now.len());
            match rows.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => rows.push(start..end),
            }
        }
        rows
    };
    let words = of(8);
    if words.len() > FEW {
        return words;
    }
    let bytes = of(1);
    if bytes.len() > FEW { words } else { bytes }
}

/// The write that turns one word into another, in the bytes of a mask. `None` if they are equal.
pub(crate) fn change(address: u64, before: u64, now: u64, mask: u64) -> Option<WordPatch> {
    let bytes = ((before ^ now) & mask).to_le_bytes().map(|byte| if byte == 0 { 0 } else { 0xff });
    let mask = u64::from_le_bytes(bytes);
    (mask != 0).then_some(WordPatch { address, mask, value: now })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rows_are_exact_while_they_are_few() {
        let before = [7u8; 64];
        let mut now = before;
        (now[0], now[1], now[9], now[63]) = (1, 1, 1, 1);
        assert_eq!(rows(&before, &now), [0..2, 9..10, 63..64]);
        assert!(rows(&before, &before).is_empty());
    }

    #[test]
    fn many_changes_become_rows_of_whole_words() {
        let before = vec![7u8; 8 * 4 * FEW + 3];
        let mut now = before.clone();
        now.iter_mut().step_by(4).for_each(|byte| *byte = 1);
        assert_eq!(rows(&before, &now), vec![Range { start: 0, end: before.len() }]);
        now[8..16].copy_from_slice(&before[8..16]);
        assert_eq!(rows(&before, &now), [0..8, 16..before.len()]);
    }

    proptest! {
        #[test]
        fn changes_carry_what_one_side_wrote_and_keep_what_the_other_did(
            before in proptest::collection::vec(any::<u8>(), 64),
            writes in proptest::collection::vec((0usize..64, any::<u8>(), any::<bool>()), 0..20),
        ) {
            let (mut host, mut device, mut both) = (before.clone(), before.clone(), before.clone());
            let mut whose = [None; 64];
            for (at, value, by_host) in writes {
                // Each byte is written by one side only.
                if *whose[at].get_or_insert(by_host) == by_host {
                    both[at] = value;
                    if by_host { host[at] = value } else { device[at] = value }
                }
            }
            for patch in changes(0x1000, &before, &host) {
                let at = (patch.address - 0x1000) as usize;
                let word: [u8; 8] = device[at..at + 8].try_into().unwrap();
                device[at..at + 8].copy_from_slice(&patch.apply(u64::from_le_bytes(word)).to_le_bytes());
            }
            prop_assert_eq!(device, both);
        }
    }
}
