//! A session that loses its link again and again: the relay's rules against the endpoint's, over a link that
//! delays, and that is cut at any byte and between any two steps.
//!
//! Both ends are the real ones as far as they have no sockets: [`Machine`], [`Flows`], [`SendBuffer`] and
//! [`Journal`] here; [`Records`], [`Inbox`], [`ChunkReader`] there. One thread does everything, in the order
//! that a seed says. What must hold: every command arrives once, unchanged and in order; so does every
//! answer; no byte of data is wrong, missing or written twice; nothing is read from the client's memory after
//! it was released; and the session comes to its end, with nothing kept.
//!
//! Some of the data is compressed on its way. The bridge's process ends again and again as well, between any
//! two words that it writes into its [ledger](super::ledger), and another one goes on from there: with the
//! client's memory, the ledger and what was compressed, and nothing else.
//!
//! `RGPU_SURVIVAL_CUTS=1000000 cargo test -p rgpu-host-bridge survival -- --nocapture` runs until so many
//! cuts were made.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use protocol::Status;
use protocol::channel::{NO_SLOT, Producer, Record};
use protocol::data::{DataUse, HostIn, HostOut, HostRange, Place};
use protocol::fuzzing::Random;
use protocol::handle::StreamId;
use protocol::link::{DataAsk, DataGrant, DataHeader, DataSent, EAGER_PIECE, Received, frame};
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::{StreamMark, StreamSynchronize};
use protocol::ops::{self, Op};
use zerocopy::{FromZeros, IntoBytes};

use super::ledger::{self, Ended, Ledger};
use super::tests::{TestMemory, producer, push, session};
use super::{
    CacheUse, Carries, Chunk, EndReason, Flows, Machine, Room, Sent, ToHash, compressed_file, rooms,
};
use crate::bridge::state::SessionState;
use crate::endpoint::cache::tests::Memory;
use crate::endpoint::cache::{BlockCache, Blocks};
use crate::endpoint::incoming::{Bridge, ChunkReader, Grants, Inbox, Landing};
use crate::endpoint::stream::{Records, put_executed, put_reply};
use crate::framing::{FrameReader, SendBuffer, split_struct};
use crate::journal::{Journal, Piece};

mod succession;

/// Data connections.
const DATA: usize = 2;
const HEADER: usize = size_of::<DataHeader>();
/// Most commands of a session.
const COMMANDS: u64 = 60;
const LENGTHS: [u64; 8] = [0, 1, 24, 100, 999, 5000, 5000, 70_000];

/// The byte at `offset` of a command's data. That of every other pair of commands compresses.
fn byte(seq: u64, offset: u64) -> u8 {
    let of_offset = if seq % 4 < 2 { offset >> 5 } else { offset.wrapping_mul(7) ^ offset >> 8 };
    (seq.wrapping_mul(131) ^ of_offset) as u8
}

fn bytes(seq: u64, offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|offset| byte(seq, offset)).collect()
}

type Outbound = Sent<TestMemory>;

/// The bytes of a stream that are under way, in one direction.
#[derive(Default)]
struct Wire(VecDeque<u8>);

impl Wire {
    fn send(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        self.0.drain(..n).collect()
    }
}

/// A data connection's streams, the bridge's end.
#[derive(Default)]
struct NearData {
    journal: Journal<Outbound>,
    /// What is being compressed.
    preparing: Option<Chunk<TestMemory>>,
    /// What is being sent, and how much of it was.
    sending: Option<(Outbound, u64)>,
    received: u64,
    /// How much of that is whole chunks.
    whole: u64,
    told: u64,
    header: Vec<u8>,
    /// The chunk that comes: its command, the offset of its next byte, how many are left, and its length.
    chunk: Option<(u64, u32, u64, usize, u64)>,
}

/// The same, the endpoint's end.
#[derive(Default)]
struct FarData {
    journal: Journal<Arc<Vec<u8>>>,
    sending: Option<(Arc<Vec<u8>>, u64)>,
    received: u64,
    told: u64,
    reader: ChunkReader,
}

/// A command's data on its way into the device.
struct Land {
    seq: u64,
    state: Mutex<(Vec<u8>, Vec<bool>)>,
}

