//! Listening sockets, and connections that have not sent their first message.
//!
//! ```text
//!   listeners ──▶ one thread, "rgpu-greet" ─┬─ Unix, or tcp without TLS ── Hello ──────────▶ handshake::serve
//!                                           ├─ TLS with any other name ─── Hello, under TLS ─▶ handshake::serve
//!                                           ├─ TLS with a token ────────── Hello ──────────▶ "rgpu-join"
//!                                           └─ TLS with a session's name ── unread ──────────▶ the session's worker
//! ```
//!
//! One thread serves all of them, because a silent connection must cost next to nothing: a descriptor, and
//! some kilobytes with TLS. At most [`MAX_SILENT`] such connections are kept, and [`MAX_SILENT_OF_ONE`] of
//! one source: beyond that, the oldest of the same source is closed, never one of another source. Real
//! clients send everything immediately, so they are not among the oldest.
//!
//! Connections on which nothing has come at all are counted for themselves: a client opens those of its next
//! session before it can say which that is, and they must not take the place of one that shakes hands.
//!
//! A token is redeemed by a thread of its own, "rgpu-join", because a disk writes the list of clients. At
//! most [`MAX_JOINS`] wait for that.
//!
//! `fuzzing` has peers that may do anything.

#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use handover::{Inherited, Places};
use host_bridge::framing::Address;
use identity::tls::session_of;
use metrics::Place;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{MsgFlags, recv};
use protocol::link::{BadGreeting, Hello, MAX_QUESTION, greeting, purpose};
use protocol::version::OURS;
use rustls::ServerConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::Acceptor;
use zerocopy::FromBytes;

use super::control::{Control, Now, Refused};
use super::handshake;
use super::host::host_name;
use super::refusals::Reason;
use super::state::Server;
use super::trust::Principal;
use crate::config::Serve;

/// How long a client may take for its first message. With TLS it takes four trips to the server.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of connections without a complete first message.
const MAX_SILENT: usize = 512;
/// The same for one source: an address, or all users of this machine together. A client may start a hundred
/// programs at the same moment. As many again may have said nothing at all.
const MAX_SILENT_OF_ONE: usize = 128;
/// Maximum size of a client's first TLS message in bytes.
const MAX_CLIENT_HELLO: usize = 8 << 10;
/// Maximum size in bytes of what a client sends under TLS until its first message is complete: a handshake
/// with its certificates, and that message. Without it, a peer that sends empty records and new keys forever
/// would be served forever, as the library allows any number of both in turn.
const MAX_UNDER_TLS: usize = (64 << 10) + MAX_SAID;
/// Maximum number of clients whose tokens wait to be redeemed.
const MAX_JOINS: usize = 128;
/// The first byte of a TLS connection.
const TLS: u8 = 22;

/// Socket files of this daemon, removed when it ends.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<PathBuf>);

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.0 {
            // Another process may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The addresses, for display.
pub(super) fn addresses(all: &[Address]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Where this server can probably be reached: what it listens at; for a wildcard address, this machine's name
/// and each of its addresses, those of bridges last: other machines have the same ones for their own guests.
pub(super) fn own_addresses(server: &Server) -> Vec<String> {
    let mut all = Vec::new();
    let mut add = |host: String, port| {
        let address = Address::Tcp(host, port).to_string();
        if !all.contains(&address) {
            all.push(address);
        }
    };
    for address in &server.options.listen {
        match address {
            Address::Tcp(host, port) if ["*", "::", "0.0.0.0"].contains(&host.as_str()) => {
                add(host_name(), *port);
                let addresses = interface_addresses().into_iter().filter(|ip| is_within(host, *ip));
                addresses.for_each(|ip| add(ip.to_string(), *port));
            }
            Address::Tcp(host, port) => add(host.clone(), *port),
            Address::Unix(_) => {}
        }
    }
    all
}

/// Whether a socket that listens at this wildcard address takes connections to that one.
fn is_within(wildcard: &str, address: IpAddr) -> bool {
    wildcard != "0.0.0.0" || address.is_ipv4()
}

/// The addresses of this machine's interfaces that others can use, those of bridges last.
fn interface_addresses() -> Vec<IpAddr> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let address = |interface: nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let v6 = address.as_sockaddr_in6().map(|a| a.ip()).filter(|ip| !ip.is_unicast_link_local());
        let ip = v4.or(v6.map(IpAddr::V6)).filter(|ip| !ip.is_loopback())?;
        let is_bridge = Path::new("/sys/class/net").join(interface.interface_name).join("bridge").exists();
        Some((is_bridge, ip))
    };
    let mut found: Vec<(bool, IpAddr)> = all.filter_map(address).collect();
    found.sort_by_key(|(is_bridge, _)| *is_bridge);
    found.into_iter().map(|(_, ip)| ip).collect()
}

