//! Building graphs: nodes, dependencies, clones.

use std::sync::Arc;

use crate::abi::arguments::{Array, Count, In, InOut, Out};
use crate::abi::result::Result;
use crate::abi::types::{
    BatchMemOpNodeParams, GraphNodeParams, HostNodeParams, KernelNodeParams, KernelNodeParams1,
    MemAllocNodeParams, Memcpy3D, MemsetNodeParams,
};
use crate::graph::node_work::Work;
use crate::graph::{
    Edge, EdgeData, GRAPHS, Graph, edge_data, edges, node, node_description, nodes, of, told,
};
use crate::process::context;
use crate::process::driver::driver;
use client::Status;

/// Adds a node and returns its handle.
fn add(
    to: Out<usize>,
    graph: usize,
    before: Array<usize>,
    data: Array<EdgeData>,
    count: Count,
    work: impl FnOnce(&Arc<Graph>, &[Edge]) -> Result<Work>,
) -> Result {
    to.required()?;
    let graph = of(graph)?;
    let before = edges(&graph, before, data, count)?;
    let work = work(&graph, &before)?;
    let id = graph.add(work, before)?;
    to.put(Graph::node(&graph, id)?)?;
    told::node_added(&graph, id);
    Ok(())
}

/// The node numbers at both ends of each dependency.
fn pairs(graph: &Arc<Graph>, from: Array<usize>, to: Array<usize>, count: Count) -> Result<Vec<(u64, u64)>> {
    Ok(nodes(graph, from, count)?.into_iter().zip(nodes(graph, to, count)?).collect())
}

/// Adds dependencies with their edge data.
fn connect(
    graph: usize,
    from: Array<usize>,
    to: Array<usize>,
    data: Array<EdgeData>,
    count: Count,
) -> Result {
    let graph = of(graph)?;
    let ends = pairs(&graph, from, to, count)?;
    let data = edge_data(data, count, ends.len())?;
    let edges: Vec<_> = ends.into_iter().zip(data).map(|((from, to), data)| (from, to, data)).collect();
    graph.connect(&edges)
}

api! {
    fn cuGraphCreate(graph: Out<usize>, flags: u32) {
        graph.required()?;
        let (_, context) = context::ready()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let made = Arc::new(Graph::new(context));
        graph.put(Graph::handle(&made)?)?;
        told::made(&made);
        Ok(())
    }

    fn cuGraphDestroy(handle: usize) {
        let graph = of(handle)?;
        if graph.part || graph.is_moved() {
            return Err(Status::INVALID_VALUE);
        }
        GRAPHS.remove(handle).ok_or(Status::INVALID_VALUE)?.clear();
        Ok(())
    }

    fn cuGraphClone(to: Out<usize>, graph: usize) {
        to.required()?;
        let original = of(graph)?;
        let clone = Arc::new(original.copy(false)?);
        to.put(Graph::handle(&clone)?)?;
        told::cloned(&original, &clone);
        Ok(())
    }

    fn cuGraphNodeFindInClone(to: Out<usize>, original: usize, clone: usize) {
        to.required()?;
        let (graph, id) = node(original)?;
        let clone = of(clone)?;
        if clone.origin != Some(graph.unique) {
            return Err(Status::INVALID_VALUE);
        }
        to.put(Graph::node(&clone, id)?)
    }

    fn cuGraphDestroyNode(handle: usize) {
        let (graph, id) = node(handle)?;
        graph.remove(id)
    }

    fn cuGraphAddEmptyNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count) {
        add(node, graph, before, Array::NULL, count, |_, _| Ok(Work::Empty))
    }

    unsafe fn cuGraphAddKernelNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: In<KernelNodeParams1>) {
        p.required()?;
        add(node, graph, before, Array::NULL, count, |_, _| {
            // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
            unsafe { node_description::kernel(In::from(&KernelNodeParams::from(&p.get()?))) }
        })
    }

    unsafe fn cuGraphAddKernelNode_v2(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: In<KernelNodeParams>) {
        add(node, graph, before, Array::NULL, count, |_, _| {
            // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
            unsafe { node_description::kernel(p) }
        })
    }

    fn cuGraphAddMemcpyNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: In<Memcpy3D>, ctx: usize) {
        context::of(ctx)?;
        add(node, graph, before, Array::NULL, count, |_, _| Work::copy(driver()?, &p.get()?))
    }

    fn cuGraphAddMemsetNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: In<MemsetNodeParams>, ctx: usize) {
        context::of(ctx)?;
        add(node, graph, before, Array::NULL, count, |_, _| Work::fill(driver()?, &p.get()?))
    }

    fn cuGraphAddHostNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: In<HostNodeParams>) {
        add(node, graph, before, Array::NULL, count, |_, _| node_description::host(p))
    }

    fn cuGraphAddChildGraphNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, part: usize) {
        add(node, graph, before, Array::NULL, count, |_, _| node_description::copied_child(part))
    }

    unsafe fn cuGraphAddBatchMemOpNode(
        node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: In<BatchMemOpNodeParams>
    ) {
        add(node, graph, before, Array::NULL, count, |_, _| {
            // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
            unsafe { node_description::words(p) }
        })
    }

    fn cuGraphAddEventRecordNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, event: usize) {
        add(node, graph, before, Array::NULL, count, |_, _| node_description::recorded(event))
    }

    fn cuGraphAddEventWaitNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, event: usize) {
        add(node, graph, before, Array::NULL, count, |_, _| node_description::waited(event))
    }

    unsafe fn cuGraphAddMemAllocNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: InOut<MemAllocNodeParams>) {
        add(node, graph, before, Array::NULL, count, |graph, before| {
            // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
            unsafe { node_description::alloc(graph, before, p) }
        })
    }

    fn cuGraphAddMemFreeNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, address: u64) {
        add(node, graph, before, Array::NULL, count, |_, _| node_description::freed(address))
    }

    unsafe fn cuGraphAddNode(node: Out<usize>, graph: usize, before: Array<usize>, count: Count, p: InOut<GraphNodeParams>) {
        add(node, graph, before, Array::NULL, count, |graph, before| {
            // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
            unsafe { node_description::generic(graph, before, p) }
        })
    }

    unsafe fn cuGraphAddNode_v2(
        node: Out<usize>, graph: usize, before: Array<usize>, data: Array<EdgeData>, count: Count, p: InOut<GraphNodeParams>
    ) {
        add(node, graph, before, data, count, |graph, before| {
            // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
            unsafe { node_description::generic(graph, before, p) }
        })
    }

    fn cuGraphAddDependencies(graph: usize, from: Array<usize>, to: Array<usize>, count: Count) {
        connect(graph, from, to, Array::NULL, count)
    }

    fn cuGraphAddDependencies_v2(graph: usize, from: Array<usize>, to: Array<usize>, data: Array<EdgeData>, count: Count) {
        connect(graph, from, to, data, count)
    }

    fn cuGraphRemoveDependencies(graph: usize, from: Array<usize>, to: Array<usize>, count: Count) {
        let graph = of(graph)?;
        graph.disconnect(&pairs(&graph, from, to, count)?)
    }

    fn cuGraphRemoveDependencies_v2(graph: usize, from: Array<usize>, to: Array<usize>, data: Array<EdgeData>, count: Count) {
        // The data is ignored: NVIDIA's driver doesn't check it, although its manual says that it must match.
        let _ = data;
        let graph = of(graph)?;
        graph.disconnect(&pairs(&graph, from, to, count)?)
    }
}
