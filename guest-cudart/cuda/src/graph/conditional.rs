//! Conditional nodes. The server's driver chooses the handle of a condition, for a graph of its own. So a
//! graph with conditions is known to the server, as a *draft*, before it is instantiated. The graphs of its
//! conditional nodes are drafts as well.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::result::Result;
use crate::abi::types::ConditionalNodeParams;
use crate::graph::instance::{self, Flat};
use crate::graph::node_work::Work;
use crate::graph::{Graph, Inner};
use crate::process::driver::Driver;
use client::handle::GraphId;
use client::ops::graph::{
    GraphConditional, GraphConditionalRemove, GraphForget, GraphNode, GraphPart, conditional,
};
use client::session::Session;
use client::{Status, lock};

/// What a conditional node does.
pub(crate) struct Conditional {
    pub kind: u32,
    /// Its condition.
    handle: u64,
    /// The node's graphs.
    pub bodies: Vec<Arc<Graph>>,
    /// Their handles. The program may read them here as long as the node exists.
    _handles: Box<[usize]>,
    /// The server's id of the first of them, which is the node's id as well.
    pub first: GraphId,
    session: &'static Session,
}

impl Conditional {
    /// Removes the node from the server's draft.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if the graph was instantiated before.
    pub fn remove(&self) -> Result {
        self.session.call(&GraphConditionalRemove { first: self.first }).map(|_| ())
    }

    /// Destroys the node's graphs.
    pub fn forget(&self) {
        self.bodies.iter().for_each(|body| body.destroy());
    }
}

/// A graph's draft.
#[derive(Default)]
pub(crate) struct Draft {
    pub id: OnceLock<(GraphId, &'static Session)>,
    /// Belongs to another draft.
    part: bool,
    /// The graph's conditions.
    pub conditions: Mutex<Vec<u64>>,
}

impl Draft {
    /// The server's id for it, once the server knows it.
    pub fn id(&self) -> Option<GraphId> {
        self.id.get().map(|(id, _)| *id)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let (Some((graph, session)), false) = (self.id.get().copied(), self.part) {
            // After the session is lost there is nothing to remove.
            let _ = session.append(&GraphForget { graph });
        }
    }
}

/// Whether a condition of a graph, or of its conditional nodes' graphs, has no node: such a graph has no
/// instances (`CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED`).
pub(crate) fn has_unused(graph: &Arc<Graph>) -> bool {
    if graph.draft.id().is_none() {
        return false;
    }
    let (mut made, mut used, mut open) = (HashSet::new(), HashSet::new(), vec![graph.clone()]);
    while let Some(graph) = open.pop() {
        made.extend(lock(&graph.draft.conditions).iter().copied());
        graph.each(|_, node| {
            if let Work::Conditional(node) = &node.work {
                used.insert(node.handle);
                open.extend(node.bodies.iter().cloned());
            }
        });
    }
    !made.is_subset(&used)
}

/// Makes a conditional node with empty graphs, and returns their handles.
pub(crate) fn described(graph: &Graph, p: &mut ConditionalNodeParams) -> Result<Work> {
    let session = graph.context.session();
    let known = match p.kind {
        conditional::IF => p.size == 1 || p.size == 2,
        conditional::WHILE => p.size == 1,
        // A limit, so that a bad number causes no huge allocation.
        conditional::SWITCH => (1..=1 << 16).contains(&p.size),
        _ => false,
    };
    let draft = graph.draft.id().filter(|_| known).ok_or(Status::INVALID_VALUE)?;
    let ids: Vec<GraphId> = (0..p.size).map(|_| instance::new_id()).collect();
    session.call(&GraphConditional { graph: draft, handle: p.handle, kind: p.kind, bodies: ids.clone() })?;
    let body = |id: &GraphId| {
        let mut body = Graph::with_parts(graph.context, None, true, Inner::default(), Vec::new());
        body.draft = Draft { id: OnceLock::from((*id, session)), part: true, conditions: Mutex::default() };
        Arc::new(body)
    };
    let bodies: Vec<Arc<Graph>> = ids.iter().map(body).collect();
    let handles: Box<[usize]> = bodies.iter().map(Graph::handle).collect::<Result<_>>()?;
    p.graphs = handles.as_ptr();
    let (kind, handle, first) = (p.kind, p.handle, ids[0]);
    Ok(Work::Conditional(Arc::new(Conditional { kind, handle, bodies, _handles: handles, first, session })))
}

/// Whether some of an instance's nodes are conditional.
pub(crate) fn any(nodes: &[Flat]) -> bool {
    nodes.iter().any(|node| matches!(node.work, Work::Conditional(_)))
}

/// The draft of an instance, and the contents of it and of the drafts that belong to it. The first are
/// `nodes`, which are those at `places`.
pub(crate) fn parts(
    driver: &Driver,
    all: &[Flat],
    places: &[usize],
    nodes: Vec<GraphNode>,
) -> Result<(GraphId, Vec<GraphPart>)> {
    let owner = places.iter().find_map(|place| match &all[*place].work {
        Work::Conditional(_) => all[*place].owner.upgrade(),
        _ => None,
    });
    let draft = owner.and_then(|graph| graph.draft.id()).ok_or(Status::INVALID_VALUE)?;
    let mut parts = vec![GraphPart { graph: draft, nodes }];
    let mut open: Vec<Arc<Conditional>> = conditionals(places.iter().map(|place| &all[*place]));
    while let Some(node) = open.pop() {
        for body in &node.bodies {
            let id = body.draft.id().ok_or(Status::INVALID_VALUE)?;
            let (nodes, more) = body_nodes(driver, body)?;
            parts.push(GraphPart { graph: id, nodes });
            open.extend(more);
        }
    }
    Ok((draft, parts))
}

fn conditionals<'a>(nodes: impl Iterator<Item = &'a Flat>) -> Vec<Arc<Conditional>> {
    nodes
        .filter_map(|node| match &node.work {
            Work::Conditional(conditional) => Some(conditional.clone()),
            _ => None,
        })
        .collect()
}

/// The nodes of a conditional node's graph. The server does all of them.
fn body_nodes(driver: &Driver, body: &Arc<Graph>) -> Result<(Vec<GraphNode>, Vec<Arc<Conditional>>)> {
    let mut nodes = Vec::new();
    instance::flatten(body, &[], &mut nodes);
    if nodes.iter().any(|node| matches!(node.work, Work::Alloc(_) | Work::Free(_))) {
        // CUDA does not allow such nodes there.
        return Err(Status::INVALID_VALUE);
    }
    let places: Vec<usize> = instance::plan(&nodes).into_iter().flat_map(|(_, places)| places).collect();
    if nodes.iter().any(|node| !node.is_servers()) {
        return refuse_form!(
            "a graph of a conditional node with copies from or to the host's memory, host functions or events"
        );
    }
    let described = instance::describe(&nodes, driver, body.context, &places)?;
    Ok((described, conditionals(nodes.iter())))
}

/// Logs that an instance with conditional nodes cannot be changed.
pub(crate) fn refuse_change<T>() -> Result<T> {
    refuse_form!("changing an instance of a graph with conditional nodes")
}

/// Logs that kernels which may set conditions are in another graph of the server's than the conditional
/// nodes.
pub(crate) fn refuse_apart<T>() -> Result<T> {
    refuse_form!(
        "a graph with conditional nodes that has kernels both before and after host functions, events or copies of host memory, or of several contexts"
    )
}
