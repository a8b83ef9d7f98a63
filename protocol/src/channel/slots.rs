//! Reply slots, in which threads wait for the answers to their `sync` operations.
//!
//! One word is enough for the whole exchange: a waiting thread announces its sleep in the state, and the host
//! side learns of it from the atomic exchange that completes the slot.

use super::sizes::MAX_PAYLOAD;
use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::Status;
use crate::schema::{Layout, layout_of, numbered};

numbered! {
    /// The state word of a slot.
    pub enum SlotState {
        /// Unused.
        Free = 0,
        /// A request is in progress.
        Pending = 1,
        /// A request is in progress and its thread sleeps.
        Sleeping = 2,
        /// The answer is there.
        Done = 3,
    }
}

/// A slot as it lies in shared memory.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ReplySlot {
    state: AtomicU32,
    status: AtomicU32,
    len: AtomicU32,
    _reserved: AtomicU32,
    seq: AtomicU64,
    _line: [AtomicU64; 5],
    payload: [AtomicU64; MAX_PAYLOAD / 8],
}

impl ReplySlot {
    pub(super) const LAYOUT: Layout = layout_of!(ReplySlot {
        state: SlotState,
        status: u32,
        len: u32,
        seq: u64,
        payload: [u8; MAX_PAYLOAD],
    });
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<ReplySlot>() == super::sizes::SLOT_SIZE);

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Its status.
    pub status: Status,
    /// Length of its payload in bytes.
    pub len: usize,
}

/// Whether a slot has received a certain answer, as far as the slot shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completed {
    /// It has not received it.
    No,
    /// It has received it.
    Yes,
    /// Either it was about to receive it, or the client has taken it and used the slot for another request.
    Unknown,
}

impl ReplySlot {
    #[cfg(loom)]
    pub(super) fn new() -> Self {
        ReplySlot {
            state: AtomicU32::new(0),
            status: AtomicU32::new(0),
            len: AtomicU32::new(0),
            _reserved: AtomicU32::new(0),
            seq: AtomicU64::new(0),
            _line: std::array::from_fn(|_| AtomicU64::new(0)),
            payload: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Takes the slot for a request that is about to be appended. For the client; the slot belongs to the
    /// calling thread.
    pub fn prepare(&self) {
        self.state.store(SlotState::Pending as u32, Ordering::Relaxed);
    }

    /// Whether the answer is there. For the client.
    pub fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) == SlotState::Done as u32
    }

    /// Returns the answer if it is there, appends its payload to `payload`, and frees the slot. For the
    /// client.
    #[inline]
    pub fn poll(&self, payload: &mut Vec<u8>) -> Option<Completion> {
        if self.state.load(Ordering::Acquire) != SlotState::Done as u32 {
            return None;
        }
        let len = (self.len.load(Ordering::Relaxed) as usize).min(MAX_PAYLOAD);
        let at = payload.len();
        payload.extend(
            self.payload[..len.div_ceil(8)].iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()),
        );
        payload.truncate(at + len);
        let status = Status(self.status.load(Ordering::Relaxed));
        self.state.store(SlotState::Free as u32, Ordering::Relaxed);
        Some(Completion { status, len })
    }

    /// Announces that the waiting thread is about to sleep while the word at the slot's offset is
    /// [`SlotState::Sleeping`]. Returns false if the answer is there.
    pub fn announce_sleep(&self) -> bool {
        let (pending, sleeping) = (SlotState::Pending as u32, SlotState::Sleeping as u32);
        match self.state.compare_exchange(pending, sleeping, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(now) => now == sleeping,
        }
    }

    /// Writes an answer and publishes it. Returns whether the waiting thread sleeps and must be woken. For
    /// the host side.
    ///
    /// Cuts a payload longer than [`MAX_PAYLOAD`]; servers check the length before.
    pub fn complete(&self, seq: u64, status: Status, payload: &[u8]) -> bool {
        let payload = &payload[..payload.len().min(MAX_PAYLOAD)];
        for (word, bytes) in self.payload.iter().zip(payload.chunks(8)) {
            let mut le = [0; 8];
            le[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
        self.len.store(payload.len() as u32, Ordering::Relaxed);
        self.status.store(status.0, Ordering::Relaxed);
        self.seq.store(seq, Ordering::Relaxed);
        self.state.swap(SlotState::Done as u32, Ordering::AcqRel) == SlotState::Sleeping as u32
    }

    /// Whether a request is in progress and its thread sleeps. For the host side.
    pub fn sleeps(&self) -> bool {
        self.state.load(Ordering::Acquire) == SlotState::Sleeping as u32
    }

    /// Whether [`complete`](Self::complete) was called for request `seq`. For a process of the host side that
    /// replaces one that may have called it.
    pub fn was_completed(&self, seq: u64) -> Completed {
        // The host side writes this before the state, and the client never does.
        if self.seq.load(Ordering::Acquire) != seq {
            return Completed::No;
        }
        let state = self.state.load(Ordering::Acquire);
        if state == SlotState::Pending as u32 || state == SlotState::Sleeping as u32 {
            Completed::Unknown
        } else {
            Completed::Yes
        }
    }

    /// Answers the slot with `status` if a request is in progress in it. The host side does this with every
    /// slot when a session is lost. Returns whether the waiting thread must be woken.
    pub fn abandon(&self, status: Status) -> bool {
        let state = self.state.load(Ordering::Acquire);
        if state != SlotState::Pending as u32 && state != SlotState::Sleeping as u32 {
            return false;
        }
        self.complete(0, status, &[])
    }
}
