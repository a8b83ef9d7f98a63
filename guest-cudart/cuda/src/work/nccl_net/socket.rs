//! The sockets of the network plugin: listening, connecting, and a connection that never blocks.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::work::nccl_net::frames::{Cookie, Frame, Malformed};
use crate::work::nccl_net::interfaces;
use client::lock;

/// Size of the handles that NCCL passes from the listening to the connecting process, in bytes.
pub(crate) const HANDLE: usize = 128;
/// First bytes of a handle.
const MAGIC: [u8; 8] = *b"rgpuNETh";
/// How many bytes are read from a socket at a time.
const READ: usize = 256 << 10;
/// A connection whose output waits is not given more than this many bytes ahead.
const AHEAD: usize = 1 << 20;
/// Strangers at a listening socket that may take their time to greet at the same time.
const STRANGERS: usize = 16;
/// How long a stranger may take to greet, and a closed connection to deliver its last bytes.
const WITHIN: Duration = Duration::from_secs(30);

/// Why there is no connection, or no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The peer, or the way to it.
    Peer(String),
    /// This end.
    Here(String),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Broken::Peer(why) | Broken::Here(why)) = self;
        f.write_str(why)
    }
}

impl From<io::Error> for Broken {
    fn from(e: io::Error) -> Broken {
        Broken::Peer(e.to_string())
    }
}

impl From<Malformed> for Broken {
    fn from(Malformed(what): Malformed) -> Broken {
        Broken::Peer(format!("the peer sent {what}"))
    }
}

/// Where a process listens, and what it expects to hear.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub address: SocketAddr,
    pub cookie: Cookie,
}

impl Place {
    /// As a handle of NCCL's.
    pub fn to_handle(self) -> [u8; HANDLE] {
        let (ip, scope) = match self.address {
            SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
            SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
        };
        let mut handle = [0; HANDLE];
        let fields: [&[u8]; 5] =
            [&MAGIC, &self.cookie, &ip.octets(), &scope.to_le_bytes(), &self.address.port().to_le_bytes()];
        for (to, from) in handle.iter_mut().zip(fields.concat()) {
            *to = from;
        }
        handle
    }

    /// What a handle says. `None`: it was made by another plugin.
    pub fn from_handle(handle: &[u8; HANDLE]) -> Option<Place> {
        let rest = handle.strip_prefix(&MAGIC)?;
        let (cookie, rest) = rest.split_first_chunk::<16>()?;
        let (ip, rest) = rest.split_first_chunk::<16>()?;
        let (scope, rest) = rest.split_first_chunk::<4>()?;
        let (port, _) = rest.split_first_chunk::<2>()?;
        let (ip, port) = (Ipv6Addr::from(*ip), u16::from_le_bytes(*port));
        let address = match ip.to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(IpAddr::V4(v4), port),
            None => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, u32::from_le_bytes(*scope))),
        };
        Some(Place { address, cookie: *cookie })
    }
}

/// A socket that listens for one peer.
pub(crate) struct Listener {
    socket: TcpListener,
    place: Place,
    strangers: Vec<(Connection, Instant)>,
}

impl Listener {
    /// Listens at an address of this machine that the user's variables allow.
    pub fn new() -> Result<Listener, Broken> {
        let [names, family] =
            ["NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"].map(|name| std::env::var(name).ok());
        let all = interfaces::all();
        let address = match interfaces::choose(&all, names.as_deref(), family.as_deref()) {
            Some(found) => found.address,
            None if names.is_none() => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            None => {
                let names = names.unwrap_or_default();
                return Err(Broken::Here(format!("no interface matches NCCL_SOCKET_IFNAME={names}")));
            }
        };
        let here = |e: io::Error| Broken::Here(format!("cannot listen at {address}: {e}"));
        let socket = TcpListener::bind(address).map_err(here)?;
        socket.set_nonblocking(true).map_err(here)?;
        let place = Place { address: socket.local_addr().map_err(here)?, cookie: random().map_err(here)? };
        Ok(Listener { socket, place, strangers: Vec::new() })
    }

