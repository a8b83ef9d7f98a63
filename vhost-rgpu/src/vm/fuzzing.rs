//! A guest that does anything with its device, driven by a fuzzer: requests and descriptor chains of any
//! kind, memory that changes at any time, doorbells, stops and resets.
//!
//! [`control_any`] drives a [`Device`] as the threads of `vhost-user-backend` do. The device's server is a
//! thread of this process that welcomes sessions, refuses them or is gone. In the end the device is reset,
//! and then nothing may be left of what the guest had: no job, channel, session or charge.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host_bridge::bridge::{CacheUse, Connector, Security, SessionConfig, TransportKind};
use host_bridge::framing::Address;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::uio::pwrite;
use protocol::channel::{Geometry, HEADER_SIZE, MAX_RECORD, PROGRESS_SIZE, SLOT_SIZE};
use protocol::device::{Answer, CONTROL_QUEUE, EVENT_QUEUE, Extent, Request, request, text};
use protocol::fuzzing::Steps;
use protocol::link::{Hello, MAGIC, Welcome};
use protocol::version::OURS;
use vhost_user_backend::{VhostUserBackend, VringT};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use zerocopy::{FromZeros, IntoBytes};

use super::device::{Device, Predecessor};
use super::queue::{GuestMemory, QUEUE_SIZE, Vring};
use super::recovery::{REQUESTS_SIZE, Requests, Store};
use crate::config::{Limits, Vm};
use crate::link::{Control, pair};
use crate::registry::Registry;
use crate::servers::Servers;
#[cfg(test)]
use {
    super::recovery::Known,
    crate::stage::Stage,
    host_bridge::bridge::{ChannelMemory, Prepared, Turn},
    host_bridge::memory::Memories,
    nix::poll::PollFd,
    protocol::link::Memory,
    std::collections::BTreeMap,
};

/// Steps of one program.
const STEPS: usize = 120;
/// How long anything may take that ends by itself.
const PATIENCE: Duration = Duration::from_secs(120);
/// Guest memory: queues at its beginning, then buffers, then channels.
const RAM: u64 = 2 << 20;
const QUEUE: u16 = 16;
const TABLES: [u64; 2] = [0x1000, 0x4000];
const BUFFERS: u64 = 0x8000;
const CHANNELS: [u64; 2] = [0x4_0000, 0x10_0000];
const LIMITS: Limits = Limits {
    max_channels: 4,
    max_extents: 16,
    max_channel_size: 1 << 20,
    max_registered: 1 << 20,
    max_registered_extents: 24,
};

/// How the server greets: it welcomes, refuses, lets wait, talks nonsense, or hangs up.
static MOOD: AtomicU8 = AtomicU8::new(0);
/// Programs share the server, and so run one after the other.
static ONE: Mutex<()> = Mutex::new(());

/// Connections that the server has welcomed.
#[derive(Debug, Default)]
struct Fake(Mutex<Vec<UnixStream>>);

