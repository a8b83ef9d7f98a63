//! A session's streams and events.

use std::sync::Arc;

use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_STREAMS};
use protocol::handle::{ContextId, EventId, StreamId};
use protocol::ops::Answer;
use protocol::ops::event::*;
use protocol::ops::stream::*;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result, is_sticky};
use crate::driver::gpu::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, Gpu, STREAM_NON_BLOCKING};
use crate::driver::streams::{Event, Stream};
use crate::shared_event::SharedEvent;
use crate::worker_protocol::{Shared, Token};

/// Maximum number of events in a session. Each takes a few hundred bytes of the server's memory, which no
/// other limit counts. (Streams are limited by their progress words.)
const MAX_EVENTS: usize = if cfg!(test) { 64 } else { 1 << 18 };

impl<G: Gpu> Session<G> {
    /// Makes a context's legacy default stream if `id` is one that doesn't exist yet. Nothing else makes
    /// these.
    pub(super) fn ensure_stream(&mut self, id: StreamId) -> Result {
        if id.0 < MAX_CONTEXTS && !self.streams.contains_key(&id.0) {
            let context = ContextId(id.0);
            let device = self.device_of(context).map_err(|_| Status::INVALID_HANDLE)?;
            let native = self.gpu.default_stream(context, device)?;
            self.streams.insert(id.0, Stream { context, green: None, is_blocking: true, native });
        }
        Ok(())
    }

    /// Checks that a stream with this ID may be made.
    pub(super) fn check_new_stream(&self, id: StreamId) -> Result {
        let free = (MAX_CONTEXTS..MAX_STREAMS).contains(&id.0) && !self.streams.contains_key(&id.0);
        if free { Ok(()) } else { Err(Status::INVALID_HANDLE) }
    }

    /// The place in a stream for the next operation. The stream's context becomes the call's. A failed
    /// context refuses with its error.
    pub(super) fn enter(&mut self, cx: &mut Call, id: StreamId) -> Result<G::Place> {
        self.ensure_stream(id)?;
        self.gpu.enter_stream(cx, &mut self.streams, id)
    }

    /// Like [`enter`](Self::enter), for a piece of work.
    pub(super) fn enter_to_work(&mut self, cx: &mut Call, id: StreamId) -> Result<G::Place> {
        let place = self.enter(cx, id)?;
        self.works(id);
        Ok(place)
    }

    /// Launches something on an entered stream, between two fences if there is a watchdog.
    pub(super) fn launch_watched(
        &mut self,
        cx: &mut Call,
        id: StreamId,
        launch: impl FnOnce(&mut Session<G>, &mut Call) -> Result,
    ) -> Result {
        let Some(watchdog) = &self.watchdog else { return launch(self, cx) };
        let watch = watchdog.watch(cx.context);
        let begins = Arc::clone(&watch);
        self.gpu.after_stream(cx, &mut self.streams, id, Box::new(move |status| begins.begin(status)))?;
        // Again: the launch comes after that fence, which is not the end of the stream's work.
        self.enter(cx, id)?;
        launch(self, cx)?;
        self.gpu.after_stream(cx, &mut self.streams, id, Box::new(move |_| drop(watch)))
    }

