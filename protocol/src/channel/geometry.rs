//! The channel's header, and the checked copy of its geometry.

use super::sizes::{HEADER_SIZE, MAGIC, MAX_RECORD, PROGRESS_SIZE, REASON_SIZE, SERVER_NAME_SIZE, SLOT_SIZE};
use super::sleep::SleepFlag;
use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::schema::{Layout, layout_of, layouts, numbered};
use crate::version::OURS;
use crate::version::rules::{Mismatch, Version};
use thiserror::Error;

layouts! {
    /// What the client writes at offset 0 before it connects, little-endian. All offsets and sizes are in
    /// bytes.
    pub struct HeaderFields {
        /// [`MAGIC`].
        pub magic: u64,
        /// The client's version. Every version has the magic and the version at these offsets.
        pub version: Version,
        /// Process id of the client, in its own namespace; for display.
        pub pid: u32,
        /// The whole channel.
        pub size: u64,
        /// Offset of the ring.
        pub ring_offset: u32,
        /// Size of the ring: a power of two.
        pub ring_size: u32,
        /// Offset of the reply slots.
        pub slots_offset: u32,
        /// Number of reply slots, 1 to 65534.
        pub slot_count: u32,
        /// Offset of the progress area.
        pub progress_offset: u32,
        /// Size of the progress area: [`PROGRESS_SIZE`].
        pub progress_size: u32,
        /// Offset of the arena.
        pub arena_offset: u32,
        /// Size of the arena.
        pub arena_size: u32,
        /// Name of the client's program, NUL-padded; for display.
        pub program: [u8; 40],
        /// Bits of [`wish`](crate::link::wish).
        pub wishes: u32,
        /// Maximum seconds that the session may be [interrupted](Header::is_interrupted) before it is lost.
        /// 0: as long as the server keeps it.
        pub lost_after: u32,
        /// The fingerprint of `version`.
        pub fingerprint: u64,
        /// Which of the host's servers the client asks for, counted from 0. Ignored if the client asks for a
        /// server [by name](Header::asked_server).
        pub server: u32,
        /// Zero.
        pub reserved_end: [u8; 12],
    }
}

/// The header page as it lies in shared memory.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Header {
    /// [`HeaderFields`], written by the client before it connects.
    fields: [AtomicU64; size_of::<HeaderFields>() / 8],
    /// [`State`], by number. Written by the host side.
    state: AtomicU32,
    /// In [`State::Waiting`]: sessions that the server serves before this one. Written by the host side.
    ahead: AtomicU32,
    /// The version that the session speaks, as the two `u16`s of a [`Version`]. Written by the host side
    /// before [`State::Ready`].
    session_version: AtomicU32,
    /// 1 while the link to the server is interrupted and has been for some seconds. Written by the host side.
    interrupted: AtomicU32,
    /// The fingerprint that the host side has of `session_version`.
    session_fingerprint: AtomicU64,
    /// How many servers the host offers this client. Written by the host side before [`State::Ready`]. 0
    /// stands for 1.
    servers: AtomicU32,
    _to_tail: [AtomicU32; 25],
    /// Total bytes appended to the ring. Written by the client.
    tail: AtomicU64,
    _to_head: [AtomicU64; 15],
    /// Total bytes taken from the ring. Written by the host side.
    head: AtomicU64,
    _to_host_sleep: [AtomicU64; 15],
    /// Set while the host side sleeps until the doorbell rings.
    pub host_sleep: SleepFlag,
    _to_ring_sleep: [AtomicU32; 31],
    /// Set while a client thread sleeps until there is room in the ring.
    pub ring_sleep: SleepFlag,
    _to_progress_sleep: [AtomicU32; 31],
    /// Set while a client thread sleeps until something in the progress area changes.
    pub progress_sleep: SleepFlag,
    _to_alive: [AtomicU32; 31],
    /// The host side increases it at each doorbell of a guest's device.
    alive: AtomicU32,
    _to_asked: [AtomicU32; 31],
    /// The server that the client asks for, as in `RGPU_SERVERS`: UTF-8, NUL-terminated. Empty: the one with
    /// the number [`HeaderFields::server`]. Written by the client before it connects.
    asked_server: [AtomicU64; SERVER_NAME_SIZE / 8],
    _to_reason: [AtomicU64; 96],
    /// Why the session was lost, or the name of the server in whose queue it waits: UTF-8, NUL-terminated.
    /// Written by the host side before the state.
    reason: [AtomicU64; REASON_SIZE / 8],
    _end: [AtomicU64; 224],
}

