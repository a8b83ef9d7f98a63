//! Streams.
//!
//! What a stream has done is read from its progress word: it rises to the `seq` of the last publishing record (a mark, an event's record) that the stream has passed. A query
//! appends a mark if work came after the last one, and from then on only reads memory.
//!
//! A destroyed stream's work still completes, and events recorded on it are still asked for. So the server hears of the destruction, and the stream's number is used again, only once its last
//! mark was seen: until then it is kept in [`ENDING`].

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code};
use crate::api::green_contexts;
use crate::api::green_contexts::Green;
use crate::graph::node_work::Work;
use crate::memory::managed::{partial_pages, shared_blocks};
use crate::process::capture::Capture;
use crate::process::context::Context;
use crate::process::copy_fences::Promise;
use crate::process::driver::{Driver, driver, unique_id};
use crate::process::{capture, context, copy_fences, driver};
use crate::streams::event;
use crate::streams::event::Event;
use crate::work::host_function;
use client::channel::{MAX_CONTEXTS, MAX_STREAMS};
use client::handle::StreamId;
use client::handles::Slab;
use client::ops::Op;
use client::ops::green::GreenStream;
use client::ops::launch::LaunchAttribute;
use client::ops::stream::{StreamCreate, StreamDestroy, StreamMark, StreamSynchronize, StreamWaitEvent};
use client::thread::Lasting;
use client::{Status, lock};

/// `CU_STREAM_LEGACY`.
pub(crate) const LEGACY: usize = 1;

/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: usize = 2;

const NON_BLOCKING: u32 = 1;

/// `CU_EVENT_WAIT_EXTERNAL`: in a capture, a node of its own. It says nothing elsewhere.
const EXTERNAL: u32 = 1;

/// A stream.
pub(crate) struct Stream {
    pub id: StreamId,
    pub context: &'static Context,
    /// The green context that it is in.
    green: Option<Arc<Green>>,
    pub flags: u32,
    priority: AtomicI32,
    /// Attributes that were set and that its kernels have too.
    attributes: Mutex<Vec<LaunchAttribute>>,
    unique: u64,
    legacy: bool,
    /// `seq` of its last work, of its last publishing record, and up to which it is known to be done.
    last_work: AtomicU64,
    last_mark: AtomicU64,
    synced: AtomicU64,
    /// Records of other streams that this one has waited for: the wait's own `seq`, the stream, the record's `seq`. When this stream
    /// is known to be past the wait, the other is known to be past the record, whether or not its progress word says so yet.
    waited_for: Mutex<Vec<(u64, Arc<Stream>, u64)>>,
    /// The last of the records in it that were forgotten.
    forgotten: AtomicU64,
    /// Everything that was ever on it is done, and its progress word may be another's.
    finished: AtomicBool,
    /// The capture that it is in, or was in last.
    capturing: Mutex<Option<Arc<Capture>>>,
    /// What its synchronous copies have promised.
    pub promise: Promise,
}

static STREAMS: Slab<Stream> = Slab::new(2);

static ENDING: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

static IDS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

static IDS_FRESH: AtomicU32 = AtomicU32::new(MAX_CONTEXTS);

/// The per-thread default streams of one thread, one for each context that it has used.
struct Own(Vec<Arc<Stream>>);

impl Drop for Own {
    fn drop(&mut self) {
        if let Ok(driver) = driver() {
            for stream in self.0.drain(..) {
                end(driver, stream);
            }
        }
    }
}

thread_local! {
    static OWN: Lasting<RefCell<Own>> = const { Lasting::new(RefCell::new(Own(Vec::new()))) };
}

impl Stream {
    /// The legacy default stream of a context.
    pub fn legacy(context: &'static Context) -> Arc<Stream> {
        Arc::new(Stream::new(StreamId(context.id.0), context, 0, 0, true))
    }

    fn new(id: StreamId, context: &'static Context, flags: u32, priority: i32, legacy: bool) -> Stream {
        Stream {
            id,
            context,
            green: None,
            flags,
            priority: AtomicI32::new(priority),
            attributes: Mutex::default(),
            unique: unique_id(),
            legacy,
            last_work: AtomicU64::new(0),
            last_mark: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            waited_for: Mutex::default(),
            forgotten: AtomicU64::new(0),
            finished: AtomicBool::new(false),
            capturing: Mutex::default(),
            promise: Promise::new(),
        }
    }

