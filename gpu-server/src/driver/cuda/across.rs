//! Work on memory that a stream's device does not reach.
//!
//! Many pairs of GPUs have no access to each other's memory: most of those in personal computers, and those
//! of most virtual machines. The driver copies between them through the host, but only in calls that name the
//! contexts of both ends: others it refuses, since the memory is mapped for its own device only. A fill has
//! no such call, so it is made on a stream of the memory's device.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::memory::{WINDOW_SIZE, window};

use super::Cuda;
use super::api::{Api, CUcontext, CUevent, CUstream};
use super::row_copies::Contexts;
use crate::driver::call::Result;
use crate::driver::gpu::{EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING};

/// A stream that is destroyed when it is done.
struct Passing(&'static Api, CUstream);

impl Drop for Passing {
    fn drop(&mut self) {
        // SAFETY: made here, used by nothing else; its work still completes.
        let _ = unsafe { self.0.stream_destroy(self.1) };
    }
}

/// An event that is destroyed when it is done.
struct Mark(&'static Api, CUevent);

impl Mark {
    /// Records what was put on a stream of the current context.
    fn on(api: &'static Api, stream: CUstream) -> Result<Mark> {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: writes a handle.
        unsafe { api.event_create(&mut event, EVENT_DISABLE_TIMING) }?;
        let mark = Mark(api, event);
        // SAFETY: live handles of one context.
        unsafe { api.event_record(event, stream, 0) }.map(|()| mark)
    }

    /// What is put on a stream from now on waits for it.
    fn before(&self, stream: CUstream) -> Result {
        // SAFETY: live handles.
        unsafe { self.0.stream_wait_event(stream, self.1, 0) }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made here, used by nothing else; streams that wait for it still do.
        let _ = unsafe { self.0.event_destroy(self.1) };
    }
}

impl Cuda {
    /// Whether work in a context can access memory that `device` accesses at this address.
    pub(super) fn is_reached(&self, context: ContextId, address: u64, device: u32) -> Result<bool> {
        let own = self.context(context)?.device;
        if own == device {
            return Ok(true);
        }
        // A device reaches its peers' windows. What the program has mapped itself, it reaches if it may.
        let in_a_window =
            self.windows.iter().any(|number| address.wrapping_sub(window(*number)) < WINDOW_SIZE);
        Ok(in_a_window && self.device(own)?.reached.contains(&self.device(device)?.handle))
    }

    /// The contexts that a copy on a stream of `context` must name: none if it reaches both ends, which are
    /// each an address and the device that accesses it.
    pub(super) fn contexts_of(
        &self,
        context: ContextId,
        source: (u64, u32),
        target: (u64, u32),
    ) -> Result<Contexts> {
        let reached = |(address, device)| self.is_reached(context, address, device);
        if reached(source)? && reached(target)? {
            return Ok(None);
        }
        let own = self.context(context)?;
        let of = |(_, device)| {
            let it = if own.device == device { own } else { self.context(ContextId(device))? };
            Ok::<CUcontext, Status>(it.handle)
        };
        Ok(Some([of(source)?, of(target)?]))
    }

    /// Has work done on a stream of `device`, after all that was put on `stream`, which is one of the current
    /// context, and before what is put on it next.
    pub(super) fn beside(
        &self,
        stream: CUstream,
        device: u32,
        enqueue: impl FnOnce(CUstream) -> Result,
    ) -> Result {
        let (api, context) = (self.api, self.context(ContextId(device))?.handle);
        let begin = Mark::on(api, stream)?;
        let make = || {
            let mut made: CUstream = std::ptr::null_mut();
            // Not one that is kept: behind one stream's fill, which may wait for long, another stream's would
            // wait, too.
            // SAFETY: writes a handle.
            unsafe { api.stream_create(&mut made, STREAM_NON_BLOCKING, 0) }?;
            let passing = Passing(api, made);
            begin.before(passing.1)?;
            enqueue(passing.1)?;
            Mark::on(api, passing.1)
        };
        // SAFETY: a live context.
        let end = unsafe { api.within(context, make) }?;
        end.before(stream)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use protocol::handle::StreamId;

    use super::*;
    use crate::doubles::Listener;
    use crate::driver::call::{Call, Input};
    use crate::driver::gpu::{BoxCopy, Fill, GpuCopies, GpuGraphs, GpuStreams, LineCopy, Node, NodeWork};
    use crate::driver::rows::Rows;
    use crate::driver::streams::{Stream, Streams};

    const LINE: LineCopy = LineCopy { dst: window(1), to: 1, src: window(0), from: 0, len: 64 };

    /// The calls for a copy, a copy of a box, an upload and a fill of the second device's memory on a stream
    /// of the first one.
    fn calls(cuda: &mut Cuda) -> Vec<(&'static str, usize)> {
        let (id, context) = (StreamId(0), ContextId(0));
        let mut streams = Streams::default();
        let native = cuda.default_stream(context, 0).unwrap();
        streams.insert(id.0, Stream { context, green: None, is_blocking: true, native });
        let mut call = Call::new(Arc::new(Listener::new(|_| {})));
        let place = cuda.enter_stream(&mut call, &mut streams, id).unwrap();
        Api::calls();
        cuda.copy_line(&call, &place, &LINE).unwrap();
        let rows = |at| Rows { at, pitch: 64, slice: 4096, width: 32, height: 2, depth: 1 };
        let copy = BoxCopy { source: rows(window(0)), from: 0, target: rows(window(1)), to: 1 };
        cuda.copy_box(&call, &place, &copy).unwrap();
        let to = Rows::line(window(1), 8);
        cuda.upload(&mut call, &mut streams, &place, &to, 1, Input::Inline(&[0; 8])).unwrap();
        let fill =
            Fill { address: window(1), device: 1, pitch: 64, value: 7, element: 1, width: 64, height: 1 };
        cuda.fill(&call, &place, &fill).unwrap();
        Api::calls()
    }

    #[test]
    fn a_device_reaches_its_peers_memory_like_its_own() {
        let mut cuda = Cuda::fake_of(Api::noting(), 2);
        assert_eq!(calls(&mut cuda), [("copy_any", 0), ("copy_3d", 1), ("copy_htod", 0), ("set_8", 0)]);
    }

    #[test]
    fn for_memory_that_a_device_does_not_reach_the_driver_is_told_the_contexts() {
        let mut cuda = Cuda::fake_of(Api::noting(), 2);
        cuda.devices.iter_mut().for_each(|device| device.reached.clear());
        let theirs = cuda.context(ContextId(1)).unwrap().handle as usize;
        let calls = calls(&mut cuda);
        let copies = ["copy_peer", "copy_3d_peer", "copy_3d_peer"].map(|name| (name, theirs));
        assert_eq!(calls[..3], copies);
        // The fill waits for the stream, and the stream for it.
        let made = calls[5].1;
        assert_ne!(made, 0);
        let fill = [
            ("event_record", 0),
            ("stream_create", 0),
            ("stream_wait_event", made),
            ("set_8", made),
            ("event_record", made),
            ("stream_destroy", made),
            ("stream_wait_event", 0),
        ];
        assert_eq!(calls[3..], fill);
    }

    #[test]
    fn a_graph_does_not_copy_between_devices_that_do_not_reach_each_other() {
        let mut cuda = Cuda::fake_of(Api::noting(), 2);
        let filled = |cuda: &mut Cuda| {
            let draft = cuda.make_draft(ContextId(0)).unwrap();
            let node = Node { work: NodeWork::CopyLine(LINE), dependencies: &[] };
            cuda.fill_draft(ContextId(0), &draft, vec![node]).map(drop)
        };
        assert_eq!(filled(&mut cuda), Ok(()));
        cuda.devices.iter_mut().for_each(|device| device.reached.clear());
        assert_eq!(filled(&mut cuda), Err(Status::NOT_SUPPORTED));
    }
}
