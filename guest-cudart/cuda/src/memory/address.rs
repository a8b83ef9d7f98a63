//! Device memory: allocations of this process, placed here (see [`client::memory`]), and what of them a stream has yet to let go.

use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::memory::managed::mirror;
use crate::memory::{
    graph_chunks, graph_memory, host_pool, managed, pinned, pool, pool_export, virtual_memory,
};
use crate::process::context::Context;
use crate::process::driver::{Device, Driver, driver, unique_id};
use crate::process::stream::Stream;
use crate::process::{capture, context};
use client::memory::{Backing, DeviceMemory};
use client::ops::memory::{MemAlloc, MemFree, MemGetInfo, WINDOW_SIZE, is_managed, window};
use client::{Status, lock};

/// What is known of an allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag {
    pub context: &'static Context,
    pub buffer: u64,
    /// Handle of the pool that it came from; 0 for `cuMemAlloc`'s.
    pub pool: usize,
    pub sync_memops: bool,
    /// Freed in stream order: no longer the program's.
    pub freed: bool,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "context {}", self.id.0)
    }
}

/// An allocation, or a variable of a module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub base: u64,
    pub size: u64,
    pub context: &'static Context,
    pub buffer: u64,
    pub pool: usize,
    pub sync_memops: bool,
    /// It is managed memory, or used like it.
    pub managed: bool,
}

impl Found {
    /// Whether it is shared with other processes by `cuIpcGetMemHandle`: not memory of a pool, of a module or without an address of its own.
    pub fn is_exportable(&self, driver: &Driver) -> bool {
        self.pool == 0 && !self.managed && device_of(driver, self.base).is_some()
    }
}

/// Freed in stream order, and used again when the stream has passed the mark.
struct Leaving {
    address: u64,
    size: u64,
    device: u32,
    pool: usize,
    stream: Arc<Stream>,
    mark: u64,
}

static LEAVING: Mutex<Vec<Leaving>> = Mutex::new(Vec::new());

/// The device whose window an address lies in.
pub(crate) fn device_of(driver: &Driver, address: u64) -> Option<&Device> {
    let ordinal = address.checked_sub(window(0))? / WINDOW_SIZE;
    driver.devices.get(usize::try_from(ordinal).ok()?)
}

/// Whether an address can be nothing but a device's.
pub(crate) fn is_reserved(driver: &Driver, address: u64) -> bool {
    device_of(driver, address).is_some() || virtual_memory::is_here(address)
}

/// What lies at a device address, if it is the program's.
pub(crate) fn find(driver: &Driver, address: u64) -> Option<Found> {
    if virtual_memory::is_here(address) {
        return graph_memory::found(address).or_else(|| virtual_memory::find(driver, address));
    }
    if let Some(device) = device_of(driver, address) {
        let memory = lock(device.memory_of(address));
        let (base, allocation) = memory.find(address)?;
        let tag = allocation.tag;
        return (!tag.freed).then_some(Found {
            base,
            size: allocation.size,
            context: tag.context,
            buffer: tag.buffer,
            pool: tag.pool,
            sync_memops: tag.sync_memops,
            managed: is_managed(address),
        });
    }
    if mirror::is_here(address) {
        let (base, size, tag) = pinned::find(address)?;
        return Some(Found {
            base: base as u64,
            size: size as u64,
            context: tag.context,
            buffer: tag.buffer,
            pool: 0,
            sync_memops: false,
            managed: true,
        });
    }
    let globals = driver.globals.read().unwrap_or_else(PoisonError::into_inner);
    let (base, (size, context)) = globals.range(..=address).next_back()?;
    (address - base < *size).then_some(Found {
        base: *base,
        size: *size,
        context,
        buffer: 0,
        pool: 0,
        sync_memops: false,
        managed: managed::is_here(address),
    })
}

/// Checks that `len` bytes at a device address (not 0 bytes) lie in one allocation, or are mapped. What of them the host has goes to the device.
///
/// # Errors
/// `INVALID_VALUE`, as CUDA says of an address that is none, or a range that runs past its end.
#[inline]
pub(crate) fn check(driver: &Driver, address: u64, len: u64) -> Result<Found> {
    if virtual_memory::is_here(address) && graph_memory::found(address).is_none() {
        return virtual_memory::check(driver, address, len);
    }
    let found = find(driver, address).ok_or(Status::INVALID_VALUE)?;
    let end = address.checked_add(len).ok_or(Status::INVALID_VALUE)?;
    if end > found.base + found.size {
        return Err(Status::INVALID_VALUE);
    }
    if found.managed {
        managed::lend(address, len)?;
    }
    Ok(found)
}

