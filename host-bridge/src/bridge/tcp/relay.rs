//! The relay: one thread for each session, which takes records off the ring, moves bulk data, and writes what the server says into the channel.
//!
//! It never waits for one thing alone. In each turn it does what can be done now: takes records (unless the connection is behind), sends, receives. When there
//! is nothing to do it polls for a while ([`PollTime`]) and then sleeps on all its descriptors together. Because it always receives while it
//! cannot send, two sides that both have much to send cannot wait for each other.

use std::convert::Infallible;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use protocol::channel::{Consumer, Header, NO_SLOT, Position, Record};
use protocol::data::DataUse;
use protocol::handle::Handle;
use protocol::link::{DataAsk, frame};
use protocol::ops::{self, Class};
use protocol::trace::Stage;
use zerocopy::IntoBytes;

use super::Links;
use super::control::{Begun, Control};
use super::lane::{AHEAD, Lane};
use super::socket::{Gather, Socket};
use super::transfer::{Inputs, Outputs, Region, Span, When};
use crate::bridge::SessionConfig;
use crate::bridge::state::SessionState;
use crate::bridge::mailbox::Mailbox;
use crate::bridge::polling::PollTime;
use crate::bridge::relayed::{EndReason, Regions};

/// Commands with data under way, each way, above which no more records are taken. (A GPU's own queue holds about a thousand.)
const MAX_UNDER_WAY: usize = 1 << 16;
/// Silence after which a server that is waited for is asked whether it is there.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// How long a lost connection's reason is waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Looks at the ring between two looks at the connections, while polling.
const RING_LOOKS: u32 = 64;

/// Marks the queue of a command that names no stream, its number the command's: its data (a module's image, say) waits for no other command's.
const NO_STREAM: u64 = 1 << 63;

const DOORBELL: u64 = 0;
const MAILBOX: u64 = 1;
const CONTROL: u64 = 2;
const FIRST_LANE: u64 = 3;

pub(super) struct Relay<'c> {
    session: &'c SessionState,
    mailbox: &'c Mailbox<Region>,
    consumer: Consumer<'c>,
    control: Control,
    lanes: Vec<Lane>,
    inputs: Inputs,
    outputs: Outputs,
    regions: Regions<Region>,
    /// For each reply slot the seq of the command that awaits an answer there; 0: none.
    waiting: Vec<u64>,
    epoll: Epoll,
    poll: PollTime,
    silence: Duration,
    /// Bytes of data received when that was last looked at: hands receive unseen.
    received: u64,
    last_seq: u64,
    released: u64,
    taken_bytes: u64,
    body: Vec<u8>,
    uses: Vec<DataUse>,
    gather: Gather,
}

fn broken(e: nix::Error) -> EndReason {
    EndReason::Here(format!("epoll: {e}"))
}

