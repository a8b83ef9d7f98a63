//! The few operations that are executed even while the dispatcher is busy.
//!
//! One of the client's host functions may need the bytes of a mirror, or a kernel may wait for a word of one
//! that a later command writes, or for a piece that another server sends. If a call into the driver waits for that
//! kernel, the dispatcher is stuck, and so are all commands behind it. The worker therefore also executes these
//! operations next to the dispatcher ([`crate::worker`]), using state that is shared for this purpose: each
//! backend's [mirrors](Beside), and the session's connections to other servers ([`Directs`]). Nothing here calls the
//! driver, except to add a copy to a stream that waits for nothing, for pieces in device memory.

use std::sync::Arc;

use host_bridge::endpoint::{Client, Sink};
use protocol::Status;
use protocol::channel::{MAX_PAYLOAD, NO_SLOT, Record};
use protocol::ops::direct::{DirectFailures, DirectReceive, DirectSendNow};
use protocol::ops::memory::{
    HostChange, HostFetch, HostFetchReply, HostPatch, HostRead, HostReadReply, HostWatch, HostWrite,
    WordPatch,
};
use protocol::ops::{self, Class, Hold, Lane, Op};
use protocol::wire::{Bytes, Wire, Writer};

use super::call::Pending;
use super::watches::Watches;
use crate::direct::Directs;

/// Executes these operations for a session.
pub struct Express {
    /// Its client.
    pub client: Arc<dyn Client>,
    /// Mirrors of the client's memory.
    pub beside: Arc<dyn Beside>,
    /// The session's connections to other servers.
    pub directs: Arc<Directs>,
}

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

/// Whether an operation is one of these. None of them waits, or lets a command go on that has waited.
pub fn is_served(opcode: u16) -> bool {
    ops::info(opcode).is_some_and(|info| info.lane == Lane::Express && info.hold != Hold::Ends)
}

impl Express {
    /// Whether a command can wait for one of these.
    #[inline]
    pub fn is_needed(&self) -> bool {
        self.beside.is_needed() || self.directs.is_prepared()
    }

    /// Executes a command out of order if it is one of these operations and is valid. Returns whether it was
    /// executed, and answered if it has an answer.
    pub fn serve(&self, record: &Record, body: &[u8]) -> bool {
        match self.answer(record, body) {
            Some(Some(payload)) => {
                self.client.reply(record.seq, record.reply_slot, Status::SUCCESS, &payload);
            }
            Some(None) => {}
            None => return false,
        }
        true
    }

    /// Executes one of these operations. Returns `Some` with the reply's payload, unless there is none or it
    /// comes later, once it was executed.
    fn answer(&self, record: &Record, body: &[u8]) -> Option<Option<Vec<u8>>> {
        /// The operation, if the record is one of this type and has a slot exactly if its class needs one.
        fn is<'a, T: Op<'a>>(record: &Record, body: &'a [u8]) -> Option<T> {
            let answered = T::INFO.class == Class::Sync;
            if record.opcode != T::INFO.opcode || answered != (record.reply_slot != NO_SLOT) {
                return None;
            }
            ops::decode(body).ok()
        }
        let Express { client, beside, directs } = self;
        if !is_served(record.opcode) {
            return None;
        }
        if let Some(op) = is::<HostWrite>(record, body) {
            return beside.watches().write(&**beside, op.address, op.bytes).ok().map(|()| None);
        }
        if let Some(op) = is::<HostPatch>(record, body) {
            return beside.watches().patch(&**beside, &op.words).ok().map(|()| None);
        }
        if let Some(op) = is::<HostChange>(record, body) {
            return change(&**beside, &op).ok().map(|()| None);
        }
        if let Some(op) = is::<HostFetch>(record, body) {
            let (bytes, changed) = beside.watches().fetch(&**beside, &op).ok()?;
            match client.sink(record.seq, 0, op.dst.0).ok()? {
                Sink::Mapped(mapped) => mapped.write(0, &bytes),
                // On an error, the session is over and nothing is needed.
                Sink::Outgoing(outgoing) => _ = outgoing.write(&bytes),
            }
            return Some(Some(encoded(&HostFetchReply { changed })));
        }
        if let Some(op) = is::<HostWatch>(record, body) {
            let begun = beside.watches().begin(client, beside, (record.seq, record.reply_slot), &op);
            return begun.ok().map(|()| None);
        }
        if let Some(op) = is::<DirectReceive>(record, body) {
            return directs.receive(&op, record.seq).ok().map(|()| None);
        }
        if let Some(op) = is::<DirectSendNow>(record, body) {
            return directs.send_now(&op, record.seq).ok().map(|()| None);
        }
        if is::<DirectFailures>(record, body).is_some() {
            let later = || Pending::new(Arc::clone(client), record.seq, record.reply_slot);
            return directs.failures(later).ok().map(|()| None);
        }
        let reply = read(&**beside, &is::<HostRead>(record, body)?).ok()?;
        Some(Some(encoded(&reply)))
    }
}

