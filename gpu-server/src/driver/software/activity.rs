//! Device activity of the software GPU: its streams' threads read the clock before and after each piece of
//! work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cupti_records::{copy, memory};
use protocol::handle::StreamId;
use protocol::ops::activity::{ActivityRecord, kind};
use software_gpu::{Function, LaunchConfig};

use super::Software;
use super::streams::Place;
use crate::driver::activity::{Activity, blank, now};
use crate::driver::call::Result;
use crate::driver::gpu::{Fill, GpuActivity};
use crate::driver::rows::Rows;

/// The kind of a piece of work.
#[derive(Clone)]
pub(super) struct What {
    record: ActivityRecord,
    name: String,
}

impl What {
    fn of(record: ActivityRecord) -> What {
        What { record, name: String::new() }
    }

    /// A copy. `ends`: `CUpti_ActivityMemoryKind` of the source and the destination.
    pub(super) fn copy(copy: u8, ends: [u8; 2], bytes: u64) -> What {
        What::of(ActivityRecord { kind: kind::COPY, memory: [copy, ends[0], ends[1]], bytes, ..blank() })
    }

    /// A copy between the memory of two devices, or within one.
    pub(super) fn between(from: u32, to: u32, bytes: u64) -> What {
        let copy = if from == to { copy::DTOD } else { copy::PTOP };
        let mut what = What::copy(copy, [memory::DEVICE; 2], bytes);
        what.record.ends = [from, to];
        what
    }

    /// Size of a box in bytes.
    pub(super) fn bytes(rows: &Rows) -> u64 {
        rows.sizes().map_or(0, |(packed, _)| packed)
    }

    pub(super) fn fill(fill: &Fill) -> What {
        let bytes = fill.width.saturating_mul(fill.element.into()).saturating_mul(fill.height);
        let memory = [0, 0, memory::DEVICE];
        What::of(ActivityRecord { kind: kind::FILL, value: fill.value, memory, bytes, ..blank() })
    }

    pub(super) fn kernel(function: &Function, config: &LaunchConfig, registers: u32) -> What {
        let info = function.info();
        let record = ActivityRecord {
            kind: kind::KERNEL,
            grid: config.grid,
            block: config.block,
            cluster: config.cluster.unwrap_or_default(),
            shared: [info.shared_bytes, config.dynamic_shared],
            registers,
            local: info.local_bytes,
            ..blank()
        };
        What { record, name: info.name.clone() }
    }
}

/// Where a command's records go, and their common fields.
#[derive(Clone)]
pub(super) struct Records {
    activity: Arc<Activity>,
    seq: u64,
    stream: u32,
    device: u32,
}

impl Records {
    /// Records a graph node's work.
    pub(super) fn node(&self, what: &What, graph: u32, node: u64, begin: u64) {
        let mut what = what.clone();
        (what.record.graph, what.record.node) = (graph, node);
        self.push(&what, begin);
    }

    fn push(&self, what: &What, begin: u64) {
        let (seq, stream, device) = (self.seq, self.stream, self.device);
        let record = ActivityRecord { seq, stream, device, begin, end: now(), ..what.record.clone() };
        self.activity.push(record, &what.name);
    }
}

/// Times a piece of work; does nothing if nothing is recorded.
pub(super) struct Timer(Option<(Records, What, Arc<AtomicU64>)>);

impl Timer {
    /// Called when a stream begins the work.
    pub(super) fn begin(&self) {
        if let Some((.., begun)) = &self.0 {
            begun.store(now(), Ordering::Relaxed);
        }
    }

    /// Called when the work is done, before anybody can see that.
    pub(super) fn end(self) {
        if let Some((records, what, begun)) = self.0 {
            records.push(&what, begun.load(Ordering::Relaxed));
        }
    }

    /// Does both around `launch`, which enqueues work on the place's stream. Failed work is not recorded.
    pub(super) fn around(self, place: &Place, launch: impl FnOnce() -> Result) -> Result {
        let Some((records, what, begun)) = self.0 else { return launch() };
        let begin = Timer(Some((records.clone(), what.clone(), Arc::clone(&begun))));
        // A failed device takes no work; the caller gets the error from enqueuing the work itself.
        let _ = place.stream.enqueue(move |_| {
            begin.begin();
            Ok(())
        });
        launch()?;
        let end = Timer(Some((records, what, begun)));
        let _ = place.stream.enqueue(move |_| {
            end.end();
            Ok(())
        });
        Ok(())
    }
}

impl Software {
    /// Where to record the command being executed, if activity is recorded.
    pub(super) fn records(&self, place: &Place) -> Option<Records> {
        let activity = Arc::clone(self.activity.as_ref()?);
        let (seq, stream) = self.marked?;
        Some(Records { activity, seq, stream: stream.0, device: place.device })
    }

    /// A timer for a piece of work of the command being executed.
    pub(super) fn timer(&self, place: &Place, what: impl FnOnce() -> What) -> Timer {
        Timer(self.records(place).map(|records| (records, what(), Arc::default())))
    }
}

impl GpuActivity for Software {
    fn start_activity(&mut self, activity: &Arc<Activity>) -> Result {
        self.activity = Some(Arc::clone(activity));
        Ok(())
    }

    fn stop_activity(&mut self) {
        (self.activity, self.marked) = (None, None);
    }

    fn mark_work(&mut self, command: Option<(u64, StreamId)>) {
        self.marked = command;
    }
}
