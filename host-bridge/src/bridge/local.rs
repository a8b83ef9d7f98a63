//! Transport `local`: the server is on this host. It gets the descriptors of the client's memory and of the
//! doorbell and reads the ring itself. What remains here is a Unix socket on which regions are added and
//! removed, and whose end says that the worker is gone. A region in memory that the client has got since the
//! session began is preceded by a list of the memories that there are now.
//!
//! A session that was saved ([`Saved`](super::Saved)) outlives this process: the next one gives the worker a
//! new socket and continues the session.
//!
//! A worker that has died, or has closed its socket, touches the client's memory no more: its mappings went
//! with it. That is what `unregister_region` and `close` wait for where the worker does not acknowledge
//! first.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, sendmsg, setsockopt, shutdown,
    socketpair, sockopt,
};
use nix::sys::time::TimeVal;
use protocol::channel::Header;
use protocol::device::Answer;
use protocol::link::{
    ATTACH_FUTEX, ATTACH_SUCCESSION, Ack, Attach, FrameHeader, MEMORIES_SINCE, REGION_OWN_MEMORY,
    REGION_READ_ONLY, RegionAdd, frame, purpose,
};
use protocol::version::OURS;
use std::os::fd::AsRawFd;
use zerocopy::{FromBytes, IntoBytes};

use super::config::SessionConfig;
use super::error::{ConnectError, RegionError};
use super::saved::{About, InheritedRegion, Presence, SavedLocal, duplicate, hears_paused, say, say_pause};
use super::state::{ChannelMemory, SessionState, thread_name};
use super::transport::{Closed, RegionMemory, Transport};
use super::welcome::{Handshake, Turn, hello, welcome_in_turn};
use crate::framing::{Address, MAX_FDS, recv_frame, send_frame, send_message, split_struct};
use crate::memory::Memories;
use crate::stream::Stream;

/// A session with a worker after the handshake.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    /// Whose other end the server's daemon has. Earlier versions gave none.
    presence: Option<Presence>,
    saved: Option<Succession>,
}

/// What is there beside the connection if the session is saved.
#[derive(Debug)]
struct Succession {
    /// Where the worker waits for another process. Shut down when the session is closed: then nobody comes.
    ours: OwnedFd,
    /// The worker's end.
    theirs: OwnedFd,
    wake: EventFd,
}

impl Link {
    /// Has another process be able to go on with the session.
    pub(super) fn save(&mut self, doorbell: &EventFd, about: About) -> io::Result<SavedLocal> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let wake = wake_event()?;
        let saved = SavedLocal {
            worker: ours.try_clone()?,
            doorbell: duplicate(doorbell)?,
            wake: duplicate(&wake)?,
            presence: self.presence.as_ref().map(Presence::try_clone).transpose()?,
            about,
        };
        self.saved = Some(Succession { ours, theirs, wake });
        Ok(saved)
    }
}

/// What a worker writes to wake a guest's threads.
fn wake_event() -> io::Result<EventFd> {
    Ok(EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?)
}

/// Connects and shakes hands.
pub(super) fn connect(
    config: &SessionConfig,
    memory: &ChannelMemory,
    turn: &mut dyn Turn,
) -> Result<(Link, Handshake), ConnectError> {
    let server = config.server.to_string();
    let failed = |source| ConnectError::NoServer { server: server.clone(), source };
    if !matches!(config.server, Address::Unix(_)) {
        let wrong = io::Error::new(io::ErrorKind::InvalidInput, "transport local needs a unix: address");
        return Err(failed(wrong));
    }
    let count = memory.memories.files().count();
    if count > MAX_FDS - 3 {
        let text = format!("the client has {count} memories, transport local can pass {}", MAX_FDS - 3);
        return Err(ConnectError::Here { source: io::Error::new(io::ErrorKind::InvalidInput, text) });
    }
    let socket = config.dial(config.connect_timeout).map_err(failed)?;
    send_message(socket.as_fd(), &[hello(config, memory, purpose::LOCAL, 0).as_bytes()], &[])
        .map_err(failed)?;
    let deadline = Instant::now() + config.connect_timeout + config.handshake_timeout;
    let socket = Stream::from(socket);
    let mut handshake = welcome_in_turn(config, &socket, deadline, turn)?;
    let presence = handshake.given.take().map(Presence::of).transpose();
    let presence = presence.map_err(|source| ConnectError::Here { source })?;
    Ok((Link { socket: socket.into_socket(), presence, saved: None }, handshake))
}

