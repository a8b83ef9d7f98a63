//! Counts what this process does. With `RGPU_STATS=1`, prints the counts at exit, in total and for each API
//! function.
//!
//! ```text
//!  rgpu: stats: pid=71 commands=200011 round_trips=3 exchanges=2 doorbells=29 …
//!  rgpu: stats: cuLaunchKernel calls=200000 commands=200000 round_trips=0 exchanges=0 doorbells=28 …
//! ```
//!
//! Events inside an exported function are attributed to the outermost one ([`enter`]), and to the runtime API
//! function that called it ([`enter_runtime`]). Events in helper threads only count in the total.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use protocol::trace::{Name, RECORDER, VARIABLE};

use crate::activity::{self, KernelOf, Reported};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// The process's counters.
        #[derive(Debug)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
        }

        #[expect(non_camel_case_types, reason = "the counters' names, as numbers")]
        enum Index { $($name,)* }

        const NAMES: &[&str] = &[$(stringify!($name),)*];

        /// The process's counters.
        pub static COUNTERS: Counters = Counters {
            $($name: Counter { total: AtomicU64::new(0), index: Index::$name as usize },)*
        };

        impl Counters {
            fn all(&self) -> [&Counter; NAMES.len()] {
                [$(&self.$name,)*]
            }
        }
    };
}

/// A counter.
#[derive(Debug)]
pub struct Counter {
    total: AtomicU64,
    index: usize,
}

impl Counter {
    /// The current count.
    pub fn get(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }
}

counters! {
    /// Records appended to the ring.
    commands;
    /// Replies that a thread waited for. A reply requested early that has arrived when it is needed does not
    /// count.
    round_trips;
    /// Sequences of overlapping round trips: several replies that a thread requests before waiting for the
    /// first are one exchange.
    exchanges;
    /// Doorbells rung because the host side was asleep. In a guest, each is a VM exit.
    doorbells;
    /// Bytes that this process copied between program memory and the arena, or into records.
    copied_bytes;
    /// Bytes of NCCL's messages that went over direct connections of servers, without this process touching
    /// them.
    nccl_direct_bytes;
    /// Bytes of NCCL's messages that this process has sent over its own sockets.
    nccl_staged_bytes;
    /// Times that a thread slept to wait for the host side.
    sleeps;
    /// Sleeps that the host side ended: in a guest, by an interrupt, which may have ended others as well.
    interrupts;
    /// System calls for doorbells and waits. Those that pin memory, start a session or end it are not
    /// counted.
    system_calls;
    /// Accesses to managed memory that this library resolved.
    page_faults;
    /// Times that new work sent what the program had written to pages of mirrored pinned memory, which stay.
    pages_sent;
    /// Times that new work took pages of mirrored pinned memory that the program had got while no work was
    /// under way, or may write to unnoticed.
    pages_idle;
    /// Times that it took pages that the server does not watch: runs of more than two, mostly.
    pages_unwatched;
    /// Times that a copy, a fill or a message took pages of mirrored pinned memory.
    pages_lent;
    /// Times that the program learned of the end of work, which took pages of mirrored pinned memory.
    pages_waited;
    /// Bytes of mirrored pinned memory that this process fetched and sent, with what a change needs besides
    /// the bytes.
    mirror_bytes;
    /// Times that a thread found the ring full.
    ring_full;
    /// Times that a thread waited because much of the program's work was queued behind a host function.
    queue_full;
    /// Times that a thread found the arena full.
    arena_full;
    /// Pieces by which the arena grew.
    arena_pieces;
    /// Microseconds that threads spent waiting for replies and progress of the host side.
    waited_us;
}

/// Whether events are attributed to functions.
static BY_CALL: AtomicBool = AtomicBool::new(false);

/// Why functions are marked, besides being counted: see [`watch_calls`].
static WATCHED: AtomicBool = AtomicBool::new(false);
/// Whether they are counted.
static COUNTED: AtomicBool = AtomicBool::new(false);

/// The functions that were called, in the order of their first calls.
static CALLED: Mutex<Vec<&'static Call>> = Mutex::new(Vec::new());

thread_local! {
    /// The exported function that this thread is inside.
    static INSIDE: Cell<Option<&'static Call>> = const { Cell::new(None) };
    /// The runtime API function that this thread is inside.
    static RUNTIME: Cell<Option<&'static Call>> = const { Cell::new(None) };
    /// When it entered that function.
    static SINCE: Cell<u64> = const { Cell::new(0) };
    /// That call, if an observer knows it.
    static REPORTED: Cell<Option<Reported>> = const { Cell::new(None) };
}

