//! Compares the structures of `types` with cudarc's bindings of `cuda.h` 13.0.

use std::mem::offset_of;

use cuda::abi::types;
use cudarc::driver::sys;

macro_rules! same {
    ($ours:ty, $theirs:ty { $($our:ident = $their:ident),* $(,)? }) => {{
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
        assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), stringify!($ours));
        $(assert_eq!(std::mem::offset_of!($ours, $our), std::mem::offset_of!($theirs, $their), stringify!($our));)*
    }};
}

#[test]
fn copies() {
    same!(types::Memcpy2D, sys::CUDA_MEMCPY2D_st {
        srcXInBytes = srcXInBytes, srcMemoryType = srcMemoryType, srcHost = srcHost, srcDevice = srcDevice, srcPitch = srcPitch,
        dstXInBytes = dstXInBytes, dstMemoryType = dstMemoryType, dstHost = dstHost, dstDevice = dstDevice, dstPitch = dstPitch,
        WidthInBytes = WidthInBytes, Height = Height,
    });
    same!(types::Memcpy3D, sys::CUDA_MEMCPY3D_st {
        srcZ = srcZ, srcLOD = srcLOD, srcMemoryType = srcMemoryType, srcHost = srcHost, srcDevice = srcDevice, reserved0 = reserved0,
        srcPitch = srcPitch, srcHeight = srcHeight, dstXInBytes = dstXInBytes, dstMemoryType = dstMemoryType, dstHost = dstHost,
        dstDevice = dstDevice, reserved1 = reserved1, dstPitch = dstPitch, dstHeight = dstHeight, WidthInBytes = WidthInBytes, Depth = Depth,
    });
    same!(types::Memcpy3D, sys::CUDA_MEMCPY3D_PEER_st { reserved0 = srcContext, reserved1 = dstContext, Depth = Depth });
}

#[test]
fn parts_of_devices() {
    same!(types::DevResource, sys::CUdevResource_st { kind = type_, inside = _internal_padding, told = __bindgen_anon_1 });
}

#[test]
fn batches_of_copies() {
    same!(types::MemcpyAttributes, sys::CUmemcpyAttributes_st {
        srcAccessOrder = srcAccessOrder, srcLocHint = srcLocHint, dstLocHint = dstLocHint, flags = flags,
    });
    same!(types::Memcpy3DOperand, sys::CUmemcpy3DOperand_st { kind = type_, words = op });
    same!(types::Memcpy3DBatchOp, sys::CUDA_MEMCPY3D_BATCH_OP_st {
        src = src, dst = dst, extent = extent, srcAccessOrder = srcAccessOrder, flags = flags,
    });
}

#[test]
fn launches() {
    same!(types::LaunchConfig, sys::CUlaunchConfig_st {
        grid = gridDimX, block = blockDimX, sharedMemBytes = sharedMemBytes, hStream = hStream, attrs = attrs, numAttrs = numAttrs,
    });
    same!(types::LaunchAttr, sys::CUlaunchAttribute_st { id = id, value = value });
}

#[test]
fn graph_nodes() {
    same!(types::KernelNodeParams, sys::CUDA_KERNEL_NODE_PARAMS_v2_st {
        func = func, grid = gridDimX, block = blockDimX, sharedMemBytes = sharedMemBytes, kernelParams = kernelParams,
        extra = extra, kern = kern, ctx = ctx,
    });
    same!(types::KernelNodeParams1, sys::CUDA_KERNEL_NODE_PARAMS_st { func = func, kernelParams = kernelParams, extra = extra });
    same!(types::MemsetNodeParams, sys::CUDA_MEMSET_NODE_PARAMS_st {
        dst = dst, pitch = pitch, value = value, elementSize = elementSize, width = width, height = height,
    });
    same!(types::BatchMemOp, sys::CUstreamBatchMemOpParams_union { operation = operation });
    type Wait = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st;
    assert_eq!(offset_of!(types::BatchMemOp, address), offset_of!(Wait, address));
    assert_eq!(offset_of!(types::BatchMemOp, value), offset_of!(Wait, __bindgen_anon_1));
    assert_eq!(offset_of!(types::BatchMemOp, flags), offset_of!(Wait, flags));
    type Fence = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpMemoryBarrierParams_st;
    assert_eq!(offset_of!(types::BatchMemOp, short_flags), offset_of!(Fence, flags));
    same!(types::BatchMemOpNodeParams, sys::CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st {
        ctx = ctx, count = count, paramArray = paramArray, flags = flags,
    });
    same!(types::ConditionalNodeParams, sys::CUDA_CONDITIONAL_NODE_PARAMS {
        handle = handle, kind = type_, size = size, graphs = phGraph_out, ctx = ctx,
    });
    same!(types::HostNodeParams, sys::CUDA_HOST_NODE_PARAMS_st { userData = userData });
    same!(types::MemAllocNodeParams, sys::CUDA_MEM_ALLOC_NODE_PARAMS_v1_st {
        poolProps = poolProps, accessDescs = accessDescs, accessDescCount = accessDescCount, bytesize = bytesize, dptr = dptr,
    });
    same!(types::GraphNodeParams, sys::CUgraphNodeParams_st { kind = type_, body = __bindgen_anon_1 });
    same!(types::UpdateResultInfo, sys::CUgraphExecUpdateResultInfo_st {
        result = result, errorNode = errorNode, errorFromNode = errorFromNode,
    });
}

#[test]
fn pools() {
    same!(types::MemPoolProps, sys::CUmemPoolProps_st {
        allocType = allocType, handleTypes = handleTypes, location = location, maxSize = maxSize, usage = usage,
    });
    same!(types::MemLocation, sys::CUmemLocation_st { kind = type_, id = id });
    same!(types::MemAccessDesc, sys::CUmemAccessDesc_st { location = location, flags = flags });
}

#[test]
fn contexts_and_devices() {
    same!(types::CtxCreateParams, sys::CUctxCreateParams_st {
        execAffinityParams = execAffinityParams, numExecAffinityParams = numExecAffinityParams, cigParams = cigParams,
    });
    same!(types::DevProp, sys::CUdevprop_st { maxGridSize = maxGridSize, textureAlign = textureAlign });
}
