//! Device attributes: their numbers, and the values that rgpu itself determines.

/// The `CUdevice_attribute` numbers used here.
pub(crate) mod attr {
    pub const MAX_THREADS_PER_BLOCK: usize = 1;
    pub const MAX_BLOCK_DIM_X: usize = 2;
    pub const MAX_GRID_DIM_X: usize = 5;
    pub const MAX_SHARED_MEMORY_PER_BLOCK: usize = 8;
    pub const TOTAL_CONSTANT_MEMORY: usize = 9;
    pub const WARP_SIZE: usize = 10;
    pub const MAX_PITCH: usize = 11;
    pub const MAX_REGISTERS_PER_BLOCK: usize = 12;
    pub const CLOCK_RATE: usize = 13;
    pub const TEXTURE_ALIGNMENT: usize = 14;
    pub const MULTIPROCESSOR_COUNT: usize = 16;
    pub const INTEGRATED: usize = 18;
    pub const CAN_MAP_HOST_MEMORY: usize = 19;
    pub const PCI_BUS_ID: usize = 33;
    pub const PCI_DEVICE_ID: usize = 34;
    pub const MAX_THREADS_PER_MULTIPROCESSOR: usize = 39;
    pub const UNIFIED_ADDRESSING: usize = 41;
    pub const PCI_DOMAIN_ID: usize = 50;
    pub const COMPUTE_CAPABILITY_MAJOR: usize = 75;
    pub const COMPUTE_CAPABILITY_MINOR: usize = 76;
    pub const MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: usize = 81;
    pub const MAX_REGISTERS_PER_MULTIPROCESSOR: usize = 82;
    pub const CAN_USE_STREAM_MEM_OPS_V1: usize = 92;
    pub const CAN_USE_64_BIT_STREAM_MEM_OPS_V1: usize = 93;
    pub const CAN_USE_STREAM_WAIT_VALUE_NOR_V1: usize = 94;
    pub const COOPERATIVE_LAUNCH: usize = 95;
    pub const COOPERATIVE_MULTI_DEVICE_LAUNCH: usize = 96;
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: usize = 97;
    pub const CAN_FLUSH_REMOTE_WRITES: usize = 98;
    pub const HOST_REGISTER_SUPPORTED: usize = 99;
    pub const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: usize = 103;
    pub const MAX_BLOCKS_PER_MULTIPROCESSOR: usize = 106;
    pub const RESERVED_SHARED_MEMORY_PER_BLOCK: usize = 111;
    pub const MEMORY_POOLS_SUPPORTED: usize = 115;
    pub const MEMPOOL_SUPPORTED_HANDLE_TYPES: usize = 119;
    pub const CAN_USE_64_BIT_STREAM_MEM_OPS: usize = 122;
    pub const CAN_USE_STREAM_WAIT_VALUE_NOR: usize = 123;
    pub const IPC_EVENT_SUPPORTED: usize = 125;
    pub const HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: usize = 141;
    pub const HOST_MEMORY_POOLS_SUPPORTED: usize = 144;
    pub const HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: usize = 145;
}

/// Attributes that a device may have but a program behind rgpu doesn't: some describe the server's machine
/// and don't hold for the program's, others announce parts of the API that rgpu doesn't support. They read as
/// 0.
pub(crate) const NOT_HERE: &[usize] = &[
    86, // HOST_NATIVE_ATOMIC_SUPPORTED
    88, // PAGEABLE_MEMORY_ACCESS
    89, // CONCURRENT_MANAGED_ACCESS
    // rgpu finds host pointers only among a kernel's own parameters. With 0, programs ask for the device
    // address, so pointers inside structures work, too.
    91,  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    98,  // CAN_FLUSH_REMOTE_WRITES
    100, // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    101, // DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
    104, // HANDLE_TYPE_WIN32_HANDLE_SUPPORTED
    105, // HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED
    107, // GENERIC_COMPRESSION_SUPPORTED
    110, // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    112, // SPARSE_CUDA_ARRAY_SUPPORTED
    114, // TIMELINE_SEMAPHORE_INTEROP_SUPPORTED
    116, // GPU_DIRECT_RDMA_SUPPORTED
    117, // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
    118, // GPU_DIRECT_RDMA_WRITES_ORDERING
    121, // DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED
    124, // DMA_BUF_SUPPORTED
    128, // HANDLE_TYPE_FABRIC_SUPPORTED
    129, // UNIFIED_FUNCTION_POINTERS
    130, // NUMA_CONFIG: the device's memory is no NUMA node of this machine
    132, // MULTICAST_SUPPORTED
    136, // MEM_DECOMPRESS_ALGORITHM_MASK
    137, // MEM_DECOMPRESS_MAXIMUM_LENGTH
    142, // HOST_NUMA_MEMORY_POOLS_SUPPORTED
    143, // HOST_NUMA_MULTINODE_IPC_SUPPORTED
    146, // HOST_ALLOC_DMA_BUF_SUPPORTED
    147, // ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED
];

