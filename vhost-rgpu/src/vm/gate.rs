//! When guest memory may be touched: not while the guest is stopped, and never for what began before a reset.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// See the module.
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
    /// Those who touch guest memory now.
    inside: usize,
}

/// Leave to touch guest memory, until it is dropped. A thread has one at a time.
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

    /// What begins now, as [`enter`](Self::enter) knows it.
    pub fn epoch(&self) -> u64 {
        self.lock().resets
    }

    /// Enters with what began at `epoch`, once the guest runs. `None`: the device was reset since.
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

    /// Enters if that is possible now.
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

    /// The guest is stopped. Returns when nobody is inside. False: it was stopped before.
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

    /// The device was reset: nothing of before enters any more. Returns when nobody of before is inside. True: the guest was stopped.
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
    fn what_waited_for_a_stopped_guest_does_not_enter_after_a_reset() {
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
