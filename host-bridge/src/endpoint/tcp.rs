//! The worker's end of a `tcp` session: commands, answers and progress on the control connection, data on others.
//!
//! The dispatcher reads the control connection itself, polling before it sleeps. While it executes a command it reads nothing, and a command may take until its stream has its data: so
//! nothing that a command needs may come behind it on that connection. Every thread may send on it, whole frames under a lock. A bridge that waits for
//! something asks whether we are there ([`frame::ALIVE`]); the dispatcher answers, and while it is busy with a long command a keep-alive thread does. In an idle session both
//! sleep, and what notices a bridge that is gone is the connection's keepalive.
//!
//! A lost connection does not end the session: it is parked until the bridge brings new connections ([`TcpClient::resume`]), for a grace period ([`link`](super::link)). What was sent is kept until
//! the bridge has said that it has it, so each stream goes on behind the last byte that came.
//!
//! `commands` is the dispatcher's side, `keep_alive` the thread that answers for it.

mod commands;
mod keep_alive;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use nix::sys::eventfd::EventFd;
use protocol::Status;
use protocol::data::HostRange;
use protocol::link::{
    ACKNOWLEDGE_CONTROL, ACKNOWLEDGE_IN, DataGrant, DataSent, ProgressUpdate, Received, frame,
};
use protocol::trace::{RECORDER, Stage};
use zerocopy::IntoBytes;

use self::keep_alive::KeepAlive;
use super::cache::{BlockCache, Blocks};
use super::dispatcher_poll::Replies;
use super::incoming::{Bridge, Inbox};
use super::link::{Connection, Counted, DataIn, DataOwner, Link};
use super::outgoing::{Outbox, Outgoing};
use super::stream::{check_slot, put, put_executed, put_progress, put_reply};
use super::wake::StopEvent;
use super::{Client, Farewell, Lost, Sink, Source, Survivor};
use crate::compression::CompressUse;
use crate::framing::{BadAcknowledgement, SendBuffer, resumed_body, resumed_counts, watch_peer};
use crate::stream::Stream;

pub use commands::TcpCommands;

/// A peer that takes nothing for this long is lost.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of the control stream that may wait to be sent or acknowledged. A bridge that acknowledges as it must never lets so many add up.
const MOST_KEPT: usize = 64 << 20;
/// How long the other connections of an attempt to resume, and what the bridge says on them, may take to come.
const RESUME_WITHIN: Duration = Duration::from_secs(10);
/// Executed commands after which the client is told even while there is more to do.
const BATCH: u64 = 512;

/// What a session may have of its server.
#[derive(Debug, Clone, Copy)]
pub struct Allowance {
    /// How long it waits for others when its connections are lost. Zero: it ends with them.
    pub grace: Duration,
    /// About how many bytes of data that were sent it keeps until the bridge has said that it has them.
    pub replay: u64,
    /// How many bytes of data that came ahead of their turn it keeps, as the welcome said.
    pub eager: u64,
    /// When data to its client is compressed.
    pub compress: CompressUse,
}

