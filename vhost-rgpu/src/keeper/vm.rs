//! The keeper's part of a virtual machine: its vhost-user socket, and what stands between the VMM and the
//! device process.
//!
//! The keeper answers the VMM, remembers its messages ([`Negotiation`]), and passes them on to the device
//! process, also over vhost-user. Memory, doorbells and interrupts are descriptors in these messages: nothing
//! of a running session passes through the keeper.
//!
//! If the device process ends unexpectedly, another one is started and told everything again. The VMM and the
//! guest's driver don't notice. A process serves only one VMM connection: the next VMM starts with a fresh
//! one. If the keeper itself is replaced, what it knows of the connection is [`Kept`](super::kept::Kept) for
//! the next keeper.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockReadGuard};
use std::time::{Duration, Instant};

use anyhow::Context;
use handover::start_thread;
use host_bridge::log_limit::LogLimit;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{MsgFlags, recv, recvmsg};
use nix::unistd::dup3_raw;
use sandbox::foreign::{self, Found};
use vhost::vhost_user::message::{
    MAX_MSG_SIZE, VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
    VhostUserHeaderFlag, VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures,
    VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags,
    VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error, Frontend, GpuBackend, Result, VhostUserBackendReqHandler, VhostUserFrontend,
};
use vhost::{VhostBackend, VhostUserMemoryRegionBase, VringConfigData};
use vmm_sys_util::tempdir::TempDir;

use protocol::device::QUEUE_COUNT;

use super::DRAIN;
use super::answers::Answers;
use super::failures::Failures;
use super::kept::Held;
use super::negotiation::{MAX_MEMORIES, Negotiation, Notifier};
use super::predecessor::{Connection, Predecessor, repeat};
use super::process::{Process, Processes};
use super::status::Own;
use super::takeover::Succession;
use super::ties::StoredByChannel;
use crate::config::Vm;
use crate::link::ToDevice;
use crate::role::Role;
use crate::sockets::Listening;
use crate::vm::REQUESTS_SIZE;

/// A device process that takes longer to answer a vhost-user message is replaced. Ending a guest's sessions
/// takes up to ten seconds.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// A VMM that takes longer to send the rest of a message, or to read answers, is disconnected.
const MESSAGE_WITHIN: Duration = Duration::from_secs(10);
/// Interval between checks for that.
const CHECK_EVERY: Duration = Duration::from_millis(5);
/// How long a [look](foreign::look) at a message's descriptors may take.
const LOOKS_WITHIN: Duration = Duration::from_secs(10);
/// Most VMMs whose descriptors may still keep somebody waiting. Beyond that, no other VMM is served.
const MOST_FOREIGN: usize = 4;
/// Size of a vhost-user message's header in bytes: its request, its flags and the size of what follows.
const HEADER: usize = 12;
/// How long a device process has to end its sessions after its VMM has disconnected.
const ENDS_WITHIN: Duration = Duration::from_secs(15);
/// How long it may then stay to tell servers that have not heard of that. Servers usually keep a session for
/// ten minutes.
const LINGERS_WITHIN: Duration = Duration::from_secs(3600);

/// The server of one virtual machine's socket.
#[derive(Debug)]
pub struct Server {
    config: Vm,
    processes: Arc<Processes>,
    own: Arc<Own>,
    succession: Arc<Succession>,
    stopping: AtomicBool,
    stop: EventFd,
    /// VMMs whose descriptors keep somebody waiting.
    foreign: Arc<AtomicUsize>,
}

impl Server {
    /// A server with this configuration.
    pub fn new(
        config: Vm,
        processes: Arc<Processes>,
        own: Arc<Own>,
        succession: Arc<Succession>,
    ) -> io::Result<Arc<Server>> {
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (stopping, foreign) = (AtomicBool::new(false), Arc::default());
        Ok(Arc::new(Server { config, processes, own, succession, stopping, stop, foreign }))
    }

