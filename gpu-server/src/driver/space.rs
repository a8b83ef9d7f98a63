//! A session's virtual memory management: memory without an address, reserved addresses, and mappings.
//!
//! `may_…` methods check what a client names before the GPU is called: the memory must belong to the session,
//! and the addresses must be inside one of its reservations and overlap no other mapping. The methods that
//! change something are called after the GPU has succeeded.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};

use protocol::Status;
use protocol::ops::memory::{SPACE_ALIGN, may_be_reserved};

use super::quota::{Charge, Quota};
use super::store::Place;
use crate::limits::Resource;
use crate::worker_protocol::Token;

/// Maximum number of a session's memories, and of its reservations.
const MOST: usize = 1 << 17;

/// Memory of a device. `M` belongs to the GPU.
pub struct Memory<M> {
    /// Ordinal of its device. If it was imported from a device that the client has not selected: that of the
    /// device that opened it.
    pub device: u32,
    /// Its size in bytes.
    pub size: u64,
    /// Whether it may be exported.
    pub exportable: bool,
    /// The token that it was imported by.
    pub imported: Option<Token>,
    /// The token that it is exported under.
    pub token: Option<Token>,
    place: Place<M>,
    /// Where it is mapped.
    addresses: BTreeSet<u64>,
    /// Shared by all IDs of the same memory, so that it is charged once.
    charge: Arc<Charge>,
}

impl<M> Memory<M> {
    /// New memory, not mapped.
    pub fn new(device: u32, size: u64, exportable: bool, handle: M, charge: Charge) -> Memory<M> {
        let charge = Arc::new(charge);
        let (place, addresses) = (Place::Device(handle), BTreeSet::new());
        Memory { device, size, exportable, imported: None, token: None, place, addresses, charge }
    }

    /// Memory that was imported by a token. `charge` comes from [`Space::charge_import`].
    pub fn imported(device: u32, size: u64, token: Token, handle: M, charge: Arc<Charge>) -> Memory<M> {
        Memory {
            device,
            size,
            exportable: false,
            imported: Some(token),
            token: None,
            place: Place::Device(handle),
            addresses: BTreeSet::new(),
            charge,
        }
    }

    /// The GPU's handle.
    ///
    /// # Errors
    /// `UNKNOWN` while it is in the store: no command is executed then.
    pub fn handle(&self) -> Result<&M, Status> {
        if let Place::Device(handle) = &self.place { Ok(handle) } else { Err(Status::UNKNOWN) }
    }

    /// The same, of memory that was removed.
    pub fn into_handle(self) -> Result<M, Status> {
        if let Place::Device(handle) = self.place { Ok(handle) } else { Err(Status::UNKNOWN) }
    }

    /// The token that all IDs of the same memory share, if it was imported or exported.
    fn shared(&self) -> Option<Token> {
        self.imported.or(self.token)
    }
}

/// A part of memory mapped at reserved addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The memory.
    pub memory: u32,
    /// Offset of the first mapped byte in the memory, in bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Ordinals of the devices that may access it.
    pub access: Vec<u32>,
    /// Those of them that may only read.
    pub read_only: Vec<u32>,
}

/// Memory that can leave its device, and come back to where it is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Movable {
    /// Ordinal of its device.
    pub device: u32,
    /// Its size in bytes.
    pub size: u64,
}

/// A session's memories, reservations and mappings.
pub struct Space<M> {
    reserved: BTreeMap<u64, u64>,
    memories: HashMap<u32, Memory<M>>,
    mappings: BTreeMap<u64, Mapping>,
    /// Charges of memory that is exported or imported, by its token.
    shared: HashMap<Token, Weak<Charge>>,
}

impl<M> Default for Space<M> {
    fn default() -> Space<M> {
        Space {
            reserved: BTreeMap::new(),
            memories: HashMap::new(),
            mappings: BTreeMap::new(),
            shared: HashMap::new(),
        }
    }
}

fn overlaps(mut ranges: impl DoubleEndedIterator<Item = (u64, u64)>, address: u64) -> bool {
    // The last range that starts before the end of the given one.
    ranges.next_back().is_some_and(|(start, size)| start + size > address)
}

impl<M> Space<M> {
    /// Whether there is no memory and no reservation.
    pub fn is_empty(&self) -> bool {
        self.reserved.is_empty() && self.memories.is_empty()
    }

