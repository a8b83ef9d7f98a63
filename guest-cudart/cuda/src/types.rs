//! Structures of `cuda.h` that a program passes, laid out as on 64-bit Linux. Enumerations in them are plain integers: a program may write any number. `tests/layout.rs` compares
//! them with cudarc's.

use std::ffi::c_void;

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
#[derive(Debug, Clone, Copy)]
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

/// `CUlaunchAttributeValue`: 64 bytes, aligned as its pointers are.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct AttrValue(pub [u8; 64]);

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
#[derive(Debug, Clone, Copy)]
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
#[derive(Debug, Clone, Copy)]
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
pub type HostFn = unsafe extern "C" fn(*mut c_void);
/// `CUstreamCallback`.
pub type StreamCallback = unsafe extern "C" fn(usize, u32, *mut c_void);
/// `CUoccupancyB2DSize`.
pub type BlockToShared = unsafe extern "C" fn(i32) -> usize;
