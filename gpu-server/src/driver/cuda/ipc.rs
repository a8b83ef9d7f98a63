//! Events that sessions of one client share: the driver's own interprocess events, whose handles the daemon carries.

use std::ptr;

use protocol::Status;
use protocol::handle::{ContextId, EventId};

use super::Cuda;
use super::api::{CUevent, IpcHandle};
use super::streams::Moment;
use crate::driver::gpu::GpuSharedEvents;

impl GpuSharedEvents for Cuda {
    const SHARES_EVENTS: bool = true;

    fn has_event(&self, event: EventId) -> bool {
        self.events.contains_key(&event.0)
    }

    fn export_event(&mut self, event: EventId) -> Result<(u32, Vec<u8>), Status> {
        let moment = self.events.get(&event.0).ok_or(Status::INVALID_HANDLE)?;
        let device = self.contexts.get(&moment.context).ok_or(Status::INVALID_CONTEXT)?.device;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: a live event; writes 64 bytes. The driver refuses one that was not made for other processes.
        unsafe { self.api.event_export(&mut handle, moment.handle) }?;
        Ok((self.device(device)?.handle as u32, handle.0.to_vec()))
    }

    fn import_event(&mut self, context: ContextId, event: EventId, handle: Vec<u8>) -> Result<(), Status> {
        let handle = IpcHandle(handle.try_into().map_err(|_| Status::INVALID_VALUE)?);
        self.enter_context(context)?;
        let mut native: CUevent = ptr::null_mut();
        // SAFETY: a handle that this driver made in another worker; writes one event.
        unsafe { self.api.event_import(&mut native, handle) }?;
        self.events.insert(event.0, Moment::shared(native, context.0));
        Ok(())
    }

    fn query_event(&mut self, event: EventId) -> Result<bool, Status> {
        let moment = self.events.get(&event.0).ok_or(Status::INVALID_HANDLE)?;
        let (event, context) = (moment.handle, ContextId(moment.context));
        self.enter_context(context)?;
        // SAFETY: a live event.
        match unsafe { self.api.event_query_raw(event) } {
            Ok(()) => Ok(true),
            Err(Status::NOT_READY) => Ok(false),
            Err(status) => self.note(context, Err(status)),
        }
    }
}
