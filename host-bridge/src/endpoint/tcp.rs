//! The worker's end of a `tcp` session: commands, answers and progress on the control connection, data on others.
//!
//! The dispatcher reads the control connection itself, polling before it sleeps. While it executes a command it reads nothing, and a command may take until its stream has its data: so
//! nothing that a command needs may come behind it on that connection. Every thread may send on it, whole frames under a lock. A bridge that waits for
//! something asks whether we are there ([`frame::ALIVE`]); the dispatcher answers, and while it is busy with a long command a keep-alive thread does. In an idle session both
//! sleep, and what notices a bridge that is gone is the connection's keepalive.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use protocol::Status;
use protocol::channel::{NO_SLOT, Record};
use protocol::data::HostRange;
use protocol::link::{DataAsk, DataGrant, DataSent, ProgressUpdate, frame};
use protocol::polling::DISPATCHER_REPLY_DUE_TCP;
use protocol::trace::{RECORDER, Stage};
use zerocopy::IntoBytes;

use super::dispatcher_poll::{DispatcherPoll, Replies};
use super::incoming::{Bridge, Inbox};
use super::outgoing::{Outbox, Outgoing};
use super::stream::{Records, check_slot, put, put_executed, put_reply};
use super::wake::{self, StopEvent};
use super::{Client, Commands, Farewell, Lost, Polling, Sink, Source};
use crate::framing::{FrameReader, split_struct, watch_peer};
use crate::stream::Stream;

/// A peer that takes nothing for this long is lost.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// While the dispatcher is busy and nothing else is sent, the bridge is told this often that we are there.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Executed commands after which the client is told even while there is more to do.
const BATCH: u64 = 512;

/// The dispatcher's side.
pub struct TcpCommands {
    client: Arc<TcpClient>,
    reader: FrameReader,
    /// Those of the COMMANDS frame at hand.
    records: Records,
    poll: DispatcherPoll,
}

/// The side of every other thread.
pub struct TcpClient {
    this: Weak<TcpClient>,
    control: Stream,
    sending: Mutex<Sending>,
    slot_count: u32,
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox>,
    executed: AtomicU64,
    end: OnceLock<Option<Lost>>,
    stop: StopEvent,
    keep_alive: KeepAlive,
    replies: Replies,
    farewell: Farewell,
}

/// When the keep-alive thread is needed. See [`TcpClient::keep_alive`].
#[derive(Default)]
struct KeepAlive {
    /// Whether the session is over.
    over: Mutex<bool>,
    changed: Condvar,
    /// Raised when the dispatcher has something to do, lowered when it goes to sleep.
    busy: AtomicBool,
    /// How often the dispatcher has woken.
    wakes: AtomicU64,
    /// The keep-alive thread sleeps until the dispatcher is busy.
    parked: AtomicBool,
}

impl KeepAlive {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.over.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The dispatcher is about to sleep.
    fn rest(&self) {
        self.busy.store(false, Ordering::SeqCst);
    }

    /// The dispatcher has woken.
    fn wake(&self) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        self.busy.store(true, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) {
            // Through the lock, so that the keep-alive thread is not between its look and its sleep.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    fn end(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    /// Waits until it may be time to tell the bridge that we are there. False: the session is over.
    fn wait(&self, seen: &mut u64) -> bool {
        let mut over = self.lock();
        let wakes = self.wakes.load(Ordering::Relaxed);
        if *seen == wakes {
            // A second in which the dispatcher did not wake: it sleeps, or it is busy with one command.
            self.parked.store(true, Ordering::SeqCst);
            while !*over && !self.busy.load(Ordering::SeqCst) {
                over = self.changed.wait(over).unwrap_or_else(|e| e.into_inner());
            }
            self.parked.store(false, Ordering::SeqCst);
        }
        *seen = wakes;
        if !*over {
            over = self.changed.wait_timeout(over, ALIVE_EVERY).unwrap_or_else(|e| e.into_inner()).0;
        }
        !*over
    }
}

struct Sending {
    buffer: Vec<u8>,
    last: Instant,
    /// `executed` as the client was last told.
    told: u64,
}

struct NonBlocking<'a>(&'a Stream);

impl Read for NonBlocking<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read_now(buf)
    }
}

