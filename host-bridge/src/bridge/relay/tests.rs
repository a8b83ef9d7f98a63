//! The rules of a relayed session, without a socket: a client, a server and everything between them in
//! memory, in one thread, in whatever order a seed says.
//!
//! [`Session`] drives a [`Machine`] as a carrier would, and checks after every step what must hold at any
//! time. [`server`] keeps to the protocol and checks that the bridge does. [`pipe`] tests the relay's loop as
//! well: its carrier's server is a thread of the test.

mod pipe;
mod server;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use proptest::prelude::*;
use protocol::channel::{Geometry, Header, NO_SLOT, Position, Producer, RingMemory};
use protocol::data::{HostIn, HostOut, HostRange, Place};
use protocol::device::Extent;
use protocol::fuzzing::Random;
use protocol::handle::{StreamId, TicketId};
use protocol::link::{
    COMMANDS_AHEAD, DataGrant, EAGER, EAGER_PIECE, GRANTED_SLOTS, Memory, SLOT_DATA, frame,
};
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::{StreamHostSignal, StreamHostWait, StreamMark, StreamSynchronize};
use protocol::ops::{self, Class, Op};
use zerocopy::IntoBytes;

use self::server::Server;
pub(super) use super::fuzzing::AnyMemory as TestMemory;
use super::ledger::{self, Ledger};
use super::mailbox::Message;
use super::regions::Span;
use super::schedule::Schedule;
use super::{CacheUse, EndReason, Flows, Machine, Slots};
use crate::bridge::state::{ChannelMemory, SessionState, Wakeup};
use crate::framing::{FrameReader, SendBuffer};
use crate::memory::Memories;

/// A generous limit on anything that is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

impl TestMemory {
    pub(super) fn span(len: u64) -> Span<TestMemory> {
        Span::of(Arc::new(TestMemory::new(len, false)), 0, len)
    }
}

/// Data that is on its way to the server.
#[derive(Debug, Clone, Copy)]
struct Sent {
    seq: u64,
    piece: u32,
    at: u64,
    len: u64,
    eager: bool,
    slot: Option<u32>,
    token: u64,
}

/// Both schedules, as the tests use them.
trait TestSchedule: Schedule<Memory = TestMemory> + Send + 'static {
    fn begin() -> Self;
    fn next(&mut self) -> Option<Sent>;
    fn done(&mut self, sent: &Sent);
}

impl TestSchedule for Flows<TestMemory> {
    fn begin() -> Self {
        Flows::new(4, 0, CacheUse::Never)
    }

    fn next(&mut self) -> Option<Sent> {
        let chunk = self.next_chunk()?;
        let (seq, piece, at, len) = (chunk.seq, chunk.piece, chunk.at, chunk.len.into());
        Some(Sent { seq, piece, at, len, eager: chunk.eager, slot: None, token: 0 })
    }

    fn done(&mut self, _sent: &Sent) {}
}

/// Slots of a `verbs` server.
const SLOTS: u32 = GRANTED_SLOTS + 12;
const SLOT_SIZE: u32 = SLOT_DATA + (128 << 10);

impl TestSchedule for Slots<TestMemory> {
    fn begin() -> Self {
        Slots::new(SLOTS, SLOT_SIZE, 2, 16)
    }

    fn next(&mut self) -> Option<Sent> {
        let more = self.has_writes();
        let write = self.next_write();
        assert_eq!(write.is_some(), more);
        let write = write?;
        let header = write.header;
        assert_eq!(write.source.len(), u64::from(header.len));
        Some(Sent {
            seq: header.seq,
            piece: header.piece,
            at: header.offset,
            len: header.len.into(),
            eager: false,
            slot: Some(write.slot),
            token: write.token,
        })
    }

    fn done(&mut self, sent: &Sent) {
        assert_eq!(self.written(sent.token), Some((sent.seq, sent.len)));
        assert_eq!(self.written(sent.token), None, "a write is done once");
    }
}

