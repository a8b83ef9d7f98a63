//! The process's servers and their devices, set up by `cuInit`.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, RwLock};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::device_attributes::attr;
use crate::process::fences::Fences;
use crate::process::stream::Stream;
use crate::process::visible_devices;
use client::channel::MAX_DEVICES;
use client::container::pid_namespace;
use client::handle::ContextId;
use client::memory::{Answer, Backing, DeviceMemory};
use client::ops::device::{
    DeviceInfo, DeviceInfoReply, PeerInfo, PeerInfoReply, ProcessNamespace, SelectDevices, SessionInfo,
    SessionInfoReply,
};
use client::ops::memory::{MemGrow, MemGrowReply, MemShrink, MemShrinkReply, is_managed};
use client::servers::distinct_domain;
use client::session::{self, Ahead, Pending, Session};
use client::{Status, lock, log};

/// Everything that exists once in a process.
pub(crate) struct Driver {
    /// In the order in which the host or the user lists them.
    pub servers: Vec<&'static Server>,
    pub version: i32,
    /// The devices of all servers, by ordinal.
    pub devices: Vec<Device>,
    /// The number of the first device's window; the others follow.
    pub first_window: u32,
    /// The devices that `CUDA_VISIBLE_DEVICES` hides: UUIDs and servers. Other processes may have memory
    /// there.
    pub hidden: Vec<([u8; 16], &'static Server)>,
}

/// A server that the process has a session with. Each context names its server, and everything in a context
/// belongs to that server's session.
pub(crate) struct Server {
    pub session: &'static Session,
    /// Whether the process has others, too.
    pub several: bool,
    /// Whether the server can delay reading the source of a copy until the stream reaches the copy.
    pub reads_late: bool,
    /// The devices run an image's machine code instead of its PTX.
    pub runs_machine_code: bool,
    /// The number of devices that the session started with.
    device_count: u32,
    /// Variables of loaded modules: address → size and context. They are outside every window, and two
    /// servers may have variables at the same address.
    pub globals: RwLock<BTreeMap<u64, (u64, &'static Context)>>,
    /// The copies that work on streams not ordered behind theirs has to wait for.
    pub fences: Fences,
    /// Locked while the server is told which destroyed streams and textures are done. The ring may be full
    /// and block that for long, so calls that use only other servers must not take this lock.
    pub telling: Mutex<()>,
    /// The program's first use of it.
    pub used: Once,
}

/// One device.
pub(crate) struct Device {
    /// Its number among all devices of the process.
    pub ordinal: u32,
    /// Its number in its session.
    pub number: u32,
    pub server: &'static Server,
    pub info: DeviceInfoReply,
    /// By `CUdevice_attribute` number. `None`: unknown to the server's driver.
    pub attributes: Vec<Option<i32>>,
    pub memory: Mutex<Memory>,
    /// The host's counterpart at the same addresses: see [`crate::memory::managed`].
    pub managed: Mutex<Memory>,
    /// Whether each of these has memory that was freed in stream order. Changed while that one is locked.
    pub freed: [AtomicBool; 2],
    pub primary: &'static Context,
    /// Kernels access pinned memory in place, because the server shares it.
    pub shares_host_memory: bool,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// The driver, initialized.
///
/// # Errors
/// `NOT_INITIALIZED` before `cuInit`, and in a child forked after `cuInit`; `DEINITIALIZED` while the process
/// is exiting.
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

impl Driver {
    /// `Ok` while at least one server's session is usable.
    ///
    /// # Errors
    /// The first server's error, if none is usable.
    pub fn check(&self) -> Result {
        let usable = self.servers.iter().map(|server| server.session.check());
        usable.reduce(|first, other| first.or_else(|status| other.map_err(|_| status))).unwrap_or(Ok(()))
    }

