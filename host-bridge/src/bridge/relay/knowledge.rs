//! What the server has of the session's data, and when it is worth waiting to be told.
//!
//! A piece of data is cut into blocks. Their hashes are computed beside everything else, and the server is
//! asked about them while what comes before them is being sent. When a block's turn comes before the answer,
//! there is a choice: to send it all the same, or to wait. It is sent as long as the last answers were mostly
//! that the server does not have it, so that data which is new is not delayed. Once the server has had a
//! block, it will have the next, too, and its answer is waited for, unless sending takes much less time than
//! that (`docs/decisions/0131-short-data-does-not-wait-for-the-cache.md`).
//!
//! Over a fast link, hashes take as long as sending, so no block is asked about. How fast it is is known from
//! what arrived ([`Pace`]). So a session's first bytes are sent in any case; what comes behind them waits for
//! the server's answer, or until they have shown that the link is fast.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use protocol::link::CACHE_BLOCK;

use super::pace::Pace;

/// Shorter pieces are sent: each is one of many, or not worth a question.
const LEAST: u64 = 32 << 10;
/// Bytes of blocks that the server is asked about and that have not been sent. A server keeps twice as much.
const MOST_ASKED: u64 = 32 << 20;
/// Most questions that the server has not answered. Its disk may take seconds for one, and what it is not
/// expected to have is sent meanwhile. Some servers end the session at twice as many.
const MOST_UNANSWERED: usize = 2048;
/// If the server answers nothing for so long, and nothing arrives, its disk may hang: what waits for answers
/// is sent until it answers again. Before that, questions may stand behind data that a slow link carries.
const PATIENCE: Duration = Duration::from_secs(3);
/// Blocks that may wait to be asked about. A client that names much memory in many commands has more: those
/// are sent.
const MOST_QUEUED: u64 = 1 << 16;
/// How many answers that the server has a block make up for as many that it does not.
const MOST_SCORE: i32 = 4;

/// When a session asks what its server has in its cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheUse {
    /// Never: everything is sent
    Never,
    /// Over links that carry less than a GiB a second
    Slow,
    /// Over every link. For tests
    Always,
}

/// What is known of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    /// The server has not been asked.
    Unasked,
    /// The server is being asked.
    Asked,
    /// The server has it.
    Known,
    /// The server does not have it.
    Missing,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Knowledge {
    cache: CacheUse,
    /// Blocks to ask about, in the order of their commands: command, piece, offset.
    queue: VecDeque<(u64, u32, u64)>,
    /// Bytes of blocks that the server was asked about and that have not been sent.
    asked: u64,
    /// Questions that the server has not answered.
    unanswered: usize,
    /// Bytes of pieces whose blocks the server is asked about, as far as they have neither arrived nor turned
    /// out to be known.
    line: u64,
    /// Above 0: the server is expected to have what comes.
    score: i32,
    /// Answers so far.
    answers: u64,
    /// While there are questions: answers so far and bytes that have arrived, as they were when they were
    /// first found so, and when that was.
    progress: Option<((u64, u64), Instant)>,
    /// The server has answered nothing for long.
    silent: bool,
}

impl Knowledge {
    pub(super) fn new(cache: CacheUse) -> Knowledge {
        Knowledge {
            cache,
            queue: VecDeque::new(),
            asked: 0,
            unanswered: 0,
            line: 0,
            score: 1,
            answers: 0,
            progress: None,
            silent: false,
        }
    }

    /// The blocks of a piece of `len` bytes, none if the server is not asked about it.
    pub(super) fn blocks(&mut self, seq: u64, piece: u32, len: u64, pace: &Pace) -> Vec<Block> {
        let asks = match self.cache {
            CacheUse::Never => false,
            CacheUse::Slow => !pace.is_fast(),
            CacheUse::Always => true,
        };
        if !asks || len < LEAST {
            return Vec::new();
        }
        let count = len.div_ceil(CACHE_BLOCK);
        if self.queue.len() as u64 + count > MOST_QUEUED {
            return Vec::new();
        }
        self.line += len;
        self.queue.extend((0..count).map(|block| (seq, piece, block * CACHE_BLOCK)));
        vec![Block::Unasked; count as usize]
    }

    /// The next block to ask about.
    pub(super) fn next(&mut self) -> Option<(u64, u32, u64)> {
        let enough = self.asked >= MOST_ASKED || self.unanswered >= MOST_UNANSWERED;
        if enough { None } else { self.queue.pop_front() }
    }

