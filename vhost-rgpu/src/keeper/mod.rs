//! The keeper: the process that operators start. It is small and long-lived.
//!
//! It owns the sockets that VMMs, programs and `rgpuctl` connect to, and starts a device process for each
//! virtual machine and each user of this host. Those do all work on sessions. The keeper maps no guest memory
//! and opens no session: a guest or program can harm only its own device process.
//!
//! In reading order: [`process`] starts device processes and listens to them; [`failures`] says when none
//! should follow those that have failed; [`vm`] with [`negotiation`] and [`answers`] stands between a VMM and
//! its device process; [`native`] does so for processes of this host; [`status`] combines the device
//! processes' reports; and [`scrape`] does so for Prometheus, with the definitions in [`families`].
//! [`takeover`] replaces the keeper with another program, or with the keeper that the service
//! manager starts after a crash; [`kept`] is what one leaves to the other, [`ties`] for a device process,
//! [`predecessor`] for a VMM. [`admin`] serves `rgpuctl upgrade`.

mod admin;
mod answers;
mod failures;
mod families;
mod kept;
mod native;
mod negotiation;
mod predecessor;
pub mod process;
mod scrape;
mod status;
pub mod takeover;
mod ties;
mod vm;

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use handover::Inherited;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::SockType;

use crate::config::{Config, Source};
use crate::confinement;
use crate::device_process::raise_descriptor_limit;
use crate::sockets::{Listening, Sockets, Stopper};
use predecessor::Predecessor;
use process::Processes;
use status::Own;
use takeover::{Course, Succession};

/// How long a device process has to end its sessions when the daemon shuts down.
pub const DRAIN: Duration = Duration::from_secs(12);
/// How long signals wait until the previous keeper's sessions are served again. A session that no device
/// process serves cannot be ended.
const SERVED_WITHIN: Duration = Duration::from_secs(5);
/// Interval between checks for that, and whether device processes have ended.
const CHECK_EVERY: Duration = Duration::from_millis(5);

/// What the keeper runs.
struct Keeper {
    processes: Arc<Processes>,
    own: Arc<Own>,
    succession: Arc<Succession>,
    stoppers: Vec<Stopper>,
    threads: Vec<JoinHandle<()>>,
    native: Option<Arc<native::Server>>,
    vms: Vec<Arc<vm::Server>>,
    /// Removes the metrics' socket file, if there is one.
    _scraped: Option<Listening>,
}

/// Serves until SIGTERM or SIGINT, or until another program takes over. `arguments` are those of this
/// process, `source` is the file that they name.
pub fn run(config: Config, arguments: Vec<OsString>, source: Option<Source>) -> Result<()> {
    // Before any thread starts: all threads inherit the mask, so that signals arrive only through the
    // descriptor.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR2]);
    signals.thread_block().context("blocking signals")?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .context("a descriptor for signals")?;
    let mut inherited = Inherited::take();
    raise_descriptor_limit();
    let own = Arc::new(Own::new());
    let succession = Succession::new(&mut inherited, &own).context("what leads to the next daemon")?;
    let succession = Arc::new(succession);
    let file = source.map(|source| (source.path.display().to_string(), source.text));
    let processes = Processes::new(arguments, file, confinement::prepare(&config)).context("an eventfd")?;
    processes.prepare(config.sandbox.require).context("starting a device process")?;
    let processes = Arc::new(processes);
    let mut keeper = Keeper {
        processes,
        own,
        succession: succession.clone(),
        stoppers: Vec::new(),
        threads: Vec::new(),
        native: None,
        vms: Vec::new(),
        _scraped: None,
    };
    let started = keeper.start(config, &mut inherited);
    if started.is_ok() {
        succession.store.ready();
        let signal = keeper.listen_until_signal(&signals)?;
        tracing::info!("{signal}: shutting down");
    }
    succession.store.stopping();
    keeper.drain()?;
    // The next daemon starts from scratch.
    succession.store.forget_all();
    started
}

/// Leaves out a socket that cannot be made if there was a keeper before (`goes_on`): its guests and programs
/// continue whatever is wrong with that.
fn or_without<T>(goes_on: bool, made: Result<T, impl Into<anyhow::Error>>) -> Result<Option<T>> {
    match made.map_err(Into::into) {
        Err(e) if goes_on => {
            tracing::error!("{e:#}; serving without this socket");
            Ok(None)
        }
        made => made.map(Some),
    }
}