    /// Serves one VMM after another until [`stop`](Self::stop) is called and the socket is stopped. The first
    /// is the previous keeper's, if it had one, [unserved](Succession::unserved), and the only one without a
    /// socket.
    pub fn serve(&self, listening: Option<&Listening>, before: Option<(Predecessor, Arc<()>)>) {
        let name = &self.config.name;
        let failed = |e: anyhow::Error| {
            tracing::error!("vm {name}: {e:#}");
            // Most likely the machine is out of descriptors, memory or processes.
            self.pause(Duration::from_millis(200));
        };
        if let Some((before, unserved)) = before {
            let stays = self.succession.stays();
            self.take_over(before, unserved, stays).unwrap_or_else(failed);
        }
        let accept = |listening: &Listening| {
            listening.accept_patiently(&format!("vm {name}"), || self.succession.stays())
        };
        while let Some((vmm, stays)) = listening.and_then(accept) {
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            self.serve_vmm(vmm, stays).unwrap_or_else(failed);
        }
    }

    /// Ends the current connection and accepts no more.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Fails only if the counter is at its maximum, and then it is readable, too.
        let _ = self.stop.write(1);
    }

    /// Waits, unless the daemon is shutting down.
    fn pause(&self, time: Duration) {
        let limit = PollTimeout::try_from(time.as_millis()).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut [PollFd::new(self.stop.as_fd(), PollFlags::POLLIN)], limit);
    }

    fn serve_vmm(&self, vmm: OwnedFd, stays: RwLockReadGuard<'_, ()>) -> anyhow::Result<()> {
        let foreign = self.foreign.load(Ordering::SeqCst);
        anyhow::ensure!(
            foreign < MOST_FOREIGN,
            "no VMM is served: files that {foreign} earlier ones have sent cannot be closed, because their file systems do not answer"
        );
        let connection = Connection::new(self.succession.store.clone(), &self.config.name, &vmm)
            .context("what a successor needs")?;
        let connection = Arc::new(connection);
        let result = self.begin(vmm, &connection, stays);
        connection.kept.end();
        result
    }

    fn begin(
        &self,
        vmm: OwnedFd,
        connection: &Arc<Connection>,
        stays: RwLockReadGuard<'_, ()>,
    ) -> anyhow::Result<()> {
        let requests = requests_memory().context("memory for requests in progress")?;
        connection.requests(&requests);
        let device = Device::start(self, connection, &requests, &mut StoredByChannel::new(), None)?;
        let stream = UnixStream::from(vmm);
        let watched = stream.try_clone().context("duplicating the VMM's connection")?;
        let attempts = Attempts::new(&watched).context("duplicating the VMM's connection")?;
        let relay = Relay::new(self, attempts, connection, device, Negotiation::default(), requests);
        let relay = Arc::new(relay);
        let name = &self.config.name;
        tracing::info!("vm {name}: a VMM has connected; device process {}", relay.lock().device.process.pid);
        drop(stays);
        self.attend(&watched, BackendReqHandler::from_stream(stream, relay.clone()), &relay);
        Ok(())
    }

    /// Continues with the previous keeper's VMM, whose device process has ended.
    fn take_over(
        &self,
        before: Predecessor,
        unserved: Arc<()>,
        stays: RwLockReadGuard<'_, ()>,
    ) -> anyhow::Result<()> {
        let connection = before.connection.clone();
        let result = self.resume(before, unserved, stays);
        connection.kept.end();
        result.context("the previous keeper's VMM")
    }

    fn resume(
        &self,
        before: Predecessor,
        unserved: Arc<()>,
        stays: RwLockReadGuard<'_, ()>,
    ) -> anyhow::Result<()> {
        let most = self.config.limits.max_channels as usize;
        // Nothing touches the guest's memory before the old process has ended.
        let Predecessor { connection, found } = before;
        // Without all of a channel's descriptors, nobody could tell its program, or wait until a worker has
        // released its memory, which is the guest's.
        let missing = |channel: u64, e: io::Error| Err(io::Error::other(format!("channel {channel}: {e}")));
        let ended = connection.kept.end_device_process(&found, most, missing, drop);
        let mut stored = ended.context("what its device process has stored")?;
        let (vmm, requests, negotiation) = connection.restore(&found).context("what it has kept")?;
        drop(found);
        let vmm = UnixStream::from(vmm);
        let mut attempts = Attempts::new(&vmm).context("duplicating the VMM's connection")?;
        let why = "was replaced together with the daemon vhost-rgpu";
        let device = attempts.start(self, &connection, &requests, &negotiation, &mut stored, why)?;
        let (name, process) = (&self.config.name, device.process.pid);
        tracing::info!("vm {name}: continues with the VMM; device process {process}");
        let (protocol, features) = (negotiation.protocol, negotiation.features);
        let relay = Arc::new(Relay::new(self, attempts, &connection, device, negotiation, requests));
        // The handler must know what the VMM told the previous one. It gets that on a socket which is then
        // replaced by the VMM's.
        let (ours, theirs) = UnixStream::pair().context("a pair of sockets")?;
        let number = ours.as_raw_fd();
        let mut requests = BackendReqHandler::from_stream(ours, relay.clone());
        relay.lock().repeating = true;
        repeat(&theirs, protocol, features, || requests.handle_request()).context("what was negotiated")?;
        relay.lock().repeating = false;
        // SAFETY: the handler owns this descriptor, and continues to; it only becomes another socket.
        let replaced = unsafe { dup3_raw(&vmm, number, OFlag::O_CLOEXEC) };
        drop(theirs);
        // It belongs to the handler.
        let _ = replaced.context("duplicating the VMM's connection")?.into_raw_fd();
        drop((unserved, stays));
        self.attend(&vmm, requests, &relay);
        Ok(())
    }

    /// Serves a VMM until it disconnects or the daemon ends.
    fn attend(&self, vmm: &UnixStream, requests: BackendReqHandler<Relay<'_>>, relay: &Relay<'_>) {
        let name = &self.config.name;
        match &self.relay(vmm, requests, relay) {
            Ok(()) if self.stopping.load(Ordering::SeqCst) => {}
            Ok(()) => tracing::info!("vm {name}: the VMM has disconnected"),
            Err(e) => tracing::warn!("vm {name}: the VMM's connection ended: {e}"),
        }
        let stays = self.succession.stays();
        let process = relay.lock().device.process.clone();
        if self.stopping.load(Ordering::SeqCst) {
            return process.end(DRAIN);
        }
        if !process.let_go(ENDS_WITHIN) {
            return;
        }
        drop(stays);
        // It may take long, and the next VMM must not wait for that.
        let told = process.clone();
        let wait = move || {
            told.wait(LINGERS_WITHIN);
            told.reap();
        };
        if let Err(e) = start_thread("farewells", wait) {
            tracing::error!("vm {name}: no thread to wait for its device process: {e}");
            process.reap();
        }
    }

    /// Passes the VMM's messages on until it disconnects or the daemon shuts down.
    fn relay(
        &self,
        vmm: &UnixStream,
        mut requests: BackendReqHandler<Relay<'_>>,
        relay: &Relay<'_>,
    ) -> std::result::Result<(), String> {
        let mut unready: Option<Instant> = None;
        loop {
            let process = relay.lock().device.process.clone();
            let watch = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut watched = [watch(self.stop.as_fd()), watch(process.ended()), watch(vmm.as_fd())];
            match poll(&mut watched, PollTimeout::NONE) {
                Ok(_) => {}
                Err(nix::Error::EINTR) => continue,
                Err(e) => return Err(format!("poll: {e}")),
            }
            let [stopped, ended, readable] = watched.map(|watched| watched.any().unwrap_or(true));
            if stopped {
                return Ok(());
            }
            // Otherwise handling it could take as long as the VMM likes, and the keeper would have to stay.
            if readable && !ended && !is_ready(vmm).map_err(|e| e.to_string())? {
                if unready.get_or_insert_with(Instant::now).elapsed() > MESSAGE_WITHIN {
                    return Err("it sent a part of a message, or it does not read the answers".into());
                }
                self.pause(CHECK_EVERY);
                continue;
            }
            unready = None;
            if readable && !ended {
                self.look_at_descriptors(vmm)?;
            }
            let _stays = self.succession.stays();
            if ended {
                relay.lock().restart(Instant::now()).map_err(|e| e.to_string())?;
            } else if readable {
                match relay.noted(|| requests.handle_request()) {
                    Ok(()) => {}
                    Err(Error::Disconnected | Error::PartialMessage | Error::SocketBroken(_)) => {
                        return Ok(());
                    }
                    Err(e) => return Err(e.to_string()),
                }
            }
        }
    }

    /// Refuses a VMM whose next message has descriptors that may keep whoever has them waiting.
    fn look_at_descriptors(&self, vmm: &UnixStream) -> std::result::Result<(), String> {
        let mut header = [0; HEADER];
        let mut text = [IoSliceMut::new(&mut header)];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        // The kernel says that there was no room for descriptors.
        let message = recvmsg::<()>(vmm.as_raw_fd(), &mut text, None, flags).map_err(|e| e.to_string())?;
        let has_descriptors = message.flags.contains(MsgFlags::MSG_CTRUNC);
        if (1..HEADER).contains(&message.bytes) {
            return Err("it sent a part of a message".into());
        }
        if !has_descriptors {
            return Ok(());
        }
        match foreign::look(vmm.as_fd(), HEADER, LOOKS_WITHIN) {
            Ok(Found::Harmless) => Ok(()),
            Ok(Found::Foreign(copy)) => {
                self.foreign.fetch_add(1, Ordering::SeqCst);
                let count = Arc::clone(&self.foreign);
                let wait = move || {
                    copy.wait();
                    count.fetch_sub(1, Ordering::SeqCst);
                };
                // Without a thread it stays counted.
                let _ = start_thread("foreign", wait);
                Err("it sent a file whose file system may keep this daemon waiting (FUSE, or one of a network)".into())
            }
            Err(e) => Err(format!("looking at its descriptors: {e}")),
        }
    }
}

