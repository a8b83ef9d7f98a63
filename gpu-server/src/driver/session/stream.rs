//! Streams and events: which there are, and whose.

use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_STREAMS};
use protocol::handle::{ContextId, EventId, StreamId};
use protocol::ops::Answer;
use protocol::ops::event::*;
use protocol::ops::stream::*;

use super::{Session, now};
use crate::cuda_ipc::Token;
use crate::driver::beside::Beside;
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::Gpu;
use crate::driver::streams::Stream;

/// An event of the client's. `E`: the GPU's.
pub(super) struct Event<E> {
    pub(super) context: ContextId,
    pub(super) native: E,
    /// The tokens under which it is shared.
    pub(super) tokens: Vec<Token>,
}

impl<G: Gpu> Session<G> {
    /// Makes a context's legacy default stream if `id` is one that is not there yet: nothing else makes it.
    pub(super) fn ensure_stream(&mut self, id: StreamId) -> Result {
        if id.0 < MAX_CONTEXTS && !self.streams.contains_key(&id.0) {
            let context = ContextId(id.0);
            let device = self.device_of(context).map_err(|_| Status::INVALID_HANDLE)?;
            let native = self.gpu.default_stream(context, device)?;
            self.streams.insert(id.0, Stream { context, green: None, native });
        }
        Ok(())
    }

    /// Checks that a stream may be made under this number.
    pub(super) fn check_new_stream(&self, id: StreamId) -> Result {
        let free = (MAX_CONTEXTS..MAX_STREAMS).contains(&id.0) && !self.streams.contains_key(&id.0);
        if free { Ok(()) } else { Err(Status::INVALID_HANDLE) }
    }

    /// The place in a stream where the next operation goes; the call's context is the stream's from here on. A context that has failed refuses with its error.
    pub(super) fn enter(&mut self, cx: &mut Call, id: StreamId) -> Result<G::Place> {
        self.ensure_stream(id)?;
        self.gpu.enter_stream(cx, &mut self.streams, id)
    }
}

impl<G: Gpu> StreamOps<Call> for Session<G> {
    fn stream_create(&mut self, cx: &mut Call, op: StreamCreate) -> Result {
        cx.context = op.context;
        self.check_new_stream(op.stream)?;
        self.gpu.enter(op.context)?;
        let native = self.gpu.make_stream(op.stream, op.context, op.flags, op.priority)?;
        self.streams.insert(op.stream.0, Stream { context: op.context, green: None, native });
        Ok(())
    }

    fn stream_destroy(&mut self, cx: &mut Call, op: StreamDestroy) -> Result {
        if op.stream.0 < MAX_CONTEXTS {
            return Err(Status::INVALID_HANDLE);
        }
        self.gpu.destroy_stream(cx, &mut self.streams, op.stream)
    }

    fn stream_synchronize(&mut self, cx: &mut Call, op: StreamSynchronize) -> Reply<StreamSynchronizeReply> {
        self.ensure_stream(op.stream)?;
        self.gpu.synchronize_stream(cx, &mut self.streams, op.stream)?;
        Ok(Answer::Later)
    }

    fn stream_mark(&mut self, cx: &mut Call, op: StreamMark) -> Result {
        self.ensure_stream(op.stream)?;
        self.gpu.mark_stream(cx, &mut self.streams, op.stream)
    }

    fn stream_wait_event(&mut self, cx: &mut Call, op: StreamWaitEvent) -> Result {
        let place = self.enter(cx, op.stream)?;
        let event = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        self.gpu.wait_event(&place, &event.native, op.flags)
    }

    fn stream_host_wait(&mut self, cx: &mut Call, op: StreamHostWait) -> Result {
        let place = self.enter(cx, op.stream)?;
        self.gpu.wait_for_client(cx, &mut self.streams, &place, op.ticket)
    }

    fn stream_host_signal(&mut self, _cx: &mut Call, op: StreamHostSignal) -> Result {
        // Signalled before its turn, or for a context that is gone: nothing is left to be done.
        self.gpu.beside().signal(op.ticket);
        Ok(())
    }

    fn stream_batch_mem_op(&mut self, cx: &mut Call, op: StreamBatchMemOp) -> Result {
        let place = self.enter(cx, op.stream)?;
        let operations = self.memory_ops(&op.operations, G::device_at(&place))?;
        self.gpu.memory_ops(cx, &place, operations)
    }

    fn stream_set_attribute(
        &mut self,
        cx: &mut Call,
        op: StreamSetAttribute,
    ) -> Reply<StreamSetAttributeReply> {
        self.ensure_stream(op.stream)?;
        self.gpu.set_stream_attribute(cx, &mut self.streams, op.stream, &op.attribute)?;
        now(StreamSetAttributeReply {})
    }

