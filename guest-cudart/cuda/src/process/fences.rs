//! Events of this library's own, and the fences that synchronous copies leave.
//!
//! Natively, `cudaMemcpy` from pageable memory returns when everything before it on its stream is done and its source has been read. Work that is put on any other stream afterwards finds the bytes in place (NVIDIA's "API synchronization
//! behavior"; measured for up to 128 KiB). Here such a copy is just a record in the ring, and the call returns without waiting. These rules keep the difference invisible:
//!
//! - A wait for a stream with nothing but such copies under way returns as they do ([`synchronize`]).
//! - If the host can observe the device (pinned or managed memory, host functions in streams, kernels that print; [`host_sees`]), the copy waits for the work before it.
//! - A query of an event or a stream that the promise covers waits ([`Stream::has_promised`]).
//! - Work on a stream that is not already ordered behind the copy's stream waits on the device: an event is recorded after the copy, and the other stream waits for it ([`respect`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::process::context::{self, Context};
use crate::process::ids;
use crate::process::stream::Stream;
use client::handle::EventId;
use client::ops::event::{EventCreate, EventDestroy, EventRecord};
use client::ops::stream::StreamWaitEvent;
use client::seq::{LastSeq, Seq};
use client::session::Session;
use client::{Status, lock};

/// An event of this library's own: no handle names it and no capture has a part in it. It belongs to one context.
pub(crate) struct OwnEvent {
    id: EventId,
    session: &'static Session,
    last: Mutex<Option<(Arc<Stream>, Seq)>>,
}

impl OwnEvent {
    /// Makes one in a context.
    pub fn new(context: &Context) -> Result<OwnEvent> {
        /// `CU_EVENT_DISABLE_TIMING`.
        const DISABLE_TIMING: u32 = 2;
        let event = EventId(ids::EVENTS.take().ok_or(Status::OUT_OF_MEMORY)?);
        let session = context.session();
        session.append(&EventCreate { context: context.id, event, flags: DISABLE_TIMING })?;
        Ok(OwnEvent { id: event, session, last: Mutex::new(None) })
    }

    /// Records it on a stream; the `seq` of the record.
    pub fn record(&self, stream: &Arc<Stream>) -> Result<Seq> {
        // The lock is kept meanwhile: what the event says last is what was recorded last.
        let mut last = lock(&self.last);
        let op = EventRecord { event: self.id, stream: stream.id, flags: 0 };
        let seq = stream.publishing_work(&op)?;
        *last = Some((stream.clone(), seq));
        Ok(seq)
    }

    /// Makes a stream wait for its last record, if there is one.
    pub fn hold(&self, stream: &Stream) -> Result {
        let Some((other, record)) = lock(&self.last).clone() else { return Ok(()) };
        let seq = stream.work(&StreamWaitEvent { stream: stream.id, event: self.id, flags: 0 })?;
        stream.waits_for(seq, &other, record);
        Ok(())
    }

    /// `seq` of its last record.
    fn last(&self) -> Option<Seq> {
        lock(&self.last).as_ref().map(|(_, seq)| *seq)
    }

    /// Its end. `with_server`: the server destroys it by itself.
    pub fn end(&self, with_server: bool) {
        // A lost session has no events.
        if with_server || self.session.append(&EventDestroy { event: self.id }).is_ok() {
            ids::EVENTS.give_back(self.id.0);
        }
    }
}

/// Makes a stream wait for all work so far on another.
pub(crate) fn join(from: &Arc<Stream>, to: &Stream) -> Result {
    let event = OwnEvent::new(from.context)?;
    let joined = event.record(from).and_then(|_| event.hold(to));
    event.end(false);
    joined
}

/// Whether the host may see what the device does before it has waited for it.
static HOST_SEES: AtomicBool = AtomicBool::new(false);

/// Notes that from now on the host may see what the device does before it has waited for it.
#[inline]
pub(crate) fn host_sees() {
    HOST_SEES.store(true, Ordering::Release);
}

/// The copies of a context that streams beside theirs have to come behind.
pub(crate) struct Fences {
    /// Whether the context ever had a stream that does not wait for its legacy default stream.
    any_beside: AtomicBool,
    /// `seq` of the latest fence.
    latest: LastSeq,
    /// The streams that have one that may not have been passed.
    open: Mutex<Vec<Arc<Stream>>>,
}

impl Fences {
    pub const fn new() -> Self {
        Fences { any_beside: AtomicBool::new(false), latest: LastSeq::new(), open: Mutex::new(Vec::new()) }
    }
}

/// A stream's part of it.
pub(crate) struct Promise {
    /// Everything on the stream up to this `seq` is promised to be done.
    upto: LastSeq,
    /// Recorded after the last copy that others have to come behind.
    fence: Mutex<Option<OwnEvent>>,
    /// The latest fence of the context that the stream's work comes behind.
    respected: LastSeq,
}

impl Promise {
    pub const fn new() -> Self {
        Promise { upto: LastSeq::new(), fence: Mutex::new(None), respected: LastSeq::new() }
    }

