//! The daemon's options from the command line and the configuration file (`options`), and what they say to
//! serve.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::builder::Resettable;
use clap::{Args, CommandFactory, FromArgMatches, Parser, value_parser};
use host_bridge::bridge::{CacheUse, CompressUse, Security, SessionConfig, TransportKind};
use host_bridge::framing::Address;
use host_bridge::server::Server;
use host_bridge::verbs::Settings;
use identity::ClientFiles;
use identity::servers::CLIENT_FOLDER;
use options::document::Part;
use options::{File, Given, Layer, Section, manual, parse_filter};
use protocol::device::MAX_EXTENTS;
use sandbox::{Mode, Policy};
use thiserror::Error;
use tracing_subscriber::EnvFilter;

use crate::servers::{self, Servers};
use crate::sockets::Access;

/// Give virtual machines and processes of this host the GPUs of a server.
///
/// What to serve comes from a configuration file, or from --socket (one virtual machine) and --native-socket
/// (processes of this host). Flags override the file.
#[derive(Debug, Parser)]
#[command(
    name = "vhost-rgpu",
    version,
    max_term_width = 100,
    after_long_help = "Exit status:
  0  it was told to end, or the configuration is valid
  1  it failed; the last line on standard error says why
  2  the command line is wrong

Signals:
  SIGTERM, SIGINT  end the sessions, and end
  SIGUSR2          go on as the version that is installed, with all sessions

Files:
  /etc/rgpu/vhost-rgpu.toml     configuration of the packaged unit
  /var/lib/rgpu/client          this host's key and the servers that it trusts
  /run/rgpu/native.sock         where programs of this host connect
  /run/rgpu/vhost-rgpu.status   where rgpuctl reads the status
  /run/rgpu/vhost-rgpu.admin    where rgpuctl replaces the daemon by the version that is installed

Environment:
  RUST_LOG  what to log, as --log, which overrides it"
)]
pub struct Arguments {
    #[command(flatten)]
    pub common: options::Common,
    /// Run as a device process, with this descriptor as the socket to the keeper; only vhost-rgpu itself
    /// starts one
    #[arg(long, hide = true, value_name = "N")]
    pub device_process: Option<RawFd>,
}

/// A configuration file's contents as they were first read. Device processes get them from the keeper, so
/// that all processes agree.
#[derive(Debug, Clone)]
pub struct Source {
    /// Its path, for messages.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// Keys outside any section.
#[derive(Debug, Args)]
struct DaemonOptions {
    /// What to log: a level (off, error, warn, info, debug, trace), and filters as in RUST_LOG. That
    /// environment variable overrides the file, and --log overrides both
    #[arg(long, value_name = "FILTER", default_value = "info", value_parser = parse_filter)]
    log: String,
    /// Maximum microseconds to poll for commands before sleeping. The default is 50, 20 with two or three
    /// processors, and 0 (never poll) with one
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(0..=10_000))]
    poll_us: Option<u64>,
    /// Unix socket where the daemon reports its status to rgpuctl, one JSON object per connection. None
    /// by default
    #[arg(id = "status.socket", long = "status-socket", value_name = "PATH")]
    status_socket: Option<PathBuf>,
    /// Unix socket where rgpuctl upgrade replaces the daemon; only its user and root may connect. None
    /// by default
    #[arg(id = "admin.socket", long = "admin-socket", value_name = "PATH")]
    admin_socket: Option<PathBuf>,
    /// Where metrics are served.
    #[command(flatten)]
    metrics: metrics::Options,
    /// What device processes may reach.
    #[command(flatten)]
    sandbox: SandboxOptions,
}

/// What the processes that serve guests and programs may reach.
#[derive(Debug, Args)]
struct SandboxOptions {
    /// Whether device processes are confined, and what happens to system calls that they should not make:
    /// they end the process, and the log names them
    #[arg(id = "sandbox.mode", long = "sandbox", value_enum, default_value_t = Mode::On)]
    mode: Mode,
    /// Refuse to start if this machine does not provide every part of the sandbox. Without it, the log says
    /// what is missing
    #[arg(id = "sandbox.require", long = "require-sandbox", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    require: bool,
    /// User IDs for device processes, one each. No account and no other program may use them
    #[arg(id = "sandbox.users", long = "device-users", value_name = "FIRST-LAST", default_value_t = sandbox::DEVICE_PROCESS_USERS)]
    users: sandbox::Range,
    /// Maximum memory of one device process besides its guest's, in MiB. 0 means no limit. Needs cgroup v2
    #[arg(id = "sandbox.memory_mib", long = "device-memory-mib", value_name = "N", default_value_t = 0, value_parser = value_parser!(u64).range(0..=1 << 40))]
    memory_mib: u64,
    /// Maximum threads of one device process. 0 means no limit
    #[arg(id = "sandbox.tasks", long = "device-tasks", value_name = "N", default_value_t = 65536)]
    tasks: u64,
    /// Maximum CPU time of one device process, in percent of one CPU. 0 means no limit. Needs cgroup v2
    #[arg(id = "sandbox.cpu_percent", long = "device-cpu-percent", value_name = "N", default_value_t = 0)]
    cpu_percent: u64,
}

