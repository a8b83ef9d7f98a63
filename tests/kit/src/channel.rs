//! The program's end of a channel.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use host_bridge::memory::{ChannelView, Memories};
use protocol::channel::{
    Completion, Geometry, HEADER_SIZE, Header, HeaderFields, NO_SLOT, Producer, Progress, RingMemory, State,
};
use protocol::data::{HostIn, HostOut, HostRange};
use protocol::device::Extent;
use protocol::handle::StreamId;
use protocol::link::Memory;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::{StreamMark, StreamSynchronize};
use protocol::ops::{Class, Op, encode};

use crate::{PATIENCE, sealed_memfd};

/// Offset of the ring's tail in the header.
const TAIL: usize = 0x100;

/// Writes the header of a channel whose first page begins at `address` of `memories`.
pub fn write_header(memories: &Memories, address: u64, fields: &HeaderFields) {
    let page = Extent { addr: address, len: HEADER_SIZE as u64 };
    let at = memories.resolve(&[page], page.len).unwrap().all()[0].at;
    // SAFETY: `resolve` checked that a whole header lies there; `memories` keeps it mapped; a header consists
    // of atomics, for which any bytes are valid.
    unsafe { at.cast::<Header>().as_ref() }.write_fields(fields);
}

/// A channel in a sealed file of its own, as a native client makes it. Its header names process 7.
pub fn in_a_file(arena: usize, program: &str) -> (OwnedFd, ChannelView) {
    let geometry = Geometry::with_arena(arena);
    let size = geometry.size as u64;
    let file = sealed_memfd(size);
    let memory = Memory { addr: 0, size, file_offset: 0 };
    let memories = Memories::map(vec![(memory, file.try_clone().unwrap())]).unwrap();
    write_header(&memories, 0, &geometry.fields(7, program));
    (file, memories.view(&[Extent { addr: 0, len: size }], size).unwrap())
}

/// A channel that a program writes commands to.
pub struct Channel {
    // Dropped before the view that it points into.
    producer: Producer<'static>,
    view: Arc<ChannelView>,
    doorbell: Box<dyn Fn() + Send + Sync>,
    patience: Duration,
}

impl Channel {
    /// The only producer of a channel that has none yet. `doorbell` rings the channel's doorbell.
    pub fn new(view: ChannelView, doorbell: impl Fn() + Send + Sync + 'static) -> Channel {
        let view = Arc::new(view);
        // SAFETY: the view is in an `Arc` that this structure holds and never gives out mutably, so the
        // reference stays valid until `view` is dropped. That happens after `producer`, its only user, is
        // dropped: fields are dropped in the order of their declaration.
        let forever: &'static ChannelView = unsafe { &*Arc::as_ptr(&view) };
        let producer = Producer::new(forever.header(), RingMemory::new(ring_words(forever)));
        Channel { producer, view, doorbell: Box::new(doorbell), patience: PATIENCE }
    }

