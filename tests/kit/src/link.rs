//! A bridge at `rgpu-server`'s sockets: shared memory over a Unix socket ([`LocalBridge`]), frames and data
//! connections over TCP ([`TcpBridge`]).

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_bridge::framing::{recv_frame, recv_struct, send_frame, send_message};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use protocol::Status;
use protocol::channel::{NO_SLOT, Record};
use protocol::data::{DataUse, HostRange};
use protocol::device::{Answer, Extent, text, untext};
use protocol::handle::*;
use protocol::link::*;
use protocol::ops::{self, Op, SyncOp, decode_reply};
use protocol::version::OURS;
use zerocopy::{FromBytes, IntoBytes};

use crate::channel::{Channel, in_a_file};
use crate::{PATIENCE, arena, until};

/// The first message of a connection.
pub fn hello(purpose: u32, token: [u8; 16], index: u32) -> Hello {
    Hello {
        devices: [0; protocol::link::MAX_DEVICE_LIST],
        magic: MAGIC,
        version: OURS.version(),
        purpose,
        fingerprint: OURS.fingerprint(),
        token,
        index,
        pid: std::process::id(),
        slot_count: 64,
        wishes: 0,
        client: text("test"),
        program: text("a test"),
        secret: [0; 32],
        attempt: 0,
        reserved: 0,
    }
}

/// A command as a ring has it and a frame carries it.
pub fn record(seq: u64, opcode: u16, slot: u16, body: &[u8]) -> Vec<u8> {
    let size = (16 + body.len()).next_multiple_of(16);
    let mut bytes = [&Record { opcode, reply_slot: slot, seq }.to_bytes(size as u32), body].concat();
    bytes.resize(size, 0);
    bytes
}

/// A server's answer to a [`Hello`]; tests set the token and the number of data connections.
pub fn welcome(answer: Answer, reason: &str) -> Welcome {
    Welcome { server: text("fake"), ..Welcome::new(answer, reason) }
}

/// Sends a hello.
pub fn say_hello(socket: impl AsFd, hello: &Hello) -> io::Result<()> {
    send_message(socket.as_fd(), &[hello.as_bytes()], &[])
}

/// Waits for the server's answer.
pub fn hear_welcome(socket: impl AsFd) -> io::Result<Welcome> {
    recv_struct::<Welcome>(socket.as_fd(), &mut Vec::new())?.ok_or(io::ErrorKind::UnexpectedEof.into())
}

/// Sends a hello and waits for the server's answer.
pub fn greet(socket: impl AsFd, hello: &Hello) -> io::Result<Welcome> {
    say_hello(&socket, hello)?;
    hear_welcome(socket)
}

/// Connects to a server's TCP port on this host.
pub fn connect_tcp(port: u16) -> io::Result<TcpStream> {
    connect_tcp_from(Ipv4Addr::LOCALHOST, port)
}

