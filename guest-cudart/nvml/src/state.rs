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
use client::{container, lock, log};

use crate::error::{Result, of_session};

/// Size of the channel's arena in bytes. NVML does not use it.
const ARENA: usize = 4 << 20;

/// The servers with open sessions, and their devices.
pub(crate) struct Connected {
    /// In their order. There is at least one.
    servers: Vec<&'static Server>,
    /// The devices that NVML shows: each one's server, as an index, and its number there.
    devices: Vec<(usize, u32)>,
}

/// A server and its devices.
pub(crate) struct Server {
    pub session: &'static Session,
    pub system: NvmlSystemReply,
}

impl Connected {
    /// The first server, whose driver's versions stand for all.
    pub fn first(&self) -> &Server {
        self.servers[0]
    }

    /// Whether the program uses more than one server.
    pub fn has_several_servers(&self) -> bool {
        self.servers.len() > 1
    }

    /// The number of devices.
    pub fn device_count(&self) -> u32 {
        self.devices.len() as u32
    }

    /// The server of a device, and the device's number there.
    pub fn place(&self, ordinal: u32) -> Result<(&Server, u32)> {
        let (server, number) = *self.devices.get(ordinal as usize).ok_or(status::INVALID_ARGUMENT)?;
        Ok((self.servers[server], number))
    }
}

/// The devices that NVML shows, of servers with these numbers of devices: those that `chosen` selects among
/// so many, or all.
fn shown(
    counts: impl Iterator<Item = u32>,
    chosen: impl FnOnce(usize) -> Option<Vec<u32>>,
) -> Vec<(usize, u32)> {
    let all = counts.enumerate().flat_map(|(server, count)| (0..count).map(move |number| (server, number)));
    let all: Vec<_> = all.take(MAX_DEVICES as usize).collect();
    match chosen(all.len()) {
        None => all,
        Some(chosen) => chosen.iter().filter_map(|ordinal| all.get(*ordinal as usize).copied()).collect(),
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
    let all = current.iter().flat_map(|connected| connected.servers.iter().copied());
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
    let devices = shown(servers.iter().map(|server| server.system.device_count), container::devices);
    let connected = Box::leak(Box::new(Connected { servers, devices }));
    CURRENT.store(connected, Ordering::Release);
    Ok(connected)
}

extern "C" fn in_child() {
    CURRENT.store(ptr::null_mut(), Ordering::Release);
    DESCRIPTORS.close();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_all_servers_are_shown_or_those_of_the_container() {
        let shown = |counts: &[u32], chosen: Option<&[u32]>| {
            shown(counts.iter().copied(), |_| chosen.map(<[u32]>::to_vec))
        };
        assert_eq!(shown(&[2, 1], None), [(0, 0), (0, 1), (1, 0)]);
        assert_eq!(shown(&[2, 1], Some(&[1, 2])), [(0, 1), (1, 0)]);
        assert_eq!(shown(&[2], Some(&[])), []);
        assert_eq!(shown(&[u32::MAX, 1], None).len(), MAX_DEVICES as usize);
    }
}