nix::ioctl_read_bad!(
    /// How many bytes a socket has received that were not read.
    waiting, libc::FIONREAD, libc::c_int
);

/// Whether the VMM's next message can be handled without waiting for the VMM: all of it has come, and there
/// is room for the answer. Also if its connection is over.
fn is_ready(vmm: &UnixStream) -> nix::Result<bool> {
    let mut watched = [PollFd::new(vmm.as_fd(), PollFlags::POLLIN | PollFlags::POLLOUT)];
    poll(&mut watched, PollTimeout::ZERO)?;
    let events = watched[0].revents().unwrap_or(PollFlags::empty());
    if events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR) {
        return Ok(true);
    }
    // A socket is writable while less than a quarter of its room is in use. No answer is longer than a page.
    if !events.contains(PollFlags::POLLOUT) {
        return Ok(false);
    }
    let mut header = [0; HEADER];
    match recv(vmm.as_raw_fd(), &mut header, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
        Ok(0) => return Ok(true),
        Ok(HEADER) => {}
        Ok(_) | Err(nix::Error::EAGAIN | nix::Error::EINTR) => return Ok(false),
        Err(e) => return Err(e),
    }
    let [.., a, b, c, d] = header;
    let size = u32::from_ne_bytes([a, b, c, d]) as usize;
    let mut came = 0;
    // SAFETY: the kernel writes one number, to a variable that outlives the call.
    unsafe { waiting(vmm.as_raw_fd(), &mut came) }?;
    // A longer one is refused for its header.
    Ok(size > MAX_MSG_SIZE || came as usize >= HEADER + size)
}

