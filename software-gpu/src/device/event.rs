//! Events: points in a stream's order that others can wait for, and the times when they were reached.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::error::{Error, Result};

#[derive(Default)]
struct State {
    /// The number of recordings, counted at the call.
    recorded: u64,
    /// The recordings that their streams have not reached yet. A later one, in another stream, may be reached
    /// before an earlier one.
    open: BTreeSet<u64>,
    /// The latest recording that its stream has reached.
    reached: u64,
    time_ns: u64,
}

impl State {
    fn has_reached(&self, number: u64) -> bool {
        !self.open.contains(&number)
    }
}

/// A point in a stream. Clones refer to the same event.
#[derive(Clone, Default)]
pub struct Event {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Event {
    /// Creates an event. As in CUDA, an event that was never recorded counts as complete.
    pub fn new() -> Event {
        Event::default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Starts a recording and returns its number for [`Event::reach`].
    pub(crate) fn begin(&self) -> u64 {
        let mut state = self.lock();
        state.recorded += 1;
        let number = state.recorded;
        state.open.insert(number);
        number
    }

    /// The number of the latest recording, for a wait that is being enqueued.
    pub(crate) fn latest(&self) -> u64 {
        self.lock().recorded
    }

    pub(crate) fn reach(&self, number: u64, time_ns: u64) {
        let mut state = self.lock();
        state.open.remove(&number);
        if number > state.reached {
            state.reached = number;
            state.time_ns = time_ns;
        }
        drop(state);
        self.shared.1.notify_all();
    }

    pub(crate) fn wait_for(&self, number: u64) {
        let mut state = self.lock();
        while !state.has_reached(number) {
            state = self.shared.1.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Whether the latest recording has been reached. True if there was none.
    pub fn query(&self) -> bool {
        let state = self.lock();
        state.has_reached(state.recorded)
    }

    /// Waits for the latest recording made before this call.
    pub fn synchronize(&self) {
        let number = self.latest();
        self.wait_for(number);
    }

    /// When the latest recording was reached, in nanoseconds since the GPU was created.
    pub fn timestamp_ns(&self) -> Result<u64> {
        let state = self.lock();
        if state.recorded == 0 {
            return Err(Error::NoTime("it was never recorded"));
        }
        if !state.has_reached(state.recorded) {
            return Err(Error::NoTime("it has not been reached yet"));
        }
        Ok(state.time_ns)
    }

    /// Nanoseconds from `start` to this event.
    pub fn elapsed_ns_since(&self, start: &Event) -> Result<i64> {
        Ok(self.timestamp_ns()? as i64 - start.timestamp_ns()? as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_that_is_reached_early_does_not_end_a_wait_for_an_earlier_one() {
        let event = Event::new();
        let (first, second) = (event.begin(), event.begin());
        event.reach(second, 20);
        assert!(event.query() && !event.lock().has_reached(first));
        event.reach(first, 30);
        event.wait_for(first);
        assert_eq!(event.timestamp_ns().ok(), Some(20), "the time is that of the latest recording");
    }
}
