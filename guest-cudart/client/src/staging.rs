//! Copies between program memory and the arena, with several threads and streaming stores for large copies.
//!
//! One thread copies about 9 GB/s on a current server, a fraction of what memory and the link can take. A
//! long copy is therefore split into parts that helper threads and the calling thread take. Helpers are
//! started at the first long copy, as many as the machine has processors to spare. For the next copy they
//! poll while that pays, and then sleep. A copy wakes no more of them than it has parts for.
//!
//! Staged data is stored past the caches (streaming stores), which also avoids reading each cache line before
//! it is overwritten. Over `local` and `verbs` a device or network card reads it next. Over `tcp` a processor
//! does, for the thread of `vhost-rgpu` that sends it, and has to fetch it from memory. Whether plain stores
//! would be faster there was not measured.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use protocol::polling::{self, PollTime};

use crate::lock;

/// Shorter copies use one thread, because waking another costs more than it saves.
const LONG: usize = 256 << 10;
/// Size in bytes of a part, the unit that threads take.
const PART: usize = 64 << 10;
/// The most helper threads; more do not increase memory throughput.
const MOST_HELPERS: usize = 7;

/// A copy that several threads work on.
struct Job {
    from: usize,
    to: usize,
    len: usize,
    /// The next part to take.
    next: AtomicUsize,
    /// Parts not copied yet.
    left: AtomicUsize,
}

impl Job {
    fn parts(&self) -> usize {
        self.len.div_ceil(PART)
    }

    /// Copies parts until all are taken.
    fn work(&self) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts() {
                return;
            }
            let at = part * PART;
            let len = PART.min(self.len - at);
            // SAFETY: part of a copy whose caller guarantees its memory and waits until `left` is 0.
            unsafe { stream((self.from + at) as *const u8, (self.to + at) as *mut u8, len) };
            self.left.fetch_sub(1, Ordering::Release);
        }
    }
}

/// The helper threads and their current job.
struct Helpers {
    state: Mutex<State>,
    came: Condvar,
    /// Number of jobs so far, so that a helper that is not polling misses none.
    given: AtomicU64,
    count: usize,
}

#[derive(Default)]
struct State {
    job: Option<Arc<Job>>,
    /// Helpers waiting for `came`.
    asleep: usize,
}

impl Helpers {
    /// How many of the sleeping helpers to wake for a copy of `parts`: the calling thread takes some, and so
    /// do helpers that are awake.
    fn to_wake(&self, parts: usize, asleep: usize) -> usize {
        let awake = self.count.saturating_sub(asleep);
        parts.saturating_sub(1 + awake).min(asleep)
    }
}

static HELPERS: OnceLock<Helpers> = OnceLock::new();

/// How many helpers a machine with `cores` processors can spare; the program needs some, and so does the
/// worker if it runs on the same machine.
fn helpers_for(cores: usize) -> usize {
    polling::copy_threads(cores).min(MOST_HELPERS)
}

fn helpers() -> &'static Helpers {
    static START: std::sync::Once = std::sync::Once::new();
    let helpers = HELPERS.get_or_init(|| {
        let cores = polling::processors();
        let asked = log::setting::number("RGPU_COPY_THREADS", "threads", 0..=64);
        let count = asked.map_or_else(|| helpers_for(cores), |threads| threads.saturating_sub(1) as usize);
        Helpers { state: Mutex::default(), came: Condvar::new(), given: AtomicU64::new(0), count }
    });
    START.call_once(|| {
        for _ in 0..helpers.count {
            // Without this helper, the others and the caller do its work.
            let _ = std::thread::Builder::new().name("rgpu-copy".into()).spawn(help);
        }
    });
    helpers
}

fn help() {
    let Some(helpers) = HELPERS.get() else { return };
    let mut seen = 0;
    let mut poll = PollTime::new(polling::CLIENT_COPY_THREAD.here());
    loop {
        // The parts of one transfer arrive shortly after each other.
        let begin = Instant::now();
        while helpers.given.load(Ordering::Acquire) == seen && begin.elapsed() < poll.get() {
            std::hint::spin_loop();
        }
        let job = {
            let mut state = lock(&helpers.state);
            while helpers.given.load(Ordering::Acquire) == seen {
                state.asleep += 1;
                state = helpers.came.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep -= 1;
            }
            seen = helpers.given.load(Ordering::Acquire);
            state.job.clone()
        };
        came_after(&mut poll, begin.elapsed());
        if let Some(job) = job {
            job.work();
        }
    }
}

/// A copy came after a helper had waited for so long, polling and perhaps asleep. A helper that would sleep
/// before each copy however long it polled polls only briefly.
fn came_after(poll: &mut PollTime, waited: Duration) {
    poll.slept(waited);
}