/// Whether the VMM has closed its connection, or nobody has it any more.
fn has_hung_up(vmm: &UnixStream) -> bool {
    let mut watched = [PollFd::new(vmm.as_fd(), PollFlags::empty())];
    let known = poll(&mut watched, PollTimeout::ZERO).is_ok();
    known && watched[0].revents().is_some_and(|events| !events.is_empty())
}

/// A device process, and the connection on which the keeper speaks vhost-user to it.
struct Device {
    process: Arc<Process>,
    frontend: Frontend,
    answers: Answers,
    features: u64,
    protocol_features: VhostUserProtocolFeatures,
}

impl std::ops::Deref for Device {
    type Target = Frontend;

    fn deref(&self) -> &Frontend {
        &self.frontend
    }
}

/// A connection, and the listening socket in whose queue its other end waits. (`vhost-user-backend` accepts
/// its connection only from a listening socket.)
fn connection() -> io::Result<(OwnedFd, UnixStream)> {
    // A folder that nobody else may enter, so that nobody else can connect.
    let folder = TempDir::new_with_prefix(std::env::temp_dir().join("vhost-rgpu-"))?;
    let path = folder.as_path().join("device");
    let listening = UnixListener::bind(&path)?;
    let stream = UnixStream::connect(&path)?;
    Ok((listening.into(), stream))
}

