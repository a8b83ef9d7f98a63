//! Virtual memory management: memory without an address, addresses without memory, and mappings of one at the
//! other.
//!
//! The server has the same tables and checks everything again. The tables here answer the program's queries
//! and recognize invalid pointers without a round trip. Addresses are chosen here, outside of all devices'
//! windows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::memory::device_memory::Found;
use crate::memory::host_memory::HostMemory;
use crate::memory::{host_mappings, shared_descriptor};
use crate::process::context::{self, Context};
use crate::process::driver::{Device, Driver, Server};
use crate::process::fences::{self, SHARES};
use crate::process::ids::unique_id;
use client::handle::MemoryId;
use client::handles::Slab;
use client::ops::memory::{
    AddressFree, AddressReserve, MemoryAccess, MemoryCreate, MemoryImport, MemoryMap, MemoryRelease,
    MemoryUnmap, SPACE, SPACE_ALIGN, SPACE_SIZE,
};
use client::session::Session;
use client::{Status, log};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const DEVICE: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FD: u32 = 1;
/// The first bytes of a descriptor of exported memory. A token follows.
pub(crate) const MAGIC: shared_descriptor::Magic = *b"rgpu:mem";
/// Number of addresses that are tried if the server's process has something else at the chosen ones.
const ATTEMPTS: usize = 16;

/// Where memory is.
pub(crate) enum Home {
    /// On a server, with its ID there, on the device with this ordinal. `None`: another process's memory on a
    /// device that `CUDA_VISIBLE_DEVICES` hides from this one. Devices of the same server can be given
    /// access.
    Device {
        id: MemoryId,
        server: &'static Server,
        device: Option<u32>,
    },
    Host(HostMemory),
}

/// Memory with a handle of the program.
pub(crate) struct Memory {
    pub home: Home,
    size: u64,
    pub handle_types: u32,
    /// Number of references: `cuMemCreate` and every call that returned the handle again, minus
    /// `cuMemRelease`. Guarded by the lock of [`Space`], as is `mapped`.
    pub handles: AtomicU32,
    mapped: AtomicU32,
}

/// Memory at an address.
pub(crate) struct Mapping {
    pub size: u64,
    pub handle: usize,
    pub memory: Arc<Memory>,
    buffer: u64,
    /// The part that the program was given, if that is not everything: first address and size in bytes.
    pub part: Option<(u64, u64)>,
    /// `CUmemAccess_flags` by device.
    pub access: Vec<u32>,
    /// The same for the host, if it is host memory.
    pub host_access: u32,
}

impl Mapping {
    /// The device that has it, or if the program does not see that one, the first that may use it, or else
    /// the first one of its server.
    fn device<'a>(&self, driver: &'a Driver) -> Option<&'a Device> {
        match self.memory.home {
            Home::Device { device: Some(device), .. } => driver.devices.get(device as usize),
            Home::Device { server, device: None, .. } => {
                let may = driver.devices.iter().zip(&self.access).find(|(_, flags)| **flags != 0);
                let of_server = |device: &&Device| std::ptr::eq(device.server, server);
                may.map(|(device, _)| device).or_else(|| driver.devices.iter().find(of_server))
            }
            Home::Host(_) => None,
        }
    }
}

/// The program's virtual memory.
#[derive(Default)]
pub(crate) struct Space {
    reserved: BTreeMap<u64, u64>,
    /// Reservations that the server has released for host memory, by their first address.
    given_up: BTreeSet<u64>,
    pub mappings: BTreeMap<u64, Mapping>,
    /// Where the search for the next reservation starts.
    next: u64,
}

static SPACES: RwLock<Space> = RwLock::new(Space {
    reserved: BTreeMap::new(),
    given_up: BTreeSet::new(),
    mappings: BTreeMap::new(),
    next: 0,
});
static MEMORIES: Slab<Memory> = Slab::new(14);

/// Called before this process first shares memory. When this returns, everything that it has copied so far
/// has reached the device. Only errors of the current context are returned.
pub(crate) fn share(driver: &'static Driver) -> Result {
    SHARES.store(true, Ordering::SeqCst);
    let is_current = |context| context::current().is_ok_and(|current| std::ptr::eq(current, context));
    for server in driver.servers.iter().filter(|server| server.session.check().is_ok()) {
        for context in context::alive_of(server).filter(|context| context.is_busy()) {
            match context.legacy().synchronize() {
                // It is left to a call that concerns this context.
                Err(status) if !is_current(context) && !context.has_error() => context.fail(status),
                Err(_) if !is_current(context) => {}
                done => done?,
            }
        }
        wait_for_copies(server)?;
    }
    Ok(())
}