impl Landing for Land {
    fn room(&self, offset: u64, len: usize) -> Option<(NonNull<u8>, usize)> {
        let mut state = self.state.lock().unwrap();
        let at = offset as usize;
        // Now and then less than there is to come.
        let len = if len > 40 { len - 7 } else { len };
        NonNull::new(state.0[at..at + len].as_mut_ptr()).map(|at| (at, len))
    }

    fn landed(&self, offset: u64, len: usize) {
        let mut state = self.state.lock().unwrap();
        for at in offset as usize..offset as usize + len {
            assert!(
                !std::mem::replace(&mut state.1[at], true),
                "byte {at} of command {} landed twice",
                self.seq
            );
            assert_eq!(state.0[at], byte(self.seq, at as u64), "byte {at} of command {}", self.seq);
        }
    }

    fn lost(&self) {}
}

impl Land {
    fn is_complete(&self) -> bool {
        self.state.lock().unwrap().1.iter().all(|landed| *landed)
    }
}

/// What the inbox has the bridge told.
#[derive(Default)]
struct Told(Mutex<Vec<(u32, Vec<u8>)>>);

impl Bridge for Told {
    fn grant(&self, grant: DataGrant) {
        self.0.lock().unwrap().push((frame::DATA_GRANT, grant.as_bytes().to_vec()));
    }

    fn placed(&self, bytes: u64) {
        self.0.lock().unwrap().push((frame::DATA_PLACED, bytes.to_le_bytes().to_vec()));
    }

    fn wrong(&self, what: &str) {
        panic!("the bridge sent {what}");
    }
}

/// The endpoint.
struct Far {
    blocks: Arc<Blocks>,
    /// What the endpoint has of earlier sessions: the data of every other command.
    before: Memory,
    reader: FrameReader,
    records: Records,
    out: SendBuffer,
    received: u64,
    told: u64,
    data: Vec<FarData>,
    inbox: Arc<Inbox>,
    said: Arc<Told>,
    /// Commands that have arrived and were not executed.
    commands: VecDeque<(Record, Vec<u8>)>,
    arrived: u64,
    lands: BTreeMap<u64, Arc<Land>>,
    granting: BTreeMap<u64, (Grants, u64, u64)>,
    sends: VecDeque<ToSend>,
}

/// Data that the endpoint is to send for a command.
enum ToSend {
    Part {
        seq: u64,
        at: u64,
        len: usize,
    },
    /// All `len` bytes were sent.
    Done {
        seq: u64,
        len: u64,
    },
}

struct Model<'c> {
    session: &'c SessionState,
    /// Where the ledger is.
    file: OwnedFd,
    /// Where what was compressed is.
    compressed_file: OwnedFd,
    rooms: Vec<Arc<Room>>,
    cache: CacheUse,
    producer: Producer<'c>,
    machine: Machine<'c, Flows<TestMemory>>,
    out: SendBuffer,
    told: u64,
    data: Vec<NearData>,
    /// Blocks whose hashes are being computed.
    hashing: VecDeque<ToHash<TestMemory>>,
    /// Bytes that were not sent because the server had them.
    known: u64,
    /// Bytes that were compressed; one of so many chunks is.
    compressed: u64,
    compresses: usize,
    far: Far,
    /// Control stream first: to the server, and to the bridge.
    there: Vec<Wire>,
    back: Vec<Wire>,
    /// What the client appended.
    appended: Vec<(u16, Vec<u8>)>,
    expected: BTreeMap<u64, u64>,
    written: HashMap<u64, Vec<bool>>,
    slots: BTreeMap<u16, u64>,
    answers: u64,
    awaited: u64,
    random: Random,
    cuts: u64,
    /// How often another process has gone on.
    crashes: u64,
    /// How often one has found that it cannot say whether the client has got something.
    unknown: bool,
    /// The link is cut when so many more bytes were delivered.
    cut_in: Option<u64>,
}

fn arena() -> Option<TestMemory> {
    Some(TestMemory::new(64 << 20, false))
}

