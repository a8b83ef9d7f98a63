//! Copies pieces of direct connections, in any thread.
//!
//! All pieces of a context that go the same way share one stream. It has the highest priority, because
//! streams of one priority share a few hardware queues: behind a running kernel of another stream in its
//! queue, a piece could wait for ever, if that kernel waits for the piece.

use std::sync::{Arc, Mutex};

use host_bridge::endpoint::{Mapped, Region};
use protocol::Status;
use protocol::handle::ContextId;

use super::Cuda;
use super::api::{Api, CUcontext, CUstream};
use super::fence::{Completer, Health, Word};
use super::registration;
use super::row_copies::RowCopy;
use super::streams::{Place, Publisher};
use crate::driver::call::{End, Result, is_sticky};
use crate::driver::gpu::{Carrier, Preparer, STREAM_NON_BLOCKING};
use crate::driver::rows::Rows;
use crate::driver::store::Way;

/// A context's stream for pieces that go one way.
pub(super) struct PieceStream {
    api: &'static Api,
    completer: Arc<Completer>,
    /// Of its context, and of the one in which page-locked memory is registered.
    health: Arc<Health>,
    home: Arc<Health>,
    way: Way,
    stream: CUstream,
    /// The stream writes into it how many copies are over.
    word: Arc<Word>,
    begun: Mutex<u64>,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for PieceStream {}
// SAFETY: the driver API takes handles from any thread; what changes is behind a lock.
unsafe impl Sync for PieceStream {}

/// See [`Carrier`].
struct CudaCarrier {
    pieces: Arc<PieceStream>,
    progress: Arc<Publisher>,
}

/// A context's handle, which any thread may use.
struct Handle(CUcontext);
// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for Handle {}

impl Cuda {
    /// The health of the context in which page-locked memory is registered.
    fn home_of(&self, place: &Place) -> Arc<Health> {
        let home = self.home.and_then(|home| self.contexts.get(&home));
        home.map_or_else(|| Arc::clone(&place.health), |home| Arc::clone(&home.health))
    }

    /// See [`preparer`](crate::driver::gpu::GpuCopies::preparer).
    pub(super) fn make_preparer(&self, place: &Place) -> Preparer {
        let (api, home) = (self.api, self.home_of(place));
        let handle = Handle(home.handle());
        Box::new(move |region: &Arc<Region>| {
            let Handle(context) = &handle;
            // SAFETY: a context of this process. If this fails, copies are slower.
            let _ = unsafe { registration::in_place(api, *context, &home, region) };
        })
    }

    /// See [`carrier`](crate::driver::gpu::GpuCopies::carrier). The place's context is current.
    pub(super) fn make_carrier(&mut self, place: &Place, device: u32, way: Way) -> Result<Arc<dyn Carrier>> {
        self.pieces.retain(|pieces| pieces.health.check().is_ok());
        // The stream's device may not reach another's memory.
        let context = if device == place.device { place.context } else { ContextId(device) };
        let health = Arc::clone(&self.enter_context(context)?.health);
        let is_it = |pieces: &&Arc<PieceStream>| pieces.way == way && Arc::ptr_eq(&pieces.health, &health);
        let pieces = match self.pieces.iter().find(is_it) {
            Some(pieces) => Arc::clone(pieces),
            None => {
                let pieces = Arc::new(self.make_piece_stream(place, context, health, way)?);
                self.pieces.push(Arc::clone(&pieces));
                pieces
            }
        };
        self.enter_context(place.context)?;
        Ok(Arc::new(CudaCarrier { pieces, progress: Arc::clone(&place.progress) }))
    }

    /// A stream of this context, which is current.
    fn make_piece_stream(
        &self,
        place: &Place,
        context: ContextId,
        health: Arc<Health>,
        way: Way,
    ) -> Result<PieceStream> {
        let word = self.words.take().map(Arc::new)?;
        let (mut stream, mut least, mut greatest): (CUstream, _, _) = (std::ptr::null_mut(), 0, 0);
        // SAFETY: writes two integers, and a stream handle.
        let made = unsafe {
            self.api
                .context_priorities(&mut least, &mut greatest)
                .and_then(|()| self.api.stream_create(&mut stream, STREAM_NON_BLOCKING, greatest))
                // Now, because its first use may take longer.
                .and_then(|()| self.api.stream_write(stream, word.address(), 0, 0))
        };
        self.note(context, made)?;
        Ok(PieceStream {
            api: self.api,
            completer: Arc::clone(&self.completer),
            health,
            home: self.home_of(place),
            way,
            stream,
            word,
            begun: Mutex::new(0),
        })
    }
}

impl Carrier for CudaCarrier {
    fn carry(&self, rows: &Rows, offset: u64, bytes: Mapped, seq: u64, end: End) {
        // The stream is one of the memory's device.
        let copy = RowCopy { way: self.pieces.way, rows: *rows, contexts: None };
        let PieceStream { api, completer, health, home, stream, word, begun, .. } = &*self.pieces;
        // SAFETY: a context of this process. Usually this is known and calls no driver. Unregistered memory
        // can be copied too, only more slowly.
        let _ = unsafe { registration::in_place(api, home.handle(), home, bytes.region()) };
        let mut begun = begun.lock().unwrap_or_else(|e| e.into_inner());
        *begun += 1;
        let enqueued = health.within(api, |_| {
            let mut offset = offset;
            let copies = bytes.runs().iter().try_for_each(|(at, len)| {
                // SAFETY: the rows were checked; the bytes are held until the stream has written the word.
                let copied = unsafe { copy.enqueue(api, *stream, offset, *at, *len) };
                offset += *len as u64;
                copied
            });
            // Also behind a part of the copies, if the driver has refused the next one.
            // SAFETY: a live stream of the current context; the word is registered memory.
            unsafe { api.stream_write(*stream, word.address(), *begun, 0) }.map(|()| copies)
        });
        let progress = Arc::clone(&self.progress);
        let copied = move |status: Status| {
            drop(bytes);
            progress.publish(seq, status);
            end(status);
        };
        let (Ok(Err(status)) | Err(status)) = enqueued else {
            return completer.when(word, *begun, health, Box::new(copied));
        };
        if is_sticky(status) {
            health.fail(status);
        }
        match enqueued {
            Ok(_) => completer.when(word, *begun, health, Box::new(move |_| copied(status))),
            Err(_) => copied(status),
        }
    }
}

impl Drop for PieceStream {
    fn drop(&mut self) {
        // SAFETY: made by this; its work still completes. A destroyed context has destroyed it.
        let _ = self.health.within(self.api, |_| unsafe { self.api.stream_destroy(self.stream) });
    }
}