/// Waits for copies that the program was told are done, on streams that the legacy ones don't wait for. What
/// is behind such a copy, or on other streams, may wait for the other process.
fn wait_for_copies(server: &Server) -> Result {
    let mut open = fences::open(server).into_iter();
    open.try_for_each(|(stream, copy)| stream.session().wait_progress(|| stream.has_passed(copy)))
}

pub(crate) fn read() -> RwLockReadGuard<'static, Space> {
    SPACES.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write() -> RwLockWriteGuard<'static, Space> {
    SPACES.write().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an address is in a reservation made here for device memory.
#[inline]
pub(crate) fn is_here(address: u64) -> bool {
    in_space(address) && !host_mappings::is_here(address)
}

#[inline]
fn in_space(address: u64) -> bool {
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
    let context = mapping.device(driver)?.primary;
    Some(Found { base, size, context, buffer: mapping.buffer, pool: 0, sync_memops: false, managed: false })
}

/// The kinds of handle with which the memory mapped at an address can be exported, a mask of
/// `CUmemAllocationHandleType`.
pub(crate) fn handle_types(address: u64) -> u32 {
    let space = read();
    let mapping = space.mappings.range(..=address).next_back();
    let found = mapping.filter(|(start, mapping)| address - **start < mapping.size);
    found.map_or(0, |(_, mapping)| mapping.memory.handle_types)
}

/// Checks that a range (not 0 bytes) is mapped and that one device may access all of it. Returns what is
/// mapped at its beginning.
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

pub(crate) fn memory_of(handle: usize) -> Result<Arc<Memory>> {
    let memory = MEMORIES.get(handle).ok_or(Status::INVALID_VALUE)?;
    if memory.handles.load(Ordering::Relaxed) == 0 { Err(Status::INVALID_VALUE) } else { Ok(memory) }
}

fn new_id() -> MemoryId {
    static IDS: AtomicU32 = AtomicU32::new(1);
    MemoryId(IDS.fetch_add(1, Ordering::Relaxed))
}

/// The sessions that are not lost; all if every one is, so that the caller gets an error.
fn sessions(driver: &Driver) -> Vec<&'static Session> {
    let all = driver.servers.iter().map(|server| server.session);
    let usable: Vec<_> = all.clone().filter(|session| session.check().is_ok()).collect();
    if usable.is_empty() { all.collect() } else { usable }
}

/// Reserves addresses with every server, since memory of any device may be mapped there.
fn reserve_with_all(driver: &Driver, address: u64, size: u64) -> Result {
    let sessions = sessions(driver);
    for (done, session) in sessions.iter().enumerate() {
        if let Err(status) = session.call(&AddressReserve { address, size }) {
            for session in &sessions[..done] {
                // The first error is the one to report.
                let _ = session.call(&AddressFree { address, size });
            }
            return Err(status);
        }
    }
    Ok(())
}

/// Frees such addresses. Nothing is mapped there.
fn free_with_all(driver: &Driver, address: u64, size: u64) -> Result {
    let freed =
        sessions(driver).into_iter().map(|session| session.call(&AddressFree { address, size }).map(drop));
    freed.reduce(|first, other| first.and(other)).unwrap_or(Ok(()))
}

/// Whether the last of the given ranges (first address, size), in order, ends before an address.
fn is_apart(mut ranges: impl DoubleEndedIterator<Item = (u64, u64)>, address: u64) -> bool {
    ranges.next_back().is_none_or(|(start, size)| start + size <= address)
}

impl Space {
    pub fn granule(driver: &Driver) -> u64 {
        driver.devices.iter().map(|device| device.info.granule).max().unwrap_or(1).max(1)
    }

    fn is_free(&self, address: u64, size: u64) -> bool {
        is_apart(self.reserved.range(..address + size).map(|(start, len)| (*start, *len)), address)
    }

