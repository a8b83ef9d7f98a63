//! The sending end of a connection.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_bridge::endpoint::Mapped;
use host_bridge::stream::{QUIET, Stream};
use host_bridge::verbs::{Domain, Pieces};
use protocol::Status;
use protocol::link::DirectHeader;
use protocol::ops::direct::MAX_COPIES;
use protocol::polling::DIRECT_CONNECTION;
use zerocopy::IntoBytes;

use super::awake::Polls;
use super::buffers::{Bell, Buffer, Common, InPlace, InUse, Pool, Source};
use super::in_place::Found;
use super::incoming::IDLE;
use super::near::{Copies, Moving, Named};
use super::series::{InMotion, Leaving, Series};
use super::verbs;
use crate::lock::lock;

/// A box has no more pieces than this if it is sent from device memory: whoever frees that waits for them.
const IN_PLACE: u64 = 2;

/// The sending end of a connection.
pub struct Outgoing {
    pub(super) jobs: Mutex<Option<Sender<Job>>>,
    pub(super) pool: Arc<Pool>,
    /// Rung for jobs, if pieces go over verbs.
    pub(super) bell: Option<Arc<Bell>>,
    pub(super) named: Named,
    pub(super) copies: Arc<Copies>,
    /// Where memory must be registered from which pieces are sent, if they go over verbs.
    pub(super) domain: Option<Arc<Domain>>,
    /// What it sends over, or agrees over, while its thread runs.
    stream: Mutex<Option<Arc<Stream>>>,
    /// Of each piece that is sent from device memory, and when the last piece of a box began.
    in_place: Mutex<(Arc<()>, Option<Instant>)>,
    /// Boxes of which not all pieces have begun, and the memory of all.
    series: Mutex<(VecDeque<Leaving>, InMotion)>,
    /// Pieces of boxes that have begun, in their order, and what some have ended with.
    begun: Mutex<VecDeque<(u64, Option<Job>)>>,
    /// Whether its thread is to be awake when a piece of a box is ready.
    wakes: bool,
}

pub(super) enum Job {
    Piece(u64, Source, usize),
    /// This piece will not come.
    Nothing(u64),
    /// A piece is about to come: the thread is to be awake by then.
    Soon,
    /// Something to do that ends with a piece's job.
    Run(Box<dyn FnOnce() + Send>),
}

impl Outgoing {
    pub(super) fn new(
        jobs: Sender<Job>,
        bytes: &Arc<Common>,
        bell: Option<Arc<Bell>>,
        domain: Option<Arc<Domain>>,
        wakes: bool,
    ) -> Outgoing {
        let (jobs, pool) = (Mutex::new(Some(jobs)), Pool::new(bytes));
        let (named, copies, stream, in_place, series, begun) = Default::default();
        Outgoing { jobs, pool, bell, named, copies, domain, stream, in_place, series, begun, wakes }
    }

    /// `queue`: what pieces go over, instead of the socket.
    pub(super) fn start(
        stream: Stream,
        queue: Option<Pieces<Source>>,
        bytes: Arc<Common>,
    ) -> io::Result<Arc<Outgoing>> {
        let (jobs, due) = channel();
        let bound = DIRECT_CONNECTION.here();
        let due = Jobs::new(due, bound);
        // Over verbs it waits for several things at once, and does not poll.
        let wakes = queue.is_none() && !bound.is_zero();
        let bell = queue.is_some().then(Bell::new).transpose()?.map(Arc::new);
        let domain = queue.as_ref().map(|queue| Arc::clone(queue.domain()));
        let outgoing = Arc::new(Outgoing::new(jobs, &bytes, bell.clone(), domain, wakes));
        let (own, stream) = (Arc::clone(&outgoing), Arc::new(stream));
        *lock(&outgoing.stream) = Some(Arc::clone(&stream));
        std::thread::Builder::new().name("rgpu-direct".into()).spawn(move || {
            let why = match (queue, bell) {
                (Some(queue), Some(bell)) => {
                    verbs::send(&stream, queue, due, &bell, &bytes, || own.advance())
                }
                _ => send(&stream, due, &bytes, || own.advance()),
            };
            stream.shut_down();
            drop(lock(&own.stream).take());
            drop(lock(&own.jobs).take());
            own.pool.close();
            lock(&own.series).0.clear();
            if let Err(e) = why {
                tracing::info!("a direct connection to another server is over: {e}");
            }
        })?;
        Ok(outgoing)
    }

