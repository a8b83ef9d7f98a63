//! `rgpuctl doctor`: checks this machine's setup and suggests fixes.
//!
//! Each check looks at one thing and returns a [`Finding`]. Which checks run depends on whether this is a
//! guest with an rgpu device or a host.

mod rdma;
mod slurm;

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use host_bridge::ask::{Answer as Reply, Question};
use host_bridge::bridge::{Security, ask};
use host_bridge::framing::{Address, with_causes};
use host_bridge::stream::Stream;
use host_bridge::verbs::Settings;
use identity::servers::{CLIENT_FOLDER, CredentialsError};
use identity::{ClientFiles, Source};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use nix::unistd::{AccessFlags, access};
use protocol::device::{Answer, Response};
use zerocopy::FromBytes;

use crate::daemon::{cause, read_status};
use crate::enrollment::client_folder;

/// Check this machine's setup and suggest fixes.
///
/// In a guest: the device, its driver, permissions, and the CUDA libraries that a program would load. On a
/// host: QEMU, KVM, the daemons and their sockets, the server, the GPU and its driver; on a Slurm node also
/// what jobs need for leases. The exit status is 1 if something is missing that rgpu needs.
#[derive(Args)]
pub struct Arguments {
    /// Also check that this GPU server can be reached: HOST, HOST:PORT or unix:PATH. By default no server is
    /// checked
    #[arg(long, value_name = "ADDRESS")]
    server: Option<Address>,
    /// Connect to the server over TCP without TLS, as to a server that is insecure
    #[arg(long, requires = "server")]
    insecure: bool,
    /// Folder of the key and of the servers that it trusts, both made by rgpuctl join, with which to check
    /// the server. By default /var/lib/rgpu/client for root, and ~/.config/rgpu for other users
    #[arg(long, value_name = "FOLDER", requires = "server")]
    identity: Option<PathBuf>,
    #[command(flatten)]
    rdma: Settings,
}

/// What a check found.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    /// Correct.
    Good(String),
    /// Worth knowing; only some uses of rgpu need it.
    Note(String, Option<String>),
    /// Missing or wrong, with a command or step that fixes it.
    Wrong(String, String),
}

use Finding::{Good, Note, Wrong};

/// Prints every finding. Fails if something is wrong.
pub fn doctor(arguments: &Arguments) -> ExitCode {
    let in_guest = has_device() || Path::new("/dev/rgpu0").exists();
    let mut findings = Vec::new();
    if in_guest {
        println!("This is a guest with an rgpu device.");
        let module = module();
        // Without the driver there is no device node.
        let node = matches!(module, Good(_)).then(device_node);
        findings.extend([Some(module), node].into_iter().flatten());
    } else {
        println!("This is a host: there is no rgpu device here.");
        findings.extend([qemu(), kvm(), gpu(Path::new("/"))]);
        findings.extend(profiling(Path::new("/")));
        findings.extend([daemon("vhost-rgpu"), daemon("server")]);
        for (daemon, list, name) in
            [("server", "workers", "worker"), ("vhost-rgpu", "device_processes", "device process")]
        {
            let status = read_status(Path::new(&format!("/run/rgpu/{daemon}.status")));
            let processes = status.as_ref().ok().and_then(|status| status[list].as_array());
            findings.extend(processes.into_iter().flatten().map(|process| sandbox(name, process)));
        }
        findings.push(native_socket());
        findings.extend(slurm::check());
    }
    findings.push(memory_lock());
    let verbs = which_library("libibverbs.so.1");
    findings.extend(rdma::check(Path::new("/"), &arguments.rdma, verbs));
    findings
        .extend(["libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1"].map(|name| library(name, in_guest)));
    // Only profilers need it.
    findings.push(library("libcupti.so.13", false));
    let folder = arguments.identity.clone().unwrap_or_else(client_folder);
    findings.extend(arguments.server.iter().map(|address| server(address, &folder, arguments.insecure)));

    for finding in &findings {
        match finding {
            Good(text) => println!("  ok     {text}"),
            Note(text, None) => println!("  note   {text}"),
            Note(text, Some(step)) => println!("  note   {text}\n         → {step}"),
            Wrong(text, step) => println!("  WRONG  {text}\n         → {step}"),
        }
    }
    let wrong = findings.iter().filter(|finding| matches!(finding, Wrong(..))).count();
    match wrong {
        0 => println!("Everything that rgpu needs is here."),
        _ => println!("{wrong} of {} checks found a problem.", findings.len()),
    }
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether there is a virtio device of rgpu's type (38).
fn has_device() -> bool {
    let Ok(devices) = std::fs::read_dir("/sys/bus/virtio/devices") else { return false };
    devices
        .flatten()
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("device")).ok())
        .any(|id| id.trim() == "0x0026")
}

