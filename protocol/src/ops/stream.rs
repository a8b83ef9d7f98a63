//! Streams.

use crate::handle::{ContextId, EventId, StreamId, TicketId};
use crate::ops::ops;

ops! {
    /// Streams. The legacy default stream of context *c* is [`StreamId`] *c* and needs no making.
    ///
    /// A stream's progress word (`docs/wire.md`) rises to the `seq` of an operation marked as publishing once the stream has completed it, so
    /// that a query is a read of memory.
    trait StreamOps;

    /// `cuStreamCreateWithPriority`.
    async 0x0701 stream_create: StreamCreate {
        /// Context.
        context: ContextId,
        /// Its name, not in use; not below [`crate::channel::MAX_CONTEXTS`]. Its progress word is zeroed by the client before.
        stream: StreamId,
        /// `CUstream_flags`.
        flags: u32,
        /// Priority.
        priority: i32,
    }

    /// `cuStreamDestroy`: work on it still completes; its progress word is written no more after that.
    async 0x0702 stream_destroy: StreamDestroy {
        /// Stream.
        stream: StreamId,
    }

    /// Answered when everything before it on the stream is done: `cuStreamSynchronize`. The status is the context's deferred error, if it has one.
    sync 0x0703 stream_synchronize: StreamSynchronize {
        /// Stream.
        stream: StreamId,
    } -> StreamSynchronizeReply {}

    /// Publishes: the stream's progress word becomes this record's `seq` when everything before it is done.
    async 0x0704 stream_mark: StreamMark {
        /// Stream.
        stream: StreamId,
    }

    /// `cuStreamWaitEvent`.
    async 0x0705 stream_wait_event: StreamWaitEvent {
        /// Stream that waits.
        stream: StreamId,
        /// Event, recorded before or not at all (then there is nothing to wait for).
        event: EventId,
        /// `CUevent_wait_flags`.
        flags: u32,
    }

    /// The stream goes no further until [`StreamHostSignal`] comes with the same ticket: what `cuLaunchHostFunc` and `cuStreamAddCallback` are
    /// made of, the function itself being called in the client.
    async 0x0706 stream_host_wait: StreamHostWait {
        /// Stream that waits.
        stream: StreamId,
        /// Ticket, never used before in this session.
        ticket: TicketId,
    }

    /// Lets the stream that waits for the ticket go on.
    async 0x0707 stream_host_signal: StreamHostSignal {
        /// Ticket.
        ticket: TicketId,
    }
}
