//! Stream-ordered allocation and memory pools.
//!
//! An allocation is placed immediately, in memory that no stream uses any more (or that the same stream has
//! freed before, in whatever sizes). A free takes effect when its stream reaches it. A pool is a handle, a
//! device and attributes. All pools of a device share its window, and [keep](kept) what is freed there
//! together.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::abi::types::{MemAccessDesc, MemLocation};
use crate::memory::host_pool::HostPool;
use crate::memory::managed::advice::Place;
use crate::process::context::Context;
use crate::process::driver::{self, Device, Driver, Server, driver};
use client::handles::Slab;
use client::{Status, lock};

/// `CU_MEM_LOCATION_TYPE_NONE`.
pub(crate) const LOCATION_NONE: u32 = 0;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST`.
pub(crate) const LOCATION_HOST: u32 = 2;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
const LOCATION_HOST_NUMA: u32 = 3;
/// A pool's limit is rounded up to a multiple of this, as by NVIDIA's driver.
pub(crate) const LIMIT_STEP: u64 = 32 << 20;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const READ_WRITE: u32 = 3;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const PINNED: u32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
pub(crate) const MANAGED: u32 = 2;

/// The device of another process's pool that is on none that the program sees.
pub(crate) const HIDDEN: u32 = u32::MAX;

pub(crate) struct Pool {
    /// The ordinal of its device, or [`HIDDEN`].
    pub device: u32,
    pub default: bool,
    /// Its name for other processes, if it is shared.
    pub name: Option<PoolName>,
    /// The server, if it is another process's pool. Its memory is opened, not allocated.
    pub imported: Option<&'static Server>,
    /// The location of its allocations, if they are managed memory.
    pub managed: Option<Place>,
    /// Whether its allocations are pinned host memory.
    pub host: Option<HostPool>,
    /// What each other device was given: `CUmemAccess_flags`. The server maps device memory for all devices
    /// that reach it, and host memory for all, so only an imported pool's memory depends on this.
    pub access: Mutex<BTreeMap<u32, u32>>,
    /// Maximum size of its allocations together, in bytes. 0: no limit.
    pub limit: u64,
    /// The three reuse attributes. They are only stored: reuse is always the strictest kind.
    pub reuse: [AtomicI32; 3],
    /// The release threshold, in bytes.
    pub threshold: AtomicU64,
    /// Size of its allocations together, in bytes: now and at its maximum.
    pub used: AtomicU64,
    pub used_high: AtomicU64,
    /// The maximum of what was [reserved](Self::reserved).
    pub reserved_high: AtomicU64,
}

impl Pool {
    pub fn new(device: u32) -> Pool {
        Pool {
            device,
            default: false,
            name: None,
            imported: None,
            managed: None,
            host: None,
            access: Mutex::default(),
            limit: 0,
            reuse: [const { AtomicI32::new(1) }; 3],
            threshold: AtomicU64::new(0),
            used: AtomicU64::new(0),
            used_high: AtomicU64::new(0),
            reserved_high: AtomicU64::new(0),
        }
    }

    /// A pool of managed memory.
    pub fn managed(place: Place) -> Pool {
        let device = if place.0 == LOCATION_DEVICE { place.1 as u32 } else { 0 };
        Pool { managed: Some(place), ..Pool::new(device) }
    }

    /// A pool of pinned memory of the host.
    pub fn on_host() -> Pool {
        Pool { host: Some(HostPool::default()), ..Pool::new(0) }
    }

    /// What a device may do with its memory: `CUmemAccess_flags`.
    pub fn access_of(&self, device: u32) -> u32 {
        if self.host.is_none() && device == self.device {
            return READ_WRITE;
        }
        lock(&self.access).get(&device).copied().unwrap_or(0)
    }

    /// Its device, if the program sees it.
    pub fn own_device(&self) -> Result<Option<&'static Device>> {
        if self.device == HIDDEN { Ok(None) } else { driver::device(self.device as i32).map(Some) }
    }

    /// Its state as a pool of pinned host memory, if it is one.
    pub fn host(&self) -> Option<&HostPool> {
        self.host.as_ref()
    }

    /// The release threshold, in bytes.
    pub fn threshold(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed)
    }

    /// Number of bytes reserved for it: those in use, and those that a pool of the host keeps for the next
    /// allocations. Everything else belongs to the device.
    pub fn reserved(&self) -> u64 {
        self.used.load(Ordering::Relaxed) + self.host.as_ref().map_or(0, HostPool::idle)
    }

    /// The maximum of that.
    pub fn reserved_high(&self) -> u64 {
        let now = self.reserved();
        self.reserved_high.fetch_max(now, Ordering::Relaxed).max(now)
    }

    /// The device on which it allocates for a context. Managed memory without a device location is on the
    /// context's device.
    pub fn home(&self, context: &Context) -> u32 {
        match self.managed {
            Some((kind, _)) if kind != LOCATION_DEVICE => context.device,
            _ => self.device,
        }
    }

    /// Another process's pool.
    pub fn imported(device: u32, server: &'static Server, name: PoolName) -> Pool {
        Pool { name: Some(name), imported: Some(server), ..Pool::new(device) }
    }

    /// Counts an allocation, if there is room for it.
    pub fn take(&self, size: u64) -> Result {
        let with = |used: u64| used.checked_add(size).filter(|all| self.limit == 0 || *all <= self.limit);
        let before = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
        let used = before.map_err(|_| Status::OUT_OF_MEMORY)? + size;
        self.used_high.fetch_max(used, Ordering::Relaxed);
        self.reserved_high();
        Ok(())
    }

    /// How many bytes of a device's memory it keeps at most.
    fn keeps(&self, device: u32) -> u64 {
        let is_its =
            self.device == device && self.managed.is_none() && self.host.is_none() && self.imported.is_none();
        if is_its { self.threshold() } else { 0 }
    }

    /// An allocation was freed.
    pub fn give_back(&self, size: u64) {
        self.used.fetch_sub(size, Ordering::Relaxed);
    }
}

/// Counts a freed allocation of a pool. Does nothing if the pool is gone or the memory belongs to none.
pub(crate) fn gone(pool: usize, size: u64) {
    if let Some(pool) = POOLS.get(pool).filter(|_| pool != 0) {
        pool.give_back(size);
    }
}

/// How many bytes without allocations a device's memory keeps for all its pools when memory of pools is given
/// back, or other memory: then it keeps no more than `before`.
pub(crate) fn kept(device: u32, is_pools: bool, before: u64) -> u64 {
    let most = POOLS.all().iter().fold(0_u64, |all, pool| all.saturating_add(pool.keeps(device)));
    if is_pools { most } else { most.min(before) }
}

/// A pool of a device keeps less than before, or is gone.
pub(crate) fn keeps_less(driver: &Driver, pool: &Pool) {
    if let Some(device) = driver.devices.get(pool.device as usize) {
        lock(&device.memory).keep_only(kept(device.ordinal, false, u64::MAX), device);
    }
}

/// The handle of a new pool.
pub(crate) fn insert(pool: Pool) -> Result<usize> {
    POOLS.insert(Arc::new(pool)).ok_or(Status::OUT_OF_MEMORY)
}

pub(crate) static POOLS: Slab<Pool> = Slab::new(8);

/// The default pool of managed memory of each location, and the chosen one.
static MANAGED_POOLS: Mutex<BTreeMap<Place, (usize, usize)>> = Mutex::new(BTreeMap::new());

static DEFAULTS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// The default pool of pinned host memory, and the chosen one. 0: not made yet.
static HOST_POOLS: Mutex<(usize, usize)> = Mutex::new((0, 0));

/// The pool that each device allocates from. 0: its default pool.
pub(crate) static CURRENT: [AtomicUsize; client::channel::MAX_DEVICES as usize] =
    [const { AtomicUsize::new(0) }; client::channel::MAX_DEVICES as usize];

pub(crate) fn default_pool(device: i32) -> Result<usize> {
    let device = driver::device(device)?;
    let mut defaults = lock(&DEFAULTS);
    while defaults.len() <= device.ordinal as usize {
        let next = defaults.len() as u32;
        defaults.push(insert(Pool { default: true, ..Pool::new(next) })?);
    }
    Ok(defaults[device.ordinal as usize])
}

pub(crate) fn current_pool(device: i32) -> Result<usize> {
    let chosen = CURRENT
        .get(usize::try_from(device).map_err(|_| Status::INVALID_DEVICE)?)
        .map_or(0, |c| c.load(Ordering::Relaxed));
    if chosen != 0 && POOLS.get(chosen).is_some() { Ok(chosen) } else { default_pool(device) }
}

/// The pool of a handle.
pub(crate) fn of(handle: usize) -> Result<(&'static Driver, Arc<Pool>)> {
    let driver = driver()?;
    Ok((driver, POOLS.get(handle).ok_or(Status::INVALID_VALUE)?))
}

/// The same, for a pool that must not be another process's.
pub(crate) fn own(handle: usize) -> Result<(&'static Driver, Arc<Pool>)> {
    of(handle)
        .and_then(|found| if found.1.imported.is_some() { Err(Status::INVALID_VALUE) } else { Ok(found) })
}

/// The device that a location names.
///
/// # Errors
/// `NOT_SUPPORTED` for the host and its NUMA nodes; `INVALID_VALUE` for the thread's NUMA node, where no pool
/// is (`cuMemPoolCreate`), and for what is no location.
pub(crate) fn location(location: MemLocation) -> Result<i32> {
    match location.kind {
        LOCATION_DEVICE => driver::device(location.id).map(|_| location.id),
        LOCATION_HOST | LOCATION_HOST_NUMA => refuse_form!("a memory pool that is not in device memory"),
        _ => Err(Status::INVALID_VALUE),
    }
}

/// The default pool of managed memory of a location, and the one that was last chosen for it.
pub(crate) fn managed_pools(place: Place) -> Result<(usize, usize)> {
    let mut pools = lock(&MANAGED_POOLS);
    if let Some(found) = pools.get(&place) {
        return Ok(*found);
    }
    let made = insert(Pool { default: true, ..Pool::managed(place) })?;
    pools.insert(place, (made, made));
    Ok((made, made))
}

pub(crate) fn set_managed(place: Place, pool: usize) -> Result {
    let (default, _) = managed_pools(place)?;
    if own(pool)?.1.managed != Some(place) {
        return Err(Status::INVALID_VALUE);
    }
    lock(&MANAGED_POOLS).insert(place, (default, pool));
    Ok(())
}

/// The default pool of pinned host memory, and the one that was last chosen.
pub(crate) fn host_pools() -> Result<(usize, usize)> {
    let mut pools = lock(&HOST_POOLS);
    if pools.0 == 0 {
        let made = insert(Pool { default: true, ..Pool::on_host() })?;
        *pools = (made, made);
    }
    Ok(*pools)
}

pub(crate) fn set_host(pool: usize) -> Result {
    own(pool)?.1.host.as_ref().ok_or(Status::INVALID_VALUE)?;
    host_pools()?;
    lock(&HOST_POOLS).1 = pool;
    Ok(())
}

/// A context is being destroyed, and kernels no longer reach the pinned memory that was mapped in it. So no
/// pool of the host gives out the memory that it keeps: an allocation gets new memory, which is mapped again.
pub(crate) fn forget() {
    for host in POOLS.all().iter().filter_map(|pool| pool.host()) {
        host.trim(0);
    }
}

/// Checks what a program gives devices to do with memory of a device: pairs of a device and its
/// `CUmemAccess_flags`. The memory's own device can always read and write it. If the program does not see
/// that one (`None`), the server tells later whether the others reach it.
pub(crate) fn check_access(own: Option<&Device>, map: &[MemAccessDesc]) -> Result<Vec<(u32, u32)>> {
    let check = |access: &MemAccessDesc| {
        if access.location.kind != LOCATION_DEVICE || !matches!(access.flags, 0 | 1 | READ_WRITE) {
            return Err(Status::INVALID_VALUE);
        }
        let to = driver::device(access.location.id)?;
        match (own, access.flags) {
            (Some(own), flags) if own.ordinal == to.ordinal => match flags {
                READ_WRITE => {}
                1 => return Err(Status::NOT_SUPPORTED),
                _ => return Err(Status::INVALID_DEVICE),
            },
            (None, _) | (_, 0) => {}
            (Some(own), _) if to.as_peer_of(own)?.is_some_and(|info| info.can_access) => {}
            _ => return Err(Status::INVALID_DEVICE),
        }
        Ok((to.ordinal, access.flags))
    };
    map.iter().map(check).collect()
}

/// The access that devices other than `own` have, of what a program has set for each device.
pub(crate) fn access_of_others(own: u32, set: &BTreeMap<u32, u32>) -> Vec<MemAccessDesc> {
    let others = set.iter().filter(|(device, flags)| **device != own && **flags != 0);
    let described = |(device, flags): (&u32, &u32)| {
        let location = MemLocation { kind: LOCATION_DEVICE, id: *device as i32 };
        MemAccessDesc { location, flags: *flags }
    };
    others.map(described).collect()
}

/// Gives a pool a name that all processes can use.
pub(crate) type PoolName = [u8; 16];