/// The side of every other thread.
pub struct TcpClient {
    this: Weak<TcpClient>,
    link: Link,
    /// Where the dispatcher reads. `None` while there is no link.
    control: Mutex<Option<Connection>>,
    /// Raised when it is another one, and lowered by the dispatcher.
    changed: EventFd,
    control_counted: Counted,
    data: Vec<Arc<DataIn>>,
    link_changes: OnceLock<Box<dyn Fn(bool) + Send + Sync>>,
    announcing: Mutex<()>,
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

struct Sending {
    buffer: SendBuffer,
    connection: Option<Connection>,
    last: Instant,
    /// `executed` as the client was last told.
    told: u64,
}

impl TcpClient {
    /// Adds a data connection of one of the session's links, whose handshake is over.
    pub fn add_data_connection(&self, attempt: u32, index: u32, stream: Stream) -> io::Result<()> {
        self.link.introduce();
        if attempt > 0 {
            self.link.add(attempt, index, stream);
            return Ok(());
        }
        let stream = prepared(stream)?;
        let Some(data) = self.data.get(index as usize) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the session has no data connection {index}"),
            ));
        };
        let connection = Connection { attempt, stream };
        let joined = self.link.join_first(&connection.stream, || {
            self.outbox.plug(index as usize, connection.clone(), 0)?;
            data.plug(connection.clone());
            Ok::<(), BadAcknowledgement>(())
        });
        match joined {
            None => {}
            Some(Ok(())) => self.send_data(index as usize),
            Some(Err(wrong)) => return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong)),
        }
        Ok(())
    }

    /// Keeps what the session's bridge sends in `cache`, so that it need not be sent again. To be called once, before the first data connection is added; the welcome has said that there is a cache.
    pub fn use_cache(&self, cache: Arc<dyn BlockCache>) -> io::Result<()> {
        let blocks = Blocks::new();
        self.inbox.knows(Arc::clone(&blocks));
        let client = Weak::clone(&self.this);
        let serve = move || {
            blocks.serve(&*cache, |known| {
                if let Some(client) = client.upgrade() {
                    let put_known = |sending: &mut Sending| {
                        put(sending.buffer.end(), frame::DATA_KNOWN, &[known.as_bytes()])
                    };
                    client.say(Say::Filled, put_known);
                }
            });
        };
        std::thread::Builder::new().name("rgpu-cache".into()).spawn(serve).map(drop)
    }

    /// Waits until the cache has what the session's bridge has sent for it, at most this long. To be called after the session's end.
    pub fn finish_cache(&self, limit: Duration) {
        self.inbox.finish_cache(limit);
    }

    /// Reads the stream of a data connection to its end.
    fn read_data(&self, index: usize) {
        let acknowledged = |upto| {
            let bad = |wrong: BadAcknowledgement| io::Error::new(io::ErrorKind::InvalidData, wrong);
            self.outbox.acknowledge(index, upto).map_err(bad)
        };
        match self.inbox.read_connection(&*self.data[index], acknowledged) {
            Err(e) if self.end.get().is_none() => self.lose(&format!("a data connection: {e}")),
            _ => {}
        }
    }

    fn send_data(&self, index: usize) {
        if let Err((attempt, e)) = self.outbox.send(index) {
            self.broken(attempt, Some(&e));
        }
    }

    /// A connection of `attempt` is broken, or was closed where nothing is missing (`None`).
    pub(super) fn broken(&self, attempt: u32, why: Option<&io::Error>) {
        if self.link.survives() {
            let watch = self.link.lose(attempt);
            self.park(watch, why.map_or_else(|| "closed by the bridge".into(), io::Error::to_string));
        } else if let Some(why) = why.filter(|_| self.end.get().is_none()) {
            // A bridge that closes its connections is gone; the control connection says so.
            self.lose(&format!("the bridge's connection: {why}"));
        }
    }

    /// The link is down. `watch`: the grace period is not counted yet.
    fn park(&self, watch: bool, why: String) {
        // A bridge sends commands once it has the welcome, perhaps before any data connection stands.
        if self.control_counted.received() > 0 {
            self.link.introduce();
        }
        let (true, Some(client)) = (watch, self.this.upgrade()) else { return };
        let watching = std::thread::Builder::new().name("rgpu-parked".into()).spawn(move || {
            client.link.count_down(&why, || client.announce(), |reason| client.lose(reason));
        });
        if let Err(e) = watching {
            self.lose(&format!("its connections were lost and nobody can wait for others: {e}"));
        }
    }

    /// Says whether there is a link now.
    fn announce(&self) {
        if let Some(told) = self.link_changes.get() {
            // In turn, so that the last one says what is true.
            let _turn = lock(&self.announcing);
            told(!self.link.is_down());
        }
    }

    /// False: a later attempt has taken its place.
    fn relink(&self, attempt: u32, control: &Arc<Stream>) -> io::Result<bool> {
        let Some(watch) = self.link.begin(attempt, control) else { return Ok(false) };
        self.park(watch, "the bridge brings new connections".into());
        // The old connections are shut down. Once no stream has one any more, the numbers of bytes that have come stand.
        *lock(&self.control) = None;
        let mut counted = vec![&self.control_counted];
        for (index, data) in self.data.iter().enumerate() {
            data.unplug();
            self.outbox.unplug(index);
            counted.push(&data.counted);
        }
        lock(&self.sending).connection = None;
        let mine: Vec<u64> = counted.iter().map(|counted| counted.received()).collect();
        let mut said = Vec::new();
        put(&mut said, frame::RESUMED, &[&resumed_body(&mine)]);
        control.write_all(&said)?;
        control.set_read_timeout(Some(RESUME_WITHIN))?;
        let mut body = Vec::new();
        let kind = control.recv_frame(&mut body)?;
        let theirs = resumed(kind, &body, mine.len())?;
        control.set_read_timeout(None)?;
        watch_peer(control);
        let Some(data) = self.link.data(attempt, self.data.len(), RESUME_WITHIN) else { return Ok(false) };
        data.iter().try_for_each(|stream| prepare(stream))?;
        let installed = self.link.finish(attempt, || {
            let mut sending = lock(&self.sending);
            sending.buffer.resume(theirs[0])?;
            for (index, stream) in data.iter().enumerate() {
                let connection = Connection { attempt, stream: Arc::clone(stream) };
                self.outbox.plug(index, connection.clone(), theirs[1 + index])?;
                self.data[index].plug(connection);
            }
            let connection = Connection { attempt, stream: Arc::clone(control) };
            sending.connection = Some(connection.clone());
            counted.iter().zip(&mine).for_each(|(counted, said)| counted.tell(*said));
            *lock(&self.control) = Some(connection);
            Ok::<(), BadAcknowledgement>(())
        });
        match installed {
            None => return Ok(false),
            Some(Err(wrong)) => {
                self.lose(&format!("the bridge is no bridge of ours: {wrong}"));
                return Err(io::Error::new(io::ErrorKind::InvalidData, wrong));
            }
            Some(Ok(())) => {}
        }
        let _ = self.changed.write(1);
        self.announce();
        self.say(Say::Unsent, |_| {});
        // Side by side: each may have much to send again.
        std::thread::scope(|scope| {
            (0..self.data.len()).for_each(|index| drop(scope.spawn(move || self.send_data(index))));
        });
        Ok(true)
    }

    /// The bridge says what it has received of the control stream.
    fn control_arrived(&self, Received { stream, bytes, .. }: Received) -> Result<(), String> {
        let acknowledged = match (stream as usize).checked_sub(1) {
            None => lock(&self.sending).buffer.acknowledge(bytes),
            Some(index) if index < self.data.len() => self.outbox.acknowledge(index, bytes),
            Some(_) => {
                return Err(format!("it acknowledges stream {stream}, which the session does not have"));
            }
        };
        acknowledged.map_err(|wrong| wrong.to_string())
    }

    fn send(&self, fill: impl FnOnce(&mut Vec<u8>)) {
        self.say(Say::Filled, |sending| fill(sending.buffer.end()));
    }

    /// Sends what `fill` puts into the buffer. What was executed and received goes along with it, and by itself only if `say` says so.
    fn say(&self, say: Say, fill: impl FnOnce(&mut Sending)) {
        if self.end.get().is_some() {
            return;
        }
        let mut sending = lock(&self.sending);
        let begin = sending.buffer.end().len();
        let (now, told) = (self.executed.load(Ordering::Acquire), sending.told);
        if now > told {
            put_executed(sending.buffer.end(), now);
            sending.told = now;
        }
        let along = sending.buffer.end().len();
        fill(&mut sending);
        let filled = sending.buffer.end().len() > along;
        let acknowledged = (filled || say != Say::Filled) && self.put_received(&mut sending);
        let alone = match say {
            Say::Filled => false,
            Say::Executed => along > begin || acknowledged,
            Say::Received => acknowledged,
            Say::Unsent => true,
        };
        if !filled && !alone {
            sending.buffer.end().truncate(begin);
            sending.told = told;
            return;
        }
        let broken = sending.write();
        let kept = sending.buffer.kept();
        drop(sending);
        if let Some((attempt, e)) = broken {
            self.broken(attempt, Some(&e));
        }
        if kept > MOST_KEPT {
            self.lose(&format!(
                "the bridge has acknowledged nothing of the last {kept} bytes that were sent"
            ));
        }
    }

    /// Says what has come, where it matters: the bridge keeps commands in their ring, and data in the client's memory, until then. True: something was said.
    fn put_received(&self, sending: &mut Sending) -> bool {
        let mut entries = [Received { stream: 0, reserved: 0, bytes: 0 }; 8];
        let mut said = false;
        let control = (&self.control_counted, ACKNOWLEDGE_CONTROL / 8);
        let data = self.data.iter().map(|data| (&data.counted, 1));
        let mut due = (0..)
            .zip(std::iter::once(control).chain(data))
            .filter(|(_, (counted, least))| counted.untold() >= *least)
            .peekable();
        while due.peek().is_some() {
            let mut count = 0;
            for (entry, (stream, (counted, _))) in entries.iter_mut().zip(&mut due) {
                let bytes = counted.received();
                counted.tell(bytes);
                *entry = Received { stream, reserved: 0, bytes };
                count += 1;
            }
            put(sending.buffer.end(), frame::RECEIVED, &[entries[..count].as_bytes()]);
            said = true;
        }
        said
    }

    /// Tells what was executed, and what has come, if that is not known yet.
    fn flush_executed(&self) {
        self.say(Say::Executed, |_| {});
    }

    pub(super) fn data_sent(&self, seq: u64, bytes: u64) {
        self.send(|buffer| {
            put(buffer, frame::DATA_SENT, &[DataSent { seq, bytes }.as_bytes()]);
        });
    }

    fn alive(&self) {
        self.send(|buffer| put(buffer, frame::ALIVE, &[]));
    }

    /// Ends the session, once: all threads that wait in here return.
    fn finish(&self, end: Option<Lost>) {
        // Without a reason, too: the bridge must know that its farewell has come.
        let reason = end.as_ref().map_or(String::new(), |lost| lost.reason.clone());
        // Under the lock, so that a thread that finds the session lost, and ends the process, does so after the client was told.
        let mut sending = lock(&self.sending);
        if self.end.set(end).is_err() {
            return;
        }
        put(sending.buffer.end(), frame::BYE, &[reason.as_bytes()]);
        // The peer may be the one that is gone.
        let _ = sending.write();
        drop(sending);
        self.keep_alive.end();
        self.stop.raise();
        self.link.close();
        self.inbox.close();
        self.outbox.close();
        self.data.iter().for_each(|data| data.close());
        self.farewell.call();
    }
}

