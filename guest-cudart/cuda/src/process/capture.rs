//! Stream capture. It happens in this process alone: what is put on a captured stream becomes a node of a graph that the server hears of when it is instantiated.
//!
//! What has no place in a graph is refused on a captured stream, and invalidates the capture, as CUDA has it.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code, refuse_form};
use crate::graph;
use crate::graph::node_work::Work;
use crate::graph::{Edge, Graph};
use crate::memory::graph_memory;
use crate::memory::graph_memory::GraphMemory;
use crate::process::context::Context;
use crate::process::driver::{Driver, driver, unique_id};
use crate::process::stream::Stream;
use crate::process::{context, stream};
use client::{Status, lock};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;

/// `CU_STREAM_CAPTURE_MODE_GLOBAL` and `…_THREAD_LOCAL`.
const GLOBAL: u32 = 0;

const THREAD_LOCAL: u32 = 1;

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Every capture that may be under way.
static ALL: Mutex<Vec<Weak<Capture>>> = Mutex::new(Vec::new());

/// Captures that are under way in this process: while there are none, nobody looks for one.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

/// A capture: from its beginning on one stream, over the streams that join it, to its end.
pub(crate) struct Capture {
    id: u64,
    mode: u32,
    thread: ThreadId,
    /// Unique number of the stream that it began on, and whether the legacy default stream waits for that.
    origin: u64,
    blocking: bool,
    graph: Arc<Graph>,
    ended: AtomicBool,
    broken: AtomicBool,
    /// For each stream in it, the nodes that the next one depends on.
    ends: Mutex<HashMap<u64, Vec<u64>>>,
    /// What was added by the capture; a graph that was captured into may have had nodes before.
    added: Mutex<HashSet<u64>>,
    /// Node handles as they were last told, which the program may read until its next call, and the data of their edges.
    told: Mutex<(Vec<usize>, Vec<graph::EdgeData>)>,
}

impl Capture {
    /// Invalidates the capture: its end will say so.
    pub fn spoil(&self) {
        self.broken.store(true, Ordering::Release);
    }

