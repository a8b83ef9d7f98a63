//! The device that a guest sees: configuration space, queues, and its channels.
//!
//! Five rules:
//! - The virtqueue threads never block. A thread of its own executes each request (at most [`MAX_JOBS`] at a time) and answers it when it is done; answers come in any order.
//! - A job touches guest memory (to answer, or to start a session) only [inside](Gate::enter) the gate: while the guest runs, and if the device has not been reset since the request came.
//! - A VMM says that the control queue stops when the guest is stopped, and when the device is reset, in the same words. So then everything [pauses](Device::pause): the guest's memory may be somebody
//!   else's by now. The keeper finds out which it was, and says so if it was a reset.
//! - What a successor of this process has to know is stored before anything depends on it: a request before it is looked at, a channel before anybody else touches its memory.
//! - Nothing that a guest sends ends a thread or the device.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use host_bridge::bridge::{
    ChannelMemory, Closed, Prepared, RegionMemory, Saved, Session, TransportKind, Turn, Wakeup, tell_lost,
};
use host_bridge::memory::Memories;
use nix::poll::{PollFd, PollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::device::{
    Answer, CONFIG_MAGIC, CONTROL_QUEUE, Config, DEVICE_VERSION, DOORBELL_QUEUE, EVENT_QUEUE, Extent,
    QUEUE_COUNT, Response,
};
use protocol::link::Memory;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringT};
use virtio_queue::QueueT;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventNotifier};
use zerocopy::IntoBytes;

use super::budget::{Budget, Charge};
use super::control::{self, FIXED, Order};
use super::events::Events;
use super::gate::{Gate, Inside};
use super::recovery::{self, Known, Leftover, Requests, Store};
use super::{GuestMemory, Vring};
use crate::config::Vm;
use crate::limit::LogLimit;
use crate::link::Stored;
use crate::refusal::{Refusal, invalid, no_resources};
use crate::registry::{Listed, Registry};

/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;
/// `VIRTIO_RING_F_INDIRECT_DESC` and `VIRTIO_RING_F_EVENT_IDX`.
const RING_FEATURES: u64 = 1 << 28 | 1 << 29;
/// Maximum number of descriptors of a queue.
pub const QUEUE_SIZE: usize = 1024;
/// Maximum number of requests in progress. Each has a thread.
const MAX_JOBS: usize = 256;
/// Maximum bytes of extents in requests in progress.
const MAX_JOB_BYTES: usize = 64 << 20;
/// How long the server may hold a destroyed channel's memory before the log says so. The message is repeated as often.
const PATIENCE: Duration = Duration::from_secs(10);
/// Queues of each thread: one serves `controlq` and `eventq`, the other `doorbellq`, so that a doorbell never waits behind a request.
const THREADS: [u64; 2] = [1 << CONTROL_QUEUE | 1 << EVENT_QUEUE, 1 << DOORBELL_QUEUE];

/// A channel of the guest.
enum Channel {
    /// A job is opening it.
    Opening,
    /// Its session waits in a server's queue, and the guest has been told so. Writing to the eventfd makes the job that opens it give up.
    Waiting(Arc<EventFd>),
    /// Its session was refused after the guest had been told that it waits. Nothing touches its memory.
    Over,
    /// Its session is over because the device process that served it has ended. A worker may still have its memory mapped.
    Left(Arc<Leftover>),
    /// A job waits until the server has released its memory.
    Closing(Arc<Session>),
    Open(Arc<Session>, Held),
}

/// What an open channel holds, until nothing touches its memory any more.
struct Held {
    _listed: Listed,
    _mappings: Charge,
    /// By region.
    pieces: HashMap<u32, Charge>,
}

type Lost = Box<dyn FnOnce(&str) + Send>;

impl Channel {
    /// The session of an open channel.
    fn session(&self) -> Option<Arc<Session>> {
        match self {
            Channel::Open(session, _) => Some(session.clone()),
            _ => None,
        }
    }

    /// Ends what there is of a session, and waits up to `patience` until nothing touches the channel's memory.
    fn close(&self, reason: &str, patience: Duration) -> Closed {
        match self {
            Channel::Open(session, _) | Channel::Closing(session) => session.close(reason, patience),
            Channel::Left(leftover) => leftover.close(patience),
            Channel::Opening | Channel::Waiting(_) | Channel::Over => Closed::Released,
        }
    }
}

/// The device of one virtual machine. The module's documentation gives its rules.
pub struct Device {
    /// For jobs, which keep the device alive.
    me: Weak<Device>,
    config: Vm,
    registry: Arc<Registry>,
    /// Guest memory for the queues.
    guest: GuestMemory,
    /// Guest memory for new sessions. A session keeps the memory that it was given.
    memories: Mutex<Memories>,
    channels: Mutex<HashMap<u32, Channel>>,
    settled: Condvar,
    events: Arc<Events>,
    gate: Gate,
    /// Held while the device pauses, goes on, or is reset.
    changing: Mutex<()>,
    /// The request queue, while it runs.
    control: Mutex<Option<Vring>>,
    jobs: AtomicUsize,
    job_bytes: AtomicUsize,
    limit: LogLimit,
    who: String,
    exit: [EventFd; THREADS.len()],
    store: Store,
    requests: Requests,
    budget: Budget,
    /// What a predecessor has left, until the request queue runs.
    predecessor: Mutex<Option<Predecessor>>,
    /// Channels of a predecessor that had not answered the request to create them. The request is executed again.
    unanswered: Mutex<HashMap<u32, Leftover>>,
    /// By queue index: whether the next buffer follows from the used ring, because a predecessor has taken some.
    resumes: [AtomicBool; QUEUE_COUNT],
}