/// Sets whether the functions that the program calls are reported to [`activity`].
pub(crate) fn watch_calls(watched: bool) {
    WATCHED.store(watched, Ordering::Relaxed);
    BY_CALL.store(watched || COUNTED.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Whether it is.
#[inline]
pub(crate) fn calls_are_watched() -> bool {
    WATCHED.load(Ordering::Relaxed)
}

/// True while functions are to be marked. A library of the runtime API looks at it before it calls
/// [`enter_runtime`].
pub fn are_calls_marked() -> &'static AtomicBool {
    &BY_CALL
}

/// From now on events are attributed to functions.
fn count_calls() {
    COUNTED.store(true, Ordering::Relaxed);
    BY_CALL.store(true, Ordering::Relaxed);
}

/// Adds to a counter.
#[inline]
pub fn add(counter: &Counter, n: u64) {
    counter.total.fetch_add(n, Ordering::Relaxed);
    if BY_CALL.load(Ordering::Relaxed) {
        put_down(counter.index, n);
    }
}

#[cold]
fn put_down(index: usize, n: u64) {
    // A thread that is being destroyed is inside no function.
    let here = [INSIDE.try_with(Cell::get), RUNTIME.try_with(Cell::get)];
    for call in here.into_iter().flatten().flatten() {
        call.counts[index].fetch_add(n, Ordering::Relaxed);
    }
}

/// An exported function, with the counts of its calls.
#[derive(Debug)]
pub struct Call {
    name: &'static CStr,
    /// Whether it is a function of the runtime API, which calls functions of the driver API.
    runtime: bool,
    calls: AtomicU64,
    counts: [AtomicU64; NAMES.len()],
    /// Its name in the timeline.
    traced: Name,
}

impl Call {
    /// A function that has not been called. Its name ends with NUL.
    ///
    /// # Panics
    /// If it does not.
    pub const fn new(name: &'static str) -> Call {
        let counts = [const { AtomicU64::new(0) }; NAMES.len()];
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else { panic!("a name ends with NUL") };
        Call { name, runtime: false, calls: AtomicU64::new(0), counts, traced: Name::new() }
    }

    fn name(&self) -> &'static str {
        self.name.to_str().unwrap_or_default()
    }
}

/// Marks the thread as inside a function until dropped.
#[derive(Debug)]
pub struct Inside<'a> {
    call: &'static Call,
    since: u64,
    reported: Option<Reported>,
    /// The function's arguments.
    arguments: PhantomData<&'a ()>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(None));
        note(self.call, self.since);
        self.reported.iter().for_each(activity::leave);
    }
}

/// Puts a call into the timeline, if there is one.
fn note(call: &'static Call, since: u64) {
    if since != 0 {
        RECORDER.call(&call.traced, call.name(), since);
    }
}

/// Marks this thread as inside an exported function. `None` if functions are not counted, or if another
/// exported function made the call. `arguments` makes a structure of the function's arguments, with C's
/// layout, which is kept in `place` for an observer.
#[inline]
pub fn enter<'a, A>(
    call: &'static Call,
    place: &'a mut MaybeUninit<A>,
    arguments: impl FnOnce() -> A,
) -> Option<Inside<'a>> {
    if BY_CALL.load(Ordering::Relaxed) {
        enter_counted(call, std::ptr::from_mut(place.write(arguments())).cast())
    } else {
        None
    }
}

#[cold]
fn enter_counted<'a>(call: &'static Call, arguments: *const c_void) -> Option<Inside<'a>> {
    if !matches!(INSIDE.try_with(Cell::get), Ok(None)) {
        return None;
    }
    called(call);
    // SAFETY: `enter` keeps the arguments borrowed as long as the result lives.
    let reported = unsafe { activity::enter(call.name, arguments, activity::DRIVER, None) };
    let inside = Inside { call, since: RECORDER.clock(), reported, arguments: PhantomData };
    INSIDE.try_with(|current| current.set(Some(call))).is_ok().then_some(inside)
}

