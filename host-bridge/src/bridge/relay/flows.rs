//! When `In` data goes over `tcp`: some of it eagerly, the rest as the server grants it
//! (`docs/decisions/0010-data-by-grants.md`).
//!
//! Each stream has a queue of its own, and the streams take turns, a chunk each. So one with much to send
//! does not keep another's few bytes waiting, and one whose data the server has no room for, because its turn
//! does not come for long, keeps back nobody.
//!
//! Grants come from the server, a round trip behind the data for which they make room. Over a long distance
//! the room of the server's buffers is too little for that. So the rest of a long piece goes eagerly as well,
//! as far as the link needs it ([`Pace`]) and the server allows it
//! ([`Welcome::eager`](protocol::link::Welcome)). Mostly the buffers are free again by the time it arrives;
//! what finds no room is set aside there.
//!
//! Where the server has a cache, what it has need not be sent ([`Knowledge`]): a chunk then has no bytes. All
//! that is said above holds for it as well.

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

use super::end::EndReason;
use super::knowledge::{Block, CacheUse, Knowledge};
use super::ledger::{self, Ledger, MOST_CHANGED};
use super::pace::Pace;
use super::regions::{ClientMemory, Span};
use super::schedule::{Schedule, Upload};

/// Fewest bytes of a chunk, where the piece is that long.
const MIN_CHUNK: u64 = 256 << 10;
/// The same as long as nothing is known of the link: what a connection sends in its first round trip.
const FIRST_CHUNK: u64 = 14 << 10;
/// Most bytes of a chunk.
const MAX_CHUNK: u64 = 1 << 20;
/// Data of more bytes than this is not sent eagerly behind other data of its stream, where the server is
/// near: its grant will be here by the time of its turn, and what comes before its room is copied once more.
const SHORT: u64 = 64 << 10;
/// Bytes of the window that are kept for data that is shorter than [`EAGER_PIECE`].
const FOR_SHORT: u64 = EAGER / 8;
/// Marks the queue of a command that names no stream, whose number is the command's: its data (a module's
/// image, say) waits for no other command's.
const NO_STREAM: u64 = 1 << 63;

/// A piece of `In` data, as far as no connection has it yet.
#[derive(Debug)]
struct Job<M> {
    seq: u64,
    piece: u32,
    span: Span<M>,
    at: u64,
    /// Bytes of a chunk, in its first part and behind that.
    first_chunk: u64,
    chunk: u64,
    /// Bytes before this offset go without a grant: they are counted in [`Flows::unplaced`].
    eager: u64,
    late: bool,
    /// Bytes before this offset may be sent, because the server has said so.
    granted: u64,
    /// What is known of its blocks. Empty: it has nothing to do with the cache.
    blocks: Vec<Block>,
    /// It may wait for answers about them.
    patient: bool,
}

impl<M> Job<M> {
    /// Whether the server takes more of it.
    fn has_room(&self) -> bool {
        self.at < self.eager.max(self.granted)
    }

    /// Whether more of it may go without a grant than was decided at first. The server expects shorter pieces
    /// as they were announced.
    fn may_go_ahead(&self) -> bool {
        !self.late && self.span.len() > EAGER_PIECE
    }

    /// The block that comes next.
    fn block(&self) -> Option<&Block> {
        self.blocks.get((self.at / CACHE_BLOCK) as usize)
    }

    /// Whether it is to wait until the server has said whether it has the next block, or what is left of it.
    fn awaits_answer(&self, waits: bool) -> bool {
        waits && self.patient && self.block() == Some(&Block::Asked)
    }

    /// Whether all of the block at `offset` was given out.
    fn is_past(&self, offset: u64) -> bool {
        self.at >= self.span.len().min(offset.saturating_add(CACHE_BLOCK))
    }

    fn may_send(&self, waits: bool) -> bool {
        self.has_room() && !self.awaits_answer(waits)
    }

