//! Lets a stream wait for a stream on another server.
//!
//! No device can wait for another server's device. So the waiting stream is held, as if by a host function,
//! until a thread here sees the other stream's progress word pass the record. The program's own threads don't
//! wait.

use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::fences;
use crate::process::host_calls;
use crate::process::stream::Stream;
use crate::process::work_signal;
use client::channel::MAX_SERVERS;
use client::handle::TicketId;
use client::ops::stream::{StreamHostSignal, StreamMark};
use client::seq::Seq;
use client::session::Session;
use client::{Status, lock, log};

/// A held stream, and what it waits for.
struct Wait {
    /// The held stream's context.
    held: &'static Context,
    ticket: TicketId,
    other: Arc<Stream>,
    record: Seq,
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
pub(crate) fn hold(stream: &Stream, other: &Arc<Stream>, record: Seq) -> Result {
    if !stream.is_free() {
        // As a wait for an event is: an operation that comes behind the streams that this one waits for, and
        // for which they wait. The wait for the ticket is none.
        stream.publishing_work(&StreamMark { stream: stream.id })?;
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
    lock(&waits.all).push(Wait { held: stream.context, ticket, other: other.clone(), record });
    waits.came.notify_one();
    // The thread may have checked before this wait was added and now sleep until the other server makes
    // progress.
    waits.end(None, Wait::is_over);
    Ok(())
}

/// Makes a stream wait for all work so far on another stream, of any server.
pub(crate) fn join(from: &Arc<Stream>, to: &Stream) -> Result {
    if from.is_known_idle() {
        return Ok(());
    }
    if std::ptr::eq(from.session(), to.session()) {
        fences::join(from, to)
    } else {
        hold(to, from, from.mark()?)
    }
}

impl Wait {
    fn is_over(&self) -> bool {
        self.other.has_passed(self.record)
    }

    /// Releases the stream. `lost`: the other server's session has failed with this status.
    fn end(&self, lost: Option<Status>) {
        // The lost server never passes the record, so the work behind the wait must not appear to have
        // succeeded.
        if let Some(status) = lost.filter(|_| !self.is_over()) {
            self.held.fail(status);
        }
        work_signal::other_servers_work_is_done();
        // If its own server is lost, nothing could continue anyway.
        let _ = self.held.session().append(&StreamHostSignal { ticket: self.ticket });
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
}
