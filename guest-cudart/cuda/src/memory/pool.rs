//! Stream-ordered allocation and memory pools.
//!
//! An allocation is placed at once, in memory that no stream uses any more (or that the same stream has freed before); a free takes effect when its stream comes to it. A pool is a
//! name, a device and attributes: all of them draw from their device's window.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, refuse_form};
use crate::abi::types::{MemAccessDesc, MemLocation, MemPoolProps};
use crate::api::devices::attr;
use crate::memory::host_pool::HostPool;
use crate::memory::managed::advice;
use crate::memory::managed::advice::Place;
use crate::memory::pool_export::{FABRIC, POSIX_FD, PoolName};
use crate::memory::{address, host_pool, managed, pool_export};
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::{context, driver, stream};
use client::handles::Slab;
use client::{Status, lock};

/// `CU_MEM_LOCATION_TYPE_NONE`.
const LOCATION_NONE: u32 = 0;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_DEVICE: u32 = 1;

/// `CU_MEM_LOCATION_TYPE_HOST`.
const LOCATION_HOST: u32 = 2;

/// A pool's limit is rounded up to this, as NVIDIA's driver does it.
const LIMIT_STEP: u64 = 32 << 20;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;

/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
const MANAGED: u32 = 2;

pub(crate) struct Pool {
    pub device: u32,
    default: bool,
    /// Under which other processes know it, if it is shared.
    pub name: Option<PoolName>,
    /// It is another process's: memory of it is opened, not allocated.
    pub imported: bool,
    /// Its allocations are managed memory, which is to be at this place.
    managed: Option<Place>,
    /// Its allocations are pinned memory of the host.
    host: Option<HostPool>,
    /// Bytes of its allocations at most; 0: as many as the device has.
    limit: u64,
    /// The three kinds of reuse, and the release threshold: kept and given back. Reuse is always the strictest.
    reuse: [AtomicI32; 3],
    threshold: AtomicU64,
    /// Bytes of its allocations, now and at most.
    used: AtomicU64,
    used_high: AtomicU64,
}

impl Pool {
    fn new(device: u32) -> Pool {
        Pool {
            device,
            default: false,
            name: None,
            imported: false,
            managed: None,
            host: None,
            limit: 0,
            reuse: [const { AtomicI32::new(1) }; 3],
            threshold: AtomicU64::new(0),
            used: AtomicU64::new(0),
            used_high: AtomicU64::new(0),
        }
    }

    /// A pool of managed memory.
    fn managed(place: Place) -> Pool {
        let device = if place.0 == LOCATION_DEVICE { place.1 as u32 } else { 0 };
        Pool { managed: Some(place), ..Pool::new(device) }
    }

    /// A pool of pinned memory of the host.
    fn on_host() -> Pool {
        Pool { host: Some(HostPool::default()), ..Pool::new(0) }
    }

    /// What it has as a pool of pinned memory of the host, if it is one.
    pub fn host(&self) -> Option<&HostPool> {
        self.host.as_ref()
    }

    /// The release threshold, in bytes.
    pub fn threshold(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed)
    }

    /// Bytes that are reserved for it beyond those in use: a device's pool has none, the rest is the device's.
    fn idle(&self) -> u64 {
        self.host.as_ref().map_or(0, HostPool::idle)
    }

    /// The device in which it allocates for a context: managed memory that is to be at no device is in the context's.
    fn home(&self, context: &Context) -> u32 {
        match self.managed {
            Some((kind, _)) if kind != LOCATION_DEVICE => context.device,
            _ => self.device,
        }
    }

    /// Another process's pool.
    pub fn imported(device: u32, name: PoolName) -> Pool {
        Pool { name: Some(name), imported: true, ..Pool::new(device) }
    }

    /// Counts an allocation, if there is room for it.
    fn take(&self, size: u64) -> Result {
        let with = |used: u64| used.checked_add(size).filter(|all| self.limit == 0 || *all <= self.limit);
        let before = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
        let used = before.map_err(|_| Status::OUT_OF_MEMORY)? + size;
        self.used_high.fetch_max(used, Ordering::Relaxed);
        Ok(())
    }

    /// Memory that no stream has used.
    fn fresh(
        &self,
        driver: &'static Driver,
        context: &'static Context,
        size: u64,
        handle: usize,
    ) -> Result<u64> {
        let Some(place) = self.managed else {
            return address::alloc(driver, context, self.device, size, handle);
        };
        let home = self.home(context);
        let device = driver.devices.get(home as usize).ok_or(Status::INVALID_DEVICE)?;
        let context = if context.device == home { context } else { device.primary };
        let address = managed::alloc(driver, context, size, handle)?;
        advice::prefer(address, size, place).map(|()| address)
    }

    /// Bytes of an allocation are free again.
    pub fn give_back(&self, size: u64) {
        self.used.fetch_sub(size, Ordering::Relaxed);
    }
}