/// The device process that served this guest before.
pub struct Predecessor {
    /// How it ended.
    pub how: String,
    /// Its channels.
    pub stored: BTreeMap<u32, Stored>,
}

/// A writable piece of a request's chain: address and length.
type Piece = (GuestAddress, usize);

/// A request taken from the queue.
struct Fetched {
    head: u16,
    /// A predecessor had taken it, and may have executed it.
    again: bool,
    answer: Vec<Piece>,
    order: Result<Order, Refusal>,
    bytes: usize,
}

impl Device {
    /// A device without channels, or with those of its predecessor.
    pub fn new(
        config: Vm,
        registry: Arc<Registry>,
        guest: GuestMemory,
        store: Store,
        requests: Requests,
        predecessor: Option<Predecessor>,
    ) -> io::Result<Arc<Device>> {
        let who = format!("vm {}", config.name);
        let exit = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let exit = [exit()?, exit()?];
        let budget = Budget::new(config.limits.max_registered_extents as usize);
        Ok(Arc::new_cyclic(|me| Device {
            me: me.clone(),
            budget,
            events: Arc::new(Events::new(who.clone(), guest.clone())),
            config,
            registry,
            guest,
            memories: Mutex::default(),
            channels: Mutex::default(),
            settled: Condvar::new(),
            gate: Gate::default(),
            changing: Mutex::default(),
            control: Mutex::default(),
            jobs: AtomicUsize::new(0),
            job_bytes: AtomicUsize::new(0),
            limit: LogLimit::new(),
            who,
            exit,
            store,
            requests,
            resumes: std::array::from_fn(|_| AtomicBool::new(predecessor.is_some())),
            predecessor: Mutex::new(predecessor),
            unanswered: Mutex::default(),
        }))
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<u32, Channel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest is stopped, or was reset. When this returns nothing touches its memory, until [`go_on`](Self::go_on). Sessions stand meanwhile; one that cannot pause ends.
    fn pause(&self) {
        let _one = self.changing();
        if !self.gate.pause() {
            return;
        }
        let (mut open, mut ending) = (Vec::new(), Vec::new());
        for (id, channel) in self.channels().iter() {
            match channel {
                Channel::Open(session, _) => open.push((*id, session.clone())),
                Channel::Closing(session) => ending.push(Channel::Closing(session.clone())),
                Channel::Left(leftover) => ending.push(Channel::Left(leftover.clone())),
                Channel::Opening | Channel::Waiting(_) | Channel::Over => {}
            }
        }
        // All sessions are told first and then pause at the same time.
        open.iter().for_each(|(_, session)| session.pause());
        let deadline = Instant::now() + PATIENCE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let unable: Vec<_> = open.iter().filter(|(_, session)| !session.is_paused(left())).collect();
        let mut count = open.len() - unable.len();
        for (id, session) in &unable {
            let (transport, reason) = (
                session.transport(),
                match session.transport() {
                    TransportKind::Verbs => "the guest was stopped, which no session over verbs survives",
                    _ => "the guest was stopped, and work on the GPU went on using its memory",
                },
            );
            tracing::warn!("{}: channel {id}: over {transport}: {reason}", self.who);
            self.registry.totals.lost.fetch_add(1, Ordering::Relaxed);
            session.close(reason, Duration::ZERO);
            ending.push(Channel::Closing(session.clone()));
        }
        count += self.pause_leftovers(left);
        let deadline = Instant::now() + PATIENCE;
        for channel in ending {
            let left = deadline.saturating_duration_since(Instant::now());
            if channel.close("the guest was stopped", left) == Closed::StillHeld {
                tracing::error!("{}: the server still holds memory of a guest that is stopped", self.who);
            }
        }
        tracing::info!("{}: the guest does not run; {count} sessions are kept", self.who);
    }

    /// Has workers pause whose bridge was a predecessor. Gives the number of its channels.
    fn pause_leftovers(&self, left: impl Fn() -> Duration) -> usize {
        let predecessor = self.predecessor.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Predecessor { stored, .. }) = &*predecessor else { return 0 };
        for (channel, stored) in stored {
            let leftover =
                stored.try_clone().and_then(|stored| Leftover::new(stored, self.config.servers.all()));
            match leftover {
                Ok(leftover) if leftover.saved.as_ref().is_none_or(|saved| saved.pause(left())) => {}
                Ok(leftover) => {
                    leftover.end();
                    tracing::warn!(
                        "{}: channel {channel} of the predecessor does not pause: it ends",
                        self.who
                    );
                    leftover.close(PATIENCE);
                }
                Err(e) => tracing::error!("{}: channel {channel} of the predecessor: {e}", self.who),
            }
        }
        stored.len()
    }

    /// The control queue has something to say. If it had stopped, the guest goes on.
    fn go_on(&self, vring: &Vring) {
        let _one = self.changing();
        // In this order: a queue that is ready after the pause was seen has started again.
        if !self.gate.is_paused() || !vring.get_ref().get_queue().ready() {
            return;
        }
        self.gate.go_on();
        let sessions: Vec<_> = self.channels().values().filter_map(Channel::session).collect();
        tracing::info!("{}: the guest runs again; {} sessions go on", self.who, sessions.len());
        sessions.iter().for_each(|session| session.go_on());
    }