    fn record(&mut self, cx: &mut Call, op: &EventRecord) -> Result {
        let place = self.enter(cx, op.stream)?;
        let event = self.events.get_mut(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        if event.context != cx.context {
            return Err(Status::INVALID_HANDLE);
        }
        self.gpu.record_event(cx, &mut self.streams, &place, &mut event.native, op.flags)?;
        let Some(running) = event.shared.as_ref().map(SharedEvent::record) else { return Ok(()) };
        self.gpu.after_stream(cx, &mut self.streams, op.stream, Box::new(move |_| drop(running)))
    }

    /// Returns the result of a command that raises its stream's progress word, for which the client waits.
    /// One that is refused raises it, too: once the stream gets there, or at once if the context has failed.
    fn published(&mut self, cx: &mut Call, id: StreamId, result: Result) -> Result {
        let Err(status) = result else { return result };
        let marked = if is_sticky(status) { result } else { self.gpu.mark_stream(cx, &mut self.streams, id) };
        if let Err(status) = marked
            && is_sticky(status)
        {
            self.gpu.give_up(&mut self.streams, id, cx.seq, status);
        }
        result
    }

    /// Counts a piece of work for an existing stream.
    #[inline]
    pub(super) fn works(&mut self, id: StreamId) {
        *self.worked.entry(id.0).or_default() += 1;
    }
}

impl<G: Gpu> StreamOps<Call> for Session<G> {
    fn stream_create(&mut self, cx: &mut Call, op: StreamCreate) -> Result {
        cx.context = op.context;
        self.check_new_stream(op.stream)?;
        self.gpu.enter(op.context)?;
        let native = self.gpu.make_stream(op.stream, op.context, op.flags, op.priority)?;
        let is_blocking = op.flags & STREAM_NON_BLOCKING == 0;
        self.streams.insert(op.stream.0, Stream { context: op.context, green: None, is_blocking, native });
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
        let marked = self.gpu.mark_stream(cx, &mut self.streams, op.stream);
        self.published(cx, op.stream, marked)
    }

    fn stream_wait_event(&mut self, cx: &mut Call, op: StreamWaitEvent) -> Result {
        let place = self.enter(cx, op.stream)?;
        let event = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        match event.shared.as_ref().map(|shared| (shared, shared.last())) {
            Some((_, None)) => Ok(()),
            Some((shared, Some(moment))) if !shared.is_own(&moment) => {
                if moment.has_come() {
                    return Ok(());
                }
                self.gpu.wait_for(cx, &mut self.streams, &place, moment)
            }
            _ => self.gpu.wait_event(&place, &event.native, op.flags),
        }
    }