impl<'c> Model<'c> {
    fn new(session: &'c SessionState, seed: u64) -> Model<'c> {
        let (file, compressed_file) = (ledger::file().unwrap(), compressed_file(DATA).unwrap());
        let rooms = rooms(&compressed_file, DATA).unwrap();
        let cache = if seed.is_multiple_of(2) { CacheUse::Always } else { CacheUse::Never };
        let schedule = Flows::new(DATA, 0, cache).noted();
        let mut machine = Machine::new(session, arena(), schedule, Duration::from_secs(60));
        machine.note_in(Ledger::begin(&file, DATA).unwrap());
        let (inbox, blocks) = (Inbox::new(0), Blocks::new());
        inbox.knows(Arc::clone(&blocks));
        let said = Arc::new(Told::default());
        let weak: Weak<Told> = Arc::downgrade(&said);
        inbox.tell(weak);
        let wires = || (0..=DATA).map(|_| Wire::default()).collect();
        let far = Far {
            blocks,
            before: Memory::default(),
            reader: FrameReader::new(),
            records: Records::default(),
            out: SendBuffer::keeping(),
            received: 0,
            told: 0,
            data: (0..DATA).map(|_| FarData::default()).collect(),
            inbox,
            said,
            commands: VecDeque::new(),
            arrived: 0,
            lands: BTreeMap::new(),
            granting: BTreeMap::new(),
            sends: VecDeque::new(),
        };
        Model {
            session,
            file,
            compressed_file,
            rooms,
            cache,
            producer: producer(session),
            machine,
            out: SendBuffer::keeping(),
            told: 0,
            data: (0..DATA).map(|_| NearData::default()).collect(),
            hashing: VecDeque::new(),
            known: 0,
            compressed: 0,
            compresses: 2,
            far,
            there: wires(),
            back: wires(),
            appended: Vec::new(),
            expected: BTreeMap::new(),
            written: HashMap::new(),
            slots: BTreeMap::new(),
            answers: 0,
            awaited: 0,
            random: Random(seed),
            cuts: 0,
            crashes: 0,
            unknown: false,
            cut_in: None,
        }
    }

    fn append<'a, T: Op<'a>>(&mut self, op: &T, slot: u16) -> u64 {
        let seq = push(&mut self.producer, op, slot);
        let mut body = Vec::new();
        ops::encode(op, &mut body);
        body.resize(body.len().next_multiple_of(16), 0);
        self.appended.push((T::INFO.opcode, body));
        seq
    }

    /// The client appends a command.
    fn command(&mut self) {
        if self.producer.last_seq() >= COMMANDS {
            return;
        }
        let stream = StreamId(self.random.below(3) as u32);
        let len = match self.random.below(150) {
            0 => EAGER_PIECE + 13,
            _ => self.random.pick(&LENGTHS),
        };
        let range = HostRange { place: Place::Arena, offset: 0, len };
        match self.random.below(8) {
            0 | 1 => {
                let seq = self.append(&MemcpyHtoD { stream, dst: 0, src: HostIn::Range(range) }, NO_SLOT);
                if seq.is_multiple_of(2) {
                    self.far.before.keep(&bytes(seq, 0, len as usize));
                }
            }
            2 => drop(self.append(&MemcpyHtoD { stream, dst: 0, src: HostIn::Late(range) }, NO_SLOT)),
            3 => {
                let inline = bytes(1, 2, self.random.below(300));
                self.append(&MemcpyHtoD { stream, dst: 0, src: HostIn::Inline(&inline) }, NO_SLOT);
            }
            4 | 5 => {
                let seq = self.append(&MemcpyDtoH { stream, src: 0, dst: HostOut(range) }, NO_SLOT);
                self.expected.insert(seq, len);
                self.written.insert(seq, vec![false; len as usize]);
            }
            6 => drop(self.append(&StreamMark { stream }, NO_SLOT)),
            _ => {
                let slot = self.random.below(8) as u16;
                if !self.slots.contains_key(&slot) {
                    self.session.channel.view.slot(slot).unwrap().prepare();
                    let seq = self.append(&StreamSynchronize { stream }, slot);
                    self.slots.insert(slot, seq);
                    self.awaited += 1;
                }
            }
        }
    }

    /// The bridge hands bytes of stream `number` to its connection.
    fn send_there(&mut self, number: usize) -> bool {
        let Some(index) = number.checked_sub(1) else {
            let untold = self.machine.control_taken() - self.told;
            // Acknowledgements of acknowledgements would never end.
            if untold > 200 && self.random.below(3) == 0 {
                self.told += untold;
                let received = Received { stream: 0, reserved: 0, bytes: self.told };
                assert!(self.machine.frame(&mut self.out, frame::RECEIVED, received.as_bytes()));
            }
            self.machine.commit();
            let n = self.some(self.out.unsent().len());
            self.there[0].send(&self.out.unsent()[..n]);
            self.out.advance(n);
            return n > 0;
        };
        let mut hashed = false;
        while let Some(task) = self.machine.schedule().next_to_hash() {
            self.hashing.push_back(task);
        }
        if self.random.below(3) > 0
            && let Some(mut task) = self.hashing.pop_front()
        {
            let at = task.offset;
            task.hash = *blake3::hash(&bytes(task.seq, at, task.span.len() as usize)).as_bytes();
            self.machine.schedule().hashed(task);
            hashed = true;
        }
        let data = &mut self.data[index];
        let mut waits = false;
        if let Some(chunk) = &data.preparing {
            waits = self.random.below(3) == 0;
            if !waits {
                let all = bytes(chunk.seq, chunk.at, chunk.len as usize);
                let fewer = lz4_flex::block::compress(&all);
                let kept = if fewer.len() < all.len() { self.rooms[index].keep(&fewer) } else { None };
                self.compressed += if kept.is_some() { all.len() as u64 } else { 0 };
                let what = match (kept, data.preparing.take()) {
                    (Some(kept), Some(chunk)) => Outbound::Compressed(chunk, kept),
                    (None, Some(chunk)) => Outbound::Chunk(chunk),
                    (_, None) => unreachable!(),
                };
                self.machine.sending(index, &what);
                data.journal.push(what);
            }
        }
        if data.sending.is_none() {
            if data.journal.next().is_none() && data.preparing.is_none() {
                if data.whole > data.told + 200 && self.random.below(2) == 0 {
                    data.told = data.whole;
                    let what = Outbound::received(data.whole);
                    self.machine.sending(index, &what);
                    data.journal.push(what);
                } else if let Some(chunk) = self.machine.schedule().next_chunk() {
                    self.known += if chunk.carries == Carries::Nothing { chunk.len.into() } else { 0 };
                    if chunk.sends() > 0 && self.random.below(self.compresses) == 0 {
                        self.machine.preparing(index, &chunk);
                        data.preparing = Some(chunk);
                        return true;
                    }
                    let what = Outbound::Chunk(chunk);
                    self.machine.sending(index, &what);
                    data.journal.push(what);
                }
            }
            data.sending = data.journal.take();
        }
        let Some((what, sent)) = data.sending.take() else { return hashed || waits };
        if let Some(chunk) = what.chunk() {
            // What was released is the client's: it may hold anything now.
            let gone = self.session.channel.view.progress().released() >= chunk.seq;
            assert!(!gone || chunk.sends() == 0, "command {} is sent after it was released", chunk.seq);
        }
        let whole = what.stream_len() as usize;
        let head = what.head().as_bytes().to_vec();
        let (at, left) = (sent as usize, whole - sent as usize);
        let n = self.random.below(left + 1).max(1).min(left);
        let of_head = n.min(head.len().saturating_sub(at));
        let begin = at.min(head.len());
        self.there[number].send(&head[begin..begin + of_head]);
        let of_data = (at + of_head).saturating_sub(head.len());
        match &what {
            Outbound::Chunk(chunk) => {
                self.there[number].send(&bytes(chunk.seq, chunk.at + of_data as u64, n - of_head));
            }
            Outbound::Compressed(_, kept) => {
                let mut copy = vec![0; n - of_head];
                kept.bytes().part(of_data, copy.len()).read(&mut copy);
                self.there[number].send(&copy);
            }
            Outbound::Plain(..) => {}
        }
        let sent = sent + n as u64;
        if sent < whole as u64 {
            self.data[index].sending = Some((what, sent));
        }
        true
    }

    /// The endpoint hands bytes of stream `number` to its connection.
    fn send_back(&mut self, number: usize) -> bool {
        let Some(index) = number.checked_sub(1) else {
            let mut worked = false;
            if self.random.below(3) > 0 {
                let said = &self.far.said;
                worked = self.far.blocks.work(&self.far.before, |known| {
                    said.0.lock().unwrap().push((frame::DATA_KNOWN, known.as_bytes().to_vec()));
                });
            }
            let said = std::mem::take(&mut *self.far.said.0.lock().unwrap());
            said.iter().for_each(|(kind, body)| self.far.out.frame(*kind, body));
            if self.random.below(3) == 0 {
                self.acknowledge_back(200);
            }
            let n = self.some(self.far.out.unsent().len());
            self.back[0].send(&self.far.out.unsent()[..n]);
            self.far.out.advance(n);
            return worked || n > 0;
        };
        let data = &mut self.far.data[index];
        if data.sending.is_none() {
            data.sending = data.journal.take();
        }
        let Some((piece, sent)) = data.sending.take() else { return false };
        let left = &piece[sent as usize..];
        let n = self.random.below(left.len() + 1).max(1).min(left.len());
        self.back[number].send(&left[..n]);
        if n < left.len() {
            data.sending = Some((piece, sent + n as u64));
        }
        true
    }

    /// The endpoint acknowledges what has come of streams of which that is more than `least` bytes.
    fn acknowledge_back(&mut self, least: u64) {
        let far = &mut self.far;
        let counts = std::iter::once((&mut far.told, far.received))
            .chain(far.data.iter_mut().map(|data| (&mut data.told, data.received)));
        for (stream, (told, bytes)) in (0..).zip(counts) {
            if bytes > *told + least {
                *told = bytes;
                far.out.frame(frame::RECEIVED, Received { stream, reserved: 0, bytes }.as_bytes());
            }
        }
    }

    /// Some of `n` bytes, often all.
    fn some(&mut self, n: usize) -> usize {
        if self.random.below(2) == 0 { n } else { self.random.below(n + 1) }
    }

    /// How many of the bytes under way are delivered now. A cut that is due ends the delivery.
    fn deliverable(&mut self, under_way: usize) -> usize {
        let n = self.some(under_way);
        let n = self.cut_in.map_or(n, |left| n.min(left as usize));
        if let Some(left) = &mut self.cut_in {
            *left -= n as u64;
        }
        n
    }

    fn deliver_there(&mut self, number: usize) -> bool {
        let mut n = self.deliverable(self.there[number].0.len());
        let any = n > 0;
        let Some(index) = number.checked_sub(1) else {
            let bytes = self.there[0].take(n);
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                self.far.received += self.far.reader.fill(&mut rest).unwrap() as u64;
            }
            self.far_frames();
            return any;
        };
        loop {
            let far = &mut self.far;
            let data = &mut far.data[index];
            // Data without a place waits in its connection. What was decompressed and had no place may have
            // one now.
            let Some((at, len)) = data.reader.room(&far.inbox, false).unwrap() else { break };
            if n == 0 {
                break;
            }
            let now = self.there[number].take(len.min(n));
            // SAFETY: `room` has just given `len` writable bytes to this thread alone.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), at.as_ptr(), now.len()) };
            n -= now.len();
            data.received += now.len() as u64;
            if let Some(upto) = data.reader.filled(&far.inbox, now.len()).unwrap() {
                data.journal.acknowledge(upto, drop).unwrap();
            }
        }
        any
    }

