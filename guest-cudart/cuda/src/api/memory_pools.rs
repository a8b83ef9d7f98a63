//! Stream-ordered allocation and memory pools.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use crate::abi::arguments::{Array, Count, In, Out, non_null, put};
use crate::abi::result::Result;
use crate::abi::types::{MemAccessDesc, MemLocation, MemPoolProps};
use crate::graph::recording;
use crate::memory::device_memory;
use crate::memory::host_pool;
use crate::memory::managed::advice::{self, Place};
use crate::memory::pool::{
    self, CURRENT, LIMIT_STEP, LOCATION_DEVICE, LOCATION_HOST, LOCATION_NONE, MANAGED, PINNED, POOLS, Pool,
    READ_WRITE,
};
use crate::memory::pool_export::{self, FABRIC, POSIX_FD};
use crate::memory::stream_ordered;
use crate::process::capture;
use crate::process::device_attributes::attr;
use crate::process::driver::{self, driver};
use crate::streams::stream_table;
use client::{Status, lock};

pub(crate) fn alloc(
    dptr: Out<u64>,
    size: usize,
    pool: Option<usize>,
    handle: usize,
    per_thread: bool,
) -> Result {
    dptr.required()?;
    let (driver, context, _lent) = stream_table::ready_on(handle)?;
    let stream = stream_table::any(context, handle, per_thread)?;
    let pool_handle = match pool {
        Some(pool) => pool,
        None => pool::current_pool(stream.context.device as i32)?,
    };
    let (_, pool) = pool::own(pool_handle)?;
    if size == 0 {
        return dptr.put(0);
    }
    if let Some(capture) = stream.capture() {
        if pool.managed.is_some() || pool.host.is_some() {
            return refuse_form!("an allocation of a pool that is not in device memory in a graph");
        }
        let access = pool::access_of_others(pool.device, &lock(&pool.access));
        let address = recording::allocate(&capture, driver, &stream, pool.device, &access, size as u64)?;
        return dptr.put(address);
    }
    pool.take(size as u64)?;
    if let Some(host) = &pool.host {
        let address = host_pool::alloc(driver, (pool_handle, &pool), host, &stream, size as u64)
            .inspect_err(|_| pool.give_back(size as u64))?;
        return dptr.put(address);
    }
    let address = stream_ordered::alloc_for_pool(driver, &stream, size as u64, (pool_handle, &pool))
        .inspect_err(|_| pool.give_back(size as u64))?;
    dptr.put(address)
}

/// Maximum size of a pool in bytes. 0: no limit.
pub(crate) fn limit(props: &MemPoolProps) -> u64 {
    (props.maxSize as u64).checked_next_multiple_of(LIMIT_STEP).unwrap_or(0)
}

/// The location of managed memory that a program passes: a device, the host, or none.
pub(crate) fn managed_place(location: MemLocation) -> Result<Place> {
    driver()?;
    if location.kind == LOCATION_NONE { Ok((LOCATION_NONE, 0)) } else { advice::place(location) }
}

/// Whether a location is the host, or any part of it.
fn is_host(location: MemLocation) -> Result<bool> {
    driver()?;
    Ok(location.kind == LOCATION_HOST)
}

fn set_current(device: i32, pool: usize) -> Result {
    driver::device(device)?;
    let (_, found) = pool::own(pool)?;
    if found.host.is_some() {
        return Err(Status::INVALID_VALUE);
    }
    if found.managed.is_some() {
        return pool::set_managed((LOCATION_DEVICE, device), pool);
    }
    if found.device != device as u32 {
        return Err(Status::INVALID_VALUE);
    }
    if let Some(current) = CURRENT.get(device as usize) {
        current.store(pool, Ordering::Relaxed);
    }
    Ok(())
}

/// Checks access to pinned host memory. All devices have access, and it cannot be revoked.
fn host_access(map: &[MemAccessDesc]) -> Result<Vec<(u32, u32)>> {
    let mut given = Vec::new();
    for access in map {
        match access.location.kind {
            LOCATION_HOST => {}
            LOCATION_DEVICE => given.push((driver::device(access.location.id)?.ordinal, access.flags)),
            _ => return Err(Status::INVALID_VALUE),
        }
        if access.flags != READ_WRITE {
            return refuse_form!("restricted access to a memory pool of the host");
        }
    }
    Ok(given)
}

