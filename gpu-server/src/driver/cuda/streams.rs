//! Streams and events.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use protocol::Status;
use protocol::channel::MAX_CONTEXTS;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::Answer;
use protocol::ops::event::*;
use protocol::ops::launch::LaunchAttribute;
use protocol::ops::stream::*;

use super::Cuda;
use super::api::{Api, BatchMemOp, CUevent, CUstream, WAIT_AT_LEAST};
use super::fence::{Health, Word};
use crate::driver::call::{Call, End, Errors, Reply, Result};
use crate::driver::gpu::{EVENT_DISABLE_TIMING, GpuStreams};
use crate::driver::slots::Flow;
use crate::driver::streams::{Stream, Streams};
use crate::shared_event::{Lookout, Moment};

/// How long a device's reset waits for the other devices' work, if that needs what ends with the device's
/// context. It may be waiting for a command that comes after the reset.
const OTHERS_END_WITHIN: Duration = Duration::from_secs(10);

/// One of the client's streams.
pub struct CudaStream {
    handle: CUstream,
    word: Arc<Word>,
    /// The same, for events.
    lasting: Arc<Lasting>,
    progress: Arc<Publisher>,
    /// Whether it has work after its last fence.
    dirty: bool,
    /// When it last got work: [`Cuda::entered`].
    at: u64,
    /// Value of its last fence.
    last: u64,
    /// Fences whose end has not been called yet.
    pending: Arc<AtomicU32>,
    flows: Flows,
}

impl CudaStream {
    /// Whether all that was put on it is done, and everybody has been told.
    fn is_at_rest(&self) -> bool {
        !self.dirty
            && self.last > 0
            && self.word.get() >= self.last
            && self.pending.load(Ordering::Acquire) == 0
    }
}

/// A stream's identities for the staging buffers.
#[derive(Clone, Copy)]
pub(super) struct Flows {
    pub(super) inbound: Flow,
    pub(super) outbound: Flow,
}

/// Publishes a stream's progress word.
pub(super) struct Publisher {
    stream: u32,
    context: ContextId,
    last: Mutex<u64>,
    errors: Errors,
}

