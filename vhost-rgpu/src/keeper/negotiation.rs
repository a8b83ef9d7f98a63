//! What a VMM and a device have agreed on over vhost-user, as far as another device process must know it.
//! Nothing here does I/O.
//!
//! Sizes and descriptor counts were checked by `vhost`; indexes and the number of memories are checked here,
//! and the device process checks everything again.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::Path;

use protocol::device::{CONTROL_QUEUE, QUEUE_COUNT};
use serde::{Deserialize, Serialize};
use vhost::vhost_user::message::{VhostUserMemoryRegion, VhostUserSingleMemoryRegion};
use vhost::vhost_user::{Error, Frontend, Result, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::kept::{Found, Held};

/// Maximum number of memory regions of a guest.
pub const MAX_MEMORIES: usize = 509;
/// Maximum number of memory regions in one message.
const MAX_TABLE: usize = 32;

/// One memory region of the guest.
struct Memory {
    info: VhostUserMemoryRegionInfo,
    /// Keeps the descriptor in `info` open.
    file: Held<File>,
}

impl Memory {
    fn new(addr: u64, size: u64, user_addr: u64, offset: u64, file: Held<File>) -> Memory {
        let info = VhostUserMemoryRegionInfo {
            guest_phys_addr: addr,
            memory_size: size,
            userspace_addr: user_addr,
            mmap_offset: offset,
            mmap_handle: file.fd.as_raw_fd(),
        };
        Memory { info, file }
    }
}

/// One virtqueue.
#[derive(Default)]
pub struct Ring {
    /// Its length in descriptors.
    pub num: Option<u16>,
    /// Its addresses.
    pub addresses: Option<VringConfigData>,
    /// The first descriptor chain to take.
    pub base: Option<u16>,
    /// The driver's notifications. `None`: the ring is stopped.
    pub kick: Option<Held<Notifier>>,
    /// The device's notifications.
    pub call: Option<Held<Notifier>>,
    /// The device's errors.
    pub err: Option<Held<Notifier>>,
    /// Whether it is enabled, once the VMM has set this.
    pub enabled: Option<bool>,
    /// Its addresses when it stopped. A guest that continues has it there again.
    pub lay: Option<VringConfigData>,
}

/// What was negotiated.
#[derive(Default)]
pub struct Negotiation {
    /// The VMM has taken the device.
    pub owned: bool,
    /// Extensions of vhost-user that the VMM has accepted.
    pub protocol: Option<u64>,
    /// Features that the driver has accepted.
    pub features: Option<u64>,
    /// The control queue has stopped: the guest is stopped, or was reset. The VMM sends the same messages in
    /// both cases.
    pub stopped: bool,
    /// The guest's memories.
    memories: Vec<Memory>,
    rings: [Ring; QUEUE_COUNT],
}

/// The descriptor of a notification.
pub struct Notifier(pub EventFd);

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as `self`, and so as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

impl Notifier {
    /// Without a descriptor nobody listens or notifies, which is the same as an eventfd of its own.
    ///
    /// # Errors
    /// If it is something else than an eventfd: what a VMM sends instead may make whoever polls or writes it
    /// wait for as long as the VMM likes, for example a file of a file system in user space.
    pub fn new(file: Option<File>) -> Result<Notifier> {
        match file {
            Some(file) => {
                let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
                    .map_err(Error::ReqHandlerError)?;
                // Files have paths, which begin otherwise.
                if kind != Path::new("anon_inode:[eventfd]") {
                    let text = format!("{} in place of a ring's eventfd", kind.display());
                    return Err(Error::ReqHandlerError(io::Error::other(text)));
                }
                // SAFETY: `into_raw_fd` gives up ownership of the descriptor, which is only read and written.
                Ok(Notifier(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }))
            }
            None => EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)
                .map(Notifier)
                .map_err(Error::ReqHandlerError),
        }
    }

    /// What whoever notifies needs of it.
    fn event(&self) -> Result<OwnedFd> {
        self.as_fd().try_clone_to_owned().map_err(Error::ReqHandlerError)
    }

    /// Duplicates its descriptor.
    pub fn try_clone(&self) -> Result<Notifier> {
        self.0.try_clone().map(Notifier).map_err(Error::ReqHandlerError)
    }
}

/// What was negotiated, as saved for the next keeper. Descriptors are numbers in [`Found`].
#[derive(Default, Serialize, Deserialize)]
pub struct Saved {
    owned: bool,
    protocol: Option<u64>,
    features: Option<u64>,
    #[serde(default)]
    stopped: bool,
    /// Guest address, size, the VMM's address, offset in the file, the file.
    memories: Vec<(u64, u64, u64, u64, u64)>,
    rings: [SavedRing; QUEUE_COUNT],
}

