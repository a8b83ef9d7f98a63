//! The libcuda functions that the server uses, loaded from the same library as cudarc's bindings, with
//! results and enumerations as plain numbers.
//!
//! cudarc's own wrappers panic on a missing symbol and take Rust enumerations, for which an unknown value
//! (from a newer driver, or from a client) would be undefined behavior. So only its types and its library are
//! used.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;
pub use sys::{
    CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_KERNEL_NODE_PARAMS_v2, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS,
    CUarray, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
    CUgreenCtx, CUlaunchConfig, CUlinkState, CUmipmappedArray, CUmodule, CUstream,
};

use protocol::Status;
use protocol::ops::device::ATOMIC_OPERATIONS;

use crate::driver::gpu::{PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED};

/// A symbol that rgpu's own `libcuda` exports, and NVIDIA's does not.
const OWN_LIBRARY: &[u8] = b"rgpu_libcuda\0";
/// Results that programs ask for on purpose: no code for this GPU, peer access that there is not, that is
/// enabled already, and that is not.
const EXPECTED: [Status; 4] = [
    Status::NO_BINARY_FOR_GPU,
    PEER_ACCESS_UNSUPPORTED,
    PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED,
];

macro_rules! api {
    ($($name:ident = $symbol:literal ($($arg:ty),* $(,)?);)*) => {
        /// Loaded functions, called through [`Api`]'s methods of the same names.
        pub struct Api {
            $($name: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Api {
            fn find() -> Result<Api, String> {
                // SAFETY: libcuda's initializers are trusted; `load` has checked that the library exists.
                let library = unsafe { sys::culib() };
                Ok(Api {
                    $($name: {
                        // SAFETY: the symbol has the field's type, by CUDA's header.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> u32>(concat!($symbol, "\0").as_bytes()) };
                        *found.map_err(|_| concat!("libcuda lacks ", $symbol, ": the driver is too old (CUDA 12.4 is needed)").to_owned())?
                    },)*
                })
            }
        }

        #[cfg(test)]
        impl Api {
            /// Functions that do nothing and succeed.
            pub fn idle() -> &'static Api {
                &Api {
                    $($name: {
                        unsafe extern "C" fn idle($(_: $arg),*) -> u32 {
                            0
                        }
                        idle
                    },)*
                }
            }
        }

        api!(@methods $($name = $symbol ($($arg),*);)*);
    };
    (@methods $($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        impl Api {
            $(api!(@method $name $symbol ($($arg),*));)*
        }
    };
    (@method $name:ident $symbol:literal ()) => { api!(@write $name $symbol); };
    (@method $name:ident $symbol:literal ($a:ty)) => { api!(@write $name $symbol a: $a); };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty)) => { api!(@write $name $symbol a: $a, b: $b); };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty, $c:ty)) => { api!(@write $name $symbol a: $a, b: $b, c: $c); };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty, $c:ty, $d:ty)) => { api!(@write $name $symbol a: $a, b: $b, c: $c, d: $d); };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty)) => {
        api!(@write $name $symbol a: $a, b: $b, c: $c, d: $d, e: $e);
    };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty)) => {
        api!(@write $name $symbol a: $a, b: $b, c: $c, d: $d, e: $e, f: $f);
    };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty, $g:ty, $h:ty)) => {
        api!(@write $name $symbol a: $a, b: $b, c: $c, d: $d, e: $e, f: $f, g: $g, h: $h);
    };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty, $g:ty, $h:ty, $i:ty, $j:ty, $k:ty, $l:ty)) => {
        api!(@write $name $symbol a: $a, b: $b, c: $c, d: $d, e: $e, f: $f, g: $g, h: $h, i: $i, j: $j, k: $k, l: $l);
    };
    (@method $name:ident $symbol:literal ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty, $g:ty, $h:ty, $i:ty, $j:ty, $k:ty, $l:ty, $m:ty, $n:ty, $o:ty)) => {
        api!(@write $name $symbol a: $a, b: $b, c: $c, d: $d, e: $e, f: $f, g: $g, h: $h, i: $i, j: $j, k: $k, l: $l, m: $m, n: $n, o: $o);
    };
    (@write $name:ident $symbol:literal $($arg:ident: $ty:ty),*) => {
        #[doc = concat!("`", $symbol, "`. A failure is logged.")]
        ///
        /// # Safety
        /// The arguments meet the driver API's requirements.
        #[allow(dead_code, clippy::too_many_arguments)]
        pub unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), Status> {
            // SAFETY: guaranteed by the caller.
            let status = Status(unsafe { (self.$name)($($arg),*) });
            if status.is_success() {
                return Ok(());
            }
            self.complain($symbol, status);
            Err(status)
        }
    };
}

