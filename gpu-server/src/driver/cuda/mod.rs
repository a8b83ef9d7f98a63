//! The GPU interface on NVIDIA's driver.
//!
//! - [`api`]: the driver's functions; [`fence`]: how the server learns what a stream has done;
//! - here: devices and contexts; one file for each other chapter: [`memory`] and [`host_map`], [`streams`],
//!   [`copies`], [`row_copies`] and [`across`] (with [`staging`] and [`arrivals`] for data to and from the
//!   network, and [`landing`] for what other servers send), [`kernels`] (with [`link`]), [`graph`], [`green`],
//!   [`array`], [`texture`]; [`nvml`]; [`activity`] and [`cupti`]: device activity;
//! - [`registration`]: client memory that CUDA accesses in place; [`reach`]: state that threads other than
//!   the dispatcher's may use.
//!
//! The session has checked everything that a client names before the driver sees it. What a kernel can do is
//! confined by its process: a worker serves one session.

mod across;
mod activity;
pub mod api;
mod array;
mod arrivals;
mod carrier;
mod copies;
pub mod cupti;
mod fence;
mod graph;
mod green;
mod host_map;
mod kernels;
mod link;
mod memory;
pub mod nvml;
mod reach;
mod registration;
mod row_copies;
mod staging;
mod streams;
mod texture;

use std::collections::HashMap;
use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::channel::MAX_DEVICES;
use protocol::handle::ContextId;
use protocol::ops::device::*;
use protocol::ops::memory::{WINDOW_SIZE, window};
use protocol::ops::nvml::uuid_text;

use self::api::{Api, CUcontext, CUdevice, CUdeviceptr, CUstream};
use self::arrivals::Arrived;
use self::fence::{Completer, Health, Words};
use self::reach::Reach;
use self::staging::Staging;
use self::streams::CudaStream;
use super::call::{Errors, Result};
use super::gpu::{Gpu, STREAM_NON_BLOCKING, Unavailable};
use super::helper::Helper;
use super::ids::Ids;
use super::listed::{Listed, place};
use super::output::{self, Output};
use super::ranges::Ranges;
use super::space::Space;
use super::store::Lane;
use super::streams::Streams;
use crate::config::Backing;
use crate::shared_event::Lookout;

/// `CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS`.
const CAN_USE_STREAM_WORDS: u32 = 122;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
const EXPORTS_FD: u32 = 103;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
const READS_IN_PLACE: u32 = 110;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const HAS_DMA_BUFS: u32 = 124;
/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS`.
const PAGEABLE_MEMORY: u32 = 88;
/// The `CUdevice_attribute` numbers that are queried.
const ATTRIBUTES: std::ops::Range<u32> = 1..160;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`.
const MULTIPROCESSORS: u32 = 16;
const THREADS_OF_MULTIPROCESSOR: u32 = 39;
/// `CU_LIMIT_STACK_SIZE`, `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`.
const LIMIT_STACK_SIZE: u32 = 0;
const LIMIT_PRINTF_FIFO_SIZE: u32 = 1;
const LIMIT_HEAP_SIZE: u32 = 2;
/// Stack size per thread in every new context, in bytes.
const USUAL_STACK: u64 = 1024;

/// The devices of a session, on NVIDIA's driver.
pub struct Cuda {
    api: &'static Api,
    devices: Vec<Device>,
    /// By ID. A primary context's ID is its device's ordinal; it is here once something has needed it.
    contexts: Ids<Context>,
    /// The context that is current in the dispatcher's thread.
    current: Option<u32>,
    /// The context in which page-locked memory is registered.
    home: Option<u32>,
    /// For the device being reset: whether it has a context, and whether that is the home.
    resets: bool,
    home_goes: bool,
    /// Memory is made so that other devices can read it.
    in_place: bool,
    /// Address windows of the devices, and those that are reserved: all of the devices' windows, once there
    /// has been a context.
    windows: Vec<u32>,
    windows_reserved: Vec<u32>,
    /// How often streams were given work.
    entered: u64,
    /// The streams for moving memory from and to devices, by ordinal and lane, and their contexts; made on
    /// demand.
    moving: HashMap<(u32, Lane), (CUcontext, CUstream)>,
    /// The streams that land pieces from other servers, by context; made on demand.
    pieces: Vec<Arc<carrier::PieceStream>>,
    /// Makes mirrors of client memory; started with the first.
    mirrors: Option<Helper>,
    beside: Arc<Reach>,
    words: Arc<Words>,
    completer: Arc<Completer>,
    /// Watches for other sessions' events; started with the first wait for one.
    lookout: Option<Lookout>,
    staging: Arc<Staging>,
    /// Set when the session begins.
    client: Option<Arc<dyn Client>>,
    /// Where data arrives by RDMA.
    arrived: Option<Arc<Arrived>>,
    output: Arc<Output>,
    errors: Option<Errors>,
    /// The administrator's path of NVIDIA's CUPTI.
    cupti_path: Option<PathBuf>,
    /// CUPTI, while activity is recorded.
    cupti: Option<&'static cupti::Cupti>,
}

