//! Pinned program memory, which the host can read and write in place.
//!
//! A process with several servers has a session with each, and each session has its own ID for a region. The
//! session with which the region was created has it from the start, the others from the first copy that names
//! the region.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use crate::log;
use crate::port::{Pinned, PortError};
use crate::session::Session;
use protocol::data::{HostRange, Place};

/// A range of host memory that the program pinned.
#[derive(Debug)]
pub struct Region<T> {
    /// Size in bytes, as the program requested.
    pub size: usize,
    /// Its ID in each session that was asked to register it. `None` if that port cannot register it: it is
    /// then recorded as pinned, but copied like pageable memory.
    ids: Vec<(&'static Session, Option<u32>)>,
    /// The owner's data.
    pub tag: T,
    /// Set if the host has the bytes elsewhere, so that they cannot be copied in place.
    elsewhere: bool,
    /// The memory itself, if it was allocated here.
    memory: Option<Pinned>,
}

impl<T> Region<T> {
    /// Whether it was allocated here rather than registered.
    pub fn is_allocated(&self) -> bool {
        self.memory.is_some()
    }

    /// Its ID in a session. The outer `None`: the session was not asked to register it.
    #[inline]
    fn id(&self, session: &Session) -> Option<Option<u32>> {
        self.ids.iter().find(|(other, _)| std::ptr::eq(*other, session)).map(|(_, id)| *id)
    }

    /// Registers it in another session.
    fn register_with(&mut self, session: &'static Session, base: usize) {
        if self.id(session).is_some() {
            return;
        }
        let id = match &self.memory {
            Some(pinned) => Some(session.port().pin_shared(pinned)),
            None => session.port().pin(base, self.size),
        };
        let id = id.transpose().unwrap_or_else(|error| {
            log::warn(format_args!(
                "pinned memory at {base:#x} is copied like pageable memory with one of the servers: {}",
                error.line()
            ));
            None
        });
        self.ids.push((session, id));
    }
}

/// All pinned memory of the process, by address.
#[derive(Debug)]
pub struct Regions<T> {
    map: RwLock<BTreeMap<usize, Region<T>>>,
}

/// Why memory could not be registered.
#[derive(Debug)]
pub enum RegisterError {
    /// Part of it is already registered.
    Already,
    /// The port returned an error.
    Port(PortError),
}

fn page() -> usize {
    // SAFETY: queries a system parameter.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl<T: Clone> Regions<T> {
    /// Creates an empty set.
    pub const fn new() -> Self {
        Regions { map: RwLock::new(BTreeMap::new()) }
    }

    /// Allocates pinned memory and returns its address: `at`, or one of the port's choice.
    /// See [`Port::pin_new`](crate::port::Port::pin_new).
    pub fn alloc(
        &self,
        session: &'static Session,
        size: usize,
        at: Option<usize>,
        tag: T,
    ) -> Result<usize, PortError> {
        let port = session.port();
        let rounded = size.checked_next_multiple_of(page()).filter(|size| *size <= isize::MAX as usize);
        let rounded = rounded.ok_or_else(|| PortError::Io {
            path: port.path().to_owned(),
            what: "pinned memory",
            source: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
        })?;
        let pinned = port.pin_new(rounded, at)?;
        let address = pinned.mapping.base() as usize;
        let ids = vec![(session, Some(pinned.region))];
        let region = Region { size, ids, tag, elsewhere: false, memory: Some(pinned) };
        self.map.write().unwrap_or_else(PoisonError::into_inner).insert(address, region);
        Ok(address)
    }

    /// Registers the program's own memory.
    pub fn register(
        &self,
        session: &'static Session,
        address: usize,
        size: usize,
        tag: T,
    ) -> Result<(), RegisterError> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let end = address.saturating_add(size);
        if map.range(..end).next_back().is_some_and(|(base, region)| base + region.size > address) {
            return Err(RegisterError::Already);
        }
        let id = session.port().pin(address, size).transpose().map_err(RegisterError::Port)?;
        map.insert(address, Region { size, ids: vec![(session, id)], tag, elsewhere: false, memory: None });
        Ok(())
    }

    /// Removes the memory that begins at `address`, if it was allocated (or registered) as `allocated` says.
    /// When this returns, the host no longer uses it, and allocated memory is unmapped. `None` if there is
    /// none. No pending work may use it.
    pub fn remove(&self, address: usize, allocated: bool) -> Option<T> {
        let region = {
            let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
            if map.get(&address).is_none_or(|region| region.is_allocated() != allocated) {
                return None;
            }
            map.remove(&address)?
        };
        for (session, id) in region.ids {
            if let Some(id) = id {
                session.port().unpin(id);
            }
        }
        Some(region.tag)
    }

    /// Whether [`remove`](Self::remove) would succeed.
    pub fn begins_at(&self, address: usize, allocated: bool) -> bool {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.get(&address).is_some_and(|region| region.is_allocated() == allocated)
    }

    /// Whether an address is in memory that was allocated here.
    pub fn is_allocated(&self, address: usize) -> bool {
        self.of(address, Region::is_allocated).is_some()
    }

    /// The pinned memory that contains an address, even if the host has its bytes elsewhere: start, size,
    /// owner's data.
    pub fn any(&self, address: usize) -> Option<(usize, usize, T)> {
        self.of(address, |_| true)
    }

    /// Like [`any`](Self::any), only for memory whose bytes are in place.
    pub fn find(&self, address: usize) -> Option<(usize, usize, T)> {
        self.of(address, |region| !region.elsewhere)
    }

    fn of(&self, address: usize, which: impl Fn(&Region<T>) -> bool) -> Option<(usize, usize, T)> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let (base, region) = map.range(..=address).next_back()?;
        (address - base < region.size && which(region)).then(|| (*base, region.size, region.tag.clone()))
    }

    /// Sets whether the host has the bytes of the memory at `address` elsewhere.
    pub fn set_elsewhere(&self, address: usize, elsewhere: bool) {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = map.get_mut(&address) {
            region.elsewhere = elsewhere;
        }
    }

    /// How a command of a session names `len` bytes at `address`, if they are all in place within one range
    /// that the host knows.
    #[inline]
    pub fn range(&self, session: &'static Session, address: usize, len: usize) -> Option<HostRange> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let (base, region) = map.range(..=address).next_back().filter(|(_, region)| !region.elsewhere)?;
        let (base, offset) = (*base, address - base);
        if offset.checked_add(len)? > region.size {
            return None;
        }
        let id = match region.id(session) {
            Some(id) => id?,
            None => {
                drop(map);
                self.register_with(session, base)?
            }
        };
        Some(HostRange { place: Place::Region(id), offset: offset as u64, len: len as u64 })
    }

    /// The ID of the region at `base` in a session that did not know the region before.
    #[cold]
    fn register_with(&self, session: &'static Session, base: usize) -> Option<u32> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let region = map.get_mut(&base)?;
        region.register_with(session, base);
        region.id(session).flatten()
    }
}

impl<T: Clone> Default for Regions<T> {
    fn default() -> Self {
        Self::new()
    }
}
