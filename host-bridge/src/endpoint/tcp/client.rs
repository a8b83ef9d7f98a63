//! What the threads of a worker share of a `tcp` session: its connections, and what is sent on them.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use nix::sys::eventfd::EventFd;
use protocol::link::{ACKNOWLEDGE_CONTROL, ACKNOWLEDGE_IN, DataGrant, DataSent, Received, frame};
use zerocopy::IntoBytes;

use super::keep_alive::KeepAlive;
use crate::endpoint::cache::{BlockCache, Blocks};
use crate::endpoint::dispatcher_poll::Replies;
use crate::endpoint::end::{Farewell, Lost};
use crate::endpoint::incoming::{Bridge, Inbox};
use crate::endpoint::link::{Connection, Counted, DataIn, DataOwner, Link, resumed};
use crate::endpoint::outbox::Outbox;
use crate::endpoint::stream::{put, put_executed};
use crate::endpoint::wake::StopEvent;
use crate::framing::{BadAcknowledgement, SendBuffer, resumed_body, watch_peer};
use crate::stream::Stream;

/// A peer that takes nothing for this long is lost.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of the control stream that may wait to be sent or acknowledged. A bridge that acknowledges as
/// it must never lets so many add up.
const MOST_KEPT: usize = 64 << 20;
/// How long the other connections of an attempt to resume, and what the bridge says on them, may take to
/// come.
const RESUME_WITHIN: Duration = Duration::from_secs(10);

/// The name of threads that send what was kept.
const RESEND: &str = "rgpu-resend";

/// The side of every other thread.
pub struct TcpClient {
    pub(super) this: Weak<TcpClient>,
    pub(super) link: Link,
    /// Where the dispatcher reads. `None` while there is no link.
    pub(super) control: Mutex<Option<Connection>>,
    /// Raised when it is another one, and lowered by the dispatcher.
    pub(super) changed: EventFd,
    pub(super) control_counted: Counted,
    pub(super) data: Vec<Arc<DataIn>>,
    pub(super) link_changes: OnceLock<Box<dyn Fn(bool) + Send + Sync>>,
    pub(super) before_news: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub(super) announcing: Mutex<()>,
    /// Held by the attempt whose connections take the place of others.
    pub(super) relinking: Mutex<()>,
    pub(super) sending: Mutex<Sending>,
    pub(super) slot_count: u32,
    pub(super) inbox: Arc<Inbox>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) executed: AtomicU64,
    pub(super) end: OnceLock<Option<Lost>>,
    pub(super) stop: StopEvent,
    pub(super) keep_alive: KeepAlive,
    pub(super) replies: Replies,
    pub(super) farewell: Farewell,
}