#[derive(Default, Serialize, Deserialize)]
struct SavedRing {
    num: Option<u16>,
    /// Flags, and the addresses of the descriptors, the used ring and the available ring.
    addresses: Option<(u32, u64, u64, u64)>,
    base: Option<u16>,
    kick: Option<u64>,
    call: Option<u64>,
    err: Option<u64>,
    enabled: Option<bool>,
    #[serde(default)]
    lay: Option<(u32, u64, u64, u64)>,
}

impl Saved {
    /// The numbers of all descriptors.
    pub fn numbers(&self) -> BTreeSet<u64> {
        let memories = self.memories.iter().map(|memory| memory.4);
        let rings = self.rings.iter().flat_map(|ring| [ring.kick, ring.call, ring.err]).flatten();
        memories.chain(rings).collect()
    }
}

impl Negotiation {
    /// A virtqueue.
    pub fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Sets the guest's memory regions.
    pub fn set_memories(&mut self, regions: &[VhostUserMemoryRegion], files: Vec<Held<File>>) {
        let memory = |(region, file): (&VhostUserMemoryRegion, Held<File>)| {
            Memory::new(
                region.guest_phys_addr,
                region.memory_size,
                region.user_addr,
                region.mmap_offset,
                file,
            )
        };
        self.memories = regions.iter().zip(files).map(memory).collect();
    }