fn called(call: &'static Call) {
    if call.calls.fetch_add(1, Ordering::Relaxed) == 0 {
        CALLED.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

/// What the runtime library says of one of its functions when a thread enters it.
#[derive(Debug)]
pub struct RuntimeCall<'a> {
    /// What is kept for the function: NULL at first.
    pub known: &'a AtomicPtr<Call>,
    /// The function's name.
    pub name: &'a CStr,
    /// Its arguments, in a structure with C's layout.
    pub arguments: *const c_void,
    /// Names the kernel that it launches.
    pub kernel: Option<KernelOf>,
    /// The library's major version.
    pub version: u32,
    /// The function's number in CUPTI's `cupti_runtime_cbid.h`; 0 if the library does not know it.
    pub number: u32,
}

/// Marks this thread as inside a runtime API function until [`leave_runtime`]. Returns false if another
/// runtime function made the call or if functions are not counted.
///
/// # Safety
/// The arguments are those of this function, and stay until [`leave_runtime`].
pub unsafe fn enter_runtime(entered: &RuntimeCall<'_>) -> bool {
    let RuntimeCall { known, name, arguments, kernel, version, number } = *entered;
    if !BY_CALL.load(Ordering::Relaxed) || !matches!(RUNTIME.try_with(Cell::get), Ok(None)) {
        return false;
    }
    static MAKING: Mutex<()> = Mutex::new(());
    // SAFETY: only the store below writes the pointer, and what it points to is never freed.
    let call = unsafe { known.load(Ordering::Acquire).as_ref() }.unwrap_or_else(|| {
        let _turn = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this function stores only pointers that are never freed.
        unsafe { known.load(Ordering::Acquire).as_ref() }.unwrap_or_else(|| {
            // The library may be closed before the process ends.
            let name: &'static CStr = Box::leak(name.to_owned().into_boxed_c_str());
            let made: &'static Call = Box::leak(Box::new(Call { runtime: true, name, ..Call::new("\0") }));
            known.store(std::ptr::from_ref(made).cast_mut(), Ordering::Release);
            made
        })
    });
    called(call);
    // SAFETY: as the caller says.
    let reported = unsafe { activity::enter(call.name, arguments, (version, number), kernel) };
    let _ = REPORTED.try_with(|kept| kept.set(reported));
    let _ = SINCE.try_with(|since| since.set(RECORDER.clock()));
    RUNTIME.try_with(|runtime| runtime.set(Some(call))).is_ok()
}

/// Marks this thread as outside the runtime API function that it entered last, which returns `status`.
pub fn leave_runtime(status: u32) {
    if let Ok(Some(call)) = RUNTIME.try_with(|runtime| runtime.replace(None)) {
        note(call, SINCE.try_with(Cell::get).unwrap_or(0));
        let reported = REPORTED.try_with(Cell::take).ok().flatten();
        reported.iter().for_each(|reported| activity::leave_with(reported, status));
    }
}

fn line(counts: impl Iterator<Item = u64>) -> String {
    NAMES.iter().zip(counts).map(|(name, count)| format!(" {name}={count}")).collect()
}

fn report() -> String {
    let total = line(COUNTERS.all().into_iter().map(Counter::get));
    let whole = WHOLE.get().copied().unwrap_or("pid");
    let mut text = format!("rgpu: stats: {whole}={}{total}\n", std::process::id());
    for call in CALLED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let counts = line(call.counts.iter().map(|count| count.load(Ordering::Relaxed)));
        text +=
            &format!("rgpu: stats: {} calls={}{counts}\n", call.name(), call.calls.load(Ordering::Relaxed));
    }
    text
}

/// The driver API's functions that waited for the host side, one line for each: `name calls waits
/// microseconds`.
fn waits() -> String {
    let of = |call: &Call, counter: &Counter| call.counts[counter.index].load(Ordering::Relaxed);
    let called = CALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = called.iter().filter(|call| !call.runtime && of(call, &COUNTERS.waited_us) > 0);
    waited
        .map(|call| {
            let (calls, waits) = (call.calls.load(Ordering::Relaxed), of(call, &COUNTERS.round_trips));
            format!("{} {calls} {waits} {}\n", call.name(), of(call, &COUNTERS.waited_us))
        })
        .collect()
}

/// If `RGPU_TRACE` names a folder, starts recording a timeline and counting by function, and writes both to
/// files there when the process exits.
pub fn trace_to_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn write() {
        let (Some(folder), Some(text)) = (std::env::var_os(VARIABLE), RECORDER.take()) else { return };
        for (what, text) in [("program", text), ("waits", waits())] {
            let path = std::path::Path::new(&folder).join(format!("{what}-{}", std::process::id()));
            if let Err(error) = std::fs::write(&path, text) {
                log::warn(format_args!("cannot write a timeline to {}: {error}", path.display()));
            }
        }
    }
    ONCE.call_once(|| {
        if std::env::var_os(VARIABLE).is_some_and(|folder| !folder.is_empty()) {
            RECORDER.start();
            count_calls();
            // SAFETY: `write` is a plain C function that lives as long as this library.
            unsafe { libc::atexit(write) };
        }
    });
}

