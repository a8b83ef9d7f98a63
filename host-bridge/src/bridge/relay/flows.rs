//! When `In` data goes over `tcp`: some of it eagerly, the rest as the server grants it (`docs/decisions/0010-data-by-grants.md`).
//!
//! Each stream has a queue of its own, and the streams take turns, a chunk each. So one with much to send does not keep another's few bytes waiting, and one whose data the server has no room
//! for, because its turn does not come for long, keeps back nobody.
//!
//! Grants come from the server, a round trip behind the data for which they make room. Over a long distance the room of the server's buffers is too little for that. So the rest of a long piece goes
//! eagerly as well, as far as the link needs it ([`Pace`]) and the server allows it ([`Welcome::eager`](protocol::link::Welcome)). Mostly the buffers are free again by the time it arrives; what
//! finds no room is set aside there.
//!
//! Where the server has a cache, what it has need not be sent ([`Knowledge`]): a chunk then has no bytes. All that is said above holds for it as well.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use protocol::handle::Handle;
use protocol::link::{
    CACHE_BLOCK, DataGrant, DataHeader, DataKnown, EAGER, EAGER_FLAG, EAGER_PIECE, HASH_FLAG, KEEP_FLAG,
    KNOWN_FLAG, frame,
};
use protocol::ops::OpInfo;
use protocol::wire::WireError;
use zerocopy::FromBytes;

use super::knowledge::{Block, CacheUse, Knowledge};
use super::pace::Pace;
use super::regions::{ClientMemory, Span};
use super::{EndReason, Schedule, Upload};
use crate::journal::Piece;

/// Fewest bytes of a chunk, where the piece is that long.
const MIN_CHUNK: u64 = 256 << 10;
/// Most bytes of a chunk.
const MAX_CHUNK: u64 = 1 << 20;
/// Data of more bytes than this is not sent eagerly behind other data of its stream: its grant will be here by the time of its turn, and what comes before its room is copied once more.
const SHORT: u64 = 64 << 10;
/// Bytes of the window that are kept for data that is shorter than [`EAGER_PIECE`].
const FOR_SHORT: u64 = EAGER / 8;
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
    /// Bytes before this offset go without a grant: they are counted in [`Flows::unplaced`].
    eager: u64,
    late: bool,
    /// Bytes before this offset may be sent, because the server has said so.
    granted: u64,
    /// What is known of its blocks. Empty: it has nothing to do with the cache.
    blocks: Vec<Block>,
}

impl<M> Job<M> {
    /// Whether the server takes more of it.
    fn has_room(&self) -> bool {
        self.at < self.eager.max(self.granted)
    }

    /// The block that comes next.
    fn block(&self) -> Option<&Block> {
        self.blocks.get((self.at / CACHE_BLOCK) as usize)
    }

    /// Whether it is to wait until the server has said whether it has the next block.
    fn awaits_answer(&self, waits: bool) -> bool {
        waits && self.block() == Some(&Block::Asked)
    }

    fn may_send(&self, waits: bool) -> bool {
        self.has_room() && !self.awaits_answer(waits)
    }

    /// Whether the next chunk is eager, and its length.
    fn next(&self) -> (bool, u64) {
        let eager = self.at < self.eager;
        let left = if eager { self.eager } else { self.granted } - self.at;
        let block = self.block();
        let left = if block.is_some() { left.min(CACHE_BLOCK - self.at % CACHE_BLOCK) } else { left };
        if block == Some(&Block::Known) {
            return (eager, left);
        }
        // The first part of a long piece is cut so that all connections have some of it.
        let chunk = if eager && self.at < EAGER_PIECE { MIN_CHUNK } else { self.chunk };
        // What would remain is not worth a chunk of its own.
        (eager, if left <= chunk + chunk / 4 { left } else { chunk })
    }
}

/// The pieces of one stream.
#[derive(Debug)]
struct Flow<M> {
    jobs: VecDeque<Job<M>>,
    /// It is in [`Flows::turns`].
    in_turn: bool,
    /// It is in [`Flows::held`].
    held: bool,
}

