//! sandbox: starts processes that reach only what they were given.
//!
//! ```text
//!  daemon                                            process
//!  Users::allocate ── an ID of its own ─┐
//!  Cgroups::make ──── limits ───────────┼─ start ──▶ main() ── Confinement, over a socket ──▶ confine() ──▶ untrusted data
//!                                       │                                                        │
//!  Process::wait ◀── its end ───────────┘                                                        └▶ Report: what is missing
//! ```
//!
//! A daemon starts the process ([`start`]) with only the descriptors that it names. The process is trusted until it has read the first untrusted byte, so it confines itself ([`confine`]): that
//! runs ordinary code with ordinary error messages, not a few calls between fork and exec. It must come before any thread starts and before any library is loaded that other people's
//! data reaches later.
//!
//! What the machine does not provide is left out and named in the [`Report`]; the caller decides whether to go on without it.
//!
//! In reading order:
//! - [`users`]: user IDs that no two live processes share;
//! - [`cgroup`]: limits of memory, tasks and CPU;
//! - [`start`](mod@start): from a command to a process in new namespaces;
//! - [`confine`](mod@confine): what the process does to itself, in order;
//! - [`filesystem`]: a tree of files that contains what is visible and nothing else;
//! - [`syscalls`]: the list of allowed system calls, and what happens to others;
//! - [`inspect`](mod@inspect): what the kernel says about a running process;
//! - [`service`]: all of this for a daemon that starts many such processes.

mod cgroup;
mod confine;
mod filesystem;
mod inspect;
mod service;
mod start;
mod syscalls;
mod users;

pub use cgroup::{Cgroups, Group, Limits};
pub use confine::{Confinement, Layer, Missing, Network, Refused, Report, Resources, confine};
pub use filesystem::{Access, RDMA_DEVICES, Visible};
pub use inspect::{Inspected, inspect};
pub use service::{Failed, Mode, Orders, Policy, Reach, Sandboxes};
pub use start::{
    Command, Description, Error as StartError, Handle, Isolation, Process, may_change_users, start,
    start_unconfined,
};
pub use syscalls::{Argument, OtherCalls, Syscalls};
pub use users::{DEVICE_PROCESS_USERS, Error as UsersError, Range, User, Users, WORKER_USERS};