// SAFETY: the driver API takes its handles from any thread; every caller makes the context it needs current.
unsafe impl Send for Cuda {}

struct Device {
    /// Its number on this server.
    number: u32,
    handle: CUdevice,
    name: String,
    granule: u64,
    /// The mapped parts of its window.
    mapped: Ranges,
    /// Whether its memory can be shared between processes.
    exports: bool,
    /// The devices whose memory it can access, once it has a context.
    reached: Vec<CUdevice>,
}

struct Context {
    device: u32,
    handle: CUcontext,
    health: Arc<Health>,
}

/// Number of devices that CUDA sees.
pub fn probe() -> Result<u32, String> {
    let api = api::load()?;
    let mut count = 0;
    // SAFETY: writes one integer.
    unsafe { api.device_count(&mut count) }
        .map_err(|status| format!("cuDeviceGetCount: {}", api.name(status)))?;
    Ok(count.max(0) as u32)
}

/// This machine's devices, by number: those that the daemon knows, and for its first worker those that CUDA
/// lists.
pub fn listed(backing: &Backing) -> Result<Vec<Listed>, String> {
    if backing.listed.is_empty() { list(api::load()?) } else { Ok(backing.listed.clone()) }
}

/// The devices as CUDA lists them now. One that does not answer has no name and no UUID; nobody needs it who
/// has not chosen it.
fn list(api: &Api) -> Result<Vec<Listed>, String> {
    let one = |ordinal: u32| {
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: writes a device handle.
        unsafe { api.device_get(&mut device, ordinal as i32) }?;
        // SAFETY: writes 16 bytes.
        unsafe { api.device_uuid(&mut uuid, device) }?;
        let ([domain, bus, number], name) = (pci(api, device), device_name(api, device)?);
        Ok(Listed { name, uuid: uuid_text(&uuid), pci: format!("{domain:08X}:{bus:02X}:{number:02X}.0") })
    };
    let or_unknown = |ordinal| {
        one(ordinal).unwrap_or_else(|status: Status| {
            tracing::warn!("CUDA's device {ordinal} cannot be identified: {}", api.name(status));
            Listed::default()
        })
    };
    Ok((0..probe()?).map(or_unknown).collect())
}

/// What was found, in lines for display.
pub fn report() -> Result<Vec<String>, String> {
    let api = api::load()?;
    let version = version(api).map_err(|status| format!("cuDriverGetVersion: {}", api.name(status)))?;
    let count = probe()?;
    let mut lines =
        vec![format!("CUDA driver {}.{}, {count} device(s)", version / 1000, version % 1000 / 10)];
    for ordinal in 0..count {
        let mut handle = 0;
        // SAFETY: writes a device handle.
        if unsafe { api.device_get(&mut handle, ordinal as i32) }.is_err() {
            continue;
        }
        let name = device_name(api, handle).unwrap_or_else(|_| "unnamed".into());
        let mut bytes = 0;
        // SAFETY: writes one integer.
        let memory = unsafe { api.device_memory(&mut bytes, handle) }.map_or(0, |()| bytes >> 20);
        lines.push(format!("device {ordinal}: {name}, {memory} MiB"));
    }
    Ok(lines)
}

fn version(api: &Api) -> Result<i32> {
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { api.driver_version(&mut version) }?;
    Ok(version)
}