/// With an NVIDIA GPU: whether servers on this machine can report its activity to profilers. `root`: the root
/// of the file system.
fn profiling(root: &Path) -> Option<Finding> {
    root.join("dev/nvidiactl").exists().then(|| {
        let toolkit = ["usr/local/cuda/extras/CUPTI/lib64", "usr/local/cuda/lib64"];
        let found = ["libcupti.so.13", "libcupti.so.12"].iter().find_map(|name| {
            let there = toolkit.iter().map(|folder| root.join(folder).join(name)).find(|path| path.exists());
            there.or_else(|| which_library(name))
        });
        match found {
            Some(path) => Good(format!("profilers of clients can see kernels: CUPTI is {}", path.display())),
            None => Note(
                "there is no CUPTI on this machine, so profilers of clients see no kernels on its GPUs".into(),
                Some("install it (cuda-cupti, or nvidia-cuda-cupti from PyPI) and name it with rgpu-server --cupti".into()),
            ),
        }
    })
}

fn module() -> Finding {
    if Path::new("/sys/module/virtio_rgpu").exists() {
        return Good("the driver virtio_rgpu is loaded".into());
    }
    Wrong(
        "the driver virtio_rgpu is not loaded".into(),
        "modprobe virtio_rgpu; if there is no such module: apt install linux-headers-$(uname -r), or, if apt has none for this kernel, a newer kernel with its headers (linux-image-amd64 linux-headers-amd64) and restart; then rgpu-guest-dkms, which builds it; dkms status shows whether it did".into(),
    )
}

fn device_node() -> Finding {
    let node = Path::new("/dev/rgpu0");
    if !node.exists() {
        return Wrong(
            "/dev/rgpu0 does not exist".into(),
            "dmesg | grep rgpu shows why the driver did not accept the device, for example because of its version"
                .into(),
        );
    }
    match access(node, AccessFlags::R_OK | AccessFlags::W_OK) {
        Ok(()) => Good("/dev/rgpu0 can be opened".into()),
        Err(_) => Wrong(
            "/dev/rgpu0 cannot be opened by this user".into(),
            "chmod 666 /dev/rgpu0; or permanently: install rgpu-guest, whose udev rule does that".into(),
        ),
    }
}