    fn far_frames(&mut self) {
        let far = &mut self.far;
        let mut body = Vec::new();
        loop {
            while let Some(record) = far.records.take(&mut body).unwrap() {
                let (opcode, sent) = &self.appended[far.arrived as usize];
                far.arrived += 1;
                assert_eq!((record.seq, record.opcode, &body), (far.arrived, *opcode, sent));
                far.commands.push_back((record, body.clone()));
            }
            let Some((kind, frame)) = far.reader.next_frame().unwrap() else { break };
            match kind {
                frame::COMMANDS => far.records.refill().extend_from_slice(frame),
                frame::DATA_ASK => {
                    let (ask, _) = split_struct::<DataAsk>(frame).unwrap();
                    far.inbox.ask((ask.seq, ask.piece)).unwrap();
                }
                frame::RECEIVED => {
                    let (Received { stream, bytes, .. }, _) = split_struct(frame).unwrap();
                    assert_eq!(stream, 0);
                    far.out.acknowledge(bytes).unwrap();
                }
                // The tests' memory has keys, which only `verbs` needs.
                frame::REGION_KEY => {}
                kind => panic!("a frame of kind {kind}"),
            }
        }
    }

    fn deliver_back(&mut self, number: usize) -> bool {
        let n = self.deliverable(self.back[number].0.len());
        let came = self.back[number].take(n);
        let mut rest = came.as_slice();
        let Some(index) = number.checked_sub(1) else {
            while !rest.is_empty() {
                self.machine.read(&mut rest).unwrap();
            }
            self.near_frames();
            return n > 0;
        };
        while !rest.is_empty() {
            let data = &mut self.data[index];
            let Some((seq, piece, offset, left, len)) = data.chunk.take() else {
                let more = (HEADER - data.header.len()).min(rest.len());
                data.header.extend_from_slice(&rest[..more]);
                rest = &rest[more..];
                data.received += more as u64;
                if data.header.len() == HEADER {
                    let mut header = DataHeader::new_zeroed();
                    header.as_mut_bytes().copy_from_slice(&std::mem::take(&mut data.header));
                    let DataHeader { seq, offset, piece, len } = header;
                    self.machine.target(seq, piece, offset, len.into()).unwrap();
                    data.chunk = Some((seq, piece, offset, len as usize, len.into()));
                }
                continue;
            };
            let now = left.min(rest.len());
            let written = self.written.get_mut(&seq).unwrap();
            for (i, came) in rest[..now].iter().enumerate() {
                let at = offset + i as u64;
                assert_eq!(*came, byte(seq, at), "byte {at} of command {seq} to the client");
                let twice = std::mem::replace(&mut written[at as usize], true);
                // Another process may have written the chunk that comes.
                assert!(!twice || self.crashes > 0, "byte {at} of command {seq} twice");
            }
            rest = &rest[now..];
            data.received += now as u64;
            self.machine.received(seq, now as u64).unwrap();
            if now < left {
                data.chunk = Some((seq, piece, offset + now as u64, left - now, len));
            } else {
                data.whole = data.received;
                self.machine.chunk_came(index, data.received, seq, len);
            }
        }
        self.near_frames();
        n > 0
    }

