//! A session between a client and a server that both do whatever they like, in whatever order a fuzzer says.
//!
//! [`relay_any`] drives a [`Machine`] as a carrier does: it keeps the carrier's part of the contract, and
//! writes anything into the client's memory and into the server's stream. After every step it checks what
//! must hold whatever they do:
//! - data and answers lie inside the memory that the client has registered, and nothing is written where the
//!   relay writes nothing;
//! - data goes once, in order, and never more of it than the command names;
//! - what is kept for commands, frames and regions stays below its limits;
//! - a session that ends has a reason, which its client reads, and is either side's fault or as asked, never
//!   this host's.

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::uio::{pread, pwrite};
use protocol::channel::{
    Geometry, HEADER_SIZE, MAX_RECORD, NO_SLOT, PROGRESS_SIZE, RECORD_HEADER, Record, SLOT_SIZE, State,
};
use protocol::device::Extent;
use protocol::fuzzing::Steps;
use protocol::link::{DataHeader, GRANTED_SLOTS, Memory, SLOT_DATA, frame};
use protocol::ops::{self, Class, OpInfo};
use zerocopy::IntoBytes;

use super::ledger::{Ledger, file as ledger_file};
use super::machine::Machine;
use super::mailbox::Message;
use super::regions::{ClientMemory, MemoryKey, Span};
use super::schedule::Schedule;
use super::{CacheUse, Carries, EndReason, Flows, Sent, Slots, ToHash};
use crate::bridge::RegionError;
use crate::bridge::state::{ChannelMemory, SessionState, Wakeup};
use crate::framing::SendBuffer;
use crate::memory::Memories;

/// Steps of one program.
const STEPS: usize = 400;
const SILENCE: Duration = Duration::from_secs(30);
const CONNECTIONS: usize = 3;
const RING: usize = 4 * MAX_RECORD;
const SLOTS: usize = 8;
const ARENA: usize = 4096;
/// Bytes of the control stream that are kept, or wait, when a record is taken; and what a record can add.
const MOST_OUT: usize = (4 << 20) + (256 << 10) + 4 * MAX_RECORD;
/// Where the client's cursor lies in the header.
const TAIL: usize = 0x100;
/// Slots of a server over queue pairs, and their size.
const SERVER_SLOTS: u32 = GRANTED_SLOTS + 6;
const SERVER_SLOT: u32 = SLOT_DATA + (64 << 10);

/// Memory of a client of which only the size matters.
#[derive(Debug)]
pub(super) struct AnyMemory {
    size: u64,
    read_only: bool,
    /// How many ranges the server may fill.
    admitted: AtomicU64,
    /// How often it was given a key.
    keys: AtomicU32,
    /// Nobody can be admitted, as there is no link.
    #[cfg(test)]
    pub(super) refuses: std::sync::atomic::AtomicBool,
}

impl AnyMemory {
    pub(super) fn new(size: u64, read_only: bool) -> AnyMemory {
        AnyMemory {
            size,
            read_only,
            admitted: AtomicU64::new(0),
            keys: AtomicU32::new(0),
            #[cfg(test)]
            refuses: Default::default(),
        }
    }
}

impl ClientMemory for AnyMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn admit(&self, offset: u64, len: u64) -> Result<Option<MemoryKey>, EndReason> {
        assert!(!self.read_only && offset + len <= self.size, "the server is to fill what it must not");
        #[cfg(test)]
        if self.refuses.load(Ordering::Relaxed) {
            return Err(EndReason::Gone("the port has no address".into()));
        }
        let first = self.admitted.fetch_add(1, Ordering::Relaxed) == 0;
        self.keys.fetch_add(first.into(), Ordering::Relaxed);
        Ok(first.then(|| self.key()).flatten())
    }

    fn release(&self) {
        assert!(self.admitted.fetch_sub(1, Ordering::Relaxed) > 0, "nothing was admitted");
    }

    fn key(&self) -> Option<MemoryKey> {
        let some = self.admitted.load(Ordering::Relaxed) > 0;
        let key = 6 + self.keys.load(Ordering::Relaxed);
        some.then_some(MemoryKey { address: 0, size: self.size, key })
    }
}

