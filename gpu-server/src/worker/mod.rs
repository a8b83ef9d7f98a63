//! A worker: a process that serves one session.
//!
//! It prepares its first device (unless it is for NVML queries), tells the daemon, waits for a session, executes it to its end, and exits. Whatever a session leaves behind ends with
//! the process.

mod host_waits;
mod read_ahead;
mod session;

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use anyhow::{Context, bail};
use host_bridge::endpoint::{
    Client, Commands, LocalCommands, Lost, Polling, TcpClient, TcpCommands, VerbsCommands,
};
use host_bridge::stream::Stream;
use host_bridge::verbs::Settings;

use protocol::trace::RECORDER;

use crate::config;
use crate::cuda_ipc::Broker;
use crate::driver::quota::Quota;
use crate::driver::{self, Beside};
use crate::pages::Page;
use crate::worker_protocol::{self, Counters, FromWorker, Kind, ToWorker, Transport};

/// How often changed counters are reported to the daemon.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// How long the dispatcher may stay in a driver call after its session has ended.
const LAST_CALL: Duration = Duration::from_secs(5);

/// What the dispatcher and the reporter share.
pub struct Shared {
    commands: AtomicU64,
    quota: Quota,
    /// Set by the reporter when no counter has changed, cleared by the dispatcher at the next command.
    resting: AtomicBool,
    /// The session is over.
    over: AtomicBool,
    reporter: OnceLock<Thread>,
}

impl Shared {
    fn new(quota: Quota) -> Shared {
        let (resting, over) = (AtomicBool::new(false), AtomicBool::new(false));
        Shared { commands: AtomicU64::new(0), quota, resting, over, reporter: OnceLock::new() }
    }

    /// The dispatcher has executed a command.
    #[inline]
    fn executed(&self) {
        self.commands.store(self.commands.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if self.resting.load(Ordering::Relaxed) {
            self.resting.store(false, Ordering::Relaxed);
            self.reporter.get().inspect(|reporter| reporter.unpark());
        }
    }

    /// The session is over.
    fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.reporter.get().inspect(|reporter| reporter.unpark());
    }

    /// The reporter's loop: calls `report` while counters change and sleeps while they do not. Returns when the session has ended.
    fn report(&self, client: &dyn Client, mut report: impl FnMut(Counters)) {
        let _ = self.reporter.set(std::thread::current());
        let mut last = Counters::default();
        while !self.over.load(Ordering::SeqCst) {
            std::thread::sleep(REPORT_EVERY);
            let now = self.counters(client);
            if now != last {
                last = now;
                report(now);
            } else if self.resting.swap(true, Ordering::Relaxed) {
                // Set at least a second ago, so a dispatcher that has executed a command since has seen it.
                while self.resting.load(Ordering::Relaxed) && !self.over.load(Ordering::SeqCst) {
                    std::thread::park();
                }
            }
        }
    }

    fn counters(&self, client: &dyn Client) -> Counters {
        let (bytes_in, bytes_out) = client.traffic();
        Counters {
            commands: self.commands.load(Ordering::Relaxed),
            bytes_in,
            bytes_out,
            bytes_copied: client.copied(),
            device_memory: self.quota.held_on_devices(),
        }
    }
}

/// Runs the worker.
pub fn main(arguments: &config::Worker) -> anyhow::Result<()> {
    crate::parent::init_log(&arguments.log);
    // Standard error will be the client's, so panics go to the log.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    // SAFETY: the daemon started this process with this descriptor open, and nothing else in the process uses it.
    let daemon = unsafe { OwnedFd::from_raw_fd(arguments.fd) };
    let Some((ToWorker::Prepare { kind, options }, _)) = worker_protocol::receive(daemon.as_fd())? else {
        bail!("a worker can only be started by the daemon");
    };
    let quota = Quota::default();
    let made = driver::make(&options.backing, quota.clone()).and_then(|mut backend| {
        let free = if kind == Kind::Gpu { backend.warm()? } else { None };
        Ok((backend, free))
    });
    let (mut backend, free) = match made {
        Ok(made) => made,
        Err(driver::Unavailable { reason, full }) => {
            worker_protocol::send(daemon.as_fd(), &FromWorker::Failed { reason, full }, &[])?;
            return Ok(());
        }
    };
    let ready = FromWorker::Ready { backend: backend.name().into(), devices: backend.devices(), free };
    worker_protocol::send(daemon.as_fd(), &ready, &[])?;
    let polling = options.poll_us.map_or_else(Polling::default, |us| {
        let most = Duration::from_micros(us.min(10_000_000));
        Polling { most, while_due: most }
    });

    let Some((ToWorker::Session { transport, program, client: name, limits }, fds)) =
        worker_protocol::receive(daemon.as_fd())?
    else {
        // The daemon is gone or no longer needs this worker.
        return Ok(());
    };
    let Ok([connection, terms, meter]) = <[OwnedFd; 3]>::try_from(fds) else {
        bail!("the daemon sent a session without its connection or its pages");
    };
    let (terms, meter) = (Page::open(&terms), Page::open(&meter));
    let (terms, meter) = (terms.context("mapping the terms")?, meter.context("mapping the meter")?);
    let _span = tracing::info_span!("session", client = %name, program = %program).entered();
    let daemon = Arc::new(daemon);
    let broker = Broker::new(Arc::clone(&daemon));
    let devices = limits.devices.clone();
    quota.begin(limits, terms, meter, Arc::clone(&broker));
    let shared = Arc::new(Shared::new(quota.clone()));
    if host_bridge::trace::folder().is_some() {
        RECORDER.start();
    }
    let begun = begin(transport, connection, &options.rdma, polling).and_then(|begun| {
        if !devices.is_empty() {
            driver::restrict(&mut *backend, &options.backing, quota, &devices)
                .map_err(|status| Lost::new(format!("preparing devices {devices:?}: {status}")))?;
        }
        Ok(begun)
    });
    let (lost, counters) = match begun {
        Ok((mut commands, client, tcp)) => {
            watch(&daemon, tcp, &client, &shared, &broker, backend.beside())?;
            backend.share(broker);
            let lost = session::run(&mut *commands, &client, &mut *backend, &shared, kind);
            (lost, shared.counters(&*client))
        }
        Err(lost) => (Some(lost), Counters::default()),
    };
    host_bridge::trace::save(&RECORDER, &format!("worker-{}", std::process::id()));
    match &lost {
        Some(lost) => tracing::warn!(commands = counters.commands, "session lost: {lost}"),
        None => tracing::info!(
            commands = counters.commands,
            bytes_in = counters.bytes_in,
            bytes_out = counters.bytes_out,
            bytes_copied = counters.bytes_copied,
            "session ended"
        ),
    }
    worker_protocol::send(
        daemon.as_fd(),
        &FromWorker::Ended { lost: lost.map(|l| l.reason), counters },
        &[],
    )?;
    // Whatever still runs, such as an endless kernel or a thread in the driver, ends with the process. There is nothing to save.
    std::process::exit(0)
}

