//! A program at `vhost-rgpu`'s native socket. Errors are returned, so that a test can expect them.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use host_bridge::framing::recv_some;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, setsockopt,
    socket, sockopt,
};
use protocol::device::{Answer, Response, request};
use protocol::native::{MAGIC, Request};
use zerocopy::{FromBytes, IntoBytes};

use crate::PATIENCE;
use crate::channel::{Channel, in_a_file};

/// A request that makes a channel of `size` bytes; tests change its fields for other requests.
pub fn create_channel(size: u64) -> Request {
    Request {
        magic: MAGIC,
        version: protocol::VERSION,
        kind: request::CREATE_CHANNEL,
        region: 0,
        flags: 0,
        offset: 0,
        size,
    }
}

/// A connection to the native socket.
pub struct NativeClient(pub OwnedFd);

impl NativeClient {
    /// Connects to the socket at `path`.
    pub fn connect(path: &Path) -> io::Result<NativeClient> {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        let patience = nix::sys::time::TimeVal::new(PATIENCE.as_secs().cast_signed(), 0);
        setsockopt(&fd, sockopt::ReceiveTimeout, &patience)?;
        Ok(NativeClient(fd))
    }

    /// Connects to the socket at `path` and opens a channel with 1 MiB of arena for `program`, which must
    /// succeed.
    pub fn with_channel(path: &Path, program: &str) -> (NativeClient, Channel) {
        let client = NativeClient::connect(path).unwrap();
        let (file, view) = in_a_file(1 << 20, program);
        client.send(create_channel(view.geometry().size as u64).as_bytes(), &[&file]).unwrap();
        let (answer, reason, mut fds) = client.response().unwrap().unwrap();
        assert_eq!((answer, reason.as_str()), (Answer::Ok, ""));
        let doorbell = fds.pop().unwrap();
        let channel = Channel::new(view, move || {
            nix::unistd::write(&doorbell, &1u64.to_ne_bytes()).unwrap();
        });
        (client, channel)
    }

    /// Sends one packet of any bytes.
    pub fn send(&self, packet: &[u8], fds: &[&OwnedFd]) -> io::Result<()> {
        send_packet(&self.0, packet, fds)
    }

    /// The next response with its descriptors; `None` when the daemon has closed the connection.
    pub fn response(&self) -> io::Result<Option<(Answer, String, Vec<OwnedFd>)>> {
        let (mut packet, mut fds) = ([0; size_of::<Response>()], Vec::new());
        match recv_some(self.0.as_fd(), &mut packet, &mut fds) {
            Ok(0) => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            length => assert_eq!(length?, packet.len(), "a response of another size"),
        }
        let response = Response::read_from_bytes(&packet).unwrap();
        Ok(Some((Answer::from_number(response.status), response.reason(), fds)))
    }

    /// Sends a request and returns the answer and its reason.
    pub fn ask(&self, request: Request, fds: &[&OwnedFd]) -> io::Result<(Answer, String)> {
        self.send(request.as_bytes(), fds)?;
        let (answer, reason, _) = self.response()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((answer, reason))
    }

    /// Waits until the daemon closes the connection; false when it sends a packet instead.
    pub fn is_closed(&self) -> bool {
        matches!(self.response(), Ok(None))
    }
}

/// Sends one packet with descriptors over a seqpacket socket.
pub fn send_packet(socket: &OwnedFd, packet: &[u8], fds: &[&OwnedFd]) -> io::Result<()> {
    let raw: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(packet)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}
