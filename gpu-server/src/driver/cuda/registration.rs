//! Client memory that CUDA accesses in place: registered at its first use, for as long as the client has it
//! registered.
//!
//! A separate thread registers the arena. Most of its pages don't exist yet when a session begins, and making
//! 32 MiB of them takes longer than everything else before a program's first result (12 ms of 19 on an H200).
//! Until the arena is registered, its data goes through staging.
//!
//! It is registered in the session's home context, a primary one. In a context made by the program, the
//! registration would end with that context, and the driver would then treat the memory as pageable: it would
//! read it when a copy is enqueued, not when the stream reaches the copy.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::driver::call::Result;
use host_bridge::endpoint::Region;

use super::api::{Api, CUcontext};
use super::fence::Health;

const PAGE: usize = 4096;
/// A region with more runs than this is not registered: its data goes through staging.
const MOST_RUNS: usize = 256;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_READ_ONLY`: kernels cannot write to it. A device that doesn't know the flag refuses
/// it.
const READ_ONLY: u32 = 8;

/// The arena's pages are made in steps of this size in bytes, so that other threads can change the process's
/// mappings in between.
const STEP: usize = 1 << 20;

/// What is attached to a region.
#[derive(Default)]
struct Attached(Mutex<State>);

#[derive(Default)]
enum State {
    #[default]
    Unused,
    /// A thread is registering it.
    Coming,
    Known(Registration),
}

struct Registration {
    api: &'static Api,
    /// The context that it belongs to.
    context: CUcontext,
    /// Of that context.
    home: Arc<Health>,
    runs: Vec<*mut c_void>,
    whole: bool,
}

// SAFETY: addresses and a context handle, used only by the thread that drops this.
unsafe impl Send for Registration {}

impl Registration {
    /// Registers a region in `context`, which is current and whose health is `home`.
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
        // The pages may be of a file that the program can only read, and a kernel could guess their address.
        let flags = if region.is_read_only() { PORTABLE | READ_ONLY } else { PORTABLE };
        for (at, len) in runs {
            let first = at.as_ptr() as usize & !(PAGE - 1);
            let end = (at.as_ptr() as usize + len).next_multiple_of(PAGE);
            // SAFETY: whole pages of a mapping that the region keeps; unregistered before the region releases
            // it.
            if unsafe { api.host_register(first as *mut c_void, end - first, flags) }.is_err() {
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
        // A destroyed context has unregistered everything.
        if self.runs.is_empty() || self.home.check().is_err() {
            return;
        }
        // The control thread has no context of its own. The lock of `home` is not held: the driver may wait
        // here for work that in turn waits for someone who needs that lock.
        // SAFETY: a context of this process (the driver refuses one that was destroyed meanwhile); addresses
        // registered in it.
        unsafe {
            let _ = self.api.context_set(self.context);
            for run in &self.runs {
                let _ = self.api.host_unregister(*run);
            }
        }
    }
}

/// Whether the device can access the whole region in place. Registers it in `context`, whose health is
/// `home`, if it is not registered, or only in a destroyed context. For the arena the answer is no until that
/// is done.
///
/// # Safety
/// `context` is live.
pub(super) unsafe fn in_place(
    api: &'static Api,
    context: CUcontext,
    home: &Arc<Health>,
    region: &Arc<Region>,
) -> Result<bool> {
    let Some(mut state) = state_of(region) else { return Ok(false) };
    match &*state {
        State::Known(registration) if registration.home.check().is_ok() => return Ok(registration.whole),
        State::Coming => return Ok(false),
        State::Known(_) | State::Unused => {}
    }
    if region.is_arena() && register_arena(api, context, home, region) {
        *state = State::Coming;
        return Ok(false);
    }
    // SAFETY: live, guaranteed by the caller.
    let registration = unsafe { api.within(context, || Ok(Registration::new(api, context, home, region))) }?;
    let whole = registration.whole;
    *state = State::Known(registration);
    Ok(whole)
}

fn state_of(region: &Region) -> Option<MutexGuard<'_, State>> {
    let attached = region.registration(|| Box::<Attached>::default());
    attached.downcast_ref::<Attached>().map(|Attached(state)| state.lock().unwrap_or_else(|e| e.into_inner()))
}

/// Starts the thread that registers the arena. Returns false if that fails.
fn register_arena(api: &'static Api, context: CUcontext, home: &Arc<Health>, region: &Arc<Region>) -> bool {
    /// A handle for another thread.
    struct Handle(CUcontext);
    // SAFETY: the driver's functions take it from any thread.
    unsafe impl Send for Handle {}

    let (context, home, region) = (Handle(context), Arc::clone(home), Arc::clone(region));
    let thread = std::thread::Builder::new().name("rgpu-register".into()).spawn(move || {
        let Handle(context) = { context };
        make_pages(&region);
        // SAFETY: a context of this process; the driver refuses one that was destroyed meanwhile.
        let registered =
            unsafe { api.within(context, || Ok(Registration::new(api, context, &home, &region))) };
        if let Some(mut state) = state_of(&region) {
            *state = registered.map_or(State::Unused, State::Known);
        }
    });
    thread.is_ok()
}

/// Makes the region's pages. If this fails, so will the driver's registration.
fn make_pages(region: &Region) {
    for (at, len) in region.runs(0, region.size() as u64).unwrap_or_default() {
        let first = at.as_ptr() as usize & !(PAGE - 1);
        let end = at.as_ptr() as usize + len;
        for at in (first..end).step_by(STEP) {
            // SAFETY: pages of a mapping that the region keeps; the advice changes no byte of them.
            unsafe { libc::madvise(at as *mut c_void, STEP.min(end - at), libc::MADV_POPULATE_WRITE) };
        }
    }
}
