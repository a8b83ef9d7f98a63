//! A worker: a process that serves one session.
//!
//! It prepares its first device (unless it is for NVML queries), tells the daemon, waits for a session,
//! executes it to its end, and exits. Whatever a session leaves behind ends with the process. `fuzzing` is a
//! client that may do anything.

mod door;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod host_waits;
pub(crate) mod pace;
mod read_ahead;
mod residence;
mod session;
mod timeline;
mod turns;

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use anyhow::{Context, bail};
use host_bridge::endpoint::{
    Allowance, Client, Commands, LocalCommands, Lost, Polling, Survivor, TcpClient, TcpCommands,
    VerbsCommands,
};
use host_bridge::stream::Stream;
use identity::Identity;
use protocol::Status;
use protocol::link::purpose;
use protocol::ops::Op;
use protocol::ops::array::MemcpyArray;
use protocol::ops::copy::{MemcpyHtoD, Memset};
use protocol::ops::direct::{DirectLand, DirectReceiveAll, DirectSend, DirectSendAll, DirectSendNow};
use protocol::ops::graph::GraphLaunch;
use protocol::ops::launch::Launch;
use protocol::trace::RECORDER;

use self::door::{Admitted, Door, FromDaemon, is_control};
use self::residence::{Orders, Residence};
use self::turns::{Link, Turns};
use crate::cache::Remote;
use crate::config::{self, WorkerOptions};
use crate::confinement;
use crate::cuda_ipc::Broker;
use crate::direct::Directs;
use crate::driver;
use crate::driver::quota::Quota;
use crate::driver::watchdog::Watchdog;
use crate::driver::{Beside, Errors};
use crate::log::OF_SESSION;
use crate::pages::{Page, Terms};
use crate::room::Room;
use crate::worker_protocol::{self, Counters, FromWorker, Kind, ToWorker, Transport, Visitor};

/// How often changed counters are reported to the daemon.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// How long the dispatcher may stay in a driver call after its session has ended. After that, the reporter
/// ends the process.
const LAST_CALL: Duration = Duration::from_secs(5);
/// How long the blocks that a session sent last may take to get into the cache after its end.
const CACHE_WITHIN: Duration = Duration::from_secs(10);

/// Kinds of commands that are counted separately; all others are 0.
const LAUNCHES: usize = 1;
const COPIES: usize = 2;

/// Commands executed, by kind, without and with a reply. Only the dispatcher counts, so each command costs
/// one load and one store.
#[derive(Default)]
struct Commanded([[AtomicU64; 2]; 3]);

impl Commanded {
    #[inline]
    fn count(&self, opcode: u16, answered: bool) {
        const COPY_CHAPTER: u16 = MemcpyHtoD::INFO.opcode >> 8;
        let kind = if opcode == Launch::INFO.opcode || opcode == GraphLaunch::INFO.opcode {
            LAUNCHES
        } else if opcode >> 8 == COPY_CHAPTER && opcode != Memset::INFO.opcode
            || [
                MemcpyArray::INFO.opcode,
                DirectSend::INFO.opcode,
                DirectSendNow::INFO.opcode,
                DirectLand::INFO.opcode,
                DirectSendAll::INFO.opcode,
                DirectReceiveAll::INFO.opcode,
            ]
            .contains(&opcode)
        {
            COPIES
        } else {
            0
        };
        let count = &self.0[kind][usize::from(answered)];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The sum over the selected kinds.
    fn sum(&self, of: impl Fn(usize, bool) -> bool) -> u64 {
        let counts = self
            .0
            .iter()
            .enumerate()
            .flat_map(|(kind, [not, answered])| [(kind, false, not), (kind, true, answered)]);
        counts
            .filter(|(kind, answered, _)| of(*kind, *answered))
            .map(|(.., n)| n.load(Ordering::Relaxed))
            .sum()
    }
}

/// State shared by the dispatcher and the reporter.
pub struct Shared {
    commands: Commanded,
    quota: Quota,
    directs: Arc<Directs>,
    /// Set by the reporter when no counter has changed, cleared by the dispatcher at the next command.
    resting: AtomicBool,
    /// The session is over.
    over: AtomicBool,
    /// Whether a thread ends the process: the dispatcher, or the reporter if the dispatcher cannot.
    leaving: AtomicBool,
    reporter: OnceLock<Thread>,
}

impl Shared {
    fn new(quota: Quota, directs: Arc<Directs>) -> Shared {
        let (resting, over, leaving, reporter) = Default::default();
        Shared { commands: Commanded::default(), quota, directs, resting, over, leaving, reporter }
    }

