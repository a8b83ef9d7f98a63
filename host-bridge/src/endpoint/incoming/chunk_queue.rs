//! A command's data as a queue of chunks on the heap, for readers that have no room of their own.

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use protocol::link::MAX_DATA;

use super::{Grants, Incoming, Landing};
use crate::endpoint::end::Lost;

impl Incoming {
    /// Lets the bytes come as a queue of chunks on the heap, about `bound` bytes at a time.
    pub fn into_queue(self, bound: usize) -> ChunkQueue {
        let (len, late, bound) = (self.len, self.late, bound.max(1) as u64);
        let shared = Arc::new(Queue { state: Mutex::default(), changed: Condvar::new() });
        let grants = self.land(Arc::<Queue>::clone(&shared), bound);
        ChunkQueue { shared, grants, bound, taken: 0, granted: if late { 0 } else { bound }, left: len }
    }

    /// Waits for all the bytes. To be used for short data only: it takes its length in memory (which the
    /// caller has checked).
    pub fn collect(self) -> Result<Vec<u8>, Lost> {
        let mut all = vec![0; self.len as usize];
        let mut queue = self.into_queue(MAX_DATA as usize);
        while let Some(chunk) = queue.next_chunk()? {
            let at = chunk.offset as usize;
            all[at..at + chunk.bytes.len()].copy_from_slice(&chunk.bytes);
        }
        Ok(all)
    }
}

/// Some bytes of a command's data.
#[derive(Debug)]
pub struct Chunk {
    /// Where in the data they belong.
    pub offset: u64,
    /// The bytes.
    pub bytes: Box<[u8]>,
}

/// A command's data as chunks, in the order in which they come (not always that of their offsets).
#[derive(Debug)]
pub struct ChunkQueue {
    shared: Arc<Queue>,
    grants: Grants,
    /// Bytes that may lie here at a time.
    bound: u64,
    taken: u64,
    granted: u64,
    left: u64,
}

impl ChunkQueue {
    /// The next chunk; waits for it. `Ok(None)`: all bytes have come. For late data the first call says that
    /// the stream has come to it.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk>, Lost> {
        if self.left == 0 {
            return Ok(None);
        }
        // In steps, so that not every chunk costs the bridge a message.
        let now = self.taken + self.bound;
        if now >= self.granted + (self.bound / 4).max(1) {
            self.granted = now;
            self.grants.upto(now);
        }
        let mut state = self.shared.lock();
        loop {
            if let Some(chunk) = state.chunks.pop_front() {
                drop(state);
                let n = chunk.bytes.len() as u64;
                self.left = self.left.saturating_sub(n);
                self.taken += n;
                return Ok(Some(chunk));
            }
            if state.over {
                return Err(Lost::new("the session ended before the data came"));
            }
            state.waited_for = true;
            state = self.shared.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Whether no chunk lies here now.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.shared.lock().chunks.is_empty()
    }
}

impl Drop for ChunkQueue {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
        if self.left > 0 {
            self.grants.all();
        }
    }
}

#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    /// Room given out, by offset.
    filling: HashMap<u64, Box<[u8]>>,
    chunks: VecDeque<Chunk>,
    /// A thread waits for a chunk.
    waited_for: bool,
    over: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Landing for Queue {
    fn room(&self, offset: u64, len: usize) -> Option<(NonNull<u8>, usize)> {
        let mut state = self.lock();
        if state.over || state.filling.contains_key(&offset) {
            return None;
        }
        let mut bytes = vec![0u8; len].into_boxed_slice();
        // The box stays where it is on the heap until `landed` takes it out.
        let at = NonNull::new(bytes.as_mut_ptr());
        state.filling.insert(offset, bytes);
        at.map(|at| (at, len))
    }

    fn landed(&self, offset: u64, _len: usize) {
        let mut state = self.lock();
        if let Some(bytes) = state.filling.remove(&offset) {
            state.chunks.push_back(Chunk { offset, bytes });
        }
        let wake = std::mem::take(&mut state.waited_for);
        drop(state);
        if wake {
            self.changed.notify_all();
        }
    }

    fn lost(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }
}
