//! The few operations that are executed even while the dispatcher is busy.
//!
//! One of the client's host functions may need the bytes of a mirror, or a kernel may wait for a word of one
//! that a later command writes, or for a piece that another server sends. If a call into the driver waits for
//! that kernel, the dispatcher is stuck, and so are all commands behind it. The worker therefore also
//! executes these operations next to the dispatcher ([`crate::worker`]), using state that is shared for this
//! purpose: each backend's [mirrors](Beside), and the session's connections to other servers ([`Directs`]).
//! Nothing here calls the driver, except to add a copy to a stream that waits for nothing, for pieces in
//! device memory.

use std::sync::Arc;

use host_bridge::endpoint::{Client, Sink};
use protocol::Status;
use protocol::channel::{NO_SLOT, Record};
use protocol::ops::direct::{DirectFailures, DirectReceive, DirectSendNow};
use protocol::ops::memory::{
    HostChange, HostFetch, HostFetchReply, HostPatch, HostRead, HostWatch, HostWrite,
};
use protocol::ops::{self, Class, Hold, Lane, Op};
use protocol::wire::{Wire, Writer};

use super::beside::{Beside, change, read};
use super::call::Pending;
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
