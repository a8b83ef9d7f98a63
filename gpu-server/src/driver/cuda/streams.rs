//! Streams and events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_STREAMS};
use protocol::handle::{ContextId, GreenId, StreamId};
use protocol::ops::Answer;
use protocol::ops::event::*;
use protocol::ops::stream::*;

use super::Cuda;
use super::api::{Api, CUevent, CUstream, WAIT_AT_LEAST};
use super::fence::{End, Health, Word};
use crate::driver::beside::Beside;
use crate::driver::call::{Call, Errors};
use crate::driver::session::Session;
use crate::driver::slots::Flow;

const EVENT_DISABLE_TIMING: u32 = 2;
const EVENT_INTERPROCESS: u32 = 4;
/// An event comes right behind its word, which others may have seen already: it is waited for so long at most.
const BEHIND_WORD: Duration = Duration::from_millis(10);

/// A stream of the client's.
pub(super) struct Lane {
    handle: CUstream,
    pub(super) context: u32,
    /// The green context that it is in.
    green: Option<GreenId>,
    word: Arc<Word>,
    progress: Arc<Publisher>,
    /// Has work behind its last fence.
    dirty: bool,
    /// Value of its last fence.
    last: u64,
    flows: Flows,
}

/// What the staging buffers know a stream's transfers by.
#[derive(Clone, Copy)]
pub(super) struct Flows {
    pub(super) inbound: Flow,
    pub(super) outbound: Flow,
}

/// A stream's progress word, as this side publishes it.
pub(super) struct Publisher {
    stream: u32,
    context: ContextId,
    last: Mutex<u64>,
    errors: Errors,
}

impl Publisher {
    /// Everything on the stream up to `seq` is done, or will never be: then `status` says why.
    fn publish(&self, seq: u64, status: Status) {
        self.complain(status);
        let mut last = self.last.lock().unwrap_or_else(|e| e.into_inner());
        if seq > *last {
            *last = seq;
            self.errors.progress(self.stream, seq);
        }
    }

    /// Publishes the context's error, if `status` is one.
    pub(super) fn complain(&self, status: Status) {
        if !status.is_success() && status != Status::CONTEXT_IS_DESTROYED {
            self.errors.publish(self.context, status, 0);
        }
    }
}

/// An event of the client's.
pub(super) struct Moment {
    pub(super) handle: CUevent,
    pub(super) context: u32,
    /// `None`: it does not keep the time.
    timed: Option<Arc<Timed>>,
    recorded: Option<(Arc<Word>, u64, Arc<Health>)>,
}

impl Moment {
    /// Whether its last record is done, as far as its stream's word says.
    fn is_reached(&self) -> bool {
        self.recorded.as_ref().is_some_and(|(word, value, _)| word.get() >= *value)
    }

    /// Another session's event.
    pub(super) fn shared(handle: CUevent, context: u32) -> Moment {
        Moment { handle, context, timed: None, recorded: None }
    }
}

/// An event that keeps the time, as the completer's thread finds it: the dispatcher may have destroyed it by then, or recorded it anew.
struct Timed {
    /// `None` once it was destroyed.
    event: Mutex<Option<CUevent>>,
    /// How often it was recorded.
    records: AtomicU64,
}

// SAFETY: the driver API takes handles from any thread, and nobody uses this one without the lock once it may be destroyed.
unsafe impl Send for Timed {}
// SAFETY: the handle is behind the lock, the count is an atomic.
unsafe impl Sync for Timed {}

impl Timed {
    fn new(event: CUevent) -> Arc<Timed> {
        Arc::new(Timed { event: Mutex::new(Some(event)), records: AtomicU64::new(0) })
    }

    /// From now on nobody else uses the event.
    fn retire(&self) {
        self.event.lock().unwrap_or_else(|e| e.into_inner()).take();
    }
}

/// The time between the last records of two events, to be measured when both are done.
struct Interval {
    /// Each with the number of its last record.
    start: (Arc<Timed>, u64),
    end: (Arc<Timed>, u64),
}