    fn check(&self) -> Result {
        if self.broken.load(Ordering::Acquire) { Err(code::STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// Adds work that was put on a stream.
    pub fn add(&self, stream: &Stream, work: Work) -> Result {
        self.check()?;
        if !std::ptr::eq(stream.context, self.graph.context) {
            self.spoil();
            return Err(Status::NOT_SUPPORTED);
        }
        let mut ends = lock(&self.ends);
        let end = ends.entry(stream.unique()).or_default();
        let before = std::mem::take(end).into_iter().map(|from| Edge { from, data: [0; 8] }).collect();
        let node = self.graph.add(work, before).inspect_err(|_| self.spoil())?;
        lock(&self.added).insert(node);
        *end = vec![node];
        Ok(())
    }

    /// Adds an allocation behind what a stream's next node depends on; its address.
    pub fn allocate(&self, driver: &'static Driver, stream: &Stream, device: u32, size: u64) -> Result<u64> {
        let before: Vec<Edge> =
            self.point(stream).into_iter().map(|from| Edge { from, data: [0; 8] }).collect();
        let made = GraphMemory::new(driver, &self.graph, &before, device, size)?;
        let address = made.address;
        self.add(stream, Work::Alloc(made)).map(|()| address)
    }

    /// Adds a free of what some graph allocates.
    ///
    /// # Errors
    /// `INVALID_VALUE` for any other memory: "must be passed the address of a graph allocation" (`cuMemFreeAsync`).
    pub fn free(&self, stream: &Stream, address: u64) -> Result {
        self.check()?;
        graph_memory::find(address).ok_or(Status::INVALID_VALUE)?;
        self.add(stream, Work::Free(address))
    }

    /// What the next node on a stream depends on: what an event recorded there stands for.
    pub fn point(&self, stream: &Stream) -> Vec<u64> {
        lock(&self.ends).get(&stream.unique()).cloned().unwrap_or_default()
    }

    /// A stream waits for an event that stands for `point`. It joins the capture if it was not in it.
    pub fn join(self: &Arc<Self>, stream: &Stream, point: &[u64]) -> Result {
        self.check()?;
        match stream.capture() {
            Some(other) if !Arc::ptr_eq(&other, self) => {
                other.spoil();
                self.spoil();
                return Err(code::STREAM_CAPTURE_MERGE);
            }
            Some(_) => {}
            None if stream.is_legacy() => {
                self.spoil();
                return Err(code::STREAM_CAPTURE_IMPLICIT);
            }
            None => stream.set_capture(self.clone()),
        }
        let mut ends = lock(&self.ends);
        let end = ends.entry(stream.unique()).or_default();
        for node in point {
            if !end.contains(node) {
                end.push(*node);
            }
        }
        Ok(())
    }

    fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            ACTIVE.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn status(&self) -> u32 {
        if self.broken.load(Ordering::Acquire) { 2 } else { 1 }
    }
}

/// Whether some stream of this process is being captured.
#[inline]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Acquire) != 0
}

/// Begins a capture into a graph of its own, or behind some nodes of one that is there.
fn begin(handle: usize, per_thread: bool, mode: u32, into: Option<(Arc<Graph>, Vec<u64>)>) -> Result {
    let (driver, context) = context::ready()?;
    let stream = stream::plain(driver, context, handle, per_thread)?;
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
    let capture = Arc::new(Capture {
        id: unique_id(),
        mode,
        thread: std::thread::current().id(),
        origin: stream.unique(),
        blocking: !stream.is_free(),
        graph,
        ended: AtomicBool::new(false),
        broken: AtomicBool::new(false),
        ends: Mutex::new(HashMap::from([(stream.unique(), before)])),
        added: Mutex::default(),
        told: Mutex::default(),
    });
    ACTIVE.fetch_add(1, Ordering::AcqRel);
    let mut all = lock(&ALL);
    all.retain(|other| other.upgrade().is_some_and(|other| !other.is_ended()));
    all.push(Arc::downgrade(&capture));
    stream.set_capture(capture);
    Ok(())
}

fn end(handle: usize, per_thread: bool, graph: *mut usize) -> Result {
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
    let stream = stream::plain(driver, context, handle, per_thread)?;
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
    let behind = capture.graph.ancestors(&capture.point(&stream));
    let added = lock(&capture.added);
    if lock(&capture.ends).values().flatten().any(|node| added.contains(node) && !behind.contains(node)) {
        return Err(code::STREAM_CAPTURE_UNJOINED);
    }
    drop(added);
    if graph.is_null() { Ok(()) } else { tell(Graph::handle(&capture.graph)?) }
}

/// Where the capture's information goes; each place may be NULL.
struct Told {
    id: *mut u64,
    graph: *mut usize,
    dependencies: *mut *const usize,
    edges: *mut *const graph::EdgeData,
    count: *mut usize,
}

unsafe fn tell<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not NULL; the program says that it may be written.
        unsafe { to.write(value) };
    }
}

