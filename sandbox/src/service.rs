//! A daemon's sandboxes: starts its processes, and gives each of them its orders.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::cgroup::{Cgroups, Group, Limits, Unavailable};
use crate::confine::{Confinement, Layer, Missing, Network, Report, Resources, confine};
use crate::filesystem::{RDMA_DEVICES, Visible};
use crate::start::{Command, Description, Error, Process, may_change_users, start, start_unconfined};
use crate::syscalls::{OtherCalls, Syscalls};
use crate::users::{Error as UsersError, Range, Users};

/// How processes are confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Confined
    On,
    /// Confined, but system calls that are not in the list are executed, and named in the log. For finding
    /// out what a process needs
    Report,
    /// Not confined: whoever takes over such a process has all rights of the daemon
    Off,
}

/// The operator's settings.
#[derive(Debug, Clone)]
pub struct Policy {
    /// How processes are confined.
    pub mode: Mode,
    /// Whether a process must refuse to serve if this machine does not provide every part of its sandbox.
    pub require: bool,
    /// User IDs, one for each process. `None`: processes keep the daemon's user ID.
    pub users: Option<Range>,
    /// Maximum bytes of memory, tasks and CPU time of a process; 0 means no limit.
    pub limits: Limits,
}

/// What every process of a kind may access.
#[derive(Debug, Clone)]
pub struct Reach {
    /// Files.
    pub visible: Vec<Visible>,
    /// What happens to system calls that are not in the list, unless they are only reported.
    pub other_calls: OtherCalls,
}

/// A process's orders, which it gets in its first message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Orders {
    /// How to confine itself. `None`: it runs without a sandbox.
    confinement: Option<Confinement>,
    /// The missing layers that the daemon knows of.
    known: Report,
    /// Whether the process must refuse to serve if something is missing.
    required: bool,
}

/// Why a process could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// No user ID is free.
    #[error("a user ID for it (--worker-users of rgpu-server, --device-users of vhost-rgpu)")]
    User(#[from] UsersError),
    /// It could not be started.
    #[error(transparent)]
    Start(#[from] Error),
}

/// The daemon's part.
#[derive(Debug)]
pub struct Sandboxes {
    policy: Policy,
    reach: Reach,
    users: Option<Arc<Users>>,
    groups: Result<Cgroups, String>,
    number: AtomicU64,
}

impl Sandboxes {
    /// Prepares the sandboxes of a daemon's processes. `daemon` names its cgroups.
    pub fn new(policy: Policy, daemon: &str, reach: Reach) -> Sandboxes {
        let on = policy.mode != Mode::Off;
        let users = policy.users.filter(|_| on && may_change_users()).map(Users::new);
        let groups = if on {
            Cgroups::claim(daemon).map_err(|e| match std::error::Error::source(&e) {
                Some(source) => format!("{e}: {source}"),
                None => e.to_string(),
            })
        } else {
            Err("there is no sandbox".into())
        };
        Sandboxes { policy, reach, users, groups, number: AtomicU64::new(0) }
    }

    /// Whether processes are confined.
    pub fn on(&self) -> bool {
        self.policy.mode != Mode::Off
    }

    /// Starts a process with `descriptors`, as [`start`] does. `kind` is part of its cgroup's name. The
    /// process must [enter](Orders::enter) its sandbox according to its [orders](Self::orders).
    /// [`Process::no_group`] says why it has no cgroup, if there is none only for this process.
    pub fn start(
        &self,
        command: &Command,
        descriptors: &[BorrowedFd<'_>],
        kind: &str,
    ) -> Result<Process, Failed> {
        if !self.on() {
            return Ok(start_unconfined(command, descriptors)?);
        }
        let user = self.users.as_ref().map(Users::allocate).transpose()?;
        let (group, lacks) = match self.groups.as_ref().map(|groups| self.group(groups, kind)) {
            Ok(Ok(group)) => (Some(group), None),
            Ok(Err(e)) => (None, Some(e.to_string())),
            Err(_) => (None, None),
        };
        let mut process = start(command, descriptors, user, group)?;
        process.lacks_group(lacks);
        Ok(process)
    }

    fn group(&self, groups: &Cgroups, kind: &str) -> Result<Group, Unavailable> {
        loop {
            let name = format!("{kind}-{}", self.number.fetch_add(1, Ordering::Relaxed));
            match groups.make(&name, &self.policy.limits) {
                // A process of the previous daemon uses this name.
                Err(e) if e.exists() => {}
                made => return made,
            }
        }
    }

    /// Takes over a process that the previous daemon has started. `alive` is the descriptor that the previous
    /// daemon got from [`Process::alive`].
    ///
    /// # Errors
    /// If the process has ended, or is not the one that was described.
    pub fn adopt(&self, description: &Description, alive: Option<OwnedFd>) -> io::Result<Process> {
        description.adopt(alive, self.users.as_ref(), self.groups.as_ref().ok().map(Cgroups::root))
    }

    /// The orders for a process.
    pub fn orders(&self, process: &Process) -> Orders {
        let mut known = Report::default();
        if let Err(reason) = &self.groups {
            known.lacks(Layer::Limits, reason);
        }
        process.no_group().into_iter().for_each(|reason| known.lacks(Layer::Limits, reason));
        let confinement = Confinement {
            isolation: process.isolation().clone(),
            user: process.user(),
            visible: self.reach.visible.clone(),
            network: Network::Own,
            // Memory that devices access is locked, and so is memory that clients register.
            resources: Resources {
                descriptors: None,
                locked: Some(u64::MAX),
                tasks: process.user().map(|_| self.policy.limits.tasks).filter(|tasks| *tasks > 0),
            },
            other_calls: match self.policy.mode {
                Mode::Report => OtherCalls::Report,
                Mode::On | Mode::Off => self.reach.other_calls,
            },
        };
        Orders { confinement: self.on().then_some(confinement), known, required: self.policy.require }
    }
}

impl Orders {
    /// Whether the process's files include RDMA devices. `false` without a sandbox.
    pub fn has_rdma(&self) -> bool {
        let visible = self.confinement.iter().flat_map(|confinement| &confinement.visible);
        visible.into_iter().any(|visible| visible.path == Path::new(RDMA_DEVICES))
    }

    /// Confines this process with [`confine`]. The error says why it must not serve.
    pub fn enter(&self, syscalls: &Syscalls) -> Result<Report, String> {
        let mut report = self.known.clone();
        match &self.confinement {
            Some(confinement) => {
                let own = confine(confinement, syscalls).map_err(|e| e.to_string())?;
                report.missing.extend(own.missing);
            }
            None => report.missing.push(Missing::everything("--sandbox is off")),
        }
        match report.required() {
            Some(missing) if self.required => {
                Err(format!("--require-sandbox: it would run without {missing}"))
            }
            _ => Ok(report),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_for_which_no_group_could_be_made_lacks_limits() {
        let folder = tempfile::tempdir().unwrap();
        let policy = Policy { mode: Mode::On, require: true, users: None, limits: Limits::default() };
        let reach = Reach { visible: Vec::new(), other_calls: OtherCalls::Refuse };
        let groups = Ok(Cgroups::below(&folder.path().join("gone")));
        let sandboxes = Sandboxes { policy, reach, users: None, groups, number: AtomicU64::new(0) };
        let process = sandboxes.start(&Command::new("/bin/true", "true"), &[], "worker").unwrap();
        let orders = sandboxes.orders(&process);
        let missing = orders.known.required().unwrap();
        assert!(orders.required && missing.starts_with("limits by cgroup"), "{missing}");
    }
}
