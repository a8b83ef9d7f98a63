//! Context limits. Each is requested from the server once and cached until something may have changed it:
//! setting a limit in any context of the device, a reset, or a kernel that needs more stack than the limit,
//! which makes the driver raise it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::result::Result;
use client::{Status, lock};

/// `CU_LIMIT_STACK_SIZE`.
const STACK_SIZE: u32 = 0;
/// The last `CUlimit`.
pub(crate) const LAST: u32 = 9;
/// `CUDA_ERROR_UNSUPPORTED_LIMIT`.
const UNSUPPORTED: Status = Status(215);

/// A context's cached limits.
pub(crate) struct Limits {
    known: Mutex<Known>,
    /// The stack size in bytes, readable without the lock. `u64::MAX`: unknown.
    stack: AtomicU64,
    /// The largest stack in bytes of any kernel that was launched or put in a graph.
    deepest: AtomicU64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { known: Mutex::default(), stack: u64::MAX.into(), deepest: 0.into() }
    }
}

#[derive(Default)]
struct Known {
    /// By `CUlimit`: the value, or the error if the device lacks the limit.
    values: [Option<Result<u64>>; LAST as usize + 1],
    /// How often the cache was dropped.
    dropped: u64,
}

impl Limits {
    /// Drops the cache because something may have changed the limits.
    pub fn forget(&self) {
        let mut known = lock(&self.known);
        known.values = Default::default();
        known.dropped += 1;
        self.stack.store(u64::MAX, Ordering::Relaxed);
    }

    /// Notes that a kernel whose threads need `stack` bytes will be launched, now or in a graph.
    #[inline]
    pub fn will_need(&self, stack: u64) {
        if stack > self.deepest.load(Ordering::Relaxed) {
            self.deepest.fetch_max(stack, Ordering::Relaxed);
        }
    }

    /// Notes that a kernel whose threads need `stack` bytes was launched.
    #[inline]
    pub fn launched(&self, stack: u64) {
        if stack > self.stack.load(Ordering::Relaxed) {
            self.forget();
        }
    }

    /// Notes that a graph was launched.
    pub fn launched_graph(&self) {
        self.launched(self.deepest.load(Ordering::Relaxed));
    }

    /// Returns a limit, asking the server with `ask` if it isn't cached.
    pub fn get(&self, limit: u32, ask: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let place = limit as usize;
        let known = lock(&self.known);
        let before = known.dropped;
        match known.values.get(place) {
            None => return Err(Status::INVALID_VALUE),
            Some(Some(value)) => return *value,
            Some(None) => {}
        }
        drop(known);
        let answer = ask();
        let mut known = lock(&self.known);
        // The reply may be older than whatever changed the limit.
        if known.dropped == before && matches!(answer, Ok(_) | Err(UNSUPPORTED)) {
            known.values[place] = Some(answer);
            if let (STACK_SIZE, Ok(stack)) = (limit, answer) {
                self.stack.store(stack, Ordering::Relaxed);
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_requested_once_until_it_is_dropped() {
        let limits = Limits::default();
        assert_eq!(limits.get(0, || Ok(1024)), Ok(1024));
        assert_eq!(limits.get(0, || unreachable!()), Ok(1024));
        assert_eq!(limits.get(2, || Ok(8)), Ok(8));
        limits.forget();
        assert_eq!(limits.get(0, || Ok(2048)), Ok(2048));
    }

    #[test]
    fn a_kernel_with_a_deeper_stack_drops_the_limit() {
        let limits = Limits::default();
        limits.launched(1 << 20);
        assert_eq!(limits.get(STACK_SIZE, || Ok(1024)), Ok(1024));
        limits.launched(1024);
        assert_eq!(limits.get(STACK_SIZE, || unreachable!()), Ok(1024));
        limits.will_need(4096);
        assert_eq!(limits.get(STACK_SIZE, || unreachable!()), Ok(1024));
        limits.launched(1025);
        assert_eq!(limits.get(STACK_SIZE, || Ok(2048)), Ok(2048));
        limits.launched_graph();
        assert_eq!(limits.get(STACK_SIZE, || Ok(4096)), Ok(4096));
        limits.launched_graph();
        assert_eq!(limits.get(STACK_SIZE, || unreachable!()), Ok(4096));
    }

    #[test]
    fn a_reply_older_than_a_change_is_not_cached() {
        let limits = Limits::default();
        let overtaken = || {
            limits.forget();
            Ok(1024)
        };
        assert_eq!(limits.get(0, overtaken), Ok(1024));
        assert_eq!(limits.get(0, || Ok(2048)), Ok(2048));
    }

    #[test]
    fn only_the_unsupported_limit_error_is_cached() {
        let limits = Limits::default();
        assert_eq!(limits.get(3, || Err(UNSUPPORTED)), Err(UNSUPPORTED));
        assert_eq!(limits.get(3, || unreachable!()), Err(UNSUPPORTED));
        assert_eq!(limits.get(4, || Err(Status::DEVICE_UNAVAILABLE)), Err(Status::DEVICE_UNAVAILABLE));
        assert_eq!(limits.get(4, || Ok(1)), Ok(1));
        assert_eq!(limits.get(LAST + 1, || unreachable!()), Err(Status::INVALID_VALUE));
    }
}
