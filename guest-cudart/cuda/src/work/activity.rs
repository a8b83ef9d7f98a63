//! Device activity for a profiler of this process: the servers' records, matched with the calls that caused
//! them, in this machine's time.
//!
//! A server's clock is compared with this machine's by asking it for the time, which it is assumed to read
//! halfway between question and answer. This is done when recording starts and whenever records are read; in
//! between, the difference is assumed to change linearly. Work cannot start before its command was appended:
//! records that seem to are moved, and with them those that follow on the same stream, as far as they would
//! otherwise begin too early.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_char;
use std::sync::Mutex;

use crate::abi::result::Result;
use crate::code::names;
use crate::memory::staging::Staging;
use crate::process::driver::{self, Driver, Server};
use client::channel::MAX_CONTEXTS;
use client::data::HostOut;
use client::ops::activity::{
    ActivityClock, ActivityRead, ActivityRecord, ActivityRecords, ActivityStart, ActivityStop, MOST_RECORDS,
    kind,
};
use client::seq::Seq;
use client::session::Session;
use client::{Status, activity, lock, log};

/// Bytes of records read at a time.
const ROOM: usize = 1 << 20;
/// How often a server is asked for the time. The fastest answer counts.
const QUESTIONS: usize = 8;
/// Maximum records of one session read at a time: more than a server keeps.
const MOST: usize = 2 * MOST_RECORDS;
/// CUPTI's number for the legacy default stream.
const DEFAULT_STREAM: u32 = 7;
/// CUPTI's number for the first other stream.
const FIRST_STREAM: u32 = 13;
/// `CUpti_ActivityMemoryKind`: pageable and pinned memory.
const PAGEABLE: u8 = 1;
const PINNED: u8 = 2;

/// One piece of device work, in C layout.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct DeviceRecord {
    /// One of [`kind`].
    kind: u32,
    correlation: u32,
    device: u32,
    context: u32,
    stream: u32,
    registers: u32,
    local: u32,
    value: u32,
    /// Nanoseconds since 1970, by this machine's clock.
    begin: u64,
    end: u64,
    bytes: u64,
    node: u64,
    graph: u32,
    /// For a copy, its kind and the kinds of the source and destination memory; for a fill, the last of
    /// these.
    memory: [u8; 4],
    /// Device ordinals of a copy's source and destination.
    ends: [u32; 2],
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    shared: [u32; 2],
    /// The kernel's name, kept until the process ends. NULL for other work.
    name: *const c_char,
}

/// How a server's clock differs from this machine's.
#[derive(Debug, Clone, Copy)]
struct Clock {
    /// This machine's time and the server's minus this one's, when recording started and at the last
    /// comparison.
    first: (u64, i64),
    last: (u64, i64),
}

impl Clock {
    /// Converts a server's time to this machine's clock.
    fn here(&self, server: u64) -> u64 {
        let (begin, end) = (self.first, self.last);
        let guess = server.wrapping_sub(begin.1.cast_unsigned());
        let span = end.0.saturating_sub(begin.0);
        let passed = guess.saturating_sub(begin.0).min(span);
        let difference = i128::from(end.1) - i128::from(begin.1);
        let drift = difference * i128::from(passed) / i128::from(span.max(1));
        server.wrapping_sub(begin.1.wrapping_add(drift as i64).cast_unsigned())
    }
}

/// One for each recording session.
static CLOCKS: Mutex<Vec<Option<Clock>>> = Mutex::new(Vec::new());
/// What was read last of each stream of each session.
static LAST: Mutex<BTreeMap<(usize, u32), Last>> = Mutex::new(BTreeMap::new());

/// When a record ended.
#[derive(Debug, Clone, Copy, Default)]
struct Last {
    /// In the server's time.
    there: u64,
    /// In this machine's, as it was reported.
    here: u64,
}