api! {
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz(dptr: Out<u64>, size: usize, stream: usize) |pt| {
        alloc(dptr, size, None, stream, pt)
    }

    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz(dptr: Out<u64>, size: usize, pool: usize, stream: usize) |pt| {
        alloc(dptr, size, Some(pool), stream, pt)
    }

    fn cuMemFreeAsync / cuMemFreeAsync_ptsz(dptr: u64, stream: usize) |pt| {
        let (driver, context, deferred, _lent) = stream_table::ready_to_end_on(stream)?;
        let stream = stream_table::any(context, stream, pt)?;
        if dptr == 0 {
            return deferred;
        }
        let freed = match stream.capture() {
            Some(capture) => recording::free(&capture, &stream, dptr),
            None => stream_ordered::free_in_order(driver, dptr, stream),
        };
        deferred.and(freed)
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<usize>, dev: i32) {
        pool.required()?;
        pool.put(pool::default_pool(dev)?)
    }

    fn cuDeviceGetMemPool(pool: Out<usize>, dev: i32) {
        pool.required()?;
        driver::device(dev)?;
        pool.put(pool::current_pool(dev)?)
    }

    fn cuDeviceSetMemPool(dev: i32, pool: usize) {
        set_current(dev, pool)
    }

    fn cuMemGetDefaultMemPool(pool: Out<usize>, place: In<MemLocation>, kind: u32) {
        pool.required()?;
        driver()?;
        match kind {
            PINNED if is_host(place.get()?)? => pool.put(pool::host_pools()?.0),
            PINNED => pool.put(pool::default_pool(pool::location(place.get()?)?)?),
            MANAGED => pool.put(pool::managed_pools(managed_place(place.get()?)?)?.0),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemGetMemPool(pool: Out<usize>, place: In<MemLocation>, kind: u32) {
        pool.required()?;
        driver()?;
        match kind {
            PINNED if is_host(place.get()?)? => {
                let (default, chosen) = pool::host_pools()?;
                pool.put(if POOLS.get(chosen).is_some() { chosen } else { default })
            }
            PINNED => pool.put(pool::current_pool(pool::location(place.get()?)?)?),
            MANAGED => {
                let (default, chosen) = pool::managed_pools(managed_place(place.get()?)?)?;
                pool.put(if POOLS.get(chosen).is_some() { chosen } else { default })
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemSetMemPool(place: In<MemLocation>, kind: u32, pool: usize) {
        driver()?;
        match kind {
            PINNED if is_host(place.get()?)? => pool::set_host(pool),
            PINNED if pool::own(pool)?.1.managed.is_none() => set_current(pool::location(place.get()?)?, pool),
            MANAGED => pool::set_managed(managed_place(place.get()?)?, pool),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemPoolCreate(pool: Out<usize>, props: In<MemPoolProps>) {
        pool.required()?;
        props.required()?;
        let driver = driver()?;
        capture::unsafe_call()?;
        let props = props.get()?;
        if props.allocType == MANAGED {
            let place = managed_place(props.location)?;
            if props.handleTypes != 0 {
                return Err(Status::INVALID_VALUE);
            }
            return pool.put(pool::insert(Pool { limit: limit(&props), ..Pool::managed(place) })?);
        }
        if props.allocType != PINNED {
            return Err(Status::INVALID_VALUE);
        }
        if is_host(props.location)? {
            // "Not IPC capable" (`cuMemPoolCreate`).
            if props.handleTypes != 0 {
                return Err(Status::INVALID_VALUE);
            }
            return pool.put(pool::insert(Pool { limit: limit(&props), ..Pool::on_host() })?);
        }
        let device = pool::location(props.location)? as u32;
        let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
        if props.handleTypes & !(POSIX_FD | FABRIC) != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let supported = device.attribute(attr::MEMPOOL_SUPPORTED_HANDLE_TYPES) as u32;
        if props.handleTypes & !supported != 0 {
            return refuse_form!("a memory pool with these handle types");
        }
        let name = if props.handleTypes == 0 { None } else { Some(pool_export::new_name()?) };
        let made = Pool { name, limit: limit(&props), ..Pool::new(device.ordinal) };
        pool.put(pool::insert(made)?)
    }

    fn cuMemPoolDestroy(pool: usize) {
        let (driver, found) = pool::of(pool)?;
        if found.default {
            return Err(Status::INVALID_VALUE);
        }
        capture::unsafe_call()?;
        if let (Some(server), Some(name)) = (found.imported, &found.name) {
            pool_export::forget_pool(driver, server, name)?;
        }
        POOLS.remove(pool).ok_or(Status::INVALID_VALUE)?;
        pool::keeps_less(driver, &found);
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: usize, keep: usize) {
        let (driver, pool) = pool::own(pool)?;
        capture::unsafe_call()?;
        if let Some(host) = &pool.host {
            host.trim(keep as u64);
            return Ok(());
        }
        let device = driver.devices.get(pool.device as usize).ok_or(Status::INVALID_DEVICE)?;
        stream_ordered::collect(driver, device.server);
        device.server.session.check()?;
        lock(&device.memory).trim(keep as u64, device);
        device_memory::wait_for_returned(device);
        Ok(())
    }

    unsafe fn cuMemPoolSetAttribute(pool: usize, attribute: u32, value: *mut c_void) {
        let (driver, pool) = pool::own(pool)?;
        non_null(value)?;
        // SAFETY: not NULL, and of the attribute's type according to CUDA's manual: an int for the kinds of
        // reuse.
        let number = || unsafe { value.cast::<i32>().read() };
        // SAFETY: not NULL, and of the attribute's type according to CUDA's manual: 64 bits for all others.
        let bytes = || unsafe { value.cast::<u64>().read() };
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1].store(number(), Ordering::Relaxed),
            4 => {
                let threshold = bytes();
                if pool.threshold.swap(threshold, Ordering::Relaxed) > threshold {
                    pool::keeps_less(driver, &pool);
                }
            }
            // The two high-water marks can only be reset to 0.
            6 if bytes() == 0 => pool.reserved_high.store(pool.reserved(), Ordering::Relaxed),
            8 if bytes() == 0 => pool.used_high.store(pool.used.load(Ordering::Relaxed), Ordering::Relaxed),
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    unsafe fn cuMemPoolGetAttribute(pool: usize, attribute: u32, value: *mut c_void) {
        let (_, found) = pool::own(pool)?;
        non_null(value)?;
        let bytes = match attribute {
            1..=3 => {
                let reuse = found.reuse[attribute as usize - 1].load(Ordering::Relaxed);
                // SAFETY: not NULL, and of the attribute's type according to CUDA's manual: an int.
                return unsafe { put(value.cast(), reuse) };
            }
            4 => found.threshold.load(Ordering::Relaxed),
            5 => found.reserved(),
            6 => found.reserved_high(),
            7 => found.used.load(Ordering::Relaxed),
            8 => found.used_high.load(Ordering::Relaxed),
            _ => return Err(Status::INVALID_VALUE),
        };
        // SAFETY: not NULL, and of the attribute's type according to CUDA's manual: 64 bits.
        unsafe { put(value.cast(), bytes) }
    }

    fn cuMemPoolSetAccess(pool: usize, map: Array<MemAccessDesc>, count: Count) {
        let (driver, pool) = pool::of(pool)?;
        let map = map.entries(count)?;
        let given = match pool.host {
            Some(_) => host_access(map),
            None => pool::check_access(pool.own_device()?, map),
        }?;
        let mut access = lock(&pool.access);
        if pool.imported.is_some() {
            pool_export::set_access(driver, &pool, &given)?;
        }
        access.extend(given);
        Ok(())
    }

    fn cuMemPoolGetAccess(flags: Out<u32>, pool: usize, place: In<MemLocation>) {
        let (_, pool) = pool::of(pool)?;
        if pool.managed.is_some() {
            // As with NVIDIA's driver: everyone has access without being given it.
            place.required()?;
            return flags.put(0);
        }
        if pool.host.is_some() && is_host(place.get()?)? {
            return flags.put(READ_WRITE);
        }
        flags.put(pool.access_of(pool::location(place.get()?)? as u32))
    }
}
