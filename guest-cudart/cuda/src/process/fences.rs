//! This library's own events, and the fences that synchronous copies leave.
//!
//! Natively, `cudaMemcpy` from pageable memory returns when everything before it on its stream is done and
//! its source has been read. Work put on any other stream afterwards sees the copied bytes (NVIDIA's "API
//! synchronization behavior"; measured for up to 128 KiB). Here such a copy is just a record in the ring, and
//! the call returns without waiting. These rules hide the difference:
//!
//! - A wait for a stream with only such copies pending returns immediately, as the copies do
//!   ([`synchronize`]).
//! - If the host can observe the device (pinned or managed memory, host functions in streams, kernels that
//!   print; [`host_sees`]), the copy waits for the work before it. It does so, too, if the server has several
//!   contexts: otherwise their devices would wait for each other's kernels.
//! - If the host can observe the device, and a kernel may be running on another stream, the copy and the wait
//!   really wait: the kernel may poll a word that the program writes next, and no fence orders it. Callers
//!   tell whether there may be one (`is_watched`), and whether the streams that the copy's one has to pass
//!   may have work that the program has not waited for (`is_settled`), because this module doesn't know the
//!   other streams.
//! - A query of an event or stream that such a copy has promised to be done waits ([`Stream::has_promised`]).
//!   The promise covers what is in the ring up to the copy, not what another thread has put behind it.
//! - Work on a stream that isn't already ordered behind the copy's stream, in any context of the server,
//!   waits on the device: an event is recorded after the copy, and the other stream waits for it
//!   ([`respect`]). A stream of another server that gets work on the copied memory waits by way of this
//!   process ([`before_others`]).
//! - As long as there is no such stream, a copy in the legacy default stream gets its event only when other
//!   work is put behind it ([`leave`]), because a stream that is made later must wait for the copy, and not
//!   for that work.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::process::context::{self, Context};
use crate::process::driver::Server;
use crate::process::ids::{self, WithContext};
use crate::process::stream::Stream;
use client::handle::EventId;
use client::ops::event::{EventCreate, EventDestroy, EventRecord};
use client::ops::stream::StreamWaitEvent;
use client::seq::{LastSeq, Seq};
use client::session::Session;
use client::{Status, lock};

/// An event for this library's own use: it has no handle and takes no part in captures. It belongs to one
/// context.
pub(crate) struct OwnEvent {
    id: EventId,
    session: &'static Session,
    last: Mutex<Option<(Arc<Stream>, Seq)>>,
}

impl OwnEvent {
    /// Creates an event in a context.
    pub fn new(context: &Context) -> Result<OwnEvent> {
        /// `CU_EVENT_DISABLE_TIMING`.
        const DISABLE_TIMING: u32 = 2;
        let event = EventId(ids::EVENTS.take().ok_or(Status::OUT_OF_MEMORY)?);
        let session = context.session();
        session.append(&EventCreate { context: context.id, event, flags: DISABLE_TIMING })?;
        Ok(OwnEvent { id: event, session, last: Mutex::new(None) })
    }

    /// Records it on a stream. Returns the record's `seq`.
    pub fn record(&self, stream: &Arc<Stream>) -> Result<Seq> {
        // The lock stays held so that `last` matches the last record appended.
        let mut last = lock(&self.last);
        let op = EventRecord { event: self.id, stream: stream.id, flags: 0 };
        let seq = stream.publish(&op)?;
        *last = Some((stream.clone(), seq));
        Ok(seq)
    }

    /// Makes a stream wait for its last record, if any.
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

    /// Destroys it. `with_context`: the server destroys it with its context.
    pub fn end(&self, with_context: Option<&mut WithContext>) {
        if let Some(ended) = with_context {
            ended.events.push(self.id.0);
        } else if self.session.append(&EventDestroy { event: self.id }).is_ok() {
            // A lost session has no events.
            ids::EVENTS.give_back(self.id.0);
        }
    }
}

/// Makes a stream wait for all work so far on another stream.
pub(crate) fn join(from: &Arc<Stream>, to: &Stream) -> Result {
    let event = OwnEvent::new(from.context)?;
    let joined = event.record(from).and_then(|_| event.hold(to));
    event.end(None);
    joined
}

