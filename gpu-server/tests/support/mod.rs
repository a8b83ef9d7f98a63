//! A server of one's own, and clients that speak to it as a bridge does: one over a Unix socket with shared memory, one over TCP.

#![allow(dead_code)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_bridge::framing::{recv_frame, recv_struct, send_frame, send_message};
use host_bridge::memory::{ChannelView, Memories};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::Status;
use protocol::channel::{Geometry, Header, NO_SLOT, Producer, Record, RingMemory};
use protocol::data::{DataUse, HostRange, Place};
use protocol::device::{Extent, text};
use protocol::handle::*;
use protocol::link::*;
use protocol::ops::{self, Op, SyncOp, decode_reply};
use zerocopy::{FromBytes, IntoBytes};

/// The backend under test: software, unless `RGPU_TEST_BACKEND` names another.
pub fn backend() -> String {
    std::env::var("RGPU_TEST_BACKEND").unwrap_or_else(|_| "software".into())
}

/// The server under test: the one that was built with the tests, unless `RGPU_TEST_SERVER` names another.
pub fn binary() -> PathBuf {
    std::env::var_os("RGPU_TEST_SERVER")
        .map_or_else(|| env!("CARGO_BIN_EXE_rgpu-server").into(), PathBuf::from)
}

/// A running server; ended when dropped.
pub struct Server {
    pub child: Child,
    pub folder: tempfile::TempDir,
    pub port: u16,
    pub log: Arc<Mutex<String>>,
}

impl Server {
    /// Starts one with software devices, listening at both kinds of address.
    pub fn start(more: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut child = Command::new(binary())
            .arg(format!("--listen=unix:{}", folder.path().join("server.sock").display()))
            .arg(format!("--listen=tcp:127.0.0.1:{port}"))
            .arg(format!("--status-socket={}", folder.path().join("status").display()))
            .args([&format!("--backend={}", backend()), "--software-memory=256M"])
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, written) = (BufReader::new(child.stderr.take().unwrap()), Arc::clone(&log));
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let mut log = written.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        let server = Server { child, folder, port, log };
        until("the server answers", || server.try_status().is_some());
        server
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("server.sock")
    }

    fn try_status(&self) -> Option<serde_json::Value> {
        let mut text = String::new();
        UnixStream::connect(self.folder.path().join("status")).ok()?.read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    pub fn status(&self) -> serde_json::Value {
        self.try_status().expect("the status socket answers")
    }

    pub fn number(&self, field: &str) -> u64 {
        self.status()[field].as_u64().unwrap()
    }

    pub fn sessions(&self) -> usize {
        self.status()["sessions"].as_array().unwrap().len()
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("---- the server's log ----\n{}", self.log());
        }
    }
}

/// Waits until `done`. A test that waits in vain fails after four minutes.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(240);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn hello(purpose: u32, token: [u8; 16], index: u32) -> Hello {
    Hello {
        magic: MAGIC,
        version: protocol::VERSION,
        purpose,
        fingerprint: protocol::version::OURS.fingerprint(),
        token,
        index,
        pid: std::process::id(),
        slot_count: 64,
        wishes: 0,
        client: text("test"),
        program: text("a test"),
    }
}

pub fn greet(socket: impl AsFd, hello: &Hello) -> Welcome {
    send_message(socket.as_fd(), &[hello.as_bytes()], &[]).unwrap();
    recv_struct::<Welcome>(socket.as_fd(), &mut Vec::new()).unwrap().expect("a welcome")
}

/// A client that asked for a session over a Unix socket and may have to wait for it.
pub struct Waits {
    pub socket: UnixStream,
}

impl Waits {
    pub fn ask(path: &Path, wishes: u32) -> Waits {
        let socket = UnixStream::connect(path).unwrap();
        let hello = Hello { wishes: wishes | wish::MAY_WAIT, ..hello(purpose::LOCAL, [0; 16], 0) };
        send_message(socket.as_fd(), &[hello.as_bytes()], &[]).unwrap();
        Waits { socket }
    }

    /// The next thing that the server says.
    pub fn heard(&self) -> Welcome {
        recv_struct::<Welcome>(self.socket.as_fd(), &mut Vec::new()).unwrap().expect("a welcome")
    }

    /// Waits until the server says something else than "wait": `Err` with the reason of a refusal. With it, the places that it told of.
    pub fn served(self) -> (Result<Local, String>, Vec<u32>) {
        let mut places = Vec::new();
        loop {
            let welcome = self.heard();
            match protocol::device::Answer::from_number(welcome.status) {
                protocol::device::Answer::Waiting => places.push(welcome.ahead),
                protocol::device::Answer::Ok => return (Local::attach(self.socket), places),
                _ => return (Err(protocol::device::untext(&welcome.reason)), places),
            }
        }
    }
}