    /// The first free range from `from`. `None` if there is none before the end.
    fn free_from(&self, from: u64, size: u64, alignment: u64) -> Option<u64> {
        let mut at = from.checked_next_multiple_of(alignment)?;
        loop {
            let end = at.checked_add(size).filter(|end| *end <= SPACE + SPACE_SIZE)?;
            match self.reserved.range(..end).next_back() {
                Some((start, len)) if start + len > at => {
                    // There may be more behind this one, so continue after it.
                    let over = self.reserved.range(at..end).next().map_or(start + len, |(a, l)| a + l);
                    at = over.max(at + 1).checked_next_multiple_of(alignment)?;
                }
                _ => return Some(at),
            }
        }
    }

    /// Reserves addresses, with the server.
    pub fn reserve(&mut self, driver: &Driver, size: u64, alignment: u64, wish: u64) -> Result<u64> {
        let granule = Space::granule(driver);
        if size == 0 || !size.is_multiple_of(granule) || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(Status::INVALID_VALUE);
        }
        let alignment = alignment.max(SPACE_ALIGN);
        let wished = in_space(wish)
            && wish.is_multiple_of(alignment)
            && wish.checked_add(size).is_some_and(|end| end <= SPACE + SPACE_SIZE)
            && self.is_free(wish, size);
        let mut from = if wished { wish } else { self.next.max(SPACE) };
        for _ in 0..ATTEMPTS {
            let found = self.free_from(from, size, alignment);
            let address =
                found.or_else(|| self.free_from(SPACE, size, alignment)).ok_or(Status::OUT_OF_MEMORY)?;
            match reserve_with_all(driver, address, size) {
                Ok(()) => {
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

    pub fn free(&mut self, driver: &Driver, address: u64, size: u64) -> Result {
        if self.reserved.get(&address) != Some(&size) {
            return Err(Status::INVALID_VALUE);
        }
        if !self.given_up.contains(&address) {
            free_with_all(driver, address, size)?;
        } else if self.mappings.range(address..address + size).next().is_some() {
            return Err(Status::INVALID_VALUE);
        }
        self.given_up.remove(&address);
        self.reserved.remove(&address);
        Ok(())
    }

    /// The first address and the size of the reservation around a range.
    fn reservation(&self, address: u64, size: u64) -> Option<(u64, u64)> {
        let (start, whole) = self.reserved.range(..=address).next_back()?;
        let is_around = size > 0 && address.checked_add(size).is_some_and(|end| end <= start + whole);
        is_around.then_some((*start, *whole))
    }

    /// Prepares the reservation around a range for host memory or for device memory, and returns its first
    /// address. A reservation that has had host memory can have nothing else, because the server may not have
    /// unregistered its mirror yet.
    fn prepare(&mut self, driver: &Driver, address: u64, size: u64, for_host: bool) -> Result<u64> {
        let (start, whole) = self.reservation(address, size).ok_or(Status::INVALID_VALUE)?;
        if self.given_up.contains(&start) == for_host {
            return Ok(start);
        }
        if !for_host || self.mappings.range(start..start + whole).next().is_some() {
            return refuse_form!("cuMemMap of host memory and memory of a device in one reservation");
        }
        free_with_all(driver, start, whole)?;
        self.given_up.insert(start);
        Ok(start)
    }

    /// Whether nothing is mapped in a range.
    fn is_unmapped(&self, address: u64, size: u64) -> bool {
        is_apart(
            self.mappings.range(..address + size).map(|(start, mapping)| (*start, mapping.size)),
            address,
        )
    }

    pub fn map(
        &mut self,
        driver: &Driver,
        address: u64,
        size: u64,
        offset: u64,
        handle: usize,
        part: Option<(u64, u64)>,
    ) -> Result {
        let memory = memory_of(handle)?;
        let reservation = self.prepare(driver, address, size, matches!(memory.home, Home::Host(_)))?;
        match &memory.home {
            Home::Device { id, server, .. } => {
                server.session.call(&MemoryMap { memory: *id, offset, address, size })?;
            }
            Home::Host(host) => {
                let whole = size.is_multiple_of(Space::granule(driver))
                    && address.is_multiple_of(Space::granule(driver));
                if !whole || offset != 0 || size > memory.size || !self.is_unmapped(address, size) {
                    return Err(Status::INVALID_VALUE);
                }
                if memory.mapped.load(Ordering::Relaxed) > 0 || size < memory.size {
                    return refuse_form!("cuMemMap of host memory at two places, or of a part of it");
                }
                host.map(reservation, address, size)?;
            }
        }
        memory.mapped.fetch_add(1, Ordering::Relaxed);
        let access = vec![0; driver.devices.len()];
        let mapping = Mapping { size, handle, memory, buffer: unique_id(), part, access, host_access: 0 };
        self.mappings.insert(address, mapping);
        Ok(())
    }

    /// The mappings that cover a range exactly and without gaps.
    pub fn whole(&self, address: u64, size: u64) -> Result<Vec<u64>> {
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

    /// First address and size of the mapping that [`open`] made for the part at an address.
    fn opened(&self, address: u64) -> Result<(u64, u64)> {
        let found = self.mappings.range(..=address).next_back();
        found
            .filter(|(_, mapping)| mapping.part.is_some_and(|(base, _)| base == address))
            .map(|(start, mapping)| (*start, mapping.size))
            .ok_or(Status::INVALID_VALUE)
    }

    /// The contexts whose work may use what is mapped in a range.
    pub fn users(&self, driver: &Driver, address: u64, size: u64) -> Result<Vec<&'static Context>> {
        let whole = self.to_unmap(address, size)?;
        let mappings = whole.iter().filter_map(|at| self.mappings.get(at));
        let users = mappings.flat_map(|mapping| {
            // Any device can access host memory.
            let any = matches!(mapping.memory.home, Home::Host(_));
            let may =
                driver.devices.iter().zip(&mapping.access).filter(move |(_, flags)| any || **flags != 0);
            may.map(|(device, _)| device.primary)
        });
        Ok(users.collect())
    }

    /// The mappings that a range consists of; none in a reserved range without memory, which may be unmapped
    /// as well.
    fn to_unmap(&self, address: u64, size: u64) -> Result<Vec<u64>> {
        if self.reservation(address, size).is_some() && self.is_unmapped(address, size) {
            return Ok(Vec::new());
        }
        self.whole(address, size)
    }

    pub fn unmap(&mut self, address: u64, size: u64) -> Result {
        for address in self.to_unmap(address, size)? {
            let Some(mapping) = self.mappings.get(&address) else { continue };
            match &mapping.memory.home {
                Home::Device { server, .. } => {
                    server.session.call(&MemoryUnmap { address, size: mapping.size })?;
                }
                Home::Host(host) => {
                    let keep = mapping.memory.handles.load(Ordering::Relaxed) > 0;
                    host.unmap(address, mapping.size, keep)?;
                }
            }
            if let Some(mapping) = self.mappings.remove(&address) {
                mapping.memory.mapped.fetch_sub(1, Ordering::Relaxed);
                self.end_if_unused(mapping.handle, &mapping.memory)?;
            }
        }
        Ok(())
    }

    pub fn set_access(
        &mut self,
        driver: &Driver,
        address: u64,
        size: u64,
        device: u32,
        flags: u32,
    ) -> Result {
        for address in self.whole(address, size)? {
            let Some(mapping) = self.mappings.get_mut(&address) else { continue };
            // A device can always reach pinned memory.
            if let Home::Device { server, .. } = mapping.memory.home {
                let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
                if !std::ptr::eq(server, device.server) {
                    // No device of another server reaches it.
                    return Err(Status::INVALID_DEVICE);
                }
                let op = MemoryAccess { address, size: mapping.size, device: device.number, flags };
                server.session.call(&op)?;
            }
            if let Some(place) = mapping.access.get_mut(device as usize) {
                *place = flags;
            }
        }
        Ok(())
    }

    /// The host can always reach host memory.
    pub fn set_host_access(&mut self, address: u64, size: u64, flags: u32) -> Result {
        for address in self.whole(address, size)? {
            let Some(mapping) = self.mappings.get_mut(&address) else { continue };
            if let Home::Device { .. } = mapping.memory.home {
                return refuse_form!("cuMemSetAccess for the host on memory of a device");
            }
            mapping.host_access = flags;
        }
        Ok(())
    }

    /// Frees memory when its last handle and its last mapping are gone.
    fn end_if_unused(&self, handle: usize, memory: &Memory) -> Result {
        if memory.handles.load(Ordering::Relaxed) == 0 && memory.mapped.load(Ordering::Relaxed) == 0 {
            MEMORIES.remove(handle);
            if let Home::Device { id, server, .. } = memory.home {
                server.session.call(&MemoryRelease { memory: id })?;
            }
        }
        Ok(())
    }

    pub fn release(&self, handle: usize) -> Result {
        let memory = memory_of(handle)?;
        memory.handles.fetch_sub(1, Ordering::Relaxed);
        self.end_if_unused(handle, &memory)
    }
}

/// The status for memory of a device that no session of this process has. A line says so, once.
pub(crate) fn of_no_session() -> Status {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        log::warn(format_args!(
            "memory of another process is on a GPU that this process's session does not have"
        ));
    });
    Status::INVALID_DEVICE
}

/// Imports memory that a process has exported. Returns its handle, and whether this process did.
pub(crate) fn import(
    driver: &Driver,
    server: &'static Server,
    token: [u8; 16],
    handle_types: u32,
) -> Result<(usize, bool)> {
    let id = new_id();
    let reply = server.session.call(&MemoryImport { memory: id, token }).map_err(|status| match status {
        Status::INVALID_DEVICE => of_no_session(),
        other => other,
    })?;
    // The devices that the program does not see are behind the others.
    let device = driver.device_on(server, reply.device).map(|device| device.ordinal);
    let home = Home::Device { id, server, device };
    let (handles, mapped) = (AtomicU32::new(1), AtomicU32::new(0));
    let memory = Memory { home, size: reply.size, handle_types, handles, mapped };
    Ok((MEMORIES.insert(Arc::new(memory)).ok_or(Status::OUT_OF_MEMORY)?, reply.own))
}

/// The same for memory of an unknown server: tries all, since only one has issued the token.
pub(crate) fn import_from_any(driver: &Driver, token: [u8; 16], handle_types: u32) -> Result<(usize, bool)> {
    let asked = driver.servers.iter().map(|server| import(driver, server, token, handle_types));
    let mut refused = Err(Status::INVALID_VALUE);
    for (at, answer) in asked.enumerate() {
        match answer {
            Err(status) if at == 0 => refused = Err(status),
            Err(_) => {}
            found => return found,
        }
    }
    refused
}

/// Maps memory that a process has exported, for its own device if the program sees it ([`set_access_to`] adds
/// others). Returns the address of `offset`. Memory that this process exported itself is opened only with
/// `own_too`; otherwise the result is `INVALID_CONTEXT`.
pub(crate) fn open(
    driver: &Driver,
    server: &'static Server,
    token: [u8; 16],
    offset: u64,
    size: u64,
    own_too: bool,
) -> Result<u64> {
    let mut space = write();
    let (handle, own) = import(driver, server, token, 0)?;
    let memory = memory_of(handle)?;
    let inside = offset.checked_add(size).is_some_and(|end| end <= memory.size);
    let opened = if own && !own_too {
        Err(Status::INVALID_CONTEXT)
    } else if !inside {
        Err(Status::INVALID_VALUE)
    } else {
        space.reserve(driver, memory.size, 0, 0).and_then(|address| {
            let part = Some((address + offset, size));
            let own_access = |space: &mut Space| match memory.home {
                Home::Device { device: Some(device), .. } => {
                    space.set_access(driver, address, memory.size, device, 3)
                }
                _ => Ok(()),
            };
            let mapped = space
                .map(driver, address, memory.size, 0, handle, part)
                .and_then(|()| own_access(&mut space));
            if mapped.is_err() {
                // Undo what was done. The first error is the one to report.
                let _ = space.unmap(address, memory.size);
                let _ = space.free(driver, address, memory.size);
            }
            mapped.map(|()| address + offset)
        })
    };
    // The mapping keeps the memory.
    space.release(handle)?;
    opened
}

/// Sets what devices may do with what [`open`] opened: pairs of a device and its `CUmemAccess_flags`.
pub(crate) fn set_access_to(driver: &Driver, address: u64, given: &[(u32, u32)]) -> Result {
    let mut space = write();
    let (start, size) = space.opened(address)?;
    given.iter().try_for_each(|(device, flags)| space.set_access(driver, start, size, *device, *flags))
}

/// The device that has what [`open`] opened. `None` if the program does not see it.
pub(crate) fn home_of_opened(address: u64) -> Result<Option<u32>> {
    let space = read();
    let (start, _) = space.opened(address)?;
    match space.mappings.get(&start).map(|mapping| &mapping.memory.home) {
        Some(Home::Device { device, .. }) => Ok(*device),
        _ => Err(Status::INVALID_VALUE),
    }
}

/// The contexts whose work may use what [`open`] opened.
pub(crate) fn users_of_opened(driver: &Driver, address: u64) -> Result<Vec<&'static Context>> {
    let space = read();
    let (start, size) = space.opened(address)?;
    space.users(driver, start, size)
}

