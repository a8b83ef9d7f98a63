//! Tells those who compare pinned memory word by word when work is put on a stream, and when work of one
//! server is about to begin because another one's is done.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock};

use client::lock;

/// Set when the thread has something to look at.
pub(crate) static CAME: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// Wakes the thread.
pub(crate) fn wake() {
    *lock(&CAME.0) = true;
    CAME.1.notify_one();
}

/// How many ranges of memory are compared.
pub(crate) static COMPARED_PIECES: AtomicUsize = AtomicUsize::new(0);

/// Counts work put on streams while such memory exists.
pub(crate) static WORK: AtomicU64 = AtomicU64::new(0);

/// Notes work put on a stream, which may change compared memory.
#[inline]
pub(crate) fn work_came() {
    if COMPARED_PIECES.load(Ordering::Acquire) != 0 {
        WORK.fetch_add(1, Ordering::AcqRel);
        wake();
    }
}

/// Exchanges the words that the sides have changed.
static EXCHANGE: OnceLock<fn()> = OnceLock::new();

/// Sets what [`other_servers_work_is_done`] calls.
pub(crate) fn exchange_by(exchange: fn()) {
    EXCHANGE.get_or_init(|| exchange);
}

/// To be called before work of one server begins that waited for another server's: it may read what that has
/// written to memory that both use.
pub(crate) fn other_servers_work_is_done() {
    if COMPARED_PIECES.load(Ordering::Acquire) != 0
        && let Some(exchange) = EXCHANGE.get()
    {
        exchange();
    }
}