/// What the tests do with a session, whatever carries it.
pub trait Session {
    /// Appends a record.
    fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64;
    /// Waits for the answer in `slot`.
    fn wait(&mut self, slot: u16, seq: u64) -> (Status, Vec<u8>);
    /// The stream's progress word.
    fn word(&mut self, stream: u32) -> u64;
    /// The context's error word.
    fn error(&mut self, context: u32) -> Option<(Status, bool)>;
    /// Why the session was lost, once it is.
    fn lost(&mut self) -> Option<String>;
    /// A range of the client's memory that holds `bytes` at `offset`; for one that the server writes, what it held before.
    fn arena(&mut self, offset: u64, bytes: &[u8]) -> HostRange;
    /// What is in the client's memory.
    fn read_arena(&mut self, offset: u64, len: usize) -> Vec<u8>;

    fn push<'a, T: Op<'a>>(&mut self, op: &T) -> u64
    where
        Self: Sized,
    {
        let mut body = Vec::new();
        ops::encode(op, &mut body);
        self.push_raw(T::INFO.opcode, NO_SLOT, &body)
    }

    fn send<'a, T: SyncOp<'a>>(&mut self, slot: u16, op: &T) -> u64
    where
        Self: Sized,
    {
        let mut body = Vec::new();
        ops::encode(op, &mut body);
        self.push_raw(T::INFO.opcode, slot, &body)
    }

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
pub struct Local {
    pub socket: UnixStream,
    pub view: Arc<ChannelView>,
    producer: Producer<'static>,
    doorbell: EventFd,
}

impl Local {
    pub fn connect(path: &Path) -> Local {
        Local::try_connect(path).unwrap()
    }

    pub fn try_connect(path: &Path) -> Result<Local, String> {
        let socket = UnixStream::connect(path).unwrap();
        let welcome = greet(&socket, &hello(purpose::LOCAL, [0; 16], 0));
        if welcome.status != 0 {
            return Err(protocol::device::untext(&welcome.reason));
        }
        Local::attach(socket)
    }

    /// Goes on where a welcome has come.
    pub fn attach(socket: UnixStream) -> Result<Local, String> {
        let geometry = Geometry::with_arena(8 << 20);
        let size = geometry.size as u64;
        let file = memfd(size);
        let memory = Memory { addr: 0, size, file_offset: 0 };
        let memories = Memories::map(vec![(memory, file.try_clone().unwrap())]).unwrap();
        let extent = Extent { addr: 0, len: size };
        let at = memories.resolve(&[extent], size).unwrap().all()[0].at;
        // SAFETY: the first page of a mapping, all atomics.
        unsafe { at.cast::<Header>().as_ref() }.write_fields(&geometry.fields(std::process::id(), "a test"));
        let view = Arc::new(memories.view(&[extent], size).unwrap());
        let doorbell = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).unwrap();
        let attach = Attach { memory_count: 1, extent_count: 1, flags: ATTACH_FUTEX, reserved: 0, size };
        let parts = [attach.as_bytes(), memory.as_bytes(), extent.as_bytes()];
        send_frame(socket.as_fd(), frame::ATTACH, &parts, &[file.as_fd(), doorbell.as_fd()]).unwrap();
        // SAFETY: the words of the ring, inside the view, which lives as long as the producer in this structure.
        let words = unsafe {
            std::slice::from_raw_parts(
                view.base().add(geometry.ring_offset).as_ptr().cast(),
                geometry.ring_size / 8,
            )
        };
        // SAFETY: as above.
        let header: &'static Header = unsafe { view.base().cast::<Header>().as_ref() };
        let mut local =
            Local { socket, producer: Producer::new(header, RingMemory::new(words)), view, doorbell };
        let (status, reason) = local.ack();
        if status == 0 { Ok(local) } else { Err(reason) }
    }

    fn ack(&mut self) -> (u32, String) {
        let (kind, body) = self.frame();
        assert_eq!(kind, frame::ACK);
        let (ack, reason) = Ack::read_from_prefix(&body).unwrap();
        (ack.status, String::from_utf8(reason.to_vec()).unwrap())
    }

    pub fn frame(&mut self) -> (u32, Vec<u8>) {
        let mut body = Vec::new();
        let kind = recv_frame(self.socket.as_fd(), &mut body, &mut Vec::new()).unwrap().expect("a frame");
        (kind, body)
    }

    pub fn header(&self) -> &Header {
        self.view.header()
    }

    /// Writes the ring's tail, as a hostile client may.
    pub fn spoil_tail(&mut self) {
        // SAFETY: the word at offset 0x100 of the header.
        unsafe { self.view.base().add(0x100).cast::<u64>().write_volatile(0xdead_beef) };
        self.doorbell.write(1).unwrap();
    }

