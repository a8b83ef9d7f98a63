//! Stream-ordered allocation. Freed memory is used again when its stream has reached the free, or at once by
//! the same stream.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::abi::result::Result;
use crate::memory::managed::shared_blocks;
use crate::memory::pool::{self, Pool};
use crate::memory::{
    address, device_memory, graph_chunks, graph_memory, host_pool, managed, managed_advice, pending_writes,
    pool_export, texture, virtual_memory,
};
use crate::process::context::{self, Context};
use crate::process::driver::{Device, Driver, Freeing, Memory, Server, Tag, driver};
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::memory::InOrder;
use client::ops::memory::{MemAlloc, MemFree, is_managed};
use client::seq::Seq;
use client::{Status, lock};

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
    let tag = Tag { context, buffer: unique_id(), pool, sync_memops: false };
    let address = with_room(driver, device.ordinal, size, || lock(&device.memory).alloc(size, tag, device))?;
    device.server.session.append(&MemAlloc { address, size })?;
    Ok(address)
}

/// Allocates. If there is no room for `size` bytes, completes what is being given back, frees what graphs
/// keep, and then waits for pending frees of one stream after the other, and tries again after each.
fn with_room<T>(
    driver: &'static Driver,
    device: u32,
    size: u64,
    allocate: impl Fn() -> Result<T>,
) -> Result<T> {
    let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
    if size > device.info.total_memory {
        return Err(Status::OUT_OF_MEMORY);
    }
    let no_room = |allocated: &Result<T>| matches!(allocated, Err(Status::OUT_OF_MEMORY));
    let mut allocated = device_memory::or_returned(device, &allocate);
    if no_room(&allocated) && graph_chunks::trim(driver, device.ordinal) {
        allocated = device_memory::or_returned(device, &allocate);
    }
    let mut waited = BTreeSet::new();
    while no_room(&allocated) && wait_for_freed(driver, device, &mut waited) {
        allocated = device_memory::or_returned(device, &allocate);
    }
    allocated
}

/// Waits for a stream that has frees pending on a device, unless they were waited for: one that does not wait
/// for this process, if there is one. Returns false if there is none.
fn wait_for_freed(driver: &'static Driver, device: &Device, waited: &mut BTreeSet<u64>) -> bool {
    let mut waits: Vec<(Arc<Stream>, Seq)> = Vec::new();
    for (part, _) in device.parts() {
        let memory = lock(part);
        let open = memory.waits().filter(|(by, _)| !waited.contains(&by.stream.unique()));
        waits.extend(open.map(|(by, mark)| (by.stream.clone(), mark)));
    }
    let free = waits.iter().position(|(stream, _)| !pending_writes::is_behind_calls(stream));
    let Some((stream, _)) = waits.get(free.unwrap_or(0)) else { return false };
    waited.insert(stream.unique());
    for (_, mark) in waits.iter().filter(|(other, _)| Arc::ptr_eq(other, stream)) {
        context::wait_until_freed(stream, *mark, Some(device.server));
    }
    // The server would take the memory back only when no stream of the device is held.
    collect_where(driver, device, has_freed(device), |_, _| u64::MAX);
    true
}

/// Allocates managed memory on a context's device, from a pool or none (0).
pub(crate) fn alloc_managed(
    driver: &'static Driver,
    context: &'static Context,
    size: u64,
    pool: usize,
) -> Result<u64> {
    with_room(driver, context.device, size, || managed::alloc(driver, context, size, pool))
}

/// Allocates from a pool (its handle, and itself) for a stream: memory that the stream has freed there, or
/// that no stream uses. It belongs to the pool's device, which need not be that of the stream and its
/// context.
pub(crate) fn alloc_for_pool(
    driver: &'static Driver,
    stream: &Arc<Stream>,
    size: u64,
    (handle, pool): (usize, &Pool),
) -> Result<u64> {
    let home = pool.home(stream.context);
    let device = driver.devices.get(home as usize).ok_or(Status::INVALID_DEVICE)?;
    let context = if stream.context.device == home { stream.context } else { device.primary };
    let by = Freeing { stream: stream.clone(), pool: handle };
    let tag = Tag { context, buffer: unique_id(), pool: handle, sync_memops: false };
    let Some(place) = pool.managed else { return alloc_in_order(driver, device, &by, size, tag) };
    if let Some(address) = lock(&device.managed).alloc_whole_again(&by, size, tag) {
        managed::used_again(address, context);
        return Ok(address);
    }
    collect(driver, device.server);
    let address = alloc_managed(driver, context, size, handle)?;
    managed_advice::prefer(address, size, place).map(|()| address)
}