    /// Ends every session because the device is reset or its VMM is gone. Returns when the sessions have released guest memory.
    pub fn end_all(&self, reason: &str) {
        let _one = self.changing();
        let (ids, channels) = {
            // A job that is inside the gate is starting a session or answering. After this, no job of before enters.
            let paused = self.gate.reset();
            self.resumes.iter().for_each(|resumes| resumes.store(false, Ordering::SeqCst));
            *self.control.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.events.reset();
            self.take_leftovers();
            let mut channels = self.channels();
            if paused {
                // Nobody knows since when the guest's memory is another's.
                channels.values().filter_map(Channel::session).for_each(|session| session.seal());
            }
            let ids: Vec<u32> = channels.keys().copied().collect();
            let ended = channels.drain().filter_map(|(_, channel)| match &channel {
                Channel::Open(..) | Channel::Closing(_) | Channel::Left(_) => Some(channel),
                Channel::Waiting(give_up) => {
                    // Writing fails only when the counter is at its maximum. Then the eventfd is readable, too.
                    let _ = give_up.write(1);
                    None
                }
                Channel::Opening | Channel::Over => None,
            });
            (ids, ended.collect::<Vec<_>>())
        };
        self.settled.notify_all();
        if !channels.is_empty() {
            tracing::info!("{}: ending {} sessions: {reason}", self.who, channels.len());
        }
        // All sessions are told first and then end at the same time.
        for channel in &channels {
            if let Channel::Open(session, _) = channel {
                self.count_end(session);
            }
            channel.close(reason, Duration::ZERO);
        }
        let deadline = Instant::now() + PATIENCE;
        for channel in &channels {
            if channel.close(reason, deadline.saturating_duration_since(Instant::now())) == Closed::StillHeld
            {
                tracing::error!("{}: the server still holds guest memory after a reset", self.who);
            }
        }
        self.requests.reset();
        ids.into_iter().for_each(|channel| self.store.forget(channel));
    }

    /// Takes channels of a predecessor that nobody has asked for yet, so that they end with all others.
    fn take_leftovers(&self) {
        let predecessor = self.predecessor.lock().unwrap_or_else(PoisonError::into_inner).take();
        let stored = predecessor.map(|predecessor| predecessor.stored).unwrap_or_default();
        let left = stored.into_iter().filter_map(|(channel, stored)| {
            let leftover = Leftover::new(stored, self.config.servers.all()).inspect(Leftover::end);
            leftover
                .inspect_err(|e| tracing::error!("{}: channel {channel}: {e}", self.who))
                .ok()
                .map(|l| (channel, l))
        });
        let unanswered = std::mem::take(&mut *self.unanswered.lock().unwrap_or_else(PoisonError::into_inner));
        let mut channels = self.channels();
        for (channel, leftover) in left.chain(unanswered) {
            channels.entry(channel).or_insert(Channel::Left(Arc::new(leftover)));
        }
    }

