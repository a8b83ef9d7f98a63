//! Ways to wake a sleeper: an eventfd, or a futex on a shared word.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Wakes whoever polls it. Stays raised: it says that something has ended.
#[derive(Debug)]
pub(super) struct Bell(EventFd);

impl Bell {
    pub(super) fn new() -> io::Result<Bell> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Bell(EventFd::from_value_and_flags(0, flags)?))
    }

    pub(super) fn ring(&self) {
        // A full counter means that it is raised already.
        let _ = self.0.write(1);
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Adds 1 to an eventfd that somebody else made.
pub(super) fn ring(fd: &OwnedFd) {
    // A full counter, or a peer that is gone: nobody is left to wake.
    let _ = nix::unistd::write(fd, &1u64.to_ne_bytes());
}

/// Takes what an eventfd of somebody else's holds; it may be a blocking one, so it is read only when it is readable.
pub(super) fn drain(fd: &OwnedFd) {
    if readable(&[fd.as_fd()], Some(Duration::ZERO)).unwrap_or(false) {
        let _ = nix::unistd::read(fd, &mut [0; 8]);
    }
}

/// Waits until one of `fds` is readable (or broken). `Ok(false)`: the time is over.
pub(super) fn readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    let timeout = match timeout {
        None => PollTimeout::NONE,
        Some(t) => PollTimeout::try_from(t.as_millis().min(60_000) as u32).unwrap_or(PollTimeout::MAX),
    };
    match poll(&mut polled, timeout) {
        Ok(n) => Ok(n > 0),
        Err(nix::Error::EINTR) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Wakes every thread of every process that sleeps by futex on the word at `word`.
///
/// # Safety
/// `word` is 4-aligned and mapped.
pub(super) unsafe fn futex_wake_all(word: *const u32) {
    // SAFETY: FUTEX_WAKE only uses the address as a key; the caller answers for it. Not PRIVATE: the sleepers are other processes.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX, std::ptr::null::<u8>(), 0, 0) };
}
