//! The windows of the generic address space below global memory, what is where in shared memory, and the
//! addresses of functions.

use std::sync::atomic::{AtomicU64, Ordering};

/// First generic address of a block's shared memory.
pub(crate) const SHARED_WINDOW: u64 = 0x0100_0000_0000;
/// First generic address of a thread's local memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x0110_0000_0000;
/// First generic address of a kernel's parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x0120_0000_0000;
/// First "address" of a function; see [`FunctionAddresses`].
const FUNCTION_WINDOW: u64 = 0x0130_0000_0000;
/// Size of each of these windows.
pub(crate) const WINDOW_SIZE: u64 = 0x0010_0000_0000;
/// Where the shared memory reserved for the system begins (`%reserved_smem_offset_begin`), beyond what any
/// kernel can have, and its size.
pub(crate) const RESERVED: u64 = 1 << 20;
pub(crate) const RESERVED_BYTES: u64 = 1 << 10;
/// Shared addresses from here on belong to a block of the cluster: dividing the address by this constant
/// gives the block's rank plus one.
pub(crate) const RANK: u64 = 1 << 24;

/// The "addresses" of a module's functions, 16 apart. No two modules have the same ones, so that a call of
/// another module's function is a fault and not a call of whatever has that number here.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FunctionAddresses {
    first: u64,
    count: u64,
}

impl FunctionAddresses {
    /// Addresses for `count` functions.
    pub fn new(count: usize) -> FunctionAddresses {
        // The window holds 2^36 functions, more than all texts that a program can load.
        static NEXT: AtomicU64 = AtomicU64::new(FUNCTION_WINDOW);
        let count = count as u64;
        FunctionAddresses { first: NEXT.fetch_add(count * 16, Ordering::Relaxed), count }
    }

    /// The address of a function by its index in the module.
    pub fn of(self, index: usize) -> u64 {
        self.first + index as u64 * 16
    }

    /// The index of the function at an address.
    pub fn index(self, address: u64) -> Option<usize> {
        let distance = address.wrapping_sub(self.first);
        (distance / 16 < self.count && distance.is_multiple_of(16)).then_some((distance / 16) as usize)
    }
}
