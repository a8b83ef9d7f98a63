//! Data that comes by RDMA, read by devices where it lands: the transport's slots, registered with CUDA, and two words for each of them.
//!
//! ```text
//!   network fills slot (round n) ─ host word = n ─▶ stream: wait(host ≥ n), copy to device, write(gpu = n) ─▶ the network may fill it again
//! ```
//!
//! It is [`super::staging`]'s order of things, but which chunk comes into which slot is the transport's rule ([`host_bridge::endpoint::planned_slots`]), known before the data is there. So
//! all device work of an upload is enqueued at once, and no CPU touches the bytes.

use std::sync::Arc;

use host_bridge::endpoint::{Arrivals, StagingArea};
use protocol::Status;

use super::api::{Api, CUdeviceptr};
use super::fence::{ALREADY_REGISTERED, Word, Words};

/// The slots of a session.
pub(super) struct Arrived {
    area: StagingArea,
    /// For each slot: written by the host and awaited by streams; written by streams and read by the host.
    words: Vec<(Word, Word)>,
}

// SAFETY: the area's pointer is only handed to CUDA; the memory stays as long as the client, which the worker keeps to its end.
unsafe impl Send for Arrived {}
// SAFETY: as above.
unsafe impl Sync for Arrived {}

impl Arrived {
    /// Registers the transport's memory in the current context.
    pub(super) fn new(api: &Api, words: &Arc<Words>, area: StagingArea) -> Result<Arc<Arrived>, Status> {
        let words = (0..area.slots).map(|_| Ok((words.take()?, words.take()?))).collect::<Result<_, _>>()?;
        let arrived = Arrived { area, words };
        arrived.register(api)?;
        Ok(Arc::new(arrived))
    }

    /// Registers it with the current context, again after the one before was reset.
    pub(super) fn register(&self, api: &Api) -> Result<(), Status> {
        // SAFETY: page-aligned memory that stays mapped until the process ends. Flags: portable, device-mapped.
        match unsafe { api.host_register(self.area.at.as_ptr().cast(), self.area.len, 3) } {
            Ok(()) | Err(ALREADY_REGISTERED) => Ok(()),
            Err(status) => Err(status),
        }
    }

    /// The words that streams wait for and write, for a slot of this session.
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
        // Streams that wait for the rest go on, with whatever is in the slots. (They compare differences, as signed numbers.)
        self.words.iter().for_each(|(host, _)| host.set(i64::MAX as u64));
    }
}
