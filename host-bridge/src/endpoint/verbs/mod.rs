//! The worker's end of a `verbs` session.
//!
//! ```text
//!   messages ─▶ pump ─▶ records ─▶ dispatcher            any thread ─▶ link.out ─▶ messages
//!   writes ───▶ slots, in turn ([`PlannedSlots`]) ─▶ the device  send_held, send_lent ─▶ writes into the client's pages
//!   writes of granted data ─▶ slots of their own ─▶ pump ─▶ where they belong ([`Inbox`])
//! ```
//!
//! The pump reads everything at once, whatever the dispatcher is doing: the bridge holds records back when
//! too many wait ([`COMMANDS_AHEAD`]).
//!
//! No CPU copies bulk data on this side where the driver does its part: the bridge writes a command's `In`
//! data into slots that the driver's device reads ([`Placed`](super::Placed)), and what the device wrote into
//! adopted memory ([`Client::adopt`]) or into a lent buffer ([`Outgoing::lend`]) goes out as it is. Other
//! bytes are copied into such a buffer first, and counted ([`Client::copied`]).
//!
//! In reading order: the session here, which the dispatcher uses; [`client`], what all threads share of it;
//! [`pump`], the one thread that takes completions, [`keys`], where it may write in the client's memories,
//! [`send`], data on its way out, and [`resume`], links that take the place of lost ones.

pub(super) mod client;
mod keys;
mod pump;
mod resume;
pub(super) mod send;

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::Status;
use protocol::channel::Record;
use protocol::data::HostRange;
use protocol::link::{COMMANDS_AHEAD, GRANTED_SLOTS, ProgressUpdate, Queues, frame};
use zerocopy::IntoBytes;

pub use self::client::VerbsClient;
use self::client::{BUFFERS, CHUNK, Engine, LentBuffers, SENDS, SLOT_SIZE, SLOTS, Target, lock};
use self::keys::{Keys, region};
use super::contract::{Client, Commands, Sink, Source};
use super::dispatcher_poll::Polling;
use super::end::{Farewell, Lost};
use super::incoming::Inbox;
use super::link::Link as Links;
use super::outgoing::Outgoing;
use super::planned_slots::{Arrivals, Freed, PlannedSlots, StagingArea};
use super::stream::{Records, check_slot, put, put_progress, put_reply};
use super::wake::StopEvent;
use crate::framing::{FrameReader, split_struct, watch_peer};
use crate::stream::Stream;
use crate::verbs::{Access, Device, Domain, Link, Settings, Slab, Unconnected, VerbsError};
use protocol::polling::{PollTime, processors};

/// A bridge that neither takes nor sends anything for this long before the session begins is lost.
const SILENCE: Duration = Duration::from_secs(30);
/// Executed commands after which the client is told even while there is more to do.
const BATCH: u64 = 64;

/// The dispatcher's side.
pub struct VerbsCommands {
    client: Arc<VerbsClient>,
    /// Taken over from the pump.
    records: Records,
    /// Bytes of records taken over of which the bridge has not been told.
    untold: u64,
    poll: PollTime,
}