    /// Counts a session that is about to be closed on request. A session that was lost has been counted already.
    fn count_end(&self, session: &Session) {
        if session.over().is_none() {
            self.registry.totals.closed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Passes a doorbell on to every open session.
    fn ring(&self) {
        let Some(_inside) = self.gate.try_enter(self.gate.epoch()) else { return };
        self.channels().values().filter_map(Channel::session).for_each(|session| session.doorbell());
    }

    /// Takes all requests from the queue.
    fn take_requests(&self, vring: &Vring) {
        {
            let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
            if control.is_none() {
                *control = Some(vring.clone());
            }
        }
        let epoch = self.gate.epoch();
        if self.gate.is_paused() {
            return;
        }
        if self.resumes[usize::from(CONTROL_QUEUE)].swap(false, Ordering::SeqCst) {
            self.resume(vring, epoch);
        }
        // A queue that has requests, and gives none of them away, is broken or has just been stopped.
        let mut fruitless = 0;
        loop {
            fruitless += 1;
            let _ = vring.disable_notification();
            while let Some(fetched) = self.fetch(vring, epoch) {
                fruitless = 0;
                self.start_job(fetched, epoch);
            }
            match vring.enable_notification() {
                Ok(true) if fruitless < 2 => {}
                Ok(true) => return self.limit.warn(&self.who, "the request queue cannot be read"),
                Ok(false) => return,
                Err(e) => return self.limit.warn(&self.who, &format!("request queue: {e}")),
            }
        }
    }

    /// Copies the next request out of guest memory, once, and checks it.
    fn fetch(&self, vring: &Vring, epoch: u64) -> Option<Fetched> {
        let _inside = self.gate.try_enter(epoch)?;
        let memory = self.guest.memory();
        let chain = vring.get_mut().get_queue_mut().pop_descriptor_chain(memory.clone())?;
        let head = chain.head_index();
        self.requests.taken(head);
        let place = |d: Descriptor| (d.addr(), d.len() as usize);
        let request: Vec<Piece> = chain.clone().readable().map(place).collect();
        let answer: Vec<Piece> = chain.writable().map(place).collect();
        let mut bytes = 0;
        let order = self.check(&memory, &request, &mut bytes);
        Some(Fetched { head, again: false, answer, order, bytes })
    }

    /// Copies a request that a predecessor had taken, and not answered, out of guest memory.
    fn fetch_again(&self, memory: &GuestMemoryMmap, table: u64, size: u16, head: u16) -> Fetched {
        let chain = recovery::chain(memory, table, size, head);
        let (answer, request): (Vec<_>, Vec<_>) = chain.into_iter().partition(|d| d.is_write_only());
        let place = |d: Descriptor| (d.addr(), d.len() as usize);
        let request: Vec<Piece> = request.into_iter().map(place).collect();
        let answer = answer.into_iter().map(place).collect();
        let mut bytes = 0;
        let order = self.check(memory, &request, &mut bytes);
        Fetched { head, again: true, answer, order, bytes }
    }

    /// Goes on where a predecessor ended: with its sessions, where that is possible, and with its requests, which are executed again.
    fn resume(&self, vring: &Vring, epoch: u64) {
        let Some(inside) = self.gate.try_enter(epoch) else {
            // When the guest runs again.
            self.resumes[usize::from(CONTROL_QUEUE)].store(true, Ordering::SeqCst);
            return;
        };
        let Some(Predecessor { how, stored }) =
            self.predecessor.lock().unwrap_or_else(PoisonError::into_inner).take()
        else {
            return;
        };
        let (heads, table, size) = {
            let mut vring = vring.get_mut();
            let queue = vring.get_queue_mut();
            // Each buffer that was taken is either in the used ring or in progress.
            let heads = self.requests.recover(queue.next_used());
            queue.set_next_avail(queue.next_used().wrapping_add(heads.len() as u16));
            (heads, queue.desc_table(), queue.size())
        };
        let memory = self.guest.memory();
        let fetched: Vec<Fetched> =
            heads.into_iter().map(|head| self.fetch_again(&memory, table, size, head)).collect();
        let (mut created, mut destroyed) = (HashSet::new(), HashSet::new());
        for fetched in &fetched {
            match &fetched.order {
                Ok(Order::Create { channel, .. }) => drop(created.insert(*channel)),
                Ok(Order::Destroy { channel }) => drop(destroyed.insert(*channel)),
                _ => {}
            }
        }
        let reason = format!(
            "the process of vhost-rgpu that served this guest {how}; another one serves the guest now: start the program again"
        );
        let (mut kept, mut lost) = (0, 0);
        for (channel, stored) in stored {
            let leftover = match Leftover::new(stored, self.config.servers.all()) {
                Ok(leftover) => leftover,
                Err(e) => {
                    tracing::error!("{}: channel {channel} of the predecessor: {e}", self.who);
                    continue;
                }
            };
            if created.contains(&channel) {
                leftover.end();
                self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).insert(channel, leftover);
                continue;
            }
            let ends = destroyed.contains(&channel);
            if let (Some(saved), false) = (&leftover.saved, ends) {
                match self.resume_session(channel, &leftover, saved) {
                    Ok(()) => {
                        kept += 1;
                        continue;
                    }
                    Err(Refusal(_, why)) => {
                        tracing::warn!("{}: channel {channel} of the predecessor: {why}", self.who);
                    }
                }
            }
            leftover.end();
            self.tell_lost(channel, &leftover.extents, &reason);
            self.channels().insert(channel, Channel::Left(Arc::new(leftover)));
            lost += u64::from(!ends);
        }
        drop(inside);
        self.registry.totals.lost.fetch_add(lost, Ordering::Relaxed);
        tracing::warn!(
            "{}: {kept} sessions go on, {lost} are lost, {} requests are executed again",
            self.who,
            fetched.len()
        );
        fetched.into_iter().for_each(|fetched| self.start_job(fetched, epoch));
    }

    /// Goes on with the session of a predecessor's channel.
    fn resume_session(&self, channel: u32, leftover: &Leftover, saved: &Saved) -> Result<(), Refusal> {
        let extents = &leftover.extents[..];
        let size = extents.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len));
        let memories = self.memories();
        let mappings = self.budget.channel(memories.resolve(extents, size)?.all().len())?;
        let memory = ChannelMemory::new(memories, extents.to_vec(), size)?;
        let (wakeup, lost) = self.listeners(channel);
        let session = Session::resume(&leftover.server, saved, memory, None, wakeup, lost)
            .map_err(|e| no_resources(format!("its session cannot go on: {e}")))?;
        let session = Arc::new(session);
        let listed = self.registry.list_resumed(&self.who, channel.into(), session.clone());
        let held = Held { _listed: listed, _mappings: mappings, pieces: HashMap::new() };
        self.channels().insert(channel, Channel::Open(session.clone(), held));
        // The predecessor may have taken a doorbell, or been told to wake the guest, and ended before it did.
        session.doorbell();
        self.events.wake(channel);
        Ok(())
    }

    /// How a session wakes the guest's threads, and what is done when it is lost.
    fn listeners(&self, channel: u32) -> (Wakeup, Lost) {
        let (events, registry, who) = (self.events.clone(), self.registry.clone(), self.who.clone());
        let lost = move |reason: &str| {
            registry.totals.lost.fetch_add(1, Ordering::Relaxed);
            tracing::warn!("{who}: channel {channel}: {reason}");
        };
        (Wakeup::Call(Arc::new(move || events.wake(channel))), Box::new(lost))
    }

    /// Tells the program that has this channel that its session is over.
    fn tell_lost(&self, channel: u32, extents: &[Extent], reason: &str) {
        let size = extents.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len));
        match self.memories().view(extents, size) {
            Ok(view) => {
                view.header().raise_alive();
                tell_lost(&view, reason, |_| {});
                self.events.wake(channel);
            }
            // The guest has changed what it had put there.
            Err(e) => self.limit.warn(&self.who, &format!("channel {channel} of the predecessor: {e}")),
        }
    }

    fn check(
        &self,
        memory: &GuestMemoryMmap,
        request: &[Piece],
        bytes: &mut usize,
    ) -> Result<Order, Refusal> {
        let total: usize = request.iter().map(|(_, len)| len).sum();
        let mut fixed = [0; FIXED];
        copy_out(memory, request, 0, &mut fixed)?;
        let size = control::extents_size(&fixed, &self.config.limits)?;
        if total != FIXED + size {
            return Err(invalid(format!(
                "a request of {total} bytes, but its header announced {}",
                FIXED + size
            )));
        }
        if self.job_bytes.fetch_add(size, Ordering::Relaxed) + size > MAX_JOB_BYTES {
            self.job_bytes.fetch_sub(size, Ordering::Relaxed);
            return Err(no_resources("too many large requests at the same time"));
        }
        *bytes = size;
        let mut extents = vec![0; size];
        copy_out(memory, request, FIXED, &mut extents)?;
        control::parse(&fixed, &extents, &self.config.limits)
    }

    fn start_job(&self, fetched: Fetched, epoch: u64) {
        let Fetched { head, again, answer, order, bytes } = fetched;
        let order = match order {
            Ok(order) if self.jobs.fetch_add(1, Ordering::Relaxed) < MAX_JOBS => order,
            refused => {
                if refused.is_ok() {
                    self.jobs.fetch_sub(1, Ordering::Relaxed);
                }
                self.job_bytes.fetch_sub(bytes, Ordering::Relaxed);
                let busy = || no_resources(format!("{MAX_JOBS} requests are in progress"));
                return self.refuse(epoch, head, answer, refused.err().unwrap_or_else(busy));
            }
        };
        let Some(device) = self.me.upgrade() else { return };
        let pieces = answer.clone();
        let spawned = std::thread::Builder::new().name("request".to_owned()).spawn(move || {
            let mut job = Job { device: &device, epoch, head, again, pieces, bytes, answered: false };
            let result = device.execute(order, &mut job);
            job.answer(result);
        });
        if let Err(e) = spawned {
            self.jobs.fetch_sub(1, Ordering::Relaxed);
            self.job_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.refuse(epoch, head, answer, no_resources(format!("the host is short of threads: {e}")));
        }
    }

    /// Refuses a request in the thread of the queue, or if the guest was just stopped in another one.
    fn refuse(&self, epoch: u64, head: u16, answer: Vec<Piece>, refusal: Refusal) {
        if let Some(inside) = self.gate.try_enter(epoch) {
            return self.answer_inside(&inside, head, &answer, Err(refusal));
        }
        let Some(device) = self.me.upgrade() else { return };
        let later = move || device.answer(epoch, head, &answer, Err(refusal));
        if let Err(e) = std::thread::Builder::new().name("refusal".to_owned()).spawn(later) {
            tracing::error!("{}: a request stays without an answer: {e}", self.who);
        }
    }

    /// Answers a request once the guest runs, unless the device was reset since it came.
    fn answer(&self, epoch: u64, head: u16, pieces: &[Piece], result: Result<(), Refusal>) {
        if let Some(inside) = self.gate.enter(epoch) {
            self.answer_inside(&inside, head, pieces, result);
        }
    }

    fn answer_inside(&self, _inside: &Inside<'_>, head: u16, pieces: &[Piece], result: Result<(), Refusal>) {
        let response = match result {
            Ok(()) => Response::new(Answer::Ok, ""),
            Err(Refusal(answer, reason)) => {
                if answer == Answer::Invalid {
                    self.registry.totals.malformed.fetch_add(1, Ordering::Relaxed);
                }
                self.limit.warn(&self.who, &reason);
                Response::new(answer, &reason)
            }
        };
        let Some(vring) = self.control.lock().unwrap_or_else(PoisonError::into_inner).clone() else { return };
        let memory = self.guest.memory();
        let mut rest = response.as_bytes();
        for (at, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(*len));
            if let Err(e) = memory.write_slice(now, *at) {
                self.limit.warn(&self.who, &format!("answering a request: {e}"));
                break;
            }
            rest = later;
        }
        if !rest.is_empty() {
            self.limit.warn(&self.who, "a request has no room for its answer");
        }
        let written = (response.as_bytes().len() - rest.len()) as u32;
        let added = {
            let mut vring = vring.get_mut();
            self.requests.answering(head);
            let added = vring.add_used(head, written);
            self.requests.answered(head, vring.get_queue().next_used());
            added
        };
        let given = added.map_err(|e| e.to_string()).and_then(|()| {
            if vring.needs_notification().unwrap_or(true) {
                vring.signal_used_queue().map_err(|e| e.to_string())
            } else {
                Ok(())
            }
        });
        if let Err(e) = given {
            self.limit.warn(&self.who, &format!("answering a request: {e}"));
        }
    }

    fn execute(&self, order: Order, job: &mut Job<'_>) -> Result<(), Refusal> {
        match order {
            Order::Create { channel, extents, size } => self.create(channel, extents, size, job),
            Order::Destroy { channel } => self.destroy(channel, job.epoch),
            Order::Register { channel, region, extents, size, read_only } => {
                let session = self.session(channel)?;
                self.inherit(channel, &session);
                if job.again && session.has_region(region) {
                    // The predecessor had registered it, and not said so.
                    self.unregister(channel, region, &session)?;
                }
                let memories = self.memories();
                // A transport may pass extents on unchecked, so they are checked here.
                let pieces = memories.resolve(&extents, size)?.all().len();
                let charge = self.budget.region(pieces)?;
                let memory = RegionMemory { memories, extents, size, own_memory: false, read_only };
                session.register_region(region, memory)?;
                if let Some(Channel::Open(_, held)) = self.channels().get_mut(&channel) {
                    held.pieces.insert(region, charge);
                }
                Ok(())
            }
            Order::Unregister { channel, region } => {
                let leftover = match self.channels().get(&channel) {
                    Some(Channel::Left(leftover)) => Some(leftover.clone()),
                    _ => None,
                };
                match leftover {
                    Some(leftover) => {
                        self.wait_for_release(channel, &leftover, job.epoch);
                        Ok(())
                    }
                    None => {
                        let session = self.session(channel)?;
                        self.inherit(channel, &session);
                        if job.again && !session.has_region(region) {
                            // The predecessor had unregistered it, and not said so.
                            return Ok(());
                        }
                        self.unregister(channel, region, &session)
                    }
                }
            }
        }
    }

    fn unregister(&self, channel: u32, region: u32, session: &Session) -> Result<(), Refusal> {
        session.unregister_region(region)?;
        if let Some(Channel::Open(_, held)) = self.channels().get_mut(&channel) {
            held.pieces.remove(&region);
        }
        Ok(())
    }

    /// Counts the regions that a session has from a predecessor, before one is added or removed.
    fn inherit(&self, channel: u32, session: &Session) {
        session.wait_for_regions();
        if let Some(Channel::Open(_, held)) = self.channels().get_mut(&channel) {
            for inherited in session.take_inherited() {
                let charge = self.budget.inherited_region(inherited.pieces as usize);
                held.pieces.insert(inherited.region, charge);
            }
        }
    }

    fn memories(&self) -> Memories {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn session(&self, channel: u32) -> Result<Arc<Session>, Refusal> {
        match self.channels().get(&channel) {
            Some(Channel::Open(session, _)) => Ok(session.clone()),
            Some(
                Channel::Opening
                | Channel::Waiting(_)
                | Channel::Over
                | Channel::Closing(_)
                | Channel::Left(_),
            ) => Err(invalid(format!("channel {channel} is not open"))),
            None => Err(invalid(format!("channel {channel} does not exist"))),
        }
    }

    /// Waits until no worker has the memory of a predecessor's channel mapped, or until the device is reset.
    fn wait_for_release(&self, channel: u32, leftover: &Leftover, epoch: u64) {
        let since = Instant::now();
        while leftover.close(PATIENCE) == Closed::StillHeld && !self.epoch_changed(epoch) {
            let seconds = since.elapsed().as_secs();
            tracing::error!(
                "{}: channel {channel}: after {seconds} s the server still holds its memory",
                self.who
            );
        }
    }

    fn create(
        &self,
        channel: u32,
        extents: Vec<Extent>,
        size: u64,
        job: &mut Job<'_>,
    ) -> Result<(), Refusal> {
        let epoch = job.epoch;
        let before = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).remove(&channel);
        if let Some(leftover) = before {
            self.wait_for_release(channel, &leftover, epoch);
        }
        {
            let inside = self.gate.enter(epoch);
            let mut channels = self.channels();
            if channels.contains_key(&channel) {
                return Err(invalid(format!("channel {channel} exists already")));
            }
            if inside.is_some() {
                channels.insert(channel, Channel::Opening);
            }
        }
        let result = self.open_in(channel, extents, size, job);
        let inside = self.gate.enter(epoch);
        if let (Some(_), Err(Refusal(answer, _))) = (&inside, &result) {
            let mut channels = self.channels();
            match channels.get(&channel) {
                // The guest was told that the channel exists, so the guest must destroy it.
                Some(Channel::Waiting(_)) => drop(channels.insert(channel, Channel::Over)),
                _ => drop(channels.remove(&channel)),
            }
            self.store.forget(channel);
            self.registry.totals.refuse(*answer);
        }
        drop(inside);
        self.settled.notify_all();
        result
    }

    fn open_in(
        &self,
        channel: u32,
        extents: Vec<Extent>,
        size: u64,
        job: &mut Job<'_>,
    ) -> Result<(), Refusal> {
        let memories = self.memories();
        let mappings = self.budget.channel(memories.resolve(&extents, size)?.all().len())?;
        self.open(channel, ChannelMemory::new(memories, extents, size)?, mappings, job)
    }

    fn open(
        &self,
        channel: u32,
        memory: ChannelMemory,
        mappings: Charge,
        job: &mut Job<'_>,
    ) -> Result<(), Refusal> {
        let epoch = job.epoch;
        if !memory.asked_server.is_empty() {
            return Err(invalid("a guest cannot name servers; its host chooses them"));
        }
        let (server, config) = self.config.servers.choose(&memory)?;
        let unknown = |e: io::Error| no_resources(format!("this host cannot remember the channel: {e}"));
        self.remember(epoch, channel, Known::new(server, &memory.extents, None).map_err(unknown)?)?;
        let give_up = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| no_resources(format!("this host is short of descriptors: {e}")))?;
        let mut turn = Queued { device: self, channel, memory: &memory, give_up: Arc::new(give_up), job };
        let mut prepared = Prepared::connect(&config, &memory, &mut turn)
            .inspect_err(|e| turn.refused_after_waiting(&e.to_string()))?;
        let saved = prepared.save(&memory).map_err(unknown)?;
        let known = Known::new(server, &memory.extents, saved.as_ref()).map_err(unknown)?;
        self.remember(epoch, channel, known)?;
        drop(saved);
        let opened = prepared.open().inspect_err(|e| turn.refused_after_waiting(&e.to_string()))?;
        let _inside = self.inside(epoch)?;
        let (wakeup, lost) = self.listeners(channel);
        let session = Arc::new(opened.start(memory, wakeup, lost)?);
        let listed = self.registry.list(&self.who, channel.into(), session.clone());
        let held = Held { _listed: listed, _mappings: mappings, pieces: HashMap::new() };
        self.channels().insert(channel, Channel::Open(session, held));
        Ok(())
    }

    fn inside(&self, epoch: u64) -> Result<Inside<'_>, Refusal> {
        self.gate.enter(epoch).ok_or_else(|| invalid("the device was reset"))
    }

    /// Remembers a channel for a successor, unless the device was reset: what a reset has ended must not be found again.
    fn remember(&self, epoch: u64, channel: u32, known: Known) -> Result<(), Refusal> {
        let _inside = self.inside(epoch)?;
        self.store
            .remember(channel, known)
            .map_err(|e| no_resources(format!("this host cannot remember the channel: {e}")))
    }

    fn destroy(&self, channel: u32, epoch: u64) -> Result<(), Refusal> {
        let session = {
            let mut channels = self.channels();
            loop {
                match channels.get(&channel) {
                    Some(Channel::Over) => {
                        channels.remove(&channel);
                        return Ok(());
                    }
                    Some(waits @ (Channel::Opening | Channel::Waiting(_) | Channel::Closing(_))) => {
                        if let Channel::Waiting(give_up) = waits {
                            // Writing fails only when the counter is at its maximum. Then the eventfd is readable, too.
                            let _ = give_up.write(1);
                        }
                        channels = self.settled.wait(channels).unwrap_or_else(PoisonError::into_inner);
                    }
                    Some(Channel::Left(leftover)) => {
                        let leftover = leftover.clone();
                        drop(channels);
                        self.wait_for_release(channel, &leftover, epoch);
                        if let Some(_inside) = self.gate.enter(epoch) {
                            self.channels().remove(&channel);
                            self.store.forget(channel);
                        }
                        return Ok(());
                    }
                    Some(Channel::Open(session, _)) => break session.clone(),
                    None => return Err(invalid(format!("channel {channel} does not exist"))),
                }
                if self.epoch_changed(epoch) {
                    return Err(invalid("the device was reset"));
                }
            }
        };
        // Two requests to destroy the channel may race: only the one that finds the same session open continues.
        let held = {
            let mut channels = self.channels();
            match channels.get(&channel) {
                Some(Channel::Open(now, _)) if Arc::ptr_eq(now, &session) => {
                    channels.insert(channel, Channel::Closing(session.clone()))
                }
                _ => return Err(invalid(format!("channel {channel} is being destroyed already"))),
            }
        };
        self.count_end(&session);
        let since = Instant::now();
        while session.close("the program has ended its session", PATIENCE) == Closed::StillHeld {
            let seconds = since.elapsed().as_secs();
            tracing::error!(
                "{}: channel {channel}: after {seconds} s the server still holds its memory",
                self.who
            );
            if self.epoch_changed(epoch) {
                return Ok(());
            }
        }
        drop(held);
        if let Some(_inside) = self.gate.enter(epoch) {
            self.channels().remove(&channel);
            self.store.forget(channel);
        }
        self.settled.notify_all();
        Ok(())
    }

    /// Whether the device was reset since.
    fn epoch_changed(&self, epoch: u64) -> bool {
        self.gate.epoch() != epoch
    }
}

