//! Modules, their functions and variables, and launches.

use host_bridge::endpoint::Sink;
use protocol::Status;
use protocol::handle::{ContextId, FunctionId};
use protocol::ops::Answer;
use protocol::ops::launch::*;
use protocol::ops::module::*;
use protocol::wire::{Wire, Writer};
use software_gpu::{Function, LaunchConfig};

use super::{Software, code};
use crate::driver::call::Call;
use crate::driver::gpu::Gpu as _;
use crate::driver::output::may_print;
use crate::driver::session::Session;

/// Bytes of an image at most.
pub(super) const MAX_IMAGE: u64 = 1 << 30;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: u32 = 8;
/// `CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH`, after which height and depth come.
const REQUIRED_CLUSTER: u32 = 11;
/// `CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`.
const NON_PORTABLE_CLUSTER: u32 = 14;
/// `CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE`.
const CLUSTER_SCHEDULING: u32 = 15;
/// `CU_LIMIT_STACK_SIZE`.
const STACK_SIZE: u32 = 0;
/// Number of function attributes that are told.
const ATTRIBUTES: u32 = 16;
/// Blocks of a cluster that every GPU with clusters has.
const PORTABLE_CLUSTER: u32 = 8;
/// `CUDA_ERROR_INVALID_CLUSTER_SIZE`.
const INVALID_CLUSTER_SIZE: Status = Status(912);
/// In place of an attribute: `cuFuncSetCacheConfig`.
const CACHE_CONFIG: u32 = 0x1_0000;

/// A loaded module.
pub(super) struct LoadedModule {
    pub(super) context: u32,
    module: software_gpu::Module,
    functions: Vec<LoadedFunction>,
}

struct LoadedFunction {
    function: Function,
    /// Registers of a thread, as they are told.
    registers: u32,
    /// What the program may ask for in dynamic shared memory, in bytes.
    dynamic_limit: u32,
    /// Attributes that the program has set and that change nothing here.
    carveout: i32,
    cluster_scheduling: i32,
    /// Dimensions of clusters that the program requires, where the kernel itself does not; zeros if it does not.
    cluster: [u32; 3],
    /// Whether clusters may be larger than is portable.
    non_portable: bool,
}

impl LoadedFunction {
    fn new(function: Function, registers: u32, dynamic_limit: u32) -> LoadedFunction {
        LoadedFunction {
            function,
            registers,
            dynamic_limit,
            carveout: -1,
            cluster_scheduling: 0,
            cluster: [0; 3],
            non_portable: false,
        }
    }

    /// The clusters that are required, by the kernel or by the program.
    fn required_cluster(&self) -> [u32; 3] {
        match self.function.info().required_cluster {
            [0, 0, 0] => self.cluster,
            own => own,
        }
    }

    /// Blocks of a cluster at most.
    fn max_cluster(&self) -> u32 {
        let most = self.function.info().max_cluster_blocks;
        if self.non_portable { most } else { most.min(PORTABLE_CLUSTER) }
    }

    /// The clusters of a launch that asks for `asked`, if it has any to speak of.
    fn clusters(&self, asked: Option<[u32; 3]>) -> Result<Option<[u32; 3]>, Status> {
        let required = Some(self.required_cluster()).filter(|&r| r != [0; 3]);
        let size = asked.or(required);
        let blocks = size.unwrap_or([1; 3]).iter().fold(1, |all: u32, &n| all.saturating_mul(n));
        if blocks > self.max_cluster() || required.is_some_and(|r| size != Some(r)) {
            return Err(INVALID_CLUSTER_SIZE);
        }
        Ok(size)
    }

    /// Blocks on the whole device at a time.
    fn resident(&self, block: [u32; 3], dynamic: u32) -> u32 {
        let threads = block.iter().fold(1, |all: u32, &n| all.saturating_mul(n));
        if threads == 0 || threads > self.function.info().max_threads {
            return 0;
        }
        self.function.max_resident_blocks(threads, dynamic)
    }

