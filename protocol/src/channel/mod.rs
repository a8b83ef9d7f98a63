//! The memory that a program's process and the host side share. Only this module uses atomics in shared
//! memory.
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
//! The other side may disappear at any time, and the client may be hostile. The host side enforces every rule
//! itself: it reads the [`Geometry`] once, checks it, and never reads a size or an offset from shared memory
//! again. The client trusts its host.
//!
//! **Sleeping.** Every wait in the channel works the same way, with a [`SleepFlag`] or with the state word of
//! a reply slot: the waiting thread polls for a while, announces that it will sleep, checks once more, and
//! sleeps. A thread that changes something wakes the other side only if a thread there sleeps.

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
/// Maximum size of a record, including its header, in bytes: a quarter of the smallest ring.
pub const MAX_RECORD: usize = 64 * 1024;
/// In place of a reply slot's number: the record is not answered.
pub const NO_SLOT: u16 = 0xffff;
/// Bytes of a reply slot: its words on one cache line, then the payload.
pub const SLOT_SIZE: usize = 64 + MAX_PAYLOAD;
/// Maximum payload of a reply in bytes.
pub const MAX_PAYLOAD: usize = if cfg!(loom) { 8 } else { 4096 };
/// Bytes of the progress area.
pub const PROGRESS_SIZE: usize = 64 * 1024;
/// Maximum devices of a process, in all its sessions together.
pub const MAX_DEVICES: u32 = 32;
/// Maximum servers of a process.
pub const MAX_SERVERS: usize = 16;
/// Size of the name by which a client asks for a server, including the NUL, in bytes.
pub const SERVER_NAME_SIZE: usize = 256;
/// Maximum contexts of a session, including primary ones.
pub const MAX_CONTEXTS: u32 = 64;
/// Maximum streams of a session, including default ones.
pub const MAX_STREAMS: u32 = ((PROGRESS_SIZE - 4096) / 8) as u32;
/// Size of the reason why a session was lost, including the NUL, in bytes.
pub const REASON_SIZE: usize = 256;
