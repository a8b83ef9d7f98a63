//! Stream capture.

use std::sync::Arc;

use crate::abi::arguments::{Array, Count, Out};
use crate::abi::result::{Result, code};
use crate::abi::types::EdgeData;
use crate::graph::recording::{self, graph_of};
use crate::graph::{self, Graph, told};
use crate::process::capture::{Capture, RELAXED, Recorded};
use crate::process::stream::Stream;
use crate::streams::{capture_rules, stream_table};
use client::{Status, lock};

/// Begins a capture into a new graph, or after some nodes of an existing one.
pub(crate) fn begin(
    handle: usize,
    per_thread: bool,
    mode: u32,
    into: Option<(Arc<Graph>, Vec<u64>)>,
) -> Result {
    let (_, context, _lent) = stream_table::ready_on(handle)?;
    let stream = stream_table::plain(context, handle, per_thread)?;
    if mode > RELAXED {
        return Err(Status::INVALID_VALUE);
    }
    if stream.is_legacy() || stream.green().is_some_and(|green| green.is_default(&stream)) {
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.capture().is_some() {
        return Err(code::ILLEGAL_STATE);
    }
    let destroy = into.is_none().then_some(recording::destroy as fn(&Recorded));
    let (graph, before) = into.unwrap_or_else(|| (Arc::new(Graph::new(stream.context)), Vec::new()));
    let context = graph.context.unique;
    let capture = Capture::begin(mode, stream.unique(), context, graph, destroy, before);
    capture_rules::enter(&capture, &stream);
    if destroy.is_some() {
        told::made(&graph_of(&capture)?);
    }
    Ok(())
}

pub(crate) fn end(handle: usize, per_thread: bool, graph: Out<usize>) -> Result {
    let (_, context, _lent) = stream_table::ready_on(handle)?;
    // A capture into an existing graph need not return it. If the program passes no place, a new graph is
    // dropped.
    let tell = |handle: usize| graph.put_if_wanted(handle);
    let stream = stream_table::plain(context, handle, per_thread)?;
    let capture = stream.capture().ok_or(code::ILLEGAL_STATE)?;
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        // NVIDIA's driver was observed to end the capture in this case, too.
        capture.discard();
        tell(0);
        return Err(code::STREAM_CAPTURE_WRONG_THREAD);
    }
    if capture.origin != stream.unique() {
        capture.spoil();
        return Err(code::STREAM_CAPTURE_UNMATCHED);
    }
    capture.end();
    tell(0);
    let joined = check_joined(&capture, &stream);
    if joined.is_err() || graph.is_null() {
        capture.discard();
        return joined;
    }
    tell(Graph::handle(&graph_of(&capture)?)?);
    Ok(())
}

/// Checks that every stream that joined a capture has been waited for: the next node of the origin would come
/// after everything they did.
fn check_joined(capture: &Capture, origin: &Stream) -> Result {
    capture.check()?;
    let behind = graph_of(capture)?.ancestors(&capture.point(origin.unique()));
    let (ends, added) = (lock(&capture.ends), lock(&capture.added));
    if ends.values().flatten().any(|node| added.contains_key(node) && !behind.contains(node)) {
        return Err(code::STREAM_CAPTURE_UNJOINED);
    }
    Ok(())
}

/// Where to return information about a capture. Absent or NULL places are skipped.
#[derive(Clone, Copy, Default)]
struct CaptureInfo<'a> {
    id: Option<Out<'a, u64>>,
    graph: Option<Out<'a, usize>>,
    dependencies: Option<Out<'a, *const usize>>,
    edges: Option<Out<'a, *const EdgeData>>,
    count: Option<Out<'a, usize>>,
}

fn tell<T>(to: Option<Out<T>>, value: T) {
    if let Some(to) = to {
        to.put_if_wanted(value);
    }
}

