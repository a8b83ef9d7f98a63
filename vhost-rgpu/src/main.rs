//! vhost-rgpu: gives the guests and processes of a host the GPUs of a server.
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
//! - [`sockets`]: listening sockets, created here or by systemd;
//! - [`vm`]: the virtio device of a virtual machine: requests, doorbell, events;
//! - [`native`]: processes of this host;
//! - [`refusal`]: the answers to requests that are refused;
//! - [`registry`], [`status`]: the list of sessions, and the status for operators;
//! - [`limit`]: rate-limited logging.
//!
//! The daemon knows virtio and sessions. It knows nothing of CUDA or of what a command means.

mod config;
mod limit;
mod native;
mod refusal;
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

/// How long sessions have to end when the daemon ends.
const DRAIN: Duration = Duration::from_secs(3);
/// Interval of the checks whether they have ended.
const CHECK_EVERY: Duration = Duration::from_millis(5);

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
    // Before any thread starts: all threads inherit the mask, so that only `wait` below gets the signals.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().context("blocking signals")?;

    let mut daemon = Daemon::default();
    let started = daemon.start(config);
    if started.is_ok() {
        let signal = signals.wait().context("waiting for a signal")?;
        tracing::info!("{signal}: shutting down");
    }
    daemon.drain();
    started
}

/// What the daemon runs.
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
        // The status socket is created last, so that a client that reaches it finds the others listening.
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
                "systemd passed a socket named {name:?} that no section of the configuration uses"
            );
        }

        if let Some((config, listening)) = native {
            tracing::info!(
                "serving native clients at {} with {}",
                config.socket.display(),
                config.session.server
            );
            let server = native::Server::new(config, registry.clone());
            self.native = Some(server.clone());
            self.stoppers.push(listening.stopper());
            self.spawn("native", move || server.serve(&listening))?;
        }
        for (config, listening) in vms {
            tracing::info!(
                "serving vm {} at {} with {}",
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

    /// Stops listening, ends all sessions and removes the sockets. Threads that have not ended within [`DRAIN`] are logged and left to the end of the process.
    fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN;
        self.stoppers.iter().for_each(Stopper::stop);
        self.vms.iter().for_each(|vm| vm.stop());
        if let Some(native) = &self.native {
            native.drain(DRAIN);
        }
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(CHECK_EVERY);
        }
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or("?").to_owned();
            if !thread.is_finished() {
                // A server that does not release a guest's memory must not delay the daemon. The end of the process closes the connections and unmaps the memory.
                tracing::error!(
                    "the thread {name} has not ended within {} s and is abandoned",
                    DRAIN.as_secs()
                );
            } else if thread.join().is_err() {
                tracing::error!("the thread {name} panicked; its message is on standard error");
            }
        }
    }
}

/// Each session needs about ten descriptors, and a guest with many processes has many sessions.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = hard.min(1 << 20);
        if soft < wanted { setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) } else { Ok(()) }
    });
    if let Err(e) = raised {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }
}
