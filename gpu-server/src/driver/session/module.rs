//! Modules, their functions and variables, launches, and the linker.

use std::collections::HashMap;

use protocol::Status;
use protocol::handle::{ContextId, FunctionId};
use protocol::ops::launch::*;
use protocol::ops::module::*;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::{Gpu, GpuModules, LinkInput, Loaded};
use crate::driver::ids::Ids;
use crate::driver::quota::Charge;
use crate::driver::ranges::Ranges;

/// Most linkers of a session.
const MOST_LINKS: usize = 256;

/// What a session has of this chapter.
pub(super) struct Modules<G: GpuModules> {
    modules: Ids<Module<G>>,
    links: HashMap<u32, Link<G::Link>>,
}

/// A loaded module.
struct Module<G: GpuModules> {
    context: ContextId,
    native: G::Module,
    functions: Vec<Function<G::Function>>,
    /// Variables that the client has asked for.
    globals: Ranges,
    _charge: Charge,
}

/// A function. `F`: the GPU's.
struct Function<F> {
    native: F,
    /// Whether the GPU has accepted a launch of it: with the first launch NVIDIA's driver loads its code, which may wait for the device.
    launched: bool,
}

/// A linker at work. `L`: the GPU's.
struct Link<L> {
    context: ContextId,
    native: L,
}

impl<G: GpuModules> Default for Modules<G> {
    fn default() -> Self {
        Modules { modules: Ids::default(), links: HashMap::new() }
    }
}

impl<G: GpuModules> Modules<G> {
    /// Whether there is no module.
    pub(super) fn is_empty(&self) -> bool {
        self.modules.is_empty() && self.links.is_empty()
    }

    /// Whether `len` bytes from `address` are a variable that the client has asked for.
    pub(super) fn has_variable(&self, address: u64, len: u64) -> bool {
        self.modules.values().any(|module| module.globals.holds(address, len))
    }

    /// A context is gone, with its modules and linkers.
    pub(super) fn forget_context(&mut self, context: ContextId) {
        self.modules.retain(|_, module| module.context != context);
        self.links.retain(|_, link| link.context != context);
    }

