//! The few operations that are executed even while the dispatcher is busy.
//!
//! One of the client's host functions may need the bytes of a mirror, or a kernel may wait for a word of one
//! that a later command writes. If a call into the driver waits for that kernel, the dispatcher is stuck, and
//! so are all commands behind it. The worker therefore also executes these operations next to the dispatcher
//! ([`crate::worker`]), using state that each backend shares for this purpose. Nothing here calls the driver.

use protocol::Status;
use protocol::channel::{MAX_PAYLOAD, NO_SLOT, Record};
use protocol::ops::memory::{HostPatch, HostRead, HostReadReply, HostWrite, WordPatch};
use protocol::ops::{self, Class, Lane, Op};
use protocol::wire::{Bytes, Wire, Writer};

/// Mirrors of the client's memory, usable from every thread of a worker. None of these methods waits for a
/// device.
pub trait Beside: Send + Sync {
    /// Whether there are mirrors, so that the methods below can be needed.
    fn is_needed(&self) -> bool;

    /// Reads `bytes` from a mirror, starting at `address`.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the whole range is in one mirror.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Status>;

    /// Writes bytes of a mirror, starting at `address`. Errors as for [`Beside::read`].
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Status>;

    /// Writes words of one mirror. Errors as for [`Beside::read`], and if a word is not aligned.
    fn patch(&self, words: &[WordPatch]) -> Result<(), Status>;

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

/// Executes a command out of order if it is one of these operations and is valid. Returns `Some` with the
/// reply's payload, if it has one, once it was executed.
pub fn serve(beside: &dyn Beside, record: &Record, body: &[u8]) -> Option<Option<Vec<u8>>> {
    /// The operation, if the record is one of this type and has a slot exactly if its class needs one.
    fn is<'a, T: Op<'a>>(record: &Record, body: &'a [u8]) -> Option<T> {
        let answered = T::INFO.class == Class::Sync;
        if record.opcode != T::INFO.opcode || answered != (record.reply_slot != NO_SLOT) {
            return None;
        }
        ops::decode(body).ok()
    }
    if ops::info(record.opcode)?.lane != Lane::Express {
        return None;
    }
    if let Some(op) = is::<HostWrite>(record, body) {
        return beside.write(op.address, op.bytes).ok().map(|()| None);
    }
    if let Some(op) = is::<HostPatch>(record, body) {
        return beside.patch(&op.words).ok().map(|()| None);
    }
    let reply = read(beside, &is::<HostRead>(record, body)?).ok()?;
    let mut payload = Vec::new();
    reply.put(&mut Writer(&mut payload));
    Some(Some(payload))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doubles::Zeros;
    use protocol::handle::ContextId;
    use protocol::ops::Hold;

    #[test]
    fn every_operation_of_the_express_lane_is_served_and_no_other() {
        fn is_served<'a, T: Op<'a>>(op: &T, slot: u16) -> (u16, bool) {
            let mut body = Vec::new();
            ops::encode(op, &mut body);
            let record = Record { opcode: T::INFO.opcode, reply_slot: slot, seq: 1 };
            (T::INFO.opcode, serve(&Zeros, &record, &body).is_some())
        }
        let context = ContextId(0);
        let served = [
            is_served(&HostRead { context, address: 0, len: 8 }, 0),
            is_served(&HostWrite { context, address: 0, bytes: &[1] }, NO_SLOT),
            is_served(&HostPatch { context, words: vec![] }, NO_SLOT),
        ];
        assert!(served.iter().all(|(_, served)| *served), "{served:?}");
        let mut express: Vec<u16> = ops::all()
            .filter(|row| row.lane == Lane::Express && row.hold != Hold::Ends)
            .map(|row| row.opcode)
            .collect();
        express.retain(|opcode| served.iter().all(|(served, _)| served != opcode));
        assert!(express.is_empty(), "the list above lacks {express:#06x?}");
        assert!(!is_served(&protocol::ops::nvml::NvmlSystem {}, 0).1);
    }
}
