//! How the server learns what a stream has done: words in page-locked memory that streams write, and one
//! thread that reads them.
//!
//! ```text
//!  dispatcher: … work …, WriteValue(word, seq)   ──GPU──▶  word ≥ seq
//!              Completer::when(word, seq, end)   ───────▶  completer polls its words, calls `end`
//! ```
//!
//! While something is awaited, the completer polls. If nothing arrives for a while, it naps between polls. It
//! asks each context concerned whether it has failed: often while nothing arrives, and sometimes in any case,
//! because what arrives may come from other contexts. If one has failed, everything awaited there ends with
//! its error. When nothing is awaited any more, it polls for [`COMPLETER_IDLE`] before it sleeps, so that a
//! program that synchronizes repeatedly does not pay for waking it.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, RwLock};
use std::time::{Duration, Instant};

use crate::driver::call::{End, Result};
use protocol::Status;
use protocol::polling::{COMPLETER_BUSY, COMPLETER_BUSY_NETWORK, COMPLETER_IDLE, PollTime};

use super::api::{Api, CUcontext, CUdeviceptr, CUstream};
use crate::driver::output::Output;

/// Number of words, for streams and staging slots.
const WORDS: usize = 16 << 10;
/// The time between polls after polling for [`COMPLETER_BUSY`], and after [`LONG`].
const NAP: Duration = Duration::from_micros(20);
const LONG_NAP: Duration = Duration::from_micros(100);
const LONG: Duration = Duration::from_millis(10);
/// How often contexts are asked for errors while nothing happens, and while something does.
const HEALTH: Duration = Duration::from_millis(1);
const HEALTH_BUSY: Duration = Duration::from_millis(20);

/// Makes this thread's sleeps precise: the kernel's default slack of 50 µs would more than triple a nap of 20
/// µs.
pub(super) fn nap_precisely() {
    // SAFETY: changes this thread's timer slack alone.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
}

/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
pub(super) const ALREADY_REGISTERED: Status = Status(712);

/// Page-locked memory of this process, registered with CUDA so that streams of every context can read and
/// write it.
pub struct Pinned {
    at: NonNull<u8>,
    len: usize,
    device: CUdeviceptr,
}

// SAFETY: it owns a mapping and nothing thread-specific; its users coordinate their accesses to the memory.
unsafe impl Send for Pinned {}
// SAFETY: it owns a mapping and nothing thread-specific; its users coordinate their accesses to the memory.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `len` zeroed bytes. They must be [registered](Self::register) before use.
    pub fn new(len: usize) -> Result<Pinned> {
        // SAFETY: a fresh anonymous mapping.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        let at = if at == libc::MAP_FAILED { None } else { NonNull::new(at.cast::<u8>()) };
        Ok(Pinned { at: at.ok_or(Status::OUT_OF_MEMORY)?, len, device: 0 })
    }

    /// Registers the memory with the current context. Called again if that context is reset.
    pub fn register(&mut self, api: &Api) -> Result {
        // SAFETY: the mapping lives until the process ends (it is never unmapped). Flags: portable,
        // device-mapped.
        unsafe {
            match api.host_register(self.at.as_ptr().cast(), self.len, 3) {
                Ok(()) | Err(ALREADY_REGISTERED) => {}
                Err(status) => return Err(status),
            }
            api.host_device_pointer(&mut self.device, self.at.as_ptr().cast(), 0)
        }
    }

    /// The host's address of a byte.
    pub fn host(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset < self.len);
        // SAFETY: inside the mapping.
        unsafe { self.at.add(offset) }
    }

    /// The devices' address of a byte.
    pub fn device(&self, offset: usize) -> CUdeviceptr {
        self.device + offset as u64
    }
}

/// The pool of words.
pub struct Words {
    memory: Mutex<Pinned>,
    host: NonNull<AtomicU64>,
    free: Mutex<Vec<u32>>,
}

