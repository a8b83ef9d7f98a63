//! The device that a guest sees: its state, and how it pauses, continues and is reset.
//!
//! In reading order: [`vhost_user`] talks to the VMM, [`requests`] takes the guest's requests from their
//! queue and answers them, [`channels`] executes them, and [`predecessor`] continues what another process has
//! left.
//!
//! Five rules:
//! - The virtqueue threads never block. A separate thread executes each request (at most
//!   [`MAX_JOBS`](requests::MAX_JOBS) at a time) and answers it when it is done; answers come in any order.
//! - A job touches guest memory (to answer, or to start a session) only [inside](Gate::enter) the gate: while
//!   the guest runs, and if the device has not been reset since the request arrived.
//! - A VMM stops the control queue with the same messages when the guest is stopped and when the device is
//!   reset. So in both cases everything [pauses](Device::pause), because the guest's memory may already be
//!   used for something else. The keeper finds out which it was, and reports a reset.
//! - What a successor of this process must know is stored before anything depends on it: a request before it
//!   is looked at, a channel before anybody else touches its memory.
//! - Nothing that a guest sends ends a thread or the device.

mod channels;
mod predecessor;
mod requests;
mod vhost_user;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use host_bridge::bridge::{Closed, Session, Wakeup};
use host_bridge::log_limit::LogLimit;
use host_bridge::memory::Memories;
use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::device::{CONTROL_QUEUE, DOORBELL_QUEUE, EVENT_QUEUE, QUEUE_COUNT};
use vhost_user_backend::VringT;
use virtio_queue::QueueT;

use super::budget::{Budget, Charge};
use super::events::Events;
use super::gate::Gate;
use super::queue::{GuestMemory, Vring};
use super::recovery::{Leftover, Requests, Store};
use crate::config::Vm;
use crate::refusal::{Refusal, no_resources};
use crate::registry::{Listed, Registry};
use requests::Work;

pub use predecessor::Predecessor;

/// How long the server may hold a destroyed channel's memory before this is logged. The message is repeated
/// at the same interval.
const PATIENCE: Duration = Duration::from_secs(10);
/// Queues of each thread: one serves `controlq` and `eventq`, the other `doorbellq`, so that a doorbell never
/// waits behind a request.
const THREADS: [u64; 2] = [1 << CONTROL_QUEUE | 1 << EVENT_QUEUE, 1 << DOORBELL_QUEUE];

/// A channel of the guest.
enum Channel {
    /// A job is opening it.
    Opening(GiveUp),
    /// The same, and its session waits in a server's queue, which the guest knows.
    Waiting(GiveUp),
    /// Its session was refused after the guest was told to wait. Nothing touches its memory.
    Over,
    /// Its session is over because the device process that served it has ended. A worker may still have its
    /// memory mapped.
    Left(Arc<Leftover>),
    /// A job waits until the server has released its memory.
    Closing(Arc<Session>),
    Open(Arc<Session>, Held),
}

/// What an open channel holds until nothing touches its memory any more.
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

    /// Ends whatever session there is, and waits up to `patience` until nothing touches the channel's memory.
    fn close(&self, reason: &str, patience: Duration) -> Closed {
        match self {
            Channel::Open(session, _) | Channel::Closing(session) => session.close(reason, patience),
            Channel::Left(leftover) => leftover.close(patience),
            Channel::Opening(_) | Channel::Waiting(_) | Channel::Over => Closed::Released,
        }
    }
}

/// Makes the job give up that opens a channel: an eventfd that the job watches while it waits for a server.
#[derive(Clone)]
struct GiveUp(Arc<EventFd>);

impl GiveUp {
    fn new() -> Result<GiveUp, Refusal> {
        EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map(|eventfd| GiveUp(Arc::new(eventfd)))
            .map_err(|e| no_resources(format!("this host is short of descriptors: {e}")))
    }

