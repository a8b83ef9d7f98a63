//! Data that arrives by RDMA and that devices read in place: the transport's slots, registered with CUDA,
//! with two words per slot.
//!
//! ```text
//!   network fills slot (round n) ─ host word = n ─▶ stream: wait(host ≥ n), copy to device, write(gpu = n) ─▶ the network may fill it again
//! ```
//!
//! This works like [`super::staging`], but the transport decides which chunk goes to which slot
//! ([`host_bridge::endpoint::planned_slots`]), and this is known before the data arrives. So all device work
//! of an upload is enqueued at once, and no CPU touches the bytes.

use std::sync::Arc;

use crate::driver::call::Result;
use host_bridge::endpoint::{Arrivals, StagingArea};

use super::api::{Api, CUdeviceptr};
use super::fence::{ALREADY_REGISTERED, Word, Words};

/// The slots of a session.
pub(super) struct Arrived {
    area: StagingArea,
    /// Two words per slot: one that the host writes and streams wait for, and one that streams write and the
    /// host reads.
    words: Vec<(Word, Word)>,
}

// SAFETY: the area's pointer is only passed to CUDA; the memory lives as long as the client, which the worker
// keeps until the end.
unsafe impl Send for Arrived {}
// SAFETY: immutable after construction, and the words are atomics.
unsafe impl Sync for Arrived {}

impl Arrived {
    /// Registers the transport's memory in the current context.
    pub(super) fn new(api: &Api, words: &Arc<Words>, area: StagingArea) -> Result<Arc<Arrived>> {
        let words = (0..area.slots).map(|_| Ok((words.take()?, words.take()?))).collect::<Result<_, _>>()?;
        let arrived = Arrived { area, words };
        arrived.register(api)?;
        Ok(Arc::new(arrived))
    }

    /// Registers the memory with the current context. Called again if that context is reset.
    pub(super) fn register(&self, api: &Api) -> Result {
        // SAFETY: page-aligned memory that stays mapped until the process ends. Flags: portable,
        // device-mapped.
        match unsafe { api.host_register(self.area.at.as_ptr().cast(), self.area.len, 3) } {
            Ok(()) | Err(ALREADY_REGISTERED) => Ok(()),
            Err(status) => Err(status),
        }
    }

    /// The words that streams wait for and write, for one of this session's slots.
    pub(super) fn words(&self, slot: usize) -> Option<(CUdeviceptr, CUdeviceptr)> {
        self.words.get(slot).map(|(host, gpu)| (host.address(), gpu.address()))
    }
}

impl Arrivals for Arrived {
    fn landed(&self, slot: usize, round: u64) {
        if let Some((host, _)) = self.words.get(slot) {
            host.set(round);
        }
    }

    fn passed(&self, slot: usize) -> u64 {
        self.words.get(slot).map_or(0, |(_, gpu)| gpu.get())
    }

    fn lost(&self) {
        // Streams that wait for the rest continue with whatever is in the slots. (They compare signed
        // differences.)
        self.words.iter().for_each(|(host, _)| host.set(i64::MAX as u64));
    }
}
