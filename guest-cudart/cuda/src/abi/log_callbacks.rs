//! The program's callbacks for the driver's log, and how messages get to them.
//!
//! A message may be written in any thread, with locks of this library held. So it is only noted then, with
//! the callbacks that are registered at that time. They are called where no lock is held:
//!
//! ```text
//! written by a thread in a driver API function     at the end of that call, by that thread
//! written elsewhere (this library's own threads)   at the end of the next call of any thread
//! ```
//!
//! Callbacks may call functions of this library. What those write is in the log, but no callback gets it.
//! Several threads may be in one callback at the same time.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use client::log::{Level, recent};
use client::port::descriptor::Uncancelled;
use client::{lock, session};

/// `CUlogsCallback`: the program's data, `CUlogLevel`, the message and its length in bytes.
pub(crate) type Callback = unsafe extern "C" fn(*mut c_void, u32, *mut c_char, usize);

/// Maximum number of noted messages. Of more, the oldest are only in the log: the program's threads stay in
/// long calls, or make none.
const MOST: usize = 1000;

/// A callback of the program.
struct Registered {
    handle: usize,
    function: Callback,
    data: usize,
    calls: Mutex<Calls>,
    /// Notified when no thread is in the function.
    idle: Condvar,
}

struct Calls {
    /// False once the callback was unregistered.
    wanted: bool,
    /// How many threads are in the function.
    running: usize,
}

/// A noted message.
struct Noted {
    level: Level,
    line: String,
    /// The thread that is to tell it; `None`: any.
    teller: Option<usize>,
    callbacks: Vec<Arc<Registered>>,
}

struct Log {
    callbacks: Vec<Arc<Registered>>,
    /// The handle that was given last.
    last: usize,
    noted: VecDeque<Noted>,
}

static LOG: Mutex<Log> = Mutex::new(Log { callbacks: Vec::new(), last: 0, noted: VecDeque::new() });
/// Whether there are callbacks.
static LISTENED: AtomicBool = AtomicBool::new(false);
/// How many messages are noted.
static NOTED: AtomicUsize = AtomicUsize::new(0);

/// Where a thread is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In no function of this library, or in one that it entered before there were callbacks.
    Outside,
    /// In a function, at whose end it tells what it has written.
    Inside,
    /// In a callback, or between two.
    Telling,
}

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place::Outside) };
}

/// The calling thread's place, and its number among the threads that exist.
fn here() -> (Place, usize) {
    // A thread that is being destroyed has no place any more.
    PLACE.try_with(|place| (place.get(), std::ptr::from_ref(place) as usize)).unwrap_or((Place::Outside, 0))
}

/// The calling thread is in a function of the driver API until this is dropped. Then it holds no lock of this
/// library, and tells what is noted.
pub(crate) struct Inside {
    /// Whether this is the thread's outermost function, and somebody listens.
    tells: bool,
}

/// Marks the calling thread as inside a function.
#[inline]
pub(crate) fn enter() -> Inside {
    Inside { tells: LISTENED.load(Ordering::Relaxed) && begin() }
}

#[cold]
fn begin() -> bool {
    let begun = PLACE.try_with(|place| {
        let outermost = place.get() == Place::Outside;
        if outermost {
            place.set(Place::Inside);
        }
        outermost
    });
    begun.unwrap_or(false)
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        if self.tells {
            tell_noted();
        }
    }
}

/// Calls the callbacks with what is noted for this thread or for any.
#[cold]
fn tell_noted() {
    let (_, thread) = here();
    if NOTED.load(Ordering::Relaxed) > 0 {
        let _ = PLACE.try_with(|place| place.set(Place::Telling));
        // A thread that was cancelled in a callback would stay counted among those that are in it.
        let _uncancelled = Uncancelled::begin();
        while let Some(noted) = take(thread) {
            for callback in &noted.callbacks {
                callback.call(noted.level, &noted.line);
            }
        }
    }
    let _ = PLACE.try_with(|place| place.set(Place::Outside));
}

/// The first message that this thread is to tell.
fn take(thread: usize) -> Option<Noted> {
    let mut log = lock(&LOG);
    let at = log.noted.iter().position(|noted| noted.teller.is_none_or(|teller| teller == thread))?;
    let noted = log.noted.remove(at);
    NOTED.store(log.noted.len(), Ordering::Relaxed);
    noted
}

