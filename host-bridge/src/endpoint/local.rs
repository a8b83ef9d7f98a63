//! The worker's end of a `local` session: the client's memory is mapped, the ring is read in place.
//!
//! One control thread serves the bridge's socket (regions come and go; its end is the session's end, unless
//! another process may take the bridge's place: `succession`). Another one hears when the client's machine is
//! stopped, and when it goes on (`pause`). The dispatcher reads the ring, and sleeps on the doorbell. The
//! thread that writes a reply wakes the client's: by futex for a process on this host, by the wake eventfd
//! for a guest.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{Shutdown, shutdown};
use protocol::Status;
use protocol::channel::{Header, MAX_PAYLOAD, NO_SLOT, Record};
use protocol::data::HostRange;
use protocol::device::{Answer, Extent};
use protocol::handle::{ContextId, StreamId};
use protocol::link::{
    ATTACH_FUTEX, ATTACH_SUCCESSION, Ack, Attach, Memory, ProgressUpdate, REGION_OWN_MEMORY,
    REGION_READ_ONLY, RegionAdd, frame, progress,
};
use protocol::trace::{RECORDER, Stage};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::contract::{Client, Commands, Sink, Source};
use super::dispatcher_poll::{DispatcherPoll, Polling, Replies};
use super::end::{Farewell, Lost};
use super::pause::{Hold, Touch, is_at_rest};
use super::region::{Leaving, Mapped, Regions, Released};
use super::succession::{Next, Said, Succession};
use super::wake::{self, Rouse, StopEvent, Waker, Watch};
use crate::framing::{recv_frame, send_frame, split_struct, with_causes};
use crate::memory::{ChannelView, Memories, RingReader};

/// Records taken, while there are more, between two checks whether client threads wait for room or progress.
const BATCH: u32 = 32;
/// Executed commands after which the client is told even while there is more to do; a command that has read
/// data of the client's is told of at once.
const TELL: u64 = 16;
/// A command that takes longer while the client's machine is stopped has to wait if it comes to need the
/// client's memory.
const EXECUTES: Duration = Duration::from_secs(2);
/// How often it is looked whether work still uses the memory of a client whose machine was stopped.
const REST_EVERY: Duration = Duration::from_millis(1);
/// How often the control thread looks whether the bridge is still there while it waits for a region's last
/// user.
const LOOK: Duration = Duration::from_millis(100);

/// The dispatcher's side.
pub struct LocalCommands {
    consumer: RingReader,
    client: Arc<LocalClient>,
    watch: Watch,
    poll: DispatcherPoll,
    since_wake: u32,
}

/// The side of every other thread.
pub struct LocalClient {
    view: Arc<ChannelView>,
    touch: Arc<Touch>,
    /// What new regions lie in.
    memories: Mutex<Memories>,
    released: Arc<Released>,
    regions: Regions,
    /// The connection with the bridge: another one when another process has taken its place.
    socket: Mutex<Arc<UnixStream>>,
    /// Where such a process comes from. `None`: the session ends with the bridge.
    succession: Option<Succession>,
    /// Frames leave whole.
    sending: Mutex<()>,
    /// How the session ended: with nothing, or lost.
    end: OnceLock<Option<Lost>>,
    /// Held while the session is being ended.
    ending: Mutex<()>,
    stop: StopEvent,
    rouse: Rouse,
    read: AtomicU64,
    written: AtomicU64,
    /// The last command executed, and whether one has read data since the client was last told. The
    /// dispatcher's alone.
    executed: AtomicU64,
    has_read: AtomicBool,
    replies: Replies,
    farewell: Farewell,
    /// The dispatcher executes commands, or will without looking whether it may: those that were read ahead.
    /// It may need the client's memory for them.
    executing: AtomicBool,
    /// Whether commands that need more of it have to wait.
    hold: Hold,
    /// How long the session is kept while the client's machine is stopped.
    grace: Duration,
}

