//! Confined processes: what they can reach, and what they cannot.
//!
//! Each test starts this program again, in a sandbox, and lets it try something.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use rgpu_sandbox::{
    Access, Argument, Command, Confinement, Isolation, Layer, Network, OtherCalls, Process, Range, Report,
    Resources, Syscalls, Users, Visible, confine, inspect, start,
};
use serde::{Deserialize, Serialize};

/// A task for a confined process.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Task {
    /// Answer, and wait for the end.
    Wait,
    /// Open files for reading. The answer is which can be opened.
    Read(Vec<PathBuf>),
    /// Create a file in each of these folders. The answer is where that works.
    Create(Vec<PathBuf>),
    /// Name the thread as libcuda does, through a file of /proc that is opened like a new file. The answer is
    /// the name.
    NameThread,
    /// List the processes in /proc.
    Processes,
    /// Send a signal to a process, trace it, and read its memory. The answer is what works.
    Attack(i32),
    /// Connect to these: `@name`, a path, or an address with a port. The answer is what works.
    Connect(Vec<String>),
    /// Make a system call outside the list. The answer is its error number, or 0.
    Forbidden,
    /// Ignore the end of the connection and wait forever.
    Stay,
    /// Abort.
    Abort,
    /// Start a process that keeps running, and end.
    LeaveBehind,
    /// Create sockets of these families, and a thread. The answer is what works. The list only allows Unix
    /// sockets.
    Conditions(Vec<i32>),
    /// Make these requests of a descriptor by ioctl. The answers are the errors' numbers. The list has the
    /// ioctls of devices.
    Ioctls(Vec<u64>),
}

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    confinement: Confinement,
    task: Task,
}

#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    report: Report,
    results: Vec<String>,
}

fn list(task: &Task) -> Syscalls {
    let list = Syscalls::basic().files();
    match task {
        Task::LeaveBehind => list.allow(&[libc::SYS_clone, libc::SYS_fork]),
        Task::Conditions(_) => list.allow_if(libc::SYS_socket, &[Argument::is(0, libc::AF_UNIX as u32)]),
        Task::Ioctls(_) => list.device_ioctls(),
        // Calls that a real list would not contain, which test the other layers.
        _ => list.allow(&[libc::SYS_socket, libc::SYS_connect, libc::SYS_ptrace, libc::SYS_process_vm_readv]),
    }
}

