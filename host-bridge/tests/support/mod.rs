//! Support for the bridge's tests: a client that owns a channel, and a server that speaks `protocol::link` and keeps "device memory" in a map.

#![allow(dead_code)]

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use protocol::channel::{
    Completion, Geometry, HEADER_SIZE, Header, NO_SLOT, Producer, RECORD_HEADER, Record, RingMemory, State,
};
use protocol::data::{HostIn, HostOut, HostRange, Place};
use protocol::device::{Answer, Extent, text};
use protocol::handle::StreamId;
use protocol::link::*;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::{StreamMark, StreamSynchronize};
use protocol::ops::{Class, Op, encode};
use protocol::version::{OURS, Speaks};
use rgpu_host_bridge::bridge::{ChannelMemory, RegionMemory, Session, SessionConfig, Wakeup};
use rgpu_host_bridge::framing::{Address, FrameReader};
use rgpu_host_bridge::memory::{ChannelView, Memories};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// How long anything may take before a test gives up. Nothing is judged by it.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// A memfd of `size` bytes.
pub fn memfd(size: u64) -> OwnedFd {
    let fd = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, size as i64).unwrap();
    fd
}

/// Waits until `what` holds.
pub fn eventually(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < PATIENCE, "it did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that differ from place to place.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A client: its memory (a guest's RAM of 64 MiB, the channel scattered in it), its end of the ring, and its session.
pub struct Client {
    // Fields are dropped in this order: the session before the view that it writes into, though each has a mapping of its own.
    pub session: Session,
    producer: Producer<'static>,
    view: Box<ChannelView>,
    pub memories: Memories,
    pub geometry: Geometry,
    pub lost: Arc<Mutex<Option<String>>>,
    pub wakes: Arc<AtomicUsize>,
    body: Vec<u8>,
}

const CHANNEL_AT: u64 = 0x10_0000;
pub const RAM: u64 = 64 << 20;

/// A channel's memory that a client has prepared.
pub fn channel(arena: usize) -> (Memories, ChannelMemory, Geometry) {
    let geometry = Geometry::with_arena(arena);
    let memory = Memory { addr: 0, size: RAM, file_offset: 0 };
    let memories = Memories::map(vec![(memory, memfd(RAM))]).unwrap();
    let size = geometry.size as u64;
    // The first page lies behind the rest, as a guest's pages do.
    let extents = vec![
        Extent { addr: CHANNEL_AT + size, len: 0x1000 },
        Extent { addr: CHANNEL_AT, len: size - 0x1000 },
    ];
    let first = memories.resolve(&extents[..1], 0x1000).unwrap().all()[0].at.cast::<Header>();
    // SAFETY: a mapped page of this test, all atomics.
    unsafe { first.as_ref() }.write_fields(&geometry.fields(42, "test-program"));
    let channel = ChannelMemory::new(memories.clone(), extents, size).unwrap();
    (memories, channel, geometry)
}

impl Client {
    pub fn try_connect(config: &SessionConfig) -> Result<Client, rgpu_host_bridge::bridge::ConnectError> {
        let (memories, channel, geometry) = channel(4 << 20);
        let view = Box::new(memories.view(&channel.extents, channel.size).unwrap());
        let (lost, wakes) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let (for_loss, for_wakes) = (lost.clone(), wakes.clone());
        let wakeup = Wakeup::Call(Arc::new(move || {
            for_wakes.fetch_add(1, Ordering::SeqCst);
        }));
        let on_lost = Box::new(move |reason: &str| *for_loss.lock().unwrap() = Some(reason.to_owned()));
        let session = Session::connect(config, channel, wakeup, on_lost)?;
        // SAFETY: `view` is boxed and is dropped after `producer`, which is the only one to use this borrow.
        let forever: &'static ChannelView = unsafe { &*std::ptr::from_ref::<ChannelView>(view.as_ref()) };
        // SAFETY: the ring's part of the channel, checked by the geometry.
        let words = unsafe {
            std::slice::from_raw_parts(
                forever.base().add(geometry.ring_offset).cast().as_ptr(),
                geometry.ring_size / 8,
            )
        };
        let producer = Producer::new(forever.header(), RingMemory::new(words));
        Ok(Client { session, producer, view, memories, geometry, lost, wakes, body: Vec::new() })
    }

    /// The version that the bridge says the session speaks, and its fingerprint.
    pub fn session_version(&self) -> (protocol::Version, u64) {
        self.view.header().session_version()
    }

    pub fn connect(config: &SessionConfig) -> Client {
        Client::try_connect(config).unwrap()
    }

    pub fn header(&self) -> &Header {
        self.view.header()
    }

    pub fn progress(&self) -> &protocol::channel::Progress {
        self.view.progress()
    }

    /// Raw access to the ring, for hostile records.
    pub fn ring_words(&self) -> &[AtomicU64] {
        // SAFETY: as in `try_connect`.
        unsafe {
            std::slice::from_raw_parts(
                self.view.base().add(self.geometry.ring_offset).cast().as_ptr(),
                self.geometry.ring_size / 8,
            )
        }
    }

    /// The ring's tail, for hostile values.
    pub fn tail(&self) -> &AtomicU64 {
        // SAFETY: offset 0x100 of the header is the tail (`protocol::channel`).
        unsafe { self.view.base().add(0x100).cast::<AtomicU64>().as_ref() }
    }

    /// Appends a record as it is, and rings when the other side sleeps.
    pub fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64 {
        loop {
            if let Ok(seq) = self.producer.push(opcode, slot, body) {
                if self.header().host_sleep.take() {
                    self.session.doorbell();
                }
                return seq;
            }
            assert!(self.header().state() != State::Lost, "{}", self.header().reason());
            std::thread::yield_now();
        }
    }

    pub fn push<'a, T: Op<'a>>(&mut self, op: &T, slot: u16) -> u64 {
        assert_eq!(T::INFO.class == Class::Sync, slot != NO_SLOT);
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        encode(op, &mut body);
        let seq = self.push_raw(T::INFO.opcode, slot, &body);
        self.body = body;
        seq
    }

    /// A `sync` operation in slot 0.
    pub fn call<'a, T: Op<'a>>(&mut self, op: &T) -> (Completion, Vec<u8>) {
        self.view.slot(0).unwrap().prepare();
        self.push(op, 0);
        self.answer(0)
    }

    /// Waits for the answer in a slot.
    pub fn answer(&self, slot: u16) -> (Completion, Vec<u8>) {
        let start = Instant::now();
        let mut payload = Vec::new();
        loop {
            if let Some(completion) = self.view.slot(slot).unwrap().poll(&mut payload) {
                return (completion, payload);
            }
            assert!(start.elapsed() < PATIENCE, "no answer; the session's end: {:?}", self.session.over());
            std::thread::yield_now();
        }
    }

    pub fn prepare(&self, slot: u16) {
        self.view.slot(slot).unwrap().prepare();
    }

    pub fn synchronize(&mut self) {
        let (completion, _) = self.call(&StreamSynchronize { stream: StreamId(0) });
        assert!(completion.status.is_success(), "{}: {:?}", completion.status, self.session.over());
    }

    pub fn htod(&mut self, dst: u64, range: HostRange) -> u64 {
        self.push(&MemcpyHtoD { stream: StreamId(0), dst, src: HostIn::Range(range) }, NO_SLOT)
    }

    pub fn dtoh(&mut self, src: u64, range: HostRange) -> u64 {
        self.push(&MemcpyDtoH { stream: StreamId(0), src, dst: HostOut(range) }, NO_SLOT)
    }

    pub fn mark(&mut self) -> u64 {
        self.push(&StreamMark { stream: StreamId(0) }, NO_SLOT)
    }

    /// Registers extents of the client's memory.
    pub fn register(
        &self,
        id: u32,
        extents: Vec<Extent>,
        read_only: bool,
    ) -> Result<(), rgpu_host_bridge::bridge::RegionError> {
        let size = extents.iter().map(|e| e.len).sum();
        self.session.register_region(
            id,
            RegionMemory { memories: self.memories.clone(), extents, size, own_memory: false, read_only },
        )
    }

    /// Writes the client's memory.
    pub fn write(&self, extents: &[Extent], bytes: &[u8]) {
        let pieces = self.memories.resolve(extents, bytes.len() as u64).unwrap();
        for piece in pieces.all() {
            // SAFETY: a piece of this test's memory; the source is as long.
            unsafe { piece.at.copy_from(NonNull::from(&bytes[piece.offset]).cast(), piece.len) };
        }
    }

    /// Reads the client's memory.
    pub fn read(&self, extents: &[Extent]) -> Vec<u8> {
        let size: u64 = extents.iter().map(|e| e.len).sum();
        let mut bytes = vec![0; size as usize];
        for piece in self.memories.resolve(extents, size).unwrap().all() {
            // SAFETY: a piece of this test's memory; the target is as long.
            unsafe { piece.at.copy_to(NonNull::from(&mut bytes[piece.offset]).cast(), piece.len) };
        }
        bytes
    }

    pub fn write_arena(&self, offset: u64, bytes: &[u8]) {
        let (at, len) = self.view.arena(offset, bytes.len() as u64).unwrap();
        // SAFETY: the arena's memory, checked by `arena`.
        unsafe { at.copy_from(NonNull::from(bytes).cast(), len) };
    }

    pub fn read_arena(&self, offset: u64, len: u64) -> Vec<u8> {
        let (at, len) = self.view.arena(offset, len).unwrap();
        let mut bytes = vec![0; len];
        // SAFETY: as above.
        unsafe { at.copy_to(NonNull::from(&mut bytes[..]).cast(), len) };
        bytes
    }

    /// Waits for the loss and returns its reason, which must stand in the header too.
    pub fn wait_lost(&self) -> String {
        eventually(|| self.lost.lock().unwrap().is_some());
        let reason = self.lost.lock().unwrap().clone().unwrap();
        assert_eq!(self.header().state(), State::Lost);
        // The header holds as much as fits, or the words of a worker that ended the session by itself.
        assert!(reason.contains(&self.header().reason()), "{reason}");
        reason
    }
}

/// Scattered, odd-sized extents of `sum` bytes behind the channel.
pub fn scattered(sum: u64, seed: u64) -> Vec<Extent> {
    let mut extents = Vec::new();
    let (mut left, mut x) = (sum, seed | 1);
    let base = 24 << 20;
    let mut slot = 0;
    while left > 0 {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let len = (1 + (x >> 33) % 90_001).min(left);
        // Slots of 128 KiB, visited in an order that is not ascending.
        let place = (slot * 7 + 3) % 311;
        extents.push(Extent { addr: base + place * 0x2_0000 + (x >> 20) % 4096, len });
        slot += 1;
        assert!(slot < 311, "more than the test's memory holds");
        left -= len;
    }
    extents
}

pub fn arena(offset: u64, len: u64) -> HostRange {
    HostRange { place: Place::Arena, offset, len }
}

pub fn region(id: u32, offset: u64, len: u64) -> HostRange {
    HostRange { place: Place::Region(id), offset, len }
}

/// What a fake server does otherwise than a good one.
#[derive(Debug, Clone, Default)]
pub struct Manners {
    /// Its version and fingerprint.
    pub speaks: Option<Speaks<'static>>,
    /// What it answers a hello with.
    pub answer: Option<(Answer, &'static str)>,
    /// It lets a client that may wait do so, and tells it of these places first.
    pub queue: &'static [u32],
    /// It serves nobody in its queue.
    pub queue_stands: bool,
    /// It says that data was sent, and only then sends it.
    pub data_after_sent: bool,
    /// It holds the data of `DtoH` copies until [`FakeServer::release`].
    pub hold_data: bool,
    /// It ends the connection at this command.
    pub drop_at: Option<u64>,
    /// It falls silent after the handshake, and keeps the connections open.
    pub silent: bool,
    /// It takes commands and does nothing with them, but says that it is there when it is asked.
    pub swallow: bool,
    /// Before the answer to a `sync` operation it sends this frame.
    pub extra: Option<(u32, Vec<u8>)>,
    /// A piece of data that it sends at a `StreamMark`.
    pub extra_data: Option<DataHeader>,
    /// It does not read `In` data for this long after each piece.
    pub slow: Option<Duration>,
    /// It executes no command until [`FakeServer::release`].
    pub hold_commands: bool,
}

/// A server on a port of this machine. Each session is served by threads that end with its connections.
pub struct FakeServer {
    pub address: Address,
    shared: Arc<Shared>,
}

struct Shared {
    manners: Manners,
    sessions: Mutex<HashMap<[u8; 16], Lanes>>,
    next: AtomicU64,
    released: (Mutex<bool>, Condvar),
    /// (seq, opcode) of each command of each session, in the order of arrival.
    pub commands: Mutex<Vec<(u64, u16)>>,
    /// Frames of commands.
    pub frames: AtomicUsize,
    /// How often a bridge asked whether it is there.
    asked: AtomicUsize,
    /// How many clients have left its queue.
    left: AtomicUsize,
    pub programs: Mutex<Vec<String>>,
}

/// Takes a session's data connections with their indices.
type Lanes = mpsc::Sender<(u32, TcpStream)>;
/// Some data, with its offset.
type Part = (u64, Vec<u8>);

/// Data that has come.
#[derive(Default)]
struct Arrived {
    /// By command and piece: offsets and bytes.
    data: HashMap<(u64, u32), Vec<Part>>,
    /// Eager bytes of it that the bridge takes for lying nowhere.
    eager: u64,
}

type Inbox = Arc<(Mutex<Arrived>, Condvar)>;

impl FakeServer {
    pub fn start(manners: Manners) -> FakeServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let shared = Arc::new(Shared {
            manners,
            sessions: Mutex::default(),
            next: AtomicU64::new(1),
            released: Default::default(),
            commands: Mutex::default(),
            frames: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            programs: Mutex::default(),
        });
        let for_thread = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), shared) = (stream, for_thread.clone()) else { return };
                std::thread::spawn(move || shared.greet(stream));
            }
        });
        FakeServer { address, shared }
    }

    pub fn good() -> FakeServer {
        FakeServer::start(Manners::default())
    }

    pub fn config(&self) -> SessionConfig {
        let mut config = SessionConfig::new(self.address.clone(), "test-host");
        config.data_connections = 3;
        // Also on a machine that is too small for them to pay.
        config.hands = true;
        config
    }

    /// Lets held data go.
    pub fn release(&self) {
        *self.shared.released.0.lock().unwrap() = true;
        self.shared.released.1.notify_all();
    }

    pub fn commands(&self) -> Vec<(u64, u16)> {
        self.shared.commands.lock().unwrap().clone()
    }

    pub fn frames(&self) -> usize {
        self.shared.frames.load(Ordering::SeqCst)
    }

    /// How often a bridge asked whether it is there.
    pub fn asked(&self) -> usize {
        self.shared.asked.load(Ordering::SeqCst)
    }

    /// How many clients have left its queue.
    pub fn left(&self) -> usize {
        self.shared.left.load(Ordering::SeqCst)
    }

    pub fn programs(&self) -> Vec<String> {
        self.shared.programs.lock().unwrap().clone()
    }
}