    fn attribute(&self, number: u32) -> Option<i32> {
        let info = self.function.info();
        Some(match number {
            0 => info.max_threads as i32,
            1 => info.shared_bytes as i32,
            2 => info.constant_bytes as i32,
            3 => info.local_bytes as i32,
            4 => self.registers as i32,
            5 => info.ptx_version as i32,
            // `BINARY_VERSION`: a client launches no function whose code is for no device.
            6 if info.unsupported.is_some() => 0,
            6 => 90,
            7 => 0,
            MAX_DYNAMIC_SHARED => self.dynamic_limit as i32,
            9 => self.carveout,
            10 => info.cluster_must_be_given.into(),
            REQUIRED_CLUSTER..NON_PORTABLE_CLUSTER => {
                self.required_cluster()[(number - REQUIRED_CLUSTER) as usize] as i32
            }
            NON_PORTABLE_CLUSTER => self.non_portable.into(),
            CLUSTER_SCHEDULING => self.cluster_scheduling,
            _ => return None,
        })
    }

    fn describe(&self) -> FunctionInfo {
        let info = self.function.info();
        FunctionInfo {
            name: info.name.clone(),
            params: info.params.iter().map(|p| Param { offset: p.offset, size: p.size }).collect(),
            attributes: (0..ATTRIBUTES).map_while(|n| self.attribute(n)).collect(),
        }
    }
}

impl LoadedModule {
    fn table(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let table =
            FunctionTable { functions: self.functions.iter().map(LoadedFunction::describe).collect() };
        table.put(&mut Writer(&mut bytes));
        bytes
    }
}

/// Writes `bytes` to the command's output if they fit.
pub(super) fn write_if_it_fits(
    cx: &mut Call,
    room: protocol::data::HostOut,
    bytes: &[u8],
) -> Result<(), Status> {
    if bytes.len() as u64 > room.0.len {
        return Ok(());
    }
    match cx.output(room)? {
        Sink::Mapped(mapped) => mapped.write(0, bytes),
        Sink::Outgoing(outgoing) => outgoing.write(bytes).map_err(|_| Status::DEVICE_UNAVAILABLE)?,
    }
    Ok(())
}

impl Software {
    /// Whether there is such a function; the call's context is its own from here on.
    pub(super) fn find_function(&mut self, cx: &mut Call, id: FunctionId) -> Result<(), Status> {
        self.function(cx, id).map(|_| ())
    }

    /// A kernel is launched: its context's stacks are as large as it needs them from then on.
    fn grow_stack(&mut self, context: ContextId, stack: u64) {
        if let Some(context) = self.contexts.get_mut(&context.0)
            && context.limits.get(&STACK_SIZE).is_none_or(|now| *now < stack)
            && super::properties::usual_limit(STACK_SIZE).is_none_or(|usual| usual < stack)
        {
            context.limits.insert(STACK_SIZE, stack);
        }
    }

