//! Controls when guest memory may be touched: not while the guest is stopped, and never by anything that
//! began before a reset.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of resets.
    resets: u64,
    paused: bool,
    /// Number of threads that are touching guest memory.
    inside: usize,
}

/// Permission to touch guest memory, until it is dropped. A thread has at most one.
#[derive(Debug)]
pub struct Inside<'g>(&'g Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.lock().inside -= 1;
        self.0.changed.notify_all();
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The epoch of what begins now, for [`enter`](Self::enter).
    pub fn epoch(&self) -> u64 {
        self.lock().resets
    }

    /// Enters, for something that began at `epoch`, once the guest runs. `None`: the device was reset since.
    pub fn enter(&self, epoch: u64) -> Option<Inside<'_>> {
        let mut state = self.lock();
        while state.paused && state.resets == epoch {
            state = self.wait(state);
        }
        if state.resets != epoch {
            return None;
        }
        state.inside += 1;
        Some(Inside(self))
    }

    /// Enters if that is possible immediately.
    pub fn try_enter(&self, epoch: u64) -> Option<Inside<'_>> {
        let mut state = self.lock();
        if state.paused || state.resets != epoch {
            return None;
        }
        state.inside += 1;
        Some(Inside(self))
    }

    /// Whether the guest is stopped.
    pub fn is_paused(&self) -> bool {
        self.lock().paused
    }

    /// Stops the guest's memory accesses. Returns when nobody is inside. Returns false if the guest was
    /// already stopped.
    pub fn pause(&self) -> bool {
        let mut state = self.lock();
        let first = !std::mem::replace(&mut state.paused, true);
        while state.inside > 0 {
            state = self.wait(state);
        }
        first
    }

    /// The guest runs.
    pub fn go_on(&self) {
        self.lock().paused = false;
        self.changed.notify_all();
    }

    /// The device was reset: nothing that began earlier can enter any more. Returns when none of that is
    /// inside. Returns whether the guest was stopped.
    pub fn reset(&self) -> bool {
        let mut state = self.lock();
        state.resets += 1;
        let paused = std::mem::take(&mut state.paused);
        self.changed.notify_all();
        while state.inside > 0 {
            state = self.wait(state);
        }
        paused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread::spawn;

    #[test]
    fn nobody_enters_while_the_guest_is_stopped() {
        let gate = Arc::new(Gate::default());
        let inside = gate.enter(0).unwrap();
        let pausing = spawn({
            let gate = gate.clone();
            move || gate.pause()
        });
        while !gate.is_paused() {
            std::thread::yield_now();
        }
        assert!(gate.try_enter(0).is_none() && !pausing.is_finished(), "somebody is inside");
        drop(inside);
        assert!(pausing.join().unwrap());
        assert!(!gate.pause(), "it was stopped before");
        let entering = spawn({
            let gate = gate.clone();
            move || gate.enter(0).is_some()
        });
        gate.go_on();
        assert!(entering.join().unwrap() && gate.try_enter(0).is_some());
    }

    #[test]
    fn waiters_from_before_a_reset_do_not_enter() {
        let gate = Arc::new(Gate::default());
        gate.pause();
        let entering = spawn({
            let gate = gate.clone();
            move || gate.enter(0).is_some()
        });
        assert!(gate.reset() && !gate.reset());
        assert!(!entering.join().unwrap());
        assert!(gate.try_enter(0).is_none() && gate.enter(gate.epoch()).is_some());
    }
}
