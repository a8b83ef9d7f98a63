//! Copies bytes between this process's memory and a device: a few in the record or the answer, many in chunks
//! through the arena.
//!
//! This module does not know about pinned or managed memory. `work::copy` does, and managed memory uses this
//! module to move its blocks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::abi::result::Result;
use crate::process::copies_ahead::{Piece, Wait};
use crate::process::stream::Stream;
use client::Status;
use client::arena::{Block, Owner};
use client::channel::MAX_PAYLOAD;
use client::counters::{self, COUNTERS};
use client::data::{HostIn, HostOut};
use client::ops::copy::{MemcpyDtoH, MemcpyDtoHInline, MemcpyHtoD};
use client::ops::stream::{StreamSynchronize, StreamSynchronizeReply};
use client::seq::Seq;
use client::session::{Pending, Session};

/// Maximum number of bytes that are sent inside the record, in the ring instead of the arena.
pub(crate) const INLINE: usize = 8 << 10;
/// Maximum number of bytes in an answer.
pub(crate) const MAX_INLINE_ANSWER: usize = MAX_PAYLOAD - 4;
/// Number of chunks under way at once in a large copy to pageable memory, at first and at most. Over a long
/// distance it takes more than the first number to fill the link.
const DEPTH: usize = 4;
const MOST_DEPTH: usize = 32;
/// Number of bytes that are under way from the start over a long distance.
const AT_ONCE: usize = 8 << 20;
/// A chunk that takes this many round trips is waiting for other chunks, not for the distance.
const ROUND_TRIPS: u32 = 3;
/// The depth that the last large copy ended with.
static DEEP: AtomicUsize = AtomicUsize::new(DEPTH);
/// Number of chunks of a transfer, within the limits below: enough to fill the pipeline soon, few enough not
/// to interrupt it often.
const CHUNKS: usize = 8;
const LEAST_CHUNK: usize = 256 << 10;
const MOST_CHUNK: usize = 8 << 20;
/// The same for copies to the device, which only wait for room: smaller chunks are free again sooner.
const MOST_CHUNK_TO_DEVICE: usize = 4 << 20;

/// Size of one chunk of a transfer, in bytes.
pub(crate) fn chunk(session: &Session, len: usize) -> usize {
    (len / CHUNKS).clamp(LEAST_CHUNK, MOST_CHUNK).min(session.arena().largest())
}

/// Number of chunks of this size that are under way at first. `deep` is the number that was right for the
/// last large copy. Over a long distance, a shorter copy goes as a whole: a last chunk that is requested when
/// the first has come costs a round trip.
fn first_depth(deep: usize, chunk: usize, is_far: bool) -> usize {
    if is_far { deep.max(AT_ONCE / chunk).min(MOST_DEPTH) } else { deep }
}

/// Copies bytes between program memory and the arena, which another process may be writing or will read.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap.
pub(crate) unsafe fn move_bytes(from: *const u8, to: *mut u8, len: usize) {
    counters::add(&COUNTERS.copied_bytes, len as u64);
    // SAFETY: guaranteed by the caller.
    unsafe { client::staging::copy(from, to, len) };
}

/// A chunk on its way to the host. Dropping it waits for the answer before the block is freed.
struct Flight<'s> {
    pending: Pending<'s, StreamSynchronizeReply>,
    block: Block<'s>,
    begun: Instant,
    at: usize,
    len: usize,
}

/// Transfers on a stream.
pub(crate) struct Transfer<'s> {
    pub stream: &'s Arc<Stream>,
}

/// Blocks of the arena are used by work of the stream.
impl Owner for Transfer<'_> {
    fn id(&self) -> u64 {
        self.stream.unique()
    }

    fn mark(&self) -> Result {
        self.stream.mark().map(drop)
    }

    fn has_passed(&self, seq: Seq) -> bool {
        self.stream.has_passed(seq)
    }
}

impl<'s> Transfer<'s> {
    /// Copies from the host to the device. When this returns, the source has been read. Calls `before` for
    /// each range of the target before the operation that writes it, and keeps the result until that
    /// operation was enqueued. Returns the last record's `seq`; `None` if there is nothing to copy.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes.
    pub unsafe fn send<G>(
        &self,
        dst: u64,
        src: *const u8,
        len: usize,
        before: impl Fn(u64, u64) -> Result<G>,
    ) -> Result<Option<Seq>> {
        let (session, stream) = (self.stream.session(), self.stream.id);
        if len <= INLINE {
            counters::add(&COUNTERS.copied_bytes, len as u64);
            // SAFETY: readable, as the caller says.
            let bytes = unsafe { std::slice::from_raw_parts(src, len) };
            let _order = before(dst, len as u64)?;
            let op = MemcpyHtoD { stream, dst, src: HostIn::Inline(bytes) };
            return self.stream.settled_work(&op).map(Some);
        }
        let chunk = chunk(session, len).min(MOST_CHUNK_TO_DEVICE);
        let (mut at, mut last) = (0, None);
        while at < len {
            let n = chunk.min(len - at);
            let block = session.arena().alloc_for(session, n, self)?;
            // SAFETY: the source's bytes at..at+n are inside it, and the block has n bytes.
            unsafe { move_bytes(src.add(at), block.ptr(), n) };
            let to = dst + at as u64;
            let _order = before(to, n as u64)?;
            let op = MemcpyHtoD { stream, dst: to, src: HostIn::Range(block.range(n)) };
            let seq = self.stream.settled_work(&op)?;
            block.release_after(seq, self.stream.unique());
            at += n;
            last = Some(seq);
        }
        Ok(last)
    }

