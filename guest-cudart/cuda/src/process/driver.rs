//! The process's session and its devices, which `cuInit` makes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, RwLock};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::device_attributes::attr;
use crate::process::visible_devices;
use client::handle::ContextId;
use client::memory::{Backing, DeviceMemory};
use client::ops::device::{DeviceInfo, DeviceInfoReply, SelectDevices, SessionInfo};
use client::ops::memory::{MemGrow, MemShrink, is_managed};
use client::session::{self, Session};
use client::{Status, lock, log};

/// Everything that exists once in a process.
pub(crate) struct Driver {
    pub session: &'static Session,
    pub version: i32,
    /// Whether the server reads data when a stream has come to it, where it is told to.
    pub reads_late: bool,
    pub devices: Vec<Device>,
    /// Variables of loaded modules: address → size and context. They lie outside every window.
    pub globals: RwLock<BTreeMap<u64, (u64, &'static Context)>>,
}

/// One device.
pub(crate) struct Device {
    pub ordinal: u32,
    pub info: DeviceInfoReply,
    /// By number in `CUdevice_attribute`; `None`: the server's driver does not know it.
    pub attributes: Vec<Option<i32>>,
    pub memory: Mutex<DeviceMemory<Tag>>,
    /// The same for what the host has at the same addresses: see [`crate::memory::managed`].
    pub managed: Mutex<DeviceMemory<Tag>>,
    pub primary: &'static Context,
    /// Kernels reach pinned memory in place: the server shares it.
    pub shares_host_memory: bool,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// The driver, initialized.
///
/// # Errors
/// `NOT_INITIALIZED` before `cuInit`, and in a process forked from one that had called it; `DEINITIALIZED` when the process is ending.
#[inline]
pub(crate) fn driver() -> Result<&'static Driver> {
    if session::forked() {
        return Err(Status::NOT_INITIALIZED);
    }
    if ENDING.load(Ordering::Relaxed) {
        return Err(Status::DEINITIALIZED);
    }
    DRIVER.get().ok_or(Status::NOT_INITIALIZED)
}

/// The device of an ordinal.
#[inline]
pub(crate) fn device(ordinal: i32) -> Result<&'static Device> {
    let devices = &driver()?.devices;
    usize::try_from(ordinal).ok().and_then(|n| devices.get(n)).ok_or(Status::INVALID_DEVICE)
}

/// The process is ending: functions that it had registered with `atexit` before `cuInit` are being called. What it had goes with its session; a stream that is held, or
/// a kernel without an end, is not to be waited for then.
static ENDING: AtomicBool = AtomicBool::new(false);

extern "C" fn end() {
    ENDING.store(true, Ordering::Relaxed);
}

/// `cuInit`.
pub(crate) fn init() -> Result<&'static Driver> {
    if session::forked() {
        return Err(Status::NOT_INITIALIZED);
    }
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    static OPENING: Mutex<()> = Mutex::new(());
    let _opening = lock(&OPENING);
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let session = session::open()?;
    // Called before what was registered earlier: a runtime's functions, which unload modules. Destructors of objects made later come first, and find everything as it was.
    // SAFETY: a plain C function that lives as long as this library.
    unsafe { libc::atexit(end) };
    // Asked for together, and answered in one exchange: nearly every server has a first device.
    let asked = session.submit(&SessionInfo {})?;
    let first = session.submit(&DeviceInfo { device: 0 })?;
    let info = asked.wait()?;
    session.set_server(&info.server);
    log::info(format_args!(
        "{} device(s) of {} ({}), CUDA {}.{}",
        info.device_count,
        info.server,
        info.backend,
        info.driver_version / 1000,
        info.driver_version % 1000 / 10
    ));
    if info.device_count == 0 {
        return Err(Status::NO_DEVICE);
    }
    let count = info.device_count.min(client::channel::MAX_DEVICES);
    let others: Vec<_> =
        (1..count).map(|device| session.submit(&DeviceInfo { device })).collect::<Result<_>>()?;
    let asked = std::iter::once(first).chain(others);
    let mut infos = asked.map(|asked| asked.wait()).collect::<Result<Vec<_>>>()?;
    if let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") {
        let uuids: Vec<[u8; 16]> = infos.iter().map(|info| info.uuid).collect();
        let devices = visible_devices::select(&list, &uuids)?;
        if !devices.iter().copied().eq(0..count) {
            session.call(&SelectDevices { devices: devices.clone() })?;
            let mut all: Vec<_> = infos.into_iter().map(Some).collect();
            infos = devices.iter().filter_map(|number| all[*number as usize].take()).collect();
        }
    }
    let devices = (0..).zip(infos).map(|(ordinal, info)| Device::new(ordinal, info)).collect();
    // What is implemented here is the API of this version; a newer server does not make it more.
    let version = (info.driver_version as i32).min(API_VERSION);
    Ok(DRIVER.get_or_init(|| Driver {
        session,
        version,
        reads_late: info.reads_late,
        devices,
        globals: RwLock::default(),
    }))
}

impl Device {
    fn new(ordinal: u32, info: DeviceInfoReply) -> Device {
        let most = info
            .attributes
            .iter()
            .map(|a| a.attribute as usize)
            .filter(|n| *n < 4096)
            .max()
            .map_or(0, |n| n + 1);
        let mut attributes = vec![None; most];
        for attribute in &info.attributes {
            if let Some(place) = attributes.get_mut(attribute.attribute as usize) {
                *place = Some(attribute.value);
            }
        }
        let shares_host_memory = attributes.get(attr::CAN_MAP_HOST_MEMORY) == Some(&Some(1));
        crate::process::device_attributes::complete_attributes(&mut attributes);
        let memory = Mutex::new(DeviceMemory::new(ordinal, info.granule));
        let managed = Mutex::new(DeviceMemory::both(ordinal, info.granule, client::pages::PAGE as u64));
        let primary = Context::new(ContextId(ordinal), ordinal, 0, true);
        Device { ordinal, info, attributes, memory, managed, primary, shares_host_memory }
    }

    /// Whose of the device's addresses one is.
    pub fn memory_of(&self, address: u64) -> &Mutex<DeviceMemory<Tag>> {
        if is_managed(address) { &self.managed } else { &self.memory }
    }

    /// An attribute's value; 0 if the device does not know it.
    pub fn attribute(&self, number: usize) -> i32 {
        self.attributes.get(number).copied().flatten().unwrap_or(0)
    }
}

impl Backing for Driver {
    fn grow(&self, device: u32, address: u64, size: u64) -> Result {
        self.session.call(&MemGrow { device, address, size }).map(|_| ())
    }

    fn shrink(&self, device: u32, address: u64, size: u64) -> Result {
        self.session.call(&MemShrink { device, address, size }).map(|_| ())
    }
}

/// The version of the API that this library has.
pub(crate) const API_VERSION: i32 = 13000;

/// What is known of an allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag {
    pub context: &'static Context,
    pub buffer: u64,
    /// Handle of the pool that it came from; 0 for `cuMemAlloc`'s.
    pub pool: usize,
    pub sync_memops: bool,
    /// Freed in stream order: no longer the program's.
    pub freed: bool,
}
