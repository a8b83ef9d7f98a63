//! Graphs: instances, and drafts, which have conditional nodes and are known before they are instantiated.
//!
//! - here: the operations, and the conversion of a client's list of nodes to the GPU's form;
//! - [`nodes`]: reads such a list;
//! - [`drafts`]: the session's drafts, conditional nodes and conditions.

mod drafts;
mod nodes;

use std::sync::Arc;

use protocol::Status;
use protocol::handle::{ContextId, GraphId};
use protocol::ops::graph::*;

use self::drafts::{Contents, Drafts};
use self::nodes::{MAX_GRAPH, Operation, operation};
use super::{Session, now};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::{Gpu, GpuGraphs, Node, NodeWork};
use crate::driver::ids::Ids;

/// The session's graphs.
pub(super) struct Graphs<G: GpuGraphs> {
    instances: Ids<Instance<G::Graph>>,
    drafts: Drafts<G::Draft, G::Conditional>,
}

/// An instantiated graph. `N` belongs to the GPU.
struct Instance<N> {
    context: ContextId,
    flags: u64,
    native: N,
    /// Its nodes as they should be; the status of changes to some of them if they are not known.
    nodes: Result<Arc<[GraphNode]>>,
    /// Why the last change without an answer failed. Then it cannot be launched.
    failed: Option<Status>,
}

impl<G: GpuGraphs> Default for Graphs<G> {
    fn default() -> Self {
        Graphs { instances: Ids::default(), drafts: Drafts::default() }
    }
}

impl<G: GpuGraphs> Graphs<G> {
    /// Drops the graphs of a destroyed context.
    pub(super) fn forget_context(&mut self, context: ContextId) {
        self.instances.retain(|_, graph| graph.context != context);
        self.drafts.forget_context(context);
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.instances.is_empty() && self.drafts.is_empty()
    }

    /// Checks that an instance may get this ID.
    fn check_new(&self, id: GraphId) -> Result {
        if self.instances.contains_key(&id.0) { Err(Status::INVALID_HANDLE) } else { Ok(()) }
    }

    fn get(&self, id: GraphId) -> Result<&Instance<G::Graph>> {
        self.instances.get(&id.0).ok_or(Status::INVALID_HANDLE)
    }

    fn get_mut(&mut self, id: GraphId) -> Result<&mut Instance<G::Graph>> {
        self.instances.get_mut(&id.0).ok_or(Status::INVALID_HANDLE)
    }

    fn add(
        &mut self,
        id: GraphId,
        context: ContextId,
        flags: u64,
        native: G::Graph,
        nodes: Result<Arc<[GraphNode]>>,
    ) {
        self.instances.insert(id.0, Instance { context, flags, native, nodes, failed: None });
    }

    /// An instance of a context, for a launch.
    fn get_in(&self, id: GraphId, context: ContextId) -> Result<&G::Graph> {
        match self.get(id)? {
            Instance { failed: Some(status), .. } => Err(*status),
            found if found.context == context => Ok(&found.native),
            _ => Err(Status::INVALID_HANDLE),
        }
    }
}

