//! The GPU's global memory: address windows backed by host memory, and the allocations in them.
//!
//! The caller chooses addresses. Each aligned terabyte that contains a mapping is a *window*: host address
//! space of that size, reserved once and kept until the GPU is destroyed. Adjacent device memory is therefore
//! adjacent on the host, and a kernel that still runs while its memory is unmapped only touches zero pages
//! inside the window.
//!
//! A *mapping* (in 2 MiB granules) provides memory, either new or from a file that several GPUs and processes
//! may share. An *allocation* inside mappings is what accesses are checked against.
//!
//! A GPU may be given access to *peers*: it looks in their windows for addresses that its own do not contain.
//! What [`Memory::show`] shows is mapped by each GPU that may use it, so it is not found at a peer.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use crate::error::{Error, Result};
use crate::machine::address_pool::AddressPool;

/// The granularity of mappings in bytes.
pub const GRANULE: u64 = 2 << 20;
/// Host address space is reserved in aligned windows of this many bytes.
const WINDOW: u64 = 1 << 40;
/// The first address that a caller can map. The GPU's own windows (shared, local, constant and module memory)
/// are below.
pub const FIRST_ADDRESS: u64 = 0x1000_0000_0000;
/// The end of the addresses that a caller can map: 47 bits, as on a real GPU.
pub const LAST_ADDRESS: u64 = 1 << 47;
/// The address of modules' globals and constants. The heap of kernels' `malloc` follows.
pub(crate) const MODULE_BASE: u64 = 0x0200_0000_0000;
const HEAP_BASE: u64 = MODULE_BASE + WINDOW;
const HEAP_END: u64 = HEAP_BASE + WINDOW;
/// Bytes before each address returned by a kernel's `malloc`, as on hardware. nvcc's `new T[n]` stores the
/// element count there if `T` has no destructor.
const HEAP_HEADER: u64 = 16;
/// Default size in bytes of the heap for kernels, as in CUDA.
const HEAP_LIMIT: u64 = 8 << 20;

/// Whether an address is in the range of modules' globals and constants.
pub(crate) fn is_of_module(addr: u64) -> bool {
    (MODULE_BASE..HEAP_BASE).contains(&addr)
}

/// A 2D range of device memory: `height` rows, `pitch` bytes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// Device address of the first row.
    pub addr: u64,
    /// Bytes from one row to the next.
    pub pitch: u64,
}

/// The allocation that contains an address: its bounds on the device and its place on the host.
#[derive(Clone, Copy)]
pub(crate) struct FoundAllocation {
    /// First device address.
    pub start: u64,
    /// One past the last device address.
    pub end: u64,
    /// Added to a device address to get the host address (wrapping).
    pub delta: u64,
}

struct Maps {
    windows: BTreeMap<u64, usize>,
    mappings: BTreeMap<u64, u64>,
    /// The mappings that are backed by a file.
    files: BTreeSet<u64>,
    allocations: BTreeMap<u64, u64>,
    /// Allocations made by [`Memory::show`], which are merged with adjacent ones.
    shown: BTreeSet<u64>,
    modules: AddressPool,
    heap: AddressPool,
    heap_limit: u64,
    used: u64,
}

/// All global memory of a GPU.
pub(crate) struct Memory {
    maps: RwLock<Maps>,
    peers: RwLock<Vec<Arc<dyn AsRef<Memory> + Send + Sync>>>,
    total: u64,
}

/// Counts releases. A cached [`FoundAllocation`] is valid as long as this has not changed. There is one
/// counter for all GPUs of the process, because the allocation may belong to a peer.
static GENERATION: AtomicU64 = AtomicU64::new(0);

fn poisoned<T>(e: std::sync::PoisonError<T>) -> T {
    e.into_inner()
}

impl Memory {
    pub fn new(total: u64) -> Memory {
        Memory {
            maps: RwLock::new(Maps {
                windows: BTreeMap::new(),
                mappings: BTreeMap::new(),
                files: BTreeSet::new(),
                allocations: BTreeMap::new(),
                shown: BTreeSet::new(),
                modules: AddressPool::new(MODULE_BASE, HEAP_BASE, 512, 0),
                heap: AddressPool::new(HEAP_BASE, HEAP_END, 16, 16),
                heap_limit: HEAP_LIMIT,
                used: 0,
            }),
            peers: RwLock::default(),
            total,
        }
    }