api! {
    init = "cuInit" (c_uint);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    error_name = "cuGetErrorName" (u32, *mut *const c_char);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut CUdevice, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
    device_uuid = "cuDeviceGetUuid_v2" (*mut [u8; 16], CUdevice);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, u32, CUdevice);
    memory_range_handle = "cuMemGetHandleForAddressRange" (*mut c_void, CUdeviceptr, usize, c_uint, u64);
    device_can_access = "cuDeviceCanAccessPeer" (*mut c_int, CUdevice, CUdevice);
    device_p2p = "cuDeviceGetP2PAttribute" (*mut c_int, u32, CUdevice, CUdevice);
    primary_retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
    primary_reset = "cuDevicePrimaryCtxReset_v2" (CUdevice);
    primary_set_flags = "cuDevicePrimaryCtxSetFlags_v2" (CUdevice, c_uint);
    context_create = "cuCtxCreate_v2" (*mut CUcontext, c_uint, CUdevice);
    context_destroy = "cuCtxDestroy_v2" (CUcontext);
    context_set = "cuCtxSetCurrent" (CUcontext);
    context_current = "cuCtxGetCurrent" (*mut CUcontext);
    context_priorities = "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    context_get_limit = "cuCtxGetLimit" (*mut usize, u32);
    context_set_limit = "cuCtxSetLimit" (u32, usize);
    context_reset_cache = "cuCtxResetPersistingL2Cache" ();
    peer_enable = "cuCtxEnablePeerAccess" (CUcontext, c_uint);
    peer_disable = "cuCtxDisablePeerAccess" (CUcontext);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    address_reserve = "cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
    memory_granularity = "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProp, u32);
    memory_create = "cuMemCreate" (*mut u64, usize, *const AllocationProp, u64);
    memory_map = "cuMemMap" (CUdeviceptr, usize, usize, u64, u64);
    memory_access = "cuMemSetAccess" (CUdeviceptr, usize, *const AccessDesc, usize);
    memory_unmap = "cuMemUnmap" (CUdeviceptr, usize);
    memory_release = "cuMemRelease" (u64);
    address_free = "cuMemAddressFree" (CUdeviceptr, usize);
    memory_retain = "cuMemRetainAllocationHandle" (*mut u64, *mut c_void);
    memory_export = "cuMemExportToShareableHandle" (*mut c_void, u64, u32, u64);
    memory_import = "cuMemImportFromShareableHandle" (*mut u64, *mut c_void, u32);
    host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister" (*mut c_void);
    host_device_pointer = "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
    copy_htod = "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
    copy_dtoh = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
    copy_dtod = "cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
    copy_any = "cuMemcpyAsync" (CUdeviceptr, CUdeviceptr, usize, CUstream);
    copy_peer = "cuMemcpyPeerAsync" (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
    copy_3d = "cuMemcpy3DAsync_v2" (*const CUDA_MEMCPY3D, CUstream);
    copy_3d_peer = "cuMemcpy3DPeerAsync" (*const CUDA_MEMCPY3D, CUstream);
    set_8 = "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
    set_16 = "cuMemsetD16Async" (CUdeviceptr, u16, usize, CUstream);
    set_32 = "cuMemsetD32Async" (CUdeviceptr, c_uint, usize, CUstream);
    set_2d_8 = "cuMemsetD2D8Async" (CUdeviceptr, usize, u8, usize, usize, CUstream);
    set_2d_16 = "cuMemsetD2D16Async" (CUdeviceptr, usize, u16, usize, usize, CUstream);
    set_2d_32 = "cuMemsetD2D32Async" (CUdeviceptr, usize, c_uint, usize, usize, CUstream);
    stream_create = "cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2" (CUstream);
    stream_query_raw = "cuStreamQuery" (CUstream);
    stream_synchronize = "cuStreamSynchronize" (CUstream);
    stream_wait_event = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
    stream_write = "cuStreamWriteValue64_v2" (CUstream, CUdeviceptr, u64, c_uint);
    stream_wait = "cuStreamWaitValue64_v2" (CUstream, CUdeviceptr, u64, c_uint);
    stream_memory_ops = "cuStreamBatchMemOp_v2" (CUstream, c_uint, *mut BatchMemOp, c_uint);
    stream_set_attribute = "cuStreamSetAttribute" (CUstream, u32, *const [u64; 8]);
    stream_get_attribute = "cuStreamGetAttribute" (CUstream, u32, *mut [u64; 8]);
    stream_copy_attributes = "cuStreamCopyAttributes" (CUstream, CUstream);
    event_create = "cuEventCreate" (*mut CUevent, c_uint);
    event_destroy = "cuEventDestroy_v2" (CUevent);
    event_record = "cuEventRecordWithFlags" (CUevent, CUstream, c_uint);
    event_elapsed = "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
    module_load = "cuModuleLoadDataEx" (*mut CUmodule, *const c_void, c_uint, *mut u32, *mut *mut c_void);
    module_unload = "cuModuleUnload" (CUmodule);
    module_count = "cuModuleGetFunctionCount" (*mut c_uint, CUmodule);
    module_function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    module_functions = "cuModuleEnumerateFunctions" (*mut CUfunction, c_uint, CUmodule);
    pointer_attribute = "cuPointerGetAttribute" (*mut c_void, c_uint, CUdeviceptr);
    address_range = "cuMemGetAddressRange_v2" (*mut CUdeviceptr, *mut usize, CUdeviceptr);
    module_global = "cuModuleGetGlobal_v2" (*mut CUdeviceptr, *mut usize, CUmodule, *const c_char);
    link_create = "cuLinkCreate_v2" (c_uint, *mut u32, *mut *mut c_void, *mut CUlinkState);
    link_add = "cuLinkAddData_v2" (
        CUlinkState, u32, *mut c_void, usize, *const c_char, c_uint, *mut u32, *mut *mut c_void
    );
    link_complete = "cuLinkComplete" (CUlinkState, *mut *mut c_void, *mut usize);
    link_destroy = "cuLinkDestroy" (CUlinkState);
    function_name = "cuFuncGetName" (*mut *const c_char, CUfunction);
    function_param_raw = "cuFuncGetParamInfo" (CUfunction, usize, *mut usize, *mut usize);
    function_load = "cuFuncLoad" (CUfunction);
    function_attribute = "cuFuncGetAttribute" (*mut c_int, u32, CUfunction);
    function_set_attribute = "cuFuncSetAttribute" (CUfunction, u32, c_int);
    function_cache_config = "cuFuncSetCacheConfig" (CUfunction, u32);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" (*mut c_int, CUfunction, c_int, usize, c_uint);
    occupancy_available_shared = "cuOccupancyAvailableDynamicSMemPerBlock" (*mut usize, CUfunction, c_int, c_int);
    occupancy_clusters = "cuOccupancyMaxActiveClusters" (*mut c_int, CUfunction, *const CUlaunchConfig);
    occupancy_cluster_size = "cuOccupancyMaxPotentialClusterSize" (*mut c_int, CUfunction, *const CUlaunchConfig);
    tensor_map_tiled = "cuTensorMapEncodeTiled" (
        *mut TensorMap, u32, u32, u64, *const u64, *const u64, *const u32, *const u32, u32, u32, u32, u32
    );
    tensor_map_im2col = "cuTensorMapEncodeIm2col" (
        *mut TensorMap, u32, u32, u64, *const u64, *const u64, *const i32, *const i32, u32, u32, *const u32, u32, u32, u32, u32
    );
    tensor_map_replace = "cuTensorMapReplaceAddress" (*mut TensorMap, u64);
    array_create = "cuArray3DCreate_v2" (*mut CUarray, *const CUDA_ARRAY3D_DESCRIPTOR);
    array_destroy = "cuArrayDestroy" (CUarray);
    array_requirements = "cuArrayGetMemoryRequirements" (*mut CUDA_ARRAY_MEMORY_REQUIREMENTS, CUarray, CUdevice);
    mipmapped_create = "cuMipmappedArrayCreate" (*mut CUmipmappedArray, *const CUDA_ARRAY3D_DESCRIPTOR, c_uint);
    mipmapped_destroy = "cuMipmappedArrayDestroy" (CUmipmappedArray);
    mipmapped_level = "cuMipmappedArrayGetLevel" (*mut CUarray, CUmipmappedArray, c_uint);
    mipmapped_requirements = "cuMipmappedArrayGetMemoryRequirements" (
        *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, CUmipmappedArray, CUdevice
    );
    texture_create = "cuTexObjectCreate" (*mut u64, *const ResourceDesc, *const TextureDesc, *const ViewDesc);
    texture_destroy = "cuTexObjectDestroy" (u64);
    surface_create = "cuSurfObjectCreate" (*mut u64, *const ResourceDesc);
    surface_destroy = "cuSurfObjectDestroy" (u64);
    texture_linear_width = "cuDeviceGetTexture1DLinearMaxWidth" (*mut usize, u32, c_uint, CUdevice);
    graph_create = "cuGraphCreate" (*mut CUgraph, c_uint);
    graph_destroy = "cuGraphDestroy" (CUgraph);
    graph_instantiate = "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, u64);
    graph_add_empty = "cuGraphAddEmptyNode" (*mut CUgraphNode, CUgraph, *const CUgraphNode, usize);
    graph_add_memory_ops = "cuGraphAddBatchMemOpNode" (
        *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const BatchMemOpNode
    );
    graph_depend = "cuGraphAddDependencies" (CUgraph, *const CUgraphNode, *const CUgraphNode, usize);
    graph_add_node = "cuGraphAddNode" (
        *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *mut ConditionalNode
    );
    graph_destroy_node = "cuGraphDestroyNode" (CUgraphNode);
    graph_condition = "cuGraphConditionalHandleCreate" (*mut u64, CUgraph, CUcontext, c_uint, c_uint);
    graph_update = "cuGraphExecUpdate_v2" (CUgraphExec, CUgraph, *mut UpdateResult);
    graph_node_launch = "cuGraphExecKernelNodeSetParams_v2" (
        CUgraphExec, CUgraphNode, *const CUDA_KERNEL_NODE_PARAMS_v2
    );
    graph_node_fill = "cuGraphExecMemsetNodeSetParams" (
        CUgraphExec, CUgraphNode, *const CUDA_MEMSET_NODE_PARAMS, CUcontext
    );
    graph_node_copy = "cuGraphExecMemcpyNodeSetParams" (
        CUgraphExec, CUgraphNode, *const CUDA_MEMCPY3D, CUcontext
    );
    graph_node_memory_ops = "cuGraphExecBatchMemOpNodeSetParams" (
        CUgraphExec, CUgraphNode, *const BatchMemOpNode
    );
    graph_exec_destroy = "cuGraphExecDestroy" (CUgraphExec);
    graph_launch = "cuGraphLaunch" (CUgraphExec, CUstream);
    graph_upload = "cuGraphUpload" (CUgraphExec, CUstream);
    capture_begin = "cuStreamBeginCaptureToGraph" (CUstream, CUgraph, *const CUgraphNode, *const c_void, usize, u32);
    capture_info = "cuStreamGetCaptureInfo_v2" (
        CUstream, *mut u32, *mut u64, *mut CUgraph, *mut *const CUgraphNode, *mut usize
    );
    capture_end = "cuStreamEndCapture" (CUstream, *mut CUgraph);
    device_part = "cuDeviceGetDevResource" (CUdevice, *mut DevResource, u32);
    part_split = "cuDevSmResourceSplitByCount" (
        *mut DevResource, *mut c_uint, *const DevResource, *mut DevResource, c_uint, c_uint
    );
    part_describe = "cuDevResourceGenerateDesc" (*mut Descriptor, *mut DevResource, c_uint);
    green_create = "cuGreenCtxCreate" (*mut CUgreenCtx, Descriptor, CUdevice, c_uint);
    green_destroy = "cuGreenCtxDestroy" (CUgreenCtx);
    green_part = "cuGreenCtxGetDevResource" (CUgreenCtx, *mut DevResource, u32);
    green_context = "cuCtxFromGreenCtx" (*mut CUcontext, CUgreenCtx);
    launch = "cuLaunchKernelEx" (*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
}

/// `CUstreamBatchMemOpParams`. A fence and a flush have their flags at the offset of `short_flags`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct BatchMemOp {
    pub operation: u32,
    pub short_flags: u32,
    pub address: CUdeviceptr,
    pub value: u64,
    pub flags: u32,
    pub alias: CUdeviceptr,
    pub pad: u64,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
pub struct BatchMemOpNode {
    pub context: CUcontext,
    pub count: c_uint,
    pub operations: *mut BatchMemOp,
    pub flags: c_uint,
}

/// `CUgraphNodeParams` of a conditional node: `CUDA_CONDITIONAL_NODE_PARAMS`, and the rest of the union.
#[repr(C)]
pub struct ConditionalNode {
    kind: u32,
    reserved0: [c_int; 3],
    handle: u64,
    condition: u32,
    size: c_uint,
    /// Written by the driver: the addresses of the node's graphs.
    pub graphs: *const CUgraph,
    context: CUcontext,
    rest: [u64; 25],
    reserved2: i64,
}

impl ConditionalNode {
    /// A node of a conditional type, with a condition and `size` graphs.
    pub fn new(handle: u64, condition: u32, size: u32, context: CUcontext) -> ConditionalNode {
        ConditionalNode {
            // CU_GRAPH_NODE_TYPE_CONDITIONAL
            kind: 13,
            reserved0: [0; 3],
            handle,
            condition,
            size,
            graphs: std::ptr::null(),
            context,
            rest: [0; 25],
            reserved2: 0,
        }
    }
}

/// `CUdevResourceDesc`.
pub type Descriptor = sys::CUdevResourceDesc;

/// `CUdevResource`. Between the type and the type's values, the driver keeps private data.
#[repr(C)]
#[derive(Clone, PartialEq)]
pub struct DevResource {
    pub kind: u32,
    inside: [u32; 23],
    /// `CUdevSmResource` in the first three words.
    pub told: [u32; 12],
}

impl DevResource {
    /// An empty one for the driver to fill in.
    pub fn empty() -> DevResource {
        DevResource { kind: 0, inside: [0; 23], told: [0; 12] }
    }
}

/// `CUgraphExecUpdateResultInfo`, with the result as a number.
#[repr(C)]
pub struct UpdateResult {
    pub result: u32,
    pub error_node: CUgraphNode,
    pub error_from_node: CUgraphNode,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`, with the format as a number.
#[repr(C)]
#[allow(non_camel_case_types)]
pub struct CUDA_ARRAY3D_DESCRIPTOR {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

/// `CUDA_RESOURCE_DESC`, its union as words: an array's handle in the first; or address, format, channels and
/// three sizes.
#[repr(C)]
#[derive(Default)]
pub struct ResourceDesc {
    pub kind: u32,
    pub words: [u64; 16],
    pub flags: u32,
}

/// `CUDA_TEXTURE_DESC`.
#[repr(C)]
pub struct TextureDesc {
    pub address: [u32; 3],
    pub filter: u32,
    pub flags: u32,
    pub anisotropy: u32,
    pub level_filter: u32,
    pub level_bias: u32,
    pub level_clamp: [u32; 2],
    pub border: [u32; 4],
    pub reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`.
#[repr(C)]
pub struct ViewDesc {
    pub format: u32,
    pub extent: [usize; 3],
    pub levels: [u32; 2],
    pub layers: [u32; 2],
    pub reserved: [u32; 16],
}

/// `CUmemLocation`: type 1 is a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub struct AllocationProp {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

impl AllocationProp {
    /// Pinned memory of a device.
    pub fn device(device: CUdevice) -> AllocationProp {
        AllocationProp::shareable(device, 0)
    }

    /// The same, exportable in these forms.
    pub fn shareable(device: CUdevice, handle_types: u32) -> AllocationProp {
        AllocationProp {
            kind: 1,
            handle_types,
            location: Location { kind: 1, id: device },
            win32: std::ptr::null_mut(),
            flags: [0; 8],
        }
    }

    /// The same, which other devices of the machine can read (`gpuDirectRDMACapable`).
    pub fn for_devices(mut self) -> AllocationProp {
        self.flags[1] = 1;
        self
    }
}

/// `CUtensorMap`.
#[repr(C, align(64))]
pub struct TensorMap(pub [u8; 128]);

/// `CUmemAccessDesc`.
#[repr(C)]
pub struct AccessDesc {
    location: Location,
    flags: u32,
}

impl AccessDesc {
    /// Read and write access for a device, or none.
    pub fn device(device: CUdevice, access: bool) -> AccessDesc {
        AccessDesc::with_flags(device, if access { 3 } else { 0 })
    }

    /// `CUmemAccess_flags` for a device.
    pub fn with_flags(device: CUdevice, flags: u32) -> AccessDesc {
        AccessDesc { location: Location { kind: 1, id: device }, flags }
    }
}

const _: () = {
    assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    // `copy_3d_peer` takes the other structure, which has contexts in the reserved places.
    assert!(size_of::<CUDA_MEMCPY3D>() == size_of::<sys::CUDA_MEMCPY3D_PEER>());
    assert!(
        std::mem::offset_of!(CUDA_MEMCPY3D, reserved0)
            == std::mem::offset_of!(sys::CUDA_MEMCPY3D_PEER, srcContext)
    );
    assert!(
        std::mem::offset_of!(CUDA_MEMCPY3D, reserved1)
            == std::mem::offset_of!(sys::CUDA_MEMCPY3D_PEER, dstContext)
    );
    assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>());
    assert!(size_of::<AccessDesc>() == size_of::<sys::CUmemAccessDesc>());
    assert!(size_of::<DevResource>() == size_of::<sys::CUdevResource>());
    assert!(size_of::<BatchMemOp>() == size_of::<sys::CUstreamBatchMemOpParams>());
    assert!(size_of::<ConditionalNode>() == size_of::<sys::CUgraphNodeParams>());
    assert!(
        std::mem::offset_of!(ConditionalNode, graphs) - std::mem::offset_of!(ConditionalNode, handle)
            == std::mem::offset_of!(sys::CUDA_CONDITIONAL_NODE_PARAMS, phGraph_out)
    );
    assert!(size_of::<BatchMemOpNode>() == size_of::<sys::CUDA_BATCH_MEM_OP_NODE_PARAMS>());
};

// SAFETY: function pointers of a library that is never unloaded.
unsafe impl Sync for Api {}

/// `CU_STREAM_WAIT_VALUE_GEQ`.
pub const WAIT_AT_LEAST: c_uint = 0;

/// Loads libcuda and initializes it. The error is one line for display.
pub fn load() -> Result<&'static Api, String> {
    static API: std::sync::OnceLock<Result<Api, String>> = std::sync::OnceLock::new();
    let loaded = API.get_or_init(|| {
        // SAFETY: loads and unloads libcuda, whose initializers are trusted.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcuda.so.1 is not installed: there is no NVIDIA driver on this machine".into());
        }
        // SAFETY: libcuda is present, so this loads it; its initializers are trusted.
        let library = unsafe { sys::culib() };
        // SAFETY: only checks whether the symbol exists.
        if unsafe { library.get::<*const c_void>(OWN_LIBRARY) }.is_ok() {
            return Err("the libcuda that is found is rgpu's own, for clients: a server needs NVIDIA's \
                        (take rgpu's folder out of LD_LIBRARY_PATH)"
                .into());
        }
        let api = Api::find()?;
        // SAFETY: no requirement.
        unsafe { api.init(0) }.map_err(|status| format!("cuInit: {}", api.name(status)))?;
        Ok(api)
    });
    loaded.as_ref().map_err(Clone::clone)
}