    /// Where the peer connects.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The peer's connection, if it has come and greeted. Others are closed.
    pub fn accept(&mut self) -> Result<Option<Connection>, Broken> {
        while self.strangers.len() < STRANGERS {
            match self.socket.accept() {
                Ok((socket, _)) => self.strangers.push((Connection::new(socket)?, Instant::now())),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // One that has already gone.
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(e) => return Err(Broken::Here(format!("cannot accept a connection: {e}"))),
            }
        }
        let mut greeted = None;
        let cookie = self.place.cookie;
        self.strangers.retain_mut(|(connection, since)| {
            let heard = connection.read().and_then(|()| connection.take());
            match heard {
                Ok(Some(Frame::Hello(theirs))) if greeted.is_none() && same(&theirs, &cookie) => {
                    greeted = Some(std::mem::replace(connection, Connection::none()));
                    false
                }
                Ok(None) => !connection.is_over() && since.elapsed() < WITHIN,
                Ok(Some(_)) | Err(_) => false,
            }
        });
        Ok(greeted)
    }
}

/// Compares all bytes, whatever they are.
fn same(one: &Cookie, other: &Cookie) -> bool {
    one.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

fn random() -> io::Result<Cookie> {
    let mut cookie = Cookie::default();
    // SAFETY: writes that many bytes.
    match unsafe { libc::getrandom(cookie.as_mut_ptr().cast(), cookie.len(), 0) } {
        16 => Ok(cookie),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A socket on its way to a peer.
pub(crate) struct Connecting {
    socket: TcpStream,
    place: Place,
}

impl Connecting {
    /// Begins to connect.
    pub fn new(place: Place) -> Result<Connecting, Broken> {
        let broken = |e: io::Error| Broken::Peer(format!("cannot connect to {}: {e}", place.address));
        // SAFETY: zeros are valid for both; filled in below.
        let (mut v4, mut v6): (libc::sockaddr_in, libc::sockaddr_in6) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let (family, at, len) = match place.address {
            SocketAddr::V4(address) => {
                v4.sin_family = libc::AF_INET as libc::sa_family_t;
                v4.sin_port = address.port().to_be();
                v4.sin_addr.s_addr = u32::from(*address.ip()).to_be();
                (libc::AF_INET, (&raw const v4).cast::<libc::sockaddr>(), size_of_val(&v4))
            }
            SocketAddr::V6(address) => {
                v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                v6.sin6_port = address.port().to_be();
                v6.sin6_addr.s6_addr = address.ip().octets();
                v6.sin6_scope_id = address.scope_id();
                (libc::AF_INET6, (&raw const v6).cast::<libc::sockaddr>(), size_of_val(&v6))
            }
        };
        // SAFETY: makes a descriptor, which the next line owns.
        let socket =
            unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            return Err(broken(io::Error::last_os_error()));
        }
        // SAFETY: a new descriptor.
        let socket = TcpStream::from(unsafe { OwnedFd::from_raw_fd(socket) });
        // SAFETY: a live address of that size.
        let begun = unsafe { libc::connect(socket.as_raw_fd(), at, len as libc::socklen_t) };
        let error = io::Error::last_os_error();
        if begun < 0 && error.raw_os_error() != Some(libc::EINPROGRESS) {
            return Err(broken(error));
        }
        Ok(Connecting { socket, place })
    }

    /// Whether the connection is there.
    pub fn is_done(&self) -> Result<bool, Broken> {
        let mut wait = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one live entry; does not wait.
        if unsafe { libc::poll(&mut wait, 1, 0) } <= 0 {
            return Ok(false);
        }
        let failed = self.socket.take_error().unwrap_or_else(Some);
        match failed {
            Some(e) => Err(Broken::Peer(format!("cannot connect to {}: {e}", self.place.address))),
            None => Ok(true),
        }
    }

    /// The connection, which has greeted the peer.
    pub fn end(self) -> Result<Connection, Broken> {
        let mut connection = Connection::new(self.socket)?;
        connection.put(&Frame::Hello(self.place.cookie));
        connection.flush()?;
        Ok(connection)
    }
}

/// A connection. Nothing here blocks.
pub(crate) struct Connection {
    socket: Option<TcpStream>,
    peer: String,
    /// Room for [`READ`] bytes, made when it is first needed. What was read and not yet taken is between the
    /// two.
    came: Vec<u8>,
    taken: usize,
    end: usize,
    /// What is to be written: from `written` on.
    due: Vec<u8>,
    written: usize,
    /// Bytes written to the socket since the beginning.
    flushed: u64,
    /// The peer sends no more.
    over: bool,
}

impl Connection {
    fn new(socket: TcpStream) -> Result<Connection, Broken> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        watch(&socket);
        let peer = socket.peer_addr().map_or_else(|_| "a peer".into(), |address| address.to_string());
        let mut connection = Connection::none();
        (connection.socket, connection.peer, connection.over) = (Some(socket), peer, false);
        Ok(connection)
    }

    /// A connection that is closed.
    pub fn none() -> Connection {
        let (peer, came, due) = Default::default();
        Connection { socket: None, peer, came, taken: 0, end: 0, due, written: 0, flushed: 0, over: true }
    }

    /// Its peer, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the peer sends no more.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Reads what has come, as far as there is room for it.
    pub fn read(&mut self) -> Result<(), Broken> {
        let Some(socket) = self.socket.as_mut().filter(|_| !self.over) else { return Ok(()) };
        if self.came.is_empty() {
            self.came = vec![0; READ];
        }
        if self.taken > 0 {
            self.came.copy_within(self.taken..self.end, 0);
            self.end -= std::mem::take(&mut self.taken);
        }
        while self.end < READ {
            match socket.read(&mut self.came[self.end..]) {
                Ok(0) => {
                    self.over = true;
                    break;
                }
                Ok(n) => self.end += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// The next frame that was read.
    pub fn take(&mut self) -> Result<Option<Frame>, Broken> {
        let Some((frame, len)) = Frame::take(&self.came[self.taken..self.end])? else { return Ok(None) };
        self.taken += len;
        Ok(Some(frame))
    }

    /// What was read and is not yet taken, at most `most` bytes. They are taken.
    pub fn bytes(&mut self, most: usize) -> &[u8] {
        let from = self.taken;
        self.taken = from.saturating_add(most).min(self.end);
        &self.came[from..self.taken]
    }

    /// Bytes that were read and are not yet taken.
    pub fn unread(&self) -> usize {
        self.end - self.taken
    }

    /// Adds a frame to what is written.
    pub fn put(&mut self, frame: &Frame) {
        frame.put(&mut self.due);
    }

    /// Adds bytes to what is written, by a function that appends them.
    pub fn put_bytes(&mut self, fill: impl FnOnce(&mut Vec<u8>)) {
        if self.written >= AHEAD {
            self.due.drain(..std::mem::take(&mut self.written));
        }
        fill(&mut self.due);
    }

    /// Whether more bytes should be added now.
    pub fn has_room(&self) -> bool {
        self.due.len() - self.written < AHEAD
    }

    /// The number of the last byte that was added.
    pub fn end_of_due(&self) -> u64 {
        self.flushed + (self.due.len() - self.written) as u64
    }

    /// Whether the byte of this number was written to the socket.
    pub fn has_flushed(&self, upto: u64) -> bool {
        self.flushed >= upto
    }

    /// Writes as much as the socket takes.
    pub fn flush(&mut self) -> Result<(), Broken> {
        let Some(socket) = self.socket.as_mut() else { return Ok(()) };
        while self.written < self.due.len() {
            match socket.write(&self.due[self.written..]) {
                Ok(0) => return Err(Broken::Peer("the connection takes no more".into())),
                Ok(n) => {
                    self.written += n;
                    self.flushed += n as u64;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
        self.due.clear();
        self.written = 0;
        Ok(())
    }

    /// Tells the peer that this end has failed, and closes the connection.
    pub fn fail(&mut self, why: &Broken) {
        self.put(&Frame::Failed(why.to_string()));
        // The peer may be gone.
        let _ = self.flush();
        self.close();
    }

    /// Closes it. What was flushed still arrives.
    pub fn close(&mut self) {
        /// Closed sockets that are kept until the peer has closed its end: if one with unread bytes were
        /// closed now, the peer could lose the last bytes that were sent to it.
        static LINGERING: Mutex<Vec<(TcpStream, Instant)>> = Mutex::new(Vec::new());
        let mut lingering = lock(&LINGERING);
        if let Some(socket) = self.socket.take()
            && socket.shutdown(Shutdown::Write).is_ok()
        {
            lingering.push((socket, Instant::now()));
        }
        self.over = true;
        lingering.retain_mut(|(socket, since)| since.elapsed() < WITHIN && may_come(socket));
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

/// Reads and drops what has come. False: nothing more will come.
fn may_come(socket: &mut TcpStream) -> bool {
    let mut dropped = [0; 4096];
    loop {
        match socket.read(&mut dropped) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return e.kind() == ErrorKind::WouldBlock,
        }
    }
}

/// Makes the kernel notice a peer that is gone without a word.
fn watch(socket: &TcpStream) {
    let set = |level, name, value: libc::c_int| {
        // SAFETY: reads one int. A socket without the option works, too.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 10);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4);
    set(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 30_000);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "{what} does not come");
            std::thread::yield_now();
        }
    }

    fn pair() -> (Connection, Connection) {
        let mut listener = Listener::new().expect("a listener");
        let connecting = Connecting::new(listener.place()).expect("a connection");
        until("the connection", || connecting.is_done().expect("a connection").then_some(()));
        let sender = connecting.end().expect("a greeting");
        (sender, until("the greeting", || listener.accept().expect("a listener")))
    }

    #[test]
    fn a_handle_says_where_to_connect() {
        for address in ["10.1.2.3:4567", "[fd00::1]:80", "[fe80::1%7]:9"] {
            let place = Place { address: address.parse().expect("an address"), cookie: [7; 16] };
            assert_eq!(Place::from_handle(&place.to_handle()), Some(place));
        }
        assert_eq!(Place::from_handle(&[0; HANDLE]), None);
    }

    #[test]
    fn only_who_knows_the_cookie_is_accepted() {
        let mut listener = Listener::new().expect("a listener");
        let place = listener.place();
        let stranger = |hello: &[u8]| {
            let mut socket = TcpStream::connect(place.address).expect("a connection");
            socket.write_all(hello).expect("a socket");
            socket
        };
        let mut greeting = Vec::new();
        let mut other = place.cookie;
        other[15] ^= 1;
        Frame::Hello(other).put(&mut greeting);
        // Another cookie, another frame, nothing, half of a greeting, somebody else's protocol.
        let mut open = Vec::new();
        Frame::Open.put(&mut open);
        let silent = [stranger(&[]), stranger(&greeting[..20])];
        let mut refused =
            [stranger(&greeting), stranger(&open), stranger(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")];
        for socket in &mut refused {
            socket.set_nonblocking(true).expect("a socket");
            until("the end", || {
                assert!(listener.accept().expect("a listener").is_none());
                match socket.read(&mut [0]) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => None,
                    _ => Some(()),
                }
            });
        }
        // Nor do those who only keep it waiting keep others out.
        let connecting = Connecting::new(place).expect("a connection");
        until("the connection", || connecting.is_done().expect("a connection").then_some(()));
        let _sender = connecting.end().expect("a greeting");
        until("the greeting", || listener.accept().expect("a listener"));
        drop(silent);
    }

    #[test]
    fn many_bytes_pass_without_waiting() {
        let (mut sender, mut receiver) = pair();
        let sent: Vec<u8> = (0..5_000_000u32).map(|n| n as u8).collect();
        let (mut put, mut came) = (0, Vec::new());
        until("all bytes", || {
            while put < sent.len() && sender.has_room() {
                let part = &sent[put..sent.len().min(put + 100_000)];
                sender.put_bytes(|due| due.extend_from_slice(part));
                put += part.len();
            }
            sender.flush().expect("a socket");
            receiver.read().expect("a socket");
            came.extend_from_slice(receiver.bytes(usize::MAX));
            (came.len() == sent.len()).then_some(())
        });
        assert!(came == sent && sender.has_flushed(sender.end_of_due()));
    }

    #[test]
    fn what_was_flushed_before_the_end_arrives() {
        let (mut sender, mut receiver) = pair();
        // The peer's bytes, which nobody reads, don't cost the last ones.
        receiver.put(&Frame::Landed(1));
        receiver.flush().expect("a socket");
        sender.put(&Frame::Open);
        sender.flush().expect("a socket");
        drop(sender);
        let heard = until("the frame", || {
            receiver.read().expect("a socket");
            receiver.take().expect("a frame")
        });
        assert_eq!(heard, Frame::Open);
        until("the end", || {
            receiver.read().expect("a socket");
            receiver.is_over().then_some(())
        });
    }
}
