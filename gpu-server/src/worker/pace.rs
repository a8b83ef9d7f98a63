//! Tracks how much of a session's work is unfinished, and how long it takes. Without I/O, in ns of any clock.
//!
//! Work is measured in batches: everything between two fences of a stream.

/// Maximum unfinished device time of a metered session, in ns.
const DEPTH: u64 = 4_000_000;
/// Maximum number of unfinished pieces while their duration is unknown.
const UNKNOWN: u64 = 2;
/// Waits for unfinished work last twice as long as it should take, within these limits in ns.
const LEAST_WAIT: u64 = 5_000_000;
const MOST_WAIT: u64 = 250_000_000;

/// The duration of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takes {
    /// As measured.
    Measured,
    /// This many ns, for a device that imitates time.
    Stated(u64),
    /// Unknown, because it was enqueued while the gate was open.
    Backlog,
}

impl Takes {
    fn stated(self) -> u64 {
        match self {
            Takes::Stated(ns) => ns,
            Takes::Measured | Takes::Backlog => 0,
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Fenced, unfinished pieces, and their stated time in ns.
    unfinished: u64,
    stated: u64,
    /// Average duration of a piece in ns; 0: unknown.
    average: u64,
    /// Duration in ns of the longest recent piece.
    longest: u64,
    /// When the last batch ended.
    last: Option<u64>,
}

impl Pace {
    /// A batch was fenced.
    pub(crate) fn begin(&mut self, pieces: u64, takes: Takes) {
        self.unfinished += pieces;
        self.stated += takes.stated();
    }

    /// A batch that was fenced at `begun` is finished. Returns its duration in ns.
    pub(crate) fn end(&mut self, pieces: u64, takes: Takes, begun: u64, now: u64) -> u64 {
        let since = self.last.map_or(begun, |last| last.max(begun));
        self.last = Some(now);
        self.unfinished -= pieces;
        self.stated -= takes.stated();
        let took = match takes {
            Takes::Backlog => return 0,
            Takes::Stated(ns) => ns,
            Takes::Measured => now.saturating_sub(since),
        };
        let each = took / pieces.max(1);
        self.average = if self.average == 0 { each.max(1) } else { (self.average * 7 + each) / 8 };
        self.longest = each.max(self.longest - self.longest / 8);
        took
    }

    /// Number of fenced, unfinished pieces.
    pub(crate) fn unfinished(&self) -> u64 {
        self.unfinished
    }

    /// Stated time in ns of unfinished work.
    pub(crate) fn stated(&self) -> u64 {
        self.stated
    }

    /// Duration in ns of the longest recent piece.
    pub(crate) fn longest(&self) -> u64 {
        self.longest
    }

    /// Time in ns that the unfinished work should take.
    fn left(&self) -> u64 {
        self.stated.max(self.unfinished.saturating_mul(self.average))
    }

    /// Whether so much is unfinished that a metered session must add nothing.
    pub(crate) fn is_deep(&self) -> bool {
        let unknown = self.average == 0 && self.stated == 0;
        self.unfinished > 0 && (self.left() >= DEPTH || unknown && self.unfinished >= UNKNOWN)
    }

    /// Maximum time in ns that a metered session waits for unfinished work. It then continues anyway, because
    /// that work may be waiting for the next command.
    pub(crate) fn patience(&self) -> u64 {
        self.left().saturating_mul(2).clamp(LEAST_WAIT, MOST_WAIT)
    }
}