fn alloc_in_order(
    driver: &'static Driver,
    device: &'static Device,
    by: &Freeing,
    size: u64,
    tag: Tag,
) -> Result<u64> {
    let again = {
        let mut memory = lock(&device.memory);
        memory.pass(has_freed(device));
        memory.alloc_again(by, size, tag)
    };
    if let Some(address) = again {
        return Ok(address);
    }
    collect(driver, device.server);
    let place = || lock(&device.memory).alloc_in_order(by, size, tag, device);
    let InOrder { address, slab } = with_room(driver, device.ordinal, size, place)?;
    if let Some((address, size)) = slab {
        device.server.session.append(&MemAlloc { address, size })?;
    }
    Ok(address)
}

/// Frees an allocation immediately, unless its context has taken it along. No work may use it.
pub(crate) fn release(driver: &'static Driver, device: &Device, address: u64, buffer: u64) {
    let mut memory = lock(device.memory_of(address));
    if memory.find(address).is_none_or(|(base, found)| base != address || found.tag.buffer != buffer) {
        return;
    }
    // What cannot be freed now goes with the session.
    if is_managed(address) {
        drop(memory);
        let _ = managed::free(driver, device, address);
    } else {
        let _ = free(driver, device, &mut memory, address);
    }
}

/// Frees an allocation of a device that no work uses, and keeps as much memory as its pools ask for.
pub(crate) fn free(driver: &'static Driver, device: &Device, memory: &mut Memory, address: u64) -> Result {
    // In this order, so that the address is reused only after the server knows that it is free.
    if !memory.is_in_slab(address) {
        device.server.session.append(&MemFree { address })?;
    }
    memory.free_and_keep(address, |before| kept(device)(false, before), device);
    give_back(driver, device, memory, kept(device))
}

/// How many bytes without allocations a device's memory keeps, as [`pool::kept`].
fn kept(device: &Device) -> impl Fn(bool, u64) -> u64 {
    move |is_pools, before| pool::kept(device.ordinal, is_pools, before)
}

/// Gives back the memory that streams have freed and of which nothing is in use.
fn give_back(
    driver: &'static Driver,
    device: &Device,
    memory: &mut Memory,
    keep: impl Fn(bool, u64) -> u64,
) -> Result {
    while let Some((address, is_pools)) = memory.to_give_back() {
        if is_managed(address) {
            managed::give_back(driver, device, memory, address)?;
        } else {
            device.server.session.append(&MemFree { address })?;
            memory.give_back(address, |before| keep(is_pools, before), device);
        }
    }
    Ok(())
}

/// Frees in stream order. The stream can have the memory again at once, others when the stream has reached
/// the free.
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
    let freed = {
        let mut memory = lock(device.memory_of(address));
        let (base, allocation) = memory.find(address).ok_or(Status::INVALID_VALUE)?;
        let pool = allocation.tag.pool;
        // Managed memory can be freed in stream order only if it belongs to a pool.
        if base != address || is_managed(address) && pool == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let freed = memory.free_in_order(address, Freeing { stream, pool }, mark);
        device.freed[usize::from(is_managed(address))].store(true, Ordering::Release);
        freed.ok_or(Status::INVALID_VALUE)?
    };
    pool::gone(freed.tag.pool, freed.size);
    collect(driver, device.server);
    Ok(())
}

/// Whether a free of a device's memory is over.
fn has_freed(device: &Device) -> impl Fn(&Freeing, Seq) -> bool {
    move |by, mark| context::has_freed(&by.stream, mark, Some(device.server))
}

/// Completes the frees of a server's memory that streams have passed. Another server may not answer, so its
/// own calls complete those of its memory.
pub(crate) fn collect(driver: &'static Driver, server: &Server) {
    pool_export::collect(driver, server);
    for device in driver.devices.iter().filter(|device| std::ptr::eq(device.server, server)) {
        collect_where(driver, device, has_freed(device), kept(device));
    }
}

