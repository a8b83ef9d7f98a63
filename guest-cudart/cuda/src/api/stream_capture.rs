//! Stream capture.

use std::sync::Arc;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code};
use crate::abi::types::EdgeData;
use crate::graph;
use crate::graph::Graph;
use crate::graph::recording::graph_of;
use crate::process::capture::{Capture, RELAXED};
use crate::process::driver::driver;
use crate::process::{context, stream};
use crate::streams::{capture_rules, stream_table};
use client::{Status, lock};

/// Begins a capture into a graph of its own, or behind some nodes of one that is there.
pub(crate) fn begin(
    handle: usize,
    per_thread: bool,
    mode: u32,
    into: Option<(Arc<Graph>, Vec<u64>)>,
) -> Result {
    let (driver, context) = context::ready()?;
    let stream = stream_table::plain(driver, context, handle, per_thread)?;
    if mode > RELAXED {
        return Err(Status::INVALID_VALUE);
    }
    if stream.is_legacy() || stream.green().is_some_and(|green| green.is_default(&stream)) {
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.capture().is_some() {
        return Err(code::ILLEGAL_STATE);
    }
    let (graph, before) = into.unwrap_or_else(|| (Arc::new(Graph::new(stream.context)), Vec::new()));
    let context = graph.context.unique;
    let capture = Capture::begin(mode, stream.unique(), !stream.is_free(), context, graph, before);
    stream.set_capture(capture);
    Ok(())
}

pub(crate) fn end(handle: usize, per_thread: bool, graph: *mut usize) -> Result {
    let (driver, context) = context::ready()?;
    // Whoever captures into a graph that is there need not be told of it; a graph of the capture's own is dropped then.
    let tell = |handle: usize| {
        if graph.is_null() {
            Ok(())
        } else {
            // SAFETY: not NULL; the program says that it may be written.
            unsafe { put(graph, handle) }
        }
    };
    let stream = stream_table::plain(driver, context, handle, per_thread)?;
    let capture = stream.capture().ok_or(code::ILLEGAL_STATE)?;
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        // NVIDIA's driver was seen to end the capture all the same.
        capture.end();
        tell(0)?;
        return Err(code::STREAM_CAPTURE_WRONG_THREAD);
    }
    if capture.origin != stream.unique() {
        capture.spoil();
        return Err(code::STREAM_CAPTURE_UNMATCHED);
    }
    capture.end();
    tell(0)?;
    capture.check()?;
    // Every stream that joined has been waited for: the origin's next node would come behind all that they did.
    let behind = graph_of(&capture)?.ancestors(&capture.point(stream.unique()));
    let added = lock(&capture.added);
    if lock(&capture.ends).values().flatten().any(|node| added.contains(node) && !behind.contains(node)) {
        return Err(code::STREAM_CAPTURE_UNJOINED);
    }
    drop(added);
    if graph.is_null() { Ok(()) } else { tell(Graph::handle(&graph_of(&capture)?)?) }
}

/// Where the capture's information goes; each place may be NULL.
pub(crate) struct Told {
    id: *mut u64,
    graph: *mut usize,
    dependencies: *mut *const usize,
    edges: *mut *const EdgeData,
    count: *mut usize,
}

pub(crate) unsafe fn tell<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not NULL; the program says that it may be written.
        unsafe { to.write(value) };
    }
}