    fn set_attribute(
        &mut self,
        cx: &mut Call,
        id: FunctionId,
        attribute: u32,
        value: i32,
    ) -> Result<(), Status> {
        let most = self.devices.first().map_or(0, |d| d.gpu.properties().shared_per_block_optin);
        let function = self.function(cx, id)?;
        match attribute {
            MAX_DYNAMIC_SHARED => {
                let fixed = function.function.info().shared_bytes;
                match u32::try_from(value) {
                    Ok(limit) if limit <= most.saturating_sub(fixed) => function.dynamic_limit = limit,
                    _ => return Err(Status::INVALID_VALUE),
                }
            }
            9 if (-1..=100).contains(&value) => function.carveout = value,
            REQUIRED_CLUSTER..NON_PORTABLE_CLUSTER if value >= 0 => {
                let (at, value) = ((attribute - REQUIRED_CLUSTER) as usize, value as u32);
                // Those that a kernel was compiled for it keeps.
                match function.function.info().required_cluster {
                    [0, 0, 0] => function.cluster[at] = value,
                    own if own[at] == value => {}
                    _ => return Err(Status::INVALID_VALUE),
                }
            }
            NON_PORTABLE_CLUSTER => function.non_portable = value != 0,
            // Clusters are spread as they come.
            CLUSTER_SCHEDULING if (0..=2).contains(&value) => function.cluster_scheduling = value,
            // A preference between caches that are not there.
            CACHE_CONFIG if (0..=3).contains(&value) => {}
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    fn function(&mut self, cx: &mut Call, id: FunctionId) -> Result<&mut LoadedFunction, Status> {
        let module = self.modules.get_mut(&id.module().0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(module.context);
        module.functions.get_mut(id.index() as usize).ok_or(Status::INVALID_HANDLE)
    }
}

impl ModuleOps<Call> for Session<Software> {
    fn module_load<'a>(
        &mut self,
        cx: &mut Call,
        op: ModuleLoad<'a>,
    ) -> Result<Answer<ModuleLoadReply>, Status> {
        cx.context = op.context;
        let device = self.context(op.context)?.device;
        if self.modules.contains_key(&op.module.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let image = cx.input(op.image)?.collect(MAX_IMAGE)?;
        self.gpu.before_waiting_call(&self.streams, device)?;
        let gpu = self.device(device)?.gpu.clone();
        let parts = super::link::unpack(&image).unwrap_or_else(|| vec![&image]);
        let module = match gpu.link_module(&parts) {
            Ok(module) => module,
            Err(error) => {
                tracing::warn!("module refused: {error}");
                let (info_size, prints, info_log) = (0, false, String::new());
                let (Status(result), error_log) = (code(&error), super::link::told(&error));
                return Ok(Answer::Now(ModuleLoadReply { result, info_size, prints, info_log, error_log }));
            }
        };
        let usual = gpu.properties().shared_per_block;
        let most_registers = super::link::most_registers(&image, &op.options);
        let mut functions = Vec::with_capacity(module.functions().len());
        for info in module.functions() {
            let function = module.function(&info.name).map_err(|e| code(&e))?;
            let dynamic_limit = usual.saturating_sub(info.shared_bytes);
            functions.push(LoadedFunction::new(function, info.registers.min(most_registers), dynamic_limit));
        }
        let error_log = super::link::told_of_kernels(module.functions());
        for reason in module.functions().iter().filter_map(|kernel| kernel.unsupported.as_ref()) {
            tracing::info!("a module was loaded without all of its kernels: {reason}");
        }
        let loaded = LoadedModule { context: op.context.0, module, functions };
        let table = loaded.table();
        write_if_it_fits(cx, op.info, &table)?;
        self.modules.insert(op.module.0, loaded);
        let capability = gpu.properties().compute_capability;
        let prints = parts.iter().any(|part| may_print(part, capability) == Some(true));
        let (info_size, info_log) = (table.len() as u64, String::new());
        Ok(Answer::Now(ModuleLoadReply { result: 0, info_size, prints, info_log, error_log }))
    }

    fn link_create(&mut self, cx: &mut Call, op: LinkCreate) -> Result<Answer<LinkCreateReply>, Status> {
        self.create_link(cx, &op).map(|()| Answer::Now(LinkCreateReply {}))
    }

    fn link_add<'a>(&mut self, cx: &mut Call, op: LinkAdd<'a>) -> Result<Answer<LinkAddReply>, Status> {
        self.add_to_link(cx, op).map(Answer::Now)
    }

    fn link_complete(
        &mut self,
        cx: &mut Call,
        op: LinkComplete,
    ) -> Result<Answer<LinkCompleteReply>, Status> {
        self.complete_link(cx, op).map(Answer::Now)
    }

    fn link_destroy(&mut self, cx: &mut Call, op: LinkDestroy) -> Result<(), Status> {
        self.destroy_link(cx, &op)
    }

    fn module_info(&mut self, cx: &mut Call, op: ModuleInfo) -> Result<Answer<ModuleInfoReply>, Status> {
        let module = self.modules.get(&op.module.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(module.context);
        let table = module.table();
        write_if_it_fits(cx, op.info, &table)?;
        Ok(Answer::Now(ModuleInfoReply { info_size: table.len() as u64 }))
    }

    fn module_unload(&mut self, cx: &mut Call, op: ModuleUnload) -> Result<(), Status> {
        let module = self.modules.remove(&op.module.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(module.context);
        // Kernels that still run hold what they need of it, but for its variables: those go when the context's work so far is done.
        let device = self.context(cx.context)?.device;
        self.gpu.before_waiting_call(&self.streams, device)?;
        let gpu = self.device(device)?.gpu.clone();
        super::streams::after_all(&gpu, &self.gpu.streams_of_device(&self.streams, device), move |_| {
            drop(module)
        });
        Ok(())
    }

    fn module_get_global<'a>(
        &mut self,
        cx: &mut Call,
        op: ModuleGetGlobal<'a>,
    ) -> Result<Answer<ModuleGetGlobalReply>, Status> {
        let module = self.modules.get(&op.module.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(module.context);
        let global = module.module.global(op.name).map_err(|e| code(&e))?;
        Ok(Answer::Now(ModuleGetGlobalReply {
            address: global.address,
            size: global.size,
            managed: global.managed,
        }))
    }

    fn function_set_attribute(
        &mut self,
        cx: &mut Call,
        op: FunctionSetAttribute,
    ) -> Result<Answer<FunctionSetAttributeReply>, Status> {
        self.set_attribute(cx, op.function, op.attribute, op.value)?;
        Ok(Answer::Now(FunctionSetAttributeReply {}))
    }

    fn function_preset(&mut self, cx: &mut Call, op: FunctionPreset) -> Result<(), Status> {
        self.set_attribute(cx, op.function, op.attribute, op.value)
    }

    fn function_attributes(
        &mut self,
        cx: &mut Call,
        op: FunctionAttributes,
    ) -> Result<Answer<FunctionAttributesReply>, Status> {
        let function = self.function(cx, op.function)?;
        let attributes = (0..).map_while(|number| function.attribute(number)).collect();
        Ok(Answer::Now(FunctionAttributesReply { attributes }))
    }

    fn occupancy_max_active_blocks(
        &mut self,
        cx: &mut Call,
        op: OccupancyMaxActiveBlocks,
    ) -> Result<Answer<OccupancyMaxActiveBlocksReply>, Status> {
        let function = self.function(cx, op.function)?;
        let dynamic = u32::try_from(op.dynamic_shared).map_err(|_| Status::INVALID_VALUE)?;
        if op.block_size == 0 || dynamic > 1 << 30 {
            return Err(Status::INVALID_VALUE);
        }
        let fits = op.block_size <= function.function.info().max_threads;
        let blocks = if fits { function.function.max_active_blocks(op.block_size, dynamic) } else { 0 };
        Ok(Answer::Now(OccupancyMaxActiveBlocksReply { blocks: blocks as i32 }))
    }

    fn occupancy_available_shared(
        &mut self,
        cx: &mut Call,
        op: OccupancyAvailableShared,
    ) -> Result<Answer<OccupancyAvailableSharedReply>, Status> {
        let function = self.function(cx, op.function)?;
        if op.block_size == 0 || op.block_size > function.function.info().max_threads {
            return Err(Status::INVALID_VALUE);
        }
        let left = function.function.available_shared(op.blocks, op.block_size);
        let bytes = left.ok_or(Status::INVALID_VALUE)?.min(function.dynamic_limit);
        Ok(Answer::Now(OccupancyAvailableSharedReply { bytes: bytes.into() }))
    }

    fn occupancy_max_active_clusters(
        &mut self,
        cx: &mut Call,
        op: OccupancyMaxActiveClusters,
    ) -> Result<Answer<OccupancyMaxActiveClustersReply>, Status> {
        let asked = asked(&op.attributes)?;
        let function = self.function(cx, op.function)?;
        let size = function.clusters(asked.cluster)?.unwrap_or([1; 3]).iter().product::<u32>();
        let resident = function.resident(op.block, op.dynamic_shared);
        // One worker runs all blocks of a cluster, so that one cluster always fits if one block does.
        let clusters = if resident == 0 { 0 } else { (resident / size.max(1)).max(1) };
        Ok(Answer::Now(OccupancyMaxActiveClustersReply { clusters: clusters as i32 }))
    }

    fn occupancy_max_potential_cluster_size(
        &mut self,
        cx: &mut Call,
        op: OccupancyMaxPotentialClusterSize,
    ) -> Result<Answer<OccupancyMaxPotentialClusterSizeReply>, Status> {
        let function = self.function(cx, op.function)?;
        let resident = function.resident(op.block, op.dynamic_shared);
        let size = if resident == 0 { 0 } else { function.max_cluster() };
        Ok(Answer::Now(OccupancyMaxPotentialClusterSizeReply { size: size as i32 }))
    }
}

/// What a launch's attributes ask for, as far as it means anything here.
#[derive(Default)]
struct Asked {
    cooperative: bool,
    cluster: Option<[u32; 3]>,
}

/// Reads a launch's attributes. Hints are left out; what would change the result is refused.
fn asked(attributes: &[LaunchAttribute]) -> Result<Asked, Status> {
    let mut asked = Asked::default();
    for attribute in attributes {
        let word =
            |i: usize| attribute.value[i * 4..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b));
        match attribute.id {
            // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            2 => asked.cooperative = word(0) != 0,
            // CLUSTER_DIMENSION
            4 => asked.cluster = Some([0, 1, 2].map(word)),
            // IGNORE, and hints: access policy, synchronization policy, cluster scheduling, programmatic serialization, priority, memory
            // synchronization domains, preferred cluster, shared memory carveout.
            0 | 1 | 3 | 5 | 6 | 8 | 9 | 10 | 11 | 14 => {}
            _ => return Err(Status::NOT_SUPPORTED),
        }
    }
    Ok(asked)
}

impl Software {
    /// A launch in a context, checked as far as the context's own tables tell.
    pub(super) fn prepare(
        &mut self,
        cx: &mut Call,
        context: ContextId,
        op: &Launch<'_>,
    ) -> Result<(Function, LaunchConfig), Status> {
        let asked = asked(&op.attributes)?;
        let function = self.function(cx, op.function)?;
        if cx.context != context {
            return Err(Status::INVALID_HANDLE);
        }
        if op.dynamic_shared > function.dynamic_limit {
            return Err(Status::INVALID_VALUE);
        }
        let config = LaunchConfig {
            grid: op.grid,
            block: op.block,
            dynamic_shared: op.dynamic_shared,
            cooperative: asked.cooperative,
            cluster: function.clusters(asked.cluster)?,
        };
        Ok((function.function.clone(), config))
    }
}

impl LaunchOps<Call> for Session<Software> {
    fn launch<'a>(&mut self, cx: &mut Call, op: Launch<'a>) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let (function, config) = self.prepare(cx, place.context, &op)?;
        self.grow_stack(place.context, function.info().local_bytes.into());
        place.stream.launch(&function, config, op.params).map_err(|e| {
            match e {
                software_gpu::Error::UnsupportedFunction { .. } => tracing::warn!("{e}"),
                _ => tracing::debug!("launch of {} refused: {e}", function.info().name),
            }
            code(&e)
        })
    }
}
