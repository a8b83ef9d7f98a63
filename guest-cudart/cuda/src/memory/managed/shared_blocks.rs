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
//! Ordering of the device's writes: one or two blocks are read as they were at one time. Before they are
//! given, or a change of them that the server reports, the server compares the other blocks that the host
//! has, and those that the device has changed are taken away. (With an older server, they are read again or
//! taken away.) So the program never sees a later write of the device before an earlier one. Where the
//! program reads one block after the other, more are fetched at once, and read only once. Blocks that it used
//! together before ([`page_sets`](super::page_sets)) are read one by one, but in one exchange.
//!
//! Ordering of the program's writes: it can write to one block at a time, or to a few in a row if it writes
//! them one after the other. Before it can write elsewhere, its changes there are sent, and it can only read
//! these blocks. The order of its writes to words of the same blocks is unknown.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::result::Result;
use crate::memory::managed::blocks::{Answer, MOST_READINGS, Run, SHORT};
use crate::memory::managed::changes::{changes, rows, send};
use crate::memory::managed::watch::{News, TAKEN_OVER};
use crate::memory::managed::{STATE, State, compared_words, page_faults, pages};
use crate::memory::transfer::Transfer;
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::work_signal::{self, CAME};
use client::counters::{self, COUNTERS};
use client::pages::{Fault, Pages};
use client::{lock, log};

/// Minimum time that the host keeps a block that is not watched.
pub(crate) const WHILE: Duration = Duration::from_micros(100);
/// The same for a run that is longer than [`SHORT`].
const WHILE_LONG: Duration = Duration::from_millis(1);

/// How long the end of work waits for an answer that is there to be taken over.
const MOST_HANDLING: Duration = Duration::from_millis(10);

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
        self.run.len <= SHORT
    }

    /// Whether it is pinned memory of a context's server.
    pub fn is_in(&self, context: &Context) -> bool {
        self.pinned && std::ptr::eq(self.context.session(), context.session())
    }

    pub fn range(&self) -> Range<u64> {
        self.run.range()
    }

    /// The bytes of a part of it when the host was given them, or when they were last sent.
    pub fn before_of(&mut self, part: &Run) -> &mut [u8] {
        let first = (part.address - self.run.address) as usize;
        &mut self.before[first..first + part.len as usize]
    }

    pub fn has(&self, address: u64) -> bool {
        self.range().contains(&address)
    }

    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.run.meets(range)
    }
}

/// Bytes of a run that the host is about to get.
pub(super) struct Fetched {
    /// First address of the piece.
    pub base: u64,
    pub run: Run,
    pub bytes: Vec<u8>,
}

impl Fetched {
    pub fn nothing_yet(base: u64, run: Run) -> Fetched {
        Fetched { base, run, bytes: vec![0; run.len as usize] }
    }
}

/// A number that nothing had before.
pub(crate) fn new_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(1);
    LAST.fetch_add(1, Ordering::Relaxed)
}

/// The bytes of a run that the host has, which it cannot change from now on.
pub(super) fn written<'p>(pages: &'p Pages, run: &Run) -> Result<&'p [u8]> {
    let (at, len) = (run.address as usize, run.len as usize);
    pages.forbid_writes(at, len).map_err(page_faults::failed)?;
    // SAFETY: present pages, which stay until their piece is released, and that nobody changes now.
    Ok(unsafe { std::slice::from_raw_parts(pages.bytes(at), len) })
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
        // What the program was given while the device worked may be older than what it gets now. The thread
        // that has learned that the work is done may not have taken it away yet.
        take_pinned(driver);
        compared_words::compare_if_due();
        let stays = lock(&STATE).together.iter().any(|together| together.has(fault.address as u64));
        if !stays {
            return page_faults::answer(pages, fault, buffer);
        }
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
        let (due, compares) = (lock(&STATE).due(), compared_words::is_due());
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
            seldom = if compared_words::compare_all() { WHILE } else { (seldom * 2).min(SELDOM) };
            // Most of the link is for others.
            seldom = seldom.max(now.elapsed() * 4);
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
        take_all(driver);
    }
    compared_words::compare_if_due();
}

#[cold]
fn take_all(driver: &'static Driver) {
    take_old(driver, |_| true);
}

fn take_pinned(driver: &'static Driver) {
    if GIVEN.load(Ordering::SeqCst) != 0 {
        take_old(driver, |together| together.pinned);
    }
}

/// The state, once the answers to watches that have come before the end of work are taken over. Returns it
/// sooner if that takes too long.
fn settled() -> MutexGuard<'static, State> {
    let is_open = |state: &mut State| state.watches.iter().any(|watch| watch.news() == News::Answered);
    let waited = TAKEN_OVER.wait_timeout_while(lock(&STATE), MOST_HANDLING, is_open);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// Takes away those runs that `which` selects and that may be older than the work of which the program knows
