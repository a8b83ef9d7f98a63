//! What the software GPU did and when: its streams' threads look at the clock before and after each piece of work.

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

/// What a piece of work is.
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

    /// A copy between two devices' memory, perhaps one.
    pub(super) fn between(from: u32, to: u32, bytes: u64) -> What {
        let copy = if from == to { copy::DTOD } else { copy::PTOP };
        let mut what = What::copy(copy, [memory::DEVICE; 2], bytes);
        what.record.ends = [from, to];
        what
    }

    /// The bytes of a box.
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

/// Where a command's records go, and what they have in common.
#[derive(Clone)]
pub(super) struct Records {
    activity: Arc<Activity>,
    seq: u64,
    stream: u32,
    device: u32,
}

impl Records {
    /// A node of a graph was done.
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

/// A piece of work to be recorded; nothing if nothing is recorded.
pub(super) struct Timer(Option<(Records, What, Arc<AtomicU64>)>);

impl Timer {
    /// A stream begins with it.
    pub(super) fn begin(&self) {
        if let Some((.., begun)) = &self.0 {
            begun.store(now(), Ordering::Relaxed);
        }
    }

    /// It is done. To be called before anybody can see that.
    pub(super) fn end(self) {
        if let Some((records, what, begun)) = self.0 {
            records.push(&what, begun.load(Ordering::Relaxed));
        }
    }

    /// Both, around `launch`, which enqueues work on the place's stream. Nothing is recorded of work that fails.
    pub(super) fn around(self, place: &Place, launch: impl FnOnce() -> Result) -> Result {
        let Some((records, what, begun)) = self.0 else { return launch() };
        let begin = Timer(Some((records.clone(), what.clone(), Arc::clone(&begun))));
        // A device that has failed takes nothing more, and says so where the work is enqueued.
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
    /// Where records of the command that is being executed go, if there are to be any.
    pub(super) fn records(&self, place: &Place) -> Option<Records> {
        let activity = Arc::clone(self.activity.as_ref()?);
        let (seq, stream) = self.marked?;
        Some(Records { activity, seq, stream: stream.0, device: place.device })
    }

    /// A timer for a piece of work of the command that is being executed.
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
