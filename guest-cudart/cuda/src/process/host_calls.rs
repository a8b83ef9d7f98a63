//! Which streams wait for this process: for a running host function, or for a word of memory that the program
//! writes.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::abi::result::Result;
use client::counters::{COUNTERS, add};
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

/// The number of threads that wait for a function to return, and what wakes them.
static AWAITED: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Waits until `over`, which becomes true right before a call of [`returned`].
pub(crate) fn wait_for_return(over: impl Fn() -> bool) {
    if over() {
        return;
    }
    let begun = Instant::now();
    let mut waiting = lock(&AWAITED.0);
    *waiting += 1;
    while !over() {
        waiting = AWAITED.1.wait(waiting).unwrap_or_else(PoisonError::into_inner);
    }
    *waiting -= 1;
    drop(waiting);
    add(&COUNTERS.waited_us, begun.elapsed().as_micros() as u64);
}

/// Wakes the threads that wait for a function to return: one has, or will not be called.
pub(crate) fn returned() {
    if *lock(&AWAITED.0) > 0 {
        AWAITED.1.notify_all();
    }
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

/// The next ticket.
static TICKETS: AtomicU64 = AtomicU64::new(FIRST_TICKET);

const FIRST_TICKET: u64 = 1;

/// A ticket that no stream of this process has used.
pub(crate) fn ticket() -> TicketId {
    TicketId(TICKETS.fetch_add(1, Ordering::Relaxed))
}

/// Whether any stream has ever waited for this process.
pub(crate) fn any_has_waited() -> bool {
    TICKETS.load(Ordering::Relaxed) != FIRST_TICKET
}