/// The confined process.
fn confined(fd: RawFd) {
    // SAFETY: the test started this process with this descriptor open, and nothing else uses it.
    let stream = unsafe { UnixStream::from_raw_fd(fd) };
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    let Order { confinement, task } = serde_json::from_str(&line).unwrap();
    let report = confine(&confinement, &list(&task)).unwrap();
    let answer = |results: Vec<String>| {
        let text = serde_json::to_string(&Outcome { report: report.clone(), results }).unwrap();
        // The daemon may be gone.
        let _ = (&stream).write_all(format!("{text}\n").as_bytes());
    };
    match task {
        Task::Wait => {
            answer(Vec::new());
            let _ = (&stream).read(&mut [0]);
        }
        Task::Read(files) => {
            let read =
                |path: &PathBuf| std::fs::File::open(path).and_then(|mut file| file.read(&mut [0])).is_ok();
            answer(files.iter().filter(|path| read(path)).map(|path| path.display().to_string()).collect());
        }
        Task::Create(folders) => {
            let create = |path: &PathBuf| std::fs::write(path.join("made"), "x").is_ok();
            answer(
                folders.iter().filter(|path| create(path)).map(|path| path.display().to_string()).collect(),
            );
        }
        Task::NameThread => {
            let file = format!("/proc/self/task/{}/comm", nix::unistd::gettid());
            let named = std::fs::write(&file, "a-name").and_then(|()| std::fs::read_to_string(&file));
            answer(vec![named.unwrap_or_else(|e| e.to_string())]);
        }
        Task::Processes => {
            let entries = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
            answer(
                entries
                    .filter_map(|name| name.into_string().ok())
                    .filter(|name| name.parse::<u32>().is_ok())
                    .collect(),
            );
        }
        Task::Attack(pid) => {
            let mut works = Vec::new();
            let mut byte = 0_u8;
            let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
            let remote = libc::iovec { iov_base: confined as *mut libc::c_void, iov_len: 1 };
            // SAFETY: system calls on another process's ID; the one that writes to this process writes one
            // byte to a variable.
            unsafe {
                if libc::kill(pid, 0) == 0 {
                    works.push("signal".to_owned());
                }
                if libc::ptrace(libc::PTRACE_ATTACH, pid, 0, 0) == 0 {
                    works.push("ptrace".to_owned());
                }
                if libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) == 1 {
                    works.push("memory".to_owned());
                }
            }
            for name in ["mem", "environ", "maps", "fd", "root"] {
                if std::fs::read_dir(format!("/proc/{pid}/{name}")).is_ok()
                    || std::fs::File::open(format!("/proc/{pid}/{name}")).is_ok()
                {
                    works.push(name.to_owned());
                }
            }
            answer(works);
        }
        Task::Connect(targets) => {
            use std::os::linux::net::SocketAddrExt;
            let connect = |target: &&String| match target.strip_prefix('@') {
                Some(name) => {
                    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
                    UnixStream::connect_addr(&address).is_ok()
                }
                None if target.starts_with('/') => UnixStream::connect(target).is_ok(),
                None => std::net::TcpStream::connect(target).is_ok(),
            };
            answer(targets.iter().filter(connect).cloned().collect());
        }
        Task::Forbidden => {
            // SAFETY: a plain system call.
            let result = unsafe { libc::syscall(libc::SYS_getpgid, 0) };
            let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
            answer(vec![if result >= 0 { "0".into() } else { error.to_string() }]);
        }
        Task::Stay => {
            answer(Vec::new());
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
        Task::Abort => {
            answer(Vec::new());
            std::process::abort()
        }
        Task::LeaveBehind => {
            // SAFETY: the process has one thread; the copy only sleeps.
            if unsafe { libc::fork() } == 0 {
                loop {
                    std::thread::sleep(Duration::from_secs(3600));
                }
            }
            answer(Vec::new());
        }
        Task::Ioctls(requests) => {
            let request = |request: &u64| {
                let mut byte = b'x';
                // SAFETY: the requests read at most one byte, or do not exist.
                let done = unsafe { libc::ioctl(stream.as_raw_fd(), *request, &raw mut byte) };
                let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
                if done == 0 { "0".to_owned() } else { error.to_string() }
            };
            answer(requests.iter().map(request).collect());
        }
        Task::Conditions(families) => {
            let socket = |family: &i32| {
                // SAFETY: a plain system call.
                let fd = unsafe { libc::socket(*family, libc::SOCK_STREAM, 0) };
                // SAFETY: a new descriptor that nothing else owns.
                (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) }).is_some()
            };
            let mut works: Vec<String> = families.iter().map(|family| socket(family).to_string()).collect();
            works.push(std::thread::spawn(|| 1).join().is_ok().to_string());
            answer(works);
        }
    }
}

/// A process in a sandbox.
struct Sandboxed {
    process: Process,
    stream: UnixStream,
    log: PathBuf,
}

impl Sandboxed {
    fn answer(&self) -> Outcome {
        let mut line = String::new();
        BufReader::new(&self.stream).read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "it ended: {}", self.log());
        serde_json::from_str(&line).unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn end(mut self) -> (ExitStatus, String) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
        let status = self.process.wait().unwrap();
        (status, self.log())
    }
}

fn users() -> Arc<Users> {
    static USERS: OnceLock<Arc<Users>> = OnceLock::new();
    Arc::clone(USERS.get_or_init(|| Users::new(Range { first: 0x7200_0000, last: 0x7200_00ff })))
}

