//! Client memory that kernels reach by its address in the client: a second mapping of the same pages, at that address, registered with CUDA.
//!
//! With unified addressing a program may hand a pinned pointer straight to a kernel; so the address must be the client's own, and where this process has
//! something else there, the answer is `MAP_FAILED`; "not supported" is for clients that share no memory at all. Clients place pinned memory where that is unlikely.
//!
//! For those, a *mirror*: memory of this process at the same address, which the client keeps equal to its own. Kernels use it over the bus, as they use pinned memory on a machine of their own.

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

/// A second mapping of client memory, or a mirror of it.
pub(super) struct HostView {
    /// Context that it is registered in.
    pub(super) context: u32,
    first: usize,
    len: usize,
    mirror: bool,
}

fn machine_memory() -> u64 {
    // SAFETY: plain questions to the system.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(size).unwrap_or(0))
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

    /// Takes addresses in which this process has nothing.
    fn reserve(context: u32, first: usize, len: usize) -> Result<HostView, Status> {
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
        let view = HostView { context, first: got as usize, len, mirror: false };
        if got == wanted { Ok(view) } else { Err(Status::MAP_FAILED) }
    }

    /// Fresh memory at these pages.
    fn mirror(context: u32, op: &HostMirror) -> Result<HostView, Status> {
        let mut view = HostView::reserve(context, op.address as usize, op.size as usize)?;
        // SAFETY: the reservation, which nobody uses yet.
        let opened = unsafe {
            libc::mprotect(view.first as *mut c_void, view.len, libc::PROT_READ | libc::PROT_WRITE)
        };
        if opened < 0 {
            return Err(Status::OUT_OF_MEMORY);
        }
        view.mirror = true;
        Ok(view)
    }

    /// Changes a word of a mirror.
    fn patch(&self, patch: &WordPatch) -> Result<(), Status> {
        if !self.mirror || !patch.address.is_multiple_of(8) || !self.holds(patch.address, 8) {
            return Err(Status::INVALID_VALUE);
        }
        let word = patch.address as *mut u64;
        // SAFETY: aligned, and inside a mapping of this process's that its owner keeps; a device may change it meanwhile.
        unsafe { word.write_volatile(patch.apply(word.read_volatile())) };
        Ok(())
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
        let view = HostView::reserve(context, first, end - first)?;
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
        self.let_devices_reach(op.context, op.address, view)?;
        Ok(Answer::Now(HostMapReply {}))
    }

    /// Registers pages with the driver; devices reach them at their own address from then on.
    fn let_devices_reach(&mut self, context: ContextId, address: u64, view: HostView) -> Result<(), Status> {
        let mut device = 0;
        // SAFETY: whole pages that `view` keeps mapped until they are unregistered, or the context is gone.
        let registered = unsafe {
            self.api.host_register(view.first as *mut c_void, view.len, FLAGS).and_then(|()| {
                self.api.host_device_pointer(&mut device, view.first as *mut c_void, 0).inspect_err(|_| {
                    let _ = self.api.host_unregister(view.first as *mut c_void);
                })
            })
        };
        self.note(context, registered)?;
        if device != view.first as u64 {
            tracing::warn!("this device reaches host memory only at other addresses than the host");
            // SAFETY: registered above.
            let _ = unsafe { self.api.host_unregister(view.first as *mut c_void) };
            return Err(Status::NOT_SUPPORTED);
        }
        self.host_views.insert(address, view);
        Ok(())
    }

    pub(super) fn mirror_host(&mut self, cx: &mut Call, op: &HostMirror) -> Result<(), Status> {
        cx.context = op.context;
        op.check()?;
        if self.host_views.contains_key(&op.address) {
            return Err(Status::INVALID_VALUE);
        }
        self.may_mirror(op.size)?;
        self.enter_context(op.context)?;
        let view = HostView::mirror(op.context.0, op)?;
        self.let_devices_reach(op.context, op.address, view)
    }

    /// Whether the session may have so many bytes more of this machine's memory: as much as its memory limit leaves, and a quarter of what the machine has.
    fn may_mirror(&self, bytes: u64) -> Result<(), Status> {
        let mirrored = self.mirrored();
        let held = crate::driver::Backend::device_memory(self);
        let limit = if self.memory_limit > 0 { self.memory_limit } else { u64::MAX };
        if bytes > limit.saturating_sub(held) || bytes > (machine_memory() / 4).saturating_sub(mirrored) {
            tracing::warn!(bytes, mirrored, held, "refused: too much pinned memory that kernels use");
            return Err(Status::OUT_OF_MEMORY);
        }
        Ok(())
    }

    /// Bytes of mirrors.
    pub(super) fn mirrored(&self) -> u64 {
        self.host_views.values().filter(|view| view.mirror).map(|view| view.len as u64).sum()
    }

    /// Whether `len` bytes from `address` are memory of the client's, or a mirror of it, that devices reach.
    pub(super) fn is_host_view(&self, address: u64, len: u64) -> bool {
        self.host_views.values().any(|view| view.holds(address, len))
    }

    pub(super) fn patch_host(&mut self, cx: &mut Call, op: &HostPatch) -> Result<(), Status> {
        cx.context = op.context;
        let Some(first) = op.words.first() else { return Ok(()) };
        let view = self.host_views.values().find(|view| view.holds(first.address, 8));
        let view = view.ok_or(Status::INVALID_VALUE)?;
        op.words.iter().try_for_each(|patch| view.patch(patch))
    }

    pub(super) fn unmap_host(&mut self, cx: &mut Call, op: HostUnmap) -> Result<(), Status> {
        cx.context = op.context;
        let view = self.host_views.remove(&op.address).ok_or(Status::INVALID_VALUE)?;
        self.enter_context(ContextId(view.context))?;
        // SAFETY: registered when it was made; the client has waited for the work that used it.
        let unregistered = unsafe { self.api.host_unregister(view.first as *mut c_void) };
        self.note(op.context, unregistered)
    }
}