pub(super) struct Sending {
    pub(super) buffer: SendBuffer,
    pub(super) connection: Option<Connection>,
    pub(super) last: Instant,
    /// `executed` as the client was last told.
    pub(super) told: u64,
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
            Some(Ok(())) if self.outbox.waits(index as usize) => self.send_kept(index as usize),
            None | Some(Ok(())) => {}
            Some(Err(wrong)) => return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong)),
        }
        Ok(())
    }

    /// Sends what was kept for a data connection. If a thread can be started, it does that: the caller has
    /// other connections to attend to.
    fn send_kept(&self, index: usize) {
        let client = Weak::clone(&self.this);
        let send = move || _ = client.upgrade().inspect(|client| client.send_data(index));
        if std::thread::Builder::new().name(RESEND.into()).spawn(send).is_err() {
            self.send_data(index);
        }
    }

    /// Keeps what the session's bridge sends in `cache`, so that it need not be sent again. To be called
    /// once, before the first data connection is added; the welcome has said that there is a cache.
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

    /// Waits until the cache has what the session's bridge has sent for it, at most this long. To be called
    /// after the session's end.
    pub fn finish_cache(&self, limit: Duration) {
        self.inbox.finish_cache(limit);
    }

    /// Reads the stream of a data connection to its end.
    pub(super) fn read_data(&self, index: usize) {
        let acknowledged = |upto| {
            let bad = |wrong: BadAcknowledgement| io::Error::new(io::ErrorKind::InvalidData, wrong);
            self.outbox.acknowledge(index, upto).map_err(bad)
        };
        match self.inbox.read_connection(&*self.data[index], acknowledged) {
            Err(e) if self.end.get().is_none() => self.fail(&format!("a data connection: {e}")),
            _ => {}
        }
    }

    pub(super) fn send_data(&self, index: usize) {
        if let Err((attempt, e)) = self.outbox.send(index) {
            self.broken(attempt, Some(&e));
        }
    }

    /// A connection of `attempt` is broken, or was closed where nothing is missing (`None`).
    pub(in crate::endpoint) fn broken(&self, attempt: u32, why: Option<&io::Error>) {
        if self.link.survives() {
            let watch = self.link.lose(attempt);
            self.park(watch, why.map_or_else(|| "closed by the bridge".into(), io::Error::to_string));
        } else if let Some(why) = why.filter(|_| self.end.get().is_none()) {
            // A bridge that closes its connections is gone; the control connection says so.
            self.fail(&format!("the bridge's connection: {why}"));
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
            client.link.count_down(&why, || client.announce(), |reason| client.fail(reason));
        });
        if let Err(e) = watching {
            self.fail(&format!("its connections were lost and nobody can wait for others: {e}"));
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
    pub(super) fn relink(&self, attempt: u32, control: &Arc<Stream>) -> io::Result<bool> {
        let Some(watch) = self.link.begin(attempt, control) else { return Ok(false) };
        self.park(watch, "the bridge brings new connections".into());
        // An older attempt that is slow must not take this one's connections away. It ends soon: `begin` has
        // shut its own down.
        let relinking = lock(&self.relinking);
        if !self.link.is_at(attempt) {
            return Ok(false);
        }
        // The old connections are shut down. Once no stream has one any more, the numbers of bytes that have
        // come stand.
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
                self.fail(&format!("the bridge is no bridge of ours: {wrong}"));
                return Err(io::Error::new(io::ErrorKind::InvalidData, wrong));
            }
            Some(Ok(())) => {}
        }
        drop(relinking);
        let _ = self.changed.write(1);
        self.announce();
        // Side by side: each may have much to send again, and the bridge reads no more of the control
        // connection before it has data that it was told of.
        std::thread::scope(|scope| {
            for index in 0..self.data.len() {
                let send = move || self.send_data(index);
                if std::thread::Builder::new().name(RESEND.into()).spawn_scoped(scope, send).is_err() {
                    send();
                }
            }
            self.say(Say::Unsent, |_| {});
        });
        Ok(true)
    }

    /// The bridge says what it has received of the control stream.
    pub(super) fn control_arrived(&self, Received { stream, bytes, .. }: Received) -> Result<(), String> {
        let acknowledged = match (stream as usize).checked_sub(1) {
            None => lock(&self.sending).buffer.acknowledge(bytes),
            Some(index) if index < self.data.len() => self.outbox.acknowledge(index, bytes),
            Some(_) => {
                return Err(format!("it acknowledges stream {stream}, which the session does not have"));
            }
        };
        acknowledged.map_err(|wrong| wrong.to_string())
    }

    pub(super) fn send(&self, fill: impl FnOnce(&mut Vec<u8>)) {
        self.say(Say::Filled, |sending| fill(sending.buffer.end()));
    }

    /// Sends what `fill` puts into the buffer. What was executed and received goes along with it, and by
    /// itself only if `say` says so.
    pub(super) fn say(&self, say: Say, fill: impl FnOnce(&mut Sending)) {
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
            self.fail(&format!(
                "the bridge has acknowledged nothing of the last {kept} bytes that were sent"
            ));
        }
    }

    /// Says what has come, where it matters: the bridge keeps commands in their ring, and data in the
    /// client's memory, until then. True: something was said.
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
    pub(super) fn flush_executed(&self) {
        self.say(Say::Executed, |_| {});
    }

    pub(in crate::endpoint) fn data_sent(&self, seq: u64, bytes: u64) {
        self.send(|buffer| put_data_sent(buffer, seq, bytes));
    }

    /// Says it with the next words, or with [`send_unsent`](Self::send_unsent).
    pub(in crate::endpoint) fn queue_data_sent(&self, seq: u64, bytes: u64) {
        if self.end.get().is_none() {
            put_data_sent(lock(&self.sending).buffer.end(), seq, bytes);
        }
    }

    /// Sends what was said and has not left yet.
    pub(in crate::endpoint) fn send_unsent(&self) {
        if !lock(&self.sending).buffer.unsent().is_empty() {
            self.say(Say::Unsent, |_| {});
        }
    }

    pub(super) fn alive(&self) {
        self.send(|buffer| put(buffer, frame::ALIVE, &[]));
    }

    /// The session is lost.
    pub(super) fn fail(&self, reason: &str) {
        self.finish(Some(Lost::new(reason)));
    }

    /// Ends the session, once: all threads that wait in here return.
    pub(super) fn finish(&self, end: Option<Lost>) {
        // Without a reason, too: the bridge must know that its farewell has come.
        let reason = end.as_ref().map_or(String::new(), |lost| lost.reason.clone());
        // Under the lock, so that a thread that finds the session lost, and ends the process, does so after
        // the client was told.
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

fn put_data_sent(buffer: &mut Vec<u8>, seq: u64, bytes: u64) {
    put(buffer, frame::DATA_SENT, &[DataSent { seq, bytes }.as_bytes()]);
}

/// What is worth a message of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Say {
    /// Nothing but what the caller fills in.
    Filled,
    /// What was executed, and what has come.
    Executed,
    /// What has come.
    Received,
    /// Whatever was said and has not been sent: because there was no link, or because it could wait.
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
pub(super) struct Owner(pub(super) Weak<TcpClient>);

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

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

fn prepare(stream: &Stream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay()?;
    stream.set_write_timeout(SEND_TIMEOUT)
}

pub(super) fn prepared(stream: Stream) -> io::Result<Arc<Stream>> {
    prepare(&stream)?;
    Ok(Arc::new(stream))
}

impl Bridge for TcpClient {
    fn grant(&self, grant: DataGrant) {
        self.send(|buffer| put(buffer, frame::DATA_GRANT, &[grant.as_bytes()]));
    }

    fn placed(&self, bytes: u64) {
        self.send(|buffer| put(buffer, frame::DATA_PLACED, &[&bytes.to_le_bytes()]));
    }

    fn wrong(&self, what: &str) {
        self.fail(&format!("the bridge sent {what}"));
    }
}
