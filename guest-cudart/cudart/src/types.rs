//! The C types of the two APIs, laid out as in NVIDIA's headers for 64-bit Linux.
//!
//! Handles are the same pointers in both APIs, enumerations are plain integers (a program may pass any
//! number), and device addresses are pointers, as in the runtime API. A structure with the same layout in
//! both APIs appears once, under the driver's name, and is passed through unread where possible. `abi_tests`
//! compares everything with the headers of both CUDA versions.

use std::ffi::{c_char, c_int, c_uint, c_void};

pub type CUdevice = c_int;
pub type CUdeviceptr = *mut c_void;
pub type CUcontext = *mut c_void;
pub type CUfunction = *mut c_void;
pub type CUkernel = *mut c_void;
pub type CUlibrary = *mut c_void;
pub type CUstream = *mut c_void;
pub type CUevent = *mut c_void;
pub type CUarray = *mut c_void;
pub type CUmipmappedArray = *mut c_void;
pub type CUgraph = *mut c_void;
pub type CUgraphNode = *mut c_void;
pub type CUgraphExec = *mut c_void;
pub type CUgraphicsResource = *mut c_void;
pub type CUexternalMemory = *mut c_void;
pub type CUexternalSemaphore = *mut c_void;
pub type CUmemoryPool = *mut c_void;
pub type CUuserObject = *mut c_void;
pub type CUlogsCallbackHandle = *mut c_void;
pub type CUasyncCallbackHandle = *mut c_void;

/// Function pointers of the program, which only the driver calls.
pub type CUhostFn = *mut c_void;
pub type CUstreamCallback = *mut c_void;
pub type CUasyncCallback = *mut c_void;
pub type CUlogsCallback = *mut c_void;

/// Structures with the same layout in both APIs, which only the driver reads or writes.
macro_rules! opaque {
    ($($name:ident),* $(,)?) => {$(
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
        }
    )*};
}
opaque! {
    CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY_SPARSE_PROPERTIES, CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
    CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUDA_EXT_SEM_SIGNAL_NODE_PARAMS, CUDA_EXT_SEM_WAIT_NODE_PARAMS,
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_HOST_NODE_PARAMS, CUDA_MEMCPY3D_BATCH_OP, CUDA_MEM_ALLOC_NODE_PARAMS,
    CUgraphEdgeData, CUgraphExecUpdateResultInfo, CUlaunchAttribute,
    CUlaunchAttributeValue, CUmemAccessDesc, CUmemPoolProps, CUmemPoolPtrExportData, CUmemcpyAttributes,
}