/// The same from one of this host's addresses, 127.0.0.1 to 127.255.255.254: another host, as far as the
/// server can tell.
pub fn connect_tcp_from(source: Ipv4Addr, port: u16) -> io::Result<TcpStream> {
    let [source, server] = [(source, 0), (Ipv4Addr::LOCALHOST, port)]
        .map(|(ip, port)| SockaddrIn::from(SocketAddrV4::new(ip, port)));
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(socket.as_raw_fd(), &source)?;
    connect(socket.as_raw_fd(), &server)?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A client that asks for a session over a Unix socket and may have to wait for it.
pub struct Waiting {
    socket: UnixStream,
}

impl Waiting {
    /// Asks for a session with `wishes` besides being able to wait.
    pub fn ask(path: &Path, wishes: u32) -> Waiting {
        Waiting::say(path, &Hello { wishes: wishes | wish::MAY_WAIT, ..hello(purpose::LOCAL, [0; 16], 0) })
    }

    /// Asks for a session with this hello.
    pub fn say(path: &Path, hello: &Hello) -> Waiting {
        let socket = UnixStream::connect(path).unwrap();
        say_hello(&socket, hello).unwrap();
        Waiting { socket }
    }

    /// The server's next message.
    pub fn heard(&self) -> Welcome {
        hear_welcome(&self.socket).unwrap()
    }

    /// Waits until the server serves or refuses; an error is the reason of the refusal. Also returns the
    /// positions in the queue that it told.
    pub fn served(self) -> (Result<LocalBridge, String>, Vec<u32>) {
        let mut positions = Vec::new();
        loop {
            let welcome = self.heard();
            match Answer::from_number(welcome.status) {
                Answer::Waiting => positions.push(welcome.ahead),
                Answer::Ok => return (LocalBridge::attach(self.socket), positions),
                _ => return (Err(untext(&welcome.reason)), positions),
            }
        }
    }
}

/// What tests do with a session over any transport.
pub trait Session {
    /// Appends a record.
    fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64;
    /// Waits for the answer in `slot`.
    fn wait(&mut self, slot: u16, seq: u64) -> (Status, Vec<u8>);
    /// The stream's progress word.
    fn word(&mut self, stream: u32) -> u64;
    /// The context's error word: status and whether it is sticky.
    fn error(&mut self, context: u32) -> Option<(Status, bool)>;
    /// Why the session was lost, once it is.
    fn lost(&mut self) -> Option<String>;
    /// Puts `bytes` at `offset` of the client's memory and returns their range.
    fn arena(&mut self, offset: u64, bytes: &[u8]) -> HostRange;
    /// Reads the client's memory.
    fn read_arena(&mut self, offset: u64, len: usize) -> Vec<u8>;

    /// Appends an operation that is not answered.
    fn push<'a, T: Op<'a>>(&mut self, op: &T) -> u64
    where
        Self: Sized,
    {
        let mut body = Vec::new();
        ops::encode(op, &mut body);
        self.push_raw(T::INFO.opcode, NO_SLOT, &body)
    }

    /// Appends an operation whose answer goes to `slot`.
    fn send<'a, T: SyncOp<'a>>(&mut self, slot: u16, op: &T) -> u64
    where
        Self: Sized,
    {
        let mut body = Vec::new();
        ops::encode(op, &mut body);
        self.push_raw(T::INFO.opcode, slot, &body)
    }

    /// Appends an operation and waits for its answer in slot 0.
    fn call<'a, T: SyncOp<'a>>(&mut self, op: &T) -> Result<T::Reply, Status>
    where
        Self: Sized,
    {
        let seq = self.send(0, op);
        let (status, payload) = self.wait(0, seq);
        status.ok().map(|()| decode_reply(&payload).unwrap())
    }
}

/// A session whose channel is shared with the worker.
pub struct LocalBridge {
    /// The connection to the worker.
    pub socket: UnixStream,
    channel: Channel,
}

impl LocalBridge {
    /// Opens a session.
    pub fn try_connect(path: &Path) -> Result<LocalBridge, String> {
        let socket = UnixStream::connect(path).unwrap();
        let welcome = greet(&socket, &hello(purpose::LOCAL, [0; 16], 0)).unwrap();
        if welcome.status != 0 {
            return Err(untext(&welcome.reason));
        }
        LocalBridge::attach(socket)
    }

    /// Opens a session that must come about.
    pub fn connect(path: &Path) -> LocalBridge {
        LocalBridge::try_connect(path).unwrap()
    }

    /// Opens a session that must come about, and takes what the daemon gives to tell whether its client is
    /// there.
    pub fn with_presence(path: &Path) -> (LocalBridge, OwnedFd) {
        let socket = UnixStream::connect(path).unwrap();
        let hello = Hello { wishes: wish::PRESENCE, ..hello(purpose::LOCAL, [0; 16], 0) };
        say_hello(&socket, &hello).unwrap();
        let mut given = Vec::new();
        let welcome = recv_struct::<Welcome>(socket.as_fd(), &mut given).unwrap().unwrap();
        assert_eq!(welcome.status, 0);
        (LocalBridge::attach(socket).unwrap(), given.pop().unwrap())
    }

    /// Continues after the welcome: hands the channel's memory to the worker.
    fn attach(socket: UnixStream) -> Result<LocalBridge, String> {
        let (file, view) = in_a_file(8 << 20, "a test");
        let size = view.geometry().size as u64;
        let doorbell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap();
        let (memory, extent) = (Memory { addr: 0, size, file_offset: 0 }, Extent { addr: 0, len: size });
        let attach = Attach { memory_count: 1, extent_count: 1, flags: ATTACH_FUTEX, reserved: 0, size };
        let parts = [attach.as_bytes(), memory.as_bytes(), extent.as_bytes()];
        send_frame(socket.as_fd(), frame::ATTACH, &parts, &[file.as_fd(), doorbell.as_fd()]).unwrap();
        let channel = Channel::new(view, move || {
            doorbell.write(1).unwrap();
        });
        let mut local = LocalBridge { socket, channel };
        match local.ack() {
            (0, _) => Ok(local),
            (_, reason) => Err(reason),
        }
    }

    fn ack(&mut self) -> (u32, String) {
        let (kind, body) = self.frame();
        assert_eq!(kind, frame::ACK);
        let (ack, reason) = Ack::read_from_prefix(&body).unwrap();
        (ack.status, String::from_utf8(reason.to_vec()).unwrap())
    }

    /// The worker's next frame.
    pub fn frame(&mut self) -> (u32, Vec<u8>) {
        let mut body = Vec::new();
        let kind = recv_frame(self.socket.as_fd(), &mut body, &mut Vec::new()).unwrap().expect("a frame");
        (kind, body)
    }

    /// The session's channel.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Registers a region that is a file of its own. Returns the status and the reason of a refusal.
    pub fn add_region(&mut self, id: u32, file: &OwnedFd, size: u64) -> (u32, String) {
        let add = RegionAdd { region: id, extent_count: 1, flags: REGION_OWN_MEMORY, reserved: 0, size };
        let extent = Extent { addr: 0, len: size };
        let parts = [add.as_bytes(), extent.as_bytes()];
        send_frame(self.socket.as_fd(), frame::REGION_ADD, &parts, &[file.as_fd()]).unwrap();
        self.ack()
    }

    /// Asks the worker to release a region, without waiting for its answer.
    pub fn ask_to_remove_region(&mut self, id: u32) {
        send_frame(self.socket.as_fd(), frame::REGION_REMOVE, &[id.as_bytes()], &[]).unwrap();
    }

    /// Asks the worker to release a region and waits for its answer.
    pub fn remove_region(&mut self, id: u32) -> (u32, String) {
        self.ask_to_remove_region(id);
        self.ack()
    }
}

impl Session for LocalBridge {
    fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64 {
        if let Some(slot) = self.channel.view().slot(slot) {
            slot.prepare();
        }
        self.channel.push_raw(opcode, slot, body)
    }

    fn wait(&mut self, slot: u16, _seq: u64) -> (Status, Vec<u8>) {
        let (completion, payload) = self.channel.answer(slot);
        (completion.status, payload)
    }

    fn word(&mut self, stream: u32) -> u64 {
        self.channel.progress().stream(StreamId(stream)).unwrap().load(Ordering::Acquire)
    }

    fn error(&mut self, context: u32) -> Option<(Status, bool)> {
        let error = self.channel.progress().error(ContextId(context)).unwrap().get();
        error.map(|(status, sticky, _)| (status, sticky))
    }

    fn lost(&mut self) -> Option<String> {
        self.channel.lost()
    }

    fn arena(&mut self, offset: u64, bytes: &[u8]) -> HostRange {
        self.channel.write_arena(offset, bytes);
        arena(offset, bytes.len() as u64)
    }

    fn read_arena(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.channel.read_arena(offset, len as u64)
    }
}

/// The connections of a session over TCP, frame by frame. Errors are returned, so that a test can break the
/// protocol and look at what happens.
pub struct TcpBridge {
    /// The control connection.
    pub control: TcpStream,
    /// The data connections.
    pub data: Vec<TcpStream>,
    /// The session's token.
    pub token: [u8; 16],
    hello: Hello,
}

impl TcpBridge {
    /// Opens a session with as many data connections as `hello` asks for. An error is the reason of a
    /// refusal, or what failed.
    pub fn connect(port: u16, hello: &Hello) -> Result<TcpBridge, String> {
        let greeted = |hello: &Hello| -> Result<(TcpStream, Welcome), String> {
            let stream = connect_tcp(port).map_err(|e| e.to_string())?;
            let welcome = greet(&stream, hello).map_err(|e| e.to_string())?;
            if welcome.status != 0 { Err(untext(&welcome.reason)) } else { Ok((stream, welcome)) }
        };
        let (control, welcome) = greeted(hello)?;
        let Welcome { token, secret, .. } = welcome;
        let own = Hello { token, secret, ..*hello };
        let data = |index| Ok(greeted(&Hello { purpose: purpose::DATA, index, ..own })?.0);
        let data = (0..welcome.data_connections).map(data).collect::<Result<_, String>>()?;
        Ok(TcpBridge { control, data, token, hello: own })
    }

    /// A hello for another connection of the session.
    pub fn hello(&self, purpose: u32, attempt: u32, index: u32) -> Hello {
        Hello { purpose, attempt, index, ..self.hello }
    }

    /// Sends a frame.
    pub fn frame(&self, kind: u32, body: &[u8]) -> io::Result<()> {
        send_frame(self.control.as_fd(), kind, &[body], &[])
    }

    /// Sends one record in a frame of its own.
    pub fn record(&self, seq: u64, opcode: u16, slot: u16, body: &[u8]) -> io::Result<()> {
        self.frame(frame::COMMANDS, &record(seq, opcode, slot, body))
    }

    /// Sends a data header and bytes on a data connection.
    pub fn send_data(&self, connection: usize, header: DataHeader, bytes: &[u8]) -> io::Result<()> {
        (&self.data[connection % self.data.len()]).write_all(&[header.as_bytes(), bytes].concat())
    }
}

/// Chunks of data that have come, with their offsets, by command.
type Inbox = HashMap<u64, Vec<(u64, Vec<u8>)>>;

/// A session over TCP. The client's memory is a vector here, and data is sent as soon as a command names it.
pub struct TcpSession {
    bridge: TcpBridge,
    seq: u64,
    memory: Vec<u8>,
    words: HashMap<u32, u64>,
    errors: HashMap<u32, (Status, bool)>,
    replies: HashMap<u64, (Status, Vec<u8>)>,
    outputs: HashMap<u64, HostRange>,
    bye: Option<String>,
    inbox: Arc<Mutex<Inbox>>,
    /// Bytes of data in one chunk; chunks take turns on the data connections.
    pub chunk: usize,
}

impl Deref for TcpSession {
    type Target = TcpBridge;

    fn deref(&self) -> &TcpBridge {
        &self.bridge
    }
}

impl DerefMut for TcpSession {
    fn deref_mut(&mut self) -> &mut TcpBridge {
        &mut self.bridge
    }
}

impl TcpSession {
    /// Opens a session with three data connections.
    pub fn try_connect(port: u16) -> Result<TcpSession, String> {
        let bridge = TcpBridge::connect(port, &hello(purpose::CONTROL, [0; 16], 3))?;
        let inbox: Arc<Mutex<Inbox>> = Arc::default();
        for stream in &bridge.data {
            let (mut reader, inbox) = (stream.try_clone().unwrap(), Arc::clone(&inbox));
            reader.set_read_timeout(None).unwrap();
            std::thread::spawn(move || {
                let mut header = [0; size_of::<DataHeader>()];
                while reader.read_exact(&mut header).is_ok() {
                    let header = DataHeader::read_from_bytes(&header).unwrap();
                    let mut bytes = vec![0; header.len as usize];
                    reader.read_exact(&mut bytes).unwrap();
                    inbox.lock().unwrap().entry(header.seq).or_default().push((header.offset, bytes));
                }
            });
        }
        Ok(TcpSession {
            bridge,
            seq: 0,
            memory: vec![0; 8 << 20],
            words: HashMap::new(),
            errors: HashMap::new(),
            replies: HashMap::new(),
            outputs: HashMap::new(),
            bye: None,
            inbox,
            chunk: 100_000,
        })
    }

    /// Opens a session that must come about.
    pub fn connect(port: u16) -> TcpSession {
        TcpSession::try_connect(port).unwrap()
    }

    /// Takes one frame if one comes within a few milliseconds.
    fn step(&mut self) {
        self.control.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        match self.control.peek(&mut [0; 1]) {
            // What follows sees the end of the connection.
            Ok(_) => {}
            Err(_) => return,
        }
        self.control.set_read_timeout(None).unwrap();
        let mut body = Vec::new();
        let Ok(Some(kind)) = recv_frame(self.control.as_fd(), &mut body, &mut Vec::new()) else {
            self.bye.get_or_insert_with(|| "the connection was closed".into());
            return;
        };
        match kind {
            frame::REPLY => {
                let (header, payload) = ReplyHeader::read_from_prefix(&body).unwrap();
                self.replies.insert(header.seq, (Status(header.status), payload.to_vec()));
            }
            frame::PROGRESS => {
                for update in body.chunks_exact(size_of::<ProgressUpdate>()) {
                    self.take_progress(ProgressUpdate::read_from_bytes(update).unwrap());
                }
            }
            frame::DATA_SENT => self.take_data(DataSent::read_from_bytes(&body).unwrap()),
            frame::BYE => self.bye = Some(String::from_utf8(body).unwrap()),
            // This side sends without waiting for grants, and blocks while the connections are full.
            frame::ALIVE | frame::DATA_GRANT | frame::DATA_PLACED | frame::RECEIVED => {}
            other => panic!("frame of kind {other}"),
        }
    }

    fn take_progress(&mut self, update: ProgressUpdate) {
        match update.kind {
            progress::STREAM => drop(self.words.insert(update.index, update.seq)),
            progress::ERROR if update.value == 0 => drop(self.errors.remove(&update.index)),
            progress::ERROR => {
                let error = (Status(update.value as u32), update.index >> 31 == 1);
                self.errors.entry(update.index & 0x7fff_ffff).or_insert(error);
            }
            _ => {}
        }
    }

    fn take_data(&mut self, sent: DataSent) {
        let range = self.outputs.remove(&sent.seq).expect("data of a command that has output, told once");
        let inbox = Arc::clone(&self.inbox);
        let received = |chunks: Option<&Vec<(u64, Vec<u8>)>>| {
            chunks.map_or(0, |c| c.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>())
        };
        until("the data has come", || received(inbox.lock().unwrap().get(&sent.seq)) >= sent.bytes);
        for (offset, bytes) in inbox.lock().unwrap().remove(&sent.seq).unwrap_or_default() {
            let at = (range.offset + offset) as usize;
            self.memory[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }
}

impl Session for TcpSession {
    fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64 {
        self.seq += 1;
        let seq = self.seq;
        let mut uses = Vec::new();
        if let Some(info) = ops::info(opcode) {
            let _ = (info.visit_data)(body, &mut |data| uses.push(data));
        }
        for data in &uses {
            if let DataUse::Out(range) = data {
                self.outputs.insert(seq, *range);
            }
        }
        // If the session is over, the caller's next look sees it.
        let _ = self.record(seq, opcode, slot, body);
        for (piece, data) in uses.iter().enumerate() {
            if let DataUse::In(range) | DataUse::Late(range) = data {
                let all = &self.memory[range.offset as usize..(range.offset + range.len) as usize];
                for (index, bytes) in all.chunks(self.chunk).enumerate() {
                    let offset = (index * self.chunk) as u64;
                    let header = DataHeader { seq, offset, piece: piece as u32, len: bytes.len() as u32 };
                    self.send_data(index, header, bytes).unwrap();
                }
            }
        }
        seq
    }

    fn wait(&mut self, _slot: u16, seq: u64) -> (Status, Vec<u8>) {
        let start = Instant::now();
        loop {
            if let Some(reply) = self.replies.remove(&seq) {
                return reply;
            }
            assert!(self.bye.is_none() && start.elapsed() < PATIENCE, "no answer: {:?}", self.bye);
            self.step();
        }
    }

    fn word(&mut self, stream: u32) -> u64 {
        self.step();
        self.words.get(&stream).copied().unwrap_or(0)
    }

    fn error(&mut self, context: u32) -> Option<(Status, bool)> {
        self.step();
        self.errors.get(&context).copied()
    }

    fn lost(&mut self) -> Option<String> {
        self.step();
        self.bye.clone()
    }

    fn arena(&mut self, offset: u64, bytes: &[u8]) -> HostRange {
        self.memory[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
        arena(offset, bytes.len() as u64)
    }

    fn read_arena(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.memory[offset as usize..offset as usize + len].to_vec()
    }
}