impl Fake {
    fn connections(&self) -> MutexGuard<'_, Vec<UnixStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static SERVER: LazyLock<Arc<Fake>> = LazyLock::new(Arc::default);

impl Connector for Fake {
    /// The server's end answers the hello as soon as that is there.
    fn connect(&self, _timeout: Duration) -> io::Result<OwnedFd> {
        if MOOD.load(Ordering::Relaxed) % 8 == 7 {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = UnixStream::pair()?;
        std::thread::Builder::new().name("server".into()).spawn(move || greet(theirs))?;
        Ok(ours.into())
    }
}

fn greet(mut stream: UnixStream) {
    let mut hello = Hello::new_zeroed();
    if stream.read_exact(hello.as_mut_bytes()).is_err() {
        return;
    }
    let answer = match MOOD.load(Ordering::Relaxed) % 8 {
        4 => Answer::Denied,
        5 => return drop(stream.write_all(&[0x5a; size_of::<Welcome>()])),
        6 => return,
        _ => Answer::Ok,
    };
    let mut welcome = Welcome::new_zeroed();
    welcome.magic = MAGIC;
    (welcome.version, welcome.fingerprint) = (OURS.version(), OURS.fingerprint());
    (welcome.status, welcome.token, welcome.data_connections) = (answer as u32, [1; 16], 1);
    welcome.reason = text(if answer == Answer::Ok { "" } else { "not today" });
    if stream.write_all(welcome.as_bytes()).is_ok() {
        SERVER.connections().push(stream);
    }
}

/// A keeper that forgets everything at once.
static KEEPER: LazyLock<Arc<Control>> = LazyLock::new(|| {
    let (ours, theirs) = pair().expect("a socket");
    std::thread::spawn(move || {
        while ours.next_from_device().is_ok_and(|message| message.is_some()) && ours.consume().is_ok() {}
    });
    Arc::new(theirs.into())
});

fn file(size: u64) -> OwnedFd {
    let file = memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC).expect("a file");
    nix::unistd::ftruncate(&file, size as i64).expect("its size");
    file
}

thread_local! {
    static RAM_FILE: OwnedFd = file(RAM);
    static REQUESTS_FILE: OwnedFd = file(REQUESTS_SIZE);
}

fn config() -> Vm {
    let server = Arc::clone(&SERVER);
    let session = SessionConfig {
        connector: Some(server),
        transport: TransportKind::Tcp,
        security: Security::Insecure,
        poll: Duration::ZERO,
        data_connections: 1,
        io_threads: false,
        cache: CacheUse::Never,
        max_registered: LIMITS.max_registered,
        max_regions: 8,
        again_within: [Duration::ZERO; 2],
        ..SessionConfig::new(Address::Unix(PathBuf::from("/fuzz")), "fuzz")
    };
    let servers = Servers::new(session, Vec::new(), Vec::new());
    Vm { name: "fuzz".into(), socket: PathBuf::from("/fuzz"), access: 0o660.into(), servers, limits: LIMITS }
}

/// The smallest channel that there can be.
fn geometry() -> Geometry {
    let (ring_offset, ring_size, slot_count) = (HEADER_SIZE, 4 * MAX_RECORD, 2);
    let slots_offset = ring_offset + ring_size;
    let progress_offset = (slots_offset + slot_count * SLOT_SIZE).next_multiple_of(4096);
    let arena_offset = progress_offset + PROGRESS_SIZE;
    let (size, arena_size) = (arena_offset + 4096, 4096);
    Geometry {
        size,
        ring_offset,
        ring_size,
        slots_offset,
        slot_count,
        progress_offset,
        arena_offset,
        arena_size,
    }
}

struct Guest<'f> {
    ram: &'f OwnedFd,
    device: Arc<Device>,
    queues: Vec<Vring>,
    /// Chains that the guest has made available, by queue.
    made: [u16; 2],
    buffers: u64,
}

/// Runs a program, whatever it is. Gives how many sessions it opened.
pub fn control_any(bytes: &[u8]) -> u64 {
    let mut steps = Steps::new(bytes);
    with_guest(|guest| {
        for _ in 0..STEPS {
            if steps.is_over() {
                break;
            }
            guest.step(&mut steps);
        }
    })
}