impl Publisher {
    /// Everything on the stream up to `seq` is done, or never will be; `status` says why.
    pub(super) fn publish(&self, seq: u64, status: Status) {
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

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CudaStream {}

/// One of the client's events.
pub struct CudaEvent {
    handle: CUevent,
    /// `None`: it does not record time.
    timed: Option<Arc<Timed>>,
    recorded: Option<Recorded>,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CudaEvent {}

/// A stream's word for the events that were recorded on it. Once the stream was destroyed and its work is
/// done, they have none: words are few, and an event may exist for ever.
struct Lasting(Mutex<Option<Arc<Word>>>);

impl Lasting {
    fn word(&self) -> MutexGuard<'_, Option<Arc<Word>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// An event's last record.
#[derive(Clone)]
struct Recorded {
    stream: Arc<Lasting>,
    /// What the stream's word reaches then.
    value: u64,
    health: Arc<Health>,
}

impl Recorded {
    /// The stream's word, if it has yet to reach the record.
    fn outstanding(&self) -> Option<Arc<Word>> {
        self.stream.word().as_ref().filter(|word| word.get() < self.value).map(Arc::clone)
    }
}

/// An event that records time, as seen by the completer's thread. By then the dispatcher may have destroyed
/// it or recorded it again.
struct Timed {
    /// `None` after it was destroyed.
    event: Mutex<Option<CUevent>>,
    /// Number of times it was recorded.
    records: AtomicU64,
}

// SAFETY: the driver API takes handles from any thread, and once it may be destroyed, it is used only under
// the lock.
unsafe impl Send for Timed {}
// SAFETY: the handle is behind the lock, the count is an atomic.
unsafe impl Sync for Timed {}

impl Timed {
    fn new(event: CUevent) -> Arc<Timed> {
        Arc::new(Timed { event: Mutex::new(Some(event)), records: AtomicU64::new(0) })
    }

    /// From now on, nobody else uses the event.
    fn retire(&self) {
        self.event.lock().unwrap_or_else(|e| e.into_inner()).take();
    }
}

/// Locks two events; the second one only if it is another. The dispatcher and the completer's thread may
/// measure the same two at the same time, in opposite directions, so the order does not depend on that.
fn lock_both<'a>(start: &'a Arc<Timed>, end: &'a Arc<Timed>) -> (Locked<'a>, Option<Locked<'a>>) {
    let lock = |timed: &'a Arc<Timed>| timed.event.lock().unwrap_or_else(|e| e.into_inner());
    if Arc::ptr_eq(start, end) {
        return (lock(start), None);
    }
    if Arc::as_ptr(start) < Arc::as_ptr(end) {
        let first = lock(start);
        (first, Some(lock(end)))
    } else {
        let second = lock(end);
        (lock(start), Some(second))
    }
}

type Locked<'a> = MutexGuard<'a, Option<CUevent>>;

/// The time between the last records of two events, measured when both are done.
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

    /// Measures it in the current context. The words of both records have been reached, and an event is done
    /// before its word.
    fn measure(&self, api: &Api) -> Result<EventElapsedReply> {
        // Locked until the end, so that neither is destroyed meanwhile.
        let (first, other) = lock_both(&self.start.0, &self.end.0);
        let first_event = first.ok_or(Status::INVALID_HANDLE)?;
        let second_event =
            other.as_deref().map_or(Ok(first_event), |event| event.ok_or(Status::INVALID_HANDLE))?;
        // If it was recorded again, nobody asks for this any more.
        let same = |(timed, record): &(Arc<Timed>, u64)| timed.records.load(Ordering::Acquire) == *record;
        if !same(&self.start) || !same(&self.end) {
            return Err(Status::NOT_READY);
        }
        let mut milliseconds = 0.0;
        // SAFETY: live events, by their locks; writes one number.
        unsafe { api.event_elapsed(&mut milliseconds, first_event, second_event) }?;
        Ok(EventElapsedReply { milliseconds })
    }
}

/// A place in a stream where operations can be enqueued. Its context is current.
pub struct Place {
    pub(super) id: StreamId,
    pub(super) stream: CUstream,
    pub(super) context: ContextId,
    /// The context's device.
    pub(super) device: u32,
    pub(super) health: Arc<Health>,
    pub(super) progress: Arc<Publisher>,
    pub(super) flows: Flows,
}

/// When the last owner drops it, calls its end with the worst status it was given.
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

/// A stream in the table.
pub(super) fn find(streams: &mut Streams<CudaStream>, id: StreamId) -> Result<&mut Stream<CudaStream>> {
    streams.get_mut(&id.0).ok_or(Status::INVALID_HANDLE)
}

impl Cuda {
    /// Makes the session's stream for a driver handle. The handle is destroyed if that fails.
    pub(super) fn wrap_stream(
        &self,
        id: StreamId,
        context: ContextId,
        handle: CUstream,
    ) -> Result<CudaStream> {
        let needed = self.errors().cloned().and_then(|errors| Ok((errors, self.words.take()?)));
        let (errors, word) = needed.inspect_err(|_| {
            if !handle.is_null() {
                // SAFETY: just made, and nobody else knows it.
                let _ = unsafe { self.api.stream_destroy(handle) };
            }
        })?;
        let (progress, word) =
            (Publisher { stream: id.0, context, last: Mutex::new(0), errors }, Arc::new(word));
        Ok(CudaStream {
            handle,
            lasting: Arc::new(Lasting(Mutex::new(Some(Arc::clone(&word))))),
            word,
            progress: Arc::new(progress),
            dirty: false,
            at: 0,
            last: 0,
            pending: Arc::default(),
            flows: Flows { inbound: Flow::fresh(), outbound: Flow::fresh() },
        })
    }

    /// Like [`enter_stream`](GpuStreams::enter_stream), for work that needs no fence of its own, mainly
    /// launches.
    #[inline]
    pub(super) fn enter_briefly(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
    ) -> Result<(CUstream, ContextId)> {
        let stream = find(streams, id)?;
        self.entered += 1;
        (stream.native.dirty, stream.native.at) = (true, self.entered);
        let (handle, context) = (stream.native.handle, stream.context);
        cx.context = context;
        self.enter_context(context)?;
        Ok((handle, context))
    }

    /// Like [`GpuStreams::enter_stream`], for what gives the stream no work.
    fn place_of(&mut self, cx: &mut Call, streams: &Streams<CudaStream>, id: StreamId) -> Result<Place> {
        let Stream { context, native, .. } = streams.get(&id.0).ok_or(Status::INVALID_HANDLE)?;
        let (stream, context, progress) = (native.handle, *context, Arc::clone(&native.progress));
        let flows = native.flows;
        cx.context = context;
        let entered = self.enter_context(context)?;
        let (device, health) = (entered.device, Arc::clone(&entered.health));
        Ok(Place { id, stream, context, device, health, progress, flows })
    }

    /// Like [`enter_briefly`](Self::enter_briefly), for a call about an attribute that streams have.
    fn with_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
        attribute: u32,
    ) -> Result<(CUstream, ContextId)> {
        if !attribute::ALL.contains(&attribute) {
            return Err(Status::INVALID_VALUE);
        }
        let Place { stream, context, .. } = self.place_of(cx, streams, id)?;
        Ok((stream, context))
    }

    /// For a legacy default stream with work after its last fence: a stream that got work since, and so does
    /// that after all of it. A fence on the default stream itself would wait for the work of all such
    /// streams, and what they get later would wait for the fence: a program whose kernel on one of them waits
    /// for what it puts on another would stand still.
    fn successor(streams: &Streams<CudaStream>, id: StreamId) -> Option<StreamId> {
        let unfenced = |stream: &&Stream<CudaStream>| stream.native.dirty || stream.native.last == 0;
        let legacy = streams.get(&id.0).filter(|_| id.0 < MAX_CONTEXTS).filter(unfenced)?;
        let follows = |(other, stream): &(&u32, &Stream<CudaStream>)| {
            **other != id.0
                && stream.is_blocking
                && stream.context.0 == id.0
                && stream.native.at > legacy.native.at
        };
        let latest = streams.iter().filter(follows).max_by_key(|(_, stream)| stream.native.at);
        latest.map(|(other, _)| StreamId(*other))
    }

    /// Calls `end` when everything on the stream so far is done, with success or with the context's error.
    pub(super) fn fence(
        &mut self,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        seq: u64,
        end: impl FnOnce(Status) + Send + 'static,
    ) -> Result {
        let stream = &mut find(streams, place.id)?.native;
        if stream.dirty || stream.last == 0 {
            // Commands of different streams may be executed out of the session's order, and some fence
            // several streams, so make sure that the word always rises.
            let value = seq.max(stream.last + 1);
            // SAFETY: a live stream of the current context; the word is registered memory.
            let written = unsafe { self.api.stream_write(stream.handle, stream.word.address(), value, 0) };
            match self.note(place.context, written) {
                Ok(()) => (stream.dirty, stream.last) = (false, value),
                Err(status) => {
                    end(status);
                    return Ok(());
                }
            }
        }
        let pending = Arc::clone(&stream.pending);
        pending.fetch_add(1, Ordering::Relaxed);
        let end = move |status| {
            end(status);
            pending.fetch_sub(1, Ordering::Release);
        };
        self.completer.when(&stream.word, stream.last, &place.health, Box::new(end));
        Ok(())
    }

    /// Notes that a command puts more on its stream than was fenced.
    pub(super) fn stream_is_dirty(streams: &mut Streams<CudaStream>, id: StreamId) -> Result {
        find(streams, id)?.native.dirty = true;
        Ok(())
    }

    /// Waits a while until the work of all devices but one is done. Their streams write to page-locked memory
    /// that is registered in a context of that one.
    pub(super) fn settle_others(&mut self, streams: &mut Streams<CudaStream>, device: u32) {
        let others: Vec<u32> =
            self.contexts.iter().filter(|(_, c)| c.device != device).map(|(id, _)| *id).collect();
        let (done, ended) = channel();
        let end = move |_| {
            // After the time nobody listens any more.
            let _ = done.send(());
        };
        self.after(streams, 0, |context| others.contains(&context.0), end);
        if ended.recv_timeout(OTHERS_END_WITHIN).is_err() {
            tracing::warn!(
                device,
                "a program resets a device, and its kernels on other devices do not end: their work may fail"
            );
        }
    }

    /// Fences every stream that `of` selects, and calls `end` when all of them are done. Of a program's many
    /// streams (PyTorch makes 32) few have had work since they were last waited for; the others cost nothing.
    fn after(
        &mut self,
        streams: &mut Streams<CudaStream>,
        seq: u64,
        of: impl Fn(ContextId) -> bool,
        end: impl FnOnce(Status) + Send + 'static,
    ) {
        let gather = Gather::new(end);
        let concerned = |(id, stream): (&u32, &Stream<CudaStream>)| {
            (of(stream.context) && !stream.native.is_at_rest()).then_some(*id)
        };
        let ids: Vec<u32> = streams.iter().filter_map(concerned).collect();
        // Its successor's end is the end of its work, too.
        let ends_alone = |id: &u32| Self::successor(streams, StreamId(*id)).is_none();
        let ids: Vec<u32> = ids.into_iter().filter(ends_alone).collect();
        for id in ids {
            let Some(stream) = streams.get(&id) else { continue };
            let (context, handle, progress) =
                (stream.context, stream.native.handle, Arc::clone(&stream.native.progress));
            let flows = stream.native.flows;
            let (device, health) = match self.enter_context(context) {
                Ok(context) => (context.device, Arc::clone(&context.health)),
                Err(status) => {
                    progress.complain(status);
                    gather.tell(status);
                    continue;
                }
            };
            let progress_of_place = Arc::clone(&progress);
            let place = Place {
                id: StreamId(id),
                stream: handle,
                context,
                device,
                health,
                progress: progress_of_place,
                flows,
            };
            let told = Arc::clone(&gather);
            let fenced = self.fence(streams, &place, seq, move |status| {
                progress.complain(status);
                told.tell(status);
            });
            if let Err(status) = fenced {
                gather.tell(status);
            }
        }
    }
}

impl GpuStreams for Cuda {
    type Stream = CudaStream;
    type Place = Place;
    type Event = CudaEvent;
    type MemoryOp = BatchMemOp;

