//! Events.
//!
//! An event's record publishes in its stream's progress word, so that a query is a read of memory.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::capture::{self, Capture};
use crate::context::{self, Context};
use crate::device::attr;
use crate::graph::Work;
use crate::state::{self, Driver, driver};
use crate::stream::{self, Stream};
use crate::{Result, callback, code, managed, non_null, put};
use client::handle::EventId;
use client::handles::Slab;
use client::ops::event::{EventCreate, EventDestroy, EventElapsed, EventRecord, EventSynchronize};
use client::ops::memory::{EventExport, EventImport, EventQuery};
use client::{Status, lock};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
/// Between two questions after a shared event: nothing tells this process of what another has recorded.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LAST_PAUSE: Duration = Duration::from_millis(1);

/// An event.
pub(crate) struct Event {
    pub id: EventId,
    context: &'static Context,
    flags: u32,
    last: Mutex<Option<(Arc<Stream>, u64)>>,
    /// What it stands for, if it was last recorded on a stream that was being captured.
    captured: Mutex<Option<(Arc<Capture>, Vec<u64>)>>,
}

static EVENTS: Slab<Event> = Slab::new(3);
static IDS: Mutex<Vec<u32>> = Mutex::new(Vec::new());
static IDS_FRESH: AtomicU32 = AtomicU32::new(0);

impl Event {
    /// Whether it was ever recorded: if not, there is nothing to wait for.
    fn is_recorded(&self) -> bool {
        lock(&self.last).is_some()
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
    Ok(Event { id, context, flags, last: Mutex::new(None), captured: Mutex::new(None) })
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
    let event = Event { id, context, flags, last: Mutex::new(None), captured: Mutex::new(None) };
    EVENTS.insert(Arc::new(event)).ok_or(Status::OUT_OF_MEMORY)
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
    record_on(driver, &event, stream)
}

fn elapsed(milliseconds: *mut f32, start: usize, end: usize) -> Result {
    non_null(milliseconds)?;
    let (start, end) = (of(start)?, of(end)?);
    let driver = driver()?;
    driver.session.check()?;
    start.check()?;
    end.check()?;
    start.context.deferred(driver)?;
    if (start.flags | end.flags) & DISABLE_TIMING != 0 || !start.is_recorded() || !end.is_recorded() {
        return Err(Status::INVALID_HANDLE);
    }
    if start.context.device != end.context.device {
        return Err(Status::INVALID_HANDLE);
    }
    if !start.is_over(driver)? || !end.is_over(driver)? {
        return Err(Status::NOT_READY);
    }
    let reply = driver.session.call(&EventElapsed { start: start.id, end: end.id })?;
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(milliseconds, reply.milliseconds) }
}

api! {
    fn cuEventCreate(event: *mut usize, flags: u32) {
        non_null(event)?;
        if flags & !7 != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let (driver, context) = context::ready()?;
        let device = state::device(context.device as i32)?;
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
        managed::together::after_wait(driver);
        event.context.deferred(driver)
    }

    fn cuEventSynchronize(event: usize) {
        let event = of(event)?;
        let driver = driver()?;
        callback::forbid()?;
        driver.session.check()?;
        event.check()?;
        capture::unsafe_call()?;
        event.context.deferred(driver)?;
        if event.is_shared() {
            let result = event.await_shared(driver);
            managed::together::after_wait(driver);
            return event.context.settle(driver, result);
        }
        if event.is_done(driver) {
            driver.session.show_output();
            managed::together::after_wait(driver);
            return event.context.deferred(driver);
        }
        let result = event.synchronize(driver);
        managed::together::after_wait(driver);
        result
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }
    alias cuEventElapsedTime_v2 = cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
}
