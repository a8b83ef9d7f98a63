//! The system calls of this transport: a non-blocking stream socket, and scattered client memory for vectored calls.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{Shutdown, shutdown};

use crate::framing::watch_peer;

/// The most runs in one system call.
const MAX_RUNS: usize = 64;

/// Memory for one vectored call: some of our own, some of the client's. The kernel copies; an address that has become invalid gives an error and
/// harms nobody.
pub(super) struct Gather {
    runs: [libc::iovec; MAX_RUNS],
    count: usize,
    bytes: usize,
}

impl Gather {
    pub(super) fn new() -> Gather {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Gather { runs: [none; MAX_RUNS], count: 0, bytes: 0 }
    }

    pub(super) fn clear(&mut self) {
        (self.count, self.bytes) = (0, 0);
    }

    /// Appends a run. False: there is no room for another.
    pub(super) fn push(&mut self, at: NonNull<u8>, len: usize) -> bool {
        if self.count == MAX_RUNS {
            return false;
        }
        if len > 0 {
            self.runs[self.count] = libc::iovec { iov_base: at.as_ptr().cast(), iov_len: len };
            self.count += 1;
            self.bytes += len;
        }
        true
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: an all-zero msghdr is valid: no name, no control data, no runs.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.runs.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }
}

/// A connected stream socket, non-blocking.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> io::Result<Socket> {
        let flags = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_GETFL)?;
        let flags = nix::fcntl::OFlag::from_bits_retain(flags) | nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        watch_peer(&fd);
        Ok(Socket(fd))
    }

    /// Sends from the gathered memory.
    ///
    /// # Safety
    /// Every run lies in memory that stays mapped during the call.
    pub(super) unsafe fn send(&self, gather: &mut Gather) -> io::Result<usize> {
        let message = gather.message();
        // SAFETY: the caller's promise; the kernel reads the runs only during the call.
        let n = unsafe { libc::sendmsg(self.0.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    /// Receives into the gathered memory. 0: the peer closed the connection.
    ///
    /// # Safety
    /// Every run lies in writable memory that stays mapped during the call and that no Rust reference covers.
    pub(super) unsafe fn receive(&self, gather: &mut Gather) -> io::Result<usize> {
        let mut message = gather.message();
        // SAFETY: the caller's promise; the kernel writes the runs only during the call.
        let n = unsafe { libc::recvmsg(self.0.as_raw_fd(), &mut message, 0) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    /// Sends bytes of our own.
    pub(super) fn send_bytes(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(nix::sys::socket::send(self.0.as_raw_fd(), bytes, nix::sys::socket::MsgFlags::MSG_NOSIGNAL)?)
    }

    /// Waits for at most a second until something can be received (`input`) or sent, or the connection is broken.
    pub(super) fn wait(&self, input: bool) -> io::Result<()> {
        let what = if input { PollFlags::POLLIN } else { PollFlags::POLLOUT };
        match poll(&mut [PollFd::new(self.0.as_fd(), what)], 1000u16) {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Ends both directions at once, even if others hold the descriptor.
    pub(super) fn shut_down(&self) {
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }
}

impl Read for &Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(nix::sys::socket::recv(self.0.as_raw_fd(), buf, nix::sys::socket::MsgFlags::empty())?)
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
