//! Which streams wait for this process: for a running host function, or for a word of memory that the program
//! writes.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::abi::result::Result;
use client::handle::TicketId;
use client::{Status, lock};

/// The number of streams that wait, or will wait, for a word of this process's memory.
pub(crate) static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Whether a stream waits, or will wait, for a word of this process's memory.
pub(crate) fn is_waiting() -> bool {
    WAITING.load(Ordering::Acquire) != 0
}

/// The number of host functions that are running.
pub(crate) static CALLING: AtomicUsize = AtomicUsize::new(0);

/// Unique numbers of the streams whose host functions are running. Such a stream has finished everything
/// before its function, and starts nothing until the function returns.
pub(crate) static STOPPED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Whether one of the program's host functions is running, so that its stream waits for this process.
pub(crate) fn is_calling() -> bool {
    CALLING.load(Ordering::Acquire) != 0
}

/// Unique numbers of the streams that are idle because their host function is running. After a stream is
/// removed from here, `managed::before_going_on` runs before its next work.
pub(crate) fn stopped() -> Vec<u64> {
    lock(&STOPPED).clone()
}

thread_local! {
    /// Whether this thread is running a host function for a stream.
    pub(crate) static CALLED: Cell<bool> = const { Cell::new(false) };
}

/// Fails inside a host function, which must not call CUDA.
///
/// # Errors
/// `NOT_PERMITTED` inside a host function.
#[inline]
pub(crate) fn forbid() -> Result {
    // A thread whose locals are destroyed is in none.
    if CALLED.try_with(Cell::get).unwrap_or(false) { Err(Status::NOT_PERMITTED) } else { Ok(()) }
}

/// A ticket that no stream of this process has used.
pub(crate) fn ticket() -> TicketId {
    static TICKETS: AtomicU64 = AtomicU64::new(1);
    TicketId(TICKETS.fetch_add(1, Ordering::Relaxed))
}