    pub fn add_region(&mut self, id: u32, file: &OwnedFd, size: u64) -> (u32, String) {
        let add = RegionAdd { region: id, extent_count: 1, flags: REGION_OWN_MEMORY, reserved: 0, size };
        let extent = Extent { addr: 0, len: size };
        send_frame(
            self.socket.as_fd(),
            frame::REGION_ADD,
            &[add.as_bytes(), extent.as_bytes()],
            &[file.as_fd()],
        )
        .unwrap();
        self.ack()
    }

    pub fn ask_to_remove_region(&mut self, id: u32) {
        send_frame(self.socket.as_fd(), frame::REGION_REMOVE, &[id.as_bytes()], &[]).unwrap();
    }

    pub fn remove_region(&mut self, id: u32) -> (u32, String) {
        self.ask_to_remove_region(id);
        self.ack()
    }

    pub fn released(&self) -> u64 {
        self.view.progress().released()
    }
}

pub fn memfd(size: u64) -> OwnedFd {
    let file = memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&file, size as i64).unwrap();
    file
}

impl Session for Local {
    fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64 {
        if slot != NO_SLOT
            && let Some(slot) = self.view.slot(slot)
        {
            slot.prepare();
        }
        let seq = loop {
            match self.producer.push(opcode, slot, body) {
                Ok(seq) => break seq,
                Err(_) => std::thread::yield_now(),
            }
        };
        if self.view.header().host_sleep.take() {
            self.doorbell.write(1).unwrap();
        }
        seq
    }

    fn wait(&mut self, slot: u16, _seq: u64) -> (Status, Vec<u8>) {
        let mut payload = Vec::new();
        let mut done = None;
        until("an answer comes", || {
            done = self.view.slot(slot).unwrap().poll(&mut payload);
            done.is_some()
        });
        (done.unwrap().status, payload)
    }

    fn word(&mut self, stream: u32) -> u64 {
        self.view.progress().stream(StreamId(stream)).unwrap().load(std::sync::atomic::Ordering::Acquire)
    }

    fn error(&mut self, context: u32) -> Option<(Status, bool)> {
        self.view
            .progress()
            .error(ContextId(context))
            .unwrap()
            .get()
            .map(|(status, sticky, _)| (status, sticky))
    }

    fn lost(&mut self) -> Option<String> {
        (self.header().state() == protocol::channel::State::Lost).then(|| self.header().reason())
    }

    fn arena(&mut self, offset: u64, bytes: &[u8]) -> HostRange {
        let (at, _) = self.view.arena(offset, bytes.len() as u64).unwrap();
        // SAFETY: inside the arena.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.as_ptr(), bytes.len()) };
        HostRange { place: Place::Arena, offset, len: bytes.len() as u64 }
    }

    fn read_arena(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let (at, _) = self.view.arena(offset, len as u64).unwrap();
        let mut bytes = vec![0; len];
        // SAFETY: inside the arena.
        unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), bytes.as_mut_ptr(), len) };
        bytes
    }
}

/// Chunks that have come, with their offsets, by command.
type Inbox = HashMap<u64, Vec<(u64, Vec<u8>)>>;

/// A session over TCP. Its "arena" is a vector here; data goes and comes as a bridge would carry it.
pub struct Tcp {
    pub control: TcpStream,
    pub token: [u8; 16],
    pub data: Vec<TcpStream>,
    seq: u64,
    memory: Vec<u8>,
    words: HashMap<u32, u64>,
    errors: HashMap<u32, (Status, bool)>,
    replies: HashMap<u64, (Status, Vec<u8>)>,
    outputs: HashMap<u64, HostRange>,
    bye: Option<String>,
    /// Data of each kind of connection, received aside.
    inbox: Arc<Mutex<Inbox>>,
    /// Send data in pieces of this many bytes, dealt over the connections.
    pub chunk: usize,
}

impl Tcp {
    pub fn connect(port: u16) -> Tcp {
        Tcp::try_connect(port).unwrap()
    }