impl TcpCommands {
    /// Begins a session on a control connection whose handshake is over. `slot_count`: the channel's reply slots, as the hello said. `data_connections`: as
    /// many as the welcome asked for; each comes by [`TcpClient::add_data_connection`].
    pub fn start(
        control: Stream,
        slot_count: u32,
        data_connections: u32,
        polling: Polling,
    ) -> io::Result<(TcpCommands, Arc<TcpClient>)> {
        control.set_nonblocking(false)?;
        control.set_nodelay()?;
        control.set_write_timeout(SEND_TIMEOUT)?;
        watch_peer(&control);
        let stop = StopEvent::new()?;
        let now = Instant::now();
        let client = Arc::new_cyclic(|this| TcpClient {
            this: this.clone(),
            control,
            sending: Mutex::new(Sending { buffer: Vec::new(), last: now, told: 0 }),
            slot_count,
            inbox: Inbox::new(),
            outbox: Outbox::new(data_connections as usize),
            executed: AtomicU64::new(0),
            end: OnceLock::new(),
            stop,
            keep_alive: KeepAlive { busy: AtomicBool::new(true), ..KeepAlive::default() },
            replies: Replies::default(),
            farewell: Farewell::default(),
        });
        let bridge: Weak<dyn Bridge> = Weak::<TcpClient>::clone(&client.this);
        client.inbox.tell(bridge);
        let kept = Arc::clone(&client);
        std::thread::Builder::new().name("rgpu-alive".into()).spawn(move || kept.keep_alive())?;
        let commands = TcpCommands {
            client: Arc::clone(&client),
            reader: FrameReader::new(),
            records: Records::default(),
            poll: DispatcherPoll::new(Polling {
                while_due: polling.while_due.min(DISPATCHER_REPLY_DUE_TCP.here()),
                ..polling
            }),
        };
        Ok((commands, client))
    }

    /// Takes whole frames that have been read, until one holds records. False: there is none.
    fn frames(&mut self) -> Result<bool, End> {
        let broken = |e: io::Error| End::Lost(Lost::new(format!("the bridge sent {e}")));
        while let Some((kind, bytes)) = self.reader.next_frame().map_err(broken)? {
            match kind {
                frame::COMMANDS => {
                    self.records.refill().extend_from_slice(bytes);
                    if !self.records.is_empty() {
                        return Ok(true);
                    }
                }
                frame::ALIVE => self.client.alive(),
                frame::DATA_ASK => {
                    let wrong = |what: String| {
                        End::Lost(Lost::new(format!("the bridge is no bridge of ours: {what}")))
                    };
                    let (ask, _) = split_struct::<DataAsk>(bytes).map_err(|e| wrong(e.to_string()))?;
                    self.client.inbox.ask((ask.seq, ask.piece)).map_err(wrong)?;
                }
                frame::BYE => return Err(End::Asked),
                _ => return Err(End::Lost(Lost::new(format!("the bridge sent a frame of kind {kind}")))),
            }
        }
        Ok(false)
    }

    /// Reads what there is. `Ok(false)`: nothing.
    fn fill(&mut self) -> Result<bool, End> {
        match self.reader.fill(&mut NonBlocking(&self.client.control)) {
            Ok(0) => Err(End::Asked),
            Ok(_) => Ok(true),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(false),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Err(End::Asked),
            Err(e) => Err(End::Lost(Lost::new(format!("the bridge's connection: {e}")))),
        }
    }