    /// Whether it runs beside the legacy default stream without either waiting for the other.
    pub fn is_free(&self) -> bool {
        self.flags & NON_BLOCKING != 0
    }

    /// Whether it is a legacy default stream.
    pub fn is_legacy(&self) -> bool {
        self.legacy
    }

    /// The handle of the context that it is in.
    fn context_handle(&self) -> usize {
        self.green.as_ref().map_or(self.context.handle, |green| green.convert())
    }

    /// The green context that it is in, or whose default stream it is.
    pub fn green(&self) -> Option<&Arc<Green>> {
        self.green.as_ref()
    }

    /// A number that no other stream of the process has or had.
    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// The attributes of its kernels that were set for all of them.
    pub fn attributes(&self) -> &Mutex<Vec<LaunchAttribute>> {
        &self.attributes
    }

    pub fn set_priority(&self, priority: i32) {
        self.priority.store(priority, Ordering::Release);
    }

    /// The capture that it is in.
    #[inline]
    pub fn capture(&self) -> Option<Arc<Capture>> {
        if !capture::any() {
            return None;
        }
        lock(&self.capturing).clone().filter(|capture| !capture.is_ended())
    }

    pub fn set_capture(&self, capture: Arc<Capture>) {
        *lock(&self.capturing) = Some(capture);
    }

    /// Puts an operation on the stream, which is not being captured; the `seq` of its record.
    #[inline]
    pub fn work<'a, T: Op<'a>>(&self, driver: &Driver, op: &T) -> Result<u64> {
        let _appending = self.context.appending(self.is_free());
        let seq = driver.session.append(op)?;
        self.worked(seq);
        Ok(seq)
    }

    /// Puts an operation on the stream that publishes: an event's record. It is work too.
    pub fn publishing_work<'a, T: Op<'a>>(&self, driver: &Driver, op: &T) -> Result<u64> {
        let seq = self.work(driver, op)?;
        self.last_mark.fetch_max(seq, Ordering::AcqRel);
        Ok(seq)
    }

    /// Notes that record `seq` is work on this stream.
    #[inline]
    fn worked(&self, seq: u64) {
        self.last_work.fetch_max(seq, Ordering::AcqRel);
        self.context.worked(seq, self.is_free());
        partial_pages::work_came();
    }

    /// `seq` of the last work that this stream has to pass: for the legacy default stream also that of the streams it waits for.
    pub fn due(&self) -> u64 {
        if self.legacy { self.context.last_work() } else { self.last_work.load(Ordering::Acquire) }
    }

    /// Whether the stream is known, without asking, to be done up to record `seq`.
    pub fn is_known_done(&self, seq: u64) -> bool {
        self.synced.load(Ordering::Acquire) >= seq || self.context.has_synced(seq, self.is_free())
    }

    /// Whether work on this stream waits for the work before it on another, of the same context, by itself.
    pub fn waits_by_itself(&self, other: &Stream) -> bool {
        (self.legacy || other.legacy) && !self.is_free() && !other.is_free()
    }

    /// Whether a copy that the program was told is done stands behind record `seq`: then the program knows that this is done, too.
    pub fn has_promised(&self, seq: u64) -> bool {
        self.promise.covers(seq) || !self.is_free() && self.context.legacy_has_promised(seq)
    }

    /// Whether the stream has passed the publishing record `seq`.
    pub fn has_passed(&self, driver: &Driver, seq: u64) -> bool {
        if self.is_known_done(seq) {
            return true;
        }
        // The word may be another stream's by now, but then it was zeroed after `finished` was set.
        let word = driver.session.progress().stream(self.id).map_or(0, |word| word.load(Ordering::Acquire));
        word >= seq || self.finished.load(Ordering::Acquire)
    }

    /// A publishing record after all work so far; its `seq`.
    pub fn mark(&self, driver: &Driver) -> Result<u64> {
        let due = self.due();
        let last = self.last_mark.load(Ordering::Acquire);
        if last >= due && last != 0 {
            return Ok(last);
        }
        let seq = driver.session.append(&StreamMark { stream: self.id })?;
        self.last_mark.fetch_max(seq, Ordering::AcqRel);
        Ok(seq)
    }

