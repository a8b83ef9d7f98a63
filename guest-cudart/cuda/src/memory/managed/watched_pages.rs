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
use crate::memory::managed::shared_blocks::{Together, WHILE, new_number, told};
use crate::memory::managed::watch::Watch;
use crate::memory::managed::{STATE, State, page_faults, pages};
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::work_signal;
use client::counters::{self, COUNTERS};
use client::ops::memory::{HostWatch, HostWatchReply, WordPatch};
use client::pages::PAGE;
use client::{Status, lock, log};

/// How long a watch lasts if nothing changes.
const MOST_TIME: Duration = Duration::from_millis(100);
/// A page in which more words change at a time is not one that the program polls.
const MOST_POLLED: usize = 16;

fn is_same(a: &Context, b: &Context) -> bool {
    std::ptr::eq(a.session(), b.session())
}

fn answered(driver: &'static Driver, context: &'static Context, number: u64, reply: Result<HostWatchReply>) {
    told(lock(&STATE).answered(driver, context, number, reply));
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
        let watched = |t: &&Together| t.remembered && t.is_short() && t.is_in(context);
        let what: Vec<(u64, u64)> = (self.together.iter().filter(watched))
            .map(|together| (together.run.address, together.number))
            .collect();
        let at = match self.watches.iter().position(|watch| is_same(watch.context, context)) {
            Some(at) => at,
            None => {
                self.watches.push(Watch::new(context, answered)?);
                self.watches.len() - 1
            }
        };
        let watch = &mut self.watches[at];
        if watch.what.as_ref() == Some(&what) {
            return Ok(());
        }
        watch.number = new_number();
        let op = HostWatch {
            context: context.id,
            number: watch.number,
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
                watch.after = number;
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