impl From<SandboxOptions> for Policy {
    fn from(options: SandboxOptions) -> Policy {
        let SandboxOptions { mode, require, users, memory_mib, tasks, cpu_percent } = options;
        let limits = sandbox::Limits { memory: memory_mib << 20, tasks, cpu_percent };
        Policy { mode, require, users: Some(users), limits }
    }
}

/// Keys only for `[[vm]]` sections.
#[derive(Debug, Args)]
struct VmOptions {
    /// vhost-user socket of the virtual machine, which QEMU, libvirt or Cloud Hypervisor connects to. systemd
    /// may create it: descriptor name "vm-NAME". By default no virtual machine is served
    #[arg(id = "vm.socket", long = "socket", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Permissions of that socket's file, in octal: a process that may connect is the virtual machine
    #[arg(id = "vm.mode", long = "socket-mode", value_name = "MODE", default_value = "0o660", value_parser = parse_mode)]
    mode: u32,
    /// Group of that socket's file, for a VMM that does not run as root. By default the daemon's own
    #[arg(id = "vm.group", long = "socket-group", value_name = "NAME")]
    group: Option<String>,
}

/// Keys only for the `[native]` section.
#[derive(Debug, Args)]
struct NativeOptions {
    /// Socket for processes of this host. systemd may create it: descriptor name "native"
    #[arg(id = "native.socket", long = "native-socket", value_name = "PATH", default_value = protocol::native::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Permissions of that socket's file, in octal: a process that may connect may use the GPU. Of a socket
    /// that systemd creates, they are SocketMode= in its unit
    #[arg(id = "native.mode", long = "native-mode", value_name = "MODE", default_value = "0o660", value_parser = parse_mode)]
    mode: u32,
    /// Group of that socket's file. By default the daemon's own. Of a socket that systemd creates, it is
    /// SocketGroup= in its unit
    #[arg(id = "native.group", long = "native-group", value_name = "NAME")]
    group: Option<String>,
    /// Maximum concurrent channels of one user of this host, so that no user can take all of them
    #[arg(id = "native.max_channels_per_user", long = "max-channels-per-user", value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..=65536))]
    max_channels_per_user: u32,
    /// Servers that a program may name in RGPU_SERVERS besides those of "server", in the same form.
    /// RGPU_SERVERS can name no others. By default there are none. With "/0,2", only these devices
    #[arg(id = "native.named_servers", long = "named-servers", value_name = "ADDRESS", num_args = 1)]
    named_servers: Vec<Server>,
}

/// Keys of both sections: how sessions are opened and limited.
#[derive(Debug, Args)]
struct SessionOptions {
    /// Name of the virtual machine or host, for the server and the log: letters, digits, "-", "_" and ".". By
    /// default the name of this host
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    name: Option<String>,
    /// The server: tcp:HOST:PORT (port 9700 if omitted) or, on this host, unix:PATH. Must be given. "/0,2"
    /// after it selects devices of that server by its numbers, "#KEY" a lease (rgpuctl lease). With several
    /// servers, in a list, each program has the devices of all of them, in this order
    #[arg(long, value_name = "ADDRESS", num_args = 1)]
    server: Vec<Server>,
    /// Transport: tcp, verbs (InfiniBand or RoCE; the server's address is still that of its TCP socket) or
    /// local (the server maps the client's memory; needs a unix: address). By default local for unix: and tcp
    /// for tcp:. With several servers, those that the transport cannot reach use their default. With local,
    /// client and server share memory: the server's worker can read and change all memory of the virtual
    /// machine, or the memory that a host's program shares with rgpu, at any time and not only during copies.
    /// Nobody proves to be the server at a unix: address: who can put a socket there gets this memory
    #[arg(long, value_name = "NAME")]
    transport: Option<TransportKind>,
    /// Connect over tcp without TLS. Anyone on the network can then read and change what is sent. The server
    /// must be insecure, too
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    insecure: bool,
    /// Folder of this host's key and of the servers that it trusts, both made by rgpuctl join
    #[arg(long, value_name = "FOLDER", default_value = CLIENT_FOLDER)]
    identity: PathBuf,
    /// When to ask whether the server has data in its cache, which need not be sent then (transport tcp). A
    /// server has one with --cache
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = CacheUse::Slow)]
    cache: CacheUse,
    /// When to compress data on its way to the server, and whether the server may compress what it sends
    /// (transport tcp)
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = CompressUse::Auto)]
    compress: CompressUse,
    /// TCP connections for bulk data to request for each session, 1 to 16; the server's rules may allow
    /// fewer. The default is 4, and 6 with TLS
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=16))]
    data_connections: Option<u32>,
    /// Seconds without any message after which a server that owes an answer counts as lost. Over tcp the link
    /// already counts as lost after 2, and the session is resumed
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = value_parser!(u64).range(1..=3600))]
    lost_after_seconds: u64,
    /// Sessions over verbs.
    #[command(flatten)]
    rdma: Settings,
    /// What clients may use.
    #[command(flatten)]
    limits: LimitOptions,
}

