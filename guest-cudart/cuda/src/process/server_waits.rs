//! Lets a stream wait for a stream on another server.
//!
//! No device can wait for another server's device. So the waiting stream is held, as if by a host function,
//! until a thread here sees the other stream's progress word pass the record. The program's own threads don't
//! wait.
//!
//! A stream that had nothing else to do is known to be idle once its wait is over, without being asked. So a
//! copy between the default streams of two servers needs no exchange for the order with the one before it.

use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};

use crate::abi::result::Result;
use crate::process::fences;
use crate::process::host_calls;
use crate::process::stream::{Before, Stream};
use crate::process::work_signal;
use client::channel::MAX_SERVERS;
use client::handle::TicketId;
use client::ops::stream::StreamHostSignal;
use client::seq::Seq;
use client::session::Session;
use client::{Status, lock, log};

/// A held stream, and what it waits for.
struct Wait {
    held: Arc<Stream>,
    ticket: TicketId,
    /// Its wait for the ticket, and all that comes before that, if it is known.
    wait: Seq,
    before: Option<Before>,
    other: Arc<Stream>,
    record: Seq,
    /// Before it, the stream has only other waits for the same one, and what that one has waited for.
    is_alone: bool,
}

/// The waits for streams of one server, and the thread that ends them.
struct Waits {
    all: Mutex<Vec<Wait>>,
    came: Condvar,
    start: Once,
}

/// Indexed by the session whose streams are waited for.
static WAITS: [Waits; MAX_SERVERS] =
    [const { Waits { all: Mutex::new(Vec::new()), came: Condvar::new(), start: Once::new() } }; MAX_SERVERS];

/// Makes a stream wait for a publishing record of another server's stream.
pub(crate) fn hold(stream: &Arc<Stream>, other: &Arc<Stream>, record: Seq) -> Result {
    let mut behind = None;
    if !stream.is_free() {
        // As a wait for an event is: an operation that comes behind the streams that this one waits for, and
        // for which they wait. The wait for the ticket is none.
        let (mark, before) = stream.mark_behind_all()?;
        behind = before.map(|before| (mark, before));
    }
    if other.has_passed(record) {
        work_signal::other_servers_work_is_done();
        return Ok(());
    }
    let session = other.session();
    let waits = &WAITS[session.index()];
    waits.start.call_once(|| {
        let thread = std::thread::Builder::new().name("rgpu-servers".into());
        if let Err(error) = thread.spawn(move || serve(session, waits)) {
            log::error(format_args!("cannot start the thread that ends waits between servers: {error}"));
        }
    });
    let ticket = host_calls::ticket();
    let seq = stream.wait_for_ticket(ticket)?;
    stream.waits_for(seq, other, record);
    // Otherwise another thread's work may be between them.
    let before = behind.filter(|(mark, _)| seq.is_next_after(*mark)).map(|(_, before)| before);
    {
        let mut all = lock(&waits.all);
        let is_alone = before.as_ref().is_some_and(|before| {
            let only_last =
                |last: &Wait| last.only_waits_for(other) && stream.has_done_but(before, last.wait);
            stream.has_done(before)
                || stream.was_waited_for(before, other)
                || last_of(&all, stream).is_some_and(only_last)
        });
        let (held, other) = (stream.clone(), other.clone());
        all.push(Wait { held, ticket, wait: seq, before, other, record, is_alone });
    }
    waits.came.notify_one();
    // The thread may have checked before this wait was added and now sleep until the other server makes
    // progress.
    waits.end(None, Wait::is_over);
    Ok(())
}

/// Makes a stream wait for all work so far on another stream, of any server.
pub(crate) fn join(from: &Arc<Stream>, to: &Arc<Stream>) -> Result {
    end_those_over(from);
    if from.is_known_idle() || only_waits_for(from, to) {
        return Ok(());
    }
    if std::ptr::eq(from.session(), to.session()) {
        fences::join(from, to)
    } else {
        hold(to, from, from.mark()?)
    }
}

/// Whether a stream only waits for work of another one, behind which that one's next work comes anyway. So it
/// is with the default streams of two servers, which both wait for the copy before.
fn only_waits_for(held: &Arc<Stream>, other: &Arc<Stream>) -> bool {
    let all = lock(&WAITS[other.session().index()].all);
    last_of(&all, held).is_some_and(|last| held.due() == Some(last.wait) && last.only_waits_for(other))
}

/// The last of these waits of a stream.
fn last_of<'w>(all: &'w [Wait], held: &Arc<Stream>) -> Option<&'w Wait> {
    all.iter().rev().find(|wait| Arc::ptr_eq(&wait.held, held))
}

/// A stream may be idle but for waits that are over, of which a thread is just learning: ends them.
fn end_those_over(held: &Arc<Stream>) {
    for waits in &WAITS {
        waits.end(None, |wait| Arc::ptr_eq(&wait.held, held) && wait.is_over());
    }
}