impl Header {
    pub(super) const LAYOUT: Layout = layout_of!(Header {
        fields: HeaderFields,
        state: u32,
        ahead: u32,
        session_version: Version,
        interrupted: u32,
        session_fingerprint: u64,
        servers: u32,
        tail: u64,
        head: u64,
        host_sleep: u32,
        ring_sleep: u32,
        progress_sleep: u32,
        alive: u32,
        asked_server: [u8; SERVER_NAME_SIZE],
        reason: [u8; REASON_SIZE],
    });
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Header>() == HEADER_SIZE && size_of::<HeaderFields>() == 0x80);
    assert!(std::mem::offset_of!(Header, state) as u64 == Header::STATE_OFFSET);
    assert!(std::mem::offset_of!(Header, session_version) == 0x88);
    assert!(std::mem::offset_of!(Header, interrupted) == 0x8c);
    assert!(std::mem::offset_of!(Header, session_fingerprint) == 0x90);
    assert!(std::mem::offset_of!(Header, servers) == 0x98);
    assert!(std::mem::offset_of!(Header, tail) == 0x100);
    assert!(std::mem::offset_of!(Header, head) == 0x180);
    assert!(std::mem::offset_of!(Header, host_sleep) == 0x200);
    assert!(std::mem::offset_of!(Header, ring_sleep) as u64 == Header::RING_SLEEP_OFFSET);
    assert!(std::mem::offset_of!(Header, progress_sleep) as u64 == Header::PROGRESS_SLEEP_OFFSET);
    assert!(std::mem::offset_of!(Header, alive) == 0x380);
    assert!(std::mem::offset_of!(Header, asked_server) == 0x400);
    assert!(std::mem::offset_of!(Header, reason) == 0x800);
};

numbered! {
    /// The state of a session.
    pub enum State {
        /// Not connected yet.
        New = 0,
        /// The host side takes commands.
        Ready = 1,
        /// The session ended without the client closing it; the header has the reason.
        Lost = 2,
        /// The session is in a server's queue; the header has the number of sessions before it, and the
        /// server's name. Only for a client that [may wait](crate::link::wish::MAY_WAIT).
        Waiting = 3,
    }
}

/// The two cursors in the header.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursors<'m> {
    pub(super) tail: &'m AtomicU64,
    pub(super) head: &'m AtomicU64,
}

