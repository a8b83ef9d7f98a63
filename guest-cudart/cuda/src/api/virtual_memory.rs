//! Virtual memory management.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use crate::abi::arguments::{Array, Count, In, Out, non_null, put};
use crate::abi::result::Result;
use crate::abi::types::{AccessDesc, AllocationProp, MemLocation};
use crate::memory::virtual_memory::{self, DEVICE, Home, MAGIC, PINNED, POSIX_FD, Space};
use crate::memory::{device_memory, host_memory, shared_descriptor, stream_ordered};
use crate::process::device_attributes::attr;
use crate::process::driver::{self, driver};
use client::Status;
use client::ops::memory::MemoryExport;

/// `CU_DEVICE_INVALID`: what stands for a device that the program does not see.
const INVALID_DEVICE_ID: i32 = -2;

/// The device on which a program wants memory, or `None` for host memory.
fn wanted(prop: &AllocationProp) -> Result<Option<&'static driver::Device>> {
    if prop.kind != PINNED {
        return Err(Status::INVALID_VALUE);
    }
    if prop.location.kind == DEVICE {
        return driver::device(prop.location.id).map(Some);
    }
    host_memory::check(prop.location).map(|()| None)
}

api! {
    fn cuMemAddressReserve(ptr: Out<u64>, size: usize, alignment: usize, wish: u64, flags: u64) {
        ptr.required()?;
        let driver = driver()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let address = virtual_memory::reserve_for_any(driver, size as u64, alignment as u64, wish)?;
        ptr.put(address)
    }

    fn cuMemAddressFree(ptr: u64, size: usize) {
        virtual_memory::free(driver()?, ptr, size as u64)
    }

    fn cuMemCreate(handle: Out<u64>, size: usize, prop: In<AllocationProp>, flags: u64) {
        handle.required()?;
        prop.required()?;
        let driver = driver()?;
        let prop = prop.get()?;
        let device = wanted(&prop)?;
        let size = size as u64;
        let granule = device.map_or_else(|| Space::granule(driver), |device| device.info.granule.max(1));
        if flags != 0 || size == 0 || !size.is_multiple_of(granule) {
            return Err(Status::INVALID_VALUE);
        }
        if prop.handle_types & !POSIX_FD != 0 || prop.gpu_direct_rdma != 0 {
            return refuse_form!("cuMemCreate of memory for fabric handles or GPUDirect RDMA");
        }
        let exportable = prop.handle_types & POSIX_FD != 0;
        let Some(device) = device else {
            if prop.location.kind == host_memory::HOST_NUMA_CURRENT {
                // As with NVIDIA's driver 580, although it reports a granularity for this location.
                return Err(Status::INVALID_VALUE);
            }
            if exportable {
                return refuse_form!("cuMemCreate of host memory for export");
            }
            return handle.put(virtual_memory::make_host(size, prop.location)? as u64);
        };
        if exportable && device.attribute(attr::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        let make = || virtual_memory::make(driver, device.ordinal, size, prop.handle_types);
        handle.put(device_memory::or_returned(device, make)? as u64)
    }

    fn cuMemRelease(handle: u64) {
        driver()?;
        virtual_memory::release(handle as usize)
    }

    fn cuMemMap(ptr: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        let driver = driver()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        virtual_memory::map_at(driver, (ptr, size as u64), offset as u64, handle as usize, None)
    }

    fn cuMemUnmap(ptr: u64, size: usize) {
        let driver = driver()?;
        let size = size as u64;
        let users = virtual_memory::read().users(driver, ptr, size)?;
        // Work that uses it must finish first, as in the driver: the memory must not disappear under it.
        // Other threads' calls go on meanwhile; the work may wait for what they do.
        let waited = stream_ordered::settle_users(users)?;
        virtual_memory::unmap(ptr, size)?;
        waited
    }

    fn cuMemSetAccess(ptr: u64, size: usize, descs: Array<AccessDesc>, count: Count) {
        descs.required()?;
        let driver = driver()?;
        for desc in descs.entries(count)? {
            if !matches!(desc.flags, 0 | 1 | 3) {
                return Err(Status::INVALID_VALUE);
            }
            if desc.location.kind != DEVICE {
                host_memory::check(desc.location)?;
                virtual_memory::set_host_access(ptr, size as u64, desc.flags)?;
                continue;
            }
            let device = driver::device(desc.location.id)?.ordinal;
            virtual_memory::set_access(driver, ptr, size as u64, device, desc.flags)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: Out<u64>, location: In<MemLocation>, ptr: u64) {
        flags.required()?;
        location.required()?;
        driver()?;
        let location = location.get()?;
        let space = virtual_memory::read();
        let (_, mapping) = space
            .mappings
            .range(..=ptr)
            .next_back()
            .filter(|(start, mapping)| ptr - **start < mapping.size)
            .ok_or(Status::INVALID_VALUE)?;
        if location.kind != DEVICE {
            return flags.put(mapping.host_access.into());
        }
        let device = driver::device(location.id)?.ordinal as usize;
        flags.put(mapping.access.get(device).copied().unwrap_or(0).into())
    }

    fn cuMemGetAllocationGranularity(granularity: Out<usize>, prop: In<AllocationProp>, option: u32) {
        granularity.required()?;
        prop.required()?;
        let driver = driver()?;
        if option > 1 {
            return Err(Status::INVALID_VALUE);
        }
        let device = wanted(&prop.get()?)?;
        granularity.put(device.map_or_else(|| Space::granule(driver), |device| device.info.granule) as usize)
    }

    fn cuMemGetAllocationPropertiesFromHandle(prop: Out<AllocationProp>, handle: u64) {
        prop.required()?;
        driver()?;
        let memory = virtual_memory::memory_of(handle as usize)?;
        prop.put(AllocationProp {
            kind: PINNED,
            handle_types: memory.handle_types,
            location: match &memory.home {
                Home::Device { device, .. } => {
                    MemLocation { kind: DEVICE, id: device.map_or(INVALID_DEVICE_ID, |device| device as i32) }
                }
                Home::Host(host) => host.location,
            },
            win32: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: *const c_void) {
        let address = address as u64;
        handle.required()?;
        driver()?;
        let space = virtual_memory::write();
        let (_, mapping) = space
            .mappings
            .range(..=address)
            .next_back()
            .filter(|(start, mapping)| address - **start < mapping.size && mapping.part.is_none())
            .ok_or(Status::INVALID_VALUE)?;
        mapping.memory.handles.fetch_add(1, Ordering::Relaxed);
        handle.put(mapping.handle as u64)
    }

    unsafe fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: u32, flags: u64) {
        non_null(shareable)?;
        let driver = driver()?;
        let memory = virtual_memory::memory_of(handle as usize)?;
        if flags != 0 || kind != POSIX_FD || memory.handle_types & kind == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let Home::Device { id, server, .. } = memory.home else { return Err(Status::INVALID_VALUE) };
        virtual_memory::share(driver)?;
        let token = server.session.call(&MemoryExport { memory: id })?.token;
        // SAFETY: not NULL, and room for a descriptor, as CUDA's manual has it of this kind of handle.
        unsafe { put(shareable.cast::<RawFd>(), shared_descriptor::make(&MAGIC, &token)?) }
    }

    fn cuMemImportFromShareableHandle(handle: Out<u64>, shareable: usize, kind: u32) {
        handle.required()?;
        let driver = driver()?;
        if kind != POSIX_FD {
            return Err(Status::INVALID_VALUE);
        }
        let token = shared_descriptor::read(&MAGIC, shareable).ok_or(Status::INVALID_VALUE)?;
        virtual_memory::share(driver)?;
        handle.put(virtual_memory::import_from_any(driver, token, POSIX_FD)?.0 as u64)
    }
}
