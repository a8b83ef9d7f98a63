//! How much work of a session is under way, and how long it takes: without I/O, in ns of any clock.
//!
//! Work is known in batches: what lies between two fences of a stream.

/// Device time in ns that a metered session has unfinished at most.
const DEPTH: u64 = 4_000_000;
/// Before anything is known of how long work takes, so many pieces are unfinished at most.
const UNKNOWN: u64 = 2;
/// Waits for unfinished work are as long as it should take, twice, within these limits in ns.
const LEAST_WAIT: u64 = 5_000_000;
const MOST_WAIT: u64 = 250_000_000;

/// How long a batch takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takes {
    /// As long as it does.
    Measured,
    /// So many ns, of a device that imitates time.
    Stated(u64),
    /// Nobody knows how much it is: it was enqueued while the gate was open.
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

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Fenced pieces that are not finished, and the time in ns that they are said to take.
    unfinished: u64,
    stated: u64,
    /// ns that a piece takes on average; 0: unknown.
    average: u64,
    /// ns that the longest of the latest pieces took.
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

    /// A batch that was fenced at `begun` is finished. Returns the ns that it took.
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

    /// Pieces of fenced work that are not finished.
    pub(crate) fn unfinished(&self) -> u64 {
        self.unfinished
    }

    /// ns that unfinished work is said to take.
    pub(crate) fn stated(&self) -> u64 {
        self.stated
    }

    /// ns that the longest of the latest pieces took.
    pub(crate) fn longest(&self) -> u64 {
        self.longest
    }

    /// ns that the unfinished work should take.
    fn left(&self) -> u64 {
        self.stated.max(self.unfinished.saturating_mul(self.average))
    }

    /// Whether so much is unfinished that a metered session adds nothing.
    pub(crate) fn is_deep(&self) -> bool {
        let unknown = self.average == 0 && self.stated == 0;
        self.unfinished > 0 && (self.left() >= DEPTH || unknown && self.unfinished >= UNKNOWN)
    }

    /// Longest time in ns that a metered session waits for unfinished work. Then it continues anyway, because that work may be waiting for the next command.
    pub(crate) fn patience(&self) -> u64 {
        self.left().saturating_mul(2).clamp(LEAST_WAIT, MOST_WAIT)
    }
}
