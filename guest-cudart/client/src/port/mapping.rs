//! A shared memory mapping that is unmapped when dropped.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex};

use crate::lock;
use crate::ranges::FreeRanges;
use protocol::channel::MAX_DEVICES;
use protocol::ops::memory::{SPACE, window};

/// First address for pinned memory: above the devices' windows, and with all such addresses below those that
/// the kernel chooses. What lies in [`SPACE`] counts as reserved by the program.
const FIRST: u64 = 0x3200_0000_0000;
const _: () = assert!(FIRST >= window(MAX_DEVICES) && FIRST < SPACE);

/// What a mapping of pinned memory takes of these addresses is a multiple of this.
const STEP: u64 = 2 << 20;

/// The addresses for pinned memory that no mapping has taken.
static ADDRESSES: LazyLock<Mutex<FreeRanges>> = LazyLock::new(|| {
    let mut free = FreeRanges::new();
    free.insert(FIRST, SPACE - FIRST);
    Mutex::new(free)
});

/// A readable and writable mapping of `len` bytes.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// What it has taken of [`ADDRESSES`], in bytes from its base.
    taken: u64,
}

// SAFETY: a mapping is only an address range. Code that accesses its contents is responsible for
// synchronization.
unsafe impl Send for Mapping {}
// SAFETY: a mapping is only an address range. Code that accesses its contents is responsible for
// synchronization.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`, shared.
    pub fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        Self::map_near(0, len, libc::MAP_SHARED, fd.as_raw_fd())
    }

    /// Maps pinned memory of a program: `fd`, shared, or new memory. A server that shares it maps it at the
    /// same address, so it is placed where other processes are unlikely to have mappings. `at` is its exact
    /// address instead; the call fails if anything is mapped there already.
    pub fn pinned(fd: Option<BorrowedFd<'_>>, len: usize, at: Option<usize>) -> io::Result<Mapping> {
        let (flags, fd) = match fd {
            Some(fd) => (libc::MAP_SHARED, fd.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let Some(at) = at else { return Self::map_taken(len, flags, fd) };
        let mapping = Self::map_near(at, len, flags | libc::MAP_FIXED_NOREPLACE, fd)?;
        // Kernels before 4.17 treat the address as a hint.
        if mapping.base() as usize == at { Ok(mapping) } else { Err(io::ErrorKind::AlreadyExists.into()) }
    }

    /// Maps at the next free addresses for pinned memory. If something else is there, or all are taken, the
    /// kernel chooses.
    fn map_taken(len: usize, flags: i32, fd: i32) -> io::Result<Mapping> {
        let wanted = (len as u64).checked_next_multiple_of(STEP).ok_or(io::ErrorKind::OutOfMemory)?;
        let Some(hint) = lock(&ADDRESSES).take_best(wanted) else {
            return Self::map_near(0, len, flags, fd);
        };
        match Self::map_near(hint as usize, len, flags, fd) {
            Ok(mut mapping) => {
                // Otherwise the addresses stay taken: what is there would be met again each time.
                if mapping.base() as u64 == hint {
                    mapping.taken = wanted;
                }
                Ok(mapping)
            }
            Err(error) => {
                lock(&ADDRESSES).insert(hint, wanted);
                Err(error)
            }
        }
    }

    fn map_near(hint: usize, len: usize, flags: i32, fd: i32) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address that the kernel chooses, whether or not it takes the hint,
        // affects no other memory.
        let base = unsafe {
            libc::mmap(hint as *mut libc::c_void, len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned NULL"))?;
        Ok(Mapping { base, len, taken: 0 })
    }

    /// Keeps child processes from inheriting the mapping, because they must not use their parent's channel.
    pub fn dont_fork(&self) {
        // SAFETY: the range is this mapping. If it fails, the mapping is inherited, which is harmless.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_DONTFORK) };
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the mapping is empty, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` mapped the range, and it is unmapped once; the owner has dropped every use.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
        if self.taken != 0 {
            lock(&ADDRESSES).insert(self.base() as u64, self.taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::descriptor::own;
    use std::os::fd::AsFd;

    /// Held by a test that expects certain addresses to be free.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn addresses_of_pinned_memory_are_used_again() {
        const LEN: usize = 1 << 40;
        let _alone = lock(&ALONE);
        // SAFETY: a plain system call.
        let file = own(unsafe { libc::memfd_create(c"sparse".as_ptr(), libc::MFD_CLOEXEC) }).unwrap();
        // SAFETY: as above. The file has one page at most.
        assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), LEN as i64) }, 0);
        // All addresses for pinned memory are no more than 14 of these.
        for _ in 0..20 {
            let mapping = Mapping::pinned(Some(file.as_fd()), LEN, None).unwrap();
            let first = mapping.base() as u64;
            assert!((FIRST..SPACE).contains(&first) && first + LEN as u64 <= SPACE, "{first:#x}");
            // SAFETY: the first byte of the mapping, which nobody else knows.
            unsafe { mapping.base().write(1) };
        }
    }

    #[test]
    fn pinned_memory_is_not_where_something_else_is() {
        let _alone = lock(&ALONE);
        let one = Mapping::pinned(None, 4096, None).unwrap();
        let other = Mapping::pinned(None, 4096, None).unwrap();
        assert_ne!(one.base(), other.base());
        // Something is at the addresses that come next.
        let next = lock(&ADDRESSES).take_best(STEP).unwrap();
        let theirs = Mapping::pinned(None, 4096, Some(next as usize)).unwrap();
        lock(&ADDRESSES).insert(next, STEP);
        let [third, fourth] = [(); 2].map(|()| Mapping::pinned(None, 4096, None).unwrap());
        assert!([&third, &fourth].iter().all(|mapping| mapping.base() != theirs.base()));
        assert!((FIRST..SPACE).contains(&(fourth.base() as u64)), "only one is elsewhere");
    }
}
