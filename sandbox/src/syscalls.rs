//! The list of allowed system calls, and what happens to others.
//!
//! A list consists of a base and the calls that a program adds (workers in `gpu-server/src/confinement.rs`,
//! device processes in `vhost-rgpu/src/confinement.rs`). It becomes two filters in the kernel (seccomp(2)):
//! one returns an error that libraries expect for a few calls, and one only allows the listed calls.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};
use serde::{Deserialize, Serialize};

/// What happens to system calls that are not in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtherCalls {
    /// The process ends. Its log says which call it was.
    End,
    /// The call fails with EPERM. The log names each such call once.
    Refuse,
    /// The call is executed. The log names each such call once. This shows what a list lacks and does not
    /// protect anything.
    Report,
}

/// A condition on an argument.
#[derive(Debug, Clone, Copy)]
pub struct Argument {
    index: u8,
    comparison: Comparison,
    value: u64,
}

/// How an argument is compared with a value.
#[derive(Debug, Clone, Copy)]
enum Comparison {
    /// These bits of the argument are those of the value.
    Masked(u64),
    /// The lower 32 bits differ.
    Differs,
}

impl Argument {
    /// The argument with this index, starting at 0, has this value. Only the lower 32 bits are compared, as
    /// the kernel only uses these for arguments of type `int`.
    pub const fn is(index: u8, value: u32) -> Argument {
        Argument { index, comparison: Comparison::Masked(0xffff_ffff), value: value as u64 }
    }

    /// The argument has another value than this one; the lower 32 bits are compared.
    pub const fn is_not(index: u8, value: u32) -> Argument {
        Argument { index, comparison: Comparison::Differs, value: value as u64 }
    }

    /// The argument has all of these bits.
    pub const fn has(index: u8, bits: u32) -> Argument {
        Argument { index, comparison: Comparison::Masked(bits as u64), value: bits as u64 }
    }

    /// The argument has none of these bits.
    pub const fn lacks(index: u8, bits: u32) -> Argument {
        Argument { index, comparison: Comparison::Masked(bits as u64), value: 0 }
    }
}

/// A list of allowed system calls.
#[derive(Debug, Clone, Default)]
pub struct Syscalls {
    /// For each call, alternative conditions under which it is allowed; no condition means always.
    allowed: BTreeMap<i64, Vec<Vec<Argument>>>,
    /// Calls that fail with a given error and without a message.
    absent: BTreeMap<i64, i32>,
}

