//! A session as a daemon holds it: connect, doorbell, regions, close.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::PollFd;
use nix::sys::eventfd::EventFd;
use protocol::channel::{Header, State};
use protocol::version::OURS;

use super::attempts::Attempts;
use super::config::{SessionConfig, TransportKind};
use super::counters::Counters;
use super::error::{ConnectError, RegionError};
use super::link::LinkState;
use super::local::{self, Local};
use super::saved::{About, InheritedRegion, Kind, Saved, duplicate};
use super::state::{ChannelMemory, SESSION_LINES, SessionState, Wakeup};
use super::transport::{Closed, RegionMemory, Transport};
use super::welcome::{Handshake, Turn, printable};
use super::{tcp, verbs};
use crate::memory::Memories;

/// Waits its turn and tells nobody.
struct Patient;

impl Turn for Patient {
    fn wait(&mut self, _server: &str, _ahead: u32) {}

    fn given_up(&self) -> Option<PollFd<'_>> {
        None
    }
}

/// A server that has welcomed a session. Nothing else has been done for it yet, so it can be
/// [saved](Self::save); then it is [opened](Self::open) and [started](Opened::start).
#[derive(Debug)]
pub struct Prepared {
    config: SessionConfig,
    link: Link<tcp::links::Greeting>,
    handshake: Handshake,
}

/// A session with all of its connections, which has not begun: the channel's memory was not touched yet.
#[derive(Debug)]
pub struct Opened {
    config: SessionConfig,
    link: Link<tcp::links::Links>,
    handshake: Handshake,
}

#[derive(Debug)]
enum Link<T> {
    Tcp(Box<T>),
    Verbs(Box<verbs::links::Links>),
    Local(local::Link),
}

impl Prepared {
    /// Reaches the server and has it welcome a session for this channel. Blocks until that is done or has
    /// failed, which may be long after others were served; `turn` hears of it. If the server's daemon ends
    /// meanwhile, this connects with the next one, and waits there. Takes from the channel only its slots'
    /// number and what its header says of the client.
    pub fn connect(
        config: &SessionConfig,
        channel: &ChannelMemory,
        turn: &mut dyn Turn,
    ) -> Result<Prepared, ConnectError> {
        let mut attempts = Attempts::new(turn);
        loop {
            match Prepared::attempt(config, channel, &mut attempts) {
                Err(error) if attempts.again(config, &error)? => {}
                result => return result,
            }
        }
    }

    fn attempt(
        config: &SessionConfig,
        channel: &ChannelMemory,
        turn: &mut dyn Turn,
    ) -> Result<Prepared, ConnectError> {
        let (link, handshake) = match config.transport {
            TransportKind::Tcp => tcp::links::greet_server(config, channel, turn)
                .map(|(greeting, handshake)| (Link::Tcp(Box::new(greeting)), handshake))?,
            TransportKind::Verbs => verbs::links::connect(config, channel, turn)
                .map(|(links, handshake)| (Link::Verbs(Box::new(links)), handshake))?,
            TransportKind::Local => local::connect(config, channel, turn)
                .map(|(link, handshake)| (Link::Local(link), handshake))?,
        };
        Ok(Prepared { config: config.clone(), link, handshake })
    }

    /// What another process needs to go on with the session when this one has ended, or to end it. It must be
    /// kept by somebody before [`open`](Self::open), and forgotten when the session has been closed; a
    /// session that is not saved ends with this process. `None`: it ends with this process in any case, and
    /// nothing is to be done then.
    pub fn save(&mut self, channel: &ChannelMemory) -> io::Result<Option<Saved>> {
        let about = About::now(&self.handshake.server);
        Ok(match &mut self.link {
            Link::Tcp(greeting) => Some(Saved(Kind::Remote(Box::new(greeting.save(about)?)))),
            Link::Local(link) => Some(Saved(Kind::Local(link.save(&channel.doorbell, about)?))),
            Link::Verbs(links) => links.save(about)?.map(|saved| Saved(Kind::Remote(Box::new(saved)))),
        })
    }

    /// Opens the connections that the session needs besides. Waits for the control connection only.
    pub fn open(self) -> Result<Opened, ConnectError> {
        let Prepared { config, link, handshake } = self;
        let link = match link {
            Link::Tcp(greeting) => Link::Tcp(Box::new(greeting.open(&config)?)),
            Link::Verbs(links) => Link::Verbs(Box::new(links.open())),
            Link::Local(link) => Link::Local(link),
        };
        Ok(Opened { config, link, handshake })
    }
}

