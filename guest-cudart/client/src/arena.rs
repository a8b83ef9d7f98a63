//! Room in the channel's arena: staging for pageable memory on its way to or from the host.
//!
//! A block that the host reads is free again when [`released`](protocol::channel::Progress::released) has passed the command that
//! named it; one that the host writes, when its owner lets go of it. Whoever finds the arena full waits for the first of these.
//!
//! No thread may wait here while it holds blocks that only it can free (use [`Arena::try_alloc`] for the second and further ones):
//! that is what keeps threads from waiting for each other.

use std::sync::Mutex;

use crate::counters::{COUNTERS, add};
use crate::lock;
use crate::ranges::FreeRanges;
use crate::session::Session;
use protocol::Status;
use protocol::data::{HostRange, Place};

/// Blocks begin and end at multiples of this, a cache line.
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
    /// Blocks that the host has yet to read: the command's `seq`, offset, length.
    pending: Vec<(u64, u64, u64)>,
}

/// A block of the arena, free again when dropped.
#[derive(Debug)]
pub struct Block<'s> {
    arena: &'s Arena,
    offset: u64,
    len: u64,
}

impl Arena {
    /// The arena at `base`, of `size` bytes.
    pub fn new(base: *mut u8, size: usize) -> Arena {
        let mut free = FreeRanges::new();
        let size = size as u64 / ALIGN * ALIGN;
        free.insert(0, size);
        Arena { base: base as usize, size, state: Mutex::new(State { free, pending: Vec::new() }) }
    }

    /// Bytes of the largest block that is given out: a quarter of the arena, so that several transfers can be under way.
    pub fn largest(&self) -> usize {
        (self.size / 4 / ALIGN * ALIGN) as usize
    }

    /// A block of `len` bytes, if there is room now. `released` is the channel's word.
    pub fn try_alloc(&self, len: usize, released: u64) -> Option<Block<'_>> {
        let len = (len.max(1) as u64).next_multiple_of(ALIGN);
        let mut state = lock(&self.state);
        let State { free, pending } = &mut *state;
        // Before fresh room is looked for: memory that was used a moment ago is mapped, and may still be in a cache.
        if pending.iter().any(|&(seq, ..)| seq <= released) {
            pending.retain(|&(seq, offset, len)| {
                if seq <= released {
                    free.insert(offset, len);
                }
                seq > released
            });
        }
        let offset = free.take_best(len)?;
        Some(Block { arena: self, offset, len })
    }

    /// A block of `len` bytes (at most [`largest`](Self::largest)); waits until there is room.
    pub fn alloc<'s>(&'s self, session: &Session, len: usize) -> Result<Block<'s>, Status> {
        if len > self.largest() {
            return Err(Status::OUT_OF_MEMORY);
        }
        let progress = session.progress();
        if let Some(block) = self.try_alloc(len, progress.released()) {
            return Ok(block);
        }
        add(&COUNTERS.arena_full, 1);
        let mut block = None;
        session.wait_progress(|| {
            block = self.try_alloc(len, progress.released());
            block.is_some()
        })?;
        block.ok_or(Status::UNKNOWN)
    }
}

impl Block<'_> {
    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        (self.arena.base + self.offset as usize) as *mut u8
    }

    /// The first `len` bytes of the block, as a command names them.
    pub fn range(&self, len: usize) -> HostRange {
        HostRange { place: Place::Arena, offset: self.offset, len: (len as u64).min(self.len) }
    }

    /// The block is free once the host has read what command `seq` names.
    pub fn release_after(self, seq: u64) {
        lock(&self.arena.state).pending.push((seq, self.offset, self.len));
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
    fn a_block_is_free_when_its_command_is_released() {
        let arena = Arena::new(std::ptr::null_mut(), 4096);
        arena.try_alloc(4096, 0).unwrap().release_after(7);
        assert!(arena.try_alloc(1, 6).is_none());
        assert!(arena.try_alloc(4096, 7).is_some());
        assert!(arena.try_alloc(4096, 0).is_some(), "a dropped block is free at once");
    }

    #[test]
    fn memory_that_was_released_is_used_again_before_fresh_memory() {
        let arena = Arena::new(std::ptr::null_mut(), 1 << 20);
        for seq in 1..1000 {
            let block = arena.try_alloc(4096, seq - 1).unwrap();
            assert_eq!(block.offset, 0);
            block.release_after(seq);
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
                    if keep { held.push(block) } else { block.release_after(seq as u64) }
                }
            }
            held.clear();
            prop_assert!(arena.try_alloc(8192, u64::MAX).is_some());
        }
    }
}
