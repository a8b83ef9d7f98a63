//! Device processes as the keeper sees them: how they are started, what they send, and how they end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
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
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::device::Answer;
use sandbox::{Command, Report, Sandboxes};

use super::status::{Counted, PATIENCE};
use crate::confinement;
use crate::link::{self, Control, Stored, ToDevice, ToKeeper};
use crate::memory_file::memory_file;
use crate::native::{client_of, is_region_of};
use crate::role::Role;
use crate::servers::Servers;

/// Starts device processes and listens to them. Each is this program again, with the same command line and
/// the configuration as the keeper has read it.
#[derive(Debug)]
pub struct Processes {
    arguments: Vec<OsString>,
    /// The configuration file's path and text.
    file: Option<(String, String)>,
    sandboxes: Sandboxes,
    list: Mutex<List>,
    /// A process that is ready for whoever comes first. The daemon starts it immediately to find out what its
    /// sandbox lacks.
    spare: Mutex<Option<Spare>>,
    /// Whether the parts that device processes lack were logged. All lack the same.
    logged: Arc<AtomicBool>,
    /// Signaled when there is another process to listen to.
    changed: EventFd,
}

/// A process that serves nothing yet.
#[derive(Debug)]
struct Spare {
    process: sandbox::Process,
    control: Control,
    /// Whether it has reported what its sandbox lacks.
    confined: bool,
}

#[derive(Debug, Default)]
struct List {
    running: Vec<Arc<Process>>,
    /// Totals of the ended processes, by what they served.
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
    /// The descriptor sent with it.
    pub fd: Option<OwnedFd>,
}

/// The owner of a device process.
pub trait Owner: Send + Sync + std::fmt::Debug {
    /// A client's connection is closed, but its server may not know that its session is over. Called by the
    /// keeper's main thread; must not block.
    fn left(&self, process: &Arc<Process>, number: u64);

    /// A client's session is over, and its server knows. Called by the keeper's main thread; must not block.
    fn gone(&self, process: &Arc<Process>, number: u64);

    /// The process has stored this about a channel for a successor, or with `None` dropped what it had
    /// stored. Called by the keeper's main thread; must not block.
    fn stored(&self, process: &Arc<Process>, channel: u64, stored: Option<&Stored>);

    /// A client's request must be answered. Called by the keeper's main thread; must not block.
    fn answer(&self, process: &Arc<Process>, answer: Reply);

    /// The process has ended, or will be ended because it violated the protocol. Called once, by the keeper's
    /// main thread; must not block.
    fn over(&self, process: &Arc<Process>);
}

impl Processes {
    /// Starts processes with these arguments and this file's text, in these sandboxes.
    pub fn new(
        arguments: Vec<OsString>,
        file: Option<(String, String)>,
        sandboxes: Sandboxes,
    ) -> io::Result<Processes> {
        let changed = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (list, spare, logged) = (Mutex::default(), Mutex::default(), Arc::default());
        Ok(Processes { arguments, file, sandboxes, list, spare, logged, changed })
    }