impl<M> Default for Flow<M> {
    fn default() -> Flow<M> {
        Flow { jobs: VecDeque::new(), in_turn: false, held: false }
    }
}

/// What a chunk has behind its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bridge) enum Carries {
    /// Its bytes. `keep`: the server may keep them.
    Bytes { keep: bool },
    /// Nothing: the server has these bytes.
    Nothing,
    /// The hash of its bytes: the server is asked whether it has them.
    Hash([u8; 32]),
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
    pub(in crate::bridge) carries: Carries,
}

impl<M> Clone for Chunk<M> {
    fn clone(&self) -> Chunk<M> {
        let Chunk { seq, piece, at, len, eager, carries, .. } = *self;
        Chunk { seq, piece, span: self.span.clone(), at, len, eager, carries }
    }
}

impl<M> Chunk<M> {
    /// What stands before its bytes on the data connection.
    pub(in crate::bridge) fn header(&self) -> DataHeader {
        let eager = if self.eager { EAGER_FLAG } else { 0 };
        let carries = match self.carries {
            Carries::Bytes { keep: false } => 0,
            Carries::Bytes { keep: true } => KEEP_FLAG,
            Carries::Nothing => KNOWN_FLAG,
            Carries::Hash(_) => HASH_FLAG,
        };
        DataHeader { seq: self.seq, offset: self.at, piece: self.piece, len: self.len | eager | carries }
    }

    /// Bytes of the client's memory behind its header.
    pub(in crate::bridge) fn sends(&self) -> u64 {
        if matches!(self.carries, Carries::Bytes { .. }) { self.len.into() } else { 0 }
    }
}

impl<M> Piece for Chunk<M> {
    fn stream_len(&self) -> u64 {
        let hash = if let Carries::Hash(hash) = &self.carries { hash.len() } else { 0 };
        (size_of::<DataHeader>() + hash) as u64 + self.sends()
    }
}

/// A block whose hash is to be computed.
#[derive(Debug)]
pub(in crate::bridge) struct ToHash<M> {
    pub(super) seq: u64,
    piece: u32,
    /// Offset of the block in the piece.
    pub(super) offset: u64,
    pub(in crate::bridge) span: Span<M>,
    /// Set by whoever computes it.
    pub(in crate::bridge) hash: [u8; 32],
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::bridge) struct Flows<M> {
    flows: HashMap<u64, Flow<M>>,
    /// The flow of each piece that is not wholly given out.
    places: HashMap<(u64, u32), u64>,
    /// Flows whose first piece may be sent, in the order of their turns.
    turns: VecDeque<u64>,
    /// Flows whose first piece waits for a grant, or for room in the window of a far link. Some may have gone on or be gone since.
    held: VecDeque<u64>,
    /// Bytes that go eagerly and that the server has not placed.
    unplaced: u64,
    pace: Pace,
    knowledge: Knowledge,
    /// Questions for the server.
    asks: VecDeque<Chunk<M>>,
    /// The flow of the command that is being taken.
    flow: u64,
    /// Connections to spread a piece over.
    connections: u64,
}

impl<M> Flows<M> {
    /// `eager`: bytes that the server takes without a grant; it never takes fewer than [`EAGER`].
    pub(in crate::bridge) fn new(connections: usize, eager: u64, cache: CacheUse) -> Flows<M> {
        Flows {
            knowledge: Knowledge::new(cache),
            asks: VecDeque::new(),
            flows: HashMap::new(),
            places: HashMap::new(),
            turns: VecDeque::new(),
            held: VecDeque::new(),
            unplaced: 0,
            pace: Pace::new(EAGER, eager),
            flow: 0,
            connections: connections as u64,
        }
    }

    /// Whether there is something that may be sent now.
    pub(in crate::bridge) fn has_chunks(&self) -> bool {
        !self.turns.is_empty() || !self.asks.is_empty()
    }

