//! While the dispatcher is busy with one command for long, a thread tells the bridge that we are there.
//! Before it sleeps with the dispatcher, it gives memory of the connections back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use protocol::link::frame;

use super::client::{Say, TcpClient};
use crate::endpoint::stream::put;
use crate::framing::ALIVE_EVERY;

/// When the keep-alive thread is needed. See [`TcpClient::keep_alive`].
#[derive(Default)]
pub(super) struct KeepAlive {
    /// Whether the session is over.
    over: Mutex<bool>,
    changed: Condvar,
    /// Raised when the dispatcher has something to do, lowered when it goes to sleep.
    busy: AtomicBool,
    /// How often the dispatcher has woken.
    wakes: AtomicU64,
    /// The keep-alive thread sleeps until the dispatcher is busy.
    parked: AtomicBool,
}

impl KeepAlive {
    /// For a dispatcher that is busy, as every one is at first.
    pub(super) fn new() -> KeepAlive {
        KeepAlive { busy: AtomicBool::new(true), ..KeepAlive::default() }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.over.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The dispatcher is about to sleep.
    pub(super) fn rest(&self) {
        self.busy.store(false, Ordering::SeqCst);
    }

    /// The dispatcher has woken.
    pub(super) fn wake(&self) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        self.busy.store(true, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) {
            // Through the lock, so that the keep-alive thread is not between its look and its sleep.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    pub(super) fn end(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    /// Waits until it may be time to tell the bridge that we are there. False: the session is over. Calls
    /// `rest` if the dispatcher has not woken since the last time.
    pub(super) fn wait(&self, seen: &mut u64, rest: impl FnOnce()) -> bool {
        if *seen == self.wakes.load(Ordering::Relaxed) {
            rest();
        }
        let mut over = self.lock();
        let wakes = self.wakes.load(Ordering::Relaxed);
        if *seen == wakes {
            // A second in which the dispatcher did not wake: it sleeps, or it is busy with one command.
            self.parked.store(true, Ordering::SeqCst);
            while !*over && !self.busy.load(Ordering::SeqCst) {
                over = self.changed.wait(over).unwrap_or_else(|e| e.into_inner());
            }
            self.parked.store(false, Ordering::SeqCst);
        }
        *seen = wakes;
        if !*over {
            over = self.changed.wait_timeout(over, ALIVE_EVERY).unwrap_or_else(|e| e.into_inner()).0;
        }
        !*over
    }
}

impl TcpClient {
    /// The keep-alive thread: answers for a dispatcher that is busy with one command for long, and may be
    /// asked meanwhile.
    pub(super) fn keep_alive(&self) {
        let mut seen = 0;
        while self.keep_alive.wait(&mut seen, || self.link.rest()) {
            if self.keep_alive.busy.load(Ordering::SeqCst) {
                self.say(Say::Filled, |sending| {
                    if sending.last.elapsed() >= ALIVE_EVERY {
                        put(sending.buffer.end(), frame::ALIVE, &[]);
                    }
                });
            }
        }
    }
}
