//! Wakes the thread that compares pinned memory in partly owned pages when work is put on a stream.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

use client::lock;

/// There may be something to be taken away, or compared, since the thread last looked.
pub(crate) static CAME: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

pub(crate) fn wake() {
    *lock(&CAME.0) = true;
    CAME.1.notify_one();
}

/// How many there are.
pub(crate) static EDGES: AtomicUsize = AtomicUsize::new(0);

/// How often work of the device has begun since there are any.
pub(crate) static WORK: AtomicU64 = AtomicU64::new(0);

/// After work of the device was put on a stream: it may change what is compared.
#[inline]
pub(crate) fn work_came() {
    if EDGES.load(Ordering::Acquire) != 0 {
        WORK.fetch_add(1, Ordering::AcqRel);
        wake();
    }
}
