//! The GPU interface without a GPU: commands run on `software-gpu`, which executes PTX on CPU threads.
//!
//! - here: devices and contexts; one file for each other chapter: [`memory`] and [`mirror`] (with [`file`]),
//!   [`streams`] (with [`stream_attributes`] and [`stream_memory`]), [`transfer`] (copies and fills),
//!   [`kernels`] (with [`link`]), [`graph`], [`green`], [`array`], [`tensor`]; [`nvml`];
//! - [`activity`]: device activity, for profilers; [`properties`]: what a device reports about itself;
//!   [`imitate`]: imitates for tests how NVIDIA's driver makes its caller wait, and fails.
//!
//! One [`Gpu`] is one device. Its contexts share its error; nothing else about them differs here.

mod activity;
mod array;
mod file;
mod graph;
mod green;
pub mod imitate;
mod kernels;
mod link;
mod memory;
mod mirror;
pub mod nvml;
mod properties;
mod stream_attributes;
mod stream_memory;
mod streams;
mod tensor;
mod transfer;

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::device::*;
use software_gpu::{Gpu, GpuConfig, Stream};

use self::imitate::{Delays, HardwareQueues, Imitate, Moves};
use self::mirror::{Granules, Reach};
use self::stream_memory::Bell;
use self::streams::SoftwareStream;
use super::activity::Activity;
use super::call::{Errors, Result};
use super::gpu::{self as driver, Unavailable};
use super::output::{self, Output};
use super::ranges::Ranges;
use super::space::Space;
use super::streams::Streams;
use crate::config::Backing;

/// The name of every device.
const NAME: &str = "rgpu software GPU";
/// The answer to `cuDriverGetVersion`.
const DRIVER_VERSION: u32 = 13000;
/// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`.
const P2P_ACCESS_SUPPORTED: usize = 2;

/// The devices of a session, in software.
pub struct Software {
    devices: Vec<Device>,
    output: Arc<Output>,
    errors: Option<Errors>,
    contexts: HashMap<u32, Context>,
    /// Contexts, and the ones whose devices they may access by `cuCtxEnablePeerAccess`. It changes nothing:
    /// all devices are each other's peers.
    peers: BTreeSet<(u32, u32)>,
    /// The granules that mirrors use.
    granules: Granules,
    beside: Arc<Reach>,
    /// Rung by memory operations of streams.
    bell: Arc<Bell>,
    imitate: Imitate,
    /// Held by a call that waits, if such calls are imitated. Other threads add nothing to a stream then.
    driver: Arc<Mutex<()>>,
    /// Where its work is recorded.
    activity: Option<Arc<Activity>>,
    /// The command being executed and its stream, if its work is recorded.
    marked: Option<(u64, StreamId)>,
    delays: Delays,
    hardware_queues: HardwareQueues,
    moves: Moves,
}

struct Device {
    gpu: Gpu,
    /// Its number on the server.
    number: u32,
    config: GpuConfig,
    /// The streams on which pieces of direct connections are copied to and from its memory, once there are
    /// some.
    landing: Option<Stream>,
    sending: Option<Stream>,
    /// What is mapped as a whole while it moves.
    whole: Ranges,
    /// Whether something has needed its context. Nothing here does, but NVIDIA's driver takes time to make
    /// one.
    context: AtomicBool,
}

struct Context {
    device: u32,
    /// Number of operations on its legacy default stream.
    legacy: u64,
    limits: HashMap<u32, u64>,
}

impl Context {
    fn new(device: u32) -> Context {
        Context { device, legacy: 0, limits: HashMap::new() }
    }
}

/// Logs what ended a device's work, and reports a failed assertion to the client as CUDA does.
fn report(number: u32, error: &software_gpu::Error, output: &Output) {
    tracing::error!("software device {number}: {error}");
    if let software_gpu::Error::Kernel {
        fault: software_gpu::Fault::Assert { message, file, line, function },
        location,
    } = error
    {
        let ([bx, by, bz], [tx, ty, tz]) = (location.block, location.thread);
        let text = format!(
            "{file}:{line}: {function}: block: [{bx},{by},{bz}], thread: [{tx},{ty},{tz}] Assertion `{message}` failed.\n"
        );
        output.print(output::Stream::Err, text.as_bytes());
        output.tell();
    }
}

