//! The descriptors that a process keeps for the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fstat};

use crate::manager::Manager;
use crate::{KEPT, LIST, VARIABLES, clock};

/// How long a daemon that ends or executes its successor waits until the service manager has all messages.
const SENT_WITHIN: Duration = Duration::from_secs(2);

/// The longest list that goes to the next program in its environment, in bytes. The kernel takes no variable
/// of more than 128 KiB (`MAX_ARG_STRLEN`).
const MAX_VARIABLE: usize = 64 << 10;
/// Most bytes of names, with one more for each, that a service manager is given. A longer list would not fit
/// into `LISTEN_FDNAMES`, and then the service manager could not start this daemon again at all.
const MAX_NAMES: usize = 120_000;
/// How many of them may be of descriptors that can be [spared](Store::keep_if_room).
const MAX_SPARED: usize = MAX_NAMES / 4 * 3;

/// The numbers of a file's device and inode. Files that have no inode of their own share one, eventfds for
/// example.
type Identity = (u64, u64);

fn identity(fd: impl AsFd) -> io::Result<Identity> {
    let stat = fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// A descriptor for the next process.
#[derive(Debug)]
struct Entry {
    fd: OwnedFd,
    file: Identity,
    /// Whether the service manager has it.
    passed: bool,
}

/// What is kept.
#[derive(Debug, Default)]
struct Kept {
    entries: BTreeMap<String, Entry>,
    /// The names of each file.
    files: BTreeSet<(Identity, String)>,
    /// Bytes of the names that the service manager has.
    names: usize,
}

impl Kept {
    /// What a name adds to `names`.
    fn length(name: &str) -> usize {
        name.len() + 1
    }

    /// Removes an entry. Returns it if it was there.
    fn remove(&mut self, name: &str) -> Option<Entry> {
        let entry = self.entries.remove(name)?;
        self.files.remove(&(entry.file, name.to_owned()));
        self.names -= if entry.passed { Kept::length(name) } else { 0 };
        Some(entry)
    }
}

/// Descriptors for the next process, by name. A name is at most 200 characters of ASCII without `:`, `=` and
/// control characters.
#[derive(Debug, Default)]
pub struct Store {
    manager: Option<Arc<Manager>>,
    kept: Mutex<Kept>,
    /// Whether the log already says that it can have no more names.
    full: AtomicBool,
}

impl Store {
    /// A store that passes everything to the service manager too, if the environment names one
    /// (`NOTIFY_SOCKET`).
    pub fn new() -> Store {
        let named = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty());
        let manager = named.and_then(|address| {
            let made = Manager::new(&address);
            made.inspect_err(|e| tracing::warn!("NOTIFY_SOCKET {address:?}: {e}")).ok()
        });
        Store { manager, ..Store::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the service manager something. False: it will not hear of it.
    fn tell(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> bool {
        self.manager.as_ref().is_some_and(|manager| manager.tell(text, fd))
    }

    /// Takes a descriptor back from the service manager.
    fn take_back(&self, name: &str) {
        self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None);
    }

    /// Waits until the service manager has all messages, for at most two seconds.
    pub fn wait_until_sent(&self) {
        self.manager.iter().for_each(|manager| manager.wait_until_sent(SENT_WITHIN));
    }

    /// Keeps a duplicate of a descriptor. It replaces any other descriptor with this name. Does not wait for
    /// the service manager.
    ///
    /// # Errors
    /// If this process cannot open more descriptors.
    pub fn keep(&self, name: &str, fd: &impl AsFd) -> io::Result<()> {
        self.keep_within(name, fd, MAX_NAMES)
    }

    /// The same for one of many descriptors that a client can have kept. If there are too many, the service
    /// manager does not get it: what a successor needs to go on with any client's sessions has room in any
    /// case.
    ///
    /// # Errors
    /// As for [`keep`](Store::keep).
    pub fn keep_if_room(&self, name: &str, fd: &impl AsFd) -> io::Result<()> {
        self.keep_within(name, fd, MAX_SPARED)
    }

    fn keep_within(&self, name: &str, fd: &impl AsFd, most: usize) -> io::Result<()> {
        debug_assert!(is_name(name), "{name:?}");
        let own = fd.as_fd().try_clone_to_owned()?;
        // If the service manager polled the descriptor, it would remove a connection whose other end has
        // closed, and a successor could not report why the connection ended.
        let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
        let file = identity(&own)?;
        let mut kept = self.lock();
        if kept.remove(name).is_some_and(|entry| entry.passed) {
            self.take_back(name);
        }
        let fits = kept.names + Kept::length(name) <= most;
        let passed = fits && self.tell(&text, Some(fd.as_fd()));
        kept.names += if passed { Kept::length(name) } else { 0 };
        kept.files.insert((file, name.to_owned()));
        kept.entries.insert(name.to_owned(), Entry { fd: own, file, passed });
        if !fits && self.manager.is_some() && !self.full.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "the service manager can take no more names of descriptors: after a crash, a successor would lack the others"
            );
        }
        Ok(())
    }

    /// The name under which this same file is already kept, among the names that begin with `prefix`. A
    /// service manager stores a file only once, so the file must keep its first name.
    pub fn name_of(&self, prefix: &str, fd: &impl AsFd) -> Option<String> {
        self.find(prefix, fd, |there| is_same(there.as_fd(), fd.as_fd()))
    }

    /// The same for a file in memory, which may have been [opened again](open_again). Other descriptors have
    /// no such name.
    pub fn name_of_memory(&self, prefix: &str, fd: &impl AsFd) -> Option<String> {
        let own = is_memory(fd).then(|| rights(fd).ok())??;
        self.find(prefix, fd, |there| is_memory(there) && rights(there).ok() == Some(own))
    }

    fn find(&self, prefix: &str, fd: &impl AsFd, is: impl Fn(&OwnedFd) -> bool) -> Option<String> {
        // There may be tens of thousands, and the kernel is asked for each comparison of open files.
        let file = identity(fd.as_fd()).ok()?;
        let kept = self.lock();
        let all = kept.files.range((file, prefix.to_owned())..);
        let names = all.map_while(|(other, name)| (*other == file).then_some(name));
        let is = |name: &str| kept.entries.get(name).is_some_and(|entry| is(&entry.fd));
        names.take_while(|name| name.starts_with(prefix)).find(|name| is(name)).cloned()
    }

    /// Stops keeping the descriptor with this name, whether this process or an earlier one kept it.
    pub fn forget(&self, name: &str) {
        let mut kept = self.lock();
        if kept.remove(name).is_none_or(|entry| entry.passed) {
            self.take_back(name);
        }
    }

    /// Stops keeping all descriptors, before this daemon ends.
    pub fn forget_all(&self) {
        let entries = std::mem::take(&mut *self.lock()).entries;
        entries.iter().filter(|(_, entry)| entry.passed).for_each(|(name, _)| self.take_back(name));
        self.wait_until_sent();
    }

    /// Tells the service manager that this daemon serves: the first time, or again after
    /// [`reloading`](Store::reloading).
    pub fn ready(&self) {
        self.tell("READY=1", None);
    }

    /// Tells the service manager that this daemon rereads its configuration or is being replaced, until it is
    /// [`ready`](Store::ready).
    pub fn reloading(&self) {
        let now = Duration::from_nanos(clock::to_ns(Instant::now())).as_micros();
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={now}"), None);
    }

    /// Tells the service manager that this daemon needs this long to end, even if the service manager is
    /// configured to wait for less.
    pub fn ends_within(&self, time: Duration) {
        self.tell(&format!("EXTEND_TIMEOUT_USEC={}", time.as_micros()), None);
    }

    /// Tells the service manager that this daemon is ending.
    pub fn stopping(&self) {
        self.tell("STOPPING=1", None);
    }

    /// Executes `program` in place of this one, with this process's environment and all kept descriptors.
    /// Returns only if that fails, and then nothing has changed. The signal mask stays as it is, so blocked
    /// signals wait for the next program. Messages that the service manager does not have yet are lost:
    /// [`wait_until_sent`](Store::wait_until_sent) first, without any lock that others need.
    pub fn exec(&self, program: &Path, arguments: &[OsString]) -> io::Error {
        match self.try_exec(program, arguments) {
            Ok(never) => match never {},
            Err(e) => e,
        }
    }

    fn try_exec(&self, program: &Path, arguments: &[OsString]) -> io::Result<Infallible> {
        let kept = self.lock();
        let mut words = vec![std::process::id().to_string()];
        words.extend(kept.entries.iter().map(|(name, entry)| format!("{name}={}", entry.fd.as_raw_fd())));
        let list = List::new(&words)?;
        let prepared = prepare(program, arguments, &list.text)?;
        let fds = kept.entries.values().map(|entry| &entry.fd).chain(&list.file);
        let opened = fds.clone().try_for_each(|fd| close_on_exec(fd, false));
        let failed = opened.map_or_else(|e| e, |()| prepared.run());
        // This cannot fail for a descriptor that was just open.
        fds.for_each(|fd| drop(close_on_exec(fd, true)));
        Err(failed)
    }
}