/// Notes a message for the callbacks.
fn note(level: Level, line: String) {
    let (place, thread) = here();
    if place == Place::Telling {
        return;
    }
    let mut log = lock(&LOG);
    if log.callbacks.is_empty() {
        return;
    }
    let teller = (place == Place::Inside).then_some(thread);
    let callbacks = log.callbacks.clone();
    log.noted.push_back(Noted { level, line, teller, callbacks });
    let left_out = if log.noted.len() > MOST { log.noted.pop_front() } else { None };
    NOTED.store(log.noted.len(), Ordering::Relaxed);
    drop(log);
    drop(left_out);
}

impl Registered {
    /// Calls the function with a message, unless it was unregistered.
    fn call(&self, level: Level, line: &str) {
        {
            let mut calls = lock(&self.calls);
            if !calls.wanted {
                return;
            }
            calls.running += 1;
        }
        // `CU_LOG_LEVEL_ERROR` and `CU_LOG_LEVEL_WARNING`.
        let level = u32::from(level != Level::Error);
        // The function may change its copy, which has a NUL at its end.
        let mut text = [line.as_bytes(), b"\0"].concat();
        // SAFETY: the program registered the function for such calls. It has not unregistered it, or that
        // waits for the end of this call, or it was done by a callback, which may not rely on the end.
        unsafe {
            (self.function)(self.data as *mut c_void, level, text.as_mut_ptr().cast(), line.len());
        }
        let mut calls = lock(&self.calls);
        calls.running -= 1;
        if calls.running == 0 {
            self.idle.notify_all();
        }
    }
}

/// Calls this function with each message that is written from now on. Returns its handle.
pub(crate) fn register(function: Callback, data: *mut c_void) -> usize {
    let mut log = lock(&LOG);
    log.last += 1;
    let handle = log.last;
    let calls = Mutex::new(Calls { wanted: true, running: 0 });
    let registered = Registered { handle, function, data: data as usize, calls, idle: Condvar::new() };
    log.callbacks.push(Arc::new(registered));
    LISTENED.store(true, Ordering::Relaxed);
    drop(log);
    recent::listen(note);
    handle
}

