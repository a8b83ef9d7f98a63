//! A client's connection while it is still the daemon's, and what the daemon tells the client over it.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, Shutdown, recv, send, sendmsg, shutdown};
use protocol::device::{Answer, text};
use protocol::link::{FrameHeader, Welcome, frame};
use rustls::ServerConnection;
use zerocopy::IntoBytes;

use super::host::host_name;
use super::refusals::Reason;
use crate::worker_protocol::Token;

/// A connection.
pub(super) enum Control {
    /// From a Unix socket.
    Local(UnixStream),
    /// From another machine, without TLS.
    Tcp(TcpStream),
    /// From another machine, under TLS.
    Tls(TcpStream, Box<Mutex<ServerConnection>>),
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Control::Local(stream) => stream.as_fd(),
            Control::Tcp(stream) | Control::Tls(stream, _) => stream.as_fd(),
        }
    }
}

impl Control {
    /// A TLS connection whose handshake is complete.
    pub(super) fn tls(stream: TcpStream, mut tls: ServerConnection) -> Control {
        // Only short messages are sent here, apart from answers.
        tls.set_buffer_limit(Some(64 << 10));
        Control::Tls(stream, Box::new(Mutex::new(tls)))
    }

    /// Whether it uses TLS. The daemon then keeps it, and the session opens other connections.
    pub(super) fn is_encrypted(&self) -> bool {
        matches!(self, Control::Tls(..))
    }

    /// Sends bytes. It is an error if the client has left so much unread that there is no room, and makes
    /// none for so long.
    pub(super) fn send(&self, bytes: &[u8], patience: Duration) -> io::Result<()> {
        let deadline = Instant::now() + patience;
        let when_there_is_room = |write: &mut dyn FnMut() -> io::Result<usize>| loop {
            match write() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait_for_room(deadline)?,
                written => return written,
            }
        };
        if let Control::Tls(stream, tls) = self {
            let mut tls = tls.lock().unwrap_or_else(|e| e.into_inner());
            if !patience.is_zero() {
                tls.set_buffer_limit(None);
            }
            tls.writer().write_all(bytes)?;
            while tls.wants_write() {
                when_there_is_room(&mut || tls.write_tls(&mut Now(stream.as_fd())))?;
            }
            return Ok(());
        }
        let mut left = bytes;
        while !left.is_empty() {
            let sent = when_there_is_room(&mut || Now(self.as_fd()).write(left))?;
            left = left.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    fn wait_for_room(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLOUT)], timeout)? {
            0 => Err(io::Error::new(io::ErrorKind::WouldBlock, "the client does not read")),
            _ => Ok(()),
        }
    }

    /// Sends a welcome without blocking.
    pub(super) fn send_welcome(&self, welcome: &Welcome) -> io::Result<()> {
        self.send(welcome.as_bytes(), Duration::ZERO)
    }

    /// The same with a descriptor, over a Unix socket.
    pub(super) fn send_welcome_with(&self, welcome: &Welcome, given: BorrowedFd<'_>) -> io::Result<()> {
        let (slices, given) = ([IoSlice::new(welcome.as_bytes())], [given.as_raw_fd()]);
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let rights = [ControlMessage::ScmRights(&given)];
        let sent = sendmsg::<()>(self.as_fd().as_raw_fd(), &slices, &rights, flags, None)?;
        if sent == size_of::<Welcome>() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// What has an event when the connection is closed.
    pub(super) fn hung_up(&self) -> PollFd<'_> {
        // Not POLLIN: what a client sends early is for its worker to read. nix has no name for this event.
        PollFd::new(self.as_fd(), PollFlags::from_bits_retain(libc::POLLRDHUP))
    }

    /// Whether the client has closed it.
    pub(super) fn is_closed(&self) -> bool {
        poll(&mut [self.hung_up()], PollTimeout::ZERO).is_ok_and(|events| events > 0)
    }

    /// Sends the answer to a question after a welcome. For an answer that is too long for the socket's
    /// buffer, such as a list of hundreds of leases, blocks so long until the client reads.
    pub(super) fn send_answer(&self, answer: &[u8], patience: Duration) -> io::Result<()> {
        let welcome = welcome(Answer::Ok, [0; 16], 0, "");
        let header = FrameHeader { kind: frame::ANSWER, len: answer.len() as u32 };
        self.send(&[welcome.as_bytes(), header.as_bytes(), answer].concat(), patience)
    }

    /// The transport's name, for the log and the status.
    pub(super) fn transport(&self) -> &'static str {
        match self {
            Control::Local(_) => "local",
            Control::Tcp(_) | Control::Tls(..) => "tcp",
        }
    }

    /// Tells the client that its session is over, on behalf of a worker that no longer can. Never blocks: a
    /// client that doesn't read notices that the connection closes.
    pub(super) fn bye(&self, reason: &str) {
        let header = FrameHeader { kind: frame::BYE, len: reason.len() as u32 };
        let _ = self.send(&[header.as_bytes(), reason.as_bytes()].concat(), Duration::ZERO);
        self.shut_down();
    }

    /// Closes the connection in both directions, which also wakes a thread that reads from it.
    pub(super) fn shut_down(&self) {
        // It may be closed already.
        let _ = shutdown(self.as_fd().as_raw_fd(), Shutdown::Both);
    }
}

