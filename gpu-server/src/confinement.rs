//! What a worker may reach, from both ends: the daemon decides with [`Confining`], and the worker applies it
//! with [`enter`] before it loads a driver.
//!
//! A worker is confined from its first line on, long before a client's data can reach it: everything it loads
//! later, such as the driver's compiler, runs inside. Which client it will serve is not known yet, so nothing
//! here depends on the client; the client only determines which connections the worker gets.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use sandbox::{
    Access, Argument, Isolation, Limits, OtherCalls, Policy, Process, Reach, Report, Sandboxes, Syscalls,
    Visible,
};
use serde::{Deserialize, Serialize};

use crate::config::{Backend, Backing, Sandbox};

/// The worker's part, in its first message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Orders {
    /// What to do.
    sandbox: sandbox::Orders,
    /// The calls it may make.
    calls: Calls,
}

/// A list of system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Calls {
    /// What the software GPU needs. Any other call ends the worker.
    Software,
    /// What NVIDIA's driver needs. Any other call is refused, and the log names it.
    Cuda,
}

/// The daemon's part.
pub struct Confining {
    sandboxes: Sandboxes,
    calls: Calls,
}

impl Confining {
    /// Prepares the sandboxes of this daemon's workers.
    /// `mps`: the folder of the Multi-Process Service's sockets.
    pub fn new(options: &Sandbox, backing: &Backing, mps: Option<&Path>) -> Confining {
        let calls = if backing.backend == Backend::Software { Calls::Software } else { Calls::Cuda };
        let policy = Policy {
            mode: options.mode,
            require: options.require,
            users: Some(options.users),
            limits: Limits {
                memory: memory_limit(options.memory),
                tasks: options.tasks,
                cpu_percent: options.cpu_percent,
            },
        };
        let other_calls = match calls {
            Calls::Software => OtherCalls::End,
            Calls::Cuda => OtherCalls::Refuse,
        };
        let reach = Reach { visible: visible(options, backing, calls, mps), other_calls };
        Confining { sandboxes: Sandboxes::new(policy, "rgpu-server", reach), calls }
    }

    /// Whether workers are started in namespaces.
    pub fn on(&self) -> bool {
        self.sandboxes.on()
    }

    /// Takes over a worker that the previous daemon started.
    pub fn adopt(&self, described: &sandbox::Description, alive: Option<OwnedFd>) -> io::Result<Process> {
        self.sandboxes.adopt(described, alive)
    }

    /// Starts a worker with this descriptor.
    pub fn start(
        &self,
        command: &sandbox::Command,
        socket: std::os::fd::BorrowedFd<'_>,
    ) -> Result<Process, sandbox::Failed> {
        let process = self.sandboxes.start(command, &[socket], "worker")?;
        if let Some(reason) = process.no_group() {
            tracing::warn!("a worker runs without limits by cgroup: {reason}");
        }
        Ok(process)
    }

    /// What a worker must do.
    pub fn orders(&self, process: &Process) -> Orders {
        Orders { sandbox: self.sandboxes.orders(process), calls: self.calls }
    }
}

/// Memory limit of a worker's cgroup in bytes: by default, half of the machine's memory.
pub fn memory_limit(option: u64) -> u64 {
    if option > 0 {
        return option;
    }
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    total.map_or(0, |kib| kib * 1024 / 2)
}

/// Files that workers can see.
fn visible(options: &Sandbox, backing: &Backing, calls: Calls, mps: Option<&Path>) -> Vec<Visible> {
    let mut visible: Vec<Visible> = Visible::basic_devices().collect();
    let verbs = Path::new(sandbox::RDMA_DEVICES).exists();
    if calls == Calls::Cuda || verbs {
        visible.extend(Visible::libraries());
        visible.push(Visible::new("/sys", Access::Read));
        let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders: Vec<PathBuf> =
            std::env::split_paths(&folders).filter(|path| path.is_absolute()).collect();
        visible.extend(folders.into_iter().map(|path| Visible::new(path, Access::Read)));
    }
    if calls == Calls::Cuda {
        visible.extend(nvidia_nodes().into_iter().map(|path| Visible::new(path, Access::Device)));
        visible.extend(["/etc/nvidia", "/usr/share/nvidia"].map(|path| Visible::new(path, Access::Read)));
        visible.extend(backing.cupti.iter().map(|path| Visible::new(path, Access::Read)));
    }
    if verbs {
        visible.extend(Visible::rdma());
    }
    // To connect to a socket needs no permission to write its folder.
    visible.extend(mps.map(|path| Visible::new(path, Access::Read)));
    visible.extend(options.files.iter().map(|path| Visible::new(path, Access::Read)));
    visible.sort_by(|a, b| a.path.cmp(&b.path));
    visible.dedup_by(|a, b| a.path == b.path);
    visible
}