    fn near_frames(&mut self) {
        match self.machine.take_frames() {
            Err(EndReason::Here(what)) if self.crashes > 0 && what.starts_with("it is not known whether") => {
                self.unknown = true;
                std::panic::resume_unwind(Box::new(Ended));
            }
            taken => taken.unwrap(),
        }
        for Received { stream, bytes, .. } in self.machine.take_acknowledged() {
            match (stream as usize).checked_sub(1) {
                None => self.machine.frames_arrived(&mut self.out, bytes).unwrap(),
                Some(index) => {
                    let machine = &mut self.machine;
                    self.data[index].journal.acknowledge(bytes, |what| freed(machine, index, &what)).unwrap();
                }
            }
        }
        self.machine.finish_turn();
    }

    /// The endpoint executes its next command.
    fn execute(&mut self) -> bool {
        let far = &mut self.far;
        let Some((record, body)) = far.commands.pop_front() else { return false };
        let seq = record.seq;
        let mut uses = Vec::new();
        (ops::info(record.opcode).unwrap().visit_data)(&body, &mut |data| uses.push(data)).unwrap();
        for (piece, data) in (0..).zip(uses) {
            match data {
                DataUse::In(range) | DataUse::Late(range) => {
                    let late = matches!(data, DataUse::Late(_));
                    let incoming = far.inbox.incoming(seq, piece, range.len);
                    if range.len > 0 && self.random.below(12) == 0 {
                        // A command that fails does not want its data.
                        drop(if late { incoming.late() } else { incoming });
                        continue;
                    }
                    let len = range.len as usize;
                    let land = Arc::new(Land { seq, state: Mutex::new((vec![0; len], vec![false; len])) });
                    far.lands.insert(seq, Arc::clone(&land));
                    let window = self.random.number() % (range.len + 1);
                    let incoming = if late { incoming.late() } else { incoming };
                    let grants = incoming.land(land, window);
                    let granted = if late { 0 } else { window };
                    far.granting.insert(seq, (grants, granted, range.len));
                }
                DataUse::Out(range) => {
                    let all = if self.random.below(8) == 0 { range.len / 2 } else { range.len };
                    let mut at = 0;
                    while at < all {
                        let now = (all - at).min(1 + self.random.number() % 30_000);
                        far.sends.push_back(ToSend::Part { seq, at, len: now as usize });
                        at += now;
                    }
                    far.sends.push_back(ToSend::Done { seq, len: all });
                }
            }
        }
        far.inbox.executed(seq);
        // Behind the data of commands before it: what is said of it depends on them.
        while self.send_data() {}
        let far = &mut self.far;
        put_executed(far.out.end(), seq);
        if record.reply_slot != NO_SLOT {
            put_reply(far.out.end(), seq, record.reply_slot, Status::SUCCESS, &seq.to_le_bytes());
        }
        true
    }

