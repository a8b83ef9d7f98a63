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
use crate::process::driver::{Device, Driver, Server, Tag, driver};
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::memory::DeviceMemory;
use client::ops::memory::{MemAlloc, MemFree, is_managed};
use client::seq::Seq;
use client::{Status, lock};

/// An allocation that was freed in stream order. It can be reused when the stream has passed the mark.
pub(crate) struct Leaving {
    address: u64,
    /// Distinguishes it from a later allocation at its address.
    buffer: u64,
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
        stream_table::reap(context.server);
        collect(driver, context.server);
    }
    // Destroyed textures go before the memory that they are of.
    texture::reap(context.server);
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

/// Frees an allocation immediately, unless its context has taken it along. No work may use it.
pub(crate) fn release(driver: &'static Driver, device: &Device, address: u64, buffer: u64) {
    let mut memory = lock(device.memory_of(address));
    if memory.find(address).is_none_or(|(base, found)| base != address || found.tag.buffer != buffer) {
        return;
    }
    if is_managed(address) {
        drop(memory);
        // What cannot be freed now goes with the session.
        let _ = managed::free(driver, device, address);
        return;
    }
    // In this order, so that the address is reused only after the server knows that it is free.
    if device.server.session.append(&MemFree { address }).is_ok() {
        free(device, &mut memory, address);
    }
}

/// Frees an allocation of a device that no work uses, and keeps as much memory as its pools ask for.
pub(crate) fn free(device: &Device, memory: &mut DeviceMemory<Tag>, address: u64) {
    let keep = |tag: &Tag, before| pool::kept(device.ordinal, tag.pool, before);
    memory.free_and_keep(address, keep, device);
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
    let mark = stream.mark_as_operation()?;
    let (size, pool, buffer) = {
        let mut memory = lock(device.memory_of(address));
        let (base, allocation) = memory.find(address).ok_or(Status::INVALID_VALUE)?;
        // Managed memory can be freed in stream order only if it belongs to a pool.
        let is_pools = !is_managed(address) || allocation.tag.pool != 0;
        if base != address || allocation.tag.freed || !is_pools {
            return Err(Status::INVALID_VALUE);
        }
        let (size, Tag { pool, buffer, .. }) = (allocation.size, allocation.tag);
        if let Some(tag) = memory.tag_mut(base) {
            tag.freed = true;
        }
        (size, pool, buffer)
    };
    pool::gone(pool, size);
    lock(&LEAVING).push(Leaving { address, buffer, size, device: device.ordinal, pool, stream, mark });
    collect(driver, device.server);
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

/// Completes the frees of a server's memory that streams have passed. Another server may not answer, so its
/// own calls complete those of its memory.
pub(crate) fn collect(driver: &'static Driver, server: &Server) {
    pool_export::collect(driver, server);
    let is_its = |l: &Leaving| {
        driver.devices.get(l.device as usize).is_some_and(|device| std::ptr::eq(device.server, server))
    };
    release_where(driver, |l| is_its(l) && context::has_freed(&l.stream, l.mark, Some(server)));
}

/// Completes the frees that are over.
fn release_where(driver: &'static Driver, is_over: impl Fn(&Leaving) -> bool) {
    for l in take_where(is_over) {
        if let Some(device) = driver.devices.get(l.device as usize) {
            release(driver, device, l.address, l.buffer);
        }
    }
}

/// Takes the frees that are over off the list.
fn take_where(is_over: impl Fn(&Leaving) -> bool) -> Vec<Leaving> {
    lock(&LEAVING).extract_if(.., |l| is_over(l)).collect()
}

/// Waits for the streams that have frees pending on a device. Returns false if there are none.
pub(crate) fn wait_for_leaving(driver: &'static Driver, device: u32) -> bool {
    let Some(home) = driver.devices.get(device as usize).map(|device| device.server) else { return false };
    let waiting: Vec<(Arc<Stream>, Seq)> =
        lock(&LEAVING).iter().filter(|l| l.device == device).map(|l| (l.stream.clone(), l.mark)).collect();
    for (stream, mark) in &waiting {
        context::wait_until_freed(stream, *mark, Some(home));
    }
    collect(driver, home);
    !waiting.is_empty()
}

/// Drops all memory of a device that the server resets, and closes what its primary context has imported.
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
    pool_export::forget(driver, device.primary);
    graph_chunks::forget(driver, device.primary);
    graph_chunks::trim(driver, device.ordinal);
    lock(&LEAVING).retain(|l| l.device != device.ordinal);
    lock(&device.memory).reset();
    let mut globals = device.server.globals.write().unwrap_or_else(PoisonError::into_inner);
    globals.retain(|_, (_, owner)| owner.device != device.ordinal);
}

