//! Connections to a server: reached, protected, and greeted. The same for every transport that leaves this
//! host.
//!
//! ```text
//!   plain   ── Hello ─▶ ◀─ Welcome ──                       the session's control connection
//!           ── Hello{DATA} ─▶ ◀─ Welcome ──                 data connections, all at once
//!   TLS     ── Hello ─▶ ◀─ Welcome{session_key} ──          the daemon, which has the server's key; this connection stays for its last words
//!           ── Hello{CONTROL} ── commands ─▶ ◀─ Welcome ──  the session's worker, which has a key of its own
//!           ── Hello{DATA} ─▶ ◀─ Welcome ──                 data connections, all at once
//! ```
//!
//! The session's own connections are established while the daemon answers ([`Spares`]). Nobody waits for data
//! connections before a session begins ([`Opening`]): commands go on the control connection meanwhile. Nor
//! for the welcome on each connection, which comes before anything else there ([`Unwelcomed`]): version and
//! limits are in the daemon's welcome, and under TLS the worker is known by its key.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use identity::servers::CredentialsError;
use identity::tls::session_name;
use identity::{Credentials, Fingerprint, Secret};
use nix::poll::PollFd;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{MsgFlags, recv};
use protocol::device::{Answer, text};
use protocol::link::{Hello, MAGIC, MAX_DEVICE_LIST, Welcome, frame, greeting, purpose};
use protocol::version::OURS;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use zerocopy::IntoBytes;

use super::config::{Security, SessionConfig};
use super::error::ConnectError;
use super::relay::EndReason;
use super::state::thread_name;
use super::welcome::{Handshake, Turn, printable, welcome_at_once, welcome_in_turn};
use crate::ask::{self, Question};
use crate::framing::{Address, FrameReader};
use crate::stream::{Now, Stream};

/// A server that has welcomed a session.
#[derive(Debug)]
pub(super) struct Greeted {
    token: [u8; 16],
    secret: Secret,
    /// The greeted connection. Without TLS it is the session's control connection.
    connection: Stream,
    /// What the session's own connections trust, under TLS.
    pub(super) session: Option<Arc<ClientConfig>>,
    spares: Spares,
    /// How long it took to connect.
    pub(super) dialed_in: Duration,
}

/// Most connections of a process for data on which nothing was said yet. A server keeps few such connections
/// for one address; beyond this number they are opened when the welcome has come.
const MOST_SPARES: u32 = 32;

/// How many there are.
static SPARES: AtomicU32 = AtomicU32::new(0);

/// Connections for a session that has not been welcomed. The server would close them if the session had to
/// wait its turn.
#[derive(Debug, Default)]
struct Spares {
    /// For the session's control connection, under TLS.
    control: Option<Spare>,
    data: Vec<Spare>,
}

/// A connection on which nothing was said yet. A thread opens it, which ends with it.
#[derive(Debug)]
struct Spare(JoinHandle<io::Result<(OwnedFd, Option<Counted>)>>);

/// One of [`SPARES`].
#[derive(Debug)]
struct Counted;

/// Lets go of the spare connections while the session waits its turn.
struct WithSpares<'t>(&'t mut dyn Turn, &'t mut Spares);

/// What has come of the welcome on a connection on which commands or data went before it.
#[derive(Debug, Default)]
pub(super) struct Unwelcomed(Vec<u8>);

/// A session's data connections, on their way: threads open them, which end with them.
#[derive(Debug)]
pub(super) struct Opening {
    outcome: Receiver<Result<Vec<Stream>, ConnectError>>,
    /// The welcome on each was not waited for.
    pub(super) unwelcomed: bool,
    /// Raised when there is an outcome.
    done: Arc<EventFd>,
}

/// The connection on which a daemon may say why a session ended whose worker no longer can.
#[derive(Debug)]
pub(super) struct Daemon {
    connection: Stream,
    /// `None`: it has said what is no frame.
    reader: Option<FrameReader>,
}

