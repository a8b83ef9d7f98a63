//! Work that blocks, of which only so much is under way at a time. The rest waits its turn.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use crate::lock::lock;

type Work = Box<dyn FnOnce() + Send>;

/// See the module.
pub(in crate::parent) struct Line {
    /// Maximum number of threads, and of work that waits for one worker.
    most: (usize, usize),
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: usize,
    /// With the worker for which it is done.
    waiting: VecDeque<(u32, Work)>,
}

/// Why work is not done.
#[derive(Debug)]
pub(in crate::parent) enum Refused {
    /// The worker has its maximum waiting.
    Full,
    /// There is no thread.
    NoThread(io::Error),
}

impl Line {
    pub(in crate::parent) fn new(threads: usize, waiting_of_one: usize) -> Arc<Line> {
        Arc::new(Line { most: (threads, waiting_of_one), state: Mutex::default() })
    }

    /// Does `work` for a worker, in another thread and perhaps later.
    pub(in crate::parent) fn join(
        self: &Arc<Line>,
        worker: u32,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), Refused> {
        let mut state = lock(&self.state);
        if state.threads >= self.most.0 {
            if state.waiting.iter().filter(|(other, _)| *other == worker).count() >= self.most.1 {
                return Err(Refused::Full);
            }
            state.waiting.push_back((worker, Box::new(work)));
            return Ok(());
        }
        let line = Arc::clone(self);
        let run = move || {
            work();
            while let Some(next) = line.next() {
                next();
            }
        };
        let started = std::thread::Builder::new().name("rgpu-direct".into()).spawn(run);
        started.map_err(Refused::NoThread)?;
        state.threads += 1;
        Ok(())
    }

    /// The next work for a thread, which otherwise ends.
    fn next(&self) -> Option<Work> {
        let mut state = lock(&self.state);
        let next = state.waiting.pop_front().map(|(_, work)| work);
        state.threads -= usize::from(next.is_none());
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn what_is_too_much_at_a_time_waits_its_turn_and_no_worker_takes_all_places() {
        let line = Line::new(2, 3);
        let ((began, begun), (go, goes)) = (channel(), channel::<()>());
        let goes = Arc::new(Mutex::new(goes));
        let join = |worker| {
            let (began, goes) = (began.clone(), Arc::clone(&goes));
            line.join(worker, move || {
                began.send(worker).unwrap();
                let _ = lock(&goes).recv();
            })
        };
        assert!((0..5).all(|_| join(7).is_ok()));
        assert!(matches!(join(7), Err(Refused::Full)));
        assert!(join(8).is_ok(), "another worker has places of its own");
        let first = [begun.recv().unwrap(), begun.recv().unwrap()];
        assert!(first == [7, 7] && begun.try_recv().is_err());
        (0..6).for_each(|_| go.send(()).unwrap());
        assert_eq!([(); 4].map(|()| begun.recv().unwrap()).iter().sum::<u32>(), 7 * 3 + 8);
    }
}
