//! Pinned host memory.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use crate::context::{self, Context};
use crate::state::{Driver, driver, unique_id};
use crate::{Result, code, managed, memory, non_null, put, refuse_form};
use client::data::HostOut;
use client::ops::memory::{HostMap, HostUnmap};
use client::regions::{Regions, RegisterError};
use client::{Status, lock, log};

/// What is known of a piece of pinned memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostTag {
    pub context: &'static Context,
    pub flags: u32,
    pub buffer: u64,
}

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
const DEVICEMAP: u32 = 2;

/// The process's pinned memory.
pub(crate) static REGIONS: Regions<HostTag> = Regions::new();

/// The pieces that kernels can reach, by address, each with the context that it was mapped in.
static MAPPED: Mutex<BTreeMap<usize, &'static Context>> = Mutex::new(BTreeMap::new());

/// Whether kernels can reach what is at an address of pinned memory.
pub(crate) fn is_mapped(pointer: u64) -> bool {
    REGIONS.find(pointer as usize).is_some_and(|(base, ..)| lock(&MAPPED).contains_key(&base))
}

/// Pinned memory that an address lies in: first address, size, and what is known of it.
pub(crate) fn find(driver: &Driver, pointer: u64) -> Option<(usize, usize, HostTag)> {
    REGIONS.find(pointer as usize).or_else(|| managed::as_host(driver, pointer))
}

/// As [`is_mapped`], for memory that kernels reach by taking turns with the host as well.
pub(crate) fn is_reached(driver: &Driver, pointer: u64) -> bool {
    is_mapped(pointer) || managed::as_host(driver, pointer).is_some()
}

/// Lets kernels reach the piece that begins at `base`.
fn map(driver: &Driver, context: &'static Context, base: usize, size: usize) -> Result {
    let mut mapped = lock(&MAPPED);
    if mapped.contains_key(&base) {
        return Ok(());
    }
    // Without a region the host does not know the memory at all.
    let range = REGIONS.range(base, size).ok_or(Status::NOT_SUPPORTED)?;
    driver.session.call(&HostMap { context: context.id, address: base as u64, memory: HostOut(range) })?;
    mapped.insert(base, context);
    Ok(())
}

/// Lets kernels reach the piece that begins at `base` if the device can: with unified addressing a kernel may be given the address of any pinned memory as it is, whatever the flags say
/// (PyTorch does so with small arrays of pointers). Where it cannot, such a kernel fails, and `cuMemHostGetDevicePointer` says why.
fn offer(driver: &Driver, context: &'static Context, base: usize, size: usize) {
    let device = driver.devices.get(context.device as usize);
    if device.is_some_and(|device| device.shares_host_memory) {
        // Pinned memory is of use without.
        let _ = map(driver, context, base, size);
    }
}

/// The piece that begins at `base` is about to go.
fn unmap(driver: &Driver, base: usize) {
    if let Some(context) = lock(&MAPPED).remove(&base) {
        // A lost session has nothing mapped.
        let _ = driver.session.append(&HostUnmap { context: context.id, address: base as u64 });
    }
}

/// What was mapped in a context is so no more: it is gone on the server.
pub(crate) fn forget(context: &'static Context) {
    lock(&MAPPED).retain(|_, other| !std::ptr::eq(*other, context));
}

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
    if flags & !7 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if size == 0 {
        // SAFETY: as below.
        return unsafe { put(pp, std::ptr::null_mut()) };
    }
    let tag = HostTag { context, flags, buffer: unique_id() };
    let address = REGIONS.alloc(driver.session.port(), size, tag).map_err(|error| {
        log::warn(format_args!("{size} bytes of pinned memory: {}", error.line()));
        Status::OUT_OF_MEMORY
    })?;
    offer(driver, context, address, size);
    if flags & DEVICEMAP != 0 && !is_mapped(address as u64) {
        // The GPU's machine does not share this memory: kernels reach it as they do managed memory.
        if let Ok(at) = managed::alloc(driver, context, size as u64, Some(tag)) {
            REGIONS.remove(driver.session.port(), address, true);
            // SAFETY: as below.
            return unsafe { put(pp, at as *mut c_void) };
        }
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
        if let Some((base, ..)) = managed::as_host(driver, p as u64) {
            settle_all()?;
            let device = memory::device_of(driver, p as u64).ok_or(Status::INVALID_VALUE)?;
            let freed = base == p as usize && managed::free(driver, device, p as u64)?;
            return if freed { Ok(()) } else { Err(Status::INVALID_VALUE) };
        }
        if !REGIONS.begins_at(p as usize, true) {
            return Err(Status::INVALID_VALUE);
        }
        settle_all()?;
        unmap(driver, p as usize);
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
        if REGIONS.is_allocated(p as usize) || managed::as_host(driver, p as u64).is_some() {
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
        offer(driver, context, p as usize, size);
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
            let known = find(driver, p as u64).is_some();
            return Err(if known { Status::INVALID_VALUE } else { code::HOST_MEMORY_NOT_REGISTERED });
        }
        settle_all()?;
        unmap(driver, p as usize);
        REGIONS.remove(driver.session.port(), p as usize, false).map(|_| ()).ok_or(code::HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetFlags(flags: *mut u32, p: *mut c_void) {
        let (_, _, tag) = find(driver()?, p as u64).ok_or(Status::INVALID_VALUE)?;
        // With unified addressing all of it is mapped.
        put(flags, tag.flags | DEVICEMAP)
    }

    fn cuMemHostGetDevicePointer_v2(dptr: *mut u64, p: *mut c_void, flags: u32) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(dptr)?;
        let (driver, context) = context::ready()?;
        let found = find(driver, p as u64).filter(|_| flags == 0);
        let (base, size, _) = found.ok_or(Status::INVALID_VALUE)?;
        if managed::as_host(driver, p as u64).is_some() {
            return put(dptr, p as u64);
        }
        match map(driver, context, base, size) {
            Ok(()) => put(dptr, p as u64),
            Err(Status::NOT_SUPPORTED) => {
                refuse_form("cuMemHostGetDevicePointer of memory that the GPU's machine does not share", &SAID)
            }
            Err(status) => Err(status),
        }
    }
}
