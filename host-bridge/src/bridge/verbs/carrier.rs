//! The queue pairs of a session, as its relay uses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use protocol::link::{DataHeader, FrameHeader, Queues, SLOT_DATA, frame};
use zerocopy::IntoBytes;

use crate::bridge::relay::{Carrier, ClientMemory, EndReason, Mailbox, MemoryKey, Slots, Wakeups};
use crate::bridge::state::SessionState;
use crate::framing::{FrameReader, SendBuffer};
use crate::stream::Stream;
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
    queues: Queues,
    control: Stream,
    control_reader: FrameReader,
    wakeups: Wakeups,
    looked: Instant,
}

impl VerbsCarrier {
    /// `control` does not block.
    pub(super) fn new(
        session: &Arc<SessionState>,
        mailbox: &Mailbox<DeviceMemory>,
        control: Stream,
        link: Link,
        queues: Queues,
    ) -> Result<VerbsCarrier, EndReason> {
        let wakeups = Wakeups::new(session, mailbox)?;
        wakeups.add(&control, CONTROL)?;
        wakeups.add(link.fd(), COMPLETIONS)?;
        wakeups.add(link.domain().device().event_fd(), DEVICE)?;
        Ok(VerbsCarrier {
            link,
            session: Arc::clone(session),
            queues,
            control,
            control_reader: FrameReader::new(),
            wakeups,
            looked: Instant::now(),
        })
    }

    /// Takes completions, and acts on the frames that they brought. True: there was one.
    fn poll(&mut self, machine: &mut Machine<'_>, now: Instant) -> Result<bool, EndReason> {
        let session = &self.session;
        let heard = self.link.poll::<EndReason>(&mut |event| {
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
        })?;
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
        self.device_events()?;
        match self.control_reader.fill(&mut &self.control) {
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

    fn silent(&self, seconds: u64) -> String {
        let device = self.link.domain().device();
        let (name, port) = (device.name(), device.port().number);
        format!("nothing came over RDMA device {name} port {port} for {seconds} s: is the link down?")
    }

    fn last_words(&mut self, _machine: &mut Machine<'_>) -> Result<(), EndReason> {
        self.look().map(drop)
    }

    fn close(&mut self, _machine: &mut Machine<'_>, farewell: Option<&str>) {
        if let Some(text) = farewell {
            // The control connection is never behind: it carries little else. A server that misses the farewell sees it close.
            let header = FrameHeader { kind: frame::BYE, len: text.len() as u32 };
            let _ = self.control.send_bytes(&[header.as_bytes(), text.as_bytes()].concat());
        }
        self.control.shut_down();
    }
}
