//! What this process has done: counted always, and printed at exit with `RGPU_STATS=1`, together and for each function of the APIs.
//!
//! ```text
//!  rgpu: stats: pid=71 commands=200011 round_trips=3 exchanges=2 doorbells=29 …
//!  rgpu: stats: cuLaunchKernel calls=200000 commands=200000 round_trips=0 exchanges=0 doorbells=28 …
//! ```
//!
//! What happens while a thread is inside an exported function is put down to the outermost one ([`enter`]), and to the function of the runtime API that called it
//! ([`enter_runtime`]); what helpers do belongs to the whole only.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use log;
use protocol::trace::{RECORDER, VARIABLE};

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

/// One thing that is counted.
#[derive(Debug)]
pub struct Counter {
    total: AtomicU64,
    index: usize,
}

impl Counter {
    /// How often, or how many, so far.
    pub fn get(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }
}

counters! {
    /// Records appended to the ring.
    commands;
    /// Answers that a thread waited for. One that was asked for ahead and is there when it is wanted is none.
    round_trips;
    /// Round trips one after the other: several that a thread asks for before it waits for the first are one exchange.
    exchanges;
    /// Times that the host side slept and its doorbell was rung: in a guest, each is an exit.
    doorbells;
    /// Bytes copied by this process between program memory and the arena, or into records.
    copied_bytes;
    /// Times that a thread went to sleep to wait for the host side.
    sleeps;
    /// Sleeps that the host side ended: in a guest by an interrupt, which may have ended others as well.
    interrupts;
    /// System calls to ring and to wait; those that pin memory, and those of starting and ending a session, are not among them.
    system_calls;
    /// Accesses to managed memory that this library answered.
    page_faults;
    /// Times that a thread found the ring full.
    ring_full;
    /// Times that a thread found the arena full.
    arena_full;
}

/// Whether counts are put down to functions.
static BY_CALL: AtomicBool = AtomicBool::new(false);

/// The functions that were called, in the order of their first call.
static CALLED: Mutex<Vec<&'static Call>> = Mutex::new(Vec::new());

thread_local! {
    /// The exported function that this thread is in.
    static INSIDE: Cell<Option<&'static Call>> = const { Cell::new(None) };
    /// The function of the runtime API that this thread is in.
    static RUNTIME: Cell<Option<&'static Call>> = const { Cell::new(None) };
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
    // A thread that is being torn down is in no function.
    let here = [INSIDE.try_with(Cell::get), RUNTIME.try_with(Cell::get)];
    for call in here.into_iter().flatten().flatten() {
        call.counts[index].fetch_add(n, Ordering::Relaxed);
    }
}

/// An exported function and what its calls took.
#[derive(Debug)]
pub struct Call {
    name: &'static str,
    calls: AtomicU64,
    counts: [AtomicU64; NAMES.len()],
}

impl Call {
    /// A function that has not been called.
    pub const fn new(name: &'static str) -> Call {
        Call { name, calls: AtomicU64::new(0), counts: [const { AtomicU64::new(0) }; NAMES.len()] }
    }
}

/// The thread is inside the function until this is dropped.
#[derive(Debug)]
pub struct Inside(());

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(None));
    }
}

/// Says that this thread enters an exported function. `None` if nobody asked for such counts, or if one exported function calls another.
#[inline]
pub fn enter(call: &'static Call) -> Option<Inside> {
    if BY_CALL.load(Ordering::Relaxed) { enter_counted(call) } else { None }
}

#[cold]
fn enter_counted(call: &'static Call) -> Option<Inside> {
    if !matches!(INSIDE.try_with(Cell::get), Ok(None)) {
        return None;
    }
    called(call);
    INSIDE.try_with(|inside| inside.set(Some(call))).is_ok().then_some(Inside(()))
}

