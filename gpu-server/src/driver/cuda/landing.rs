//! Lands pieces from other servers, in the thread that receives them.

use std::sync::{Arc, Mutex};

use host_bridge::endpoint::Mapped;
use protocol::Status;

use super::Cuda;
use super::api::{Api, CUstream};
use super::copies::{Direction, copy_rows};
use super::fence::{Completer, Health, Word};
use super::registration;
use super::streams::{Place, Publisher};
use crate::driver::End;
use crate::driver::call::Result;
use crate::driver::call::is_sticky;
use crate::driver::gpu::{Lander, STREAM_NON_BLOCKING};
use crate::driver::rows::Rows;

/// A stream's lander: see [`Lander`].
pub(super) struct CudaLander {
    api: &'static Api,
    completer: Arc<Completer>,
    /// Of its context, and of the one in which page-locked memory is registered.
    health: Arc<Health>,
    home: Arc<Health>,
    stream: CUstream,
    /// The stream writes into it how many landings are over.
    word: Arc<Word>,
    landings: Mutex<u64>,
    progress: Arc<Publisher>,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CudaLander {}
// SAFETY: the driver API takes handles from any thread; what changes is behind a lock.
unsafe impl Sync for CudaLander {}

impl Cuda {
    /// Makes the lander of a place's stream. The place's context is current.
    pub(super) fn make_lander(&mut self, place: &Place) -> Result<CudaLander> {
        let home = self.home.and_then(|home| self.contexts.get(&home));
        let home = home.map_or_else(|| Arc::clone(&place.health), |home| Arc::clone(&home.health));
        let word = self.words.take().map(Arc::new)?;
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: writes a stream handle.
        let made = unsafe { self.api.stream_create(&mut stream, STREAM_NON_BLOCKING, 0) };
        self.note(place.context, made)?;
        Ok(CudaLander {
            api: self.api,
            completer: Arc::clone(&self.completer),
            health: Arc::clone(&place.health),
            home,
            stream,
            word,
            landings: Mutex::new(0),
            progress: Arc::clone(&place.progress),
        })
    }
}

impl Lander for CudaLander {
    fn land(&self, to: &Rows, bytes: Mapped, seq: u64, end: End) {
        // SAFETY: a live context. Unregistered memory can be copied too, only more slowly.
        let _ = self.home.within(self.api, |context| unsafe {
            registration::in_place(self.api, context, &self.home, bytes.region())
        });
        let mut landings = self.landings.lock().unwrap_or_else(|e| e.into_inner());
        *landings += 1;
        let enqueued = self.health.within(self.api, |_| {
            let mut offset = 0;
            for (at, len) in bytes.runs() {
                // SAFETY: the rows were checked; the bytes are held until the stream has written the word.
                unsafe { copy_rows(self.api, self.stream, Direction::ToDevice, to, offset, *at, *len) }?;
                offset += *len as u64;
            }
            // SAFETY: a live stream of the current context; the word is registered memory.
            unsafe { self.api.stream_write(self.stream, self.word.address(), *landings, 0) }
        });
        let progress = Arc::clone(&self.progress);
        let landed = move |status: Status| {
            drop(bytes);
            progress.publish(seq, status);
            end(status);
        };
        match enqueued {
            Ok(()) => self.completer.when(&self.word, *landings, &self.health, Box::new(landed)),
            Err(status) => {
                if is_sticky(status) {
                    self.health.fail(status);
                }
                landed(status);
            }
        }
    }
}

impl Drop for CudaLander {
    fn drop(&mut self) {
        // SAFETY: made by this; its work still completes. A destroyed context has destroyed it.
        let _ = self.health.within(self.api, |_| unsafe { self.api.stream_destroy(self.stream) });
    }
}