impl Daemon {
    /// The daemon's farewell, if there is one by now.
    pub(super) fn last_words(&mut self) -> Option<String> {
        let reader = self.reader.as_mut()?;
        let mut from = Now(&self.connection);
        // A few times at most: a daemon that never stops sending must not hold up the session.
        for _ in 0..8 {
            let some = reader.fill(&mut from).is_ok_and(|n| n > 0);
            loop {
                match reader.next_frame() {
                    Ok(Some((frame::BYE, text))) => return Some(String::from_utf8_lossy(text).into_owned()),
                    // Nothing else is of interest, nor is it kept.
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => {
                        self.reader = None;
                        return None;
                    }
                }
            }
            if !some {
                break;
            }
        }
        None
    }
}

/// Longest time that connecting and one answer take.
fn in_time(config: &SessionConfig) -> Instant {
    Instant::now() + config.connect_timeout + config.handshake_timeout
}

fn reach(config: &SessionConfig) -> Result<OwnedFd, ConnectError> {
    let failed = |source| ConnectError::NoServer { server: config.server.to_string(), source };
    config.dial(config.connect_timeout).map_err(failed)
}

fn protect(
    config: &SessionConfig,
    socket: OwnedFd,
    tls: &Arc<ClientConfig>,
    name: ServerName<'static>,
) -> Result<Stream, ConnectError> {
    let failed = |source: io::Error| {
        let server = config.server.to_string();
        match source.kind() {
            io::ErrorKind::TimedOut
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => ConnectError::NoServer { server, source },
            _ => ConnectError::Unsafe { server, source },
        }
    };
    Stream::tls_client(socket, tls, name, in_time(config)).map_err(failed)
}

/// The server's name in a TLS hello. It decides nothing: the server is known by its key.
fn server_name(address: &Address) -> ServerName<'static> {
    let host = match address {
        Address::Tcp(host, _) => host.as_str(),
        Address::Unix(_) => "localhost",
    };
    let unnamed = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
    ServerName::try_from(host.to_owned()).unwrap_or(unnamed)
}

fn say(config: &SessionConfig, connection: &Stream, hello: &Hello) -> Result<(), ConnectError> {
    let failed = |source| ConnectError::NoServer { server: config.server.to_string(), source };
    connection.write_all(hello.as_bytes()).map_err(failed)
}

/// The protection that a server needs, if it needs one.
fn credentials(config: &SessionConfig) -> Result<Option<Credentials>, ConnectError> {
    let server = config.server.to_string();
    let credentials = config.source().map(|source| source.credentials(&server)).transpose();
    credentials.map_err(|source| ConnectError::Credentials { server, source })
}

/// Reaches the server and waits until it welcomes the session, which will have about so many data
/// connections.
pub(super) fn greet(
    config: &SessionConfig,
    hello: &Hello,
    data: u32,
    turn: &mut dyn Turn,
) -> Result<(Greeted, Handshake), ConnectError> {
    let credentials = credentials(config)?;
    let deadline = in_time(config);
    let begun = Instant::now();
    let socket = reach(config)?;
    let dialed_in = begun.elapsed();
    let connection = match &credentials {
        Some(credentials) => protect(config, socket, credentials.greeting(), server_name(&config.server))?,
        None => Stream::from(socket),
    };
    say(config, &connection, hello)?;
    let mut spares = Spares::begin(config, credentials.is_some(), data);
    let turn = &mut WithSpares(turn, &mut spares);
    let handshake = welcome_in_turn(config, &connection, deadline, turn)?;
    let wrong =
        |what: &str| ConnectError::Protocol { server: config.server.to_string(), what: what.to_owned() };
    let session = match (&credentials, handshake.session_key == Fingerprint([0; 32])) {
        (Some(credentials), false) => {
            let key = credentials.session(handshake.session_key);
            Some(key.map_err(|e| wrong(&format!("the session has no usable key: {e}")))?)
        }
        (None, true) => None,
        (Some(_), true) => return Err(wrong("the session has no key")),
        (None, false) => return Err(wrong("the session has a key, and the connection is not protected")),
    };
    let (token, secret) = (handshake.token, handshake.secret);
    Ok((Greeted { token, secret, connection, session, spares, dialed_in }, handshake))
}