/// Whether the host may observe the device's effects before waiting for it.
static HOST_SEES: AtomicBool = AtomicBool::new(false);

/// Notes that from now on the host may observe the device's effects before waiting for it.
#[inline]
pub(crate) fn host_sees() {
    HOST_SEES.store(true, Ordering::Release);
}

/// A server's copies that work on other, unordered streams has to wait for.
pub(crate) struct Fences {
    /// Whether there ever was a stream that doesn't wait for its context's legacy default stream, or a second
    /// context.
    any_beside: AtomicBool,
    /// Whether there ever was a second context.
    several_contexts: AtomicBool,
    /// `seq` of the latest fence.
    latest: LastSeq,
    /// Streams whose latest fence may not have been passed yet.
    open: Mutex<Vec<Arc<Stream>>>,
    /// What was unfinished when the program first used another server: streams, and marks behind their work.
    unfinished: Mutex<Vec<(Arc<Stream>, Seq)>>,
}

impl Fences {
    pub const fn new() -> Self {
        Fences {
            any_beside: AtomicBool::new(false),
            several_contexts: AtomicBool::new(false),
            latest: LastSeq::new(),
            open: Mutex::new(Vec::new()),
            unfinished: Mutex::new(Vec::new()),
        }
    }

    /// Called when the program first uses another server, with the marks behind the work of a context of this
    /// one. Work on this server's memory that is put on another server's stream comes behind them: natively,
    /// a fill that the program has not waited for is over before the first context on another device is made.
    pub fn come_behind(&self, marks: Vec<(Arc<Stream>, Seq)>) {
        lock(&self.unfinished).extend(marks);
    }
}

/// A stream's share of this.
pub(crate) struct Promise {
    /// The program was told that everything on the stream up to this `seq` is done.
    upto: LastSeq,
    /// Recorded after the last copy that other streams must wait for.
    fence: Mutex<Option<OwnEvent>>,
    /// Up to this `seq`, others can wait for the stream's copies: the event was recorded behind them, or they
    /// were done. Of a legacy default stream.
    fenced: LastSeq,
    /// Of the threads that find that the event has to be recorded.
    leaving: Mutex<()>,
    /// The server's latest fence that the stream's work is already ordered behind.
    respected: LastSeq,
}

impl Promise {
    pub const fn new() -> Self {
        Promise {
            upto: LastSeq::new(),
            fence: Mutex::new(None),
            fenced: LastSeq::new(),
            leaving: Mutex::new(()),
            respected: LastSeq::new(),
        }
    }

    /// Whether the event does not have to be recorded before other work follows the last copy, or another
    /// stream is made.
    fn is_fenced(&self) -> bool {
        self.fenced.has_reached_all_of(&self.upto)
    }

    /// Whether the program was told that record `seq` of the stream is done.
    pub fn covers(&self, seq: Seq) -> bool {
        self.upto.has_reached(seq)
    }
}

/// Called after a synchronous copy to the device whose source has been read. `before` is the last record that
/// its stream had to pass before the copy, and `last` the copy's own last one.
pub(crate) fn copied(
    stream: &Arc<Stream>,
    before: Option<Seq>,
    last: Option<Seq>,
    is_settled: impl FnOnce() -> bool,
    is_watched: impl FnOnce() -> bool,
) -> Result {
    let is_done = |before| stream.promise.covers(before) || stream.is_known_done(before);
    let open = before.is_some_and(|before| !is_done(before)) && !is_settled();
    promise(stream, open, last, is_watched)
}