/// Whether a descriptor may have this name.
fn is_name(name: &str) -> bool {
    (1..=200).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic() && !b":=".contains(&byte))
}

/// Whether two descriptors refer to the same open file. False if the kernel does not tell.
fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    /// `KCMP_FILE` of linux/kcmp.h.
    const FILE: libc::c_int = 0;
    let own = std::process::id();
    // SAFETY: a plain system call, which compares two descriptors that are open during the call.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, own, own, FILE, one.as_raw_fd(), other.as_raw_fd()) };
    order == 0
}

/// Whether it is a file in memory: a memfd, or one of tmpfs or hugetlbfs. Its inode is its own.
fn is_memory(fd: &impl AsFd) -> bool {
    fcntl(fd, FcntlArg::F_GET_SEALS).is_ok()
}

/// Whether a file is open for reading, writing or both, as flags of `open(2)`.
fn rights(fd: &impl AsFd) -> io::Result<OFlag> {
    let flags = fcntl(fd, FcntlArg::F_GETFL)?;
    Ok(OFlag::from_bits_retain(flags) & OFlag::O_ACCMODE)
}

/// Opens a file in memory once more, with the same rights: for a service manager that is another file.
///
/// # Errors
/// If it is something else, or this process may not open it.
pub fn open_again(fd: &impl AsFd) -> io::Result<OwnedFd> {
    if !is_memory(fd) {
        return Err(io::Error::other("it is no file in memory"));
    }
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    Ok(nix::fcntl::open(path.as_str(), rights(fd)? | OFlag::O_CLOEXEC, Mode::empty())?)
}

