//! Where another process comes from when the bridge's has ended: a socket of packets whose other end is kept by somebody who outlives both.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::socket::{Shutdown, shutdown};
use protocol::link::{FrameHeader, frame};
use zerocopy::IntoBytes;

use super::wake;
use crate::framing::recv_some;

/// The worker's end of the socket.
#[derive(Debug)]
pub(super) struct Succession(OwnedFd);

/// Who comes next.
#[derive(Debug)]
pub(super) enum Next {
    /// The connection with another process.
    Process(UnixStream),
    /// Nobody: the session ends.
    Nobody,
}

impl Succession {
    pub(super) fn new(socket: OwnedFd) -> Succession {
        Succession(socket)
    }

    /// Waits until somebody comes, or nobody can.
    pub(super) fn wait(&self) -> io::Result<Next> {
        let mut fds = Vec::new();
        let mut header = FrameHeader { kind: 0, len: 0 };
        loop {
            match recv_some(self.0.as_fd(), header.as_mut_bytes(), &mut fds) {
                Ok(0) => return Ok(Next::Nobody),
                Ok(_) if (header.kind, header.len, fds.len()) == (frame::TAKE_OVER, 0, 1) => {
                    return Ok(fds.pop().map_or(Next::Nobody, |fd| Next::Process(UnixStream::from(fd))));
                }
                Ok(_) => return Err(io::Error::other(format!("a packet of kind {}", header.kind))),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(Next::Nobody),
                Err(e) => return Err(e),
            }
        }
    }

    /// Who has come, or that nobody can come any more. `None`: not yet.
    pub(super) fn look(&self) -> io::Result<Option<Next>> {
        if wake::readable(&[self.0.as_fd()], Some(Duration::ZERO))? {
            self.wait().map(Some)
        } else {
            Ok(None)
        }
    }

    /// Ends a [`wait`](Self::wait).
    pub(super) fn stop(&self) {
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Read);
    }
}