impl Shared {
    fn await_release(&self) {
        let held = self.released.0.lock().unwrap();
        drop(self.released.1.wait_timeout_while(held, PATIENCE, |released| !*released));
    }

    fn greet(&self, mut stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut hello = Hello::new_zeroed();
        if stream.read_exact(hello.as_mut_bytes()).is_err() {
            return;
        }
        assert_eq!(hello.magic, MAGIC);
        let mut token = hello.token;
        if hello.purpose == purpose::CONTROL {
            token[..8].copy_from_slice(&self.next.fetch_add(1, Ordering::SeqCst).to_le_bytes());
            self.programs.lock().unwrap().push(protocol::device::untext(&hello.program));
        }
        let (answer, reason) = self.manners.answer.unwrap_or((Answer::Ok, ""));
        let speaks = self.manners.speaks.unwrap_or(OURS);
        let welcome = Welcome {
            magic: MAGIC,
            version: speaks.version(),
            fingerprint: speaks.fingerprint(),
            status: answer as u32,
            token,
            data_connections: hello.index,
            ahead: 0,
            server: text("fake"),
            reason: text(reason),
        };
        if hello.purpose == purpose::CONTROL && hello.wishes & wish::MAY_WAIT != 0 {
            for ahead in self.manners.queue {
                let place = Welcome { status: Answer::Waiting as u32, ahead: *ahead, ..welcome };
                if stream.write_all(place.as_bytes()).is_err() {
                    return;
                }
            }
            if self.manners.queue_stands {
                // Nothing is sent to it before its session begins: it can only leave.
                assert!(!matches!(stream.read(&mut [0; 1]), Ok(1..)));
                self.left.fetch_add(1, Ordering::SeqCst);
                return;
            }
        }
        let lanes = (hello.purpose == purpose::CONTROL).then(|| {
            let (lanes, received) = mpsc::channel();
            self.sessions.lock().unwrap().insert(token, lanes);
            received
        });
        if stream.write_all(welcome.as_bytes()).is_err() {
            return;
        }
        match lanes {
            Some(lanes) => self.serve(stream, lanes, hello.index, hello.slot_count),
            None => {
                let sessions = self.sessions.lock().unwrap();
                let _ = sessions[&token].send((hello.index, stream));
            }
        }
    }