/// Unregisters a callback. Returns false if there is none with this handle.
///
/// From then on no thread begins a call of the function. When this returns, none is in it either, except when
/// a callback called this: it may be the function itself, or one that the function waits for.
pub(crate) fn unregister(handle: usize) -> bool {
    let gone = {
        let mut log = lock(&LOG);
        let Some(at) = log.callbacks.iter().position(|registered| registered.handle == handle) else {
            return false;
        };
        let gone = log.callbacks.remove(at);
        if log.callbacks.is_empty() {
            LISTENED.store(false, Ordering::Relaxed);
            NOTED.store(0, Ordering::Relaxed);
            log.noted.clear();
        }
        gone
    };
    let mut calls = lock(&gone.calls);
    calls.wanted = false;
    // The threads that were in it before a fork are not in the child.
    if here().0 != Place::Telling && !session::forked() {
        let idle = gone.idle.wait_while(calls, |calls| calls.running > 0);
        drop(idle.unwrap_or_else(PoisonError::into_inner));
    }
    true
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::thread;

    use super::*;

    /// A callback that gets the messages of one test, and those of other tests, which it ignores.
    #[derive(Default)]
    struct Listener {
        /// What the test's messages end with.
        of_test: &'static str,
        handle: OnceLock<usize>,
        told: Mutex<Vec<String>>,
        /// What it does with each message.
        then: Option<Box<dyn Fn() + Sync>>,
    }

    impl Listener {
        fn new(of_test: &'static str) -> Listener {
            Listener { of_test, ..Listener::default() }
        }

        fn register(&self) {
            let data = std::ptr::from_ref(self).cast_mut().cast();
            self.handle.set(register(listens, data)).expect("a listener registers once");
        }

        fn unregister(&self) -> bool {
            unregister(*self.handle.get().expect("a registered listener"))
        }

        fn told(&self) -> Vec<String> {
            lock(&self.told).clone()
        }
    }

    unsafe extern "C" fn listens(data: *mut c_void, _level: u32, text: *mut c_char, length: usize) {
        // SAFETY: each test passes its listener, which lives until it is unregistered, and a message has that
        // length.
        let (listener, text) =
            unsafe { (&*data.cast::<Listener>(), std::slice::from_raw_parts(text.cast::<u8>(), length)) };
        let text = String::from_utf8_lossy(text);
        let line = text.split_once("[rgpu][W] ").and_then(|(_, line)| line.strip_suffix(listener.of_test));
        if let Some(line) = line {
            lock(&listener.told).push(line.to_owned());
            if let Some(then) = &listener.then {
                then();
            }
        }
    }

    fn say(what: &str, of_test: &str) {
        client::log::unwritten(format_args!("{what}{of_test}"));
    }

    #[test]
    fn a_function_tells_at_its_end_what_it_has_written() {
        const OF: &str = ", says the test of ends";
        let listener = Listener::new(OF);
        listener.register();
        {
            let _outer = enter();
            {
                let _inner = enter();
                say("one", OF);
            }
            say("two", OF);
            assert!(listener.told().is_empty());
        }
        assert_eq!(listener.told(), ["one", "two"]);
        {
            let _call = enter();
            say("three", OF);
            assert!(listener.unregister());
        }
        assert_eq!(listener.told(), ["one", "two"]);
        assert!(!listener.unregister());
    }

    #[test]
    fn what_other_threads_write_is_told_by_the_next_call() {
        const OF: &str = ", says the test of threads";
        let listener = Listener::new(OF);
        listener.register();
        thread::spawn(|| say("one", OF)).join().expect("the thread");
        // The next call may be one of another test.
        while listener.told().is_empty() {
            drop(enter());
            thread::yield_now();
        }
        assert_eq!(listener.told(), ["one"]);
        assert!(listener.unregister());
    }

    #[test]
    fn a_callback_may_write_and_take_locks_that_were_held() {
        const OF: &str = ", says the test of locks";
        static HELD: Mutex<()> = Mutex::new(());
        let listener = Listener {
            then: Some(Box::new(|| {
                let _call = enter();
                drop(lock(&HELD));
                say("not told", OF);
            })),
            ..Listener::new(OF)
        };
        listener.register();
        {
            let _call = enter();
            let _held = lock(&HELD);
            say("one", OF);
        }
        assert_eq!(listener.told(), ["one"]);
        assert!(listener.unregister());
    }

    #[test]
    fn a_callback_that_another_one_unregisters_is_not_called() {
        const OF: &str = ", says the test of two callbacks";
        static SECOND: OnceLock<usize> = OnceLock::new();
        let unregisters: Box<dyn Fn() + Sync> = Box::new(|| {
            unregister(*SECOND.get().expect("the second callback"));
        });
        let first = Listener { then: Some(unregisters), ..Listener::new(OF) };
        let second = Listener::new(OF);
        first.register();
        second.register();
        SECOND.set(*second.handle.get().expect("a handle")).expect("set once");
        {
            let _call = enter();
            say("one", OF);
        }
        assert_eq!((first.told(), second.told()), (vec!["one".to_owned()], vec![]));
        assert!(first.unregister());
        assert!(!second.unregister());
    }

    #[test]
    fn unregistering_waits_for_other_threads_in_the_callback() {
        const OF: &str = ", says the test of waiting";
        static CALLBACK: OnceLock<Arc<Registered>> = OnceLock::new();
        static DONE: AtomicBool = AtomicBool::new(false);
        let waits: Box<dyn Fn() + Sync> = Box::new(|| {
            let callback = CALLBACK.get().expect("the callback");
            // Until the other thread unregisters it.
            while lock(&callback.calls).wanted {
                thread::yield_now();
            }
            DONE.store(true, Ordering::Release);
        });
        let listener = Listener { then: Some(waits), ..Listener::new(OF) };
        listener.register();
        let handle = *listener.handle.get().expect("a handle");
        let registered = lock(&LOG).callbacks.iter().find(|callback| callback.handle == handle).cloned();
        let callback = CALLBACK.get_or_init(|| registered.expect("the callback"));
        thread::scope(|scope| {
            scope.spawn(|| {
                let _call = enter();
                say("one", OF);
            });
            while listener.told().is_empty() {
                thread::yield_now();
            }
            assert!(listener.unregister());
            assert!(DONE.load(Ordering::Acquire));
        });
        assert_eq!(lock(&callback.calls).running, 0);
    }
}
