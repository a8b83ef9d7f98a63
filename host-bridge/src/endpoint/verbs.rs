//! The worker's end of a `verbs` session.
//!
//! ```text
//!   messages ─▶ pump ─▶ records ─▶ dispatcher            any thread ─▶ link.out ─▶ messages
//!   writes ───▶ pump ─▶ lane 1…n ─▶ Landing              Outgoing::send ─▶ writes into the client's pages
//! ```
//!
//! The CPU copies bulk data once on this side: from a slot into the driver's own staging or device memory, and from there into a registered buffer. What would save that is here, and no
//! driver uses it yet: [`Staged`] bytes may be kept where they are, and memory that was adopted ([`Client::adopt`]) goes out as it is.
//!
//! One thread, the pump, takes completions: it polls for a while, then sleeps on the completion channel. The bridge writes a command's `In` data into slots of this process's memory, which lie there
//! before the command is executed; a thread for each queue hands them on, in the queue's order, and frees them. As with `tcp` that cannot deadlock: a queue carries pieces in the commands'
//! order, and the data of a command never waits for that of a later one.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use protocol::Status;
use protocol::channel::{MAX_PAYLOAD, MAX_RECORD, NO_SLOT, PAD, RECORD_HEADER, Record};
use protocol::data::{HostRange, Place};
use protocol::link::{
    ARENA_KEY, DataHeader, DataSent, FrameHeader, ProgressUpdate, Queues, RegionKey, ReplyHeader, SLOT_DATA,
    frame, progress,
};
use zerocopy::{FromBytes, IntoBytes};

use super::incoming::{Inbox, Staged};
use super::outgoing::Outgoing;
use super::slots::Slots;
use super::wake::{self, Bell};
use super::{Client, Commands, Lost, Polling, Sink, Source};
use crate::framing::{FrameReader, recv_frame, send_frame, split_struct};
use crate::verbs::{
    Access, Device, DeviceEvent, Domain, Event, Link, Put, Registration, Settings, Slab, Unconnected,
    VerbsError,
};

/// Bytes of a slot: half a MiB of data, and a page for the header before it.
const SLOT_SIZE: u32 = (512 << 10) + 4096;
/// Slots of a session.
const SLOTS: u32 = 48;
/// Bytes of one write to the client at most.
const CHUNK: usize = 512 << 10;
/// Buffers of `CHUNK` bytes for data that does not lie in registered memory.
const BOUNCES: usize = 16;
/// Records that wait for the dispatcher, in bytes, before the bridge is held off.
const MAX_WAITING: usize = 1 << 20;
/// A peer that says nothing for this long, not even that it is alive, is lost.
const SILENCE: Duration = Duration::from_secs(30);
/// Executed commands after which the client is told even while there is more to do.
const BATCH: u64 = 64;

/// The dispatcher's side.
pub struct VerbsCommands {
    client: Arc<VerbsClient>,
    /// Records taken over from the pump, and how far that is.
    records: Vec<u8>,
    at: usize,
    seq: u64,
    polling: Polling,
}

/// The side of every other thread.
pub struct VerbsClient {
    this: Weak<VerbsClient>,
    /// Dropped before the memory that it uses.
    engine: Mutex<Engine>,
    /// Room has come: queues, credits, buffers.
    room: Condvar,
    /// Memory of the worker's that writes may go out of directly.
    adopted: Mutex<Vec<Registration>>,
    bounces: Slab,
    slots: Arc<Slab>,
    control: TcpStream,
    slot_count: u32,
    inbox: Arc<Inbox>,
    arrived: Mutex<Vec<u8>>,
    /// Bytes in `arrived`, to be polled.
    waiting: AtomicUsize,
    came: Condvar,
    executed: AtomicU64,
    sent: AtomicU64,
    /// Somebody is ending the session.
    ending: AtomicBool,
    end: OnceLock<Option<Lost>>,
    stop: Bell,
}

struct Engine {
    link: Link,
    reader: FrameReader,
    control_reader: FrameReader,
    /// The client's memories that may be written.
    keys: HashMap<u32, RegionKey>,
    free: Slots,
    lanes: Vec<Sender<(DataHeader, u32)>>,
    /// Writes under way for each call of [`VerbsClient::send`].
    sends: HashMap<u64, usize>,
    next_send: u64,
    free_bounces: Vec<usize>,
    /// `executed` as the client was last told.
    told: u64,
    said: Instant,
    heard: Instant,
    /// When something last came over the queue pairs, and how long ago that may be.
    link_heard: Instant,
    loss: Duration,
}

