//! Where the program may write while the device works, and when its changes are sent.
//!
//! One store may need two pages at the same time, because its bytes lie in both. With only one of them it
//! would stop at the other one forever. So if the program has changed nothing in either of two neighboring
//! pages when it is at the first one again, it can write to both.

use std::time::{Duration, Instant};

use client::pages::PAGE;

/// The shortest and the longest time between a write and sending it. It becomes longer while the program
/// writes to the same blocks again and again, because each time costs a fault.
const SOON: Duration = Duration::from_micros(30);
const LATER: Duration = Duration::from_micros(240);

/// When the program's changes are sent.
pub(crate) struct Publishing {
    /// When the program was allowed to write, unless everything has been sent.
    since: Option<Instant>,
    pause: Duration,
    /// The page at which it was allowed to write last, and the one before, as far as nothing was changed
    /// since.
    unchanged: [Option<u64>; 2],
    /// Where it could write last.
    last: u64,
}

impl Publishing {
    pub const fn new() -> Publishing {
        Publishing { since: None, pause: SOON, unchanged: [None; 2], last: 0 }
    }

    /// When the program's changes are due, unless everything has been sent.
    pub fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + self.pause)
    }

    /// Notes that everything is being sent.
    pub fn sent(&mut self) {
        self.since = None;
    }

    /// Notes that the program had changed something.
    pub fn sent_changes(&mut self) {
        self.unchanged = [None; 2];
    }

    /// Notes that the program may write to a page. Returns the other page that a store there needs as well,
    /// if it seems to need one.
    pub fn allowed(&mut self, page: u64) -> Option<u64> {
        let [last, before] = self.unchanged;
        let other = if last == Some(page) { before } else { last.filter(|_| before == Some(page)) };
        let neighbor = other.filter(|other| other.abs_diff(page) == PAGE as u64);
        if last != Some(page) {
            self.unchanged = [Some(page), last];
        }
        let again = page == self.last || neighbor.is_some();
        self.pause = if again { (self.pause * 2).min(LATER) } else { SOON };
        (self.since, self.last) = (Some(Instant::now()), page);
        neighbor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0x10_0000;
    const B: u64 = A + PAGE as u64;

    #[test]
    fn a_store_into_two_pages_gets_both() {
        for (first, second) in [(A, B), (B, A)] {
            let mut publishing = Publishing::new();
            assert_eq!([first, second].map(|page| publishing.allowed(page)), [None; 2]);
            assert_eq!(publishing.allowed(first), Some(second));
            // Whichever it stops at, if it could not go on in time.
            assert_eq!(
                [second, first, first].map(|page| publishing.allowed(page)),
                [Some(first), Some(second), Some(second)]
            );
        }
    }

    #[test]
    fn pages_that_the_program_has_changed_are_written_one_after_the_other() {
        let mut publishing = Publishing::new();
        for _ in 0..4 {
            for page in [A, B] {
                assert_eq!(publishing.allowed(page), None);
                publishing.sent_changes();
            }
        }
    }

    #[test]
    fn pages_apart_are_written_one_after_the_other() {
        let mut publishing = Publishing::new();
        let far = B + PAGE as u64;
        assert_eq!([A, far, A, far, B, A].map(|page| publishing.allowed(page)), [None; 6]);
    }
}
