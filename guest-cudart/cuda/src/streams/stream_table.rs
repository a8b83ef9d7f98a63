//! The streams behind a program's handles: creating, finding and destroying them.
//!
//! The work of a destroyed stream still completes, and events recorded on it can still be queried. So the
//! server learns of the destruction, and the stream's ID is reused, only when the stream's last mark has been
//! reached. Until then the stream is kept in [`ENDING`].

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::driver::{Driver, Server, driver};
use crate::process::green::Green;
use crate::process::ids::{self, WithContext};
use crate::process::stream::{LEGACY, NON_BLOCKING, PER_THREAD, Stream};
use crate::process::{context, driver, fences, green, holds, host_calls, room, stream};
use crate::streams::{capture_rules, green_gates};
use client::handle::StreamId;
use client::handles::Slab;
use client::ops::green::GreenStream;
use client::ops::stream::{StreamCreate, StreamDestroy};
use client::seq::Seq;
use client::thread::Lasting;
use client::{Status, lock};

/// Whether all work of all contexts is known to be done, except work behind a running host function.
pub(crate) fn all_stopped() -> bool {
    context::busy().all(is_stopped)
}

/// As [`context::ready`], for a call that names a stream. In a thread without a current context, the stream's
/// context is current until the guard is dropped. NVIDIA's driver accepts launches, copies and fills in such
/// threads, except on a default stream.
#[inline]
pub(crate) fn ready_on(stream: usize) -> Result<(&'static Driver, &'static Context, Option<Lent>)> {
    match context::ready() {
        Ok((driver, context)) => Ok((driver, context, None)),
        Err(Status::INVALID_CONTEXT) => lent_by(stream),
        Err(status) => Err(status),
    }
}

/// The same for a call that frees something: as [`context::ready_to_end`].
pub(crate) fn ready_to_end_on(
    stream: usize,
) -> Result<(&'static Driver, &'static Context, Result, Option<Lent>)> {
    match context::ready_to_end() {
        Err(Status::INVALID_CONTEXT) => lend_to_end(lender(stream)?),
        other => other.map(|(driver, context, deferred)| (driver, context, deferred, None)),
    }
}

/// Makes a context current in a thread without one, until this is dropped.
pub(crate) struct Lent(());

impl Drop for Lent {
    fn drop(&mut self) {
        context::pop();
    }
}

#[cold]
pub(crate) fn lent_by(stream: usize) -> Result<(&'static Driver, &'static Context, Option<Lent>)> {
    context::push(lender(stream)?)?;
    let lent = Lent(());
    let (driver, context) = context::ready()?;
    Ok((driver, context, Some(lent)))
}

/// The context of a stream that a thread without a current context names.
fn lender(stream: usize) -> Result<&'static Context> {
    if context::current_handle() != 0 || stream <= stream::PER_THREAD {
        return Err(Status::INVALID_CONTEXT);
    }
    ask(stream, false).map(|(_, stream)| stream.context)
}

/// Makes a context current until the guard is dropped, for a call that frees something: as
/// [`context::ready_to_end`].
pub(crate) fn lend_to_end(
    context: &'static Context,
) -> Result<(&'static Driver, &'static Context, Result, Option<Lent>)> {
    context::push(context)?;
    let lent = Lent(());
    let (driver, context, deferred) = context::ready_to_end()?;
    Ok((driver, context, deferred, Some(lent)))
}

pub(crate) static STREAMS: Slab<Stream> = Slab::new(2);

/// Nothing is waited for while this is locked: threads that use other servers need it.
static ENDING: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

/// Streams on their way from [`STREAMS`] to [`ENDING`]. Each is here before it leaves the first, and until it
/// is in the second. So whoever looks through all three in this order finds every stream.
static LEAVING: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

/// For whoever takes a stream out of [`STREAMS`], until it has [ended](end).
pub(crate) struct Leaving(Arc<Stream>);

impl Leaving {
    /// Invalidates the handle of a stream.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is no such stream.
    pub fn begin(handle: usize) -> Result<(Arc<Stream>, Leaving)> {
        let stream = STREAMS.get(handle).ok_or(Status::INVALID_HANDLE)?;
        lock(&LEAVING).push(stream.clone());
        let leaving = Leaving(stream);
        // If two threads destroy it, only one finds it.
        let stream = STREAMS.remove(handle).ok_or(Status::INVALID_HANDLE)?;
        Ok((stream, leaving))
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut leaving = lock(&LEAVING);
        if let Some(at) = leaving.iter().position(|stream| Arc::ptr_eq(stream, &self.0)) {
            leaving.swap_remove(at);
        }
    }
}

