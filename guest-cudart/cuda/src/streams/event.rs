//! Events.
//!
//! An event's record publishes in its stream's progress word, so that a query is a read of memory.
//!
//! Programs that measure ask for the time between the same two events in every step, after they have waited. So once a program has asked for the time from one event to another, it is asked for
//! ahead, right behind each record of the latter: the server answers when that record is done, and the answer is here when the program asks. An event whose answers
//! are not used is asked about no more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::abi::result::{Result, code};
use crate::process::capture::Capture;
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::ids;
use crate::process::stream::Stream;
use client::handle::EventId;
use client::handles::Slab;
use client::ops::event::{
    EventCreate, EventDestroy, EventElapsed, EventElapsedReply, EventRecord, EventSynchronize,
};
use client::ops::memory::{EventExport, EventImport, EventQuery};
use client::ops::stream::StreamWaitEvent;
use client::session::Ahead;
use client::{Status, lock};

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

pub(crate) const DISABLE_TIMING: u32 = 2;
pub(crate) const INTERPROCESS: u32 = 4;
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
    pub context: &'static Context,
    pub flags: u32,
    last: Mutex<Option<(Arc<Stream>, u64)>>,
    /// What it stands for, if it was last recorded on a stream that was being captured.
    pub captured: Mutex<Option<(Arc<Capture>, Vec<u64>)>>,
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

pub(crate) static EVENTS: Slab<Event> = Slab::new(3);

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
    pub fn ask(&self, driver: &Driver) -> Result<bool> {
        Ok(driver.session.call(&EventQuery { event: self.id })?.done)
    }

    /// For a shared event: returns when the server has executed what was said of it. The program may tell another process, whose commands reach the server by another way.
    pub fn arrive(&self, driver: &Driver) -> Result {
        if self.is_shared() { self.ask(driver).map(|_| ()) } else { Ok(()) }
    }

    /// Waits for its last record, by whichever process.
    pub fn await_shared(&self, driver: &Driver) -> Result {
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
    pub fn check(&self) -> Result {
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
    pub fn is_done(&self, driver: &Driver) -> bool {
        lock(&self.last).as_ref().is_none_or(|(stream, seq)| stream.has_passed(driver, *seq))
    }

    /// Whether its last record is done; waits for it if the program was told that it is.
    pub fn is_over(&self, driver: &Driver) -> Result<bool> {
        if self.is_done(driver) {
            return Ok(true);
        }
        match self.last() {
            Some((stream, seq)) if stream.has_promised(seq) => self.synchronize(driver).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Has just been recorded: asks ahead for the times that the program has used since the record before.
    pub fn ask_ahead(&self, driver: &'static Driver) {
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
    pub fn time_since(&self, start: &Arc<Event>, records: (u64, u64)) -> Option<f32> {
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
    pub fn keep_time(&self, start: &Arc<Event>, records: (u64, u64), milliseconds: f32, ahead: bool) {
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
    pub fn synchronize(&self, driver: &Driver) -> Result {
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
        ids::EVENTS.give_back(event.id.0);
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

pub(crate) fn make(driver: &Driver, context: &'static Context, flags: u32) -> Result<Event> {
    let id = EventId(ids::EVENTS.take().ok_or(Status::OUT_OF_MEMORY)?);
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
    let id = EventId(ids::EVENTS.take().ok_or(Status::OUT_OF_MEMORY)?);
    if let Err(status) = driver.session.call(&EventImport { context: context.id, event: id, token }) {
        ids::EVENTS.give_back(id.0);
        return Err(status);
    }
    let flags = INTERPROCESS | DISABLE_TIMING;
    EVENTS.insert(Arc::new(Event::new(id, context, flags))).ok_or(Status::OUT_OF_MEMORY)
}