impl Keeper {
    fn start(&mut self, config: Config, inherited: &mut Inherited) -> Result<()> {
        let (succession, store) = (self.succession.clone(), self.succession.store.clone());
        // Immediately and for all of them, because no device process of the previous keeper continues.
        let names: Vec<String> = config.vms.iter().map(|vm| vm.name.clone()).collect();
        let before: Vec<_> = names.iter().map(|name| Predecessor::find(&store, name, inherited)).collect();
        Predecessor::drop_others(&store, inherited);
        let mut sockets = Sockets { inherited, store: &store };
        let goes_on = succession.keepers_before() > 0;
        // The status socket is created last, so that a client that reaches it finds the others listening.
        let native = config
            .native
            .map(|native| {
                let listening =
                    sockets.take_or_bind("native", &native.socket, SockType::SeqPacket, &native.access);
                anyhow::Ok((native, or_without(goes_on, listening)?))
            })
            .transpose()?;
        let mut vms = Vec::with_capacity(config.vms.len());
        for vm in config.vms {
            let listening =
                sockets.take_or_bind(&format!("vm-{}", vm.name), &vm.socket, SockType::Stream, &vm.access);
            vms.push((vm, or_without(goes_on, listening)?));
        }
        let mut optional = |name, path: Option<PathBuf>, mode: u32| {
            let made = path.map(|path| sockets.take_or_bind(name, &path, SockType::Stream, &mode.into()));
            made.map_or(Ok(None), |made| or_without(goes_on, made))
        };
        let status = optional("status", config.status, 0o660)?;
        let admin = optional("admin", config.admin, 0o600)?;
        let scraped = or_without(goes_on, scrape::listen(&config.metrics, &mut sockets))?.flatten();
        if native.is_none() {
            native::drop_others(&store, sockets.inherited);
            if let Some(listening) =
                or_without(goes_on, sockets.take("native", SockType::SeqPacket))?.flatten()
            {
                tracing::info!("programs are refused: the configuration has no section [native]");
                self.stoppers.push(listening.stopper());
                let succession = succession.clone();
                self.spawn("native", move || native::refuse_all(&listening, &succession))?;
            }
        }

        if let Some((config, listening)) = native {
            let place = listening.as_ref().and_then(Listening::place);
            let place = place.as_ref().unwrap_or(&config.socket);
            tracing::info!("serving native clients at {} with {}", place.display(), config.servers);
            let server =
                native::Server::new(config, self.processes.clone(), self.own.clone(), succession.clone());
            self.native = Some(server.clone());
            server.take_over(sockets.inherited);
            if let Some(listening) = listening {
                self.stoppers.push(listening.stopper());
                self.spawn("native", move || server.serve(&listening))?;
            }
        }
        sockets.drop_others();
        for ((config, listening), before) in vms.into_iter().zip(before) {
            tracing::info!(
                "serving vm {} at {} with {}",
                config.name,
                config.socket.display(),
                config.servers
            );
            let (processes, own) = (self.processes.clone(), self.own.clone());
            let server = vm::Server::new(config, processes, own, succession.clone()).context("an eventfd")?;
            self.vms.push(server.clone());
            self.stoppers.extend(listening.as_ref().map(Listening::stopper));
            let before = before.map(|before| (before, self.succession.unserved()));
            self.spawn("vm", move || server.serve(listening.as_ref(), before))?;
        }
        if let Some(listening) = admin {
            let (processes, own, succession) = (self.processes.clone(), self.own.clone(), succession.clone());
            self.stoppers.push(listening.stopper());
            self.spawn("admin", move || admin::serve(&listening, &processes, &own, &succession))?;
        }
        if let Some(listening) = status {
            let (processes, own) = (self.processes.clone(), self.own.clone());
            self.stoppers.push(listening.stopper());
            self.spawn("status", move || status::serve(&listening, &processes, &own, &succession))?;
        }
        if let Some(scraped) = scraped {
            self._scraped = scraped.serve(&self.processes, &self.own)?;
        }
        Ok(())
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        self.threads.push(
            std::thread::Builder::new().name(name.to_owned()).spawn(body).context("starting a thread")?,
        );
        Ok(())
    }

    /// Listens to the device processes until a signal comes.
    fn listen_until_signal(&self, signals: &SignalFd) -> Result<Signal> {
        let deadline = Instant::now() + SERVED_WITHIN;
        loop {
            let takes_over = !self.succession.has_taken_over() && Instant::now() < deadline;
            let mut course = self.succession.course();
            let waits = takes_over || *course == Course::Replaced;
            let came = if waits { None } else { signals.read_signal().context("reading a signal")? };
            if let Some(signal) = came {
                let signal = Signal::try_from(signal.ssi_signo.cast_signed()).context("a signal")?;
                if signal != Signal::SIGUSR2 {
                    *course = Course::Ends;
                    return Ok(signal);
                }
                drop(course);
                self.upgrade()?;
            } else {
                drop(course);
            }
            let next = self.native.as_ref().and_then(|native| native.expire());
            let listened = if waits {
                self.processes.listen(&[], Some(Instant::now() + CHECK_EVERY))
            } else {
                self.processes.listen(&[signals.as_fd()], next)
            };
            listened.context("listening to device processes")?;
        }
    }

    /// Hands over to the installed program, in a thread, because device processes must still be listened to.
    fn upgrade(&self) -> Result<()> {
        let (processes, own, succession) =
            (self.processes.clone(), self.own.clone(), self.succession.clone());
        let upgrade = move || {
            let Err(why) = succession.upgrade(&processes, &own, |_| ());
            tracing::error!("SIGUSR2: not upgraded: {why}");
        };
        std::thread::Builder::new().name("upgrade".to_owned()).spawn(upgrade).context("starting a thread")?;
        Ok(())
    }

    /// Stops listening, ends all device processes with their sessions, and removes the sockets. Threads that
    /// have not ended in time are logged and abandoned.
    fn drain(&mut self) -> Result<()> {
        let over = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .context("an eventfd")?;
        let processes = self.processes.clone();
        std::thread::scope(|scope| {
            // The messages of ending device processes must be read.
            scope.spawn(|| {
                self.end_all();
                let _ = over.write(1);
            });
            while over.read().is_err() {
                processes.listen(&[over.as_fd()], None).context("listening to device processes")?;
            }
            Ok(())
        })
    }

    fn end_all(&mut self) {
        // Device processes that don't end in time are killed, so threads need a moment more.
        let deadline = Instant::now() + DRAIN + Duration::from_secs(1);
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
                tracing::error!("the thread {name} has not ended in time and is abandoned");
            } else if thread.join().is_err() {
                tracing::error!("the thread {name} panicked; its message is on standard error");
            }
        }
    }
}
