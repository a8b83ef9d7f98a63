//! The pump: the one thread that takes completions, and acts on the frames that they bring. It polls for a
//! while, then sleeps on the completion channel.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use protocol::channel::{MAX_RECORD, RECORD_HEADER, Record};
use protocol::data::DataUse;
use protocol::link::{
    ACKNOWLEDGE_CONTROL, COMMANDS_AHEAD, DataAsk, DataHeader, Received, RegionKey, SLOT_DATA, frame,
};
use protocol::ops;
use zerocopy::{FromBytes, IntoBytes};

use super::client::{Engine, LentBuffers, SEND, SLOT_SIZE, SLOTS, VerbsClient, lock};
use super::keys::{Keys, region};
use crate::endpoint::contract::Client;
use crate::endpoint::stream::put;
use crate::endpoint::wake;
use crate::framing::{FrameReader, split_struct};
use crate::shared::SharedBytes;
use crate::stream::{Now, Stream};
use crate::verbs::{DeviceEvent, Event, VerbsError};
use protocol::polling::PollTime;

/// How long the pump naps between looks at slots that a device reads.
const NAP: Duration = Duration::from_micros(20);
/// How long it naps at a time while the dispatcher takes completions in its place.
const HELPED: Duration = Duration::from_millis(1);
/// How long it does either before it looks at everything else.
const NAPS: Duration = Duration::from_millis(100);

pub(super) enum End {
    Asked,
    /// The connection broke.
    Gone(String),
    /// Anything else.
    Lost(String),
}

impl From<VerbsError> for End {
    fn from(e: VerbsError) -> End {
        match e {
            VerbsError::Broken(what) => End::Gone(what),
            other => End::Lost(other.to_string()),
        }
    }
}

impl VerbsClient {
    /// Takes completions until the session ends.
    pub(super) fn pump(&self, mut poll: PollTime) {
        let mut idle: Option<Instant> = None;
        let (mut slept, mut helped) = (Instant::now(), 0);
        let end = loop {
            if self.end.get().is_some() {
                break None;
            }
            match self.try_turn() {
                Ok(true) => {
                    if idle.take().is_some() {
                        poll.paid();
                    }
                }
                Ok(false) if self.helped.load(Ordering::Relaxed) != helped && slept.elapsed() < NAPS => {
                    std::thread::park_timeout(HELPED);
                    helped = self.helped.load(Ordering::Relaxed);
                }
                Ok(false) if idle.get_or_insert_with(Instant::now).elapsed() < poll.get() => {
                    // Leaves the lock to threads that have something to send.
                    for _ in 0..if poll.gives_way() { 1 } else { 64 } {
                        poll.pause();
                    }
                }
                // Nothing but a look shows that a device has read a slot.
                Ok(false) if self.ring.awaits_device() && slept.elapsed() < NAPS => std::thread::sleep(NAP),
                Ok(false) => {
                    let asleep = Instant::now();
                    if let Err(end) = self.sleep() {
                        break Some(end);
                    }
                    poll.slept(asleep.elapsed());
                    (idle, slept) = (None, Instant::now());
                }
                Err(end) => break Some(end),
            }
        };
        if let Some(end) = end {
            self.ended(end);
        }
        self.lock().link.stop();
    }

    /// A turn of the link, unless another thread is at it. True: there was something.
    pub(super) fn try_turn(&self) -> Result<bool, End> {
        let Ok(mut engine) = self.engine.try_lock() else { return Ok(false) };
        match self.turn(&mut engine) {
            Err(end) => self.given_up(engine, end).map(|()| false),
            worked => worked,
        }
    }

    /// What the dispatcher does while it waits, where threads must share processors: then what comes need not
    /// wait for one more thread to have its turn.
    pub(super) fn help(&self) {
        self.helped.fetch_add(1, Ordering::Relaxed);
        if let Err(end) = self.try_turn() {
            self.ended(end);
        }
    }

    pub(super) fn ended(&self, end: End) {
        match end {
            End::Gone(what) => {
                // Queue pairs break before a farewell on the other connection is read: its words are the
                // better ones.
                std::thread::sleep(Duration::from_millis(50));
                let last = self.look(&mut self.lock(), None);
                match last {
                    Err(End::Asked) => self.close(),
                    Err(End::Lost(reason)) => self.lose(&reason),
                    _ => self.lose(&self.gone(&what)),
                }
            }
            End::Lost(reason) => self.lose(&reason),
            End::Asked => self.close(),
        }
    }

    pub(super) fn gone(&self, what: &str) -> String {
        format!("connection to the client at {} lost: {what}", self.peer)
    }

    /// The link has failed a thread that is not the pump.
    pub(super) fn failed(&self, e: VerbsError) {
        match End::from(e) {
            End::Gone(what) => self.lose(&self.gone(&what)),
            End::Lost(reason) => self.lose(&reason),
            End::Asked => {}
        }
    }

