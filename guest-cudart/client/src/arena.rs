//! Allocates staging memory in the channel's arena, for pageable memory on its way to or from the host.
//!
//! A block that the host reads becomes free when [`released`](protocol::channel::Progress::released) has
//! passed the command that named it. A block that the host writes becomes free when its owner drops it. A
//! thread that finds the arena full waits for the first of these. `released` does not advance while any
//! stream is blocked with data still to be read, so a block is also free when the stream that reads it is
//! known to have passed the command ([`Owner`]). A copy on a running stream therefore never waits for a
//! blocked stream. For the same reason, one stream's blocks never fill the whole arena.
//!
//! Over a long distance, a block is in use for at least a round trip, so the arena's size limits how much
//! data is in flight. When a copy has waited for room and the blocks are released in little more than a round
//! trip, the link could carry more. Then the arena [grows](Arena::grow) by a piece of pinned memory. If
//! blocks take longer, the link is full, or a stream is blocked. The pieces are freed when they were unused
//! for [`IDLE`].
//!
//! To avoid deadlock, a thread must not wait here while it holds blocks that only it can free. Use
//! [`Arena::try_alloc`] for further blocks.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::counters::{COUNTERS, add};
use crate::port::Pinned;
use crate::ranges::FreeRanges;
use crate::seq::Seq;
use crate::session::{self, Session};
use crate::{lock, log};
use protocol::Status;
use protocol::data::{HostRange, Place};

/// Alignment of blocks in bytes: a cache line.
const ALIGN: u64 = 64;

/// Bytes by which the arena grows.
const PIECE: usize = 32 << 20;
/// If blocks are in use for longer than this many round trips, the distance is not the only reason for
/// waiting.
const ROUND_TRIPS: u32 = 3;
/// Pieces that were unused for this long are freed.
const IDLE: Duration = Duration::from_secs(10);

/// The arena's allocator.
#[derive(Debug)]
pub struct Arena {
    /// Size of the channel's part.
    size: u64,
    /// Size up to which it grows.
    most: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The channel's part, followed by the pieces.
    parts: Vec<Part>,
    /// Blocks that the host has not read yet.
    pending: Vec<Pending>,
    /// How long the block that was released last had been in use.
    in_use_for: Option<Duration>,
    /// Set while a thread adds a piece, and once there is no memory for another.
    growing: bool,
    /// Whether a piece was used since the last check.
    used: bool,
}

#[derive(Debug)]
struct Part {
    base: usize,
    size: u64,
    place: Place,
    free: FreeRanges,
    /// Of a piece.
    memory: Option<Pinned>,
}

/// A block that the host has not read yet.
#[derive(Debug)]
struct Pending {
    /// The command that makes the host read the block.
    seq: Seq,
    /// The ID of the stream that owns it.
    owner: u64,
    since: Instant,
    part: usize,
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
    fn has_passed(&self, seq: Seq) -> bool;
}

/// A block of the arena, freed when dropped.
#[derive(Debug)]
pub struct Block<'s> {
    arena: &'s Arena,
    part: usize,
    place: Place,
    address: usize,
    offset: u64,
    len: u64,
}

impl Part {
    fn new(base: usize, size: u64, place: Place, memory: Option<Pinned>) -> Part {
        let mut free = FreeRanges::new();
        free.insert(0, size);
        Part { base, size, place, free, memory }
    }
}

impl State {
    fn size(&self) -> u64 {
        self.parts.iter().map(|part| part.size).sum()
    }

    fn free(&mut self, part: usize, offset: u64, len: u64) {
        // A part exists as long as one of its blocks.
        if let Some(part) = self.parts.get_mut(part) {
            part.free.insert(offset, len);
        }
    }
}

impl Arena {
    /// An arena of `size` bytes at `base`, which grows up to `most` bytes.
    pub fn new(base: *mut u8, size: usize, most: usize) -> Arena {
        let size = size as u64 / ALIGN * ALIGN;
        let parts = vec![Part::new(base as usize, size, Place::Arena, None)];
        let state = State { parts, pending: Vec::new(), in_use_for: None, growing: false, used: false };
        Arena { size, most: most as u64, state: Mutex::new(state) }
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
        // Reclaim released blocks first: recently used memory is mapped and may still be cached.
        let done = |block: &Pending| {
            block.seq.is_reached_at(released)
                || owner.is_some_and(|owner| owner.id() == block.owner && owner.has_passed(block.seq))
        };
        if state.pending.iter().any(done) {
            let (passed, pending): (Vec<_>, Vec<_>) =
                std::mem::take(&mut state.pending).into_iter().partition(done);
            state.pending = pending;
            state.in_use_for = passed.iter().map(|block| block.since.elapsed()).min();
            passed.iter().for_each(|block| state.free(block.part, block.offset, block.len));
        }
        if let Some(owner) = owner {
            let mine = state.pending.iter().filter(|block| block.owner == owner.id());
            if mine.map(|block| block.len).sum::<u64>() + len > state.size() / 4 * 3 {
                return None;
            }
        }
        let found = state.parts.iter_mut().enumerate().find_map(|(number, part)| {
            let offset = part.free.take_best(len)?;
            let address = part.base + offset as usize;
            Some(Block { arena: self, part: number, place: part.place, address, offset, len })
        });
        state.used |= found.as_ref().is_some_and(|block| block.part > 0);
        found
    }