/// The name under which a listening socket is kept for the next daemon.
fn kept_name(address: &Address) -> String {
    // A name cannot contain every character of a path. If two addresses differ only in those, they share a
    // name, and the second one is bound again.
    let plain = |c: char| if c.is_ascii_graphic() && !":=".contains(c) { c } else { '_' };
    let address: String = address.to_string().chars().map(plain).take(160).collect();
    format!("listen-{address}")
}

/// Closes sockets of the previous daemon that this one doesn't listen at.
pub(super) fn drop_others(server: &Server, inherited: &mut Inherited) {
    let options = &server.options;
    let metrics = match &options.metrics.listen {
        Some(Place::Unix(path)) => Some(path),
        _ => None,
    };
    let own = [options.admin_socket.as_ref(), options.status_socket.as_ref(), metrics];
    let own = own.into_iter().flatten().cloned().map(Address::Unix);
    let wanted: BTreeSet<String> = own.chain(options.listen.iter().cloned()).map(|a| kept_name(&a)).collect();
    for rest in inherited.names("listen-") {
        let name = format!("listen-{rest}");
        if !wanted.contains(&name) {
            drop(inherited.remove(&name));
            server.succession.store.forget(&name);
        }
    }
}

/// Whether the daemon could listen wherever its options say.
pub(super) fn check(options: &Serve, places: &Places) -> Result<(), String> {
    let mut paths = options.admin_socket.iter().chain(&options.status_socket);
    paths.try_for_each(|path| places.unix(path))?;
    match &options.metrics.listen {
        Some(Place::Unix(path)) => places.unix(path)?,
        Some(Place::Tcp(host, port)) => places.tcp(host, *port)?,
        None => {}
    }
    options.listen.iter().try_for_each(|address| match address {
        Address::Unix(path) => places.unix(path),
        Address::Tcp(host, port) => places.tcp(to_bind(host), *port),
    })
}

/// What to bind to for a host. "*" means all addresses of this machine, whose kernel may have no IPv6.
fn to_bind(host: &str) -> &str {
    match host {
        "*" if has_ipv6() => "::",
        "*" => {
            tracing::info!("this machine has no IPv6: tcp:* listens at its IPv4 addresses only");
            "0.0.0.0"
        }
        host => host,
    }
}

/// Whether this machine's kernel has IPv6.
fn has_ipv6() -> bool {
    let tried = TcpListener::bind("[::]:0");
    let error = tried.err().and_then(|e| e.raw_os_error());
    !error.is_some_and(|e| [libc::EAFNOSUPPORT, libc::EADDRNOTAVAIL].contains(&e))
}

/// Opens every listening socket and starts the thread that accepts from them.
pub(super) fn start(
    server: &Arc<Server>,
    inherited: &mut Inherited,
    files: &mut Files,
) -> anyhow::Result<()> {
    let mut listeners = Vec::new();
    for address in &server.options.listen {
        listeners.push(match address {
            Address::Unix(path) => Listener::Unix(bind_unix(server, path, 0o660, inherited, files)?),
            Address::Tcp(host, port) => {
                let listener = match inherited.remove(&kept_name(address)) {
                    Some(kept) => Ok(TcpListener::from(kept)),
                    None => TcpListener::bind((to_bind(host), *port)),
                };
                let listener = listener.with_context(|| format!("cannot listen at {address}"))?;
                server.succession.store.keep(&kept_name(address), &listener)?;
                Listener::Tcp(listener)
            }
        });
    }
    let greeter = Greeter::new(Arc::clone(server), listeners).context("preparing to listen")?;
    std::thread::Builder::new().name("rgpu-greet".into()).spawn(move || greeter.run())?;
    Ok(())
}

