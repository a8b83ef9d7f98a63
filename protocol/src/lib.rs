//! The types and bytes that cross rgpu's boundaries. This crate defines them and does no I/O.
//!
//! ```text
//!  program ──▶ guest libraries ══ channel ══▶ vhost-rgpu ══ link ══▶ rgpu-server ──▶ Driver
//!                     │              │             │           │           │
//!                    ops       channel + ops     device      link         ops
//!                                                native
//! ```
//!
//! In reading order:
//! - [`status`]: results, in CUDA's numbers;
//! - [`wire`]: how a value becomes bytes;
//! - [`handle`] and [`data`]: the ids that a client gives to objects, and the places where bulk data lies;
//! - [`ops`]: the table of operations with how each is scheduled, and the `Driver` trait generated from it;
//! - [`channel`]: the memory that a program and the host side share: ring, reply slots, progress, arena;
//! - [`link`]: greetings and frames between the bridge and a server;
//! - [`device`] and [`native`]: how a channel is opened, by a guest's driver and by a process on the host;
//! - [`version`]: which version two peers speak, and the fingerprint that tells builds apart;
//! - [`schema`]: descriptions of all of these, for the fingerprint, the snapshot and the docs;
//! - [`polling`]: how long each side polls before it sleeps;
//! - [`trace`]: per-command timestamps, for latency analysis.
//!
//! `docs/wire.md` and `docs/device.md` describe the same for another implementation.

// The fingerprints of all minor versions are computed when this is compiled: some hundred entries for each.
#![allow(long_running_const_eval)]

pub mod channel;
pub mod data;
pub mod device;
#[doc(hidden)]
pub mod fuzzing;
pub mod handle;
pub mod link;
pub mod native;
pub mod ops;
pub mod polling;
pub mod schema;
pub mod status;
pub mod trace;
pub mod version;
pub mod wire;

pub use status::Status;
pub use version::{VERSION, Version};