/// Limits of a virtual machine, or of all native clients.
#[derive(Debug, Args)]
struct LimitOptions {
    /// Maximum concurrent channels: processes that use the GPU. In [native], of all clients together
    #[arg(id = "limits.max_channels", long = "max-channels", value_name = "N", default_value_t = 256, value_parser = value_parser!(u32).range(1..=65536))]
    max_channels: u32,
    /// Maximum pieces of guest memory in one request
    #[arg(id = "limits.max_extents", long = "max-extents", value_name = "N", default_value_t = MAX_EXTENTS, value_parser = value_parser!(u32).range(1..=i64::from(MAX_EXTENTS)))]
    max_extents: u32,
    /// Maximum size of one channel, in MiB
    #[arg(id = "limits.max_channel_mib", long = "max-channel-mib", value_name = "N", default_value_t = 256, value_parser = value_parser!(u64).range(2..=4095))]
    max_channel_mib: u64,
    /// Maximum pinned memory of one process, in MiB. 0 means no limit besides the guest's own
    #[arg(id = "limits.max_registered_mib", long = "max-registered-mib", value_name = "N", default_value_t = 0, value_parser = value_parser!(u64).range(0..=1 << 40))]
    max_registered_mib: u64,
    /// Maximum pieces of guest memory that all processes of a guest have pinned together; adjacent pages are
    /// one piece. Each piece costs this host about 50 bytes
    #[arg(id = "limits.max_registered_extents", long = "max-registered-extents", value_name = "N", default_value_t = 4 << 20, value_parser = value_parser!(u32).range(1..=1 << 28))]
    max_registered_extents: u32,
}

#[derive(Debug, Args)]
struct VmSection {
    #[command(flatten)]
    session: SessionOptions,
    #[command(flatten)]
    own: VmOptions,
}

#[derive(Debug, Args)]
struct NativeSection {
    #[command(flatten)]
    session: SessionOptions,
    #[command(flatten)]
    own: NativeOptions,
}

/// What to serve.
#[derive(Debug, Clone)]
pub struct Config {
    /// Filter of the log, as in `RUST_LOG`.
    pub log: String,
    /// Virtual machines.
    pub vms: Vec<Vm>,
    /// Processes of this host.
    pub native: Option<Native>,
    /// Socket for the status.
    pub status: Option<PathBuf>,
    /// Socket for `rgpuctl upgrade`.
    pub admin: Option<PathBuf>,
    /// Where metrics are served.
    pub metrics: metrics::Options,
    /// What device processes may reach.
    pub sandbox: Policy,
}

/// One virtual machine.
#[derive(Debug, Clone)]
pub struct Vm {
    /// Its name, for the log and for the server.
    pub name: String,
    /// vhost-user socket that its VMM connects to.
    pub socket: PathBuf,
    /// Which VMMs may connect to it.
    pub access: Access,
    /// Its servers, and how its sessions are opened.
    pub servers: Servers,
    /// What its guest may use.
    pub limits: Limits,
}

/// The socket for processes of this host.
#[derive(Debug, Clone)]
pub struct Native {
    /// The socket.
    pub socket: PathBuf,
    /// Which users' programs may connect to it.
    pub access: Access,
    /// Concurrent channels of one user.
    pub max_channels_per_user: u32,
    /// Its servers, and how sessions are opened.
    pub servers: Servers,
    /// What all clients together (channels) and each of them (sizes) may use.
    pub limits: Limits,
}

/// What a guest, or a native client, may use. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Concurrent channels.
    pub max_channels: u32,
    /// Extents in one request.
    pub max_extents: u32,
    /// Size of one channel.
    pub max_channel_size: u64,
    /// Memory that one channel has registered; 0 means no limit.
    pub max_registered: u64,
    /// Pieces of memory that all channels of a guest have registered.
    pub max_registered_extents: u32,
}

