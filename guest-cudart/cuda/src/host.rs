//! Pinned host memory.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::context::{self, Context};
use crate::state::{driver, unique_id};
use crate::{Result, code, non_null, put};
use client::regions::{Regions, RegisterError};
use client::{Status, log};

/// What is known of a piece of pinned memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostTag {
    pub context: &'static Context,
    pub flags: u32,
    pub buffer: u64,
}

/// The process's pinned memory.
pub(crate) static REGIONS: Regions<HostTag> = Regions::new();

/// Frees and registrations wait for all work that may use the memory, whichever device does it.
fn settle_all() -> Result {
    let driver = driver()?;
    for device in &driver.devices {
        if device.primary.is_alive() && device.primary.is_busy() {
            device.primary.synchronize()?;
        }
    }
    let context = context::current()?;
    if context.is_busy() { context.synchronize() } else { Ok(()) }
}

fn alloc(pp: *mut *mut c_void, size: usize, flags: u32) -> Result {
    non_null(pp)?;
    let (driver, context) = context::ready()?;
    // PORTABLE, DEVICEMAP, WRITECOMBINED.
    if size == 0 || flags & !7 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let tag = HostTag { context, flags, buffer: unique_id() };
    let address = REGIONS.alloc(driver.session.port(), size, tag).map_err(|error| {
        log::warn(format_args!("{size} bytes of pinned memory: {}", error.line()));
        Status::OUT_OF_MEMORY
    })?;
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(pp, address as *mut c_void) }
}

api! {
    fn cuMemAllocHost_v2(pp: *mut *mut c_void, size: usize) {
        alloc(pp, size, 0)
    }

    fn cuMemHostAlloc(pp: *mut *mut c_void, size: usize, flags: u32) {
        alloc(pp, size, flags)
    }

    fn cuMemFreeHost(p: *mut c_void) {
        let (driver, _) = context::ready()?;
        if p.is_null() {
            return Ok(());
        }
        if !REGIONS.begins_at(p as usize, true) {
            return Err(Status::INVALID_VALUE);
        }
        settle_all()?;
        REGIONS.remove(driver.session.port(), p as usize, true).map(|_| ()).ok_or(Status::INVALID_VALUE)
    }

    fn cuMemHostRegister_v2(p: *mut c_void, size: usize, flags: u32) {
        let (driver, context) = context::ready()?;
        // PORTABLE, DEVICEMAP, READ_ONLY; IOMEMORY (4) is memory of another device.
        if p.is_null() || size == 0 || flags & !0xf != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if flags & 4 != 0 {
            return Err(Status::NOT_PERMITTED);
        }
        let tag = HostTag { context, flags, buffer: unique_id() };
        REGIONS.register(driver.session.port(), p as usize, size, tag).map_err(|error| match error {
            RegisterError::Already => code::HOST_MEMORY_ALREADY_REGISTERED,
            RegisterError::Port(error) => {
                log::warn(format_args!("registering {size} bytes of host memory: {}", error.line()));
                Status::OUT_OF_MEMORY
            }
        })
    }
    alias cuMemHostRegister = cuMemHostRegister_v2(p: *mut c_void, size: usize, flags: u32);

    fn cuMemHostUnregister(p: *mut c_void) {
        let (driver, _) = context::ready()?;
        if p.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if !REGIONS.begins_at(p as usize, false) {
            return Err(code::HOST_MEMORY_NOT_REGISTERED);
        }
        settle_all()?;
        REGIONS.remove(driver.session.port(), p as usize, false).map(|_| ()).ok_or(code::HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetFlags(flags: *mut u32, p: *mut c_void) {
        driver()?;
        let (_, _, tag) = REGIONS.find(p as usize).ok_or(Status::INVALID_VALUE)?;
        put(flags, tag.flags)
    }

    fn cuMemHostGetDevicePointer_v2(dptr: *mut u64, p: *mut c_void, flags: u32) {
        non_null(dptr)?;
        driver()?;
        if flags != 0 || REGIONS.find(p as usize).is_none() {
            return Err(Status::INVALID_VALUE);
        }
        // The device cannot reach memory of this machine: CAN_MAP_HOST_MEMORY says so as well.
        static SAID: AtomicBool = AtomicBool::new(false);
        if !SAID.swap(true, Ordering::Relaxed) {
            log::warn(format_args!(
                "cuMemHostGetDevicePointer: kernels on a remote GPU cannot read this machine's memory; it answers CUDA_ERROR_NOT_SUPPORTED"
            ));
        }
        Err(Status::NOT_SUPPORTED)
    }
}