impl<'c> Relay<'c> {
    pub(super) fn new(
        session: &'c Arc<SessionState>,
        mailbox: &'c Mailbox<Region>,
        links: Links,
        config: &SessionConfig,
    ) -> Result<Relay<'c>, EndReason> {
        let here = |e: std::io::Error| EndReason::Here(e.to_string());
        let control = Control::new(Socket::new(links.control).map_err(here)?);
        let mut lanes = Vec::with_capacity(links.data.len());
        for (index, fd) in links.data.into_iter().enumerate() {
            let mut lane = Lane::new(Socket::new(fd).map_err(here)?, index);
            if config.hands {
                let wake = mailbox.wake().as_fd().try_clone_to_owned().map_err(here)?;
                lane.take_hands(session, &wake).map_err(here)?;
            }
            lanes.push(lane);
        }
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(broken)?;
        let edge = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(&session.doorbell, EpollEvent::new(edge, DOORBELL)).map_err(broken)?;
        epoll.add(mailbox.wake(), EpollEvent::new(edge, MAILBOX)).map_err(broken)?;
        epoll.add(control.socket(), EpollEvent::new(EpollFlags::EPOLLIN, CONTROL)).map_err(broken)?;
        for (i, lane) in lanes.iter().enumerate() {
            epoll
                .add(lane.socket(), EpollEvent::new(EpollFlags::EPOLLIN, FIRST_LANE + i as u64))
                .map_err(broken)?;
        }
        Ok(Relay {
            session,
            mailbox,
            consumer: session.channel.view.consumer(Position::default()),
            control,
            lanes,
            inputs: Inputs::default(),
            outputs: Outputs::default(),
            regions: Regions::new(),
            waiting: vec![0; session.channel.view.geometry().slot_count],
            epoll,
            poll: PollTime::new(config.poll),
            silence: config.silence,
            received: 0,
            last_seq: 0,
            released: 0,
            taken_bytes: 0,
            body: Vec::with_capacity(protocol::channel::MAX_RECORD),
            uses: Vec::new(),
            gather: Gather::new(),
        })
    }

    /// Runs until the session ends, and says why it did. The connections are closed when this returns.
    pub(super) fn run(mut self) -> EndReason {
        let end = match self.work() {
            Ok(never) => match never {},
            Err(EndReason::Gone(what)) => self.last_words(what),
            Err(end) => end,
        };
        let farewell = match &end {
            EndReason::Asked(reason) => Some(reason.clone()),
            EndReason::Client(_) | EndReason::Server(_) | EndReason::Here(_) => {
                Some(end.text(&self.session.server))
            }
            EndReason::Gone(_) | EndReason::Bye(_) => None,
        };
        if let Some(text) = farewell {
            // As far as the connection takes it now: a server that misses it sees the connection close.
            self.control.frame(frame::BYE, text.as_bytes());
            let _ = self.control.send(self.session, Instant::now());
        }
        self.control.socket().shut_down();
        self.lanes.iter().for_each(|lane| lane.socket().shut_down());
        end
    }

    /// A connection is gone. If the server has said why, that is on the control connection, perhaps still on its way.
    fn last_words(&mut self, what: String) -> EndReason {
        let deadline = Instant::now() + LAST_WORDS;
        loop {
            match self.control.take_frames(self.session, &mut self.waiting, &mut self.outputs, &mut self.inputs)
            {
                Err(EndReason::Bye(reason)) => return EndReason::Bye(reason),
                Err(_) => return EndReason::Gone(what),
                Ok(_) => {}
            }
            match self.control.read(self.session) {
                Ok(true) => {}
                Ok(false) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Ok(false) | Err(_) => return EndReason::Gone(what),
            }
        }
    }

    fn work(&mut self) -> Result<Infallible, EndReason> {
        let mut events = [EpollEvent::empty(); 32];
        let mut idle_since: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let mut worked = self.regions.take_messages(self.mailbox, self.taken_bytes)?;
            worked |= self.collect()?;
            worked |= self.take_records()?;
            worked |= self.send(now)?;
            self.let_regions_go();
            self.keep_alive(now)?;
            self.watch()?;

            let may_sleep = match idle_since {
                Some(since) if !worked => now.duration_since(since) >= self.poll.get(),
                _ => false,
            };
            if worked {
                if idle_since.is_some() {
                    self.poll.paid();
                }
                idle_since = None;
            } else if idle_since.is_none() {
                idle_since = Some(now);
            }

            let count = if may_sleep {
                let count = self.sleep(&mut events, now)?;
                self.poll.wasted();
                idle_since = Some(Instant::now());
                count
            } else {
                if !worked {
                    for _ in 0..RING_LOOKS {
                        if self.consumer.has_work() || self.mailbox.has_messages() {
                            break;
                        }
                        std::hint::spin_loop();
                    }
                }
                self.wait(&mut events, EpollTimeout::ZERO)?
            };
            let heard = self.react(&events[..count])?;
            if heard {
                if idle_since.is_some() {
                    self.poll.paid();
                }
                idle_since = None;
            }
        }
    }

    fn can_take(&self) -> bool {
        self.control.has_room() && self.inputs.len() < MAX_UNDER_WAY && self.outputs.len() < MAX_UNDER_WAY
    }

    /// Whether something is due from the server. Only then does its silence mean anything; a server that dies meanwhile is noticed by the connection's keepalive.
    fn awaits(&self) -> bool {
        self.control.wants_out()
            || self.inputs.len() > 0
            || self.outputs.len() > 0
            || self.session.channel.view.progress().executed() < self.last_seq
            || self.waiting.iter().any(|seq| *seq != 0)
    }

    /// Sleeps until something happens or it is time to ask whether the server is there.
    fn sleep(&mut self, events: &mut [EpollEvent], now: Instant) -> Result<usize, EndReason> {
        let awaits = self.awaits();
        let timeout = if awaits {
            let next = (self.control.said.max(self.control.heard) + ALIVE_EVERY)
                .min(self.control.heard + self.silence);
            let millis = next.saturating_duration_since(now).as_millis() + 1;
            EpollTimeout::from(millis.min(u128::from(u16::MAX)) as u16)
        } else {
            EpollTimeout::NONE
        };
        let sleep = &self.session.header().host_sleep;
        // While the connection is behind, records must wait anyway: only its progress wakes us.
        let listen = self.can_take();
        if listen {
            sleep.announce();
        }
        if (listen && self.consumer.has_work()) || self.mailbox.has_messages() {
            sleep.cancel();
            return Ok(0);
        }
        self.session.counters.sleeps.add(1);
        let count = self.wait(events, timeout)?;
        if listen {
            sleep.cancel();
        }
        if !awaits {
            // A silence begins when something is awaited.
            self.control.heard = Instant::now();
        }
        Ok(count)
    }

    fn wait(&self, events: &mut [EpollEvent], timeout: EpollTimeout) -> Result<usize, EndReason> {
        match self.epoll.wait(events, timeout) {
            Ok(n) => Ok(n),
            Err(nix::Error::EINTR) => Ok(0),
            Err(e) => Err(broken(e)),
        }
    }

    /// Receives on the connections that have something. True: there was something.
    fn react(&mut self, events: &[EpollEvent]) -> Result<bool, EndReason> {
        let session = self.session;
        let (mut worked, mut heard) = (false, false);
        for event in events {
            match event.data() {
                DOORBELL => {
                    session.counters.doorbells.add(1);
                    worked = true;
                }
                MAILBOX => worked = true,
                CONTROL => {
                    if self.control.wants_in() {
                        heard |= self.control.read(session)?;
                    } else if event.events().intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
                        return Err(EndReason::Gone("the server closed the connection".into()));
                    }
                }
                lane => {
                    if let Some(lane) = self.lanes.get_mut((lane - FIRST_LANE) as usize) {
                        heard |= lane.receive(session, &mut self.outputs, &mut self.gather)?;
                    }
                }
            }
        }
        if heard {
            self.control.heard = Instant::now();
            self.control.take_frames(session, &mut self.waiting, &mut self.outputs, &mut self.inputs)?;
        }
        Ok(worked || heard)
    }

    /// Takes over what the lanes' hands have received. True: there was something.
    fn collect(&mut self) -> Result<bool, EndReason> {
        let mut heard = false;
        for lane in &mut self.lanes {
            heard |= lane.collect(&mut self.outputs)?;
        }
        if heard {
            self.control.heard = Instant::now();
            self.control.take_frames(self.session, &mut self.waiting, &mut self.outputs, &mut self.inputs)?;
        }
        Ok(heard)
    }

    fn take_records(&mut self) -> Result<bool, EndReason> {
        let mut begun = None;
        let mut worked = false;
        while self.can_take() {
            match self.consumer.pop(&mut self.body) {
                Ok(None) => break,
                Ok(Some(record)) => {
                    self.session.trace.note(Stage::Taken, record.seq, record.opcode);
                    self.check(record, &mut begun)?;
                    if begun.is_none() {
                        begun = Some(self.control.begin(frame::COMMANDS));
                        self.session.counters.frames_sent.add(1);
                    }
                    self.control.record(record, &self.body);
                    self.last_seq = record.seq;
                    let size = (protocol::channel::RECORD_HEADER + self.body.len()) as u64;
                    self.taken_bytes += size;
                    self.session.counters.commands.add(1);
                    self.session.counters.copied_bytes.add(2 * size);
                    worked = true;
                }
                Err(e) => return Err(EndReason::Client(e.to_string())),
            }
        }
        if let Some(begun) = begun {
            self.control.finish(begun);
        }
        if !worked {
            return Ok(false);
        }
        if self.consumer.has_room() && self.session.header().ring_sleep.take() {
            self.session.waker().wake(Header::RING_SLEEP_OFFSET);
        }
        self.publish_released();
        Ok(true)
    }

    /// Judges the copy of a record, and queues the data that it names. Where the server must be asked for some of it, it is asked before it has the command: the frame of
    /// commands `begun` ends then. While the server executes a command it reads nothing that is behind it.
    fn check(&mut self, record: Record, begun: &mut Option<Begun>) -> Result<(), EndReason> {
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
                Some(0) => self.waiting[usize::from(reply_slot)] = seq,
                Some(other) => {
                    return Err(wrong(&format_args!(
                        "names reply slot {reply_slot}, where command {other} awaits its answer"
                    )));
                }
            },
        }
        if !info.carries_data {
            return Ok(());
        }
        self.uses.clear();
        let uses = &mut self.uses;
        (info.visit_data)(&self.body, &mut |data| uses.push(data))
            .map_err(|e| wrong(&format_args!("does not decode: {e}")))?;
        let mut flow = NO_STREAM | seq;
        (info.visit_handles)(&self.body, &mut |handle| {
            if let Handle::Stream(stream) = handle {
                flow = stream.0.into();
            }
        })
        .map_err(|e| wrong(&format_args!("does not decode: {e}")))?;
        for (piece, data) in self.uses.iter().enumerate() {
            let (range, write, when) = match *data {
                DataUse::In(range) => (range, false, When::Now),
                DataUse::Late(range) => (range, false, When::Late),
                DataUse::Out(range) => (range, true, When::Now),
            };
            let span = Span::new(self.session, self.regions.known(), range, write).map_err(|what| {
                wrong(&format_args!(
                    "names data at offset {:#x} of {:?}, {} bytes, which {what}",
                    range.offset, range.place, range.len
                ))
            })?;
            let piece = piece as u32;
            if write {
                self.outputs.expect(seq, piece, span);
            } else if self.inputs.push(flow, seq, piece, span, when, self.lanes.len()) {
                if let Some(begun) = begun.take() {
                    self.control.finish(begun);
                }
                self.control.frame(frame::DATA_ASK, DataAsk { seq, piece, reserved: 0 }.as_bytes());
            }
        }
        Ok(())
    }

    fn send(&mut self, now: Instant) -> Result<bool, EndReason> {
        let mut worked = self.control.send(self.session, now)?;
        let mut completed = false;
        // Every lane has something to do before one has something ahead.
        for ahead in 1..=AHEAD {
            for lane in &mut self.lanes {
                if !lane.wants_out() && !lane.is_sending() && !self.inputs.has_jobs() {
                    continue;
                }
                let sent = lane.send(self.session, &mut self.inputs, &mut self.gather, ahead)?;
                worked |= sent.worked;
                completed |= sent.completed;
            }
        }
        if completed {
            self.publish_released();
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

    fn keep_alive(&mut self, now: Instant) -> Result<(), EndReason> {
        let received = self.session.counters.data_bytes_received.get();
        if received != self.received {
            (self.received, self.control.heard) = (received, now);
        }
        let silent = now.saturating_duration_since(self.control.heard);
        if silent < ALIVE_EVERY.min(self.silence) {
            return Ok(());
        }
        if !self.awaits() {
            self.control.heard = now;
            return Ok(());
        }
        if silent > self.silence {
            return Err(EndReason::Gone(format!("nothing was heard of it for {} s", silent.as_secs())));
        }
        if now.saturating_duration_since(self.control.said) >= ALIVE_EVERY && !self.control.wants_out() {
            self.control.frame(frame::ALIVE, &[]);
            self.control.send(self.session, now)?;
        }
        Ok(())
    }

    /// Has epoll watch for what each connection wants now.
    fn watch(&mut self) -> Result<(), EndReason> {
        let wants = (self.control.wants_in(), self.control.wants_out());
        if wants != self.control.watches {
            let mut event = EpollEvent::new(flags(wants.0, wants.1), CONTROL);
            self.epoll.modify(self.control.socket(), &mut event).map_err(broken)?;
            self.control.watches = wants;
        }
        for (i, lane) in self.lanes.iter_mut().enumerate() {
            let wants = (lane.wants_in(), lane.wants_out());
            if wants != lane.watches {
                let mut event = EpollEvent::new(flags(wants.0, wants.1), FIRST_LANE + i as u64);
                self.epoll.modify(lane.socket(), &mut event).map_err(broken)?;
                lane.watches = wants;
            }
        }
        Ok(())
    }

    fn let_regions_go(&mut self) {
        let ring = self.session.channel.view.geometry().ring_size as u64;
        self.regions.let_go(|| self.consumer.has_work(), self.taken_bytes, ring);
    }
}

fn flags(input: bool, output: bool) -> EpollFlags {
    let mut flags = EpollFlags::empty();
    flags.set(EpollFlags::EPOLLIN, input);
    flags.set(EpollFlags::EPOLLOUT, output);
    flags
}
