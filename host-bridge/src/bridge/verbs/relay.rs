//! The relay: one thread for each session. In each turn it does what can be done now, and nothing blocks: takes records off the ring, posts writes, sends messages, takes
//! completions. With nothing to do it polls for a while ([`PollTime`]), then arms the completion queue and sleeps on all its descriptors together.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use protocol::channel::{Consumer, Header, NO_SLOT, Position, RECORD_HEADER, Record};
use protocol::data::{DataUse, Place};
use protocol::link::{
    ARENA_KEY, COMMANDS_AHEAD, DataAsk, DataGrant, DataHeader, DataSent, FrameHeader, GRANTED_SLOTS,
    ProgressUpdate, Queues, RegionKey, SLOT_DATA, frame,
};
use protocol::ops::stream::{StreamBatchMemOp, StreamHostSignal, StreamHostWait};
use protocol::ops::{self, Class, Op};
use zerocopy::{FromBytes, IntoBytes};

use super::transfer::{Inputs, Outputs, Region, Span};
use super::{Links, quiet};
use crate::bridge::SessionConfig;
use crate::bridge::state::SessionState;
use crate::bridge::mailbox::Mailbox;
use crate::bridge::polling::{PollTime, cores};
use crate::bridge::relayed::{EndReason, Regions};
use crate::bridge::tcp::control::{publish, reply};
use crate::framing::{FrameReader, split_struct};
use crate::verbs::{DeviceEvent, Event, Link, Put, RegisteredRegion, VerbsError};

/// Commands with data under way, each way, above which no more records are taken.
const MAX_UNDER_WAY: usize = 1 << 16;
/// Silence after which a server that is waited for is asked whether it is there.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// How often the control connection and the device's events are looked at while there is work.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How long a farewell may take to arrive after the queue pairs broke.
const FAREWELL: Duration = Duration::from_millis(300);
/// Bytes of the server's frames that wait for data before it is held off.
const MAX_HELD: usize = 256 << 10;

/// Bytes under way, both ways together, from which on that is bulk data.
const BULK: u64 = 256 << 10;

const DOORBELL: u64 = 0;
const MAILBOX: u64 = 1;
const CONTROL: u64 = 2;
const COMPLETIONS: u64 = 3;
const DEVICE: u64 = 4;

pub(super) struct Relay<'c> {
    /// Dropped first: after that nobody reaches the client's memory.
    link: Link,
    session: &'c SessionState,
    mailbox: &'c Mailbox<Region>,
    consumer: Consumer<'c>,
    control: TcpStream,
    control_reader: FrameReader,
    reader: FrameReader,
    /// The server has written this command's data; until it is here nothing further is taken.
    held: Option<DataSent>,
    queues: Queues,
    /// Slots of the server that are free, in the order in which they are to be written; those for granted data; and for each slot whether it is.
    free: VecDeque<u32>,
    free_granted: VecDeque<u32>,
    is_free: Vec<bool>,
    /// Bytes of records that were sent and not taken yet.
    untaken: u64,
    inputs: Inputs,
    outputs: Outputs,
    arena: Option<Arc<Region>>,
    regions: Regions<Region>,
    /// For each reply slot the seq of the command that awaits an answer there; 0: none.
    waiting: Vec<u64>,
    epoll: Epoll,
    poll: PollTime,
    silence: Duration,
    /// When something last came over the queue pairs, and when the server was last asked whether it is there.
    heard: Instant,
    said: Instant,
    looked: Instant,
    last_seq: u64,
    released: u64,
    taken_bytes: u64,
    body: Vec<u8>,
    uses: Vec<DataUse>,
    holds: Holds,
}

/// Whether the session's streams may be held up for as long as the program likes: by its host functions, or by words of memory.
#[derive(Debug, Default)]
struct Holds {
    /// Points at which streams wait for the client, less those that were let go.
    host: u64,
    /// Some stream has waited for a word.
    word: bool,
}

impl Holds {
    fn note(&mut self, opcode: u16) {
        let is = |info: &'static ops::OpInfo| info.opcode == opcode;
        if is(&<StreamHostWait as Op>::INFO) {
            self.host += 1;
        } else if is(&<StreamHostSignal as Op>::INFO) {
            self.host = self.host.saturating_sub(1);
        } else if opcode == <StreamBatchMemOp as Op>::INFO.opcode {
            self.word = true;
        }
    }

