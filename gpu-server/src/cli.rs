//! The command line.

use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use host_bridge::framing::Address;
use host_bridge::verbs::Settings;
use serde::{Deserialize, Serialize};

use crate::driver::software::Imitate;

/// Shares the GPUs of this machine with rgpu clients.
///
/// Listens for vhost-rgpu daemons of other machines (tcp) and of this one (unix). Each program that uses a GPU is served by a process of its own,
/// taken from a pool that has a CUDA context ready. Programs that find none wait, and are served in the order in which they came.
#[derive(Debug, Parser)]
#[command(
    name = "rgpu-server",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Arguments {
    /// A subcommand, or none: serve.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the daemon.
    #[command(flatten)]
    pub serve: Serve,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what a server would find on this machine: driver, devices, whether address windows can be reserved
    Check(Backing),
    /// A worker process: started by the daemon, not by people
    #[command(hide = true)]
    Worker(Worker),
}

/// How a worker is started.
#[derive(Debug, Args)]
pub struct Worker {
    /// Descriptor of the socket to the daemon.
    #[arg(long)]
    pub fd: RawFd,
    /// As the daemon's.
    #[arg(long, default_value = "info")]
    pub log: String,
}

/// Options of the daemon.
#[derive(Debug, Args)]
pub struct Serve {
    /// Where to listen: tcp:ADDRESS[:PORT] or unix:PATH; may be given several times
    #[arg(long, value_name = "ADDRESS", default_value = "unix:/run/rgpu/server.sock")]
    pub listen: Vec<Address>,
    /// What executes the commands
    #[command(flatten)]
    pub backing: Backing,
    /// Sessions over verbs
    #[command(flatten)]
    pub rdma: Settings,
    /// Workers kept ready beyond those that clients wait for, each with a context of the first device; with 0, a
    /// worker starts when a client asks for one
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub workers: usize,
    /// Workers kept ready until the first session begins, in place of --workers
    #[arg(long, value_name = "N")]
    pub first_workers: Option<usize>,
    /// Device memory that one session may have in all [bytes, or with K, M, G]; 0: no limit
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_size)]
    pub memory_limit: u64,
    /// Maximum number of sessions, counting those that wait for a worker. Sessions that only ask NVML are counted
    /// apart, with the same limit
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_sessions: usize,
    /// Seconds after which waiting clients are refused if no session has begun and no worker has become ready meanwhile
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub wait_seconds: u64,
    /// Where to answer `rgpuctl status`: each connection gets one JSON object
    #[arg(long, value_name = "PATH")]
    pub status_socket: Option<PathBuf>,
    /// What to log: a level, or tracing's filter syntax
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
    /// How long a worker polls for commands before it sleeps [µs]; by default 50, fewer on small machines
    #[arg(long, value_name = "N")]
    pub poll_us: Option<u64>,
    /// Seconds that sessions get to end by themselves after SIGTERM
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub drain_seconds: u64,
}

/// Which devices, and what drives them.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct Backing {
    /// What executes the commands
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// Ordinals of the devices to share, in the order in which clients see them; by default all
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub devices: Vec<u32>,
    /// Memory of each software device [bytes, or with K, M, G]
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = parse_size)]
    pub software_memory: u64,
    /// Number of software devices
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub software_devices: u32,
    /// For tests: how software devices keep their callers waiting, as NVIDIA's driver does. Items, separated by commas: queue=N, waiting-calls, context-ms=N, call-us=N, seed=N
    #[arg(long, value_name = "ITEMS", default_value_t, hide = true)]
    pub software_imitate: Imitate,
}

/// What executes the commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// CUDA where there is a device, else software
    Auto,
    /// NVIDIA's driver
    Cuda,
    /// A GPU in software, which runs PTX on the CPU
    Software,
}

/// A number of bytes: digits, and K, M, G or T for powers of 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1u64,
        "K" | "k" | "KiB" => 1 << 10,
        "M" | "m" | "MiB" => 1 << 20,
        "G" | "g" | "GiB" => 1 << 30,
        "T" | "t" | "TiB" => 1 << 40,
        other => return Err(format!("{other:?} is not a unit: K, M, G or T")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text:?} is not a number of bytes"))?;
    number.checked_mul(unit).ok_or_else(|| format!("{text} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_holds_together() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn sizes_read() {
        assert_eq!(parse_size("0"), Ok(0));
        assert_eq!(parse_size("4G"), Ok(4 << 30));
        assert_eq!(parse_size("512MiB"), Ok(512 << 20));
        assert!(parse_size("4X").is_err() && parse_size("").is_err() && parse_size("99999999T").is_err());
    }
}
