//! The health of NVIDIA's devices according to NVML: from events, and by polling every [`EVERY`] what has
//! none (links, temperature, the driver's advice).
//!
//! A part of a GPU (MIG) is as healthy as its GPU, which is what has events and figures. A device that NVML
//! does not find is looked for at each poll: NVML may find none while another one is lost, so that says
//! nothing about this one. What does is the answer of a handle that was found before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::ops::nvml::{self, FIELD_SIZE, status};

use super::devices::Devices;
use super::library::{Library, library};
use crate::driver::health::Event;

/// The time between two polls.
const EVERY: Duration = Duration::from_secs(10);
/// `nvmlEventTypeDoubleBitEccError`, `…XidCriticalError`, `…DramRetirementFailure`, `…FatalPoisonError`,
/// `…GpuUnavailableError`.
const ECC: u64 = 0x2;
const XID: u64 = 0x8;
const RETIREMENT_FAILED: u64 = 0x800;
const POISON: u64 = 0x2000;
const UNAVAILABLE: u64 = 0x4000;
/// An event's GPU instance if it concerns all of its GPU.
const WHOLE: u32 = u32::MAX;
/// `NVML_ERROR_TIMEOUT`.
const TIMEOUT: u32 = 10;
/// `NVML_NVLINK_MAX_LINKS`.
const LINKS: u32 = 18;
/// `nvmlClocksThrottleReasonHwThermalSlowdown`.
const TOO_HOT: u64 = 0x40;
/// Polls without it before a device counts as cool.
const COOL_AFTER: u32 = 3;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
const RECOVERY_ACTION: u32 = 230;

/// A GPU as NVML finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Gpu {
    handle: usize,
    /// Identifies an event's GPU, because one may have several handles.
    uuid: Option<Vec<u8>>,
    /// The instance that the device is, if it is a part of this GPU.
    instance: Option<u32>,
}

/// What NVML is asked. Handles are those of GPUs that it has found.
trait Nvml {
    /// Now, by the clock by which [`wait`](Nvml::wait) waits.
    fn now(&self) -> Instant;

    /// The GPU of the device with this number.
    fn find(&self, number: u32) -> Option<Gpu>;

    /// The UUID of an event's GPU.
    fn uuid(&self, handle: usize) -> Option<Vec<u8>>;

    /// Has a GPU's events reported from now on.
    fn register(&self, handle: usize);

    /// Waits for an `nvmlEventData_t`: the GPU, the type, a number, and the instances of MIG.
    fn wait(&self, limit: Duration) -> Option<[u64; 4]>;

    /// Whether a link is active (1) or not (0).
    fn link_state(&self, handle: usize, link: u32) -> Result<u32, u32>;

    /// Why the clocks are low, as bits.
    fn slowed_by(&self, handle: usize) -> Result<u64, u32>;

    /// The recovery action that the driver requests. 0: none, or unsupported by this driver.
    fn recovery_action(&self, handle: usize) -> u32;
}

/// A watched device.
#[derive(Debug, Default)]
struct Watched {
    number: u32,
    /// `None` until NVML finds it.
    gpu: Option<Gpu>,
    /// Links that have been active.
    links: Vec<u32>,
    lost: bool,
    /// If it was too hot: the number of polls since in which it was not.
    hot: Option<u32>,
    recovery: u32,
}

/// Watches devices.
pub struct Watch(Watching<Native>);

impl Watch {
    /// Starts watching the devices with these numbers. Those that NVML does not find are watched once it
    /// does.
    ///
    /// # Errors
    /// NVML's status, if the library doesn't exist or finds no device.
    pub fn new(all: &Arc<Devices>, numbers: &[u32]) -> Result<Watch, u32> {
        let library = library()?;
        let nvml = Native { library, devices: Arc::clone(all), set: make_set(library) };
        Ok(Watch(Watching::new(nvml, numbers)?))
    }

    /// Waits for events, at most until the next poll. What the driver already requested before is among the
    /// first.
    pub fn next(&mut self) -> Vec<(u32, Event)> {
        self.0.next()
    }
}

struct Watching<N> {
    nvml: N,
    devices: Vec<Watched>,
    /// GPUs whose events are reported.
    registered: Vec<usize>,
    next_poll: Instant,
}

