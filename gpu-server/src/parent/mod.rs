//! The daemon: accepts connections, admits sessions, and gives each session to a worker.
//!
//! - [`state`]: what the threads share, with every [`session`] ([`sessions`]), below all that acts on it;
//!   [`bells`]: what wakes them; [`host`]: the server's name; [`text`]: makes what clients and workers say printable;
//! - [`listen`]: listening sockets, and connections without a first message; [`control`]: connections with
//!   one; [`direct`]: connections between workers of two servers;
//! - [`handshake`]: the first message of a connection; [`grants`]: what a session may have before it begins;
//! - [`trust`]: who clients are; [`pace`]: how many sessions they begin; the [policy](crate::policy): what
//!   they may use;
//! - [`admin`]: `rgpuctl`'s requests to the daemon; [`audit`]: the audit log;
//! - [`queue`]: clients that wait for a worker; [`placement`]: which devices a session gets; [`accounts`]:
//!   what principals hold; [`memory`]: NVML's figures for that;
//! - [`pool`]: workers that are started in advance; [`workers`]: what the daemon knows about each; [`watch`]:
//!   their messages, and their end;
//! - [`ends`]: sessions that the daemon ends, and why recent sessions ended;
//! - [`health`]: unhealthy devices, which take no new sessions;
//! - [`arbiter`]: which principal's turn it is on a GPU; [`turns`]: the thread that enforces it;
//! - [`leases`]: GPUs that clients have for a time; [`asks`]: client requests that need no session;
//! - [`residency`]: whose memory is on the devices if there isn't enough for all; [`swap`]: carries that out;
//! - [`refusals`]: why clients are refused;
//! - [`gpus`]: NVML's current readings of the devices;
//! - [`status`]: the status for `rgpuctl status`; [`scrape`]: the same and more for Prometheus, with the
//!   definitions in [`families`];
//! - [`drain`]: the daemon's shutdown, and `rgpuctl drain`;
//! - [`takeover`]: from one daemon to the next, and `rgpuctl upgrade`; [`record`]: the
//!   memory in which one daemon writes things down for the next.
//!
//! The daemon never touches a device, nor any byte of a session after its handshake. One client's or worker's
//! misbehavior cannot affect another.

mod accounts;
mod admin;
mod arbiter;
mod asks;
mod audit;
mod bells;
mod control;
mod direct;
mod drain;
mod ends;
mod families;
mod gpus;
mod grants;
mod handshake;
mod health;
mod host;
mod leases;
mod listen;
mod memory;
mod mps;
mod pace;
mod placement;
mod pool;
mod queue;
mod record;
mod refusals;
mod residency;
mod scrape;
mod session;
mod sessions;
mod state;
mod status;
mod swap;
mod takeover;
mod text;
mod trust;
mod turns;
mod watch;
mod workers;

use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::{Context, bail};
use handover::{Inherited, Places};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

pub use self::host::server_name;
use self::state::{Server, read_policy};
use self::trust::Trust;
use crate::config::Serve;
use crate::driver;
use crate::policy::Policy;

#[cfg(fuzzing)]
pub use self::listen::fuzzing::handshake_any;
pub(crate) use self::takeover::takes_over;

/// Checks the options and what they name, and returns the rules for clients. Another daemon may be running
/// with the same files and sockets, which stay as they are.
pub fn check(options: &Serve) -> anyhow::Result<Policy> {
    options.metrics.check()?;
    driver::present::check_devices(&options.worker.backing)?;
    let policy = read_policy(options)?;
    let places = Places::new();
    listen::check(options, &places).map_err(anyhow::Error::msg)?;
    if Trust::wanted(options) {
        Trust::check(&options.identity, &places)?;
    }
    if let Some(path) = &options.audit_log {
        audit::check(path, &places)?;
    }
    options.cache.check(&places)?;
    swap::check(&options.worker.swap)?;
    Ok(policy)
}