type Waiter = Sender<(Answer, String)>;

/// What the transport's methods and its thread share.
struct Shared {
    session: Arc<SessionState>,
    socket: OwnedFd,
    /// Where the worker waits for another process, if the session was saved.
    succession: Option<OwnedFd>,
    /// Tells the server's daemon when the session is over.
    presence: Option<Presence>,
    /// The worker writes it to wake a guest's threads. `None`: threads are reached by futex, which the worker
    /// does itself.
    wake: Option<EventFd>,
    /// Whether the worker can be told of other memories than it had at first.
    takes_memories: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The calls that wait for an acknowledgement, in the order of the requests sent.
    waiters: VecDeque<Waiter>,
    /// The memories that the worker has. `None`: a process before this one has told it.
    memories: Option<Memories>,
    /// Set by `close`.
    asked: Option<String>,
    /// Gets the regions that the session had under another process.
    inherits: Option<(Sender<Vec<InheritedRegion>>, usize)>,
    /// The worker is to pause. It is told when it has confirmed that this process has taken it over.
    pauses: bool,
    /// The worker's socket is closed: nothing touches the client's memory.
    over: bool,
}

impl State {
    /// Whether the worker has not yet said that this process has taken it over.
    fn is_being_taken_over(&self) -> bool {
        self.inherits.is_some()
    }
}

/// A session with a worker of this host.
pub(super) struct Local {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Local").field("session", &self.shared.session).finish_non_exhaustive()
    }
}