    /// Sets how long an answer may take, for a session whose ends may lose one.
    pub fn wait_at_most(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The channel's memory.
    pub fn view(&self) -> &ChannelView {
        &self.view
    }

    /// The channel's header.
    pub fn header(&self) -> &Header {
        self.view.header()
    }

    /// The channel's progress area.
    pub fn progress(&self) -> &Progress {
        self.view.progress()
    }

    /// The ring's memory, for records that no producer would write.
    pub fn ring_words(&self) -> &[AtomicU64] {
        ring_words(&self.view)
    }

    /// The ring's tail, for values that no producer would write.
    pub fn tail(&self) -> &AtomicU64 {
        word(&self.view, TAIL)
    }

    /// Rings the doorbell, whether the other side sleeps or not.
    pub fn ring_doorbell(&self) {
        (self.doorbell)();
    }

    /// Appends a record and rings the doorbell if the other side sleeps. Returns the record's `seq`.
    pub fn push_raw(&mut self, opcode: u16, slot: u16, body: &[u8]) -> u64 {
        loop {
            if let Ok(seq) = self.producer.push(opcode, slot, body) {
                if self.header().host_sleep.take() {
                    self.ring_doorbell();
                }
                return seq;
            }
            assert!(self.header().state() != State::Lost, "{}", self.header().reason());
            std::thread::yield_now();
        }
    }

    /// Appends an operation, in a slot that it prepares or in none.
    pub fn push<'a, T: Op<'a>>(&mut self, op: &T, slot: u16) -> u64 {
        assert_eq!(T::INFO.class == Class::Sync, slot != NO_SLOT);
        if slot != NO_SLOT {
            self.prepare(slot);
        }
        let mut body = Vec::new();
        encode(op, &mut body);
        self.push_raw(T::INFO.opcode, slot, &body)
    }

    /// Takes a reply slot for a request to come.
    pub fn prepare(&self, slot: u16) {
        self.view.slot(slot).unwrap().prepare();
    }

    /// Waits for the answer in a slot, without sleeping.
    pub fn answer(&self, slot: u16) -> (Completion, Vec<u8>) {
        let start = Instant::now();
        let mut payload = Vec::new();
        loop {
            if let Some(completion) = self.view.slot(slot).unwrap().poll(&mut payload) {
                return (completion, payload);
            }
            assert!(start.elapsed() < self.patience, "no answer; the session: {:?}", self.lost());
            std::thread::yield_now();
        }
    }

    /// Why the session was lost, once it is.
    pub fn lost(&self) -> Option<String> {
        (self.header().state() == State::Lost).then(|| self.header().reason())
    }

    /// Synchronizes stream 0, which must succeed.
    pub fn synchronize(&mut self) {
        self.push(&StreamSynchronize { stream: StreamId(0) }, 0);
        let (completion, _) = self.answer(0);
        assert!(completion.status.is_success(), "{}: {:?}", completion.status, self.lost());
    }

    /// Appends a copy from the host to `dst` on stream 0.
    pub fn htod(&mut self, dst: u64, range: HostRange) -> u64 {
        self.push(&MemcpyHtoD { stream: StreamId(0), dst, src: HostIn::Range(range) }, NO_SLOT)
    }

    /// Appends a copy from `src` to the host on stream 0.
    pub fn dtoh(&mut self, src: u64, range: HostRange) -> u64 {
        self.push(&MemcpyDtoH { stream: StreamId(0), src, dst: HostOut(range) }, NO_SLOT)
    }

    /// Appends a mark on stream 0.
    pub fn mark(&mut self) -> u64 {
        self.push(&StreamMark { stream: StreamId(0) }, NO_SLOT)
    }

    /// Writes the arena.
    pub fn write_arena(&self, offset: u64, bytes: &[u8]) {
        let (at, len) = self.view.arena(offset, bytes.len() as u64).unwrap();
        // SAFETY: `arena` checked that `len` bytes from `at` lie in the mapped arena; the test does not read
        // them at the same time.
        unsafe { at.copy_from(NonNull::from(bytes).cast(), len) };
    }

    /// Reads the arena.
    pub fn read_arena(&self, offset: u64, len: u64) -> Vec<u8> {
        let (at, len) = self.view.arena(offset, len).unwrap();
        let mut bytes = vec![0; len];
        // SAFETY: `arena` checked that `len` bytes from `at` lie in the mapped arena; the test has waited
        // until the other side had written them.
        unsafe { at.copy_to(NonNull::from(&mut bytes[..]).cast(), len) };
        bytes
    }
}

/// A word of a channel at any multiple of 8, for a peer that writes what no library would.
pub fn word(view: &ChannelView, offset: usize) -> &AtomicU64 {
    assert!(offset.is_multiple_of(8) && offset + 8 <= view.geometry().size);
    // SAFETY: aligned and inside the view's mapping, as just checked; everything in a channel may be accessed
    // as atomic words.
    unsafe { view.base().add(offset).cast::<AtomicU64>().as_ref() }
}

fn ring_words(view: &ChannelView) -> &[AtomicU64] {
    let geometry = view.geometry();
    // SAFETY: the geometry was checked against the view's mapping, so the ring's bytes lie inside it, aligned
    // to a page.
    unsafe {
        let words = view.base().add(geometry.ring_offset).cast().as_ptr();
        std::slice::from_raw_parts(words, geometry.ring_size / 8)
    }
}

/// Writes one record at `tail` exactly as given, with padding before it where the ring ends. Returns the tail
/// behind `advance` bytes of it. Nothing is published.
pub fn write_record(
    view: &ChannelView,
    mut tail: u64,
    header: (u32, u16, u16, u64),
    body: &[u8],
    advance: u64,
) -> u64 {
    let (size, opcode, slot, seq) = header;
    let mut bytes =
        [&size.to_le_bytes()[..], &opcode.to_le_bytes(), &slot.to_le_bytes(), &seq.to_le_bytes(), body]
            .concat();
    bytes.resize(bytes.len().next_multiple_of(16), 0);
    let (ring, ring_size) = (view.geometry().ring_offset, view.geometry().ring_size);
    // A record is never split at the ring's end.
    let to_end = ring_size - tail as usize % ring_size;
    if bytes.len() > to_end {
        word(view, ring + tail as usize % ring_size).store(to_end as u64, Ordering::Relaxed);
        tail += to_end as u64;
    }
    let (words, _) = bytes.as_chunks::<8>();
    for (index, bytes) in words.iter().enumerate() {
        word(view, ring + tail as usize % ring_size + index * 8)
            .store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
    }
    tail + advance
}