fn qemu() -> Finding {
    let step = "install QEMU 10.2 or newer (Debian 13: apt install -t trixie-backports qemu-system-x86; Debian 12: cargo xtask qemu in rgpu's source tree); docs/hypervisors.md lists what each version supports";
    let Ok(output) = Command::new("qemu-system-x86_64").arg("--version").output() else {
        return Note("QEMU is not installed; it is needed only for guests".into(), Some(step.into()));
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match qemu_version(&text) {
        Some(version) if version >= (10, 2) => {
            Good(format!("QEMU {}.{} supports rgpu devices", version.0, version.1))
        }
        Some((major, minor)) => Note(
            format!(
                "QEMU {major}.{minor} does not let a user create a vhost-user-test-device-pci; it is needed only for guests"
            ),
            Some(step.into()),
        ),
        None => Note("cannot read the version of qemu-system-x86_64".into(), Some(step.into())),
    }
}

/// The major and minor number in the output of `qemu-system-x86_64 --version`.
fn qemu_version(text: &str) -> Option<(u32, u32)> {
    let version = text.split("version ").nth(1)?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn kvm() -> Finding {
    let node = Path::new("/dev/kvm");
    if !node.exists() {
        return Note("there is no /dev/kvm, so guests would be emulated, which is slow".into(), Some(
            "modprobe kvm_intel or kvm_amd; inside a virtual machine, its host must allow nested virtualization".into(),
        ));
    }
    match access(node, AccessFlags::R_OK | AccessFlags::W_OK) {
        Ok(()) => Good("/dev/kvm can be opened".into()),
        Err(_) => Note(
            "/dev/kvm cannot be opened by this user".into(),
            Some("usermod -aG kvm $USER, then log in again".into()),
        ),
    }
}

/// The GPU and its driver. `root`: the root of the file system.
fn gpu(root: &Path) -> Finding {
    let missing = missing_nodes(root);
    if !missing.is_empty() {
        return Wrong(
            format!("there is no {}, so CUDA does not see GPUs that the driver has", missing.join(", ")),
            "nvidia-smi makes the nodes of all GPUs, and so does systemctl restart rgpu-server".into(),
        );
    }
    if !root.join("dev/nvidiactl").exists() {
        return Note(
            "there is no NVIDIA GPU with a loaded driver; a machine without an NVIDIA GPU can serve one in software"
                .into(),
            None,
        );
    }
    let version = std::fs::read_to_string(root.join("proc/driver/nvidia/version")).unwrap_or_default();
    match driver_version(&version) {
        Some(version) if version >= 580 => Good(format!("an NVIDIA GPU with driver {version} (CUDA 13)")),
        Some(version) => Note(
            format!("the NVIDIA driver is {version}; CUDA 13 programs need 580"),
            Some("install NVIDIA's driver 580 or newer".into()),
        ),
        None => Note(
            "there is an NVIDIA GPU, but its driver's version cannot be read from /proc/driver/nvidia/version"
                .into(),
            None,
        ),
    }
}

/// The device nodes that GPUs of the driver need and do not have. No driver makes them: programs with all
/// rights do, such as nvidia-smi.
fn missing_nodes(root: &Path) -> Vec<String> {
    let gpus = std::fs::read_dir(root.join("proc/driver/nvidia/gpus"));
    let minor = |gpu: std::fs::DirEntry| -> Option<u32> {
        let text = std::fs::read_to_string(gpu.path().join("information")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse().ok())
    };
    let mut minors: Vec<u32> = gpus.into_iter().flatten().flatten().filter_map(minor).collect();
    minors.sort_unstable();
    let control = (!minors.is_empty()).then(|| "/dev/nvidiactl".to_owned());
    let nodes = control.into_iter().chain(minors.into_iter().map(|minor| format!("/dev/nvidia{minor}")));
    nodes.filter(|node| !root.join(node.trim_start_matches('/')).exists()).collect()
}

/// The major number of the driver in the text of `/proc/driver/nvidia/version`.
fn driver_version(text: &str) -> Option<u32> {
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    line.split_whitespace()
        .filter(|word| word.contains('.'))
        .find_map(|word| word.split('.').next()?.parse().ok())
}

fn daemon(name: &str) -> Finding {
    let program = if name == "server" { "rgpu-server" } else { name };
    let socket = PathBuf::from(format!("/run/rgpu/{name}.status"));
    match read_status(&socket) {
        Ok(_) => Good(format!("{program} is running and answers at {}", socket.display())),
        Err(error) => silent(program, &socket, cause(&error), unit(program).as_ref()),
    }
}

/// What systemd knows about a daemon's unit.
#[derive(Debug, Default, PartialEq, Eq)]
struct Unit {
    /// Whether it runs: `active`, `activating`, `failed`, `inactive` and others; empty if that is unknown.
    state: String,
    /// The same in more detail, such as `auto-restart`.
    detail: String,
    /// The last line that its processes have logged.
    said: String,
}

impl Unit {
    /// Whether it starts when it should, as far as is known.
    fn starts(&self) -> bool {
        !["activating", "failed"].contains(&self.state.as_str())
    }
}

/// The step that shows why a daemon does not start.
fn why_not(program: &str) -> String {
    format!("{program} --config /etc/rgpu/{program}.toml --check-config; journalctl -u {program} has more")
}

/// The unit of a daemon; `None` if there is none.
fn unit(program: &str) -> Option<Unit> {
    let file = format!("{program}.service");
    let folders = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
    folders.iter().find(|folder| Path::new(folder).join(&file).exists())?;
    let shown = output(&["systemctl", "show", "--property=ActiveState,SubState", &file]).unwrap_or_default();
    let value =
        |name| shown.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default();
    let from = format!("_SYSTEMD_UNIT={file}");
    let said = output(&["journalctl", "--boot", "--lines=1", "--output=cat", "--no-pager", &from]);
    let said = said.unwrap_or_default().lines().last().unwrap_or_default().to_owned();
    Some(Unit { state: value("ActiveState").to_owned(), detail: value("SubState").to_owned(), said })
}

/// What it means that a daemon does not tell its status. `unit`: if systemd knows it.
fn silent(program: &str, socket: &Path, cause: ErrorKind, unit: Option<&Unit>) -> Finding {
    let use_of = if program == "vhost-rgpu" { "guests and containers" } else { "clients on other machines" };
    let state = unit.map_or("", |unit| &unit.state);
    match (cause, unit) {
        (ErrorKind::PermissionDenied, _) => Note(
            format!("this user may not ask {program} for its status ({})", socket.display()),
            Some("run rgpuctl doctor as root to see more".into()),
        ),
        (_, Some(unit)) if !unit.starts() => {
            let Unit { detail, said, .. } = unit;
            let said = if said.is_empty() { String::new() } else { format!("; it last said: {said}") };
            Wrong(format!("{program} does not start: its unit is {state} ({detail}){said}"), why_not(program))
        }
        (ErrorKind::NotFound, _) if state == "active" => Note(
            format!("{program} runs as a service, but does not tell its status at {}", socket.display()),
            Some(format!(
                "socket = \"{}\" in the section [status] of /etc/rgpu/{program}.toml",
                socket.display()
            )),
        ),
        (ErrorKind::NotFound, _) => Note(
            format!("{program} does not run as a service; `rgpuctl run` starts its own"),
            Some(match unit {
                Some(_) => format!("for {use_of}: systemctl enable --now {program}"),
                None => format!("for {use_of}: install the package {program}"),
            }),
        ),
        _ => Wrong(
            format!("{program} does not answer at its socket {}", socket.display()),
            format!("systemctl restart {program}; journalctl -u {program} shows why it ended"),
        ),
    }
}

/// What a command prints, or why it failed.
fn output(words: &[&str]) -> Result<String, String> {
    let name = words[0];
    let output =
        Command::new(name).args(&words[1..]).output().map_err(|e| format!("cannot run {name}: {e}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let why = [text(&output.stderr), text(&output.stdout)].into_iter().find(|said| !said.is_empty());
    let why = why.and_then(|said| said.lines().next().map(str::to_owned));
    Err(format!("{}: {}", words.join(" "), why.unwrap_or_else(|| output.status.to_string())))
}

/// What the kernel says about the sandbox of a process that a daemon's status lists.
fn sandbox(name: &str, process: &serde_json::Value) -> Finding {
    let state = &process["sandbox"];
    let number = |name: &str| state[name].as_u64();
    let namespaces: Option<Vec<&str>> =
        state["namespaces"].as_array().map(|all| all.iter().filter_map(serde_json::Value::as_str).collect());
    let shown = |value: Option<u64>| value.map_or("unknown".into(), |value| value.to_string());
    let pid = ["pid", "process"].into_iter().find_map(|field| process[field].as_u64());
    let does = ["stage", "serves"].into_iter().find_map(|field| process[field].as_str()).unwrap_or("?");
    let mut text = format!("{name} {} ({does}): user {}", shown(pid), shown(number("user")));
    match &namespaces {
        Some(names) if names.is_empty() => text += ", no namespaces of its own",
        Some(names) => text += &format!(", its own {} namespaces", names.join(", ")),
        None => text += ", namespaces unknown",
    }
    text += &format!(", {} system call filters", shown(number("filters")));
    match number("memory_limit") {
        Some(bytes) => text += &format!(", at most {} MiB of memory", bytes >> 20),
        None => text += ", no limit of memory",
    }
    let confined = number("filters").is_some_and(|filters| filters > 0)
        && state["no_new_privileges"] == true
        && state["dumpable"] != true
        && namespaces
            .is_none_or(|names| ["mnt", "pid", "ipc", "net"].iter().all(|name| names.contains(name)));
    // A device process has no limit of memory unless one is configured, but a cgroup of its own.
    if confined && number("memory_limit").or(number("task_limit")).is_some() {
        return Good(text);
    }
    Note(text, Some("the first lines of the daemon's log say what is missing and why; docs/sandbox.md says what provides it".into()))
}

fn native_socket() -> Finding {
    let named = std::env::var_os("RGPU_SOCKET").filter(|path| !path.is_empty()).map(PathBuf::from);
    let path = named.as_deref().unwrap_or(Path::new("/run/rgpu/native.sock"));
    // Before connecting, which starts it.
    let unit = if named.is_none() { unit("vhost-rgpu") } else { None };
    native(path, named.is_some(), connect_packets(path), unit.as_ref())
}

/// What the result of a connection to the socket for programs means. `named`: whether RGPU_SOCKET names it.
/// `unit`: what systemd knew of vhost-rgpu before, if the socket may be systemd's.
fn native(
    path: &Path,
    named: bool,
    connected: std::io::Result<Option<Response>>,
    unit: Option<&Unit>,
) -> Finding {
    let origin = if named { " (named by RGPU_SOCKET)" } else { "" };
    let shown = format!("{}{origin}", path.display());
    let error = match (connected, unit) {
        (Err(error), _) => error,
        (Ok(_), Some(unit)) if !unit.starts() => {
            return Wrong(
                format!(
                    "{shown}: systemd has programs on this host wait there for vhost-rgpu, which does not start"
                ),
                why_not("vhost-rgpu"),
            );
        }
        (Ok(None), _) => return Good(format!("{shown}: programs on this host can reach vhost-rgpu")),
        (Ok(Some(refusal)), _) => {
            let text = format!("{shown}: programs on this host are refused: {}", refusal.reason());
            return match Answer::from_number(refusal.status) {
                // It may serve virtual machines only.
                Answer::Invalid => Note(
                    text,
                    Some("if they are to use GPUs: a section [native] in /etc/rgpu/vhost-rgpu.toml, then systemctl reload vhost-rgpu".into()),
                ),
                _ => Wrong(text, "journalctl -u vhost-rgpu has more".into()),
            };
        }
    };
    let step = match error.kind() {
        ErrorKind::NotFound if !named => {
            let text = format!("{shown} does not exist: start programs on this host with `rgpuctl run`");
            return Note(text, None);
        }
        ErrorKind::PermissionDenied => {
            "as root: adduser USER rgpu, with this user's name; then log in again. Members of the socket's group may use it"
        }
        ErrorKind::ConnectionRefused if !named => {
            "systemctl start vhost-rgpu; journalctl -u vhost-rgpu shows why it ended"
        }
        _ => "correct or unset RGPU_SOCKET, or start vhost-rgpu with this --native-socket",
    };
    Wrong(format!("programs on this host cannot reach vhost-rgpu at {shown}: {error}"), step.into())
}

/// Connects to a socket for packets, as programs do. Returns what vhost-rgpu says at once, before any
/// request, to a program that it refuses.
fn connect_packets(path: &Path) -> std::io::Result<Option<Response>> {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(500))?;
    let mut packet = [0; size_of::<Response>()];
    let length = recv(socket.as_raw_fd(), &mut packet, MsgFlags::empty()).unwrap_or(0);
    Ok((length == packet.len()).then(|| Response::read_from_bytes(&packet).ok()).flatten())
}

/// Pinned memory counts against this limit, in guests and on hosts.
fn memory_lock() -> Finding {
    const ENOUGH: u64 = 1 << 30;
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) if soft >= ENOUGH || nix::unistd::geteuid().is_root() => {
            Good("programs may pin memory".into())
        }
        Ok((soft, _)) => Note(
            format!("programs may pin only {} KiB; larger allocations fall back to copies", soft >> 10),
            Some(
                "ulimit -l unlimited; or permanently: LimitMEMLOCK=infinity or /etc/security/limits.conf"
                    .into(),
            ),
        ),
        Err(error) => Note(format!("the limit of locked memory cannot be read: {error}"), None),
    }
}

/// Checks which file a program would load as `name`, and whether it is rgpu's.
fn library(name: &str, needed: bool) -> Finding {
    let step = "put rgpu's library folder first in LD_LIBRARY_PATH, or add it to /etc/ld.so.conf.d/ and run ldconfig; `rgpuctl run` does this for one program";
    // On a host, one line says how programs find all of them.
    let on_host = || match crate::installation::libraries() {
        Ok(folder) => format!("rgpuctl run -- PROGRAM, or LD_LIBRARY_PATH={} PROGRAM", folder.display()),
        Err(_) => "for programs and containers of this host: install the package rgpu-libs".into(),
    };
    let wrong = |text: String| match needed {
        true => Wrong(text, step.into()),
        false => Note(text, (name == "libcuda.so.1").then(on_host)),
    };
    let Some(path) = which_library(name) else {
        return wrong(format!("programs cannot find {name}"));
    };
    match std::fs::read(&path) {
        Ok(bytes) if contains(&bytes, b"RGPU_LOG") => Good(format!("{name} is rgpu's: {}", path.display())),
        Ok(_) => wrong(format!("{name} is {}, which is not rgpu's", path.display())),
        Err(error) => wrong(format!("{} cannot be read: {error}", path.display())),
    }
}

/// The loader's default folders, on Debian and on Fedora.
const LAST_FOLDERS: [&str; 6] =
    ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// Where the loader would find `name`: `LD_LIBRARY_PATH` first, then its cache, then its own folders.
fn which_library(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let there = |path: &PathBuf| path.is_file();
    let listed = std::env::split_paths(&path).map(|folder| folder.join(name)).find(there);
    let cached = || {
        let cache = ["ldconfig", "/sbin/ldconfig"]
            .iter()
            .find_map(|program| Command::new(program).arg("-p").output().ok())?;
        in_loader_cache(&String::from_utf8_lossy(&cache.stdout), name)
    };
    let last = || LAST_FOLDERS.iter().map(|folder| Path::new(folder).join(name)).find(there);
    listed.or_else(cached).or_else(last)
}

/// The path of `name` in the output of `ldconfig -p`.
fn in_loader_cache(cache: &str, name: &str) -> Option<PathBuf> {
    cache
        .lines()
        .filter(|line| line.split_whitespace().next() == Some(name))
        .find_map(|line| line.split(" => ").nth(1))
        .map(|path| PathBuf::from(path.trim()))
}

/// Whether this user can use a server. `folder`: the user's key, and the servers that it trusts.
fn server(address: &Address, folder: &Path, insecure: bool) -> Finding {
    let (host, port) = match address {
        Address::Tcp(host, port) => (host, port),
        Address::Unix(path) => match UnixStream::connect(path) {
            Ok(_) => return served(format!("the server at {address} answers"), address, Security::Insecure),
            Err(error) => {
                let step = "systemctl start rgpu-server; root and the socket's group may connect to it";
                return Wrong(format!("the server {address} cannot be reached: {error}"), step.into());
            }
        },
    };
    let shown = address.to_string();
    let bare = shown.strip_prefix("tcp:").unwrap_or(&shown);
    let step = format!(
        "start rgpu-server with a tcp address on the server, and allow {bare} in every firewall on the way"
    );
    let addresses: Vec<_> = match (host.as_str(), *port).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) => {
            return Wrong(
                format!("cannot look up {host}: {error}"),
                "correct the name, add it to DNS or to /etc/hosts, or give the server's address".into(),
            );
        }
    };
    let mut last = "it has no address".to_owned();
    for at in addresses {
        match TcpStream::connect_timeout(&at, Duration::from_secs(3)) {
            Ok(_) if insecure => {
                let answers = format!("the server at {bare} ({at}) answers without TLS");
                return served(answers, address, Security::Insecure);
            }
            Ok(socket) => return protected(address, folder, bare, at, socket),
            Err(error) => last = error.to_string(),
        }
    }
    Wrong(format!("the server {bare} cannot be reached: {last}"), step)
}