fn code(error: &software_gpu::Error) -> Status {
    Status(error.cuda_code())
}

/// The server's numbers of the shared devices, in the order of a session's ordinals.
fn numbers(backing: &Backing) -> Vec<u32> {
    match backing.devices.as_slice() {
        [] => (0..backing.software_devices).collect(),
        some => some.to_vec(),
    }
}

impl Software {
    /// Makes the devices.
    pub fn new(backing: &Backing) -> Result<Software, String> {
        let output = Output::new();
        let beside = Arc::new(Reach::default());
        let mut devices = Vec::new();
        for number in numbers(backing) {
            if number >= backing.software_devices {
                return Err(format!(
                    "software device {number} does not exist: there are {}",
                    backing.software_devices
                ));
            }
            let config = GpuConfig {
                name: NAME.into(),
                memory_bytes: backing.software_memory,
                workers: 0,
                printf: {
                    let output = Arc::clone(&output);
                    Arc::new(move |text| {
                        output.print(output::Stream::Out, text);
                        output.tell();
                    })
                },
                fault: {
                    let output = Arc::clone(&output);
                    Arc::new(move |error| report(number, error, &output))
                },
            };
            let gpu = Gpu::new(config.clone()).map_err(|e| format!("software device {number}: {e}"))?;
            let context = AtomicBool::new(false);
            beside
                .set_device(number, &gpu)
                .map_err(|status| format!("software device {number}: {status}"))?;
            devices.push(Device {
                gpu,
                number,
                config,
                landing: None,
                sending: None,
                whole: Ranges::default(),
                context,
            });
        }
        let contexts = (0..devices.len() as u32).map(|n| (n, Context::new(n))).collect();
        let software = Software {
            devices,
            output,
            errors: None,
            contexts,
            peers: BTreeSet::new(),
            granules: Granules::default(),
            beside,
            bell: Arc::default(),
            imitate: backing.software_imitate,
            driver: Arc::default(),
            activity: None,
            marked: None,
            delays: Delays::new(&backing.software_imitate),
            hardware_queues: HardwareQueues::default(),
            moves: Moves::new(&backing.software_imitate),
        };
        software.pairs().for_each(|(gpu, peer)| gpu.enable_peer(peer));
        Ok(software)
    }

    /// Each device with each other one whose memory it can access.
    fn pairs(&self) -> impl Iterator<Item = (&Gpu, &Gpu)> {
        let others = |device: &'_ Device| {
            let (number, reaches) = (device.number, !self.imitate.no_peers);
            self.devices.iter().filter(move |other| reaches && other.number != number)
        };
        self.devices.iter().flat_map(move |device| others(device).map(move |other| (&device.gpu, &other.gpu)))
    }

    /// Makes the device's context, if it was not made yet.
    fn need_context(&self, device: u32) -> Result {
        if !self.device(device)?.context.swap(true, Ordering::Relaxed) {
            tracing::debug!("making a context of device {device}");
            self.imitate.make_context();
        }
        Ok(())
    }

    fn forget_peers(&mut self, gone: ContextId) {
        self.peers.retain(|(context, peer)| *context != gone.0 && *peer != gone.0);
    }

    fn device(&self, ordinal: u32) -> Result<&Device> {
        self.devices.get(ordinal as usize).ok_or(Status::INVALID_DEVICE)
    }

    fn device_mut(&mut self, ordinal: u32) -> Result<&mut Device> {
        self.devices.get_mut(ordinal as usize).ok_or(Status::INVALID_DEVICE)
    }

    fn context(&self, id: ContextId) -> Result<&Context> {
        self.contexts.get(&id.0).ok_or(Status::INVALID_CONTEXT)
    }

    fn errors(&self) -> Result<&Errors> {
        self.errors.as_ref().ok_or(Status::NOT_INITIALIZED)
    }
}

