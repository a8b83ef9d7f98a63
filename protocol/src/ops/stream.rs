//! Streams.

use crate::handle::{ContextId, EventId, StreamId, TicketId};
use crate::ops::launch::LaunchAttribute;
use crate::ops::ops;

/// `CUstreamAttrID`: the values of `CUlaunchAttributeID` that apply to streams.
pub mod attribute {
    /// How a range of memory is cached.
    pub const ACCESS_POLICY_WINDOW: u32 = 1;
    /// How a host thread waits for the stream.
    pub const SYNCHRONIZATION_POLICY: u32 = 3;
    /// Priority.
    pub const PRIORITY: u32 = 8;
    /// Mapping of memory synchronization domains.
    pub const MEM_SYNC_DOMAIN_MAP: u32 = 9;
    /// The memory synchronization domain of kernels.
    pub const MEM_SYNC_DOMAIN: u32 = 10;
    /// All attributes.
    pub const ALL: [u32; 5] =
        [ACCESS_POLICY_WINDOW, SYNCHRONIZATION_POLICY, PRIORITY, MEM_SYNC_DOMAIN_MAP, MEM_SYNC_DOMAIN];
}

/// `CUstreamBatchMemOpType`.
pub mod memory_op {
    /// Wait for a condition on a word of 32 bits.
    pub const WAIT_32: u32 = 1;
    /// Write a word of 32 bits.
    pub const WRITE_32: u32 = 2;
    /// Flush remote writes to the device.
    pub const FLUSH_REMOTE_WRITES: u32 = 3;
    /// Wait for a condition on a word of 64 bits.
    pub const WAIT_64: u32 = 4;
    /// Write a word of 64 bits.
    pub const WRITE_64: u32 = 5;
    /// A fence.
    pub const BARRIER: u32 = 6;
    /// `CU_STREAM_WAIT_VALUE_FLUSH`, a flag of a wait.
    pub const WAIT_FLUSH: u32 = 1 << 30;
    /// `CU_STREAM_WAIT_VALUE_NOR`, the last of the conditions in a wait's flags.
    pub const WAIT_NOR: u32 = 3;
    /// Maximum operations of one [`StreamBatchMemOp`](super::StreamBatchMemOp).
    pub const MOST: usize = 255;
}

crate::wire_struct! {
    /// One memory operation of a stream: `CUstreamBatchMemOpParams`.
    pub struct MemoryOp {
        /// `CUstreamBatchMemOpType`: see [`memory_op`].
        operation: u32,
        /// Its flags.
        flags: u32,
        /// Address of its word, a multiple of the word's size; 0 for an operation without a word.
        address: u64,
        /// The value to write or compare with; for 32 bits in the lower half.
        value: u64,
    }
}

impl MemoryOp {
    /// Bytes of its word; 0 for an operation without a word.
    pub fn width(&self) -> u64 {
        match self.operation {
            memory_op::WAIT_32 | memory_op::WRITE_32 => 4,
            memory_op::WAIT_64 | memory_op::WRITE_64 => 8,
            _ => 0,
        }
    }

    /// Whether it waits.
    pub fn is_wait(&self) -> bool {
        matches!(self.operation, memory_op::WAIT_32 | memory_op::WAIT_64)
    }

    /// Whether operation and flags exist and the address is aligned. A device may still not support it.
    pub fn is_valid(&self) -> bool {
        let flags = match self.operation {
            memory_op::WAIT_32 | memory_op::WAIT_64 => {
                self.flags & !memory_op::WAIT_FLUSH <= memory_op::WAIT_NOR
            }
            memory_op::WRITE_32 | memory_op::WRITE_64 | memory_op::FLUSH_REMOTE_WRITES => self.flags == 0,
            memory_op::BARRIER => self.flags <= 1,
            _ => false,
        };
        flags && self.address.is_multiple_of(self.width().max(1))
    }

    /// Whether the condition of a wait holds when its word is `now`.
    pub fn holds(&self, now: u64) -> bool {
        let wide = self.width() == 8;
        let (now, value) =
            if wide { (now, self.value) } else { (now & 0xffff_ffff, self.value & 0xffff_ffff) };
        match self.flags & !memory_op::WAIT_FLUSH {
            // Cyclic: after a wrap-around, the counter still compares as later.
            0 if wide => now.wrapping_sub(value) as i64 >= 0,
            0 => (now as u32).wrapping_sub(value as u32) as i32 >= 0,
            1 => now == value,
            2 => now & value != 0,
            _ if wide => !(now | value) != 0,
            _ => !(now as u32 | value as u32) != 0,
        }
    }
}

