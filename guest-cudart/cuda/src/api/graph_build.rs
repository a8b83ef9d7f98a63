//! Making graphs: nodes, dependencies, clones.

use std::sync::Arc;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::abi::types::{
    BatchMemOpNodeParams, GraphNodeParams, HostNodeParams, KernelNodeParams, KernelNodeParams1,
    MemAllocNodeParams, Memcpy3D, MemsetNodeParams,
};
use crate::graph::node_work::Work;
use crate::graph::{Edge, EdgeData, GRAPHS, Graph, edge_data, edges, node, node_description, of};
use crate::process::context;
use crate::process::driver::driver;
use client::Status;

/// Adds a node and tells its handle.
unsafe fn add(
    to: *mut usize,
    graph: usize,
    before: *const usize,
    data: *const EdgeData,
    count: usize,
    work: impl FnOnce(&Arc<Graph>, &[Edge]) -> Result<Work>,
) -> Result {
    non_null(to)?;
    let graph = of(graph)?;
    // SAFETY: as many nodes, and as much data unless it is NULL, as the program says; the place is not NULL.
    unsafe {
        let before = edges(&graph, before, data, count)?;
        let work = work(&graph, &before)?;
        let id = graph.add(work, before)?;
        put(to, Graph::node(&graph, id)?)
    }
}

/// The numbers of both ends of dependencies between nodes of a graph.
///
/// # Safety
/// `from` and `to` may be read for `count` nodes.
unsafe fn pairs(
    graph: &Arc<Graph>,
    from: *const usize,
    to: *const usize,
    count: usize,
) -> Result<Vec<(u64, u64)>> {
    // SAFETY: as the caller says.
    let ends = unsafe {
        crate::graph::nodes(graph, from, count)?.into_iter().zip(crate::graph::nodes(graph, to, count)?)
    };
    Ok(ends.collect())
}

/// Adds dependencies, with what is said of each.
///
/// # Safety
/// As of [`pairs`]; `data` may be read for as many, unless it is NULL.
unsafe fn connect(
    graph: usize,
    from: *const usize,
    to: *const usize,
    data: *const EdgeData,
    count: usize,
) -> Result {
    let graph = of(graph)?;
    // SAFETY: as the caller says.
    let ends = unsafe { pairs(&graph, from, to, count) }?.into_iter().enumerate();
    // SAFETY: as above.
    let edges = ends.map(|(i, (from, to))| Ok((from, to, unsafe { edge_data(data, i) }?)));
    graph.connect(&edges.collect::<Result<Vec<_>>>()?)
}

api! {
    fn cuGraphCreate(graph: *mut usize, flags: u32) {
        non_null(graph)?;
        let (_, context) = context::ready()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        put(graph, Graph::handle(&Arc::new(Graph::new(context)))?)
    }

    fn cuGraphDestroy(handle: usize) {
        if of(handle)?.part {
            return Err(Status::INVALID_VALUE);
        }
        GRAPHS.remove(handle).ok_or(Status::INVALID_VALUE)?.clear();
        Ok(())
    }

    fn cuGraphClone(to: *mut usize, graph: usize) {
        non_null(to)?;
        put(to, Graph::handle(&Arc::new(of(graph)?.copy(false)?))?)
    }

    fn cuGraphNodeFindInClone(to: *mut usize, original: usize, clone: usize) {
        non_null(to)?;
        let (graph, id) = node(original)?;
        let clone = of(clone)?;
        if clone.origin != Some(graph.unique) {
            return Err(Status::INVALID_VALUE);
        }
        put(to, Graph::node(&clone, id)?)
    }

    fn cuGraphDestroyNode(handle: usize) {
        let (graph, id) = node(handle)?;
        graph.remove(id)
    }

    fn cuGraphAddEmptyNode(node: *mut usize, graph: usize, before: *const usize, count: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| Ok(Work::Empty))
    }

    fn cuGraphAddKernelNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const KernelNodeParams1) {
        non_null(p)?;
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::kernel(&KernelNodeParams::from(&*p)))
    }

    fn cuGraphAddKernelNode_v2(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const KernelNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::kernel(p))
    }

    fn cuGraphAddMemcpyNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const Memcpy3D, ctx: usize) {
        context::of(ctx)?;
        add(node, graph, before, std::ptr::null(), count, |_, _| Work::copy(driver()?, p))
    }

    fn cuGraphAddMemsetNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const MemsetNodeParams, ctx: usize) {
        context::of(ctx)?;
        add(node, graph, before, std::ptr::null(), count, |_, _| Work::fill(driver()?, p))
    }

    fn cuGraphAddHostNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const HostNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::host(p))
    }

    fn cuGraphAddChildGraphNode(node: *mut usize, graph: usize, before: *const usize, count: usize, part: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::child(part))
    }

    fn cuGraphAddBatchMemOpNode(
        node: *mut usize, graph: usize, before: *const usize, count: usize, p: *const BatchMemOpNodeParams
    ) {
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::words(p))
    }

    fn cuGraphAddEventRecordNode(node: *mut usize, graph: usize, before: *const usize, count: usize, event: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::recorded(event))
    }

    fn cuGraphAddEventWaitNode(node: *mut usize, graph: usize, before: *const usize, count: usize, event: usize) {
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::waited(event))
    }

    fn cuGraphAddMemAllocNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *mut MemAllocNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |graph, before| node_description::alloc(graph, before, p))
    }

    fn cuGraphAddMemFreeNode(node: *mut usize, graph: usize, before: *const usize, count: usize, address: u64) {
        add(node, graph, before, std::ptr::null(), count, |_, _| node_description::freed(address))
    }

    fn cuGraphAddNode(node: *mut usize, graph: usize, before: *const usize, count: usize, p: *mut GraphNodeParams) {
        add(node, graph, before, std::ptr::null(), count, |graph, before| node_description::generic(graph, before, p))
    }

    fn cuGraphAddNode_v2(
        node: *mut usize, graph: usize, before: *const usize, data: *const EdgeData, count: usize, p: *mut GraphNodeParams
    ) {
        add(node, graph, before, data, count, |graph, before| node_description::generic(graph, before, p))
    }

    fn cuGraphAddDependencies(graph: usize, from: *const usize, to: *const usize, count: usize) {
        connect(graph, from, to, std::ptr::null(), count)
    }

    fn cuGraphAddDependencies_v2(graph: usize, from: *const usize, to: *const usize, data: *const EdgeData, count: usize) {
        connect(graph, from, to, data, count)
    }

    fn cuGraphRemoveDependencies(graph: usize, from: *const usize, to: *const usize, count: usize) {
        let graph = of(graph)?;
        graph.disconnect(&pairs(&graph, from, to, count)?)
    }

    fn cuGraphRemoveDependencies_v2(graph: usize, from: *const usize, to: *const usize, data: *const EdgeData, count: usize) {
        // Whatever is said of them: NVIDIA's driver does not look at the data, of which its manual says that it must match.
        let _ = data;
        let graph = of(graph)?;
        graph.disconnect(&pairs(&graph, from, to, count)?)
    }
}