fn encoded<R: for<'r> Wire<'r>>(reply: &R) -> Vec<u8> {
    let mut payload = Vec::new();
    reply.put(&mut Writer(&mut payload));
    payload
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doubles::{Listener, Told, Zeros};
    use host_bridge::endpoint::Region;
    use protocol::data::{HostOut, HostRange, Place};
    use protocol::handle::ContextId;
    use protocol::ops::memory::MirrorRange;
    use std::num::NonZeroUsize;

    #[test]
    fn every_operation_of_the_express_lane_is_served_and_no_other() {
        fn is_served<'a, T: Op<'a>>(op: &T, slot: u16) -> (u16, bool) {
            let mut body = Vec::new();
            ops::encode(op, &mut body);
            let record = Record { opcode: T::INFO.opcode, reply_slot: slot, seq: 1 };
            let memory = Region::own(NonZeroUsize::MIN.saturating_add(4095)).expect("a page");
            let client: Arc<dyn Client> = Arc::new(Listener { told: |_: Told<'_>| {}, memory: Some(memory) });
            let (directs, _peers) = Directs::prepared_double(1);
            let express = Express { client, beside: Arc::<Zeros>::default(), directs };
            (T::INFO.opcode, express.serve(&record, &body))
        }
        let context = ContextId(0);
        let ranges = vec![MirrorRange { address: 0, len: 8 }];
        let dst = HostOut(HostRange { place: Place::Arena, offset: 0, len: 8 });
        let served = [
            is_served(&HostRead { context, address: 0, len: 8 }, 0),
            is_served(&HostWrite { context, address: 0, bytes: &[1] }, NO_SLOT),
            is_served(&HostPatch { context, words: vec![] }, NO_SLOT),
            is_served(&HostChange { context, address: 0, masks: &[1], bytes: &[1; 8] }, NO_SLOT),
            is_served(&HostFetch { context, ranges, settled: true, remember: true, has: vec![], dst }, 0),
            is_served(
                &HostWatch { context, number: 1, after: 0, most_us: 0, watched: vec![0], has: vec![] },
                0,
            ),
            is_served(&DirectReceive { direct: 1, number: 1, dst: 0, len: 1 }, NO_SLOT),
            is_served(&DirectSendNow { direct: 1, number: 1, src: 0, len: 1 }, NO_SLOT),
            is_served(&DirectFailures {}, 0),
        ];
        assert!(served.iter().all(|(_, served)| *served), "{served:?}");
        let mut express: Vec<u16> = ops::all()
            .filter(|row| row.lane == Lane::Express && row.hold != Hold::Ends)
            .map(|row| row.opcode)
            .collect();
        express.retain(|opcode| served.iter().all(|(served, _)| served != opcode));
        assert!(express.is_empty(), "the list above lacks {express:#06x?}");
        assert!(!is_served(&protocol::ops::nvml::NvmlSystem {}, 0).1);
        // Left to the dispatcher, which says what is wrong.
        assert!(!is_served(&DirectReceive { direct: 2, number: 1, dst: 0, len: 1 }, NO_SLOT).1);
        assert!(!is_served(&DirectSendNow { direct: 1, number: 1, src: 0, len: 0 }, NO_SLOT).1);
    }
}
