//! What a session needs of a GPU: the interface between [`Session`](super::session::Session) and the two backends.
//!
//! The session has checked everything that a client can get wrong before it calls one of these: handles name what it made, ranges lie in the
//! session's memory, sizes are whole granules, quotas are charged. A backend contains only what its GPU does differently. It may refuse with
//! any [`Status`]; the session then undoes what it has noted and passes the status on.
//!
//! The dispatcher's thread makes all of these calls, one at a time. None of them may wait for work on the device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::{ContextId, EventId};
use protocol::ops::memory::{HostMap, HostMirror, HostMirrorReply};
use protocol::ops::{Answer, MayBlock};

use super::Unavailable;
use super::beside::Beside;
use super::call::Call;
use super::quota::Quota;
use super::space::Mapping;

/// The devices of one session.
pub trait Gpu: GpuMemory + GpuHostMemory + GpuSharedEvents + Sized + Send {
    /// The backend's name: `cuda` or `software`.
    const NAME: &'static str;

    /// What other threads than the dispatcher's may use.
    type Beside: Beside + 'static;

    /// Names of the devices, by ordinal.
    fn names(&self) -> Vec<String>;

    /// See [`Backend::warm`](super::Backend::warm).
    fn warm(&mut self) -> Result<Option<u64>, Unavailable>;

    /// A client has come. Called once, before its first command; perhaps from another thread than [`warm`](Gpu::warm) was.
    fn begin(&mut self, client: &Arc<dyn Client>);

    /// See [`Backend::may_wait`](super::Backend::may_wait).
    fn may_wait(&self, may_block: MayBlock, body: &[u8]) -> bool;

    /// What other threads may use, for those.
    fn beside(&self) -> &Arc<Self::Beside>;

    /// The client is gone: releases every thread that waits for it. Called once, after the last command; the process ends soon after.
    fn end(&mut self);

    /// Makes a context ready for the calls that follow. A device's primary context is made when something enters it for the first time.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` if there is none; its error if it has failed.
    fn enter(&mut self, context: ContextId) -> Result<(), Status>;

    /// Called before the calls for which NVIDIA's driver may wait until the device is idle, so that a backend can imitate that for tests.
    fn before_waiting_call(&mut self, _device: u32) -> Result<(), Status> {
        Ok(())
    }

    /// Calls `end` when everything that is enqueued on a device by now is done, or never will be: then its argument says why. `seq` is the command's.
    fn after_device(&mut self, device: u32, seq: u64, end: impl FnOnce(Status) + Send + 'static);
}

/// Device memory.
pub trait GpuMemory {
    /// What backs a piece of a device's window.
    type Piece: Send;
    /// Memory without an address.
    type Memory: Send;

    /// What sizes and addresses of a device's memory are multiples of, in bytes.
    fn granule(&self, device: u32) -> u64;

    /// Whether a device's memory can be shared between processes.
    fn exports(&self, device: u32) -> bool;

    /// A device's number on this server: the same in every worker, whatever ordinal the device has in the session.
    fn number(&self, device: u32) -> u32;

    /// Free and total bytes of a device, before the session's quota.
    fn memory_info(&mut self, device: u32) -> Result<(u64, u64), Status>;

    /// Backs free addresses of a device's window, for every device that can reach its memory.
    fn back(&mut self, device: u32, address: u64, size: u64) -> Result<Self::Piece, Status>;

    /// Gives up a piece that [`back`](GpuMemory::back) made. The returned function takes its addresses away; it is called, by any thread, once nothing uses them.
    fn unback(
        &mut self,
        device: u32,
        address: u64,
        size: u64,
    ) -> impl FnOnce() -> Result<(), Status> + Send + 'static;

    /// An allocation stands in a device's window from now on.
    fn place(&mut self, _device: u32, _address: u64, _size: u64) -> Result<(), Status> {
        Ok(())
    }

    /// An allocation of a device's window is gone.
    fn release(&mut self, _device: u32, _address: u64) -> Result<(), Status> {
        Ok(())
    }