/// A request in progress, with what is needed to answer it.
struct Job<'d> {
    device: &'d Device,
    epoch: u64,
    head: u16,
    again: bool,
    pieces: Vec<Piece>,
    bytes: usize,
    answered: bool,
}

impl Job<'_> {
    /// Answers the request, unless it has been answered, and stops counting it.
    fn answer(&mut self, result: Result<(), Refusal>) {
        if std::mem::replace(&mut self.answered, true) {
            if let Err(Refusal(_, why)) = result {
                self.device.limit.warn(&self.device.who, &why);
            }
            return;
        }
        self.device.job_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.device.jobs.fetch_sub(1, Ordering::Relaxed);
        self.device.answer(self.epoch, self.head, &self.pieces, result);
    }
}

/// A channel whose session waits in a server's queue. The guest's request is answered at once, so that its driver can destroy the channel meanwhile. The channel's header holds the
/// position in the queue.
struct Queued<'a, 'd> {
    device: &'a Device,
    channel: u32,
    memory: &'a ChannelMemory,
    give_up: Arc<EventFd>,
    job: &'a mut Job<'d>,
}

impl Queued<'_, '_> {
    /// Writes to the channel's memory once the guest runs, unless the device was reset.
    fn tell(&self, tell: impl FnOnce(&ChannelMemory)) {
        if let Some(_inside) = self.device.gate.enter(self.job.epoch) {
            tell(self.memory);
        }
    }

