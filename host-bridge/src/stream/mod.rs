//! The bytes of a connection, as they are or encrypted by TLS 1.3.
//!
//! ```text
//!   plain   memory ─── one system call ───▶ socket
//!   TLS     memory ─── copied and sealed, record by record (records) ───▶ send     one copy more each way, made in the cache
//!           memory ◀── copied ◀── opened in place ◀── recv
//! ```
//!
//! Without TLS every method is one system call straight from or into the given memory. With TLS, rustls
//! shakes hands (`handshake`) and hands over the keys, and each direction then works by itself (`records`).
//! The socket may block or not: methods that never wait say so.
//!
//! A connection under TLS that ends without the peer's farewell was cut, perhaps by somebody else: that is an
//! error, where a plain one just ends.

mod gather;
mod handshake;
mod records;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};
use protocol::link::FrameHeader;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use zerocopy::{FromZeros, IntoBytes};

pub(crate) use self::gather::Gather;
use self::handshake::{Keys, Outcome};
use self::records::{MAX_SEALED, Opened, Receiving, Sending};
use crate::framing::check_len;

/// Records that are sealed before they are sent.
const BATCH: usize = 16;
/// Once a connection has carried nothing for this long, its memory for records is [given back](Stream::rest).
pub const QUIET: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 1000 });

/// A connected stream socket, with or without TLS. Every thread may use it; one that sends and one that
/// receives do not wait for each other.
pub struct Stream {
    socket: TcpStream,
    tls: Option<Box<Tls>>,
}

/// What TLS adds.
struct Tls {
    receiving: Mutex<Receiving>,
    sending: Mutex<Sending>,
    keys: Mutex<Keys>,
    /// The peer has asked for new keys.
    renew: AtomicBool,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({}, {})", self.socket.as_raw_fd(), if self.tls.is_some() { "TLS" } else { "plain" })
    }
}

impl From<TcpStream> for Stream {
    /// A connection without TLS.
    fn from(socket: TcpStream) -> Stream {
        Stream { socket, tls: None }
    }
}

impl From<OwnedFd> for Stream {
    /// A connection without TLS.
    fn from(socket: OwnedFd) -> Stream {
        Stream::from(TcpStream::from(socket))
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Copies as many bytes as `to` has room for. Gives their number.
fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let n = from.len().min(to.len());
    to[..n].copy_from_slice(&from[..n]);
    n
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// A connection that is closed already.
    pub fn closed() -> io::Result<Stream> {
        Ok(OwnedFd::from(UnixStream::pair()?.0).into())
    }

    /// Shakes hands as the client of a TLS connection, until `deadline` at most. `name` goes to the server in
    /// the clear; `config` decides whom to trust.
    pub fn tls_client(
        socket: OwnedFd,
        config: &Arc<ClientConfig>,
        name: ServerName<'static>,
        deadline: Instant,
    ) -> io::Result<Stream> {
        let outcome = handshake::client(socket.as_fd(), config, name, deadline)?;
        Ok(Stream { socket: socket.into(), tls: Some(Box::new(Tls::new(outcome))) })
    }

    /// Shakes hands as the server of a TLS connection, until `deadline` at most.
    pub fn tls_server(socket: OwnedFd, config: &Arc<ServerConfig>, deadline: Instant) -> io::Result<Stream> {
        let outcome = handshake::server(socket.as_fd(), config, deadline)?;
        Ok(Stream { socket: socket.into(), tls: Some(Box::new(Tls::new(outcome))) })
    }

    /// The socket of a connection without TLS; with TLS it is of no use without the keys.
    pub fn into_socket(self) -> OwnedFd {
        self.socket.into()
    }

    /// Whether the bytes are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether calls on the socket wait.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.socket.set_nonblocking(nonblocking)
    }

