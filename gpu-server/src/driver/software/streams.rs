//! Streams and events.
//!
//! **The legacy default stream** of a context waits for everything enqueued earlier on the context's blocking
//! streams, and these wait for everything enqueued earlier on it. Both are events, recorded only if there is
//! something to wait for.
//!
//! **Steps.** What the client waits for must happen even if the device has failed and `software-gpu` runs no
//! more closures. So everything that somebody waits for is a [`Step`]: its end is called when the step has
//! run or is dropped without running.

use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::Answer;
use protocol::ops::event::*;
use protocol::ops::launch::LaunchAttribute;
use protocol::ops::stream::*;
use software_gpu::{Event, Gpu, Stream};

use super::imitate::Queue;
use super::stream_attributes::StreamAttributes;
use super::{Software, code};
use crate::driver::call::{Call, End, Errors, Reply, Result};
use crate::driver::gpu::{EVENT_DISABLE_TIMING, GpuStreams, STREAM_NON_BLOCKING};
use crate::driver::streams::{self, Streams};
use crate::shared_event::Moment;

/// One of the client's streams.
pub struct SoftwareStream {
    stream: Stream,
    /// Whether it is ordered with the legacy default stream.
    blocking: bool,
    /// Whether it has work that the legacy stream has not waited for.
    dirty: bool,
    /// The number of the legacy stream's operations that it has waited for.
    joined: u64,
    word: Arc<Word>,
    queue: Arc<Queue>,
    attributes: StreamAttributes,
}

impl Drop for SoftwareStream {
    fn drop(&mut self) {
        self.word.gone.store(true, Ordering::Release);
    }
}

/// Publishes a stream's progress word.
pub(super) struct Word {
    stream: u32,
    context: ContextId,
    last: Mutex<u64>,
    errors: Errors,
    gone: AtomicBool,
}

impl Word {
    /// Whether the stream was destroyed, by itself or with its context, so that nothing on it need wait any
    /// longer.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Publishes an error of the context at a command.
    pub(super) fn complain(&self, status: Status, seq: u64) {
        self.errors.publish(self.context, status, seq);
    }

    /// Everything on the stream up to `seq` is done, or never will be; `status` says why.
    pub(super) fn publish(&self, seq: u64, status: Status) {
        if !status.is_success() {
            self.errors.publish(self.context, status, 0);
        }
        let mut last = self.last.lock().unwrap_or_else(|e| e.into_inner());
        if seq > *last {
            *last = seq;
            self.errors.progress(self.stream, seq);
        }
    }
}

/// One of the client's events.
pub struct SoftwareEvent {
    event: Event,
    timing: bool,
    /// State of its last record, if it records time.
    reached: Option<Arc<Reached>>,
    gpu: Gpu,
}

/// What to do when a record of an event is reached. `None` once it has been reached.
struct Reached(Mutex<Option<Vec<End>>>);

impl Reached {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Vec<End>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Calls `end` when it is reached, or immediately if it has been.
    fn when(&self, end: End) {
        if let Some(ends) = &mut *self.lock() {
            return ends.push(end);
        }
        end(Status::SUCCESS);
    }

    fn come(&self, status: Status) {
        let ends = self.lock().take();
        ends.into_iter().flatten().for_each(|end| end(status));
    }
}

/// A place in a stream where operations can be enqueued.
pub struct Place {
    pub(super) stream: Stream,
    pub(super) gpu: Gpu,
    pub(super) device: u32,
    pub(super) context: ContextId,
    word: Arc<Word>,
}

struct Step {
    gpu: Gpu,
    end: Option<End>,
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end(self.gpu.status().map_or_else(|e| code(&e), |()| Status::SUCCESS));
        }
    }
}

/// Enqueues `end`, to be called with the device's status when the stream has reached it.
pub(super) fn step(stream: &Stream, gpu: &Gpu, end: impl FnOnce(Status) + Send + 'static) {
    let step = Step { gpu: gpu.clone(), end: Some(Box::new(end)) };
    // If this is refused, the step is dropped, which ends it.
    let _ = stream.enqueue(move |_| {
        drop(step);
        Ok(())
    });
}

