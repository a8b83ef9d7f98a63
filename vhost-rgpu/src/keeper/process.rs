//! A device process as the keeper sees it: how it is started, what it says, and how it ends.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::status::Counted;
use crate::device_process::{CONTROL, Role};
use crate::link::{self, Control, Stored, ToDevice, ToKeeper};

/// Starts device processes and listens to them. Each is this program again, with the same command line and the configuration as the keeper has read it.
#[derive(Debug)]
pub struct Processes {
    arguments: Vec<OsString>,
    /// The configuration file's path and text.
    file: Option<(String, String)>,
    list: Mutex<List>,
    /// Written when there is another process to listen to.
    changed: EventFd,
}

#[derive(Debug, Default)]
struct List {
    running: Vec<Arc<Process>>,
    /// What those that have ended had done.
    ended: Counted,
}

/// Whoever asked for a device process.
pub trait Owner: Send + Sync + std::fmt::Debug {
    /// A client's session is over. Called by the keeper's main thread; must not block.
    fn gone(&self, process: &Arc<Process>, number: u64);

    /// The process has ended, or is about to be ended because it does not keep to the protocol. Called once, by the keeper's main thread; must not block.
    fn over(&self, process: &Arc<Process>);
}

impl Processes {
    /// Starts processes with these arguments and the text of this file.
    pub fn new(arguments: Vec<OsString>, file: Option<(String, String)>) -> io::Result<Processes> {
        let changed = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Processes { arguments, file, list: Mutex::default(), changed })
    }

    /// Starts a device process. `most_stored` bounds what it may store.
    pub fn start(
        &self,
        role: &Role,
        owner: Arc<dyn Owner>,
        stored: BTreeMap<u32, Stored>,
        most_stored: usize,
    ) -> io::Result<Arc<Process>> {
        let (control, theirs) = link::pair()?;
        // The program as it was when the keeper started, also after an update has replaced the file.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vhost-rgpu").args(&self.arguments).arg("--device-process").arg(role.to_string());
        command.env_remove("LISTEN_PID").env_remove("LISTEN_FDS").env_remove("LISTEN_FDNAMES");
        command.stdin(std::process::Stdio::null());
        let number = theirs.as_raw_fd();
        // SAFETY: between fork and exec the closure makes system calls only. `dup2` also clears close-on-exec for the new number, unless both numbers are the same.
        unsafe {
            command.pre_exec(move || {
                let done = if number == CONTROL {
                    libc::fcntl(number, libc::F_SETFD, 0)
                } else {
                    libc::dup2(number, CONTROL)
                };
                if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        let child = command.spawn()?;
        drop(theirs);
        let process = Arc::new(Process {
            name: role.to_string(),
            pid: child.id(),
            started: Instant::now(),
            control,
            child: Mutex::new(child),
            owner,
            most_stored,
            ended: EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            heard: Mutex::new(Heard { stored, ..Heard::default() }),
            changed: Condvar::new(),
        });
        self.lock().running.push(process.clone());
        self.changed.write(1)?;
        if let Some((path, text)) = &self.file {
            let file = memory_file(c"configuration", text.as_bytes())?;
            process.tell(&ToDevice::Config { path: path.clone(), text: file })?;
        }
        Ok(process)
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All processes that have not ended, and what the others had done.
    pub fn all(&self) -> (Vec<Arc<Process>>, Counted) {
        let list = self.lock();
        (list.running.clone(), list.ended.clone())
    }

    /// Listens to all processes until one of `others` is readable, or until `limit`.
    pub fn listen(&self, others: &[BorrowedFd<'_>], limit: Option<Instant>) -> io::Result<()> {
        let processes = self.lock().running.clone();
        let watch = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut watched: Vec<PollFd<'_>> =
            processes.iter().map(|process| watch(process.control.as_fd())).collect();
        watched.push(watch(self.changed.as_fd()));
        watched.extend(others.iter().map(|fd| watch(*fd)));
        let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()).as_millis() + 1);
        let timeout =
            left.map_or(PollTimeout::NONE, |left| PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        match poll(&mut watched, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        // The counter only says that the list has changed; it is read anew with each call.
        let _ = self.changed.read();
        for (process, watched) in processes.iter().zip(&watched) {
            // One packet at a time: a process that sends without end delays no other.
            if watched.any().unwrap_or(true) && !process.hear() {
                let done = process.last_status();
                let mut list = self.lock();
                list.running.retain(|other| !Arc::ptr_eq(other, process));
                list.ended.add(&done);
                drop(list);
                process.finish();
            }
        }
        Ok(())
    }
}

/// A sealed file in memory.
pub fn memory_file(name: &std::ffi::CStr, bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let mut file = std::fs::File::from(file);
    file.write_all(bytes)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file.into())
}

/// What a device process has said so far.
#[derive(Debug, Default)]
struct Heard {
    stored: BTreeMap<u32, Stored>,
    asked: u64,
    answered: u64,
    /// The last status, not read yet.
    report: Option<OwnedFd>,
    status: Counted,
    over: bool,
}

/// A device process.
#[derive(Debug)]
pub struct Process {
    /// What it serves.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    started: Instant,
    control: Control,
    child: Mutex<Child>,
    owner: Arc<dyn Owner>,
    most_stored: usize,
    ended: EventFd,
    heard: Mutex<Heard>,
    changed: Condvar,
}

impl Process {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells it something. Never blocks.
    pub fn tell(&self, message: &ToDevice) -> io::Result<()> {
        self.control.tell_device(message)
    }

    /// Gives it what its predecessor had stored.
    pub fn restore(&self) -> io::Result<()> {
        self.lock().stored.iter().try_for_each(|(channel, stored)| self.control.restore(*channel, stored))
    }

    /// Takes one packet. False: it is over.
    fn hear(self: &Arc<Self>) -> bool {
        let broken = |what: &str| {
            tracing::error!("{}: its device process {} {what} and is ended", self.name, self.pid);
            false
        };
        match self.control.next_from_device() {
            Ok(None) => false,
            Ok(Some(ToKeeper::Store { channel, stored })) => {
                let mut heard = self.lock();
                heard.stored.insert(channel, stored);
                heard.stored.len() <= self.most_stored || broken("stores more than its channels")
            }
            Ok(Some(ToKeeper::Forget { channel })) => {
                self.lock().stored.remove(&channel);
                true
            }
            Ok(Some(ToKeeper::Status { question, text })) => {
                let mut heard = self.lock();
                heard.report = Some(text);
                heard.answered = heard.answered.max(question);
                drop(heard);
                self.changed.notify_all();
                true
            }
            Ok(Some(ToKeeper::Gone { number })) => {
                self.owner.gone(self, number);
                true
            }
            Err(e) => broken(&format!("does not keep to the protocol ({e})")),
        }
    }

    fn finish(self: &Arc<Self>) {
        self.lock().over = true;
        self.changed.notify_all();
        // The counter is 0, so this cannot fail.
        let _ = self.ended.write(1);
        self.owner.over(self);
    }

    /// Readable once it is over.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// How long it has run.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Its status, waiting for it until `deadline`; then the last known one.
    pub fn status(&self, deadline: Instant) -> Counted {
        let mut heard = self.lock();
        heard.asked += 1;
        let question = heard.asked;
        let asked = self.tell(&ToDevice::AskStatus { question }).is_ok();
        while asked && heard.answered < question && !heard.over {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!("{}: its device process {} does not report its status", self.name, self.pid);
                break;
            }
            (heard, _) = self.changed.wait_timeout(heard, left).unwrap_or_else(PoisonError::into_inner);
        }
        drop(heard);
        self.last_status()
    }

    /// The last known status.
    fn last_status(&self) -> Counted {
        let report = self.lock().report.take();
        // Parsed without the lock, which the keeper's main thread takes.
        let read = report.map(|report| Counted::read(&report));
        let mut heard = self.lock();
        match read {
            Some(Ok(status)) => heard.status = status,
            Some(Err(e)) => {
                tracing::warn!("{}: its device process {} sent no valid status: {e}", self.name, self.pid);
            }
            None => {}
        }
        heard.status.clone()
    }

    /// Asks it to end and waits up to `patience`; then kills it. What it had stored is forgotten.
    pub fn end(&self, patience: Duration) {
        let asked = self.tell(&ToDevice::End);
        let deadline = Instant::now() + patience;
        let mut heard = self.lock();
        while !heard.over && asked.is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!(
                    "{}: its device process {} has not ended within {} s and is killed",
                    self.name,
                    self.pid,
                    patience.as_secs()
                );
                break;
            }
            (heard, _) = self.changed.wait_timeout(heard, left).unwrap_or_else(PoisonError::into_inner);
        }
        heard.stored.clear();
        drop(heard);
        self.reap();
    }

    /// Kills it, waits until nothing of it is left, and takes what it had stored.
    pub fn take_over(&self) -> (String, BTreeMap<u32, Stored>) {
        let ended = self.reap();
        // What it sent before its end has been read when its end has.
        let mut heard = self.lock();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !heard.over {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            (heard, _) = self.changed.wait_timeout(heard, left).unwrap_or_else(PoisonError::into_inner);
        }
        (describe(ended), std::mem::take(&mut heard.stored))
    }

    /// Kills it and waits for its end.
    pub fn reap(&self) -> Option<ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        // Fails if it was waited for already.
        let _ = child.kill();
        child.wait().ok()
    }
}

fn describe(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.signal(), status.code())) {
        Some((Some(signal), _)) => {
            let name = nix::sys::signal::Signal::try_from(signal);
            format!(
                "was killed by {}",
                name.map_or_else(|_| format!("signal {signal}"), |name| name.to_string())
            )
        }
        Some((None, Some(code))) => format!("exited with status {code}"),
        _ => "ended".to_owned(),
    }
}
