//! Streams and events.
//!
//! **The legacy default stream** of a context waits for all that was enqueued before on the context's blocking streams, and these wait for all that was
//! enqueued on it before. Both are events, recorded only when there is something to wait for.
//!
//! **Steps.** What the client waits for must come about even when the device has failed, when `software-gpu` runs no closure any more. So every
//! step that somebody waits for is a [`Step`]: its end is called when it has run, or is dropped unrun.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_STREAMS};
use protocol::handle::{ContextId, GreenId, StreamId};
use protocol::ops::Answer;
use protocol::ops::event::*;
use protocol::ops::stream::*;
use software_gpu::{Event, Gpu, Stream};

use super::imitate::Queue;
use super::stream_attributes::StreamAttributes;
use super::{Software, code};
use crate::driver::call::{Call, Errors};
use crate::driver::session::Session;

const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;

/// A stream of the client's.
pub(super) struct Lane {
    pub(super) stream: Stream,
    pub(super) context: u32,
    /// Ordered with the legacy default stream.
    blocking: bool,
    /// Has work that the legacy stream has not waited for.
    dirty: bool,
    /// Operations of the legacy stream that it has waited for.
    joined: u64,
    word: Arc<Word>,
    queue: Arc<Queue>,
    pub(super) attributes: StreamAttributes,
    /// The green context that it was made in.
    pub(super) green: Option<GreenId>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.word.gone.store(true, Ordering::Release);
    }
}

/// A stream's progress word, as this side publishes it.
pub(super) struct Word {
    stream: u32,
    context: ContextId,
    last: Mutex<u64>,
    errors: Errors,
    gone: AtomicBool,
}