impl LocalCommands {
    /// Waits for the bridge's [`frame::ATTACH`] on `socket`, maps what it names, answers it, and begins. On
    /// failure the bridge has been told why. `grace`: how long the session is kept while the client's machine
    /// is stopped.
    pub fn attach(
        socket: UnixStream,
        polling: Polling,
        grace: Duration,
    ) -> Result<(LocalCommands, Arc<LocalClient>), Lost> {
        let (mut body, mut fds) = (Vec::new(), Vec::new());
        let kind = recv_frame(socket.as_fd(), &mut body, &mut fds)
            .map_err(|e| Lost::new(format!("waiting for the channel's memory: {e}")))?;
        if kind != Some(frame::ATTACH) {
            return Err(Lost::new(format!("frame of kind {kind:?} where ATTACH was expected")));
        }
        let Attached { view, memories, doorbell, waker, succession } = match attach(&body, fds) {
            Ok(attached) => attached,
            Err((answer, lost)) => {
                // The bridge may be gone already.
                let _ = ack(&socket, answer, &lost.reason);
                return Err(lost);
            }
        };
        let failed = |e: io::Error| Lost::new(format!("preparing a session: {e}"));
        let stop = StopEvent::new().map_err(failed)?;
        let rouse = Rouse::new().map_err(failed)?;
        let watch = Watch::new(doorbell, &stop, &rouse).map_err(failed)?;
        let touch = Touch::new(Arc::clone(&view), waker);
        let publishes = Arc::clone(&touch);
        let released = Released::new(Box::new(move |seq| {
            publishes.now_or_later(move |touch| {
                touch.view.progress().set_released(seq);
                touch.waker.progress(&touch.view);
            });
        }));
        let client = Arc::new(LocalClient {
            regions: Regions::new(Arc::clone(&view), Arc::clone(&released)),
            view,
            touch,
            memories: Mutex::new(memories),
            released,
            socket: Mutex::new(Arc::new(socket)),
            succession,
            sending: Mutex::new(()),
            end: OnceLock::new(),
            ending: Mutex::new(()),
            stop,
            rouse,
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            executed: AtomicU64::new(0),
            has_read: AtomicBool::new(false),
            replies: Replies::default(),
            farewell: Farewell::default(),
            executing: AtomicBool::new(false),
            hold: Hold::default(),
            grace,
        });
        let consumer = RingReader::new(Arc::clone(&client.view));
        client.view.header().set_ready();
        client.ack(Answer::Ok, "");
        let served = Arc::clone(&client);
        std::thread::Builder::new()
            .name("rgpu-control".into())
            .spawn(move || served.serve())
            .map_err(failed)?;
        let listener = Arc::clone(&client);
        let listen = move || listener.succession.iter().for_each(|succession| listener.listen(succession));
        std::thread::Builder::new().name("rgpu-succession".into()).spawn(listen).map_err(failed)?;
        let poll = DispatcherPoll::new(polling);
        let commands = LocalCommands { consumer, client: Arc::clone(&client), watch, poll, since_wake: 0 };
        Ok((commands, client))
    }

    fn ended(&self) -> Option<Result<Option<Record>, Lost>> {
        self.client.end.get().map(|end| match end {
            None => Ok(None),
            Some(lost) => Err(lost.clone()),
        })
    }

    /// Whether there are commands that may be taken.
    fn has_work(&self) -> bool {
        self.client.touch.now().is_some_and(|_now| self.consumer.has_work())
    }

    /// To be called with leave to touch the client's memory.
    fn wake_waiters(&mut self) {
        self.since_wake = 0;
        let header = self.client.view.header();
        if self.consumer.has_room() && header.ring_sleep.take() {
            self.client.wake_word(Header::RING_SLEEP_OFFSET as usize);
        }
        self.client.touch.waker.progress(&self.client.view);
    }
}

/// What the bridge hands over.
struct Attached {
    view: Arc<ChannelView>,
    memories: Memories,
    doorbell: OwnedFd,
    waker: Waker,
    succession: Option<Succession>,
}

