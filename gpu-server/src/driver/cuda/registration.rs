//! Client memory that CUDA reads and writes in place: registered at its first use, for as long as the client has it registered.

use std::ffi::c_void;
use std::sync::Arc;

use host_bridge::endpoint::Region;

use super::api::{Api, CUcontext};

const PAGE: usize = 4096;
/// A region in more runs than this is not registered: its data goes through staging.
const MOST_RUNS: usize = 256;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;

struct Registration {
    api: &'static Api,
    context: CUcontext,
    runs: Vec<*mut c_void>,
    whole: bool,
}

// SAFETY: addresses and a context handle, used by whichever thread drops this.
unsafe impl Send for Registration {}
// SAFETY: as above; never changed.
unsafe impl Sync for Registration {}

impl Registration {
    fn new(api: &'static Api, context: CUcontext, region: &Region) -> Registration {
        let mut registration = Registration { api, context, runs: Vec::new(), whole: false };
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
        if self.runs.is_empty() {
            return;
        }
        // The control thread has no context of its own. A context that was reset meanwhile has forgotten the registrations: as good.
        // SAFETY: a context of this process; addresses registered in it.
        unsafe {
            let _ = self.api.context_set(self.context);
            for run in &self.runs {
                let _ = self.api.host_unregister(*run);
            }
        }
    }
}

/// Whether the device can reach the whole region in place. Registers it if nobody has asked before; `context` is current.
pub(super) fn in_place(api: &'static Api, context: CUcontext, region: &Arc<Region>) -> bool {
    let attached = region.registration(|| Box::new(Registration::new(api, context, region)));
    attached.downcast_ref::<Registration>().is_some_and(|r| r.whole)
}
