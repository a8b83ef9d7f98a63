//! The device as a VMM sees it over vhost-user: features, configuration space, queues and their threads,
//! guest memory.
//!
//! A message changes the device's state in [`super`]; events of the request queue continue in
//! [`requests`](super::requests).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use anyhow::{Context, bail};
use host_bridge::framing::with_causes;
use host_bridge::memory::{Memories, MemoryError};
use protocol::device::{CONFIG_MAGIC, CONTROL_QUEUE, Config, DEVICE_VERSION, EVENT_QUEUE, QUEUE_COUNT};
use protocol::link::Memory;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringT};
use virtio_queue::QueueT;
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventNotifier};
use zerocopy::IntoBytes;

use super::{Device, THREADS};
use crate::vm::queue::{GuestMemory, QUEUE_SIZE, Vring};

/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;
/// `VIRTIO_RING_F_INDIRECT_DESC` and `VIRTIO_RING_F_EVENT_IDX`.
const RING_FEATURES: u64 = 1 << 28 | 1 << 29;

impl Device {
    /// Maps the guest's memory, for new sessions. Running ones keep the memory that they were given. What
    /// cannot be mapped is left out: to refuse it would end the VMM's connection, and the guest's sessions
    /// with it.
    fn map_memory(&self, guest: &GuestMemoryMmap) -> anyhow::Result<()> {
        let mut files = Vec::with_capacity(guest.num_regions());
        for region in guest.iter() {
            let at = region.start_addr().0;
            let Some(file) = region.file_offset() else {
                bail!("guest memory at {at:#x} is not backed by a file: configure the VMM to share it");
            };
            let memory = Memory { addr: at, size: region.len(), file_offset: file.start() };
            files.push((memory, OwnedFd::from(file.file().try_clone().context("duplicating a descriptor")?)));
        }
        let left_out = |memory: Memory, why: &MemoryError| {
            let (at, why) = (memory.addr, with_causes(why));
            self.limit.warn(&self.who, &format!("guest memory at {at:#x} is not used: {why}"));
        };
        let memories = Memories::map_possible(files, left_out)?;
        *self.memories.lock().unwrap_or_else(PoisonError::into_inner) = memories;
        Ok(())
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        QUEUE_COUNT
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        VERSION_1 | RING_FEATURES | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn reset_device(&self) {
        self.end_all("the guest has reset the device");
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let limits = &self.config.limits;
        let config = Config {
            magic: CONFIG_MAGIC,
            version: DEVICE_VERSION,
            max_channels: limits.max_channels,
            max_extents: limits.max_extents,
            max_channel_size: limits.max_channel_size,
            max_registered: limits.max_registered,
            reserved: [0; 32],
        };
        // The reply must have exactly `size` bytes; otherwise the message to the VMM is malformed.
        let bytes = config.as_bytes().iter().copied().skip(offset as usize).chain(std::iter::repeat(0));
        bytes.take(size as usize).collect()
    }

    fn update_memory(&self, memory: GuestMemory) -> io::Result<()> {
        self.map_memory(&memory.memory()).map_err(|e| {
            // The VMM and the keeper only learn that the message was refused.
            self.limit.warn(&self.who, &format!("the guest's memory is refused: {e:#}"));
            io::Error::other(e)
        })
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        THREADS.to_vec()
    }

    fn exit_event(&self, thread_index: usize) -> Option<(EventConsumer, EventNotifier)> {
        let exit = self.exit.get(thread_index)?;
        let notifier = exit.as_raw_fd();
        // SAFETY: duplicates a descriptor of this device; has no other effect.
        let notifier = unsafe { libc::fcntl(notifier, libc::F_DUPFD_CLOEXEC, 0) };
        if notifier < 0 {
            return None;
        }
        // SAFETY: vhost-user-backend uses the consumer's raw number for epoll and never closes it, so
        // `self.exit` remains the only owner that closes the descriptor. (It would never close a duplicate
        // either, which would leak with every connection.) The workers hold the device, so the descriptor
        // stays open while they use it.
        let consumer = unsafe { EventConsumer::from_raw_fd(exit.as_raw_fd()) };
        // SAFETY: the descriptor was duplicated above and nothing else owns it.
        Some((consumer, unsafe { EventNotifier::from_raw_fd(notifier) }))
    }

    fn stop_vring(&self, queue_index: u32) -> io::Result<()> {
        // One queue at a time, the control queue first.
        match u16::try_from(queue_index) {
            Ok(CONTROL_QUEUE) => self.pause(),
            Ok(EVENT_QUEUE) => self.events.stop(),
            _ => {}
        }
        Ok(())
    }

    fn handle_event(&self, event: u16, _set: EventSet, vrings: &[Vring], thread: usize) -> io::Result<()> {
        // `event` is the queue's index among those of its thread.
        match (thread, event, vrings.get(usize::from(event))) {
            (0, 0, Some(vring)) => {
                self.go_on(vring);
                self.take_requests(vring);
            }
            (0, 1, Some(vring)) => {
                if self.resumes[usize::from(EVENT_QUEUE)].swap(false, Ordering::SeqCst) {
                    // Each buffer is returned as soon as it is taken, so one that was not returned is taken
                    // again.
                    let mut vring = vring.get_mut();
                    let queue = vring.get_queue_mut();
                    queue.set_next_avail(queue.next_used());
                }
                self.events.buffers(vring);
            }
            (1, 0, _) => self.ring(),
            _ => tracing::warn!("{}: unknown event {event} in thread {thread}", self.who),
        }
        Ok(())
    }
}
