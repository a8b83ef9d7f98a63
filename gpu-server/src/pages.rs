//! Pages of memory shared between processes. The daemon shares two with each session's worker:
//!
//! | page | written by | contents |
//! |---|---|---|
//! | [`Terms`] | the daemon; the worker can only read it | what others of the principal hold, and whether the session may give its devices work now |
//! | [`Meter`] | the worker | what the session holds, what work it has, and whose it is |
//!
//! Each worker has its own pages, so what a worker writes only concerns its own session. The daemon reads
//! every word of a [`Meter`] once and trusts it no more than a message.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::limits::MOST_DEVICES;

/// `F_SEAL_FUTURE_WRITE`: no further writable mappings (Linux 5.1).
const SEAL_FUTURE_WRITE: i32 = 0x10;
/// Bytes of every page.
pub const SIZE: usize = 4096;

/// What the daemon continuously tells a worker.
#[repr(C)]
#[derive(Debug)]
pub struct Terms {
    /// Bytes that count against the limit of the principal's sessions on each device, by its number,
    /// including what their processes use besides according to NVML. Under a lease, also what its client
    /// holds elsewhere, if that leaves less.
    pub total_held: [AtomicU64; MOST_DEVICES],
    /// Bytes that this session's process uses on each device beyond what it has charged, according to NVML:
    /// contexts, code, local memory.
    pub implicit: [AtomicU64; MOST_DEVICES],
    /// Whether the session may give its devices work: see [`gate`].
    pub gate: AtomicU32,
    /// While the gate is metered: ns of device time up to which it may report work.
    pub allowance: AtomicU64,
    /// How many daemons the session has had before this one. Each counts its gate's steps from 0.
    pub daemons: AtomicU32,
    /// How often sessions have moved device memory, so that a session waiting for room sees progress.
    pub moves: AtomicU64,
}

/// The word that is a session's gate: a mode in the lower two bits, a count above it, and the bit
/// [`ASKED`](gate::ASKED).
pub mod gate {
    /// The session gives its devices work freely.
    pub const OPEN: u32 = 0;
    /// As before, but it rings the daemon's bell when it does. The count tells these times apart.
    pub const TELL: u32 = 1;
    /// A little at a time, reported.
    pub const METERED: u32 = 2;
    /// Not at all, except for one piece for each step of the count.
    pub const CLOSED: u32 = 3;

    /// A gate's word.
    pub fn word(mode: u32, count: u32) -> u32 {
        (mode | count << 2) & !ASKED
    }

    /// A separate bit of the word: there is an order for the session's memory
    /// ([`crate::worker_protocol::MemoryOrder`]), which it looks for before its next command.
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

    /// Whether the session may give its devices work freely and has nothing else to look for.
    #[inline]
    pub fn is_free(word: u32) -> bool {
        word & (ASKED | 3) == OPEN
    }

    /// The count after this one.
    pub fn next_step(steps: u32) -> u32 {
        super::gate::steps(word(0, steps.wrapping_add(1)))
    }
}

/// What a worker continuously tells the daemon.
#[repr(C)]
#[derive(Debug)]
pub struct Meter {
    /// Bytes that the session has charged on each device, by its number.
    pub held: [AtomicU64; MOST_DEVICES],
    /// Bytes of this machine's memory that it has charged as page-locked.
    pub pinned: AtomicU64,
    /// Counts work that it has enqueued, or wanted to enqueue, while its gate was not open.
    pub issued: AtomicU64,
    /// Counts such work that has finished.
    pub finished: AtomicU64,
    /// Such work that has not.
    pub unfinished: AtomicU64,
    /// ns that the longest of the latest work took.
    pub longest: AtomicU64,
    /// ns that finished work took.
    pub gpu_ns: AtomicU64,
    /// 1 while the session waits at its gate.
    pub waits: AtomicU32,
    /// What it says about its memory.
    pub memory: Whereabouts,
    /// The PID namespace of the client's program. 0: unknown.
    pub namespace: AtomicU64,
}

/// Where a session's device memory is.
#[repr(C)]
#[derive(Debug)]
pub struct Whereabouts {
    /// Bytes on each device that could be moved to this machine's memory, and how many of them are there now.
    pub movable: [AtomicU64; MOST_DEVICES],
    pub away: [AtomicU64; MOST_DEVICES],
    /// Bytes of new memory on each device that it waits for.
    pub needs: [AtomicU64; MOST_DEVICES],
    /// ns of `CLOCK_MONOTONIC` since when it has had no command. 0: it has one, or work on a device.
    pub rested: AtomicU64,
    /// 1 while it waits for its memory to return to the devices.
    pub returns: AtomicU32,
    /// 1 while it waits for new memory at a point where its own memory can be moved away meanwhile.
    pub yields: AtomicU32,
    /// The last order that it has begun to handle.
    pub begun: AtomicU32,
    /// The last order that it has handled: its number in the upper half; the lower half is 1 if it was
    /// carried out.
    pub done: AtomicU64,
    /// Bytes of this machine's memory that it keeps for its device memory.
    pub keeps: AtomicU64,
    /// Bytes that it has moved from and to the devices, and the ns that took.
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

/// A structure of atomics that fits in a page.
///
/// # Safety
/// All fields are atomic integers, so every bit pattern is valid and other processes may write at any time.
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
    /// Makes a page of zeros for the daemon, and the descriptor for the worker.
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

    /// Maps another page's file in place of this one. All users of the page see the other one from then on.
    ///
    /// # Errors
    /// If the descriptor is not a page's. Nothing has changed then.
    pub fn replace(&self, fd: &OwnedFd) -> io::Result<()> {
        check(fd)?;
        let access = if T::WRITTEN_BY_WORKER { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let (at, flags) = (self.at.as_ptr().cast(), libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: the range is exactly this page's own mapping, which the kernel replaces in one step;
        // references into it see another page of atomics, for which every bit pattern is valid.
        let at = unsafe { libc::mmap(at, SIZE, access, flags, fd.as_fd().as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Maps a page of another process for reading and writing.
    ///
    /// # Errors
    /// If the descriptor is not that of a page whose size never changes.
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

/// Checks that a descriptor is an in-memory file that contains a page and never changes its size.
fn check(fd: &OwnedFd) -> io::Result<()> {
    let wanted = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    // Only in-memory files have seals.
    let seals = SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS)?);
    if !seals.contains(wanted) || nix::sys::stat::fstat(fd)?.st_size < SIZE as i64 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(())
}

impl<T: Shared> std::ops::Deref for Page<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped for as long as `self` lives (`replace` leaves no gap), large enough and aligned
        // (checked in `map`); the file is sealed against shrinking, and its contents are atomics (`Shared`).
        // Where the mapping cannot be written to, its owner only loads.
        unsafe { self.at.as_ref() }
    }
}

impl<T> Drop for Page<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody has a reference any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), SIZE) };
    }
}

/// Zeros in private memory, for a quota without a session.
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
            namespace: zero(),
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
