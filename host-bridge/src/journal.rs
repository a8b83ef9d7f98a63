//! What was sent on a data connection and may have to be sent again.

use std::collections::VecDeque;

use crate::framing::BadAcknowledgement;

/// Part of a stream that is sent and acknowledged as a whole.
pub trait Piece {
    /// Its bytes on the stream, header included. Never zero.
    fn stream_len(&self) -> u64;
}

impl<T: Piece + ?Sized> Piece for std::sync::Arc<T> {
    fn stream_len(&self) -> u64 {
        T::stream_len(self)
    }
}

impl Piece for Vec<u8> {
    fn stream_len(&self) -> u64 {
        self.len() as u64
    }
}

/// The pieces of one stream, from the first that the peer has not acknowledged to the last that was appended.
/// It does no I/O, and knows nothing of connections: its user takes the pieces out in order and sends them,
/// and tells it what the peer says.
#[derive(Debug)]
pub struct Journal<T> {
    pieces: VecDeque<T>,
    /// Where in the stream the first piece begins, and where the first one begins that was not taken.
    begin: u64,
    taken_to: u64,
    /// Pieces that were taken to be sent.
    taken: usize,
    /// Bytes of the next piece that the peer has already.
    skip: u64,
    acknowledged: u64,
    bytes: u64,
}

impl<T> Default for Journal<T> {
    fn default() -> Journal<T> {
        Journal {
            pieces: VecDeque::new(),
            begin: 0,
            taken_to: 0,
            taken: 0,
            skip: 0,
            acknowledged: 0,
            bytes: 0,
        }
    }
}

impl<T: Piece + Clone> Journal<T> {
    /// A journal of a stream of which `pieces` were sent, from `begin` on.
    pub fn restored(begin: u64, pieces: VecDeque<T>) -> Journal<T> {
        let bytes: u64 = pieces.iter().map(Piece::stream_len).sum();
        let (taken, taken_to) = (pieces.len(), begin + bytes);
        Journal { pieces, begin, taken_to, taken, skip: 0, acknowledged: begin, bytes }
    }

    /// Appends a piece.
    pub fn push(&mut self, piece: T) {
        self.bytes += piece.stream_len();
        self.pieces.push_back(piece);
    }

    /// Bytes of all pieces that are kept.
    pub fn kept(&self) -> u64 {
        self.bytes
    }

    /// Where in the stream the last piece ends.
    pub fn end(&self) -> u64 {
        self.begin + self.bytes
    }

    /// All pieces that are kept, from the first. One may be replaced by another with the same bytes.
    pub fn pieces_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.pieces.iter_mut()
    }

    /// The piece that [`take`](Self::take) gives.
    pub fn next(&self) -> Option<&T> {
        self.pieces.get(self.taken)
    }

    /// The next piece to be sent, and how many of its first bytes the peer has already.
    pub fn take(&mut self) -> Option<(T, u64)> {
        let piece = self.pieces.get(self.taken)?.clone();
        self.taken += 1;
        self.taken_to += piece.stream_len();
        Some((piece, std::mem::take(&mut self.skip)))
    }

    /// The peer has received the stream's first `upto` bytes. Gives the pieces that it has completely to
    /// `done`, in order. The error: so many were not sent.
    pub fn acknowledge(&mut self, upto: u64, mut done: impl FnMut(T)) -> Result<(), BadAcknowledgement> {
        let sent = self.taken_to.max(self.acknowledged);
        if upto > sent {
            return Err(BadAcknowledgement { upto, sent });
        }
        self.acknowledged = self.acknowledged.max(upto);
        while self.taken > 0
            && let Some(len) = self.pieces.front().map(Piece::stream_len)
            && self.begin + len <= upto
            && let Some(piece) = self.pieces.pop_front()
        {
            self.taken -= 1;
            self.begin += len;
            self.bytes -= len;
            done(piece);
        }
        Ok(())
    }

    /// The peer goes on behind the stream's first `received` bytes, over a new connection: what follows them
    /// is to be taken again. As [`acknowledge`](Self::acknowledge); an error too if that is not kept. (A peer
    /// may have acknowledged a part of a piece and want that again: another process of it, which knows of
    /// whole pieces only.)
    pub fn resume(&mut self, received: u64, done: impl FnMut(T)) -> Result<(), BadAcknowledgement> {
        if received < self.begin {
            return Err(BadAcknowledgement { upto: received, sent: self.taken_to });
        }
        self.acknowledge(received, done)?;
        self.taken = 0;
        self.taken_to = self.begin;
        self.skip = received - self.begin;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever part of it each link carries, the peer gets the stream once and in order, and nothing is
        /// kept in the end.
        #[test]
        fn a_stream_is_delivered_once_over_any_number_of_links(
            lens in prop::collection::vec(1usize..50, 1..20),
            cuts in prop::collection::vec(0usize..60, 0..40),
        ) {
            let mut journal = Journal::default();
            let (mut whole, mut received, mut done) = (Vec::new(), Vec::new(), 0);
            for (number, len) in lens.iter().enumerate() {
                let piece: Vec<u8> = (0..*len).map(|i| (number * 31 + i) as u8).collect();
                whole.extend_from_slice(&piece);
                journal.push(piece);
            }
            for (link, cut) in cuts.into_iter().chain([usize::MAX]).enumerate() {
                let mut left = cut;
                while let Some((piece, skip)) = journal.take() {
                    let rest = &piece[skip as usize..];
                    let n = rest.len().min(left);
                    received.extend_from_slice(&rest[..n]);
                    left -= n;
                    if n < rest.len() { break; }
                }
                if link % 2 == 0 {
                    journal.acknowledge(received.len() as u64, |_| done += 1).unwrap();
                }
                journal.resume(received.len() as u64, |_| done += 1).unwrap();
            }
            prop_assert_eq!(received, whole);
            prop_assert_eq!((done, journal.kept(), journal.next()), (lens.len(), 0, None));
        }
    }

    #[test]
    fn acknowledgements_that_cannot_be_are_errors() {
        let mut journal = Journal::default();
        journal.push(vec![1, 2, 3]);
        assert!(journal.acknowledge(1, drop).is_err(), "nothing was sent");
        journal.take();
        journal.acknowledge(2, drop).unwrap();
        journal.acknowledge(1, drop).unwrap();
        assert!(journal.acknowledge(4, drop).is_err() && journal.resume(4, drop).is_err());
        journal.resume(1, drop).unwrap();
        assert_eq!(journal.take(), Some((vec![1, 2, 3], 1)), "a part of a piece is sent again");
        journal.push(vec![4, 5]);
        journal.take();
        journal.acknowledge(4, drop).unwrap();
        assert!(journal.resume(2, drop).is_err(), "it had a whole piece");
        journal.resume(4, drop).unwrap();
        assert_eq!(journal.take(), Some((vec![4, 5], 1)));
    }
}