/// A fresh session, and the number of wake-ups that its client has had.
pub(super) fn session() -> (Arc<SessionState>, Arc<AtomicUsize>) {
    let geometry = Geometry::with_arena(0x1000);
    let size = geometry.size as u64;
    let file = memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&file, size as i64).unwrap();
    let memories = Memories::map(vec![(Memory { addr: 0, size, file_offset: 0 }, file)]).unwrap();
    let extents = vec![Extent { addr: 0, len: size }];
    let at = memories.resolve(&extents, size).unwrap().all()[0].at.cast::<Header>();
    // SAFETY: mapped as long as `memories`, page-aligned, and all atomics.
    unsafe { at.as_ref() }.write_fields(&geometry.fields(1, "test"));
    let channel = ChannelMemory::new(memories, extents, size).unwrap();
    let wakes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&wakes);
    let call = Wakeup::Call(Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    (Arc::new(SessionState::new(channel, "the test".into(), call, Box::new(|_| {}))), wakes)
}

/// The client's end of its ring.
pub(super) fn producer(session: &SessionState) -> Producer<'_> {
    let view = &session.channel.view;
    let geometry = view.geometry();
    // SAFETY: the ring lies inside the channel, aligned, all atomics, and stays mapped as long as `session`.
    let words = unsafe {
        let at = view.base().add(geometry.ring_offset).cast().as_ptr();
        std::slice::from_raw_parts(at, geometry.ring_size / 8)
    };
    Producer::new(view.header(), RingMemory::new(words))
}

/// A session in memory: client, machine, server, and what is under way between them.
struct Session<'c, S: TestSchedule> {
    session: &'c SessionState,
    producer: Producer<'c>,
    machine: Machine<'c, S>,
    out: SendBuffer,
    /// Data that the schedule has given out, and that was not sent to its end.
    sending: Vec<Sent>,
    /// Sent, and not at the server yet.
    flying: Vec<Sent>,
    server: Server,
    frames: SendBuffer,
    data: Vec<(u64, u32, u64, u64)>,
    /// Bytes of each command that were not sent, or not received.
    unsent: BTreeMap<u64, u64>,
    expected: BTreeMap<u64, u64>,
    /// Bytes of each piece that the schedule has given out.
    given: HashMap<(u64, u32), u64>,
    eager: u64,
    used_slots: BTreeSet<u32>,
    planned: u64,
    freed: u64,
    busy_slots: BTreeMap<u16, u64>,
    tickets: u64,
    random: Random,
}

const LENGTHS: [u64; 8] = [0, 1, 100, 64 << 10, 70_000, 1 << 20, (1 << 20) + 1, 5 << 20];

