//! Two pages of memory that the daemon shares with the worker of each session.
//!
//! | page | written by | contents |
//! |---|---|---|
//! | [`Terms`] | the daemon; the worker can only read it | what others of the principal hold, and whether the session may give its devices work now |
//! | [`Meter`] | the worker | what the session holds, and what work it has |
//!
//! Each worker has pages of its own, so what a worker writes says something about its own session only. The daemon reads every word of a [`Meter`] once and believes it as little as it
//! believes a message.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::worker_protocol::MOST_DEVICES;

/// `F_SEAL_FUTURE_WRITE`: no further mapping can be written to (Linux 5.1).
const SEAL_FUTURE_WRITE: i32 = 0x10;
/// Bytes of every page.
const SIZE: usize = 4096;

/// What the daemon tells a worker all the time.
#[repr(C)]
#[derive(Debug)]
pub struct Terms {
    /// Bytes that all sessions of the principal hold on each device, by its number, including what NVML says that their processes take besides.
    pub total_held: [AtomicU64; MOST_DEVICES],
    /// Bytes that this session's process takes on each device besides what it has charged, as NVML says: contexts, code, local memory.
    pub implicit: [AtomicU64; MOST_DEVICES],
    /// Whether the session may give its devices work: see [`crate::turns`].
    pub gate: AtomicU32,
}

/// What a worker tells the daemon all the time.
#[repr(C)]
#[derive(Debug)]
pub struct Meter {
    /// Bytes that the session has charged on each device, by its number.
    pub held: [AtomicU64; MOST_DEVICES],
    /// Bytes of this machine's memory that it has charged as page-locked.
    pub pinned: AtomicU64,
}

/// A structure of atomics that fits a page.
///
/// # Safety
/// All fields are atomic integers, so that every bit pattern is valid and other processes may write at any time.
pub unsafe trait Shared: Sized {
    /// Whether workers may write to it.
    const WRITTEN_BY_WORKER: bool;
}

// SAFETY: all fields are atomic integers.
unsafe impl Shared for Terms {
    const WRITTEN_BY_WORKER: bool = false;
}

// SAFETY: all fields are atomic integers.
unsafe impl Shared for Meter {
    const WRITTEN_BY_WORKER: bool = true;
}

/// A mapped page.
#[derive(Debug)]
pub struct Page<T> {
    at: NonNull<T>,
    of: PhantomData<T>,
}

// SAFETY: it owns a mapping, whose contents are atomics.
unsafe impl<T: Shared> Send for Page<T> {}
// SAFETY: it owns a mapping, whose contents are atomics.
unsafe impl<T: Shared> Sync for Page<T> {}

impl<T: Shared> Page<T> {
    /// Makes a page of zeros, for the daemon, and the descriptor for the worker.
    pub fn new() -> io::Result<(Page<T>, OwnedFd)> {
        let name = c"rgpu session";
        let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        nix::unistd::ftruncate(&fd, SIZE as i64)?;
        let page = Page::map(&fd, true)?;
        let mut seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        if !T::WRITTEN_BY_WORKER {
            seals |= SealFlag::from_bits_retain(SEAL_FUTURE_WRITE);
        }
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
        Ok((page, fd))
    }

    /// Maps a page that the daemon made, in the worker.
    pub fn open(fd: &OwnedFd) -> io::Result<Page<T>> {
        Page::map(fd, T::WRITTEN_BY_WORKER)
    }

    fn map(fd: &OwnedFd, write: bool) -> io::Result<Page<T>> {
        const { assert!(size_of::<T>() <= SIZE && align_of::<T>() <= SIZE) };
        let access = if write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let fd = fd.as_fd().as_raw_fd();
        // SAFETY: a new mapping of a whole file; the kernel chooses its address.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, access, libc::MAP_SHARED, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Page { at, of: PhantomData })
    }
}

impl<T: Shared> std::ops::Deref for Page<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped for as long as `self` lives, large enough and aligned (checked in `map`); the file is sealed against shrinking, and its contents are atomics (`Shared`). Where the
        // mapping cannot be written to, its owner only loads.
        unsafe { self.at.as_ref() }
    }
}

impl<T> Drop for Page<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody has a reference any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), SIZE) };
    }
}

/// Zeros in private memory, for a quota that belongs to no session.
impl Default for Meter {
    fn default() -> Meter {
        Meter { held: [const { AtomicU64::new(0) }; MOST_DEVICES], pinned: AtomicU64::new(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_worker_reads_the_terms_and_cannot_map_them_to_write() {
        let (daemon, fd) = Page::<Terms>::new().unwrap();
        let worker = Page::<Terms>::open(&fd).unwrap();
        daemon.total_held[3].store(7, Ordering::Relaxed);
        assert_eq!(worker.total_held[3].load(Ordering::Relaxed), 7);
        assert!(Page::<Terms>::map(&fd, true).is_err());
    }

    #[test]
    fn the_daemon_reads_what_the_worker_writes_and_the_file_keeps_its_size() {
        let (daemon, fd) = Page::<Meter>::new().unwrap();
        let worker = Page::<Meter>::open(&fd).unwrap();
        worker.held[63].store(9, Ordering::Relaxed);
        assert_eq!(daemon.held[63].load(Ordering::Relaxed), 9);
        assert!(nix::unistd::ftruncate(&fd, 0).is_err());
    }
}
