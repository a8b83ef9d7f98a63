//! Limits of memory, tasks and CPU time, with cgroup v2.
//!
//! A daemon [claims](Cgroups::claim) its own cgroup and divides it: a child named `daemon` for itself, and
//! one for each process that it starts. systemd must have delegated the cgroup (`Delegate=yes`). Without
//! systemd, root makes a cgroup at the top of the tree.

use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Limits of a process and its descendants. 0 means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory, including swap.
    pub memory: u64,
    /// Threads and processes.
    pub tasks: u64,
    /// Percent of one CPU: 250 is two and a half CPUs.
    pub cpu_percent: u64,
}

/// Why cgroups cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// No cgroup v2 tree is mounted.
    #[error("no cgroup v2 file system is mounted")]
    Version,
    /// The tree lacks the controllers.
    #[error("{} has only the controllers {:?}; memory and pids are needed (systemd.unified_cgroup_hierarchy=1 on the kernel command line)", .path.display(), .found)]
    Controllers {
        /// The cgroup.
        path: PathBuf,
        /// The controllers that it has.
        found: String,
    },
    /// systemd manages the tree and has not delegated this part.
    #[error("systemd has not delegated {}; start the daemon as a service with Delegate=yes", .0.display())]
    NotDelegated(PathBuf),
    /// The tree cannot be changed.
    #[error("cannot change {}", .path.display())]
    Change {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Unavailable {
    /// Whether the error says that the group exists already.
    pub(crate) fn exists(&self) -> bool {
        matches!(self, Unavailable::Change { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

/// The daemon's part of the tree.
#[derive(Debug)]
pub struct Cgroups {
    root: PathBuf,
    has_cpu: bool,
    /// Whether this daemon created `root` and removes it at its end.
    made: bool,
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        if self.made {
            // The group stays if a process in it still runs.
            let _ = fs::remove_dir(&self.root);
        }
    }
}

/// The cgroup of one process. Removed when dropped.
#[derive(Debug)]
pub struct Group {
    path: PathBuf,
    folder: OwnedFd,
    /// Whether another daemon created it, whose own cgroup may have to be removed afterwards.
    adopted: bool,
}

impl Group {
    /// A group that another daemon created, or this process when it was that daemon: `own` is where this one
    /// creates its groups.
    pub(crate) fn adopt(path: &Path, own: Option<&Path>) -> io::Result<Group> {
        let folder = OwnedFd::from(fs::File::open(path)?);
        Ok(Group { path: path.to_owned(), folder, adopted: path.parent() != own })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves a process into this group.
    pub(crate) fn add(&self, pid: i32) -> io::Result<()> {
        fs::write(self.path.join("cgroup.procs"), pid.to_string())
    }

    pub(crate) fn folder(&self) -> &OwnedFd {
        &self.folder
    }

    /// Whether a process of this group was killed because the group had no memory left.
    pub fn ran_out_of_memory(&self) -> bool {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        events.lines().filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count.trim() != "0")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Kills the processes that are left. Older kernels do not have this file.
        let _ = write(&self.path.join("cgroup.kill"), "1");
        // The kernel may still be removing the last process.
        for _ in 0..50 {
            if !matches!(fs::remove_dir(&self.path), Err(e) if e.kind() == io::ErrorKind::ResourceBusy) {
                if let Some(parent) = self.path.parent().filter(|_| self.adopted) {
                    // This fails as long as the cgroup contains other groups or a daemon.
                    let _ = fs::remove_dir(parent);
                }
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// Writes a file of the tree in one call.
fn write(path: &Path, text: &str) -> Result<(), Unavailable> {
    let written =
        fs::OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| Unavailable::Change { path: path.to_owned(), source })
}

/// The daemon's own part of its cgroup.
const DAEMON: &str = "daemon";

fn make(path: &Path) -> Result<(), Unavailable> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(Unavailable::Change { path: path.to_owned(), source: e })
        }
        _ => Ok(()),
    }
}

/// Where the cgroup v2 tree is mounted.
pub(crate) fn mount_point(mounts: &str) -> Option<PathBuf> {
    let mut fields = mounts.lines().map(|line| line.split(' '));
    fields.find_map(|mut line| {
        let (_, point, kind) = (line.next()?, line.next()?, line.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(point))
    })
}

impl Cgroups {
    /// Where groups are created.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Groups below any folder.
    #[cfg(test)]
    pub(crate) fn below(root: &Path) -> Cgroups {
        Cgroups { root: root.to_owned(), has_cpu: false, made: false }
    }

    /// Takes over this process's cgroup, or creates one named `name` at the top of the tree, for groups of
    /// processes. Moves this process into a child of it, because a cgroup that limits children may not
    /// contain processes itself.
    pub fn claim(name: &str) -> Result<Cgroups, Unavailable> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let top = mount_point(&mounts).ok_or(Unavailable::Version)?;
        let of_process = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = of_process.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let mut root = top.join(path);
        // This process may already be in the child `daemon`: an earlier daemon in this process has created
        // it, or systemd has started the process there (DelegateSubgroup=). The cgroup that counts is then
        // the parent.
        if let Some(divided) = root.parent().filter(|_| root.ends_with(DAEMON)) {
            let divided = divided.to_owned();
            let children = fs::read_to_string(divided.join("cgroup.subtree_control")).unwrap_or_default();
            if children.split_whitespace().any(|controller| controller == "memory") || delegated(&divided) {
                root = divided;
            }
        }
        let found = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        let has = |name: &str| found.split_whitespace().any(|controller| controller == name);
        if !has("memory") || !has("pids") {
            return Err(Unavailable::Controllers { path: root, found: found.trim().to_owned() });
        }
        let has_cpu = has("cpu");
        let controllers = if has_cpu { "+memory +pids +cpu" } else { "+memory +pids" };
        // Only the root of the tree has no type.
        let made = !root.join("cgroup.type").exists();
        if made {
            write(&root.join("cgroup.subtree_control"), controllers)?;
            root = root.join(format!("{name}-{}", std::process::id()));
            make(&root)?;
        } else {
            if Path::new("/run/systemd/system").exists() && !delegated(&root) {
                return Err(Unavailable::NotDelegated(root));
            }
            let own = root.join(DAEMON);
            make(&own)?;
            write(&own.join("cgroup.procs"), &std::process::id().to_string())?;
        }
        write(&root.join("cgroup.subtree_control"), controllers)?;
        // Remove the groups that a crashed daemon has left. Groups with processes cannot be removed.
        for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(entry.path());
        }
        Ok(Cgroups { root, has_cpu, made })
    }

    /// Creates a group with limits. If a process of the group runs out of memory, the kernel ends the whole
    /// group and nothing else.
    ///
    /// # Errors
    /// Also if a group with this name exists.
    pub fn make(&self, name: &str, limits: &Limits) -> Result<Group, Unavailable> {
        let path = self.root.join(name);
        fs::create_dir(&path).map_err(|source| Unavailable::Change { path: path.clone(), source })?;
        let failed = |source| Unavailable::Change { path: path.clone(), source };
        let folder = OwnedFd::from(fs::File::open(&path).map_err(failed)?);
        let group = Group { path: path.clone(), folder, adopted: false };
        write(&path.join("memory.oom.group"), "1")?;
        if limits.memory != 0 {
            write(&path.join("memory.max"), &limits.memory.to_string())?;
            // The file does not exist without swap accounting; then there is nothing to limit.
            if path.join("memory.swap.max").exists() {
                write(&path.join("memory.swap.max"), "0")?;
            }
        }
        if limits.tasks != 0 {
            write(&path.join("pids.max"), &limits.tasks.to_string())?;
        }
        if limits.cpu_percent != 0 && self.has_cpu {
            // Microseconds in each period of 100 ms.
            write(&path.join("cpu.max"), &format!("{} 100000", limits.cpu_percent.saturating_mul(1000)))?;
        }
        Ok(group)
    }
}

/// Whether systemd has delegated a cgroup, which it marks with an extended attribute.
fn delegated(path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    [c"user.delegate", c"trusted.delegate"].iter().any(|name| {
        let mut value = [0_u8; 8];
        // SAFETY: two strings that end with NUL, and a buffer with its size.
        let length =
            unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        length == 1 && value[0] == b'1'
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_found_in_the_mounts() {
        let mounts = "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(mount_point(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mount_point("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn the_end_of_a_group_that_was_taken_over_leaves_this_daemons_own() {
        for (own, stays) in [(true, true), (false, false)] {
            let folder = tempfile::tempdir().unwrap();
            let daemon = folder.path().join("rgpu-server-7");
            let path = daemon.join("worker-0");
            fs::create_dir_all(&path).unwrap();
            drop(Group::adopt(&path, own.then_some(daemon.as_path())).unwrap());
            assert_eq!((path.exists(), daemon.exists()), (false, stays));
        }
    }

    #[test]
    fn without_its_controllers_the_message_names_them() {
        let error =
            Unavailable::Controllers { path: "/sys/fs/cgroup/unified".into(), found: "hugetlb".into() };
        assert!(
            error.to_string().starts_with("/sys/fs/cgroup/unified has only the controllers \"hugetlb\""),
            "{error}"
        );
    }
}