    /// Whether `len` bytes from `address`, outside all windows, are a variable of a module on a device.
    fn has_variable(&self, address: u64, len: u64, device: u32) -> bool;

    /// Reserves addresses of [`SPACE`](protocol::ops::memory::SPACE).
    fn reserve(&mut self, address: u64, size: u64) -> Result<(), Status>;

    /// Gives up what [`reserve`](GpuMemory::reserve) reserved. Nothing is mapped there.
    fn unreserve(&mut self, address: u64, size: u64) -> Result<(), Status>;

    /// Makes memory without an address. It can be exported if the device [exports](GpuMemory::exports).
    fn create(&mut self, device: u32, size: u64) -> Result<Self::Memory, Status>;

    /// Gives up memory to which nothing is mapped. `imported`: [`import`](GpuMemory::import) made it.
    fn destroy(&mut self, device: u32, size: u64, memory: Self::Memory, imported: bool)
    -> Result<(), Status>;

    /// Maps a part of memory at reserved addresses. No device may access it yet.
    fn map(
        &mut self,
        memory: &Self::Memory,
        device: u32,
        offset: u64,
        address: u64,
        size: u64,
    ) -> Result<(), Status>;

    /// Takes a mapping away. Devices that can access it no longer are removed from `access`.
    fn unmap(&mut self, address: u64, size: u64, access: &mut Vec<u32>) -> Result<(), Status>;

    /// Sets what a device may do with a mapping of `memory` at `address`: `flags` is 0 (nothing), 1 (read) or 3 (read and write).
    fn set_access(
        &mut self,
        memory: &Self::Memory,
        mapping: &Mapping,
        address: u64,
        device: u32,
        flags: u32,
    ) -> Result<(), Status>;

    /// A descriptor by which other processes [import](GpuMemory::import) memory.
    fn export(&mut self, memory: &Self::Memory) -> Result<OwnedFd, Status>;

    /// The same for a piece of a window.
    fn export_piece(&mut self, device: u32, address: u64, piece: &Self::Piece) -> Result<OwnedFd, Status>;

    /// Opens memory of a device that another worker exported.
    fn import(&mut self, device: u32, fd: OwnedFd) -> Result<Self::Memory, Status>;
}

/// Client memory that kernels use.
pub trait GpuHostMemory {
    /// Client memory that devices reach, or a mirror of it.
    type HostView: Send;

    /// Lets devices reach client memory in place, at the client's own address. The context was entered. The command's output is not taken yet.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` where client memory cannot be mapped: the client asks for a mirror then.
    fn map_host(&mut self, _cx: &mut Call, _op: HostMap) -> Result<Self::HostView, Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Makes memory at a range that no other view touches, which devices reach there and [`Beside`] reads and writes. The context was
    /// entered. Charges `quota` for it; the charge goes with the mirror.
    fn mirror_host(
        &mut self,
        cx: &mut Call,
        op: &HostMirror,
        quota: &Quota,
    ) -> Result<(Self::HostView, Answer<HostMirrorReply>), Status>;

    /// Takes away a view that was made in the context `of`. The client has waited for the work that used it. `context` is the command's.
    fn unmap_host(&mut self, context: ContextId, of: ContextId, view: Self::HostView) -> Result<(), Status>;

    /// A view's context is gone, and the view with it.
    fn forget_host(&mut self, view: Self::HostView);
}

/// Events that sessions of one client share.
pub trait GpuSharedEvents {
    /// Whether events can be shared between processes. Where not, no method of this trait is called.
    const SHARES_EVENTS: bool;

    /// Whether the session has an event of this name.
    fn has_event(&self, _event: EventId) -> bool {
        false
    }

    /// The handle by which other processes open an event, and the number of its device. Only an event that was made for it has one.
    fn export_event(&mut self, _event: EventId) -> Result<(u32, Vec<u8>), Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Opens an event that another worker exported.
    fn import_event(&mut self, _context: ContextId, _event: EventId, _handle: Vec<u8>) -> Result<(), Status> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Whether an event's last record is done.
    fn query_event(&mut self, _event: EventId) -> Result<bool, Status> {
        Err(Status::NOT_SUPPORTED)
    }
}
