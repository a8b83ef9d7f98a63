//! A box in device memory: rows at a pitch, in slices. Row after row, its bytes count as one packed range.

use protocol::Status;
use protocol::ops::copy::Pitched;

/// A box. See the module.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Address of the first byte.
    pub at: u64,
    /// Bytes from one row to the next.
    pub pitch: u64,
    /// Bytes from one slice to the next.
    pub slice: u64,
    /// Bytes per row.
    pub width: u64,
    /// Rows per slice.
    pub height: u64,
    /// Number of slices.
    pub depth: u64,
}

/// Consecutive rows of one slice, or a part of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Address of the first byte.
    pub at: u64,
    /// Offset of the first byte from the beginning of the walk, in packed bytes.
    pub offset: u64,
    /// Bytes per row.
    pub width: u64,
    /// Number of rows.
    pub rows: u64,
}

impl Rows {
    /// `len` contiguous bytes.
    pub fn line(at: u64, len: u64) -> Rows {
        Rows { at, pitch: len, slice: len, width: len, height: 1, depth: 1 }
    }

    /// The box of an operation.
    pub fn of(place: &Pitched, extent: [u64; 3]) -> Rows {
        let [width, height, depth] = extent;
        Rows { at: place.address, pitch: place.pitch, slice: place.slice, width, height, depth }
    }

    /// The size of the packed range, and the distance from the first to the last byte in device memory, both
    /// in bytes.
    ///
    /// # Errors
    /// `INVALID_VALUE` if rows overlap or a size overflows.
    pub fn sizes(&self) -> Result<(u64, u64), Status> {
        let sizes = || {
            let packed = self.width.checked_mul(self.height)?.checked_mul(self.depth)?;
            if packed == 0 {
                return Some((0, 0));
            }
            let rows = self.pitch.checked_mul(self.height - 1)?.checked_add(self.width)?;
            let span = self.slice.checked_mul(self.depth - 1)?.checked_add(rows)?;
            let sane =
                (self.height == 1 || self.pitch >= self.width) && (self.depth == 1 || self.slice >= rows);
            self.at.checked_add(span)?;
            sane.then_some((packed, span))
        };
        sizes().ok_or(Status::INVALID_VALUE)
    }

    /// Calls `each` for the parts of `len` packed bytes from `offset`. They lie inside the box, and
    /// [`sizes`](Self::sizes) has accepted it.
    pub fn parts<E>(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(Part) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (row, column) = (at / self.width, at % self.width);
            let (z, y) = (row / self.height, row % self.height);
            let address = self.at + z * self.slice + y * self.pitch + column;
            let whole = ((end - at) / self.width).min(self.height - y);
            let (width, rows) = match (column, whole) {
                // Rows without a gap are one.
                (0, 1..) if self.pitch == self.width => (whole * self.width, 1),
                (0, 1..) => (self.width, whole),
                _ => ((self.width - column).min(end - at), 1),
            };
            each(Part { at: address, offset: at - offset, width, rows })?;
            at += width * rows;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_visit_every_byte_once_in_packed_order() {
        let rows = Rows { at: 1000, pitch: 10, slice: 100, width: 7, height: 3, depth: 2 };
        assert_eq!(rows.sizes(), Ok((42, 127)));
        for (offset, len) in [(0, 42), (3, 20), (7, 7), (20, 2), (41, 1), (0, 0)] {
            let mut seen = Vec::new();
            let walked: Result<(), ()> = rows.parts(offset, len, |p| {
                assert_eq!(p.offset, seen.len() as u64);
                seen.extend((0..p.rows).flat_map(|r| (0..p.width).map(move |b| p.at + r * 10 + b)));
                Ok(())
            });
            walked.unwrap();
            let want: Vec<u64> =
                (offset..offset + len).map(|i| 1000 + i / 21 * 100 + i % 21 / 7 * 10 + i % 7).collect();
            assert_eq!(seen, want, "{offset} {len}");
        }
    }

    #[test]
    fn what_overlaps_or_overflows_is_refused() {
        let usual = Rows { at: 0, pitch: 8, slice: 64, width: 8, height: 8, depth: 2 };
        assert!(usual.sizes().is_ok());
        for wrong in [
            Rows { pitch: 7, ..usual },
            Rows { slice: 63, ..usual },
            Rows { height: u64::MAX, ..usual },
            Rows { at: u64::MAX, ..usual },
            Rows { width: u64::MAX, pitch: u64::MAX, ..usual },
        ] {
            assert_eq!(wrong.sizes(), Err(Status::INVALID_VALUE), "{wrong:?}");
        }
    }
}
