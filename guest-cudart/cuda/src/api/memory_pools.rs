//! Stream-ordered allocation and memory pools.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, refuse_form};
use crate::abi::types::{MemAccessDesc, MemLocation, MemPoolProps};
use crate::graph::recording;
use crate::memory::host_pool::HostPool;
use crate::memory::managed::advice;
use crate::memory::managed::advice::Place;
use crate::memory::pool::{
    CURRENT, LIMIT_STEP, LOCATION_DEVICE, LOCATION_HOST, LOCATION_NONE, MANAGED, PINNED, POOLS, Pool,
};
use crate::memory::pool_export::{FABRIC, POSIX_FD};
use crate::memory::{host_pool, pool, pool_export, stream_ordered};
use crate::process::device_attributes::attr;
use crate::process::driver::driver;
use crate::process::{context, driver};
use crate::streams::stream_table;
use client::{Status, lock};

pub(crate) fn alloc(
    dptr: *mut u64,
    size: usize,
    pool: Option<usize>,
    handle: usize,
    per_thread: bool,
) -> Result {
    static SAID: AtomicBool = AtomicBool::new(false);
    non_null(dptr)?;
    let (driver, context) = context::ready()?;
    let stream = stream_table::any(driver, context, handle, per_thread)?;
    let pool_handle = match pool {
        Some(pool) => pool,
        None => pool::current_pool(stream.context.device as i32)?,
    };
    let (_, pool) = pool::own(pool_handle)?;
    if size == 0 {
        // SAFETY: checked above not to be NULL; the program says that it may be written.
        return unsafe { put(dptr, 0) };
    }
    stream_ordered::collect(driver);
    if let Some(capture) = stream.capture() {
        if pool.managed.is_some() || pool.host.is_some() {
            return refuse_form("an allocation of a pool that is not in device memory in a graph", &SAID);
        }
        let address = recording::allocate(&capture, driver, &stream, pool.device, size as u64)?;
        // SAFETY: as below.
        return unsafe { put(dptr, address) };
    }
    pool.take(size as u64)?;
    if let Some(host) = &pool.host {
        let address = host_pool::alloc(driver, (pool_handle, &pool), host, &stream, size as u64)
            .inspect_err(|_| pool.give_back(size as u64))?;
        // SAFETY: as below.
        return unsafe { put(dptr, address) };
    }
    let address =
        match stream_ordered::reuse(driver, &stream, pool.home(stream.context), size as u64, pool_handle) {
            Some(address) => address,
            None => stream_ordered::alloc_for_pool(driver, stream.context, size as u64, pool_handle, &pool)
                .inspect_err(|_| pool.give_back(size as u64))?,
        };
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(dptr, address) }
}

/// Bytes that a pool may hold at most; 0: as many as there are.
pub(crate) fn limit(props: &MemPoolProps) -> u64 {
    (props.maxSize as u64).checked_next_multiple_of(LIMIT_STEP).unwrap_or(0)
}

/// The place of managed memory that a program names: a device, the host, or none.
pub(crate) fn managed_place(location: MemLocation) -> Result<Place> {
    driver()?;
    if location.kind == LOCATION_NONE { Ok((LOCATION_NONE, 0)) } else { advice::place(location) }
}

pub(crate) unsafe fn named_place(location: *const MemLocation) -> Result<Place> {
    non_null(location)?;
    // SAFETY: not NULL, and the program says that it may be read.
    managed_place(unsafe { *location })
}

/// Whether a location is the host, whichever part of it.
pub(crate) unsafe fn is_host(location: *const MemLocation) -> Result<bool> {
    driver()?;
    non_null(location)?;
    // SAFETY: not NULL, and the program says that it may be read.
    Ok(unsafe { *location }.kind == LOCATION_HOST)
}

