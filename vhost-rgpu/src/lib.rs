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
//! - [`link`]: what the keeper and a device process say to each other, partly in [files](memory_file);
//!   [`role`]: what the process serves;
//! - [`device_process`]: a process for one virtual machine, or for one user's programs;
//! - [`confinement`]: what such a process may reach;
//! - [`vm`]: the virtio device of a virtual machine: requests, doorbell, events;
//! - [`native`]: processes of this host;
//! - [`refusal`]: the answers to requests that are refused;
//! - [`registry`]: a device process's sessions and counters;
//! - [`limit`]: rate-limited logging.
//!
//! The daemon knows virtio and sessions. It knows nothing of CUDA or of what a command means.

mod config;
mod confinement;
mod device_process;
mod keeper;
mod link;
mod memory_file;
mod native;
mod refusal;
mod registry;
mod role;
mod servers;
mod sockets;
mod stage;
mod vm;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use config::Arguments;

#[cfg(fuzzing)]
pub use vm::control_any;

/// Runs what the command line asks for.
pub fn main() -> ExitCode {
    options::printing::end_if_it_fails("vhost-rgpu", 1);
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
    if arguments.common.print_config {
        print!("{}", config::example());
        return Ok(());
    }
    if let Some(folder) = &arguments.common.write_manual {
        return Arguments::write_manual(folder)
            .with_context(|| format!("cannot write into {}", folder.display()));
    }
    // SAFETY: only the keeper starts processes with this argument, and passes them the descriptor. Nothing
    // before this uses descriptors.
    let control = arguments
        .device_process
        .map(|descriptor| unsafe { device_process::inherited(descriptor) })
        .transpose()?;
    let orders = control.as_ref().map(device_process::receive_orders).transpose()?;
    let source = match &control {
        Some(control) if arguments.has_source() => Some(device_process::receive_config(control)?),
        Some(_) => None,
        None => arguments.source()?,
    };
    let config = arguments.config(&given, source.as_ref())?;
    if control.is_none() {
        config.metrics.check()?;
        let vms = config.vms.iter().map(|vm| &vm.access);
        for access in vms.chain(config.native.iter().map(|native| &native.access)) {
            access.gid().context("group")?;
        }
    }
    let exposed = source.as_ref().filter(|_| control.is_none());
    let exposed = exposed.and_then(|source| config.exposed_lease(&source.path));
    if arguments.common.check_config {
        if let Some(format) = arguments.common.takes_over {
            keeper::takeover::takes_over(format)?;
        }
        sockets::check(&config)?;
        if let Some(exposed) = exposed {
            eprintln!("vhost-rgpu: {exposed}");
        }
        let vms: Vec<&str> = config.vms.iter().map(|vm| vm.name.as_str()).collect();
        let vms = if vms.is_empty() { "none".to_owned() } else { vms.join(", ") };
        let native = config.native.map_or("none".to_owned(), |native| native.socket.display().to_string());
        println!("the configuration is valid; virtual machines: {vms}; native socket: {native}");
        return Ok(());
    }
    // A log that nobody watches, such as systemd's, is not to have colors.
    let colors = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&config.log))
        .with_ansi(colors)
        .with_writer(std::io::stderr)
        .init();
    if let Some(exposed) = exposed {
        tracing::warn!("{exposed}");
    }
    if arguments.device_process.is_none() {
        for server in config.insecure_servers() {
            tracing::warn!(
                "insecure: connections to {server} are neither encrypted nor authenticated; everybody on the network can read and change what is sent"
            );
        }
    }
    match (control, &orders) {
        (Some(control), Some(orders)) => device_process::run(config, control, orders),
        _ => keeper::run(config, std::env::args_os().skip(1).collect(), source),
    }
}
