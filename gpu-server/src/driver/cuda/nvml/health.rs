//! The health of NVIDIA's devices according to NVML: from events, and by polling every [`EVERY`] what has
//! none (links, temperature, the driver's advice).

use protocol::ops::nvml::{self, FIELD_SIZE, status};

use super::library::{Library, library};
use super::order::{self, Listed};
use crate::driver::health::Event;

/// Milliseconds between two polls. A wait for an event takes as long.
const EVERY: u32 = 10_000;
/// `nvmlEventTypeDoubleBitEccError`, `…XidCriticalError`, `…DramRetirementFailure`, `…FatalPoisonError`,
/// `…GpuUnavailableError`.
const ECC: u64 = 0x2;
const XID: u64 = 0x8;
const RETIREMENT_FAILED: u64 = 0x800;
const POISON: u64 = 0x2000;
const UNAVAILABLE: u64 = 0x4000;
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

/// A watched device.
struct Watched {
    number: u32,
    listed: Listed,
    /// Identifies an event's device, because one device may have several handles.
    uuid: Option<Vec<u8>>,
    /// Links that have been active.
    links: Vec<u32>,
    lost: bool,
    /// If it was too hot: the number of polls since in which it was not.
    hot: Option<u32>,
    recovery: u32,
}

/// Watches devices.
pub struct Watch {
    library: &'static Library,
    /// `nvmlEventSet_t`; `None` if this driver has no events.
    set: Option<usize>,
    devices: Vec<Watched>,
}

impl Watch {
    /// Starts watching the devices with these numbers.
    ///
    /// # Errors
    /// NVML's status, if the library or a device doesn't exist.
    pub fn new(numbers: &[u32]) -> Result<Watch, u32> {
        let library = library()?;
        let all = order::devices(library)?;
        let set = make_set(library);
        let mut devices = Vec::new();
        for number in numbers {
            let listed = all.get(*number as usize).cloned().ok_or(status::NOT_FOUND)?;
            let handle = listed.handle(library).ok_or(status::NOT_FOUND)?;
            if let Some(set) = set {
                register(library, handle, set);
            }
            devices.push(Watched {
                number: *number,
                uuid: library.ask(handle, nvml::UUID).ok(),
                links: (0..LINKS).filter(|link| link_state(library, handle, *link) == Ok(1)).collect(),
                listed,
                lost: false,
                hot: None,
                recovery: 0,
            });
        }
        Ok(Watch { library, set, devices })
    }

    /// Waits for events, at most for [`EVERY`]. What the driver already requested before is among the first.
    pub fn next(&mut self) -> Vec<(u32, Event)> {
        match self.wait() {
            Some(event) => event.into_iter().collect(),
            None => self.devices.iter_mut().flat_map(|device| look(self.library, device)).collect(),
        }
    }

    /// One event, or `Some(None)` if it is for a device that is not watched. `None`: no event arrived.
    fn wait(&self) -> Option<Option<(u32, Event)>> {
        let pause = || std::thread::sleep(std::time::Duration::from_millis(EVERY.into()));
        let (Some(set), Some(wait)) = (self.set, self.library.find(c"nvmlEventSetWait_v2")) else {
            pause();
            return None;
        };
        // nvmlEventData_t: the device, the type, a number, and two about MIG.
        let mut data = [0u64; 4];
        // SAFETY: a set that is never freed, a place for the event, and milliseconds.
        match unsafe { wait(set, data.as_mut_ptr() as usize, EVERY as usize, 0, 0, 0) } {
            status::SUCCESS => {}
            TIMEOUT => return None,
            failure => {
                tracing::debug!("nvmlEventSetWait: {failure}");
                // A lost device ends every wait immediately.
                pause();
                return None;
            }
        }
        let [handle, kind, number, _] = data;
        let uuid = self.library.ask(handle as usize, nvml::UUID).ok();
        let device = self
            .devices
            .iter()
            .find(|device| match &uuid {
                Some(uuid) => device.uuid.as_ref() == Some(uuid),
                None => device.listed.handle(self.library) == Some(handle as usize),
            })
            .map(|device| device.number);
        Some(device.zip(event(kind, number)))
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
            EVERY / 1000
        );
    }
}

/// Whether a link is active (1) or not (0).
fn link_state(library: &Library, handle: usize, link: u32) -> Result<u32, u32> {
    let ask = library.find(c"nvmlDeviceGetNvLinkState").ok_or(status::FUNCTION_NOT_FOUND)?;
    let mut active = 0u32;
    // SAFETY: a device's handle, a link's number, and a place for one integer.
    match unsafe { ask(handle, link as usize, std::ptr::from_mut(&mut active) as usize, 0, 0, 0) } {
        status::SUCCESS => Ok(active),
        failure => Err(failure),
    }
}

/// Why the clocks are low, as bits. Newer libraries have another name for the function.
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

/// The recovery action that the driver requests. 0: none, or unsupported by this driver.
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

/// Polls a device for changes.
fn look(library: &Library, device: &mut Watched) -> Vec<(u32, Event)> {
    if device.lost {
        return Vec::new();
    }
    let mut events = Vec::new();
    let handle = device.listed.handle(library).ok_or(status::GPU_IS_LOST);
    let slowed = handle.and_then(|handle| slowed_by(library, handle));
    if slowed == Err(status::GPU_IS_LOST) {
        device.lost = true;
        return vec![(device.number, Event::Lost)];
    }
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
    if let Ok(handle) = handle {
        let gone = device.links.extract_if(.., |link| link_state(library, handle, *link) == Ok(0));
        events.extend(gone.map(Event::NvLink));
        let action = recovery_action(library, handle);
        if std::mem::replace(&mut device.recovery, action) != action {
            events.push(Event::Recovery(action));
        }
    }
    events.into_iter().map(|event| (device.number, event)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_by_their_type() {
        assert_eq!(event(XID, 79), Some(Event::Xid(79)));
        assert_eq!(event(ECC, 0), Some(Event::Ecc));
        assert_eq!(event(UNAVAILABLE, 0), Some(Event::Lost));
        assert_eq!(event(0x1, 0), None, "errors that were corrected");
    }
}