    /// Starts the program, and sends the orders for its confinement.
    fn spawn(&self) -> io::Result<Spare> {
        let (control, theirs) = link::pair()?;
        // The program as it was when the keeper started, even if an update has replaced the file.
        let command = Command::new("/proc/self/exe", "vhost-rgpu")
            .arguments(&self.arguments)
            .arguments(["--device-process", &theirs.as_raw_fd().to_string()])
            .without_variables(handover::VARIABLES);
        let started = self.sandboxes.start(&command, &[theirs.as_fd()], "device");
        let process = started.map_err(|e| io::Error::other(with_causes(&e)))?;
        if let Some(reason) = process.no_group() {
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

    /// Starts the first process before anybody needs it, and logs what its sandbox lacks once that is known.
    /// With `wait`, waits for that, and fails if the process must not serve.
    pub fn prepare(&self, wait: bool) -> io::Result<()> {
        let mut spare = self.spawn()?;
        if wait {
            let Some(ToKeeper::Confined { text }) = spare.control.next_from_device()? else {
                let how = describe(spare.process.wait().ok());
                return Err(io::Error::other(format!("a device process {how} while confining itself")));
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

    /// Starts a device process, whose sessions are opened with this configuration. Takes `stored`, unless the
    /// process cannot be started. `most_stored` limits what it may store, besides what a predecessor had,
    /// whose limit may have been higher.
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
            most_stored: most_stored.max(stored.len()),
            servers: servers.all().iter().map(|session| session.server.clone()).collect(),
            connect_timeout: servers.first().connect_timeout,
            connecting: servers.all().iter().map(|_| AtomicU32::new(0)).collect(),
            unheard: AtomicBool::new(false),
            ended: EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            heard: Mutex::new(Heard { confined, ..Heard::default() }),
            logged: Arc::clone(&self.logged),
            changed: Condvar::new(),
        });
        // In this order, and before anybody else can send it something.
        process.tell(&ToDevice::Serve { role: role.clone() })?;
        servers.all().iter().try_for_each(|session| process.give_keys(session))?;
        process.lock().stored = std::mem::take(stored);
        self.lock().running.push(process.clone());
        self.changed.write(1)?;
        Ok(process)
    }

    /// Receives the spare process's report on its sandbox. If it sends anything else or ends, it is dropped.
    fn hear_spare(&self) {
        let mut spare = self.spare();
        let Some(process) = &mut *spare else { return };
        let heard = match process.control.next_from_device() {
            Ok(Some(ToKeeper::Confined { text })) if !process.confined => confined(text, &self.logged),
            Ok(_) => Err("it has ended".to_owned()),
            Err(e) if framing::lacks_descriptors(&e) => return std::thread::sleep(SHORT),
            Err(e) => Err(e.to_string()),
        };
        let heard = heard.and_then(|()| process.control.consume().map_err(|e| e.to_string()));
        process.confined = true;
        if let Err(why) = heard {
            tracing::error!("a device process started in advance is unusable: {why}");
            *spare = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of sessions.
    pub fn sessions(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        reports(&self.all().0, deadline).iter().map(|(status, _)| status.sessions().len()).sum()
    }

    /// Ends all processes. What they have stored stays: it is kept for those that the next keeper starts, and
    /// those that this one starts find it if there is no next keeper. The main thread must
    /// [listen](Self::listen) meanwhile.
    pub fn end_for_others(&self) {
        *self.spare() = None;
        let all = self.lock().running.clone();
        for process in all {
            process.kill_and_hear();
        }
    }

    /// All running processes, and the totals of the ended ones, by what they served.
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
        // Without a descriptor for that, the spare process is heard at the next call.
        let spare = self.spare().as_ref().and_then(|spare| spare.control.as_fd().try_clone_to_owned().ok());
        watched.extend(spare.as_ref().map(|control| watch(control.as_fd())));
        watched.extend(others.iter().map(|fd| watch(*fd)));
        let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()).as_millis() + 1);
        let timeout =
            left.map_or(PollTimeout::NONE, |left| PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        match poll(&mut watched, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        // The counter only tells that the list has changed; each call reads the list again.
        let _ = self.changed.read();
        if spare.is_some() && watched[processes.len() + 1].any().unwrap_or(true) {
            self.hear_spare();
        }
        for (process, watched) in processes.iter().zip(&watched) {
            // One packet at a time, so that a process that sends endlessly delays no other.
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

/// Reads a process's report on its sandbox, and logs it if none was logged before. The error says why the
/// process must not serve.
fn confined(text: OwnedFd, logged: &AtomicBool) -> Result<(), String> {
    let report: Result<Report, String> = confinement::from_file(text).map_err(|e| e.to_string())?;
    let report = report?;
    if !logged.swap(true, Ordering::Relaxed) && !report.missing.is_empty() {
        tracing::warn!("device processes run without: {report}");
    }
    Ok(())
}

/// Maximum concurrent connection attempts of a device process with one server: several for each of many
/// sessions that begin together. Those with other servers are counted for themselves, because attempts with a
/// server that is gone take long, and are made again and again.
const MOST_CONNECTING: u32 = 256;

/// The pause before a keeper without descriptors tries again to read what a device process has sent.
const SHORT: Duration = Duration::from_millis(10);

/// A device process that reads no message for this long while its keeper has many is replaced.
const READS_WITHIN: Duration = Duration::from_secs(60);

/// How long the main thread may take to read what a device process that has ended had sent.
const HEARD_WITHIN: Duration = Duration::from_secs(60);

/// What a device process has sent so far.
#[derive(Debug, Default)]
struct Heard {
    /// Whether it has reported what its sandbox lacks. Nothing comes before that report, and it isn't sent
    /// again: later, others may be in control of the process.
    confined: bool,
    stored: BTreeMap<u64, Stored>,
    asked: u64,
    answered: u64,
    /// The last status, not parsed yet.
    report: Option<OwnedFd>,
    status: Counted,
    /// Whether all of its sessions have ended, after it was told to end them.
    ended: bool,
    over: bool,
}

/// A device process.
#[derive(Debug)]
pub struct Process {
    /// What it serves.
    pub name: String,
    /// Its process ID.
    pub pid: u32,
    started: Instant,
    control: Control,
    /// With its exit status once it was waited for.
    child: Mutex<(sandbox::Process, Option<ExitStatus>)>,
    owner: Arc<dyn Owner>,
    most_stored: usize,
    /// The servers of its sessions, and how long to try each address of their names.
    servers: Vec<Address>,
    connect_timeout: Duration,
    /// Number of connections with each server that are being made for it.
    connecting: Vec<AtomicU32>,
    /// Whether the log says that this keeper had no descriptors for what it sends.
    unheard: AtomicBool,
    ended: EventFd,
    logged: Arc<AtomicBool>,
    heard: Mutex<Heard>,
    changed: Condvar,
}

impl Process {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives it a socket on which this host's key signs for it: it never has the key itself.
    fn give_keys(&self, session: &SessionConfig) -> io::Result<()> {
        let Some(source) = session.source().cloned() else { return Ok(()) };
        let (ours, theirs) = UnixStream::pair()?;
        let (name, pid, address) = (self.name.clone(), self.pid, session.server.to_string());
        // The thread ends with the process, which has the other end of the socket.
        std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
            if let Err(e) = remote::serve(&ours, &*source, &address) {
                tracing::error!("{name}: its device process {pid} gets no more signatures: {e}");
            }
        })?;
        self.tell(&ToDevice::Keys { socket: theirs.into() })
    }

    /// Sends it a message. Never blocks.
    pub fn tell(&self, message: &ToDevice) -> io::Result<()> {
        self.control.tell_device(message)
    }

    /// What another keeper needs to end it: a descriptor of the process, and the socket with its messages.
    pub fn ties(&self) -> (sandbox::Handle, BorrowedFd<'_>) {
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        (child.0.handle(), self.control.as_fd())
    }

    /// Whether most of its socket is free. The room that stays free is for messages that cannot wait.
    pub fn has_room(&self) -> bool {
        let mut control = [PollFd::new(self.control.as_fd(), PollFlags::POLLOUT)];
        // If it is over, telling it says so.
        poll(&mut control, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Waits until it [has room](Self::has_room). For whoever has many messages for it, which it may not read
    /// for a while, because it is just being started. Not for the main thread. The error: it is over, or
    /// reads nothing.
    pub fn wait_for_room(&self) -> io::Result<()> {
        let deadline = Instant::now() + READS_WITHIN;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).as_millis();
            // A packet socket is writable while less than a quarter of its room is in use.
            let mut watched = [
                PollFd::new(self.control.as_fd(), PollFlags::POLLOUT),
                PollFd::new(self.ended(), PollFlags::POLLIN),
            ];
            match poll(&mut watched, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
            let [writable, ended] = watched.map(|watched| watched.any().unwrap_or(true));
            if ended {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if writable {
                return Ok(());
            }
        }
    }

    /// Gives it what its predecessor had stored. [Waits for room](Self::wait_for_room). Nobody else has told
    /// it anything to store yet.
    pub fn restore(&self) -> io::Result<()> {
        let channels: Vec<u64> = self.lock().stored.keys().copied().collect();
        for channel in channels {
            // Without the lock, which the main thread needs.
            self.wait_for_room()?;
            let heard = self.lock();
            let Some(stored) = heard.stored.get(&channel) else { continue };
            self.control.restore(channel, stored)?;
        }
        Ok(())
    }

    /// Receives one packet. Returns false if the process is over.
    fn hear(self: &Arc<Self>) -> bool {
        match self.control.hear(|message| self.act_on(message)) {
            Ok(goes_on) => goes_on.unwrap_or(false),
            // The packet stays the next one, and the process is innocent.
            Err(e) if framing::lacks_descriptors(&e) => {
                if !self.unheard.swap(true, Ordering::Relaxed) {
                    let why =
                        "this process cannot open more descriptors, so nothing new begins (LimitNOFILE)";
                    tracing::error!(
                        "{}: its device process {} is not heard: {why}: {e}",
                        self.name,
                        self.pid
                    );
                }
                std::thread::sleep(SHORT);
                true
            }
            Err(e) => self.is_broken(&unheard(&e)),
        }
    }

    /// Logs what is wrong with it. Returns false: it is over.
    fn is_broken(&self, what: &str) -> bool {
        tracing::error!("{}: its device process {} {what} and is ended", self.name, self.pid);
        false
    }

    fn act_on(self: &Arc<Self>, message: ToKeeper) -> bool {
        match message {
            ToKeeper::Store { channel, stored } => {
                self.owner.stored(self, channel, Some(&stored));
                let mut heard = self.lock();
                heard.stored.insert(channel, stored);
                heard.stored.len() <= self.most_stored || self.is_broken("stores more than its channels")
            }
            ToKeeper::Forget { channel } => {
                self.owner.stored(self, channel, None);
                self.lock().stored.remove(&channel);
                true
            }
            ToKeeper::Status { question, text } => {
                let mut heard = self.lock();
                heard.report = Some(text);
                heard.answered = heard.answered.max(question);
                drop(heard);
                self.changed.notify_all();
                true
            }
            ToKeeper::Answer { number, status, reason, fd } => {
                self.owner.answer(self, Reply { number, status, reason, fd });
                true
            }
            ToKeeper::Left { number } => {
                self.lock().stored.retain(|place, _| !is_region_of(*place, number));
                self.owner.left(self, number);
                true
            }
            ToKeeper::Gone { number } => {
                // Everything of a native client.
                self.lock().stored.retain(|place, _| client_of(*place) != number);
                self.owner.gone(self, number);
                true
            }
            ToKeeper::Ended => {
                self.lock().ended = true;
                self.changed.notify_all();
                true
            }
            ToKeeper::Connect { server, timeout, reply } => {
                if server >= self.servers.len() {
                    return self.is_broken("asks for a server that the configuration does not name");
                }
                self.connect(server, timeout.min(self.connect_timeout), Control::from(reply));
                true
            }
            ToKeeper::Confined { text } => {
                if std::mem::replace(&mut self.lock().confined, true) {
                    return self.is_broken("says twice how it is confined");
                }
                confined(text, &self.logged)
                    .map_or_else(|why| self.is_broken(&format!("cannot serve ({why})")), |()| true)
            }
        }
    }

    /// Connects to a server for it. Never blocks: a thread connects and answers. At most [`MOST_CONNECTING`]
    /// attempts run at a time.
    fn connect(self: &Arc<Self>, server: usize, timeout: Duration, reply: Control) {
        if self.connecting[server].fetch_add(1, Ordering::Relaxed) >= MOST_CONNECTING {
            self.connecting[server].fetch_sub(1, Ordering::Relaxed);
            let text = format!("too many connections with {} are being made", self.servers[server]);
            // The requester may be gone.
            let _ = reply.answer(&Err(io::Error::other(text)));
            return;
        }
        let process = Arc::clone(self);
        let connect = move || {
            let _ = reply.answer(&framing::connect(&process.servers[server], timeout));
            process.connecting[server].fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(e) = std::thread::Builder::new().name("connect".to_owned()).spawn(connect) {
            // The socket for the answer is closed with the thread's function.
            self.connecting[server].fetch_sub(1, Ordering::Relaxed);
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

    /// The servers of its sessions.
    pub fn servers(&self) -> &[Address] {
        &self.servers
    }

    /// How long it has run.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Asks it for its status. Gives the number of the question; `None`: it is over, or reads nothing.
    fn ask(&self) -> Option<u64> {
        let mut heard = self.lock();
        heard.asked += 1;
        let question = heard.asked;
        (self.has_room() && self.tell(&ToDevice::AskStatus { question }).is_ok()).then_some(question)
    }

    /// Its status, and whether the answer to the question has arrived by `deadline`; otherwise it is the last
    /// known one.
    fn report(&self, question: Option<u64>, deadline: Instant) -> (Counted, bool) {
        let mut heard = self.lock();
        let reports = loop {
            if question.is_some_and(|question| heard.answered >= question) {
                break true;
            }
            if heard.over {
                break false;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || question.is_none() {
                tracing::warn!("{}: its device process {} does not report its status", self.name, self.pid);
                break false;
            }
            (heard, _) = self.changed.wait_timeout(heard, left).unwrap_or_else(PoisonError::into_inner);
        };
        drop(heard);
        (self.last_status(), reports)
    }

    /// The last known status.
    fn last_status(&self) -> Counted {
        let report = self.lock().report.take();
        // Parsed without the lock, which the keeper's main thread needs.
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

    /// Asks it to end, waits up to `patience`, then kills it. Drops what it had stored.
    pub fn end(&self, patience: Duration) {
        self.tell_to_end(false, patience, |heard| heard.over);
        self.reap();
    }

    /// Asks it to end, waits up to `patience` until its sessions have ended, and kills it if they have not.
    /// Drops what it had stored. True: what is left of it tells servers of that, for as long as they would
    /// keep the sessions. It ends by itself, and then it has to be [reaped](Self::reap).
    pub fn let_go(&self, patience: Duration) -> bool {
        let ended = self.tell_to_end(true, patience, |heard| heard.ended || heard.over);
        let lingers = ended && !self.is_over();
        if !lingers {
            self.reap();
        }
        lingers
    }

    /// Waits up to `patience` until it is over.
    pub fn wait(&self, patience: Duration) {
        let wait = self.changed.wait_timeout_while(self.lock(), patience, |heard| !heard.over);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    /// Asks it to end, and waits up to `patience` for that. False: it has not.
    fn tell_to_end(&self, lingers: bool, patience: Duration, done: impl Fn(&Heard) -> bool) -> bool {
        let asked = self.tell(&ToDevice::End { lingers }).is_ok();
        let patience = if asked { patience } else { Duration::ZERO };
        let wait = self.changed.wait_timeout_while(self.lock(), patience, |heard| !done(heard));
        let (mut heard, _) = wait.unwrap_or_else(PoisonError::into_inner);
        let done = done(&heard);
        if asked && !done {
            tracing::error!(
                "{}: its device process {} has not ended within {} s; killing it",
                self.name,
                self.pid,
                patience.as_secs()
            );
        }
        heard.stored.clear();
        done
    }

    /// Kills it, waits until nothing of it is left, and takes what it had stored.
    pub fn take_over(&self) -> (String, BTreeMap<u64, Stored>) {
        let ended = self.kill_and_hear();
        (describe(ended), std::mem::take(&mut self.lock().stored))
    }

    /// Kills it, and waits until nothing of it is left and everything that it has sent was read.
    fn kill_and_hear(&self) -> Option<ExitStatus> {
        let ended = self.reap();
        // By the time its end has been seen, everything that it sent has been read.
        self.wait(HEARD_WITHIN);
        ended
    }

    /// Kills it without waiting, unless somebody does so already.
    pub fn kill(&self) {
        if let Ok(child) = self.child.try_lock()
            && child.1.is_none()
        {
            child.0.handle().kill();
        }
    }

    /// Kills it, and waits for the end of the process and of everything that it has started.
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

/// The status of each process, and whether it has arrived by `deadline`; otherwise it is the last known one.
/// All are asked first, so that none is late because of another.
pub fn reports(processes: &[Arc<Process>], deadline: Instant) -> Vec<(Counted, bool)> {
    let questions: Vec<_> = processes.iter().map(|process| process.ask()).collect();
    let asked = processes.iter().zip(questions);
    asked.map(|(process, question)| process.report(question, deadline)).collect()
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

/// Why a device process whose next message could not be taken is ended, after its name.
fn unheard(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::InvalidData => format!("does not keep to the protocol ({e})"),
        // The fault is this process's, or the machine's.
        _ => format!("cannot be heard ({e})"),
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{MsgFlags, send};

    use super::*;

    #[test]
    fn only_a_device_process_that_sends_something_wrong_is_said_to_break_the_protocol() {
        let (keeper, device) = link::pair().unwrap();
        send(device.as_raw_fd(), b"a packet", MsgFlags::empty()).unwrap();
        let wrong = keeper.hear(drop).unwrap_err();
        assert!(unheard(&wrong).starts_with("does not keep to the protocol"), "{wrong}");
        // There is nothing to consume, or it is no socket.
        let own = keeper.consume().and_then(|()| keeper.consume()).unwrap_err();
        assert_eq!(unheard(&own), format!("cannot be heard ({own})"));
    }
}
