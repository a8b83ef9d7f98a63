//! Which streams wait for this process: for a host function that is being called, or for a word of memory that the program writes.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::abi::result::Result;
use client::handle::TicketId;
use client::{Status, lock};

/// How many they are, for who may not wait for the lock.
pub(crate) static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Whether a stream waits, or will, for a word of this process's.
pub(crate) fn is_waiting() -> bool {
    WAITING.load(Ordering::Acquire) != 0
}

/// Functions of the program that are being called.
pub(crate) static CALLING: AtomicUsize = AtomicUsize::new(0);

/// The streams, by their unique numbers, that functions are being called for. Each has done everything before its function, and does nothing until that returns.
pub(crate) static STOPPED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Whether a function of the program is being called, so that its stream waits for this process.
pub(crate) fn is_calling() -> bool {
    CALLING.load(Ordering::Acquire) != 0
}

/// The streams, by their unique numbers, that are idle because a function is being called for them. `managed::before_going_on` comes between a stream's disappearance from here and its next work.
pub(crate) fn stopped() -> Vec<u64> {
    lock(&STOPPED).clone()
}

thread_local! {
    /// Whether this thread is in a function of the program's, called for a stream.
    pub(crate) static CALLED: Cell<bool> = const { Cell::new(false) };
}

/// Such a function makes no calls of CUDA's.
///
/// # Errors
/// `NOT_PERMITTED` inside of one.
#[inline]
pub(crate) fn forbid() -> Result {
    // A thread that ends is in none.
    if CALLED.try_with(Cell::get).unwrap_or(false) { Err(Status::NOT_PERMITTED) } else { Ok(()) }
}

/// A ticket that no stream of this process has waited for.
pub(crate) fn ticket() -> TicketId {
    static TICKETS: AtomicU64 = AtomicU64::new(1);
    TicketId(TICKETS.fetch_add(1, Ordering::Relaxed))
}