    /// After a wait for room or for a block that was in use for `time`: adds a piece, if more of them would
    /// have made the wait shorter.
    pub fn grow(&self, session: &Session, time: Option<Duration>) {
        let in_time = time.is_some_and(|time| time <= session.round_trip() * ROUND_TRIPS);
        if !session.is_far() || !in_time {
            return;
        }
        let mut state = lock(&self.state);
        if state.growing || state.size() + PIECE as u64 > self.most {
            return;
        }
        state.growing = true;
        drop(state);
        let pinned = session.port().pin_new(PIECE, None);
        let mut state = lock(&self.state);
        match pinned {
            Ok(pinned) => {
                let (base, place) = (pinned.mapping.base() as usize, Place::Region(pinned.region));
                state.parts.push(Part::new(base, PIECE as u64, place, Some(pinned)));
                state.growing = false;
                let first = state.parts.len() == 2;
                drop(state);
                add(&COUNTERS.arena_pieces, 1);
                if first {
                    free_when_idle(session);
                }
            }
            // `growing` stays set, so no thread tries again.
            Err(error) => log::debug(format_args!("the staging memory cannot grow: {}", error.line())),
        }
    }

    /// Frees the unused pieces at the end, unless a piece was used since the last call. Returns whether any
    /// piece is left.
    fn free_unused(&self, session: &Session) -> bool {
        let mut state = lock(&self.state);
        let mut freed = Vec::new();
        if !std::mem::take(&mut state.used) {
            while let Some(part) = state.parts.pop_if(|p| p.memory.is_some() && p.free.total() == p.size) {
                freed.extend(part.memory);
            }
        }
        let left = state.parts.len() > 1;
        drop(state);
        for Pinned { region, mapping, .. } in freed {
            session.port().unpin(region);
            drop(mapping);
        }
        left
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
        let time = lock(&self.state).in_use_for;
        self.grow(session, time);
        block.ok_or(Status::UNKNOWN)
    }
}

/// Starts the thread that frees the arena's pieces.
fn free_when_idle(session: &Session) {
    let Some(session) = session::opened().find(|opened| std::ptr::eq(*opened, session)) else { return };
    let free = || {
        loop {
            std::thread::sleep(IDLE);
            if !session.arena().free_unused(session) {
                return;
            }
        }
    };
    // Without it they stay.
    let _ = std::thread::Builder::new().name("rgpu-arena".into()).spawn(free);
}

