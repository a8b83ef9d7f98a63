//! sandbox: starts processes that can only access what they were given.
//!
//! ```text
//!  daemon                                            process
//!  Users::allocate ── an ID of its own ─┐
//!  Cgroups::make ──── limits ───────────┼─ start ──▶ main() ── Confinement, over a socket ──▶ confine() ──▶ untrusted data
//!                                       │                                                        │
//!  Process::wait ◀── its end ───────────┘                                                        └▶ Report: what is missing
//! ```
//!
//! A daemon starts the process ([`start`]) with only the descriptors that it names. The process is trusted
//! until it has read the first untrusted byte, so it confines itself ([`confine`]). That way, confinement is
//! ordinary code with ordinary error messages, instead of a few calls between fork and exec. It must happen
//! before any thread starts, and before loading libraries that will handle untrusted data.
//!
//! Layers that the machine does not provide are omitted and named in the [`Report`]; the caller decides
//! whether to continue without them.
//!
//! In reading order:
//! - [`users`]: user IDs that no two live processes share;
//! - [`cgroup`]: limits of memory, tasks and CPU;
//! - [`start`](mod@start): from a command to a process in new namespaces;
//! - [`confine`](mod@confine): the steps by which the process confines itself;
//! - [`filesystem`]: a tree of files that contains only what the process may see;
//! - [`syscalls`]: the list of allowed system calls, and what happens to others;
//! - [`inspect`](mod@inspect): the sandbox of a running process, according to the kernel;
//! - [`service`]: all of this for a daemon that starts many such processes;
//! - [`foreign`]: looks at descriptors that somebody has sent before the daemon has them.

mod cgroup;
mod confine;
mod filesystem;
pub mod foreign;
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
