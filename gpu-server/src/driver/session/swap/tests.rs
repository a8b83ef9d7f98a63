//! Tests of moving memory on the software GPU, which fails at the steps that a test names.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use host_bridge::endpoint::Client;
use protocol::handle::MemoryId;
use protocol::ops::memory::*;

use super::*;
use crate::config::Backing;
use crate::cuda_ipc::Broker;
use crate::doubles::Listener;
use crate::driver::Backend;
use crate::driver::gpu::GpuMemory;
use crate::driver::nvml::Management;
use crate::driver::quota::Quota;
use crate::driver::software::Software;
use crate::driver::store::Part;
use crate::limits::{Limits, Resource};
use crate::pages::{Meter, Page, Terms};

const G: u64 = 2 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory that a session can use.
#[derive(Debug, Clone)]
struct Used {
    /// The devices that can access it.
    devices: Vec<u32>,
    address: u64,
    size: u64,
    /// It shows these bytes of what [`contents`] makes.
    seed: u64,
    offset: u64,
}

/// Offset and size of a mapping in granules, and the devices that may access it.
type Mapped = (u64, u64, &'static [u32]);

/// A session on two devices of 64 MiB, with memory of every kind that moves.
struct World {
    session: Session<Software>,
    call: Call,
    store: Store,
    meter: Arc<Page<Meter>>,
    memory: Vec<Used>,
    /// Memory without an address: its number, device and size.
    created: Vec<(u32, u32, u64)>,
    /// What the devices use when all of it is there.
    all: [u64; 2],
}

/// How moving all memory away and back ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// It is back, after so many failures.
    Back(u32),
    /// It failed again and again.
    Stuck,
    /// The session has lost memory.
    Torn,
}

/// Pages, each of which differs from all others.
fn contents(used: &Used) -> Vec<u8> {
    const PAGE: usize = 4096;
    let page = test_kit::pattern(PAGE, used.seed);
    let mut bytes = Vec::with_capacity(used.size as usize);
    for at in (used.offset..used.offset + used.size).step_by(PAGE) {
        bytes.extend_from_slice(&at.to_le_bytes());
        bytes.extend_from_slice(&page[8..]);
    }
    bytes
}

/// All of some memory without an address.
fn whole(number: u32, size: u64) -> Used {
    Used { devices: Vec::new(), address: 0, size, seed: number.into(), offset: 0 }
}

fn file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

impl World {
    fn new(imitate: &str) -> World {
        let software_imitate = imitate.parse().unwrap();
        let backing = Backing { software_imitate, ..Backing::software(64 << 20, 2) };
        let quota = Quota::default();
        let nvml = Management::new(&backing, quota.clone());
        let session = Session::new(Software::new(&backing).unwrap(), quota.clone(), nvml);
        let (terms, meter) = (Page::<Terms>::new().unwrap().0, Arc::new(Page::<Meter>::new().unwrap().0));
        let daemon: OwnedFd = std::fs::File::options().write(true).open("/dev/null").unwrap().into();
        let broker = Broker::new(Arc::new(daemon));
        broker.close();
        quota.begin(Limits::default(), Arc::new(terms), Arc::clone(&meter), broker, None);
        let client: Arc<dyn Client> = Arc::new(Listener::new(|_| ()));
        let call = Call::new(Arc::clone(&client));
        let (store, memory, created) = (Store::default(), Vec::new(), Vec::new());
        let mut world = World { session, call, store, meter, memory, created, all: [0; 2] };
        world.session.begin(client);
        world.take_memory();
        world.all = world.used();
        for used in world.memory.clone() {
            if world.session.windows[used.devices[0] as usize].pieces.touches(used.address, 1) {
                world.copy(used.devices[0], used.address, &mut contents(&used), Way::In);
            }
        }
        for (number, device, size) in world.created.clone() {
            world.copy_whole(number, device, &mut contents(&whole(number, size)), Way::In);
        }
        world
    }

