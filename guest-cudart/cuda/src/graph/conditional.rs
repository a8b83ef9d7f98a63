//! Conditional nodes. What kernels know a condition by is chosen by the server's driver, for a graph of its own: so the server hears of a graph that has conditions, a *draft*,
//! before it is instantiated, and of the graphs of its conditional nodes, which are drafts as well.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::result::{Result, refuse_form};
use crate::abi::types::ConditionalNodeParams;
use crate::graph::instance::{self, Flat};
use crate::graph::node_work::Work;
use crate::graph::{GRAPHS, Graph, Inner};
use crate::process::driver::{Driver, driver};
use client::handle::GraphId;
use client::ops::graph::{
    GraphConditional, GraphConditionalRemove, GraphForget, GraphNode, GraphPart, conditional,
};
use client::{Status, lock};

/// What a conditional node does.
pub(crate) struct Conditional {
    pub kind: u32,
    /// Its condition.
    handle: u64,
    /// The node's graphs.
    pub bodies: Vec<Arc<Graph>>,
    /// Their handles: not for this library, but for the program, which may read them as long as the node is there.
    _handles: Box<[usize]>,
    /// The server's name for the first of them, which is the node's as well.
    pub first: GraphId,
}

impl Conditional {
    /// Takes the node out of the server's draft.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` from a server whose graph has been instantiated.
    pub fn remove(&self) -> Result {
        driver()?.session.call(&GraphConditionalRemove { first: self.first }).map(|_| ())
    }

    /// The node is no more, nor are its graphs.
    pub fn forget(&self) {
        for body in &self.bodies {
            body.clear();
            if let Some(handle) = body.handle.get() {
                GRAPHS.remove(*handle);
            }
        }
    }
}

/// A graph's draft.
#[derive(Default)]
pub(crate) struct Draft {
    pub id: OnceLock<GraphId>,
    /// Belongs to another.
    part: bool,
    /// Conditions that were made for the graph.
    pub conditions: Mutex<Vec<u64>>,
}

impl Draft {
    /// The server's name for it, if the server knows it.
    pub fn id(&self) -> Option<GraphId> {
        self.id.get().copied()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let (Some(graph), false, Ok(driver)) = (self.id(), self.part, driver()) {
            // A lost session has none.
            let _ = driver.session.append(&GraphForget { graph });
        }
    }
}

/// Whether a condition of a graph, or of its conditional nodes' graphs, has no node: such a graph has no instances (`CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED`).
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

/// A conditional node, with empty graphs, whose handles are told.
pub(crate) fn described(graph: &Graph, p: &mut ConditionalNodeParams) -> Result<Work> {
    let driver = driver()?;
    let known = match p.kind {
        conditional::IF => p.size == 1 || p.size == 2,
        conditional::WHILE => p.size == 1,
        // A limit, so that a wild number is no allocation.
        conditional::SWITCH => (1..=1 << 16).contains(&p.size),
        _ => false,
    };
    let draft = graph.draft.id().filter(|_| known).ok_or(Status::INVALID_VALUE)?;
    let ids: Vec<GraphId> = (0..p.size).map(|_| instance::new_id()).collect();
    driver.session.call(&GraphConditional {
        graph: draft,
        handle: p.handle,
        kind: p.kind,
        bodies: ids.clone(),
    })?;
    let body = |id: &GraphId| {
        let mut body = Graph::with_parts(graph.context, None, true, Inner::default(), Vec::new());
        body.draft = Draft { id: OnceLock::from(*id), part: true, conditions: Mutex::default() };
        Arc::new(body)
    };
    let bodies: Vec<Arc<Graph>> = ids.iter().map(body).collect();
    let handles: Box<[usize]> = bodies.iter().map(Graph::handle).collect::<Result<_>>()?;
    p.graphs = handles.as_ptr();
    let (kind, handle, first) = (p.kind, p.handle, ids[0]);
    Ok(Work::Conditional(Arc::new(Conditional { kind, handle, bodies, _handles: handles, first })))
}

/// Whether some of an instance's nodes are conditional.
pub(crate) fn any(nodes: &[Flat]) -> bool {
    nodes.iter().any(|node| matches!(node.work, Work::Conditional(_)))
}

/// The draft that an instance's nodes go into, and what goes into it and into those that belong to it: `nodes`, which are those at `places`, first.
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

/// What a conditional node's graph does: all of it the server's.
fn body_nodes(driver: &Driver, body: &Arc<Graph>) -> Result<(Vec<GraphNode>, Vec<Arc<Conditional>>)> {
    static SAID: AtomicBool = AtomicBool::new(false);
    let mut nodes = Vec::new();
    instance::flatten(body, &[], &mut nodes);
    if nodes.iter().any(|node| matches!(node.work, Work::Alloc(_) | Work::Free(_))) {
        // CUDA has no such nodes there.
        return Err(Status::INVALID_VALUE);
    }
    let places: Vec<usize> = instance::plan(&nodes).into_iter().flat_map(|(_, places)| places).collect();
    if nodes.iter().any(|node| !node.is_servers()) {
        return refuse_form(
            "a graph of a conditional node with copies from or to the host's memory, host functions or events",
            &SAID,
        );
    }
    let described = instance::describe(&nodes, driver, body.context, &places)?;
    Ok((described, conditionals(nodes.iter())))
}

/// Notes that an instance with conditional nodes does not change.
pub(crate) fn refuse_change<T>() -> Result<T> {
    static SAID: AtomicBool = AtomicBool::new(false);
    refuse_form("changing an instance of a graph with conditional nodes", &SAID)
}

/// Notes that kernels which may set conditions are apart from the nodes that have them.
pub(crate) fn refuse_apart<T>() -> Result<T> {
    static SAID: AtomicBool = AtomicBool::new(false);
    refuse_form(
        "a graph with conditional nodes whose kernels stand before and behind steps of this process",
        &SAID,
    )
}
