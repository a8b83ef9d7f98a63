//! Pieces over verbs: how the two ends agree on it, and how each of them works then.
//!
//! ```text
//!  sending end                                                   receiving end
//!     header with DIRECT_VERBS, DirectQueue   ──socket──▶            makes a queue pair, posts receives
//!     connects                                ◀──socket──  DirectQueue, or the reason why there is none
//!     a header of zeros                       ══verbs═══▶            the probe: only now is the path known to work
//!     a byte: 1 verbs, 0 socket               ──socket──▶
//!     headers, each with its piece            ══verbs═══▶            receives them into its free buffers
//!                                             ◀──socket──  a byte: it has posted so many more receives
//! ```
//!
//! Each message and each completion that wakes a thread has its price, most of all with few processors. So
//! the receiving end says that it has posted receives only when the sending end may run out of them, and
//! waits for free buffers only when it has few posted; and of pieces that are sent together, the sending end
//! has the completion of the last one only.
//!
//! Up to the byte, either end may decline, and then pieces take the socket. After it, whatever goes wrong
//! ends the connection at both ends, as on a socket.
//!
//! [`host_bridge::verbs::pieces`] says why pieces are messages and not writes: neither end gets a key to the
//! other's memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_bridge::stream::Stream;
use host_bridge::verbs::pieces::{Done, End};
use host_bridge::verbs::{Device, Domain, PieceBuffer, Pieces, Settings, VerbsError};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use protocol::device::{reason_text, untext};
use protocol::link::{DIRECT_VERBS_SINCE, DirectHeader, DirectQueue};
use protocol::ops::direct::PIECES;
use protocol::version::Version;
use zerocopy::{FromZeros, IntoBytes};

use super::buffers::{Bell, Buffer, Common, Pool, Source};
use super::incoming::Incoming;
use super::outgoing::{Jobs, Piece};
use super::{PATIENCE, WITHIN};
use crate::lock::lock;

/// Receives that are posted at first, and once a piece has come. Then there are twice as many whenever half
/// of them are used at once, up to [`PIECES`]: each costs a buffer of page-locked memory.
const FIRST_RECEIVES: usize = 2;
const USED_RECEIVES: usize = PIECES / 2;
/// How often an end that waits for its peer looks whether it has waited too long.
const LOOK: Duration = Duration::from_secs(1);

/// How a session's connections use verbs.
pub(super) struct Verbs {
    settings: Settings,
    /// Opened for the first connection, and again when the device has failed.
    domain: Mutex<Option<Arc<Domain>>>,
}

impl Verbs {
    pub(super) fn new(settings: Settings) -> Verbs {
        Verbs { settings, domain: Mutex::default() }
    }

    fn queue<B: PieceBuffer>(&self, end: End) -> Result<Pieces<B>, VerbsError> {
        let mut kept = lock(&self.domain);
        let domain = match &*kept {
            Some(domain) if domain.device().failure().is_none() => Arc::clone(domain),
            _ => Arc::clone(kept.insert(Domain::new(Device::open(&self.settings)?)?)),
        };
        drop(kept);
        Pieces::new(&domain, end, PIECES, &self.settings)
    }
}

