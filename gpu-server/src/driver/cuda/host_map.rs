//! Client memory that kernels use at the client's address: a second mapping of the same pages at that
//! address, registered with CUDA.
//!
//! With unified addressing, a program may pass a pinned pointer directly to a kernel, so the address must be
//! the client's. If this process has something else there, the operation fails with `MAP_FAILED`. Clients
//! place pinned memory where that is unlikely.
//!
//! Clients that share no memory with this process get a *mirror*: memory of this process at the same address,
//! which the client keeps equal to its own. Kernels access it over the bus, like pinned memory on their own
//! machine.

use std::ffi::c_void;
use std::sync::Arc;

use host_bridge::endpoint::{InUse, Mapped, Sink};
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::memory::*;

use super::Cuda;
use super::api::{Api, CUcontext};
use super::reach::Reach;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::{GpuHostMemory, GpuMemory};
use crate::driver::helper::Helper;
use crate::driver::quota::{MirrorCharge, Quota};

const PAGE: usize = 4096;
/// The lowest address of a mapping.
const LOWEST: usize = 1 << 20;
/// The end of user space.
const HIGHEST: usize = 1 << 47;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const FLAGS: u32 = 3;

/// A second mapping of client memory, or a mirror of it.
pub struct HostView {
    first: usize,
    len: usize,
    mirror: Option<Mirror>,
    _charge: Option<MirrorCharge>,
    /// Set if kernels may use the client's own memory at any time.
    _in_use: Option<InUse>,
}

/// The part of a view that makes it a mirror. It exists once [`Reach`] knows the mirror.
struct Mirror {
    beside: Arc<Reach>,
    /// Makes and removes mirrors. The driver may first wait for all work to finish, that work may wait for
    /// the client's host functions, and those for the dispatcher.
    helper: Helper,
    /// `CUcontext`.
    context: usize,
    api: &'static Api,
}

/// Registers a view's pages with the driver, so that devices access them at the same address.
///
/// # Safety
/// A context is current, and the pages stay mapped until they are unregistered or the context is destroyed.
unsafe fn register(api: &Api, view: &HostView) -> Result {
    let first = view.first as *mut c_void;
    let mut device = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        api.host_register(first, view.len, FLAGS)?;
        let found = api.host_device_pointer(&mut device, first, 0);
        if found.is_err() || device != view.first as u64 {
            let _ = api.host_unregister(first);
        }
        found?;
    }
    if device != view.first as u64 {
        tracing::warn!("this device reaches host memory only at other addresses than the host");
        return Err(Status::NOT_SUPPORTED);
    }
    Ok(())
}

impl Drop for HostView {
    fn drop(&mut self) {
        let (first, len) = (self.first, self.len);
        // SAFETY: mapped by `at`. A remaining registration keeps the pages, not the addresses.
        let unmap = move || unsafe { libc::munmap(first as *mut c_void, len) };
        let Some(Mirror { beside, helper, context, api }) = self.mirror.take() else {
            unmap();
            return;
        };
        helper.run(move || {
            if beside.remove_mirror(first) {
                // SAFETY: registered by `make_mirror`; a context destroyed meanwhile has released it.
                let gone = unsafe {
                    api.context_set(context as CUcontext)
                        .and_then(|()| api.host_unregister(first as *mut c_void))
                };
                if let Err(status) = gone {
                    tracing::debug!("unregistering a mirror at {first:#x}: {status}");
                }
                unmap();
            }
        });
    }
}

impl HostView {
    /// Reserves addresses that this process doesn't use.
    fn reserve(first: usize, len: usize) -> Result<HostView> {
        let wanted = first as *mut c_void;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping, where nothing is mapped.
        let got = unsafe { libc::mmap(wanted, len, libc::PROT_NONE, flags, -1, 0) };
        if got == libc::MAP_FAILED {
            tracing::warn!(
                "pinned memory cannot be mapped for kernels at {first:#x}: {}",
                std::io::Error::last_os_error()
            );
            return Err(Status::MAP_FAILED);
        }
        let view = HostView { first: got as usize, len, mirror: None, _charge: None, _in_use: None };
        if got == wanted { Ok(view) } else { Err(Status::MAP_FAILED) }
    }

