//! Copies between rows on a device and packed bytes in memory.

use std::ffi::c_void;
use std::ptr::NonNull;

use cudarc::driver::sys::CUmemorytype;

use super::api::{Api, CUDA_MEMCPY3D, CUcontext, CUstream};
use crate::driver::call::Result;
use crate::driver::rows::{Part, Rows};
use crate::driver::store::Way;

/// The contexts of a copy's source and target, if the driver must be told: see [`super::across`].
pub(super) type Contexts = Option<[CUcontext; 2]>;

/// Maximum number of bytes in a row, of a copy that names contexts.
const LONGEST_ROW: u64 = 1 << 30;

/// A copy between rows on a device and the host.
pub(super) struct RowCopy {
    pub(super) way: Way,
    pub(super) rows: Rows,
    pub(super) contexts: Contexts,
}

impl RowCopy {
    /// Enqueues the copy of `len` packed bytes from `offset` of the rows to or from the memory at `host`.
    ///
    /// # Safety
    /// The device rows belong to the session. `host` is valid for `len` bytes until the stream has passed
    /// this point, or (towards the device) until the driver has read it.
    pub(super) unsafe fn enqueue(
        &self,
        api: &Api,
        stream: CUstream,
        offset: u64,
        host: NonNull<u8>,
        len: usize,
    ) -> Result {
        self.rows.parts(offset, len as u64, |part| {
            let Part { at, offset, width, rows, slices } = part;
            // SAFETY: parts lie inside the `len` bytes.
            let host = unsafe { host.add(offset as usize) };
            if rows * slices > 1 {
                // SAFETY: guaranteed by the caller.
                return unsafe { self.enqueue_box(api, stream, host, part) };
            }
            if self.contexts.is_none() {
                let host = host.as_ptr().cast::<c_void>();
                // SAFETY: guaranteed by the caller.
                return unsafe {
                    match self.way {
                        Way::In => api.copy_htod(at, host, width as usize, stream),
                        Way::Out => api.copy_dtoh(host, at, width as usize, stream),
                    }
                };
            }
            (0..width).step_by(LONGEST_ROW as usize).try_for_each(|begin| {
                let (at, width) = (at + begin, LONGEST_ROW.min(width - begin));
                // SAFETY: this part of the row.
                unsafe { self.enqueue_box(api, stream, host.add(begin as usize), Part { at, width, ..part }) }
            })
        })
    }

    /// Enqueues the copy of a part, whose packed bytes are at `host`.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue).
    unsafe fn enqueue_box(&self, api: &Api, stream: CUstream, host: NonNull<u8>, part: Part) -> Result {
        let Part { at, width, rows: count, slices, .. } = part;
        let (mut copy, host) = (blank(), host.as_ptr().cast::<c_void>());
        let pitch = self.rows.pitch.max(width) as usize;
        match self.way {
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
        let apart = self.rows.rows_per_slice().filter(|_| slices > 1).unwrap_or(count);
        (copy.srcHeight, copy.dstHeight) = match self.way {
            Way::In => (count as usize, apart as usize),
            Way::Out => (apart as usize, count as usize),
        };
        (copy.WidthInBytes, copy.Height, copy.Depth) = (width as usize, count as usize, slices as usize);
        // SAFETY: guaranteed by the caller.
        unsafe { copy_box(api, stream, self.contexts, copy) }
    }
}

/// Enqueues a copy in up to three dimensions.
///
/// # Safety
/// Its ends are memory or arrays of the session, or host memory as in [`RowCopy::enqueue`].
pub(super) unsafe fn copy_box(
    api: &Api,
    stream: CUstream,
    contexts: Contexts,
    mut copy: CUDA_MEMCPY3D,
) -> Result {
    let Some([source, target]) = contexts else {
        // SAFETY: guaranteed by the caller.
        return unsafe { api.copy_3d(&copy, stream) };
    };
    (copy.reserved0, copy.reserved1) = (source.cast(), target.cast());
    // SAFETY: guaranteed by the caller; live contexts.
    unsafe { api.copy_3d_peer(&copy, stream) }
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