fn close_on_exec(fd: &OwnedFd, close: bool) -> io::Result<()> {
    let flags = if close { FdFlag::FD_CLOEXEC } else { FdFlag::empty() };
    fcntl(fd, FcntlArg::F_SETFD(flags)).map(drop).map_err(io::Error::from)
}

/// What the next program's environment says of the descriptors.
struct List {
    text: String,
    /// The file with all of it, if it is too long for the environment.
    file: Option<OwnedFd>,
}

impl List {
    /// `words`: this process's ID, and the descriptors.
    fn new(words: &[String]) -> io::Result<List> {
        let text = words.join(":");
        if text.len() <= MAX_VARIABLE {
            return Ok(List { text, file: None });
        }
        let mut file = File::from(memfd_create(c"kept", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(text.as_bytes())?;
        let file = OwnedFd::from(file);
        let text = format!("{}:{LIST}={}", std::process::id(), file.as_raw_fd());
        Ok(List { text, file: Some(file) })
    }
}

struct Prepared {
    program: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

fn c_string(text: impl AsRef<OsStr>) -> io::Result<CString> {
    CString::new(text.as_ref().as_bytes()).map_err(io::Error::from)
}

fn prepare(program: &Path, arguments: &[OsString], kept: &str) -> io::Result<Prepared> {
    let stays = |name: &OsString| {
        // The next program talks to the same service manager.
        name == "NOTIFY_SOCKET" || name == "FDSTORE" || !VARIABLES.iter().any(|variable| name == variable)
    };
    let environment = std::env::vars_os().filter(|(name, _)| stays(name)).map(|(name, value)| {
        let mut variable = name;
        variable.push("=");
        variable.push(value);
        c_string(variable)
    });
    Ok(Prepared {
        program: c_string(program)?,
        arguments: arguments.iter().map(c_string).collect::<io::Result<_>>()?,
        environment: environment.chain([c_string(format!("{KEPT}={kept}"))]).collect::<io::Result<_>>()?,
    })
}

impl Prepared {
    fn run(&self) -> io::Error {
        match nix::unistd::execve(&self.program, &self.arguments, &self.environment) {
            Ok(never) => match never {},
            Err(e) => e.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    /// A store, its service manager's socket, and the folder that has it.
    fn store_of_a_manager() -> (Store, UnixDatagram, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let hears = UnixDatagram::bind(&path).unwrap();
        let store = Store { manager: Manager::new(path.as_os_str()).ok(), ..Store::default() };
        (store, hears, folder)
    }

    #[test]
    fn a_service_manager_gets_no_more_names_than_it_can_pass_on() {
        let (store, hears, _folder) = store_of_a_manager();
        hears.set_nonblocking(true).unwrap();
        let heard = || hears.recv(&mut [0; 1000]).is_ok();
        let (file, _) = std::io::pipe().unwrap();
        let name = |number: usize| format!("{number:0199}");
        let keeps = |number| {
            store.keep(&name(number), &file).unwrap();
            heard()
        };
        let most = MAX_NAMES / 200;
        assert!((0..most).all(keeps));
        assert!(!keeps(most), "no room is left");
        assert_eq!(store.lock().entries.len(), most + 1, "it goes to a program that is executed");
        for (gone, was_passed) in [(0, true), (most, false)] {
            store.forget(&name(gone));
            assert_eq!(heard(), was_passed);
        }
        assert!(keeps(0) && !keeps(most));
    }

    #[test]
    fn descriptors_that_can_be_spared_leave_room_for_others() {
        let (store, hears, _folder) = store_of_a_manager();
        hears.set_nonblocking(true).unwrap();
        let heard = || hears.recv(&mut [0; 1000]).is_ok();
        let (file, _) = std::io::pipe().unwrap();
        let passed = |number: &usize| {
            store.keep_if_room(&format!("{number:0199}"), &file).unwrap();
            heard()
        };
        assert_eq!((0..MAX_NAMES / 200).filter(passed).count(), MAX_SPARED / 200);
        store.keep("a-session", &file).unwrap();
        assert!(heard());
    }

    #[test]
    fn nobody_waits_for_a_service_manager_that_does_not_read_and_it_gets_everything_in_order() {
        let (store, hears, _folder) = store_of_a_manager();
        let (file, _) = std::io::pipe().unwrap();
        // More than its socket has room for.
        let names: Vec<String> = (0..1000).map(|number| format!("a-{number}")).collect();
        names.iter().for_each(|name| store.keep(name, &file).unwrap());
        names.iter().for_each(|name| store.forget(name));
        let mut text = [0; 1000];
        let mut heard = || {
            let length = hears.recv(&mut text).unwrap();
            String::from_utf8(text[..length].to_vec()).unwrap()
        };
        for name in &names {
            assert_eq!(heard(), format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"));
        }
        for name in &names {
            assert_eq!(heard(), format!("FDSTOREREMOVE=1\nFDNAME={name}"));
        }
        store.wait_until_sent();
        store.ready();
        assert_eq!(heard(), "READY=1");
    }

    #[test]
    fn a_service_manager_that_does_not_read_gets_fewer_descriptors_but_each_one_is_taken_back() {
        let (store, hears, _folder) = store_of_a_manager();
        hears.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let (file, _) = std::io::pipe().unwrap();
        for number in 0..10_000 {
            store.keep(&format!("a-{number}"), &file).unwrap();
            store.forget(&format!("a-{number}"));
        }
        store.ready();
        let (mut has, mut most, mut text) = (BTreeSet::new(), 0, [0; 1000]);
        loop {
            let length = hears.recv(&mut text).expect("the last message is not lost");
            let text = std::str::from_utf8(&text[..length]).unwrap();
            let Some((what, name)) = text.split_once("FDNAME=") else {
                assert_eq!(text, "READY=1");
                break;
            };
            if what.starts_with("FDSTORE=1") {
                assert!(has.insert(name.to_owned()));
                most += 1;
            } else {
                assert!(has.remove(name), "{name} was never passed");
            }
        }
        assert!(has.is_empty() && most < 10_000, "{has:?} of {most} stay");
    }

    #[test]
    fn a_file_that_comes_again_is_found_under_its_name() {
        let store = Store::default();
        let ((one, _), (other, _)) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        store.keep("a-1", &one).unwrap();
        assert_eq!(store.name_of("a-", &one.try_clone().unwrap()).as_deref(), Some("a-1"));
        assert_eq!((store.name_of("a-", &other), store.name_of("b-", &one)), (None, None));
        store.forget("a-1");
        assert_eq!(store.name_of("", &one), None);
    }
}
