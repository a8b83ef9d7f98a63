//! From a command to a process in new namespaces.
//!
//! With `CAP_SYS_ADMIN` (the daemon is root), the process gets a PID namespace whose first process is a
//! **guard**: a copy of the daemon that closes every descriptor, waits until the daemon's end of a pipe
//! closes, and exits. The kernel then kills everything in the namespace, so nothing outlives the daemon or
//! the process. The process itself is not the first one, because the kernel would then discard signals such
//! as SIGABRT that end other processes. [`confine`](crate::confine) creates the other namespaces.
//!
//! Without `CAP_SYS_ADMIN`, a user namespace provides the rights to create the others. The process is then
//! the first one of its PID namespace.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use caps::{CapSet, Capability};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::pipe2;
use serde::{Deserialize, Serialize};

use crate::cgroup::Group;
use crate::users::{User, Users};

/// A program to start.
#[derive(Debug, Clone)]
pub struct Command {
    program: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    personality: Option<libc::c_ulong>,
}

fn c_string(text: &OsStr) -> CString {
    // This process's arguments and variables contain no NUL, and neither do the arguments of a program here.
    CString::new(text.as_bytes()).unwrap_or_default()
}

impl Command {
    /// Runs `program` (a path) with `name` as its first argument and this process's environment.
    pub fn new(program: impl AsRef<OsStr>, name: &str) -> Command {
        let environment = std::env::vars_os().map(|(name, value)| {
            let mut variable = name;
            variable.push("=");
            variable.push(value);
            c_string(&variable)
        });
        Command {
            program: c_string(program.as_ref()),
            arguments: vec![c_string(name.as_ref())],
            environment: environment.collect(),
            personality: None,
        }
    }

    /// Adds arguments.
    pub fn arguments<T: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = T>) -> Command {
        self.arguments.extend(arguments.into_iter().map(|argument| c_string(argument.as_ref())));
        self
    }

    /// Sets a variable of its environment.
    pub fn variable(mut self, name: &str, value: impl AsRef<OsStr>) -> Command {
        let mut variable = OsString::from(format!("{name}="));
        self.environment.retain(|other| !other.as_bytes().starts_with(variable.as_bytes()));
        variable.push(value);
        self.environment.push(c_string(&variable));
        self
    }

    /// Removes variables from its environment.
    pub fn without_variables(mut self, names: &[&str]) -> Command {
        let named = |variable: &CString| {
            let name = variable.as_bytes().split(|byte| *byte == b'=').next().unwrap_or_default();
            names.iter().any(|removed| removed.as_bytes() == name)
        };
        self.environment.retain(|variable| !named(variable));
        self
    }

    /// Sets its execution domain (personality(2)).
    pub fn personality(mut self, personality: libc::c_ulong) -> Command {
        self.personality = Some(personality);
        self
    }
}

/// Why a process could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call of the starting process failed.
    #[error("{0} failed")]
    Call(&'static str, #[source] io::Error),
    /// The new process could not run the program.
    #[error("cannot run {program}")]
    Program {
        /// Its path.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// How a process was started, which determines the rights with which it confines itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Isolation {
    /// In its own PID namespace, as root.
    Root,
    /// In a new user namespace and other new namespaces.
    UserNamespace,
    /// In the daemon's namespaces.
    None {
        /// Why it has no namespaces of its own.
        reason: String,
    },
}

/// How a process gets its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunAs {
    /// The process changes its user ID.
    Itself,
    /// The process is user 0 in its user namespace, which is mapped to this user ID.
    Mapped(u32),
}

/// Sends signals to a process, but never to another process with the same ID after the process has ended.
#[derive(Debug, Clone)]
pub struct Handle(Arc<OwnedFd>);

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// From a process's descriptor (`pidfd_open(2)`), such as another daemon has kept.
impl From<OwnedFd> for Handle {
    fn from(pidfd: OwnedFd) -> Handle {
        Handle(Arc::new(pidfd))
    }
}

impl Handle {
    /// Kills the process. If it has its own PID namespace, everything that it has started dies with it.
    pub fn kill(&self) {
        // SAFETY: a plain system call on a descriptor that is open as long as `self`. It fails if the process
        // has ended, which is fine.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.0.as_raw_fd(), libc::SIGKILL, 0, 0) };
    }

    /// Waits until the process has ended.
    pub fn wait(&self) -> io::Result<()> {
        self.poll(PollTimeout::NONE).map(drop)
    }

