//! A shared memory mapping that is unmapped when dropped.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use protocol::channel::MAX_DEVICES;
use protocol::ops::memory::{SPACE, window};

/// A readable and writable mapping of `len` bytes.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
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
        Self::map(len, libc::MAP_SHARED, fd.as_raw_fd())
    }

    /// Maps pinned memory of a program: `fd`, shared, or new memory. A server that shares it maps it at the
    /// same address, so it is placed where other processes are unlikely to have mappings. `at` is its exact
    /// address instead; the call fails if anything is mapped there already.
    pub fn pinned(fd: Option<BorrowedFd<'_>>, len: usize, at: Option<usize>) -> io::Result<Mapping> {
        /// Above the devices' windows and below the addresses that the kernel chooses.
        static NEXT: AtomicUsize = AtomicUsize::new(0x3200_0000_0000);
        const { assert!(0x3200_0000_0000 >= window(MAX_DEVICES) && 0x3200_0000_0000 < SPACE) };
        let (flags, fd) = match fd {
            Some(fd) => (libc::MAP_SHARED, fd.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let Some(at) = at else {
            let hint = NEXT.fetch_add(len.next_multiple_of(2 << 20), Ordering::Relaxed);
            return Self::map_near(hint, len, flags, fd);
        };
        let mapping = Self::map_near(at, len, flags | libc::MAP_FIXED_NOREPLACE, fd)?;
        // Kernels before 4.17 treat the address as a hint.
        if mapping.base() as usize == at { Ok(mapping) } else { Err(io::ErrorKind::AlreadyExists.into()) }
    }

    fn map(len: usize, flags: i32, fd: i32) -> io::Result<Mapping> {
        Self::map_near(0, len, flags, fd)
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
        Ok(Mapping { base, len })
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
    }
}
