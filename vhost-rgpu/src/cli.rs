//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use host_bridge::bridge::{SessionConfig, TransportKind};
use host_bridge::framing::Address;
use host_bridge::verbs::Settings;

use crate::config::{self, Config, Limits, Native, Vm};

/// Gives virtual machines and processes of this host a GPU that sits in a server.
///
/// Either --config FILE, or flags for one virtual machine and one socket for processes.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Arguments {
    /// Configuration file (TOML); vhost-rgpu.toml explains every key
    #[arg(long, value_name = "FILE", conflicts_with_all = ["socket", "native_socket", "server", "transport", "name", "status_socket",
        "max_channels", "max_registered_mib", "data_connections", "rdma_device", "rdma_port", "rdma_gid_index", "rdma_mtu", "rdma_traffic_class", "rdma_queue_pairs", "rdma_queue_depth"])]
    config: Option<PathBuf>,
    /// vhost-user socket for one virtual machine
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Socket for processes of this host
    #[arg(long, value_name = "PATH")]
    native_socket: Option<PathBuf>,
    /// The server: unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    server: Option<Address>,
    /// local, tcp or verbs; by default local for unix: and tcp for tcp:
    #[arg(long, value_name = "NAME")]
    transport: Option<TransportKind>,
    /// Name of the virtual machine or host, for the server and the log
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Where to answer `rgpuctl status`: each connection gets one JSON object
    #[arg(long, value_name = "PATH")]
    status_socket: Option<PathBuf>,
    /// Level or filter of the log (default: info); the environment's RUST_LOG takes precedence over a configuration file
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Longest time in microseconds to poll for commands before sleeping
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=10_000))]
    poll_us: Option<u64>,
    /// Channels at one time at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_channels: Option<u32>,
    /// Pinned memory of one process at most, in MiB; 0: no limit
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=1 << 40))]
    max_registered_mib: Option<u64>,
    /// Data connections of one session to ask for
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    data_connections: Option<u32>,
    #[command(flatten)]
    rdma: Settings,
    /// Check the configuration, say what is wrong with it, and end
    #[arg(long)]
    pub check_config: bool,
}

impl Arguments {
    /// The configuration that they name or make up.
    pub fn config(&self) -> Result<Config> {
        let mut config = match &self.config {
            Some(path) => config::load(path)?,
            None => self.flags()?,
        };
        if let Some(poll) = self.poll_us {
            let sessions = config
                .vms
                .iter_mut()
                .map(|vm| &mut vm.session)
                .chain(config.native.iter_mut().map(|n| &mut n.session));
            sessions.for_each(|session| session.poll = Duration::from_micros(poll));
        }
        if let Some(log) = self.log.clone().or_else(|| std::env::var("RUST_LOG").ok()) {
            config.log = log;
        }
        if config.vms.is_empty() && config.native.is_none() {
            return Err(config::ConfigError::Nothing.into());
        }
        Ok(config)
    }

    fn flags(&self) -> Result<Config> {
        let name = self.name.clone().unwrap_or_else(config::host_name);
        if let Err(text) = config::check_name(&name) {
            bail!("--name: {text}");
        }
        let mut limits = Limits::default();
        limits.max_channels = self.max_channels.unwrap_or(limits.max_channels);
        limits.max_registered = self.max_registered_mib.unwrap_or(0) << 20;
        if self.socket.is_none() && self.native_socket.is_none() {
            return Err(config::ConfigError::Nothing.into());
        }
        let server = self
            .server
            .clone()
            .context("--server is missing: unix:PATH or tcp:HOST:PORT of the rgpu-server")?;
        let mut session = SessionConfig::new(server, &name);
        if let Some(transport) = self.transport {
            if let Err(text) = config::check_transport(transport, &session.server) {
                bail!("--transport: {text}");
            }
            session.transport = transport;
        }
        session.data_connections = self.data_connections.unwrap_or(session.data_connections);
        session.max_registered = limits.max_registered;
        session.verbs = self.rdma.clone();
        let vms = self.socket.iter().map(|socket| Vm {
            name: name.clone(),
            socket: socket.clone(),
            session: session.clone(),
            limits,
        });
        let native = self.native_socket.as_ref().map(|socket| Native {
            socket: socket.clone(),
            mode: 0o660,
            session: session.clone(),
            limits,
        });
        Ok(Config { log: "info".to_owned(), vms: vms.collect(), native, status: self.status_socket.clone() })
    }
}