impl Local {
    /// Hands the channel over to the worker. The channel is ready when this returns.
    pub(super) fn start(
        config: &SessionConfig,
        session: Arc<SessionState>,
        link: Link,
    ) -> Result<Local, ConnectError> {
        let server = config.server.to_string();
        let here = |source| ConnectError::Here { source };
        let failed = |source| ConnectError::NoServer { server: server.clone(), source };
        let Link { socket, presence, saved } = link;
        let (wake, succession) = match saved {
            // The worker wakes the threads of a process of this host itself, also while nobody else is there.
            Some(Succession { ours, theirs, wake }) => {
                ((!session.futex()).then_some(wake), Some((ours, theirs)))
            }
            None if session.futex() => (None, None),
            None => (Some(wake_event().map_err(here)?), None),
        };
        let (succession, theirs) = succession.unzip();

        let memories: Vec<_> = session.channel.memories.files().collect();
        let attach = Attach {
            memory_count: memories.len() as u32,
            extent_count: session.channel.extents.len() as u32,
            flags: if wake.is_none() { ATTACH_FUTEX } else { 0 }
                | if succession.is_some() { ATTACH_SUCCESSION } else { 0 },
            reserved: 0,
            size: session.channel.size,
        };
        let mut descriptors: Vec<BorrowedFd<'_>> = memories.iter().map(|(_, file)| file.as_fd()).collect();
        descriptors.push(session.doorbell.as_fd());
        descriptors.extend(wake.as_ref().map(AsFd::as_fd));
        descriptors.extend(theirs.as_ref().map(AsFd::as_fd));
        let places: Vec<_> = memories.iter().map(|(memory, _)| *memory).collect();
        let parts = [attach.as_bytes(), places.as_bytes(), session.channel.extents.as_bytes()];
        send_frame(socket.as_fd(), frame::ATTACH, &parts, &descriptors).map_err(failed)?;
        let (answer, reason) = first_ack(socket.as_fd()).map_err(failed)?;
        if answer != Answer::Ok {
            return Err(ConnectError::Refused { server, answer, reason });
        }
        // From here on the thread waits as long as it takes; a worker that does not read makes a sender give
        // up.
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(0, 0)).map_err(|e| here(e.into()))?;
        setsockopt(&socket, sockopt::SendTimeout, &TimeVal::new(10, 0)).map_err(|e| here(e.into()))?;
        session.header().set_ready();
        let memories = Some(session.channel.memories.clone());
        Local::watched(Shared {
            takes_memories: takes_memories(&session),
            session,
            socket,
            succession,
            presence,
            wake,
            state: Mutex::new(State { memories, ..State::default() }),
            changed: Condvar::new(),
        })
        .map_err(here)
    }

    /// Goes on with a session that another process had: brings its worker, which waits at `worker` in
    /// `saved`, a connection with this one. The receiver gets the session's regions, at most `max_regions`,
    /// when the worker has told them; nothing if the session ends before. Does not block.
    pub(super) fn resume(
        session: Arc<SessionState>,
        saved: &SavedLocal,
        max_regions: usize,
    ) -> io::Result<(Local, Receiver<Vec<InheritedRegion>>)> {
        let (worker, wake) = (saved.worker.try_clone()?, duplicate(&saved.wake)?);
        let presence = saved.presence.as_ref().map(Presence::try_clone).transpose()?;
        let (socket, theirs) =
            socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
        setsockopt(&socket, sockopt::SendTimeout, &TimeVal::new(10, 0))?;
        let packet = FrameHeader { kind: frame::TAKE_OVER, len: 0 };
        let fds = [theirs.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        // What the predecessor has left need not be what it should be: nothing that this thread could wait
        // for.
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        sendmsg::<()>(worker.as_raw_fd(), &[io::IoSlice::new(packet.as_bytes())], &rights, flags, None)?;
        drop(theirs);
        let (inherits, inherited) = channel();
        let state = State { inherits: Some((inherits, max_regions)), ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let wake = (!session.futex()).then_some(wake);
        let (succession, takes_memories) = (Some(worker), takes_memories(&session));
        let shared = Shared { session, socket, succession, presence, wake, takes_memories, state, changed };
        Ok((Local::watched(shared)?, inherited))
    }

    fn watched(shared: Shared) -> io::Result<Local> {
        let shared = Arc::new(shared);
        let for_thread = shared.clone();
        let thread =
            std::thread::Builder::new().name(thread_name("local")).spawn(move || for_thread.watch())?;
        Ok(Local { shared, thread: Mutex::new(Some(thread)) })
    }

    fn over(&self) -> RegionError {
        RegionError::Over(self.shared.session.ended().unwrap_or("the session is over").to_owned())
    }

    /// Sends a request and waits for its acknowledgement. `None`: the worker is gone.
    fn request(&self, kind: u32, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> Option<(Answer, String)> {
        let answer = self.send(&mut self.shared.lock(), kind, parts, fds)?;
        answer.recv().ok()
    }

    /// Sends a request. The receiver gets its acknowledgement, or nothing if the worker goes before. `None`:
    /// it is gone. With the state's lock, so that requests and waiters have one order.
    fn send(
        &self,
        state: &mut State,
        kind: u32,
        parts: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Option<Receiver<(Answer, String)>> {
        if state.over {
            return None;
        }
        let (waiter, answer) = channel();
        state.waiters.push_back(waiter);
        if let Err(e) = send_frame(self.shared.socket.as_fd(), kind, parts, fds) {
            // The stream may be cut in mid-frame: it is of no further use.
            tracing::warn!(server = %self.shared.session.server, "sending to the worker: {e}");
            self.shared.hang_up();
        }
        Some(answer)
    }

    /// Tells the worker of the memories that a region's extents lie in, if it does not have them: that
    /// request's acknowledgement is still to come.
    fn tell_memories(
        &self,
        state: &mut State,
        region: &RegionMemory,
    ) -> Result<Option<Receiver<(Answer, String)>>, RegionError> {
        let takes = self.shared.takes_memories;
        let has = |known: &Memories| known.have(&region.memories, &region.extents);
        // What an older worker was told before is not known.
        if region.own_memory || state.memories.as_ref().map_or(!takes, has) {
            return Ok(None);
        }
        let (places, files): (Vec<_>, Vec<_>) =
            region.memories.files().map(|(memory, file)| (memory, file.as_fd())).unzip();
        let reason = if !takes {
            format!(
                "it, or the program's library, is older than version {MEMORIES_SINCE}; a program that is started anew can use the memory"
            )
        } else if files.len() > MAX_FDS {
            format!("the guest has {} memories, and transport local can pass {MAX_FDS}", files.len())
        } else {
            let told = self.send(state, frame::MEMORIES, &[places.as_bytes()], &files);
            state.memories = Some(region.memories.clone());
            return told.map(Some).ok_or_else(|| self.over());
        };
        Err(RegionError::NewMemory { server: self.shared.session.server.clone(), reason })
    }
}

/// Whether a session's worker can be told of other memories. A client that says something else of its session
/// harms only itself.
fn takes_memories(session: &SessionState) -> bool {
    let (version, fingerprint) = session.header().session_version();
    version >= MEMORIES_SINCE && OURS.agree(version, fingerprint).is_ok()
}

fn first_ack(socket: BorrowedFd<'_>) -> io::Result<(Answer, String)> {
    let mut body = Vec::new();
    loop {
        let kind = recv_frame(socket, &mut body, &mut Vec::new()).map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "the worker did not answer in time")
            }
            _ => e,
        })?;
        match kind {
            Some(frame::ALIVE) => {}
            Some(frame::ACK) => return ack(&body),
            Some(frame::BYE) => return Ok((Answer::Denied, String::from_utf8_lossy(&body).into_owned())),
            Some(other) => {
                return Err(io::Error::other(format!("the worker answered with a frame of kind {other}")));
            }
            None => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the worker closed the connection"));
            }
        }
    }
}