    fn serve(&self, control: TcpStream, lanes: mpsc::Receiver<(u32, TcpStream)>, count: u32, slots: u32) {
        assert_eq!(slots, 64);
        let inbox = Inbox::default();
        let mut data = Vec::new();
        for _ in 0..count {
            let Ok((_, lane)) = lanes.recv_timeout(PATIENCE) else { return };
            let (reader, inbox, slow) = (lane.try_clone().unwrap(), inbox.clone(), self.manners.slow);
            if !self.manners.silent {
                std::thread::spawn(move || read_lane(reader, &inbox, slow));
            }
            data.push(lane);
        }
        if self.manners.silent {
            std::thread::sleep(PATIENCE);
            return;
        }
        let control = Arc::new(Mutex::new(control));
        let reader = control.lock().unwrap().try_clone().unwrap();
        let mut gpu = Gpu {
            shared: self,
            control: &control,
            inbox,
            lanes: data,
            memory: HashMap::new(),
            due: 1,
            asked: HashSet::new(),
        };
        gpu.run(reader);
        for lane in &gpu.lanes {
            let _ = lane.shutdown(std::net::Shutdown::Both);
        }
        let _ = control.lock().unwrap().shutdown(std::net::Shutdown::Both);
    }
}

fn read_lane(mut lane: TcpStream, inbox: &Inbox, slow: Option<Duration>) {
    loop {
        let mut header = DataHeader::new_zeroed();
        if lane.read_exact(header.as_mut_bytes()).is_err() {
            return;
        }
        let eager = header.len & EAGER_FLAG != 0;
        header.len &= !EAGER_FLAG;
        assert!(header.len > 0 && header.len <= MAX_DATA);
        let mut bytes = vec![0; header.len as usize];
        if lane.read_exact(&mut bytes).is_err() {
            return;
        }
        slow.inspect(|time| std::thread::sleep(*time));
        let mut arrived = inbox.0.lock().unwrap();
        arrived.eager += if eager { u64::from(header.len) } else { 0 };
        assert!(arrived.eager <= EAGER, "{} eager bytes", arrived.eager);
        arrived.data.entry((header.seq, header.piece)).or_default().push((header.offset, bytes));
        drop(arrived);
        inbox.1.notify_all();
    }
}