    /// A driver with a device on each of these servers, for tests that need only this process.
    #[cfg(test)]
    pub fn for_tests(devices: &[&'static Server]) -> &'static Driver {
        let info = || DeviceInfoReply {
            name: String::new(),
            uuid: [0; 16],
            pci: [0; 3],
            total_memory: 1 << 40,
            granule: 2 << 20,
            stream_priorities: [0; 2],
            attributes: Vec::new(),
        };
        let mut servers: Vec<&'static Server> = Vec::new();
        for server in devices {
            if !servers.iter().any(|other| std::ptr::eq(*other, *server)) {
                servers.push(server);
            }
        }
        let found = devices.iter().map(|server| Found { server, number: 0, info: info() });
        let devices = (0..).zip(found).map(|(ordinal, found)| Device::new(ordinal, ordinal, found)).collect();
        Box::leak(Box::new(Driver { servers, version: 0, devices, first_window: 0, hidden: Vec::new() }))
    }

    /// The numbers of all devices' windows.
    pub fn windows(&self) -> std::ops::Range<u32> {
        self.first_window..self.first_window + self.devices.len() as u32
    }

    /// The device with this number in the session with a server, if the program sees it.
    pub fn device_on(&self, server: &Server, number: u32) -> Option<&Device> {
        let is_it = |device: &&Device| std::ptr::eq(device.server, server) && device.number == number;
        self.devices.iter().find(is_it)
    }
}

/// The device with this ordinal.
#[inline]
pub(crate) fn device(ordinal: i32) -> Result<&'static Device> {
    let devices = &driver()?.devices;
    usize::try_from(ordinal).ok().and_then(|n| devices.get(n)).ok_or(Status::INVALID_DEVICE)
}

/// Set when the process exits, once the functions that it registered with `atexit` before `cuInit` are being
/// called. Its objects end with the session. Later calls fail, so that an exiting process never waits for a
/// held stream or an endless kernel.
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
    let sessions = session::open()?;
    // Runs before functions that were registered earlier, such as a runtime's that unload modules.
    // Destructors of objects created later run first and can still use CUDA.
    // SAFETY: a plain C function that lives as long as this library.
    unsafe { libc::atexit(end) };
    // Sent together and answered in one exchange per server: nearly every server has at least one device.
    let asked: Vec<Asked> = sessions.iter().map(|session| Asked::begin(session)).collect::<Result<_>>()?;
    let several = asked.len() > 1;
    let mut version = i32::MAX;
    let mut servers: Vec<&'static Server> = Vec::new();
    let mut found: Vec<Found> = Vec::new();
    for asked in asked {
        let (server, its_version, infos) = asked.end(several)?;
        version = version.min(its_version);
        found.extend((0..).zip(infos).map(|(number, info)| Found { server, number, info }));
        servers.push(server);
    }
    if found.is_empty() {
        return Err(Status::NO_DEVICE);
    }
    if found.len() > MAX_DEVICES as usize {
        log::warn(format_args!(
            "the servers have {} devices; this program uses the first {MAX_DEVICES}",
            found.len()
        ));
        found.truncate(MAX_DEVICES as usize);
    }
    let uuids: Vec<[u8; 16]> = found.iter().map(|found| found.info.uuid).collect();
    let mut hidden = Vec::new();
    let mut first_window = 0;
    if let Some(chosen) = visible_devices::of_process(&uuids)? {
        first_window = first_window_of(servers.len(), &chosen);
        let mut all: Vec<_> = found.into_iter().map(Some).collect();
        found = chosen.iter().filter_map(|ordinal| all[*ordinal as usize].take()).collect();
        hidden = all.into_iter().flatten().map(|found| (found.info.uuid, found.server)).collect();
    }
    for (index, server) in servers.iter().enumerate() {
        place(index, server, &mut found, first_window)?;
    }
    let numbered = (0..).zip(found);
    let devices =
        numbered.map(|(ordinal, found)| Device::new(ordinal, first_window + ordinal, found)).collect();
    // This library implements this version of the API, even if a server's driver is newer.
    let version = version.min(API_VERSION);
    Ok(DRIVER.get_or_init(|| Driver { servers, version, devices, first_window, hidden }))
}

/// The number of the first device's window for a program that sees only these devices, by their numbers.
///
/// The windows of devices before the first that it sees stay free for its own reservations. A worker has
/// reserved the windows of all its server's devices beforehand, but not those of other servers' devices. With
/// several servers, higher windows than necessary would have to be reserved now, which may fail.
fn first_window_of(servers: usize, chosen: &[u32]) -> u32 {
    if servers == 1 { chosen.iter().copied().min().unwrap_or(0) } else { 0 }
}

/// A device found in a session.
struct Found {
    server: &'static Server,
    /// Its number in the session.
    number: u32,
    info: DeviceInfoReply,
}

/// The questions that a server is asked first, not yet answered.
struct Asked {
    session: &'static Session,
    about: Pending<'static, SessionInfoReply>,
    first: Pending<'static, DeviceInfoReply>,
}

impl Asked {
    fn begin(session: &'static Session) -> Result<Asked> {
        if session.knows::<ProcessNamespace>() {
            session.append(&ProcessNamespace { namespace: pid_namespace() })?;
        }
        let about = session.submit(&SessionInfo {})?;
        let first = session.submit(&DeviceInfo { device: 0 })?;
        Ok(Asked { session, about, first })
    }

