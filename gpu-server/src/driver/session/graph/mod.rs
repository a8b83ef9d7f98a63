//! Graphs: instances, and drafts, which have conditional nodes and are known before they are instantiated.
//!
//! - here: the operations, and the conversion of a client's list of nodes to the GPU's form;
//! - [`nodes`]: reads such a list;
//! - [`drafts`]: the session's drafts, conditional nodes and conditions.

mod drafts;
mod nodes;

use std::collections::BTreeSet;
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
    /// The places of nodes that were changed in the list, but not yet in `native`.
    changed: BTreeSet<u32>,
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
        self.instances
            .insert(id.0, Instance { context, flags, native, nodes, changed: BTreeSet::new(), failed: None });
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
    /// What a client's node does, in the GPU's form.
    fn work<'a>(&'a self, context: ContextId, node: &'a GraphNode) -> Result<NodeWork<'a, G>> {
        let home = self.device_of(context)?;
        Ok(match operation(node)? {
            Operation::Empty => NodeWork::Empty,
            Operation::Launch(launch) => {
                NodeWork::Launch { function: self.modules.function(context, launch.function)?, launch }
            }
            Operation::Memset(op) => self.checked_fill(&op, home)?.map_or(NodeWork::Empty, NodeWork::Fill),
            Operation::Copy(op) => NodeWork::CopyLine(self.checked_line(&op, home)?),
            Operation::Copy3D(op) => self.checked_box(&op, home)?.map_or(NodeWork::Empty, NodeWork::CopyBox),
            Operation::MemoryOps(op) => NodeWork::MemoryOps(self.memory_ops(&op.operations, home)?),
            Operation::Conditional(first) => NodeWork::Conditional(&self.graphs.drafts.node(first)?.native),
        })
    }

    /// A client's nodes in the GPU's form.
    fn resolve<'a>(&'a self, context: ContextId, nodes: &'a [GraphNode]) -> Result<Vec<Node<'a, G>>> {
        let resolved = |node: &'a GraphNode| {
            Ok(Node { work: self.work(context, node)?, dependencies: &node.dependencies })
        };
        nodes.iter().map(resolved).collect()
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

    /// Notes which nodes an instance should have, and why it does not have them: then launches fail.
    fn noted(&mut self, id: GraphId, nodes: Result<Arc<[GraphNode]>>, failed: Option<Status>) -> Result {
        let graph = self.graphs.get_mut(id)?;
        (graph.nodes, graph.failed) = (nodes, failed);
        graph.changed.clear();
        Ok(())
    }

    /// Makes later launches of an instance do what these nodes say, of which some were changed.
    fn change(&mut self, cx: &mut Call, id: GraphId, nodes: &[GraphNode]) -> Result {
        if self.change_in_place(cx, id, nodes)? {
            return Ok(());
        }
        let draft = self.draft(cx, cx.context, nodes)?;
        let graph = self.graphs.get_mut(id)?;
        self.gpu.replace_graph(graph.context, &mut graph.native, draft, graph.flags)
    }

    /// The same if the instance has the other nodes already, and the GPU can change these. Returns whether
    /// that is so.
    fn change_in_place(&mut self, cx: &mut Call, id: GraphId, nodes: &[GraphNode]) -> Result<bool> {
        let context = cx.context;
        self.gpu.enter(context)?;
        // While the nodes refer to the session, the instance does not belong to it.
        let Some(mut graph) = self.graphs.instances.remove(&id.0) else { return Err(Status::INVALID_HANDLE) };
        let place = |place: &u32| Some((*place, nodes.get(*place as usize)?));
        let changed = graph.changed.iter().filter_map(place);
        let changed: Result<Vec<_>> =
            changed.map(|(place, node)| Ok((place, self.work(context, node)?))).collect();
        let done = changed.map(|changed| {
            graph.failed.is_none() && self.gpu.change_nodes(context, &mut graph.native, changed)
        });
        self.graphs.instances.insert(id.0, graph);
        done
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
        self.noted(op.graph, Ok(nodes.into()), None)?;
        now(GraphUpdateReply {})
    }

    fn graph_change<'a>(&mut self, cx: &mut Call, op: GraphChange<'a>) -> Result {
        cx.context = self.graphs.get(op.graph)?.context;
        let nodes = nodes::read(op.nodes).map(Arc::from);
        let failed = nodes.clone().and_then(|nodes| self.update(cx, op.graph, &nodes)).err();
        self.noted(op.graph, nodes, failed)
    }

    fn graph_change_nodes(&mut self, cx: &mut Call, op: GraphChangeNodes) -> Result {
        let graph = self.graphs.get_mut(op.graph)?;
        cx.context = graph.context;
        let places: Vec<u32> = op.nodes.iter().map(|node| node.place).collect();
        let change = |nodes: &mut Arc<[GraphNode]>| nodes::change(Arc::make_mut(nodes), op.nodes);
        match graph.nodes.as_mut().map_err(|status| *status).and_then(change) {
            Ok(()) => graph.changed.extend(places),
            Err(status) => graph.nodes = Err(status),
        }
        let nodes = graph.nodes.clone();
        if !op.last && nodes.is_ok() {
            return Ok(());
        }
        let failed = nodes.clone().and_then(|nodes| self.change(cx, op.graph, &nodes)).err();
        self.noted(op.graph, nodes, failed)
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

#[cfg(test)]
mod tests {
    use protocol::data::HostIn;
    use protocol::handle::StreamId;
    use protocol::ops::Op;
    use protocol::ops::copy::Memset;
    use protocol::ops::memory::{MemAlloc, MemGrow, MemoryOps, window};
    use protocol::wire::{Bytes, Wire, Writer};

    use super::*;
    use crate::config::Backing;
    use crate::doubles::Listener;
    use crate::driver::Backend;
    use crate::driver::cuda::Cuda;
    use crate::driver::cuda::api::Api;
    use crate::driver::nvml::Management;
    use crate::driver::quota::Quota;

    const GRAPH: GraphId = GraphId(1);

    /// A session with some memory, on a driver that notes its calls.
    fn session() -> (Session<Cuda>, Call) {
        let quota = Quota::default();
        let nvml = Management::new(&Backing::software(64 << 20, 1), quota.clone());
        let mut session = Session::new(Cuda::fake_of(Api::noting(), 1), quota, nvml);
        let listener = || Arc::new(Listener::new(|_| ()));
        session.begin(listener());
        let mut call = Call::new(listener());
        let (address, size) = (window(0), 2 << 20);
        session.mem_grow(&mut call, MemGrow { device: 0, address, size }).unwrap();
        session.mem_alloc(&mut call, MemAlloc { address, size }).unwrap();
        (session, call)
    }

    fn bytes<'a>(value: &impl Wire<'a>) -> Vec<u8> {
        let mut bytes = Vec::new();
        value.put(&mut Writer(&mut bytes));
        bytes
    }

    fn fill(at: u64) -> GraphNode {
        let (stream, dst) = (StreamId(0), window(0) + at);
        let fill = Memset { stream, dst, pitch: 0, value: 1, element: 4, width: 1, height: 1 };
        GraphNode { opcode: <Memset as Op>::INFO.opcode, dependencies: Vec::new(), body: Bytes(bytes(&fill)) }
    }

    fn change(session: &mut Session<Cuda>, call: &mut Call, last: bool, changed: &[(u32, u64)]) {
        let node = |(place, at): &(u32, u64)| {
            let GraphNode { opcode, body, .. } = fill(*at);
            ChangedNode { place: *place, opcode, body }
        };
        let nodes = changed.iter().map(node).collect();
        session.graph_change_nodes(call, GraphChangeNodes { graph: GRAPH, last, nodes }).unwrap();
    }

    /// The calls for graphs since this was last asked.
    fn called() -> Vec<&'static str> {
        let names = Api::calls().into_iter().map(|(name, _)| name);
        names.filter(|name| name.starts_with("graph_") || name.starts_with("capture_")).collect()
    }

    #[test]
    fn the_driver_is_told_of_changed_nodes_only() {
        let (mut session, mut call) = session();
        let nodes = bytes(&GraphNodes { nodes: (0..4).map(|n| fill(n * 4)).collect() });
        let (context, nodes) = (ContextId(0), HostIn::Inline(&nodes));
        session
            .graph_instantiate(&mut call, GraphInstantiate { context, graph: GRAPH, flags: 0, nodes })
            .unwrap();
        // The first change captures the graph again, to learn which node is which.
        let again = [&["capture_begin"; 4][..], &["graph_instantiate"]].concat();
        called();
        change(&mut session, &mut call, true, &[(1, 100)]);
        assert_eq!(called(), again);
        change(&mut session, &mut call, true, &[(1, 200)]);
        assert_eq!(called(), ["graph_node_fill"]);
        // Two changes that are one.
        change(&mut session, &mut call, false, &[(0, 300), (1, 300)]);
        assert!(called().is_empty());
        change(&mut session, &mut call, true, &[(1, 400), (2, 300)]);
        assert_eq!(called(), ["graph_node_fill"; 3]);
        // After a refusal by the session, nodes that were not refused are missing, too.
        change(&mut session, &mut call, true, &[(2, 500), (3, 4 << 20)]);
        assert!(called().is_empty());
        assert!(session.graphs.get_in(GRAPH, context).is_err());
        change(&mut session, &mut call, true, &[(3, 0)]);
        assert_eq!(called(), again);
        assert!(session.graphs.get_in(GRAPH, context).is_ok());
        // After a refusal by the driver, it makes all of the graph.
        Api::refuse(Some("graph_node_fill"));
        change(&mut session, &mut call, true, &[(3, 8)]);
        assert_eq!(called(), [&["graph_node_fill"][..], &again].concat());
        assert!(session.graphs.get_in(GRAPH, context).is_ok());
    }
}