impl Drop for AnyMemory {
    fn drop(&mut self) {
        assert_eq!(*self.admitted.get_mut(), 0, "memory goes that the server may write");
    }
}

/// Data that a schedule has given out.
#[derive(Debug)]
struct Moving {
    header: DataHeader,
    hash: Option<[u8; 32]>,
    /// Bytes of the command's data that count as sent when it is done.
    len: u64,
    span: Span<AnyMemory>,
    /// Where in the piece.
    at: u64,
    lane: usize,
    /// The number of the write, or what the schedule wants back.
    token: u64,
    chunk: Option<super::flows::Chunk<AnyMemory>>,
}

/// Both schedules, as a carrier uses them.
trait AnySchedule: Schedule<Memory = AnyMemory> {
    fn next(&mut self) -> Option<Moving>;
    fn done(&mut self, moving: &Moving);
    fn next_to_hash(&mut self) -> Option<ToHash<AnyMemory>> {
        None
    }
    fn hashed(&mut self, _done: ToHash<AnyMemory>) {}
}

impl AnySchedule for Flows<AnyMemory> {
    fn next(&mut self) -> Option<Moving> {
        let more = self.has_chunks();
        let _ = self.peek();
        let chunk = self.next_chunk()?;
        assert!(more, "a schedule without chunks gives one");
        let hash = if let Carries::Hash(hash) = chunk.carries { Some(hash) } else { None };
        let len = if hash.is_some() { 0 } else { chunk.len.into() };
        let span = chunk.span.clone();
        Some(Moving {
            header: chunk.header(),
            hash,
            len,
            span,
            at: chunk.at,
            lane: 0,
            token: 0,
            chunk: Some(chunk),
        })
    }

    fn done(&mut self, moving: &Moving) {
        if let Some(chunk) = &moving.chunk {
            self.arrived(chunk, chunk.sends());
        }
    }

    fn next_to_hash(&mut self) -> Option<ToHash<AnyMemory>> {
        Flows::next_to_hash(self)
    }

    fn hashed(&mut self, done: ToHash<AnyMemory>) {
        Flows::hashed(self, done);
    }
}

impl AnySchedule for Slots<AnyMemory> {
    fn next(&mut self) -> Option<Moving> {
        let write = self.next_write()?;
        assert!(write.slot < SERVER_SLOTS && write.header.len <= SERVER_SLOT - SLOT_DATA, "{write:?}");
        let (len, at) = (write.source.len(), write.header.offset);
        assert_eq!(len, u64::from(write.header.len));
        // Its span is the part that is written.
        Some(Moving {
            header: write.header,
            hash: None,
            len,
            span: write.source,
            at,
            lane: 0,
            token: write.token,
            chunk: None,
        })
    }

    fn done(&mut self, moving: &Moving) {
        assert_eq!(self.written(moving.token), Some((moving.header.seq, moving.len)));
    }
}

/// The memory of all programs of one thread, each of which finds it empty.
struct Fixture {
    file: OwnedFd,
    memories: Memories,
    geometry: Geometry,
    /// Bytes of the ring that some program has written.
    ring_used: Cell<usize>,
}

static ZEROS: [u8; 1 << 19] = [0; 1 << 19];

fn geometry() -> Geometry {
    let ring_offset = HEADER_SIZE;
    let slots_offset = ring_offset + RING;
    let progress_offset = (slots_offset + SLOTS * SLOT_SIZE).next_multiple_of(4096);
    let arena_offset = progress_offset + PROGRESS_SIZE;
    Geometry {
        size: arena_offset + ARENA,
        ring_offset,
        ring_size: RING,
        slots_offset,
        slot_count: SLOTS,
        progress_offset,
        arena_offset,
        arena_size: ARENA,
    }
}