/// Waits until one of these is readable or broken, or for `limit`.
fn wait(fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    let limit = limit.map_or(PollTimeout::NONE, |limit| {
        PollTimeout::try_from(limit.as_millis()).unwrap_or(PollTimeout::MAX)
    });
    match poll(&mut polled, limit) {
        Ok(_) | Err(nix::Error::EINTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn broken(e: VerbsError) -> io::Error {
    io::Error::other(e.to_string())
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The sending end's part of the agreement. `Ok(Err(…))`: pieces take the socket, and why.
///
/// # Errors
/// The connection is lost.
pub(super) fn offer(
    verbs: Option<&Verbs>,
    stream: &Stream,
    agreed: Version,
) -> io::Result<Result<Pieces<Source>, String>> {
    let Some(verbs) = verbs else {
        return Ok(Err("this server does not use verbs for that (--direct-verbs)".into()));
    };
    if agreed < DIRECT_VERBS_SINCE {
        return Ok(Err(format!("the other server speaks version {agreed} of rgpu")));
    }
    let mut queue = match verbs.queue(End::Sending) {
        Ok(queue) => queue,
        Err(e) => return Ok(Err(e.to_string())),
    };
    let ours = queue.offer();
    let theirs = match ask(stream, &ours)? {
        Ok(theirs) => theirs,
        Err(why) => return Ok(Err(format!("the other server says: {why}"))),
    };
    let tried = queue.connect(&theirs).map_err(|e| e.to_string()).and_then(|()| probe(&mut queue));
    stream.write_all(&[u8::from(tried.is_ok())])?;
    Ok(tried.map(|()| queue))
}

/// Sends an offer, and reads the answer. `Ok(Err(…))`: a refusal.
pub(super) fn ask(stream: &Stream, ours: &DirectQueue) -> io::Result<Result<DirectQueue, String>> {
    stream.write_all(&[DirectHeader::offer().as_bytes(), ours.as_bytes()].concat())?;
    let mut theirs = DirectQueue::new_zeroed();
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.read_exact(theirs.as_mut_bytes())?;
    stream.set_read_timeout(None)?;
    Ok(if theirs.queue_pair == 0 { Err(untext(&theirs.reason)) } else { Ok(theirs) })
}

/// Sends the first message, and waits until the peer's device has it.
fn probe(queue: &mut Pieces<Source>) -> Result<(), String> {
    let failed = |e: VerbsError| e.to_string();
    queue.send(&DirectHeader::new_zeroed(), None, false).map_err(failed)?;
    let until = Instant::now() + WITHIN;
    let mut done = Vec::new();
    loop {
        queue.arm().map_err(failed)?;
        queue.poll(&mut done).map_err(failed)?;
        if !done.is_empty() {
            queue.disarm();
            return Ok(());
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(format!(
                "the other server's device does not answer within {WITHIN:?} (is UDP port 4791 blocked?)"
            ));
        }
        wait(&queue.fds(), Some(left)).map_err(|e| e.to_string())?;
        queue.disarm();
    }
}

/// The receiving end's part of the agreement, after the header of an offer. `None`: pieces take the socket.
///
/// # Errors
/// The connection is lost.
pub(super) fn answer(
    verbs: Option<&Verbs>,
    stream: &Stream,
    pool: &Arc<Pool>,
) -> io::Result<Option<Receiving>> {
    let mut theirs = DirectQueue::new_zeroed();
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.read_exact(theirs.as_mut_bytes())?;
    let made = match verbs {
        Some(verbs) => prepare(verbs, pool, &theirs).map_err(|e| e.to_string()),
        None => Err("it does not use verbs for that (--direct-verbs)".into()),
    };
    let agreed = match made {
        Ok(queue) => {
            stream.write_all(queue.pieces.offer().as_bytes())?;
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            let agreed = (byte == [1]).then_some(queue);
            agreed.inspect(|_| {
                tracing::info!("pieces of a direct connection of another server come over verbs")
            })
        }
        Err(why) => {
            tracing::info!(
                "pieces of a direct connection of another server come over its socket, because {why}"
            );
            let refusal = DirectQueue { reason: reason_text(&why), ..DirectQueue::new_zeroed() };
            stream.write_all(refusal.as_bytes())?;
            None
        }
    };
    stream.set_read_timeout(None)?;
    Ok(agreed)
}

/// What an end does after a turn of its thread.
pub(super) enum Turn {
    /// Something has happened: another turn at once.
    Worked,
    /// Nothing has: another turn when something happens, or after this time.
    Idle(Option<Duration>),
    /// The other end has closed the connection.
    Over,
}

/// A receiving end's queue.
pub(super) struct Receiving {
    pub(super) pieces: Pieces<Buffer>,
    /// Receives that it should have posted, and those of them of which the sending end does not know.
    most: usize,
    untold: usize,
    /// The first message has come.
    probed: bool,
    done: Vec<Done<Buffer>>,
    bell: Arc<Bell>,
}

fn prepare(verbs: &Verbs, pool: &Arc<Pool>, theirs: &DirectQueue) -> Result<Receiving, VerbsError> {
    let bell = Bell::new().map_err(|source| VerbsError::Call { what: "making an eventfd".into(), source })?;
    let bell = Arc::clone(pool.bell.get_or_init(|| Arc::new(bell)));
    let pieces = verbs.queue(End::Receiving)?;
    let (most, untold, probed, done) = (FIRST_RECEIVES, 0, false, Vec::new());
    let mut queue = Receiving { pieces, most, untold, probed, done, bell };
    while queue.post(pool)? {}
    if std::mem::take(&mut queue.untold) == 0 {
        return Err(VerbsError::Broken("there is no memory for it".into()));
    }
    // The sending end grants nothing, whatever it says.
    queue.pieces.connect(&DirectQueue { receives: 0, ..*theirs })?;
    Ok(queue)
}

impl Receiving {
    /// Posts receives as long as there are buffers, but ends with one that has to be registered first, which
    /// takes long: the sending end does not wait for several of them. Returns whether there may be more.
    fn post(&mut self, pool: &Arc<Pool>) -> Result<bool, VerbsError> {
        while self.pieces.under_way() < self.most
            && let Some(mut buffer) = pool.try_take()
        {
            let is_new = !buffer.is_registered(self.pieces.domain());
            buffer.register(self.pieces.domain())?;
            self.pieces.receive(buffer)?;
            self.untold += 1;
            if is_new {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether it has few receives, so that it needs each buffer that becomes free. Otherwise it takes them
    /// when the next piece comes.
    pub(super) fn is_short(&self) -> bool {
        self.pieces.under_way() <= self.most / 2
    }

    /// Receives that the sending end may use as far as it knows.
    pub(super) fn told(&self) -> usize {
        self.pieces.under_way().saturating_sub(self.untold)
    }

    /// Takes what has come, and posts receives for more.
    ///
    /// # Errors
    /// The connection is lost, or the peer does what it may not.
    pub(super) fn turn(&mut self, incoming: &Incoming, stream: &Stream) -> io::Result<Turn> {
        // What has come before the end of the connection counts, however it ends.
        let ended = has_ended(stream);
        let polled = self.pieces.poll(&mut self.done);
        let came = !self.done.is_empty();
        for done in self.done.drain(..) {
            if std::mem::replace(&mut self.probed, true) {
                take(incoming, done)?;
                self.most = self.most.max(USED_RECEIVES);
            } else if done.header != DirectHeader::new_zeroed() || done.len > 0 {
                return Err(wrong(format!("piece {} came before the probe", done.header.number)));
            }
        }
        polled.map_err(broken)?;
        if ended? {
            return Ok(Turn::Over);
        }
        if came && self.is_short() {
            self.most = (self.most * 2).min(PIECES);
        }
        let more = self.post(&incoming.pool).map_err(broken)?;
        if self.untold > 0 && self.told() <= self.most / 2 {
            // There are no more than `PIECES`.
            let receives = std::mem::take(&mut self.untold) as u8;
            if stream.write_all(&[receives]).is_err() {
                // The sending end has just closed the connection. The next turn sees that, and takes what
                // has come before.
                return Ok(Turn::Worked);
            }
        }
        Ok(if came || more { Turn::Worked } else { Turn::Idle(None) })
    }
}

/// Receives pieces until the connection is lost.
pub(super) fn receive(incoming: &Incoming, stream: &Stream, mut queue: Receiving) -> io::Result<()> {
    let mut rest = Rest::default();
    loop {
        match queue.turn(incoming, stream)? {
            Turn::Worked => {}
            Turn::Idle(limit) => {
                if rest.begins(&queue.pieces, &queue.bell, queue.is_short())? {
                    rest.sleep(&queue.pieces, stream, &queue.bell, limit)?;
                }
            }
            Turn::Over => return Ok(()),
        }
    }
}

/// How a thread waits for its queue pair, after turns in which nothing has happened.
#[derive(Default)]
pub(super) struct Rest {
    is_armed: bool,
    listens: bool,
}

impl Rest {
    /// Has the next completion wake the thread and, if it `listens`, the bell. Returns whether it may sleep:
    /// otherwise something may have come since the last turn, because what comes during work wakes nobody.
    pub(super) fn begins<B: PieceBuffer>(
        &mut self,
        pieces: &Pieces<B>,
        bell: &Bell,
        listens: bool,
    ) -> io::Result<bool> {
        let is_ready = self.is_armed && (self.listens || !listens);
        if !std::mem::replace(&mut self.is_armed, true) {
            pieces.arm().map_err(broken)?;
        }
        if listens && !std::mem::replace(&mut self.listens, true) {
            bell.listen();
        }
        Ok(is_ready)
    }

    /// Sleeps until something happens, or for `limit`.
    pub(super) fn sleep<B: PieceBuffer>(
        &mut self,
        pieces: &Pieces<B>,
        stream: &Stream,
        bell: &Bell,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        wait(&self.fds(pieces, stream, bell), limit)?;
        if self.listens {
            bell.silence();
        }
        pieces.disarm();
        *self = Rest::default();
        Ok(())
    }

    /// What it sleeps on.
    pub(super) fn fds<'e, B: PieceBuffer>(
        &self,
        pieces: &'e Pieces<B>,
        stream: &'e Stream,
        bell: &'e Bell,
    ) -> Vec<BorrowedFd<'e>> {
        let rung = self.listens.then(|| bell.as_fd());
        pieces.fds().into_iter().chain([stream.as_fd()]).chain(rung).collect()
    }
}

/// Takes a piece that has come.
fn take(incoming: &Incoming, Done { header, len, buffer }: Done<Buffer>) -> io::Result<()> {
    let expected = incoming.check(&header)?;
    if len != expected {
        return Err(wrong(format!("piece {} has {len} bytes where {expected} are announced", header.number)));
    }
    incoming.bytes.over_verbs.fetch_add(len as u64, Ordering::Relaxed);
    incoming.arrived(header.number, buffer.filter(|_| len > 0).map(|buffer| (buffer, len)));
    Ok(())
}

/// Whether the sending end has closed the connection.
///
/// # Errors
/// The connection is broken, or bytes came, which do not belong there.
pub(super) fn has_ended(stream: &Stream) -> io::Result<bool> {
    if !stream.is_readable() {
        return Ok(false);
    }
    stream.set_nonblocking(true)?;
    let read = io::Read::read(&mut &*stream, &mut [0]);
    stream.set_nonblocking(false)?;
    match read {
        Ok(0) => Ok(true),
        Ok(_) => Err(wrong("bytes on the socket of a connection over verbs".into())),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(e) => Err(e),
    }
}

/// The sender's queue pair, and the pieces that it still has to send.
pub(super) struct Sender {
    pub(super) pieces: Pieces<Source>,
    jobs: Jobs,
    /// A piece for which the other end has no receive yet.
    next: Option<Piece>,
    done: Vec<Done<Source>>,
    /// Since when something waits for the other end, and that has taken and granted nothing.
    stalled: Option<Instant>,
}

impl Sender {
    pub(super) fn new(pieces: Pieces<Source>, jobs: Jobs) -> Sender {
        Sender { pieces, jobs, next: None, done: Vec::new(), stalled: None }
    }

    /// Sends what there is, as far as the other end has receives for it. The stream does not block. `now`:
    /// the time.
    ///
    /// # Errors
    /// The connection is lost, or the peer does what it may not.
    pub(super) fn turn(&mut self, stream: &Stream, bytes: &Common, now: Instant) -> io::Result<Turn> {
        let mut worked = granted(stream, |receives| self.pieces.grant(receives).map_err(broken))?;
        self.pieces.poll(&mut self.done).map_err(broken)?;
        for Done { len, buffer, .. } in self.done.drain(..) {
            worked = true;
            bytes.all.fetch_add(len as u64, Ordering::Relaxed);
            bytes.over_verbs.fetch_add(len as u64, Ordering::Relaxed);
            if let Some(Source::InPlace(_)) = buffer {
                bytes.in_place.fetch_add(len as u64, Ordering::Relaxed);
            }
        }
        while let Some((header, mut piece)) = self.next.take().or_else(|| self.jobs.now()) {
            if !self.pieces.may_send() {
                self.next = Some((header, piece));
                break;
            }
            if let Some((Source::Buffer(buffer), _)) = &mut piece {
                buffer.register(self.pieces.domain()).map_err(broken)?;
            }
            let more = self.jobs.has_piece();
            self.pieces.send(&header, piece, more).map_err(broken)?;
        }
        let waits = self.next.is_some() || self.pieces.under_way() > 0;
        if self.jobs.over && !waits {
            return Ok(Turn::Over);
        }
        if worked || !waits {
            self.stalled = None;
        }
        if waits && now.saturating_duration_since(*self.stalled.get_or_insert(now)) > PATIENCE {
            let what = format!("the other server has taken no piece for {PATIENCE:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        Ok(if worked { Turn::Worked } else { Turn::Idle(waits.then_some(LOOK)) })
    }
}

/// Sends what arrives in the queue, and calls `after` whenever something was. Returns when the connection is
/// lost.
pub(super) fn send(
    stream: &Stream,
    pieces: Pieces<Source>,
    jobs: Jobs,
    bell: &Bell,
    bytes: &Common,
    after: impl Fn(),
) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let (mut sender, mut rest) = (Sender::new(pieces, jobs), Rest::default());
    loop {
        let turn = sender.turn(stream, bytes, Instant::now())?;
        after();
        match turn {
            Turn::Worked => {}
            Turn::Idle(limit) => {
                if rest.begins(&sender.pieces, bell, true)? {
                    rest.sleep(&sender.pieces, stream, bell, limit)?;
                }
            }
            Turn::Over => return Ok(()),
        }
    }
}

/// Reads how many more receives the other end has posted, and gives them to `grant`. True: there was
/// something.
///
/// # Errors
/// The connection is lost, or the other end grants nothing: so it could keep a piece waiting for ever, and
/// this thread busy.
pub(super) fn granted(stream: &Stream, mut grant: impl FnMut(usize) -> io::Result<()>) -> io::Result<bool> {
    let mut worked = false;
    let mut bytes = [0; PIECES];
    loop {
        match io::Read::read(&mut &*stream, &mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                for receives in &bytes[..n] {
                    if *receives == 0 {
                        return Err(wrong("it says that it has posted 0 more receives".into()));
                    }
                    grant(usize::from(*receives))?;
                }
                worked = true;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(worked),
            Err(e) => return Err(e),
        }
    }
}
