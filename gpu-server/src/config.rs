//! The command line and the configuration file: one definition for both (`options`).

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use host_bridge::framing::Address;
use host_bridge::verbs::Settings;
use options::document::Part;
use options::{File, Layer, parse_size};
use serde::{Deserialize, Serialize};

use crate::driver::software::Imitate;
use crate::worker_protocol::{Amounts, Limits};

/// Share the GPUs of this machine with rgpu clients.
///
/// Listens for vhost-rgpu on other machines (tcp) and on this one (unix). Each program that uses a GPU is served by a worker process of its own. A pool keeps workers ready;
/// clients that find none wait in a queue.
#[derive(Debug, Parser)]
#[command(
    name = "rgpu-server",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Arguments {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Configuration file (TOML). Flags override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration, report what is wrong with it, and exit
    #[arg(long)]
    pub check_config: bool,
    /// Print a commented configuration file with every option, and exit
    #[arg(long)]
    pub print_config: bool,
    /// Options of the daemon.
    #[command(flatten)]
    pub serve: Serve,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Report what a server would find on this machine: driver, devices, and whether address ranges can be reserved
    Check(Backing),
    /// Run a worker process; started by the daemon only
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
    /// Idle workers to keep ready, each with a context on the first device. With 0, a worker starts when a client asks for one
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub workers: usize,
    /// Idle workers to keep ready until the first session begins, instead of --workers
    #[arg(long, value_name = "N")]
    pub first_workers: Option<usize>,
    /// Maximum number of sessions, including those that wait for a worker. Sessions that only query NVML have the same limit but are counted separately
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_sessions: usize,
    /// Maximum seconds a session may wait for a worker while no other session begins and no worker becomes ready
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub wait_seconds: u64,
    /// Seconds that sessions have to end by themselves after SIGTERM
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub drain_seconds: u64,
    /// What to log: a level (error, warn, info, debug, trace) or a filter as in RUST_LOG
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
    /// What each client may use.
    #[command(flatten)]
    pub share: Share,
    /// Options that workers need, too.
    #[command(flatten)]
    pub worker: WorkerOptions,
    /// Unix socket where the daemon reports its status to rgpuctl: one JSON object for each connection
    #[arg(id = "status.socket", long = "status-socket", value_name = "PATH")]
    pub status_socket: Option<PathBuf>,
}

/// What each client may use, unless a policy for that client says otherwise.
#[derive(Debug, Clone, Args)]
pub struct Share {
    /// Maximum memory of one session on each device, in bytes or with a unit (K, M, G, T). 0 means no limit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub memory_limit: u64,
    /// Maximum memory of all sessions of one client together on each device. 0 means no limit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub client_memory_limit: u64,
    /// Maximum page-locked memory of this machine that one session's programs may have for kernels. By default a quarter of this machine's memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub pinned_limit: Option<u64>,
    /// Maximum page-locked memory of all sessions of one client together. By default a quarter of this machine's memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub client_pinned_limit: Option<u64>,
    /// Maximum number of sessions of one client, including those that wait for a worker. Sessions that only query NVML are counted separately. 0 means no limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub client_sessions: u32,
    /// Number of devices that a session gets: the least used ones. 0 means all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub session_devices: u32,
    /// Whether a client's devices also serve others while it has a session
    #[arg(long, value_enum, default_value_t = Sharing::Shared)]
    pub sharing: Sharing,
}

/// Whether a client's devices also serve others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sharing {
    /// They do
    Shared,
    /// They do not, for as long as it has a session; others wait
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
    /// Microseconds that a worker polls for commands before it sleeps. The default is 50, and less on machines with fewer than four processors
    #[arg(long, value_name = "N")]
    pub poll_us: Option<u64>,
    /// Sessions over verbs.
    #[command(flatten)]
    pub rdma: Settings,
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
    /// Memory of each software device, in bytes or with a unit (K, M, G, T)
    #[arg(id = "software.memory", long = "software-memory", value_name = "SIZE", default_value = "4G", value_parser = parse_size)]
    pub software_memory: u64,
    /// Number of software devices
    #[arg(id = "software.devices", long = "software-devices", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub software_devices: u32,
    /// For tests: how software devices delay their callers, as NVIDIA's driver does. A list of queue=N, hardware-queues=N, waiting-calls, context-ms=N, call-us=N, seed=N, separated by commas
    #[arg(
        id = "software.imitate",
        long = "software-imitate",
        value_name = "ITEMS",
        default_value_t,
        hide = true
    )]
    pub software_imitate: Imitate,
}

/// What executes commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// CUDA if there is a device, otherwise software
    Auto,
    /// NVIDIA's driver
    Cuda,
    /// A GPU in software that runs PTX on the CPU
    Software,
}

impl Arguments {
    /// Parses a command line and reads the configuration file that it names. A wrong command line ends the process with clap's message.
    pub fn read(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Arguments, options::Error> {
        let given = Arguments::command().get_matches_from(words);
        let mut arguments = Arguments::from_arg_matches(&given).unwrap_or_else(|e| e.exit());
        if let Some(path) = &arguments.config {
            let file = File::read(path, &[])?;
            let section = file.sections("").next().map(|section| (&file, section));
            arguments.serve = Layer { given: &given, section }.read()?;
        }
        Ok(arguments)
    }
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
        text: "",
        options: Serve::augment_args(clap::Command::new("options")),
        set: &[
            ("listen", "[\"unix:/run/rgpu/server.sock\", \"tcp:0.0.0.0:9700\"]"),
            ("status.socket", "\"/run/rgpu/server.status\""),
        ],
        examples: &[
            ("devices", "[0, 1]"),
            ("pinned_limit", "\"16G\""),
            ("client_pinned_limit", "\"64G\""),
            ("first_workers", "2"),
            ("poll_us", "50"),
            ("rdma.device", "\"mlx5_0\""),
            ("rdma.gid_index", "3"),
            ("rdma.mtu", "4096"),
            ("rdma.queue_pairs", "7"),
            ("rdma.queue_depth", "256"),
        ],
    }]
}

#[cfg(test)]
impl Serve {
    /// The options that these flags give.
    pub fn from_flags(flags: &[&str]) -> Serve {
        Arguments::parse_from(std::iter::once("rgpu-server").chain(flags.iter().copied())).serve
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
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
}