    fn take_memory(&mut self) {
        for (device, at, size) in [(0, 0, 2 * G), (0, 2 * G, G), (1, 0, G)] {
            let address = window(device) + at;
            self.session.mem_grow(&mut self.call, MemGrow { device, address, size }).unwrap();
            self.session.mem_alloc(&mut self.call, MemAlloc { address, size }).unwrap();
            self.memory.push(Used { devices: vec![device], address, size, seed: address, offset: 0 });
        }
        let reserve = AddressReserve { address: SPACE, size: SPACE_ALIGN };
        self.session.address_reserve(&mut self.call, reserve).unwrap();
        // As a whole, the second one also for the other device; in parts, with a part that is mapped nowhere,
        // in another order; at two addresses, and a part once more, for several devices; as a whole for the
        // other device only; mapped nowhere.
        let all: [(u32, u64, &[Mapped]); 6] = [
            (0, 1, &[(0, 1, &[0])]),
            (1, 1, &[(0, 1, &[1, 0])]),
            (0, 3, &[(2, 1, &[0]), (0, 1, &[1, 0])]),
            (1, 2, &[(0, 2, &[0]), (1, 1, &[1]), (0, 2, &[0, 1])]),
            (0, 1, &[(0, 1, &[1])]),
            (1, 1, &[]),
        ];
        let mut address = SPACE;
        for (number, (device, size, mappings)) in (1..).zip(all) {
            self.create(number, device, size * G);
            for (offset, size, devices) in mappings {
                self.map(number, offset * G, address, size * G, devices);
                // Some are neighbors.
                address += size * G + number as u64 % 2 * G;
            }
        }
    }

    fn create(&mut self, number: u32, device: u32, size: u64) {
        let create = MemoryCreate { memory: MemoryId(number), device, size, exportable: false };
        self.session.memory_create(&mut self.call, create).unwrap();
        self.created.push((number, device, size));
    }

    fn map(&mut self, number: u32, offset: u64, address: u64, size: u64, devices: &[u32]) {
        let map = MemoryMap { memory: MemoryId(number), offset, address, size };
        self.session.memory_map(&mut self.call, map).unwrap();
        for device in devices {
            let access = MemoryAccess { address, size, device: *device, flags: 3 };
            self.session.memory_access(&mut self.call, access).unwrap();
        }
        let (devices, seed) = (devices.to_vec(), number.into());
        self.memory.push(Used { devices, address, size, seed, offset });
    }

    /// Copies between memory and `bytes`.
    fn copy(&mut self, device: u32, address: u64, bytes: &mut [u8], way: Way) {
        let part = Part { address, host: NonNull::new(bytes.as_mut_ptr()).unwrap(), len: bytes.len() };
        self.session.gpu.transfer(device, Lane::Even, way, part).unwrap();
    }

    /// The same for all of some memory without an address, whatever part of it is mapped.
    fn copy_whole(&mut self, number: u32, device: u32, bytes: &mut [u8], way: Way) {
        let size = bytes.len() as u64;
        let handle = self.session.space.memory(number).unwrap().handle().unwrap();
        let address = self.session.gpu.map_whole(handle, device, size).unwrap();
        self.copy(device, address, bytes, way);
        self.session.gpu.unmap_whole(device, address, size).unwrap();
    }

    /// Bytes that the devices have in use.
    fn used(&mut self) -> [u64; 2] {
        [0, 1].map(|device| {
            let (free, total) = self.session.gpu.memory_info(device).unwrap();
            total - free
        })
    }

    /// Bytes that move, and that are away.
    fn total(&self) -> u64 {
        self.all.iter().sum()
    }

    fn away(&self) -> u64 {
        self.session.in_store().iter().map(|piece| piece.size).sum()
    }

    fn is_away(&self, used: &Used) -> bool {
        let device = used.devices[0];
        match self.session.windows[device as usize].pieces.find(used.address) {
            Some((_, _, piece)) => matches!(piece.place, Place::Store(_)),
            None => {
                let mapping = self.session.space.mapping(used.address, used.size).unwrap();
                self.session.space.memory(mapping.memory).unwrap().handle().is_err()
            }
        }
    }

