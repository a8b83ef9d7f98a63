//! Copies between rows on a device and packed bytes in memory.

use std::ffi::c_void;
use std::ptr::NonNull;

use cudarc::driver::sys::CUmemorytype;

use super::api::{Api, CUDA_MEMCPY3D, CUstream};
use crate::driver::call::Result;
use crate::driver::rows::{Part, Rows};
use crate::driver::store::Way;

/// Enqueues the copy of `len` packed bytes from `offset` of `rows` to or from the memory at `host`.
///
/// # Safety
/// The device rows belong to the session. `host` is valid for `len` bytes until the stream has passed this
/// point, or (towards the device) until the driver has read it.
pub(super) unsafe fn copy_rows(
    api: &Api,
    stream: CUstream,
    way: Way,
    rows: &Rows,
    offset: u64,
    host: NonNull<u8>,
    len: usize,
) -> Result {
    rows.parts(offset, len as u64, |Part { at, offset, width, rows: count, slices }| {
        // SAFETY: parts lie inside the `len` bytes.
        let host = unsafe { host.add(offset as usize) }.as_ptr().cast::<c_void>();
        if count * slices == 1 {
            // SAFETY: guaranteed by the caller.
            return unsafe {
                match way {
                    Way::In => api.copy_htod(at, host, width as usize, stream),
                    Way::Out => api.copy_dtoh(host, at, width as usize, stream),
                }
            };
        }
        let (mut copy, pitch) = (blank(), rows.pitch.max(width) as usize);
        match way {
            Way::In => {
                (copy.srcMemoryType, copy.srcHost, copy.srcPitch) =
                    (CUmemorytype::CU_MEMORYTYPE_HOST, host, width as usize);
                (copy.dstMemoryType, copy.dstDevice, copy.dstPitch) =
                    (CUmemorytype::CU_MEMORYTYPE_DEVICE, at, pitch);
            }
            Way::Out => {
                (copy.dstMemoryType, copy.dstHost, copy.dstPitch) =
                    (CUmemorytype::CU_MEMORYTYPE_HOST, host, width as usize);
                (copy.srcMemoryType, copy.srcDevice, copy.srcPitch) =
                    (CUmemorytype::CU_MEMORYTYPE_DEVICE, at, pitch);
            }
        }
        let apart = rows.rows_per_slice().filter(|_| slices > 1).unwrap_or(count);
        (copy.srcHeight, copy.dstHeight) = match way {
            Way::In => (count as usize, apart as usize),
            Way::Out => (apart as usize, count as usize),
        };
        (copy.WidthInBytes, copy.Height, copy.Depth) = (width as usize, count as usize, slices as usize);
        // SAFETY: guaranteed by the caller.
        unsafe { api.copy_3d(&copy, stream) }
    })
}

/// How many slices of two boxes of the same size one call can copy, and how many rows there are from one to
/// the next in each box: all slices, if that is a whole number in both.
pub(super) fn slices_at_once(source: &Rows, target: &Rows) -> (usize, usize, usize) {
    match (source.rows_per_slice(), target.rows_per_slice()) {
        (Some(from), Some(to)) if source.depth > 1 => (source.depth as usize, from as usize, to as usize),
        _ => (1, source.height as usize, target.height as usize),
    }
}

/// A copy of nothing.
pub(super) fn blank() -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: 0,
        srcHeight: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: std::ptr::null_mut(),
        dstDevice: 0,
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: 0,
        dstHeight: 0,
        WidthInBytes: 0,
        Height: 0,
        Depth: 1,
    }
}
