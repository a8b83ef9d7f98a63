//! Pinned program memory: what the host can read and write in place.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use crate::port::{Pinned, Port, PortError};
use protocol::data::{HostRange, Place};

/// One piece of host memory that the program pinned.
#[derive(Debug)]
pub struct Region<T> {
    /// Bytes, as the program asked.
    pub size: usize,
    /// The host's name for it. `None`: it is recorded as pinned and copied as pageable memory is, because this port cannot register
    /// memory that the program already has.
    pub id: Option<u32>,
    /// What the owner keeps with it.
    pub tag: T,
    /// The host has its bytes elsewhere: it is not copied from or to in place.
    elsewhere: bool,
    /// The memory itself, if it was made here.
    memory: Option<Pinned>,
}

impl<T> Region<T> {
    /// Whether it was allocated here, not registered.
    pub fn is_allocated(&self) -> bool {
        self.memory.is_some()
    }
}

/// Every pinned piece of the process, by address.
#[derive(Debug)]
pub struct Regions<T> {
    map: RwLock<BTreeMap<usize, Region<T>>>,
}

/// Why memory was not registered.
#[derive(Debug)]
pub enum RegisterError {
    /// Some of it is registered already.
    Already,
    /// The port failed.
    Port(PortError),
}

fn page() -> usize {
    // SAFETY: a plain question to the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl<T: Clone> Regions<T> {
    /// None yet.
    pub const fn new() -> Self {
        Regions { map: RwLock::new(BTreeMap::new()) }
    }

    /// Allocates pinned memory, at an address of the port's choice or exactly `at` ([`Port::pin_new`]); returns its address.
    pub fn alloc(&self, port: &dyn Port, size: usize, at: Option<usize>, tag: T) -> Result<usize, PortError> {
        let rounded = size.checked_next_multiple_of(page()).filter(|size| *size <= isize::MAX as usize);
        let rounded = rounded.ok_or_else(|| PortError::Io {
            path: port.path().to_owned(),
            what: "pinned memory",
            source: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
        })?;
        let pinned = port.pin_new(rounded, at)?;
        let address = pinned.mapping.base() as usize;
        let region = Region { size, id: Some(pinned.region), tag, elsewhere: false, memory: Some(pinned) };
        self.map.write().unwrap_or_else(PoisonError::into_inner).insert(address, region);
        Ok(address)
    }

    /// Registers memory of the program's own.
    pub fn register(
        &self,
        port: &dyn Port,
        address: usize,
        size: usize,
        tag: T,
    ) -> Result<(), RegisterError> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let end = address.saturating_add(size);
        if map.range(..end).next_back().is_some_and(|(base, region)| base + region.size > address) {
            return Err(RegisterError::Already);
        }
        let id = port.pin(address, size).transpose().map_err(RegisterError::Port)?;
        map.insert(address, Region { size, id, tag, elsewhere: false, memory: None });
        Ok(())
    }

    /// Takes away the piece that begins at `address`, if it is of the kind that is meant; the host has let go of it, and its memory is gone if it was allocated here.
    /// `None`: there is none. No work may use it.
    pub fn remove(&self, port: &dyn Port, address: usize, allocated: bool) -> Option<T> {
        let region = {
            let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
            if map.get(&address).is_none_or(|region| region.is_allocated() != allocated) {
                return None;
            }
            map.remove(&address)?
        };
        if let Some(id) = region.id {
            port.unpin(id);
        }
        Some(region.tag)
    }

    /// Whether [`remove`](Self::remove) would find something.
    pub fn begins_at(&self, address: usize, allocated: bool) -> bool {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.get(&address).is_some_and(|region| region.is_allocated() == allocated)
    }

    /// Whether an address lies in a piece that was allocated here.
    pub fn is_allocated(&self, address: usize) -> bool {
        self.of(address, Region::is_allocated).is_some()
    }

    /// The piece that an address lies in, wherever its bytes are: where it begins, its size, its tag.
    pub fn any(&self, address: usize) -> Option<(usize, usize, T)> {
        self.of(address, |_| true)
    }

    /// As [`any`](Self::any), of pieces whose bytes are in place.
    pub fn find(&self, address: usize) -> Option<(usize, usize, T)> {
        self.of(address, |region| !region.elsewhere)
    }

    fn of(&self, address: usize, which: impl Fn(&Region<T>) -> bool) -> Option<(usize, usize, T)> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let (base, region) = map.range(..=address).next_back()?;
        (address - base < region.size && which(region)).then(|| (*base, region.size, region.tag.clone()))
    }

    /// Says of the piece that begins at `address` whether the host has its bytes elsewhere.
    pub fn set_elsewhere(&self, address: usize, elsewhere: bool) {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = map.get_mut(&address) {
            region.elsewhere = elsewhere;
        }
    }

    /// How a command names `len` bytes at `address`, if all of them lie in place in one piece that the host knows.
    #[inline]
    pub fn range(&self, address: usize, len: usize) -> Option<HostRange> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let (base, region) = map.range(..=address).next_back().filter(|(_, region)| !region.elsewhere)?;
        let offset = address - base;
        let id = region.id?;
        (offset.checked_add(len)? <= region.size).then_some(HostRange {
            place: Place::Region(id),
            offset: offset as u64,
            len: len as u64,
        })
    }

    /// Where the pieces that were allocated here begin, of those whose tags `which` chooses.
    pub fn allocated_where(&self, which: impl Fn(&T) -> bool) -> Vec<usize> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.iter()
            .filter(|(_, region)| region.is_allocated() && which(&region.tag))
            .map(|(address, _)| *address)
            .collect()
    }
}

impl<T: Clone> Default for Regions<T> {
    fn default() -> Self {
        Self::new()
    }
}