fn called(call: &'static Call) {
    if call.calls.fetch_add(1, Ordering::Relaxed) == 0 {
        CALLED.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

/// Says that this thread enters a function of the runtime API, whose library keeps `known` for it, NULL at first. False if one function of the runtime calls another, or if nobody asked for such
/// counts; else the thread is inside until [`leave_runtime`].
pub fn enter_runtime(known: &AtomicPtr<Call>, name: &CStr) -> bool {
    if !BY_CALL.load(Ordering::Relaxed) || !matches!(RUNTIME.try_with(Cell::get), Ok(None)) {
        return false;
    }
    static MAKING: Mutex<()> = Mutex::new(());
    // SAFETY: only the line below writes there, with what is never freed.
    let call = unsafe { known.load(Ordering::Acquire).as_ref() }.unwrap_or_else(|| {
        let _turn = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as above.
        unsafe { known.load(Ordering::Acquire).as_ref() }.unwrap_or_else(|| {
            let name = Box::leak(name.to_string_lossy().into_owned().into_boxed_str());
            let made: &'static Call = Box::leak(Box::new(Call::new(name)));
            known.store(std::ptr::from_ref(made).cast_mut(), Ordering::Release);
            made
        })
    });
    called(call);
    RUNTIME.try_with(|runtime| runtime.set(Some(call))).is_ok()
}

/// The thread leaves the function of the runtime API that it entered last.
pub fn leave_runtime() {
    let _ = RUNTIME.try_with(|runtime| runtime.set(None));
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
        text += &format!("rgpu: stats: {} calls={}{counts}\n", call.name, call.calls.load(Ordering::Relaxed));
    }
    text
}

/// Records when commands came where from now on, and writes it to a file when the process exits, if `RGPU_TRACE` names a folder for that.
pub fn trace_to_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn write() {
        let (Some(folder), Some(text)) = (std::env::var_os(VARIABLE), RECORDER.take()) else { return };
        let path = std::path::Path::new(&folder).join(format!("program-{}", std::process::id()));
        if let Err(error) = std::fs::write(&path, text) {
            log::warn(format_args!("cannot write a timeline to {}: {error}", path.display()));
        }
    }
    ONCE.call_once(|| {
        if std::env::var_os(VARIABLE).is_some_and(|folder| !folder.is_empty()) {
            RECORDER.start();
            // SAFETY: `write` is a plain C function that lives as long as this library.
            unsafe { libc::atexit(write) };
        }
    });
}

/// The word before the process's number on the line of all together: a process has a session for CUDA, and one for NVML.
static WHOLE: OnceLock<&str> = OnceLock::new();

/// Counts by function from now on and prints everything when the process exits, if `RGPU_STATS=1` asks for it. The line of all together begins with `whole`.
pub fn print_at_exit(whole: &'static str) {
    static ONCE: Once = Once::new();
    extern "C" fn print() {
        let text = report();
        // SAFETY: the pointer and length are those of a live string; a failed write is of no consequence.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
    ONCE.call_once(|| {
        if std::env::var_os("RGPU_STATS").is_some_and(|value| value == "1") {
            let _ = WHOLE.set(whole);
            BY_CALL.store(true, Ordering::Relaxed);
            // SAFETY: `print` is a plain C function that lives as long as this library.
            unsafe { libc::atexit(print) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The switch is the process's.
    static TURN: Mutex<()> = Mutex::new(());

    #[test]
    fn what_a_thread_does_inside_a_function_is_put_down_to_the_outermost() {
        static OUTER: Call = Call::new("outer");
        static INNER: Call = Call::new("inner");
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        BY_CALL.store(true, Ordering::Relaxed);
        add(&COUNTERS.commands, 100);
        {
            let _outer = enter(&OUTER);
            add(&COUNTERS.commands, 2);
            let _inner = enter(&INNER);
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
    fn what_a_function_of_the_runtime_does_is_put_down_to_it_and_to_the_drivers() {
        static DRIVERS: Call = Call::new("cuInner");
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = AtomicPtr::default();
        assert!(!enter_runtime(&known, c"cudaOuter"), "nobody asked");
        BY_CALL.store(true, Ordering::Relaxed);
        assert!(enter_runtime(&known, c"cudaOuter"));
        assert!(!enter_runtime(&AtomicPtr::default(), c"cudaInner"), "it is inside one");
        let inside = enter(&DRIVERS);
        add(&COUNTERS.ring_full, 2);
        drop(inside);
        leave_runtime();
        add(&COUNTERS.ring_full, 5);
        BY_CALL.store(false, Ordering::Relaxed);
        // SAFETY: made above, and never freed.
        let outer = unsafe { &*known.load(Ordering::Relaxed) };
        for call in [&DRIVERS, outer] {
            assert_eq!(call.counts[COUNTERS.ring_full.index].load(Ordering::Relaxed), 2, "{}", call.name);
        }
        assert_eq!((outer.name, outer.calls.load(Ordering::Relaxed)), ("cudaOuter", 1));
    }
}
