//! The memory that a program's process and the host side share, and the only place with shared-memory atomics.
//!
//! ```text
//!  0 ┌────────────┐
//!    │ Header     │ 4 KiB: geometry, state, reason, cursors and sleep flags, each on its own cache line
//!    ├────────────┤ ring_offset
//!    │ ring       │ records: written by the client, each fetched once by the host side      → ring
//!    ├────────────┤ slots_offset
//!    │ ReplySlots │ one for each waiting thread: state word, status, payload                → slots
//!    ├────────────┤ progress_offset
//!    │ Progress   │ written by the host side: what is done, what is released, what failed   → progress
//!    ├────────────┤ arena_offset
//!    │ arena      │ staging for pageable memory; the client alone decides what lies where
//!    └────────────┘
//! ```
//!
//! Either side may be absent or hostile at any time. The host side enforces every rule itself: it takes the [`Geometry`] once, checks it, and never
//! again reads a size or an offset from shared memory. The client trusts its host.
//!
//! **Sleeping.** Every wait in the channel works the same way, by a [`SleepFlag`] or by the state word of a reply slot: the waiting thread polls for a
//! while, announces that it will sleep, checks once more, and sleeps. A thread that changes something asks whether another one sleeps, and only then
//! wakes it.

mod geometry;
#[cfg(all(test, loom))]
mod loom_tests;
mod progress;
mod ring;
mod sleep;
mod slots;
pub(crate) mod sync;

pub use geometry::{Geometry, GeometryError, Header, HeaderFields, State};
pub use progress::{ErrorWord, Progress};
pub use ring::{Consumer, Full, PAD, Position, Producer, Record, RecordError, RecordHeader, RingMemory};
pub use sleep::SleepFlag;
pub use slots::{Completed, Completion, ReplySlot, SlotState};

use crate::schema::Layout;

/// How the channel's parts lie in memory.
pub const LAYOUTS: &[Layout] = &[
    geometry::LAYOUTS[0],
    Header::LAYOUT,
    ring::LAYOUTS[0],
    ReplySlot::LAYOUT,
    Progress::LAYOUT,
    ErrorWord::LAYOUT,
];

/// The bytes `rGPUchan`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"rGPUchan");
/// Bytes of the header.
pub const HEADER_SIZE: usize = 4096;
/// Bytes of a record's header.
pub const RECORD_HEADER: usize = 16;
/// Longest record, header included, in bytes: a quarter of the smallest ring.
pub const MAX_RECORD: usize = 64 * 1024;
/// Reply slot of a record that is not answered.
pub const NO_SLOT: u16 = 0xffff;
/// Bytes of a reply slot: its words on one cache line, then the payload.
pub const SLOT_SIZE: usize = 64 + MAX_PAYLOAD;
/// Most bytes of payload in a reply.
pub const MAX_PAYLOAD: usize = if cfg!(loom) { 8 } else { 4096 };
/// Bytes of the progress area.
pub const PROGRESS_SIZE: usize = 64 * 1024;
/// Most devices of a process, of all its sessions together.
pub const MAX_DEVICES: u32 = 32;
/// Most servers of a process.
pub const MAX_SERVERS: usize = 16;
/// Bytes of the name by which a client asks for a server, NUL included.
pub const SERVER_NAME_SIZE: usize = 256;
/// Most contexts of a session, primary ones included.
pub const MAX_CONTEXTS: u32 = 64;
/// Most streams of a session, default ones included.
pub const MAX_STREAMS: u32 = ((PROGRESS_SIZE - 4096) / 8) as u32;
/// Bytes of the reason for which a session was lost, NUL included.
pub const REASON_SIZE: usize = 256;
