//! A connected set of queue pairs: messages in both directions on queue 0, writes on the others.
//!
//! ```text
//!   write() ─▶ out ─flush()─▶ message buffers ─SEND─▶ queue 0 ═══▶ peer's posted receives ─poll()─▶ Event::Bytes
//!   put()   ─▶ registered memory ─RDMA WRITE with immediate─▶ queue 1… ═══▶ peer's memory ─poll()─▶ Event::Placed
//! ```
//!
//! One thread at a time uses a link. Nothing blocks, and nothing is allocated once the buffers have grown to
//! their final size. What cannot be sent now stays in `out` or is refused ([`next_queue`](Link::next_queue)),
//! until a later [`poll`](Link::poll) has brought credits or completions.
//!
//! Some devices refuse requests to a queue pair that has broken, others take them and give them back. A link
//! makes no difference: a request that is refused counts as under way, and goes again with the others.
//!
//! Requests are signalled selectively: the last of a run that a thread waits for, and every quarter of a
//! queue. A completion covers all earlier requests on its queue.
//!
//! Queue pairs that break can be replaced. Writes go on behind those that the peer has
//! ([`requests`](super::requests)); the stream behind what the peer has acted on of it, if it is
//! [kept](Link::keep), as over any other connection:
//!
//! ```text
//!          poll() fails, or the owner gives the link up          the peer says the same
//!   up ────────────────────────────────────────────────▶ down ──────── settle() ───────▶ go_on() ──▶ up
//!                 take_down(): the queue pairs are destroyed, so nobody
//!                 writes through them any more; taken() stands
//! ```

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::link::{DataHeader, MessageHeader, Queues};
use zerocopy::{FromBytes, IntoBytes};

use super::error::VerbsError;
use super::failure::{describe, failure};
use super::queue::POLL_BATCH;
use super::queue_pairs::{MESSAGE, PIECE, RECEIVE, Unconnected, Up, depths, post_receive};
use super::registration::{Domain, Segment};
use super::requests::{Requests, Settled};
use super::settings::Settings;
use super::stalls::Stalls;
use super::sys::{SendWr, Sge, Wc, number};
use crate::framing::SendBuffer;

/// When a completion says that the link has broken, how long to wait for the one that says why.
const CAUSE: Duration = Duration::from_millis(20);
/// How long queue pairs that were stopped may take to give the next of their receives back. What comes later
/// is not acted on; the peer is told so.
const DRAIN: Duration = Duration::from_secs(1);

/// How often in a row a device may refuse requests before other queue pairs are of no use. A process that
/// ends may leave its queue pairs without their memory for a moment, and so may the next one; and queue pairs
/// that break may refuse what is posted to them each time.
const MOST_REFUSED: u32 = 8;

/// Size of a message's header, in bytes.
const HEADER: usize = size_of::<MessageHeader>();
/// An event of a link.
#[derive(Debug)]
pub enum Event<'l> {
    /// The next bytes of the peer's stream have arrived.
    Bytes(&'l [u8]),
    /// The peer has written `len` bytes with this immediate data.
    Placed {
        /// The queue.
        queue: usize,
        /// The immediate data.
        immediate: u32,
        /// Number of bytes written.
        len: u32,
        /// Which of the peer's writes on that queue it is, counted from 1 since the session began.
        number: u64,
    },
    /// One of our writes has completed, and its source may be reused.
    Written {
        /// The queue. Those of a queue come in order.
        queue: usize,
        /// The token given to [`Link::put`].
        token: u64,
    },
}

