//! Events.
//!
//! An event's record publishes in its stream's progress word, so that a query is a read of memory.
//!
//! Programs that measure ask for the time between the same two events in every step, after they have waited. So once a program has asked for the time from one event to another, it is asked for
//! ahead, right behind each record of the latter: the server answers when that record is done, and the answer is here when the program asks. An event whose answers
//! are not used is asked about no more.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code};
use crate::api::devices::attr;
use crate::graph::node_work::Work;
use crate::memory::managed::shared_blocks;
use crate::process::capture::Capture;
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::stream::Stream;
use crate::process::{capture, context, driver, stream};
use crate::work::host_function;
use client::handle::EventId;
use client::handles::Slab;
use client::ops::event::{
    EventCreate, EventDestroy, EventElapsed, EventElapsedReply, EventRecord, EventSynchronize,
};
use client::ops::memory::{EventExport, EventImport, EventQuery};
use client::session::Ahead;
use client::{Status, lock};

const DISABLE_TIMING: u32 = 2;

const INTERPROCESS: u32 = 4;

/// Between two questions after a shared event: nothing tells this process of what another has recorded.
const FIRST_PAUSE: Duration = Duration::from_micros(20);

const LAST_PAUSE: Duration = Duration::from_millis(1);

/// Events since which the time to another is kept, for each event.
const MOST_STARTS: usize = 4;

/// After so many answers in a row that were of no use, it is not asked ahead any more.
const MOST_MISSES: u32 = 3;

/// An event.
pub(crate) struct Event {
    pub id: EventId,
    context: &'static Context,
    flags: u32,
    last: Mutex<Option<(Arc<Stream>, u64)>>,
    /// What it stands for, if it was last recorded on a stream that was being captured.
    captured: Mutex<Option<(Arc<Capture>, Vec<u64>)>>,
    /// Times to it from events that the program has asked about, the latest last.
    times: Mutex<Vec<Time>>,
    /// Whether there are any: what a record looks at.
    is_measured: AtomicBool,
}

/// The time from one event to another.
struct Time {
    start: Weak<Event>,
    /// `seq` of the records of both that it is the time between.
    records: (u64, u64),
    answer: TimeAnswer,
    /// Answers in a row that came ahead and were of no use.
    misses: u32,
}

enum TimeAnswer {
    /// Milliseconds, as the program was told.
    Told(f32),
    /// Asked for ahead.
    Ahead(Ahead<'static, EventElapsedReply>),
    /// Was asked for ahead, and was of no use.
    Missed,
}

impl Time {
    fn is_since(&self, start: &Arc<Event>) -> bool {
        std::ptr::eq(self.start.as_ptr(), Arc::as_ptr(start))
    }
}

static EVENTS: Slab<Event> = Slab::new(3);

static IDS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

static IDS_FRESH: AtomicU32 = AtomicU32::new(0);

impl Event {
    fn new(id: EventId, context: &'static Context, flags: u32) -> Event {
        Event {
            id,
            context,
            flags,
            last: Mutex::new(None),
            captured: Mutex::new(None),
            times: Mutex::default(),
            is_measured: AtomicBool::new(false),
        }
    }

    /// The context that it was made in.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Whether other processes may have recorded it, which this one does not see.
    pub fn is_shared(&self) -> bool {
        self.flags & INTERPROCESS != 0
    }

    /// Asks the server whether its last record, by whichever process, is done.
    fn ask(&self, driver: &Driver) -> Result<bool> {
        Ok(driver.session.call(&EventQuery { event: self.id })?.done)
    }

    /// For a shared event: returns when the server has executed what was said of it. The program may tell another process, whose commands reach the server by another way.
    pub fn arrive(&self, driver: &Driver) -> Result {
        if self.is_shared() { self.ask(driver).map(|_| ()) } else { Ok(()) }
    }

