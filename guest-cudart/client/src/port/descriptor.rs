//! This process's descriptors among the program's own.
//!
//! A program may have closed descriptors 0 to 2 and still write to them, may close descriptors that are not
//! its own, and may cancel a thread (`pthread_cancel`) that is in a call.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use protocol::channel::MAX_SERVERS;

/// The first number that is not that of a standard stream.
const FIRST: RawFd = 3;

/// Owns what a system call returned: a new descriptor, which nothing else owns, or -1. It gets another number
/// if it has that of a standard stream.
pub(crate) fn own(result: RawFd) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller guarantees that nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(result) };
    if result >= FIRST {
        return Ok(fd);
    }
    // SAFETY: plain system calls; nothing else owns the copy.
    unsafe {
        let copy = libc::fcntl(result, libc::F_DUPFD_CLOEXEC, FIRST);
        if copy < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(copy)) }
    }
}

/// While it exists, the calling thread cannot be cancelled. Cancellation would unwind through functions that
/// C programs call, which ends the process.
pub struct Uncancelled {
    before: libc::c_int,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

impl Uncancelled {
    /// Begins such a section.
    #[must_use]
    pub fn begin() -> Uncancelled {
        const PTHREAD_CANCEL_DISABLE: libc::c_int = 1;
        let mut before = 0;
        // SAFETY: the old state is written to a live variable.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Uncancelled { before }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: the state that the thread had before.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// The descriptors that a forked child closes. It only calls `fstat` and `close`, which are allowed between
/// fork and exec.
#[derive(Debug)]
pub struct ForChild([Entry; 4 * MAX_SERVERS]);

#[derive(Debug)]
struct Entry {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl ForChild {
    /// An empty list.
    pub const fn none() -> ForChild {
        ForChild(
            [const { Entry { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) } };
                4 * MAX_SERVERS],
        )
    }

    /// Replaces them by these, in the order of [`Port::descriptors`](super::Port::descriptors).
    pub fn remember(&self, descriptors: impl Iterator<Item = RawFd>) {
        let known = descriptors.filter_map(|fd| Some((fd, status(fd)?)));
        let mut known = known.fuse();
        for entry in &self.0 {
            let (fd, device, inode) =
                known.next().map_or((-1, 0, 0), |(fd, status)| (fd, status.st_dev, status.st_ino));
            entry.device.store(device, Ordering::Relaxed);
            entry.inode.store(inode, Ordering::Relaxed);
            entry.fd.store(fd, Ordering::Relaxed);
        }
    }

    /// Closes those that still are what they were; the program may have closed one and opened another file.
    pub fn close(&self) {
        let mut last_was_ours = false;
        for entry in &self.0 {
            let fd = entry.fd.swap(-1, Ordering::Relaxed);
            if fd < 0 {
                continue;
            }
            let same = |status: &libc::stat| {
                status.st_dev == entry.device.load(Ordering::Relaxed)
                    && status.st_ino == entry.inode.load(Ordering::Relaxed)
            };
            let found = status(fd).filter(same);
            // An eventfd has the inode of all files without a type, so it counts as the one before it does.
            last_was_ours = found.is_some_and(|status| status.st_mode & libc::S_IFMT != 0 || last_was_ours);
            if last_was_ours {
                // SAFETY: the child's copy of a descriptor of the session, which the child never uses.
                unsafe { libc::close(fd) };
            }
        }
    }
}

fn status(fd: RawFd) -> Option<libc::stat> {
    // SAFETY: zero is valid for every field of a `stat`.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a plain system call that writes to a live structure.
    (unsafe { libc::fstat(fd, &raw mut status) } == 0).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, IntoRawFd};

    fn socket() -> RawFd {
        std::os::unix::net::UnixDatagram::unbound().unwrap().into_raw_fd()
    }

    fn eventfd() -> RawFd {
        // SAFETY: a plain system call.
        unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }
    }

    /// Puts another file at a descriptor's number, as a program does that closed it.
    fn replace(fd: RawFd, by: RawFd) {
        // SAFETY: plain system calls on descriptors of this test.
        unsafe {
            assert_eq!(libc::dup2(by, fd), fd);
            libc::close(by);
        }
    }

    fn close(fd: RawFd) {
        // SAFETY: a descriptor of this test.
        assert_eq!(unsafe { libc::close(fd) }, 0);
    }

    #[test]
    fn a_child_closes_the_session_s_descriptors_and_no_others() {
        let (whole, lost) = ([socket(), eventfd()], [socket(), eventfd()]);
        let list = ForChild::none();
        list.remember(whole.into_iter().chain(lost));
        let inode = |fd| status(fd).map(|status| status.st_ino);
        let before = inode(whole[0]);
        replace(lost[0], socket());
        replace(lost[1], eventfd());
        list.close();
        // Another test may have opened a file with the number that is free again.
        assert_ne!(inode(whole[0]), before);
        lost.into_iter().for_each(close);
    }

    #[test]
    fn a_descriptor_is_kept_if_its_number_is_high_enough() {
        let fd = socket();
        assert_eq!(own(fd).unwrap().as_raw_fd(), fd);
        assert!(own(-1).is_err());
    }
}
