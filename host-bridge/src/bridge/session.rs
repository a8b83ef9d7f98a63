//! A session as a daemon holds it: connect, doorbell, regions, close.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use identity::servers::CredentialsError;
use identity::{ClientFiles, Fingerprint, Secret, Source};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use protocol::channel::{Header, State};
use protocol::device::{Answer, text, untext};
use protocol::link::{BadGreeting, COMPRESSED_OUT_SINCE, Hello, MAGIC, MAX_DEVICE_LIST, purpose, wish};
use protocol::polling;
use protocol::version::{Mismatch, OURS, Version};
use thiserror::Error;

use super::connect::receive_welcome;
use super::local::{self, Local};
use super::saved::{About, Kind, Saved, duplicate};
use super::state::{ChannelMemory, SessionState, Wakeup};
use super::tcp::{self, Tcp};
use super::verbs::{self, Verbs};
use super::{CacheUse, Closed, CompressUse, Counters, LinkState, RegionError, RegionMemory, Transport};
use crate::framing::{self, Address};
use crate::memory::Memories;
use crate::stream::Stream;
use crate::verbs::{Settings, VerbsError};

/// Which transport carries a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    /// The server is on this host and maps the client's memory.
    Local,
    /// Over sockets.
    Tcp,
    /// Over InfiniBand or RoCE.
    Verbs,
}

impl TransportKind {
    /// The usual one for an address.
    pub fn default_for(address: &Address) -> TransportKind {
        match address {
            Address::Unix(_) => TransportKind::Local,
            Address::Tcp(..) => TransportKind::Tcp,
        }
    }

    /// Whether it can reach such an address.
    pub fn reaches(self, address: &Address) -> bool {
        self != TransportKind::Local || matches!(address, Address::Unix(_))
    }
}

impl FromStr for TransportKind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "local" => Ok(TransportKind::Local),
            "tcp" => Ok(TransportKind::Tcp),
            "verbs" => Ok(TransportKind::Verbs),
            _ => Err(format!("{s:?} is not a transport: local, tcp and verbs are")),
        }
    }
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TransportKind::Local => "local",
            TransportKind::Tcp => "tcp",
            TransportKind::Verbs => "verbs",
        })
    }
}

/// How connections to a server on another machine are protected.
#[derive(Debug, Clone)]
pub enum Security {
    /// By TLS, with the key and the pins that this has.
    Tls(Arc<dyn Source>),
    /// Not at all: everybody on the network can read and change what passes.
    Insecure,
}

/// Connects to a session's server for a process that cannot do so itself.
pub trait Connector: std::fmt::Debug + Send + Sync {
    /// A connected socket. `timeout` counts for each address that the server's name has.
    fn connect(&self, timeout: Duration) -> io::Result<OwnedFd>;
}

/// How to open sessions.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// The server.
    pub server: Address,
    /// The devices to ask the server for, by its numbers and in this order. Empty: those that it gives anyway.
    pub devices: Vec<u8>,
    /// The lease under which to open sessions, if any.
    pub lease: Option<Secret>,
    /// What connects to it. `None`: this process.
    pub connector: Option<Arc<dyn Connector>>,
    /// What carries the session.
    pub transport: TransportKind,
    /// How connections to other machines are protected. Those to a server of this host need no protection.
    pub security: Security,
    /// Name of the virtual machine or host, for display.
    pub client: String,
    /// Longest time to poll for work before sleeping.
    pub poll: Duration,
    /// Data connections to ask for.
    pub data_connections: u32,
    /// Whether each data connection gets threads of its own for long chunks of data (transport `tcp`).
    pub io_threads: bool,
    /// Longest time to wait for a connection.
    pub connect_timeout: Duration,
    /// Longest time, after that, that the server may be silent before its welcome. A server that lets the session wait its turn says so again and again.
    pub handshake_timeout: Duration,
    /// A server silent for longer is lost.
    pub silence: Duration,
    /// The most bytes that one session may register; 0: no limit.
    pub max_registered: u64,
    /// The most regions that one session may register.
    pub max_regions: usize,
    /// How to use verbs, for that transport.
    pub verbs: Settings,
    /// When the server's cache is used (transport `tcp`).
    pub cache: CacheUse,
    /// When data to the server is compressed, and whether data from it may be (transport `tcp`).
    pub compress: CompressUse,
}

