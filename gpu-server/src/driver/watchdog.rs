//! Finds kernels that run too long.
//!
//! ```text
//!   stream:  … ─ fence ─ kernel ─ fence ─ …
//!                  │                │
//!                begins            ends
//!
//!   more than the limit between the two: the thread calls its callback, once
//! ```
//!
//! A kernel that waits for its turn in its stream, for an event or for data is not running: the first fence
//! comes after all of these.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use protocol::Status;
use protocol::handle::ContextId;

/// The running kernels.
#[derive(Default)]
struct Running {
    /// When each running kernel began, and its context, in this order.
    since: BTreeMap<u64, (Instant, ContextId)>,
    begun: u64,
    /// The thread sleeps until a kernel begins.
    rests: bool,
}

/// See the module's documentation.
pub struct Watchdog {
    running: Mutex<Running>,
    begins: Condvar,
}

impl Watchdog {
    /// Starts the thread. It calls `overrun` with the context of the first kernel that runs longer than
    /// `limit`, and ends.
    pub fn start(
        limit: Duration,
        overrun: impl FnOnce(ContextId) + Send + 'static,
    ) -> std::io::Result<Arc<Watchdog>> {
        let watchdog = Arc::new(Watchdog { running: Mutex::default(), begins: Condvar::new() });
        let watches = Arc::clone(&watchdog);
        std::thread::Builder::new()
            .name("rgpu-watchdog".into())
            .spawn(move || overrun(watches.wait_for_overrun(limit)))?;
        Ok(watchdog)
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn wait_for_overrun(&self, limit: Duration) -> ContextId {
        let mut running = self.lock();
        loop {
            let Some((since, context)) = running.since.values().next().copied() else {
                running.rests = true;
                running = self.begins.wait(running).unwrap_or_else(|e| e.into_inner());
                continue;
            };
            let left = limit.saturating_sub(since.elapsed());
            if left.is_zero() {
                return context;
            }
            running.rests = false;
            drop(running);
            // The first one may end meanwhile; none that begins later can exceed the limit before this.
            std::thread::sleep(left);
            running = self.lock();
        }
    }

    /// A kernel is about to be launched in a context.
    pub fn watch(self: &Arc<Watchdog>, context: ContextId) -> Arc<Watch> {
        Arc::new(Watch { watchdog: Arc::clone(self), context, number: Mutex::new(None) })
    }
}

/// One kernel. Dropping this means that the kernel has ended, or never ran.
pub struct Watch {
    watchdog: Arc<Watchdog>,
    context: ContextId,
    /// Its number among the running kernels, while it runs.
    number: Mutex<Option<u64>>,
}

impl Watch {
    /// Everything before the kernel has finished, unless that has failed.
    pub fn begin(&self, status: Status) {
        self.begin_at(status, Instant::now);
    }

    /// The same, with a clock that is read in the order in which kernels begin.
    fn begin_at(&self, status: Status, now: impl FnOnce() -> Instant) {
        if !status.is_success() {
            return;
        }
        let mut running = self.watchdog.lock();
        running.begun += 1;
        let number = running.begun;
        running.since.insert(number, (now(), self.context));
        let rests = std::mem::take(&mut running.rests);
        *self.number.lock().unwrap_or_else(|e| e.into_inner()) = Some(number);
        drop(running);
        if rests {
            self.watchdog.begins.notify_one();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(number) = self.number.get_mut().unwrap_or_else(|e| e.into_inner()) {
            self.watchdog.lock().since.remove(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    const LONG: Duration = Duration::from_secs(240);
    const LIMIT: Duration = Duration::from_millis(50);

    fn start() -> (Arc<Watchdog>, Receiver<ContextId>) {
        let (found, overrun) = channel();
        (Watchdog::start(LIMIT, move |context| found.send(context).unwrap()).unwrap(), overrun)
    }

    /// A kernel that has not run for the limit when it ends, however busy this machine is: its clock is
    /// ahead.
    fn ends_in_time(watchdog: &Arc<Watchdog>, context: u32) {
        watchdog.watch(ContextId(context)).begin_at(Status::SUCCESS, || Instant::now() + LONG);
    }

    #[test]
    fn only_a_kernel_that_runs_too_long_is_reported() {
        let (watchdog, overrun) = start();
        let _waits = watchdog.watch(ContextId(1));
        let failed = watchdog.watch(ContextId(2));
        failed.begin(Status(700));
        (0..1000).for_each(|_| ends_in_time(&watchdog, 3));
        assert!(watchdog.lock().since.is_empty());
        let since = Instant::now();
        let endless = watchdog.watch(ContextId(4));
        endless.begin(Status::SUCCESS);
        assert_eq!(overrun.recv_timeout(LONG), Ok(ContextId(4)));
        assert!(since.elapsed() >= LIMIT);
    }

    #[test]
    fn a_kernel_that_ends_in_time_is_replaced_by_the_next() {
        let (watchdog, overrun) = start();
        ends_in_time(&watchdog, 1);
        let until = Instant::now() + LONG;
        while !watchdog.lock().rests {
            assert!(Instant::now() < until, "the thread does not rest");
            std::thread::sleep(Duration::from_millis(1));
        }
        let second = watchdog.watch(ContextId(2));
        second.begin(Status::SUCCESS);
        assert_eq!(overrun.recv_timeout(LONG), Ok(ContextId(2)));
    }
}
