//! The command line and the configuration file: one definition for both (`options`).

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::builder::RangedU64ValueParser;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use handover::Places;
use host_bridge::endpoint::CompressUse;
use host_bridge::framing::Address;
use host_bridge::verbs::Settings;
use identity::servers::SERVER_FOLDER;
use options::document::Part;
use options::{File, Given, Layer, manual, parse_filter, parse_size};
use serde::{Deserialize, Serialize};

use crate::cache::store::{self, Store};
use crate::driver::listed::Listed;
use crate::driver::software::imitate::Imitate;
use crate::limits::{Amounts, Limits};

/// Maximum of `max_leases`: all of them must fit into the record for the next daemon.
pub const MOST_LEASES: u64 = 1000;

/// Share the GPUs of this machine with rgpu clients.
///
/// Listens for vhost-rgpu on other machines (tcp) and on this one (unix). Each program that uses a GPU is
/// served by its own worker process. A pool keeps workers ready; clients that find none wait in a queue.
#[derive(Debug, Parser)]
#[command(
    name = "rgpu-server",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    max_term_width = 100,
    after_long_help = "Exit status:
  0  it was told to end, or what was to be checked is in order
  1  it failed; the last line on standard error says why
  2  the command line is wrong

Signals:
  SIGTERM, SIGINT  begin no session, give those that run --drain-seconds, and end
  SIGHUP           read keys, certificates and --clients again, open --audit-log anew
  SIGUSR2          go on as the version that is installed, with all sessions

Files:
  /etc/rgpu/rgpu-server.toml  configuration of the packaged unit
  /etc/rgpu/clients.toml      rules for clients, if the configuration names this file
  /var/lib/rgpu/server        this server's key and the clients that joined
  /var/cache/rgpu/server      what clients need not send again, if the configuration says so
  /run/rgpu/server.sock       where vhost-rgpu of this machine connects
  /run/rgpu/server.admin      where rgpuctl enrolls and revokes clients, and drains
  /run/rgpu/server.status     where rgpuctl reads the status"
)]
pub struct Arguments {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub common: options::Common,
    /// Print a commented file of client rules with every key, and exit
    #[arg(long)]
    pub print_clients: bool,
    /// Options of the daemon.
    #[command(flatten)]
    pub serve: Serve,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Report what a server would find on this machine: driver, devices, and whether address ranges can be
    /// reserved
    Check(Backing),
    /// Run a worker process; only the daemon starts it
    #[command(hide = true)]
    Worker(Worker),
}

/// How a worker is started.
#[derive(Debug, Args)]
pub struct Worker {
    /// Descriptor of the socket to the daemon.
    #[arg(long)]
    pub fd: RawFd,
    /// The daemon's log filter.
    #[arg(long, default_value = "info")]
    pub log: String,
}

