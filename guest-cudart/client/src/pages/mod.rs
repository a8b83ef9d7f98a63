//! Pages whose first use, and first change, another thread answers: what memory that host and device take turns on is made of.
//!
//! A page is absent, readable or writable. The program that touches what it may not is stopped, its [`Fault`] is read by whoever called [`Pages::faults`], and it goes on when that thread
//! has put the page into a state that allows it. Two mechanisms do this:
//! - [`uffd`]: userfaultfd(2). With it system calls may use the pages as well (a file is read into them), if the process may have the kernel's faults answered: as root, or through
//!   `/dev/userfaultfd`;
//! - [`signal`]: a handler of SIGSEGV, where there is no userfaultfd (containers refuse it by default). System calls on a page that is absent then fail with `EFAULT`.

mod signal;
mod uffd;

use std::io;

use crate::log;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// An access that is stopped.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// Where.
    pub address: usize,
    /// Whether it writes.
    pub write: bool,
    /// Names the stopped thread where the mechanism has to know.
    token: u32,
}

/// Maps exactly here, closed to every use, and kept out of children of the process.
fn place(address: usize, len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<()> {
    let flags = flags | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    // SAFETY: a new mapping that replaces none.
    let at = unsafe { libc::mmap(address as *mut libc::c_void, len, libc::PROT_NONE, flags, fd, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if at as usize != address {
        // A kernel before 4.17 takes the address for a wish.
        unplace(at as usize, len);
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    // SAFETY: the mapping that was just made.
    unsafe { libc::madvise(at, len, libc::MADV_DONTFORK) };
    Ok(())
}

fn unplace(address: usize, len: usize) {
    // SAFETY: a mapping of this module's, whose users have let go of it.
    unsafe { libc::munmap(address as *mut libc::c_void, len) };
}

fn protection(address: usize, len: usize, protection: libc::c_int) -> io::Result<()> {
    // SAFETY: inside a mapping of this module's; what the program may do there is what this is about.
    let result = unsafe { libc::mprotect(address as *mut libc::c_void, len, protection) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The process's mechanism.
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
    /// Chooses the best mechanism that this process may use. `RGPU_PAGES` (`userfaultfd`, `signal`) chooses one by name.
    ///
    /// # Errors
    /// When there is none.
    pub fn open() -> io::Result<Pages> {
        let asked = std::env::var("RGPU_PAGES").unwrap_or_default();
        if asked != "signal" {
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
                Err(error) if asked == "userfaultfd" => return Err(error),
                Err(error) => {
                    log::info(format_args!("managed memory: no userfaultfd ({error}); using page protection"))
                }
            }
        }
        signal::Signal::open().map(|signal| Pages(Mechanism::Signal(signal)))
    }

    /// Takes `len` bytes of the process's addresses, none of them for use yet. Children of the process do not inherit them.
    ///
    /// # Errors
    /// Something else is there.
    pub fn map(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.map(address, len))
    }

    /// Gives addresses back that [`map`](Self::map) took.
    pub fn unmap(&self, address: usize, len: usize) {
        either!(self, m => m.unmap(address, len));
    }

    /// Takes over whole pages that the process has and uses. They stay present, with what is in them; no change is under way when this returns, and from then on
    /// each one is a [`Fault`]. Children of the process do not inherit them.
    ///
    /// # Errors
    /// The pages are such as the mechanism cannot watch; they are as they were.
    ///
    /// # Safety
    /// The pages may be read and written, and stay until they are [given back](Self::release) or unmapped.
    pub unsafe fn adopt(&self, address: usize, len: usize) -> io::Result<()> {
        // SAFETY: as the caller says.
        unsafe { either!(self, m => m.adopt(address, len)) }
    }

    /// Lets go of pages that [`adopt`](Self::adopt) took over, with what is in them: present pages are ordinary ones, absent pages are zero.
    pub fn release(&self, address: usize, len: usize) {
        either!(self, m => m.release(address, len));
    }

    /// From now on accesses to the range, which is absent, are [`Fault`]s; before they end the program, as those to memory that is not there do.
    pub fn open_range(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.open_range(address, len))
    }

    /// Accesses to the range end the program again. What is in it is lost.
    pub fn close_range(&self, address: usize, len: usize) {
        // Pages that stay are closed all the same.
        let _ = self.clear(address, len);
        either!(self, m => m.close_range(address, len));
    }

    /// Waits for faults.
    ///
    /// # Errors
    /// The mechanism's own; none in ordinary operation.
    pub fn faults(&self) -> io::Result<Vec<Fault>> {
        either!(self, m => m.faults())
    }

    /// Fills absent pages, which are readable from then on and, if `writable`, may be changed.
    pub fn fill(&self, address: usize, bytes: &[u8], writable: bool) -> io::Result<()> {
        either!(self, m => m.fill(address, bytes, writable))
    }

    /// Lets present pages be changed.
    pub fn allow_writes(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.protect(address, len, false))
    }

    /// Makes changes of present pages faults. When it returns, none is under way.
    pub fn forbid_writes(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.protect(address, len, true))
    }

    /// Makes pages absent.
    ///
    /// # Errors
    /// The kernel refuses: the program may still use the pages as they were.
    pub fn clear(&self, address: usize, len: usize) -> io::Result<()> {
        either!(self, m => m.clear(address, len))
    }

    /// Where the bytes of present pages can be read, whatever the program may do with them.
    pub fn bytes(&self, address: usize) -> *const u8 {
        either!(self, m => m.bytes(address))
    }

    /// Lets the stopped access be tried again.
    pub fn retry(&self, fault: &Fault) {
        either!(self, m => m.retry(fault));
    }

    /// The stopped access is to a range that is closed: it ends the program, as if nothing were there.
    pub fn refuse(&self, fault: &Fault) {
        either!(self, m => m.refuse(fault));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use crate::lock;

    const COUNT: usize = 64;
    /// A test's pages begin at a multiple of this.
    const APART: usize = 1 << 30;

    /// A mechanism and a thread that answers its faults: absent pages are filled with their number. The process has one of each.
    #[derive(Clone)]
    struct Served {
        pages: Arc<Pages>,
        /// Changes that were asked for, by test.
        writes: Arc<Mutex<HashMap<usize, u32>>>,
        base: usize,
    }

    impl Served {
        fn new(mechanism: Mechanism) -> Served {
            let served = Served { pages: Arc::new(Pages(mechanism)), writes: Arc::default(), base: 0 };
            let serving = served.clone();
            std::thread::spawn(move || serving.serve());
            served
        }

        fn serve(&self) {
            let mut present = HashSet::new();
            loop {
                for fault in self.pages.faults().unwrap() {
                    let at = fault.address & !(PAGE - 1);
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

        /// The same with pages of its own.
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
        // A machine that refuses userfaultfd altogether has the other.
        let uffd =
            UFFD.get_or_init(|| uffd::Uffd::open().ok().map(|uffd| Served::new(Mechanism::Uffd(uffd))));
        if let Some(served) = uffd {
            test(served.fresh());
        }
        let signal = || Served::new(Mechanism::Signal(signal::Signal::open().unwrap()));
        test(SIGNAL.get_or_init(signal).fresh());
    }

    #[test]
    fn a_page_is_filled_when_it_is_read_and_a_change_is_asked_for_once() {
        each(|served| {
            let base = served.base;
            for page in 0..COUNT {
                let at = (base + page * PAGE + page) as *mut u8;
                // SAFETY: open pages, answered by the thread above.
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
    fn what_was_changed_can_be_read_elsewhere_and_changes_can_be_forbidden_again() {
        each(|served| {
            let (pages, base) = (&served.pages, served.base);
            let at = (base + 5 * PAGE + 3) as *mut u8;
            // SAFETY: as above.
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
    fn pages_of_the_process_are_watched_from_their_adoption_to_their_release() {
        each(|served| {
            let pages = &served.pages;
            for flags in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
                let flags = flags | libc::MAP_ANONYMOUS;
                let (len, protection) = (8 * PAGE, libc::PROT_READ | libc::PROT_WRITE);
                // SAFETY: a mapping of this test's own, which stays, so that the thread above meets no address twice.
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
                    // Absent pages are asked for; those that were present are until they are cleared.
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

    #[test]
    fn pages_that_the_program_has_locked_are_taken_away_as_others_are() {
        each(|Served { pages, base, .. }| {
            pages.fill(base, &[1; 2 * PAGE], true).unwrap();
            let at = base as *mut u8;
            // SAFETY: present pages of this test's.
            unsafe {
                assert_eq!(libc::mlock(at.cast(), 2 * PAGE), 0);
                at.write_volatile(9);
            }
            pages.clear(base, 2 * PAGE).unwrap();
            pages.fill(base, &[2; 2 * PAGE], true).unwrap();
            // SAFETY: as above.
            assert_eq!(unsafe { (at.read_volatile(), at.add(PAGE).read_volatile()) }, (2, 2));
        });
    }

    #[test]
    fn threads_that_touch_one_page_at_once_all_go_on() {
        each(|Served { base, .. }| {
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(move || {
                        for page in 0..COUNT {
                            // SAFETY: as above.
                            let value = unsafe { ((base + page * PAGE) as *const u8).read_volatile() };
                            assert_eq!(value, page as u8);
                        }
                    });
                }
            });
        });
    }

    #[test]
    fn a_place_that_is_taken_is_refused() {
        each(|Served { pages, base, .. }| {
            assert!(pages.map(base, PAGE).is_err());
        });
    }
}
