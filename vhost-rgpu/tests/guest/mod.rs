//! A guest with its VMM, which speaks vhost-user and `docs/device.md`.

#![allow(dead_code, reason = "each test file uses its part")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use host_bridge::memory::{ChannelView, Memories};
use protocol::channel::{Geometry, HeaderFields, State};
use protocol::device::{
    Answer, CONTROL_QUEUE, DOORBELL_QUEUE, EVENT_QUEUE, Extent, Request, Response, request,
};
use protocol::link::Memory;
use test_kit::channel::{Channel, write_header};
use test_kit::session::RAM;
use test_kit::*;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, IntoBytes};

use crate::daemon::Daemon;

/// The VMM's address of guest memory, as far as the daemon is told.
pub const VMM_ADDRESS: u64 = 0x7000_0000_0000;
/// Descriptors of a queue.
pub const SIZE: u16 = 64;
/// `VIRTIO_F_VERSION_1`.
pub const VERSION_1: u64 = 1 << 32;
/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Where buffers begin.
const BUFFERS: u64 = 0x8_0000;
/// Guest addresses: queues lie below 1 MiB, channels from there on.
pub const CHANNEL: u64 = 1 << 20;
pub const CHANNEL_STRIDE: u64 = 4 << 20;

/// One virtqueue as its driver sees it.
pub struct Queue {
    base: u64,
    pub kick: EventFd,
    call: EventFd,
    next: u16,
    avail: u16,
    used: u16,
    /// The next chain that the device will take, as reported when it stopped.
    pub base_index: u16,
}

/// A guest with its VMM.
pub struct Guest {
    pub frontend: Frontend,
    pub memories: Memories,
    pub queues: Vec<Queue>,
    buffers: u64,
}

impl Guest {
    pub fn connect(daemon: &Daemon) -> Guest {
        Guest::at_socket(&daemon.vm())
    }

    /// Connects to the socket of one of several virtual machines.
    pub fn at_socket(socket: &Path) -> Guest {
        let file: OwnedFd = memfd(RAM);
        let memory = Memory { addr: 0, size: RAM, file_offset: 0 };
        let memories = Memories::map(vec![(memory, file.try_clone().unwrap())]).unwrap();
        let mut frontend = Frontend::connect(socket, 3).unwrap();
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap();
        assert!(features & VERSION_1 != 0 && features & PROTOCOL_FEATURES != 0);
        frontend.set_features(VERSION_1 | PROTOCOL_FEATURES).unwrap();
        let offered = frontend.get_protocol_features().unwrap();
        frontend
            .set_protocol_features(
                offered
                    & (VhostUserProtocolFeatures::CONFIG
                        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
                        | VhostUserProtocolFeatures::MQ
                        | VhostUserProtocolFeatures::RESET_DEVICE),
            )
            .unwrap();
        let mut guest = Guest { frontend, memories, queues: Vec::new(), buffers: BUFFERS };
        guest.share(&file);
        for index in 0..3 {
            let queue = Queue {
                base: u64::from(index) * 0x1_0000,
                kick: EventFd::new(0).unwrap(),
                call: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
                next: 0,
                avail: 0,
                used: 0,
                base_index: 0,
            };
            guest.queues.push(queue);
            guest.start(index);
        }
        guest.settle();
        guest
    }

    /// Waits until the daemon has acted on all messages of the VMM so far. Most have no answer, but this one
    /// does.
    pub fn settle(&self) {
        self.frontend.get_features().unwrap();
    }

