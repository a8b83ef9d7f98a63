//! The command ring: a byte ring with one producer at a time and one consumer.
//!
//! A record is a 16-byte header and a body, together a multiple of 16 bytes. It is never split at the ring's
//! end: before a record that would be, padding ([`PAD`]) fills the rest of the ring.
//!
//! ```text
//! 0        4          6            8      16
//! │size u32│opcode u16│reply_slot  │seq u64│ body, zero-padded to a multiple of 16
//! ```
//!
//! `tail` and `head` count all bytes since the start; their difference is what the ring holds. The consumer
//! copies a record out once, with atomic loads, and checks the copy. A producer that writes at the same time
//! can only corrupt that record's content.

use super::geometry::{Cursors, Header};
use super::sizes::{MAX_RECORD, RECORD_HEADER};
use super::sync::{AtomicU64, Ordering};
use crate::schema::layouts;
use thiserror::Error;

/// Opcode of padding.
pub const PAD: u16 = 0;

/// The ring's bytes in shared memory.
#[derive(Debug, Clone, Copy)]
pub struct RingMemory<'m> {
    words: &'m [AtomicU64],
}

impl<'m> RingMemory<'m> {
    /// A ring over `words`.
    ///
    /// # Panics
    /// If the number of words is not a power of two. A checked geometry guarantees that it is.
    pub fn new(words: &'m [AtomicU64]) -> Self {
        assert!(words.len().is_power_of_two());
        RingMemory { words }
    }

    fn size(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    fn index(&self, cursor: u64) -> usize {
        (cursor as usize / 8) & (self.words.len() - 1)
    }
}

/// The ring has no room at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// The client's end. One thread uses it at a time: the caller holds a lock.
#[derive(Debug)]
pub struct Producer<'m> {
    cursors: Cursors<'m>,
    memory: RingMemory<'m>,
    tail: u64,
    /// The consumer's cursor when it was last read. It is read again only when the ring seems full.
    head: u64,
    seq: u64,
}

impl<'m> Producer<'m> {
    /// The producer of a new ring.
    pub fn new(header: &'m Header, memory: RingMemory<'m>) -> Self {
        Self::over(header.cursors(), memory)
    }

    pub(super) fn over(cursors: Cursors<'m>, memory: RingMemory<'m>) -> Self {
        Producer { cursors, memory, tail: 0, head: 0, seq: 0 }
    }

    /// The `seq` of the record appended last; 0 before the first.
    pub fn last_seq(&self) -> u64 {
        self.seq
    }

    /// Appends a record, publishes it, and returns its `seq`. Afterwards the caller asks
    /// [`Header::host_sleep`] whether to ring the doorbell.
    ///
    /// # Panics
    /// If the record is longer than [`MAX_RECORD`]. Callers put long data elsewhere.
    #[inline]
    pub fn push(&mut self, opcode: u16, reply_slot: u16, body: &[u8]) -> Result<u64, Full> {
        let size = (RECORD_HEADER + body.len()).next_multiple_of(16);
        assert!(size <= MAX_RECORD, "a record of {size} bytes");
        let to_end = self.memory.size() - (self.tail & (self.memory.size() - 1));
        let pad = if to_end < size as u64 { to_end } else { 0 };
        self.room(pad + size as u64)?;
        if pad != 0 {
            self.write_header(pad as u32, PAD, super::sizes::NO_SLOT, 0);
            self.tail += pad;
        }
        let seq = self.seq + 1;
        self.write_header(size as u32, opcode, reply_slot, seq);
        let at = self.memory.index(self.tail) + 2;
        let words = &self.memory.words[at..at + (size - RECORD_HEADER) / 8];
        let (whole, rest) = body.as_chunks::<8>();
        for (word, bytes) in words.iter().zip(whole) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for (i, word) in words.iter().enumerate().skip(whole.len()) {
            word.store(if i == whole.len() { u64::from_le_bytes(last) } else { 0 }, Ordering::Relaxed);
        }
        self.tail += size as u64;
        self.seq = seq;
        self.cursors.tail.store(self.tail, Ordering::Release);
        Ok(seq)
    }

    fn room(&mut self, needed: u64) -> Result<(), Full> {
        if self.tail + needed - self.head > self.memory.size() {
            self.head = self.cursors.head.load(Ordering::Acquire);
            if self.tail + needed - self.head > self.memory.size() {
                return Err(Full);
            }
        }
        Ok(())
    }