fn device_name(api: &Api, device: CUdevice) -> Result<String> {
    let mut name = [0; 256];
    // SAFETY: writes at most 256 bytes, NUL-terminated.
    unsafe { api.device_name(name.as_mut_ptr(), 256, device) }?;
    // SAFETY: the driver has written a NUL-terminated string there.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

fn attribute(api: &Api, device: CUdevice, number: u32) -> Option<i32> {
    let mut value = 0;
    // SAFETY: writes one integer.
    unsafe { api.device_attribute(&mut value, number, device) }.ok().map(|()| value)
}

/// A device's domain, bus and number.
fn pci(api: &Api, device: CUdevice) -> [u32; 3] {
    // CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, …BUS_ID, …DEVICE_ID
    [50, 33, 34].map(|number| attribute(api, device, number).unwrap_or(0) as u32)
}

impl Cuda {
    /// Finds the devices without making a context: see [`make_primary`](Self::make_primary).
    pub fn new(backing: &Backing) -> Result<Cuda, String> {
        let api = api::load()?;
        let (known, there) = (listed(backing)?, list(api)?);
        let all: Vec<u32> = match &*backing.devices {
            [] => (0..known.len() as u32).take(MAX_DEVICES as usize).collect(),
            chosen => chosen.to_vec(),
        };
        if all.is_empty() {
            return Err("CUDA sees no device on this machine".into());
        }
        let mut devices = Vec::new();
        for number in all {
            let ordinal = place(&known, &there, number)?;
            let what = |step: &str, status: Status| format!("device {number}: {step}: {}", api.name(status));
            devices.push(open(api, number, ordinal).map_err(|(step, status)| what(step, status))?);
        }
        let cuda = Cuda::of(api, devices, backing.cupti.clone())?;
        output::capture(&cuda.output).map_err(|e| format!("streams for what kernels print: {e}"))?;
        Ok(cuda)
    }

    fn of(api: &'static Api, devices: Vec<Device>, cupti_path: Option<PathBuf>) -> Result<Cuda, String> {
        let failed = |status: Status| format!("page-locked memory: {}", api.name(status));
        let words = Words::new().map_err(failed)?;
        let staging = Staging::new(api, &words).map_err(failed)?;
        let completer = Completer::start(api).map_err(|e| format!("a thread: {e}"))?;
        let output = Output::new();
        completer.flush_to(&output);
        Ok(Cuda {
            api,
            windows: (0..devices.len() as u32).collect(),
            windows_reserved: Vec::new(),
            devices,
            contexts: Ids::default(),
            current: None,
            home: None,
            resets: false,
            home_goes: false,
            in_place: false,
            entered: 0,
            moving: HashMap::new(),
            pieces: Vec::new(),
            mirrors: None,
            beside: Arc::default(),
            words,
            completer,
            lookout: None,
            staging,
            client: None,
            arrived: None,
            output,
            errors: None,
            cupti_path,
            cupti: None,
        })
    }

    /// Makes a device's primary context if there is none, and with the first one everything else that needs a
    /// context: windows, page-locked memory. It is then current.
    fn make_primary(&mut self, ordinal: u32) -> Result {
        if self.contexts.contains_key(&ordinal) {
            return Ok(());
        }
        let Device { number, handle: device, .. } =
            *self.device(ordinal).map_err(|_| Status::INVALID_CONTEXT)?;
        let begun = Instant::now();
        self.current = None;
        let context = primary(self.api, ordinal, device)?;
        self.beside.add_context(number, &context.health);
        let made = begun.elapsed();
        self.contexts.insert(ordinal, context);
        self.current = Some(ordinal);
        let furnished = self.furnish(ordinal);
        tracing::debug!(
            "device {ordinal}: the driver made a context in {made:.1?}; reserving addresses and registering memory took {:.1?}",
            begun.elapsed() - made
        );
        if furnished.is_err() {
            // It must not be used half prepared.
            self.contexts.remove(&ordinal);
            self.current = None;
            self.home = self.home.filter(|home| *home != ordinal);
            // SAFETY: nothing uses it any more. The first error is the one to report.
            let _ = unsafe { self.api.primary_reset(device) };
        }
        furnished
    }

    /// Prepares a new context, which is current, for use.
    fn furnish(&mut self, ordinal: u32) -> Result {
        for device in self.devices.iter_mut().filter(|device| device.granule == 0) {
            device.granule = granule(self.api, device.handle)?;
        }
        self.reserve_windows()?;
        self.settle()?;
        let own = self.device(ordinal)?.handle;
        let others = self.devices.iter().map(|device| device.handle).filter(|other| *other != own);
        let reached = others.filter_map(|other| match can_access(self.api, own, other) {
            Ok(can) => can.then_some(Ok(other)),
            Err(status) => Some(Err(status)),
        });
        let reached = reached.collect::<Result<_>>()?;
        if let Some(device) = self.devices.get_mut(ordinal as usize) {
            device.reached = reached;
        }
        self.reach_others(ordinal)
    }

    /// Reserves the addresses of all windows before anything else uses them.
    fn reserve_windows(&mut self) -> Result {
        for number in &self.windows {
            if self.windows_reserved.contains(number) {
                continue;
            }
            let wanted = window(*number);
            let mut at: CUdeviceptr = 0;
            // SAFETY: reserves addresses; nothing is backed yet.
            unsafe { self.api.address_reserve(&mut at, WINDOW_SIZE as usize, 0, wanted, 0) }?;
            if at != wanted {
                tracing::error!(
                    "window {number} was reserved at {at:#x} instead of {wanted:#x}: its addresses are taken"
                );
                return Err(Status::MAP_FAILED);
            }
            self.windows_reserved.push(*number);
        }
        Ok(())
    }

    /// Registers this process's page-locked memory in the current context, unless it is registered in
    /// another.
    fn settle(&mut self) -> Result {
        let Some(current) = self.current.filter(|_| self.home.is_none()) else { return Ok(()) };
        self.words.register(self.api)?;
        self.staging.register()?;
        if let Some(arrived) = &self.arrived {
            arrived.register(self.api)?;
        }
        self.home = Some(current);
        self.receive_by_rdma();
        Ok(())
    }

    /// Registers memory that both the network device and the GPU use, each with the other, for a session over
    /// verbs.
    fn receive_by_rdma(&mut self) {
        let Some(client) = self.client.clone().filter(|_| self.arrived.is_none()) else { return };
        let shared = client.staging().map(|area| Arrived::new(self.api, &self.words, area)).transpose();
        match shared {
            Ok(Some(arrived)) => {
                client.watch(Arc::<Arrived>::clone(&arrived));
                self.arrived = Some(arrived);
                let adopted = self.staging.keep_area().map_err(|status| self.api.name(status)).and_then(
                    // SAFETY: the pool is never unmapped from now on.
                    |(at, len)| unsafe { client.adopt(at, len) }.map_err(|lost| lost.to_string()),
                );
                if let Err(why) = adopted {
                    client.lose(&format!("registering the staging buffers with the RDMA device: {why}"));
                }
            }
            Ok(None) => {}
            Err(status) => client
                .lose(&format!("registering the RDMA device's buffers with CUDA: {}", self.api.name(status))),
        }
    }

    /// The page-locked memory was registered in a context that no longer exists: registers it in another, or
    /// in the next one that is made.
    fn move_home(&mut self) -> Result {
        self.home = None;
        let mut primaries = self.contexts.iter().filter(|(id, _)| **id < MAX_DEVICES);
        let other = primaries.find(|(_, context)| context.health.check().is_ok());
        match other.map(|(id, _)| *id) {
            Some(id) => {
                self.enter_context(ContextId(id))?;
                self.settle()
            }
            None => Ok(()),
        }
    }

    /// Gives a device with a new context access to the other devices' memory, as far as it can access it: see
    /// [`access`](Self::access).
    fn reach_others(&self, ordinal: u32) -> Result {
        let device = self.device(ordinal)?;
        let access = api::AccessDesc::device(device.handle, true);
        for other in self.devices.iter().filter(|other| device.reached.contains(&other.handle)) {
            for (address, size) in other.mapped.iter() {
                // SAFETY: mapped in one piece.
                unsafe { self.api.memory_access(address, size as usize, &access, 1) }?;
            }
        }
        Ok(())
    }

    /// The range of stream priorities. It belongs to a context, but is the same for devices of one model.
    fn priorities(&mut self, ordinal: u32) -> Result<[i32; 2]> {
        let name = self.device(ordinal)?.name.clone();
        let alike = |other: &&u32| self.device(**other).is_ok_and(|device| device.name == name);
        let like = self.contexts.keys().filter(|id| **id < MAX_DEVICES).find(alike).copied();
        self.enter_context(ContextId(like.unwrap_or(ordinal)))?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { self.api.context_priorities(&mut least, &mut greatest) }?;
        Ok([least, greatest])
    }

    fn device(&self, ordinal: u32) -> Result<&Device> {
        self.devices.get(ordinal as usize).ok_or(Status::INVALID_DEVICE)
    }

    fn context(&self, id: ContextId) -> Result<&Context> {
        self.contexts.get(&id.0).ok_or(Status::INVALID_CONTEXT)
    }

    fn errors(&self) -> Result<&Errors> {
        self.errors.as_ref().ok_or(Status::NOT_INITIALIZED)
    }

    /// Makes a context current in this thread, and makes it first if it is a primary one that doesn't exist
    /// yet. A failed context is refused with its error.
    fn enter_context(&mut self, id: ContextId) -> Result<&Context> {
        // A current context exists.
        if self.current != Some(id.0) && !self.contexts.contains_key(&id.0) {
            self.make_primary(id.0)?;
        }
        let context = self.contexts.get(&id.0).ok_or(Status::INVALID_CONTEXT)?;
        context.health.check()?;
        if self.current != Some(id.0) {
            // SAFETY: a live context.
            unsafe { self.api.context_set(context.handle) }?;
            self.current = Some(id.0);
        }
        Ok(context)
    }

    /// Notes an error that a call in `context` returned. If it leaves the context unusable, it becomes the
    /// context's error.
    fn note<T>(&self, context: ContextId, result: Result<T>) -> Result<T> {
        if let Err(status) = &result
            && super::call::is_sticky(*status)
            && let Some(context) = self.contexts.get(&context.0)
        {
            self.output.tell();
            context.health.fail(*status);
        }
        result
    }

    /// The devices with access to what backs a device's window: every device with a context that can access
    /// it, since copies between devices don't need the program's permission (and the driver's copies of
    /// mapped memory need access like a kernel's, or are slower: see [`across`]).
    fn access(&self, ordinal: u32) -> Result<Vec<api::AccessDesc>> {
        let device = self.device(ordinal)?;
        let mut all = vec![api::AccessDesc::device(device.handle, true)];
        let others = (0..).zip(&self.devices).filter(|(other, _)| *other != ordinal);
        for (_, other) in others.filter(|(other, _)| self.contexts.contains_key(other)) {
            if other.reached.contains(&device.handle) {
                all.push(api::AccessDesc::device(other.handle, true));
            }
        }
        Ok(all)
    }
}

/// Whether a device can access another's memory.
fn can_access(api: &Api, device: CUdevice, peer: CUdevice) -> Result<bool> {
    let mut can = 0;
    // SAFETY: writes one integer.
    unsafe { api.device_can_access(&mut can, device, peer) }?;
    Ok(can != 0)
}

/// Queries a device without making a context.
fn open(api: &Api, number: u32, ordinal: u32) -> Result<Device, (&'static str, Status)> {
    let mut handle = 0;
    // SAFETY: writes a device handle.
    unsafe { api.device_get(&mut handle, ordinal as i32) }.map_err(|s| ("cuDeviceGet", s))?;
    let name = device_name(api, handle).map_err(|s| ("cuDeviceGetName", s))?;
    if attribute(api, handle, CAN_USE_STREAM_WORDS) != Some(1) {
        return Err((
            "64-bit stream memory operations are not available (driver too old)",
            Status::NOT_SUPPORTED,
        ));
    }
    Ok(Device {
        number,
        handle,
        name,
        // CUDA's manual requires no context here. If a driver does require one, the granule is queried with
        // the first.
        granule: granule(api, handle).unwrap_or(0),
        mapped: Ranges::default(),
        exports: attribute(api, handle, EXPORTS_FD) == Some(1),
        reached: Vec::new(),
    })
}

/// Granularity of a device's memory, in bytes.
fn granule(api: &Api, device: CUdevice) -> Result<u64> {
    let mut granule = 0;
    let prop = api::AllocationProp::device(device);
    // SAFETY: a valid description; writes one integer. 0: the minimum.
    unsafe { api.memory_granularity(&mut granule, &prop, 0) }?;
    Ok(granule as u64)
}

fn primary(api: &Api, ordinal: u32, device: CUdevice) -> Result<Context> {
    let mut handle: CUcontext = std::ptr::null_mut();
    // SAFETY: writes a context handle.
    unsafe { api.primary_retain(&mut handle, device) }?;
    wrap(api, ordinal, handle)
}

/// A context with its probe stream. The context is then current.
fn wrap(api: &Api, device: u32, handle: CUcontext) -> Result<Context> {
    // SAFETY: a live context.
    unsafe { api.context_set(handle) }?;
    let mut probe: CUstream = std::ptr::null_mut();
    // SAFETY: writes a stream handle.
    unsafe { api.stream_create(&mut probe, STREAM_NON_BLOCKING, 0) }?;
    Ok(Context { device, handle, health: Health::new(handle, probe) })
}

impl Gpu for Cuda {
    const NAME: &'static str = "cuda";
    type Beside = Reach;
    const RUNS_MACHINE_CODE: bool = true;

    fn names(&self) -> Vec<String> {
        self.devices.iter().map(|d| d.name.clone()).collect()
    }

    fn reaches_pageable_memory(&self) -> bool {
        self.devices.iter().any(|device| attribute(self.api, device.handle, PAGEABLE_MEMORY) == Some(1))
    }

    fn warm(&mut self) -> Result<Option<u64>, Unavailable> {
        let api = self.api;
        let failed = |status: Status| Unavailable {
            reason: format!("making a context of the first device: {}", api.name(status)),
            full: status == Status::OUT_OF_MEMORY,
        };
        self.make_primary(0).and_then(|()| self.staging.prepare()).map_err(failed)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        let known = unsafe { api.memory_info(&mut free, &mut total) };
        Ok(known.ok().map(|()| free as u64))
    }

    fn begin(&mut self, client: &Arc<dyn Client>) {
        self.completer.serve_over_network(client.streams_data());
        self.output.serve(Arc::clone(client));
        self.errors = Some(Errors::new(Arc::clone(client)));
        self.client = Some(Arc::clone(client));
        self.staging.begin_session();
        // Another thread may have made the context.
        self.current = None;
        if let Some(home) = self.home {
            match self.enter_context(ContextId(home)) {
                Ok(_) => self.receive_by_rdma(),
                Err(status) => {
                    tracing::error!("the first device's context cannot be used: {}", self.api.name(status));
                }
            }
        }
    }

    fn beside(&self) -> &Arc<Reach> {
        &self.beside
    }

    fn enter(&mut self, context: ContextId) -> Result {
        self.enter_context(context).map(|_| ())
    }

    fn output(&self) -> &Output {
        &self.output
    }

    fn driver_version(&self) -> Result<u32> {
        Ok(version(self.api)? as u32)
    }

    fn reads_late(client: &dyn Client) -> bool {
        client.reads_late()
    }

    fn describe(&mut self, device: u32) -> Result<DeviceInfoReply> {
        let stream_priorities = self.priorities(device)?;
        let device = self.device(device)?;
        let (handle, name, granule) = (device.handle, device.name.clone(), device.granule);
        let (mut uuid, mut total) = ([0; 16], 0);
        // SAFETY: each writes what its pointer has room for.
        unsafe {
            self.api.device_uuid(&mut uuid, handle)?;
            self.api.device_memory(&mut total, handle)?;
        }
        let read = |number| attribute(self.api, handle, number);
        let attributes = ATTRIBUTES
            .filter_map(|attribute| read(attribute).map(|value| Attribute { attribute, value }))
            .collect();
        Ok(DeviceInfoReply {
            name,
            uuid,
            pci: pci(self.api, handle),
            total_memory: total as u64,
            granule,
            stream_priorities,
            attributes,
        })
    }

    fn describe_peer(&mut self, device: u32, peer: u32) -> Result<PeerInfoReply> {
        let (device, peer) = (self.device(device)?.handle, self.device(peer)?.handle);
        let can_access = can_access(self.api, device, peer)?;
        let mut attributes = Vec::new();
        for number in 1..=PEER_ATTRIBUTES as u32 {
            let mut value = 0;
            // SAFETY: writes one integer.
            attributes
                .push(unsafe { self.api.device_p2p(&mut value, number, device, peer) }.map_or(0, |()| value));
        }
        let atomics = self.api.peer_atomics(device, peer);
        Ok(PeerInfoReply { can_access, attributes, atomics })
    }

    fn select(&mut self, devices: &[u32], windows: &[u32]) -> Result {
        self.windows = windows.to_vec();
        let mut old: Vec<Option<Device>> = std::mem::take(&mut self.devices).into_iter().map(Some).collect();
        let mut contexts = std::mem::take(&mut self.contexts);
        let home = self.home.take();
        for (ordinal, number) in (0..).zip(devices) {
            self.devices.extend(old[*number as usize].take());
            let context = contexts.remove(number);
            self.contexts.extend(context.map(|context| (ordinal, Context { device: ordinal, ..context })));
            if home == Some(*number) {
                self.home = Some(ordinal);
            }
        }
        self.current = None;
        // The session cannot use the others, and their contexts would only take memory.
        for (number, context) in contexts {
            context.health.retire();
            if let Some(device) = old.get(number as usize).and_then(Option::as_ref) {
                // SAFETY: nothing of the device is in use.
                unsafe { self.api.primary_reset(device.handle) }?;
            }
        }
        if !self.contexts.is_empty() {
            self.reserve_windows()?;
        }
        if self.home.is_none() { self.move_home() } else { Ok(()) }
    }

    fn make_context(&mut self, context: ContextId, device: u32, flags: u32) -> Result {
        let Device { number, handle: handle_of_device, .. } = *self.device(device)?;
        // The memory belongs to the primary context.
        self.make_primary(device)?;
        let mut handle: CUcontext = std::ptr::null_mut();
        self.current = None;
        // SAFETY: writes a context handle.
        unsafe { self.api.context_create(&mut handle, flags, handle_of_device) }?;
        let made = wrap(self.api, device, handle).inspect_err(|_| {
            // SAFETY: just made, and nobody else knows it.
            let _ = unsafe { self.api.context_destroy(handle) };
        })?;
        self.beside.add_context(number, &made.health);
        self.contexts.insert(context.0, made);
        Ok(())
    }

    fn retire_context(&mut self, context: ContextId) {
        if let Some(context) = self.contexts.get(&context.0) {
            context.health.retire();
        }
    }

    fn forget_context(&mut self, context: ContextId) {
        self.current = None;
        // Streams are destroyed with their context.
        self.moving.retain(|(device, _), _| *device != context.0);
    }

    fn destroy_context(&mut self, context: ContextId) -> Result {
        let context = self.contexts.remove(&context.0).ok_or(Status::INVALID_CONTEXT)?;
        // SAFETY: everything in the context has been dropped.
        unsafe { self.api.context_destroy(context.handle) }
    }

    fn begin_reset(&mut self, device: u32, streams: &mut Streams<CudaStream>, _space: &Space<u64>) -> Result {
        // After a fault the driver does nothing more for this process, whatever is reset; as without rgpu,
        // the error stays.
        self.contexts.get(&device).map_or(Ok(()), |context| context.health.check())?;
        self.resets = self.contexts.values().any(|context| context.device == device);
        let home = self.home.and_then(|home| self.contexts.get(&home));
        self.home_goes = home.is_some_and(|home| home.device == device);
        if self.home_goes {
            self.settle_others(streams, device);
        }
        Ok(())
    }

    fn reset(&mut self, device: u32) -> Result {
        self.contexts.remove(&device);
        if self.resets {
            // SAFETY: everything on the device has been dropped.
            unsafe { self.api.primary_reset(self.device(device)?.handle) }?;
        }
        Ok(())
    }

    fn finish_reset(&mut self) -> Result {
        // The next context is made on demand; most programs never need it, because they end now.
        if self.home_goes { self.move_home() } else { Ok(()) }
    }

    fn set_primary_flags(&mut self, device: u32, flags: u32) -> Result {
        // SAFETY: no requirement.
        unsafe { self.api.primary_set_flags(self.device(device)?.handle, flags) }
    }

    fn limit(&mut self, _context: ContextId, limit: u32) -> Result<u64> {
        let mut value = 0;
        // SAFETY: writes one integer.
        unsafe { self.api.context_get_limit(&mut value, limit) }?;
        Ok(value as u64)
    }

    fn set_limit(&mut self, _context: ContextId, limit: u32, value: u64) -> Result {
        // SAFETY: no requirement.
        unsafe { self.api.context_set_limit(limit, value as usize) }
    }

    fn reset_persisting_cache(&mut self, _context: ContextId) -> Result {
        // SAFETY: no requirement.
        unsafe { self.api.context_reset_cache() }
    }

    fn limit_bytes(&self, device: u32, limit: u32, value: u64) -> u64 {
        let Ok(device) = self.device(device) else { return 0 };
        match limit {
            LIMIT_STACK_SIZE if value > USUAL_STACK => {
                let read = |number| attribute(self.api, device.handle, number).unwrap_or(0).max(0) as u64;
                value.saturating_mul(read(MULTIPROCESSORS)).saturating_mul(read(THREADS_OF_MULTIPROCESSOR))
            }
            LIMIT_PRINTF_FIFO_SIZE | LIMIT_HEAP_SIZE => value,
            _ => 0,
        }
    }

    fn enable_peer(&mut self, context: ContextId, peer: ContextId) -> Result {
        let peer = self.enter_context(peer)?.handle;
        self.enter_context(context)?;
        // SAFETY: live contexts, one of them current.
        unsafe { self.api.peer_enable(peer, 0) }
    }

    fn disable_peer(&mut self, context: ContextId, peer: ContextId) -> Result {
        let peer = self.enter_context(peer)?.handle;
        self.enter_context(context)?;
        // SAFETY: live contexts, one of them current.
        unsafe { self.api.peer_disable(peer) }
    }

    fn end(&mut self, _streams: &mut Streams<CudaStream>) {
        self.staging.stop();
        self.completer.stop();
    }
}

#[cfg(test)]
impl Cuda {
    /// One with a context on no device.
    fn fake(api: &'static Api) -> Cuda {
        let mut cuda = Cuda::fake_of(api, 0);
        cuda.fake_context(0, std::ptr::null_mut());
        cuda
    }

    /// One with so many devices and a context on each; the first one's is the home.
    pub(in crate::driver) fn fake_of(api: &'static Api, devices: u32) -> Cuda {
        let device = |handle| Device {
            number: handle as u32,
            handle,
            name: String::new(),
            granule: 1,
            mapped: Ranges::default(),
            exports: false,
            reached: (0..devices as CUdevice).filter(|other| *other != handle).collect(),
        };
        let mut cuda = Cuda::of(api, (0..devices as CUdevice).map(device).collect(), None).unwrap();
        cuda.windows_reserved = cuda.windows.clone();
        for ordinal in 0..devices {
            cuda.fake_context(ordinal, (ordinal as usize + 1) as CUcontext);
            cuda.home = Some(0);
        }
        cuda.errors = Some(Errors::new(Arc::new(crate::doubles::Listener::new(|_| {}))));
        cuda
    }

    fn fake_context(&mut self, device: u32, handle: CUcontext) {
        let health = Health::new(handle, std::ptr::null_mut());
        self.contexts.insert(device, Context { device, handle, health });
    }
}

#[cfg(test)]
mod tests {
    use protocol::channel::MAX_CONTEXTS;
    use protocol::handle::StreamId;

    use super::*;
    use crate::driver::gpu::{GpuMemory, GpuStreams};
    use crate::driver::streams::Stream;

    #[test]
    fn a_context_that_cannot_be_used_is_not_kept() {
        let mut cuda = Cuda::fake_of(Api::noting(), 1);
        Api::refuse(Some("stream_create"));
        assert_eq!(cuda.make_context(ContextId(MAX_DEVICES), 0, 0), Err(Status::OUT_OF_MEMORY));
        let names: Vec<_> = Api::calls().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["context_create", "stream_create", "context_destroy"]);
        Api::refuse(None);
        cuda.make_context(ContextId(MAX_DEVICES), 0, 0).unwrap();
    }

    #[test]
    fn a_stream_for_which_there_is_no_word_is_not_kept() {
        let mut cuda = Cuda::fake_of(Api::noting(), 1);
        let mut words = Vec::new();
        while let Ok(word) = cuda.words.take() {
            words.push(word);
        }
        let id = StreamId(MAX_CONTEXTS);
        assert_eq!(cuda.make_stream(id, ContextId(0), 0, 0).err(), Some(Status::OUT_OF_MEMORY));
        assert_eq!(cuda.default_stream(ContextId(0), 0).err(), Some(Status::OUT_OF_MEMORY));
        let names: Vec<_> = Api::calls().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["stream_create", "stream_destroy"]);
    }

    /// A device that gets its context later is given access to it.
    #[test]
    fn memory_that_could_not_be_set_aside_is_still_known_as_mapped() {
        let mut cuda = Cuda::fake_of(Api::noting(), 1);
        cuda.back(0, 1 << 40, 4096).unwrap();
        let mapped = |cuda: &Cuda| cuda.devices[0].mapped.iter().collect::<Vec<_>>();
        assert_eq!(mapped(&cuda), [(1 << 40, 4096)]);
        Api::refuse(Some("memory_unmap"));
        assert_eq!(cuda.set_aside(0, 1 << 40, 4096), Err(Status::OUT_OF_MEMORY));
        assert_eq!(mapped(&cuda), [(1 << 40, 4096)]);
        Api::refuse(None);
        cuda.set_aside(0, 1 << 40, 4096).unwrap();
        assert!(mapped(&cuda).is_empty());
    }

    /// Their streams write to page-locked memory that is registered in the context which ends.
    #[test]
    fn the_homes_reset_waits_for_the_other_devices() {
        for (device, waits) in [(0, true), (1, false)] {
            let mut cuda = Cuda::fake_of(Api::noting(), 2);
            let mut streams = Streams::default();
            let ids = [0, 1].map(|of| {
                let (id, context) = (StreamId(MAX_CONTEXTS + of), ContextId(of));
                let native = cuda.make_stream(id, context, 0, 0).unwrap();
                streams.insert(id.0, Stream { context, green: None, is_blocking: false, native });
                id
            });
            let ends = streams::ends_at_once(&mut streams, ids[1]);
            Api::calls();
            cuda.begin_reset(device, &mut streams, &Space::default()).unwrap();
            let fenced: Vec<_> = Api::calls();
            assert_eq!(fenced, if waits { vec![("stream_write", ends)] } else { vec![] });
        }
    }
}
