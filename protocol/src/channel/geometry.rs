//! The channel's header, and the checked copy of what it says.

use super::ring::Cursors;
use super::sleep::SleepFlag;
use super::sync::{AtomicU32, AtomicU64, Ordering};
use super::{HEADER_SIZE, MAGIC, MAX_RECORD, PROGRESS_SIZE, REASON_SIZE, SLOT_SIZE};
use crate::VERSION;
use thiserror::Error;

/// What the client writes at offset 0 before it connects, little-endian. All offsets and sizes are in bytes.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    zerocopy::FromBytes,
    zerocopy::IntoBytes,
    zerocopy::Immutable,
    zerocopy::KnownLayout,
)]
#[repr(C)]
pub struct HeaderFields {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u32,
    /// Process id of the client, in its own namespace; for people.
    pub pid: u32,
    /// The whole channel.
    pub size: u64,
    /// Offset of the ring.
    pub ring_offset: u32,
    /// Size of the ring: a power of two.
    pub ring_size: u32,
    /// Offset of the reply slots.
    pub slots_offset: u32,
    /// Number of reply slots, 1 to 65535.
    pub slot_count: u32,
    /// Offset of the progress area.
    pub progress_offset: u32,
    /// Size of the progress area: [`PROGRESS_SIZE`].
    pub progress_size: u32,
    /// Offset of the arena.
    pub arena_offset: u32,
    /// Size of the arena.
    pub arena_size: u32,
    /// Name of the client's program, NUL-padded; for people.
    pub program: [u8; 40],
}

/// The header page as it lies in shared memory.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Header {
    fields: [AtomicU64; 12],
    /// Offset 0x60. Bits of [`wish`](crate::link::wish). Written by the client before it connects.
    wishes: AtomicU32,
    _to_state: [AtomicU32; 7],
    /// Offset 0x80. [`State`], by number. Written by the host side.
    state: AtomicU32,
    /// Offset 0x84. In [`State::Waiting`]: sessions that the server serves before this one. Written by the host side.
    ahead: AtomicU32,
    _to_tail: [AtomicU32; 30],
    /// Offset 0x100. Bytes ever appended to the ring. Written by the client.
    tail: AtomicU64,
    _to_head: [AtomicU64; 15],
    /// Offset 0x180. Bytes ever taken from the ring. Written by the host side.
    head: AtomicU64,
    _to_host_sleep: [AtomicU64; 15],
    /// Offset 0x200. The host side sleeps until the doorbell rings.
    pub host_sleep: SleepFlag,
    _to_ring_sleep: [AtomicU32; 31],
    /// Offset 0x280. A client thread sleeps until there is room in the ring.
    pub ring_sleep: SleepFlag,
    _to_progress_sleep: [AtomicU32; 31],
    /// Offset 0x300. A client thread sleeps until something in the progress area changes.
    pub progress_sleep: SleepFlag,
    _to_alive: [AtomicU32; 31],
    /// Offset 0x380. Raised by the host side at each doorbell of a guest's device.
    alive: AtomicU32,
    _to_reason: [AtomicU32; 31 + 256],
    /// Offset 0x800. Why the session was lost, or the name of the server that it waits for: UTF-8, NUL-terminated. Written by the host side before the state.
    reason: [AtomicU64; REASON_SIZE / 8],
    _end: [AtomicU64; 224],
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Header>() == HEADER_SIZE && size_of::<HeaderFields>() == 96);
    assert!(std::mem::offset_of!(Header, wishes) == 0x60);
    assert!(std::mem::offset_of!(Header, state) == 0x80);
    assert!(std::mem::offset_of!(Header, tail) == 0x100);
    assert!(std::mem::offset_of!(Header, head) == 0x180);
    assert!(std::mem::offset_of!(Header, host_sleep) == 0x200);
    assert!(std::mem::offset_of!(Header, ring_sleep) == 0x280);
    assert!(std::mem::offset_of!(Header, progress_sleep) == 0x300);
    assert!(std::mem::offset_of!(Header, alive) == 0x380);
    assert!(std::mem::offset_of!(Header, reason) == 0x800);
};

