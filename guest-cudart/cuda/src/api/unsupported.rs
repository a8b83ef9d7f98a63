//! Exported functions that are not supported: each returns `CUDA_ERROR_NOT_SUPPORTED` and logs one line.
//! Functions that become supported move to their chapter's module.

/// Graphs: semaphores of other interfaces.
mod graph {
    unsupported! {
        cuGraphAddExternalSemaphoresSignalNode, cuGraphAddExternalSemaphoresWaitNode, cuGraphExecExternalSemaphoresSignalNodeSetParams, cuGraphExecExternalSemaphoresWaitNodeSetParams, cuGraphExternalSemaphoresSignalNodeGetParams, cuGraphExternalSemaphoresSignalNodeSetParams, cuGraphExternalSemaphoresWaitNodeGetParams, cuGraphExternalSemaphoresWaitNodeSetParams,
    }
}

/// Sparse and planar arrays, arrays of other interfaces, and the forms up to CUDA 3.
mod array {
    unsupported! {
        cuArray3DCreate, cuArray3DGetDescriptor, cuArrayCreate,
        cuArrayGetDescriptor,         cuArrayGetPlane, cuArrayGetSparseProperties, cuExternalMemoryGetMappedMipmappedArray,
        cuGraphicsResourceGetMappedMipmappedArray, cuGraphicsSubResourceGetMappedArray, cuMemMapArrayAsync,
        cuMemMapArrayAsync_ptsz, cuMemcpyAtoA, cuMemcpyAtoD,         cuMemcpyAtoH, cuMemcpyAtoHAsync,         cuMemcpyDtoA, cuMemcpyHtoA,
        cuMemcpyHtoAAsync,                 cuMipmappedArrayGetSparseProperties, cuSurfRefGetArray,
        cuSurfRefSetArray, cuTexRefGetArray, cuTexRefGetMipmappedArray, cuTexRefSetArray, cuTexRefSetMipmappedArray,
    }
}

/// Texture and surface references, which CUDA 12 removed.
mod texture {
    unsupported! {
        cuModuleGetSurfRef, cuModuleGetTexRef, cuParamSetTexRef, cuTexRefCreate,
        cuTexRefDestroy, cuTexRefGetAddress, cuTexRefGetAddressMode, cuTexRefGetAddress_v2, cuTexRefGetBorderColor,
        cuTexRefGetFilterMode, cuTexRefGetFlags, cuTexRefGetFormat, cuTexRefGetMaxAnisotropy,
        cuTexRefGetMipmapFilterMode, cuTexRefGetMipmapLevelBias, cuTexRefGetMipmapLevelClamp, cuTexRefSetAddress,
        cuTexRefSetAddress2D, cuTexRefSetAddress2D_v2, cuTexRefSetAddress2D_v3, cuTexRefSetAddressMode,
        cuTexRefSetAddress_v2, cuTexRefSetBorderColor, cuTexRefSetFilterMode, cuTexRefSetFlags, cuTexRefSetFormat,
        cuTexRefSetMaxAnisotropy, cuTexRefSetMipmapFilterMode, cuTexRefSetMipmapLevelBias, cuTexRefSetMipmapLevelClamp,
    }
}

/// Multicast, and descriptors for other drivers: not built yet.
mod virtual_memory {
    unsupported! {
        cuMemGetHandleForAddressRange,
        cuMulticastAddDevice,
        cuMulticastBindAddr, cuMulticastBindMem, cuMulticastCreate, cuMulticastGetGranularity, cuMulticastUnbind,
    }
}

/// Memory and semaphores of other interfaces need a GPU in this machine.
mod external {
    unsupported! {
        cuDestroyExternalMemory, cuDestroyExternalSemaphore, cuDeviceGetNvSciSyncAttributes,
        cuExternalMemoryGetMappedBuffer, cuGraphicsMapResources, cuGraphicsMapResources_ptsz,
        cuGraphicsResourceGetMappedPointer, cuGraphicsResourceGetMappedPointer_v2, cuGraphicsResourceSetMapFlags,
        cuGraphicsResourceSetMapFlags_v2, cuGraphicsUnmapResources, cuGraphicsUnmapResources_ptsz,
        cuGraphicsUnregisterResource, cuImportExternalMemory, cuImportExternalSemaphore,
        cuSignalExternalSemaphoresAsync, cuSignalExternalSemaphoresAsync_ptsz, cuWaitExternalSemaphoresAsync,
        cuWaitExternalSemaphoresAsync_ptsz,
    }
}

