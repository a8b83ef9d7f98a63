//! Reports to a profiler of this process: which functions the program calls, and which records of the ring
//! belong to which call.
//!
//! A profiler's library sets an [`Observer`]. From then on the observer gives each outermost call of the
//! driver or runtime API a *correlation*, a number, and the records that the thread appends during the call
//! are stored with it ([`work`]). It also hears of the driver's calls by which a call of the runtime does its
//! work; they have the correlation of that call. Without an observer this costs nothing, because it depends
//! on the flag of [`counters`](crate::counters).

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::SystemTime;

use crate::seq::Seq;
use crate::{counters, lock};

/// Maximum number of stored records; the oldest are dropped first.
const MOST: usize = 1 << 20;

/// A call of the program's, for an observer in another library: this has C's layout.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Called {
    /// The function's name, which stays as long as the process.
    pub name: *const c_char,
    /// The function's arguments, in a structure as C lays it out.
    pub arguments: *const c_void,
    /// Names the kernel that the call launches: takes these two. NULL for a call that launches none.
    pub kernel: Option<KernelOf>,
    /// The major version of the runtime whose function it is; 0 for the driver's.
    pub runtime: u32,
    /// The correlation of the runtime's call that makes this one; 0 if the program itself makes it.
    pub within: u32,
    /// The function's number in CUPTI's headers; 0: its name and the runtime's version tell it.
    pub number: u32,
}

/// The version and the number for [`enter`] that stand for a function of the driver.
pub(crate) const DRIVER: (u32, u32) = (0, 0);

/// Names the kernel that a call launches: takes the name and the arguments of the function. The result stays
/// until the call ends.
pub type KernelOf = unsafe extern "C" fn(*const c_char, *const c_void) -> *const c_char;

/// Functions that are called at each call of the program. They are in another library, so this has C's
/// layout.
#[repr(C)]
#[derive(Debug)]
pub struct Observer {
    /// Called when a thread enters a function. Returns the call's correlation, which is not 0: that of the
    /// call that it is within, if there is one.
    pub enters: unsafe extern "C" fn(*const Called) -> u32,
    /// Called when the thread leaves the function, with the correlation and the status as well.
    pub leaves: unsafe extern "C" fn(*const Called, u32, u32),
}

static OBSERVER: AtomicPtr<Observer> = AtomicPtr::new(std::ptr::null_mut());
/// What the driver's calls have as [`Called::kernel`].
static KERNEL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static RESOURCES: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static WORK: Mutex<Remembered> = Mutex::new(Remembered::new());

/// Where a thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Program,
    Runtime,
    Driver,
    /// In the observer, whose own calls are not reported.
    Observer,
}

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place::Program) };
    /// The correlation of the call that this thread is in; 0: none.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
    /// The status of the driver's call that this thread is in.
    static STATUS: Cell<u32> = const { Cell::new(0) };
    /// Whether the call copies memory that the program has not pinned.
    static PAGEABLE: Cell<bool> = const { Cell::new(false) };
    /// The number of the graph that the call launches; 0: none.
    static GRAPH: Cell<u32> = const { Cell::new(0) };
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
    /// The number of the graph that the call launches; 0: none.
    pub graph: u32,
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

/// Sets or removes the observer of calls. `kernel` names the kernel that a call of the driver launches.
pub fn observe(observer: Option<&'static Observer>, kernel: KernelOf) {
    KERNEL.store(kernel as *mut c_void, Ordering::Release);
    let pointer = observer.map_or(std::ptr::null_mut(), |observer| std::ptr::from_ref(observer).cast_mut());
    OBSERVER.store(pointer, Ordering::Release);
    counters::watch_calls(observer.is_some());
}

/// Whether calls are observed.
pub fn is_observed() -> bool {
    !OBSERVER.load(Ordering::Acquire).is_null()
}

/// What [`Made`] is about: numbers of CUPTI (`CUpti_CallbackIdResource`).
pub mod resource {
    /// A context.
    pub const CONTEXT_CREATED: u32 = 1;
    /// A graph.
    pub const GRAPH_CREATED: u32 = 9;
    /// A graph that is a copy of another.
    pub const GRAPH_CLONED: u32 = 11;
    /// A node of a graph.
    pub const GRAPH_NODE_CREATED: u32 = 13;
    /// An instance of a graph.
    pub const GRAPH_EXEC_CREATED: u32 = 18;
    /// A node of a graph that is a copy of another.
    pub const GRAPH_NODE_CLONED: u32 = 20;
}

