//! Locks of mutexes that protect nothing that a panic could leave half done.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes the lock, whatever became of the threads that had it before.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
