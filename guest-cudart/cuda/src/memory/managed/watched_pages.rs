//! The server watches pages that the program has while the device works ([`HostWatch`]), so that a program
//! that waits for a word needs no fault and no exchange until the word changes.
//!
//! ```text
//!   program reads a page ──▶ fault ──▶ fetch, watch            (the program reads on without faults)
//!   device writes the page ──▶ the server answers ──▶ older bytes are taken away, the page gets the new words ──▶ watch
//! ```
//!
//! A server has one watch at a time, of all such pages. A later one replaces it, so the answer to an earlier
//! one means nothing. If nothing changes for a while, the pages are taken away, and the program's next access
//! begins again.

use std::time::{Duration, Instant};

use crate::abi::result::Result;
use crate::memory::managed::blocks::Run;
use crate::memory::managed::shared_blocks::{Together, WHILE, new_number, told};
use crate::memory::managed::watch::{News, TAKEN_OVER, Watch};
use crate::memory::managed::{STATE, State, page_faults, pages};
use crate::process::context::{self, Context};
use crate::process::driver::Driver;
use crate::process::work_signal;
use client::counters::{self, COUNTERS};
use client::ops::memory::{HostWatch, HostWatchReply, MOST_WATCHED_BYTES, WATCH_TELLS, WordPatch};
use client::pages::PAGE;
use client::{Status, lock, log};

/// How long a watch lasts if nothing changes.
const MOST_TIME: Duration = Duration::from_millis(100);
/// A page in which more words change at a time is not one that the program polls.
const MOST_POLLED: usize = 16;
/// Minor version from which on a server says whether what the program has is as new as the work that has
/// ended.
const TELLS_SINCE: u16 = 8;

fn is_same(a: &Context, b: &Context) -> bool {
    std::ptr::eq(a.session(), b.session())
}

fn answered(driver: &'static Driver, context: &'static Context, number: u64, reply: Result<HostWatchReply>) {
    told(lock(&STATE).answered(driver, context, number, reply));
    TAKEN_OVER.notify_all();
}

impl State {
    /// Has the servers watch the pages that the program has, unless they do.
    pub(crate) fn watch(&mut self) {
        let mut contexts: Vec<&'static Context> = Vec::new();
        for together in self.together.iter().filter(|together| together.remembered) {
            if !contexts.iter().any(|context| is_same(context, together.context)) {
                contexts.push(together.context);
            }
        }
        for context in contexts {
            if let Err(status) = self.watch_in(context) {
                // The pages go soon, as with a server that cannot watch.
                log::debug(format_args!("pinned memory cannot be watched ({status})"));
                let end = Instant::now() + WHILE;
                let here = self.together.iter_mut().filter(|together| together.is_in(context));
                here.for_each(|together| _ = together.until.get_or_insert(end));
                work_signal::wake();
            }
        }
    }

    fn watch_in(&mut self, context: &'static Context) -> Result {
        let has = self.remembered(context);
        let what = self.what_to_watch(context);
        let here = self.together.iter().filter(|together| together.is_in(context));
        let newest = here.map(|together| together.number).max().unwrap_or(0);
        let at = match self.watches.iter().position(|watch| is_same(watch.context, context)) {
            Some(at) => at,
            None => {
                self.watches.push(Watch::new(context, answered)?);
                self.watches.len() - 1
            }
        };
        let watch = &mut self.watches[at];
        // An answer that is under way may be older than a run that the program got meanwhile, and undo what
        // the program knows by it. Unless the answer has no words.
        if watch.what.as_ref() == Some(&what) && (newest < watch.number || what.is_empty()) {
            return Ok(());
        }
        watch.number = new_number();
        let tells = if context.session().minor() >= TELLS_SINCE { WATCH_TELLS } else { 0 };
        let op = HostWatch {
            context: context.id,
            number: watch.number | tells,
            after: std::mem::take(&mut watch.after),
            most_us: MOST_TIME.as_micros() as u32,
            watched: what.iter().map(|(address, _)| *address).collect(),
            has,
        };
        let answer = context.session().submit_ahead(&op)?.ok_or(Status::OUT_OF_MEMORY)?;
        watch.what = Some(what);
        watch.expect(answer);
        Ok(())
    }

    /// Whether a run is as new as all work that the program knows to be done. Only in a program with one
    /// context: what another server does may come behind this one's work, without the program's having been
    /// told of that.
    pub(super) fn is_current(&self, together: &Together) -> bool {
        self.is_told_to_be_current(together) && context::is_only(together.context)
    }

    fn is_told_to_be_current(&self, together: &Together) -> bool {
        let remembered = together.pinned && together.remembered && together.until.is_none();
        let watch = self.watches.iter().find(|watch| is_same(watch.context, together.context));
        let current = watch.is_some_and(|watch| watch.news() == News::Current);
        remembered && current && !together.context.is_given_up()
    }