    /// Sends small messages at once. Sockets that are not TCP do so anyway.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self.socket.set_nodelay(true) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            result => result,
        }
    }

    /// How long a blocking send waits for a peer that takes nothing.
    pub fn set_write_timeout(&self, limit: Duration) -> io::Result<()> {
        self.socket.set_write_timeout(Some(limit))
    }

    /// How long a blocking receive waits; `None`: as long as it takes.
    pub fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(limit)
    }

    /// The peer's address, for messages.
    pub fn peer_addr(&self) -> io::Result<std::net::SocketAddr> {
        self.socket.peer_addr()
    }

    /// Ends both directions at once, even if others hold the descriptor. Threads that wait on it return.
    pub fn shut_down(&self) {
        if let Some(tls) = &self.tls
            && let Ok(mut sending) = tls.sending.try_lock()
            && !sending.is_pending()
            && sending.seal_close().is_ok()
        {
            // A peer that misses it finds the connection cut.
            let _ = self.flush(&mut sending, MsgFlags::MSG_DONTWAIT);
        }
        // It may be closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Sends from gathered memory, as much as the socket takes. With TLS it takes a number of whole records
    /// or nothing, and the last of them may wait in this process: see [`has_output`](Self::has_output).
    ///
    /// # Safety
    /// Every run lies in memory that stays mapped during the call.
    pub(crate) unsafe fn send(&self, gather: &mut Gather) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            let message = gather.message();
            // SAFETY: the caller's promise; the kernel reads the runs only during the call.
            let n = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
            return if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) };
        };
        let mut sending = lock(&tls.sending);
        self.flush(&mut sending, MsgFlags::empty())?;
        let mut sent = 0;
        for _ in 0..BATCH {
            tls.renew(&mut sending)?;
            // SAFETY: the caller's promise.
            let n = sending.seal(|room| unsafe { gather.copy_out(sent, room) })?;
            if n == 0 {
                break;
            }
            sent += n;
        }
        self.flush_some(&mut sending)?;
        Ok(sent)
    }

    /// Receives into gathered memory what there is. 0: the peer closed the connection.
    ///
    /// # Safety
    /// Every run lies in writable memory that stays mapped during the call and that no Rust reference covers.
    pub(crate) unsafe fn receive(&self, gather: &mut Gather) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            let mut message = gather.message();
            // SAFETY: the caller's promise; the kernel writes the runs only during the call.
            let n = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &mut message, 0) };
            return if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) };
        };
        let mut receiving = lock(&tls.receiving);
        let mut got = 0;
        self.receive_by(tls, &mut receiving, (MsgFlags::empty(), false), |bytes| {
            // SAFETY: the caller's promise.
            let n = unsafe { gather.copy_in(got, bytes) };
            got += n;
            n
        })
    }

    /// Sends bytes of our own, as [`send`](Self::send) does.
    pub(crate) fn send_bytes(&self, bytes: &[u8]) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            return Ok(send(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL)?);
        };
        let mut sending = lock(&tls.sending);
        self.flush(&mut sending, MsgFlags::empty())?;
        let mut sent = 0;
        for part in bytes.chunks(MAX_SEALED).take(BATCH) {
            tls.renew(&mut sending)?;
            sent += sending.seal(|room| copy(part, room))?;
        }
        self.flush_some(&mut sending)?;
        Ok(sent)
    }

    /// Whether sealed records wait for room in the socket. Then [`flush_output`](Self::flush_output) is to be
    /// called when there is some.
    pub(crate) fn has_output(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| lock(&tls.sending).is_pending())
    }

    /// Sends records that wait. `WouldBlock`: some still do.
    pub(crate) fn flush_output(&self) -> io::Result<()> {
        match &self.tls {
            Some(tls) => self.flush(&mut lock(&tls.sending), MsgFlags::empty()),
            None => Ok(()),
        }
    }

    /// Gives back the memory for records, which takes up to 257 KiB in each direction after long data, as far
    /// as it is not in use. To be called when the connection has carried nothing for [`QUIET`]: what comes
    /// then allocates anew. A thread that waits for input in [`read_whole`](Self::read_whole) does so itself.
    pub fn rest(&self) {
        let Some(tls) = &self.tls else { return };
        if let Ok(mut sending) = tls.sending.try_lock() {
            sending.give_back();
        }
        if let Ok(mut receiving) = tls.receiving.try_lock() {
            receiving.give_back();
        }
    }

    /// Whether bytes have come that the socket no longer tells of: they were received with others.
    pub fn has_input(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| {
            let receiving = lock(&tls.receiving);
            !receiving.plain().is_empty() || receiving.has_record()
        })
    }

    /// Receives what there is. 0: the peer closed the connection. Never waits: `WouldBlock`.
    pub(crate) fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_as(buffer, MsgFlags::MSG_DONTWAIT, false)
    }

    /// Receives as much as `buffer` takes, waiting for it; less at the connection's end, if a signal comes
    /// between, and with TLS. 0: the peer closed the connection. To be used on a socket that blocks.
    pub(crate) fn read_whole(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_as(buffer, if self.tls.is_some() { MsgFlags::empty() } else { MsgFlags::MSG_WAITALL }, true)
    }

    fn read_as(&self, buffer: &mut [u8], flags: MsgFlags, waits: bool) -> io::Result<usize> {
        let Some(tls) = &self.tls else { return Ok(recv(self.socket.as_raw_fd(), buffer, flags)?) };
        let mut receiving = lock(&tls.receiving);
        let mut got = 0;
        self.receive_by(tls, &mut receiving, (flags, waits), |bytes| {
            let n = bytes.len().min(buffer.len() - got);
            buffer[got..got + n].copy_from_slice(&bytes[..n]);
            got += n;
            n
        })
    }

    /// Whether a receive would not wait, because something has come or the connection is over.
    pub fn is_readable(&self) -> bool {
        self.has_input()
            || !matches!(
                recv(self.socket.as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT),
                Err(nix::Error::EAGAIN | nix::Error::EINTR)
            )
    }

    /// Sends `head` and then `tail`, all of both. To be used on a socket that blocks, by one thread at a
    /// time.
    pub fn write_both(&self, head: &[u8], tail: &[u8]) -> io::Result<()> {
        let Some(tls) = &self.tls else {
            let mut at = 0;
            while at < head.len() {
                match (&self.socket).write_vectored(&[IoSlice::new(&head[at..]), IoSlice::new(tail)]) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => at += n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
            return (&self.socket).write_all(&tail[at - head.len()..]);
        };
        let mut sending = lock(&tls.sending);
        let (mut head, mut tail) = (head, tail);
        while !head.is_empty() || !tail.is_empty() {
            for _ in 0..BATCH {
                tls.renew(&mut sending)?;
                let sealed = sending.seal(|room| {
                    let n = copy(head, room);
                    n + copy(tail, &mut room[n..])
                })?;
                let of_head = sealed.min(head.len());
                (head, tail) = (&head[of_head..], &tail[sealed - of_head..]);
                if sealed == 0 {
                    break;
                }
            }
            self.flush(&mut sending, MsgFlags::empty())?;
        }
        Ok(())
    }

    /// Sends all bytes. To be used on a socket that blocks.
    pub fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        match &self.tls {
            Some(_) => self.write_both(bytes, &[]),
            None => (&self.socket).write_all(bytes),
        }
    }

    /// Receives until `buffer` is full, waiting. To be used on a socket that blocks.
    pub fn read_exact(&self, buffer: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < buffer.len() {
            match self.read_whole(&mut buffer[at..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Sends one frame. To be used on a socket that blocks.
    pub fn send_frame(&self, kind: u32, parts: &[&[u8]]) -> io::Result<()> {
        let len = parts.iter().map(|part| part.len()).sum::<usize>() as u32;
        self.write_all(&[FrameHeader { kind, len }.as_bytes(), &parts.concat()].concat())
    }

    /// Receives one frame: its kind, its body in `body`. `Ok(None)`: the peer closed the connection instead.
    /// To be used on a socket that blocks.
    pub fn recv_frame(&self, body: &mut Vec<u8>) -> io::Result<Option<u32>> {
        self.frame_by(body, |buffer| self.read_exact(buffer))
    }

    /// The same, if all of it comes before the deadline.
    pub fn recv_frame_until(&self, body: &mut Vec<u8>, deadline: Instant) -> io::Result<Option<u32>> {
        self.frame_by(body, |buffer| Until(self, deadline).read_exact(buffer))
    }

    fn frame_by(
        &self,
        body: &mut Vec<u8>,
        mut read_exact: impl FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<Option<u32>> {
        let mut header = FrameHeader::new_zeroed();
        match read_exact(header.as_mut_bytes()) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof && !self.is_encrypted() => return Ok(None),
            result => result?,
        }
        check_len(header)?;
        body.clear();
        body.resize(header.len as usize, 0);
        read_exact(body)?;
        Ok(Some(header.kind))
    }

    /// Has a blocking receive wait until the deadline at most. The error: it has passed.
    pub(crate) fn receive_until(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"));
        }
        self.set_read_timeout(Some(left.max(Duration::from_millis(1))))
    }

    fn flush(&self, sending: &mut Sending, flags: MsgFlags) -> io::Result<()> {
        let flags = flags | MsgFlags::MSG_NOSIGNAL;
        sending.flush(|records| Ok(send(self.socket.as_raw_fd(), records, flags)?))
    }

    /// As [`flush`](Self::flush), where it is no error that some records have to wait.
    fn flush_some(&self, sending: &mut Sending) -> io::Result<()> {
        match self.flush(sending, MsgFlags::empty()) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }

    /// Receives records, on a socket that blocks. While it waits for them, nothing else can give memory back,
    /// so this does.
    fn receive_waiting(&self, receiving: &mut Receiving, flags: MsgFlags) -> nix::Result<usize> {
        let socket = self.socket.as_raw_fd();
        if receiving.has_grown() {
            match recv(socket, receiving.room(), flags | MsgFlags::MSG_DONTWAIT) {
                Err(nix::Error::EAGAIN) => {}
                result => return result,
            }
            let quiet = PollTimeout::try_from(QUIET).unwrap_or(PollTimeout::MAX);
            if poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], quiet) == Ok(0) {
                receiving.give_back();
            }
        }
        recv(socket, receiving.room(), flags)
    }

    /// Gives `take` data until it takes no more or there is no more, and receives if there was none, perhaps
    /// [waiting](Self::receive_waiting). `take` gives how much it took. The result is the sum; 0: the peer
    /// closed the connection.
    fn receive_by(
        &self,
        tls: &Tls,
        receiving: &mut Receiving,
        (flags, waits): (MsgFlags, bool),
        mut take: impl FnMut(&[u8]) -> usize,
    ) -> io::Result<usize> {
        let mut got = 0;
        loop {
            while !receiving.plain().is_empty() {
                let n = take(receiving.plain());
                receiving.take(n);
                got += n;
                if n == 0 {
                    return Ok(got);
                }
            }
            match receiving.open() {
                Ok(Opened::Data) => {}
                Ok(Opened::NewKeys(asked)) => {
                    receiving.renew(lock(&tls.keys).next_to_receive()?);
                    if asked {
                        tls.renew.store(true, Ordering::Release);
                    }
                }
                // What was taken is reported first; the same comes again with the next call.
                _ if got > 0 => return Ok(got),
                Ok(Opened::Closed) => return Ok(0),
                Ok(Opened::Nothing) => {
                    let came = if waits {
                        self.receive_waiting(receiving, flags)?
                    } else {
                        recv(self.socket.as_raw_fd(), receiving.room(), flags)?
                    };
                    if came == 0 {
                        let text = "the connection was cut: it ended without the peer's farewell";
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                    }
                    receiving.came(came);
                }
                Err(e) => return Err(e),
            }
        }
    }
}

