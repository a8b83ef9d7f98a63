//! A process's side of an rgpu session: turns operations into records in a channel, and receives replies and
//! data.
//!
//! It knows the protocol and how to reach the host, but not CUDA's C interface. In reading order:
//! - [`log`] and [`counters`]: one-line messages; what a process did, for `RGPU_STATS=1`
//! - [`port`]: how to reach the host: the guest's device `/dev/rgpu0`, or the Unix socket of `vhost-rgpu`
//! - [`servers`], [`container`]: which servers the process uses, and which of their devices its container has
//! - [`session`]: the channel: appending operations, waiting for replies and progress, loss of the session
//! - [`seq`]: positions in a session's sequence of records
//! - `reply_slots`, `polling`: the channel's reply slots; how long a thread polls before it sleeps
//! - `queue`: waiting for a session while the server serves other programs first
//! - [`arena`]: the channel's staging memory
//! - [`staging`]: fast copies between program memory and the arena
//! - [`memory`]: device memory: address windows, backed chunks, and the allocations in them
//! - `ordered`: what streams free and use again
//! - [`pages`]: memory whose page faults another thread resolves, for managed memory
//! - [`regions`]: pinned program memory
//! - [`handles`]: handles for C programs
//! - [`activity`]: reports to a profiler of the process
//! - [`thread`]: thread-local values that outlive `exit`
//!
//! ```text
//!  libcuda ──▶ session.append/call ──▶ protocol::channel ══ shared memory ══ host
//!                 │        ▲
//!                 └ port: doorbell, sleep, register ──▶ /dev/rgpu0 | vhost-rgpu's socket
//! ```

pub mod activity;
pub mod arena;
pub mod container;
pub mod counters;
pub mod handles;
pub mod memory;
mod ordered;
pub mod pages;
mod polling;
pub mod port;
mod queue;
pub mod ranges;
pub mod regions;
mod reply_slots;
pub mod seq;
pub mod servers;
pub mod session;
pub mod staging;
pub mod thread;

pub use log;
pub use protocol::{Status, VERSION, Version, channel, data, handle, ops, trace, wire};

/// Locks a mutex even if a thread panicked while holding it: no code here leaves shared state inconsistent.
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