    /// Bytes of the client's memory in the next chunk.
    pub(in crate::bridge) fn peek(&self) -> Option<u64> {
        if !self.asks.is_empty() {
            return Some(0);
        }
        let job = self.flows.get(self.turns.front()?)?.jobs.front()?;
        Some(if job.block() == Some(&Block::Known) { 0 } else { job.next().1 })
    }

    /// The next chunk.
    pub(in crate::bridge) fn next_chunk(&mut self) -> Option<Chunk<M>> {
        self.next_chunk_at(Instant::now)
    }

    fn next_chunk_at(&mut self, now: impl FnOnce() -> Instant) -> Option<Chunk<M>> {
        if let Some(ask) = self.asks.pop_front() {
            return Some(ask);
        }
        let waits = self.waits();
        loop {
            let number = self.turns.pop_front()?;
            let Some(flow) = self.flows.get_mut(&number) else { continue };
            flow.in_turn = false;
            // It may have begun to wait for an answer in the meantime.
            let Some(job) = flow.jobs.front_mut().filter(|job| job.may_send(waits)) else { continue };
            let (eager, len) = job.next();
            let (block, number_of_block) = (job.block().copied(), (job.at / CACHE_BLOCK) as usize);
            let carries = match block {
                Some(Block::Known) => Carries::Nothing,
                block => Carries::Bytes { keep: block.is_some() },
            };
            let chunk = Chunk {
                seq: job.seq,
                piece: job.piece,
                span: job.span.clone(),
                at: job.at,
                len: len as u32,
                eager,
                carries,
            };
            job.at += len;
            let over = job.at == job.span.len();
            if let Some(block) = block
                && (over || job.at.is_multiple_of(CACHE_BLOCK))
            {
                let begin = number_of_block as u64 * CACHE_BLOCK;
                self.knowledge.passed(block, job.at - begin);
            }
            if over {
                self.places.remove(&(job.seq, job.piece));
                flow.jobs.pop_front();
            }
            match flow.jobs.front().map(|job| job.may_send(waits)) {
                None => drop(self.flows.remove(&number)),
                Some(true) => self.turn(number),
                Some(false) => self.hold(number),
            }
            if carries != Carries::Nothing {
                self.pace.leaves(chunk.seq, chunk.piece, chunk.at, now);
            }
            return Some(chunk);
        }
    }

    /// Gives a flow its turn.
    fn turn(&mut self, number: u64) {
        if let Some(flow) = self.flows.get_mut(&number)
            && !std::mem::replace(&mut flow.in_turn, true)
        {
            self.turns.push_back(number);
        }
    }

    /// Whether it is better to wait for an answer than to send bytes that the server may have.
    fn waits(&self) -> bool {
        self.knowledge.expects_hits(&self.pace)
    }

    /// A block whose hash is to be computed and given to [`hashed`](Self::hashed).
    pub(in crate::bridge) fn next_to_hash(&mut self) -> Option<ToHash<M>> {
        loop {
            let (seq, piece, offset) = self.knowledge.next()?;
            let Some(job) = self.job_mut(seq, piece) else { continue };
            // It has been sent, or is being sent.
            if job.at > offset {
                continue;
            }
            let len = (job.span.len() - offset).min(CACHE_BLOCK);
            let Some(span) = job.span.part(offset, len) else { continue };
            if let Some(block) = job.blocks.get_mut((offset / CACHE_BLOCK) as usize) {
                *block = Block::Asked;
            }
            self.knowledge.asked(len);
            return Some(ToHash { seq, piece, offset, span, hash: [0; 32] });
        }
    }

    /// The hash of a block is known.
    pub(in crate::bridge) fn hashed(&mut self, done: ToHash<M>) {
        let ToHash { seq, piece, offset, span, hash } = done;
        // The question would come behind the bytes.
        if self.job_mut(seq, piece).is_none_or(|job| job.at > offset) {
            return;
        }
        let len = span.len() as u32;
        let carries = Carries::Hash(hash);
        self.asks.push_back(Chunk { seq, piece, span, at: offset, len, eager: false, carries });
    }