/// What is worth a message of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Say {
    /// Nothing but what the caller fills in.
    Filled,
    /// What was executed, and what has come.
    Executed,
    /// What has come.
    Received,
    /// Whatever was not sent when the last link broke.
    Unsent,
}

impl Sending {
    /// Sends all that is unsent, if there is a connection. Gives the attempt whose connection broke.
    fn write(&mut self) -> Option<(u32, io::Error)> {
        let Connection { attempt, stream } = self.connection.as_ref()?;
        self.last = Instant::now();
        let len = self.buffer.unsent().len();
        match stream.write_all(self.buffer.unsent()) {
            Ok(()) => {
                self.buffer.advance(len);
                None
            }
            Err(e) => {
                // Some of it may have been sent. The bridge will say how much has come.
                self.buffer.advance(len);
                let attempt = *attempt;
                self.connection = None;
                Some((attempt, e))
            }
        }
    }
}

/// What each data connection's stream tells its client.
struct Owner(Weak<TcpClient>);

impl DataOwner for Owner {
    fn broken(&self, attempt: u32, why: Option<&io::Error>) {
        if let Some(client) = self.0.upgrade() {
            client.broken(attempt, why);
        }
    }

    fn received(&self, untold: u64, idle: bool) {
        if (idle || untold >= ACKNOWLEDGE_IN)
            && let Some(client) = self.0.upgrade()
        {
            client.say(Say::Received, |_| {});
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

fn prepare(stream: &Stream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay()?;
    stream.set_write_timeout(SEND_TIMEOUT)
}

fn prepared(stream: Stream) -> io::Result<Arc<Stream>> {
    prepare(&stream)?;
    Ok(Arc::new(stream))
}

/// The numbers in a bridge's [`frame::RESUMED`].
pub(super) fn resumed(kind: Option<u32>, body: &[u8], streams: usize) -> io::Result<Vec<u64>> {
    let wrong = || {
        let text = format!("a frame of kind {kind:?} with {} bytes where RESUMED was expected", body.len());
        io::Error::new(io::ErrorKind::InvalidData, text)
    };
    resumed_counts(body, streams).filter(|_| kind == Some(frame::RESUMED)).ok_or_else(wrong)
}

impl Survivor for TcpClient {
    fn when_link_changes(&self, told: Box<dyn Fn(bool) + Send + Sync>) {
        // A second one would be the same.
        let _ = self.link_changes.set(told);
    }

    fn resume(&self, attempt: u32, control: Stream) -> io::Result<()> {
        let Some(client) = self.this.upgrade() else { return Ok(()) };
        self.link.introduce();
        let control = prepared(control)?;
        std::thread::Builder::new().name("rgpu-resume".into()).spawn(move || {
            let resumed = client.relink(attempt, &control);
            if !matches!(resumed, Ok(true)) {
                // The bridge must notice, and the daemon has the connection too.
                control.shut_down();
            }
            match resumed {
                Ok(true) => tracing::info!(attempt, "link restored; the session goes on"),
                Ok(false) => {}
                Err(why) => tracing::info!(attempt, "the session was not resumed: {why}"),
            }
        })?;
        Ok(())
    }
}

impl Bridge for TcpClient {
    fn grant(&self, grant: DataGrant) {
        self.send(|buffer| put(buffer, frame::DATA_GRANT, &[grant.as_bytes()]));
    }

    fn placed(&self, bytes: u64) {
        self.send(|buffer| put(buffer, frame::DATA_PLACED, &[&bytes.to_le_bytes()]));
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
                self.send(|buffer| put_reply(buffer, seq, slot, status, payload));
            }
            Err(wrong) => self.lose(&wrong),
        }
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        self.send(|buffer| put_progress(buffer, updates));
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
        self.finish(Some(Lost::new(reason)));
    }

    fn close(&self) {
        self.finish(None);
    }

    fn when_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.farewell.set(then);
    }

    fn rouse(&self) {
        // It fails only if it is raised already.
        let _ = self.changed.write(1);
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
    use std::net::{TcpListener, TcpStream};

    use protocol::link::progress;

    use super::*;
    use crate::endpoint::Polling;
    use crate::framing::FrameReader;

    const ALLOWANCE: Allowance =
        Allowance { grace: Duration::ZERO, replay: 0, eager: 0, compress: CompressUse::Never };

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
        let (_commands, client) =
            TcpCommands::start(control.into(), 64, 1, Polling::default(), ALLOWANCE).unwrap();
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
