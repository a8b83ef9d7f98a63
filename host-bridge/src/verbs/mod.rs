//! InfiniBand and RoCE through libibverbs, for both ends of the transport `verbs`.
//!
//! ```text
//!   Settings ─▶ Device (port, GID, MTU) ─▶ Domain ─▶ Unconnected ══ Queues over TCP ══▶ Link
//!                                            │
//!                                            └─▶ Registration, Slab, Region: memory that the device may use
//! ```
//!
//! In reading order:
//! - `settings`: what an administrator says; [`device`]: which device, port and address;
//! - [`registration`]: protection domains and registered memory; [`client_memory`]: a client's scattered
//!   memory as one registration; `windows`: keys for a part of it and for a while;
//! - `queue`: one queue pair, and completion queues; `failure`: why one broke; `credits`: how much each side
//!   may send;
//! - `queue_pairs`: those of a session, made and connected; `requests`: what was sent and taken on one queue,
//!   over all queue pairs that a session has had; `stalls`: when requests take too long;
//! - [`link`]: all of that as one connection with messages and writes, whose queue pairs can be replaced;
//! - [`pieces`]: one queue pair for copies between servers;
//! - `sys`: the C library's types, and its functions found at run time; `software`, for tests: the same
//!   functions without a device.
//!
//! A device's context and domain belong to one session, so a key is valid only for that session's memory and
//! queue pairs. A registration is always dropped before its memory.
//! `docs/decisions/0005-verbs-by-own-bindings.md` explains why rgpu has its own bindings.

pub mod client_memory;
mod credits;
pub mod device;
mod error;
mod failure;
pub mod link;
pub mod pieces;
mod queue;
mod queue_pairs;
pub mod registration;
mod requests;
mod settings;
#[cfg(any(test, fuzzing, feature = "software-verbs"))]
pub mod software;
mod stalls;
mod sys;
mod windows;

pub use client_memory::RegisteredRegion;
pub use device::{Device, DeviceEvent, Port};
pub use error::VerbsError;
pub use link::{Before, EarlierWrites, Event, Link, Put};
pub use pieces::{PieceBuffer, Pieces};
pub use queue_pairs::Unconnected;
pub use registration::{Access, Domain, Registration, Segment, Slab};
pub use settings::{DEPTH, MOST_DEPTH, MOST_QUEUE_PAIRS, QUEUE_PAIRS, Settings};
pub use windows::{Window, Windows};