impl Api {
    /// What each atomic operation of one device can do in another device's memory:
    /// `cuDeviceGetP2PAtomicCapabilities` of CUDA 13. Empty if the driver doesn't report it.
    pub fn peer_atomics(&self, device: CUdevice, peer: CUdevice) -> Vec<u32> {
        type Ask = unsafe extern "C" fn(*mut c_uint, *const c_uint, c_uint, CUdevice, CUdevice) -> u32;
        // SAFETY: `load` has checked that the library exists; the symbol has this type by CUDA's header.
        let Ok(ask) = (unsafe { sys::culib().get::<Ask>(b"cuDeviceGetP2PAtomicCapabilities\0") }) else {
            return Vec::new();
        };
        let operations: [c_uint; ATOMIC_OPERATIONS] = std::array::from_fn(|n| n as c_uint);
        let mut found = vec![0; operations.len()];
        // SAFETY: the lists have as many entries as the function is told.
        let status =
            unsafe { ask(found.as_mut_ptr(), operations.as_ptr(), operations.len() as c_uint, device, peer) };
        if status == 0 { found } else { Vec::new() }
    }

    /// Calls `f` with `context` current in this thread, then makes the thread's own context current again. A
    /// null `context` means the thread's own.
    ///
    /// Memory that is registered with CUDA belongs to the context that is current at that time, and its
    /// registration ends with that context.
    ///
    /// # Safety
    /// `context` is null or a live context.
    pub unsafe fn within<T>(
        &self,
        context: CUcontext,
        f: impl FnOnce() -> Result<T, Status>,
    ) -> Result<T, Status> {
        let mut own: CUcontext = std::ptr::null_mut();
        // SAFETY: writes a context handle.
        unsafe { self.context_current(&mut own) }?;
        if context.is_null() || context == own {
            return f();
        }
        // SAFETY: a live context, guaranteed by the caller.
        unsafe { self.context_set(context) }?;
        let result = f();
        // SAFETY: it was current before, and `f` destroys no context.
        unsafe { self.context_set(own) }?;
        result
    }