/// The device nodes of NVIDIA's driver.
fn nvidia_nodes() -> Vec<PathBuf> {
    let names = std::fs::read_dir("/dev").into_iter().flatten().flatten().map(|entry| entry.path());
    names
        .filter(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"nvidia")))
        .collect()
}

impl Calls {
    fn list(self, verbs: bool) -> Syscalls {
        use libc::*;
        let list = match self {
            Calls::Software => Syscalls::basic().files(),
            Calls::Cuda => Syscalls::basic()
                .files()
                // A device node accepts whatever ioctls its driver handles; none of the worker's other
                // descriptors has ioctls that reach further.
                .device_ioctls()
                .allow(&[SYS_set_mempolicy, SYS_mbind, SYS_migrate_pages, SYS_move_pages])
                .allow(&[
                    SYS_sched_setscheduler,
                    SYS_sched_getattr,
                    SYS_sched_get_priority_max,
                    SYS_sched_get_priority_min,
                ])
                .allow(&[
                    SYS_getpriority,
                    SYS_setpriority,
                    SYS_getpgrp,
                    SYS_getpgid,
                    SYS_getsid,
                    SYS_getgroups,
                    SYS_umask,
                ])
                .allow(&[
                    SYS_eventfd,
                    SYS_epoll_create,
                    SYS_signalfd4,
                    SYS_inotify_init1,
                    SYS_wait4,
                    SYS_waitid,
                ])
                // Its own in-memory files, below /tmp and /dev/shm.
                .allow(&[
                    SYS_mkdir,
                    SYS_mkdirat,
                    // libcuda tries to name devices below /dev/char.
                    SYS_symlink,
                    SYS_symlinkat,
                    SYS_unlink,
                    SYS_unlinkat,
                    SYS_rename,
                    SYS_renameat,
                    SYS_renameat2,
                    SYS_rmdir,
                ])
                .allow(&[
                    SYS_fchmod,
                    SYS_chmod,
                    SYS_fchmodat,
                    SYS_fsync,
                    SYS_fdatasync,
                    SYS_truncate,
                    SYS_getdents,
                    SYS_chdir,
                ])
                // libcuda listens at an abstract socket, which is in the worker's own network namespace.
                .allow_if(SYS_socket, &[Argument::is(0, AF_UNIX as u32)])
                .allow(&[
                    SYS_bind,
                    SYS_listen,
                    SYS_accept,
                    SYS_accept4,
                    SYS_connect,
                    SYS_prctl,
                    SYS_pidfd_open,
                ])
                // libcuda tries to load the kernel module with nvidia-modprobe. The daemon has already done
                // that.
                .absent(SYS_fork, EPERM)
                .absent(SYS_vfork, EPERM)
                .absent(SYS_execve, EPERM)
                .absent(SYS_mknod, EPERM)
                .absent(SYS_mknodat, EPERM)
                // NVML looks at the machine's network.
                .absent(SYS_perf_event_open, EACCES),
        };
        if verbs { list.rdma() } else { list }
    }
}

/// Confines this worker. An error says why it must not serve.
pub fn enter(orders: &Orders) -> Result<Report, String> {
    // If the machine runs out of memory, workers are killed first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    orders.sandbox.enter(&orders.calls.list(orders.sandbox.has_rdma()))
}

/// Refuses a device whose kernels can reach the worker's own memory if there is no sandbox around the worker.
pub fn pageable_memory(report: &Report) -> Result<(), String> {
    match report.not_isolated() {
        None => Ok(()),
        Some(missing) => Err(format!(
            "kernels can reach pageable memory on this GPU (attribute 88), and so could take over a worker, but workers run without {missing}"
        )),
    }
}

/// How a worker was started, for its status.
pub fn isolation(isolation: &Isolation) -> &'static str {
    match isolation {
        Isolation::Root => "root",
        Isolation::UserNamespace => "user namespace",
        Isolation::None { .. } => "none",
    }
}