    /// Waits for the answers: the server, its driver's version, and its devices. `several`: the process has
    /// other servers.
    fn end(self, several: bool) -> Result<(&'static Server, i32, Vec<DeviceInfoReply>)> {
        let Asked { session, about, first } = self;
        let info = about.wait()?;
        session.set_server(&info.server);
        log::info(format_args!(
            "{} device(s) of {} ({}), CUDA {}.{}",
            info.device_count,
            info.server,
            info.backend,
            info.driver_version / 1000,
            info.driver_version % 1000 / 10
        ));
        let version = info.driver_version as i32;
        let server: &'static Server = Box::leak(Box::new(Server {
            session,
            several,
            reads_late: info.reads_late,
            runs_machine_code: info.runs_machine_code,
            device_count: info.device_count,
            globals: RwLock::default(),
            fences: Fences::new(),
            telling: Mutex::new(()),
            used: Once::new(),
        }));
        if info.device_count == 0 {
            return Ok((server, version, Vec::new()));
        }
        let count = info.device_count.min(MAX_DEVICES);
        let others: Vec<_> =
            (1..count).map(|device| session.submit(&DeviceInfo { device })).collect::<Result<_>>()?;
        let asked = std::iter::once(first).chain(others);
        Ok((server, version, asked.map(Pending::wait).collect::<Result<_>>()?))
    }
}

/// Tells a server which of its devices the program sees and where their memory is in the process's address
/// windows, if that differs from the session's default. Makes values distinct that two servers may share.
fn place(index: usize, server: &'static Server, found: &mut [Found], first_window: u32) -> Result {
    let own = |(_, found): &(u32, &mut Found)| std::ptr::eq(found.server, server);
    let mine: Vec<(u32, &mut Found)> = (first_window..).zip(found).filter(own).collect();
    let (windows, devices): (Vec<u32>, Vec<u32>) =
        mine.iter().map(|(window, found)| (*window, found.number)).unzip();
    let as_they_are = |numbers: &[u32]| numbers.iter().copied().eq(0..numbers.len() as u32);
    if devices.is_empty() {
        return Ok(());
    }
    let all = devices.len() as u32 == server.device_count && as_they_are(&devices);
    if !all || !as_they_are(&windows) {
        let windows = if as_they_are(&windows) { Vec::new() } else { windows };
        server.session.call(&SelectDevices { devices, windows })?;
    }
    for (number, (_, found)) in (0..).zip(mine) {
        found.number = number;
        // PCI addresses don't identify a machine. The domain does, here.
        let domain = distinct_domain(index, found.info.pci[0]);
        found.info.pci[0] = domain;
        let attributes =
            found.info.attributes.iter_mut().filter(|a| a.attribute as usize == attr::PCI_DOMAIN_ID);
        attributes.for_each(|attribute| attribute.value = domain as i32);
    }
    Ok(())
}