ops! {
    /// Streams. The legacy default stream of context *c* is [`StreamId`] *c* and always exists.
    ///
    /// [`StreamMark`] and [`EventRecord`](crate::ops::event::EventRecord) update the stream's progress word
    /// (`docs/wire.md`): it becomes their `seq` once the stream has completed them. So a client queries a
    /// stream by reading memory.
    trait StreamOps;

    /// `cuStreamCreateWithPriority`.
    async 0x0701 stream_create: StreamCreate
        [order Streams, may_block Never, lane Main]
    {
        /// Context.
        context: ContextId,
        /// Its id, not in use and not below [`crate::channel::MAX_CONTEXTS`]. The client zeroes its progress
        /// word first.
        stream: StreamId,
        /// `CUstream_flags`.
        flags: u32,
        /// Priority.
        priority: i32,
    }

    /// `cuStreamDestroy`. Work on it still completes; after that its progress word is no longer written.
    async 0x0702 stream_destroy: StreamDestroy
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
    }

    /// `cuStreamSynchronize`. Answered when everything before it on the stream is done. The status is the
    /// context's deferred error, if it has one.
    sync 0x0703 stream_synchronize: StreamSynchronize
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
    } -> StreamSynchronizeReply {}

    /// Sets the stream's progress word to this record's `seq` when everything before it is done.
    async 0x0704 stream_mark: StreamMark
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
    }

    /// `cuStreamWaitEvent`.
    async 0x0705 stream_wait_event: StreamWaitEvent
        [order Streams, may_block Never, lane Main]
    {
        /// Stream that waits.
        stream: StreamId,
        /// Event. The stream does not wait for an event that was never recorded.
        event: EventId,
        /// `CUevent_wait_flags`.
        flags: u32,
    }

    /// Stops the stream until a [`StreamHostSignal`] with the same ticket comes. With this operation the
    /// client implements `cuLaunchHostFunc` and `cuStreamAddCallback`, whose host functions it calls itself.
    async 0x0706 stream_host_wait: StreamHostWait
        [order Streams, may_block Never, lane Main, hold UntilSignal]
    {
        /// Stream that waits.
        stream: StreamId,
        /// Ticket, never used before in this session.
        ticket: TicketId,
    }

    /// Releases the stream that waits for the ticket.
    async 0x0707 stream_host_signal: StreamHostSignal
        [order None, may_block Never, lane Express, hold Ends]
    {
        /// Ticket.
        ticket: TicketId,
    }

    /// `cuStreamWaitValue32`, `cuStreamWriteValue32`, their 64-bit forms, and `cuStreamBatchMemOp`. The words
    /// lie in the session's own memory.
    async 0x0708 stream_batch_mem_op: StreamBatchMemOp
        [order Streams, may_block Never, lane Main, hold UntilWord]
    {
        /// Stream.
        stream: StreamId,
        /// Operations in order, at most [`memory_op::MOST`].
        operations: Vec<MemoryOp>,
    }

    /// `cuStreamSetAttribute`. Applies to later work on the stream.
    sync 0x0709 stream_set_attribute: StreamSetAttribute
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// The attribute: its number is one of [`attribute`].
        attribute: LaunchAttribute,
    } -> StreamSetAttributeReply {}

    /// `cuStreamGetAttribute`.
    sync 0x070a stream_get_attribute: StreamGetAttribute
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// One of [`attribute`].
        attribute: u32,
    } -> StreamGetAttributeReply {
        /// Its value.
        value: [u8; 64],
    }

    /// `cuStreamCopyAttributes`: copies all attributes of a stream to another stream of its context.
    sync 0x070b stream_copy_attributes: StreamCopyAttributes
        [order Streams, may_block Never, lane Main]
    {
        /// Target.
        dst: StreamId,
        /// Source.
        src: StreamId,
    } -> StreamCopyAttributesReply {}

    /// Answered when there is room for more commands: when no more than `bytes` of them are held back behind
    /// a [`StreamHostWait`], or when the next command of the stream would not be. A client asks from time to
    /// time, and its program waits, as it natively does when a queue of the driver is full.
    sync 0x070c stream_room: StreamRoom
        [order None, may_block Never, lane Main, since 3]
    {
        /// Stream; `None` if the commands may be of any.
        stream: Option<StreamId>,
        /// Bytes as the server counts them, with its own data about each command.
        bytes: u64,
    } -> StreamRoomReply {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(operation: u32, flags: u32, value: u64) -> MemoryOp {
        MemoryOp { operation, flags, address: 16, value }
    }

    #[test]
    fn a_count_that_wraps_is_later_than_before() {
        let narrow = wait(memory_op::WAIT_32, 0, 0xffff_fff0);
        assert!(narrow.holds(0xffff_fff0) && narrow.holds(5) && !narrow.holds(0xffff_ffef));
        // Only the word's own bits count.
        assert!(narrow.holds(0xdead_beef_0000_0005));
        let wide = wait(memory_op::WAIT_64, 0, u64::MAX);
        assert!(wide.holds(0) && !wide.holds(u64::MAX - 1));
    }

    #[test]
    fn the_other_conditions_look_at_bits() {
        assert!(wait(memory_op::WAIT_32, 1, 7).holds(7) && !wait(memory_op::WAIT_32, 1, 7).holds(8));
        assert!(wait(memory_op::WAIT_64, 2, 1 << 40).holds(3 << 40));
        assert!(!wait(memory_op::WAIT_32, 2, 1 << 40).holds(u64::MAX));
        assert!(wait(memory_op::WAIT_32, 3, 0x0fff_ffff).holds(0x7000_0000));
        assert!(!wait(memory_op::WAIT_32, 3, 0x0fff_ffff).holds(0xf000_0000));
        assert!(!wait(memory_op::WAIT_64, 3, u64::MAX).holds(0));
    }

    #[test]
    fn operations_flags_and_addresses_that_do_not_exist_are_not_valid() {
        assert!(wait(memory_op::WAIT_64, memory_op::WAIT_FLUSH | 3, 0).is_valid());
        for (operation, flags) in
            [(0, 0), (7, 0), (memory_op::WAIT_32, 4), (memory_op::WRITE_32, 1), (memory_op::BARRIER, 2)]
        {
            assert!(!wait(operation, flags, 0).is_valid(), "{operation} {flags}");
        }
        assert!(!MemoryOp { address: 12, ..wait(memory_op::WAIT_64, 0, 0) }.is_valid());
        assert!(MemoryOp { address: 12, ..wait(memory_op::WAIT_32, 0, 0) }.is_valid());
    }
}
