//! Modules, their functions and variables, launches, and the linker.

use std::collections::HashMap;

use protocol::Status;
use protocol::data::{HostIn, HostOut};
use protocol::handle::{ContextId, FunctionId, ModuleId};
use protocol::ops::launch::*;
use protocol::ops::module::*;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result, is_sticky};
use crate::driver::gpu::{Gpu, GpuModules, LinkInput, Loaded};
use crate::driver::ids::Ids;
use crate::driver::quota::Charge;
use crate::driver::ranges::Ranges;

/// Maximum number of linkers in a session.
const MOST_LINKS: usize = 256;
/// Maximum number of bytes in the inputs of all linkers of a session.
const MOST_LINK_BYTES: u64 = 256 << 20;
/// Maximum number of failed loads that a session keeps for the commands that follow them.
const MOST_REFUSED: usize = 4096;

/// The session's modules and linkers.
pub(super) struct Modules<G: GpuModules> {
    modules: Ids<Module<G>>,
    /// Failed loads whose client did not wait for the answer, with the status for commands on these modules.
    refused: Ids<(ContextId, Status)>,
    links: HashMap<u32, Link<G::Link>>,
}

/// A loaded module.
struct Module<G: GpuModules> {
    context: ContextId,
    native: G::Module,
    /// Whether the client binds its functions.
    by_name: bool,
    /// By index, or the error from binding it.
    functions: Vec<Result<Function<G::Function>>>,
    /// Variables that the client has asked for.
    globals: Ranges,
    _charge: Charge,
}

/// A function. `F` belongs to the GPU.
struct Function<F> {
    native: F,
}

/// A linker in use. `L` belongs to the GPU.
struct Link<L> {
    context: ContextId,
    native: L,
    /// Bytes of its inputs.
    bytes: u64,
}

/// Why a module doesn't exist. If its load failed, the call's context becomes the one it should have been
/// loaded into.
#[cold]
fn why_refused(refused: &Ids<(ContextId, Status)>, cx: &mut Call, id: ModuleId) -> Status {
    match refused.get(&id.0) {
        Some((context, status)) => {
            cx.context = *context;
            *status
        }
        None => Status::INVALID_HANDLE,
    }
}

impl<G: GpuModules> Default for Modules<G> {
    fn default() -> Self {
        Modules { modules: Ids::default(), refused: Ids::default(), links: HashMap::new() }
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

    /// Drops the modules and linkers of a destroyed context.
    pub(super) fn forget_context(&mut self, context: ContextId) {
        self.modules.retain(|_, module| module.context != context);
        self.refused.retain(|_, (of, _)| *of != context);
        self.links.retain(|_, link| link.context != context);
    }

    /// A function about to be launched in the call's context. The function's context becomes the call's.
    fn function_to_launch(&mut self, cx: &mut Call, id: FunctionId) -> Result<&mut Function<G::Function>> {
        let context = cx.context;
        let function = self.function_mut(cx, id)?;
        if cx.context != context {
            return Err(Status::INVALID_HANDLE);
        }
        Ok(function)
    }

    /// A function for a graph node in a context.
    pub(super) fn function(&self, context: ContextId, id: FunctionId) -> Result<&G::Function> {
        let module = self.module(id.module())?;
        match module.functions.get(id.index() as usize).filter(|_| module.context == context) {
            Some(Ok(function)) => Ok(&function.native),
            Some(Err(status)) => Err(*status),
            None => Err(Status::INVALID_HANDLE),
        }
    }

    /// A function. Its context becomes the call's.
    #[inline]
    fn function_mut(&mut self, cx: &mut Call, id: FunctionId) -> Result<&mut Function<G::Function>> {
        let Some(module) = self.modules.get_mut(&id.module().0) else {
            return Err(why_refused(&self.refused, cx, id.module()));
        };
        cx.context = module.context;
        match module.functions.get_mut(id.index() as usize) {
            Some(Ok(function)) => Ok(function),
            Some(Err(status)) => Err(*status),
            None => Err(Status::INVALID_HANDLE),
        }
    }

    fn module(&self, id: ModuleId) -> Result<&Module<G>> {
        self.modules.get(&id.0).ok_or(Status::INVALID_HANDLE)
    }
}

impl<G: Gpu> Session<G> {
    /// Enters the context of a function, makes it the call's, and passes the function to `f`.
    fn with_function<R>(
        &mut self,
        cx: &mut Call,
        id: FunctionId,
        f: impl FnOnce(&mut G, ContextId, &mut G::Function) -> Result<R>,
    ) -> Result<R> {
        let function = self.modules.function_mut(cx, id)?;
        self.gpu.enter(cx.context)?;
        f(&mut self.gpu, cx.context, &mut function.native)
    }

