//! Sessions between a guest and a GPU server, and the transports that carry them.
//!
//! Nothing here knows virtio or CUDA: a session is a channel's memory on one side, and a server's sockets, or
//! its worker process, on the other.
//!
//! ```text
//!   vhost-rgpu                                   rgpu-server's worker
//!   ┌────────┐     tcp: frames and data         ┌──────────┐
//!   │ bridge │ ═══════════════════════════════▶ │ endpoint │
//!   └────────┘     local: file descriptors      └──────────┘
//! ```
//!
//! In reading order:
//! - [`memory`]: the client's memory as a process sees it, every address checked once; [`shared`]: the copies
//!   to and from it;
//! - [`server`]: servers as users name them; [`framing`]: addresses, and the structures of [`protocol::link`]
//!   over sockets; `journal`: data that was sent and may have to be sent again;
//! - `compression`: when data is compressed, and the other end of that; `link_rate`: how fast the link is;
//! - [`stream`]: the bytes of a connection, plain or encrypted;
//! - [`bridge`]: the end that has the client: sessions, the trait [`bridge::Transport`] and its
//!   implementations;
//! - [`ask`]: what a client asks a server that needs no session;
//! - [`verbs`]: InfiniBand and RoCE, for both ends;
//! - [`endpoint`]: the end that has the GPU;
//! - [`log_limit`]: lines that others cause, in bounds; [`trace`]: writes per-command timelines into files.

pub mod ask;
pub mod bridge;
mod compression;
pub mod endpoint;
pub mod framing;
mod journal;
mod link_rate;
pub mod log_limit;
pub mod memory;
pub mod server;
pub mod shared;
pub mod stream;
pub mod trace;
pub mod verbs;
