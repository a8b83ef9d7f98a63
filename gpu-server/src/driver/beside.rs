//! Mirrors of the client's memory, for every thread of a worker: the [express lane](super::express) and
//! direct connections use them while the dispatcher is busy. Each backend has its own.

use protocol::Status;
use protocol::channel::MAX_PAYLOAD;
use protocol::ops::memory::{HostChange, HostRead, HostReadReply, WordPatch};
use protocol::wire::Bytes;

use super::watches::Watches;

/// Mirrors of the client's memory, usable from every thread of a worker. None of these methods waits for a
/// device.
pub trait Beside: Send + Sync {
    /// Whether there are mirrors, so that the methods below can be needed.
    fn is_needed(&self) -> bool;

    /// Whether the whole range is in one mirror.
    fn holds(&self, address: u64, len: u64) -> bool;

    /// Reads `bytes` from a mirror, starting at `address`.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the whole range is in one mirror.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Status>;

    /// Writes bytes of a mirror, starting at `address`. Errors as for [`Beside::read`].
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Status>;

    /// Writes words of one mirror. Errors as for [`Beside::read`], and if a word is not aligned.
    fn patch(&self, words: &[WordPatch]) -> Result<(), Status>;

    /// Changes some bytes of words in a row, in this order: `masks` says which of each. Errors as for
    /// [`Beside::patch`].
    fn change(&self, address: u64, masks: &[u8], bytes: &[u8]) -> Result<(), Status> {
        let mut at = 0;
        for row in masks.chunk_by(|a, b| (*a == 0xff) == (*b == 0xff)) {
            let words = &bytes[8 * at..8 * (at + row.len())];
            let from = address + 8 * at as u64;
            if row[0] == 0xff {
                self.write(from, words)?;
            } else {
                let patch = |(n, mask): (usize, &u8)| WordPatch {
                    address: from + 8 * n as u64,
                    mask: bits_of(*mask),
                    value: words[8 * n..8 * n + 8].try_into().map_or(0, u64::from_le_bytes),
                };
                let patches: Vec<WordPatch> = row.iter().enumerate().map(patch).collect();
                self.patch(&patches)?;
            }
            at += row.len();
        }
        Ok(())
    }

    /// What the client has of the mirrors. Its changes pass through there.
    fn watches(&self) -> &Watches;

    /// The device with this server-wide number has failed: everything that waits for its work ends with
    /// `status`, and so does everything that uses it later.
    fn fail_device(&self, number: u32, status: Status);
}

/// The bytes that a [`HostRead`] requests.
pub fn read(beside: &dyn Beside, op: &HostRead) -> Result<HostReadReply, Status> {
    if op.len as usize > MAX_PAYLOAD - 4 {
        return Err(Status::INVALID_VALUE);
    }
    let mut bytes = vec![0; op.len as usize];
    beside.read(op.address, &mut bytes)?;
    Ok(HostReadReply { bytes: Bytes(bytes) })
}

/// The bits of the bytes of a word that a mask of [`HostChange`] selects.
pub fn bits_of(mask: u8) -> u64 {
    (0..8).filter(|n| mask >> n & 1 != 0).fold(0, |bits, n| bits | 0xff << (8 * n))
}

/// Executes a [`HostChange`].
///
/// # Errors
/// As for [`Beside::change`], and `INVALID_VALUE` if the row is empty or masks and words are not as many.
pub fn change(beside: &dyn Beside, op: &HostChange<'_>) -> Result<(), Status> {
    let len = op.bytes.len() as u64;
    let inside = op.address.checked_add(len).is_some() && op.address.is_multiple_of(8);
    if op.masks.is_empty() || op.masks.len() * 8 != op.bytes.len() || !inside {
        return Err(Status::INVALID_VALUE);
    }
    beside.watches().change(beside, op.address, op.masks, op.bytes)
}
