//! What a capture forbids. As in CUDA, calls that cannot become part of a graph invalidate it.

use std::sync::Arc;

use crate::abi::result::{Result, code};
use crate::process::capture::{self, Capture};
use crate::process::context::Context;
use crate::process::stream::Stream;
use client::lock;

/// Fails if a call waits for a whole context in which a stream is being captured, and invalidates the
/// captures.
pub(crate) fn forbid_all(context: &Context) -> Result {
    let mut result = Ok(());
    for capture in capture::all().iter().filter(|capture| capture.context == context.unique) {
        capture.spoil();
        result = Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    result
}

/// A capture that work on `stream` would have to wait for, if that is the legacy default stream.
pub(crate) fn in_the_way(stream: &Stream) -> Option<Arc<Capture>> {
    if !capture::any() || !stream.is_legacy() {
        return None;
    }
    capture::all().into_iter().find(|capture| capture.would_hold(stream.context.unique))
}

/// Fails for work on the legacy default stream if a stream that would wait for it is being captured.
#[inline]
pub(crate) fn implicit(stream: &Stream) -> Result {
    match in_the_way(stream) {
        None => Ok(()),
        Some(capture) => {
            capture.spoil();
            Err(code::STREAM_CAPTURE_IMPLICIT)
        }
    }
}

/// Fails for a call that is not allowed on a captured stream, and invalidates the capture.
pub(crate) fn forbid(stream: &Stream) -> Result {
    match stream.capture() {
        None => Ok(()),
        Some(capture) => {
            capture.spoil();
            Err(code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// Fails for work that CUDA can capture but this library cannot.
pub(crate) fn refuse(stream: &Stream) -> Result {
    match stream.capture() {
        None => Ok(()),
        Some(capture) => {
            capture.spoil();
            refuse_form!("capturing a copy of bytes in a row from or to an array")
        }
    }
}

/// Called when a stream is destroyed. A capture that began there fails and ends: the program has no other way
/// to end it. What a stream has added to a capture that it joined stays.
pub(crate) fn destroyed(stream: &Stream) {
    if let Some(capture) = stream.capture().filter(|capture| capture.origin == stream.unique()) {
        capture.spoil();
        capture.discard();
    }
}

/// A stream becomes part of a capture, where it is not yet.
pub(crate) fn enter(capture: &Arc<Capture>, stream: &Stream) {
    // The legacy default stream gets no work from now on.
    if !stream.is_free() {
        capture.is_waited_for_in(stream.context.unique);
    }
    stream.set_capture(capture.clone());
}

/// Makes a stream wait for an event that stands for `point`. The stream joins the capture if it is not part
/// of it.
pub(crate) fn join(capture: &Arc<Capture>, stream: &Stream, point: &[u64]) -> Result {
    capture.check()?;
    match stream.capture() {
        Some(other) if !Arc::ptr_eq(&other, capture) => {
            other.spoil();
            capture.spoil();
            return Err(code::STREAM_CAPTURE_MERGE);
        }
        Some(_) => {}
        None if stream.is_legacy() => {
            capture.spoil();
            return Err(code::STREAM_CAPTURE_IMPLICIT);
        }
        None => enter(capture, stream),
    }
    let mut ends = lock(&capture.ends);
    let end = ends.entry(stream.unique()).or_default();
    for node in point {
        if !end.contains(node) {
            end.push(*node);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::driver::Server;
    use crate::process::stream::NON_BLOCKING;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, StreamId};

    #[test]
    fn a_capture_is_in_the_legacy_streams_way_once_a_blocking_stream_has_joined_it() {
        let contexts = [(); 2].map(|()| Context::new(ContextId(0), Server::unused(), 0, 0, true));
        let stream = |context, flags| Stream::new(StreamId(MAX_CONTEXTS), context, flags, 0, false);
        let free = [(); 2].map(|()| stream(contexts[0], NON_BLOCKING));
        let blocking = stream(contexts[0], 0);
        let (unique, graph) = (contexts[0].unique, Arc::new(()));
        let capture = Capture::begin(capture::RELAXED, free[0].unique(), unique, graph, None, Vec::new());
        enter(&capture, &free[0]);
        join(&capture, &free[1], &[]).unwrap();
        assert!(in_the_way(contexts[0].legacy()).is_none());
        join(&capture, &blocking, &[]).unwrap();
        assert!(in_the_way(contexts[0].legacy()).is_some_and(|other| Arc::ptr_eq(&other, &capture)));
        assert!(in_the_way(contexts[1].legacy()).is_none());
        capture.end();
        assert!(in_the_way(contexts[0].legacy()).is_none());
    }
}