impl VerbsCommands {
    /// Begins a session on a control connection whose welcome has been sent: makes queue pairs as the bridge
    /// wishes and `settings` allow. On failure the bridge has been told why. `slot_count`: the channel's
    /// reply slots, as the hello said. `grace`: how long the session waits for other connections when its own
    /// are lost; zero: it ends with them.
    pub fn start(
        control: Stream,
        slot_count: u32,
        settings: &Settings,
        polling: Polling,
        grace: Duration,
    ) -> Result<(VerbsCommands, Arc<VerbsClient>), Lost> {
        let failed = |e: io::Error| Lost::new(format!("preparing the connection: {e}"));
        control.set_nonblocking(false).map_err(failed)?;
        control.set_nodelay().map_err(failed)?;
        control.set_read_timeout(Some(SILENCE)).map_err(failed)?;
        control.set_write_timeout(SILENCE).map_err(failed)?;
        watch_peer(&control);
        let mut body = Vec::new();
        let kind = control.recv_frame(&mut body).map_err(failed)?;
        if kind != Some(frame::QUEUES) {
            return Err(Lost::new(format!("frame of kind {kind:?} where QUEUES was expected")));
        }
        let peer = split_struct::<Queues>(&body).map_err(failed)?.0;
        let made = connect(&control, settings, &peer);
        let (mut link, slots, buffers) = made.map_err(|e| {
            let lost = Lost::new(format!("verbs: {e}"));
            // The bridge may be gone already.
            let _ = control.send_frame(frame::BYE, &[lost.reason.as_bytes()]);
            lost
        })?;
        control.set_nonblocking(true).map_err(failed)?;
        let stop = StopEvent::new().map_err(failed)?;
        let peer = control.peer_addr().map_err(failed)?.to_string();
        let queues = link.data_queues();
        let control = Arc::new(control);
        let links = Links::new(Arc::clone(&control), grace);
        if links.survives() {
            link.keep();
            link.give_up_stalled();
        }
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let changed = EventFd::from_value_and_flags(0, flags).map_err(|e| failed(e.into()))?;
        let engine = Engine {
            link,
            attempt: 0,
            reader: FrameReader::new(),
            came: 0,
            told_came: 0,
            control_reader: FrameReader::new(),
            records: Records::default(),
            body: Vec::new(),
            keys: Keys::default(),
            sends: vec![0; SENDS],
            free_sends: (0..SENDS).collect(),
            lent_buffers: LentBuffers::new(),
            waiters: 0,
            told: 0,
            unwatched: false,
            emptied: Vec::with_capacity(GRANTED_SLOTS as usize),
        };
        let Some(at) = slots.pointer(0, (SLOT_SIZE * SLOTS) as usize) else {
            return Err(Lost::new("the slots have no memory"));
        };
        let inbox = Inbox::new(0);
        let client = Arc::new_cyclic(|this: &Weak<VerbsClient>| {
            let freed: Weak<dyn Freed> = this.clone();
            inbox.tell(this.clone());
            // SAFETY: a worker keeps its client, and so the slots, to its end, which comes after everything
            // that reads them.
            let ring = unsafe { PlannedSlots::new(at, SLOT_SIZE as usize, SLOTS as usize, queues, freed) };
            VerbsClient {
                this: this.clone(),
                engine: Mutex::new(engine),
                room: Condvar::new(),
                adopted: OnceLock::new(),
                buffers,
                slots,
                links,
                control: Mutex::new(Some(control)),
                changed,
                link_changes: OnceLock::new(),
                before_news: OnceLock::new(),
                announcing: Mutex::default(),
                settings: settings.clone(),
                peer,
                slot_count,
                ring,
                inbox: Arc::clone(&inbox),
                arrived: Mutex::default(),
                waiting: AtomicUsize::new(0),
                came: Condvar::new(),
                roused: AtomicBool::new(false),
                executed: AtomicU64::new(0),
                sent: AtomicU64::new(0),
                copied: AtomicU64::new(0),
                helped: AtomicU64::new(0),
                pump: OnceLock::new(),
                ending: AtomicBool::new(false),
                end: OnceLock::new(),
                stop,
                farewell: Farewell::default(),
            }
        });
        let poll = PollTime::giving_way(polling.most, processors());
        let pump = Arc::clone(&client);
        let pump = std::thread::Builder::new()
            .name("rgpu-pump".into())
            .spawn(move || pump.pump(poll))
            .map_err(failed)?;
        let _ = client.pump.set(pump.thread().clone());
        let commands =
            VerbsCommands { client: Arc::clone(&client), records: Records::default(), untold: 0, poll };
        Ok((commands, client))
    }

    /// The next record at hand.
    fn take(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        if self.records.is_empty() {
            let into = self.records.refill();
            if self.client.waiting.load(Ordering::Acquire) == 0 {
                return Ok(None);
            }
            let mut arrived = lock(&self.client.arrived);
            std::mem::swap(&mut *arrived, into);
            self.client.waiting.store(0, Ordering::Release);
            drop(arrived);
            self.untold += into.len() as u64;
            // In steps, so that a few commands cost the bridge no message.
            if self.untold >= COMMANDS_AHEAD / 4 {
                let taken = std::mem::take(&mut self.untold);
                self.client
                    .say(|engine| put(engine.link.out(), frame::COMMANDS_TAKEN, &[&taken.to_le_bytes()]));
            }
        }
        self.records.take(body)
    }
}

/// Makes and connects the queue pairs, and answers the bridge.
fn connect(control: &Stream, settings: &Settings, peer: &Queues) -> Result<(Link, Slab, Slab), VerbsError> {
    let domain = Domain::new(Device::open(settings)?)?;
    let slots = (SLOT_SIZE * (SLOTS + GRANTED_SLOTS)) as usize;
    let slots = Slab::new(&domain, slots, Access::RemoteWrite)?;
    let buffers = Slab::new(&domain, CHUNK * BUFFERS, Access::Read)?;
    let unconnected = Unconnected::answering(&domain, settings, peer)?;
    let offer = unconnected.offer(Some((&slots, SLOT_SIZE)));
    let link = unconnected.connect(peer)?;
    control
        .send_frame(frame::QUEUES, &[offer.as_bytes()])
        .map_err(|e| VerbsError::Broken(format!("answering the bridge: {e}")))?;
    Ok((link, slots, buffers))
}