    /// A function that is about to be launched in the call's context; the call's context is the function's from here on.
    fn function_to_launch(&mut self, cx: &mut Call, id: FunctionId) -> Result<&mut Function<G::Function>> {
        let context = cx.context;
        let module = self.modules.get_mut(&id.module().0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = module.context;
        let function = module.functions.get_mut(id.index() as usize).ok_or(Status::INVALID_HANDLE)?;
        if cx.context != context {
            return Err(Status::INVALID_HANDLE);
        }
        Ok(function)
    }

    /// A function of a context, for a node of a graph there.
    pub(super) fn function(&self, context: ContextId, id: FunctionId) -> Result<&G::Function> {
        let module = self.module(id.module())?;
        let function = module.functions.get(id.index() as usize).filter(|_| module.context == context);
        function.map(|function| &function.native).ok_or(Status::INVALID_HANDLE)
    }

    /// A graph that launches this function was made.
    pub(super) fn note_launched(&mut self, id: FunctionId) {
        let module = self.modules.get_mut(&id.module().0);
        if let Some(function) = module.and_then(|module| module.functions.get_mut(id.index() as usize)) {
            function.launched = true;
        }
    }

    /// Whether a launch, of which this is the body, is the first of its function.
    pub(super) fn is_first_launch(&self, body: &[u8]) -> bool {
        let Some(id) = body.first_chunk::<8>().map(|id| FunctionId(u64::from_le_bytes(*id))) else {
            return false;
        };
        let module = self.modules.get(&id.module().0);
        let function = module.and_then(|module| module.functions.get(id.index() as usize));
        function.is_some_and(|function| !function.launched)
    }

    fn module(&self, id: protocol::handle::ModuleId) -> Result<&Module<G>> {
        self.modules.get(&id.0).ok_or(Status::INVALID_HANDLE)
    }
}

impl<G: Gpu> Session<G> {
    /// Does something with a function, whose context was entered and is the call's from here on.
    fn with_function<R>(
        &mut self,
        cx: &mut Call,
        id: FunctionId,
        f: impl FnOnce(&mut G, ContextId, &mut G::Function) -> Result<R>,
    ) -> Result<R> {
        let module = self.modules.modules.get_mut(&id.module().0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = module.context;
        let function = module.functions.get_mut(id.index() as usize).ok_or(Status::INVALID_HANDLE)?;
        self.gpu.enter(cx.context)?;
        f(&mut self.gpu, cx.context, &mut function.native)
    }

    fn set_attribute(&mut self, cx: &mut Call, id: FunctionId, attribute: u32, value: i32) -> Result {
        self.with_function(cx, id, |gpu, context, function| {
            gpu.set_function_attribute(context, function, attribute, value)
        })
    }

    /// Does something with a linker, whose context was entered and is the call's from here on.
    fn with_link<R>(
        &mut self,
        cx: &mut Call,
        id: u32,
        f: impl FnOnce(&mut G, ContextId, u32, &mut G::Link) -> Result<R>,
    ) -> Result<R> {
        let context = self.modules.links.get(&id).ok_or(Status::INVALID_HANDLE)?.context;
        cx.context = context;
        self.gpu.enter(context)?;
        let device = self.device_of(context)?;
        let link = self.modules.links.get_mut(&id).ok_or(Status::INVALID_HANDLE)?;
        f(&mut self.gpu, context, device, &mut link.native)
    }
}

impl<G: Gpu> ModuleOps<Call> for Session<G> {
    fn module_load<'a>(&mut self, cx: &mut Call, op: ModuleLoad<'a>) -> Reply<ModuleLoadReply> {
        cx.context = op.context;
        let device = self.device_of(op.context)?;
        if self.modules.modules.contains_key(&op.module.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let image = cx.input(op.image)?.collect(G::MAX_IMAGE)?;
        self.gpu.before_waiting_call(&self.streams, device)?;
        self.gpu.enter(op.context)?;
        let Loaded { module, prints, bytes, logs: [info_log, error_log] } =
            self.gpu.load_module(op.context, device, image, &op.options)?;
        let (native, functions) = match module {
            Ok(module) => module,
            Err(Status(result)) => {
                let reply = ModuleLoadReply { result, info_size: 0, prints: false, info_log, error_log };
                return now(reply);
            }
        };
        let charge = match self.quota.charge(self.memory_of(device), bytes) {
            Ok(charge) => charge,
            Err(status) => {
                self.gpu.unload_module(&mut self.streams, op.context, device, native, functions)?;
                return Err(status);
            }
        };
        let table = G::function_table(&native, functions.iter());
        let (info_size, written) = (table.len() as u64, cx.write_if_it_fits(op.info, &table));
        drop(table);
        let functions = functions.into_iter().map(|native| Function { native, launched: false }).collect();
        let (context, globals) = (op.context, Ranges::default());
        let module = Module { context, native, functions, globals, _charge: charge };
        self.modules.modules.insert(op.module.0, module);
        written?;
        now(ModuleLoadReply { result: 0, info_size, prints, info_log, error_log })
    }

    fn link_create(&mut self, cx: &mut Call, op: LinkCreate) -> Reply<LinkCreateReply> {
        cx.context = op.context;
        if self.modules.links.contains_key(&op.link.0) {
            return Err(Status::INVALID_HANDLE);
        }
        if self.modules.links.len() >= MOST_LINKS {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.gpu.enter(op.context)?;
        let native = self.gpu.make_link(op.context, &op.options)?;
        self.modules.links.insert(op.link.0, Link { context: op.context, native });
        now(LinkCreateReply {})
    }

    fn link_add<'a>(&mut self, cx: &mut Call, op: LinkAdd<'a>) -> Reply<LinkAddReply> {
        if op.kind > jit_input::LAST {
            return Err(Status::INVALID_VALUE);
        }
        let mut data = cx.input(op.data)?.collect(G::MAX_IMAGE)?;
        if op.kind == jit_input::PTX && data.last() != Some(&0) {
            data.push(0);
        }
        let input = LinkInput { kind: op.kind, data, name: op.name, options: &op.options };
        let (result, [info_log, error_log]) =
            self.with_link(cx, op.link.0, |gpu, context, device, link| {
                gpu.link_add(context, device, link, input)
            })?;
        now(LinkAddReply { result: result.0, info_log, error_log })
    }

    fn link_complete(&mut self, cx: &mut Call, op: LinkComplete) -> Reply<LinkCompleteReply> {
        let (result, [info_log, error_log]) =
            self.with_link(cx, op.link.0, |gpu, context, device, link| {
                gpu.link_complete(context, device, link)
            })?;
        let link = self.modules.links.get(&op.link.0).ok_or(Status::INVALID_HANDLE)?;
        let image = G::link_image(&link.native);
        if let Some(image) = image {
            cx.write_if_it_fits(op.image, image)?;
        }
        let size = image.map_or(0, |image| image.len() as u64);
        now(LinkCompleteReply { result: result.0, size, info_log, error_log })
    }

    fn link_destroy(&mut self, cx: &mut Call, op: LinkDestroy) -> Result {
        // One that is unknown has gone with its context.
        if let Some(link) = self.modules.links.remove(&op.link.0) {
            cx.context = link.context;
        }
        Ok(())
    }

    fn module_info(&mut self, cx: &mut Call, op: ModuleInfo) -> Reply<ModuleInfoReply> {
        let module = self.modules.module(op.module)?;
        cx.context = module.context;
        let functions = module.functions.iter().map(|function| &function.native);
        let table = G::function_table(&module.native, functions);
        cx.write_if_it_fits(op.info, &table)?;
        now(ModuleInfoReply { info_size: table.len() as u64 })
    }

    fn module_unload(&mut self, cx: &mut Call, op: ModuleUnload) -> Result {
        let module = self.modules.modules.remove(&op.module.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = module.context;
        self.gpu.enter(module.context)?;
        let device = self.device_of(module.context)?;
        self.gpu.before_waiting_call(&self.streams, device)?;
        let functions = module.functions.into_iter().map(|function| function.native).collect();
        self.gpu.unload_module(&mut self.streams, module.context, device, module.native, functions)
    }

    fn module_get_global<'a>(
        &mut self,
        cx: &mut Call,
        op: ModuleGetGlobal<'a>,
    ) -> Reply<ModuleGetGlobalReply> {
        let module = self.modules.modules.get_mut(&op.module.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = module.context;
        self.gpu.enter(module.context)?;
        let found = self.gpu.module_global(module.context, &module.native, op.name)?;
        // Known already when it is asked for again.
        module.globals.insert(found.address, found.size, ());
        now(found)
    }

    fn function_set_attribute(
        &mut self,
        cx: &mut Call,
        op: FunctionSetAttribute,
    ) -> Reply<FunctionSetAttributeReply> {
        self.set_attribute(cx, op.function, op.attribute, op.value)?;
        now(FunctionSetAttributeReply {})
    }

    fn function_preset(&mut self, cx: &mut Call, op: FunctionPreset) -> Result {
        self.set_attribute(cx, op.function, op.attribute, op.value)
    }

    fn function_attributes(
        &mut self,
        cx: &mut Call,
        op: FunctionAttributes,
    ) -> Reply<FunctionAttributesReply> {
        let attributes = self.with_function(cx, op.function, |gpu, context, function| {
            gpu.function_attributes(context, function)
        })?;
        now(FunctionAttributesReply { attributes })
    }

    fn occupancy_max_active_blocks(
        &mut self,
        cx: &mut Call,
        op: OccupancyMaxActiveBlocks,
    ) -> Reply<OccupancyMaxActiveBlocksReply> {
        let blocks = self.with_function(cx, op.function, |gpu, context, function| {
            gpu.max_active_blocks(context, function, &op)
        })?;
        now(OccupancyMaxActiveBlocksReply { blocks })
    }

    fn occupancy_available_shared(
        &mut self,
        cx: &mut Call,
        op: OccupancyAvailableShared,
    ) -> Reply<OccupancyAvailableSharedReply> {
        let bytes = self.with_function(cx, op.function, |gpu, context, function| {
            gpu.available_shared(context, function, &op)
        })?;
        now(OccupancyAvailableSharedReply { bytes })
    }

    fn occupancy_max_active_clusters(
        &mut self,
        cx: &mut Call,
        op: OccupancyMaxActiveClusters,
    ) -> Reply<OccupancyMaxActiveClustersReply> {
        let clusters = self.with_function(cx, op.function, |gpu, context, function| {
            gpu.max_active_clusters(context, function, &op)
        })?;
        now(OccupancyMaxActiveClustersReply { clusters })
    }

    fn occupancy_max_potential_cluster_size(
        &mut self,
        cx: &mut Call,
        op: OccupancyMaxPotentialClusterSize,
    ) -> Reply<OccupancyMaxPotentialClusterSizeReply> {
        let size = self.with_function(cx, op.function, |gpu, context, function| {
            gpu.max_cluster_size(context, function, &op)
        })?;
        now(OccupancyMaxPotentialClusterSizeReply { size })
    }
}

impl<G: Gpu> LaunchOps<Call> for Session<G> {
    fn launch<'a>(&mut self, cx: &mut Call, op: Launch<'a>) -> Result {
        self.ensure_stream(op.stream)?;
        let place = self.gpu.enter_to_launch(cx, &mut self.streams, op.stream)?;
        let function = self.modules.function_to_launch(cx, op.function)?;
        let launched = self.gpu.launch(&place, &mut function.native, &op);
        function.launched |= launched.is_ok();
        launched
    }
}