    pub fn try_connect(port: u16) -> Result<Tcp, String> {
        let control = TcpStream::connect(("127.0.0.1", port)).unwrap();
        control.set_nodelay(true).unwrap();
        let welcome = greet(&control, &hello(purpose::CONTROL, [0; 16], 3));
        if welcome.status != 0 {
            return Err(protocol::device::untext(&welcome.reason));
        }
        let inbox: Arc<Mutex<Inbox>> = Arc::default();
        let mut data = Vec::new();
        for index in 0..welcome.data_connections {
            let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.set_nodelay(true).unwrap();
            assert_eq!(greet(&stream, &hello(purpose::DATA, welcome.token, index)).status, 0);
            let (mut reader, inbox) = (stream.try_clone().unwrap(), Arc::clone(&inbox));
            std::thread::spawn(move || {
                let mut header = [0; size_of::<DataHeader>()];
                while reader.read_exact(&mut header).is_ok() {
                    let header = DataHeader::read_from_bytes(&header).unwrap();
                    let mut bytes = vec![0; header.len as usize];
                    reader.read_exact(&mut bytes).unwrap();
                    inbox.lock().unwrap().entry(header.seq).or_default().push((header.offset, bytes));
                }
            });
            data.push(stream);
        }
        Ok(Tcp {
            control,
            token: welcome.token,
            data,
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

    /// Takes one frame, waiting for it no longer than a little.
    fn step(&mut self) {
        self.control.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let mut first = [0; 1];
        match self.control.peek(&mut first) {
            Ok(0) => {
                self.bye.get_or_insert_with(|| "the connection was closed".into());
                return;
            }
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
                    let update = ProgressUpdate::read_from_bytes(update).unwrap();
                    match update.kind {
                        progress::STREAM => {
                            self.words.insert(update.index, update.seq);
                        }
                        progress::ERROR if update.value == 0 => {
                            self.errors.remove(&update.index);
                        }
                        progress::ERROR => {
                            let error = (Status(update.value as u32), update.index >> 31 == 1);
                            self.errors.entry(update.index & 0x7fff_ffff).or_insert(error);
                        }
                        _ => {}
                    }
                }
            }
            frame::DATA_SENT => {
                let sent = DataSent::read_from_bytes(&body).unwrap();
                let range =
                    self.outputs.remove(&sent.seq).expect("data of a command that has output, told once");
                let inbox = Arc::clone(&self.inbox);
                let came = |chunks: Option<&Vec<(u64, Vec<u8>)>>| {
                    chunks.map_or(0, |c| c.iter().map(|(_, b)| b.len() as u64).sum::<u64>())
                };
                until("the data has come", || came(inbox.lock().unwrap().get(&sent.seq)) >= sent.bytes);
                for (offset, bytes) in inbox.lock().unwrap().remove(&sent.seq).unwrap_or_default() {
                    let at = (range.offset + offset) as usize;
                    self.memory[at..at + bytes.len()].copy_from_slice(&bytes);
                }
            }
            frame::BYE => self.bye = Some(String::from_utf8(body).unwrap()),
            // It sends as it likes, and waits in its connections where there is no room.
            frame::ALIVE | frame::DATA_GRANT | frame::DATA_PLACED => {}
            other => panic!("frame of kind {other}"),
        }
    }

    pub fn send_data(&mut self, lane: usize, header: DataHeader, bytes: &[u8]) {
        let lane = lane % self.data.len();
        let mut stream = &self.data[lane];
        stream.write_all(header.as_bytes()).unwrap();
        stream.write_all(bytes).unwrap();
    }
}

impl Session for Tcp {
    fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64 {
        self.seq += 1;
        let seq = self.seq;
        let size = (16 + body.len()).next_multiple_of(16);
        let mut bytes = Record { opcode, reply_slot: slot, seq }.to_bytes(size as u32).to_vec();
        bytes.extend_from_slice(body);
        bytes.resize(size, 0);
        let mut uses = Vec::new();
        if let Some(info) = ops::info(opcode) {
            let _ = (info.visit_data)(body, &mut |data| uses.push(data));
        }
        for data in &uses {
            if let DataUse::Out(range) = data {
                self.outputs.insert(seq, *range);
            }
        }
        // The session may be over: then this is seen by the caller's next look.
        let _ = send_frame(self.control.as_fd(), frame::COMMANDS, &[&bytes], &[]);
        for (piece, data) in uses.iter().enumerate() {
            if let DataUse::In(range) | DataUse::Late(range) = data {
                let all = self.memory[range.offset as usize..(range.offset + range.len) as usize].to_vec();
                for (i, bytes) in all.chunks(self.chunk).enumerate() {
                    let offset = (i * self.chunk) as u64;
                    self.send_data(
                        i,
                        DataHeader { seq, offset, piece: piece as u32, len: bytes.len() as u32 },
                        bytes,
                    );
                }
            }
        }
        seq
    }

    fn wait(&mut self, _slot: u16, seq: u64) -> (Status, Vec<u8>) {
        let deadline = Instant::now() + Duration::from_secs(240);
        loop {
            if let Some(reply) = self.replies.remove(&seq) {
                return reply;
            }
            assert!(self.bye.is_none() && Instant::now() < deadline, "no answer: {:?}", self.bye);
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
        HostRange { place: Place::Arena, offset, len: bytes.len() as u64 }
    }

    fn read_arena(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.memory[offset as usize..offset as usize + len].to_vec()
    }
}