    /// The short runs that a context's server is to watch, with their numbers: not more than it accepts. The
    /// oldest in which the program does not poll are only remembered.
    fn what_to_watch(&self, context: &Context) -> Vec<(u64, u64)> {
        let watched = |t: &&Together| t.remembered && t.is_short() && t.is_in(context);
        let mut what: Vec<&Together> = self.together.iter().filter(watched).collect();
        what.sort_by_key(|t| (!self.is_polled(t), std::cmp::Reverse(t.number)));
        let mut bytes = 0;
        let fits = |together: &&Together| {
            bytes += together.run.len;
            bytes <= MOST_WATCHED_BYTES as u64
        };
        what.into_iter().take_while(fits).map(|together| (together.run.address, together.number)).collect()
    }

    /// The runs of a piece that its server watches, and that the host can only read, from the first address
    /// on.
    pub(super) fn watched_in(&self, base: u64) -> Vec<Run> {
        let Some((_, piece)) = self.pieces.get(&base) else { return Vec::new() };
        let watched = self.what_to_watch(piece.context);
        let stays = |together: &&Together| {
            let is_watched = watched.iter().any(|(_, number)| *number == together.number);
            let is_its = together.base == base && together.until.is_none();
            is_its && is_watched && piece.blocks.dirty(&together.range()).is_empty()
        };
        let mut runs: Vec<Run> = self.together.iter().filter(stays).map(|together| together.run).collect();
        runs.sort_by_key(|run| run.address);
        runs
    }

    /// Takes over the answer to a watch, and has the server watch on.
    fn answered(
        &mut self,
        driver: &'static Driver,
        context: &'static Context,
        number: u64,
        reply: Result<HostWatchReply>,
    ) -> Result {
        let Some(watch) = self.watches.iter_mut().find(|watch| watch.number == number) else { return Ok(()) };
        watch.what = None;
        let taken = match reply {
            Ok(HostWatchReply { words, changed }) if !words.is_empty() || !changed.is_empty() => {
                (watch.after, watch.taken_over) = (number, number);
                counters::add(&COUNTERS.mirror_bytes, size_of_val(&words[..]) as u64);
                self.take_changes(driver, context, &words, &changed)
            }
            _ => {
                self.sets.taken();
                self.part(driver, |together| together.is_in(context))
            }
        };
        self.watch();
        // Later, the words would be older than what the server remembers.
        if let Some(watch) = self.watches.iter_mut().find(|watch| is_same(watch.context, context)) {
            watch.after = 0;
        }
        taken
    }