    fn write_header(&self, size: u32, opcode: u16, slot: u16, seq: u64) {
        let at = self.memory.index(self.tail);
        let first = u64::from(size) | u64::from(opcode) << 32 | u64::from(slot) << 48;
        self.memory.words[at].store(first, Ordering::Relaxed);
        self.memory.words[at + 1].store(seq, Ordering::Relaxed);
    }
}

layouts! {
    /// The first 16 bytes of a record, in the ring and in a link frame.
    pub struct RecordHeader {
        /// Bytes of the record, including this header.
        pub size: u32,
        /// The operation; [`PAD`]: padding.
        pub opcode: u16,
        /// Where the reply goes, or [`super::sizes::NO_SLOT`].
        pub reply_slot: u16,
        /// Its place in the session's order.
        pub seq: u64,
    }
}

const _: () = assert!(size_of::<RecordHeader>() == RECORD_HEADER);

/// A record's header, as copied out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The operation.
    pub opcode: u16,
    /// Where the reply goes, or [`super::sizes::NO_SLOT`].
    pub reply_slot: u16,
    /// Its place in the session's order.
    pub seq: u64,
}

impl Record {
    /// The header's bytes, for a record of `size` bytes including the header.
    pub fn to_bytes(&self, size: u32) -> [u8; RECORD_HEADER] {
        let Record { opcode, reply_slot, seq } = *self;
        zerocopy::transmute!(RecordHeader { size, opcode, reply_slot, seq })
    }

    /// The reverse: the record's header and its size.
    pub fn from_bytes(bytes: &[u8; RECORD_HEADER]) -> (Record, u32) {
        let RecordHeader { size, opcode, reply_slot, seq } = zerocopy::transmute!(*bytes);
        (Record { opcode, reply_slot, seq }, size)
    }
}

/// A violation that no correct producer commits. It ends the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RecordError {
    /// According to the cursor, the ring holds more than its size, less than nothing, or no multiple of 16
    /// bytes.
    #[error(
        "ring cursor {tail:#x} does not fit the consumer's cursor {head:#x} in a ring of {size:#x} bytes"
    )]
    Cursor {
        /// The producer's cursor as read.
        tail: u64,
        /// The consumer's own cursor.
        head: u64,
        /// The ring's size.
        size: u64,
    },
    /// A record's size is impossible.
    #[error(
        "record {after} + 1: size {size:#x} is not a multiple of 16 from 16 to what the ring holds ({available:#x})"
    )]
    Size {
        /// `seq` of the record before.
        after: u64,
        /// The size as read.
        size: u32,
        /// The maximum that it could have.
        available: u64,
    },
    /// `seq` did not count up by one.
    #[error("record with seq {found} where {expected} was expected")]
    Seq {
        /// The seq that was expected.
        expected: u64,
        /// The seq found.
        found: u64,
    },
}

/// How far a ring has been read: the state of a [`Consumer`] besides the ring itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    head: u64,
    seq: u64,
}

impl Position {
    /// What [`parts`](Self::parts) gave.
    pub fn from_parts(head: u64, seq: u64) -> Position {
        Position { head, seq }
    }

    /// The cursor and the number of the last record before it, for storage outside this process.
    pub fn parts(&self) -> (u64, u64) {
        (self.head, self.seq)
    }
}

/// The host side's end.
#[derive(Debug)]
pub struct Consumer<'m> {
    cursors: Cursors<'m>,
    memory: RingMemory<'m>,
    head: u64,
    seq: u64,
    /// The cursor as the producer sees it. The room before it belongs to the producer again.
    released: u64,
}

impl<'m> Consumer<'m> {
    /// The consumer of a new ring.
    pub fn new(header: &'m Header, memory: RingMemory<'m>) -> Self {
        Self::over(header.cursors(), memory)
    }

    pub(super) fn over(cursors: Cursors<'m>, memory: RingMemory<'m>) -> Self {
        Consumer { cursors, memory, head: 0, seq: 0, released: 0 }
    }

    /// A consumer that continues at the [`position`](Self::position) where an earlier one of the same ring
    /// stopped.
    #[inline]
    pub fn resume(header: &'m Header, memory: RingMemory<'m>, position: Position) -> Self {
        Consumer {
            cursors: header.cursors(),
            memory,
            head: position.head,
            seq: position.seq,
            released: position.head,
        }
    }

    /// How far this has read.
    #[inline]
    pub fn position(&self) -> Position {
        Position { head: self.head, seq: self.seq }
    }

