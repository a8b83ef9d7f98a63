//! Device memory.

use crate::abi::arguments::Out;
use crate::abi::result::Result;
use crate::memory::{
    address, device_memory, graph_memory, host_pool, managed, pool, pool_export, stream_ordered,
    virtual_memory,
};
use crate::process::capture;
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, Tag, driver};
use crate::streams::stream_table::{self, Lent};
use client::memory::Allocation;
use client::ops::memory::MemGetInfo;
use client::{Status, lock};

/// Row alignment in bytes. Like CUDA's, a multiple of the texture pitch alignment that suits every access.
pub(crate) const PITCH: usize = 512;

/// As [`context::ready_to_end`], for freeing memory. In a thread without a current context, the memory's own
/// one is current until the guard is dropped.
fn ready_to_free(address: u64) -> Result<(&'static Driver, &'static Context, Result, Option<Lent>)> {
    match context::ready_to_end() {
        Err(Status::INVALID_CONTEXT) if context::current_handle() == 0 => {
            let found = address::find(driver()?, address).ok_or(Status::INVALID_CONTEXT)?;
            stream_table::lend_to_end(found.context)
        }
        other => other.map(|(driver, context, deferred)| (driver, context, deferred, None)),
    }
}

/// Frees the allocation at an address. Waits for all work that may use it, and returns that work's error.
fn free(driver: &'static Driver, context: &'static Context, dptr: u64) -> Result<Result> {
    if host_pool::is_here(dptr) {
        capture::unsafe_call()?;
        let waited = stream_ordered::settle_all()?;
        let stream = stream_table::any(context, 0, false)?;
        return if host_pool::free(dptr, stream)? { Ok(waited) } else { Err(Status::INVALID_VALUE) };
    }
    if let Some(found) = graph_memory::at(dptr, 1) {
        capture::unsafe_call()?;
        let waited = stream_ordered::settle_users(found.users().collect())?;
        return if graph_memory::freed(dptr, None)? { Ok(waited) } else { Err(Status::INVALID_VALUE) };
    }
    if virtual_memory::is_here(dptr) {
        capture::unsafe_call()?;
        let waited = stream_ordered::settle_users(pool_export::users(driver, dptr)?)?;
        return pool_export::free(driver, dptr).map(|()| waited);
    }
    let device = device_memory::device_of(driver, dptr).ok_or(Status::INVALID_VALUE)?;
    let found =
        address::find(driver, dptr).filter(|found| found.base == dptr).ok_or(Status::INVALID_VALUE)?;
    capture::unsafe_call()?;
    // If two threads free the same address, only the removal itself decides which one succeeds.
    let waited = if found.context.is_alive() { stream_ordered::settle_work(found.context)? } else { Ok(()) };
    if found.managed {
        if !managed::free(driver, device, dptr)? {
            return Err(Status::INVALID_VALUE);
        }
    } else {
        let mut memory = lock(&device.memory);
        let is_it = |(base, at): (u64, &Allocation<Tag>)| base == dptr && at.tag.buffer == found.buffer;
        if !memory.find(dptr).is_some_and(is_it) {
            return Err(Status::INVALID_VALUE);
        }
        stream_ordered::free(driver, device, &mut memory, dptr)?;
        drop(memory);
        device_memory::wait_for_returned(device);
    }
    pool::gone(found.pool, found.size);
    Ok(waited)
}

api! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (driver, context) = context::ready()?;
        let device = driver.devices.get(context.device as usize).ok_or(Status::INVALID_DEVICE)?;
        stream_ordered::collect(driver, device.server);
        let reply = device.server.session.call(&MemGetInfo { device: device.number })?;
        // Memory that this process holds but does not use counts as free, and what it is giving back.
        let spare = lock(&device.memory).free_bytes() + lock(&device.managed).free_bytes();
        free.put_if_wanted((reply.free + spare).min(reply.total) as usize);
        total.put_if_wanted(reply.total as usize);
        Ok(())
    }

    fn cuMemAlloc_v2(dptr: Out<u64>, size: usize) {
        dptr.required()?;
        let (driver, context) = context::ready()?;
        if size == 0 {
            return Err(Status::INVALID_VALUE);
        }
        capture::unsafe_call()?;
        dptr.put(stream_ordered::alloc(driver, context, context.device, size as u64, 0)?)
    }

    fn cuMemAllocPitch_v2(dptr: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        dptr.required()?;
        pitch.required()?;
        let (driver, context) = context::ready()?;
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(Status::INVALID_VALUE);
        }
        capture::unsafe_call()?;
        let row = width.checked_next_multiple_of(PITCH).ok_or(Status::INVALID_VALUE)?;
        let size = row.checked_mul(height).ok_or(Status::OUT_OF_MEMORY)?;
        let address = stream_ordered::alloc(driver, context, context.device, size as u64, 0)?;
        pitch.put(row)?;
        dptr.put(address)
    }

    fn cuMemFree_v2(dptr: u64) {
        let (driver, context, deferred, _lent) = ready_to_free(dptr)?;
        if dptr == 0 {
            return deferred;
        }
        let freed = free(driver, context, dptr);
        deferred?;
        freed?
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, dptr: u64) {
        let driver = driver()?;
        context::current()?;
        let found = match address::find(driver, dptr) {
            Some(found) => found,
            None => address::unnamed(driver, address::nearest(driver), dptr)?.ok_or(Status::NOT_FOUND)?,
        };
        base.put_if_wanted(found.base);
        size.put_if_wanted(found.size as usize);
        Ok(())
    }
}
