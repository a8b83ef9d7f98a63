//! Modules.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::code::jit_options::Jit;
use crate::code::module::{MODULES, Module};
use crate::code::{image, library, module};
use crate::process::context;
use crate::process::driver::{Driver, driver};
use client::Status;

pub(crate) fn of(handle: usize) -> Result<(&'static Driver, Arc<Module>)> {
    let driver = driver()?;
    Ok((driver, MODULES.get(handle).ok_or(Status::INVALID_HANDLE)?))
}

pub(crate) unsafe fn load_data(module: *mut usize, image: *const c_void, jit: &Jit) -> Result {
    non_null(module)?;
    let (driver, context) = context::ready()?;
    // SAFETY: the program gives a whole image.
    let loaded = module::load(driver, context, &unsafe { image::bytes(image)? }, jit)?;
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(module, loaded.handle()?) }
}

api! {
    fn cuModuleLoad(module: *mut usize, name: *const c_char) {
        non_null(module)?;
        non_null(name)?;
        context::ready()?;
        let bytes = image::read_file(CStr::from_ptr(name))?;
        load_data(module, bytes.as_ptr().cast(), &Jit::default())
    }

    fn cuModuleLoadData(module: *mut usize, image: *const c_void) {
        load_data(module, image, &Jit::default())
    }

    fn cuModuleLoadDataEx(module: *mut usize, image: *const c_void, count: u32, options: *const u32, values: *const *mut c_void) {
        load_data(module, image, &Jit::parse(count, options, values)?)
    }

    fn cuModuleLoadFatBinary(module: *mut usize, image: *const c_void) {
        load_data(module, image, &Jit::default())
    }

    fn cuModuleUnload(module: usize) {
        let (driver, module) = of(module)?;
        driver.session.check()?;
        // A kernel of it may be running.
        module.context.quiesce(driver);
        if library::owns(&module) {
            return Err(Status::NOT_PERMITTED);
        }
        module.unload(driver)
    }

    fn cuModuleGetLoadingMode(mode: *mut u32) {
        driver()?;
        // CU_MODULE_LAZY_LOADING: a runtime inside the program then loads a module when a kernel of it is first used, as NVIDIA's driver
        // has it do by default; and where the server's driver is NVIDIA's, it loads each function so.
        put(mode, 2)
    }

    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        non_null(function)?;
        non_null(name)?;
        let (_, module) = of(module)?;
        let found = module.function(CStr::from_ptr(name)).ok_or(Status::NOT_FOUND)?;
        put(function, found.handle(&module)?)
    }

    fn cuModuleGetFunctionCount(count: *mut u32, module: usize) {
        let (_, module) = of(module)?;
        put(count, module.functions.len() as u32)
    }

    fn cuModuleEnumerateFunctions(functions: *mut usize, count: u32, module: usize) {
        let (_, module) = of(module)?;
        non_null(functions)?;
        for (i, function) in module.functions.iter().take(count as usize).enumerate() {
            put(functions.add(i), function.handle(&module)?)?;
        }
        Ok(())
    }

    fn cuModuleGetGlobal_v2(address: *mut u64, size: *mut usize, module: usize, name: *const c_char) {
        non_null(name)?;
        let (driver, module) = of(module)?;
        driver.session.check()?;
        module.global(driver, CStr::from_ptr(name))?.put(address, size)
    }
}