    /// One turn of the link. True: there was something.
    fn turn(&self, engine: &mut Engine) -> Result<bool, End> {
        let Engine { link, reader, came, sends, lent_buffers, emptied, .. } = engine;
        let polled =
            link.poll::<End>(&mut |event| self.act(event, (reader, came), sends, lent_buffers, emptied));
        // Also what came just before the link broke.
        if !matches!(polled, Ok(false)) {
            self.frames(engine)?;
        }
        let worked = polled?;
        self.announce(engine);
        self.acknowledge(engine);
        engine.link.flush()?;
        if worked && engine.waiters > 0 {
            self.room.notify_all();
        }
        Ok(worked)
    }

    /// Acts on what has come through the link.
    pub(super) fn act(
        &self,
        event: Event<'_>,
        (reader, came): (&mut FrameReader, &mut u64),
        sends: &mut [usize],
        lent_buffers: &mut LentBuffers,
        emptied: &mut Vec<u32>,
    ) -> Result<(), End> {
        VerbsClient::written(&event, sends, lent_buffers);
        match event {
            Event::Bytes(mut bytes) => {
                *came += bytes.len() as u64;
                while !bytes.is_empty() {
                    reader.fill(&mut bytes).map_err(|e| End::Lost(e.to_string()))?;
                }
            }
            Event::Placed { immediate: slot, len, .. } => {
                let header = self.header(slot, len)?;
                if slot < SLOTS {
                    self.ring.arrived(slot, header).map_err(End::Lost)?;
                } else {
                    self.granted(slot, &header, emptied)?;
                }
            }
            Event::Written { .. } => {}
        }
        Ok(())
    }

    /// If a write to the client is done, what it was sent from is free.
    pub(super) fn written(event: &Event<'_>, sends: &mut [usize], lent_buffers: &mut LentBuffers) {
        if let Event::Written { token, .. } = *event {
            match token & SEND {
                0 => lent_buffers.give_back(token as usize),
                _ => sends[(token ^ SEND) as usize] -= 1,
            }
        }
    }

    /// Granted data has come: copies it to where it belongs.
    fn granted(&self, slot: u32, header: &DataHeader, emptied: &mut Vec<u32>) -> Result<(), End> {
        if emptied.contains(&slot) {
            return Err(End::Lost(format!("the bridge wrote slot {slot}, which is in use")));
        }
        let begin = (slot * SLOT_SIZE + SLOT_DATA) as usize;
        let at = self.slots.pointer(begin, header.len as usize);
        let at = at.ok_or_else(|| End::Lost(format!("slot {slot} has no {} bytes", header.len)))?;
        // SAFETY: inside the slab, which lives as long as `self` and which only the bridge's device writes. A
        // bridge that writes the slot again before it is told that it may spoils its own session's data.
        let bytes = unsafe { SharedBytes::new(at, header.len as usize) };
        self.inbox.bring(header, bytes).map_err(End::Lost)?;
        emptied.push(slot);
        Ok(())
    }

    /// Tells the bridge of free slots, if it is time to.
    pub(super) fn announce(&self, engine: &mut Engine) {
        // One that takes no messages does not get to write these slots again.
        if !engine.emptied.is_empty() && engine.link.has_room() {
            put(engine.link.out(), frame::SLOTS_FREE, &[engine.emptied.as_bytes()]);
            engine.emptied.clear();
        }
        self.ring.take_free(|slots| put(engine.link.out(), frame::SLOTS_FREE, &[slots.as_bytes()]));
    }

    /// Tells the bridge what has come of its stream, once that is much, and a little sooner when it is told
    /// something anyway.
    fn acknowledge(&self, engine: &mut Engine) {
        let bytes = engine.processed();
        let enough = if engine.link.wants_out() { ACKNOWLEDGE_CONTROL / 8 } else { ACKNOWLEDGE_CONTROL };
        if self.links.survives() && bytes - engine.told_came >= enough {
            engine.told_came = bytes;
            let received = Received { stream: 0, reserved: 0, bytes };
            put(engine.link.out(), frame::RECEIVED, &[received.as_bytes()]);
        }
    }

