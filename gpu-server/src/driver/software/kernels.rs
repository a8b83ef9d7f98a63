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

/// Bytes of an image at most.
pub(super) const MAX_IMAGE: u64 = 1 << 30;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: u32 = 8;
/// Number of function attributes that are told.
const ATTRIBUTES: u32 = 16;
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
    /// What the program may ask for in dynamic shared memory, in bytes.
    dynamic_limit: u32,
    /// Attributes that the program has set and that change nothing here.
    carveout: i32,
}

impl LoadedFunction {
    fn attribute(&self, number: u32) -> Option<i32> {
        let info = self.function.info();
        Some(match number {
            0 => info.max_threads as i32,
            1 => info.shared_bytes as i32,
            2 => info.constant_bytes as i32,
            3 => info.local_bytes as i32,
            4 => info.registers as i32,
            5 => info.ptx_version as i32,
            6 => 90,
            7 => 0,
            MAX_DYNAMIC_SHARED => self.dynamic_limit as i32,
            9 => self.carveout,
            10..ATTRIBUTES => 0,
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

    fn function(&mut self, cx: &mut Call, id: FunctionId) -> Result<&mut LoadedFunction, Status> {
        let module = self.modules.get_mut(&id.module().0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(module.context);
        module.functions.get_mut(id.index() as usize).ok_or(Status::INVALID_HANDLE)
    }
}

impl ModuleOps<Call> for Software {
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
        let gpu = self.device(device)?.gpu.clone();
        let parts = super::link::unpack(&image).unwrap_or_else(|| vec![&image]);
        let module = gpu.link_module(&parts).map_err(|e| {
            tracing::warn!("module refused: {e}");
            code(&e)
        })?;
        let usual = gpu.properties().shared_per_block;
        let mut functions = Vec::with_capacity(module.functions().len());
        for info in module.functions() {
            let function = module.function(&info.name).map_err(|e| code(&e))?;
            let dynamic_limit = usual.saturating_sub(info.shared_bytes);
            functions.push(LoadedFunction { function, dynamic_limit, carveout: -1 });
        }
        let loaded = LoadedModule { context: op.context.0, module, functions };
        let table = loaded.table();
        write_if_it_fits(cx, op.info, &table)?;
        self.modules.insert(op.module.0, loaded);
        Ok(Answer::Now(ModuleLoadReply { info_size: table.len() as u64, info_log: String::new() }))
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
        let gpu = self.device(device)?.gpu.clone();
        super::streams::after_all(&gpu, &self.lanes_of_device(device), move |_| drop(module));
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
        let most = self.devices.first().map_or(0, |d| d.gpu.properties().shared_per_block_optin);
        let function = self.function(cx, op.function)?;
        match op.attribute {
            MAX_DYNAMIC_SHARED => {
                let fixed = function.function.info().shared_bytes;
                match u32::try_from(op.value) {
                    Ok(value) if value <= most.saturating_sub(fixed) => function.dynamic_limit = value,
                    _ => return Err(Status::INVALID_VALUE),
                }
            }
            9 if (-1..=100).contains(&op.value) => function.carveout = op.value,
            // A preference between caches that are not there.
            CACHE_CONFIG if (0..=3).contains(&op.value) => {}
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(Answer::Now(FunctionSetAttributeReply {}))
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
}

/// What a launch's attributes ask for, as far as it means anything here. Hints are left out; what would change the result is refused.
fn cooperative(attributes: &[LaunchAttribute]) -> Result<bool, Status> {
    let mut cooperative = false;
    for attribute in attributes {
        let word =
            |i: usize| attribute.value[i * 4..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b));
        match attribute.id {
            // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            2 => cooperative = word(0) != 0,
            // CLUSTER_DIMENSION: one block is no cluster.
            4 if (0..3).all(|i| word(i) <= 1) => {}
            // IGNORE, and hints: access policy, synchronization policy, cluster scheduling, programmatic serialization, priority, memory
            // synchronization domains, preferred cluster, shared memory carveout.
            0 | 1 | 3 | 5 | 6 | 8 | 9 | 10 | 11 | 14 => {}
            _ => return Err(Status::NOT_SUPPORTED),
        }
    }
    Ok(cooperative)
}

/// There are none: every operation answers "not supported".
impl protocol::ops::texture::TextureOps<Call> for Software {}

impl Software {
    /// A launch in a context, checked as far as the context's own tables tell.
    pub(super) fn prepare(
        &mut self,
        cx: &mut Call,
        context: ContextId,
        op: &Launch<'_>,
    ) -> Result<(Function, LaunchConfig), Status> {
        let cooperative = cooperative(&op.attributes)?;
        let function = self.function(cx, op.function)?;
        if cx.context != context {
            return Err(Status::INVALID_HANDLE);
        }
        if op.dynamic_shared > function.dynamic_limit {
            return Err(Status::INVALID_VALUE);
        }
        let config =
            LaunchConfig { grid: op.grid, block: op.block, dynamic_shared: op.dynamic_shared, cooperative };
        Ok((function.function.clone(), config))
    }
}

impl LaunchOps<Call> for Software {
    fn launch<'a>(&mut self, cx: &mut Call, op: Launch<'a>) -> Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let (function, config) = self.prepare(cx, place.context, &op)?;
        place.stream.launch(&function, config, op.params).map_err(|e| {
            tracing::debug!("launch of {} refused: {e}", function.info().name);
            code(&e)
        })
    }
}