    fn any(&self) -> bool {
        self.word || self.host > 0
    }
}

fn broken(e: nix::Error) -> EndReason {
    EndReason::Here(format!("epoll: {e}"))
}

impl From<VerbsError> for EndReason {
    fn from(e: VerbsError) -> EndReason {
        match e {
            VerbsError::Peer(what) => EndReason::Server(what),
            VerbsError::Broken(what) => EndReason::Gone(what),
            other => EndReason::Here(other.to_string()),
        }
    }
}

impl<'c> Relay<'c> {
    pub(super) fn new(
        session: &'c SessionState,
        mailbox: &'c Mailbox<Region>,
        links: Links,
        arena: Option<RegisteredRegion>,
        config: &SessionConfig,
    ) -> Result<Relay<'c>, EndReason> {
        let Links { control, link, queues } = links;
        let control = quiet(control).map_err(|e| EndReason::Here(e.to_string()))?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(broken)?;
        let edge = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(&session.doorbell, EpollEvent::new(edge, DOORBELL)).map_err(broken)?;
        epoll.add(mailbox.wake(), EpollEvent::new(edge, MAILBOX)).map_err(broken)?;
        epoll.add(&control, EpollEvent::new(EpollFlags::EPOLLIN, CONTROL)).map_err(broken)?;
        epoll.add(link.fd(), EpollEvent::new(EpollFlags::EPOLLIN, COMPLETIONS)).map_err(broken)?;
        epoll
            .add(link.domain().device().event_fd(), EpollEvent::new(EpollFlags::EPOLLIN, DEVICE))
            .map_err(broken)?;
        let now = Instant::now();
        let most = u64::from(queues.slot_size - SLOT_DATA);
        let under_way = link.most_under_way();
        let planned = queues.slots.saturating_sub(GRANTED_SLOTS);
        Ok(Relay {
            session,
            mailbox,
            consumer: session.channel.view.consumer(Position::default()),
            control,
            control_reader: FrameReader::new(),
            reader: FrameReader::new(),
            held: None,
            free: (0..planned).collect(),
            free_granted: (planned..queues.slots).collect(),
            untaken: 0,
            is_free: vec![true; queues.slots as usize],
            inputs: Inputs::new(most, link.data_queues(), under_way),
            outputs: Outputs::default(),
            arena: arena.map(|registered| Arc::new(Region::new(registered, false))),
            regions: Regions::new(),
            waiting: vec![0; session.channel.view.geometry().slot_count],
            epoll,
            poll: PollTime::giving_way(config.poll, cores()),
            silence: config.silence,
            heard: now,
            said: now,
            looked: now,
            last_seq: 0,
            released: 0,
            taken_bytes: 0,
            body: Vec::with_capacity(protocol::channel::MAX_RECORD),
            uses: Vec::new(),
            holds: Holds::default(),
            link,
            queues,
        })
    }

    /// Runs until the session ends, and says why it did. Nobody reaches the client's memory any more when this returns.
    pub(super) fn run(mut self) -> EndReason {
        let mut end = match self.work() {
            Ok(never) => match never {},
            Err(end) => end,
        };
        if let EndReason::Gone(_) = end {
            // Queue pairs break before a farewell on the other connection is read: its words are the better ones.
            let deadline = Instant::now() + FAREWELL;
            while Instant::now() < deadline {
                match self.look() {
                    Err(bye @ EndReason::Bye(_)) => {
                        end = bye;
                        break;
                    }
                    Err(_) => break,
                    Ok(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        }
        let farewell = match &end {
            EndReason::Asked(_) => Some(String::new()),
            EndReason::Client(_) | EndReason::Server(_) | EndReason::Here(_) | EndReason::Gone(_) => {
                Some(end.text(&self.session.server))
            }
            EndReason::Bye(_) => None,
        };
        if let Some(text) = farewell {
            // As far as the connection takes it now: a server that misses it sees the connection close.
            let _ = self.say(frame::BYE, text.as_bytes());
        }
        let _ = self.control.shutdown(Shutdown::Both);
        end
    }

    fn work(&mut self) -> Result<Infallible, EndReason> {
        let mut events = [EpollEvent::empty(); 8];
        let mut idle_since: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let mut worked = self.regions.take_messages(self.mailbox, self.taken_bytes)?;
            worked |= self.take_records()?;
            worked |= self.post_writes()?;
            worked |= self.link.flush()?;
            worked |= self.poll_link(now)?;
            self.let_regions_go();
            if now.saturating_duration_since(self.looked) >= LOOK_EVERY {
                self.looked = now;
                worked |= self.look()?;
                self.device_events()?;
                self.keep_alive(now)?;
            }
            if worked {
                if idle_since.take().is_some() {
                    self.poll.paid();
                }
                continue;
            }
            let since = *idle_since.get_or_insert(now);
            let bulk = self.inputs.due() + self.outputs.due() >= BULK;
            let patience = if bulk { self.poll.during_bulk() } else { self.poll.get() };
            if now.saturating_duration_since(since) < patience {
                self.poll.pause();
                continue;
            }
            let asleep = Instant::now();
            self.sleep(&mut events)?;
            self.poll.slept(asleep.elapsed());
            idle_since = Some(Instant::now());
        }
    }

    fn can_take(&self) -> bool {
        self.link.has_room()
            && self.untaken < COMMANDS_AHEAD
            && self.inputs.len() < MAX_UNDER_WAY
            && self.outputs.len() < MAX_UNDER_WAY
    }

    /// Whether something is due from the server. Only then does its silence mean anything; one that is gone meanwhile shows by its control connection, which the kernel watches, and a
    /// link that is down as soon as it is used.
    fn awaits(&self) -> bool {
        self.inputs.len() > 0
            || self.outputs.len() > 0
            || self.session.channel.view.progress().executed() < self.last_seq
            || self.waiting.iter().any(|seq| *seq != 0)
    }

    /// Sleeps until something happens or it is time to ask whether the server is there.
    fn sleep(&mut self, events: &mut [EpollEvent]) -> Result<(), EndReason> {
        let now = Instant::now();
        self.looked = now;
        self.keep_alive(now)?;
        let awaits = self.awaits();
        let timeout = if awaits {
            let next = (self.said.max(self.heard) + ALIVE_EVERY).min(self.heard + self.silence);
            let millis = next.saturating_duration_since(now).as_millis() + 1;
            EpollTimeout::from(millis.min(u128::from(u16::MAX)) as u16)
        } else {
            EpollTimeout::NONE
        };
        let session = self.session;
        let sleep = &session.header().host_sleep;
        // While the link is behind, records must wait anyway: only its progress wakes us.
        let listen = self.can_take();
        if listen {
            sleep.announce();
        }
        self.link.arm()?;
        let late =
            (listen && self.consumer.has_work()) || self.mailbox.has_messages() || self.poll_link(now)?;
        if !late {
            session.counters.sleeps.add(1);
            match self.epoll.wait(events, timeout) {
                Ok(count) => {
                    let bells = events[..count].iter().filter(|e| e.data() == DOORBELL).count();
                    session.counters.doorbells.add(bells as u64);
                }
                Err(nix::Error::EINTR) => {}
                Err(e) => return Err(broken(e)),
            }
        }
        if listen {
            sleep.cancel();
        }
        self.link.disarm();
        if !awaits {
            // A silence begins when something is awaited.
            self.heard = Instant::now();
        }
        self.look()?;
        self.device_events()
    }

    /// Takes completions, and acts on the frames that they brought.
    fn poll_link(&mut self, now: Instant) -> Result<bool, EndReason> {
        let Relay { link, reader, inputs, outputs, session, last_seq, .. } = self;
        let (mut completed, last) = (false, *last_seq);
        let heard = link.poll::<EndReason>(&mut |event| {
            match event {
                Event::Bytes(mut bytes) => {
                    session.counters.control_bytes_received.add(bytes.len() as u64);
                    while !bytes.is_empty() {
                        reader.fill(&mut bytes).map_err(|e| EndReason::Here(e.to_string()))?;
                    }
                }
                Event::Placed { immediate, len, .. } => {
                    session.counters.data_bytes_received.add(len.into());
                    outputs.placed(immediate, len, last)?;
                }
                Event::Written { token } => completed |= inputs.written(token),
            }
            Ok(())
        })?;
        if heard {
            self.heard = now;
            self.take_frames()?;
        }
        if completed {
            self.publish_released();
        }
        Ok(heard)
    }

    fn take_frames(&mut self) -> Result<(), EndReason> {
        let session = self.session;
        let mut waker = session.waker();
        let mut published = false;
        let mut granted: Vec<DataGrant> = Vec::new();
        loop {
            if let Some(held) = self.held {
                if !self.outputs.settle(held.seq, held.bytes)? {
                    self.link.hold(self.reader.buffered() > MAX_HELD);
                    break;
                }
                self.held = None;
                self.link.hold(false);
            }
            let Some((kind, body)) =
                self.reader.next_frame().map_err(|e| EndReason::Server(e.to_string()))?
            else {
                break;
            };
            session.counters.frames_received.add(1);
            match kind {
                frame::REPLY => reply(session, &mut self.waiting, body, &mut waker)?,
                frame::PROGRESS => {
                    for update in body.chunks(size_of::<ProgressUpdate>()) {
                        let wrong =
                            |_| EndReason::Server(format!("a progress frame of {} bytes", body.len()));
                        publish(session, &ProgressUpdate::read_from_bytes(update).map_err(wrong)?)?;
                    }
                    published = true;
                }
                frame::DATA_SENT => {
                    let (sent, _) = split_struct(body).map_err(|e| EndReason::Server(e.to_string()))?;
                    self.held = Some(sent);
                }
                frame::SLOTS_FREE => {
                    for slot in body.chunks(4) {
                        let slot = slot.first_chunk::<4>().map(|b| u32::from_le_bytes(*b));
                        match slot.and_then(|slot| Some((slot, self.is_free.get_mut(slot as usize)?))) {
                            Some((slot, free)) if !*free => {
                                *free = true;
                                let planned = slot < self.queues.slots.saturating_sub(GRANTED_SLOTS);
                                let list = if planned { &mut self.free } else { &mut self.free_granted };
                                list.push_back(slot);
                            }
                            _ => {
                                return Err(EndReason::Server(format!(
                                    "it frees slot {slot:?}, which is not in use"
                                )));
                            }
                        }
                    }
                }
                frame::DATA_GRANT => {
                    let (grant, _) =
                        split_struct::<DataGrant>(body).map_err(|e| EndReason::Server(e.to_string()))?;
                    granted.push(grant);
                }
                frame::COMMANDS_TAKEN => {
                    let bytes = body.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
                    self.untaken =
                        bytes.and_then(|bytes| self.untaken.checked_sub(bytes)).ok_or_else(|| {
                            EndReason::Server(format!(
                                "it has taken {bytes:?} bytes of commands, more than were sent"
                            ))
                        })?;
                }
                frame::ALIVE => {}
                other => return Err(EndReason::Server(format!("it sent a frame of unknown kind {other}"))),
            }
        }
        for DataGrant { seq, piece, upto, .. } in granted {
            if self.inputs.is_overrun() {
                return Err(EndReason::Server("it grants data in more parts than it takes".into()));
            }
            self.inputs.grant(seq, piece, upto);
        }
        if published && session.header().progress_sleep.take() {
            waker.wake(Header::PROGRESS_SLEEP_OFFSET);
        }
        Ok(())
    }

    /// Appends a frame's header, whose length [`finish`](Self::finish) fills in.
    fn begin(&mut self, kind: u32) -> usize {
        let out = self.link.out();
        out.extend_from_slice(FrameHeader { kind, len: 0 }.as_bytes());
        out.len()
    }

    fn finish(&mut self, begun: usize) {
        let out = self.link.out();
        let len = (out.len() - begun) as u32;
        out[begun - 4..begun].copy_from_slice(&len.to_le_bytes());
        self.session.counters.frames_sent.add(1);
    }

    fn take_records(&mut self) -> Result<bool, EndReason> {
        let mut begun = None;
        let mut worked = false;
        while self.can_take() {
            match self.consumer.pop(&mut self.body) {
                Ok(None) => break,
                Ok(Some(record)) => {
                    self.check(record, &mut begun)?;
                    if begun.is_none() {
                        begun = Some(self.begin(frame::COMMANDS));
                    }
                    let size = RECORD_HEADER + self.body.len();
                    let out = self.link.out();
                    out.extend_from_slice(&record.to_bytes(size as u32));
                    out.extend_from_slice(&self.body);
                    self.last_seq = record.seq;
                    self.taken_bytes += size as u64;
                    self.untaken += size as u64;
                    self.session.counters.commands.add(1);
                    self.session.counters.copied_bytes.add(2 * size as u64);
                    worked = true;
                }
                Err(e) => return Err(EndReason::Client(e.to_string())),
            }
        }
        if let Some(begun) = begun {
            self.finish(begun);
        }
        if worked {
            if self.consumer.has_room() && self.session.header().ring_sleep.take() {
                self.session.waker().wake(Header::RING_SLEEP_OFFSET);
            }
            self.publish_released();
        }
        Ok(worked)
    }

    /// Judges the copy of a record, queues the data that it names, and gives the server the keys that it needs for it: before the frame of commands `begun`, which ends
    /// then, goes on.
    fn check(&mut self, record: Record, begun: &mut Option<usize>) -> Result<(), EndReason> {
        let Record { opcode, reply_slot, seq } = record;
        let Some(info) = ops::info(opcode) else {
            return Err(EndReason::Client(format!("command {seq} has unknown opcode {opcode:#06x}")));
        };
        let wrong =
            |what: &dyn std::fmt::Display| EndReason::Client(format!("command {seq} ({}) {what}", info.name));
        match info.class {
            Class::Async if reply_slot == NO_SLOT => {}
            Class::Async => {
                return Err(wrong(&format_args!(
                    "names reply slot {reply_slot} though it is never answered"
                )));
            }
            Class::Sync => match self.waiting.get_mut(usize::from(reply_slot)) {
                None => {
                    return Err(wrong(&format_args!("names reply slot {reply_slot}, which does not exist")));
                }
                Some(awaited @ 0) => *awaited = seq,
                Some(other) => {
                    return Err(wrong(&format_args!(
                        "names reply slot {reply_slot}, where command {other} awaits its answer"
                    )));
                }
            },
        }
        self.holds.note(opcode);
        if !info.carries_data {
            return Ok(());
        }
        self.uses.clear();
        let uses = &mut self.uses;
        (info.visit_data)(&self.body, &mut |data| uses.push(data))
            .map_err(|e| wrong(&format_args!("does not decode: {e}")))?;
        for piece in 0..self.uses.len() {
            let (range, write) = match self.uses[piece] {
                DataUse::In(range) | DataUse::Late(range) => (range, false),
                DataUse::Out(range) => (range, true),
            };
            let span =
                Span::new(self.arena.as_ref(), self.regions.known(), range, write).map_err(|what| {
                    wrong(&format_args!(
                        "names data at offset {:#x} of {:?}, {} bytes, which {what}",
                        range.offset, range.place, range.len
                    ))
                })?;
            if !write {
                // Slots become free in the order in which they were given out: what may lie for long takes none before its stream has come to it.
                let late = matches!(self.uses[piece], DataUse::Late(_)) || self.holds.any();
                if !late {
                    self.inputs.push(seq, piece as u32, span);
                } else if span.len > 0 {
                    if let Some(begun) = begun.take() {
                        self.finish(begun);
                    }
                    let ask = self.begin(frame::DATA_ASK);
                    let body = DataAsk { seq, piece: piece as u32, reserved: 0 };
                    self.link.out().extend_from_slice(body.as_bytes());
                    self.finish(ask);
                    self.inputs.push_later(seq, piece as u32, span);
                }
                continue;
            }
            if span.region.grant() {
                if let Some(begun) = begun.take() {
                    self.finish(begun);
                }
                let registration = span.region.registered.registration();
                let region = match range.place {
                    Place::Arena => ARENA_KEY,
                    Place::Region(id) => id,
                };
                let (address, size, key) =
                    (registration.address(), registration.len() as u64, registration.remote_key());
                let grant = self.begin(frame::REGION_KEY);
                self.link.out().extend_from_slice(RegionKey { address, size, region, key }.as_bytes());
                self.finish(grant);
            }
            self.outputs.expect(seq, span);
        }
        Ok(())
    }

    /// Posts writes as far as there are slots, queues and tokens for them.
    fn post_writes(&mut self) -> Result<bool, EndReason> {
        let mut worked = false;
        while self.inputs.has_tokens() {
            // Granted data first: work that goes on already waits for it.
            let granted = self.inputs.has_granted() && !self.free_granted.is_empty();
            let planned = self.inputs.has_jobs() && !self.free.is_empty();
            if !granted && !planned {
                break;
            }
            let Some(queue) = self.link.next_queue() else { break };
            let (chunk, slot) = if granted {
                (self.inputs.next_granted(), self.free_granted.pop_front())
            } else {
                (self.inputs.next_chunk(), self.free.pop_front())
            };
            let (Some(chunk), Some(slot)) = (chunk, slot) else { break };
            let Some(token) = self.inputs.token(&chunk) else { break };
            self.is_free[slot as usize] = false;
            let header =
                DataHeader { seq: chunk.seq, offset: chunk.offset, piece: chunk.piece, len: chunk.len };
            let begin = u64::from(slot) * u64::from(self.queues.slot_size) + u64::from(SLOT_DATA)
                - size_of::<DataHeader>() as u64;
            self.link.put(&Put {
                queue,
                source: chunk.source,
                header: Some(header),
                address: self.queues.slots_address + begin,
                key: self.queues.slots_key,
                immediate: slot,
                token,
                signal: chunk.signal,
            })?;
            self.session.counters.data_bytes_sent.add(chunk.len.into());
            worked = true;
        }
        Ok(worked)
    }

    fn publish_released(&mut self) {
        let released = self.inputs.released(self.last_seq);
        if released <= self.released {
            return;
        }
        self.released = released;
        self.session.channel.view.progress().set_released(released);
        if self.session.header().progress_sleep.take() {
            self.session.waker().wake(Header::PROGRESS_SLEEP_OFFSET);
        }
    }

    /// Looks at the control connection. True: there was something.
    fn look(&mut self) -> Result<bool, EndReason> {
        match self.control_reader.fill(&mut self.control) {
            Ok(0) => return Err(EndReason::Gone("the server closed the connection".into())),
            Ok(_) => {}
            Err(e)
                if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) =>
            {
                return Ok(false);
            }
            Err(e) => return Err(EndReason::Gone(e.to_string())),
        }
        while let Some((kind, body)) =
            self.control_reader.next_frame().map_err(|e| EndReason::Server(e.to_string()))?
        {
            match kind {
                frame::ALIVE => {}
                frame::BYE => return Err(EndReason::Bye(String::from_utf8_lossy(body).into_owned())),
                other => {
                    return Err(EndReason::Server(format!(
                        "it sent a frame of kind {other} on the control connection"
                    )));
                }
            }
        }
        Ok(true)
    }

    fn device_events(&self) -> Result<(), EndReason> {
        let device = self.link.domain().device();
        while let Some(event) = device.next_event() {
            match event {
                DeviceEvent::PortDown(port) => {
                    tracing::warn!(device = device.name(), port, "RDMA port went down")
                }
                DeviceEvent::PortUp(port) => {
                    tracing::info!(device = device.name(), port, "RDMA port came up")
                }
                DeviceEvent::Fatal(what) => return Err(EndReason::Gone(what)),
                DeviceEvent::Other => {}
            }
        }
        Ok(())
    }

    /// Says a frame on the control connection, which is never behind: it carries a farewell.
    fn say(&mut self, kind: u32, body: &[u8]) -> Result<(), EndReason> {
        let header = FrameHeader { kind, len: body.len() as u32 };
        let frame = [header.as_bytes(), body].concat();
        self.control.write_all(&frame).map_err(|e| EndReason::Gone(e.to_string()))
    }

    fn keep_alive(&mut self, now: Instant) -> Result<(), EndReason> {
        let silent = now.saturating_duration_since(self.heard);
        if silent < ALIVE_EVERY.min(self.silence) {
            return Ok(());
        }
        if !self.awaits() {
            self.heard = now;
            return Ok(());
        }
        if silent > self.silence {
            let device = self.link.domain().device();
            let (name, port) = (device.name(), device.port().number);
            return Err(EndReason::Gone(format!(
                "nothing came over RDMA device {name} port {port} for {} s: is the link down?",
                silent.as_secs()
            )));
        }
        // Over the queue pairs: the control connection may go another way, and a device may wait for ever for what it has lost.
        if now.saturating_duration_since(self.said) >= ALIVE_EVERY {
            self.said = now;
            if self.link.has_room() {
                let alive = self.begin(frame::ALIVE);
                self.finish(alive);
                self.link.flush()?;
            }
        }
        Ok(())
    }

    fn let_regions_go(&mut self) {
        let ring = self.session.channel.view.geometry().ring_size as u64;
        self.regions.let_go(|| self.consumer.has_work(), self.taken_bytes, ring);
    }
}