    /// The result's name according to the driver.
    pub fn name(&self, status: Status) -> String {
        let mut name = std::ptr::null();
        // SAFETY: writes a pointer to a static string, or null.
        let found = unsafe { (self.error_name)(status.0, &mut name) };
        if found != 0 || name.is_null() {
            return status.to_string();
        }
        // SAFETY: a NUL-terminated string of the driver.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    fn complain(&self, function: &str, status: Status) {
        match function {
            "cuGetErrorName" | "cuFuncGetParamInfo" | "cuStreamQuery" | "cuEventElapsedTime" => {}
            // Called for every possible attribute number.
            "cuDeviceGetAttribute" | "cuFuncGetAttribute" | "cuDeviceGetP2PAttribute" => {
                tracing::trace!("{function}: {} ({})", self.name(status), status.0);
            }
            // If the driver refuses a change, the graph is made again.
            "cuGraphExecUpdate_v2"
            | "cuGraphExecKernelNodeSetParams_v2"
            | "cuGraphExecMemsetNodeSetParams"
            | "cuGraphExecMemcpyNodeSetParams"
            | "cuGraphExecBatchMemOpNodeSetParams"
            | "cuGraphNodeSetEnabled" => {
                tracing::debug!("{function}: {} ({})", self.name(status), status.0);
            }
            _ if EXPECTED.contains(&status) => {
                tracing::debug!("{function}: {} ({})", self.name(status), status.0)
            }
            _ => tracing::warn!("{function}: {} ({})", self.name(status), status.0),
        }
    }
}