    /// Gives the program the device's changes of watched runs, and takes those away that have changed
    /// otherwise or may have.
    fn take_changes(
        &mut self,
        driver: &'static Driver,
        context: &Context,
        words: &[WordPatch],
        changed: &[u64],
    ) -> Result {
        let pages = pages(driver)?;
        self.publish(pages)?;
        self.compare_beside()?;
        self.part(driver, |together| {
            let unknown = !together.remembered || changed.contains(&together.run.address);
            together.is_in(context) && unknown
        })?;
        let mut new = Vec::new();
        for (n, together) in
            self.together.iter_mut().enumerate().filter(|(_, together)| together.is_in(context))
        {
            let range = together.run.address..together.run.address + together.run.len;
            for page in range.clone().step_by(PAGE) {
                let page = page..page + PAGE as u64;
                let inside =
                    |word: &&WordPatch| word.address.is_multiple_of(8) && page.contains(&word.address);
                let inside: Vec<_> = words.iter().filter(inside).collect();
                for word in &inside {
                    let at = (word.address - range.start) as usize;
                    if let Some(bytes) = together.before[at..].first_chunk_mut::<8>() {
                        *bytes = word.apply(u64::from_le_bytes(*bytes)).to_le_bytes();
                    }
                }
                if let Some((_, piece)) = self.pieces.get_mut(&together.base).filter(|_| !inside.is_empty()) {
                    piece.blocks.set_polled(page.start, inside.len() <= MOST_POLLED);
                    piece.blocks.has_news();
                    new.push(n);
                }
            }
        }
        new.dedup();
        // All are gone before the first is there again.
        for n in &new {
            let run = self.together[*n].run;
            pages.clear(run.address as usize, run.len as usize).map_err(page_faults::failed)?;
        }
        for n in new {
            let Together { run, before, .. } = &self.together[n];
            pages.fill(run.address as usize, before, false).map_err(page_faults::failed)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::managed::Piece;
    use crate::memory::managed::advice::Advised;
    use crate::memory::managed::blocks::{Blocks, SHORT, SMALL};
    use crate::process::driver::Server;
    use client::handle::ContextId;

    /// A state, whose server watches what the program has, and the server's context.
    fn watching() -> (State, &'static Context) {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let mut state = State::new();
        state.watches.push(Watch::for_tests(context));
        (state, context)
    }

    impl State {
        /// The program gets a run, `n` MiB from address 0.
        fn has(&mut self, context: &'static Context, n: u64, len: u64) {
            self.together.push(Together {
                base: 0,
                pinned: true,
                context,
                run: Run { address: n << 20, len },
                before: vec![0; len as usize],
                number: new_number(),
                remembered: true,
                until: None,
            });
        }
    }

    #[test]
    fn a_watch_is_replaced_when_the_program_gets_something_else() {
        let (mut state, context) = watching();
        let numbers = [SMALL, SHORT, 8 * SMALL, 1 << 20].map(|len| {
            state.has(context, len, len);
            state.watch();
            state.watches[0].number
        });
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
        let before = context.session().last_seq();
        state.watch();
        state.together.retain(|together| together.is_short());
        state.watch();
        assert_eq!(context.session().last_seq(), before, "there is nothing new");
    }

    #[test]
    fn what_a_server_says_to_be_current_stays_when_work_ends() {
        let (mut state, context) = watching();
        state.has(context, 0, SMALL);
        state.watch();
        let (number, says) = (state.watches[0].number, |word| context.session().progress().set_watched(word));
        let current = |state: &State| state.is_told_to_be_current(&state.together[0]);
        assert!(number > 0 && !current(&state), "the server has said nothing");
        says(2 * number);
        assert!(current(&state));
        says(2 * number + 1);
        assert_eq!(state.watches[0].news(), News::Answered);
        assert!(!current(&state));
        state.watches[0].taken_over = number;
        assert!(current(&state));
        // The program has given up another watch, whose answer nobody takes over.
        says(2 * (number - 1) + 1);
        assert!(state.watches[0].news() == News::Unknown && !current(&state));
        says(2 * number);
        state.together[0].until = Some(Instant::now());
        assert!(!current(&state));
        state.together[0].until = None;
        state.together[0].remembered = false;
        assert!(!current(&state));
    }

    #[test]
    fn without_short_runs_a_watch_stays() {
        let (mut state, context) = watching();
        state.has(context, 0, 8 * SMALL);
        state.watch();
        let number = state.watches[0].number;
        state.has(context, 1, 8 * SMALL);
        state.watch();
        assert_eq!(state.watches[0].number, number);
    }

    #[test]
    fn no_more_is_watched_than_a_server_accepts() {
        let (mut state, context) = watching();
        (0..48).for_each(|n| state.has(context, n, SHORT));
        state.watch();
        let what = state.watches[0].what.clone().expect("a watch");
        let addresses: Vec<u64> = what.iter().map(|(address, _)| *address >> 20).collect();
        assert_eq!(addresses, (16..48).rev().collect::<Vec<_>>());
        assert_eq!(state.remembered(context).len(), 48);
    }

    #[test]
    fn what_is_watched_and_clean_stays_with_the_program() {
        const BASE: u64 = 1 << 20;
        let (mut state, context) = watching();
        let blocks = Blocks::new(BASE, 4 << 20, SMALL, false);
        let whole = BASE..5 * BASE;
        let (parts, advised) = (vec![whole], Advised::default());
        state.pieces.insert(BASE, (4 << 20, Piece { context, blocks, parts, advised, pinned: true }));
        let lens = [SHORT, SMALL, 8 * SMALL, SMALL];
        (1..).zip(lens).for_each(|(n, len)| state.has(context, n, len));
        let given: Vec<Run> = state.together.iter().map(|together| together.run).collect();
        state.together.iter_mut().for_each(|together| together.base = BASE);
        for (n, run) in given.iter().enumerate() {
            // The program may have changed the second one.
            state.pieces.get_mut(&BASE).expect("a piece").1.blocks.given(*run, n == 1);
        }
        assert_eq!(state.watched_in(BASE), [given[0], given[3]]);
        state.together[3].until = Some(Instant::now());
        assert_eq!(state.watched_in(BASE), [given[0]]);
        state.together[0].remembered = false;
        assert!(state.watched_in(BASE).is_empty());
    }

    #[test]
    fn a_watch_is_forgotten_when_the_program_has_nothing() {
        let (mut state, context) = watching();
        state.has(context, 0, SMALL);
        state.has(context, 1, SMALL);
        state.watch();
        let driver = Driver::for_tests(&[context.server]);
        state.part(driver, |together| together.run.address == 0).expect("pages");
        assert!(state.watches[0].number != 0 && state.watches[0].what.is_some());
        state.part(driver, |_| true).expect("pages");
        assert!(state.watches[0].number == 0 && state.watches[0].what.is_none());
    }
}