/// A write to be posted.
#[derive(Debug, Clone, Copy)]
pub struct Put {
    /// Queue, from 1.
    pub queue: usize,
    /// The source.
    pub source: Segment,
    /// Bytes to write before the source's.
    pub header: Option<DataHeader>,
    /// Where the first byte goes in the peer's memory.
    pub address: u64,
    /// The key of that memory.
    pub key: u32,
    /// Which of the peer's memories it is, and the offset in it. That stays true when the memory gets another
    /// address and key ([`Link::each_again`]).
    pub place: (u32, u64),
    /// Immediate data.
    pub immediate: u32,
    /// Returned in [`Event::Written`].
    pub token: u64,
    /// Whether to report its completion at once, because it is long or no other write follows for now.
    /// Otherwise a later one reports it.
    pub signal: bool,
}

/// A request that was posted and has not completed.
#[derive(Debug, Clone, Copy)]
enum Posted {
    /// A message from this buffer.
    Message(u16),
    Write(Put),
}

/// The writes of a queue under earlier queue pairs, which another process has had.
#[derive(Debug, Default)]
pub struct EarlierWrites {
    /// Those that the peer is known to have.
    pub done: u64,
    /// Those behind them, in order.
    pub under_way: Vec<Put>,
    /// The peer's that were acted on.
    pub taken: u64,
}

/// What is sent through new queue pairs before the peer has sent something through them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// As ever.
    Everything,
    /// Messages. Whether the link carries anything shows sooner if little is under way, and nothing long is
    /// sent into the void.
    Messages,
    /// Nothing: the peer may not be connected yet.
    Nothing,
}

/// A link. See the module.
#[derive(Debug)]
pub struct Link {
    /// Dropped first: after that the device touches none of the caller's memory.
    up: Option<Up>,
    /// For each queue.
    requests: Vec<Requests<Posted>>,
    /// Writes to be posted again, before others.
    again: VecDeque<Put>,
    out: SendBuffer,
    domain: Arc<Domain>,
    /// Maximum number of outstanding requests of each queue.
    depths: Vec<usize>,
    counts: Counts,
    /// How often in a row a device has refused a message, and a write: ours, or the peer's.
    refused: [u32; 2],
    /// `None`: requests are waited for, however long they take.
    stalls: Option<Stalls>,
    /// The next message is signalled.
    signal: bool,
}

/// What a link has done so far, for figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages sent.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Writes posted. Each request, a message or a write, is posted by itself: one doorbell, which `rdma_rxe`
    /// makes a system call of.
    pub writes: u64,
    /// Writes of the peer that have arrived.
    pub placed: u64,
    /// Completions taken, of whatever kind.
    pub completions: u64,
}

impl Unconnected {
    /// Connects to the peer's queue pairs. Queues that the peer does not have are dropped.
    pub fn connect(self, peer: &Queues) -> Result<Link, VerbsError> {
        let domain = Arc::clone(&self.domain);
        let up = self.up(peer)?;
        let depths: Vec<usize> = up.queues.iter().map(|queue| queue.depth).collect();
        Ok(Link {
            up: Some(up),
            requests: depths.iter().map(|depth| Requests::with_capacity(*depth)).collect(),
            again: VecDeque::new(),
            out: SendBuffer::new(),
            domain,
            depths,
            counts: Counts::default(),
            refused: [0; 2],
            stalls: None,
            signal: false,
        })
    }
}

impl Link {
    /// A link that is down, of a session that another process has had. `writes`: for each queue of data.
    pub fn restored(domain: &Arc<Domain>, settings: &Settings, writes: Vec<EarlierWrites>) -> Link {
        let (_, depth) = settings.wish();
        let depths = depths(writes.len() as u32 + 1, depth);
        let earlier = |EarlierWrites { done, under_way, taken }| {
            Requests::restored(done, under_way.into_iter().map(Posted::Write).collect(), taken)
        };
        let messages = Requests::with_capacity(depths[0]);
        Link {
            up: None,
            requests: std::iter::once(messages).chain(writes.into_iter().map(earlier)).collect(),
            again: VecDeque::new(),
            out: SendBuffer::keeping(),
            domain: Arc::clone(domain),
            depths,
            counts: Counts::default(),
            refused: [0; 2],
            stalls: None,
            signal: false,
        }
    }