impl Commands for VerbsCommands {
    fn next(&mut self, body: &mut Vec<u8>, rest: &mut dyn FnMut()) -> Result<Option<Record>, Lost> {
        'next: loop {
            if let Some(record) = self.try_next(body)? {
                return Ok(Some(record));
            }
            let client = Arc::clone(&self.client);
            if client.end.get() == Some(&None) {
                return Ok(None);
            }
            let until = Instant::now() + self.poll.get();
            loop {
                if client.waiting.load(Ordering::Acquire) > 0 || client.end.get().is_some() {
                    self.poll.paid();
                    continue 'next;
                }
                if Instant::now() >= until {
                    break;
                }
                if self.poll.gives_way() {
                    client.help();
                }
                self.poll.pause();
            }
            client.roused.store(false, Ordering::SeqCst);
            rest();
            client.flush_executed();
            // From here on nobody else takes completions.
            if let Some(pump) = client.pump.get().filter(|_| self.poll.gives_way()) {
                pump.unpark();
            }
            let asleep = Instant::now();
            let mut arrived = lock(&client.arrived);
            while arrived.is_empty() && client.end.get().is_none() && !client.roused.load(Ordering::SeqCst) {
                arrived = client.came.wait(arrived).unwrap_or_else(|e| e.into_inner());
            }
            drop(arrived);
            self.poll.slept(asleep.elapsed());
        }
    }

    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        if let Some(Some(lost)) = self.client.end.get() {
            return Err(lost.clone());
        }
        self.take(body).inspect_err(|lost| self.client.lose(&lost.reason))
    }
}

impl Client for VerbsClient {
    fn reply(&self, seq: u64, slot: u16, status: Status, payload: &[u8]) {
        match check_slot(seq, slot, self.slot_count) {
            Ok(()) => self.say(|engine| put_reply(engine.link.out(), seq, slot, status, payload)),
            Err(wrong) => self.lose(&wrong),
        }
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        self.say(|engine| put_progress(engine.link.out(), updates));
    }

    fn before_news(&self) {
        self.before_news.get().inspect(|news| news());
    }

    fn set_before_news(&self, news: Box<dyn Fn() + Send + Sync>) {
        let _ = self.before_news.set(news);
    }

    fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::Release);
        self.inbox.executed(seq);
        if self.ring.executed(seq) {
            self.freed();
        }
        if seq.is_multiple_of(BATCH) {
            self.flush_executed();
        }
    }

    fn source(&self, seq: u64, piece: u32, range: HostRange) -> Result<Source, Status> {
        if self.inbox.is_asked((seq, piece)) {
            return Ok(Source::Incoming(self.inbox.incoming(seq, piece, range.len)));
        }
        let placed = self.ring.ask(seq, piece, range.len);
        placed.map(Source::Placed).ok_or(Status::INVALID_VALUE)
    }

    fn sink(&self, seq: u64, _piece: u32, range: HostRange) -> Result<Sink, Status> {
        let region = region(range.place);
        let size = self.lock().keys.get(region).map_or(0, |key| key.size);
        let inside = range.offset.checked_add(range.len).is_some_and(|end| end <= size);
        // For a copy of nothing the bridge says no key.
        if !inside && range.len > 0 {
            return Err(Status::INVALID_VALUE);
        }
        let at = Target { region, offset: range.offset };
        Ok(Sink::Outgoing(Outgoing::over_verbs(self.this.clone(), seq, at, range.len)))
    }

    fn nothing_sent(&self, seq: u64) {
        self.data_sent(seq, 0);
    }

    fn nothing_read(&self, seq: u64, piece: u32) {
        if self.inbox.is_asked((seq, piece)) {
            self.inbox.unwanted((seq, piece));
        }
    }

    fn reads_late(&self) -> bool {
        true
    }

    fn lose(&self, reason: &str) {
        self.finish(Some(Lost::new(reason)));
    }

    fn close(&self) {
        self.finish(None);
    }

    fn when_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.farewell.set(then);
    }

    fn lost(&self) -> Option<Lost> {
        self.end.get().cloned().flatten()
    }

    fn rouse(&self) {
        // Under the lock, so that it comes before the dispatcher looks or when it sleeps.
        let arrived = lock(&self.arrived);
        self.roused.store(true, Ordering::SeqCst);
        drop(arrived);
        self.came.notify_all();
    }

    fn streams_data(&self) -> bool {
        true
    }

    fn traffic(&self) -> (u64, u64) {
        let granted = self.inbox.bytes.load(Ordering::Relaxed);
        (self.ring.bytes.load(Ordering::Relaxed) + granted, self.sent.load(Ordering::Relaxed))
    }

    fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed) + self.inbox.copied.load(Ordering::Relaxed)
    }

    fn staging(&self) -> Option<StagingArea> {
        let len = (SLOT_SIZE * SLOTS) as usize;
        let at = self.slots.pointer(0, len)?;
        Some(StagingArea { at, len, slots: SLOTS as usize })
    }

    fn watch(&self, arrivals: Arc<dyn Arrivals>) {
        self.ring.watch(arrivals);
    }

    unsafe fn adopt(&self, at: NonNull<u8>, len: usize) -> Result<(), Lost> {
        let domain = Arc::clone(self.lock().link.domain());
        // SAFETY: the caller's promise.
        let registration = unsafe { domain.register(at, len, Access::Read) };
        let registration = registration.map_err(|e| Lost::new(e.to_string()))?;
        self.adopted.set(registration).map_err(|_| Lost::new("memory is adopted once"))
    }
}
