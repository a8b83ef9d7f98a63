//! Graphs: lists of operations, put on the launch's stream one after the other, in an order in which each comes behind those that it waits for.

use std::collections::HashMap;
use std::sync::Arc;

use protocol::Status;
use protocol::handle::{ContextId, GraphId, StreamId};
use protocol::ops::Answer;
use protocol::ops::copy::{CopyOps, MemcpyDtoD, MemcpyDtoD3D, Memset};
use protocol::ops::graph::*;
use protocol::ops::launch::{Launch, LaunchOps};
use protocol::ops::stream::{StreamBatchMemOp, StreamOps};

use super::Software;
use super::conditional::{Cell, Conditionals};
use crate::driver::call::Call;
use crate::driver::gpu::Gpu as _;
use crate::driver::graph::{self, MAX_GRAPH, Work};
use crate::driver::session::Session;

/// An instantiated graph.
pub(super) struct SoftwareGraph {
    pub(super) context: u32,
    nodes: Arc<Vec<GraphNode>>,
    conditionals: Arc<Conditionals>,
}

/// The graphs of a session.
pub(super) type Graphs = HashMap<u32, SoftwareGraph>;

impl Session<Software> {
    /// The graph, whose context is the stream's.
    fn graph_on(
        &mut self,
        cx: &mut Call,
        graph: GraphId,
        stream: StreamId,
    ) -> Result<(Arc<Vec<GraphNode>>, Arc<Conditionals>), Status> {
        self.ensure_stream(stream)?;
        let place = self.gpu.look(cx, &mut self.streams, stream)?;
        let found = self.graphs.get(&graph.0).filter(|found| found.context == place.context.0);
        let found = found.ok_or(Status::INVALID_HANDLE)?;
        Ok((Arc::clone(&found.nodes), Arc::clone(&found.conditionals)))
    }

    /// Checks what a node names as far as it can be before it is launched.
    fn check_node(&mut self, cx: &mut Call, context: ContextId, node: &GraphNode) -> Result<(), Status> {
        if let Work::Launch(launch) = graph::work(node)? {
            cx.context = context;
            self.modules.to_launch(cx, launch.function)?;
        }
        Ok(())
    }

    fn read_graph(
        &mut self,
        cx: &mut Call,
        context: ContextId,
        nodes: protocol::data::HostIn<'_>,
    ) -> Result<Arc<Vec<GraphNode>>, Status> {
        let nodes = graph::read(&cx.input(nodes)?.collect(MAX_GRAPH)?)?;
        for node in &nodes {
            self.check_node(cx, context, node)?;
        }
        cx.context = context;
        let device = self.context(context)?.device;
        self.gpu.before_waiting_call(&self.streams, device)?;
        Ok(Arc::new(nodes))
    }
}