/// The upper bits of a write's token say which buffer it frees.
const NO_BOUNCE: u64 = 0xffff;

impl VerbsCommands {
    /// Begins a session on a control connection whose welcome has been sent: makes queue pairs as the bridge wishes and `settings` allow. On failure the bridge has
    /// been told why. `slot_count`: the channel's reply slots, as the hello said.
    pub fn start(
        control: TcpStream,
        slot_count: u32,
        settings: &Settings,
        polling: Polling,
    ) -> Result<(VerbsCommands, Arc<VerbsClient>), Lost> {
        let failed = |e: io::Error| Lost::new(format!("preparing the connection: {e}"));
        control.set_nonblocking(false).map_err(failed)?;
        control.set_nodelay(true).map_err(failed)?;
        control.set_read_timeout(Some(SILENCE)).map_err(failed)?;
        control.set_write_timeout(Some(SILENCE)).map_err(failed)?;
        let mut body = Vec::new();
        let kind = recv_frame(control.as_fd(), &mut body, &mut Vec::new()).map_err(failed)?;
        if kind != Some(frame::QUEUES) {
            return Err(Lost::new(format!("frame of kind {kind:?} where QUEUES was due")));
        }
        let peer = split_struct::<Queues>(&body).map_err(failed)?.0;
        let made = connect(&control, settings, &peer);
        let (link, slots, bounces) = made.map_err(|e| {
            let lost = Lost::new(format!("verbs: {e}"));
            // The bridge may be gone already.
            let _ = send_frame(control.as_fd(), frame::BYE, &[lost.reason.as_bytes()], &[]);
            lost
        })?;
        control.set_nonblocking(true).map_err(failed)?;
        let stop = Bell::new().map_err(failed)?;
        let (slots, inbox, now) = (Arc::new(slots), Inbox::new(), Instant::now());
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..link.data_queues()).map(|_| channel()).unzip();
        let engine = Engine {
            link,
            reader: FrameReader::new(),
            control_reader: FrameReader::new(),
            keys: HashMap::new(),
            free: Slots::new(SLOTS),
            lanes: senders,
            sends: HashMap::new(),
            next_send: 0,
            free_bounces: (0..BOUNCES).collect(),
            told: 0,
            said: now,
            heard: now,
            link_heard: now,
            loss: settings.loss,
        };
        let client = Arc::new_cyclic(|this| VerbsClient {
            this: this.clone(),
            engine: Mutex::new(engine),
            room: Condvar::new(),
            adopted: Mutex::default(),
            bounces,
            slots,
            control,
            slot_count,
            inbox,
            arrived: Mutex::default(),
            waiting: AtomicUsize::new(0),
            came: Condvar::new(),
            executed: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            end: OnceLock::new(),
            stop,
        });
        for lane in receivers {
            let client = Arc::clone(&client);
            std::thread::Builder::new()
                .name("rgpu-lane".into())
                .spawn(move || client.land(lane))
                .map_err(failed)?;
        }
        let pump = Arc::clone(&client);
        std::thread::Builder::new()
            .name("rgpu-pump".into())
            .spawn(move || pump.pump(polling))
            .map_err(failed)?;
        let commands =
            VerbsCommands { client: Arc::clone(&client), records: Vec::new(), at: 0, seq: 0, polling };
        Ok((commands, client))
    }

    /// The next record at hand.
    fn take(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        if self.at == self.records.len() {
            self.records.clear();
            self.at = 0;
            if self.client.waiting.load(Ordering::Acquire) == 0 {
                return Ok(None);
            }
            let mut arrived = lock(&self.client.arrived);
            std::mem::swap(&mut *arrived, &mut self.records);
            let held = self.client.waiting.swap(0, Ordering::AcqRel) > MAX_WAITING;
            drop(arrived);
            if held {
                let mut engine = self.client.lock();
                engine.link.hold(false);
                self.client.flush(engine);
            }
        }
        let rest = &self.records[self.at..];
        if rest.is_empty() {
            return Ok(None);
        }
        let Some(header) = rest.first_chunk::<RECORD_HEADER>() else {
            return Err(Lost::new(format!("{} bytes at the end of a frame are no record", rest.len())));
        };
        let (record, size) = Record::from_bytes(header);
        let size = size as usize;
        if size < RECORD_HEADER
            || !size.is_multiple_of(16)
            || size > MAX_RECORD
            || size > rest.len()
            || record.opcode == PAD
        {
            return Err(Lost::new(format!(
                "record {}: a size of {size} bytes where {} are left",
                self.seq + 1,
                rest.len()
            )));
        }
        if record.seq != self.seq + 1 {
            return Err(Lost::new(format!("record with seq {} where {} was due", record.seq, self.seq + 1)));
        }
        body.clear();
        body.extend_from_slice(&rest[RECORD_HEADER..size]);
        self.seq += 1;
        self.at += size;
        Ok(Some(record))
    }
}

