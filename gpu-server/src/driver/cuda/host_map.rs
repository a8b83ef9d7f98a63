//! Client memory that kernels reach by its address in the client: a second mapping of the same pages, at that address, registered with CUDA.
//!
//! With unified addressing a program may hand a pinned pointer straight to a kernel; so the address must be the client's own, and where this process has
//! something else there, the answer is `MAP_FAILED`; "not supported" is for clients that share no memory at all. Clients place pinned memory where that is unlikely.

use std::ffi::c_void;

use host_bridge::endpoint::{Mapped, Sink};
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::memory::*;

use super::Cuda;
use crate::driver::call::Call;

const PAGE: usize = 4096;
/// Below this, no mapping is made, whatever a client says.
const LOWEST: usize = 1 << 20;
/// Above this lies the kernel's half.
const HIGHEST: usize = 1 << 47;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const FLAGS: u32 = 3;

/// A second mapping of client memory.
pub(super) struct HostView {
    /// Context that it is registered in.
    pub(super) context: u32,
    first: usize,
    len: usize,
}

impl Drop for HostView {
    fn drop(&mut self) {
        // SAFETY: mapped by `at`; the registration, if there is one still, keeps the pages, not the addresses.
        unsafe { libc::munmap(self.first as *mut c_void, self.len) };
    }
}

impl HostView {
    /// Whether `len` bytes from `address` are among its pages.
    pub(super) fn holds(&self, address: u64, len: u64) -> bool {
        let (first, end) = (self.first as u64, (self.first + self.len) as u64);
        address >= first && address < end && len <= end - address
    }

    /// Maps the pages of `memory` once more, so that its first byte is at `address`.
    fn at(context: u32, address: u64, memory: &Mapped) -> Result<HostView, Status> {
        let address = usize::try_from(address).map_err(|_| Status::INVALID_VALUE)?;
        let end = address
            .checked_add(memory.len())
            .and_then(|end| end.checked_next_multiple_of(PAGE))
            .filter(|end| *end <= HIGHEST && address >= LOWEST && !memory.is_empty())
            .ok_or(Status::INVALID_VALUE)?;
        let first = address & !(PAGE - 1);
        let wanted = first as *mut c_void;
        let reserve =
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping, where nothing is mapped.
        let got = unsafe { libc::mmap(wanted, end - first, libc::PROT_NONE, reserve, -1, 0) };
        if got == libc::MAP_FAILED {
            tracing::warn!(
                "pinned memory cannot be mapped for kernels at {address:#x}: {}",
                std::io::Error::last_os_error()
            );
            return Err(Status::MAP_FAILED);
        }
        let view = HostView { context, first: got as usize, len: end - first };
        if got != wanted {
            return Err(Status::MAP_FAILED);
        }
        let mut at = address;
        for (run, len) in memory.runs() {
            let (from, to) = (run.as_ptr() as usize & !(PAGE - 1), at & !(PAGE - 1));
            let pages = (at + len).next_multiple_of(PAGE) - to;
            if run.as_ptr() as usize % PAGE != at % PAGE {
                tracing::warn!("pinned memory cannot be mapped for kernels: its pieces are no whole pages");
                return Err(Status::MAP_FAILED);
            }
            // SAFETY: with an old size of 0, a second mapping of the shared pages at `from`, which `memory` keeps mapped, is made over a part of the
            // reservation, which nobody else uses.
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

impl Cuda {
    pub(super) fn map_host(&mut self, cx: &mut Call, op: HostMap) -> Result<Answer<HostMapReply>, Status> {
        cx.context = op.context;
        self.enter_context(op.context)?;
        if cx.client.streams_data() {
            return Err(Status::NOT_SUPPORTED);
        }
        let Sink::Mapped(memory) = cx.output(op.memory)? else { return Err(Status::NOT_SUPPORTED) };
        let view = HostView::at(op.context.0, op.address, &memory)?;
        let mut device = 0;
        // SAFETY: whole pages that `view` keeps mapped until they are unregistered, or the context is gone.
        let registered = unsafe {
            self.api.host_register(view.first as *mut c_void, view.len, FLAGS).and_then(|()| {
                self.api.host_device_pointer(&mut device, view.first as *mut c_void, 0).inspect_err(|_| {
                    let _ = self.api.host_unregister(view.first as *mut c_void);
                })
            })
        };
        self.note(op.context, registered)?;
        if device != view.first as u64 {
            tracing::warn!("this device reaches host memory only at other addresses than the host");
            // SAFETY: registered above.
            let _ = unsafe { self.api.host_unregister(view.first as *mut c_void) };
            return Err(Status::NOT_SUPPORTED);
        }
        self.host_views.insert(op.address, view);
        Ok(Answer::Now(HostMapReply {}))
    }

    pub(super) fn unmap_host(&mut self, cx: &mut Call, op: HostUnmap) -> Result<(), Status> {
        cx.context = op.context;
        let view = self.host_views.remove(&op.address).ok_or(Status::INVALID_VALUE)?;
        self.enter_context(ContextId(view.context))?;
        // SAFETY: registered by `map_host`; the client has waited for the work that used it.
        let unregistered = unsafe { self.api.host_unregister(view.first as *mut c_void) };
        self.note(op.context, unregistered)
    }
}