impl Spares {
    fn begin(config: &SessionConfig, control: bool, data: u32) -> Spares {
        let control = control.then(|| Spare::begin(config, None)).flatten();
        let data = (0..data).map_while(|_| Counted::one()).filter_map(|one| Spare::begin(config, Some(one)));
        Spares { control, data: data.collect() }
    }
}

impl Spare {
    /// Begins to connect. Without a thread for it there is none.
    fn begin(config: &SessionConfig, counted: Option<Counted>) -> Option<Spare> {
        let config = config.clone();
        let dial = move || config.dial(config.connect_timeout).map(|socket| (socket, counted));
        std::thread::Builder::new().name(thread_name("dial")).spawn(dial).ok().map(Spare)
    }

    /// The connection, if it stands and the server has not closed it. Waits for it.
    fn take(self) -> Option<OwnedFd> {
        let (socket, _) = self.0.join().ok()?.ok()?;
        let look = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        matches!(recv(socket.as_raw_fd(), &mut [0], look), Err(nix::Error::EAGAIN)).then_some(socket)
    }
}

impl Counted {
    /// One more, if there may be one.
    fn one() -> Option<Counted> {
        let more = |spares| (spares < MOST_SPARES).then_some(spares + 1);
        SPARES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        SPARES.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Turn for WithSpares<'_> {
    fn wait(&mut self, server: &str, ahead: u32) {
        *self.1 = Spares::default();
        self.0.wait(server, ahead);
    }

    fn still_waits(&mut self) {
        self.0.still_waits();
    }

    fn given_up(&self) -> Option<PollFd<'_>> {
        self.0.given_up()
    }
}

impl Unwelcomed {
    /// Reads of the welcome what there is, and nothing behind it. 0: the server closed the connection.
    pub(super) fn read(&mut self, mut from: impl io::Read) -> io::Result<usize> {
        let mut part = [0; size_of::<Welcome>()];
        let left = part.len() - self.0.len();
        let got = from.read(&mut part[..left])?;
        self.0.extend_from_slice(&part[..got]);
        Ok(got)
    }

    /// Whether it is complete, and `connection` welcome.
    pub(super) fn is_over(&self, connection: impl Display) -> Result<bool, EndReason> {
        match greeting::<Welcome>(&self.0, &OURS) {
            Ok(None) => Ok(false),
            Ok(Some((welcome, _))) if Answer::from_number(welcome.status) == Answer::Ok => Ok(true),
            Ok(Some((welcome, _))) => {
                Err(EndReason::Gone(format!("{connection}: {}", printable(&welcome.reason))))
            }
            Err(bad) => Err(EndReason::Server(bad.to_string())),
        }
    }
}

impl Opening {
    /// Opens a data connection for each of `hellos`. Does not block. `waits`: until they are welcome.
    pub(super) fn begin(
        config: &SessionConfig,
        greeted: &mut Greeted,
        hellos: Vec<Hello>,
        waits: bool,
    ) -> Result<Opening, ConnectError> {
        let here = |source| ConnectError::Here { source };
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let done = Arc::new(EventFd::from_value_and_flags(0, flags).map_err(|e| here(e.into()))?);
        let mut spares = std::mem::take(&mut greeted.spares.data).into_iter();
        let own = |hello| Own { hello: greeted.own(hello), spare: spares.next(), waits };
        let owns: Vec<Own> = hellos.into_iter().map(own).collect();
        let (config, session, raised) = (config.clone(), greeted.session.clone(), Arc::clone(&done));
        let (sender, outcome) = channel();
        let open = move || {
            // The session may have ended meanwhile; then the connections close.
            let _ = sender.send(open_all(&config, session.as_ref(), owns));
            // A full counter means that it is raised already.
            let _ = raised.write(1);
        };
        std::thread::Builder::new().name(thread_name("open")).spawn(open).map_err(here)?;
        Ok(Opening { outcome, unwelcomed: !waits, done })
    }

