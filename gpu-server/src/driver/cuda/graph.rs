//! Graphs.
//!
//! Most nodes are made by capturing an operation on an otherwise unused stream. A node is therefore the same
//! call, with the same checks by the driver, as on one of the client's streams. Memory operations, empty
//! nodes and conditional nodes are added to the graph directly.
//!
//! The driver chooses a condition's handle for one particular graph. So a draft is a driver graph from the
//! start, and so are the graphs of its conditional nodes.
//!
//! The nodes of an instance are changed in place through those of the graph that it was made from. An
//! instance keeps that graph from its first change on: most are never changed.

use std::collections::HashSet;
use std::sync::OnceLock;

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::launch::LaunchAttribute;

use super::api::{
    Api, BatchMemOp, BatchMemOpNode, CUDA_KERNEL_NODE_PARAMS_v2, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUgraph,
    CUgraphExec, CUgraphNode, CUstream, ConditionalNode, UpdateResult,
};
use super::row_copies::{blank, slices_at_once};
use super::streams::Place;
use super::{Context, Cuda};
use crate::driver::call::{Call, Result};
use crate::driver::gpu::{BoxCopy, Fill, GpuGraphs, LineCopy, Node, NodeWork, STREAM_NON_BLOCKING};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH` and `…_USE_NODE_PRIORITY`.
const FLAGS: u64 = 1 | 8;

/// A graph that is not instantiated.
pub struct Draft {
    graph: CUgraph,
    /// The driver's functions, to destroy it with. `None`: it is destroyed with the conditional node that it
    /// belongs to.
    owner: Option<&'static Api>,
    /// By the places of the client's nodes, once it is filled: those that are one node of the driver's.
    parts: OnceLock<Vec<Option<Part>>>,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for Draft {}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(api) = self.owner {
            // SAFETY: made by `make_draft`, and not used any more; instances do not need it. If its context
            // no longer exists, neither does the graph, and the driver refuses.
            let _ = unsafe { api.graph_destroy(self.graph) };
        }
    }
}

/// A node of the driver's that does all of a client's node.
struct Part {
    node: CUgraphNode,
    does: Does,
}

/// What a node does, as far as it says which changes are possible or needed.
enum Does {
    Launch(Vec<LaunchAttribute>),
    Fill(Fill),
    CopyLine(LineCopy),
    CopyBox(BoxCopy),
    MemoryOps,
}

impl Does {
    /// `None` if this is not one node of the driver's, or not one that can be changed.
    fn of(work: &NodeWork<'_, Cuda>) -> Option<Does> {
        match work {
            NodeWork::Launch { launch, .. } => Some(Does::Launch(launch.attributes.clone())),
            NodeWork::Fill(fill) => Some(Does::Fill(*fill)),
            NodeWork::CopyLine(copy) => Some(Does::CopyLine(*copy)),
            NodeWork::CopyBox(copy) => {
                let (slices, ..) = slices_at_once(&copy.source, &copy.target);
                (slices as u64 == copy.source.depth).then_some(Does::CopyBox(*copy))
            }
            NodeWork::MemoryOps(_) => Some(Does::MemoryOps),
            NodeWork::Empty | NodeWork::Conditional(_) => None,
        }
    }
}

/// A conditional node.
pub struct Conditional(CUgraphNode);

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for Conditional {}

/// An instantiated graph.
pub struct Executable {
    handle: CUgraphExec,
    /// The graph that it was made from, if nodes were changed since.
    draft: Option<Draft>,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for Executable {}

/// A stream for captures into a graph.
struct Capture {
    api: &'static Api,
    graph: CUgraph,
    stream: CUstream,
}

impl Drop for Capture {
    fn drop(&mut self) {
        // SAFETY: made by `Capture::new`, used by nothing else.
        let _ = unsafe { self.api.stream_destroy(self.stream) };
    }
}

impl Capture {
    fn new(api: &'static Api, graph: CUgraph) -> Result<Capture> {
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: writes a handle.
        unsafe { api.stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }?;
        Ok(Capture { api, graph, stream })
    }

    /// Captures what `enqueue` puts on the stream, after `before`. Returns the nodes that later work must
    /// depend on.
    fn capture(
        &self,
        before: &[CUgraphNode],
        enqueue: impl FnOnce(CUstream) -> Result,
    ) -> Result<Vec<CUgraphNode>> {
        let begun = before.as_ptr();
        // SAFETY: nodes of this graph, as many as the length says, without edge data.
        unsafe {
            self.api.capture_begin(self.stream, self.graph, begun, std::ptr::null(), before.len(), RELAXED)
        }?;
        let enqueued = enqueue(self.stream);
        let (mut capturing, mut count) = (0, 0);
        let mut last: *const CUgraphNode = std::ptr::null();
        let none = std::ptr::null_mut();
        // SAFETY: writes two integers and a pointer to nodes that stay until the capture's next call.
        let told = unsafe {
            self.api.capture_info(self.stream, &mut capturing, none, none.cast(), &mut last, &mut count)
        };
        let nodes = match told {
            Ok(()) if count > 0 && !last.is_null() => {
                // SAFETY: the driver has written `count` nodes there, and they stay until the capture's next
                // call.
                unsafe { std::slice::from_raw_parts(last, count) }.to_vec()
            }
            _ => Vec::new(),
        };
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the stream is capturing; writes a handle, the graph's own.
        let ended = unsafe { self.api.capture_end(self.stream, &mut graph) };
        enqueued.and(told).and(ended).map(|()| nodes)
    }
}

impl Cuda {
    /// Makes the driver's nodes for one of the client's, after `before`. Returns the nodes that later work
    /// must depend on: `before` if it needs none of its own.
    fn add_node(
        &self,
        context: ContextId,
        capture: &Capture,
        before: Vec<CUgraphNode>,
        work: NodeWork<'_, Cuda>,
    ) -> Result<Vec<CUgraphNode>> {
        let (graph, count) = (capture.graph, before.len());
        let mut node: CUgraphNode = std::ptr::null_mut();
        match work {
            NodeWork::Empty if count < 2 => return Ok(before),
            // SAFETY: nodes of this graph, as many as the length says; writes a handle.
            NodeWork::Empty => unsafe { self.api.graph_add_empty(&mut node, graph, before.as_ptr(), count) }?,
            NodeWork::Conditional(conditional) => {
                node = conditional.0;
                let after = vec![node; count];
                // SAFETY: nodes of this graph, as many at one end as at the other.
                unsafe { self.api.graph_depend(graph, before.as_ptr(), after.as_ptr(), count) }?;
            }
            NodeWork::MemoryOps(mut operations) => {
                let params = memory_ops(self.context(context)?.handle, &mut operations);
                // SAFETY: nodes of this graph, as many as the length says; a description that lives through
                // the call; writes a handle.
                unsafe { self.api.graph_add_memory_ops(&mut node, graph, before.as_ptr(), count, &params) }?;
            }
            NodeWork::Launch { function, launch } => {
                // The driver would load the function at its first launch, which is impossible while a stream
                // is being captured.
                // SAFETY: a live function.
                unsafe { self.api.function_load(function.handle) }?;
                return capture.capture(&before, |stream| self.launch_at(context, stream, function, &launch));
            }
            NodeWork::Fill(fill) => {
                return capture.capture(&before, |stream| self.fill_at(context, stream, &fill));
            }
            NodeWork::CopyLine(copy) => {
                self.check_reach(context, (copy.src, copy.from), (copy.dst, copy.to))?;
                return capture.capture(&before, |stream| self.copy_at(context, stream, &copy));
            }
            NodeWork::CopyBox(copy) => {
                self.check_reach(context, (copy.source.at, copy.from), (copy.target.at, copy.to))?;
                return capture.capture(&before, |stream| self.copy_3d_at(context, stream, &copy));
            }
        }
        Ok(vec![node])
    }

    /// The driver captures no copy that names contexts.
    fn check_reach(&self, context: ContextId, source: (u64, u32), target: (u64, u32)) -> Result {
        if self.contexts_of(context, source, target)?.is_none() {
            return Ok(());
        }
        tracing::warn!(
            "a graph copies between GPUs that do not reach each other's memory: that is not supported"
        );
        Err(Status::NOT_SUPPORTED)
    }

    /// Makes the driver's nodes for the client's, and returns those that can be changed.
    fn add_nodes(
        &self,
        context: ContextId,
        graph: CUgraph,
        nodes: Vec<Node<'_, Cuda>>,
    ) -> Result<Vec<Option<Part>>> {
        let capture = Capture::new(self.api, graph)?;
        let mut parts = Vec::with_capacity(nodes.len());
        let mut made: Vec<Vec<CUgraphNode>> = Vec::with_capacity(nodes.len());
        let mut seen: HashSet<usize> = HashSet::new();
        // The nodes that begin the graph. A conditional node that begins it, too, comes after them. The
        // driver starts such nodes in the order in which they were added, and programs depend on it without
        // knowing: NVIDIA's sample graphConditionalNodes sets a condition in a kernel on which the
        // conditional node does not depend. Here conditional nodes have been added before all others.
        let mut begin: Vec<CUgraphNode> = Vec::new();
        for node in nodes {
            seen.clear();
            let mut before: Vec<CUgraphNode> = Vec::new();
            for dependency in node.dependencies {
                let of = made.get(*dependency as usize).ok_or(Status::INVALID_VALUE)?;
                before.extend(of.iter().filter(|node| seen.insert(node.addr())));
            }
            let begins = node.dependencies.is_empty();
            let is_conditional = matches!(node.work, NodeWork::Conditional(_));
            if begins && is_conditional {
                before.clone_from(&begin);
            }
            let does = Does::of(&node.work);
            let added = self.add_node(context, &capture, before, node.work)?;
            parts.push(match (does, &added[..]) {
                // A copy of nothing adds no node.
                (Some(does), [node]) if !seen.contains(&node.addr()) => Some(Part { node: *node, does }),
                _ => None,
            });
            if begins && !is_conditional {
                begin.extend(&added);
            }
            made.push(added);
        }
        Ok(parts)
    }

    fn instantiate_draft(&self, context: ContextId, draft: &Draft, flags: u64) -> Result<CUgraphExec> {
        let mut handle: CUgraphExec = std::ptr::null_mut();
        // SAFETY: a live graph; writes a handle.
        let made = unsafe { self.api.graph_instantiate(&mut handle, draft.graph, flags & FLAGS) };
        self.note(context, made).map(|()| handle)
    }

    /// Puts an instance in another's place.
    fn put_in_place(&self, graph: &mut Executable, new: Executable) {
        let old = std::mem::replace(graph, new);
        // SAFETY: replaced; pending launches complete.
        let _ = unsafe { self.api.graph_exec_destroy(old.handle) };
    }

    /// Gives a node of an instance other work, whose context is current. Returns whether the driver did that;
    /// otherwise the instance is to be replaced. It always is for a node that has nothing to do any more, or
    /// something again: NVIDIA's driver 580 does not keep the order of what is before and behind a disabled
    /// fill.
    fn change_node(
        &self,
        context: &Context,
        graph: CUgraphExec,
        part: &mut Part,
        work: NodeWork<'_, Cuda>,
    ) -> bool {
        let (api, node) = (self.api, part.node);
        // The driver may do otherwise what is not all in the memory of the context's device.
        let is_here = |devices: &[u32]| devices.iter().all(|device| *device == context.device);
        match (&mut part.does, work) {
            // The attributes of a node stay.
            (Does::Launch(attributes), NodeWork::Launch { function, launch })
                if *attributes == launch.attributes =>
            {
                let set = self.with_params(function, launch.params, |params| {
                    let [grid, block] = [launch.grid, launch.block];
                    let params = CUDA_KERNEL_NODE_PARAMS_v2 {
                        func: function.handle,
                        gridDimX: grid[0],
                        gridDimY: grid[1],
                        gridDimZ: grid[2],
                        blockDimX: block[0],
                        blockDimY: block[1],
                        blockDimZ: block[2],
                        sharedMemBytes: launch.dynamic_shared,
                        kernelParams: params,
                        extra: std::ptr::null_mut(),
                        kern: std::ptr::null_mut(),
                        ctx: std::ptr::null_mut(),
                    };
                    // SAFETY: an instance, a node of the graph that it was made from, and a function of its
                    // context with a pointer to each parameter, which the driver copies before it returns.
                    unsafe { api.graph_node_launch(graph, node, &params) }
                });
                set.is_ok()
            }
            (Does::Fill(now), NodeWork::Fill(fill)) => {
                let params = CUDA_MEMSET_NODE_PARAMS {
                    dst: fill.address,
                    pitch: fill.pitch as usize,
                    value: fill.value & (u32::MAX >> (32 - 8 * fill.element)),
                    elementSize: fill.element,
                    width: fill.width as usize,
                    height: fill.height as usize,
                };
                // SAFETY: an instance, a node of the graph that it was made from, and a range of this
                // session, aligned to its elements.
                let set = || unsafe { api.graph_node_fill(graph, node, &params, context.handle) };
                let before = std::mem::replace(now, fill);
                before == fill || is_here(&[before.device, fill.device]) && set().is_ok()
            }
            (Does::CopyLine(now), NodeWork::CopyLine(copy)) => {
                let mut params = blank();
                (params.srcDevice, params.srcPitch, params.srcHeight) = (copy.src, copy.len as usize, 1);
                (params.dstDevice, params.dstPitch, params.dstHeight) = (copy.dst, copy.len as usize, 1);
                (params.WidthInBytes, params.Height) = (copy.len as usize, 1);
                // SAFETY: an instance, a node of the graph that it was made from, and ranges of this session.
                let set = || unsafe { api.graph_node_copy(graph, node, &params, context.handle) };
                let before = std::mem::replace(now, copy);
                let devices = [before.from, before.to, copy.from, copy.to];
                before == copy || is_here(&devices) && set().is_ok()
            }
            // The driver changes only copies of one dimension.
            (Does::CopyBox(now), NodeWork::CopyBox(copy)) => *now == copy,
            (Does::MemoryOps, NodeWork::MemoryOps(mut operations)) => {
                let params = memory_ops(context.handle, &mut operations);
                // SAFETY: an instance, a node of the graph that it was made from, and a description that
                // lives through the call.
                unsafe { api.graph_node_memory_ops(graph, node, &params) }.is_ok()
            }
            _ => false,
        }
    }
}

/// A node's description. It points to `operations`.
fn memory_ops(context: CUcontext, operations: &mut [BatchMemOp]) -> BatchMemOpNode {
    BatchMemOpNode { context, count: operations.len() as u32, operations: operations.as_mut_ptr(), flags: 0 }
}

impl GpuGraphs for Cuda {
    type Draft = Draft;
    type Conditional = Conditional;
    type Graph = Executable;

    fn make_draft(&mut self, context: ContextId) -> Result<Draft> {
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: writes a handle.
        let made = unsafe { self.api.graph_create(&mut graph, 0) };
        self.note(context, made)?;
        Ok(Draft { graph, owner: Some(self.api), parts: OnceLock::new() })
    }

    fn make_condition(&mut self, context: ContextId, draft: &Draft, default: u32, flags: u32) -> Result<u64> {
        let of = self.context(context)?.handle;
        let mut handle = 0;
        // SAFETY: a live graph and a live context; writes one integer.
        let made = unsafe { self.api.graph_condition(&mut handle, draft.graph, of, default, flags) };
        self.note(context, made).map(|()| handle)
    }

    fn add_conditional(
        &mut self,
        context: ContextId,
        draft: &Draft,
        condition: u64,
        kind: u32,
        count: usize,
    ) -> Result<(Conditional, Vec<Draft>)> {
        let mut params = ConditionalNode::new(condition, kind, count as u32, self.context(context)?.handle);
        let mut node: CUgraphNode = std::ptr::null_mut();
        // SAFETY: a live graph, no nodes to depend on, a description of this kind; writes a handle.
        let added =
            unsafe { self.api.graph_add_node(&mut node, draft.graph, std::ptr::null(), 0, &mut params) };
        self.note(context, added)?;
        if params.graphs.is_null() {
            return Err(Status::UNKNOWN);
        }
        // SAFETY: the driver has written the address of `count` graphs, which live as long as the node.
        let graphs = unsafe { std::slice::from_raw_parts(params.graphs, count) };
        let body = |graph: &CUgraph| Draft { graph: *graph, owner: None, parts: OnceLock::new() };
        let drafts = graphs.iter().map(body).collect();
        Ok((Conditional(node), drafts))
    }

    fn remove_conditional(&mut self, context: ContextId, node: &Conditional) -> Result {
        // SAFETY: a live node, which the session removes from its table, with its graphs.
        let removed = unsafe { self.api.graph_destroy_node(node.0) };
        self.note(context, removed)
    }

    fn fill_draft(&self, context: ContextId, draft: &Draft, nodes: Vec<Node<'_, Cuda>>) -> Result {
        let parts = self.note(context, self.add_nodes(context, draft.graph, nodes))?;
        draft.parts.set(parts).map_err(|_| Status::NOT_SUPPORTED)
    }

    fn instantiate(&mut self, context: ContextId, draft: &Draft, flags: u64) -> Result<Executable> {
        Ok(Executable { handle: self.instantiate_draft(context, draft, flags)?, draft: None })
    }

    /// Uses the driver's own update if possible, and a new instance otherwise.
    fn update_graph(
        &mut self,
        context: ContextId,
        graph: &mut Executable,
        draft: &Draft,
        flags: u64,
    ) -> Result {
        let mut why = UpdateResult {
            result: 0,
            error_node: std::ptr::null_mut(),
            error_from_node: std::ptr::null_mut(),
        };
        // SAFETY: a live instance and a live graph; writes the result.
        if unsafe { self.api.graph_update(graph.handle, draft.graph, &mut why) }.is_ok() {
            // Which of the instance's nodes are at which places is now for the driver to know.
            graph.draft = None;
            return Ok(());
        }
        let new = self.instantiate(context, draft, flags)?;
        self.put_in_place(graph, new);
        Ok(())
    }

    fn change_nodes(
        &self,
        context: ContextId,
        graph: &mut Executable,
        changed: Vec<(u32, NodeWork<'_, Cuda>)>,
    ) -> bool {
        let Ok(context) = self.context(context) else { return false };
        let Executable { handle, draft: Some(draft) } = graph else { return false };
        let Some(parts) = draft.parts.get_mut() else { return false };
        changed.into_iter().all(|(place, work)| {
            let part = parts.get_mut(place as usize).and_then(Option::as_mut);
            part.is_some_and(|part| self.change_node(context, *handle, part, work))
        })
    }

    /// Keeps the draft, so that the next changes are made in place.
    fn replace_graph(
        &mut self,
        context: ContextId,
        graph: &mut Executable,
        draft: Draft,
        flags: u64,
    ) -> Result {
        let handle = self.instantiate_draft(context, &draft, flags)?;
        self.put_in_place(graph, Executable { handle, draft: Some(draft) });
        Ok(())
    }

    fn launch_graph(&mut self, _cx: &Call, place: &Place, graph: &Executable) -> Result {
        // SAFETY: live handles of the current context.
        let launched = unsafe { self.api.graph_launch(graph.handle, place.stream) };
        self.note(place.context, launched)
    }

    fn upload_graph(&mut self, place: &Place, graph: &Executable) -> Result {
        // SAFETY: live handles of the current context.
        let uploaded = unsafe { self.api.graph_upload(graph.handle, place.stream) };
        self.note(place.context, uploaded)
    }

    fn destroy_graph(&mut self, context: ContextId, graph: Executable) -> Result {
        // SAFETY: removed from the session's table; pending launches complete.
        let destroyed = unsafe { self.api.graph_exec_destroy(graph.handle) };
        self.note(context, destroyed)
    }
}

#[cfg(test)]
mod tests {
    use protocol::handle::{FunctionId, StreamId};
    use protocol::ops::launch::Launch;

    use super::super::kernels::CudaFunction;
    use super::*;

    const CONTEXT: ContextId = ContextId(0);

    fn launch(function: &CudaFunction, x: u32, attribute: Option<u32>) -> NodeWork<'_, Cuda> {
        let attributes = attribute.map(|id| LaunchAttribute { id, value: [1; 64] });
        let launch = Launch {
            function: FunctionId(0),
            stream: StreamId(0),
            grid: [x, 1, 1],
            block: [1; 3],
            dynamic_shared: 0,
            attributes: attributes.into_iter().collect(),
            params: &[],
        };
        NodeWork::Launch { function, launch }
    }

    fn fill(address: u64) -> NodeWork<'static, Cuda> {
        let fill = Fill { address, device: 0, pitch: 4, value: 7, element: 4, width: 1, height: 1 };
        NodeWork::Fill(fill)
    }

    fn copy(dst: u64, to: u32) -> NodeWork<'static, Cuda> {
        NodeWork::CopyLine(LineCopy { dst, to, src: 0, from: 0, len: 4 })
    }

    /// 100 kernels, a fill and a copy, one after the other.
    fn draft(cuda: &mut Cuda, function: &CudaFunction) -> Draft {
        let draft = cuda.make_draft(CONTEXT).unwrap();
        let before: Vec<u32> = (0..102).collect();
        let works = (0..100).map(|_| launch(function, 1, None)).chain([fill(0), copy(1 << 20, 0)]);
        let nodes = works.enumerate().map(|(place, work)| {
            let dependencies = place.checked_sub(1).map_or(&[][..], |from| &before[from..=from]);
            Node { work, dependencies }
        });
        cuda.fill_draft(CONTEXT, &draft, nodes.collect()).unwrap();
        draft
    }

    fn called() -> Vec<&'static str> {
        Api::calls().into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn a_changed_node_is_changed_in_place_from_the_second_change_on() {
        let (mut cuda, function) = (Cuda::fake_of(Api::noting(), 1), CudaFunction::fake());
        let first = draft(&mut cuda, &function);
        let mut graph = cuda.instantiate(CONTEXT, &first, 0).unwrap();
        let change = |cuda: &Cuda, graph: &mut Executable, place, work| {
            Api::calls();
            cuda.change_nodes(CONTEXT, graph, vec![(place, work)])
        };
        assert!(!change(&cuda, &mut graph, 3, launch(&function, 2, None)));
        let again = draft(&mut cuda, &function);
        cuda.replace_graph(CONTEXT, &mut graph, again, 0).unwrap();
        for (place, work, calls) in [
            (3, launch(&function, 2, None), &["graph_node_launch"][..]),
            (3, launch(&function, 1, None), &["graph_node_launch"]),
            (100, fill(8), &["graph_node_fill"]),
            (100, fill(8), &[]),
            (101, copy(1 << 21, 0), &["graph_node_copy"]),
            (101, copy(1 << 21, 0), &[]),
        ] {
            assert!(change(&cuda, &mut graph, place, work), "{place} {calls:?}");
            assert_eq!(called(), calls, "{place}");
        }
        // Another kind, nothing, another attribute, another device, and no such place.
        for (place, work) in [
            (3, fill(8)),
            (3, NodeWork::Empty),
            (100, NodeWork::Empty),
            (3, launch(&function, 1, Some(8))),
            (101, copy(1 << 21, 1)),
            (102, launch(&function, 1, None)),
        ] {
            assert!(!change(&cuda, &mut graph, place, work), "{place}");
            assert!(called().is_empty(), "{place}");
        }
        Api::refuse(Some("graph_node_launch"));
        assert!(!change(&cuda, &mut graph, 3, launch(&function, 1, None)));
        Api::refuse(None);
        // The driver says which nodes of the instance are the other graph's.
        let whole = draft(&mut cuda, &function);
        cuda.update_graph(CONTEXT, &mut graph, &whole, 0).unwrap();
        assert!(!change(&cuda, &mut graph, 3, launch(&function, 1, None)));
    }

    #[test]
    fn a_copy_that_adds_no_node_does_not_stand_for_the_node_before_it() {
        let mut cuda = Cuda::fake_of(Api::adding_none(), 1);
        let draft = cuda.make_draft(CONTEXT).unwrap();
        let nodes = [&[][..], &[0]].map(|dependencies| Node { work: copy(0, 0), dependencies });
        cuda.fill_draft(CONTEXT, &draft, nodes.into_iter().collect()).unwrap();
        let parts: Vec<bool> = draft.parts.get().unwrap().iter().map(Option::is_some).collect();
        assert_eq!(parts, [true, false]);
    }
}
