//! What devices did, and when: the source of a profiler's device records.
//!
//! A session that has started recording gets a record of each kernel, copy and fill of its commands, with the
//! times at which the device began and ended it. The server collects records until the client reads them; it
//! keeps at most [`MOST_RECORDS`] and counts those for which it had no room.

use crate::data::HostOut;
use crate::ops::ops;

/// Maximum records that a server keeps for a session.
pub const MOST_RECORDS: usize = 1 << 18;

/// Values of [`ActivityRecord`]'s `kind`.
pub mod kind {
    /// A kernel.
    pub const KERNEL: u32 = 1;
    /// A copy.
    pub const COPY: u32 = 2;
    /// A fill.
    pub const FILL: u32 = 3;
}

crate::wire_struct! {
    /// A kernel, a copy or a fill that a device has executed. Fields that this kind does not have are 0.
    pub struct ActivityRecord {
        /// The command that caused it.
        seq: u64,
        /// A number of [`kind`].
        kind: u32,
        /// The stream that the command names.
        stream: u32,
        /// Ordinal of the device.
        device: u32,
        /// When the device began it, in nanoseconds of the server's clock ([`ActivityClock`]).
        begin: u64,
        /// When it ended.
        end: u64,
        /// Bytes that were copied or written.
        bytes: u64,
        /// The value of a fill.
        value: u32,
        /// For a copy: `CUpti_ActivityMemcpyKind`, and `CUpti_ActivityMemoryKind` of the source and the
        /// destination. For a fill: 0, 0, `CUpti_ActivityMemoryKind`.
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
        /// Number of the instantiated graph that it is part of, or 0.
        graph: u32,
        /// Number of its node in that graph, or 0.
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
        /// The records, in any order.
        records: Vec<ActivityRecord>,
    }
}

ops! {
    /// Activity of devices.
    trait ActivityOps;

    /// Begins to record what the session's devices do from now on. Drops earlier records. `NOT_SUPPORTED` if
    /// the server cannot record.
    sync 0x0f01 activity_start: ActivityStart
        [order Session, may_block Never, lane Main]
    {} -> ActivityStartReply {}

    /// Ends recording. The records so far can still be read.
    sync 0x0f02 activity_stop: ActivityStop
        [order Earlier, may_block Never, lane Main]
    {} -> ActivityStopReply {}

    /// Reads records, each once, as [`ActivityRecords`].
    sync 0x0f03 activity_read: ActivityRead
        [order Earlier, may_block Never, lane Main]
    {
        /// Where they go.
        out: HostOut,
        /// Whether the server first asks the driver for the records of all work that is done. Otherwise it
        /// returns those that it has already.
        flush: bool,
    } -> ActivityReadReply {
        /// Bytes that were written. 0: there are no more records at the moment.
        bytes: u64,
        /// Records for which there was no room since the last report of this number.
        dropped: u64,
    }

    /// The clock of the records.
    sync 0x0f04 activity_clock: ActivityClock
        [order None, may_block Never, lane Main]
    {} -> ActivityClockReply {
        /// Nanoseconds since an arbitrary time.
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
