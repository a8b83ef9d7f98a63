//! Stream-ordered allocation. Freed memory is reused when its stream has reached the free.

use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::result::Result;
use crate::memory::managed::shared_blocks;
use crate::memory::pool::{self, Pool};
use crate::memory::{
    address, device_memory, graph_chunks, graph_memory, host_pool, managed, managed_advice, pool_export,
    texture, virtual_memory,
};
use crate::process::context::{self, Context};
use crate::process::driver::{Device, Driver, Tag, driver};
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::ops::memory::{MemAlloc, MemFree, is_managed};
use client::seq::Seq;
use client::{Status, lock};

/// An allocation that was freed in stream order. It can be reused when the stream has passed the mark.
pub(crate) struct Leaving {
    address: u64,
    size: u64,
    device: u32,
    pool: usize,
    stream: Arc<Stream>,
    mark: Seq,
}

pub(crate) static LEAVING: Mutex<Vec<Leaving>> = Mutex::new(Vec::new());

/// Waits for all work of a context, and completes its stream-ordered frees.
pub(crate) fn synchronize(context: &'static Context) -> Result {
    wait(context, Context::synchronize)?
}

/// Waits for work of a context with `until_done`, and then does what such a wait makes possible: see
/// [`synchronize`].
fn wait<T>(context: &'static Context, until_done: impl FnOnce(&'static Context) -> T) -> Result<T> {
    let driver = driver()?;
    let busy = context.is_busy();
    let result = until_done(context);
    shared_blocks::after_wait(driver);
    if busy {
        stream_table::reap();
        collect(driver);
    }
    // Destroyed textures go before the memory that they are of.
    texture::reap();
    Ok(result)
}

/// Allocates on the current device.
pub(crate) fn alloc(
    driver: &'static Driver,
    context: &'static Context,
    device: u32,
    size: u64,
    pool: usize,
) -> Result<u64> {
    let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
    let tag = Tag { context, buffer: unique_id(), pool, sync_memops: false, freed: false };
    let place = || device_memory::place(device, &device.memory, size, tag, device);
    let address = with_room(driver, device.ordinal, place)?;
    device.server.session.append(&MemAlloc { address, size })?;
    Ok(address)
}

/// Allocates. If there is no room, completes what is being given back, pending frees of streams, and frees
/// what graphs keep, and tries again after each.
fn with_room(driver: &'static Driver, device: u32, allocate: impl Fn() -> Result<u64>) -> Result<u64> {
    let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
    let allocated = device_memory::or_returned(device, &allocate);
    if allocated == Err(Status::OUT_OF_MEMORY)
        && wait_for_leaving(driver, device.ordinal) | graph_chunks::trim(driver, device.ordinal)
    {
        return device_memory::or_returned(device, allocate);
    }
    allocated
}

/// Allocates managed memory on a context's device, from a pool or none (0).
pub(crate) fn alloc_managed(
    driver: &'static Driver,
    context: &'static Context,
    size: u64,
    pool: usize,
) -> Result<u64> {
    with_room(driver, context.device, || managed::alloc(driver, context, size, pool))
}

/// Allocates for a pool memory that no stream has used. The memory belongs to the pool's device, which need
/// not be that of the stream and its context.
pub(crate) fn alloc_for_pool(
    driver: &'static Driver,
    context: &'static Context,
    size: u64,
    handle: usize,
    pool: &Pool,
) -> Result<u64> {
    let home = pool.home(context);
    let device = driver.devices.get(home as usize).ok_or(Status::INVALID_DEVICE)?;
    let context = if context.device == home { context } else { device.primary };
    let Some(place) = pool.managed else { return alloc(driver, context, home, size, handle) };
    let address = alloc_managed(driver, context, size, handle)?;
    managed_advice::prefer(address, size, place).map(|()| address)
}

/// Frees an allocation immediately. No work may use it.
pub(crate) fn release(driver: &'static Driver, device: &Device, address: u64) {
    if is_managed(address) {
        // What cannot be freed now goes with the session.
        let _ = managed::free(driver, device, address);
        return;
    }
    // In this order, so that the address is reused only after the server knows that it is free.
    let mut memory = lock(&device.memory);
    if device.server.session.append(&MemFree { address }).is_ok() {
        memory.free(address, device);
    }
}

