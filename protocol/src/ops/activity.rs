//! What devices did, and when: the source of profilers' device records.
//!
//! A session that has started it gets a record of each kernel, copy and fill that its commands gave a device, with the times at which the device began and ended it. Records collect on the server
//! until the client reads them; a server keeps [`MOST_RECORDS`] and counts those for which there was no room.

use crate::data::HostOut;
use crate::ops::ops;

/// Most records that a server keeps for a session.
pub const MOST_RECORDS: usize = 1 << 18;

/// What a record is about: [`ActivityRecord`]'s `kind`.
pub mod kind {
    /// A kernel.
    pub const KERNEL: u32 = 1;
    /// A copy.
    pub const COPY: u32 = 2;
    /// A fill.
    pub const FILL: u32 = 3;
}

crate::wire_struct! {
    /// A kernel, a copy or a fill that a device has done. Fields that its kind does not have are 0.
    pub struct ActivityRecord {
        /// The command that it was part of.
        seq: u64,
        /// A number of [`kind`].
        kind: u32,
        /// The stream that the command names.
        stream: u32,
        /// Ordinal of the device.
        device: u32,
        /// When the device began it, in nanoseconds by the server's clock ([`ActivityClock`]).
        begin: u64,
        /// When it ended.
        end: u64,
        /// Bytes that were copied or written.
        bytes: u64,
        /// The value of a fill.
        value: u32,
        /// Of a copy: `CUpti_ActivityMemcpyKind`, and `CUpti_ActivityMemoryKind` of the source and the destination. Of a fill: 0, 0, `CUpti_ActivityMemoryKind`.
        memory: [u8; 3],
        /// Ordinals of the devices of a copy's source and destination.
        ends: [u32; 2],
        /// Blocks of a kernel in x, y, z.
        grid: [u32; 3],
        /// Threads of a block in x, y, z.
        block: [u32; 3],
        /// Blocks of a cluster in x, y, z.
        cluster: [u32; 3],
        /// Static and dynamic shared memory of a block, in bytes.
        shared: [u32; 2],
        /// Registers of a thread.
        registers: u32,
        /// Local memory of a thread, in bytes.
        local: u32,
        /// A number for the instantiated graph that it is part of, and one for its node there; 0: of none.
        graph: u32,
        /// See `graph`.
        node: u64,
        /// The kernel's name: an index into [`ActivityRecords`]'s `names`.
        name: u32,
    }
}

crate::wire_struct! {
    /// Records, as bulk data of [`ActivityRead`].
    pub struct ActivityRecords {
        /// Names of kernels, as in their modules.
        names: Vec<String>,
        /// The records, in no certain order.
        records: Vec<ActivityRecord>,
    }
}

ops! {
    /// Activity of devices.
    trait ActivityOps;

    /// Begins to record what the session's devices do from here on. Drops the records of an earlier time. `NOT_SUPPORTED` where the server cannot.
    sync 0x0f01 activity_start: ActivityStart
        [order Session, may_block Never, lane Main]
    {} -> ActivityStartReply {}

    /// Ends recording. What was recorded can still be read.
    sync 0x0f02 activity_stop: ActivityStop
        [order Earlier, may_block Never, lane Main]
    {} -> ActivityStopReply {}

    /// Reads records, each once, as [`ActivityRecords`].
    sync 0x0f03 activity_read: ActivityRead
        [order Earlier, may_block Never, lane Main]
    {
        /// Where they go.
        out: HostOut,
        /// Whether the driver is asked for all that devices have done. Otherwise these are the records that are there already.
        flush: bool,
    } -> ActivityReadReply {
        /// Bytes that were written. 0: there are no more records now.
        bytes: u64,
        /// Records for which there was no room, since the last time that this was said.
        dropped: u64,
    }

    /// The clock by which records tell the time.
    sync 0x0f04 activity_clock: ActivityClock
        [order None, may_block Never, lane Main]
    {} -> ActivityClockReply {
        /// Nanoseconds since an arbitrary moment.
        now: u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Reader, Wire, Writer};

    #[test]
    fn a_record_takes_a_fixed_number_of_bytes() {
        let records = ActivityRecords { names: vec!["a".into()], records: Vec::new() };
        let mut bytes = Vec::new();
        records.put(&mut Writer(&mut bytes));
        let mut reader = Reader::new(&bytes);
        assert_eq!(ActivityRecords::get(&mut reader), Ok(records));
        assert!(reader.finish().is_ok());
    }
}