impl GraphOps<Call> for Session<Software> {
    fn graph_instantiate<'a>(
        &mut self,
        cx: &mut Call,
        op: GraphInstantiate<'a>,
    ) -> Result<Answer<GraphInstantiateReply>, Status> {
        cx.context = op.context;
        self.context(op.context)?;
        if self.graphs.contains_key(&op.graph.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let nodes = self.read_graph(cx, op.context, op.nodes)?;
        let conditionals = Arc::default();
        self.graphs.insert(op.graph.0, SoftwareGraph { context: op.context.0, nodes, conditionals });
        Ok(Answer::Now(GraphInstantiateReply {}))
    }

    fn graph_launch(&mut self, cx: &mut Call, op: GraphLaunch) -> Result<(), Status> {
        let (nodes, conditionals) = self.graph_on(cx, op.graph, op.stream)?;
        let stream = op.stream;
        let place = self.enter(cx, stream)?;
        conditionals.begin(&place)?;
        for node in nodes.iter() {
            match graph::work(node)? {
                Work::Empty => {}
                Work::Launch(op) => self.launch(cx, Launch { stream, ..op })?,
                Work::Memset(op) => self.memset(cx, Memset { stream, ..op })?,
                Work::Copy(op) => self.memcpy_dtod(cx, MemcpyDtoD { stream, ..op })?,
                Work::Copy3D(op) => self.memcpy_dtod_3d(cx, MemcpyDtoD3D { stream, ..op })?,
                Work::Words(op) => self.stream_batch_mem_op(cx, StreamBatchMemOp { stream, ..op })?,
                Work::Conditional(first) => {
                    let place = self.enter(cx, stream)?;
                    self.launch_conditional(cx, &place, &conditionals, first)?;
                }
            }
        }
        conditionals.end(&place)
    }

    fn graph_upload(&mut self, cx: &mut Call, op: GraphUpload) -> Result<(), Status> {
        // There is nowhere to upload it to.
        self.graph_on(cx, op.graph, op.stream).map(|_| ())
    }

    fn graph_update<'a>(
        &mut self,
        cx: &mut Call,
        op: GraphUpdate<'a>,
    ) -> Result<Answer<GraphUpdateReply>, Status> {
        let context = ContextId(self.graphs.get(&op.graph.0).ok_or(Status::INVALID_HANDLE)?.context);
        cx.context = context;
        let nodes = self.read_graph(cx, context, op.nodes)?;
        let conditionals = Arc::default();
        self.graphs.insert(op.graph.0, SoftwareGraph { context: context.0, nodes, conditionals });
        Ok(Answer::Now(GraphUpdateReply {}))
    }

    fn graph_destroy(&mut self, cx: &mut Call, op: GraphDestroy) -> Result<(), Status> {
        let graph = self.graphs.remove(&op.graph.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(graph.context);
        Ok(())
    }

    fn graph_condition(
        &mut self,
        cx: &mut Call,
        op: GraphCondition,
    ) -> Result<Answer<GraphConditionReply>, Status> {
        cx.context = op.context;
        let device = self.context(op.context)?.device;
        let fresh = self.drafts.may_have_condition(op.context, op.graph, op.flags)?;
        let cell = Cell::new(&self.device(device)?.gpu, op.default, op.flags)?;
        if fresh {
            self.drafts.add(op.context, op.graph, ());
        }
        let handle = cell.address;
        self.drafts.add_condition(op.graph, handle, Arc::new(cell));
        Ok(Answer::Now(GraphConditionReply { handle }))
    }

    fn graph_conditional(
        &mut self,
        cx: &mut Call,
        op: GraphConditional,
    ) -> Result<Answer<GraphConditionalReply>, Status> {
        cx.context = ContextId(self.drafts.may_have_node(&op)?.context);
        let graphs = vec![(); op.bodies.len()];
        self.drafts.add_node(&op, (), graphs);
        Ok(Answer::Now(GraphConditionalReply {}))
    }

    fn graph_conditional_remove(
        &mut self,
        cx: &mut Call,
        op: GraphConditionalRemove,
    ) -> Result<Answer<GraphConditionalRemoveReply>, Status> {
        cx.context = ContextId(self.drafts.owner(op.first)?.context);
        self.drafts.remove_node(op.first);
        Ok(Answer::Now(GraphConditionalRemoveReply {}))
    }

    fn graph_instantiate_draft<'a>(
        &mut self,
        cx: &mut Call,
        op: GraphInstantiateDraft<'a>,
    ) -> Result<Answer<GraphInstantiateDraftReply>, Status> {
        let context = ContextId(self.drafts.get(op.draft)?.context);
        cx.context = context;
        if self.graphs.contains_key(&op.graph.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let mut parts = graph::read_parts(&cx.input(op.parts)?.collect(MAX_GRAPH)?)?;
        self.drafts.check_parts(op.draft, &parts)?;
        for node in parts.parts.iter().flat_map(|part| &part.nodes) {
            self.check_node(cx, context, node)?;
        }
        cx.context = context;
        let device = self.context(context)?.device;
        self.gpu.before_waiting_call(&self.streams, device)?;
        let conditionals = Arc::new(self.conditionals(op.draft, &parts)?);
        let nodes = Arc::new(std::mem::take(&mut parts.parts[0].nodes));
        self.graphs.insert(op.graph.0, SoftwareGraph { context: context.0, nodes, conditionals });
        Ok(Answer::Now(GraphInstantiateDraftReply {}))
    }

    fn graph_forget(&mut self, cx: &mut Call, op: GraphForget) -> Result<(), Status> {
        // One that is unknown has gone with its context.
        let Ok(draft) = self.drafts.get(op.graph) else { return Ok(()) };
        cx.context = ContextId(draft.context);
        self.drafts.forget(op.graph).map(drop)
    }
}
