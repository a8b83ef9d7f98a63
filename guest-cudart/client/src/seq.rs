//! Positions in a session's sequence of records.
//!
//! Every session counts its own records, so positions in two sessions have no order. A [`Seq`] therefore has
//! none at all: `<` between two of them does not compile. Whether one position has been reached is a question
//! to a [`LastSeq`], which belongs to an object of one session and answers "no" for a position in another.

use std::sync::atomic::{AtomicU64, Ordering};

/// The position of a record in the sequence of its session.
///
/// The session's number is in the upper bits, so a position is equal to no position in another session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seq(u64);

/// Bits of the number. A session that appends a record each nanosecond would need two years for them.
const BITS: u32 = 56;

impl Seq {
    /// Record `number` of the process's session `session`.
    pub(crate) fn new(session: usize, number: u64) -> Seq {
        Seq((session as u64) << BITS | number & ((1 << BITS) - 1))
    }

    /// Record `number` of session `session`, for tests.
    #[doc(hidden)]
    pub fn for_tests(session: usize, number: u64) -> Seq {
        Seq::new(session, number)
    }

    /// Record `number` of the process's session `session`, as the server of that session calls it.
    pub fn of_server(session: usize, number: u64) -> Seq {
        Seq::new(session, number)
    }

    /// The number in the session's channel.
    pub(crate) fn number(self) -> u64 {
        self.0 & ((1 << BITS) - 1)
    }

    /// Its number in a timeline: that in the channel for the first session, and a distinct one for other
    /// sessions.
    pub fn in_timeline(self) -> u64 {
        self.0
    }

    /// Whether the channel of this record's session, which has reached record `number`, has reached this
    /// record.
    #[inline]
    pub fn is_reached_at(self, number: u64) -> bool {
        self.number() <= number
    }

    /// Whether this record came right after `other` in the same session.
    pub fn is_next_after(self, other: Seq) -> bool {
        self.is_of_session_of(other) && self.0 == other.0 + 1
    }

    /// Whether both are positions in the same session.
    pub fn is_of_session_of(self, other: Seq) -> bool {
        self.0 >> BITS == other.0 >> BITS
    }

    /// Whether this record may have been appended after `other`. Between sessions that is not known.
    pub fn may_be_after(self, other: Seq) -> bool {
        !self.is_of_session_of(other) || self.0 > other.0
    }
}

/// The last of some positions in one session. It never decreases.
#[derive(Debug, Default)]
pub struct LastSeq(AtomicU64);

impl LastSeq {
    /// No position yet.
    pub const fn new() -> LastSeq {
        LastSeq(AtomicU64::new(0))
    }

    /// Notes a position, which must be in the same session as the others. Returns whether it became the last
    /// one.
    #[inline]
    pub fn raise(&self, seq: Seq) -> bool {
        self.0.fetch_max(seq.0, Ordering::AcqRel) < seq.0
    }

    /// The last one, if there is one.
    #[inline]
    pub fn get(&self) -> Option<Seq> {
        let last = self.0.load(Ordering::Acquire);
        (last != 0).then_some(Seq(last))
    }

    /// Whether it has reached a position. Always false for a position in another session.
    #[inline]
    pub fn has_reached(&self, seq: Seq) -> bool {
        self.if_reached(seq).is_some()
    }

    /// The last one, if it has reached a position. Looks once: asked by [`get`](Self::get) and then by
    /// [`has_reached`](Self::has_reached), another thread may have raised it in between, and the answers are
    /// of two positions.
    #[inline]
    pub fn if_reached(&self, seq: Seq) -> Option<Seq> {
        self.get().filter(|last| last.0 >= seq.0 && last.is_of_session_of(seq))
    }

    /// Whether it has reached another one, which belongs to the same session.
    #[inline]
    pub fn has_reached_all_of(&self, other: &LastSeq) -> bool {
        other.get().is_none_or(|other| self.has_reached(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_two_sessions_have_no_order() {
        let (first, second) = (Seq::new(0, 7), Seq::new(1, 7));
        assert_ne!(first, second);
        assert!(first.may_be_after(second) && second.may_be_after(first));
        let last = LastSeq::new();
        assert!(!last.has_reached(first) && last.get().is_none());
        assert!(last.raise(second) && !last.raise(Seq::new(1, 6)));
        assert!(
            last.has_reached(Seq::new(1, 6)) && last.has_reached(second) && !last.has_reached(Seq::new(1, 8))
        );
        assert_eq!(last.if_reached(Seq::new(1, 6)), Some(second));
        assert_eq!((last.if_reached(Seq::new(1, 8)), last.if_reached(first)), (None, None));
        assert!(!last.has_reached(first), "a higher session's record says nothing about a lower one's");
        let other = LastSeq::new();
        assert!(last.has_reached_all_of(&other) && !other.has_reached_all_of(&last));
        other.raise(first);
        assert!(!last.has_reached_all_of(&other) && !other.has_reached_all_of(&last));
    }

    #[test]
    fn nothing_is_next_after_a_record_of_another_session() {
        assert!(Seq::new(1, 9).is_next_after(Seq::new(1, 8)));
        assert!(
            !Seq::new(1, 9).is_next_after(Seq::new(1, 7)) && !Seq::new(1, 9).is_next_after(Seq::new(0, 8))
        );
    }

    #[test]
    fn a_channel_knows_its_own_numbers_only() {
        assert!(Seq::new(3, 9).is_reached_at(9) && !Seq::new(3, 9).is_reached_at(8));
        assert!(Seq::new(3, 9).may_be_after(Seq::new(3, 8)) && !Seq::new(3, 9).may_be_after(Seq::new(3, 9)));
    }
}
