//! Functions.

use std::ffi::c_char;
use std::sync::Weak;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::code::library;
use client::Status;
use client::ops::module::Param;

pub(crate) unsafe fn put_param(param: &Param, offset: *mut usize, size: *mut usize) -> Result {
    non_null(offset)?;
    // SAFETY: checked not to be NULL; the program says that they may be written.
    unsafe {
        put(offset, param.offset as usize)?;
        if !size.is_null() {
            put(size, param.size as usize)?;
        }
    }
    Ok(())
}

api! {
    fn cuFuncGetAttribute(value: *mut i32, number: u32, function: usize) {
        non_null(value)?;
        put(value, library::of(function)?.get(number)?)
    }

    fn cuFuncSetAttribute(function: usize, number: u32, value: i32) {
        library::of(function)?.set(number, value, false)
    }

    fn cuFuncSetCacheConfig(function: usize, config: u32) {
        library::of(function)?.set_cache_config(config)
    }

    fn cuFuncSetSharedMemConfig(function: usize, config: u32) {
        // As with cuCtxSetSharedMemConfig: banks have one width.
        library::of(function)?;
        if config > 2 { Err(Status::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncGetModule(module: *mut usize, function: usize) {
        non_null(module)?;
        let function = library::of(function)?;
        let found = function.module.get().and_then(Weak::upgrade).or_else(|| library::module_of(&function));
        put(module, found.ok_or(Status::INVALID_HANDLE)?.handle()?)
    }

    fn cuFuncGetName(name: *mut *const c_char, function: usize) {
        // The text lives as long as the module is loaded, as CUDA says.
        put(name, library::of(function)?.name.as_ptr())
    }

    fn cuFuncGetParamInfo(function: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let function = library::of(function)?;
        put_param(function.param(index)?, offset, size)
    }

    fn cuFuncIsLoaded(loaded: *mut u32, function: usize) {
        non_null(loaded)?;
        library::of(function)?;
        put(loaded, 1)
    }

    fn cuFuncLoad(function: usize) {
        library::of(function).map(|_| ())
    }
}