/// Options of the daemon.
#[derive(Debug, Clone, Args)]
pub struct Serve {
    /// Where to listen: tcp:ADDRESS[:PORT] or unix:PATH. May be given more than once
    #[arg(long, value_name = "ADDRESS", default_value = "unix:/run/rgpu/server.sock")]
    pub listen: Vec<Address>,
    /// Accept connections over tcp without TLS. Anyone who can reach the port can then use the GPUs, and read
    /// and change what others send
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    pub insecure: bool,
    /// Another server that this one's workers may connect to, so that copies between GPUs of both take the
    /// shortest way: tcp:HOST[:PORT] or unix:PATH, exactly as that server calls itself (rgpuctl enroll there
    /// prints its addresses in the token). May be given more than once. None by default; such copies pass
    /// through the client's machine
    #[arg(long, value_name = "ADDRESS")]
    pub direct_to: Vec<Address>,
    /// Folder for this server's key, which is created at the first start, and the list of enrolled clients.
    /// Used when listening on tcp without --insecure
    #[arg(long, value_name = "FOLDER", default_value = SERVER_FOLDER)]
    pub identity: PathBuf,
    /// Unix socket for rgpuctl to enroll, list and revoke clients, and to drain or upgrade the daemon. Only
    /// this daemon's user and root may connect. None by default
    #[arg(id = "admin.socket", long = "admin-socket", value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// File with rules for what each client may use; clients.toml is an example. Read again on SIGHUP. By
    /// default all clients have the limits given here
    #[arg(long, value_name = "FILE")]
    pub clients: Option<PathBuf>,
    /// File that gets a line of JSON for each session that begins, is refused or ends. Reopened on SIGHUP.
    /// None by default
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<PathBuf>,
    /// Idle workers to keep ready, each with a context on the first device. With 0, a worker starts when a
    /// client asks for one, and one at the start of the server, which only finds out its devices
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub workers: usize,
    /// Idle workers to keep ready until the first session begins. By default as many as later
    #[arg(long, value_name = "N")]
    pub first_workers: Option<usize>,
    /// Maximum number of sessions, including those waiting for a worker, but not those that have ended and
    /// whose workers are about to exit. Sessions that only query NVML have the same limit but are counted
    /// separately
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_sessions: usize,
    /// Maximum number of leases of all clients together, from 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = RangedU64ValueParser::<usize>::new().range(1..=MOST_LEASES))]
    pub max_leases: usize,
    /// Maximum seconds a session may wait for a worker while no other session begins and no worker becomes
    /// ready
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub wait_seconds: u64,
    /// Seconds for sessions to end by themselves after SIGTERM. rgpuctl drain can set another time
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub drain_seconds: u64,
    /// What to log: a level (off, error, warn, info, debug, trace), and filters as in RUST_LOG
    #[arg(long, value_name = "FILTER", default_value = "info", value_parser = parse_filter)]
    pub log: String,
    /// Let kernels of all sessions run on a device at the same time, by NVIDIA's Multi-Process Service, which
    /// has its sockets and logs in this folder. For clients that trust each other: a kernel that fails may
    /// end other sessions on its device, and shares of GPU time do not hold. By default clients take turns
    #[arg(long, value_name = "FOLDER")]
    pub mps: Option<PathBuf>,
    /// What each client may use.
    #[command(flatten)]
    pub share: Share,
    /// Options that workers need, too.
    #[command(flatten)]
    pub worker: WorkerOptions,
    /// What clients need not send again.
    #[command(flatten)]
    pub cache: Cache,
    /// What workers may reach.
    #[command(flatten)]
    pub sandbox: Sandbox,
    /// Where metrics are served.
    #[command(flatten)]
    pub metrics: metrics::Options,
    /// Unix socket where the daemon reports its status to rgpuctl, one JSON object per connection. None
    /// by default
    #[arg(id = "status.socket", long = "status-socket", value_name = "PATH")]
    pub status_socket: Option<PathBuf>,
    /// The configuration file as it was read.
    #[arg(skip)]
    pub file: Option<Arc<File>>,
}

/// What clients need not send again.
#[derive(Debug, Clone, Args)]
pub struct Cache {
    /// Folder for data that clients have sent over tcp, so that they need not send it again. The server keeps
    /// code and large copies to devices, separately for each client, and finds them by their hashes. Only
    /// this daemon's user may have access to it. By default nothing is kept
    #[arg(id = "cache.folder", long = "cache", value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Maximum size of the data kept for one client, in bytes or with a unit (K, M, G, T). The least recently
    /// used data is removed first
    #[arg(id = "cache.client_limit", long = "cache-client-limit", value_name = "SIZE", default_value = "32G", value_parser = parse_size)]
    pub client_limit: u64,
    /// Maximum size of the data kept for all clients together. A client's data makes room for the same
    /// client's or, while it has no session, for that of a client with less
    #[arg(id = "cache.limit", long = "cache-limit", value_name = "SIZE", default_value = "128G", value_parser = parse_size)]
    pub limit: u64,
}

