//! Device activity of NVIDIA's GPUs: see [`super::cupti`].

use std::sync::Arc;

use protocol::Status;
use protocol::handle::StreamId;

use super::{Cuda, cupti};
use crate::driver::activity::{self, Activity};
use crate::driver::call::Result;
use crate::driver::gpu::GpuActivity;

impl GpuActivity for Cuda {
    fn start_activity(&mut self, activity: &Arc<Activity>) -> Result {
        let library = cupti::load(self.cupti_path.as_deref()).map_err(|why| {
            tracing::warn!("{why}");
            Status::NOT_SUPPORTED
        })?;
        let devices = (0..).zip(&self.devices).map(|(ordinal, device)| (device.handle as u32, ordinal));
        library.start(activity, devices.collect()).map_err(|why| {
            tracing::warn!("activity cannot be recorded: {why}");
            library.stop();
            Status::NOT_SUPPORTED
        })?;
        self.cupti = Some(library);
        Ok(())
    }

    fn stop_activity(&mut self) {
        if let Some(library) = self.cupti.take() {
            library.stop();
        }
    }

    fn flush_activity(&mut self) {
        if let Some(library) = self.cupti {
            library.flush();
        }
    }

    fn mark_work(&mut self, command: Option<(u64, StreamId)>) {
        if let Some(library) = self.cupti {
            library.mark(command);
        }
    }

    fn activity_clock(&self) -> u64 {
        self.cupti.and_then(cupti::Cupti::now).unwrap_or_else(activity::now)
    }
}