    fn to_note(&self, flow: u64) -> (u64, u32, ledger::Job) {
        let Job { seq, piece, at, eager, granted, .. } = *self;
        (seq, piece, ledger::Job { flow, at, eager, granted })
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
        let chunk = if eager && self.at < EAGER_PIECE { self.first_chunk } else { self.chunk };
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
    /// The whole piece; of a question, the block that it is about.
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
    /// Flows whose first piece waits for a grant or for room in the window of a far link, whichever comes
    /// first. Some may have gone on or be gone since.
    held: VecDeque<u64>,
    /// Bytes that go eagerly and that the server has not placed.
    unplaced: u64,
    pace: Pace,
    knowledge: Knowledge,
    /// Questions for the server.
    asks: VecDeque<Chunk<M>>,
    /// Pieces of which more was given out, granted or made eager since that was last noted, if it is.
    changed: Option<Vec<(u64, u32, ledger::Job)>>,
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
            changed: None,
            flow: 0,
            connections: connections as u64,
        }
    }

    /// The same, and what is done is [noted](Schedule::note).
    pub(in crate::bridge) fn noted(self) -> Flows<M> {
        Flows { changed: Some(Vec::new()), ..self }
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
            if let Some(changed) = &mut self.changed {
                changed.push(job.to_note(number));
            }
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
            if carries == Carries::Nothing {
                self.knowledge.through(len);
            } else {
                self.pace.leaves((chunk.seq, chunk.piece, chunk.at), len, now);
                // After a pause nothing is known of the link any more.
                self.wait_no_more(waits);
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

    /// Checks in each turn whether the server still answers. If it does not, this returns true, and data that
    /// was waiting for its answers is sent.
    pub(in crate::bridge) fn look(&mut self, now: Instant) -> bool {
        let waited = self.waits();
        self.knowledge.look(now, &self.pace);
        self.wait_no_more(waited);
        waited && !self.waits()
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
        // The answer would be of no use.
        if self.job_mut(seq, piece).is_none_or(|job| job.is_past(offset)) {
            self.knowledge.not_asked();
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

    /// Notes what is known of a block. Gives the flow whose first piece it is of. What the server says of
    /// blocks that it was not asked about is of no interest.
    fn note(&mut self, DataKnown { seq, offset, piece, known }: DataKnown) -> Option<u64> {
        let number = *self.places.get(&(seq, piece))?;
        let job = self.job_mut(seq, piece)?;
        if !offset.is_multiple_of(CACHE_BLOCK) || job.is_past(offset) {
            return None;
        }
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

    /// Whether nothing is known of the link yet, and it may be a long one. Then each connection should be
    /// given a chunk before one is given two.
    pub(in crate::bridge) fn is_unknown(&self) -> bool {
        self.pace.may_be_far() && self.link().is_none()
    }

    /// Bytes a second that the link carries, if that is known.
    pub(in crate::bridge) fn link(&self) -> Option<u64> {
        self.pace.link()
    }

    /// The connections are other ones, perhaps over another link.
    pub(in crate::bridge) fn relinked(&mut self) {
        let waited = self.waits();
        self.pace.forget();
        self.wait_no_more(waited);
    }

    /// The server has a chunk, of which `crossed` bytes came over the link.
    pub(in crate::bridge) fn arrived(&mut self, chunk: &Chunk<M>, crossed: u64) {
        self.arrived_at(chunk, crossed, Instant::now);
    }

    fn arrived_at(&mut self, chunk: &Chunk<M>, crossed: u64, now: impl FnOnce() -> Instant) {
        if chunk.sends() == 0 {
            return;
        }
        if chunk.carries == (Carries::Bytes { keep: true }) {
            self.knowledge.through(chunk.len.into());
        }
        let waited = self.waits();
        if self.pace.arrives(chunk.seq, chunk.piece, chunk.at, (chunk.len.into(), crossed), now) {
            // Those that began to wait before are not held yet.
            for (number, flow) in &mut self.flows {
                if !flow.held && flow.jobs.front().is_some_and(|job| !job.has_room() && job.may_go_ahead()) {
                    flow.held = true;
                    self.held.push_back(*number);
                }
            }
            self.refill();
        }
        self.wait_no_more(waited);
    }

    /// The first piece of a flow may not be sent now. Sends more of it eagerly, if the window has room. Over
    /// a near link grants are here soon, and the window is left to the first parts of pieces.
    fn hold(&mut self, number: u64) {
        if !self.pace.is_far() {
            return;
        }
        let Some(flow) = self.flows.get_mut(&number) else { return };
        if !flow.jobs.front().is_some_and(Job::may_go_ahead) {
            return;
        }
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
            if job.has_room() || !job.may_go_ahead() {
                continue;
            }
            let len = job.chunk.min(job.span.len() - job.at);
            if self.pace.is_far() && self.unplaced + len + FOR_SHORT <= window {
                self.unplaced += len;
                job.eager = job.at + len;
                if let Some(changed) = &mut self.changed {
                    changed.push(job.to_note(number));
                }
                self.turn(number);
            } else {
                flow.held = true;
                self.held.push_back(number);
            }
        }
    }
}

impl<M: ClientMemory> Flows<M> {
    /// Goes on with pieces, in the order of their commands, of which another process has given out a part;
    /// `unplaced` eager bytes were not placed. The server is not asked whether it has them: it may have been.
    pub(super) fn restore(&mut self, pieces: Vec<(Upload<M>, ledger::Job)>, unplaced: u64) {
        self.unplaced = unplaced;
        for (Upload { seq, piece, span, late }, ledger::Job { flow, at, eager, granted }) in pieces {
            if at == span.len() {
                continue;
            }
            let (first_chunk, chunk) = (MIN_CHUNK, self.chunk_of(span.len()));
            self.places.insert((seq, piece), flow);
            let job = Job {
                seq,
                piece,
                span,
                at,
                first_chunk,
                chunk,
                eager,
                late,
                granted,
                blocks: Vec::new(),
                patient: false,
            };
            self.flows.entry(flow).or_default().jobs.push_back(job);
        }
        let mut flows: Vec<(u64, u64, bool)> = self
            .flows
            .iter()
            .filter_map(|(number, flow)| flow.jobs.front().map(|job| (job.seq, *number, job.has_room())))
            .collect();
        flows.sort_unstable();
        for (_, number, has_room) in flows {
            if has_room { self.turn(number) } else { self.hold(number) }
        }
    }

    /// A connection that has carried nothing sends few bytes in its first round trips, so all of them send.
    fn first_chunk_of(&self, len: u64) -> u64 {
        if self.is_unknown() { (len / self.connections).clamp(FIRST_CHUNK, MIN_CHUNK) } else { MIN_CHUNK }
    }

    fn chunk_of(&self, len: u64) -> u64 {
        (len / (8 * self.connections)).clamp(MIN_CHUNK, MAX_CHUNK)
    }
}

impl<M: ClientMemory> Schedule for Flows<M> {
    type Memory = M;
    const COMMANDS_AHEAD: Option<u64> = None;

    fn is_acknowledged(&self) -> bool {
        true
    }

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
        let (first_chunk, chunk) = (self.first_chunk_of(len), self.chunk_of(len));
        let flow = self.flows.entry(self.flow).or_default();
        let wish = len.min(EAGER_PIECE);
        let at_once = !late && (len <= SHORT || flow.jobs.is_empty());
        // The grant may come a round trip later than its turn. (Of longer pieces, what goes ahead of the
        // grant is decided when it is their turn.)
        let behind = !late && len <= EAGER_PIECE && self.pace.may_be_far();
        let window = if at_once { Some(self.pace.window()) } else { None };
        let window = window.or(behind.then(|| self.pace.window() - FOR_SHORT));
        let eager = window.filter(|window| self.unplaced + wish <= *window).map_or(0, |_| wish);
        self.unplaced += eager;
        // The server tells of longer pieces, and of late ones, without being asked.
        let ask = eager == 0 && !late && len <= EAGER_PIECE;
        // What earlier work may still write has no hash yet.
        let blocks = if late { Vec::new() } else { self.knowledge.blocks(seq, piece, len, &self.pace) };
        let patient = self.knowledge.may_wait(&self.pace);
        let job =
            Job { seq, piece, span, at: 0, first_chunk, chunk, eager, late, granted: 0, blocks, patient };
        if let Some(changed) = &mut self.changed {
            changed.push(job.to_note(self.flow));
        }
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
        if let Some(changed) = &mut self.changed {
            changed.push(job.to_note(*number));
            if changed.len() > MOST_CHANGED {
                return Err(EndReason::Server("it sent too many grants in a frame".to_owned()));
            }
        }
        if at == 0 && job.has_room() {
            let number = *number;
            self.turn(number);
        }
        Ok(())
    }

    fn note(&mut self, ledger: &mut Ledger) {
        if let Some(changed) = &mut self.changed {
            changed.drain(..).for_each(|(seq, piece, job)| ledger.job(seq, piece, job));
            ledger.unplaced(self.unplaced);
        }
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
mod tests;