impl<N: Nvml> Watching<N> {
    fn new(nvml: N, numbers: &[u32]) -> Result<Watching<N>, u32> {
        let next_poll = nvml.now() + EVERY;
        let devices = numbers.iter().map(|number| Watched { number: *number, ..Watched::default() });
        let mut watching = Watching { nvml, devices: devices.collect(), registered: Vec::new(), next_poll };
        watching.find_missing();
        let missing = watching.devices.iter().filter(|device| device.gpu.is_none());
        let missing: Vec<u32> = missing.map(|device| device.number).collect();
        if missing.len() == numbers.len() {
            return Err(status::NOT_FOUND);
        }
        if !missing.is_empty() {
            tracing::warn!(
                "NVML does not find device(s) {missing:?}: their health is not watched until it does"
            );
        }
        Ok(watching)
    }

    /// Looks for devices that NVML has not found yet.
    fn find_missing(&mut self) {
        for device in self.devices.iter_mut().filter(|device| device.gpu.is_none()) {
            let Some(gpu) = self.nvml.find(device.number) else { continue };
            if !self.registered.contains(&gpu.handle) {
                self.nvml.register(gpu.handle);
                self.registered.push(gpu.handle);
            }
            device.links =
                (0..LINKS).filter(|link| self.nvml.link_state(gpu.handle, *link) == Ok(1)).collect();
            device.gpu = Some(gpu);
        }
    }

    fn next(&mut self) -> Vec<(u32, Event)> {
        let left = self.next_poll.saturating_duration_since(self.nvml.now());
        let mut events = self.nvml.wait(left).map_or_else(Vec::new, |data| self.concerned(data));
        // However often there are events: a program can cause any number.
        let now = self.nvml.now();
        if now >= self.next_poll {
            self.next_poll = now + EVERY;
            self.find_missing();
            events.extend(self.devices.iter_mut().flat_map(|device| look(&self.nvml, device)));
        }
        events
    }

    /// The watched devices that NVML's event concerns, with the event.
    fn concerned(&self, [handle, kind, number, instances]: [u64; 4]) -> Vec<(u32, Event)> {
        let Some(event) = event(kind, number) else { return Vec::new() };
        let (handle, instance) = (handle as usize, instances as u32);
        let uuid = self.nvml.uuid(handle);
        let concerns = |gpu: &Gpu| {
            let same = if uuid.is_some() { gpu.uuid == uuid } else { gpu.handle == handle };
            same && (instance == WHOLE || gpu.instance.is_none_or(|own| own == instance))
        };
        let those = self.devices.iter().filter(|device| device.gpu.as_ref().is_some_and(concerns));
        those.map(|device| (device.number, event)).collect()
    }
}

/// NVIDIA's library.
struct Native {
    library: &'static Library,
    devices: Arc<Devices>,
    /// `nvmlEventSet_t`; `None` if this driver has no events.
    set: Option<usize>,
}

impl Nvml for Native {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn find(&self, number: u32) -> Option<Gpu> {
        let handle = self.devices.get(number)?.handle(self.library)?;
        let (handle, instance) = match gpu_of_part(self.library, handle) {
            Some(gpu) => (gpu, instance_of(self.library, handle)),
            None => (handle, None),
        };
        Some(Gpu { handle, uuid: self.uuid(handle), instance })
    }

    fn uuid(&self, handle: usize) -> Option<Vec<u8>> {
        self.library.ask(handle, nvml::UUID).ok()
    }

    fn register(&self, handle: usize) {
        if let Some(set) = self.set {
            register(self.library, handle, set);
        }
    }

    fn wait(&self, limit: Duration) -> Option<[u64; 4]> {
        let (Some(set), Some(wait)) = (self.set, self.library.find(c"nvmlEventSetWait_v2")) else {
            std::thread::sleep(limit);
            return None;
        };
        let begun = Instant::now();
        let mut data = [0u64; 4];
        // Not less than the limit, which would be a poll too early.
        let milliseconds = limit.as_millis() as usize + 1;
        // SAFETY: a set that is never freed, a place for the event, and milliseconds.
        match unsafe { wait(set, data.as_mut_ptr() as usize, milliseconds, 0, 0, 0) } {
            status::SUCCESS => return Some(data),
            TIMEOUT => {}
            failure => tracing::debug!("nvmlEventSetWait: {failure}"),
        }
        // A lost device ends every wait immediately.
        std::thread::sleep(limit.saturating_sub(begun.elapsed()));
        None
    }

    fn link_state(&self, handle: usize, link: u32) -> Result<u32, u32> {
        link_state(self.library, handle, link)
    }

