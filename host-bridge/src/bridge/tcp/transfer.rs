//! Bulk data under way: what still has to be sent ([`Inputs`]), what is expected ([`Outputs`]), and the client memory that both refer to.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use protocol::data::{HostRange, Place};

use super::EndReason;
use super::socket::Gather;
use crate::bridge::core::Core;
use crate::memory::Pieces;

/// Bytes of a piece on a data connection at least, where the transfer is that long.
const MIN_CHUNK: u64 = 256 << 10;
/// Bytes of a piece on a data connection at most.
const MAX_CHUNK: u64 = 1 << 20;

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
        core: &Core,
        regions: &HashMap<u32, Arc<Region>>,
        range: HostRange,
        write: bool,
    ) -> Result<Span, &'static str> {
        let HostRange { place, offset, len } = range;
        match place {
            Place::Arena => {
                core.channel.view.arena(offset, len).ok_or("lies outside the arena")?;
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
    pub(super) fn gather(&self, core: &Core, at: u64, len: u64, gather: &mut Gather) {
        debug_assert!(at + len <= self.len);
        match &self.region {
            None => {
                if let Some((at, len)) = core.channel.view.arena(self.offset + at, len) {
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

/// A piece of `In` data, as far as it was not yet given to a connection.
#[derive(Debug)]
struct Job {
    seq: u64,
    piece: u32,
    ticket: u64,
    span: Span,
    at: u64,
    chunk: u64,
}

/// A part of a [`Job`] that one connection sends.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) seq: u64,
    pub(super) piece: u32,
    pub(super) ticket: u64,
    pub(super) span: Span,
    pub(super) at: u64,
    pub(super) len: u32,
}

/// `In` data in the commands' order, and which commands' data has all been sent.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    jobs: VecDeque<Job>,
    /// For each command with data under way: its seq and how many bytes are still to be sent.
    tickets: VecDeque<(u64, u64)>,
    /// Ticket number of the front.
    first: u64,
}

impl Inputs {
    /// Commands whose data is under way.
    pub(super) fn len(&self) -> usize {
        self.tickets.len()
    }

    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Queues one piece of data of command `seq`; pieces come in the commands' order. `lanes` is the number of connections to spread it over.
    pub(super) fn push(&mut self, seq: u64, piece: u32, span: Span, lanes: usize) {
        if span.len == 0 {
            return;
        }
        match self.tickets.back_mut() {
            Some((last, left)) if *last == seq => *left += span.len,
            _ => self.tickets.push_back((seq, span.len)),
        }
        let ticket = self.first + self.tickets.len() as u64 - 1;
        let chunk = (span.len / (4 * lanes as u64)).clamp(MIN_CHUNK, MAX_CHUNK);
        self.jobs.push_back(Job { seq, piece, ticket, span, at: 0, chunk });
    }

    /// The next part to send.
    pub(super) fn next_chunk(&mut self) -> Option<Chunk> {
        let job = self.jobs.front_mut()?;
        let left = job.span.len - job.at;
        // What would remain is not worth a piece of its own.
        let len = if left <= job.chunk + job.chunk / 4 { left } else { job.chunk };
        let chunk = Chunk {
            seq: job.seq,
            piece: job.piece,
            ticket: job.ticket,
            span: job.span.clone(),
            at: job.at,
            len: len as u32,
        };
        job.at += len;
        if job.at == job.span.len {
            self.jobs.pop_front();
        }
        Some(chunk)
    }

    /// Says that a chunk is sent. True: a command's data is complete, so [`released`](Self::released) may have risen.
    pub(super) fn sent(&mut self, chunk: &Chunk) -> bool {
        let index = (chunk.ticket - self.first) as usize;
        if let Some((_, left)) = self.tickets.get_mut(index) {
            *left -= u64::from(chunk.len);
        }
        let before = self.first;
        while let Some((_, 0)) = self.tickets.front() {
            self.tickets.pop_front();
            self.first += 1;
        }
        self.first != before
    }

    /// The highest seq such that the data of all commands up to it has been sent, when `last` is the last command taken.
    pub(super) fn released(&self, last: u64) -> u64 {
        self.tickets.front().map_or(last, |(seq, _)| seq - 1)
    }
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

    #[test]
    fn released_rises_only_when_all_earlier_data_is_sent() {
        let mut inputs = Inputs::default();
        inputs.push(3, 0, span(10), 4);
        inputs.push(5, 0, span(20), 4);
        inputs.push(5, 1, span(5), 4);
        let (a, b, c) =
            (inputs.next_chunk().unwrap(), inputs.next_chunk().unwrap(), inputs.next_chunk().unwrap());
        assert_eq!(inputs.released(9), 2);
        assert!(!inputs.sent(&b) && !inputs.sent(&c));
        assert_eq!(inputs.released(9), 2);
        assert!(inputs.sent(&a));
        assert_eq!((inputs.released(9), inputs.len()), (9, 0));
    }

    #[test]
    fn chunks_cover_a_transfer_once_and_in_order() {
        for len in [1, MIN_CHUNK, MIN_CHUNK + 1, 7 * MAX_CHUNK + 13, 100 * MAX_CHUNK] {
            let mut inputs = Inputs::default();
            inputs.push(1, 0, span(len), 4);
            let mut at = 0;
            while let Some(chunk) = inputs.next_chunk() {
                assert_eq!(chunk.at, at);
                assert!(u64::from(chunk.len) <= MAX_CHUNK + MAX_CHUNK / 4);
                at += u64::from(chunk.len);
                inputs.sent(&chunk);
            }
            assert_eq!((at, inputs.len()), (len, 0));
        }
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
