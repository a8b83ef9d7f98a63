//! Bulk data under way: what still has to be sent ([`Inputs`]), what is expected ([`Outputs`]), and the client memory that both refer to.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use protocol::data::{HostRange, Place};
use protocol::link::{EAGER, EAGER_PIECE};

use super::socket::Gather;
use crate::bridge::state::SessionState;
use crate::bridge::relayed::EndReason;
use crate::memory::Pieces;

/// Bytes of a piece on a data connection at least, where the transfer is that long.
const MIN_CHUNK: u64 = 256 << 10;
/// Bytes of a piece on a data connection at most.
const MAX_CHUNK: u64 = 1 << 20;
/// Data of more bytes than this is not sent eagerly behind other data of its stream: its grant will be here by the time of its turn, and what comes before its room is copied once more.
const SHORT: u64 = 64 << 10;

/// A registered region. How many hold it says whether anything is under way in it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) pieces: Pieces,
    pub(super) read_only: bool,
}

/// A checked range of the client's memory; holds the region that it lies in.
#[derive(Debug, Clone)]
pub(super) struct Span {
    region: Option<Arc<Region>>,
    offset: u64,
    len: u64,
}

impl Span {
    /// Checks a range that a record names. The error is what is wrong with it.
    pub(super) fn new(
        session: &SessionState,
        regions: &HashMap<u32, Arc<Region>>,
        range: HostRange,
        write: bool,
    ) -> Result<Span, &'static str> {
        let HostRange { place, offset, len } = range;
        match place {
            Place::Arena => {
                session.channel.view.arena(offset, len).ok_or("lies outside the arena")?;
                Ok(Span { region: None, offset, len })
            }
            Place::Region(id) => {
                let region = regions.get(&id).ok_or("names a region that is not registered")?;
                if write && region.read_only {
                    return Err("would write a region that is registered for reading only");
                }
                let inside = offset.checked_add(len).is_some_and(|end| end <= region.pieces.size() as u64);
                inside
                    .then(|| Span { region: Some(region.clone()), offset, len })
                    .ok_or("lies outside its region")
            }
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Appends the memory of `len` bytes from `at` to `gather`, as far as there is room for runs. The range was checked to lie inside.
    pub(super) fn gather(&self, session: &SessionState, at: u64, len: u64, gather: &mut Gather) {
        debug_assert!(at + len <= self.len);
        match &self.region {
            None => {
                if let Some((at, len)) = session.channel.view.arena(self.offset + at, len) {
                    gather.push(at, len);
                }
            }
            Some(region) => {
                for (at, len) in region.pieces.range(self.offset + at, len).into_iter().flatten() {
                    if !gather.push(at, len) {
                        break;
                    }
                }
            }
        }
    }
}

/// When the server reads a piece of `In` data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// From the moment at which it has the command.
    Now,
    /// When it says so.
    Late,
}

/// A piece of `In` data, as far as it was not yet given to a connection.
#[derive(Debug)]
struct Job {
    seq: u64,
    piece: u32,
    span: Span,
    at: u64,
    chunk: u64,
    /// Bytes before this offset go without a grant: they are counted in [`Inputs::eager`].
    eager: u64,
    /// Bytes before this offset may be sent, because the server has said so.
    granted: u64,
}

impl Job {
    fn may_send(&self) -> bool {
        self.at < self.eager.max(self.granted)
    }

    /// Whether the next part is eager, and its bytes.
    fn next(&self) -> (bool, u64) {
        let eager = self.at < self.eager;
        let left = if eager { self.eager } else { self.granted } - self.at;
        // The eager part of a long transfer is cut for all connections to have some of it.
        let chunk = if eager { MIN_CHUNK } else { self.chunk };
        // What would remain is not worth a piece of its own.
        (eager, if left <= chunk + chunk / 4 { left } else { chunk })
    }
}

/// A part of a [`Job`] that one connection sends.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) seq: u64,
    pub(super) piece: u32,
    pub(super) span: Span,
    pub(super) at: u64,
    pub(super) len: u32,
    /// Not covered by a grant.
    pub(super) eager: bool,
}

/// `In` data that is under way, and which commands' data has all been sent.
///
/// Each stream has a queue of its own, and the streams take turns, a chunk each: so one with much to send does not keep another's few bytes waiting, and one whose
/// data the server has no room for (its turn does not come for as long) keeps back nobody.
#[derive(Debug)]
pub(super) struct Inputs {
    flows: HashMap<u64, VecDeque<Job>>,
    /// The flow of each piece that is not wholly sent.
    places: HashMap<(u64, u32), u64>,
    /// Flows whose first piece may be sent, in the order of their turns.
    turns: VecDeque<u64>,
    /// For each command with data under way, by seq: how many bytes are still to be sent.
    left: BTreeMap<u64, u64>,
    /// Bytes that may still be sent eagerly.
    eager: u64,
}