    fn job_mut(&mut self, seq: u64, piece: u32) -> Option<&mut Job<M>> {
        let flow = self.flows.get_mut(self.places.get(&(seq, piece))?)?;
        let at = flow.jobs.partition_point(|job| (job.seq, job.piece) < (seq, piece));
        flow.jobs.get_mut(at)
    }

    /// The server says whether it has a block.
    fn told(&mut self, known: DataKnown) {
        let waited = self.waits();
        // Also of a block that was sent meanwhile: others may be as that one.
        self.knowledge.told(known.known == 1);
        if let Some(number) = self.note(known)
            && let Some(job) = self.flows.get(&number).and_then(|flow| flow.jobs.front())
        {
            if job.has_room() { self.turn(number) } else { self.hold(number) }
        }
        self.wait_no_more(waited);
    }

    /// Notes what is known of a block. Gives the flow whose first piece it is of. What the server says of blocks that it was not asked about is of no interest.
    fn note(&mut self, DataKnown { seq, offset, piece, known }: DataKnown) -> Option<u64> {
        let number = *self.places.get(&(seq, piece))?;
        let job =
            self.job_mut(seq, piece).filter(|job| job.at <= offset && offset.is_multiple_of(CACHE_BLOCK))?;
        let block =
            job.blocks.get_mut((offset / CACHE_BLOCK) as usize).filter(|block| **block == Block::Asked)?;
        *block = if known == 1 { Block::Known } else { Block::Missing };
        let first = self.flows.get(&number)?.jobs.front()?;
        ((first.seq, first.piece) == (seq, piece)).then_some(number)
    }

    /// If the flows `waited` for answers and need not do so now, they go on.
    fn wait_no_more(&mut self, waited: bool) {
        if !waited || self.waits() {
            return;
        }
        let can_go =
            |flow: &Flow<M>| flow.jobs.front().is_some_and(|job| job.awaits_answer(true) && job.has_room());
        let free: Vec<u64> =
            self.flows.iter().filter(|(_, flow)| can_go(flow)).map(|(number, _)| *number).collect();
        free.into_iter().for_each(|number| self.turn(number));
    }

    /// The server has a chunk.
    pub(in crate::bridge) fn arrived(&mut self, chunk: &Chunk<M>) {
        self.arrived_at(chunk, Instant::now);
    }

    fn arrived_at(&mut self, chunk: &Chunk<M>, now: impl FnOnce() -> Instant) {
        if chunk.sends() == 0 {
            return;
        }
        let waited = self.waits();
        if self.pace.arrives(chunk.seq, chunk.piece, chunk.at, chunk.len.into(), now) {
            // Those that began to wait before are not held yet.
            for (number, flow) in &mut self.flows {
                if !flow.held && flow.jobs.front().is_some_and(|job| !job.has_room()) {
                    flow.held = true;
                    self.held.push_back(*number);
                }
            }
            self.refill();
        }
        self.wait_no_more(waited);
    }

    /// The first piece of a flow may not be sent now. Sends more of it eagerly, if the window has room. Over a near link grants are here soon, and the window is left to the first parts of pieces.
    fn hold(&mut self, number: u64) {
        if !self.pace.is_far() {
            return;
        }
        let Some(flow) = self.flows.get_mut(&number) else { return };
        if !std::mem::replace(&mut flow.held, true) {
            self.held.push_back(number);
        }
        self.refill();
    }