    /// Waits until the process has ended, for so long at most. Returns whether it has.
    pub fn ends_within(&self, limit: Duration) -> io::Result<bool> {
        self.poll(PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX))
    }

    fn poll(&self, timeout: PollTimeout) -> io::Result<bool> {
        loop {
            match poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(ended) => return Ok(ended > 0),
                Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// The first process of a PID namespace.
#[derive(Debug)]
struct Guard {
    pid: libc::pid_t,
    handle: Handle,
    /// The guard exits when this is closed, also by the daemon's death.
    alive: OwnedFd,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.handle.kill();
        // This returns when everything in the namespace is gone.
        let _ = reap(self.pid, &self.handle);
    }
}

/// A process that another daemon may have started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Named {
    pid: libc::pid_t,
    /// When it started, in clock ticks since the machine started. No two processes share both ID and start
    /// time.
    started: u64,
}

impl Named {
    fn new(pid: libc::pid_t) -> io::Result<Named> {
        Ok(Named { pid, started: start_time(pid)? })
    }

    /// A handle for signals to it and for its end. An error if it has ended and was removed.
    fn open(&self) -> io::Result<Handle> {
        // SAFETY: a plain system call, which creates a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for this call, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        // The descriptor always refers to the same process, so the values that are read now belong to this
        // process, or it is gone.
        if start_time(self.pid)? != self.started {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(Handle(Arc::new(fd)))
    }
}

/// When a process started, in clock ticks since the machine started.
fn start_time(pid: libc::pid_t) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name in parentheses, which may contain anything. The start time is the 22nd
    // field.
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest);
    let field = rest.and_then(|rest| rest.split_whitespace().nth(19)?.parse().ok());
    field.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// The description of a process with which another daemon can take it over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    process: Named,
    guard: Option<Named>,
    isolation: Isolation,
    user: Option<u32>,
    group: Option<PathBuf>,
}

impl Description {
    /// The process's ID.
    pub fn pid(&self) -> u32 {
        self.process.pid.cast_unsigned()
    }

    /// Takes over the process, which another daemon has started. `alive` is the descriptor that the other
    /// daemon got from [`Process::alive`]. `users` is this daemon's allocator, and `groups` is where it
    /// creates cgroups.
    pub(crate) fn adopt(
        &self,
        alive: Option<OwnedFd>,
        users: Option<&Arc<Users>>,
        groups: Option<&Path>,
    ) -> io::Result<Process> {
        let handle = self.process.open()?;
        let guard = match (&self.guard, alive) {
            (Some(guard), Some(alive)) => Some(Guard { pid: guard.pid, handle: guard.open()?, alive }),
            (Some(_), None) => return Err(io::Error::other("nothing holds its namespace")),
            (None, _) => None,
        };
        let group = self.group.as_ref().map(|path| Group::adopt(path, groups)).transpose()?;
        let user = self.user.zip(users).map(|(id, users)| users.adopt(id));
        let (pid, isolation) = (self.process.pid, self.isolation.clone());
        Ok(Process { pid, handle, isolation, ended: false, guard, group, no_group: None, user })
    }
}

/// A process that was started. Dropping it kills the process.
#[derive(Debug)]
pub struct Process {
    pid: libc::pid_t,
    handle: Handle,
    isolation: Isolation,
    ended: bool,
    // Dropped in this order: first everything else in the namespace ends, then the group is removed, and then
    // the user ID, which no process has any more, is freed.
    guard: Option<Guard>,
    group: Option<Group>,
    /// Why it has no group, if others have.
    no_group: Option<String>,
    user: Option<User>,
}