impl Header {
    pub(super) fn cursors(&self) -> Cursors<'_> {
        Cursors { tail: &self.tail, head: &self.head }
    }

    /// Writes the header's fields. For the client, before it connects.
    #[cfg(not(loom))]
    pub fn write_fields(&self, fields: &HeaderFields) {
        let words: [u64; size_of::<HeaderFields>() / 8] = zerocopy::transmute!(*fields);
        for (to, from) in self.fields.iter().zip(words) {
            to.store(from, Ordering::Relaxed);
        }
    }

    /// Copies the fields out, reading each byte once.
    #[cfg(not(loom))]
    pub fn read_fields(&self) -> HeaderFields {
        let words: [u64; size_of::<HeaderFields>() / 8] =
            std::array::from_fn(|i| self.fields[i].load(Ordering::Relaxed));
        zerocopy::transmute!(words)
    }

    /// The session's state. An unknown number counts as [`State::Lost`].
    #[inline]
    pub fn state(&self) -> State {
        State::with_number(self.state.load(Ordering::Acquire)).unwrap_or(State::Lost)
    }

    /// Changes [`HeaderFields::wishes`]. For the client, before it connects.
    #[cfg(not(loom))]
    pub fn set_wishes(&self, wishes: u32) {
        self.write_fields(&HeaderFields { wishes, ..self.read_fields() });
    }

    /// Publishes [`State::Waiting`] with the session's place in the queue of the server of that name. For the
    /// host side, which then wakes the threads that sleep on the state.
    pub fn set_waiting(&self, server: &str, ahead: u32) {
        if self.state() != State::Waiting {
            self.write_text(server);
        }
        self.ahead.store(ahead, Ordering::Relaxed);
        self.state.store(State::Waiting as u32, Ordering::Release);
    }

    /// Number of sessions that the server serves before this one. For the client, in [`State::Waiting`].
    pub fn ahead(&self) -> u32 {
        self.ahead.load(Ordering::Relaxed)
    }

    /// Writes the version that the session speaks, and the fingerprint that the host side has of it. For the
    /// host side, before [`State::Ready`].
    pub fn set_session_version(&self, version: Version, fingerprint: u64) {
        self.session_version.store(zerocopy::transmute!(version), Ordering::Relaxed);
        self.session_fingerprint.store(fingerprint, Ordering::Relaxed);
    }

    /// The version that the session speaks, and its fingerprint. For the client, in [`State::Ready`].
    pub fn session_version(&self) -> (Version, u64) {
        let version: Version = zerocopy::transmute!(self.session_version.load(Ordering::Relaxed));
        (version, self.session_fingerprint.load(Ordering::Relaxed))
    }

    /// Changes [`HeaderFields::lost_after`]. For the client, before it connects.
    #[cfg(not(loom))]
    pub fn set_lost_after(&self, seconds: u32) {
        self.write_fields(&HeaderFields { lost_after: seconds, ..self.read_fields() });
    }

    /// Publishes that the link to the server has been interrupted for some seconds, or that it works again.
    /// For the host side.
    pub fn set_interrupted(&self, interrupted: bool) {
        self.interrupted.store(interrupted.into(), Ordering::Release);
    }

    /// Whether the link to the server has been interrupted for some seconds. The session continues once the
    /// link works again. For the client.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Acquire) != 0
    }

    /// Publishes [`State::Ready`]. For the host side.
    pub fn set_ready(&self) {
        self.state.store(State::Ready as u32, Ordering::Release);
    }

    /// Publishes [`State::Lost`] with a reason (fitted into [`REASON_SIZE`] bytes). For the host side, which
    /// then wakes every sleeping thread.
    pub fn set_lost(&self, reason: &str) {
        self.write_text(reason);
        self.state.store(State::Lost as u32, Ordering::Release);
    }

    fn write_text(&self, text: &str) {
        store_text(&self.reason, &crate::device::reason_text::<REASON_SIZE>(text));
    }

    /// Asks for a server, by number or by name (cut to [`SERVER_NAME_SIZE`] − 1 bytes). For the client,
    /// before it connects.
    #[cfg(not(loom))]
    pub fn ask_for_server(&self, number: u32, name: &str) {
        self.write_fields(&HeaderFields { server: number, ..self.read_fields() });
        store_text(&self.asked_server, &crate::device::text::<SERVER_NAME_SIZE>(name));
    }

    /// The name of the server that the client asks for; empty if it asks by number. For the host side; each
    /// byte is read once.
    pub fn asked_server(&self) -> String {
        load_text(&self.asked_server)
    }

    /// Publishes how many servers there are. For the host side, before [`State::Ready`].
    pub fn set_servers(&self, servers: u32) {
        self.servers.store(servers, Ordering::Relaxed);
    }

    /// How many servers there are; 0 stands for 1. For the client, in [`State::Ready`].
    pub fn servers(&self) -> u32 {
        self.servers.load(Ordering::Relaxed)
    }

    /// Whether the ring holds records that the host side has not taken. A hostile client can make this return
    /// anything, so use it only to decide whether to pass a doorbell on.
    pub fn has_records(&self) -> bool {
        self.tail.load(Ordering::Acquire) != self.head.load(Ordering::Acquire)
    }

    /// Bytes that the client has appended to the ring, padding included. For the client, which wrote them.
    #[inline]
    pub fn appended(&self) -> u64 {
        self.tail.load(Ordering::Relaxed)
    }

    /// Bytes in the ring that the host side has not taken. For the client, as a hint: a hostile host side can
    /// make this return anything.
    pub fn waiting(&self) -> u64 {
        let head = self.head.load(Ordering::Relaxed);
        self.tail.load(Ordering::Relaxed).wrapping_sub(head)
    }

    /// Acknowledges a doorbell. For the host side: a guest may have rung to find out whether the host is
    /// still there.
    pub fn raise_alive(&self) {
        self.alive.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes after each doorbell of a guest while the host side is there. For the client.
    pub fn alive(&self) -> u32 {
        self.alive.load(Ordering::Relaxed)
    }

    /// In [`State::Lost`]: why the session was lost. In [`State::Waiting`]: the server's name. For the
    /// client.
    pub fn reason(&self) -> String {
        load_text(&self.reason)
    }

    /// Offset of the state in the channel, for threads that wait on it.
    pub const STATE_OFFSET: u64 = 0x80;
    /// Offset of [`Header::ring_sleep`] in the channel, for threads that wait on it.
    pub const RING_SLEEP_OFFSET: u64 = 0x280;
    /// Offset of [`Header::progress_sleep`] in the channel, for threads that wait on it.
    pub const PROGRESS_SLEEP_OFFSET: u64 = 0x300;
}

fn store_text(words: &[AtomicU64], text: &[u8]) {
    for (word, bytes) in words.iter().zip(text.chunks_exact(8)) {
        let mut le = [0; 8];
        le.copy_from_slice(bytes);
        word.store(u64::from_le_bytes(le), Ordering::Relaxed);
    }
}

