//! Functions.

use std::ffi::{CStr, c_char};
use std::sync::Weak;

use crate::abi::arguments::Out;
use crate::abi::result::Result;
use crate::code::{library, names};
use client::Status;
use client::ops::module::Param;

/// Returns a parameter's offset, and its size if requested.
pub(crate) fn put_param(param: &Param, offset: Out<usize>, size: Out<usize>) -> Result {
    offset.put(param.offset as usize)?;
    size.put_if_wanted(param.size as usize);
    Ok(())
}

/// Returns a function's or a kernel's name. CUDA says that the text lives as long as the module or library.
pub(crate) fn put_name(known: &CStr, name: Out<*const c_char>) -> Result {
    name.put(names::kept(known.to_bytes()).unwrap_or(known).as_ptr())
}

api! {
    fn cuFuncGetAttribute(value: Out<i32>, number: u32, function: usize) {
        value.required()?;
        value.put(library::of(function)?.get(number)?)
    }

    fn cuFuncSetAttribute(function: usize, number: u32, value: i32) {
        library::of(function)?.set(number, value, false)
    }

    fn cuFuncSetCacheConfig(function: usize, config: u32) {
        library::of(function)?.set_cache_config(config)
    }

    fn cuFuncSetSharedMemConfig(function: usize, config: u32) {
        // As with cuCtxSetSharedMemConfig: banks have only one width.
        library::of(function)?;
        if config > 2 { Err(Status::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncGetModule(module: Out<usize>, function: usize) {
        module.required()?;
        let function = library::of(function)?;
        let found = function.module.get().and_then(Weak::upgrade).or_else(|| library::module_of(&function));
        module.put(found.ok_or(Status::INVALID_HANDLE)?.handle()?)
    }

    fn cuFuncGetName(name: Out<*const c_char>, function: usize) {
        put_name(&library::of(function)?.name, name)
    }

    fn cuFuncGetParamInfo(function: usize, index: usize, offset: Out<usize>, size: Out<usize>) {
        let function = library::of(function)?;
        put_param(function.param(index)?, offset, size)
    }

    fn cuFuncIsLoaded(loaded: Out<u32>, function: usize) {
        loaded.required()?;
        loaded.put(library::of(function)?.is_loaded().into())
    }

    fn cuFuncLoad(function: usize) {
        library::of(function)?.load()
    }
}