impl Server {
    /// A server without a connection, for tests that need only this process.
    #[cfg(test)]
    pub fn unused() -> &'static Server {
        let (device_count, globals) = (0, RwLock::default());
        let session = unused::session();
        Box::leak(Box::new(Server {
            session,
            several: true,
            reads_late: false,
            runs_machine_code: false,
            device_count,
            globals,
            fences: Fences::new(),
            telling: Mutex::new(()),
            used: Once::new(),
        }))
    }

    /// Leaves no room for commands to such a server. The thread ends when the session is lost.
    #[cfg(test)]
    pub fn fill(&'static self) -> std::thread::JoinHandle<()> {
        unused::fill(self.session)
    }

    /// Loses the session of such a server.
    #[cfg(test)]
    pub fn lose(&self) {
        unused::lose(self.session);
    }
}

impl Device {
    /// What the server reports about this device's access to another one's memory. `None` if they are on two
    /// servers, where neither can access the other's memory.
    ///
    /// # Errors
    /// `INVALID_DEVICE` if they are the same device.
    pub fn as_peer_of(&self, peer: &Device) -> Result<Option<PeerInfoReply>> {
        if self.ordinal == peer.ordinal {
            return Err(Status::INVALID_DEVICE);
        }
        if !std::ptr::eq(self.server, peer.server) {
            return Ok(None);
        }
        self.server.session.call(&PeerInfo { device: self.number, peer: peer.number }).map(Some)
    }

    fn new(ordinal: u32, window: u32, found: Found) -> Device {
        let Found { server, number, info } = found;
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
        let memory = Mutex::new(DeviceMemory::new(ordinal, window, info.granule));
        let page = client::pages::PAGE as u64;
        let managed = Mutex::new(DeviceMemory::both(ordinal, window, info.granule, page));
        let primary = Context::new(ContextId(number), server, ordinal, 0, true);
        Device {
            ordinal,
            number,
            server,
            info,
            attributes,
            memory,
            managed,
            freed: Default::default(),
            primary,
            shares_host_memory,
        }
    }

    /// The part of the device's memory that contains an address.
    pub fn memory_of(&self, address: u64) -> &Mutex<Memory> {
        if is_managed(address) { &self.managed } else { &self.memory }
    }

    /// The parts of the device's memory, and whether each has memory that was freed in stream order.
    pub fn parts(&self) -> [(&Mutex<Memory>, &AtomicBool); 2] {
        let [device, managed] = &self.freed;
        [(&self.memory, device), (&self.managed, managed)]
    }

    /// An attribute's value, or 0 if the device doesn't know it.
    pub fn attribute(&self, number: usize) -> i32 {
        self.attributes.get(number).copied().flatten().unwrap_or(0)
    }
}

/// A `MemGrow`, without waiting for the reply.
struct Grow(Ahead<'static, MemGrowReply>);

impl std::fmt::Debug for Grow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grow({:?})", self.0.seq())
    }
}

impl Answer for Grow {
    fn is_here(&self) -> bool {
        self.0.is_done()
    }

    fn wait(self: Box<Self>) -> Result {
        self.0.take().map(drop)
    }
}

/// A `MemShrink`, without waiting for the reply. While reply slots are scarce, because many threads wait for
/// replies, it is not submitted: a later question for the answer does that, or whoever waits for the answer.
struct Shrink {
    session: &'static Session,
    op: MemShrink,
    ahead: OnceCell<Ahead<'static, MemShrinkReply>>,
}

impl Shrink {
    /// Submits it if that was not possible before and is now.
    fn submit(&self) -> Result {
        if self.ahead.get().is_none()
            && let Some(ahead) = self.session.submit_ahead(&self.op)?
        {
            self.ahead.get_or_init(|| ahead);
        }
        Ok(())
    }
}

