//! Device memory, at addresses that the client chooses (DESIGN §5).
//!
//! The session has one window of addresses for each device: [`window`]. The client asks the server to back a piece of it with memory
//! ([`MemGrow`]) and then places allocations inside what is backed by itself ([`MemAlloc`], no answer).

use crate::data::HostOut;
use crate::handle::ContextId;
use crate::ops::ops;

/// Bytes of one device's window.
pub const WINDOW_SIZE: u64 = 1 << 40;

/// First address of the window of device `ordinal`.
pub const fn window(ordinal: u32) -> u64 {
    0x2000_0000_0000 + ordinal as u64 * WINDOW_SIZE
}

ops! {
    /// Device memory.
    trait MemoryOps;

    /// Backs `size` bytes at `address` with memory: `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`. Both are multiples of the device's granule and
    /// inside its window. Answered `CUDA_ERROR_OUT_OF_MEMORY` when the device, or this session's share of it, has no more.
    sync 0x0301 mem_grow: MemGrow {
        /// Ordinal.
        device: u32,
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    } -> MemGrowReply {}

    /// Gives back what one [`MemGrow`] backed, whole: `cuMemUnmap`, `cuMemRelease`. Waits for work that may use it.
    sync 0x0302 mem_shrink: MemShrink {
        /// Ordinal.
        device: u32,
        /// First address of the piece.
        address: u64,
        /// Bytes.
        size: u64,
    } -> MemShrinkReply {}

    /// An allocation now stands at `address`: `cuMemAlloc` as the server learns of it. Lies inside backed memory and touches no other.
    async 0x0303 mem_alloc: MemAlloc {
        /// Address; a multiple of 512.
        address: u64,
        /// Bytes, as the program asked.
        size: u64,
    }

    /// The allocation at `address` is gone: `cuMemFree`. The client has already waited for the device, as CUDA does.
    async 0x0304 mem_free: MemFree {
        /// Address of an allocation.
        address: u64,
    }

    /// `cuMemGetInfo`.
    sync 0x0305 mem_get_info: MemGetInfo {
        /// Ordinal.
        device: u32,
    } -> MemGetInfoReply {
        /// Bytes that can still be backed.
        free: u64,
        /// Bytes in all.
        total: u64,
    }

    /// Lets kernels read and write a piece of pinned program memory at the address that it has in the program: `cuMemHostGetDevicePointer`. A server that
    /// shares no memory with the client answers `CUDA_ERROR_NOT_SUPPORTED`, as does one whose process has something else at the address.
    sync 0x0306 host_map: HostMap {
        /// A context of the device; every device of the session reaches the memory afterwards.
        context: ContextId,
        /// Its address in the program.
        address: u64,
        /// The memory: a region, from its start.
        memory: HostOut,
    } -> HostMapReply {}

    /// What [`HostMap`] made is gone. The client has already waited for the work that may use it.
    async 0x0307 host_unmap: HostUnmap {
        /// Context that it was mapped in.
        context: ContextId,
        /// The memory's address in the program.
        address: u64,
    }
}
