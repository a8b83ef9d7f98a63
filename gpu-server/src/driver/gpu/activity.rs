//! What devices did and when.

use std::sync::Arc;

use protocol::handle::StreamId;

use crate::driver::activity::Activity;
use crate::driver::call::Result;

/// Records of kernels, copies and fills.
pub trait GpuActivity {
    /// From here on a record of each kernel, copy and fill goes to `activity`, when a device has done it and at the latest with [`flush_activity`](Self::flush_activity).
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if this GPU cannot tell.
    fn start_activity(&mut self, activity: &Arc<Activity>) -> Result;

    /// Ends it. What devices have done by now is still recorded.
    fn stop_activity(&mut self);

    /// When this returns, all that devices have done is recorded. Does not wait for work.
    fn flush_activity(&mut self) {}

    /// What the dispatcher gives the driver from here on is part of this command on this stream; `None`: of no command. Called only while activity is recorded.
    fn mark_work(&mut self, _command: Option<(u64, StreamId)>) {}

    /// The clock of the records, in nanoseconds.
    fn activity_clock(&self) -> u64 {
        crate::driver::activity::now()
    }
}
