//! Virtual memory management: memory without an address, addresses without memory, and mappings of one at the
//! other.
//!
//! The server has the same tables and checks everything again. The tables here answer the program's queries
//! and recognize invalid pointers without a round trip. Addresses are chosen here, outside of all devices'
//! windows: in [`SPACE`], or in windows that no device has if the program asks for them or [`SPACE`] is full.
//!
//! While a server is asked to change something, the table is not locked: copies find there what they use, and
//! a server that does not answer must not stop those of others. Whoever changes something at some addresses
//! has a [claim](Claims) on them instead.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::memory::claims::Claims;
use crate::memory::device_memory::Found;
use crate::memory::host_memory::HostMemory;
use crate::memory::{host_mappings, shared_descriptor};
use crate::process::context::{self, Context};
use crate::process::driver::{Device, Driver, Server};
use crate::process::fences::{self, SHARES};
use crate::process::ids::unique_id;
use client::channel::MAX_DEVICES;
use client::handle::MemoryId;
use client::handles::Slab;
use client::ops::memory::{
    AddressFree, AddressReserve, MemoryAccess, MemoryCreate, MemoryImport, MemoryMap, MemoryRelease,
    MemoryUnmap, SPACE, SPACE_ALIGN, SPACE_SIZE, WINDOW_SIZE, may_be_reserved, window,
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
    /// Number of its mappings, and of those that are being made.
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

/// Reserved addresses.
#[derive(Clone, Copy)]
struct Reservation {
    size: u64,
    /// The only server that they are reserved with. `None`: with all, since memory of any device may be
    /// mapped there.
    only: Option<&'static Server>,
}

/// The program's virtual memory.
pub(crate) struct Space {
    reserved: BTreeMap<u64, Reservation>,
    /// Reservations that the server has released for host memory, by their first address.
    given_up: BTreeSet<u64>,
    pub mappings: BTreeMap<u64, Mapping>,
    /// Where the search for the next reservation starts.
    next: u64,
}

static SPACES: RwLock<Space> = RwLock::new(Space::new());
static MEMORIES: Slab<Memory> = Slab::new(14);

/// Whether anything outside [`SPACE`] has ever been reserved.
static ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Addresses at which a thread reserves, maps, unmaps or gives access.
static CHANGING: Claims = Claims::new();

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
    let here = in_space(address) || ELSEWHERE.load(Ordering::Acquire) && is_reserved(address);
    here && !host_mappings::is_here(address)
}

#[inline]
fn in_space(address: u64) -> bool {
    address.wrapping_sub(SPACE) < SPACE_SIZE
}

/// Whether an address that may be reserved is in a window: these are below [`SPACE`].
fn in_windows(address: u64) -> bool {
    address < SPACE
}