impl Read for &Stream {
    /// Receives what there is; waits if the socket blocks.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_as(buffer, MsgFlags::empty(), false)
    }
}

/// Reads until a deadline, however little comes at a time.
struct Until<'a>(&'a Stream, Instant);

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.receive_until(self.1)?;
        (&mut &*self.0).read(buffer)
    }
}

/// Reads what there is and never waits, also on a socket that blocks.
pub(crate) struct Now<'a>(pub(crate) &'a Stream);

impl Read for Now<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read_now(buffer)
    }
}

impl Tls {
    fn new(outcome: Outcome) -> Tls {
        let Outcome { keys, receive: (first, decrypter), send: (next, sealer), limit } = outcome;
        Tls {
            receiving: Mutex::new(Receiving::new(decrypter, first)),
            sending: Mutex::new(Sending::new(sealer, next, limit)),
            keys: Mutex::new(keys),
            renew: AtomicBool::new(false),
        }
    }

    /// Takes new keys for sending if they are due: because the peer asked, or because these have sealed as
    /// much as they may.
    fn renew(&self, sending: &mut Sending) -> io::Result<()> {
        if !sending.is_worn() && !self.renew.load(Ordering::Acquire) {
            return Ok(());
        }
        self.renew.store(false, Ordering::Release);
        sending.seal_key_update()?;
        sending.renew(lock(&self.keys).next_to_send()?);
        Ok(())
    }
}
