//! Graphs.
//!
//! Most nodes are made by capturing an operation on an otherwise unused stream. A node is therefore the same
//! call, with the same checks by the driver, as on one of the client's streams. Memory operations, empty
//! nodes and conditional nodes are added to the graph directly.
//!
//! The driver chooses a condition's handle for one particular graph. So a draft is a driver graph from the
//! start, and so are the graphs of its conditional nodes.

use std::collections::HashSet;

use protocol::Status;
use protocol::handle::ContextId;

use super::Cuda;
use super::api::{
    Api, BatchMemOpNode, CUgraph, CUgraphExec, CUgraphNode, CUstream, ConditionalNode, UpdateResult,
};
use super::streams::Place;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::{GpuGraphs, Node, NodeWork, STREAM_NON_BLOCKING};

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

/// A conditional node.
pub struct Conditional(CUgraphNode);

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for Conditional {}

/// An instantiated graph.
pub struct Executable(CUgraphExec);

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
                let params = BatchMemOpNode {
                    context: self.context(context)?.handle,
                    count: operations.len() as u32,
                    operations: operations.as_mut_ptr(),
                    flags: 0,
                };
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

    fn add_nodes(&self, context: ContextId, graph: CUgraph, nodes: Vec<Node<'_, Cuda>>) -> Result {
        let capture = Capture::new(self.api, graph)?;
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
            let added = self.add_node(context, &capture, before, node.work)?;
            if begins && !is_conditional {
                begin.extend(&added);
            }
            made.push(added);
        }
        Ok(())
    }
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
        Ok(Draft { graph, owner: Some(self.api) })
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
        let drafts = graphs.iter().map(|graph| Draft { graph: *graph, owner: None }).collect();
        Ok((Conditional(node), drafts))
    }

    fn remove_conditional(&mut self, context: ContextId, node: &Conditional) -> Result {
        // SAFETY: a live node, which the session removes from its table, with its graphs.
        let removed = unsafe { self.api.graph_destroy_node(node.0) };
        self.note(context, removed)
    }

    fn fill_draft(&self, context: ContextId, draft: &Draft, nodes: Vec<Node<'_, Cuda>>) -> Result {
        self.note(context, self.add_nodes(context, draft.graph, nodes))
    }

    fn instantiate(&mut self, context: ContextId, draft: &Draft, flags: u64) -> Result<Executable> {
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: a live graph; writes a handle.
        let made = unsafe { self.api.graph_instantiate(&mut exec, draft.graph, flags & FLAGS) };
        self.note(context, made).map(|()| Executable(exec))
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
        if unsafe { self.api.graph_update(graph.0, draft.graph, &mut why) }.is_ok() {
            return Ok(());
        }
        let old = std::mem::replace(graph, self.instantiate(context, draft, flags)?);
        // SAFETY: replaced; pending launches complete.
        let _ = unsafe { self.api.graph_exec_destroy(old.0) };
        Ok(())
    }

    fn launch_graph(&mut self, _cx: &Call, place: &Place, graph: &Executable) -> Result {
        // SAFETY: live handles of the current context.
        let launched = unsafe { self.api.graph_launch(graph.0, place.stream) };
        self.note(place.context, launched)
    }

    fn upload_graph(&mut self, place: &Place, graph: &Executable) -> Result {
        // SAFETY: live handles of the current context.
        let uploaded = unsafe { self.api.graph_upload(graph.0, place.stream) };
        self.note(place.context, uploaded)
    }

    fn destroy_graph(&mut self, context: ContextId, graph: Executable) -> Result {
        // SAFETY: removed from the session's table; pending launches complete.
        let destroyed = unsafe { self.api.graph_exec_destroy(graph.0) };
        self.note(context, destroyed)
    }
}