impl<'c, S: TestSchedule> Session<'c, S> {
    fn new(session: &'c SessionState, seed: u64) -> Session<'c, S> {
        let arena = Some(TestMemory::new(64 << 20, false));
        let mut machine = Machine::new(session, arena, S::begin(), PATIENCE);
        for id in 1..4 {
            let (done, answer) = mpsc::channel();
            machine
                .message(Message::Register { id, region: TestMemory::new(8 << 20, id == 3), done })
                .unwrap();
            assert!(answer.recv().unwrap().is_ok());
        }
        let server = Server::new(S::COMMANDS_AHEAD.is_some());
        Session {
            session,
            producer: producer(session),
            machine,
            out: SendBuffer::new(),
            sending: Vec::new(),
            flying: Vec::new(),
            server,
            frames: SendBuffer::new(),
            data: Vec::new(),
            unsent: BTreeMap::new(),
            expected: BTreeMap::new(),
            given: HashMap::new(),
            eager: 0,
            used_slots: BTreeSet::new(),
            planned: 0,
            freed: 0,
            busy_slots: BTreeMap::new(),
            tickets: 0,
            random: Random(seed),
        }
    }

    fn push<'a, T: Op<'a>>(&mut self, op: &T, slot: u16) -> u64 {
        push(&mut self.producer, op, slot)
    }

    /// The client appends some command.
    fn command(&mut self) {
        let stream = StreamId(self.random.below(3) as u32);
        let len = self.random.pick(&LENGTHS);
        let place = match self.random.below(3) {
            0 => Place::Arena,
            n => Place::Region(n as u32),
        };
        let range = HostRange { place, offset: self.random.number() % 4096, len };
        match self.random.below(9) {
            0..=2 => {
                let src = HostIn::Range(range);
                let seq = self.push(&MemcpyHtoD { stream, dst: 0, src }, NO_SLOT);
                self.unsent.insert(seq, len);
            }
            3 => {
                let src = HostIn::Late(range);
                let seq = self.push(&MemcpyHtoD { stream, dst: 0, src }, NO_SLOT);
                self.unsent.insert(seq, len);
            }
            4 | 5 => {
                let seq = self.push(&MemcpyDtoH { stream, src: 0, dst: HostOut(range) }, NO_SLOT);
                self.expected.insert(seq, len);
            }
            6 => {
                let slot = self.random.below(8) as u16;
                if !self.busy_slots.contains_key(&slot) {
                    self.session.channel.view.slot(slot).unwrap().prepare();
                    let seq = self.push(&StreamSynchronize { stream }, slot);
                    self.busy_slots.insert(slot, seq);
                }
            }
            7 => {
                self.tickets += 1;
                self.push(&StreamHostWait { stream, ticket: TicketId(self.tickets) }, NO_SLOT);
                self.push(&StreamHostSignal { ticket: TicketId(self.tickets) }, NO_SLOT);
            }
            _ => drop(self.push(&StreamMark { stream }, NO_SLOT)),
        }
        self.unsent.retain(|_, left| *left > 0);
    }

    /// The schedule gives out some data, which must be data that may go.
    fn give(&mut self) -> bool {
        let Some(sent) = self.machine.schedule().next() else { return false };
        let key = (sent.seq, sent.piece);
        let given = self.given.entry(key).or_default();
        assert_eq!(*given, sent.at, "data goes once and in order");
        *given += sent.len;
        let granted = self.server.granted.get(&key).copied().unwrap_or(0);
        if sent.eager {
            self.eager += sent.len;
            assert!(*given <= EAGER_PIECE && self.eager <= EAGER, "{sent:?}, {} eager bytes", self.eager);
        } else if sent.slot.is_none_or(|slot| slot >= SLOTS - GRANTED_SLOTS) {
            assert!(*given <= granted, "{sent:?} where {granted} were granted");
        }
        if let Some(slot) = sent.slot {
            assert!(self.used_slots.insert(slot), "slot {slot} is in use");
            assert!(sent.len <= u64::from(SLOT_SIZE - SLOT_DATA));
            if slot < SLOTS - GRANTED_SLOTS {
                assert_eq!(
                    u64::from(slot),
                    self.planned % u64::from(SLOTS - GRANTED_SLOTS),
                    "slots are used in turn"
                );
                self.planned += 1;
            }
        }
        self.sending.push(sent);
        true
    }

    fn server_tells(&mut self) {
        self.eager -= self.server.placed;
        let mut free = Vec::new();
        self.server.tell(&mut self.random, &mut self.frames, &mut free, self.freed);
        for slot in free {
            assert!(self.used_slots.remove(&slot));
            self.freed += u64::from(slot < SLOTS - GRANTED_SLOTS);
        }
    }

    /// One step of somebody. True: it did something.
    fn step(&mut self, what: usize) -> bool {
        match what {
            0 => self.machine.take_records(&mut self.out).unwrap(),
            1 => {
                let n = self.random.below(self.out.unsent().len() + 1);
                let n = if self.random.below(2) == 0 { self.out.unsent().len() } else { n };
                let bytes = self.out.unsent()[..n].to_vec();
                self.out.advance(n);
                self.server.hear(&bytes);
                if self.machine.schedule.is_acknowledged() {
                    let heard = self.out.appended() - self.out.unsent().len() as u64;
                    self.machine.frames_arrived(&mut self.out, heard).unwrap();
                }
                n > 0
            }
            2 => self.give(),
            3 if !self.sending.is_empty() => {
                let sent = self.sending.swap_remove(self.random.below(self.sending.len()));
                self.machine.schedule().done(&sent);
                self.machine.sent(sent.seq, sent.len);
                let left = self.unsent.get_mut(&sent.seq).unwrap();
                *left -= sent.len;
                if *left == 0 {
                    self.unsent.remove(&sent.seq);
                }
                self.flying.push(sent);
                true
            }
            4 if !self.flying.is_empty() => {
                let sent = self.flying.swap_remove(self.random.below(self.flying.len()));
                self.server.land(&sent);
                true
            }
            5 if !self.server.records.is_empty() => {
                self.server.execute(&mut self.random, &mut self.frames, &mut self.data);
                true
            }
            6 if !self.server.granting.is_empty() => {
                let all = self.random.below(8) == 0;
                self.server.grant(&mut self.random, &mut self.frames, all);
                true
            }
            7 => {
                self.server_tells();
                false
            }
            8 if !self.frames.is_empty() => {
                let most = self.frames.unsent().len();
                let n = if self.random.below(2) == 0 { most } else { self.random.below(most + 1) };
                let bytes = self.frames.unsent()[..n].to_vec();
                self.frames.advance(n);
                let mut rest = bytes.as_slice();
                while !rest.is_empty() {
                    self.machine.read(&mut rest).unwrap();
                }
                self.machine.take_frames().unwrap();
                n > 0
            }
            9 if !self.data.is_empty() => {
                let (seq, piece, at, len) = self.data.swap_remove(self.random.below(self.data.len()));
                if self.server.verbs {
                    self.machine.written_by_server(0, 0, (seq as u32, len as u32)).unwrap();
                } else {
                    assert_eq!(self.machine.target(seq, piece, at, len).unwrap().len(), len);
                    self.machine.received(seq, len).unwrap();
                }
                *self.expected.get_mut(&seq).unwrap() -= len;
                self.machine.take_frames().unwrap();
                true
            }
            _ => false,
        }
    }

    /// What holds at any time.
    fn check(&mut self) {
        self.machine.finish_turn();
        let progress = self.session.channel.view.progress();
        if let Some((first, _)) = self.unsent.first_key_value() {
            assert!(
                progress.released() < *first,
                "released {} before its data was sent",
                progress.released()
            );
        }
        // Data that the server still has under way is not behind the client's progress.
        if let Some(first) = self.data.iter().map(|(seq, ..)| *seq).min() {
            assert!(progress.executed() < first, "executed {} before its data is here", progress.executed());
        }
        let mut payload = Vec::new();
        self.busy_slots.retain(|slot, seq| {
            payload.clear();
            let done = self.session.channel.view.slot(*slot).unwrap().poll(&mut payload);
            assert!(done.is_none() || payload == seq.to_le_bytes());
            done.is_none()
        });
    }

    /// Lets everything come to its end.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 3 {
            let mut worked = false;
            for what in 0..10 {
                while self.step(what) {
                    worked = true;
                    self.check();
                }
            }
            self.server.grant(&mut self.random, &mut self.frames, true);
            quiet = if worked || !self.frames.is_empty() { 0 } else { quiet + 1 };
        }
        let last = self.producer.last_seq();
        let progress = self.session.channel.view.progress();
        assert_eq!((progress.executed(), progress.released()), (last, last));
        assert!(self.busy_slots.is_empty() && self.unsent.is_empty() && self.data.is_empty());
        for (key, len) in &self.server.lengths {
            assert_eq!(self.server.received.get(key).copied().unwrap_or(0), *len, "piece {key:?}");
        }
    }
}

