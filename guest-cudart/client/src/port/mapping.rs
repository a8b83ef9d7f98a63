//! A shared memory mapping that is unmapped with its last owner.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use protocol::channel::MAX_DEVICES;
use protocol::ops::memory::{SPACE, window};

/// A mapping of `len` bytes, readable and writable.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is only an address range; what is read and written in it is the business of those who do so.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` from its start, shared.
    pub fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        Self::map(len, libc::MAP_SHARED, fd.as_raw_fd())
    }

    /// Maps `len` bytes of fresh memory of this process alone.
    pub fn private(len: usize) -> io::Result<Mapping> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Pinned memory of a program: of `fd`, shared, or else fresh. It is placed where other processes are unlikely to have anything, since a server
    /// that shares it maps it at the same address. With `at` it lies exactly there, or the call fails if anything is mapped there already.
    pub fn pinned(fd: Option<BorrowedFd<'_>>, len: usize, at: Option<usize>) -> io::Result<Mapping> {
        /// Above the devices' windows, below where the kernel places what may be anywhere.
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
        // Kernels before 4.17 take the flag for a hint.
        if mapping.base() as usize == at { Ok(mapping) } else { Err(io::ErrorKind::AlreadyExists.into()) }
    }

    fn map(len: usize, flags: i32, fd: i32) -> io::Result<Mapping> {
        Self::map_near(0, len, flags, fd)
    }

    fn map_near(hint: usize, len: usize, flags: i32, fd: i32) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice, a hint taken or not, touches no memory of anyone.
        let base = unsafe {
            libc::mmap(hint as *mut libc::c_void, len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned NULL"))?;
        Ok(Mapping { base, len })
    }

    /// Keeps the mapping out of children of this process: a child has no business in its parent's channel.
    pub fn dont_fork(&self) {
        // SAFETY: the range is this mapping's own. A failure leaves the mapping inherited, which is harmless.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_DONTFORK) };
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none; there always are.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and is unmapped once; its owner lets go of every use before.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