/// The per-thread default streams of one thread, one for each context that it has used.
pub(crate) struct Own(Vec<Arc<Stream>>);

impl Drop for Own {
    fn drop(&mut self) {
        if driver().is_ok() {
            for stream in self.0.drain(..) {
                end(stream);
            }
        }
    }
}

thread_local! {
    static OWN: Lasting<RefCell<Own>> = const { Lasting::new(RefCell::new(Own(Vec::new()))) };
}

/// As [`plain`], for a stream that gets work, which comes behind the copies that the program was told are
/// done. Waits if too much is queued already. Fails for the legacy default stream if a stream that would wait
/// for it is being captured.
#[inline]
pub(crate) fn any(context: &'static Context, handle: usize, per_thread: bool) -> Result<Arc<Stream>> {
    let stream = for_copy(context, handle, per_thread)?;
    if stream.capture().is_none() {
        fences::leave(&stream)?;
    }
    Ok(stream)
}

/// Like [`any`], for a synchronous copy.
#[inline]
pub(crate) fn for_copy(context: &'static Context, handle: usize, per_thread: bool) -> Result<Arc<Stream>> {
    let stream = plain(context, handle, per_thread)?;
    capture_rules::implicit(&stream)?;
    if stream.capture().is_none() {
        before_work(&stream)?;
        fences::respect(&stream)?;
        room::wait(&stream)?;
    }
    Ok(stream)
}

/// The stream that a handle means in the current context.
///
/// # Errors
/// `INVALID_HANDLE` if there is no such stream, `CONTEXT_IS_DESTROYED` if its context was destroyed.
#[inline]
pub(crate) fn plain(context: &'static Context, handle: usize, per_thread: bool) -> Result<Arc<Stream>> {
    match handle {
        0..=PER_THREAD if green::any() && context::current_green().is_some() => {
            green_default(context, handle == PER_THREAD || handle == 0 && per_thread)
        }
        0 if !per_thread => Ok(context.legacy().clone()),
        LEGACY => Ok(context.legacy().clone()),
        0 | PER_THREAD => own(context),
        _ => named(handle),
    }
}

/// The stream of a handle.
pub(crate) fn named(handle: usize) -> Result<Arc<Stream>> {
    let stream = STREAMS.get(handle).ok_or(Status::INVALID_HANDLE)?;
    match stream.green() {
        Some(green) if !green.is_alive() => Err(Status::CONTEXT_IS_DESTROYED),
        _ => Ok(stream),
    }
}

/// The default stream of the green context that is current, if it is in this context.
#[cold]
pub(crate) fn green_default(context: &'static Context, per_thread: bool) -> Result<Arc<Stream>> {
    let green = context::current_green().ok_or(Status::INVALID_CONTEXT)?;
    if !std::ptr::eq(green.context, context) {
        return Ok(context.legacy().clone());
    }
    if per_thread {
        // The green context has no default stream.
        return Err(Status::INVALID_HANDLE);
    }
    green.default_stream()
}

/// The calling thread's per-thread default stream in a context.
pub(crate) fn own(context: &'static Context) -> Result<Arc<Stream>> {
    let found = Lasting::with(&OWN, |own| {
        let mut own = own.borrow_mut();
        own.0.retain(|stream| !stream.finished.load(Ordering::Relaxed));
        own.0.iter().find(|stream| std::ptr::eq(stream.context, context)).cloned()
    });
    match found {
        Some(Some(stream)) => Ok(stream),
        Some(None) => {
            let stream = Arc::new(make(context, 0, 0)?);
            green_gates::inherit(&stream)?;
            let _ = Lasting::with(&OWN, |own| own.borrow_mut().0.push(stream.clone()));
            keep(&stream);
            Ok(stream)
        }
        // The thread is ending. Its remaining work goes to the context's stream.
        None => Ok(context.legacy().clone()),
    }
}

/// Makes a non-blocking stream for this library's own use. It is destroyed with the context.
pub(crate) fn unnamed(context: &'static Context) -> Result<Arc<Stream>> {
    let stream = Arc::new(unnamed_once(context)?);
    keep(&stream);
    Ok(stream)
}