/// Frees the memory of a context that is being destroyed. What streams of other contexts are to free comes
/// back when they reach that.
pub(crate) fn forget(driver: &'static Driver, context: &'static Context) {
    // Its own streams are done, also with memory of others. What a lost server's streams would have waited
    // for may not be.
    let is_lost = context.session().check().is_err();
    let home = |l: &Leaving| driver.devices.get(l.device as usize).map(|device| device.server);
    release_where(driver, |l| {
        let is_its = std::ptr::eq(l.stream.context, context);
        is_its && (!is_lost || context::has_freed(&l.stream, l.mark, home(l)))
    });
    managed::forget(driver, context, pool::gone);
    pool_export::forget(driver, context);
    graph_chunks::forget(driver, context);
    // A device of another server, which may not answer, has none of its memory.
    for device in driver.devices.iter().filter(|device| std::ptr::eq(device.server, context.server)) {
        let is_its = |tag: &Tag| std::ptr::eq(tag.context, context) && !tag.freed;
        let addresses = lock(&device.memory).addresses_where(is_its);
        for address in addresses {
            let Some(found) = address::find(driver, address) else { continue };
            pool::gone(found.pool, found.size);
            release(driver, device, address, found.buffer);
        }
    }
    let mut globals = context.server.globals.write().unwrap_or_else(PoisonError::into_inner);
    globals.retain(|_, (_, owner)| !std::ptr::eq(*owner, context));
}

/// Waits for all work of all devices, as freeing pinned memory does, because any device may be using it.
pub(crate) fn settle_all() -> Result {
    settle(context::busy(), context::current()?)
}

/// Waits for all work of contexts and of the current one. Only errors of the current one are returned. Those
/// of others are left to the calls that concern them.
pub(crate) fn settle(
    contexts: impl IntoIterator<Item = &'static Context>,
    current: &'static Context,
) -> Result {
    quiesce(contexts.into_iter().filter(|context| !std::ptr::eq(*context, current)))?;
    if current.is_busy() { synchronize(current) } else { Ok(()) }
}

/// Waits for all work of contexts that use some memory. Only errors of the current one are returned, if it is
/// among them: work of others must not keep the memory from being freed.
pub(crate) fn settle_users(users: Vec<&'static Context>) -> Result {
    match context::current().ok().filter(|current| users.iter().any(|user| std::ptr::eq(*user, *current))) {
        Some(current) => settle(users, current),
        None => quiesce(users),
    }
}

