//! When `In` data goes over `tcp`: some of it eagerly, the rest as the server grants it (`docs/decisions/0010-data-by-grants.md`).
//!
//! Each stream has a queue of its own, and the streams take turns, a chunk each. So one with much to send does not keep another's few bytes waiting, and one whose data the server has no room
//! for, because its turn does not come for long, keeps back nobody.

use std::collections::{HashMap, VecDeque};

use protocol::handle::Handle;
use protocol::link::{DataGrant, EAGER, EAGER_PIECE, frame};
use protocol::ops::OpInfo;
use protocol::wire::WireError;

use super::regions::{ClientMemory, Span};
use super::{EndReason, Schedule, Upload};

/// Fewest bytes of a chunk, where the piece is that long.
const MIN_CHUNK: u64 = 256 << 10;
/// Most bytes of a chunk.
const MAX_CHUNK: u64 = 1 << 20;
/// Data of more bytes than this is not sent eagerly behind other data of its stream: its grant will be here by the time of its turn, and what comes before its room is copied once more.
const SHORT: u64 = 64 << 10;
/// Marks the queue of a command that names no stream, whose number is the command's: its data (a module's image, say) waits for no other command's.
const NO_STREAM: u64 = 1 << 63;

/// A piece of `In` data, as far as no connection has it yet.
#[derive(Debug)]
struct Job<M> {
    seq: u64,
    piece: u32,
    span: Span<M>,
    at: u64,
    chunk: u64,
    /// Bytes before this offset go without a grant: they are counted in [`Flows::eager`].
    eager: u64,
    /// Bytes before this offset may be sent, because the server has said so.
    granted: u64,
}

impl<M> Job<M> {
    fn may_send(&self) -> bool {
        self.at < self.eager.max(self.granted)
    }

    /// Whether the next chunk is eager, and its length.
    fn next(&self) -> (bool, u64) {
        let eager = self.at < self.eager;
        let left = if eager { self.eager } else { self.granted } - self.at;
        // The eager part of a long piece is cut so that all connections have some of it.
        let chunk = if eager { MIN_CHUNK } else { self.chunk };
        // What would remain is not worth a chunk of its own.
        (eager, if left <= chunk + chunk / 4 { left } else { chunk })
    }
}

/// A part of a piece that one connection sends.
#[derive(Debug)]
pub(in crate::bridge) struct Chunk<M> {
    pub(in crate::bridge) seq: u64,
    pub(in crate::bridge) piece: u32,
    /// The whole piece.
    pub(in crate::bridge) span: Span<M>,
    /// Offset of the chunk in the piece.
    pub(in crate::bridge) at: u64,
    pub(in crate::bridge) len: u32,
    /// No grant covers it.
    pub(in crate::bridge) eager: bool,
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::bridge) struct Flows<M> {
    flows: HashMap<u64, VecDeque<Job<M>>>,
    /// The flow of each piece that is not wholly given out.
    places: HashMap<(u64, u32), u64>,
    /// Flows whose first piece may be sent, in the order of their turns.
    turns: VecDeque<u64>,
    /// Bytes that may still be sent eagerly.
    eager: u64,
    /// The flow of the command that is being taken.
    flow: u64,
    /// Connections to spread a piece over.
    connections: u64,
}

impl<M> Flows<M> {
    pub(in crate::bridge) fn new(connections: usize) -> Flows<M> {
        Flows {
            flows: HashMap::new(),
            places: HashMap::new(),
            turns: VecDeque::new(),
            eager: EAGER,
            flow: 0,
            connections: connections as u64,
        }
    }