/// Runs a guest, and then resets its device, of which nothing may be left. Gives how many sessions it opened.
fn with_guest(run: impl FnOnce(&mut Guest<'_>)) -> u64 {
    with_guest_after(|_| None, run)
}

/// The same with what `before` makes a predecessor leave, given guest memory.
fn with_guest_after(
    before: impl FnOnce(&OwnedFd) -> Option<Predecessor>,
    run: impl FnOnce(&mut Guest<'_>),
) -> u64 {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    MOOD.store(0, Ordering::Relaxed);
    RAM_FILE.with(|ram| {
        let holes = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(ram, holes, 0, RAM as i64).expect("empty memory");
        let offset = FileOffset::new(File::from(ram.try_clone().expect("a descriptor")), 0);
        let ranges = [(GuestAddress(0), RAM as usize, Some(offset))];
        let memory = GuestMemory::new(GuestMemoryMmap::from_ranges_with_files(ranges).expect("guest memory"));
        let requests = REQUESTS_FILE.with(|file| Requests::map(file).expect("the requests"));
        requests.reset();
        let registry = Arc::new(Registry::new());
        let store = Store::new(Arc::clone(&KEEPER));
        let predecessor = before(ram);
        let device =
            Device::new(config(), Arc::clone(&registry), memory.clone(), store, requests, predecessor)
                .expect("a device");
        device.update_memory(memory.clone()).expect("its memory");
        let queues = TABLES.iter().map(|table| queue(&memory, *table)).collect();
        let mut guest = Guest { ram, device, queues, made: [0; 2], buffers: BUFFERS };
        run(&mut guest);
        guest.device.end_all("the program is over");
        guest.wait_until(Device::is_empty);
        SERVER.connections().clear();
        registry.totals.opened.load(Ordering::Relaxed)
    })
}

/// A device that was reset once, and on which channel 0 was opened since, with the channel's memory.
#[cfg(test)]
pub(super) fn with_channel_after_reset(run: impl FnOnce(&Device, Extent)) {
    let opened = with_guest(|guest| {
        guest.device.end_all("the guest starts again");
        let geometry = geometry();
        guest.write(CHANNELS[0], geometry.fields(1, "fuzz").as_bytes());
        let extent = Extent { addr: CHANNELS[0], len: geometry.size as u64 };
        let create = Request {
            kind: request::CREATE_CHANNEL,
            channel: 0,
            region: 0,
            extent_count: 1,
            size: extent.len,
            flags: 0,
            reserved: 0,
        };
        let bytes = [create.as_bytes(), extent.as_bytes()].concat();
        let (at, answer) = (guest.buffer(&bytes), guest.buffer(&[0; 264]));
        guest.chain(0, &[Descriptor::new(at, bytes.len() as u32, 0, 0), Descriptor::new(answer, 264, 2, 0)]);
        guest.event(0, 0);
        guest.wait_until(Device::is_settled);
        run(&guest.device, extent);
    });
    assert_eq!(opened, 1, "sessions");
}

/// Tells nobody that it waits.
#[cfg(test)]
struct Patient;

#[cfg(test)]
impl Turn for Patient {
    fn wait(&mut self, _server: &str, _ahead: u32) {}

    fn given_up(&self) -> Option<PollFd<'_>> {
        None
    }
}

/// A device that takes over channel 0, whose program waits for its session: it has begun, and the predecessor
/// ended before it told the program. Gives how many sessions were opened since.
#[cfg(test)]
pub(super) fn with_session_that_had_begun(run: impl FnOnce(&Device)) -> u64 {
    let before = |ram: &OwnedFd| {
        let geometry = geometry();
        let extent = Extent { addr: CHANNELS[0], len: geometry.size as u64 };
        let fields = geometry.fields(1, "fuzz");
        pwrite(ram, fields.as_bytes(), extent.addr as i64).expect("a header");
        let (all, ram) =
            (Memory { addr: 0, size: RAM, file_offset: 0 }, ram.try_clone().expect("a descriptor"));
        let memories = Memories::map(vec![(all, ram)]).expect("guest memory");
        let channel = ChannelMemory::new(memories, vec![extent], extent.len).expect("a channel");
        channel.tell_waiting("fuzz", 0);
        let (server, config) = config().servers.choose(&channel).expect("its server");
        let mut prepared = Prepared::connect(&config, &channel, &mut Patient).expect("a session");
        let saved = prepared.save(&channel).expect("what is saved of it");
        let stage = Stage::Began(saved.as_ref());
        let known = Known::new((server, &config), &channel.extents, stage).expect("what is stored");
        let stored = BTreeMap::from([(0, known.into_stored())]);
        Some(Predecessor { how: "has ended".into(), stored })
    };
    with_guest_after(before, |guest| {
        guest.event(0, 0);
        run(&guest.device);
    })
}

fn queue(memory: &GuestMemory, table: u64) -> Vring {
    let vring = Vring::new(memory.clone(), QUEUE_SIZE as u16).expect("a queue");
    vring.set_queue_size(QUEUE);
    vring.set_queue_info(table, table + 0x1000, table + 0x2000).expect("its place");
    vring.set_queue_ready(true);
    vring.set_enabled(true);
    vring
}

impl Guest<'_> {
    fn write(&self, at: u64, bytes: &[u8]) {
        let at = at.min(RAM);
        let n = bytes.len().min((RAM - at) as usize);
        assert_eq!(pwrite(self.ram, &bytes[..n], at as i64), Ok(n));
    }

    fn step(&mut self, steps: &mut Steps<'_>) {
        match steps.below(20) {
            0..=7 => self.request(steps),
            8..=11 => self.event(0, 0),
            12 => self.event(1, 0),
            13 => {
                // Buffers for events, and the event queue's own event.
                let buffer = self.buffer(&[0; 16]);
                self.chain(1, &[Descriptor::new(buffer, steps.byte().into(), 2, 0)]);
                self.event(0, 1);
            }
            14 => {
                let bytes = steps.bytes();
                self.write(steps.number() % RAM, bytes);
            }
            15 => {
                // A descriptor, or an entry of a ring.
                let entry = Descriptor::new(
                    self.address(steps),
                    steps.number() as u32,
                    steps.u16() & 7,
                    steps.u16() % 32,
                );
                let at = u64::from(steps.byte() % 32) * 16;
                self.write(TABLES[steps.below(2)] + at, as_bytes(entry).as_slice());
            }
            16 => match steps.below(4) {
                0 => drop(self.device.stop_vring(CONTROL_QUEUE.into())),
                1 => drop(self.device.stop_vring(EVENT_QUEUE.into())),
                2 => self.device.reset_device(),
                _ => self.queues[0].set_queue_ready(steps.byte() & 1 == 0),
            },
            17 => MOOD.store(steps.byte(), Ordering::Relaxed),
            18 => SERVER.connections().clear(),
            _ => match steps.byte() {
                // Much happens meanwhile, or little; or all that the guest has asked for, however busy the
                // machine is.
                few @ ..192 => (0..few).for_each(|_| std::thread::yield_now()),
                _ => self.wait_until(Device::is_settled),
            },
        }
    }

    fn wait_until(&self, condition: fn(&Device) -> bool) {
        let since = Instant::now();
        while !condition(&self.device) {
            assert!(
                since.elapsed() < PATIENCE,
                "something of the guest is left: {}",
                self.device.leftovers()
            );
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn event(&self, thread: usize, event: u16) {
        let vrings = if thread == 0 { &self.queues[..] } else { &[] };
        self.device.handle_event(event, EventSet::IN, vrings, thread).expect("an event ends no thread");
    }

    /// An address: of something, or any.
    fn address(&self, steps: &mut Steps<'_>) -> u64 {
        match steps.byte() {
            0..64 => BUFFERS + u64::from(steps.byte()) * 16,
            64..160 => CHANNELS[steps.below(2)] + u64::from(steps.byte() % 100) * 4096,
            160..200 => RAM - u64::from(steps.byte()),
            _ => steps.number(),
        }
    }

    /// Puts bytes into a buffer.
    fn buffer(&mut self, bytes: &[u8]) -> u64 {
        if self.buffers + bytes.len() as u64 > CHANNELS[0] {
            self.buffers = BUFFERS;
        }
        let at = self.buffers;
        self.write(at, bytes);
        self.buffers += bytes.len().next_multiple_of(16) as u64;
        at
    }

    /// Makes a chain available.
    fn chain(&mut self, queue: usize, descriptors: &[Descriptor]) {
        let made = self.made[queue];
        let first = made.wrapping_mul(4) % QUEUE;
        for (place, descriptor) in descriptors.iter().enumerate().take(4) {
            let at = TABLES[queue] + u64::from(first + place as u16) * 16;
            let more = descriptors.len().min(4) > place + 1;
            let flags = descriptor.flags() | u16::from(more);
            let entry =
                Descriptor::new(descriptor.addr().0, descriptor.len(), flags, first + place as u16 + 1);
            self.write(at, as_bytes(entry).as_slice());
        }
        let available = TABLES[queue] + 0x1000;
        self.write(available + 4 + u64::from(made % QUEUE) * 2, &first.to_le_bytes());
        self.made[queue] = made.wrapping_add(1);
        self.write(available + 2, &self.made[queue].to_le_bytes());
    }

    /// A request that is mostly as a driver sends it.
    fn request(&mut self, steps: &mut Steps<'_>) {
        let kind = steps.pick(&[
            request::CREATE_CHANNEL,
            request::CREATE_CHANNEL,
            request::REGISTER_MEMORY,
            request::REGISTER_MEMORY,
            request::UNREGISTER_MEMORY,
            request::DESTROY_CHANNEL,
            0,
        ]);
        let place = steps.below(CHANNELS.len());
        let mut extents = Vec::new();
        if kind == request::CREATE_CHANNEL {
            let geometry = geometry();
            self.write(CHANNELS[place], geometry.fields(1, "fuzz").as_bytes());
            // In one piece, or in two.
            let cut = u64::from(steps.byte() % 4) * 4096;
            let size = geometry.size as u64;
            extents.push(Extent { addr: CHANNELS[place], len: size - cut });
            if cut > 0 {
                extents.push(Extent { addr: CHANNELS[place] + size - cut, len: cut });
            }
        } else if kind == request::REGISTER_MEMORY {
            for _ in 0..=steps.below(6) {
                extents.push(Extent { addr: self.address(steps), len: u64::from(steps.byte()) * 512 });
            }
        }
        if steps.byte() > 240 {
            extents.push(Extent { addr: self.address(steps), len: steps.number() });
        }
        let size = extents.iter().fold(0u64, |sum, extent| sum.wrapping_add(extent.len));
        let mut request = Request {
            kind,
            channel: place as u32,
            region: steps.byte() as u32 % 8,
            extent_count: extents.len() as u32,
            size,
            flags: u32::from(kind == request::REGISTER_MEMORY) & steps.byte() as u32,
            reserved: 0,
        };
        match steps.byte() {
            250 => request.size = steps.number(),
            251 => request.extent_count = steps.number() as u32,
            252 => request.channel = steps.number() as u32,
            253 => request.flags = steps.number() as u32,
            254 => request.kind = steps.number() as u32,
            255 => request.reserved = 1,
            _ => {}
        }
        let bytes = [request.as_bytes(), extents.as_bytes()].concat();
        let at = self.buffer(&bytes);
        let answer = self.buffer(&[0; 264]);
        let cut = if steps.byte() < 200 { 0 } else { u32::from(steps.byte()) % bytes.len() as u32 };
        let room = if steps.byte() < 240 { 264 } else { steps.number() as u32 };
        let mut chain = vec![Descriptor::new(at, bytes.len() as u32 - cut, 0, 0)];
        if cut > 0 {
            chain.insert(0, Descriptor::new(at, cut, 0, 0));
            chain[1] = Descriptor::new(at + u64::from(cut), bytes.len() as u32 - cut, 0, 0);
        }
        chain.push(Descriptor::new(answer, room, 2, 0));
        if steps.byte() > 230 {
            // The same from a table of its own.
            let mut table = Vec::new();
            let count = chain.len();
            for (place, entry) in chain.iter().enumerate() {
                let flags = entry.flags() | u16::from(place + 1 < count);
                table.extend(as_bytes(Descriptor::new(entry.addr().0, entry.len(), flags, place as u16 + 1)));
            }
            let at = self.buffer(&table);
            chain = vec![Descriptor::new(at, table.len() as u32, 4, 0)];
        }
        self.chain(0, &chain);
    }
}

/// A descriptor as it lies in guest memory.
fn as_bytes(entry: Descriptor) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&entry.addr().0.to_le_bytes());
    bytes[8..12].copy_from_slice(&entry.len().to_le_bytes());
    bytes[12..14].copy_from_slice(&entry.flags().to_le_bytes());
    bytes[14..].copy_from_slice(&entry.next().to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_any_guest_after_a_reset() {
        let programs = protocol::fuzzing::programs("control", 300, 300);
        let opened: u64 = programs.iter().map(|program| control_any(program)).sum();
        assert!(opened > 0, "no guest got as far as a session");
    }
}