/// Makes and connects the queue pairs, and answers the bridge.
fn connect(
    control: &TcpStream,
    settings: &Settings,
    peer: &Queues,
) -> Result<(Link, Slab, Slab), VerbsError> {
    let domain = Domain::new(Device::open(settings)?)?;
    let slots = Slab::new(&domain, (SLOT_SIZE * SLOTS) as usize, Access::RemoteWrite)?;
    let bounces = Slab::new(&domain, CHUNK * BOUNCES, Access::Read)?;
    let unconnected = Unconnected::answering(&domain, settings, peer)?;
    let offer = unconnected.offer(Some((&slots, SLOT_SIZE)));
    let link = unconnected.connect(peer)?;
    send_frame(control.as_fd(), frame::QUEUES, &[offer.as_bytes()], &[])
        .map_err(|e| VerbsError::Broken(format!("answering the bridge: {e}")))?;
    Ok((link, slots, bounces))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Commands for VerbsCommands {
    fn next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        loop {
            if let Some(record) = self.try_next(body)? {
                return Ok(Some(record));
            }
            let client = Arc::clone(&self.client);
            if client.end.get() == Some(&None) {
                return Ok(None);
            }
            client.flush_executed();
            let until = Instant::now() + self.polling.most;
            while client.waiting.load(Ordering::Acquire) == 0
                && client.end.get().is_none()
                && Instant::now() < until
            {
                std::hint::spin_loop();
            }
            let mut arrived = lock(&client.arrived);
            while arrived.is_empty() && client.end.get().is_none() {
                arrived = client.came.wait(arrived).unwrap_or_else(|e| e.into_inner());
            }
        }
    }

    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        if let Some(Some(lost)) = self.client.end.get() {
            return Err(lost.clone());
        }
        self.take(body).inspect_err(|lost| self.client.lose(&lost.reason))
    }
}

enum End {
    Asked,
    Lost(String),
}

impl From<VerbsError> for End {
    fn from(e: VerbsError) -> End {
        End::Lost(e.to_string())
    }
}

