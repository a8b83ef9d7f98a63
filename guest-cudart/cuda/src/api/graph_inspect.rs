//! Inspecting graphs: nodes, edges, a drawing.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use crate::abi::arguments::{InOut, Out, OutArray, Text};
use crate::abi::result::{Result, code};
use crate::graph::node_work::Work;
use crate::graph::{Edge, EdgeData, Graph, node, of};
use client::{Status, log};

/// Where to return handles, and which.
type Place<'a, T> = (OutArray<'a, usize>, fn(&T) -> usize);

/// Writes as many of `found` as fit into `room`, and zeros after them.
///
/// # Safety
/// `to` is NULL or has room for `room` values.
unsafe fn fill<T: Copy + Default>(to: OutArray<T>, found: impl Iterator<Item = T>, room: usize) -> Result {
    // SAFETY: guaranteed by the caller.
    unsafe { to.put(found.chain(std::iter::repeat(T::default())).take(room)) }
}

/// Returns as many of `found` as there is room for, and their number; only the number if no place is passed.
///
/// # Safety
/// Each place is NULL or has room for `count` handles.
unsafe fn list<T: Copy>(found: &[T], to: &[Place<'_, T>], count: InOut<usize>) -> Result {
    let room = count.get()?;
    if to.iter().all(|(to, _)| to.is_null()) {
        return count.put(found.len());
    }
    for (to, handle) in to.iter().filter(|(to, _)| !to.is_null()) {
        // SAFETY: guaranteed by the caller.
        unsafe { fill(*to, found.iter().map(handle), room) }?;
    }
    count.put(room.min(found.len()))
}

/// Returns the handles of the nodes that `which` selects.
///
/// # Safety
/// As for [`list`].
unsafe fn picked(
    graph: &Arc<Graph>,
    which: impl Fn(&[Edge]) -> bool,
    to: OutArray<usize>,
    count: InOut<usize>,
) -> Result {
    let mut ids = Vec::new();
    graph.each(|id, node| {
        if which(&node.before) {
            ids.push(id);
        }
    });
    let handles: Result<Vec<usize>> = ids.into_iter().map(|id| Graph::node(graph, id)).collect();
    // SAFETY: guaranteed by the caller.
    unsafe { list(&handles?, &[(to, |handle| *handle)], count) }
}

/// An edge, with the handles of its ends.
#[derive(Clone, Copy)]
struct Named {
    from: usize,
    to: usize,
    data: EdgeData,
}

/// The edges that `which` selects by their ends, ordered by the nodes that they lead to.
fn edges(graph: &Arc<Graph>, which: impl Fn(u64, u64) -> bool) -> Result<Vec<Named>> {
    let mut found = Vec::new();
    graph.each(|to, node| {
        found.extend(node.before.iter().filter(|edge| which(edge.from, to)).map(|edge| (*edge, to)));
    });
    let named = |(edge, to): (Edge, u64)| {
        Ok(Named { from: Graph::node(graph, edge.from)?, to: Graph::node(graph, to)?, data: edge.data })
    };
    found.into_iter().map(named).collect()
}

/// Returns edges. Edges with data are left out if no place for data is passed.
///
/// # Safety
/// As for [`list`], also for the place for data.
unsafe fn tell(
    found: &[Named],
    to: &[Place<'_, Named>],
    data: OutArray<EdgeData>,
    count: InOut<usize>,
) -> Result {
    let room = count.get()?;
    let wanted = to.iter().any(|(to, _)| !to.is_null());
    if wanted && data.is_null() && found.iter().any(|edge| edge.data != [0; 8]) {
        return Err(code::LOSSY_QUERY);
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        if wanted && !data.is_null() {
            fill(data, found.iter().map(|edge| edge.data), room)?;
        }
        list(found, to, count)
    }
}

/// # Safety
/// As for [`list`].
unsafe fn graph_edges(
    graph: usize,
    from: OutArray<usize>,
    to: OutArray<usize>,
    data: OutArray<EdgeData>,
    count: InOut<usize>,
) -> Result {
    let found = edges(&of(graph)?, |_, _| true)?;
    if from.is_null() != to.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { tell(&found, &[(from, |edge| edge.from), (to, |edge| edge.to)], data, count) }
}

/// The nodes on which a node depends, or those that depend on it.
///
/// # Safety
/// As for [`list`].
unsafe fn neighbors(
    handle: usize,
    dependents: bool,
    found: OutArray<usize>,
    data: OutArray<EdgeData>,
    count: InOut<usize>,
) -> Result {
    let (graph, id) = node(handle)?;
    let edges = edges(&graph, |from, to| if dependents { from == id } else { to == id })?;
    let other: fn(&Named) -> usize = if dependents { |edge| edge.to } else { |edge| edge.from };
    // SAFETY: guaranteed by the caller.
    unsafe { tell(&edges, &[(found, other)], data, count) }
}

fn label(work: &Work) -> String {
    match work {
        Work::Kernel(kernel) => kernel.function.name.to_string_lossy().into_owned(),
        Work::Copy(copy) => format!("MEMCPY {} x {} x {}", copy.WidthInBytes, copy.Height, copy.Depth),
        Work::Fill(fill) => {
            format!("MEMSET {:#x}, {} x {} of {}", fill.value, fill.width, fill.height, fill.elementSize)
        }
        Work::Host(..) => "HOST".into(),
        Work::Child(_) => "GRAPH".into(),
        Work::Empty => "EMPTY".into(),
        Work::Wait(_) => "EVENT_WAIT".into(),
        Work::Record(_) => "EVENT_RECORD".into(),
        Work::Alloc(memory) => format!("MEM_ALLOC {:#x}, {} bytes", memory.address, memory.size),
        Work::Free(address) => format!("MEM_FREE {address:#x}"),
        Work::Conditional(node) => {
            format!(
                "CONDITIONAL {} of {}",
                ["IF", "WHILE", "SWITCH"][node.kind.min(2) as usize],
                node.bodies.len()
            )
        }
        Work::Words(words) => format!("BATCH_MEM_OP of {}", words.given.len()),
    }
}

/// What a drawing says about each node: bits of `CUgraphDebugDot_flags`. Flags without effect here are about
/// details that are always drawn.
mod dot {
    pub const VERBOSE: u32 = 1;
    pub const KERNEL_PARAMS: u32 = 1 << 2;
    pub const COPY_PARAMS: u32 = 1 << 3;
    pub const FILL_PARAMS: u32 = 1 << 4;
    pub const HOST_PARAMS: u32 = 1 << 5;
    pub const EVENT_PARAMS: u32 = 1 << 6;
    pub const KERNEL_ATTRIBUTES: u32 = 1 << 9;
    pub const HANDLES: u32 = 1 << 10;
}

/// The details of a node that the flags request, one per line.
fn details(graph: &Arc<Graph>, id: u64, work: &Work, flags: u32) -> Vec<String> {
    let wanted = |flag| flags & (flag | dot::VERBOSE) != 0;
    let mut lines = Vec::new();
    if wanted(dot::HANDLES)
        && let Ok(handle) = Graph::node(graph, id)
    {
        lines.push(format!("handle {handle:#x}"));
    }
    match work {
        Work::Kernel(kernel) => {
            if wanted(dot::HANDLES) {
                lines.push(format!("function {:#x}", kernel.handle));
            }
            if wanted(dot::KERNEL_PARAMS) {
                let (grid, block) = (kernel.grid, kernel.block);
                lines.push(format!(
                    "grid {grid:?}, block {block:?}, {} bytes of shared memory",
                    kernel.shared
                ));
            }
            if wanted(dot::KERNEL_ATTRIBUTES) && !kernel.attributes.is_empty() {
                let ids: Vec<u32> = kernel.attributes.iter().map(|attribute| attribute.id).collect();
                lines.push(format!("launch attributes {ids:?}"));
            }
        }
        Work::Copy(copy) if wanted(dot::COPY_PARAMS) => {
            // By `CUmemorytype`.
            let end = |kind: u32, host: usize, device: u64, array: usize| match kind {
                1 => format!("host memory at {host:#x}"),
                3 => format!("array {array:#x}"),
                _ => format!("{device:#x}"),
            };
            let from = end(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcArray);
            let to = end(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstArray);
            lines.push(format!("from {from} to {to}"));
        }
        Work::Fill(fill) if wanted(dot::FILL_PARAMS) => {
            lines.push(format!("at {:#x}, pitch {}", fill.dst, fill.pitch));
        }
        Work::Host(function, data) if wanted(dot::HOST_PARAMS) => {
            lines.push(format!("function {:p}, data {:p}", *function as *const (), data.0));
        }
        Work::Wait(event) | Work::Record(event) if wanted(dot::EVENT_PARAMS) => {
            lines.push(format!("event {event:#x}"));
        }
        _ => {}
    }
    lines
}

/// Draws a graph, and next to it the child graphs of its nodes.
fn draw(graph: &Arc<Graph>, flags: u32, numbers: &mut HashMap<u64, usize>, out: &mut String) {
    let next = numbers.len();
    let number = *numbers.entry(graph.unique).or_insert(next);
    let mut children = Vec::new();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "subgraph cluster_{number} {{\nlabel=\"graph_{number}\"");
    let mut nodes = Vec::new();
    graph.each(|id, node| nodes.push((id, node.work.clone(), node.before.clone())));
    for (id, work, before) in nodes {
        let mut text = label(&work).replace(['"', '\\'], "'");
        for line in details(graph, id, &work, flags) {
            text += "\\n";
            text += &line;
        }
        let _ = writeln!(out, "\"graph_{number}_node_{id}\"[shape=box label=\"{id}\\n{text}\"];");
        for edge in &before {
            let _ = writeln!(out, "\"graph_{number}_node_{}\" -> \"graph_{number}_node_{id}\";", edge.from);
        }
        match &work {
            Work::Child(child) => children.push(child.clone()),
            Work::Conditional(node) => children.extend(node.bodies.iter().cloned()),
            _ => {}
        }
    }
    out.push_str("}\n");
    for child in children {
        draw(&child, flags, numbers, out);
    }
}

api! {
    unsafe fn cuGraphGetNodes(graph: usize, nodes: OutArray<usize>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { picked(&of(graph)?, |_| true, nodes, count) }
    }

    unsafe fn cuGraphGetRootNodes(graph: usize, nodes: OutArray<usize>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { picked(&of(graph)?, |before| before.is_empty(), nodes, count) }
    }

    unsafe fn cuGraphGetEdges(graph: usize, from: OutArray<usize>, to: OutArray<usize>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { graph_edges(graph, from, to, OutArray::NULL, count) }
    }

    unsafe fn cuGraphGetEdges_v2(graph: usize, from: OutArray<usize>, to: OutArray<usize>, data: OutArray<EdgeData>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { graph_edges(graph, from, to, data, count) }
    }

    unsafe fn cuGraphNodeGetDependencies(node: usize, to: OutArray<usize>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { neighbors(node, false, to, OutArray::NULL, count) }
    }

    unsafe fn cuGraphNodeGetDependencies_v2(node: usize, to: OutArray<usize>, data: OutArray<EdgeData>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { neighbors(node, false, to, data, count) }
    }

    unsafe fn cuGraphNodeGetDependentNodes(node: usize, to: OutArray<usize>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { neighbors(node, true, to, OutArray::NULL, count) }
    }

    unsafe fn cuGraphNodeGetDependentNodes_v2(node: usize, to: OutArray<usize>, data: OutArray<EdgeData>, count: InOut<usize>) {
        // SAFETY: there is room for `count` values, by CUDA's manual.
        unsafe { neighbors(node, true, to, data, count) }
    }

    fn cuGraphNodeGetType(node: usize, kind: Out<u32>) {
        kind.put(crate::graph::work_of(node)?.kind())
    }

    fn cuGraphDebugDotPrint(graph: usize, path: Text, flags: u32) {
        let graph = of(graph)?;
        path.required()?;
        let mut out = String::from("digraph dot {\n");
        draw(&graph, flags, &mut HashMap::new(), &mut out);
        out.push_str("}\n");
        let path = OsStr::from_bytes(path.get()?.to_bytes());
        std::fs::write(path, out).map_err(|error| {
            log::warn(format_args!("a graph's drawing in {}: {error}", path.display()));
            Status::OPERATING_SYSTEM
        })
    }
}