/// Allocates in the current device.
pub(crate) fn alloc(
    driver: &'static Driver,
    context: &'static Context,
    device: u32,
    size: u64,
    pool: usize,
) -> Result<u64> {
    let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
    let tag = Tag { context, buffer: unique_id(), pool, sync_memops: false, freed: false };
    let address = place(driver, device, &device.memory, size, tag, driver)?;
    driver.session.append(&MemAlloc { address, size })?;
    Ok(address)
}

/// Places an allocation in one part of a device's memory.
pub(crate) fn place(
    driver: &'static Driver,
    device: &Device,
    part: &Mutex<DeviceMemory<Tag>>,
    size: u64,
    tag: Tag,
    backing: &dyn Backing,
) -> Result<u64> {
    if size > device.info.total_memory {
        return Err(Status::OUT_OF_MEMORY);
    }
    let first = lock(part).alloc(size, tag, backing);
    match first {
        // What streams have yet to let go may be what is missing.
        Err(Status::OUT_OF_MEMORY)
            if wait_for_leaving(driver, device.ordinal) | graph_chunks::trim(driver, device.ordinal) =>
        {
            lock(part).alloc(size, tag, backing)
        }
        other => other,
    }
}

/// Gives an allocation back at once: no work may use it.
fn release(driver: &'static Driver, device: &Device, address: u64) {
    if is_managed(address) {
        // What is not given back now is with the session.
        let _ = managed::free(driver, device, address);
        return;
    }
    // In this order: the address is only used again after the server has heard that it is free.
    let mut memory = lock(&device.memory);
    if driver.session.append(&MemFree { address }).is_ok() {
        memory.free(address, driver);
    }
}

/// Frees in stream order: later allocations use the memory when the stream has come here.
pub(crate) fn free_in_order(driver: &'static Driver, address: u64, stream: Arc<Stream>) -> Result {
    if graph_memory::freed(driver, address, Some(&stream))?
        || host_pool::free(driver, address, stream.clone())?
    {
        return Ok(());
    }
    if virtual_memory::is_here(address) {
        return pool_export::free_in_order(driver, address, stream);
    }
    let device = device_of(driver, address).ok_or(Status::INVALID_VALUE)?;
    let (size, pool) = {
        let mut memory = lock(device.memory_of(address));
        let (base, allocation) = memory.find(address).ok_or(Status::INVALID_VALUE)?;
        // Of managed memory only a pool's is freed so.
        let is_pools = !is_managed(address) || allocation.tag.pool != 0;
        if base != address || allocation.tag.freed || !is_pools {
            return Err(Status::INVALID_VALUE);
        }
        let (size, pool) = (allocation.size, allocation.tag.pool);
        if let Some(tag) = memory.tag_mut(base) {
            tag.freed = true;
        }
        (size, pool)
    };
    pool::gone(pool, size);
    let mark = stream.mark(driver)?;
    lock(&LEAVING).push(Leaving { address, size, device: device.ordinal, pool, stream, mark });
    collect(driver);
    Ok(())
}

/// An allocation of the same size and pool that was freed earlier in the same stream: work on it there comes before whatever follows.
pub(crate) fn reuse(
    driver: &Driver,
    stream: &Arc<Stream>,
    device: u32,
    size: u64,
    pool: usize,
) -> Option<u64> {
    let mut leaving = lock(&LEAVING);
    let at = leaving.iter().position(|l| {
        l.size == size && l.device == device && l.pool == pool && Arc::ptr_eq(&l.stream, stream)
    })?;
    let found = leaving.swap_remove(at);
    drop(leaving);
    let mut memory = lock(driver.devices.get(device as usize)?.memory_of(found.address));
    let tag = memory.tag_mut(found.address)?;
    tag.freed = false;
    tag.buffer = unique_id();
    Some(found.address)
}

/// Gives back what streams have let go of.
pub(crate) fn collect(driver: &'static Driver) {
    pool_export::collect(driver);
    let gone: Vec<Leaving> = {
        let mut leaving = lock(&LEAVING);
        if leaving.is_empty() {
            return;
        }
        leaving.extract_if(.., |l| l.stream.has_passed(driver, l.mark)).collect()
    };
    for l in gone {
        if let Some(device) = driver.devices.get(l.device as usize) {
            release(driver, device, l.address);
        }
    }
}

/// Waits for what was freed in stream order on a device. False: there was nothing.
fn wait_for_leaving(driver: &'static Driver, device: u32) -> bool {
    let waiting: Vec<(Arc<Stream>, u64)> =
        lock(&LEAVING).iter().filter(|l| l.device == device).map(|l| (l.stream.clone(), l.mark)).collect();
    for (stream, mark) in &waiting {
        if driver.session.wait_progress(|| stream.has_passed(driver, *mark)).is_err() {
            return false;
        }
    }
    collect(driver);
    !waiting.is_empty()
}

