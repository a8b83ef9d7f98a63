//! A server that speaks the link over TCP and keeps "device memory" in a map. It executes copies and marks of
//! stream 0 and answers everything else with success.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use host_bridge::bridge::{Security, SessionConfig};
use host_bridge::framing::{Address, FrameReader};
use protocol::channel::{NO_SLOT, RECORD_HEADER, Record};
use protocol::data::HostIn;
use protocol::device::{Answer, untext};
use protocol::link::*;
use protocol::ops::Op;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::StreamMark;
use protocol::version::{OURS, Speaks};
use protocol::wire::{Reader, Wire};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::link::welcome;
use crate::{PATIENCE, be_patient};

/// How a fake server differs from one that behaves.
#[derive(Debug, Clone, Default)]
pub struct Behavior {
    /// The version and fingerprint that it answers with.
    pub speaks: Option<Speaks<'static>>,
    /// Its answer to a hello, with the reason.
    pub answer: Option<(Answer, &'static str)>,
    /// It refuses data connections, for this reason.
    pub refuses_data: Option<&'static str>,
    /// It first tells a client that may wait these positions in its queue.
    pub queue: &'static [u32],
    /// It tells a client that may wait nothing until [`FakeServer::release`].
    pub hold_queue: bool,
    /// It never serves a client that waits in its queue, and keeps telling it the last position.
    pub never_serves: bool,
    /// It announces data before it sends it.
    pub data_after_sent: bool,
    /// It holds back the data of copies to the host until [`FakeServer::release`].
    pub hold_data: bool,
    /// It closes the connection at the command with this `seq`.
    pub drop_at: Option<u64>,
    /// It sends nothing after the handshake and keeps the connections open.
    pub silent: bool,
    /// It ignores commands, but answers when it is asked whether it is alive.
    pub swallow: bool,
    /// It sends this frame before the answer to a synchronous operation.
    pub extra_frame: Option<(u32, Vec<u8>)>,
    /// It sends this header and as many zeros at a `StreamMark`.
    pub extra_data: Option<DataHeader>,
    /// It sends these bytes on a data connection in place of what copies to the host name.
    pub instead_of_data: Option<Vec<u8>>,
    /// It pauses this long after each chunk of data that it reads.
    pub slow_reads: Option<Duration>,
    /// It executes no command until [`FakeServer::release`].
    pub hold_commands: bool,
}

/// A server on a port of this host. The threads of a session end with its connections.
pub struct FakeServer {
    /// Where it listens.
    pub address: Address,
    shared: Arc<Shared>,
}

struct Shared {
    behavior: Behavior,
    sessions: Mutex<HashMap<[u8; 16], NewConnections>>,
    next: AtomicU64,
    released: (Mutex<bool>, Condvar),
    commands: Mutex<Vec<(u64, u16)>>,
    frames: AtomicUsize,
    asked: AtomicUsize,
    left: AtomicUsize,
    silent: AtomicUsize,
    programs: Mutex<Vec<String>>,
    /// Clients are served even if it [never serves](Behavior::never_serves).
    serves: AtomicBool,
}

/// Takes the data connections of a session, with their indices.
type NewConnections = mpsc::Sender<(u32, TcpStream)>;
/// Chunks of one piece of data, with their offsets.
type Chunks = Vec<(u64, Vec<u8>)>;

/// Data that has come.
#[derive(Default)]
struct Arrived {
    /// By command and piece.
    data: HashMap<(u64, u32), Chunks>,
    /// Eager bytes since the bridge was last told that there is room.
    eager: u64,
}

type Inbox = Arc<(Mutex<Arrived>, Condvar)>;

impl FakeServer {
    /// A server with some behavior.
    pub fn start(behavior: Behavior) -> FakeServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let shared = Arc::new(Shared {
            behavior,
            sessions: Mutex::default(),
            next: AtomicU64::new(1),
            released: Default::default(),
            commands: Mutex::default(),
            frames: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            silent: AtomicUsize::new(0),
            programs: Mutex::default(),
            serves: AtomicBool::new(false),
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

    /// A server that behaves.
    pub fn good() -> FakeServer {
        FakeServer::start(Behavior::default())
    }

    /// The configuration of a session with it.
    pub fn config(&self) -> SessionConfig {
        let mut config = SessionConfig::new(self.address.clone(), "test-host");
        be_patient(&mut config);
        config.security = Security::Insecure;
        config.data_connections = 3;
        // On machines with few processors, too.
        config.io_threads = true;
        config
    }

    /// Releases the data or the commands that it holds back.
    pub fn release(&self) {
        *self.shared.released.0.lock().unwrap() = true;
        self.shared.released.1.notify_all();
    }

    /// (seq, opcode) of each command of each session, in the order of arrival.
    pub fn commands(&self) -> Vec<(u64, u16)> {
        self.shared.commands.lock().unwrap().clone()
    }

    /// Frames of commands.
    pub fn frames(&self) -> usize {
        self.shared.frames.load(Ordering::SeqCst)
    }

    /// How often a bridge asked whether it is alive.
    pub fn asked(&self) -> usize {
        self.shared.asked.load(Ordering::SeqCst)
    }

    /// How many clients have left its queue.
    pub fn left(&self) -> usize {
        self.shared.left.load(Ordering::SeqCst)
    }

    /// From now on clients that come are served.
    pub fn serve(&self) {
        self.shared.serves.store(true, Ordering::SeqCst);
    }

    /// Open connections on which no hello has come.
    pub fn silent(&self) -> usize {
        self.shared.silent.load(Ordering::SeqCst)
    }

    /// The programs of its sessions, in the order of arrival.
    pub fn programs(&self) -> Vec<String> {
        self.shared.programs.lock().unwrap().clone()
    }
}

impl Shared {
    fn await_release(&self) {
        let released = self.released.0.lock().unwrap();
        drop(self.released.1.wait_timeout_while(released, PATIENCE, |released| !*released));
    }

    fn greet(&self, mut stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut hello = Hello::new_zeroed();
        self.silent.fetch_add(1, Ordering::SeqCst);
        let said = stream.read_exact(hello.as_mut_bytes());
        self.silent.fetch_sub(1, Ordering::SeqCst);
        if said.is_err() {
            return;
        }
        assert_eq!(hello.magic, MAGIC);
        let mut token = hello.token;
        if hello.purpose == purpose::CONTROL {
            token[..8].copy_from_slice(&self.next.fetch_add(1, Ordering::SeqCst).to_le_bytes());
            self.programs.lock().unwrap().push(untext(&hello.program));
        }
        let refuses = self.behavior.refuses_data.filter(|_| hello.purpose == purpose::DATA);
        let refusal = refuses.map(|reason| (Answer::NoResources, reason)).or(self.behavior.answer);
        let (answer, reason) = refusal.unwrap_or((Answer::Ok, ""));
        let mut welcome = Welcome { token, data_connections: hello.index, ..welcome(answer, reason) };
        let speaks = self.behavior.speaks.unwrap_or(OURS);
        (welcome.version, welcome.fingerprint) = (speaks.version(), speaks.fingerprint());
        if hello.purpose == purpose::CONTROL && hello.wishes & wish::MAY_WAIT != 0 {
            // Decided before the client is told anything: a test that sees it wait knows what comes next.
            let holds = self.behavior.never_serves && !self.serves.load(Ordering::SeqCst);
            if self.behavior.hold_queue {
                self.await_release();
            }
            for ahead in self.behavior.queue {
                let place = Welcome { status: Answer::Waiting as u32, ahead: *ahead, ..welcome };
                if stream.write_all(place.as_bytes()).is_err() {
                    return;
                }
            }
            if holds {
                stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
                loop {
                    match stream.read(&mut [0; 1]) {
                        Err(e) if e.kind() == ErrorKind::WouldBlock => {
                            let ahead = self.behavior.queue.last().copied().unwrap_or_default();
                            let place = Welcome { status: Answer::Waiting as u32, ahead, ..welcome };
                            let _ = stream.write_all(place.as_bytes());
                        }
                        // A client sends nothing before its session begins: it can only leave.
                        Ok(1..) => panic!("a client that waits has sent something"),
                        _ => break,
                    }
                }
                self.left.fetch_add(1, Ordering::SeqCst);
                return;
            }
        }
        let data = (hello.purpose == purpose::CONTROL).then(|| {
            let (connections, data) = mpsc::channel();
            self.sessions.lock().unwrap().insert(token, connections);
            data
        });
        if stream.write_all(welcome.as_bytes()).is_err() {
            return;
        }
        match data {
            Some(data) => self.serve(stream, &data, hello.index, hello.slot_count),
            None if answer != Answer::Ok => {}
            None => drop(self.sessions.lock().unwrap()[&token].send((hello.index, stream))),
        }
    }

    fn serve(
        &self,
        control: TcpStream,
        connections: &mpsc::Receiver<(u32, TcpStream)>,
        count: u32,
        slots: u32,
    ) {
        assert_eq!(slots, 64);
        let control = Arc::new(Mutex::new(control));
        let inbox = Inbox::default();
        let mut data = Vec::new();
        for _ in 0..count {
            let Ok((index, connection)) = connections.recv_timeout(PATIENCE) else { return };
            let (reader, inbox, slow) =
                (connection.try_clone().unwrap(), inbox.clone(), self.behavior.slow_reads);
            if !self.behavior.silent {
                let control = Arc::clone(&control);
                std::thread::spawn(move || read_data(reader, &inbox, slow, &control, 1 + index));
            }
            data.push(connection);
        }
        if self.behavior.silent {
            std::thread::sleep(PATIENCE);
            return;
        }
        let reader = control.lock().unwrap().try_clone().unwrap();
        let mut gpu = Gpu {
            shared: self,
            control: &control,
            inbox,
            data,
            memory: HashMap::new(),
            next: 1,
            asked: HashSet::new(),
        };
        gpu.run(reader);
        for connection in &gpu.data {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        let _ = control.lock().unwrap().shutdown(std::net::Shutdown::Both);
    }
}

fn read_data(
    mut connection: TcpStream,
    inbox: &Inbox,
    slow: Option<Duration>,
    control: &Mutex<TcpStream>,
    stream: u32,
) {
    let mut received = 0;
    loop {
        let mut header = DataHeader::new_zeroed();
        if connection.read_exact(header.as_mut_bytes()).is_err() {
            return;
        }
        if header.seq == 0 && header.len == 0 {
            // The bridge says what it has received.
            received += size_of::<DataHeader>() as u64;
            continue;
        }
        let eager = header.len & EAGER_FLAG != 0;
        header.len &= !EAGER_FLAG;
        assert!(header.len > 0 && header.len <= MAX_DATA);
        let mut bytes = vec![0; header.len as usize];
        if connection.read_exact(&mut bytes).is_err() {
            return;
        }
        slow.inspect(|time| std::thread::sleep(*time));
        received += (size_of::<DataHeader>() + bytes.len()) as u64;
        let _ = acknowledge(control, stream, received);
        let mut arrived = inbox.0.lock().unwrap();
        arrived.eager += if eager { u64::from(header.len) } else { 0 };
        assert!(arrived.eager <= EAGER, "{} eager bytes", arrived.eager);
        arrived.data.entry((header.seq, header.piece)).or_default().push((header.offset, bytes));
        drop(arrived);
        inbox.1.notify_all();
    }
}

/// Says how much of a stream has come.
fn acknowledge(control: &Mutex<TcpStream>, stream: u32, bytes: u64) -> std::io::Result<()> {
    send(control, frame::RECEIVED, Received { stream, reserved: 0, bytes }.as_bytes())
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
    data: Vec<TcpStream>,
    memory: HashMap<u64, Vec<u8>>,
    /// `seq` of the next command.
    next: u64,
    /// Pieces of data of later commands for which the bridge has asked for grants.
    asked: HashSet<(u64, u32)>,
}

/// One thread. While it executes a command it reads no other, and it waits for the command's data: a bridge
/// must not hold back what a command needs until later.
impl Gpu<'_> {
    fn run(&mut self, mut control: TcpStream) {
        let mut reader = FrameReader::new();
        let (mut received, mut told) = (0, 0);
        loop {
            match reader.fill(&mut control) {
                Ok(0) | Err(_) => return,
                Ok(n) => received += n as u64,
            }
            if received - told >= ACKNOWLEDGE_CONTROL {
                told = received;
                let _ = acknowledge(self.control, 0, received);
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
                        assert!(ask.seq >= self.next, "command {} is executed already", ask.seq);
                        self.asked.insert((ask.seq, ask.piece));
                    }
                    frame::ALIVE => {
                        self.shared.asked.fetch_add(1, Ordering::SeqCst);
                        let _ = send(self.control, frame::ALIVE, &[]);
                    }
                    frame::RECEIVED => {}
                    frame::BYE => {
                        let _ = send(self.control, frame::BYE, &[]);
                        return;
                    }
                    other => panic!("frame of kind {other}"),
                }
            }
        }
    }