    fn default_stream(&mut self, context: ContextId, _device: u32) -> Result<CudaStream> {
        if !self.contexts.contains_key(&context.0) {
            self.make_primary(context.0)?;
        }
        // The null stream is that of the current context.
        self.wrap_stream(StreamId(context.0), context, std::ptr::null_mut())
    }

    fn make_stream(
        &mut self,
        id: StreamId,
        context: ContextId,
        flags: u32,
        priority: i32,
    ) -> Result<CudaStream> {
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: writes a stream handle.
        let made = unsafe { self.api.stream_create(&mut handle, flags, priority) };
        self.note(context, made)?;
        self.wrap_stream(id, context, handle)
    }

    fn destroy_stream(&mut self, cx: &mut Call, streams: &mut Streams<CudaStream>, id: StreamId) -> Result {
        let place = self.enter_stream(cx, streams, id)?;
        // The word belongs to this stream until its work is done; a fence keeps it until then.
        let stream = &find(streams, id)?.native;
        let (word, lasting) = (Arc::clone(&stream.word), Arc::clone(&stream.lasting));
        *stream.progress.last.lock().unwrap_or_else(|e| e.into_inner()) = u64::MAX;
        let passed = move |status: Status| {
            if status.is_success() {
                lasting.word().take();
            }
            drop(word);
        };
        self.fence(streams, &place, cx.seq, passed)?;
        streams.remove(&id.0);
        // SAFETY: removed from the table; its work still completes.
        let destroyed = unsafe { self.api.stream_destroy(place.stream) };
        self.note(place.context, destroyed)
    }

