//! A fake device for the driver's tests: a vhost-user back end that follows `docs/device.md`. Inside the
//! channels it speaks its own small language (see [`layout`]), in which a guest program tells it to read and
//! write memory.
//!
//! It also checks the driver: it logs every request and records violations of the specification, such as a
//! malformed request, or pages given to two channels at the same time; see [`MockDevice::violations`].

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};
use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VhostUserDaemon, VringMutex, VringT};
use virtio_queue::{DescriptorChain, QueueOwnedT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

/// The layout of a channel of the mock; `guest-driver/tests/rgpu_selftest.h` has the same.
pub mod layout {
    /// At 0: [`MAGIC`], as the channel header.
    pub const MAGIC: u32 = 0x4b43_4f4d;
    /// The status to answer CREATE_CHANNEL with.
    pub const ANSWER: u64 = 4;
    /// Milliseconds until the answer.
    pub const ANSWER_DELAY: u64 = 8;
    /// Number of commands given, written by the program.
    pub const SUBMITTED: u64 = 64;
    /// Number of commands done, written by the device.
    pub const COMPLETED: u64 = 128;
    /// The command: `u32 op, region; u64 offset, len, seed, result; u32 error, delay_ms`.
    pub const COMMAND: u64 = 192;
    /// Instead of a region: the channel itself.
    pub const CHANNEL: u32 = u32::MAX;

    /// `result` is the FNV-1a hash of the bytes.
    pub const OP_HASH: u32 = 1;
    /// Writes [`super::pattern`] from `seed`.
    pub const OP_FILL: u32 = 2;
    /// Nothing (after `delay_ms`).
    pub const OP_NOP: u32 = 3;
    /// A WAKE without any change, then, after `delay_ms`, completion.
    pub const OP_BARE_WAKE: u32 = 4;
    /// The next region request of this channel is answered with status `seed`, after `delay_ms`.
    pub const OP_NEXT_ANSWER: u32 = 5;
    /// `result` is the number of doorbells so far.
    pub const OP_DOORBELLS: u32 = 6;
    /// Events of an unknown type and for unknown channels before completion.
    pub const OP_STRANGE_EVENTS: u32 = 7;
}

const CONTROLQ: u16 = 0;
const DOORBELLQ: u16 = 1;
const EVENTQ: u16 = 2;
const PAGE: u64 = 4096;

const REQUEST_LEN: usize = 32;
const RESPONSE_LEN: usize = 264;

const OK: u32 = 0;
const INVALID: u32 = 1;
const NO_RESOURCES: u32 = 2;
const UNSUPPORTED: u32 = 6;

const WAKE: u32 = 1;

/// `VIRTIO_F_ACCESS_PLATFORM`: addresses go through the platform's IOMMU.
pub const ACCESS_PLATFORM: u64 = 1 << 33;

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;
type Vring = VringMutex<Memory>;

/// A range of guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Address of the first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// CREATE_CHANNEL
    Create,
    /// DESTROY_CHANNEL
    Destroy,
    /// REGISTER_MEMORY
    Register,
    /// UNREGISTER_MEMORY
    Unregister,
}

/// A request, as sent by the driver.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its type.
    pub kind: Kind,
    /// Id of the channel.
    pub channel: u32,
    /// Number of the region; 0 for requests about channels.
    pub region: u32,
    /// Total bytes.
    pub size: u64,
    /// `REGISTER_MEMORY` with bit 0: the device only reads.
    pub flags: u32,
    /// The memory.
    pub extents: Vec<Extent>,
}

