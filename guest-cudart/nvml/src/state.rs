//! The process's NVML state: how often it was initialized, and its session.
//!
//! The first `nvmlInit`, or the first call in a forked child, opens the session. It stays open as long as the
//! process, or until it is lost; the next `nvmlInit` then opens another.

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering};

use client::channel::{Geometry, MAX_DEVICES};
use client::ops::nvml::{NvmlSystem, NvmlSystemReply, status};
use client::port;
use client::session::{Purpose, Session};
use client::{lock, log};

use crate::error::{Result, of_session};

/// Size of the channel's arena in bytes. NVML does not use it.
const ARENA: usize = 4 << 20;

/// The open session and its devices.
pub(crate) struct Connected {
    pub session: &'static Session,
    pub system: NvmlSystemReply,
}

/// What an `nvmlDevice_t` points to.
pub(crate) struct Device {
    pub ordinal: u32,
}

/// An `nvmlDevice_t` as a program passes it, which may be invalid.
pub(crate) type Handle = *const Device;

static DEVICES: [Device; MAX_DEVICES as usize] = {
    let mut devices = [const { Device { ordinal: 0 } }; MAX_DEVICES as usize];
    let mut ordinal = 0;
    while ordinal < devices.len() {
        devices[ordinal].ordinal = ordinal as u32;
        ordinal += 1;
    }
    devices
};

/// The number of `nvmlInit` calls without a matching `nvmlShutdown`.
static USERS: AtomicUsize = AtomicUsize::new(0);
static CURRENT: AtomicPtr<Connected> = AtomicPtr::new(ptr::null_mut());
/// The session's descriptors, which a forked child closes.
static DESCRIPTORS: [AtomicI32; 4] = [const { AtomicI32::new(-1) }; 4];

/// `nvmlInit`.
pub(crate) fn init() -> Result {
    connect()?;
    USERS.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

/// `nvmlShutdown`.
pub(crate) fn shutdown() -> Result {
    let fewer = USERS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |users| users.checked_sub(1));
    fewer.map(|_| ()).map_err(|_| status::UNINITIALIZED)
}

/// The session, if NVML is initialized.
pub(crate) fn connected() -> Result<&'static Connected> {
    if USERS.load(Ordering::Acquire) == 0 {
        return Err(status::UNINITIALIZED);
    }
    // SAFETY: `connect` publishes a complete value, which is never freed.
    match unsafe { CURRENT.load(Ordering::Acquire).as_ref() } {
        Some(connected) => Ok(connected),
        None => connect(),
    }
}

/// The handle of a device ordinal of the session.
pub(crate) fn handle(connected: &Connected, ordinal: u32) -> Result<Handle> {
    let device = DEVICES.get(ordinal as usize).filter(|_| ordinal < connected.system.device_count);
    device.map(ptr::from_ref).ok_or(status::INVALID_ARGUMENT)
}

/// The ordinal of a handle.
pub(crate) fn ordinal(connected: &Connected, handle: Handle) -> Result<u32> {
    let device = DEVICES.iter().find(|device| ptr::eq(*device, handle)).ok_or(status::INVALID_ARGUMENT)?;
    if device.ordinal < connected.system.device_count {
        Ok(device.ordinal)
    } else {
        Err(status::INVALID_ARGUMENT)
    }
}

/// The current session, or a new one. Each distinct error is reported on stderr once.
#[cold]
fn connect() -> Result<&'static Connected> {
    static OPENING: Mutex<String> = Mutex::new(String::new());
    let mut said = lock(&OPENING);
    // SAFETY: `connect` publishes a complete value, which is never freed.
    if let Some(connected) = unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
        && connected.session.check().is_ok()
    {
        return Ok(connected);
    }
    let geometry = Geometry::with_arena(ARENA);
    let opened = port::open(geometry.size).and_then(|port| Session::over(port, geometry, Purpose::Nvml));
    let session = opened.map_err(|error| {
        let line = error.line();
        if *said != line {
            log::error(format_args!("{line}"));
            *said = line;
        }
        status::DRIVER_NOT_LOADED
    })?;
    let mut descriptors = session.port().descriptors().into_iter();
    for slot in &DESCRIPTORS {
        slot.store(descriptors.next().unwrap_or(-1), Ordering::Relaxed);
    }
    static AT_FORK: std::sync::Once = std::sync::Once::new();
    // SAFETY: `in_child` only does what is allowed between fork and exec: it stores to atomics and closes
    // descriptors.
    AT_FORK.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
    client::counters::print_at_exit("nvml-pid");
    let system = session.call(&NvmlSystem {}).map_err(of_session)?;
    if system.status != status::SUCCESS {
        return Err(system.status);
    }
    let connected = Box::leak(Box::new(Connected { session, system }));
    CURRENT.store(connected, Ordering::Release);
    Ok(connected)
}

extern "C" fn in_child() {
    CURRENT.store(ptr::null_mut(), Ordering::Release);
    for slot in &DESCRIPTORS {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: the child's copy of a descriptor of the session, which the child never uses.
            unsafe { libc::close(fd) };
        }
    }
}
