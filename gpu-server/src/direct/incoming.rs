//! The receiving end of a connection.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use host_bridge::endpoint::Mapped;
use host_bridge::stream::Stream;
use protocol::Status;
use protocol::link::DirectHeader;
use protocol::ops::direct::{DirectArrivalReply, DirectFailuresReply, MAX_COPIES};
use zerocopy::{FromZeros, IntoBytes};

use super::awake::Alarm;
use super::buffers::{Buffer, Common, InUse, Pool};
use super::near::{Copies, Memory, Named};
use super::series::{Awaited, InMotion, Landing, Series};
use super::verbs;
use super::verbs::Verbs;
use crate::driver::call::Pending;
use crate::driver::gpu::Carrier;
use crate::driver::rows::Rows;
use crate::lock::lock;

/// Maximum number of answers that a client may wait for on one connection.
const MAX_WAITING: usize = 64;
/// Maximum number of pieces that a client may expect on one connection.
const MAX_EXPECTED: usize = 1024;
/// A box of which nothing has come for this long keeps no memory on the device.
pub(super) const IDLE: Duration = Duration::from_secs(5);

/// Where a piece goes that the client expects.
pub struct Expected {
    /// As many bytes as the piece must have.
    pub to: Rows,
    /// What memory that is.
    pub memory: Memory,
    /// The command's, which becomes the progress of the connection's stream.
    pub seq: u64,
    /// What lands it.
    pub carrier: Arc<dyn Carrier>,
}

/// Connections on which an expected piece will not come.
#[derive(Default)]
pub(super) struct Failures(pub(super) Mutex<(Vec<u32>, Option<Pending>)>);

impl Failures {
    /// A connection has failed.
    pub(super) fn tell(&self, direct: u32) {
        let mut state = lock(&self.0);
        state.0.push(direct);
        Self::answer(&mut state);
    }

    pub(super) fn answer((failed, waiting): &mut (Vec<u32>, Option<Pending>)) {
        if !failed.is_empty()
            && let Some(pending) = waiting.take()
        {
            pending.answer(Ok(DirectFailuresReply { directs: std::mem::take(failed) }));
        }
    }
}

/// The receiving end of a connection.
pub struct Incoming {
    pub(super) state: Mutex<Arrived>,
    pub(super) pool: Arc<Pool>,
    pub(super) bytes: Arc<Common>,
    pub(super) named: Named,
    pub(super) copies: Arc<Copies>,
    /// Its number, and who is told if an expected piece will not come.
    pub(super) failures: Option<(u32, Arc<Failures>)>,
    /// Wakes its thread, if that receives from a socket and polls.
    pub(super) alarm: Option<Alarm>,
}

#[derive(Default)]
pub(super) struct Arrived {
    /// Pieces that have arrived but not been landed.
    pub(super) pieces: BTreeMap<u64, (Buffer, usize)>,
    /// What the client waits for.
    pub(super) waiting: Vec<(u64, Pending)>,
    /// What the client expects and has not arrived. All have higher numbers than `last`.
    pub(super) expected: BTreeMap<u64, Expected>,
    /// The last piece that the client has expected.
    pub(super) expected_last: u64,
    /// An expected piece has not come.
    pub(super) failed: bool,
    /// Boxes of which not all pieces have arrived, and the number after the last piece of all such boxes.
    pub(super) awaited: VecDeque<Awaited>,
    pub(super) awaited_end: u64,
    /// When the last piece arrived.
    pub(super) last_arrival: Option<Instant>,
    /// The memory of all boxes that are landed.
    pub(super) in_motion: InMotion,
    /// The last piece that has arrived or will not.
    pub(super) last: u64,
    pub(super) over: bool,
    /// What they come over.
    pub(super) stream: Option<Arc<Stream>>,
}

impl Arrived {
    /// Whether a piece has arrived, and the next arrived one after it. `None`: it may still arrive.
    pub(super) fn look(&self, number: u64) -> Option<Result<u64, Status>> {
        if self.pieces.contains_key(&number) {
            let after = self.pieces.keys().skip_while(|at| **at <= number);
            // The peer chooses the numbers, up to the last one that there is.
            let upto = after.fold(number, |upto, at| if at - 1 == upto { *at } else { upto });
            return Some(Ok(upto));
        }
        (self.over || number <= self.last).then_some(Err(Status::DEVICE_UNAVAILABLE))
    }

    /// Answers whatever can be answered.
    pub(super) fn answer(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        for (number, pending) in waiting {
            match self.look(number) {
                Some(found) => pending.answer(found.map(|upto| DirectArrivalReply { upto })),
                None => self.waiting.push((number, pending)),
            }
        }
    }
}

impl Incoming {
    pub(super) fn new(bytes: Arc<Common>, failures: Option<(u32, Arc<Failures>)>) -> Incoming {
        Incoming {
            state: Mutex::default(),
            pool: Pool::new(&bytes),
            bytes,
            named: Named::default(),
            copies: Arc::default(),
            failures,
            alarm: Alarm::here(),
        }
    }

