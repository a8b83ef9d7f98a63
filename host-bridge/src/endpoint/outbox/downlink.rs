//! How fast the link to the bridge is, by the chunks that it acknowledges.
//!
//! A bridge need not acknowledge a chunk as soon as it has it, so most acknowledgements tell nothing of the
//! link. It must acknowledge at once what is compressed, and where that makes [`ACKNOWLEDGE_OUT`] bytes of
//! which it has not said that it has them. Only such chunks are watched.

use std::time::Instant;

use protocol::link::ACKNOWLEDGE_OUT;

use crate::link_rate::LinkRate;

/// A chunk: its stream, and where it ends there.
type Chunk = (usize, u64);

/// See the module's text.
pub(super) struct Downlink {
    rate: LinkRate<Chunk>,
    /// The watched chunk is acknowledged at once whatever has been before.
    is_compressed: bool,
    /// Bytes of each stream that the bridge has said it has.
    arrived: Vec<u64>,
}

/// A bridge that has said it has the first `arrived` bytes must say so again when it has a chunk that ends
/// there.
fn is_due(arrived: u64, end: u64) -> bool {
    end.saturating_sub(arrived) >= ACKNOWLEDGE_OUT
}

impl Downlink {
    /// For so many streams.
    pub(super) fn new(streams: usize) -> Downlink {
        Downlink { rate: LinkRate::new(), is_compressed: false, arrived: vec![0; streams] }
    }

    /// One whose link is known to carry so many bytes a second, or not known.
    #[cfg(test)]
    pub(super) fn that_carries(rate: Option<u64>) -> Downlink {
        Downlink { rate: LinkRate::that_carries(rate), ..Downlink::new(1) }
    }

    /// Bytes a second that the link carries, if that is known.
    pub(super) fn rate(&self) -> Option<u64> {
        self.rate.get()
    }

    /// A chunk is given out that ends at `end` of a stream.
    pub(super) fn leaves(&mut self, stream: usize, end: u64, is_compressed: bool, now: Instant) {
        let arrived = self.arrived.get(stream).copied().unwrap_or_default();
        if self.rate.watched().is_none() && (is_compressed || is_due(arrived, end)) {
            self.rate.leaves((stream, end), now);
            self.is_compressed = is_compressed;
        }
    }

    /// The bridge has the first `upto` bytes of a stream.
    pub(super) fn arrives(&mut self, stream: usize, upto: u64, now: impl FnOnce() -> Instant) {
        let Some(arrived) = self.arrived.get_mut(stream) else { return };
        let crossed = upto.saturating_sub(*arrived);
        *arrived = upto.max(*arrived);
        match self.rate.watched().copied().filter(|(number, _)| *number == stream) {
            Some(watched) if watched.1 <= upto => {
                self.rate.arrives(&watched, crossed, now);
            }
            watched => {
                self.rate.crosses(crossed);
                // It may have said so before the watched chunk came, and then need not say at once that this
                // has come.
                if watched.is_some_and(|(_, end)| !self.is_compressed && !is_due(upto, end)) {
                    self.rate.look_away();
                }
            }
        }
    }

    /// A stream goes on over another connection, behind its first `upto` bytes.
    pub(super) fn resumes(&mut self, stream: usize, upto: u64) {
        self.rate.forget();
        if let Some(arrived) = self.arrived.get_mut(stream) {
            *arrived = upto.max(*arrived);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn only_acknowledgements_that_must_come_at_once_tell_how_fast_the_link_is() {
        let (mut downlink, begin) = (Downlink::new(2), Instant::now());
        let after = |ms| begin + Duration::from_millis(ms);
        // A short chunk, of which the bridge says much later that it has it.
        downlink.leaves(0, MIB - 1, false, begin);
        downlink.arrives(0, MIB - 1, || unreachable!("it is not watched"));
        // One that ends a MiB, and four behind it: 5 MiB in 50 ms.
        downlink.leaves(0, 2 * MIB - 1, false, begin);
        for end in 2..6 {
            downlink.leaves(1, end * MIB, false, begin);
        }
        downlink.arrives(1, 5 * MIB, || unreachable!("another is watched"));
        downlink.arrives(0, 2 * MIB, || after(60));
        assert_eq!(
            downlink.rate(),
            Some((6 * MIB + 1) * 1000 / 60),
            "the MiB of the stream, and 5 of the other"
        );
    }

    #[test]
    fn a_bridge_that_had_told_before_need_not_tell_at_once() {
        let (mut downlink, begin) = (Downlink::new(1), Instant::now());
        downlink.leaves(0, MIB, false, begin);
        // With its next command it said that it has some, and so need not say now that it has the rest.
        downlink.arrives(0, MIB / 2, || unreachable!());
        downlink.arrives(0, MIB, || unreachable!());
        assert_eq!(downlink.rate(), None);
        // A compressed chunk it acknowledges whatever was before.
        downlink.leaves(0, MIB + 1000, true, begin);
        downlink.arrives(0, MIB + 1, || unreachable!());
        downlink.arrives(0, MIB + 1000, || begin + Duration::from_secs(1));
        downlink.leaves(0, 4 * MIB, false, begin);
        downlink.arrives(0, 4 * MIB, || begin + Duration::from_secs(1));
        assert_eq!(downlink.rate(), Some(3 * MIB / 2));
    }

    #[test]
    fn another_link_is_measured_anew() {
        let (mut downlink, begin) = (Downlink::new(1), Instant::now());
        downlink.leaves(0, 4 * MIB, false, begin);
        downlink.arrives(0, 4 * MIB, || begin + Duration::from_secs(1));
        assert_eq!(downlink.rate(), Some(4 * MIB));
        downlink.leaves(0, 8 * MIB, false, begin);
        downlink.resumes(0, 5 * MIB);
        downlink.arrives(0, 8 * MIB, || unreachable!("the outage says nothing of the link"));
        assert_eq!(downlink.rate(), None);
        // What the bridge has never had: nothing is subtracted from nothing.
        downlink.resumes(0, 0);
        downlink.arrives(7, MIB, || unreachable!());
        downlink.arrives(0, 0, || unreachable!());
    }
}