    /// Keeps the stream until the peer acknowledges it. To be called before anything is appended.
    pub fn keep(&mut self) {
        self.out = SendBuffer::keeping();
    }

    /// Has requests that take too long be a failure of the link, for an owner that replaces its queue pairs.
    pub fn give_up_stalled(&mut self) {
        self.stalls = Some(Stalls::new(self.depths.len()));
    }

    /// Has the device report when the next message is done, so that it counts if it takes too long.
    pub fn watch_next_message(&mut self) {
        self.signal = true;
    }

    /// Whether requests are under way that may take too long.
    pub fn waits(&self) -> bool {
        let waits = |up: &Up| !up.stopped && up.queues.iter().any(|queue| queue.signalled > 0);
        self.stalls.is_some() && self.up.as_ref().is_some_and(waits)
    }

    /// How long the owner may sleep until it has to [poll](Self::poll), if nothing happens.
    pub fn patience(&self, now: Instant) -> Option<Duration> {
        self.stalls.as_ref().filter(|_| self.up.is_some()).and_then(|stalls| stalls.next(now))
    }

    /// Queues for data: numbers 1 to this.
    pub fn data_queues(&self) -> usize {
        self.depths.len() - 1
    }

    /// The most writes under way on all queues together.
    pub fn most_under_way(&self) -> usize {
        self.depths[1..].iter().sum()
    }

    /// The domain in which this link's memory is registered.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Whether more may be written without piling up.
    pub fn has_room(&self) -> bool {
        self.out.has_room()
    }

    /// Whether bytes wait to be sent.
    pub fn wants_out(&self) -> bool {
        !self.out.is_empty()
    }

    /// The stream to the peer, to be appended to. It goes with the next [`flush`](Self::flush), everything
    /// together.
    pub fn out(&mut self) -> &mut Vec<u8> {
        self.out.end()
    }

    /// The same stream, for frames.
    pub fn send_buffer(&mut self) -> &mut SendBuffer {
        &mut self.out
    }

    /// Sends what waits, and what the peer must be told, as far as it can take it now. True: something went.
    pub fn flush(&mut self) -> Result<bool, VerbsError> {
        let mut worked = self.repeat()?;
        loop {
            let stream = !self.out.unsent().is_empty();
            let Some(up) = self.up.as_ref().filter(|up| up.sends()) else { return Ok(worked) };
            let stream = stream && up.credits.may_send(0);
            if !(stream || up.credits.must_announce()) || !self.send_message(stream)? {
                return Ok(worked);
            }
            worked = true;
        }
    }

    /// Sends an empty message, if there is room for one. The peer's device notices by it that earlier ones
    /// are missing and asks for them, so that nobody has to wait until this side's device repeats them by
    /// itself.
    pub fn nudge(&mut self) -> Result<(), VerbsError> {
        if self.up.as_ref().is_some_and(|up| up.sends() && up.credits.may_send(0)) {
            self.send_message(false)?;
        }
        Ok(())
    }