    /// Counts a command that the dispatcher has executed.
    #[inline]
    fn executed(&self, opcode: u16, answered: bool) {
        self.commands.count(opcode, answered);
        if self.resting.load(Ordering::Relaxed) {
            self.resting.store(false, Ordering::Relaxed);
            self.reporter.get().inspect(|reporter| reporter.unpark());
        }
    }

    /// Whether the session is over.
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// The session is over.
    fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.reporter.get().inspect(|reporter| reporter.unpark());
    }

    /// Whether the calling thread is the one that ends the process.
    fn leave(&self) -> bool {
        !self.leaving.swap(true, Ordering::SeqCst)
    }

    /// The reporter's loop: calls `report` while counters change, and sleeps while they don't. Returns when
    /// the session has ended.
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
            commands: self.commands.sum(|_, _| true),
            launches: self.commands.sum(|kind, _| kind == LAUNCHES),
            copies: self.commands.sum(|kind, _| kind == COPIES),
            round_trips: self.commands.sum(|_, answered| answered),
            bytes_in,
            bytes_out,
            bytes_copied: client.copied(),
            bytes_direct: self.directs.bytes(),
            bytes_direct_verbs: self.directs.bytes_over_verbs(),
            device_memory: self.quota.held_on_devices(),
        }
    }
}