/// Closes what [`open`] opened.
pub(crate) fn close(driver: &Driver, address: u64) -> Result {
    let mut space = write();
    let (start, size) = space.opened(address)?;
    space.unmap(start, size)?;
    space.free(driver, start, size)
}

/// Reserves addresses for at least `size` bytes of any device. Returns the first address and the size.
pub(crate) fn reserve(driver: &Driver, size: u64) -> Result<(u64, u64)> {
    let size = size.checked_next_multiple_of(Space::granule(driver)).ok_or(Status::OUT_OF_MEMORY)?;
    write().reserve(driver, size, 0, 0).map(|address| (address, size))
}

/// Frees addresses of [`reserve`].
pub(crate) fn unreserve(driver: &Driver, address: u64, size: u64) -> Result {
    write().free(driver, address, size)
}

/// Makes memory of a device for this library's own use. Returns its handle.
pub(crate) fn create(driver: &Driver, device: u32, size: u64) -> Result<usize> {
    make(driver, device, size, 0)
}

/// Maps all of such memory at reserved addresses, for its own device.
pub(crate) fn map(driver: &Driver, address: u64, size: u64, handle: usize, device: u32) -> Result {
    let mut space = write();
    space.map(driver, address, size, 0, handle, Some((address, size)))?;
    space.set_access(driver, address, size, device, 3)
}