    /// Executes a frame of commands. False when the session is over.
    fn commands(&mut self, mut rest: &[u8]) -> bool {
        self.shared.frames.fetch_add(1, Ordering::SeqCst);
        if self.shared.behavior.hold_commands {
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
        if !self.shared.behavior.swallow {
            let update = ProgressUpdate { kind: progress::EXECUTED, index: 0, seq: self.next - 1, value: 0 };
            let _ = send(self.control, frame::PROGRESS, update.as_bytes());
        }
        true
    }

    fn execute(&mut self, record: Record, body: &[u8]) -> bool {
        let Record { opcode, reply_slot, seq } = record;
        assert_eq!(seq, self.next, "commands come in order");
        self.next += 1;
        self.shared.commands.lock().unwrap().push((seq, opcode));
        if self.shared.behavior.drop_at == Some(seq) {
            return false;
        }
        if self.shared.behavior.swallow {
            return true;
        }
        let mut reader = Reader::new(body);
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
            // A copy from an unknown address fails: it sends no bytes, and says so.
            let bytes = self.memory.get(&op.src).cloned().unwrap_or_default();
            let bytes = &bytes[..bytes.len().min(op.dst.0.len as usize)];
            let sent = DataSent { seq, bytes: bytes.len() as u64 };
            if self.shared.behavior.data_after_sent {
                let _ = send(self.control, frame::DATA_SENT, sent.as_bytes());
                std::thread::sleep(Duration::from_millis(30));
            }
            if self.shared.behavior.hold_data {
                self.shared.await_release();
            }
            match &self.shared.behavior.instead_of_data {
                Some(other) => {
                    let _ = self.data[0].write_all(other);
                }
                None => self.outgoing(seq, 0, bytes),
            }
            if !self.shared.behavior.data_after_sent {
                let _ = send(self.control, frame::DATA_SENT, sent.as_bytes());
            }
        } else if opcode == StreamMark::INFO.opcode {
            if let Some(header) = self.shared.behavior.extra_data {
                let _ = self.data[0].write_all(header.as_bytes());
                let _ = self.data[0].write_all(&vec![0; header.len as usize]);
            }
            let update = ProgressUpdate { kind: progress::STREAM, index: 0, seq, value: 0 };
            let _ = send(self.control, frame::PROGRESS, update.as_bytes());
        }
        if reply_slot != NO_SLOT {
            if let Some((kind, body)) = &self.shared.behavior.extra_frame {
                let _ = send(self.control, *kind, body);
            }
            let mut reply = ReplyHeader { seq, slot: reply_slot.into(), status: 0 }.as_bytes().to_vec();
            // The payload names the command.
            reply.extend_from_slice(&seq.to_le_bytes());
            let _ = send(self.control, frame::REPLY, &reply);
        }
        true
    }

