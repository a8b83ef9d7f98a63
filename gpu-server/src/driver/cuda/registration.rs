//! Client memory that CUDA reads and writes in place: registered at its first use, for as long as the client has it registered.
//!
//! It is registered in the session's home context, a primary one. In a context that the program made the registration would end with that context, and the driver would
//! take the memory for pageable: it would read it when a copy is enqueued, and not when the stream comes to the copy.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use crate::driver::call::Result;
use host_bridge::endpoint::Region;

use super::api::{Api, CUcontext};
use super::fence::Health;

const PAGE: usize = 4096;
/// A region in more runs than this is not registered: its data goes through staging.
const MOST_RUNS: usize = 256;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;

/// What is attached to a region.
#[derive(Default)]
struct Attached(Mutex<Option<Registration>>);

struct Registration {
    api: &'static Api,
    /// The context that it belongs to.
    context: CUcontext,
    /// Of that context.
    home: Arc<Health>,
    runs: Vec<*mut c_void>,
    whole: bool,
}

// SAFETY: addresses and a context handle, used by whichever thread drops this.
unsafe impl Send for Registration {}

impl Registration {
    /// Registers a region in `context`, which is current and which `home` stands for.
    fn new(api: &'static Api, context: CUcontext, home: &Arc<Health>, region: &Region) -> Registration {
        let home = Arc::clone(home);
        let mut registration = Registration { api, context, home, runs: Vec::new(), whole: false };
        let Some(runs) = region.runs(0, region.size() as u64) else { return registration };
        if runs.is_empty() || runs.len() > MOST_RUNS {
            tracing::debug!(
                "a region of {} bytes in {} runs goes through staging",
                region.size(),
                runs.len()
            );
            return registration;
        }
        for (at, len) in runs {
            let first = at.as_ptr() as usize & !(PAGE - 1);
            let end = (at.as_ptr() as usize + len).next_multiple_of(PAGE);
            // SAFETY: whole pages of a mapping that the region keeps; unregistered before the region lets it go.
            if unsafe { api.host_register(first as *mut c_void, end - first, PORTABLE) }.is_err() {
                return registration;
            }
            registration.runs.push(first as *mut c_void);
        }
        registration.whole = true;
        registration
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A context that is gone has unregistered everything.
        if self.runs.is_empty() || self.home.check().is_err() {
            return;
        }
        // The control thread has no context of its own. The lock of `home` is not held: the driver may wait here for work that waits for whoever needs that lock.
        // SAFETY: a context of this process (the driver refuses one that has gone meanwhile); addresses registered in it.
        unsafe {
            let _ = self.api.context_set(self.context);
            for run in &self.runs {
                let _ = self.api.host_unregister(*run);
            }
        }
    }
}

/// Whether the device can reach the whole region in place. Registers it in `context`, which `home` stands for, if it is not registered, or was in a context that is gone.
///
/// # Safety
/// `context` is live.
pub(super) unsafe fn in_place(
    api: &'static Api,
    context: CUcontext,
    home: &Arc<Health>,
    region: &Arc<Region>,
) -> Result<bool> {
    let attached = region.registration(|| Box::<Attached>::default());
    let Some(Attached(held)) = attached.downcast_ref::<Attached>() else { return Ok(false) };
    let mut held = held.lock().unwrap_or_else(|e| e.into_inner());
    if held.as_ref().is_none_or(|registration| registration.home.check().is_err()) {
        // SAFETY: live, as the caller says.
        *held = Some(unsafe { api.within(context, || Ok(Registration::new(api, context, home, region))) }?);
    }
    Ok(held.as_ref().is_some_and(|registration| registration.whole))
}