// SAFETY: `host` points to atomics in memory that is never unmapped.
unsafe impl Send for Words {}
// SAFETY: `host` points to atomics; the rest is behind locks.
unsafe impl Sync for Words {}

impl Words {
    /// Allocates all words. They must be [registered](Self::register) before a stream uses one.
    pub fn new() -> Result<Arc<Words>> {
        let memory = Pinned::new(WORDS * 8)?;
        let host = memory.host(0).cast();
        Ok(Arc::new(Words {
            memory: Mutex::new(memory),
            host,
            free: Mutex::new((0..WORDS as u32).rev().collect()),
        }))
    }

    /// See [`Pinned::register`].
    pub fn register(&self, api: &Api) -> Result {
        self.memory.lock().unwrap_or_else(|e| e.into_inner()).register(api)
    }

    /// Takes a word and sets it to 0. Dropping it returns it to the pool.
    pub fn take(self: &Arc<Words>) -> Result<Word> {
        let index = self.free.lock().unwrap_or_else(|e| e.into_inner()).pop().ok_or(Status::OUT_OF_MEMORY)?;
        let word = Word { words: Arc::clone(self), index };
        word.set(0);
        Ok(word)
    }
}

/// A word of 8 bytes that streams write and wait for.
pub struct Word {
    words: Arc<Words>,
    index: u32,
}

impl Word {
    fn at(&self) -> &AtomicU64 {
        // SAFETY: inside the array, whose memory is never unmapped; 8-aligned.
        unsafe { self.words.host.add(self.index as usize).as_ref() }
    }

    /// Its value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.at().load(Ordering::Acquire)
    }

    /// Sets it. Streams may be waiting for the value.
    pub fn set(&self, value: u64) {
        self.at().store(value, Ordering::Release);
    }

    /// Sets it unless it is already larger.
    pub fn raise(&self, value: u64) {
        if self.get() < value {
            self.at().fetch_max(value, Ordering::AcqRel);
        }
    }

    /// The address that streams use.
    pub fn address(&self) -> CUdeviceptr {
        self.words.memory.lock().unwrap_or_else(|e| e.into_inner()).device(self.index as usize * 8)
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        self.words.free.lock().unwrap_or_else(|e| e.into_inner()).push(self.index);
    }
}

/// Whether a context can still be used. Shared by everything that waits for its streams.
pub struct Health {
    /// Threads hold this for reading during a call in the context, several at a time: one of them may be
    /// waiting for a kernel that another one lets go on. [`retire`](Health::retire) takes it for writing.
    context: RwLock<CUcontextSend>,
    failed: AtomicU32,
}

/// A context's handle, which any thread may use.
#[derive(Clone, Copy)]
struct CUcontextSend(CUcontext, CUstream);

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CUcontextSend {}
// SAFETY: the driver API takes handles from any thread, and from several at the same time.
unsafe impl Sync for CUcontextSend {}

impl Health {
    /// For a working context. `probe` is a stream of it that is never used for work.
    pub fn new(context: CUcontext, probe: CUstream) -> Arc<Health> {
        Arc::new(Health { context: RwLock::new(CUcontextSend(context, probe)), failed: AtomicU32::new(0) })
    }

    /// Returns the context's error if it has failed.
    #[inline]
    pub fn check(&self) -> Result {
        Status(self.failed.load(Ordering::Acquire)).ok()
    }

