//! Graphs. Each node is made by capturing its operation on a stream that nobody else has: so it is the same call, with the same checks, as on a stream
//! of the client's.

use std::collections::{HashMap, HashSet};

use protocol::Status;
use protocol::handle::{ContextId, GraphId, StreamId};
use protocol::ops::Answer;
use protocol::ops::graph::*;

use super::Cuda;
use super::api::{Api, CUgraph, CUgraphExec, CUgraphNode, CUstream, UpdateResult};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::graph::{self, MAX_GRAPH, Work};
use crate::driver::session::Session;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH` and `…_USE_NODE_PRIORITY`.
const FLAGS: u64 = 1 | 8;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// An instantiated graph.
pub(super) struct ServerGraph {
    pub(super) context: u32,
    pub(super) flags: u64,
    pub(super) exec: CUgraphExec,
}

/// The graphs of a session.
pub(super) type Graphs = HashMap<u32, ServerGraph>;

/// What an instantiation works with; gone afterwards.
pub(super) struct Build {
    api: &'static Api,
    graph: CUgraph,
    /// Whether the graph goes with it.
    own: bool,
    stream: CUstream,
}

impl Drop for Build {
    fn drop(&mut self) {
        // SAFETY: made by `Build::new` or `Build::into`, used by nobody else; an instantiated graph does not need the one that it was made from.
        unsafe {
            let _ = self.api.stream_destroy(self.stream);
            if self.own {
                let _ = self.api.graph_destroy(self.graph);
            }
        }
    }
}

impl Build {
    fn new(api: &'static Api) -> Result<Build> {
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: writes a handle.
        unsafe { api.graph_create(&mut graph, 0) }?;
        match Build::into(api, graph) {
            Ok(mut build) => {
                build.own = true;
                Ok(build)
            }
            Err(status) => {
                // SAFETY: made above, and nobody else's.
                let _ = unsafe { api.graph_destroy(graph) };
                Err(status)
            }
        }
    }

    /// Into a graph that stays.
    pub(super) fn into(api: &'static Api, graph: CUgraph) -> Result<Build> {
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: writes a handle.
        unsafe { api.stream_create(&mut stream, NON_BLOCKING, 0) }?;
        Ok(Build { api, graph, own: false, stream })
    }

    /// Captures what `enqueue` puts on the stream, behind `before`; answers the nodes that whatever follows it must wait for.
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
                // SAFETY: the driver has told of as many nodes there, which stay until the capture's next call.
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

impl Session<Cuda> {
    fn node(&mut self, cx: &mut Call, context: ContextId, stream: CUstream, work: &Work<'_>) -> Result {
        match work {
            Work::Empty => Ok(()),
            Work::Launch(op) => {
                let function = self.modules.function_to_launch(cx, op.function)?;
                self.gpu.launch_at(context, stream, &function.native, op)
            }
            Work::Memset(op) => match self.checked_fill(op, 0)? {
                Some(fill) => self.gpu.fill_at(context, stream, &fill),
                None => Ok(()),
            },
            Work::Copy(op) => self.gpu.copy_at(context, stream, &self.checked_line(op, 0)?),
            Work::Copy3D(op) => match self.checked_box(op, 0)? {
                Some(copy) => self.gpu.copy_3d_at(context, stream, &copy),
                None => Ok(()),
            },
            // Not captured: these are made as nodes.
            Work::Words(_) | Work::Conditional(_) => Err(Status::INVALID_VALUE),
        }
    }

    /// Makes a graph of the driver's.
    fn build(&mut self, cx: &mut Call, context: ContextId, nodes: &[GraphNode]) -> Result<Build> {
        let build = Build::new(self.gpu.api)?;
        self.fill_graph(cx, context, &build, nodes)?;
        Ok(build)
    }

    /// Puts nodes into a graph of the driver's.
    pub(super) fn fill_graph(
        &mut self,
        cx: &mut Call,
        context: ContextId,
        build: &Build,
        nodes: &[GraphNode],
    ) -> Result {
        // What stands for each node: what it became, or, if it became nothing, what it waits for.
        let mut made: Vec<Vec<CUgraphNode>> = Vec::with_capacity(nodes.len());
        let mut seen: HashSet<usize> = HashSet::new();
        for node in nodes {
            seen.clear();
            let mut before: Vec<CUgraphNode> = Vec::new();
            for dependency in &node.dependencies {
                let of = made.get(*dependency as usize).ok_or(Status::INVALID_VALUE)?;
                before.extend(of.iter().filter(|node| seen.insert(node.addr())));
            }
            let became = match graph::work(node)? {
                Work::Empty if before.len() < 2 => before,
                Work::Empty => {
                    let mut empty: CUgraphNode = std::ptr::null_mut();
                    // SAFETY: nodes of this graph, as many as the length says; writes a handle.
                    unsafe {
                        self.gpu.api.graph_add_empty(&mut empty, build.graph, before.as_ptr(), before.len())
                    }?;
                    vec![empty]
                }
                Work::Conditional(first) => {
                    let node = self.gpu.drafts.node(first)?.native;
                    let after = vec![node; before.len()];
                    // SAFETY: nodes of this graph, as many at one end as at the other.
                    unsafe {
                        self.gpu.api.graph_depend(build.graph, before.as_ptr(), after.as_ptr(), before.len())
                    }?;
                    vec![node]
                }
                Work::Words(op) => {
                    let operations = self.memory_ops(&op.operations, 0)?;
                    vec![self.gpu.memory_ops_node(context, build.graph, &before, operations)?]
                }
                work => {
                    if let Work::Launch(launch) = &work {
                        let function = self.modules.function_to_launch(cx, launch.function)?.native.handle;
                        // A capture is no time to load it.
                        // SAFETY: a live function.
                        unsafe { self.gpu.api.function_load(function) }?;
                    }
                    build.capture(&before, |stream| self.node(cx, context, stream, &work))?
                }
            };
            made.push(became);
        }
        Ok(())
    }
}

impl Cuda {
    pub(super) fn instantiated(&self, graph: CUgraph, flags: u64) -> Result<CUgraphExec> {
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: a graph; writes a handle.
        unsafe { self.api.graph_instantiate(&mut exec, graph, flags & FLAGS) }?;
        Ok(exec)
    }

    /// Makes an instance do what a graph does: the driver's own update where it can, a new instance where it cannot.
    fn updated(&self, exec: CUgraphExec, build: &Build, flags: u64) -> Result<CUgraphExec> {
        let mut why = UpdateResult {
            result: 0,
            error_node: std::ptr::null_mut(),
            error_from_node: std::ptr::null_mut(),
        };
        // SAFETY: a live instance and a graph; writes what came of it.
        if unsafe { self.api.graph_update(exec, build.graph, &mut why) }.is_ok() {
            return Ok(exec);
        }
        let fresh = self.instantiated(build.graph, flags)?;
        // SAFETY: about to be replaced in the table; launches under way complete.
        let _ = unsafe { self.api.graph_exec_destroy(exec) };
        Ok(fresh)
    }
}

impl Session<Cuda> {
    fn graph_on(
        &mut self,
        cx: &mut Call,
        graph: GraphId,
        stream: StreamId,
    ) -> Result<(CUgraphExec, CUstream)> {
        let place = self.enter(cx, stream)?;
        let found = self.gpu.graphs.get(&graph.0).filter(|found| found.context == place.context.0);
        Ok((found.ok_or(Status::INVALID_HANDLE)?.exec, place.stream))
    }
}

impl GraphOps<Call> for Session<Cuda> {
    fn graph_instantiate<'a>(
        &mut self,
        cx: &mut Call,
        op: GraphInstantiate<'a>,
    ) -> Reply<GraphInstantiateReply> {
        cx.context = op.context;
        if self.gpu.graphs.contains_key(&op.graph.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let nodes = graph::read(&cx.input(op.nodes)?.collect(MAX_GRAPH)?)?;
        self.gpu.enter_context(op.context)?;
        let built =
            self.build(cx, op.context, &nodes).and_then(|build| self.gpu.instantiated(build.graph, op.flags));
        cx.context = op.context;
        let exec = self.gpu.note(op.context, built)?;
        self.gpu.graphs.insert(op.graph.0, ServerGraph { context: op.context.0, flags: op.flags, exec });
        Ok(Answer::Now(GraphInstantiateReply {}))
    }

    fn graph_update<'a>(&mut self, cx: &mut Call, op: GraphUpdate<'a>) -> Reply<GraphUpdateReply> {
        let found = self.gpu.graphs.get(&op.graph.0).ok_or(Status::INVALID_HANDLE)?;
        let (context, flags, exec) = (ContextId(found.context), found.flags, found.exec);
        cx.context = context;
        let nodes = graph::read(&cx.input(op.nodes)?.collect(MAX_GRAPH)?)?;
        self.gpu.enter_context(context)?;
        let updated = self.build(cx, context, &nodes).and_then(|build| self.gpu.updated(exec, &build, flags));
        cx.context = context;
        let exec = self.gpu.note(context, updated)?;
        self.gpu.graphs.insert(op.graph.0, ServerGraph { context: context.0, flags, exec });
        Ok(Answer::Now(GraphUpdateReply {}))
    }

    fn graph_launch(&mut self, cx: &mut Call, op: GraphLaunch) -> Result {
        let (exec, stream) = self.graph_on(cx, op.graph, op.stream)?;
        // SAFETY: live handles of the current context.
        let launched = unsafe { self.gpu.api.graph_launch(exec, stream) };
        self.gpu.note(cx.context, launched)
    }

    fn graph_upload(&mut self, cx: &mut Call, op: GraphUpload) -> Result {
        let (exec, stream) = self.graph_on(cx, op.graph, op.stream)?;
        // SAFETY: live handles of the current context.
        let uploaded = unsafe { self.gpu.api.graph_upload(exec, stream) };
        self.gpu.note(cx.context, uploaded)
    }

    fn graph_destroy(&mut self, cx: &mut Call, op: GraphDestroy) -> Result {
        let graph = self.gpu.graphs.remove(&op.graph.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(graph.context);
        self.gpu.enter_context(cx.context)?;
        // SAFETY: out of the table; launches under way complete.
        let destroyed = unsafe { self.gpu.api.graph_exec_destroy(graph.exec) };
        self.gpu.note(cx.context, destroyed)
    }

    fn graph_condition(&mut self, cx: &mut Call, op: GraphCondition) -> Reply<GraphConditionReply> {
        cx.context = op.context;
        self.make_condition(&op).map(|handle| Answer::Now(GraphConditionReply { handle }))
    }

    fn graph_conditional(&mut self, cx: &mut Call, op: GraphConditional) -> Reply<GraphConditionalReply> {
        cx.context = ContextId(self.gpu.drafts.get(op.graph)?.context);
        self.make_conditional(&op).map(|()| Answer::Now(GraphConditionalReply {}))
    }

    fn graph_conditional_remove(
        &mut self,
        cx: &mut Call,
        op: GraphConditionalRemove,
    ) -> Reply<GraphConditionalRemoveReply> {
        self.remove_conditional(cx, op.first).map(|()| Answer::Now(GraphConditionalRemoveReply {}))
    }

    fn graph_instantiate_draft<'a>(
        &mut self,
        cx: &mut Call,
        op: GraphInstantiateDraft<'a>,
    ) -> Reply<GraphInstantiateDraftReply> {
        self.instantiate_draft(cx, op)
    }

    fn graph_forget(&mut self, cx: &mut Call, op: GraphForget) -> Result {
        // One that is unknown has gone with its context.
        let Ok(draft) = self.gpu.drafts.get(op.graph) else { return Ok(()) };
        cx.context = ContextId(draft.context);
        self.gpu.drafts.forget(op.graph).map(drop)
    }
}
