//! What a profiler hears of graphs: their numbers, and news of graphs, nodes and instances that are made.
//!
//! Records of the devices' work name the instance. They name its nodes by numbers of the server, which
//! [`node_number`] never returns.

use std::sync::Arc;

use crate::abi::result::Result;
use crate::graph::instance::EXECS;
use crate::graph::{GRAPHS, Graph};
use crate::process::driver::driver;
use client::Status;
use client::activity::{self, Made, resource, resources_are_observed};

/// Distinguishes nodes of this process's graphs from those that records name.
const OF_PROGRAM: u64 = 1 << 62;

/// The number of a graph or an instance, by its handle.
pub(crate) fn number(handle: usize) -> Result<u32> {
    driver()?;
    let graph = GRAPHS.get(handle).map(|graph| graph.unique);
    let unique = graph.or_else(|| EXECS.get(handle).map(|exec| exec.unique)).ok_or(Status::INVALID_VALUE)?;
    Ok(unique as u32)
}

/// The number of a node, by its handle.
pub(crate) fn node_number(handle: usize) -> Result<u64> {
    let (graph, id) = crate::graph::node(handle)?;
    Ok(OF_PROGRAM | (graph.unique & 0x3fff_ffff) << 32 | id & 0xffff_ffff)
}

/// A graph was made. What cannot get a handle is not told, here and below.
pub(crate) fn made(graph: &Arc<Graph>) {
    tell(graph, |handle| Some(Made { what: resource::GRAPH_CREATED, graph: handle, ..Made::default() }));
}

/// A node was added.
pub(crate) fn node_added(graph: &Arc<Graph>, id: u64) {
    tell(graph, |handle| {
        let (node, node_type) = node(graph, id)?;
        Some(Made { what: resource::GRAPH_NODE_CREATED, graph: handle, node, node_type, ..Made::default() })
    });
}

/// A graph was made as a copy of another one.
pub(crate) fn cloned(original: &Arc<Graph>, graph: &Arc<Graph>) {
    if !resources_are_observed() {
        return;
    }
    let Ok(original_graph) = Graph::handle(original) else { return };
    tell(graph, |handle| {
        Some(Made { what: resource::GRAPH_CLONED, graph: handle, original_graph, ..Made::default() })
    });
    let mut nodes = Vec::new();
    graph.each(|id, _| nodes.push(id));
    for id in nodes {
        tell(graph, |handle| {
            let ((node, node_type), (original_node, _)) = (node(graph, id)?, node(original, id)?);
            let what = resource::GRAPH_NODE_CLONED;
            Some(Made {
                what,
                graph: handle,
                original_graph,
                node,
                original_node,
                node_type,
                ..Made::default()
            })
        });
    }
}

/// An instance of a graph was made.
pub(crate) fn instantiated(graph: &Arc<Graph>, exec: usize) {
    tell(graph, |handle| {
        Some(Made { what: resource::GRAPH_EXEC_CREATED, graph: handle, exec, ..Made::default() })
    });
}

/// A node's handle and type.
fn node(graph: &Arc<Graph>, id: u64) -> Option<(usize, u32)> {
    let kind = graph.with(id, |node| Ok(node.work.kind())).ok()?;
    Some((Graph::node(graph, id).ok()?, kind))
}

/// Tells what `describe` makes of the graph's handle, if anybody wants to know.
fn tell(graph: &Arc<Graph>, describe: impl FnOnce(usize) -> Option<Made>) {
    if !resources_are_observed() {
        return;
    }
    if let Some(made) = Graph::handle(graph).ok().and_then(describe) {
        activity::made(&Made { context: graph.context.handle, ..made });
    }
}
