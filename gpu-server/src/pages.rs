//! Pages of memory that processes share. Two of them the daemon shares with the worker of each session:
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
pub const SIZE: usize = 4096;

/// What the daemon tells a worker all the time.
#[repr(C)]
#[derive(Debug)]
pub struct Terms {
    /// Bytes that all sessions of the principal hold on each device, by its number, including what NVML says that their processes take besides.
    pub total_held: [AtomicU64; MOST_DEVICES],
    /// Bytes that this session's process takes on each device besides what it has charged, as NVML says: contexts, code, local memory.
    pub implicit: [AtomicU64; MOST_DEVICES],
    /// Whether the session may give its devices work: see [`gate`].
    pub gate: AtomicU32,
    /// While the gate is metered: ns of device time up to which it may report work.
    pub allowance: AtomicU64,
    /// How many daemons the session has had before this one. Each counts its gate's steps from 0.
    pub daemons: AtomicU32,
    /// How often sessions have moved device memory: whoever waits for room sees that something is done about it.
    pub moves: AtomicU64,
}

/// The word that is a session's gate: a mode in the lower two bits, a count above, and a bit that says something else.
pub mod gate {
    /// The session gives its devices work as it likes.
    pub const OPEN: u32 = 0;
    /// As before, and rings the daemon's bell when it does. The count tells each such time from the ones before.
    pub const TELL: u32 = 1;
    /// A little at a time, and reports it.
    pub const METERED: u32 = 2;
    /// Not at all, but for one piece for each step that is counted.
    pub const CLOSED: u32 = 3;

    /// A gate's word.
    pub fn word(mode: u32, count: u32) -> u32 {
        (mode | count << 2) & !ASKED
    }

    /// A bit of the word, beside the mode: there is an order for the session's memory ([`crate::worker_protocol::MemoryOrder`]), which it looks for before its next command.
    pub const ASKED: u32 = 1 << 31;

    /// Its mode.
    #[inline]
    pub fn mode(word: u32) -> u32 {
        word & 3
    }

    /// Its count.
    pub fn steps(word: u32) -> u32 {
        (word & !ASKED) >> 2
    }

    /// Whether the session gives its devices work as it likes, and has nothing else to look for.
    #[inline]
    pub fn is_free(word: u32) -> bool {
        word & (ASKED | 3) == OPEN
    }

    /// The count after this one.
    pub fn next_step(steps: u32) -> u32 {
        super::gate::steps(word(0, steps.wrapping_add(1)))
    }
}

/// What a worker tells the daemon all the time.
#[repr(C)]
#[derive(Debug)]
pub struct Meter {
    /// Bytes that the session has charged on each device, by its number.
    pub held: [AtomicU64; MOST_DEVICES],
    /// Bytes of this machine's memory that it has charged as page-locked.
    pub pinned: AtomicU64,
    /// Counts work that it has enqueued, or wanted to enqueue, while its gate was not open.
    pub issued: AtomicU64,
    /// Counts such work that is finished.
    pub finished: AtomicU64,
    /// Such work that is not.
    pub unfinished: AtomicU64,
    /// ns that the longest of the latest work took.
    pub longest: AtomicU64,
    /// ns that finished work took.
    pub gpu_ns: AtomicU64,
    /// 1 while the session waits at its gate.
    pub waits: AtomicU32,
    /// What it says of its memory.
    pub memory: Whereabouts,
}

/// Where a session's device memory is.
#[repr(C)]
#[derive(Debug)]
pub struct Whereabouts {
    /// Bytes on each device that could be moved to this machine's memory, and those of them that are there now.
    pub movable: [AtomicU64; MOST_DEVICES],
    pub away: [AtomicU64; MOST_DEVICES],
    /// Bytes of new memory on each device that it waits for.
    pub needs: [AtomicU64; MOST_DEVICES],
    /// ns of `CLOCK_MONOTONIC` when it last had no command. 0: never yet.
    pub rested: AtomicU64,
    /// 1 while it waits for its memory to be on the devices again.
    pub returns: AtomicU32,
    /// 1 while it waits for new memory where its own can leave meanwhile.
    pub yields: AtomicU32,
    /// The last order that it has begun to deal with.
    pub begun: AtomicU32,
    /// The last order that it has dealt with: its number in the upper half; 1 below if it was carried out.
    pub done: AtomicU64,
    /// Bytes of this machine's memory that it keeps for its device memory.
    pub keeps: AtomicU64,
    /// Bytes that it has moved from and to the devices, and the ns that this took.
    pub left: [AtomicU64; 2],
    pub returned: [AtomicU64; 2],
}

impl Default for Whereabouts {
    fn default() -> Whereabouts {
        let zero = || AtomicU64::new(0);
        let zeros = || [const { AtomicU64::new(0) }; MOST_DEVICES];
        Whereabouts {
            movable: zeros(),
            away: zeros(),
            needs: zeros(),
            rested: zero(),
            returns: AtomicU32::new(0),
            yields: AtomicU32::new(0),
            begun: AtomicU32::new(0),
            done: zero(),
            keeps: zero(),
            left: [zero(), zero()],
            returned: [zero(), zero()],
        }
    }
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
        Page::with_room(0)
    }

    /// The same, with a file that is longer by `room` bytes, which are not mapped.
    pub fn with_room(room: usize) -> io::Result<(Page<T>, OwnedFd)> {
        let name = c"rgpu session";
        let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        nix::unistd::ftruncate(&fd, (SIZE + room) as i64)?;
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

    /// Maps the file of another page in place of this one's. Whoever uses the page sees the other from then on.
    ///
    /// # Errors
    /// If the descriptor is not that of a page. Then nothing has changed.
    pub fn replace(&self, fd: &OwnedFd) -> io::Result<()> {
        check(fd)?;
        let access = if T::WRITTEN_BY_WORKER { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let (at, flags) = (self.at.as_ptr().cast(), libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: the range is exactly this page's own mapping, which the kernel replaces in one step; references into it see another page of atomics, for which every bit pattern is valid.
        let at = unsafe { libc::mmap(at, SIZE, access, flags, fd.as_fd().as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Maps a page that another process made, for reading and writing.
    ///
    /// # Errors
    /// If the descriptor is not that of a page, whose size never changes.
    pub fn adopt(fd: &OwnedFd) -> io::Result<Page<T>> {
        check(fd)?;
        Page::map(fd, true)
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

/// Whether a descriptor is that of a file in memory that contains a page and never changes its size.
fn check(fd: &OwnedFd) -> io::Result<()> {
    let wanted = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    // Only files in memory have seals.
    let seals = SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS)?);
    if !seals.contains(wanted) || nix::sys::stat::fstat(fd)?.st_size < SIZE as i64 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(())
}

impl<T: Shared> std::ops::Deref for Page<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped for as long as `self` lives (`replace` leaves no gap), large enough and aligned (checked in `map`); the file is sealed against shrinking, and its contents are atomics (`Shared`). Where the
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
        let zero = || AtomicU64::new(0);
        Meter {
            held: [const { AtomicU64::new(0) }; MOST_DEVICES],
            pinned: zero(),
            issued: zero(),
            finished: zero(),
            unfinished: zero(),
            longest: zero(),
            gpu_ns: zero(),
            waits: AtomicU32::new(0),
            memory: Whereabouts::default(),
        }
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
