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
use client::ops::stream::{StreamHostSignal, StreamHostWait};
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
    let seq = stream.work(&StreamHostWait { stream: stream.id, ticket })?;
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