impl Syscalls {
    /// The calls that every program needs: for memory, threads, time, signals to itself, and its existing
    /// descriptors. They cannot open files, create sockets or start programs.
    pub fn basic() -> Syscalls {
        use libc::*;
        let always = [
            // Memory.
            SYS_brk,
            SYS_mmap,
            SYS_munmap,
            SYS_mremap,
            SYS_mprotect,
            SYS_madvise,
            SYS_mincore,
            SYS_msync,
            SYS_mlock,
            SYS_mlock2,
            SYS_munlock,
            SYS_membarrier,
            SYS_memfd_create,
            SYS_get_mempolicy,
            // Threads and waiting.
            SYS_futex,
            SYS_futex_waitv,
            SYS_set_robust_list,
            SYS_get_robust_list,
            SYS_rseq,
            SYS_gettid,
            SYS_getpid,
            SYS_getppid,
            SYS_set_tid_address,
            SYS_sched_yield,
            SYS_sched_getaffinity,
            SYS_sched_setaffinity,
            SYS_sched_getparam,
            SYS_sched_getscheduler,
            SYS_getcpu,
            SYS_exit,
            SYS_exit_group,
            SYS_nanosleep,
            SYS_clock_nanosleep,
            SYS_restart_syscall,
            SYS_arch_prctl,
            // Time, and facts about the process.
            SYS_clock_gettime,
            SYS_clock_getres,
            SYS_gettimeofday,
            SYS_time,
            SYS_times,
            SYS_getrusage,
            SYS_sysinfo,
            SYS_uname,
            SYS_getuid,
            SYS_geteuid,
            SYS_getgid,
            SYS_getegid,
            SYS_getresuid,
            SYS_getresgid,
            SYS_getrlimit,
            SYS_getrandom,
            SYS_capget,
            // Signals, which can only reach processes of the same namespace and user.
            SYS_rt_sigaction,
            SYS_rt_sigprocmask,
            SYS_rt_sigreturn,
            SYS_rt_sigpending,
            SYS_rt_sigtimedwait,
            SYS_sigaltstack,
            SYS_tgkill,
            SYS_tkill,
            SYS_kill,
            // Descriptors.
            SYS_read,
            SYS_write,
            SYS_readv,
            SYS_writev,
            SYS_pread64,
            SYS_pwrite64,
            SYS_preadv,
            SYS_pwritev,
            SYS_preadv2,
            SYS_pwritev2,
            SYS_close,
            SYS_close_range,
            SYS_dup,
            SYS_dup2,
            SYS_dup3,
            SYS_fcntl,
            SYS_fstat,
            SYS_lseek,
            SYS_ftruncate,
            SYS_fallocate,
            SYS_pipe,
            SYS_pipe2,
            SYS_eventfd2,
            SYS_timerfd_create,
            SYS_timerfd_settime,
            SYS_timerfd_gettime,
            SYS_poll,
            SYS_ppoll,
            SYS_select,
            SYS_pselect6,
            SYS_epoll_create1,
            SYS_epoll_ctl,
            SYS_epoll_wait,
            SYS_epoll_pwait,
            SYS_epoll_pwait2,
            SYS_sendfile,
            SYS_splice,
            // Existing sockets.
            SYS_recvmsg,
            SYS_sendmsg,
            SYS_recvfrom,
            SYS_sendto,
            SYS_recvmmsg,
            SYS_sendmmsg,
            SYS_shutdown,
            SYS_getsockopt,
            SYS_setsockopt,
            SYS_getsockname,
            SYS_getpeername,
        ];
        Syscalls::default()
            .allow(&always)
            // New threads, but no new processes.
            .allow_if(
                SYS_clone,
                &[Argument::has(0, (CLONE_THREAD | CLONE_VM) as u32), Argument::lacks(0, NAMESPACES)],
            )
            // Its flags are in memory, which a filter cannot read. With ENOSYS the C library uses clone
            // instead.
            .absent(SYS_clone3, ENOSYS)
            // Only the process's own limits.
            .allow_if(SYS_prlimit64, &[Argument::is(0, 0)])
            .allow_if(SYS_socketpair, &[Argument::is(0, AF_UNIX as u32)])
            .allow_if(SYS_prctl, &[Argument::is(0, PR_SET_NAME as u32)])
            .allow_if(SYS_prctl, &[Argument::is(0, PR_GET_NAME as u32)])
            .allow_if(SYS_prctl, &[Argument::is(0, PR_SET_VMA as u32)])
            .allow_if(SYS_prctl, &[Argument::is(0, PR_GET_DUMPABLE as u32)])
            .allow_if(SYS_prctl, &[Argument::is(0, PR_CAPBSET_READ as u32)])
            .allow_if(SYS_ioctl, &[Argument::is(1, TCGETS as u32)])
            .allow_if(SYS_ioctl, &[Argument::is(1, FIONBIO as u32)])
            .allow_if(SYS_ioctl, &[Argument::is(1, FIONREAD as u32)])
            .allow_if(SYS_ioctl, &[Argument::is(1, FIOCLEX as u32)])
    }

    /// Adds opening and reading files, as far as the tree of files allows.
    pub fn files(self) -> Syscalls {
        use libc::*;
        self.allow(&[
            SYS_open,
            SYS_openat,
            SYS_access,
            SYS_faccessat,
            SYS_faccessat2,
            SYS_stat,
            SYS_lstat,
            SYS_newfstatat,
            SYS_statx,
            SYS_statfs,
            SYS_fstatfs,
            SYS_readlink,
            SYS_readlinkat,
            SYS_getdents64,
            SYS_getcwd,
            SYS_fadvise64,
            SYS_flock,
        ])
        // Its flags are in memory, which a filter cannot read. Libraries use openat instead.
        .absent(SYS_openat2, ENOSYS)
    }

    /// Adds the calls for RDMA: libibverbs finds its devices through netlink, and uses ioctl.
    pub fn rdma(self) -> Syscalls {
        use libc::*;
        self.allow_if(SYS_socket, &[Argument::is(0, AF_NETLINK as u32)]).allow(&[SYS_bind]).device_ioctls()
    }

    /// The ioctls of any driver, but none that types into a terminal: a daemon that somebody started in one
    /// gives it to its processes as their log.
    pub fn device_ioctls(self) -> Syscalls {
        let others = [libc::TIOCSTI, libc::TIOCLINUX].map(|request| Argument::is_not(1, request as u32));
        self.allow_if(libc::SYS_ioctl, &others)
    }

    /// Allows calls.
    pub fn allow(mut self, calls: &[i64]) -> Syscalls {
        for call in calls {
            self.allowed.insert(*call, Vec::new());
        }
        self
    }

    /// Allows a call if all of these conditions hold. Several such rules for a call are alternatives.
    pub fn allow_if(mut self, call: i64, conditions: &[Argument]) -> Syscalls {
        let unconditional = self.allowed.get(&call).is_some_and(Vec::is_empty);
        if !unconditional {
            self.allowed.entry(call).or_default().push(conditions.to_vec());
        }
        self
    }

