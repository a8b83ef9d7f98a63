//! Pinned host memory.
//!
//! With unified addressing a kernel may be given the address of any pinned memory as it is, whatever the flags say (PyTorch does so with small arrays of pointers). A device that shares this
//! process's memory has all of it mapped from the start. For one that does not, a piece is [mirrored](managed::pinned) when its address first appears where a kernel finds it: among a launch's
//! parameters, or in the program's hands ([`reach`]).

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code, refuse_form};
use crate::memory::managed::mirror;
use crate::memory::{host_pool, pending_writes};
use crate::process::context::Context;
use crate::process::driver::{Driver, driver, unique_id};
use crate::process::stream::Stream;
use crate::process::{context, copy_fences};
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

/// `CU_MEMHOSTREGISTER_READ_ONLY`.
const READ_ONLY: u32 = 8;

/// The process's pinned memory.
pub(crate) static REGIONS: Regions<HostTag> = Regions::new();

/// The pieces that kernels can reach, by address, each with the context that it was mapped in.
static MAPPED: Mutex<BTreeMap<usize, &'static Context>> = Mutex::new(BTreeMap::new());

/// The pieces that kernels cannot reach yet and may, by address, with their sizes.
static UNREACHED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// The addresses that [`UNREACHED`] lies within: what every launch compares its parameters with, without a lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);

static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// Written while a piece goes from this process's hands into both sides'.
static CHANGING: RwLock<()> = RwLock::new(());

/// While the guard lives, what [`Regions::range`] says stays true.
pub(crate) fn steady() -> RwLockReadGuard<'static, ()> {
    CHANGING.read().unwrap_or_else(PoisonError::into_inner)
}

fn with_unreached<R>(change: impl FnOnce(&mut BTreeMap<usize, usize>) -> R) -> R {
    let mut unreached = lock(&UNREACHED);
    let result = change(&mut unreached);
    let end = unreached.last_key_value().map_or(0, |(base, size)| base + size);
    LOWEST.store(unreached.first_key_value().map_or(usize::MAX, |(base, _)| *base) as u64, Ordering::Release);
    HIGHEST.store(end as u64, Ordering::Release);
    result
}

/// Whether kernels can reach what is at an address of pinned memory where it is.
pub(crate) fn is_mapped(pointer: u64) -> bool {
    REGIONS.find(pointer as usize).is_some_and(|(base, ..)| lock(&MAPPED).contains_key(&base))
}

/// Pinned memory that an address lies in: first address, size, and what is known of it.
pub(crate) fn find(pointer: u64) -> Option<(usize, usize, HostTag)> {
    REGIONS.any(pointer as usize)
}

/// Whether a kernel that is given the address reaches what is there.
pub(crate) fn is_reached(pointer: u64) -> bool {
    is_mapped(pointer) || mirror::is_here(pointer) || unreached_at(pointer).is_some()
}

/// The piece at an address that kernels cannot reach yet.
fn unreached_at(pointer: u64) -> Option<(usize, usize)> {
    let unreached = lock(&UNREACHED);
    let (base, size) = unreached.range(..=pointer as usize).next_back()?;
    (pointer as usize - base < *size).then_some((*base, *size))
}

/// Lets kernels reach the pinned memory whose addresses are among a launch's parameters.
#[inline]
pub(crate) fn reach(driver: &'static Driver, parameters: &[u8]) {
    let within = LOWEST.load(Ordering::Acquire)..HIGHEST.load(Ordering::Acquire);
    if within.is_empty() {
        return;
    }
    for word in parameters.chunks_exact(8) {
        let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
        if within.contains(&word) {
            reach_at(driver, word);
        }
    }
}

/// Lets kernels reach the pinned memory at an address, if there is any that they cannot reach yet. Where that cannot be, the log says why, and kernels find nothing there.
#[cold]
fn reach_at(driver: &'static Driver, pointer: u64) {
    let _changing = CHANGING.write().unwrap_or_else(PoisonError::into_inner);
    let Some((base, size)) = unreached_at(pointer) else { return };
    let Some((_, _, tag)) = REGIONS.find(base) else { return };
    let context = if tag.context.is_alive() { Ok(tag.context) } else { context::current() };
    if let Err(status) = context.and_then(|context| mirror(driver, context, base, size)) {
        log::warn(format_args!(
            "kernels do not reach the {size} bytes of pinned memory at {base:#x}: {status}"
        ));
    }
    with_unreached(|unreached| unreached.remove(&base));
}

