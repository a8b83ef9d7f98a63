//! The queue pairs of a session, as its relay uses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use protocol::link::{DataHeader, Queues, SLOT_DATA, frame};

use super::Links;
use super::redial::{Redial, Resumed};
use crate::bridge::SessionConfig;
use crate::bridge::connect::Daemon;
use crate::bridge::relay::{Carrier, ClientMemory, EndReason, Mailbox, MemoryKey, Slots, Wakeups};
use crate::bridge::resume::{self, Interruption, Ticket};
use crate::bridge::state::SessionState;
use crate::bridge::tcp::{Socket, not_now};
use crate::framing::{FrameReader, SendBuffer};
use crate::verbs::{DeviceEvent, Event, Link, Put, RegisteredRegion, VerbsError};

/// How often the control connection and the device's events are looked at while there is work.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Bytes of the server's frames that may wait for data before it is held off.
const MAX_BACKLOG: usize = 256 << 10;

/// Numbers of the descriptors that are watched.
const CONTROL: usize = 0;
const COMPLETIONS: usize = 1;
const DEVICE: usize = 2;

type Machine<'c> = crate::bridge::relay::Machine<'c, Slots<DeviceMemory>>;

/// Memory of the client that the device may use.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    registered: RegisteredRegion,
    read_only: bool,
    /// The server has its key.
    key_taken: AtomicBool,
}

impl DeviceMemory {
    pub(super) fn new(registered: RegisteredRegion, read_only: bool) -> DeviceMemory {
        DeviceMemory { registered, read_only, key_taken: AtomicBool::new(false) }
    }
}

