//! Pending writes to the program's memory: results of copies, and anything that host functions may write.
//!
//! The server may read the source of a copy as soon as it receives the command, not when the stream reaches
//! it. If something before the copy may still write those bytes, or the program may still write them because
//! it can hold up the stream ([`may_be_held`]), the command tells the server to read them only then
//! ([`HostIn::Late`]). A server that cannot do that, and code that reads the bytes in this process, wait for
//! the stream first. That is correct except for a program whose host function waits for the calling thread.
//! A stream that waits for a word of memory may be waiting for that thread, so behind such a wait the call
//! gives up after a while and logs why.
//!
//! A synchronous copy from pageable memory waits for its stream before its source is read, as natively, if a
//! host function or a wait for a word may still be before it ([`settle_in_order`]).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::abi::result::Result;
use crate::memory::managed::mirror;
use crate::memory::pinned_regions::{self, MAPPED};
use crate::process::driver::{Driver, Server, driver};
use crate::process::holds::{MANY, is_pending};
use crate::process::stream::Stream;
use crate::process::{context, fences, holds};
use client::data::{HostIn, HostRange};
use client::seq::Seq;
use client::{Status, lock};

/// A copy to the host that may be under way.
struct Write {
    stream: Arc<Stream>,
    seq: Seq,
    at: usize,
    len: usize,
}

static WRITES: Mutex<Vec<Write>> = Mutex::new(Vec::new());

/// How long a call waits for a stream that may itself be waiting for the calling thread.
const PATIENCE: Duration = Duration::from_secs(10);

/// Registers that record `seq` of a stream writes `len` bytes of pinned memory.
pub(crate) fn writes(stream: &Arc<Stream>, seq: Seq, at: usize, len: usize) {
    if all_are_in_place(stream.context.server, at) {
        return;
    }
    let mut writes = lock(&WRITES);
    if writes.len() >= MANY && writes.len().is_power_of_two() {
        writes.retain(|write| is_pending(&write.stream, write.seq));
    }
    // A stream's writes to one place are done when the last one is.
    writes.retain(|write| !(Arc::ptr_eq(&write.stream, stream) && write.at == at && write.len == len));
    writes.push(Write { stream: stream.clone(), seq, at, len });
}

/// Waits until no stream that this one may be waiting for is held by a wait for a word.
fn released(driver: &Driver, stream: &Stream) -> Result {
    let mut waiting = holds::of_words();
    waiting.retain(|(other, seq)| is_pending(other, *seq) && stream.may_be_behind(other, *seq));
    // What is published after the wait shows whether the stream has passed it.
    for (other, _) in &waiting {
        // If its server is lost by now, it is not waited for.
        let _ = other.mark();
    }
    let held = || waiting.iter().any(|(other, seq)| is_pending(other, *seq));
    if patiently(driver, PATIENCE, held, || true)? {
        return Ok(());
    }
    refuse_form!(
        "a copy of pinned memory behind a wait for memory that stays unmet while the copy is called, to a GPU in another machine,"
    )
}

/// How a stream's next copy refers to `range`, the `len` bytes at `at` of this process. If the server would
/// read them too early, calls `read_in_place`, which makes the device read them in place if it can.
pub(crate) fn source(
    driver: &Driver,
    stream: &Stream,
    range: HostRange,
    at: usize,
    len: usize,
    read_in_place: impl FnOnce(),
) -> Result<HostIn<'static>> {
    let server = stream.context.server;
    if !may_change(server, at, len) {
        let late = server.reads_late && !pinned_regions::is_mapped(server, at as u64) && may_be_held(stream);
        return Ok(if late { HostIn::Late(range) } else { HostIn::Range(range) });
    }
    if server.reads_late {
        return Ok(HostIn::Late(range));
    }
    read_in_place();
    settle(driver, stream, at, len)?;
    Ok(HostIn::Range(range))
}

/// Waits until nothing before a stream's next copy may write the bytes that it reads.
pub(crate) fn settle(driver: &Driver, stream: &Stream, at: usize, len: usize) -> Result {
    if !may_change(stream.context.server, at, len) {
        return Ok(());
    }
    released(driver, stream)?;
    if may_change(stream.context.server, at, len) { stream.synchronize_as_operation() } else { Ok(()) }
}

/// Whether the program may be holding up work before a stream's next copy, so that it may write the copy's
/// source until it lets that work go on: a kernel may poll memory that the program's threads, or another
/// process, write.
///
/// Bytes that are read early are at the server when the stream reaches the copy. Late ones come only then:
/// the stream waits for a round trip and for all of them. So this says no for a program without such memory,
/// which copies its next batch while kernels work on the last one.
fn may_be_held(stream: &Stream) -> bool {
    let mirrors = || context::alive_of(stream.context.server).any(|it| !mirror::of_context(it).is_empty());
    !is_unheld(stream) && (fences::shares() || mirror::any() && mirrors())
}