impl Cache {
    /// Whether the store could be opened, if one is configured. A running daemon may have it open.
    pub fn check(&self, places: &Places) -> anyhow::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let is_own = if folder.exists() { store::check_owner(folder) } else { Ok(()) };
        let usable = is_own
            .map_err(anyhow::Error::from)
            .and_then(|()| places.folder(folder).map_err(anyhow::Error::msg));
        usable.context("the cache (--cache)")
    }

    /// Opens the store, if one is configured.
    pub fn open(&self) -> std::io::Result<Option<Store>> {
        let limits = store::Limits { client: self.client_limit, all: self.limit };
        self.folder.as_ref().map(|folder| Store::open(folder, limits)).transpose()
    }
}

/// What each client may use, unless a policy for that client says otherwise.
#[derive(Debug, Clone, Args)]
pub struct Share {
    /// Maximum memory of one session on each device, in bytes or with a unit (K, M, G, T). 0 means no limit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub memory_limit: u64,
    /// Maximum memory of all sessions of one client together on each device, under leases and outside. 0
    /// means no limit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub client_memory_limit: u64,
    /// Maximum page-locked memory on this machine that the programs of one session may have for kernels. By
    /// default a quarter of this machine's memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub pinned_limit: Option<u64>,
    /// Maximum page-locked memory of all sessions of one client together. By default a quarter of this
    /// machine's memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub client_pinned_limit: Option<u64>,
    /// Maximum number of sessions of one client, including those waiting for a worker. Sessions that only
    /// query NVML are counted separately. 0 means no limit. By default all but an eighth of --max-sessions,
    /// so that one client leaves room for others
    #[arg(long, value_name = "N")]
    pub client_sessions: Option<u32>,
    /// Number of devices of a client: each session gets the least used ones, or those that its others have. 0
    /// means all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub session_devices: u32,
    /// Maximum run time in seconds of a kernel, or of a graph launched as a whole, including time in which
    /// others use the device. A session that exceeds it gets cudaErrorLaunchTimeout and is ended. 0 means no
    /// limit. With a limit, each launch is measured, which takes two more driver calls
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub kernel_seconds: u32,
    /// Whether a client's devices also serve others while it has a session
    #[arg(long, value_enum, default_value_t = Sharing::Shared)]
    pub sharing: Sharing,
    /// Whether device memory of idle sessions may be moved to this machine's memory (see --swap-memory)
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = true, action = clap::ArgAction::Set)]
    pub swappable: bool,
}

/// Whether a client's devices also serve others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sharing {
    /// They do
    Shared,
    /// They do not while it has a session; others wait
    Exclusive,
}

impl Share {
    /// The limits of a session of `principal`.
    pub fn limits(&self, principal: String) -> Limits {
        let quarter = || machine_memory() / 4;
        Limits {
            principal,
            devices: Vec::new(),
            device_count: self.session_devices,
            exclusive: self.sharing == Sharing::Exclusive,
            session: Amounts {
                device_memory: self.memory_limit,
                pinned_memory: self.pinned_limit.unwrap_or_else(quarter),
            },
            total: Amounts {
                device_memory: self.client_memory_limit,
                pinned_memory: self.client_pinned_limit.unwrap_or_else(quarter),
            },
            sessions: self.client_sessions,
            kernel_seconds: self.kernel_seconds,
            swappable: self.swappable,
            ..Limits::default()
        }
    }
}

/// Bytes of memory of this machine.
fn machine_memory() -> u64 {
    // SAFETY: `sysconf` only reads its argument.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(size).unwrap_or(0))
}