pub(crate) unsafe fn info(handle: usize, per_thread: bool, status: *mut u32, told: &Told) -> Result {
    non_null(status)?;
    let stream = if handle > stream::PER_THREAD {
        // A thread may ask that has no current context.
        stream_table::ask(handle, per_thread)?.1
    } else {
        stream_table::plain(driver()?, context::current()?, handle, per_thread)?
    };
    // Asking does not spoil that capture.
    if capture_rules::in_the_way(&stream).is_some() {
        return Err(code::STREAM_CAPTURE_IMPLICIT);
    }
    let capture = stream.capture();
    // SAFETY: the places are NULL or may be written, as the program says.
    unsafe {
        put(status, capture.as_ref().map_or(0, |capture| capture.status()))?;
        let Some(capture) = capture.filter(|capture| capture.check().is_ok()) else { return Ok(()) };
        tell(told.id, capture.id);
        if !told.graph.is_null() {
            put(told.graph, Graph::handle(&graph_of(&capture)?)?)?;
        }
        if !told.dependencies.is_null() || !told.count.is_null() {
            let graph = graph_of(&capture)?;
            let nodes: Result<Vec<usize>> =
                capture.point(stream.unique()).into_iter().map(|node| Graph::node(&graph, node)).collect();
            let mut kept = lock(&capture.told);
            let nodes = nodes?;
            *kept = (nodes.clone(), vec![[0; 8]; nodes.len()]);
            tell(told.count, nodes.len());
            tell(told.dependencies, kept.0.as_ptr());
            tell(told.edges, kept.1.as_ptr());
        }
    }
    Ok(())
}

pub(crate) const NOWHERE: Told = Told {
    id: std::ptr::null_mut(),
    graph: std::ptr::null_mut(),
    dependencies: std::ptr::null_mut(),
    edges: std::ptr::null_mut(),
    count: std::ptr::null_mut(),
};

/// `cuStreamUpdateCaptureDependencies`: what the stream's next node depends on, beside or instead of what it does already.
pub(crate) unsafe fn update(
    handle: usize,
    per_thread: bool,
    nodes: *const usize,
    data: *const EdgeData,
    count: usize,
    flags: u32,
) -> Result {
    // CU_STREAM_ADD_CAPTURE_DEPENDENCIES and …_SET_….
    if flags > 1 {
        return Err(Status::INVALID_VALUE);
    }
    let driver = driver()?;
    let stream = stream_table::plain(driver, context::current()?, handle, per_thread)?;
    let capture = stream.capture().ok_or(code::ILLEGAL_STATE)?;
    capture.check()?;
    // SAFETY: as many nodes, and as much data unless it is NULL, as the program says.
    let edges = unsafe { graph::edges(&graph_of(&capture)?, nodes, data, count) }?;
    let mut ends = lock(&capture.ends);
    let end = ends.entry(stream.unique()).or_default();
    if flags == 1 {
        end.clear();
    }
    for edge in edges {
        if !end.contains(&edge.from) {
            end.push(edge.from);
        }
    }
    Ok(())
}

api! {
    fn cuStreamBeginCapture / cuStreamBeginCapture_ptsz(stream: usize) |pt| {
        begin(stream, pt, 0, None)
    }

    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz(stream: usize, mode: u32) |pt| {
        begin(stream, pt, mode, None)
    }

    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz(
        stream: usize, graph: usize, nodes: *const usize, edges: *const EdgeData, count: usize, mode: u32
    ) |pt| {
        let graph = graph::of(graph)?;
        let before = graph::edges(&graph, nodes, edges, count)?;
        begin(stream, pt, mode, Some((graph, before.into_iter().map(|edge| edge.from).collect())))
    }

    fn cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz(
        stream: usize, nodes: *const usize, count: usize, flags: u32
    ) |pt| {
        update(stream, pt, nodes, std::ptr::null(), count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz(
        stream: usize, nodes: *const usize, edges: *const EdgeData, count: usize, flags: u32
    ) |pt| {
        update(stream, pt, nodes, edges, count, flags)
    }

    fn cuStreamEndCapture / cuStreamEndCapture_ptsz(stream: usize, graph: *mut usize) |pt| {
        end(stream, pt, graph)
    }

    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz(stream: usize, status: *mut u32) |pt| {
        info(stream, pt, status, &NOWHERE)
    }

    fn cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz(stream: usize, status: *mut u32, id: *mut u64) |pt| {
        info(stream, pt, status, &Told { id, ..NOWHERE })
    }

    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, dependencies: *mut *const usize, count: *mut usize
    ) |pt| {
        info(stream, pt, status, &Told { id, graph, dependencies, count, ..NOWHERE })
    }

    fn cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz(
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, dependencies: *mut *const usize, edges: *mut *const EdgeData, count: *mut usize
    ) |pt| {
        info(stream, pt, status, &Told { id, graph, dependencies, edges, count })
    }
}
