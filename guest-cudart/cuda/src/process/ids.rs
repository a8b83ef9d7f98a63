//! Unique numbers, and the object IDs that this process assigns and reuses.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use client::channel::{MAX_CONTEXTS, MAX_DEVICES, MAX_STREAMS};
use client::lock;

/// How many free IDs are kept unused. While a stream waits for the program, the server may still hold objects
/// destroyed behind that wait and the objects that reuse their IDs. So the ID that has been free the longest
/// is reused first, and none at once.
const RESTING: usize = 256;

/// IDs of one kind of object. An ID is reused some time after its object is gone.
pub(crate) struct Ids {
    free: Mutex<VecDeque<u32>>,
    fresh: AtomicU32,
    end: u32,
}

/// Contexts made by the program; the first IDs belong to the devices' primary contexts.
pub(crate) static CONTEXTS: Ids = Ids::new(MAX_DEVICES, MAX_CONTEXTS);
/// Streams; the first IDs belong to the contexts' legacy default streams.
pub(crate) static STREAMS: Ids = Ids::new(MAX_CONTEXTS, MAX_STREAMS);
/// Events.
pub(crate) static EVENTS: Ids = Ids::new(0, u32::MAX);

impl Ids {
    const fn new(first: u32, end: u32) -> Ids {
        Ids { free: Mutex::new(VecDeque::new()), fresh: AtomicU32::new(first), end }
    }

    /// Takes an unused ID. `None`: all are in use.
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

    /// Returns an ID whose object no longer exists on the server.
    pub fn give_back(&self, id: u32) {
        lock(&self.free).push_back(id);
    }
}

/// IDs of streams and events that the server destroys together with their context. Until it has, another
/// thread's new object must not get one of them.
#[derive(Default)]
pub(crate) struct WithContext {
    pub streams: Vec<u32>,
    pub events: Vec<u32>,
}

impl WithContext {
    /// Returns them. The server has destroyed the objects.
    pub fn give_back(self) {
        self.streams.into_iter().for_each(|id| STREAMS.give_back(id));
        self.events.into_iter().for_each(|id| EVENTS.give_back(id));
    }
}

/// A number that this process hasn't used before, starting at 1.
pub(crate) fn unique_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
