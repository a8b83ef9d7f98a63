//! vhost-rgpu: the daemon on a host that gives its guests, and its own processes, a GPU that sits in a server.
//!
//! ```text
//!   QEMU ══ vhost-user ══▶ vm      ─┐
//!                                   ├─▶ host_bridge::bridge::Session ══▶ rgpu-server
//!   process ══ seqpacket ══▶ native ─┘           │
//!   rgpuctl ══ JSON ◀══ status ◀── registry ◀────┘
//! ```
//!
//! In reading order:
//! - [`config`]: what to serve, from the command line and the configuration file;
//! - [`sockets`]: where; listening sockets, made here or by systemd;
//! - [`vm`]: the virtio device of one virtual machine: requests, doorbell, events;
//! - [`native`]: processes of this host;
//! - [`registry`], [`status`]: what there is, for operators;
//! - [`limit`]: logging that nobody can flood.
//!
//! The daemon knows virtio and sessions; it does not know what a command means, nor CUDA.

mod config;
mod limit;
mod native;
mod registry;
mod sockets;
mod status;
mod vm;

use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::socket::SockType;
use tracing_subscriber::EnvFilter;

use config::{Arguments, Config};
use registry::Registry;
use sockets::{Activated, Stopper};

/// How long sessions may take to end when the daemon does.
const DRAIN: Duration = Duration::from_secs(3);
/// How often it is looked whether they have.
const LOOK: Duration = Duration::from_millis(5);

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
    let config = arguments.config(&given)?;
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
    raise_descriptor_limit();
    // Before any thread begins, so that they all inherit it and only `wait` below gets the signals.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().context("blocking signals")?;

    let mut daemon = Daemon::default();
    let started = daemon.start(config);
    if started.is_ok() {
        let signal = signals.wait().context("waiting for a signal")?;
        tracing::info!("{signal}: ending");
    }
    daemon.drain();
    started
}

/// Everything that runs.
#[derive(Default)]
struct Daemon {
    stoppers: Vec<Stopper>,
    threads: Vec<JoinHandle<()>>,
    native: Option<Arc<native::Server>>,
    vms: Vec<Arc<vm::Server>>,
}

impl Daemon {
    fn start(&mut self, config: Config) -> Result<()> {
        let registry = Arc::new(Registry::new());
        let mut activated = Activated::from_environment();
        // The status socket answers last: whoever waits for it finds the others listening.
        let native = config
            .native
            .map(|native| {
                let listening =
                    activated.take_or_bind("native", &native.socket, SockType::SeqPacket, native.mode)?;
                anyhow::Ok((native, listening))
            })
            .transpose()?;
        let mut vms = Vec::with_capacity(config.vms.len());
        for vm in config.vms {
            let listening =
                activated.take_or_bind(&format!("vm-{}", vm.name), &vm.socket, SockType::Stream, 0o660)?;
            vms.push((vm, listening));
        }
        let status = config
            .status
            .map(|path| activated.take_or_bind("status", &path, SockType::Stream, 0o660))
            .transpose()?;
        for name in activated.unused() {
            tracing::warn!(
                "systemd handed over a socket named {name:?} that no section of the configuration asks for"
            );
        }

        if let Some((config, listening)) = native {
            tracing::info!("native clients at {} go to {}", config.socket.display(), config.session.server);
            let server = native::Server::new(config, registry.clone());
            self.native = Some(server.clone());
            self.stoppers.push(listening.stopper());
            self.spawn("native", move || server.serve(&listening))?;
        }
        for (config, listening) in vms {
            tracing::info!(
                "vm {} at {} goes to {}",
                config.name,
                config.socket.display(),
                config.session.server
            );
            let server = vm::Server::new(config, registry.clone());
            self.vms.push(server.clone());
            self.stoppers.push(listening.stopper());
            self.spawn("vm", move || server.serve(&listening))?;
        }
        if let Some(listening) = status {
            self.stoppers.push(listening.stopper());
            self.spawn("status", move || status::serve(&listening, &registry))?;
        }
        Ok(())
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        self.threads.push(
            std::thread::Builder::new().name(name.to_owned()).spawn(body).context("starting a thread")?,
        );
        Ok(())
    }

    /// Stops listening, ends all sessions, removes the sockets. What has not ended within [`DRAIN`] is said and left to the end of the process.
    fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN;
        self.stoppers.iter().for_each(Stopper::stop);
        self.vms.iter().for_each(|vm| vm.stop());
        if let Some(native) = &self.native {
            native.drain(DRAIN);
        }
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or("?").to_owned();
            if !thread.is_finished() {
                // A server that does not let go of a guest's memory must not keep the daemon: with this process its connections end, and its part of that memory goes.
                tracing::error!("the thread {name} has not ended within {} s; left behind", DRAIN.as_secs());
            } else if thread.join().is_err() {
                tracing::error!("the thread {name} failed; its message stands on standard error");
            }
        }
    }
}

/// Each session takes about ten descriptors, and a guest of many processes has many sessions.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = hard.min(1 << 20);
        if soft < wanted { setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) } else { Ok(()) }
    });
    if let Err(e) = raised {
        tracing::warn!("the limit of open files stays as it is: {e}");
    }
}