/// Whether this user and the server trust each other's keys, and the server has GPUs for this user.
fn protected(address: &Address, folder: &Path, server: &str, at: SocketAddr, socket: TcpStream) -> Finding {
    let files = ClientFiles { folder: folder.to_owned() };
    let credentials = match files.credentials(&address.to_string()) {
        Ok(credentials) => credentials,
        Err(e) => {
            let of_root = [CLIENT_FOLDER, protocol::native::DEFAULT_SOCKET];
            let shared = of_root.iter().any(|path| Path::new(path).exists());
            let keyless = matches!(e, CredentialsError::NoKey { .. }) && !nix::unistd::geteuid().is_root();
            let step = how_to_join(shared && keyless);
            return Wrong(
                format!("a server listens at {server} ({at}), but: {}", with_causes(&e)),
                step.into(),
            );
        }
    };
    let unnamed = rustls::pki_types::ServerName::IpAddress(at.ip().into());
    let deadline = Instant::now() + Duration::from_secs(5);
    match Stream::tls_client(socket.into(), credentials.greeting(), unnamed, deadline) {
        Ok(_) => {
            let trusted = format!("the server at {server} ({at}) has the key that is pinned for it");
            served(trusted, address, Security::Tls(Arc::new(files)))
        }
        Err(e) => Wrong(format!("no protected connection to {server} ({at}): {e}"), step_after(&e).into()),
    }
}