impl Interval {
    fn between(start: &Arc<Timed>, end: &Arc<Timed>) -> Interval {
        let now = |timed: &Arc<Timed>| (Arc::clone(timed), timed.records.load(Ordering::Acquire));
        Interval { start: now(start), end: now(end) }
    }

    /// Measures it in the current context.
    fn measure(&self, api: &Api) -> Result<EventElapsedReply, Status> {
        let (start, end) = (&self.start.0, &self.end.0);
        // Locked to the end, so that neither is destroyed meanwhile; only this thread and the dispatcher do, and the dispatcher one at a time.
        let first = start.event.lock().unwrap_or_else(|e| e.into_inner());
        let other = (!Arc::ptr_eq(start, end)).then(|| end.event.lock().unwrap_or_else(|e| e.into_inner()));
        let first_event = first.ok_or(Status::INVALID_HANDLE)?;
        let second_event =
            other.as_deref().map_or(Ok(first_event), |event| event.ok_or(Status::INVALID_HANDLE))?;
        let mut milliseconds = 0.0;
        let deadline = Instant::now() + BEHIND_WORD;
        loop {
            // One that was recorded anew is not asked about any more, and may be long in coming.
            let same = |(timed, record): &(Arc<Timed>, u64)| timed.records.load(Ordering::Acquire) == *record;
            if !same(&self.start) || !same(&self.end) {
                return Err(Status::NOT_READY);
            }
            // SAFETY: live events, by their locks; writes one number.
            match unsafe { api.event_elapsed(&mut milliseconds, first_event, second_event) } {
                Err(Status::NOT_READY) if Instant::now() < deadline => std::hint::spin_loop(),
                elapsed => return elapsed.map(|()| EventElapsedReply { milliseconds }),
            }
        }
    }
}

/// A place in a stream, to enqueue at. Its context is current.
pub(super) struct Place {
    pub(super) id: StreamId,
    pub(super) stream: CUstream,
    pub(super) context: ContextId,
    pub(super) health: Arc<Health>,
    pub(super) progress: Arc<Publisher>,
    pub(super) flows: Flows,
}

/// Calls its end with the worst status that it was told, when its last holder is gone.
pub(super) struct Gather {
    end: Mutex<Option<End>>,
    worst: Mutex<Status>,
}

impl Gather {
    fn new(end: impl FnOnce(Status) + Send + 'static) -> Arc<Gather> {
        Arc::new(Gather { end: Mutex::new(Some(Box::new(end))), worst: Mutex::new(Status::SUCCESS) })
    }

    fn tell(&self, status: Status) {
        let mut worst = self.worst.lock().unwrap_or_else(|e| e.into_inner());
        if worst.is_success() {
            *worst = status;
        }
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        let worst = *self.worst.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(end) = self.end.lock().unwrap_or_else(|e| e.into_inner()).take() {
            end(worst);
        }
    }
}

impl Cuda {
    fn lane(&mut self, id: StreamId) -> Result<&mut Lane, Status> {
        if id.0 < MAX_CONTEXTS && !self.lanes.contains_key(&id.0) {
            if !self.contexts.contains_key(&id.0) {
                if self.device(id.0).is_err() {
                    return Err(Status::INVALID_HANDLE);
                }
                self.make_primary(id.0)?;
            }
            // The null stream, which means the current context's.
            let lane = self.make_lane(id.0, id.0, std::ptr::null_mut())?;
            self.lanes.insert(id.0, lane);
        }
        self.lanes.get_mut(&id.0).ok_or(Status::INVALID_HANDLE)
    }

    fn make_lane(&self, id: u32, context: u32, handle: CUstream) -> Result<Lane, Status> {
        let progress = Publisher {
            stream: id,
            context: ContextId(context),
            last: Mutex::new(0),
            errors: self.errors()?.clone(),
        };
        Ok(Lane {
            handle,
            context,
            green: None,
            word: self.words.take().map(Arc::new)?,
            progress: Arc::new(progress),
            dirty: false,
            last: 0,
            flows: Flows { inbound: Flow::fresh(), outbound: Flow::fresh() },
        })
    }