impl SessionConfig {
    /// Where credentials for the server come from, if its connections are protected.
    pub fn source(&self) -> Option<&Arc<dyn Source>> {
        match (&self.server, &self.security) {
            (Address::Tcp(..), Security::Tls(source)) => Some(source),
            (Address::Unix(_), _) | (_, Security::Insecure) => None,
        }
    }

    /// The lease's key, as a hello that opens a session has it.
    fn lease_key(&self, purpose: u32) -> [u8; 32] {
        self.lease.filter(|_| opens_session(purpose)).map_or([0; 32], |key| key.0)
    }

    /// The devices to ask for, as a hello that opens a session names them.
    fn device_list(&self, purpose: u32) -> [u8; MAX_DEVICE_LIST] {
        let mut list = [0; MAX_DEVICE_LIST];
        if opens_session(purpose) {
            for (place, device) in list.iter_mut().zip(&self.devices) {
                *place = device.saturating_add(1);
            }
        }
        list
    }

    /// Connects to the server. `timeout` counts for each address that its name has.
    pub(super) fn dial(&self, timeout: Duration) -> io::Result<OwnedFd> {
        match &self.connector {
            Some(connector) => connector.connect(timeout),
            None => framing::connect(&self.server, timeout),
        }
    }

    /// The usual settings for a server.
    pub fn new(server: Address, client: &str) -> SessionConfig {
        SessionConfig {
            transport: TransportKind::default_for(&server),
            devices: Vec::new(),
            lease: None,
            connector: None,
            security: Security::Tls(Arc::new(ClientFiles::of_machine())),
            server,
            client: client.to_owned(),
            poll: polling::RELAY.here(),
            data_connections: 4,
            io_threads: polling::processors() >= polling::SPARE,
            connect_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(15),
            silence: Duration::from_secs(10),
            max_registered: 0,
            max_regions: 65536,
            verbs: Settings::default(),
            cache: CacheUse::Slow,
            compress: CompressUse::Auto,
        }
    }
}

fn opens_session(purpose: u32) -> bool {
    matches!(purpose, purpose::CONTROL | purpose::LOCAL | purpose::VERBS)
}

/// Why no session came about.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The server could not be reached.
    #[error("the server at {server} cannot be reached: {source}")]
    NoServer {
        /// Its address.
        server: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The server could be reached, and is not the one that this host trusts, or does not speak TLS.
    #[error("no protected connection to the server at {server}: {source}")]
    Unsafe {
        /// Its address.
        server: String,
        /// Why.
        source: io::Error,
    },
    /// This host cannot protect a connection to the server.
    #[error("no session with the server at {server}: {source}")]
    Credentials {
        /// Its address.
        server: String,
        /// Why.
        source: CredentialsError,
    },
    /// The server's version does not fit.
    #[error("{}", .mismatch.describe(&format!("the server at {server} speaks"), "this host speaks"))]
    Version {
        /// Its address.
        server: String,
        /// Why.
        mismatch: Mismatch,
    },
    /// The server refused.
    #[error("the server at {server} refused the session: {reason}")]
    Refused {
        /// Its address.
        server: String,
        /// Its answer.
        answer: Answer,
        /// Its words.
        reason: String,
    },
    /// What answered is no rgpu server, or a broken one.
    #[error("the server at {server} does not keep to the protocol: {what}")]
    Protocol {
        /// Its address.
        server: String,
        /// What it did.
        what: String,
    },
    /// Verbs cannot be used, or did not come about.
    #[error("this host cannot open a session over verbs: {source}")]
    Verbs {
        /// Why.
        source: VerbsError,
    },
    /// The client went away while it waited.
    #[error("the program gave up waiting for its turn at the server at {server}")]
    GivenUp {
        /// Its address.
        server: String,
    },
    /// Something on this host failed.
    #[error("this host cannot open a session: {source}")]
    Here {
        /// The system's answer.
        source: io::Error,
    },
}

impl ConnectError {
    /// The answer that a client gets.
    pub fn answer(&self) -> Answer {
        match self {
            ConnectError::NoServer { .. } | ConnectError::Protocol { .. } | ConnectError::Unsafe { .. } => {
                Answer::NoServer
            }
            ConnectError::Credentials { .. } => Answer::Denied,
            ConnectError::Version { .. } => Answer::Version,
            ConnectError::Refused { answer, .. } => *answer,
            ConnectError::Here { .. } | ConnectError::Verbs { .. } | ConnectError::GivenUp { .. } => {
                Answer::NoResources
            }
        }
    }
}