/// The highest attribute of `cuda.h` 13.0.
pub(crate) const LAST: usize = 147;

/// Replaces the values that differ on this side of the connection. Every attribute of this API gets a value,
/// as with any driver (NVIDIA's runtime library doesn't start otherwise); those the server doesn't report
/// become 0.
pub(crate) fn complete_attributes(attributes: &mut Vec<Option<i32>>) {
    if attributes.len() <= LAST {
        attributes.resize(LAST + 1, None);
    }
    for value in &mut attributes[1..=LAST] {
        value.get_or_insert(0);
    }
    // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, if memory can be exported that way.
    let pool_handles = attributes[attr::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR].unwrap_or(0).clamp(0, 1);
    let mut set = |number: usize, value| {
        if let Some(place) = attributes.get_mut(number).filter(|place| place.is_some()) {
            *place = Some(value);
        }
    };
    for number in NOT_HERE {
        set(*number, 0);
    }
    set(attr::INTEGRATED, 0);
    set(attr::COOPERATIVE_MULTI_DEVICE_LAUNCH, 0);
    // In place or mirrored: see `memory::pinned`.
    set(attr::CAN_MAP_HOST_MEMORY, 1);
    set(attr::UNIFIED_ADDRESSING, 1);
    set(attr::HOST_REGISTER_SUPPORTED, 1);
    set(attr::MEMORY_POOLS_SUPPORTED, 1);
    set(attr::HOST_MEMORY_POOLS_SUPPORTED, 1);
    set(attr::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1);
    set(attr::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1);
    set(attr::MEMPOOL_SUPPORTED_HANDLE_TYPES, pool_handles);
    // −1: no NUMA node of this machine is near the GPU.
    set(131, -1);
    set(134, -1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_attributes_of_the_api_have_values() {
        let mut attributes = vec![None; 120];
        attributes[10] = Some(32);
        attributes[89] = Some(1);
        complete_attributes(&mut attributes);
        assert_eq!((attributes[10], attributes[89], attributes[147]), (Some(32), Some(0), Some(0)));
        assert_eq!(attributes[0], None);
    }

    #[test]
    fn a_device_is_no_numa_node_here() {
        // 130: NUMA_CONFIG. 131: NUMA_ID.
        let mut attributes = vec![None; 148];
        (attributes[130], attributes[131]) = (Some(1), Some(4));
        complete_attributes(&mut attributes);
        assert_eq!((attributes[130], attributes[131]), (Some(0), Some(-1)));
    }

    #[test]
    fn memory_is_not_compressible_here_and_pools_are_shared_by_descriptors_where_memory_is() {
        // 107: GENERIC_COMPRESSION_SUPPORTED. 119: MEMPOOL_SUPPORTED_HANDLE_TYPES; 9 is a descriptor, or a
        // handle of a fabric.
        for (descriptors, handles) in [(1, 1), (0, 0)] {
            let mut attributes = vec![None; 120];
            (attributes[107], attributes[119]) = (Some(1), Some(9));
            attributes[attr::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR] = Some(descriptors);
            complete_attributes(&mut attributes);
            assert_eq!((attributes[107], attributes[119]), (Some(0), Some(handles)));
        }
    }
}
