//! Finds in NVML the devices that CUDA has listed.
//!
//! NVML numbers devices by PCI address and ignores CUDA's environment, so a device is found by its UUID.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::library::Library;
use crate::driver::listed::Listed;

/// A server's devices, by number.
#[derive(Debug, Default)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// The devices of this list. A device's number is its place.
    pub fn new(listed: Vec<Listed>) -> Devices {
        Devices(listed.into_iter().map(Device::new).collect())
    }

    /// The list.
    pub fn listed(&self) -> Vec<Listed> {
        self.0.iter().map(|device| device.listed.clone()).collect()
    }

    /// The device with a number.
    pub(super) fn get(&self, number: u32) -> Option<&Device> {
        self.0.get(number as usize)
    }
}

#[derive(Debug)]
pub(super) struct Device {
    pub listed: Listed,
    /// NVML's last handle; 0 if there has been none.
    last: AtomicUsize,
}

impl Device {
    pub fn new(listed: Listed) -> Device {
        Device { listed, last: AtomicUsize::default() }
    }

    /// NVML's handle. It is looked up each time, because a GPU gets a new one when it is reset. If NVML does
    /// not find it, as may be while any other GPU is lost, its last one still answers for it. If there has
    /// been none, its address finds it, or the GPU of which it is a part.
    pub fn handle(&self, library: &Library) -> Option<usize> {
        self.handle_by(|function, text| library.device(function, text))
    }

    fn handle_by(&self, look_up: impl Fn(&CStr, &str) -> Option<usize>) -> Option<usize> {
        let by_uuid = |kind| look_up(c"nvmlDeviceGetHandleByUUID", &format!("{kind}-{}", self.listed.uuid));
        let last = || Some(self.last.load(Ordering::Relaxed)).filter(|handle| *handle != 0);
        let by_address = || look_up(c"nvmlDeviceGetHandleByPciBusId_v2", &self.listed.pci);
        let found = ["GPU", "MIG"].into_iter().find_map(by_uuid).or_else(last).or_else(by_address)?;
        self.last.store(found, Ordering::Relaxed);
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_no_longer_found_has_its_last_handle() {
        let device = Device::new(Listed::test("a"));
        let found = |text: &str, handle| device.handle_by(|_, wanted| (wanted == text).then_some(handle));
        assert_eq!(found("another", 5), None);
        assert_eq!(found("1", 5), Some(5), "by its address");
        assert_eq!(found("another", 6), Some(5));
        assert_eq!(found("GPU-a", 6), Some(6));
        assert_eq!(found("1", 7), Some(6), "which may be the GPU's of which it is a part");
        assert_eq!(found("MIG-a", 8), Some(8));
    }
}