pub(crate) unsafe fn set_current(device: i32, pool: usize) -> Result {
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

/// Gives access to pinned memory of the host: all have it, and it cannot be taken away.
///
/// # Safety
/// `map` may be read for `count` descriptions.
pub(crate) unsafe fn give_host_access(pool: &HostPool, map: *const MemAccessDesc, count: usize) -> Result {
    static SAID: AtomicBool = AtomicBool::new(false);
    let mut devices = Vec::new();
    for i in 0..count {
        non_null(map)?;
        // SAFETY: as the caller says.
        let access = unsafe { *map.add(i) };
        match access.location.kind {
            LOCATION_HOST => {}
            LOCATION_DEVICE => devices.push(driver::device(access.location.id)?.ordinal),
            _ => return Err(Status::INVALID_VALUE),
        }
        if access.flags != 3 {
            return refuse_form("less access than all to a memory pool of the host's", &SAID);
        }
    }
    devices.into_iter().for_each(|device| pool.tell(device));
    Ok(())
}

api! {
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz(dptr: *mut u64, size: usize, stream: usize) |pt| {
        alloc(dptr, size, None, stream, pt)
    }

    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz(dptr: *mut u64, size: usize, pool: usize, stream: usize) |pt| {
        alloc(dptr, size, Some(pool), stream, pt)
    }

    fn cuMemFreeAsync / cuMemFreeAsync_ptsz(dptr: u64, stream: usize) |pt| {
        let (driver, context) = context::ready()?;
        let stream = stream_table::any(driver, context, stream, pt)?;
        if dptr == 0 {
            return Ok(());
        }
        if let Some(capture) = stream.capture() {
            return recording::free(&capture, &stream, dptr);
        }
        stream_ordered::free_in_order(driver, dptr, stream)
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut usize, dev: i32) {
        non_null(pool)?;
        put(pool, pool::default_pool(dev)?)
    }

    fn cuDeviceGetMemPool(pool: *mut usize, dev: i32) {
        non_null(pool)?;
        driver::device(dev)?;
        put(pool, pool::current_pool(dev)?)
    }

    fn cuDeviceSetMemPool(dev: i32, pool: usize) {
        set_current(dev, pool)
    }

    fn cuMemGetDefaultMemPool(pool: *mut usize, place: *const MemLocation, kind: u32) {
        non_null(pool)?;
        match kind {
            PINNED if is_host(place)? => put(pool, pool::host_pools()?.0),
            PINNED => put(pool, pool::default_pool(pool::location(place)?)?),
            MANAGED => put(pool, pool::managed_pools(named_place(place)?)?.0),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemGetMemPool(pool: *mut usize, place: *const MemLocation, kind: u32) {
        non_null(pool)?;
        match kind {
            PINNED if is_host(place)? => {
                let (default, chosen) = pool::host_pools()?;
                put(pool, if POOLS.get(chosen).is_some() { chosen } else { default })
            }
            PINNED => put(pool, pool::current_pool(pool::location(place)?)?),
            MANAGED => {
                let (default, chosen) = pool::managed_pools(named_place(place)?)?;
                put(pool, if POOLS.get(chosen).is_some() { chosen } else { default })
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemSetMemPool(place: *const MemLocation, kind: u32, pool: usize) {
        match kind {
            PINNED if is_host(place)? => pool::set_host(pool),
            PINNED if pool::own(pool)?.1.managed.is_none() => set_current(pool::location(place)?, pool),
            MANAGED => pool::set_managed(named_place(place)?, pool),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemPoolCreate(pool: *mut usize, props: *const MemPoolProps) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(pool)?;
        non_null(props)?;
        let driver = driver()?;
        let props = *props;
        if props.allocType == MANAGED {
            let place = managed_place(props.location)?;
            if props.handleTypes != 0 {
                return Err(Status::INVALID_VALUE);
            }
            return put(pool, pool::insert(Pool { limit: limit(&props), ..Pool::managed(place) })?);
        }
        if props.allocType != PINNED {
            return Err(Status::INVALID_VALUE);
        }
        if is_host(&raw const props.location)? {
            if props.handleTypes != 0 {
                return refuse_form("a memory pool of the host's for other processes", &SAID);
            }
            return put(pool, pool::insert(Pool { limit: limit(&props), ..Pool::on_host() })?);
        }
        let device = pool::location(&raw const props.location)? as u32;
        let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
        if props.handleTypes & !(POSIX_FD | FABRIC) != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let supported = device.attribute(attr::MEMPOOL_SUPPORTED_HANDLE_TYPES) as u32;
        if props.handleTypes & !supported != 0 {
            return refuse_form("a memory pool for these handles", &SAID);
        }
        let name = if props.handleTypes == 0 { None } else { Some(pool_export::new_name()?) };
        let made = Pool { name, limit: limit(&props), ..Pool::new(device.ordinal) };
        put(pool, pool::insert(made)?)
    }

    fn cuMemPoolDestroy(pool: usize) {
        let (driver, found) = pool::of(pool)?;
        if found.default {
            return Err(Status::INVALID_VALUE);
        }
        if let Some(name) = found.name.as_ref().filter(|_| found.imported) {
            pool_export::forget_pool(driver, name)?;
        }
        POOLS.remove(pool).map(|_| ()).ok_or(Status::INVALID_VALUE)
    }

    fn cuMemPoolTrimTo(pool: usize, keep: usize) {
        let (driver, pool) = pool::own(pool)?;
        if let Some(host) = &pool.host {
            host.trim(keep as u64);
            return Ok(());
        }
        stream_ordered::collect(driver);
        let device = driver.devices.get(pool.device as usize).ok_or(Status::INVALID_DEVICE)?;
        lock(&device.memory).trim(keep as u64, driver).map(|_| ())
    }

    fn cuMemPoolSetAttribute(pool: usize, attribute: u32, value: *mut c_void) {
        let (_, pool) = pool::own(pool)?;
        non_null(value)?;
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1].store(value.cast::<i32>().read(), Ordering::Relaxed),
            4 => pool.threshold.store(value.cast::<u64>().read(), Ordering::Relaxed),
            // The two high-water marks can only be set to 0.
            6 | 8 if value.cast::<u64>().read() == 0 => pool.used_high.store(pool.used.load(Ordering::Relaxed), Ordering::Relaxed),
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: usize, attribute: u32, value: *mut c_void) {
        let (_, found) = pool::own(pool)?;
        non_null(value)?;
        match attribute {
            1..=3 => put(value.cast(), found.reuse[attribute as usize - 1].load(Ordering::Relaxed)),
            4 => put(value.cast(), found.threshold.load(Ordering::Relaxed)),
            // What is reserved for a pool is what is used: the rest is the device's.
            5 => put(value.cast(), found.used.load(Ordering::Relaxed) + found.idle()),
            7 => put(value.cast(), found.used.load(Ordering::Relaxed)),
            6 | 8 => put(value.cast(), found.used_high.load(Ordering::Relaxed)),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAccess(pool: usize, map: *const MemAccessDesc, count: usize) {
        let (_, pool) = pool::of(pool)?;
        if let Some(host) = &pool.host {
            return give_host_access(host, map, count);
        }
        pool::check_access(pool.device, map, count)
    }

    fn cuMemPoolGetAccess(flags: *mut u32, pool: usize, place: *const MemLocation) {
        let (_, pool) = pool::of(pool)?;
        if pool.managed.is_some() {
            // As NVIDIA's driver says of them: access is not given, it is everybody's.
            non_null(place)?;
            return put(flags, 0);
        }
        if let Some(host) = &pool.host {
            let told = is_host(place)? || host.is_told(pool::location(place)? as u32);
            return put(flags, if told { 3 } else { 0 });
        }
        let device = pool::location(place)?;
        put(flags, if device == pool.device as i32 { 3 } else { 0 })
    }
}