    /// The server is being asked about a block of `len` bytes.
    pub(super) fn asked(&mut self, len: u64) {
        self.asked += len;
        self.unanswered += 1;
    }

    /// It is not asked after all.
    pub(super) fn not_asked(&mut self) {
        self.unanswered = self.unanswered.saturating_sub(1);
    }

    /// A block of `len` bytes has been given out to be sent.
    pub(super) fn passed(&mut self, block: Block, len: u64) {
        if block != Block::Unasked {
            self.asked = self.asked.saturating_sub(len);
        }
    }

    /// So many bytes of such a piece have arrived, or are known to the server.
    pub(super) fn through(&mut self, len: u64) {
        // Those that another process had sent were not counted here.
        self.line = self.line.saturating_sub(len);
    }

    /// Whether what was queued last may wait for answers: sending it, and what comes before it, takes long
    /// enough.
    pub(super) fn may_wait(&self, pace: &Pace) -> bool {
        self.cache == CacheUse::Always || !pace.outpaces_answers(self.line)
    }

    /// The server has said whether it has a block.
    pub(super) fn told(&mut self, known: bool) {
        // Another process may have asked.
        self.unanswered = self.unanswered.saturating_sub(1);
        (self.answers, self.silent) = (self.answers + 1, false);
        self.score = if known { (self.score + 1).min(MOST_SCORE) } else { (self.score - 1).max(0) };
    }

    /// Checks whether the server still answers. The relay calls this in each turn.
    pub(super) fn look(&mut self, now: Instant, pace: &Pace) {
        // Tests count what is sent, on machines that may be busy for seconds.
        if self.unanswered == 0 || self.cache == CacheUse::Always {
            (self.progress, self.silent) = (None, false);
            return;
        }
        let made = (self.answers, pace.received());
        match self.progress {
            Some((before, since)) if before == made => {
                self.silent |= now.saturating_duration_since(since) >= PATIENCE;
            }
            _ => self.progress = Some((made, now)),
        }
    }

    /// Whether the server's answers are waited for.
    pub(super) fn expects_hits(&self, pace: &Pace) -> bool {
        self.score > 0
            && !self.silent
            && match self.cache {
                CacheUse::Never => false,
                CacheUse::Slow => pace.is_slow() || pace.is_being_told(),
                CacheUse::Always => true,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_names_much_memory_again_and_again_takes_little_of_the_relays() {
        let (mut knowledge, pace) = (Knowledge::new(CacheUse::Always), Pace::new(1, 1));
        let asked: usize = (1..1000).map(|seq| knowledge.blocks(seq, 0, 64 << 30, &pace).len()).sum();
        assert_eq!((asked, knowledge.queue.len()), (MOST_QUEUED as usize, MOST_QUEUED as usize));
        assert!(knowledge.blocks(1000, 0, LEAST, &pace).is_empty());
        // What was taken up makes room.
        assert!(knowledge.next().is_some());
        assert_eq!(knowledge.blocks(1001, 0, LEAST, &pace).len(), 1);
    }

    #[test]
    fn a_server_that_takes_its_time_is_not_asked_ever_more() {
        let (mut knowledge, pace) = (Knowledge::new(CacheUse::Always), Pace::new(1, 1));
        let ask = |knowledge: &mut Knowledge, seqs: std::ops::Range<u64>| {
            let asks = |seq: &u64| {
                assert_eq!(knowledge.blocks(*seq, 0, LEAST, &pace).len(), 1);
                let asks = knowledge.next().is_some();
                if asks {
                    knowledge.asked(LEAST);
                }
                // It is sent all the same.
                knowledge.passed(if asks { Block::Asked } else { Block::Unasked }, LEAST);
                asks
            };
            seqs.filter(asks).count()
        };
        assert_eq!(ask(&mut knowledge, 0..5000), MOST_UNANSWERED);
        // Also one that is not asked in the end makes room, and what nobody asked makes none.
        knowledge.told(false);
        knowledge.not_asked();
        assert_eq!(ask(&mut knowledge, 5000..6000), 2);
        (0..2 * MOST_UNANSWERED).for_each(|_| knowledge.told(true));
        assert_eq!(ask(&mut knowledge, 6000..11000), MOST_UNANSWERED);
    }
}