/// Options that the daemon passes on to each worker.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct WorkerOptions {
    /// Which devices.
    #[command(flatten)]
    pub backing: Backing,
    /// Seconds to keep a session over TCP or verbs whose connections are lost, with everything it has on the
    /// devices. 0 ends it with its connections
    #[arg(long, value_name = "N", default_value_t = 600)]
    pub grace_seconds: u32,
    /// Memory of one session for data sent over TCP that the client has not acknowledged, in bytes or with a
    /// unit (K, M, G, T). A download over a long link carries at most this much per round trip; each data
    /// connection may use 8M in any case
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub replay_memory: u64,
    /// When to compress data on its way to clients over TCP. A client's host can refuse it by its own
    /// setting
    #[arg(long, value_enum, value_name = "WHEN", default_value = "auto")]
    pub compress: CompressUse,
    /// Memory of one session for data that arrives over TCP ahead of its turn, in bytes or with a unit (K, M,
    /// G, T). A distant client sends up to this much unasked, as far as its link needs that, so an upload
    /// carries at most this much per round trip; 16M are allowed in any case
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = parse_size)]
    pub ahead_memory: u64,
    /// Microseconds that a worker polls for commands before it sleeps. The default is 50, and 5 with
    /// one or two processors
    #[arg(long, value_name = "N")]
    pub poll_us: Option<u64>,
    /// More device memory than the devices have.
    #[command(flatten)]
    pub swap: Swap,
    /// Copies between GPUs of this and another server take verbs where --direct-verbs is set at both and both
    /// have an RDMA device. Their bytes are not encrypted then, even if everything else between the servers
    /// is
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    pub direct_verbs: bool,
    /// With --direct-verbs: the RDMA device reads the memory of copies of up to 200,000 bytes where it is on
    /// the GPU, as a DMA-buf, instead of in a buffer. It takes the open kernel modules of NVIDIA's driver,
    /// Linux 5.12 or newer, and an RDMA device that can do it; the log says so, or why not. This has not been
    /// tried on such hardware
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    pub direct_device_memory: bool,
    /// Sessions and copies over verbs.
    #[command(flatten)]
    pub rdma: Settings,
}

/// More device memory than the devices have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
pub struct Swap {
    /// Maximum memory of this machine that device memory of idle sessions is moved to when a device is full,
    /// in bytes or with a unit (K, M, G, T). It is page-locked. Sessions can then hold more together than a
    /// device has. 0: nothing is moved to memory
    #[arg(id = "swap.memory", long = "swap-memory", value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub memory: u64,
    /// Folder for files that device memory is moved to when --swap-memory is used up. The files have no names
    /// and end with their sessions. None by default
    #[arg(id = "swap.folder", long = "swap-folder", value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Memory of each device that sessions may use at a time if device memory is moved, in bytes or with a
    /// unit (K, M, G, T). 0 means all of a device's memory, less 1G on NVIDIA's
    #[arg(id = "swap.device_memory", long = "swap-device-memory", value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub device_memory: u64,
    /// Minimum milliseconds that a session's memory stays on its devices once it is there. A session that is
    /// not idle keeps it five times as long, and at least twice as long as it took to bring it back, but for
    /// that not longer than a minute
    #[arg(id = "swap.residency_ms", long = "swap-residency-ms", value_name = "N", default_value_t = 2000)]
    pub residency_ms: u32,
}

impl Swap {
    /// Whether device memory is moved at all.
    pub fn on(&self) -> bool {
        self.memory > 0 || self.folder.is_some()
    }
}

impl WorkerOptions {
    /// MiB of data that a session's bridge may send ahead of its turn, as stated in the welcome.
    pub fn eager_mib(&self) -> u32 {
        u32::try_from(self.ahead_memory >> 20).unwrap_or(u32::MAX)
    }
}

