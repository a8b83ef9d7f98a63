//! The steps by which a process confines itself before it reads untrusted data, in order.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use caps::CapSet;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use serde::{Deserialize, Serialize};

use crate::filesystem::{self, Access, Visible};
use crate::start::Isolation;
use crate::syscalls::{OtherCalls, Syscalls};

/// The network that a process can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// None, except the sockets that it was given.
    Own,
    /// The machine's network.
    Host,
}

/// Limits of a process, by setrlimit(2). `None` leaves what it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Open descriptors.
    pub descriptors: Option<u64>,
    /// Bytes of memory that it may lock. `u64::MAX` means no limit.
    pub locked: Option<u64>,
    /// Threads and processes of its user. Only has an effect if the process has its own user ID.
    pub tasks: Option<u64>,
}

/// What a process may access. The daemon sends it to the process, which passes it to [`confine`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Confinement {
    /// How the process was started: [`Process::isolation`](crate::Process::isolation).
    pub isolation: Isolation,
    /// The user ID to change to, which is also the group ID: [`Process::user`](crate::Process::user).
    pub user: Option<u32>,
    /// The files that it can see.
    pub visible: Vec<Visible>,
    /// Its network.
    pub network: Network,
    /// Its limits.
    pub resources: Resources,
    /// What happens to system calls that are not in its list.
    pub other_calls: OtherCalls,
}

/// A part of the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layer {
    /// A user ID of its own.
    User,
    /// A tree of files of its own.
    Files,
    /// A PID namespace.
    Processes,
    /// An IPC namespace.
    Ipc,
    /// A network namespace.
    Network,
    /// Limits of memory, tasks and CPU by a cgroup.
    Limits,
    /// Limits by setrlimit(2).
    Resources,
    /// No capabilities, and no programs that could grant some.
    Privileges,
    /// Landlock.
    Landlock,
    /// The list of system calls.
    Syscalls,
}

impl Layer {
    /// Whether a process without this layer could access files, processes, sockets or memory of others. It
    /// could not without Landlock, which only guards the same things a second time, nor without limits, which
    /// protect the machine's resources, nor without its own user ID, because in its own namespaces it sees
    /// nothing that the daemon's ID would open.
    pub fn isolates(self) -> bool {
        !matches!(self, Layer::Limits | Layer::Resources | Layer::Landlock | Layer::User)
    }

    fn name(self) -> &'static str {
        match self {
            Layer::User => "a user ID of its own",
            Layer::Files => "a tree of files of its own",
            Layer::Processes => "a PID namespace",
            Layer::Ipc => "an IPC namespace",
            Layer::Network => "a network namespace",
            Layer::Limits => "limits by cgroup",
            Layer::Resources => "limits of resources",
            Layer::Privileges => "no privileges",
            Layer::Landlock => "Landlock",
            Layer::Syscalls => "a list of system calls",
        }
    }
}

/// A layer that is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// The layer.
    pub layer: Layer,
    /// Why.
    pub reason: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.layer.name(), self.reason)
    }
}

impl Missing {
    /// Everything is missing.
    pub fn everything(reason: &str) -> Missing {
        Missing { layer: Layer::Files, reason: format!("and every other part of a sandbox: {reason}") }
    }
}

/// The layers that a process's sandbox lacks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The missing layers.
    pub missing: Vec<Missing>,
}

impl Report {
    /// Adds a missing layer.
    pub fn lacks(&mut self, layer: Layer, reason: impl fmt::Display) {
        self.missing.push(Missing { layer, reason: reason.to_string() });
    }

    /// The missing layers that a machine should provide, or `None`. Landlock is not one of them, because
    /// other layers guard the same things.
    pub fn required(&self) -> Option<String> {
        self.list(|layer| layer != Layer::Landlock)
    }

    /// The missing layers that would keep the process away from others, or `None` if none of these is
    /// missing.
    pub fn not_isolated(&self) -> Option<String> {
        self.list(Layer::isolates)
    }