impl Last {
    /// When the next record began and ended in this machine's time, if that seems to be `here` and was
    /// `there` on the server: what began after something else on the server does so here.
    fn follow(&mut self, there: (u64, u64), here: (u64, u64)) -> (u64, u64) {
        let early = if there.0 < self.there { 0 } else { self.here.saturating_sub(here.0) };
        let moved = (here.0.saturating_add(early), here.1.max(here.0).saturating_add(early));
        if there.1 >= self.there {
            *self = Last { there: there.1, here: moved.1 };
        }
        moved
    }
}

static DROPPED: Mutex<u64> = Mutex::new(0);
/// This machine's time, and the server's minus that.
fn compare(session: &Session) -> Result<(u64, i64)> {
    let mut best: Option<(u64, u64, i64)> = None;
    for _ in 0..QUESTIONS {
        let begin = activity::now();
        let there = session.call(&ActivityClock {})?.now;
        let end = activity::now();
        let (took, here) = (end.saturating_sub(begin), begin / 2 + end / 2);
        if best.is_none_or(|(before, ..)| took < before) {
            best = Some((took, here, there.wrapping_sub(here).cast_signed()));
        }
    }
    best.map(|(_, here, difference)| (here, difference)).ok_or(Status::UNKNOWN)
}

/// Asks the servers that are not lost, each with its index. None keeps another from being asked. Returns the
/// first error of one that is not lost, or if all are, the first one's.
fn each(driver: &Driver, mut ask: impl FnMut(usize, &Server) -> Result) -> Result {
    let mut asked = Ok(());
    for (index, server) in driver.servers.iter().enumerate() {
        if server.session.check().is_err() {
            continue;
        }
        let answer = ask(index, server);
        if server.session.check().is_ok() {
            asked = asked.and(answer);
        }
    }
    driver.check().and(asked)
}

/// Makes the process's servers record what their devices do.
///
/// # Errors
/// `NOT_SUPPORTED` if one cannot, with a line on stderr. Then none does.
pub(crate) fn start() -> Result {
    let driver = driver::init()?;
    activity::forget();
    *lock(&DROPPED) = 0;
    lock(&LAST).clear();
    let mut clocks = vec![None; driver.servers.len()];
    let started = each(driver, |index, server| {
        let now = start_on(server.session)?;
        clocks[index] = Some(Clock { first: now, last: now });
        Ok(())
    });
    match started {
        Ok(()) => *lock(&CLOCKS) = clocks,
        // The first error is the one to report.
        Err(_) => _ = stop_all(driver),
    }
    started
}

/// Makes one server record, and compares its clock.
fn start_on(session: &Session) -> Result<(u64, i64)> {
    let started = session.call(&ActivityStart {});
    if started.as_ref().err() == Some(&Status::NOT_SUPPORTED) {
        log::warn(format_args!(
            "the server cannot tell what its GPU does, because it has no CUPTI: profilers see no kernels and copies (`rgpuctl doctor` says more)"
        ));
    }
    started?;
    compare(session)
}

/// Stops recording.
pub(crate) fn stop() -> Result {
    stop_all(driver::driver()?)
}

fn stop_all(driver: &Driver) -> Result {
    each(driver, |_, server| server.session.call(&ActivityStop {}).map(drop))
}

/// Records lost for lack of space since the last call.
pub(crate) fn dropped() -> u64 {
    std::mem::take(&mut *lock(&DROPPED))
}

/// CUPTI's number for a stream.
pub(crate) fn stream_number(id: u32) -> u32 {
    match id.checked_sub(MAX_CONTEXTS) {
        None => DEFAULT_STREAM,
        Some(more) => FIRST_STREAM.saturating_add(more),
    }
}

/// CUPTI's number for the context of a device.
pub(crate) fn context_number(ordinal: u32) -> u32 {
    ordinal + 1
}

