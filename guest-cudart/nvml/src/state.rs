//! The process's NVML state: how often it was initialized, and its sessions, one for each of the process's
//! servers.
//!
//! The first `nvmlInit`, or the first call in a forked child, opens the sessions. They stay open as long as
//! the process, or until one is lost; the next `nvmlInit` then opens another in its place.

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use client::channel::{Geometry, MAX_DEVICES};
use client::ops::nvml::{NvmlSystem, NvmlSystemReply, status};
use client::port::descriptor::{ForChild, Uncancelled};
use client::session::{self, Pending, Purpose, Session};
use client::{lock, log};

use crate::error::{Result, of_session};

/// Size of the channel's arena in bytes. NVML does not use it.
const ARENA: usize = 4 << 20;

/// The servers with open sessions, in their order. There is at least one.
pub(crate) struct Connected(Vec<&'static Server>);

/// A server and its devices.
pub(crate) struct Server {
    pub session: &'static Session,
    pub system: NvmlSystemReply,
}

impl Connected {
    /// The first server, whose driver's versions stand for all.
    pub fn first(&self) -> &Server {
        self.0[0]
    }

    /// Whether the program uses more than one server.
    pub fn has_several_servers(&self) -> bool {
        self.0.len() > 1
    }

    /// The devices of all servers.
    pub fn device_count(&self) -> u32 {
        self.0
            .iter()
            .fold(0, |sum, server| (sum + server.system.device_count.min(MAX_DEVICES)).min(MAX_DEVICES))
    }

    /// The server of a device, and the device's number there.
    pub fn place(&self, ordinal: u32) -> Result<(&Server, u32)> {
        let mut number = ordinal;
        for server in self.0.iter().copied() {
            if number < server.system.device_count {
                return Ok((server, number));
            }
            number -= server.system.device_count;
        }
        Err(status::INVALID_ARGUMENT)
    }
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
/// The sessions' descriptors, which a forked child closes.
static DESCRIPTORS: ForChild = ForChild::none();

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

/// The sessions, if NVML is initialized.
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

/// The handle of a device ordinal.
pub(crate) fn handle(connected: &Connected, ordinal: u32) -> Result<Handle> {
    let device = DEVICES.get(ordinal as usize).filter(|_| ordinal < connected.device_count());
    device.map(ptr::from_ref).ok_or(status::INVALID_ARGUMENT)
}

/// The ordinal of a handle.
pub(crate) fn ordinal(connected: &Connected, handle: Handle) -> Result<u32> {
    let device = DEVICES.iter().find(|device| ptr::eq(*device, handle)).ok_or(status::INVALID_ARGUMENT)?;
    if device.ordinal < connected.device_count() { Ok(device.ordinal) } else { Err(status::INVALID_ARGUMENT) }
}

/// The current sessions, after replacing lost ones by new ones. Each distinct error is reported on stderr
/// once.
#[cold]
fn connect() -> Result<&'static Connected> {
    let _uncancelled = Uncancelled::begin();
    static OPENING: Mutex<String> = Mutex::new(String::new());
    let mut said = lock(&OPENING);
    // SAFETY: `connect` publishes a complete value, which is never freed.
    let current = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
    let is_usable = |server: &&'static Server| server.session.check().is_ok();
    let all = current.iter().flat_map(|connected| connected.0.iter().copied());
    let (mut servers, lost): (Vec<_>, Vec<_>) = all.partition(is_usable);
    if let Some(current) = current
        && lost.is_empty()
    {
        return Ok(current);
    }
    let opened = match current {
        None => session::open_all(Geometry::with_arena(ARENA), Purpose::Nvml),
        Some(_) => lost.iter().map(|server| session::open_again(server.session, Purpose::Nvml)).collect(),
    };
    let opened = opened.map_err(|error| {
        let line = error.line();
        if *said != line {
            log::error(format_args!("{line}"));
            *said = line;
        }
        status::DRIVER_NOT_LOADED
    })?;
    let asked: Vec<_> = opened.iter().map(|session| session.submit(&NvmlSystem {})).collect();
    let answered: Result<Vec<_>> =
        asked.into_iter().map(|asked| asked.and_then(Pending::wait).map_err(of_session)).collect();
    let systems = answered?;
    if let Some(failed) = systems.iter().find(|system| system.status != status::SUCCESS) {
        return Err(failed.status);
    }
    for (session, system) in opened.into_iter().zip(systems) {
        let session = Box::leak(session);
        servers.push(Box::leak(Box::new(Server { session, system })));
    }
    servers.sort_by_key(|server| server.session.index());
    DESCRIPTORS.remember(servers.iter().flat_map(|server| server.session.port().descriptors()));
    static AT_FORK: std::sync::Once = std::sync::Once::new();
    // SAFETY: `in_child` only does what is allowed between fork and exec: it uses atomics and closes
    // descriptors.
    AT_FORK.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
    client::counters::print_at_exit("nvml-pid");
    let connected = Box::leak(Box::new(Connected(servers)));
    CURRENT.store(connected, Ordering::Release);
    Ok(connected)
}

extern "C" fn in_child() {
    CURRENT.store(ptr::null_mut(), Ordering::Release);
    DESCRIPTORS.close();
}