impl Fixture {
    fn new() -> Fixture {
        let geometry = geometry();
        let size = geometry.size as u64;
        let file = memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC).expect("a file");
        nix::unistd::ftruncate(&file, size as i64).expect("its size");
        let memory = Memory { addr: 0, size, file_offset: 0 };
        let memories =
            Memories::map(vec![(memory, file.try_clone().expect("a descriptor"))]).expect("a mapping");
        Fixture { file, memories, geometry, ring_used: Cell::new(0) }
    }

    fn write(&self, bytes: &[u8], at: usize) {
        let end = (at + bytes.len()).clamp(self.geometry.ring_offset, self.geometry.slots_offset);
        self.ring_used.set(self.ring_used.get().max(end - self.geometry.ring_offset));
        assert_eq!(pwrite(&self.file, bytes, at as i64), Ok(bytes.len()));
    }

    fn session(&self) -> SessionState {
        let Geometry { size, ring_offset, slots_offset, .. } = self.geometry;
        self.write(&ZEROS[..ring_offset + self.ring_used.take()], 0);
        self.ring_used.set(0);
        self.write(&ZEROS[slots_offset..size], slots_offset);
        self.write(self.geometry.fields(1, "fuzz").as_bytes(), 0);
        let size = self.geometry.size as u64;
        let extents = vec![Extent { addr: 0, len: size }];
        let channel = ChannelMemory::new(self.memories.clone(), extents, size).expect("a channel");
        SessionState::new(channel, "the fuzzer".into(), Wakeup::Call(Arc::new(|| {})), Box::new(|_| {}))
    }
}

thread_local! {
    static FIXTURE: OnceCell<Fixture> = const { OnceCell::new() };
}

/// Runs a program, whatever it is.
pub fn relay_any(bytes: &[u8]) {
    FIXTURE.with(|fixture| {
        let fixture = fixture.get_or_init(Fixture::new);
        let mut steps = Steps::new(bytes);
        let kind = steps.byte();
        let session = fixture.session();
        let ledger = (kind & 0x40 != 0).then(|| {
            let file = ledger_file().expect("a ledger's file");
            Ledger::begin(&file, CONNECTIONS).expect("a ledger")
        });
        let end = if kind & 1 == 0 {
            let cache = [CacheUse::Never, CacheUse::Slow, CacheUse::Always][usize::from(kind >> 1 & 3) % 3];
            let eager = [0, 64 << 20, u64::MAX, 1][usize::from(kind >> 3 & 3)];
            let flows = Flows::new(CONNECTIONS, eager, cache);
            let flows = if ledger.is_some() { flows.noted() } else { flows };
            Session::new(fixture, &session, flows, SendBuffer::keeping(), ledger).run(&mut steps)
        } else {
            let slots = Slots::new(SERVER_SLOTS, SERVER_SLOT, 2, 4);
            Session::new(fixture, &session, slots, SendBuffer::new(), None).run(&mut steps)
        };
        let reason = end.text(&session.server);
        match &end {
            EndReason::Client(what) | EndReason::Server(what) => assert!(!what.is_empty()),
            EndReason::Gone(_) | EndReason::Bye(_) | EndReason::Asked(_) => {}
            EndReason::Here(_) | EndReason::Paused => panic!("this host's fault: {end:?}"),
        }
        session.lose(&reason);
        assert!(session.ended().is_some_and(|told| !told.is_empty()));
        assert_eq!(session.header().state(), State::Lost);
        let mut arena = [0; ARENA];
        assert_eq!(pread(&fixture.file, &mut arena, fixture.geometry.arena_offset as i64), Ok(ARENA));
        assert_eq!(arena, [0; ARENA], "the relay wrote behind the progress area");
    });
}

struct Session<'c, S: AnySchedule> {
    fixture: &'c Fixture,
    machine: Machine<'c, S>,
    out: SendBuffer,
    /// The client's cursor, and the number of its last record.
    tail: u64,
    seq: u64,
    /// Data under way: given out, and not done.
    moving: Vec<Moving>,
    hashing: Vec<ToHash<AnyMemory>>,
    /// Bytes of each piece that were given out, and of each lane's streams.
    given: HashMap<(u64, u32), u64>,
    came: [u64; CONNECTIONS],
    regions: Vec<u32>,
    waiting: Vec<Receiver<Result<(), RegionError>>>,
    now: Instant,
}