/// The regions in a worker's [`frame::TAKEN_OVER`].
fn inherited(body: &[u8], most: usize) -> Result<Vec<InheritedRegion>, &'static str> {
    let (regions, rest) = body.as_chunks::<{ size_of::<RegionAdd>() }>();
    if !rest.is_empty() || regions.len() > most {
        return Err("its list of regions is malformed, or longer than a session may have");
    }
    let regions = regions.iter().filter_map(|bytes| RegionAdd::read_from_bytes(bytes).ok());
    Ok(regions
        .map(|add| InheritedRegion { region: add.region, size: add.size, pieces: add.extent_count })
        .collect())
}

fn ack(body: &[u8]) -> io::Result<(Answer, String)> {
    let (ack, reason) = split_struct::<Ack>(body)?;
    Ok((Answer::from_number(ack.status), String::from_utf8_lossy(reason).into_owned()))
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the worker pause. When it says that it is taken over, it has said all that it had to say to a
    /// process before this one. Needs the state's lock.
    fn say_pause(&self) {
        self.succession.iter().for_each(|worker| say_pause(worker.as_fd()));
    }

    /// The thread: passes wake-ups and acknowledgements on until the worker's socket is closed.
    fn watch(&self) {
        let why = self.listen();
        let asked = self.lock().asked.clone();
        match asked {
            Some(reason) => self.session.end(&reason),
            None => self.session.lose(&why),
        }
        let mut state = self.lock();
        state.over = true;
        state.inherits = None;
        state.waiters.clear();
        self.changed.notify_all();
    }

    /// The worker finds that its client is gone, and that nobody takes its place. Its answer is that it
    /// closes the socket.
    fn hang_up(&self) {
        for socket in std::iter::once(&self.socket).chain(&self.succession) {
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
        }
        self.presence.iter().for_each(Presence::end);
    }

    fn listen(&self) -> String {
        let server = &self.session.server;
        let (mut body, mut fds) = (Vec::new(), Vec::new());
        let mut goodbye = None;
        loop {
            let mut watched = vec![PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            watched.extend(self.wake.as_ref().map(|wake| PollFd::new(wake.as_fd(), PollFlags::POLLIN)));
            match poll(&mut watched, PollTimeout::NONE) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return format!("this host failed while talking to the server at {server}: {e}"),
            }
            let ready = |index: usize| {
                watched.get(index).and_then(PollFd::revents).is_some_and(|events| !events.is_empty())
            };
            if ready(1) {
                if let Some(wake) = &self.wake {
                    let _ = wake.read();
                }
                // Which word changed is not known: the call wakes all.
                self.session.waker().wake(Header::PROGRESS_SLEEP_OFFSET);
            }
            if !ready(0) {
                continue;
            }
            let kind = recv_frame(self.socket.as_fd(), &mut body, &mut fds);
            fds.clear();
            match kind {
                Ok(Some(frame::ACK)) => match ack(&body) {
                    Ok(answer) => {
                        if let Some(waiter) = self.lock().waiters.pop_front() {
                            let _ = waiter.send(answer);
                        }
                    }
                    Err(e) => {
                        goodbye = Some(format!("the server at {server} does not keep to the protocol: {e}"))
                    }
                },
                Ok(Some(frame::ALIVE)) => {}
                Ok(Some(frame::TAKEN_OVER)) => {
                    let taken = {
                        let mut state = self.lock();
                        if std::mem::take(&mut state.pauses) {
                            self.say_pause();
                        }
                        state.inherits.take()
                    };
                    self.changed.notify_all();
                    let told = taken.ok_or("it says what regions there are without being asked");
                    let told = told.and_then(|(inherits, most)| Ok((inherits, inherited(&body, most)?)));
                    match told {
                        Ok((inherits, regions)) => {
                            // Whoever waits for it may be gone.
                            let _ = inherits.send(regions);
                        }
                        Err(what) => {
                            goodbye =
                                Some(format!("the server at {server} does not keep to the protocol: {what}"));
                            self.hang_up();
                        }
                    }
                }
                Ok(Some(frame::BYE)) => {
                    goodbye = Some(match String::from_utf8_lossy(&body).as_ref() {
                        "" => format!("the server at {server} ended the session"),
                        text => format!("the server at {server} ended the session: {text}"),
                    });
                }
                Ok(Some(other)) => tracing::warn!(%server, "the worker sent a frame of unknown kind {other}"),
                // Only now does the worker hold no memory any more.
                Ok(None) => {
                    return goodbye
                        .unwrap_or_else(|| format!("the worker of the server at {server} is gone"));
                }
                Err(e) => {
                    return goodbye
                        .unwrap_or_else(|| format!("connection to the server at {server} lost: {e}"));
                }
            }
        }
    }
}