#[cold]
fn is_reserved(address: u64) -> bool {
    read().reservation(address, 1).is_some()
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

/// Whether the program has mapped memory here itself (`cuMemMap`).
pub(crate) fn is_mapped(address: u64) -> bool {
    let space = read();
    let mapping = space.mappings.range(..=address).next_back();
    mapping.is_some_and(|(start, mapping)| address - start < mapping.size && mapping.part.is_none())
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

/// The sessions with which addresses are reserved and that are not lost; all if every one is, so that the
/// caller gets an error.
fn sessions(driver: &Driver, only: Option<&'static Server>) -> Vec<&'static Session> {
    let those = only.map_or_else(|| driver.servers.clone(), |only| vec![only]);
    let all = those.into_iter().map(|server| server.session);
    let usable: Vec<_> = all.clone().filter(|session| session.check().is_ok()).collect();
    if usable.is_empty() { all.collect() } else { usable }
}

/// Reserves addresses with their servers.
fn reserve_with(driver: &Driver, address: u64, Reservation { size, only }: Reservation) -> Result {
    let sessions = sessions(driver, only);
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
fn free_with(driver: &Driver, address: u64, Reservation { size, only }: Reservation) -> Result {
    let freed = sessions(driver, only).into_iter().map(|session| {
        match session.call(&AddressFree { address, size }) {
            // One that is lost has reserved nothing any more.
            Err(_) if session.check().is_err() && driver.check().is_ok() => Ok(()),
            freed => freed.map(drop),
        }
    });
    freed.reduce(|first, other| first.and(other)).unwrap_or(Ok(()))
}

/// Whether the last of the given ranges (first address, size), in order, ends before an address.
fn is_apart(mut ranges: impl DoubleEndedIterator<Item = (u64, u64)>, address: u64) -> bool {
    ranges.next_back().is_none_or(|(start, size)| start + size <= address)
}

impl Space {
    const fn new() -> Space {
        Space { reserved: BTreeMap::new(), given_up: BTreeSet::new(), mappings: BTreeMap::new(), next: 0 }
    }

    pub fn granule(driver: &Driver) -> u64 {
        driver.devices.iter().map(|device| device.info.granule).max().unwrap_or(1).max(1)
    }

    fn is_free(&self, address: u64, size: u64) -> bool {
        is_apart(self.reserved.range(..address + size).map(|(start, it)| (*start, it.size)), address)
    }

    /// The first free range inside of another one. `None` if there is none.
    fn free_in(&self, within: Range<u64>, size: u64, alignment: u64) -> Option<u64> {
        let mut at = within.start.checked_next_multiple_of(alignment)?;
        loop {
            let end = at.checked_add(size).filter(|end| *end <= within.end)?;
            match self.reserved.range(..end).next_back() {
                Some((start, Reservation { size: len, .. })) if start + len > at => {
                    // There may be more behind this one, so continue after it.
                    let over = self.reserved.range(at..end).next().map_or(start + len, |(a, it)| a + it.size);
                    at = over.max(at + 1).checked_next_multiple_of(alignment)?;
                }
                _ => return Some(at),
            }
        }
    }

    /// The first address to try: the wish, if it may be reserved and is free.
    fn first(&self, driver: &Driver, size: u64, alignment: u64, wish: u64) -> u64 {
        let wished = wish.is_multiple_of(alignment)
            && may_be_reserved(wish, size, driver.windows())
            && self.is_free(wish, size);
        if wished { wish } else { self.next.max(SPACE) }
    }

    /// Chooses addresses: a wish in a window, or from `from` on if there are some. If [`SPACE`] is full, they
    /// are in the `others`: windows that no device has.
    fn take(
        &mut self,
        from: u64,
        others: &[Range<u64>],
        alignment: u64,
        reservation: Reservation,
    ) -> Result<u64> {
        let (size, end) = (reservation.size, SPACE + SPACE_SIZE);
        let there = || self.is_free(from, size).then_some(from);
        let found = if in_windows(from) { there() } else { self.free_in(from..end, size, alignment) };
        let address = found
            .or_else(|| self.free_in(SPACE..end, size, alignment))
            .or_else(|| others.iter().find_map(|other| self.free_in(other.clone(), size, alignment)))
            .ok_or(Status::OUT_OF_MEMORY)?;
        self.reserved.insert(address, reservation);
        if !in_windows(address) {
            self.next = address + size;
        }
        Ok(address)
    }

    /// The reservation around a range, and its first address.
    fn reservation(&self, address: u64, size: u64) -> Option<(u64, Reservation)> {
        let (start, found) = self.reserved.range(..=address).next_back()?;
        let is_around = size > 0 && address.checked_add(size).is_some_and(|end| end <= start + found.size);
        is_around.then_some((*start, *found))
    }

    /// Whether nothing is mapped in a range.
    fn is_unmapped(&self, address: u64, size: u64) -> bool {
        is_apart(
            self.mappings.range(..address + size).map(|(start, mapping)| (*start, mapping.size)),
            address,
        )
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
            may.flat_map(|(device, _)| context::of_device(device.ordinal))
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

    /// Takes the handle of memory away when its last reference and its last mapping are gone. The caller then
    /// [ends](end) the memory.
    fn is_last(&mut self, handle: usize, memory: &Memory) -> bool {
        let unused =
            memory.handles.load(Ordering::Relaxed) == 0 && memory.mapped.load(Ordering::Relaxed) == 0;
        unused && MEMORIES.remove(handle).is_some()
    }
}

/// Reserves addresses for memory of any device.
pub(crate) fn reserve_for_any(driver: &Driver, size: u64, alignment: u64, wish: u64) -> Result<u64> {
    reserve_at(driver, Reservation { size, only: None }, alignment, wish)
}

/// The addresses of the windows that none of these devices has, those first that a server will less likely
/// have reserved for devices that the program does not see.
fn windows_of_none(devices: Range<u32>) -> Vec<Range<u64>> {
    let behind = window(devices.end)..window(MAX_DEVICES);
    let before = window(0)..window(devices.start);
    [behind, before].into_iter().filter(|range| !range.is_empty()).collect()
}

fn reserve_at(driver: &Driver, reservation: Reservation, alignment: u64, wish: u64) -> Result<u64> {
    let (size, granule) = (reservation.size, Space::granule(driver));
    if size == 0 || !size.is_multiple_of(granule) || (alignment != 0 && !alignment.is_power_of_two()) {
        return Err(Status::INVALID_VALUE);
    }
    let alignment = alignment.max(SPACE_ALIGN);
    let mut from = read().first(driver, size, alignment, wish);
    let mut others = windows_of_none(driver.windows());
    for _ in 0..ATTEMPTS {
        // From here on no other thread gets these addresses.
        let address = write().take(from, &others, alignment, reservation)?;
        if in_windows(address) {
            ELSEWHERE.store(true, Ordering::Release);
        }
        let _changing = CHANGING.take(address, size);
        match reserve_with(driver, address, reservation) {
            Ok(()) => return Ok(address),
            Err(status) => {
                write().reserved.remove(&address);
                // An older server reserves nothing outside [`SPACE`].
                let may_be_older = in_windows(address) && status == Status::INVALID_VALUE;
                if status != Status::OUT_OF_MEMORY && !may_be_older {
                    return Err(status);
                }
                from = match in_windows(address) {
                    true if address == wish => read().next.max(SPACE),
                    // The server may have reserved the whole window for another device of its own.
                    true => {
                        let next = window(((address - window(0)) / WINDOW_SIZE) as u32 + 1);
                        others.retain_mut(|other| {
                            if other.contains(&address) {
                                other.start = next;
                            }
                            !other.is_empty()
                        });
                        SPACE + SPACE_SIZE
                    }
                    false => address + size,
                };
            }
        }
    }
    Err(Status::OUT_OF_MEMORY)
}

/// Frees reserved addresses.
pub(crate) fn free(driver: &Driver, address: u64, size: u64) -> Result {
    let _changing = CHANGING.take(address, size.max(1));
    free_claimed(driver, address, size)
}

/// The same for whoever has the claim.
fn free_claimed(driver: &Driver, address: u64, size: u64) -> Result {
    let (reservation, given_up) = {
        let space = read();
        let found = space.reserved.get(&address).filter(|found| found.size == size);
        // A server that has nothing there would free them, whatever is there of another one's.
        if space.mappings.range(address..address.saturating_add(size)).next().is_some() {
            return Err(Status::INVALID_VALUE);
        }
        (*found.ok_or(Status::INVALID_VALUE)?, space.given_up.contains(&address))
    };
    if !given_up {
        free_with(driver, address, reservation)?;
    }
    let mut space = write();
    space.given_up.remove(&address);
    space.reserved.remove(&address);
    Ok(())
}

/// Maps memory at reserved addresses. `part`: what the program is given of it, if not everything.
pub(crate) fn map_at(
    driver: &Driver,
    (address, size): (u64, u64),
    offset: u64,
    handle: usize,
    part: Option<(u64, u64)>,
) -> Result {
    let memory = memory_of(handle)?;
    let for_host = matches!(memory.home, Home::Host(_));
    let (start, reservation) = read().reservation(address, size).ok_or(Status::INVALID_VALUE)?;
    // Host memory changes what a whole reservation is for.
    let _changing =
        if for_host { CHANGING.take(start, reservation.size) } else { CHANGING.take(address, size) };
    {
        let space = write();
        let again = space.reservation(address, size);
        let is_it = again.is_some_and(|(at, found)| at == start && found.size == reservation.size);
        // A server knows only its own mappings.
        if !is_it || !space.is_unmapped(address, size) || memory.handles.load(Ordering::Relaxed) == 0 {
            return Err(Status::INVALID_VALUE);
        }
        if space.given_up.contains(&start) != for_host {
            // A reservation that has had host memory can have nothing else, because the server may not have
            // unregistered its mirror yet.
            let whole = space.mappings.range(start..start + reservation.size);
            if !for_host || whole.count() > 0 {
                return refuse_form!("cuMemMap of host memory and memory of a device in one reservation");
            }
        }
        if let Home::Host(_) = memory.home {
            let granule = Space::granule(driver);
            let whole = size.is_multiple_of(granule) && address.is_multiple_of(granule);
            if !whole || offset != 0 || size > memory.size {
                return Err(Status::INVALID_VALUE);
            }
            if memory.mapped.load(Ordering::Relaxed) > 0 || size < memory.size {
                return refuse_form!("cuMemMap of host memory at two places, or of a part of it");
            }
        }
        memory.mapped.fetch_add(1, Ordering::Relaxed);
    }
    let mapped = match &memory.home {
        Home::Device { id, server, .. } => {
            server.session.call(&MemoryMap { memory: *id, offset, address, size }).map(drop)
        }
        Home::Host(host) => give_up(driver, start, reservation).and_then(|()| host.map(start, address, size)),
    };
    if let Err(status) = mapped {
        // The first error is the one to report.
        let _ = unmapped(None, handle, &memory);
        return Err(status);
    }
    let access = vec![0; driver.devices.len()];
    let mapping = Mapping { size, handle, memory, buffer: unique_id(), part, access, host_access: 0 };
    write().mappings.insert(address, mapping);
    Ok(())
}

/// Frees the addresses of a reservation with its servers, for host memory, unless that was done.
fn give_up(driver: &Driver, start: u64, reservation: Reservation) -> Result {
    if !read().given_up.contains(&start) {
        free_with(driver, start, reservation)?;
        write().given_up.insert(start);
    }
    Ok(())
}

/// A mapping is gone, or could not be made. Frees the memory if that was its last use.
fn unmapped(at: Option<u64>, handle: usize, memory: &Memory) -> Result {
    let is_last = {
        let mut space = write();
        at.and_then(|at| space.mappings.remove(&at));
        memory.mapped.fetch_sub(1, Ordering::Relaxed);
        space.is_last(handle, memory)
    };
    if is_last { end(memory) } else { Ok(()) }
}

/// Frees memory on its server.
fn end(memory: &Memory) -> Result {
    match memory.home {
        Home::Device { id, server, .. } => server.session.call(&MemoryRelease { memory: id }).map(drop),
        Home::Host(_) => Ok(()),
    }
}

/// Unmaps what is mapped in a range. No work may use it there.
pub(crate) fn unmap(address: u64, size: u64) -> Result {
    let _changing = CHANGING.take(address, size.max(1));
    unmap_claimed(address, size)
}

/// The same for whoever has the claim.
fn unmap_claimed(address: u64, size: u64) -> Result {
    let whole = read().to_unmap(address, size)?;
    for address in whole {
        let found = read().mappings.get(&address).map(|it| (it.size, it.handle, it.memory.clone()));
        let Some((size, handle, memory)) = found else { continue };
        match &memory.home {
            Home::Device { server, .. } => {
                server.session.call(&MemoryUnmap { address, size })?;
            }
            Home::Host(host) => {
                let keep = memory.handles.load(Ordering::Relaxed) > 0;
                host.unmap(address, size, keep)?;
            }
        }
        unmapped(Some(address), handle, &memory)?;
    }
    Ok(())
}

/// Sets what a device may do with what is mapped in a range.
pub(crate) fn set_access(driver: &Driver, address: u64, size: u64, device: u32, flags: u32) -> Result {
    let _changing = CHANGING.take(address, size.max(1));
    let whole = read().whole(address, size)?;
    for address in whole {
        let found = read().mappings.get(&address).map(|it| (it.size, it.memory.clone()));
        let Some((size, memory)) = found else { continue };
        // A device can always reach pinned memory.
        if let Home::Device { server, .. } = memory.home {
            let device = driver.devices.get(device as usize).ok_or(Status::INVALID_DEVICE)?;
            if !std::ptr::eq(server, device.server) {
                // No device of another server reaches it.
                return Err(Status::INVALID_DEVICE);
            }
            server.session.call(&MemoryAccess { address, size, device: device.number, flags })?;
        }
        let mut space = write();
        if let Some(place) =
            space.mappings.get_mut(&address).and_then(|it| it.access.get_mut(device as usize))
        {
            *place = flags;
        }
    }
    Ok(())
}

/// The host can always reach host memory.
pub(crate) fn set_host_access(address: u64, size: u64, flags: u32) -> Result {
    let mut space = write();
    for address in space.whole(address, size)? {
        let Some(mapping) = space.mappings.get_mut(&address) else { continue };
        if let Home::Device { .. } = mapping.memory.home {
            return refuse_form!("cuMemSetAccess for the host on memory of a device");
        }
        mapping.host_access = flags;
    }
    Ok(())
}

/// Gives a reference to memory back, and frees the memory if that was its last use.
pub(crate) fn release(handle: usize) -> Result {
    let memory = {
        let mut space = write();
        let memory = memory_of(handle)?;
        memory.handles.fetch_sub(1, Ordering::Relaxed);
        space.is_last(handle, &memory).then_some(memory)
    };
    memory.map_or(Ok(()), |memory| end(&memory))
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
    let (handle, own) = import(driver, server, token, 0)?;
    let memory = memory_of(handle)?;
    let inside = offset.checked_add(size).is_some_and(|end| end <= memory.size);
    let opened = if own && !own_too {
        Err(Status::INVALID_CONTEXT)
    } else if !inside {
        Err(Status::INVALID_VALUE)
    } else {
        let reservation = Reservation { size: memory.size, only: Some(server) };
        reserve_at(driver, reservation, 0, 0).and_then(|address| {
            let part = Some((address + offset, size));
            let own_access = || match memory.home {
                Home::Device { device: Some(device), .. } => {
                    set_access(driver, address, memory.size, device, 3)
                }
                _ => Ok(()),
            };
            let mapped = map_at(driver, (address, memory.size), 0, handle, part).and_then(|()| own_access());
            if mapped.is_err() {
                // Undo what was done. The first error is the one to report.
                let _ = unmap(address, memory.size);
                let _ = free(driver, address, memory.size);
            }
            mapped.map(|()| address + offset)
        })
    };
    // The mapping keeps the memory.
    release(handle)?;
    opened
}

/// Sets what devices may do with what [`open`] opened: pairs of a device and its `CUmemAccess_flags`.
pub(crate) fn set_access_to(driver: &Driver, address: u64, given: &[(u32, u32)]) -> Result {
    let (start, size) = read().opened(address)?;
    given.iter().try_for_each(|(device, flags)| set_access(driver, start, size, *device, *flags))
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
    let (start, size) = read().opened(address)?;
    let _changing = CHANGING.take(start, size);
    unmap_claimed(start, size)?;
    free_claimed(driver, start, size)
}

/// Reserves addresses for at least `size` bytes of memory of a server. Returns the first address and the
/// size.
pub(crate) fn reserve(driver: &Driver, server: &'static Server, size: u64) -> Result<(u64, u64)> {
    let size = size.checked_next_multiple_of(Space::granule(driver)).ok_or(Status::OUT_OF_MEMORY)?;
    let reservation = Reservation { size, only: Some(server) };
    reserve_at(driver, reservation, 0, 0).map(|address| (address, size))
}

/// Makes memory of a device for this library's own use. Returns its handle.
pub(crate) fn create(driver: &Driver, device: u32, size: u64) -> Result<usize> {
    make(driver, device, size, 0)
}

/// Maps all of such memory at reserved addresses, for its own device.
pub(crate) fn map(driver: &Driver, address: u64, size: u64, handle: usize, device: u32) -> Result {
    map_at(driver, (address, size), 0, handle, Some((address, size)))?;
    // The first error is the one to report.
    set_access(driver, address, size, device, 3).inspect_err(|_| _ = unmap(address, size))
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

    /// Memory of a server, as if that had answered, and its handle.
    fn memory_on(server: &'static Server, device: u32, size: u64) -> (usize, Arc<Memory>) {
        let home = Home::Device { id: new_id(), server, device: Some(device) };
        let (handles, mapped) = (AtomicU32::new(1), AtomicU32::new(0));
        let memory = Arc::new(Memory { home, size, handle_types: 0, handles, mapped });
        (MEMORIES.insert(memory.clone()).unwrap(), memory)
    }

    /// Reserved addresses, as if the servers had answered.
    fn reserved(place: u64, size: u64) -> u64 {
        let address = SPACE + SPACE_SIZE / 2 + place * SPACE_ALIGN;
        write().reserved.insert(address, Reservation { size, only: None });
        address
    }

    /// The result of something that must not ask these servers, which don't answer.
    fn without_asking<T: Send + 'static>(
        servers: [&'static Server; 2],
        call: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let asked = || servers.map(|server| server.session.last_seq());
        let before = asked();
        let called = std::thread::spawn(call);
        while !called.is_finished() {
            assert!(asked() == before, "a server is asked");
            std::thread::sleep(Duration::from_millis(1));
        }
        called.join().unwrap()
    }

    fn servers() -> ([&'static Server; 2], &'static Driver) {
        let servers = [(); 2].map(|()| Server::unused());
        (servers, Driver::for_tests(&servers))
    }

    #[test]
    fn a_server_that_does_not_answer_stops_no_use_of_memory_at_other_addresses() {
        let ([silent, other], driver) = servers();
        let address = reserved(0, SPACE_ALIGN);
        let (handle, memory) = memory_on(silent, 0, SPACE_ALIGN);
        let before = silent.session.last_seq();
        let maps = std::thread::spawn(move || map_at(driver, (address, SPACE_ALIGN), 0, handle, None));
        while silent.session.last_seq() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        // If these waited for the answer, so would the test: it never comes.
        let (uses, used) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let is_found = find(driver, address).is_some();
            let (handle, _) = memory_on(other, 1, SPACE_ALIGN);
            other.lose();
            let mapped = map_at(driver, (reserved(1, SPACE_ALIGN), SPACE_ALIGN), 0, handle, None);
            uses.send((is_found, mapped)).unwrap();
        });
        let (is_found, mapped) = used.recv_timeout(Duration::from_secs(60)).expect("the table is locked");
        assert!(!is_found && mapped.is_err(), "{mapped:?}");
        silent.lose();
        assert!(maps.join().unwrap().is_err());
        assert_eq!(memory.mapped.load(Ordering::Relaxed), 0);
        assert!(read().is_unmapped(address, SPACE_ALIGN));
    }

    #[test]
    fn servers_do_not_map_memory_over_each_others() {
        let (servers, driver) = servers();
        let address = reserved(2, 2 * SPACE_ALIGN);
        let (handle, memory) = memory_on(servers[0], 0, SPACE_ALIGN);
        memory.mapped.store(1, Ordering::Relaxed);
        let mapping = Mapping {
            size: SPACE_ALIGN,
            handle,
            memory,
            buffer: 1,
            part: None,
            access: vec![3, 0],
            host_access: 0,
        };
        write().mappings.insert(address, mapping);
        let (handle, memory) = memory_on(servers[1], 1, SPACE_ALIGN);
        let map = move || map_at(driver, (address, SPACE_ALIGN), 0, handle, None);
        assert_eq!(without_asking(servers, map), Err(Status::INVALID_VALUE));
        assert_eq!(memory.mapped.load(Ordering::Relaxed), 0);
        // The second server has nothing there and would free the addresses.
        let free = move || free(driver, address, 2 * SPACE_ALIGN);
        assert_eq!(without_asking(servers, free), Err(Status::INVALID_VALUE));
        assert!(read().reservation(address, SPACE_ALIGN).is_some());
    }

    #[test]
    fn addresses_that_a_program_asks_for_are_taken_if_no_device_has_them() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server; 2]);
        let mut space = Space::new();
        let mut take = |wish, size| {
            let from = space.first(driver, size, SPACE_ALIGN, wish);
            space.take(from, &[], SPACE_ALIGN, Reservation { size, only: None }).unwrap()
        };
        let far = SPACE + SPACE_SIZE / 2;
        let last = SPACE + SPACE_SIZE - WINDOW_SIZE;
        for wish in [window(2), window(4) + SPACE_ALIGN, far, last] {
            assert_eq!(take(wish, WINDOW_SIZE), wish);
        }
        // The devices have these, other reservations those, and the last is not aligned.
        for wish in [window(0), window(1), window(2), window(5), far, window(8) + SPACE_ALIGN / 2] {
            let address = take(wish, SPACE_ALIGN);
            assert!(in_space(address) && address != wish, "{wish:#x} {address:#x}");
        }
    }

    #[test]
    fn addresses_behind_a_full_space_are_in_windows_that_no_device_has() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server; 2]);
        let mut space = Space::new();
        let others = windows_of_none(driver.windows());
        let mut take = |size| {
            let from = space.first(driver, size, SPACE_ALIGN, 0);
            space.take(from, &others, SPACE_ALIGN, Reservation { size, only: None })
        };
        for _ in 0..SPACE_SIZE / WINDOW_SIZE {
            assert!(in_space(take(WINDOW_SIZE).unwrap()));
        }
        assert_eq!(take(3 * WINDOW_SIZE), Ok(window(2)));
        for number in 5..MAX_DEVICES {
            assert_eq!(take(WINDOW_SIZE), Ok(window(number)));
        }
        assert_eq!(take(SPACE_ALIGN), Err(Status::OUT_OF_MEMORY));
        assert_eq!(windows_of_none(2..4), [window(4)..window(MAX_DEVICES), window(0)..window(2)]);
    }

    #[test]
    fn all_contexts_of_devices_with_access_may_use_memory() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server; 3]);
        let made = Context::new(ContextId(9), server, 2, 0, false);
        let address = reserved(4, SPACE_ALIGN);
        let (handle, memory) = memory_on(server, 0, SPACE_ALIGN);
        let part = Some((address, SPACE_ALIGN));
        let access = vec![0, 3, 1];
        let mapping = Mapping { size: SPACE_ALIGN, handle, memory, buffer: 1, part, access, host_access: 0 };
        write().mappings.insert(address, mapping);
        let users = users_of_opened(driver, address).unwrap();
        let is_user = |context: &Context| users.iter().any(|user| std::ptr::eq(*user, context));
        assert!(!is_user(driver.devices[0].primary) && is_user(driver.devices[1].primary));
        assert!(is_user(driver.devices[2].primary) && is_user(made));
    }

    #[test]
    fn a_copy_that_the_program_was_told_is_done_reaches_the_device_before_memory_is_shared() {
        let server = Server::unused();
        let context = Context::new(ContextId(0), server, 0, 0, false);
        let stream = stream_table::unnamed(context).unwrap();
        assert_eq!(wait_for_copies(server), Ok(()));
        let copy = MemcpyHtoD { stream: stream.id, dst: 1 << 40, src: HostIn::Inline(&[1]) };
        let copy = stream.settled_work(&copy).unwrap();
        fences::copied(&stream, None, Some(copy), || false, || false).unwrap();
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