impl driver::Gpu for Software {
    const NAME: &'static str = "software";
    type Beside = Reach;
    const RUNS_MACHINE_CODE: bool = false;

    fn names(&self) -> Vec<String> {
        self.devices.iter().map(|d| d.gpu.properties().name.clone()).collect()
    }

    fn reaches_pageable_memory(&self) -> bool {
        self.imitate.pageable_memory
    }

    fn warm(&mut self) -> Result<Option<u64>, Unavailable> {
        self.need_context(0).map_err(|status| format!("software device 0: {status}"))?;
        Ok(None)
    }

    fn begin(&mut self, client: &Arc<dyn Client>) {
        self.output.serve(Arc::clone(client));
        self.errors = Some(Errors::new(Arc::clone(client)));
    }

    fn beside(&self) -> &Arc<Reach> {
        &self.beside
    }

    fn enter(&mut self, context: ContextId) -> Result {
        self.context(context).map(|_| ())
    }

    fn before_waiting_call(&mut self, streams: &Streams<SoftwareStream>, device: u32) -> Result {
        self.delays.delay();
        if self.imitate.waiting_calls {
            let _held = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
            let gpu = self.device(device)?.gpu.clone();
            let (done, all_done) = std::sync::mpsc::channel::<()>();
            // Nothing is sent: the sender is dropped with the last step, also on a failed device.
            streams::after_all(&gpu, &self.streams_of_device(streams, device), move |_| drop(done));
            let _ = all_done.recv();
        }
        Ok(())
    }

    fn output(&self) -> &Output {
        &self.output
    }

    fn driver_version(&self) -> Result<u32> {
        Ok(DRIVER_VERSION)
    }

    fn reads_late(client: &dyn Client) -> bool {
        // The stream itself reads mapped memory.
        client.reads_late() || !client.streams_data()
    }

    fn describe(&mut self, device: u32) -> Result<DeviceInfoReply> {
        let device = self.device(device)?;
        Ok(properties::describe(device.number, device.gpu.properties()))
    }

    fn describe_peer(&mut self, _device: u32, _peer: u32) -> Result<PeerInfoReply> {
        // A kernel can read and write another device's memory. Atomic operations there are not promised.
        let (mut attributes, atomics) = (vec![0; PEER_ATTRIBUTES], vec![0; ATOMIC_OPERATIONS]);
        let can_access = !self.imitate.no_peers;
        attributes[P2P_ACCESS_SUPPORTED - 1] = can_access.into();
        Ok(PeerInfoReply { can_access, attributes, atomics })
    }

    fn select(&mut self, devices: &[u32], _windows: &[u32]) -> Result {
        // A peer would keep a device that is not selected.
        self.pairs().for_each(|(gpu, peer)| gpu.disable_peer(peer));
        let mut old: Vec<Option<Device>> = std::mem::take(&mut self.devices).into_iter().map(Some).collect();
        self.devices.extend(devices.iter().filter_map(|number| old[*number as usize].take()));
        self.beside.keep_devices(&self.devices.iter().map(|device| device.number).collect::<Vec<_>>());
        self.pairs().for_each(|(gpu, peer)| gpu.enable_peer(peer));
        self.contexts = (0..self.devices.len() as u32).map(|n| (n, Context::new(n))).collect();
        Ok(())
    }

    fn make_context(&mut self, context: ContextId, device: u32, _flags: u32) -> Result {
        self.imitate.make_context();
        self.contexts.insert(context.0, Context::new(device));
        Ok(())
    }

    fn retire_context(&mut self, _context: ContextId) {}

    fn forget_context(&mut self, _context: ContextId) {}

    fn destroy_context(&mut self, context: ContextId) -> Result {
        self.forget_peers(context);
        self.contexts.remove(&context.0);
        Ok(())
    }