/// Runs the worker.
pub fn main(arguments: &config::Worker) -> anyhow::Result<()> {
    crate::log::start_bounded(&arguments.log);
    // Standard error will be the client's, so panics are logged.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    // SAFETY: the daemon started this process with this descriptor open, and nothing else in the process uses
    // it.
    let daemon = unsafe { OwnedFd::from_raw_fd(arguments.fd) };
    let first = worker_protocol::receive(daemon.as_fd())?;
    let (orders, pid, kind, options) = match first {
        Some((ToWorker::Prepare { orders, pid, kind, options }, _)) => (orders, pid, kind, options),
        Some((ToWorker::Probe(orders), _)) => {
            let answer = FromWorker::Sandbox(confinement::enter(&orders));
            return Ok(worker_protocol::send(daemon.as_fd(), &answer, &[])?);
        }
        _ => bail!("a worker can only be started by the daemon"),
    };
    // Opened now, because the sandbox doesn't contain its folder.
    let timeline = host_bridge::trace::Timeline::create(&format!("worker-{pid}"));
    let entered = confinement::enter(&orders);
    let quota = Quota::default();
    let made = entered.map_err(driver::Unavailable::from).and_then(|report| {
        let mut backend = driver::make(&options.backing, quota.clone())?;
        if backend.reaches_pageable_memory() {
            confinement::pageable_memory(&report)?;
        }
        let free = if kind == Kind::Gpu { backend.warm()? } else { None };
        let all = driver::listed(&*backend, &options.backing)?;
        Ok((backend, all, free))
    });
    let (mut backend, all, free) = match made {
        Ok(made) => made,
        Err(driver::Unavailable { reason, full }) => {
            worker_protocol::send(daemon.as_fd(), &FromWorker::Failed { reason, full }, &[])?;
            return Ok(());
        }
    };
    // It serves one session, so its key ends with it.
    let identity = Arc::new(Identity::generate().context("a key for the session's connections")?);
    let ready = FromWorker::Ready {
        backend: backend.name().into(),
        devices: backend.devices(),
        all,
        free,
        key: identity.fingerprint(),
    };
    worker_protocol::send(daemon.as_fd(), &ready, &[])?;
    let polling = options.poll_us.map_or_else(Polling::default, |us| {
        let most = Duration::from_micros(us.min(10_000_000));
        Polling { most, while_due: most }
    });

    let Some((ToWorker::Session { transport, program, client: name, limits, door: visitor }, fds)) =
        worker_protocol::receive(daemon.as_fd())?
    else {
        // The daemon is gone or no longer needs this worker.
        return Ok(());
    };
    let mut fds = fds.into_iter();
    let connection = if visitor.is_none() { fds.next() } else { None };
    let (Some(terms), Some(meter), Some(bell)) = (fds.next(), fds.next(), fds.next()) else {
        bail!("the daemon sent a session without its connection or its pages");
    };
    let cache = fds.next().map(|socket| Remote::new(UnixStream::from(socket)));
    let (terms, meter) = (Page::open(&terms), Page::open(&meter));
    let terms = Arc::new(terms.context("mapping the terms")?);
    let meter = Arc::new(meter.context("mapping the meter")?);
    let link = Link { terms: Arc::clone(&terms), meter: Arc::clone(&meter), bell: Arc::new(bell) };
    let told = Arc::clone(&terms);
    let room = Arc::new(Room { meter: Arc::clone(&meter), bell: Arc::clone(&link.bell) });
    let orders = Arc::<Orders>::default();
    let swaps = options.swap.on() && kind == Kind::Gpu;
    let residence = Residence::new(Arc::clone(&orders), Arc::clone(&room), Arc::clone(&terms), swaps);
    let turns = Turns::new(link, options.backing.software_imitate.block_us);
    let _span = tracing::info_span!("session", client = %name, program = %program).entered();
    let daemon = Arc::new(daemon);
    let broker = Broker::new(Arc::clone(&daemon));
    let devices = limits.devices.clone();
    let kernel_seconds = limits.kernel_seconds;
    let grace = Duration::from_secs(limits.grace_seconds.unwrap_or(options.grace_seconds).into());
    quota.begin(limits, terms, meter, Arc::clone(&broker), swaps.then_some(room));
    let rdma = options.direct_verbs.then(|| options.rdma.clone());
    let in_place = options.direct_device_memory;
    let directs = Directs::new(Arc::clone(&identity), Arc::clone(&broker), rdma, in_place);
    let shared = Arc::new(Shared::new(quota.clone(), directs));
    if timeline.is_some() {
        RECORDER.start();
    }
    let connected = connect(&daemon, &told, &identity, visitor, transport, connection);
    let begun = connected.and_then(|(connection, door, early)| {
        let begun = begin(transport, (connection, door.is_some()), &options, polling, cache, grace)?;
        if !devices.is_empty() {
            driver::restrict(&mut *backend, &options.backing, quota, &devices)
                .map_err(|status| Lost::new(format!("preparing devices {devices:?}: {status}")))?;
        }
        Ok((begun, door, early))
    });
    let mut cached = None;
    let (lost, counters) = match begun {
        Ok((Begun { mut commands, client, tcp, survivor }, door, early)) => {
            cached.clone_from(&tcp);
            let from = Daemon {
                socket: Arc::clone(&daemon),
                early,
                terms: told,
                broker: Arc::clone(&broker),
                orders,
            };
            watch(from, (tcp, survivor), door, &client, &shared, backend.beside())?;
            if kernel_seconds > 0 {
                backend.watch(watch_kernels(kernel_seconds, &daemon, &client)?);
            }
            backend.share(broker);
            backend.reach(Arc::clone(&shared.directs));
            let lost = session::run(&mut *commands, &client, &mut *backend, &shared, kind, turns, residence);
            // If the reporter was faster, it is about to end the process.
            shared.leave();
            (lost, shared.counters(&*client))
        }
        Err(lost) => (Some(lost), Counters::default()),
    };
    timeline.iter().for_each(|timeline| timeline.save(&RECORDER));
    match &lost {
        Some(lost) => {
            tracing::warn!(target: OF_SESSION, commands = counters.commands, "session lost: {lost}");
        }
        None => tracing::info!(
            target: OF_SESSION,
            commands = counters.commands,
            bytes_in = counters.bytes_in,
            bytes_out = counters.bytes_out,
            bytes_copied = counters.bytes_copied,
            bytes_direct = counters.bytes_direct,
            bytes_direct_verbs = counters.bytes_direct_verbs,
            "session ended"
        ),
    }
    worker_protocol::send(
        daemon.as_fd(),
        &FromWorker::Ended { lost: lost.map(|l| l.reason), counters },
        &[],
    )?;
    // The program's next start is to find the data that this one sent last.
    if let Some(client) = cached {
        client.finish_cache(CACHE_WITHIN);
    }
    // Whatever is still running, such as an endless kernel or a thread in the driver, ends with the process.
    // There is nothing else to save.
    std::process::exit(0)
}

