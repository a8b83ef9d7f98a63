//! Events.
//!
//! A recorded event raises its stream's progress word, so a query only reads memory.
//!
//! Programs that measure time ask for the time between the same two events in every step. So once a program
//! has asked for the time from one event to another, this library requests it in advance, right after each
//! record of the second event. The server answers when that record has finished, and the answer is here when
//! the program asks. If a program does not use the answers for an event, the requests stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::abi::result::{Result, code};
use crate::process::capture::Capture;
use crate::process::context::Context;
use crate::process::driver::driver;
use crate::process::ids::{self, WithContext};
use crate::process::server_waits;
use crate::process::stream::Stream;
use client::handle::EventId;
use client::handles::Slab;
use client::ops::event::{
    EventCreate, EventDestroy, EventElapsed, EventElapsedReply, EventRecord, EventSynchronize,
};
use client::ops::memory::{EventExport, EventImport, EventQuery};
use client::ops::stream::StreamWaitEvent;
use client::seq::Seq;
use client::session::Ahead;
use client::{Status, lock};

/// Makes a stream wait for an event's last record, if there is one.
pub(crate) fn wait(stream: &Arc<Stream>, event: &Event) -> Result {
    // The lock is held until the server has been asked, so that another thread's record does not come in
    // between: the stream would wait for that one, and the last one would seem to be done.
    let last = lock(&event.last);
    if last.is_none() && !event.is_shared() {
        return Ok(());
    }
    if !std::ptr::eq(stream.session(), event.context.session()) {
        let known = last.clone();
        drop(last);
        return wait_for_other_server(stream, event, known);
    }
    let seq = stream.work(&StreamWaitEvent { stream: stream.id, event: event.id, flags: 0 })?;
    if let Some((other, record)) = &*last {
        stream.waits_for(seq, other, *record);
    }
    drop(last);
    // Records that another process makes later don't matter.
    event.arrive()
}

/// Makes a stream wait for an event of another server.
fn wait_for_other_server(stream: &Arc<Stream>, event: &Event, last: Option<(Arc<Stream>, Seq)>) -> Result {
    match last {
        Some((other, record)) if !event.is_shared() => server_waits::hold(stream, &other, record),
        // Its server does not tell this process when another one's record is passed.
        _ => refuse_form!("waiting for another process's event on a GPU of another server"),
    }
}

pub(crate) const DISABLE_TIMING: u32 = 2;
pub(crate) const INTERPROCESS: u32 = 4;
/// Pauses between queries of a shared event. Nothing notifies this process of other processes' records.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LAST_PAUSE: Duration = Duration::from_millis(1);
/// Maximum number of start events that an event keeps a time for.
const MOST_STARTS: usize = 4;
/// After this many unused answers in a row, times for an event are no longer requested in advance.
const MOST_MISSES: u32 = 3;

/// An event.
pub(crate) struct Event {
    pub id: EventId,
    pub context: &'static Context,
    pub flags: u32,
    last: Mutex<Option<(Arc<Stream>, Seq)>>,
    /// The point in a capture that it stands for, if it was last recorded on a captured stream.
    pub captured: Mutex<Option<(Arc<Capture>, Vec<u64>)>>,
    /// Times to it from events that the program has asked for. The most recent is the last.
    times: Mutex<Vec<Time>>,
    /// Whether there are any. Checked at each record.
    is_measured: AtomicBool,
}

/// The time from one event to another.
struct Time {
    start: Weak<Event>,
    /// `seq` of the two records that it is the time between.
    records: (Seq, Seq),
    answer: TimeAnswer,
    /// Number of unused answers in a row.
    misses: u32,
}

