//! What this process has done: counted always, and printed at exit with `RGPU_STATS=1`, together and for each function of the driver API.
//!
//! ```text
//!  rgpu: stats: pid=71 commands=200011 round_trips=3 exchanges=2 doorbells=29 …
//!  rgpu: stats: cuLaunchKernel calls=200000 commands=200000 round_trips=0 exchanges=0 doorbells=28 …
//! ```
//!
//! What happens while a thread is inside an exported function is put down to the outermost one ([`enter`]); what helpers do belongs to the whole only.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use crate::log;
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
    /// Records that were answered in a reply slot.
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
    if let Ok(Some(call)) = INSIDE.try_with(Cell::get) {
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
    if call.calls.fetch_add(1, Ordering::Relaxed) == 0 {
        CALLED.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
    INSIDE.try_with(|inside| inside.set(Some(call))).is_ok().then_some(Inside(()))
}

fn line(counts: impl Iterator<Item = u64>) -> String {
    NAMES.iter().zip(counts).map(|(name, count)| format!(" {name}={count}")).collect()
}

fn report() -> String {
    let total = line(COUNTERS.all().into_iter().map(Counter::get));
    let mut text = format!("rgpu: stats: pid={}{total}\n", std::process::id());
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

/// Counts by function from now on and prints everything when the process exits, if `RGPU_STATS=1` asks for it.
pub fn print_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn print() {
        let text = report();
        // SAFETY: the pointer and length are those of a live string; a failed write is of no consequence.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
    ONCE.call_once(|| {
        if std::env::var_os("RGPU_STATS").is_some_and(|value| value == "1") {
            BY_CALL.store(true, Ordering::Relaxed);
            // SAFETY: `print` is a plain C function that lives as long as this library.
            unsafe { libc::atexit(print) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_does_inside_a_function_is_put_down_to_the_outermost() {
        static OUTER: Call = Call::new("outer");
        static INNER: Call = Call::new("inner");
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
}