    /// Free and total bytes.
    pub fn info(&self) -> (u64, u64) {
        let used = self.maps.read().unwrap_or_else(poisoned).used;
        (self.total - used, self.total)
    }

    /// See [`crate::Gpu::map`].
    pub fn map(&self, addr: u64, size: u64) -> Result<()> {
        let end = addr.checked_add(size).filter(|&e| e <= LAST_ADDRESS);
        if size == 0
            || !addr.is_multiple_of(GRANULE)
            || !size.is_multiple_of(GRANULE)
            || addr < FIRST_ADDRESS
            || end.is_none()
        {
            return Err(Error::InvalidArgument(format!(
                "mapping of {size:#x} bytes at {addr:#x}: both must be multiples of {GRANULE:#x}, \
                 within {FIRST_ADDRESS:#x}..{LAST_ADDRESS:#x}"
            )));
        }
        map_any(&mut self.maps.write().unwrap_or_else(poisoned), self.total, addr, size, None)
    }

    /// See [`crate::Gpu::map_file`].
    pub fn map_file(&self, addr: u64, size: u64, file: BorrowedFd<'_>, offset: u64) -> Result<()> {
        let end = addr.checked_add(size).filter(|&e| e <= LAST_ADDRESS);
        let whole = [addr, size, offset].iter().all(|n| n.is_multiple_of(GRANULE));
        if size == 0 || !whole || addr < FIRST_ADDRESS || end.is_none() {
            return Err(Error::InvalidArgument(format!(
                "invalid mapping of {size:#x} bytes of a file from {offset:#x} at {addr:#x}"
            )));
        }
        let file = Some((file, offset));
        map_any(&mut self.maps.write().unwrap_or_else(poisoned), self.total, addr, size, file)
    }

    /// See [`crate::Gpu::charge`].
    pub fn charge(&self, size: u64) -> Result<()> {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let free = self.total - maps.used;
        if size > free {
            return Err(Error::OutOfMemory { requested: size, free, total: self.total });
        }
        maps.used += size;
        Ok(())
    }

    /// See [`crate::Gpu::discharge`].
    pub fn discharge(&self, size: u64) {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        maps.used = maps.used.saturating_sub(size);
    }