impl Default for Inputs {
    fn default() -> Inputs {
        Inputs {
            flows: HashMap::new(),
            places: HashMap::new(),
            turns: VecDeque::new(),
            left: BTreeMap::new(),
            eager: EAGER,
        }
    }
}

impl Inputs {
    /// Commands whose data is under way.
    pub(super) fn len(&self) -> usize {
        self.left.len()
    }

    /// Whether there is something that may be sent now.
    pub(super) fn has_jobs(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Queues one piece of data of command `seq`; pieces of one flow come in the commands' order. `lanes` is the number of connections to spread it over.
    ///
    /// True: the server must be asked to grant it, before it has the command. It is decided here once and for all what goes without a grant.
    #[must_use]
    pub(super) fn push(
        &mut self,
        flow: u64,
        seq: u64,
        piece: u32,
        span: Span,
        when: When,
        lanes: usize,
    ) -> bool {
        let len = span.len;
        if len == 0 {
            return false;
        }
        *self.left.entry(seq).or_default() += len;
        let queue = self.flows.entry(flow).or_default();
        let wish = len.min(EAGER_PIECE);
        let at_once = when == When::Now && (len <= SHORT || queue.is_empty());
        let eager = if at_once && self.eager >= wish { wish } else { 0 };
        self.eager -= eager;
        // Of longer ones, and of late ones, the server tells without being asked.
        let ask = eager == 0 && when == When::Now && len <= EAGER_PIECE;
        let job = Job { seq, piece, span, at: 0, chunk: chunk(len, lanes), eager, granted: 0 };
        if queue.is_empty() && job.may_send() {
            self.turns.push_back(flow);
        }
        queue.push_back(job);
        self.places.insert((seq, piece), flow);
        ask
    }

    /// The server has room for a piece's bytes before `upto`. One that is sent already is of no interest.
    pub(super) fn grant(&mut self, seq: u64, piece: u32, upto: u64) {
        let Some(flow) = self.places.get(&(seq, piece)) else { return };
        let Some(queue) = self.flows.get_mut(flow) else { return };
        let at = queue.partition_point(|job| (job.seq, job.piece) < (seq, piece));
        let Some(job) = queue.get_mut(at) else { return };
        let could = job.may_send();
        job.granted = job.granted.max(upto.min(job.span.len));
        if at == 0 && !could && job.may_send() {
            self.turns.push_back(*flow);
        }
    }

    /// So many eager bytes have found their place. False: more than were sent.
    pub(super) fn placed(&mut self, bytes: u64) -> bool {
        match self.eager.checked_add(bytes) {
            Some(eager) if eager <= EAGER => {
                self.eager = eager;
                true
            }
            _ => false,
        }
    }

    /// Bytes of the next part to send.
    pub(super) fn peek(&self) -> Option<u64> {
        let job = self.flows.get(self.turns.front()?)?.front()?;
        Some(job.next().1)
    }

    /// The next part to send.
    pub(super) fn next_chunk(&mut self) -> Option<Chunk> {
        let flow = self.turns.pop_front()?;
        let queue = self.flows.get_mut(&flow)?;
        let job = queue.front_mut()?;
        let (eager, len) = job.next();
        let chunk = Chunk {
            seq: job.seq,
            piece: job.piece,
            span: job.span.clone(),
            at: job.at,
            len: len as u32,
            eager,
        };
        job.at += len;
        if job.at == job.span.len {
            self.places.remove(&(job.seq, job.piece));
            queue.pop_front();
        }
        match queue.front() {
            None => drop(self.flows.remove(&flow)),
            Some(job) if job.may_send() => self.turns.push_back(flow),
            Some(_) => {}
        }
        Some(chunk)
    }

    /// Says that a chunk is sent. True: a command's data is complete, so [`released`](Self::released) may have risen.
    pub(super) fn sent(&mut self, chunk: &Chunk) -> bool {
        let Some(left) = self.left.get_mut(&chunk.seq) else { return false };
        *left -= u64::from(chunk.len);
        let complete = *left == 0;
        if complete {
            self.left.remove(&chunk.seq);
        }
        complete
    }

    /// The highest seq such that the data of all commands up to it has been sent, when `last` is the last command taken.
    pub(super) fn released(&self, last: u64) -> u64 {
        self.left.first_key_value().map_or(last, |(seq, _)| seq - 1)
    }
}

/// Bytes of a piece on a data connection, for a transfer of `len` bytes over `lanes` connections.
fn chunk(len: u64, lanes: usize) -> u64 {
    (len / (8 * lanes as u64)).clamp(MIN_CHUNK, MAX_CHUNK)
}

/// `Out` data of one command.
#[derive(Debug)]
struct Expected {
    /// Which piece of bulk data, and where it goes. Nearly always one; `more` holds the others.
    first: (u32, Span),
    more: Vec<(u32, Span)>,
    received: u64,
    total: u64,
}

/// Data that commands expect from the server.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    commands: HashMap<u64, Expected>,
}