pub(super) fn push<'a, T: Op<'a>>(producer: &mut Producer<'_>, op: &T, slot: u16) -> u64 {
    assert_eq!(T::INFO.class == Class::Sync, slot != NO_SLOT);
    let mut body = Vec::new();
    ops::encode(op, &mut body);
    producer.push(T::INFO.opcode, slot, &body).expect("room in the ring")
}

/// Steps in a random order; all the rules hold after each.
fn any_order<S: TestSchedule>(seed: u64, steps: usize) {
    let (session, _) = session();
    let mut session = Session::<S>::new(&session, seed);
    for _ in 0..steps {
        match session.random.below(12) {
            10 | 11 if session.producer.last_seq() < 400 => session.command(),
            what => drop(session.step(what)),
        }
        session.check();
    }
    session.settle();
}

/// Whatever frames a server sends, they are acted on or end the session as the server's fault.
fn any_frames<S: TestSchedule>(seed: u64) {
    let (session, _) = session();
    let mut session = Session::<S>::new(&session, seed);
    (0..40).for_each(|_| session.command());
    session.machine.take_records(&mut session.out).unwrap();
    while session.give() {}
    for _ in 0..60 {
        let random = &mut session.random;
        let numbers = [0, 1, 2, 3, 5, 40, 1 << 20, u64::from(u32::MAX), u64::MAX, random.number()];
        let mut body = Vec::new();
        let words = random.below(8);
        (0..words).for_each(|_| body.extend(random.pick(&numbers).to_le_bytes()));
        let half = random.pick(&numbers).to_le_bytes();
        body.extend(&half[..random.pick(&[0, 0, 0, 4, 7])]);
        let mut frames = SendBuffer::new();
        frames.frame(random.below(20) as u32, &body);
        let (low, len) = (random.pick(&numbers), random.pick(&numbers));
        let mut bytes = frames.unsent();
        session.machine.read(&mut bytes).unwrap();
        let data = match session.random.below(4) {
            0 => session.machine.written_by_server(0, 0, (low as u32, len as u32)),
            1 => session.machine.received(low, len),
            2 => session.machine.target(low, len as u32, len, low).map(drop),
            _ => Ok(()),
        };
        for end in [data, session.machine.take_frames()] {
            match end {
                Ok(()) => {}
                Err(EndReason::Server(_) | EndReason::Bye(_)) => return,
                Err(other) => panic!("{other:?}"),
            }
        }
        session.machine.finish_turn();
    }
}