impl Opened {
    /// Begins the session. On success the channel's state is `READY`; on failure its memory is released
    /// before this returns. `channel` is the one that was given to [`Prepared::connect`].
    ///
    /// `wakeup` is how the client's threads are reached. `on_lost` is called once, with the reason, if the
    /// session ends against the caller's will, from one of the session's own threads: it must neither block
    /// nor call back into this session.
    pub fn start(
        self,
        channel: ChannelMemory,
        wakeup: Wakeup,
        on_lost: Box<dyn FnOnce(&str) + Send>,
    ) -> Result<Session, ConnectError> {
        let Opened { config, link, handshake } = self;
        let waited = channel.view.header().state() == State::Waiting;
        let speaks = OURS.at_most(handshake.version).at_most(channel.version);
        channel.view.header().set_session_version(speaks.version(), speaks.fingerprint());
        let session = Arc::new(SessionState::new(channel, config.server.to_string(), wakeup, on_lost));
        let transport: Box<dyn Transport> = match link {
            Link::Tcp(links) => tcp::start(&config, session.clone(), *links)?,
            Link::Verbs(links) => verbs::start(&config, session.clone(), *links)?,
            Link::Local(link) => Box::new(Local::start(&config, session.clone(), link)?),
        };
        if waited {
            session.waker().wake(Header::STATE_OFFSET);
        }
        if let Some(not_shown) = SESSION_LINES.allow() {
            tracing::info!(
                client = %config.client, program = %session.channel.program, pid = session.channel.pid, server = %config.server,
                server_name = %handshake.server, transport = %config.transport, principal = %handshake.principal, "session opened{not_shown}"
            );
        }
        Ok(Session {
            session,
            transport,
            regions: Mutex::default(),
            max_registered: config.max_registered,
            max_regions: config.max_regions,
            inherited: Mutex::default(),
            server_name: handshake.server,
            kind: config.transport,
            since: Instant::now(),
        })
    }
}

/// What is known of the regions that the session had under another process.
#[derive(Debug, Default)]
enum Inherited {
    /// There was no other process, or everything is known and was taken.
    #[default]
    Taken,
    /// The worker has not said yet.
    Awaited(Receiver<Vec<InheritedRegion>>),
    /// Nobody has asked yet.
    Known(Vec<InheritedRegion>),
}

/// One channel's connection to one server.
///
/// Dropping it closes it, which may block; a daemon calls [`close`](Self::close) first, at a place where
/// blocking is right.
#[derive(Debug)]
pub struct Session {
    session: Arc<SessionState>,
    transport: Box<dyn Transport>,
    /// Sizes of the registered regions by id. An entry stands from before the transport knows the region
    /// until after it has forgotten it.
    regions: Mutex<HashMap<u32, u64>>,
    max_registered: u64,
    max_regions: usize,
    inherited: Mutex<Inherited>,
    server_name: String,
    kind: TransportKind,
    since: Instant,
}

impl Session {
    /// Opens a session for `channel`: [`Prepared::connect`], [`Prepared::open`] and [`Opened::start`] in one.
    pub fn connect(
        config: &SessionConfig,
        channel: ChannelMemory,
        wakeup: Wakeup,
        on_lost: Box<dyn FnOnce(&str) + Send>,
    ) -> Result<Session, ConnectError> {
        Prepared::connect(config, &channel, &mut Patient)?.open()?.start(channel, wakeup, on_lost)
    }