    /// Records that the context has failed.
    pub fn fail(&self, status: Status) {
        // The first error stays.
        let _ = self.failed.compare_exchange(0, status.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Makes the context current in this thread and calls `f`, unless the context has failed or is about to
    /// be destroyed.
    pub fn with<T>(&self, api: &Api, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let held = self.context.read().unwrap_or_else(|e| e.into_inner());
        self.check()?;
        // SAFETY: a live context: `retire` waits for the lock.
        unsafe { api.context_set(held.0) }?;
        f()
    }

    /// The context's handle, for calls that may wait for the device, which must not hold the lock. The driver
    /// refuses the handle of a context that was destroyed meanwhile.
    pub fn handle(&self) -> CUcontext {
        self.context.read().unwrap_or_else(|e| e.into_inner()).0
    }

    /// Like [`with`](Self::with), but leaves this thread's current context as it was. `f` gets the context.
    pub fn within<T>(&self, api: &Api, f: impl FnOnce(CUcontext) -> Result<T>) -> Result<T> {
        let held = self.context.read().unwrap_or_else(|e| e.into_inner());
        self.check()?;
        // SAFETY: a live context: `retire` waits for the lock.
        unsafe { api.within(held.0, || f(held.0)) }
    }

    /// Makes the driver print what kernels of the context have printed. It does so whenever a stream is
    /// synchronized, and the probe stream is always idle.
    fn flush(&self, api: &Api) {
        let held = self.context.read().unwrap_or_else(|e| e.into_inner());
        if self.check().is_ok() {
            // SAFETY: a live stream: `retire` waits for the lock. `ask` notices a context that has failed.
            let _ = unsafe { api.stream_synchronize(held.1) };
        }
    }

    /// Asks the driver whether the context has failed.
    fn ask(&self, api: &Api, output: Option<&Output>) {
        // Held until the end: `retire` marks the context as failed and then waits for this lock.
        let held = self.context.read().unwrap_or_else(|e| e.into_inner());
        if self.check().is_err() {
            return;
        }
        let CUcontextSend(context, probe) = *held;
        // SAFETY: a live context and a stream of it.
        let result = unsafe { api.context_set(context).and_then(|()| api.stream_query_raw(probe)) };
        match result {
            Err(status) if status != Status::NOT_READY => {
                tracing::warn!("a context has failed: {} ({})", api.name(status), status.0);
                // The text of a failed assertion must arrive before the error.
                // SAFETY: a stream of the context, which still exists although it has failed.
                let _ = unsafe { api.stream_synchronize(probe) };
                output.inspect(|output| output.tell());
                self.fail(status);
            }
            _ => {}
        }
    }

    /// Called before the context is destroyed. Nothing uses it afterwards, and all waits for its streams end.
    pub fn retire(&self) {
        self.fail(Status::CONTEXT_IS_DESTROYED);
        drop(self.context.write().unwrap_or_else(|e| e.into_inner()));
    }
}

struct Awaited {
    word: Arc<Word>,
    value: u64,
    health: Arc<Health>,
    end: End,
    ready: bool,
}

/// The thread that polls words and calls ends.
pub struct Completer {
    new: Mutex<Vec<Awaited>>,
    wake: Condvar,
    /// Set, under the lock of `new`, while the thread waits for `wake`.
    sleeps: AtomicBool,
    /// Length of `new`, to be read without the lock.
    count: AtomicU32,
    over_network: AtomicBool,
    over: AtomicBool,
    /// Set when the first kernel that may print is launched. From then on there may be something to flush.
    prints: AtomicBool,
    output: OnceLock<Arc<Output>>,
}

impl Completer {
    /// Starts the thread.
    pub fn start(api: &'static Api) -> std::io::Result<Arc<Completer>> {
        let completer = Arc::new(Completer {
            new: Mutex::default(),
            wake: Condvar::new(),
            sleeps: AtomicBool::new(false),
            count: AtomicU32::new(0),
            over_network: AtomicBool::new(false),
            over: AtomicBool::new(false),
            prints: AtomicBool::new(false),
            output: OnceLock::new(),
        });
        let run = Arc::clone(&completer);
        std::thread::Builder::new().name("rgpu-completer".into()).spawn(move || run.run(api))?;
        Ok(completer)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Awaited>> {
        self.new.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Calls `end` in the completer's thread when `word` has reached `value`. Ends of one word are called in
    /// the order of their values.
    pub fn when(&self, word: &Arc<Word>, value: u64, health: &Arc<Health>, end: End) {
        let mut new = self.lock();
        new.push(Awaited { word: Arc::clone(word), value, health: Arc::clone(health), end, ready: false });
        self.count.store(new.len() as u32, Ordering::Release);
        let sleeps = self.sleeps.load(Ordering::Relaxed);
        drop(new);
        if sleeps {
            self.wake.notify_one();
        }
    }

    /// Sets the output that the driver prints to. It is published before any end is called.
    pub fn flush_to(&self, output: &Arc<Output>) {
        let _ = self.output.set(Arc::clone(output));
    }

    /// Called when a kernel that may print is launched.
    #[inline]
    pub fn may_print(&self) {
        if !self.prints.load(Ordering::Relaxed) {
            self.prints.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the driver print what the finished work has printed, and publishes it.
    fn flush(&self, ready: &[Awaited], api: &Api) {
        let Some(output) = self.output.get().filter(|_| self.prints.load(Ordering::Relaxed)) else {
            return;
        };
        let mut last: Option<&Arc<Health>> = None;
        for done in ready {
            if last.is_none_or(|last| !Arc::ptr_eq(last, &done.health)) {
                done.health.flush(api);
                last = Some(&done.health);
            }
        }
        output.tell();
    }

    /// Sets whether the session's client is at the other end of a network.
    pub fn serve_over_network(&self, so: bool) {
        self.over_network.store(so, Ordering::Relaxed);
    }

    /// Stops the thread. It calls no more ends and drops those that are left.
    pub fn stop(&self) {
        self.over.store(true, Ordering::Release);
        // Taken and released so that the thread cannot be between its check and its sleep.
        drop(self.lock());
        self.wake.notify_one();
    }

    fn run(&self, api: &Api) {
        nap_precisely();
        let mut awaited: Vec<Awaited> = Vec::new();
        let mut ready: Vec<Awaited> = Vec::new();
        let mut moved = Instant::now();
        let mut asked = moved;
        let (idle, busy) = (COMPLETER_IDLE.here(), COMPLETER_BUSY.here());
        // A program whose steps take longer would have this thread poll in each one for nothing.
        let mut over_network_busy = PollTime::new(busy.min(COMPLETER_BUSY_NETWORK.here()));
        while !self.over.load(Ordering::Acquire) {
            if awaited.is_empty() {
                let since = Instant::now();
                while self.count.load(Ordering::Acquire) == 0
                    && !self.over.load(Ordering::Acquire)
                    && since.elapsed() < idle
                {
                    std::hint::spin_loop();
                }
            }
            if self.count.load(Ordering::Acquire) > 0 || awaited.is_empty() {
                let mut new = self.lock();
                while new.is_empty() && awaited.is_empty() && !self.over.load(Ordering::Acquire) {
                    self.sleeps.store(true, Ordering::Relaxed);
                    new = self.wake.wait(new).unwrap_or_else(|e| e.into_inner());
                }
                self.sleeps.store(false, Ordering::Relaxed);
                moved = Instant::now();
                if awaited.is_empty() {
                    // Nothing has been awaited in any context for longer.
                    asked = moved;
                }
                awaited.append(&mut new);
                self.count.store(0, Ordering::Release);
            }
            // From last to first: if a word rises meanwhile, a later end is never ready without the earlier
            // ones.
            for a in awaited.iter_mut().rev() {
                a.ready = a.word.get() >= a.value || a.health.check().is_err();
            }
            ready.extend(awaited.extract_if(.., |a| a.ready));
            let now = Instant::now();
            let nothing = ready.is_empty();
            if !nothing {
                over_network_busy.slept(now.saturating_duration_since(moved));
                moved = now;
                self.flush(&ready, api);
            }
            // Keeps the order of one word's ends, and of ends that were requested one after the other.
            for done in ready.drain(..) {
                let reached = done.word.get() >= done.value;
                let status = if reached {
                    Status::SUCCESS
                } else {
                    done.health.check().err().unwrap_or(Status::UNKNOWN)
                };
                (done.end)(status);
            }
            let quiet = now.saturating_duration_since(moved);
            let over_network = self.over_network.load(Ordering::Relaxed);
            let rests = quiet > if over_network { over_network_busy.get() } else { busy };
            let pause = if rests { HEALTH } else { HEALTH_BUSY };
            if now.saturating_duration_since(asked) > pause && !awaited.is_empty() {
                ask_all(&awaited, api, self.output.get().map(|output| &**output));
                asked = Instant::now();
            }
            if rests {
                std::thread::sleep(if quiet > LONG { LONG_NAP } else { NAP });
            } else if nothing {
                std::hint::spin_loop();
            }
        }
    }
}

fn ask_all(awaited: &[Awaited], api: &Api, output: Option<&Output>) {
    let mut seen: HashMap<*const Health, &Arc<Health>> = HashMap::new();
    for a in awaited {
        seen.entry(Arc::as_ptr(&a.health)).or_insert(&a.health);
    }
    seen.values().for_each(|health| health.ask(api, output));
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// How long a test waits at most for what must happen.
    const LIMIT: Duration = Duration::from_secs(60);

    /// Completes one piece of work after the other until `over`.
    fn go_on(completer: &Arc<Completer>, word: &Arc<Word>, health: &Arc<Health>, over: &Arc<AtomicBool>) {
        let next = (Arc::clone(completer), Arc::clone(word), Arc::clone(health), Arc::clone(over));
        let end = move |_| {
            let (completer, word, health, over) = next;
            if !over.load(Ordering::Relaxed) {
                go_on(&completer, &word, &health, &over);
            }
        };
        completer.when(word, 0, health, Box::new(end));
    }

    /// What becomes of work in a context whose kernel has faulted.
    fn end_in_a_failed_context(
        completer: &Completer,
        words: &Arc<Words>,
        health: &Arc<Health>,
    ) -> Receiver<Status> {
        let (end, ended) = channel();
        let word = Arc::new(words.take().unwrap());
        completer.when(&word, 1, health, Box::new(move |status| end.send(status).unwrap()));
        ended
    }

    /// A context that has failed, although nobody knows yet, and one that works.
    fn contexts() -> [Arc<Health>; 2] {
        [Api::FAILED, std::ptr::null_mut()].map(|probe| Health::new(std::ptr::null_mut(), probe))
    }

    #[test]
    fn a_context_that_fails_is_noticed_while_another_one_works_without_a_pause() {
        let words = Words::new().unwrap();
        let completer = Completer::start(Api::failing()).unwrap();
        let ([failed, works], over) = (contexts(), Arc::new(AtomicBool::new(false)));
        go_on(&completer, &Arc::new(words.take().unwrap()), &works, &over);
        let ended = end_in_a_failed_context(&completer, &words, &failed);
        assert_eq!(ended.recv_timeout(LIMIT), Ok(Status::ILLEGAL_ADDRESS));
        over.store(true, Ordering::Relaxed);
        completer.stop();
    }

    #[test]
    fn a_thread_that_stays_in_a_call_of_the_driver_does_not_keep_a_failure_from_others() {
        let words = Words::new().unwrap();
        let completer = Completer::start(Api::failing()).unwrap();
        let [failed, _] = contexts();
        let (stays, health) = (channel::<()>(), Arc::clone(&failed));
        let (is_there, there) = channel();
        let stayed = std::thread::spawn(move || {
            health.within(Api::failing(), |_| {
                is_there.send(()).unwrap();
                // Until the test is over, however it ends.
                stays.1.recv().map_err(|_| Status::NOT_READY)
            })
        });
        there.recv_timeout(LIMIT).unwrap();
        let ended = end_in_a_failed_context(&completer, &words, &failed);
        assert_eq!(ended.recv_timeout(LIMIT), Ok(Status::ILLEGAL_ADDRESS));
        drop(stays.0);
        assert_eq!(stayed.join().unwrap(), Err(Status::NOT_READY));
        completer.stop();
    }
}