    /// Checks that what is on the devices is right, and counted.
    fn check(&mut self) {
        let mut away = [0; 2];
        for piece in self.session.in_store() {
            away[piece.device as usize] += piece.size;
        }
        let figures = &self.meter.memory;
        let [counted, movable] = [&figures.away, &figures.movable]
            .map(|figures| [0, 1].map(|device: usize| figures[device].load(Ordering::Relaxed)));
        assert_eq!((counted, movable), (away, self.all));
        let on: [u64; 2] = std::array::from_fn(|device| self.all[device] - away[device]);
        assert_eq!(self.used(), on);
        let held = [0, 1].map(|device| self.session.quota.held(Resource::Device(device)));
        assert_eq!(held, self.all, "also what is away");
        for used in self.memory.clone() {
            if self.is_away(&used) {
                continue;
            }
            let expected = contents(&used);
            for device in &used.devices {
                let mut found = vec![0; used.size as usize];
                self.copy(*device, used.address, &mut found, Way::Out);
                assert!(found == expected, "{used:?} from device {device}");
            }
        }
        for (number, device, size) in self.created.clone() {
            if self.session.space.memory(number).unwrap().handle().is_ok() {
                let mut found = vec![0; size as usize];
                self.copy_whole(number, device, &mut found, Way::Out);
                assert!(found == contents(&whole(number, size)), "memory {number}");
            }
        }
        assert!(self.session.whole.is_empty());
    }

    fn leave(&mut self, file: Option<OwnedFd>) -> Result {
        self.session.leave(&mut self.call, &mut self.store, file, PATIENCE)
    }

    fn come_back(&mut self) -> Result {
        self.session.come_back(&mut self.store)
    }

    /// Moves everything away and back, with a few tries, and checks all of it after each.
    fn round(&mut self, to_file: bool) -> Ended {
        let mut failed = 0;
        for out in [true, false] {
            loop {
                let moved = if out { self.leave(to_file.then(file)) } else { self.come_back() };
                if self.session.torn().is_some() {
                    assert!(moved.is_err());
                    return Ended::Torn;
                }
                self.check();
                let away = self.away();
                if moved.is_ok() || !out {
                    let expected = if out == moved.is_ok() { self.total() } else { 0 };
                    assert_eq!(away, expected, "all or nothing");
                }
                assert_eq!(self.session.is_away(), away > 0);
                match moved {
                    Ok(()) => break,
                    Err(_) if failed < 3 => failed += 1,
                    Err(_) => return Ended::Stuck,
                }
            }
        }
        Ended::Back(failed)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The devices, which are each other's peers, would otherwise stay.
        let _ = self.session.gpu.select(&[], &[]);
    }
}

/// The first, every middle and the last step of each piece, both ways.
#[test]
fn nothing_is_lost_whichever_step_fails() {
    for to_file in [false, true] {
        let mut steps = 0;
        for failing in 1.. {
            let mut world = World::new(&format!("fail-move={failing}"));
            match world.round(to_file) {
                Ended::Back(0) => break,
                ended => assert_eq!(ended, Ended::Back(1), "step {failing}"),
            }
            if failing % 5 == 0 {
                assert_eq!(world.round(!to_file), Ended::Back(0), "after step {failing}");
            }
            steps = failing;
        }
        assert!(steps > 50, "{steps}");
    }
}

/// Undoing fails, too. Either everything is right in the end, or the session knows that it is not.
#[test]
fn a_session_whose_memory_can_be_neither_moved_nor_kept_knows() {
    for moves in [2, u32::MAX] {
        let mut seen = [0; 3];
        for failing in (1..).step_by(5) {
            let mut world = World::new(&format!("fail-move={failing},fail-moves={moves}"));
            match world.round(failing % 2 == 1) {
                Ended::Back(0) => break,
                Ended::Back(times) => {
                    assert!(times <= moves);
                    seen[0] += 1;
                }
                Ended::Stuck => seen[1] += 1,
                Ended::Torn => seen[2] += 1,
            }
        }
        let expected = if moves == u32::MAX { [false, true, true] } else { [true, false, true] };
        assert_eq!(seen.map(|times| times > 0), expected, "{moves}: {seen:?}");
    }
}