/// What workers may reach.
#[derive(Debug, Clone, Args)]
pub struct Sandbox {
    /// Whether workers are confined, and what happens to system calls that they should not make
    #[arg(id = "sandbox.mode", long = "sandbox", value_enum, default_value_t = sandbox::Mode::On)]
    pub mode: sandbox::Mode,
    /// Refuse to start if this machine does not provide every part of the sandbox. Without it, the log says
    /// what is missing
    #[arg(
        id = "sandbox.require",
        long = "require-sandbox",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        default_value_t = false,
        action = clap::ArgAction::Set
    )]
    pub require: bool,
    /// User IDs for workers, one each. No account and no other program may use them
    #[arg(id = "sandbox.users", long = "worker-users", value_name = "FIRST-LAST", default_value_t = sandbox::WORKER_USERS)]
    pub users: sandbox::Range,
    /// Additional files and folders that workers may read, such as the folder of a driver library in an
    /// unusual place. None by default
    #[arg(id = "sandbox.files", long = "worker-files", value_name = "PATHS", value_delimiter = ',')]
    pub files: Vec<PathBuf>,
    /// Maximum memory of this machine for one worker, in bytes or with a unit (K, M, G, T). 0 means half of
    /// the machine's memory. Needs cgroup v2
    #[arg(id = "sandbox.memory", long = "worker-memory", value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub memory: u64,
    /// Maximum threads of one worker. 0 means no limit
    #[arg(id = "sandbox.tasks", long = "worker-tasks", value_name = "N", default_value_t = 4096)]
    pub tasks: u64,
    /// Maximum CPU time of one worker, in percent of one CPU. 0 means no limit. Needs cgroup v2
    #[arg(id = "sandbox.cpu_percent", long = "worker-cpu-percent", value_name = "N", default_value_t = 0)]
    pub cpu_percent: u64,
    /// For tests: the program to start as a worker
    #[arg(id = "sandbox.program", long = "worker-program", value_name = "PATH", hide = true)]
    pub program: Option<PathBuf>,
}

/// Which devices, and what drives them.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct Backing {
    /// What executes commands
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// Ordinals of the devices to share, in the order in which clients see them. All devices by default
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub devices: Vec<u32>,
    /// This machine's NVIDIA CUPTI library, loaded when a client's program is profiled. By default the one
    /// the loader finds, or the CUDA toolkit's; without one, profilers see no kernels
    #[arg(long, value_name = "PATH")]
    pub cupti: Option<PathBuf>,
    /// Memory of each software device, in bytes or with a unit (K, M, G, T)
    #[arg(id = "software.memory", long = "software-memory", value_name = "SIZE", default_value = "4G", value_parser = parse_size)]
    pub software_memory: u64,
    /// Number of software devices
    #[arg(id = "software.devices", long = "software-devices", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub software_devices: u32,
    /// For tests: a FIFO with events of software devices, one per line: a device's number and xid N, ecc,
    /// nvlink N, lost, recovery N, hot or cool
    #[arg(id = "software.events", long = "software-events", value_name = "PATH", hide = true)]
    pub software_events: Option<PathBuf>,
    /// For tests: how software devices delay their callers, as NVIDIA's driver does. A list of queue=N,
    /// hardware-queues=N, waiting-calls, pageable-memory, no-peers, context-ms=N, call-us=N, block-us=N,
    /// seed=N, separated by commas
    #[arg(
        id = "software.imitate",
        long = "software-imitate",
        value_name = "ITEMS",
        default_value_t,
        hide = true
    )]
    pub software_imitate: Imitate,
    /// All of NVIDIA's devices by number, for workers. Empty for the first one, which lists them.
    #[arg(skip)]
    pub listed: Vec<Listed>,
}

impl Backing {
    /// What decides which devices there are besides the backend: `devices` and `software_devices`.
    pub fn chosen(&self) -> (Vec<u32>, u32) {
        (self.devices.clone(), self.software_devices)
    }

    /// So many software devices, each with so many bytes.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn software(software_memory: u64, software_devices: u32) -> Backing {
        Backing {
            backend: Backend::Software,
            devices: Vec::new(),
            cupti: None,
            software_memory,
            software_devices,
            software_events: None,
            software_imitate: Imitate::default(),
            listed: Vec::new(),
        }
    }
}

/// What executes commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// CUDA if there is an NVIDIA GPU, otherwise software
    Auto,
    /// NVIDIA's driver
    Cuda,
    /// A GPU in software that runs PTX on the CPU
    Software,
}

impl Serve {
    /// Checks what follows from the options alone.
    fn check(&self, layer: &Layer<'_>) -> Result<(), options::Error> {
        for (id, path) in [("status.socket", &self.status_socket), ("admin.socket", &self.admin_socket)] {
            path.iter().try_for_each(|path| layer.check_absolute(id, path))?;
        }
        for address in &self.listen {
            if let Address::Unix(path) = address {
                layer.check_absolute("listen", path)?;
            }
        }
        let wrong = |text| Err(layer.wrong("devices", text));
        let Backing { backend, devices, software_devices, .. } = &self.worker.backing;
        if let Some(twice) = (1..devices.len()).find(|at| devices[..*at].contains(&devices[*at])) {
            return wrong(format!("device {} is there twice", devices[twice]));
        }
        match devices.iter().find(|number| *number >= software_devices) {
            Some(number) if *backend == Backend::Software => {
                wrong(format!("there is no device {number}: software.devices is {software_devices}"))
            }
            _ => Ok(()),
        }
    }