/// Reads all records. `flush`: including those that the driver has not delivered to the server yet.
pub(crate) fn read(flush: bool, mut sink: impl FnMut(&DeviceRecord)) -> Result {
    let driver = driver::driver()?;
    each(driver, |index, server| {
        let Some(mut clock) = lock(&CLOCKS).get(index).copied().flatten() else { return Ok(()) };
        clock.last = compare(server.session)?;
        if let Some(kept) = lock(&CLOCKS).get_mut(index) {
            *kept = Some(clock);
        }
        let mut copies = Copies::new();
        let read = read_from(driver, server.session, &clock, flush, &mut copies, &mut sink);
        // Also if that failed: the server has them no more.
        copies.values().for_each(&mut sink);
        read
    })
}

/// The program's copies whose pieces have been read, by correlation and kinds of memory.
type Copies = HashMap<(u32, [u8; 4]), DeviceRecord>;

/// Reads a server's records.
fn read_from(
    driver: &Driver,
    session: &'static Session,
    clock: &Clock,
    mut flush: bool,
    copies: &mut Copies,
    mut sink: impl FnMut(&DeviceRecord),
) -> Result {
    let room = ROOM.min(session.arena().largest());
    let staging = Staging::new(session, room)?;
    let mut count = 0;
    while count < MOST {
        let reply = session.call(&ActivityRead { out: HostOut(staging.range(room)), flush })?;
        flush = false;
        {
            let mut dropped = lock(&DROPPED);
            *dropped = dropped.saturating_add(reply.dropped);
        }
        let len = usize::try_from(reply.bytes).map_err(|_| Status::UNKNOWN)?;
        if len == 0 {
            break;
        }
        if len > room {
            return Err(Status::UNKNOWN);
        }
        // SAFETY: inside the staging memory. The server has answered and writes no more; if it did, it
        // could only corrupt its own data until the copy is made.
        let bytes = unsafe { std::slice::from_raw_parts(staging.ptr(), len) }.to_vec();
        let batch = client::ops::decode_reply::<ActivityRecords>(&bytes).map_err(|_| Status::UNKNOWN)?;
        count += batch.records.len().max(1);
        for record in &batch.records {
            let Some(work) = activity::work(Seq::of_server(session.index(), record.seq)) else {
                continue;
            };
            let found = describe(driver, session, clock, record, &batch, work);
            // The pieces of one of the program's copies become one record.
            if record.kind == kind::COPY && record.graph == 0 {
                let key = (work.correlation, found.memory);
                let known = copies.entry(key).or_insert(DeviceRecord { bytes: 0, ..found.clone() });
                known.bytes = known.bytes.saturating_add(found.bytes);
                (known.begin, known.end) = (known.begin.min(found.begin), known.end.max(found.end));
            } else {
                sink(&found);
            }
        }
    }
    Ok(())
}