impl Transport for Local {
    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let mut flags = 0;
        let mut descriptors = Vec::new();
        if region.own_memory {
            flags |= REGION_OWN_MEMORY;
            descriptors.extend(region.memories.files().map(|(_, file)| file.as_fd()));
        }
        if region.read_only {
            flags |= REGION_READ_ONLY;
        }
        let add = RegionAdd {
            region: id,
            extent_count: region.extents.len() as u32,
            flags,
            reserved: 0,
            size: region.size,
        };
        let mut state = self.shared.lock();
        let told = self.tell_memories(&mut state, &region)?;
        let parts = [add.as_bytes(), region.extents.as_bytes()];
        let added = self.send(&mut state, frame::REGION_ADD, &parts, &descriptors);
        drop(state);
        let refused = told.and_then(|told| told.recv().ok()).filter(|(answer, _)| *answer != Answer::Ok);
        if refused.is_some() {
            // The worker has none now.
            self.shared.lock().memories = Some(Memories::default());
        }
        match added.and_then(|added| added.recv().ok()) {
            Some((Answer::Ok, _)) => Ok(()),
            Some(answer) => {
                let (answer, reason) = refused.unwrap_or(answer);
                Err(RegionError::Refused { server: self.shared.session.server.clone(), answer, reason })
            }
            None => Err(self.over()),
        }
    }

    fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        match self.request(frame::REGION_REMOVE, &[&id.to_le_bytes()], &[]) {
            Some((Answer::Ok, _)) | None => Ok(()),
            Some((answer, reason)) => {
                Err(RegionError::Refused { server: self.shared.session.server.clone(), answer, reason })
            }
        }
    }

    fn pause(&self) {
        let mut state = self.shared.lock();
        if state.is_being_taken_over() {
            state.pauses = true;
        } else {
            self.shared.say_pause();
        }
    }

    fn is_paused(&self, patience: Duration) -> bool {
        let Some(worker) = &self.shared.succession else { return false };
        let deadline = Instant::now() + patience;
        let state = self.shared.lock();
        let comes = |state: &mut State| state.is_being_taken_over();
        let wait = self.shared.changed.wait_timeout_while(state, patience, comes);
        let (state, waited) = wait.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        let left = deadline.saturating_duration_since(Instant::now());
        !waited.timed_out() && hears_paused(worker.as_fd(), left)
    }

    fn go_on(&self) -> io::Result<()> {
        let mut state = self.shared.lock();
        if !std::mem::take(&mut state.pauses) {
            self.shared.succession.iter().for_each(|worker| say(worker.as_fd(), frame::CONTINUE));
        }
        Ok(())
    }

    fn close(&self, reason: &str, patience: Duration) -> Closed {
        let mut state = self.shared.lock();
        if !state.over && state.asked.is_none() {
            state.asked = Some(reason.to_owned());
            let _ = send_frame(self.shared.socket.as_fd(), frame::BYE, &[reason.as_bytes()], &[]);
            self.shared.hang_up();
        }
        let wait = self.shared.changed.wait_timeout_while(state, patience, |state| !state.over);
        let (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if !state.over {
            return Closed::StillHeld;
        }
        drop(state);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        Closed::Released
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if self.close("closed", Duration::ZERO) == Closed::StillHeld {
            // The thread keeps the memory mapped, through `shared`, until the worker has unmapped it.
            tracing::warn!(server = %self.shared.session.server, "the worker still holds the client's memory");
        }
    }
}