    /// Waits for its last record, by whichever process.
    fn await_shared(&self, driver: &Driver) -> Result {
        let mut pause = FIRST_PAUSE;
        while !self.ask(driver)? {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
        Ok(())
    }

    /// The capture that it was last recorded in, and the nodes that it stands for.
    pub fn captured(&self) -> Option<(Arc<Capture>, Vec<u64>)> {
        lock(&self.captured).clone()
    }

    /// `Err` for an event that was recorded in a capture: nothing ever comes to it, and asking invalidates the capture.
    fn check(&self) -> Result {
        match &*lock(&self.captured) {
            None => Ok(()),
            Some((capture, _)) => {
                capture.spoil();
                Err(code::CAPTURED_EVENT)
            }
        }
    }

    /// Its last record: the stream, and the record's `seq`.
    pub fn last(&self) -> Option<(Arc<Stream>, u64)> {
        lock(&self.last).clone()
    }

    /// Whether its last record is done.
    fn is_done(&self, driver: &Driver) -> bool {
        lock(&self.last).as_ref().is_none_or(|(stream, seq)| stream.has_passed(driver, *seq))
    }

    /// Whether its last record is done; waits for it if the program was told that it is.
    fn is_over(&self, driver: &Driver) -> Result<bool> {
        if self.is_done(driver) {
            return Ok(true);
        }
        match self.last() {
            Some((stream, seq)) if stream.has_promised(seq) => self.synchronize(driver).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Has just been recorded: asks ahead for the times that the program has used since the record before.
    fn ask_ahead(&self, driver: &'static Driver) {
        if !self.is_measured.load(Ordering::Relaxed) {
            return;
        }
        let mut times = lock(&self.times);
        times.retain_mut(|time| {
            let Some(start) = time.start.upgrade() else { return false };
            if time.misses >= MOST_MISSES {
                return true;
            }
            let TimeAnswer::Told(_) = time.answer else { return false };
            let (Some((_, from)), Some((_, to))) = (start.last(), self.last()) else { return false };
            let question = EventElapsed { start: start.id, end: self.id };
            // Without a free slot the program asks as it did the first time.
            if let Ok(Some(ahead)) = driver.session.submit_ahead(&question) {
                (time.records, time.answer) = ((from, to), TimeAnswer::Ahead(ahead));
            }
            true
        });
        self.is_measured.store(!times.is_empty(), Ordering::Relaxed);
    }

    /// The time from `start` between these records, where it is known or was asked for ahead.
    fn time_since(&self, start: &Arc<Event>, records: (u64, u64)) -> Option<f32> {
        let mut times = lock(&self.times);
        let time = times.iter_mut().find(|time| time.is_since(start))?;
        match std::mem::replace(&mut time.answer, TimeAnswer::Missed) {
            TimeAnswer::Told(milliseconds) if time.records == records => {
                time.answer = TimeAnswer::Told(milliseconds);
                Some(milliseconds)
            }
            TimeAnswer::Ahead(ahead) if time.records == records => {
                drop(times);
                // A server that could not tell is asked again.
                let milliseconds = ahead.take().ok()?.milliseconds;
                self.keep_time(start, records, milliseconds, true);
                Some(milliseconds)
            }
            TimeAnswer::Told(_) | TimeAnswer::Ahead(_) | TimeAnswer::Missed => None,
        }
    }

    /// Keeps what the program is told of the time from `start`; `ahead`: it had come ahead.
    fn keep_time(&self, start: &Arc<Event>, records: (u64, u64), milliseconds: f32, ahead: bool) {
        let mut times = lock(&self.times);
        let earlier = times.iter().position(|time| time.is_since(start)).map(|at| times.remove(at));
        if times.len() >= MOST_STARTS {
            times.remove(0);
        }
        let misses = match earlier {
            Some(Time { answer: TimeAnswer::Missed, misses, .. }) if !ahead => misses + 1,
            Some(Time { misses, .. }) if !ahead => misses,
            _ => 0,
        };
        let answer = TimeAnswer::Told(milliseconds);
        times.push(Time { start: Arc::downgrade(start), records, answer, misses });
        self.is_measured.store(true, Ordering::Relaxed);
    }

    /// Waits for its last record.
    fn synchronize(&self, driver: &Driver) -> Result {
        let last = self.last();
        let result = driver.session.call(&EventSynchronize { event: self.id }).map(|_| ());
        if let (Ok(()), Some((stream, seq))) = (&result, last) {
            stream.is_synced(seq);
        }
        self.context.settle(driver, result)
    }
}

/// The event that a handle names.
pub(crate) fn of(handle: usize) -> Result<Arc<Event>> {
    driver()?;
    EVENTS.get(handle).ok_or(Status::INVALID_HANDLE)
}

/// A context's events are gone with it. `with_server`: the server destroys them by itself.
pub(crate) fn forget(driver: &Driver, context: &'static Context, with_server: bool) {
    for event in EVENTS.remove_where(|event| std::ptr::eq(event.context, context)) {
        if !with_server && driver.session.append(&EventDestroy { event: event.id }).is_err() {
            return;
        }
        lock(&IDS).push(event.id.0);
    }
}

/// Records an event on a stream that is not being captured.
pub(crate) fn record_on(driver: &Driver, event: &Event, stream: Arc<Stream>) -> Result {
    if stream.context.device != event.context.device {
        return Err(Status::INVALID_HANDLE);
    }
    *lock(&event.captured) = None;
    // The lock is kept meanwhile: what the event says last is what was recorded last.
    let mut last = lock(&event.last);
    let seq =
        stream.publishing_work(driver, &EventRecord { event: event.id, stream: stream.id, flags: 0 })?;
    *last = Some((stream, seq));
    drop(last);
    event.arrive(driver)
}

/// An event of this library's own.
pub(crate) fn own(driver: &Driver, context: &'static Context) -> Result<Event> {
    make(driver, context, DISABLE_TIMING)
}

/// The end of an event of this library's own. `with_server`: the server destroys it by itself.
pub(crate) fn end(driver: &Driver, event: &Event, with_server: bool) {
    // A lost session has no events.
    if with_server || driver.session.append(&EventDestroy { event: event.id }).is_ok() {
        lock(&IDS).push(event.id.0);
    }
}

fn make(driver: &Driver, context: &'static Context, flags: u32) -> Result<Event> {
    let id = EventId(lock(&IDS).pop().unwrap_or_else(|| IDS_FRESH.fetch_add(1, Ordering::Relaxed)));
    driver.session.append(&EventCreate { context: context.id, event: id, flags })?;
    Ok(Event::new(id, context, flags))
}

/// The token under which other processes find an event that was made for them.
pub(crate) fn export(driver: &Driver, handle: usize) -> Result<[u8; 16]> {
    let event = of(handle)?;
    if !event.is_shared() {
        return Err(Status::INVALID_VALUE);
    }
    Ok(driver.session.call(&EventExport { event: event.id })?.token)
}

/// An event of another process.
pub(crate) fn import(driver: &Driver, context: &'static Context, token: [u8; 16]) -> Result<usize> {
    let id = EventId(lock(&IDS).pop().unwrap_or_else(|| IDS_FRESH.fetch_add(1, Ordering::Relaxed)));
    if let Err(status) = driver.session.call(&EventImport { context: context.id, event: id, token }) {
        lock(&IDS).push(id.0);
        return Err(status);
    }
    let flags = INTERPROCESS | DISABLE_TIMING;
    EVENTS.insert(Arc::new(Event::new(id, context, flags))).ok_or(Status::OUT_OF_MEMORY)
}

fn record(handle: usize, stream: usize, per_thread: bool, flags: u32) -> Result {
    let event = of(handle)?;
    // 1 is CU_EVENT_RECORD_EXTERNAL, which is for captures alone.
    if flags & !1 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let driver = driver()?;
    let stream = match stream {
        // A NULL stream is the event's context's.
        0 | stream::LEGACY | stream::PER_THREAD => {
            stream::any(driver, context::current()?, stream, per_thread)?
        }
        handle => stream::any(driver, event.context, handle, per_thread)?,
    };
    driver.session.check()?;
    stream.context.deferred(driver)?;
    if let Some(capture) = stream.capture() {
        if flags != 0 {
            return capture.add(&stream, Work::Record(handle));
        }
        let point = capture.point(&stream);
        *lock(&event.captured) = Some((capture, point));
        return Ok(());
    }
    if flags != 0 {
        return Err(code::ILLEGAL_STATE);
    }
    record_on(driver, &event, stream)?;
    event.ask_ahead(driver);
    Ok(())
}

fn elapsed(milliseconds: *mut f32, start: usize, end: usize) -> Result {
    non_null(milliseconds)?;
    let (start, end) = (of(start)?, of(end)?);
    let driver = driver()?;
    driver.session.check()?;
    start.check()?;
    end.check()?;
    start.context.deferred(driver)?;
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Status::INVALID_HANDLE);
    }
    let (Some((_, from)), Some((_, to))) = (start.last(), end.last()) else {
        return Err(Status::INVALID_HANDLE);
    };
    let records = (from, to);
    if start.context.device != end.context.device {
        return Err(Status::INVALID_HANDLE);
    }
    if !start.is_over(driver)? || !end.is_over(driver)? {
        return Err(Status::NOT_READY);
    }
    let time = match end.time_since(&start, records) {
        Some(time) => time,
        None => {
            let reply = driver.session.call(&EventElapsed { start: start.id, end: end.id })?;
            end.keep_time(&start, records, reply.milliseconds, false);
            reply.milliseconds
        }
    };
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(milliseconds, time) }
}

api! {
    fn cuEventCreate(event: *mut usize, flags: u32) {
        non_null(event)?;
        if flags & !7 != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let (driver, context) = context::ready()?;
        let device = driver::device(context.device as i32)?;
        if flags & INTERPROCESS != 0 && device.attribute(attr::IPC_EVENT_SUPPORTED) == 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        put(event, EVENTS.insert(Arc::new(make(driver, context, flags)?)).ok_or(Status::OUT_OF_MEMORY)?)
    }

    fn cuEventDestroy_v2(event: usize) {
        let driver = driver()?;
        let event = EVENTS.remove(event).ok_or(Status::INVALID_HANDLE)?;
        driver.session.append(&EventDestroy { event: event.id })?;
        lock(&IDS).push(event.id.0);
        event.context.deferred(driver)
    }
    alias cuEventDestroy = cuEventDestroy_v2(event: usize);

    fn cuEventRecord / cuEventRecord_ptsz(event: usize, stream: usize) |pt| {
        record(event, stream, pt, 0)
    }

    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz(event: usize, stream: usize, flags: u32) |pt| {
        record(event, stream, pt, flags)
    }

    fn cuEventQuery(event: usize) {
        let event = of(event)?;
        let driver = driver()?;
        driver.session.check()?;
        event.check()?;
        capture::unsafe_call()?;
        event.context.deferred(driver)?;
        let done = if event.is_shared() { event.ask(driver)? } else { event.is_over(driver)? };
        if !done {
            return Err(Status::NOT_READY);
        }
        shared_blocks::after_wait(driver);
        event.context.deferred(driver)
    }

    fn cuEventSynchronize(event: usize) {
        let event = of(event)?;
        let driver = driver()?;
        host_function::forbid()?;
        driver.session.check()?;
        event.check()?;
        capture::unsafe_call()?;
        event.context.deferred(driver)?;
        if event.is_shared() {
            let result = event.await_shared(driver);
            shared_blocks::after_wait(driver);
            return event.context.settle(driver, result);
        }
        if event.is_done(driver) {
            driver.session.show_output();
            shared_blocks::after_wait(driver);
            return event.context.deferred(driver);
        }
        let result = event.synchronize(driver);
        shared_blocks::after_wait(driver);
        result
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }
    alias cuEventElapsedTime_v2 = cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
}