    /// Makes a call fail with an error number and without a message, as if the kernel did not have it or
    /// refused it.
    pub fn absent(mut self, call: i64, error: i32) -> Syscalls {
        self.absent.insert(call, error);
        self
    }

    fn rules(&self) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
        let rule = |conditions: &Vec<Argument>| {
            let conditions = conditions.iter().map(|argument| {
                let Argument { index, comparison, value } = *argument;
                let (len, operator) = match comparison {
                    Comparison::Masked(mask) => (SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask)),
                    Comparison::Differs => (SeccompCmpArgLen::Dword, SeccompCmpOp::Ne),
                };
                SeccompCondition::new(index, len, operator, value)
            });
            SeccompRule::new(conditions.collect::<Result<_, _>>()?)
        };
        let mut rules = BTreeMap::new();
        for (call, alternatives) in &self.allowed {
            rules.insert(*call, alternatives.iter().map(rule).collect::<Result<Vec<_>, _>>()?);
        }
        // The other filter handles these calls.
        rules.extend(self.absent.keys().map(|call| (*call, Vec::new())));
        Ok(rules)
    }

    /// The filters, in the order in which they are installed.
    fn programs(&self, other: OtherCalls) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
        let filter = |rules, mismatch, matched| {
            SeccompFilter::new(rules, mismatch, matched, ARCHITECTURE).and_then(BpfProgram::try_from)
        };
        let mut programs = Vec::new();
        for error in self.absent.values().copied().collect::<std::collections::BTreeSet<_>>() {
            let calls = self.absent.iter().filter(|(_, e)| **e == error).map(|(call, _)| (*call, Vec::new()));
            let action = SeccompAction::Errno(error.cast_unsigned());
            programs.push(filter(calls.collect(), SeccompAction::Allow, action)?);
        }
        let action = match other {
            OtherCalls::End | OtherCalls::Refuse => SeccompAction::Trap,
            OtherCalls::Report => SeccompAction::Trace(PLACEHOLDER),
        };
        let mut last = filter(self.rules()?, action, SeccompAction::Allow)?;
        for instruction in &mut last {
            if instruction.code == RETURN && instruction.k == libc::SECCOMP_RET_TRACE | PLACEHOLDER {
                instruction.k = libc::SECCOMP_RET_USER_NOTIF;
            }
        }
        programs.push(last);
        Ok(programs)
    }

    /// Restricts this thread, and threads that it starts from now on, to the list.
    pub(crate) fn install(&self, other: OtherCalls) -> io::Result<()> {
        let programs = self.programs(other).map_err(io::Error::other)?;
        let Some((last, first)) = programs.split_last() else { return Ok(()) };
        let reporter = match other {
            OtherCalls::Report => Some(Reporter::start()?),
            OtherCalls::End | OtherCalls::Refuse => {
                watch_violations(other)?;
                None
            }
        };
        for program in first {
            install(program, 0)?;
        }
        match reporter {
            Some(reporter) => reporter.watch(install(last, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER)?),
            None => {
                install(last, 0)?;
            }
        }
        Ok(())
    }
}

/// Flags of clone(2) for namespaces.
const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u32;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: TargetArch = TargetArch::x86_64;

/// A placeholder for [`libc::SECCOMP_RET_USER_NOTIF`], which seccompiler does not support.
const PLACEHOLDER: u32 = 0x5253;
/// `BPF_RET | BPF_K`.
const RETURN: u16 = 0x06;

fn install(program: &BpfProgram, flags: libc::c_ulong) -> io::Result<RawFd> {
    let length = u16::try_from(program.len()).map_err(|_| io::Error::other("the filter is too long"))?;
    let filter = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: the filter's instructions live during the call, which copies them.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &filter) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
}

/// The log, for the signal handler.
static LOG: AtomicI32 = AtomicI32::new(2);
/// The system calls that the log has named.
static NAMED: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// Notes that the log names a call. Returns whether it is the first time.
fn first(call: usize) -> bool {
    let bit = 1 << (call % 64);
    NAMED.get(call / 64).is_none_or(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0)
}

/// A message in a buffer, formatted without allocating.
struct Message {
    text: [u8; 256],
    length: usize,
}

impl Message {
    fn new(call: usize, arguments: [u64; 3], what: &str) -> Message {
        let mut message = Message { text: [0; 256], length: 0 };
        let [a, b, c] = arguments;
        let name = syscalls::Sysno::new(call).map_or("of an unknown name", |call| call.name());
        // The buffer is large enough; a longer text would be cut.
        let _ = writeln!(
            message,
            "rgpu sandbox: system call {name} ({call}), arguments {a:#x}, {b:#x}, {c:#x}: {what}"
        );
        message
    }
}