/// Something that this process has made, for an observer in another library: this has C's layout. Handles are
/// 0 where they do not apply.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Made {
    /// A number of [`resource`].
    pub what: u32,
    /// The context to which it belongs.
    pub context: usize,
    /// Handles of a graph, of the one that it was copied from, of a node, and of the node that it was copied
    /// from, and the node's type (`CUgraphNodeType`): from here on this is CUPTI's `CUpti_GraphData`.
    pub graph: usize,
    /// See `graph`.
    pub original_graph: usize,
    /// See `graph`.
    pub node: usize,
    /// See `graph`.
    pub original_node: usize,
    /// See `graph`.
    pub node_type: u32,
    /// A node on which another one depends: never told.
    pub dependency: usize,
    /// The handle of an instance.
    pub exec: usize,
}

/// A function that is called for what is made.
pub type ResourceObserver = unsafe extern "C" fn(*const Made);

/// Sets or removes the observer of what is made.
pub fn observe_resources(observer: Option<ResourceObserver>) {
    let pointer = observer.map_or(std::ptr::null_mut(), |observer| observer as *mut c_void);
    RESOURCES.store(pointer, Ordering::Release);
}

/// Whether there is an observer of what is made.
#[inline]
pub fn resources_are_observed() -> bool {
    !RESOURCES.load(Ordering::Relaxed).is_null()
}

/// Reports what was made.
pub fn made(made: &Made) {
    let observer = RESOURCES.load(Ordering::Acquire);
    if !observer.is_null() {
        // SAFETY: `observe_resources` has stored a function of this type, of a library that is never closed.
        unsafe { std::mem::transmute::<*mut c_void, ResourceObserver>(observer)(made) };
    }
}

/// Reports a new context.
pub fn context_made(handle: usize) {
    made(&Made { what: resource::CONTEXT_CREATED, context: handle, ..Made::default() });
}

/// Drops all stored records.
pub fn forget() {
    *lock(&WORK) = Remembered::new();
}

/// The call for which a stored record was appended. The record stays: several records of a device may belong
/// to it, such as those of a graph's nodes.
pub fn work(seq: Seq) -> Option<Work> {
    lock(&WORK).work.as_ref()?.get(&seq).copied()
}

/// A call that the observer knows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reported {
    called: Called,
    correlation: u32,
    /// Where the thread was before.
    from: Place,
}

/// Calls the observer, unless the thread is being destroyed.
fn tell<R>(then: Place, call: impl FnOnce(&Observer) -> R) -> Option<R> {
    // SAFETY: `observe` has stored a reference that lives as long as the process, or NULL.
    let observer = unsafe { OBSERVER.load(Ordering::Acquire).as_ref() };
    PLACE.try_with(|place| place.set(Place::Observer)).ok()?;
    let told = observer.map(call);
    let _ = PLACE.try_with(|place| place.set(then));
    told
}

/// Reports that this thread enters a function, if there is an observer that hears of this call. `runtime` and
/// `number` are [`Called`]'s.
///
/// # Safety
/// The arguments stay until [`leave`], and are those of the function with this name.
pub(crate) unsafe fn enter(
    name: &'static CStr,
    arguments: *const c_void,
    (runtime, number): (u32, u32),
    kernel: Option<KernelOf>,
) -> Option<Reported> {
    if !is_observed() {
        return None;
    }
    let from = PLACE.try_with(Cell::get).ok()?;
    let (within, then) = match (from, runtime) {
        (Place::Program, 0) => (0, Place::Driver),
        (Place::Program, _) => (0, Place::Runtime),
        (Place::Runtime, 0) => (CURRENT.try_with(Cell::get).ok()?, Place::Driver),
        _ => return None,
    };
    if from == Place::Program {
        let _ = PAGEABLE.try_with(|pageable| pageable.set(false));
        let _ = GRAPH.try_with(|graph| graph.set(0));
    }
    let _ = STATUS.try_with(|status| status.set(0));
    let of_driver = KERNEL.load(Ordering::Acquire);
    let kernel = kernel.or_else(|| {
        // SAFETY: NULL, which is none, or a function of this type, which `observe` has stored.
        unsafe { std::mem::transmute::<*mut c_void, Option<KernelOf>>(of_driver) }
    });
    let called = Called { name: name.as_ptr(), arguments, kernel, runtime, within, number };
    // SAFETY: the observer's own function, and a structure that lives through the call.
    let correlation = tell(then, |observer| unsafe { (observer.enters)(&called) }).unwrap_or(0);
    let _ = CURRENT.try_with(|current| current.set(correlation));
    Some(Reported { called, correlation, from })
}

/// Reports that this thread leaves a function of the driver. Its status is what [`failed`] has noted.
pub(crate) fn leave(reported: &Reported) {
    leave_with(reported, STATUS.try_with(Cell::get).unwrap_or(0));
}

