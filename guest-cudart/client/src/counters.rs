//! What this process has done: counted always, printed at exit with `RGPU_STATS=1`.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// The process's counters.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        impl Counters {
            const fn new() -> Self {
                Counters { $($name: AtomicU64::new(0),)* }
            }

            fn line(&self) -> String {
                let mut line = String::new();
                $(
                    line.push_str(concat!(stringify!($name), "="));
                    line.push_str(&self.$name.load(Ordering::Relaxed).to_string());
                    line.push(' ');
                )*
                line.truncate(line.trim_end().len());
                line
            }
        }
    };
}

counters! {
    /// Records appended to the ring.
    commands;
    /// Records that were answered in a reply slot.
    round_trips;
    /// Times that the host side slept and its doorbell was rung.
    doorbells;
    /// Bytes copied by this process between program memory and the arena, or into records.
    copied_bytes;
    /// Times that a thread went to sleep to wait for the host side.
    sleeps;
    /// Times that a thread found the ring full.
    ring_full;
    /// Times that a thread found the arena full.
    arena_full;
}

/// The process's counters.
pub static COUNTERS: Counters = Counters::new();

/// Adds to a counter.
#[inline]
pub fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Prints the counters when the process exits, if `RGPU_STATS=1` asks for it.
pub fn print_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn print() {
        let line = format!("rgpu: stats: pid={} {}\n", std::process::id(), COUNTERS.line());
        // SAFETY: the pointer and length are those of a live string; a failed write is of no consequence.
        unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    }
    ONCE.call_once(|| {
        if std::env::var_os("RGPU_STATS").is_some_and(|value| value == "1") {
            // SAFETY: `print` is a plain C function that lives as long as this library.
            unsafe { libc::atexit(print) };
        }
    });
}