    fn send_data(&mut self) -> bool {
        let far = &mut self.far;
        let Some(next) = far.sends.pop_front() else { return false };
        match next {
            ToSend::Part { seq, at, len } => {
                let header = DataHeader { seq, offset: at, piece: 0, len: len as u32 };
                let piece = [header.as_bytes(), &bytes(seq, at, len)].concat();
                far.data[self.random.below(DATA)].journal.push(Arc::new(piece));
            }
            ToSend::Done { seq, len } => {
                far.out.frame(frame::DATA_SENT, DataSent { seq, bytes: len }.as_bytes());
            }
        }
        true
    }

    fn grant(&mut self, all: bool) -> bool {
        let keys: Vec<u64> = self.far.granting.keys().copied().collect();
        for seq in &keys {
            let Some((grants, granted, len)) = self.far.granting.get_mut(seq) else { continue };
            *granted = if all { *len } else { (*granted + 1 + self.random.number() % 20_000).min(*len) };
            grants.upto(*granted);
            if *granted == *len {
                self.far.granting.remove(seq);
            }
        }
        !keys.is_empty()
    }

    /// The link is lost with everything on it, and there is another.
    fn cut(&mut self) {
        self.cuts += 1;
        self.there.iter_mut().chain(&mut self.back).for_each(|wire| wire.0.clear());
        self.far.out.resume(self.machine.restart_frames()).unwrap();
        self.machine.frames_resume(&mut self.out, self.far.received).unwrap();
        (self.told, self.far.told) = (self.machine.control_taken(), self.far.received);
        for (index, (near, far)) in self.data.iter_mut().zip(&mut self.far.data).enumerate() {
            (near.sending, far.sending) = (None, None);
            let machine = &mut self.machine;
            near.journal.resume(far.received, |what| freed(machine, index, &what)).unwrap();
            far.journal.resume(near.received, drop).unwrap();
            (near.told, far.told) = (near.received, far.received);
        }
        self.machine.finish_turn();
    }