/// A session that has begun.
struct Begun {
    commands: Box<dyn Commands>,
    client: Arc<dyn Client>,
    tcp: Option<Arc<TcpClient>>,
    /// If its connections can be replaced.
    survivor: Option<Arc<dyn Survivor>>,
}

/// A session's control connection, its door under TLS, and what the daemon has said meanwhile.
type Connected = (Stream, Option<Arc<Door>>, Vec<FromDaemon>);

/// The session's control connection: the one that came with it, or with TLS the one that its client opens.
fn connect(
    daemon: &OwnedFd,
    terms: &Page<Terms>,
    identity: &Identity,
    visitor: Option<Visitor>,
    transport: Transport,
    connection: Option<OwnedFd>,
) -> Result<Connected, Lost> {
    match (visitor, connection) {
        (Some(visitor), _) => {
            let data_connections = match transport {
                Transport::Tcp { data_connections, .. } => data_connections,
                _ => 0,
            };
            let door = Door::new(identity, visitor, data_connections)?;
            let (stream, early) = door.control(daemon, terms)?;
            Ok((stream, Some(door), early))
        }
        (None, Some(connection)) => Ok((Stream::from(connection), None, Vec::new())),
        (None, None) => Err(Lost::new("the daemon sent a session without its connection")),
    }
}

fn begin(
    transport: Transport,
    (connection, tls): (Stream, bool),
    options: &WorkerOptions,
    polling: Polling,
    cache: Option<Remote>,
    grace: Duration,
) -> Result<Begun, Lost> {
    match transport {
        Transport::Tcp { slot_count, data_connections, takes_compressed } => {
            let (replay, eager) = (options.replay_memory, u64::from(options.eager_mib()) << 20);
            let compress = options.compress.over(takes_compressed, tls);
            let allowance = Allowance { grace, replay, eager, compress };
            let (commands, client) =
                TcpCommands::start(connection, slot_count, data_connections, polling, allowance)
                    .map_err(|e| Lost::new(format!("preparing the connection: {e}")))?;
            if let Some(cache) = cache {
                client
                    .use_cache(Arc::new(cache))
                    .map_err(|e| Lost::new(format!("preparing the cache: {e}")))?;
            }
            Ok(Begun {
                commands: Box::new(commands),
                client: Arc::<TcpClient>::clone(&client),
                survivor: Some(Arc::<TcpClient>::clone(&client)),
                tcp: Some(client),
            })
        }
        Transport::Verbs { slot_count, resumes } => {
            let grace = if resumes { grace } else { Duration::ZERO };
            let (commands, client) =
                VerbsCommands::start(connection, slot_count, &options.rdma, polling, grace)?;
            let survivor: Arc<dyn Survivor> = client.clone();
            Ok(Begun { commands: Box::new(commands), client, tcp: None, survivor: Some(survivor) })
        }
        Transport::Local => {
            let (commands, client) =
                LocalCommands::attach(UnixStream::from(connection.into_socket()), polling, grace)?;
            Ok(Begun { commands: Box::new(commands), client, tcp: None, survivor: None })
        }
    }
}

