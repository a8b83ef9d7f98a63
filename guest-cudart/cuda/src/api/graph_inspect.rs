//! Looking at graphs: nodes, edges, a drawing.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code};
use crate::graph::node_work::Work;
use crate::graph::{Edge, EdgeData, Graph, node, of};
use client::{Status, log};

/// Where handles are told, and which.
type Place<T> = (*mut usize, fn(&T) -> usize);

/// Writes as many of `found` as there is room for, zeros behind them, and their number; only the number when there is no place.
unsafe fn list<T: Copy>(found: &[T], to: &[Place<T>], count: *mut usize) -> Result {
    non_null(count)?;
    // SAFETY: not NULL; the program gives room for as many handles as it says, in each place that is not NULL.
    unsafe {
        if to.iter().all(|(to, _)| to.is_null()) {
            return put(count, found.len());
        }
        let room = *count;
        for (to, handle) in to.iter().filter(|(to, _)| !to.is_null()) {
            for i in 0..room {
                put(to.add(i), found.get(i).map_or(0, handle))?;
            }
        }
        put(count, room.min(found.len()))
    }
}

/// Handles of the nodes that `which` picks.
unsafe fn picked(
    graph: &Arc<Graph>,
    which: impl Fn(&[Edge]) -> bool,
    to: *mut usize,
    count: *mut usize,
) -> Result {
    let mut ids = Vec::new();
    graph.each(|id, node| {
        if which(&node.before) {
            ids.push(id);
        }
    });
    let handles: Result<Vec<usize>> = ids.into_iter().map(|id| Graph::node(graph, id)).collect();
    // SAFETY: as the program says.
    unsafe { list(&handles?, &[(to, |handle| *handle)], count) }
}

/// An edge by the handles of its ends.
#[derive(Clone, Copy)]
struct Named {
    from: usize,
    to: usize,
    data: EdgeData,
}

/// The edges that `which` picks by their ends, in the order of the nodes that they lead to.
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

/// Tells edges. Without a place for their data, those that have some are not told.
unsafe fn tell(found: &[Named], to: &[Place<Named>], data: *mut EdgeData, count: *mut usize) -> Result {
    non_null(count)?;
    let wanted = to.iter().any(|(to, _)| !to.is_null());
    if wanted && data.is_null() && found.iter().any(|edge| edge.data != [0; 8]) {
        return Err(code::LOSSY_QUERY);
    }
    // SAFETY: as the program says, in each place that is not NULL.
    unsafe {
        if wanted && !data.is_null() {
            for i in 0..*count {
                put(data.add(i), found.get(i).map_or([0; 8], |edge| edge.data))?;
            }
        }
        list(found, to, count)
    }
}

unsafe fn graph_edges(
    graph: usize,
    from: *mut usize,
    to: *mut usize,
    data: *mut EdgeData,
    count: *mut usize,
) -> Result {
    let found = edges(&of(graph)?, |_, _| true)?;
    if from.is_null() != to.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: as the program says.
    unsafe { tell(&found, &[(from, |edge| edge.from), (to, |edge| edge.to)], data, count) }
}

unsafe fn dependencies(handle: usize, to: *mut usize, data: *mut EdgeData, count: *mut usize) -> Result {
    let (graph, id) = node(handle)?;
    let found = edges(&graph, |_, to| to == id)?;
    // SAFETY: as the program says.
    unsafe { tell(&found, &[(to, |edge| edge.from)], data, count) }
}

unsafe fn dependents(handle: usize, to: *mut usize, data: *mut EdgeData, count: *mut usize) -> Result {
    let (graph, id) = node(handle)?;
    let found = edges(&graph, |from, _| from == id)?;
    // SAFETY: as the program says.
    unsafe { tell(&found, &[(to, |edge| edge.to)], data, count) }
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

/// What a drawing says of each node beside: bits of `CUgraphDebugDot_flags`. What they ask for of other nodes stands there anyway.
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

/// What the flags ask for of a node, a line each.
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
            // By CUmemorytype.
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

/// Draws a graph, and the child graphs of its nodes beside it.
fn draw(graph: &Arc<Graph>, flags: u32, numbers: &mut HashMap<u64, usize>, out: &mut String) {
    let next = numbers.len();
    let number = *numbers.entry(graph.unique).or_insert(next);
    let mut children = Vec::new();
    // Writing into a string does not fail.
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
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        picked(&of(graph)?, |_| true, nodes, count)
    }

    fn cuGraphGetRootNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        picked(&of(graph)?, |before| before.is_empty(), nodes, count)
    }

    fn cuGraphGetEdges(graph: usize, from: *mut usize, to: *mut usize, count: *mut usize) {
        graph_edges(graph, from, to, std::ptr::null_mut(), count)
    }

    fn cuGraphGetEdges_v2(graph: usize, from: *mut usize, to: *mut usize, data: *mut EdgeData, count: *mut usize) {
        graph_edges(graph, from, to, data, count)
    }

    fn cuGraphNodeGetDependencies(node: usize, to: *mut usize, count: *mut usize) {
        dependencies(node, to, std::ptr::null_mut(), count)
    }

    fn cuGraphNodeGetDependencies_v2(node: usize, to: *mut usize, data: *mut EdgeData, count: *mut usize) {
        dependencies(node, to, data, count)
    }

    fn cuGraphNodeGetDependentNodes(node: usize, to: *mut usize, count: *mut usize) {
        dependents(node, to, std::ptr::null_mut(), count)
    }

    fn cuGraphNodeGetDependentNodes_v2(node: usize, to: *mut usize, data: *mut EdgeData, count: *mut usize) {
        dependents(node, to, data, count)
    }

    fn cuGraphNodeGetType(node: usize, kind: *mut u32) {
        put(kind, crate::graph::work_of(node)?.kind())
    }

    fn cuGraphDebugDotPrint(graph: usize, path: *const c_char, flags: u32) {
        let graph = of(graph)?;
        non_null(path)?;
        let mut out = String::from("digraph dot {\n");
        draw(&graph, flags, &mut HashMap::new(), &mut out);
        out.push_str("}\n");
        let path = OsStr::from_bytes(CStr::from_ptr(path).to_bytes());
        std::fs::write(path, out).map_err(|error| {
            log::warn(format_args!("a graph's drawing in {}: {error}", path.display()));
            Status::INVALID_VALUE
        })
    }
}
