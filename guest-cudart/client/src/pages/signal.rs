//! The fault mechanism that uses page protection and a SIGSEGV handler.
//!
//! The memory is mapped twice: where the program uses it, with the protection of the page's state, and a
//! second time, always readable and writable, for filling pages. A stopped thread writes its fault to a pipe
//! and sleeps in the handler until it is resolved. Faults at other addresses go to the previous handler. So
//! do all those of a child process: it has none of this memory, and nobody who would resolve them.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use super::Fault;
use crate::lock;
use crate::port::mapping::Mapping;
use crate::session::forked;

/// The most ranges. Their table entries never move, so that the handler can read them without a lock.
const MOST_RANGES: usize = 4096;
/// How many threads can be stopped at once; others wait for a free entry.
const PLACES: usize = 64;

const FREE: u32 = 0;
const STOPPED: u32 = 1;
const ANSWERED: u32 = 2;
const REFUSED: u32 = 3;

struct Known {
    start: AtomicUsize,
    end: AtomicUsize,
}

static RANGES: [Known; MOST_RANGES] =
    [const { Known { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; MOST_RANGES];
/// Entries of [`RANGES`] that are in use or were.
static USED: AtomicUsize = AtomicUsize::new(0);
static STOPS: [AtomicU32; PLACES] = [const { AtomicU32::new(FREE) }; PLACES];
/// Signals for what a thread has just done itself. They cannot wait.
const OWN_FAULTS: [libc::c_int; 5] = [libc::SIGILL, libc::SIGTRAP, libc::SIGBUS, libc::SIGFPE, libc::SIGSYS];
/// The pipe to which the handler writes faults.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// The handler that was installed before.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// What the handler writes. It is shorter than `PIPE_BUF` and therefore always read as a whole.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    address: usize,
    write: u32,
    place: u32,
}

/// A range's second mapping.
#[derive(Debug)]
struct Alias {
    start: usize,
    len: usize,
    known: usize,
    mapping: Mapping,
    memory: OwnedFd,
}

/// The mechanism. A process has one.
#[derive(Debug)]
pub struct Signal {
    reader: OwnedFd,
    aliases: Mutex<Vec<Alias>>,
}

impl Signal {
    /// Installs the handler.
    pub fn open() -> io::Result<Signal> {
        static READER: OnceLock<Result<OwnedFd, i32>> = OnceLock::new();
        let reader = READER.get_or_init(|| install().map_err(|error| error.raw_os_error().unwrap_or(0)));
        match reader {
            Ok(reader) => Ok(Signal { reader: reader.try_clone()?, aliases: Mutex::default() }),
            Err(code) => Err(io::Error::from_raw_os_error(*code)),
        }
    }

    pub fn map(&self, address: usize, len: usize) -> io::Result<()> {
        let memory = memfd(len)?;
        let mapping = Mapping::shared(memory.as_fd(), len)?;
        mapping.dont_fork();
        super::place(address, len, libc::MAP_SHARED, memory.as_raw_fd())?;
        let mut aliases = lock(&self.aliases);
        let known = match free_range() {
            Some(known) => known,
            None => {
                super::unplace(address, len);
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
        };
        RANGES[known].start.store(address, Ordering::Release);
        RANGES[known].end.store(address + len, Ordering::Release);
        USED.fetch_max(known + 1, Ordering::AcqRel);
        aliases.push(Alias { start: address, len, known, mapping, memory });
        Ok(())
    }

    pub unsafe fn adopt(&self, address: usize, len: usize) -> io::Result<()> {
        let memory = memfd(len)?;
        let mapping = Mapping::shared(memory.as_fd(), len)?;
        mapping.dont_fork();
        let to = mapping.base();
        let known = {
            let mut aliases = lock(&self.aliases);
            let known = free_range().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
            RANGES[known].start.store(address, Ordering::Release);
            RANGES[known].end.store(address + len, Ordering::Release);
            USED.fetch_max(known + 1, Ordering::AcqRel);
            aliases.push(Alias { start: address, len, known, mapping, memory });
            known
        };
        let taken = super::protection(address, len, libc::PROT_READ).and_then(|()| {
            // SAFETY: the caller guarantees readable pages that nobody is writing, and this mechanism's own
            // pages are as many.
            unsafe { ptr::copy_nonoverlapping(address as *const u8, to, len) };
            self.replace(address, len, libc::PROT_READ)
        });
        if taken.is_err() {
            let _ = super::protection(address, len, libc::PROT_READ | libc::PROT_WRITE);
            lock(&self.aliases).retain(|alias| alias.known != known);
            RANGES[known].end.store(0, Ordering::Release);
        }
        taken
    }

    /// Replaces the process's memory by a range of this mechanism's.
    fn replace(&self, address: usize, len: usize, protection: libc::c_int) -> io::Result<()> {
        let aliases = lock(&self.aliases);
        let alias = aliases.iter().find(|alias| alias.start == address).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the caller has taken over these pages, and the file has their contents.
        let at = unsafe {
            libc::mmap(address as *mut libc::c_void, len, protection, flags, alias.memory.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: this unmaps the mapping that was just made.
        unsafe { libc::madvise(at, len, libc::MADV_DONTFORK) };
        Ok(())
    }

    pub fn release(&self, address: usize, len: usize) {
        let usable = libc::PROT_READ | libc::PROT_WRITE;
        let _ = super::protection(address, len, libc::PROT_READ);
        // SAFETY: a new mapping, filled from this mechanism's pages and moved to where the program has its
        // own. Shared pages must not be left there, because a child process would share them.
        unsafe {
            let fresh =
                libc::mmap(ptr::null_mut(), len, usable, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
            if fresh == libc::MAP_FAILED {
                let _ = super::protection(address, len, usable);
            } else {
                ptr::copy_nonoverlapping(self.bytes(address), fresh.cast(), len);
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                libc::mremap(fresh, len, len, flags, address as *mut libc::c_void);
            }
        }
        let mut aliases = lock(&self.aliases);
        if let Some(at) = aliases.iter().position(|alias| alias.start == address) {
            let alias = aliases.swap_remove(at);
            RANGES[alias.known].end.store(0, Ordering::Release);
        }
    }

    pub fn unmap(&self, address: usize, len: usize) {
        let mut aliases = lock(&self.aliases);
        if let Some(at) = aliases.iter().position(|alias| alias.start == address) {
            let alias = aliases.swap_remove(at);
            RANGES[alias.known].end.store(0, Ordering::Release);
        }
        super::unplace(address, len);
    }

    pub fn open_range(&self, _: usize, _: usize) -> io::Result<()> {
        Ok(())
    }

    pub fn close_range(&self, _: usize, _: usize) {}

    pub fn faults(&self) -> io::Result<Vec<Fault>> {
        let mut message = MaybeUninit::<Message>::uninit();
        loop {
            // SAFETY: the kernel writes at most one message.
            let n = unsafe {
                libc::read(
                    self.reader.as_raw_fd(),
                    message.as_mut_ptr().cast(),
                    std::mem::size_of::<Message>(),
                )
            };
            if n == std::mem::size_of::<Message>() as isize {
                // SAFETY: the message was read as a whole.
                let Message { address, write, place } = unsafe { message.assume_init() };
                return Ok(vec![Fault { address, write: write != 0, token: place }]);
            }
            let error = io::Error::last_os_error();
            if n >= 0 || error.raw_os_error() != Some(libc::EINTR) {
                return Err(error);
            }
        }
    }

    /// The second mapping of an address.
    fn alias(&self, address: usize) -> Option<*mut u8> {
        let aliases = lock(&self.aliases);
        let alias = aliases.iter().find(|alias| (alias.start..alias.start + alias.len).contains(&address))?;
        // SAFETY: the second mapping is as long as the range that contains the offset.
        Some(unsafe { alias.mapping.base().add(address - alias.start) })
    }

    pub fn fill(&self, address: usize, bytes: &[u8], writable: bool) -> io::Result<()> {
        let to = self.alias(address).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: callers fill inside a range, and its second mapping is as long.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        self.protect(address, bytes.len(), !writable)
    }

    pub fn protect(&self, address: usize, len: usize, on: bool) -> io::Result<()> {
        let write = if on { 0 } else { libc::PROT_WRITE };
        super::protection(address, len, libc::PROT_READ | write)
    }

    pub fn clear(&self, address: usize, len: usize) -> io::Result<()> {
        // Otherwise a page that the program still accesses would appear as zeros.
        super::protection(address, len, libc::PROT_NONE)?;
        let aliases = lock(&self.aliases);
        let found = aliases.iter().find(|alias| (alias.start..alias.start + alias.len).contains(&address));
        if let Some(alias) = found {
            let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let offset = (address - alias.start) as libc::off_t;
            // SAFETY: a hole in this module's own file, whose contents are no longer needed.
            unsafe { libc::fallocate(alias.memory.as_raw_fd(), hole, offset, len as libc::off_t) };
        }
        Ok(())
    }

    pub fn bytes(&self, address: usize) -> *const u8 {
        self.alias(address).map_or(ptr::null(), |at| at.cast_const())
    }

    pub fn retry(&self, fault: &Fault) {
        answer(fault, ANSWERED);
    }

    pub fn refuse(&self, fault: &Fault) {
        answer(fault, REFUSED);
    }
}

/// An unused entry. The caller holds the lock of the second mappings.
fn free_range() -> Option<usize> {
    (0..MOST_RANGES).find(|n| RANGES[*n].end.load(Ordering::Acquire) == 0)
}

fn answer(fault: &Fault, answer: u32) {
    let Some(stop) = STOPS.get(fault.token as usize) else { return };
    stop.store(answer, Ordering::Release);
    futex(stop, libc::FUTEX_WAKE, 1);
}

fn memfd(len: usize) -> io::Result<OwnedFd> {
    // SAFETY: creates a descriptor from a C string.
    let fd = unsafe { libc::memfd_create(c"rgpu-managed".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    let memory = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: a descriptor of this function.
    if unsafe { libc::ftruncate(memory.as_raw_fd(), len as libc::off_t) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(memory)
}

fn install() -> io::Result<OwnedFd> {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns. The other end stays open for the handler as long as
    // the process lives.
    let reader = unsafe { OwnedFd::from_raw_fd(ends[0]) };
    PIPE.store(ends[1], Ordering::Release);
    // SAFETY: a structure of integers, for which zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    // On the alternate stack if the thread has one, else on its own; blocked signals stay blocked.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // While a thread is stopped, it handles no other signals: such a handler's access would be a second
    // SIGSEGV, and one that is blocked ends the process.
    // SAFETY: this structure's own mask.
    unsafe {
        libc::sigfillset(&mut action.sa_mask);
        OWN_FAULTS.iter().for_each(|signal| _ = libc::sigdelset(&mut action.sa_mask, *signal));
    }
    let before = Box::leak(Box::new(action));
    // SAFETY: both structures are complete, and the handler only does what is allowed in a handler.
    if unsafe { libc::sigaction(libc::SIGSEGV, &action, before) } < 0 {
        return Err(io::Error::last_os_error());
    }
    BEFORE.store(before, Ordering::Release);
    Ok(reader)
}

fn futex(word: &AtomicU32, operation: libc::c_int, value: u32) {
    // SAFETY: a word of this process; no timeout.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            operation | libc::FUTEX_PRIVATE_FLAG,
            value,
            ptr::null::<libc::timespec>(),
        )
    };
}

fn is_known(address: usize) -> bool {
    RANGES[..USED.load(Ordering::Acquire)].iter().any(|range| {
        let end = range.end.load(Ordering::Acquire);
        address < end && address >= range.start.load(Ordering::Acquire)
    })
}

/// Handles SIGSEGV. It uses only what is allowed in a signal handler: atomics, write(2), futex(2),
/// sigaction(2).
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes both to a handler; `errno` is this thread's.
    let (address, write, errno) = unsafe {
        let machine = &(*context.cast::<libc::ucontext_t>()).uc_mcontext;
        // Bit 1 of the processor's error code is set for writes.
        let write = machine.gregs[libc::REG_ERR as usize] & 2 != 0;
        ((*info).si_addr() as usize, write, *libc::__errno_location())
    };
    // Memory that has been released since is the program's, which may access it. If not, that faults again.
    if !forked() && is_known(address) && (stop(address, write) || !is_known(address)) {
        // SAFETY: `errno` is this thread's.
        unsafe { *libc::__errno_location() = errno };
        return;
    }
    let before = BEFORE.load(Ordering::Acquire);
    // SAFETY: `install` stored a complete structure and never frees it. A handler there expects these
    // arguments. Without one, the repeated access ends the process.
    unsafe {
        match (*before).sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            }
            handler if (*before).sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
            handler => {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}

/// Reports a fault and sleeps until it is resolved. Returns false if nothing is mapped at the address.
fn stop(address: usize, write: bool) -> bool {
    let place = loop {
        let free = STOPS.iter().position(|stop| {
            stop.compare_exchange(FREE, STOPPED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        match free {
            Some(place) => break place,
            None => std::hint::spin_loop(),
        }
    };
    let message = Message { address, write: write.into(), place: place as u32 };
    // SAFETY: a complete message. The pipe takes it as a whole or blocks this thread.
    let written = unsafe {
        libc::write(
            PIPE.load(Ordering::Acquire),
            ptr::from_ref(&message).cast(),
            std::mem::size_of::<Message>(),
        )
    };
    let told = written == std::mem::size_of::<Message>() as isize;
    while told && STOPS[place].load(Ordering::Acquire) == STOPPED {
        futex(&STOPS[place], libc::FUTEX_WAIT, STOPPED);
    }
    STOPS[place].swap(FREE, Ordering::AcqRel) == ANSWERED
}