    /// The header of a piece in a slot, judged against the slot and the length that the device reports.
    fn header(&self, slot: u32, len: u32) -> Result<DataHeader, End> {
        let wrong = || {
            End::Lost(format!("the bridge wrote {len} bytes into slot {slot}, which are no piece of data"))
        };
        let begin = (slot as usize).checked_mul(SLOT_SIZE as usize).ok_or_else(wrong)? + SLOT_DATA as usize
            - size_of::<DataHeader>();
        let at = self.slots.pointer(begin, size_of::<DataHeader>()).ok_or_else(wrong)?;
        // Copied once: the bridge could write it again. SAFETY: inside the slab; a concurrent write by the
        // device spoils the value and nothing else, and the value is checked.
        let bytes = unsafe { at.cast::<[u8; size_of::<DataHeader>()]>().as_ptr().read_volatile() };
        let header = DataHeader::read_from_bytes(&bytes).map_err(|_| wrong())?;
        let fits = header.len > 0
            && header.len <= SLOT_SIZE - SLOT_DATA
            && header.len as usize + bytes.len() == len as usize;
        if fits { Ok(header) } else { Err(wrong()) }
    }

    pub(super) fn frames(&self, engine: &mut Engine) -> Result<(), End> {
        let broken = |e: io::Error| End::Lost(format!("the bridge sent {e}"));
        let mut came = 0;
        while let Some((kind, body)) = engine.reader.next_frame().map_err(broken)? {
            match kind {
                frame::COMMANDS => {
                    engine.records.refill().extend_from_slice(body);
                    while let Some(record) =
                        engine.records.take(&mut engine.body).map_err(|lost| End::Lost(lost.reason))?
                    {
                        self.plan(&record, &engine.body, &mut engine.keys).map_err(End::Lost)?;
                    }
                    let mut arrived = lock(&self.arrived);
                    arrived.extend_from_slice(body);
                    let waiting = arrived.len();
                    drop(arrived);
                    if waiting > COMMANDS_AHEAD as usize + MAX_RECORD {
                        let what = format!("the bridge sent {waiting} bytes of commands ahead of their turn");
                        return Err(End::Lost(what));
                    }
                    came += body.len();
                }
                frame::DATA_ASK => {
                    let (DataAsk { seq, piece, .. }, _) = split_struct(body).map_err(broken)?;
                    self.inbox.ask((seq, piece)).map_err(End::Lost)?;
                }
                frame::REGION_KEY => {
                    let (key, _) = split_struct::<RegionKey>(body).map_err(broken)?;
                    engine.keys.learn(key).map_err(End::Lost)?;
                }
                frame::RECEIVED if self.links.survives() => {
                    let (received, _) = split_struct::<Received>(body).map_err(broken)?;
                    let stream = engine.link.send_buffer();
                    stream.acknowledge(received.bytes).map_err(|e| End::Lost(format!("the bridge: {e}")))?;
                }
                frame::ALIVE => {
                    // One that asks again and again, and takes no answers, gets no more of them.
                    if engine.link.has_room() {
                        put(engine.link.out(), frame::ALIVE, &[]);
                    }
                }
                _ => return Err(End::Lost(format!("the bridge sent a frame of kind {kind}"))),
            }
        }
        if came > 0 {
            self.waiting.fetch_add(came, Ordering::AcqRel);
            self.came.notify_one();
        }
        Ok(())
    }

    /// Notes where the data that a record names will lie, if it has a place among the slots, and which memory
    /// of the client's it is to fill. The error is what the bridge has done wrong.
    fn plan(&self, record: &Record, body: &[u8], keys: &mut Keys) -> Result<(), String> {
        keys.record(RECORD_HEADER + body.len());
        // The dispatcher judges what there is no such thing as.
        let Some(info) = ops::info(record.opcode).filter(|info| info.carries_data) else { return Ok(()) };
        let (mut piece, mut planned) = (0, Ok(()));
        let mut visit = |data: DataUse| {
            match data {
                DataUse::In(range) if planned.is_ok() && !self.inbox.is_asked((record.seq, piece)) => {
                    planned = self.ring.plan(record.seq, piece, range.len);
                }
                DataUse::Out(range) => keys.awaits(record.seq, region(range.place)),
                _ => {}
            }
            piece += 1;
        };
        (info.visit_data)(body, &mut visit)
            .map_err(|e| format!("command {} ({}) does not decode: {e}", record.seq, info.name))?;
        planned
    }

