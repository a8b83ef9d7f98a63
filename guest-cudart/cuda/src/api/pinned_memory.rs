//! Pinned host memory.

use std::ffi::c_void;
use std::sync::atomic::AtomicBool;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code, refuse_form};
use crate::memory::managed::mirror;
use crate::memory::pinned::DEVICEMAP;
use crate::memory::pinned_regions::{HostTag, REGIONS};
use crate::memory::{host_mappings, host_pool, pinned, pinned_regions, stream_ordered};
use crate::process::context;
use crate::process::driver::driver;
use crate::process::ids::unique_id;
use client::regions::RegisterError;
use client::{Status, log};

pub(crate) fn alloc(pp: *mut *mut c_void, size: usize, flags: u32) -> Result {
    non_null(pp)?;
    let (driver, context) = context::ready()?;
    // PORTABLE, DEVICEMAP, WRITECOMBINED.
    if flags & !7 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if size == 0 {
        // SAFETY: as below.
        return unsafe { put(pp, std::ptr::null_mut()) };
    }
    let address = pinned::pin_new(driver, context, size, None, flags)?;
    if flags & DEVICEMAP != 0 {
        // Asked for by name, it is reached also by kernels that find its address in other memory.
        pinned::reach_at(driver, address as u64);
    }
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
        // A pool's memory is freed as device memory is; mapped memory is unmapped.
        let is_others = host_pool::find(p as u64).is_some() || host_mappings::is_here(p as u64);
        if !REGIONS.begins_at(p as usize, true) || is_others {
            return Err(Status::INVALID_VALUE);
        }
        stream_ordered::settle_all()?;
        pinned::unmap(driver, p as usize, false);
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
        if REGIONS.is_allocated(p as usize) {
            return Err(Status::INVALID_VALUE);
        }
        let tag = HostTag { context, flags, buffer: unique_id() };
        REGIONS.register(driver.session.port(), p as usize, size, tag).map_err(|error| match error {
            RegisterError::Already => code::HOST_MEMORY_ALREADY_REGISTERED,
            RegisterError::Port(error) => {
                log::warn(format_args!("registering {size} bytes of host memory: {}", error.line()));
                Status::OUT_OF_MEMORY
            }
        })?;
        pinned::offer(driver, context, p as usize, size, flags);
        Ok(())
    }
    alias cuMemHostRegister = cuMemHostRegister_v2(p: *mut c_void, size: usize, flags: u32);

    fn cuMemHostUnregister(p: *mut c_void) {
        let (driver, _) = context::ready()?;
        if p.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if !REGIONS.begins_at(p as usize, false) {
            // Allocated, or inside of what is registered.
            let known = pinned_regions::find(p as u64).is_some();
            return Err(if known { Status::INVALID_VALUE } else { code::HOST_MEMORY_NOT_REGISTERED });
        }
        stream_ordered::settle_all()?;
        pinned::unmap(driver, p as usize, true);
        REGIONS.remove(driver.session.port(), p as usize, false).map(|_| ()).ok_or(code::HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetFlags(flags: *mut u32, p: *mut c_void) {
        driver()?;
        let (_, _, tag) = pinned_regions::find(p as u64).ok_or(Status::INVALID_VALUE)?;
        // With unified addressing all of it is mapped.
        put(flags, tag.flags | DEVICEMAP)
    }

    fn cuMemHostGetDevicePointer_v2(dptr: *mut u64, p: *mut c_void, flags: u32) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(dptr)?;
        let (driver, context) = context::ready()?;
        let found = pinned_regions::find(p as u64).filter(|_| flags == 0);
        let (base, size, _) = found.ok_or(Status::INVALID_VALUE)?;
        pinned::reach_at(driver, p as u64);
        if mirror::is_here(p as u64) {
            return put(dptr, p as u64);
        }
        match pinned::map(driver, context, base, size) {
            Ok(()) => put(dptr, p as u64),
            Err(Status::NOT_SUPPORTED) => refuse_form(
                "cuMemHostGetDevicePointer of memory that cannot be mirrored for a GPU that does not share it",
                &SAID,
            ),
            Err(status) => Err(status),
        }
    }
}