    /// Goes on with a session that another process had saved before it ended. The caller then rings the
    /// doorbell and wakes the client's threads: that process may have been about to. Regions lie in
    /// `channel`'s memories, or, if there are any, in `own` memories by their ids; with `local` the worker
    /// has them. Does not block. Where the session cannot go on in another process this is an error, and the
    /// caller has it [ended](Saved::end).
    pub fn resume(
        config: &SessionConfig,
        saved: &Saved,
        channel: ChannelMemory,
        own: Option<&BTreeMap<u32, Memories>>,
        wakeup: Wakeup,
        on_lost: Box<dyn FnOnce(&str) + Send>,
    ) -> io::Result<Session> {
        let channel = match &saved.0 {
            Kind::Local(saved) => {
                ChannelMemory { doorbell: Arc::new(duplicate(&saved.doorbell)?), ..channel }
            }
            Kind::Remote(_) => channel,
        };
        let session = Arc::new(SessionState::new(channel, config.server.to_string(), wakeup, on_lost));
        let (transport, inherited, about): (Box<dyn Transport>, _, _) = match &saved.0 {
            Kind::Local(saved) => {
                let (local, inherited) = Local::resume(session.clone(), saved, config.max_regions)?;
                session.counters.resumed.add(1);
                (Box::new(local), Inherited::Awaited(inherited), saved.about)
            }
            Kind::Remote(saved) if config.transport == TransportKind::Verbs => {
                let (verbs, inherited) = verbs::resume(config, session.clone(), saved, own)?;
                (verbs, Inherited::Known(inherited), saved.about)
            }
            Kind::Remote(saved) if saved.queues.is_some() => {
                return Err(io::Error::other("it went over verbs, which is not configured any more"));
            }
            Kind::Remote(saved) => {
                let (tcp, inherited) = tcp::resume(config, session.clone(), saved, own)?;
                (tcp, Inherited::Known(inherited), saved.about)
            }
        };
        let regions = match &inherited {
            Inherited::Known(regions) => regions.iter().map(|region| (region.region, region.size)).collect(),
            Inherited::Taken | Inherited::Awaited(_) => HashMap::new(),
        };
        Ok(Session {
            session,
            transport,
            regions: Mutex::new(regions),
            max_registered: config.max_registered,
            max_regions: config.max_regions,
            inherited: Mutex::new(inherited),
            server_name: printable(&about.server_name),
            kind: config.transport,
            since: handover::clock::from_ns(about.since),
        })
    }

    /// Wakes all threads of the client, wherever they sleep: a process before this one may have been about
    /// to.
    pub fn wake_all(&self) {
        let (mut waker, geometry) = (self.session.waker(), *self.session.channel.view.geometry());
        let words = [Header::STATE_OFFSET, Header::RING_SLEEP_OFFSET, Header::PROGRESS_SLEEP_OFFSET];
        words.into_iter().for_each(|word| waker.wake(word));
        (0..geometry.slot_count).for_each(|slot| waker.wake(geometry.slot_offset(slot) as u64));
    }

    /// Waits until it is known what regions a resumed session has. They are registered from then on, also
    /// where the predecessor had not told the client so yet. False: the session is over, and it was never
    /// known; nothing has its regions any more.
    pub fn wait_for_regions(&self) -> bool {
        self.inherit(true)
    }

    /// The regions that the session had before it was resumed: once, when they are known.
    pub fn take_inherited(&self) -> Vec<InheritedRegion> {
        let mut inherited = self.inherited.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *inherited {
            Inherited::Known(regions) => std::mem::take(regions),
            Inherited::Taken | Inherited::Awaited(_) => Vec::new(),
        }
    }

    fn inherit(&self, wait: bool) -> bool {
        let mut inherited = match wait {
            true => self.inherited.lock().unwrap_or_else(PoisonError::into_inner),
            // Somebody else is waiting.
            false => match self.inherited.try_lock() {
                Ok(inherited) => inherited,
                Err(_) => return false,
            },
        };
        let Inherited::Awaited(worker) = &*inherited else { return true };
        let regions = if wait { worker.recv().ok() } else { worker.try_recv().ok() };
        let Some(regions) = regions else { return false };
        self.regions().extend(regions.iter().map(|region| (region.region, region.size)));
        *inherited = Inherited::Known(regions);
        true
    }

    /// Whether a region of that id is registered.
    pub fn has_region(&self, id: u32) -> bool {
        self.regions().contains_key(&id)
    }

    /// Passes a guest's doorbell on, if the channel has records that nobody has taken yet; in any case the
    /// guest sees that it was heard. Never blocks.
    pub fn doorbell(&self) {
        if self.session.ended().is_some() || self.session.is_paused() {
            return;
        }
        self.session.header().raise_alive();
        if self.session.header().has_records() {
            self.session.ring();
        }
    }

    /// The doorbell itself, for a client that can ring it.
    pub fn doorbell_fd(&self) -> &Arc<EventFd> {
        &self.session.doorbell
    }