    fn list(&self, of: impl Fn(Layer) -> bool) -> Option<String> {
        let missing = self.missing.iter().filter(|missing| of(missing.layer));
        let missing: Vec<String> = missing.map(ToString::to_string).collect();
        (!missing.is_empty()).then(|| missing.join("; "))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.list(|_| true).unwrap_or_else(|| "nothing".into()))
    }
}

/// Why a process could not confine itself. It must not continue.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It has other threads, which would stay outside the sandbox.
    #[error("the process has {0} threads; it must confine itself before it starts any")]
    Threads(usize),
    /// It could not drop its privileges, for which no missing kernel feature is the reason.
    #[error("cannot give up privileges: {0}")]
    Privileges(String),
}

/// Confines this process and everything that it starts, permanently. Call it before starting threads and
/// before reading untrusted data. Returns what the machine does not provide.
pub fn confine(confinement: &Confinement, syscalls: &Syscalls) -> Result<Report, Refused> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads != 1 {
        return Err(Refused::Threads(threads));
    }
    let mut report = Report::default();
    // Raising limits needs privileges, so this comes first.
    limit(&confinement.resources, &mut report);
    let groups = Visible::groups(&confinement.visible);
    let has_files = namespaces(confinement, &mut report);
    give_up_privileges(confinement, &groups, &mut report)?;
    let restricted = landlock(confinement, has_files);
    match restricted {
        Ok(RulesetStatus::NotEnforced) => {
            report.lacks(Layer::Landlock, "the kernel has it not or has it off (lsm=)")
        }
        Ok(_) => {}
        Err(e) => report.lacks(Layer::Landlock, e),
    }
    if confinement.other_calls == OtherCalls::Report {
        report.lacks(Layer::Syscalls, "calls outside the list are only reported");
    }
    if let Err(e) = syscalls.install(confinement.other_calls) {
        report.lacks(Layer::Syscalls, format!("seccomp: {e}"));
    }
    Ok(report)
}

fn limit(resources: &Resources, report: &mut Report) {
    let wanted = [
        (Resource::RLIMIT_CORE, "core dumps", Some(0)),
        (Resource::RLIMIT_NOFILE, "open files", resources.descriptors),
        (Resource::RLIMIT_MEMLOCK, "locked memory", resources.locked),
        (Resource::RLIMIT_NPROC, "tasks", resources.tasks),
    ];
    for (resource, name, value) in wanted {
        let Some(value) = value else { continue };
        let set = setrlimit(resource, value, value).or_else(|_| {
            // Only root may raise the hard limit, so use the current one.
            let most = getrlimit(resource)?.1;
            setrlimit(resource, value.min(most), value.min(most))
        });
        if let Err(e) = set {
            report.lacks(Layer::Resources, format!("{name}: {e}"));
        }
    }
}

/// Enters namespaces. Returns whether the process has its own tree of files.
fn namespaces(confinement: &Confinement, report: &mut Report) -> bool {
    let mut enter = |flag, layer| {
        // SAFETY: a plain system call; the process has one thread.
        let entered = unsafe { libc::unshare(flag) } == 0;
        if !entered {
            report.lacks(layer, io::Error::last_os_error());
        }
        entered
    };
    let (has_mounts, own_processes) = match &confinement.isolation {
        // The clone that created the user namespace created the others, too.
        Isolation::UserNamespace => (true, true),
        isolation => {
            enter(libc::CLONE_NEWIPC, Layer::Ipc);
            if confinement.network == Network::Own {
                enter(libc::CLONE_NEWNET, Layer::Network);
            }
            (enter(libc::CLONE_NEWNS, Layer::Files), *isolation == Isolation::Root)
        }
    };
    if let Isolation::None { reason } = &confinement.isolation {
        report.lacks(Layer::Processes, reason);
    }
    if !has_mounts {
        return false;
    }
    match filesystem::enter(&confinement.visible, own_processes) {
        Ok(()) => true,
        Err((what, e)) => {
            report.lacks(Layer::Files, format!("{what}: {e}"));
            false
        }
    }
}