    pub(super) fn has_stream(&self, id: StreamId) -> bool {
        self.lanes.contains_key(&id.0)
    }

    /// Whether a green context has streams.
    pub(super) fn has_stream_of(&self, green: GreenId) -> bool {
        self.lanes.values().any(|lane| lane.green == Some(green))
    }

    /// Takes a stream in that was made.
    pub(super) fn add_stream(
        &mut self,
        id: StreamId,
        context: ContextId,
        handle: CUstream,
        green: Option<GreenId>,
    ) -> Result<(), Status> {
        let lane = Lane { green, ..self.make_lane(id.0, context.0, handle)? };
        self.lanes.insert(id.0, lane);
        Ok(())
    }

    /// The place in a stream where the next operation goes. A context that has failed refuses with its error.
    pub(super) fn enter(&mut self, cx: &mut Call, id: StreamId) -> Result<Place, Status> {
        let lane = self.lane(id)?;
        lane.dirty = true;
        let (stream, context, progress) = (lane.handle, ContextId(lane.context), Arc::clone(&lane.progress));
        let flows = lane.flows;
        cx.context = context;
        let health = Arc::clone(&self.enter_context(context)?.health);
        Ok(Place { id, stream, context, health, progress, flows })
    }

    /// As [`enter`](Self::enter), for what goes on a stream without a fence of its own: launches, above all.
    #[inline]
    pub(super) fn enter_briefly(
        &mut self,
        cx: &mut Call,
        id: StreamId,
    ) -> Result<(CUstream, ContextId), Status> {
        let lane = self.lane(id)?;
        lane.dirty = true;
        let (stream, context) = (lane.handle, ContextId(lane.context));
        cx.context = context;
        self.enter_context(context)?;
        Ok((stream, context))
    }

    /// As [`enter_briefly`](Self::enter_briefly), for a call about an attribute that streams have.
    fn with_attribute(
        &mut self,
        cx: &mut Call,
        id: StreamId,
        attribute: u32,
    ) -> Result<(CUstream, ContextId), Status> {
        if !attribute::ALL.contains(&attribute) {
            return Err(Status::INVALID_VALUE);
        }
        self.enter_briefly(cx, id)
    }

    /// Calls `end` when everything on the stream so far is done, with success; or with the context's error.
    pub(super) fn fence(
        &mut self,
        place: &Place,
        seq: u64,
        end: impl FnOnce(Status) + Send + 'static,
    ) -> Result<(), Status> {
        let completer = Arc::clone(&self.completer);
        let api = self.api;
        let lane = self.lane(place.id)?;
        let (word, handle) = (Arc::clone(&lane.word), lane.handle);
        if lane.dirty || lane.last == 0 {
            // Commands of different streams may be executed out of the session's order, and some fence several streams: the word rises all the same.
            let value = seq.max(lane.last + 1);
            // SAFETY: a live stream of the current context; the word is registered memory.
            let written = unsafe { api.stream_write(handle, word.address(), value, 0) };
            let written = self.note(place.context, written);
            let lane = self.lane(place.id)?;
            match written {
                Ok(()) => (lane.dirty, lane.last) = (false, value),
                Err(status) => {
                    end(status);
                    return Ok(());
                }
            }
        }
        let value = self.lane(place.id)?.last;
        completer.when(&word, value, &place.health, Box::new(end));
        Ok(())
    }

    /// What was fenced is not all that a command puts on its stream.
    pub(super) fn lane_is_dirty(&mut self, id: StreamId) -> Result<(), Status> {
        self.lane(id)?.dirty = true;
        Ok(())
    }