/// Reloads what the operator may change while the server runs: its key and certificates, and the rules for
/// clients. If something is invalid, the old version stays in effect. Sessions of clients that may no longer
/// have any are ended; others keep the limits with which they began. Options stay as they are until the next
/// daemon, and the log says which of them would be others.
fn reload(server: &Server) {
    server.succession.store.reloading();
    server.audit.reopen();
    match server.trust.as_ref().map(Trust::reload) {
        Some(Ok(true)) => tracing::warn!(
            "this server has another key: clients that joined it trust the one before, and have to join again"
        ),
        Some(Ok(false)) | None => {}
        Some(Err(e)) => tracing::error!("the server's key and certificates stay as they were: {e:#}"),
    }
    let rules = read_policy(&server.options);
    let read = if rules.is_ok() {
        "read keys, certificates and rules for clients again"
    } else {
        "read keys and certificates again"
    };
    match rules {
        Ok(policy) => server.set_policy(policy),
        Err(e) => {
            let why = host_bridge::framing::with_causes(&e);
            tracing::error!("the rules for clients stay as they were: {why}");
        }
    }
    match server.options.changed() {
        Ok(None) => {}
        Ok(Some((path, keys))) => tracing::warn!(
            "{} has changed since this daemon read it ({}), which a reload does not take over: rgpuctl upgrade does, under running sessions",
            path.display(),
            keys.join(", ")
        ),
        Err(e) => tracing::warn!("{}", host_bridge::framing::with_causes(&e)),
    }
    let (groups, clients) = server.policy().counts();
    let ended = ends::end_sessions(server, true, |principal, _| server.may_not_go_on(principal))
        + leases::end_forbidden(server);
    // Clients that wait may have more now, or less.
    queue::serve_all(server);
    server.changed.notify_all();
    server.nudge.nudge();
    tracing::info!(groups, clients, ended, "SIGHUP: {read}");
    server.succession.store.ready();
}

/// Runs the daemon until it is told to end.
pub fn main(mut options: Serve) -> anyhow::Result<()> {
    let mut inherited = Inherited::take();
    crate::log::start(&options.log);
    let only_cuda = driver::present::decide_backend(&mut options.worker.backing);
    options.mps = options.mps.map(std::path::absolute).transpose().context("the folder for --mps")?;
    let service = options.mps.as_deref().map(mps::Service::start).transpose()?;
    let mut ending = SigSet::empty();
    ending.add(Signal::SIGTERM);
    ending.add(Signal::SIGINT);
    ending.add(Signal::SIGHUP);
    ending.add(Signal::SIGUSR2);
    // Before any thread starts: all threads inherit the mask, so that signals arrive only through the
    // descriptor.
    ending.thread_block().context("blocking signals")?;
    let signals = SignalFd::with_flags(&ending, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .context("a descriptor for signals")?;

    // Each session's shared memory needs descriptors; in the software backend, so does each allocation.
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(1 << 16)), hard));
    if let Err(e) = raised {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }

    let server = Arc::new(Server::new(options, &mut inherited)?);
    match &server.trust {
        Some(trust) => tracing::info!("this server's key has the fingerprint {}", trust.fingerprint()),
        None if server.options.insecure => tracing::warn!(
            "--insecure: connections over tcp are neither encrypted nor authenticated; everybody who can reach the port can use the GPUs"
        ),
        None => {}
    }
    swap::prepare(&server)?;
    takeover::take_over(&server, &mut inherited);
    let report = pool::probe(&server)?;
    if !report.missing.is_empty() {
        tracing::warn!("workers run without: {report}");
    }
    let mut files = listen::Files::default();
    listen::drop_others(&server, &mut inherited);
    listen::start(&server, &mut inherited, &mut files)?;
    if let Some(path) = &server.options.admin_socket {
        admin::start(&server, path, &mut inherited, &mut files)?;
    }
    if let Some(path) = &server.options.status_socket {
        status::start(&server, path, &mut inherited, &mut files)?;
    }
    scrape::start(&server, &mut inherited, &mut files)?;
    gpus::start(&server)?;
    queue::start(&server)?;
    leases::start(&server)?;
    asks::start(&server)?;
    turns::start(&server)?;
    service.as_ref().map(|service| service.watch(&server)).transpose()?;
    memory::start(&server)?;
    health::start(&server)?;
    pool::start(&server)?;
    tracing::info!("{} is listening at {}", server_name(), listen::addresses(&server.options.listen));
    server.succession.store.ready();

    let told = Arc::clone(&server);
    std::thread::Builder::new().name("rgpu-signals".into()).spawn(move || {
        loop {
            match next_signal(&told, &signals) {
                Ok(Signal::SIGHUP) => reload(&told),
                Ok(Signal::SIGUSR2) => upgrade(&told),
                Ok(signal) => {
                    tracing::info!("{signal}");
                    drain::within(&told, told.options.drain_seconds);
                }
                Err(e) => {
                    tracing::error!("signals are not heard any more: {e}");
                    return;
                }
            }
        }
    })?;
    let mut state = server.lock();
    while state.fatal.is_none() && !state.draining() {
        state = server.changed.wait(state).unwrap_or_else(|e| e.into_inner());
    }
    if let Some(mut fatal) = state.fatal.clone() {
        only_cuda.iter().for_each(|why| fatal.extend(["; ", why]));
        drop(state);
        // There are no sessions.
        service.into_iter().for_each(mps::Service::end);
        bail!(fatal);
    }
    drop(state);
    drain::drain(&server);
    server.audit.flush(audit::FLUSH_WITHIN);
    // The next daemon starts from scratch.
    server.succession.store.forget_all();
    drop(files);
    service.into_iter().for_each(mps::Service::end);
    Ok(())
}

