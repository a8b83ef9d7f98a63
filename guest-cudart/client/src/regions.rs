//! Pinned program memory, which the host can read and write in place.
//!
//! A process with several servers has a session with each, and each session has its own ID for a region. The
//! session with which the region was created has it from the start, the others from the first copy that names
//! the region.
//!
//! While a server is asked to register memory, the table is not locked: a server that does not answer must
//! not stop copies on others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::port::{Pinned, PortError};
use crate::session::Session;
use crate::{log, pages};
use protocol::data::{HostRange, Place};

/// A range of host memory that the program pinned.
#[derive(Debug)]
pub struct Region<T> {
    /// Size in bytes, as the program requested.
    pub size: usize,
    /// Its ID in each session that has answered. `None` if that port cannot register it: it is then recorded
    /// as pinned, but copied like pageable memory.
    ids: Vec<(&'static Session, Option<u32>)>,
    /// The owner's data.
    pub tag: T,
    /// Set if the host has the bytes elsewhere, so that they cannot be copied in place.
    elsewhere: bool,
    /// The memory itself, if it was allocated here.
    memory: Option<Arc<Pinned>>,
    /// Tells it from earlier ones at its address.
    number: u64,
}

impl<T> Region<T> {
    /// Whether it was allocated here rather than registered.
    pub fn is_allocated(&self) -> bool {
        self.memory.is_some()
    }