/// Why there is nothing to serve.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// An option is wrong.
    #[error(transparent)]
    Options(#[from] options::Error),
    /// There is no section and no socket.
    #[error("nothing to serve: configure a [[vm]] or [native] section, or give --socket or --native-socket")]
    Nothing,
    /// A flag for one virtual machine, and a file with several.
    #[error("--socket is for one virtual machine, and the file has {0} [[vm]] sections")]
    SeveralVms(usize),
}

impl Config {
    /// How sessions are opened, for each section and server.
    pub fn sessions(&self) -> impl Iterator<Item = &SessionConfig> {
        let vms = self.vms.iter().map(|vm| &vm.servers);
        vms.chain(self.native.iter().map(|native| &native.servers)).flat_map(Servers::all)
    }

    /// What to do about a file that everybody on this host can read, if it has a lease's key.
    pub fn exposed_lease(&self, file: &Path) -> Option<String> {
        let leased = self.sessions().any(|session| session.lease.is_some());
        let mode = std::fs::metadata(file).ok()?.permissions().mode();
        let shown = file.display();
        (leased && mode & 0o004 != 0).then(|| {
            format!("everybody on this host can read the key of a lease in {shown}, and use its GPUs: chmod 640 {shown}")
        })
    }

    /// The servers on other machines to which sessions are opened without TLS.
    pub fn insecure_servers(&self) -> Vec<String> {
        let sessions = self.sessions();
        let insecure = |s: &&SessionConfig| s.source().is_none() && matches!(s.server, Address::Tcp(..));
        let mut all: Vec<_> = sessions.filter(insecure).map(|session| session.server.to_string()).collect();
        all.sort();
        all.dedup();
        all
    }
}

impl Arguments {
    /// The command with every option.
    fn full_command() -> clap::Command {
        let command = Arguments::command();
        // Each structure makes its own comment that of the program.
        let (about, long_about) = (command.get_about().cloned(), command.get_long_about().cloned());
        let command = VmOptions::augment_args(DaemonOptions::augment_args(command));
        let command = SessionOptions::augment_args(NativeOptions::augment_args(command));
        command.about(Resettable::from(about)).long_about(Resettable::from(long_about))
    }

    /// Parses a command line and returns it with all options that it sets. An invalid command line ends the
    /// process with clap's message.
    pub fn read(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> (Arguments, Given) {
        let given = Given::parse(Arguments::full_command(), words);
        (Arguments::from_arg_matches(given.matches()).unwrap_or_else(|e| e.exit()), given)
    }

    /// Writes the man pages and shell completions below `share`.
    pub fn write_manual(share: &Path) -> std::io::Result<()> {
        manual::write(Arguments::full_command(), share)
    }

    /// The configuration file, if there is one.
    pub fn source(&self) -> Result<Option<Source>, ConfigError> {
        let read = |path: &PathBuf| match std::fs::read_to_string(path) {
            Ok(text) => Ok(Source { path: path.clone(), text }),
            Err(source) => Err(options::Error::Read { path: path.clone(), source }),
        };
        Ok(self.common.config.as_ref().map(read).transpose()?)
    }

    /// Whether a configuration file is given.
    pub fn has_source(&self) -> bool {
        self.common.config.is_some()
    }

    /// What to serve.
    pub fn config(&self, given: &Given, source: Option<&Source>) -> Result<Config, ConfigError> {
        let parse = |source: &Source| File::parse(&source.path, &source.text, &["vm", "native"]);
        let file = source.map(parse).transpose()?;
        let mut config = read(given, file.as_ref())?;
        let all = Layer { given, section: None };
        // The variable may be meant for another program, whose filters are another library's.
        match std::env::var("RUST_LOG").map(|log| (EnvFilter::try_new(&log), log)) {
            Ok((Ok(_), log)) if !all.has_flag("log") => config.log = log,
            Ok((Err(e), log)) if self.device_process.is_none() => {
                eprintln!("vhost-rgpu: RUST_LOG={log} is ignored: {e}");
            }
            _ => {}
        }
        Ok(config)
    }
}

fn layer<'a>(given: &'a Given, file: Option<&'a File>, section: Option<&'a Section>) -> Layer<'a> {
    Layer { given, section: file.zip(section) }
}