    fn poll(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, End> {
        loop {
            if let Some(end) = self.client.end.get() {
                return Err(end.clone().map_or(End::Asked, End::Lost));
            }
            if let Some(record) = self.records.take(body).map_err(End::Lost)? {
                RECORDER.note(Stage::Received, record.seq, record.opcode);
                if record.reply_slot != NO_SLOT {
                    self.client.replies.asked();
                }
                return Ok(Some(record));
            }
            if !self.frames()? && !self.fill()? {
                return Ok(None);
            }
        }
    }

    fn wait(&mut self, body: &mut Vec<u8>) -> Result<Record, End> {
        loop {
            if let Some(record) = self.poll(body)? {
                return Ok(record);
            }
            let client = Arc::clone(&self.client);
            let mut round = self.poll.begin(&client.replies);
            while self.poll.lasts(&mut round, &client.replies) {
                if let Some(record) = self.poll(body)? {
                    self.poll.end(&round, true);
                    return Ok(record);
                }
                std::hint::spin_loop();
            }
            self.poll.end(&round, false);
            self.client.flush_executed();
            let fds = [self.client.control.as_fd(), self.client.stop.as_fd()];
            self.client.keep_alive.rest();
            let woken = wake::readable(&fds, None);
            self.client.keep_alive.wake();
            woken.map_err(|e| End::Lost(Lost::new(format!("waiting for commands: {e}"))))?;
        }
    }

    fn ended(&self, end: End) -> Result<Option<Record>, Lost> {
        match end {
            End::Asked => {
                self.client.close();
                Ok(None)
            }
            End::Lost(lost) => {
                self.client.lose(&lost.reason);
                Err(lost)
            }
        }
    }
}

enum End {
    Asked,
    Lost(Lost),
}

impl Commands for TcpCommands {
    fn next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        self.wait(body).map(Some).or_else(|end| self.ended(end))
    }

    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        self.poll(body).or_else(|end| self.ended(end))
    }
}

impl TcpClient {
    /// Adds one of the session's data connections, whose handshake is over.
    pub fn add_data_connection(&self, stream: Stream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay()?;
        stream.set_write_timeout(SEND_TIMEOUT)?;
        let reading = Arc::new(stream);
        self.outbox.add(Arc::clone(&reading));
        let Some(client) = self.this.upgrade() else { return Ok(()) };
        std::thread::Builder::new().name("rgpu-data".into()).spawn(move || {
            match client.inbox.read_connection(&reading) {
                Err(e) if client.end.get().is_none() => client.lose(&format!("a data connection: {e}")),
                _ => {}
            }
        })?;
        Ok(())
    }

    fn send(&self, fill: impl FnOnce(&mut Sending)) {
        self.say(false, fill);
    }

    /// Sends what `fill` puts into the buffer. What was executed goes along with it, and by itself only if `executed` says so.
    fn say(&self, executed: bool, fill: impl FnOnce(&mut Sending)) {
        if self.end.get().is_some() {
            return;
        }
        let mut sending = self.sending.lock().unwrap_or_else(|e| e.into_inner());
        sending.buffer.clear();
        let (now, told) = (self.executed.load(Ordering::Acquire), sending.told);
        if now > told {
            put_executed(&mut sending.buffer, now);
            sending.told = now;
        }
        let along = sending.buffer.len();
        fill(&mut sending);
        if along == 0 && sending.buffer.is_empty() {
            return;
        }
        if sending.buffer.len() == along && !executed {
            sending.told = told;
            return;
        }
        let sent = self.control.write_all(&sending.buffer);
        sending.last = Instant::now();
        drop(sending);
        if let Err(e) = sent {
            self.lose(&format!("sending to the bridge: {e}"));
        }
    }

    /// Tells what was executed, if that is not known yet.
    fn flush_executed(&self) {
        self.say(true, |_| {});
    }

    pub(super) fn data_sent(&self, seq: u64, bytes: u64) {
        self.send(|sending| {
            put(&mut sending.buffer, frame::DATA_SENT, &[DataSent { seq, bytes }.as_bytes()]);
        });
    }

    fn alive(&self) {
        self.send(|sending| put(&mut sending.buffer, frame::ALIVE, &[]));
    }

    /// The keep-alive thread: answers for a dispatcher that is busy with one command for long, and may be asked meanwhile.
    fn keep_alive(&self) {
        let mut seen = 0;
        while self.keep_alive.wait(&mut seen) {
            if self.keep_alive.busy.load(Ordering::SeqCst) {
                self.send(|sending| {
                    if sending.last.elapsed() >= ALIVE_EVERY {
                        put(&mut sending.buffer, frame::ALIVE, &[]);
                    }
                });
            }
        }
    }

    fn finish(&self, end: Option<Lost>) -> bool {
        if self.end.set(end).is_err() {
            return false;
        }
        self.keep_alive.end();
        self.stop.raise();
        self.inbox.close();
        self.outbox.close();
        self.farewell.call();
        true
    }
}

impl Bridge for TcpClient {
    fn grant(&self, grant: DataGrant) {
        self.send(|sending| put(&mut sending.buffer, frame::DATA_GRANT, &[grant.as_bytes()]));
    }

