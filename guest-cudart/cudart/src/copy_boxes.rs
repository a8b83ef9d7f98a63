//! 2D and 3D copies. Every copy that has rows becomes one 3D copy of the driver, which also covers 2D copies
//! and arrays. The driver's own checks are in libcuda's `work/copy_boxes.rs`.

use std::ffi::{c_int, c_uint, c_void};

use crate::arguments::In;
use crate::array;
use crate::context;
use crate::driver::{DefaultStream, Driver};
use crate::error::{Error, Result};
use crate::types::{
    CUDA_MEMCPY3D, CUDA_MEMCPY3D_BATCH_OP, CUarray, CUstream, Extent, Memcpy3DParms, Memcpy3DPeerParms,
    PitchedPtr, Pos,
};

/// `CUmemorytype`.
mod memory {
    pub(super) const HOST: u32 = 1;
    pub(super) const DEVICE: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const UNIFIED: u32 = 4;
}

/// The source or target of a copy. Offsets along x are in bytes.
#[derive(Clone, Copy)]
enum End {
    Rows { address: *mut c_void, pitch: usize, height: usize },
    Array(CUarray),
}

/// The driver's memory types for the pointers of a `cudaMemcpyKind`: source, then target.
fn kinds(kind: c_uint) -> Result<(u32, u32)> {
    match kind {
        0 => Ok((memory::HOST, memory::HOST)),
        1 => Ok((memory::HOST, memory::DEVICE)),
        2 => Ok((memory::DEVICE, memory::HOST)),
        3 => Ok((memory::DEVICE, memory::DEVICE)),
        4 => Ok((memory::UNIFIED, memory::UNIFIED)),
        _ => Err(Error::INVALID_MEMCPY_DIRECTION),
    }
}

fn copy(source: End, from: Pos, target: End, to: Pos, bytes: Extent, kind: c_uint) -> Result<CUDA_MEMCPY3D> {
    let (source_type, target_type) = kinds(kind)?;
    let mut copy = CUDA_MEMCPY3D {
        src_x_in_bytes: from.x,
        src_y: from.y,
        src_z: from.z,
        dst_x_in_bytes: to.x,
        dst_y: to.y,
        dst_z: to.z,
        width_in_bytes: bytes.width,
        height: bytes.height,
        depth: bytes.depth,
        ..CUDA_MEMCPY3D::default()
    };
    match source {
        End::Array(array) => (copy.src_memory_type, copy.src_array) = (memory::ARRAY, array),
        End::Rows { address, pitch, height } => {
            (copy.src_memory_type, copy.src_pitch, copy.src_height) = (source_type, pitch, height);
            match source_type {
                memory::HOST => copy.src_host = address,
                _ => copy.src_device = address,
            }
        }
    }
    match target {
        End::Array(array) => (copy.dst_memory_type, copy.dst_array) = (memory::ARRAY, array),
        End::Rows { address, pitch, height } => {
            (copy.dst_memory_type, copy.dst_pitch, copy.dst_height) = (target_type, pitch, height);
            match target_type {
                memory::HOST => copy.dst_host = address,
                _ => copy.dst_device = address,
            }
        }
    }
    Ok(copy)
}

