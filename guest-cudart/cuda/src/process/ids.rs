//! Numbers: those that no object of the process had before, and those that the server's objects share one after the other.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use client::channel::{MAX_CONTEXTS, MAX_DEVICES, MAX_STREAMS};
use client::lock;

/// The number of free numbers that are left alone. While a stream waits for the program, the server also keeps what is destroyed behind the wait, and what has the same number next: so the number that
/// has been free for the longest is used again, and none at once.
const RESTING: usize = 256;

/// Numbers of one kind of object. A number is used again some time after its object is gone.
pub(crate) struct Ids {
    free: Mutex<VecDeque<u32>>,
    fresh: AtomicU32,
    end: u32,
}

/// Contexts that were made; the first numbers are those of the devices' primary contexts.
pub(crate) static CONTEXTS: Ids = Ids::new(MAX_DEVICES, MAX_CONTEXTS);
/// Streams; the first numbers are those of the contexts' legacy default streams.
pub(crate) static STREAMS: Ids = Ids::new(MAX_CONTEXTS, MAX_STREAMS);
/// Events.
pub(crate) static EVENTS: Ids = Ids::new(0, u32::MAX);

impl Ids {
    const fn new(first: u32, end: u32) -> Ids {
        Ids { free: Mutex::new(VecDeque::new()), fresh: AtomicU32::new(first), end }
    }

    /// A number that no object has; `None`: all of them are in use.
    pub fn take(&self) -> Option<u32> {
        let mut free = lock(&self.free);
        if free.len() <= RESTING {
            let next = |id| (id < self.end).then_some(id + 1);
            if let Ok(fresh) = self.fresh.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
                return Some(fresh);
            }
        }
        free.pop_front()
    }

    /// Gives back the number of an object that the server has no more.
    pub fn give_back(&self, id: u32) {
        lock(&self.free).push_back(id);
    }
}

/// A number that this process has not given out before, from 1.
pub(crate) fn unique_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