fn attach(body: &[u8], fds: Vec<OwnedFd>) -> Result<Attached, (Answer, Lost)> {
    let invalid = |reason: String| (Answer::Invalid, Lost::new(reason));
    let (fixed, rest) = split_struct::<Attach>(body).map_err(|e| invalid(e.to_string()))?;
    let (memories, rest) = list::<Memory>(rest, fixed.memory_count).map_err(invalid)?;
    let (extents, rest) = list::<Extent>(rest, fixed.extent_count).map_err(invalid)?;
    let (futex, succeeded) = (fixed.flags & ATTACH_FUTEX != 0, fixed.flags & ATTACH_SUCCESSION != 0);
    let wanted = memories.len() + 1 + usize::from(!futex) + usize::from(succeeded);
    if fds.len() != wanted || !rest.is_empty() {
        return Err(invalid(format!("ATTACH with {} descriptors where {wanted} were expected", fds.len())));
    }
    let mut fds = fds.into_iter();
    let files: Vec<(Memory, OwnedFd)> = memories.into_iter().zip(fds.by_ref()).collect();
    let Some(doorbell) = fds.next() else { return Err(invalid("ATTACH without a doorbell".into())) };
    // In this order, and as many as the flags say.
    let waker = (!futex).then(|| fds.next()).flatten().map_or(Waker::Futex, Waker::Event);
    let succession = fds.next().map(Succession::new);
    let memories = Memories::map(files).map_err(|e| invalid(with_causes(&e)))?;
    let view = memories.view(&extents, fixed.size).map_err(|e| match e {
        crate::memory::MemoryError::Geometry(protocol::channel::GeometryError::Version(_)) => {
            (Answer::Version, Lost::new(with_causes(&e)))
        }
        e => invalid(with_causes(&e)),
    })?;
    Ok(Attached { view: Arc::new(view), memories, doorbell, waker, succession })
}

fn list<T: FromBytes + Immutable + KnownLayout + Copy>(
    body: &[u8],
    count: u32,
) -> Result<(Vec<T>, &[u8]), String> {
    let bytes = (count as usize).checked_mul(size_of::<T>()).filter(|n| *n <= body.len());
    let Some(bytes) = bytes else {
        return Err(format!("{count} entries do not fit a frame of {} bytes", body.len()));
    };
    let (now, rest) = body.split_at(bytes);
    let all = now.chunks_exact(size_of::<T>()).filter_map(|b| T::read_from_bytes(b).ok()).collect();
    Ok((all, rest))
}

fn ack(socket: &UnixStream, answer: Answer, reason: &str) -> io::Result<()> {
    let ack = Ack { status: answer as u32, reserved: 0 };
    send_frame(socket.as_fd(), frame::ACK, &[ack.as_bytes(), reason.as_bytes()], &[])
}

impl Commands for LocalCommands {
    fn next(&mut self, body: &mut Vec<u8>, rest: &mut dyn FnMut()) -> Result<Option<Record>, Lost> {
        // The dispatcher asks, and has executed all that was read before.
        self.client.executing.store(false, Ordering::SeqCst);
        loop {
            if let Some(end) = self.ended() {
                return end;
            }
            if let Some(record) = self.try_next(body)? {
                return Ok(Some(record));
            }
            let replies = &self.client.replies;
            let mut round = self.poll.begin(replies);
            while !self.has_work() && self.client.end.get().is_none() && self.poll.lasts(&mut round, replies)
            {
                for _ in 0..32 {
                    std::hint::spin_loop();
                }
            }
            let found = self.has_work();
            self.poll.end(&round, found);
            if found {
                continue;
            }
            rest();
            let client = &self.client;
            let flag = &client.view.header().host_sleep;
            // While the client's machine is stopped only that thread rouses this one that hears that it goes
            // on.
            let announced = client.touch.now().map(|_now| flag.announce()).is_some();
            if !self.has_work() && client.end.get().is_none() {
                self.watch.wait().map_err(|e| Lost::new(format!("waiting for the doorbell: {e}")))?;
            }
            if announced {
                client.touch.now_or_later(|touch| touch.view.header().host_sleep.cancel());
            }
        }
    }

    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        let popped = {
            let Some(_now) = self.client.touch.now() else { return Ok(None) };
            let popped = self.consumer.pop(body);
            if matches!(popped, Ok(Some(_))) {
                self.client.executing.store(true, Ordering::SeqCst);
            }
            popped
        };
        let record = match popped {
            Ok(record) => record,
            Err(e) => {
                let lost = Lost::new(format!("the client wrote a bad record: {e}"));
                self.client.lose(&lost.reason);
                return Err(lost);
            }
        };
        if record.is_some_and(|record| record.reply_slot != NO_SLOT) {
            self.client.replies.asked();
        }
        self.since_wake += 1;
        if record.is_none() || self.since_wake >= BATCH {
            if record.is_none() {
                self.client.tell_executed();
            }
            let touch = Arc::clone(&self.client.touch);
            if let Some(_now) = touch.now() {
                self.wake_waiters();
            }
        }
        Ok(record)
    }
}

