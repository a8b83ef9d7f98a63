//! Wakes the thread that compares pinned memory in partly owned pages when work is put on a stream.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

use client::lock;

/// Set when the thread has something to look at.
pub(crate) static CAME: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// Wakes the thread.
pub(crate) fn wake() {
    *lock(&CAME.0) = true;
    CAME.1.notify_one();
}

/// The number of memory pieces that are compared.
pub(crate) static EDGES: AtomicUsize = AtomicUsize::new(0);

/// Counts work put on streams while such memory exists.
pub(crate) static WORK: AtomicU64 = AtomicU64::new(0);

/// Notes work put on a stream, which may change compared memory.
#[inline]
pub(crate) fn work_came() {
    if EDGES.load(Ordering::Acquire) != 0 {
        WORK.fetch_add(1, Ordering::AcqRel);
        wake();
    }
}