/// Calls `end` when everything enqueued on `streams` is done.
pub(super) fn after_all(gpu: &Gpu, streams: &[Stream], end: impl FnOnce(Status) + Send + 'static) {
    let waiter = gpu.stream();
    for stream in streams {
        let event = Event::new();
        if stream.record(&event).is_ok() {
            // This fails only without a thread, and then nothing runs at all.
            let _ = waiter.wait(&event);
        }
    }
    step(&waiter, gpu, end);
}

impl Place {
    /// Publishes `seq` in the stream's word when the stream has reached this point.
    fn publish(&self, seq: u64) {
        let word = Arc::clone(&self.word);
        step(&self.stream, &self.gpu, move |status| word.publish(seq, status));
    }

    /// The stream's progress word.
    pub(super) fn word(&self) -> Arc<Word> {
        Arc::clone(&self.word)
    }

    /// Publishes errors of this place's context.
    pub(super) fn errors(&self) -> (Errors, ContextId) {
        (self.word.errors.clone(), self.context)
    }

    /// Enqueues work whose failure becomes the context's deferred error without failing the device, for
    /// example if memory is freed during a copy.
    pub(super) fn enqueue_checked(
        &self,
        seq: u64,
        work: impl FnOnce(&Gpu) -> software_gpu::Result<()> + Send + 'static,
    ) -> Result {
        let (errors, context) = self.errors();
        let step = move |gpu: &Gpu| match work(gpu) {
            // If a kernel has failed, its error is already sticky.
            Err(e) if gpu.status().is_ok() => {
                errors.publish(context, code(&e), seq);
                Ok(())
            }
            done => done,
        };
        self.stream.enqueue(step).map_err(|e| code(&e))
    }
}

/// A stream in the table.
pub(super) fn find(
    streams: &mut Streams<SoftwareStream>,
    id: StreamId,
) -> Result<&mut streams::Stream<SoftwareStream>> {
    streams.get_mut(&id.0).ok_or(Status::INVALID_HANDLE)
}

impl Software {
    pub(super) fn new_stream(
        &self,
        id: StreamId,
        context: ContextId,
        device: u32,
        blocking: bool,
    ) -> Result<SoftwareStream> {
        self.need_context(device)?;
        let word = Word {
            stream: id.0,
            context,
            last: Mutex::new(0),
            errors: self.errors()?.clone(),
            gone: AtomicBool::new(false),
        };
        Ok(SoftwareStream {
            stream: self.device(device)?.gpu.stream(),
            blocking,
            dirty: false,
            joined: 0,
            word: Arc::new(word),
            queue: Arc::default(),
            attributes: StreamAttributes::default(),
        })
    }

    /// The streams of all contexts of a device.
    pub(super) fn streams_of_device(&self, streams: &Streams<SoftwareStream>, device: u32) -> Vec<Stream> {
        let of_device = |stream: &&streams::Stream<SoftwareStream>| {
            self.context(stream.context).is_ok_and(|context| context.device == device)
        };
        streams.values().filter(of_device).map(|stream| stream.native.stream.clone()).collect()
    }

    /// The place in a stream for the next operation, for one that waits for no other stream.
    pub(super) fn look(
        &self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
    ) -> Result<Place> {
        let found = find(streams, id)?;
        let (stream, context, word) =
            (found.native.stream.clone(), found.context, Arc::clone(&found.native.word));
        cx.context = context;
        let device = self.context(context)?.device;
        Ok(Place { stream, gpu: self.device(device)?.gpu.clone(), device, context, word })
    }