/// What a server's welcome says.
#[derive(Debug)]
pub(super) struct Handshake {
    /// The version that this host and the server speak.
    pub(super) version: Version,
    pub(super) token: [u8; 16],
    pub(super) secret: Secret,
    /// The key of the session's connections under TLS.
    pub(super) session_key: Fingerprint,
    /// How long the server keeps the session when its connections are lost. Zero: it ends with them.
    pub(super) grace: Duration,
    pub(super) data_connections: u32,
    /// Bytes of data that the server takes without a grant.
    pub(super) eager: u64,
    /// Whether it keeps what it is sent.
    pub(super) has_cache: bool,
    pub(super) server: String,
    /// Whom the server takes this client for.
    pub(super) principal: String,
}

/// The first message of a connection.
pub(super) fn hello(config: &SessionConfig, channel: &ChannelMemory, purpose: u32, index: u32) -> Hello {
    let speaks = OURS.at_most(channel.version);
    let understands = purpose == purpose::CONTROL && speaks.version() >= COMPRESSED_OUT_SINCE;
    let compressed = match config.compress.over(understands, config.source().is_some()) {
        CompressUse::Never => 0,
        _ => wish::COMPRESSED,
    };
    Hello {
        magic: MAGIC,
        version: speaks.version(),
        purpose,
        fingerprint: speaks.fingerprint(),
        token: [0; 16],
        index,
        pid: channel.pid,
        slot_count: channel.view.geometry().slot_count as u32,
        wishes: channel.wishes & (wish::NVML_ONLY | wish::MAY_WAIT) | compressed,
        client: text(&config.client),
        program: text(&channel.program),
        secret: config.lease_key(purpose),
        attempt: 0,
        reserved: 0,
        devices: config.device_list(purpose),
    }
}

/// How a client waits while the server serves others before it.
pub trait Turn {
    /// The session waits in the queue of the server of that name, and `ahead` others come first. Called as soon as that is known, and at least each second from then on, by the
    /// thread that connects. Must not block for long.
    fn wait(&mut self, server: &str, ahead: u32);

    /// A descriptor, and the events on it, that say that nobody wants the session any more. The wait then ends with [`ConnectError::GivenUp`].
    fn given_up(&self) -> Option<PollFd<'_>>;
}

/// Waits its turn and tells nobody.
struct Patient;

impl Turn for Patient {
    fn wait(&mut self, _server: &str, _ahead: u32) {}

    fn given_up(&self) -> Option<PollFd<'_>> {
        None
    }
}

/// How often a client that waits is told its place, also when the server is silent.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Waits for the answer to a hello that may put the session into a queue.
pub(super) fn welcome_in_turn(
    config: &SessionConfig,
    socket: &Stream,
    deadline: Instant,
    turn: &mut dyn Turn,
) -> Result<Handshake, ConnectError> {
    let mut deadline = deadline;
    let mut place: Option<(String, u32)> = None;
    loop {
        if wait_for_answer(config, socket, deadline, &*turn)? {
            match welcome(config, socket, deadline)? {
                Heard::Welcome(handshake) => return Ok(handshake),
                Heard::Waiting { server, ahead } => {
                    // The server is there. It may be silent for as long again.
                    deadline = Instant::now() + config.handshake_timeout;
                    place = Some((server, ahead));
                }
            }
        }
        if let Some((server, ahead)) = &place {
            turn.wait(server, *ahead);
        }
    }
}

/// Waits a moment until the server has answered. False: not yet.
fn wait_for_answer(
    config: &SessionConfig,
    socket: &Stream,
    deadline: Instant,
    turn: &dyn Turn,
) -> Result<bool, ConnectError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        let source = io::Error::new(io::ErrorKind::TimedOut, "no answer in time");
        return Err(ConnectError::NoServer { server: config.server.to_string(), source });
    }
    if socket.has_input() {
        return Ok(true);
    }
    let mut watched = vec![PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    watched.extend(turn.given_up());
    let limit = left.min(TELL_EVERY).as_millis().max(1);
    match poll(&mut watched, PollTimeout::from(u16::try_from(limit).unwrap_or(u16::MAX))) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(e) => return Err(ConnectError::Here { source: e.into() }),
    }
    let happened =
        |index: usize| watched.get(index).and_then(PollFd::revents).is_some_and(|events| !events.is_empty());
    if happened(1) {
        return Err(ConnectError::GivenUp { server: config.server.to_string() });
    }
    Ok(happened(0))
}

/// What a server says to a hello.
pub(super) enum Heard {
    /// The session may begin.
    Welcome(Handshake),
    /// It waits in a queue.
    Waiting {
        /// The server's name.
        server: String,
        /// How many come first.
        ahead: u32,
    },
}