impl std::fmt::Debug for Shrink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shrink({:?}, {:?})", self.op, self.ahead.get().map(Ahead::seq))
    }
}

impl Answer for Shrink {
    fn is_here(&self) -> bool {
        // Without a session, whoever waits for the answer gets the error.
        let _ = self.submit();
        self.ahead.get().is_some_and(Ahead::is_done)
    }

    fn wait(self: Box<Self>) -> Result {
        match self.ahead.into_inner() {
            Some(ahead) => ahead.take().map(drop),
            None => self.session.call(&self.op).map(drop),
        }
    }
}

/// Device memory comes from the device's server. The window of an address identifies the device in the
/// process; the server uses its own number for it.
impl Backing for Device {
    fn grow(&self, _ordinal: u32, address: u64, size: u64) -> Result {
        self.server.session.call(&MemGrow { device: self.number, address, size }).map(|_| ())
    }

    fn grow_ahead(&self, _ordinal: u32, address: u64, size: u64) -> Option<Box<dyn Answer>> {
        let session = self.server.session;
        if !session.is_far() {
            return None;
        }
        let ahead = session.submit_ahead(&MemGrow { device: self.number, address, size }).ok()??;
        Some(Box::new(Grow(ahead)))
    }

    fn shrink(&self, _ordinal: u32, address: u64, size: u64) -> Result {
        self.server.session.call(&MemShrink { device: self.number, address, size }).map(|_| ())
    }

    fn shrink_ahead(&self, _ordinal: u32, address: u64, size: u64) -> Result<Option<Box<dyn Answer>>> {
        let op = MemShrink { device: self.number, address, size };
        let shrink = Shrink { session: self.server.session, op, ahead: OnceCell::new() };
        shrink.submit()?;
        Ok(Some(Box::new(shrink)))
    }
}

/// The version of the API that this library implements.
pub(crate) const API_VERSION: i32 = 13000;

/// Facts about an allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag {
    pub context: &'static Context,
    pub buffer: u64,
    /// Handle of the pool it came from, or 0 for `cuMemAlloc`.
    pub pool: usize,
    pub sync_memops: bool,
}

/// One part of a device's memory.
pub(crate) type Memory = DeviceMemory<Tag, Freeing>;

/// Who has freed memory in stream order. Until the stream has passed the free, only the same pool has it
/// again, for the same stream.
#[derive(Clone)]
pub(crate) struct Freeing {
    pub stream: Arc<Stream>,
    /// The handle of the memory's pool, or 0 for `cuMemAlloc`.
    pub pool: usize,
}

impl Freeing {
    fn key(&self) -> (u64, usize) {
        (self.stream.unique(), self.pool)
    }
}