    fn set_attribute(&mut self, cx: &mut Call, id: FunctionId, attribute: u32, value: i32) -> Result {
        self.with_function(cx, id, |gpu, context, function| {
            gpu.set_function_attribute(context, function, attribute, value)
        })
    }

    /// Enters the context of a linker, makes it the call's, and passes the linker to `f`.
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

impl<G: Gpu> Session<G> {
    /// Loads an image. With `info`, the function table is written there; otherwise the client binds the
    /// functions.
    fn load_module(
        &mut self,
        cx: &mut Call,
        context: ContextId,
        id: ModuleId,
        options: &[JitOption],
        image: HostIn<'_>,
        info: Option<HostOut>,
    ) -> Result<ModuleLoadReply> {
        cx.context = context;
        let device = self.device_of(context)?;
        if self.modules.modules.contains_key(&id.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let image = cx.input(image)?.collect(G::MAX_IMAGE)?;
        self.gpu.before_waiting_call(&self.streams, device)?;
        self.gpu.enter(context)?;
        let Loaded { module, prints, bytes, logs: [info_log, error_log] } =
            self.gpu.load_module(context, device, image, options, info.is_some())?;
        let (native, functions) = match module {
            Ok(module) => module,
            Err(status) if is_sticky(status) => return Err(status),
            Err(Status(result)) => {
                return Ok(ModuleLoadReply { result, info_size: 0, prints: false, info_log, error_log });
            }
        };
        let charge = match self.quota.charge(self.memory_of(device), bytes) {
            Ok(charge) => charge,
            Err(status) => {
                self.gpu.unload_module(&mut self.streams, context, device, native, functions)?;
                return Err(status);
            }
        };
        let (mut info_size, mut written) = (0, Ok(()));
        if let Some(info) = info {
            let table = G::function_table(&native, functions.iter());
            (info_size, written) = (table.len() as u64, cx.write_if_it_fits(info, &table));
        }
        let functions = functions.into_iter().map(|native| Ok(Function { native })).collect();
        let (by_name, globals) = (info.is_none(), Ranges::default());
        let module = Module { context, native, by_name, functions, globals, _charge: charge };
        self.modules.modules.insert(id.0, module);
        self.modules.refused.remove(&id.0);
        written?;
        Ok(ModuleLoadReply { result: 0, info_size, prints, info_log, error_log })
    }
}

impl<G: Gpu> ModuleOps<Call> for Session<G> {
    fn module_load<'a>(&mut self, cx: &mut Call, op: ModuleLoad<'a>) -> Reply<ModuleLoadReply> {
        now(self.load_module(cx, op.context, op.module, &op.options, op.image, Some(op.info))?)
    }

    fn module_load_by_name<'a>(
        &mut self,
        cx: &mut Call,
        op: ModuleLoadByName<'a>,
    ) -> Reply<ModuleLoadByNameReply> {
        let (context, id) = (op.context, op.module);
        let reply = self.load_module(cx, context, id, &[], op.image, None);
        let status = reply.as_ref().map_or_else(|status| *status, |reply| Status(reply.result));
        let Modules { modules, refused, .. } = &mut self.modules;
        if !modules.contains_key(&id.0) && refused.len() < MOST_REFUSED {
            refused.insert(id.0, (context, status));
        }
        let ModuleLoadReply { result, error_log, .. } = reply?;
        now(ModuleLoadByNameReply { result, error_log })
    }

    fn function_bind<'a>(&mut self, cx: &mut Call, op: FunctionBind<'a>) -> Result {
        let Some(module) = self.modules.modules.get(&op.function.module().0) else {
            return Err(why_refused(&self.modules.refused, cx, op.function.module()));
        };
        cx.context = module.context;
        // The client numbers them in the order of binding.
        let index = op.function.index();
        if !module.by_name || index as usize != module.functions.len() || index >= MOST_FUNCTIONS {
            return Err(Status::INVALID_HANDLE);
        }
        let device = self.device_of(cx.context)?;
        self.gpu.before_waiting_call(&self.streams, device)?;
        self.gpu.enter(cx.context)?;
        let id = op.function.module().0;
        let module = self.modules.modules.get_mut(&id).ok_or(Status::INVALID_HANDLE)?;
        let native = self.gpu.bind_function(cx.context, &module.native, op.name, &op.params);
        let bound = native.map(|native| Function { native });
        let result = bound.as_ref().map(drop).map_err(|status| *status);
        module.functions.push(bound);
        result
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
        self.modules.links.insert(op.link.0, Link { context: op.context, native, bytes: 0 });
        now(LinkCreateReply {})
    }

