//! A thread that moves long chunks of data for the relay, one after the other.
//!
//! One thread moves about 4 GB/s through a socket, because the kernel copies. So where there are processors
//! to spare, each data connection has one of these for each direction: the relay decides what goes where, and
//! the thread makes the system calls. Short chunks stay with the relay, which no other thread has to wake. A
//! thread may be given its next task while it works on one, and then goes on with that at once.
//!
//! Between a thread that works and a relay that polls, a chunk costs no system call: each wakes the other
//! only if that sleeps ([`Alarm`] for the relay).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::eventfd::EventFd;
use protocol::polling;

/// What threads wake their relay with, which looks by itself as long as it is awake.
#[derive(Debug)]
pub(super) struct Alarm {
    wake: Arc<EventFd>,
    /// The relay looks at its threads before it sleeps.
    awake: AtomicBool,
    /// A thread has done something since the relay last began to look.
    raised: AtomicBool,
}

impl Alarm {
    /// For a relay that watches `wake`. At first it is taken to be asleep.
    pub(super) fn new(wake: &Arc<EventFd>) -> Arc<Alarm> {
        let (awake, raised) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Alarm { wake: Arc::clone(wake), awake, raised })
    }

    /// A thread has done something.
    pub(super) fn raise(&self) {
        // In one order with `sleeps`: either this sees that the relay is about to sleep, or that sees this.
        self.raised.store(true, Ordering::SeqCst);
        if !self.awake.load(Ordering::SeqCst) {
            // A full counter means that it is raised already.
            let _ = self.wake.write(1);
        }
    }

    /// The relay begins to look at all of its threads.
    pub(super) fn looks(&self) {
        if self.raised.load(Ordering::Relaxed) {
            self.raised.swap(false, Ordering::AcqRel);
        }
    }

    /// The relay is about to sleep, and is woken from now on. True: it has to look once more first.
    pub(super) fn sleeps(&self) -> bool {
        self.awake.store(false, Ordering::SeqCst);
        self.raised.load(Ordering::SeqCst)
    }

    /// The relay looks by itself again.
    pub(super) fn is_awake(&self) {
        self.awake.store(true, Ordering::SeqCst);
    }
}

/// Tasks to do, and tasks done.
struct Tasks<T> {
    todo: VecDeque<T>,
    done: VecDeque<(T, io::Result<()>)>,
    /// The thread waits for `came`.
    asleep: bool,
    /// Others that wait for `rested`.
    waiting: usize,
}

struct Shared<T> {
    tasks: Mutex<Tasks<T>>,
    came: Condvar,
    /// Tasks in `todo`, and in `done`: to be looked at without the lock.
    todo: AtomicUsize,
    done: AtomicUsize,
    over: AtomicBool,
    /// The thread works on a task. Changed under the lock.
    busy: AtomicBool,
    rested: Condvar,
    /// How long the thread polls for its next task before it sleeps.
    poll: Duration,
    /// How often a condition variable was notified.
    #[cfg(test)]
    notified: AtomicUsize,
}

/// See the module's text.
pub(super) struct IoThread<T> {
    shared: Arc<Shared<T>>,
    /// Tasks that were given and not taken back.
    held: AtomicUsize,
    thread: Option<JoinHandle<()>>,
}

impl<T> std::fmt::Debug for IoThread<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoThread({} tasks)", self.held.load(Ordering::Relaxed))
    }
}