/// Lets kernels reach the piece that begins at `base` by mirroring it. Copies that are under way end first.
fn mirror(driver: &'static Driver, context: &'static Context, base: usize, size: usize) -> Result {
    pending_writes::settle_all(driver, base, size)?;
    REGIONS.set_elsewhere(base, true);
    mirror::adopt(driver, context, base as u64, size as u64)
        .inspect_err(|_| REGIONS.set_elsewhere(base, false))
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

/// Lets kernels reach the piece that begins at `base` if the device shares it; otherwise notes that they do not, if they may.
fn offer(driver: &Driver, context: &'static Context, base: usize, size: usize, flags: u32) {
    copy_fences::host_sees();
    let device = driver.devices.get(context.device as usize);
    let shares = device.is_some_and(|device| device.shares_host_memory);
    if (!shares || map(driver, context, base, size).is_err()) && flags & READ_ONLY == 0 {
        with_unreached(|unreached| unreached.insert(base, size));
    }
}

/// The piece that begins at `base` is about to go. `keep`: its memory stays the program's.
fn unmap(driver: &'static Driver, base: usize, keep: bool) {
    with_unreached(|unreached| unreached.remove(&base));
    mirror::release(driver, base as u64, keep);
    if let Some(context) = lock(&MAPPED).remove(&base) {
        // A lost session has nothing mapped.
        let _ = driver.session.append(&HostUnmap { context: context.id, address: base as u64 });
    }
}

/// What was mapped in a context is so no more: it is about to go on the server.
pub(crate) fn forget(driver: &'static Driver, context: &'static Context) {
    for base in mirror::of_context(context) {
        mirror::release(driver, base, true);
        REGIONS.set_elsewhere(base as usize, false);
    }
    lock(&MAPPED).retain(|_, other| !std::ptr::eq(*other, context));
}

/// Frees and registrations wait for all work that may use the memory, whichever device does it.
pub(crate) fn settle_all() -> Result {
    let driver = driver()?;
    for device in &driver.devices {
        if device.primary.is_alive() && device.primary.is_busy() {
            device.primary.synchronize()?;
        }
    }
    let context = context::current()?;
    if context.is_busy() { context.synchronize() } else { Ok(()) }
}

/// Makes pinned memory; its address.
pub(crate) fn pin_new(
    driver: &'static Driver,
    context: &'static Context,
    size: usize,
    flags: u32,
) -> Result<usize> {
    let tag = HostTag { context, flags, buffer: unique_id() };
    let address = REGIONS.alloc(driver.session.port(), size, tag).map_err(|error| {
        log::warn(format_args!("{size} bytes of pinned memory: {}", error.line()));
        Status::OUT_OF_MEMORY
    })?;
    offer(driver, context, address, size, 0);
    Ok(address)
}

/// Pinned memory that was made here and the last that uses it: a mark on a stream.
pub(crate) type Used = (usize, Arc<Stream>, u64);

/// Takes pinned memory that was made here away. No work may use it.
pub(crate) fn remove(driver: &'static Driver, address: usize) {
    unmap(driver, address, false);
    REGIONS.remove(driver.session.port(), address, true);
}

/// Takes pinned memory that was made here away when it is used no more.
///
/// Taking registered memory away waits for all that the device does: so neither this thread does it, whose next call may be what a stream waits for, nor the one that makes the
/// streams' calls.
pub(crate) fn remove_later(driver: &'static Driver, pieces: Vec<Used>) {
    let wait = move || {
        for (address, stream, mark) in pieces {
            // With a lost session, nobody uses it.
            let _ = driver.session.wait_progress(|| stream.has_passed(driver, mark));
            remove(driver, address);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("rgpu-unpins".into()).spawn(wait) {
        log::error(format_args!("no thread to free pinned memory when it is done with: {error}; it stays"));
    }
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
    let address = pin_new(driver, context, size, flags)?;
    if flags & DEVICEMAP != 0 {
        // Asked for by name, it is reached also by kernels that find its address in other memory.
        reach_at(driver, address as u64);
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
        // What a pool has is freed as device memory is.
        if !REGIONS.begins_at(p as usize, true) || host_pool::find(p as u64).is_some() {
            return Err(Status::INVALID_VALUE);
        }
        settle_all()?;
        unmap(driver, p as usize, false);
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
        if REGIONS.is_allocated(p as usize) {
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
        offer(driver, context, p as usize, size, flags);
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
            let known = find(p as u64).is_some();
            return Err(if known { Status::INVALID_VALUE } else { code::HOST_MEMORY_NOT_REGISTERED });
        }
        settle_all()?;
        unmap(driver, p as usize, true);
        REGIONS.remove(driver.session.port(), p as usize, false).map(|_| ()).ok_or(code::HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetFlags(flags: *mut u32, p: *mut c_void) {
        driver()?;
        let (_, _, tag) = find(p as u64).ok_or(Status::INVALID_VALUE)?;
        // With unified addressing all of it is mapped.
        put(flags, tag.flags | DEVICEMAP)
    }

    fn cuMemHostGetDevicePointer_v2(dptr: *mut u64, p: *mut c_void, flags: u32) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(dptr)?;
        let (driver, context) = context::ready()?;
        let found = find(p as u64).filter(|_| flags == 0);
        let (base, size, _) = found.ok_or(Status::INVALID_VALUE)?;
        reach_at(driver, p as u64);
        if mirror::is_here(p as u64) {
            return put(dptr, p as u64);
        }
        match map(driver, context, base, size) {
            Ok(()) => put(dptr, p as u64),
            Err(Status::NOT_SUPPORTED) => refuse_form(
                "cuMemHostGetDevicePointer of memory that cannot be mirrored for a GPU that does not share it",
                &SAID,
            ),
            Err(status) => Err(status),
        }
    }
}