    /// Goes back to where it was, so that what it has [taken](Self::take) since comes again. Nothing behind
    /// that position was [released](Self::release).
    #[inline]
    pub fn return_to(&mut self, position: Position) {
        (self.head, self.seq) = (position.head, position.seq);
    }

    /// Whether the producer has appended something that has not been taken. Also true for an invalid cursor,
    /// which [`pop`](Self::pop) then reports.
    #[inline]
    pub fn has_work(&self) -> bool {
        self.cursors.tail.load(Ordering::Acquire) != self.head
    }

    /// Whether half of the ring is free, so that a producer that waits for room should be woken. If it were
    /// woken for each record that is taken, it would fill that room and wait again, at the cost of a system
    /// call each time. The records of half a ring take much longer than a wake-up. An empty ring always has
    /// room, so a consumer that asks before it sleeps never leaves a producer asleep.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.cursors.tail.load(Ordering::Acquire).wrapping_sub(self.released) <= self.memory.size() / 2
    }

    /// [Takes](Self::take) the next record and [releases](Self::release) its room at once.
    #[inline]
    pub fn pop(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, RecordError> {
        let taken = self.take(body);
        self.release(self.position());
        taken
    }

    /// Returns to the producer the room of all records before `position`, which this consumer has passed. If
    /// the ring then [has room](Self::has_room), the caller asks [`Header::ring_sleep`] whether to wake the
    /// client.
    #[inline]
    pub fn release(&mut self, position: Position) {
        if position.head != self.released {
            self.released = position.head;
            self.cursors.head.store(position.head, Ordering::Release);
        }
    }

    /// Tells the producer which room is free. [`release`](Self::release) does so, too: this is for a consumer
    /// whose predecessor may have ended before it did.
    pub fn publish(&self) {
        self.cursors.head.store(self.released, Ordering::Release);
    }

    /// Copies the next record out: returns its header and fills `body` with its body, including padding.
    /// `None`: the ring is empty.
    ///
    /// The record stays in the ring until its room is [released](Self::release), so a consumer that replaces
    /// this one can read it again.
    #[inline]
    pub fn take(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, RecordError> {
        loop {
            let tail = self.cursors.tail.load(Ordering::Acquire);
            if tail == self.head {
                return Ok(None);
            }
            let held = tail.wrapping_sub(self.head);
            if held > self.memory.size() || !held.is_multiple_of(16) {
                return Err(RecordError::Cursor { tail, head: self.head, size: self.memory.size() });
            }
            let at = self.memory.index(self.head);
            let mut bytes = [0; RECORD_HEADER];
            bytes[..8].copy_from_slice(&self.memory.words[at].load(Ordering::Relaxed).to_le_bytes());
            bytes[8..].copy_from_slice(&self.memory.words[at + 1].load(Ordering::Relaxed).to_le_bytes());
            let (record, size) = Record::from_bytes(&bytes);
            let to_end = (self.memory.words.len() - at) as u64 * 8;
            let most = if record.opcode == PAD { to_end } else { to_end.min(MAX_RECORD as u64) };
            let available = held.min(most);
            if size < RECORD_HEADER as u32 || !size.is_multiple_of(16) || u64::from(size) > available {
                return Err(RecordError::Size { after: self.seq, size, available });
            }
            let next = self.head + u64::from(size);
            if record.opcode != PAD {
                let expected = self.seq + 1;
                if record.seq != expected {
                    return Err(RecordError::Seq { expected, found: record.seq });
                }
                self.seq = expected;
                body.clear();
                let words = &self.memory.words[at + 2..at + size as usize / 8];
                body.extend(words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()));
            }
            self.head = next;
            if record.opcode != PAD {
                return Ok(Some(record));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::channel::NO_SLOT;
    use proptest::prelude::*;

    struct Ring {
        words: Vec<AtomicU64>,
        tail: AtomicU64,
        head: AtomicU64,
    }

    impl Ring {
        fn new(size: usize) -> Ring {
            Ring { words: (0..size / 8).map(|_| AtomicU64::new(0)).collect(), tail: 0.into(), head: 0.into() }
        }
        fn ends(&self) -> (Producer<'_>, Consumer<'_>) {
            let cursors = Cursors { tail: &self.tail, head: &self.head };
            let memory = RingMemory::new(&self.words);
            (Producer::over(cursors, memory), Consumer::over(cursors, memory))
        }
    }

    #[test]
    fn a_full_ring_takes_no_more_until_a_record_is_taken() {
        let ring = Ring::new(256);
        let (mut producer, mut consumer) = ring.ends();
        let mut body = Vec::new();
        for _ in 0..4 {
            producer.push(7, NO_SLOT, &[1; 48]).unwrap();
        }
        assert_eq!(producer.push(7, NO_SLOT, &[]), Err(Full));
        consumer.pop(&mut body).unwrap().unwrap();
        assert_eq!(producer.push(7, NO_SLOT, &[2; 48]), Ok(5));
        assert_eq!(producer.push(7, NO_SLOT, &[]), Err(Full));
    }

    #[test]
    fn a_producer_of_a_full_ring_is_woken_once_for_half_a_ring() {
        let ring = Ring::new(1 << 16);
        let (mut producer, mut consumer) = ring.ends();
        let (mut body, mut wakes) = (Vec::new(), 0);
        let fill = |producer: &mut Producer<'_>| while producer.push(7, NO_SLOT, &[1; 48]).is_ok() {};
        fill(&mut producer);
        let mut asleep = true;
        for _ in 0..10_000 {
            consumer.pop(&mut body).unwrap().unwrap();
            if asleep && consumer.has_room() {
                wakes += 1;
                fill(&mut producer);
                asleep = producer.push(7, NO_SLOT, &[1; 48]).is_err();
            }
        }
        assert!((19..=20).contains(&wakes), "{wakes} for 10000 records, of which the ring holds 1024");
        while consumer.pop(&mut body).unwrap().is_some() {}
        assert!(consumer.has_room());
    }

    #[test]
    fn a_gap_in_seq_is_found() {
        let ring = Ring::new(256);
        let (mut producer, mut consumer) = ring.ends();
        producer.push(7, NO_SLOT, &[]).unwrap();
        ring.words[1].store(2, Ordering::Relaxed);
        assert_eq!(consumer.pop(&mut Vec::new()), Err(RecordError::Seq { expected: 1, found: 2 }));
    }

    proptest! {
        #[test]
        fn records_come_out_as_they_went_in(records in proptest::collection::vec((1u16.., proptest::collection::vec(any::<u8>(), 0..200)), 1..300)) {
            let ring = Ring::new(1024);
            let (mut producer, mut consumer) = ring.ends();
            let mut expected = std::collections::VecDeque::new();
            let mut body = Vec::new();
            let mut take = |expected: &mut std::collections::VecDeque<(u64, u16, Vec<u8>)>, consumer: &mut Consumer<'_>| {
                let record = consumer.pop(&mut body).unwrap();
                let Some((seq, opcode, sent)) = expected.pop_front() else { return record.is_none() };
                let padded = sent.len().next_multiple_of(16);
                record == Some(Record { opcode, reply_slot: 3, seq }) && body[..sent.len()] == sent[..] && body.len() == padded
                    && body[sent.len()..].iter().all(|b| *b == 0)
            };
            for (opcode, sent) in records {
                let seq = loop {
                    match producer.push(opcode, 3, &sent) {
                        Ok(seq) => break seq,
                        Err(Full) => prop_assert!(take(&mut expected, &mut consumer)),
                    }
                };
                expected.push_back((seq, opcode, sent));
            }
            while !expected.is_empty() {
                prop_assert!(take(&mut expected, &mut consumer));
            }
            prop_assert!(take(&mut expected, &mut consumer) && !consumer.has_work());
        }

        /// Whatever a hostile producer writes, the consumer returns a record or an error, never reads outside
        /// the ring, and does not loop.
        #[test]
        fn any_bytes_are_survived(words in proptest::collection::vec(any::<u64>(), 32), tail in prop_oneof![any::<u64>(), (0u64..40).prop_map(|n| n * 16)], small in any::<bool>()) {
            let ring = Ring::new(256);
            for (to, from) in ring.words.iter().zip(words) {
                // Small sizes get past the first check and reach the others.
                to.store(if small { from & 0xffff_0000_0070 | 0x10 } else { from }, Ordering::Relaxed);
            }
            ring.tail.store(tail, Ordering::Relaxed);
            let (_, mut consumer) = ring.ends();
            let mut body = Vec::new();
            let mut taken = 0;
            while let Ok(Some(_)) = consumer.pop(&mut body) {
                prop_assert!(body.len() < 256);
                taken += 1;
                prop_assert!(taken <= 16);
            }
        }
    }
}