/// What a command line and a file say to serve.
fn read(given: &Given, file: Option<&File>) -> Result<Config, ConfigError> {
    let layer = |section| layer(given, file, section);
    let sections = |name| file.into_iter().flat_map(move |file| file.sections(name)).map(Some);
    let outside = layer(sections("").next().flatten());
    let daemon: DaemonOptions = outside.read()?;
    for (id, path) in [("status.socket", &daemon.status_socket), ("admin.socket", &daemon.admin_socket)] {
        path.iter().try_for_each(|path| outside.check_absolute(id, path))?;
    }
    let poll = daemon.poll_us.map(Duration::from_micros);

    let mut all: Vec<Option<&Section>> = sections("vm").collect();
    if layer(None).has_flag("vm.socket") {
        match all.len() {
            0 => all.push(None),
            1 => {}
            several => return Err(ConfigError::SeveralVms(several)),
        }
    }
    let vms: Vec<Vm> = all.iter().map(|section| vm(&layer(*section), poll)).collect::<Result<_, _>>()?;
    let (mut names, mut sockets) = (HashMap::new(), HashMap::new());
    for (vm, section) in vms.iter().zip(&all) {
        let line = |key| section.map_or(0, |section| section.line_of(key));
        if let Some(line) = names.insert(&vm.name, line("name")) {
            let text = format!(
                "the section at line {line} already has the name {:?}; each VM needs its own",
                vm.name
            );
            return Err(layer(*section).wrong("name", text).into());
        }
        if let Some(line) = sockets.insert(&vm.socket, line("socket")) {
            let text = format!(
                "the section at line {line} already has the socket {}; each VM needs its own",
                vm.socket.display()
            );
            return Err(layer(*section).wrong("socket", text).into());
        }
    }

    let mut natives: Vec<Option<&Section>> = sections("native").collect();
    if natives.is_empty() && layer(None).has_flag("native.socket") {
        natives.push(None);
    }
    if let [_, second, ..] = natives[..] {
        return Err(layer(second).wrong("socket", "there is a [native] section already").into());
    }
    let native = natives.first().map(|section| native(&layer(*section), poll)).transpose()?;
    if vms.is_empty() && native.is_none() {
        return Err(ConfigError::Nothing);
    }
    let sandbox = daemon.sandbox.into();
    let DaemonOptions { log, status_socket: status, admin_socket: admin, metrics, .. } = daemon;
    Ok(Config { log, vms, native, status, admin, metrics, sandbox })
}

fn vm(layer: &Layer<'_>, poll: Option<Duration>) -> Result<Vm, options::Error> {
    let options: VmSection = layer.read()?;
    let missing = |key| layer.wrong(key, "is missing");
    let name = match layer.section {
        Some(_) => options.session.name.clone().ok_or_else(|| missing("name"))?,
        None => options.session.name.clone().unwrap_or_else(host_name),
    };
    let VmOptions { socket, mode, group } = options.own;
    let socket = socket.ok_or_else(|| missing("socket"))?;
    layer.check_absolute("vm.socket", &socket)?;
    let (servers, limits) = servers(layer, &name, &options.session, &[], poll)?;
    Ok(Vm { name, socket, access: Access { mode, group }, servers, limits })
}

fn native(layer: &Layer<'_>, poll: Option<Duration>) -> Result<Native, options::Error> {
    let NativeSection { session: options, own } = layer.read()?;
    let NativeOptions { socket, mode, group, max_channels_per_user, named_servers } = own;
    let access = Access { mode, group };
    layer.check_absolute("native.socket", &socket)?;
    let name = options.name.clone().unwrap_or_else(host_name);
    let (servers, limits) = servers(layer, &name, &options, &named_servers, poll)?;
    Ok(Native { socket, access, max_channels_per_user, servers, limits })
}

/// A section's servers, the additional ones that programs may name, and the section's limits.
fn servers(
    layer: &Layer<'_>,
    client: &str,
    options: &SessionOptions,
    named: &[Server],
    poll: Option<Duration>,
) -> Result<(Servers, Limits), options::Error> {
    let Some((first, more)) = options.server.split_first() else {
        return Err(layer.wrong("server", "is missing: unix:PATH or tcp:HOST:PORT of the rgpu-server"));
    };
    for (key, list) in [("server", &options.server[..]), ("named_servers", named)] {
        if list.len() > servers::MOST {
            let text = format!("{} servers; a program can use {}", list.len(), servers::MOST);
            return Err(layer.wrong(key, text));
        }
    }
    if let Some(transport) = options.transport
        && !options.server.iter().any(|server| transport.reaches(&server.address))
    {
        return Err(layer.wrong("transport", format!("transport {transport} cannot reach {}", first.address)));
    }
    let limits = limits(&options.limits);
    let one = |server: &Server| session(server, client, options, &limits, poll);
    let all = |list: &[Server]| list.iter().map(one).collect();
    Ok((Servers::new(one(first), all(more), all(named)), limits))
}

fn limits(options: &LimitOptions) -> Limits {
    Limits {
        max_channels: options.max_channels,
        max_extents: options.max_extents,
        max_channel_size: options.max_channel_mib << 20,
        max_registered: options.max_registered_mib << 20,
        max_registered_extents: options.max_registered_extents,
    }
}

