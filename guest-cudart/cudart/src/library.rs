//! Libraries of device code that the program loads itself.

use std::ffi::{c_char, c_uint, c_void};

use crate::registry;
use crate::types::{CUdeviceptr, CUkernel, CUlibrary};

api! {
    ctx cudaLibraryLoadData => cuLibraryLoadData(library: *mut CUlibrary, code: *const c_void,
        jit_options: *mut c_uint,
        jit_values: *mut *mut c_void, jit_count: c_uint, options: *mut c_uint, values: *mut *mut c_void,
            count: c_uint);
    ctx cudaLibraryLoadFromFile => cuLibraryLoadFromFile(library: *mut CUlibrary, path: *const c_char,
        jit_options: *mut c_uint,
        jit_values: *mut *mut c_void, jit_count: c_uint, options: *mut c_uint, values: *mut *mut c_void,
            count: c_uint);
    ctx cudaLibraryUnload => cuLibraryUnload(library: CUlibrary);
    ctx unsafe fn cudaLibraryGetKernel(kernel: *mut CUkernel, library: CUlibrary, name: *const c_char) |d| {
        d.cuLibraryGetKernel(kernel, library, name)?;
        registry::adopt(kernel.read());
        Ok(())
    };
    ctx cudaLibraryGetGlobal => cuLibraryGetGlobal(address: *mut CUdeviceptr, size: *mut usize, library: CUlibrary,
        name: *const c_char);
    ctx cudaLibraryGetManaged => cuLibraryGetManaged(address: *mut CUdeviceptr, size: *mut usize, library: CUlibrary,
        name: *const c_char);
    ctx cudaLibraryGetUnifiedFunction => cuLibraryGetUnifiedFunction(function: *mut *mut c_void, library: CUlibrary,
        name: *const c_char);
    ctx cudaLibraryGetKernelCount => cuLibraryGetKernelCount(count: *mut c_uint, library: CUlibrary);
    ctx unsafe fn cudaLibraryEnumerateKernels(kernels: *mut CUkernel, count: c_uint, library: CUlibrary) |d| {
        if !kernels.is_null() {
            // The driver fills in only as many kernels as there are; clear the rest so that nothing there is
            // taken for a handle.
            std::slice::from_raw_parts_mut(kernels, count as usize).fill(std::ptr::null_mut());
        }
        d.cuLibraryEnumerateKernels(kernels, count, library)?;
        if !kernels.is_null() {
            std::slice::from_raw_parts(kernels, count as usize).iter().for_each(|&kernel| registry::adopt(kernel));
        }
        Ok(())
    };
}