#[cfg(test)]
impl Api {
    /// A stream of a context that has failed.
    pub const FAILED: CUstream = std::ptr::dangling_mut();

    /// Like [`idle`](Api::idle), but a query of [`FAILED`](Api::FAILED) returns the context's error.
    pub fn failing() -> &'static Api {
        unsafe extern "C" fn query(stream: CUstream) -> u32 {
            if stream == Api::FAILED { Status::ILLEGAL_ADDRESS.0 } else { 0 }
        }
        Box::leak(Box::new(Api { stream_query_raw: query, ..*Api::idle() }))
    }

    /// An address to which and from which nothing can be copied.
    pub const REFUSED: CUdeviceptr = 1 << 40;

    /// Like [`idle`](Api::idle), but copies of rows to [`REFUSED`](Api::REFUSED) and of bytes from there are
    /// refused.
    pub fn refusing() -> &'static Api {
        unsafe extern "C" fn copy(copy: *const CUDA_MEMCPY3D, _: CUstream) -> u32 {
            // SAFETY: the caller's structure.
            if unsafe { (*copy).dstDevice } == Api::REFUSED { Status::INVALID_VALUE.0 } else { 0 }
        }
        unsafe extern "C" fn out(_: *mut c_void, from: CUdeviceptr, _: usize, _: CUstream) -> u32 {
            if from == Api::REFUSED { Status::INVALID_VALUE.0 } else { 0 }
        }
        Box::leak(Box::new(Api { copy_3d: copy, copy_dtoh: out, ..*Api::idle() }))
    }

    /// Like [`idle`](Api::idle), but unmapping memory takes until [`UNMAPS`] is set, or ten seconds.
    pub fn slow_to_unmap() -> &'static Api {
        unsafe extern "C" fn memory_unmap(_: CUdeviceptr, _: usize) -> u32 {
            for _ in 0..10_000 {
                if UNMAPS.load(std::sync::atomic::Ordering::Acquire) {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            0
        }
        Box::leak(Box::new(Api { memory_unmap, ..*Api::idle() }))
    }

    /// Like [`idle`](Api::idle), but contexts, streams and captured nodes have handles that nothing else has,
    /// calls that make, change, use up or end something are noted ([`calls`](Api::calls)), and those that
    /// [`refuse`](Api::refuse) names fail. All that is a thread's own.
    pub fn noting() -> &'static Api {
        unsafe extern "C" fn stream_create(stream: *mut CUstream, _: c_uint, _: c_int) -> u32 {
            // SAFETY: the caller's handle.
            note("stream_create", 0, || unsafe { *stream = fresh() as CUstream })
        }
        unsafe extern "C" fn stream_destroy(stream: CUstream) -> u32 {
            note("stream_destroy", stream as usize, || ())
        }
        unsafe extern "C" fn stream_write(stream: CUstream, _: CUdeviceptr, _: u64, _: c_uint) -> u32 {
            note("stream_write", stream as usize, || ())
        }
        unsafe extern "C" fn context_create(context: *mut CUcontext, _: c_uint, _: CUdevice) -> u32 {
            // SAFETY: the caller's handle.
            note("context_create", 0, || unsafe { *context = fresh() as CUcontext })
        }
        unsafe extern "C" fn context_destroy(context: CUcontext) -> u32 {
            note("context_destroy", context as usize, || ())
        }
        unsafe extern "C" fn primary_reset(device: CUdevice) -> u32 {
            note("primary_reset", device as usize, || ())
        }
        unsafe extern "C" fn capture_begin(
            _: CUstream,
            _: CUgraph,
            _: *const CUgraphNode,
            _: *const c_void,
            _: usize,
            _: u32,
        ) -> u32 {
            note("capture_begin", 0, || ())
        }
        unsafe extern "C" fn capture_info(
            _: CUstream,
            _: *mut u32,
            _: *mut u64,
            _: *mut CUgraph,
            last: *mut *const CUgraphNode,
            count: *mut usize,
        ) -> u32 {
            let node = NODE.with(|node| {
                node.set(fresh() as CUgraphNode);
                node.as_ptr()
            });
            // SAFETY: the caller's values.
            unsafe { (*last, *count) = (node, 1) };
            0
        }
        unsafe extern "C" fn graph_instantiate(_: *mut CUgraphExec, _: CUgraph, _: u64) -> u32 {
            note("graph_instantiate", 0, || ())
        }
        unsafe extern "C" fn graph_node_launch(
            _: CUgraphExec,
            node: CUgraphNode,
            _: *const CUDA_KERNEL_NODE_PARAMS_v2,
        ) -> u32 {
            note("graph_node_launch", node as usize, || ())
        }
        unsafe extern "C" fn graph_node_fill(
            _: CUgraphExec,
            node: CUgraphNode,
            _: *const CUDA_MEMSET_NODE_PARAMS,
            _: CUcontext,
        ) -> u32 {
            note("graph_node_fill", node as usize, || ())
        }
        unsafe extern "C" fn graph_node_copy(
            _: CUgraphExec,
            node: CUgraphNode,
            _: *const CUDA_MEMCPY3D,
            _: CUcontext,
        ) -> u32 {
            note("graph_node_copy", node as usize, || ())
        }
        unsafe extern "C" fn copy_3d(copy: *const CUDA_MEMCPY3D, _: CUstream) -> u32 {
            // SAFETY: the caller's structure.
            note("copy_3d", unsafe { (*copy).Depth }, || ())
        }
        unsafe extern "C" fn memory_unmap(address: CUdeviceptr, _: usize) -> u32 {
            note("memory_unmap", address as usize, || ())
        }
        unsafe extern "C" fn event_record(_: CUevent, stream: CUstream, _: c_uint) -> u32 {
            note("event_record", stream as usize, || ())
        }
        unsafe extern "C" fn stream_wait_event(stream: CUstream, _: CUevent, _: c_uint) -> u32 {
            note("stream_wait_event", stream as usize, || ())
        }
        unsafe extern "C" fn copy_any(_: CUdeviceptr, _: CUdeviceptr, _: usize, stream: CUstream) -> u32 {
            note("copy_any", stream as usize, || ())
        }
        unsafe extern "C" fn copy_peer(
            _: CUdeviceptr,
            to: CUcontext,
            _: CUdeviceptr,
            _: CUcontext,
            _: usize,
            _: CUstream,
        ) -> u32 {
            note("copy_peer", to as usize, || ())
        }
        unsafe extern "C" fn copy_htod(_: CUdeviceptr, _: *const c_void, _: usize, stream: CUstream) -> u32 {
            note("copy_htod", stream as usize, || ())
        }
        unsafe extern "C" fn copy_3d_peer(copy: *const CUDA_MEMCPY3D, _: CUstream) -> u32 {
            // SAFETY: the caller's structure.
            note("copy_3d_peer", unsafe { (*copy).reserved1 } as usize, || ())
        }
        unsafe extern "C" fn set_8(_: CUdeviceptr, _: u8, _: usize, stream: CUstream) -> u32 {
            note("set_8", stream as usize, || ())
        }
        Box::leak(Box::new(Api {
            stream_create,
            stream_destroy,
            stream_write,
            context_create,
            context_destroy,
            primary_reset,
            capture_begin,
            capture_info,
            graph_instantiate,
            graph_node_launch,
            graph_node_fill,
            graph_node_copy,
            copy_3d,
            memory_unmap,
            event_record,
            stream_wait_event,
            copy_any,
            copy_peer,
            copy_htod,
            copy_3d_peer,
            set_8,
            ..*Api::idle()
        }))
    }

    /// Like [`idle`](Api::idle), but captures always end with the same node.
    pub fn adding_none() -> &'static Api {
        unsafe extern "C" fn capture_info(
            _: CUstream,
            _: *mut u32,
            _: *mut u64,
            _: *mut CUgraph,
            last: *mut *const CUgraphNode,
            count: *mut usize,
        ) -> u32 {
            // SAFETY: the caller's values.
            unsafe { (*last, *count) = (NODE.with(std::cell::Cell::as_ptr), 1) };
            0
        }
        Box::leak(Box::new(Api { capture_info, ..*Api::idle() }))
    }

    /// What was called since this was last asked, each with its handle, device, address or number of slices.
    /// Copies that name contexts: with their target's.
    pub fn calls() -> Vec<(&'static str, usize)> {
        CALLS.take()
    }

    /// From now on, this call fails.
    pub fn refuse(name: Option<&'static str>) {
        REFUSED.set(name);
    }
}

/// See [`Api::slow_to_unmap`].
#[cfg(test)]
pub static UNMAPS: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

#[cfg(test)]
thread_local! {
    static CALLS: std::cell::RefCell<Vec<(&'static str, usize)>> = const { std::cell::RefCell::new(Vec::new()) };
    static NODE: std::cell::Cell<CUgraphNode> = const { std::cell::Cell::new(std::ptr::null_mut()) };
    static REFUSED: std::cell::Cell<Option<&'static str>> = const { std::cell::Cell::new(None) };
}

/// A handle that nothing else has.
#[cfg(test)]
fn fresh() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

#[cfg(test)]
fn note(name: &'static str, what: usize, act: impl FnOnce()) -> u32 {
    CALLS.with_borrow_mut(|all| all.push((name, what)));
    if REFUSED.get() == Some(name) {
        return Status::OUT_OF_MEMORY.0;
    }
    act();
    0
}
