//! Device memory, and client memory that kernels use.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::memory::{HostMap, HostMirror, HostMirrorReply};

use crate::driver::call::{Call, Result};
use crate::driver::quota::Quota;
use crate::driver::space::Mapping;
use crate::driver::store::{Chunk, Lane, Part, Way};

/// A block of device memory, for other devices of this machine.
pub enum Block {
    /// Of a GPU.
    DmaBuf(OwnedFd),
    /// Of a GPU in software. It stays mapped as long as the block's memory belongs to the session.
    Here(NonNull<u8>),
}

/// Device memory.
pub trait GpuMemory {
    /// The backing of a piece of a device's window.
    type Piece: Send;
    /// Memory without an address.
    type Memory: Send;

    /// Granularity of sizes and addresses of a device's memory, in bytes.
    fn granule(&self, device: u32) -> u64;

    /// Whether a device's memory can be shared between processes.
    fn exports(&self, device: u32) -> bool;

    /// From now on, memory is made so that other devices of this machine can read it, if that makes a
    /// difference.
    fn prepare_in_place(&mut self) {}

    /// Memory of a device, in whole granules, for other devices of this machine, which read it in place. It
    /// stays valid until the memory is freed or set aside.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if the device's memory cannot be given to others.
    fn in_place(&mut self, device: u32, address: u64, size: u64) -> Result<Block>;

    /// A device's number on this server: the same in every worker, whatever its ordinal in the session.
    fn number(&self, device: u32) -> u32;

    /// Free and total bytes of a device, before the session's quota.
    fn memory_info(&mut self, device: u32) -> Result<(u64, u64)>;

    /// Backs unused addresses of a device's window, for every device that can access its memory.
    fn back(&mut self, device: u32, address: u64, size: u64) -> Result<Self::Piece>;

    /// Releases a piece that [`back`](GpuMemory::back) made. The returned function unmaps its addresses; any
    /// thread calls it once nothing uses them.
    fn unback(&mut self, device: u32, address: u64, size: u64) -> impl FnOnce() -> Result + Send + 'static;

    /// Called before each step of moving memory off the devices or back. An error is treated as one of the
    /// step, which is then not begun: this is for imitating failures.
    fn before_move(&mut self) -> Result {
        Ok(())
    }

    /// Takes a piece's memory off its device. Its addresses and the allocations in it stay; nothing uses them
    /// until [`bring_back`](GpuMemory::bring_back) has given them memory again.
    fn set_aside(&mut self, device: u32, address: u64, size: u64) -> Result {
        self.unback(device, address, size)()
    }

    /// Gives a piece that was [set aside](GpuMemory::set_aside) memory again, with undefined contents.
    fn bring_back(&mut self, device: u32, address: u64, size: u64) -> Result<Self::Piece> {
        self.back(device, address, size)
    }

    /// Starts copying bytes between a device and the store, in one of two lanes. The device has no other
    /// work.
    fn transfer(&mut self, device: u32, lane: Lane, way: Way, part: Part) -> Result;

    /// Waits until every [`transfer`](GpuMemory::transfer) of a device and lane is done. This is the only
    /// call here that waits for a device, and it waits only for copies.
    fn transferred(&mut self, device: u32, lane: Lane) -> Result;

    /// Page-locks memory of the store, if that makes copies faster. Unlocked memory is used as well.
    fn lock(&mut self, _chunk: &mut Chunk) {}

    /// Undoes [`lock`](GpuMemory::lock).
    fn unlock(&mut self, _chunk: &mut Chunk) {}

    /// An allocation now exists in a device's window.
    fn place(&mut self, _device: u32, _address: u64, _size: u64) -> Result {
        Ok(())
    }

    /// An allocation in a device's window was freed.
    fn release(&mut self, _device: u32, _address: u64) -> Result {
        Ok(())
    }

    /// What a module has at an address that is outside all windows: first address and size. The session may
    /// not know it, because the client has not asked for it by name.
    fn module_memory(&self, address: u64, device: u32) -> Option<(u64, u64)>;

    /// Reserves addresses that a client [may reserve](protocol::ops::memory::may_be_reserved).
    fn reserve(&mut self, address: u64, size: u64) -> Result;

    /// Releases what [`reserve`](GpuMemory::reserve) reserved. Nothing is mapped there.
    fn unreserve(&mut self, address: u64, size: u64) -> Result;

    /// Makes memory without an address. It can be exported if the device [exports](GpuMemory::exports).
    fn create(&mut self, device: u32, size: u64) -> Result<Self::Memory>;

    /// Releases memory that is not mapped anywhere. `imported`: whether it came from
    /// [`import`](GpuMemory::import).
    fn destroy(&mut self, device: u32, size: u64, memory: Self::Memory, imported: bool) -> Result;

    /// Maps a part of memory at reserved addresses. No device may access it yet.
    fn map(&mut self, memory: &Self::Memory, device: u32, offset: u64, address: u64, size: u64) -> Result;

    /// Removes a mapping. Devices that can no longer access it are removed from `access`.
    fn unmap(&mut self, address: u64, size: u64, access: &mut Vec<u32>) -> Result;

    /// Sets how a device may access a mapping of `memory` at `address`: `flags` is 0 (not at all), 1 (read)
    /// or 3 (read and write).
    fn set_access(
        &mut self,
        memory: &Self::Memory,
        mapping: &Mapping,
        address: u64,
        device: u32,
        flags: u32,
    ) -> Result;

    /// Maps all of `memory` at addresses that the client does not know, where its own device reads and writes
    /// it, and returns the first one.
    fn map_whole(&mut self, memory: &Self::Memory, device: u32, size: u64) -> Result<u64>;

    /// Removes what [`map_whole`](GpuMemory::map_whole) mapped.
    fn unmap_whole(&mut self, device: u32, address: u64, size: u64) -> Result;

    /// A descriptor from which other processes can [import](GpuMemory::import) the memory.
    fn export(&mut self, memory: &Self::Memory) -> Result<OwnedFd>;

    /// The same for a piece of a window.
    fn export_piece(&mut self, device: u32, address: u64, piece: &Self::Piece) -> Result<OwnedFd>;

    /// Opens device memory that another worker exported.
    fn import(&mut self, device: u32, fd: OwnedFd) -> Result<Self::Memory>;
}

/// Client memory that kernels use.
pub trait GpuHostMemory {
    /// Client memory that devices access, or a mirror of it.
    type HostView: Send;

    /// Lets devices access client memory in place, at the client's own address. The context has been entered.
    /// The command's output has not been taken yet.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if client memory cannot be mapped. The client then requests a mirror.
    fn map_host(&mut self, _cx: &mut Call, _op: HostMap) -> Result<Self::HostView> {
        Err(Status::NOT_SUPPORTED)
    }

    /// Makes a mirror: memory at a range that no other view touches, which devices access there and
    /// [`Beside`](crate::driver::Beside) reads and writes. The context has been entered. Charges `quota` for
    /// it, with [`charge_mirror`](Quota::charge_mirror); the mirror owns the charge.
    fn mirror_host(
        &mut self,
        cx: &mut Call,
        op: &HostMirror,
        quota: &Quota,
    ) -> Result<(Self::HostView, Answer<HostMirrorReply>)>;

    /// Removes a view that was made in the context `of`. The client has waited for the work that used it.
    /// `context` is the command's.
    fn unmap_host(&mut self, context: ContextId, of: ContextId, view: Self::HostView) -> Result;

    /// A view's context no longer exists, and neither does the view.
    fn forget_host(&mut self, view: Self::HostView);
}
