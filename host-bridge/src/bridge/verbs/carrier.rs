//! The queue pairs of a session, as its relay uses them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::link::{ACKNOWLEDGE_CONTROL, DataHeader, Received, RegionKey, SLOT_DATA, Written, frame};
use zerocopy::IntoBytes;

use super::links::{Links, saved_queues};
use super::memory::DeviceMemory;
use super::redial::{Redial, Resumed};
use crate::bridge::config::SessionConfig;
use crate::bridge::connect::Daemon;
use crate::bridge::relay::{Carrier, EndReason, Mailbox, RestoredWrites, Slots, Wakeups, Write};
use crate::bridge::resume::{self, Interruption, Numbers, Ticket};
use crate::bridge::saved::SavedQueues;
use crate::bridge::socket::{Socket, not_now};
use crate::bridge::state::SessionState;
use crate::framing::{FrameReader, SendBuffer};
use crate::verbs::{Before, DeviceEvent, Domain, EarlierWrites, Event, Link, Put, VerbsError};

/// How often the control connection and the device's events are looked at while there is work.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Pauses between two messages that have the server's device ask for the first ones through new queue pairs:
/// the first pause, and the longest, to which they double.
const NUDGES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(200));
/// How long new queue pairs may take to carry something, the first time. Twice as long each time that they
/// did not.
const PROOF: Duration = Duration::from_secs(2);
/// Bytes of the server's frames that may wait for data before it is held off.
const MAX_BACKLOG: usize = 256 << 10;

/// Numbers of the descriptors that are watched.
const CONTROL: usize = 0;
const COMPLETIONS: usize = 1;
const DEVICE: usize = 2;

type Machine<'c> = crate::bridge::relay::Machine<'c, Slots<DeviceMemory>>;

impl From<VerbsError> for EndReason {
    fn from(e: VerbsError) -> EndReason {
        match e {
            VerbsError::Peer(what) => EndReason::Server(what),
            VerbsError::Broken(what) => EndReason::Gone(what),
            other => EndReason::Here(other.to_string()),
        }
    }
}

/// What of a session another process has left.
pub(super) struct Left {
    /// The control stream to the server.
    pub(super) out: SendBuffer,
    /// For each queue of data.
    pub(super) writes: Vec<RestoredWrites<DeviceMemory>>,
    /// Keys of memories that the server may be about to write.
    pub(super) keys: Vec<RegionKey>,
    /// How many processes have had the session before.
    pub(super) generation: u64,
}

/// A session's queue pairs, and the control connection that stays beside them.
#[derive(Debug)]
pub(super) struct VerbsCarrier {
    /// Dropped first: after that nobody reaches the client's memory.
    link: Link,
    session: Arc<SessionState>,
    config: SessionConfig,
    ticket: Ticket,
    numbers: Numbers,
    queues: SavedQueues,
    /// Keys that the server is to be given with the first link of this process.
    keys: Vec<RegionKey>,
    /// Bytes of the control stream that the server was told of.
    told: u64,
    /// `None`: it is lost.
    control: Option<Arc<Socket>>,
    control_reader: FrameReader,
    /// Under TLS, where the daemon may say more than the control connection did.
    daemon: Option<Daemon>,
    wakeups: Wakeups,
    looked: Instant,
}

impl VerbsCarrier {
    /// The carrier of a session that begins with these connections.
    pub(super) fn new(
        session: &Arc<SessionState>,
        mailbox: &Mailbox<DeviceMemory>,
        links: Links,
        config: &SessionConfig,
    ) -> Result<VerbsCarrier, EndReason> {
        let Links { control, link, queues, depth, daemon, ticket, unbegun, .. } = links;
        let control = Arc::new(Socket::new(control).map_err(|e| EndReason::Here(e.to_string()))?);
        let wakeups = Wakeups::new(session, mailbox)?;
        wakeups.add(link.domain().device().event_fd(), DEVICE)?;
        let carrier = VerbsCarrier {
            link,
            session: Arc::clone(session),
            config: config.clone(),
            ticket,
            numbers: Numbers::default(),
            queues: saved_queues(&queues, depth),
            keys: Vec::new(),
            told: 0,
            control: Some(control),
            control_reader: FrameReader::new(),
            daemon,
            wakeups,
            looked: Instant::now(),
        };
        carrier.watch()?;
        // From now on the carrier ends the session.
        unbegun.begun();
        Ok(carrier)
    }