fn describe(
    driver: &Driver,
    session: &Session,
    clock: &Clock,
    record: &ActivityRecord,
    batch: &ActivityRecords,
    work: activity::Work,
) -> DeviceRecord {
    let ordinal = |number: u32| {
        let own = |device: &&driver::Device| {
            device.server.session.index() == session.index() && device.number == number
        };
        driver.devices.iter().find(own).map_or(0, |device| device.ordinal)
    };
    let device = ordinal(record.device);
    let (begin, end) = (clock.here(record.begin), clock.here(record.end));
    let late = work.at.saturating_sub(begin);
    let stream = (session.index(), record.stream);
    let (begin, end) = lock(&LAST).entry(stream).or_default().follow(
        (record.begin, record.end),
        (begin.saturating_add(late), end.max(begin).saturating_add(late)),
    );
    let host = |kind: u8| if work.pageable && kind == PINNED { PAGEABLE } else { kind };
    let [copy, from, to] = record.memory;
    DeviceRecord {
        kind: record.kind,
        correlation: work.correlation,
        device,
        context: context_number(device),
        stream: stream_number(record.stream),
        registers: record.registers,
        local: record.local,
        value: record.value,
        begin,
        end,
        bytes: record.bytes,
        node: record.node,
        graph: if work.graph == 0 { record.graph } else { work.graph },
        memory: [copy, host(from), host(to), 0],
        ends: record.ends.map(ordinal),
        grid: record.grid,
        block: record.block,
        cluster: record.cluster,
        shared: record.shared,
        name: match batch.names.get(record.name as usize) {
            Some(text) if record.kind == kind::KERNEL => {
                names::kept(text.as_bytes()).unwrap_or_default().as_ptr()
            }
            _ => std::ptr::null(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_time_is_converted_to_this_machines_clock() {
        let steady = Clock { first: (1000, 500), last: (1000, 500) };
        assert_eq!((steady.here(1500), steady.here(2500)), (1000, 2000));
        let drifting = Clock { first: (1000, 500), last: (2000, 600) };
        assert_eq!((drifting.here(1500), drifting.here(2600)), (1000, 2000));
        assert_eq!(drifting.here(3600), 3000, "after the last comparison it is taken to stay");
        let hostile = Clock { first: (1, i64::MIN), last: (u64::MAX, i64::MAX) };
        let _ = (hostile.here(0), hostile.here(u64::MAX));
        let behind = Clock { first: (1000, -400), last: (3000, -400) };
        assert_eq!((behind.here(600), behind.here(100)), (1000, 500));
    }

    #[test]
    fn a_lost_server_and_one_that_fails_keep_no_other_from_being_asked() {
        let [lost, failing, other] = [(); 3].map(|()| Server::unused());
        let driver = Driver::for_tests(&[lost, failing, other]);
        lost.lose();
        let mut asked = Vec::new();
        let answer = each(driver, |index, _| {
            asked.push(index);
            if index == 1 { Err(Status::NOT_SUPPORTED) } else { Ok(()) }
        });
        assert_eq!((answer, asked), (Err(Status::NOT_SUPPORTED), vec![1, 2]));
        assert_eq!(each(driver, |_, _| Ok(())), Ok(()), "others are left");
        [failing, other].iter().for_each(|server| server.lose());
        assert!(each(driver, |_, _| Ok(())).is_err(), "none is left");
    }

    #[test]
    fn recording_ends_on_the_servers_behind_a_lost_one() {
        let [lost, other] = [(); 2].map(|()| Server::unused());
        let driver = Driver::for_tests(&[lost, other]);
        lost.lose();
        let before = other.session.last_seq();
        let stops = std::thread::spawn(move || stop_all(driver));
        while other.session.last_seq() == before {
            assert!(!stops.is_finished(), "it has not been asked");
            std::thread::yield_now();
        }
        // Nobody answers.
        other.lose();
        assert!(stops.join().is_ok());
    }

    #[test]
    fn what_follows_on_a_stream_begins_after_what_was_moved() {
        let mut last = Last::default();
        // Moved by 30, because its command came so late.
        assert_eq!(last.follow((1000, 1020), (130, 150)), (130, 150));
        // Not moved by itself: it begins when the other one has ended, and not before.
        assert_eq!(last.follow((1025, 1045), (125, 145)), (150, 170));
        assert_eq!(last.follow((1200, 1210), (300, 310)), (300, 310));
        // Kernels that overlap on the server may overlap here, and nothing else depends on the shorter one.
        assert_eq!(last.follow((1205, 1208), (305, 308)), (305, 308));
        assert_eq!(last.follow((1210, 1220), (309, 319)), (310, 320));
        // A server's numbers may be anything.
        assert_eq!(last.follow((u64::MAX, 0), (u64::MAX, 0)), (u64::MAX, u64::MAX));
    }

    #[test]
    fn the_default_stream_has_its_native_number() {
        assert_eq!((stream_number(0), stream_number(MAX_CONTEXTS - 1)), (7, 7));
        assert_eq!(stream_number(MAX_CONTEXTS), 13);
    }
}
