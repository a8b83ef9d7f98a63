//! Stream-ordered allocation and memory pools.
//!
//! An allocation is placed at once, in memory that no stream uses any more (or that the same stream has freed before); a free takes effect when its stream comes to it. A pool is a
//! name, a device and attributes: all of them draw from their device's window.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::graph::Work;
use crate::graph::memory::GraphMemory;
use crate::state::{self, Driver, driver};
use crate::types::{MemAccessDesc, MemLocation, MemPoolProps};
use crate::{Result, context, memory, non_null, put, stream};
use client::handles::Slab;
use client::{Status, lock};

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;

struct Pool {
    device: u32,
    default: bool,
    /// The three kinds of reuse, and the release threshold: kept and given back. Reuse is always the strictest.
    reuse: [AtomicI32; 3],
    threshold: AtomicU64,
    /// Bytes of its allocations, now and at most.
    used: AtomicU64,
    used_high: AtomicU64,
}

/// Notes that an allocation of a pool came or went. A pool that is gone, or none, is nobody's account.
pub(crate) fn account(pool: usize, size: u64, came: bool) {
    if pool == 0 {
        return;
    }
    let Some(pool) = POOLS.get(pool) else { return };
    if came {
        let used = pool.used.fetch_add(size, Ordering::Relaxed) + size;
        pool.used_high.fetch_max(used, Ordering::Relaxed);
    } else {
        pool.used.fetch_sub(size, Ordering::Relaxed);
    }
}

static POOLS: Slab<Pool> = Slab::new(8);
static DEFAULTS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// The pool that each device allocates from; 0: its default.
static CURRENT: [AtomicUsize; client::channel::MAX_DEVICES as usize] =
    [const { AtomicUsize::new(0) }; client::channel::MAX_DEVICES as usize];

fn new_pool(device: u32, default: bool) -> Arc<Pool> {
    Arc::new(Pool {
        device,
        default,
        reuse: [const { AtomicI32::new(1) }; 3],
        threshold: AtomicU64::new(0),
        used: AtomicU64::new(0),
        used_high: AtomicU64::new(0),
    })
}

fn default_pool(device: i32) -> Result<usize> {
    let device = state::device(device)?;
    let mut defaults = lock(&DEFAULTS);
    while defaults.len() <= device.ordinal as usize {
        let next = defaults.len() as u32;
        defaults.push(POOLS.insert(new_pool(next, true)).ok_or(Status::OUT_OF_MEMORY)?);
    }
    Ok(defaults[device.ordinal as usize])
}

fn current_pool(device: i32) -> Result<usize> {
    let chosen = CURRENT
        .get(usize::try_from(device).map_err(|_| Status::INVALID_DEVICE)?)
        .map_or(0, |c| c.load(Ordering::Relaxed));
    if chosen != 0 && POOLS.get(chosen).is_some() { Ok(chosen) } else { default_pool(device) }
}

fn of(handle: usize) -> Result<(&'static Driver, Arc<Pool>)> {
    let driver = driver()?;
    Ok((driver, POOLS.get(handle).ok_or(Status::INVALID_VALUE)?))
}

fn alloc(dptr: *mut u64, size: usize, pool: Option<usize>, handle: usize, per_thread: bool) -> Result {
    non_null(dptr)?;
    let (driver, context) = context::ready()?;
    let stream = stream::any(driver, context, handle, per_thread)?;
    let pool_handle = match pool {
        Some(pool) => pool,
        None => current_pool(stream.context.device as i32)?,
    };
    let (_, pool) = of(pool_handle)?;
    if size == 0 {
        // SAFETY: checked above not to be NULL; the program says that it may be written.
        return unsafe { put(dptr, 0) };
    }
    memory::collect(driver);
    if let Some(capture) = stream.capture() {
        let made = GraphMemory::new(driver, stream.context, pool.device, size as u64)?;
        let address = made.address;
        capture.add(&stream, Work::Alloc(made))?;
        // SAFETY: as below.
        return unsafe { put(dptr, address) };
    }
    let address = match memory::reuse(driver, &stream, pool.device, size as u64, pool_handle) {
        Some(address) => address,
        None => memory::alloc(driver, stream.context, pool.device, size as u64, pool_handle)?,
    };
    account(pool_handle, size as u64, true);
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(dptr, address) }
}

/// The device that a location names.
pub(crate) unsafe fn location(location: *const MemLocation) -> Result<i32> {
    non_null(location)?;
    // SAFETY: not NULL, and the program says that it may be read.
    let location = unsafe { *location };
    static SAID: AtomicBool = AtomicBool::new(false);
    if location.kind != LOCATION_DEVICE {
        return crate::refuse_form("a memory pool that is not in device memory", &SAID);
    }
    state::device(location.id)?;
    Ok(location.id)
}