/// Upgrades because of a signal. Others are heard meanwhile.
fn upgrade(server: &Arc<Server>) {
    let not_upgraded = |why: &dyn std::fmt::Display| tracing::error!("SIGUSR2: not upgraded: {why}");
    let work = move |server: &Server| {
        let Err(why) = takeover::upgrade(server, |_| ());
        not_upgraded(&why);
    };
    takeover::start(server, work).unwrap_or_else(|e| not_upgraded(&e));
}

/// Waits for a signal. It is taken under the state's lock: whoever executes another program has that lock,
/// and the signal stays pending for that program.
fn next_signal(server: &Server, signals: &SignalFd) -> nix::Result<Signal> {
    loop {
        match poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e),
        }
        let mut state = server.lock();
        if let Some(taken) = signals.read_signal()? {
            let signal = Signal::try_from(taken.ssi_signo.cast_signed())?;
            state.told_to_end |= matches!(signal, Signal::SIGTERM | Signal::SIGINT);
            return Ok(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::queue::tests::server;
    use super::*;

    #[test]
    fn a_signal_stays_pending_as_long_as_the_next_program_may_be_executed() {
        let server = server(&[]);
        let (say, hear) = channel();
        std::thread::scope(|threads| {
            let state = server.lock();
            threads.spawn(|| {
                let mut ending = SigSet::empty();
                ending.add(Signal::SIGTERM);
                ending.thread_block().unwrap();
                let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
                let signals = SignalFd::with_flags(&ending, flags).unwrap();
                // Only to this thread.
                nix::sys::signal::raise(Signal::SIGTERM).unwrap();
                say.send(nix::unistd::gettid()).unwrap();
                assert_eq!(next_signal(&server, &signals), Ok(Signal::SIGTERM));
            });
            let status = format!("/proc/self/task/{}/status", hear.recv().unwrap());
            for _ in 0..100 {
                let status = std::fs::read_to_string(&status).unwrap();
                assert!(status.lines().any(|line| line == "SigPnd:\t0000000000004000"), "{status}");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            assert!(!state.told_to_end);
            drop(state);
        });
        assert!(server.lock().told_to_end);
    }
}