    fn placed(&self, bytes: u64) {
        self.send(|sending| put(&mut sending.buffer, frame::DATA_PLACED, &[&bytes.to_le_bytes()]));
    }

    fn wrong(&self, what: &str) {
        self.lose(&format!("the bridge sent {what}"));
    }
}

impl Client for TcpClient {
    fn reply(&self, seq: u64, slot: u16, status: Status, payload: &[u8]) {
        match check_slot(seq, slot, self.slot_count) {
            Ok(()) => {
                RECORDER.note(Stage::Answered, seq, 0);
                self.replies.given();
                self.send(|sending| put_reply(&mut sending.buffer, seq, slot, status, payload));
            }
            Err(wrong) => self.lose(&wrong),
        }
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        if !updates.is_empty() {
            self.send(|sending| put(&mut sending.buffer, frame::PROGRESS, &[updates.as_bytes()]));
        }
    }

    fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::Release);
        self.inbox.executed(seq);
        if seq.is_multiple_of(BATCH) {
            self.flush_executed();
        }
    }

    fn source(&self, seq: u64, piece: u32, range: HostRange) -> Result<Source, Status> {
        Ok(Source::Incoming(self.inbox.incoming(seq, piece, range.len)))
    }

    fn sink(&self, seq: u64, piece: u32, range: HostRange) -> Result<Sink, Status> {
        Ok(Sink::Outgoing(Outgoing::new(self.this.clone(), Arc::clone(&self.outbox), seq, piece, range.len)))
    }

    fn nothing_sent(&self, seq: u64) {
        self.data_sent(seq, 0);
    }

    fn nothing_read(&self, seq: u64, piece: u32) {
        self.inbox.unwanted((seq, piece));
    }

    fn reads_late(&self) -> bool {
        true
    }

    fn lose(&self, reason: &str) {
        // Under the lock, so that a thread that finds the session lost, and ends the process, does so after the client was told.
        let whole = self.sending.lock().unwrap_or_else(|e| e.into_inner());
        if self.finish(Some(Lost::new(reason))) {
            let mut farewell = Vec::new();
            put(&mut farewell, frame::BYE, &[reason.as_bytes()]);
            // The peer may be the one that is gone.
            let _ = self.control.write_all(&farewell);
            self.control.shut_down();
        }
        drop(whole);
    }

    fn close(&self) {
        let whole = self.sending.lock().unwrap_or_else(|e| e.into_inner());
        if self.finish(None) {
            self.control.shut_down();
        }
        drop(whole);
    }

    fn when_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.farewell.set(then);
    }

    fn streams_data(&self) -> bool {
        true
    }

    fn copied(&self) -> u64 {
        self.inbox.copied.load(Ordering::Relaxed)
    }

    fn traffic(&self) -> (u64, u64) {
        (self.inbox.bytes.load(Ordering::Relaxed), self.outbox.bytes.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::link::progress;
    use std::net::{TcpListener, TcpStream};

    /// The kinds of the frames that have come.
    fn kinds(stream: &mut TcpStream) -> Vec<u32> {
        let mut reader = FrameReader::new();
        reader.fill(stream).unwrap();
        let mut all = Vec::new();
        while let Some((kind, body)) = reader.next_frame().unwrap() {
            assert!(kind != frame::PROGRESS || body[0] == progress::EXECUTED as u8);
            all.push(kind);
        }
        assert_eq!(reader.buffered(), 0);
        all
    }

    #[test]
    fn what_was_executed_goes_along_with_an_answer_and_alone_only_when_it_is_to_be_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut bridge = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let control = listener.accept().unwrap().0;
        let (_commands, client) = TcpCommands::start(control.into(), 64, 1, Polling::default()).unwrap();
        client.executed(1);
        client.executed(2);
        client.reply(3, 0, Status::SUCCESS, &[]);
        assert_eq!(kinds(&mut bridge), [frame::PROGRESS, frame::REPLY]);
        client.flush_executed();
        client.executed(3);
        client.publish(&[]);
        client.flush_executed();
        assert_eq!(kinds(&mut bridge), [frame::PROGRESS]);
        client.flush_executed();
        client.reply(4, 0, Status::SUCCESS, &[]);
        assert_eq!(kinds(&mut bridge), [frame::REPLY]);
        client.close();
    }
}