    /// Checks that a session with these windows may reserve these addresses. `granule` is the largest of all
    /// devices, in bytes.
    pub fn may_reserve(
        &self,
        address: u64,
        size: u64,
        granule: u64,
        windows: impl IntoIterator<Item = u32>,
    ) -> Result<(), Status> {
        let inside = may_be_reserved(address, size, windows);
        let whole = size > 0 && size.is_multiple_of(granule) && address.is_multiple_of(SPACE_ALIGN);
        if !inside || !whole || self.has_reserved(address, size) {
            return Err(Status::INVALID_VALUE);
        }
        if self.reserved.len() >= MOST { Err(Status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// Whether the session has reserved any of these addresses.
    pub fn has_reserved(&self, address: u64, size: u64) -> bool {
        let end = address.saturating_add(size);
        overlaps(self.reserved.range(..end).map(|(a, s)| (*a, *s)), address)
    }

    /// The addresses were reserved.
    pub fn reserve(&mut self, address: u64, size: u64) {
        self.reserved.insert(address, size);
    }

    /// Checks that a reservation may be freed: it was made with this address and size, and contains no
    /// mapping.
    pub fn may_unreserve(&self, address: u64, size: u64) -> Result<(), Status> {
        let known = self.reserved.get(&address) == Some(&size);
        let used =
            overlaps(self.mappings.range(..address.saturating_add(size)).map(|(a, m)| (*a, m.size)), address);
        if known && !used { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }

    /// The reservation was freed.
    pub fn unreserve(&mut self, address: u64) {
        self.reserved.remove(&address);
    }

    /// Checks that new memory may have this id.
    pub fn may_name(&self, id: u32) -> Result<(), Status> {
        if self.memories.contains_key(&id) {
            return Err(Status::INVALID_HANDLE);
        }
        if self.memories.len() >= MOST { Err(Status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// Memory was made or imported.
    pub fn add(&mut self, id: u32, memory: Memory<M>) {
        if let Some(token) = memory.shared() {
            self.shared.insert(token, Arc::downgrade(&memory.charge));
        }
        self.memories.insert(id, memory);
    }

    /// The charge for importing memory of `size` bytes by a token: the session's existing charge for this
    /// memory, or a new one.
    ///
    /// # Errors
    /// As [`Quota::charge_import`].
    pub fn charge_import(
        &self,
        quota: &Quota,
        resource: Resource,
        token: &Token,
        size: u64,
    ) -> Result<Arc<Charge>, Status> {
        match self.shared.get(token).and_then(Weak::upgrade) {
            Some(charge) => Ok(charge),
            None => quota.charge_import(resource, size, *token).map(Arc::new),
        }
    }

    /// The memory with an id.
    pub fn memory(&self, id: u32) -> Result<&Memory<M>, Status> {
        self.memories.get(&id).ok_or(Status::INVALID_HANDLE)
    }

    /// Memory of this session was exported.
    pub fn export(&mut self, id: u32, token: Token) {
        if let Some(memory) = self.memories.get_mut(&id).filter(|memory| memory.shared().is_none()) {
            memory.token = Some(token);
            self.shared.insert(token, Arc::downgrade(&memory.charge));
        }
    }

    /// Removes memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it is mapped.
    pub fn remove(&mut self, id: u32) -> Result<Memory<M>, Status> {
        if !self.memory(id)?.addresses.is_empty() {
            return Err(Status::INVALID_VALUE);
        }
        let memory = self.memories.remove(&id).ok_or(Status::INVALID_HANDLE)?;
        if let Some(token) = memory.shared().filter(|_| Arc::strong_count(&memory.charge) == 1) {
            self.shared.remove(&token);
        }
        Ok(memory)
    }

    /// Checks that a mapping may be made, of whole granules of `granule` bytes.
    pub fn may_map(&self, id: u32, offset: u64, address: u64, size: u64, granule: u64) -> Result<(), Status> {
        let memory = self.memory(id)?;
        let whole = [offset, address, size].iter().all(|n| n.is_multiple_of(granule));
        let end = address.checked_add(size).ok_or(Status::INVALID_VALUE)?;
        let inside = offset.checked_add(size).is_some_and(|end| end <= memory.size);
        let reserved =
            self.reserved.range(..=address).next_back().is_some_and(|(start, len)| end <= start + len);
        let taken = overlaps(self.mappings.range(..end).map(|(a, m)| (*a, m.size)), address);
        if size == 0 || !whole || !inside || !reserved || taken { Err(Status::INVALID_VALUE) } else { Ok(()) }
    }

    /// The mapping was made.
    pub fn map(&mut self, id: u32, offset: u64, address: u64, size: u64) {
        if let Some(memory) = self.memories.get_mut(&id) {
            memory.addresses.insert(address);
            let (access, read_only) = Default::default();
            self.mappings.insert(address, Mapping { memory: id, offset, size, access, read_only });
        }
    }

    /// The mapping with this address and size.
    pub fn mapping(&self, address: u64, size: u64) -> Result<&Mapping, Status> {
        self.mappings.get(&address).filter(|mapping| mapping.size == size).ok_or(Status::INVALID_VALUE)
    }

    /// As [`mapping`](Self::mapping), mutable.
    pub fn mapping_mut(&mut self, address: u64, size: u64) -> Result<&mut Mapping, Status> {
        self.mappings.get_mut(&address).filter(|mapping| mapping.size == size).ok_or(Status::INVALID_VALUE)
    }

    /// A mapping was removed.
    pub fn unmap(&mut self, address: u64) {
        if let Some(mapping) = self.mappings.remove(&address)
            && let Some(memory) = self.memories.get_mut(&mapping.memory)
        {
            memory.addresses.remove(&address);
        }
    }

    /// A device was given access to a mapping, or lost it: flags as for
    /// [`set_access`](super::gpu::GpuMemory::set_access).
    pub fn set_access(&mut self, address: u64, device: u32, flags: u32) {
        if let Some(mapping) = self.mappings.get_mut(&address) {
            let set = |devices: &mut Vec<u32>, on| {
                devices.retain(|other| *other != device);
                if on {
                    devices.push(device);
                }
            };
            set(&mut mapping.access, flags != 0);
            set(&mut mapping.read_only, flags == 1);
        }
    }

    /// Whether memory can leave its device: no other session can have it.
    pub fn movable(&self, id: u32) -> Option<Movable> {
        let memory = self.memories.get(&id).filter(|memory| memory.shared().is_none())?;
        Some(Movable { device: memory.device, size: memory.size })
    }

    /// An address at which memory's own device reads and writes all of it.
    pub fn whole(&self, id: u32) -> Option<u64> {
        let Memory { device, size, ref addresses, .. } = *self.memories.get(&id)?;
        let is_whole = |address: &&u64| {
            self.mappings.get(address).is_some_and(|mapping| {
                let own = mapping.access.contains(&device) && !mapping.read_only.contains(&device);
                mapping.offset == 0 && mapping.size == size && own
            })
        };
        addresses.iter().find(is_whole).copied()
    }

    /// All memory that can leave or has left, and where it is.
    pub fn all_movable(&self) -> impl Iterator<Item = (u32, Movable, Place<()>)> {
        self.memories.iter().filter_map(|(id, memory)| Some((*id, self.movable(*id)?, memory.place.kind())))
    }

    /// Where memory is mapped, and how.
    pub fn mappings_of(&self, id: u32) -> Vec<(u64, Mapping)> {
        let addresses = self.memories.get(&id).into_iter().flat_map(|memory| &memory.addresses);
        addresses.filter_map(|address| Some((*address, self.mappings.get(address)?.clone()))).collect()
    }

    /// Memory is at another place now. Returns the former one.
    pub fn put(&mut self, id: u32, place: Place<M>) -> Option<Place<M>> {
        self.memories.get_mut(&id).map(|memory| std::mem::replace(&mut memory.place, place))
    }

    /// The device through which `len` bytes from an address are accessed: `home` if it may access all of
    /// them, or else the first device that may. `None` if they are not all mapped, or no device may access
    /// them all.
    pub fn reached_by(&self, address: u64, len: u64, home: u32) -> Option<u32> {
        let end = address.checked_add(len.max(1))?;
        let (start, first) = self.mappings.range(..=address).next_back()?;
        let mut may = first.access.clone();
        let mut at = start + first.size;
        if at <= address {
            return None;
        }
        for (start, mapping) in self.mappings.range(at..) {
            if at >= end {
                break;
            }
            if *start != at {
                return None;
            }
            may.retain(|device| mapping.access.contains(device));
            at += mapping.size;
        }
        if at < end {
            return None;
        }
        if may.contains(&home) { Some(home) } else { may.first().copied() }
    }

    /// Every mapping.
    pub fn mappings(&self) -> impl Iterator<Item = (u64, &Mapping)> {
        self.mappings.iter().map(|(address, mapping)| (*address, mapping))
    }

    /// Bytes that this session has created on a device.
    pub fn created_on(&self, device: u32) -> u64 {
        let made =
            self.memories.values().filter(|memory| memory.imported.is_none() && memory.device == device);
        made.map(|memory| memory.size).sum()
    }
}

#[cfg(test)]
mod tests {
    use protocol::channel::MAX_DEVICES;
    use protocol::ops::memory::{SPACE, SPACE_SIZE, WINDOW_SIZE, window};

    use super::*;

    const G: u64 = 2 << 20;

    const DEVICE: Resource = Resource::Device(0);

    fn space(quota: &Quota) -> Space<()> {
        let mut space = Space::default();
        space.reserve(SPACE, 8 * G);
        space.add(1, Memory::new(0, 4 * G, false, (), quota.charge(DEVICE, 4 * G).unwrap()));
        space
    }

    fn unlimited() -> Quota {
        Quota::default()
    }

    #[test]
    fn reservations_lie_inside_and_apart() {
        let space = space(&unlimited());
        assert_eq!(space.may_reserve(SPACE + SPACE_ALIGN, G, G, 0..1), Ok(()));
        for (address, size) in [
            (SPACE, G),
            (SPACE - SPACE_ALIGN, SPACE_ALIGN),
            (SPACE + SPACE_SIZE, G),
            (SPACE + SPACE_SIZE - SPACE_ALIGN, SPACE_ALIGN + G),
            (SPACE + SPACE_ALIGN, 1),
            (SPACE + SPACE_ALIGN + G, G),
            (SPACE + SPACE_ALIGN, 0),
            (u64::MAX - SPACE_ALIGN + 1, SPACE_ALIGN),
            (window(0), WINDOW_SIZE),
            (window(0) - SPACE_ALIGN, G),
            (window(MAX_DEVICES), G),
        ] {
            assert_eq!(
                space.may_reserve(address, size, G, 0..1),
                Err(Status::INVALID_VALUE),
                "{address:#x} {size:#x}"
            );
        }
    }

    #[test]
    fn windows_that_no_device_has_may_be_reserved() {
        let space = space(&unlimited());
        let may = |address, size| space.may_reserve(address, size, G, [1, 3]);
        for (address, size) in [
            (window(0), WINDOW_SIZE),
            (window(2), WINDOW_SIZE),
            (window(2) + SPACE_ALIGN, G),
            (window(4), window(MAX_DEVICES) - window(4)),
        ] {
            assert_eq!(may(address, size), Ok(()), "{address:#x} {size:#x}");
        }
        for (address, size) in [
            (window(1), G),
            (window(3) + WINDOW_SIZE - SPACE_ALIGN, SPACE_ALIGN),
            (window(0), WINDOW_SIZE + G),
            (window(2) + SPACE_ALIGN, WINDOW_SIZE),
            (window(0), 4 * WINDOW_SIZE),
            (window(31), WINDOW_SIZE + G),
        ] {
            assert_eq!(may(address, size), Err(Status::INVALID_VALUE), "{address:#x} {size:#x}");
        }
    }

    #[test]
    fn mappings_lie_in_a_reservation_and_in_their_memory() {
        let quota = unlimited();
        let mut space = space(&quota);
        assert_eq!(space.may_map(1, 0, SPACE, 4 * G, G), Ok(()));
        for (id, offset, address, size) in [
            (1, 0, SPACE + 8 * G, G),
            (1, 0, SPACE + 7 * G, 2 * G),
            (1, 4 * G, SPACE, G),
            (1, G, SPACE, 4 * G),
            (1, u64::MAX - G + 1, SPACE, G),
            (1, 0, SPACE, 0),
            (1, 0, SPACE + 1, G),
        ] {
            assert_eq!(
                space.may_map(id, offset, address, size, G),
                Err(Status::INVALID_VALUE),
                "{offset:#x} {address:#x}"
            );
        }
        assert_eq!(space.may_map(2, 0, SPACE, G, G), Err(Status::INVALID_HANDLE));
        space.map(1, 0, SPACE + G, 2 * G);
        assert_eq!(space.may_map(1, 0, SPACE, 2 * G, G), Err(Status::INVALID_VALUE));
        assert_eq!(space.may_map(1, 0, SPACE + 2 * G, G, G), Err(Status::INVALID_VALUE));
        assert_eq!(space.may_map(1, 0, SPACE + 3 * G, G, G), Ok(()));
    }

    #[test]
    fn memory_can_leave_unless_it_is_shared() {
        let quota = unlimited();
        let mut space = space(&quota);
        let movable = Movable { device: 0, size: 4 * G };
        assert_eq!((space.movable(1), space.movable(2)), (Some(movable), None));
        space.map(1, 0, SPACE, 4 * G);
        space.map(1, G, SPACE + 4 * G, G);
        assert_eq!(space.all_movable().collect::<Vec<_>>(), [(1, movable, Place::Device(()))]);
        assert!(matches!(space.put(1, Place::Store(7)), Some(Place::Device(()))));
        assert_eq!(space.all_movable().collect::<Vec<_>>(), [(1, movable, Place::Store(7))]);
        assert_eq!(space.memory(1).unwrap().handle(), Err(Status::UNKNOWN));
        space.put(1, Place::Device(()));
        space.export(1, [1; 16]);
        assert_eq!(space.movable(1), None);
        let charge = quota.charge(DEVICE, G).unwrap().into();
        space.add(2, Memory::imported(0, G, [2; 16], (), charge));
        assert_eq!(space.all_movable().count(), 0);
    }

    #[test]
    fn an_address_where_the_own_device_reads_and_writes_all_of_it_is_found() {
        let quota = unlimited();
        let mut space = space(&quota);
        assert_eq!(space.whole(1), None);
        // A part; all of it, for another device, its own one, which then may only read.
        space.map(1, 0, SPACE, G);
        space.set_access(SPACE, 0, 3);
        let address = SPACE + 2 * G;
        space.map(1, 0, address, 4 * G);
        for (device, flags, whole) in
            [(1, 3, None), (0, 3, Some(address)), (0, 1, None), (0, 3, Some(address)), (0, 0, None)]
        {
            space.set_access(address, device, flags);
            assert_eq!(space.whole(1), whole, "{device} {flags}");
        }
        let mappings: Vec<_> = space.mappings_of(1).into_iter().map(|(at, of)| (at, of.size)).collect();
        assert_eq!(mappings, [(SPACE, G), (address, 4 * G)]);
        assert!(space.mappings_of(2).is_empty());
    }

    #[test]
    fn mapped_memory_can_be_neither_released_nor_unreserved() {
        let quota = unlimited();
        let mut space = space(&quota);
        space.map(1, 0, SPACE, G);
        space.map(1, 0, SPACE + 4 * G, G);
        assert!(space.remove(1).is_err() && space.may_unreserve(SPACE, 8 * G).is_err());
        assert!(space.mapping(SPACE, 2 * G).is_err() && space.mapping(SPACE + G, G).is_err());
        space.unmap(SPACE);
        space.unmap(SPACE);
        assert!(space.remove(1).is_err(), "one mapping is left");
        space.unmap(SPACE + 4 * G);
        assert!(space.remove(1).is_ok() && space.may_unreserve(SPACE, 4 * G).is_err());
        assert_eq!(space.may_unreserve(SPACE, 8 * G), Ok(()));
        assert_eq!(quota.held(DEVICE), 0);
    }

    #[test]
    fn memory_counts_once_until_its_last_id_is_removed() {
        let quota = unlimited();
        let mut space = space(&quota);
        let token = [7; 16];
        space.export(1, token);
        let import = |space: &mut Space<()>, id, token, size| {
            let charge = space.charge_import(&quota, DEVICE, &token, size).unwrap();
            space.add(id, Memory::imported(0, size, token, (), charge));
        };
        for id in [2, 3] {
            import(&mut space, id, token, 4 * G);
        }
        assert_eq!((quota.held(DEVICE), space.created_on(0)), (4 * G, 4 * G));
        assert!(space.remove(1).is_ok());
        assert_eq!((quota.held(DEVICE), space.created_on(0)), (4 * G, 0), "its maker's name is gone");
        import(&mut space, 4, [8; 16], G);
        assert_eq!(quota.held(DEVICE), 5 * G);
        for (id, left) in [(2, 5 * G), (3, G), (4, 0)] {
            assert!(space.remove(id).is_ok());
            assert_eq!(quota.held(DEVICE), left, "without {id}");
        }
        assert!(space.shared.is_empty());
    }

    #[test]
    fn a_range_is_reached_by_a_device_that_may_access_all_of_it() {
        let quota = unlimited();
        let mut space = space(&quota);
        space.map(1, 0, SPACE, G);
        space.map(1, G, SPACE + G, G);
        assert_eq!(space.reached_by(SPACE, 1, 0), None);
        for address in [SPACE, SPACE + G] {
            space.set_access(address, 1, 3);
        }
        space.set_access(SPACE, 0, 3);
        assert_eq!(space.reached_by(SPACE, G, 0), Some(0));
        assert_eq!(space.reached_by(SPACE + G - 1, 2, 0), Some(1));
        assert_eq!(space.reached_by(SPACE + G, G, 0), Some(1));
        assert_eq!(space.reached_by(SPACE + G, G + 1, 1), None);
        assert_eq!(space.reached_by(SPACE + 2 * G, 1, 1), None);
        space.set_access(SPACE, 1, 0);
        assert_eq!(space.reached_by(SPACE + G - 1, 2, 1), None);
    }
}