impl<'c, S: AnySchedule> Session<'c, S> {
    fn new(
        fixture: &'c Fixture,
        session: &'c SessionState,
        schedule: S,
        out: SendBuffer,
        ledger: Option<Ledger>,
    ) -> Session<'c, S> {
        let arena = Some(AnyMemory::new(64 << 20, false));
        let mut machine = Machine::new(session, arena, schedule, SILENCE);
        if let Some(ledger) = ledger {
            machine.note_in(ledger);
        }
        Session {
            fixture,
            machine,
            out,
            tail: 0,
            seq: 0,
            moving: Vec::new(),
            hashing: Vec::new(),
            given: HashMap::new(),
            came: [0; CONNECTIONS],
            regions: Vec::new(),
            waiting: Vec::new(),
            now: Instant::now(),
        }
    }

    /// Runs to the session's end.
    fn run(mut self, steps: &mut Steps<'_>) -> EndReason {
        for _ in 0..STEPS {
            if steps.is_over() {
                break;
            }
            let ended = self.step(steps).err();
            self.check();
            if let Some(end) = ended {
                return end;
            }
        }
        EndReason::Asked("the program is over".into())
    }

    fn step(&mut self, steps: &mut Steps<'_>) -> Result<(), EndReason> {
        match steps.below(24) {
            0..=3 => self.record(steps),
            4 => self.client_scribbles(steps),
            5..=7 => drop(self.machine.take_records(&mut self.out)?),
            8..=11 => return self.server_says(steps),
            12 => {
                let n = steps.number() as usize % (self.out.unsent().len() + 1);
                self.out.advance(n);
            }
            13 => self.out.advance(self.out.unsent().len()),
            14 | 15 => self.give(steps),
            16 => self.done(steps),
            17 => return self.data(steps),
            18 => self.region(steps)?,
            19 => {
                self.machine.finish_turn();
                self.waiting.retain(|done| done.try_recv().is_err());
            }
            20 if self.machine.schedule.is_acknowledged() => {
                // What the server has acknowledged is looked at by the carrier.
                for received in self.machine.take_acknowledged() {
                    if received.stream == 0 {
                        self.machine.frames_arrived(&mut self.out, received.bytes)?;
                    }
                }
            }
            21 if self.machine.schedule.is_acknowledged() => self.resume(steps)?,
            22 => self.hash(steps),
            _ => return self.wait(steps),
        }
        Ok(())
    }

    /// What must hold after every step.
    fn check(&self) {
        let most = 1 << 16;
        let record = MAX_RECORD / 16;
        assert!(
            self.machine.unsent.commands() <= most + record
                && self.machine.downloads.commands() <= most + record
        );
        assert!(self.out.kept() <= MOST_OUT, "{} bytes are kept", self.out.kept());
        assert!(self.machine.forwarded.len() <= RING / RECORD_HEADER);
        assert!(self.machine.waiting.iter().filter(|seq| **seq != 0).count() <= SLOTS);
        assert!(self.machine.processed <= self.machine.control_received);
        assert!(self.machine.last_seq <= self.seq.max(self.machine.consumer.position().parts().1));
    }

    /// Writes into the ring as far as it goes there, and behind its end at its beginning.
    fn put(&self, cursor: u64, bytes: &[u8]) {
        let at = cursor as usize % RING;
        let (now, rest) = bytes.split_at(bytes.len().min(RING - at));
        self.fixture.write(now, self.fixture.geometry.ring_offset + at);
        self.fixture.write(rest, self.fixture.geometry.ring_offset);
    }

    fn publish_tail(&self, tail: u64) {
        self.fixture.write(&tail.to_le_bytes(), TAIL);
    }

    /// The client appends a record, which is mostly in order.
    fn record(&mut self, steps: &mut Steps<'_>) {
        let info = operation(steps);
        let mut body = Vec::new();
        let regions = &self.regions;
        let mut values = |name: &str, kind: &str, steps: &mut Steps<'_>| match (name, kind) {
            (_, "StreamId") => steps.byte() as u64 % 4,
            ("region", _) if !regions.is_empty() => regions[steps.below(regions.len())].into(),
            _ => steps.number(),
        };
        steps.request(info, &mut values, &mut body);
        body.resize(body.len().next_multiple_of(16), 0);
        let slot = match (info.class, steps.byte()) {
            (_, strange @ 240..) => u16::from(strange) << 8 | u16::from(strange),
            (Class::Async, _) => NO_SLOT,
            (Class::Sync, any) => u16::from(any) % SLOTS as u16,
        };
        let mut size = (RECORD_HEADER + body.len()) as u32;
        let mut record = Record { opcode: info.opcode, reply_slot: slot, seq: self.seq + 1 };
        match steps.byte() {
            0xff => size = steps.number() as u32,
            0xfe => record.seq = steps.number(),
            0xfd => record.opcode = steps.u16(),
            _ => {}
        }
        let to_end = RING - self.tail as usize % RING;
        if RECORD_HEADER + body.len() > to_end {
            let pad = Record { opcode: 0, reply_slot: NO_SLOT, seq: 0 };
            self.put(self.tail, &pad.to_bytes(to_end as u32));
            self.tail += to_end as u64;
        }
        self.put(self.tail, &[&record.to_bytes(size), body.as_slice()].concat());
        self.tail += (RECORD_HEADER + body.len()) as u64;
        self.seq += 1;
        self.publish_tail(self.tail);
    }

    /// The client writes where no client does, or when it does not.
    fn client_scribbles(&mut self, steps: &mut Steps<'_>) {
        match steps.below(4) {
            0 => {
                let tail = self.tail.wrapping_add(steps.number()).wrapping_sub(64);
                self.publish_tail(tail);
            }
            1 => {
                let at = steps.number() % RING as u64;
                self.put(at, steps.bytes());
            }
            // Anywhere but in the arena, which is looked at in the end.
            _ => {
                let bytes = steps.bytes();
                let end = self.fixture.geometry.arena_offset - bytes.len();
                self.fixture.write(bytes, steps.number() as usize % end);
            }
        }
    }

    /// A number of a command, or nearly.
    fn command(&self, steps: &mut Steps<'_>) -> u64 {
        match steps.byte() {
            0..200 => self.machine.last_seq.saturating_sub(u64::from(steps.byte()) % 16),
            200..220 => self.moving.first().map_or(1, |moving| moving.header.seq),
            _ => steps.number(),
        }
    }

    /// The server sends a frame, or bytes that are none.
    fn server_says(&mut self, steps: &mut Steps<'_>) -> Result<(), EndReason> {
        let mut bytes = SendBuffer::new();
        let mut body = Vec::new();
        let kind = steps.pick(&[
            frame::REPLY,
            frame::REPLY,
            frame::PROGRESS,
            frame::DATA_SENT,
            frame::DATA_SENT,
            frame::DATA_GRANT,
            frame::DATA_GRANT,
            frame::DATA_PLACED,
            frame::DATA_KNOWN,
            frame::SLOTS_FREE,
            frame::COMMANDS_TAKEN,
            frame::RECEIVED,
            frame::ALIVE,
            frame::BYE,
            0,
        ]);
        let command = self.command(steps);
        match kind {
            frame::REPLY => {
                // The answer that is awaited in a slot, or another.
                let slot = steps.below(SLOTS + 2);
                let seq = match self.machine.waiting.get(slot) {
                    Some(awaited) if steps.byte() < 240 => *awaited,
                    _ => command,
                };
                body.extend(seq.to_le_bytes());
                body.extend((slot as u32).to_le_bytes());
                body.extend((steps.byte() as u32).to_le_bytes());
                body.extend(steps.bytes());
                if steps.byte() == 0xff {
                    body.resize(steps.u16().into(), 0);
                }
            }
            frame::PROGRESS => {
                for _ in 0..steps.below(4) {
                    body.extend(u32::from(steps.byte() % 8).to_le_bytes());
                    body.extend((steps.number() as u32).to_le_bytes());
                    body.extend(command.to_le_bytes());
                    body.extend(steps.number().to_le_bytes());
                }
            }
            frame::DATA_SENT => {
                body.extend(command.to_le_bytes());
                body.extend(steps.number().to_le_bytes());
            }
            frame::DATA_GRANT => {
                for _ in 0..steps.below(4) {
                    body.extend(self.command(steps).to_le_bytes());
                    body.extend((steps.byte() as u32 % 4).to_le_bytes());
                    body.extend([0; 4]);
                    body.extend(steps.number().to_le_bytes());
                }
            }
            frame::DATA_KNOWN => {
                for _ in 0..steps.below(4) {
                    body.extend(self.command(steps).to_le_bytes());
                    body.extend((u64::from(steps.byte() % 8) << 22).to_le_bytes());
                    body.extend((steps.byte() as u32 % 4).to_le_bytes());
                    body.extend((steps.byte() as u32 & 1).to_le_bytes());
                }
            }
            frame::DATA_PLACED | frame::COMMANDS_TAKEN => body.extend(steps.number().to_le_bytes()),
            frame::SLOTS_FREE => {
                (0..steps.below(4)).for_each(|_| body.extend((steps.byte() as u32 % 16).to_le_bytes()));
            }
            frame::RECEIVED => {
                for _ in 0..steps.below(3) {
                    let sent = self.out.appended() - self.out.unsent().len() as u64;
                    let upto = if steps.byte() < 200 { sent } else { steps.number() };
                    body.extend((steps.byte() as u32 % 4).to_le_bytes());
                    body.extend([0; 4]);
                    body.extend(upto.to_le_bytes());
                }
            }
            _ => body.extend(steps.bytes()),
        }
        match steps.byte() {
            0xff => bytes.end().extend(steps.bytes()),
            0xfe => {
                body.truncate(steps.byte().into());
                bytes.frame(kind, &body);
            }
            _ => bytes.frame(if kind == 0 { steps.number() as u32 } else { kind }, &body),
        }
        let mut rest = bytes.unsent();
        // A carrier reads no further while data is awaited.
        while self.machine.takes_frames() && !rest.is_empty() {
            let n = (steps.byte() as usize + 1).min(rest.len());
            let (mut now, later) = rest.split_at(n);
            rest = later;
            self.machine.read(&mut now).map_err(|e| EndReason::Gone(e.to_string()))?;
            self.machine.take_frames()?;
        }
        self.machine.heard(self.now);
        Ok(())
    }

    /// A data connection takes some data.
    fn give(&mut self, steps: &mut Steps<'_>) {
        let lane = steps.below(CONNECTIONS);
        if !self.machine.lane_has_room(lane, true) {
            return;
        }
        let Some(mut moving) = self.machine.schedule().next() else { return };
        moving.lane = lane;
        let end = moving.span.offset().checked_add(moving.span.len());
        assert!(
            end.is_some_and(|end| end <= moving.span.memory().size),
            "data outside the client's memory: {moving:?}"
        );
        if moving.hash.is_none() {
            let given = self.given.entry((moving.header.seq, moving.header.piece)).or_default();
            assert_eq!(*given, moving.at, "data goes once and in order: {moving:?}");
            *given += moving.len;
        }
        if moving.chunk.is_some() && moving.hash.is_none() {
            assert!(moving.at + moving.len <= moving.span.len(), "a chunk beyond its piece: {moving:?}");
        }
        let what = match &moving.chunk {
            Some(chunk) => Sent::Chunk(chunk.clone()),
            None => Sent::Plain(moving.header, moving.hash),
        };
        self.machine.sending(lane, &what);
        self.moving.push(moving);
    }

    /// The first of what is under way is with the server: each connection keeps the order.
    fn done(&mut self, steps: &mut Steps<'_>) {
        let lane = steps.below(CONNECTIONS);
        let Some(first) = self.moving.iter().position(|moving| moving.lane == lane) else { return };
        let moving = self.moving.remove(first);
        let stream = size_of::<DataHeader>() as u64 + moving.hash.map_or(0, |_| 32);
        let bytes = moving.chunk.as_ref().map_or(moving.len, super::flows::Chunk::sends);
        self.machine.arrived(lane, stream + bytes);
        self.machine.schedule().done(&moving);
        if moving.hash.is_none() {
            self.machine.sent(moving.header.seq, moving.len);
        }
    }

    /// Data comes from the server.
    fn data(&mut self, steps: &mut Steps<'_>) -> Result<(), EndReason> {
        let (seq, len) = (self.command(steps), steps.number());
        if S::COMMANDS_AHEAD.is_some() {
            self.machine.written_by_server(0, 0, (seq as u32, len as u32))?;
            return self.machine.take_frames();
        }
        let len = len % (4 << 20);
        let span = self.machine.target(seq, u32::from(steps.byte() % 4), steps.number(), len)?;
        let end = span.offset().checked_add(span.len());
        assert!(end.is_some_and(|end| end <= span.memory().size) && !span.memory().read_only, "{span:?}");
        assert_eq!(span.len(), len);
        let lane = steps.below(CONNECTIONS);
        self.machine.received(seq, len)?;
        self.came[lane] += size_of::<DataHeader>() as u64 + len;
        self.machine.chunk_came(lane, self.came[lane], seq, len);
        self.machine.take_frames()
    }

    /// Another thread registers or unregisters memory, or ends the session.
    fn region(&mut self, steps: &mut Steps<'_>) -> Result<(), EndReason> {
        let (done, answer) = channel();
        let message = match steps.byte() {
            0..150 if self.regions.len() < 8 => {
                // The daemon gives out no id twice.
                let id = (1..).find(|id| !self.regions.contains(id)).unwrap_or(1);
                self.regions.push(id);
                let size = steps.pick(&[1, 4096, 1 << 20, (8 << 20) + 1, 1 << 30]);
                Message::Register { id, region: AnyMemory::new(size, steps.byte() & 1 == 1), done }
            }
            150..250 if !self.regions.is_empty() => {
                let at = steps.below(self.regions.len());
                Message::Unregister { id: self.regions.swap_remove(at), done }
            }
            255 => Message::Close("as asked".into()),
            _ => return Ok(()),
        };
        self.waiting.push(answer);
        self.machine.message(message)
    }

    /// The link is lost, and the session goes on over another one.
    fn resume(&mut self, steps: &mut Steps<'_>) -> Result<(), EndReason> {
        let sent = self.out.appended() - self.out.unsent().len() as u64;
        let upto = if steps.byte() < 200 { sent } else { steps.number() };
        self.machine.frames_resume(&mut self.out, upto)?;
        let processed = self.machine.restart_frames();
        assert_eq!((processed, self.machine.backlog()), (self.machine.control_taken(), 0));
        Ok(())
    }

    fn hash(&mut self, steps: &mut Steps<'_>) {
        if steps.byte() & 1 == 0 {
            while self.hashing.len() < 16
                && let Some(task) = self.machine.schedule().next_to_hash()
            {
                self.hashing.push(task);
            }
        } else if !self.hashing.is_empty() {
            let at = steps.below(self.hashing.len());
            let task = self.hashing.swap_remove(at);
            self.machine.schedule().hashed(task);
        }
    }

    /// Time passes.
    fn wait(&mut self, steps: &mut Steps<'_>) -> Result<(), EndReason> {
        self.now += Duration::from_millis(u64::from(steps.byte()) * 40);
        let asked = self.machine.keep_alive(&mut self.out, self.now);
        asked.map_err(|seconds| EndReason::Gone(format!("silent for {seconds} s")))?;
        let rest = self.machine.rest(&self.out, self.now);
        self.machine.rested(rest.is_some(), self.now);
        let _ = self.machine.is_bulk();
        Ok(())
    }
}

/// An operation of the table: those that name data more often.
fn operation(steps: &mut Steps<'_>) -> &'static OpInfo {
    let number = steps.byte();
    let with_data = number & 1 == 0;
    let all = || ops::all().filter(|info| info.carries_data == with_data);
    let at = usize::from(number >> 1) % all().count();
    all().nth(at).expect("the table has both")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_client_and_any_server_end_with_a_reason_or_not_at_all() {
        protocol::fuzzing::programs("relay", 300, 3000).iter().for_each(|program| relay_any(program));
    }
}