impl Process {
    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.pid.cast_unsigned()
    }

    /// A handle for sending signals to it from other threads.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// How it was started, for its [`Confinement`](crate::Confinement).
    pub fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    /// Its user ID, for its [`Confinement`](crate::Confinement). `None` if it keeps the daemon's.
    pub fn user(&self) -> Option<u32> {
        self.user.as_ref().map(User::id)
    }

    /// Notes that no group could be made for it, and why.
    pub(crate) fn lacks_group(&mut self, why: Option<String>) {
        self.no_group = why;
    }

    /// Why it has no cgroup, if only it has none.
    pub fn no_group(&self) -> Option<&str> {
        self.no_group.as_deref()
    }

    /// Its cgroup.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// Its description for another daemon, which can take it over with this and [`alive`](Self::alive).
    pub fn describe(&self) -> io::Result<Description> {
        Ok(Description {
            process: Named::new(self.pid)?,
            guard: self.guard.as_ref().map(|guard| Named::new(guard.pid)).transpose()?,
            isolation: self.isolation.clone(),
            user: self.user(),
            group: self.group.as_ref().map(|group| group.path().to_owned()),
        })
    }

    /// If its namespace has a guard: the descriptor whose last close ends the process.
    pub fn alive(&self) -> Option<BorrowedFd<'_>> {
        self.guard.as_ref().map(|guard| guard.alive.as_fd())
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// If it has ended and its status is unknown, because another daemon had started it.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = reap(self.pid, &self.handle);
        self.ended = true;
        self.guard = None;
        status
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.ended {
            self.handle.kill();
            // It is gone now in any case.
            let _ = self.wait();
        }
    }
}

/// Waits for the end of a child.
pub(crate) fn reap(pid: libc::pid_t, handle: &Handle) -> io::Result<ExitStatus> {
    let mut status = 0;
    loop {
        // SAFETY: writes the status to a variable that lives during the call.
        if unsafe { libc::waitpid(pid, &mut status, 0) } == pid {
            return Ok(ExitStatus::from_raw(status));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // It is not this process's child.
            Some(libc::ECHILD) => return handle.wait().and(Err(error)),
            _ => return Err(error),
        }
    }
}

/// Whether this process has a capability.
fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false)
}

/// Starts a process. It inherits only `descriptors`, under their numbers in this process, and this process's
/// standard error for its log. It runs as `user` once it has confined itself; without the rights to change
/// users, `user` must be `None`.
pub fn start(
    command: &Command,
    descriptors: &[BorrowedFd<'_>],
    user: Option<User>,
    group: Option<Group>,
) -> Result<Process, Error> {
    let started = if has(Capability::CAP_SYS_ADMIN) {
        in_pid_namespace(command, descriptors, group.as_ref())?
    } else {
        in_user_namespace(command, descriptors, user.as_ref(), group.as_ref())?
    };
    let Started { pid, handle, guard, isolation } = started;
    Ok(Process { pid, handle, isolation, ended: false, guard, group, no_group: None, user })
}

/// Starts a process in this process's namespaces, with its user and its rights. Otherwise like [`start`].
pub fn start_unconfined(command: &Command, descriptors: &[BorrowedFd<'_>]) -> Result<Process, Error> {
    let (pid, handle) = spawn(command, descriptors, 0, None, RunAs::Itself)?;
    let isolation = Isolation::None { reason: "it was started without a sandbox".into() };
    Ok(Process { pid, handle, isolation, ended: false, guard: None, group: None, no_group: None, user: None })
}

/// Whether this process may give other user IDs to processes.
pub fn may_change_users() -> bool {
    has(Capability::CAP_SETUID) && has(Capability::CAP_SETGID)
}

struct Started {
    pid: libc::pid_t,
    handle: Handle,
    guard: Option<Guard>,
    isolation: Isolation,
}

fn in_pid_namespace(
    command: &Command,
    descriptors: &[BorrowedFd<'_>],
    group: Option<&Group>,
) -> Result<Started, Error> {
    // A separate thread does this, because a thread cannot undo its choice of the namespace for its children.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("rgpu-start".into()).spawn_scoped(scope, || {
            // SAFETY: a plain system call.
            if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
                let reason = format!("a PID namespace: {}", io::Error::last_os_error());
                let (pid, handle) = spawn(command, descriptors, 0, group, RunAs::Itself)?;
                return Ok(Started { pid, handle, guard: None, isolation: Isolation::None { reason } });
            }
            let guard = guard()?;
            let (pid, handle) = spawn(command, descriptors, 0, group, RunAs::Itself)?;
            Ok(Started { pid, handle, guard: Some(guard), isolation: Isolation::Root })
        });
        let thread = thread.map_err(|e| Error::Call("starting a thread", e))?;
        thread
            .join()
            .unwrap_or_else(|_| Err(Error::Call("starting a process", io::Error::other("it panicked"))))
    })
}