/// The same for one use. The caller destroys it.
pub(crate) fn unnamed_once(context: &'static Context) -> Result<Stream> {
    Ok(Stream { own: true, ..make(context, NON_BLOCKING, 0)? })
}

/// A stream of a green context.
pub(crate) fn in_green(green: &Arc<Green>, priority: i32) -> Result<Stream> {
    let id = fresh(green.context)?;
    green.context.session().append(&GreenStream { green: green.id, stream: id, priority })?;
    Ok(Stream { green: Some(green.clone()), ..Stream::new(id, green.context, NON_BLOCKING, priority, false) })
}

/// Registers a stream without a handle, so that it is destroyed with its context.
pub(crate) fn keep(stream: &Arc<Stream>) {
    let mut owned = lock(&OWNED);
    // Streams of threads that have ended leave their entries: these go whenever the list would double.
    if owned.len() >= 64 && owned.len().is_power_of_two() {
        owned.retain(|stream| stream.strong_count() > 0);
    }
    owned.push(Arc::downgrade(stream));
}

/// Streams of a context, or of a green context, that may have work.
pub(crate) fn of_context(context: &'static Context, green: Option<&Arc<Green>>) -> Vec<Arc<Stream>> {
    let mut all = STREAMS.all();
    all.extend(lock(&OWNED).iter().filter_map(std::sync::Weak::upgrade));
    all.push(context.legacy().clone());
    all.retain(|stream| {
        let is_of = green.is_none_or(|green| stream.green().is_some_and(|other| Arc::ptr_eq(green, other)));
        std::ptr::eq(stream.context, context) && is_of && !stream.is_finished()
    });
    all
}

/// The same, and those that were destroyed and still have work.
fn all_of(context: &'static Context) -> Vec<Arc<Stream>> {
    let mut all = of_context(context, None);
    for destroyed in [&LEAVING, &ENDING] {
        let of_context = |stream: &&Arc<Stream>| std::ptr::eq(stream.context, context);
        all.extend(lock(destroyed).iter().filter(of_context).cloned());
    }
    all
}

/// As [`Stream::is_settled`], and for the legacy default stream also if the program has waited for each of
/// the streams that it waits for. Does not wait.
pub(crate) fn is_settled(stream: &Stream) -> bool {
    stream.is_settled()
        || stream.is_legacy()
            && all_of(stream.context).iter().all(|other| other.is_free() || other.own_is_settled())
}

/// Whether all work of a context is known to be done, except work behind a running host function. Does not
/// wait.
pub(crate) fn is_stopped(context: &'static Context) -> bool {
    let stopped = host_calls::stopped();
    all_of(context).iter().all(|stream| stopped.contains(&stream.unique) || stream.is_idle())
}

/// Marks behind all work so far of a context that isn't known to be done: when the streams have passed them,
/// it is done. No stream waits for another because of them.
pub(crate) fn marks(context: &'static Context) -> Result<Vec<(Arc<Stream>, Seq)>> {
    let mut streams = all_of(context);
    streams.retain(|stream| !stream.is_legacy());
    let mut marks = Vec::new();
    marks.extend(mark_of_legacy(context, &streams)?);
    for stream in streams.into_iter().filter(|stream| !stream.own_is_known_done()) {
        let mark = stream.mark()?;
        marks.push((stream, mark));
    }
    Ok(marks)
}

/// A mark behind the own work of a legacy default stream, and the mark's stream. `None` if that work is known
/// to be done, maybe because another stream of the context (`others`) has passed an operation that waits for
/// it.
///
/// A mark is work of its stream, so this one waits for the blocking streams, and they for it. It comes right
/// after the legacy default stream's own work, which does the same. Behind work of a blocking stream it would
/// make the other streams wait for that work, so then that stream is marked.
fn mark_of_legacy(context: &'static Context, others: &[Arc<Stream>]) -> Result<Option<(Arc<Stream>, Seq)>> {
    let legacy = context.legacy();
    let Some(own) = legacy.last_work.get().filter(|own| !legacy.is_known_done(*own)) else { return Ok(None) };
    let is_later = |last: &Seq| last.may_be_after(own);
    let mut behind = None;
    for stream in others.iter().filter(|stream| !stream.is_free()) {
        let operation = stream.last_operation().filter(is_later);
        if operation.is_some_and(|last| stream.is_known_done(last)) {
            legacy.is_synced(own);
            return Ok(None);
        }
        // A wait for a ticket is no operation: only what follows it comes behind the legacy stream's work.
        let is_held = || stream.last_work.get().filter(is_later).is_some() && !stream.own_is_known_done();
        if operation.is_some() || is_held() {
            behind = Some(stream);
        }
    }
    let (stream, mark) = match behind {
        Some(other) => (other, other.mark()?),
        None => (legacy, legacy.last_mark.if_reached(own).map_or_else(|| legacy.mark(), Ok)?),
    };
    Ok(Some((stream.clone(), mark)))
}

