//! Modules, their functions and variables, and launches.

use std::borrow::Cow;

use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::launch::*;
use protocol::ops::module::*;
use protocol::wire::{Wire, Writer};
use software_gpu::{Function, FunctionInfo, LaunchConfig};

use super::activity::What;
use super::link::{self, Link};
use super::streams::{Place, SoftwareStream};
use super::{Software, code, properties, streams};
use crate::driver::call::{Call, Result};
use crate::driver::gpu::{GpuModules, GpuStreams, LinkInput, Loaded};
use crate::driver::output::may_print;
use crate::driver::streams::Streams;

/// Maximum size of an image, in bytes.
pub(super) const MAX_IMAGE: u64 = 1 << 30;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: u32 = 8;
/// `CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH`. Height and depth follow.
const REQUIRED_CLUSTER: u32 = 11;
/// `CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`.
const NON_PORTABLE_CLUSTER: u32 = 14;
/// `CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE`.
const CLUSTER_SCHEDULING: u32 = 15;
/// Number of function attributes in a module's table.
const ATTRIBUTES: u32 = 16;
/// Cluster size in blocks that every GPU with clusters supports.
const PORTABLE_CLUSTER: u32 = 8;
/// `CUDA_ERROR_INVALID_CLUSTER_SIZE`.
const INVALID_CLUSTER_SIZE: Status = Status(912);
/// Instead of an attribute: `cuFuncSetCacheConfig`.
const CACHE_CONFIG: u32 = 0x1_0000;

/// A module.
pub struct LoadedModule {
    module: software_gpu::Module,
    /// The maximum number of registers reported for its kernels.
    most_registers: u32,
    /// Dynamic plus static shared memory in bytes that a block can have without setting an attribute.
    usual_shared: u32,
}

impl LoadedModule {
    fn load(&self, info: &FunctionInfo) -> Result<LoadedFunction> {
        let function = self.module.function(&info.name).map_err(|e| code(&e))?;
        let dynamic_limit = self.usual_shared.saturating_sub(info.shared_bytes);
        Ok(LoadedFunction::new(function, info.registers.min(self.most_registers), dynamic_limit))
    }
}

/// A function of a module.
pub struct LoadedFunction {
    function: Function,
    /// Reported number of registers per thread.
    registers: u32,
    /// Maximum dynamic shared memory of a launch, in bytes.
    dynamic_limit: u32,
    /// Attributes that the program has set and that have no effect here.
    carveout: i32,
    cluster_scheduling: i32,
    /// Cluster dimensions that the program requires, if the kernel itself does not. Zeros: none.
    cluster: [u32; 3],
    /// Whether clusters may be larger than the portable size.
    non_portable: bool,
    /// The launch's parameter layout, if the client has read it from machine code and the PTX has another: in
    /// machine code, a parameter aligned to more than 16 bytes may follow a gap.
    places: Option<Vec<Param>>,
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
            places: None,
        }
    }

    /// Reported number of registers per thread.
    pub(super) fn registers(&self) -> u32 {
        self.registers
    }

    /// Converts a launch's parameters to the PTX's layout.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the launch lacks a parameter's bytes.
    fn arrange<'a>(&self, params: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        let Some(places) = &self.places else { return Ok(Cow::Borrowed(params)) };
        let info = self.function.info();
        let mut block = vec![0; info.param_bytes as usize];
        for (place, param) in places.iter().zip(&info.params) {
            let (from, to, size) = (place.offset as usize, param.offset as usize, param.size as usize);
            let bytes = from.checked_add(size).and_then(|end| params.get(from..end));
            let room = to.checked_add(size).and_then(|end| block.get_mut(to..end));
            room.ok_or(Status::INVALID_VALUE)?.copy_from_slice(bytes.ok_or(Status::INVALID_VALUE)?);
        }
        Ok(Cow::Owned(block))
    }

    /// The cluster dimensions that the kernel or the program requires.
    fn required_cluster(&self) -> [u32; 3] {
        match self.function.info().required_cluster {
            [0, 0, 0] => self.cluster,
            own => own,
        }
    }

    /// Maximum number of blocks per cluster.
    fn max_cluster(&self) -> u32 {
        let most = self.function.info().max_cluster_blocks;
        if self.non_portable { most } else { most.min(PORTABLE_CLUSTER) }
    }

    /// The cluster dimensions of a launch that requests `asked`.
    fn clusters(&self, asked: Option<[u32; 3]>) -> Result<Option<[u32; 3]>> {
        let required = Some(self.required_cluster()).filter(|&r| r != [0; 3]);
        let size = asked.or(required);
        let blocks = size.unwrap_or([1; 3]).iter().fold(1, |all: u32, &n| all.saturating_mul(n));
        if blocks > self.max_cluster() || required.is_some_and(|r| size != Some(r)) {
            return Err(INVALID_CLUSTER_SIZE);
        }
        Ok(size)
    }

    /// Maximum number of blocks that are resident on the whole device.
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
            // `BINARY_VERSION`. A client doesn't launch a function with 0, which means that there is no code
            // for any device.
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

    fn describe(&self) -> protocol::ops::module::FunctionInfo {
        let info = self.function.info();
        protocol::ops::module::FunctionInfo {
            name: info.name.clone(),
            params: params(info),
            attributes: (0..ATTRIBUTES).map_while(|n| self.attribute(n)).collect(),
        }
    }
}