    fn slowed_by(&self, handle: usize) -> Result<u64, u32> {
        slowed_by(self.library, handle)
    }

    fn recovery_action(&self, handle: usize) -> u32 {
        recovery_action(self.library, handle)
    }
}

/// Converts an NVML event.
fn event(kind: u64, number: u64) -> Option<Event> {
    match kind {
        XID => Some(Event::Xid(number)),
        ECC | POISON => Some(Event::Ecc),
        // Like the Xid that the driver logs with it.
        RETIREMENT_FAILED => Some(Event::Xid(64)),
        UNAVAILABLE => Some(Event::Lost),
        _ => None,
    }
}

fn make_set(library: &Library) -> Option<usize> {
    let create = library.find(c"nvmlEventSetCreate")?;
    let mut set = 0usize;
    // SAFETY: a place for one pointer.
    let answer = unsafe { create(std::ptr::from_mut(&mut set) as usize, 0, 0, 0, 0, 0) };
    (answer == status::SUCCESS).then_some(set)
}

/// Registers a device for the events that it supports.
fn register(library: &Library, handle: usize, set: usize) {
    let wanted = ECC | XID | RETIREMENT_FAILED | POISON | UNAVAILABLE;
    let mut supported = 0u64;
    let known = library.find(c"nvmlDeviceGetSupportedEventTypes").is_some_and(|ask| {
        // SAFETY: a device's handle, and a place for one long.
        unsafe { ask(handle, std::ptr::from_mut(&mut supported) as usize, 0, 0, 0, 0) == status::SUCCESS }
    });
    let types = if known { wanted & supported } else { XID | ECC };
    let answer = library.find(c"nvmlDeviceRegisterEvents").map_or(status::FUNCTION_NOT_FOUND, |register| {
        // SAFETY: a device's handle, a mask and a set that is never freed.
        unsafe { register(handle, types as usize, set, 0, 0, 0) }
    });
    if answer != status::SUCCESS {
        tracing::warn!(
            "nvmlDeviceRegisterEvents: {answer}: a GPU's failure is noticed only by polling NVML every {} s",
            EVERY.as_secs()
        );
    }
}

/// The GPU of which a device is a part. `None`: it is a whole one.
fn gpu_of_part(library: &Library, handle: usize) -> Option<usize> {
    let ask = library.find(c"nvmlDeviceGetDeviceHandleFromMigDeviceHandle")?;
    let mut gpu = 0usize;
    // SAFETY: a device's handle, and a place for one pointer.
    let answer = unsafe { ask(handle, std::ptr::from_mut(&mut gpu) as usize, 0, 0, 0, 0) };
    (answer == status::SUCCESS).then_some(gpu)
}

/// The number of the GPU instance that a part of a GPU is.
fn instance_of(library: &Library, handle: usize) -> Option<u32> {
    let ask = library.find(c"nvmlDeviceGetGpuInstanceId")?;
    let mut instance = 0u32;
    // SAFETY: the handle of a part, and a place for one integer.
    let answer = unsafe { ask(handle, std::ptr::from_mut(&mut instance) as usize, 0, 0, 0, 0) };
    (answer == status::SUCCESS).then_some(instance)
}

fn link_state(library: &Library, handle: usize, link: u32) -> Result<u32, u32> {
    let ask = library.find(c"nvmlDeviceGetNvLinkState").ok_or(status::FUNCTION_NOT_FOUND)?;
    let mut active = 0u32;
    // SAFETY: a device's handle, a link's number, and a place for one integer.
    match unsafe { ask(handle, link as usize, std::ptr::from_mut(&mut active) as usize, 0, 0, 0) } {
        status::SUCCESS => Ok(active),
        failure => Err(failure),
    }
}

/// Newer libraries have another name for the function.
fn slowed_by(library: &Library, handle: usize) -> Result<u64, u32> {
    let ask = library
        .find(c"nvmlDeviceGetCurrentClocksEventReasons")
        .or_else(|| library.find(c"nvmlDeviceGetCurrentClocksThrottleReasons"))
        .ok_or(status::FUNCTION_NOT_FOUND)?;
    let mut reasons = 0u64;
    // SAFETY: a device's handle, and a place for one long.
    match unsafe { ask(handle, std::ptr::from_mut(&mut reasons) as usize, 0, 0, 0, 0) } {
        status::SUCCESS => Ok(reasons),
        failure => Err(failure),
    }
}