/// Whether everything on a stream is done, as [`Stream::is_done`]. No stream waits for another because the
/// legacy default stream is asked (an event's record in it has that effect, a query natively has not).
pub(crate) fn is_done(stream: &Stream) -> Result<bool> {
    if !stream.is_legacy() || stream.is_known_idle() {
        return stream.is_done();
    }
    let own = stream.last_work.get();
    let mut others = all_of(stream.context);
    others.retain(|other| !other.is_legacy() && !other.is_free());
    let mark = mark_of_legacy(stream.context, &others)?;
    for other in others.iter().filter(|other| !other.own_is_known_done()) {
        if !other.is_done()? {
            return Ok(false);
        }
    }
    if let Some((marked, mark)) = &mark
        && !marked.has_passed(*mark)
    {
        if !own.is_some_and(|own| stream.has_promised(own)) {
            return Ok(false);
        }
        stream.synchronize()?;
    }
    let own_mark = mark.filter(|(marked, _)| marked.is_legacy()).map(|(_, mark)| mark);
    if let Some(done) = own_mark.or(own) {
        stream.is_synced(done);
    }
    Ok(true)
}

/// Called before work is put on a stream that is not being captured, which the program may be holding up: as
/// [`before_program`].
#[inline]
pub(crate) fn before_work(stream: &Stream) -> Result {
    if stream.is_legacy() && holds::any() { before_held_work(stream) } else { Ok(()) }
}

#[cold]
fn before_held_work(legacy: &Stream) -> Result {
    before_program(legacy)?;
    // Only now: one of these streams may be the legacy default stream, whose mark is held, too.
    holds::mark_waits(legacy.session());
    Ok(())
}

/// Called before the program is to let the legacy default stream go on. Until it does, it may ask blocking
/// streams about their work so far. That work is marked here: a later mark would wait for the program.
pub(crate) fn before_program(stream: &Stream) -> Result {
    if !stream.is_legacy() {
        return Ok(());
    }
    let mut others = all_of(stream.context);
    others.retain(|other| !other.is_legacy() && !other.is_free() && !other.own_is_known_done());
    others.iter().try_for_each(|other| other.mark().map(drop))
}

/// Whether all work of all contexts is known to be done, without asking: the program has waited for the
/// contexts, or for each of their streams that has had work. No work may come meanwhile.
pub(crate) fn all_are_known_done() -> bool {
    context::busy().all(|context| all_of(context).iter().all(|stream| stream.own_is_known_done()))
}

/// Whether other streams of a stream's server may have work under way, not counting copies whose source has
/// been read. It may read what this stream copies as soon as the program tells it that the copy is done, by
/// memory that both see. Does not wait.
pub(crate) fn is_watched(stream: &Stream) -> bool {
    let rests = |other: &Arc<Stream>| {
        other.own || std::ptr::eq(&**other, stream) || other.own_is_settled() || other.is_idle()
    };
    !context::alive_of(stream.context.server).all(|context| all_of(context).iter().all(rests))
}

/// Destroys the streams of a green context that is being destroyed.
pub(crate) fn end_all_of(green: &Arc<Green>) {
    let mut gone = of_context(green.context, Some(green));
    gone.extend(take_ending(green.context.server, |stream| {
        stream.green().is_some_and(|other| Arc::ptr_eq(green, other))
    }));
    for stream in gone {
        capture_rules::destroyed(&stream);
        fences::forget(&stream, None);
        if !stream.finished.swap(true, Ordering::AcqRel)
            && stream.session().append(&StreamDestroy { stream: stream.id }).is_ok()
        {
            ids::STREAMS.give_back(stream.id.0);
        }
    }
}

