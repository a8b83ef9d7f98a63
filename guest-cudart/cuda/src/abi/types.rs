//! Structures of `cuda.h` that a program passes, laid out as on 64-bit Linux. Enumerations in them are plain
//! integers: a program may pass any value. `tests/layout.rs` compares the layouts with cudarc's.

use std::ffi::c_void;

use crate::abi::result::Result;
use client::Status;
use client::ops::green::Part;

/// The argument of a program's callback.
#[derive(Clone, Copy)]
pub(crate) struct UserData(pub *mut c_void);

// SAFETY: the pointer is only handed back to the program's function, never dereferenced here.
unsafe impl Send for UserData {}

// SAFETY: this library never dereferences the pointer, so threads share only its value.
unsafe impl Sync for UserData {}

/// `CUexecAffinityParam`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExecAffinityParam {
    pub kind: u32,
    pub processors: u32,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InstantiateParams {
    pub flags: u64,
    pub stream: usize,
    pub error_node: usize,
    pub result: u32,
}

impl From<&KernelNodeParams1> for KernelNodeParams {
    fn from(p: &KernelNodeParams1) -> KernelNodeParams {
        let KernelNodeParams1 { func, grid, block, sharedMemBytes, kernelParams, extra } = *p;
        KernelNodeParams { func, grid, block, sharedMemBytes, kernelParams, extra, kern: 0, ctx: 0 }
    }
}

impl DevResource {
    /// Marks resources made by this library, so that a program's garbage is recognized.
    const MARK: u32 = u32::from_le_bytes(*b"rgpu");

    /// The part of a device that the session calls `part`.
    pub fn holding(part: &Part, session: u32) -> DevResource {
        let mut resource = DevResource { kind: part.kind, inside: [0; 23], told: [0; 12] };
        resource.told[..3].copy_from_slice(&part.sm);
        resource.inside[..3].copy_from_slice(&[Self::MARK, part.number, session]);
        resource
    }

    /// The session's number and the part's number in it.
    pub fn number(&self) -> Result<(u32, u32)> {
        if self.inside[0] == Self::MARK {
            Ok((self.inside[2], self.inside[1]))
        } else {
            Err(Status::INVALID_VALUE)
        }
    }
}

/// `CUdevResource`: its type, the driver's private data, and for multiprocessors the three words of
/// `CUdevSmResource` among the last words.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DevResource {
    pub kind: u32,
    pub inside: [u32; 23],
    pub told: [u32; 12],
}

/// `CUDA_MEMCPY2D_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Memcpy2D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: u32,
    pub srcHost: usize,
    pub srcDevice: u64,
    pub srcArray: usize,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: u32,
    pub dstHost: usize,
    pub dstDevice: u64,
    pub dstArray: usize,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}

/// `CUDA_MEMCPY3D_v2`, and `CUDA_MEMCPY3D_PEER`, whose reserved words are the contexts.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Memcpy3D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: u32,
    pub srcHost: usize,
    pub srcDevice: u64,
    pub srcArray: usize,
    /// `srcContext` in the peer form.
    pub reserved0: usize,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: u32,
    pub dstHost: usize,
    pub dstDevice: u64,
    pub dstArray: usize,
    /// `dstContext` in the peer form.
    pub reserved1: usize,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}