fn run(task: Task, visible: Vec<Visible>, other_calls: OtherCalls) -> Sandboxed {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let user = rgpu_sandbox::may_change_users().then(|| users().allocate().unwrap());
    // Its messages go to a file, which this program opens as its standard error.
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let log = scratch().join(format!("log-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let command = Command::new("/proc/self/exe", "confined").arguments([
        "--confined",
        &theirs.as_raw_fd().to_string(),
        log.to_str().unwrap(),
    ]);
    let process = start(&command, &[theirs.as_fd()], user, None).unwrap();
    drop(theirs);
    let mut visible = visible;
    visible.extend(Visible::libraries().chain(Visible::basic_devices()));
    let confinement = Confinement {
        isolation: process.isolation().clone(),
        user: process.user(),
        visible,
        network: Network::Own,
        resources: Resources { descriptors: Some(64), locked: None, tasks: Some(16) },
        other_calls,
    };
    let order = serde_json::to_string(&Order { confinement, task }).unwrap();
    (&ours).write_all(format!("{order}\n").as_bytes()).unwrap();
    Sandboxed { process, stream: ours, log }
}

/// A folder that everyone may write, outside any sandbox.
fn scratch() -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        folder
    });
    folder.path().to_owned()
}

/// A file that everyone may read and write, outside any sandbox.
fn open_file(name: &str) -> PathBuf {
    let path = scratch().join(name);
    std::fs::write(&path, "secret").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    path
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(240), "not within 240 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn the_kernel_confirms_every_layer() {
    let sandboxed = run(Task::Wait, Vec::new(), OtherCalls::End);
    let outcome = sandboxed.answer();
    let missing: Vec<Layer> = outcome.report.missing.iter().map(|missing| missing.layer).collect();
    assert!(missing.iter().all(|layer| *layer == Layer::Landlock), "{}", outcome.report);
    assert_eq!(outcome.report.not_isolated(), None);
    let inspected = inspect(sandboxed.process.pid());
    assert_eq!(inspected.user, sandboxed.process.user());
    assert_eq!(inspected.namespaces.unwrap(), ["mnt", "pid", "ipc", "net"]);
    assert!(inspected.filters >= Some(2));
    assert_eq!(
        (inspected.capabilities, inspected.no_new_privileges, inspected.core_limit, inspected.dumpable),
        (Some(0), Some(true), Some(0), Some(false))
    );
    // Its session is its own, so it has no terminal.
    let pid = nix::unistd::Pid::from_raw(sandboxed.process.pid().cast_signed());
    assert_eq!(nix::unistd::getsid(Some(pid)).unwrap(), pid);
    assert!(sandboxed.end().0.success());
}

fn only_visible_files_can_be_opened() {
    let (secret, shown) = (open_file("secret"), open_file("shown"));
    let own = std::env::current_exe().unwrap();
    let files = vec![
        secret,
        shown.clone(),
        own,
        "/etc/passwd".into(),
        "/proc/1/environ".into(),
        "/dev/vda".into(),
        "/sys/kernel/notes".into(),
    ];
    let sandboxed = run(Task::Read(files), vec![Visible::new(&shown, Access::Read)], OtherCalls::End);
    assert_eq!(sandboxed.answer().results, [shown.display().to_string()]);
}

fn folders_behind_links_in_visible_folders_can_be_read() {
    // As CUDA is installed: /usr/local/cuda leads to /etc/alternatives/cuda, and that to
    // /usr/local/cuda-13.0.
    let tree = scratch().join("links");
    let (cuda, elsewhere) = (tree.join("usr/local/cuda-13.0"), tree.join("opt/elsewhere"));
    for folder in [cuda.join("targets/lib"), tree.join("etc/alternatives"), elsewhere.join("lib")] {
        std::fs::create_dir_all(&folder).unwrap();
    }
    let link = |to: &Path, at: PathBuf| std::os::unix::fs::symlink(to, at).unwrap();
    link(Path::new("targets/lib"), cuda.join("lib64"));
    link(&cuda, tree.join("etc/alternatives/cuda"));
    link(&tree.join("etc/alternatives/cuda"), tree.join("usr/local/cuda"));
    link(&elsewhere, tree.join("usr/local/elsewhere"));
    let files = [cuda.join("targets/lib/file"), elsewhere.join("lib/file"), elsewhere.join("hidden")];
    files.iter().for_each(|file| std::fs::write(file, "bytes").unwrap());
    let asked = ["usr/local/cuda/lib64/file", "usr/local/elsewhere/lib/file", "usr/local/elsewhere/hidden"];
    let asked = asked.map(|path| tree.join(path));
    let visible = ["usr", "usr/local/cuda/lib64", "usr/local/elsewhere/lib", "etc/alternatives"];
    let visible = visible.map(|path| Visible::new(tree.join(path), Access::Read)).to_vec();
    let sandboxed = run(Task::Read(asked.to_vec()), visible, OtherCalls::End);
    let outcome = sandboxed.answer();
    assert_eq!(outcome.results, [asked[0].display().to_string(), asked[1].display().to_string()]);
    assert!(outcome.report.missing.iter().all(|missing| missing.layer != Layer::Files), "{}", outcome.report);
}