/// Streams without a handle: per-thread default streams and this library's own. They are destroyed with their
/// context.
pub(crate) static OWNED: Mutex<Vec<std::sync::Weak<Stream>>> = Mutex::new(Vec::new());

pub(crate) fn make(context: &'static Context, flags: u32, priority: i32) -> Result<Stream> {
    let id = fresh(context)?;
    context.session().append(&StreamCreate { context: context.id, stream: id, flags, priority })?;
    Ok(Stream::new(id, context, flags, priority, false))
}

/// An unused stream id.
pub(crate) fn fresh(context: &Context) -> Result<StreamId> {
    reap(context.server);
    let id = ids::STREAMS.take().or_else(|| id_of_ended(&driver().ok()?.servers, || ids::STREAMS.take()));
    let id = StreamId(id.ok_or(Status::OUT_OF_MEMORY)?);
    if let Some(word) = context.session().progress().stream(id) {
        word.store(0, Ordering::Release);
    }
    Ok(id)
}

/// An ID that `take` finds as soon as one of the servers has been told of its ended streams: no two servers'
/// streams have the same ID.
fn id_of_ended(servers: &[&Server], take: impl Fn() -> Option<u32>) -> Option<u32> {
    // One that may be silent is only waited for if no other has an ended stream: the ends of all streams fit
    // in half of a ring.
    let (first, last): (Vec<&Server>, Vec<&Server>) =
        servers.iter().copied().partition(|server| server.session.has_much_room());
    first.into_iter().chain(last).find_map(|server| {
        reap(server);
        take()
    })
}

/// Destroys a stream. The server learns of it when the stream's work is done.
pub(crate) fn end(stream: Arc<Stream>) {
    capture_rules::destroyed(&stream);
    if stream.finished.load(Ordering::Acquire) {
        return;
    }
    // After the session is lost there is nothing to destroy.
    if stream.mark().is_ok() {
        let server = stream.context.server;
        lock(&ENDING).push(stream);
        reap(server);
    }
}

/// Tells a server of its destroyed streams whose work is done.
pub(crate) fn reap(server: &Server) {
    let _telling = lock(&server.telling);
    let is_over = |stream: &mut Arc<Stream>| {
        let passed = || stream.last_mark.get().is_some_and(|mark| stream.has_passed(mark));
        std::ptr::eq(stream.context.server, server) && (stream.is_known_idle() || passed())
    };
    let over: Vec<_> = lock(&ENDING).extract_if(.., is_over).collect();
    for stream in over {
        fences::forget(&stream, None);
        if stream.session().append(&StreamDestroy { stream: stream.id }).is_ok() {
            stream.finished.store(true, Ordering::Release);
            ids::STREAMS.give_back(stream.id.0);
        }
    }
}

/// Takes destroyed streams of a server, of which it is to learn in another way. It has been told of those
/// that are not there any more.
fn take_ending(server: &Server, which: impl Fn(&Stream) -> bool) -> Vec<Arc<Stream>> {
    let _telling = lock(&server.telling);
    lock(&ENDING).extract_if(.., |stream| which(stream)).collect()
}

/// Destroys a context's streams. `with_context`: the server destroys its own with the context.
pub(crate) fn forget(context: &'static Context, mut with_context: Option<&mut WithContext>) {
    let mut gone = STREAMS.remove_where(|stream| std::ptr::eq(stream.context, context));
    gone.extend(take_ending(context.server, |stream| std::ptr::eq(stream.context, context)));
    lock(&OWNED).retain(|weak| match weak.upgrade() {
        Some(stream) if std::ptr::eq(stream.context, context) => {
            gone.push(stream);
            false
        }
        other => other.is_some(),
    });
    let legacy = context.legacy();
    fences::forget(legacy, with_context.as_deref_mut());
    for stream in &gone {
        capture_rules::destroyed(stream);
        fences::forget(stream, with_context.as_deref_mut());
    }
    for stream in gone {
        if stream.finished.swap(true, Ordering::AcqRel) {
            continue;
        }
        if let Some(ended) = &mut with_context {
            ended.streams.push(stream.id.0);
        } else if stream.session().append(&StreamDestroy { stream: stream.id }).is_ok() {
            ids::STREAMS.give_back(stream.id.0);
        } else {
            return;
        }
    }
    if let Some(last) = context.last_work() {
        legacy.synced.raise(last);
    }
}

