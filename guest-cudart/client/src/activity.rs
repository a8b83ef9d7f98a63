//! What a profiler of this process is told: which functions the program calls, and which records of the ring belong to which call.
//!
//! A profiler's library sets an [`Observer`]. From then on each outermost call of the driver or runtime API has a *correlation*, a number that the observer gives, and the records that the
//! thread appends meanwhile are remembered with it ([`take`]). Without an observer all of this costs nothing: it hangs on the flag of [`counters`](crate::counters).

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::SystemTime;

use crate::seq::Seq;
use crate::{counters, lock};

/// Records that are remembered; the oldest are forgotten first.
const MOST: usize = 1 << 20;

/// Who is told of calls. In C's layout, since it lives in another library.
#[repr(C)]
#[derive(Debug)]
pub struct Observer {
    /// A thread enters a function: its name and the name's length, and 1 for a function of the runtime API. Returns the call's correlation, which is not 0.
    pub enters: unsafe extern "C" fn(*const c_char, usize, u32) -> u32,
    /// The thread leaves it: the same, its correlation, and its status.
    pub leaves: unsafe extern "C" fn(*const c_char, usize, u32, u32, u32),
}

static OBSERVER: AtomicPtr<Observer> = AtomicPtr::new(std::ptr::null_mut());
static CONTEXTS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static WORK: Mutex<Remembered> = Mutex::new(Remembered::new());

thread_local! {
    /// The correlation of the call that this thread is in; 0: none.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
    /// Its status so far.
    static STATUS: Cell<u32> = const { Cell::new(0) };
    /// Whether it copies memory that the program has not pinned.
    static PAGEABLE: Cell<bool> = const { Cell::new(false) };
}

/// What a record was appended for.
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

/// Sets who is told of calls, or that nobody is.
pub fn observe(observer: Option<&'static Observer>) {
    let pointer = observer.map_or(std::ptr::null_mut(), |observer| std::ptr::from_ref(observer).cast_mut());
    OBSERVER.store(pointer, Ordering::Release);
    counters::watch_calls(observer.is_some());
}

/// Who is told of a new context, by its handle.
pub type ContextObserver = unsafe extern "C" fn(usize);

/// Sets who is told of new contexts, or that nobody is.
pub fn observe_contexts(observer: Option<ContextObserver>) {
    let pointer = observer.map_or(std::ptr::null_mut(), |observer| observer as *mut c_void);
    CONTEXTS.store(pointer, Ordering::Release);
}

/// The program has a new context.
pub fn context_made(handle: usize) {
    let observer = CONTEXTS.load(Ordering::Acquire);
    if !observer.is_null() {
        // SAFETY: `observe_contexts` has stored a function of this type, of a library that is never closed.
        unsafe { std::mem::transmute::<*mut c_void, ContextObserver>(observer)(handle) };
    }
}

/// Forgets all records.
pub fn forget() {
    *lock(&WORK) = Remembered::new();
}

/// What a record was appended for, if that is remembered.
pub fn work(seq: Seq) -> Option<Work> {
    lock(&WORK).work.as_ref()?.get(&seq).copied()
}

/// A thread enters a function. Returns the call's correlation; 0 if nobody is told of it.
pub(crate) fn enter(name: &'static str, runtime: bool) -> u32 {
    // SAFETY: `observe` has stored a reference that lives as long as the process.
    let Some(observer) = (unsafe { OBSERVER.load(Ordering::Acquire).as_ref() }) else { return 0 };
    // Calls that the observer makes itself are not told of.
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

/// The thread leaves the function that [`enter`] gave this correlation.
pub(crate) fn leave(name: &'static str, runtime: bool, correlation: u32) {
    if correlation == 0 {
        return;
    }
    let status = STATUS.try_with(Cell::get).unwrap_or(0);
    // SAFETY: as in `enter`. Where there is no observer any more, nobody is told.
    if let Some(observer) = unsafe { OBSERVER.load(Ordering::Acquire).as_ref() } {
        // SAFETY: as in `enter`.
        unsafe { (observer.leaves)(name.as_ptr().cast(), name.len(), runtime.into(), correlation, status) };
    }
    let _ = CURRENT.try_with(|current| current.set(0));
}

/// The call that this thread is in has failed.
pub fn failed(status: u32) {
    let _ = STATUS.try_with(|kept| kept.set(status));
}

/// The call that this thread is in copies memory that the program has not pinned.
#[inline]
pub fn copies_pageable() {
    if counters::calls_are_watched() {
        let _ = PAGEABLE.try_with(|pageable| pageable.set(true));
    }
}

/// This thread has appended a record.
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
    fn records_are_remembered_up_to_a_number() {
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