    /// Pieces come over this, unless the connection was closed before it was open.
    pub(super) fn over(&self, stream: &Arc<Stream>) {
        let mut state = lock(&self.state);
        if state.over {
            stream.shut_down();
        }
        state.stream = Some(Arc::clone(stream));
    }

    /// Lands a piece as soon as it is here. Nothing has happened after an error.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the number is higher than that of all that were expected before;
    /// `OUT_OF_MEMORY` if the client expects too many.
    pub fn expect(&self, number: u64, expected: Expected) -> Result<(), Status> {
        let mut state = lock(&self.state);
        if number <= state.expected_last {
            return Err(Status::INVALID_VALUE);
        }
        if state.expected.len() >= MAX_EXPECTED {
            return Err(Status::OUT_OF_MEMORY);
        }
        state.expected_last = number;
        if state.failed {
            return Ok(());
        }
        if number > state.last && !state.over {
            state.expected.insert(number, expected);
            self.alarm.iter().for_each(Alarm::announce);
            return Ok(());
        }
        let piece = state.pieces.remove(&number);
        self.land_expected(&mut state, expected, piece);
        Ok(())
    }

    /// Lands the pieces of a box as they come, and answers `later` when all are landed, or will not be.
    /// Nothing has happened after an error.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the numbers are higher than those of all that were awaited before;
    /// `OUT_OF_MEMORY` if too many others are not here.
    pub fn receive_all(&self, series: Series, later: impl FnOnce() -> Pending) -> Result<(), Status> {
        let mut state = lock(&self.state);
        if series.next().is_none_or(|next| next.number < state.awaited_end) {
            return Err(Status::INVALID_VALUE);
        }
        if state.awaited.len() >= MAX_COPIES {
            return Err(Status::OUT_OF_MEMORY);
        }
        state.awaited_end = series.end();
        state.in_motion.add(&series);
        let landing = Landing::new(&series, later());
        state.awaited.push_back(Awaited { series, named: Instant::now(), landing });
        self.advance(&mut state);
        if !state.awaited.is_empty() {
            self.alarm.iter().for_each(Alarm::announce);
        }
        Ok(())
    }

    /// Lands what has arrived of the awaited boxes, and gives up those of which something will not come. The
    /// state stays locked, so that pieces are landed in their order.
    fn advance(&self, state: &mut Arrived) {
        while let Some(Awaited { series, landing, .. }) = state.awaited.front_mut() {
            let Some(next) = series.next() else {
                state.awaited.pop_front();
                continue;
            };
            if next.number > state.last && !state.over {
                return;
            }
            let piece = state.pieces.remove(&next.number).filter(|(_, len)| *len as u64 == next.len);
            let mapped =
                |(buffer, _): (Buffer, usize)| Some((Mapped::of(buffer.memory.region(), next.len)?, buffer));
            let Some((bytes, buffer)) = piece.and_then(mapped) else {
                state.awaited.pop_front();
                continue;
            };
            series.pass();
            let (buffer, landing) = (InUse(Some(buffer)), Arc::clone(landing));
            let copying = (self.copies.begin(), series.copies.begin());
            let end = move |status| {
                buffer.release(status);
                drop(copying);
                landing.landed(status);
            };
            series.carrier.carry(series.rows(), next.offset, bytes, 0, Box::new(end));
        }
    }

    /// Device memory is about to be freed: no piece of a box is landed there any more. Returns those that are
    /// just being landed.
    pub(super) fn forget(&self, address: u64, size: u64) -> Vec<Arc<Copies>> {
        let mut state = lock(&self.state);
        state.awaited.retain(|awaited| !awaited.series.touches(address, size));
        state.in_motion.within(address, size)
    }

    /// Lands an expected piece. `None`: it will not come. The state stays locked, so that pieces are landed
    /// in their order.
    pub(super) fn land_expected(
        &self,
        state: &mut Arrived,
        expected: Expected,
        piece: Option<(Buffer, usize)>,
    ) {
        let Expected { to, memory, seq, carrier } = expected;
        let piece = piece.filter(|(_, len)| *len as u64 == to.width);
        let bytes = piece.as_ref().and_then(|(buffer, len)| Mapped::of(buffer.memory.region(), *len as u64));
        let (Some((buffer, _)), Some(bytes), false) = (piece, bytes, state.failed) else {
            return self.fail(state);
        };
        let (buffer, copying) = (InUse(Some(buffer)), self.copies.begin());
        let end = move |status| {
            match memory {
                Memory::Device => buffer.release(status),
                Memory::Mirror => drop(buffer.over()),
            }
            drop(copying);
        };
        carrier.carry(&to, 0, bytes, seq, Box::new(end));
    }

    /// An expected piece will not come.
    pub(super) fn fail(&self, state: &mut Arrived) {
        state.expected.clear();
        if !std::mem::replace(&mut state.failed, true)
            && let Some((direct, failures)) = &self.failures
        {
            failures.tell(*direct);
        }
    }