    fn incoming(&mut self, seq: u64, piece: u32, len: usize, late: bool) -> Option<Vec<u8>> {
        if self.asked.remove(&(seq, piece)) || late || len as u64 > EAGER_PIECE {
            // There is room for all of it at once.
            let grant = DataGrant { seq, piece, reserved: 0, upto: len as u64 };
            let _ = send(self.control, frame::DATA_GRANT, grant.as_bytes());
        }
        let arrived = self.inbox.0.lock().unwrap();
        let complete = |arrived: &Arrived| {
            arrived
                .data
                .get(&(seq, piece))
                .map_or(0, |parts| parts.iter().map(|(_, bytes)| bytes.len()).sum::<usize>())
                >= len
        };
        let (mut arrived, timeout) =
            self.inbox.1.wait_timeout_while(arrived, PATIENCE, |arrived| !complete(arrived)).unwrap();
        if timeout.timed_out() {
            return None;
        }
        let mut bytes = vec![0; len];
        for (offset, part) in arrived.data.remove(&(seq, piece)).unwrap_or_default() {
            bytes[offset as usize..offset as usize + part.len()].copy_from_slice(&part);
        }
        let placed = std::mem::take(&mut arrived.eager);
        drop(arrived);
        let _ = send(self.control, frame::DATA_PLACED, &placed.to_le_bytes());
        Some(bytes)
    }