/// Whether a stream's next copy only comes behind work that is known to be done, and behind what holds up
/// nothing: event records, copies whose source has been read, and copies for which this was so, which are put
/// on the stream by [`Stream::unheld_work`].
pub(crate) fn is_unheld(stream: &Stream) -> bool {
    let context = stream.context;
    let context_is = || context.last_holding.get().is_none_or(|last| context.has_synced(last, false));
    if stream.is_legacy() {
        return context_is();
    }
    let own_is = stream.last_holding.get().is_none_or(|last| stream.is_known_done(last));
    own_is && (stream.is_free() || has_passed_all(context.legacy()) || context_is())
}

/// Whether a legacy default stream has passed all its own records. Otherwise work of other streams comes
/// behind them, and so behind what blocking streams had to do before.
fn has_passed_all(legacy: &Stream) -> bool {
    legacy.own_is_known_done() && legacy.last_mark.get().is_none_or(|mark| legacy.has_passed(mark))
}

/// Called before the source of a synchronous copy is read during the call. Waits for the stream if a host
/// function, or a wait for a word, may still be before the copy.
pub(crate) fn settle_in_order(stream: &Stream) -> Result {
    let ahead = ahead_of(stream);
    if ahead.is_empty() {
        return Ok(());
    }
    // The next copy finds out without waiting that a stream which this one need not wait for is done.
    for (other, _) in &ahead {
        // What is ahead on a server that is lost holds up nothing here.
        let _ = other.mark();
    }
    stream.synchronize_as_operation()
}

/// Whether a host function, or a wait for a word, may still be before a stream's next work.
pub(crate) fn is_behind_calls(stream: &Stream) -> bool {
    !ahead_of(stream).is_empty()
}

fn ahead_of(stream: &Stream) -> Vec<(Arc<Stream>, Seq)> {
    let mut ahead = holds::all();
    ahead.retain(|(other, seq)| stream.may_be_behind(other, *seq));
    ahead
}

/// Waits until no copy that is under way uses `len` bytes of pinned memory in place.
///
/// # Errors
/// `NOT_READY` if one still does after a while and a stream that waits for this thread may hold it up.
pub(crate) fn settle_all(driver: &Driver, at: usize, len: usize) -> Result {
    if !context::any_busy() {
        return Ok(());
    }
    let overlaps = |write: &Write| at < write.at + write.len && write.at < at + len;
    let writing: Vec<(Arc<Stream>, Seq)> = {
        let writes = lock(&WRITES);
        let writes = writes.iter().filter(|write| overlaps(write) && is_pending(&write.stream, write.seq));
        writes.map(|write| (write.stream.clone(), write.seq)).collect()
    };
    for (stream, _) in &writing {
        // If its server is lost by now, it is not waited for.
        let _ = stream.mark();
    }
    // A server that does not know the memory uses none of it.
    let last: Vec<_> = driver
        .servers
        .iter()
        .filter(|server| pinned_regions::REGIONS.is_known_to(server.session, at))
        .map(|server| (server.session, server.session.last_seq()))
        .filter(|(session, _)| session.check().is_ok())
        .collect();
    let busy = || {
        last.iter().any(|(session, last)| !session.has_released(*last) && session.check().is_ok())
            || writing.iter().any(|(stream, seq)| is_pending(stream, *seq))
    };
    let over = patiently(driver, PATIENCE, busy, program_may_hold)?;
    if over { Ok(()) } else { Err(Status::NOT_READY) }
}

/// Whether work may be waiting for the program: for a host function, or for what its threads, or another
/// process, write.
fn program_may_hold() -> bool {
    holds::any() || fences::shares() || mirror::any() || !lock(&MAPPED).is_empty()
}

/// Waits for something to end. After a while, gives up if `may_never_end`. Returns whether it has ended.
fn patiently(
    driver: &Driver,
    patience: Duration,
    mut goes_on: impl FnMut() -> bool,
    may_never_end: impl Fn() -> bool,
) -> Result<bool> {
    let (begin, mut nap) = (Instant::now(), Duration::from_micros(20));
    while goes_on() {
        driver.check()?;
        if begin.elapsed() > patience && may_never_end() {
            return Ok(false);
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_millis(1));
    }
    Ok(true)
}

/// Whether every device of the process accesses this pinned memory in place. A copy to another server may
/// otherwise read too early what a device writes there.
fn all_are_in_place(server: &Server, at: usize) -> bool {
    pinned_regions::is_mapped(server, at as u64) && driver().is_ok_and(|driver| driver.servers.len() == 1)
}