    fn enter_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
    ) -> Result<Place> {
        let stream = &mut find(streams, id)?.native;
        self.entered += 1;
        (stream.dirty, stream.at) = (true, self.entered);
        self.place_of(cx, streams, id)
    }

    fn after_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
        end: End,
    ) -> Result {
        let id = Cuda::successor(streams, id).unwrap_or(id);
        let place = self.place_of(cx, streams, id)?;
        self.fence(streams, &place, cx.seq, end)
    }

    fn device_at(place: &Place) -> u32 {
        place.device
    }

    fn synchronize_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
    ) -> Result {
        let place = self.place_of(cx, streams, id)?;
        // On a legacy default stream, this waits for the other streams, too.
        find(streams, id)?.native.dirty |= id.0 < MAX_CONTEXTS;
        let (pending, progress) = (cx.later(), Arc::clone(&place.progress));
        self.fence(streams, &place, cx.seq, move |status| {
            progress.complain(status);
            pending.answer(status.ok().map(|()| StreamSynchronizeReply {}));
        })
    }

    fn synchronize_context(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        context: ContextId,
    ) -> Result {
        let pending = cx.later();
        self.after(
            streams,
            cx.seq,
            |of| of == context,
            move |status| {
                pending.answer(status.ok().map(|()| protocol::ops::context::ContextSynchronizeReply {}));
            },
        );
        Ok(())
    }

    fn after_device(
        &mut self,
        streams: &mut Streams<CudaStream>,
        device: u32,
        seq: u64,
        end: impl FnOnce(Status) + Send + 'static,
    ) {
        let contexts: Vec<u32> =
            self.contexts.iter().filter(|(_, c)| c.device == device).map(|(id, _)| *id).collect();
        self.after(streams, seq, |context| contexts.contains(&context.0), end);
    }

    fn mark_stream(&mut self, cx: &mut Call, streams: &mut Streams<CudaStream>, id: StreamId) -> Result {
        let place = self.enter_stream(cx, streams, id)?;
        let (progress, seq) = (Arc::clone(&place.progress), cx.seq);
        self.fence(streams, &place, seq, move |status| progress.publish(seq, status))
    }

    fn give_up(&mut self, streams: &mut Streams<CudaStream>, id: StreamId, seq: u64, status: Status) {
        if let Ok(stream) = find(streams, id) {
            stream.native.progress.publish(seq, status);
        }
    }

    fn wait_event(&mut self, place: &Place, event: &CudaEvent, flags: u32) -> Result {
        // SAFETY: live handles of this session.
        let waits = unsafe { self.api.stream_wait_event(place.stream, event.handle, flags) };
        self.note(place.context, waits)
    }

    fn wait_for(
        &mut self,
        cx: &Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        moment: Moment,
    ) -> Result {
        if self.lookout.is_none() {
            self.lookout = Some(Lookout::start().map_err(|_| Status::OUT_OF_MEMORY)?);
        }
        let word = Arc::new(self.words.take()?);
        // SAFETY: a live stream of the current context. The word is registered memory and belongs to the
        // stream until the fence below.
        let waits = unsafe { self.api.stream_wait(place.stream, word.address(), 1, WAIT_AT_LEAST) };
        self.note(place.context, waits)?;
        let passed = Arc::clone(&word);
        self.fence(streams, place, cx.seq, move |_| drop(passed))?;
        if let Some(lookout) = &self.lookout {
            lookout.when(moment, move || word.set(1));
        }
        Ok(())
    }

    fn memory_op(&self, op: &MemoryOp, _device: u32) -> Result<BatchMemOp> {
        Ok(if op.width() == 0 {
            BatchMemOp { operation: op.operation, short_flags: op.flags, ..BatchMemOp::default() }
        } else {
            BatchMemOp {
                operation: op.operation,
                address: op.address,
                value: op.value,
                flags: op.flags,
                ..BatchMemOp::default()
            }
        })
    }

    fn memory_ops(&mut self, _cx: &Call, place: &Place, mut operations: Vec<BatchMemOp>) -> Result {
        let (count, all) = (operations.len() as u32, operations.as_mut_ptr());
        // SAFETY: a live stream; as many operations as the length says, on words of the session.
        let enqueued = unsafe { self.api.stream_memory_ops(place.stream, count, all, 0) };
        self.note(place.context, enqueued)
    }

    fn set_stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
        attribute: &LaunchAttribute,
    ) -> Result {
        let value = zerocopy::transmute!(attribute.value);
        let (stream, context) = self.with_attribute(cx, streams, id, attribute.id)?;
        // SAFETY: a live stream; no value of these attributes, none of which is longer than this, refers to
        // an object. (An access policy's window is a hint.)
        let set = unsafe { self.api.stream_set_attribute(stream, attribute.id, &value) };
        self.note(context, set)
    }

    fn stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
        attribute: u32,
    ) -> Result<[u8; 64]> {
        let (stream, context) = self.with_attribute(cx, streams, id, attribute)?;
        let mut value = [0; 8];
        // SAFETY: a live stream; there is room for the longest value.
        let got = unsafe { self.api.stream_get_attribute(stream, attribute, &mut value) };
        self.note(context, got)?;
        Ok(zerocopy::transmute!(value))
    }

    fn copy_stream_attributes(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        from: StreamId,
        to: StreamId,
    ) -> Result {
        let Place { stream: from, context: other, .. } = self.place_of(cx, streams, from)?;
        let Place { stream: to, context, .. } = self.place_of(cx, streams, to)?;
        if other != context {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: live streams of one context.
        let copied = unsafe { self.api.stream_copy_attributes(to, from) };
        self.note(context, copied)
    }

    fn make_event(&mut self, context: ContextId, flags: u32) -> Result<CudaEvent> {
        let mut handle: CUevent = std::ptr::null_mut();
        // How a thread waits for it is up to the client.
        let kept = flags & EVENT_DISABLE_TIMING;
        // SAFETY: writes an event handle.
        let made = unsafe { self.api.event_create(&mut handle, kept) };
        self.note(context, made)?;
        let timed = (flags & EVENT_DISABLE_TIMING == 0).then(|| Timed::new(handle));
        Ok(CudaEvent { handle, timed, recorded: None })
    }

    fn destroy_event(&mut self, context: ContextId, event: CudaEvent) -> Result {
        event.timed.inspect(|timed| timed.retire());
        // SAFETY: removed from the session's table, and the completer no longer uses it.
        let destroyed = unsafe { self.api.event_destroy(event.handle) };
        self.note(context, destroyed)
    }

    fn record_event(
        &mut self,
        cx: &Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        event: &mut CudaEvent,
        flags: u32,
    ) -> Result {
        if let Some(timed) = &event.timed {
            timed.records.fetch_add(1, Ordering::AcqRel);
        }
        // SAFETY: live handles of one context.
        let recorded = unsafe { self.api.event_record(event.handle, place.stream, flags) };
        let recorded = self.note(place.context, recorded);
        // After the record, so that the event is done when others see the word. Also if the driver has
        // refused the record: what waits for the stream's progress must end.
        let (progress, seq) = (Arc::clone(&place.progress), cx.seq);
        self.fence(streams, place, seq, move |status| progress.publish(seq, status))?;
        recorded?;
        let stream = &find(streams, place.id)?.native;
        let (lasting, health) = (Arc::clone(&stream.lasting), Arc::clone(&place.health));
        event.recorded = Some(Recorded { stream: lasting, value: stream.last, health });
        Ok(())
    }

    fn synchronize_event(&mut self, cx: &Call, event: &CudaEvent) -> Reply<EventSynchronizeReply> {
        self.context(cx.context)?.health.check()?;
        let done = Ok(Answer::Now(EventSynchronizeReply {}));
        let Some(Recorded { stream, value, health }) = &event.recorded else { return done };
        // The completer does this even if the event is already done, so that it comes after the publication
        // of the event's own word. It has published that before a destroyed stream's word is gone.
        let Some(word) = stream.word().clone() else { return done };
        let (pending, errors, context) = (cx.later(), self.errors()?.clone(), cx.context);
        let end = move |status: Status| {
            if !status.is_success() {
                errors.publish(context, status, 0);
            }
            pending.answer(status.ok().map(|()| EventSynchronizeReply {}));
        };
        self.completer.when(&word, *value, health, Box::new(end));
        Ok(Answer::Later)
    }

    fn elapsed(&mut self, cx: &Call, start: &CudaEvent, end: &CudaEvent) -> Reply<EventElapsedReply> {
        let (Some(first), Some(second)) = (&start.timed, &end.timed) else {
            return Err(Status::INVALID_HANDLE);
        };
        let (Some(begun), Some(ended)) = (&start.recorded, &end.recorded) else {
            return Err(Status::INVALID_HANDLE);
        };
        let interval = Interval::between(first, second);
        let Some(word) = ended.outstanding() else {
            if begun.outstanding().is_some() {
                return Err(Status::NOT_READY);
            }
            self.enter_context(cx.context)?;
            let measured = interval.measure(self.api);
            return self.note(cx.context, measured).map(Answer::Now);
        };
        // Requested ahead: when the end is done, the start is too, or the answer is that it is not.
        let (api, pending, context, begun) =
            (self.api, cx.later(), Arc::clone(&ended.health), Recorded::clone(begun));
        let measure = move |status: Status| {
            let has_begun = if begun.outstanding().is_none() { Ok(()) } else { Err(Status::NOT_READY) };
            let measure = || context.with(api, || interval.measure(api));
            let measured = status.ok().and(has_begun).and_then(|()| {
                // The start's context, if it is another, must not be destroyed meanwhile either.
                let other = &begun.health;
                if Arc::ptr_eq(&context, other) { measure() } else { other.with(api, measure) }
            });
            pending.answer(measured);
        };
        self.completer.when(&word, ended.value, &ended.health, Box::new(measure));
        Ok(Answer::Later)
    }
}

