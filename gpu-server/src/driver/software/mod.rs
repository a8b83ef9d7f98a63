//! The backend without a GPU: commands run on `software-gpu`, which executes PTX on CPU threads.
//!
//! - [`streams`]: streams, their order with the legacy default stream, steps that always end; [`stream_attributes`], [`stream_memory`]: their attributes and memory operations;
//! - [`transfer`]: copies and fills;
//! - [`graph`]: lists of operations that are launched together; [`conditional`]: those whose conditions decide;
//! - [`green`]: green contexts;
//! - [`array`]: arrays, textures and surfaces; [`memory`]: device memory; [`mirror`]: pinned memory that kernels use;
//! - [`kernels`]: modules and launches; [`link`]: the linker;
//! - [`properties`]: what a device says of itself; [`imitate`]: how NVIDIA's driver keeps its caller waiting, for tests.
//!
//! One [`Gpu`] is one device; its contexts share its error, as they share nothing else worth telling apart here.

mod array;
mod conditional;
mod graph;
mod green;
mod imitate;
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

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_DEVICES};
use protocol::handle::ContextId;
use protocol::ops::context::*;
use protocol::ops::device::*;
use protocol::ops::{Answer, MayBlock};
use software_gpu::{Gpu, GpuConfig};

use self::array::Arrays;
use self::imitate::Delays;
pub use self::imitate::Imitate;
use self::kernels::LoadedModule;
use self::mirror::{Granules, Reach};
use self::stream_memory::Bell;
use self::streams::{Lane, Moment};
use super::Unavailable;
use super::call::{Call, Errors, check_selection};
use super::gpu::{self as driver, GpuSharedEvents};
use super::output::{self, Output};
use super::session::Session;
use crate::config::Backing;

/// The name of every device.
const NAME: &str = "rgpu software GPU";
/// What is answered to `cuDriverGetVersion`.
const DRIVER_VERSION: u32 = 13000;

/// The backend.
pub struct Software {
    devices: Vec<Device>,
    output: Arc<Output>,
    errors: Option<Errors>,
    contexts: HashMap<u32, Context>,
    lanes: HashMap<u32, Lane>,
    events: HashMap<u32, Moment>,
    modules: HashMap<u32, LoadedModule>,
    links: HashMap<u32, link::Link>,
    arrays: Arrays,
    /// What mirrors take.
    granules: Granules,
    beside: Arc<Reach>,
    graphs: graph::Graphs,
    greens: green::Greens,
    drafts: conditional::Drafts,
    /// Rung by memory operations of streams.
    bell: Arc<Bell>,
    imitate: Imitate,
    delays: Delays,
}

struct Device {
    gpu: Gpu,
    /// Among the server's.
    number: u32,
    config: GpuConfig,
    /// Something has needed its context. Nothing here does, but making one takes NVIDIA's driver its time.
    context: AtomicBool,
}

struct Context {
    device: u32,
    /// Counts the operations of its legacy default stream.
    legacy: u64,
    limits: HashMap<u32, u64>,
}

impl Context {
    fn new(device: u32) -> Context {
        Context { device, legacy: 0, limits: HashMap::new() }
    }
}

/// Says in the log what ended a device's work, and to the client what CUDA says of a failed assertion.
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

/// The server's numbers of the devices that are shared, in the order of a session's ordinals.
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
            devices.push(Device { gpu, number, config, context });
        }
        let contexts = (0..devices.len() as u32).map(|n| (n, Context::new(n))).collect();
        Ok(Software {
            devices,
            output,
            errors: None,
            contexts,
            lanes: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            links: HashMap::new(),
            arrays: Arrays::default(),
            granules: Granules::default(),
            beside: Arc::default(),
            graphs: graph::Graphs::default(),
            greens: green::Greens::default(),
            drafts: conditional::Drafts::default(),
            bell: Arc::default(),
            imitate: backing.software_imitate,
            delays: Delays::new(&backing.software_imitate),
        })
    }

    /// Something needs the device's context, which is made if it was not yet.
    fn need_context(&self, device: u32) -> Result<(), Status> {
        if !self.device(device)?.context.swap(true, Ordering::Relaxed) {
            tracing::debug!("making a context of device {device}");
            self.imitate.make_context();
        }
        Ok(())
    }

    /// A call begins for which NVIDIA's driver waits until all work on the device is done.
    fn begin_waiting_call(&mut self, device: u32) -> Result<(), Status> {
        self.delays.delay();
        if self.imitate.waiting_calls {
            let gpu = self.device(device)?.gpu.clone();
            let (done, all_done) = std::sync::mpsc::channel::<()>();
            // Nothing is sent: the sender is dropped with the last step, also on a device that has failed.
            streams::after_all(&gpu, &self.lanes_of_device(device), move |_| drop(done));
            let _ = all_done.recv();
        }
        Ok(())
    }

    fn device(&self, ordinal: u32) -> Result<&Device, Status> {
        self.devices.get(ordinal as usize).ok_or(Status::INVALID_DEVICE)
    }

    fn context(&self, id: ContextId) -> Result<&Context, Status> {
        self.contexts.get(&id.0).ok_or(Status::INVALID_CONTEXT)
    }

    fn errors(&self) -> Result<&Errors, Status> {
        self.errors.as_ref().ok_or(Status::NOT_INITIALIZED)
    }
}