enum TimeAnswer {
    /// Milliseconds, as returned to the program.
    Told(f32),
    /// Requested in advance.
    Ahead(Ahead<'static, EventElapsedReply>),
    /// Requested in advance, and not used.
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

    /// Whether other processes may have recorded it.
    pub fn is_shared(&self) -> bool {
        self.flags & INTERPROCESS != 0
    }

    /// Asks the server whether its last record, by any process, has finished.
    pub fn ask(&self) -> Result<bool> {
        Ok(self.context.session().call(&EventQuery { event: self.id })?.done)
    }

    /// For a shared event: returns once the server has executed the commands about it, so that the program
    /// may notify another process, whose commands reach the server on another connection.
    pub fn arrive(&self) -> Result {
        if self.is_shared() { self.ask().map(|_| ()) } else { Ok(()) }
    }

    /// Waits for its last record, by any process.
    pub fn await_shared(&self) -> Result {
        let mut pause = FIRST_PAUSE;
        while !self.ask()? {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
        Ok(())
    }

    /// The capture that it was last recorded in, and the nodes that it stands for.
    pub fn captured(&self) -> Option<(Arc<Capture>, Vec<u64>)> {
        lock(&self.captured).clone()
    }

    /// Fails for an event that was recorded in a capture. It is never reached, and the query invalidates the
    /// capture.
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
    pub fn last(&self) -> Option<(Arc<Stream>, Seq)> {
        lock(&self.last).clone()
    }

    /// Whether its last record is done.
    pub fn is_done(&self) -> bool {
        lock(&self.last).as_ref().is_none_or(|(stream, seq)| stream.has_passed(*seq))
    }

    /// Whether its last record is done. Waits for it if the program was told that it is done.
    pub fn is_over(&self) -> Result<bool> {
        if self.is_done() {
            return Ok(true);
        }
        match self.last() {
            Some((stream, seq)) if stream.has_promised(seq) => self.synchronize().map(|()| true),
            _ => Ok(false),
        }
    }

    /// Called when it was recorded. Requests the times that the program has used since the previous record.
    pub fn ask_ahead(&self) {
        if !self.is_measured.load(Ordering::Relaxed) {
            return;
        }
        let mut times = lock(&self.times);
        times.retain_mut(|time| {
            let Some(start) = time.start.upgrade() else { return false };
            if time.misses >= MOST_MISSES {
                return true;
            }
            match time.answer {
                TimeAnswer::Told(_) => {}
                // Some programs always record an event twice before they ask for the time.
                TimeAnswer::Ahead(_) if time.misses + 1 < MOST_MISSES => time.misses += 1,
                TimeAnswer::Ahead(_) | TimeAnswer::Missed => return false,
            }
            let (Some((_, from)), Some((_, to))) = (start.last(), self.last()) else { return false };
            let question = EventElapsed { start: start.id, end: self.id };
            // Without a free slot, the program's call will ask the server.
            if let Ok(Some(ahead)) = self.context.session().submit_ahead(&question) {
                (time.records, time.answer) = ((from, to), TimeAnswer::Ahead(ahead));
            }
            true
        });
        self.is_measured.store(!times.is_empty(), Ordering::Relaxed);
    }

    /// The time from `start` between these records, if it is known or was requested in advance.
    pub fn time_since(&self, start: &Arc<Event>, records: (Seq, Seq)) -> Option<f32> {
        let mut times = lock(&self.times);
        let time = times.iter_mut().find(|time| time.is_since(start))?;
        match std::mem::replace(&mut time.answer, TimeAnswer::Missed) {
            TimeAnswer::Told(milliseconds) if time.records == records => {
                time.answer = TimeAnswer::Told(milliseconds);
                Some(milliseconds)
            }
            TimeAnswer::Ahead(ahead) if time.records == records => {
                drop(times);
                // If the server could not answer, it is asked again.
                let milliseconds = ahead.take().ok()?.milliseconds;
                self.keep_time(start, records, milliseconds, true);
                Some(milliseconds)
            }
            TimeAnswer::Told(_) | TimeAnswer::Ahead(_) | TimeAnswer::Missed => None,
        }
    }

    /// Keeps the time from `start` that the program gets. `ahead`: whether it was requested in advance.
    pub fn keep_time(&self, start: &Arc<Event>, records: (Seq, Seq), milliseconds: f32, ahead: bool) {
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
    pub fn synchronize(&self) -> Result {
        let before = self.last();
        let session = self.context.session();
        let pending = match (session.slot_to_wait()?, &before) {
            (Some(slot), _) => slot.submit(&EventSynchronize { event: self.id })?,
            // Many threads wait already. The record is seen without a slot, too.
            (None, Some((stream, seq))) => {
                let result = session.wait_progress(|| stream.has_passed(*seq));
                if result.is_ok() {
                    stream.is_synced(*seq);
                }
                return self.context.settle(result);
            }
            (None, None) => return self.context.deferred(),
        };
        // The server waits for the last record that it has when it is asked. That may be another thread's.
        let is_same = |other: &(Arc<Stream>, Seq)| {
            before.as_ref().is_some_and(|last| Arc::ptr_eq(&last.0, &other.0) && last.1 == other.1)
        };
        let last = self.last().filter(is_same);
        let result = pending.wait().map(|_| ());
        if let (Ok(()), Some((stream, seq))) = (&result, last) {
            stream.is_synced(seq);
        }
        self.context.settle(result)
    }
}

/// The event of a handle.
pub(crate) fn of(handle: usize) -> Result<Arc<Event>> {
    driver()?;
    EVENTS.get(handle).ok_or(Status::INVALID_HANDLE)
}

/// Destroys a context's events. `with_context`: the server destroys its own with the context.
pub(crate) fn forget(context: &'static Context, mut with_context: Option<&mut WithContext>) {
    for event in EVENTS.remove_where(|event| std::ptr::eq(event.context, context)) {
        if let Some(ended) = &mut with_context {
            ended.events.push(event.id.0);
        } else if context.session().append(&EventDestroy { event: event.id }).is_ok() {
            ids::EVENTS.give_back(event.id.0);
        } else {
            return;
        }
    }
}

/// Records an event on a stream that is not being captured.
pub(crate) fn record_on(event: &Event, stream: Arc<Stream>) -> Result {
    if !std::ptr::eq(stream.context, event.context) {
        return Err(Status::INVALID_HANDLE);
    }
    *lock(&event.captured) = None;
    // The lock is held until the event is updated, so that it stands for the last record.
    let mut last = lock(&event.last);
    let seq = stream.publishing_work(&EventRecord { event: event.id, stream: stream.id, flags: 0 })?;
    *last = Some((stream, seq));
    drop(last);
    event.arrive()
}

/// Records an event on a stream in a capture: it stands for what the stream's next node depends on.
pub(crate) fn record_in(event: &Event, capture: Arc<Capture>, stream: &Stream) {
    let point = capture.point(stream.unique());
    *lock(&event.captured) = Some((capture, point));
}

pub(crate) fn make(context: &'static Context, flags: u32) -> Result<Event> {
    let id = EventId(ids::EVENTS.take().ok_or(Status::OUT_OF_MEMORY)?);
    context.session().append(&EventCreate { context: context.id, event: id, flags })?;
    Ok(Event::new(id, context, flags))
}

/// The token under which other processes find an event that was made for them.
pub(crate) fn export(handle: usize) -> Result<[u8; 16]> {
    let event = of(handle)?;
    if !event.is_shared() {
        return Err(Status::INVALID_VALUE);
    }
    Ok(event.context.session().call(&EventExport { event: event.id })?.token)
}

/// An event of another process.
pub(crate) fn import(context: &'static Context, token: [u8; 16]) -> Result<usize> {
    let id = EventId(ids::EVENTS.take().ok_or(Status::OUT_OF_MEMORY)?);
    if let Err(status) = context.session().call(&EventImport { context: context.id, event: id, token }) {
        ids::EVENTS.give_back(id.0);
        return Err(status);
    }
    let flags = INTERPROCESS | DISABLE_TIMING;
    EVENTS.insert(Arc::new(Event::new(id, context, flags))).ok_or(Status::OUT_OF_MEMORY)
}
