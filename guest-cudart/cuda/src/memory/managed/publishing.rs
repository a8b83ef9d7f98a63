//! Sending the program's changes of pinned memory that it was given while the device worked, in the order in
//! which it may have made them.
//!
//! The program can write to one place at a time: before it can write elsewhere, its changes are sent. One store may
//! need two pages at the same time, because its bytes lie in both. With only one of them it would stop at the other
//! one forever. So if it has changed nothing in either of two neighboring pages when it is at the first one again, it
//! can write to both.

use std::time::{Duration, Instant};

use crate::abi::result::Result;
use crate::memory::managed::State;
use crate::memory::managed::blocks::Run;
use crate::memory::managed::changes::{changes, send};
use crate::memory::managed::shared_blocks::written;
use crate::process::context::Context;
use crate::process::work_signal;
use client::ops::memory::WordPatch;
use client::pages::{PAGE, Pages};

/// Maximum number of bytes that the program can write to at a time.
const WRITABLE: u64 = 64 << 10;
/// The shortest and the longest time between a write and sending it. It becomes longer while the program
/// writes to the same blocks again and again, because each time costs a fault.
const SOON: Duration = Duration::from_micros(30);
const LATER: Duration = Duration::from_micros(240);

/// When the program's changes are sent.
pub(crate) struct Publishing {
    /// When the program was allowed to write, unless everything has been sent.
    since: Option<Instant>,
    pause: Duration,
    /// The page at which it was allowed to write last, and the one before, as far as nothing was changed since.
    unchanged: [Option<u64>; 2],
    /// Where it could write last.
    last: u64,
}

impl Publishing {
    pub const fn new() -> Publishing {
        Publishing { since: None, pause: SOON, unchanged: [None; 2], last: 0 }
    }

    /// When the program's changes are due, unless everything has been sent.
    pub fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + self.pause)
    }

    /// Notes that the program may write to a page. Returns the other page that a store there needs as well, if it
    /// seems to need one.
    fn allowed(&mut self, page: u64) -> Option<u64> {
        let [last, before] = self.unchanged;
        let other = if last == Some(page) { before } else { last.filter(|_| before == Some(page)) };
        let neighbor = other.filter(|other| other.abs_diff(page) == PAGE as u64);
        if last != Some(page) {
            self.unchanged = [Some(page), last];
        }
        let again = page == self.last || neighbor.is_some();
        self.pause = if again { (self.pause * 2).min(LATER) } else { SOON };
        (self.since, self.last) = (Some(Instant::now()), page);
        neighbor
    }
}

impl State {
    /// Sends the program's changes, after which it cannot write to any pinned memory that it was given while
    /// the device worked. Otherwise its changes of two blocks could reach the device in the wrong order.
    pub(super) fn publish(&mut self, pages: &Pages) -> Result {
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
        if !all.is_empty() {
            self.publishing.unchanged = [None; 2];
        }
        for (context, words) in all {
            send(context, words)?;
        }
        Ok(())
    }

    /// Lets the program write around an address, to a part of a run that it can read, and to nothing else.
    pub(super) fn let_write(&mut self, pages: &Pages, base: u64, run: Run, at: u64) -> Result {
        self.publish(pages)?;
        let Some((_, piece)) = self.pieces.get_mut(&base) else { return Ok(()) };
        let page = piece.blocks.block(at);
        piece.blocks.writes(page.address);
        let both = self.publishing.allowed(page.address).and_then(|other| piece.blocks.beside(page, other));
        work_signal::wake();
        self.allow_writes(pages, base, both.unwrap_or_else(|| writable(run, page)))
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

    const A: u64 = 0x10_0000;
    const B: u64 = A + PAGE as u64;

    #[test]
    fn a_store_into_two_pages_gets_both() {
        for (first, second) in [(A, B), (B, A)] {
            let mut publishing = Publishing::new();
            assert_eq!([first, second].map(|page| publishing.allowed(page)), [None; 2]);
            assert_eq!(publishing.allowed(first), Some(second));
            // Whichever it stops at, if it could not go on in time.
            assert_eq!(
                [second, first, first].map(|page| publishing.allowed(page)),
                [Some(first), Some(second), Some(second)]
            );
        }
    }

    #[test]
    fn pages_that_the_program_has_changed_are_written_one_after_the_other() {
        let mut publishing = Publishing::new();
        for _ in 0..4 {
            for page in [A, B] {
                assert_eq!(publishing.allowed(page), None);
                // What `publish` does.
                publishing.unchanged = [None; 2];
            }
        }
    }

    #[test]
    fn pages_apart_are_written_one_after_the_other() {
        let mut publishing = Publishing::new();
        let far = B + PAGE as u64;
        assert_eq!([A, far, A, far, B, A].map(|page| publishing.allowed(page)), [None; 6]);
    }

    #[test]
    fn the_part_of_a_run_that_can_be_written_has_the_page() {
        let page = PAGE as u64;
        let run = Run { address: A, len: 2 * WRITABLE };
        let first = Run { address: A, len: page };
        let last = Run { address: A + run.len - page, len: page };
        assert_eq!(writable(run, first), Run { address: A, len: WRITABLE });
        assert_eq!(writable(run, last), Run { address: A + WRITABLE, len: WRITABLE });
        assert_eq!(writable(first, first), first);
    }
}