    /// The carrier of a session that another process had. It has to [reconnect](Carrier::reconnect) first.
    pub(super) fn restored(
        session: &Arc<SessionState>,
        mailbox: &Mailbox<DeviceMemory>,
        (domain, ticket, queues): (&Arc<Domain>, &Ticket, &SavedQueues),
        config: &SessionConfig,
        Left { out, writes, keys, generation }: Left,
    ) -> Result<VerbsCarrier, EndReason> {
        let numbers = Numbers::of_process(generation)?;
        let earlier = |(queue, RestoredWrites { taken, done, under_way })| {
            let posted = under_way.iter().map(|write| put(queues, queue, write)).collect::<Result<_, _>>()?;
            Ok(EarlierWrites { done, under_way: posted, taken })
        };
        let writes = (1..).zip(writes).map(earlier).collect::<Result<_, EndReason>>()?;
        let mut link = Link::restored(domain, &config.verbs, writes);
        *link.send_buffer() = out;
        link.give_up_stalled();
        let wakeups = Wakeups::new(session, mailbox)?;
        wakeups.add(domain.device().event_fd(), DEVICE)?;
        Ok(VerbsCarrier {
            link,
            session: Arc::clone(session),
            config: config.clone(),
            ticket: ticket.clone(),
            numbers,
            queues: *queues,
            keys,
            told: 0,
            control: None,
            control_reader: FrameReader::new(),
            daemon: None,
            wakeups,
            looked: Instant::now(),
        })
    }

    /// Watches the connections that there are now.
    fn watch(&self) -> Result<(), EndReason> {
        if let Some(control) = &self.control {
            self.wakeups.add(&**control, CONTROL)?;
        }
        self.link.fd().map_or(Ok(()), |fd| self.wakeups.add(fd, COMPLETIONS))
    }

    /// Acts on what has come through the link.
    fn act(machine: &mut Machine<'_>, session: &SessionState, event: Event<'_>) -> Result<(), EndReason> {
        match event {
            Event::Bytes(mut bytes) => {
                while !bytes.is_empty() {
                    machine.read(&mut bytes).map_err(|e| EndReason::Here(e.to_string()))?;
                }
            }
            Event::Placed { queue, immediate, len, number } => {
                session.counters.data_bytes_received.add(len.into());
                machine.written_by_server(queue - 1, number, (immediate, len))?;
            }
            Event::Written { queue, token } => {
                if let Some((seq, len)) = machine.schedule().written(token) {
                    machine.sent(seq, len);
                    machine.arrived(queue - 1, 1);
                }
            }
        }
        Ok(())
    }

    /// Takes completions, and acts on the frames that they brought. True: there was one.
    fn poll(&mut self, machine: &mut Machine<'_>, now: Instant) -> Result<bool, EndReason> {
        let session = &self.session;
        let polled = self.link.poll::<EndReason>(&mut |event| Self::act(machine, session, event));
        if polled.is_err() {
            // Also what came just before the link broke.
            self.take_frames(machine)?;
        }
        let heard = polled?;
        if heard {
            machine.heard(now);
            self.take_frames(machine)?;
            self.link.hold(machine.backlog() > MAX_BACKLOG);
        }
        Ok(heard)
    }

    /// Acts on the frames that have come, and forgets what the server has received.
    fn take_frames(&mut self, machine: &mut Machine<'_>) -> Result<(), EndReason> {
        machine.take_frames()?;
        for Received { stream, bytes, .. } in machine.take_acknowledged() {
            if stream != 0 {
                return Err(EndReason::Server(format!("it acknowledges stream {stream} over verbs")));
            }
            machine.frames_arrived(self.link.send_buffer(), bytes)?;
        }
        Ok(())
    }

