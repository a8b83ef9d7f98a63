//! A thread's own values that outlast `exit`.
//!
//! `exit` destroys the calling thread's `thread_local!` values first, and only then calls what was registered with `atexit` and the destructors of static objects. Programs
//! call CUDA there, and expect their context to be current and their streams to be there. Destructors of `pthread_key_create` are called when a thread ends, but not by `exit`.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::thread::LocalKey;

/// A value of a `thread_local!` that is dropped when its thread has ended, and not by `exit`.
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
    /// The value that each thread begins with.
    pub const fn new(value: T) -> Lasting<T> {
        Lasting { value: UnsafeCell::new(ManuallyDrop::new(value)), life: Cell::new(Life::Unused) }
    }

    /// Calls `f` with the thread's value. `None`: the thread is being torn down, and the value is gone.
    #[inline]
    pub fn with<R>(key: &'static LocalKey<Lasting<T>>, f: impl FnOnce(&T) -> R) -> Option<R> {
        // Nothing is dropped with the `thread_local!` itself, so there is always one.
        key.with(|this| {
            match this.life.get() {
                Life::Used => {}
                Life::Unused => {
                    this.life.set(Life::Used);
                    at_end(std::ptr::from_ref(this).cast(), Lasting::<T>::end);
                }
                Life::Over => return None,
            }
            // SAFETY: the value is dropped by `end` alone, when none of the thread's other code runs any more.
            Some(f(unsafe { &*this.value.get() }))
        })
    }

    /// # Safety
    /// `this` is the calling thread's `Lasting<T>`, which is in use, and nothing that `with` has called is under way.
    unsafe fn end(this: *const c_void) {
        // SAFETY: as the caller says.
        let this = unsafe { &*this.cast::<Lasting<T>>() };
        this.life.set(Life::Over);
        // SAFETY: nobody gets at the value any more, and it was not dropped before: `end` is called once.
        unsafe { ManuallyDrop::drop(&mut *this.value.get()) };
    }
}

/// What ends a thread's values, in the order in which they came into use.
type Ends = Vec<(*const c_void, unsafe fn(*const c_void))>;

unsafe extern "C" fn end_all(ends: *mut c_void) {
    // SAFETY: the key's value is a box that `at_end` has made, and was cleared before this is called.
    let ends = unsafe { Box::from_raw(ends.cast::<Ends>()) };
    for (value, end) in ends.into_iter().rev() {
        // SAFETY: the value is in this thread's own memory, which is there until the thread is gone.
        unsafe { end(value) };
    }
}

/// Has `end` called with `value` when this thread has ended. Where the system gives no key, it never is, and the value's memory stays.
fn at_end(value: *const c_void, end: unsafe fn(*const c_void)) {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let made = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the libraries stay loaded, so `end_all` can be called for as long as there are threads.
        (unsafe { libc::pthread_key_create(&mut key, Some(end_all)) } == 0).then_some(key)
    });
    let Some(key) = *made else { return };
    // SAFETY: the key is there; its value is NULL or a box of this thread's own that nothing else refers to now.
    unsafe {
        let mut ends = libc::pthread_getspecific(key).cast::<Ends>();
        if ends.is_null() {
            ends = Box::into_raw(Box::default());
            if libc::pthread_setspecific(key, ends.cast()) != 0 {
                drop(Box::from_raw(ends));
                return;
            }
        }
        (*ends).push((value, end));
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
    fn a_threads_values_end_with_it_and_not_before() {
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
    fn values_end_last_used_first_and_are_gone_then() {
        std::thread::spawn(|| {
            Lasting::with(&FIRST, |late| *late.borrow_mut() = Some(Late("first"))).unwrap();
            Lasting::with(&SECOND, |late| *late.borrow_mut() = Some(Late("second"))).unwrap();
        })
        .join()
        .unwrap();
        assert_eq!(*ORDER.lock().unwrap(), [("second", false), ("first", false)]);
    }
}