/// OpenGL, EGL and VDPAU need a GPU in this machine. Programs ask for these names when they start.
mod graphics {
    unsupported! {
        cuEGLStreamConsumerAcquireFrame, cuEGLStreamConsumerConnect, cuEGLStreamConsumerConnectWithFlags, cuEGLStreamConsumerDisconnect, cuEGLStreamConsumerReleaseFrame, cuEGLStreamProducerConnect, cuEGLStreamProducerDisconnect, cuEGLStreamProducerPresentFrame, cuEGLStreamProducerReturnFrame, cuEventCreateFromEGLSync, cuGLCtxCreate, cuGLCtxCreate_v2, cuGLGetDevices, cuGLGetDevices_v2, cuGLInit, cuGLMapBufferObject, cuGLMapBufferObjectAsync, cuGLMapBufferObjectAsync_v2, cuGLMapBufferObjectAsync_v2_ptsz, cuGLMapBufferObject_v2, cuGLMapBufferObject_v2_ptds, cuGLRegisterBufferObject, cuGLSetBufferObjectMapFlags, cuGLUnmapBufferObject, cuGLUnmapBufferObjectAsync, cuGLUnregisterBufferObject, cuGraphicsEGLRegisterImage, cuGraphicsGLRegisterBuffer, cuGraphicsGLRegisterImage, cuGraphicsResourceGetMappedEglFrame, cuGraphicsVDPAURegisterOutputSurface, cuGraphicsVDPAURegisterVideoSurface, cuVDPAUCtxCreate, cuVDPAUCtxCreate_v2, cuVDPAUGetDevice,
    }
}

/// Decompression by the device's engines: not built yet.
mod decompression {
    unsupported! {
        cuMemBatchDecompressAsync, cuMemBatchDecompressAsync_ptsz,
    }
}

/// Core dumps, checkpoints and notifications concern the machine that has the GPU.
mod tools {
    unsupported! {
        cuCheckpointProcessCheckpoint, cuCheckpointProcessGetRestoreThreadId, cuCheckpointProcessGetState,
        cuCheckpointProcessLock, cuCheckpointProcessRestore, cuCheckpointProcessUnlock, cuCoredumpGetAttribute,
        cuCoredumpGetAttributeGlobal, cuCoredumpSetAttribute, cuCoredumpSetAttributeGlobal,
        cuDeviceRegisterAsyncNotification, cuDeviceUnregisterAsyncNotification, cuProfilerInitialize,
    }
}

/// No other device of this machine writes the GPU's memory, and functions of a remote GPU cannot be called
/// here.
mod local {
    unsupported! {
        cuFlushGPUDirectRDMAWrites, cuLibraryGetUnifiedFunction,
    }
}

/// The oldest forms: 32-bit sizes and addresses, and functions that CUDA itself has retired.
mod legacy {
    unsupported! {
        cuDeviceTotalMem, cuLaunchCooperativeKernelMultiDevice, cuMemAlloc,
        cuMemAllocHost, cuMemAllocPitch, cuMemFree, cuMemGetAddressRange, cuMemGetInfo, cuMemHostGetDevicePointer,
        cuMemcpy2D, cuMemcpy2DAsync, cuMemcpy2DUnaligned, cuMemcpy3D, cuMemcpy3DAsync, cuMemcpyDtoD, cuMemcpyDtoDAsync,
        cuMemcpyDtoH, cuMemcpyDtoHAsync, cuMemcpyHtoD, cuMemcpyHtoDAsync, cuMemsetD16, cuMemsetD2D16, cuMemsetD2D32,
        cuMemsetD2D8, cuMemsetD32, cuMemsetD8, cuModuleGetGlobal,
    }
}