/// Records that the program was told all copies on a stream up to record `upto` are done. `open`: other work
/// before them may still be pending.
fn promise(stream: &Arc<Stream>, open: bool, upto: Option<Seq>, is_watched: impl FnOnce() -> bool) -> Result {
    // A process that shares the memory sends its commands on another connection, so the fence wouldn't order
    // them.
    let Fences { any_beside, several_contexts, .. } = &stream.context.server.fences;
    let sees = HOST_SEES.load(Ordering::Acquire);
    if shares() || open && (sees || several_contexts.load(Ordering::Acquire)) || sees && is_watched() {
        return stream.synchronize();
    }
    stream.session().show_output();
    // A per-thread stream has all other streams beside it.
    let fenced = open || !stream.is_legacy() || any_beside.load(Ordering::Acquire);
    let mut passed = None;
    if let Some(upto) = upto {
        stream.promise.upto.raise(upto);
        // The program knows that what the stream has passed is done, too: the legacy default stream's work,
        // and what other streams had before that.
        let legacy = stream.context.legacy();
        if !stream.is_legacy()
            && stream.waits_by_itself(legacy)
            && let Some(last) = legacy.last_work.get().filter(|last| !last.may_be_after(upto))
        {
            legacy.promise.upto.raise(last);
            passed = Some((legacy, last));
        }
    }
    if fenced {
        record(stream)?;
        // Who waits for the stream's event waits for those copies.
        if let Some((legacy, last)) = passed {
            legacy.promise.fenced.raise(last);
        }
        return Ok(());
    }
    // Whoever is just making the first stream beside it may not have seen this copy.
    fence(Ordering::SeqCst);
    if any_beside.load(Ordering::Relaxed) { leave_of(stream) } else { Ok(()) }
}

/// Called before work other than a synchronous copy is put on a stream that is not being captured: what will
/// wait for copies that the program was told are done must not wait for this work.
#[inline]
pub(crate) fn leave(stream: &Stream) -> Result {
    let legacy = stream.context.legacy();
    if stream.is_free() || legacy.promise.is_fenced() { Ok(()) } else { leave_of(legacy) }
}

/// Records the event behind the last copy of a legacy default stream, if that is still to be done. When this
/// returns, other streams wait for it, whichever thread has recorded it.
#[cold]
fn leave_of(legacy: &Arc<Stream>) -> Result {
    let promise = &legacy.promise;
    let _alone = lock(&promise.leaving);
    match promise.upto.get() {
        Some(_) if promise.is_fenced() => Ok(()),
        Some(upto) if legacy.is_known_done(upto) => {
            promise.fenced.raise(upto);
            Ok(())
        }
        Some(_) => record(legacy),
        None => Ok(()),
    }
}

/// `cuStreamSynchronize`. If a stream has only copies pending whose sources have been read, this returns
/// without waiting: the copies count as promised, with the guarantees of synchronous copies. (Frameworks copy
/// a model with one asynchronous copy and one wait per tensor.)
pub(crate) fn synchronize(
    stream: &Arc<Stream>,
    is_settled: impl FnOnce() -> bool,
    is_watched: impl FnOnce() -> bool,
) -> Result {
    let due = stream.due();
    let is_done = due.is_none_or(|due| stream.is_known_done(due));
    // Fences don't order other servers' streams, and programs rely on this wait before one device reads
    // another's memory.
    if is_done || !is_settled() || !context::is_only(stream.context) {
        return stream.synchronize();
    }
    stream.session().check()?;
    if due.is_none_or(|due| stream.promise.covers(due)) && !shares() {
        stream.session().show_output();
    } else {
        promise(stream, false, due, is_watched)?;
    }
    stream.context.deferred()
}

/// Called before a stream beside the legacy default stream is created, whose work must come behind what the
/// legacy streams of its server have just copied. From now on copies leave fences.
pub(crate) fn before_stream(server: &'static Server) -> Result {
    beside(server);
    // A copy that other work has followed already has its fence.
    context::alive_of(server).try_for_each(|context| leave_of(context.legacy()))
}

/// Called when a server has a second context.
pub(crate) fn second_context(server: &Server) {
    server.fences.several_contexts.store(true, Ordering::Release);
    beside(server);
}

/// From now on copies leave fences.
fn beside(server: &Server) {
    server.fences.any_beside.store(true, Ordering::Release);
    fence(Ordering::SeqCst);
}