    /// Registers a region of the client's memory. Blocks until records may name it. See
    /// [`Transport::register_region`].
    pub fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        self.ended()?;
        self.wait_for_regions();
        let size = region.size;
        {
            let mut regions = self.regions();
            if regions.contains_key(&id) {
                return Err(RegionError::InUse(id));
            }
            let held: u64 = regions.values().sum();
            let too_much = self.max_registered != 0
                && held.checked_add(size).is_none_or(|sum| sum > self.max_registered);
            if too_much || regions.len() >= self.max_regions {
                let (limit, max_count) = (self.max_registered, self.max_regions);
                return Err(RegionError::Limit { size, held, count: regions.len(), limit, max_count });
            }
            regions.insert(id, size);
        }
        let result = self.transport.register_region(id, region);
        match &result {
            Ok(()) => self.session.counters.regions_registered.add(1),
            Err(_) => drop(self.regions().remove(&id)),
        }
        result
    }

    /// Forgets a region. Blocks until nothing touches it any more. See [`Transport::unregister_region`].
    pub fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        let known = self.wait_for_regions();
        if !self.has_region(id) {
            return if known { Err(RegionError::Unknown(id)) } else { Ok(()) };
        }
        self.transport.unregister_region(id)?;
        self.regions().remove(&id);
        Ok(())
    }

    /// Ends the session; see [`Transport::close`]. When this returns [`Closed::Released`], the client's
    /// memory is nobody's but the client's.
    pub fn close(&self, reason: &str, patience: Duration) -> Closed {
        self.transport.close(reason, patience)
    }

    /// Has the session [pause](Transport::pause). Follow it up with [`is_paused`](Self::is_paused).
    pub fn pause(&self) {
        self.transport.pause();
    }

    /// Waits up to `patience` until nothing touches the client's memory any more, until
    /// [`go_on`](Self::go_on). False: something does, and the session has to be closed.
    pub fn is_paused(&self, patience: Duration) -> bool {
        let paused = self.transport.is_paused(patience);
        if paused {
            self.session.pause();
        }
        paused
    }

    /// The session goes on where it was when it was [paused](Self::pause). One that has ended meanwhile tells
    /// its client so.
    pub fn go_on(&self) {
        self.session.unpause();
        if self.over().is_some() {
            return;
        }
        if let Err(e) = self.transport.go_on() {
            self.session.lose(&format!("the session cannot go on after the guest was stopped: {e}"));
            return;
        }
        // What the client did just before it stopped.
        self.doorbell();
    }

    /// The client's memory is somebody else's: a session that is [paused](Self::pause) ends without touching
    /// it. To be called before [`close`](Self::close).
    pub fn seal(&self) {
        self.session.seal();
    }

    /// Whether it is paused.
    pub fn rests(&self) -> bool {
        self.session.is_paused()
    }

    /// Why the session is over, if it is.
    pub fn over(&self) -> Option<&str> {
        self.session.ended()
    }

    fn ended(&self) -> Result<(), RegionError> {
        self.over().map_or(Ok(()), |reason| Err(RegionError::Over(reason.to_owned())))
    }

    fn regions(&self) -> std::sync::MutexGuard<'_, HashMap<u32, u64>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it has done so far.
    pub fn counters(&self) -> &Counters {
        &self.session.counters
    }

    /// Whether its connection stands, and how long the way to the server is.
    pub fn link(&self) -> LinkState {
        self.session.link.state()
    }

    /// The transport's name, for display.
    pub fn transport(&self) -> TransportKind {
        self.kind
    }

    /// The server's address.
    pub fn server(&self) -> &str {
        &self.session.server
    }

    /// The name that the server gave itself.
    pub fn server_name(&self) -> &str {
        &self.server_name
    }

    /// The client program's name, as it gave it.
    pub fn program(&self) -> &str {
        &self.session.channel.program
    }

    /// The client's process id, in its own namespace, as it gave it.
    pub fn pid(&self) -> u32 {
        self.session.channel.pid
    }

    /// How long it has stood.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Regions registered now, and bytes in them.
    pub fn registered(&self) -> (usize, u64) {
        self.inherit(false);
        let regions = self.regions();
        (regions.len(), regions.values().sum())
    }
}