impl<G: Gpu> Session<G> {
    /// A client's nodes in the GPU's form.
    fn resolve<'a>(&'a self, context: ContextId, nodes: &'a [GraphNode]) -> Result<Vec<Node<'a, G>>> {
        let home = self.device_of(context)?;
        let work = |node: &'a GraphNode| {
            Ok(match operation(node)? {
                Operation::Empty => NodeWork::Empty,
                Operation::Launch(launch) => {
                    NodeWork::Launch { function: self.modules.function(context, launch.function)?, launch }
                }
                Operation::Memset(op) => {
                    self.checked_fill(&op, home)?.map_or(NodeWork::Empty, NodeWork::Fill)
                }
                Operation::Copy(op) => NodeWork::CopyLine(self.checked_line(&op, home)?),
                Operation::Copy3D(op) => {
                    self.checked_box(&op, home)?.map_or(NodeWork::Empty, NodeWork::CopyBox)
                }
                Operation::MemoryOps(op) => NodeWork::MemoryOps(self.memory_ops(&op.operations, home)?),
                Operation::Conditional(first) => {
                    NodeWork::Conditional(&self.graphs.drafts.node(first)?.native)
                }
            })
        };
        nodes.iter().map(|node| Ok(Node { work: work(node)?, dependencies: &node.dependencies })).collect()
    }

    /// Puts a client's nodes into a draft. The context was entered.
    fn fill(&self, context: ContextId, draft: &G::Draft, nodes: &[GraphNode]) -> Result {
        self.gpu.fill_draft(context, draft, self.resolve(context, nodes)?)
    }

    /// Makes a draft from a client's nodes, after entering a context for it.
    fn draft(&mut self, cx: &mut Call, context: ContextId, nodes: &[GraphNode]) -> Result<G::Draft> {
        cx.context = context;
        self.gpu.before_waiting_call(&self.streams, self.device_of(context)?)?;
        self.gpu.enter(context)?;
        let draft = self.gpu.make_draft(context)?;
        self.fill(context, &draft, nodes)?;
        Ok(draft)
    }

    /// Fills a draft that has exactly these parts, unless it was already filled with the same.
    fn fill_parts(&mut self, context: ContextId, draft: GraphId, bytes: Vec<u8>) -> Result {
        let parts = nodes::read_parts(&bytes)?;
        self.graphs.drafts.check_parts(draft, &parts)?;
        match self.graphs.drafts.contents_mut(draft)? {
            Contents::Filled(before) if *before == bytes => return Ok(()),
            contents @ Contents::Open => *contents = Contents::Failed,
            Contents::Filled(_) | Contents::Failed => {
                tracing::warn!(
                    "a graph with conditional nodes was changed after it was instantiated, and then instantiated \
                     again: that is not supported; build a new graph instead"
                );
                return Err(Status::NOT_SUPPORTED);
            }
        }
        for part in &parts.parts {
            self.fill(context, &self.graphs.drafts.get(part.graph)?.native, &part.nodes)?;
        }
        *self.graphs.drafts.contents_mut(draft)? = Contents::Filled(bytes);
        Ok(())
    }

    /// Makes later launches of an instance do what these nodes say.
    fn update(&mut self, cx: &mut Call, id: GraphId, nodes: &[GraphNode]) -> Result {
        let draft = self.draft(cx, cx.context, nodes)?;
        let graph = self.graphs.get_mut(id)?;
        self.gpu.update_graph(graph.context, &mut graph.native, &draft, graph.flags)
    }

    /// The same without an answer: launches fail as long as the nodes are not as they should be.
    fn change(&mut self, cx: &mut Call, id: GraphId, nodes: Result<Arc<[GraphNode]>>) -> Result {
        let failed = nodes.clone().and_then(|nodes| self.update(cx, id, &nodes)).err();
        let graph = self.graphs.get_mut(id)?;
        (graph.nodes, graph.failed) = (nodes, failed);
        Ok(())
    }

    /// Checks that conditional nodes may still be added to or removed from a draft. Enters its context, which
    /// becomes the call's.
    fn enter_open_draft(&mut self, cx: &mut Call, graph: GraphId) -> Result<ContextId> {
        let draft = self.graphs.drafts.get(graph)?;
        let (context, root) = (ContextId(draft.context), GraphId(draft.root));
        cx.context = context;
        if !matches!(self.graphs.drafts.contents_mut(root)?, Contents::Open) {
            return Err(Status::NOT_SUPPORTED);
        }
        self.gpu.enter(context)?;
        Ok(context)
    }
}