    /// Whether there is something that may be sent now.
    pub(in crate::bridge) fn has_chunks(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Bytes of the next chunk.
    pub(in crate::bridge) fn peek(&self) -> Option<u64> {
        let job = self.flows.get(self.turns.front()?)?.front()?;
        Some(job.next().1)
    }

    /// The next chunk.
    pub(in crate::bridge) fn next_chunk(&mut self) -> Option<Chunk<M>> {
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
        if job.at == job.span.len() {
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
}

impl<M: ClientMemory> Schedule for Flows<M> {
    type Memory = M;
    const COMMANDS_AHEAD: Option<u64> = None;

    fn command(&mut self, seq: u64, info: &OpInfo, body: &[u8]) -> Result<(), WireError> {
        if !info.carries_data {
            return Ok(());
        }
        let mut flow = NO_STREAM | seq;
        (info.visit_handles)(body, &mut |handle| {
            if let Handle::Stream(stream) = handle {
                flow = stream.0.into();
            }
        })?;
        self.flow = flow;
        Ok(())
    }

    /// It is decided here once and for all what goes without a grant.
    fn push(&mut self, Upload { seq, piece, span, late }: Upload<M>) -> bool {
        let len = span.len();
        let queue = self.flows.entry(self.flow).or_default();
        let wish = len.min(EAGER_PIECE);
        let at_once = !late && (len <= SHORT || queue.is_empty());
        let eager = if at_once && self.eager >= wish { wish } else { 0 };
        self.eager -= eager;
        // The server tells of longer pieces, and of late ones, without being asked.
        let ask = eager == 0 && !late && len <= EAGER_PIECE;
        let chunk = (len / (8 * self.connections)).clamp(MIN_CHUNK, MAX_CHUNK);
        let job = Job { seq, piece, span, at: 0, chunk, eager, granted: 0 };
        if queue.is_empty() && job.may_send() {
            self.turns.push_back(self.flow);
        }
        queue.push_back(job);
        self.places.insert((seq, piece), self.flow);
        ask
    }

    /// A grant of a piece that is sent already is of no interest.
    fn grant(&mut self, DataGrant { seq, piece, upto, .. }: DataGrant) -> Result<(), EndReason> {
        let Some(flow) = self.places.get(&(seq, piece)) else { return Ok(()) };
        let Some(queue) = self.flows.get_mut(flow) else { return Ok(()) };
        let at = queue.partition_point(|job| (job.seq, job.piece) < (seq, piece));
        let Some(job) = queue.get_mut(at) else { return Ok(()) };
        let could = job.may_send();
        job.granted = job.granted.max(upto.min(job.span.len()));
        if at == 0 && !could && job.may_send() {
            self.turns.push_back(*flow);
        }
        Ok(())
    }

    fn frame(&mut self, kind: u32, body: &[u8]) -> Result<bool, EndReason> {
        if kind != frame::DATA_PLACED {
            return Ok(false);
        }
        let bytes = body.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
        match bytes.and_then(|bytes| self.eager.checked_add(bytes)) {
            Some(eager) if eager <= EAGER => self.eager = eager,
            _ => {
                return Err(EndReason::Server(format!(
                    "it has placed {bytes:?} eager bytes, more than were sent"
                )));
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::TestMemory;
    use super::*;

    type TestFlows = Flows<TestMemory>;

    fn upload(seq: u64, piece: u32, len: u64, late: bool) -> Upload<TestMemory> {
        Upload { seq, piece, span: TestMemory::span(len), late }
    }

    /// Queues a piece for which the server need not be asked.
    fn push(flows: &mut TestFlows, flow: u64, seq: u64, piece: u32, len: u64) {
        flows.flow = flow;
        assert!(!flows.push(upload(seq, piece, len, false)), "command {seq}");
    }

    fn grant(flows: &mut TestFlows, seq: u64, piece: u32, upto: u64) {
        flows.grant(DataGrant { seq, piece, reserved: 0, upto }).unwrap();
    }

    /// Takes chunks as long as there are some; gives the seq, offset and length of each.
    fn drain(flows: &mut TestFlows) -> Vec<(u64, u64, u64)> {
        std::iter::from_fn(|| flows.next_chunk()).map(|c| (c.seq, c.at, u64::from(c.len))).collect()
    }

    #[test]
    fn chunks_cover_a_piece_once_and_in_order() {
        for len in [1, MIN_CHUNK, MIN_CHUNK + 1, 7 * MAX_CHUNK + 13, 100 * MAX_CHUNK] {
            let mut flows = TestFlows::new(4);
            push(&mut flows, 0, 1, 0, len);
            let mut at = 0;
            for step in 1..=4 {
                grant(&mut flows, 1, 0, len / 4 * step + len % 4);
                while let Some(chunk) = flows.next_chunk() {
                    assert_eq!(chunk.at, at);
                    assert!(u64::from(chunk.len) <= MAX_CHUNK + MAX_CHUNK / 4);
                    at += u64::from(chunk.len);
                    assert!(at <= EAGER_PIECE.max(len / 4 * step + len % 4));
                }
            }
            assert_eq!((at, flows.places.len()), (len, 0));
        }
    }

    #[test]
    fn a_stream_without_room_keeps_back_no_other_and_eager_data_is_bounded() {
        let mut flows = TestFlows::new(4);
        push(&mut flows, 1, 1, 0, 64 << 20);
        push(&mut flows, 1, 2, 0, 100);
        push(&mut flows, 2, 3, 0, 100);
        flows.flow = 3;
        assert!(!flows.push(upload(4, 0, 100, true)));
        let sent = drain(&mut flows);
        assert!(
            sent.iter().all(|(seq, at, len)| *seq == 3 || (*seq == 1 && at + len <= EAGER_PIECE)),
            "{sent:?}"
        );
        assert!(sent.contains(&(3, 0, 100)) && !flows.has_chunks());
        grant(&mut flows, 4, 0, u64::MAX);
        assert_eq!(drain(&mut flows), [(4, 0, 100)]);
        // What the server has no place for is not sent without end.
        flows.flow = 9;
        let asks: Vec<u64> = (5..500).filter(|seq| flows.push(upload(*seq, 0, EAGER_PIECE, false))).collect();
        let bytes: u64 = drain(&mut flows).iter().map(|(_, _, len)| len).sum();
        assert!(bytes <= EAGER, "{bytes}");
        assert!(asks.len() as u64 >= 495 - EAGER / EAGER_PIECE);
        let placed =
            |flows: &mut TestFlows, bytes: u64| flows.frame(frame::DATA_PLACED, &bytes.to_le_bytes());
        assert!(placed(&mut flows, bytes + EAGER_PIECE + 100).unwrap());
        assert!(placed(&mut flows, EAGER).is_err() && flows.frame(frame::DATA_PLACED, &[0; 7]).is_err());
        grant(&mut flows, 1, 0, 64 << 20);
        asks.iter().for_each(|seq| grant(&mut flows, *seq, 0, EAGER_PIECE));
        drain(&mut flows);
        assert_eq!((flows.flows.len(), flows.places.len()), (0, 0));
    }

    #[test]
    fn long_data_behind_other_data_of_its_stream_waits_for_its_grant_and_short_data_does_not() {
        let mut flows = TestFlows::new(4);
        push(&mut flows, 1, 1, 0, 4 << 20);
        assert!(flows.push(upload(2, 0, 512 << 10, false)));
        push(&mut flows, 1, 3, 0, SHORT);
        // Each of four connections has something of the first eager megabyte.
        let eager = drain(&mut flows);
        assert_eq!(eager.iter().map(|(seq, _, len)| (*seq, *len)).collect::<Vec<_>>(), [(1, 256 << 10); 4]);
        grant(&mut flows, 1, 0, 4 << 20);
        drain(&mut flows);
        grant(&mut flows, 2, 0, 512 << 10);
        assert_eq!(drain(&mut flows).iter().map(|(_, _, len)| len).sum::<u64>(), (512 << 10) + SHORT);
    }

    #[test]
    fn streams_take_turns() {
        let mut flows = TestFlows::new(4);
        push(&mut flows, 1, 1, 0, 64 << 20);
        grant(&mut flows, 1, 0, 64 << 20);
        flows.next_chunk();
        push(&mut flows, 2, 2, 0, 100);
        push(&mut flows, 3, 3, 0, 4 << 20);
        let first: Vec<u64> = (0..4).filter_map(|_| flows.next_chunk()).map(|chunk| chunk.seq).collect();
        assert_eq!(first, [1, 2, 3, 1]);
    }
}
