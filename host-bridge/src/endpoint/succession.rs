//! What is said to a worker beside its connection with the bridge: a socket of packets whose other end
//! outlives the bridge's process.
//!
//! Another process takes the place of one that has ended; and the client is stopped, and goes on. A thread of
//! its own reads it, because the connection's thread may wait for work of the client's.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::socket::{MsgFlags, Shutdown, send, shutdown};
use protocol::link::{FrameHeader, frame};
use zerocopy::IntoBytes;

use super::wake;
use crate::framing::recv_some;

/// The worker's end of the socket.
#[derive(Debug)]
pub(super) struct Succession {
    socket: OwnedFd,
    came: Sender<Next>,
    next: Mutex<Receiver<Next>>,
}

/// Who comes next.
#[derive(Debug)]
pub(super) enum Next {
    /// The connection with another process.
    Process(UnixStream),
    /// Nobody: the session ends.
    Nobody,
}

/// What is said.
#[derive(Debug)]
pub(super) enum Said {
    /// The client was stopped.
    Pause,
    /// It goes on.
    Continue,
    /// Another process brings its connection.
    TakeOver(UnixStream),
    /// Nobody is left who could say something.
    Nothing,
}

impl Succession {
    pub(super) fn new(socket: OwnedFd) -> Succession {
        let (came, next) = channel();
        Succession { socket, came, next: Mutex::new(next) }
    }

    /// What is said next, for the thread that listens. Waits up to `patience`; `None`: it is over.
    pub(super) fn hear(&self, patience: Option<Duration>) -> io::Result<Option<Said>> {
        let mut fds = Vec::new();
        let mut header = FrameHeader { kind: 0, len: 0 };
        loop {
            if patience.is_some() && !wake::readable(&[self.socket.as_fd()], patience)? {
                return Ok(None);
            }
            match recv_some(self.socket.as_fd(), header.as_mut_bytes(), &mut fds) {
                Ok(0) => return Ok(Some(Said::Nothing)),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(Some(Said::Nothing)),
                Err(e) => return Err(e),
            }
            return match (header.kind, header.len, fds.pop(), fds.len()) {
                (frame::TAKE_OVER, 0, Some(fd), 0) => Ok(Some(Said::TakeOver(UnixStream::from(fd)))),
                (frame::PAUSE, 0, None, 0) => Ok(Some(Said::Pause)),
                (frame::CONTINUE, 0, None, 0) => Ok(Some(Said::Continue)),
                _ => Err(io::Error::other(format!("a packet of kind {}", header.kind))),
            };
        }
    }

    /// Waits up to `patience` until there is something to hear.
    pub(super) fn is_spoken_to(&self, patience: Duration) -> bool {
        // What is wrong with the socket is heard, too.
        wake::readable(&[self.socket.as_fd()], Some(patience)).unwrap_or(true)
    }

    /// Passes on who comes next.
    pub(super) fn pass_on(&self, next: Next) {
        // The receiver is `self`'s.
        let _ = self.came.send(next);
    }

    /// The client's memory is not touched any more.
    pub(super) fn tell_paused(&self) {
        let packet = FrameHeader { kind: frame::PAUSED, len: 0 };
        // Somebody who does not read does not want to know.
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        let _ = send(self.socket.as_raw_fd(), packet.as_bytes(), flags);
    }

    /// Waits until somebody comes, or nobody can.
    pub(super) fn wait(&self) -> Next {
        self.next.lock().unwrap_or_else(PoisonError::into_inner).recv().unwrap_or(Next::Nobody)
    }

    /// Who has come, or that nobody can come any more. `None`: not yet.
    pub(super) fn look(&self) -> Option<Next> {
        match self.next.lock().unwrap_or_else(PoisonError::into_inner).try_recv() {
            Ok(next) => Some(next),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Next::Nobody),
        }
    }

    /// Ends a [`wait`](Self::wait).
    pub(super) fn stop(&self) {
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Read);
        self.pass_on(Next::Nobody);
    }
}