    /// Sends a message: with bytes of the stream, or an empty one. The peer can take it. False: there is no
    /// buffer for it.
    fn send_message(&mut self, stream: bool) -> Result<bool, VerbsError> {
        let Link { up: Some(up), requests, out, depths, counts, signal, .. } = self else { return Ok(false) };
        if requests[0].under_way() >= depths[0] {
            return Ok(false);
        }
        let Some(buffer) = up.free.pop() else { return Ok(false) };
        let len = if stream { out.unsent().len().min(up.message - HEADER) } else { 0 };
        let header = MessageHeader { len: len as u32, number: up.messages.0, credits: up.credits.announce() };
        let at = usize::from(buffer) * MESSAGE;
        up.outbox.store(at, header.as_bytes());
        up.outbox.store(at + HEADER, &out.unsent()[..len]);
        out.advance(len);
        up.credits.spend(0);
        let segment = up.outbox.registration().slice(at as u64, (HEADER + len) as u32);
        let Some(segment) = segment else {
            return Err(VerbsError::Wrong("a message does not fit its buffer".into()));
        };
        let queue = &mut up.queues[0];
        let inline = (HEADER + len) as u32 <= queue.pair.inline;
        let mut flags = if inline { number::SEND_INLINE } else { 0 };
        if queue.signals(std::mem::take(signal)) {
            flags |= number::SEND_SIGNALED;
        }
        let mut wr = SendWr {
            wr_id: requests[0].next(),
            sg_list: &segment.sge,
            num_sge: 1,
            opcode: number::WR_SEND,
            send_flags: flags,
            ..SendWr::default()
        };
        // SAFETY: the buffer belongs to the outbox, is registered until after the queue pair is destroyed,
        // and is not written again before this completes.
        let posted = unsafe { queue.pair.send(&mut wr) };
        requests[0].post(Posted::Message(buffer));
        up.messages.0 = up.messages.0.wrapping_add(1);
        counts.sent += 1;
        up.posted(0, posted);
        Ok(true)
    }

    /// Holds the peer's stream off, or ends that: for when it sends faster than its frames can be acted on.
    /// What is under way still comes. Writes are not held off.
    pub fn hold(&mut self, hold: bool) {
        if let Some(up) = &mut self.up {
            up.credits.hold(hold);
        }
    }

    fn can_put(&self, queue: usize) -> bool {
        let room = |up: &Up| up.writes() && up.credits.may_send(queue);
        queue > 0
            && self.requests.get(queue).is_some_and(|sent| sent.under_way() < self.depths[queue])
            && self.up.as_ref().is_some_and(room)
    }

    /// The queue for the next write, if one can take it now. Writes go in turn over the queues, but from one
    /// that is not signalled to the next that is they stay on one queue: so the signalled one stands for all
    /// of them.
    pub fn next_queue(&self) -> Option<usize> {
        // Those that have to be repeated come first.
        if !self.again.is_empty() {
            return None;
        }
        let up = self.up.as_ref()?;
        if up.queues[up.turn].unsignalled > 0 {
            return self.can_put(up.turn).then_some(up.turn);
        }
        let count = self.data_queues();
        (0..count).map(|i| 1 + (up.turn + i) % count).find(|queue| self.can_put(*queue))
    }

    /// Posts writes once more that were under way when earlier queue pairs broke, on their queues, as far as
    /// there is room: whoever remembers them knows them by their number there. True: there was one.
    fn repeat(&mut self) -> Result<bool, VerbsError> {
        let mut worked = false;
        while let Some(put) = self.again.front().copied().filter(|put| self.can_put(put.queue)) {
            // One that is not signalled may be the last that anybody waits for.
            self.put(&Put { signal: true, ..put })?;
            self.again.pop_front();
            worked = true;
        }
        Ok(worked)
    }