    fn begin_reset(
        &mut self,
        device: u32,
        streams: &mut Streams<SoftwareStream>,
        space: &Space<OwnedFd>,
    ) -> Result {
        self.before_waiting_call(streams, device)?;
        let fresh = Gpu::new(self.device(device)?.config.clone()).map_err(|e| code(&e))?;
        self.beside.set_device(self.device(device)?.number, &fresh)?;
        Software::map_again(device, &fresh, space)?;
        for (ordinal, other) in (0..).zip(&self.devices).filter(|(ordinal, _)| *ordinal != device) {
            let old = &self.device(device)?.gpu;
            if !self.imitate.no_peers {
                other.gpu.disable_peer(old);
                other.gpu.enable_peer(&fresh);
                fresh.enable_peer(&other.gpu);
                old.disable_peer(&other.gpu);
            }
            // A kernel of the other device may still use the old memory.
            let old = old.clone();
            streams::after_all(&other.gpu, &self.streams_of_device(streams, ordinal), move |_| drop(old));
        }
        let device = self.device_mut(device)?;
        (device.landing, device.sending) = (None, None);
        std::mem::replace(&mut device.gpu, fresh).cancel();
        device.context.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn reset(&mut self, device: u32) -> Result {
        self.forget_peers(ContextId(device));
        self.contexts.insert(device, Context::new(device));
        Ok(())
    }

    fn set_primary_flags(&mut self, _device: u32, _flags: u32) -> Result {
        Ok(())
    }

    fn limit(&mut self, context: ContextId, limit: u32) -> Result<u64> {
        let usual = properties::usual_limit(limit).ok_or(Status::NOT_SUPPORTED)?;
        Ok(self.context(context)?.limits.get(&limit).copied().unwrap_or(usual))
    }

    fn set_limit(&mut self, context: ContextId, limit: u32, value: u64) -> Result {
        properties::usual_limit(limit).ok_or(Status::NOT_SUPPORTED)?;
        let context = self.contexts.get_mut(&context.0).ok_or(Status::INVALID_CONTEXT)?;
        context.limits.insert(limit, value);
        if limit == properties::MALLOC_HEAP_SIZE {
            let device = context.device;
            self.device(device)?.gpu.set_heap_limit(value);
        }
        Ok(())
    }

    /// There is no cache.
    fn reset_persisting_cache(&mut self, _context: ContextId) -> Result {
        Ok(())
    }

    fn limit_bytes(&self, device: u32, limit: u32, value: u64) -> u64 {
        let Ok(device) = self.device(device) else { return 0 };
        match (limit, properties::usual_limit(limit)) {
            (properties::STACK_SIZE, Some(usual)) if value > usual => {
                let p = device.gpu.properties();
                let threads = u64::from(p.multiprocessors) * u64::from(p.max_threads_per_multiprocessor);
                value.saturating_mul(threads)
            }
            (properties::PRINTF_FIFO_SIZE | properties::MALLOC_HEAP_SIZE, _) => value,
            _ => 0,
        }
    }

    fn enable_peer(&mut self, context: ContextId, peer: ContextId) -> Result {
        if self.context(context)?.device == self.context(peer)?.device {
            return Err(Status::INVALID_DEVICE);
        }
        if self.imitate.no_peers {
            return Err(driver::PEER_ACCESS_UNSUPPORTED);
        }
        if self.peers.insert((context.0, peer.0)) { Ok(()) } else { Err(driver::PEER_ACCESS_ALREADY_ENABLED) }
    }

    fn disable_peer(&mut self, context: ContextId, peer: ContextId) -> Result {
        if self.peers.remove(&(context.0, peer.0)) { Ok(()) } else { Err(driver::PEER_ACCESS_NOT_ENABLED) }
    }

    fn end(&mut self, streams: &mut Streams<SoftwareStream>) {
        self.devices.iter().for_each(|d| d.gpu.cancel());
        streams.clear();
    }
}
