//! Moving the structures of [`protocol::link`] over sockets: addresses, whole messages with descriptors, and
//! frames out of a byte stream.
//!
//! Two styles, for the two ways in which the link is used: blocking ([`send_message`], [`recv_struct`],
//! [`recv_frame`]) during the handshake and on the control path of `local`; buffered and non-blocking
//! ([`FrameReader`]) in a relay's event loop.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, IoSlice, Read};
use std::net::{Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};
use protocol::link::{BadGreeting, DEFAULT_PORT, FrameHeader, Greeting, MAX_FRAME, Received, greeting};
use protocol::version::{Speaks, Version};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The most descriptors in one message: 62 memories, two eventfds and a socket.
pub const MAX_FDS: usize = 65;

/// Each second of silence in which an end must show that it is there, it says
/// [`ALIVE`](protocol::link::frame::ALIVE), or asks for it.
pub(crate) const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A Unix socket on this host.
    Unix(PathBuf),
    /// A host name or address, and a port.
    Tcp(String, u16),
}

/// Why a text is not an address.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is not an address: expected unix:PATH, tcp:HOST:PORT or HOST:PORT (port {DEFAULT_PORT} when left out)"
)]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(s: &str) -> Result<Self, AddressError> {
        let wrong = || AddressError(s.to_owned());
        if let Some(path) = s.strip_prefix("unix:") {
            return if path.is_empty() { Err(wrong()) } else { Ok(Address::Unix(path.into())) };
        }
        let rest = s.strip_prefix("tcp:").unwrap_or(s);
        let bare_v6 = rest.matches(':').count() > 1 && !rest.contains(']');
        // Behind a "%" is an interface.
        if bare_v6 && rest.split('%').next().is_none_or(|address| address.parse::<Ipv6Addr>().is_err()) {
            return Err(wrong());
        }
        let (host, port) = match rest.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') && !bare_v6 => {
                (host, port.parse().map_err(|_| wrong())?)
            }
            _ => (rest, DEFAULT_PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || host.contains('/') {
            Err(wrong())
        } else {
            Ok(Address::Tcp(host.to_owned(), port))
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
        }
    }
}

/// Has the kernel notice that the peer has vanished, about eleven seconds after its last packet, at no cost
/// to any process: by keepalive while nothing is under way, and by a limit for what was sent otherwise. Other
/// sockets than those of TCP have no such options and need none.
pub fn watch_peer(socket: &impl AsFd) {
    let _ = setsockopt(socket, sockopt::KeepAlive, &true);
    let _ = setsockopt(socket, sockopt::TcpKeepIdle, &5);
    let _ = setsockopt(socket, sockopt::TcpKeepInterval, &2);
    let _ = setsockopt(socket, sockopt::TcpKeepCount, &3);
    let _ = setsockopt(socket, sockopt::TcpUserTimeout, &11_000);
}

/// What the kernel knows of a TCP connection. `None` for another kind of socket.
fn tcp_info(socket: BorrowedFd<'_>) -> Option<libc::tcp_info> {
    // SAFETY: an all-zero `tcp_info` is valid: it is numbers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut size = size_of_val(&info) as libc::socklen_t;
    let to = std::ptr::from_mut(&mut info).cast();
    // SAFETY: a descriptor that is open, and a structure with its size, of which the kernel writes at most
    // that much.
    let answer =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &raw mut size) };
    (answer == 0).then_some(info)
}

/// A time in microseconds, of which none and all of them say that the kernel does not know it.
fn known(us: u32) -> Option<Duration> {
    (1..u32::MAX).contains(&us).then(|| Duration::from_micros(us.into()))
}

/// The kernel's smoothed round-trip time of a TCP connection. `None` for another kind of socket, or if
/// nothing was acknowledged yet.
pub(crate) fn round_trip(socket: BorrowedFd<'_>) -> Option<Duration> {
    known(tcp_info(socket)?.tcpi_rtt)
}

/// The shortest of recent minutes, which is the way's own: queues and an acknowledgement that waited do not
/// add to it.
pub(crate) fn shortest_round_trip(socket: BorrowedFd<'_>) -> Option<Duration> {
    let info = tcp_info(socket)?;
    known(info.tcpi_min_rtt).or_else(|| known(info.tcpi_rtt))
}