fn end(array: CUarray, pointer: PitchedPtr) -> Result<End> {
    match (array.is_null(), pointer.ptr.is_null()) {
        (false, true) => Ok(End::Array(array)),
        (true, false) => Ok(End::Rows { address: pointer.ptr, pitch: pointer.pitch, height: pointer.ysize }),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// The driver's form of a 3D copy. If an array takes part, extents count its elements, otherwise bytes.
/// Positions are counted the same way, even positions within a pointer: the manual says that those count
/// bytes, but NVIDIA's library counts elements.
pub(crate) fn of_parms(d: &Driver, p: &Memcpy3DParms) -> Result<CUDA_MEMCPY3D> {
    let (source, target) = (end(p.src_array, p.src_ptr)?, end(p.dst_array, p.dst_ptr)?);
    let element = |end| match end {
        End::Array(array) => array::element_bytes(d, array),
        End::Rows { .. } => Ok(1),
    };
    let (source_element, target_element) = (element(source)?, element(target)?);
    let element = source_element.max(target_element);
    if let (End::Array(_), End::Array(_)) = (source, target)
        && source_element != target_element
    {
        return Err(Error::INVALID_VALUE);
    }
    let scale = |x: usize| x.checked_mul(element).ok_or(Error::INVALID_VALUE);
    let from = Pos { x: scale(p.src_pos.x)?, ..p.src_pos };
    let to = Pos { x: scale(p.dst_pos.x)?, ..p.dst_pos };
    let width = scale(p.extent.width)?;
    for end in [source, target] {
        if let End::Rows { pitch, .. } = end
            && pitch < width
            && (p.extent.height > 1 || p.extent.depth > 1)
        {
            return Err(Error::INVALID_PITCH);
        }
    }
    copy(source, from, target, to, Extent { width, ..p.extent }, p.kind)
}

/// The runtime's form of a 3D copy, as returned by `cudaGraphMemcpyNodeGetParams`.
pub(crate) fn to_parms(d: &Driver, c: &CUDA_MEMCPY3D) -> Result<Memcpy3DParms> {
    let mut p = Memcpy3DParms::default();
    let (mut source_element, mut target_element) = (1, 1);
    if c.src_memory_type == memory::ARRAY {
        p.src_array = c.src_array;
        source_element = array::element_bytes(d, c.src_array)?;
    } else {
        let address = if c.src_memory_type == memory::HOST { c.src_host.cast_mut() } else { c.src_device };
        p.src_ptr =
            PitchedPtr { ptr: address, pitch: c.src_pitch, xsize: c.width_in_bytes, ysize: c.src_height };
    }
    if c.dst_memory_type == memory::ARRAY {
        p.dst_array = c.dst_array;
        target_element = array::element_bytes(d, c.dst_array)?;
    } else {
        let address = if c.dst_memory_type == memory::HOST { c.dst_host } else { c.dst_device };
        p.dst_ptr =
            PitchedPtr { ptr: address, pitch: c.dst_pitch, xsize: c.width_in_bytes, ysize: c.dst_height };
    }
    let element = source_element.max(target_element);
    p.src_pos = Pos { x: c.src_x_in_bytes / element, y: c.src_y, z: c.src_z };
    p.dst_pos = Pos { x: c.dst_x_in_bytes / element, y: c.dst_y, z: c.dst_z };
    p.extent = Extent { width: c.width_in_bytes / element, height: c.height, depth: c.depth };
    let on_host = |kind| kind == memory::HOST;
    p.kind = match (c.src_memory_type, c.dst_memory_type) {
        (memory::UNIFIED, _) | (_, memory::UNIFIED) => 4,
        (source, target) => match (on_host(source), on_host(target)) {
            (true, true) => 0,
            (true, false) => 1,
            (false, true) => 2,
            (false, false) => 3,
        },
    };
    Ok(p)
}

/// The driver's form of a copy of contiguous bytes, for a graph node.
pub(crate) fn of_bytes(
    target: *mut c_void,
    source: *const c_void,
    count: usize,
    kind: c_uint,
) -> Result<CUDA_MEMCPY3D> {
    let rows = |address| End::Rows { address, pitch: count, height: 1 };
    copy(
        rows(source.cast_mut()),
        ORIGIN,
        rows(target),
        ORIGIN,
        Extent { width: count, height: 1, depth: 1 },
        kind,
    )
}

const ORIGIN: Pos = Pos { x: 0, y: 0, z: 0 };

/// Runs a copy: in `stream` if there is one, else waiting for it to finish.
unsafe fn run(d: &Driver, s: DefaultStream, copy: &CUDA_MEMCPY3D, stream: Option<CUstream>) -> Result {
    if copy.width_in_bytes == 0 || copy.height == 0 || copy.depth == 0 {
        return Ok(());
    }
    // SAFETY: the caller upholds the requirements of the runtime's copy function for both ends.
    unsafe {
        match stream {
            Some(stream) => d.cuMemcpy3DAsync_v2(s, copy, stream),
            None => d.cuMemcpy3D_v2(s, copy),
        }
    }
}

/// A 2D copy. A row of a pointer must be at least as long as the rectangle is wide.
fn rectangle(
    source: End,
    from: (usize, usize),
    target: End,
    to: (usize, usize),
    width: usize,
    height: usize,
    kind: c_uint,
) -> Result<CUDA_MEMCPY3D> {
    for end in [source, target] {
        if let End::Rows { pitch, .. } = end
            && pitch < width
        {
            return Err(Error::INVALID_PITCH);
        }
    }
    let at = |(x, y)| Pos { x, y, z: 0 };
    copy(source, at(from), target, at(to), Extent { width, height, depth: 1 }, kind)
}

fn rows(address: *const c_void, pitch: usize) -> End {
    End::Rows { address: address.cast_mut(), pitch, height: 0 }
}

api! {
    ctx unsafe fn cudaMemcpy2D/cudaMemcpy2D_ptds(dst: *mut c_void, dpitch: usize, src: *const c_void, spitch: usize,
        width: usize, height: usize, kind: c_uint) |d, s| {
        run(d, s, &rectangle(rows(src, spitch), (0, 0), rows(dst, dpitch), (0, 0), width, height, kind)?, None)
    };
    ctx unsafe fn cudaMemcpy2DAsync/cudaMemcpy2DAsync_ptsz(dst: *mut c_void, dpitch: usize, src: *const c_void,
        spitch: usize,
        width: usize, height: usize, kind: c_uint, stream: CUstream) |d, s| {
        run(d, s, &rectangle(rows(src, spitch), (0, 0), rows(dst, dpitch), (0, 0), width, height, kind)?,
            Some(stream))
    };
    ctx unsafe fn cudaMemcpy2DToArray/cudaMemcpy2DToArray_ptds(dst: CUarray, x: usize, y: usize, src: *const c_void,
        spitch: usize,
        width: usize, height: usize, kind: c_uint) |d, s| {
        run(d, s, &rectangle(rows(src, spitch), (0, 0), End::Array(dst), (x, y), width, height, kind)?, None)
    };
    ctx unsafe fn cudaMemcpy2DToArrayAsync/cudaMemcpy2DToArrayAsync_ptsz(dst: CUarray, x: usize, y: usize,
        src: *const c_void, spitch: usize,
        width: usize, height: usize, kind: c_uint, stream: CUstream) |d, s| {
        run(d, s, &rectangle(rows(src, spitch), (0, 0), End::Array(dst), (x, y), width, height, kind)?, Some(stream))
    };
    ctx unsafe fn cudaMemcpy2DFromArray/cudaMemcpy2DFromArray_ptds(dst: *mut c_void, dpitch: usize, src: CUarray, x: usize,
        y: usize,
        width: usize, height: usize, kind: c_uint) |d, s| {
        run(d, s, &rectangle(End::Array(src), (x, y), rows(dst, dpitch), (0, 0), width, height, kind)?, None)
    };
    ctx unsafe fn cudaMemcpy2DFromArrayAsync/cudaMemcpy2DFromArrayAsync_ptsz(dst: *mut c_void, dpitch: usize, src: CUarray,
        x: usize, y: usize,
        width: usize, height: usize, kind: c_uint, stream: CUstream) |d, s| {
        run(d, s, &rectangle(End::Array(src), (x, y), rows(dst, dpitch), (0, 0), width, height, kind)?, Some(stream))
    };
    ctx unsafe fn cudaMemcpy2DArrayToArray/cudaMemcpy2DArrayToArray_ptds(dst: CUarray, dst_x: usize, dst_y: usize,
        src: CUarray,
        src_x: usize, src_y: usize, width: usize, height: usize, kind: c_uint) |d, s| {
        run(d, s, &rectangle(End::Array(src), (src_x, src_y), End::Array(dst), (dst_x, dst_y), width, height, kind)?,
            None)
    };

    ctx unsafe fn cudaMemcpyToArray/cudaMemcpyToArray_ptds(dst: CUarray, x: usize, y: usize, src: *const c_void,
        count: usize, kind: c_uint) |d, s| {
        to_array(d, s, dst, (x, y), src, count, kind, None)
    };
    ctx unsafe fn cudaMemcpyToArrayAsync/cudaMemcpyToArrayAsync_ptsz(dst: CUarray, x: usize, y: usize, src: *const c_void,
        count: usize, kind: c_uint,
        stream: CUstream) |d, s| {
        to_array(d, s, dst, (x, y), src, count, kind, Some(stream))
    };
    ctx unsafe fn cudaMemcpyFromArray/cudaMemcpyFromArray_ptds(dst: *mut c_void, src: CUarray, x: usize, y: usize,
        count: usize, kind: c_uint) |d, s| {
        from_array(d, s, dst, src, (x, y), count, kind, None)
    };
    ctx unsafe fn cudaMemcpyFromArrayAsync/cudaMemcpyFromArrayAsync_ptsz(dst: *mut c_void, src: CUarray, x: usize, y: usize,
        count: usize,
        kind: c_uint, stream: CUstream) |d, s| {
        from_array(d, s, dst, src, (x, y), count, kind, Some(stream))
    };
    ctx unsafe fn cudaMemcpyArrayToArray/cudaMemcpyArrayToArray_ptds(dst: CUarray, dst_x: usize, dst_y: usize, src: CUarray,
        src_x: usize, src_y: usize, count: usize, kind: c_uint) |d, s| {
        let (length, _) = array::rows(d, src)?;
        if array::rows(d, dst)?.0 != length || dst_x != src_x { return Err(Error::INVALID_VALUE) }
        for_each_rectangle(length, (src_x, src_y), count, |_, (x, y), width, height| {
            let to = (x, y - src_y + dst_y);
            run(d, s, &rectangle(End::Array(src), (x, y), End::Array(dst), to, width, height, kind)?, None)
        })
    };

    ctx unsafe fn cudaMemcpy3D/cudaMemcpy3D_ptds(p: In<Memcpy3DParms>) |d, s| {
        run(d, s, &of_parms(d, &p.get()?)?, None)
    };
    ctx unsafe fn cudaMemcpy3DAsync/cudaMemcpy3DAsync_ptsz(p: In<Memcpy3DParms>, stream: CUstream) |d, s| {
        run(d, s, &of_parms(d, &p.get()?)?, Some(stream))
    };
    ctx unsafe fn cudaMemcpy3DPeer/cudaMemcpy3DPeer_ptds(p: In<Memcpy3DPeerParms>) |d, s| {
        let copy = between_devices(d, &p.get()?)?;
        d.cuMemcpy3DPeer(s, &copy)
    };
    ctx unsafe fn cudaMemcpy3DPeerAsync/cudaMemcpy3DPeerAsync_ptsz(p: In<Memcpy3DPeerParms>, stream: CUstream) |d, s| {
        let copy = between_devices(d, &p.get()?)?;
        d.cuMemcpy3DPeerAsync(s, &copy, stream)
    };
}

#[cfg(not(feature = "v12"))]
api! {
    ctx cudaMemcpy3DBatchAsync/cudaMemcpy3DBatchAsync_ptsz => cuMemcpy3DBatchAsync_v2(
        count: usize, list: *mut CUDA_MEMCPY3D_BATCH_OP, flags: u64, stream: CUstream);
}
#[cfg(feature = "v12")]
api! {
    ctx cudaMemcpy3DBatchAsync/cudaMemcpy3DBatchAsync_ptsz => cuMemcpy3DBatchAsync(
        count: usize, list: *mut CUDA_MEMCPY3D_BATCH_OP, fail_index: *mut usize, flags: u64, stream: CUstream);
}

/// Splits `count` bytes of an array, starting at (x, y) and running row after row, into rectangles: the rest
/// of the first row, whole rows, and the start of the last row. `visit` gets the number of bytes before the
/// rectangle, its corner, its width and its height.
fn for_each_rectangle(
    length: usize,
    (x, y): (usize, usize),
    count: usize,
    mut visit: impl FnMut(usize, (usize, usize), usize, usize) -> Result,
) -> Result {
    if x >= length && count > 0 {
        return Err(Error::INVALID_VALUE);
    }
    let (mut done, mut x, mut y) = (0, x, y);
    while done < count {
        let left = count - done;
        let (width, height) =
            if x == 0 && left >= length { (length, left / length) } else { (left.min(length - x), 1) };
        visit(done, (x, y), width, height)?;
        done += width * height;
        (x, y) = (0, y + height);
    }
    Ok(())
}

unsafe fn to_array(
    d: &Driver,
    s: DefaultStream,
    dst: CUarray,
    at: (usize, usize),
    src: *const c_void,
    count: usize,
    kind: c_uint,
    stream: Option<CUstream>,
) -> Result {
    for_each_rectangle(array::rows(d, dst)?.0, at, count, |done, at, width, height| {
        let source = rows(src.wrapping_byte_add(done), width);
        // SAFETY: the caller upholds the requirements of `cudaMemcpyToArray`, and `source` is inside its
        // `src`.
        unsafe { run(d, s, &rectangle(source, (0, 0), End::Array(dst), at, width, height, kind)?, stream) }
    })
}

unsafe fn from_array(
    d: &Driver,
    s: DefaultStream,
    dst: *mut c_void,
    src: CUarray,
    at: (usize, usize),
    count: usize,
    kind: c_uint,
    stream: Option<CUstream>,
) -> Result {
    for_each_rectangle(array::rows(d, src)?.0, at, count, |done, at, width, height| {
        let target = rows(dst.wrapping_byte_add(done), width);
        // SAFETY: the caller upholds the requirements of `cudaMemcpyFromArray`, and `target` is inside its
        // `dst`.
        unsafe { run(d, s, &rectangle(End::Array(src), at, target, (0, 0), width, height, kind)?, stream) }
    })
}

/// A copy between devices. The driver's structure has a context for each end where other copies have reserved
/// words.
fn between_devices(d: &'static Driver, p: &Memcpy3DPeerParms) -> Result<CUDA_MEMCPY3D> {
    const DEVICE_TO_DEVICE: c_uint = 3;
    let same = Memcpy3DParms {
        src_array: p.src_array,
        src_pos: p.src_pos,
        src_ptr: p.src_ptr,
        dst_array: p.dst_array,
        dst_pos: p.dst_pos,
        dst_ptr: p.dst_ptr,
        extent: p.extent,
        kind: DEVICE_TO_DEVICE,
    };
    let context = |device: c_int| context::primary(d, device);
    Ok(CUDA_MEMCPY3D {
        reserved0: context(p.src_device)?,
        reserved1: context(p.dst_device)?,
        ..of_parms(d, &same)?
    })
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn a_linear_copy_into_an_array_fills_rows() {
        let mut seen = Vec::new();
        let record = |done, at, width, height| {
            seen.push((done, at, width, height));
            Ok(())
        };
        for_each_rectangle(10, (4, 1), 30, record).unwrap();
        assert_eq!(seen, [(0, (4, 1), 6, 1), (6, (0, 2), 10, 2), (26, (0, 4), 4, 1)]);
    }

    #[test]
    fn a_row_shorter_than_the_rectangle_is_an_invalid_pitch() {
        let short = rectangle(rows(ptr::null(), 8), (0, 0), rows(ptr::null(), 64), (0, 0), 16, 2, 1);
        assert_eq!(short.err(), Some(Error::INVALID_PITCH));
    }

    #[test]
    fn an_unknown_kind_is_an_invalid_direction() {
        assert_eq!(of_bytes(ptr::null_mut(), ptr::null(), 8, 5).err(), Some(Error::INVALID_MEMCPY_DIRECTION));
    }
}