fn requests_memory() -> io::Result<OwnedFd> {
    let file = memfd_create(c"requests", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    nix::unistd::ftruncate(&file, REQUESTS_SIZE as i64)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
    Ok(file)
}

impl Device {
    /// Starts a device process. `stored` and `resumed` come from its predecessor. On failure, `stored` is
    /// unchanged.
    fn start(
        server: &Server,
        connection: &Arc<Connection>,
        requests: &OwnedFd,
        stored: &mut StoredByChannel,
        resumed: Option<String>,
    ) -> anyhow::Result<Device> {
        let config = &server.config;
        let process = server
            .processes
            .start(
                &Role::Vm(config.name.clone()),
                &config.servers,
                connection.clone(),
                stored,
                config.limits.max_channels as usize,
            )
            .context("starting a device process")?;
        connection.kept.served_by(&process);
        Device::connect(&process, requests, resumed).map_err(|e| {
            let (how, left) = process.take_over();
            *stored = left;
            e.context(format!("the device process {} {how}", process.pid))
        })
    }

    fn connect(
        process: &Arc<Process>,
        requests: &OwnedFd,
        resumed: Option<String>,
    ) -> anyhow::Result<Device> {
        process.restore().context("passing on a device process's channels")?;
        let (listening, stream) = connection().context("connecting with the device process")?;
        let requests = requests.try_clone().context("duplicating a descriptor")?;
        process
            .tell(&ToDevice::Vmm { listening, requests, resumed })
            .context("talking to the device process")?;
        let watched = stream.try_clone().context("duplicating a descriptor")?;
        let who = format!("{}: its device process {}", process.name, process.pid);
        let answers = Answers::new(watched, ANSWERS_WITHIN, who).context("a thread to watch it")?;
        let mut frontend = Frontend::from_stream(stream, QUEUE_COUNT as u64);
        let (features, protocol_features) = answers
            .to(|| introduce(&mut frontend))
            .map_err(|e| anyhow::anyhow!("the device process {} does not begin: {e}", process.pid))?;
        Ok(Device { process: process.clone(), frontend, answers, features, protocol_features })
    }

    /// Has the process notify.
    fn notify(&self, events: Vec<OwnedFd>) {
        for event in events {
            if let Err(e) = self.process.tell(&ToDevice::Notify { event }) {
                // The next process notifies as well.
                let Process { name, pid, .. } = &*self.process;
                tracing::error!("{name}: its device process {pid} does not read the keeper's messages: {e}");
                return self.process.kill();
            }
        }
    }
}

/// Asks a device what it offers, and accepts all of vhost-user's extensions: which of them the VMM has
/// accepted only concerns the VMM and the keeper.
fn introduce(device: &mut Frontend) -> vhost::Result<(u64, VhostUserProtocolFeatures)> {
    device.set_owner()?;
    let features = device.get_features()?;
    let protocol = device.get_protocol_features()?;
    device.set_protocol_features(protocol | VhostUserProtocolFeatures::REPLY_ACK)?;
    // From here on each message is answered, so that errors can be attributed.
    device.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    Ok((features, protocol))
}

/// Connects one VMM's connection with the device process that currently serves it.
struct Relay<'s>(Mutex<Inner<'s>>);

struct Inner<'s> {
    server: &'s Server,
    connection: Arc<Connection>,
    device: Device,
    negotiation: Negotiation,
    /// The memory for requests in progress, which outlives device processes.
    requests: OwnedFd,
    attempts: Attempts,
    resets: LogLimit,
    read_only: LogLimit,
    /// Whether the VMM's messages to the previous keeper are being repeated, which the device already knows.
    repeating: bool,
}

