//! The client's memory while its machine is stopped: nobody touches it.
//!
//! A guest that was stopped may go on, or it may have been reset, and nobody says which. In the second case
//! its memory is another kernel's. So a worker that is told of the first leaves the memory alone until it is
//! told to go on ([`frame::PAUSE`](protocol::link::frame::PAUSE), `CONTINUE`):
//!
//! - the dispatcher takes no commands, and otherwise goes on: its session's device memory may leave, for
//!   instance. If it is in the middle of a command that takes long, it waits there once it comes to need the
//!   client's memory ([`Hold`]), and does nothing else meanwhile: the device memory then stays;
//! - answers and progress are kept, in order, until later ([`Touch::now_or_later`]);
//! - work that uses the memory ends first ([`InUse`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use super::wake::Waker;
use crate::memory::ChannelView;

type Later = Box<dyn FnOnce(&Touch) + Send>;

/// The way to a channel's memory, for all threads of a worker.
pub(super) struct Touch {
    pub(super) view: Arc<ChannelView>,
    pub(super) waker: Waker,
    /// Whether the memory must not be touched. Held for reading while it is.
    paused: RwLock<bool>,
    later: Mutex<Vec<Later>>,
}

impl Touch {
    pub(super) fn new(view: Arc<ChannelView>, waker: Waker) -> Arc<Touch> {
        Arc::new(Touch { view, waker, paused: RwLock::new(false), later: Mutex::default() })
    }

    /// Leave to touch the memory as long as the guard exists, of which a thread has one at a time. `None`:
    /// not now.
    pub(super) fn now(&self) -> Option<RwLockReadGuard<'_, bool>> {
        let paused = self.paused.read().unwrap_or_else(PoisonError::into_inner);
        (!*paused).then_some(paused)
    }

    /// Acts on the memory, after everything that is to be done later, if there is something.
    pub(super) fn now_or_later(&self, act: impl FnOnce(&Touch) + Send + 'static) {
        let paused = self.paused.read().unwrap_or_else(PoisonError::into_inner);
        if *paused {
            self.later().push(Box::new(act));
        } else {
            act(self);
        }
    }

    fn later(&self) -> MutexGuard<'_, Vec<Later>> {
        self.later.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When this returns nobody touches the memory, except for the work that uses it.
    pub(super) fn pause(&self) {
        *self.paused.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Does what was left for later.
    pub(super) fn go_on(&self) {
        let mut paused = self.paused.write().unwrap_or_else(PoisonError::into_inner);
        let later = std::mem::take(&mut *self.later());
        later.into_iter().for_each(|act| act(self));
        *paused = false;
    }
}

/// Whether nothing uses the client's memory, or comes to use it: whether no command is being executed, and
/// then, whether the memory is not `used`. In this order: a command begins its uses before it ends, and no
/// other begins meanwhile.
pub(super) fn is_at_rest(executes: impl FnOnce() -> bool, used: impl FnOnce() -> bool) -> bool {
    !executes() && !used()
}

/// Whether commands may begin to use the client's memory.
#[derive(Default)]
pub(super) struct Hold {
    held: Mutex<bool>,
    released: Condvar,
}

impl Hold {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to use the memory, once that is allowed or the session is `over`.
    pub(super) fn begin<R>(&self, over: impl Fn() -> bool, begin: impl FnOnce() -> R) -> R {
        // Under the lock: nobody holds, and then counts what has begun, in between.
        let _may = self.released.wait_while(self.lock(), |held| *held && !over());
        begin()
    }

    /// Lets nothing begin any more. When this returns, whatever has begun is counted as a use ([`InUse`]).
    pub(super) fn hold(&self) {
        *self.lock() = true;
    }

    /// Lets uses begin again.
    pub(super) fn release(&self) {
        *self.lock() = false;
        self.wake();
    }

    /// The session may be over: whoever waits looks.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.released.notify_all();
    }
}

/// Counts a use of the client's memory by a device, or by whatever else takes its time, until it is dropped.
pub struct InUse(Arc<AtomicUsize>);

impl InUse {
    pub(super) fn new(count: &Arc<AtomicUsize>) -> InUse {
        count.fetch_add(1, Ordering::AcqRel);
        InUse(Arc::clone(count))
    }
}

impl Clone for InUse {
    fn clone(&self) -> InUse {
        InUse::new(&self.0)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for InUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InUse")
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// The dispatcher goes a step further between the two questions: it begins a copy, and its command ends.
    #[test]
    fn a_copy_that_begins_while_it_is_looked_is_seen() {
        let (executing, in_use, looks) = (Cell::new(true), Cell::new(false), Cell::new(0));
        let look = |at: &Cell<bool>| {
            let seen = at.get();
            looks.set(looks.get() + 1);
            if looks.get() == 1 {
                in_use.set(true);
                executing.set(false);
            }
            seen
        };
        assert!(!is_at_rest(|| look(&executing), || look(&in_use)));
        in_use.set(false);
        assert!(is_at_rest(|| look(&executing), || look(&in_use)));
    }

    #[test]
    fn nobody_stops_the_client_between_the_leave_to_use_its_memory_and_the_use() {
        let hold = Hold::default();
        hold.begin(|| false, || assert!(hold.held.try_lock().is_err()));
        hold.hold();
        hold.begin(|| true, || ());
        hold.release();
        hold.begin(|| false, || ());
    }
}