    fn stream_host_wait(&mut self, cx: &mut Call, op: StreamHostWait) -> Result {
        // The worker itself holds back what follows; there only has to be such a stream.
        self.ensure_stream(op.stream)?;
        let stream = self.streams.get(&op.stream.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = stream.context;
        Ok(())
    }

    fn stream_host_signal(&mut self, _cx: &mut Call, _op: StreamHostSignal) -> Result {
        Ok(())
    }

    fn stream_room(&mut self, _cx: &mut Call, _op: StreamRoom) -> Reply<StreamRoomReply> {
        // The worker itself executes this only when there is room.
        now(StreamRoomReply {})
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
    /// Memory operations in the GPU's form, for a stream or graph of the device `home`. Each is valid, and
    /// its word belongs to the session.
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
        self.may_name_event(op.event)?;
        self.gpu.enter(op.context)?;
        let shared = (op.flags & EVENT_INTERPROCESS != 0).then(SharedEvent::new).transpose();
        let shared = shared.map_err(|_| Status::OUT_OF_MEMORY)?;
        let native = self.gpu.make_event(op.context, op.flags)?;
        let (context, flags) = (op.context, op.flags);
        self.events.insert(op.event.0, Event { context, flags, native, token: None, shared });
        Ok(())
    }

    fn event_destroy(&mut self, cx: &mut Call, op: EventDestroy) -> Result {
        let event = self.events.remove(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        self.unshare(event.token);
        cx.context = event.context;
        self.gpu.destroy_event(event.context, event.native)
    }

    fn event_record(&mut self, cx: &mut Call, op: EventRecord) -> Result {
        let recorded = self.record(cx, &op);
        self.published(cx, op.stream, recorded)
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
    /// Ends sharing under this token, also for the client's other sessions.
    pub(super) fn unshare(&self, token: Option<Token>) {
        if let (Some(token), Some(broker)) = (token, &self.broker) {
            broker.unshare(token);
        }
    }

    /// Gives an event's ID to a new event, and `old` to the event that had it.
    pub(super) fn set_event_aside(&mut self, id: EventId, old: EventId) -> Result {
        let event = self.events.get(&id.0).ok_or(Status::INVALID_HANDLE)?;
        if event.shared.is_some() {
            return Err(Status::INVALID_HANDLE);
        }
        self.may_name_event(old)?;
        let (context, flags) = (event.context, event.flags);
        self.gpu.enter(context)?;
        let native = self.gpu.make_event(context, flags)?;
        let new = Event { context, flags, native, token: None, shared: None };
        if let Some(event) = self.events.insert(id.0, new) {
            self.events.insert(old.0, event);
        }
        Ok(())
    }

    /// Checks that there may be another event, with this ID.
    pub(super) fn may_name_event(&self, id: EventId) -> Result {
        match self.events.contains_key(&id.0) {
            true => Err(Status::INVALID_HANDLE),
            false if self.events.len() >= MAX_EVENTS => Err(Status::OUT_OF_MEMORY),
            false => Ok(()),
        }
    }

    /// The token of an interprocess event that this session made. There is only one, because
    /// the daemon notes under it whose slots are whose.
    pub(super) fn share_event(&mut self, id: EventId) -> Result<Token> {
        let broker = self.broker.as_deref().ok_or(Status::NOT_SUPPORTED)?;
        let event = self.events.get_mut(&id.0).ok_or(Status::INVALID_HANDLE)?;
        if let Some(token) = event.token {
            return Ok(token);
        }
        let shared = event.shared.as_ref().filter(|shared| shared.is_ours()).ok_or(Status::INVALID_VALUE)?;
        Ok(*event.token.insert(broker.share(Shared::Event { slot: 0 }, Some(shared.file()))?))
    }

    /// Opens another session's event.
    pub(super) fn open_event(&mut self, context: ContextId, id: EventId, shared: SharedEvent) -> Result {
        self.gpu.enter(context)?;
        let flags = EVENT_DISABLE_TIMING;
        let native = self.gpu.make_event(context, flags)?;
        self.events.insert(id.0, Event { context, flags, native, token: None, shared: Some(shared) });
        Ok(())
    }

    /// Whether the last record of an interprocess event, by any session, is done.
    pub(super) fn is_event_done(&mut self, id: EventId) -> Result<bool> {
        let event = self.events.get(&id.0).ok_or(Status::INVALID_HANDLE)?;
        let shared = event.shared.as_ref().ok_or(Status::INVALID_VALUE)?;
        let done = shared.last().is_none_or(|moment| moment.has_come());
        // A failed context returns its error here.
        self.gpu.enter(event.context)?;
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Backing;
    use crate::doubles::Listener;
    use crate::driver::Backend;
    use crate::driver::nvml::Management;
    use crate::driver::quota::Quota;
    use crate::driver::software::Software;
    use protocol::ops::memory::{EventImport, MemoryOps};

    #[test]
    fn opened_events_count_like_made_ones() {
        let backing = Backing::software(64 << 20, 1);
        let quota = Quota::default();
        let nvml = Management::new(&backing, quota.clone());
        let mut session = Session::new(Software::new(&backing).unwrap(), quota, nvml);
        session.begin(Arc::new(Listener::new(|_| ())));
        let context = ContextId(0);
        let new_call = || Call::new(Arc::new(Listener::new(|_| ())));
        let open = |session: &mut Session<Software>, event| {
            let mut call = new_call();
            let op = EventImport { context, event: EventId(event), token: [0; 16] };
            session.event_import(&mut call, op).err()
        };
        // Nobody shares anything here.
        assert_eq!(open(&mut session, 0), Some(Status::NOT_SUPPORTED));
        let mut call = new_call();
        for event in 0..MAX_EVENTS as u32 {
            session
                .event_create(&mut call, EventCreate { context, event: EventId(event), flags: 0 })
                .unwrap();
        }
        assert_eq!(open(&mut session, 0), Some(Status::INVALID_HANDLE));
        assert_eq!(open(&mut session, MAX_EVENTS as u32), Some(Status::OUT_OF_MEMORY));
    }
}