/// Makes every fence on a stream end at once. Returns its handle.
#[cfg(test)]
pub(super) fn ends_at_once(streams: &mut Streams<CudaStream>, id: StreamId) -> usize {
    let native = &mut find(streams, id).unwrap().native;
    native.word.set(u64::MAX);
    native.handle as usize
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::doubles::Listener;

    #[test]
    fn an_event_does_not_keep_the_word_of_a_stream_that_was_destroyed() {
        let mut cuda = Cuda::fake(Api::idle());
        let (context, id) = (ContextId(0), StreamId(MAX_CONTEXTS));
        let mut streams = Streams::default();
        let native = cuda.make_stream(id, context, 0, 0).unwrap();
        let word = Arc::clone(&native.word);
        streams.insert(id.0, Stream { context, green: None, is_blocking: true, native });
        let mut call = Call::new(Arc::new(Listener::new(|_| {})));
        let place = cuda.enter_stream(&mut call, &mut streams, id).unwrap();
        let mut event = cuda.make_event(context, EVENT_DISABLE_TIMING).unwrap();
        cuda.record_event(&call, &mut streams, &place, &mut event, 0).unwrap();
        cuda.destroy_stream(&mut call, &mut streams, id).unwrap();
        let recorded = event.recorded.as_ref().unwrap();
        assert!(recorded.outstanding().is_some(), "its work is not done");
        // As the stream does.
        word.set(u64::MAX);
        let (left, limit) = (Arc::downgrade(&word), Instant::now() + Duration::from_secs(60));
        drop(word);
        while left.strong_count() > 0 {
            assert!(Instant::now() < limit, "it is still kept");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(recorded.outstanding().is_none());
        assert!(matches!(cuda.synchronize_event(&call, &event), Ok(Answer::Now(_))));
    }

    /// The GPU may do other processes' work between the two.
    #[test]
    fn an_event_is_done_before_its_word_tells_so() {
        let mut cuda = Cuda::fake(Api::noting());
        let (context, id) = (ContextId(0), StreamId(MAX_CONTEXTS));
        let mut streams = Streams::default();
        let native = cuda.make_stream(id, context, 0, 0).unwrap();
        let handle = native.handle as usize;
        streams.insert(id.0, Stream { context, green: None, is_blocking: true, native });
        let mut call = Call::new(Arc::new(Listener::new(|_| {})));
        let place = cuda.enter_stream(&mut call, &mut streams, id).unwrap();
        let mut event = cuda.make_event(context, 0).unwrap();
        Api::calls();
        cuda.record_event(&call, &mut streams, &place, &mut event, 0).unwrap();
        assert_eq!(Api::calls(), [("event_record", handle), ("stream_write", handle)]);
        // That was a fence of all that is on the stream.
        cuda.synchronize_stream(&mut call, &mut streams, id).unwrap();
        assert!(Api::calls().is_empty());
        // If the record fails, the stream's progress is still written.
        let place = cuda.enter_stream(&mut call, &mut streams, id).unwrap();
        Api::refuse(Some("event_record"));
        let refused = cuda.record_event(&call, &mut streams, &place, &mut event, 0);
        Api::refuse(None);
        assert_eq!(refused, Err(Status::OUT_OF_MEMORY));
        assert_eq!(Api::calls(), [("event_record", handle), ("stream_write", handle)]);
    }

    #[test]
    fn a_stream_is_waited_for_until_its_work_is_done_and_everybody_was_told() {
        const LIMIT: Duration = Duration::from_secs(60);
        let mut cuda = Cuda::fake(Api::idle());
        let (context, id) = (ContextId(0), StreamId(0));
        let native = cuda.default_stream(context, 0).unwrap();
        let mut streams = Streams::default();
        streams.insert(id.0, Stream { context, green: None, is_blocking: true, native });
        let (done, ended) = channel();
        let mut after = |streams: &mut Streams<CudaStream>, seq| {
            let done = done.clone();
            cuda.after(streams, seq, |_| true, move |status| done.send(status).unwrap());
        };
        after(&mut streams, 5);
        let stream = &mut find(&mut streams, id).unwrap().native;
        assert!(ended.try_recv().is_err() && !stream.is_at_rest());
        stream.word.set(5);
        assert_eq!(ended.recv_timeout(LIMIT), Ok(Status::SUCCESS));
        let begun = Instant::now();
        while !stream.is_at_rest() {
            assert!(begun.elapsed() < LIMIT, "its fence is over");
            std::thread::yield_now();
        }
        after(&mut streams, 6);
        assert_eq!(ended.try_recv(), Ok(Status::SUCCESS), "at once");
        let stream = &mut find(&mut streams, id).unwrap().native;
        assert_eq!(stream.last, 5);
        stream.dirty = true;
        after(&mut streams, 7);
        let stream = &find(&mut streams, id).unwrap().native;
        assert!(ended.try_recv().is_err() && stream.last == 7);
        stream.word.set(7);
        assert_eq!(ended.recv_timeout(LIMIT), Ok(Status::SUCCESS));
    }

    /// A program that sets memory on its legacy default stream, and then feeds a kernel on one stream by
    /// what it puts on another one.
    #[test]
    fn no_fence_orders_the_work_of_streams_that_the_program_has_not_ordered() {
        let fenced = || {
            let written = |(name, stream)| (name == "stream_write").then_some(stream);
            Api::calls().into_iter().filter_map(written).collect::<Vec<usize>>()
        };
        let mut cuda = Cuda::fake(Api::noting());
        let (context, legacy) = (ContextId(0), StreamId(0));
        let mut streams = Streams::default();
        let native = cuda.default_stream(context, 0).unwrap();
        streams.insert(legacy.0, Stream { context, green: None, is_blocking: true, native });
        let made = [1, 2, 3].map(|number| {
            let (id, is_blocking) = (StreamId(MAX_CONTEXTS + number), number < 3);
            let native = cuda.make_stream(id, context, 0, 0).unwrap();
            let handle = native.handle as usize;
            streams.insert(id.0, Stream { context, green: None, is_blocking, native });
            (id, handle)
        });
        let mut call = Call::new(Arc::new(Listener::new(|_| {})));
        let mut works = |cuda: &mut Cuda, streams: &mut Streams<CudaStream>, id| {
            cuda.enter_briefly(&mut call, streams, id).unwrap();
        };
        let mut other = Call::new(Arc::new(Listener::new(|_| {})));
        let [(kernels, _), (feeds, feeding), (apart, _)] = made;
        // While nothing has followed it, its own fence orders nothing.
        works(&mut cuda, &mut streams, kernels);
        works(&mut cuda, &mut streams, legacy);
        works(&mut cuda, &mut streams, apart);
        cuda.after_stream(&mut other, &mut streams, legacy, Box::new(|_| {})).unwrap();
        assert_eq!(fenced(), [0]);
        cuda.after_stream(&mut other, &mut streams, legacy, Box::new(|_| {})).unwrap();
        assert_eq!(fenced(), [0; 0], "it has no more work");
        works(&mut cuda, &mut streams, legacy);
        works(&mut cuda, &mut streams, kernels);
        works(&mut cuda, &mut streams, feeds);
        // What follows it ends later.
        let (done, ended) = channel();
        let end = Box::new(move |status| done.send(status).unwrap());
        cuda.after_stream(&mut other, &mut streams, legacy, end).unwrap();
        assert_eq!(fenced(), [feeding]);
        let word = Arc::clone(&find(&mut streams, feeds).unwrap().native.word);
        assert!(ended.try_recv().is_err());
        word.set(u64::MAX);
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(Status::SUCCESS));
        cuda.after(&mut streams, 9, |_| true, |_| {});
        assert!(!fenced().contains(&0));
        // A program that waits for the default stream waits for all of them.
        cuda.synchronize_stream(&mut other, &mut streams, legacy).unwrap();
        assert_eq!(fenced(), [0]);
    }

    #[test]
    fn events_are_measured_in_both_directions_at_the_same_time() {
        let [one, other] = [(); 2].map(|()| Timed::new(std::ptr::null_mut()));
        let (done, all_done) = channel();
        for (start, end) in [(&one, &other), (&other, &one)] {
            let (start, end, done) = (Arc::clone(start), Arc::clone(end), done.clone());
            std::thread::spawn(move || {
                for _ in 0..200_000 {
                    drop(lock_both(&start, &end));
                }
                done.send(()).unwrap();
            });
        }
        for _ in 0..2 {
            all_done.recv_timeout(Duration::from_secs(120)).unwrap();
        }
        assert!(lock_both(&one, &one).1.is_none());
    }
}