unsafe fn info(handle: usize, per_thread: bool, status: *mut u32, told: &Told) -> Result {
    non_null(status)?;
    let stream = if handle > stream::PER_THREAD {
        // A thread may ask that has no current context.
        stream::ask(handle, per_thread)?.1
    } else {
        stream::plain(driver()?, context::current()?, handle, per_thread)?
    };
    // Asking does not spoil that capture.
    if in_the_way(&stream).is_some() {
        return Err(code::STREAM_CAPTURE_IMPLICIT);
    }
    let capture = stream.capture();
    // SAFETY: the places are NULL or may be written, as the program says.
    unsafe {
        put(status, capture.as_ref().map_or(0, |capture| capture.status()))?;
        let Some(capture) = capture.filter(|capture| capture.check().is_ok()) else { return Ok(()) };
        tell(told.id, capture.id);
        if !told.graph.is_null() {
            put(told.graph, Graph::handle(&capture.graph)?)?;
        }
        if !told.dependencies.is_null() || !told.count.is_null() {
            let nodes: Result<Vec<usize>> =
                capture.point(&stream).into_iter().map(|node| Graph::node(&capture.graph, node)).collect();
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

const NOWHERE: Told = Told {
    id: std::ptr::null_mut(),
    graph: std::ptr::null_mut(),
    dependencies: std::ptr::null_mut(),
    edges: std::ptr::null_mut(),
    count: std::ptr::null_mut(),
};

/// `cuStreamUpdateCaptureDependencies`: what the stream's next node depends on, beside or instead of what it does already.
unsafe fn update(
    handle: usize,
    per_thread: bool,
    nodes: *const usize,
    data: *const graph::EdgeData,
    count: usize,
    flags: u32,
) -> Result {
    // CU_STREAM_ADD_CAPTURE_DEPENDENCIES and …_SET_….
    if flags > 1 {
        return Err(Status::INVALID_VALUE);
    }
    let driver = driver()?;
    let stream = stream::plain(driver, context::current()?, handle, per_thread)?;
    let capture = stream.capture().ok_or(code::ILLEGAL_STATE)?;
    capture.check()?;
    // SAFETY: as many nodes, and as much data unless it is NULL, as the program says.
    let edges = unsafe { graph::edges(&capture.graph, nodes, data, count) }?;
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

/// `cuThreadExchangeStreamCaptureMode`.
pub(crate) fn exchange_mode(mode: u32) -> u32 {
    MODE.try_with(|current| current.replace(mode)).unwrap_or(0)
}

/// `Err` for a call that CUDA calls potentially unsafe, when a capture's mode and the thread's forbid it; the capture is invalidated.
pub(crate) fn unsafe_call() -> Result {
    if !any() {
        return Ok(());
    }
    let mode = MODE.try_with(Cell::get).unwrap_or(0);
    let here = std::thread::current().id();
    let active: Vec<Arc<Capture>> = lock(&ALL).iter().filter_map(Weak::upgrade).collect();
    let forbidding = active.into_iter().filter(|capture| !capture.is_ended()).find(|capture| match mode {
        RELAXED => false,
        THREAD_LOCAL => capture.thread == here && capture.mode != RELAXED,
        _ => {
            if capture.thread == here {
                capture.mode != RELAXED
            } else {
                capture.mode == GLOBAL
            }
        }
    });
    match forbidding {
        None => Ok(()),
        Some(capture) => {
            capture.spoil();
            Err(code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// `Err` for waiting for all of a context in which a stream is being captured; the captures are invalidated.
pub(crate) fn forbid_all(context: &Context) -> Result {
    if !any() {
        return Ok(());
    }
    let active: Vec<Arc<Capture>> = lock(&ALL).iter().filter_map(Weak::upgrade).collect();
    let mut result = Ok(());
    for capture in active.iter().filter(|c| !c.is_ended() && std::ptr::eq(c.graph.context, context)) {
        capture.spoil();
        result = Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    result
}

/// A capture that work on the legacy default stream would have to wait for, if `stream` is that one.
fn in_the_way(stream: &Stream) -> Option<Arc<Capture>> {
    if !any() || !stream.is_legacy() {
        return None;
    }
    lock(&ALL).iter().filter_map(Weak::upgrade).find(|capture| {
        !capture.is_ended() && capture.blocking && std::ptr::eq(capture.graph.context, stream.context)
    })
}

/// `Err` for work on the legacy default stream of a context in which a stream that would wait for it is being captured.
#[inline]
pub(crate) fn implicit(stream: &Stream) -> Result {
    match in_the_way(stream) {
        None => Ok(()),
        Some(capture) => {
            capture.spoil();
            Err(code::STREAM_CAPTURE_IMPLICIT)
        }
    }
}

/// `Err` for a call that has no place in a capture, which is invalidated by it.
pub(crate) fn forbid(stream: &Stream) -> Result {
    match stream.capture() {
        None => Ok(()),
        Some(capture) => {
            capture.spoil();
            Err(code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// `Err` for work that CUDA captures and this library does not.
pub(crate) fn refuse(stream: &Stream) -> Result {
    static SAID: AtomicBool = AtomicBool::new(false);
    match stream.capture() {
        None => Ok(()),
        Some(capture) => {
            capture.spoil();
            refuse_form("capturing a copy of bytes in a row from or to an array", &SAID)
        }
    }
}

api! {
    fn cuStreamBeginCapture / cuStreamBeginCapture_ptsz(stream: usize) |pt| {
        begin(stream, pt, 0, None)
    }

    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz(stream: usize, mode: u32) |pt| {
        begin(stream, pt, mode, None)
    }

    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz(
        stream: usize, graph: usize, nodes: *const usize, edges: *const graph::EdgeData, count: usize, mode: u32
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
        stream: usize, nodes: *const usize, edges: *const graph::EdgeData, count: usize, flags: u32
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
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, dependencies: *mut *const usize, edges: *mut *const graph::EdgeData, count: *mut usize
    ) |pt| {
        info(stream, pt, status, &Told { id, graph, dependencies, edges, count })
    }
}