/// Copies `len` bytes that this processor will not read next.
///
/// # Safety
///
/// `from` must be readable and `to` writable for `len` bytes, without overlap. Other processes may
/// concurrently write `from` or read `to`.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    if len < LONG || crate::session::forked() {
        // SAFETY: the caller guarantees both ranges.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    let helpers = helpers();
    let job = Arc::new(Job {
        from: from as usize,
        to: to as usize,
        len,
        next: AtomicUsize::new(0),
        left: AtomicUsize::new(len.div_ceil(PART)),
    });
    if helpers.count > 0 {
        let mut state = lock(&helpers.state);
        // If two threads copy at once, the helpers take the later job; the thread that owns a job completes
        // it in any case.
        state.job = Some(job.clone());
        helpers.given.fetch_add(1, Ordering::Release);
        let asleep = state.asleep;
        drop(state);
        match helpers.to_wake(job.parts(), asleep) {
            0 => {}
            all if all == asleep => helpers.came.notify_all(),
            some => (0..some).for_each(|_| helpers.came.notify_one()),
        }
    }
    job.work();
    while job.left.load(Ordering::Acquire) > 0 {
        // Helpers are copying the last parts, which takes some ten microseconds unless one was preempted.
        std::thread::yield_now();
    }
    if helpers.count > 0 {
        let mut state = lock(&helpers.state);
        if state.job.as_ref().is_some_and(|current| Arc::ptr_eq(current, &job)) {
            state.job = None;
        }
    }
}

/// Copies with streaming stores in this thread.
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has the instructions; the caller guarantees both ranges.
        return unsafe { stream_avx(from, to, len) };
    }
    // SAFETY: the caller guarantees both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_avx(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const LINE: usize = 128;
    let head = to.align_offset(32).min(len);
    // SAFETY: inside the `len` bytes of both. `head` aligns the streaming stores, and the fence completes
    // them before the copy is announced.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        let lines = (len - head) / LINE;
        for line in 0..lines {
            let (f, t) = (
                from.add(head + line * LINE).cast::<__m256i>(),
                to.add(head + line * LINE).cast::<__m256i>(),
            );
            let a = _mm256_loadu_si256(f);
            let b = _mm256_loadu_si256(f.add(1));
            let c = _mm256_loadu_si256(f.add(2));
            let d = _mm256_loadu_si256(f.add(3));
            _mm256_stream_si256(t, a);
            _mm256_stream_si256(t.add(1), b);
            _mm256_stream_si256(t.add(2), c);
            _mm256_stream_si256(t.add(3), d);
        }
        _mm_sfence();
        let done = head + lines * LINE;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_number_of_helpers_depends_on_the_machine() {
        assert_eq!([1, 2, 4, 8, 16, 128].map(helpers_for), [0, 0, 1, 3, 7, MOST_HELPERS]);
    }

    #[test]
    fn a_copy_wakes_no_more_helpers_than_it_has_parts_for() {
        let (state, came, given) = (Mutex::default(), Condvar::new(), AtomicU64::new(0));
        let helpers = Helpers { state, came, given, count: 7 };
        let least = LONG.div_ceil(PART);
        assert_eq!((least, helpers.to_wake(least, 7)), (4, 3), "the caller takes one");
        assert_eq!(helpers.to_wake(least, 5), 1, "two are awake");
        assert_eq!([4, 3, 0].map(|asleep| helpers.to_wake(least, asleep)), [0; 3]);
        assert_eq!([7, 3, 0].map(|asleep| helpers.to_wake(64, asleep)), [7, 3, 0]);
    }

    #[test]
    fn helpers_poll_only_while_copies_come_in_time() {
        let bound = Duration::from_micros(100);
        let mut poll = PollTime::new(bound);
        // A copy each 300 microseconds, which takes 110: they sleep before each of them anyway.
        (0..10).for_each(|_| came_after(&mut poll, 2 * bound - Duration::from_micros(10)));
        assert!(poll.get() <= bound / 8, "{:?}", poll.get());
        // While they poll for less than they might, they see that it would pay.
        (0..10).for_each(|_| came_after(&mut poll, bound / 2));
        assert_eq!(poll.get(), bound);
    }

    #[test]
    fn concurrent_copies_do_not_mix() {
        std::thread::scope(|scope| {
            for n in 0..4u8 {
                scope.spawn(move || {
                    for round in 0..8u8 {
                        let from: Vec<u8> =
                            (0..LONG * 3 + 77).map(|i| (i as u8).wrapping_mul(n + 3) ^ round).collect();
                        let mut to = vec![0; from.len()];
                        // SAFETY: two buffers of this length.
                        unsafe { copy(from.as_ptr(), to.as_mut_ptr(), from.len()) };
                        assert!(from == to);
                    }
                });
            }
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn exactly_the_requested_bytes_are_copied(len in prop_oneof![0usize..400, PART - 200..PART + 200, LONG - 100..LONG * 4], skew in 0usize..70, source in 0usize..70) {
            let from: Vec<u8> = (0..len + source).map(|i| (i * 7 + i / 251) as u8).collect();
            let mut to = vec![0xee; len + skew + 64];
            // SAFETY: both have room for `len` bytes after their offsets.
            unsafe { copy(from.as_ptr().add(source), to.as_mut_ptr().add(skew), len) };
            prop_assert!(to[..skew].iter().chain(&to[skew + len..]).all(|b| *b == 0xee));
            prop_assert!(to[skew..skew + len] == from[source..]);
        }
    }
}