fn in_user_namespace(
    command: &Command,
    descriptors: &[BorrowedFd<'_>],
    user: Option<&User>,
    group: Option<&Group>,
) -> Result<Started, Error> {
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET;
    let user = user.map_or_else(|| nix::unistd::geteuid().as_raw(), User::id);
    let reason = match spawn(command, descriptors, flags, group, RunAs::Mapped(user)) {
        Ok((pid, handle)) => {
            return Ok(Started { pid, handle, guard: None, isolation: Isolation::UserNamespace });
        }
        Err(Error::Call(_, e)) => format!("a user namespace: {e}"),
        Err(e) => return Err(e),
    };
    let (pid, handle) = spawn(command, descriptors, 0, group, RunAs::Itself)?;
    Ok(Started { pid, handle, guard: None, isolation: Isolation::None { reason } })
}

/// Creates a copy of this process, like fork(2), in new namespaces and in a cgroup.
///
/// # Safety
///
/// In the copy, locks that other threads hold are never released. Until it runs another program, the copy may
/// only make system calls, and must not allocate.
pub(crate) unsafe fn copy(
    flags: libc::c_int,
    group: Option<&Group>,
) -> io::Result<Option<(libc::pid_t, Handle)>> {
    let mut handle: RawFd = -1;
    // SAFETY: a structure of integers, for which zero is valid.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = u64::from(flags.cast_unsigned()) | u64::from(libc::CLONE_PIDFD.cast_unsigned());
    arguments.pidfd = ptr::from_mut(&mut handle) as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(group) = group {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = group.folder().as_raw_fd() as u64;
    }
    // SAFETY: the structure is initialized and its pointer refers to a local variable. Without CLONE_VM the
    // copy has its own memory, and the caller guarantees what it does there.
    let mut pid = unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of::<libc::clone_args>()) };
    let mut outside = None;
    if pid == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        // Container runtimes refuse the call with this error, because their filters cannot see its arguments.
        // SAFETY: the caller promises what the copy does, as above.
        pid = unsafe { old_copy(flags, &mut handle) };
        outside = group;
    }
    let pid = match pid {
        -1 => return Err(io::Error::last_os_error()),
        0 => return Ok(None),
        pid => pid as libc::pid_t,
    };
    // SAFETY: the kernel has just made this descriptor for this call, and nothing else owns it.
    let handle = Handle(Arc::new(unsafe { OwnedFd::from_raw_fd(handle) }));
    if let Some(Err(e)) = outside.map(|group| group.add(pid)) {
        handle.kill();
        let _ = reap(pid, &handle);
        return Err(e);
    }
    Ok(Some((pid, handle)))
}

/// [`copy`] with the older system call, without a cgroup. Returns the system call's result.
///
/// # Safety
///
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn old_copy(flags: libc::c_int, handle: &mut RawFd) -> libc::c_long {
    let flags = flags.cast_unsigned() | libc::CLONE_PIDFD.cast_unsigned() | libc::SIGCHLD.cast_unsigned();
    let (none, handle) = (0_usize, ptr::from_mut(handle));
    // SAFETY: without CLONE_VM the copy has its own memory and continues on a copy of this stack; the
    // descriptor is written to the caller's variable.
    unsafe { libc::syscall(libc::SYS_clone, libc::c_ulong::from(flags), none, handle, none, none) }
}

/// `CLONE_INTO_CGROUP` of `linux/sched.h`. The C library's constant has too small a type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

fn guard() -> Result<Guard, Error> {
    let (reader, alive) = pipe2(OFlag::O_CLOEXEC).map_err(|e| Error::Call("pipe2", e.into()))?;
    let pipe = reader.as_raw_fd();
    // SAFETY: the copy only makes system calls, and never leaves this block.
    let copied = unsafe { copy(0, None) }.map_err(|e| Error::Call("clone3", e))?;
    let Some((pid, handle)) = copied else {
        // SAFETY: plain system calls on numbers and on buffers of this function. The copy owns every
        // descriptor that it closes.
        unsafe {
            libc::prctl(libc::PR_SET_NAME, c"rgpu-guard".as_ptr());
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            // Orphaned processes of the namespace become this process's children: let the kernel remove them
            // when they end.
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            libc::dup2(pipe, 0);
            if libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0) != 0 {
                // Kernels before 5.9 lack the call. The daemon does not raise its limit of descriptors above
                // this.
                for fd in 1..1 << 16 {
                    libc::close(fd);
                }
            }
            let mut byte = 0_u8;
            loop {
                match libc::read(0, ptr::from_mut(&mut byte).cast(), 1) {
                    -1 if *libc::__errno_location() == libc::EINTR => {}
                    _ => libc::_exit(0),
                }
            }
        }
    };
    Ok(Guard { pid, handle, alive })
}

