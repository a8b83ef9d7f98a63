//! What a client may need before a device goes on, or when one fails, whatever the dispatcher does.
//!
//! A host function of the client's may need the bytes of a mirror, or a kernel a word of one, which a later command
//! carries. A call of the driver's that waits for such a kernel keeps the dispatcher, and all commands behind it. So these few are also executed beside it
//! ([`crate::worker`]), by what each backend shares for that: nothing here calls the driver.

use protocol::Status;
use protocol::channel::{MAX_PAYLOAD, NO_SLOT, Record};
use protocol::ops::memory::{HostPatch, HostRead, HostReadReply, HostWrite, WordPatch};
use protocol::ops::{self, Class, Lane, Op};
use protocol::wire::{Bytes, Wire, Writer};

/// Mirrors of the client's memory, as every thread of a worker may use them. None of these waits for a device.
pub trait Beside: Send + Sync {
    /// Whether a mirror exists: whether anything below can be of use.
    fn is_needed(&self) -> bool;

    /// Fills `bytes` from a mirror, from `address` on.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless all of them are one mirror's.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Status>;

    /// Changes bytes of a mirror, from `address` on. Errors as [`Beside::read`].
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Status>;

    /// Changes words of one mirror. Errors as [`Beside::read`], and for words that are not aligned.
    fn patch(&self, words: &[WordPatch]) -> Result<(), Status>;

    /// The device with this number, among the server's, has failed: everything that waits for its work ends with `status`, and so does whatever uses it from now on.
    fn fail_device(&self, number: u32, status: Status);
}

/// The bytes that a [`HostRead`] asks for.
pub fn read(beside: &dyn Beside, op: &HostRead) -> Result<HostReadReply, Status> {
    if op.len as usize > MAX_PAYLOAD - 4 {
        return Err(Status::INVALID_VALUE);
    }
    let mut bytes = vec![0; op.len as usize];
    beside.read(op.address, &mut bytes)?;
    Ok(HostReadReply { bytes: Bytes(bytes) })
}

/// Executes a command out of its turn, if it is one of these and nothing is wrong with it. `Some`: it was, and this is its reply's payload, if it has one.
pub fn serve(beside: &dyn Beside, record: &Record, body: &[u8]) -> Option<Option<Vec<u8>>> {
    /// The operation, if it is this one, and answered as its class is.
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
    use protocol::handle::ContextId;
    use protocol::ops::Hold;

    /// Takes everything.
    struct Willing;

    impl Beside for Willing {
        fn is_needed(&self) -> bool {
            true
        }
        fn read(&self, _address: u64, _bytes: &mut [u8]) -> Result<(), Status> {
            Ok(())
        }
        fn write(&self, _address: u64, _bytes: &[u8]) -> Result<(), Status> {
            Ok(())
        }
        fn patch(&self, _words: &[WordPatch]) -> Result<(), Status> {
            Ok(())
        }
        fn fail_device(&self, _number: u32, _status: Status) {}
    }

    #[test]
    fn every_operation_of_the_express_lane_is_served_and_no_other() {
        fn is_served<'a, T: Op<'a>>(op: &T, slot: u16) -> (u16, bool) {
            let mut body = Vec::new();
            ops::encode(op, &mut body);
            let record = Record { opcode: T::INFO.opcode, reply_slot: slot, seq: 1 };
            (T::INFO.opcode, serve(&Willing, &record, &body).is_some())
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