    /// Whether everything on the stream is done; no round trip, unless the program was told so already.
    pub fn is_done(&self, driver: &Driver) -> Result<bool> {
        let due = self.due();
        if due <= self.synced.load(Ordering::Acquire) {
            return Ok(true);
        }
        let mark = self.mark(driver)?;
        if !self.has_passed(driver, mark) {
            if !self.has_promised(due) {
                return Ok(false);
            }
            self.synchronize(driver)?;
        }
        self.is_synced(mark);
        Ok(true)
    }

    /// Whether its own work is known to be over. It may be learnt later: this does not wait.
    pub fn is_idle(&self, driver: &Driver) -> bool {
        let last = self.last_work.load(Ordering::Acquire);
        self.is_known_done(last) || self.mark(driver).is_ok_and(|mark| self.has_passed(driver, mark))
    }

    /// Whether it was destroyed, and everything that was ever on it is done.
    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// Notes that everything on the stream up to `seq` is done.
    pub fn is_synced(&self, seq: u64) {
        if self.synced.fetch_max(seq, Ordering::AcqRel) >= seq {
            return;
        }
        if self.legacy {
            self.context.legacy_is_synced(seq);
        }
        let mut waited_for = lock(&self.waited_for);
        if waited_for.is_empty() {
            return;
        }
        let passed: Vec<_> = waited_for.extract_if(.., |(wait, ..)| *wait <= seq).collect();
        drop(waited_for);
        for (_, other, record) in passed {
            other.is_synced(record);
        }
    }

    /// Notes that record `wait` makes this stream wait for `record` of another.
    pub fn waits_for(&self, wait: u64, other: &Arc<Stream>, record: u64) {
        if std::ptr::eq(self, &**other) || other.synced.load(Ordering::Acquire) >= record {
            return;
        }
        let mut waited_for = lock(&self.waited_for);
        // A later wait for the same stream says more once it is passed; the earlier ones are kept while they are few.
        if waited_for.len() >= 64 {
            let (_, _, record) = waited_for.remove(0);
            self.forgotten.fetch_max(record, Ordering::AcqRel);
        }
        waited_for.push((wait, other.clone(), record));
    }

    /// Whether what is put on this stream now may come behind record `seq` of another, directly or by way of others. True also where that is not known.
    pub fn may_be_behind(&self, other: &Stream, seq: u64) -> bool {
        let mut seen: HashSet<u64> = HashSet::new();
        let mut open: Vec<Arc<Stream>> = Vec::new();
        if self.leads_to(other, seq, &mut open) {
            return true;
        }
        while let Some(stream) = open.pop() {
            if seen.insert(stream.unique) && stream.leads_to(other, seq, &mut open) {
                return true;
            }
        }
        false
    }

    /// Whether this stream is the one, or may be behind it without others between them; else `open` gets those that it has waited for.
    fn leads_to(&self, other: &Stream, seq: u64, open: &mut Vec<Arc<Stream>>) -> bool {
        if std::ptr::eq(self, other) || self.forgotten.load(Ordering::Acquire) > seq {
            return true;
        }
        // Blocking streams are behind each other by way of the legacy default stream, whatever that has waited for.
        let legacy = self.context.legacy();
        let through = self.legacy || other.legacy || legacy.last_work.load(Ordering::Acquire) > seq;
        if !self.is_free() && through {
            return true;
        }
        // A way that leads there goes over records that came later.
        let waited_for = lock(&self.waited_for);
        open.extend(waited_for.iter().filter(|(.., record)| *record > seq).map(|(_, via, _)| via.clone()));
        false
    }

    /// Waits until everything on the stream is done. No round trip when it is known to be.
    pub fn synchronize(&self, driver: &Driver) -> Result {
        if self.due() <= self.synced.load(Ordering::Acquire) {
            driver.session.show_output();
            driver.session.check()?;
            return self.context.deferred(driver);
        }
        let pending = driver.session.submit(&StreamSynchronize { stream: self.id })?;
        let seq = pending.seq();
        let result = pending.wait().map(|_| ());
        if result.is_ok() {
            self.is_synced(seq);
        }
        self.context.settle(driver, result)
    }
}