fn send(control: &Mutex<TcpStream>, kind: u32, body: &[u8]) -> std::io::Result<()> {
    let mut frame = FrameHeader { kind, len: body.len() as u32 }.as_bytes().to_vec();
    frame.extend_from_slice(body);
    control.lock().unwrap().write_all(&frame)
}

struct Gpu<'s> {
    shared: &'s Shared,
    control: &'s Mutex<TcpStream>,
    inbox: Inbox,
    lanes: Vec<TcpStream>,
    memory: HashMap<u64, Vec<u8>>,
    due: u64,
    /// Pieces of data of commands to come that wait for grants.
    asked: HashSet<(u64, u32)>,
}

/// One thread, which reads nothing further while it executes a command, and waits for the command's data: all that a command needs must come before it.
impl Gpu<'_> {
    fn run(&mut self, mut control: TcpStream) {
        let mut reader = FrameReader::new();
        loop {
            match reader.fill(&mut control) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            while let Some((kind, body)) = reader.next_frame().unwrap() {
                match kind {
                    frame::COMMANDS => {
                        if !self.commands(body) {
                            return;
                        }
                    }
                    frame::DATA_ASK => {
                        let (ask, _) = DataAsk::read_from_prefix(body).unwrap();
                        assert!(ask.seq >= self.due, "command {} is executed already", ask.seq);
                        self.asked.insert((ask.seq, ask.piece));
                    }
                    frame::ALIVE => {
                        self.shared.asked.fetch_add(1, Ordering::SeqCst);
                        let _ = send(self.control, frame::ALIVE, &[]);
                    }
                    frame::BYE => return,
                    other => panic!("frame of kind {other}"),
                }
            }
        }
    }

    /// Executes a frame of commands. False: the session is over.
    fn commands(&mut self, mut rest: &[u8]) -> bool {
        self.shared.frames.fetch_add(1, Ordering::SeqCst);
        if self.shared.manners.hold_commands {
            self.shared.await_release();
        }
        while !rest.is_empty() {
            let (header, _) = <[u8; RECORD_HEADER]>::read_from_prefix(rest).unwrap();
            let (record, size) = Record::from_bytes(&header);
            if !self.execute(record, &rest[RECORD_HEADER..size as usize]) {
                return false;
            }
            rest = &rest[size as usize..];
        }
        if !self.shared.manners.swallow {
            let update = ProgressUpdate { kind: progress::EXECUTED, index: 0, seq: self.due - 1, value: 0 };
            let _ = send(self.control, frame::PROGRESS, update.as_bytes());
        }
        true
    }

    fn execute(&mut self, record: Record, body: &[u8]) -> bool {
        let Record { opcode, reply_slot, seq } = record;
        assert_eq!(seq, self.due, "commands come in order");
        self.due += 1;
        self.shared.commands.lock().unwrap().push((seq, opcode));
        if self.shared.manners.drop_at == Some(seq) {
            return false;
        }
        if self.shared.manners.swallow {
            return true;
        }
        let mut reader = protocol::wire::Reader::new(body);
        use protocol::wire::Wire;
        if opcode == MemcpyHtoD::INFO.opcode {
            let op = MemcpyHtoD::get(&mut reader).unwrap();
            let bytes = match op.src {
                HostIn::Inline(bytes) => bytes.to_vec(),
                HostIn::Range(range) | HostIn::Late(range) => {
                    let late = matches!(op.src, HostIn::Late(_));
                    match self.incoming(seq, 0, range.len as usize, late) {
                        Some(bytes) => bytes,
                        None => return false,
                    }
                }
            };
            self.memory.insert(op.dst, bytes);
        } else if opcode == MemcpyDtoH::INFO.opcode {
            let op = MemcpyDtoH::get(&mut reader).unwrap();
            // A copy from nowhere fails: no bytes, but the word that they were sent.
            let bytes = self.memory.get(&op.src).cloned().unwrap_or_default();
            let bytes = &bytes[..bytes.len().min(op.dst.0.len as usize)];
            let sent = DataSent { seq, bytes: bytes.len() as u64 };
            if self.shared.manners.data_after_sent {
                let _ = send(self.control, frame::DATA_SENT, sent.as_bytes());
                std::thread::sleep(Duration::from_millis(30));
            }
            if self.shared.manners.hold_data {
                self.shared.await_release();
            }
            self.outgoing(seq, 0, bytes);
            if !self.shared.manners.data_after_sent {
                let _ = send(self.control, frame::DATA_SENT, sent.as_bytes());
            }
        } else if opcode == StreamMark::INFO.opcode {
            if let Some(header) = self.shared.manners.extra_data {
                let _ = self.lanes[0].write_all(header.as_bytes());
                let _ = self.lanes[0].write_all(&vec![0; header.len as usize]);
            }
            let update = ProgressUpdate { kind: progress::STREAM, index: 0, seq, value: 0 };
            let _ = send(self.control, frame::PROGRESS, update.as_bytes());
        }
        if reply_slot != NO_SLOT {
            if let Some((kind, body)) = &self.shared.manners.extra {
                let _ = send(self.control, *kind, body);
            }
            let mut reply = ReplyHeader { seq, slot: reply_slot.into(), status: 0 }.as_bytes().to_vec();
            // The payload tells which command was answered.
            reply.extend_from_slice(&seq.to_le_bytes());
            let _ = send(self.control, frame::REPLY, &reply);
        }
        true
    }

    fn incoming(&mut self, seq: u64, piece: u32, len: usize, late: bool) -> Option<Vec<u8>> {
        if self.asked.remove(&(seq, piece)) || late || len as u64 > EAGER_PIECE {
            // All of it at once: there is room for everything here.
            let grant = DataGrant { seq, piece, reserved: 0, upto: len as u64 };
            let _ = send(self.control, frame::DATA_GRANT, grant.as_bytes());
        }
        let held = self.inbox.0.lock().unwrap();
        let complete = |held: &Arrived| {
            held.data
                .get(&(seq, piece))
                .map_or(0, |parts| parts.iter().map(|(_, bytes)| bytes.len()).sum::<usize>())
                >= len
        };
        let (mut held, timeout) =
            self.inbox.1.wait_timeout_while(held, PATIENCE, |held| !complete(held)).unwrap();
        if timeout.timed_out() {
            return None;
        }
        let mut bytes = vec![0; len];
        for (offset, part) in held.data.remove(&(seq, piece)).unwrap_or_default() {
            bytes[offset as usize..offset as usize + part.len()].copy_from_slice(&part);
        }
        let placed = std::mem::take(&mut held.eager);
        drop(held);
        let _ = send(self.control, frame::DATA_PLACED, &placed.to_le_bytes());
        Some(bytes)
    }

    /// Sends data in pieces of odd sizes over all lanes, the last piece first.
    fn outgoing(&mut self, seq: u64, piece: u32, bytes: &[u8]) {
        let chunk = (bytes.len() / 7).clamp(1000, 600_001);
        let parts: Vec<(usize, &[u8])> =
            bytes.chunks(chunk).enumerate().map(|(i, part)| (i * chunk, part)).collect();
        for (i, (offset, part)) in parts.into_iter().rev().enumerate() {
            let header = DataHeader { seq, offset: offset as u64, piece, len: part.len() as u32 };
            let count = self.lanes.len();
            let lane = &mut self.lanes[i % count];
            if lane.write_all(header.as_bytes()).and_then(|()| lane.write_all(part)).is_err() {
                return;
            }
        }
    }
}

/// A page of a channel's header is where the tests think it is.
const _: () = assert!(HEADER_SIZE == 4096);