type Begun = (Box<dyn Commands>, Arc<dyn Client>, Option<Arc<TcpClient>>);

fn begin(
    transport: Transport,
    connection: OwnedFd,
    rdma: &Settings,
    polling: Polling,
) -> Result<Begun, Lost> {
    match transport {
        Transport::Tcp { slot_count, data_connections } => {
            let (commands, client) =
                TcpCommands::start(Stream::from(connection), slot_count, data_connections, polling)
                    .map_err(|e| Lost::new(format!("preparing the connection: {e}")))?;
            Ok((Box::new(commands), Arc::<TcpClient>::clone(&client), Some(client)))
        }
        Transport::Verbs { slot_count } => {
            let (commands, client) =
                VerbsCommands::start(Stream::from(connection), slot_count, rdma, polling)?;
            Ok((Box::new(commands), client, None))
        }
        Transport::Local => {
            let (commands, client) = LocalCommands::attach(UnixStream::from(connection), polling)?;
            Ok((Box::new(commands), client, None))
        }
    }
}

/// Starts two threads: one receives the daemon's messages and loses the session when the daemon is gone; the other reports counters, and ends the process if the dispatcher cannot.
fn watch(
    daemon: &Arc<OwnedFd>,
    tcp: Option<Arc<TcpClient>>,
    client: &Arc<dyn Client>,
    shared: &Arc<Shared>,
    broker: &Arc<Broker>,
    beside: Arc<dyn Beside>,
) -> anyhow::Result<()> {
    let broker = Arc::clone(broker);
    let socket = Arc::clone(daemon);
    let listener = Arc::clone(client);
    std::thread::Builder::new().name("rgpu-daemon".into()).spawn(move || {
        loop {
            match worker_protocol::receive::<ToWorker>(socket.as_fd()) {
                Ok(Some((ToWorker::Data, fds))) => {
                    let added = match (&tcp, fds.into_iter().next()) {
                        (Some(tcp), Some(fd)) => {
                            tcp.add_data_connection(Stream::from(fd)).map_err(|e| e.to_string())
                        }
                        _ => Err("this session cannot use a data connection".into()),
                    };
                    if let Err(e) = added {
                        listener.lose(&e);
                    }
                }
                Ok(Some((ToWorker::Reply { request, reply }, fds))) => {
                    broker.deliver(request, reply, fds.into_iter().next());
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => {
                    broker.close();
                    listener.lose("rgpu-server is shutting down");
                    return;
                }
            }
        }
    })?;
    let (socket, client, shared) = (Arc::clone(daemon), Arc::clone(client), Arc::clone(shared));
    let over = Arc::clone(&shared);
    client.when_over(Box::new(move || over.end()));
    std::thread::Builder::new().name("rgpu-report".into()).spawn(move || {
        // The thread above notices when the daemon is gone.
        shared.report(&*client, |counters| {
            drop(worker_protocol::send(socket.as_fd(), &FromWorker::Counters(counters), &[]))
        });
        // The dispatcher notices the end, too, and ends the process, unless it is in a driver call that waits for a stream. If the stream waits for the client, releasing it ends the call.
        // If its kernel never ends, the call would keep this process and its device memory forever.
        beside.release();
        std::thread::sleep(LAST_CALL);
        tracing::warn!("the session has ended but a driver call does not return; exiting without it");
        let (lost, counters) = (None, shared.counters(&*client));
        // The daemon may be gone.
        let _ = worker_protocol::send(socket.as_fd(), &FromWorker::Ended { lost, counters }, &[]);
        std::process::exit(0)
    })?;
    Ok(())
}