    /// Sleeps until something happens, or requests take too long. Nothing is sent meanwhile, nor expected: a
    /// bridge that waits for something asks whether we are there, and ends the session if it hears nothing;
    /// one that is gone shows by its control connection, which the kernel watches.
    fn sleep(&self) -> Result<(), End> {
        let mut engine = self.lock();
        let armed = engine.link.arm().map_err(End::from);
        match armed.and_then(|()| self.turn(&mut engine)) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(end) => return self.given_up(engine, end),
        }
        let device = Arc::clone(engine.link.domain().device());
        let completions = engine.link.fd().map(|fd| fd.try_clone_to_owned()).transpose();
        let completions = completions.map_err(|e| End::Lost(e.to_string()))?;
        let control = lock(&self.control).clone();
        let patience = engine.link.patience(Instant::now());
        engine.unwatched = patience.is_none();
        drop(engine);
        let mut fds = vec![device.event_fd(), self.stop.as_fd(), self.changed.as_fd()];
        fds.extend(completions.as_ref().map(|fd| fd.as_fd()));
        fds.extend(control.as_ref().map(|control| control.as_fd()));
        let read = self.ring.awaits_device().then_some(Duration::from_millis(1));
        let patience = read.into_iter().chain(patience).min();
        wake::readable(&fds, patience).map_err(|e| End::Lost(format!("waiting: {e}")))?;
        // It has done its part.
        let _ = self.changed.read();
        let mut engine = self.lock();
        engine.unwatched = false;
        engine.link.disarm();
        let mut broken = None;
        while let Some(event) = device.next_event() {
            match event {
                DeviceEvent::PortDown(port) => {
                    tracing::warn!(device = device.name(), port, "RDMA port went down")
                }
                DeviceEvent::PortUp(port) => {
                    tracing::info!(device = device.name(), port, "RDMA port came up")
                }
                DeviceEvent::Broken(what) => broken = Some(what),
                // The memory that is registered with it is, too.
                DeviceEvent::Fatal(what) => return Err(End::Lost(self.gone(&what))),
                DeviceEvent::Other => {}
            }
        }
        let broken = broken.filter(|_| engine.link.fd().is_some());
        let seen = broken.map_or(Ok(()), |what| Err(End::Gone(what)));
        match seen.and_then(|()| self.look(&mut engine, control.as_ref())) {
            Err(end) => self.given_up(engine, end),
            seen => seen,
        }
    }

    /// Looks at the control connection, unless it is another one by now than `expected`.
    pub(super) fn look(&self, engine: &mut Engine, expected: Option<&Arc<Stream>>) -> Result<(), End> {
        let Some(control) = lock(&self.control).clone() else { return Ok(()) };
        if expected.is_some_and(|expected| !Arc::ptr_eq(expected, &control)) {
            return Ok(());
        }
        // A session that survives its connections ends by a farewell alone.
        let closed = |what: &str| {
            if !self.links.survives() {
                return End::Asked;
            }
            *lock(&self.control) = None;
            End::Gone(format!("its control connection: {what}"))
        };
        loop {
            // A connection that resumes the session still blocks while the bridge is being answered on it.
            match engine.control_reader.fill(&mut Now(&control)) {
                Ok(0) => return Err(closed("closed by the bridge")),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(closed("reset by the bridge"));
                }
                Err(e) if self.links.survives() => return Err(closed(&e.to_string())),
                Err(e) => return Err(End::Gone(format!("its control connection: {e}"))),
            }
            while let Some((kind, body)) =
                engine.control_reader.next_frame().map_err(|e| End::Lost(e.to_string()))?
            {
                match kind {
                    // The bridge can come back from now on.
                    frame::ALIVE => self.links.introduce(),
                    frame::BYE if body.is_empty() => return Err(End::Asked),
                    frame::BYE => {
                        let (device, why) = (engine.link.domain().device(), String::from_utf8_lossy(body));
                        let (name, port) = (device.name(), device.port_number());
                        return Err(End::Lost(format!(
                            "the client at {}, reached over RDMA device {name} port {port}, ended the session: {why}",
                            self.peer
                        )));
                    }
                    _ => {
                        return Err(End::Lost(format!(
                            "the bridge sent a frame of kind {kind} on the control connection"
                        )));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;

    use super::*;
    use crate::endpoint::dispatcher_poll::Polling;
    use crate::endpoint::verbs::VerbsCommands;
    use crate::verbs::{Device, Domain, Settings, Unconnected, software};

    fn pair() -> (Stream, Stream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near.into(), listener.accept().unwrap().0.into())
    }

    /// As one does on which the bridge that resumes the session is still being answered.
    #[test]
    fn a_look_does_not_wait_for_a_control_connection_that_blocks() {
        software::install();
        let settings = Settings::default();
        let domain = Domain::new(Device::open(&settings).unwrap()).unwrap();
        let queues = Unconnected::new(&domain, &settings).unwrap();
        let (bridge, control) = pair();
        bridge.send_frame(frame::QUEUES, &[queues.offer(None).as_bytes()]).unwrap();
        let grace = Duration::from_secs(60);
        let started = VerbsCommands::start(control, 1, &settings, Polling::default(), grace);
        let (_commands, client) = started.map_err(|lost| lost.reason).unwrap();
        let (_bridge, next) = pair();
        *lock(&client.control) = Some(Arc::new(next));
        let (looked, seen) = mpsc::channel();
        let looking = Arc::clone(&client);
        std::thread::spawn(move || looked.send(looking.look(&mut looking.lock(), None).is_ok()));
        assert_eq!(seen.recv_timeout(Duration::from_secs(60)), Ok(true));
        client.close();
    }
}