/// Makes a stream in a context or in one of its green contexts. Returns its handle.
pub(crate) fn create_in(
    context: &'static Context,
    green: Option<Arc<Green>>,
    flags: u32,
    priority: i32,
) -> Result<usize> {
    if flags & !NON_BLOCKING != 0 {
        return Err(Status::INVALID_VALUE);
    }
    driver()?;
    if green.is_some() && flags & NON_BLOCKING == 0 {
        return refuse_form!("a stream of a green context that waits for its default stream");
    }
    let [least, greatest] = driver::device(context.device as i32)?.info.stream_priorities;
    let priority = priority.clamp(greatest.min(least), least.max(greatest));
    if flags & NON_BLOCKING != 0 {
        fences::before_stream(context.server)?;
    }
    let new = match &green {
        None => make(context, flags, priority)?,
        Some(green) => in_green(green, priority)?,
    };
    green_gates::inherit(&new)?;
    STREAMS.insert(Arc::new(new)).ok_or(Status::OUT_OF_MEMORY)
}

/// The stream of a handle, for queries that are allowed in any context.
pub(crate) fn ask(handle: usize, per_thread: bool) -> Result<(&'static Driver, Arc<Stream>)> {
    let driver = driver()?;
    if handle > PER_THREAD {
        return Ok((driver, named(handle)?));
    }
    let stream = plain(context::current()?, handle, per_thread)?;
    // It gets no work, so it is not ordered behind other streams' copies: whoever waits for it would wait for
    // them.
    capture_rules::implicit(&stream)?;
    Ok((driver, stream))
}

