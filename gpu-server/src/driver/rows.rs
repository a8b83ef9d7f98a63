//! A box in device memory: rows at a pitch, in slices. Row after row, its bytes count as one packed range.

use protocol::Status;
use protocol::ops::copy::Pitched;

/// A box. See the module.
#[derive(Debug, Clone, Copy, PartialEq)]
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

/// Consecutive rows of one slice, or consecutive slices, or a part of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Address of the first byte.
    pub at: u64,
    /// Offset of the first byte from the beginning of the walk, in packed bytes.
    pub offset: u64,
    /// Bytes per row.
    pub width: u64,
    /// Number of rows, per slice.
    pub rows: u64,
    /// Number of slices. More than one only if there are [whole rows](Rows::rows_per_slice) between them.
    pub slices: u64,
}

impl Part {
    /// The slices of this part of `rows`: the address of each, and its offset like [`offset`](Self::offset).
    pub fn planes(self, rows: &Rows) -> impl Iterator<Item = (u64, u64)> {
        let (apart, packed) = (rows.slice, self.width * self.rows);
        (0..self.slices).map(move |z| (self.at + z * apart, self.offset + z * packed))
    }
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

    /// How many rows there are from one slice to the next, as drivers describe boxes. `None` if that is not a
    /// whole number: then only the slices are such boxes.
    pub fn rows_per_slice(&self) -> Option<u64> {
        let pitch = self.pitch.max(self.width);
        let rows = self.slice.checked_div(pitch)?;
        (rows * pitch == self.slice && rows >= self.height).then_some(rows)
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
        let is_regular = self.rows_per_slice().is_some();
        while at < end {
            let (row, column) = (at / self.width, at % self.width);
            let (z, y) = (row / self.height, row % self.height);
            let address = self.at + z * self.slice + y * self.pitch + column;
            let left = (end - at) / self.width;
            let whole = left.min(self.height - y);
            let (width, rows, slices) = match (column, whole) {
                (0, 1..) if y == 0 && is_regular && left / self.height > 1 => {
                    (self.width, self.height, left / self.height)
                }
                // Rows without a gap are one.
                (0, 1..) if self.pitch == self.width => (whole * self.width, 1, 1),
                (0, 1..) => (self.width, whole, 1),
                _ => ((self.width - column).min(end - at), 1, 1),
            };
            each(Part { at: address, offset: at - offset, width, rows, slices })?;
            at += width * rows * slices;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_visit_every_byte_once_in_packed_order() {
        for (pitch, slice) in [(10, 100), (10, 95), (7, 21), (7, 28)] {
            let rows = Rows { at: 1000, pitch, slice, width: 7, height: 3, depth: 3 };
            assert_eq!(rows.sizes(), Ok((63, 2 * slice + 2 * pitch + 7)));
            for (offset, len) in [(0, 63), (0, 42), (3, 50), (7, 7), (20, 43), (21, 42), (62, 1), (0, 0)] {
                let mut seen = Vec::new();
                let walked: Result<(), ()> = rows.parts(offset, len, |p| {
                    assert_eq!(p.offset, seen.len() as u64);
                    let lines = (0..p.slices).flat_map(|z| (0..p.rows).map(move |r| z * slice + r * pitch));
                    seen.extend(lines.flat_map(|line| (0..p.width).map(move |b| p.at + line + b)));
                    Ok(())
                });
                walked.unwrap();
                let of = |i| 1000 + i / 21 * slice + i % 21 / 7 * pitch + i % 7;
                let want: Vec<u64> = (offset..offset + len).map(of).collect();
                assert_eq!(seen, want, "{pitch} {slice} {offset} {len}");
            }
        }
    }

    #[test]
    fn regular_slices_are_one_part() {
        let parts = |rows: &Rows| {
            let mut parts = Vec::new();
            rows.parts(0, rows.sizes()?.0, |part| {
                parts.push((part.rows, part.slices));
                Ok::<(), Status>(())
            })?;
            Ok::<_, Status>(parts)
        };
        let regular = Rows { at: 0, pitch: 16, slice: 64, width: 8, height: 3, depth: 5 };
        assert_eq!(parts(&regular), Ok(vec![(3, 5)]));
        assert_eq!(parts(&Rows { slice: 65, ..regular }), Ok(vec![(3, 1); 5]));
        assert_eq!(parts(&Rows { depth: 1, ..regular }), Ok(vec![(3, 1)]));
        // The pitch of a single row says nothing.
        assert_eq!(parts(&Rows { pitch: 0, height: 1, ..regular }), Ok(vec![(1, 5)]));
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