    fn now(&self) {
        // Writing fails only if the counter is at its maximum. The eventfd is then readable, too.
        let _ = self.0.write(1);
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
    /// Held while the device pauses, continues, or is reset.
    changing: Mutex<()>,
    /// The request queue, while it runs.
    control: Mutex<Option<Vring>>,
    jobs: AtomicUsize,
    job_bytes: AtomicUsize,
    /// Requests that wait for a thread, and what wakes the one that is always there for them.
    deferred: Mutex<VecDeque<Work>>,
    reserve: mpsc::Sender<()>,
    limit: LogLimit,
    /// The same for sessions that end, which a guest can begin as often as it likes.
    endings: Arc<LogLimit>,
    /// The same for stops of the guest, and for when it goes on: it may reset the device again and again.
    stops: LogLimit,
    who: String,
    exit: [EventFd; THREADS.len()],
    store: Store,
    requests: Requests,
    budget: Budget,
    /// What a predecessor has left, until the request queue runs.
    predecessor: Mutex<Option<Predecessor>>,
    /// A predecessor's channels whose creation was not answered yet, until nobody holds their memory. The
    /// request is executed again.
    unanswered: Mutex<HashMap<u32, Arc<Leftover>>>,
    /// By queue index: whether the next buffer must be derived from the used ring, because a predecessor has
    /// taken some.
    resumes: [AtomicBool; QUEUE_COUNT],
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
        let (reserve, deferred) = mpsc::channel();
        let device = Arc::new_cyclic(|me| Device {
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
            deferred: Mutex::default(),
            reserve,
            limit: LogLimit::default(),
            endings: Arc::new(LogLimit::new(200)),
            stops: LogLimit::new(20),
            who,
            exit,
            store,
            requests,
            resumes: std::array::from_fn(|_| AtomicBool::new(predecessor.is_some())),
            predecessor: Mutex::new(predecessor),
            unanswered: Mutex::default(),
        });
        let me = Arc::downgrade(&device);
        std::thread::Builder::new().name("deferred".to_owned()).spawn(move || {
            while deferred.recv().is_ok()
                && let Some(device) = me.upgrade()
            {
                device.run_deferred();
            }
        })?;
        Ok(device)
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<u32, Channel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<u32, Arc<Leftover>>> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest is stopped, or was reset. When this returns, nothing touches its memory until
    /// [`go_on`](Self::go_on). Sessions are kept meanwhile; one that cannot pause ends.
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
                Channel::Opening(_) | Channel::Waiting(_) | Channel::Over => {}
            }
        }
        ending.extend(self.unanswered().values().cloned().map(Channel::Left));
        // All sessions are told first, so that they pause at the same time.
        open.iter().for_each(|(_, session)| session.pause());
        let deadline = Instant::now() + PATIENCE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let unable: Vec<_> = open.iter().filter(|(_, session)| !session.is_paused(left())).collect();
        let mut count = open.len() - unable.len();
        for (id, session) in &unable {
            let transport = session.transport();
            let reason = "the guest was stopped, but work on the GPU kept using its memory";
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
        if let Some(not_shown) = self.stops.allow() {
            tracing::info!("{}: the guest does not run; {count} sessions are kept{not_shown}", self.who);
        }
    }

    /// The control queue has an event. If it had stopped, the guest now continues.
    fn go_on(&self, vring: &Vring) {
        let _one = self.changing();
        // In this order: a queue that is ready after the pause was seen has started again.
        if !self.gate.is_paused() || !vring.get_ref().get_queue().ready() {
            return;
        }
        self.gate.go_on();
        let sessions: Vec<_> = self.channels().values().filter_map(Channel::session).collect();
        if let Some(not_shown) = self.stops.allow() {
            let count = sessions.len();
            tracing::info!("{}: the guest runs again; {count} sessions continue{not_shown}", self.who);
        }
        sessions.iter().for_each(|session| session.go_on());
    }

    /// Ends every session because the device is reset or its VMM is gone. Returns when the sessions have
    /// released guest memory.
    pub fn end_all(&self, reason: &str) {
        let _one = self.changing();
        let (ids, channels) = {
            // A job inside the gate is starting a session or answering. After this, no earlier job can enter.
            let paused = self.gate.reset();
            self.resumes.iter().for_each(|resumes| resumes.store(false, Ordering::SeqCst));
            *self.control.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.events.reset();
            self.take_leftovers();
            let mut channels = self.channels();
            if paused {
                // It is unknown since when the guest's memory has been used for something else.
                channels.values().filter_map(Channel::session).for_each(|session| session.seal());
            }
            let ids: Vec<u32> = channels.keys().copied().collect();
            let ended = channels.drain().filter_map(|(_, channel)| match &channel {
                Channel::Open(..) | Channel::Closing(_) | Channel::Left(_) => Some(channel),
                Channel::Opening(give_up) | Channel::Waiting(give_up) => {
                    give_up.now();
                    None
                }
                Channel::Over => None,
            });
            (ids, ended.collect::<Vec<_>>())
        };
        self.settled.notify_all();
        if !channels.is_empty()
            && let Some(not_shown) = self.endings.allow()
        {
            tracing::info!("{}: ending {} sessions: {reason}{not_shown}", self.who, channels.len());
        }
        // All sessions are told first, so that they end at the same time.
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

    /// Counts a session that is about to be closed on request. A lost session has already been counted.
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

    /// How a session wakes the guest's threads, and what happens when it is lost.
    fn listeners(&self, channel: u32) -> (Wakeup, Lost) {
        let (events, registry, who) = (self.events.clone(), self.registry.clone(), self.who.clone());
        let endings = Arc::clone(&self.endings);
        let lost = move |reason: &str| {
            registry.totals.lost.fetch_add(1, Ordering::Relaxed);
            endings.warn(&who, &format!("channel {channel}: {reason}"));
        };
        (Wakeup::Call(Arc::new(move || events.wake(channel))), Box::new(lost))
    }

    fn memories(&self) -> Memories {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether nothing is left of what the guest had.
    #[cfg(any(test, fuzzing))]
    pub fn is_empty(&self) -> bool {
        let count = |of: &AtomicUsize| of.load(Ordering::SeqCst);
        self.channels().is_empty()
            && count(&self.jobs) + count(&self.job_bytes) == 0
            && self.budget.is_unused()
    }

    /// Whether nothing that the guest has asked for is under way, or nothing of it ends because the guest is
    /// stopped.
    #[cfg(any(test, fuzzing))]
    pub fn is_settled(&self) -> bool {
        self.gate.is_paused() || self.jobs.load(Ordering::SeqCst) == 0
    }

    /// What is left, in words.
    #[cfg(any(test, fuzzing))]
    pub fn leftovers(&self) -> String {
        let channels: Vec<u32> = self.channels().keys().copied().collect();
        format!("channels {channels:?}, {:?} jobs, {:?} bytes, {:?}", self.jobs, self.job_bytes, self.budget)
    }

    /// Whether the device was reset since.
    fn epoch_changed(&self, epoch: u64) -> bool {
        self.gate.epoch() != epoch
    }
}
