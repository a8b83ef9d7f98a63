//! Copies of contiguous bytes: between host and device, between devices, and in batches. Those with a pitch
//! are in [`crate::copy_boxes`].

use std::ffi::{c_int, c_uint, c_void};

use crate::context;
use crate::driver::{DefaultStream, Driver};
use crate::error::{Error, Result};
use crate::types::{CUmemcpyAttributes, CUstream};

/// `cudaMemcpyKind`.
pub(crate) mod kind {
    use std::ffi::c_uint;

    pub(crate) const HOST_TO_DEVICE: c_uint = 1;
    pub(crate) const DEVICE_TO_HOST: c_uint = 2;
    pub(crate) const DEVICE_TO_DEVICE: c_uint = 3;
    pub(crate) const DEFAULT: c_uint = 4;
}

/// Whether there is nothing to copy.
#[inline]
fn is_empty(direction: c_uint, count: usize) -> Result<bool> {
    if direction > kind::DEFAULT { Err(Error::INVALID_MEMCPY_DIRECTION) } else { Ok(count == 0) }
}

/// Copies and waits, like `cudaMemcpy`.
#[inline]
pub(crate) unsafe fn copy(
    d: &Driver,
    s: DefaultStream,
    dst: *mut c_void,
    src: *const c_void,
    count: usize,
    direction: c_uint,
) -> Result {
    if is_empty(direction, count)? {
        return Ok(());
    }
    // SAFETY: the caller upholds the requirements of `cudaMemcpy`, which are the driver's for the same
    // pointers.
    unsafe {
        match direction {
            kind::HOST_TO_DEVICE => d.cuMemcpyHtoD_v2(s, dst, src, count),
            kind::DEVICE_TO_HOST => d.cuMemcpyDtoH_v2(s, dst, src.cast_mut(), count),
            kind::DEVICE_TO_DEVICE => d.cuMemcpyDtoD_v2(s, dst, src.cast_mut(), count),
            _ => d.cuMemcpy(s, dst, src.cast_mut(), count),
        }
    }
}

/// Copies in a stream, like `cudaMemcpyAsync`.
#[inline]
pub(crate) unsafe fn copy_async(
    d: &Driver,
    s: DefaultStream,
    dst: *mut c_void,
    src: *const c_void,
    count: usize,
    direction: c_uint,
    stream: CUstream,
) -> Result {
    if is_empty(direction, count)? {
        return Ok(());
    }
    // SAFETY: the caller upholds the requirements of `cudaMemcpyAsync`, which are the driver's for the same
    // pointers.
    unsafe {
        match direction {
            kind::HOST_TO_DEVICE => d.cuMemcpyHtoDAsync_v2(s, dst, src, count, stream),
            kind::DEVICE_TO_HOST => d.cuMemcpyDtoHAsync_v2(s, dst, src.cast_mut(), count, stream),
            kind::DEVICE_TO_DEVICE => d.cuMemcpyDtoDAsync_v2(s, dst, src.cast_mut(), count, stream),
            _ => d.cuMemcpyAsync(s, dst, src.cast_mut(), count, stream),
        }
    }
}

api! {
    ctx unsafe fn cudaMemcpy/cudaMemcpy_ptds(dst: *mut c_void, src: *const c_void, count: usize, direction: c_uint) |d, s| {
        copy(d, s, dst, src, count, direction)
    };
    ctx unsafe fn cudaMemcpyAsync/cudaMemcpyAsync_ptsz(dst: *mut c_void, src: *const c_void, count: usize,
        direction: c_uint, stream: CUstream) |d, s| {
        copy_async(d, s, dst, src, count, direction, stream)
    };
    ctx unsafe fn cudaMemcpyPeer(dst: *mut c_void, dst_device: c_int, src: *const c_void, src_device: c_int,
        count: usize) |d| {
        let (to, from) = (context::primary(d, dst_device)?, context::primary(d, src_device)?);
        if count == 0 { return Ok(()) }
        d.cuMemcpyPeer(DefaultStream::Legacy, dst, to, src.cast_mut(), from, count)
    };
    ctx unsafe fn cudaMemcpyPeerAsync(dst: *mut c_void, dst_device: c_int, src: *const c_void, src_device: c_int,
        count: usize, stream: CUstream) |d| {
        let (to, from) = (context::primary(d, dst_device)?, context::primary(d, src_device)?);
        if count == 0 { return Ok(()) }
        d.cuMemcpyPeerAsync(DefaultStream::Legacy, dst, to, src.cast_mut(), from, count, stream)
    };
}

#[cfg(not(feature = "v12"))]
api! {
    ctx unsafe fn cudaMemcpyBatchAsync/cudaMemcpyBatchAsync_ptsz(targets: *const *mut c_void, sources: *const *const c_void,
        sizes: *const usize, count: usize, attributes: *mut CUmemcpyAttributes, indices: *mut usize,
        attribute_count: usize, stream: CUstream) |d, s| {
        d.cuMemcpyBatchAsync_v2(s, targets.cast_mut(), sources.cast_mut().cast(), sizes.cast_mut(), count, attributes,
            indices, attribute_count, stream)
    };
}
#[cfg(feature = "v12")]
api! {
    ctx cudaMemcpyBatchAsync/cudaMemcpyBatchAsync_ptsz => cuMemcpyBatchAsync(targets: *mut *mut c_void,
        sources: *mut *mut c_void, sizes: *mut usize, count: usize, attributes: *mut CUmemcpyAttributes,
        indices: *mut usize, attribute_count: usize, fail_index: *mut usize, stream: CUstream);
}
