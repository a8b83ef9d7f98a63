//! Virtual memory management.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, refuse_form};
use crate::abi::types::{AccessDesc, AllocationProp, MemLocation};
use crate::memory::stream_ordered;
use crate::memory::virtual_memory::{DEVICE, MAGIC, PINNED, POSIX_FD};
use crate::memory::{shared_descriptor, virtual_memory};
use crate::process::device_attributes::attr;
use crate::process::driver;
use crate::process::driver::driver;
use client::Status;
use client::ops::memory::MemoryExport;

/// The device of what a program wants to make, if it can be made.
pub(crate) fn wanted(prop: &AllocationProp) -> Result<&'static driver::Device> {
    static SAID: AtomicBool = AtomicBool::new(false);
    if prop.kind != PINNED {
        return Err(Status::INVALID_VALUE);
    }
    if prop.location.kind != DEVICE {
        return refuse_form("cuMemCreate of memory that is no device's", &SAID);
    }
    driver::device(prop.location.id)
}

api! {
    fn cuMemAddressReserve(ptr: *mut u64, size: usize, alignment: usize, wish: u64, flags: u64) {
        non_null(ptr)?;
        let driver = driver()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let address = virtual_memory::write().reserve(driver, size as u64, alignment as u64, wish)?;
        put(ptr, address)
    }

    fn cuMemAddressFree(ptr: u64, size: usize) {
        virtual_memory::write().free(driver()?, ptr, size as u64)
    }

    fn cuMemCreate(handle: *mut u64, size: usize, prop: *const AllocationProp, flags: u64) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(handle)?;
        non_null(prop)?;
        let driver = driver()?;
        let prop = *prop;
        let device = wanted(&prop)?;
        let size = size as u64;
        if flags != 0 || size == 0 || !size.is_multiple_of(device.info.granule.max(1)) {
            return Err(Status::INVALID_VALUE);
        }
        if prop.handle_types & !POSIX_FD != 0 || prop.gpu_direct_rdma != 0 {
            return refuse_form("cuMemCreate of memory for fabric handles or GPUDirect RDMA", &SAID);
        }
        let exportable = prop.handle_types & POSIX_FD != 0;
        if exportable && device.attribute(attr::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        put(handle, virtual_memory::make(driver, device.ordinal, size, prop.handle_types)? as u64)
    }

    fn cuMemRelease(handle: u64) {
        virtual_memory::write().release(driver()?, handle as usize)
    }

    fn cuMemMap(ptr: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        let driver = driver()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        virtual_memory::write().map(driver, ptr, size as u64, offset as u64, handle as usize, None)
    }

    fn cuMemUnmap(ptr: u64, size: usize) {
        let driver = driver()?;
        let mut space = virtual_memory::write();
        let contexts: Vec<_> = space
            .whole(ptr, size as u64)?
            .iter()
            .filter_map(|at| space.mappings.get(at))
            .flat_map(|mapping| mapping.access.iter().enumerate().filter(|(_, flags)| **flags != 0))
            .filter_map(|(device, _)| driver.devices.get(device))
            .map(|device| device.primary)
            .collect();
        // Work that uses it comes first, as the driver does it: the addresses must not go under it.
        for context in contexts {
            if context.is_busy() && context.is_alive() {
                stream_ordered::synchronize(context)?;
            }
        }
        space.unmap(driver, ptr, size as u64)
    }

    fn cuMemSetAccess(ptr: u64, size: usize, descs: *const AccessDesc, count: usize) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(descs)?;
        let driver = driver()?;
        let mut space = virtual_memory::write();
        for i in 0..count {
            let desc = descs.add(i).read();
            if desc.location.kind != DEVICE {
                return refuse_form("cuMemSetAccess for the host", &SAID);
            }
            let device = driver::device(desc.location.id)?.ordinal;
            if !matches!(desc.flags, 0 | 1 | 3) {
                return Err(Status::INVALID_VALUE);
            }
            space.set_access(driver, ptr, size as u64, device, desc.flags)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: *mut u64, location: *const MemLocation, ptr: u64) {
        non_null(flags)?;
        non_null(location)?;
        driver()?;
        let location = *location;
        if location.kind != DEVICE {
            return put(flags, 0);
        }
        let device = driver::device(location.id)?.ordinal as usize;
        let space = virtual_memory::read();
        let (_, mapping) = space
            .mappings
            .range(..=ptr)
            .next_back()
            .filter(|(start, mapping)| ptr - **start < mapping.size)
            .ok_or(Status::INVALID_VALUE)?;
        put(flags, mapping.access.get(device).copied().unwrap_or(0).into())
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const AllocationProp, option: u32) {
        non_null(granularity)?;
        non_null(prop)?;
        driver()?;
        if option > 1 {
            return Err(Status::INVALID_VALUE);
        }
        put(granularity, wanted(&*prop)?.info.granule as usize)
    }

    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: u64) {
        non_null(prop)?;
        driver()?;
        let memory = virtual_memory::memory_of(handle as usize)?;
        put(prop, AllocationProp {
            kind: PINNED,
            handle_types: memory.handle_types,
            location: MemLocation { kind: DEVICE, id: memory.device as i32 },
            win32: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *const c_void) {
        let address = address as u64;
        non_null(handle)?;
        driver()?;
        let space = virtual_memory::write();
        let (_, mapping) = space
            .mappings
            .range(..=address)
            .next_back()
            .filter(|(start, mapping)| address - **start < mapping.size && mapping.part.is_none())
            .ok_or(Status::INVALID_VALUE)?;
        mapping.memory.handles.fetch_add(1, Ordering::Relaxed);
        put(handle, mapping.handle as u64)
    }

    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: u32, flags: u64) {
        non_null(shareable)?;
        let driver = driver()?;
        let memory = virtual_memory::memory_of(handle as usize)?;
        if flags != 0 || kind != POSIX_FD || memory.handle_types & kind == 0 {
            return Err(Status::INVALID_VALUE);
        }
        virtual_memory::share(driver)?;
        let token = driver.session.call(&MemoryExport { memory: memory.id })?.token;
        put(shareable.cast::<RawFd>(), shared_descriptor::make(&MAGIC, &token)?)
    }

    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: usize, kind: u32) {
        non_null(handle)?;
        let driver = driver()?;
        if kind != POSIX_FD {
            return Err(Status::INVALID_VALUE);
        }
        let token = shared_descriptor::read(&MAGIC, shareable).ok_or(Status::INVALID_VALUE)?;
        virtual_memory::share(driver)?;
        put(handle, virtual_memory::import(driver, token, POSIX_FD)?.0 as u64)
    }
}