    /// Counts an operation that is about to be enqueued on a stream.
    fn begin_operation(&mut self, streams: &mut Streams<SoftwareStream>, id: StreamId) -> Result {
        self.delays.delay();
        let (size, shared) = (self.imitate.queue, self.imitate.hardware_queues);
        if shared > 0 {
            let found = &find(streams, id)?.native;
            // A failed device refuses it, and nothing waits there any more.
            let _ = self.hardware_queues.enter(shared, id.0, &found.stream);
        }
        if size > 0 {
            let found = &find(streams, id)?.native;
            let entry = found.queue.enter(size);
            // If a failed device refuses it, the entry is dropped: nothing waits there any more.
            let _ = found.stream.enqueue(move |_| {
                drop(entry);
                Ok(())
            });
        }
        Ok(())
    }

    /// The place for a query or a synchronization of a stream, or for a mark on a failed device. On the
    /// legacy default stream it covers the blocking streams, like any operation there.
    fn enter_to_look(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
    ) -> Result<Place> {
        let place = self.look(cx, streams, id)?;
        if id.0 == place.context.0 && place.gpu.status().is_ok() {
            return self.enter_stream(cx, streams, id);
        }
        self.begin_operation(streams, id)?;
        Ok(place)
    }
}

impl GpuStreams for Software {
    type Stream = SoftwareStream;
    type Place = Place;
    type Event = SoftwareEvent;
    type MemoryOp = (MemoryOp, Gpu);

    fn default_stream(&mut self, context: ContextId, device: u32) -> Result<SoftwareStream> {
        self.new_stream(StreamId(context.0), context, device, true)
    }

    fn make_stream(
        &mut self,
        id: StreamId,
        context: ContextId,
        flags: u32,
        _priority: i32,
    ) -> Result<SoftwareStream> {
        let device = self.context(context)?.device;
        self.new_stream(id, context, device, flags & STREAM_NON_BLOCKING == 0)
    }

