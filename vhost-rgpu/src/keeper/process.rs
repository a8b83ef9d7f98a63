//! A device process as the keeper sees it: how it is started, what it says, and how it ends.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host_bridge::bridge::SessionConfig;
use host_bridge::framing::{self, Address, with_causes};
use identity::remote;
use metrics::Ledger;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::device::Answer;
use sandbox::{Command, Report, Sandboxes};

use super::status::{Counted, PATIENCE};
use crate::confinement;
use crate::device_process::Role;
use crate::link::{self, Control, Stored, ToDevice, ToKeeper};
use crate::native::client_of;
use crate::servers::Servers;

/// Starts device processes and listens to them. Each is this program again, with the same command line and the configuration as the keeper has read it.
#[derive(Debug)]
pub struct Processes {
    arguments: Vec<OsString>,
    /// The configuration file's path and text.
    file: Option<(String, String)>,
    sandboxes: Sandboxes,
    list: Mutex<List>,
    /// A process that is ready for whoever comes first. The daemon starts it at once, to find out what its sandbox lacks.
    spare: Mutex<Option<Spare>>,
    /// What device processes lack has been logged: all lack the same.
    logged: Arc<AtomicBool>,
    /// Written when there is another process to listen to.
    changed: EventFd,
}

/// A process that serves nothing yet.
#[derive(Debug)]
struct Spare {
    process: sandbox::Process,
    control: Control,
    /// It has said what its sandbox lacks.
    confined: bool,
}

#[derive(Debug, Default)]
struct List {
    running: Vec<Arc<Process>>,
    /// What those that have ended had done, by what they served.
    ended: Ledger<Counted>,
}

/// An answer for a native client.
#[derive(Debug)]
pub struct Reply {
    /// The client's number.
    pub number: u64,
    /// The answer.
    pub status: Answer,
    /// Why, if it is not `Ok`.
    pub reason: String,
    /// What goes with it.
    pub fd: Option<OwnedFd>,
}

/// Whoever asked for a device process.
pub trait Owner: Send + Sync + std::fmt::Debug {
    /// A client's session is over. Called by the keeper's main thread; must not block.
    fn gone(&self, process: &Arc<Process>, number: u64);

    /// The process has stored this of a channel for a successor, or, with `None`, forgotten what it had stored. Called by the keeper's main thread; must not block.
    fn stored(&self, process: &Arc<Process>, channel: u64, stored: Option<&Stored>);

    /// A client's request is to be answered. Called by the keeper's main thread; must not block.
    fn answer(&self, process: &Arc<Process>, answer: Reply);

    /// The process has ended, or is about to be ended because it does not keep to the protocol. Called once, by the keeper's main thread; must not block.
    fn over(&self, process: &Arc<Process>);
}

impl Processes {
    /// Starts processes with these arguments and the text of this file, in these sandboxes.
    pub fn new(
        arguments: Vec<OsString>,
        file: Option<(String, String)>,
        sandboxes: Sandboxes,
    ) -> io::Result<Processes> {
        let changed = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (list, spare, logged) = (Mutex::default(), Mutex::default(), Arc::default());
        Ok(Processes { arguments, file, sandboxes, list, spare, logged, changed })
    }

    /// Starts the program, and says how it has to confine itself.
    fn spawn(&self) -> io::Result<Spare> {
        let (control, theirs) = link::pair()?;
        // The program as it was when the keeper started, also after an update has replaced the file.
        let command = Command::new("/proc/self/exe", "vhost-rgpu")
            .arguments(&self.arguments)
            .arguments(["--device-process", &theirs.as_raw_fd().to_string()])
            .without_variables(handover::VARIABLES);
        let started = self.sandboxes.start(&command, &[theirs.as_fd()], "device");
        let (process, lacks) = started.map_err(|e| io::Error::other(with_causes(&e)))?;
        if let Some(reason) = lacks {
            tracing::warn!("a device process runs without limits by cgroup: {reason}");
        }
        let text = confinement::to_file(&self.sandboxes.orders(&process))?;
        control.tell_device(&ToDevice::Orders { text })?;
        if let Some((path, text)) = &self.file {
            let text = memory_file(c"configuration", text.as_bytes())?;
            control.tell_device(&ToDevice::Config { path: path.clone(), text })?;
        }
        Ok(Spare { process, control, confined: false })
    }

    /// Starts the first process before anybody needs it. What its sandbox lacks is logged when it is known. With `wait` this waits for it, and a process that must not serve is an error.
    pub fn prepare(&self, wait: bool) -> io::Result<()> {
        let mut spare = self.spawn()?;
        if wait {
            let Some(ToKeeper::Confined { text }) = spare.control.next_from_device()? else {
                let how = describe(spare.process.wait().ok());
                return Err(io::Error::other(format!("a device process that was to confine itself {how}")));
            };
            confined(text, &self.logged).map_err(io::Error::other)?;
            spare.control.consume()?;
            spare.confined = true;
        }
        *self.spare() = Some(spare);
        Ok(())
    }

