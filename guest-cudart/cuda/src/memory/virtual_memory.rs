//! Virtual memory management: memory without an address, addresses without memory, and both put together.
//!
//! The server has the same tables and checks everything again; what is kept here is what the program may ask back, and what tells a good pointer from a bad one
//! without a round trip. Addresses are chosen here, apart from every device's window.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, refuse_form};
use crate::abi::types::MemLocation;
use crate::api::devices::attr;
use crate::memory::address::Found;
use crate::memory::shared_descriptor;
use crate::process::driver::{Driver, driver, unique_id};
use crate::process::{context, driver};
use client::Status;
use client::handle::MemoryId;
use client::handles::Slab;
use client::ops::memory::{
    AddressFree, AddressReserve, MemoryAccess, MemoryCreate, MemoryExport, MemoryImport, MemoryMap,
    MemoryRelease, MemoryUnmap, SPACE, SPACE_ALIGN, SPACE_SIZE,
};

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProp {
    kind: u32,
    handle_types: u32,
    location: MemLocation,
    win32: *mut c_void,
    compression: u8,
    gpu_direct_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    location: MemLocation,
    flags: u32,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: u32 = 1;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;

/// What a descriptor of exported memory begins with; a token follows.
const MAGIC: shared_descriptor::Magic = *b"rgpu:mem";

/// Addresses that are tried when the server's process has something else at those chosen.
const ATTEMPTS: usize = 16;

/// Memory of a device, which the program names by a handle.
struct Memory {
    id: MemoryId,
    device: u32,
    size: u64,
    handle_types: u32,
    /// `cuMemCreate` and everything that gave the handle again, less `cuMemRelease`. Under the lock of [`Space`], as `mapped` is.
    handles: AtomicU32,
    mapped: AtomicU32,
}

/// Memory at an address.
struct Mapping {
    size: u64,
    handle: usize,
    memory: Arc<Memory>,
    buffer: u64,
    /// What the program was given of it, where that is less than all: first address and bytes.
    part: Option<(u64, u64)>,
    /// `CUmemAccess_flags` by device.
    access: Vec<u32>,
}

/// The program's.
#[derive(Default)]
struct Space {
    reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    /// Where the next reservation is looked for.
    next: u64,
}

static SPACES: RwLock<Space> =
    RwLock::new(Space { reserved: BTreeMap::new(), mappings: BTreeMap::new(), next: 0 });

static MEMORIES: Slab<Memory> = Slab::new(14);

/// Whether this process shares memory with another.
static SHARES: AtomicBool = AtomicBool::new(false);

/// Whether this process shares memory with another, whose commands reach the server by another way: a copy that CUDA calls synchronous must then have reached the device when it returns.
#[inline]
pub(crate) fn shares() -> bool {
    SHARES.load(Ordering::Relaxed)
}

/// Before this process first shares memory: what it has copied so far has reached the device when this returns.
pub(crate) fn share(driver: &'static Driver) -> Result {
    SHARES.store(true, Ordering::Relaxed);
    // No context has to be current for this.
    let primary = driver.devices.iter().map(|device| device.primary);
    for context in primary.chain(context::current()).filter(|context| context.is_alive() && context.is_busy())
    {
        context.legacy().synchronize(driver)?;
    }
    Ok(())
}

fn read() -> RwLockReadGuard<'static, Space> {
    SPACES.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, Space> {
    SPACES.write().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an address is one of those that are reserved here.
#[inline]
pub(crate) fn is_here(address: u64) -> bool {
    address.wrapping_sub(SPACE) < SPACE_SIZE
}

/// What is mapped at an address.
pub(crate) fn find(driver: &Driver, address: u64) -> Option<Found> {
    let space = read();
    let (start, mapping) = space.mappings.range(..=address).next_back()?;
    let (base, size) = mapping.part.unwrap_or((*start, mapping.size));
    if address.checked_sub(base)? >= size {
        return None;
    }
    let context = driver.devices.get(mapping.memory.device as usize)?.primary;
    Some(Found { base, size, context, buffer: mapping.buffer, pool: 0, sync_memops: false, managed: false })
}

/// Checks that a range (not 0 bytes) is mapped and that one device may access all of it; gives what is mapped at its beginning.
pub(crate) fn check(driver: &Driver, address: u64, len: u64) -> Result<Found> {
    let found = find(driver, address).ok_or(Status::INVALID_VALUE)?;
    let end = address.checked_add(len).ok_or(Status::INVALID_VALUE)?;
    let space = read();
    let mut may: Vec<bool> = vec![true; driver.devices.len()];
    let mut at = address;
    while at < end {
        let (start, mapping) = space.mappings.range(..=at).next_back().ok_or(Status::INVALID_VALUE)?;
        let over = mapping.part.map_or(start + mapping.size, |(base, size)| base + size);
        if over <= at {
            return Err(Status::INVALID_VALUE);
        }
        for (may, access) in may.iter_mut().zip(&mapping.access) {
            *may &= *access != 0;
        }
        at = over;
    }
    if may.contains(&true) { Ok(found) } else { Err(Status::INVALID_VALUE) }
}

fn memory_of(handle: usize) -> Result<Arc<Memory>> {
    let memory = MEMORIES.get(handle).ok_or(Status::INVALID_VALUE)?;
    if memory.handles.load(Ordering::Relaxed) == 0 { Err(Status::INVALID_VALUE) } else { Ok(memory) }
}

fn new_id() -> MemoryId {
    static IDS: AtomicU32 = AtomicU32::new(1);
    MemoryId(IDS.fetch_add(1, Ordering::Relaxed))
}

impl Space {
    fn granule(driver: &Driver) -> u64 {
        driver.devices.iter().map(|device| device.info.granule).max().unwrap_or(1).max(1)
    }

    fn is_free(&self, address: u64, size: u64) -> bool {
        let end = address + size;
        self.reserved.range(..end).next_back().is_none_or(|(start, len)| start + len <= address)
    }

    /// The first free range from `from` on; `None`: there is none up to the end.
    fn free_from(&self, from: u64, size: u64, alignment: u64) -> Option<u64> {
        let mut at = from.checked_next_multiple_of(alignment)?;
        loop {
            let end = at.checked_add(size).filter(|end| *end <= SPACE + SPACE_SIZE)?;
            match self.reserved.range(..end).next_back() {
                Some((start, len)) if start + len > at => {
                    // What is in the way may begin before several others: go past this one.
                    let over = self.reserved.range(at..end).next().map_or(start + len, |(a, l)| a + l);
                    at = over.max(at + 1).checked_next_multiple_of(alignment)?;
                }
                _ => return Some(at),
            }
        }
    }

    /// Reserves addresses, with the server.
    fn reserve(&mut self, driver: &Driver, size: u64, alignment: u64, wish: u64) -> Result<u64> {
        let granule = Space::granule(driver);
        if size == 0 || !size.is_multiple_of(granule) || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(Status::INVALID_VALUE);
        }
        let alignment = alignment.max(SPACE_ALIGN);
        let wished = is_here(wish)
            && wish.is_multiple_of(alignment)
            && wish.checked_add(size).is_some_and(|end| end <= SPACE + SPACE_SIZE)
            && self.is_free(wish, size);
        let mut from = if wished { wish } else { self.next.max(SPACE) };
        for _ in 0..ATTEMPTS {
            let found = self.free_from(from, size, alignment);
            let address =
                found.or_else(|| self.free_from(SPACE, size, alignment)).ok_or(Status::OUT_OF_MEMORY)?;
            match driver.session.call(&AddressReserve { address, size }) {
                Ok(_) => {
                    self.reserved.insert(address, size);
                    self.next = address + size;
                    return Ok(address);
                }
                Err(Status::OUT_OF_MEMORY) => from = address + size,
                Err(status) => return Err(status),
            }
        }
        Err(Status::OUT_OF_MEMORY)
    }

    fn free(&mut self, driver: &Driver, address: u64, size: u64) -> Result {
        if self.reserved.get(&address) != Some(&size) {
            return Err(Status::INVALID_VALUE);
        }
        driver.session.call(&AddressFree { address, size })?;
        self.reserved.remove(&address);
        Ok(())
    }

    fn map(
        &mut self,
        driver: &Driver,
        address: u64,
        size: u64,
        offset: u64,
        handle: usize,
        part: Option<(u64, u64)>,
    ) -> Result {
        let memory = memory_of(handle)?;
        driver.session.call(&MemoryMap { memory: memory.id, offset, address, size })?;
        memory.mapped.fetch_add(1, Ordering::Relaxed);
        let access = vec![0; driver.devices.len()];
        self.mappings.insert(address, Mapping { size, handle, memory, buffer: unique_id(), part, access });
        Ok(())
    }

    /// The mappings that a range consists of, whole and without a gap.
    fn whole(&self, address: u64, size: u64) -> Result<Vec<u64>> {
        let end = address.checked_add(size).ok_or(Status::INVALID_VALUE)?;
        let mut at = address;
        let mut found = Vec::new();
        while at < end {
            let mapping = self.mappings.get(&at).ok_or(Status::INVALID_VALUE)?;
            found.push(at);
            at += mapping.size;
        }
        if at == end && !found.is_empty() { Ok(found) } else { Err(Status::INVALID_VALUE) }
    }

    fn unmap(&mut self, driver: &Driver, address: u64, size: u64) -> Result {
        for address in self.whole(address, size)? {
            let Some(mapping) = self.mappings.get(&address) else { continue };
            driver.session.call(&MemoryUnmap { address, size: mapping.size })?;
            if let Some(mapping) = self.mappings.remove(&address) {
                mapping.memory.mapped.fetch_sub(1, Ordering::Relaxed);
                self.end_if_unused(driver, mapping.handle, &mapping.memory)?;
            }
        }
        Ok(())
    }

    fn set_access(&mut self, driver: &Driver, address: u64, size: u64, device: u32, flags: u32) -> Result {
        for address in self.whole(address, size)? {
            let Some(mapping) = self.mappings.get_mut(&address) else { continue };
            driver.session.call(&MemoryAccess { address, size: mapping.size, device, flags })?;
            if let Some(place) = mapping.access.get_mut(device as usize) {
                *place = flags;
            }
        }
        Ok(())
    }

    /// Memory goes with its last handle and its last mapping.
    fn end_if_unused(&self, driver: &Driver, handle: usize, memory: &Memory) -> Result {
        if memory.handles.load(Ordering::Relaxed) == 0 && memory.mapped.load(Ordering::Relaxed) == 0 {
            MEMORIES.remove(handle);
            driver.session.call(&MemoryRelease { memory: memory.id })?;
        }
        Ok(())
    }

    fn release(&self, driver: &Driver, handle: usize) -> Result {
        let memory = memory_of(handle)?;
        memory.handles.fetch_sub(1, Ordering::Relaxed);
        self.end_if_unused(driver, handle, &memory)
    }
}

fn import(driver: &Driver, token: [u8; 16], handle_types: u32) -> Result<(usize, bool)> {
    let id = new_id();
    let reply = driver.session.call(&MemoryImport { memory: id, token })?;
    let memory = Memory {
        id,
        device: reply.device,
        size: reply.size,
        handle_types,
        handles: AtomicU32::new(1),
        mapped: AtomicU32::new(0),
    };
    Ok((MEMORIES.insert(Arc::new(memory)).ok_or(Status::OUT_OF_MEMORY)?, reply.own))
}

/// Maps what a process has exported, for every device that may have it; gives the address at which `offset` lies. What this process has exported itself is only opened if `own_too`,
/// else it is `INVALID_CONTEXT`.
pub(crate) fn open(driver: &Driver, token: [u8; 16], offset: u64, size: u64, own_too: bool) -> Result<u64> {
    let mut space = write();
    let (handle, own) = import(driver, token, 0)?;
    let memory = memory_of(handle)?;
    let inside = offset.checked_add(size).is_some_and(|end| end <= memory.size);
    let opened = if own && !own_too {
        Err(Status::INVALID_CONTEXT)
    } else if !inside {
        Err(Status::INVALID_VALUE)
    } else {
        space.reserve(driver, memory.size, 0, 0).and_then(|address| {
            let part = Some((address + offset, size));
            let mapped = space
                .map(driver, address, memory.size, 0, handle, part)
                .and_then(|()| space.set_access(driver, address, memory.size, memory.device, 3));
            if mapped.is_err() {
                // What was made of it goes again; the first error is the one to tell.
                let _ = space.unmap(driver, address, memory.size);
                let _ = space.free(driver, address, memory.size);
            }
            mapped.map(|()| address + offset)
        })
    };
    // The mapping keeps it.
    space.release(driver, handle)?;
    opened
}

/// Ends what [`open`] began.
pub(crate) fn close(driver: &Driver, address: u64) -> Result {
    let mut space = write();
    let found = space.mappings.range(..=address).next_back();
    let (start, size) = found
        .filter(|(_, mapping)| mapping.part.is_some_and(|(base, _)| base == address))
        .map(|(start, mapping)| (*start, mapping.size))
        .ok_or(Status::INVALID_VALUE)?;
    space.unmap(driver, start, size)?;
    space.free(driver, start, size)
}

/// Reserves addresses for at least `size` bytes of any device: the first, and how many.
pub(crate) fn reserve(driver: &Driver, size: u64) -> Result<(u64, u64)> {
    let size = size.checked_next_multiple_of(Space::granule(driver)).ok_or(Status::OUT_OF_MEMORY)?;
    write().reserve(driver, size, 0, 0).map(|address| (address, size))
}

/// Gives back what [`reserve`] reserved.
pub(crate) fn unreserve(driver: &Driver, address: u64, size: u64) -> Result {
    write().free(driver, address, size)
}

/// Memory of a device, for this library's own purposes; its handle.
pub(crate) fn create(driver: &Driver, device: u32, size: u64) -> Result<usize> {
    make(driver, device, size, 0)
}

/// Puts all of such memory at reserved addresses, for its own device.
pub(crate) fn map(driver: &Driver, address: u64, size: u64, handle: usize, device: u32) -> Result {
    let mut space = write();
    space.map(driver, address, size, 0, handle, Some((address, size)))?;
    space.set_access(driver, address, size, device, 3)
}

/// Takes such memory away from its addresses. No work may use it there.
pub(crate) fn unmap(driver: &Driver, address: u64, size: u64) -> Result {
    write().unmap(driver, address, size)
}

/// Gives such memory back.
pub(crate) fn release(driver: &Driver, handle: usize) -> Result {
    write().release(driver, handle)
}

fn make(driver: &Driver, device: u32, size: u64, handle_types: u32) -> Result<usize> {
    let id = new_id();
    let exportable = handle_types & POSIX_FD != 0;
    driver.session.call(&MemoryCreate { memory: id, device, size, exportable })?;
    let (handles, mapped) = (AtomicU32::new(1), AtomicU32::new(0));
    let memory = Memory { id, device, size, handle_types, handles, mapped };
    MEMORIES.insert(Arc::new(memory)).ok_or(Status::OUT_OF_MEMORY)
}

/// The device of what a program wants to make, if it can be made.
fn wanted(prop: &AllocationProp) -> Result<&'static driver::Device> {
    static SAID: AtomicBool = AtomicBool::new(false);
    if prop.kind != PINNED {
        return Err(Status::INVALID_VALUE);
    }
    if prop.location.kind != DEVICE {
        return refuse_form("cuMemCreate of memory that is no device's", &SAID);
    }
    driver::device(prop.location.id)
}