    /// Fences every stream that `of` picks, and calls `end` when all of them are done.
    pub(super) fn after(
        &mut self,
        seq: u64,
        of: impl Fn(&Lane) -> bool,
        end: impl FnOnce(Status) + Send + 'static,
    ) {
        let gather = Gather::new(end);
        let ids: Vec<u32> = self.lanes.iter().filter(|(_, lane)| of(lane)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(lane) = self.lanes.get(&id) else { continue };
            let (context, stream, progress) =
                (ContextId(lane.context), lane.handle, Arc::clone(&lane.progress));
            let flows = lane.flows;
            let health = match self.enter_context(context) {
                Ok(context) => Arc::clone(&context.health),
                Err(status) => {
                    progress.complain(status);
                    gather.tell(status);
                    continue;
                }
            };
            let place =
                Place { id: StreamId(id), stream, context, health, progress: Arc::clone(&progress), flows };
            let told = Arc::clone(&gather);
            let fenced = self.fence(&place, seq, move |status| {
                progress.complain(status);
                told.tell(status);
            });
            if let Err(status) = fenced {
                gather.tell(status);
            }
        }
    }

    /// Answers `cx` when all streams of the context are done.
    pub(super) fn synchronize_context(&mut self, cx: &mut Call, id: ContextId) -> Result<(), Status> {
        self.enter_context(id)?;
        let pending = cx.later();
        self.after(
            cx.seq,
            |lane| lane.context == id.0,
            move |status| {
                pending.answer(status.ok().map(|()| protocol::ops::context::ContextSynchronizeReply {}));
            },
        );
        Ok(())
    }
}

impl StreamOps<Call> for Session<Cuda> {
    fn stream_create(&mut self, cx: &mut Call, op: StreamCreate) -> Result<(), Status> {
        cx.context = op.context;
        if op.stream.0 < MAX_CONTEXTS || op.stream.0 >= MAX_STREAMS || self.lanes.contains_key(&op.stream.0) {
            return Err(Status::INVALID_HANDLE);
        }
        self.enter_context(op.context)?;
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: writes a stream handle.
        let made = unsafe { self.api.stream_create(&mut handle, op.flags, op.priority) };
        self.note(op.context, made)?;
        self.add_stream(op.stream, op.context, handle, None)
    }

    fn stream_destroy(&mut self, cx: &mut Call, op: StreamDestroy) -> Result<(), Status> {
        if op.stream.0 < MAX_CONTEXTS {
            return Err(Status::INVALID_HANDLE);
        }
        let place = self.enter(cx, op.stream)?;
        // The word stays this stream's until its work is done; a fence holds it so long.
        let lane = self.lane(op.stream)?;
        let word = Arc::clone(&lane.word);
        *lane.progress.last.lock().unwrap_or_else(|e| e.into_inner()) = u64::MAX;
        self.fence(&place, cx.seq, move |_| drop(word))?;
        self.lanes.remove(&op.stream.0);
        // SAFETY: out of the table; its work still completes.
        let destroyed = unsafe { self.api.stream_destroy(place.stream) };
        self.note(place.context, destroyed)
    }

    fn stream_synchronize(
        &mut self,
        cx: &mut Call,
        op: StreamSynchronize,
    ) -> Result<Answer<StreamSynchronizeReply>, Status> {
        // Looks only, unless on the default stream, where it covers other streams and so needs a fence of its own.
        let dirty = self.lane(op.stream)?.dirty || op.stream.0 < MAX_CONTEXTS;
        let place = self.enter(cx, op.stream)?;
        self.lane(op.stream)?.dirty = dirty;
        let (pending, progress) = (cx.later(), Arc::clone(&place.progress));
        self.fence(&place, cx.seq, move |status| {
            progress.complain(status);
            pending.answer(status.ok().map(|()| StreamSynchronizeReply {}));
        })?;
        Ok(Answer::Later)
    }