/// Where a session stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Not connected yet.
    New = 0,
    /// Commands are being taken.
    Ready = 1,
    /// Over, against the client's will; the reason stands in the header.
    Lost = 2,
    /// In a server's queue; how many sessions come first, and the server's name, stand in the header. Only for a client that [may wait](crate::link::wish::MAY_WAIT).
    Waiting = 3,
}

impl Header {
    pub(super) fn cursors(&self) -> Cursors<'_> {
        Cursors { tail: &self.tail, head: &self.head }
    }

    /// Writes the header's fields. Client, before it connects.
    #[cfg(not(loom))]
    pub fn write_fields(&self, fields: &HeaderFields) {
        let words: [u64; 12] = zerocopy::transmute!(*fields);
        for (to, from) in self.fields.iter().zip(words) {
            to.store(from, Ordering::Relaxed);
        }
    }

    /// Copies the fields out, each byte once.
    #[cfg(not(loom))]
    pub fn read_fields(&self) -> HeaderFields {
        let words: [u64; 12] = std::array::from_fn(|i| self.fields[i].load(Ordering::Relaxed));
        zerocopy::transmute!(words)
    }

    /// The session's state. A number that is none counts as [`State::Lost`].
    #[inline]
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::New,
            1 => State::Ready,
            3 => State::Waiting,
            _ => State::Lost,
        }
    }

    /// Says what session the client would like: bits of [`wish`](crate::link::wish). Client, before it connects.
    pub fn set_wishes(&self, wishes: u32) {
        self.wishes.store(wishes, Ordering::Relaxed);
    }

    /// What session the client would like: bits of [`wish`](crate::link::wish).
    pub fn wishes(&self) -> u32 {
        self.wishes.load(Ordering::Relaxed)
    }

    /// Publishes [`State::Waiting`] with the session's place in the queue of the server of that name. Host side; it then wakes who sleeps on the state.
    pub fn set_waiting(&self, server: &str, ahead: u32) {
        if self.state() != State::Waiting {
            self.write_text(server);
        }
        self.ahead.store(ahead, Ordering::Relaxed);
        self.state.store(State::Waiting as u32, Ordering::Release);
    }

    /// Sessions that the server serves before this one. Client, in [`State::Waiting`].
    pub fn ahead(&self) -> u32 {
        self.ahead.load(Ordering::Relaxed)
    }

    /// Publishes [`State::Ready`]. Host side.
    pub fn set_ready(&self) {
        self.state.store(State::Ready as u32, Ordering::Release);
    }

    /// Publishes [`State::Lost`] with a reason (cut to [`REASON_SIZE`] − 1 bytes). Host side; it then wakes every sleeper.
    pub fn set_lost(&self, reason: &str) {
        self.write_text(reason);
        self.state.store(State::Lost as u32, Ordering::Release);
    }

    fn write_text(&self, text: &str) {
        let text = crate::device::text::<REASON_SIZE>(text);
        for (word, bytes) in self.reason.iter().zip(text.chunks_exact(8)) {
            let mut le = [0; 8];
            le.copy_from_slice(bytes);
            word.store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
    }

    /// Whether the ring holds records that the host side has not taken. A hint, for one who passes doorbells on: a hostile client can make it say anything.
    pub fn has_records(&self) -> bool {
        self.tail.load(Ordering::Acquire) != self.head.load(Ordering::Acquire)
    }

    /// Says that a doorbell has been heard. Host side, for a guest that may be asking whether anybody is there.
    pub fn raise_alive(&self) {
        self.alive.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes after each doorbell of a guest, as long as the host side is there. Client.
    pub fn alive(&self) -> u32 {
        self.alive.load(Ordering::Relaxed)
    }

    /// Why the session was lost, after [`State::Lost`]; the server's name, in [`State::Waiting`]. Client.
    pub fn reason(&self) -> String {
        let bytes: Vec<u8> =
            self.reason.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }

    /// Offset of the state in the channel, for a wait on it.
    pub const STATE_OFFSET: u64 = 0x80;
    /// Offset of [`Header::ring_sleep`] in the channel, for a wait on it.
    pub const RING_SLEEP_OFFSET: u64 = 0x280;
    /// Offset of [`Header::progress_sleep`] in the channel, for a wait on it.
    pub const PROGRESS_SLEEP_OFFSET: u64 = 0x300;
    /// Offset of [`Header::host_sleep`] in the channel.
    pub const HOST_SLEEP_OFFSET: u64 = 0x200;
}

/// Where the parts of a channel lie: the checked copy of its header. Offsets and sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// The whole channel.
    pub size: usize,
    /// Offset of the ring.
    pub ring_offset: usize,
    /// Size of the ring, a power of two.
    pub ring_size: usize,
    /// Offset of the reply slots.
    pub slots_offset: usize,
    /// Number of reply slots.
    pub slot_count: usize,
    /// Offset of the progress area, which is [`PROGRESS_SIZE`] long.
    pub progress_offset: usize,
    /// Offset of the arena.
    pub arena_offset: usize,
    /// Size of the arena.
    pub arena_size: usize,
}