impl LocalClient {
    /// Serves the bridge's socket until it closes, and then that of the process that takes the bridge's
    /// place.
    fn serve(&self) {
        let (mut body, mut fds) = (Vec::new(), Vec::new());
        let mut socket = self.socket();
        let end = loop {
            fds.clear();
            let received = recv_frame(socket.as_fd(), &mut body, &mut fds);
            let gone = match &received {
                Ok(kind) => kind.is_none(),
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => true,
                // A process can end in the middle of a frame.
                Err(e) => e.kind() == io::ErrorKind::UnexpectedEof && self.succession.is_some(),
            };
            if gone {
                match self.succession.as_ref().map(Succession::wait) {
                    Some(Next::Process(next)) => {
                        socket = self.taken_over(Arc::new(next));
                        // `close` knows this socket, or was before it.
                        if self.end.get().is_some() {
                            break None;
                        }
                        continue;
                    }
                    Some(Next::Nobody) | None => break None,
                }
            }
            match received {
                Ok(None) => break None,
                Err(e) => break Some(Lost::new(format!("the bridge's socket: {e}"))),
                Ok(Some(frame::BYE)) => break None,
                Ok(Some(frame::ALIVE)) => {}
                Ok(Some(frame::REGION_ADD)) => {
                    let answer = self.add_region(&body, &mut fds);
                    let (answer, reason) =
                        answer.map_or_else(|why| (Answer::Invalid, why), |()| (Answer::Ok, String::new()));
                    self.ack(answer, &reason);
                }
                Ok(Some(frame::REGION_REMOVE)) => {
                    let id = body.first_chunk::<4>().map(|b| u32::from_le_bytes(*b));
                    match id.and_then(|id| self.regions.remove(id)) {
                        Some(leaving) => match self.let_go(leaving, &socket) {
                            Some(next) => socket = next,
                            None => break None,
                        },
                        None => self.ack(Answer::Invalid, &format!("no region {id:?}")),
                    }
                }
                Ok(Some(frame::MEMORIES)) => {
                    let (answer, reason) =
                        self.take_memories(&body, &mut fds).err().unwrap_or((Answer::Ok, String::new()));
                    self.ack(answer, &reason);
                }
                Ok(Some(kind)) => break Some(Lost::new(format!("the bridge sent a frame of kind {kind}"))),
            }
        };
        match end {
            Some(lost) => self.lose(&lost.reason),
            None => self.close(),
        }
    }

    /// Acts on what is said beside the connection, until nothing can be said any more.
    fn listen(&self, succession: &Succession) {
        // Since when the client's machine is stopped.
        let mut stopped: Option<Instant> = None;
        loop {
            let left = stopped.map(|since| self.grace.saturating_sub(since.elapsed()));
            match succession.hear(left) {
                Ok(Some(Said::Pause)) if self.grace.is_zero() => {
                    self.lose("the guest was stopped, and this server keeps no session meanwhile (--grace-seconds 0)");
                }
                Ok(Some(Said::Pause)) => {
                    stopped = Some(Instant::now());
                    self.touch.pause();
                    if self.comes_to_rest(succession) {
                        succession.tell_paused();
                    }
                }
                Ok(Some(Said::Continue)) => {
                    stopped = None;
                    self.go_on();
                }
                Ok(Some(Said::TakeOver(socket))) => {
                    stopped = None;
                    self.go_on();
                    succession.pass_on(Next::Process(socket));
                }
                Ok(None) if left.is_some_and(|left| left.is_zero()) => {
                    stopped = None;
                    let seconds = self.grace.as_secs();
                    self.lose(&format!("the guest was stopped for more than {seconds} s (--grace-seconds)"));
                }
                Ok(None) => {}
                Ok(Some(Said::Nothing)) => return succession.pass_on(Next::Nobody),
                Err(e) => {
                    self.lose(&format!("the bridge's successor: {e}"));
                    return succession.pass_on(Next::Nobody);
                }
            }
            if self.end.get().is_some() {
                return;
            }
        }
    }