    fn stream_mark(&mut self, cx: &mut Call, op: StreamMark) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let (progress, seq) = (Arc::clone(&place.progress), cx.seq);
        self.fence(&place, seq, move |status| progress.publish(seq, status))
    }

    fn stream_wait_event(&mut self, cx: &mut Call, op: StreamWaitEvent) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let event = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?.handle;
        // SAFETY: live handles of this session.
        let waits = unsafe { self.api.stream_wait_event(place.stream, event, op.flags) };
        self.note(place.context, waits)
    }

    fn stream_host_wait(&mut self, cx: &mut Call, op: StreamHostWait) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        if self.beside.awaits(op.ticket) {
            return Err(Status::INVALID_HANDLE);
        }
        let word = self.words.take().map(Arc::new)?;
        // SAFETY: a live stream; the word is registered memory, held by the fence until the stream has passed here.
        let waits = unsafe { self.api.stream_wait(place.stream, word.address(), 1, WAIT_AT_LEAST) };
        self.note(place.context, waits)?;
        self.beside.open(op.ticket, Arc::clone(&word));
        self.fence(&place, cx.seq, move |_| drop(word))
    }

    fn stream_host_signal(&mut self, _cx: &mut Call, op: StreamHostSignal) -> Result<(), Status> {
        // Signalled before its turn, or for a context that is gone: nothing is left to be done.
        self.beside.signal(op.ticket);
        Ok(())
    }

    fn stream_batch_mem_op(&mut self, cx: &mut Call, op: StreamBatchMemOp) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        self.memory_ops_at(place.context, place.stream, &op.operations)
    }

    fn stream_set_attribute(
        &mut self,
        cx: &mut Call,
        op: StreamSetAttribute,
    ) -> Result<Answer<StreamSetAttributeReply>, Status> {
        let (id, value) = (op.attribute.id, zerocopy::transmute!(op.attribute.value));
        let (stream, context) = self.with_attribute(cx, op.stream, id)?;
        // SAFETY: a live stream; none of these attributes' values, which are no longer than this, names an object. (An access policy's window is a hint.)
        let set = unsafe { self.api.stream_set_attribute(stream, id, &value) };
        self.note(context, set).map(|()| Answer::Now(StreamSetAttributeReply {}))
    }

    fn stream_get_attribute(
        &mut self,
        cx: &mut Call,
        op: StreamGetAttribute,
    ) -> Result<Answer<StreamGetAttributeReply>, Status> {
        let (stream, context) = self.with_attribute(cx, op.stream, op.attribute)?;
        let mut value = [0; 8];
        // SAFETY: a live stream; there is room for the longest value.
        let got = unsafe { self.api.stream_get_attribute(stream, op.attribute, &mut value) };
        self.note(context, got)?;
        Ok(Answer::Now(StreamGetAttributeReply { value: zerocopy::transmute!(value) }))
    }

    fn stream_copy_attributes(
        &mut self,
        cx: &mut Call,
        op: StreamCopyAttributes,
    ) -> Result<Answer<StreamCopyAttributesReply>, Status> {
        let (from, other) = self.enter_briefly(cx, op.src)?;
        let (to, context) = self.enter_briefly(cx, op.dst)?;
        if other != context {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: live streams of one context.
        let copied = unsafe { self.api.stream_copy_attributes(to, from) };
        self.note(context, copied).map(|()| Answer::Now(StreamCopyAttributesReply {}))
    }
}

impl EventOps<Call> for Session<Cuda> {
    fn event_create(&mut self, cx: &mut Call, op: EventCreate) -> Result<(), Status> {
        cx.context = op.context;
        if self.events.contains_key(&op.event.0) {
            return Err(Status::INVALID_HANDLE);
        }
        self.enter_context(op.context)?;
        let mut handle: CUevent = std::ptr::null_mut();
        // How a thread waits for it is the client's affair.
        // SAFETY: writes an event handle.
        let made = unsafe {
            self.api.event_create(&mut handle, op.flags & (EVENT_DISABLE_TIMING | EVENT_INTERPROCESS))
        };
        self.note(op.context, made)?;
        let timed = (op.flags & EVENT_DISABLE_TIMING == 0).then(|| Timed::new(handle));
        self.events.insert(op.event.0, Moment { handle, context: op.context.0, timed, recorded: None });
        Ok(())
    }