    fn step(&mut self, what: usize) -> bool {
        let number = self.random.below(1 + DATA);
        let worked = match what {
            0 => self.machine.take_records(&mut self.out).unwrap(),
            1 => self.send_there(number),
            2 => self.send_back(number),
            3 => self.deliver_there(number),
            4 => self.deliver_back(number),
            5 => self.execute(),
            6 => self.grant(false),
            _ => return false,
        };
        self.machine.finish_turn();
        if self.cut_in == Some(0) {
            self.cut_in = None;
            self.cut();
        }
        self.check();
        worked
    }

    /// What holds at any time.
    fn check(&mut self) {
        let progress = self.session.channel.view.progress();
        let executed = progress.executed();
        for (seq, len) in self.expected.range(..=executed) {
            let written = self.written[seq].iter().filter(|written| **written).count() as u64;
            assert!(written == *len || written == *len / 2, "executed {executed} before data of {seq}");
        }
        self.expected.retain(|seq, _| *seq > executed);
        let mut payload = Vec::new();
        let view = &self.session.channel.view;
        let answers = &mut self.answers;
        self.slots.retain(|slot, seq| {
            payload.clear();
            let done = view.slot(*slot).unwrap().poll(&mut payload);
            assert!(done.is_none() || payload == seq.to_le_bytes());
            *answers += u64::from(done.is_some());
            done.is_none()
        });
    }