    /// See [`crate::Gpu::show`].
    pub fn show(&self, addr: u64, size: u64) -> Result<()> {
        self.place(addr, size)?;
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let (mut start, mut end) = (addr, addr + size);
        let before = maps.allocations.range(..addr).next_back().map(|(&a, &s)| (a, s));
        if let Some((a, s)) = before
            && a + s == addr
            && maps.shown.contains(&a)
            && a / WINDOW == (end - 1) / WINDOW
        {
            maps.allocations.remove(&addr);
            start = a;
        }
        if !end.is_multiple_of(WINDOW)
            && let Some(&s) = maps.allocations.get(&end)
            && maps.shown.remove(&end)
        {
            maps.allocations.remove(&end);
            end += s;
        }
        maps.allocations.insert(start, end - start);
        maps.shown.insert(start);
        drop(maps);
        GENERATION.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// See [`crate::Gpu::hide`].
    pub fn hide(&self, addr: u64, size: u64) -> Result<()> {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let found = maps.allocations.range(..=addr).next_back().map(|(&a, &s)| (a, s));
        let end = addr.saturating_add(size);
        let Some((a, s)) = found.filter(|(a, s)| maps.shown.contains(a) && end <= a + s) else {
            return Err(Error::NotAllocated { address: addr, size });
        };
        maps.allocations.remove(&a);
        maps.shown.remove(&a);
        for (from, to) in [(a, addr), (end, a + s)] {
            if from < to {
                maps.allocations.insert(from, to - from);
                maps.shown.insert(from);
            }
        }
        GENERATION.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// See [`crate::Gpu::enable_peer`].
    pub fn enable_peer(&self, peer: Arc<dyn AsRef<Memory> + Send + Sync>) {
        self.peers.write().unwrap_or_else(poisoned).push(peer);
    }

    /// See [`crate::Gpu::disable_peer`].
    pub fn disable_peer(&self, peer: &Memory) {
        self.peers
            .write()
            .unwrap_or_else(poisoned)
            .retain(|other| !std::ptr::eq(other.as_ref().as_ref(), peer));
        GENERATION.fetch_add(1, Ordering::AcqRel);
    }

    /// See [`crate::Gpu::unmap`].
    pub fn unmap(&self, addr: u64, size: u64) -> Result<()> {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        if maps.mappings.get(&addr) != Some(&size) {
            return Err(Error::InvalidArgument(format!(
                "there is no mapping of {size:#x} bytes at {addr:#x}"
            )));
        }
        if let Some((&a, &s)) = maps.allocations.range(..addr + size).next_back()
            && a + s > addr
        {
            return Err(Error::InvalidArgument(format!(
                "mapping at {addr:#x} still contains the allocation of {s:#x} bytes at {a:#x}"
            )));
        }
        let host = maps.windows[&(addr / WINDOW)] + (addr % WINDOW) as usize;
        if maps.files.contains(&addr) {
            detach(host, size)?;
            maps.files.remove(&addr);
        } else {
            discard(host, size);
            maps.used -= size;
        }
        maps.mappings.remove(&addr);
        GENERATION.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// See [`crate::Gpu::set_aside`].
    pub fn set_aside(&self, addr: u64, size: u64) -> Result<()> {
        let maps = self.maps.write().unwrap_or_else(poisoned);
        reserve_again(file_mapping(&maps, addr, size)?, size)?;
        GENERATION.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// See [`crate::Gpu::bring_back`].
    pub fn bring_back(&self, addr: u64, size: u64, file: BorrowedFd<'_>) -> Result<()> {
        let maps = self.maps.write().unwrap_or_else(poisoned);
        attach(file_mapping(&maps, addr, size)?, size, file, 0)
    }

    /// See [`crate::Gpu::mapped_range`].
    pub fn mapped_range(&self, addr: u64, size: u64) -> Result<*mut u8> {
        let maps = self.maps.read().unwrap_or_else(poisoned);
        let found = maps.mappings.range(..=addr).next_back();
        let inside = found.is_some_and(|(&a, &s)| addr - a < s && size <= s - (addr - a));
        if !inside {
            return Err(Error::NotAllocated { address: addr, size });
        }
        Ok((maps.windows[&(addr / WINDOW)] + (addr % WINDOW) as usize) as *mut u8)
    }

    /// See [`crate::Gpu::place`].
    pub fn place(&self, addr: u64, size: u64) -> Result<()> {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let end = match addr.checked_add(size) {
            Some(end) if size > 0 => end,
            _ => {
                return Err(Error::InvalidArgument(format!(
                    "invalid allocation of {size:#x} bytes at {addr:#x}"
                )));
            }
        };
        if let Some((&a, &s)) = maps.allocations.range(..end).next_back()
            && a + s > addr
        {
            return Err(Error::InvalidArgument(format!(
                "allocation of {size:#x} bytes at {addr:#x} overlaps the one of {s:#x} bytes at {a:#x}"
            )));
        }
        let mut at = addr;
        while at < end {
            match maps.mappings.range(..=at).next_back() {
                Some((&a, &s)) if a + s > at => at = a + s,
                _ => {
                    return Err(Error::InvalidArgument(format!(
                        "allocation of {size:#x} bytes at {addr:#x}: {at:#x} is not mapped"
                    )));
                }
            }
        }
        if addr / WINDOW != (end - 1) / WINDOW {
            return Err(Error::InvalidArgument(format!(
                "allocation of {size:#x} bytes at {addr:#x} crosses a boundary of {WINDOW:#x} bytes"
            )));
        }
        maps.allocations.insert(addr, size);
        Ok(())
    }

    /// See [`crate::Gpu::release`].
    pub fn release(&self, addr: u64) -> Result<u64> {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let size = maps.allocations.remove(&addr).ok_or(Error::NotAllocated { address: addr, size: 0 })?;
        GENERATION.fetch_add(1, Ordering::AcqRel);
        Ok(size)
    }

    /// Allocates zeroed memory for globals and constants in the module range, 512-byte aligned.
    pub fn allocate_module(&self, size: u64) -> Result<u64> {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let (addr, dirty) = self.hand_out(&mut maps, size, |maps| &mut maps.modules)?;
        let host = maps.windows[&(addr / WINDOW)] + (addr % WINDOW) as usize;
        drop(maps);
        // SAFETY: the range lies in a window, was made writable when its granule was mapped, and was free
        // until now.
        unsafe { std::ptr::write_bytes(host as *mut u8, 0, dirty as usize) };
        Ok(addr)
    }

    /// Frees memory from [`Memory::allocate_module`].
    pub fn free_module(&self, addr: u64) -> Result<()> {
        self.take_back(addr, |maps| &mut maps.modules)
    }

    /// Allocates memory for a kernel's `malloc`, 16-byte aligned and uninitialized. `None` if the heap is
    /// used up.
    pub fn allocate_heap(&self, size: u64) -> Option<u64> {
        let size = size.checked_add(HEAP_HEADER)?;
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let piece = maps.heap.piece(size)?;
        if maps.heap_limit.checked_sub(maps.heap.used)? < piece {
            return None;
        }
        self.hand_out(&mut maps, size, |maps| &mut maps.heap).ok().map(|(addr, _)| addr + HEAP_HEADER)
    }

    /// Frees memory for a kernel's `free`.
    pub fn free_heap(&self, addr: u64) -> Result<()> {
        self.take_back(addr.wrapping_sub(HEAP_HEADER), |maps| &mut maps.heap)
    }

    /// See [`crate::Gpu::set_heap_limit`].
    pub fn set_heap_limit(&self, bytes: u64) {
        self.maps.write().unwrap_or_else(poisoned).heap_limit = bytes;
    }

    /// Allocates in one of the GPU's own address ranges. Returns the address, and how many bytes at the start
    /// may have been used before.
    fn hand_out(
        &self,
        maps: &mut Maps,
        size: u64,
        region: fn(&mut Maps) -> &mut AddressPool,
    ) -> Result<(u64, u64)> {
        let too_much = || Error::OutOfMemory { requested: size, free: 0, total: WINDOW };
        let piece = region(maps).piece(size).ok_or_else(too_much)?;
        let (addr, dirty) = match region(maps).take(piece) {
            Some(addr) => (addr, piece),
            None => {
                let whole = piece.checked_next_multiple_of(GRANULE).ok_or_else(too_much)?;
                let fresh = region(maps).extend(whole).ok_or_else(too_much)?;
                map_any(maps, self.total, fresh, whole, None)?;
                region(maps).extended(whole);
                // The allocation may begin in a free range before the newly mapped memory.
                let addr = region(maps).take(piece).ok_or_else(too_much)?;
                (addr, fresh.saturating_sub(addr).min(piece))
            }
        };
        maps.allocations.insert(addr, size.max(1));
        Ok((addr, dirty))
    }

    /// Frees an allocation in one of the GPU's own address ranges.
    fn take_back(&self, addr: u64, region: fn(&mut Maps) -> &mut AddressPool) -> Result<()> {
        let mut maps = self.maps.write().unwrap_or_else(poisoned);
        let size = maps.allocations.get(&addr).copied();
        let Some(size) = size.filter(|_| region(&mut maps).holds(addr)) else {
            return Err(Error::NotAllocated { address: addr, size: 0 });
        };
        maps.allocations.remove(&addr);
        let region = region(&mut maps);
        if let Some(piece) = region.piece(size) {
            region.give(addr, piece);
        }
        GENERATION.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// The current generation; see [`Memory::find`].
    #[inline(always)]
    pub fn generation(&self) -> u64 {
        GENERATION.load(Ordering::Acquire)
    }

    /// The allocation that contains `addr`. The result is valid until [`Memory::generation`] changes. Its
    /// host memory stays readable and writable as long as the `Memory` lives.
    pub fn find(&self, addr: u64) -> Option<FoundAllocation> {
        self.find_own(addr).or_else(|| {
            // Module memory has the same addresses in every GPU and is never visible to peers.
            let peers = self.peers.read().unwrap_or_else(poisoned);
            let shared = addr >= FIRST_ADDRESS;
            peers.iter().filter(|_| shared).find_map(|peer| peer.as_ref().as_ref().find_for_peer(addr))
        })
    }

    fn find_own(&self, addr: u64) -> Option<FoundAllocation> {
        find_in(&self.maps.read().unwrap_or_else(poisoned), addr)
    }

    fn find_for_peer(&self, addr: u64) -> Option<FoundAllocation> {
        let maps = self.maps.read().unwrap_or_else(poisoned);
        find_in(&maps, addr).filter(|found| !maps.shown.contains(&found.start))
    }

    /// The host address of `size` bytes, which must be in one allocation.
    pub fn host_range(&self, addr: u64, size: u64) -> Result<*mut u8> {
        match self.find(addr) {
            Some(hit) if size <= hit.end - addr => Ok(addr.wrapping_add(hit.delta) as *mut u8),
            _ => Err(Error::NotAllocated { address: addr, size }),
        }
    }

    /// Copies from an allocation.
    pub fn read(&self, addr: u64, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let host = self.host_range(addr, out.len() as u64)?;
        // SAFETY: `host_range` has checked `out.len()` bytes inside a window that lives as long as the memory
        // and that no Rust reference points to. A race with a kernel can only tear values.
        unsafe { std::ptr::copy_nonoverlapping(host, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies to an allocation.
    pub fn write(&self, addr: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let host = self.host_range(addr, data.len() as u64)?;
        // SAFETY: `host_range` has checked `data.len()` bytes inside a window that lives as long as the
        // memory and that no Rust reference points to. A race with a kernel can only tear values.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), host, data.len()) };
        Ok(())
    }
}

fn find_in(maps: &Maps, addr: u64) -> Option<FoundAllocation> {
    let (&start, &size) = maps.allocations.range(..=addr).next_back()?;
    if addr >= start + size {
        return None;
    }
    let base = *maps.windows.get(&(addr / WINDOW))? as u64;
    Some(FoundAllocation { start, end: start + size, delta: base.wrapping_sub(addr / WINDOW * WINDOW) })
}

impl Drop for Memory {
    fn drop(&mut self) {
        let maps = self.maps.get_mut().unwrap_or_else(poisoned);
        for &base in maps.windows.values() {
            // SAFETY: `base` is a reservation of WINDOW bytes made by `reserve`, and nothing else unmaps it.
            unsafe { libc::munmap(base as *mut libc::c_void, WINDOW as usize) };
        }
    }
}

/// Maps a file, or new memory; new memory counts against `total`.
fn map_any(
    maps: &mut Maps,
    total: u64,
    addr: u64,
    size: u64,
    file: Option<(BorrowedFd<'_>, u64)>,
) -> Result<()> {
    if let Some((&a, &s)) = maps.mappings.range(..addr + size).next_back()
        && a + s > addr
    {
        return Err(Error::InvalidArgument(format!(
            "mapping of {size:#x} bytes at {addr:#x} overlaps {s:#x} bytes mapped at {a:#x}"
        )));
    }
    if file.is_none() && size > total - maps.used {
        let free = total - maps.used;
        return Err(Error::OutOfMemory { requested: size, free, total });
    }
    let first = addr / WINDOW;
    let last = (addr + size - 1) / WINDOW;
    if first != last {
        return Err(Error::InvalidArgument(format!(
            "mapping of {size:#x} bytes at {addr:#x} crosses a boundary of {WINDOW:#x} bytes"
        )));
    }
    let base = match maps.windows.get(&first) {
        Some(&base) => base,
        None => {
            let base = reserve(WINDOW)?;
            maps.windows.insert(first, base);
            base
        }
    };
    let host = base + (addr % WINDOW) as usize;
    match file {
        Some((file, offset)) => {
            attach(host, size, file, offset)?;
            maps.files.insert(addr);
        }
        None => {
            commit(host, size)?;
            maps.used += size;
        }
    }
    maps.mappings.insert(addr, size);
    Ok(())
}

/// The host address of a mapping that is backed by a file.
fn file_mapping(maps: &Maps, addr: u64, size: u64) -> Result<usize> {
    if maps.mappings.get(&addr) != Some(&size) || !maps.files.contains(&addr) {
        return Err(Error::InvalidArgument(format!(
            "there is no mapping of {size:#x} bytes of a file at {addr:#x}"
        )));
    }
    Ok(maps.windows[&(addr / WINDOW)] + (addr % WINDOW) as usize)
}

fn reserve(size: u64) -> Result<usize> {
    // SAFETY: a new private anonymous mapping at an address that the kernel chooses affects nothing else.
    let p = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size as usize,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if p == libc::MAP_FAILED {
        let error = std::io::Error::last_os_error().to_string();
        return Err(Error::Host { what: format!("{size:#x} bytes of address space"), error });
    }
    Ok(p as usize)
}

fn commit(host: usize, size: u64) -> Result<()> {
    // SAFETY: the range lies inside one window's reservation, which this module owns.
    let rc = unsafe {
        libc::mprotect(host as *mut libc::c_void, size as usize, libc::PROT_READ | libc::PROT_WRITE)
    };
    if rc != 0 {
        let error = std::io::Error::last_os_error().to_string();
        return Err(Error::Host { what: format!("{size:#x} bytes of memory"), error });
    }
    Ok(())
}

/// Maps a file's bytes at an address in a window.
fn attach(host: usize, size: u64, file: BorrowedFd<'_>, offset: u64) -> Result<()> {
    // SAFETY: the range lies inside one window's reservation, which this module owns, and contains no other
    // mapping of the GPU.
    let p = unsafe {
        libc::mmap(
            host as *mut libc::c_void,
            size as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            file.as_raw_fd(),
            offset as libc::off_t,
        )
    };
    if p == libc::MAP_FAILED {
        let error = std::io::Error::last_os_error().to_string();
        return Err(Error::Host { what: format!("a mapping of {size:#x} bytes of a file"), error });
    }
    Ok(())
}

/// Replaces a file's pages by zero pages, so that late accesses stay inside the reservation.
fn detach(host: usize, size: u64) -> Result<()> {
    replace(host, size, libc::PROT_READ | libc::PROT_WRITE)
}

/// Replaces a file's pages by ones that nobody may access.
fn reserve_again(host: usize, size: u64) -> Result<()> {
    replace(host, size, libc::PROT_NONE)
}

fn replace(host: usize, size: u64, access: libc::c_int) -> Result<()> {
    // SAFETY: the range lies inside one window's reservation, which this module owns, and contained only that
    // file's pages.
    let p = unsafe {
        libc::mmap(
            host as *mut libc::c_void,
            size as usize,
            access,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    if p == libc::MAP_FAILED {
        let error = std::io::Error::last_os_error().to_string();
        return Err(Error::Host { what: format!("unmapping {size:#x} bytes of a file"), error });
    }
    Ok(())
}

fn discard(host: usize, size: u64) {
    // SAFETY: the range lies inside a window's reservation. Its pages stay mapped and become zero, so a
    // kernel that still uses them stays inside the reservation.
    unsafe { libc::madvise(host as *mut libc::c_void, size as usize, libc::MADV_DONTNEED) };
}

#[cfg(test)]
mod tests {
    use super::*;

    impl AsRef<Memory> for Memory {
        fn as_ref(&self) -> &Memory {
            self
        }
    }

    #[test]
    fn a_peer_s_allocations_are_found_but_not_what_it_shows() {
        let (own, peer) = (Memory::new(1 << 30), Arc::new(Memory::new(1 << 30)));
        let (placed, shown) = (FIRST_ADDRESS, FIRST_ADDRESS + GRANULE);
        [placed, shown].iter().for_each(|addr| peer.map(*addr, GRANULE).unwrap());
        peer.place(placed, 4096).unwrap();
        peer.show(shown, GRANULE).unwrap();
        let reached = || [placed, placed + 4096, shown].map(|addr| own.host_range(addr, 8).is_ok());
        assert_eq!(reached(), [false; 3]);
        own.enable_peer(peer.clone());
        assert_eq!(reached(), [true, false, false]);
        own.disable_peer(&peer);
        assert_eq!(reached(), [false; 3]);
    }
}