/// Waits for the answer to a hello that is served at once: of a data connection, for one.
pub(super) fn welcome_at_once(
    config: &SessionConfig,
    socket: &Stream,
    deadline: Instant,
) -> Result<Handshake, ConnectError> {
    match welcome(config, socket, deadline)? {
        Heard::Welcome(handshake) => Ok(handshake),
        Heard::Waiting { .. } => Err(ConnectError::Protocol {
            server: config.server.to_string(),
            what: "it lets a connection wait that no session begins with".into(),
        }),
    }
}

/// Receives the answer to a hello and judges it.
fn welcome(config: &SessionConfig, socket: &Stream, deadline: Instant) -> Result<Heard, ConnectError> {
    let server = config.server.to_string();
    let (welcome, version) = match receive_welcome(socket, deadline) {
        Ok(Ok(received)) => received,
        Ok(Err(BadGreeting::Magic(magic))) => {
            let what = format!("its answer begins with {magic:#x}; no rgpu-server listens there");
            return Err(ConnectError::Protocol { server, what });
        }
        Ok(Err(BadGreeting::Version(mismatch))) => return Err(ConnectError::Version { server, mismatch }),
        Err(source) => return Err(ConnectError::NoServer { server, source }),
    };
    match Answer::from_number(welcome.status) {
        Answer::Ok => Ok(Heard::Welcome(Handshake {
            version,
            token: welcome.token,
            secret: Secret(welcome.secret),
            session_key: Fingerprint(welcome.session_key),
            grace: Duration::from_secs(welcome.grace.into()),
            data_connections: welcome.data_connections,
            eager: u64::from(welcome.eager) << 20,
            has_cache: welcome.cache == 1,
            server: printable(&welcome.server),
            principal: printable(&welcome.principal),
        })),
        Answer::Waiting => Ok(Heard::Waiting { server: printable(&welcome.server), ahead: welcome.ahead }),
        answer => Err(ConnectError::Refused { server, answer, reason: untext(&welcome.reason) }),
    }
}

/// A server's name. Nothing in it may steer a terminal.
fn printable(name: &[u8]) -> String {
    untext(name).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// A server that has welcomed a session. Nothing else has been done for it yet, so it can be [saved](Self::save); then it is [opened](Self::open) and [started](Opened::start).
#[derive(Debug)]
pub struct Prepared {
    config: SessionConfig,
    link: Link<tcp::Greeting>,
    handshake: Handshake,
}

/// A session with all of its connections, which has not begun: the channel's memory was not touched yet.
#[derive(Debug)]
pub struct Opened {
    config: SessionConfig,
    link: Link<tcp::Links>,
    handshake: Handshake,
}

#[derive(Debug)]
enum Link<T> {
    Tcp(Box<T>),
    Verbs(Box<verbs::Links>),
    Local(local::Link),
}

impl Prepared {
    /// Reaches the server and has it welcome a session for this channel. Blocks until that is done or has failed, which may be long after others were served; `turn` hears of it. Takes from the
    /// channel only its slots' number and what its header says of the client.
    pub fn connect(
        config: &SessionConfig,
        channel: &ChannelMemory,
        turn: &mut dyn Turn,
    ) -> Result<Prepared, ConnectError> {
        let (link, handshake) = match config.transport {
            TransportKind::Tcp => tcp::greet_server(config, channel, turn)
                .map(|(greeting, handshake)| (Link::Tcp(Box::new(greeting)), handshake))?,
            TransportKind::Verbs => verbs::connect(config, channel, turn)
                .map(|(links, handshake)| (Link::Verbs(Box::new(links)), handshake))?,
            TransportKind::Local => local::connect(config, channel, turn)
                .map(|(link, handshake)| (Link::Local(link), handshake))?,
        };
        Ok(Prepared { config: config.clone(), link, handshake })
    }

    /// What another process needs to go on with the session when this one has ended, or to end it. It must be kept by somebody before [`open`](Self::open), and forgotten when the session has been
    /// closed; a session that is not saved ends with this process. `None`: it ends with this process in any case, and nothing is to be done then.
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
    /// Begins the session. On success the channel's state is `READY`; on failure its memory is released before this returns. `channel` is the one that was
    /// given to [`Prepared::connect`].
    ///
    /// `wakeup` is how the client's threads are reached. `on_lost` is called once, with the reason, if the session ends against the caller's will, from one of
    /// the session's own threads: it must neither block nor call back into this session.
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
            Link::Tcp(links) => Box::new(Tcp::start(&config, session.clone(), *links)?),
            Link::Verbs(links) => Box::new(Verbs::start(&config, session.clone(), *links)?),
            Link::Local(link) => Box::new(Local::start(&config, session.clone(), link)?),
        };
        if waited {
            session.waker().wake(Header::STATE_OFFSET);
        }
        tracing::info!(
            client = %config.client, program = %session.channel.program, pid = session.channel.pid, server = %config.server,
            server_name = %handshake.server, transport = %config.transport, principal = %handshake.principal, "session opened"
        );
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

/// A region that was registered before this process had the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InheritedRegion {
    /// Its id.
    pub region: u32,
    /// Its size in bytes.
    pub size: u64,
    /// Pieces of memory that it is made of.
    pub pieces: u32,
}

