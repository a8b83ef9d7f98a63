//! The windows of the generic address space below global memory, and what is where in shared memory.

/// First generic address of a block's shared memory.
pub(crate) const SHARED_WINDOW: u64 = 0x0100_0000_0000;
/// First generic address of a thread's local memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x0110_0000_0000;
/// First generic address of a kernel's parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x0120_0000_0000;
/// First "address" of a function; they are 16 apart.
pub(crate) const FUNCTION_WINDOW: u64 = 0x0130_0000_0000;
/// Size of each of these windows.
pub(crate) const WINDOW_SIZE: u64 = 0x0010_0000_0000;
/// Where the shared memory reserved for the system begins (`%reserved_smem_offset_begin`), beyond what any
/// kernel can have, and its size.
pub(crate) const RESERVED: u64 = 1 << 20;
pub(crate) const RESERVED_BYTES: u64 = 1 << 10;
/// Shared addresses from here on belong to a block of the cluster: dividing the address by this constant
/// gives the block's rank plus one.
pub(crate) const RANK: u64 = 1 << 24;
