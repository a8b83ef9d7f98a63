//! Modules.

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::arguments::{Out, OutArray, Text};
use crate::abi::result::Result;
use crate::code::jit_options::Jit;
use crate::code::module::{self, MODULES, Module, Variable};
use crate::code::{image, library};
use crate::process::driver::{Driver, driver};
use crate::process::{capture, context};
use client::Status;

pub(crate) fn of(handle: usize) -> Result<(&'static Driver, Arc<Module>)> {
    let driver = driver()?;
    Ok((driver, MODULES.get(handle).ok_or(Status::INVALID_HANDLE)?))
}

unsafe fn load_data(module: Out<usize>, image: *const c_void, jit: &Jit) -> Result {
    module.required()?;
    let (_, context) = context::ready()?;
    // SAFETY: the program passes a complete image.
    let loaded = module::load(context, &unsafe { image::bytes(image)? }, jit)?;
    module.put(loaded.handle()?)
}

/// Returns a variable's address and size, as far as requested.
pub(crate) fn put_variable(variable: Variable, address: Out<u64>, size: Out<usize>) -> Result {
    address.put_if_wanted(variable.address);
    size.put_if_wanted(variable.size as usize);
    Ok(())
}

api! {
    fn cuModuleLoad(module: Out<usize>, name: Text) {
        module.required()?;
        name.required()?;
        context::ready()?;
        let bytes = image::read_file(name.get()?)?;
        // SAFETY: a whole file, with a NUL after it in case it is text.
        unsafe { load_data(module, bytes.as_ptr().cast(), &Jit::default()) }
    }

    unsafe fn cuModuleLoadData(module: Out<usize>, image: *const c_void) {
        // SAFETY: the program passes a complete image.
        unsafe { load_data(module, image, &Jit::default()) }
    }

    unsafe fn cuModuleLoadDataEx(module: Out<usize>, image: *const c_void, count: u32, options: *const u32, values: *const *mut c_void) {
        // SAFETY: the program passes `count` options, by CUDA's manual, and a complete image.
        unsafe { load_data(module, image, &Jit::parse(count, options, values)?) }
    }

    unsafe fn cuModuleLoadFatBinary(module: Out<usize>, image: *const c_void) {
        // SAFETY: the program passes a complete image.
        unsafe { load_data(module, image, &Jit::default()) }
    }

    fn cuModuleUnload(module: usize) {
        let (_, module) = of(module)?;
        module.context.session().check()?;
        capture::unsafe_call()?;
        // One of its kernels may be running.
        module.context.quiesce();
        if library::owns(&module) {
            return Err(Status::NOT_PERMITTED);
        }
        module.unload()
    }

    fn cuModuleGetLoadingMode(mode: Out<u32>) {
        driver()?;
        // CU_MODULE_LAZY_LOADING, NVIDIA's default: a runtime inside the program then loads a module when one
        // of its kernels is first used. If the server's driver is NVIDIA's, it also loads each function
        // lazily.
        let is_eager = std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|mode| mode == "EAGER");
        mode.put(if is_eager { 1 } else { 2 })
    }

    fn cuModuleGetFunction(function: Out<usize>, module: usize, name: Text) {
        function.required()?;
        name.required()?;
        let (_, module) = of(module)?;
        let found = module.function(name.get()?).ok_or(Status::NOT_FOUND)?;
        function.put(found.handle(&module)?)
    }

    fn cuModuleGetFunctionCount(count: Out<u32>, module: usize) {
        let (_, module) = of(module)?;
        count.put(module.functions.len() as u32)
    }

    unsafe fn cuModuleEnumerateFunctions(functions: OutArray<usize>, count: u32, module: usize) {
        let (_, module) = of(module)?;
        functions.required()?;
        let known = module.functions.iter().take(count as usize);
        let handles = known.map(|function| function.handle(&module)).collect::<Result<Vec<_>>>()?;
        // SAFETY: there is room for as many as requested, by CUDA's manual, and there are no more.
        unsafe { functions.put(handles) }
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, size: Out<usize>, module: usize, name: Text) {
        name.required()?;
        let (driver, module) = of(module)?;
        module.context.session().check()?;
        put_variable(module.global(driver, name.get()?)?, address, size)
    }
}