    /// Ends the connection at once: its thread drops what was not sent.
    pub(super) fn abort(&self) {
        lock(&self.stream).iter().for_each(|stream| stream.shut_down());
    }

    /// Ends the connection if the other end has taken nothing for some time of what is sent from device
    /// memory, or of a box that is not all in buffers. That memory cannot leave the device before.
    pub(super) fn abort_if_stuck(&self, now: Instant) {
        let waits = !lock(&self.series).0.is_empty();
        let (pieces, began) = &*lock(&self.in_place);
        let is_under_way = waits || Arc::strong_count(pieces) > 1;
        if is_under_way && began.is_some_and(|began| now.saturating_duration_since(began) >= IDLE) {
            self.abort();
        }
    }

    /// Closes it once everything before is sent.
    pub(super) fn end(&self) {
        lock(&self.series).0.clear();
        // The thread sees the end of its queue after the last job.
        drop(lock(&self.jobs).take());
        self.bell.iter().for_each(|bell| bell.ring());
    }

    /// Begins to send a piece, which must be [filled](Sending::fill) and [finished](Sending::finish). If it
    /// is dropped before that, the other end learns that it will not come.
    pub fn piece(self: &Arc<Outgoing>, number: u64) -> Sending {
        let (len, buffer, by_processor, in_turn) = Default::default();
        Sending { outgoing: Arc::clone(self), number, len, buffer, by_processor, in_turn }
    }

    /// The same for a piece of a box. Such pieces are sent in the order in which they begin: those of several
    /// boxes may be copied by several devices, which are done in any order.
    fn next_piece(self: &Arc<Outgoing>, number: u64) -> Sending {
        lock(&self.begun).push_back((number, None));
        let mut piece = self.piece(number);
        piece.in_turn = true;
        piece
    }

    /// Does something in the thread that sends.
    pub(super) fn run(&self, run: impl FnOnce() + Send + 'static) {
        self.push(Job::Run(Box::new(run)));
    }

    /// Sends a box: begins what there are buffers for. `found`: its only row, which needs none.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if too many others are not over.
    pub(super) fn send_all(
        self: &Arc<Outgoing>,
        series: Series,
        moving: Moving,
        found: Option<Found>,
    ) -> Result<(), Status> {
        {
            let (all, in_motion) = &mut *lock(&self.series);
            if all.len() >= MAX_COPIES {
                return Err(Status::OUT_OF_MEMORY);
            }
            if all.is_empty() {
                self.begins();
            }
            in_motion.add(&series);
            all.push_back(Leaving { series, moving: Arc::new(moving), failed: Arc::default(), found });
        }
        if self.wakes {
            self.push(Job::Soon);
        }
        self.advance();
        Ok(())
    }

    /// Notes that the other end has taken so much that there is room for another piece.
    fn begins(&self) {
        lock(&self.in_place).1 = Some(Instant::now());
    }

    /// Begins the next pieces of boxes, as far as there are buffers. Called whenever there may be one:
    /// whatever ends a piece's use of its buffer, good or bad, is a job of the connection's thread.
    fn advance(self: &Arc<Outgoing>) {
        // Stays locked, so that pieces are begun in their order.
        let (all, _) = &mut *lock(&self.series);
        while let Some(Leaving { series, moving, failed, found }) = all.front_mut() {
            let Some(next) = series.next().filter(|_| !failed.load(Ordering::Acquire)) else {
                all.pop_front();
                continue;
            };
            // Other pieces reach their jobs later than these would.
            if series.is_whole() && (series.left() > IN_PLACE || self.copies.are_under_way()) {
                *found = None;
            }
            if let Some(Found { registration, offset }) = found {
                let found = Found { registration: Arc::clone(registration), offset: *offset + next.offset };
                let copying = [self.copies.begin(), series.copies.begin()];
                self.begins();
                let (_piece, _moving) = (Arc::clone(&lock(&self.in_place).0), Arc::clone(moving));
                let bytes = InPlace { found, _copying: copying, _moving, _piece };
                let piece = Job::Piece(next.number, Source::InPlace(bytes), next.len as usize);
                self.next_piece(next.number).end(piece);
                series.pass();
                continue;
            }
            let Some(buffer) = self.pool.try_take() else {
                if self.pool.may_have_one_later() {
                    return;
                }
                // There is no memory, or the connection is lost.
                drop(self.next_piece(next.number));
                all.pop_front();
                continue;
            };
            self.begins();
            let mut sending = self.next_piece(next.number);
            let Some(mapped) = sending.put(buffer, next.len) else {
                all.pop_front();
                continue;
            };
            let (failed, moving) = (Arc::clone(failed), Arc::clone(moving));
            let copying = (self.copies.begin(), series.copies.begin());
            let end = move |status: Status| {
                if !status.is_success() {
                    failed.store(true, Ordering::Release);
                }
                sending.finish(status);
                drop((copying, moving));
            };
            series.pass();
            series.carrier.carry(series.rows(), next.offset, mapped, 0, Box::new(end));
        }
    }