/// Notes that an allocation of a pool has gone. A pool that is gone, or none, is nobody's account.
pub(crate) fn gone(pool: usize, size: u64) {
    if let Some(pool) = POOLS.get(pool).filter(|_| pool != 0) {
        pool.give_back(size);
    }
}

/// The handle of a new pool.
pub(crate) fn insert(pool: Pool) -> Result<usize> {
    POOLS.insert(Arc::new(pool)).ok_or(Status::OUT_OF_MEMORY)
}

static POOLS: Slab<Pool> = Slab::new(8);

/// The default pool of managed memory of each place, and the one that was chosen.
static MANAGED_POOLS: Mutex<BTreeMap<Place, (usize, usize)>> = Mutex::new(BTreeMap::new());

static DEFAULTS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// The default pool of pinned memory of the host, and the one that was chosen; 0: not made yet.
static HOST_POOLS: Mutex<(usize, usize)> = Mutex::new((0, 0));

/// The pool that each device allocates from; 0: its default.
static CURRENT: [AtomicUsize; client::channel::MAX_DEVICES as usize] =
    [const { AtomicUsize::new(0) }; client::channel::MAX_DEVICES as usize];

fn default_pool(device: i32) -> Result<usize> {
    let device = driver::device(device)?;
    let mut defaults = lock(&DEFAULTS);
    while defaults.len() <= device.ordinal as usize {
        let next = defaults.len() as u32;
        defaults.push(insert(Pool { default: true, ..Pool::new(next) })?);
    }
    Ok(defaults[device.ordinal as usize])
}

fn current_pool(device: i32) -> Result<usize> {
    let chosen = CURRENT
        .get(usize::try_from(device).map_err(|_| Status::INVALID_DEVICE)?)
        .map_or(0, |c| c.load(Ordering::Relaxed));
    if chosen != 0 && POOLS.get(chosen).is_some() { Ok(chosen) } else { default_pool(device) }
}

/// The pool that a program's handle names.
pub(crate) fn of(handle: usize) -> Result<(&'static Driver, Arc<Pool>)> {
    let driver = driver()?;
    Ok((driver, POOLS.get(handle).ok_or(Status::INVALID_VALUE)?))
}

/// The same, which must not be another process's.
pub(crate) fn own(handle: usize) -> Result<(&'static Driver, Arc<Pool>)> {
    of(handle).and_then(|found| if found.1.imported { Err(Status::INVALID_VALUE) } else { Ok(found) })
}

fn alloc(dptr: *mut u64, size: usize, pool: Option<usize>, handle: usize, per_thread: bool) -> Result {
    static SAID: AtomicBool = AtomicBool::new(false);
    non_null(dptr)?;
    let (driver, context) = context::ready()?;
    let stream = stream::any(driver, context, handle, per_thread)?;
    let pool_handle = match pool {
        Some(pool) => pool,
        None => current_pool(stream.context.device as i32)?,
    };
    let (_, pool) = own(pool_handle)?;
    if size == 0 {
        // SAFETY: checked above not to be NULL; the program says that it may be written.
        return unsafe { put(dptr, 0) };
    }
    address::collect(driver);
    if let Some(capture) = stream.capture() {
        if pool.managed.is_some() || pool.host.is_some() {
            return refuse_form("an allocation of a pool that is not in device memory in a graph", &SAID);
        }
        let address = capture.allocate(driver, &stream, pool.device, size as u64)?;
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
    let address = match address::reuse(driver, &stream, pool.home(stream.context), size as u64, pool_handle) {
        Some(address) => address,
        None => pool
            .fresh(driver, stream.context, size as u64, pool_handle)
            .inspect_err(|_| pool.give_back(size as u64))?,
    };
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(dptr, address) }
}