    /// The options of the configuration file whose values have changed since it was read, and the file.
    pub fn changed(&self) -> Result<Option<(&Path, Vec<String>)>, options::Error> {
        let Some(before) = &self.file else { return Ok(None) };
        let keys = File::read(before.path(), &[])?.differences(before);
        Ok((!keys.is_empty()).then(|| (before.path(), keys)))
    }
}

impl Arguments {
    /// Parses a command line and reads the configuration file that it names. An invalid command line ends the
    /// process with clap's message.
    pub fn read(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Arguments, options::Error> {
        let given = Given::parse(Arguments::command(), words);
        let mut arguments = Arguments::from_arg_matches(given.matches()).unwrap_or_else(|e| e.exit());
        let file = arguments.common.config.as_ref().map(|path| File::read(path, &[])).transpose()?;
        let section = file.as_ref().and_then(|file| Some((file, file.sections("").next()?)));
        let layer = Layer { given: &given, section };
        if section.is_some() {
            arguments.serve = layer.read()?;
        }
        arguments.serve.check(&layer)?;
        arguments.serve.file = file.map(Arc::new);
        Ok(arguments)
    }
}

/// Writes the man pages and shell completions below `share`.
pub fn write_manual(share: &Path) -> anyhow::Result<()> {
    manual::write(Arguments::command(), share)
        .with_context(|| format!("cannot write into {}", share.display()))
}

/// The example file: `rgpu-server --print-config`, and the packaged `rgpu-server.toml`.
pub fn example() -> String {
    options::document::example(
        "Configuration of rgpu-server. Check it with: rgpu-server --config FILE --check-config\n\n\
         Lines that begin with \"#: \" show options with their defaults or an example; remove the sign to change them. Flags override this file.",
        &parts(),
    )
}

/// The parts of the file, for its documentation.
pub fn parts() -> [Part; 1] {
    [Part {
        name: "",
        repeated: false,
        commented: false,
        text: "",
        options: Serve::augment_args(clap::Command::new("options")),
        set: &[
            ("listen", "[\"unix:/run/rgpu/server.sock\", \"tcp:*:9700\"]"),
            ("status.socket", "\"/run/rgpu/server.status\""),
            ("admin.socket", "\"/run/rgpu/server.admin\""),
        ],
        examples: &[
            ("direct_to", "[\"tcp:gpu2:9700\"]"),
            ("clients", "\"/etc/rgpu/clients.toml\""),
            ("audit_log", "\"/var/log/rgpu/audit.log\""),
            ("cache.folder", "\"/var/cache/rgpu/server\""),
            ("swap.folder", "\"/var/lib/rgpu/swap\""),
            ("devices", "[0, 1]"),
            ("cupti", "\"/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13\""),
            ("metrics.listen", "\"tcp:127.0.0.1:9720\""),
            ("metrics.token_file", "\"/etc/rgpu/metrics.token\""),
            ("mps", "\"/run/rgpu/mps\""),
            ("pinned_limit", "\"16G\""),
            ("client_pinned_limit", "\"64G\""),
            ("client_sessions", "16"),
            ("first_workers", "2"),
            ("sandbox.files", "[\"/opt/driver/lib\"]"),
            ("poll_us", "50"),
            ("rdma.device", "\"mlx5_0\""),
            ("rdma.gid_index", "3"),
            ("rdma.partition", "0x8001"),
            ("rdma.mtu", "4096"),
            ("rdma.queue_pairs", "7"),
            ("rdma.queue_depth", "256"),
        ],
    }]
}

#[cfg(any(test, fuzzing))]
impl Serve {
    /// The options that these flags set.
    pub fn from_flags(flags: &[&str]) -> Serve {
        Arguments::parse_from(std::iter::once("rgpu-server").chain(flags.iter().copied())).serve
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_documented() {
        Arguments::command().debug_assert();
        assert_eq!(options::manual::gaps(&Arguments::command()), Vec::<String>::new());
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/command-line.md");
        let in_file = Serve::augment_args(clap::Command::new(""));
        let text = options::reference::markdown(Arguments::command(), &in_file);
        test_kit::check_generated(page, Some("rgpu-server"), &text);
    }

    #[test]
    fn the_packaged_file_and_the_documentation_follow_from_the_options() {
        test_kit::check_generated(concat!(env!("CARGO_MANIFEST_DIR"), "/rgpu-server.toml"), None, &example());
        let table = options::document::table(&parts());
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
        test_kit::check_generated(page, Some("rgpu-server"), &table);
    }

    #[test]
    fn every_line_of_the_example_is_valid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        for text in [example(), example().replace("#: ", "")] {
            std::fs::write(&path, text).unwrap();
            let flags = [OsString::from("rgpu-server"), "--config".into(), path.clone().into()];
            let serve = Arguments::read(flags).unwrap().serve;
            assert_eq!((serve.listen.len(), serve.workers, serve.share.memory_limit), (2, 2, 0));
        }
    }

