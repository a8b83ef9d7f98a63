//! Device memory: the devices' windows of addresses, and where an allocation is placed in one.

use std::sync::Mutex;

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::driver::{Device, Driver};
use client::channel::MAX_DEVICES;
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
    let number = address.checked_sub(window(0))? / WINDOW_SIZE;
    let ordinal = number.checked_sub(u64::from(driver.first_window))?;
    driver.devices.get(usize::try_from(ordinal).ok()?)
}

/// Asks for memory of a device. If there is none, gives back what is kept without allocations, and asks
/// again. The caller holds no lock that a thread may need before it lets a stream go on.
pub(crate) fn or_returned<T>(device: &Device, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    match ask() {
        Err(Status::OUT_OF_MEMORY) if give_back(device) => ask(),
        asked => asked,
    }
}

/// Gives back all memory of a device that is kept without allocations, and waits until the server has taken
/// it. Returns false if there is none.
pub(crate) fn give_back(device: &Device) -> bool {
    let any = lock(&device.memory).trim(0, device);
    wait_for_returned(device) || any
}

/// Waits until the server has taken the chunks that a device gives back. It takes them when the device's
/// streams have reached what was before. Such a stream may wait for a copy between servers, and the copy for
/// the lock on the device's memory, so this waits without it. Returns false if there were none.
pub(crate) fn wait_for_returned(device: &Device) -> bool {
    /// By device. Whoever finds nothing to wait for has waited for those who wait for it.
    static WAITING: [Mutex<()>; MAX_DEVICES as usize] = [const { Mutex::new(()) }; MAX_DEVICES as usize];
    let Some(waiting) = WAITING.get(device.ordinal as usize) else { return false };
    let (alone, others) = match waiting.try_lock() {
        Ok(alone) => (alone, false),
        Err(_) => (lock(waiting), true),
    };
    let leaving = lock(&device.memory).take_leaving();
    let any = others || !leaving.is_empty();
    for chunk in leaving {
        let returned = chunk.wait();
        lock(&device.memory).returned(returned);
    }
    drop(alone);
    any
}
