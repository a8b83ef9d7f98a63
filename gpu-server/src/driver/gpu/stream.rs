//! Streams, and events on them.

use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::event::{EventElapsedReply, EventSynchronizeReply};
use protocol::ops::launch::LaunchAttribute;
use protocol::ops::stream::MemoryOp;

use crate::driver::call::{Call, End, Reply, Result};
use crate::driver::streams::Streams;
use crate::shared_event::Moment;

/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
pub const EVENT_INTERPROCESS: u32 = 4;
/// `CU_STREAM_NON_BLOCKING`.
pub const STREAM_NON_BLOCKING: u32 = 1;

/// Streams, and events on them.
///
/// Methods that take a stream's ID find the stream in the table. Those that enqueue something take a
/// [`Place`](GpuStreams::Place).
pub trait GpuStreams {
    /// A stream.
    type Stream: Send;
    /// A place in a stream where operations can be enqueued. Its context is the one entered last.
    type Place;
    /// An event.
    type Event: Send;
    /// A memory operation of a stream in the GPU's form.
    type MemoryOp;

    /// The legacy default stream of a context.
    fn default_stream(&mut self, context: ContextId, device: u32) -> Result<Self::Stream>;

    /// Makes a stream in a context that was entered.
    fn make_stream(
        &mut self,
        id: StreamId,
        context: ContextId,
        flags: u32,
        priority: i32,
    ) -> Result<Self::Stream>;

    /// Removes a stream other than a default stream from the table. Its work still completes.
    fn destroy_stream(&mut self, cx: &mut Call, streams: &mut Streams<Self::Stream>, id: StreamId) -> Result;

    /// The place in a stream for the next operation, ordered with its context's legacy default stream. Sets
    /// the call's context.
    fn enter_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result<Self::Place>;

    /// Calls `end` when everything that the client has put on the stream so far is finished, or never will
    /// be. Sets the call's context. This orders no other stream's work, also on a legacy default stream.
    fn after_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
        end: End,
    ) -> Result;

    /// The device of a place.
    fn device_at(place: &Self::Place) -> u32;

    /// Answers the call when everything on the stream is done. Sets the call's context.
    fn synchronize_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
    ) -> Result;

    /// Answers the call when everything on all streams of a context is done.
    fn synchronize_context(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        context: ContextId,
    ) -> Result;

    /// Calls `end` when everything enqueued on a device so far is done, or never will be; its argument then
    /// says why. `seq` is the command's.
    fn after_device(
        &mut self,
        streams: &mut Streams<Self::Stream>,
        device: u32,
        seq: u64,
        end: impl FnOnce(Status) + Send + 'static,
    );

    /// Raises the stream's progress word to the call's number when everything on it is done. Sets the call's
    /// context.
    fn mark_stream(&mut self, cx: &mut Call, streams: &mut Streams<Self::Stream>, id: StreamId) -> Result;

    /// Raises a stream's progress word to `seq`, although the stream's context has failed with `status`:
    /// nothing on it will be done any more.
    fn give_up(&mut self, streams: &mut Streams<Self::Stream>, id: StreamId, seq: u64, status: Status);

    /// Makes what follows wait for an event's last record.
    fn wait_event(&mut self, place: &Self::Place, event: &Self::Event, flags: u32) -> Result;

    /// Makes what follows wait for a moment in another session's work.
    fn wait_for(
        &mut self,
        cx: &Call,
        streams: &mut Streams<Self::Stream>,
        place: &Self::Place,
        moment: Moment,
    ) -> Result;

    /// Converts a memory operation to the GPU's form. It is valid, and its word, if it has one, belongs to
    /// the session and is accessed through `device`.
    fn memory_op(&self, op: &MemoryOp, device: u32) -> Result<Self::MemoryOp>;

    /// Enqueues memory operations.
    fn memory_ops(&mut self, cx: &Call, place: &Self::Place, operations: Vec<Self::MemoryOp>) -> Result;

    /// Sets an attribute of a stream. Sets the call's context, like the next two methods.
    fn set_stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
        attribute: &LaunchAttribute,
    ) -> Result;

    /// An attribute of a stream.
    fn stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        id: StreamId,
        attribute: u32,
    ) -> Result<[u8; 64]>;

    /// Sets all attributes of `to` to those of `from`, a stream of the same context.
    fn copy_stream_attributes(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<Self::Stream>,
        from: StreamId,
        to: StreamId,
    ) -> Result;

    /// Makes an event in an entered context.
    fn make_event(&mut self, context: ContextId, flags: u32) -> Result<Self::Event>;

    /// Destroys an event that the session has removed from its table.
    fn destroy_event(&mut self, context: ContextId, event: Self::Event) -> Result;

    /// Records an event of the place's context. When that is reached, raises the stream's progress word to
    /// the call's number before the event becomes done, so that whoever sees the event done also finds the
    /// word.
    fn record_event(
        &mut self,
        cx: &Call,
        streams: &mut Streams<Self::Stream>,
        place: &Self::Place,
        event: &mut Self::Event,
        flags: u32,
    ) -> Result;

    /// Answers the call, an [`EventSynchronize`](protocol::ops::event::EventSynchronize) in the event's
    /// context, when its last record is done.
    fn synchronize_event(&mut self, cx: &Call, event: &Self::Event) -> Reply<EventSynchronizeReply>;

    /// Answers the call with the time between the last records of two events. The call's context is that of
    /// `end`.
    fn elapsed(&mut self, cx: &Call, start: &Self::Event, end: &Self::Event) -> Reply<EventElapsedReply>;
}
