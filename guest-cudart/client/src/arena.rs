//! Allocates staging memory in the channel's arena, for pageable memory on its way to or from the host.
//!
//! A block that the host reads becomes free when [`released`](protocol::channel::Progress::released) has
//! passed the command that named it. A block that the host writes becomes free when its owner drops it. A
//! thread that finds the arena full waits for the first of these. `released` does not advance while any
//! stream is blocked with data still to be read, so a block is also free when the stream that reads it is
//! known to have passed the command ([`Owner`]). A copy on a running stream therefore never waits for a
//! blocked stream. For the same reason, one stream's blocks never fill the whole arena.
//!
//! To avoid deadlock, a thread must not wait here while it holds blocks that only it can free. Use
//! [`Arena::try_alloc`] for further blocks.

use std::sync::Mutex;

use crate::counters::{COUNTERS, add};
use crate::lock;
use crate::ranges::FreeRanges;
use crate::session::Session;
use protocol::Status;
use protocol::data::{HostRange, Place};

/// Alignment of blocks in bytes: a cache line.
const ALIGN: u64 = 64;

/// The arena's allocator.
#[derive(Debug)]
pub struct Arena {
    base: usize,
    size: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: FreeRanges,
    /// Blocks that the host has not read yet.
    pending: Vec<Pending>,
}

/// A block that the host has not read yet.
#[derive(Debug)]
struct Pending {
    /// The command that makes the host read the block.
    seq: u64,
    /// The ID of the stream that owns it.
    owner: u64,
    offset: u64,
    len: u64,
}

/// The stream that reads blocks of the arena.
pub trait Owner {
    /// An ID that no other stream of this process ever has.
    fn id(&self) -> u64;

    /// Asks the host to report when the stream has completed everything enqueued so far.
    fn mark(&self) -> Result<(), Status>;

    /// Whether the stream is known to have passed a command.
    fn has_passed(&self, seq: u64) -> bool;
}

/// A block of the arena, freed when dropped.
#[derive(Debug)]
pub struct Block<'s> {
    arena: &'s Arena,
    offset: u64,
    len: u64,
}

impl Arena {
    /// An arena of `size` bytes at `base`.
    pub fn new(base: *mut u8, size: usize) -> Arena {
        let mut free = FreeRanges::new();
        let size = size as u64 / ALIGN * ALIGN;
        free.insert(0, size);
        Arena { base: base as usize, size, state: Mutex::new(State { free, pending: Vec::new() }) }
    }

    /// The largest block in bytes: a quarter of the arena, so that several transfers can be in progress.
    pub fn largest(&self) -> usize {
        (self.size / 4 / ALIGN * ALIGN) as usize
    }

    /// Allocates a block of `len` bytes if there is room now. `released` is the channel's current value.
    pub fn try_alloc(&self, len: usize, released: u64) -> Option<Block<'_>> {
        self.try_alloc_for(len, released, None)
    }

    fn try_alloc_for(&self, len: usize, released: u64, owner: Option<&dyn Owner>) -> Option<Block<'_>> {
        let len = (len.max(1) as u64).next_multiple_of(ALIGN);
        let mut state = lock(&self.state);
        let State { free, pending } = &mut *state;
        // Reclaim released blocks first: recently used memory is mapped and may still be cached.
        let done = |block: &Pending| {
            block.seq <= released
                || owner.is_some_and(|owner| owner.id() == block.owner && owner.has_passed(block.seq))
        };
        if pending.iter().any(done) {
            pending.retain(|block| {
                let done = done(block);
                if done {
                    free.insert(block.offset, block.len);
                }
                !done
            });
        }
        if let Some(owner) = owner {
            let mine = pending.iter().filter(|block| block.owner == owner.id());
            if mine.map(|block| block.len).sum::<u64>() + len > self.size / 4 * 3 {
                return None;
            }
        }
        let offset = free.take_best(len)?;
        Some(Block { arena: self, offset, len })
    }

    /// Allocates a block of `len` bytes (at most [`largest`](Self::largest)), waiting until there is room.
    pub fn alloc<'s>(&'s self, session: &Session, len: usize) -> Result<Block<'s>, Status> {
        self.alloc_with(session, len, None)
    }

    /// Like [`alloc`](Self::alloc), for a block that a stream will read.
    pub fn alloc_for<'s>(
        &'s self,
        session: &Session,
        len: usize,
        owner: &dyn Owner,
    ) -> Result<Block<'s>, Status> {
        self.alloc_with(session, len, Some(owner))
    }

    fn alloc_with<'s>(
        &'s self,
        session: &Session,
        len: usize,
        owner: Option<&dyn Owner>,
    ) -> Result<Block<'s>, Status> {
        if len > self.largest() {
            return Err(Status::OUT_OF_MEMORY);
        }
        let progress = session.progress();
        if let Some(block) = self.try_alloc_for(len, progress.released(), owner) {
            return Ok(block);
        }
        add(&COUNTERS.arena_full, 1);
        if let Some(owner) = owner {
            owner.mark()?;
        }
        let mut block = None;
        session.wait_progress(|| {
            block = self.try_alloc_for(len, progress.released(), owner);
            block.is_some()
        })?;
        block.ok_or(Status::UNKNOWN)
    }
}

