//! Events.

use crate::handle::{ContextId, EventId, StreamId};
use crate::ops::ops;

ops! {
    /// Events.
    trait EventOps;

    /// `cuEventCreate`.
    async 0x0801 event_create: EventCreate
        [order Streams, may_block Never, lane Main]
    {
        /// Context.
        context: ContextId,
        /// Its id, not in use.
        event: EventId,
        /// `CUevent_flags`.
        flags: u32,
    }

    /// `cuEventDestroy`.
    async 0x0802 event_destroy: EventDestroy
        [order Streams, may_block Never, lane Main]
    {
        /// Event.
        event: EventId,
    }

    /// `cuEventRecord`. Updates the stream's progress word as [`crate::ops::stream::StreamMark`] does.
    async 0x0803 event_record: EventRecord
        [order Streams, may_block Never, lane Main]
    {
        /// Event.
        event: EventId,
        /// Stream.
        stream: StreamId,
        /// `CUevent_record_flags`.
        flags: u32,
    }

    /// `cuEventSynchronize`. Answered when the event's last record is done, or at once if it has none.
    sync 0x0804 event_synchronize: EventSynchronize
        [order Streams, may_block Never, lane Main]
    {
        /// Event.
        event: EventId,
    } -> EventSynchronizeReply {}

    /// `cuEventElapsedTime` of the events' last records. Answered when the record of `end` is done, with
    /// `CUDA_ERROR_NOT_READY` if that of `start` is not done by then. A client may ask long before; it must
    /// not record either event again until the answer comes.
    sync 0x0805 event_elapsed: EventElapsed
        [order Streams, may_block Never, lane Main]
    {
        /// Earlier event.
        start: EventId,
        /// Later event.
        end: EventId,
    } -> EventElapsedReply {
        /// Time between them in milliseconds.
        milliseconds: f32,
    }
}