impl Write for Message {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.text.len() - self.length);
        self.text[self.length..self.length + count].copy_from_slice(&bytes[..count]);
        self.length += count;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn log(message: &Message) {
    // SAFETY: the length is the buffer's. If the descriptor is not open, the call fails.
    unsafe { libc::write(LOG.load(Ordering::Relaxed), message.text.as_ptr().cast(), message.length) };
}

/// Handles SIGSYS, which the kernel sends instead of executing a call.
fn watch_violations(other: OtherCalls) -> io::Result<()> {
    // The log gets its own descriptor, because standard error may be replaced. SAFETY: a plain system call.
    let log = unsafe { libc::fcntl(2, libc::F_DUPFD_CLOEXEC, 3) };
    if log >= 0 {
        LOG.store(log, Ordering::Relaxed);
    }
    let handler = match other {
        OtherCalls::Refuse => refuse as *const () as usize,
        OtherCalls::End | OtherCalls::Report => end as *const () as usize,
    };
    // SAFETY: a structure of integers and a set of signals, for which zero is a valid value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the handler has the signature for SA_SIGINFO, and only makes system calls that the list
    // contains.
    if unsafe { libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The call and its first arguments.
#[cfg(target_arch = "x86_64")]
fn call_of(context: &libc::ucontext_t) -> (usize, [u64; 3]) {
    let register = |index: libc::c_int| context.uc_mcontext.gregs[index as usize].cast_unsigned();
    let arguments = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX].map(register);
    // The kernel has stored the call's number here, and only sets the result when the call returns.
    (register(libc::REG_RAX) as usize, arguments)
}

extern "C" fn end(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread to handlers installed with SA_SIGINFO.
    let (call, arguments) = call_of(unsafe { &*context.cast::<libc::ucontext_t>() });
    log(&Message::new(call, arguments, "not in the list; the process ends"));
    // SAFETY: this ends the process.
    unsafe { libc::_exit(EXIT_STATUS) }
}

/// The exit status of a process that made a call outside its list: the one that shells report for a program
/// that SIGSYS ended.
const EXIT_STATUS: libc::c_int = 128 + libc::SIGSYS;

extern "C" fn refuse(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread, to which nothing else refers while the
    // handler runs.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let (call, arguments) = call_of(context);
    if first(call) {
        log(&Message::new(call, arguments, "not in the list; refused with EPERM"));
    }
    #[cfg(target_arch = "x86_64")]
    {
        context.uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::EPERM);
    }
}

/// Logs the calls that the kernel reports, and lets them continue.
struct Reporter(std::sync::mpsc::Sender<OwnedFd>);

impl Reporter {
    /// Starts the thread. This must happen before the filter is installed.
    fn start() -> io::Result<Reporter> {
        let (sender, receiver) = std::sync::mpsc::channel::<OwnedFd>();
        std::thread::Builder::new().name("rgpu-syscalls".into()).spawn(move || {
            let Ok(listener) = receiver.recv() else { return };
            report(&listener);
        })?;
        Ok(Reporter(sender))
    }

    fn watch(self, listener: RawFd) {
        // SAFETY: the kernel has just made this descriptor for the filter, and nothing else owns it.
        let listener = unsafe { OwnedFd::from_raw_fd(listener) };
        // The thread waits for the descriptor.
        let _ = self.0.send(listener);
    }
}

/// `SECCOMP_IOCTL_NOTIF_RECV` and `SECCOMP_IOCTL_NOTIF_SEND` of `linux/seccomp.h`.
const NOTIFICATION_RECEIVE: libc::c_ulong = 0xc050_2100;
const NOTIFICATION_SEND: libc::c_ulong = 0xc018_2101;

fn report(listener: &OwnedFd) {
    use std::os::fd::AsRawFd;
    loop {
        // SAFETY: structures of integers, for which zero is a valid value; the kernel requires zeros in the
        // first one.
        let (mut notification, mut response): (libc::seccomp_notif, libc::seccomp_notif_resp) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        // SAFETY: the kernel writes a structure of this type.
        if unsafe { libc::ioctl(listener.as_raw_fd(), NOTIFICATION_RECEIVE, &mut notification) } != 0 {
            match io::Error::last_os_error().raw_os_error() {
                // The thread that made the call was killed, or a signal came.
                Some(libc::ENOENT | libc::EINTR) => continue,
                _ => return,
            }
        }
        let call = notification.data.nr as usize;
        let [a, b, c, ..] = notification.data.args;
        if first(call) {
            log(&Message::new(call, [a, b, c], "not in the list; executed, because calls are only reported"));
        }
        response.id = notification.id;
        response.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        // SAFETY: the kernel reads a structure of this type. The call fails if the thread was killed
        // meanwhile.
        unsafe { libc::ioctl(listener.as_raw_fd(), NOTIFICATION_SEND, &response) };
    }
}
