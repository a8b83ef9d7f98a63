//! What a VMM and a device have agreed on over vhost-user, as far as another device process must know it: nothing here does I/O.
//!
//! Sizes and descriptor counts were checked by `vhost`; indexes and the number of memories are checked here, and the device process checks everything again.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use protocol::device::QUEUE_COUNT;
use vhost::vhost_user::message::{VhostUserMemoryRegion, VhostUserSingleMemoryRegion};
use vhost::vhost_user::{Error, Frontend, Result, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Maximum memories of a guest.
pub const MAX_MEMORIES: usize = 509;
/// Maximum memories in one message.
const MAX_TABLE: usize = 32;

/// One memory of the guest.
struct Memory {
    info: VhostUserMemoryRegionInfo,
    /// Keeps the descriptor in `info` open.
    _file: File,
}

impl Memory {
    fn new(addr: u64, size: u64, user_addr: u64, offset: u64, file: File) -> Memory {
        let info = VhostUserMemoryRegionInfo {
            guest_phys_addr: addr,
            memory_size: size,
            userspace_addr: user_addr,
            mmap_offset: offset,
            mmap_handle: file.as_raw_fd(),
        };
        Memory { info, _file: file }
    }
}

/// One virtqueue.
#[derive(Default)]
pub struct Ring {
    /// Its length in descriptors.
    pub num: Option<u16>,
    /// Where it lies.
    pub addresses: Option<VringConfigData>,
    /// The first descriptor chain to take.
    pub base: Option<u16>,
    /// The driver's notifications. None: the ring is stopped.
    pub kick: Option<EventFd>,
    /// The device's notifications.
    pub call: Option<EventFd>,
    /// The device's errors.
    pub err: Option<EventFd>,
    /// Whether it is enabled, once the VMM has said so.
    pub enabled: Option<bool>,
}

/// What was negotiated.
#[derive(Default)]
pub struct Negotiation {
    /// The VMM has taken the device.
    pub owned: bool,
    /// Features that the driver has accepted.
    pub features: Option<u64>,
    /// The guest's memories.
    memories: Vec<Memory>,
    rings: [Ring; QUEUE_COUNT],
}

/// The descriptor of a notification. Without one nobody listens, or nobody notifies: an eventfd of its own is the same.
pub fn notifier(file: Option<File>) -> Result<EventFd> {
    match file {
        // SAFETY: `into_raw_fd` gives up the ownership of the descriptor, which is only read and written.
        Some(file) => Ok(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }),
        None => EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(Error::ReqHandlerError),
    }
}

impl Negotiation {
    /// A virtqueue.
    pub fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// The guest has these memories now.
    pub fn set_memories(&mut self, regions: &[VhostUserMemoryRegion], files: Vec<File>) {
        let memory = |(region, file): (&VhostUserMemoryRegion, File)| {
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

    /// The guest has one memory more.
    pub fn add_memory(&mut self, region: &VhostUserSingleMemoryRegion, file: File) -> Result<()> {
        if self.memories.len() >= MAX_MEMORIES {
            return Err(Error::InvalidParam);
        }
        let VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr, mmap_offset } = **region;
        self.memories.push(Memory::new(guest_phys_addr, memory_size, user_addr, mmap_offset, file));
        Ok(())
    }

    /// The guest has one memory less. `None`: there is no such memory.
    pub fn remove_memory(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
    ) -> Option<VhostUserMemoryRegionInfo> {
        let addr = region.guest_phys_addr;
        let at = self.memories.iter().position(|memory| memory.info.guest_phys_addr == addr)?;
        Some(self.memories.remove(at).info)
    }

    /// The last memory, as it was given.
    pub fn last_memory(&self) -> Option<&VhostUserMemoryRegionInfo> {
        self.memories.last().map(|memory| &memory.info)
    }

    /// Tells a device what memories there are.
    pub fn send_memories(&self, device: &mut Frontend) -> vhost::Result<()> {
        let all: Vec<_> = self.memories.iter().map(|memory| memory.info).collect();
        let (first, others) = all.split_at(all.len().min(MAX_TABLE));
        if !first.is_empty() {
            device.set_mem_table(first)?;
        }
        others.iter().try_for_each(|memory| device.add_mem_region(memory).map(drop))
    }

    /// The device was reset: the driver begins anew.
    pub fn reset(&mut self) {
        self.features = None;
        self.rings.iter_mut().for_each(|ring| ring.enabled = Some(false));
    }

    /// Tells a new device everything, and makes it and the driver look at the rings again: its predecessor may have taken a notification without acting on it, or acted without notifying.
    pub fn replay(&self, device: &mut Frontend) -> vhost::Result<()> {
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
                device.set_vring_call(index, call)?;
            }
            if let Some(err) = &ring.err {
                device.set_vring_err(index, err)?;
            }
            device.set_vring_kick(index, kick)?;
            if let Some(enabled) = ring.enabled {
                device.set_vring_enable(index, enabled)?;
            }
            [Some(kick), ring.call.as_ref()].into_iter().flatten().for_each(notify);
        }
        Ok(())
    }
}

/// Notifies, unless a notification is pending anyway. Does not block, whatever the VMM has given.
fn notify(event: &EventFd) {
    // SAFETY: the descriptor stays open while it is borrowed here.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let mut watched = [PollFd::new(fd, PollFlags::POLLOUT)];
    if poll(&mut watched, PollTimeout::ZERO) == Ok(1) && watched[0].revents() == Some(PollFlags::POLLOUT) {
        let _ = event.write(1);
    }
}
