//! What an address refers to: device memory, mapped memory, pinned memory that kernels use, or a module's
//! variable.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::result::Result;
use crate::memory::device_memory::{self, Found};
use crate::memory::managed::{self, mirror};
use crate::memory::{graph_memory, pinned_regions, virtual_memory};
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, Server};
use client::ops::memory::is_managed;
use client::ops::module::ModuleMemory;
use client::{Status, lock};

/// Whether an address is in device memory: in a window, or in a module's variable.
pub(crate) fn is_device(driver: &Driver, address: u64) -> bool {
    is_reserved(driver, address) || find(driver, address).is_some()
}

/// Whether an address can only be a device's.
pub(crate) fn is_reserved(driver: &Driver, address: u64) -> bool {
    device_memory::device_of(driver, address).is_some() || virtual_memory::is_here(address)
}

/// `CU_CTX_SYNC_MEMOPS`.
const SYNC_MEMOPS: u32 = 0x80;

/// Whether the program has ever set that attribute of memory.
static ANY_SYNC_MEMOPS: AtomicBool = AtomicBool::new(false);

/// Notes that the program has set the attribute `SYNC_MEMOPS` of some memory.
pub(crate) fn sync_memops() {
    ANY_SYNC_MEMOPS.store(true, Ordering::Release);
}

/// Whether the program has asked that synchronous copies and fills of the memory at an address, on a stream
/// of `context`, are done when the call returns, also those for which CUDA doesn't wait.
pub(crate) fn synchronizes(driver: &Driver, context: &Context, address: u64) -> bool {
    let it_does = || find_near(driver, context.server, address).is_some_and(|found| found.sync_memops);
    context.flags.load(Ordering::Relaxed) & SYNC_MEMOPS != 0
        || ANY_SYNC_MEMOPS.load(Ordering::Acquire) && it_does()
}

/// What is at a device address, if it belongs to the program. Prefers the current context's server.
pub(crate) fn find(driver: &Driver, address: u64) -> Option<Found> {
    find_near(driver, nearest(driver), address)
}

/// The server of the current context, or the first.
pub(crate) fn nearest(driver: &Driver) -> &'static Server {
    match &driver.servers[..] {
        [only] => only,
        servers => context::current().map_or(servers[0], |context| context.server),
    }
}

/// What is at a device address, if it belongs to the program. If several servers have a variable there,
/// `near` decides.
pub(crate) fn find_near(driver: &Driver, near: &'static Server, address: u64) -> Option<Found> {
    if virtual_memory::is_here(address) {
        return graph_memory::found(address, 1).or_else(|| virtual_memory::find(driver, address));
    }
    if let Some(device) = device_memory::device_of(driver, address) {
        let memory = lock(device.memory_of(address));
        let (base, allocation) = memory.find(address)?;
        let tag = allocation.tag;
        return Some(Found {
            base,
            size: allocation.size,
            context: tag.context,
            buffer: tag.buffer,
            pool: tag.pool,
            sync_memops: tag.sync_memops,
            managed: is_managed(address),
        });
    }
    if mirror::is_here(address) {
        let (base, size, tag) = pinned_regions::find(address)?;
        return Some(Found {
            base: base as u64,
            size: size as u64,
            context: mirror::context_near(near, address)?,
            buffer: tag.buffer,
            pool: 0,
            sync_memops: false,
            managed: true,
        });
    }
    // Two servers may have variables at the same address: prefer the nearest one's.
    let others = driver.servers.iter().copied().filter(|other| !std::ptr::eq(*other, near));
    std::iter::once(near).chain(others).find_map(|server| variable(server, address))
}

/// The variable of a server's modules at an address.
pub(crate) fn variable(server: &Server, address: u64) -> Option<Found> {
    let globals = server.globals.read().unwrap_or_else(PoisonError::into_inner);
    let (base, (size, context)) = globals.range(..=address).next_back()?;
    (address - base < *size).then_some(Found {
        base: *base,
        size: *size,
        context,
        buffer: 0,
        pool: 0,
        sync_memops: false,
        managed: managed::is_here(address),
    })
}

/// What a module has at an address that [`find`] does not know: a string literal, or a variable whose address
/// came from a kernel. Asks the server each time, because such memory ends with its module; so it is only
/// for addresses that are otherwise errors.
#[cold]
pub(crate) fn unnamed(driver: &Driver, near: &'static Server, address: u64) -> Result<Option<Found>> {
    let context = context::current().ok().filter(|context| std::ptr::eq(context.server, near));
    let is_hosts = || mirror::is_here(address) || pinned_regions::find(address).is_some();
    let Some(context) = context.filter(|_| !is_reserved(driver, address) && !is_hosts()) else {
        return Ok(None);
    };
    match context.session().call(&ModuleMemory { context: context.id, address }) {
        Ok(found) => Ok(Some(Found {
            base: found.base,
            size: found.size,
            context,
            buffer: 0,
            pool: 0,
            sync_memops: false,
            managed: false,
        })),
        // An older server cannot tell.
        Err(Status::NOT_FOUND | Status::NOT_SUPPORTED) => Ok(None),
        Err(status) => Err(status),
    }
}

/// Checks that `len` bytes (not 0) at a device address are in one allocation or are mapped. Sends the host's
/// copies of them to the device.
///
/// # Errors
/// `INVALID_VALUE` for any other address, or a range that extends past the end, as in CUDA.
#[inline]
pub(crate) fn check(driver: &Driver, address: u64, len: u64) -> Result<Found> {
    check_near(driver, nearest(driver), address, len)
}

/// The same with [another server](find_near) as the nearest.
#[inline]
pub(crate) fn check_near(driver: &Driver, near: &'static Server, address: u64, len: u64) -> Result<Found> {
    if virtual_memory::is_here(address) {
        return match graph_memory::found(address, 1) {
            None => virtual_memory::check(driver, address, len),
            Some(found) if len <= found.base + found.size - address => Ok(found),
            // An earlier one may extend further.
            Some(_) => graph_memory::found(address, len).ok_or(Status::INVALID_VALUE),
        };
    }
    let found = match find_near(driver, near, address) {
        Some(found) => found,
        None => unnamed(driver, near, address)?.ok_or(Status::INVALID_VALUE)?,
    };
    let end = address.checked_add(len).ok_or(Status::INVALID_VALUE)?;
    if end > found.base + found.size {
        return Err(Status::INVALID_VALUE);
    }
    if found.managed {
        managed::lend(address, len)?;
    }
    Ok(found)
}