    /// Lets everything come to its end.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 12 {
            let mut worked = false;
            for what in 0..7 {
                // A step chooses its stream at random, and may choose to do nothing.
                for _ in 0..8 {
                    worked |= self.step(what);
                }
            }
            worked |= self.grant(true);
            let kept: u64 = self.data.iter().map(|data| data.journal.kept()).sum();
            if kept > 0 || self.session.header().has_records() {
                self.acknowledge_back(0);
            }
            let idle = self.there.iter().chain(&self.back).all(|wire| wire.0.is_empty());
            quiet = if worked || !idle { 0 } else { quiet + 1 };
        }
        let last = self.producer.last_seq();
        let progress = self.session.channel.view.progress();
        assert_eq!((self.far.arrived, progress.executed(), progress.released()), (last, last, last));
        assert!(self.slots.is_empty() && self.expected.is_empty());
        assert_eq!(self.answers, self.awaited);
        for (seq, land) in &self.far.lands {
            assert!(land.is_complete(), "data of command {seq} is missing");
        }
        assert!(!self.session.header().has_records(), "what the server has leaves the ring");
        let kept: u64 = self.data.iter().map(|data| data.journal.kept()).sum();
        assert_eq!(kept, 0, "the bridge keeps data that the server has");
    }
}

/// Nobody has to send it any more.
fn freed(machine: &mut Machine<'_, Flows<TestMemory>>, index: usize, what: &Outbound) {
    machine.arrived(index, what.stream_len());
    if let Some(chunk) = what.chunk()
        && !matches!(chunk.carries, Carries::Hash(_))
    {
        machine.sent(chunk.seq, chunk.len.into());
    }
}

/// A session whose link is cut about every `every` steps. Gives the number of cuts, of bytes that the server
/// knew, and of bytes that were compressed.
fn cut_often(seed: u64, every: usize) -> [u64; 3] {
    let (session, _) = session();
    let mut model = Model::new(&session, seed);
    while model.producer.last_seq() < COMMANDS || model.random.below(300) > 0 {
        match model.random.below(9) {
            7 | 8 => model.command(),
            what => drop(model.step(what)),
        }
        if model.random.below(every) == 0 {
            // At once, or within bytes of what comes next.
            match model.random.below(3) {
                0 => model.cut(),
                _ => model.cut_in = Some(1 + model.random.number() % 200),
            }
        }
    }
    model.settle();
    [model.cuts, model.known, model.compressed]
}

#[test]
fn sessions_survive_any_number_of_cuts_anywhere() {
    let wanted = std::env::var("RGPU_SURVIVAL_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(2_000);
    let first = std::env::var("RGPU_SURVIVAL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (mut cuts, mut known, mut compressed, mut sessions) = (0, 0, 0, 0);
    for seed in first.. {
        let every = [2, 10, 50, 300][seed as usize / 2 % 4];
        let [more, knew, fewer] = cut_often(seed, every);
        (cuts, known, compressed) = (cuts + more, known + knew, compressed + fewer);
        sessions += 1;
        if cuts >= wanted {
            break;
        }
    }
    println!(
        "{sessions} sessions survived {cuts} cuts of their links; {known} bytes were not sent, {compressed} compressed"
    );
    assert!(known > 0 && compressed > 0);
}

#[test]
fn a_session_survives_a_cut_at_every_single_byte() {
    let (mut cuts, mut compressed) = (0, 0);
    for byte in 1.. {
        let (session, _) = session();
        let mut model = Model::new(&session, 7);
        (model.cut_in, model.compresses) = (Some(byte), 1);
        let range = HostRange { place: Place::Arena, offset: 0, len: 300 };
        let stream = StreamId(0);
        model.append(&MemcpyHtoD { stream, dst: 0, src: HostIn::Range(range) }, NO_SLOT);
        model.append(&MemcpyHtoD { stream, dst: 0, src: HostIn::Late(range) }, NO_SLOT);
        let seq = model.append(&MemcpyDtoH { stream, src: 0, dst: HostOut(range) }, NO_SLOT);
        model.expected.insert(seq, 300);
        model.written.insert(seq, vec![false; 300]);
        model.session.channel.view.slot(3).unwrap().prepare();
        let seq = model.append(&StreamSynchronize { stream }, 3);
        model.slots.insert(3, seq);
        model.awaited = 1;
        model.settle();
        if model.cuts == 0 {
            break;
        }
        cuts += model.cuts;
        compressed += u32::from(model.compressed > 0);
    }
    println!("a session survived a cut at each of its {cuts} bytes; {compressed} times some were compressed");
    assert!(cuts > 1000 && compressed > 500, "{cuts} {compressed}");
}