    fn spare(&self) -> MutexGuard<'_, Option<Spare>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a device process, whose sessions are opened like this. It takes `stored`, unless it cannot be started. `most_stored` bounds what it may store.
    pub fn start(
        &self,
        role: &Role,
        servers: &Servers,
        owner: Arc<dyn Owner>,
        stored: &mut BTreeMap<u64, Stored>,
        most_stored: usize,
    ) -> io::Result<Arc<Process>> {
        let spare = self.spare().take();
        let Spare { process: child, control, confined } = spare.map_or_else(|| self.spawn(), Ok)?;
        let process = Arc::new(Process {
            name: role.to_string(),
            pid: child.pid(),
            started: Instant::now(),
            control,
            child: Mutex::new((child, None)),
            owner,
            most_stored,
            servers: servers.all().iter().map(|session| session.server.clone()).collect(),
            connect_timeout: servers.first().connect_timeout,
            connecting: AtomicU32::new(0),
            ended: EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            heard: Mutex::new(Heard { confined, ..Heard::default() }),
            logged: Arc::clone(&self.logged),
            changed: Condvar::new(),
        });
        // In this order, and before anybody else can tell it something.
        process.tell(&ToDevice::Serve { role: role.clone() })?;
        servers.all().iter().try_for_each(|session| process.give_keys(session))?;
        process.lock().stored = std::mem::take(stored);
        self.lock().running.push(process.clone());
        self.changed.write(1)?;
        Ok(process)
    }

