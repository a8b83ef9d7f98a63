//! How many blocks of managed memory one page fault fetches.

/// A sequence of faults, each at the block after the previous answer.
#[derive(Debug, Default)]
pub(super) struct Streak {
    next: u64,
    len: u64,
}

impl Streak {
    /// How many blocks to give at block `at`, at most `most`: twice as many as last time if the faults continue
    /// each other, otherwise one.
    pub fn longest(&self, at: u64, most: u64) -> u64 {
        if self.len > 0 && at == self.next { (self.len * 2).min(most) } else { 1 }
    }

    /// Records that `len` blocks were given at block `at`.
    pub fn answered(&mut self, at: u64, len: u64) {
        *self = Streak { next: at + len, len };
    }
}