    fn refused_after_waiting(&self, why: &str) {
        if self.job.answered {
            self.tell(|memory| memory.tell_refused(why));
            self.device.events.wake(self.channel);
        }
    }
}

impl Turn for Queued<'_, '_> {
    fn wait(&mut self, server: &str, ahead: u32) {
        // A guest that is stopped is told when it goes on.
        if !self.memory.may_wait() || self.device.gate.is_paused() {
            return;
        }
        self.tell(|memory| {
            memory.tell_waiting(server, ahead);
            // While it waits, the guest expects this counter to rise.
            memory.view.header().raise_alive();
            if !self.job.answered {
                let waiting = Channel::Waiting(self.give_up.clone());
                self.device.channels().insert(self.channel, waiting);
            }
        });
        self.job.answer(Ok(()));
    }

    fn given_up(&self) -> Option<PollFd<'_>> {
        Some(PollFd::new(self.give_up.as_fd(), PollFlags::POLLIN))
    }
}

/// Copies `buf.len()` bytes out of the concatenated pieces, starting at `skip`.
fn copy_out(
    memory: &GuestMemoryMmap,
    pieces: &[Piece],
    mut skip: usize,
    buf: &mut [u8],
) -> Result<(), Refusal> {
    let mut at = 0;
    for (address, len) in pieces {
        if skip >= *len {
            skip -= len;
            continue;
        }
        let n = (len - skip).min(buf.len() - at);
        let outside =
            || invalid(format!("a descriptor of {len} bytes at {:#x} is outside guest memory", address.0));
        let from = address.0.checked_add(skip as u64).map(GuestAddress).ok_or_else(outside)?;
        memory.read_slice(&mut buf[at..at + n], from).map_err(|_| outside())?;
        at += n;
        skip = 0;
        if at == buf.len() {
            break;
        }
    }
    if at < buf.len() {
        return Err(invalid(format!("the request ends {} bytes too early", buf.len() - at)));
    }
    Ok(())
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        QUEUE_COUNT
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        VERSION_1 | RING_FEATURES | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn reset_device(&self) {
        self.end_all("the guest has reset the device");
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let limits = &self.config.limits;
        let config = Config {
            magic: CONFIG_MAGIC,
            version: DEVICE_VERSION,
            max_channels: limits.max_channels,
            max_extents: limits.max_extents,
            max_channel_size: limits.max_channel_size,
            max_registered: limits.max_registered,
            reserved: [0; 32],
        };
        // The answer must have exactly `size` bytes, or else the message to the VMM is malformed.
        let bytes = config.as_bytes().iter().copied().skip(offset as usize).chain(std::iter::repeat(0));
        bytes.take(size as usize).collect()
    }

    fn update_memory(&self, memory: GuestMemory) -> io::Result<()> {
        let guest = memory.memory();
        let mut files = Vec::with_capacity(guest.num_regions());
        for region in guest.iter() {
            let at = region.start_addr().0;
            let Some(file) = region.file_offset() else {
                return Err(io::Error::other(format!(
                    "guest memory at {at:#x} is not backed by a file: configure the VMM to share it"
                )));
            };
            let memory = Memory { addr: at, size: region.len(), file_offset: file.start() };
            files.push((memory, OwnedFd::from(file.file().try_clone()?)));
        }
        let memories = Memories::map(files).map_err(io::Error::other)?;
        // Running sessions keep the memory that they were given.
        *self.memories.lock().unwrap_or_else(PoisonError::into_inner) = memories;
        Ok(())
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        THREADS.to_vec()
    }

    fn exit_event(&self, thread_index: usize) -> Option<(EventConsumer, EventNotifier)> {
        let exit = self.exit.get(thread_index)?;
        let notifier = exit.as_raw_fd();
        // SAFETY: a plain system call that duplicates a descriptor of this device.
        let notifier = unsafe { libc::fcntl(notifier, libc::F_DUPFD_CLOEXEC, 0) };
        if notifier < 0 {
            return None;
        }
        // SAFETY: vhost-user-backend uses the consumer's raw number for epoll and never closes it, so `self.exit` remains the only owner that closes the descriptor. (It would never close
        // a duplicate either, which would leak with every connection.) The workers hold the device, so the descriptor stays open while they use it.
        let consumer = unsafe { EventConsumer::from_raw_fd(exit.as_raw_fd()) };
        // SAFETY: the descriptor was duplicated above and nothing else owns it.
        Some((consumer, unsafe { EventNotifier::from_raw_fd(notifier) }))
    }

    fn stop_vring(&self, queue_index: u32) -> io::Result<()> {
        // One queue after the other. The control queue is the first.
        match u16::try_from(queue_index) {
            Ok(CONTROL_QUEUE) => self.pause(),
            Ok(EVENT_QUEUE) => self.events.stop(),
            _ => {}
        }
        Ok(())
    }

    fn handle_event(&self, event: u16, _set: EventSet, vrings: &[Vring], thread: usize) -> io::Result<()> {
        // `event` is the queue's index among those of its thread.
        match (thread, event, vrings.get(usize::from(event))) {
            (0, 0, Some(vring)) => {
                self.go_on(vring);
                self.take_requests(vring);
            }
            (0, 1, Some(vring)) => {
                if self.resumes[usize::from(EVENT_QUEUE)].swap(false, Ordering::SeqCst) {
                    // Each buffer is returned as soon as it is taken. One that was not is taken again.
                    let mut vring = vring.get_mut();
                    let queue = vring.get_queue_mut();
                    queue.set_next_avail(queue.next_used());
                }
                self.events.buffers(vring);
            }
            (1, 0, _) => self.ring(),
            _ => tracing::warn!("{}: unknown event {event} in thread {thread}", self.who),
        }
        Ok(())
    }
}