/// A kernel's parameters.
fn params(info: &FunctionInfo) -> Vec<Param> {
    info.params.iter().map(|p| Param { offset: p.offset, size: p.size }).collect()
}

/// The launch attributes that have an effect here.
#[derive(Default)]
struct Asked {
    cooperative: bool,
    cluster: Option<[u32; 3]>,
}

/// Reads a launch's attributes. Ignores hints, and refuses attributes that would change the result.
fn asked(attributes: &[LaunchAttribute]) -> Result<Asked> {
    let mut asked = Asked::default();
    for attribute in attributes {
        let word =
            |i: usize| attribute.value[i * 4..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b));
        match attribute.id {
            // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            2 => asked.cooperative = word(0) != 0,
            // CLUSTER_DIMENSION
            4 => asked.cluster = Some([0, 1, 2].map(word)),
            // IGNORE, and hints: access policy, cluster scheduling, programmatic serialization, priority,
            // memory synchronization domains, preferred cluster, shared memory carveout.
            0 | 1 | 5 | 6 | 8 | 9 | 10 | 11 | 14 => {}
            _ => return Err(Status::NOT_SUPPORTED),
        }
    }
    Ok(asked)
}

/// A launch, checked against the function's attributes, and its parameters.
pub(super) fn prepare<'a>(
    function: &LoadedFunction,
    op: &Launch<'a>,
) -> Result<(Function, LaunchConfig, Cow<'a, [u8]>)> {
    let asked = asked(&op.attributes)?;
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
    Ok((function.function.clone(), config, function.arrange(op.params)?))
}

/// Logs why a launch was refused.
pub(super) fn refused(function: &Function, error: &software_gpu::Error) -> Status {
    match error {
        software_gpu::Error::UnsupportedFunction { .. } => tracing::warn!("{error}"),
        _ => tracing::debug!("launch of {} refused: {error}", function.info().name),
    }
    code(error)
}

impl Software {
    /// Increases the context's stack size to what a launched kernel needs, as CUDA does.
    pub(super) fn grow_stack(&mut self, context: ContextId, stack: u64) {
        if let Some(context) = self.contexts.get_mut(&context.0)
            && context.limits.get(&properties::STACK_SIZE).is_none_or(|now| *now < stack)
            && properties::usual_limit(properties::STACK_SIZE).is_none_or(|usual| usual < stack)
        {
            context.limits.insert(properties::STACK_SIZE, stack);
        }
    }
}

impl GpuModules for Software {
    type Module = LoadedModule;
    type Function = LoadedFunction;
    type Link = Link;
    type LaunchPlace = Place;
    const MAX_IMAGE: u64 = MAX_IMAGE;

    fn load_module(
        &mut self,
        _context: ContextId,
        device: u32,
        image: Vec<u8>,
        options: &[JitOption],
        wanted: bool,
    ) -> Result<Loaded<LoadedModule, LoadedFunction>> {
        let gpu = self.device(device)?.gpu.clone();
        let used = |gpu: &software_gpu::Gpu| gpu.memory_info().1.saturating_sub(gpu.memory_info().0);
        let before = used(&gpu);
        let parts = link::unpack(&image).unwrap_or_else(|| vec![&image]);
        let module = match gpu.link_module(&parts) {
            Ok(module) => module,
            Err(error) => {
                tracing::warn!("module refused: {error}");
                let logs = [String::new(), link::told(&error)];
                return Ok(Loaded { module: Err(code(&error)), prints: false, bytes: 0, logs });
            }
        };
        let usual_shared = gpu.properties().shared_per_block;
        let most_registers = link::most_registers(&image, options);
        let loaded = LoadedModule { module, most_registers, usual_shared };
        let module = &loaded.module;
        let infos = if wanted { module.functions() } else { &[] };
        let functions = infos.iter().map(|info| loaded.load(info)).collect::<Result<Vec<_>>>()?;
        let error_log = link::told_of_kernels(module.functions());
        for reason in module.functions().iter().filter_map(|kernel| kernel.unsupported.as_ref()) {
            tracing::info!("a module was loaded without all of its kernels: {reason}");
        }
        let capability = gpu.properties().compute_capability;
        let prints = parts.iter().any(|part| may_print(part, capability) == Some(true));
        let bytes = used(&gpu).saturating_sub(before);
        Ok(Loaded { module: Ok((loaded, functions)), prints, bytes, logs: [String::new(), error_log] })
    }

