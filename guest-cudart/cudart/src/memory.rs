//! Linear memory on device and host: allocation, registration, attributes, memset.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use crate::arguments::Out;
use crate::driver::{DefaultStream, Driver};
use crate::error::{Error, Result};
use crate::types::{CUdeviceptr, CUstream, Extent, PitchedPtr, PointerAttributes};

/// The element size that rows are padded for: the widest vector load, in bytes.
const PITCH_ELEMENT: c_uint = 16;
/// `cudaInvalidDeviceId`.
const NO_DEVICE: c_int = -2;

api! {
    ctx unsafe fn cudaMalloc(address: *mut CUdeviceptr, size: usize) |d| {
        if address.is_null() { return Err(Error::INVALID_VALUE) }
        if size == 0 { address.write(ptr::null_mut()); return Ok(()) }
        d.cuMemAlloc_v2(address, size)
    };
    ctx unsafe fn cudaMallocManaged(address: *mut CUdeviceptr, size: usize, flags: c_uint) |d| {
        if address.is_null() { return Err(Error::INVALID_VALUE) }
        if size == 0 { address.write(ptr::null_mut()); return Ok(()) }
        d.cuMemAllocManaged(address, size, flags)
    };
    ctx unsafe fn cudaMallocHost(address: *mut *mut c_void, size: usize) |d| host_alloc(d, address, size, 0);
    ctx unsafe fn cudaHostAlloc(address: *mut *mut c_void, size: usize, flags: c_uint) |d| host_alloc(d, address, size,
        flags);
    ctx unsafe fn cudaMallocPitch(address: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize) |d| {
        if address.is_null() || pitch.is_null() { return Err(Error::INVALID_VALUE) }
        alloc_pitch(d, address, pitch, width, height)
    };
    ctx unsafe fn cudaMalloc3D(out: Out<PitchedPtr>, extent: Extent) |d| {
        out.required()?;
        let rows = extent.height.checked_mul(extent.depth).ok_or(Error::INVALID_VALUE)?;
        let (mut address, mut pitch) = (ptr::null_mut(), 0);
        alloc_pitch(d, &mut address, &mut pitch, extent.width, rows)?;
        out.put(PitchedPtr { ptr: address, pitch, xsize: extent.width, ysize: extent.height })
    };
    ctx cudaFree => cuMemFree_v2(address: CUdeviceptr);
    ctx unsafe fn cudaFreeHost(address: *mut c_void) |d| {
        if address.is_null() { return Ok(()) }
        d.cuMemFreeHost(address)
    };
    ctx cudaHostRegister => cuMemHostRegister_v2(address: *mut c_void, size: usize, flags: c_uint);
    ctx cudaHostUnregister => cuMemHostUnregister(address: *mut c_void);
    ctx cudaHostGetDevicePointer => cuMemHostGetDevicePointer_v2(
        device: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
    ctx cudaHostGetFlags => cuMemHostGetFlags(flags: *mut c_uint, host: *mut c_void);
    ctx cudaMemGetInfo => cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    ctx fn cudaPointerGetAttributes(out: Out<PointerAttributes>, address: *const c_void) |d| {
        out.required()?;
        out.put(pointer_attributes(d, address.cast_mut())?)
    };

    ctx unsafe fn cudaMemset/cudaMemset_ptds(address: CUdeviceptr, value: c_int, count: usize) |d, s| {
        if count == 0 { return Ok(()) }
        d.cuMemsetD8_v2(s, address, byte(value), count)
    };
    ctx unsafe fn cudaMemsetAsync/cudaMemsetAsync_ptsz(address: CUdeviceptr, value: c_int, count: usize,
        stream: CUstream) |d, s| {
        if count == 0 { return Ok(()) }
        d.cuMemsetD8Async(s, address, byte(value), count, stream)
    };
    ctx unsafe fn cudaMemset2D/cudaMemset2D_ptds(address: CUdeviceptr, pitch: usize, value: c_int, width: usize,
        height: usize) |d, s| {
        set_rows(address, pitch, width, height, |row, pitch, width, height| {
            d.cuMemsetD2D8_v2(s, row, pitch, byte(value), width, height)
        })
    };
    ctx unsafe fn cudaMemset2DAsync/cudaMemset2DAsync_ptsz(
        address: CUdeviceptr, pitch: usize, value: c_int, width: usize, height: usize, stream: CUstream) |d, s| {
        set_rows(address, pitch, width, height, |row, pitch, width, height| {
            d.cuMemsetD2D8Async(s, row, pitch, byte(value), width, height, stream)
        })
    };
    ctx unsafe fn cudaMemset3D/cudaMemset3D_ptds(target: PitchedPtr, value: c_int, extent: Extent) |d, s| {
        set_slices(d, s, target, value, extent, None)
    };
    ctx unsafe fn cudaMemset3DAsync/cudaMemset3DAsync_ptsz(target: PitchedPtr, value: c_int, extent: Extent,
        stream: CUstream) |d, s| {
        set_slices(d, s, target, value, extent, Some(stream))
    };
}

/// The byte that a memset writes, converted as C's `memset` does.
fn byte(value: c_int) -> u8 {
    value.to_le_bytes()[0]
}

unsafe fn host_alloc(d: &Driver, address: *mut *mut c_void, size: usize, flags: c_uint) -> Result {
    if address.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: checked for NULL above; the caller of `cudaHostAlloc` makes it writable.
    unsafe {
        if size == 0 {
            address.write(ptr::null_mut());
            return Ok(());
        }
        d.cuMemHostAlloc(address, size, flags)
    }
}

/// Allocates padded rows. The address is NULL if a dimension is zero.
unsafe fn alloc_pitch(
    d: &Driver,
    address: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    rows: usize,
) -> Result {
    // SAFETY: the caller has checked both outputs for NULL.
    unsafe {
        if width == 0 || rows == 0 {
            address.write(ptr::null_mut());
            pitch.write(0);
            return Ok(());
        }
        d.cuMemAllocPitch_v2(address, pitch, width, rows, PITCH_ELEMENT)
    }
}

/// Checks and sets a rectangle. An empty one needs nothing.
fn set_rows(
    address: CUdeviceptr,
    pitch: usize,
    width: usize,
    height: usize,
    set: impl FnOnce(CUdeviceptr, usize, usize, usize) -> Result,
) -> Result {
    if width == 0 || height == 0 {
        return Ok(());
    }
    if pitch < width && height > 1 {
        return Err(Error::INVALID_VALUE);
    }
    set(address, pitch, width, height)
}

/// Sets a box: as one rectangle if its slices are contiguous, else slice by slice.
unsafe fn set_slices(
    d: &Driver,
    s: DefaultStream,
    target: PitchedPtr,
    value: c_int,
    extent: Extent,
    stream: Option<CUstream>,
) -> Result {
    let set = |row: CUdeviceptr, height: usize| {
        set_rows(row, target.pitch, extent.width, height, |row, pitch, width, height| {
            // SAFETY: the caller upholds the requirements of `cudaMemset3D`.
            unsafe {
                match stream {
                    Some(stream) => d.cuMemsetD2D8Async(s, row, pitch, byte(value), width, height, stream),
                    None => d.cuMemsetD2D8_v2(s, row, pitch, byte(value), width, height),
                }
            }
        })
    };
    if extent.depth <= 1 {
        return if extent.depth == 0 { Ok(()) } else { set(target.ptr, extent.height) };
    }
    if target.ysize == extent.height {
        return set(target.ptr, extent.height.checked_mul(extent.depth).ok_or(Error::INVALID_VALUE)?);
    }
    let slice = target.pitch.checked_mul(target.ysize).ok_or(Error::INVALID_VALUE)?;
    (0..extent.depth).try_for_each(|z| set(target.ptr.wrapping_byte_add(z * slice), extent.height))
}

/// What the driver knows of an address, in the runtime's terms.
fn pointer_attributes(d: &Driver, address: *mut c_void) -> Result<PointerAttributes> {
    const MEMORY_TYPE: c_uint = 2;
    const DEVICE_POINTER: c_uint = 3;
    const HOST_POINTER: c_uint = 4;
    const IS_MANAGED: c_uint = 8;
    const DEVICE_ORDINAL: c_uint = 9;
    let (mut kind, mut device, mut managed): (c_uint, c_int, c_uint) = (0, NO_DEVICE, 0);
    let (mut on_device, mut on_host): (*mut c_void, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
    let mut attributes = [MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, IS_MANAGED, DEVICE_ORDINAL];
    let mut data = [
        ptr::from_mut(&mut kind).cast(),
        ptr::from_mut(&mut on_device).cast(),
        ptr::from_mut(&mut on_host).cast(),
        ptr::from_mut(&mut managed).cast(),
        ptr::from_mut(&mut device).cast(),
    ];
    // SAFETY: each attribute goes to a live local variable of the type that cuda.h gives for it. The driver
    // looks the address up and does not follow it.
    unsafe { d.cuPointerGetAttributes(5, attributes.as_mut_ptr(), data.as_mut_ptr(), address)? };
    // `cudaMemoryType` has the driver's numbers for host and device memory, and one of its own for managed
    // memory.
    let mut out = PointerAttributes {
        kind: if managed & 0xff != 0 { 3 } else { kind },
        device,
        device_pointer: on_device,
        host_pointer: on_host,
        #[cfg(not(feature = "v12"))]
        reserved: [0; 8],
    };
    if out.kind == 0 {
        (out.device, out.device_pointer, out.host_pointer) = (NO_DEVICE, ptr::null_mut(), address);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_driver::{Fake, MEMORY};
    use crate::last_error::{cudaGetLastError, cudaPeekAtLastError};
    use crate::stream::{cudaStreamQuery, cudaStreamQuery_ptsz};

    fn malloc(size: usize) -> (c_int, usize) {
        let mut address = ptr::without_provenance_mut(1);
        // SAFETY: the output is a live local variable.
        let answer = unsafe { cudaMalloc(&mut address, size) };
        (answer, address.addr())
    }

    #[test]
    fn running_out_of_memory_does_not_stick() {
        let _fake = Fake::new();
        assert_eq!(malloc(1 << 41).0, 2);
        assert_eq!(malloc(16), (0, MEMORY));
        assert_eq!((cudaGetLastError(), cudaPeekAtLastError()), (2, 0));
    }

    #[test]
    fn nothing_is_allocated_as_null() {
        let fake = Fake::new();
        assert_eq!(malloc(0), (0, 0));
        assert_eq!(fake.count("cuMemAlloc_v2"), 0);
    }

    #[test]
    fn an_address_unknown_to_the_driver_is_unregistered_host_memory() {
        let _fake = Fake::new();
        let attributes = |address: usize| {
            // SAFETY: the structure consists of integers and pointers, for which zero is a value.
            let mut out: PointerAttributes = unsafe { std::mem::zeroed() };
            let address = ptr::without_provenance(address);
            // SAFETY: the output is a live local variable.
            let status = unsafe { cudaPointerGetAttributes((&mut out).into(), address) };
            assert_eq!(status, 0);
            (out.kind, out.device, out.device_pointer.addr(), out.host_pointer.addr())
        };
        assert_eq!(attributes(64), (0, NO_DEVICE, 0, 64));
        assert_eq!(attributes(MEMORY), (2, 1, MEMORY, 0));
    }

    #[test]
    fn a_per_thread_name_calls_the_drivers_per_thread_form() {
        let fake = Fake::new();
        // SAFETY: NULL is a stream.
        unsafe {
            assert_eq!(cudaStreamQuery(ptr::null_mut()), 600);
            assert_eq!(cudaStreamQuery_ptsz(ptr::null_mut()), 0);
        }
        assert_eq!((fake.count("cuStreamQuery"), fake.count("cuStreamQuery_ptsz")), (1, 1));
    }

    #[test]
    fn a_function_missing_from_the_driver_is_not_supported() {
        let _fake = Fake::new();
        // SAFETY: NULL and any integers are arguments.
        assert_eq!(unsafe { cudaHostRegister(ptr::null_mut(), 0, 0) }, 801);
    }
}