/// The stream of a handle, for questions that are allowed in any context and while it is captured.
pub(crate) fn asked(handle: usize, per_thread: bool) -> Result<Arc<Stream>> {
    driver()?;
    if handle > PER_THREAD { named(handle) } else { plain(context::current()?, handle, per_thread) }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, TicketId};
    use client::ops::stream::StreamMark;

    #[test]
    fn a_server_without_room_for_the_end_of_a_stream_stops_no_other() {
        let [full, other] = [(); 2].map(|()| Server::unused());
        let on = |server| {
            let context = Context::new(ContextId(0), server, 0, 0, false);
            Arc::new(Stream::new(StreamId(MAX_CONTEXTS), context, NON_BLOCKING, 0, false))
        };
        let (destroyed, beside) = (on(full), on(other));
        beside.work(&StreamMark { stream: beside.id }).unwrap();
        lock(&ENDING).push(destroyed.clone());
        let fills = full.fill();
        let tells = std::thread::spawn(|| reap(full));
        let (says, said) = mpsc::channel();
        std::thread::spawn(move || {
            // Until that server is being told.
            while lock(&ENDING).iter().any(|stream| Arc::ptr_eq(stream, &destroyed)) {
                std::thread::yield_now();
            }
            let context = beside.context;
            end(beside);
            let is_seen = is_stopped(destroyed.context) && all_of(context).len() == 2;
            take_ending(other, |stream| std::ptr::eq(stream.context.server, other));
            says.send((is_seen, destroyed.finished.load(Ordering::Acquire))).unwrap();
        });
        // If this waited for room, so would the test: there never is any.
        let said = said.recv_timeout(Duration::from_secs(60)).expect("the destroyed streams are locked");
        assert_eq!(said, (true, false));
        full.lose();
        for thread in [fills, tells] {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_stream_is_found_all_the_time_while_it_is_destroyed() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS + 1), context, 0, 0, false));
        let handle = STREAMS.insert(stream.clone()).unwrap();
        stream.work(&StreamMark { stream: stream.id }).unwrap();
        let is_found = || {
            assert_eq!(is_done(context.legacy()), Ok(false), "the default stream waits for it");
            assert!(all_of(context).iter().any(|other| Arc::ptr_eq(other, &stream)));
        };
        is_found();
        let (taken, leaving) = Leaving::begin(handle).unwrap();
        is_found();
        end(taken);
        is_found();
        drop(leaving);
        is_found();
        assert!(Leaving::begin(handle).is_err() && lock(&LEAVING).iter().all(|s| !Arc::ptr_eq(s, &stream)));
        take_ending(context.server, |other| std::ptr::eq(other, &*stream));
    }

    #[test]
    fn a_stream_gets_the_id_of_an_ended_one_although_another_server_is_silent() {
        let servers = [(); 2].map(|()| Server::unused());
        let ended = servers.map(|server| {
            let context = Context::new(ContextId(0), server, 0, 0, false);
            let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS), context, NON_BLOCKING, 0, false));
            lock(&ENDING).push(stream.clone());
            stream
        });
        let fills = servers[0].fill();
        let (says, said) = mpsc::channel();
        let takes = std::thread::spawn(move || {
            let told = || ended[1].finished.load(Ordering::Acquire).then_some(7);
            let id = id_of_ended(&servers, told);
            says.send((id, ended[0].finished.load(Ordering::Acquire))).unwrap();
        });
        // If this waited for room, so would the test: there never is any.
        let said = said.recv_timeout(Duration::from_secs(60)).expect("the silent server is waited for");
        assert_eq!(said, (Some(7), false));
        servers[0].lose();
        for thread in [fills, takes] {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_blocking_streams_work_is_marked_before_the_legacy_stream_waits_for_the_program() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        let make = |n, flags| {
            let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS + n), context, flags, 0, false));
            let handle = STREAMS.insert(stream.clone()).unwrap();
            (stream, handle)
        };
        let [(blocking, first), (free, second)] = [make(1, 0), make(2, NON_BLOCKING)];
        let work = |stream: &Stream| stream.work(&StreamMark { stream: stream.id }).unwrap();
        let done = [work(&blocking), work(&free)];
        before_program(context.legacy()).unwrap();
        let waits = work(context.legacy());
        let mark = blocking.mark().unwrap();
        assert!(mark.may_be_after(done[0]) && waits.may_be_after(mark));
        assert!(free.last_mark.get().is_none(), "it is asked by itself");
        // Once is enough.
        let before = context.session().last_seq();
        before_program(context.legacy()).unwrap();
        before_program(&blocking).unwrap();
        assert_eq!(context.session().last_seq(), before);
        for handle in [first, second] {
            STREAMS.remove(handle).unwrap();
        }
    }

    #[test]
    fn a_wait_for_a_ticket_does_not_show_that_the_legacy_streams_work_is_done() {
        let held = || {
            let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
            let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS + 1), context, 0, 0, false));
            stream.publishing_work(&StreamMark { stream: stream.id }).unwrap();
            let own = context.legacy().work(&StreamMark { stream: StreamId(0) }).unwrap();
            stream.wait_for_ticket(TicketId(1)).unwrap();
            (context, own, stream)
        };
        let mark =
            |stream: &Arc<Stream>| mark_of_legacy(stream.context, std::slice::from_ref(stream)).unwrap();
        let (context, own, stream) = held();
        stream.is_synced(stream.due().unwrap());
        let (marked, last) = mark(&stream).unwrap();
        assert!(Arc::ptr_eq(&marked, context.legacy()) && last.may_be_after(own));
        // Behind the wait, a mark of the legacy stream would be held: other streams would wait for it.
        let (context, own, stream) = held();
        let (marked, last) = mark(&stream).unwrap();
        assert!(Arc::ptr_eq(&marked, &stream) && last.may_be_after(own));
        stream.is_synced(stream.due().unwrap());
        assert!(mark(&stream).is_some_and(|(marked, _)| Arc::ptr_eq(&marked, &stream)));
        assert!(!context.legacy().is_known_done(own), "the mark is behind it, the wait is not");
        stream.synced.raise(last);
        assert!(mark(&stream).is_none() && context.legacy().is_known_done(own));
    }

    #[test]
    fn streams_of_threads_that_have_ended_leave_no_entries() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        let new = || Arc::new(Stream::new(StreamId(MAX_CONTEXTS), context, NON_BLOCKING, 0, false));
        let lasting: Vec<_> = (0..100).map(|_| new()).collect();
        lasting.iter().for_each(keep);
        for _ in 0..1000 {
            keep(&new());
        }
        let owned = lock(&OWNED);
        assert!(owned.len() <= 256, "{} entries", owned.len());
        let there = |stream| owned.iter().any(|other| other.as_ptr() == Arc::as_ptr(stream));
        assert!(lasting.iter().all(there));
    }
}