impl Wait {
    fn only_waits_for(&self, other: &Arc<Stream>) -> bool {
        self.is_alone && Arc::ptr_eq(&self.other, other)
    }

    fn is_over(&self) -> bool {
        self.other.has_passed(self.record)
    }

    /// Releases the stream. `lost`: the other server's session has failed with this status.
    fn end(&self, lost: Option<Status>) {
        // The lost server never passes the record, so the work behind the wait must not appear to have
        // succeeded.
        if let Some(status) = lost.filter(|_| !self.is_over()) {
            self.held.context.fail(status);
        }
        work_signal::other_servers_work_is_done();
        // If its own server is lost, nothing could continue anyway.
        let signaled = self.held.session().append(&StreamHostSignal { ticket: self.ticket });
        if let Some(before) = &self.before
            && signaled.is_ok()
            && lost.is_none()
            && self.held.has_done(before)
        {
            self.held.is_synced(self.wait);
        }
    }
}

impl Waits {
    /// Ends the waits for which `is_due` holds, each exactly once.
    fn end(&self, lost: Option<Status>, is_due: impl Fn(&Wait) -> bool) {
        let due: Vec<Wait> = lock(&self.all).extract_if(.., |wait| is_due(wait)).collect();
        due.iter().for_each(|wait| wait.end(lost));
    }
}

fn serve(session: &'static Session, waits: &Waits) {
    loop {
        {
            let mut all = lock(&waits.all);
            while all.is_empty() {
                all = waits.came.wait(all).unwrap_or_else(PoisonError::into_inner);
            }
        }
        let waited = session.wait_progress(|| lock(&waits.all).iter().any(Wait::is_over));
        let lost = waited.err();
        waits.end(lost, |wait| lost.is_some() || wait.is_over());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::context::Context;
    use crate::process::driver::Server;
    use crate::process::stream::NON_BLOCKING;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, StreamId};

    #[test]
    fn a_wait_for_another_server_is_an_operation_of_a_blocking_stream() {
        let [held, other] = [0, 1].map(|n| Context::new(ContextId(n), Server::unused(), n, 0, false));
        let stream =
            |context, n, flags| Arc::new(Stream::new(StreamId(MAX_CONTEXTS + n), context, flags, 0, false));
        let slow = stream(other, 1, NON_BLOCKING);
        let record = slow.mark().unwrap();
        let [blocking, free] = [(2, 0), (3, NON_BLOCKING)].map(|(n, flags)| stream(held, n, flags));
        for stream in [held.legacy(), &blocking] {
            let before = held.session().last_seq();
            hold(stream, &slow, record).unwrap();
            let mark = stream.last_mark.get().unwrap();
            assert!(mark.is_next_after(before) && stream.due().unwrap().is_next_after(mark));
            assert_eq!(stream.last_operation(), Some(mark));
        }
        hold(&free, &slow, record).unwrap();
        assert!(free.due().is_some() && free.last_mark.get().is_none(), "it waits for no other");
    }

    #[test]
    fn a_stream_that_only_waited_for_another_server_is_known_to_be_idle() {
        let [held, other] = [0, 1].map(|n| Context::new(ContextId(n), Server::unused(), n, 0, false));
        let (held, other) = (held.legacy(), other.legacy());
        let record = other.mark().unwrap();
        let waits = || {
            let (_, before) = held.mark_behind_all().unwrap();
            let ticket = host_calls::ticket();
            let wait = held.wait_for_ticket(ticket).unwrap();
            Wait { held: held.clone(), ticket, wait, before, other: other.clone(), record, is_alone: true }
        };
        let wait = waits();
        assert!(!held.is_known_idle());
        wait.end(None);
        assert!(held.is_known_idle());
        // Work before the wait may not be over with it.
        held.work(&client::ops::stream::StreamMark { stream: held.id }).unwrap();
        waits().end(None);
        assert!(!held.is_known_idle());
    }

    #[test]
    fn a_stream_that_only_waits_for_another_one_is_not_waited_for_in_turn() {
        let [one, other] = [0, 1].map(|n| Context::new(ContextId(n), Server::unused(), n, 0, false));
        let (one, other) = (one.legacy(), other.legacy());
        let works = |stream: &Stream| stream.work(&client::ops::stream::StreamMark { stream: stream.id });
        let waits = || {
            let before = one.session().last_seq();
            join(other, one).unwrap();
            one.session().last_seq() != before
        };
        // As copies between the two do, again and again.
        for _ in 0..3 {
            works(one).unwrap();
            join(one, other).unwrap();
            assert!(!other.is_known_idle() && !waits());
        }
        works(other).unwrap();
        assert!(waits(), "it has work of its own");
        works(one).unwrap();
        join(one, other).unwrap();
        assert!(!waits(), "that was waited for");
        works(other).unwrap();
        works(one).unwrap();
        join(one, other).unwrap();
        assert!(waits(), "it has work of its own before the wait");
        one.context.server.lose();
        other.context.server.lose();
    }
}