/// Why a channel's header was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// The magic is wrong: whoever wrote this is no rgpu library.
    #[error("the channel header does not begin with rGPUchan but with {0:#x}")]
    Magic(u64),
    /// Another version.
    #[error(
        "the guest's libraries speak version {theirs} of rgpu, this host speaks version {ours}: install the same release on both"
    )]
    Version {
        /// The client's.
        theirs: u32,
        /// This crate's.
        ours: u32,
    },
    /// A part is misplaced.
    #[error(
        "channel header: {part} at {offset:#x}, {size:#x} bytes, is not a valid place in a channel of {channel:#x} bytes"
    )]
    Part {
        /// The part.
        part: &'static str,
        /// Its offset.
        offset: u64,
        /// Its size.
        size: u64,
        /// The channel's size.
        channel: u64,
    },
}

impl Geometry {
    /// The usual channel: 1 MiB ring, 64 reply slots, and an arena of `arena_size` bytes (a multiple of 4096).
    pub fn with_arena(arena_size: usize) -> Geometry {
        let ring_offset = HEADER_SIZE;
        let ring_size = 1 << 20;
        let slots_offset = ring_offset + ring_size;
        let slot_count = 64;
        let progress_offset = (slots_offset + slot_count * SLOT_SIZE).next_multiple_of(4096);
        let arena_offset = progress_offset + PROGRESS_SIZE;
        Geometry {
            size: arena_offset + arena_size,
            ring_offset,
            ring_size,
            slots_offset,
            slot_count,
            progress_offset,
            arena_offset,
            arena_size,
        }
    }

    /// What the client writes into the header for this geometry.
    pub fn fields(&self, pid: u32, program: &str) -> HeaderFields {
        let mut name = [0; 40];
        let n = program.len().min(39);
        name[..n].copy_from_slice(&program.as_bytes()[..n]);
        HeaderFields {
            magic: MAGIC,
            version: VERSION,
            pid,
            size: self.size as u64,
            ring_offset: self.ring_offset as u32,
            ring_size: self.ring_size as u32,
            slots_offset: self.slots_offset as u32,
            slot_count: self.slot_count as u32,
            progress_offset: self.progress_offset as u32,
            progress_size: PROGRESS_SIZE as u32,
            arena_offset: self.arena_offset as u32,
            arena_size: self.arena_size as u32,
            program: name,
        }
    }