/// What makes a server known to this user. `shared`: this machine uses servers already, with root's key.
fn how_to_join(shared: bool) -> &'static str {
    if shared {
        "use this machine's vhost-rgpu (LD_LIBRARY_PATH=/usr/lib/rgpu), which has root's key. For a key of this user: rgpuctl enroll NAME on the server, and here what it prints, where NAME is not this machine's but new, such as HOST-USER: whoever has a name already would be locked out"
    } else {
        "run rgpuctl enroll NAME on the server, with a name that nobody else has, and here what it prints"
    }
}

/// What to do if there is no protected connection to a server.
fn step_after(error: &std::io::Error) -> &'static str {
    use rustls::CertificateError as Of;
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::InvalidCertificate(
            Of::Expired | Of::ExpiredContext { .. } | Of::NotValidYet | Of::NotValidYetContext { .. },
        )) => {
            "compare the clocks of both machines (date); if they are right, the server needs a new certificate of its authority"
        }
        _ => {
            "if the server has a new key, join it again with rgpuctl enroll and rgpuctl join; otherwise somebody else answers there"
        }
    }
}

/// What a server that is reached says to this user, whom it may refuse. `reached`: what is known of it.
fn served(reached: String, address: &Address, security: Security) -> Finding {
    match ask(address, security, &Question::Inventory {}) {
        Ok(Reply::Inventory(gpus)) => Good(format!("{reached}; GPUs for this client: {}", gpus.len())),
        Ok(_) => Wrong(
            format!("{reached}, but does not say which GPUs this client may use"),
            "install the same release of rgpu on both".into(),
        ),
        Err(e) => Wrong(
            format!("{reached}, but: {}", with_causes(&e)),
            "rgpuctl clients on the server lists who may connect; journalctl -u rgpu-server says whom it refused, and why".into(),
        ),
    }
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_certificate_is_no_reason_to_join_again() {
        let of = |error| {
            std::io::Error::new(std::io::ErrorKind::InvalidData, rustls::Error::InvalidCertificate(error))
        };
        assert!(step_after(&of(rustls::CertificateError::Expired)).contains("clocks"));
        assert!(step_after(&of(rustls::CertificateError::NotValidYet)).contains("clocks"));
        assert!(step_after(&of(rustls::CertificateError::UnknownIssuer)).contains("join it again"));
    }

    #[test]
    fn nobody_is_told_to_take_a_name_that_is_in_use() {
        assert!(how_to_join(false).contains("a name that nobody else has"));
        let shared = how_to_join(true);
        assert!(shared.starts_with("use this machine's vhost-rgpu"), "{shared}");
        assert!(shared.contains("HOST-USER"), "{shared}");
    }

    #[test]
    fn versions_are_parsed() {
        assert_eq!(
            qemu_version("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)\n"),
            Some((11, 1))
        );
        assert_eq!(qemu_version("no such thing"), None);
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0\n";
        assert_eq!(driver_version(text), Some(580));
        assert_eq!(driver_version(""), None);
    }

    #[test]
    fn gpus_without_a_device_node_are_told() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert!(matches!(gpu(root), Note(text, None) if text.starts_with("there is no NVIDIA GPU")));
        for (folder, minor) in [("0000:0a:00.0", 1), ("0000:01:00.0", 0)] {
            let folder = root.join("proc/driver/nvidia/gpus").join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            let text = format!("Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n");
            std::fs::write(folder.join("information"), text).unwrap();
        }
        let nvrm = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n";
        std::fs::write(root.join("proc/driver/nvidia/version"), nvrm).unwrap();
        std::fs::create_dir(root.join("dev")).unwrap();
        for (made, missing) in [
            ("null", "there is no /dev/nvidiactl, /dev/nvidia0, /dev/nvidia1, so"),
            ("nvidiactl", "there is no /dev/nvidia0, /dev/nvidia1, so"),
            ("nvidia0", "there is no /dev/nvidia1, so"),
        ] {
            std::fs::write(root.join("dev").join(made), "").unwrap();
            let found = gpu(root);
            assert!(matches!(&found, Wrong(text, _) if text.starts_with(missing)), "{found:?}");
        }
        std::fs::write(root.join("dev/nvidia1"), "").unwrap();
        assert!(matches!(gpu(root), Good(text) if text.contains("driver 580")));
    }

    #[test]
    fn a_workers_sandbox_is_shown_as_the_kernel_reports_it() {
        let worker = |state: serde_json::Value| {
            sandbox("worker", &serde_json::json!({"pid": 7, "stage": "ready", "sandbox": state}))
        };
        let whole = worker(serde_json::json!({
            "user": 1879048192, "namespaces": ["mnt", "pid", "ipc", "net"], "filters": 2, "no_new_privileges": true,
            "memory_limit": 1 << 30,
        }));
        let text = "worker 7 (ready): user 1879048192, its own mnt, pid, ipc, net namespaces, 2 system call filters, at most 1024 MiB of memory";
        assert_eq!(whole, Good(text.into()));
        let open = worker(
            serde_json::json!({"user": 0, "namespaces": [], "filters": 0, "no_new_privileges": false}),
        );
        assert!(
            matches!(&open, Note(text, Some(_)) if text.contains("no namespaces of its own")),
            "{open:?}"
        );
        let device = sandbox("device process", &serde_json::json!({"process": 8, "serves": "vm a"}));
        assert!(
            matches!(&device, Note(text, _) if text.starts_with("device process 8 (vm a): user unknown"))
        );
    }

    #[test]
    fn a_user_without_permission_is_not_told_to_restart_daemons() {
        let socket = Path::new("/run/rgpu/vhost-rgpu.status");
        let denied = silent("vhost-rgpu", socket, ErrorKind::PermissionDenied, Some(&Unit::default()));
        assert!(matches!(&denied, Note(_, Some(step)) if step.contains("as root")), "{denied:?}");
        let ended = silent("vhost-rgpu", socket, ErrorKind::ConnectionRefused, Some(&Unit::default()));
        assert!(
            matches!(&ended, Wrong(_, step) if step.contains("systemctl restart vhost-rgpu")),
            "{ended:?}"
        );
        let absent = silent("rgpu-server", socket, ErrorKind::NotFound, None);
        assert!(matches!(&absent, Note(_, Some(step)) if step.contains("package rgpu-server")), "{absent:?}");
    }

    #[test]
    fn what_systemd_knows_of_a_daemon_that_does_not_start_is_told() {
        let socket = Path::new("/run/rgpu/vhost-rgpu.status");
        let unit = |state: &str, detail: &str, said: &str| Unit {
            state: state.to_owned(),
            detail: detail.to_owned(),
            said: said.to_owned(),
        };
        // The socket's file may be left of an earlier run.
        for cause in [ErrorKind::NotFound, ErrorKind::ConnectionRefused] {
            let error = "vhost-rgpu: x.toml: line 5: native.server: is missing";
            let failing =
                silent("vhost-rgpu", socket, cause, Some(&unit("activating", "auto-restart", error)));
            let told = "does not start: its unit is activating (auto-restart); it last said: vhost-rgpu: x.toml: line 5";
            assert!(
                matches!(&failing, Wrong(text, step) if text.contains(told) && step.contains("--check-config")),
                "{failing:?}"
            );
            let failed = silent("rgpu-server", socket, cause, Some(&unit("failed", "failed", "")));
            assert!(matches!(&failed, Wrong(text, _) if text.ends_with("is failed (failed)")), "{failed:?}");
        }
        let stopped = silent("vhost-rgpu", socket, ErrorKind::NotFound, Some(&unit("inactive", "dead", "")));
        assert!(matches!(&stopped, Note(_, Some(step)) if step.contains("enable --now")), "{stopped:?}");
        let mute = silent("vhost-rgpu", socket, ErrorKind::NotFound, Some(&unit("active", "running", "")));
        assert!(matches!(&mute, Note(_, Some(step)) if step.contains("[status]")), "{mute:?}");
    }

    #[test]
    fn each_reason_why_programs_do_not_reach_the_socket_has_its_step() {
        let step = |kind: ErrorKind, named| match native(Path::new("/s"), named, Err(kind.into()), None) {
            Wrong(_, step) => step,
            Note(text, _) | Good(text) => text,
        };
        assert!(step(ErrorKind::PermissionDenied, false).contains("adduser USER rgpu"));
        assert!(step(ErrorKind::ConnectionRefused, false).contains("systemctl start vhost-rgpu"));
        assert!(step(ErrorKind::ConnectionRefused, true).contains("RGPU_SOCKET"));
        assert!(step(ErrorKind::NotFound, true).contains("RGPU_SOCKET"));
        assert!(step(ErrorKind::NotFound, false).contains("rgpuctl run"));
        let refused = |answer| native(Path::new("/s"), false, Ok(Some(Response::new(answer, "why"))), None);
        assert!(
            matches!(refused(Answer::Invalid), Note(text, Some(_)) if text.ends_with("are refused: why"))
        );
        assert!(matches!(refused(Answer::NoResources), Wrong(..)));
        let reached = |unit: Option<&Unit>| native(Path::new("/s"), false, Ok(None), unit);
        assert!(matches!(reached(None), Good(_)));
        for (state, starts) in
            [("active", true), ("inactive", true), ("activating", false), ("failed", false)]
        {
            let found = reached(Some(&Unit { state: state.to_owned(), ..Unit::default() }));
            assert_eq!(matches!(found, Good(_)), starts, "{state}: {found:?}");
        }
    }

    #[test]
    fn the_loader_cache_is_searched_by_exact_name() {
        let cache = "2 libs found\n\tlibcuda.so.10 (libc6,x86-64) => /a/libcuda.so.10\n\tlibcuda.so.1 (libc6,x86-64) => /b/libcuda.so.1\n";
        assert_eq!(in_loader_cache(cache, "libcuda.so.1"), Some("/b/libcuda.so.1".into()));
        assert_eq!(in_loader_cache(cache, "libcuda.so"), None);
    }

    #[test]
    fn an_unreachable_server_is_named() {
        let check = |text: &str| server(&text.parse().unwrap(), Path::new("/nonexistent"), false);
        // Nothing listens at port 1 of this machine. No name ends in ".invalid".
        for (address, told, step) in [
            ("127.0.0.1:1", "the server 127.0.0.1:1 cannot be reached: ", "start rgpu-server"),
            ("gpu.invalid", "cannot look up gpu.invalid: ", "correct the name"),
            ("unix:/nonexistent/socket", "the server unix:/nonexistent/socket cannot", "systemctl start"),
        ] {
            let found = check(address);
            assert!(
                matches!(&found, Wrong(text, to_do) if text.starts_with(told) && to_do.contains(step)),
                "{found:?}"
            );
        }
    }
}