impl Outputs {
    pub(super) fn len(&self) -> usize {
        self.commands.len()
    }

    /// Expects a piece of command `seq`'s data.
    pub(super) fn expect(&mut self, seq: u64, piece: u32, span: Span) {
        let total = span.len;
        match self.commands.get_mut(&seq) {
            Some(expected) => {
                expected.more.push((piece, span));
                expected.total += total;
            }
            None => {
                self.commands
                    .insert(seq, Expected { first: (piece, span), more: Vec::new(), received: 0, total });
            }
        }
    }

    /// Where `len` bytes from `offset` of that piece go.
    pub(super) fn target(&self, seq: u64, piece: u32, offset: u64, len: u64) -> Result<Span, EndReason> {
        let wrong = |what| {
            EndReason::Server(format!("it sent {len} bytes of data for command {seq}, piece {piece}, {what}"))
        };
        let expected = self.commands.get(&seq).ok_or_else(|| wrong("which expects none"))?;
        let span = std::iter::once(&expected.first)
            .chain(&expected.more)
            .find_map(|(number, span)| (*number == piece).then_some(span))
            .ok_or_else(|| wrong("which the command does not have"))?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= span.len);
        if !inside {
            return Err(wrong("beyond its end"));
        }
        Ok(Span { region: span.region.clone(), offset: span.offset + offset, len })
    }

    /// Says that `n` bytes for command `seq` are in the client's memory.
    pub(super) fn received(&mut self, seq: u64, n: u64) {
        if let Some(expected) = self.commands.get_mut(&seq) {
            expected.received += n;
        }
    }

    /// The server says that it has sent `bytes` bytes for `seq` in all. True: they are all here, and the command is forgotten.
    pub(super) fn settle(&mut self, seq: u64, bytes: u64) -> Result<bool, EndReason> {
        let Some(expected) = self.commands.get(&seq) else {
            return Err(EndReason::Server(format!(
                "it says that data of command {seq} was sent, which expects none"
            )));
        };
        if bytes > expected.total || expected.received > bytes {
            let (total, received) = (expected.total, expected.received);
            return Err(EndReason::Server(format!(
                "it says that {bytes} bytes were sent for command {seq}, which expects {total} and has got {received}"
            )));
        }
        if expected.received < bytes {
            return Ok(false);
        }
        self.commands.remove(&seq);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(len: u64) -> Span {
        Span { region: None, offset: 0, len }
    }

    /// Queues a piece for which the server need not be asked.
    fn push(inputs: &mut Inputs, flow: u64, seq: u64, piece: u32, len: u64) {
        assert!(!inputs.push(flow, seq, piece, span(len), When::Now, 4), "command {seq}");
    }

    /// Takes chunks as long as there are some; gives the seq, offset and length of each.
    fn drain(inputs: &mut Inputs) -> Vec<(u64, u64, u64)> {
        let mut all = Vec::new();
        while let Some(chunk) = inputs.next_chunk() {
            inputs.sent(&chunk);
            all.push((chunk.seq, chunk.at, u64::from(chunk.len)));
        }
        all
    }

    #[test]
    fn released_rises_only_when_all_earlier_data_is_sent() {
        let mut inputs = Inputs::default();
        push(&mut inputs, 7, 3, 0, 10);
        push(&mut inputs, 7, 5, 0, 20);
        push(&mut inputs, 7, 5, 1, 5);
        let (a, b, c) =
            (inputs.next_chunk().unwrap(), inputs.next_chunk().unwrap(), inputs.next_chunk().unwrap());
        assert_eq!(inputs.released(9), 2);
        assert!(!inputs.sent(&b) && inputs.sent(&c));
        assert_eq!((inputs.released(9), inputs.len()), (2, 1));
        assert!(inputs.sent(&a));
        assert_eq!((inputs.released(9), inputs.len()), (9, 0));
    }

    #[test]
    fn chunks_cover_a_transfer_once_and_in_order() {
        for len in [1, MIN_CHUNK, MIN_CHUNK + 1, 7 * MAX_CHUNK + 13, 100 * MAX_CHUNK] {
            let mut inputs = Inputs::default();
            push(&mut inputs, 0, 1, 0, len);
            let mut at = 0;
            for step in 1..=4 {
                inputs.grant(1, 0, len / 4 * step + len % 4);
                while let Some(chunk) = inputs.next_chunk() {
                    assert_eq!(chunk.at, at);
                    assert!(u64::from(chunk.len) <= MAX_CHUNK + MAX_CHUNK / 4);
                    at += u64::from(chunk.len);
                    assert!(at <= EAGER_PIECE.max(len / 4 * step + len % 4));
                    inputs.sent(&chunk);
                }
            }
            assert_eq!((at, inputs.len()), (len, 0));
        }
    }

    #[test]
    fn a_stream_without_room_keeps_back_no_other_and_no_later_data_is_eager_for_ever() {
        let mut inputs = Inputs::default();
        push(&mut inputs, 1, 1, 0, 64 << 20);
        push(&mut inputs, 1, 2, 0, 100);
        push(&mut inputs, 2, 3, 0, 100);
        assert!(!inputs.push(3, 4, 0, span(100), When::Late, 4));
        let sent = drain(&mut inputs);
        assert!(
            sent.iter().all(|(seq, at, len)| *seq == 3 || (*seq == 1 && at + len <= EAGER_PIECE)),
            "{sent:?}"
        );
        assert!(sent.contains(&(3, 0, 100)) && !inputs.has_jobs());
        inputs.grant(4, 0, u64::MAX);
        assert_eq!(drain(&mut inputs), [(4, 0, 100)]);
        // What the server has no place for is not sent without end.
        let asks: Vec<u64> =
            (5..500).filter(|seq| inputs.push(9, *seq, 0, span(EAGER_PIECE), When::Now, 4)).collect();
        let bytes: u64 = drain(&mut inputs).iter().map(|(_, _, len)| len).sum();
        assert!(bytes <= EAGER, "{bytes}");
        assert!(asks.len() as u64 >= 495 - EAGER / EAGER_PIECE);
        assert!(inputs.placed(bytes + EAGER_PIECE + 100) && !inputs.placed(EAGER));
        inputs.grant(1, 0, 64 << 20);
        asks.iter().for_each(|seq| inputs.grant(*seq, 0, EAGER_PIECE));
        drain(&mut inputs);
        assert_eq!((inputs.len(), inputs.flows.len(), inputs.places.len()), (0, 0, 0));
    }

    #[test]
    fn long_data_behind_other_data_of_its_stream_waits_for_its_grant_and_short_data_does_not() {
        let mut inputs = Inputs::default();
        push(&mut inputs, 1, 1, 0, 4 << 20);
        assert!(inputs.push(1, 2, 0, span(512 << 10), When::Now, 4));
        push(&mut inputs, 1, 3, 0, SHORT);
        // Each of four connections has something of the first eager megabyte.
        let eager = drain(&mut inputs);
        assert_eq!(eager.iter().map(|(seq, _, len)| (*seq, *len)).collect::<Vec<_>>(), [(1, 256 << 10); 4]);
        inputs.grant(1, 0, 4 << 20);
        drain(&mut inputs);
        inputs.grant(2, 0, 512 << 10);
        assert_eq!(drain(&mut inputs).iter().map(|(_, _, len)| len).sum::<u64>(), (512 << 10) + SHORT);
    }

    #[test]
    fn streams_take_turns() {
        let mut inputs = Inputs::default();
        push(&mut inputs, 1, 1, 0, 64 << 20);
        inputs.grant(1, 0, 64 << 20);
        inputs.next_chunk();
        push(&mut inputs, 2, 2, 0, 100);
        push(&mut inputs, 3, 3, 0, 4 << 20);
        let first: Vec<u64> = (0..4).filter_map(|_| inputs.next_chunk()).map(|chunk| chunk.seq).collect();
        assert_eq!(first, [1, 2, 3, 1]);
    }

    #[test]
    fn data_that_no_command_expects_is_the_servers_fault() {
        let mut outputs = Outputs::default();
        outputs.expect(4, 1, span(100));
        assert!(outputs.target(4, 1, 90, 10).is_ok());
        for (seq, piece, offset, len) in [(5, 1, 0, 1), (4, 0, 0, 1), (4, 1, 91, 10), (4, 1, u64::MAX, 2)] {
            assert!(outputs.target(seq, piece, offset, len).is_err(), "{seq} {piece} {offset} {len}");
        }
        outputs.received(4, 60);
        assert!(!outputs.settle(4, 100).unwrap());
        assert!(outputs.settle(4, 101).is_err() && outputs.settle(4, 59).is_err());
        outputs.received(4, 40);
        assert!(outputs.settle(4, 100).unwrap());
        assert!(outputs.settle(4, 100).is_err());
    }
}
