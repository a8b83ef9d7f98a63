//! Memory and semaphores of other APIs, and graphics resources.

use std::ffi::{c_int, c_uint, c_void};

use crate::arguments::In;
use crate::array::describe;
use crate::error::Error;
use crate::types::{
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, CUarray, CUdeviceptr,
    CUexternalMemory, CUexternalSemaphore, CUgraphicsResource, CUmipmappedArray, CUstream,
    ExternalMemoryBufferDesc, ExternalMemoryHandleDesc, ExternalMemoryMipmappedArrayDesc,
    ExternalSemaphoreHandleDesc,
};
#[cfg(not(feature = "v12"))]
use crate::types::{CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS};

api! {
    ctx unsafe fn cudaImportExternalMemory(memory: *mut CUexternalMemory, desc: In<ExternalMemoryHandleDesc>) |d| {
        let ExternalMemoryHandleDesc { kind, handle, size, flags } = desc.get()?;
        d.cuImportExternalMemory(memory, &CUDA_EXTERNAL_MEMORY_HANDLE_DESC { kind, handle, size, flags,
            reserved: [0; 16] })
    };
    ctx unsafe fn cudaExternalMemoryGetMappedBuffer(address: *mut CUdeviceptr, memory: CUexternalMemory,
        desc: In<ExternalMemoryBufferDesc>) |d| {
        let ExternalMemoryBufferDesc { offset, size, flags } = desc.get()?;
        d.cuExternalMemoryGetMappedBuffer(address, memory, &CUDA_EXTERNAL_MEMORY_BUFFER_DESC { offset, size, flags,
            reserved: [0; 16] })
    };
    ctx unsafe fn cudaExternalMemoryGetMappedMipmappedArray(
        array: *mut CUmipmappedArray, memory: CUexternalMemory, desc: In<ExternalMemoryMipmappedArrayDesc>) |d| {
        let desc = desc.get()?;
        d.cuExternalMemoryGetMappedMipmappedArray(array, memory, &CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
            offset: desc.offset,
            array: describe(&desc.format, desc.extent, desc.flags)?,
            num_levels: desc.num_levels,
            reserved: [0; 16],
        })
    };
    ctx cudaDestroyExternalMemory => cuDestroyExternalMemory(memory: CUexternalMemory);
    ctx unsafe fn cudaImportExternalSemaphore(semaphore: *mut CUexternalSemaphore,
        desc: In<ExternalSemaphoreHandleDesc>) |d| {
        let ExternalSemaphoreHandleDesc { kind, handle, flags } = desc.get()?;
        d.cuImportExternalSemaphore(semaphore, &CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC { kind, handle, flags,
            reserved: [0; 16] })
    };
    ctx cudaDestroyExternalSemaphore => cuDestroyExternalSemaphore(semaphore: CUexternalSemaphore);

    ctx cudaGraphicsUnregisterResource => cuGraphicsUnregisterResource(resource: CUgraphicsResource);
    ctx cudaGraphicsResourceSetMapFlags => cuGraphicsResourceSetMapFlags_v2(resource: CUgraphicsResource,
        flags: c_uint);
    ctx unsafe fn cudaGraphicsMapResources(count: c_int, resources: *mut CUgraphicsResource, stream: CUstream) |d| {
        let count = c_uint::try_from(count).map_err(|_| Error::INVALID_VALUE)?;
        d.cuGraphicsMapResources(crate::driver::DefaultStream::Legacy, count, resources, stream)
    };
    ctx unsafe fn cudaGraphicsUnmapResources(count: c_int, resources: *mut CUgraphicsResource, stream: CUstream) |d| {
        let count = c_uint::try_from(count).map_err(|_| Error::INVALID_VALUE)?;
        d.cuGraphicsUnmapResources(crate::driver::DefaultStream::Legacy, count, resources, stream)
    };
    ctx cudaGraphicsResourceGetMappedPointer => cuGraphicsResourceGetMappedPointer_v2(
        address: *mut *mut c_void, size: *mut usize, resource: CUgraphicsResource);
    ctx cudaGraphicsSubResourceGetMappedArray => cuGraphicsSubResourceGetMappedArray(
        array: *mut CUarray, resource: CUgraphicsResource, index: c_uint, level: c_uint);
    ctx cudaGraphicsResourceGetMappedMipmappedArray => cuGraphicsResourceGetMappedMipmappedArray(
        array: *mut CUmipmappedArray, resource: CUgraphicsResource);
}

#[cfg(not(feature = "v12"))]
api! {
    ctx cudaSignalExternalSemaphoresAsync/cudaSignalExternalSemaphoresAsync_ptsz => cuSignalExternalSemaphoresAsync(
        semaphores: *const CUexternalSemaphore, params: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, count: c_uint,
            stream: CUstream);
    ctx cudaWaitExternalSemaphoresAsync/cudaWaitExternalSemaphoresAsync_ptsz => cuWaitExternalSemaphoresAsync(
        semaphores: *const CUexternalSemaphore, params: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, count: c_uint,
            stream: CUstream);
}
