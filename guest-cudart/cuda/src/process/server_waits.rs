//! Waits of a stream for a stream of another server.
//!
//! No device can wait for another server's. So the waiting stream is held, as by a host function, until a thread here has seen the other stream's progress word pass the record. The
//! program's own threads wait for nothing.

use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::host_calls;
use crate::process::stream::Stream;
use client::channel::MAX_SERVERS;
use client::handle::TicketId;
use client::ops::stream::{StreamHostSignal, StreamHostWait};
use client::seq::Seq;
use client::session::Session;
use client::{Status, lock, log};

/// A stream that is held, and what it waits for.
struct Wait {
    /// The context of the stream that is held.
    held: &'static Context,
    ticket: TicketId,
    other: Arc<Stream>,
    record: Seq,
}

/// Waits for streams of one server, and the thread that ends them.
struct Waits {
    all: Mutex<Vec<Wait>>,
    came: Condvar,
    start: Once,
}

/// By the number of the session whose streams are waited for.
static WAITS: [Waits; MAX_SERVERS] =
    [const { Waits { all: Mutex::new(Vec::new()), came: Condvar::new(), start: Once::new() } }; MAX_SERVERS];

/// Makes a stream wait for a publishing record of a stream of another server.
pub(crate) fn hold(stream: &Stream, other: &Arc<Stream>, record: Seq) -> Result {
    if other.has_passed(record) {
        return Ok(());
    }
    let session = other.session();
    let waits = &WAITS[session.index()];
    waits.start.call_once(|| {
        let thread = std::thread::Builder::new().name("rgpu-servers".into());
        if let Err(error) = thread.spawn(move || serve(session, waits)) {
            log::error(format_args!("no thread for streams that wait for another server's: {error}"));
        }
    });
    let ticket = host_calls::ticket();
    let seq = stream.work(&StreamHostWait { stream: stream.id, ticket })?;
    stream.waits_for(seq, other, record);
    lock(&waits.all).push(Wait { held: stream.context, ticket, other: other.clone(), record });
    waits.came.notify_one();
    // The thread may have looked before, and sleep until the other server does something.
    waits.end(None, Wait::is_over);
    Ok(())
}

impl Wait {
    fn is_over(&self) -> bool {
        self.other.has_passed(self.record)
    }

    /// Lets the stream go on. `lost`: the other server's session is.
    fn end(&self, lost: Option<Status>) {
        // With a lost server the record is never passed, and what was to come behind it must not seem to have.
        if let Some(status) = lost.filter(|_| !self.is_over()) {
            self.held.fail(status);
        }
        // If its own server is lost, nothing could go on.
        let _ = self.held.session().append(&StreamHostSignal { ticket: self.ticket });
    }
}

impl Waits {
    /// Ends those that are due. None is ended twice.
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
