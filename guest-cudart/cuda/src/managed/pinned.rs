//! Pinned memory of the program's that kernels use, where the device is in another machine or shares no memory: the server has memory of its own at the same address, in the host memory of
//! its machine as the program's is in its own. It is a piece like those of managed memory, made of pages that the program has already.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::blocks::{Answer, BLOCK, Blocks, Run};
use super::{Advised, ORDER, Piece, STATE, State, pages};
use crate::Result;
use crate::context::Context;
use crate::state::Driver;
use client::ops::memory::{HostMirror, HostUnmap};
use client::pages::{PAGE, Pages};
use client::{Status, lock, log};

/// How many pieces there are.
static PINNED: AtomicUsize = AtomicUsize::new(0);

/// Whether an address is one of such memory.
#[inline]
pub(crate) fn is_here(address: u64) -> bool {
    PINNED.load(Ordering::Acquire) != 0 && {
        let state = lock(&STATE);
        state
            .find(address)
            .is_some_and(|(base, _)| state.pieces.get(&base).is_some_and(|(_, piece)| piece.pinned))
    }
}

/// Where those that were made in a context begin.
pub(crate) fn of_context(context: &'static Context) -> Vec<u64> {
    let state = lock(&STATE);
    let chosen =
        state.pieces.iter().filter(|(_, (_, piece))| piece.pinned && std::ptr::eq(piece.context, context));
    chosen.map(|(base, _)| *base).collect()
}

/// Lets kernels use the pages of the `size` bytes at `base`, which nothing copies from or to in place.
///
/// # Errors
/// What the server says; `NOT_SUPPORTED` where this process cannot watch its pages. All is as it was.
pub(crate) fn adopt(driver: &'static Driver, context: &'static Context, base: u64, size: u64) -> Result {
    let pages = pages(driver)?;
    let size = size.next_multiple_of(PAGE as u64);
    driver.session.call(&HostMirror { context: context.id, address: base, size })?;
    // A fault that comes before the piece is known waits for this lock.
    let state = &mut *lock(&STATE);
    state.adopt(driver, pages, context, base, size).inspect_err(|_| {
        // With the session lost, there is nothing to undo.
        let _ = driver.session.append(&HostUnmap { context: context.id, address: base });
    })
}

/// The piece that begins at `base`, if there is one, is the program's alone again. `keep`: with the bytes that the device has; otherwise nobody uses them any more.
pub(crate) fn release(driver: &'static Driver, base: u64, keep: bool) {
    if PINNED.load(Ordering::Acquire) == 0 {
        return;
    }
    let Ok(pages) = pages(driver) else { return };
    let _order = ORDER.write().unwrap_or_else(PoisonError::into_inner);
    let state = &mut *lock(&STATE);
    let Some((size, context)) =
        state.pieces.get(&base).filter(|(_, p)| p.pinned).map(|(s, p)| (*s, p.context))
    else {
        return;
    };
    if keep && let Err(status) = state.fetch_all(driver, pages, base, size) {
        log::error(format_args!(
            "pinned memory at {base:#x}: what kernels wrote there last is lost ({status})"
        ));
    }
    state.remove(base);
    PINNED.fetch_sub(1, Ordering::AcqRel);
    pages.release(base as usize, size as usize);
    let _ = driver.session.append(&HostUnmap { context: context.id, address: base });
}

impl State {
    fn adopt(
        &mut self,
        driver: &'static Driver,
        pages: &Pages,
        context: &'static Context,
        base: u64,
        size: u64,
    ) -> Result {
        // SAFETY: whole pages of pinned memory, which stays until `release`.
        unsafe { pages.adopt(base as usize, size as usize) }.map_err(|error| {
            log::warn(format_args!(
                "pinned memory at {base:#x} cannot be watched for kernels in another machine: {error}"
            ));
            Status::NOT_SUPPORTED
        })?;
        // SAFETY: the pages are there, and nobody changes them.
        unsafe { self.send_all(driver, pages, context, base, size) }
            .inspect_err(|_| pages.release(base as usize, size as usize))?;
        pages.clear(base as usize, size as usize);
        let blocks = Blocks::new(base, size, false);
        let all = base..base + size;
        let piece = Piece { context, blocks, parts: vec![all], advised: Advised::default(), pinned: true };
        self.insert(base, size, piece);
        PINNED.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Sends what is not zero.
    ///
    /// # Safety
    /// The range is adopted, and all of it present.
    unsafe fn send_all(
        &mut self,
        driver: &'static Driver,
        pages: &Pages,
        context: &'static Context,
        base: u64,
        size: u64,
    ) -> Result {
        let copier = self.mover(driver, context)?;
        let step = 64 * BLOCK;
        for at in (base..base + size).step_by(step as usize) {
            let len = step.min(base + size - at) as usize;
            let from = pages.bytes(at as usize);
            // SAFETY: as the caller says.
            unsafe {
                if std::slice::from_raw_parts(from, len).iter().any(|byte| *byte != 0) {
                    copier.send(at, from, len)?;
                }
            }
        }
        copier.stream.synchronize(driver)
    }

    /// Gives the host every byte of a piece, to change as it likes.
    fn fetch_all(&mut self, driver: &'static Driver, pages: &Pages, base: u64, size: u64) -> Result {
        self.part(driver, |together| together.base == base)?;
        let mut buffer = Vec::new();
        let mut at = base;
        while at < base + size {
            let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
            let run = match piece.blocks.fault(at, true) {
                Answer::Zeroes(run) | Answer::Fetch(run) => {
                    self.fetch(driver, base, run, &mut buffer)?;
                    pages.fill(run.address as usize, &buffer, true).map_err(super::faults::failed)?;
                    run
                }
                Answer::Allow(run) => run,
                Answer::Nothing => {
                    Run { address: at, len: (BLOCK - (at - base) % BLOCK).min(base + size - at) }
                }
            };
            if let Some((_, piece)) = self.pieces.get_mut(&base) {
                piece.blocks.given(run, true);
            }
            at = run.address + run.len;
        }
        Ok(())
    }
}