/// Frees in stream order. The memory can be reused when the stream has reached the free.
pub(crate) fn free_in_order(driver: &'static Driver, address: u64, stream: Arc<Stream>) -> Result {
    if graph_memory::freed(address, Some(&stream))? || host_pool::free(address, stream.clone())? {
        return Ok(());
    }
    if virtual_memory::is_here(address) {
        return pool_export::free_in_order(driver, address, stream);
    }
    let device = device_memory::device_of(driver, address).ok_or(Status::INVALID_VALUE)?;
    // If the stream's server is lost, nothing is freed.
    let mark = stream.mark()?;
    let (size, pool) = {
        let mut memory = lock(device.memory_of(address));
        let (base, allocation) = memory.find(address).ok_or(Status::INVALID_VALUE)?;
        // Managed memory can be freed in stream order only if it belongs to a pool.
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
    lock(&LEAVING).push(Leaving { address, size, device: device.ordinal, pool, stream, mark });
    collect(driver);
    Ok(())
}

/// An allocation of the same size and pool that was freed earlier in the same stream, so that earlier work on
/// it comes before all later work.
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

/// Completes the frees that streams have passed.
pub(crate) fn collect(driver: &'static Driver) {
    pool_export::collect(driver);
    let gone: Vec<Leaving> = {
        let mut leaving = lock(&LEAVING);
        if leaving.is_empty() {
            return;
        }
        let home = |l: &Leaving| driver.devices.get(l.device as usize).map(|device| device.server);
        let is_over =
            |l: &mut Leaving| home(l).is_some_and(|home| context::has_freed(&l.stream, l.mark, home));
        leaving.extract_if(.., is_over).collect()
    };
    for l in gone {
        if let Some(device) = driver.devices.get(l.device as usize) {
            release(driver, device, l.address);
        }
    }
}

/// Waits for the streams that have frees pending on a device. Returns false if there are none.
pub(crate) fn wait_for_leaving(driver: &'static Driver, device: u32) -> bool {
    let Some(home) = driver.devices.get(device as usize).map(|device| device.server) else { return false };
    let waiting: Vec<(Arc<Stream>, Seq)> =
        lock(&LEAVING).iter().filter(|l| l.device == device).map(|l| (l.stream.clone(), l.mark)).collect();
    for (stream, mark) in &waiting {
        context::wait_until_freed(stream, *mark, home);
    }
    collect(driver);
    !waiting.is_empty()
}

/// Drops all memory of a device that the server resets.
pub(crate) fn reset(driver: &'static Driver, device: &Device) {
    for memory in [&device.memory, &device.managed] {
        let memory = lock(memory);
        // What was freed in stream order is no longer counted.
        for address in memory.addresses_where(|tag| tag.pool != 0 && !tag.freed) {
            if let Some((_, allocation)) = memory.find(address) {
                pool::gone(allocation.tag.pool, allocation.size);
            }
        }
    }
    managed::reset(driver, device);
    graph_chunks::forget(device.primary);
    graph_chunks::trim(driver, device.ordinal);
    lock(&LEAVING).retain(|l| l.device != device.ordinal);
    lock(&device.memory).reset();
    let mut globals = device.server.globals.write().unwrap_or_else(PoisonError::into_inner);
    globals.retain(|_, (_, owner)| owner.device != device.ordinal);
}

/// Frees the memory of a context that is being destroyed.
pub(crate) fn forget(driver: &'static Driver, context: &'static Context) {
    managed::forget(driver, context, pool::gone);
    pool_export::forget(driver, context);
    graph_chunks::forget(context);
    lock(&LEAVING).retain(|l| !std::ptr::eq(l.stream.context, context));
    for device in &driver.devices {
        let addresses = lock(&device.memory).addresses_where(|tag| std::ptr::eq(tag.context, context));
        for address in addresses {
            if let Some(found) = address::find(driver, address) {
                pool::gone(found.pool, found.size);
            }
            release(driver, device, address);
        }
    }
    let mut globals = context.server.globals.write().unwrap_or_else(PoisonError::into_inner);
    globals.retain(|_, (_, owner)| !std::ptr::eq(*owner, context));
}

/// Waits for all work of all devices, as freeing pinned memory does, because any device may be using it.
pub(crate) fn settle_all() -> Result {
    let driver = driver()?;
    settle(driver.devices.iter().map(|device| device.primary), context::current()?)
}

/// Waits for all work of contexts and of the current one. Only errors of the current one are returned. Those
/// of others are left to the calls that concern them.
pub(crate) fn settle(
    contexts: impl IntoIterator<Item = &'static Context>,
    current: &'static Context,
) -> Result {
    let others = contexts.into_iter().filter(|context| !std::ptr::eq(*context, current));
    for other in others.filter(|other| other.is_alive() && other.is_busy() && !other.is_given_up()) {
        wait(other, Context::quiesce)?;
    }
    if current.is_busy() { synchronize(current) } else { Ok(()) }
}