/// As [`plain`], for work: none goes on the legacy default stream while a stream that waits for it is being captured.
#[inline]
pub(crate) fn any(
    driver: &Driver,
    context: &'static Context,
    handle: usize,
    per_thread: bool,
) -> Result<Arc<Stream>> {
    let stream = plain(driver, context, handle, per_thread)?;
    capture::implicit(&stream)?;
    if stream.capture().is_none() {
        copy_fences::respect(driver, &stream)?;
    }
    Ok(stream)
}

/// The stream that a handle means in the current context.
///
/// # Errors
/// `INVALID_HANDLE` for what is no stream, `CONTEXT_IS_DESTROYED` when its context is.
#[inline]
pub(crate) fn plain(
    driver: &Driver,
    context: &'static Context,
    handle: usize,
    per_thread: bool,
) -> Result<Arc<Stream>> {
    match handle {
        0..=PER_THREAD if green_contexts::any() && context::current_green().is_some() => {
            green_default(context, handle == PER_THREAD || handle == 0 && per_thread)
        }
        0 if !per_thread => Ok(context.legacy().clone()),
        LEGACY => Ok(context.legacy().clone()),
        0 | PER_THREAD => own(driver, context),
        _ => named(handle),
    }
}

/// The stream that a handle names.
fn named(handle: usize) -> Result<Arc<Stream>> {
    let stream = STREAMS.get(handle).ok_or(Status::INVALID_HANDLE)?;
    match stream.green() {
        Some(green) if !green.is_alive() => Err(Status::CONTEXT_IS_DESTROYED),
        _ => Ok(stream),
    }
}

/// The default stream of the green context that is current, if it is in this context.
#[cold]
fn green_default(context: &'static Context, per_thread: bool) -> Result<Arc<Stream>> {
    let green = context::current_green().ok_or(Status::INVALID_CONTEXT)?;
    if !std::ptr::eq(green.context, context) {
        return Ok(context.legacy().clone());
    }
    if per_thread {
        // It has none.
        return Err(Status::INVALID_HANDLE);
    }
    green.default_stream()
}

/// The calling thread's own default stream in a context.
fn own(driver: &Driver, context: &'static Context) -> Result<Arc<Stream>> {
    let found = Lasting::with(&OWN, |own| {
        let mut own = own.borrow_mut();
        own.0.retain(|stream| !stream.finished.load(Ordering::Relaxed));
        own.0.iter().find(|stream| std::ptr::eq(stream.context, context)).cloned()
    });
    match found {
        Some(Some(stream)) => Ok(stream),
        Some(None) => {
            let stream = Arc::new(make(driver, context, 0, 0)?);
            green_contexts::inherit(driver, &stream)?;
            let _ = Lasting::with(&OWN, |own| own.borrow_mut().0.push(stream.clone()));
            lock(&OWNED).push(Arc::downgrade(&stream));
            Ok(stream)
        }
        // The thread is being torn down: what it still does is done in the context's stream.
        None => Ok(context.legacy().clone()),
    }
}

/// A stream of this library's own in a context, beside all others. It ends with the context.
pub(crate) fn unnamed(driver: &Driver, context: &'static Context) -> Result<Arc<Stream>> {
    let stream = Arc::new(unnamed_once(driver, context)?);
    keep(&stream);
    Ok(stream)
}

/// The same for one use: the caller ends it.
pub(crate) fn unnamed_once(driver: &Driver, context: &'static Context) -> Result<Stream> {
    make(driver, context, NON_BLOCKING, 0)
}

/// A stream of a green context.
pub(crate) fn in_green(driver: &Driver, green: &Arc<Green>, priority: i32) -> Result<Stream> {
    let id = fresh(driver)?;
    driver.session.append(&GreenStream { green: green.id, stream: id, priority })?;
    Ok(Stream { green: Some(green.clone()), ..Stream::new(id, green.context, NON_BLOCKING, priority, false) })
}

/// Keeps a stream of this library's own in mind, for when its context goes.
pub(crate) fn keep(stream: &Arc<Stream>) {
    lock(&OWNED).push(Arc::downgrade(stream));
}