    fn destroy_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
    ) -> Result {
        let found = find(streams, id)?;
        let (context, native) = (found.context, &found.native);
        cx.context = context;
        // Its work still completes, but must not write to its word, which may soon belong to another stream.
        *native.word.last.lock().unwrap_or_else(|e| e.into_inner()) = u64::MAX;
        if native.blocking && native.dirty {
            let event = Event::new();
            native.stream.record(&event).map_err(|e| code(&e))?;
            let device = self.context(context)?.device;
            let legacy = match streams.entry(context.0) {
                Entry::Occupied(found) => found.into_mut(),
                Entry::Vacant(free) => {
                    let native = self.default_stream(context, device)?;
                    free.insert(streams::Stream { context, green: None, is_blocking: true, native })
                }
            };
            legacy.native.stream.wait(&event).map_err(|e| code(&e))?;
        }
        streams.remove(&id.0);
        Ok(())
    }

    /// A failed device refuses.
    fn enter_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
    ) -> Result<Place> {
        self.begin_operation(streams, id)?;
        let place = self.look(cx, streams, id)?;
        if let Err(error) = place.gpu.status() {
            // Before the answer: a client that has the answer must find the context failed.
            let (status, (errors, context)) = (code(&error), place.errors());
            errors.publish(context, status, 0);
            return Err(status);
        }
        let context = place.context;
        let failed = |e: software_gpu::Error| code(&e);
        if id.0 == context.0 {
            let of_context = streams.values_mut().filter(|stream| stream.context == context);
            for other in of_context.map(|stream| &mut stream.native).filter(|s| s.blocking && s.dirty) {
                other.dirty = false;
                if other.word.stream != id.0 {
                    let event = Event::new();
                    other.stream.record(&event).map_err(failed)?;
                    place.stream.wait(&event).map_err(failed)?;
                }
            }
            if let Some(context) = self.contexts.get_mut(&context.0) {
                context.legacy += 1;
            }
        } else {
            let legacy_now = self.context(context)?.legacy;
            let legacy = streams.get(&context.0).map(|legacy| legacy.native.stream.clone());
            let stream = &mut find(streams, id)?.native;
            if stream.blocking {
                stream.dirty = true;
                if stream.joined < legacy_now {
                    stream.joined = legacy_now;
                    if let Some(legacy) = legacy {
                        let event = Event::new();
                        legacy.record(&event).map_err(failed)?;
                        place.stream.wait(&event).map_err(failed)?;
                    }
                }
            }
        }
        Ok(place)
    }

    fn after_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
        end: End,
    ) -> Result {
        let place = self.look(cx, streams, id)?;
        step(&place.stream, &place.gpu, end);
        Ok(())
    }

    fn device_at(place: &Place) -> u32 {
        place.device
    }

    fn synchronize_stream(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
    ) -> Result {
        let place = self.enter_to_look(cx, streams, id)?;
        let (pending, word) = (cx.later(), place.word);
        step(&place.stream, &place.gpu, move |status| {
            if !status.is_success() {
                word.errors.publish(word.context, status, 0);
            }
            pending.answer(status.ok().map(|()| StreamSynchronizeReply {}));
        });
        Ok(())
    }

    fn synchronize_context(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        context: ContextId,
    ) -> Result {
        let device = self.context(context)?.device;
        let gpu = self.device(device)?.gpu.clone();
        let pending = cx.later();
        // The last step to be dropped answers; each contributes the status that it has seen.
        pending.settle(gpu.status().map_or_else(|e| code(&e), |()| Status::SUCCESS));
        let pending = Arc::new(pending);
        for stream in streams.values().filter(|stream| stream.context == context) {
            let (pending, word) = (Arc::clone(&pending), Arc::clone(&stream.native.word));
            step(&stream.native.stream, &gpu, move |status| {
                if !status.is_success() {
                    word.errors.publish(word.context, status, 0);
                }
                pending.settle(status);
            });
        }
        Ok(())
    }

    fn after_device(
        &mut self,
        streams: &mut Streams<SoftwareStream>,
        device: u32,
        _seq: u64,
        end: impl FnOnce(Status) + Send + 'static,
    ) {
        let Ok(gpu) = self.device(device).map(|device| device.gpu.clone()) else { return };
        let streams = self.streams_of_device(streams, device);
        if streams.iter().all(|stream| stream.query().unwrap_or(true)) {
            end(gpu.status().map_or_else(|e| code(&e), |()| Status::SUCCESS));
        } else {
            after_all(&gpu, &streams, end);
        }
    }

    fn mark_stream(&mut self, cx: &mut Call, streams: &mut Streams<SoftwareStream>, id: StreamId) -> Result {
        // Unlike a query, a mark is an operation of its stream. A failed device takes none, and publishes.
        let place = match self.look(cx, streams, id)?.gpu.status() {
            Ok(()) => self.enter_stream(cx, streams, id)?,
            Err(_) => self.enter_to_look(cx, streams, id)?,
        };
        place.publish(cx.seq);
        Ok(())
    }

    fn give_up(&mut self, streams: &mut Streams<SoftwareStream>, id: StreamId, seq: u64, status: Status) {
        if let Ok(stream) = find(streams, id) {
            stream.native.word.publish(seq, status);
        }
    }

    fn wait_event(&mut self, place: &Place, event: &SoftwareEvent, _flags: u32) -> Result {
        place.stream.wait(&event.event).map_err(|e| code(&e))
    }

    fn wait_for(
        &mut self,
        cx: &Call,
        _streams: &mut Streams<SoftwareStream>,
        place: &Place,
        moment: Moment,
    ) -> Result {
        let word = place.word();
        place.enqueue_checked(cx.seq, move |gpu| {
            moment.await_unless(|| word.is_gone() || gpu.is_cancelled());
            Ok(())
        })
    }

    fn memory_op(&self, op: &MemoryOp, device: u32) -> Result<(MemoryOp, Gpu)> {
        let flushes = op.is_wait() && op.flags & memory_op::WAIT_FLUSH != 0;
        if flushes || op.operation == memory_op::FLUSH_REMOTE_WRITES {
            return Err(Status::NOT_SUPPORTED);
        }
        Ok((op.clone(), self.device(device)?.gpu.clone()))
    }

    fn memory_ops(&mut self, cx: &Call, place: &Place, operations: Vec<(MemoryOp, Gpu)>) -> Result {
        let (bell, word) = (Arc::clone(&self.bell), place.word());
        place.enqueue_checked(cx.seq, move |_| bell.run(&operations, &|| word.is_gone()))
    }

    fn set_stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
        attribute: &LaunchAttribute,
    ) -> Result {
        let found = find(streams, id)?;
        cx.context = found.context;
        found.native.attributes.set(attribute)
    }

    fn stream_attribute(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
        attribute: u32,
    ) -> Result<[u8; 64]> {
        let found = find(streams, id)?;
        cx.context = found.context;
        found.native.attributes.get(attribute)
    }

    fn copy_stream_attributes(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        from: StreamId,
        to: StreamId,
    ) -> Result {
        let from = find(streams, from)?;
        let (context, attributes) = (from.context, from.native.attributes.clone());
        let to = find(streams, to)?;
        cx.context = to.context;
        if to.context != context {
            return Err(Status::INVALID_VALUE);
        }
        to.native.attributes = attributes;
        Ok(())
    }

    fn make_event(&mut self, context: ContextId, flags: u32) -> Result<SoftwareEvent> {
        let gpu = self.device(self.context(context)?.device)?.gpu.clone();
        let timing = flags & EVENT_DISABLE_TIMING == 0;
        Ok(SoftwareEvent { event: Event::new(), timing, reached: None, gpu })
    }

    fn destroy_event(&mut self, _context: ContextId, _event: SoftwareEvent) -> Result {
        Ok(())
    }

    fn record_event(
        &mut self,
        cx: &Call,
        _streams: &mut Streams<SoftwareStream>,
        place: &Place,
        event: &mut SoftwareEvent,
        _flags: u32,
    ) -> Result {
        place.publish(cx.seq);
        place.stream.record(&event.event).map_err(|e| code(&e))?;
        if event.timing {
            let reached = Arc::new(Reached(Mutex::new(Some(Vec::new()))));
            event.reached = Some(Arc::clone(&reached));
            step(&place.stream, &place.gpu, move |status| reached.come(status));
        }
        Ok(())
    }

    fn synchronize_event(&mut self, cx: &Call, event: &SoftwareEvent) -> Reply<EventSynchronizeReply> {
        event.gpu.status().map_err(|e| code(&e))?;
        if event.event.query() {
            return Ok(Answer::Now(EventSynchronizeReply {}));
        }
        let waiter = event.gpu.stream();
        waiter.wait(&event.event).map_err(|e| code(&e))?;
        let pending = cx.later();
        step(&waiter, &event.gpu, move |status| {
            pending.answer(status.ok().map(|()| EventSynchronizeReply {}))
        });
        Ok(Answer::Later)
    }

    fn elapsed(&mut self, cx: &Call, start: &SoftwareEvent, end: &SoftwareEvent) -> Reply<EventElapsedReply> {
        let (Some(begun), Some(reached)) = (start.reached.clone(), end.reached.clone()) else {
            return Err(Status::INVALID_HANDLE);
        };
        // Right after the event, so that an answer requested ahead arrives before that of a client that waits
        // for the stream.
        let (start, end, pending) = (start.event.clone(), end.event.clone(), cx.later());
        let answer = move |status: Status| {
            let elapsed = |()| end.elapsed_ns_since(&start).map_err(|_| Status::NOT_READY);
            let elapsed = status.ok().and_then(elapsed);
            pending.answer(elapsed.map(|ns| EventElapsedReply { milliseconds: (ns as f64 / 1e6) as f32 }));
        };
        begun.when(Box::new(move |status| match status.ok() {
            Ok(()) => reached.when(Box::new(answer)),
            Err(status) => answer(status),
        }));
        Ok(Answer::Later)
    }
}