    /// Writes into the peer's memory, on the queue that [`next_queue`](Self::next_queue) has just named. The
    /// source stays registered, and as it is, until [`Event::Written`].
    pub fn put(&mut self, put: &Put) -> Result<(), VerbsError> {
        let takes = self.can_put(put.queue);
        let Link { up: Some(up), requests, depths, counts, .. } = self else {
            return Err(VerbsError::Wrong("a write without queue pairs".into()));
        };
        if !takes {
            return Err(VerbsError::Wrong(format!("queue {} takes no more writes", put.queue)));
        }
        let (queue, requests, depth) =
            (&mut up.queues[put.queue], &mut requests[put.queue], depths[put.queue]);
        let mut segments = [Sge::default(); 2];
        let mut count = 0;
        let mut bytes = put.source.len();
        if let Some(header) = &put.header {
            // As many places as requests can be under way, so this one is free.
            let place = (put.queue * depth + requests.next() as usize % depth) * PIECE;
            up.headers.store(place, header.as_bytes());
            let segment = up.headers.registration().slice(place as u64, size_of::<DataHeader>() as u32);
            let Some(segment) = segment else {
                return Err(VerbsError::Wrong("no place for a piece's header".into()));
            };
            segments[0] = segment.sge;
            bytes += segment.len();
            count = 1;
        }
        segments[count] = put.source.sge;
        count += 1;
        let mut flags = 0;
        if bytes <= queue.pair.inline {
            flags |= number::SEND_INLINE;
        }
        if queue.signals(put.signal) {
            flags |= number::SEND_SIGNALED;
        }
        let mut wr = SendWr {
            wr_id: requests.next(),
            sg_list: segments.as_ptr(),
            num_sge: count as i32,
            opcode: number::WR_RDMA_WRITE_WITH_IMM,
            send_flags: flags,
            imm_data: put.immediate.to_be(),
            remote_addr: put.address,
            rkey: put.key,
            ..SendWr::default()
        };
        // SAFETY: a segment comes from a registration; should that be dropped too early, its key is void and
        // the device refuses. An inline one is host memory, mapped as long as its registration, which the
        // caller holds until the write is done.
        let posted = unsafe { queue.pair.send(&mut wr) };
        requests.post(Posted::Write(*put));
        counts.writes += 1;
        up.turn = put.queue;
        up.credits.spend(put.queue);
        up.posted(put.queue, posted);
        Ok(())
    }

    /// Takes what has happened, and gives it to `on`. True: there was something. Never waits, but for the
    /// cause of an error ([`CAUSE`]). After an error there is nothing any more: the link is to be [taken
    /// down](Self::take_down), or dropped.
    pub fn poll<E: From<VerbsError>>(
        &mut self,
        on: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut worked = false;
        if self.up.as_ref().is_none_or(|up| up.stopped) {
            return Ok(false);
        }
        loop {
            let Taken { some, full, failed } = self.take(on)?;
            worked |= some;
            let refused = self.up.as_ref().is_some_and(|up| up.refusal.is_some());
            let flushed = Wc { status: number::WC_WR_FLUSH_ERR, ..Wc::default() };
            if let Some(mut failed) = failed.or_else(|| refused.then_some(flushed)) {
                // What broke the link may be reported a little later, on another queue; this may be a mere
                // consequence.
                let begin = Instant::now();
                while failed.status == number::WC_WR_FLUSH_ERR && begin.elapsed() < CAUSE {
                    match self.take(on)?.failed {
                        Some(found) if found.status != number::WC_WR_FLUSH_ERR => failed = found,
                        _ => std::thread::yield_now(),
                    }
                }
                self.stop();
                return Err(self.broken(failed).into());
            }
            if !full {
                self.look()?;
                return Ok(worked);
            }
        }
    }

    /// The error: a request takes too long.
    fn look(&mut self) -> Result<(), VerbsError> {
        let (Some(up), Some(stalls)) = (&self.up, &mut self.stalls) else { return Ok(()) };
        let mut now = None;
        for (number, queue) in up.queues.iter().enumerate() {
            let state = (queue.signalled > 0, up.heard);
            let stalled = stalls.look(number, state, || *now.get_or_insert_with(Instant::now));
            if stalled {
                self.stop();
                let device = self.domain.device();
                let (name, port) = (device.name(), device.port_number());
                return Err(VerbsError::Broken(format!(
                    "queue {number} of {name} port {port}: the peer's device does not answer"
                )));
            }
        }
        Ok(())
    }

