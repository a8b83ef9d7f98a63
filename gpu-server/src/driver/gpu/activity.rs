//! Device activity.

use std::sync::Arc;

use protocol::handle::StreamId;

use crate::driver::activity::Activity;
use crate::driver::call::Result;

/// Records of kernels, copies and fills.
pub trait GpuActivity {
    /// Starts recording: `activity` gets a record of each kernel, copy and fill after a device has done it,
    /// at the latest by [`flush_activity`](Self::flush_activity).
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if this GPU cannot record.
    fn start_activity(&mut self, activity: &Arc<Activity>) -> Result;

    /// Stops recording. What devices have done by now is still recorded.
    fn stop_activity(&mut self);

    /// When this returns, everything that devices have done is recorded. Does not wait for work.
    fn flush_activity(&mut self) {}

    /// What the dispatcher gives the driver from now on belongs to this command on this stream, or to no
    /// command. Called only while activity is recorded.
    fn mark_work(&mut self, _command: Option<(u64, StreamId)>) {}

    /// The records' clock, in nanoseconds.
    fn activity_clock(&self) -> u64 {
        crate::driver::activity::now()
    }
}
