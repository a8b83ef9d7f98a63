//! The real state of a running process's sandbox, according to the kernel.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The state of a process. A field is `None` if this process may not read it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inspected {
    /// Its effective user ID.
    pub user: Option<u32>,
    /// Namespaces that it does not share with this process: some of `user`, `mnt`, `pid`, `ipc`, `net`.
    pub namespaces: Option<Vec<String>>,
    /// Filters of system calls.
    pub filters: Option<u32>,
    /// Whether starting a program cannot give it privileges.
    pub no_new_privileges: Option<bool>,
    /// Its effective capabilities, as a bit set. In a user namespace they only have an effect there.
    pub capabilities: Option<u64>,
    /// Its cgroup, if that is another one than this process's.
    pub group: Option<String>,
    /// Maximum bytes of memory of its cgroup.
    pub memory_limit: Option<u64>,
    /// Maximum tasks of its cgroup.
    pub task_limit: Option<u64>,
    /// Maximum bytes of a core dump.
    pub core_limit: Option<u64>,
    /// Whether other processes of its user may trace it and read its memory, and it may dump core. Unknown
    /// (`None`) for root and in a user namespace.
    pub dumpable: Option<bool>,
}

/// Reads the state of a process.
pub fn inspect(pid: u32) -> Inspected {
    let folder = Path::new("/proc").join(pid.to_string());
    let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    };
    let first = |name: &str| field(name)?.into_iter().next();
    let user = field("Uid").and_then(|ids| ids.get(1)?.parse().ok());
    let namespaces = ["user", "mnt", "pid", "ipc", "net"].into_iter().map(|name| {
        let theirs = fs::read_link(folder.join("ns").join(name)).ok()?;
        let ours = fs::read_link(Path::new("/proc/self/ns").join(name)).ok()?;
        Some((name, theirs != ours))
    });
    let namespaces: Option<Vec<String>> = namespaces.collect::<Option<Vec<_>>>().map(|all| {
        all.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name.to_owned()).collect()
    });
    let group_of = |text: String| text.lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned));
    let theirs = fs::read_to_string(folder.join("cgroup")).ok().and_then(group_of);
    let ours = fs::read_to_string("/proc/self/cgroup").ok().and_then(group_of);
    let group = theirs.filter(|theirs| ours.as_ref() != Some(theirs));
    let limit = |file: &str| {
        let group = group.as_ref()?;
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        let top = crate::cgroup::mount_point(&mounts)?;
        let text = fs::read_to_string(top.join(group.trim_start_matches('/')).join(file)).ok()?;
        text.trim().parse().ok()
    };
    let core = fs::read_to_string(folder.join("limits")).ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("Max core file size"))?;
        line.split_whitespace().nth(4)?.parse().ok()
    });
    // The kernel gives the files of processes that are not dumpable to root (proc(5)).
    let dumpable = namespaces.as_ref().zip(user).and_then(|(namespaces, user)| {
        let owner = fs::metadata(folder.join("limits")).ok()?.uid();
        (user != 0 && !namespaces.iter().any(|name| name == "user")).then_some(owner == user)
    });
    Inspected {
        user,
        dumpable,
        namespaces,
        filters: first("Seccomp_filters").and_then(|count| count.parse().ok()),
        no_new_privileges: first("NoNewPrivs").map(|value| value == "1"),
        capabilities: first("CapEff").and_then(|bits| u64::from_str_radix(&bits, 16).ok()),
        memory_limit: limit("memory.max"),
        task_limit: limit("pids.max"),
        core_limit: core,
        group,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_shares_its_own_namespaces() {
        let inspected = inspect(std::process::id());
        assert_eq!(inspected.user, Some(nix::unistd::geteuid().as_raw()));
        assert_eq!(inspected.namespaces, Some(Vec::new()));
        assert_eq!(inspected.group, None);
    }

    #[test]
    fn a_process_that_is_gone_gives_nothing() {
        assert_eq!(inspect(u32::MAX), Inspected::default());
    }
}