    /// Adds a memory region.
    pub fn add_memory(&mut self, region: &VhostUserSingleMemoryRegion, file: Held<File>) -> Result<()> {
        if self.memories.len() >= MAX_MEMORIES {
            return Err(Error::InvalidParam);
        }
        let VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr, mmap_offset } = **region;
        self.memories.push(Memory::new(guest_phys_addr, memory_size, user_addr, mmap_offset, file));
        Ok(())
    }

    /// Removes a memory region. `None`: there is no such region.
    pub fn remove_memory(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
    ) -> Option<VhostUserMemoryRegionInfo> {
        let addr = region.guest_phys_addr;
        let at = self.memories.iter().position(|memory| memory.info.guest_phys_addr == addr)?;
        Some(self.memories.remove(at).info)
    }

    /// The last memory region, as it was given.
    pub fn last_memory(&self) -> Option<&VhostUserMemoryRegionInfo> {
        self.memories.last().map(|memory| &memory.info)
    }

    /// Tells a device the memory regions.
    pub fn send_memories(&self, device: &mut Frontend) -> vhost::Result<()> {
        let mut all: Vec<_> = self.memories.iter().map(|memory| memory.info).collect();
        // A device takes a table in no other order, and memory may have been plugged in anywhere.
        all.sort_by_key(|memory| memory.guest_phys_addr);
        let (first, others) = all.split_at(all.len().min(MAX_TABLE));
        if !first.is_empty() {
            device.set_mem_table(first)?;
        }
        others.iter().try_for_each(|memory| device.add_mem_region(memory).map(drop))
    }

    /// Everything, in saved form for the next keeper.
    pub fn save(&self) -> Saved {
        let memory = |memory: &Memory| {
            let info = &memory.info;
            let (at, size) = (info.guest_phys_addr, info.memory_size);
            (at, size, info.userspace_addr, info.mmap_offset, memory.file.number)
        };
        let addresses =
            |a: &VringConfigData| (a.flags, a.desc_table_addr, a.used_ring_addr, a.avail_ring_addr);
        let number = |held: &Option<Held<Notifier>>| held.as_ref().map(|held| held.number);
        let ring = |ring: &Ring| SavedRing {
            num: ring.num,
            addresses: ring.addresses.as_ref().map(addresses),
            base: ring.base,
            kick: number(&ring.kick),
            call: number(&ring.call),
            err: number(&ring.err),
            enabled: ring.enabled,
            lay: ring.lay.as_ref().map(addresses),
        };
        Saved {
            stopped: self.stopped,
            owned: self.owned,
            protocol: self.protocol,
            features: self.features,
            memories: self.memories.iter().map(memory).collect(),
            rings: self.rings.each_ref().map(ring),
        }
    }

    /// Restores what the previous keeper has saved.
    ///
    /// # Errors
    /// If a descriptor is missing.
    pub fn restore(saved: &Saved, found: &Found) -> io::Result<Negotiation> {
        let memory = |(at, size, user, offset, number): &(u64, u64, u64, u64, u64)| {
            let file = Held { fd: File::from(found.get(*number)?), number: *number };
            io::Result::Ok(Memory::new(*at, *size, *user, *offset, file))
        };
        let notifier = |number: Option<u64>| {
            let held = |number| {
                let file = File::from(found.get(number)?);
                let fd = Notifier::new(Some(file)).map_err(io::Error::other)?;
                io::Result::Ok(Held { fd, number })
            };
            number.map(held).transpose()
        };
        let mut rings: [Ring; QUEUE_COUNT] = Default::default();
        for (ring, saved) in rings.iter_mut().zip(&saved.rings) {
            let addresses = |(flags, descriptors, used, available): (u32, u64, u64, u64)| VringConfigData {
                queue_max_size: 0,
                queue_size: 0,
                flags,
                desc_table_addr: descriptors,
                used_ring_addr: used,
                avail_ring_addr: available,
                log_addr: None,
            };
            *ring = Ring {
                num: saved.num,
                addresses: saved.addresses.map(addresses),
                base: saved.base,
                kick: notifier(saved.kick)?,
                call: notifier(saved.call)?,
                err: notifier(saved.err)?,
                enabled: saved.enabled,
                lay: saved.lay.map(addresses),
            };
        }
        let memories = saved.memories.iter().map(memory).collect::<io::Result<_>>()?;
        let (owned, protocol, features) = (saved.owned, saved.protocol, saved.features);
        Ok(Negotiation { owned, protocol, features, stopped: saved.stopped, memories, rings })
    }

    /// The VMM has stopped a ring whose chains before `base` were taken.
    pub fn stop(&mut self, index: u32, base: u16) -> Result<()> {
        self.stopped |= index == u32::from(CONTROL_QUEUE);
        let ring = self.ring(index)?;
        // It is stopped until the VMM sends its addresses and descriptors again.
        if let Some(addresses) = ring.addresses.take() {
            ring.lay = Some(addresses);
        }
        (ring.kick, ring.call, ring.base) = (None, None, Some(base));
        Ok(())
    }

    /// Whether a ring continues after the chains that were taken before it stopped. Otherwise it belongs to
    /// another driver.
    pub fn goes_on(&mut self, index: u32, base: u16) -> Result<bool> {
        Ok(self.ring(index)?.base.is_none_or(|before| before == base))
    }

    /// Whether a ring has the same addresses as before it stopped.
    pub fn lies_there(&mut self, index: u32, now: &VringConfigData) -> Result<bool> {
        let place = |a: &VringConfigData| (a.desc_table_addr, a.used_ring_addr, a.avail_ring_addr);
        Ok(self.ring(index)?.lay.as_ref().is_none_or(|before| place(before) == place(now)))
    }

    /// A ring has started. Both sides must look at it, because a notification from before it stopped may have
    /// been lost: gives the events with which they are [notified](notify).
    pub fn start(&mut self, index: u32) -> Result<Vec<OwnedFd>> {
        if index == u32::from(CONTROL_QUEUE) {
            self.stopped = false;
        }
        let ring = self.ring(index)?;
        if ring.lay.take().is_none() {
            return Ok(Vec::new());
        }
        [&ring.kick, &ring.call].into_iter().flatten().map(|held| held.fd.event()).collect()
    }

    /// The device was reset: the driver starts over.
    pub fn reset(&mut self) {
        self.features = None;
        self.restart();
        self.rings.iter_mut().for_each(|ring| ring.enabled = Some(false));
    }

    /// Forgets what had stopped.
    pub fn restart(&mut self) {
        self.stopped = false;
        self.rings.iter_mut().for_each(|ring| ring.lay = None);
    }

    /// Tells a new device everything. It and the driver must look at the rings again, because its predecessor
    /// may have taken a notification without acting on it, or acted without notifying: gives the events with
    /// which they are [notified](notify).
    pub fn replay(&self, device: &mut Frontend) -> vhost::Result<Vec<OwnedFd>> {
        let mut events = Vec::new();
        if let Some(features) = self.features {
            device.set_features(features)?;
        }
        self.send_memories(device)?;
        for (index, ring) in self.rings.iter().enumerate() {
            if let Some(num) = ring.num {
                device.set_vring_num(index, num)?;
            }
            if let Some(base) = ring.base {
                device.set_vring_base(index, base)?;
            }
            if let Some(addresses) = &ring.addresses {
                device.set_vring_addr(index, addresses)?;
            }
            let Some(kick) = &ring.kick else { continue };
            if let Some(call) = &ring.call {
                device.set_vring_call(index, &call.fd.0)?;
            }
            if let Some(err) = &ring.err {
                device.set_vring_err(index, &err.fd.0)?;
            }
            device.set_vring_kick(index, &kick.fd.0)?;
            if let Some(enabled) = ring.enabled {
                device.set_vring_enable(index, enabled)?;
            }
            for held in [Some(kick), ring.call.as_ref()].into_iter().flatten() {
                events.push(held.fd.event()?);
            }
        }
        Ok(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_notified_by_eventfds_alone() {
        let (pipe, _theirs) = nix::unistd::pipe().unwrap();
        let others = [pipe.into(), tempfile::tempfile().unwrap(), File::open("/dev/null").unwrap()];
        for other in others {
            assert!(Notifier::new(Some(other)).is_err());
        }
        let own = Notifier::new(None).unwrap();
        own.0.write(1).unwrap();
        let again = Notifier::new(Some(File::from(own.event().unwrap()))).unwrap();
        assert_eq!(again.0.read().unwrap(), 1);
    }
}
