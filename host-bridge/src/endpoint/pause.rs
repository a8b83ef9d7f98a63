//! The client's memory while its machine is stopped: nobody touches it.
//!
//! A guest that was stopped may go on, or it may have been reset, and nobody says which. In the second case
//! its memory is another kernel's. So a worker that is told of the first leaves the memory alone until it is
//! told to go on ([`frame::PAUSE`](protocol::link::frame::PAUSE), `CONTINUE`):
//!
//! - the dispatcher takes no commands, and otherwise goes on: its session's device memory may leave, for
//!   instance;
//! - answers and progress are kept, in order, until later ([`Touch::now_or_later`]);
//! - work that uses the memory ends first ([`InUse`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

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
