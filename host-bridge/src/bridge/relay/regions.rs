//! The client's memory as records name it: the arena and the regions, ranges of them in use, and regions that
//! leave.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::Arc;

use protocol::data::{HostRange, Place};

use super::end::EndReason;
use super::mailbox::Done;
use crate::bridge::error::RegionError;

/// Memory of the client as a transport uses it: the arena, or a registered region. Dropping the last
/// reference ends the transport's access to it.
pub(in crate::bridge) trait ClientMemory: Debug + Send + Sync + 'static {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Whether the server must not write it.
    fn is_read_only(&self) -> bool;

    /// The server may write these bytes by itself until [`release`](Self::release) was called as often as
    /// this. Gives the key for it, unless it needs none or has it. After an error they are not admitted:
    /// [`EndReason::Gone`] says that they can be once there is a link.
    fn admit(&self, _offset: u64, _len: u64) -> Result<Option<MemoryKey>, EndReason> {
        Ok(None)
    }

    /// See [`admit`](Self::admit). Once this returns, the server writes the bytes no more, unless others are
    /// still admitted.
    fn release(&self) {}

    /// The key that the server was given last. `None`: it has none that is good for anything.
    fn key(&self) -> Option<MemoryKey> {
        None
    }
}

/// What a server needs to write memory of the client by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bridge) struct MemoryKey {
    pub(in crate::bridge) address: u64,
    pub(in crate::bridge) size: u64,
    pub(in crate::bridge) key: u32,
}

/// A checked range of the client's memory. It keeps the memory usable.
#[derive(Debug)]
pub(in crate::bridge) struct Span<M> {
    memory: Arc<M>,
    offset: u64,
    len: u64,
}

impl<M> Clone for Span<M> {
    fn clone(&self) -> Span<M> {
        Span { memory: Arc::clone(&self.memory), offset: self.offset, len: self.len }
    }
}

impl<M> Span<M> {
    #[cfg(test)]
    pub(super) fn of(memory: Arc<M>, offset: u64, len: u64) -> Span<M> {
        Span { memory, offset, len }
    }

    pub(in crate::bridge) fn memory(&self) -> &M {
        &self.memory
    }

    /// Offset of the first byte in [`memory`](Self::memory).
    pub(in crate::bridge) fn offset(&self) -> u64 {
        self.offset
    }

    pub(in crate::bridge) fn len(&self) -> u64 {
        self.len
    }

    /// `len` bytes from `at` of this span. `None` when they do not lie inside.
    pub(in crate::bridge) fn part(&self, at: u64, len: u64) -> Option<Span<M>> {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| Span { memory: Arc::clone(&self.memory), offset: self.offset + at, len })
    }
}

/// A range that the server is to fill. It may do so until this is dropped.
#[derive(Debug)]
pub(super) struct Awaited<M: ClientMemory> {
    span: Span<M>,
}

impl<M: ClientMemory> Awaited<M> {
    /// Lets the server fill the range. Gives the key that it needs for that, if it has to be told.
    pub(super) fn new(span: Span<M>) -> Result<(Awaited<M>, Option<MemoryKey>), EndReason> {
        let key = span.memory.admit(span.offset, span.len)?;
        Ok((Awaited { span }, key))
    }

    pub(super) fn span(&self) -> &Span<M> {
        &self.span
    }
}

impl<M: ClientMemory> Drop for Awaited<M> {
    fn drop(&mut self) {
        self.span.memory.release();
    }
}

/// A region that leaves once the records before the request are taken.
#[derive(Debug)]
struct Leaving {
    id: u32,
    /// Bytes taken off the ring when the request came.
    at: u64,
    done: Done,
}

/// The memory that records may name. The number of references to a region says whether data is under way in
/// it.
#[derive(Debug)]
pub(super) struct Regions<M> {
    arena: Option<Arc<M>>,
    known: HashMap<u32, Arc<M>>,
    leaving: VecDeque<Leaving>,
    /// Unregistered, but with data still under way in them.
    draining: Vec<(Arc<M>, Done)>,
}

impl<M: ClientMemory> Regions<M> {
    pub(super) fn new(arena: Option<Arc<M>>) -> Regions<M> {
        Regions { arena, known: HashMap::new(), leaving: VecDeque::new(), draining: Vec::new() }
    }

    /// A region that was registered with another process.
    pub(super) fn restore(&mut self, id: u32, region: M) {
        self.known.insert(id, Arc::new(region));
    }

    /// A region's memory, or the arena's.
    pub(super) fn memory(&self, place: Place) -> Option<&Arc<M>> {
        match place {
            Place::Arena => self.arena.as_ref(),
            Place::Region(id) => self.known.get(&id),
        }
    }

    pub(super) fn register(&mut self, id: u32, region: M, done: Done) {
        self.known.insert(id, Arc::new(region));
        // The caller may have given up waiting.
        let _ = done.send(Ok(()));
    }

    /// Unregisters a region once the records are taken that stand in the ring now, when `taken` bytes have
    /// been taken off it.
    pub(super) fn unregister(&mut self, id: u32, taken: u64, done: Done) {
        self.leaving.push_back(Leaving { id, at: taken, done });
    }

    /// Checks a range that a record names. The error says what is wrong with it.
    pub(super) fn span(&self, range: HostRange, write: bool) -> Result<Span<M>, &'static str> {
        let HostRange { place, offset, len } = range;
        let (missing, outside) = match place {
            Place::Arena => ("names an arena that the channel does not have", "lies outside the arena"),
            Place::Region(_) => ("names a region that is not registered", "lies outside its region"),
        };
        let memory = self.memory(place).ok_or(missing)?;
        if write && memory.is_read_only() {
            return Err("would write a region that is registered for reading only");
        }
        let inside = offset.checked_add(len).is_some_and(|end| end <= memory.size());
        inside.then(|| Span { memory: Arc::clone(memory), offset, len }).ok_or(outside)
    }

    /// Drops unregistered regions once no data is under way in them, and answers their callers. `has_work`:
    /// the ring of `size` bytes is not empty; `taken`: bytes taken off it so far.
    pub(super) fn release(&mut self, has_work: impl Fn() -> bool, taken: u64, size: u64) {
        // Records that stood in the ring at the request have been taken once the ring was empty, or once as
        // many bytes as it holds went by.
        while let Some(front) = self.leaving.front() {
            if has_work() && taken - front.at < size {
                break;
            }
            let Some(Leaving { id, done, .. }) = self.leaving.pop_front() else { break };
            match self.known.remove(&id) {
                Some(region) => self.draining.push((region, done)),
                None => drop(done.send(Err(RegionError::Unknown(id)))),
            }
        }
        // The count is exact: only the relay clones references, and those of its worker threads were moved to
        // them.
        for (region, done) in self.draining.extract_if(.., |(region, _)| Arc::strong_count(region) == 1) {
            // The region goes before the answer does, and a registration with it: from then on the memory is
            // the client's alone.
            drop(region);
            let _ = done.send(Ok(()));
        }
    }
}