    /// Takes completions once. Those of requests that were carried out count, also beside others that failed.
    fn take<E: From<VerbsError>>(
        &mut self,
        on: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<Taken, E> {
        let mut batch = [Wc::default(); POLL_BATCH];
        let Some(up) = &mut self.up else { return Ok(Taken::default()) };
        let done = up.completions.poll(&mut batch)?;
        up.receives -= done.iter().filter(|wc| wc.wr_id & RECEIVE != 0).count().min(up.receives);
        self.counts.completions += done.len() as u64;
        let taken = Taken { some: !done.is_empty(), full: done.len() == POLL_BATCH, failed: failure(done) };
        for wc in done.iter().filter(|wc| wc.status == number::WC_SUCCESS) {
            if wc.wr_id & RECEIVE == 0 {
                self.completed(wc, on)?;
            } else {
                self.received(wc, on)?;
            }
        }
        Ok(taken)
    }

    fn completed<E: From<VerbsError>>(
        &mut self,
        wc: &Wc,
        on: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(up) = &mut self.up else { return Ok(()) };
        let Some(queue) = up.queues.iter().position(|q| q.pair.number() == wc.qp_num) else {
            return Ok(());
        };
        up.queues[queue].signalled = up.queues[queue].signalled.saturating_sub(1);
        if let Some(stalls) = &mut self.stalls {
            stalls.moved(queue);
        }
        let requests = &mut self.requests[queue];
        while let Some(done) = requests.done(wc.wr_id) {
            match done {
                Posted::Message(buffer) => {
                    self.refused[0] = 0;
                    up.free.push(buffer);
                }
                Posted::Write(put) => {
                    self.refused[1] = 0;
                    on(Event::Written { queue, token: put.token })?;
                }
            }
        }
        requests.trim(if queue == 0 { 0 } else { up.credits.unknown(queue) });
        Ok(())
    }

    fn received<E: From<VerbsError>>(
        &mut self,
        wc: &Wc,
        on: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Link { up: Some(up), requests, counts, .. } = self else { return Ok(()) };
        let (queue, index) = ((wc.wr_id >> 32 & 0xff) as usize, wc.wr_id as u32 as usize);
        let mut stream = false;
        if queue < up.queues.len() {
            up.credits.arrived(queue)?;
        }
        match (wc.opcode, queue) {
            (number::WC_RECV, 0) => {
                let len = (wc.byte_len as usize).min(MESSAGE);
                let Some(at) = up.inbox.pointer(index * MESSAGE, len) else {
                    return Err(VerbsError::Wrong(format!("a completion names receive {index}")).into());
                };
                // SAFETY: the receive into this buffer has completed and it is not posted again before the
                // end of this function, so nobody writes it. The peer has no key to it.
                let message = unsafe { std::slice::from_raw_parts(at.as_ptr(), len) };
                let wrong = || VerbsError::Peer(format!("a message of {len} bytes without a proper header"));
                let (header, bytes) = MessageHeader::read_from_prefix(message).map_err(|_| wrong())?;
                if bytes.len() != header.len as usize {
                    return Err(wrong().into());
                }
                let due = up.messages.1;
                if header.number != due {
                    let number = header.number;
                    return Err(
                        VerbsError::Peer(format!("message {number} came where {due} was expected")).into()
                    );
                }
                up.credits.grant(&header.credits)?;
                up.messages.1 = due.wrapping_add(1);
                counts.received += 1;
                stream = !bytes.is_empty();
                if stream {
                    on(Event::Bytes(bytes))?;
                }
            }
            (number::WC_RECV_RDMA_WITH_IMM, 1..) => {
                counts.placed += 1;
                let number = requests.get(queue).map_or(0, Requests::taken) + 1;
                on(Event::Placed { queue, immediate: u32::from_be(wc.imm_data), len: wc.byte_len, number })?;
            }
            (opcode, _) => {
                return Err(VerbsError::Peer(format!(
                    "it used queue {queue} for an operation that does not belong there ({opcode})"
                ))
                .into());
            }
        }
        if let (Some(used), Some(requests)) = (up.queues.get(queue), requests.get_mut(queue)) {
            requests.took();
            up.heard = true;
            if !up.stopped {
                let posted = post_receive(&used.pair, &up.inbox, queue, index);
                up.receives += usize::from(posted.is_ok());
                up.posted(queue, posted);
            }
            if stream { up.credits.used_by_stream() } else { up.credits.used(queue) }
        }
        Ok(())
    }

    fn broken(&mut self, wc: Wc) -> VerbsError {
        let number = |up: &Up| up.queues.iter().position(|q| q.pair.number() == wc.qp_num);
        let queue = self.up.as_ref().and_then(number).unwrap_or(0);
        let device = self.domain.device();
        let device = format!("{} port {}", device.name(), device.port_number());
        let why = describe(&format!("queue {queue} of {device}"), &wc);
        let (why, of) = match (self.up.as_mut().and_then(|up| up.refusal.take()), wc.status) {
            // The first that was seen of it.
            (Some((queue, refusal)), number::WC_WR_FLUSH_ERR) => {
                (VerbsError::Broken(format!("queue {queue} of {device}: {refusal}")), usize::from(queue > 0))
            }
            (_, number::WC_REM_ACCESS_ERR) => (why, 1),
            _ => return why,
        };
        self.refused[of] += 1;
        if self.refused[of] <= MOST_REFUSED {
            return why;
        }
        VerbsError::Wrong(format!("{why}, again and again"))
    }

    /// Readable when something has happened after [`arm`](Self::arm). `None`: nothing happens, because there
    /// are no queue pairs, or they are broken.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.up.as_ref().filter(|up| !up.stopped).map(|up| up.completions.as_fd())
    }

