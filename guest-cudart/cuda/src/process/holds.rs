//! What may hold up streams until the program lets them go on: host functions, and waits for words of memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::process::stream::Stream;
use client::lock;
use client::seq::Seq;
use client::session::Session;

/// Host functions that may still be called: a stream, and the `seq` of the record after the call, which
/// [`Stream::called`] reaches when the function has returned.
static CALLS: Mutex<Vec<(Arc<Stream>, Seq)>> = Mutex::new(Vec::new());

/// Waits for words of memory that may still hold their streams: a stream, and the `seq` of the record after
/// the wait.
static WAITS: Mutex<Vec<(Arc<Stream>, Seq)>> = Mutex::new(Vec::new());

/// Whether there may be any of these. It changes under the lock of one of them, to false under both.
static ANY: AtomicBool = AtomicBool::new(false);

/// Number of entries above which finished ones are removed.
pub(crate) const MANY: usize = 64;

/// Registers that a host function, which may write anything, is called before a stream passes record `seq`.
pub(crate) fn calls(stream: &Arc<Stream>, seq: Seq) {
    let mut calls = lock(&CALLS);
    if calls.len() >= MANY && calls.len().is_power_of_two() {
        calls.retain(|(stream, seq)| is_pending(stream, *seq));
    }
    calls.retain(|(other, _)| !Arc::ptr_eq(other, stream));
    calls.push((stream.clone(), seq));
    ANY.store(true, Ordering::Release);
}

/// Registers that a stream waits for a word before it passes record `seq`. The program may write that word,
/// and other bytes before it.
pub(crate) fn waits(stream: &Arc<Stream>, seq: Seq) {
    let mut waits = lock(&WAITS);
    waits.retain(|(other, seq)| !Arc::ptr_eq(other, stream) && is_pending(other, *seq));
    waits.push((stream.clone(), seq));
    ANY.store(true, Ordering::Release);
}

/// The waits for words, some of which may be over.
pub(crate) fn of_words() -> Vec<(Arc<Stream>, Seq)> {
    lock(&WAITS).clone()
}

/// The host functions that may not have returned, and the waits that may not have ended. Those that are over
/// are removed: a lost server's would otherwise be looked at before every copy.
pub(crate) fn all() -> Vec<(Arc<Stream>, Seq)> {
    let (mut calls, mut waits) = (lock(&CALLS), lock(&WAITS));
    calls.retain(|(other, seq)| !other.called.has_reached(*seq) && is_pending(other, *seq));
    waits.retain(|(other, seq)| is_pending(other, *seq));
    if calls.is_empty() && waits.is_empty() {
        ANY.store(false, Ordering::Release);
    }
    calls.iter().chain(waits.iter()).cloned().collect()
}

/// Whether there may be any.
#[inline]
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Acquire) && !all().is_empty()
}

/// Marks a session's streams behind their waits for words, which shows when they have passed them. Another
/// server may have no room for a mark, and this thread may not need it.
pub(crate) fn mark_waits(session: &Session) {
    for (stream, seq) in of_words() {
        if std::ptr::eq(stream.session(), session) && !stream.last_mark.has_reached(seq) {
            // If the server is lost by now, the stream holds up nothing.
            let _ = stream.mark();
        }
    }
}

/// Whether a stream may still pass a record. One of a lost server never does: it holds up and writes nothing.
pub(crate) fn is_pending(stream: &Stream, seq: Seq) -> bool {
    !stream.has_passed(seq) && stream.session().check().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::context::Context;
    use crate::process::driver::Server;
    use crate::process::stream::NON_BLOCKING;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, StreamId};
    use client::ops::stream::StreamMark;

    #[test]
    fn only_waits_of_the_same_server_are_marked() {
        let [own, others] = [(); 2].map(|()| {
            let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
            let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS), context, NON_BLOCKING, 0, false));
            let wait = stream.work(&StreamMark { stream: stream.id }).unwrap();
            waits(&stream, wait);
            stream
        });
        for _ in 0..2 {
            mark_waits(own.session());
            assert!(any() && others.last_mark.get().is_none());
            assert_eq!(own.last_mark.get(), Some(own.session().last_seq()), "once is enough");
        }
        for stream in [own, others] {
            stream.context.server.lose();
        }
    }
}