impl<'s> Relay<'s> {
    fn new(
        server: &'s Server,
        attempts: Attempts,
        connection: &Arc<Connection>,
        device: Device,
        negotiation: Negotiation,
        requests: OwnedFd,
    ) -> Relay<'s> {
        Relay(Mutex::new(Inner {
            server,
            connection: connection.clone(),
            device,
            negotiation,
            requests,
            attempts,
            resets: LogLimit::default(),
            read_only: LogLimit::default(),
            repeating: false,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner<'s>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles a message of the VMM, and saves what it has changed for the next keeper.
    fn noted<T>(&self, handle: impl FnOnce() -> T) -> T {
        let connection = self.lock().connection.clone();
        connection.begins();
        let result = handle();
        connection.done(self.lock().negotiation.save());
        result
    }
}

/// Whether the device process itself has refused a message. After any other error it is unusable.
fn refused(error: &vhost::Error) -> bool {
    matches!(error, vhost::Error::VhostUserProtocol(Error::BackendInternalError | Error::InvalidParam))
}

/// The history of starting device processes for one VMM.
struct Attempts {
    vmm: UnixStream,
    /// When the last one had been told everything.
    since: Instant,
    failures: Failures,
}

impl Attempts {
    fn new(vmm: &UnixStream) -> io::Result<Attempts> {
        Ok(Attempts { vmm: vmm.try_clone()?, since: Instant::now(), failures: Failures::default() })
    }

    /// A device process serves the guest.
    fn succeeded(&mut self) {
        self.since = Instant::now();
    }

    /// A device process has ended, or has not answered what it was asked then. How long it was waited for
    /// does not count: a process that answers nothing has done nothing all that time.
    fn failed(&mut self, then: Instant) {
        self.failures.count(then.saturating_duration_since(self.since));
    }

    /// A device process has failed before it was told everything.
    fn failed_at_start(&mut self) {
        self.failures.count(Duration::ZERO);
    }

    /// Starts a device process to replace one that has ended, and tells it everything. `why` is how the old
    /// one ended, and `stored` what it had stored.
    fn start(
        &mut self,
        server: &Server,
        connection: &Arc<Connection>,
        requests: &OwnedFd,
        negotiation: &Negotiation,
        stored: &mut StoredByChannel,
        why: &str,
    ) -> Result<Device> {
        let name = &server.config.name;
        let failed = |text: String| Error::ReqHandlerError(io::Error::other(text));
        loop {
            let pause = self.failures.pause().map_err(failed)?;
            if !pause.is_zero() {
                server.pause(pause);
            }
            if server.stopping.load(Ordering::SeqCst) {
                return Err(failed("the daemon is shutting down".to_owned()));
            }
            if has_hung_up(&self.vmm) {
                return Err(failed("the VMM has disconnected".to_owned()));
            }
            let mut device = match Device::start(server, connection, requests, stored, Some(why.to_owned())) {
                Ok(device) => device,
                Err(e) => {
                    tracing::error!("vm {name}: {e:#}");
                    self.failed_at_start();
                    continue;
                }
            };
            let process = device.process.clone();
            match device.answers.to(|| negotiation.replay(&mut device.frontend)) {
                Ok(events) => {
                    self.succeeded();
                    device.notify(events);
                    return Ok(device);
                }
                // The next one would not accept it either: it is the VMM that has sent something invalid.
                Err(e) if refused(&e) => {
                    process.end(Duration::ZERO);
                    return Err(failed(format!(
                        "device process {} does not accept what was negotiated",
                        process.pid
                    )));
                }
                Err(e) => tracing::error!("vm {name}: telling device process {}: {e}", process.pid),
            }
            let (how, left) = process.take_over();
            tracing::error!("vm {name}: its device process {} {how}; starting another one", process.pid);
            stored.extend(left);
            self.failed_at_start();
        }
    }
}

impl Inner<'_> {
    /// Replaces a device process that has ended, or is unusable because of what it was asked `then`.
    fn restart(&mut self, then: Instant) -> Result<()> {
        let (server, name) = (self.server, &self.server.config.name);
        // Nothing touches the guest's memory before the old process has ended.
        let (how, mut stored) = self.device.process.take_over();
        let process = self.device.process.pid;
        tracing::error!("vm {name}: its device process {process} {how}; starting another one");
        self.attempts.failed(then);
        let Inner { connection, requests, negotiation, attempts, .. } = self;
        self.device = attempts.start(server, connection, requests, negotiation, &mut stored, &how)?;
        server.own.restarts.fetch_add(1, Ordering::Relaxed);
        server.succession.save(&server.own);
        tracing::info!("vm {name}: device process {} serves the guest now", self.device.process.pid);
        Ok(())
    }

    /// Passes on what was just remembered. A device process that fails meanwhile is replaced, and its
    /// successor gets it with everything else.
    fn tell(&mut self, tell: impl FnOnce(&mut Frontend, &Negotiation) -> vhost::Result<()>) -> Result<()> {
        let then = Instant::now();
        let Device { frontend, answers, .. } = &mut self.device;
        match answers.to(|| tell(frontend, &self.negotiation)) {
            Ok(()) => Ok(()),
            Err(e) if refused(&e) => Err(Error::BackendInternalError),
            Err(_) => self.restart(then),
        }
    }

    /// If queues have stopped, it was a reset: they start over. (Nothing to do if none has stopped.)
    fn was_reset(&mut self) -> Result<()> {
        if !self.negotiation.stopped {
            return Ok(());
        }
        // A guest may do so again and again.
        if let Some(not_shown) = self.resets.allow() {
            tracing::info!("vm {}: the guest was reset{not_shown}", self.server.config.name);
        }
        self.negotiation.restart();
        self.ask(|device| device.reset_device())?;
        // What the VMM has sent since the queues stopped stays valid.
        let features = self.negotiation.features;
        self.tell(|device, _| features.map_or(Ok(()), |features| device.set_features(features)))
    }

    /// Asks the device process, or its successor if it fails meanwhile.
    fn ask<T>(&mut self, ask: impl Fn(&mut Frontend) -> vhost::Result<T>) -> Result<T> {
        loop {
            let then = Instant::now();
            let Device { frontend, answers, .. } = &mut self.device;
            match answers.to(|| ask(frontend)) {
                Ok(answer) => return Ok(answer),
                Err(e) if refused(&e) => return Err(Error::BackendInternalError),
                Err(_) => self.restart(then)?,
            }
        }
    }
}

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl VhostUserBackendReqHandler for Relay<'_> {
    fn set_owner(&self) -> Result<()> {
        if std::mem::replace(&mut self.lock().negotiation.owned, true) {
            return unsupported("the device has an owner already");
        }
        Ok(())
    }

    fn reset_owner(&self) -> Result<()> {
        unsupported("RESET_OWNER: disconnect instead")
    }

    fn reset_device(&self) -> Result<()> {
        let mut inner = self.lock();
        inner.ask(|device| device.reset_device())?;
        inner.negotiation.reset();
        Ok(())
    }

    fn get_features(&self) -> Result<u64> {
        Ok(self.lock().device.features)
    }

    fn set_features(&self, features: u64) -> Result<()> {
        let mut inner = self.lock();
        inner.negotiation.features = Some(features);
        if inner.repeating {
            return Ok(());
        }
        inner.tell(|device, _| device.set_features(features))
    }

    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mut inner = self.lock();
        let files = files.into_iter().map(|file| inner.connection.kept.held_memory(file)).collect();
        inner.negotiation.set_memories(regions, files);
        inner.tell(|device, negotiation| negotiation.send_memories(device))?;
        Ok(None)
    }