/// Starts the watchdog. If a kernel overruns, the client gets CUDA's error, the session is lost, and this
/// process exits: nothing else ends a kernel.
fn watch_kernels(
    seconds: u32,
    daemon: &Arc<OwnedFd>,
    client: &Arc<dyn Client>,
) -> anyhow::Result<Arc<Watchdog>> {
    let (daemon, client) = (Arc::clone(daemon), Arc::clone(client));
    let overrun = move |context| {
        // The daemon may be gone.
        let _ = worker_protocol::send(daemon.as_fd(), &FromWorker::Overrun, &[]);
        Errors::new(Arc::clone(&client)).publish(context, Status::LAUNCH_TIMEOUT, 0);
        client.lose(&format!(
            "a kernel ran for more than {seconds} s, which is the limit of this server (--kernel-seconds)"
        ));
    };
    Watchdog::start(Duration::from_secs(seconds.into()), overrun).context("starting the watchdog")
}

/// The connection to the daemon.
struct Daemon {
    socket: Arc<OwnedFd>,
    /// Messages that were received before the session began.
    early: Vec<FromDaemon>,
    terms: Arc<Page<Terms>>,
    broker: Arc<Broker>,
    orders: Arc<Orders>,
}

/// Switches to a new daemon's terms. From now on nobody can write the previous daemon's page.
fn taken_over(terms: &Page<Terms>, fds: Vec<OwnedFd>) {
    let Some(fd) = fds.into_iter().next() else { return };
    match terms.replace(&fd) {
        Ok(()) => tracing::debug!("another daemon has taken over this session"),
        Err(e) => tracing::error!("mapping another daemon's terms: {e}"),
    }
}