/// that it is done.
fn take_old(driver: &'static Driver, which: impl Fn(&Together) -> bool) {
    let mut state = settled();
    let old = |together: &&Together| which(together) && !state.is_current(together);
    let old: Vec<u64> = state.together.iter().filter(old).map(|together| together.number).collect();
    if old.is_empty() {
        return;
    }
    state.count_waited();
    state.sets.taken();
    told(state.part(driver, |together| old.contains(&together.number)));
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
        let writes = self.publishing.due().is_some() && self.together.iter().any(|t| t.pinned && which(t));
        // What the program wrote to several runs is sent together.
        let sent = if writes { self.publish(pages(driver)?) } else { Ok(()) };
        let (gone, rest) = std::mem::take(&mut self.together).into_iter().partition(which);
        self.together = rest;
        let mut gone: Vec<Together> = gone;
        let mut taken = Ok(());
        for together in &mut gone {
            // All of them, whatever happens to one: nobody else takes them away. What a lost server does not
            // get, no kernel of the others uses.
            let away = self.take_away(driver, together);
            if !together.context.is_given_up() {
                taken = taken.and(away);
            }
        }
        for watch in &mut self.watches {
            if !self.together.iter().any(|together| together.is_in(watch.context)) {
                watch.forget();
            }
        }
        // After they are gone, because a thread that reads 0 lets the program continue without taking the
        // lock.
        self.count_given();
        sent.and(taken)
    }

    /// Counts that the program knows of the end of work, which takes pages of pinned memory.
    fn count_waited(&self) {
        if self.together.iter().any(|together| together.pinned) {
            counters::add(&COUNTERS.pages_waited, 1);
        }
    }

    /// When the thread has something to do.
    fn due(&self) -> Option<Instant> {
        let ends =
            self.together.iter().filter(|together| together.pinned).filter_map(|together| together.until);
        ends.chain(self.publishing.due()).min()
    }

    fn send_and_take_due(&mut self, driver: &'static Driver, now: Instant) -> Result {
        if self.publishing.due().is_some_and(|due| due <= now) {
            self.publish(pages(driver)?)?;
        }
        self.part(driver, |together| together.pinned && together.until.is_some_and(|until| until <= now))?;
        self.watch();
        Ok(())
    }

    pub(super) fn take_away(&mut self, driver: &'static Driver, together: &mut Together) -> Result {
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
            Answer::Allow(run) => self.allow_writes(pages, base, run)?,
            Answer::Zeroes(run) | Answer::Fetch(run) => {
                self.fetch(base, run, buffer, &mut [])?;
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

    pub(super) fn count_given(&self) {
        GIVEN.store(self.together.len() + usize::from(self.gives), Ordering::SeqCst);
    }

    fn give_together(&mut self, driver: &'static Driver, pages: &Pages, fault: &Fault) -> Result<bool> {
        let Some((base, answer)) = self.answer(fault) else { return Ok(false) };
        match answer {
            Answer::Nothing => {}
            Answer::Allow(run) => self.let_write(pages, base, run, fault.address as u64)?,
            Answer::Zeroes(run) | Answer::Fetch(run) => {
                let begun = Instant::now();
                let Some(context) = self.pieces.get(&base).map(|(_, piece)| piece.context) else {
                    return Ok(false);
                };
                let mut accessed = Fetched::nothing_yet(base, run);
                let mut more = self.what_comes_with(base, run);
                let mut remembered = false;
                // Until the device has changed no compared words: it may have changed them before it wrote
                // these bytes, or after it wrote what these bytes lack.
                for _ in 0..MOST_READINGS {
                    remembered = self.fetch_beside_others(driver, context, &mut more, &mut accessed)?;
                    if !remembered {
                        self.fetch_after_others(driver, context, run, &mut accessed.bytes)?;
                    }
                    if !self.compare_beside()? {
                        break;
                    }
                    // As all that the program has.
                    more.clear();
                }
                let took = begun.elapsed();
                // The program has a run for longer than moving it takes.
                let keeps = if run.len <= SHORT { WHILE.max(took * 2) } else { WHILE_LONG.max(took * 4) };
                let until = (!remembered).then(|| Instant::now() + keeps);
                self.given(base, run, false);
                more.iter().for_each(|fetched| self.came_along(fetched));
                for Fetched { base, run, bytes } in more.into_iter().chain([accessed]) {
                    pages.fill(run.address as usize, &bytes, false).map_err(page_faults::failed)?;
                    self.together.push(Together {
                        base,
                        pinned: true,
                        context,
                        run,
                        before: bytes,
                        number: new_number(),
                        remembered,
                        until,
                    });
                }
                if fault.write {
                    self.let_write(pages, base, run, fault.address as u64)?;
                }
                work_signal::wake();
            }
        }
        Ok(true)
    }
}
