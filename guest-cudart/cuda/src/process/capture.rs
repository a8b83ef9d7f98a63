//! The state of a stream capture.
//!
//! A capture exists only in this process: work on a captured stream becomes a graph node, and the server
//! first learns of the graph when it is instantiated. Calls that cannot be part of a graph fail on a captured
//! stream and invalidate the capture.

use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
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

/// Captures that may be active.
static ALL: Mutex<Vec<Weak<Capture>>> = Mutex::new(Vec::new());

/// The number of active captures in this process. While it is 0, calls don't look for one.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

/// A graph that a capture adds nodes to, opaque here because graphs belong to the chapter `graph`.
pub(crate) type Recorded = dyn Any + Send + Sync;

/// A capture, from its start on one stream to its end, with all streams that joined it.
pub(crate) struct Capture {
    pub id: u64,
    pub mode: u32,
    pub thread: ThreadId,
    /// Unique number of the stream where it began.
    pub origin: u64,
    /// Unique numbers of the contexts whose legacy default streams would wait for one of its streams.
    waiting: Mutex<Vec<u64>>,
    /// Unique number of its graph's context.
    pub context: u64,
    /// The graph that it adds nodes to.
    pub graph: Arc<Recorded>,
    /// Destroys the graph, if the capture has made it.
    destroy: Option<fn(&Recorded)>,
    ended: AtomicBool,
    broken: AtomicBool,
    /// For each stream in the capture, the nodes that the stream's next node depends on.
    pub ends: Mutex<HashMap<u64, Vec<u64>>>,
    /// The nodes that the capture added, with the unique numbers of their streams. A graph that is captured
    /// into may already have had others.
    pub added: Mutex<HashMap<u64, u64>>,
    /// The node handles and edge data last returned to the program, which may read them until its next call.
    pub told: Mutex<(Vec<usize>, Vec<EdgeData>)>,
}

impl Capture {
    /// Begins a capture on the stream with the unique number `origin`. Its first nodes depend on the nodes
    /// `before`. With `destroy`, the graph is the capture's own until the program gets it.
    pub fn begin(
        mode: u32,
        origin: u64,
        context: u64,
        graph: Arc<Recorded>,
        destroy: Option<fn(&Recorded)>,
        before: Vec<u64>,
    ) -> Arc<Capture> {
        let capture = Arc::new(Capture {
            id: unique_id(),
            mode,
            thread: std::thread::current().id(),
            origin,
            waiting: Mutex::default(),
            context,
            graph,
            destroy,
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

    /// Invalidates the capture: ending it will fail.
    pub fn spoil(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub fn check(&self) -> Result {
        if self.broken.load(Ordering::Acquire) { Err(code::STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// Notes that the legacy default stream of this context would wait for a stream of the capture.
    pub fn is_waited_for_in(&self, context: u64) {
        let mut waiting = lock(&self.waiting);
        if !waiting.contains(&context) {
            waiting.push(context);
        }
    }

    /// Whether the legacy default stream of this context would wait for a stream of the capture.
    pub fn would_hold(&self, context: u64) -> bool {
        lock(&self.waiting).contains(&context)
    }

    /// The nodes that the next node on the stream with this unique number depends on. An event recorded there
    /// stands for them.
    pub fn point(&self, stream: u64) -> Vec<u64> {
        lock(&self.ends).get(&stream).cloned().unwrap_or_default()
    }

    pub fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            ACTIVE.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Ends the capture without a result. A graph that it has made is destroyed, although the program may
    /// have asked for its handle: it "is transferred or destroyed at cuStreamEndCapture" (`cuda.h`).
    pub fn discard(&self) {
        self.end();
        if let Some(destroy) = self.destroy {
            destroy(&*self.graph);
        }
    }

    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub fn status(&self) -> u32 {
        if self.broken.load(Ordering::Acquire) { 2 } else { 1 }
    }
}

impl Drop for Capture {
    /// Nothing can end it any more.
    fn drop(&mut self) {
        self.end();
    }
}

/// The active captures.
pub(crate) fn all() -> Vec<Arc<Capture>> {
    if !any() {
        return Vec::new();
    }
    lock(&ALL).iter().filter_map(Weak::upgrade).filter(|capture| !capture.is_ended()).collect()
}

/// Whether any stream of this process is being captured.
#[inline]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Acquire) != 0
}

/// `cuThreadExchangeStreamCaptureMode`.
pub(crate) fn exchange_mode(mode: u32) -> u32 {
    MODE.try_with(|current| current.replace(mode)).unwrap_or(0)
}

/// Fails a call that CUDA calls potentially unsafe, and invalidates the capture, if a capture's mode and the
/// thread's mode forbid it.
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