fn session(
    server: &Server,
    client: &str,
    options: &SessionOptions,
    limits: &Limits,
    poll: Option<Duration>,
) -> SessionConfig {
    let mut session = SessionConfig::new(server.address.clone(), client);
    session.devices.clone_from(&server.devices);
    session.lease = server.lease;
    if let Some(transport) = options.transport.filter(|transport| transport.reaches(&session.server)) {
        session.transport = transport;
    }
    (session.cache, session.compress) = (options.cache, options.compress);
    session.security = match options.insecure {
        true => Security::Insecure,
        false => Security::Tls(Arc::new(ClientFiles { folder: options.identity.clone() })),
    };
    session.data_connections =
        options.data_connections.unwrap_or_else(|| session.security.usual_data_connections());
    session.silence = Duration::from_secs(options.lost_after_seconds);
    session.poll = poll.unwrap_or(session.poll);
    session.max_registered = limits.max_registered;
    session.verbs = options.rdma.clone();
    session
}

/// A name appears in the log, in names of sockets that systemd creates, and in the server's messages.
fn parse_name(name: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 63 || !name.chars().all(fits) {
        return Err(format!("{name:?} is not a name: 1 to 63 letters, digits, '-', '_' and '.'"));
    }
    Ok(name.to_owned())
}

/// Permissions of a file: in octal with 0o or 0 before it, or a number as TOML gives it.
fn parse_mode(text: &str) -> Result<u32, String> {
    let octal = text.strip_prefix("0o").or_else(|| text.strip_prefix('0').filter(|rest| !rest.is_empty()));
    let mode = octal.map_or_else(|| text.parse(), |digits| u32::from_str_radix(digits, 8));
    mode.ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("{text} is not a file's permissions: write them as 0o660"))
}

/// This host's name, for the server and the log.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    parse_name(name.trim()).unwrap_or_else(|_| "host".to_owned())
}

/// The example file: `vhost-rgpu --print-config`, and the packaged `vhost-rgpu.toml`.
pub fn example() -> String {
    options::document::example(
        "Configuration of vhost-rgpu. Check it with: vhost-rgpu --config FILE --check-config\n\n\
         Lines that begin with \"#: \" show options with their defaults or an example; remove the sign to change them. Flags override this file.",
        &parts(true),
    )
}