/// Reports that this thread leaves a function, which returns `status`.
pub(crate) fn leave_with(reported: &Reported, status: u32) {
    let Reported { called, correlation, from } = reported;
    // SAFETY: the observer's own function, and a structure that lives through the call; its arguments are
    // there as `enter`'s caller says.
    tell(*from, |observer| unsafe { (observer.leaves)(called, *correlation, status) });
    let _ = CURRENT.try_with(|current| current.set(called.within));
}

/// Notes that this thread's call of the driver has failed.
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

/// Notes that this thread's call launches the graph with this number.
#[inline]
pub fn launches_graph(number: u32) {
    if counters::calls_are_watched() {
        let _ = GRAPH.try_with(|graph| graph.set(number));
    }
}

/// Stores a record that this thread has appended.
pub(crate) fn appended(seq: Seq) {
    let correlation = CURRENT.try_with(Cell::get).unwrap_or(0);
    if correlation != 0 && !OBSERVER.load(Ordering::Relaxed).is_null() {
        let pageable = PAGEABLE.try_with(Cell::get).unwrap_or(false);
        let graph = GRAPH.try_with(Cell::get).unwrap_or(0);
        lock(&WORK).keep(seq, Work { correlation, at: now(), pageable, graph });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_number_of_stored_records_is_limited() {
        let mut kept = Remembered::new();
        let work = Work { correlation: 3, at: 0, pageable: false, graph: 0 };
        for number in 0..MOST as u64 + 5 {
            kept.keep(Seq::for_tests(0, number), work);
        }
        let all = kept.work.unwrap();
        assert_eq!((all.len(), kept.order.len()), (MOST, MOST));
        assert!(!all.contains_key(&Seq::for_tests(0, 4)) && all.contains_key(&Seq::for_tests(0, 5)));
    }

    /// What the observer was told: the function, what it is within, and at its end its correlation and its
    /// status.
    type Told = (&'static CStr, u32, u32, Option<u32>);

    thread_local! {
        static TOLD: RefCell<Vec<Told>> = const { RefCell::new(Vec::new()) };
    }

    unsafe extern "C" fn enters(called: *const Called) -> u32 {
        // SAFETY: a call, and the name of a function of this test.
        let (called, name) = unsafe { (&*called, CStr::from_ptr((*called).name)) };
        TOLD.with_borrow_mut(|told| told.push((name, called.within, 0, None)));
        // SAFETY: the observer's own call, without arguments.
        assert!(unsafe { enter(c"cuObservers", std::ptr::null(), DRIVER, None) }.is_none());
        if called.within == 0 { 77 } else { called.within }
    }

    unsafe extern "C" fn leaves(called: *const Called, correlation: u32, status: u32) {
        // SAFETY: a call, and the name of a function of this test.
        let (called, name) = unsafe { (&*called, CStr::from_ptr((*called).name)) };
        TOLD.with_borrow_mut(|told| told.push((name, called.within, correlation, Some(status))));
    }

    #[test]
    fn the_drivers_calls_within_one_of_the_runtime_have_its_number_and_their_own_status() {
        static OBSERVED: Observer = Observer { enters, leaves };
        OBSERVER.store((&raw const OBSERVED).cast_mut(), Ordering::Release);
        // SAFETY: functions without arguments.
        let enter = |name, runtime| unsafe { enter(name, std::ptr::null(), (runtime, 0), None) };
        let outer = enter(c"cudaOuter", 13).unwrap();
        for status in [2, 0] {
            let inner = enter(c"cuInner", 0).unwrap();
            assert!(enter(c"cuInnermost", 0).is_none());
            if status != 0 {
                failed(status);
            }
            leave(&inner);
        }
        // The runtime may find that nothing went wrong, or something that the driver does not know of.
        leave_with(&outer, 98);
        let alone = enter(c"cuAlone", 0).unwrap();
        leave(&alone);
        OBSERVER.store(std::ptr::null_mut(), Ordering::Release);
        assert!(enter(c"cudaOuter", 13).is_none());
        let expected = [
            (c"cudaOuter", 0, 0, None),
            (c"cuInner", 77, 0, None),
            (c"cuInner", 77, 77, Some(2)),
            (c"cuInner", 77, 0, None),
            (c"cuInner", 77, 77, Some(0)),
            (c"cudaOuter", 0, 77, Some(98)),
            (c"cuAlone", 0, 0, None),
            (c"cuAlone", 0, 77, Some(0)),
        ];
        assert_eq!(TOLD.take(), expected);
    }
}
