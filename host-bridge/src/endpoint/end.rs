//! How a session ends: why, and who is told.

use std::sync::{Mutex, MutexGuard};

use thiserror::Error;

/// The session was lost: it ended though neither side asked for that. The text says why.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{reason}")]
pub struct Lost {
    /// Why.
    pub reason: String,
}

impl Lost {
    /// Lost, because of `reason`.
    pub fn new(reason: impl Into<String>) -> Lost {
        Lost { reason: reason.into() }
    }
}

/// What is to be called when a session is over ([`Client::when_over`](super::Client::when_over)).
#[derive(Default)]
pub(super) struct Farewell(Mutex<FarewellState>);

#[derive(Default)]
struct FarewellState {
    over: bool,
    then: Option<Box<dyn FnOnce() + Send>>,
}

impl Farewell {
    fn lock(&self) -> MutexGuard<'_, FarewellState> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Calls `then` when the session is over; at once if it is.
    pub(super) fn set(&self, then: Box<dyn FnOnce() + Send>) {
        let mut state = self.lock();
        if state.over {
            drop(state);
            then();
        } else {
            state.then = Some(then);
        }
    }

    /// The session is over.
    pub(super) fn call(&self) {
        let mut state = self.lock();
        state.over = true;
        let then = state.then.take();
        drop(state);
        if let Some(then) = then {
            then();
        }
    }
}