/// Bytes that a pool may hold at most; 0: as many as there are.
fn limit(props: &MemPoolProps) -> u64 {
    (props.maxSize as u64).checked_next_multiple_of(LIMIT_STEP).unwrap_or(0)
}

/// The device that a location names.
pub(crate) unsafe fn location(location: *const MemLocation) -> Result<i32> {
    non_null(location)?;
    // SAFETY: not NULL, and the program says that it may be read.
    let location = unsafe { *location };
    static SAID: AtomicBool = AtomicBool::new(false);
    if location.kind != LOCATION_DEVICE {
        return refuse_form("a memory pool that is not in device memory", &SAID);
    }
    driver::device(location.id)?;
    Ok(location.id)
}

/// The place of managed memory that a program names: a device, the host, or none.
fn managed_place(location: MemLocation) -> Result<Place> {
    driver()?;
    if location.kind == LOCATION_NONE { Ok((LOCATION_NONE, 0)) } else { advice::place(location) }
}

unsafe fn named_place(location: *const MemLocation) -> Result<Place> {
    non_null(location)?;
    // SAFETY: not NULL, and the program says that it may be read.
    managed_place(unsafe { *location })
}

/// The default pool of managed memory of a place, and the one that was chosen for it last.
fn managed_pools(place: Place) -> Result<(usize, usize)> {
    let mut pools = lock(&MANAGED_POOLS);
    if let Some(found) = pools.get(&place) {
        return Ok(*found);
    }
    let made = insert(Pool { default: true, ..Pool::managed(place) })?;
    pools.insert(place, (made, made));
    Ok((made, made))
}

fn set_managed(place: Place, pool: usize) -> Result {
    let (default, _) = managed_pools(place)?;
    if own(pool)?.1.managed != Some(place) {
        return Err(Status::INVALID_VALUE);
    }
    lock(&MANAGED_POOLS).insert(place, (default, pool));
    Ok(())
}

/// Whether a location is the host, whichever part of it.
unsafe fn is_host(location: *const MemLocation) -> Result<bool> {
    driver()?;
    non_null(location)?;
    // SAFETY: not NULL, and the program says that it may be read.
    Ok(unsafe { *location }.kind == LOCATION_HOST)
}

/// The default pool of pinned memory of the host, and the one that was chosen last.
fn host_pools() -> Result<(usize, usize)> {
    let mut pools = lock(&HOST_POOLS);
    if pools.0 == 0 {
        let made = insert(Pool { default: true, ..Pool::on_host() })?;
        *pools = (made, made);
    }
    Ok(*pools)
}

fn set_host(pool: usize) -> Result {
    own(pool)?.1.host.as_ref().ok_or(Status::INVALID_VALUE)?;
    host_pools()?;
    lock(&HOST_POOLS).1 = pool;
    Ok(())
}

unsafe fn set_current(device: i32, pool: usize) -> Result {
    driver::device(device)?;
    let (_, found) = own(pool)?;
    if found.host.is_some() {
        return Err(Status::INVALID_VALUE);
    }
    if found.managed.is_some() {
        return set_managed((LOCATION_DEVICE, device), pool);
    }
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
        driver::device(access.location.id)?;
        // The owner's access cannot be taken away; that of others is not there to give.
        if access.location.id == device as i32 {
            if access.flags != 3 {
                return Err(Status::INVALID_VALUE);
            }
        } else if access.flags != 0 {
            return refuse_form("access of another device to a memory pool", &SAID);
        }
    }
    Ok(())
}