/// The previous daemon's Unix socket, or a new one with these permissions, which replaces a stale one.
pub(super) fn bind_unix(
    server: &Server,
    path: &Path,
    mode: u32,
    inherited: &mut Inherited,
    files: &mut Files,
) -> anyhow::Result<UnixListener> {
    let name = kept_name(&Address::Unix(path.to_owned()));
    // If its file was removed, nobody can reach it.
    let kept = inherited.remove(&name).filter(|_| path.exists()).map(UnixListener::from);
    let listens_there = |kept: &UnixListener| kept.local_addr().is_ok_and(|a| a.as_pathname() == Some(path));
    if let Some(kept) = kept.filter(listens_there) {
        files.0.push(path.to_owned());
        server.succession.store.keep(&name, &kept)?;
        // The previous daemon used it without blocking.
        kept.set_nonblocking(false)?;
        return Ok(kept);
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    }
    if let Ok(file) = path.symlink_metadata() {
        if !file.file_type().is_socket() {
            anyhow::bail!(
                "cannot listen at {}: exists and is not a socket; remove it or configure another path",
                path.display()
            );
        }
        if UnixStream::connect(path).is_ok() {
            anyhow::bail!(
                "cannot listen at {}: another process does already; end it or configure another path",
                path.display()
            );
        }
        std::fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?;
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    files.0.push(path.to_owned());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the mode of {}", path.display()))?;
    server.succession.store.forget(&name);
    server.succession.store.keep(&name, &listener)?;
    Ok(listener)
}

/// Serves the Unix socket at `path`, with these permissions, in a thread, one connection at a time.
pub(super) fn serve_unix(
    server: &Arc<Server>,
    (path, mode): (&Path, u32),
    thread: &str,
    (inherited, files): (&mut Inherited, &mut Files),
    serve: impl Fn(&Arc<Server>, UnixStream) + Send + 'static,
) -> anyhow::Result<()> {
    let listener = bind_unix(server, path, mode, inherited, files)?;
    let server = Arc::clone(server);
    std::thread::Builder::new().name(thread.into()).spawn(move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => serve(&server, stream),
                // Perhaps there are too many descriptors.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    })?;
    Ok(())
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }

    fn accept(&self) -> io::Result<Arrival> {
        let until = Instant::now() + HELLO_WITHIN;
        match self {
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let (peer, phase) = ("this host".into(), Phase::Plain(Vec::new()));
                Ok(Arrival { socket: Socket::Unix(stream), source: Source::Here, peer, until, phase })
            }
            Listener::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                // Messages here are short, and somebody waits for them.
                stream.set_nodelay(true)?;
                let peer = canonical(peer);
                let source = Source::of(peer.ip());
                let socket = Socket::Tcp(stream);
                Ok(Arrival { socket, source, peer: peer.to_string(), until, phase: Phase::First })
            }
        }
    }
}

/// A client's address. A socket for both kinds of addresses reports an IPv4 one as an IPv6 address.
pub(super) fn canonical(peer: SocketAddr) -> SocketAddr {
    SocketAddr::new(peer.ip().to_canonical(), peer.port())
}

/// Connections that are limited together: their source, and whether something has come on them.
type Group = (Source, bool);

/// A connection's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    /// This machine, over a Unix socket.
    Here,
    /// An IPv4 address.
    V4([u8; 4]),
    /// The first 64 bits of an IPv6 address: every host chooses the others freely.
    V6([u8; 8]),
}

impl Source {
    fn of(address: IpAddr) -> Source {
        match address {
            IpAddr::V4(address) => Source::V4(address.octets()),
            IpAddr::V6(address) => {
                let mut network = [0; 8];
                network.copy_from_slice(&address.octets()[..8]);
                Source::V6(network)
            }
        }
    }
}

enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Unix(stream) => stream.as_fd(),
            Socket::Tcp(stream) => stream.as_fd(),
        }
    }
}

/// A connection without a complete first message.
struct Arrival {
    socket: Socket,
    source: Source,
    peer: String,
    until: Instant,
    phase: Phase,
}