impl VerbsClient {
    fn lock(&self) -> MutexGuard<'_, Engine> {
        lock(&self.engine)
    }

    /// Takes completions until the session ends.
    fn pump(&self, polling: Polling) {
        let mut idle: Option<Instant> = None;
        let end = loop {
            if self.end.get().is_some() {
                break None;
            }
            // Not in the match: the lock would be held throughout.
            let turned = self.turn(&mut self.lock());
            match turned {
                Ok(true) => idle = None,
                Ok(false) if idle.get_or_insert_with(Instant::now).elapsed() < polling.most => {
                    for _ in 0..64 {
                        std::hint::spin_loop();
                    }
                }
                Ok(false) => match self.sleep() {
                    Ok(()) => idle = None,
                    Err(end) => break Some(end),
                },
                Err(end) => break Some(end),
            }
        };
        match end {
            Some(End::Lost(reason)) => {
                // Queue pairs break before a farewell on the other connection is read.
                std::thread::sleep(Duration::from_millis(50));
                let last = self.look(&mut self.lock());
                match last {
                    Err(End::Asked) => self.close(),
                    _ => self.lose(&reason),
                }
            }
            Some(End::Asked) => self.close(),
            None => {}
        }
        self.lock().link.stop();
    }

    /// One turn of the link. True: there was something.
    fn turn(&self, engine: &mut Engine) -> Result<bool, End> {
        let Engine { link, reader, sends, free_bounces, free, lanes, .. } = engine;
        let mut freed = false;
        let worked = link.poll::<End>(&mut |event| {
            match event {
                Event::Bytes(mut bytes) => {
                    while !bytes.is_empty() {
                        reader.fill(&mut bytes).map_err(|e| End::Lost(e.to_string()))?;
                    }
                }
                Event::Placed { queue, immediate: slot, len } => {
                    let header = self.header(slot, len)?;
                    match lanes.get(queue - 1) {
                        // The lane is there as long as the session is.
                        Some(lane) if free.take(slot) => drop(lane.send((header, slot))),
                        _ => return Err(End::Lost(format!("the bridge wrote slot {slot}, which is in use"))),
                    }
                }
                Event::Written { token } => {
                    let (send, bounce) = (token >> 16, token & NO_BOUNCE);
                    if bounce != NO_BOUNCE {
                        free_bounces.push(bounce as usize);
                    }
                    if let Some(left) = sends.get_mut(&send) {
                        *left -= 1;
                    }
                    freed = true;
                }
            }
            Ok(())
        })?;
        if worked {
            engine.heard = Instant::now();
            engine.link_heard = engine.heard;
            self.frames(engine)?;
        }
        engine.link.flush()?;
        if freed || worked {
            self.room.notify_all();
        }
        Ok(worked)
    }

    /// The header of a piece in a slot, judged against the slot and the length that the device reports.
    fn header(&self, slot: u32, len: u32) -> Result<DataHeader, End> {
        let wrong = || {
            End::Lost(format!("the bridge wrote {len} bytes into slot {slot}, which are no piece of data"))
        };
        let begin = (slot as usize).checked_mul(SLOT_SIZE as usize).ok_or_else(wrong)? + SLOT_DATA as usize
            - size_of::<DataHeader>();
        let at = self.slots.pointer(begin, size_of::<DataHeader>()).ok_or_else(wrong)?;
        // Copied once: the bridge could write it again.
        // SAFETY: inside the slab; a concurrent write by the device spoils the value and nothing else, and the value is checked.
        let bytes = unsafe { at.cast::<[u8; size_of::<DataHeader>()]>().as_ptr().read_volatile() };
        let header = DataHeader::read_from_bytes(&bytes).map_err(|_| wrong())?;
        let fits = header.len > 0
            && header.len <= SLOT_SIZE - SLOT_DATA
            && header.len as usize + bytes.len() == len as usize;
        if fits { Ok(header) } else { Err(wrong()) }
    }

    fn frames(&self, engine: &mut Engine) -> Result<(), End> {
        let broken = |e: io::Error| End::Lost(format!("the bridge sent {e}"));
        let mut came = 0;
        while let Some((kind, body)) = engine.reader.next_frame().map_err(broken)? {
            match kind {
                frame::COMMANDS => {
                    lock(&self.arrived).extend_from_slice(body);
                    came += body.len();
                }
                frame::REGION_KEY => {
                    let (key, _) = split_struct::<RegionKey>(body).map_err(broken)?;
                    if engine.keys.len() > 1 << 16 || key.address.checked_add(key.size).is_none() {
                        return Err(End::Lost("the bridge gave a key that cannot be".into()));
                    }
                    engine.keys.insert(key.region, key);
                }
                frame::ALIVE => {}
                _ => return Err(End::Lost(format!("the bridge sent a frame of kind {kind}"))),
            }
        }
        if came > 0 {
            let waiting = self.waiting.fetch_add(came, Ordering::AcqRel) + came;
            if waiting > MAX_WAITING {
                engine.link.hold(true);
            }
            self.came.notify_one();
        }
        Ok(())
    }

    /// Sleeps until something happens, a second at most; says that we are alive.
    fn sleep(&self) -> Result<(), End> {
        let device = {
            let mut engine = self.lock();
            engine.link.arm()?;
            if self.turn(&mut engine)? {
                return Ok(());
            }
            Arc::clone(engine.link.domain().device())
        };
        let completions = self.lock().link.fd().try_clone_to_owned().map_err(|e| End::Lost(e.to_string()))?;
        let fds = [completions.as_fd(), self.control.as_fd(), device.event_fd(), self.stop.as_fd()];
        wake::readable(&fds, Some(Duration::from_secs(1))).map_err(|e| End::Lost(format!("waiting: {e}")))?;
        let mut engine = self.lock();
        engine.link.disarm();
        while let Some(event) = device.next_event() {
            match event {
                DeviceEvent::PortDown(port) => {
                    tracing::warn!(device = device.name(), port, "RDMA port went down")
                }
                DeviceEvent::PortUp(port) => {
                    tracing::info!(device = device.name(), port, "RDMA port came up")
                }
                DeviceEvent::Fatal(what) => return Err(End::Lost(what)),
                DeviceEvent::Other => {}
            }
        }
        self.look(&mut engine)?;
        if engine.heard.elapsed() > SILENCE {
            return Err(End::Lost(format!("the bridge said nothing for {} s", SILENCE.as_secs())));
        }
        let silent = engine.link_heard.elapsed();
        if silent > engine.loss {
            let (name, port) = (device.name(), device.port().number);
            let what = format!(
                "nothing came over RDMA device {name} port {port} for {} s: is the link down?",
                silent.as_secs()
            );
            return Err(End::Lost(what));
        }
        if engine.said.elapsed() >= Duration::from_secs(1) {
            engine.said = Instant::now();
            if engine.link.has_room() {
                put(engine.link.out(), frame::ALIVE, &[]);
                engine.link.flush()?;
            }
            let alive = FrameHeader { kind: frame::ALIVE, len: 0 };
            (&self.control)
                .write_all(alive.as_bytes())
                .map_err(|e| End::Lost(format!("sending to the bridge: {e}")))?;
        }
        Ok(())
    }

    /// Looks at the control connection.
    fn look(&self, engine: &mut Engine) -> Result<(), End> {
        loop {
            match engine.control_reader.fill(&mut &self.control) {
                Ok(0) => return Err(End::Asked),
                Ok(_) => engine.heard = Instant::now(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Err(End::Asked),
                Err(e) => return Err(End::Lost(format!("the bridge's connection: {e}"))),
            }
            while let Some((kind, _)) =
                engine.control_reader.next_frame().map_err(|e| End::Lost(e.to_string()))?
            {
                match kind {
                    frame::ALIVE => {}
                    frame::BYE => return Err(End::Asked),
                    _ => {
                        return Err(End::Lost(format!(
                            "the bridge sent a frame of kind {kind} on the control connection"
                        )));
                    }
                }
            }
        }
    }

    /// Hands pieces on, in their order, until the session ends.
    fn land(&self, lane: Receiver<(DataHeader, u32)>) {
        for (header, slot) in lane {
            let begin = (slot * SLOT_SIZE + SLOT_DATA) as usize;
            let Some(at) = self.slots.pointer(begin, header.len as usize) else { continue };
            let client = self.this.clone();
            let free = move || {
                if let Some(client) = client.upgrade() {
                    client.free_slot(slot);
                }
            };
            // The slot stays its user's until `free` has been called.
            let staged = Staged::new(at, header.len as usize, self.slots.clone(), Box::new(free));
            match self.inbox.deliver(&header, staged) {
                Ok(()) => {}
                Err(_) if self.end.get().is_some() => return,
                Err(e) => return self.lose(&format!("the bridge's data: {e}")),
            }
        }
    }

    fn free_slot(&self, slot: u32) {
        self.say(|engine| {
            let Engine { link, free, .. } = engine;
            free.free(slot, |freed| put(link.out(), frame::SLOTS_FREE, &[freed.as_bytes()]));
        });
    }

    /// Appends to the stream and sends what can go. Waits while more than enough is waiting already.
    fn say(&self, fill: impl FnOnce(&mut Engine)) {
        let mut engine = self.lock();
        while !engine.link.has_room() && self.end.get().is_none() {
            engine = self
                .room
                .wait_timeout(engine, Duration::from_millis(100))
                .unwrap_or_else(|e| e.into_inner())
                .0;
        }
        if self.end.get().is_none() {
            fill(&mut engine);
            self.flush(engine);
        }
    }

    fn flush(&self, mut engine: MutexGuard<'_, Engine>) {
        if let Err(e) = engine.link.flush() {
            drop(engine);
            self.lose(&e.to_string());
        }
    }

    fn flush_executed(&self) {
        let now = self.executed.load(Ordering::Acquire);
        let mut engine = self.lock();
        if now > engine.told && self.end.get().is_none() {
            engine.told = now;
            let update = ProgressUpdate { kind: progress::EXECUTED, index: 0, seq: now, value: 0 };
            put(engine.link.out(), frame::PROGRESS, &[update.as_bytes()]);
            self.flush(engine);
        }
    }

    pub(super) fn data_sent(&self, seq: u64, bytes: u64) {
        self.say(|engine| put(engine.link.out(), frame::DATA_SENT, &[DataSent { seq, bytes }.as_bytes()]));
    }

    /// Writes `bytes` to `address` of the client's memory. Returns when they may be changed: at once when they had to be copied into registered memory, else when the
    /// device is done with them.
    pub(super) fn send(&self, seq: u64, address: u64, key: u32, bytes: &[u8]) -> Result<(), Lost> {
        let over = || self.end.get().cloned().flatten().unwrap_or_else(|| Lost::new("the session is over"));
        let id = {
            let mut engine = self.lock();
            engine.next_send += 1;
            let id = engine.next_send;
            engine.sends.insert(id, 0);
            id
        };
        let direct = self.is_adopted(bytes);
        let mut at = 0;
        while at < bytes.len() {
            let chunk = &bytes[at..bytes.len().min(at + CHUNK)];
            // Copied outside the lock: completions and the other threads go on meanwhile.
            let (bounce, source) = if direct {
                (None, self.adopted_segment(chunk))
            } else {
                let Some(bounce) = self.wait_for(|engine| engine.free_bounces.pop()) else {
                    self.lock().sends.remove(&id);
                    return Err(over());
                };
                let source = self.bounces.pointer(bounce * CHUNK, chunk.len()).and_then(|to| {
                    // SAFETY: inside the slab; the buffer was taken off the list of the free ones, so nobody else uses it.
                    unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), to.as_ptr(), chunk.len()) };
                    self.bounces.registration().slice((bounce * CHUNK) as u64, chunk.len() as u32)
                });
                (Some(bounce), source)
            };
            let Some(source) = source else { return Err(Lost::new("data outside registered memory")) };
            let token = id << 16 | bounce.map_or(NO_BOUNCE, |b| b as u64);
            let posted = self.wait_for(|engine| {
                let put = Put {
                    queue: engine.link.next_queue()?,
                    source,
                    header: None,
                    address: address + at as u64,
                    key,
                    immediate: seq as u32,
                    token,
                    signal: true,
                };
                if let Some(left) = engine.sends.get_mut(&id) {
                    *left += 1;
                }
                Some(engine.link.put(&put))
            });
            if !matches!(posted, Some(Ok(()))) {
                self.lock().sends.remove(&id);
                if let Some(Err(e)) = posted {
                    self.lose(&e.to_string());
                }
                return Err(over());
            }
            at += chunk.len();
            self.sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        let mut engine = self.lock();
        while direct && engine.sends.get(&id).is_some_and(|left| *left > 0) && self.end.get().is_none() {
            engine = self
                .room
                .wait_timeout(engine, Duration::from_millis(100))
                .unwrap_or_else(|e| e.into_inner())
                .0;
        }
        engine.sends.remove(&id);
        if self.end.get().is_some() { Err(over()) } else { Ok(()) }
    }

    /// Waits until `take` gives something, which it tries when there may be room. `None`: the session has ended.
    fn wait_for<T>(&self, mut take: impl FnMut(&mut Engine) -> Option<T>) -> Option<T> {
        let mut engine = self.lock();
        while self.end.get().is_none() {
            if let Some(taken) = take(&mut engine) {
                return Some(taken);
            }
            let waited = self.room.wait_timeout(engine, Duration::from_millis(100));
            engine = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
        None
    }

    fn is_adopted(&self, bytes: &[u8]) -> bool {
        !bytes.is_empty() && self.adopted_segment(bytes).is_some()
    }

    fn adopted_segment(&self, bytes: &[u8]) -> Option<crate::verbs::Segment> {
        let address = bytes.as_ptr() as u64;
        let len = u32::try_from(bytes.len()).ok()?;
        lock(&self.adopted).iter().find_map(|r| r.slice(address.checked_sub(r.address())?, len))
    }

    /// Ends the session, once. The farewell goes first: as soon as the dispatcher sees the end, this process may exit.
    fn finish(&self, end: Option<Lost>) {
        if self.ending.swap(true, Ordering::AcqRel) {
            // Another thread is at it, and waits for nothing before it is done.
            self.end.wait();
            return;
        }
        if let Some(Lost { reason }) = &end {
            let header = FrameHeader { kind: frame::BYE, len: reason.len() as u32 };
            // The peer may be the one that is gone.
            let _ = (&self.control).write_all(&[header.as_bytes(), reason.as_bytes()].concat());
        }
        let _ = self.control.shutdown(Shutdown::Both);
        let _ = self.end.set(end);
        self.stop.ring();
        self.inbox.close();
        // Under the locks, so that nobody misses it between a look and a wait.
        drop(lock(&self.arrived));
        self.came.notify_all();
        self.room.notify_all();
    }
}

