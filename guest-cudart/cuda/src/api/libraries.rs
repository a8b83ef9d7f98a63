//! Libraries and kernels.

use std::ffi::{CStr, c_char, c_void};

use crate::abi::arguments::{non_null, put};
use crate::api::functions::put_param;
use crate::code::function::func;
use crate::code::image::read_file;
use crate::code::jit_options::Jit;
use crate::code::library::{KERNELS, LIBRARIES};
use crate::code::{image, library};
use crate::process::context;
use crate::process::driver::driver;
use client::{Status, lock};

api! {
    fn cuLibraryLoadData(
        to: *mut usize, code: *const c_void, options: *const u32, values: *const *mut c_void, count: u32,
        library_options: *const u32, library_values: *const *mut c_void, library_count: u32
    ) {
        // Both library options are promises of the program's about its image, which is copied here; the universal function table is
        // nvcc's own and has no meaning for a remote device.
        let _ = (library_options, library_values, library_count);
        non_null(to)?;
        driver()?.session.check()?;
        let jit = Jit::parse(count, options, values)?;
        library::new_library(to, &image::bytes(code)?, jit)
    }

    fn cuLibraryLoadFromFile(
        to: *mut usize, name: *const c_char, options: *const u32, values: *const *mut c_void, count: u32,
        library_options: *const u32, library_values: *const *mut c_void, library_count: u32
    ) {
        let _ = (library_options, library_values, library_count);
        non_null(to)?;
        non_null(name)?;
        driver()?.session.check()?;
        let jit = Jit::parse(count, options, values)?;
        let bytes = read_file(CStr::from_ptr(name))?;
        library::new_library(to, &image::bytes(bytes.as_ptr().cast())?, jit)
    }

    fn cuLibraryUnload(handle: usize) {
        let driver = driver()?;
        let library = LIBRARIES.remove(handle).ok_or(Status::INVALID_HANDLE)?;
        for kernel in lock(&library.kernels).drain().map(|(_, kernel)| kernel) {
            KERNELS.remove(kernel.handle);
        }
        for (context, module) in lock(&library.instances).drain(..) {
            // A kernel of it may be running.
            context.quiesce(driver);
            module.unload(driver)?;
        }
        Ok(())
    }

    fn cuLibraryGetKernel(to: *mut usize, handle: usize, name: *const c_char) {
        non_null(to)?;
        non_null(name)?;
        let (driver, library) = library::library(handle)?;
        let name = CStr::from_ptr(name);
        if library.anywhere(driver)?.function(name).is_none() {
            return Err(Status::NOT_FOUND);
        }
        put(to, library.kernel(name)?.handle)
    }

    fn cuLibraryGetKernelCount(count: *mut u32, handle: usize) {
        let (driver, library) = library::library(handle)?;
        put(count, library.anywhere(driver)?.functions.len() as u32)
    }

    fn cuLibraryEnumerateKernels(kernels: *mut usize, count: u32, handle: usize) {
        non_null(kernels)?;
        let (driver, library) = library::library(handle)?;
        let module = library.anywhere(driver)?;
        for (i, function) in module.functions.iter().take(count as usize).enumerate() {
            put(kernels.add(i), library.kernel(&function.name)?.handle)?;
        }
        Ok(())
    }

    fn cuLibraryGetModule(to: *mut usize, handle: usize) {
        non_null(to)?;
        let (driver, library) = library::library(handle)?;
        put(to, library.in_context(driver, context::current()?)?.handle()?)
    }

    fn cuLibraryGetGlobal(address: *mut u64, size: *mut usize, handle: usize, name: *const c_char) {
        non_null(name)?;
        library::variable(handle, CStr::from_ptr(name))?.put(address, size)
    }

    fn cuKernelGetFunction(to: *mut usize, handle: usize) {
        non_null(to)?;
        put(to, library::function_of(handle)?)
    }

    fn cuKernelGetLibrary(to: *mut usize, handle: usize) {
        let (_, kernel) = library::kernel(handle)?;
        put(to, kernel.library.upgrade().ok_or(Status::INVALID_HANDLE)?.handle)
    }

    fn cuKernelGetName(name: *mut *const c_char, handle: usize) {
        // The text lives as long as the library is loaded, as CUDA says.
        put(name, library::kernel(handle)?.1.name.as_ptr())
    }

    fn cuKernelGetAttribute(value: *mut i32, number: u32, handle: usize, dev: i32) {
        non_null(value)?;
        let (driver, kernel) = library::kernel(handle)?;
        put(value, kernel.get(driver, dev, number)?)
    }

    fn cuKernelSetAttribute(number: u32, value: i32, handle: usize, dev: i32) {
        let (driver, kernel) = library::kernel(handle)?;
        kernel.set(driver, dev, number, value)
    }

    fn cuKernelSetCacheConfig(handle: usize, config: u32, dev: i32) {
        let (driver, kernel) = library::kernel(handle)?;
        if config > 3 {
            return Err(Status::INVALID_VALUE);
        }
        kernel.set(driver, dev, func::CACHE_CONFIG, config as i32)
    }

    fn cuKernelGetParamInfo(handle: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let (driver, kernel) = library::kernel(handle)?;
        let library = kernel.library.upgrade().ok_or(Status::INVALID_HANDLE)?;
        let module = library.anywhere(driver)?;
        let function = module.function(&kernel.name).ok_or(Status::NOT_FOUND)?;
        put_param(function.param(index)?, offset, size)
    }
}