    /// The connections, in the order of their hellos, or why there is one that the session will not have.
    /// Once. `None`: not yet.
    pub(super) fn outcome(&self) -> Option<Result<Vec<Stream>, ConnectError>> {
        match self.outcome.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(panicked())),
        }
    }

    /// Readable when there is an outcome.
    pub(super) fn done(&self) -> &EventFd {
        &self.done
    }
}

fn panicked() -> ConnectError {
    ConnectError::Here { source: io::Error::other("a thread that connects has panicked") }
}

/// A connection of a session that is to be opened.
struct Own {
    hello: Hello,
    spare: Option<Spare>,
    /// It is only of use once it is welcome.
    waits: bool,
}

/// Opens connections of a session side by side: each waits for the network a few times, and all of them
/// together no longer.
fn open_all(
    config: &SessionConfig,
    session: Option<&Arc<ClientConfig>>,
    owns: Vec<Own>,
) -> Result<Vec<Stream>, ConnectError> {
    std::thread::scope(|scope| {
        let start = |own: Own| {
            let thread = std::thread::Builder::new().name(thread_name("open"));
            thread.spawn_scoped(scope, move || own.open(config, session))
        };
        let opening: io::Result<Vec<_>> = owns.into_iter().map(start).collect();
        let opening = opening.map_err(|source| ConnectError::Here { source })?;
        opening.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
    })
}

impl Own {
    /// Opens it and says its hello.
    fn open(
        self,
        config: &SessionConfig,
        session: Option<&Arc<ClientConfig>>,
    ) -> Result<Stream, ConnectError> {
        let Own { hello, spare, waits } = self;
        let greet = |socket| {
            let connection = match session {
                Some(tls) => protect(config, socket, tls, session_name(&hello.token))?,
                None => Stream::from(socket),
            };
            say(config, &connection, &hello)?;
            if waits {
                welcome_at_once(config, &connection, in_time(config))?;
            }
            Ok(connection)
        };
        match spare.and_then(Spare::take).map(greet) {
            // The server may have closed it, having waited too long.
            None | Some(Err(ConnectError::NoServer { .. } | ConnectError::Unsafe { .. })) => {
                greet(reach(config)?)
            }
            Some(outcome) => outcome,
        }
    }
}

impl Greeted {
    /// A hello of this session.
    fn own(&self, hello: Hello) -> Hello {
        Hello { token: self.token, secret: self.secret.0, ..hello }
    }

    /// The session's control connection, and under TLS then the one to the daemon. There it has to be opened;
    /// it begins with `control`, for which the worker's welcome comes on it, not waited for.
    pub(super) fn begin_control(
        self,
        config: &SessionConfig,
        control: Hello,
    ) -> Result<(Stream, Option<Daemon>), ConnectError> {
        let Some(tls) = &self.session else { return Ok((self.connection, None)) };
        let own = Own { hello: self.own(control), spare: self.spares.control, waits: false };
        let stream = own.open(config, Some(tls))?;
        Ok((stream, Some(Daemon { connection: self.connection, reader: Some(FrameReader::new()) })))
    }

    /// The same, with `frame` as the first one on it, and it is welcome.
    pub(super) fn control(
        self,
        config: &SessionConfig,
        control: Hello,
        (kind, body): (u32, &[u8]),
    ) -> Result<(Stream, Option<Daemon>), ConnectError> {
        let (stream, daemon) = self.begin_control(config, control)?;
        let failed = |source| ConnectError::NoServer { server: config.server.to_string(), source };
        stream.send_frame(kind, &[body]).map_err(failed)?;
        if daemon.is_some() {
            welcome_at_once(config, &stream, in_time(config))?;
        }
        Ok((stream, daemon))
    }
}

/// Gives the server at `address` a token's secret, so that it knows the key of `credentials` from now on.
/// Returns the name that this client has there.
pub fn join(address: &Address, credentials: &Credentials, secret: &Secret) -> Result<String, ConnectError> {
    let config = SessionConfig::new(address.clone(), "");
    let connection = protect(&config, reach(&config)?, credentials.greeting(), server_name(address))?;
    let hello = Hello { secret: secret.0, ..without_session(purpose::JOIN, "rgpuctl join") };
    say(&config, &connection, &hello)?;
    welcome_at_once(&config, &connection, in_time(&config)).map(|handshake| handshake.principal)
}