/// Waits for all work of contexts whose servers are not lost. Their errors are left to the calls that concern
/// them.
pub(crate) fn quiesce(contexts: impl IntoIterator<Item = &'static Context>) -> Result {
    for context in contexts {
        if context.is_alive() && context.is_busy() && !context.is_given_up() {
            wait(context, Context::quiesce)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::handle::{ContextId, StreamId};
    use client::memory::Backing;

    /// A server that has memory.
    struct Full;

    impl Backing for Full {
        fn grow(&self, _device: u32, _address: u64, _size: u64) -> Result {
            Ok(())
        }

        fn shrink(&self, _device: u32, _address: u64, _size: u64) -> Result {
            Ok(())
        }
    }

    /// Memory of the first server's device, which a stream of the second one is to free.
    struct Freed {
        driver: &'static Driver,
        contexts: [&'static Context; 2],
        stream: Arc<Stream>,
        address: u64,
    }

    impl Freed {
        fn new() -> Freed {
            let servers = [(); 2].map(|()| Server::unused());
            let driver = Driver::for_tests(&servers);
            let contexts = [0, 1].map(|n| Context::new(ContextId(n), servers[n as usize], n, 0, false));
            let id = StreamId(client::channel::MAX_CONTEXTS + 1);
            let stream = Arc::new(Stream::new(id, contexts[1], 1, 0, false));
            let tag =
                Tag { context: contexts[0], buffer: unique_id(), pool: 0, sync_memops: false, freed: false };
            let address = lock(&driver.devices[0].memory).alloc(4096, tag, &Full).unwrap();
            stream.work(&client::ops::stream::StreamMark { stream: stream.id }).unwrap();
            free_in_order(driver, address, stream.clone()).unwrap();
            let freed = Freed { driver, contexts, stream, address };
            assert!(freed.is_there());
            freed
        }

        fn is_there(&self) -> bool {
            lock(&self.driver.devices[0].memory).find(self.address).is_some()
        }
    }

    #[test]
    fn memory_that_a_destroyed_contexts_stream_was_to_free_comes_back() {
        let freed = Freed::new();
        forget(freed.driver, freed.contexts[1]);
        assert!(!freed.is_there());
    }

    #[test]
    fn memory_of_a_destroyed_context_stays_until_another_ones_stream_frees_it() {
        let freed = Freed::new();
        let home = freed.driver.devices[0].server;
        forget(freed.driver, freed.contexts[0]);
        collect(freed.driver, home);
        assert!(freed.is_there(), "the stream may use it");
        freed.stream.is_synced(freed.stream.mark().unwrap());
        collect(freed.driver, home);
        assert!(!freed.is_there());
    }

    #[test]
    fn memory_is_kept_for_a_pool_until_the_pool_is_gone() {
        const SIZE: u64 = 512 << 20;
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        let context = Context::new(ContextId(0), server, 0, 0, false);
        let device = &driver.devices[0];
        let pool = pool::insert(Pool { threshold: u64::MAX.into(), ..Pool::new(0) }).unwrap();
        let address = |pool| {
            let tag = Tag { context, buffer: unique_id(), pool, sync_memops: false, freed: false };
            lock(&device.memory).alloc(SIZE, tag, &Full).unwrap()
        };
        let [pools, other] = [address(pool), address(0)];
        free(device, &mut lock(&device.memory), pools);
        assert_eq!(lock(&device.memory).chunks().len(), 2);
        free(device, &mut lock(&device.memory), other);
        assert_eq!(lock(&device.memory).chunks().len(), 1);
        assert_eq!(address(pool), pools);
        free(device, &mut lock(&device.memory), pools);
        let gone = pool::POOLS.remove(pool).unwrap();
        pool::keeps_less(driver, &gone);
        assert!(lock(&device.memory).chunks().is_empty());
    }

    #[test]
    fn memory_of_another_processs_pool_goes_with_a_reset() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        // Nothing answers, and nothing needs to.
        server.lose();
        let (device, address) = (&driver.devices[0], 0x5eed_3000);
        let name = pool_export::Name { pool: [1; 16], token: [2; 16], offset: 0, size: 4096 };
        let imported = pool_export::Imported { name, context: device.primary, leaving: None };
        lock(&pool_export::IMPORTED).insert(address, imported);
        reset(driver, device);
        assert!(!lock(&pool_export::IMPORTED).contains_key(&address));
    }

    #[test]
    fn a_free_does_not_take_what_is_at_its_address_by_then() {
        let freed = Freed::new();
        let device = &freed.driver.devices[0];
        if let Some(tag) = lock(&device.memory).tag_mut(freed.address) {
            *tag = Tag { buffer: unique_id(), freed: false, ..*tag };
        }
        freed.stream.is_synced(freed.stream.mark().unwrap());
        collect(freed.driver, device.server);
        assert!(freed.is_there());
    }

    #[test]
    fn what_a_lost_servers_stream_was_to_free_comes_back_once_its_own_server_is_idle() {
        let freed = Freed::new();
        let [home, lost] = freed.contexts;
        let mark = home.legacy().work(&client::ops::stream::StreamMark { stream: home.legacy().id }).unwrap();
        lost.server.lose();
        freed.stream.finished.store(true, std::sync::atomic::Ordering::Release);
        forget(freed.driver, lost);
        collect(freed.driver, home.server);
        assert!(freed.is_there(), "what the stream waited for may still be under way");
        home.is_synced(mark);
        collect(freed.driver, home.server);
        assert!(!freed.is_there());
    }
}