fn load_text(words: &[AtomicU64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
    crate::device::untext(&bytes)
}

/// Where the parts of a channel lie: a checked copy of its header. Offsets and sizes are in bytes.
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
    /// The magic is wrong, so no rgpu library wrote this.
    #[error("the channel header does not begin with rGPUchan but with {0:#x}")]
    Magic(u64),
    /// The host side does not speak the client's version.
    #[error("{}", .0.describe("the guest's libraries speak", "this host speaks"))]
    Version(Mismatch),
    /// A part is at an invalid place.
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
    /// Size of the ring that libraries choose, in bytes.
    pub const RING_SIZE: usize = 1 << 20;
    /// Number of reply slots that libraries choose.
    pub const SLOT_COUNT: usize = 64;

    /// The usual channel: [`RING_SIZE`](Self::RING_SIZE), [`SLOT_COUNT`](Self::SLOT_COUNT), and an arena of
    /// `arena_size` bytes (a multiple of 4096).
    pub fn with_arena(arena_size: usize) -> Geometry {
        let ring_offset = HEADER_SIZE;
        let (ring_size, slot_count) = (Self::RING_SIZE, Self::SLOT_COUNT);
        let slots_offset = ring_offset + ring_size;
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

    /// What a client of this build writes into the header for this geometry, without any wishes.
    pub fn fields(&self, pid: u32, program: &str) -> HeaderFields {
        HeaderFields {
            magic: MAGIC,
            version: OURS.version(),
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
            program: crate::device::text(program),
            wishes: 0,
            lost_after: 0,
            fingerprint: OURS.fingerprint(),
            server: 0,
            reserved_end: [0; 12],
        }
    }

    /// Checks a header's fields against the actual size of the memory. The parts must lie inside it, after
    /// the header, in order, page-aligned (the reply slots: 64-byte-aligned), without overlap. The client's
    /// version must be one that this build can speak.
    pub fn check(fields: &HeaderFields, memory: u64) -> Result<Geometry, GeometryError> {
        if fields.magic != MAGIC {
            return Err(GeometryError::Magic(fields.magic));
        }
        OURS.agree(fields.version, fields.fingerprint).map_err(GeometryError::Version)?;
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
        let slots_sane = (1..u64::from(super::sizes::NO_SLOT)).contains(&slots);
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
    fn another_major_version_is_refused_with_both_named() {
        let geometry = Geometry::with_arena(0);
        let theirs = Version { major: 99, minor: 3 };
        let fields = HeaderFields { version: theirs, ..geometry.fields(7, "x") };
        let error = Geometry::check(&fields, geometry.size as u64).unwrap_err().to_string();
        assert!(
            error.contains("version 99.3") && error.contains(&format!("version {}", crate::VERSION)),
            "{error}"
        );
    }

    #[test]
    fn libraries_built_from_other_sources_are_refused_and_newer_ones_are_not() {
        let geometry = Geometry::with_arena(0);
        let ours = geometry.fields(7, "x");
        let other = HeaderFields { fingerprint: !ours.fingerprint, ..ours };
        let error = Geometry::check(&other, geometry.size as u64).unwrap_err().to_string();
        assert!(error.contains("different sources"), "{error}");
        // Newer libraries check this themselves, by what the host writes into the header.
        let version = Version { minor: ours.version.minor + 1, ..ours.version };
        assert_eq!(Geometry::check(&HeaderFields { version, ..other }, geometry.size as u64), Ok(geometry));
    }

    #[test]
    fn the_sessions_version_reaches_the_client() {
        let page = Page::zeroed();
        let header = page.header();
        let version = Version { major: 2, minor: 9 };
        header.set_session_version(version, 0x1234_5678_9abc_def0);
        assert_eq!(header.session_version(), (version, 0x1234_5678_9abc_def0));
    }

    #[repr(C, align(4096))]
    struct Page([AtomicU64; HEADER_SIZE / 8]);

    impl Page {
        fn zeroed() -> Box<Page> {
            Box::new(Page(std::array::from_fn(|_| AtomicU64::new(0))))
        }

        fn header(&self) -> &Header {
            // SAFETY: a page has a header's size and alignment. Both consist only of atomics, so any bytes
            // are valid and shared writes are fine.
            unsafe { &*std::ptr::from_ref(self).cast::<Header>() }
        }
    }

    #[test]
    fn a_lost_session_says_why() {
        let page = Page::zeroed();
        let header = page.header();
        assert_eq!(header.state(), State::New);
        header.set_lost("the server at 10.0.0.1:9700 closed the connection");
        assert_eq!(header.state(), State::Lost);
        assert_eq!(header.reason(), "the server at 10.0.0.1:9700 closed the connection");
        header.set_lost(&"ä".repeat(300));
        assert_eq!(header.reason(), format!("{}…", "ä".repeat(126)));
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
