//! Stream capture. It happens in this process alone: what is put on a captured stream becomes a node of a graph that the server hears of when it is instantiated.
//!
//! What a graph of this library holds: kernels, fills, and copies between device addresses. Anything else on a captured stream is refused, and
//! invalidates the capture, as CUDA has it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use crate::graph::Graph;
use crate::state::{driver, unique_id};
use crate::stream::{self, Stream};
use crate::{Result, code, context, non_null, put, refuse_form};
use client::ops::Op;
use client::{Status, lock};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;

/// Captures that are under way in this process: while there are none, nobody looks for one.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

/// A capture: from its beginning on one stream, over the streams that join it, to its end.
pub(crate) struct Capture {
    id: u64,
    mode: u32,
    thread: ThreadId,
    /// Unique number of the stream that it began on.
    origin: u64,
    graph: Arc<Graph>,
    ended: AtomicBool,
    broken: AtomicBool,
    /// For each stream in it, the nodes that the next one depends on.
    ends: Mutex<HashMap<u64, Vec<u32>>>,
    /// Node handles as they were last told, which the program may read until its next call.
    told: Mutex<Vec<usize>>,
}

impl Capture {
    /// Invalidates the capture: its end will say so.
    pub fn spoil(&self) {
        self.broken.store(true, Ordering::Release);
    }

    fn check(&self) -> Result {
        if self.broken.load(Ordering::Acquire) { Err(code::STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// Adds an operation that was put on a stream.
    pub fn add<'a, T: Op<'a>>(&self, stream: &Stream, op: &T) -> Result {
        self.check()?;
        if !std::ptr::eq(stream.context, self.graph.context) {
            self.spoil();
            return Err(Status::NOT_SUPPORTED);
        }
        let mut body = Vec::new();
        client::ops::encode(op, &mut body);
        let mut ends = lock(&self.ends);
        let end = ends.entry(stream.unique()).or_default();
        let node = self.graph.add(T::INFO.opcode, body, std::mem::take(end))?;
        *end = vec![node];
        Ok(())
    }

    /// What the next node on a stream depends on: what an event recorded there stands for.
    pub fn point(&self, stream: &Stream) -> Vec<u32> {
        lock(&self.ends).get(&stream.unique()).cloned().unwrap_or_default()
    }

    /// A stream waits for an event that stands for `point`. It joins the capture if it was not in it.
    pub fn join(self: &Arc<Self>, stream: &Stream, point: &[u32]) -> Result {
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

fn begin(handle: usize, per_thread: bool, mode: u32) -> Result {
    let (driver, context) = context::ready()?;
    let stream = stream::any(driver, context, handle, per_thread)?;
    if mode > RELAXED {
        return Err(Status::INVALID_VALUE);
    }
    if stream.is_legacy() {
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    if let Some(capture) = stream.capture() {
        // NVIDIA's driver was seen to invalidate the capture that is under way.
        capture.spoil();
        return Err(code::ILLEGAL_STATE);
    }
    let capture = Capture {
        id: unique_id(),
        mode,
        thread: std::thread::current().id(),
        origin: stream.unique(),
        graph: Arc::new(Graph::new(stream.context)),
        ended: AtomicBool::new(false),
        broken: AtomicBool::new(false),
        ends: Mutex::new(HashMap::from([(stream.unique(), Vec::new())])),
        told: Mutex::default(),
    };
    ACTIVE.fetch_add(1, Ordering::AcqRel);
    stream.set_capture(Arc::new(capture));
    Ok(())
}

fn end(handle: usize, per_thread: bool, graph: *mut usize) -> Result {
    non_null(graph)?;
    let (driver, context) = context::ready()?;
    let stream = stream::any(driver, context, handle, per_thread)?;
    let capture = stream.capture().ok_or(code::ILLEGAL_STATE)?;
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(code::STREAM_CAPTURE_WRONG_THREAD);
    }
    if capture.origin != stream.unique() {
        capture.spoil();
        return Err(code::STREAM_CAPTURE_UNMATCHED);
    }
    if !capture.ended.swap(true, Ordering::AcqRel) {
        ACTIVE.fetch_sub(1, Ordering::AcqRel);
    }
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(graph, 0)? };
    capture.check()?;
    // Every stream that joined has been waited for: nothing depends on what the graph's last nodes are but the origin's next one.
    let last = capture.point(&stream);
    if capture.graph.leaves().iter().any(|leaf| !last.contains(leaf)) {
        return Err(code::STREAM_CAPTURE_UNJOINED);
    }
    // SAFETY: as above.
    unsafe { put(graph, Graph::handle(&capture.graph)?) }
}

/// Where the capture's information goes; each place may be NULL.
struct Told {
    id: *mut u64,
    graph: *mut usize,
    dependencies: *mut *const usize,
    edges: *mut *const u8,
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
    let driver = driver()?;
    let stream = stream::any(driver, context::current()?, handle, per_thread)?;
    let capture = stream.capture();
    // SAFETY: the places are NULL or may be written, as the program says.
    unsafe {
        put(status, capture.as_ref().map_or(0, |capture| capture.status()))?;
        let Some(capture) = capture.filter(|capture| capture.check().is_ok()) else { return Ok(()) };
        tell(told.id, capture.id);
        if !told.graph.is_null() {
            put(told.graph, Graph::handle(&capture.graph)?)?;
        }
        tell(told.edges, std::ptr::null());
        if !told.dependencies.is_null() || !told.count.is_null() {
            let nodes: Result<Vec<usize>> =
                capture.point(&stream).into_iter().map(|node| Graph::node(&capture.graph, node)).collect();
            let mut kept = lock(&capture.told);
            *kept = nodes?;
            tell(told.count, kept.len());
            tell(told.dependencies, kept.as_ptr());
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
            refuse_form("capturing other work than kernels, fills and copies inside the device", &SAID)
        }
    }
}

api! {
    fn cuStreamBeginCapture / cuStreamBeginCapture_ptsz(stream: usize) |pt| {
        begin(stream, pt, 0)
    }

    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz(stream: usize, mode: u32) |pt| {
        begin(stream, pt, mode)
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
        stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, dependencies: *mut *const usize, edges: *mut *const u8, count: *mut usize
    ) |pt| {
        info(stream, pt, status, &Told { id, graph, dependencies, edges, count })
    }
}
