//! The first message of a connection to a server, and the server's answer, for which a session may have to
//! wait its turn.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use identity::{Fingerprint, Secret};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeVal;
use protocol::device::{Answer, text, untext};
use protocol::link::{BadGreeting, COMPRESSED_OUT_SINCE, Hello, MAGIC, Welcome, purpose, wish};
use protocol::version::{OURS, Version};

use super::config::SessionConfig;
use super::error::ConnectError;
use super::state::ChannelMemory;
use crate::compression::CompressUse;
use crate::framing::{recv_greeting, recv_some, without_control};
use crate::stream::Stream;

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
    /// A descriptor that came with it.
    pub(super) given: Option<OwnedFd>,
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
        wishes: channel.wishes & (wish::NVML_ONLY | wish::MAY_WAIT)
            | compressed
            | if purpose == purpose::LOCAL { wish::PRESENCE } else { 0 },
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
    /// The session waits in the queue of the server of that name, and `ahead` others come first. Called as
    /// soon as that is known, and at least each second from then on, by the thread that connects. Must not
    /// block for long.
    fn wait(&mut self, server: &str, ahead: u32);

    /// Nothing new is heard: the server that had the session wait has ended, and another attempt is under
    /// way. Called at least each second.
    fn still_waits(&mut self) {}

    /// Whether the client was told that it waits before this began.
    fn has_waited(&self) -> bool {
        false
    }

    /// A descriptor, and the events on it, that say that nobody wants the session any more. The wait then
    /// ends with [`ConnectError::GivenUp`].
    fn given_up(&self) -> Option<PollFd<'_>>;
}

/// How often a waiting client is told its place in the queue, even if the server says nothing.
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
        match &place {
            Some((server, ahead)) => turn.wait(server, *ahead),
            None => turn.still_waits(),
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
    let mut given = Vec::new();
    let (welcome, version) = match receive_welcome(socket, deadline, &mut given) {
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
            given: given.pop(),
        })),
        Answer::Waiting => Ok(Heard::Waiting { server: printable(&welcome.server), ahead: welcome.ahead }),
        answer => Err(ConnectError::Refused { server, answer, reason: printable(&welcome.reason) }),
    }
}

/// A server's words, for example its name.
pub(super) fn printable(words: &[u8]) -> String {
    without_control(&untext(words))
}

/// A connection that is read until a deadline, together with the descriptors that come on it.
struct Gathers<'s>(&'s Stream, &'s mut Vec<OwnedFd>, Instant);

impl Read for Gathers<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.receive_until(self.2)?;
        match self.0.is_encrypted() {
            true => (&mut &*self.0).read(buffer),
            false => recv_some(self.0.as_fd(), buffer, self.1),
        }
    }
}

/// Reads a welcome with a deadline, and what came with it.
fn receive_welcome(
    connection: &Stream,
    deadline: Instant,
    given: &mut Vec<OwnedFd>,
) -> io::Result<Result<(Welcome, Version), BadGreeting>> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let time = TimeVal::new(left.as_secs() as i64, i64::from(left.subsec_micros()));
    setsockopt(&connection.as_fd(), sockopt::SendTimeout, &time)?;
    recv_greeting(&mut Gathers(connection, given, deadline), &OURS).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "no answer in time"),
        io::ErrorKind::UnexpectedEof => {
            io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection without an answer")
        }
        _ => e,
    })
}
