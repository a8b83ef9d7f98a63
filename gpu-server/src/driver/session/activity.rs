//! Device activity.

use std::sync::Arc;

use protocol::Status;
use protocol::ops::activity::*;

use super::{Session, now};
use crate::driver::activity::Activity;
use crate::driver::call::{Call, Reply};
use crate::driver::gpu::Gpu;

/// Maximum size of one answer in bytes.
const MOST_BYTES: u64 = 16 << 20;

impl<G: Gpu> Session<G> {
    /// Starts recording, unless it is on.
    pub(super) fn record_activity(&mut self, cx: &mut Call) -> Result<Arc<Activity>, Status> {
        let activity = Arc::new(Activity::default());
        if std::mem::take(&mut cx.records_activity) {
            self.gpu.stop_activity();
        }
        self.gpu.start_activity(&activity)?;
        cx.records_activity = true;
        self.activity = Some(Arc::clone(&activity));
        Ok(activity)
    }
}

impl<G: Gpu> ActivityOps<Call> for Session<G> {
    fn activity_start(&mut self, cx: &mut Call, _op: ActivityStart) -> Reply<ActivityStartReply> {
        self.record_activity(cx)?;
        now(ActivityStartReply {})
    }

    fn activity_stop(&mut self, cx: &mut Call, _op: ActivityStop) -> Reply<ActivityStopReply> {
        if std::mem::take(&mut cx.records_activity) {
            self.gpu.stop_activity();
        }
        now(ActivityStopReply {})
    }

    fn activity_read(&mut self, cx: &mut Call, op: ActivityRead) -> Reply<ActivityReadReply> {
        let activity = Arc::clone(self.activity.as_ref().ok_or(Status::INVALID_VALUE)?);
        if op.flush {
            self.gpu.flush_activity();
        }
        let (bytes, dropped) = activity.take(op.out.0.len.min(MOST_BYTES));
        if !bytes.is_empty() {
            cx.write_if_it_fits(op.out, &bytes)?;
        }
        now(ActivityReadReply { bytes: bytes.len() as u64, dropped })
    }

    fn activity_clock(&mut self, _cx: &mut Call, _op: ActivityClock) -> Reply<ActivityClockReply> {
        now(ActivityClockReply { now: self.gpu.activity_clock() })
    }
}