impl<G: Gpu> GraphOps<Call> for Session<G> {
    fn graph_instantiate<'a>(
        &mut self,
        cx: &mut Call,
        op: GraphInstantiate<'a>,
    ) -> Reply<GraphInstantiateReply> {
        let context = op.context;
        cx.context = context;
        self.graphs.check_new(op.graph)?;
        let nodes = nodes::read(&cx.input(op.nodes)?.collect(MAX_GRAPH)?)?;
        let draft = self.draft(cx, context, &nodes)?;
        let native = self.gpu.instantiate(context, &draft, op.flags)?;
        self.graphs.add(op.graph, context, op.flags, native, Ok(nodes.into()));
        now(GraphInstantiateReply {})
    }

    fn graph_update<'a>(&mut self, cx: &mut Call, op: GraphUpdate<'a>) -> Reply<GraphUpdateReply> {
        cx.context = self.graphs.get(op.graph)?.context;
        let nodes = nodes::read(&cx.input(op.nodes)?.collect(MAX_GRAPH)?)?;
        self.update(cx, op.graph, &nodes)?;
        let graph = self.graphs.get_mut(op.graph)?;
        (graph.nodes, graph.failed) = (Ok(nodes.into()), None);
        now(GraphUpdateReply {})
    }

    fn graph_change<'a>(&mut self, cx: &mut Call, op: GraphChange<'a>) -> Result {
        cx.context = self.graphs.get(op.graph)?.context;
        self.change(cx, op.graph, nodes::read(op.nodes).map(Arc::from))
    }

    fn graph_change_nodes(&mut self, cx: &mut Call, op: GraphChangeNodes) -> Result {
        let graph = self.graphs.get_mut(op.graph)?;
        cx.context = graph.context;
        let change = |nodes: &mut Arc<[GraphNode]>| nodes::change(Arc::make_mut(nodes), op.nodes);
        if let Err(status) = graph.nodes.as_mut().map_err(|status| *status).and_then(change) {
            graph.nodes = Err(status);
        }
        let nodes = graph.nodes.clone();
        if op.last || nodes.is_err() { self.change(cx, op.graph, nodes) } else { Ok(()) }
    }

    fn graph_launch(&mut self, cx: &mut Call, op: GraphLaunch) -> Result {
        let place = self.enter_to_work(cx, op.stream)?;
        self.launch_watched(cx, op.stream, |session, cx| {
            session.gpu.launch_graph(cx, &place, session.graphs.get_in(op.graph, cx.context)?)
        })
    }

    fn graph_upload(&mut self, cx: &mut Call, op: GraphUpload) -> Result {
        let place = self.enter(cx, op.stream)?;
        self.gpu.upload_graph(&place, self.graphs.get_in(op.graph, cx.context)?)
    }

    fn graph_destroy(&mut self, cx: &mut Call, op: GraphDestroy) -> Result {
        let graph = self.graphs.instances.remove(&op.graph.0).ok_or(Status::INVALID_HANDLE)?;
        cx.context = graph.context;
        self.gpu.enter(graph.context)?;
        self.gpu.destroy_graph(graph.context, graph.native)
    }

    fn graph_condition(&mut self, cx: &mut Call, op: GraphCondition) -> Reply<GraphConditionReply> {
        cx.context = op.context;
        self.gpu.enter(op.context)?;
        if self.graphs.drafts.check_new_condition(op.context, op.graph, op.flags)? {
            let native = self.gpu.make_draft(op.context)?;
            self.graphs.drafts.add(op.context, op.graph, native);
        }
        let draft = &self.graphs.drafts.get(op.graph)?.native;
        let handle = self.gpu.make_condition(op.context, draft, op.default, op.flags)?;
        self.graphs.drafts.add_condition(op.graph, handle);
        now(GraphConditionReply { handle })
    }

    fn graph_conditional(&mut self, cx: &mut Call, op: GraphConditional) -> Reply<GraphConditionalReply> {
        self.graphs.drafts.check_new_node(&op)?;
        let context = self.enter_open_draft(cx, op.graph)?;
        let draft = &self.graphs.drafts.get(op.graph)?.native;
        let (node, graphs) = self.gpu.add_conditional(context, draft, op.handle, op.kind, op.bodies.len())?;
        self.graphs.drafts.add_node(&op, node, graphs);
        now(GraphConditionalReply {})
    }

    fn graph_conditional_remove(
        &mut self,
        cx: &mut Call,
        op: GraphConditionalRemove,
    ) -> Reply<GraphConditionalRemoveReply> {
        let owner = self.graphs.drafts.owner(op.first)?;
        let context = self.enter_open_draft(cx, owner)?;
        self.gpu.remove_conditional(context, &self.graphs.drafts.node(op.first)?.native)?;
        self.graphs.drafts.remove_node(op.first);
        now(GraphConditionalRemoveReply {})
    }

    fn graph_instantiate_draft<'a>(
        &mut self,
        cx: &mut Call,
        op: GraphInstantiateDraft<'a>,
    ) -> Reply<GraphInstantiateDraftReply> {
        let context = ContextId(self.graphs.drafts.get(op.draft)?.context);
        cx.context = context;
        self.graphs.check_new(op.graph)?;
        let bytes = cx.input(op.parts)?.collect(MAX_GRAPH)?;
        self.gpu.before_waiting_call(&self.streams, self.device_of(context)?)?;
        self.gpu.enter(context)?;
        self.fill_parts(context, op.draft, bytes)?;
        let draft = &self.graphs.drafts.get(op.draft)?.native;
        let native = self.gpu.instantiate(context, draft, op.flags)?;
        self.graphs.add(op.graph, context, op.flags, native, Err(Status::NOT_SUPPORTED));
        now(GraphInstantiateDraftReply {})
    }

    fn graph_forget(&mut self, cx: &mut Call, op: GraphForget) -> Result {
        // An unknown draft was destroyed with its context.
        let Ok(draft) = self.graphs.drafts.get(op.graph) else { return Ok(()) };
        cx.context = ContextId(draft.context);
        self.graphs.drafts.forget(op.graph)
    }
}