enum Phase {
    /// Nothing has arrived.
    First,
    /// Waiting for the complete first TLS message, which stays in the socket until it is known who gets it.
    ClientHello,
    /// The handshake, then the hello. At the end, how many bytes have come.
    Tls(Box<ServerConnection>, Vec<u8>, usize),
    /// The hello, without TLS.
    Plain(Vec<u8>),
}

/// The state of a connection after reading.
enum Step {
    /// The message is incomplete.
    More,
    /// The message, with or without TLS. A question may follow the hello.
    Said(Result<Box<(Hello, Vec<u8>)>, BadGreeting>),
    /// It uses TLS, and this server doesn't.
    SpeaksTls,
    /// It belongs to a session's worker.
    Session([u8; 16]),
    /// It was closed before anything came: a client keeps one ready, and has no use for it.
    Unused,
    /// It is closed, for this reason.
    Over(String),
}

impl Arrival {
    fn group(&self) -> Group {
        (self.source, !matches!(self.phase, Phase::First))
    }

    /// Reads what has arrived.
    fn advance(&mut self, server: &Server) -> Step {
        self.try_advance(server).unwrap_or_else(|e| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Step::More,
            _ => Step::Over(e.to_string()),
        })
    }

    fn try_advance(&mut self, server: &Server) -> io::Result<Step> {
        loop {
            let fd = self.socket.as_fd();
            match &mut self.phase {
                Phase::First => {
                    let mut first = [0];
                    let n = recv(fd.as_raw_fd(), &mut first, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT)?;
                    if n == 0 {
                        return Ok(Step::Unused);
                    }
                    self.phase = if first[0] == TLS { Phase::ClientHello } else { Phase::Plain(Vec::new()) };
                }
                Phase::ClientHello => {
                    let mut bytes = [0; MAX_CLIENT_HELLO];
                    let Some(trust) = &server.trust else {
                        // With unread data, the connection would be reset before the client reads the answer.
                        recv(fd.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT)?;
                        return Ok(Step::SpeaksTls);
                    };
                    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
                    let n = recv(fd.as_raw_fd(), &mut bytes, peek)?;
                    let mut acceptor = Acceptor::default();
                    let mut rest = &bytes[..n];
                    while !rest.is_empty() {
                        acceptor.read_tls(&mut rest)?;
                    }
                    let accepted = match acceptor.accept() {
                        Ok(Some(accepted)) => accepted,
                        // The buffer is full and the message is still incomplete.
                        Ok(None) if n == bytes.len() => {
                            return Ok(Step::Over("its first TLS message is too long".into()));
                        }
                        Ok(None) => return Ok(Step::More),
                        Err((e, mut alert)) => {
                            // It may be gone.
                            let _ = alert.write_all(&mut Now(fd));
                            return Ok(Step::Over(format!("it does not speak TLS as expected: {e}")));
                        }
                    };
                    // The daemon itself answers for an ended session.
                    let session = accepted.client_hello().server_name().and_then(session_of);
                    if let Some(session) = session.filter(|session| handshake::is_known(server, session)) {
                        return Ok(Step::Session(session));
                    }
                    // Consume what was peeked at.
                    let taken = recv(fd.as_raw_fd(), &mut bytes[..n], MsgFlags::MSG_DONTWAIT)?;
                    if taken != n {
                        return Err(io::ErrorKind::InvalidData.into());
                    }
                    match accepted.into_connection(trust.config()) {
                        Ok(tls) => self.phase = Phase::Tls(Box::new(tls), Vec::new(), 0),
                        Err((e, mut alert)) => {
                            let _ = alert.write_all(&mut Now(fd));
                            return Ok(Step::Over(format!("TLS: {e}")));
                        }
                    }
                    // Send the answer even if nothing more has arrived.
                    self.flush()?;
                }
                Phase::Tls(tls, said, came) => {
                    while !tls.is_handshaking() {
                        let mut part = [0; MAX_SAID];
                        let room = length(said) - said.len();
                        match tls.reader().read(&mut part[..room]) {
                            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                            Ok(n) => said.extend_from_slice(&part[..n]),
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                            Err(e) => return Err(e),
                        }
                        if let Some(step) = judge(said) {
                            return Ok(step);
                        }
                    }
                    match tls.read_tls(&mut Now(fd))? {
                        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                        n => *came += n,
                    }
                    if *came > MAX_UNDER_TLS {
                        return Ok(Step::Over(format!("it has sent {came} bytes and no hello")));
                    }
                    let processed = tls.process_new_packets();
                    // Also sends the alert that describes the error.
                    self.flush()?;
                    if let Err(e) = processed {
                        return Ok(Step::Over(format!("TLS: {e}")));
                    }
                }
                Phase::Plain(said) => {
                    let mut part = [0; MAX_SAID];
                    let room = length(said) - said.len();
                    match Now(fd).read(&mut part[..room])? {
                        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                        n => said.extend_from_slice(&part[..n]),
                    }
                    if let Some(step) = judge(said) {
                        return Ok(step);
                    }
                }
            }
        }
    }

    /// Sends TLS's output, all of which is short.
    fn flush(&mut self) -> io::Result<()> {
        let Phase::Tls(tls, ..) = &mut self.phase else { return Ok(()) };
        while tls.wants_write() {
            match tls.write_tls(&mut Now(self.socket.as_fd())) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::other("it does not read what it is sent"));
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The connection in the form that the rest of the daemon uses.
    fn into_control(self) -> Control {
        match (self.socket, self.phase) {
            (Socket::Unix(stream), _) => Control::Local(stream),
            (Socket::Tcp(stream), Phase::Tls(tls, ..)) => Control::tls(stream, *tls),
            (Socket::Tcp(stream), _) => Control::Tcp(stream),
        }
    }
}