/// Completes the frees of a device's memory that are over.
fn collect_where(
    driver: &'static Driver,
    device: &Device,
    is_over: impl Fn(&Freeing, Seq) -> bool,
    keep: impl Fn(bool, u64) -> u64,
) {
    for (part, freed) in device.parts() {
        if !freed.load(Ordering::Acquire) {
            continue;
        }
        let mut memory = lock(part);
        memory.pass(&is_over);
        // What cannot be given back now goes with the session.
        let _ = give_back(driver, device, &mut memory, &keep);
        freed.store(memory.has_freed(), Ordering::Release);
    }
}

/// Drops all memory of a device that the server resets, and closes what its primary context has imported.
pub(crate) fn reset(driver: &'static Driver, device: &Device) {
    for memory in [&device.memory, &device.managed] {
        let memory = lock(memory);
        // What was freed in stream order is no longer counted.
        for address in memory.addresses_where(|tag| tag.pool != 0) {
            if let Some((_, allocation)) = memory.find(address) {
                pool::gone(allocation.tag.pool, allocation.size);
            }
        }
    }
    managed::reset(driver, device);
    pool_export::forget(driver, device.primary);
    graph_chunks::forget(driver, device.primary);
    graph_chunks::trim(driver, device.ordinal);
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
    for device in &driver.devices {
        let is_over = has_freed(device);
        let is_its = |by: &Freeing| std::ptr::eq(by.stream.context, context);
        collect_where(driver, device, |by, mark| is_its(by) && (!is_lost || is_over(by, mark)), kept(device));
    }
    managed::forget(driver, context, pool::gone);
    pool_export::forget(driver, context);
    graph_chunks::forget(driver, context);
    // A device of another server, which may not answer, has none of its memory.
    for device in driver.devices.iter().filter(|device| std::ptr::eq(device.server, context.server)) {
        let is_its = |tag: &Tag| std::ptr::eq(tag.context, context);
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

/// Waits for all work of a context, before something of it is freed or destroyed. Returns the error that the
/// caller returns when it has done that: see [`Context::deferred_to_end`].
///
/// # Errors
/// If the work cannot be known to be done, or has left an error that lasts.
pub(crate) fn settle_work(context: &'static Context) -> Result<Result> {
    let waited = synchronize(context);
    if waited.is_err() && (context.has_failed() || context.is_busy() && !wait(context, Context::quiesce)?) {
        return waited.map(Ok);
    }
    Ok(waited)
}

/// Waits for all work of all devices, as freeing pinned memory does, because any device may be using it.
/// Returns an error as [`settle_work`] does.
pub(crate) fn settle_all() -> Result<Result> {
    settle(context::busy(), context::current()?)
}

/// Waits for all work of contexts and of the current one. Only errors of the current one are returned, as
/// [`settle_work`] does. Those of others are left to the calls that concern them.
pub(crate) fn settle(
    contexts: impl IntoIterator<Item = &'static Context>,
    current: &'static Context,
) -> Result<Result> {
    quiesce(contexts.into_iter().filter(|context| !std::ptr::eq(*context, current)))?;
    if current.is_busy() { settle_work(current) } else { Ok(Ok(())) }
}

/// Waits for all work of contexts that use some memory. Only errors of the current one are returned, as
/// [`settle_work`] does, if it is among them: work of others must not keep the memory from being freed.
pub(crate) fn settle_users(users: Vec<&'static Context>) -> Result<Result> {
    match context::current().ok().filter(|current| users.iter().any(|user| std::ptr::eq(*user, *current))) {
        Some(current) => settle(users, current),
        None => quiesce(users).map(Ok),
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
    }

    impl Freed {
        fn new() -> Freed {
            let servers = [(); 2].map(|()| Server::unused());
            let driver = Driver::for_tests(&servers);
            let contexts = [0, 1].map(|n| Context::new(ContextId(n), servers[n as usize], n, 0, false));
            let id = StreamId(client::channel::MAX_CONTEXTS + 1);
            let stream = Arc::new(Stream::new(id, contexts[1], 1, 0, false));
            let tag = Tag { context: contexts[0], buffer: unique_id(), pool: 0, sync_memops: false };
            let address = lock(&driver.devices[0].memory).alloc(4096, tag, &Full).unwrap();
            stream.work(&client::ops::stream::StreamMark { stream: stream.id }).unwrap();
            free_in_order(driver, address, stream.clone()).unwrap();
            let freed = Freed { driver, contexts, stream };
            assert!(freed.is_there());
            freed
        }

        fn is_there(&self) -> bool {
            lock(&self.driver.devices[0].memory).has_freed()
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
        let tag = |pool| Tag { context, buffer: unique_id(), pool, sync_memops: false };
        let by = Freeing { stream: context.legacy().clone(), pool };
        let of_pool = || lock(&device.memory).alloc_in_order(&by, SIZE, tag(pool), &Full).unwrap().address;
        let free = |address| free(driver, device, &mut lock(&device.memory), address).unwrap();
        let [pools, other] = [of_pool(), lock(&device.memory).alloc(SIZE, tag(0), &Full).unwrap()];
        free(pools);
        assert_eq!(lock(&device.memory).chunks().len(), 2);
        free(other);
        assert_eq!(lock(&device.memory).chunks().len(), 1);
        assert_eq!(of_pool(), pools);
        free(pools);
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

    /// Two streams, and allocations of a pool for them.
    struct Pooled {
        driver: &'static Driver,
        pool: usize,
        streams: [Arc<Stream>; 2],
    }

    impl Pooled {
        fn new() -> Pooled {
            let server = Server::unused();
            let driver = Driver::for_tests(&[server]);
            let context = Context::new(ContextId(0), server, 0, 0, false);
            let first = client::channel::MAX_CONTEXTS + 1;
            let stream = |n| Arc::new(Stream::new(StreamId(first + n), context, 1, 0, false));
            Pooled { driver, pool: pool::insert(Pool::new(0)).unwrap(), streams: [0, 1].map(stream) }
        }

        fn alloc(&self, stream: usize, size: u64) -> u64 {
            let device = &self.driver.devices[0];
            let stream = &self.streams[stream];
            let by = Freeing { stream: stream.clone(), pool: self.pool };
            let tag =
                Tag { context: stream.context, buffer: unique_id(), pool: self.pool, sync_memops: false };
            let mut memory = lock(&device.memory);
            memory.pass(has_freed(device));
            memory.alloc_in_order(&by, size, tag, &Full).unwrap().address
        }

        /// Frees behind work of the stream.
        fn free(&self, stream: usize, address: u64) {
            let stream = &self.streams[stream];
            stream.work(&client::ops::stream::StreamMark { stream: stream.id }).unwrap();
            free_in_order(self.driver, address, stream.clone()).unwrap();
        }
    }

    #[test]
    fn a_stream_has_what_it_has_freed_again_in_any_size_and_others_when_it_has_passed_that() {
        const MIB: u64 = 1 << 20;
        let pooled = Pooled::new();
        let both = [pooled.alloc(0, MIB), pooled.alloc(1, MIB)];
        // It is the second stream that frees what the first one has allocated.
        for address in both {
            pooled.free(1, address);
        }
        let others = pooled.alloc(0, MIB);
        assert!(!both.contains(&others), "its work may still use that");
        assert_eq!(pooled.alloc(1, 2 * MIB), both[0]);
        pooled.free(1, both[0]);
        assert_ne!(pooled.alloc(0, 2 * MIB), both[0]);
        pooled.streams[1].is_synced(pooled.streams[1].mark().unwrap());
        let again = [pooled.alloc(0, MIB), pooled.alloc(0, MIB)];
        assert!(again.contains(&both[0]) || again.contains(&both[1]));
    }

    #[test]
    fn memory_that_was_waited_for_stays_for_the_allocation_that_needs_it() {
        let pooled = Pooled::new();
        let address = pooled.alloc(0, 1 << 30);
        pooled.free(0, address);
        pooled.streams[0].is_synced(pooled.streams[0].mark().unwrap());
        let device = &pooled.driver.devices[0];
        let mut waited = BTreeSet::new();
        assert!(wait_for_freed(pooled.driver, device, &mut waited));
        assert!(!wait_for_freed(pooled.driver, device, &mut waited), "nothing is pending");
        assert_eq!(lock(&device.memory).chunks().len(), 1);
        assert_eq!(pooled.alloc(1, 1 << 30), address);
    }

    #[test]
    fn what_a_destroyed_stream_was_to_free_is_used_until_it_is_done() {
        let pooled = Pooled::new();
        let address = pooled.alloc(0, 2 << 20);
        pooled.free(0, address);
        let [stream, _] = &pooled.streams;
        stream_table::end(stream.clone());
        assert_ne!(pooled.alloc(1, 2 << 20), address);
        stream.is_synced(stream.mark().unwrap());
        assert_eq!(pooled.alloc(1, 2 << 20), address);
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