    /// Copies from the device to the host. When this returns, the bytes are there. The caller has to check
    /// whether work before the copy failed: the context keeps that error.
    ///
    /// # Safety
    /// `dst` is writable for `len` bytes.
    pub unsafe fn receive(&self, dst: *mut u8, src: u64, len: usize) -> Result {
        if len > MAX_INLINE_ANSWER {
            return self.pipeline(src, len, &mut |at, block, n| {
                // SAFETY: the chunk at..at+n is inside the target, and the block has n bytes.
                unsafe { move_bytes(block, dst.add(at), n) }
            });
        }
        let bytes = self.answer(Piece { src, len: len as u32 })?;
        if bytes.len() != len {
            return Err(Status::UNKNOWN);
        }
        // SAFETY: as the caller says; the lengths are equal.
        unsafe { move_bytes(bytes.as_ptr(), dst, len) };
        Ok(())
    }

    /// The bytes of device memory that fits in an answer.
    fn answer(&self, piece: Piece) -> Result<Vec<u8>> {
        let (stream, context) = (self.stream, self.stream.context);
        if stream.is_legacy()
            && let Some(bytes) = context.take_copy(piece)
        {
            return Ok(bytes);
        }
        let _reading = context.reading(stream.is_free());
        let slot = stream.slot_to_wait()?;
        let op = MemcpyDtoHInline { stream: stream.id, src: piece.src, len: piece.len };
        let copy = || slot.submit(&op);
        let pending =
            if stream.is_legacy() { context.submit_wait(Wait::Copy(piece.src), copy)? } else { copy()? };
        let seq = pending.seq();
        let answer = pending.wait()?;
        stream.is_synced(seq);
        Ok(answer.bytes.0)
    }

    /// Asks when the stream has written a block.
    pub fn ask_when_written(
        &self,
        block: Block<'s>,
    ) -> Result<(Pending<'s, StreamSynchronizeReply>, Block<'s>)> {
        let slot = self.stream.slot_to_wait();
        match slot.and_then(|slot| slot.submit(&StreamSynchronize { stream: self.stream.id })) {
            Ok(pending) => Ok((pending, block)),
            Err(status) => {
                // The server may still write the block and will not report when it has. The block is lost
                // with the session.
                std::mem::forget(block);
                Err(status)
            }
        }
    }

    /// Fetches `len` bytes through the arena, with several chunks under way at once. Calls `out` for each
    /// with its offset, its bytes and its length.
    fn pipeline(&self, src: u64, len: usize, out: &mut dyn FnMut(usize, *const u8, usize)) -> Result {
        let session = self.stream.session();
        let stream = self.stream.id;
        let chunk = chunk(session, len);
        let deep = DEEP.load(Ordering::Relaxed);
        let (mut depth, mut no_room) = (first_depth(deep, chunk, session.is_far()), false);
        let mut flights: VecDeque<Flight<'_>> = VecDeque::with_capacity(depth);
        let mut at = 0;
        while at < len || !flights.is_empty() {
            while at < len && flights.len() < depth {
                let n = chunk.min(len - at);
                // With chunks under way, wait for those instead of room or a slot that other threads may
                // hold.
                let block = if flights.is_empty() {
                    session.arena().alloc(session, n)?
                } else {
                    match session.arena().try_alloc(n, session.progress().released()) {
                        Some(block) if session.has_free_slot() => block,
                        found => {
                            no_room = found.is_none();
                            break;
                        }
                    }
                };
                let dst = HostOut(block.range(n));
                self.stream.work(&MemcpyDtoH { stream, src: src + at as u64, dst })?;
                let (pending, block) = self.ask_when_written(block)?;
                flights.push_back(Flight { pending, block, begun: Instant::now(), at, len: n });
                at += n;
            }
            let Some(Flight { pending, block, begun, at: place, len: n }) = flights.pop_front() else {
                break;
            };
            let seq = pending.seq();
            pending.wait()?;
            let time = begun.elapsed();
            self.stream.is_synced(seq);
            out(place, block.ptr(), n);
            // While the link carries a chunk in less than a round trip, more chunks can fill it.
            if at < len && session.is_far() {
                if std::mem::take(&mut no_room) {
                    session.arena().grow(session, Some(time));
                } else if flights.len() + 1 == depth && time <= session.round_trip() * ROUND_TRIPS {
                    depth = (depth + 1).min(MOST_DEPTH);
                }
            }
        }
        // A copy too short to fill the pipeline says nothing about the right depth.
        if len / chunk >= depth {
            DEEP.store(depth, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_copy_over_a_long_distance_is_under_way_as_a_whole() {
        for len in [300 << 10, 1600 << 10, 2 << 20, 5 << 20, AT_ONCE] {
            let chunk = (len / CHUNKS).clamp(LEAST_CHUNK, MOST_CHUNK);
            assert!(first_depth(DEPTH, chunk, true) >= len.div_ceil(chunk), "{len} bytes");
        }
        assert_eq!(first_depth(DEPTH, LEAST_CHUNK, false), DEPTH);
        assert_eq!(first_depth(20, MOST_CHUNK, true), 20);
        assert_eq!(first_depth(DEPTH, 1, true), MOST_DEPTH);
    }
}