/// Maximum size of a first message: a hello and a question.
const MAX_SAID: usize = size_of::<Hello>() + MAX_QUESTION as usize;

/// The size of the message, as far as known from what has arrived: a hello, and the question that it
/// announces.
fn length(said: &[u8]) -> usize {
    let question = match Hello::read_from_prefix(said) {
        Ok((hello, _)) if hello.purpose == purpose::ASK => hello.index.min(MAX_QUESTION) as usize,
        _ => 0,
    };
    size_of::<Hello>() + question
}

/// The hello, once enough has arrived to check it, and what follows it.
fn judge(said: &[u8]) -> Option<Step> {
    match greeting::<Hello>(said, &OURS) {
        Ok(None) => None,
        Ok(Some(_)) if said.len() < length(said) => None,
        Ok(Some((hello, _))) => Some(Step::Said(Ok(Box::new((hello, said[size_of::<Hello>()..].to_vec()))))),
        Err(BadGreeting::Magic(_)) => Some(Step::Over("it does not speak rgpu".into())),
        Err(bad) => Some(Step::Said(Err(bad))),
    }
}

/// A client with a token.
struct Join {
    connection: Arc<Control>,
    peer: String,
    hello: Hello,
    certificates: Vec<CertificateDer<'static>>,
}

impl Join {
    /// Redeems the token, unless the client has gone, and tells the client.
    fn serve(self, server: &Server) {
        let Join { connection, peer, hello, certificates } = self;
        let Some(trust) = server.trust.as_ref().filter(|_| !connection.is_closed()) else { return };
        let joined = trust.join(&certificates, &hello.secret);
        if let Ok((who, Some(key))) = &joined {
            let name = &who.name;
            tracing::warn!(peer, "{name} joins with another key; {key} is not accepted any more");
            server.audit.replaced(who, key, &peer);
        }
        handshake::serve(server, connection, &peer, &hello, Vec::new(), joined.map(|(who, _)| who));
    }
}

struct Greeter {
    server: Arc<Server>,
    /// To the thread that redeems tokens. It ends with this value.
    joins: SyncSender<Join>,
    epoll: Epoll,
    listeners: Vec<Listener>,
    /// By number, in order of arrival.
    silent: BTreeMap<u64, Arrival>,
    groups: HashMap<Group, BTreeSet<u64>>,
    next: u64,
}

/// Maximum number of events per call.
const EVENTS: usize = 64;
/// Maximum number of connections accepted from one listener before the others get their turn.
const ACCEPTS: usize = 32;