/// Streams of a context that work may be on, all of them or a green context's.
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

/// Whether all work of a context is known to be over, but for work that stands behind a function that is being called. This does not wait.
pub(crate) fn is_stopped(driver: &Driver, context: &'static Context) -> bool {
    let stopped = host_function::stopped();
    let mut all = of_context(context, None);
    all.extend(lock(&ENDING).iter().filter(|stream| std::ptr::eq(stream.context, context)).cloned());
    all.iter().all(|stream| stopped.contains(&stream.unique) || stream.is_idle(driver))
}

/// The streams of a green context, which is destroyed, are gone with it.
pub(crate) fn end_all_of(driver: &Driver, green: &Arc<Green>) {
    let mut gone = of_context(green.context, Some(green));
    lock(&ENDING).retain(|stream| {
        let of_it = stream.green().is_some_and(|other| Arc::ptr_eq(green, other));
        if of_it {
            gone.push(stream.clone());
        }
        !of_it
    });
    for stream in gone {
        copy_fences::forget(driver, &stream, false);
        if !stream.finished.swap(true, Ordering::AcqRel)
            && driver.session.append(&StreamDestroy { stream: stream.id }).is_ok()
        {
            lock(&IDS).push(stream.id.0);
        }
    }
}

/// Streams that no handle names, of threads and of this library's own, for when their context goes.
static OWNED: Mutex<Vec<std::sync::Weak<Stream>>> = Mutex::new(Vec::new());

fn make(driver: &Driver, context: &'static Context, flags: u32, priority: i32) -> Result<Stream> {
    let id = fresh(driver)?;
    driver.session.append(&StreamCreate { context: context.id, stream: id, flags, priority })?;
    Ok(Stream::new(id, context, flags, priority, false))
}

/// A number for a new stream.
fn fresh(driver: &Driver) -> Result<StreamId> {
    reap(driver);
    let id = lock(&IDS).pop().unwrap_or_else(|| IDS_FRESH.fetch_add(1, Ordering::Relaxed));
    if id >= MAX_STREAMS {
        IDS_FRESH.store(MAX_STREAMS, Ordering::Relaxed);
        return Err(Status::OUT_OF_MEMORY);
    }
    let id = StreamId(id);
    if let Some(word) = driver.session.progress().stream(id) {
        word.store(0, Ordering::Release);
    }
    Ok(id)
}

/// A stream has been destroyed: the server hears of it when its work is done.
pub(crate) fn end(driver: &Driver, stream: Arc<Stream>) {
    if stream.finished.load(Ordering::Acquire) {
        return;
    }
    // If the session is lost there is nothing to end.
    if stream.mark(driver).is_ok() {
        lock(&ENDING).push(stream);
        reap(driver);
    }
}

/// Ends the destroyed streams whose work is done.
pub(crate) fn reap(driver: &Driver) {
    let mut ending = lock(&ENDING);
    ending.retain(|stream| {
        let mark = stream.last_mark.load(Ordering::Acquire);
        if stream.due() > stream.synced.load(Ordering::Acquire) && !stream.has_passed(driver, mark) {
            return true;
        }
        copy_fences::forget(driver, stream, false);
        if driver.session.append(&StreamDestroy { stream: stream.id }).is_ok() {
            stream.finished.store(true, Ordering::Release);
            lock(&IDS).push(stream.id.0);
        }
        false
    });
}

/// A context's streams are gone with it. `with_server`: the server destroys them by itself.
pub(crate) fn forget(driver: &Driver, context: &'static Context, with_server: bool) {
    let mut gone = STREAMS.remove_where(|stream| std::ptr::eq(stream.context, context));
    lock(&ENDING).retain(|stream| {
        let other = !std::ptr::eq(stream.context, context);
        if !other {
            gone.push(stream.clone());
        }
        other
    });
    lock(&OWNED).retain(|weak| match weak.upgrade() {
        Some(stream) if std::ptr::eq(stream.context, context) => {
            gone.push(stream);
            false
        }
        other => other.is_some(),
    });
    let legacy = context.legacy();
    copy_fences::forget(driver, legacy, with_server);
    for stream in &gone {
        copy_fences::forget(driver, stream, with_server);
    }
    let mut ids = lock(&IDS);
    for stream in gone {
        if !stream.finished.swap(true, Ordering::AcqRel) {
            if !with_server && driver.session.append(&StreamDestroy { stream: stream.id }).is_err() {
                return;
            }
            ids.push(stream.id.0);
        }
    }
    legacy.synced.store(context.last_work(), Ordering::Release);
}