fn give_up_privileges(confinement: &Confinement, groups: &[u32], report: &mut Report) -> Result<(), Refused> {
    let refused = |what: &str, e: &dyn fmt::Display| Refused::Privileges(format!("{what}: {e}"));
    // Without CAP_SETPCAP the set stays, and no_new_privs makes it meaningless.
    if caps::has_cap(None, CapSet::Effective, caps::Capability::CAP_SETPCAP).unwrap_or(false) {
        caps::clear(None, CapSet::Bounding).map_err(|e| refused("the bounding set of capabilities", &e))?;
    }
    match (&confinement.isolation, confinement.user) {
        // The process is user 0 in its namespace already, which is mapped to this user.
        (Isolation::UserNamespace, user) => {
            if user.is_none() {
                report.lacks(Layer::User, "the daemon may not change users");
            }
        }
        (_, Some(user)) => {
            let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
            let (user, group) = (Uid::from_raw(user), Gid::from_raw(user));
            setgroups(&groups).map_err(|e| refused("setgroups", &e))?;
            setresgid(group, group, group).map_err(|e| refused("setresgid", &e))?;
            setresuid(user, user, user).map_err(|e| refused("setresuid", &e))?;
        }
        (_, None) => report.lacks(Layer::User, "the daemon may not change users"),
    }
    for (set, name) in [
        (CapSet::Ambient, "ambient"),
        (CapSet::Inheritable, "inheritable"),
        (CapSet::Effective, "effective"),
        (CapSet::Permitted, "permitted"),
    ] {
        caps::clear(None, set).map_err(|e| refused(&format!("the {name} set of capabilities"), &e))?;
    }
    nix::sys::prctl::set_no_new_privs().map_err(|e| refused("no_new_privs", &e))?;
    // No core dump, and no access for other processes of the same user.
    nix::sys::prctl::set_dumpable(false).map_err(|e| refused("PR_SET_DUMPABLE", &e))
}

/// The Landlock features that are used if the kernel has them.
const LANDLOCK: ABI = ABI::V6;

fn landlock(confinement: &Confinement, has_files: bool) -> Result<RulesetStatus, landlock::RulesetError> {
    let mut ruleset =
        Ruleset::default().handle_access(AccessFs::from_all(LANDLOCK))?.scope(Scope::from_all(LANDLOCK))?;
    if confinement.network == Network::Own {
        ruleset = ruleset.handle_access(AccessNet::from_all(LANDLOCK))?;
    }
    let mut ruleset = ruleset.create()?;
    let read = AccessFs::from_read(LANDLOCK);
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev | AccessFs::ReadDir;
    let all = AccessFs::from_all(LANDLOCK);
    let mut rules: Vec<(PathBuf, _)> = confinement
        .visible
        .iter()
        .map(|visible| {
            let access = match visible.access {
                Access::Read => read,
                Access::Write => all & !(AccessFs::Execute | AccessFs::MakeBlock | AccessFs::MakeChar),
                Access::Device => device,
            };
            (visible.path.clone(), access)
        })
        .collect();
    let scratch = all & !(AccessFs::Execute | AccessFs::MakeBlock | AccessFs::MakeChar);
    let facts = AccessFs::ReadFile | AccessFs::ReadDir;
    // libcuda names its threads by writing /proc/self/task/TID/comm, which it opens like a regular file.
    // cuInit fails if that fails.
    let own = facts | AccessFs::WriteFile | AccessFs::Truncate;
    if has_files {
        // All of these files belong to the process itself.
        rules.push(("/proc".into(), own));
        rules.extend(["/tmp", "/dev/shm"].map(|path| (path.into(), scratch)));
    } else {
        // The machine's /proc: allow this process and facts about the machine, but no other process.
        let names =
            ["cpuinfo", "meminfo", "stat", "devices", "version", "driver", "sys", "modules", "filesystems"];
        rules.push(("/proc/self".into(), own));
        rules.extend(names.map(|name| (Path::new("/proc").join(name), facts)));
    }
    for (path, access) in rules {
        // A path that does not exist needs no rule.
        let Ok(file) = PathFd::new(&path) else { continue };
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(LANDLOCK) };
        ruleset = ruleset.add_rule(PathBeneath::new(file, access))?;
    }
    Ok(ruleset.restrict_self()?.ruleset)
}
