//! Pinned host memory.

use std::ffi::c_void;

use crate::abi::arguments::Out;
use crate::abi::result::{Result, code};
use crate::memory::managed::mirror;
use crate::memory::pinned::{self, DEVICEMAP};
use crate::memory::pinned_regions::{self, HostTag, REGIONS};
use crate::memory::{host_mappings, host_pool, stream_ordered};
use crate::process::driver::driver;
use crate::process::ids::unique_id;
use crate::process::{capture, context};
use client::Status;
use client::regions::RegisterError;

pub(crate) fn alloc(pp: Out<*mut c_void>, size: usize, flags: u32) -> Result {
    pp.required()?;
    let (driver, context) = context::ready()?;
    // PORTABLE, DEVICEMAP, WRITECOMBINED.
    if flags & !7 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if size == 0 {
        return pp.put(std::ptr::null_mut());
    }
    capture::unsafe_call()?;
    let address = pinned::pin_new(driver, context, size, None, flags)?;
    if flags & DEVICEMAP != 0 {
        // Requested explicitly, so kernels that find its address in other memory can also access it.
        pinned::reach_at(driver, context, address as u64);
    }
    pp.put(address as *mut c_void)
}

api! {
    fn cuMemAllocHost_v2(pp: Out<*mut c_void>, size: usize) {
        alloc(pp, size, 0)
    }

    fn cuMemHostAlloc(pp: Out<*mut c_void>, size: usize, flags: u32) {
        alloc(pp, size, flags)
    }

    fn cuMemFreeHost(p: *mut c_void) {
        let (driver, _, deferred) = context::ready_to_end()?;
        if p.is_null() {
            return deferred;
        }
        // A pool's memory is freed like device memory; mapped memory is unmapped.
        let is_others = host_pool::find(p as u64).is_some() || host_mappings::is_here(p as u64);
        if !REGIONS.begins_at(p as usize, true) || is_others {
            return Err(Status::INVALID_VALUE);
        }
        capture::unsafe_call()?;
        let waited = stream_ordered::settle_all()?;
        pinned::unmap(driver, p as usize, false);
        REGIONS.remove(p as usize, true).ok_or(Status::INVALID_VALUE)?;
        deferred.and(waited)
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
        capture::unsafe_call()?;
        let tag = HostTag { context, flags, buffer: unique_id() };
        let session = context.session();
        REGIONS.register(session, p as usize, size, tag).map_err(|error| match error {
            RegisterError::Already => code::HOST_MEMORY_ALREADY_REGISTERED,
            RegisterError::Port(error) => {
                session.no_memory(format_args!("registering {size} bytes of host memory"), &error)
            }
        })?;
        pinned::offer(driver, context, p as usize, size, flags);
        Ok(())
    }
    alias cuMemHostRegister = cuMemHostRegister_v2(p: *mut c_void, size: usize, flags: u32);

    fn cuMemHostUnregister(p: *mut c_void) {
        let (driver, _, deferred) = context::ready_to_end()?;
        if p.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if !REGIONS.begins_at(p as usize, false) {
            // Allocated, or part of registered memory.
            let known = pinned_regions::find(p as u64).is_some();
            return Err(if known { Status::INVALID_VALUE } else { code::HOST_MEMORY_NOT_REGISTERED });
        }
        capture::unsafe_call()?;
        let waited = stream_ordered::settle_all()?;
        pinned::unmap(driver, p as usize, true);
        REGIONS.remove(p as usize, false).ok_or(code::HOST_MEMORY_NOT_REGISTERED)?;
        deferred.and(waited)
    }

    fn cuMemHostGetFlags(flags: Out<u32>, p: *mut c_void) {
        driver()?;
        let (_, _, tag) = pinned_regions::find(p as u64).ok_or(Status::INVALID_VALUE)?;
        // With unified addressing, everything is mapped.
        flags.put(tag.flags | DEVICEMAP)
    }

    fn cuMemHostGetDevicePointer_v2(dptr: Out<u64>, p: *mut c_void, flags: u32) {
        dptr.required()?;
        let (driver, context) = context::ready()?;
        let found = pinned_regions::find(p as u64).filter(|_| flags == 0);
        let (base, size, _) = found.ok_or(Status::INVALID_VALUE)?;
        pinned::reach_at(driver, context, p as u64);
        if mirror::is_on(context.server, p as u64) {
            return dptr.put(p as u64);
        }
        match pinned::map(context, base, size) {
            Ok(()) => dptr.put(p as u64),
            Err(Status::NOT_SUPPORTED) => refuse_form!(
                "cuMemHostGetDevicePointer of memory that cannot be mirrored for a GPU that does not share it"),
            Err(status) => Err(status),
        }
    }
}
