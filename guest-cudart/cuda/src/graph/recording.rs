//! Recording: work that is enqueued on a captured stream becomes a node of the capture's graph.

use std::sync::Arc;

use crate::abi::result::Result;
use crate::abi::types::MemAccessDesc;
use crate::graph::node_work::Work;
use crate::graph::{Edge, Graph, PROGRAMMATIC, told};
use crate::memory::graph_memory;
use crate::process::capture::{Capture, Recorded};
use crate::process::driver::Driver;
use crate::process::stream::Stream;
use client::{Status, lock};

/// The graph that a capture adds to.
pub(crate) fn graph_of(capture: &Capture) -> Result<Arc<Graph>> {
    capture.graph.clone().downcast().map_err(|_| Status::UNKNOWN)
}

/// Destroys the graph of a capture that the program does not get.
pub(crate) fn destroy(graph: &Recorded) {
    if let Some(graph) = graph.downcast_ref::<Graph>() {
        graph.destroy();
    }
}

/// Adds work that was enqueued on a stream.
pub(crate) fn add(capture: &Capture, stream: &Stream, work: Work) -> Result {
    capture.check()?;
    let graph = graph_of(capture)?;
    if !std::ptr::eq(stream.context, graph.context) {
        capture.spoil();
        return refuse_form!("a graph with work of several contexts, as of several GPUs");
    }
    let mut ends = lock(&capture.ends);
    let end = ends.entry(stream.unique()).or_default();
    let mut before = edges(&std::mem::take(end));
    if let Work::Kernel(kernel) = &work
        && kernel.overlaps()
        && before.iter().all(|edge| is_kernel(&graph, edge.from))
    {
        before.iter_mut().for_each(|edge| edge.data = PROGRAMMATIC);
    }
    let node = graph.add(work, before).inspect_err(|_| capture.spoil())?;
    lock(&capture.added).insert(node, stream.unique());
    *end = vec![node];
    drop(ends);
    told::node_added(&graph, node);
    Ok(())
}

/// Whether a node is a kernel. NVIDIA's driver notes of a launch that may overlap with what is ahead of it
/// that it depends on the kernels' programmatic ports, whichever streams they were launched on.
fn is_kernel(graph: &Graph, node: u64) -> bool {
    graph.with(node, |node| Ok(matches!(node.work, Work::Kernel(_)))) == Ok(true)
}

/// Adds an allocation that depends on what the stream's next node depends on, and that other devices have
/// `access` to. Returns its address.
pub(crate) fn allocate(
    capture: &Capture,
    driver: &'static Driver,
    stream: &Stream,
    device: u32,
    access: &[MemAccessDesc],
    size: u64,
) -> Result<u64> {
    let before = edges(&capture.point(stream.unique()));
    let made = graph_of(capture)?.allocate(driver, &before, device, access, size)?;
    let address = made.address;
    add(capture, stream, Work::Alloc(made)).map(|()| address)
}

/// Adds a free of memory that a graph allocates.
///
/// # Errors
/// `INVALID_VALUE` for any other memory: "must be passed the address of a graph allocation"
/// (`cuMemFreeAsync`).
pub(crate) fn free(capture: &Capture, stream: &Stream, address: u64) -> Result {
    capture.check()?;
    graph_memory::find(address).ok_or(Status::INVALID_VALUE)?;
    add(capture, stream, Work::Free(address))
}

fn edges(from: &[u64]) -> Vec<Edge> {
    from.iter().map(|from| Edge { from: *from, data: [0; 8] }).collect()
}