/// A device's memory is gone, whichever context it was in: the server has reset the device.
pub(crate) fn reset(driver: &'static Driver, device: &Device) {
    managed::reset(driver, device);
    graph_chunks::forget(device.primary);
    graph_chunks::trim(driver, device.ordinal);
    lock(&LEAVING).retain(|l| l.device != device.ordinal);
    lock(&device.memory).reset();
    let mut globals = driver.globals.write().unwrap_or_else(PoisonError::into_inner);
    globals.retain(|_, (_, owner)| owner.device != device.ordinal);
}

/// Gives back the memory of a context that ends.
pub(crate) fn forget(driver: &'static Driver, context: &'static Context) {
    managed::forget(driver, context);
    pool_export::forget(driver, context);
    graph_chunks::forget(context);
    lock(&LEAVING).retain(|l| !std::ptr::eq(l.stream.context, context));
    for device in &driver.devices {
        let addresses = lock(&device.memory).addresses_where(|tag| std::ptr::eq(tag.context, context));
        for address in addresses {
            if let Some(found) = find(driver, address) {
                pool::gone(found.pool, found.size);
            }
            release(driver, device, address);
        }
    }
    let mut globals = driver.globals.write().unwrap_or_else(PoisonError::into_inner);
    globals.retain(|_, (_, owner)| !std::ptr::eq(*owner, context));
}

/// Pitch of a row, in bytes: as CUDA's, a multiple of the texture pitch alignment that suits every access.
const PITCH: usize = 512;

api! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (driver, context) = context::ready()?;
        let device = driver.devices.get(context.device as usize).ok_or(Status::INVALID_DEVICE)?;
        collect(driver);
        let reply = driver.session.call(&MemGetInfo { device: device.ordinal })?;
        // What is backed and free here is free to the program.
        let spare = lock(&device.memory).free_bytes() + lock(&device.managed).free_bytes();
        if !free.is_null() {
            put(free, (reply.free + spare).min(reply.total) as usize)?;
        }
        if !total.is_null() {
            put(total, reply.total as usize)?;
        }
        Ok(())
    }

    fn cuMemAlloc_v2(dptr: *mut u64, size: usize) {
        non_null(dptr)?;
        let (driver, context) = context::ready()?;
        if size == 0 {
            return Err(Status::INVALID_VALUE);
        }
        capture::unsafe_call()?;
        put(dptr, alloc(driver, context, context.device, size as u64, 0)?)
    }

    fn cuMemAllocPitch_v2(dptr: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) {
        non_null(dptr)?;
        non_null(pitch)?;
        let (driver, context) = context::ready()?;
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(Status::INVALID_VALUE);
        }
        capture::unsafe_call()?;
        let row = width.checked_next_multiple_of(PITCH).ok_or(Status::INVALID_VALUE)?;
        let size = row.checked_mul(height).ok_or(Status::OUT_OF_MEMORY)?;
        let address = alloc(driver, context, context.device, size as u64, 0)?;
        put(pitch, row)?;
        put(dptr, address)
    }

    fn cuMemFree_v2(dptr: u64) {
        let (driver, context) = context::ready()?;
        if dptr == 0 {
            return Ok(());
        }
        if host_pool::is_here(dptr) {
            return host_pool::free_at_once(driver, context, dptr);
        }
        if let Some(found) = graph_memory::found(dptr) {
            capture::unsafe_call()?;
            if found.context.is_alive() {
                found.context.synchronize()?;
            }
            return graph_memory::freed(driver, dptr, None)?.then_some(()).ok_or(Status::INVALID_VALUE);
        }
        if virtual_memory::is_here(dptr) {
            capture::unsafe_call()?;
            return pool_export::free(driver, dptr);
        }
        let device = device_of(driver, dptr).ok_or(Status::INVALID_VALUE)?;
        let found = find(driver, dptr).filter(|found| found.base == dptr).ok_or(Status::INVALID_VALUE)?;
        capture::unsafe_call()?;
        // The one place where two threads that free the same address are told apart is the removal itself.
        if found.context.is_alive() {
            found.context.synchronize()?;
        }
        if found.managed {
            if !managed::free(driver, device, dptr)? {
                return Err(Status::INVALID_VALUE);
            }
            pool::gone(found.pool, found.size);
            return Ok(());
        }
        let mut memory = lock(&device.memory);
        if memory.find(dptr).is_none_or(|(base, a)| base != dptr || a.tag.freed || a.tag.buffer != found.buffer) {
            return Err(Status::INVALID_VALUE);
        }
        driver.session.append(&MemFree { address: dptr })?;
        memory.free(dptr, driver);
        pool::gone(found.pool, found.size);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, dptr: u64) {
        let driver = driver()?;
        context::current()?;
        let found = find(driver, dptr).ok_or(Status::NOT_FOUND)?;
        if !base.is_null() {
            put(base, found.base)?;
        }
        if !size.is_null() {
            put(size, found.size as usize)?;
        }
        Ok(())
    }
}
