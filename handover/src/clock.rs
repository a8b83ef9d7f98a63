//! Times that another process of this machine understands: `Instant` means nothing outside of its process, but on
//! Linux it counts CLOCK_MONOTONIC, which does not change until the machine starts anew.

use std::time::{Duration, Instant};

fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time to a variable that is there during the call. The clock is there on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// A time as ns of CLOCK_MONOTONIC.
pub fn to_ns(time: Instant) -> u64 {
    let ago = Instant::now().saturating_duration_since(time);
    u64::try_from(now().saturating_sub(ago).as_nanos()).unwrap_or(u64::MAX)
}

/// The time that these ns of CLOCK_MONOTONIC name. One that has not come yet is now.
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
        let time = Instant::now().checked_sub(Duration::from_secs(3)).unwrap_or_else(Instant::now);
        let again = from_ns(to_ns(time));
        let apart = again.max(time) - again.min(time);
        assert!(apart < Duration::from_millis(100), "{apart:?}");
        assert!(from_ns(u64::MAX) <= Instant::now());
    }
}