    /// Sends data in chunks of odd sizes over all data connections, the last first.
    fn outgoing(&mut self, seq: u64, piece: u32, bytes: &[u8]) {
        let chunk = (bytes.len() / 7).clamp(1000, 600_001);
        let parts: Vec<(usize, &[u8])> =
            bytes.chunks(chunk).enumerate().map(|(i, part)| (i * chunk, part)).collect();
        for (i, (offset, part)) in parts.into_iter().rev().enumerate() {
            let header = DataHeader { seq, offset: offset as u64, piece, len: part.len() as u32 };
            let count = self.data.len();
            let connection = &mut self.data[i % count];
            if connection.write_all(&[header.as_bytes(), part].concat()).is_err() {
                return;
            }
        }
    }
}

/// A server that accepts connections and never sends anything. Gives its address, and on how many connections
/// it was told something: clients keep others ready.
pub fn mute_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, greetings) = (listener.local_addr().unwrap(), Arc::<AtomicUsize>::default());
    let for_thread = Arc::clone(&greetings);
    std::thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let greetings = Arc::clone(&for_thread);
            std::thread::spawn(move || {
                if matches!(connection.read(&mut [0]), Ok(1)) {
                    greetings.fetch_add(1, Ordering::SeqCst);
                }
                // It stays open until the other side closes it.
                while matches!(connection.read(&mut [0; 64]), Ok(1..)) {}
            });
        }
    });
    (format!("tcp:{address}"), greetings)
}
