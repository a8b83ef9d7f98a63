//! Bulk data under way: the regions that it lies in, what is still to be written to the server, what the server is expected to write.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use protocol::data::{HostRange, Place};
use protocol::link::chunk_len;

use crate::bridge::relayed::EndReason;
use crate::verbs::{RegisteredRegion, Segment};

/// Writes longer than this are signalled each: their completion is nothing beside their transfer.
const SIGNALLED: u64 = 32 << 10;

/// Granted parts of pieces at most that wait for slots.
const MAX_JOBS: usize = 1 << 18;

/// Memory of the client that the device may use. How many hold it says whether anything is under way in it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) registered: RegisteredRegion,
    pub(super) read_only: bool,
    /// The server has its key.
    granted: AtomicBool,
}

impl Region {
    pub(super) fn new(registered: RegisteredRegion, read_only: bool) -> Region {
        Region { registered, read_only, granted: AtomicBool::new(false) }
    }

    /// True at the first call: the server must be given the key.
    pub(super) fn grant(&self) -> bool {
        !self.granted.swap(true, Ordering::Relaxed)
    }
}

/// A checked range of a region; holds it.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub(super) region: Arc<Region>,
    offset: u64,
    pub(super) len: u64,
}

impl Span {
    /// Checks a range that a record names. The error is what is wrong with it.
    pub(super) fn new(
        arena: Option<&Arc<Region>>,
        regions: &HashMap<u32, Arc<Region>>,
        range: HostRange,
        write: bool,
    ) -> Result<Span, &'static str> {
        let region = match range.place {
            Place::Arena => arena.ok_or("names an arena that the channel does not have")?,
            Place::Region(id) => regions.get(&id).ok_or("names a region that is not registered")?,
        };
        if write && region.read_only {
            return Err("would write a region that is registered for reading only");
        }
        let size = region.registered.registration().len() as u64;
        let inside = range.offset.checked_add(range.len).is_some_and(|end| end <= size);
        inside
            .then(|| Span { region: Arc::clone(region), offset: range.offset, len: range.len })
            .ok_or("lies outside its memory")
    }

    fn segment(&self, at: u64, len: u32) -> Option<Segment> {
        self.region.registered.registration().slice(self.offset + at, len)
    }
}

/// A piece of `In` data, as far as it is not yet posted.
#[derive(Debug)]
struct Job {
    seq: u64,
    piece: u32,
    ticket: u64,
    span: Span,
    at: u64,
    end: u64,
    chunk: u64,
}

/// A piece that waits for grants.
#[derive(Debug)]
struct Later {
    ticket: u64,
    span: Span,
    granted: u64,
}

/// A write to be posted.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) seq: u64,
    pub(super) piece: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) source: Segment,
    pub(super) signal: bool,
    ticket: u64,
    /// Keeps the memory registered.
    span: Span,
}

/// A write that has been posted.
#[derive(Debug)]
struct Posted {
    ticket: u64,
    len: u32,
    _span: Span,
}

/// `In` data in the order of its places among the slots, what goes when it is granted, and which commands' data has all been read.
#[derive(Debug)]
pub(super) struct Inputs {
    jobs: VecDeque<Job>,
    /// Parts that were granted, in the order in which they were.
    granted: VecDeque<Job>,
    /// By command and piece: what waits for grants.
    later: HashMap<(u64, u32), Later>,
    /// For each command with data under way: its seq, and how many bytes the server does not have yet.
    tickets: VecDeque<(u64, u64)>,
    /// Bytes that the server does not have yet.
    due: u64,
    /// Ticket number of the front.
    first: u64,
    posted: Vec<Option<Posted>>,
    free: Vec<usize>,
    /// Bytes of one write at most.
    most: u64,
    queues: u64,
}

impl Inputs {
    /// For writes of at most `most` bytes over `queues` queues, `under_way` at once.
    pub(super) fn new(most: u64, queues: usize, under_way: usize) -> Inputs {
        let posted = std::iter::repeat_with(|| None).take(under_way).collect();
        let free = (0..under_way).rev().collect();
        let (jobs, tickets) = (VecDeque::with_capacity(1024), VecDeque::with_capacity(1024));
        let (granted, later) = (VecDeque::new(), HashMap::new());
        Inputs { jobs, granted, later, tickets, due: 0, first: 0, posted, free, most, queues: queues as u64 }
    }

    /// Commands whose data is under way.
    pub(super) fn len(&self) -> usize {
        self.tickets.len()
    }

    /// Bytes that the server does not have yet.
    pub(super) fn due(&self) -> u64 {
        self.due
    }