/// Starts two threads. One receives the daemon's messages, and loses the session when the daemon is gone. The
/// other reports counters, and ends the process if the dispatcher cannot.
fn watch(
    daemon: Daemon,
    (tcp, survivor): (Option<Arc<TcpClient>>, Option<Arc<dyn Survivor>>),
    door: Option<Arc<Door>>,
    client: &Arc<dyn Client>,
    shared: &Arc<Shared>,
    beside: Arc<dyn Beside>,
) -> anyhow::Result<()> {
    if let (Some(door), Some(survivor)) = (&door, &survivor) {
        let (tcp, survivor, listener) = (tcp.clone(), Arc::clone(survivor), Arc::clone(client));
        door.open(Arc::new(move |Admitted { hello, stream }| match hello.purpose {
            purpose::END => listener.close(),
            // One that takes its place was admitted first.
            purpose if is_control(purpose) => {}
            // The connection closes if the session cannot use it; the bridge may try again.
            purpose::RESUME => {
                if let Err(e) = survivor.resume(hello.attempt, stream) {
                    tracing::warn!(attempt = hello.attempt, "cannot resume the session: {e}");
                }
            }
            _ => {
                // A session over verbs has none.
                let Some(tcp) = &tcp else { return };
                if let Err(e) = tcp.add_data_connection(hello.attempt, hello.index, stream) {
                    listener.lose(&format!("preparing a data connection: {e}"));
                }
            }
        }));
    }
    if let Some(survivor) = &survivor {
        let socket = Arc::clone(&daemon.socket);
        survivor.when_link_changes(Box::new(move |up| {
            // The thread below notices when the daemon is gone.
            let _ = worker_protocol::send(socket.as_fd(), &FromWorker::Link { up }, &[]);
        }));
    }
    let Daemon { socket, early, terms, broker, orders } = daemon;
    let from_daemon = Arc::clone(&socket);
    let listener = Arc::clone(client);
    let directs = Arc::clone(&shared.directs);
    std::thread::Builder::new().name("rgpu-daemon".into()).spawn(move || {
        let mut early = early.into_iter();
        loop {
            let next = early.next().map(|message| Ok(Some(message)));
            match next.unwrap_or_else(|| worker_protocol::receive(from_daemon.as_fd())) {
                Ok(Some((ToWorker::Data { attempt, index }, fds))) => {
                    let added = match (&tcp, fds.into_iter().next()) {
                        (Some(tcp), Some(fd)) => tcp
                            .add_data_connection(attempt, index, Stream::from(fd))
                            .map_err(|e| e.to_string()),
                        _ => Err("this session cannot use a data connection".into()),
                    };
                    if let Err(e) = added {
                        listener.lose(&e);
                    }
                }
                Ok(Some((ToWorker::Connection, fds))) => {
                    if let Some(door) = &door {
                        fds.into_iter().for_each(|fd| door.knock(fd));
                    }
                }
                Ok(Some((ToWorker::Direct { token, welcomed }, fds))) => {
                    fds.into_iter().for_each(|fd| directs.knock(token, fd, welcomed));
                }
                Ok(Some((ToWorker::Resume { attempt }, fds))) => {
                    // The connection closes if the session cannot use it; the bridge may try again.
                    if let (Some(survivor), Some(fd)) = (&survivor, fds.into_iter().next())
                        && let Err(e) = survivor.resume(attempt, Stream::from(fd))
                    {
                        tracing::warn!(attempt, "cannot resume the session: {e}");
                    }
                }
                Ok(Some((ToWorker::TakenOver, fds))) => taken_over(&terms, fds),
                Ok(Some((ToWorker::Memory { number, order }, fds))) => {
                    orders.put((number, order, fds.into_iter().next()));
                    listener.rouse();
                }
                Ok(Some((ToWorker::End, _))) => listener.close(),
                Ok(Some((ToWorker::DeviceFailed { device, status }, _))) => {
                    tracing::error!(device, "the device has failed: its programs get CUDA's error {status}");
                    beside.fail_device(device, Status(status));
                }
                Ok(Some((ToWorker::Reply { request, reply }, fds))) => {
                    broker.deliver(request, reply, fds.into_iter().next());
                }
                Ok(Some(_)) => {}
                over => {
                    broker.close();
                    let why = match over {
                        Err(e) => format!("its worker cannot hear rgpu-server: {e}"),
                        Ok(_) => "rgpu-server has ended".into(),
                    };
                    listener.lose(&why);
                    return;
                }
            }
        }
    })?;
    let (client, shared) = (Arc::clone(client), Arc::clone(shared));
    let over = Arc::clone(&shared);
    client.when_over(Box::new(move || over.end()));
    std::thread::Builder::new().name("rgpu-report".into()).spawn(move || {
        // The thread above notices when the daemon is gone.
        shared.report(&*client, |counters| {
            drop(worker_protocol::send(socket.as_fd(), &FromWorker::Counters(counters), &[]))
        });
        // The dispatcher also notices the end and exits, unless it is in a driver call that waits for a
        // stream. If the stream's kernel never ends, that call would keep this process and its device memory
        // forever.
        std::thread::sleep(LAST_CALL);
        if !shared.leave() {
            return;
        }
        tracing::warn!("the session has ended but a driver call does not return; exiting without it");
        let (lost, counters) = (client.lost().map(|lost| lost.reason), shared.counters(&*client));
        // The daemon may be gone.
        let _ = worker_protocol::send(socket.as_fd(), &FromWorker::Ended { lost, counters }, &[]);
        std::process::exit(0)
    })?;
    Ok(())
}
