//! Blocks that host and device have at the same time: a program waits for a word that a kernel writes, or a
//! kernel waits for a word that the program writes.
//!
//! For pinned memory, an access of the host while the device works is answered at once with the current
//! bytes, and those bytes are remembered. Bytes that differ from the remembered ones a moment later were
//! written by the program and go to the device. The blocks stay with the program until the server, which
//! remembers them too, reports that the device has changed them ([`watched_pages`](super::watched_pages)).
//! With an older server, a thread takes them away again after a moment, and the device's bytes are found at
//! the next access.
//! So each side sees the other's changes within about a millisecond, and neither side waits.
//!
//! Managed memory is shared like this only while the device waits for this process on one stream and may work
//! on others. Such a block is taken away when the stream goes on, when other work is put on a stream, and
//! when the program learns that work is done. Only the bytes that the program changed go to the device; what
//! kernels wrote beside them stays.
//!
//! Ordering of the device's writes: a block is read until two readings are the same. Before it is given, or a
//! change of it that the server reports, the server compares the other blocks that the host has, and those
//! that the device has changed are taken away. (With an older server, they are read again or taken away.) So
//! the program never sees a later write of the device before an earlier one. Where the program reads one block
//! after the other, several are fetched at once, and read only once.
//!
//! Ordering of the program's writes: it can write to one block at a time, or to a few in a row if it writes
//! them one after the other. Before it can write elsewhere, its changes there are sent, and it can only read
//! these blocks. The order of its writes to words of the same blocks is unknown.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Once, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::result::Result;
use crate::memory::managed::blocks::{Answer, Run, SMALL};
use crate::memory::managed::{STATE, State, mirror, page_faults, pages, partial_pages, watch};
use crate::memory::transfer::Transfer;
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::work_signal::{self, CAME};
use client::counters::{self, COUNTERS};
use client::ops::memory::{HostChange, HostPatch, MOST_PATCHES, WordPatch};
use client::pages::{Fault, Pages};
use client::{lock, log};

/// Minimum time that the host keeps a block that is not watched.
pub(crate) const WHILE: Duration = Duration::from_micros(100);
/// The same for a run that is longer than [`READ_AGAIN`].
const WHILE_LONG: Duration = Duration::from_millis(1);
/// The shortest and the longest time between a write and sending it. It becomes longer while the program
/// writes to the same blocks again and again, because each time costs a fault.
const SOON: Duration = Duration::from_micros(30);
const LATER: Duration = Duration::from_micros(240);
/// Maximum number of runs that the host has at once, and of their bytes if the server remembers them: it
/// compares them whenever the host gets new bytes.
const MOST: usize = 48;
const MOST_BYTES: u64 = 4 << 20;
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
    pub pinned: bool,
    pub context: &'static Context,
    pub run: Run,
    /// The bytes when the host was given them, or when its changes were last sent.
    pub before: Vec<u8>,
    /// No other has the same.
    pub number: u64,
    /// Whether the server remembers what the program has of it.
    pub remembered: bool,
    /// When it is taken away. `None`: when it changes.
    pub until: Option<Instant>,
}

impl Together {
    /// Whether it is as short as what a program polls.
    pub fn is_short(&self) -> bool {
        self.run.len <= READ_AGAIN
    }

    /// Whether it is pinned memory of a context's server.
    pub fn is_in(&self, context: &Context) -> bool {
        self.pinned && std::ptr::eq(self.context.session(), context.session())
    }
}

/// When the program's changes are sent.
pub(crate) struct Publishing {
    /// When the program was allowed to write, unless everything has been sent.
    since: Option<Instant>,
    pause: Duration,
    /// Where it could write last.
    last: u64,
}

impl Publishing {
    pub const fn new() -> Publishing {
        Publishing { since: None, pause: SOON, last: 0 }
    }

    fn allowed(&mut self, address: u64) {
        self.pause = if address == self.last { (self.pause * 2).min(LATER) } else { SOON };
        (self.since, self.last) = (Some(Instant::now()), address);
    }
}

/// A number that nothing had before.
pub(crate) fn new_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(1);
    LAST.fetch_add(1, Ordering::Relaxed)
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
    let given = state.announced(|state| state.give_together(driver, pages, fault));
    state.watch();
    drop(state);
    page_faults::finish(pages, fault, given);
}