    /// Device memory is about to be freed: no piece of a box in it is read any more. Returns those that are
    /// being read.
    pub(super) fn forget(&self, address: u64, size: u64) -> Vec<Arc<Copies>> {
        let (all, in_motion) = &mut *lock(&self.series);
        all.retain(|Leaving { series, .. }| {
            let stays = !series.touches(address, size);
            if let (false, Some(next)) = (stays, series.next()) {
                self.push(Job::Nothing(next.number));
            }
            stays
        });
        in_motion.within(address, size)
    }

    pub(super) fn push(&self, job: Job) {
        // What is dropped may push another job, so not under the lock.
        let refused = self.give(job);
        drop(refused);
    }

    /// Gives a job to the thread. Gives it back if the connection has just been lost.
    fn give(&self, job: Job) -> Option<Job> {
        let refused = match &*lock(&self.jobs) {
            Some(jobs) => jobs.send(job).err().map(|SendError(job)| job),
            None => Some(job),
        };
        self.bell.iter().for_each(|bell| bell.ring());
        refused
    }

    /// A piece of a box has ended. Its job comes when all that began before it have ended, too.
    fn ended(&self, number: u64, job: Job) {
        let mut refused = Vec::new();
        let mut begun = lock(&self.begun);
        if let Some((_, end)) = begun.iter_mut().find(|(begun, end)| *begun == number && end.is_none()) {
            *end = Some(job);
        }
        while let Some(job) = begun.front_mut().and_then(|(_, end)| end.take()) {
            begun.pop_front();
            refused.extend(self.give(job));
        }
        // As in `push`.
        drop(begun);
        drop(refused);
    }
}

/// What is to be sent. Numbers ascend on a connection. Streams may reach pieces that the client names in
/// another order; then the other end learns of a gap, and the client repeats the copy.
pub(super) struct Jobs {
    pub(super) due: Receiver<Job>,
    /// One that was looked at, and is next.
    ahead: Option<Job>,
    pub(super) last: u64,
    /// There will be no more.
    pub(super) over: bool,
    pub(super) polls: Polls,
}

/// A piece's header, and its bytes if it has any.
pub(super) type Piece = (DirectHeader, Option<(Source, usize)>);

impl Jobs {
    /// What comes from `due`, for which a thread polls for `bound` at most.
    pub(super) fn new(due: Receiver<Job>, bound: Duration) -> Jobs {
        Jobs { due, ahead: None, last: 0, over: false, polls: Polls::new(bound) }
    }

    /// Whether the next job is there, and is a piece that will be sent.
    pub(super) fn has_piece(&mut self) -> bool {
        self.ahead = self.ahead.take().or_else(|| self.due.try_recv().ok());
        let last = self.last;
        matches!(self.ahead, Some(Job::Piece(number, ..) | Job::Nothing(number)) if number > last)
    }

    /// The next piece, if there is one now.
    pub(super) fn now(&mut self) -> Option<Piece> {
        loop {
            match self.ahead.take().map_or_else(|| self.due.try_recv(), Ok) {
                Ok(job) => {
                    if let Some(piece) = self.judge(job) {
                        return Some(piece);
                    }
                }
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => {
                    self.over = true;
                    return None;
                }
            }
        }
    }

