//! What crosses a boundary in rgpu: bytes and types, and nothing that moves them.
//!
//! ```text
//!  program ──▶ guest libraries ══ channel ══▶ vhost-rgpu ══ link ══▶ rgpu-server ──▶ Driver
//!                     │              │             │           │           │
//!                    ops       channel + ops     device      link         ops
//!                                                native
//! ```
//!
//! In reading order:
//! - [`status`]: results, in CUDA's own numbers;
//! - [`wire`]: how a value becomes bytes;
//! - [`handle`] and [`data`]: the names a client gives to objects, and the places where bulk data lies;
//! - [`ops`]: the one table of operations, and the `Driver` trait that comes out of it;
//! - [`channel`]: the memory that a program and the host side share: ring, reply slots, progress, arena;
//! - [`link`]: handshake and frames between the host bridge and a server;
//! - [`device`] and [`native`]: how a channel comes to be, for a guest's driver and for a process on the host;
//! - [`trace`]: when a command came where, for who looks for the time.
//!
//! `docs/wire.md` and `docs/device.md` say the same in words, for another implementation.

pub mod channel;
pub mod data;
pub mod device;
pub mod handle;
pub mod link;
pub mod native;
pub mod ops;
pub mod polling;
pub mod status;
pub mod trace;
pub mod wire;

pub use status::Status;

/// Version of everything in this crate that two programs must agree on. A peer with another is refused, both numbers named.
pub const VERSION: u32 = 1;