/// Whether pending work may write bytes that a copy to a server's device reads, and the copy would read them
/// before the stream reaches it.
fn may_change(server: &Server, at: usize, len: usize) -> bool {
    if pinned_regions::is_mapped(server, at as u64) {
        // The device reads them in place, in the stream's order.
        return false;
    }
    let written = || {
        lock(&WRITES).iter().any(|write| {
            at < write.at + write.len && write.at < at + len && is_pending(&write.stream, write.seq)
        })
    };
    // Work of any stream may come before.
    !holds::all().is_empty() || written()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pinned_regions::{HostTag, REGIONS};
    use crate::process::context::Context;
    use crate::process::stream::NON_BLOCKING;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, StreamId};
    use client::ops::stream::StreamMark;

    #[test]
    fn reading_in_place_waits_for_no_other_servers_write() {
        let contexts = [0, 1].map(|n| Context::new(ContextId(n), Server::unused(), n, 0, true));
        let [writer, reader] = contexts;
        let (size, tag) = (1 << 16, HostTag { context: writer, flags: 0, buffer: 1 });
        let memory = Box::leak(vec![0_u8; size].into_boxed_slice()).as_ptr() as usize;
        REGIONS.register(writer.session(), memory, size, tag).ok();
        assert!(REGIONS.find(memory).is_some());
        let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS + 1), writer, 1, 0, false));
        writes(&stream, Seq::for_tests(0, 10), memory, size);
        assert!(may_change(reader.server, memory, 4), "the bytes would be read when the copy is called");
        lock(&MAPPED).entry(memory).or_default().push(reader);
        assert!(!may_change(reader.server, memory, 4));
        assert!(may_change(writer.server, memory, 4), "it has not mapped them");
    }

    #[test]
    fn what_cannot_wait_for_the_program_is_waited_for_however_long_it_takes() {
        let driver = Driver::for_tests(&[]);
        let wait = |may_never_end: bool| {
            let mut left = 3;
            let goes_on = || {
                left -= 1;
                left > 0
            };
            patiently(driver, Duration::ZERO, goes_on, || may_never_end)
        };
        assert_eq!((wait(true), wait(false)), (Ok(false), Ok(true)));
    }

    #[test]
    fn what_a_lost_server_had_to_do_holds_up_nothing_on_others() {
        let [lost, other] = [0, 1].map(|n| Context::new(ContextId(n), Server::unused(), n, 0, false));
        let [gone, stream] = [(lost, 4), (other, 5)].map(|(context, n)| {
            Arc::new(Stream::new(StreamId(MAX_CONTEXTS + n), context, NON_BLOCKING, 0, false))
        });
        let (at, len, seq) = (0x5eed_0000, 64, Seq::for_tests(0, 10));
        let driver = Driver::for_tests(&[]);
        writes(&gone, seq, at, len);
        holds::waits(&gone, seq);
        stream.waits_for(Seq::for_tests(0, 20), &gone, seq);
        stream.work(&StreamMark { stream: stream.id }).unwrap();
        let is_held = || holds::all().iter().any(|(held, _)| Arc::ptr_eq(held, &gone));
        assert!(is_held());
        lost.server.lose();
        assert!(!is_held());
        assert!(holds::of_words().iter().all(|(held, _)| !Arc::ptr_eq(held, &gone)), "it is looked at again");
        assert_eq!(released(driver, &stream), Ok(()));
        assert_eq!(settle_all(driver, at, len), Ok(()));
    }

    #[test]
    fn only_finished_work_and_other_copies_leave_a_stream_unheld() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        let stream = |n, flags| Arc::new(Stream::new(StreamId(MAX_CONTEXTS + n), context, flags, 0, false));
        let (blocking, other, free) = (stream(2, 0), stream(3, 0), stream(4, NON_BLOCKING));
        let legacy = context.legacy();
        let mark = |stream: &Stream| StreamMark { stream: stream.id };
        let work = |stream: &Stream| stream.work(&mark(stream)).unwrap();
        let copy = |stream: &Stream| stream.unheld_work(&mark(stream)).unwrap();
        let is_over = |stream: &Stream| stream.is_synced(context.session().append(&mark(stream)).unwrap());
        assert!(is_unheld(&free));
        copy(&free);
        assert!(is_unheld(&free));
        // Another thread's work comes between the question and the copy.
        work(&free);
        copy(&free);
        assert!(!is_unheld(&free) && is_unheld(&blocking));
        is_over(&free);
        assert!(is_unheld(&free));
        // A blocking stream is behind the legacy default stream, and so behind others.
        work(legacy);
        assert!(is_unheld(&free) && !is_unheld(&blocking));
        is_over(legacy);
        assert!(is_unheld(&blocking));
        work(&other);
        assert!(is_unheld(&blocking) && !is_unheld(legacy));
        legacy.settled_work(&mark(legacy)).unwrap();
        assert!(!is_unheld(&blocking));
        // That the stream itself is done tells nothing of them.
        is_over(&blocking);
        assert!(!is_unheld(&blocking));
        is_over(legacy);
        assert!(is_unheld(&blocking));
    }
}