/// Records the event that other streams wait for.
fn record(stream: &Arc<Stream>) -> Result {
    let context = stream.context;
    let fences = &context.server.fences;
    // The lock is held from before the record until it is noted: who respects a later fence must find this
    // one, because an earlier fence than that is never looked for again.
    let mut open = lock(&fences.open);
    let mut fence = lock(&stream.promise.fence);
    let event = match &mut *fence {
        Some(event) => event,
        none => none.insert(OwnEvent::new(context)?),
    };
    let seq = event.record(stream)?;
    drop(fence);
    open.retain(|other| !Arc::ptr_eq(other, stream) && !is_passed(other));
    open.push(stream.clone());
    fences.latest.raise(seq);
    // Last: who finds this does not record the event, and puts work on a stream that must wait for it.
    stream.promise.fenced.raise(seq);
    Ok(())
}

/// Whether a stream has passed its last copy that others wait for.
fn is_passed(stream: &Stream) -> bool {
    let last = lock(&stream.promise.fence).as_ref().and_then(OwnEvent::last);
    last.is_none_or(|seq| stream.has_passed(seq))
}

/// Called before work is put on a stream that is not being captured: orders it behind the copies that the
/// program was told are done.
#[inline]
pub(crate) fn respect(stream: &Stream) -> Result {
    match stream.context.server.fences.latest.get() {
        Some(latest) if !stream.promise.respected.has_reached(latest) => wait_for_fences(stream, latest),
        _ => Ok(()),
    }
}

#[cold]
fn wait_for_fences(stream: &Stream, latest: Seq) -> Result {
    let mut open = lock(&stream.context.server.fences.open);
    open.retain(|other| !is_passed(other));
    let ordered = |other: &Stream| {
        std::ptr::eq(other, stream)
            || std::ptr::eq(other.context, stream.context) && stream.waits_by_itself(other)
    };
    for other in open.iter().filter(|other| !ordered(other)) {
        let fence = lock(&other.promise.fence);
        let Some(event) = &*fence else { continue };
        if event.last().is_some_and(|seq| !stream.promise.respected.has_reached(seq)) {
            event.hold(stream)?;
        }
    }
    stream.promise.respected.raise(latest);
    Ok(())
}

/// The streams that have not passed their latest fence, and its record.
pub(crate) fn open(server: &Server) -> Vec<(Arc<Stream>, Seq)> {
    let mut open = lock(&server.fences.open);
    open.retain(|stream| !is_passed(stream));
    let last = |stream: &Arc<Stream>| {
        let record = lock(&stream.promise.fence).as_ref().and_then(OwnEvent::last)?;
        Some((stream.clone(), record))
    };
    open.iter().filter_map(last).collect()
}

/// What work on the server's memory has to come behind that is put on another server's stream: records and
/// marks of streams that have not passed them.
pub(crate) fn before_others(server: &Server) -> Vec<(Arc<Stream>, Seq)> {
    let mut unfinished = lock(&server.fences.unfinished);
    unfinished.retain(|(stream, mark)| !stream.has_passed(*mark));
    unfinished.iter().cloned().chain(open(server)).collect()
}

/// Called when a stream or its context is destroyed. `with_context`: the server destroys the event with the
/// context.
pub(crate) fn forget(stream: &Stream, with_context: Option<&mut WithContext>) {
    lock(&stream.context.server.fences.open).retain(|other| !std::ptr::eq(&**other, stream));
    if let Some(event) = lock(&stream.promise.fence).take() {
        event.end(with_context);
    }
}

/// Whether this process shares memory with another process.
pub(crate) static SHARES: AtomicBool = AtomicBool::new(false);