    /// Waits until no work uses the client's memory. False: something else was said, or the session is over.
    /// Whoever has asked decides how long that may take.
    fn comes_to_rest(&self, succession: &Succession) -> bool {
        let begun = Instant::now();
        loop {
            let used = || self.regions.are_in_use();
            if is_at_rest(|| self.executing.load(Ordering::SeqCst), used) {
                return true;
            }
            if !used() && begun.elapsed() > EXECUTES {
                // What it does is not about the client's memory. If it comes to need that, it has to wait.
                self.hold.hold();
                if !used() {
                    return true;
                }
            }
            if self.end.get().is_some() || succession.is_spoken_to(REST_EVERY) {
                return false;
            }
        }
    }

    /// The client's machine goes on.
    fn go_on(&self) {
        self.touch.go_on();
        self.hold.release();
        self.rouse.rouse();
    }

    /// Takes a range of the client's memory for a command, once commands may begin to use it. `reads`: the
    /// command that only reads it.
    fn take(&self, range: HostRange, reads: Option<u64>) -> Option<Mapped> {
        self.hold.begin(|| self.over(), || self.regions.take(range, reads))
    }

    fn socket(&self) -> Arc<UnixStream> {
        Arc::clone(&self.socket.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn ack(&self, answer: Answer, reason: &str) {
        let _whole = self.sending.lock().unwrap_or_else(|e| e.into_inner());
        // A bridge that is gone is noticed by the next receive.
        let _ = ack(&self.socket(), answer, reason);
    }

    /// Waits until no command uses a region any more, and says so. Frames are not read meanwhile, but a
    /// bridge that is gone, or says goodbye, is seen: it may have gone just because this takes too long.
    /// Gives the bridge's socket, which is another one if another process has taken its place meanwhile;
    /// `None`: the session ends.
    fn let_go(&self, leaving: Leaving, socket: &Arc<UnixStream>) -> Option<Arc<UnixStream>> {
        let mut now = Arc::clone(socket);
        while leaving.left.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            if self.end.get().is_some() {
                return None;
            }
            if wake::hung_up(now.as_fd()) {
                match self.succession.as_ref()?.look() {
                    // Nothing has come on that socket that could be answered, so this thread need not read
                    // from it yet.
                    Some(Next::Process(next)) => now = Arc::new(next),
                    Some(Next::Nobody) => return None,
                    None => {}
                }
            }
        }
        // The driver may wait for the device here.
        drop(leaving);
        if Arc::ptr_eq(&now, socket) {
            self.ack(Answer::Ok, "");
            return Some(now);
        }
        Some(self.taken_over(now))
    }

    /// Another process has taken the bridge's place: tells it what regions there are.
    fn taken_over(&self, socket: Arc<UnixStream>) -> Arc<UnixStream> {
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&socket);
        let regions = self.regions.list().into_iter().map(|(region, extent_count, memory)| {
            let flags = if memory.is_read_only() { REGION_READ_ONLY } else { 0 };
            RegionAdd { region, extent_count, flags, reserved: 0, size: memory.size() as u64 }
        });
        let regions: Vec<RegionAdd> = regions.collect();
        let _whole = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        // One that is gone again is noticed by the next receive.
        let _ = send_frame(socket.as_fd(), frame::TAKEN_OVER, &[regions.as_bytes()], &[]);
        socket
    }

