//! Attributes and settings of kernels, and occupancy.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::arguments::{In, Out};
use crate::context;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::launch::driver_config;
use crate::registry::{kernel, registered};
use crate::types::{CUdevice, CUfunction, CUkernel, FuncAttributes, LaunchConfig};

/// The first function attribute that a program can set (`cudaFuncAttributeMaxDynamicSharedMemorySize`).
const FIRST_SETTABLE: c_uint = 8;
/// `cudaFuncAttributeMax`: the number of attributes.
const ATTRIBUTES: c_uint = 16;

fn current_device(d: &Driver) -> Result<CUdevice> {
    context::handle(d, context::device(d)?)
}

/// Every attribute of a kernel on the current device.
fn attributes(d: &Driver, kernel: CUkernel) -> Result<FuncAttributes> {
    let device = current_device(d)?;
    let get = |attribute: c_uint| {
        let mut value: c_int = 0;
        // SAFETY: the output is a live local variable; the kernel is one that the driver gave.
        unsafe { d.cuKernelGetAttribute(&mut value, attribute, kernel, device)? };
        Ok(value)
    };
    let size = |attribute| get(attribute).map(|value| usize::try_from(value).unwrap_or(0));
    Ok(FuncAttributes {
        max_threads_per_block: get(0)?,
        shared_size_bytes: size(1)?,
        const_size_bytes: size(2)?,
        local_size_bytes: size(3)?,
        num_regs: get(4)?,
        ptx_version: get(5)?,
        binary_version: get(6)?,
        cache_mode_ca: get(7)?,
        max_dynamic_shared_size_bytes: get(8)?,
        preferred_shmem_carveout: get(9)?,
        cluster_dim_must_be_set: get(10)?,
        required_cluster_width: get(11)?,
        required_cluster_height: get(12)?,
        required_cluster_depth: get(13)?,
        non_portable_cluster_size_allowed: get(14)?,
        cluster_scheduling_policy_preference: get(15)?,
        reserved: [0; 16],
    })
}

api! {
    ctx unsafe fn cudaFuncGetAttributes(out: *mut FuncAttributes, function: *const c_void) |d| {
        if out.is_null() { return Err(Error::INVALID_VALUE) }
        let found = attributes(d, kernel(function)?)?;
        // The reserved words at the end stay as the program left them, as with NVIDIA's library.
        let known = core::mem::offset_of!(FuncAttributes, reserved);
        core::ptr::copy_nonoverlapping((&raw const found).cast::<u8>(), out.cast::<u8>(), known);
        Ok(())
    };
    ctx unsafe fn cudaFuncSetAttribute(function: *const c_void, attribute: c_uint, value: c_int) |d| {
        if !(FIRST_SETTABLE..ATTRIBUTES).contains(&attribute) { return Err(Error::INVALID_VALUE) }
        d.cuKernelSetAttribute(attribute, value, kernel(function)?, current_device(d)?)
    };
    ctx unsafe fn cudaKernelSetAttributeForDevice(kernel: CUkernel, attribute: c_uint, value: c_int, device: c_int) |d| {
        if !(FIRST_SETTABLE..ATTRIBUTES).contains(&attribute) { return Err(Error::INVALID_VALUE) }
        d.cuKernelSetAttribute(attribute, value, kernel, context::handle(d, device)?)
    };
    ctx unsafe fn cudaFuncSetCacheConfig(function: *const c_void, config: c_uint) |d| {
        // CUDA 12's runtime accepts no kernel handles here.
        let kernel = if cfg!(feature = "v12") { registered(function)? } else { kernel(function)? };
        d.cuKernelSetCacheConfig(kernel, config, current_device(d)?)
    };
    ctx unsafe fn cudaFuncSetSharedMemConfig(function: *const c_void, config: c_uint) |d| {
        d.cuFuncSetSharedMemConfig(driver_function(d, function)?, config)
    };
    ctx unsafe fn cudaFuncGetName(name: *mut *const c_char, function: *const c_void) |d| {
        d.cuKernelGetName(name, kernel(function)?)
    };
    ctx unsafe fn cudaFuncGetParamInfo(function: *const c_void, index: usize, offset: *mut usize, size: *mut usize) |d| {
        d.cuKernelGetParamInfo(kernel(function)?, index, offset, size)
    };
    ctx fn cudaGetFuncBySymbol(out: Out<CUfunction>, symbol: *const c_void) |d| {
        out.required()?;
        out.put(driver_function(d, symbol)?)
    };
    ctx fn cudaGetKernel(out: Out<CUkernel>, function: *const c_void) |_d| {
        out.required()?;
        out.put(registered(function)?)
    };

    ctx unsafe fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: *const c_void,
        block_size: c_int, shared: usize) |d| {
        d.cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel(function)?, block_size, shared)
    };
    ctx unsafe fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int, function: *const c_void, block_size: c_int, shared: usize, flags: c_uint) |d| {
        d.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel(function)?, block_size, shared, flags)
    };
    ctx unsafe fn cudaOccupancyAvailableDynamicSMemPerBlock(size: *mut usize, function: *const c_void, blocks: c_int,
        block_size: c_int) |d| {
        d.cuOccupancyAvailableDynamicSMemPerBlock(size, kernel(function)?, blocks, block_size)
    };
    ctx unsafe fn cudaOccupancyMaxPotentialClusterSize(size: *mut c_int, function: *const c_void,
        config: In<LaunchConfig>) |d| {
        let config = driver_config(&config.get()?)?;
        d.cuOccupancyMaxPotentialClusterSize(size, kernel(function)?, &config)
    };
    ctx unsafe fn cudaOccupancyMaxActiveClusters(clusters: *mut c_int, function: *const c_void,
        config: In<LaunchConfig>) |d| {
        let config = driver_config(&config.get()?)?;
        d.cuOccupancyMaxActiveClusters(clusters, kernel(function)?, &config)
    };
}

/// The driver's function for a kernel in the current context.
fn driver_function(d: &Driver, symbol: *const c_void) -> Result<CUfunction> {
    let mut function = std::ptr::null_mut();
    // SAFETY: the output is a live local variable; the kernel is one that the driver gave.
    unsafe { d.cuKernelGetFunction(&mut function, registered(symbol)?)? };
    Ok(function)
}
