//! Device memory, and client memory that kernels use.

use std::os::fd::OwnedFd;

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::memory::{HostMap, HostMirror, HostMirrorReply};

use crate::driver::call::{Call, Result};
use crate::driver::quota::Quota;
use crate::driver::space::Mapping;
use crate::driver::store::{Chunk, Lane, Part, Way};

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
    fn memory_info(&mut self, device: u32) -> Result<(u64, u64)>;

    /// Backs free addresses of a device's window, for every device that can reach its memory.
    fn back(&mut self, device: u32, address: u64, size: u64) -> Result<Self::Piece>;

    /// Gives up a piece that [`back`](GpuMemory::back) made. The returned function takes its addresses away; it is called, by any thread, once nothing uses them.
    fn unback(&mut self, device: u32, address: u64, size: u64) -> impl FnOnce() -> Result + Send + 'static;

    /// Takes a piece's memory off its device. Its addresses stay as they are, and so do the allocations in it; nothing uses them until [`bring_back`](GpuMemory::bring_back) has given them memory again.
    fn set_aside(&mut self, device: u32, address: u64, size: u64) -> Result {
        self.unback(device, address, size)()
    }

    /// Gives a piece that was [set aside](GpuMemory::set_aside) memory again, with any contents.
    fn bring_back(&mut self, device: u32, address: u64, size: u64) -> Result<Self::Piece> {
        self.back(device, address, size)
    }

    /// Begins to copy bytes between a device and the store, in one of two lanes. No other work is under way on the device.
    fn transfer(&mut self, device: u32, lane: Lane, way: Way, part: Part) -> Result;

    /// Waits until everything that [`transfer`](GpuMemory::transfer) has begun on a device in a lane is done. The one call here that waits for a device: for copies alone.
    fn transferred(&mut self, device: u32, lane: Lane) -> Result;

    /// Page-locks memory of the store, if that makes copies faster. It is used without that, too.
    fn lock(&mut self, _chunk: &mut Chunk) {}

    /// Undoes that.
    fn unlock(&mut self, _chunk: &mut Chunk) {}

    /// An allocation stands in a device's window from now on.
    fn place(&mut self, _device: u32, _address: u64, _size: u64) -> Result {
        Ok(())
    }

    /// An allocation of a device's window is gone.
    fn release(&mut self, _device: u32, _address: u64) -> Result {
        Ok(())
    }

    /// Whether `len` bytes from `address`, outside all windows, are memory on a device that the session need not know of: a variable that the client has not asked for.
    fn knows(&self, _address: u64, _len: u64, _device: u32) -> bool {
        false
    }

    /// Reserves addresses of [`SPACE`](protocol::ops::memory::SPACE).
    fn reserve(&mut self, address: u64, size: u64) -> Result;

    /// Gives up what [`reserve`](GpuMemory::reserve) reserved. Nothing is mapped there.
    fn unreserve(&mut self, address: u64, size: u64) -> Result;

    /// Makes memory without an address. It can be exported if the device [exports](GpuMemory::exports).
    fn create(&mut self, device: u32, size: u64) -> Result<Self::Memory>;

    /// Gives up memory to which nothing is mapped. `imported`: [`import`](GpuMemory::import) made it.
    fn destroy(&mut self, device: u32, size: u64, memory: Self::Memory, imported: bool) -> Result;

    /// Maps a part of memory at reserved addresses. No device may access it yet.
    fn map(&mut self, memory: &Self::Memory, device: u32, offset: u64, address: u64, size: u64) -> Result;

    /// Takes a mapping away. Devices that can access it no longer are removed from `access`.
    fn unmap(&mut self, address: u64, size: u64, access: &mut Vec<u32>) -> Result;

    /// Sets what a device may do with a mapping of `memory` at `address`: `flags` is 0 (nothing), 1 (read) or 3 (read and write).
    fn set_access(
        &mut self,
        memory: &Self::Memory,
        mapping: &Mapping,
        address: u64,
        device: u32,
        flags: u32,
    ) -> Result;

    /// A descriptor by which other processes [import](GpuMemory::import) memory.
    fn export(&mut self, memory: &Self::Memory) -> Result<OwnedFd>;

    /// The same for a piece of a window.
    fn export_piece(&mut self, device: u32, address: u64, piece: &Self::Piece) -> Result<OwnedFd>;

    /// Opens memory of a device that another worker exported.
    fn import(&mut self, device: u32, fd: OwnedFd) -> Result<Self::Memory>;
}

/// Client memory that kernels use.
pub trait GpuHostMemory {
    /// Client memory that devices reach, or a mirror of it.
    type HostView: Send;

    /// Lets devices reach client memory in place, at the client's own address. The context was entered. The command's output is not taken yet.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` where client memory cannot be mapped: the client asks for a mirror then.
    fn map_host(&mut self, _cx: &mut Call, _op: HostMap) -> Result<Self::HostView> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Makes memory at a range that no other view touches, which devices reach there and [`Beside`](crate::driver::Beside) reads and writes. The context was
    /// entered. Charges `quota` for it, with [`charge_mirror`](Quota::charge_mirror); the charge goes with the mirror.
    fn mirror_host(
        &mut self,
        cx: &mut Call,
        op: &HostMirror,
        quota: &Quota,
    ) -> Result<(Self::HostView, Answer<HostMirrorReply>)>;

    /// Takes away a view that was made in the context `of`. The client has waited for the work that used it. `context` is the command's.
    fn unmap_host(&mut self, context: ContextId, of: ContextId, view: Self::HostView) -> Result;

    /// A view's context is gone, and the view with it.
    fn forget_host(&mut self, view: Self::HostView);
}
