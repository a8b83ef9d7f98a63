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
mod sizes;
mod sleep;
mod slots;
pub(crate) mod sync;

pub use geometry::{Geometry, GeometryError, Header, HeaderFields, State};
pub use progress::{ErrorWord, Progress};
pub use ring::{Consumer, Full, PAD, Position, Producer, Record, RecordError, RecordHeader, RingMemory};
pub use sizes::{
    HEADER_SIZE, MAGIC, MAX_CONTEXTS, MAX_DEVICES, MAX_PAYLOAD, MAX_RECORD, MAX_SERVERS, MAX_STREAMS,
    NO_SLOT, PROGRESS_SIZE, REASON_SIZE, RECORD_HEADER, SERVER_NAME_SIZE, SLOT_SIZE,
};
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