/// Unmaps such memory. No work may use it there.
pub(crate) fn unmap(address: u64, size: u64) -> Result {
    write().unmap(address, size)
}

/// Frees such memory.
pub(crate) fn release(handle: usize) -> Result {
    write().release(handle)
}

pub(crate) fn make(driver: &Driver, device: u32, size: u64, handle_types: u32) -> Result<usize> {
    let id = new_id();
    let exportable = handle_types & POSIX_FD != 0;
    let on = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
    on.server.session.call(&MemoryCreate { memory: id, device: on.number, size, exportable })?;
    let (handles, mapped) = (AtomicU32::new(1), AtomicU32::new(0));
    let memory = Memory {
        home: Home::Device { id, server: on.server, device: Some(device) },
        size,
        handle_types,
        handles,
        mapped,
    };
    MEMORIES.insert(Arc::new(memory)).ok_or(Status::OUT_OF_MEMORY)
}

/// Makes host memory. Returns its handle.
pub(crate) fn make_host(size: u64, location: MemLocation) -> Result<usize> {
    let home = Home::Host(HostMemory::new(location));
    let (handles, mapped) = (AtomicU32::new(1), AtomicU32::new(0));
    let memory = Memory { home, size, handle_types: 0, handles, mapped };
    MEMORIES.insert(Arc::new(memory)).ok_or(Status::OUT_OF_MEMORY)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use client::data::HostIn;
    use client::handle::ContextId;
    use client::ops::copy::MemcpyHtoD;

    use super::*;
    use crate::streams::stream_table;

    #[test]
    fn a_copy_that_the_program_was_told_is_done_reaches_the_device_before_memory_is_shared() {
        let server = Server::unused();
        let context = Context::new(ContextId(0), server, 0, 0, false);
        let stream = stream_table::unnamed(context).unwrap();
        assert_eq!(wait_for_copies(server), Ok(()));
        let copy = MemcpyHtoD { stream: stream.id, dst: 1 << 40, src: HostIn::Inline(&[1]) };
        let copy = stream.settled_work(&copy).unwrap();
        fences::copied(&stream, None, Some(copy), || false).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| wait_for_copies(server));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished());
            let behind = stream.mark().unwrap();
            stream.is_synced(behind);
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
    }
}