    /// Whether the server has granted data in more parts than any commands have.
    pub(super) fn is_overrun(&self) -> bool {
        self.granted.len() > MAX_JOBS
    }

    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    pub(super) fn has_granted(&self) -> bool {
        !self.granted.is_empty()
    }

    /// The ticket of command `seq`, which has `len` bytes more.
    fn ticket(&mut self, seq: u64, len: u64) -> u64 {
        self.due += len;
        match self.tickets.back_mut() {
            Some((last, left)) if *last == seq => *left += len,
            _ => self.tickets.push_back((seq, len)),
        }
        self.first + self.tickets.len() as u64 - 1
    }

    fn job(&self, seq: u64, piece: u32, ticket: u64, span: Span, at: u64, end: u64) -> Job {
        let chunk = chunk_len(end - at, self.queues, self.most);
        Job { seq, piece, ticket, span, at, end, chunk }
    }

    /// Queues one piece of data of command `seq`; pieces come in the commands' order.
    pub(super) fn push(&mut self, seq: u64, piece: u32, span: Span) {
        if span.len == 0 {
            return;
        }
        let (ticket, end) = (self.ticket(seq, span.len), span.len);
        let job = self.job(seq, piece, ticket, span, 0, end);
        self.jobs.push_back(job);
    }

    /// As [`push`](Self::push), for a piece that waits for grants.
    pub(super) fn push_later(&mut self, seq: u64, piece: u32, span: Span) {
        if span.len > 0 {
            let ticket = self.ticket(seq, span.len);
            self.later.insert((seq, piece), Later { ticket, span, granted: 0 });
        }
    }

    /// The server has room for a piece's bytes before `upto`: queues those that it had not granted before.
    pub(super) fn grant(&mut self, seq: u64, piece: u32, upto: u64) {
        let Some(later) = self.later.get_mut(&(seq, piece)) else { return };
        let (at, end) = (later.granted, upto.min(later.span.len));
        if end <= at {
            return;
        }
        later.granted = end;
        let (ticket, span) = (later.ticket, later.span.clone());
        if end == span.len {
            self.later.remove(&(seq, piece));
        }
        let job = self.job(seq, piece, ticket, span, at, end);
        self.granted.push_back(job);
    }

    /// The next write of data that has its place among the slots.
    pub(super) fn next_chunk(&mut self) -> Option<Chunk> {
        cut(&mut self.jobs)
    }

    /// The next write of granted data.
    pub(super) fn next_granted(&mut self) -> Option<Chunk> {
        cut(&mut self.granted)
    }

    /// The chunk is about to be posted: its token, to be given to [`written`](Self::written). `None`: too many are under way.
    pub(super) fn token(&mut self, chunk: &Chunk) -> Option<u64> {
        let token = self.free.pop()?;
        self.posted[token] = Some(Posted { ticket: chunk.ticket, len: chunk.len, _span: chunk.span.clone() });
        Some(token as u64)
    }

    pub(super) fn has_tokens(&self) -> bool {
        !self.free.is_empty()
    }

    /// A write is done. True: a command's data is complete, so [`released`](Self::released) may have risen.
    pub(super) fn written(&mut self, token: u64) -> bool {
        let Some(posted) = self.posted.get_mut(token as usize).and_then(Option::take) else { return false };
        self.free.push(token as usize);
        if let Some((_, left)) = self.tickets.get_mut((posted.ticket - self.first) as usize) {
            *left -= u64::from(posted.len);
            self.due -= u64::from(posted.len);
        }
        let before = self.first;
        while let Some((_, 0)) = self.tickets.front() {
            self.tickets.pop_front();
            self.first += 1;
        }
        self.first != before
    }

    /// The highest seq such that the data of all commands up to it has been read, when `last` is the last command taken.
    pub(super) fn released(&self, last: u64) -> u64 {
        self.tickets.front().map_or(last, |(seq, _)| seq - 1)
    }
}

/// Cuts the next write off a queue.
fn cut(jobs: &mut VecDeque<Job>) -> Option<Chunk> {
    let job = jobs.front_mut()?;
    let len = (job.end - job.at).min(job.chunk);
    let source = job.span.segment(job.at, len as u32)?;
    let (seq, piece, offset, ticket) = (job.seq, job.piece, job.at, job.ticket);
    let span = job.span.clone();
    job.at += len;
    if job.at == job.end {
        jobs.pop_front();
    }
    let signal = len > SIGNALLED || jobs.is_empty();
    Some(Chunk { seq, piece, offset, len: len as u32, source, signal, ticket, span })
}

/// `Out` data of one command.
#[derive(Debug)]
struct Expected {
    _spans: Vec<Span>,
    received: u64,
    total: u64,
}

