//! Stream-ordered memory and its pools.

use std::ffi::{c_uint, c_void};
use std::ptr;

use crate::error::Error;
use crate::types::{
    CUdeviceptr, CUmemAccessDesc, CUmemLocation, CUmemPoolProps, CUmemPoolPtrExportData, CUmemoryPool,
    CUstream,
};

api! {
    ctx unsafe fn cudaMallocAsync/cudaMallocAsync_ptsz(address: *mut CUdeviceptr, size: usize, stream: CUstream) |d, s| {
        if address.is_null() { return Err(Error::INVALID_VALUE) }
        if size == 0 { address.write(ptr::null_mut()); return Ok(()) }
        d.cuMemAllocAsync(s, address, size, stream)
    };
    ctx unsafe fn cudaFreeAsync/cudaFreeAsync_ptsz(address: CUdeviceptr, stream: CUstream) |d, s| {
        if address.is_null() { return Ok(()) }
        d.cuMemFreeAsync(s, address, stream)
    };
    ctx unsafe fn cudaMallocFromPoolAsync/cudaMallocFromPoolAsync_ptsz(
        address: *mut CUdeviceptr, size: usize, pool: CUmemoryPool, stream: CUstream) |d, s| {
        if address.is_null() { return Err(Error::INVALID_VALUE) }
        if size == 0 { address.write(ptr::null_mut()); return Ok(()) }
        d.cuMemAllocFromPoolAsync(s, address, size, pool, stream)
    };
    ctx cudaMemPoolCreate => cuMemPoolCreate(pool: *mut CUmemoryPool, props: *const CUmemPoolProps);
    ctx cudaMemPoolDestroy => cuMemPoolDestroy(pool: CUmemoryPool);
    ctx cudaMemPoolTrimTo => cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    ctx cudaMemPoolSetAttribute => cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void);
    ctx cudaMemPoolGetAttribute => cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void);
    ctx cudaMemPoolSetAccess => cuMemPoolSetAccess(pool: CUmemoryPool, list: *const CUmemAccessDesc, count: usize);
    ctx cudaMemPoolGetAccess => cuMemPoolGetAccess(flags: *mut c_uint, pool: CUmemoryPool,
        location: *mut CUmemLocation);
    ctx unsafe fn cudaMemPoolExportToShareableHandle(handle: *mut c_void, pool: CUmemoryPool, kind: c_uint,
        flags: c_uint) |d| {
        d.cuMemPoolExportToShareableHandle(handle, pool, kind, u64::from(flags))
    };
    ctx unsafe fn cudaMemPoolImportFromShareableHandle(pool: *mut CUmemoryPool, handle: *mut c_void, kind: c_uint,
        flags: c_uint) |d| {
        d.cuMemPoolImportFromShareableHandle(pool, handle, kind, u64::from(flags))
    };
    ctx cudaMemPoolExportPointer => cuMemPoolExportPointer(data: *mut CUmemPoolPtrExportData, address: CUdeviceptr);
    ctx cudaMemPoolImportPointer => cuMemPoolImportPointer(
        address: *mut CUdeviceptr, pool: CUmemoryPool, data: *mut CUmemPoolPtrExportData);
}

#[cfg(not(feature = "v12"))]
api! {
    ctx cudaMemPrefetchAsync/cudaMemPrefetchAsync_ptsz => cuMemPrefetchAsync_v2(
        address: CUdeviceptr, count: usize, location: CUmemLocation, flags: c_uint, stream: CUstream);
    ctx cudaMemAdvise => cuMemAdvise_v2(address: CUdeviceptr, count: usize, advice: c_uint, location: CUmemLocation);
    ctx cudaMemPrefetchBatchAsync/cudaMemPrefetchBatchAsync_ptsz => cuMemPrefetchBatchAsync(
        addresses: *mut CUdeviceptr, sizes: *mut usize, count: usize, locations: *mut CUmemLocation,
        location_indices: *mut usize, location_count: usize, flags: u64, stream: CUstream);
    ctx cudaMemDiscardBatchAsync/cudaMemDiscardBatchAsync_ptsz => cuMemDiscardBatchAsync(
        addresses: *mut CUdeviceptr, sizes: *mut usize, count: usize, flags: u64, stream: CUstream);
    ctx cudaMemDiscardAndPrefetchBatchAsync/cudaMemDiscardAndPrefetchBatchAsync_ptsz => cuMemDiscardAndPrefetchBatchAsync(
        addresses: *mut CUdeviceptr, sizes: *mut usize, count: usize, locations: *mut CUmemLocation,
        location_indices: *mut usize, location_count: usize, flags: u64, stream: CUstream);
}

api! {
    ctx cudaMemRangeGetAttribute => cuMemRangeGetAttribute(
        data: *mut c_void, size: usize, attribute: c_uint, address: CUdeviceptr, count: usize);
    ctx cudaMemRangeGetAttributes => cuMemRangeGetAttributes(
        data: *mut *mut c_void, sizes: *mut usize, attributes: *mut c_uint, attribute_count: usize,
        address: CUdeviceptr, count: usize);
}