    /// Makes new memory at these pages that devices can access.
    fn make_mirror(api: &Api, context: usize, first: usize, len: usize) -> Result {
        let view = HostView::reserve(first, len)?;
        // SAFETY: the reservation, which nobody uses yet; a live context; pages that stay mapped until they
        // are unregistered.
        unsafe {
            if libc::mprotect(first as *mut c_void, len, libc::PROT_READ | libc::PROT_WRITE) < 0 {
                return Err(Status::OUT_OF_MEMORY);
            }
            api.context_set(context as CUcontext)?;
            register(api, &view)?;
        }
        std::mem::forget(view);
        Ok(())
    }

    /// Maps the pages of `memory` a second time, so that its first byte is at `address`.
    fn at(address: u64, memory: &Mapped) -> Result<HostView> {
        let address = usize::try_from(address).map_err(|_| Status::INVALID_VALUE)?;
        let end = address
            .checked_add(memory.len())
            .and_then(|end| end.checked_next_multiple_of(PAGE))
            .filter(|end| *end <= HIGHEST && address >= LOWEST && !memory.is_empty())
            .ok_or(Status::INVALID_VALUE)?;
        let first = address & !(PAGE - 1);
        let view = HostView::reserve(first, end - first)?;
        let mut at = address;
        for (run, len) in memory.runs() {
            let (from, to) = (run.as_ptr() as usize & !(PAGE - 1), at & !(PAGE - 1));
            let pages = (at + len).next_multiple_of(PAGE) - to;
            if run.as_ptr() as usize % PAGE != at % PAGE {
                tracing::warn!("pinned memory cannot be mapped for kernels: its pieces are no whole pages");
                return Err(Status::MAP_FAILED);
            }
            // SAFETY: with an old size of 0, this makes a second mapping of the shared pages at `from`, which
            // `memory` keeps mapped, over a part of the reservation, which nobody else uses.
            let made = unsafe {
                libc::mremap(
                    from as *mut c_void,
                    0,
                    pages,
                    libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                    to as *mut c_void,
                )
            };
            if made == libc::MAP_FAILED {
                tracing::warn!("mapping pinned memory for kernels: {}", std::io::Error::last_os_error());
                return Err(Status::OUT_OF_MEMORY);
            }
            at += len;
        }
        Ok(view)
    }
}

impl GpuHostMemory for Cuda {
    type HostView = HostView;

    fn map_host(&mut self, cx: &mut Call, op: HostMap) -> Result<HostView> {
        if cx.client.streams_data() {
            return Err(Status::NOT_SUPPORTED);
        }
        let Sink::Mapped(memory) = cx.output(op.memory)? else { return Err(Status::NOT_SUPPORTED) };
        let mut view = HostView::at(op.address, &memory)?;
        view._in_use = memory.in_use();
        // SAFETY: whole pages that `view` keeps mapped until they are unregistered, or the context is
        // destroyed.
        let registered = unsafe { register(self.api, &view) };
        self.note(op.context, registered)?;
        Ok(view)
    }

    fn mirror_host(
        &mut self,
        cx: &mut Call,
        op: &HostMirror,
        quota: &Quota,
    ) -> Result<(HostView, Answer<HostMirrorReply>)> {
        let context = self.enter_context(op.context)?;
        let (device, context) = (context.device, context.handle as usize);
        let charge = quota.charge_mirror(self.number(device), op.size)?;
        let helper = match &self.mirrors {
            Some(helper) => helper.clone(),
            None => self.mirrors.insert(Helper::start("rgpu-mirrors")?).clone(),
        };
        let (first, len, api) = (op.address as usize, op.size as usize, self.api);
        let beside = Arc::clone(&self.beside);
        let mirror = Mirror { beside: Arc::clone(&beside), helper: helper.clone(), context, api };
        let view = HostView { first, len, mirror: Some(mirror), _charge: Some(charge), _in_use: None };
        let pending = cx.later();
        helper.run(move || {
            let made = HostView::make_mirror(api, context, first, len);
            if made.is_ok() {
                beside.add_mirror(first, len);
            }
            pending.answer(made.map(|()| HostMirrorReply {}));
        });
        Ok((view, Answer::Later))
    }

    fn unmap_host(&mut self, context: ContextId, of: ContextId, view: HostView) -> Result {
        if view.mirror.is_some() {
            return Ok(());
        }
        self.enter_context(of)?;
        // SAFETY: registered when it was made; the client has waited for the work that used it.
        let unregistered = unsafe { self.api.host_unregister(view.first as *mut c_void) };
        self.note(context, unregistered)
    }

    fn forget_host(&mut self, view: HostView) {
        // The registration ended with the context. Dropping the view unmaps its pages.
        drop(view);
    }
}