impl Session<Software> {
    /// Checks a range of the session's, and finds the GPU through which it is reached.
    fn checked(&self, address: u64, len: u64, home: u32) -> Result<Gpu, Status> {
        let device = self.check_range(address, len, home)?;
        self.device(device).map(|device| device.gpu.clone())
    }

    /// Forgets everything that belongs to a context.
    fn clear_context(&mut self, context: u32) {
        self.gpu.lanes.retain(|_, lane| lane.context != context);
        self.events.retain(|_, event| event.context != context);
        self.modules.retain(|_, module| module.context != context);
        self.links.retain(|_, link| link.context != context);
        self.forget_arrays(context);
        self.forget_host_views(context);
        self.graphs.retain(|_, graph| graph.context != context);
        self.drafts.forget_context(context);
    }
}

impl GpuSharedEvents for Software {
    const SHARES_EVENTS: bool = false;
}

impl driver::Gpu for Software {
    const NAME: &'static str = "software";
    type Beside = Reach;

    fn names(&self) -> Vec<String> {
        self.devices.iter().map(|d| d.gpu.properties().name.clone()).collect()
    }

    fn warm(&mut self) -> Result<Option<u64>, Unavailable> {
        self.need_context(0).map_err(|status| format!("software device 0: {status}"))?;
        Ok(None)
    }

    fn begin(&mut self, client: &Arc<dyn Client>) {
        self.output.serve(Arc::clone(client));
        self.errors = Some(Errors::new(Arc::clone(client)));
    }

    fn may_wait(&self, may_block: MayBlock, _body: &[u8]) -> bool {
        self.imitate.waiting_calls && may_block == MayBlock::Context
    }

    fn beside(&self) -> &Arc<Reach> {
        &self.beside
    }

    fn enter(&mut self, context: ContextId) -> Result<(), Status> {
        self.context(context).map(|_| ())
    }

    fn before_waiting_call(&mut self, device: u32) -> Result<(), Status> {
        self.begin_waiting_call(device)
    }

    fn after_device(&mut self, device: u32, _seq: u64, end: impl FnOnce(Status) + Send + 'static) {
        let Ok(gpu) = self.device(device).map(|device| device.gpu.clone()) else { return };
        let lanes = self.lanes_of_device(device);
        if lanes.iter().all(|lane| lane.query().unwrap_or(true)) {
            end(gpu.status().map_or_else(|e| code(&e), |()| Status::SUCCESS));
        } else {
            streams::after_all(&gpu, &lanes, end);
        }
    }

    fn end(&mut self) {
        self.beside.tickets.release_all();
        self.devices.iter().for_each(|d| d.gpu.cancel());
        self.lanes.clear();
    }
}

impl DeviceOps<Call> for Session<Software> {
    fn session_info(&mut self, cx: &mut Call, _op: SessionInfo) -> Result<Answer<SessionInfoReply>, Status> {
        Ok(Answer::Now(SessionInfoReply {
            device_count: self.devices.len() as u32,
            driver_version: DRIVER_VERSION,
            backend: "software".into(),
            server: crate::parent::server_name(),
            // Mapped memory is read by the stream itself.
            reads_late: cx.client.reads_late() || !cx.client.streams_data(),
        }))
    }

    fn device_info(&mut self, _cx: &mut Call, op: DeviceInfo) -> Result<Answer<DeviceInfoReply>, Status> {
        let device = self.device(op.device)?;
        Ok(Answer::Now(properties::describe(device.number, device.gpu.properties())))
    }

    fn peer_info(&mut self, _cx: &mut Call, op: PeerInfo) -> Result<Answer<PeerInfoReply>, Status> {
        self.device(op.device)?;
        self.device(op.peer)?;
        // Copies between devices work; a kernel of one cannot reach the other's memory.
        Ok(Answer::Now(PeerInfoReply {
            can_access: false,
            attributes: vec![0; PEER_ATTRIBUTES],
            atomics: vec![0; ATOMIC_OPERATIONS],
        }))
    }

    fn select_devices(
        &mut self,
        _cx: &mut Call,
        op: SelectDevices,
    ) -> Result<Answer<SelectDevicesReply>, Status> {
        let untouched = self.lanes.is_empty()
            && self.events.is_empty()
            && self.modules.is_empty()
            && self.contexts.len() == self.devices.len()
            && self.has_no_memory();
        if !untouched {
            return Err(Status::NOT_PERMITTED);
        }
        check_selection(&op.devices, self.devices.len() as u32)?;
        let mut old: Vec<Option<Device>> = std::mem::take(&mut self.devices).into_iter().map(Some).collect();
        self.devices.extend(op.devices.iter().filter_map(|number| old[*number as usize].take()));
        self.contexts = (0..self.devices.len() as u32).map(|n| (n, Context::new(n))).collect();
        self.clear_windows(op.devices.len());
        Ok(Answer::Now(SelectDevicesReply {}))
    }
}

