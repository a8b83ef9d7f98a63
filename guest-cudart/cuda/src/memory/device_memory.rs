//! Device memory: the devices' windows of addresses, and where an allocation is placed in one.

use std::sync::Mutex;

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::driver::{Device, Driver, Tag};
use client::memory::{Backing, DeviceMemory};
use client::ops::memory::{WINDOW_SIZE, window};
use client::{Status, lock};

/// An allocation, or a variable of a module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub base: u64,
    pub size: u64,
    pub context: &'static Context,
    pub buffer: u64,
    pub pool: usize,
    pub sync_memops: bool,
    /// Whether it is managed memory, or used like it.
    pub managed: bool,
}

impl Found {
    /// Whether `cuIpcGetMemHandle` can share it with other processes. Memory of a pool or a module cannot be
    /// shared, nor memory that is only mapped at its address.
    pub fn is_exportable(&self, driver: &Driver) -> bool {
        self.pool == 0 && !self.managed && device_of(driver, self.base).is_some()
    }
}

/// The device whose window an address lies in.
pub(crate) fn device_of(driver: &Driver, address: u64) -> Option<&Device> {
    let ordinal = address.checked_sub(window(0))? / WINDOW_SIZE;
    driver.devices.get(usize::try_from(ordinal).ok()?)
}

/// Places an allocation in one part of a device's memory. Does not wait for frees that are pending on
/// streams: see `stream_ordered::with_room`.
pub(crate) fn place(
    device: &Device,
    part: &Mutex<DeviceMemory<Tag>>,
    size: u64,
    tag: Tag,
    backing: &dyn Backing,
) -> Result<u64> {
    if size > device.info.total_memory {
        return Err(Status::OUT_OF_MEMORY);
    }
    lock(part).alloc(size, tag, backing)
}
