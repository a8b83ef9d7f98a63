//! Pages whose first read or first write another thread resolves. Managed memory, which host and device use
//! in turns, is built on them.
//!
//! A page is absent, readable or writable. An access that the page's state does not allow stops the thread.
//! The caller of [`Pages::faults`] receives the [`Fault`], and the thread continues when that caller has put
//! the page into a state that allows the access. There are two mechanisms:
//! - [`uffd`]: userfaultfd(2). With it, system calls can access the pages too (for example to read a file
//!   into them), if the process may handle the kernel's faults: as root, or through `/dev/userfaultfd`.
//! - [`signal`]: a SIGSEGV handler, for systems without userfaultfd (containers block it by default). System
//!   calls on an absent page then fail with `EFAULT`.

mod signal;
mod uffd;

use std::io;

use crate::log;

/// Page size in bytes.
pub const PAGE: usize = 4096;

/// A stopped access.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The accessed address.
    pub address: usize,
    /// Whether the access is a write.
    pub write: bool,
    /// Identifies the stopped thread, if the mechanism needs to know.
    token: u32,
}

/// Maps memory at exactly this address, inaccessible, and not inherited by child processes.
fn place(address: usize, len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<()> {
    let flags = flags | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    // SAFETY: a new mapping that replaces no other (MAP_FIXED_NOREPLACE).
    let at = unsafe { libc::mmap(address as *mut libc::c_void, len, libc::PROT_NONE, flags, fd, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if at as usize != address {
        // Kernels before 4.17 treat the address as a hint.
        unplace(at as usize, len);
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    // SAFETY: this unmaps the mapping that was just made.
    unsafe { libc::madvise(at, len, libc::MADV_DONTFORK) };
    Ok(())
}

fn unplace(address: usize, len: usize) {
    // SAFETY: a mapping of this module, whose users no longer access it.
    unsafe { libc::munmap(address as *mut libc::c_void, len) };
}

fn protection(address: usize, len: usize, protection: libc::c_int) -> io::Result<()> {
    // SAFETY: the range is inside a mapping of this module; restricting accesses to it is intended.
    let result = unsafe { libc::mprotect(address as *mut libc::c_void, len, protection) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether other processes may have some of these pages, too: whether one is of a mapping with `MAP_SHARED`.
pub fn is_shared(address: usize, len: usize) -> bool {
    let first = address & !(PAGE - 1);
    (first..address + len).step_by(PAGE).any(|page| {
        // SAFETY: an old size of 0 maps a shared page a second time, elsewhere, and is refused for others.
        // Only that second mapping is unmapped.
        unsafe {
            let again = libc::mremap(page as *mut libc::c_void, 0, PAGE, libc::MREMAP_MAYMOVE);
            if again == libc::MAP_FAILED {
                // Another reason, such as a limit, says nothing about the page.
                return io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL);
            }
            libc::munmap(again, PAGE);
            true
        }
    })
}

/// The process's page fault mechanism.
#[derive(Debug)]
pub struct Pages(Mechanism);

#[derive(Debug)]
enum Mechanism {
    Uffd(uffd::Uffd),
    Signal(signal::Signal),
}

macro_rules! either {
    ($self:ident, $inner:ident => $call:expr) => {
        match &$self.0 {
            Mechanism::Uffd($inner) => $call,
            Mechanism::Signal($inner) => $call,
        }
    };
}

impl Pages {
    /// Selects the best mechanism that this process may use. `RGPU_PAGES` (`userfaultfd`, `signal`) selects
    /// one by name.
    ///
    /// # Errors
    ///
    /// If no mechanism is available.
    pub fn open() -> io::Result<Pages> {
        let asked = log::setting::word("RGPU_PAGES", &["userfaultfd", "signal"]);
        if asked != Some("signal") {
            match uffd::Uffd::open() {
                Ok(uffd) => {
                    if !uffd.serves_system_calls() {
                        log::info(format_args!(
                            "managed memory: system calls on pages that the GPU had last fail with EFAULT; \
                             permission for /dev/userfaultfd lets them succeed"
                        ));
                    }
                    return Ok(Pages(Mechanism::Uffd(uffd)));
                }
                Err(error) if asked == Some("userfaultfd") => return Err(error),
                Err(error) => {
                    log::info(format_args!("managed memory: no userfaultfd ({error}); using page protection"))
                }
            }
        }
        signal::Signal::open().map(|signal| Pages(Mechanism::Signal(signal)))
    }

    /// Reserves `len` bytes of addresses, not yet accessible and not inherited by child processes.
    ///
    /// # Errors
    ///
    /// If something else is mapped there.
    pub fn map(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.map(address, len))
    }

    /// Releases addresses from [`map`](Self::map).
    pub fn unmap(&self, address: usize, len: usize) {
        either!(self, m => m.unmap(address, len));
    }

    /// Takes over whole pages that only this process uses. They stay present with their contents. When this
    /// returns, no write is in progress, and from then on every write is a [`Fault`]. Child processes do not
    /// inherit the pages.
    ///
    /// # Errors
    ///
    /// If the mechanism cannot watch such pages; they are then unchanged.
    ///
    /// # Safety
    ///
    /// The pages must be readable and writable, and stay mapped until they are [released](Self::release).
    pub unsafe fn adopt(&self, address: usize, len: usize) -> io::Result<()> {
        // SAFETY: the caller guarantees that the pages are accessible and stay mapped.
        unsafe { either!(self, m => m.adopt(address, len)) }
    }

    /// Gives back pages from [`adopt`](Self::adopt). Present pages become ordinary pages with their contents;
    /// absent pages become zero.
    pub fn release(&self, address: usize, len: usize) {
        either!(self, m => m.release(address, len));
    }

    /// Makes accesses to the range, whose pages are absent, [`Fault`]s. Before, they crash the program like
    /// any access to unmapped memory.
    pub fn open_range(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.open_range(address, len))
    }

    /// Makes accesses to the range crash the program again. Its contents are lost.
    pub fn close_range(&self, address: usize, len: usize) {
        // If pages cannot be removed, the range is still closed.
        let _ = self.clear(address, len);
        either!(self, m => m.close_range(address, len));
    }

    /// Waits for faults.
    ///
    /// # Errors
    ///
    /// If the mechanism itself fails, which does not happen in normal operation.
    pub fn faults(&self) -> io::Result<Vec<Fault>> {
        either!(self, m => m.faults())
    }

    /// Fills absent pages, which become readable and, with `writable`, writable.
    pub fn fill(&self, address: usize, bytes: &[u8], writable: bool) -> io::Result<()> {
        either!(self, m => m.fill(address, bytes, writable))
    }

    /// Makes present pages writable.
    pub fn allow_writes(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.protect(address, len, false))
    }

    /// Makes writes to present pages faults. When it returns, no write is in progress.
    pub fn forbid_writes(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.protect(address, len, true))
    }

    /// Makes pages absent.
    ///
    /// # Errors
    ///
    /// If the kernel refuses; the program may then still access the pages as before.
    pub fn clear(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.clear(address, len))
    }

    /// An address where the bytes of present pages can be read, whatever the program may access.
    pub fn bytes(&self, address: usize) -> *const u8 {
        either!(self, m => m.bytes(address))
    }

    /// Lets the stopped thread retry its access.
    pub fn retry(&self, fault: &Fault) {
        either!(self, m => m.retry(fault));
    }

    /// Ends the program as if nothing were mapped, because the stopped access is to a closed range.
    pub fn refuse(&self, fault: &Fault) {
        either!(self, m => m.refuse(fault));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};
    use std::os::unix::thread::JoinHandleExt;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use crate::lock;

    const COUNT: usize = 64;
    /// Distance in bytes between the pages of different tests.
    const APART: usize = 1 << 30;

    /// A mechanism and a thread that resolves its faults by filling absent pages with their number. There is
    /// one of each per process.
    #[derive(Clone)]
    struct Served {
        pages: Arc<Pages>,
        /// Number of write faults, by test.
        writes: Arc<Mutex<HashMap<usize, u32>>>,
        /// A page whose faults are refused, but not before this is another one.
        refused: Arc<AtomicUsize>,
        /// Whether such a fault has come.
        refusing: Arc<AtomicBool>,
        base: usize,
    }

    impl Served {
        fn new(mechanism: Mechanism) -> Served {
            let served = Served {
                pages: Arc::new(Pages(mechanism)),
                writes: Arc::default(),
                refused: Arc::default(),
                refusing: Arc::default(),
                base: 0,
            };
            let serving = served.clone();
            std::thread::spawn(move || serving.serve());
            served
        }

        fn serve(&self) {
            let mut present = HashSet::new();
            loop {
                for fault in self.pages.faults().unwrap() {
                    let at = fault.address & !(PAGE - 1);
                    if self.refused.load(Ordering::Acquire) == at {
                        self.refusing.store(true, Ordering::Release);
                        test_kit::eventually(|| self.refused.load(Ordering::Acquire) != at);
                        self.pages.refuse(&fault);
                        continue;
                    }
                    if fault.write {
                        *lock(&self.writes).entry(at & !(APART - 1)).or_default() += 1;
                    }
                    if present.insert(at) {
                        let number = (at % APART / PAGE) as u8;
                        self.pages.fill(at, &[number; PAGE], fault.write).unwrap();
                    } else if fault.write {
                        self.pages.allow_writes(at, PAGE).unwrap();
                    }
                    self.pages.retry(&fault);
                }
            }
        }

        /// The same mechanism with separate pages.
        fn fresh(&self) -> Served {
            static NEXT: AtomicUsize = AtomicUsize::new(0x2800_0000_0000);
            let base = NEXT.fetch_add(APART, Ordering::Relaxed);
            self.pages.map(base, COUNT * PAGE).unwrap();
            self.pages.open_range(base, COUNT * PAGE).unwrap();
            Served { base, ..self.clone() }
        }

        fn asked(&self) -> u32 {
            lock(&self.writes).get(&self.base).copied().unwrap_or(0)
        }
    }

    fn each(test: impl Fn(Served)) {
        static UFFD: OnceLock<Option<Served>> = OnceLock::new();
        static SIGNAL: OnceLock<Served> = OnceLock::new();
        // A machine may have no userfaultfd; the other mechanism always works.
        let uffd =
            UFFD.get_or_init(|| uffd::Uffd::open().ok().map(|uffd| Served::new(Mechanism::Uffd(uffd))));
        if let Some(served) = uffd {
            test(served.fresh());
        }
        let signal = || Served::new(Mechanism::Signal(signal::Signal::open().unwrap()));
        test(SIGNAL.get_or_init(signal).fresh());
    }

    #[test]
    fn a_page_faults_once_for_reading_and_once_for_writing() {
        each(|served| {
            let base = served.base;
            for page in 0..COUNT {
                let at = (base + page * PAGE + page) as *mut u8;
                // SAFETY: accessible pages whose faults the thread above resolves.
                unsafe {
                    assert_eq!(at.read_volatile(), page as u8);
                    at.write_volatile(200);
                    at.write_volatile(201);
                    assert_eq!((at.read_volatile(), at.add(1).read_volatile()), (201, page as u8));
                }
            }
            assert_eq!(served.asked(), COUNT as u32);
        });
    }

    #[test]
    fn written_bytes_can_be_read_elsewhere_and_writes_forbidden_again() {
        each(|served| {
            let (pages, base) = (&served.pages, served.base);
            let at = (base + 5 * PAGE + 3) as *mut u8;
            // SAFETY: accessible pages whose faults the thread above resolves.
            unsafe {
                at.write_volatile(77);
                pages.forbid_writes(base + 5 * PAGE, PAGE).unwrap();
                assert_eq!(pages.bytes(base + 5 * PAGE + 3).read_volatile(), 77);
                at.write_volatile(78);
                assert_eq!(pages.bytes(base + 5 * PAGE + 3).read_volatile(), 78);
            }
            assert_eq!(served.asked(), 2);
        });
    }

    #[test]
    fn adopted_pages_are_watched_until_their_release() {
        each(|served| {
            let pages = &served.pages;
            for flags in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
                let flags = flags | libc::MAP_ANONYMOUS;
                let (len, protection) = (8 * PAGE, libc::PROT_READ | libc::PROT_WRITE);
                // SAFETY: a mapping of this test. It stays mapped, so that the thread above never sees an
                // address twice.
                unsafe {
                    let base = libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0);
                    let at = |n: usize| base.cast::<u8>().add(n);
                    // The kernel keeps them as two mappings.
                    libc::madvise(base, 4 * PAGE, libc::MADV_NOHUGEPAGE);
                    at(PAGE).write_volatile(9);
                    at(2 * PAGE).write_volatile(10);
                    pages.adopt(base as usize, len).unwrap();
                    assert_eq!(
                        (at(PAGE).read_volatile(), pages.bytes(at(PAGE) as usize).read_volatile()),
                        (9, 9)
                    );
                    // Absent pages fault; present ones do not until they are cleared.
                    pages.clear(base as usize, len).unwrap();
                    let number = |n: usize| ((at(n) as usize) % APART / PAGE) as u8;
                    assert_eq!(at(PAGE + 7).read_volatile(), number(PAGE));
                    pages.clear(base as usize, len).unwrap();
                    pages.fill(base as usize, &[6; 8 * PAGE], true).unwrap();
                    pages.forbid_writes(base as usize, len).unwrap();
                    assert_eq!(at(7 * PAGE).read_volatile(), 6);
                    pages.allow_writes(base as usize, len).unwrap();
                    at(3 * PAGE).write_volatile(33);
                    pages.release(base as usize, len);
                    assert_eq!((at(PAGE + 7).read_volatile(), at(3 * PAGE).read_volatile()), (6, 33));
                    at(5 * PAGE).write_volatile(1);
                    assert_eq!(at(5 * PAGE + 1).read_volatile(), 6);
                }
            }
        });
    }

    /// For tests that have a page whose faults are refused.
    static REFUSED: Mutex<()> = Mutex::new(());

    /// Such a page, which stays.
    fn refused_page(served: &Served) -> usize {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) } as usize;
        // SAFETY: this page.
        unsafe { served.pages.adopt(base, PAGE) }.unwrap();
        served.refusing.store(false, Ordering::Release);
        served.refused.store(base, Ordering::Release);
        base
    }

    /// A thread writes to pages while they are released, which is allowed: they stay the program's.
    #[test]
    fn pages_can_be_released_under_a_thread_that_writes_to_them() {
        each(|served| {
            let _turn = lock(&REFUSED);
            let (pages, base) = (&served.pages, refused_page(&served));
            std::thread::scope(|scope| {
                // SAFETY: the page of this test.
                let writer = scope.spawn(move || unsafe { (base as *mut u8).write_volatile(7) });
                test_kit::eventually(|| served.refusing.load(Ordering::Acquire));
                pages.release(base, PAGE);
                // Whoever answers does not know the page any more.
                served.refused.store(0, Ordering::Release);
                writer.join().unwrap();
            });
            // SAFETY: as above.
            assert_eq!(unsafe { (base as *const u8).read_volatile() }, 7);
            // Faults still come here, and not to whoever had them before.
            // SAFETY: an accessible page whose faults the thread above resolves.
            assert_eq!(unsafe { ((served.base + PAGE) as *const u8).read_volatile() }, 1);
        });
    }

    /// A thread is stopped at a page when it gets a signal, whose handler uses another one.
    #[test]
    fn a_signal_handler_of_a_stopped_thread_can_use_such_pages() {
        static OTHER: AtomicUsize = AtomicUsize::new(0);
        static READ: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn handler(_: libc::c_int) {
            // SAFETY: an accessible page whose faults the thread above resolves.
            let byte = unsafe { (OTHER.load(Ordering::Acquire) as *const u8).read_volatile() };
            READ.store(byte.into(), Ordering::Release);
        }
        // SAFETY: a handler that does what is allowed in one.
        unsafe { libc::signal(libc::SIGUSR2, handler as *const () as usize) };
        each(|served| {
            let _turn = lock(&REFUSED);
            let base = refused_page(&served);
            OTHER.store(served.base + 3 * PAGE, Ordering::Release);
            READ.store(0, Ordering::Release);
            // SAFETY: the page of this test.
            let writer = std::thread::spawn(move || unsafe { (base as *mut u8).write_volatile(7) });
            test_kit::eventually(|| served.refusing.load(Ordering::Acquire));
            // SAFETY: a thread that is not joined before.
            unsafe { libc::pthread_kill(writer.as_pthread_t(), libc::SIGUSR2) };
            served.pages.release(base, PAGE);
            served.refused.store(0, Ordering::Release);
            writer.join().unwrap();
            assert_eq!(READ.load(Ordering::Acquire), 3);
        });
    }

    #[test]
    fn memory_is_shared_if_one_of_its_pages_is() {
        let (len, protection) = (4 * PAGE, libc::PROT_READ | libc::PROT_WRITE);
        let map = |at: *mut libc::c_void, len, flags| {
            // SAFETY: a new mapping, or one over a part of this test's own.
            unsafe { libc::mmap(at, len, protection, flags | libc::MAP_ANONYMOUS, -1, 0) }
        };
        let base = map(std::ptr::null_mut(), len, libc::MAP_PRIVATE);
        let at = base as usize;
        assert!(!is_shared(at, len));
        map((at + 2 * PAGE) as *mut libc::c_void, PAGE, libc::MAP_SHARED | libc::MAP_FIXED);
        assert!(is_shared(at, len) && is_shared(at + 7, 2 * PAGE) && is_shared(at + 3 * PAGE - 1, 1));
        assert!(!is_shared(at, 2 * PAGE) && !is_shared(at + 3 * PAGE, PAGE));
        // SAFETY: this test's own memory.
        unsafe { libc::munmap(base, len) };
    }

    #[test]
    fn locked_pages_can_be_removed_too() {
        each(|Served { pages, base, .. }| {
            pages.fill(base, &[1; 2 * PAGE], true).unwrap();
            let at = base as *mut u8;
            // SAFETY: present pages of this test.
            unsafe {
                assert_eq!(libc::mlock(at.cast(), 2 * PAGE), 0);
                at.write_volatile(9);
            }
            pages.clear(base, 2 * PAGE).unwrap();
            pages.fill(base, &[2; 2 * PAGE], true).unwrap();
            // SAFETY: present pages of this test.
            assert_eq!(unsafe { (at.read_volatile(), at.add(PAGE).read_volatile()) }, (2, 2));
        });
    }

    #[test]
    fn threads_that_fault_on_one_page_together_all_continue() {
        each(|Served { base, .. }| {
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(move || {
                        for page in 0..COUNT {
                            // SAFETY: accessible pages whose faults the thread above resolves.
                            let value = unsafe { ((base + page * PAGE) as *const u8).read_volatile() };
                            assert_eq!(value, page as u8);
                        }
                    });
                }
            });
        });
    }

    #[test]
    fn an_occupied_address_is_refused() {
        each(|Served { pages, base, .. }| {
            assert!(pages.map(base, PAGE).is_err());
        });
    }
}