/// The configuration space, and how the mock behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// The magic; 0x55504772 is right.
    pub magic: u32,
    /// The version; 1 is right.
    pub version: u32,
    /// Maximum concurrent channels.
    pub max_channels: u32,
    /// Maximum extents in a request.
    pub max_extents: u32,
    /// Maximum bytes of a channel.
    pub max_channel_size: u64,
    /// Maximum bytes registered by a channel; 0 means no limit.
    pub max_registered: u64,
    /// Programs register one channel's memory with another channel, so a channel's pages in a region are not
    /// a violation.
    pub channels_in_regions: bool,
    /// Virtio features to offer beyond the device's own.
    pub features: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            magic: 0x5550_4772,
            version: 1,
            max_channels: 256,
            max_extents: 1 << 20,
            max_channel_size: 256 << 20,
            max_registered: 0,
            channels_in_regions: false,
            features: 0,
        }
    }
}

impl Config {
    fn bytes(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        for (at, word) in [self.magic, self.version, self.max_channels, self.max_extents].iter().enumerate() {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[16..24].copy_from_slice(&self.max_channel_size.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.max_registered.to_le_bytes());
        bytes
    }
}

/// The byte at `index` of what [`layout::OP_FILL`] writes with `seed`.
pub fn pattern(seed: u64, index: u64) -> u8 {
    (seed.wrapping_add(index).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

#[derive(Default)]
struct Channel {
    extents: Vec<Extent>,
    regions: BTreeMap<u32, (Vec<Extent>, bool)>,
    handled: u32,
    wake_pending: bool,
    next_answer: Option<(u32, Duration)>,
}

#[derive(Default)]
struct State {
    channels: BTreeMap<u32, Channel>,
    requests: Vec<Request>,
    violations: Vec<String>,
    doorbells: u64,
    resets: u64,
    held: Option<Kind>,
    /// How many of the next DESTROY_CHANNELs are refused.
    refused_destroys: usize,
    /// How often the queues have been started. An answer from before the last start is dropped.
    epoch: u64,
    vrings: Vec<Vring>,
}

struct Shared {
    config: Config,
    memory: RwLock<Option<Memory>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// The device, serving its socket until dropped.
pub struct MockDevice {
    socket: PathBuf,
    shared: Arc<Shared>,
}

impl MockDevice {
    /// Listens on `socket` and serves one QEMU after the other.
    pub fn start(socket: impl Into<PathBuf>, config: Config) -> Result<Self> {
        let socket = socket.into();
        let shared = Arc::new(Shared {
            config,
            memory: RwLock::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut listener =
            Listener::new(&socket, true).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            while let Err(e) = serve(&serving, &mut listener) {
                serving.violate(format!("vhost-user: {e:#}"));
            }
        });
        Ok(Self { socket, shared })
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.state().requests.clone()
    }

    /// The number of requests of a kind so far.
    pub fn count(&self, kind: Kind) -> usize {
        self.shared.state().requests.iter().filter(|r| r.kind == kind).count()
    }

    /// Ids of the open channels.
    pub fn channels(&self) -> Vec<u32> {
        self.shared.state().channels.keys().copied().collect()
    }

    /// Registered regions of all channels.
    pub fn regions(&self) -> usize {
        self.shared.state().channels.values().map(|c| c.regions.len()).sum()
    }

    /// Doorbells so far.
    pub fn doorbells(&self) -> u64 {
        self.shared.state().doorbells
    }

    /// Resets of the device so far.
    pub fn resets(&self) -> u64 {
        self.shared.state().resets
    }

    /// The driver's violations of the specification.
    pub fn violations(&self) -> Vec<String> {
        self.shared.state().violations.clone()
    }

    /// Holds back answers to requests of this type only, until [`MockDevice::release`].
    pub fn hold(&self, kind: Kind) {
        self.shared.state().held = Some(kind);
        self.shared.changed.notify_all();
    }

    /// Sends the answers that were held back.
    pub fn release(&self) {
        self.shared.state().held = None;
        self.shared.changed.notify_all();
    }

    /// Refuses so many of the next DESTROY_CHANNELs.
    pub fn refuse_destroys(&self, count: usize) {
        self.shared.state().refused_destroys = count;
    }

    /// Waits until `condition` holds. An error after `timeout`.
    pub fn wait_until(&self, what: &str, timeout: Duration, condition: impl Fn(&Self) -> bool) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while !condition(self) {
            anyhow::ensure!(Instant::now() < deadline, "not within {timeout:?}: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// Serves one connection to its end.
fn serve(shared: &Arc<Shared>, listener: &mut Listener) -> Result<()> {
    loop {
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
        *shared.memory.write().unwrap_or_else(PoisonError::into_inner) = Some(memory.clone());
        let exit = new_event_consumer_and_notifier(EventFlag::NONBLOCK).context("eventfd")?;
        let backend = Arc::new(Backend { shared: Arc::clone(shared), exit: Mutex::new(Some(exit)) });
        let mut daemon = VhostUserDaemon::new("mock-rgpu".into(), backend, memory)
            .map_err(|e| anyhow::anyhow!("cannot make the daemon: {e}"))?;
        daemon.start(listener).map_err(|e| anyhow::anyhow!("cannot accept: {e}"))?;
        // A killed QEMU may disconnect in the middle of a message.
        let _ = daemon.wait();
        for handler in daemon.get_epoll_handlers() {
            handler.send_exit_event();
        }
        shared.reset();
        shared.state().vrings.clear();
    }
}

/// Where the answer to a request goes.
struct Answer {
    vring: Vring,
    head: u16,
    room: Vec<Extent>,
}

struct Backend {
    shared: Arc<Shared>,
    exit: Mutex<Option<(EventConsumer, EventNotifier)>>,
}

impl VhostUserBackend for Backend {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        3
    }

    fn max_queue_size(&self) -> usize {
        256
    }

    fn features(&self) -> u64 {
        const VERSION_1: u64 = 1 << 32;
        const INDIRECT_DESC: u64 = 1 << 28;
        const EVENT_IDX: u64 = 1 << 29;
        let usual = VERSION_1 | INDIRECT_DESC | EVENT_IDX | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        usual | self.shared.config.features
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        let usual = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        // QEMU does not start with ACCESS_PLATFORM without these.
        let for_iommu = VhostUserProtocolFeatures::BACKEND_REQ | VhostUserProtocolFeatures::REPLY_ACK;
        if self.shared.config.features & ACCESS_PLATFORM == 0 { usual } else { usual | for_iommu }
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = self.shared.config.bytes().to_vec();
        bytes.drain(..(offset as usize).min(64));
        bytes.resize(size as usize, 0);
        bytes
    }

    fn update_memory(&self, _memory: Memory) -> io::Result<()> {
        Ok(())
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        self.exit.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        if queue == u32::from(CONTROLQ) {
            self.shared.reset();
        }
        Ok(())
    }

    fn handle_event(&self, queue: u16, _: EventSet, vrings: &[Vring], _thread: usize) -> io::Result<()> {
        let mut state = self.shared.state();
        if state.vrings.is_empty() {
            state.vrings = vrings.to_vec();
        }
        match queue {
            CONTROLQ => {
                drop(state);
                self.shared.handle_requests(&vrings[usize::from(CONTROLQ)]);
            }
            DOORBELLQ => {
                state.doorbells += 1;
                drop(state);
                self.shared.handle_commands();
            }
            EVENTQ => {
                let pending: Vec<u32> =
                    state.channels.iter().filter(|(_, c)| c.wake_pending).map(|(id, _)| *id).collect();
                drop(state);
                for id in pending {
                    self.shared.wake(id);
                }
            }
            other => self.shared.violate(format!("an event of queue {other}")),
        }
        Ok(())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn violate(&self, what: String) {
        self.state().violations.push(what);
    }

    fn memory(&self) -> Arc<GuestMemoryMmap> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        memory.as_ref().map(|m| m.memory().into_inner()).unwrap_or_default()
    }

    fn reset(&self) {
        let mut state = self.state();
        state.channels.clear();
        state.resets += 1;
        state.epoch += 1;
        drop(state);
        self.changed.notify_all();
    }

    fn handle_requests(self: &Arc<Self>, vring: &Vring) {
        let memory = self.memory();
        loop {
            let _ = vring.disable_notification();
            loop {
                let chain = next_chain(vring, &memory);
                let Some(chain) = chain else { break };
                let head = chain.head_index();
                let mut bytes = Vec::new();
                let read = chain.clone().reader(&memory).map(|mut r| r.read_to_end(&mut bytes));
                if !matches!(read, Ok(Ok(_))) {
                    self.violate("a request that cannot be read".into());
                }
                let room: Vec<Extent> =
                    chain.writable().map(|d| Extent { addr: d.addr().0, len: d.len().into() }).collect();
                if room.iter().map(|e| e.len).sum::<u64>() != RESPONSE_LEN as u64 {
                    self.violate(format!("room for a response: {room:?}"));
                }
                self.handle_request(&memory, &bytes, Answer { vring: vring.clone(), head, room });
            }
            if !vring.enable_notification().unwrap_or(false) {
                return;
            }
        }
    }

    /// Handles one request. Uses a thread if the answer is delayed.
    fn handle_request(self: &Arc<Self>, memory: &Arc<GuestMemoryMmap>, bytes: &[u8], answer: Answer) {
        let request = match parse(bytes) {
            Ok(request) => request,
            Err((status, why)) => {
                self.violate(why.clone());
                let epoch = self.state().epoch;
                return self.answer(&answer, epoch, status, &why);
            }
        };
        let mut state = self.state();
        state.requests.push(request.clone());
        let epoch = state.epoch;
        let mut delay = Duration::ZERO;
        let mut wanted = None;
        match request.kind {
            Kind::Create => {
                let word =
                    |at| resolve(&request.extents, at, 4).and_then(|e| load(memory, e[0].addr)).unwrap_or(0);
                delay = Duration::from_millis(word(layout::ANSWER_DELAY).into());
                wanted = Some(word(layout::ANSWER));
                if word(0) != layout::MAGIC {
                    wanted = Some(INVALID);
                }
            }
            Kind::Register | Kind::Unregister => {
                if let Some(next) =
                    state.channels.get_mut(&request.channel).and_then(|c| c.next_answer.take())
                {
                    (wanted, delay) = (Some(next.0), next.1);
                }
            }
            Kind::Destroy => {
                if let Some(left) = state.refused_destroys.checked_sub(1) {
                    state.refused_destroys = left;
                    wanted = Some(NO_RESOURCES);
                }
            }
        }
        let held = state.held == Some(request.kind);
        drop(state);
        let shared = Arc::clone(self);
        let finish = move || {
            std::thread::sleep(delay);
            let mut state = shared.state();
            while state.held == Some(request.kind) && state.epoch == epoch {
                state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.epoch != epoch {
                return;
            }
            let (status, reason) = match wanted {
                Some(status) if status != OK => (status, format!("the test wants status {status}")),
                _ => state.apply(&request, shared.config.channels_in_regions),
            };
            drop(state);
            shared.answer(&answer, epoch, status, &reason);
        };
        if held || !delay.is_zero() {
            std::thread::spawn(finish);
        } else {
            finish();
        }
    }

    fn answer(&self, answer: &Answer, epoch: u64, status: u32, reason: &str) {
        let mut response = [0u8; RESPONSE_LEN];
        response[..4].copy_from_slice(&status.to_le_bytes());
        let reason = &reason.as_bytes()[..reason.len().min(255)];
        response[8..8 + reason.len()].copy_from_slice(reason);
        let memory = self.memory();
        // Under the state's lock, so that no reset happens in between.
        let state = self.state();
        if state.epoch == epoch {
            copy_in(&memory, &answer.room, 0, &response);
            self.used(&answer.vring, answer.head, RESPONSE_LEN as u32);
        }
    }

    fn used(&self, vring: &Vring, head: u16, len: u32) {
        if vring.add_used(head, len).is_ok() && vring.needs_notification().unwrap_or(true) {
            let _ = vring.signal_used_queue();
        }
    }

    /// Sends a WAKE, or keeps it until there is a buffer.
    fn wake(&self, id: u32) {
        let sent = self.event(WAKE, id);
        if let Some(channel) = self.state().channels.get_mut(&id) {
            channel.wake_pending = !sent;
        }
    }

    /// Sends an event, if there is a buffer for it.
    fn event(&self, kind: u32, channel: u32) -> bool {
        let Some(vring) = self.state().vrings.get(usize::from(EVENTQ)).cloned() else { return false };
        let memory = self.memory();
        let chain = next_chain(&vring, &memory);
        let Some(chain) = chain else { return false };
        let head = chain.head_index();
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend_from_slice(&channel.to_le_bytes());
        match chain.writer(&memory).map(|mut w| w.write_all(&bytes)) {
            Ok(Ok(())) => self.used(&vring, head, 8),
            _ => self.violate("an event buffer that does not have 8 bytes".into()),
        }
        let _ = vring.enable_notification();
        true
    }

    /// Checks every channel for a command.
    fn handle_commands(self: &Arc<Self>) {
        let memory = self.memory();
        let mut due = Vec::new();
        for (id, channel) in &mut self.state().channels {
            let Some(submitted) = word(&memory, &channel.extents, layout::SUBMITTED) else { continue };
            if submitted != channel.handled {
                channel.handled = submitted;
                due.push((*id, submitted));
            }
        }
        for (id, submitted) in due {
            let delay = {
                let state = self.state();
                let extents = state.channels.get(&id).map(|c| c.extents.clone()).unwrap_or_default();
                word(&memory, &extents, layout::COMMAND + 44).unwrap_or(0)
            };
            let (shared, memory) = (Arc::clone(self), Arc::clone(&memory));
            let work = move |delay: u32| {
                shared.handle_command(&memory, id, submitted, delay);
            };
            if delay == 0 {
                work(0);
            } else {
                std::thread::spawn(move || work(delay));
            }
        }
    }

    fn handle_command(&self, memory: &GuestMemoryMmap, id: u32, submitted: u32, delay: u32) {
        let delay = Duration::from_millis(delay.into());
        let bare_wake = {
            let state = self.state();
            let extents = state.channels.get(&id).map(|c| c.extents.clone()).unwrap_or_default();
            word(memory, &extents, layout::COMMAND) == Some(layout::OP_BARE_WAKE)
        };
        if bare_wake {
            self.wake(id);
        }
        std::thread::sleep(delay);
        let mut state = self.state();
        let doorbells = state.doorbells;
        // The channel is gone, so the device may no longer use its memory.
        let Some(channel) = state.channels.get_mut(&id) else { return };
        let mut command = [0u8; 48];
        let mut strange = false;
        copy_out(memory, &channel.extents, layout::COMMAND, &mut command);
        let u32_at =
            |at: usize| u32::from_le_bytes([command[at], command[at + 1], command[at + 2], command[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let (op, region, offset, len, seed) = (u32_at(0), u32_at(4), u64_at(8), u64_at(16), u64_at(24));
        let (mut result, mut error) = (0u64, 0u32);
        let target = match region {
            layout::CHANNEL => Some((channel.extents.clone(), false)),
            number => channel.regions.get(&number).cloned(),
        };
        match (op, target) {
            (layout::OP_HASH, Some((extents, _))) => match resolve(&extents, offset, len) {
                Some(parts) => result = hash(memory, &parts),
                None => error = 1,
            },
            (layout::OP_FILL, Some((extents, false))) => match resolve(&extents, offset, len) {
                Some(parts) => fill(memory, &parts, seed),
                None => error = 1,
            },
            (layout::OP_NEXT_ANSWER, _) => channel.next_answer = Some((seed as u32, delay)),
            (layout::OP_DOORBELLS, _) => result = doorbells,
            (layout::OP_NOP | layout::OP_BARE_WAKE, _) => {}
            (layout::OP_STRANGE_EVENTS, _) => strange = true,
            _ => error = 2,
        }
        let extents = channel.extents.clone();
        copy_in(memory, &extents, layout::COMMAND + 32, &result.to_le_bytes());
        copy_in(memory, &extents, layout::COMMAND + 40, &error.to_le_bytes());
        if let Some(parts) = resolve(&extents, layout::COMPLETED, 4) {
            let _ = memory.store(submitted, GuestAddress(parts[0].addr), Ordering::Release);
        }
        drop(state);
        if strange {
            self.event(0xdead, id);
            self.event(WAKE, id ^ 0x55);
            self.event(WAKE, u32::MAX);
        }
        self.wake(id);
    }
}

impl State {
    /// Executes a request.
    fn apply(&mut self, request: &Request, channels_in_regions: bool) -> (u32, String) {
        let no = |why: &str| (INVALID, why.to_owned());
        match request.kind {
            Kind::Create => {
                if self.channels.contains_key(&request.channel) {
                    self.violations.push(format!("channel {} is made twice", request.channel));
                    return no("the id is in use");
                }
                for (id, other) in &self.channels {
                    let regions = other.regions.values().filter(|_| !channels_in_regions);
                    let theirs = other.extents.iter().chain(regions.flat_map(|(e, _)| e));
                    if theirs.clone().any(|t| request.extents.iter().any(|m| share_a_page(t, m))) {
                        self.violations
                            .push(format!("channel {} is given pages of channel {id}", request.channel));
                    }
                }
                let channel = Channel { extents: request.extents.clone(), ..Channel::default() };
                self.channels.insert(request.channel, channel);
            }
            Kind::Destroy => {
                if self.channels.remove(&request.channel).is_none() {
                    self.violations.push(format!("channel {} is destroyed but not there", request.channel));
                    return no("no such channel");
                }
            }
            Kind::Register => {
                let region = (request.extents.clone(), request.flags & 1 != 0);
                let Some(channel) = self.channels.get_mut(&request.channel) else {
                    return no("no such channel");
                };
                if channel.regions.insert(request.region, region).is_some() {
                    self.violations.push(format!("region {} is registered twice", request.region));
                }
            }
            Kind::Unregister => {
                let Some(channel) = self.channels.get_mut(&request.channel) else {
                    return no("no such channel");
                };
                if channel.regions.remove(&request.region).is_none() {
                    self.violations.push(format!("region {} is unregistered but not there", request.region));
                    return no("no such region");
                }
            }
        }
        (OK, String::new())
    }
}

/// Parses a request and checks it against the specification.
fn parse(bytes: &[u8]) -> Result<Request, (u32, String)> {
    let invalid = |why: String| Err((INVALID, why));
    if bytes.len() < REQUEST_LEN {
        return invalid(format!("a request of {} bytes", bytes.len()));
    }
    let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let kind = match u32_at(0) {
        1 => Kind::Create,
        2 => Kind::Destroy,
        3 => Kind::Register,
        4 => Kind::Unregister,
        other => return Err((UNSUPPORTED, format!("a request of type {other}"))),
    };
    let count = u32_at(12) as usize;
    if bytes.len() != REQUEST_LEN + 16 * count {
        return invalid(format!("{} bytes for {count} extents", bytes.len()));
    }
    let extents: Vec<Extent> = (0..count)
        .map(|i| Extent { addr: u64_at(REQUEST_LEN + 16 * i), len: u64_at(REQUEST_LEN + 16 * i + 8) })
        .collect();
    let request =
        Request { kind, channel: u32_at(4), region: u32_at(8), size: u64_at(16), flags: u32_at(24), extents };
    let sum: u64 = request.extents.iter().map(|e| e.len).sum();
    if sum != request.size || request.extents.iter().any(|e| e.len == 0) {
        return invalid(format!("extents of {sum} bytes for size {}", request.size));
    }
    if u32_at(28) != 0 || (request.flags != 0 && kind != Kind::Register) || request.flags > 1 {
        return invalid(format!("flags {:#x}, reserved {:#x}", request.flags, u32_at(28)));
    }
    let memory = matches!(kind, Kind::Create | Kind::Register);
    if memory != (count > 0) {
        return invalid(format!("{kind:?} with {count} extents"));
    }
    if kind == Kind::Create && request.extents.iter().any(|e| e.addr % PAGE != 0 || e.len % PAGE != 0) {
        return invalid("a channel of parts of pages".into());
    }
    let last = request.extents.len().saturating_sub(1);
    let whole = |(i, e): (usize, &Extent)| {
        (i == 0 || e.addr % PAGE == 0) && (i == last || (e.addr + e.len) % PAGE == 0)
    };
    if !request.extents.iter().enumerate().all(whole) {
        return invalid("parts of pages in the middle of a region".into());
    }
    Ok(request)
}

/// Takes the next chain that the driver has made available.
fn next_chain(vring: &Vring, memory: &Arc<GuestMemoryMmap>) -> Option<DescriptorChain<Arc<GuestMemoryMmap>>> {
    vring.get_mut().get_queue_mut().iter(Arc::clone(memory)).ok()?.next()
}

fn share_a_page(a: &Extent, b: &Extent) -> bool {
    let pages = |e: &Extent| (e.addr / PAGE, (e.addr + e.len - 1) / PAGE);
    let ((a0, a1), (b0, b1)) = (pages(a), pages(b));
    a0 <= b1 && b0 <= a1
}

/// The parts of `[offset, offset + len)` of the extents taken together; `None` if they are not that long.
fn resolve(extents: &[Extent], mut offset: u64, mut len: u64) -> Option<Vec<Extent>> {
    let mut parts = Vec::new();
    for extent in extents {
        if len == 0 {
            break;
        }
        if offset >= extent.len {
            offset -= extent.len;
            continue;
        }
        let take = len.min(extent.len - offset);
        parts.push(Extent { addr: extent.addr + offset, len: take });
        offset = 0;
        len -= take;
    }
    (len == 0 && !parts.is_empty()).then_some(parts)
}

fn load(memory: &GuestMemoryMmap, addr: u64) -> Option<u32> {
    memory.load(GuestAddress(addr), Ordering::Acquire).ok()
}

fn word(memory: &GuestMemoryMmap, extents: &[Extent], offset: u64) -> Option<u32> {
    load(memory, resolve(extents, offset, 4)?.first()?.addr)
}

fn copy_out(memory: &GuestMemoryMmap, extents: &[Extent], offset: u64, to: &mut [u8]) {
    let mut at = 0;
    for part in resolve(extents, offset, to.len() as u64).unwrap_or_default() {
        let end = at + part.len as usize;
        let _ = memory.read_slice(&mut to[at..end], GuestAddress(part.addr));
        at = end;
    }
}

fn copy_in(memory: &GuestMemoryMmap, extents: &[Extent], offset: u64, from: &[u8]) {
    let mut at = 0;
    for part in resolve(extents, offset, from.len() as u64).unwrap_or_default() {
        let end = at + part.len as usize;
        let _ = memory.write_slice(&from[at..end], GuestAddress(part.addr));
        at = end;
    }
}

fn hash(memory: &GuestMemoryMmap, parts: &[Extent]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for part in parts {
        let mut bytes = vec![0; part.len as usize];
        let _ = memory.read_slice(&mut bytes, GuestAddress(part.addr));
        for byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    hash
}

fn fill(memory: &GuestMemoryMmap, parts: &[Extent], seed: u64) {
    let mut index = 0;
    for part in parts {
        let bytes: Vec<u8> = (index..index + part.len).map(|i| pattern(seed, i)).collect();
        let _ = memory.write_slice(&bytes, GuestAddress(part.addr));
        index += part.len;
    }
}