/// Others took memory since the session left.
#[test]
fn a_return_that_finds_too_little_room_is_undone() {
    for device in [0, 1] {
        for room in (0..World::new("").all[device as usize] / G).step_by(3) {
            let mut world = World::new("");
            world.leave(None).unwrap();
            let taken = (64 << 20) - room * G;
            let others = world.session.gpu.create(device, taken).unwrap();
            for _ in 0..2 {
                assert_eq!(world.come_back(), Err(Status::OUT_OF_MEMORY), "{room}");
                assert_eq!(world.away(), world.total());
            }
            world.session.gpu.destroy(device, taken, others, false).unwrap();
            world.come_back().unwrap();
            world.check();
        }
    }
}

#[test]
fn a_file_that_cannot_be_written_keeps_memory_where_it_is() {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    // The first one has no room. The second one has, but each write fails.
    for (size, seal) in [(G, SealFlag::F_SEAL_GROW), (64 << 20, SealFlag::F_SEAL_WRITE)] {
        let file = memfd_create(c"full", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&file, size as i64).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seal)).unwrap();
        let mut world = World::new("");
        assert!(world.leave(Some(file)).is_err());
        assert!(!world.session.is_away());
        world.check();
        for to_file in [false, true] {
            assert_eq!(world.round(to_file), Ended::Back(0));
        }
    }
}

/// Before the first piece, in the middle of others, and in the last.
#[test]
fn a_file_that_cannot_be_read_gives_nothing_back_until_it_can() {
    use std::os::unix::fs::FileExt;
    let total = World::new("").total();
    for readable in (0..total).step_by(3 * G as usize / 2) {
        let mut world = World::new("");
        let (file, mut kept) = (file(), vec![0; total as usize]);
        let copy = std::fs::File::from(file.try_clone().unwrap());
        world.leave(Some(file)).unwrap();
        copy.read_exact_at(&mut kept, 0).unwrap();
        copy.set_len(readable).unwrap();
        for _ in 0..2 {
            assert_eq!(world.come_back(), Err(Status::UNKNOWN), "{readable}");
            assert_eq!(world.session.torn(), None);
            assert_eq!(world.used(), [0; 2]);
        }
        copy.write_all_at(&kept, 0).unwrap();
        world.come_back().unwrap();
        world.check();
    }
}

/// The rest never goes where the first ones are not.
#[test]
fn what_has_left_to_memory_does_not_continue_in_a_file() {
    for (first_to_file, then_to_file) in [(false, true), (true, false), (true, true)] {
        let mut tried = 0;
        for failing in (1..).step_by(4) {
            let mut world = World::new(&format!("fail-move={failing}"));
            if world.leave(first_to_file.then(file)).is_ok() {
                break;
            }
            if !world.session.is_away() {
                continue;
            }
            assert_ne!(world.used(), [0; 2]);
            let left = world.leave(then_to_file.then(file));
            assert_eq!(left, if first_to_file { Ok(()) } else { Err(Status::OUT_OF_MEMORY) });
            world.check();
            world.come_back().unwrap();
            world.check();
            tried += 1;
        }
        assert!(tried > 5, "{tried}");
    }
}

#[test]
fn batches_are_of_one_device_and_limited() {
    let piece = |device, size| Moving { what: What::Piece(0), device, size, at: 0 };
    let all = [
        piece(0, BATCH / 2),
        piece(0, BATCH / 2),
        piece(0, 1),
        piece(1, 1),
        piece(1, 2 * BATCH),
        piece(1, 1),
    ];
    let sizes: Vec<usize> = batches(&all).map(<[Moving]>::len).collect();
    assert_eq!(sizes, [2, 1, 2, 1]);
}