fn recovery_action(library: &Library, handle: usize) -> u32 {
    let Some(ask) = library.find(c"nvmlDeviceGetFieldValues") else { return 0 };
    // nvmlFieldValue_t: field and scope, two times, the value's type and the status, the value.
    let mut field = [u64::from(RECOVERY_ACTION), 0, 0, 0, 0];
    const { assert!(size_of::<[u64; 5]>() == FIELD_SIZE) };
    // SAFETY: a device's handle, and one field with its count.
    let answer = unsafe { ask(handle, 1, field.as_mut_ptr() as usize, 0, 0, 0) };
    let [_, _, _, outcome, value] = field;
    if answer == status::SUCCESS && outcome >> 32 == 0 { value as u32 } else { 0 }
}

/// What slows a device down, unless the driver no longer reaches it. A GPU that was reset has another handle.
fn reach(nvml: &impl Nvml, device: &mut Watched) -> Option<Result<u64, u32>> {
    let gpu = device.gpu.as_mut()?;
    let lost = Err(status::GPU_IS_LOST);
    let slowed = nvml.slowed_by(gpu.handle);
    if slowed != lost {
        return Some(slowed);
    }
    if let Some(found) = nvml.find(device.number) {
        *gpu = found;
    }
    Some(nvml.slowed_by(gpu.handle)).filter(|slowed| *slowed != lost)
}