    pub fn share(&mut self, file: &OwnedFd) {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: RAM,
            userspace_addr: VMM_ADDRESS,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region]).unwrap();
    }

    fn memory(addr: u64, size: u64, handle: i32) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: addr,
            memory_size: size,
            userspace_addr: VMM_ADDRESS + addr,
            mmap_offset: 0,
            mmap_handle: handle,
        }
    }

    /// Plugs memory in.
    pub fn add_memory(&mut self, addr: u64, size: u64, file: &OwnedFd) {
        self.frontend.add_mem_region(&Self::memory(addr, size, file.as_raw_fd())).unwrap();
    }

    /// Unplugs memory.
    pub fn remove_memory(&mut self, addr: u64, size: u64) {
        self.frontend.remove_mem_region(&Self::memory(addr, size, -1)).unwrap();
    }

    /// Tells the device where a queue is and starts it.
    pub fn start(&mut self, index: u16) {
        let queue = &mut self.queues[usize::from(index)];
        (queue.next, queue.avail, queue.used) = (0, 0, 0);
        let base = queue.base;
        self.fill(base, 0x6000);
        self.place(index, 0);
    }

    /// Tells the device where a queue is and that it continues after `next`, and starts it.
    pub fn place(&mut self, index: u16, next: u16) {
        let (queue, index) = (&self.queues[usize::from(index)], usize::from(index));
        let base = queue.base;
        self.frontend.set_vring_num(index, SIZE).unwrap();
        let addresses = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: VMM_ADDRESS + base,
            avail_ring_addr: VMM_ADDRESS + base + 0x2000,
            used_ring_addr: VMM_ADDRESS + base + 0x4000,
            log_addr: None,
        };
        self.frontend.set_vring_addr(index, &addresses).unwrap();
        self.frontend.set_vring_base(index, next).unwrap();
        self.frontend.set_vring_call(index, &queue.call).unwrap();
        self.frontend.set_vring_kick(index, &queue.kick).unwrap();
        self.frontend.set_vring_enable(index, true).unwrap();
    }

    /// What the backend sees when a guest resets the device and its driver starts over.
    pub fn reset(&mut self) {
        self.stop();
        self.read_config();
    }

    /// What QEMU sends when the guest is stopped, and also when it is reset.
    pub fn stop(&mut self) {
        for index in 0..3 {
            self.frontend.set_vring_enable(index, false).unwrap();
        }
        for index in 0..3 {
            // All of the guest's chains were taken, which is what QEMU reports again when the guest
            // continues.
            let base = self.frontend.get_vring_base(index).unwrap();
            self.queues[index].base_index = base as u16;
        }
    }

    /// Moves the queues.
    pub fn move_queues(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.base = (queue.base + 0x3_0000) % 0x6_0000);
    }

    /// What a driver reads when it starts.
    pub fn read_config(&mut self) {
        self.frontend.get_config(0, 64, VhostUserConfigFlags::empty(), &[0; 64]).unwrap();
    }

    /// What QEMU sends when a stopped guest continues.
    pub fn go_on(&mut self) {
        self.frontend.set_features(VERSION_1 | PROTOCOL_FEATURES).unwrap();
        for index in 0..3 {
            self.place(index, self.queues[usize::from(index)].base_index);
        }
    }

    pub fn at(&self, address: u64, len: u64) -> NonNull<u8> {
        self.memories.resolve(&[Extent { addr: address, len }], len).unwrap().all()[0].at
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        // SAFETY: `at` checks the range; the memory is this test's.
        unsafe { self.at(address, bytes.len() as u64).copy_from(NonNull::from(bytes).cast(), bytes.len()) };
    }

    pub fn fill(&self, address: u64, len: u64) {
        self.write(address, &vec![0; len as usize]);
    }

    pub fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: `at` checks the range; the memory belongs to this test.
        unsafe { self.at(address, N as u64).copy_to(NonNull::from(&mut bytes).cast(), N) };
        bytes
    }

    /// Allocates a buffer. The tests need so little that nothing is ever freed.
    pub fn buffer(&mut self, len: u64) -> u64 {
        let at = self.buffers;
        self.buffers += len.next_multiple_of(16);
        assert!(self.buffers <= CHANNEL);
        at
    }

    /// Reuses the space of all buffers: nothing that was posted is still needed.
    pub fn reuse_buffers(&mut self) {
        self.buffers = BUFFERS;
    }

    /// Puts a chain of (address, length, device writes) into a queue. Returns its head.
    pub fn offer(&mut self, queue: u16, chain: &[(u64, u32, bool)]) -> u16 {
        let q = &mut self.queues[usize::from(queue)];
        let (base, head, slot) = (q.base, q.next % SIZE, q.avail % SIZE);
        q.next += chain.len() as u16;
        q.avail += 1;
        let avail = q.avail;
        for (i, (address, len, writes)) in chain.iter().enumerate() {
            let index = (head + i as u16) % SIZE;
            let last = i + 1 == chain.len();
            let flags = u16::from(!last) | if *writes { 2 } else { 0 };
            let mut descriptor = address.to_le_bytes().to_vec();
            descriptor.extend_from_slice(&len.to_le_bytes());
            descriptor.extend_from_slice(&flags.to_le_bytes());
            descriptor.extend_from_slice(&((index + 1) % SIZE).to_le_bytes());
            self.write(base + u64::from(index) * 16, &descriptor);
        }
        self.write(base + 0x2000 + 4 + u64::from(slot) * 2, &head.to_le_bytes());
        std::sync::atomic::fence(Ordering::SeqCst);
        self.write(base + 0x2000 + 2, &avail.to_le_bytes());
        head
    }

    pub fn kick(&self, queue: u16) {
        self.queues[usize::from(queue)].kick.write(1).unwrap();
    }

    /// The next chain that the device has returned.
    pub fn used(&mut self, queue: u16) -> Option<(u16, u32)> {
        let q = &self.queues[usize::from(queue)];
        let (base, seen) = (q.base, q.used);
        if u16::from_le_bytes(self.read(base + 0x4000 + 2)) == seen {
            return None;
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        let [i0, i1, _, _, l0, l1, l2, l3] = self.read(base + 0x4000 + 4 + u64::from(seen % SIZE) * 8);
        self.queues[usize::from(queue)].used += 1;
        Some((u16::from_le_bytes([i0, i1]), u32::from_le_bytes([l0, l1, l2, l3])))
    }

    pub fn wait_used(&mut self, queue: u16) -> (u16, u32) {
        let start = std::time::Instant::now();
        loop {
            if let Some(used) = self.used(queue) {
                return used;
            }
            assert!(start.elapsed() < PATIENCE, "queue {queue}: nothing came back");
            std::thread::yield_now();
        }
    }

    /// Sends a request whose bytes are split into small descriptors. Returns (head, address of the answer).
    pub fn send(&mut self, bytes: &[u8]) -> (u16, u64) {
        let (at, answer) = (self.buffer(bytes.len() as u64), self.buffer(264));
        self.write(at, bytes);
        self.fill(answer, 264);
        let cut = 20.min(bytes.len() as u64);
        let rest = bytes.len() as u64 - cut;
        let mut chain = vec![(at, cut as u32, false)];
        if rest > 0 {
            chain.push((at + cut, rest as u32, false));
        }
        chain.extend([(answer, 3, true), (answer + 3, 261, true)]);
        let head = self.offer(CONTROL_QUEUE, &chain);
        self.kick(CONTROL_QUEUE);
        (head, answer)
    }

    pub fn answer_at(&self, at: u64) -> (Answer, String) {
        let response = Response::read_from_bytes(&self.read::<264>(at)).unwrap();
        (Answer::from_number(response.status), response.reason())
    }

    pub fn raw(&mut self, bytes: &[u8]) -> (Answer, String) {
        let (head, at) = self.send(bytes);
        assert_eq!(self.wait_used(CONTROL_QUEUE), (head, 264));
        self.answer_at(at)
    }

    pub fn ask(&mut self, request: Request, extents: &[Extent]) -> (Answer, String) {
        self.raw(&message(request, extents))
    }

    /// Prepares the memory of channel `channel`, its header's page last.
    pub fn prepare(&self, channel: u32) -> (Vec<Extent>, Geometry) {
        self.prepare_for(channel, 0)
    }

    /// The same, for one of several servers.
    fn prepare_for(&self, channel: u32, server: u32) -> (Vec<Extent>, Geometry) {
        let geometry = Geometry::with_arena(1 << 20);
        let size = geometry.size as u64;
        assert!(size < CHANNEL_STRIDE);
        let base = CHANNEL + u64::from(channel) * CHANNEL_STRIDE;
        let extents = vec![Extent { addr: base + size, len: 4096 }, Extent { addr: base, len: size - 4096 }];
        self.fill(base, size + 4096);
        let fields = HeaderFields { server, ..geometry.fields(3, "guest-program") };
        write_header(&self.memories, base + size, &fields);
        (extents, geometry)
    }

    pub fn create(&mut self, channel: u32) -> Channel {
        self.create_for(channel, 0)
    }

    /// Creates a channel for one of several servers.
    pub fn create_for(&mut self, channel: u32, server: u32) -> Channel {
        let (extents, geometry) = self.prepare_for(channel, server);
        assert_eq!(self.ask(create(channel, &extents), &extents), (Answer::Ok, String::new()));
        self.channel(self.memories.view(&extents, geometry.size as u64).unwrap())
    }

    /// A channel that is ready.
    pub fn channel(&self, view: ChannelView) -> Channel {
        assert_eq!(view.header().state(), State::Ready);
        let doorbell = self.queues[usize::from(DOORBELL_QUEUE)].kick.try_clone().unwrap();
        Channel::new(view, move || doorbell.write(1).unwrap())
    }

    /// Posts a buffer for an event. Returns its address.
    pub fn post_event(&mut self) -> u64 {
        let at = self.buffer(8);
        self.offer(EVENT_QUEUE, &[(at, 8, true)]);
        self.kick(EVENT_QUEUE);
        at
    }
}

pub fn message(request: Request, extents: &[Extent]) -> Vec<u8> {
    let mut bytes = request.as_bytes().to_vec();
    bytes.extend_from_slice(extents.as_bytes());
    bytes
}

pub fn plain(kind: u32, channel: u32) -> Request {
    Request { kind, channel, region: 0, extent_count: 0, size: 0, flags: 0, reserved: 0 }
}

pub fn create(channel: u32, extents: &[Extent]) -> Request {
    let size = extents.iter().map(|e| e.len).sum();
    Request { extent_count: extents.len() as u32, size, ..plain(request::CREATE_CHANNEL, channel) }
}
