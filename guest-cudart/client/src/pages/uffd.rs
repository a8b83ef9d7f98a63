//! The fault mechanism that uses userfaultfd(2) in missing and write-protect mode, on private memory and on
//! shared memory that is [adopted](Uffd::adopt). The structures are those of `linux/userfaultfd.h`.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

use super::Fault;
use crate::lock;

const API: u64 = 0xaa;
/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`.
const WRITE_PROTECT: u64 = 1;
/// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`: shared memory too, since Linux 5.19.
const WRITE_PROTECT_SHARED: u64 = 1 << 12;
/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: libc::c_int = 1;

const IOCTL_NEW: libc::c_ulong = 0xaa00;
const IOCTL_API: libc::c_ulong = 0xc018_aa3f;
const IOCTL_REGISTER: libc::c_ulong = 0xc020_aa00;
const IOCTL_UNREGISTER: libc::c_ulong = 0x8010_aa01;
const IOCTL_WAKE: libc::c_ulong = 0x8010_aa02;
const IOCTL_COPY: libc::c_ulong = 0xc028_aa03;
const IOCTL_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

const REGISTER_MISSING: u64 = 1;
const REGISTER_WP: u64 = 2;
const COPY_WP: u64 = 2;
const EVENT_PAGEFAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1;

/// `struct uffdio_api`.
#[repr(C)]
struct Handshake {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffd_msg` of a page fault.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

/// A userfaultfd.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    system_calls: bool,
    /// Adopted ranges of shared memory, as start and end. Their pages are absent only where the memory itself
    /// has none.
    shared: Mutex<Vec<(usize, usize)>>,
}

/// Whether the kernel refused a range because it consists of several mappings, which can happen with the
/// program's own memory. A single page is always one mapping.
fn is_of_several(error: &io::Error, len: usize) -> bool {
    error.raw_os_error() == Some(libc::ENOENT) && len > super::PAGE
}

fn syscall(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: creates a descriptor and accesses no memory.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn device() -> io::Result<OwnedFd> {
    let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd")?;
    // SAFETY: the request takes flags by value and creates a descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), IOCTL_NEW, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Uffd {
    /// Opens a userfaultfd, for faults of system calls too if this process may.
    pub fn open() -> io::Result<Uffd> {
        let (fd, system_calls) = match syscall(0).or_else(|_| device()) {
            Ok(fd) => (fd, true),
            Err(_) => (syscall(USER_MODE_ONLY)?, false),
        };
        let uffd = Uffd { fd, system_calls, shared: Mutex::default() };
        let handshake = |features| Handshake { api: API, features, ioctls: 0 };
        // A kernel without a feature refuses, and can then be asked again.
        uffd.ioctl(IOCTL_API, &mut handshake(WRITE_PROTECT | WRITE_PROTECT_SHARED))
            .or_else(|_| uffd.ioctl(IOCTL_API, &mut handshake(WRITE_PROTECT)))?;
        Ok(uffd)
    }

    /// Whether faults of system calls are resolved too.
    pub fn serves_system_calls(&self) -> bool {
        self.system_calls
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is passed its own structure, with ranges that are mappings of this module's
        // users.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub fn map(&self, address: usize, len: usize) -> io::Result<()> {
        super::place(address, len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        // Pages come and go one by one. SAFETY: this is the range that was just mapped.
        unsafe { libc::madvise(address as *mut libc::c_void, len, libc::MADV_NOHUGEPAGE) };
        let range = Range { start: address as u64, len: len as u64 };
        let mut register = Register { range, mode: REGISTER_MISSING | REGISTER_WP, ioctls: 0 };
        self.ioctl(IOCTL_REGISTER, &mut register).inspect_err(|_| self.unmap(address, len))
    }

    pub unsafe fn adopt(&self, address: usize, len: usize) -> io::Result<()> {
        for page in (address..address + len).step_by(super::PAGE) {
            // SAFETY: the caller guarantees readable pages. Each is present afterwards: no thread can be
            // stopped there before it is cleared.
            unsafe { (page as *const u8).read_volatile() };
        }
        let shared = super::is_shared(address, super::PAGE);
        let range = || Range { start: address as u64, len: len as u64 };
        self.ioctl(
            IOCTL_REGISTER,
            &mut Register { range: range(), mode: REGISTER_MISSING | REGISTER_WP, ioctls: 0 },
        )?;
        if let Err(error) = self.protect(address, len, true) {
            let _ = self.ioctl(IOCTL_UNREGISTER, &mut range());
            return Err(error);
        }
        if shared {
            lock(&self.shared).push((address, address + len));
        }
        // SAFETY: these are the same pages. If it fails, child processes inherit them.
        unsafe { libc::madvise(address as *mut libc::c_void, len, libc::MADV_DONTFORK) };
        Ok(())
    }

    pub fn release(&self, address: usize, len: usize) {
        lock(&self.shared).retain(|(start, _)| *start != address);
        // Threads stopped there continue.
        let _ = self.ioctl(IOCTL_UNREGISTER, &mut Range { start: address as u64, len: len as u64 });
        // SAFETY: the pages were adopted and belong to the program again.
        unsafe { libc::madvise(address as *mut libc::c_void, len, libc::MADV_DOFORK) };
    }

    pub fn unmap(&self, address: usize, len: usize) {
        super::unplace(address, len);
    }

    pub fn open_range(&self, address: usize, len: usize) -> io::Result<()> {
        super::protection(address, len, libc::PROT_READ | libc::PROT_WRITE)
    }

    pub fn close_range(&self, address: usize, len: usize) {
        let _ = super::protection(address, len, libc::PROT_NONE);
        // Threads stopped there find the range closed.
        let _ = self.ioctl(IOCTL_WAKE, &mut Range { start: address as u64, len: len as u64 });
    }

    pub fn faults(&self) -> io::Result<Vec<Fault>> {
        let mut messages = [Message::default(); 16];
        loop {
            // SAFETY: the kernel writes at most the whole array.
            let n = unsafe {
                libc::read(
                    self.fd.as_raw_fd(),
                    messages.as_mut_ptr().cast(),
                    std::mem::size_of_val(&messages),
                )
            };
            if n < 0 {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EINTR | libc::EAGAIN) => continue,
                    _ => return Err(error),
                }
            }
            let count = n as usize / std::mem::size_of::<Message>();
            let faults = messages[..count].iter().filter(|message| message.event == EVENT_PAGEFAULT);
            let fault = |m: &Message| Fault {
                address: m.address as usize,
                write: m.flags & FLAG_WRITE != 0,
                token: 0,
            };
            return Ok(faults.map(fault).collect());
        }
    }

    pub fn fill(&self, address: usize, bytes: &[u8], writable: bool) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let mut copy = Copy {
                dst: (address + done) as u64,
                src: rest.as_ptr() as u64,
                len: rest.len() as u64,
                mode: if writable { 0 } else { COPY_WP },
                copy: 0,
            };
            match self.ioctl(IOCTL_COPY, &mut copy) {
                Ok(()) => return Ok(()),
                // Another thread changed the address space. Some pages may be filled; request the rest again.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => done += copy.copy.max(0) as usize,
                Err(error) if is_of_several(&error, rest.len()) => {
                    for (at, page) in rest.chunks(super::PAGE).enumerate() {
                        self.fill(address + done + at * super::PAGE, page, writable)?;
                    }
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub fn protect(&self, address: usize, len: usize, on: bool) -> io::Result<()> {
        match self.protect_at_once(address, len, on) {
            Err(error) if is_of_several(&error, len) => (address..address + len)
                .step_by(super::PAGE)
                .try_for_each(|page| self.protect_at_once(page, super::PAGE, on)),
            other => other,
        }
    }

    fn protect_at_once(&self, address: usize, len: usize, on: bool) -> io::Result<()> {
        let range = || Range { start: address as u64, len: len as u64 };
        loop {
            match self.ioctl(IOCTL_WRITEPROTECT, &mut WriteProtect { range: range(), mode: on.into() }) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                other => return other,
            }
        }
    }

    pub fn clear(&self, address: usize, len: usize) -> io::Result<()> {
        let shared = lock(&self.shared).iter().any(|(start, end)| (*start..*end).contains(&address));
        let advice = if shared { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        let at = address as *mut libc::c_void;
        // SAFETY: the caller no longer needs the contents of these pages.
        let mut failed = unsafe { libc::madvise(at, len, advice) } < 0;
        if failed && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
            // The program has locked its memory (mlockall), and the kernel does not remove locked pages.
            // SAFETY: the caller no longer needs the contents of these pages; unlocking them only affects how
            // fast they are available.
            failed = unsafe { libc::munlock(at, len) < 0 || libc::madvise(at, len, advice) < 0 };
        }
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub fn bytes(&self, address: usize) -> *const u8 {
        address as *const u8
    }

    pub fn retry(&self, fault: &Fault) {
        let page = fault.address & !(super::PAGE - 1);
        let _ = self.ioctl(IOCTL_WAKE, &mut Range { start: page as u64, len: super::PAGE as u64 });
    }

    pub fn refuse(&self, fault: &Fault) {
        // When the access is repeated, the kernel finds the range closed.
        self.retry(fault);
    }
}