    /// Checks a header's fields against the size of the memory that was really given. Parts must lie inside it, behind the header, in order,
    /// page-aligned (the reply slots: 64-byte-aligned), without overlap.
    pub fn check(fields: &HeaderFields, memory: u64) -> Result<Geometry, GeometryError> {
        if fields.magic != MAGIC {
            return Err(GeometryError::Magic(fields.magic));
        }
        if fields.version != VERSION {
            return Err(GeometryError::Version { theirs: fields.version, ours: VERSION });
        }
        let mut end = HEADER_SIZE as u64;
        let mut part = |part, offset: u32, size: u64, align: u64, sane: bool| {
            let offset = u64::from(offset);
            if !sane || offset < end || !offset.is_multiple_of(align) || offset + size > memory {
                return Err(GeometryError::Part { part, offset, size, channel: memory });
            }
            end = offset + size;
            Ok(offset as usize)
        };
        if fields.size != memory {
            return Err(GeometryError::Part {
                part: "the channel",
                offset: 0,
                size: fields.size,
                channel: memory,
            });
        }
        let ring_size = u64::from(fields.ring_size);
        let ring_sane = ring_size.is_power_of_two() && ring_size >= 4 * MAX_RECORD as u64;
        let ring_offset = part("the ring", fields.ring_offset, ring_size, 4096, ring_sane)?;
        let slots = u64::from(fields.slot_count);
        let slots_sane = (1..u64::from(super::NO_SLOT)).contains(&slots);
        let slots_offset =
            part("reply slots", fields.slots_offset, slots * SLOT_SIZE as u64, 64, slots_sane)?;
        let progress_sane = fields.progress_size as usize == PROGRESS_SIZE;
        let progress_size = u64::from(fields.progress_size);
        let progress_offset =
            part("the progress area", fields.progress_offset, progress_size, 4096, progress_sane)?;
        let arena_offset = part("the arena", fields.arena_offset, u64::from(fields.arena_size), 4096, true)?;
        Ok(Geometry {
            size: memory as usize,
            ring_offset,
            ring_size: ring_size as usize,
            slots_offset,
            slot_count: slots as usize,
            progress_offset,
            arena_offset,
            arena_size: fields.arena_size as usize,
        })
    }

    /// Offset of reply slot `index` in the channel.
    pub fn slot_offset(&self, index: usize) -> usize {
        self.slots_offset + index * SLOT_SIZE
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_usual_geometry_passes_its_own_check() {
        let geometry = Geometry::with_arena(32 << 20);
        let fields = geometry.fields(7, "vectorAdd");
        assert_eq!(Geometry::check(&fields, geometry.size as u64), Ok(geometry));
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let geometry = Geometry::with_arena(0);
        let fields = HeaderFields { version: 99, ..geometry.fields(7, "x") };
        let error = Geometry::check(&fields, geometry.size as u64).unwrap_err();
        assert!(error.to_string().contains("version 99"), "{error}");
    }

    #[test]
    fn a_lost_session_says_why() {
        let page = vec![0u64; 1024];
        let at = page.as_ptr().align_offset(4096);
        // SAFETY: zeroed, 4096-aligned, a page long, and outlives `header`; all fields are atomics.
        let header = unsafe { &*page.as_ptr().add(at).cast::<Header>() };
        assert_eq!(header.state(), State::New);
        header.set_lost("the server at 10.0.0.1:9700 closed the connection");
        assert_eq!(header.state(), State::Lost);
        assert_eq!(header.reason(), "the server at 10.0.0.1:9700 closed the connection");
        header.set_lost(&"ä".repeat(300));
        assert_eq!(header.reason(), "ä".repeat(127));
    }

    proptest! {
        #[test]
        fn whatever_passes_the_check_lies_inside(words in proptest::array::uniform8(0u32..0x40_0000), memory in 0u64..0x100_0000) {
            let usual = Geometry::with_arena(8192).fields(1, "p");
            let fields = HeaderFields {
                size: memory,
                ring_offset: words[0] & !0xfff, ring_size: 1 << (words[1] % 24), slots_offset: words[2] & !0x3f, slot_count: words[3] % 70000,
                progress_offset: words[4] & !0xfff, arena_offset: words[6], arena_size: words[7], ..usual
            };
            if let Ok(g) = Geometry::check(&fields, memory) {
                prop_assert!(g.ring_offset >= HEADER_SIZE);
                prop_assert!(g.ring_offset + g.ring_size <= g.slots_offset);
                prop_assert!(g.slot_offset(g.slot_count) <= g.progress_offset);
                prop_assert!(g.progress_offset + PROGRESS_SIZE <= g.arena_offset);
                prop_assert!(g.arena_offset + g.arena_size <= memory as usize);
            }
        }
    }
}