unsafe fn set_current(device: i32, pool: usize) -> Result {
    state::device(device)?;
    let (_, found) = of(pool)?;
    if found.device != device as u32 {
        return Err(Status::INVALID_VALUE);
    }
    if let Some(current) = CURRENT.get(device as usize) {
        current.store(pool, Ordering::Relaxed);
    }
    Ok(())
}

/// Checks what access a program wants to give to memory of a device.
///
/// # Safety
/// `map` may be read for `count` descriptions.
pub(crate) unsafe fn check_access(device: u32, map: *const MemAccessDesc, count: usize) -> Result {
    static SAID: AtomicBool = AtomicBool::new(false);
    for i in 0..count {
        non_null(map)?;
        // SAFETY: as the caller says.
        let access = unsafe { *map.add(i) };
        if access.location.kind != LOCATION_DEVICE {
            return Err(Status::INVALID_VALUE);
        }
        state::device(access.location.id)?;
        // The owner's access cannot be taken away; that of others is not there to give.
        if access.location.id == device as i32 {
            if access.flags != 3 {
                return Err(Status::INVALID_VALUE);
            }
        } else if access.flags != 0 {
            return crate::refuse_form("access of another device to a memory pool", &SAID);
        }
    }
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
        let stream = stream::any(driver, context, stream, pt)?;
        if dptr == 0 {
            return Ok(());
        }
        if let Some(capture) = stream.capture() {
            return capture.add(&stream, Work::Free(dptr));
        }
        memory::free_in_order(driver, dptr, stream)
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut usize, dev: i32) {
        non_null(pool)?;
        put(pool, default_pool(dev)?)
    }

    fn cuDeviceGetMemPool(pool: *mut usize, dev: i32) {
        non_null(pool)?;
        state::device(dev)?;
        put(pool, current_pool(dev)?)
    }

    fn cuDeviceSetMemPool(dev: i32, pool: usize) {
        set_current(dev, pool)
    }

    fn cuMemGetDefaultMemPool(pool: *mut usize, place: *const MemLocation, kind: u32) {
        non_null(pool)?;
        if kind != PINNED {
            return Err(Status::NOT_SUPPORTED);
        }
        put(pool, default_pool(location(place)?)?)
    }

    fn cuMemGetMemPool(pool: *mut usize, place: *const MemLocation, kind: u32) {
        non_null(pool)?;
        if kind != PINNED {
            return Err(Status::NOT_SUPPORTED);
        }
        put(pool, current_pool(location(place)?)?)
    }

    fn cuMemSetMemPool(place: *const MemLocation, kind: u32, pool: usize) {
        if kind != PINNED {
            return Err(Status::NOT_SUPPORTED);
        }
        set_current(location(place)?, pool)
    }

    fn cuMemPoolCreate(pool: *mut usize, props: *const MemPoolProps) {
        non_null(pool)?;
        non_null(props)?;
        driver()?;
        let props = *props;
        if props.allocType != PINNED {
            return Err(Status::INVALID_VALUE);
        }
        if props.handleTypes != 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        let device = location(&raw const props.location)?;
        put(pool, POOLS.insert(new_pool(device as u32, false)).ok_or(Status::OUT_OF_MEMORY)?)
    }

    fn cuMemPoolDestroy(pool: usize) {
        let (_, found) = of(pool)?;
        if found.default {
            return Err(Status::INVALID_VALUE);
        }
        POOLS.remove(pool).map(|_| ()).ok_or(Status::INVALID_VALUE)
    }

    fn cuMemPoolTrimTo(pool: usize, keep: usize) {
        let (driver, pool) = of(pool)?;
        memory::collect(driver);
        let device = driver.devices.get(pool.device as usize).ok_or(Status::INVALID_DEVICE)?;
        lock(&device.memory).trim(keep as u64, driver).map(|_| ())
    }

    fn cuMemPoolSetAttribute(pool: usize, attribute: u32, value: *mut c_void) {
        let (_, pool) = of(pool)?;
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
        let (_, found) = of(pool)?;
        non_null(value)?;
        match attribute {
            1..=3 => put(value.cast(), found.reuse[attribute as usize - 1].load(Ordering::Relaxed)),
            4 => put(value.cast(), found.threshold.load(Ordering::Relaxed)),
            // What is reserved for a pool is what is used: the rest is the device's.
            5 | 7 => put(value.cast(), found.used.load(Ordering::Relaxed)),
            6 | 8 => put(value.cast(), found.used_high.load(Ordering::Relaxed)),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAccess(pool: usize, map: *const MemAccessDesc, count: usize) {
        check_access(of(pool)?.1.device, map, count)
    }

    fn cuMemPoolGetAccess(flags: *mut u32, pool: usize, place: *const MemLocation) {
        let (_, pool) = of(pool)?;
        let device = location(place)?;
        put(flags, if device == pool.device as i32 { 3 } else { 0 })
    }
}
