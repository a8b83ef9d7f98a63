//! Work that blocks, of which only so much is under way at a time. The rest waits its turn: whoever has the
//! least under way comes first, and nobody has more than half of it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use crate::lock::lock;

type Work = Box<dyn FnOnce() + Send>;

/// See the module.
pub(in crate::parent) struct Queue {
    /// Maximum number of threads.
    threads: usize,
    /// Maximum of work that waits for one worker.
    waiting_of_one: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: usize,
    /// How much is under way for each worker.
    running: HashMap<u32, usize>,
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

impl Queue {
    pub(in crate::parent) fn new(threads: usize, waiting_of_one: usize) -> Arc<Queue> {
        Arc::new(Queue { threads, waiting_of_one, state: Mutex::default() })
    }

    /// Does `work` for a worker, in another thread and perhaps later.
    pub(in crate::parent) fn join(
        self: &Arc<Queue>,
        worker: u32,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), Refused> {
        let mut state = lock(&self.state);
        if state.threads >= self.threads || state.running_of(worker) >= self.most_of_one() {
            if state.waiting.iter().filter(|(other, _)| *other == worker).count() >= self.waiting_of_one {
                return Err(Refused::Full);
            }
            state.waiting.push_back((worker, Box::new(work)));
            return Ok(());
        }
        let queue = Arc::clone(self);
        let run = move || {
            let mut now = Some((worker, Box::new(work) as Work));
            while let Some((worker, work)) = now {
                // A panic ends this piece of work only, and its place is free for others.
                let _ = catch_unwind(AssertUnwindSafe(work));
                now = queue.next(worker);
            }
        };
        let started = std::thread::Builder::new().name("rgpu-direct".into()).spawn(run);
        started.map_err(Refused::NoThread)?;
        state.threads += 1;
        *state.running.entry(worker).or_default() += 1;
        Ok(())
    }

    /// A worker is gone: nothing that waits for it is done any more.
    pub(in crate::parent) fn forget(&self, worker: u32) {
        lock(&self.state).waiting.retain(|(other, _)| *other != worker);
    }

    fn most_of_one(&self) -> usize {
        self.threads.div_ceil(2)
    }

    /// The next work for a thread that has done some for the worker `done`, and the worker for which it is.
    /// Otherwise the thread ends.
    fn next(&self, done: u32) -> Option<(u32, Work)> {
        let mut state = lock(&self.state);
        let State { threads, running, waiting } = &mut *state;
        if let Some(left) = running.get_mut(&done) {
            *left -= 1;
        }
        running.retain(|_, count| *count > 0);
        let of = |worker: u32| running.get(&worker).copied().unwrap_or(0);
        let may = waiting.iter().enumerate().filter(|(_, (worker, _))| of(*worker) < self.most_of_one());
        // Of several with as much under way, the first to come.
        let next = may.min_by_key(|(_, (worker, _))| of(*worker)).map(|(at, _)| at);
        let Some((worker, work)) = next.and_then(|at| waiting.remove(at)) else {
            *threads -= 1;
            return None;
        };
        *running.entry(worker).or_default() += 1;
        Some((worker, work))
    }
}

impl State {
    fn running_of(&self, worker: u32) -> usize {
        self.running.get(&worker).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use test_kit::PATIENCE;

    /// Pieces of work of one worker. Each runs until the test lets one of them end.
    struct Lasting {
        worker: u32,
        began: Sender<()>,
        begun: Receiver<()>,
        go: Sender<()>,
        goes: Arc<Mutex<Receiver<()>>>,
    }

    impl Lasting {
        fn of(worker: u32) -> Lasting {
            let ((began, begun), (go, goes)) = (channel(), channel());
            Lasting { worker, began, begun, go, goes: Arc::new(Mutex::new(goes)) }
        }

        fn join(&self, queue: &Arc<Queue>) -> Result<(), Refused> {
            let (began, goes) = (self.began.clone(), Arc::clone(&self.goes));
            queue.join(self.worker, move || {
                let _ = began.send(());
                let _ = lock(&goes).recv();
            })
        }

        /// Waits until so many more have begun.
        fn begins(&self, count: usize) {
            (0..count).for_each(|_| self.begun.recv_timeout(PATIENCE).unwrap());
        }

        fn one_ends(&self) {
            self.go.send(()).unwrap();
        }

        /// Lets all of it end. Returns how much more began until then.
        fn end(self) -> usize {
            drop((self.began, self.go));
            self.begun.iter().count()
        }
    }

    #[test]
    fn what_is_too_much_at_a_time_waits_its_turn() {
        let (queue, seven, eight) = (Queue::new(2, 3), Lasting::of(7), Lasting::of(8));
        assert!((0..4).all(|_| seven.join(&queue).is_ok()));
        assert!(matches!(seven.join(&queue), Err(Refused::Full)));
        assert!(eight.join(&queue).is_ok(), "another worker has places of its own");
        seven.begins(1);
        eight.begins(1);
        assert!(seven.begun.try_recv().is_err());
        seven.one_ends();
        seven.begins(1);
        assert_eq!((eight.end(), seven.end()), (0, 2));
    }

    #[test]
    fn a_worker_whose_work_lasts_leaves_half_to_others_and_who_has_nothing_comes_first() {
        let (queue, [seven, eight, nine]) = (Queue::new(4, 9), [7, 8, 9].map(Lasting::of));
        assert!((0..9).all(|_| seven.join(&queue).is_ok()));
        seven.begins(2);
        assert!((0..3).all(|_| eight.join(&queue).is_ok()));
        eight.begins(2);
        assert!(nine.join(&queue).is_ok());
        eight.one_ends();
        nine.begins(1);
        assert_eq!((nine.end(), eight.end(), seven.end()), (0, 1, 7));
    }

    #[test]
    fn work_that_panics_gives_its_place_back() {
        let (queue, seven) = (Queue::new(2, 9), Lasting::of(7));
        (0..3).for_each(|_| queue.join(7, || std::panic::resume_unwind(Box::new(()))).unwrap());
        seven.join(&queue).unwrap();
        seven.begins(1);
        assert_eq!(seven.end(), 0);
    }

    #[test]
    fn what_waits_for_a_worker_that_is_gone_is_not_done() {
        let (queue, seven, eight) = (Queue::new(2, 9), Lasting::of(7), Lasting::of(8));
        assert!((0..3).all(|_| seven.join(&queue).is_ok() && eight.join(&queue).is_ok()));
        queue.forget(7);
        assert_eq!((seven.end(), eight.end()), (1, 3));
    }
}