    fn event_destroy(&mut self, cx: &mut Call, op: EventDestroy) -> Result<(), Status> {
        let moment = self.events.remove(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        self.unshare_event(op.event.0);
        cx.context = ContextId(moment.context);
        moment.timed.inspect(|timed| timed.retire());
        // SAFETY: out of the table, and the completer uses it no more.
        let destroyed = unsafe { self.api.event_destroy(moment.handle) };
        self.note(cx.context, destroyed)
    }

    fn event_record(&mut self, cx: &mut Call, op: EventRecord) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let moment = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        if moment.context != place.context.0 {
            return Err(Status::INVALID_HANDLE);
        }
        if let Some(timed) = &moment.timed {
            timed.records.fetch_add(1, Ordering::AcqRel);
        }
        let event = moment.handle;
        // First the word, then the event: whoever learns that the event is reached, on whatever way, must find the word there.
        let (progress, seq) = (Arc::clone(&place.progress), cx.seq);
        self.fence(&place, seq, move |status| progress.publish(seq, status))?;
        // SAFETY: live handles of one context.
        let recorded = unsafe { self.api.event_record(event, place.stream, op.flags) };
        self.note(place.context, recorded)?;
        let lane = self.lane(op.stream)?;
        lane.dirty = true;
        let at = (Arc::clone(&lane.word), lane.last, Arc::clone(&place.health));
        if let Some(moment) = self.events.get_mut(&op.event.0) {
            moment.recorded = Some(at);
        }
        Ok(())
    }

    fn event_synchronize(
        &mut self,
        cx: &mut Call,
        op: EventSynchronize,
    ) -> Result<Answer<EventSynchronizeReply>, Status> {
        let moment = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(moment.context);
        self.context(cx.context)?.health.check()?;
        let Some((word, value, health)) = &moment.recorded else {
            return Ok(Answer::Now(EventSynchronizeReply {}));
        };
        // By the completer even when it is done already: behind the publication of the event's own word.
        let (pending, errors, context) = (cx.later(), self.errors()?.clone(), cx.context);
        let end = move |status: Status| {
            if !status.is_success() {
                errors.publish(context, status, 0);
            }
            pending.answer(status.ok().map(|()| EventSynchronizeReply {}));
        };
        self.completer.when(word, *value, health, Box::new(end));
        Ok(Answer::Later)
    }

    fn event_elapsed(
        &mut self,
        cx: &mut Call,
        op: EventElapsed,
    ) -> Result<Answer<EventElapsedReply>, Status> {
        let start = self.events.get(&op.start.0).ok_or(Status::INVALID_HANDLE)?;
        let end = self.events.get(&op.end.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(end.context);
        let (Some(first), Some(second)) = (&start.timed, &end.timed) else {
            return Err(Status::INVALID_HANDLE);
        };
        let (Some((begun, from, other)), Some((word, value, health))) = (&start.recorded, &end.recorded)
        else {
            return Err(Status::INVALID_HANDLE);
        };
        let interval = Interval::between(first, second);
        if end.is_reached() {
            if !start.is_reached() {
                return Err(Status::NOT_READY);
            }
            self.enter_context(cx.context)?;
            let measured = interval.measure(self.api);
            return self.note(cx.context, measured).map(Answer::Now);
        }
        // Asked ahead: when the end has come, the start has, or the answer is that it has not.
        let (api, pending, context, other) = (self.api, cx.later(), Arc::clone(health), Arc::clone(other));
        let (begun, from) = (Arc::clone(begun), *from);
        let measure = move |status: Status| {
            let begun = if begun.get() >= from { Ok(()) } else { Err(Status::NOT_READY) };
            let measure = || context.with(api, || interval.measure(api));
            let measured = status.ok().and(begun).and_then(|()| {
                // The start's context, if it is another, must not go meanwhile either.
                if Arc::ptr_eq(&context, &other) { measure() } else { other.with(api, measure) }
            });
            pending.answer(measured);
        };
        self.completer.when(word, *value, health, Box::new(measure));
        Ok(Answer::Later)
    }
}