    fn add_region(&self, body: &[u8], fds: &mut Vec<OwnedFd>) -> Result<(), String> {
        let (fixed, rest) = split_struct::<RegionAdd>(body).map_err(|e| e.to_string())?;
        let (extents, _) = list::<Extent>(rest, fixed.extent_count)?;
        let own = fixed.flags & REGION_OWN_MEMORY != 0;
        let runs = if own {
            let file = fds.pop().ok_or("a region with its own memory, but no descriptor")?;
            let begin = extents.iter().map(|e| e.addr).min().unwrap_or(0) & !4095;
            let end = extents.iter().map(|e| e.addr.saturating_add(e.len)).max().unwrap_or(0);
            let memory = Memory { addr: begin, size: end.saturating_sub(begin), file_offset: begin };
            let memories = Memories::map(vec![(memory, file)]).map_err(|e| with_causes(&e))?;
            memories.resolve(&extents, fixed.size)
        } else {
            self.memories.lock().unwrap_or_else(PoisonError::into_inner).resolve(&extents, fixed.size)
        };
        let runs = runs.map_err(|e| with_causes(&e))?;
        if self.regions.add(fixed.region, runs, fixed.flags & REGION_READ_ONLY != 0) {
            Ok(())
        } else {
            Err(format!("region {} is in use", fixed.region))
        }
    }

    /// The client has other memories now. If they cannot be mapped it has none: what regions lie in must not
    /// be memory that it had before.
    fn take_memories(&self, body: &[u8], fds: &mut Vec<OwnedFd>) -> Result<(), (Answer, String)> {
        let mut now = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        *now = Memories::default();
        let (memories, rest) = list::<Memory>(body, (body.len() / size_of::<Memory>()) as u32)
            .map_err(|reason| (Answer::Invalid, reason))?;
        if memories.len() != fds.len() || !rest.is_empty() {
            let (bytes, count) = (body.len(), fds.len());
            return Err((Answer::Invalid, format!("MEMORIES of {bytes} bytes with {count} descriptors")));
        }
        *now = Memories::map(memories.into_iter().zip(fds.drain(..)).collect())
            .map_err(|e| (Answer::NoResources, with_causes(&e)))?;
        Ok(())
    }

    /// To be called with leave to touch the client's memory.
    fn wake_word(&self, offset: usize) {
        self.touch.waker.word(&self.view, offset);
    }

    /// A command names memory that is not there: no correct client does.
    fn wild(&self, seq: u64, range: HostRange) -> Status {
        let HostRange { place, offset, len } = range;
        self.lose(&format!("command {seq} names {len} bytes at offset {offset:#x} of {place:?}, which it does not have or may not write"));
        Status::INVALID_VALUE
    }

    fn finish(&self, end: Option<Lost>) {
        if self.end.set(end).is_ok() {
            // Through the lock, so that nobody is between the look and the sleep.
            self.hold.wake();
            self.stop.raise();
            self.farewell.call();
        }
    }

    /// Whether the session has ended. What work still answers then comes of its being torn down, and is
    /// nothing that the program did: a client whose bridge was killed must learn that, and not that its
    /// kernel failed.
    fn over(&self) -> bool {
        self.end.get().is_some()
    }

    /// Publishes what the dispatcher has executed, if the client does not know it yet.
    fn tell_executed(&self) {
        let seq = self.executed.load(Ordering::Relaxed);
        let told = {
            let Some(_now) = self.touch.now() else { return };
            let area = self.view.progress();
            let news = seq > area.executed();
            if news {
                area.set_executed(seq);
            }
            news
        };
        if told {
            self.has_read.store(false, Ordering::Relaxed);
            self.released.executed(seq);
        }
    }

    /// The channel's mapping, for a driver that registers it with its device.
    pub fn view(&self) -> &Arc<ChannelView> {
        &self.view
    }
}

/// Writes words of the progress area, and wakes the threads that wait for them.
fn publish(touch: &Touch, updates: &[ProgressUpdate]) {
    let area = touch.view.progress();
    for update in updates {
        match update.kind {
            progress::STREAM => {
                if let Some(word) = area.stream(StreamId(update.index)) {
                    word.store(update.seq, Ordering::Release);
                }
            }
            progress::ERROR => {
                if let Some(word) = area.error(ContextId(update.index & !(1 << 31))) {
                    match update.value as u32 {
                        0 => word.clear(),
                        status => word.set(Status(status), update.index >> 31 == 1, update.seq),
                    }
                }
            }
            progress::OUTPUT => area.set_output(update.value),
            progress::WATCHED => area.set_watched(update.value),
            _ => {}
        }
    }
    touch.waker.progress(&touch.view);
}