    /// Takes what the spare process says of its sandbox. One that says anything else, or ends, is given up.
    fn hear_spare(&self) {
        let mut spare = self.spare();
        let Some(process) = &mut *spare else { return };
        let heard = match process.control.next_from_device() {
            Ok(Some(ToKeeper::Confined { text })) if !process.confined => confined(text, &self.logged),
            Ok(_) => Err("it has ended".to_owned()),
            Err(e) => Err(e.to_string()),
        };
        let heard = heard.and_then(|()| process.control.consume().map_err(|e| e.to_string()));
        process.confined = true;
        if let Err(why) = heard {
            tracing::error!("a device process that was started ahead is of no use: {why}");
            *spare = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        self.all().0.iter().map(|process| process.status(deadline).sessions().len()).sum()
    }

    /// Ends all processes, which leave what they have stored to those that another keeper starts. The main thread has to [listen](Self::listen) meanwhile.
    pub fn end_for_others(&self) {
        *self.spare() = None;
        let all = self.lock().running.clone();
        for process in all {
            drop(process.take_over());
        }
    }

    /// All processes that have not ended, and what the others had done, by what they served.
    pub fn all(&self) -> (Vec<Arc<Process>>, Vec<(String, Counted)>) {
        let list = self.lock();
        let ended = list.ended.rows().map(|(key, counted)| (key.labels()[0].to_owned(), counted.clone()));
        (list.running.clone(), ended.collect())
    }

    /// Listens to all processes until one of `others` is readable, or until `limit`.
    pub fn listen(&self, others: &[BorrowedFd<'_>], limit: Option<Instant>) -> io::Result<()> {
        let processes = self.lock().running.clone();
        let watch = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut watched: Vec<PollFd<'_>> =
            processes.iter().map(|process| watch(process.control.as_fd())).collect();
        watched.push(watch(self.changed.as_fd()));
        let spare =
            self.spare().as_ref().map(|spare| spare.control.as_fd().try_clone_to_owned()).transpose()?;
        watched.extend(spare.as_ref().map(|control| watch(control.as_fd())));
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
        if spare.is_some() && watched[processes.len() + 1].any().unwrap_or(true) {
            self.hear_spare();
        }
        for (process, watched) in processes.iter().zip(&watched) {
            // One packet at a time: a process that sends without end delays no other.
            if watched.any().unwrap_or(true) && !process.hear() {
                let done = process.last_status();
                let mut list = self.lock();
                list.running.retain(|other| !Arc::ptr_eq(other, process));
                let (now, name) = (Instant::now(), process.name.as_str());
                let key = list.ended.enter([name, "", ""], now);
                list.ended.value(&key, now).add(&done);
                drop(list);
                process.finish();
            }
        }
        Ok(())
    }
}

/// Reads what a process says of its sandbox, and logs it if none has said so before. The error says why the process must not serve.
fn confined(text: OwnedFd, logged: &AtomicBool) -> Result<(), String> {
    let report: Result<Report, String> = confinement::from_file(text).map_err(|e| e.to_string())?;
    let report = report?;
    if !logged.swap(true, Ordering::Relaxed) && !report.missing.is_empty() {
        tracing::warn!("device processes run without: {report}");
    }
    Ok(())
}

/// Connections that may be made for a device process at once: six for each of many sessions that begin together.
const MOST_CONNECTING: u32 = 256;

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
    /// What its sandbox lacks. Nothing comes before that, and it does not come again: then others may speak for the process.
    confined: bool,
    stored: BTreeMap<u64, Stored>,
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
    /// With its status once it was waited for.
    child: Mutex<(sandbox::Process, Option<ExitStatus>)>,
    owner: Arc<dyn Owner>,
    most_stored: usize,
    /// Where its sessions are, and how long to try each address that such a name has.
    servers: Vec<Address>,
    connect_timeout: Duration,
    /// Connections for it that are being made.
    connecting: AtomicU32,
    ended: EventFd,
    logged: Arc<AtomicBool>,
    heard: Mutex<Heard>,
    changed: Condvar,
}

impl Process {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives it a socket where this host's key signs for it: it never has the key itself.
    fn give_keys(&self, session: &SessionConfig) -> io::Result<()> {
        let Some(source) = session.source().cloned() else { return Ok(()) };
        let (ours, theirs) = UnixStream::pair()?;
        let (name, pid, address) = (self.name.clone(), self.pid, session.server.to_string());
        // It ends with the process, which has the other end of the socket.
        std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
            if let Err(e) = remote::serve(&ours, &*source, &address) {
                tracing::error!("{name}: its device process {pid} gets no more signatures: {e}");
            }
        })?;
        self.tell(&ToDevice::Keys { socket: theirs.into() })
    }

    /// Tells it something. Never blocks.
    pub fn tell(&self, message: &ToDevice) -> io::Result<()> {
        self.control.tell_device(message)
    }

    /// What another keeper needs to end it: a descriptor of the process, and the socket with what it has said.
    pub fn ties(&self) -> (sandbox::Handle, BorrowedFd<'_>) {
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        (child.0.handle(), self.control.as_fd())
    }

    /// Gives it what its predecessor had stored.
    pub fn restore(&self) -> io::Result<()> {
        self.lock().stored.iter().try_for_each(|(channel, stored)| self.control.restore(*channel, stored))
    }

    /// Takes one packet. False: it is over.
    fn hear(self: &Arc<Self>) -> bool {
        // One that was not taken away is the next keeper's, should this one end meanwhile.
        self.hear_next() && self.control.consume().is_ok()
    }

    fn hear_next(self: &Arc<Self>) -> bool {
        let broken = |what: &str| {
            tracing::error!("{}: its device process {} {what} and is ended", self.name, self.pid);
            false
        };
        match self.control.next_from_device() {
            Ok(None) => false,
            Ok(Some(ToKeeper::Store { channel, stored })) => {
                self.owner.stored(self, channel, Some(&stored));
                let mut heard = self.lock();
                heard.stored.insert(channel, stored);
                heard.stored.len() <= self.most_stored || broken("stores more than its channels")
            }
            Ok(Some(ToKeeper::Forget { channel })) => {
                self.owner.stored(self, channel, None);
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
            Ok(Some(ToKeeper::Answer { number, status, reason, fd })) => {
                self.owner.answer(self, Reply { number, status, reason, fd });
                true
            }
            Ok(Some(ToKeeper::Gone { number })) => {
                // All of a native client.
                self.lock().stored.retain(|place, _| client_of(*place) != number);
                self.owner.gone(self, number);
                true
            }
            Ok(Some(ToKeeper::Connect { server, timeout, reply })) => {
                if server >= self.servers.len() {
                    return broken("asks for a server that the configuration does not name");
                }
                self.connect(server, timeout.min(self.connect_timeout), Control::from(reply));
                true
            }
            Ok(Some(ToKeeper::Confined { text })) => {
                if std::mem::replace(&mut self.lock().confined, true) {
                    return broken("says twice how it is confined");
                }
                confined(text, &self.logged)
                    .map_or_else(|why| broken(&format!("cannot serve ({why})")), |()| true)
            }
            Err(e) => broken(&format!("does not keep to the protocol ({e})")),
        }
    }

    /// Connects to a server in its place. Never blocks: a thread does it, and answers. A process cannot have more than [`MOST_CONNECTING`] of them.
    fn connect(self: &Arc<Self>, server: usize, timeout: Duration, reply: Control) {
        if self.connecting.fetch_add(1, Ordering::Relaxed) >= MOST_CONNECTING {
            self.connecting.fetch_sub(1, Ordering::Relaxed);
            // Whoever asked may be gone.
            let _ = reply.answer(&Err(io::Error::other("too many connections are being made")));
            return;
        }
        let process = Arc::clone(self);
        let connect = move || {
            let _ = reply.answer(&framing::connect(&process.servers[server], timeout));
            process.connecting.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(e) = std::thread::Builder::new().name("connect".to_owned()).spawn(connect) {
            // The socket for the answer is closed with the thread's function.
            self.connecting.fetch_sub(1, Ordering::Relaxed);
            tracing::error!("{}: a thread to connect to the server: {e}", self.name);
        }
    }

    fn finish(self: &Arc<Self>) {
        self.lock().over = true;
        self.changed.notify_all();
        // The counter is 0, so this cannot fail.
        let _ = self.ended.write(1);
        self.owner.over(self);
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Readable once it is over.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// The servers that its sessions can have.
    pub fn servers(&self) -> &[Address] {
        &self.servers
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
    pub fn take_over(&self) -> (String, BTreeMap<u64, Stored>) {
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

    /// Kills it and waits for its end, and for that of everything that it has started.
    pub fn reap(&self) -> Option<ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let (process, status) = &mut *child;
        if status.is_none() {
            process.handle().kill();
            *status = process.wait().ok();
        }
        *status
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