    /// Whether record `seq` of the stream is promised to be done.
    pub fn covers(&self, seq: Seq) -> bool {
        self.upto.has_reached(seq)
    }
}

/// After a synchronous copy to the device whose source has been read; `before` is the last record that its stream had to pass before it.
pub(crate) fn copied(stream: &Arc<Stream>, before: Option<Seq>) -> Result {
    let open = before.is_some_and(|before| !stream.promise.covers(before) && !stream.is_known_done(before));
    promise(stream, open)
}

/// Promises that all copies on a stream are done; `open`: other work may be under way before them.
fn promise(stream: &Arc<Stream>, open: bool) -> Result {
    // Another process that shares the memory is told by a way of its own.
    if shares() || open && HOST_SEES.load(Ordering::Acquire) {
        return stream.synchronize();
    }
    stream.session().show_output();
    // A thread's own stream has all others beside it.
    if open || !stream.is_legacy() || stream.context.fences.any_beside.load(Ordering::Acquire) {
        record(stream)?;
    }
    if let Some(due) = stream.due() {
        stream.promise.upto.raise(due);
    }
    Ok(())
}

/// `cuStreamSynchronize`. A stream that has nothing to do but copies whose sources have been read is not waited for: the program is told that they are done, and what a synchronous copy promises holds for
/// them, too. (A framework copies its model with an asynchronous copy and a wait for each tensor.)
pub(crate) fn synchronize(stream: &Arc<Stream>) -> Result {
    let due = stream.due();
    let is_done = due.is_none_or(|due| stream.is_known_done(due));
    // Other contexts' streams do not come behind a fence, and programs wait for just that before one device reads another's memory.
    if is_done || !stream.is_settled() || !context::is_only(stream.context) {
        return stream.synchronize();
    }
    stream.session().check()?;
    if due.is_none_or(|due| stream.promise.covers(due)) && !shares() {
        stream.session().show_output();
    } else {
        promise(stream, false)?;
    }
    stream.context.deferred()
}

/// Before the program has a stream beside the legacy default stream: that comes behind what the latter has just copied.
pub(crate) fn before_stream(context: &'static Context) -> Result {
    context.fences.any_beside.store(true, Ordering::Release);
    let legacy = context.legacy();
    let Some(due) = legacy.due() else { return Ok(()) };
    // What other work is behind already has a fence if it needs one.
    if legacy.promise.covers(due) && !legacy.is_known_done(due) { record(legacy) } else { Ok(()) }
}

/// Records the event that streams beside this one wait for.
fn record(stream: &Arc<Stream>) -> Result {
    let context = stream.context;
    let mut fence = lock(&stream.promise.fence);
    let event = match &mut *fence {
        Some(event) => event,
        none => none.insert(OwnEvent::new(context)?),
    };
    let seq = event.record(stream)?;
    drop(fence);
    let mut open = lock(&context.fences.open);
    open.retain(|other| !Arc::ptr_eq(other, stream) && !is_passed(other));
    open.push(stream.clone());
    context.fences.latest.raise(seq);
    Ok(())
}

/// Whether a stream has passed the last of its copies that others wait for.
fn is_passed(stream: &Stream) -> bool {
    let last = lock(&stream.promise.fence).as_ref().and_then(OwnEvent::last);
    last.is_none_or(|seq| stream.has_passed(seq))
}

/// Before work is put on a stream, which is not being captured: it comes behind the copies that the program was told are done.
#[inline]
pub(crate) fn respect(stream: &Stream) -> Result {
    match stream.context.fences.latest.get() {
        Some(latest) if !stream.promise.respected.has_reached(latest) => wait_for_fences(stream, latest),
        _ => Ok(()),
    }
}

#[cold]
fn wait_for_fences(stream: &Stream, latest: Seq) -> Result {
    let mut open = lock(&stream.context.fences.open);
    open.retain(|other| !is_passed(other));
    for other in
        open.iter().filter(|other| !std::ptr::eq(&***other, stream) && !stream.waits_by_itself(other))
    {
        let fence = lock(&other.promise.fence);
        let Some(event) = &*fence else { continue };
        if event.last().is_some_and(|seq| !stream.promise.respected.has_reached(seq)) {
            event.hold(stream)?;
        }
    }
    stream.promise.respected.raise(latest);
    Ok(())
}

/// A stream is gone, or its context. `with_server`: the server destroys its event by itself.
pub(crate) fn forget(stream: &Stream, with_server: bool) {
    lock(&stream.context.fences.open).retain(|other| !std::ptr::eq(&**other, stream));
    if let Some(event) = lock(&stream.promise.fence).take() {
        event.end(with_server);
    }
}

/// Whether this process shares memory with another.
pub(crate) static SHARES: AtomicBool = AtomicBool::new(false);

/// Whether this process shares memory with another, whose commands reach the server by another way: a copy that CUDA calls synchronous must then have reached the device when it returns.
#[inline]
pub(crate) fn shares() -> bool {
    SHARES.load(Ordering::Relaxed)
}