    /// Acknowledges the control stream as far as it has been acted on: once much has come, or sooner if
    /// something goes to the server anyway.
    fn acknowledge(&mut self, machine: &mut Machine<'_>) {
        let bytes = machine.control_taken();
        let enough = if self.link.wants_out() { ACKNOWLEDGE_CONTROL / 8 } else { ACKNOWLEDGE_CONTROL };
        if self.ticket.survives() && bytes - self.told >= enough {
            let frame = Received { stream: 0, reserved: 0, bytes };
            if machine.frame(self.link.send_buffer(), frame::RECEIVED, frame.as_bytes()) {
                self.told = bytes;
            }
        }
    }

    /// Looks at the control connection, which says little, and at the device's events. True: there was
    /// something.
    fn look(&mut self) -> Result<bool, EndReason> {
        self.looked = Instant::now();
        device_events(&self.link)?;
        let Some(control) = &self.control else { return Ok(false) };
        match not_now(self.control_reader.fill(&mut &**control)) {
            Ok(Some(0)) => return Err(EndReason::Gone("the server closed the connection".into())),
            Ok(Some(_)) => {}
            Ok(None) => return Ok(false),
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

    /// Gives up all connections. What has come through them counts, and nothing comes any more. Gives how
    /// much has been acted on: bytes of frames, and of each queue, writes.
    fn leave(&mut self, machine: &mut Machine<'_>) -> Result<Vec<u64>, EndReason> {
        if let Some(control) = self.control.take() {
            control.shut_down();
        }
        self.control_reader = FrameReader::new();
        let session = &self.session;
        self.link.take_down::<EndReason>(&mut |event| Self::act(machine, session, event))?;
        self.take_frames(machine)?;
        self.told = machine.restart_frames();
        machine.commit();
        Ok(std::iter::once(self.told).chain(self.link.taken()).collect())
    }

    /// Goes on over new connections, behind what the server has. `before`: what is sent before the server has
    /// sent something. The error [`EndReason::Gone`]: they are of no use.
    fn go_on(
        &mut self,
        machine: &mut Machine<'_>,
        resumed: Resumed,
        before: Before,
    ) -> Result<(), EndReason> {
        let Resumed { control, queues, peer, taken, written } = resumed;
        let session = &self.session;
        let Some((stream, writes)) = taken.split_first() else {
            return Err(EndReason::Server("it resumes a session without streams".into()));
        };
        machine.frames_resume(self.link.send_buffer(), *stream)?;
        let lost = self.link.settle::<EndReason>(writes, &mut |event| Self::act(machine, session, event))?;
        if !lost.is_empty() {
            let count = lost.len();
            return Err(EndReason::Server(format!(
                "its device has acknowledged {count} writes and lost them"
            )));
        }
        for Written { queue, immediate, len, .. } in written {
            let number = self.link.took(queue as usize);
            let number = number.ok_or_else(|| {
                EndReason::Server(format!("it has written through queue {queue}, which there is not"))
            })?;
            let event = Event::Placed { queue: queue as usize, immediate, len, number };
            Self::act(machine, session, event)?;
        }
        machine.commit();
        let same = |q: &SavedQueues| (q.slots_address, q.slots_key, q.slots, q.slot_size);
        if same(&saved_queues(&peer, 0)) != same(&self.queues) {
            return Err(EndReason::Server(
                "it resumes the session with other slots than it began with".into(),
            ));
        }
        self.link.go_on(queues, &peer, before).map_err(|e| match e {
            VerbsError::Peer(what) => EndReason::Server(what),
            // The way to the server may be down.
            other => EndReason::Gone(other.to_string()),
        })?;
        self.control = Some(Arc::new(Socket::new(control).map_err(|e| EndReason::Here(e.to_string()))?));
        // The server's answer shows that they carry something. Without room there is enough to be sent again
        // that it answers.
        machine.frame(self.link.send_buffer(), frame::ALIVE, &[]);
        self.watch()
    }

    /// Waits until something has come through new queue pairs, for as long as `patience` at most. The error
    /// [`EndReason::Gone`]: they are of no use.
    fn prove(
        &mut self,
        machine: &mut Machine<'_>,
        mailbox: &Mailbox<DeviceMemory>,
        lost: &Interruption,
        patience: Duration,
    ) -> Result<(), EndReason> {
        let begun = Instant::now();
        let (mut nudge, mut pause) = (begun + NUDGES.0, NUDGES.0);
        loop {
            machine.serve(mailbox)?;
            self.send(machine)?;
            self.link.arm()?;
            self.poll(machine, Instant::now())?;
            if self.link.is_heard() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= nudge {
                self.link.nudge()?;
                pause = (2 * pause).min(NUDGES.1);
                nudge = now + pause;
            }
            let left = patience.saturating_sub(begun.elapsed());
            let Ok(limit) = lost.look() else {
                return Err(EndReason::Gone(self.silent(begun.elapsed().as_secs())));
            };
            if left.is_zero() {
                return Err(EndReason::Gone(self.silent(patience.as_secs())));
            }
            let rest = left.min(limit).min(nudge.saturating_duration_since(now));
            self.wakeups.wait(&self.session, Some(rest), |_, _| Ok(()))?;
            self.link.disarm();
            self.look()?;
        }
    }

    /// Posts writes as far as the schedule and the queues allow.
    fn post_writes(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        let mut worked = false;
        while machine.schedule().has_writes() {
            let Some(queue) = self.link.next_queue() else { break };
            if !machine.lane_has_room(queue - 1, true) {
                break;
            }
            let Some(write) = machine.schedule().next_write() else { break };
            machine.posting(queue - 1, &write.header, write.slot);
            self.link.put(&put(&self.queues, queue, &write)?)?;
            self.session.counters.data_bytes_sent.add(write.header.len.into());
            worked = true;
        }
        Ok(worked)
    }
}

/// A write of the client's memory into a slot of the server's, on this queue.
fn put(queues: &SavedQueues, queue: usize, write: &Write<DeviceMemory>) -> Result<Put, EndReason> {
    let registration = write.source.memory().registration();
    let Some(source) = registration.slice(write.source.offset(), write.header.len) else {
        return Err(EndReason::Here(format!("{:?} lies outside its registration", write.header)));
    };
    // The header ends where the slot's data begins.
    let begin = u64::from(write.slot) * u64::from(queues.slot_size) + u64::from(SLOT_DATA)
        - size_of::<DataHeader>() as u64;
    Ok(Put {
        queue,
        source,
        header: Some(write.header),
        address: queues.slots_address + begin,
        key: queues.slots_key,
        // There are no others.
        place: (0, begin),
        immediate: write.slot,
        token: write.token,
        signal: write.signal,
    })
}

/// Takes what the device has to tell. The error [`EndReason::Gone`]: a queue pair is of no use any more.
fn device_events(link: &Link) -> Result<(), EndReason> {
    let device = link.domain().device();
    let mut broken = None;
    while let Some(event) = device.next_event() {
        match event {
            DeviceEvent::PortDown(port) => {
                tracing::warn!(device = device.name(), port, "RDMA port went down")
            }
            DeviceEvent::PortUp(port) => tracing::info!(device = device.name(), port, "RDMA port came up"),
            DeviceEvent::Broken(what) => broken = Some(what),
            // The memory that is registered with it is gone, too.
            DeviceEvent::Fatal(what) => return Err(EndReason::Here(what)),
            DeviceEvent::Other => {}
        }
    }
    broken.map_or(Ok(()), |what| Err(EndReason::Gone(what)))
}

impl Carrier<Slots<DeviceMemory>> for VerbsCarrier {
    const LAST_WORDS: Duration = Duration::from_millis(300);
    const RING_LOOKS: u32 = 1;

    fn out(&mut self) -> &mut SendBuffer {
        self.link.send_buffer()
    }

    fn asks(&mut self) {
        self.link.watch_next_message();
    }

    fn send(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        self.acknowledge(machine);
        machine.commit();
        let worked = self.post_writes(machine)?;
        Ok(self.link.flush()? | worked)
    }

    fn receive(&mut self, machine: &mut Machine<'_>, now: Instant) -> Result<bool, EndReason> {
        let heard = self.poll(machine, now)?;
        let look = now.saturating_duration_since(self.looked) >= LOOK_EVERY;
        Ok(look && self.look()? || heard)
    }

    fn arm(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        self.link.arm()?;
        self.poll(machine, Instant::now())
    }

    fn wait(&mut self, _machine: &mut Machine<'_>, timeout: Option<Duration>) -> Result<(), EndReason> {
        let patience = self.link.patience(Instant::now());
        let timeout = timeout.into_iter().chain(patience).min();
        // With a timeout of zero nothing needs to be waited for; what came is taken by the next look.
        if timeout.is_none_or(|time| !time.is_zero()) {
            self.wakeups.wait(&self.session, timeout, |_, _| Ok(()))?;
        }
        self.link.disarm();
        self.look().map(drop)
    }

    fn reconnect(
        &mut self,
        machine: &mut Machine<'_>,
        mailbox: &Mailbox<DeviceMemory>,
        why: String,
    ) -> Result<(), EndReason> {
        let limit = self.ticket.limit(&self.session);
        if limit.is_zero() {
            let why = if mailbox.is_to_pause() { resume::CANNOT_PAUSE.to_owned() } else { why };
            return Err(EndReason::Gone(why));
        }
        self.session.link.lost();
        if mailbox.is_to_pause() {
            // Without queue pairs no device reaches the client's memory.
            self.leave(machine)?;
            mailbox.rest();
        }
        let lost = Interruption::begin(Arc::clone(&self.session), why, limit);
        let (mut failed, mut proof) = (None, PROOF.max(4 * self.ticket.dialed_in).min(self.config.silence));
        loop {
            let taken = self.leave(machine)?;
            let redial = Redial {
                ticket: self.ticket.clone(),
                config: self.config.clone(),
                domain: Arc::clone(self.link.domain()),
                taken,
                keys: self.keys.clone(),
            };
            // Once queue pairs have carried nothing, little is sent until others do.
            let before = if failed.is_none() { Before::Everything } else { Before::Messages };
            let resumption = resume::resume(&self.session, mailbox, &self.numbers, failed, redial)?;
            let turn = || match device_events(&self.link) {
                // There are no queue pairs that anything goes through.
                Ok(()) | Err(EndReason::Gone(_)) => machine.serve(mailbox),
                failed => failed,
            };
            let resumed = resumption.wait(&lost, &mut self.wakeups, self.daemon.as_mut(), turn)?;
            match self
                .go_on(machine, resumed, before)
                .and_then(|()| self.prove(machine, mailbox, &lost, proof))
            {
                Ok(()) => break,
                // Their failure is no news: the session has no link now.
                Err(EndReason::Gone(what)) => {
                    failed = Some(what);
                    proof = (2 * proof).min(self.config.silence);
                }
                Err(end) => return Err(end),
            }
        }
        // From here on, this is a session like any other.
        self.keys.clear();
        self.session.link.stands_unmeasured();
        lost.end();
        Ok(())
    }

    fn silent(&self, seconds: u64) -> String {
        let device = self.link.domain().device();
        let (name, port) = (device.name(), device.port_number());
        format!("nothing came over RDMA device {name} port {port} for {seconds} s: is the link down?")
    }

    fn last_words(&mut self, _machine: &mut Machine<'_>) -> Result<(), EndReason> {
        if self.control.is_none() {
            return Err(EndReason::Gone("it has no control connection".into()));
        }
        self.look().map(drop)
    }

    fn close(&mut self, _machine: &mut Machine<'_>, farewell: Option<&str>) {
        let Some(text) = farewell else {
            if let Some(control) = &self.control {
                control.shut_down();
            }
            return;
        };
        let said = self.control.take().filter(|control| {
            // The control connection is never behind: it carries little else.
            let mut bye = SendBuffer::new();
            bye.frame(frame::BYE, text.as_bytes());
            let bytes = bye.unsent();
            control.send_bytes(bytes).is_ok_and(|n| n == bytes.len()) && !control.has_output()
        });
        if let Some(control) = &said {
            control.finish();
        }
        // A server that keeps the session has to be told in any case; another one that misses the farewell
        // sees the connection close.
        let answered = said.map(|control| (control, std::mem::take(&mut self.control_reader)));
        resume::end(&self.ticket, &self.config, answered);
    }
}