/// Asks a server what needs no session.
pub fn ask(server: &Address, security: Security, question: &Question) -> Result<ask::Answer, ConnectError> {
    let config = SessionConfig { security, ..SessionConfig::new(server.clone(), "") };
    let deadline = in_time(&config);
    ask_until(&config, question, deadline)
}

fn ask_until(
    config: &SessionConfig,
    question: &Question,
    deadline: Instant,
) -> Result<ask::Answer, ConnectError> {
    let server = &config.server;
    let wrong = |what: String| ConnectError::Protocol { server: server.to_string(), what };
    let connection = match credentials(config)? {
        Some(credentials) => protect(config, reach(config)?, credentials.greeting(), server_name(server))?,
        None => Stream::from(reach(config)?),
    };
    let question = question.to_bytes();
    let index = u32::try_from(question.len()).unwrap_or(u32::MAX);
    let hello = Hello { index, ..without_session(purpose::ASK, "rgpuctl") };
    let failed = |source| ConnectError::NoServer { server: server.to_string(), source };
    connection.write_all(&[hello.as_bytes(), &question].concat()).map_err(failed)?;
    welcome_at_once(config, &connection, deadline)?;
    let mut reader = FrameReader::new();
    loop {
        match reader.next_frame().map_err(|e| wrong(e.to_string()))? {
            Some((frame::ANSWER, text)) => {
                return serde_json::from_slice(text)
                    .map_err(|e| wrong(format!("its answer is not understood: {e}")));
            }
            Some((kind, _)) => return Err(wrong(format!("frame {kind} in place of an answer"))),
            None => {}
        }
        // A server that sends its answer byte by byte keeps nobody longer.
        connection.receive_until(deadline).map_err(failed)?;
        if reader.fill(&mut &connection).map_err(failed)? == 0 {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
    }
}

/// A hello of this process that opens no session.
pub(super) fn without_session(purpose: u32, program: &str) -> Hello {
    Hello {
        devices: [0; MAX_DEVICE_LIST],
        magic: MAGIC,
        version: OURS.version(),
        purpose,
        fingerprint: OURS.fingerprint(),
        token: [0; 16],
        index: 0,
        pid: std::process::id(),
        slot_count: 0,
        wishes: 0,
        client: text(""),
        program: text(program),
        secret: [0; 32],
        attempt: 0,
        reserved: 0,
    }
}

/// Whether the connections of a session with this key are protected.
pub(super) fn is_protected(config: &SessionConfig, key: Fingerprint) -> bool {
    key != Fingerprint([0; 32]) && config.source().is_some()
}

/// What the connections of a session with this key trust, under TLS.
pub(super) fn session_trust(
    config: &SessionConfig,
    key: Fingerprint,
) -> Result<Option<Arc<ClientConfig>>, ConnectError> {
    let unusable =
        |source: CredentialsError| ConnectError::Credentials { server: config.server.to_string(), source };
    if !is_protected(config, key) {
        return Ok(None);
    }
    credentials(config)?
        .map(|credentials| credentials.session(key).map_err(|e| unusable(e.into())))
        .transpose()
}

/// Protects another connection of a session, if its connections are protected.
pub(super) fn protect_session(
    config: &SessionConfig,
    socket: OwnedFd,
    session: Option<&Arc<ClientConfig>>,
    token: &[u8; 16],
    deadline: Instant,
) -> io::Result<Stream> {
    match session {
        Some(tls) => Stream::tls_client(socket, tls, session_name(token), deadline.min(in_time(config))),
        None => Ok(Stream::from(socket)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use protocol::link::FrameHeader;

    use super::*;

    #[test]
    fn an_answer_that_comes_byte_by_byte_is_awaited_until_the_deadline() {
        let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listening.local_addr().unwrap().port();
        let config = SessionConfig {
            security: Security::Insecure,
            ..SessionConfig::new(Address::Tcp("127.0.0.1".into(), port), "")
        };
        std::thread::spawn(move || {
            let (mut stream, _) = listening.accept().unwrap();
            let answer = format!("{:400}", serde_json::to_string(&ask::Answer::Leases(Vec::new())).unwrap());
            let header = FrameHeader { kind: frame::ANSWER, len: answer.len() as u32 };
            stream.write_all(Welcome::new(Answer::Ok, "").as_bytes()).unwrap();
            stream.write_all(header.as_bytes()).unwrap();
            // All of it takes longer than there is time.
            for byte in answer.bytes() {
                std::thread::sleep(Duration::from_millis(10));
                if stream.write_all(&[byte]).is_err() {
                    break;
                }
            }
        });
        let deadline = Instant::now() + Duration::from_secs(1);
        let answer = ask_until(&config, &Question::Leases {}, deadline);
        assert!(matches!(answer, Err(ConnectError::NoServer { .. })), "{answer:?}");
    }

    #[test]
    fn what_a_server_says_steers_no_terminal() {
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        theirs.write_all(Welcome::new(Answer::Denied, "\x1b[2Jno\nroot: yes").as_bytes()).unwrap();
        let config = SessionConfig::new(Address::Unix("/x".into()), "");
        let refused = welcome_at_once(&config, &Stream::from(OwnedFd::from(ours)), in_time(&config));
        let Err(ConnectError::Refused { reason, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(reason, "?[2Jno?root: yes");
    }

    #[test]
    fn a_welcome_is_read_to_its_end_and_no_further_however_it_comes() {
        let refusal = Welcome::new(Answer::Denied, "another secret");
        let foreign = Welcome { magic: 7, ..Welcome::new(Answer::Ok, "") };
        for step in [1, 100, size_of::<Welcome>() + 1] {
            let read = |welcome: Welcome| {
                let bytes = [welcome.as_bytes(), b"frames"].concat();
                let (mut rest, mut unwelcomed) = (&bytes[..], Unwelcomed::default());
                loop {
                    assert!(unwelcomed.read(rest.by_ref().take(step as u64)).unwrap() > 0);
                    match unwelcomed.is_over("a connection") {
                        Ok(false) => {}
                        outcome => return (outcome, rest.to_vec()),
                    }
                }
            };
            let (welcome, rest) = read(Welcome::new(Answer::Ok, ""));
            assert_eq!((welcome.unwrap(), &rest[..]), (true, &b"frames"[..]));
            let (refused, _) = read(refusal);
            assert!(matches!(refused, Err(EndReason::Gone(why)) if why.contains("another secret")));
            assert!(matches!(read(foreign), (Err(EndReason::Server(_)), _)));
        }
    }

    /// Whatever it says is not kept for longer than it takes to look at it.
    #[test]
    fn a_daemon_that_says_much_takes_no_memory_and_its_farewell_is_heard() {
        let (connection, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let mut daemon =
            Daemon { connection: OwnedFd::from(connection).into(), reader: Some(FrameReader::new()) };
        let alive = FrameHeader { kind: frame::ALIVE, len: 0 }.as_bytes().repeat(1 << 10);
        for _ in 0..1 << 8 {
            while far.write(&alive).is_ok_and(|n| n.is_multiple_of(8)) {}
            assert_eq!(daemon.last_words(), None);
            let kept = daemon.reader.as_ref().map(FrameReader::buffered);
            assert!(kept.is_some_and(|kept| kept < 8), "{kept:?} bytes");
        }
        far.set_nonblocking(false).unwrap();
        far.write_all(FrameHeader { kind: frame::BYE, len: 5 }.as_bytes()).unwrap();
        far.write_all(b"enough").unwrap();
        let words =
            std::iter::from_fn(|| daemon.last_words().or(Some(String::new()))).find(|w| !w.is_empty());
        assert_eq!(words.as_deref(), Some("enoug"));
    }
}