impl PartialEq for Freeing {
    fn eq(&self, other: &Freeing) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Freeing {}

impl PartialOrd for Freeing {
    fn partial_cmp(&self, other: &Freeing) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Freeing {
    fn cmp(&self, other: &Freeing) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// A session without a connection, for tests that need only this process.
#[cfg(test)]
pub(crate) mod unused {
    use std::cell::Cell;
    use std::os::fd::RawFd;
    use std::path::Path;
    use std::thread::JoinHandle;
    use std::time::Duration;

    use super::{Answer, MemShrink, OnceCell, Shrink};
    use client::channel::{Geometry, Header};
    use client::handle::StreamId;
    use client::ops::stream::StreamMark;
    use client::port::mapping::Mapping;
    use client::port::{Pinned, Port, PortError};
    use client::session::{Purpose, Session};
    use protocol::Status;
    use protocol::version::OURS;

    thread_local! {
        /// How many pieces of pinned memory this thread has registered, and not unregistered.
        pub static REGISTERED: Cell<usize> = const { Cell::new(0) };
    }

    struct Nowhere(Mapping);

    impl Port for Nowhere {
        fn channel(&self) -> &Mapping {
            &self.0
        }

        fn connect(&self) -> Result<(), PortError> {
            // SAFETY: the mapping begins with the header, which consists of atomics, and lives as long as the
            // process.
            let header = unsafe { &*self.0.base().cast::<Header>() };
            header.set_session_version(OURS.version(), OURS.fingerprint());
            header.set_ready();
            Ok(())
        }

        fn kick(&self) {}

        fn wait(&self, _offset: u64, _expected: u32, _timeout: Duration) -> bool {
            false
        }

        fn alive(&self) -> bool {
            true
        }

        fn why_dead(&self) -> String {
            unreachable!("it lives")
        }

        fn pin_new(&self, size: usize, at: Option<usize>) -> Result<Pinned, PortError> {
            let mapping = Mapping::pinned(None, size, at).expect("pinned memory");
            REGISTERED.set(REGISTERED.get() + 1);
            Ok(Pinned { mapping, region: 0, file: None })
        }

        fn pin(&self, _addr: usize, _size: usize) -> Option<Result<u32, PortError>> {
            None
        }

        fn pin_shared(&self, _pinned: &Pinned) -> Result<u32, PortError> {
            unreachable!("there is one server")
        }

        fn unpin(&self, _region: u32) {
            REGISTERED.set(REGISTERED.get() - 1);
        }

        fn descriptors(&self) -> Vec<RawFd> {
            Vec::new()
        }

        fn path(&self) -> &Path {
            Path::new("nowhere")
        }
    }

    pub fn session() -> &'static Session {
        let geometry = Geometry::with_arena(1 << 20);
        let mapping = Mapping::pinned(None, geometry.size, None).expect("memory for a channel");
        Session::over(Box::new(Nowhere(mapping)), geometry, Purpose::Compute).expect("a session")
    }

    pub fn fill(session: &'static Session) -> JoinHandle<()> {
        let mark = StreamMark { stream: StreamId(0) };
        let fills = std::thread::spawn(move || while session.append(&mark).is_ok() {});
        // Nobody takes records out, and a mark has 32 bytes.
        while session.appended() + 32 <= Geometry::RING_SIZE as u64 {
            std::thread::yield_now();
        }
        fills
    }

    pub fn lose(session: &Session) {
        // SAFETY: as in `connect`.
        let header = unsafe { &*session.port().channel().base().cast::<Header>() };
        header.set_lost("a test");
    }

    #[test]
    fn memory_is_given_back_also_while_reply_slots_are_scarce() {
        let session = session();
        let op = MemShrink { device: 0, address: 0, size: 1 };
        let (before, mut waits) = (session.last_seq(), Vec::new());
        while session.has_free_slot() {
            waits.push(session.slot().unwrap());
        }
        let shrink = Shrink { session, op, ahead: OnceCell::new() };
        assert_eq!(shrink.submit(), Ok(()));
        assert!(!shrink.is_here() && session.last_seq() == before, "it is not submitted");
        waits.clear();
        assert!(!shrink.is_here() && session.last_seq() != before, "it is submitted");
    }

    #[test]
    fn memory_that_a_lost_session_does_not_get_is_its_loss() {
        let session = session();
        let refused =
            PortError::Refused { path: "nowhere".into(), what: "memory", reason: "Invalid argument".into() };
        let outcome = || session.no_memory(format_args!("no memory for a test"), &refused);
        assert_eq!(outcome(), Status::OUT_OF_MEMORY);
        lose(session);
        assert_eq!(outcome(), Status::DEVICE_UNAVAILABLE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_before_the_first_device_that_a_program_sees_stay_free() {
        assert_eq!(first_window_of(1, &[0, 1]), 0);
        assert_eq!(first_window_of(1, &[3, 1]), 1);
        // Other servers' workers have reserved only the first windows.
        assert_eq!(first_window_of(2, &[3, 1]), 0);
    }
}
