//! Times in a form that another process of this machine can use. An `Instant` has no meaning outside its
//! process, but on Linux it is a time of CLOCK_MONOTONIC, which all processes share until the machine
//! restarts.

use std::time::{Duration, Instant};

fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time to a variable that lives during the call. Every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// A time in nanoseconds of CLOCK_MONOTONIC.
pub fn to_ns(time: Instant) -> u64 {
    let ago = Instant::now().saturating_duration_since(time);
    u64::try_from(now().saturating_sub(ago).as_nanos()).unwrap_or(u64::MAX)
}

/// The time with these nanoseconds of CLOCK_MONOTONIC. A time in the future becomes the present time.
pub fn from_ns(ns: u64) -> Instant {
    let ago = now().saturating_sub(Duration::from_nanos(ns));
    let here = Instant::now();
    here.checked_sub(ago).unwrap_or(here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_the_same_afterwards_and_never_in_the_future() {
        let begin = Instant::now();
        let time = begin.checked_sub(Duration::from_secs(3)).unwrap_or(begin);
        let again = from_ns(to_ns(time));
        let apart = again.max(time) - again.min(time);
        // Both clocks are read, one after the other, and this thread may have been preempted in between.
        assert!(apart <= begin.elapsed(), "{apart:?}");
        assert!(from_ns(u64::MAX) <= Instant::now());
    }
}