impl Client for LocalClient {
    fn reply(&self, seq: u64, slot: u16, status: Status, payload: &[u8]) {
        if self.over() {
            return;
        }
        if self.view.slot(slot).is_none() {
            self.lose(&format!("command {seq} names reply slot {slot}, which does not exist"));
            return;
        }
        let (status, payload) =
            if payload.len() > MAX_PAYLOAD { (Status::UNKNOWN, &[][..]) } else { (status, payload) };
        RECORDER.note(Stage::Answered, seq, 0);
        self.replies.given();
        let answer = move |touch: &Touch, payload: &[u8]| {
            touch.waker.progress(&touch.view);
            if touch.view.slot(slot).is_some_and(|place| place.complete(seq, status, payload)) {
                touch.waker.word(&touch.view, touch.view.geometry().slot_offset(usize::from(slot)));
            }
        };
        if let Some(_now) = self.touch.now() {
            return answer(&self.touch, payload);
        }
        let payload = payload.to_vec();
        self.touch.now_or_later(move |touch| answer(touch, &payload));
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        if self.over() {
            return;
        }
        if let Some(_now) = self.touch.now() {
            return publish(&self.touch, updates);
        }
        let updates = updates.to_vec();
        self.touch.now_or_later(move |touch| publish(touch, &updates));
    }

    fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::Relaxed);
        if seq.is_multiple_of(TELL) || self.has_read.load(Ordering::Relaxed) {
            self.tell_executed();
        }
    }

    fn source(&self, seq: u64, _piece: u32, range: HostRange) -> Result<Source, Status> {
        self.read.fetch_add(range.len, Ordering::Relaxed);
        self.has_read.store(true, Ordering::Relaxed);
        self.take(range, Some(seq)).map(Source::Mapped).ok_or_else(|| self.wild(seq, range))
    }

    fn sink(&self, seq: u64, _piece: u32, range: HostRange) -> Result<Sink, Status> {
        self.written.fetch_add(range.len, Ordering::Relaxed);
        self.take(range, None).map(Sink::Mapped).ok_or_else(|| self.wild(seq, range))
    }

    fn nothing_sent(&self, _seq: u64) {}

    fn keep(&self, range: HostRange) -> Option<Mapped> {
        // A range that is not there is refused when the command is executed.
        self.regions.keep(range)
    }

    fn lose(&self, reason: &str) {
        // Under the lock, so that a thread that finds the session lost, and ends the process, does so after
        // the client was told.
        let _one = self.ending.lock().unwrap_or_else(|e| e.into_inner());
        if self.end.get().is_some() {
            return;
        }
        // A client whose machine is stopped is told by its bridge when that goes on.
        let now = self.touch.now();
        if now.is_some() {
            self.view.header().set_lost(reason);
        }
        self.finish(Some(Lost::new(reason)));
        if now.is_some() {
            for index in 0..self.view.geometry().slot_count {
                if let Some(slot) = self.view.slot(index as u16)
                    && slot.abandon(Status::DEVICE_UNAVAILABLE)
                {
                    self.wake_word(self.view.geometry().slot_offset(index));
                }
            }
            self.wake_word(Header::RING_SLEEP_OFFSET as usize);
            self.wake_word(Header::PROGRESS_SLEEP_OFFSET as usize);
        }
        drop(now);
        let _whole = self.sending.lock().unwrap_or_else(|e| e.into_inner());
        // The bridge may be the one that is gone.
        let _ = send_frame(self.socket().as_fd(), frame::BYE, &[reason.as_bytes()], &[]);
    }

    fn close(&self) {
        let _one = self.ending.lock().unwrap_or_else(|e| e.into_inner());
        self.finish(None);
        // Lets the control thread go if it still waits for a frame, or for another process of the bridge.
        let _ = shutdown(self.socket().as_raw_fd(), Shutdown::Read);
        if let Some(succession) = &self.succession {
            succession.stop();
        }
    }

    fn when_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.farewell.set(then);
    }

    fn lost(&self) -> Option<Lost> {
        self.end.get().cloned().flatten()
    }

    fn rouse(&self) {
        self.rouse.rouse();
    }

    fn streams_data(&self) -> bool {
        false
    }

    fn traffic(&self) -> (u64, u64) {
        (self.read.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed))
    }
}