/// Declares structures with C's layout, and asserts their sizes and the listed offsets.
macro_rules! c_struct {
    ($($(#[$meta:meta])* $name:ident ($size:literal) { $($field:ident: $ty:ty = $offset:literal),* $(,)? })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name {
            $(pub $field: $ty,)*
        }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
        impl Default for $name {
            /// All bytes zero.
            fn default() -> Self {
                // SAFETY: these structures consist of integers, floats and raw pointers, for which zero is a
                // value.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}

c_struct! {
    CUuuid (16) { bytes: [c_char; 16] = 0 }
    CUipcEventHandle (64) { reserved: [c_char; 64] = 0 }
    CUipcMemHandle (64) { reserved: [c_char; 64] = 0 }
    CUmemLocation (8) { kind: c_uint = 0, id: c_int = 4 }

    Dim3 (12) { x: c_uint = 0, y: c_uint = 4, z: c_uint = 8 }
    Extent (24) { width: usize = 0, height: usize = 8, depth: usize = 16 }
    Pos (24) { x: usize = 0, y: usize = 8, z: usize = 16 }
    PitchedPtr (32) { ptr: *mut c_void = 0, pitch: usize = 8, xsize: usize = 16, ysize: usize = 24 }
    ChannelFormatDesc (20) { x: c_int = 0, y: c_int = 4, z: c_int = 8, w: c_int = 12, f: c_uint = 16 }

    Memcpy3DParms (160) {
        src_array: CUarray = 0, src_pos: Pos = 8, src_ptr: PitchedPtr = 32,
        dst_array: CUarray = 64, dst_pos: Pos = 72, dst_ptr: PitchedPtr = 96,
        extent: Extent = 128, kind: c_uint = 152,
    }
    Memcpy3DPeerParms (168) {
        src_array: CUarray = 0, src_pos: Pos = 8, src_ptr: PitchedPtr = 32, src_device: c_int = 64,
        dst_array: CUarray = 72, dst_pos: Pos = 80, dst_ptr: PitchedPtr = 104, dst_device: c_int = 136,
        extent: Extent = 144,
    }
    LaunchConfig (56) {
        grid: Dim3 = 0, block: Dim3 = 12, dynamic_smem_bytes: usize = 24, stream: CUstream = 32,
        attrs: *mut CUlaunchAttribute = 40, num_attrs: c_uint = 48,
    }
    KernelNodeParams (56) {
        func: *mut c_void = 0, grid: Dim3 = 8, block: Dim3 = 20, shared_mem_bytes: c_uint = 32,
        kernel_params: *mut *mut c_void = 40, extra: *mut *mut c_void = 48,
    }
    FuncAttributes (144) {
        shared_size_bytes: usize = 0, const_size_bytes: usize = 8, local_size_bytes: usize = 16,
        max_threads_per_block: c_int = 24, num_regs: c_int = 28, ptx_version: c_int = 32, binary_version: c_int = 36,
        cache_mode_ca: c_int = 40, max_dynamic_shared_size_bytes: c_int = 44, preferred_shmem_carveout: c_int = 48,
        cluster_dim_must_be_set: c_int = 52, required_cluster_width: c_int = 56, required_cluster_height: c_int = 60,
        required_cluster_depth: c_int = 64, cluster_scheduling_policy_preference: c_int = 68,
        non_portable_cluster_size_allowed: c_int = 72, reserved: [c_int; 16] = 76,
    }
    TextureDesc (72) {
        address_mode: [c_uint; 3] = 0, filter_mode: c_uint = 12, read_mode: c_uint = 16, srgb: c_int = 20,
        border_color: [f32; 4] = 24, normalized_coords: c_int = 40, max_anisotropy: c_uint = 44,
        mipmap_filter_mode: c_uint = 48, mipmap_level_bias: f32 = 52, min_mipmap_level_clamp: f32 = 56,
        max_mipmap_level_clamp: f32 = 60, disable_trilinear_optimization: c_int = 64, seamless_cubemap: c_int = 68,
    }

    /// The driver's 3D copy.
    CUDA_MEMCPY3D (200) {
        src_x_in_bytes: usize = 0, src_y: usize = 8, src_z: usize = 16, src_lod: usize = 24,
        src_memory_type: c_uint = 32, src_host: *const c_void = 40, src_device: CUdeviceptr = 48,
        src_array: CUarray = 56, reserved0: *mut c_void = 64, src_pitch: usize = 72, src_height: usize = 80,
        dst_x_in_bytes: usize = 88, dst_y: usize = 96, dst_z: usize = 104, dst_lod: usize = 112,
        dst_memory_type: c_uint = 120, dst_host: *mut c_void = 128, dst_device: CUdeviceptr = 136,
        dst_array: CUarray = 144, reserved1: *mut c_void = 152, dst_pitch: usize = 160, dst_height: usize = 168,
        width_in_bytes: usize = 176, height: usize = 184, depth: usize = 192,
    }
    CUDA_ARRAY3D_DESCRIPTOR (40) {
        width: usize = 0, height: usize = 8, depth: usize = 16, format: c_uint = 24, num_channels: c_uint = 28,
        flags: c_uint = 32,
    }
    CUDA_KERNEL_NODE_PARAMS (72) {
        func: CUfunction = 0, grid: Dim3 = 8, block: Dim3 = 20, shared_mem_bytes: c_uint = 32,
        kernel_params: *mut *mut c_void = 40, extra: *mut *mut c_void = 48, kern: CUkernel = 56, ctx: CUcontext = 64,
    }
    CUDA_MEMSET_NODE_PARAMS (40) {
        dst: CUdeviceptr = 0, pitch: usize = 8, value: c_uint = 16, element_size: c_uint = 20, width: usize = 24,
        height: usize = 32,
    }
    CUDA_LAUNCH_PARAMS (56) {
        function: CUfunction = 0, grid: Dim3 = 8, block: Dim3 = 20, shared_mem_bytes: c_uint = 32,
        stream: CUstream = 40, kernel_params: *mut *mut c_void = 48,
    }
    CUlaunchConfig (56) {
        grid: Dim3 = 0, block: Dim3 = 12, shared_mem_bytes: c_uint = 24, stream: CUstream = 32,
        attrs: *mut CUlaunchAttribute = 40, num_attrs: c_uint = 48,
    }
    /// The first 40 bytes of `res` hold, depending on the type: an array; a mipmapped array; linear memory;
    /// pitched memory.
    CUDA_RESOURCE_DESC (144) { kind: c_uint = 0, res: [u64; 16] = 8, flags: c_uint = 136 }
    /// The part of a resource view that both APIs have. From 13.0 on, the runtime's also has the driver's
    /// reserved words.
    ResourceViewDesc (48) {
        format: c_uint = 0, width: usize = 8, height: usize = 16, depth: usize = 24, first_mipmap_level: c_uint = 32,
        last_mipmap_level: c_uint = 36, first_layer: c_uint = 40, last_layer: c_uint = 44,
    }
    CUDA_RESOURCE_VIEW_DESC (112) { view: ResourceViewDesc = 0, reserved: [c_uint; 16] = 48 }
    CUDA_TEXTURE_DESC (104) {
        address_mode: [c_uint; 3] = 0, filter_mode: c_uint = 12, flags: c_uint = 16, max_anisotropy: c_uint = 20,
        mipmap_filter_mode: c_uint = 24, mipmap_level_bias: f32 = 28, min_mipmap_level_clamp: f32 = 32,
        max_mipmap_level_clamp: f32 = 36, border_color: [f32; 4] = 40, reserved: [c_int; 12] = 56,
    }
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC (104) {
        kind: c_uint = 0, handle: [u64; 2] = 8, size: u64 = 24, flags: c_uint = 32, reserved: [c_uint; 16] = 36,
    }
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC (88) {
        offset: u64 = 0, size: u64 = 8, flags: c_uint = 16, reserved: [c_uint; 16] = 20,
    }
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC (120) {
        offset: u64 = 0, array: CUDA_ARRAY3D_DESCRIPTOR = 8, num_levels: c_uint = 48, reserved: [c_uint; 16] = 52,
    }
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC (96) {
        kind: c_uint = 0, handle: [u64; 2] = 8, flags: c_uint = 24, reserved: [c_uint; 16] = 28,
    }
    /// A graph node of any kind; `body` is the union.
    CUgraphNodeParams (256) { kind: c_uint = 0, reserved0: [c_int; 3] = 4, body: [u64; 29] = 16, reserved2: i64 = 248 }
}

/// The driver's 3D copy between devices: `CUDA_MEMCPY3D` with contexts in place of the reserved words.
pub type CUDA_MEMCPY3D_PEER = CUDA_MEMCPY3D;

/// `cudaResourceDesc`; 12.8's ends before the reserved words. `res` holds, depending on the type: an array; a
/// mipmapped array; address, format (20 bytes) and size; address, format, width, height and pitch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ResourceDesc {
    pub kind: c_uint,
    pub res: [u64; RESOURCE_WORDS],
    #[cfg(not(feature = "v12"))]
    pub flags: c_uint,
}
const RESOURCE_WORDS: usize = if cfg!(feature = "v12") { 7 } else { 16 };
const _: () = assert!(size_of::<ResourceDesc>() == if cfg!(feature = "v12") { 64 } else { 144 });

/// `cudaPointerAttributes`; 12.8's ends before the reserved words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PointerAttributes {
    pub kind: c_uint,
    pub device: c_int,
    pub device_pointer: *mut c_void,
    pub host_pointer: *mut c_void,
    #[cfg(not(feature = "v12"))]
    pub reserved: [i64; 8],
}
const _: () = assert!(size_of::<PointerAttributes>() == if cfg!(feature = "v12") { 24 } else { 88 });

/// `cudaExternalMemoryHandleDesc`: 13.0's is the driver's; 12.8's ends before the reserved words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExternalMemoryHandleDesc {
    pub kind: c_uint,
    pub handle: [u64; 2],
    pub size: u64,
    pub flags: c_uint,
}

/// `cudaExternalMemoryBufferDesc`: 13.0's is the driver's; 12.8's ends before the reserved words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExternalMemoryBufferDesc {
    pub offset: u64,
    pub size: u64,
    pub flags: c_uint,
}

/// `cudaExternalMemoryMipmappedArrayDesc`: 13.0's is the driver's; 12.8's ends before the reserved words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExternalMemoryMipmappedArrayDesc {
    pub offset: u64,
    pub format: ChannelFormatDesc,
    pub extent: Extent,
    pub flags: c_uint,
    pub num_levels: c_uint,
}

/// `cudaExternalSemaphoreHandleDesc`: 13.0's is the driver's; 12.8's ends before the reserved words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExternalSemaphoreHandleDesc {
    pub kind: c_uint,
    pub handle: [u64; 2],
    pub flags: c_uint,
}

#[cfg(feature = "v12")]
c_struct! {
    /// The part of `cudaLaunchCooperativeKernelMultiDevice` for one device.
    LaunchParams (56) {
        func: *mut c_void = 0, grid: Dim3 = 8, block: Dim3 = 20, args: *mut *mut c_void = 32, shared_mem: usize = 40,
        stream: CUstream = 48,
    }
}