    fn bind_function(
        &mut self,
        _context: ContextId,
        module: &LoadedModule,
        name: &str,
        expected: &[Param],
    ) -> Result<LoadedFunction> {
        let function = module.module.function(name).map_err(|e| code(&e))?;
        let info = function.info();
        if let Some(why) = &info.unsupported {
            tracing::warn!("kernel {name} cannot be launched: line {}: {}", why.line, why.what);
            return Err(Status::NO_BINARY_FOR_GPU);
        }
        let params = params(info);
        if !params.iter().map(|param| param.size).eq(expected.iter().map(|param| param.size)) {
            tracing::error!(
                "kernel {name} is refused: the client has read {expected:?} in its image as the kernel's parameters, but its PTX has {params:?}"
            );
            return Err(Status::INVALID_IMAGE);
        }
        let places = (params != expected).then(|| expected.to_vec());
        Ok(LoadedFunction { places, ..module.load(info)? })
    }

    fn function_table<'a>(
        _module: &'a LoadedModule,
        functions: impl Iterator<Item = &'a LoadedFunction>,
    ) -> Cow<'a, [u8]> {
        let mut bytes = Vec::new();
        FunctionTable { functions: functions.map(LoadedFunction::describe).collect() }
            .put(&mut Writer(&mut bytes));
        Cow::Owned(bytes)
    }

    fn unload_module(
        &mut self,
        streams: &mut Streams<SoftwareStream>,
        _context: ContextId,
        device: u32,
        module: LoadedModule,
        functions: Vec<LoadedFunction>,
    ) -> Result {
        // Running kernels keep what they need of the module, except its variables. Those are freed when the
        // context's work so far is done.
        let gpu = self.device(device)?.gpu.clone();
        let streams = self.streams_of_device(streams, device);
        streams::after_all(&gpu, &streams, move |_| drop((module, functions)));
        Ok(())
    }

    fn module_global(
        &mut self,
        _context: ContextId,
        module: &LoadedModule,
        name: &str,
    ) -> Result<ModuleGetGlobalReply> {
        let global = module.module.global(name).map_err(|e| code(&e))?;
        Ok(ModuleGetGlobalReply { address: global.address, size: global.size, managed: global.managed })
    }

    fn set_function_attribute(
        &mut self,
        _context: ContextId,
        function: &mut LoadedFunction,
        attribute: u32,
        value: i32,
    ) -> Result {
        let most = self.devices.first().map_or(0, |d| d.gpu.properties().shared_per_block_optin);
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
                // A kernel keeps the dimensions it was compiled for.
                match function.function.info().required_cluster {
                    [0, 0, 0] => function.cluster[at] = value,
                    own if own[at] == value => {}
                    _ => return Err(Status::INVALID_VALUE),
                }
            }
            NON_PORTABLE_CLUSTER => function.non_portable = value != 0,
            // Clusters are always scheduled in order.
            CLUSTER_SCHEDULING if (0..=2).contains(&value) => function.cluster_scheduling = value,
            // A preference between caches that do not exist here.
            CACHE_CONFIG if (0..=3).contains(&value) => {}
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    fn function_attributes(&mut self, _context: ContextId, function: &LoadedFunction) -> Result<Vec<i32>> {
        Ok((0..).map_while(|number| function.attribute(number)).collect())
    }

    fn max_active_blocks(
        &mut self,
        _context: ContextId,
        function: &LoadedFunction,
        op: &OccupancyMaxActiveBlocks,
    ) -> Result<i32> {
        let dynamic = u32::try_from(op.dynamic_shared).map_err(|_| Status::INVALID_VALUE)?;
        if op.block_size == 0 || dynamic > 1 << 30 {
            return Err(Status::INVALID_VALUE);
        }
        let fits = op.block_size <= function.function.info().max_threads;
        Ok(if fits { function.function.max_active_blocks(op.block_size, dynamic) as i32 } else { 0 })
    }

    fn available_shared(
        &mut self,
        _context: ContextId,
        function: &LoadedFunction,
        op: &OccupancyAvailableShared,
    ) -> Result<u64> {
        if op.block_size == 0 || op.block_size > function.function.info().max_threads {
            return Err(Status::INVALID_VALUE);
        }
        let left = function.function.available_shared(op.blocks, op.block_size);
        Ok(left.ok_or(Status::INVALID_VALUE)?.min(function.dynamic_limit).into())
    }

    fn max_active_clusters(
        &mut self,
        _context: ContextId,
        function: &LoadedFunction,
        op: &OccupancyMaxActiveClusters,
    ) -> Result<i32> {
        let asked = asked(&op.attributes)?;
        // Without clusters, NVIDIA's driver returns 0.
        let Some(size) = function.clusters(asked.cluster)? else { return Ok(0) };
        let size = size.iter().product::<u32>();
        let resident = function.resident(op.block, op.dynamic_shared);
        // One worker runs all blocks of a cluster, so a cluster always fits if a block does.
        let clusters = if resident == 0 { 0 } else { (resident / size.max(1)).max(1) };
        Ok(clusters as i32)
    }

    fn max_cluster_size(
        &mut self,
        _context: ContextId,
        function: &LoadedFunction,
        op: &OccupancyMaxPotentialClusterSize,
    ) -> Result<i32> {
        let resident = function.resident(op.block, op.dynamic_shared);
        Ok(if resident == 0 { 0 } else { function.max_cluster() as i32 })
    }

    fn enter_to_launch(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<SoftwareStream>,
        id: StreamId,
    ) -> Result<Place> {
        self.enter_stream(cx, streams, id)
    }

    fn launch(&mut self, place: &Place, function: &mut LoadedFunction, op: &Launch<'_>) -> Result {
        let registers = function.registers;
        let (function, config, params) = prepare(function, op)?;
        self.grow_stack(place.context, function.info().local_bytes.into());
        let timer = self.timer(place, || What::kernel(&function, &config, registers));
        timer.around(place, || {
            place.stream.launch(&function, config, &params).map_err(|e| refused(&function, &e))
        })
    }

    fn make_link(&mut self, _context: ContextId, options: &[JitOption]) -> Result<Link> {
        Ok(Link::new(options))
    }

    fn link_add(
        &mut self,
        _context: ContextId,
        device: u32,
        link: &mut Link,
        input: LinkInput<'_>,
    ) -> Result<(Status, [String; 2])> {
        Ok(link.add_input(&self.device(device)?.gpu, input))
    }

    fn link_complete(
        &mut self,
        _context: ContextId,
        device: u32,
        link: &mut Link,
    ) -> Result<(Status, [String; 2])> {
        Ok(link.complete(&self.device(device)?.gpu))
    }

    fn link_image(link: &Link) -> Option<&[u8]> {
        link.image()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use software_gpu::{Gpu, GpuConfig};

    const PTX: &[u8] = b".version 8.0\n.target sm_90\n.address_size 64\n\
        .visible .entry aligned(.param .u32 first, .param .align 64 .b8 second[64]) { ret; }\n\0";

    /// The kernel of a client that has read its parameters at these places.
    fn read_at(places: [(u32, u32); 2]) -> LoadedFunction {
        let gpu = Gpu::new(GpuConfig { workers: 1, ..GpuConfig::default() }).unwrap();
        let function = gpu.link_module(&[PTX]).unwrap().function("aligned").unwrap();
        let places = places.map(|(offset, size)| Param { offset, size }).to_vec();
        LoadedFunction { places: Some(places), ..LoadedFunction::new(function, 16, 0) }
    }

    #[test]
    fn the_launch_attributes_of_the_protocol_are_those_taken() {
        for id in 0..64 {
            let taken = asked(&[LaunchAttribute { id, value: [0; 64] }]).is_ok();
            assert_eq!(taken, PASSED_ON.contains(&id), "{id}");
        }
    }

    #[test]
    fn parameters_move_from_machine_codes_layout_to_ptxs() {
        let function = read_at([(0, 4), (48, 64)]);
        let of_ptx: Vec<(u32, u32)> =
            function.function.info().params.iter().map(|param| (param.offset, param.size)).collect();
        assert_eq!(of_ptx, [(0, 4), (64, 64)]);
        let given: Vec<u8> = (1..=112).collect();
        let arranged = function.arrange(&given).unwrap();
        assert_eq!(
            (&arranged[..4], &arranged[4..64], &arranged[64..]),
            (&given[..4], &[0; 60][..], &given[48..])
        );
    }

    #[test]
    fn places_outside_a_launchs_parameters_are_refused() {
        for (offset, given) in [(48, 111), (u32::MAX, 112), (48, 0)] {
            let arranged = read_at([(0, 4), (offset, 64)]).arrange(&vec![0; given]).map(drop);
            assert_eq!(arranged, Err(Status::INVALID_VALUE), "{offset} {given}");
        }
    }
}