impl ContextOps<Call> for Session<Software> {
    fn device_output(
        &mut self,
        _cx: &mut Call,
        _op: DeviceOutput,
    ) -> Result<Answer<DeviceOutputReply>, Status> {
        Ok(Answer::Now(self.output.fetch()))
    }

    fn context_create(
        &mut self,
        cx: &mut Call,
        op: ContextCreate,
    ) -> Result<Answer<ContextCreateReply>, Status> {
        cx.context = op.context;
        self.device(op.device)?;
        if op.context.0 < MAX_DEVICES
            || op.context.0 >= MAX_CONTEXTS
            || self.contexts.contains_key(&op.context.0)
        {
            return Err(Status::INVALID_CONTEXT);
        }
        self.imitate.make_context();
        self.contexts.insert(op.context.0, Context::new(op.device));
        Ok(Answer::Now(ContextCreateReply {}))
    }

    fn context_destroy(
        &mut self,
        cx: &mut Call,
        op: ContextDestroy,
    ) -> Result<Answer<ContextDestroyReply>, Status> {
        cx.context = op.context;
        let device = self.context(op.context)?.device;
        if op.context.0 < MAX_DEVICES {
            return Err(Status::INVALID_CONTEXT);
        }
        self.begin_waiting_call(device)?;
        self.contexts.remove(&op.context.0);
        self.clear_context(op.context.0);
        Ok(Answer::Now(ContextDestroyReply {}))
    }

    fn primary_reset(
        &mut self,
        cx: &mut Call,
        op: PrimaryReset,
    ) -> Result<Answer<PrimaryResetReply>, Status> {
        cx.context = ContextId(op.device);
        let config = self.device(op.device)?.config.clone();
        self.beside.tickets.release_all();
        self.begin_waiting_call(op.device)?;
        let fresh = Gpu::new(config).map_err(|e| code(&e))?;
        Software::map_again(op.device, &fresh, &self.space)?;
        let device = self.devices.get_mut(op.device as usize).ok_or(Status::INVALID_DEVICE)?;
        std::mem::replace(&mut device.gpu, fresh).cancel();
        device.context.store(false, Ordering::Relaxed);
        self.unback_all(op.device);
        let of_device: Vec<u32> =
            self.contexts.iter().filter(|(_, c)| c.device == op.device).map(|(id, _)| *id).collect();
        for context in of_device {
            self.clear_context(context);
            self.errors()?.clear(ContextId(context));
        }
        self.contexts.retain(|id, c| c.device != op.device || *id == op.device);
        self.contexts.insert(op.device, Context::new(op.device));
        self.greens.forget(op.device);
        Ok(Answer::Now(PrimaryResetReply {}))
    }

    fn primary_set_flags(
        &mut self,
        cx: &mut Call,
        op: PrimarySetFlags,
    ) -> Result<Answer<PrimarySetFlagsReply>, Status> {
        cx.context = ContextId(op.device);
        self.device(op.device)?;
        // Scheduling flags say how the calling thread waits, which is the client's affair.
        Ok(Answer::Now(PrimarySetFlagsReply {}))
    }

    fn context_synchronize(
        &mut self,
        cx: &mut Call,
        op: ContextSynchronize,
    ) -> Result<Answer<ContextSynchronizeReply>, Status> {
        cx.context = op.context;
        self.synchronize_context(cx, op.context)?;
        Ok(Answer::Later)
    }

    fn context_get_limit(
        &mut self,
        cx: &mut Call,
        op: ContextGetLimit,
    ) -> Result<Answer<ContextGetLimitReply>, Status> {
        cx.context = op.context;
        let context = self.context(op.context)?;
        let usual = properties::usual_limit(op.limit).ok_or(Status::NOT_SUPPORTED)?;
        Ok(Answer::Now(ContextGetLimitReply {
            value: context.limits.get(&op.limit).copied().unwrap_or(usual),
        }))
    }

    fn context_set_limit(
        &mut self,
        cx: &mut Call,
        op: ContextSetLimit,
    ) -> Result<Answer<ContextSetLimitReply>, Status> {
        cx.context = op.context;
        properties::usual_limit(op.limit).ok_or(Status::NOT_SUPPORTED)?;
        let context = self.contexts.get_mut(&op.context.0).ok_or(Status::INVALID_CONTEXT)?;
        context.limits.insert(op.limit, op.value);
        let device = context.device;
        if op.limit == properties::MALLOC_HEAP_SIZE {
            self.device(device)?.gpu.set_heap_limit(op.value);
        }
        Ok(Answer::Now(ContextSetLimitReply {}))
    }
}
