//! Sending the program's changes of pinned memory that it was given while the device worked, in the order in
//! which it may have made them.

use crate::abi::result::Result;
use crate::memory::managed::State;
use crate::memory::managed::blocks::Run;
use crate::memory::managed::changes::{changes, send};
use crate::memory::managed::shared_blocks::written;
use crate::process::context::Context;
use crate::process::work_signal;
use client::ops::memory::WordPatch;
use client::pages::Pages;

/// Maximum number of bytes that the program can write to at a time.
const WRITABLE: u64 = 64 << 10;

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
        for (context, words) in all {
            send(context, words)?;
        }
        Ok(())
    }

    /// Lets the program write to the beginning of a run that it can read, and to nothing else.
    pub(super) fn let_write(&mut self, pages: &Pages, base: u64, run: Run) -> Result {
        self.publish(pages)?;
        let run = Run { len: run.len.min(WRITABLE), ..run };
        if let Some((_, piece)) = self.pieces.get_mut(&base) {
            piece.blocks.writes(run.address);
        }
        self.publishing.allowed(run.address);
        work_signal::wake();
        self.allow_writes(pages, base, run)
    }
}