/// Data that commands expect from the server.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    commands: HashMap<u64, Expected>,
    /// Bytes that have not come yet.
    due: u64,
}

impl Outputs {
    pub(super) fn len(&self) -> usize {
        self.commands.len()
    }

    /// Bytes that have not come yet, if the server sends all that commands name.
    pub(super) fn due(&self) -> u64 {
        self.due
    }

    /// Expects a piece of command `seq`'s data.
    pub(super) fn expect(&mut self, seq: u64, span: Span) {
        let total = span.len;
        self.due += total;
        let expected = self.commands.entry(seq).or_insert_with(|| Expected {
            _spans: Vec::with_capacity(1),
            received: 0,
            total: 0,
        });
        expected.total += total;
        expected._spans.push(span);
    }

    /// The server has written `len` bytes for the command whose seq has these lower bits; `last` is the last command taken.
    pub(super) fn placed(&mut self, low: u32, len: u32, last: u64) -> Result<(), EndReason> {
        let wrong = |what: &str| {
            Err(EndReason::Server(format!("it wrote {len} bytes for command …{low:#x}, {what}")))
        };
        let Some(seq) = last.checked_sub(u64::from((last as u32).wrapping_sub(low))) else {
            return wrong("which was not sent");
        };
        let Some(expected) = self.commands.get_mut(&seq).filter(|_| len > 0) else {
            return wrong("which expects none");
        };
        if u64::from(len) > expected.total - expected.received {
            return wrong("more than it expects");
        }
        expected.received += u64::from(len);
        self.due -= u64::from(len);
        Ok(())
    }

    /// The server says that it has written `bytes` bytes for `seq` in all. True: they are all here, and the command is forgotten.
    pub(super) fn settle(&mut self, seq: u64, bytes: u64) -> Result<bool, EndReason> {
        let wrong = |what: String| {
            Err(EndReason::Server(format!(
                "it says that {bytes} bytes were written for command {seq}, {what}"
            )))
        };
        let Some(Expected { received, total, .. }) = self.commands.get(&seq) else {
            return wrong("which expects none".into());
        };
        if bytes > *total || *received > bytes {
            return wrong(format!("which expects {total} and has got {received}"));
        }
        if *received < bytes {
            return Ok(false);
        }
        self.due -= *total - *received;
        self.commands.remove(&seq);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expecting(seqs: &[(u64, u64)]) -> Outputs {
        let commands = seqs
            .iter()
            .map(|(seq, total)| (*seq, Expected { _spans: Vec::new(), received: 0, total: *total }));
        Outputs { commands: commands.collect(), due: seqs.iter().map(|(_, total)| total).sum() }
    }

    #[test]
    fn the_lower_half_of_a_seq_finds_its_command() {
        let mut outputs = expecting(&[(0xffff_ffff, 10), (0x1_0000_0001, 10)]);
        outputs.placed(0xffff_ffff, 10, 0x1_0000_0002).unwrap();
        outputs.placed(1, 4, 0x1_0000_0002).unwrap();
        assert!(outputs.settle(0xffff_ffff, 10).unwrap());
        assert!(!outputs.settle(0x1_0000_0001, 10).unwrap());
    }

    #[test]
    fn writes_that_no_command_expects_are_the_servers_fault() {
        let mut outputs = expecting(&[(5, 10)]);
        for (low, len, last) in [(5, 0, 7), (6, 1, 7), (8, 1, 7), (5, 11, 7), (u32::MAX, 1, 7)] {
            assert!(outputs.placed(low, len, last).is_err(), "{low}");
        }
        let mut outputs = expecting(&[(5, 10)]);
        assert!(outputs.settle(5, 11).is_err() && outputs.settle(4, 0).is_err());
        outputs.placed(5, 6, 5).unwrap();
        assert!(outputs.settle(5, 5).is_err());
        assert!(!outputs.settle(5, 10).unwrap());
        outputs.placed(5, 4, 5).unwrap();
        assert!(outputs.settle(5, 10).unwrap() && outputs.settle(5, 10).is_err());
    }

    #[test]
    fn bytes_are_due_until_they_come_or_are_said_not_to_come() {
        let mut outputs = expecting(&[(5, 10), (6, 20)]);
        outputs.placed(5, 4, 6).unwrap();
        assert_eq!(outputs.due(), 26);
        assert!(outputs.settle(5, 4).unwrap());
        assert_eq!(outputs.due(), 20);
        assert!(outputs.placed(6, 21, 6).is_err());
        assert!(outputs.settle(6, 0).unwrap());
        assert_eq!(outputs.due(), 0);
    }
}
