//! Reports to a profiler of this process: which functions the program calls, and which records of the ring
//! belong to which call.
//!
//! A profiler's library sets an [`Observer`]. From then on the observer gives each outermost call of the
//! driver or runtime API a *correlation*, a number, and the records that the thread appends during the call
//! are stored with it ([`take`]). Without an observer this costs nothing, because it depends on the flag of
//! [`counters`](crate::counters).

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::SystemTime;

use crate::seq::Seq;
use crate::{counters, lock};

/// Maximum number of stored records; the oldest are dropped first.
const MOST: usize = 1 << 20;

/// Functions that are called at each call of the program. They are in another library, so this has C's
/// layout.
#[repr(C)]
#[derive(Debug)]
pub struct Observer {
    /// Called when a thread enters a function, with the name, the name's length, and 1 for a function of the
    /// runtime API. Returns the call's correlation, which is not 0.
    pub enters: unsafe extern "C" fn(*const c_char, usize, u32) -> u32,
    /// Called when the thread leaves the function, with the same arguments, the correlation and the status.
    pub leaves: unsafe extern "C" fn(*const c_char, usize, u32, u32, u32),
}

static OBSERVER: AtomicPtr<Observer> = AtomicPtr::new(std::ptr::null_mut());
static CONTEXTS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static WORK: Mutex<Remembered> = Mutex::new(Remembered::new());

thread_local! {
    /// The correlation of the call that this thread is in; 0: none.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
    /// The call's status so far.
    static STATUS: Cell<u32> = const { Cell::new(0) };
    /// Whether the call copies memory that the program has not pinned.
    static PAGEABLE: Cell<bool> = const { Cell::new(false) };
}

/// The call for which a record was appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// The call's correlation.
    pub correlation: u32,
    /// When it was appended, in nanoseconds since 1970.
    pub at: u64,
    /// Whether the call copies memory that the program has not pinned.
    pub pageable: bool,
}

#[derive(Debug)]
struct Remembered {
    work: Option<HashMap<Seq, Work>>,
    order: VecDeque<Seq>,
}

impl Remembered {
    const fn new() -> Remembered {
        Remembered { work: None, order: VecDeque::new() }
    }

    fn keep(&mut self, seq: Seq, work: Work) {
        self.work.get_or_insert_default().insert(seq, work);
        self.order.push_back(seq);
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
            && let Some(all) = &mut self.work
        {
            all.remove(&oldest);
        }
    }
}

/// The system's clock in nanoseconds.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

/// Sets or removes the observer of calls.
pub fn observe(observer: Option<&'static Observer>) {
    let pointer = observer.map_or(std::ptr::null_mut(), |observer| std::ptr::from_ref(observer).cast_mut());
    OBSERVER.store(pointer, Ordering::Release);
    counters::watch_calls(observer.is_some());
}

/// Whether calls are observed.
pub fn is_observed() -> bool {
    !OBSERVER.load(Ordering::Acquire).is_null()
}

/// A function that is called for each new context, with its handle.
pub type ContextObserver = unsafe extern "C" fn(usize);

/// Sets or removes the observer of new contexts.
pub fn observe_contexts(observer: Option<ContextObserver>) {
    let pointer = observer.map_or(std::ptr::null_mut(), |observer| observer as *mut c_void);
    CONTEXTS.store(pointer, Ordering::Release);
}

/// Reports a new context.
pub fn context_made(handle: usize) {
    let observer = CONTEXTS.load(Ordering::Acquire);
    if !observer.is_null() {
        // SAFETY: `observe_contexts` has stored a function of this type, of a library that is never closed.
        unsafe { std::mem::transmute::<*mut c_void, ContextObserver>(observer)(handle) };
    }
}

/// Drops all stored records.
pub fn forget() {
    *lock(&WORK) = Remembered::new();
}

/// Removes a stored record, and returns the call for which it was appended.
pub fn work(seq: Seq) -> Option<Work> {
    lock(&WORK).work.as_ref()?.get(&seq).copied()
}

/// Reports that this thread enters a function. Returns the call's correlation; 0 if there is no observer.
pub(crate) fn enter(name: &'static str, runtime: bool) -> u32 {
    // SAFETY: `observe` has stored a reference that lives as long as the process.
    let Some(observer) = (unsafe { OBSERVER.load(Ordering::Acquire).as_ref() }) else { return 0 };
    // Calls that the observer itself makes are not reported.
    if !matches!(CURRENT.try_with(|current| current.replace(current.get().max(1))), Ok(0)) {
        return 0;
    }
    let _ = STATUS.try_with(|status| status.set(0));
    let _ = PAGEABLE.try_with(|pageable| pageable.set(false));
    // SAFETY: the observer's own function, and a name that lives as long as the process.
    let correlation = unsafe { (observer.enters)(name.as_ptr().cast(), name.len(), runtime.into()) };
    let _ = CURRENT.try_with(|current| current.set(correlation));
    correlation
}

/// Reports that this thread leaves the function that [`enter`] gave this correlation.
pub(crate) fn leave(name: &'static str, runtime: bool, correlation: u32) {
    if correlation == 0 {
        return;
    }
    let status = STATUS.try_with(Cell::get).unwrap_or(0);
    // SAFETY: `observe` has stored a reference that lives as long as the process, or NULL.
    if let Some(observer) = unsafe { OBSERVER.load(Ordering::Acquire).as_ref() } {
        // SAFETY: as in `enter`.
        unsafe { (observer.leaves)(name.as_ptr().cast(), name.len(), runtime.into(), correlation, status) };
    }
    let _ = CURRENT.try_with(|current| current.set(0));
}

/// Notes that this thread's call has failed.
pub fn failed(status: u32) {
    let _ = STATUS.try_with(|kept| kept.set(status));
}

/// Notes that this thread's call copies memory that the program has not pinned.
#[inline]
pub fn copies_pageable() {
    if counters::calls_are_watched() {
        let _ = PAGEABLE.try_with(|pageable| pageable.set(true));
    }
}

/// Stores a record that this thread has appended.
pub(crate) fn appended(seq: Seq) {
    let correlation = CURRENT.try_with(Cell::get).unwrap_or(0);
    if correlation != 0 && !OBSERVER.load(Ordering::Relaxed).is_null() {
        let pageable = PAGEABLE.try_with(Cell::get).unwrap_or(false);
        lock(&WORK).keep(seq, Work { correlation, at: now(), pageable });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_stored_records_is_limited() {
        let mut kept = Remembered::new();
        let work = Work { correlation: 3, at: 0, pageable: false };
        for number in 0..MOST as u64 + 5 {
            kept.keep(Seq::for_tests(0, number), work);
        }
        let all = kept.work.unwrap();
        assert_eq!((all.len(), kept.order.len()), (MOST, MOST));
        assert!(!all.contains_key(&Seq::for_tests(0, 4)) && all.contains_key(&Seq::for_tests(0, 5)));
    }
}
