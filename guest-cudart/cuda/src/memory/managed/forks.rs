//! Children of this process, which go on with their own copy of registered memory that kernels use.
//!
//! A child does not inherit watched pages, because nobody would answer its faults there. So what they contain
//! is copied just before a fork, and the child puts the copies where the pages were.

use std::cell::Cell;
use std::ptr;
use std::sync::Once;

use crate::abi::result::Result;
use crate::memory::managed::blocks::Run;
use crate::memory::managed::{ALL, Piece, STATE, mirror, pages};
use crate::memory::pinned_regions::REGIONS;
use crate::process::driver::{Driver, driver};
use client::pages::Pages;
use client::{Status, lock, log};

/// Maximum number of bytes that a child gets. Each has a copy of its own, and the fork takes as long as
/// fetching what the device has of them.
const MOST: u64 = 256 << 20;

/// A copy of a piece that begins at `address`.
struct Copied {
    address: u64,
    len: usize,
    copy: *mut libc::c_void,
}

thread_local! {
    /// The copies for the child that this thread is making.
    static COPIES: Cell<Vec<Copied>> = const { Cell::new(Vec::new()) };
}

/// From now on, children get copies.
pub(crate) fn follow() {
    static START: Once = Once::new();
    START.call_once(|| {
        // SAFETY: the handlers stay as long as the process, since this library is never unloaded.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

fn take() -> Vec<Copied> {
    COPIES.try_with(Cell::take).unwrap_or_default()
}

extern "C" fn before() {
    // A child of this process has no memory that is watched.
    let Ok(driver) = driver() else { return };
    let copies = copy_all(driver).unwrap_or_default();
    let _ = COPIES.try_with(|to| to.set(copies));
}

extern "C" fn in_parent() {
    take().iter().for_each(Copied::drop_copy);
}

extern "C" fn in_child() {
    for Copied { address, len, copy } in take() {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the child has nothing at the place of the pages, and nothing else uses the copy.
        unsafe { libc::mremap(copy, len, len, flags, address as *mut libc::c_void) };
    }
}

fn copy_all(driver: &'static Driver) -> Result<Vec<Copied>> {
    let pages = pages(driver)?;
    let state = lock(&STATE);
    let is_registered =
        |(at, (_, piece)): &(&u64, &(u64, Piece))| piece.pinned && !REGIONS.is_allocated(**at as usize);
    let registered = state.pieces.iter().filter(is_registered);
    let mut left = MOST;
    let copied = registered.filter_map(|(at, (size, piece))| {
        let copied = match left.checked_sub(*size) {
            None => Err(Status::OUT_OF_MEMORY),
            Some(less) => {
                left = less;
                Copied::new(pages, *at, *size, piece)
            }
        };
        copied
            .inspect_err(|status| {
                log::warn(format_args!(
                    "a child process does not have the pinned memory at {at:#x}, which kernels use ({status})"
                ));
            })
            .ok()
    });
    Ok(copied.collect())
}

impl Copied {
    /// Copies what the program would find there now.
    fn new(pages: &Pages, address: u64, size: u64, piece: &Piece) -> Result<Copied> {
        let (len, protection) = (size as usize, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let copy = unsafe {
            libc::mmap(ptr::null_mut(), len, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if copy == libc::MAP_FAILED {
            return Err(Status::OUT_OF_MEMORY);
        }
        let copied = Copied { address, len, copy };
        // SAFETY: the mapping that was just made.
        let to = unsafe { std::slice::from_raw_parts_mut(copy.cast::<u8>(), len) };
        copied.fill(pages, piece, to).inspect_err(|_| copied.drop_copy()).map(|()| copied)
    }

    fn fill(&self, pages: &Pages, piece: &Piece, to: &mut [u8]) -> Result {
        let mut at = 0;
        let end = Run { address: self.address + self.len as u64, len: 0 };
        for run in piece.blocks.held(&ALL).into_iter().chain([end]) {
            let first = (run.address - self.address) as usize;
            if at < first && !piece.blocks.is_zero() {
                mirror::read(piece.context, self.address + at as u64, &mut to[at..first])?;
            }
            at = first + run.len as usize;
            // SAFETY: pages that the program has, and that stay while the state is locked.
            unsafe {
                ptr::copy_nonoverlapping(
                    pages.bytes(run.address as usize),
                    to[first..at].as_mut_ptr(),
                    at - first,
                );
            }
        }
        Ok(())
    }

    fn drop_copy(&self) {
        // SAFETY: a mapping of this module that nothing uses any more.
        unsafe { libc::munmap(self.copy, self.len) };
    }
}