    fn stream_get_attribute(
        &mut self,
        cx: &mut Call,
        op: StreamGetAttribute,
    ) -> Reply<StreamGetAttributeReply> {
        self.ensure_stream(op.stream)?;
        let value = self.gpu.stream_attribute(cx, &mut self.streams, op.stream, op.attribute)?;
        now(StreamGetAttributeReply { value })
    }

    fn stream_copy_attributes(
        &mut self,
        cx: &mut Call,
        op: StreamCopyAttributes,
    ) -> Reply<StreamCopyAttributesReply> {
        self.ensure_stream(op.src)?;
        self.ensure_stream(op.dst)?;
        self.gpu.copy_stream_attributes(cx, &mut self.streams, op.src, op.dst)?;
        now(StreamCopyAttributesReply {})
    }
}

impl<G: Gpu> Session<G> {
    /// Memory operations, for a stream or a graph of the device `home`, as the GPU takes them. Each is valid, and its word is the session's.
    pub(super) fn memory_ops(&self, operations: &[MemoryOp], home: u32) -> Result<Vec<G::MemoryOp>> {
        if operations.is_empty() || operations.len() > memory_op::MOST {
            return Err(Status::INVALID_VALUE);
        }
        let check = |op: &MemoryOp| {
            if !op.is_valid() {
                return Err(Status::INVALID_VALUE);
            }
            let device = self.check_range(op.address, op.width(), home)?;
            self.gpu.memory_op(op, device)
        };
        operations.iter().map(check).collect()
    }
}

impl<G: Gpu> EventOps<Call> for Session<G> {
    fn event_create(&mut self, cx: &mut Call, op: EventCreate) -> Result {
        cx.context = op.context;
        if self.events.contains_key(&op.event.0) {
            return Err(Status::INVALID_HANDLE);
        }
        self.gpu.enter(op.context)?;
        let native = self.gpu.make_event(op.context, op.flags)?;
        self.events.insert(op.event.0, Event { context: op.context, native, tokens: Vec::new() });
        Ok(())
    }

    fn event_destroy(&mut self, cx: &mut Call, op: EventDestroy) -> Result {
        let event = self.events.remove(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        self.unshare(event.tokens);
        cx.context = event.context;
        self.gpu.destroy_event(event.context, event.native)
    }

    fn event_record(&mut self, cx: &mut Call, op: EventRecord) -> Result {
        let place = self.enter(cx, op.stream)?;
        let event = self.events.get_mut(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        if event.context != cx.context {
            return Err(Status::INVALID_HANDLE);
        }
        self.gpu.record_event(cx, &mut self.streams, &place, &mut event.native, op.flags)
    }

    fn event_synchronize(&mut self, cx: &mut Call, op: EventSynchronize) -> Reply<EventSynchronizeReply> {
        let event = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = event.context;
        self.gpu.synchronize_event(cx, &event.native)
    }

    fn event_elapsed(&mut self, cx: &mut Call, op: EventElapsed) -> Reply<EventElapsedReply> {
        let start = self.events.get(&op.start.0).ok_or(Status::INVALID_HANDLE)?;
        let end = self.events.get(&op.end.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = end.context;
        self.gpu.elapsed(cx, &start.native, &end.native)
    }
}

impl<G: Gpu> Session<G> {
    /// What was shared under these tokens is gone, for the client's other sessions as well.
    pub(super) fn unshare(&self, tokens: Vec<Token>) {
        if let Some(broker) = &self.broker {
            tokens.into_iter().for_each(|token| broker.unshare(token));
        }
    }

    /// Whether an event may get this number.
    pub(super) fn may_name_event(&self, id: EventId) -> Result {
        if self.events.contains_key(&id.0) { Err(Status::INVALID_HANDLE) } else { Ok(()) }
    }

    /// The handle by which other processes open an event, and the number of its device.
    pub(super) fn event_handle(&mut self, id: EventId) -> Result<(u32, Vec<u8>)> {
        let event = self.events.get(&id.0).ok_or(Status::INVALID_HANDLE)?;
        let handle = self.gpu.export_event(&event.native)?;
        Ok((self.gpu.number(self.device_of(event.context)?), handle))
    }

    /// An event is shared under a token.
    pub(super) fn note_shared(&mut self, id: EventId, token: Token) {
        if let Some(event) = self.events.get_mut(&id.0) {
            event.tokens.push(token);
        }
    }

    /// Opens another session's event.
    pub(super) fn open_event(&mut self, context: ContextId, id: EventId, handle: Vec<u8>) -> Result {
        self.gpu.enter(context)?;
        let native = self.gpu.import_event(context, handle)?;
        self.events.insert(id.0, Event { context, native, tokens: Vec::new() });
        Ok(())
    }

    /// Whether an event's last record is done.
    pub(super) fn is_event_done(&mut self, id: EventId) -> Result<bool> {
        let event = self.events.get(&id.0).ok_or(Status::INVALID_HANDLE)?;
        self.gpu.enter(event.context)?;
        self.gpu.query_event(event.context, &event.native)
    }
}
