//! A connection as the relay uses it: a stream that never waits.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{Shutdown, shutdown};

use crate::framing::watch_peer;
pub(super) use crate::stream::Gather;
use crate::stream::Stream;

/// A connected stream, non-blocking.
#[derive(Debug)]
pub(super) struct Socket(Stream);

impl Socket {
    pub(super) fn new(stream: Stream) -> io::Result<Socket> {
        stream.set_nonblocking(true)?;
        watch_peer(&stream);
        Ok(Socket(stream))
    }

    /// Sends from the gathered memory.
    ///
    /// # Safety
    /// Every run lies in memory that stays mapped during the call.
    pub(super) unsafe fn send(&self, gather: &mut Gather) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe { self.0.send(gather) }
    }

    /// Receives into the gathered memory. 0: the peer closed the connection.
    ///
    /// # Safety
    /// Every run lies in writable memory that stays mapped during the call and that no Rust reference covers.
    pub(super) unsafe fn receive(&self, gather: &mut Gather) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe { self.0.receive(gather) }
    }

    /// Sends bytes of our own.
    pub(super) fn send_bytes(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_bytes(bytes)
    }

    /// Whether bytes that were taken wait for room in the socket ([`flush`](Self::flush)).
    pub(super) fn has_output(&self) -> bool {
        self.0.has_output()
    }

    /// Sends bytes that were taken, as far as there is room.
    pub(super) fn flush(&self) -> io::Result<()> {
        match self.0.flush_output() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }

    /// Whether there is input of which no event tells.
    pub(super) fn has_input(&self) -> bool {
        self.0.has_input()
    }

    /// Waits for at most a second until something can be received (`input`) or sent, or the connection is
    /// broken.
    pub(super) fn wait(&self, input: bool) -> io::Result<()> {
        let what = if input { PollFlags::POLLIN } else { PollFlags::POLLOUT };
        match poll(&mut [PollFd::new(self.0.as_fd(), what)], 1000u16) {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Says that nothing more will be sent.
    pub(super) fn finish(&self) {
        let _ = shutdown(self.0.as_fd().as_raw_fd(), Shutdown::Write);
    }

    /// Gives memory [back](Stream::rest).
    pub(super) fn rest(&self) {
        self.0.rest();
    }

    /// Ends both directions at once, even if others hold the descriptor.
    pub(super) fn shut_down(&self) {
        self.0.shut_down();
    }
}

impl Read for &Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read_now(buf)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// `Ok(None)` for "not now", also when a signal came between.
pub(super) fn not_now(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(e) => Err(e),
    }
}