impl ClientMemory for DeviceMemory {
    fn size(&self) -> u64 {
        self.registered.registration().len() as u64
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn take_key(&self) -> Option<MemoryKey> {
        let registration = self.registered.registration();
        let first = !self.key_taken.swap(true, Ordering::Relaxed);
        first.then(|| MemoryKey {
            address: registration.address(),
            size: registration.len() as u64,
            key: registration.remote_key(),
        })
    }
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

/// A session's queue pairs, and the control connection that stays beside them.
#[derive(Debug)]
pub(super) struct VerbsCarrier {
    /// Dropped first: after that nobody reaches the client's memory.
    link: Link,
    session: Arc<SessionState>,
    config: SessionConfig,
    ticket: Ticket,
    /// The number of the next attempt to resume.
    attempt: u32,
    queues: Queues,
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
        let Links { control, link, queues, daemon, ticket, unbegun } = links;
        let control = Arc::new(Socket::new(control).map_err(|e| EndReason::Here(e.to_string()))?);
        let wakeups = Wakeups::new(session, mailbox)?;
        wakeups.add(link.domain().device().event_fd(), DEVICE)?;
        let carrier = VerbsCarrier {
            link,
            session: Arc::clone(session),
            config: config.clone(),
            ticket,
            attempt: 1,
            queues,
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
            Event::Placed { immediate, len, .. } => {
                session.counters.data_bytes_received.add(len.into());
                machine.written_by_server(immediate, len)?;
            }
            Event::Written { token } => {
                if let Some((seq, len)) = machine.schedule().written(token) {
                    machine.sent(seq, len);
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
            machine.take_frames()?;
        }
        let heard = polled?;
        if heard {
            machine.heard(now);
            machine.take_frames()?;
            self.link.hold(machine.backlog() > MAX_BACKLOG);
        }
        Ok(heard)
    }

    /// Looks at the control connection, which says little, and at the device's events. True: there was something.
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

    /// Gives up all connections. What has come through them counts, and nothing comes any more.
    fn leave(&mut self, machine: &mut Machine<'_>) -> Result<(), EndReason> {
        if let Some(control) = self.control.take() {
            control.shut_down();
        }
        self.control_reader = FrameReader::new();
        let session = &self.session;
        self.link.take_down::<EndReason>(&mut |event| Self::act(machine, session, event))?;
        machine.take_frames()
    }

    /// Goes on over new connections, behind what the server has. The error [`EndReason::Gone`]: they are of no use.
    fn go_on(&mut self, machine: &mut Machine<'_>, resumed: Resumed) -> Result<(), EndReason> {
        let Resumed { control, queues, peer, taken, attempt } = resumed;
        self.attempt = attempt.saturating_add(1);
        let session = &self.session;
        self.link.settle::<EndReason>(&taken, &mut |event| Self::act(machine, session, event))?;
        let same = |q: &Queues| (q.slots_address, q.slots_key, q.slots, q.slot_size);
        if same(&peer) != same(&self.queues) {
            return Err(EndReason::Server(
                "it resumes the session with other slots than it began with".into(),
            ));
        }
        self.link.go_on(queues, &peer, false).map_err(|e| match e {
            VerbsError::Peer(what) => EndReason::Server(what),
            // The way to the server may be down.
            other => EndReason::Gone(other.to_string()),
        })?;
        self.control = Some(Arc::new(Socket::new(control).map_err(|e| EndReason::Here(e.to_string()))?));
        // The server's answer shows that they carry something.
        self.link.send_buffer().frame(frame::ALIVE, &[]);
        self.watch()
    }

    /// Waits until something has come through new queue pairs. The error [`EndReason::Gone`]: they are of no use.
    fn prove(
        &mut self,
        machine: &mut Machine<'_>,
        mailbox: &Mailbox<DeviceMemory>,
        lost: &Interruption,
    ) -> Result<(), EndReason> {
        let begun = Instant::now();
        loop {
            machine.serve(mailbox)?;
            self.send(machine)?;
            self.link.arm()?;
            self.poll(machine, Instant::now())?;
            if self.link.is_heard() {
                return Ok(());
            }
            let left = self.config.silence.saturating_sub(begun.elapsed());
            let Ok(limit) = lost.look() else {
                return Err(EndReason::Gone(self.silent(begun.elapsed().as_secs())));
            };
            if left.is_zero() {
                return Err(EndReason::Gone(self.silent(self.config.silence.as_secs())));
            }
            self.wakeups.wait(&self.session, Some(left.min(limit)), |_, _| Ok(()))?;
            self.link.disarm();
            self.look()?;
        }
    }

    /// Posts writes as far as the schedule and the queues allow.
    fn post_writes(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        let mut worked = false;
        let slots = machine.schedule();
        while slots.has_writes() {
            let Some(queue) = self.link.next_queue() else { break };
            let Some(write) = slots.next_write() else { break };
            let registration = write.source.memory().registered.registration();
            let Some(source) = registration.slice(write.source.offset(), write.header.len) else {
                return Err(EndReason::Here(format!("{:?} lies outside its registration", write.header)));
            };
            // The header ends where the slot's data begins.
            let begin = u64::from(write.slot) * u64::from(self.queues.slot_size) + u64::from(SLOT_DATA)
                - size_of::<DataHeader>() as u64;
            self.link.put(&Put {
                queue,
                source,
                header: Some(write.header),
                address: self.queues.slots_address + begin,
                key: self.queues.slots_key,
                immediate: write.slot,
                token: write.token,
                signal: write.signal,
            })?;
            self.session.counters.data_bytes_sent.add(write.header.len.into());
            worked = true;
        }
        Ok(worked)
    }
}

/// Takes what the device has to tell.
fn device_events(link: &Link) -> Result<(), EndReason> {
    let device = link.domain().device();
    while let Some(event) = device.next_event() {
        match event {
            DeviceEvent::PortDown(port) => {
                tracing::warn!(device = device.name(), port, "RDMA port went down")
            }
            DeviceEvent::PortUp(port) => tracing::info!(device = device.name(), port, "RDMA port came up"),
            // The memory that is registered with it is gone, too.
            DeviceEvent::Fatal(what) => return Err(EndReason::Here(what)),
            DeviceEvent::Other => {}
        }
    }
    Ok(())
}

impl Carrier<Slots<DeviceMemory>> for VerbsCarrier {
    const LAST_WORDS: Duration = Duration::from_millis(300);
    const RING_LOOKS: u32 = 1;

    fn out(&mut self) -> &mut SendBuffer {
        self.link.send_buffer()
    }

    fn send(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
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
            return Err(EndReason::Gone(why));
        }
        self.session.link.lost();
        let lost = Interruption::begin(Arc::clone(&self.session), why, limit);
        let mut failed = None;
        loop {
            self.leave(machine)?;
            let redial = Redial {
                ticket: self.ticket.clone(),
                config: self.config.clone(),
                domain: Arc::clone(self.link.domain()),
                taken: self.link.taken(),
            };
            let resumption = resume::resume(&self.session, mailbox, self.attempt, failed, redial)?;
            let turn = || {
                device_events(&self.link)?;
                machine.serve(mailbox)
            };
            let resumed = resumption.wait(&lost, &mut self.wakeups, self.daemon.as_mut(), turn)?;
            match self.go_on(machine, resumed).and_then(|()| self.prove(machine, mailbox, &lost)) {
                Ok(()) => break,
                // Their failure is no news: the session has no link now.
                Err(EndReason::Gone(what)) => failed = Some(what),
                Err(end) => return Err(end),
            }
        }
        self.session.link.stands_unmeasured();
        lost.end();
        Ok(())
    }

    fn silent(&self, seconds: u64) -> String {
        let device = self.link.domain().device();
        let (name, port) = (device.name(), device.port().number);
        format!("nothing came over RDMA device {name} port {port} for {seconds} s: is the link down?")
    }

    fn last_words(&mut self, _machine: &mut Machine<'_>) -> Result<(), EndReason> {
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
        // A server that keeps the session has to be told in any case; another one that misses the farewell sees the connection close.
        let answered = said.map(|control| (control, std::mem::take(&mut self.control_reader)));
        resume::end(&self.ticket, &self.config, answered);
    }
}