impl Block<'_> {
    /// The block's first byte.
    pub fn ptr(&self) -> *mut u8 {
        (self.arena.base + self.offset as usize) as *mut u8
    }

    /// The first `len` bytes of the block, as commands name them.
    pub fn range(&self, len: usize) -> HostRange {
        HostRange { place: Place::Arena, offset: self.offset, len: (len as u64).min(self.len) }
    }

    /// Frees the block once the host has read the data of command `seq` on the stream with the given
    /// [`Owner::id`].
    pub fn release_after(self, seq: u64, owner: u64) {
        let block = Pending { seq, owner, offset: self.offset, len: self.len };
        lock(&self.arena.state).pending.push(block);
        std::mem::forget(self);
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        lock(&self.arena.state).free.insert(self.offset, self.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_block_is_freed_when_its_command_is_released() {
        let arena = Arena::new(std::ptr::null_mut(), 4096);
        arena.try_alloc(4096, 0).unwrap().release_after(7, 0);
        assert!(arena.try_alloc(1, 6).is_none());
        assert!(arena.try_alloc(4096, 7).is_some());
        assert!(arena.try_alloc(4096, 0).is_some(), "a dropped block is free at once");
    }

    struct Stream(u64, u64);

    impl Owner for Stream {
        fn id(&self) -> u64 {
            self.0
        }
        fn mark(&self) -> Result<(), Status> {
            Ok(())
        }
        fn has_passed(&self, seq: u64) -> bool {
            seq <= self.1
        }
    }

    #[test]
    fn a_running_stream_does_not_wait_for_others_and_none_takes_the_whole_arena() {
        let arena = Arena::new(std::ptr::null_mut(), 4096);
        let alloc = |len, stream: Stream| arena.try_alloc_for(len, 0, Some(&stream));
        alloc(2048, Stream(1, 0)).unwrap().release_after(1, 1);
        alloc(1024, Stream(1, 0)).unwrap().release_after(2, 1);
        assert!(alloc(64, Stream(1, 0)).is_none(), "three quarters are one stream's");
        alloc(1024, Stream(2, 0)).unwrap().release_after(3, 2);
        assert!(alloc(64, Stream(2, 2)).is_none());
        alloc(1024, Stream(2, 3)).unwrap().release_after(4, 2);
        // The progress of another stream says nothing about this one's blocks.
        assert!(alloc(2048, Stream(2, 4)).is_none());
        assert!(alloc(2048, Stream(1, 1)).is_some());
    }

    #[test]
    fn released_memory_is_reused_before_unused_memory() {
        let arena = Arena::new(std::ptr::null_mut(), 1 << 20);
        for seq in 1..1000 {
            let block = arena.try_alloc(4096, seq - 1).unwrap();
            assert_eq!(block.offset, 0);
            block.release_after(seq, 0);
        }
    }

    proptest! {
        #[test]
        fn blocks_do_not_overlap(lens in proptest::collection::vec((1usize..900, any::<bool>()), 1..60)) {
            let arena = Arena::new(std::ptr::null_mut(), 8192);
            let mut held: Vec<Block<'_>> = Vec::new();
            for (seq, (len, keep)) in lens.into_iter().enumerate() {
                if let Some(block) = arena.try_alloc(len, seq as u64 / 2) {
                    prop_assert!(block.len >= len as u64 && block.offset + block.len <= 8192);
                    prop_assert!(held.iter().all(|b| b.offset + b.len <= block.offset || block.offset + block.len <= b.offset));
                    if keep { held.push(block) } else { block.release_after(seq as u64, 0) }
                }
            }
            held.clear();
            prop_assert!(arena.try_alloc(8192, u64::MAX).is_some());
        }
    }
}