    fn set_vring_num(&self, index: u32, num: u32) -> Result<()> {
        let num = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        let mut inner = self.lock();
        inner.negotiation.ring(index)?.num = Some(num);
        inner.tell(|device, _| device.set_vring_num(index as usize, num))
    }

    fn set_vring_addr(
        &self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let addresses = VringConfigData {
            queue_max_size: 0,
            queue_size: 0,
            flags: flags.bits(),
            desc_table_addr: descriptor,
            used_ring_addr: used,
            avail_ring_addr: available,
            log_addr: None,
        };
        let mut inner = self.lock();
        if !inner.negotiation.lies_there(index, &addresses)? {
            inner.was_reset()?;
        }
        inner.negotiation.ring(index)?.addresses = Some(addresses);
        inner.tell(|device, _| device.set_vring_addr(index as usize, &addresses))
    }

    fn set_vring_base(&self, index: u32, base: u32) -> Result<()> {
        // A split ring's index has 16 bits.
        let base = base as u16;
        let mut inner = self.lock();
        if !inner.negotiation.goes_on(index, base)? {
            inner.was_reset()?;
        }
        inner.negotiation.ring(index)?.base = Some(base);
        inner.tell(|device, _| device.set_vring_base(index as usize, base))
    }

    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        let mut inner = self.lock();
        inner.negotiation.ring(index)?;
        let base = inner.ask(|device| device.get_vring_base(index as usize))?;
        inner.negotiation.stop(index, base as u16)?;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&self, index: u8, file: Option<File>) -> Result<()> {
        let kick = Notifier::new(file)?;
        let mut inner = self.lock();
        let ours: Held<Notifier> = inner.connection.kept.held(kick.try_clone()?);
        inner.negotiation.ring(index.into())?.kick = Some(ours);
        inner.tell(|device, _| device.set_vring_kick(index.into(), &kick.0))
    }

    fn set_vring_call(&self, index: u8, file: Option<File>) -> Result<()> {
        let call = Notifier::new(file)?;
        let mut inner = self.lock();
        let ours: Held<Notifier> = inner.connection.kept.held(call.try_clone()?);
        inner.negotiation.ring(index.into())?.call = Some(ours);
        inner.tell(|device, _| device.set_vring_call(index.into(), &call.0))
    }

    fn set_vring_err(&self, index: u8, file: Option<File>) -> Result<()> {
        let err = Notifier::new(file)?;
        let mut inner = self.lock();
        let ours: Held<Notifier> = inner.connection.kept.held(err.try_clone()?);
        inner.negotiation.ring(index.into())?.err = Some(ours);
        inner.tell(|device, _| device.set_vring_err(index.into(), &err.0))
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(self.lock().device.protocol_features)
    }

    fn set_protocol_features(&self, features: u64) -> Result<()> {
        let mut inner = self.lock();
        let offered = inner.device.protocol_features | VhostUserProtocolFeatures::REPLY_ACK;
        if features & !offered.bits() != 0 {
            return Err(Error::InvalidParam);
        }
        inner.negotiation.protocol = Some(features);
        Ok(())
    }

    fn get_queue_num(&self) -> Result<u64> {
        Ok(QUEUE_COUNT as u64)
    }

    fn set_vring_enable(&self, index: u32, enable: bool) -> Result<()> {
        let mut inner = self.lock();
        inner.negotiation.ring(index)?.enabled = Some(enable);
        inner.tell(|device, _| device.set_vring_enable(index as usize, enable))?;
        if enable {
            let events = inner.negotiation.start(index)?;
            inner.device.notify(events);
        }
        Ok(())
    }

    fn get_config(&self, offset: u32, size: u32, flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let empty = vec![0; size as usize];
        let mut inner = self.lock();
        // A driver reads this when it starts. One that was merely stopped continues.
        inner.was_reset()?;
        inner.ask(|device| device.get_config(offset, size, flags, &empty)).map(|(_, bytes)| bytes)
    }

    fn set_config(&self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // The VMM passes on whatever the guest writes. Refusing it would cost the guest the device.
        let inner = self.lock();
        let who = format!("vm {}", inner.server.config.name);
        inner.read_only.warn(&who, "the guest wrote to the configuration space, which is read-only");
        Ok(())
    }

    fn set_gpu_socket(&self, _gpu_backend: GpuBackend) -> Result<()> {
        unsupported("GPU_SET_SOCKET")
    }

    fn get_shared_object(&self, _uuid: VhostUserSharedMsg) -> Result<File> {
        unsupported("GET_SHARED_OBJECT")
    }

    fn get_inflight_fd(&self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        unsupported("GET_INFLIGHT_FD")
    }

    fn set_inflight_fd(&self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        unsupported("SET_INFLIGHT_FD")
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        Ok(MAX_MEMORIES as u64)
    }

    fn add_mem_region(
        &self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let mut inner = self.lock();
        let file = inner.connection.kept.held_memory(file);
        inner.negotiation.add_memory(region, file)?;
        inner.tell(|device, negotiation| {
            let added = negotiation.last_memory();
            added.map_or(Ok(()), |memory| device.add_mem_region(memory).map(drop))
        })?;
        Ok(None)
    }

    fn remove_mem_region(&self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let mut inner = self.lock();
        let Some(removed) = inner.negotiation.remove_memory(region) else { return Err(Error::InvalidParam) };
        inner.tell(|device, _| device.remove_mem_region(&removed))
    }

    fn set_device_state_fd(
        &self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&self) -> Result<()> {
        unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        unsupported("GET_SHMEM_CONFIG")
    }

    fn set_log_base(&self, _log: &VhostUserLog, _file: File) -> Result<()> {
        unsupported("SET_LOG_BASE")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_never_answers_counts_however_long_it_is_waited_for() {
        let mut attempts = Attempts::new(&UnixStream::pair().unwrap().0).unwrap();
        for failed in 1..=8 {
            assert!(attempts.failures.pause().is_ok(), "after {failed} failures");
            attempts.since = Instant::now().checked_sub(2 * ANSWERS_WITHIN).unwrap();
            // It was asked as soon as it served.
            attempts.failed(attempts.since);
        }
        assert!(attempts.failures.pause().is_err());
        attempts.since = Instant::now().checked_sub(Duration::from_secs(3600)).unwrap();
        attempts.failed(Instant::now());
        assert_eq!(attempts.failures.pause(), Ok(Duration::ZERO), "one that ran for long begins a new row");
    }

    #[test]
    fn a_vmm_that_has_gone_is_seen() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!has_hung_up(&ours));
        drop(theirs);
        assert!(has_hung_up(&ours));
    }
}