    #[test]
    fn the_file_sets_options_and_flags_override_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(
            &path,
            "workers = 5\nbackend = \"software\"\nmemory_limit = \"1G\"\n[rdma]\nport = 2\n",
        )
        .unwrap();
        let path = path.display().to_string();
        let serve = Arguments::read(["rgpu-server", "--config", &path, "--workers", "6"]).unwrap().serve;
        assert_eq!((serve.workers, serve.worker.backing.backend), (6, Backend::Software));
        assert_eq!((serve.share.memory_limit, serve.worker.rdma.port, serve.max_sessions), (1 << 30, 2, 256));
        std::fs::write(&path, "workers = 5\ncolour = 1\n").unwrap();
        let error = Arguments::read(["rgpu-server", "--config", &path]).unwrap_err().to_string();
        assert!(error.ends_with("line 2: colour: there is no such option"), "{error}");
    }

    #[test]
    fn a_wrong_value_is_named_with_line_and_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        let read = |text: &str, flags: &[&str]| {
            std::fs::write(&path, text).unwrap();
            let words = ["rgpu-server", "--config"].map(OsString::from).into_iter();
            Arguments::read(words.chain([path.clone().into()]).chain(flags.iter().map(OsString::from)))
        };
        let error = |text: &str, flags: &[&str]| read(text, flags).unwrap_err().to_string();
        for (text, expected) in [
            ("log = \"warning\"\n", "line 1: log: \"warning\" is not a level"),
            ("\nlog = \"a=b=c\"\n", "line 2: log: \"a=b=c\" is not a filter"),
            ("workers = \"two\"\n", "line 1: workers: must be a whole number of 0 or more"),
            ("workers = -1\n", "line 1: workers: must be a whole number of 0 or more"),
            ("[admin]\nsocket = \"s\"\n", "line 2: admin.socket: s is not an absolute path"),
            ("[status]\nsocket = \"./s\"\n", "line 2: status.socket: ./s is not an absolute path"),
            ("listen = [\"unix:s\"]\n", "line 1: listen: s is not an absolute path"),
            ("devices = [0, 1, 0]\n", "line 1: devices: device 0 is there twice"),
            (
                "backend = \"software\"\ndevices = [0, 7]\n[software]\ndevices = 4\n",
                "line 2: devices: there is no device 7: software.devices is 4",
            ),
        ] {
            let error = error(text, &[]);
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(error("", &["--devices=2,2"]), "--devices: device 2 is there twice");
        // On the command line, a path may depend on the folder.
        assert!(read("devices = [7]\n[admin]\nsocket = \"s\"\n", &["--admin-socket=s"]).is_ok());
    }
}