/// Gives access to pinned memory of the host: all have it, and it cannot be taken away.
///
/// # Safety
/// `map` may be read for `count` descriptions.
unsafe fn give_host_access(pool: &HostPool, map: *const MemAccessDesc, count: usize) -> Result {
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
        let stream = stream::any(driver, context, stream, pt)?;
        if dptr == 0 {
            return Ok(());
        }
        if let Some(capture) = stream.capture() {
            return capture.free(&stream, dptr);
        }
        address::free_in_order(driver, dptr, stream)
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut usize, dev: i32) {
        non_null(pool)?;
        put(pool, default_pool(dev)?)
    }

    fn cuDeviceGetMemPool(pool: *mut usize, dev: i32) {
        non_null(pool)?;
        driver::device(dev)?;
        put(pool, current_pool(dev)?)
    }

    fn cuDeviceSetMemPool(dev: i32, pool: usize) {
        set_current(dev, pool)
    }

    fn cuMemGetDefaultMemPool(pool: *mut usize, place: *const MemLocation, kind: u32) {
        non_null(pool)?;
        match kind {
            PINNED if is_host(place)? => put(pool, host_pools()?.0),
            PINNED => put(pool, default_pool(location(place)?)?),
            MANAGED => put(pool, managed_pools(named_place(place)?)?.0),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemGetMemPool(pool: *mut usize, place: *const MemLocation, kind: u32) {
        non_null(pool)?;
        match kind {
            PINNED if is_host(place)? => {
                let (default, chosen) = host_pools()?;
                put(pool, if POOLS.get(chosen).is_some() { chosen } else { default })
            }
            PINNED => put(pool, current_pool(location(place)?)?),
            MANAGED => {
                let (default, chosen) = managed_pools(named_place(place)?)?;
                put(pool, if POOLS.get(chosen).is_some() { chosen } else { default })
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuMemSetMemPool(place: *const MemLocation, kind: u32, pool: usize) {
        match kind {
            PINNED if is_host(place)? => set_host(pool),
            PINNED if own(pool)?.1.managed.is_none() => set_current(location(place)?, pool),
            MANAGED => set_managed(named_place(place)?, pool),
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
            return put(pool, insert(Pool { limit: limit(&props), ..Pool::managed(place) })?);
        }
        if props.allocType != PINNED {
            return Err(Status::INVALID_VALUE);
        }
        if is_host(&raw const props.location)? {
            if props.handleTypes != 0 {
                return refuse_form("a memory pool of the host's for other processes", &SAID);
            }
            return put(pool, insert(Pool { limit: limit(&props), ..Pool::on_host() })?);
        }
        let device = location(&raw const props.location)? as u32;
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
        put(pool, insert(made)?)
    }

    fn cuMemPoolDestroy(pool: usize) {
        let (driver, found) = of(pool)?;
        if found.default {
            return Err(Status::INVALID_VALUE);
        }
        if let Some(name) = found.name.as_ref().filter(|_| found.imported) {
            pool_export::forget_pool(driver, name)?;
        }
        POOLS.remove(pool).map(|_| ()).ok_or(Status::INVALID_VALUE)
    }

    fn cuMemPoolTrimTo(pool: usize, keep: usize) {
        let (driver, pool) = own(pool)?;
        if let Some(host) = &pool.host {
            host.trim(keep as u64);
            return Ok(());
        }
        address::collect(driver);
        let device = driver.devices.get(pool.device as usize).ok_or(Status::INVALID_DEVICE)?;
        lock(&device.memory).trim(keep as u64, driver).map(|_| ())
    }

    fn cuMemPoolSetAttribute(pool: usize, attribute: u32, value: *mut c_void) {
        let (_, pool) = own(pool)?;
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
        let (_, found) = own(pool)?;
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
        let (_, pool) = of(pool)?;
        if let Some(host) = &pool.host {
            return give_host_access(host, map, count);
        }
        check_access(pool.device, map, count)
    }

    fn cuMemPoolGetAccess(flags: *mut u32, pool: usize, place: *const MemLocation) {
        let (_, pool) = of(pool)?;
        if pool.managed.is_some() {
            // As NVIDIA's driver says of them: access is not given, it is everybody's.
            non_null(place)?;
            return put(flags, 0);
        }
        if let Some(host) = &pool.host {
            let told = is_host(place)? || host.is_told(location(place)? as u32);
            return put(flags, if told { 3 } else { 0 });
        }
        let device = location(place)?;
        put(flags, if device == pool.device as i32 { 3 } else { 0 })
    }
}
