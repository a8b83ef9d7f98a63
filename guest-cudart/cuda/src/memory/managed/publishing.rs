//! Sending the program's changes of pinned memory that it was given while the device worked, in the order in
//! which it may have made them.
//!
//! The program can write to one place at a time: before it can write elsewhere, its changes are sent.

use crate::abi::result::Result;
use crate::memory::managed::blocks::Run;
use crate::memory::managed::changes::{changes, send};
use crate::memory::managed::shared_blocks::written;
use crate::memory::managed::{State, pages};
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::work_signal;
use client::ops::memory::WordPatch;
use client::pages::Pages;

/// Maximum number of bytes that the program can write to at a time.
const WRITABLE: u64 = 64 << 10;

impl State {
    /// Sends the program's changes, if there may be any, as [`publish`](Self::publish) does.
    pub(super) fn publish_due(&mut self, driver: &'static Driver) -> Result {
        if self.publishing.due().is_some() { self.publish(pages(driver)?) } else { Ok(()) }
    }

    /// Sends the program's changes, after which it cannot write to any pinned memory that it was given while
    /// the device worked. Otherwise its changes of two blocks could reach the device in the wrong order.
    pub(super) fn publish(&mut self, pages: &Pages) -> Result {
        self.publish_with(pages, false)
    }

    /// The same. `compared`: also if the program has changed only words that are
    /// [compared](super::compared_words).
    pub(super) fn publish_with(&mut self, pages: &Pages, compared: bool) -> Result {
        // Once, even if the session is lost.
        self.publishing.sent();
        let mut all: Vec<(&'static Context, Vec<WordPatch>)> = Vec::new();
        let mut add = |context: &'static Context, words: Vec<WordPatch>| {
            let is_its = |other: &Context| std::ptr::eq(other.session(), context.session());
            match all.iter_mut().find(|(other, _)| is_its(other)) {
                _ if words.is_empty() => {}
                Some((_, others)) => others.extend(words),
                None => all.push((context, words)),
            }
        };
        let mut changed = false;
        for together in self.together.iter_mut().filter(|together| together.pinned) {
            let Some((_, piece)) = self.pieces.get_mut(&together.base) else { continue };
            let (context, range) = (together.context, together.range());
            for run in piece.blocks.dirty(&range) {
                let now = written(pages, &run)?;
                let before = together.before_of(&run);
                let words = changes(run.address, before, now);
                if !words.is_empty() {
                    before.copy_from_slice(now);
                    changed = true;
                    add(context, words);
                }
            }
            piece.blocks.cleaned(&range);
        }
        if changed {
            self.publishing.sent_changes();
        }
        // The program cannot write to the blocks now. So what it wrote to these words before it wrote to the
        // blocks is found, and what it wrote to the blocks before it wrote to these words was found above.
        if compared || changed {
            for (context, words) in self.changed_words() {
                add(context, words);
            }
        }
        for (context, words) in all {
            let sent = send(context, words);
            // What a lost server does not get, the others still do.
            if !context.is_given_up() {
                sent?;
            }
        }
        Ok(())
    }

    /// Lets the program write around an address, to a part of a run that it can read, and to nothing else.
    pub(super) fn let_write(&mut self, pages: &Pages, base: u64, run: Run, at: u64) -> Result {
        self.publish(pages)?;
        let Some((_, piece)) = self.pieces.get_mut(&base) else { return Ok(()) };
        let page = piece.blocks.block(at);
        piece.blocks.writes(page.address);
        let neighbor = self.publishing.allowed(page.address).and_then(|other| self.readable(other));
        work_signal::wake();
        let Some((other_base, other)) = neighbor else {
            return self.allow_writes(pages, base, writable(run, page));
        };
        // The thread that stopped at the page goes on with the second call.
        self.allow_writes(pages, other_base, other)?;
        self.allow_writes(pages, base, page)
    }

    /// A page of pinned memory that the host has, and the first address of its piece.
    fn readable(&self, address: u64) -> Option<(u64, Run)> {
        let (base, _) = self.find(address)?;
        let (_, piece) = self.pieces.get(&base).filter(|(_, piece)| piece.pinned)?;
        let page = piece.blocks.block(address);
        (piece.blocks.held(&page.range()) == [page]).then_some((base, page))
    }
}

/// The part of a run that the program can write to at a time, with a page at one of its ends.
fn writable(run: Run, page: Run) -> Run {
    let (start, end) = (page.address + page.len, run.address + run.len);
    let first = start.saturating_sub(WRITABLE).max(run.address);
    Run { address: first, len: (end - first).min(WRITABLE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_of_a_run_that_can_be_written_has_the_page() {
        const A: u64 = 0x10_0000;
        let page = client::pages::PAGE as u64;
        let run = Run { address: A, len: 2 * WRITABLE };
        let first = Run { address: A, len: page };
        let last = Run { address: A + run.len - page, len: page };
        assert_eq!(writable(run, first), Run { address: A, len: WRITABLE });
        assert_eq!(writable(run, last), Run { address: A + WRITABLE, len: WRITABLE });
        assert_eq!(writable(first, first), first);
    }
}