/// The key before the process ID in the line of totals. A process can have one session for CUDA and one for
/// NVML.
static WHOLE: OnceLock<&str> = OnceLock::new();

/// If `RGPU_STATS=1`, starts counting by function and prints everything when the process exits. The line of
/// totals begins with `whole`.
pub fn print_at_exit(whole: &'static str) {
    static ONCE: Once = Once::new();
    extern "C" fn print() {
        let text = report();
        // SAFETY: the pointer and length are those of a live string. A failed write is ignored.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
    ONCE.call_once(|| {
        if log::setting::word("RGPU_STATS", &["0", "1"]) == Some("1") {
            let _ = WHOLE.set(whole);
            count_calls();
            // SAFETY: `print` is a plain C function that lives as long as this library.
            unsafe { libc::atexit(print) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The switch is global to the process.
    static TURN: Mutex<()> = Mutex::new(());

    /// Enters a function without arguments.
    fn inside<'a>(call: &'static Call) -> Option<Inside<'a>> {
        enter(call, Box::leak(Box::new(MaybeUninit::uninit())), || ())
    }

    fn runtime(known: &AtomicPtr<Call>, name: &CStr) -> bool {
        // SAFETY: functions without arguments.
        unsafe {
            enter_runtime(&RuntimeCall {
                known,
                name,
                arguments: std::ptr::null(),
                kernel: None,
                version: 13,
                number: 0,
            })
        }
    }

    #[test]
    fn events_are_attributed_to_the_outermost_function() {
        static OUTER: Call = Call::new("outer\0");
        static INNER: Call = Call::new("inner\0");
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        BY_CALL.store(true, Ordering::Relaxed);
        add(&COUNTERS.commands, 100);
        {
            let _outer = inside(&OUTER);
            add(&COUNTERS.commands, 2);
            let _inner = inside(&INNER);
            add(&COUNTERS.commands, 3);
        }
        add(&COUNTERS.commands, 100);
        BY_CALL.store(false, Ordering::Relaxed);
        let counted = |call: &Call| call.counts[COUNTERS.commands.index].load(Ordering::Relaxed);
        assert_eq!((counted(&OUTER), counted(&INNER)), (5, 0));
        assert!(COUNTERS.commands.get() >= 205);
        assert!(
            report().contains("rgpu: stats: outer calls=1 commands=5 round_trips=0 exchanges=0"),
            "{}",
            report()
        );
    }

    #[test]
    fn a_function_that_waited_is_listed_with_its_calls_and_its_time() {
        static WAITED: Call = Call::new("cuWaited\0");
        static BUSY: Call = Call::new("cuBusy\0");
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        BY_CALL.store(true, Ordering::Relaxed);
        for _ in 0..3 {
            let _inside = inside(&WAITED);
            add(&COUNTERS.round_trips, 2);
            add(&COUNTERS.waited_us, 50);
        }
        drop(inside(&BUSY));
        BY_CALL.store(false, Ordering::Relaxed);
        let waits = waits();
        assert!(waits.contains("cuWaited 3 6 150\n") && !waits.contains("cuBusy"), "{waits}");
    }

    #[test]
    fn events_are_attributed_to_runtime_and_driver_functions() {
        static DRIVERS: Call = Call::new("cuInner\0");
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = AtomicPtr::default();
        assert!(!runtime(&known, c"cudaOuter"), "not enabled");
        BY_CALL.store(true, Ordering::Relaxed);
        assert!(runtime(&known, c"cudaOuter"));
        assert!(!runtime(&AtomicPtr::default(), c"cudaInner"), "inside another runtime function");
        let inside = inside(&DRIVERS);
        add(&COUNTERS.ring_full, 2);
        drop(inside);
        leave_runtime(0);
        add(&COUNTERS.ring_full, 5);
        BY_CALL.store(false, Ordering::Relaxed);
        // SAFETY: `enter_runtime` made it, and it is never freed.
        let outer = unsafe { &*known.load(Ordering::Relaxed) };
        for call in [&DRIVERS, outer] {
            assert_eq!(call.counts[COUNTERS.ring_full.index].load(Ordering::Relaxed), 2, "{:?}", call.name);
        }
        assert_eq!((outer.name(), outer.calls.load(Ordering::Relaxed)), ("cudaOuter", 1));
    }
}