/// Polls a device for changes.
fn look(nvml: &impl Nvml, device: &mut Watched) -> Vec<(u32, Event)> {
    if device.lost || device.gpu.is_none() {
        return Vec::new();
    }
    let mut events = Vec::new();
    let Some(slowed) = reach(nvml, device) else {
        device.lost = true;
        return vec![(device.number, Event::Lost)];
    };
    let too_hot = slowed.is_ok_and(|reasons| reasons & TOO_HOT != 0);
    match &mut device.hot {
        None if too_hot => {
            device.hot = Some(0);
            events.push(Event::Hot);
        }
        Some(rounds) => {
            *rounds = if too_hot { 0 } else { *rounds + 1 };
            if *rounds == COOL_AFTER {
                device.hot = None;
                events.push(Event::Cool);
            }
        }
        None => {}
    }
    if let Some(Gpu { handle, .. }) = device.gpu {
        let gone = device.links.extract_if(.., |link| nvml.link_state(handle, *link) == Ok(0));
        events.extend(gone.map(Event::NvLink));
        let action = nvml.recovery_action(handle);
        if std::mem::replace(&mut device.recovery, action) != action {
            events.push(Event::Recovery(action));
        }
    }
    events.into_iter().map(|event| (device.number, event)).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// NVML for devices whose handles are their numbers, or the thousands in them for parts of a GPU.
    struct Fake {
        begun: Instant,
        /// How long it has waited.
        waited: Cell<Duration>,
        found: RefCell<BTreeSet<u32>>,
        /// GPUs that say so themselves.
        lost: RefCell<BTreeSet<usize>>,
        hot: RefCell<BTreeSet<usize>>,
        registered: RefCell<Vec<usize>>,
        /// An event, and how often there is one.
        event: Cell<Option<([u64; 4], Duration)>>,
        asked: RefCell<BTreeMap<usize, u32>>,
    }

    impl Fake {
        fn new(found: &[u32]) -> Fake {
            Fake {
                begun: Instant::now(),
                waited: Cell::default(),
                found: RefCell::new(found.iter().copied().collect()),
                lost: RefCell::default(),
                hot: RefCell::default(),
                registered: RefCell::default(),
                event: Cell::default(),
                asked: RefCell::default(),
            }
        }
    }

    impl Nvml for &Fake {
        fn now(&self) -> Instant {
            self.begun + self.waited.get()
        }

        fn find(&self, number: u32) -> Option<Gpu> {
            let (gpu, part) = (number / 1000, number % 1000);
            let (handle, instance) = if gpu > 0 { (gpu, Some(part)) } else { (number, None) };
            let handle = handle as usize;
            let found = || Gpu { handle, uuid: self.uuid(handle), instance };
            self.found.borrow().contains(&number).then(found)
        }

        fn uuid(&self, handle: usize) -> Option<Vec<u8>> {
            Some(handle.to_string().into_bytes())
        }

        fn register(&self, handle: usize) {
            self.registered.borrow_mut().push(handle);
        }

        fn wait(&self, limit: Duration) -> Option<[u64; 4]> {
            let event = self.event.get().filter(|(_, every)| *every < limit);
            self.waited.set(self.waited.get() + event.map_or(limit, |(_, every)| every));
            event.map(|(data, _)| data)
        }

        fn link_state(&self, _: usize, _: u32) -> Result<u32, u32> {
            Err(status::NOT_SUPPORTED)
        }

        fn slowed_by(&self, handle: usize) -> Result<u64, u32> {
            *self.asked.borrow_mut().entry(handle).or_default() += 1;
            match self.lost.borrow().contains(&handle) {
                true => Err(status::GPU_IS_LOST),
                false => Ok(if self.hot.borrow().contains(&handle) { TOO_HOT } else { 0 }),
            }
        }

        fn recovery_action(&self, _: usize) -> u32 {
            0
        }
    }

    fn xid(gpu: u64, number: u64, instance: u32) -> [u64; 4] {
        [gpu, XID, number, u64::from(instance)]
    }

    #[test]
    fn events_are_read_by_their_type() {
        assert_eq!(event(XID, 79), Some(Event::Xid(79)));
        assert_eq!(event(ECC, 0), Some(Event::Ecc));
        assert_eq!(event(UNAVAILABLE, 0), Some(Event::Lost));
        assert_eq!(event(0x1, 0), None, "errors that were corrected");
    }

    #[test]
    fn one_lost_gpu_is_not_taken_for_the_loss_of_those_that_nvml_no_longer_finds() {
        let fake = Fake::new(&[0, 1, 2]);
        let mut watching = Watching::new(&fake, &[0, 1, 2]).unwrap();
        assert_eq!(watching.next(), []);
        fake.found.borrow_mut().clear();
        assert_eq!(watching.next(), []);
        fake.lost.borrow_mut().insert(1);
        assert_eq!(watching.next(), [(1, Event::Lost)]);
        assert_eq!(watching.next(), [], "once");
        fake.hot.borrow_mut().insert(2);
        assert_eq!(watching.next(), [(2, Event::Hot)], "the others are still watched");
    }

    #[test]
    fn polls_do_not_wait_for_events_to_end() {
        let fake = Fake::new(&[0, 1]);
        let mut watching = Watching::new(&fake, &[0, 1]).unwrap();
        fake.event.set(Some((xid(0, 31, WHOLE), Duration::from_secs(3))));
        fake.hot.borrow_mut().insert(1);
        let mut happened = Vec::new();
        while fake.waited.get() < 6 * EVERY {
            happened.extend(watching.next());
        }
        assert!(
            happened.contains(&(1, Event::Hot)) && happened.contains(&(0, Event::Xid(31))),
            "{happened:?}"
        );
        assert_eq!(fake.asked.borrow()[&1], 6);
    }

    #[test]
    fn a_device_that_nvml_does_not_find_leaves_the_others_watched() {
        let fake = Fake::new(&[]);
        assert!(Watching::new(&fake, &[0, 1]).is_err_and(|failure| failure == status::NOT_FOUND));
        fake.found.borrow_mut().insert(1);
        let mut watching = Watching::new(&fake, &[0, 1]).unwrap();
        fake.event.set(Some((xid(1, 48, WHOLE), Duration::from_secs(1))));
        assert_eq!(watching.next(), [(1, Event::Xid(48))]);
        fake.event.set(None);
        fake.found.borrow_mut().insert(0);
        assert_eq!((watching.next(), &*fake.registered.borrow()), (Vec::new(), &vec![1, 0]));
    }

    #[test]
    fn events_of_a_gpu_reach_its_parts() {
        let fake = Fake::new(&[3, 4001, 4002, 5001]);
        let watching = Watching::new(&fake, &[3, 4001, 4002, 5001]).unwrap();
        assert_eq!(*fake.registered.borrow(), [3, 4, 5], "each once");
        assert_eq!(watching.concerned(xid(4, 79, WHOLE)), [(4001, Event::Xid(79)), (4002, Event::Xid(79))]);
        assert_eq!(watching.concerned(xid(4, 94, 2)), [(4002, Event::Xid(94))]);
        // A whole GPU, whatever it says of instances, and one that is not watched.
        assert_eq!(watching.concerned(xid(3, 48, 0)), [(3, Event::Xid(48))]);
        assert_eq!(watching.concerned(xid(9, 48, WHOLE)), []);
    }
}
