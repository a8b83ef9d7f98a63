//! Boxes of device memory that travel in pieces without the client in between.
//!
//! The sending end begins the next piece as soon as it has a buffer for it, the receiving end lands each when
//! it has come. Neither waits for a stream: the client asks for this when everything before the copy is over.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use protocol::Status;
use protocol::ops::direct::{DirectReceiveAllReply, MAX_PIECE};

use super::in_place::Found;
use super::near::{Copies, Moving};
use crate::driver::call::Pending;
use crate::driver::gpu::Carrier;
use crate::driver::rows::Rows;
use crate::lock::lock;

/// A box, of which some pieces are still to be sent or to come.
pub struct Series {
    rows: Rows,
    /// Its bytes without gaps, and the distance from its first to its last byte.
    packed: u64,
    span: u64,
    /// Size of each piece but the last.
    piece: u64,
    /// The number of the next piece, and how many bytes precede it.
    number: u64,
    at: u64,
    /// What copies the pieces, and those that are being copied.
    pub(super) carrier: Arc<dyn Carrier>,
    pub(super) copies: Arc<Copies>,
}

/// One of its pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Next {
    pub(super) number: u64,
    /// Where it begins in the box without gaps.
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Series {
    /// A box that was checked, in pieces of `piece` bytes, the first of which has this number.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it is empty, for a size that pieces do not have, and for numbers that there are
    /// not.
    pub fn new(rows: Rows, piece: u64, first: u64, carrier: Arc<dyn Carrier>) -> Result<Series, Status> {
        let (packed, span) = rows.sizes()?;
        if packed == 0 || piece == 0 || piece > MAX_PIECE || first == 0 {
            return Err(Status::INVALID_VALUE);
        }
        first.checked_add(packed.div_ceil(piece)).ok_or(Status::INVALID_VALUE)?;
        Ok(Series { rows, packed, span, piece, number: first, at: 0, carrier, copies: Arc::default() })
    }

    pub(super) fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Whether none of it has begun.
    pub(super) fn is_whole(&self) -> bool {
        self.at == 0
    }

    /// How many pieces are left.
    pub(super) fn left(&self) -> u64 {
        (self.packed - self.at).div_ceil(self.piece)
    }

    /// The number after its last piece's.
    pub(super) fn end(&self) -> u64 {
        self.number + self.left()
    }

    /// The next piece, if there is one.
    pub(super) fn next(&self) -> Option<Next> {
        let len = self.piece.min(self.packed - self.at);
        (len > 0).then_some(Next { number: self.number, offset: self.at, len })
    }

    /// The next piece's turn is over.
    pub(super) fn pass(&mut self) {
        self.at += self.piece.min(self.packed - self.at);
        self.number += 1;
    }

    /// Its address and size, if it is a single row.
    pub fn line(&self) -> Option<(u64, u64)> {
        (self.packed == self.span).then_some((self.rows.at, self.span))
    }

    /// Whether it may have bytes in this range.
    pub(super) fn touches(&self, address: u64, size: u64) -> bool {
        overlap((self.rows.at, self.span), (address, size))
    }
}

fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    one.0 < other.0.saturating_add(other.1) && other.0 < one.0.saturating_add(one.1)
}

/// The memory of an end's boxes, whose pieces may be being copied.
#[derive(Default)]
pub(super) struct InMotion(Vec<(u64, u64, Arc<Copies>)>);

impl InMotion {
    pub(super) fn add(&mut self, series: &Series) {
        // Neither a box nor a copy has the others.
        self.0.retain(|(.., copies)| Arc::strong_count(copies) > 1);
        self.0.push((series.rows.at, series.span, Arc::clone(&series.copies)));
    }

    /// Copies that may use this memory.
    pub(super) fn within(&self, address: u64, size: u64) -> Vec<Arc<Copies>> {
        let touching = self.0.iter().filter(|(at, span, _)| overlap((*at, *span), (address, size)));
        touching.map(|(.., copies)| Arc::clone(copies)).collect()
    }
}

/// A box on its way out.
pub(super) struct Leaving {
    pub(super) series: Series,
    /// Until its last piece has been read, memory does not leave the device.
    pub(super) moving: Arc<Moving>,
    /// A piece could not be read: the other end gives up, too.
    pub(super) failed: Arc<AtomicBool>,
    /// Where the RDMA device reads it in place.
    pub(super) found: Option<Found>,
}

/// A box that is awaited.
pub(super) struct Awaited {
    pub(super) series: Series,
    /// When the client named it.
    pub(super) named: Instant,
    pub(super) landing: Arc<Landing>,
}

/// Answers the client, when dropped: all pieces are landed, or something has failed and none is being landed
/// any more.
pub(super) struct Landing {
    answer: Mutex<Option<Pending>>,
    left: AtomicU64,
    failed: OnceLock<Status>,
}

impl Landing {
    pub(super) fn new(series: &Series, answer: Pending) -> Arc<Landing> {
        let (answer, left) = (Mutex::new(Some(answer)), AtomicU64::new(series.left()));
        Arc::new(Landing { answer, left, failed: OnceLock::new() })
    }

    /// A piece is landed, or could not be.
    pub(super) fn landed(&self, status: Status) {
        if status.is_success() {
            self.left.fetch_sub(1, Ordering::AcqRel);
        } else {
            self.failed.get_or_init(|| status);
        }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        let Some(answer) = lock(&self.answer).take() else { return };
        answer.answer(if self.left.load(Ordering::Acquire) == 0 {
            Ok(DirectReceiveAllReply {})
        } else {
            Err(self.failed.get().copied().unwrap_or(Status::DEVICE_UNAVAILABLE))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::tests::Nothing;

    fn series(rows: Rows, piece: u64, first: u64) -> Result<Series, Status> {
        Series::new(rows, piece, first, Arc::new(Nothing))
    }

    #[test]
    fn a_box_is_cut_into_pieces_with_ascending_numbers() {
        let rows = Rows { at: 1000, pitch: 10, slice: 100, width: 7, height: 3, depth: 2 };
        let mut series = series(rows, 20, 5).unwrap();
        assert_eq!((series.left(), series.end()), (3, 8));
        let mut pieces = Vec::new();
        while let Some(next) = series.next() {
            pieces.push((next.number, next.offset, next.len));
            series.pass();
        }
        assert_eq!(pieces, [(5, 0, 20), (6, 20, 20), (7, 40, 2)]);
        assert_eq!((series.left(), series.end()), (0, 8));
        for (address, size, touches) in
            [(999, 1, false), (999, 2, true), (1126, 1, true), (1127, 1, false), (0, u64::MAX, true)]
        {
            assert_eq!(series.touches(address, size), touches, "{address} {size}");
        }
    }

    #[test]
    fn what_is_empty_or_has_no_numbers_or_too_large_pieces_is_refused() {
        let line = |len| Rows::line(1000, len);
        for (rows, piece, first) in [
            (line(0), 8, 1),
            (line(8), 0, 1),
            (line(8), MAX_PIECE + 1, 1),
            (line(8), 8, 0),
            (line(8), 8, u64::MAX),
            (line(9), 1, u64::MAX - 8),
            (Rows { width: 8, height: 2, pitch: 7, ..line(8) }, 8, 1),
        ] {
            assert_eq!(
                series(rows, piece, first).err(),
                Some(Status::INVALID_VALUE),
                "{rows:?} {piece} {first}"
            );
        }
        assert!(series(line(9), 1, u64::MAX - 9).is_ok());
    }
}