fn only_writable_folders_can_be_written() {
    let folder = |name: &str| {
        let path = scratch().join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        path
    };
    let (read, write, other) = (folder("read"), folder("write"), folder("other"));
    let visible = vec![Visible::new(&read, Access::Read), Visible::new(&write, Access::Write)];
    let folders = vec![read, write.clone(), other, "/".into(), "/usr".into(), "/dev".into(), "/tmp".into()];
    let sandboxed = run(Task::Create(folders), visible, OtherCalls::End);
    assert_eq!(sandboxed.answer().results, [write.display().to_string(), "/tmp".into()]);
    assert!(write.join("made").exists());
    assert!(!Path::new("/tmp/made").exists(), "its /tmp is its own");
}

fn a_thread_can_be_named_through_proc() {
    let sandboxed = run(Task::NameThread, Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().results, ["a-name\n"]);
}

fn no_other_process_can_be_seen_or_reached() {
    let victim = run(Task::Wait, Vec::new(), OtherCalls::End);
    victim.answer();
    let sandboxed = run(Task::Processes, Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().results, ["1", "2"]);
    for pid in [victim.process.pid(), std::process::id()] {
        let sandboxed = run(Task::Attack(pid.cast_signed()), Vec::new(), OtherCalls::End);
        assert_eq!(sandboxed.answer().results, [""; 0]);
    }
    // The guard has the daemon's user.
    let sandboxed = run(Task::Attack(1), Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().results, [""; 0]);
    assert!(victim.end().0.success());
}

