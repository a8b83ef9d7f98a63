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
//! A daemon names what its successor needs: listening sockets, connections, files in memory. A successor
//! starts in one of two ways, and inherits the descriptors in the same way after both:
//!
//! - the daemon **executes** another program in its place ([`Store::exec`]), which gets all that the daemon
//!   keeps;
//! - it **crashes**, and the service manager starts it again with the descriptors that it stored for the
//!   daemon. systemd does that with `FileDescriptorStoreMax=` and `NotifyAccess=main` (`sd_notify(3)`,
//!   `FDSTORE=1`); other service managers can implement the same protocol.
//!
//! A [`Store`] also tells the service manager when the daemon serves, and when it ends.
//!
//! Without a service manager, descriptors survive an upgrade but not a crash. This crate does not know what
//! the descriptors are.
//!
//! - [`inherited`]: the descriptors that a process gets at its start;
//! - [`store`]: the descriptors that a process keeps for the next one;
//! - [`manager`]: the connection to the service manager;
//! - [`program`]: checks whether another program can take over; [`places`]: whether it could listen where its
//!   configuration says, and write there;
//! - [`text`]: a text that a process keeps for the next one;
//! - [`clock`]: times that another process can use;
//! - [`thread`]: threads that begin while the next program is being executed;
//! - [`admin`]: the operator's requests, of which an upgrade is one.

pub mod admin;
pub mod clock;
mod inherited;
mod manager;
mod places;
mod program;
mod store;
mod text;
mod thread;

pub use inherited::Inherited;
pub use places::Places;
pub use program::{can_take_over, wait_within};
pub use store::{Store, open_again};
pub use text::Text;
pub use thread::start_thread;

/// Environment variables for one process only: those of `sd_listen_fds(3)` and `sd_notify(3)`, and this
/// crate's own. Processes that a daemon starts must not inherit them.
pub const VARIABLES: &[&str] =
    &["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "FDSTORE", KEPT];

/// What [`Store::exec`] tells the next program: its process ID, and `NAME=NUMBER` for each descriptor,
/// separated by colons. If that is long, only a file is named, [`LIST`], which contains it.
const KEPT: &str = "RGPU_KEPT";
/// The name of that file. No descriptor has it.
const LIST: &str = "";