impl Word {
    /// Whether the stream is destroyed, by itself or with its context: nothing on it need wait any longer.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Everything on the stream up to `seq` is done, or will never be: then `status` says why.
    fn publish(&self, seq: u64, status: Status) {
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

/// An event of the client's.
pub(super) struct Moment {
    event: Event,
    pub(super) context: u32,
    timing: bool,
    /// Of its last record, if it keeps the time.
    reached: Option<Arc<Reached>>,
    device: u32,
}

/// What is to be done when a record of an event is reached; `None` once it is.
struct Reached(Mutex<Option<Vec<End>>>);

impl Reached {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Vec<End>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Calls `end` when it is reached: now, if it is.
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

/// A place in a stream, to enqueue at.
pub(super) struct Place {
    pub(super) stream: Stream,
    pub(super) gpu: Gpu,
    pub(super) device: u32,
    pub(super) context: ContextId,
    word: Arc<Word>,
}

type End = Box<dyn FnOnce(Status) + Send>;

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

/// Enqueues `end`, to be called with the device's status when the stream has come there.
pub(super) fn step(stream: &Stream, gpu: &Gpu, end: impl FnOnce(Status) + Send + 'static) {
    let step = Step { gpu: gpu.clone(), end: Some(Box::new(end)) };
    // When it is refused, the step is dropped, which ends it.
    let _ = stream.enqueue(move |_| {
        drop(step);
        Ok(())
    });
}

/// Calls `end` when all that is enqueued on `lanes` is done.
pub(super) fn after_all(gpu: &Gpu, lanes: &[Stream], end: impl FnOnce(Status) + Send + 'static) {
    let waiter = gpu.stream();
    for lane in lanes {
        let event = Event::new();
        if lane.record(&event).is_ok() {
            // Only a missing thread can refuse it, and then nothing runs at all.
            let _ = waiter.wait(&event);
        }
    }
    step(&waiter, gpu, end);
}

/// Points at which streams wait for the client.
#[derive(Default)]
pub(super) struct Tickets {
    state: Mutex<(HashSet<u64>, bool)>,
    changed: Condvar,
}

impl Tickets {
    fn open(&self, ticket: u64) -> bool {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).0.insert(ticket)
    }

    /// Whether a stream waits.
    pub(super) fn any(&self) -> bool {
        !self.state.lock().unwrap_or_else(|e| e.into_inner()).0.is_empty()
    }

    /// Lets a stream go on. False: none waits for this.
    pub(super) fn signal(&self, ticket: u64) -> bool {
        let waited = self.state.lock().unwrap_or_else(|e| e.into_inner()).0.remove(&ticket);
        self.changed.notify_all();
        waited
    }

    fn wait(&self, ticket: u64) {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        while state.0.contains(&ticket) && !state.1 {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    pub(super) fn release_all(&self) {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).0.clear();
        self.changed.notify_all();
    }
}

impl Software {
    pub(super) fn lane(&mut self, id: StreamId) -> Result<&mut Lane, Status> {
        if id.0 < MAX_CONTEXTS && !self.lanes.contains_key(&id.0) {
            let device = self.contexts.get(&id.0).ok_or(Status::INVALID_HANDLE)?.device;
            let lane = self.make_lane(id.0, id.0, device, true)?;
            self.lanes.insert(id.0, lane);
        }
        self.lanes.get_mut(&id.0).ok_or(Status::INVALID_HANDLE)
    }

    pub(super) fn make_lane(
        &self,
        id: u32,
        context: u32,
        device: u32,
        blocking: bool,
    ) -> Result<Lane, Status> {
        self.need_context(device)?;
        let word = Word {
            stream: id,
            context: ContextId(context),
            last: Mutex::new(0),
            errors: self.errors()?.clone(),
            gone: AtomicBool::new(false),
        };
        Ok(Lane {
            stream: self.device(device)?.gpu.stream(),
            context,
            blocking,
            dirty: false,
            joined: 0,
            word: Arc::new(word),
            queue: Arc::default(),
            attributes: StreamAttributes::default(),
            green: None,
        })
    }

    /// The streams of all contexts of a device.
    pub(super) fn lanes_of_device(&self, device: u32) -> Vec<Stream> {
        let of_device = |lane: &&Lane| self.contexts.get(&lane.context).is_some_and(|c| c.device == device);
        self.lanes.values().filter(of_device).map(|lane| lane.stream.clone()).collect()
    }

    /// The place in a stream where the next operation goes, for one that only looks: it waits for no other stream.
    pub(super) fn look(&mut self, cx: &mut Call, id: StreamId) -> Result<Place, Status> {
        let lane = self.lane(id)?;
        let (stream, context, word) = (lane.stream.clone(), lane.context, Arc::clone(&lane.word));
        cx.context = ContextId(context);
        let device = self.context(cx.context)?.device;
        Ok(Place { stream, gpu: self.device(device)?.gpu.clone(), device, context: cx.context, word })
    }

    /// A stream's queue takes one more operation, which is about to be enqueued.
    fn begin_operation(&mut self, id: StreamId) -> Result<(), Status> {
        self.delays.delay();
        let size = self.imitate.queue;
        if size > 0 {
            let lane = self.lane(id)?;
            let (stream, entry) = (lane.stream.clone(), lane.queue.enter(size));
            // Refused by a device that has failed, the entry is dropped: nothing waits there any more.
            let _ = stream.enqueue(move |_| {
                drop(entry);
                Ok(())
            });
        }
        Ok(())
    }

    /// The place in a stream where the next operation goes, in its right order with the context's legacy default stream. A failed device refuses.
    pub(super) fn enter(&mut self, cx: &mut Call, id: StreamId) -> Result<Place, Status> {
        self.begin_operation(id)?;
        let place = self.look(cx, id)?;
        if let Err(error) = place.gpu.status() {
            // Before the answer: who has that finds the context failed.
            let (status, (errors, context)) = (code(&error), place.errors());
            errors.publish(context, status, 0);
            return Err(status);
        }
        let context = place.context.0;
        let failed = |e: software_gpu::Error| code(&e);
        if id.0 == context {
            for lane in self.lanes.values_mut().filter(|l| l.context == context && l.blocking && l.dirty) {
                lane.dirty = false;
                if lane.word.stream != context {
                    let event = Event::new();
                    lane.stream.record(&event).map_err(failed)?;
                    place.stream.wait(&event).map_err(failed)?;
                }
            }
            if let Some(context) = self.contexts.get_mut(&context) {
                context.legacy += 1;
            }
        } else {
            let legacy_now = self.context(place.context)?.legacy;
            let legacy = self.lanes.get(&context).map(|l| l.stream.clone());
            let lane = self.lane(id)?;
            if lane.blocking {
                lane.dirty = true;
                if lane.joined < legacy_now {
                    lane.joined = legacy_now;
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

    /// Where a mark, a query or a synchronization of a stream goes. On the legacy default stream it covers the blocking streams, as any operation there.
    fn enter_to_look(&mut self, cx: &mut Call, id: StreamId) -> Result<Place, Status> {
        let place = self.look(cx, id)?;
        if id.0 == place.context.0 && place.gpu.status().is_ok() {
            return self.enter(cx, id);
        }
        self.begin_operation(id)?;
        Ok(place)
    }

    /// Answers `cx` when all streams of the context are done.
    pub(super) fn synchronize_context(&mut self, cx: &mut Call, id: ContextId) -> Result<(), Status> {
        let device = self.context(id)?.device;
        let gpu = self.device(device)?.gpu.clone();
        let pending = cx.later();
        let lanes: Vec<(Stream, Arc<Word>)> = self
            .lanes
            .values()
            .filter(|l| l.context == id.0)
            .map(|l| (l.stream.clone(), Arc::clone(&l.word)))
            .collect();
        // The last of the steps to go answers; each says what it has seen.
        pending.settle(gpu.status().map_or_else(|e| code(&e), |()| Status::SUCCESS));
        let pending = Arc::new(pending);
        for (stream, word) in lanes {
            let pending = Arc::clone(&pending);
            step(&stream, &gpu, move |status| {
                if !status.is_success() {
                    word.errors.publish(word.context, status, 0);
                }
                pending.settle(status);
            });
        }
        Ok(())
    }
}

impl StreamOps<Call> for Session<Software> {
    fn stream_create(&mut self, cx: &mut Call, op: StreamCreate) -> Result<(), Status> {
        cx.context = op.context;
        let device = self.context(op.context)?.device;
        if op.stream.0 < MAX_CONTEXTS || op.stream.0 >= MAX_STREAMS || self.lanes.contains_key(&op.stream.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let mut lane =
            self.make_lane(op.stream.0, op.context.0, device, op.flags & STREAM_NON_BLOCKING == 0)?;
        lane.joined = 0;
        self.lanes.insert(op.stream.0, lane);
        Ok(())
    }

    fn stream_destroy(&mut self, cx: &mut Call, op: StreamDestroy) -> Result<(), Status> {
        if op.stream.0 < MAX_CONTEXTS {
            return Err(Status::INVALID_HANDLE);
        }
        let lane = self.lane(op.stream)?;
        cx.context = ContextId(lane.context);
        // Its work still completes; nothing more may be written to its word, which may soon be another stream's.
        *lane.word.last.lock().unwrap_or_else(|e| e.into_inner()) = u64::MAX;
        let (blocking, dirty, context, stream) =
            (lane.blocking, lane.dirty, lane.context, lane.stream.clone());
        if blocking && dirty {
            let event = Event::new();
            stream.record(&event).map_err(|e| code(&e))?;
            self.lane(StreamId(context))?.stream.wait(&event).map_err(|e| code(&e))?;
        }
        self.lanes.remove(&op.stream.0);
        Ok(())
    }

    fn stream_synchronize(
        &mut self,
        cx: &mut Call,
        op: StreamSynchronize,
    ) -> Result<Answer<StreamSynchronizeReply>, Status> {
        let place = self.enter_to_look(cx, op.stream)?;
        let (pending, word) = (cx.later(), place.word);
        step(&place.stream, &place.gpu, move |status| {
            if !status.is_success() {
                word.errors.publish(word.context, status, 0);
            }
            pending.answer(status.ok().map(|()| StreamSynchronizeReply {}));
        });
        Ok(Answer::Later)
    }

    fn stream_mark(&mut self, cx: &mut Call, op: StreamMark) -> Result<(), Status> {
        let place = self.enter_to_look(cx, op.stream)?;
        place.publish(cx.seq);
        Ok(())
    }

    fn stream_wait_event(&mut self, cx: &mut Call, op: StreamWaitEvent) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let moment = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        place.stream.wait(&moment.event).map_err(|e| code(&e))
    }

    fn stream_host_wait(&mut self, cx: &mut Call, op: StreamHostWait) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        if !self.beside.tickets.open(op.ticket.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let beside = Arc::clone(&self.beside);
        let ticket = op.ticket.0;
        place
            .stream
            .enqueue(move |_| {
                beside.tickets.wait(ticket);
                Ok(())
            })
            .map_err(|e| code(&e))
    }

    fn stream_host_signal(&mut self, _cx: &mut Call, op: StreamHostSignal) -> Result<(), Status> {
        // Signalled before its turn: nothing is left to be done.
        self.beside.tickets.signal(op.ticket.0);
        Ok(())
    }

    fn stream_batch_mem_op(&mut self, cx: &mut Call, op: StreamBatchMemOp) -> Result<(), Status> {
        self.memory_ops(cx, op)
    }

    fn stream_set_attribute(
        &mut self,
        cx: &mut Call,
        op: StreamSetAttribute,
    ) -> Result<Answer<StreamSetAttributeReply>, Status> {
        cx.context = self.look(cx, op.stream)?.context;
        self.lane(op.stream)?.attributes.set(&op.attribute)?;
        Ok(Answer::Now(StreamSetAttributeReply {}))
    }

    fn stream_get_attribute(
        &mut self,
        cx: &mut Call,
        op: StreamGetAttribute,
    ) -> Result<Answer<StreamGetAttributeReply>, Status> {
        cx.context = self.look(cx, op.stream)?.context;
        let value = self.lane(op.stream)?.attributes.get(op.attribute)?;
        Ok(Answer::Now(StreamGetAttributeReply { value }))
    }

    fn stream_copy_attributes(
        &mut self,
        cx: &mut Call,
        op: StreamCopyAttributes,
    ) -> Result<Answer<StreamCopyAttributesReply>, Status> {
        let from = self.look(cx, op.src)?.context;
        if self.look(cx, op.dst)?.context != from {
            return Err(Status::INVALID_VALUE);
        }
        let attributes = self.lane(op.src)?.attributes.clone();
        self.lane(op.dst)?.attributes = attributes;
        Ok(Answer::Now(StreamCopyAttributesReply {}))
    }
}

impl Place {
    /// Publishes `seq` in the stream's word when the stream has come here.
    fn publish(&self, seq: u64) {
        let word = Arc::clone(&self.word);
        step(&self.stream, &self.gpu, move |status| word.publish(seq, status));
    }

    /// The stream's progress word.
    pub(super) fn word(&self) -> Arc<Word> {
        Arc::clone(&self.word)
    }

    /// What publishes errors of this place's context.
    pub(super) fn errors(&self) -> (Errors, ContextId) {
        (self.word.errors.clone(), self.context)
    }
}

impl EventOps<Call> for Session<Software> {
    fn event_create(&mut self, cx: &mut Call, op: EventCreate) -> Result<(), Status> {
        cx.context = op.context;
        let device = self.context(op.context)?.device;
        if self.events.contains_key(&op.event.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let timing = op.flags & EVENT_DISABLE_TIMING == 0;
        let moment = Moment { event: Event::new(), context: op.context.0, timing, reached: None, device };
        self.events.insert(op.event.0, moment);
        Ok(())
    }

    fn event_destroy(&mut self, cx: &mut Call, op: EventDestroy) -> Result<(), Status> {
        let moment = self.events.remove(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(moment.context);
        Ok(())
    }

    fn event_record(&mut self, cx: &mut Call, op: EventRecord) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let moment = self.events.get_mut(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        if moment.context != place.context.0 {
            return Err(Status::INVALID_HANDLE);
        }
        // First the word, then the event: whoever learns that the event is reached, on whatever way, must find the word there.
        place.publish(cx.seq);
        place.stream.record(&moment.event).map_err(|e| code(&e))?;
        if moment.timing {
            let reached = Arc::new(Reached(Mutex::new(Some(Vec::new()))));
            moment.reached = Some(Arc::clone(&reached));
            step(&place.stream, &place.gpu, move |status| reached.come(status));
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
        let gpu = self.device(moment.device)?.gpu.clone();
        gpu.status().map_err(|e| code(&e))?;
        if moment.event.query() {
            return Ok(Answer::Now(EventSynchronizeReply {}));
        }
        let waiter = gpu.stream();
        waiter.wait(&moment.event).map_err(|e| code(&e))?;
        let pending = cx.later();
        step(&waiter, &gpu, move |status| pending.answer(status.ok().map(|()| EventSynchronizeReply {})));
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
        let (Some(begun), Some(reached)) = (start.reached.clone(), end.reached.clone()) else {
            return Err(Status::INVALID_HANDLE);
        };
        // Right behind the event, so that an answer that was asked for ahead is there before that of whoever waits for the stream.
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
