//! Graphs with conditional nodes. The driver chooses what kernels know a condition by, for a graph of its own; so that graph, and the graphs of its conditional nodes, are made
//! when the client asks for a condition or adds a node, and are filled when it is instantiated for the first time.

use protocol::Status;
use protocol::handle::{ContextId, GraphId};
use protocol::ops::Answer;
use protocol::ops::graph::*;

use super::Cuda;
use super::api::{Api, CUgraph, CUgraphNode, ConditionalNode};
use super::graph::{Build, ServerGraph};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::graph::{MAX_GRAPH, read_parts};
use crate::driver::session::Session;

/// The drafts of a session.
pub(super) type Drafts = crate::driver::conditional::Drafts<DraftGraph, CUgraphNode, ()>;

/// A draft's graph.
pub(super) struct DraftGraph {
    pub(super) graph: CUgraph,
    /// Of a draft that belongs to no other: the driver's functions, to destroy it with. The others go with their nodes.
    api: Option<&'static Api>,
    /// What it was filled with. Empty: it was begun, and that failed.
    filled: Option<Vec<u8>>,
}

impl Drop for DraftGraph {
    fn drop(&mut self) {
        if let Some(api) = self.api {
            // SAFETY: made by `make_condition`, out of the table; instances do not need it. A context that is gone may refuse, and has destroyed it.
            let _ = unsafe { api.graph_destroy(self.graph) };
        }
    }
}

impl Session<Cuda> {
    pub(super) fn make_condition(&mut self, op: &GraphCondition) -> Result<u64> {
        let context = self.gpu.enter_context(op.context)?.handle;
        let fresh = self.gpu.drafts.may_have_condition(op.context, op.graph, op.flags)?;
        if fresh {
            let mut graph: CUgraph = std::ptr::null_mut();
            // SAFETY: writes a handle.
            let made = unsafe { self.gpu.api.graph_create(&mut graph, 0) };
            self.gpu.note(op.context, made)?;
            let native = DraftGraph { graph, api: Some(self.gpu.api), filled: None };
            self.gpu.drafts.add(op.context, op.graph, native);
        }
        let graph = self.gpu.drafts.get(op.graph)?.graph.graph;
        let mut handle = 0;
        // SAFETY: a live graph and a live context; writes one integer.
        let made = unsafe { self.gpu.api.graph_condition(&mut handle, graph, context, op.default, op.flags) };
        self.gpu.note(op.context, made)?;
        self.gpu.drafts.add_condition(op.graph, handle, ());
        Ok(handle)
    }

    pub(super) fn make_conditional(&mut self, op: &GraphConditional) -> Result {
        let draft = self.gpu.drafts.may_have_node(op)?;
        let (id, graph) = (ContextId(draft.context), draft.graph.graph);
        if draft.graph.filled.is_some() {
            return Err(Status::NOT_SUPPORTED);
        }
        let context = self.gpu.enter_context(id)?.handle;
        let size = op.bodies.len() as u32;
        let mut params = ConditionalNode::new(op.handle, op.kind, size, context);
        let mut node: CUgraphNode = std::ptr::null_mut();
        // SAFETY: a live graph, no nodes to depend on, a description of this kind; writes a handle.
        let added =
            unsafe { self.gpu.api.graph_add_node(&mut node, graph, std::ptr::null(), 0, &mut params) };
        self.gpu.note(id, added)?;
        if params.graphs.is_null() {
            return Err(Status::UNKNOWN);
        }
        // SAFETY: the driver has written the place of as many graphs, which stays as long as the node.
        let graphs = unsafe { std::slice::from_raw_parts(params.graphs, op.bodies.len()) };
        let bodies = graphs.iter().map(|graph| DraftGraph { graph: *graph, api: None, filled: None });
        let bodies = bodies.collect();
        self.gpu.drafts.add_node(op, node, bodies);
        Ok(())
    }

    pub(super) fn remove_conditional(&mut self, cx: &mut Call, first: GraphId) -> Result {
        let owner = self.gpu.drafts.owner(first)?;
        let (context, root) = (ContextId(owner.context), GraphId(owner.root));
        cx.context = context;
        if self.gpu.drafts.get(root)?.graph.filled.is_some() {
            return Err(Status::NOT_SUPPORTED);
        }
        self.gpu.enter_context(context)?;
        // SAFETY: a live node, which goes out of the table with its graphs.
        let removed = unsafe { self.gpu.api.graph_destroy_node(self.gpu.drafts.node(first)?.native) };
        self.gpu.note(context, removed)?;
        self.gpu.drafts.remove_node(first);
        Ok(())
    }

    /// Puts everything into a draft's graphs that is not there yet.
    fn fill(
        &mut self,
        cx: &mut Call,
        context: ContextId,
        op: &GraphInstantiateDraft<'_>,
        bytes: Vec<u8>,
    ) -> Result<CUgraph> {
        let parts = read_parts(&bytes)?;
        self.gpu.drafts.check_parts(op.draft, &parts)?;
        let draft = self.gpu.drafts.get_mut(op.draft)?;
        let graph = draft.graph.graph;
        match &draft.graph.filled {
            Some(before) if *before == bytes => return Ok(graph),
            Some(_) => {
                tracing::warn!(
                    "a graph with conditional nodes was changed after it was instantiated: refused"
                );
                return Err(Status::NOT_SUPPORTED);
            }
            None => draft.graph.filled = Some(Vec::new()),
        }
        for part in &parts.parts {
            let graph = self.gpu.drafts.get(part.graph)?.graph.graph;
            let build = Build::into(self.gpu.api, graph)?;
            self.fill_graph(cx, context, &build, &part.nodes)?;
        }
        self.gpu.drafts.get_mut(op.draft)?.graph.filled = Some(bytes);
        Ok(graph)
    }

    pub(super) fn instantiate_draft(
        &mut self,
        cx: &mut Call,
        op: GraphInstantiateDraft<'_>,
    ) -> Reply<GraphInstantiateDraftReply> {
        let context = ContextId(self.gpu.drafts.get(op.draft)?.context);
        cx.context = context;
        if self.gpu.graphs.contains_key(&op.graph.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let bytes = cx.input(op.parts)?.collect(MAX_GRAPH)?;
        self.gpu.enter_context(context)?;
        let filled = self.fill(cx, context, &op, bytes);
        cx.context = context;
        let graph = self.gpu.note(context, filled)?;
        let exec = self.gpu.instantiated(graph, op.flags);
        let exec = self.gpu.note(context, exec)?;
        self.gpu.graphs.insert(op.graph.0, ServerGraph { context: context.0, flags: op.flags, exec });
        Ok(Answer::Now(GraphInstantiateDraftReply {}))
    }
}