    fn link_add<'a>(&mut self, cx: &mut Call, op: LinkAdd<'a>) -> Reply<LinkAddReply> {
        if op.kind > jit_input::LAST {
            return Err(Status::INVALID_VALUE);
        }
        // Drivers keep the inputs until the linker is destroyed.
        let kept: u64 = self.modules.links.values().map(|link| link.bytes).sum();
        let input = cx.input(op.data)?;
        if kept.saturating_add(input.len()) > MOST_LINK_BYTES {
            return Err(Status::OUT_OF_MEMORY);
        }
        let mut data = input.collect(MOST_LINK_BYTES)?;
        if let Some(link) = self.modules.links.get_mut(&op.link.0) {
            link.bytes += data.len() as u64;
        }
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
        // An unknown linker was destroyed with its context.
        if let Some(link) = self.modules.links.remove(&op.link.0) {
            cx.context = link.context;
        }
        Ok(())
    }

    fn module_info(&mut self, cx: &mut Call, op: ModuleInfo) -> Reply<ModuleInfoReply> {
        let module = self.modules.module(op.module)?;
        cx.context = module.context;
        let functions = module.functions.iter().flatten().map(|function| &function.native);
        let table = G::function_table(&module.native, functions);
        cx.write_if_it_fits(op.info, &table)?;
        now(ModuleInfoReply { info_size: table.len() as u64 })
    }

    fn module_unload(&mut self, cx: &mut Call, op: ModuleUnload) -> Result {
        if self.modules.refused.remove(&op.module.0).is_some() {
            return Ok(());
        }
        let module = self.modules.modules.remove(&op.module.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = module.context;
        self.gpu.enter(module.context)?;
        let device = self.device_of(module.context)?;
        self.gpu.before_waiting_call(&self.streams, device)?;
        let functions = module.functions.into_iter().flatten().map(|function| function.native).collect();
        self.gpu.unload_module(&mut self.streams, module.context, device, module.native, functions)
    }

    fn module_get_global<'a>(
        &mut self,
        cx: &mut Call,
        op: ModuleGetGlobal<'a>,
    ) -> Reply<ModuleGetGlobalReply> {
        let Some(module) = self.modules.modules.get_mut(&op.module.0) else {
            return Err(why_refused(&self.modules.refused, cx, op.module));
        };
        cx.context = module.context;
        self.gpu.enter(module.context)?;
        let found = self.gpu.module_global(module.context, &module.native, op.name)?;
        // May already be there if the client asks again.
        module.globals.insert(found.address, found.size, ());
        now(found)
    }

    fn module_memory(&mut self, cx: &mut Call, op: ModuleMemory) -> Reply<ModuleMemoryReply> {
        cx.context = op.context;
        let device = self.device_of(op.context)?;
        self.gpu.enter(op.context)?;
        let (base, size) = self.in_module(op.address, device).ok_or(Status::NOT_FOUND)?;
        now(ModuleMemoryReply { base, size })
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
        if op.shapes.len() > MOST_CLUSTER_SHAPES {
            return Err(Status::INVALID_VALUE);
        }
        let (asked, shapes) = self.with_function(cx, op.function, |gpu, context, function| {
            let asked = gpu.max_active_clusters(context, function, &op);
            let of = |shape: &ClusterShape| {
                gpu.max_active_clusters(context, function, &shape.question(&op)).unwrap_or(-1)
            };
            Ok((asked, op.shapes.iter().map(of).collect()))
        })?;
        let (result, clusters) = asked.map_or_else(|status| (status.0, 0), |clusters| (0, clusters));
        now(OccupancyMaxActiveClustersReply { result, clusters, shapes })
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
        self.works(op.stream);
        self.launch_watched(cx, op.stream, |session, cx| {
            let function = session.modules.function_to_launch(cx, op.function)?;
            session.gpu.launch(&place, &mut function.native, &op)
        })
    }
}