    /// Memory is to leave the device: gives up the boxes if nothing has come of the first one for some time.
    /// Its sender may wait for its own memory, which a session has that waits for this one's. Those behind it
    /// wait for the same sender, however young they are: pieces come in order.
    pub(super) fn give_up_idle(&self, now: Instant) {
        let mut state = lock(&self.state);
        let last = state.last_arrival;
        let begun = |first: &Awaited| last.map_or(first.named, |last| last.max(first.named));
        if state.awaited.front().is_some_and(|first| now.saturating_duration_since(begun(first)) >= IDLE) {
            tracing::info!(
                "a copy from another server is given up: nothing of it has come for a while, and others need the device's memory"
            );
            state.awaited.clear();
        }
    }

    /// Whether the client expects a piece that has not come, or not landed.
    pub(super) fn expects(&self) -> bool {
        let state = lock(&self.state);
        !state.expected.is_empty() || !state.awaited.is_empty() || lock(&self.copies.0).0 > 0
    }

    /// Closes it, and answers when nothing is being landed any more.
    pub(super) fn end(&self, pending: Pending) {
        let stream = {
            let mut state = lock(&self.state);
            // Nobody is to be told any more.
            state.failed = true;
            state.expected.clear();
            state.awaited.clear();
            state.stream.take()
        };
        self.close();
        // Its thread returns.
        stream.inspect(|stream| stream.shut_down());
        self.copies.when_over(pending);
    }

    /// Answers once a piece has arrived, or when it cannot arrive any more.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the client waits for too many.
    pub fn arrival(&self, number: u64, later: impl FnOnce() -> Pending) -> Result<(), Status> {
        let mut state = lock(&self.state);
        if state.waiting.len() >= MAX_WAITING {
            return Err(Status::OUT_OF_MEMORY);
        }
        state.waiting.push((number, later()));
        state.answer();
        Ok(())
    }

    /// Takes an arrived piece to land it: its buffer and its bytes.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it has not arrived or was already landed.
    pub fn land(&self, number: u64) -> Result<(InUse, Mapped), Status> {
        let (buffer, len) = lock(&self.state).pieces.remove(&number).ok_or(Status::INVALID_VALUE)?;
        let mapped = Mapped::of(buffer.memory.region(), len as u64).ok_or(Status::INVALID_VALUE)?;
        Ok((InUse(Some(buffer)), mapped))
    }

    /// No more pieces will arrive. Those already here can still be landed.
    pub(super) fn close(&self) {
        self.pool.close();
        let mut state = lock(&self.state);
        state.over = true;
        if !state.expected.is_empty() {
            self.fail(&mut state);
        }
        self.advance(&mut state);
        state.answer();
    }

    /// Receives pieces until the connection is lost, and returns why. `patience`: how long the peer may pause
    /// in the middle of a piece.
    pub(super) fn read(&self, stream: &Stream, verbs: Option<&Verbs>, patience: Duration) -> String {
        let why = self.receive(stream, verbs, patience).err();
        self.close();
        why.map_or_else(|| "closed".into(), |e| e.to_string())
    }

    pub(super) fn receive(
        &self,
        stream: &Stream,
        verbs: Option<&Verbs>,
        patience: Duration,
    ) -> io::Result<()> {
        let mut first = true;
        let mut polls = self.alarm.as_ref().map(|alarm| (alarm, alarm.polls()));
        loop {
            if let Some((alarm, polls)) = &mut polls {
                alarm.wait(stream, polls)?;
            }
            let mut header = DirectHeader::new_zeroed();
            stream.read_exact(header.as_mut_bytes())?;
            if std::mem::take(&mut first) && header == DirectHeader::offer() {
                if let Some(queue) = verbs::answer(verbs, stream, &self.pool)? {
                    return verbs::receive(self, stream, queue);
                }
                continue;
            }
            let len = self.check(&header)?;
            let mut piece = None;
            if len > 0 {
                // The client lands what has arrived, or the session ends.
                let Some(mut buffer) = self.pool.take() else { return Ok(()) };
                stream.set_read_timeout(Some(patience))?;
                stream.read_exact(buffer.bytes(len))?;
                stream.set_read_timeout(None)?;
                piece = Some((buffer, len));
            }
            self.arrived(header.number, piece);
        }
    }

    /// The bytes of the piece that has this header.
    pub(super) fn check(&self, header: &DirectHeader) -> io::Result<usize> {
        let last = lock(&self.state).last;
        header.check(last).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// A piece has arrived, or will not.
    pub(super) fn arrived(&self, number: u64, piece: Option<(Buffer, usize)>) {
        let len = piece.as_ref().map_or(0, |(_, len)| *len as u64);
        self.bytes.all.fetch_add(len, Ordering::Relaxed);
        let mut state = lock(&self.state);
        (state.last, state.last_arrival) = (number, Some(Instant::now()));
        let expected = state.expected.remove(&number);
        // Numbers ascend, so these will not come.
        if state.expected.first_key_value().is_some_and(|(first, _)| *first < number) {
            self.fail(&mut state);
        }
        match expected {
            Some(expected) => self.land_expected(&mut state, expected, piece),
            None => drop(piece.and_then(|piece| state.pieces.insert(number, piece))),
        }
        self.advance(&mut state);
        state.answer();
    }
}