    /// Waits for the next job. `None`: there will be no more. `moved`: the connection has carried something
    /// since its memory was last given back, which is done once it is quiet.
    pub(super) fn next(&mut self, stream: &Stream, moved: &mut bool) -> Option<Job> {
        let begun = Instant::now();
        if let Some(job) = self.polls.look(|| self.due.try_recv().ok()) {
            return Some(job);
        }
        let job = self.sleep(stream, moved);
        self.polls.slept(begun.elapsed());
        job
    }

    fn sleep(&self, stream: &Stream, moved: &mut bool) -> Option<Job> {
        if std::mem::take(moved) {
            match self.due.recv_timeout(QUIET) {
                Err(RecvTimeoutError::Timeout) => stream.rest(),
                result => return result.ok(),
            }
        }
        self.due.recv().ok()
    }

    /// A job's piece. `None`: it comes too late, or this job ends with another one.
    pub(super) fn judge(&mut self, job: Job) -> Option<Piece> {
        let (number, piece) = match job {
            Job::Piece(number, bytes, len) => (number, Some((bytes, len))),
            Job::Nothing(number) => (number, None),
            Job::Soon => {
                self.polls.announce();
                return None;
            }
            Job::Run(run) => {
                run();
                return None;
            }
        };
        if number <= self.last {
            return None;
        }
        self.last = number;
        let len = piece.as_ref().map_or(0, |(_, len)| *len as u32);
        Some((DirectHeader { number, len, reserved: 0 }, piece))
    }
}

/// Sends what arrives in the queue, and calls `after` after each. Returns when the connection is lost.
pub(super) fn send(stream: &Stream, mut jobs: Jobs, bytes: &Common, after: impl Fn()) -> io::Result<()> {
    let mut moved = false;
    while let Some(job) = jobs.next(stream, &mut moved) {
        moved = true;
        if let Some((header, piece)) = jobs.judge(job) {
            match piece {
                // Together: the other end wakes once for both.
                Some((Source::Buffer(mut buffer), len)) => {
                    stream.write_both(header.as_bytes(), buffer.bytes(len))?;
                    bytes.all.fetch_add(len as u64, Ordering::Relaxed);
                }
                Some(_) => return Err(io::Error::other("device memory cannot be sent over a socket")),
                None => stream.write_all(header.as_bytes())?,
            }
        }
        after();
    }
    Ok(())
}

/// A piece on its way into a buffer of the sending end.
pub struct Sending {
    pub(super) outgoing: Arc<Outgoing>,
    pub(super) number: u64,
    pub(super) len: usize,
    pub(super) buffer: Option<InUse>,
    /// The buffer is filled by a processor, so once this is dropped nobody writes there.
    pub(super) by_processor: bool,
    /// It is a piece of a box.
    in_turn: bool,
}

impl Sending {
    /// Where a device should write its `len` bytes. `None`: the connection is lost, or the client has more in
    /// flight than there are buffers.
    pub fn fill(&mut self, len: u64) -> Option<Mapped> {
        let buffer = self.outgoing.pool.try_take()?;
        self.put(buffer, len)
    }

    /// The same, with a buffer that was taken.
    fn put(&mut self, buffer: Buffer, len: u64) -> Option<Mapped> {
        let mapped = Mapped::of(buffer.memory.region(), len)?;
        (self.len, self.buffer) = (len as usize, Some(InUse(Some(buffer))));
        Some(mapped)
    }

    /// Others send it.
    pub fn passed_on(mut self) {
        self.number = 0;
    }

    /// Sends it, if the status says that its bytes are there.
    pub fn finish(mut self, status: Status) {
        if status.is_success()
            && let Some(buffer) = self.buffer.take().and_then(InUse::over)
        {
            let piece = Job::Piece(self.number, Source::Buffer(buffer), self.len);
            self.end(piece);
        }
    }

    /// Ends it with this job.
    fn end(&mut self, job: Job) {
        let number = std::mem::take(&mut self.number);
        if self.in_turn { self.outgoing.ended(number, job) } else { self.outgoing.push(job) }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.by_processor {
            drop(self.buffer.take().and_then(InUse::over));
        }
        if self.number > 0 {
            let nothing = Job::Nothing(self.number);
            self.end(nothing);
        }
    }
}