/// Lets a stream wait for an event's last record, if there is one.
pub(crate) fn wait(driver: &Driver, stream: &Stream, event: &Event) -> Result {
    let last = event.last();
    if last.is_none() && !event.is_shared() {
        return Ok(());
    }
    let seq = stream.work(driver, &StreamWaitEvent { stream: stream.id, event: event.id, flags: 0 })?;
    if let Some((other, record)) = last {
        stream.waits_for(seq, &other, record);
    }
    // What another process records later is not waited for.
    event.arrive(driver)
}

fn create(stream: *mut usize, flags: u32, priority: i32) -> Result {
    let (_, context) = context::ready()?;
    let green = if green_contexts::any() { context::current_green() } else { None };
    create_in(context, green, stream, flags, priority)
}

/// Makes a stream in a context, or in a green one of its.
pub(crate) fn create_in(
    context: &'static Context,
    green: Option<Arc<Green>>,
    stream: *mut usize,
    flags: u32,
    priority: i32,
) -> Result {
    non_null(stream)?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let driver = driver()?;
    if green.is_some() && flags & NON_BLOCKING == 0 {
        static SAID: AtomicBool = AtomicBool::new(false);
        return crate::abi::result::refuse_form(
            "a stream of a green context that waits for its default stream",
            &SAID,
        );
    }
    let [least, greatest] = driver::device(context.device as i32)?.info.stream_priorities;
    let priority = priority.clamp(greatest.min(least), least.max(greatest));
    if flags & NON_BLOCKING != 0 {
        copy_fences::before_stream(driver, context)?;
    }
    let new = match &green {
        None => make(driver, context, flags, priority)?,
        Some(green) => in_green(driver, green, priority)?,
    };
    green_contexts::inherit(driver, &new)?;
    let handle = STREAMS.insert(Arc::new(new)).ok_or(Status::OUT_OF_MEMORY)?;
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(stream, handle) }
}

/// The stream and its driver, for calls that ask about a stream and may be made in any context.
pub(crate) fn ask(handle: usize, per_thread: bool) -> Result<(&'static Driver, Arc<Stream>)> {
    let driver = driver()?;
    if handle > PER_THREAD {
        return Ok((driver, named(handle)?));
    }
    let context = context::current()?;
    Ok((driver, any(driver, context, handle, per_thread)?))
}