/// A refusal: its reason, and a message.
pub(super) struct Refused(pub(super) Reason, pub(super) String);

/// A welcome or a refusal, as a message.
pub(super) fn welcome(answer: Answer, token: Token, data_connections: u32, reason: &str) -> Welcome {
    Welcome { token, data_connections, server: text(&host_name()), ..Welcome::new(answer, reason) }
}

/// A socket whose calls never block, whatever its mode.
pub(super) struct Now<'a>(pub(super) BorrowedFd<'a>);

impl Read for Now<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.0.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT)?)
    }
}

impl Write for Now<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use identity::{Identity, tls};

    /// More than a socket's buffer has room for.
    const LONG: usize = 4 << 20;

    /// What a client reads until the end.
    fn whole(client: &mut impl Read) -> usize {
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        all.len()
    }

    fn sends_long_answers(control: Control, mut client: impl Read + Send + 'static) {
        let read = std::thread::spawn(move || whole(&mut client));
        control.send_answer(&vec![7; LONG], test_kit::PATIENCE).unwrap();
        drop(control);
        assert_eq!(read.join().unwrap(), LONG + size_of::<Welcome>() + size_of::<FrameHeader>());
    }

    #[test]
    fn an_answer_may_be_longer_than_a_sockets_buffer() {
        let (server, client) = UnixStream::pair().unwrap();
        sends_long_answers(Control::Local(server), client);
    }

    #[test]
    fn an_answer_under_tls_may_be_longer_than_a_sockets_buffer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let (own, theirs) = (Identity::generate().unwrap(), Identity::generate().unwrap());
        let config = tls::client_pinning(&theirs, &[own.fingerprint()]).unwrap();
        let mut tls = rustls::ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
        let mut ours = ServerConnection::new(tls::server_for_anyone(&own).unwrap()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| tls.complete_io(&mut client).unwrap());
            ours.complete_io(&mut server).unwrap();
        });
        let control = Control::tls(server, ours);
        sends_long_answers(control, Encrypted(rustls::StreamOwned::new(tls, client)));
    }

    /// Ends where the connection does.
    struct Encrypted(rustls::StreamOwned<rustls::ClientConnection, TcpStream>);

    impl Read for Encrypted {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.read(buffer) {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
                read => read,
            }
        }
    }

    #[test]
    fn a_client_that_does_not_read_its_answer_is_not_waited_for_long() {
        let (server, _client) = UnixStream::pair().unwrap();
        let control = Control::Local(server);
        let failed = control.send_answer(&vec![7; LONG], Duration::from_millis(1)).unwrap_err();
        assert!(failed.to_string().contains("does not read"), "{failed}");
    }
}