/// Where names were reached last by this process, by name and port.
static REACHED: Mutex<BTreeMap<(String, u16), SocketAddr>> = Mutex::new(BTreeMap::new());
/// Of how many names that is remembered. Who has so many servers loses nothing but this.
const MOST_REACHED: usize = 4096;

/// Connects over TCP, trying each address that the name has, with `timeout` for each. `TCP_NODELAY` is set.
///
/// If the name cannot be looked up, tries where it was reached last: whoever renews a lease, or goes on with
/// a session, must not lose it because a nameserver is away. A server is known by its key, not by its
/// address.
pub fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    connect_looked_up(host, port, timeout, || Ok((host, port).to_socket_addrs()?.collect()))
}

fn connect_looked_up(
    host: &str,
    port: u16,
    timeout: Duration,
    look_up: impl FnOnce() -> io::Result<Vec<SocketAddr>>,
) -> io::Result<TcpStream> {
    let reached = || REACHED.lock().unwrap_or_else(PoisonError::into_inner);
    let name = (host.to_owned(), port);
    let addresses = look_up().or_else(|e| reached().get(&name).map(|address| vec![*address]).ok_or(e))?;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                let mut reached = reached();
                if reached.len() < MOST_REACHED || reached.contains_key(&name) {
                    reached.insert(name, address);
                }
                return Ok(stream);
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// A peer's words for people: nothing in them may steer a terminal, or begin another line of a log.
pub fn without_control(words: &str) -> String {
    words.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// An error with its causes, in one line. A cause that the error's own text ends with is not repeated.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    let Some(cause) = error.source() else { return text };
    let causes = with_causes(cause);
    if text.ends_with(&causes) { text } else { format!("{text}: {causes}") }
}

/// Connects to a server. `timeout` counts for each address that a TCP name has.
pub fn connect(address: &Address, timeout: Duration) -> io::Result<OwnedFd> {
    Ok(match address {
        Address::Tcp(host, port) => connect_tcp(host, *port, timeout)?.into(),
        Address::Unix(path) => connect_unix(path)?.into(),
    })
}

/// Connects to a Unix stream socket.
pub fn connect_unix(path: &std::path::Path) -> io::Result<UnixStream> {
    UnixStream::connect(path)
}

/// Sends all of `parts`, one after the other, with the descriptors alongside the first byte. Blocking sockets
/// only.
pub fn send_message(socket: BorrowedFd<'_>, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let total: usize = parts.iter().map(|p| p.len()).sum();
    let mut sent = 0;
    while sent < total {
        let mut skip = sent;
        let mut slices = Vec::with_capacity(parts.len());
        for part in parts {
            let cut = skip.min(part.len());
            skip -= cut;
            if cut < part.len() {
                slices.push(IoSlice::new(&part[cut..]));
            }
        }
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if sent == 0 && !raw.is_empty() { &rights } else { &[] };
        match sendmsg::<()>(socket.as_raw_fd(), &slices, control, MsgFlags::MSG_NOSIGNAL, None) {
            Ok(n) => sent += n,
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Receives exactly `buf.len()` bytes; descriptors that come along are appended to `fds` (at most [`MAX_FDS`]
/// in all, others are closed). `Ok(false)`: the peer closed the connection before the first byte. Blocking
/// sockets only.
pub fn recv_exact(socket: BorrowedFd<'_>, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<bool> {
    let mut at = 0;
    while at < buf.len() {
        let n = match recv_some(socket, &mut buf[at..], fds) {
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        if n == 0 {
            let cut =
                io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection in mid-message");
            return if at == 0 { Ok(false) } else { Err(cut) };
        }
        at += n;
    }
    Ok(true)
}

/// One `recvmsg` into `buf`, descriptors taken (close-on-exec) as [`recv_exact`] does.
pub fn recv_some(socket: BorrowedFd<'_>, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    recv_with(socket, buf, fds, MsgFlags::empty())
}

/// Like [`recv_some`], and what was received stays the next to be received.
pub fn peek_some(socket: BorrowedFd<'_>, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    recv_with(socket, buf, fds, MsgFlags::MSG_PEEK)
}

fn recv_with(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: MsgFlags,
) -> io::Result<usize> {
    let (bytes, mut came) = recv_packet(socket, buf, MAX_FDS, flags)?;
    came.truncate(MAX_FDS.saturating_sub(fds.len()));
    fds.append(&mut came);
    Ok(bytes)
}

/// One `recvmsg` into `buf`: how many bytes came, and at most `most` descriptors that came along
/// (close-on-exec).
///
/// # Errors
/// If there are more of them, or if this process cannot open so many ([`lacks_descriptors`]): then none stays
/// open.
pub fn recv_packet(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    most: usize,
    flags: MsgFlags,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let size = (most * size_of::<RawFd>()) as u32;
    // SAFETY: these two only calculate. A header of control data is aligned like the numbers of this vector.
    let (room, len) = unsafe { (libc::CMSG_SPACE(size) as usize, libc::CMSG_LEN(size) as usize) };
    let mut control = vec![0_u64; room.div_ceil(size_of::<u64>())];
    let mut slice = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: an all-zero `msghdr` is valid: it names nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut slice, 1);
    // With the room of `CMSG_SPACE`, there would be one descriptor more if their number is odd.
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), len as _);
    let flags = (flags | MsgFlags::MSG_CMSG_CLOEXEC).bits();
    // SAFETY: an open descriptor, and a message that names `buf` and `control` with their sizes.
    let bytes = Errno::result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
    let mut came = Vec::new();
    // SAFETY: the kernel has filled in the message.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !at.is_null() {
        // SAFETY: a header within `control`, with which its data is, too.
        unsafe {
            if (*at).cmsg_level == libc::SOL_SOCKET && (*at).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(at).cast::<RawFd>();
                let count = ((*at).cmsg_len as usize - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                // The kernel has just installed these descriptors for us; nobody else knows them.
                came.extend((0..count).map(|n| OwnedFd::from_raw_fd(data.add(n).read_unaligned())));
            }
            at = libc::CMSG_NXTHDR(&raw const message, at);
        }
    }
    if message.msg_flags & libc::MSG_CTRUNC == 0 {
        Ok((bytes as usize, came))
    } else if came.len() >= most {
        let text = format!("a packet with more than {most} descriptors");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    } else {
        Err(Errno::EMFILE.into())
    }
}

/// Whether an error is that this process or its machine has no descriptors or memory left, for which the peer
/// cannot be blamed.
pub fn lacks_descriptors(error: &io::Error) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|number| lacks.contains(&Errno::from_raw(number)))
}