/// The parts of the file, for its documentation. `brief`: `[native]` omits what `[[vm]]` has already shown.
fn parts(brief: bool) -> [Part; 3] {
    const VM: &[(&str, &str)] = &[
        ("transport", "\"tcp\""),
        ("rdma.device", "\"mlx5_0\""),
        ("rdma.gid_index", "3"),
        ("rdma.partition", "0x8001"),
        ("rdma.mtu", "4096"),
        ("rdma.queue_pairs", "2"),
        ("rdma.queue_depth", "128"),
        ("group", "\"libvirt-qemu\""),
        ("data_connections", "6"),
    ];
    let command = || clap::Command::new("options");
    let own = [
        "name",
        "server",
        "native.socket",
        "native.mode",
        "native.group",
        "native.max_channels_per_user",
        "native.named_servers",
    ];
    let hide = |arg: clap::Arg| {
        let hidden = !own.contains(&arg.get_id().as_str());
        arg.hide(hidden)
    };
    let native = NativeSection::augment_args(command());
    [
        Part {
            name: "",
            repeated: false,
            commented: false,
            text: "",
            options: DaemonOptions::augment_args(command()),
            set: &[
                ("status.socket", "\"/run/rgpu/vhost-rgpu.status\""),
                ("admin.socket", "\"/run/rgpu/vhost-rgpu.admin\""),
            ],
            examples: &[
                ("poll_us", "50"),
                ("metrics.listen", "\"tcp:127.0.0.1:9721\""),
                ("metrics.token_file", "\"/etc/rgpu/metrics.token\""),
            ],
        },
        Part {
            name: "vm",
            repeated: true,
            commented: true,
            text: "One section for each virtual machine.",
            options: VmSection::augment_args(command()),
            set: &[
                ("name", "\"guest1\""),
                ("socket", "\"/run/rgpu/vm-guest1.sock\""),
                ("server", "\"tcp:gpu-node:9700\""),
            ],
            examples: VM,
        },
        Part {
            name: "native",
            repeated: false,
            commented: false,
            text: "Processes of this host, and containers that the socket is mounted into. Without this section there are none. The other options of [[vm]] are valid here, too.",
            options: if brief { native.mut_args(hide) } else { NativeOptions::augment_args(command()) },
            set: &[("server", "\"unix:/run/rgpu/server.sock\"")],
            examples: &[
                ("name", "\"host\""),
                ("named_servers", "[\"gpu1:9700\", \"gpu2:9700/0,2\"]"),
                ("group", "\"rgpu\""),
            ],
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_bridge::verbs::{DEPTH, QUEUE_PAIRS};

    fn config(text: &str, flags: &[&str]) -> Result<Config, ConfigError> {
        let (_, given) = Arguments::read(std::iter::once("vhost-rgpu").chain(flags.iter().copied()));
        let file = File::parse(Path::new("x.toml"), text, &["vm", "native"])?;
        read(&given, Some(&file))
    }

    fn error(text: &str) -> String {
        config(text, &[]).unwrap_err().to_string()
    }

    const VM: &str = "[[vm]]\nname = \"a\"\nsocket = \"/run/a.sock\"\nserver = \"tcp:gpu:9700\"\n";

    #[test]
    fn the_command_line_is_consistent_and_documented() {
        Arguments::full_command().debug_assert();
        assert_eq!(manual::gaps(&Arguments::full_command()), Vec::<String>::new());
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/command-line.md");
        let text = options::reference::markdown(Arguments::command(), &clap::Command::new(""));
        test_kit::check_generated(page, Some("vhost-rgpu"), &text);
    }

    #[test]
    fn the_help_begins_with_what_the_program_does() {
        let about = |command: clap::Command| {
            [command.get_about(), command.get_long_about()].map(|text| text.map(ToString::to_string))
        };
        assert_eq!(about(Arguments::full_command()), about(Arguments::command()));
    }

    #[test]
    fn the_packaged_file_and_the_documentation_follow_from_the_options() {
        test_kit::check_generated(concat!(env!("CARGO_MANIFEST_DIR"), "/vhost-rgpu.toml"), None, &example());
        let table = options::document::table(&parts(false));
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
        test_kit::check_generated(page, Some("vhost-rgpu"), &table);
    }

    #[test]
    fn every_line_of_the_example_is_valid() {
        let shown = config(&example(), &[]).unwrap();
        assert_eq!(shown.vms.len(), 0);
        assert!(shown.native.is_some() && shown.status.is_some());
        let shown = config(VM, &[]).unwrap();
        // The commented-out options show the defaults.
        let all = config(&example().replace("#: ", ""), &[]).unwrap();
        assert_eq!(all.vms[0].limits, shown.vms[0].limits);
        let (before, now) = (shown.vms[0].servers.first(), all.vms[0].servers.first());
        assert_eq!((before.data_connections, before.silence), (now.data_connections, now.silence));
        assert_eq!(now.verbs.queue_pairs, Some(QUEUE_PAIRS));
        assert_eq!(now.verbs.queue_depth, Some(DEPTH));
        assert_eq!(all.native.unwrap().access.mode, 0o660);
    }

    #[test]
    fn defaults_are_those_of_a_session() {
        let vm = config(VM, &[]).unwrap().vms.remove(0);
        let session = vm.servers.first();
        let mut expected = SessionConfig::new("tcp:gpu:9700".parse().unwrap(), "a");
        expected.data_connections = expected.security.usual_data_connections();
        assert_eq!(format!("{session:?}"), format!("{expected:?}"));
    }

    #[test]
    fn a_section_says_how_to_use_rdma() {
        let text = format!("{VM}transport = \"verbs\"\n[vm.rdma]\ndevice = \"mlx5_2\"\nqueue_depth = 64\n");
        let verbs = Settings { device: Some("mlx5_2".into()), queue_depth: Some(64), ..Settings::default() };
        assert_eq!(config(&text, &[]).unwrap().vms[0].servers.first().verbs, verbs);
    }

    #[test]
    fn a_transport_follows_from_the_address() {
        let config = config(&format!("{VM}[native]\nserver = \"unix:/run/s\"\n"), &[]).unwrap();
        assert_eq!(config.vms[0].servers.first().transport, TransportKind::Tcp);
        assert_eq!(config.native.unwrap().servers.first().transport, TransportKind::Local);
    }

    #[test]
    fn a_section_can_have_several_servers() {
        let list = "server = [\"gpu1\", \"unix:/run/s\", \"tcp:gpu2:9701/2,0\"]\n";
        let text = VM.replace("server = \"tcp:gpu:9700\"\n", list);
        let config = config(&text, &[]).unwrap();
        let sessions = config.vms[0].servers.all();
        let shown: Vec<_> =
            sessions.iter().map(|s| (s.server.to_string(), s.devices.clone(), s.transport)).collect();
        let tcp = |address: &str, devices: &[u8]| (address.to_owned(), devices.to_vec(), TransportKind::Tcp);
        let local = ("unix:/run/s".to_owned(), Vec::new(), TransportKind::Local);
        assert_eq!(shown, [tcp("tcp:gpu1:9700", &[]), local, tcp("tcp:gpu2:9701", &[2, 0])]);
    }

    #[test]
    fn a_file_with_a_lease_that_everybody_can_read_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.toml");
        std::fs::write(&path, "").unwrap();
        let leased = VM.replace("tcp:gpu:9700", &format!("tcp:gpu:9700#{}", "0a".repeat(32)));
        let exposed = |text: &str, mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            config(text, &[]).unwrap().exposed_lease(&path)
        };
        assert!(exposed(&leased, 0o644).is_some_and(|text| text.contains("chmod 640")));
        assert_eq!((exposed(&leased, 0o640), exposed(VM, 0o644)), (None, None));
    }

    #[test]
    fn flags_override_the_file() {
        let text = format!(
            "poll_us = 7\n{VM}[vm.limits]\nmax_channels = 9\n[native]\nserver = \"unix:/run/s\"\nmode = 0o600\n"
        );
        let unchanged = config(&text, &[]).unwrap();
        assert_eq!((unchanged.vms[0].limits.max_channels, unchanged.native.unwrap().access.mode), (9, 0o600));
        let flags = [
            "--server=tcp:other",
            "--max-channels=10",
            "--socket=b.sock",
            "--native-mode=0640",
            "--poll-us=8",
        ];
        let config = config(&text, &flags).unwrap();
        let (vm, native) = (&config.vms[0], config.native.unwrap());
        assert_eq!((vm.limits.max_channels, vm.socket.as_path()), (10, Path::new("b.sock")));
        assert_eq!((native.access.mode, native.limits.max_channels), (0o640, 10));
        for session in [vm.servers.first(), native.servers.first()] {
            assert_eq!(session.server.to_string(), "tcp:other:9700");
            assert_eq!(session.poll, Duration::from_micros(8));
        }
    }

    #[test]
    fn flags_add_sections_that_the_file_lacks() {
        let with_native = config(VM, &["--native-socket=/run/n"]).unwrap_err().to_string();
        assert!(with_native.starts_with("--server: is missing"), "{with_native}");
        let native = "[native]\nserver = \"unix:/run/s\"\n";
        let config = config(native, &["--socket=/run/vm", "--server=tcp:gpu", "--name=b"]).unwrap();
        assert_eq!((config.vms[0].name.as_str(), config.vms[0].limits.max_channels), ("b", 256));
    }

    #[test]
    fn a_flag_for_one_virtual_machine_needs_one() {
        let text = format!("{VM}{}", VM.replace("\"a\"", "\"b\"").replace("a.sock", "b.sock"));
        assert_eq!(config(&text, &[]).unwrap().vms.len(), 2);
        let error = config(&text, &["--socket=/run/c"]).unwrap_err().to_string();
        assert!(error.contains("2 [[vm]] sections"), "{error}");
        assert!(matches!(config("", &[]), Err(ConfigError::Nothing)));
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let text = error(&format!("{VM}colour = 1\n"));
        assert_eq!(text, "x.toml: line 5: vm.colour: there is no such option");
        // What is appended to the file belongs to its last section.
        let text = error(&format!("{VM}log = \"debug\"\n"));
        assert!(text.contains("line 5: vm.log: there is no such option; there is log outside any"), "{text}");
    }

    #[test]
    fn a_missing_key_is_named() {
        let text = error("[[vm]]\nname = \"a\"\nsocket = \"/x\"\n");
        assert!(text.starts_with("x.toml: line 1: vm.server: is missing"), "{text}");
    }

    #[test]
    fn a_wrong_value_is_named_with_line_and_key() {
        for (text, line, key) in [
            (VM.replace("tcp:gpu:9700", "tcp:gpu:port"), 4, "vm.server"),
            (VM.replace("/run/a.sock", "a.sock"), 3, "vm.socket"),
            (VM.replace("\"a\"", "\"a b\""), 2, "vm.name"),
            (format!("{VM}transport = \"local\"\n"), 5, "vm.transport"),
            (format!("{VM}transport = \"carrier-pigeon\"\n"), 5, "vm.transport"),
            (format!("{VM}[vm.limits]\nmax_channels = 0\n"), 6, "vm.limits.max_channels"),
            (format!("{VM}[vm.rdma]\nqueue_pairs = 8\n"), 6, "vm.rdma.queue_pairs"),
            (format!("{VM}[native]\nserver = \"unix:/s\"\nmode = 660\n"), 7, "native.mode"),
            (format!("{VM}{VM}"), 6, "vm.name"),
            (format!("{VM}{}", VM.replace("\"a\"", "\"b\"")), 7, "vm.socket"),
            (format!("poll_us = 99999999\n{VM}"), 1, "poll_us"),
            (format!("log = \"warning\"\n{VM}"), 1, "log"),
            (format!("admin.socket = \"admin\"\n{VM}"), 1, "admin.socket"),
            (format!("status.socket = \"run/status\"\n{VM}"), 1, "status.socket"),
        ] {
            let error = error(&text);
            assert!(error.contains(&format!("line {line}: {key}: ")), "{error}");
        }
    }
}