/// One channel's connection to one server.
///
/// Dropping it closes it, which may block; a daemon calls [`close`](Self::close) first, at a place where blocking is right.
#[derive(Debug)]
pub struct Session {
    session: Arc<SessionState>,
    transport: Box<dyn Transport>,
    /// Sizes of the registered regions by id. An entry stands from before the transport knows the region until after it has forgotten it.
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

    /// Goes on with a session that another process had saved before it ended. The caller then rings the doorbell and wakes the client's threads: that process may have been about to. Regions lie
    /// in `channel`'s memories, or, if there are any, in `own` memories by their ids; with `local` the worker has them. Does not block. Where the session cannot go on in another process this is an error, and the caller has it [ended](Saved::end).
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
                let (worker, wake) = (saved.worker.try_clone()?, duplicate(&saved.wake)?);
                let (local, inherited) = Local::resume(session.clone(), worker, wake, config.max_regions)?;
                session.counters.resumed.add(1);
                (Box::new(local), Inherited::Awaited(inherited), saved.about)
            }
            Kind::Remote(saved) if config.transport == TransportKind::Verbs => {
                let (verbs, inherited) = Verbs::resume(config, session.clone(), saved, own)?;
                (Box::new(verbs), Inherited::Known(inherited), saved.about)
            }
            Kind::Remote(saved) if saved.queues.is_some() => {
                return Err(io::Error::other("it went over verbs, which is not configured any more"));
            }
            Kind::Remote(saved) => {
                let (tcp, inherited) = Tcp::resume(config, session.clone(), saved, own)?;
                (Box::new(tcp), Inherited::Known(inherited), saved.about)
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

    /// Wakes all threads of the client, wherever they sleep: a process before this one may have been about to.
    pub fn wake_all(&self) {
        let (mut waker, geometry) = (self.session.waker(), *self.session.channel.view.geometry());
        let words = [Header::STATE_OFFSET, Header::RING_SLEEP_OFFSET, Header::PROGRESS_SLEEP_OFFSET];
        words.into_iter().for_each(|word| waker.wake(word));
        (0..geometry.slot_count).for_each(|slot| waker.wake(geometry.slot_offset(slot) as u64));
    }

    /// Waits until it is known what regions a resumed session has. They are registered from then on, also where the predecessor had not told the client so yet. False: the session is over, and
    /// it was never known; nothing has its regions any more.
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

    /// Passes a guest's doorbell on, if the channel has records that nobody has taken yet; in any case the guest sees that it was heard. Never blocks.
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

    /// Registers a region of the client's memory. Blocks until records may name it. See [`Transport::register_region`].
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

    /// Ends the session; see [`Transport::close`]. When this returns [`Closed::Released`], the client's memory is nobody's but the client's.
    pub fn close(&self, reason: &str, patience: Duration) -> Closed {
        self.transport.close(reason, patience)
    }

    /// Has the session [pause](Transport::pause). Follow it up with [`is_paused`](Self::is_paused).
    pub fn pause(&self) {
        self.transport.pause();
    }

    /// Waits up to `patience` until nothing touches the client's memory any more, until [`go_on`](Self::go_on). False: something does, and the session has to be closed.
    pub fn is_paused(&self, patience: Duration) -> bool {
        let paused = self.transport.is_paused(patience);
        if paused {
            self.session.pause();
        }
        paused
    }

    /// The session goes on where it was when it was [paused](Self::pause). One that has ended meanwhile tells its client so.
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

    /// The client's memory is somebody else's: a session that is [paused](Self::pause) ends without touching it. To be called before [`close`](Self::close).
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
