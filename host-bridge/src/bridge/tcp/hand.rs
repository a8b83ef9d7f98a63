//! A thread that moves long pieces of data for the relay, one at a time.
//!
//! One thread moves about 4 GB/s through a socket, because the kernel copies. So where there are processors to spare, each data connection has one of these for either
//! direction: the relay says what goes where, as it would for itself, and the hand does nothing but the system calls. Short pieces stay with the relay, whom no other
//! thread has to wake.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a hand looks for its next task before it sleeps: the pieces of one transfer come one soon after the other.
const LINGER: Duration = Duration::from_micros(50);

const IDLE: u8 = 0;
const GIVEN: u8 = 1;
const DONE: u8 = 2;
const OVER: u8 = 3;

struct Shared<T> {
    /// Written under the lock of `task`.
    phase: AtomicU8,
    task: Mutex<Option<(T, io::Result<()>)>>,
    came: Condvar,
}

/// See the module's text.
pub(super) struct Hand<T> {
    shared: Arc<Shared<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T> std::fmt::Debug for Hand<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hand(phase {})", self.shared.phase.load(Ordering::Relaxed))
    }
}

impl<T: Send + 'static> Hand<T> {
    /// Starts the thread. It does `work` with each task and then calls `tell`.
    pub(super) fn start(
        name: String,
        work: impl Fn(&mut T) -> io::Result<()> + Send + 'static,
        tell: impl Fn() + Send + 'static,
    ) -> io::Result<Hand<T>> {
        let shared =
            Arc::new(Shared { phase: AtomicU8::new(IDLE), task: Mutex::new(None), came: Condvar::new() });
        let run = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            while run.wait() {
                let mut task = run.task.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((task, result)) = task.as_mut() {
                    *result = work(task);
                }
                // A wish to end that came meanwhile stays.
                let _ = run.phase.compare_exchange(GIVEN, DONE, Ordering::AcqRel, Ordering::Acquire);
                drop(task);
                tell();
            }
        })?;
        Ok(Hand { shared, thread: Some(thread) })
    }

    /// Whether it has a task, or has one that was not taken back.
    pub(super) fn is_busy(&self) -> bool {
        self.shared.phase.load(Ordering::Acquire) != IDLE
    }

    /// Gives it a task. It must not be busy.
    pub(super) fn give(&self, task: T) {
        let mut place = self.shared.task.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Some((task, Ok(())));
        self.shared.phase.store(GIVEN, Ordering::Release);
        drop(place);
        self.shared.came.notify_one();
    }

    /// Takes a task back that is done, with how it went. `None`: there is none. Never waits.
    pub(super) fn take(&self) -> Option<(T, io::Result<()>)> {
        if self.shared.phase.load(Ordering::Acquire) != DONE {
            return None;
        }
        let mut place = self.shared.task.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.phase.store(IDLE, Ordering::Release);
        place.take()
    }
}

impl<T> Shared<T> {
    /// Waits for a task. False: there will be no more.
    fn wait(&self) -> bool {
        let begin = Instant::now();
        loop {
            match self.phase.load(Ordering::Acquire) {
                GIVEN => return true,
                OVER => return false,
                _ if begin.elapsed() < LINGER => std::hint::spin_loop(),
                _ => break,
            }
        }
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.phase.load(Ordering::Acquire) {
                GIVEN => return true,
                OVER => return false,
                _ => task = self.came.wait(task).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl<T> Drop for Hand<T> {
    /// Waits for the thread: whoever drops a hand has closed the connection that it is at.
    fn drop(&mut self) {
        self.shared.phase.store(OVER, Ordering::Release);
        // Through the lock, so that the thread is not between its look and its sleep. (It holds the lock while it works.)
        drop(self.shared.task.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.came.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn tasks_come_back_done_in_turn() {
        let (tell, told) = channel();
        let work = |n: &mut u32| {
            *n += 1;
            if *n == 3 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
        };
        let hand = Hand::start("hand".into(), work, move || {
            let _ = tell.send(());
        })
        .unwrap();
        for n in 0..100u32 {
            assert!(!hand.is_busy() && hand.take().is_none());
            hand.give(n);
            told.recv().unwrap();
            let (back, result) = hand.take().unwrap();
            assert_eq!((back, result.is_err()), (n + 1, n == 2));
        }
    }

    #[test]
    fn an_idle_hand_ends_when_it_is_dropped() {
        drop(Hand::start("hand".into(), |_: &mut u32| Ok(()), || {}).unwrap());
    }
}