impl Greeter {
    fn new(server: Arc<Server>, listeners: Vec<Listener>) -> anyhow::Result<Greeter> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (number, listener) in (0..).zip(&listeners) {
            match listener {
                Listener::Unix(listener) => listener.set_nonblocking(true)?,
                Listener::Tcp(listener) => listener.set_nonblocking(true)?,
            }
            epoll.add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, number))?;
        }
        let next = listeners.len() as u64;
        let (joins, waiting) = sync_channel::<Join>(MAX_JOINS);
        let own = Arc::clone(&server);
        let redeem = move || waiting.iter().for_each(|join| join.serve(&own));
        std::thread::Builder::new().name("rgpu-join".into()).spawn(redeem)?;
        Ok(Greeter { server, joins, epoll, listeners, silent: BTreeMap::new(), groups: HashMap::new(), next })
    }

    fn run(mut self) {
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let timeout = match self.silent.first_key_value() {
                None => EpollTimeout::NONE,
                Some((_, oldest)) => {
                    let left = oldest.until.saturating_duration_since(Instant::now()).as_millis() + 1;
                    EpollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX))
                }
            };
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(nix::Error::EINTR) => 0,
                Err(e) => {
                    tracing::error!("cannot wait for connections: {e}");
                    std::thread::sleep(Duration::from_millis(100));
                    0
                }
            };
            for event in &events[..count] {
                match usize::try_from(event.data()).ok().filter(|at| *at < self.listeners.len()) {
                    Some(at) => self.accept(at),
                    None => self.advance(event.data()),
                }
            }
            self.close_late(Instant::now());
        }
    }

    fn accept(&mut self, at: usize) {
        // Another program is about to take over. New connections wait for it.
        if self.server.lock().closed {
            std::thread::sleep(Duration::from_millis(5));
            return;
        }
        for _ in 0..ACCEPTS {
            match self.listeners[at].accept() {
                Ok(arrival) => self.admit(arrival),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    tracing::warn!("cannot accept a connection: {e}");
                    // Most likely the process is out of descriptors. Some may be closed meanwhile.
                    std::thread::sleep(Duration::from_millis(100));
                    return;
                }
            }
        }
    }

    fn admit(&mut self, arrival: Arrival) {
        let number = self.next;
        self.next += 1;
        // Edge-triggered, because data that was peeked at may stay in the socket.
        let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        if let Err(e) = self.epoll.add(arrival.socket.as_fd(), EpollEvent::new(events, number)) {
            tracing::warn!(peer = arrival.peer, "cannot watch a connection: {e}");
            return;
        }
        let group = arrival.group();
        self.silent.insert(number, arrival);
        self.join(number, group);
        if self.silent.len() > MAX_SILENT {
            let busiest = self.groups.iter().max_by_key(|(_, all)| all.len()).map(|(group, _)| *group);
            busiest.inspect(|group| self.close_oldest(*group));
        }
        // Most have already sent something, for which there would be no event.
        self.advance(number);
    }

    /// Adds a connection to a group, and closes the oldest one of that if it has too many.
    fn join(&mut self, number: u64, group: Group) {
        let all = self.groups.entry(group).or_default();
        all.insert(number);
        if all.len() > MAX_SILENT_OF_ONE {
            self.close_oldest(group);
        }
    }

    fn leave(&mut self, number: u64, group: Group) {
        if let Some(all) = self.groups.get_mut(&group) {
            all.remove(&number);
            if all.is_empty() {
                self.groups.remove(&group);
            }
        }
    }

    fn close_oldest(&mut self, group: Group) {
        let oldest = self.groups.get(&group).and_then(|all| all.first().copied());
        if let Some(arrival) = oldest.and_then(|number| self.remove(number, group)) {
            tracing::debug!(peer = arrival.peer, "a silent connection was closed for a newer one");
        }
    }

    fn remove(&mut self, number: u64, group: Group) -> Option<Arrival> {
        let arrival = self.silent.remove(&number)?;
        self.leave(number, group);
        // It was registered; its descriptor may go to another process, which must not wake this one.
        let _ = self.epoll.delete(arrival.socket.as_fd());
        Some(arrival)
    }

    fn close_late(&mut self, now: Instant) {
        while let Some((number, oldest)) = self.silent.first_key_value() {
            if oldest.until > now {
                return;
            }
            let (number, group) = (*number, oldest.group());
            if let Some(arrival) = self.remove(number, group) {
                let seconds = HELLO_WITHIN.as_secs();
                self.closed(&arrival.peer, &format!("no hello within {seconds} s"));
            }
        }
    }

    /// Says why a connection was closed before anybody knew whose it is.
    fn closed(&self, peer: &str, why: &str) {
        if let Some(not_shown) = self.server.log_limits.strangers.allow() {
            tracing::info!(peer, "connection closed in its handshake: {why}{not_shown}");
        }
    }

    fn advance(&mut self, number: u64) {
        let Some(arrival) = self.silent.get_mut(&number) else { return };
        let before = arrival.group();
        let step = arrival.advance(&self.server);
        if matches!(step, Step::More) {
            let group = arrival.group();
            if group != before {
                self.leave(number, before);
                self.join(number, group);
            }
            return;
        }
        let Some(arrival) = self.remove(number, before) else { return };
        let peer = arrival.peer.clone();
        match step {
            Step::More => {}
            Step::Unused => tracing::debug!(peer, "connection closed before anything came"),
            Step::Over(why) => self.closed(&peer, &why),
            Step::SpeaksTls => {
                let reason = "this server does not speak TLS (--insecure)".to_owned();
                let refused = Refused(Reason::NoTls, reason);
                // Sent without TLS instead of TLS's answer, it tells the client that there is no TLS.
                self.server.refuse(&arrival.into_control(), None, &peer, "", "", &refused);
            }
            Step::Session(session) => {
                if let Err(why) = handshake::hand_over(&self.server, &session, arrival.socket.as_fd()) {
                    self.closed(&peer, &why);
                }
            }
            Step::Said(Err(BadGreeting::Version(mismatch))) => {
                let reason = mismatch.describe("the client speaks", "this server speaks");
                // The client's name is in a part of the hello whose position depends on the version.
                let refused = Refused(Reason::Version, reason);
                self.server.refuse(&arrival.into_control(), None, &peer, "", "", &refused);
            }
            Step::Said(Err(BadGreeting::Magic(_))) => {}
            Step::Said(Ok(said)) => {
                let (hello, question) = *said;
                if hello.purpose == purpose::JOIN && matches!(arrival.phase, Phase::Tls(..)) {
                    return self.redeem(arrival, hello);
                }
                let who = self.principal(&arrival);
                let connection = Arc::new(arrival.into_control());
                handshake::serve(&self.server, connection, &peer, &hello, question, who);
            }
        }
    }

    /// Has the token of a client redeemed.
    fn redeem(&self, arrival: Arrival, hello: Hello) {
        let certificates = match &arrival.phase {
            Phase::Tls(tls, ..) => tls.peer_certificates().unwrap_or_default(),
            _ => &[],
        };
        let certificates = certificates.iter().map(|certificate| certificate.clone().into_owned()).collect();
        let peer = arrival.peer.clone();
        let join = Join { peer, hello, certificates, connection: Arc::new(arrival.into_control()) };
        let Err(TrySendError::Full(join) | TrySendError::Disconnected(join)) = self.joins.try_send(join)
        else {
            return;
        };
        let refused = Refused(Reason::ServerFull, "too many clients are joining: try again".into());
        self.server.refuse(&join.connection, None, &join.peer, "", "", &refused);
    }

    /// The verified client, or why there is none.
    fn principal(&self, arrival: &Arrival) -> Result<Principal, String> {
        match (&arrival.socket, &arrival.phase, &self.server.trust) {
            (Socket::Unix(socket), ..) => Ok(Principal::of_socket(socket)),
            (_, Phase::Tls(tls, ..), Some(trust)) => {
                trust.principal(tls.peer_certificates().unwrap_or_default())
            }
            _ if self.server.options.insecure => Ok(Principal::of_address(&arrival.peer)),
            _ => Err("the server accepts no connection without TLS: join it with rgpuctl join and a token of rgpuctl enroll, and leave --insecure out; or start it with --insecure".into()),
        }
    }
}

#[cfg(test)]
mod tests;
