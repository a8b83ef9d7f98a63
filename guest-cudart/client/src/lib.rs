//! A process's side of an rgpu session: how its CUDA calls become records in a channel, and how answers and data come back.
//!
//! It knows the protocol and the ways to the host, and nothing of CUDA's C interface. In reading order:
//! - [`log`] and [`counters`]: one-line messages; what a process did, for `RGPU_STATS=1`;
//! - [`port`]: the way to the host: the guest's device `/dev/rgpu0`, or the Unix socket of `vhost-rgpu`;
//! - [`session`]: the channel: appending operations, waiting for replies and for progress, loss of the session;
//! - `turn`: waiting for the session while the server serves other programs first;
//! - [`arena`]: room in the channel's staging memory;
//! - [`staging`]: copying much between program memory and the arena;
//! - [`memory`]: device memory: windows of addresses, pieces that are backed, allocations inside them;
//! - [`pages`]: memory whose use another thread answers, for what host and device take turns on;
//! - [`regions`]: pinned program memory;
//! - [`handles`]: the names that a C program holds for objects;
//! - [`thread`]: a thread's own values that outlast `exit`.
//!
//! ```text
//!  libcuda ──▶ session.append/call ──▶ protocol::channel ══ shared memory ══ host
//!                 │        ▲
//!                 └ port: doorbell, sleep, register ──▶ /dev/rgpu0 | vhost-rgpu's socket
//! ```

pub mod arena;
pub mod counters;
pub mod handles;
pub mod log;
pub mod memory;
pub mod pages;
pub mod port;
pub mod ranges;
pub mod regions;
pub mod session;
pub mod staging;
pub mod thread;
mod turn;

pub use protocol::{Status, VERSION, Version, channel, data, handle, ops, wire};

/// Locks a mutex whether or not another thread has panicked with it held: nothing here leaves shared state half-changed.
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