impl<T: Send + 'static> IoThread<T> {
    /// Starts the thread. It does `work` with each task and then calls `tell`.
    pub(super) fn start(
        name: String,
        work: impl Fn(&mut T) -> io::Result<()> + Send + 'static,
        tell: impl Fn() + Send + 'static,
    ) -> io::Result<IoThread<T>> {
        let tasks =
            Mutex::new(Tasks { todo: VecDeque::new(), done: VecDeque::new(), asleep: false, waiting: 0 });
        let (todo, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let shared = Arc::new(Shared {
            tasks,
            came: Condvar::new(),
            todo,
            done,
            over: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            rested: Condvar::new(),
            poll: polling::RELAY_IO_THREAD.here(),
            #[cfg(test)]
            notified: AtomicUsize::new(0),
        });
        let run = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            while let Some(mut task) = run.next() {
                let result = work(&mut task);
                let mut tasks = run.lock();
                tasks.done.push_back((task, result));
                run.busy.store(false, Ordering::Relaxed);
                let is_awaited = tasks.waiting > 0;
                drop(tasks);
                if is_awaited {
                    run.notify(&run.rested);
                }
                run.done.fetch_add(1, Ordering::Release);
                tell();
            }
        })?;
        Ok(IoThread { shared, held: AtomicUsize::new(0), thread: Some(thread) })
    }

    /// Tasks that it was given and that were not taken back.
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Gives it a task, to be done after those that it has.
    pub(super) fn give(&self, task: T) {
        self.held.fetch_add(1, Ordering::Relaxed);
        let mut tasks = self.shared.lock();
        tasks.todo.push_back(task);
        self.shared.todo.fetch_add(1, Ordering::Release);
        let is_asleep = tasks.asleep;
        drop(tasks);
        if is_asleep {
            self.shared.notify(&self.shared.came);
        }
    }

    /// Waits until it has done all tasks that it was given.
    pub(super) fn wait_for_rest(&self) {
        let works = |tasks: &mut Tasks<T>| {
            let over = self.shared.over.load(Ordering::Relaxed);
            !over && (!tasks.todo.is_empty() || self.shared.busy.load(Ordering::Relaxed))
        };
        let mut tasks = self.shared.lock();
        tasks.waiting += 1;
        let rested = self.shared.rested.wait_while(tasks, works);
        rested.unwrap_or_else(PoisonError::into_inner).waiting -= 1;
    }

    /// Takes back a finished task with its result, in the order in which tasks were given. `None`: none is
    /// finished. Does not block.
    pub(super) fn take(&self) -> Option<(T, io::Result<()>)> {
        if self.shared.done.load(Ordering::Acquire) == 0 {
            return None;
        }
        let taken = self.shared.lock().done.pop_front()?;
        self.shared.done.fetch_sub(1, Ordering::Relaxed);
        self.held.fetch_sub(1, Ordering::Relaxed);
        Some(taken)
    }
}

impl<T> IoThread<T> {
    /// Ends the thread, whose connection must be shut down, and gives all tasks that were not taken back, in
    /// order: those done, the one that failed, and those not begun.
    pub(super) fn finish(mut self) -> Vec<T> {
        self.stop();
        let mut tasks = self.shared.lock();
        let done: Vec<T> = tasks.done.drain(..).map(|(task, _)| task).collect();
        done.into_iter().chain(tasks.todo.drain(..)).collect()
    }

    /// Waits for the thread. Its connection was shut down before, so it does not wait for the peer.
    fn stop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        // Through the lock, so that the thread is not between its look and its sleep.
        drop(self.shared.lock());
        self.shared.came.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Tasks<T>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those that wait for one of the two, of which there are some: it is a system call all the same.
    fn notify(&self, condition: &Condvar) {
        #[cfg(test)]
        self.notified.fetch_add(1, Ordering::Relaxed);
        condition.notify_all();
    }

    /// Waits for a task. `None`: there will be no more.
    fn next(&self) -> Option<T> {
        // The chunks of one transfer come soon after one another.
        let begin = Instant::now();
        while self.todo.load(Ordering::Acquire) == 0 && !self.over.load(Ordering::Acquire) {
            if begin.elapsed() >= self.poll {
                break;
            }
            std::hint::spin_loop();
        }
        let mut tasks = self.lock();
        loop {
            if self.over.load(Ordering::Acquire) {
                return None;
            }
            if let Some(task) = tasks.todo.pop_front() {
                self.todo.fetch_sub(1, Ordering::Relaxed);
                self.busy.store(true, Ordering::Relaxed);
                return Some(task);
            }
            tasks.asleep = true;
            tasks = self.came.wait(tasks).unwrap_or_else(PoisonError::into_inner);
            tasks.asleep = false;
        }
    }
}

impl<T> Drop for IoThread<T> {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use test_kit::until;

    #[test]
    fn tasks_come_back_done_in_turn() {
        let (tell, told) = channel();
        let work = |n: &mut u32| {
            *n += 1;
            if *n == 3 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
        };
        let thread = IoThread::start("test".into(), work, move || {
            let _ = tell.send(());
        })
        .unwrap();
        for n in 0..100u32 {
            assert!(thread.held() == 0 && thread.take().is_none());
            thread.give(n);
            told.recv().unwrap();
            let (back, result) = thread.take().unwrap();
            assert_eq!((back, result.is_err()), (n + 1, n == 2));
        }
    }