impl From<&Memcpy2D> for Memcpy3D {
    fn from(c: &Memcpy2D) -> Memcpy3D {
        Memcpy3D {
            srcXInBytes: c.srcXInBytes,
            srcY: c.srcY,
            srcMemoryType: c.srcMemoryType,
            srcHost: c.srcHost,
            srcDevice: c.srcDevice,
            srcArray: c.srcArray,
            srcPitch: c.srcPitch,
            dstXInBytes: c.dstXInBytes,
            dstY: c.dstY,
            dstMemoryType: c.dstMemoryType,
            dstHost: c.dstHost,
            dstDevice: c.dstDevice,
            dstArray: c.dstArray,
            dstPitch: c.dstPitch,
            WidthInBytes: c.WidthInBytes,
            Height: c.Height,
            Depth: 1,
            ..Memcpy3D::default()
        }
    }
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`; the first form ends before `kern`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelNodeParams {
    pub func: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub sharedMemBytes: u32,
    pub kernelParams: *const *const c_void,
    pub extra: *const *mut c_void,
    pub kern: usize,
    pub ctx: usize,
}

/// `CUDA_KERNEL_NODE_PARAMS_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelNodeParams1 {
    pub func: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub sharedMemBytes: u32,
    pub kernelParams: *const *const c_void,
    pub extra: *const *mut c_void,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemsetNodeParams {
    pub dst: u64,
    pub pitch: usize,
    pub value: u32,
    pub elementSize: u32,
    pub width: usize,
    pub height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HostNodeParams {
    pub function: Option<HostFn>,
    pub userData: *mut c_void,
}

/// `CUstreamBatchMemOpParams`. A flush and a fence have only flags, at the offset of `short_flags`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BatchMemOp {
    pub operation: u32,
    pub short_flags: u32,
    pub address: u64,
    pub value: u64,
    pub flags: u32,
    pub alias: u64,
    pub pad: u64,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BatchMemOpNodeParams {
    pub ctx: usize,
    pub count: u32,
    pub paramArray: *const BatchMemOp,
    pub flags: u32,
}

/// `CUDA_CONDITIONAL_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ConditionalNodeParams {
    pub handle: u64,
    pub kind: u32,
    pub size: u32,
    pub graphs: *const usize,
    pub ctx: usize,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemAllocNodeParams {
    pub poolProps: MemPoolProps,
    pub accessDescs: *const MemAccessDesc,
    pub accessDescCount: usize,
    pub bytesize: usize,
    pub dptr: u64,
}

/// `CUgraphNodeParams`: the body is one of the structures above, chosen by the node's type. A copy's
/// structure comes after its flags and its context.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GraphNodeParams {
    pub kind: u32,
    pub reserved0: [i32; 3],
    pub body: [u64; 29],
    pub reserved2: i64,
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UpdateResultInfo {
    pub result: u32,
    pub errorNode: usize,
    pub errorFromNode: usize,
}

/// `CUmemorytype`.
pub mod memory_type {
    pub const HOST: u32 = 1;
    pub const DEVICE: u32 = 2;
    pub const ARRAY: u32 = 3;
    pub const UNIFIED: u32 = 4;
}

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchAttr {
    pub id: u32,
    pub pad: [u8; 4],
    pub value: AttrValue,
}

/// `CUlaunchAttributeValue`: 64 bytes, aligned like the pointers in it.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct AttrValue(pub [u8; 64]);

impl AttrValue {
    /// This value with the bytes of one attribute from another: the rest of the union stays as it is.
    pub fn with(mut self, attribute: u32, other: &[u8; 64]) -> AttrValue {
        let len = match attribute {
            launch_attr::ACCESS_POLICY_WINDOW => 32,
            launch_attr::MEM_SYNC_DOMAIN_MAP => 2,
            launch_attr::CLUSTER_DIMENSION | launch_attr::PREFERRED_CLUSTER_DIMENSION => 12,
            launch_attr::DEVICE_UPDATABLE_KERNEL_NODE => {
                // An int, and behind a gap a handle.
                self.0[8..16].copy_from_slice(&other[8..16]);
                4
            }
            _ => 4,
        };
        self.0[..len].copy_from_slice(&other[..len]);
        self
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub sharedMemBytes: u32,
    pub hStream: usize,
    pub attrs: *const LaunchAttr,
    pub numAttrs: u32,
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemLocation {
    pub kind: u32,
    pub id: i32,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemPoolProps {
    pub allocType: u32,
    pub handleTypes: u32,
    pub location: MemLocation,
    pub win32SecurityAttributes: *mut c_void,
    pub maxSize: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemAccessDesc {
    pub location: MemLocation,
    pub flags: u32,
}

/// `CUctxCreateParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CtxCreateParams {
    pub execAffinityParams: *mut c_void,
    pub numExecAffinityParams: i32,
    pub cigParams: *mut c_void,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemcpyAttributes {
    pub srcAccessOrder: u32,
    pub srcLocHint: MemLocation,
    pub dstLocHint: MemLocation,
    pub flags: u32,
}

/// `CUmemcpy3DOperand`. Depending on its type: a pointer, row length, layer height and location; or an array
/// and three offsets.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Memcpy3DOperand {
    pub kind: u32,
    pub words: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Memcpy3DBatchOp {
    pub src: Memcpy3DOperand,
    pub dst: Memcpy3DOperand,
    pub extent: [usize; 3],
    pub srcAccessOrder: u32,
    pub flags: u32,
}

/// `CUdevprop`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DevProp {
    pub maxThreadsPerBlock: i32,
    pub maxThreadsDim: [i32; 3],
    pub maxGridSize: [i32; 3],
    pub sharedMemPerBlock: i32,
    pub totalConstantMemory: i32,
    pub SIMDWidth: i32,
    pub memPitch: i32,
    pub regsPerBlock: i32,
    pub clockRate: i32,
    pub textureAlign: i32,
}

/// `CUhostFn`.
pub type HostFn = unsafe extern "C-unwind" fn(*mut c_void);

/// `CUstreamCallback`.
pub type StreamCallback = unsafe extern "C-unwind" fn(usize, u32, *mut c_void);

/// `CUoccupancyB2DSize`.
pub type BlockToShared = unsafe extern "C" fn(i32) -> usize;

/// `CUipcMemHandle`, `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; 64]);

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub format: u32,
    pub channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Array3DDescriptor {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Requirements {
    pub size: usize,
    pub alignment: usize,
    pub reserved: [u32; 4],
}

/// `CUDA_RESOURCE_DESC`, its union as words: an array's handle in the first; or address, format, channels and
/// sizes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ResourceDesc {
    pub kind: u32,
    pub words: [u64; 16],
    pub flags: u32,
}

/// `CUDA_TEXTURE_DESC`, with floating-point numbers as bits.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TextureDesc {
    pub address: [u32; 3],
    pub filter: u32,
    pub flags: u32,
    pub anisotropy: u32,
    pub level_filter: u32,
    pub level_bias: u32,
    pub level_clamp: [u32; 2],
    pub border: [u32; 4],
    reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ViewDesc {
    pub format: u32,
    pub extent: [usize; 3],
    pub levels: [u32; 2],
    pub layers: [u32; 2],
    reserved: [u32; 16],
}

/// `CUmemPoolPtrExportData`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PointerData(pub [u8; 64]);

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProp {
    pub kind: u32,
    pub handle_types: u32,
    pub location: MemLocation,
    pub win32: *mut c_void,
    pub compression: u8,
    pub gpu_direct_rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    pub location: MemLocation,
    pub flags: u32,
}

/// `CUgraphEdgeData`. Except from a kernel's programmatic port, every dependency is on the whole of the
/// earlier node, which is at least as strict as what the program asked for.
pub type EdgeData = [u8; 8];

/// `CUlaunchAttributeID` numbers.
pub(crate) mod launch_attr {
    pub const IGNORE: u32 = 0;
    pub const ACCESS_POLICY_WINDOW: u32 = 1;
    pub const COOPERATIVE: u32 = 2;
    pub const CLUSTER_DIMENSION: u32 = 4;
    pub const CLUSTER_SCHEDULING_POLICY_PREFERENCE: u32 = 5;
    pub const PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;
    pub const PROGRAMMATIC_EVENT: u32 = 7;
    pub const PRIORITY: u32 = 8;
    pub const MEM_SYNC_DOMAIN_MAP: u32 = 9;
    pub const PREFERRED_CLUSTER_DIMENSION: u32 = 11;
    pub const LAUNCH_COMPLETION_EVENT: u32 = 12;
    pub const DEVICE_UPDATABLE_KERNEL_NODE: u32 = 13;
    /// A hint about the placement of blocks.
    pub const NVLINK_UTIL_CENTRIC_SCHEDULING: u32 = 16;
}