fn put(out: &mut Vec<u8>, kind: u32, parts: &[&[u8]]) {
    let len = parts.iter().map(|p| p.len()).sum::<usize>() as u32;
    out.extend_from_slice(FrameHeader { kind, len }.as_bytes());
    parts.iter().for_each(|p| out.extend_from_slice(p));
}

impl Client for VerbsClient {
    fn reply(&self, seq: u64, slot: u16, status: Status, payload: &[u8]) {
        if u32::from(slot) >= self.slot_count || slot == NO_SLOT {
            self.lose(&format!("command {seq} names reply slot {slot} of {}", self.slot_count));
            return;
        }
        let (status, payload) =
            if payload.len() > MAX_PAYLOAD { (Status::UNKNOWN, &[][..]) } else { (status, payload) };
        let header = ReplyHeader { seq, slot: slot.into(), status: status.0 };
        self.say(|engine| put(engine.link.out(), frame::REPLY, &[header.as_bytes(), payload]));
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        if !updates.is_empty() {
            self.say(|engine| put(engine.link.out(), frame::PROGRESS, &[updates.as_bytes()]));
        }
    }

    fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::Release);
        self.inbox.executed(seq);
        if seq.is_multiple_of(BATCH) {
            self.flush_executed();
        }
    }

    fn source(&self, seq: u64, piece: u32, range: HostRange) -> Result<Source, Status> {
        Ok(Source::Incoming(self.inbox.incoming(seq, piece, range.len)))
    }

    fn sink(&self, seq: u64, _piece: u32, range: HostRange) -> Result<Sink, Status> {
        let region = match range.place {
            Place::Arena => ARENA_KEY,
            Place::Region(id) => id,
        };
        let key = *self.lock().keys.get(&region).ok_or(Status::INVALID_VALUE)?;
        let inside = range.offset.checked_add(range.len).is_some_and(|end| end <= key.size);
        if !inside {
            return Err(Status::INVALID_VALUE);
        }
        Ok(Sink::Outgoing(Outgoing::over_verbs(
            self.this.clone(),
            seq,
            key.address + range.offset,
            key.key,
            range.len,
        )))
    }

    fn nothing_sent(&self, seq: u64) {
        self.data_sent(seq, 0);
    }

    fn lose(&self, reason: &str) {
        self.finish(Some(Lost::new(reason)));
    }

    fn close(&self) {
        self.finish(None);
    }

    fn streams_data(&self) -> bool {
        true
    }

    fn traffic(&self) -> (u64, u64) {
        (self.inbox.bytes.load(Ordering::Relaxed), self.sent.load(Ordering::Relaxed))
    }

    fn staging(&self) -> Option<(NonNull<u8>, usize)> {
        let len = self.slots.registration().len();
        self.slots.pointer(0, len).map(|at| (at, len))
    }

    unsafe fn adopt(&self, at: NonNull<u8>, len: usize) -> Result<(), Lost> {
        let domain = Arc::clone(self.lock().link.domain());
        // SAFETY: the caller's promise.
        let registration = unsafe { domain.register(at, len, Access::Read) };
        lock(&self.adopted).push(registration.map_err(|e| Lost::new(e.to_string()))?);
        Ok(())
    }
}