    #[test]
    fn the_next_task_begins_before_the_one_done_is_taken_back() {
        let (tell, told) = channel();
        let thread = IoThread::start(
            "test".into(),
            |_: &mut u32| Ok(()),
            move || {
                let _ = tell.send(());
            },
        )
        .unwrap();
        (0..3).for_each(|n| thread.give(n));
        (0..3).for_each(|_| told.recv().unwrap());
        assert_eq!(thread.held(), 3);
        let back: Vec<u32> = std::iter::from_fn(|| thread.take()).map(|(n, _)| n).collect();
        assert_eq!((back, thread.held()), (vec![0, 1, 2], 0));
    }

    /// A thread that does a task for each message to the second, and sends one to the third when it is done.
    fn held_back() -> (IoThread<u32>, Sender<()>, Receiver<()>) {
        let (tell, told) = channel();
        let (begin, begun) = channel::<()>();
        let begun = std::sync::Mutex::new(begun);
        let work = move |_: &mut u32| begun.lock().unwrap().recv().map_err(io::Error::other);
        let thread = IoThread::start("test".into(), work, move || {
            let _ = tell.send(());
        })
        .unwrap();
        (thread, begin, told)
    }

    #[test]
    fn only_what_sleeps_is_woken() {
        let (thread, begin, told) = held_back();
        // If this fails, the thread must not wait for ever.
        let begin = begin;
        let notified = || thread.shared.notified.load(Ordering::Relaxed);
        until("asleep", || thread.shared.lock().asleep);
        thread.give(0);
        until("at work", || thread.shared.busy.load(Ordering::Relaxed));
        assert_eq!(notified(), 1);
        // While it works, and as long as nobody waits for its rest.
        (1..50).for_each(|n| thread.give(n));
        for _ in 0..49 {
            begin.send(()).unwrap();
            told.recv().unwrap();
        }
        assert_eq!(notified(), 1);
        std::thread::scope(|scope| {
            let resting = scope.spawn(|| thread.wait_for_rest());
            until("awaited", || thread.shared.lock().waiting == 1);
            begin.send(()).unwrap();
            resting.join().unwrap();
        });
        assert_eq!((notified(), thread.shared.lock().waiting), (2, 0));
    }

    #[test]
    fn a_relay_that_looks_by_itself_is_not_woken_and_one_that_sleeps_is() {
        let wake = EventFd::from_flags(nix::sys::eventfd::EfdFlags::EFD_NONBLOCK).unwrap();
        let wake = Arc::new(wake);
        let alarm = Alarm::new(&wake);
        let raises = Arc::clone(&alarm);
        let thread = IoThread::start("test".into(), |_: &mut u32| Ok(()), move || raises.raise()).unwrap();
        let done = |n: u32| {
            thread.give(n);
            until("done", || alarm.raised.load(Ordering::SeqCst));
        };
        // As long as it has not said that it looks.
        done(0);
        until("woken", || wake.read().is_ok());
        alarm.is_awake();
        for n in 1..100 {
            alarm.looks();
            assert_eq!(thread.take().unwrap().0, n - 1);
            done(n);
        }
        assert!(wake.read().is_err(), "it was awake");
        assert!(alarm.sleeps(), "one is done that it has not taken");
        alarm.looks();
        assert_eq!(thread.take().unwrap().0, 99);
        assert!(!alarm.sleeps());
        done(100);
        until("woken", || wake.read().is_ok());
    }

    #[test]
    fn an_ended_thread_gives_all_its_tasks_back_in_order() {
        let (thread, begin, told) = held_back();
        (0..4).for_each(|n| thread.give(n));
        begin.send(()).unwrap();
        told.recv().unwrap();
        // The second fails now, and the thread may begin no other once it is to end.
        drop(begin);
        assert_eq!(thread.finish(), [0, 1, 2, 3]);
    }

    #[test]
    fn an_idle_thread_ends_when_it_is_dropped() {
        drop(IoThread::start("test".into(), |_: &mut u32| Ok(()), || {}).unwrap());
    }
}