api! {
    fn cuStreamCreate(stream: *mut usize, flags: u32) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy_v2(stream: usize) {
        let driver = driver()?;
        let stream = STREAMS.remove(stream).ok_or(Status::INVALID_HANDLE)?;
        if stream.green().is_some_and(|green| !green.is_alive()) {
            return Err(Status::CONTEXT_IS_DESTROYED);
        }
        driver.session.check()?;
        let deferred = stream.context.deferred(driver);
        end(driver, stream);
        deferred
    }
    alias cuStreamDestroy = cuStreamDestroy_v2(stream: usize);

    fn cuStreamGetPriority / cuStreamGetPriority_ptsz(stream: usize, priority: *mut i32) |pt| {
        put(priority, ask(stream, pt)?.1.priority.load(Ordering::Acquire))
    }

    fn cuStreamGetFlags / cuStreamGetFlags_ptsz(stream: usize, flags: *mut u32) |pt| {
        put(flags, ask(stream, pt)?.1.flags)
    }

    fn cuStreamGetDevice / cuStreamGetDevice_ptsz(stream: usize, device: *mut i32) |pt| {
        put(device, ask(stream, pt)?.1.context.device as i32)
    }

    fn cuStreamGetId / cuStreamGetId_ptsz(stream: usize, id: *mut u64) |pt| {
        put(id, ask(stream, pt)?.1.unique)
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz(stream: usize, ctx: *mut usize) |pt| {
        put(ctx, ask(stream, pt)?.1.context_handle())
    }

    fn cuStreamGetCtx_v2 / cuStreamGetCtx_v2_ptsz(stream: usize, ctx: *mut usize, green: *mut usize) |pt| {
        let (_, stream) = ask(stream, pt)?;
        put(ctx, stream.context.handle)?;
        if green.is_null() { Ok(()) } else { put(green, stream.green().map_or(0, |green| green.handle())) }
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz(stream: usize, handle: usize, flags: u32) |pt| {
        let event = event::of(handle)?;
        let (driver, stream) = ask(stream, pt)?;
        driver.session.check()?;
        stream.context.deferred(driver)?;
        if flags & !EXTERNAL != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if flags & EXTERNAL != 0 {
            return stream.capture().ok_or(code::ILLEGAL_STATE)?.add(&stream, Work::Wait(handle));
        }
        if let Some((capture, point)) = event.captured() {
            return if capture.is_ended() { Err(code::CAPTURED_EVENT) } else { capture.join(&stream, &point) };
        }
        if let Some(capture) = stream.capture() {
            // Work from outside has no place in a graph; an event that was never recorded stands for none.
            return if event.last().is_none() {
                Ok(())
            } else {
                capture.spoil();
                Err(code::STREAM_CAPTURE_ISOLATION)
            };
        }
        wait(driver, &stream, &event)
    }

    fn cuStreamQuery / cuStreamQuery_ptsz(stream: usize) |pt| {
        let (driver, stream) = ask(stream, pt)?;
        driver.session.check()?;
        capture::forbid(&stream)?;
        stream.context.deferred(driver)?;
        if !stream.is_done(driver)? {
            return Err(Status::NOT_READY);
        }
        shared_blocks::after_wait(driver);
        stream.context.deferred(driver)
    }

    fn cuStreamSynchronize / cuStreamSynchronize_ptsz(stream: usize) |pt| {
        let (driver, stream) = ask(stream, pt)?;
        host_function::forbid()?;
        driver.session.check()?;
        capture::forbid(&stream)?;
        stream.context.deferred(driver)?;
        let result = stream.synchronize(driver);
        shared_blocks::after_wait(driver);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::handle::ContextId;

    fn streams(flags: [u32; 3]) -> [Arc<Stream>; 3] {
        let context = Context::new(ContextId(0), 0, 0, true);
        let mut id = MAX_CONTEXTS;
        flags.map(|flags| {
            id += 1;
            Arc::new(Stream::new(StreamId(id), context, flags, 0, false))
        })
    }

    #[test]
    fn a_stream_is_behind_those_that_it_waits_for_from_then_on() {
        let [a, b, c] = streams([NON_BLOCKING; 3]);
        assert!(a.may_be_behind(&a, 10));
        assert!(!b.may_be_behind(&a, 10) && !c.may_be_behind(&a, 10));
        // A record before is none behind it.
        b.waits_for(12, &a, 9);
        assert!(!b.may_be_behind(&a, 10));
        b.waits_for(14, &a, 11);
        c.waits_for(16, &b, 15);
        assert!(b.may_be_behind(&a, 10) && c.may_be_behind(&a, 10));
        assert!(!a.may_be_behind(&c, 10));
        // What waits for itself by way of others is no trouble.
        a.waits_for(20, &c, 19);
        assert!(!a.may_be_behind(&b, 30));
    }

    #[test]
    fn blocking_streams_are_behind_each_other_once_the_legacy_stream_has_work() {
        let [a, b, free] = streams([0, 0, NON_BLOCKING]);
        assert!(!b.may_be_behind(&a, 10));
        a.context.legacy().last_work.store(11, Ordering::Release);
        assert!(b.may_be_behind(&a, 10) && !free.may_be_behind(&a, 10));
        assert!(a.context.legacy().may_be_behind(&a, 10));
    }

    #[test]
    fn what_is_forgotten_may_have_led_anywhere() {
        let [a, b, c] = streams([NON_BLOCKING; 3]);
        for record in 0..65 {
            b.waits_for(200 + record, &c, 100 + record);
        }
        assert!(b.may_be_behind(&a, 99) && !b.may_be_behind(&a, 300));
    }
}