api! {
    fn cuMemAddressReserve(ptr: *mut u64, size: usize, alignment: usize, wish: u64, flags: u64) {
        non_null(ptr)?;
        let driver = driver()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let address = write().reserve(driver, size as u64, alignment as u64, wish)?;
        put(ptr, address)
    }

    fn cuMemAddressFree(ptr: u64, size: usize) {
        write().free(driver()?, ptr, size as u64)
    }

    fn cuMemCreate(handle: *mut u64, size: usize, prop: *const AllocationProp, flags: u64) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(handle)?;
        non_null(prop)?;
        let driver = driver()?;
        let prop = *prop;
        let device = wanted(&prop)?;
        let size = size as u64;
        if flags != 0 || size == 0 || !size.is_multiple_of(device.info.granule.max(1)) {
            return Err(Status::INVALID_VALUE);
        }
        if prop.handle_types & !POSIX_FD != 0 || prop.gpu_direct_rdma != 0 {
            return refuse_form("cuMemCreate of memory for fabric handles or GPUDirect RDMA", &SAID);
        }
        let exportable = prop.handle_types & POSIX_FD != 0;
        if exportable && device.attribute(attr::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        put(handle, make(driver, device.ordinal, size, prop.handle_types)? as u64)
    }

    fn cuMemRelease(handle: u64) {
        write().release(driver()?, handle as usize)
    }

    fn cuMemMap(ptr: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        let driver = driver()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        write().map(driver, ptr, size as u64, offset as u64, handle as usize, None)
    }

    fn cuMemUnmap(ptr: u64, size: usize) {
        let driver = driver()?;
        let mut space = write();
        let contexts: Vec<_> = space
            .whole(ptr, size as u64)?
            .iter()
            .filter_map(|at| space.mappings.get(at))
            .flat_map(|mapping| mapping.access.iter().enumerate().filter(|(_, flags)| **flags != 0))
            .filter_map(|(device, _)| driver.devices.get(device))
            .map(|device| device.primary)
            .collect();
        // Work that uses it comes first, as the driver does it: the addresses must not go under it.
        for context in contexts {
            if context.is_busy() && context.is_alive() {
                context.synchronize()?;
            }
        }
        space.unmap(driver, ptr, size as u64)
    }

    fn cuMemSetAccess(ptr: u64, size: usize, descs: *const AccessDesc, count: usize) {
        static SAID: AtomicBool = AtomicBool::new(false);
        non_null(descs)?;
        let driver = driver()?;
        let mut space = write();
        for i in 0..count {
            let desc = descs.add(i).read();
            if desc.location.kind != DEVICE {
                return refuse_form("cuMemSetAccess for the host", &SAID);
            }
            let device = driver::device(desc.location.id)?.ordinal;
            if !matches!(desc.flags, 0 | 1 | 3) {
                return Err(Status::INVALID_VALUE);
            }
            space.set_access(driver, ptr, size as u64, device, desc.flags)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: *mut u64, location: *const MemLocation, ptr: u64) {
        non_null(flags)?;
        non_null(location)?;
        driver()?;
        let location = *location;
        if location.kind != DEVICE {
            return put(flags, 0);
        }
        let device = driver::device(location.id)?.ordinal as usize;
        let space = read();
        let (_, mapping) = space
            .mappings
            .range(..=ptr)
            .next_back()
            .filter(|(start, mapping)| ptr - **start < mapping.size)
            .ok_or(Status::INVALID_VALUE)?;
        put(flags, mapping.access.get(device).copied().unwrap_or(0).into())
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const AllocationProp, option: u32) {
        non_null(granularity)?;
        non_null(prop)?;
        driver()?;
        if option > 1 {
            return Err(Status::INVALID_VALUE);
        }
        put(granularity, wanted(&*prop)?.info.granule as usize)
    }

    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: u64) {
        non_null(prop)?;
        driver()?;
        let memory = memory_of(handle as usize)?;
        put(prop, AllocationProp {
            kind: PINNED,
            handle_types: memory.handle_types,
            location: MemLocation { kind: DEVICE, id: memory.device as i32 },
            win32: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *const c_void) {
        let address = address as u64;
        non_null(handle)?;
        driver()?;
        let space = write();
        let (_, mapping) = space
            .mappings
            .range(..=address)
            .next_back()
            .filter(|(start, mapping)| address - **start < mapping.size && mapping.part.is_none())
            .ok_or(Status::INVALID_VALUE)?;
        mapping.memory.handles.fetch_add(1, Ordering::Relaxed);
        put(handle, mapping.handle as u64)
    }

    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: u32, flags: u64) {
        non_null(shareable)?;
        let driver = driver()?;
        let memory = memory_of(handle as usize)?;
        if flags != 0 || kind != POSIX_FD || memory.handle_types & kind == 0 {
            return Err(Status::INVALID_VALUE);
        }
        share(driver)?;
        let token = driver.session.call(&MemoryExport { memory: memory.id })?.token;
        put(shareable.cast::<RawFd>(), shared_descriptor::make(&MAGIC, &token)?)
    }

    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: usize, kind: u32) {
        non_null(handle)?;
        let driver = driver()?;
        if kind != POSIX_FD {
            return Err(Status::INVALID_VALUE);
        }
        let token = shared_descriptor::read(&MAGIC, shareable).ok_or(Status::INVALID_VALUE)?;
        share(driver)?;
        put(handle, import(driver, token, POSIX_FD)?.0 as u64)
    }
}
