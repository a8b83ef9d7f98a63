//! How a process on the host opens a channel: through a Unix `SOCK_SEQPACKET` socket of `vhost-rgpu`, with
//! one connection for each channel.
//!
//! The client sends a [`Request`] in one packet, with the file descriptor that belongs to it as `SCM_RIGHTS`.
//! The daemon answers each in order with a [`crate::device::Response`]. The answer to
//! [`CREATE_CHANNEL`](crate::device::request::CREATE_CHANNEL) carries one descriptor, an eventfd: the
//! doorbell (write 1 to ring it).
//!
//! The client's threads sleep by `futex(FUTEX_WAIT)` (not `PRIVATE`) on the words of the channel that
//! [`crate::channel`] names; the host side wakes them by `FUTEX_WAKE` on its own mapping of the same memory.
//! Closing the connection ends the session, and the end of a session closes the connection.

use crate::schema::layouts;
use crate::version::rules::Version;

/// Where the daemon listens by default.
pub const DEFAULT_SOCKET: &str = "/run/rgpu/native.sock";
/// The bytes `rGPUnatv`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"rGPUnatv");

layouts! {
    /// A request. `CREATE_CHANNEL` and `REGISTER_MEMORY` carry one descriptor: a memfd sealed against
    /// shrinking (`F_SEAL_SHRINK`), of which `size` bytes from `offset` (page-aligned) are the channel or the
    /// region.
    pub struct Request {
        /// [`MAGIC`].
        pub magic: u64,
        /// The client's version. Its fingerprint is in the channel's header.
        pub version: Version,
        /// One of [`crate::device::request`].
        pub kind: u32,
        /// Region, chosen by the client; 0 where the request has none.
        pub region: u32,
        /// As in [`crate::device::Request::flags`].
        pub flags: u32,
        /// Offset in the memfd, in bytes.
        pub offset: u64,
        /// Bytes.
        pub size: u64,
    }
}