/// Whatever records a client appends, they are taken or end the session as the client's fault.
fn any_records<S: TestSchedule>(seed: u64) {
    let (session, _) = session();
    let mut session = Session::<S>::new(&session, seed);
    let opcodes: Vec<u16> = (0..=u16::MAX).filter(|opcode| ops::info(*opcode).is_some()).collect();
    for _ in 0..60 {
        let random = &mut session.random;
        let opcode = if random.below(20) == 0 { random.number() as u16 } else { random.pick(&opcodes) };
        let slot = random.pick(&[NO_SLOT, NO_SLOT, 0, 1, 63, 64, 1000]);
        let numbers = [0, 1, 2, 3, 7, 40, u64::from(u32::MAX), u64::MAX, random.number()];
        let words = random.below(10);
        let body: Vec<u8> = (0..words).flat_map(|_| random.pick(&numbers).to_le_bytes()).collect();
        if session.producer.push(opcode.max(1), slot, &body).is_err() {
            break;
        }
        match session.machine.take_records(&mut session.out) {
            Ok(_) => while session.machine.schedule().next().is_some() {},
            Err(EndReason::Client(_)) => return,
            Err(other) => panic!("{other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_session_over_sockets_keeps_the_rules_in_any_order(seed in any::<u64>(), steps in 0usize..3000) {
        any_order::<Flows<TestMemory>>(seed, steps);
    }

    #[test]
    fn a_session_over_queue_pairs_keeps_the_rules_in_any_order(seed in any::<u64>(), steps in 0usize..3000) {
        any_order::<Slots<TestMemory>>(seed, steps);
    }

    #[test]
    fn no_frame_does_more_than_end_the_session(seed in any::<u64>()) {
        any_frames::<Flows<TestMemory>>(seed);
        any_frames::<Slots<TestMemory>>(seed);
    }

    #[test]
    fn no_record_does_more_than_end_the_session(seed in any::<u64>()) {
        any_records::<Flows<TestMemory>>(seed);
        any_records::<Slots<TestMemory>>(seed);
    }
}

/// Grants in one frame, each of which counts, to a session whose state is noted.
fn very_many_grants<S: TestSchedule>(schedule: S) {
    let (session, _) = session();
    let arena = Some(TestMemory::new(64 << 20, false));
    let mut machine = Machine::new(&session, arena, schedule, PATIENCE);
    machine.note_in(Ledger::begin(&ledger::file().unwrap(), 4).unwrap());
    let mut session = Session { machine, ..Session::new(&session, 1) };
    let src = HostIn::Late(HostRange { place: Place::Arena, offset: 0, len: 200_000 });
    let seq = session.push(&MemcpyHtoD { stream: StreamId(1), dst: 0, src }, NO_SLOT);
    session.machine.take_records(&mut session.out).unwrap();
    let grants: Vec<_> = (1..=150_000).map(|upto| DataGrant { seq, piece: 0, reserved: 0, upto }).collect();
    session.frames.frame(frame::DATA_GRANT, grants.as_bytes());
    let mut bytes = session.frames.unsent();
    while !bytes.is_empty() {
        session.machine.read(&mut bytes).unwrap();
    }
    let ended = session.machine.take_frames();
    assert!(matches!(&ended, Err(EndReason::Server(why)) if why.contains("too many grants")), "{ended:?}");
}

#[test]
fn a_frame_with_very_many_grants_ends_the_session_with_a_reason() {
    very_many_grants(Flows::<TestMemory>::begin().noted());
    very_many_grants(<Slots<TestMemory> as TestSchedule>::begin().noted());
}

/// Late data of three commands, granted in one frame.
fn several_grants<S: TestSchedule>() {
    let (session, _) = session();
    let mut session = Session::<S>::new(&session, 1);
    let range = HostRange { place: Place::Arena, offset: 0, len: 1000 };
    let seqs: Vec<u64> = (0..3)
        .map(|stream| {
            let src = HostIn::Late(range);
            session.push(&MemcpyHtoD { stream: StreamId(stream), dst: 0, src }, NO_SLOT)
        })
        .collect();
    session.machine.take_records(&mut session.out).unwrap();
    assert!(session.machine.schedule().next().is_none());
    let grants: Vec<DataGrant> =
        seqs.iter().map(|seq| DataGrant { seq: *seq, piece: 0, reserved: 0, upto: 1000 }).collect();
    session.frames.frame(frame::DATA_GRANT, grants.as_bytes());
    session.machine.read(&mut session.frames.unsent()).unwrap();
    session.machine.take_frames().unwrap();
    let sent: Vec<u64> =
        std::iter::from_fn(|| session.machine.schedule().next()).map(|sent| sent.seq).collect();
    assert_eq!(sent, seqs);
}

#[test]
fn every_grant_of_a_frame_counts() {
    several_grants::<Flows<TestMemory>>();
    several_grants::<Slots<TestMemory>>();
}

#[test]
fn the_farewell_stands_behind_whole_frames_whatever_record_ends_the_session() {
    let (session, _) = session();
    let mut session = Session::<Flows<TestMemory>>::new(&session, 1);
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    session.producer.push(0x7fff, NO_SLOT, &[]).unwrap();
    assert!(matches!(session.machine.take_records(&mut session.out), Err(EndReason::Client(_))));
    session.out.frame(frame::BYE, b"malformed");
    let mut reader = FrameReader::new();
    reader.fill(&mut session.out.unsent()).unwrap();
    let (kind, commands) = reader.next_frame().unwrap().unwrap();
    assert_eq!((kind, commands.is_empty()), (frame::COMMANDS, false));
    let (kind, text) = reader.next_frame().unwrap().unwrap();
    assert_eq!((kind, text), (frame::BYE, &b"malformed"[..]));
}

#[test]
fn a_region_is_released_only_when_its_data_is_sent() {
    let (session, _) = session();
    let mut session = Session::<Slots<TestMemory>>::new(&session, 1);
    let range = HostRange { place: Place::Region(1), offset: 0, len: 1000 };
    session.push(&MemcpyHtoD { stream: StreamId(0), dst: 0, src: HostIn::Range(range) }, NO_SLOT);
    session.unsent.insert(1, 1000);
    let (done, answer) = mpsc::channel();
    session.machine.message(Message::Unregister { id: 1, done }).unwrap();
    session.check();
    assert!(answer.try_recv().is_err(), "the record that names it was not taken");
    assert!(session.step(0) && session.step(2));
    session.check();
    assert!(answer.try_recv().is_err(), "its data is under way");
    assert!(session.step(3));
    session.check();
    assert!(answer.try_recv().unwrap().is_ok());
    let src = HostIn::Range(range);
    session.push(&MemcpyHtoD { stream: StreamId(0), dst: 0, src }, NO_SLOT);
    let error = session.machine.take_records(&mut session.out).unwrap_err();
    assert!(matches!(error, EndReason::Client(what) if what.contains("not registered")));
}

#[test]
fn records_wait_when_a_server_over_queue_pairs_takes_none() {
    let (session, _) = session();
    let mut session = Session::<Slots<TestMemory>>::new(&session, 1);
    let bytes = vec![0; 4000];
    let mut pushed = 0;
    // Everything that is sent arrives at once, so that nothing else holds records back.
    while session.server.untaken < COMMANDS_AHEAD {
        let before = session.server.untaken;
        pushed += 1;
        session.push(&MemcpyHtoD { stream: StreamId(0), dst: 0, src: HostIn::Inline(&bytes) }, NO_SLOT);
        session.machine.take_records(&mut session.out).unwrap();
        session.server.hear(session.out.unsent());
        session.out.advance(session.out.unsent().len());
        assert!(session.server.untaken > before);
    }
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    assert!(!session.step(0), "one more than {COMMANDS_AHEAD} bytes allow");
    for _ in 0..pushed {
        assert!(session.step(5));
    }
    session.server_tells();
    session.settle();
}

#[test]
fn records_wait_while_too_many_commands_have_data_under_way() {
    let (session, _) = session();
    let mut session = Session::<Flows<TestMemory>>::new(&session, 1);
    let range = HostRange { place: Place::Arena, offset: 0, len: 1 };
    let src = HostIn::Late(range);
    for _ in 0..1 << 16 {
        session.push(&MemcpyHtoD { stream: StreamId(0), dst: 0, src }, NO_SLOT);
        assert!(session.step(0));
        session.out.advance(session.out.unsent().len());
        let sent = session.out.appended();
        session.machine.frames_arrived(&mut session.out, sent).unwrap();
    }
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    assert!(!session.step(0));
    session.frames.frame(frame::DATA_GRANT, DataGrant { seq: 9, piece: 0, reserved: 0, upto: 1 }.as_bytes());
    assert!(session.machine.schedule().next().is_none(), "not granted yet");
    session.machine.read(&mut session.frames.unsent()).unwrap();
    session.machine.take_frames().unwrap();
    assert!(session.machine.schedule().next().is_none(), "behind data of its stream that is not granted");
    session.machine.sent(9, 1);
    assert!(session.step(0));
}

#[test]
fn a_record_stays_in_the_ring_until_the_server_has_received_it() {
    let (session, _) = session();
    let mut session = Session::<Flows<TestMemory>>::new(&session, 1);
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    assert!(session.step(0));
    let whole = session.out.appended();
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    assert!(session.step(0));
    session.out.advance(session.out.unsent().len());
    for received in [0, 1, whole - 1] {
        session.machine.frames_arrived(&mut session.out, received).unwrap();
        let ring = session.session.channel.view.consumer(Position::default()).take(&mut Vec::new());
        assert!(session.session.header().has_records() && ring.unwrap().is_some());
    }
    session.machine.frames_arrived(&mut session.out, whole).unwrap();
    assert!(session.session.header().has_records(), "the second one");
    let all = session.out.appended();
    session.machine.frames_resume(&mut session.out, all).unwrap();
    assert!(!session.session.header().has_records());
    let more = session.machine.frames_arrived(&mut session.out, all + 1);
    assert!(matches!(more, Err(EndReason::Server(_))), "{more:?}");
}

/// Over queue pairs that takes a key, and there may be none for want of a link.
#[test]
fn a_record_for_whose_data_nobody_can_be_admitted_is_taken_again_over_the_next_link() {
    let (session, _) = session();
    let mut session = Session::<Slots<TestMemory>>::new(&session, 1);
    let range = |region| HostRange { place: Place::Region(region), offset: 0, len: 1000 };
    let refuse = |session: &Session<'_, Slots<TestMemory>>, refuses| {
        let memory = session.machine.regions.memory(Place::Region(1)).unwrap();
        memory.refuses.store(refuses, Ordering::Relaxed);
    };
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    let before = session.machine.consumer.position();
    let copy = |region| MemcpyDtoH { stream: StreamId(0), src: 0, dst: HostOut(range(region)) };
    let last = session.push(&copy(1), NO_SLOT);
    session.expected.insert(last, 1000);
    refuse(&session, true);
    for _ in 0..2 {
        let refused = session.machine.take_records(&mut session.out).unwrap_err();
        assert!(matches!(refused, EndReason::Gone(_)), "{refused:?}");
        let Machine { consumer, downloads, last_seq, .. } = &session.machine;
        assert!(consumer.has_work() && consumer.position() != before, "the first one was taken");
        assert_eq!((downloads.commands(), *last_seq), (0, last - 1));
    }
    refuse(&session, false);
    assert!(session.step(0));
    assert!(!session.machine.has_records() && session.machine.downloads.commands() == 1);
    session.settle();
}

#[test]
fn a_silent_server_is_asked_and_then_lost_only_if_something_is_expected_of_it() {
    let (session, _) = session();
    let mut session = Session::<Flows<TestMemory>>::new(&session, 1);
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    session.machine.heard(begin);
    assert_eq!(session.machine.rest(&session.out, begin), None);
    assert_eq!(session.machine.keep_alive(&mut session.out, after(1000)), Ok(false));
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    assert!(session.step(0));
    session.out.advance(session.out.unsent().len());
    assert!(session.machine.rest(&session.out, after(1000)).unwrap() <= Duration::from_secs(1));
    assert_eq!(session.machine.keep_alive(&mut session.out, after(1001)), Ok(true));
    assert_eq!(session.machine.keep_alive(&mut session.out, after(1001)), Ok(false));
    assert_eq!(session.out.unsent().len(), 8, "one question a second");
    assert_eq!(session.machine.keep_alive(&mut session.out, after(1061)), Err(61));
}

#[test]
fn a_server_is_not_lost_before_it_was_asked_however_long_the_relay_stood_still() {
    let (session, _) = session();
    let mut session = Session::<Flows<TestMemory>>::new(&session, 1);
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    session.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    assert!(session.step(0));
    session.machine.heard(begin);
    assert_eq!(session.machine.keep_alive(&mut session.out, after(1000)), Ok(true));
    assert_eq!(session.machine.keep_alive(&mut session.out, after(1061)), Err(61), "it has not answered");
}
