//! handover: descriptors that outlive a daemon.
//!
//! ```text
//!  daemon ── Store::keep(name, descriptor) ──▶ service manager (systemd's store)
//!     │                                              │
//!     │ upgrade: Store::exec                         │ crash: starts the daemon again
//!     ▼                                              ▼
//!  next program ◀─────── Inherited::take ─────────── next daemon
//! ```
//!
//! A daemon names what its successor needs: listening sockets, connections, files in memory. There are two ways to a
//! successor, and it takes what it gets from either in the same way:
//!
//! - the daemon **executes** another program in its place ([`Store::exec`]), with all that it keeps;
//! - it **crashes**, and the service manager starts it again with what it was given to keep: systemd does that with
//!   `FileDescriptorStoreMax=` and `NotifyAccess=main` (`sd_notify(3)`, `FDSTORE=1`), and so does whoever speaks the
//!   same protocol.
//!
//! The service manager also learns from a [`Store`] when the daemon serves, and when it ends.
//!
//! Without a service manager, what is kept survives an upgrade and no crash. Nothing here knows what the descriptors
//! are.
//!
//! - [`inherited`]: what a process was given at its start;
//! - [`store`]: what a process keeps for the next one;
//! - [`program`]: whether another program can take over;
//! - [`text`]: what it writes down for the next one;
//! - [`clock`]: times that another process understands;
//! - [`admin`]: the operator's requests, of which an upgrade is one.

pub mod admin;
pub mod clock;
mod inherited;
mod program;
mod store;
mod text;

pub use inherited::Inherited;
pub use program::can_take_over;
pub use store::Store;
pub use text::Text;

/// Variables of the environment that concern one process and no other: those of `sd_listen_fds(3)` and `sd_notify(3)`,
/// and this crate's own. What a daemon starts must not inherit them.
pub const VARIABLES: &[&str] =
    &["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "FDSTORE", KEPT];

/// What [`Store::exec`] tells the next program: its process ID, and `NAME=NUMBER` for each descriptor, separated by
/// colons.
const KEPT: &str = "RGPU_KEPT";
