//! vhost-rgpu: gives the guests and processes of a host the GPUs of a server.
//!
//! ```text
//!              keeper                                  device processes
//!   QEMU ══ vhost-user ══▶ keeper::vm     ══ link ══▶ vm      ─┐
//!                                                              ├─▶ host_bridge::bridge::Session ══▶ rgpu-server
//!   process ══ seqpacket ══▶ keeper::native ══ link ══▶ native ─┘           │
//!   rgpuctl ══ JSON ◀══ keeper::status ◀══ link ══ registry ◀───────────────┘
//! ```
//!
//! In reading order:
//! - [`config`]: what to serve, from the command line and the configuration file;
//! - [`sockets`]: listening sockets, created here or by systemd;
//! - [`keeper`]: the process that owns the sockets and starts the others;
//! - [`link`]: what the keeper and a device process say to each other;
//! - [`device_process`]: a process for one virtual machine, or for one user's programs;
//! - [`vm`]: the virtio device of a virtual machine: requests, doorbell, events;
//! - [`native`]: processes of this host;
//! - [`refusal`]: the answers to requests that are refused;
//! - [`registry`]: a device process's sessions and counters;
//! - [`limit`]: rate-limited logging.
//!
//! The daemon knows virtio and sessions. It knows nothing of CUDA or of what a command means.

mod config;
mod device_process;
mod keeper;
mod limit;
mod link;
mod native;
mod refusal;
mod registry;
mod sockets;
mod vm;

use std::process::ExitCode;

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use config::Arguments;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vhost-rgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let (arguments, given) = Arguments::read(std::env::args_os());
    if arguments.print_config {
        print!("{}", config::example());
        return Ok(());
    }
    // SAFETY: the keeper, and nobody else, starts processes with a role and gives them the descriptor. Nothing before this uses descriptors.
    let control =
        arguments.device_process.as_ref().map(|_| unsafe { device_process::inherited() }).transpose()?;
    let source = match &control {
        Some(control) if arguments.has_source() => Some(device_process::receive_config(control)?),
        Some(_) => None,
        None => arguments.source()?,
    };
    let config = arguments.config(&given, source.as_ref())?;
    let filter = EnvFilter::try_new(&config.log)
        .with_context(|| format!("log: {:?} is not a level or filter", config.log))?;
    if arguments.check_config {
        println!(
            "the configuration is valid: {} virtual machines, native socket {}",
            config.vms.len(),
            match &config.native {
                Some(native) => native.socket.display().to_string(),
                None => "none".to_owned(),
            }
        );
        return Ok(());
    }
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match (&arguments.device_process, control) {
        (Some(role), Some(control)) => device_process::run(role, config, control),
        _ => keeper::run(config, std::env::args_os().skip(1).collect(), source),
    }
}