    /// To be called before sleeping on [`fd`](Self::fd). What came before it does not wake:
    /// [`poll`](Self::poll) once more after it.
    pub fn arm(&self) -> Result<(), VerbsError> {
        self.up.as_ref().map_or(Ok(()), |up| up.completions.arm())
    }

    /// To be called after waking.
    pub fn disarm(&self) {
        if let Some(up) = &self.up {
            up.completions.disarm();
        }
    }

    /// Ends the connection: nothing is sent or received any more, and what was under way is void. The peer
    /// sees it as a loss, unless it was told before.
    pub fn stop(&mut self) {
        if let Some(up) = &mut self.up {
            up.stop();
        }
    }

    /// Whether the peer has sent something through the queue pairs that there are now.
    pub fn is_heard(&self) -> bool {
        self.up.as_ref().is_some_and(|up| up.heard && !up.stopped)
    }

    /// Destroys the queue pairs, once `on` has got what had come through them. When this returns nobody
    /// writes any memory through them any more, however long a packet was under way, and
    /// [`taken`](Self::taken) does not change.
    pub fn take_down<E: From<VerbsError>>(
        &mut self,
        on: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.take_down_within(DRAIN, on)
    }

    fn take_down_within<E: From<VerbsError>>(
        &mut self,
        drain: Duration,
        on: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.stop();
        let mut begin = Instant::now();
        // A stopped queue gives every receive back: those that were used before as such.
        while self.up.as_ref().is_some_and(|up| up.receives > 0) {
            // Before it looks: this thread may not have run for long, and what is there counts.
            let late = begin.elapsed() >= drain;
            if self.take(on)?.some {
                begin = Instant::now();
            } else if late {
                break;
            } else {
                std::thread::yield_now();
            }
        }
        self.up = None;
        self.stalls.iter_mut().for_each(Stalls::end);
        self.signal = false;
        Ok(())
    }

    /// Writes of the peer that were acted on, for each queue of data, since the session began.
    pub fn taken(&self) -> Vec<u64> {
        self.requests[1..].iter().map(Requests::taken).collect()
    }

    /// A write of the peer was acted on that came to an earlier process.
    pub fn took(&mut self, queue: usize) -> Option<u64> {
        let requests = self.requests.get_mut(queue).filter(|_| queue > 0)?;
        requests.took();
        Some(requests.taken())
    }

