//! Events that sessions of one client share: the driver's own interprocess events, their handles carried by the daemon.

use std::ptr;

use protocol::Status;
use protocol::ops::memory::{EventExport, EventExportReply, EventImport, EventQuery};

use super::Cuda;
use super::api::{CUevent, IpcHandle};
use super::streams::Moment;
use crate::driver::call::Call;
use crate::share::Shared;

impl Cuda {
    pub(super) fn export_event(&mut self, op: &EventExport) -> Result<EventExportReply, Status> {
        let broker = self.broker.as_ref().ok_or(Status::NOT_SUPPORTED)?;
        let moment = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        let device = self.contexts.get(&moment.context).ok_or(Status::INVALID_CONTEXT)?.device;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: a live event; writes 64 bytes. The driver refuses one that was not made for other processes.
        unsafe { self.api.event_export(&mut handle, moment.handle) }?;
        let device = self.device(device)?.handle as u32;
        let token = broker.share(Shared::Event { device, handle: handle.0.to_vec() }, None)?;
        self.event_tokens.entry(op.event.0).or_default().push(token);
        Ok(EventExportReply { token })
    }

    pub(super) fn import_event(&mut self, cx: &mut Call, op: &EventImport) -> Result<(), Status> {
        cx.context = op.context;
        if self.events.contains_key(&op.event.0) {
            return Err(Status::INVALID_HANDLE);
        }
        let broker = self.broker.as_ref().ok_or(Status::NOT_SUPPORTED)?;
        let (Shared::Event { handle, .. }, _, own) = broker.open(op.token)? else {
            return Err(Status::INVALID_VALUE);
        };
        if own {
            // As without rgpu: a process cannot open its own.
            return Err(Status::INVALID_CONTEXT);
        }
        let handle = IpcHandle(handle.try_into().map_err(|_| Status::INVALID_VALUE)?);
        self.enter_context(op.context)?;
        let mut event: CUevent = ptr::null_mut();
        // SAFETY: a handle that this driver made in another worker; writes one event.
        unsafe { self.api.event_import(&mut event, handle) }?;
        self.events.insert(op.event.0, Moment::shared(event, op.context.0));
        Ok(())
    }

    pub(super) fn query_event(&mut self, op: &EventQuery) -> Result<bool, Status> {
        let moment = self.events.get(&op.event.0).ok_or(Status::INVALID_HANDLE)?;
        let (event, context) = (moment.handle, protocol::handle::ContextId(moment.context));
        self.enter_context(context)?;
        // SAFETY: a live event.
        match unsafe { self.api.event_query_raw(event) } {
            Ok(()) => Ok(true),
            Err(Status::NOT_READY) => Ok(false),
            Err(status) => self.note(context, Err(status)),
        }
    }

    /// An event is gone, for the client's other sessions as well.
    pub(super) fn unshare_event(&mut self, event: u32) {
        for token in self.event_tokens.remove(&event).unwrap_or_default() {
            if let Some(broker) = &self.broker {
                broker.unshare(token);
            }
        }
    }
}