    /// Fills the window from the flows that are held.
    fn refill(&mut self) {
        let window = self.pace.window();
        // Each once, and those that stay held in their old order.
        for _ in 0..self.held.len() {
            let Some(number) = self.held.pop_front() else { return };
            let Some(flow) = self.flows.get_mut(&number) else { continue };
            flow.held = false;
            let Some(job) = flow.jobs.front_mut() else { continue };
            if job.has_room() {
                continue;
            }
            let len = job.chunk.min(job.span.len() - job.at);
            // The server expects shorter pieces as they were announced.
            let may = !job.late && job.span.len() > EAGER_PIECE && self.pace.is_far();
            if may && self.unplaced + len + FOR_SHORT <= window {
                self.unplaced += len;
                job.eager = job.at + len;
                self.turn(number);
            } else {
                flow.held = true;
                self.held.push_back(number);
            }
        }
    }
}

impl<M: ClientMemory> Schedule for Flows<M> {
    type Memory = M;
    const COMMANDS_AHEAD: Option<u64> = None;
    const ACKNOWLEDGED: bool = true;

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
        let flow = self.flows.entry(self.flow).or_default();
        let wish = len.min(EAGER_PIECE);
        let at_once = !late && (len <= SHORT || flow.jobs.is_empty());
        let eager = if at_once && self.unplaced + wish <= self.pace.window() { wish } else { 0 };
        self.unplaced += eager;
        // The server tells of longer pieces, and of late ones, without being asked.
        let ask = eager == 0 && !late && len <= EAGER_PIECE;
        let chunk = (len / (8 * self.connections)).clamp(MIN_CHUNK, MAX_CHUNK);
        // What earlier work may still write has no hash yet.
        let blocks = if late { Vec::new() } else { self.knowledge.blocks(seq, piece, len, &self.pace) };
        let job = Job { seq, piece, span, at: 0, chunk, eager, late, granted: 0, blocks };
        let (first, has_room) = (flow.jobs.is_empty(), job.has_room());
        flow.jobs.push_back(job);
        self.places.insert((seq, piece), self.flow);
        match (first, has_room) {
            (true, true) => self.turn(self.flow),
            (true, false) => self.hold(self.flow),
            (false, _) => {}
        }
        ask
    }

    /// A grant of a piece that is sent already is of no interest.
    fn grant(&mut self, DataGrant { seq, piece, upto, .. }: DataGrant) -> Result<(), EndReason> {
        let Some(number) = self.places.get(&(seq, piece)) else { return Ok(()) };
        let Some(flow) = self.flows.get_mut(number) else { return Ok(()) };
        let at = flow.jobs.partition_point(|job| (job.seq, job.piece) < (seq, piece));
        let Some(job) = flow.jobs.get_mut(at) else { return Ok(()) };
        job.granted = job.granted.max(upto.min(job.span.len()));
        if at == 0 && job.has_room() {
            let number = *number;
            self.turn(number);
        }
        Ok(())
    }

    fn frame(&mut self, kind: u32, body: &[u8]) -> Result<bool, EndReason> {
        if kind == frame::DATA_KNOWN {
            for entry in body.chunks(size_of::<DataKnown>()) {
                let known = DataKnown::read_from_bytes(entry).map_err(|_| {
                    EndReason::Server(format!("it sent a frame of {} bytes about what it knows", body.len()))
                })?;
                self.told(known);
            }
            return Ok(true);
        }
        if kind != frame::DATA_PLACED {
            return Ok(false);
        }
        let bytes = body.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
        let left = bytes.and_then(|bytes| self.unplaced.checked_sub(bytes));
        self.unplaced = left.ok_or_else(|| {
            EndReason::Server(format!("it has placed {bytes:?} eager bytes, more than were sent"))
        })?;
        self.refill();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::TestMemory;
    use super::*;
    use std::collections::BTreeMap;
    use std::time::Duration;
    use zerocopy::IntoBytes;

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
            let mut flows = TestFlows::new(4, 0, CacheUse::Never);
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

    /// Asks about the next blocks; the hash of each is its command's number.
    fn hash(flows: &mut TestFlows) -> usize {
        let mut count = 0;
        while let Some(mut task) = flows.next_to_hash() {
            task.hash = [task.seq as u8; 32];
            flows.hashed(task);
            count += 1;
        }
        count
    }

    fn tell(flows: &mut TestFlows, seq: u64, offset: u64, known: u32) {
        let known = DataKnown { seq, offset, piece: 0, known };
        assert!(flows.frame(frame::DATA_KNOWN, known.as_bytes()).unwrap());
    }

    /// Takes chunks as long as there are some; gives the seq, length and kind of each.
    fn kinds(flows: &mut TestFlows) -> Vec<(u64, u64, Carries)> {
        std::iter::from_fn(|| flows.next_chunk()).map(|c| (c.seq, u64::from(c.len), c.carries)).collect()
    }

    const NEW: Carries = Carries::Bytes { keep: true };

    #[test]
    fn what_the_server_has_is_not_sent_and_what_is_new_is_not_delayed() {
        const LEN: u64 = 100_000;
        let mut flows = TestFlows::new(4, 0, CacheUse::Always);
        let ask = |seq: u64| (seq, LEN, Carries::Hash([seq as u8; 32]));
        let send = |flows: &mut TestFlows, seq: u64| {
            push(flows, 1, seq, 0, LEN);
            assert_eq!(hash(flows), 1);
            kinds(flows)
        };
        // The first answer is waited for, and those behind one that the server has a block.
        assert_eq!(send(&mut flows, 1), [ask(1)]);
        tell(&mut flows, 1, 0, 1);
        assert_eq!(kinds(&mut flows), [(1, LEN, Carries::Nothing)]);
        for seq in [2, 3] {
            assert_eq!(send(&mut flows, seq), [ask(seq)]);
            tell(&mut flows, seq, 0, 0);
            assert_eq!(kinds(&mut flows), [(seq, LEN, NEW)]);
        }
        // The server does not seem to have what comes.
        assert_eq!(send(&mut flows, 4), [ask(4), (4, LEN, NEW)]);
        // It has after all, also what was sent meanwhile. So the next answer is waited for again, but not for ever.
        tell(&mut flows, 4, 0, 1);
        assert_eq!(send(&mut flows, 5), [ask(5)]);
        flows.flow = 2;
        assert!(!flows.push(upload(6, 0, LEN, false)));
        assert_eq!((hash(&mut flows), kinds(&mut flows)), (1, vec![ask(6)]));
        tell(&mut flows, 5, 0, 0);
        // An answer that it does not have one block lets those go on that wait for others.
        let sent = kinds(&mut flows);
        assert!(sent.contains(&(5, LEN, NEW)) && sent.contains(&(6, LEN, NEW)), "{sent:?}");
        // What the server was not asked about, what it makes up, short and late data.
        for (seq, offset) in [(6, 0), (99, 0), (6, 17), (u64::MAX, u64::MAX)] {
            tell(&mut flows, seq, offset, 0);
        }
        push(&mut flows, 1, 7, 0, 1000);
        assert_eq!(
            (hash(&mut flows), kinds(&mut flows)),
            (0, vec![(7, 1000, Carries::Bytes { keep: false })])
        );
        assert!(!flows.push(upload(8, 0, LEN, true)));
        assert_eq!(hash(&mut flows), 0);
        assert!(flows.frame(frame::DATA_KNOWN, &[1, 2, 3]).is_err());
    }

    #[test]
    fn a_long_piece_is_named_block_by_block_as_far_as_it_is_granted() {
        let mut flows = TestFlows::new(4, 0, CacheUse::Always);
        let len = 20 * CACHE_BLOCK + 1000;
        push(&mut flows, 1, 1, 0, len);
        // Not more of it than the server keeps for the bridge.
        assert_eq!(hash(&mut flows), 8);
        let asks = kinds(&mut flows);
        assert!(asks.len() == 8 && asks.iter().all(|(.., carries)| matches!(carries, Carries::Hash(_))));
        let (mut named, mut bytes, mut at) = (0, 0, 0);
        for block in 0..=20 {
            let offset = block * CACHE_BLOCK;
            tell(&mut flows, 1, offset, u32::from(block % 3 != 0));
            for upto in [offset + 100_000, offset + CACHE_BLOCK] {
                grant(&mut flows, 1, 0, upto);
                while let Some(chunk) = flows.next_chunk() {
                    let Carries::Hash(_) = chunk.carries else {
                        assert!(
                            chunk.at == at && (at..at + u64::from(chunk.len)).end <= offset + CACHE_BLOCK
                        );
                        at += u64::from(chunk.len);
                        let known = chunk.carries == Carries::Nothing;
                        assert_eq!(known, !(chunk.at / CACHE_BLOCK).is_multiple_of(3), "{chunk:?}");
                        *(if known { &mut named } else { &mut bytes }) += u64::from(chunk.len);
                        continue;
                    };
                }
                hash(&mut flows);
            }
        }
        assert_eq!((at, named + bytes), (len, len));
        assert_eq!(bytes, 7 * CACHE_BLOCK);
        assert!(flows.flows.is_empty() && flows.places.is_empty() && flows.turns.is_empty());
    }

    #[test]
    fn a_stream_without_room_keeps_back_no_other_and_eager_data_is_bounded() {
        let mut flows = TestFlows::new(4, 0, CacheUse::Never);
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
        let mut flows = TestFlows::new(4, 0, CacheUse::Never);
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
        let mut flows = TestFlows::new(4, 0, CacheUse::Never);
        push(&mut flows, 1, 1, 0, 64 << 20);
        grant(&mut flows, 1, 0, 64 << 20);
        flows.next_chunk();
        push(&mut flows, 2, 2, 0, 100);
        push(&mut flows, 3, 3, 0, 4 << 20);
        let first: Vec<u64> = (0..4).filter_map(|_| flows.next_chunk()).map(|chunk| chunk.seq).collect();
        assert_eq!(first, [1, 2, 3, 1]);
    }

    /// What happens at the other end of a simulated link, or comes back from there.
    enum Event {
        Arrives(Chunk<TestMemory>),
        Acknowledged(Chunk<TestMemory>),
        Placed(u64),
        Granted(u64, u64),
    }

    /// A link of `rate` bytes a second and a round-trip time, and a server that places what arrives and has `room` for each piece. Sends `pieces` pieces of `len` bytes on one stream, 64 MiB of
    /// them at a time; gives the share of the link that was used.
    fn share_of_the_link(
        flows: &mut TestFlows,
        room: u64,
        rate: f64,
        round_trip: Duration,
        pieces: u64,
        len: u64,
    ) -> f64 {
        let begin = Instant::now();
        let (mut now, mut free) = (begin, begin);
        // By when, and in which order they were made.
        let mut events: BTreeMap<(Instant, usize), Event> = BTreeMap::new();
        let mut made = 0;
        let mut at = |events: &mut BTreeMap<_, _>, time, event| {
            made += 1;
            events.insert((time, made), event);
        };
        let (mut landed, mut placed) = (vec![0; pieces as usize + 1], 0);
        let (mut left, mut pushed, mut ahead) = (pieces * len, 0, 0);
        while left > 0 {
            while pushed < pieces && ahead < 64 << 20 {
                pushed += 1;
                ahead += len;
                push(flows, 1, pushed, 0, len);
                at(&mut events, now + round_trip, Event::Granted(pushed, room.min(len)));
            }
            if free <= now
                && let Some(chunk) = flows.next_chunk_at(|| now)
            {
                free = now + Duration::from_secs_f64(f64::from(chunk.len) / rate);
                at(&mut events, free + round_trip / 2, Event::Arrives(chunk));
            }
            let next = events.first_key_value().map(|((time, _), _)| *time);
            if free > now && next.is_none_or(|next| next > free) {
                now = free;
                continue;
            }
            let ((time, _), event) = events.pop_first().expect("the transfer stands still");
            now = time;
            let back = time + round_trip / 2;
            match event {
                Event::Arrives(chunk) => {
                    let (seq, bytes) = (chunk.seq, u64::from(chunk.len));
                    landed[seq as usize] += bytes;
                    placed += if chunk.eager { bytes } else { 0 };
                    if placed >= EAGER / 4 {
                        at(&mut events, back, Event::Placed(std::mem::take(&mut placed)));
                    }
                    at(&mut events, back, Event::Granted(seq, (landed[seq as usize] + room).min(len)));
                    at(&mut events, back, Event::Acknowledged(chunk));
                    left -= bytes;
                }
                Event::Acknowledged(chunk) => {
                    ahead -= u64::from(chunk.len);
                    flows.arrived_at(&chunk, || now);
                }
                Event::Placed(bytes) => {
                    assert!(flows.frame(frame::DATA_PLACED, &bytes.to_le_bytes()).unwrap())
                }
                Event::Granted(seq, upto) => grant(flows, seq, 0, upto),
            }
        }
        (pieces * len) as f64 / rate / (now - begin).as_secs_f64()
    }

    #[test]
    fn one_stream_of_copies_fills_a_long_link() {
        let far = Duration::from_millis(10);
        // One copy, and many; 3 GB/s × 10 ms are 30 MB.
        let fixed =
            share_of_the_link(&mut TestFlows::new(4, 0, CacheUse::Never), 16 << 20, 3e9, far, 1, 4 << 30);
        assert!(fixed < 0.6, "{fixed} of the link with the usual window");
        // However little room the server has at a time.
        for (room, pieces, len) in [(16 << 20, 1, 4 << 30), (1 << 20, 1, 4 << 30), (16 << 20, 1024, 4 << 20)]
        {
            let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Never);
            let share = share_of_the_link(&mut flows, room, 3e9, far, pieces, len);
            assert!(share > 0.95, "{share} of the link");
            assert!(flows.pace.window() < 100 << 20, "{}", flows.pace.window());
            assert_eq!((flows.flows.len(), flows.places.len()), (0, 0));
            assert!(flows.held.len() <= 1, "{}", flows.held.len());
        }
    }

    #[test]
    fn a_near_link_sends_long_data_by_grants() {
        let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Never);
        let share = share_of_the_link(&mut flows, 16 << 20, 12e9, Duration::from_micros(100), 1, 1 << 30);
        assert!(share > 0.95 && flows.pace.window() == EAGER, "{share}, {}", flows.pace.window());
        assert!(flows.held.is_empty());
    }

    #[test]
    fn a_stream_that_stands_still_gets_no_more_than_the_window_and_leaves_room_for_short_data() {
        const LIMIT: u64 = 64 << 20;
        let mut flows = TestFlows::new(4, LIMIT, CacheUse::Never);
        share_of_the_link(&mut flows, 16 << 20, 10e9, Duration::from_millis(30), 1, 2 << 30);
        assert_eq!(flows.pace.window(), LIMIT);
        let before = flows.unplaced;
        push(&mut flows, 1, 7, 0, 1 << 30);
        let sent: u64 = drain(&mut flows).iter().map(|(_, _, len)| len).sum();
        assert!(
            sent + before <= LIMIT - FOR_SHORT && sent + before + MAX_CHUNK > LIMIT - FOR_SHORT,
            "{sent}"
        );
        push(&mut flows, 2, 8, 0, 100);
        assert_eq!(drain(&mut flows), [(8, 0, 100)]);
        // Late data goes by grants alone.
        flows.flow = 3;
        assert!(flows.frame(frame::DATA_PLACED, &sent.to_le_bytes()).unwrap());
        drain(&mut flows);
        assert!(!flows.push(upload(9, 0, 1 << 30, true)));
        assert!(flows.frame(frame::DATA_PLACED, &flows.unplaced.to_le_bytes()).unwrap());
        assert!(drain(&mut flows).iter().all(|(seq, ..)| *seq == 7));
    }
}