fn no_socket_outside_can_be_reached() {
    use std::os::linux::net::SocketAddrExt;
    let name = format!("rgpu-sandbox-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    let path = scratch().join("socket");
    let _path = std::os::unix::net::UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let targets = vec![format!("@{name}"), path.display().to_string(), tcp.local_addr().unwrap().to_string()];
    let sandboxed = run(Task::Connect(targets), Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().results, [""; 0]);
}

fn a_call_outside_the_list_ends_the_process_and_is_named() {
    let (status, log) = run(Task::Forbidden, Vec::new(), OtherCalls::End).end();
    assert_eq!(status.code(), Some(128 + libc::SIGSYS));
    assert!(log.contains("getpgid") && log.contains("the process ends"), "{log}");
}

fn a_call_outside_the_list_is_refused_and_named() {
    let sandboxed = run(Task::Forbidden, Vec::new(), OtherCalls::Refuse);
    assert_eq!(sandboxed.answer().results, [libc::EPERM.to_string()]);
    let (status, log) = sandboxed.end();
    assert!(status.success() && log.contains("getpgid") && log.contains("refused"), "{log}");
}

fn a_call_outside_the_list_is_executed_and_named_when_calls_are_only_reported() {
    let sandboxed = run(Task::Forbidden, Vec::new(), OtherCalls::Report);
    let outcome = sandboxed.answer();
    assert_eq!(outcome.results, ["0"]);
    assert!(outcome.report.not_isolated().unwrap().contains("only reported"));
    let (status, log) = sandboxed.end();
    assert!(status.success() && log.contains("getpgid") && log.contains("executed"), "{log}");
}

fn a_list_may_depend_on_arguments() {
    let families = vec![libc::AF_UNIX, libc::AF_INET, libc::AF_NETLINK];
    let sandboxed = run(Task::Conditions(families), Vec::new(), OtherCalls::Refuse);
    assert_eq!(sandboxed.answer().results, ["true", "false", "false", "true"]);
}

fn devices_have_all_ioctls_but_those_that_type_into_a_terminal() {
    // A socket has none of them: it answers what the list lets through.
    let nvidia = 0xc020_462a;
    let requests = vec![libc::TIOCSTI, nvidia, libc::TIOCLINUX, libc::TIOCSTI | 1 << 32];
    let sandboxed = run(Task::Ioctls(requests), Vec::new(), OtherCalls::Refuse);
    let numbers = [libc::EPERM, libc::ENOTTY, libc::EPERM, libc::EPERM].map(|number| number.to_string());
    assert_eq!(sandboxed.answer().results, numbers);
}

fn two_processes_have_different_users() {
    let all: Vec<Sandboxed> = (0..4).map(|_| run(Task::Wait, Vec::new(), OtherCalls::End)).collect();
    let users: BTreeSet<u32> = all.iter().map(|one| one.process.user().unwrap()).collect();
    assert_eq!(users.len(), 4);
    all.iter().for_each(|one| drop(one.answer()));
    let seen: BTreeSet<u32> = all.iter().map(|one| inspect(one.process.pid()).user.unwrap()).collect();
    assert_eq!(seen, users);
}

fn signals_end_a_process_as_they_end_any_other() {
    let (status, _) = run(Task::Abort, Vec::new(), OtherCalls::End).end();
    assert_eq!(status.signal(), Some(libc::SIGABRT));
    let sandboxed = run(Task::Stay, Vec::new(), OtherCalls::End);
    sandboxed.answer();
    sandboxed.process.handle().kill();
    assert_eq!(sandboxed.end().0.signal(), Some(libc::SIGKILL));
}

/// Processes of a user.
fn of_user(user: u32) -> usize {
    let statuses = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("status")).ok());
    statuses.filter(|status| status.contains(&format!("Uid:\t{user}\t"))).count()
}

fn nothing_is_left_of_a_process_that_has_ended() {
    let sandboxed = run(Task::LeaveBehind, Vec::new(), OtherCalls::End);
    sandboxed.answer();
    let user = sandboxed.process.user().unwrap();
    let Sandboxed { mut process, stream, .. } = sandboxed;
    assert!(process.wait().unwrap().success());
    drop(stream);
    assert_eq!(of_user(user), 0);
}

fn nothing_outlives_a_daemon_that_is_killed() {
    let mut daemon = std::process::Command::new("/proc/self/exe")
        .arg("--daemon")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let user: u32 = line.trim().parse().unwrap();
    assert_eq!(of_user(user), 1);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    until("the sandboxed process is gone", || of_user(user) == 0);
}