/// The data for the copy, which this process prepares because the copy must not allocate.
struct Prepared<'a> {
    program: *const libc::c_char,
    arguments: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
    personality: Option<libc::c_ulong>,
    descriptors: &'a [BorrowedFd<'a>],
    null: RawFd,
    /// A byte arrives at the first one when the user namespace has its ID maps. The second one is the pipe's
    /// other end, which the copy closes, so that it notices the death of its parent.
    mapped: Option<(RawFd, RawFd)>,
    /// The copy sends the error's number here.
    failed: RawFd,
}

fn pointers(texts: &[CString]) -> Vec<*const libc::c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

fn spawn(
    command: &Command,
    descriptors: &[BorrowedFd<'_>],
    flags: libc::c_int,
    group: Option<&Group>,
    run_as: RunAs,
) -> Result<(libc::pid_t, Handle), Error> {
    let call = |name| move |e: nix::Error| Error::Call(name, e.into());
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null");
    let null = null.map_err(|e| Error::Call("opening /dev/null", e))?;
    let (failure, failed) = pipe2(OFlag::O_CLOEXEC).map_err(call("pipe2"))?;
    let (mapped, map) = pipe2(OFlag::O_CLOEXEC).map_err(call("pipe2"))?;
    let prepared = Prepared {
        program: command.program.as_ptr(),
        arguments: pointers(&command.arguments),
        environment: pointers(&command.environment),
        personality: command.personality,
        descriptors,
        null: null.as_raw_fd(),
        mapped: matches!(run_as, RunAs::Mapped(_)).then(|| (mapped.as_raw_fd(), map.as_raw_fd())),
        failed: failed.as_raw_fd(),
    };
    // SAFETY: the copy only runs `become_program`, which follows these rules and does not return.
    let copied = unsafe { copy(flags, group) }.map_err(|e| Error::Call("clone3", e))?;
    let Some((pid, handle)) = copied else {
        // SAFETY: this is the copy, which also has the strings and descriptors to which `prepared` refers.
        unsafe { become_program(&prepared) }
    };
    drop(failed);
    let undo = |error| {
        handle.kill();
        // It was just killed.
        let _ = reap(pid, &handle);
        Err(error)
    };
    if let RunAs::Mapped(user) = run_as {
        if let Err(e) = write_maps(pid, user) {
            return undo(Error::Call("mapping the user of a namespace", e));
        }
        // If the process is gone, the next read returns the reason.
        let _ = nix::unistd::write(&map, &[1]);
    }
    // The start of the program closed the pipe.
    let mut number = [0; 4];
    match nix::unistd::read(&failure, &mut number) {
        Ok(0) => Ok((pid, handle)),
        Ok(_) => {
            let source = io::Error::from_raw_os_error(i32::from_ne_bytes(number));
            let program = command.program.to_string_lossy().into_owned();
            undo(Error::Program { program, source })
        }
        Err(e) => undo(Error::Call("read", e.into())),
    }
}

/// Maps user 0 of the namespace to `user`.
fn write_maps(pid: libc::pid_t, user: u32) -> io::Result<()> {
    if !may_change_users() {
        // Otherwise an ordinary user could leave groups that restrict its rights.
        std::fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    }
    let own = user == nix::unistd::geteuid().as_raw();
    let group = if own { nix::unistd::getegid().as_raw() } else { user };
    std::fs::write(format!("/proc/{pid}/uid_map"), format!("0 {user} 1"))?;
    std::fs::write(format!("/proc/{pid}/gid_map"), format!("0 {group} 1"))
}

/// Runs the program in the copy.
///
/// # Safety
///
/// Call this once, in a process that [`copy`] created.
unsafe fn become_program(prepared: &Prepared<'_>) -> ! {
    // SAFETY: only system calls with pointers to memory of `prepared` or of this function, and no allocation.
    // User and group IDs are set by system calls instead of the C library, which would wait for threads that
    // the copy does not have.
    unsafe {
        let fail = || -> ! {
            let number = *libc::__errno_location();
            libc::write(prepared.failed, ptr::from_ref(&number).cast(), size_of_val(&number));
            libc::_exit(127)
        };
        if let Some((mapped, map)) = prepared.mapped {
            libc::close(map);
            let mut byte = 0_u8;
            // The parent must have written the ID maps before the program starts: a program of an unmapped
            // user starts without capabilities.
            loop {
                match libc::read(mapped, ptr::from_mut(&mut byte).cast(), 1) {
                    1 => break,
                    // The parent has died, and this process must not keep its descriptors.
                    0 => libc::_exit(127),
                    _ if *libc::__errno_location() == libc::EINTR => {}
                    _ => fail(),
                }
            }
            let (none, zero) = (0_usize, 0_usize);
            // This fails without the right to change users, and is not necessary then: the process has the
            // daemon's groups anyway.
            libc::syscall(libc::SYS_setgroups, none, ptr::null::<libc::gid_t>());
            if libc::syscall(libc::SYS_setresgid, zero, zero, zero) != 0
                || libc::syscall(libc::SYS_setresuid, zero, zero, zero) != 0
            {
                fail();
            }
        }
        // The daemon's terminal, if there is one, is not this process's: it gets none of its signals, and
        // cannot type into it.
        libc::setsid();
        // The standard library starts programs with the same defaults.
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        if libc::dup2(prepared.null, 0) == -1 || libc::dup2(prepared.null, 1) == -1 {
            fail();
        }
        // A second safeguard: all descriptors of this process are close-on-exec anyway. Kernels before 5.11
        // lack the flag.
        let close_on_exec = libc::CLOSE_RANGE_CLOEXEC as libc::c_uint;
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, close_on_exec);
        for descriptor in prepared.descriptors {
            if libc::fcntl(descriptor.as_fd().as_raw_fd(), libc::F_SETFD, 0) != 0 {
                fail();
            }
        }
        if let Some(personality) = prepared.personality {
            // If the call fails, the usual memory layout remains.
            libc::personality(personality);
        }
        libc::execve(prepared.program, prepared.arguments.as_ptr(), prepared.environment.as_ptr());
        fail()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_copy_that_cannot_be_put_into_its_group_is_gone() {
        // In a thread of its own, which has no other children.
        std::thread::spawn(copy_into_a_group_that_is_gone).join().unwrap();
    }

    #[cfg(target_arch = "x86_64")]
    fn copy_into_a_group_that_is_gone() {
        use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
        // For this thread: the kernel lacks the call that would put it there at once.
        let calls = [(libc::SYS_clone3, Vec::new())].into_iter().collect();
        let absent = SeccompAction::Errno(libc::ENOSYS as u32);
        let filter = SeccompFilter::new(calls, SeccompAction::Allow, absent, TargetArch::x86_64).unwrap();
        seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let group = Group::adopt(folder.path(), None).unwrap();
        folder.close().unwrap();
        // SAFETY: the copy makes system calls only.
        let copied = unsafe { copy(0, Some(&group)) };
        if matches!(copied, Ok(None)) {
            // SAFETY: plain system calls.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
        }
        assert_eq!(copied.unwrap_err().kind(), io::ErrorKind::NotFound);
        // SAFETY: a plain system call, which concerns this thread's children.
        let left = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG | libc::__WNOTHREAD) };
        assert_eq!((left, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ECHILD)));
    }

    #[test]
    fn a_copy_whose_parent_dies_before_it_has_mapped_the_user_ends() {
        let (_failure, failed) = pipe2(OFlag::O_CLOEXEC).unwrap();
        let (mapped, map) = pipe2(OFlag::O_CLOEXEC).unwrap();
        let prepared = Prepared {
            program: c"/bin/true".as_ptr(),
            arguments: pointers(&[]),
            environment: pointers(&[]),
            personality: None,
            descriptors: &[],
            null: failed.as_raw_fd(),
            mapped: Some((mapped.as_raw_fd(), map.as_raw_fd())),
            failed: failed.as_raw_fd(),
        };
        // SAFETY: the copy only runs `become_program`, which follows these rules and does not return.
        let Some((pid, handle)) = unsafe { copy(0, None) }.unwrap() else {
            // SAFETY: this is the copy, which also has what `prepared` refers to.
            unsafe { become_program(&prepared) }
        };
        // As by the parent's death.
        drop(map);
        let mut watched = [PollFd::new(handle.as_fd(), PollFlags::POLLIN)];
        let ended = poll(&mut watched, PollTimeout::from(60_000_u16));
        handle.kill();
        let status = reap(pid, &handle).unwrap();
        assert_eq!((ended, status.code()), (Ok(1), Some(127)));
    }
}
