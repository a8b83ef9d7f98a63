//! Host memory in virtual memory management: what `cuMemCreate` creates at a host location.
//!
//! The server reserves addresses for its devices. When host memory is first mapped in a reservation, the
//! server releases those addresses, and the memory there is pinned memory of this process, like that of
//! `cuMemAllocHost`: copies and kernels access it the same way. A handle can be mapped at one address at a
//! time. While it is unmapped, a buffer keeps its bytes.

use std::path::Path;
use std::sync::Mutex;

use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::memory::{host_mappings, pinned};
use crate::process::context;
use crate::process::driver::driver;
use client::{Status, lock};

/// `CUmemLocationType`s of the host.
pub(super) const HOST: u32 = 2;
pub(super) const HOST_NUMA: u32 = 3;
pub(crate) const HOST_NUMA_CURRENT: u32 = 4;

/// Host memory behind a handle.
pub(crate) struct HostMemory {
    /// The location that the program requested. The system decides where the pages really are.
    pub location: MemLocation,
    /// Its first bytes while it is not mapped; the others are 0. Empty while it is mapped.
    kept: Mutex<Vec<u8>>,
}

/// Checks that a location is host memory of this machine.
///
/// # Errors
/// `INVALID_DEVICE` for a NUMA node that the machine does not have, `INVALID_VALUE` for a location that is
/// not the host's.
pub(crate) fn check(location: MemLocation) -> Result {
    match location.kind {
        HOST | HOST_NUMA_CURRENT => Ok(()),
        HOST_NUMA => {
            let has_nodes = Path::new("/sys/devices/system/node/node0").exists();
            let exists = Path::new(&format!("/sys/devices/system/node/node{}", location.id)).exists();
            if exists || location.id == 0 && !has_nodes { Ok(()) } else { Err(Status::INVALID_DEVICE) }
        }
        _ => Err(Status::INVALID_VALUE),
    }
}

impl HostMemory {
    /// Zero-filled memory.
    pub fn new(location: MemLocation) -> HostMemory {
        HostMemory { location, kept: Mutex::default() }
    }

    /// Maps its `size` bytes at addresses of a reservation that the server has released. It is not mapped
    /// elsewhere.
    pub fn map(&self, reservation: u64, address: u64, size: u64) -> Result {
        let driver = driver()?;
        let current = context::current().ok().filter(|context| context.is_alive());
        let context = current.or_else(|| Some(driver.devices.first()?.primary)).ok_or(Status::NO_DEVICE)?;
        let made = pinned::pin_new(driver, context, size as usize, Some(address as usize), 0)?;
        let kept = std::mem::take(&mut *lock(&self.kept));
        let len = kept.len().min(size as usize);
        // SAFETY: `pin_new` has just mapped `size` bytes there, and no other thread knows the address yet;
        // `len` is no more than either.
        unsafe { std::ptr::copy_nonoverlapping(kept.as_ptr(), made as *mut u8, len) };
        host_mappings::insert(address, size, reservation);
        let is_reached = |at: &u64| *at != address && pinned::is_reached_now(context.server, *at);
        if host_mappings::neighbors(address).iter().any(is_reached) {
            pinned::reach_at(driver, context, address);
        }
        Ok(())
    }

    /// Unmaps it. `keep`: whether to keep its bytes. No work may use it.
    pub fn unmap(&self, address: u64, size: u64, keep: bool) -> Result {
        let driver = driver()?;
        if keep {
            // SAFETY: mapped by `map` with this size, and unmapped below; the program promises that nothing
            // uses the memory any more.
            let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, size as usize) };
            *lock(&self.kept) = bytes.to_vec();
        }
        host_mappings::remove(address);
        pinned::remove(driver, address as usize);
        Ok(())
    }
}
