//! Libraries and kernels.

use std::ffi::{c_char, c_void};

use crate::abi::arguments::{Out, OutArray, Text};
use crate::abi::result::Result;
use crate::api::functions::{put_name, put_param};
use crate::api::modules::put_variable;
use crate::code::function::func;
use crate::code::image::{self, read_file};
use crate::code::jit_options::Jit;
use crate::code::library::{self, LIBRARIES};
use crate::process::context;
use crate::process::driver::driver;
use client::Status;

/// `CU_LIBRARY_BINARY_IS_PRESERVED`: "code can be accessed at any point until cuLibraryUnload()"
/// (`CUlibraryOption`). The other option, the universal function table, belongs to nvcc and has no meaning
/// for a remote device.
const BINARY_IS_PRESERVED: u32 = 1;

/// Whether a program promises that a library's image stays as long as the library.
///
/// # Safety
/// Both arrays have `count` entries.
unsafe fn is_preserved(options: *const u32, values: *const *mut c_void, count: u32) -> bool {
    if options.is_null() || values.is_null() {
        return false;
    }
    // SAFETY: guaranteed by the caller. An option's value is in the entry itself.
    (0..count as usize)
        .any(|i| unsafe { *options.add(i) == BINARY_IS_PRESERVED && !(*values.add(i)).is_null() })
}

api! {
    unsafe fn cuLibraryLoadData(
        to: Out<usize>, code: *const c_void, options: *const u32, values: *const *mut c_void, count: u32,
        library_options: *const u32, library_values: *const *mut c_void, library_count: u32
    ) {
        to.required()?;
        driver()?.check()?;
        // SAFETY: the program passes `count` options, by CUDA's manual.
        let jit = unsafe { Jit::parse(count, options, values) }?;
        // SAFETY: the program passes `library_count` options, by CUDA's manual.
        let stays = unsafe { is_preserved(library_options, library_values, library_count) };
        // SAFETY: the program passes a complete image. It is used after this call only if it stays until the
        // library is unloaded, and `Library::unload` waits for whoever reads it then.
        let image = unsafe { image::bytes(code) }?;
        to.put(library::new_library(if stays { image } else { image.into_owned().into() }, jit)?)
    }

    unsafe fn cuLibraryLoadFromFile(
        to: Out<usize>, name: Text, options: *const u32, values: *const *mut c_void, count: u32,
        library_options: *const u32, library_values: *const *mut c_void, library_count: u32
    ) {
        // The image is read from the file here and now.
        let _ = (library_options, library_values, library_count);
        to.required()?;
        name.required()?;
        driver()?.check()?;
        // SAFETY: the program passes `count` options, by CUDA's manual.
        let jit = unsafe { Jit::parse(count, options, values) }?;
        let bytes = read_file(name.get()?)?;
        // SAFETY: a whole file, with a NUL after it in case it is text.
        let image = unsafe { image::bytes(bytes.as_ptr().cast()) }?.into_owned();
        to.put(library::new_library(image.into(), jit)?)
    }

    fn cuLibraryUnload(handle: usize) {
        driver()?;
        LIBRARIES.remove(handle).ok_or(Status::INVALID_HANDLE)?.unload()
    }

    fn cuLibraryGetKernel(to: Out<usize>, handle: usize, name: Text) {
        to.required()?;
        name.required()?;
        let (driver, library) = library::library(handle)?;
        let name = name.get()?;
        if library.anywhere(driver)?.function(name).is_none() {
            return Err(Status::NOT_FOUND);
        }
        to.put(library.kernel(name)?.handle)
    }

    fn cuLibraryGetKernelCount(count: Out<u32>, handle: usize) {
        let (driver, library) = library::library(handle)?;
        count.put(library.anywhere(driver)?.functions.len() as u32)
    }

    unsafe fn cuLibraryEnumerateKernels(kernels: OutArray<usize>, count: u32, handle: usize) {
        kernels.required()?;
        let (driver, library) = library::library(handle)?;
        let module = library.anywhere(driver)?;
        let named = module.functions.iter().take(count as usize);
        let handles = named.map(|function| Ok(library.kernel(&function.name)?.handle)).collect::<Result<Vec<_>>>()?;
        // SAFETY: there is room for as many as requested, by CUDA's manual, and there are no more.
        unsafe { kernels.put(handles) }
    }

    fn cuLibraryGetModule(to: Out<usize>, handle: usize) {
        to.required()?;
        let (_, library) = library::library(handle)?;
        to.put(library.in_context(context::current()?)?.handle()?)
    }

    fn cuLibraryGetGlobal(address: Out<u64>, size: Out<usize>, handle: usize, name: Text) {
        name.required()?;
        put_variable(library::variable(handle, name.get()?)?, address, size)
    }

    fn cuKernelGetFunction(to: Out<usize>, handle: usize) {
        to.required()?;
        to.put(library::function_of(handle)?)
    }

    fn cuKernelGetLibrary(to: Out<usize>, handle: usize) {
        let (_, kernel) = library::kernel(handle)?;
        to.put(kernel.library.upgrade().ok_or(Status::INVALID_HANDLE)?.handle)
    }

    fn cuKernelGetName(name: Out<*const c_char>, handle: usize) {
        put_name(&library::kernel(handle)?.1.name, name)
    }

    fn cuKernelGetAttribute(value: Out<i32>, number: u32, handle: usize, dev: i32) {
        value.required()?;
        let (_, kernel) = library::kernel(handle)?;
        value.put(kernel.get(dev, number)?)
    }

    fn cuKernelSetAttribute(number: u32, value: i32, handle: usize, dev: i32) {
        let (_, kernel) = library::kernel(handle)?;
        kernel.set(dev, number, value)
    }

    fn cuKernelSetCacheConfig(handle: usize, config: u32, dev: i32) {
        let (_, kernel) = library::kernel(handle)?;
        if config > 3 {
            return Err(Status::INVALID_VALUE);
        }
        kernel.set(dev, func::CACHE_CONFIG, config as i32)
    }

    fn cuKernelGetParamInfo(handle: usize, index: usize, offset: Out<usize>, size: Out<usize>) {
        let (driver, kernel) = library::kernel(handle)?;
        let library = kernel.library.upgrade().ok_or(Status::INVALID_HANDLE)?;
        let module = library.anywhere(driver)?;
        let function = module.function(&kernel.name).ok_or(Status::NOT_FOUND)?;
        put_param(function.param(index)?, offset, size)
    }
}
