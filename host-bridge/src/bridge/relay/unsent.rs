//! Which commands' `In` data is not with the server yet. From this follows the progress word `released`: the
//! client may reuse a command's data once nobody has to send it any more.

use std::collections::BTreeMap;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    /// For each command with unsent data, by seq: how many bytes.
    commands: BTreeMap<u64, u64>,
    /// Unsent bytes of all commands together.
    bytes: u64,
}

impl Unsent {
    /// Number of commands with unsent data.
    pub(super) fn commands(&self) -> usize {
        self.commands.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds `len` bytes of command `seq`.
    pub(super) fn add(&mut self, seq: u64, len: u64) {
        self.bytes += len;
        *self.commands.entry(seq).or_default() += len;
    }

    /// Says that `len` bytes of command `seq` were sent. True: they were the command's last, so
    /// [`released`](Self::released) may have risen.
    pub(super) fn sent(&mut self, seq: u64, len: u64) -> bool {
        let Some(left) = self.commands.get_mut(&seq) else { return false };
        *left -= len;
        self.bytes -= len;
        let complete = *left == 0;
        if complete {
            self.commands.remove(&seq);
        }
        complete
    }

    /// The highest seq such that the data of all commands up to it was sent, when `last` is the last command
    /// taken.
    pub(super) fn released(&self, last: u64) -> u64 {
        self.commands.first_key_value().map_or(last, |(seq, _)| seq - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_rises_only_when_all_earlier_data_is_sent() {
        let mut unsent = Unsent::default();
        for (seq, len) in [(3, 10), (5, 20), (5, 5)] {
            unsent.add(seq, len);
        }
        assert_eq!(unsent.released(9), 2);
        assert!(!unsent.sent(5, 20) && unsent.sent(5, 5));
        assert_eq!((unsent.released(9), unsent.bytes(), unsent.commands()), (2, 10, 1));
        assert!(unsent.sent(3, 10));
        assert_eq!((unsent.released(9), unsent.commands()), (9, 0));
    }
}