/// The thread that sends the program's changes, takes back runs given to the host while the device worked,
/// and compares pages that cannot be watched.
fn serve(driver: &'static Driver) {
    let (mut seldom, mut compared) = (WHILE, Instant::now());
    loop {
        let (due, compares) = (lock(&STATE).due(), partial_pages::is_due());
        if !compares {
            seldom = WHILE;
        }
        let next = due.into_iter().chain(compares.then_some(compared + seldom)).min();
        let now = Instant::now();
        if next.is_none_or(|next| now < next) {
            let came = lock(&CAME.0);
            let mut came = match next {
                Some(next) => CAME
                    .1
                    .wait_timeout_while(came, next - now, |came| !*came)
                    .map(|(came, _)| came)
                    .unwrap_or_else(|e| e.into_inner().0),
                None => CAME.1.wait_while(came, |came| !*came).unwrap_or_else(PoisonError::into_inner),
            };
            *came = false;
            continue;
        }
        if due.is_some_and(|due| due <= now) {
            told(lock(&STATE).send_and_take_due(driver, now));
        }
        if compares && compared + seldom <= now {
            seldom = if partial_pages::compare_all() { WHILE } else { (seldom * 2).min(SELDOM) };
            compared = Instant::now();
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
    told(lock(&STATE).part(driver, which));
}

/// Logs an error, of which nobody else learns.
pub(crate) fn told(result: Result) {
    if let Err(status) = result {
        log::error(format_args!(
            "the program's changes of pinned or managed memory cannot be sent to the device ({status}): kernels may read old values"
        ));
    }
}

impl State {
    /// Takes away the runs that `which` selects, and sends the program's changes to the device.
    pub(crate) fn part(&mut self, driver: &'static Driver, which: impl Fn(&Together) -> bool) -> Result {
        let writes = self.publishing.since.is_some() && self.together.iter().any(|t| t.pinned && which(t));
        // What the program wrote to several runs is sent together.
        let sent = if writes { self.publish(pages(driver)?) } else { Ok(()) };
        let (gone, rest) = std::mem::take(&mut self.together).into_iter().partition(which);
        self.together = rest;
        let mut gone: Vec<Together> = gone;
        let taken = gone.iter_mut().try_for_each(|together| self.take_away(driver, together));
        // After they are gone, because a thread that reads 0 lets the program continue without taking the
        // lock.
        self.count_given();
        sent.and(taken)
    }

    /// When the thread has something to do.
    fn due(&self) -> Option<Instant> {
        let ends =
            self.together.iter().filter(|together| together.pinned).filter_map(|together| together.until);
        ends.chain(self.publishing.since.map(|since| since + self.publishing.pause)).min()
    }

    fn send_and_take_due(&mut self, driver: &'static Driver, now: Instant) -> Result {
        if self.publishing.since.is_some_and(|since| since + self.publishing.pause <= now) {
            self.publish(pages(driver)?)?;
        }
        self.part(driver, |together| together.pinned && together.until.is_some_and(|until| until <= now))?;
        self.watch();
        Ok(())
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
                self.fetch(base, run, buffer)?;
                self.given(base, run, fault.write);
                pages.fill(run.address as usize, buffer, fault.write).map_err(page_faults::failed)?;
                let Some((_, piece)) = self.pieces.get(&base) else { return Ok(true) };
                self.together.push(Together {
                    base,
                    pinned: false,
                    context: piece.context,
                    run,
                    before: buffer.clone(),
                    number: new_number(),
                    remembered: false,
                    until: None,
                });
            }
        }
        Ok(true)
    }

    /// Gives the host something while the device works. From before its bytes are fetched, a thread that
    /// learns that work has finished takes away all such runs.
    pub(crate) fn announced<T>(&mut self, give: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        self.gives = true;
        self.count_given();
        let given = give(self);
        self.gives = false;
        self.count_given();
        given
    }

    fn count_given(&self) {
        GIVEN.store(self.together.len() + usize::from(self.gives), Ordering::SeqCst);
    }

    /// Sends the program's changes, after which it cannot write to any pinned memory that it was given while
    /// the device worked. Otherwise its changes of two blocks could reach the device in the wrong order.
    pub(crate) fn publish(&mut self, pages: &Pages) -> Result {
        // Once, even if the session is lost.
        self.publishing.since = None;
        let mut all: Vec<(&'static Context, Vec<WordPatch>)> = Vec::new();
        for together in self.together.iter_mut().filter(|together| together.pinned) {
            let Some((_, piece)) = self.pieces.get_mut(&together.base) else { continue };
            let (context, range) = (together.context, together.range());
            for run in piece.blocks.dirty(&range) {
                let now = written(pages, &run)?;
                let before = together.before_of(&run);
                let words = changes(run.address, before, now);
                if !words.is_empty() {
                    before.copy_from_slice(now);
                    match all.iter_mut().find(|(other, _)| std::ptr::eq(*other, context)) {
                        Some((_, others)) => others.extend(words),
                        None => all.push((context, words)),
                    }
                }
            }
            piece.blocks.cleaned(&range);
        }
        for (context, words) in all {
            send(context, words)?;
        }
        Ok(())
    }

    fn give_together(&mut self, driver: &'static Driver, pages: &Pages, fault: &Fault) -> Result<bool> {
        let Some((base, answer)) = self.answer(fault) else { return Ok(false) };
        match answer {
            Answer::Nothing => {}
            Answer::Allow(run) => self.let_write(pages, base, run)?,
            Answer::Zeroes(run) | Answer::Fetch(run) => {
                let begun = Instant::now();
                let Some(context) = self.pieces.get(&base).map(|(_, piece)| piece.context) else {
                    return Ok(false);
                };
                let mut before = vec![0; run.len as usize];
                let remembered = self.fetch_beside_others(driver, context, run, &mut before)?;
                if !remembered {
                    self.fetch_after_others(driver, context, run, &mut before)?;
                }
                let took = begun.elapsed();
                self.given(base, run, false);
                pages.fill(run.address as usize, &before, false).map_err(page_faults::failed)?;
                // The program has a run for longer than moving it takes.
                let keeps =
                    if run.len <= READ_AGAIN { WHILE.max(took * 2) } else { WHILE_LONG.max(took * 4) };
                let until = (!remembered).then(|| Instant::now() + keeps);
                let number = new_number();
                let together =
                    Together { base, pinned: true, context, run, before, number, remembered, until };
                self.together.push(together);
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
        if let Some((_, piece)) = self.pieces.get_mut(&base) {
            piece.blocks.writes(run.address);
        }
        self.given(base, run, true);
        self.publishing.allowed(run.address);
        work_signal::wake();
        pages.allow_writes(run.address as usize, run.len as usize).map_err(page_faults::failed)
    }

    /// Reads the device's bytes of a run, which the server remembers, and takes away those runs that the host
    /// was given before and that have changed by then. Returns false if that is not possible now.
    fn fetch_beside_others(
        &mut self,
        driver: &'static Driver,
        context: &'static Context,
        run: Run,
        bytes: &mut [u8],
    ) -> Result<bool> {
        if !watch::is_possible(context) {
            return Ok(false);
        }
        let old = self.surplus(context, run.len);
        self.part(driver, |together| old.contains(&together.number))?;
        let has = self.remembered(context);
        let settled = run.len <= SMALL;
        let Some(changed) = mirror::read_remembered(context, run.address, bytes, settled, has)? else {
            return Ok(false);
        };
        self.part(driver, |together| {
            let unknown = !together.remembered || changed.contains(&together.run.address);
            together.is_in(context) && unknown
        })?;
        Ok(true)
    }

    /// The numbers of the oldest runs, so that there is room for another one. Polled ones stay the longest.
    /// Neighbors go together: the program's next accesses fetch them as fewer and longer runs.
    fn surplus(&self, context: &Context, len: u64) -> Vec<u64> {
        let is_polled = |together: &&Together| {
            let piece = self.pieces.get(&together.base);
            piece.is_some_and(|(_, piece)| piece.blocks.is_polled(together.run.address))
        };
        let here = self.together.iter().rev().filter(|together| together.is_in(context));
        let (polled, others): (Vec<_>, Vec<_>) = here.partition(is_polled);
        let (mut runs, mut len) = (1, len);
        let mut fits = |together: &&&Together| {
            (runs, len) = (runs + 1, len + together.run.len);
            runs <= MOST && len <= MOST_BYTES
        };
        let kept = polled.iter().chain(&others).take_while(&mut fits).count();
        let (mut old, mut rest) = match kept.checked_sub(polled.len()) {
            Some(kept) => (others[kept..].to_vec(), others[..kept].to_vec()),
            None => ([&polled[kept..], &others[..]].concat(), Vec::new()),
        };
        let mut n = 0;
        while n < old.len() {
            let run = old[n].run;
            let meets = |other: &&Together| {
                other.run.address + other.run.len == run.address || run.address + run.len == other.run.address
            };
            let (neighbors, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(meets);
            old.extend(neighbors);
            rest = others;
            n += 1;
        }
        old.into_iter().map(|together| together.number).collect()
    }

    /// What the program has of what a context's server remembers.
    pub(crate) fn remembered(&self, context: &Context) -> Vec<u64> {
        let here = self.together.iter().filter(|together| together.remembered && together.is_in(context));
        here.map(|together| together.run.address).collect()
    }

    /// Reads the device's bytes of a run, and then takes away those runs that the host was given before and
    /// that have become old by then, and surplus ones.
    fn fetch_after_others(
        &mut self,
        driver: &'static Driver,
        context: &'static Context,
        run: Run,
        bytes: &mut [u8],
    ) -> Result {
        self.publish(pages(driver)?)?;
        let (pinned, managed): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.together).into_iter().partition(|together| together.pinned);
        self.together = managed;
        let oldest = pinned.len().saturating_sub(MOST - 1);
        let mut gone: Vec<Together> = Vec::new();
        let mut others: Vec<(Together, Vec<u8>)> = Vec::new();
        for (i, together) in pinned.into_iter().enumerate() {
            if i >= oldest && together.run.len <= READ_AGAIN {
                let now = vec![0; together.run.len as usize];
                others.push((together, now));
            } else {
                gone.push(together);
            }
        }
        let read = read_settled(context, run, bytes, &mut others);
        for (together, now) in others {
            if read.is_ok() && now == together.before { &mut self.together } else { &mut gone }
                .push(together);
        }
        let taken = gone.iter_mut().try_for_each(|together| self.take_away(driver, together));
        read.and(taken)
    }
}

/// Reads a run, and after it the others. A single block, which may contain a word that the program polls, is
/// read until nothing has changed between two readings: bytes that are read one after the other could contain
/// a later write of the device and lack an earlier one.
fn read_settled(context: &Context, run: Run, bytes: &mut [u8], others: &mut [(Together, Vec<u8>)]) -> Result {
    let mut again = vec![0; if run.len <= SMALL { bytes.len() } else { 0 }];
    for _ in 0..MOST_READINGS {
        let own = [&mut *bytes, &mut again[..]].map(|bytes| (context, run.address, bytes));
        let own = own.into_iter().filter(|(.., bytes)| !bytes.is_empty());
        let after = others.iter_mut().map(|(other, now)| (other.context, other.run.address, &mut now[..]));
        mirror::read_in_order(own.chain(after).collect())?;
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
    let long = |row: &&[WordPatch]| row.len() >= LONG_ROW && context.session().knows::<HostChange>();
    let (long, short) = rows.split_at(rows.partition_point(long));
    for row in long.iter().flat_map(|row| row.chunks(IN_CHANGE)) {
        let masks: Vec<u8> = row.iter().map(|patch| byte_mask(patch.mask)).collect();
        let bytes: Vec<u8> = row.iter().flat_map(|patch| patch.value.to_le_bytes()).collect();
        counters::add(&COUNTERS.mirror_bytes, (masks.len() + bytes.len()) as u64);
        let (masks, bytes) = (&masks[..], &bytes[..]);
        context.session().append(&HostChange {
            context: context.id,
            address: row[0].address,
            masks,
            bytes,
        })?;
    }
    for words in short.concat().chunks(MOST_PATCHES) {
        counters::add(&COUNTERS.mirror_bytes, size_of_val(words) as u64);
        context.session().append(&HostPatch { context: context.id, words: words.to_vec() })?;
    }
    Ok(())
}

/// Words in a row from which on they are sent as a row.
const LONG_ROW: usize = 8;
/// Maximum words of one [`HostChange`].
const IN_CHANGE: usize = 4 << 10;

/// The bytes that a mask of whole bytes selects, one bit for each.
fn byte_mask(mask: u64) -> u8 {
    mask.to_le_bytes().iter().enumerate().fold(0, |bits, (n, byte)| bits | u8::from(*byte != 0) << n)
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