    /// The link is down, and the peer's too, which has acted on so many of our writes on each queue of data.
    /// What it has counts as done, as `on` hears; everything else will be sent again. Gives those that were
    /// reported as done and that the peer does not know of: it has to be told, or the session ends.
    ///
    /// # Errors
    /// The peer cannot have acted on so many, or has lost some.
    pub fn settle<E: From<VerbsError>>(
        &mut self,
        theirs: &[u64],
        on: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<Vec<Put>, E> {
        if theirs.len() != self.data_queues() {
            let (count, ours) = (theirs.len(), self.data_queues());
            return Err(VerbsError::Peer(format!("it resumes {count} queues, where {ours} were")).into());
        }
        if self.up.is_some() {
            return Err(VerbsError::Wrong("queue pairs are still there".into()).into());
        }
        let (mut writes, mut untold) = (VecDeque::new(), Vec::new());
        let write = |posted: Posted| if let Posted::Write(put) = posted { Some(put) } else { None };
        for ((queue, requests), theirs) in (1..).zip(&mut self.requests[1..]).zip(theirs) {
            let Settled { done, unknown, again } = requests.settle(*theirs)?;
            for put in done.into_iter().filter_map(write) {
                on(Event::Written { queue, token: put.token })?;
            }
            untold.extend(unknown.into_iter().filter_map(write));
            writes.extend(again.into_iter().filter_map(write));
        }
        // The stream goes on where the peer says.
        self.requests[0] = Requests::with_capacity(self.depths[0]);
        writes.append(&mut self.again);
        self.again = writes;
        Ok(untold)
    }

    /// Changes the writes that will be sent again.
    pub fn each_again(&mut self, change: impl FnMut(&mut Put)) {
        self.again.iter_mut().for_each(change);
    }

    /// Goes on through new queue pairs, connected to the peer's. `before`: what is sent before the peer has
    /// sent something. The link is down and [settled](Self::settle).
    pub fn go_on(&mut self, fresh: Unconnected, peer: &Queues, before: Before) -> Result<(), VerbsError> {
        let up = fresh.up(peer)?;
        if !up.queues.iter().map(|queue| queue.depth).eq(self.depths.iter().copied()) {
            return Err(VerbsError::Peer(
                "it resumes the session with other queues than it began with".into(),
            ));
        }
        self.up = Some(Up { before, ..up });
        Ok(())
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Requests under way, on all queues.
    pub fn under_way(&self) -> usize {
        self.requests.iter().map(Requests::under_way).sum()
    }
}

/// What [`Link::take`] has found.
#[derive(Debug, Default)]
struct Taken {
    some: bool,
    /// There may be more.
    full: bool,
    failed: Option<Wc>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Access, Device, Slab, software};

    #[test]
    fn what_has_come_counts_however_late_a_link_is_taken_down() {
        software::install();
        let settings = Settings::default();
        let domain = Domain::new(Device::open(&settings).unwrap()).unwrap();
        let made = || Unconnected::new(&domain, &settings).unwrap();
        let (one, other) = (made(), made());
        let offers = (one.offer(None), other.offer(None));
        let (mut one, mut other) = (one.connect(&offers.1).unwrap(), other.connect(&offers.0).unwrap());
        let source = Slab::new(&domain, 64, Access::Read).unwrap();
        let place = Slab::new(&domain, 64, Access::RemoteWrite).unwrap();
        for immediate in 0..3 {
            let put = Put {
                queue: one.next_queue().unwrap(),
                source: source.registration().slice(0, 64).unwrap(),
                header: None,
                address: place.registration().address(),
                key: place.registration().remote_key(),
                place: (0, 0),
                immediate,
                token: 0,
                signal: true,
            };
            one.put(&put).unwrap();
        }
        let mut placed = 0;
        let mut on = |event: Event<'_>| {
            placed += u64::from(matches!(event, Event::Placed { .. }));
            Ok::<(), VerbsError>(())
        };
        other.take_down_within(Duration::ZERO, &mut on).unwrap();
        assert_eq!((placed, other.taken().iter().sum()), (3, 3));
    }
}
