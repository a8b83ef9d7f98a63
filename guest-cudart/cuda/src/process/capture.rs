//! The state of a stream capture.
//!
//! Capturing happens in this process alone: work on a captured stream becomes a node of a graph, and the server hears of the graph when it is instantiated. Calls that have no place in a graph fail on a captured stream and
//! invalidate the capture.

use std::any::Any;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

use crate::abi::result::{Result, code};
use crate::abi::types::EdgeData;
use crate::process::ids::unique_id;
use client::lock;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const RELAXED: u32 = 2;
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
    pub id: u64,
    pub mode: u32,
    pub thread: ThreadId,
    /// Unique number of the stream that it began on, and whether the legacy default stream waits for that.
    pub origin: u64,
    pub blocking: bool,
    /// Unique number of the context that its streams are in.
    pub context: u64,
    /// The graph that it adds to. What a graph is, the chapter `graph` knows.
    pub graph: Arc<dyn Any + Send + Sync>,
    ended: AtomicBool,
    broken: AtomicBool,
    /// For each stream in it, the nodes that the next one depends on.
    pub ends: Mutex<HashMap<u64, Vec<u64>>>,
    /// What was added by the capture; a graph that was captured into may have had nodes before.
    pub added: Mutex<HashSet<u64>>,
    /// Node handles as they were last told, which the program may read until its next call, and the data of their edges.
    pub told: Mutex<(Vec<usize>, Vec<EdgeData>)>,
}

impl Capture {
    /// Begins a capture on the stream with the unique number `origin`, behind the nodes `before` of a graph.
    pub fn begin(
        mode: u32,
        origin: u64,
        blocking: bool,
        context: u64,
        graph: Arc<dyn Any + Send + Sync>,
        before: Vec<u64>,
    ) -> Arc<Capture> {
        let capture = Arc::new(Capture {
            id: unique_id(),
            mode,
            thread: std::thread::current().id(),
            origin,
            blocking,
            context,
            graph,
            ended: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            ends: Mutex::new(HashMap::from([(origin, before)])),
            added: Mutex::default(),
            told: Mutex::default(),
        });
        ACTIVE.fetch_add(1, Ordering::AcqRel);
        let mut all = lock(&ALL);
        all.retain(|other| other.upgrade().is_some_and(|other| !other.is_ended()));
        all.push(Arc::downgrade(&capture));
        capture
    }

    /// Invalidates the capture: its end will say so.
    pub fn spoil(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub fn check(&self) -> Result {
        if self.broken.load(Ordering::Acquire) { Err(code::STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// What the next node on a stream, by its unique number, depends on: what an event recorded there stands for.
    pub fn point(&self, stream: u64) -> Vec<u64> {
        lock(&self.ends).get(&stream).cloned().unwrap_or_default()
    }

    pub fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            ACTIVE.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub fn status(&self) -> u32 {
        if self.broken.load(Ordering::Acquire) { 2 } else { 1 }
    }
}

/// The captures that are under way.
pub(crate) fn all() -> Vec<Arc<Capture>> {
    if !any() {
        return Vec::new();
    }
    lock(&ALL).iter().filter_map(Weak::upgrade).filter(|capture| !capture.is_ended()).collect()
}

/// Whether some stream of this process is being captured.
#[inline]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Acquire) != 0
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
    let forbidding = all().into_iter().find(|capture| match mode {
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
