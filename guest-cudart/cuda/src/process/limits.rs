//! Limits of contexts. The server is asked for each once; its answer is kept until something may have changed it: a limit that was set in any context of the device, a reset, or a kernel whose
//! threads need more stack than they may have, for which the driver raises that limit.

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

/// What is known of a context's limits.
pub(crate) struct Limits {
    known: Mutex<Known>,
    /// The stack size in bytes, for a look without the lock; `u64::MAX`: not known.
    stack: AtomicU64,
    /// The largest stack of a kernel that was launched or put in a graph, in bytes.
    deepest: AtomicU64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { known: Mutex::default(), stack: u64::MAX.into(), deepest: 0.into() }
    }
}

#[derive(Default)]
struct Known {
    /// By `CUlimit`: the value, or that the device has no such limit.
    values: [Option<Result<u64>>; LAST as usize + 1],
    /// How often all of it was dropped.
    dropped: u64,
}

impl Limits {
    /// Drops what is known: something may have changed it.
    pub fn forget(&self) {
        let mut known = lock(&self.known);
        known.values = Default::default();
        known.dropped += 1;
        self.stack.store(u64::MAX, Ordering::Relaxed);
    }

    /// A kernel whose threads need `stack` bytes is to be launched, now or with a graph.
    #[inline]
    pub fn will_need(&self, stack: u64) {
        if stack > self.deepest.load(Ordering::Relaxed) {
            self.deepest.fetch_max(stack, Ordering::Relaxed);
        }
    }

    /// A kernel whose threads need `stack` bytes was launched.
    #[inline]
    pub fn launched(&self, stack: u64) {
        if stack > self.stack.load(Ordering::Relaxed) {
            self.forget();
        }
    }

    /// A graph was launched.
    pub fn launched_graph(&self) {
        self.launched(self.deepest.load(Ordering::Relaxed));
    }

    /// A limit; `ask` asks the server for it.
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
        // The answer may be older than what has changed it.
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
    fn a_limit_is_asked_for_once_until_it_is_dropped() {
        let limits = Limits::default();
        assert_eq!(limits.get(0, || Ok(1024)), Ok(1024));
        assert_eq!(limits.get(0, || unreachable!()), Ok(1024));
        assert_eq!(limits.get(2, || Ok(8)), Ok(8));
        limits.forget();
        assert_eq!(limits.get(0, || Ok(2048)), Ok(2048));
    }

    #[test]
    fn a_kernel_that_needs_more_stack_than_there_is_changes_the_limit() {
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
    fn an_answer_that_something_overtook_is_not_kept() {
        let limits = Limits::default();
        let overtaken = || {
            limits.forget();
            Ok(1024)
        };
        assert_eq!(limits.get(0, overtaken), Ok(1024));
        assert_eq!(limits.get(0, || Ok(2048)), Ok(2048));
    }

    #[test]
    fn only_that_there_is_no_such_limit_is_an_error_to_keep() {
        let limits = Limits::default();
        assert_eq!(limits.get(3, || Err(UNSUPPORTED)), Err(UNSUPPORTED));
        assert_eq!(limits.get(3, || unreachable!()), Err(UNSUPPORTED));
        assert_eq!(limits.get(4, || Err(Status::DEVICE_UNAVAILABLE)), Err(Status::DEVICE_UNAVAILABLE));
        assert_eq!(limits.get(4, || Ok(1)), Ok(1));
        assert_eq!(limits.get(LAST + 1, || unreachable!()), Err(Status::INVALID_VALUE));
    }
}