fn info(handle: usize, per_thread: bool, status: Out<u32>, wanted: &CaptureInfo<'_>) -> Result {
    status.required()?;
    let stream = stream_table::asked(handle, per_thread)?;
    // The query does not invalidate that capture.
    if capture_rules::in_the_way(&stream).is_some() {
        return Err(code::STREAM_CAPTURE_IMPLICIT);
    }
    let capture = stream.capture();
    status.put(capture.as_ref().map_or(0, |capture| capture.status()))?;
    let Some(capture) = capture.filter(|capture| capture.check().is_ok()) else { return Ok(()) };
    tell(wanted.id, capture.id);
    if wanted.graph.is_some_and(|graph| !graph.is_null()) {
        tell(wanted.graph, Graph::handle(&graph_of(&capture)?)?);
    }
    if wanted.dependencies.is_some_and(|to| !to.is_null()) || wanted.count.is_some_and(|to| !to.is_null()) {
        let graph = graph_of(&capture)?;
        let nodes = capture.point(stream.unique()).into_iter().map(|node| Graph::node(&graph, node));
        let nodes = nodes.collect::<Result<Vec<usize>>>()?;
        let mut kept = lock(&capture.told);
        *kept = (nodes.clone(), vec![[0; 8]; nodes.len()]);
        tell(wanted.count, nodes.len());
        tell(wanted.dependencies, kept.0.as_ptr());
        tell(wanted.edges, kept.1.as_ptr());
    }
    Ok(())
}

/// `cuStreamUpdateCaptureDependencies`: adds to or replaces the dependencies of the stream's next node.
fn update(
    handle: usize,
    per_thread: bool,
    nodes: Array<usize>,
    data: Array<EdgeData>,
    count: Count,
    flags: u32,
) -> Result {
    // CU_STREAM_ADD_CAPTURE_DEPENDENCIES and …_SET_….
    if flags > 1 {
        return Err(Status::INVALID_VALUE);
    }
    let stream = stream_table::asked(handle, per_thread)?;
    let capture = stream.capture().ok_or(code::ILLEGAL_STATE)?;
    capture.check()?;
    let edges = graph::edges(&graph_of(&capture)?, nodes, data, count)?;
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
        stream: usize, graph: usize, nodes: Array<usize>, edges: Array<EdgeData>, count: Count, mode: u32
    ) |pt| {
        let graph = graph::of(graph)?;
        let before = graph::edges(&graph, nodes, edges, count)?;
        begin(stream, pt, mode, Some((graph, before.into_iter().map(|edge| edge.from).collect())))
    }

    fn cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz(
        stream: usize, nodes: Array<usize>, count: Count, flags: u32
    ) |pt| {
        update(stream, pt, nodes, Array::NULL, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz(
        stream: usize, nodes: Array<usize>, edges: Array<EdgeData>, count: Count, flags: u32
    ) |pt| {
        update(stream, pt, nodes, edges, count, flags)
    }

    fn cuStreamEndCapture / cuStreamEndCapture_ptsz(stream: usize, graph: Out<usize>) |pt| {
        end(stream, pt, graph)
    }

    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz(stream: usize, status: Out<u32>) |pt| {
        info(stream, pt, status, &CaptureInfo::default())
    }

    fn cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz(stream: usize, status: Out<u32>, id: Out<u64>) |pt| {
        info(stream, pt, status, &CaptureInfo { id: Some(id), ..CaptureInfo::default() })
    }

    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz(
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>, dependencies: Out<*const usize>, count: Out<usize>
    ) |pt| {
        info(stream, pt, status, &CaptureInfo { id: Some(id), graph: Some(graph), dependencies: Some(dependencies), edges: None, count: Some(count) })
    }

    fn cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz(
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>, dependencies: Out<*const usize>, edges: Out<*const EdgeData>, count: Out<usize>
    ) |pt| {
        info(stream, pt, status, &CaptureInfo { id: Some(id), graph: Some(graph), dependencies: Some(dependencies), edges: Some(edges), count: Some(count) })
    }
}