/// Receives a structure. `Ok(None)`: the peer closed the connection instead.
pub fn recv_struct<T: FromBytes + IntoBytes>(
    socket: BorrowedFd<'_>,
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Option<T>> {
    let mut value = T::new_zeroed();
    Ok(recv_exact(socket, value.as_mut_bytes(), fds)?.then_some(value))
}

/// Receives a greeting and judges it ([`greeting`]). Another major version is refused before the rest of it
/// has come.
pub fn recv_greeting<T: Greeting>(
    from: &mut impl Read,
    ours: &Speaks<'_>,
) -> io::Result<Result<(T, Version), BadGreeting>> {
    let mut bytes = vec![0; size_of::<T>()];
    let mut at = 0;
    while at < bytes.len() {
        match from.read(&mut bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        }
        match greeting(&bytes[..at], ours) {
            Ok(None) => {}
            Ok(Some(judged)) => return Ok(Ok(judged)),
            Err(refused) => return Ok(Err(refused)),
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// Sends one frame: header, then `parts` as its body.
pub fn send_frame(
    socket: BorrowedFd<'_>,
    kind: u32,
    parts: &[&[u8]],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let len = parts.iter().map(|p| p.len()).sum::<usize>() as u32;
    let header = FrameHeader { kind, len };
    let mut all = Vec::with_capacity(parts.len() + 1);
    all.push(header.as_bytes());
    all.extend_from_slice(parts);
    send_message(socket, &all, fds)
}

/// Receives one frame: its kind, its body in `body`. `Ok(None)`: the peer closed the connection instead.
pub fn recv_frame(
    socket: BorrowedFd<'_>,
    body: &mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Option<u32>> {
    let Some(header) = recv_struct::<FrameHeader>(socket, fds)? else { return Ok(None) };
    check_len(header)?;
    body.clear();
    body.resize(header.len as usize, 0);
    if header.len > 0 && !recv_exact(socket, body, fds)? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(header.kind))
}

pub(crate) fn check_len(header: FrameHeader) -> io::Result<()> {
    if header.len > MAX_FRAME {
        let text = format!("frame of kind {} with {} bytes, more than {MAX_FRAME}", header.kind, header.len);
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(())
}

/// The body of [`RESUMED`](protocol::link::frame::RESUMED): what has come of each stream.
pub(crate) fn resumed_body(received: &[u64]) -> Vec<u8> {
    let entry = |(stream, bytes): (u32, &u64)| Received { stream, reserved: 0, bytes: *bytes };
    (0..).zip(received).map(entry).flat_map(|entry| entry.as_bytes().to_vec()).collect()
}

/// The numbers in such a body of so many streams. `None`: it is none.
pub(crate) fn resumed_counts(body: &[u8], streams: usize) -> Option<Vec<u64>> {
    if body.len() != streams * size_of::<Received>() {
        return None;
    }
    let entries = (0..).zip(body.chunks(size_of::<Received>()));
    let number = |(number, entry)| {
        Received::read_from_bytes(entry).ok().filter(|entry| entry.stream == number).map(|entry| entry.bytes)
    };
    entries.map(number).collect()
}

/// A structure off the front of a frame's body, with the rest.
pub fn split_struct<T: FromBytes + Immutable>(body: &[u8]) -> io::Result<(T, &[u8])> {
    T::read_from_prefix(body).map_err(|_| {
        let text = format!("a frame of {} bytes where at least {} were expected", body.len(), size_of::<T>());
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Frames on their way to a peer: appended as they arise, sent together. Over a link that may be lost, what
/// was sent is kept until the peer has acknowledged it.
#[derive(Debug)]
pub struct SendBuffer {
    bytes: Vec<u8>,
    /// Bytes at the front that are not needed any more.
    done: usize,
    /// Bytes at the front that were sent; at least `done`.
    sent: usize,
    /// Where in the stream `bytes` begins.
    begin: u64,
    /// Sent bytes are kept until they are acknowledged.
    keeps: bool,
}

/// A frame that is being written into a [`SendBuffer`].
#[derive(Debug)]
#[must_use = "the frame has no length before it is finished"]
pub struct OpenFrame(usize);

impl SendBuffer {
    /// Unsent bytes above which [`has_room`](Self::has_room) says no.
    const HIGH_WATER: usize = 256 << 10;
    /// Bytes, sent or not, above which it says no.
    const MOST_KEPT: usize = 4 << 20;

    /// An empty buffer that forgets what was sent.
    #[allow(clippy::new_without_default, reason = "it allocates")]
    pub fn new() -> SendBuffer {
        let bytes = Vec::with_capacity(2 * Self::HIGH_WATER);
        SendBuffer { bytes, done: 0, sent: 0, begin: 0, keeps: false }
    }

    /// An empty buffer that keeps what was sent until it is [acknowledged](Self::acknowledge).
    pub fn keeping() -> SendBuffer {
        SendBuffer { keeps: true, ..SendBuffer::new() }
    }

    /// A buffer that [keeps](Self::keeping) what was sent, of a stream of which `bytes` were sent from
    /// `begin` on.
    pub(crate) fn restored(begin: u64, bytes: Vec<u8>) -> SendBuffer {
        SendBuffer { sent: bytes.len(), bytes, done: 0, begin, keeps: true }
    }

    /// Whether more may be appended without piling up.
    pub fn has_room(&self) -> bool {
        self.unsent().len() < Self::HIGH_WATER && self.kept() < Self::MOST_KEPT
    }

    /// Whether everything was sent.
    pub fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// The bytes that wait to be sent.
    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Bytes that wait to be sent or to be acknowledged.
    pub fn kept(&self) -> usize {
        self.bytes.len() - self.done
    }

    /// Bytes appended since the stream began.
    pub fn appended(&self) -> u64 {
        self.begin + self.bytes.len() as u64
    }

    /// Takes note that the first `n` unsent bytes were sent.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn advance(&mut self, n: usize) {
        assert!(n <= self.unsent().len());
        self.sent += n;
        if !self.keeps {
            self.forget(self.sent);
        }
    }

    /// The peer has received the stream's first `upto` bytes. (A smaller number than before is old news.) The
    /// error: so many were not sent.
    pub fn acknowledge(&mut self, upto: u64) -> Result<(), BadAcknowledgement> {
        let sent = self.begin + self.sent as u64;
        if upto > sent {
            return Err(BadAcknowledgement { upto, sent });
        }
        let done = upto.saturating_sub(self.begin) as usize;
        if done > self.done {
            self.forget(done);
        }
        Ok(())
    }

    /// The peer goes on behind the stream's first `received` bytes, over a new connection: what follows them
    /// counts as not sent. The error: it had acknowledged more before, or so many were not sent.
    pub fn resume(&mut self, received: u64) -> Result<(), BadAcknowledgement> {
        if received < self.begin + self.done as u64 {
            return Err(BadAcknowledgement { upto: received, sent: self.begin + self.sent as u64 });
        }
        self.acknowledge(received)?;
        self.sent = self.done;
        Ok(())
    }

    /// The first `done` bytes are not needed any more.
    fn forget(&mut self, done: usize) {
        self.done = done;
        if done == self.bytes.len() || done >= Self::HIGH_WATER {
            self.bytes.drain(..done);
            self.begin += done as u64;
            self.sent -= done;
            self.done = 0;
        }
    }

    /// Where to append bytes.
    pub fn end(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Begins a frame: its header, whose length [`finish`](Self::finish) fills in. Its body is appended at
    /// the [`end`](Self::end); nothing is sent in between.
    pub fn begin(&mut self, kind: u32) -> OpenFrame {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(FrameHeader { kind, len: 0 }.as_bytes());
        OpenFrame(at)
    }

    /// Ends a frame.
    pub fn finish(&mut self, OpenFrame(at): OpenFrame) {
        let len = (self.bytes.len() - at - size_of::<FrameHeader>()) as u32;
        self.bytes[at + 4..at + 8].copy_from_slice(&len.to_le_bytes());
    }

    /// Appends a whole frame.
    pub fn frame(&mut self, kind: u32, body: &[u8]) {
        let frame = self.begin(kind);
        self.bytes.extend_from_slice(body);
        self.finish(frame);
    }
}

/// The peer acknowledges what it cannot have received, or takes back what it has acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{upto} bytes of a stream are acknowledged of which {sent} were sent")]
pub struct BadAcknowledgement {
    /// What it says that it has.
    pub upto: u64,
    /// What was sent.
    pub sent: u64,
}

/// Frames out of a byte stream that is read as it comes. It holds at most one frame and what was read beyond
/// it.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes that the next read has room for, at least.
    room: usize,
}

/// Bytes of a read: so many at first, twice as many after one that took all its room, up to so many. A peer
/// that is ahead then costs a system call, and an acknowledgement that wakes it, for each of the larger
/// pieces.
const READ: (usize, usize) = (64 << 10, 1 << 20);

impl FrameReader {
    /// An empty reader.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that have been read and not yet taken as frames.
    pub fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Reads once from `socket`. `Ok(0)`: the peer closed the connection; `WouldBlock` as usual.
    pub fn fill(&mut self, socket: &mut impl Read) -> io::Result<usize> {
        let room = self.room.max(READ.0);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start > 0 && self.buffer.len() - self.end < room {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.buffer.len() - self.end < room {
            self.buffer.resize((self.end + room).max(self.buffer.len()), 0);
        }
        let n = socket.read(&mut self.buffer[self.end..])?;
        self.room = if self.end + n == self.buffer.len() { (2 * room).min(READ.1) } else { room };
        self.end += n;
        Ok(n)
    }

    /// The next whole frame, if it is there. The body is valid until the next call of a method.
    pub fn next_frame(&mut self) -> io::Result<Option<(u32, &[u8])>> {
        let held = &self.buffer[self.start..self.end];
        let Ok((header, rest)) = FrameHeader::read_from_prefix(held) else { return Ok(None) };
        check_len(header)?;
        let len = header.len as usize;
        if rest.len() < len {
            return Ok(None);
        }
        let at = self.start + size_of::<FrameHeader>();
        self.start = at + len;
        Ok(Some((header.kind, &self.buffer[at..at + len])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_cannot_be_looked_up_is_where_it_was_last() {
        let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listening.local_addr().unwrap();
        let connect = |host: &str, found: io::Result<Vec<SocketAddr>>| {
            connect_looked_up(host, 1, Duration::from_secs(60), || found)
        };
        let none = || Err(io::Error::other("no nameserver"));
        assert!(connect("gpu1", none()).is_err(), "nobody knows where that is");
        connect("gpu1", Ok(vec![address])).unwrap();
        assert_eq!(connect("gpu1", none()).unwrap().peer_addr().unwrap(), address);
        assert!(connect("gpu2", none()).is_err(), "another name");
        assert!(connect("gpu1", Ok(Vec::new())).is_err(), "it has no address any more");
    }

    #[test]
    fn no_descriptor_of_a_packet_that_has_too_many_stays_open() {
        use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
        let pair = || socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
        let (ours, theirs) = pair().unwrap();
        // A pipe's other end says when nobody has it any more.
        let (held, passed) = nix::unistd::pipe().unwrap();
        let mut bytes = [0; 4];
        for count in [5, 6, 7, 100] {
            send_message(theirs.as_fd(), &[b"many"], &vec![passed.as_fd(); count]).unwrap();
            let received = recv_packet(ours.as_fd(), &mut bytes, 5, MsgFlags::empty());
            match received {
                Ok((4, fds)) => assert_eq!((count, fds.len()), (5, 5)),
                other => {
                    let error = other.unwrap_err();
                    assert!(count > 5 && error.kind() == io::ErrorKind::InvalidData, "{count}: {error}");
                    assert!(!lacks_descriptors(&error), "{error}");
                }
            }
        }
        send_message(theirs.as_fd(), &[b"many"], &vec![passed.as_fd(); MAX_FDS + 3]).unwrap();
        assert!(recv_some(ours.as_fd(), &mut bytes, &mut Vec::new()).is_err());
        drop(passed);
        // Reads the end of the pipe, and does not wait for somebody who still has the other one.
        nix::fcntl::fcntl(&held, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
        assert_eq!(nix::unistd::read(&held, &mut bytes), Ok(0));
    }

    #[test]
    fn addresses_read_and_print() {
        for (text, want) in [
            ("unix:/run/rgpu/server.sock", Address::Unix("/run/rgpu/server.sock".into())),
            ("tcp:gpu1:9701", Address::Tcp("gpu1".into(), 9701)),
            ("gpu1", Address::Tcp("gpu1".into(), DEFAULT_PORT)),
            ("10.0.0.1:1", Address::Tcp("10.0.0.1".into(), 1)),
            ("tcp:[::1]:9700", Address::Tcp("::1".into(), 9700)),
            ("[fe80::1]", Address::Tcp("fe80::1".into(), DEFAULT_PORT)),
            ("::1", Address::Tcp("::1".into(), DEFAULT_PORT)),
            ("fe80::1%eth0", Address::Tcp("fe80::1%eth0".into(), DEFAULT_PORT)),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address, want, "{text}");
            assert_eq!(address.to_string().parse(), Ok(want));
        }
        let wrong =
            ["", "unix:", "tcp:", "host:port", "host:99999", "/run/x.sock", "host:9700:1", "tcp:tcp:host:1"];
        for text in wrong {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_cause_that_the_text_has_already_is_not_repeated() {
        #[derive(Debug, thiserror::Error)]
        enum Outer {
            #[error("it failed")]
            Without(#[source] io::Error),
            #[error("it failed: {0}")]
            With(#[source] io::Error),
        }
        let cause = || io::Error::from_raw_os_error(111);
        let whole = format!("it failed: {}", cause());
        assert_eq!(with_causes(&Outer::Without(cause())), whole);
        assert_eq!(with_causes(&Outer::With(cause())), whole);
    }

    #[test]
    fn a_frame_carries_its_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile_fd();
        send_frame(a.as_fd(), 7, &[b"one", b"two"], &[file.as_fd()]).unwrap();
        let (mut body, mut fds) = (Vec::new(), Vec::new());
        assert_eq!(recv_frame(b.as_fd(), &mut body, &mut fds).unwrap(), Some(7));
        assert_eq!((body.as_slice(), fds.len()), (&b"onetwo"[..], 1));
        drop(a);
        assert_eq!(recv_frame(b.as_fd(), &mut body, &mut fds).unwrap(), None);
    }

    fn tempfile_fd() -> OwnedFd {
        nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap()
    }

    #[test]
    fn frames_come_whole_however_the_stream_is_cut() {
        let mut stream = Vec::new();
        for (kind, len) in [(1u32, 0u32), (2, 5), (3, 200_000), (4, 1)] {
            stream.extend_from_slice(FrameHeader { kind, len }.as_bytes());
            stream.extend((0..len).map(|i| (i * kind) as u8));
        }
        for step in [1, 7, 8, 9, 4096, 1 << 20] {
            let mut reader = FrameReader::new();
            let mut got = Vec::new();
            for piece in stream.chunks(step) {
                let mut piece = piece;
                while !piece.is_empty() {
                    reader.fill(&mut piece).unwrap();
                    while let Some((kind, body)) = reader.next_frame().unwrap() {
                        assert!(body.iter().enumerate().all(|(i, b)| *b == (i as u32 * kind) as u8));
                        got.push((kind, body.len()));
                    }
                }
            }
            assert_eq!(got, [(1, 0), (2, 5), (3, 200_000), (4, 1)], "step {step}");
        }
    }

    #[test]
    fn what_was_sent_is_kept_until_it_is_acknowledged_and_sent_again_from_any_byte() {
        let mut buffer = SendBuffer::keeping();
        buffer.frame(1, b"first");
        buffer.frame(2, b"second");
        let all = buffer.unsent().to_vec();
        buffer.advance(all.len() - 3);
        assert!(buffer.acknowledge(all.len() as u64).is_err(), "not all was sent");
        buffer.acknowledge(4).unwrap();
        buffer.acknowledge(2).unwrap();
        assert!(buffer.resume(3).is_err(), "it had four bytes");
        for received in 4..all.len() - 3 {
            buffer.resume(received as u64).unwrap();
            assert_eq!(buffer.unsent(), &all[received..]);
            buffer.advance(all.len() - 3 - received);
        }
        buffer.advance(3);
        assert_eq!((buffer.is_empty(), buffer.kept() > 0), (true, true));
        buffer.acknowledge(all.len() as u64).unwrap();
        assert_eq!((buffer.kept(), buffer.appended()), (0, all.len() as u64));
        buffer.frame(3, &[]);
        assert!(buffer.acknowledge(buffer.appended()).is_err());
        assert_eq!(buffer.unsent().len(), 8);
    }

    #[test]
    fn what_has_come_of_each_stream_reads_as_it_was_written() {
        let body = resumed_body(&[7, 0, u64::MAX]);
        assert_eq!(resumed_counts(&body, 3), Some(vec![7, 0, u64::MAX]));
        assert_eq!((resumed_counts(&body, 2), resumed_counts(&body[1..], 3)), (None, None));
        assert_eq!(resumed_counts(&resumed_body(&[1]).repeat(2), 2), None, "both are of stream 0");
    }

    #[test]
    fn a_peer_that_is_ahead_is_read_in_large_pieces() {
        let stream = [FrameHeader { kind: 1, len: 92 }.as_bytes(), &[7; 92]].concat().repeat(200_000);
        let (mut reader, mut rest) = (FrameReader::new(), stream.as_slice());
        let (mut reads, mut frames) = (0, 0);
        while !rest.is_empty() {
            reader.fill(&mut rest).unwrap();
            reads += 1;
            while reader.next_frame().unwrap().is_some() {
                frames += 1;
            }
        }
        assert_eq!(frames, 200_000);
        assert!(reads < 30, "{reads} reads for {} MB", stream.len() / 1_000_000);
    }

    #[test]
    fn an_endless_frame_is_refused_before_it_is_read() {
        let mut reader = FrameReader::new();
        let header = FrameHeader { kind: 1, len: MAX_FRAME + 1 };
        reader.fill(&mut header.as_bytes()).unwrap();
        assert!(reader.next_frame().unwrap_err().to_string().contains("more than"));
    }
}