    /// Its ID in a session. The outer `None`: the session has not registered it.
    #[inline]
    fn id(&self, session: &Session) -> Option<Option<u32>> {
        self.ids.iter().find(|(other, _)| std::ptr::eq(*other, session)).map(|(_, id)| *id)
    }
}

/// Removes registrations.
fn unpin(ids: &[(&'static Session, Option<u32>)]) {
    for (session, id) in ids {
        id.iter().for_each(|id| session.port().unpin(*id));
    }
}

/// All pinned memory of the process, by address.
#[derive(Debug)]
pub struct Regions<T> {
    map: RwLock<BTreeMap<usize, Region<T>>>,
    /// The next region's number.
    next: AtomicU64,
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
        Regions { map: RwLock::new(BTreeMap::new()), next: AtomicU64::new(0) }
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<usize, Region<T>>> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<usize, Region<T>>> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
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
        let memory = Some(Arc::new(pinned));
        let region = Region { size, ids, tag, elsewhere: false, memory, number: self.number() };
        self.write().insert(address, region);
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
        let _registering = session.registering();
        let number = self.number();
        {
            let mut map = self.write();
            let end = address.saturating_add(size);
            if map.range(..end).next_back().is_some_and(|(base, region)| base + region.size > address) {
                return Err(RegisterError::Already);
            }
            // Nobody else registers a part of it meanwhile. Whoever needs its ID waits for `registering`.
            let region = Region { size, ids: Vec::new(), tag, elsewhere: false, memory: None, number };
            map.insert(address, region);
        }
        let id = session.port().pin(address, size).transpose();
        let mut map = self.write();
        let ours = map.get_mut(&address).filter(|region| region.number == number);
        match (id, ours) {
            (Ok(id), Some(region)) => region.ids.push((session, id)),
            (Err(error), ours) => {
                let failed = ours.is_some().then(|| map.remove(&address)).flatten();
                drop(map);
                // Other sessions may have registered it meanwhile.
                failed.into_iter().for_each(|region| unpin(&region.ids));
                return Err(RegisterError::Port(error));
            }
            (Ok(id), None) => {
                // Another thread has unregistered it.
                drop(map);
                id.into_iter().for_each(|id| session.port().unpin(id));
            }
        }
        Ok(())
    }

    /// Removes the memory that begins at `address`, if it was allocated (or registered) as `allocated` says.
    /// When this returns, the host no longer uses it, and allocated memory is unmapped, unless another thread
    /// is just asking a server to register it. `None` if there is none. No pending work may use it.
    pub fn remove(&self, address: usize, allocated: bool) -> Option<T> {
        let region = {
            let mut map = self.write();
            if map.get(&address).is_none_or(|region| region.is_allocated() != allocated) {
                return None;
            }
            map.remove(&address)?
        };
        unpin(&region.ids);
        Some(region.tag)
    }

    /// First addresses of the program's own memory that is registered with such data.
    pub fn registered(&self, which: impl Fn(&T) -> bool) -> Vec<usize> {
        let map = self.read();
        let those = map.iter().filter(|(_, region)| !region.is_allocated() && which(&region.tag));
        those.map(|(base, _)| *base).collect()
    }

    /// Whether [`remove`](Self::remove) would succeed.
    pub fn begins_at(&self, address: usize, allocated: bool) -> bool {
        let map = self.read();
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
        let map = self.read();
        let (base, region) = map.range(..=address).next_back()?;
        (address - base < region.size && which(region)).then(|| (*base, region.size, region.tag.clone()))
    }

    /// Whether commands of a session may name the memory at an address.
    pub fn is_known_to(&self, session: &Session, address: usize) -> bool {
        self.of(address, |region| region.id(session).flatten().is_some()).is_some()
    }

    /// Sets whether the host has the bytes of the memory at `address` elsewhere.
    pub fn set_elsewhere(&self, address: usize, elsewhere: bool) {
        if let Some(region) = self.write().get_mut(&address) {
            region.elsewhere = elsewhere;
        }
    }

    /// The bytes of the memory at `address` are in place again. Other pages may have come there meanwhile.
    /// Then the host must not use those that it knows: the next command that needs the memory registers it
    /// anew.
    pub fn bring_back(&self, address: usize) {
        let ids = {
            let mut map = self.write();
            let Some(region) = map.get_mut(&address) else { return };
            region.elsewhere = false;
            // A file's pages stay the file's, whoever empties and fills them.
            if pages::is_shared(address, 1) {
                return;
            }
            region.number = self.number();
            std::mem::take(&mut region.ids)
        };
        unpin(&ids);
    }

    /// How a command of a session names `len` bytes at `address`, if they are all in place within one range
    /// that the host knows.
    #[inline]
    pub fn range(&self, session: &'static Session, address: usize, len: usize) -> Option<HostRange> {
        let map = self.read();
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
        let _registering = session.registering();
        let (number, size, memory) = {
            let map = self.read();
            let region = map.get(&base)?;
            match region.id(session) {
                // Another thread has asked meanwhile.
                Some(id) => return id,
                None => (region.number, region.size, region.memory.clone()),
            }
        };
        let id = match &memory {
            Some(pinned) if pages::is_shared(base, 1) => Some(session.port().pin_shared(pinned)),
            // Not of a file, or not any more.
            _ => session.port().pin(base, size),
        };
        let id = id.transpose().unwrap_or_else(|error| {
            log::warn(format_args!(
                "pinned memory at {base:#x} is copied like pageable memory with one of the servers: {}",
                error.line()
            ));
            None
        });
        if let Some(region) = self.write().get_mut(&base).filter(|region| region.number == number) {
            region.ids.push((session, id));
            return id;
        }
        // Another thread has removed it.
        id.into_iter().for_each(|id| session.port().unpin(id));
        None
    }
}

impl<T: Clone> Default for Regions<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::Geometry;
    use crate::port;
    use crate::session::Purpose;
    use protocol::device::{Answer, Response};
    use test_kit::eventually;
    use test_kit::native_host::{NativeHost, Next};

    #[test]
    fn a_server_that_does_not_answer_stops_no_use_of_memory_with_others() {
        port::several();
        let hosts = [(); 2].map(|()| NativeHost::start(Response::new(Answer::Ok, ""), |_, _, _| Next::GoOn));
        let [first, second] = [0, 1].map(|index| {
            let geometry = Geometry::with_arena(1 << 20);
            let port = port::at_socket(&hosts[index].socket, geometry.size).unwrap();
            Session::over(port, geometry, Purpose::Compute).unwrap()
        });
        let regions = Regions::new();
        let [asked, other] = [(); 2].map(|()| regions.alloc(first, 4096, None, ()).unwrap());
        std::thread::scope(|scope| {
            let silent = hosts[1].regions.lock().unwrap();
            let asking = [(); 2].map(|()| scope.spawn(|| regions.range(second, asked, 4096)));
            eventually(|| hosts[1].requests() == 1);
            // If this waited, so would the test.
            let own = vec![0_u8; 4096];
            regions.register(first, own.as_ptr() as usize, 4096, ()).unwrap();
            assert!(regions.range(first, asked, 4096).is_some() && regions.find(other).is_some());
            assert!(regions.remove(other, true).is_some());
            drop(silent);
            let ranges = asking.map(|thread| thread.join().unwrap().expect("a range"));
            assert_eq!(ranges[0].place, ranges[1].place, "the server is asked once");
        });
        assert_eq!(hosts[1].requests(), 1);
        assert!(regions.remove(asked, true).is_some());
        assert!(hosts[1].regions.lock().unwrap().registered.is_empty());
    }

    #[test]
    fn memory_that_has_got_other_pages_is_not_used_in_place_by_its_old_registration() {
        port::several();
        let host = NativeHost::start(Response::new(Answer::Ok, ""), |_, _, _| Next::GoOn);
        let geometry = Geometry::with_arena(1 << 20);
        let port = port::at_socket(&host.socket, geometry.size).unwrap();
        let session = Session::over(port, geometry, Purpose::Compute).unwrap();
        let regions = Regions::new();
        let at = regions.alloc(session, 4096, None, ()).unwrap();
        for _ in 0..2 {
            regions.set_elsewhere(at, true);
            assert!(regions.range(session, at, 4096).is_none());
            regions.bring_back(at);
            assert!(regions.range(session, at, 4096).is_some(), "its pages are the file's");
        }
        regions.set_elsewhere(at, true);
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the page is this test's, and nobody uses it.
        let fresh = unsafe { libc::mmap(at as *mut _, 4096, protection, flags | libc::MAP_FIXED, -1, 0) };
        assert_eq!(fresh as usize, at);
        regions.bring_back(at);
        assert!(host.regions.lock().unwrap().registered.is_empty());
        assert!(regions.range(session, at, 4096).is_none(), "this port registers no memory of its process");
        assert!(regions.find(at).is_some());
        assert!(regions.remove(at, true).is_some());
    }
}