/// Whether this process shares memory with another. The other's commands reach the server on a connection of
/// their own, so a synchronous copy must have reached the device when it returns.
#[inline]
pub(crate) fn shares() -> bool {
    SHARES.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use client::channel::MAX_CONTEXTS;
    use client::data::HostIn;
    use client::handle::{ContextId, StreamId};
    use client::ops::copy::MemcpyHtoD;
    use client::ops::stream::StreamMark;

    use super::*;

    fn context() -> &'static Context {
        Context::new(ContextId(0), Server::unused(), 0, 0, false)
    }

    /// A synchronous copy up to the moment in which it is recorded.
    fn copy(stream: &Arc<Stream>) -> (Option<Seq>, Option<Seq>) {
        let before = stream.due();
        let op = MemcpyHtoD { stream: stream.id, dst: 1 << 40, src: HostIn::Inline(&[1]) };
        (before, Some(stream.settled_work(&op).unwrap()))
    }

    fn fence_of(stream: &Arc<Stream>) -> Option<Seq> {
        lock(&stream.promise.fence).as_ref().and_then(OwnEvent::last)
    }

    #[test]
    fn a_promise_does_not_cover_what_another_thread_has_put_behind_the_copy() {
        let context = context();
        let legacy = context.legacy();
        for beside in [false, true] {
            let (before, last) = copy(legacy);
            let other = legacy.work(&StreamMark { stream: legacy.id }).unwrap();
            copied(legacy, before, last, || false, || false).unwrap();
            assert!(legacy.promise.covers(last.unwrap()) && !legacy.promise.covers(other), "{beside}");
            before_stream(context.server).unwrap();
        }
    }

    #[test]
    fn nobody_respects_a_later_fence_between_the_record_of_one_and_its_entry() {
        let server = Server::unused();
        let context = Context::new(ContextId(0), server, 0, 0, false);
        // The record stops where it is appended: there is no room.
        let fills = server.fill();
        let records = std::thread::spawn(|| record(context.legacy()));
        let deadline = Instant::now() + Duration::from_secs(60);
        while server.fences.open.try_lock().is_ok() {
            assert!(Instant::now() < deadline, "who respects a later fence does not wait for the entry");
            std::thread::yield_now();
        }
        server.lose();
        assert!(records.join().unwrap().is_err());
        fills.join().unwrap();
    }

    #[test]
    fn only_other_work_makes_a_copy_leave_its_event() {
        let context = context();
        let legacy = context.legacy();
        let copy = || {
            let (before, last) = copy(legacy);
            copied(legacy, before, last, || false, || false).unwrap();
            last.unwrap()
        };
        let [_, second] = [copy(), copy()];
        assert_eq!(fence_of(legacy), None);
        leave(legacy).unwrap();
        let fence = fence_of(legacy).unwrap();
        assert!(fence.may_be_after(second));
        let kernel = legacy.work(&StreamMark { stream: legacy.id }).unwrap();
        assert!(kernel.may_be_after(fence));
        // It is behind the copy, and not behind other work.
        leave(legacy).unwrap();
        before_stream(context.server).unwrap();
        assert_eq!(fence_of(legacy), Some(fence));
        // Now that there may be another stream, each copy leaves one.
        let third = copy();
        assert!(fence_of(legacy).unwrap().may_be_after(third));
    }

    #[test]
    fn a_promise_covers_what_its_stream_has_passed_on_others() {
        let context = context();
        let legacy = context.legacy();
        let [passing, other] =
            [4, 5].map(|id| Arc::new(Stream::new(StreamId(MAX_CONTEXTS + id), context, 0, 0, false)));
        let kernel = other.work(&StreamMark { stream: other.id }).unwrap();
        let [_, passed] = [copy(legacy), copy(&passing)].map(|(_, last)| last.unwrap());
        let later = other.work(&StreamMark { stream: other.id }).unwrap();
        // Without the condition that no other context is alive, for which the tests' contexts count.
        promise(&passing, false, passing.due(), || false).unwrap();
        assert!(passing.has_promised(passed) && other.has_promised(kernel) && !other.has_promised(later));
        assert!(legacy.promise.is_fenced(), "others wait for the passing stream's event");
        assert!(fence_of(&passing).unwrap().may_be_after(passed) && fence_of(legacy).is_none());
    }

    #[test]
    fn a_copy_that_nothing_follows_leaves_its_event_when_a_stream_is_made() {
        let context = context();
        let legacy = context.legacy();
        let (before, last) = copy(legacy);
        copied(legacy, before, last, || false, || false).unwrap();
        assert_eq!(fence_of(legacy), None);
        before_stream(context.server).unwrap();
        assert!(fence_of(legacy).unwrap().may_be_after(last.unwrap()));
    }
}
