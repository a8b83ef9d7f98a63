//! Thread-local values that outlive `exit`.
//!
//! `exit` first destroys the calling thread's `thread_local!` values and then runs `atexit` functions and
//! destructors of static objects. Programs call CUDA there and expect their context to be current and their
//! streams to exist. Destructors from `pthread_key_create` run when a thread ends, but not in `exit`. They
//! call CUDA as well, in an order that the keys' numbers decide, so the values last until the last of them.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::thread::LocalKey;

/// A `thread_local!` value that is dropped when its thread has ended, but not by `exit`.
#[derive(Debug)]
pub struct Lasting<T> {
    value: UnsafeCell<ManuallyDrop<T>>,
    life: Cell<Life>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Unused,
    Used,
    Over,
}

impl<T> Lasting<T> {
    /// The initial value in each thread.
    pub const fn new(value: T) -> Lasting<T> {
        Lasting { value: UnsafeCell::new(ManuallyDrop::new(value)), life: Cell::new(Life::Unused) }
    }

    /// Calls `f` with the thread's value. `None` if the thread is being destroyed and the value is gone.
    #[inline]
    pub fn with<R>(key: &'static LocalKey<Lasting<T>>, f: impl FnOnce(&T) -> R) -> Option<R> {
        // Dropping the `thread_local!` itself drops nothing, so it is always accessible.
        key.with(|this| {
            match this.life.get() {
                Life::Used => {}
                Life::Unused => {
                    this.life.set(Life::Used);
                    at_end(std::ptr::from_ref(this).cast(), Lasting::<T>::end);
                }
                Life::Over => return None,
            }
            // SAFETY: only `end` drops the value, when none of the thread's other code runs any more.
            Some(f(unsafe { &*this.value.get() }))
        })
    }

    /// # Safety
    ///
    /// `this` is the calling thread's `Lasting<T>`, is in use, and no call made by `with` is in progress.
    unsafe fn end(this: *const c_void) {
        // SAFETY: the caller guarantees that `this` is the thread's `Lasting<T>`.
        let this = unsafe { &*this.cast::<Lasting<T>>() };
        this.life.set(Life::Over);
        // SAFETY: nothing can access the value any more, and `end` is called only once.
        unsafe { ManuallyDrop::drop(&mut *this.value.get()) };
    }
}

/// A value of a thread and the function that ends it.
type End = (*const c_void, unsafe fn(*const c_void));

/// A thread's values.
#[derive(Default)]
struct Ends {
    /// In the order of first use.
    values: Vec<End>,
    /// How often the destructors of keys have been called.
    rounds: u32,
}

/// How often the C library calls the destructors of keys that have values again.
const DESTRUCTOR_ROUNDS: u32 = 4;

static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();

/// Ends the thread's values, in the last round: the destructors of the program's own keys call CUDA.
unsafe extern "C" fn end_all(ends: *mut c_void) {
    // SAFETY: the key's value is a box made by `at_end`, and was cleared before this call.
    let mut ends = unsafe { Box::from_raw(ends.cast::<Ends>()) };
    ends.rounds += 1;
    if ends.rounds < DESTRUCTOR_ROUNDS
        && let Some(Some(key)) = KEY.get()
    {
        let again = Box::into_raw(ends);
        // SAFETY: the key exists, and its value is a box that nothing else refers to.
        ends = unsafe {
            if libc::pthread_setspecific(*key, again.cast()) == 0 {
                return;
            }
            Box::from_raw(again)
        };
    }
    for (value, end) in ends.values.into_iter().rev() {
        // SAFETY: the value is in this thread's memory, which exists until the thread is gone.
        unsafe { end(value) };
    }
}

/// Registers `end` to be called with `value` when this thread has ended. If the system provides no key, or
/// the thread is already in a late round of destructors, it is never called and the value's memory is leaked.
fn at_end(value: *const c_void, end: unsafe fn(*const c_void)) {
    let made = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the libraries stay loaded, so `end_all` can be called as long as there are threads.
        (unsafe { libc::pthread_key_create(&mut key, Some(end_all)) } == 0).then_some(key)
    });
    let Some(key) = *made else { return };
    // SAFETY: the key exists. Its value is NULL or a box of this thread that nothing else refers to now.
    unsafe {
        let mut ends = libc::pthread_getspecific(key).cast::<Ends>();
        if ends.is_null() {
            ends = Box::into_raw(Box::default());
            if libc::pthread_setspecific(key, ends.cast()) != 0 {
                drop(Box::from_raw(ends));
                return;
            }
        }
        (*ends).values.push((value, end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    static ORDER: Mutex<Vec<(&str, bool)>> = Mutex::new(Vec::new());

    struct Counted;

    impl Drop for Counted {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Late(&'static str);

    impl Drop for Late {
        fn drop(&mut self) {
            ORDER.lock().unwrap().push((self.0, Lasting::with(&SECOND, |_| ()).is_some()));
        }
    }

    thread_local! {
        static VALUES: Lasting<RefCell<Vec<Counted>>> = const { Lasting::new(RefCell::new(Vec::new())) };
        static FIRST: Lasting<RefCell<Option<Late>>> = const { Lasting::new(RefCell::new(None)) };
        static SECOND: Lasting<RefCell<Option<Late>>> = const { Lasting::new(RefCell::new(None)) };
    }

    #[test]
    fn a_thread_s_values_are_dropped_when_it_ends() {
        std::thread::spawn(|| {
            Lasting::with(&VALUES, |values| values.borrow_mut().extend([Counted, Counted])).unwrap();
            assert_eq!(Lasting::with(&VALUES, |values| values.borrow().len()), Some(2));
            assert_eq!(DROPPED.load(Ordering::Relaxed), 0);
        })
        .join()
        .unwrap();
        assert_eq!(DROPPED.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn values_are_dropped_in_reverse_order_of_first_use() {
        std::thread::spawn(|| {
            Lasting::with(&FIRST, |late| *late.borrow_mut() = Some(Late("first"))).unwrap();
            Lasting::with(&SECOND, |late| *late.borrow_mut() = Some(Late("second"))).unwrap();
        })
        .join()
        .unwrap();
        assert_eq!(*ORDER.lock().unwrap(), [("second", false), ("first", false)]);
    }

    /// What a program's own key, made after the key of this module, sees of a value in its destructor.
    static SEEN: Mutex<Vec<Option<usize>>> = Mutex::new(Vec::new());

    unsafe extern "C" fn look(_: *mut c_void) {
        let seen = Lasting::with(&VALUES, |values| values.borrow().len());
        SEEN.lock().unwrap().push(seen);
    }

    #[test]
    fn destructors_of_the_program_s_keys_find_the_values() {
        Lasting::with(&FIRST, |_| ()).unwrap();
        let mut key = 0;
        // SAFETY: `look` lives as long as the key.
        assert_eq!(unsafe { libc::pthread_key_create(&mut key, Some(look)) }, 0);
        let thread = std::thread::spawn(move || {
            Lasting::with(&VALUES, |values| values.borrow_mut().extend([])).unwrap();
            // SAFETY: the key exists.
            assert_eq!(unsafe { libc::pthread_setspecific(key, std::ptr::dangling()) }, 0);
        });
        thread.join().unwrap();
        assert_eq!(*SEEN.lock().unwrap(), [Some(0)]);
    }
}