impl Block<'_> {
    /// The block's first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// The first `len` bytes of the block, as commands name them.
    pub fn range(&self, len: usize) -> HostRange {
        HostRange { place: self.place, offset: self.offset, len: (len as u64).min(self.len) }
    }

    /// Frees the block once the host has read the data of command `seq` on the stream with the given
    /// [`Owner::id`].
    pub fn release_after(self, seq: Seq, owner: u64) {
        let Block { part, offset, len, .. } = self;
        let block = Pending { seq, owner, since: Instant::now(), part, offset, len };
        lock(&self.arena.state).pending.push(block);
        std::mem::forget(self);
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        lock(&self.arena.state).free(self.part, self.offset, self.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::ops::memory::MemGetInfo;
    use test_kit::native_host::{NativeHost, Next};

    #[test]
    fn a_block_is_freed_when_its_command_is_released() {
        let arena = Arena::new(std::ptr::null_mut(), 4096, 0);
        arena.try_alloc(4096, 0).unwrap().release_after(Seq::new(0, 7), 0);
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
        fn has_passed(&self, seq: Seq) -> bool {
            seq.is_reached_at(self.1)
        }
    }

    #[test]
    fn a_running_stream_does_not_wait_for_others_and_none_takes_the_whole_arena() {
        let arena = Arena::new(std::ptr::null_mut(), 4096, 0);
        let alloc = |len, stream: Stream| arena.try_alloc_for(len, 0, Some(&stream));
        alloc(2048, Stream(1, 0)).unwrap().release_after(Seq::new(0, 1), 1);
        alloc(1024, Stream(1, 0)).unwrap().release_after(Seq::new(0, 2), 1);
        assert!(alloc(64, Stream(1, 0)).is_none(), "three quarters are one stream's");
        alloc(1024, Stream(2, 0)).unwrap().release_after(Seq::new(0, 3), 2);
        assert!(alloc(64, Stream(2, 2)).is_none());
        alloc(1024, Stream(2, 3)).unwrap().release_after(Seq::new(0, 4), 2);
        // The progress of another stream says nothing about this one's blocks.
        assert!(alloc(2048, Stream(2, 4)).is_none());
        assert!(alloc(2048, Stream(1, 1)).is_some());
    }

    #[test]
    fn released_memory_is_reused_before_unused_memory() {
        let arena = Arena::new(std::ptr::null_mut(), 1 << 20, 0);
        for seq in 1..1000 {
            let block = arena.try_alloc(4096, seq - 1).unwrap();
            assert_eq!(block.offset, 0);
            block.release_after(Seq::new(0, seq), 0);
        }
    }

    #[test]
    fn blocks_without_room_in_the_channel_are_in_a_piece() {
        let arena = Arena::new(std::ptr::null_mut(), 4096, 0);
        let first = arena.try_alloc(4096, 0).unwrap();
        assert!(arena.try_alloc(64, 0).is_none());
        lock(&arena.state).parts.push(Part::new(1 << 20, 8192, Place::Region(7), None));
        let block = arena.try_alloc(8000, 0).unwrap();
        assert_eq!((block.ptr() as usize, block.range(8000).place), (1 << 20, Place::Region(7)));
        block.release_after(Seq::new(0, 1), 3);
        // Three quarters of both are one stream's.
        assert!(arena.try_alloc_for(1280, 0, Some(&Stream(3, 0))).is_none());
        drop(first);
        assert!(arena.try_alloc_for(1216, 0, Some(&Stream(3, 0))).is_some());
        let again = arena.try_alloc(4096, 1).unwrap();
        assert_eq!(again.range(1).place, Place::Arena, "the channel's part is preferred");
        assert_eq!(arena.try_alloc(8192, 1).unwrap().range(1).place, Place::Region(7));
        assert!(lock(&arena.state).used && lock(&arena.state).in_use_for.is_some());
    }

    /// A session with a host that takes `distance` for each answer, which the session knows by then, or
    /// nothing if that is zero.
    fn session(distance: Duration) -> (&'static Session, NativeHost) {
        let answer = protocol::device::Response::new(protocol::device::Answer::Ok, "");
        let host = NativeHost::start(answer, move |host, record, _| {
            std::thread::sleep(distance);
            host.reply(&record, Status::SUCCESS, &[0; 16]);
            Next::GoOn
        });
        let geometry = protocol::channel::Geometry::with_arena(1 << 20);
        let port = crate::port::at_socket(&host.socket, geometry.size).unwrap();
        let session = Session::over(port, geometry, session::Purpose::Compute).unwrap();
        if !distance.is_zero() {
            session.call(&MemGetInfo { device: 0 }).unwrap();
            assert!(session.is_far());
        }
        (session, host)
    }

    /// How long a far host takes.
    const FAR_AWAY: Duration = Duration::from_millis(1);
    /// Bytes of an arena's first part.
    const FIRST: usize = 4096;

    fn arena(pieces: usize) -> Arena {
        Arena::new(std::ptr::null_mut(), FIRST, FIRST + pieces * PIECE)
    }

    fn parts(arena: &Arena) -> usize {
        lock(&arena.state).parts.len()
    }

    fn registered(host: &NativeHost) -> Vec<u64> {
        host.regions.lock().unwrap().registered.values().copied().collect()
    }

    #[test]
    fn far_away_the_arena_grows_by_pieces_up_to_its_limit() {
        let (session, host) = session(FAR_AWAY);
        let arena = arena(2);
        let (before, piece) = (COUNTERS.arena_pieces.get(), PIECE as u64);
        for pieces in [1, 2, 2] {
            assert_eq!(arena.try_alloc(FIRST + 1, 0).is_some(), parts(&arena) > 1);
            arena.grow(session, Some(session.round_trip()));
            assert_eq!((parts(&arena), registered(&host)), (1 + pieces, vec![piece; pieces]));
        }
        assert!(COUNTERS.arena_pieces.get() >= before + 2);
        let block = arena.try_alloc(FIRST + 1, 0).unwrap();
        assert!(matches!(block.range(1).place, Place::Region(_)), "{block:?}");
        // The memory is there.
        // SAFETY: the block's first byte, which nothing else uses.
        unsafe { block.ptr().write(7) };
        assert_eq!(arena.largest(), FIRST / 4, "copies are cut as before");
    }

    #[test]
    fn the_arena_does_not_grow_if_the_distance_is_not_what_a_copy_waited_for() {
        let (far, host) = session(FAR_AWAY);
        let arena = arena(2);
        // The link is full, or a stream is blocked; and no block was in use.
        for time in [Some(far.round_trip() * (ROUND_TRIPS + 1)), None] {
            arena.grow(far, time);
        }
        let (near, _near_host) = session(Duration::ZERO);
        arena.grow(near, Some(Duration::ZERO));
        assert_eq!((parts(&arena), registered(&host)), (1, vec![]));
        arena.grow(far, Some(far.round_trip()));
        assert_eq!(parts(&arena), 2);
    }

    #[test]
    fn a_host_that_has_no_memory_for_a_piece_is_asked_once() {
        let (session, host) = session(FAR_AWAY);
        let arena = arena(3);
        arena.grow(session, Some(session.round_trip()));
        host.regions.lock().unwrap().most = PIECE as u64;
        arena.grow(session, Some(session.round_trip()));
        host.regions.lock().unwrap().most = u64::MAX;
        arena.grow(session, Some(session.round_trip()));
        assert_eq!((parts(&arena), registered(&host).len()), (2, 1));
        assert!(arena.try_alloc(PIECE, 0).is_some(), "what it has is used");
    }

    #[test]
    fn pieces_that_were_not_used_are_given_back() {
        let (session, host) = session(FAR_AWAY);
        let arena = arena(3);
        for _ in 0..3 {
            arena.grow(session, Some(session.round_trip()));
        }
        let first = arena.try_alloc(PIECE, 0).unwrap();
        assert!(arena.free_unused(session), "one was used");
        assert_eq!((parts(&arena), registered(&host).len()), (4, 3));
        // Nothing was used since, but the first piece still is in use.
        assert!(arena.free_unused(session));
        assert_eq!((parts(&arena), registered(&host).len()), (2, 1));
        // A piece that the host may still read stays.
        first.release_after(Seq::new(0, 5), 1);
        assert!(arena.free_unused(session));
        assert_eq!(registered(&host).len(), 1);
        drop(arena.try_alloc(FIRST, 5).unwrap());
        assert!(!arena.free_unused(session), "none is left");
        assert_eq!((parts(&arena), registered(&host)), (1, vec![]));
        // It grows again when that is needed.
        arena.grow(session, Some(session.round_trip()));
        assert_eq!((parts(&arena), registered(&host).len()), (2, 1));
    }

    #[test]
    fn pieces_before_one_that_is_in_use_stay() {
        let (session, host) = session(FAR_AWAY);
        let arena = arena(2);
        for _ in 0..2 {
            arena.grow(session, Some(session.round_trip()));
        }
        let [first, second] = [(); 2].map(|()| arena.try_alloc(PIECE, 0).unwrap());
        drop(first);
        for _ in 0..2 {
            assert!(arena.free_unused(session));
            assert_eq!((parts(&arena), registered(&host).len()), (3, 2));
        }
        drop(second);
        assert!(!arena.free_unused(session));
        assert_eq!((parts(&arena), registered(&host).len()), (1, 0));
    }

    proptest! {
        #[test]
        fn blocks_do_not_overlap(lens in proptest::collection::vec((1usize..900, any::<bool>()), 1..60)) {
            let arena = Arena::new(std::ptr::null_mut(), 8192, 0);
            let mut held: Vec<Block<'_>> = Vec::new();
            for (seq, (len, keep)) in lens.into_iter().enumerate() {
                if let Some(block) = arena.try_alloc(len, seq as u64 / 2) {
                    prop_assert!(block.len >= len as u64 && block.offset + block.len <= 8192);
                    prop_assert!(held.iter().all(|b| b.offset + b.len <= block.offset || block.offset + block.len <= b.offset));
                    if keep { held.push(block) } else { block.release_after(Seq::new(0, seq as u64), 0) }
                }
            }
            held.clear();
            prop_assert!(arena.try_alloc(8192, u64::MAX).is_some());
        }
    }
}