/// A daemon whose process ignores the end of the connection.
fn daemon() {
    let sandboxed = run(Task::Stay, Vec::new(), OtherCalls::End);
    sandboxed.answer();
    println!("{}", sandboxed.process.user().unwrap());
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn an_ordinary_user_gets_every_layer_but_the_user_id() {
    let output = std::process::Command::new("/proc/self/exe")
        .arg("--ordinary")
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

fn a_container_runtime_may_hide_clone3() {
    let output = std::process::Command::new("/proc/self/exe").arg("--without-clone3").output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

/// An environment in which clone3 returns ENOSYS, as with the default profile of container runtimes.
fn without_clone3() {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
    let calls = [(libc::SYS_clone3, Vec::new())].into_iter().collect();
    let absent = SeccompAction::Errno(libc::ENOSYS as u32);
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, absent, TargetArch::x86_64).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    let sandboxed = run(Task::Wait, Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().report.not_isolated(), None);
    assert_eq!(*sandboxed.process.isolation(), Isolation::Root);
    assert!(sandboxed.end().0.success());
}

/// As an ordinary user.
fn ordinary() {
    let victim = run(Task::Wait, Vec::new(), OtherCalls::End);
    let outcome = victim.answer();
    if matches!(victim.process.isolation(), Isolation::None { .. }) {
        // This machine does not let ordinary users create namespaces; the report says so.
        let missing: Vec<Layer> = outcome.report.missing.iter().map(|missing| missing.layer).collect();
        assert!(missing.contains(&Layer::Processes) && missing.contains(&Layer::Files), "{}", outcome.report);
        return;
    }
    let missing: Vec<Layer> = outcome.report.missing.iter().map(|missing| missing.layer).collect();
    assert!(missing.iter().all(|layer| matches!(layer, Layer::User | Layer::Landlock)), "{}", outcome.report);
    let secret = open_file("secret");
    let sandboxed = run(Task::Read(vec![secret, "/etc/passwd".into()]), Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().results, [""; 0]);
    let sandboxed = run(Task::Processes, Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().results, ["1"]);
    let sandboxed = run(Task::Attack(victim.process.pid().cast_signed()), Vec::new(), OtherCalls::End);
    assert_eq!(sandboxed.answer().results, [""; 0]);
    assert!(victim.end().0.success());
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    match words.get(1).map(String::as_str) {
        Some("--confined") => {
            let log = std::fs::File::create(&words[3]).unwrap();
            nix::unistd::dup2_stderr(log).unwrap();
            return confined(words[2].parse().unwrap());
        }
        Some("--daemon") => return daemon(),
        Some("--ordinary") => return ordinary(),
        Some("--without-clone3") => return without_clone3(),
        _ => {}
    }
    let root = nix::unistd::geteuid().is_root();
    let tests: [(&str, fn()); 18] = [
        ("the_kernel_confirms_every_layer", the_kernel_confirms_every_layer),
        ("only_visible_files_can_be_opened", only_visible_files_can_be_opened),
        (
            "folders_behind_links_in_visible_folders_can_be_read",
            folders_behind_links_in_visible_folders_can_be_read,
        ),
        ("only_writable_folders_can_be_written", only_writable_folders_can_be_written),
        ("a_thread_can_be_named_through_proc", a_thread_can_be_named_through_proc),
        ("no_other_process_can_be_seen_or_reached", no_other_process_can_be_seen_or_reached),
        ("no_socket_outside_can_be_reached", no_socket_outside_can_be_reached),
        (
            "a_call_outside_the_list_ends_the_process_and_is_named",
            a_call_outside_the_list_ends_the_process_and_is_named,
        ),
        ("a_call_outside_the_list_is_refused_and_named", a_call_outside_the_list_is_refused_and_named),
        (
            "a_call_outside_the_list_is_executed_and_named_when_calls_are_only_reported",
            a_call_outside_the_list_is_executed_and_named_when_calls_are_only_reported,
        ),
        ("a_list_may_depend_on_arguments", a_list_may_depend_on_arguments),
        (
            "devices_have_all_ioctls_but_those_that_type_into_a_terminal",
            devices_have_all_ioctls_but_those_that_type_into_a_terminal,
        ),
        ("a_container_runtime_may_hide_clone3", a_container_runtime_may_hide_clone3),
        ("two_processes_have_different_users", two_processes_have_different_users),
        ("signals_end_a_process_as_they_end_any_other", signals_end_a_process_as_they_end_any_other),
        ("nothing_is_left_of_a_process_that_has_ended", nothing_is_left_of_a_process_that_has_ended),
        ("nothing_outlives_a_daemon_that_is_killed", nothing_outlives_a_daemon_that_is_killed),
        (
            "an_ordinary_user_gets_every_layer_but_the_user_id",
            an_ordinary_user_gets_every_layer_but_the_user_id,
        ),
    ];
    // Only root may give processes user IDs of their own.
    let trials = tests.map(|(name, test)| {
        let test = move || {
            test();
            Ok(())
        };
        Trial::test(name, test).with_ignored_flag(!root)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit();
}
