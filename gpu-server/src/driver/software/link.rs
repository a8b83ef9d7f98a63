//! The linker, for one input: PTX, or a fat binary with PTX. The image that comes of it is the input, checked.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::module::*;

use super::kernels::{MAX_IMAGE, write_if_it_fits};
use super::{Software, code};
use crate::driver::call::Call;

/// Linkers of a session at most.
const MOST: usize = 256;
/// Bytes of what is said of an input.
const LOG: usize = 1792;

/// A linker at work.
pub(super) struct Link {
    pub(super) context: u32,
    input: Option<Vec<u8>>,
    error_log: String,
}

impl Link {
    /// Says why an input is refused.
    fn refuse(&mut self, status: Status, why: &str) -> u32 {
        tracing::warn!("linker: {why}");
        self.error_log = why.chars().take(LOG / 4).collect();
        status.0
    }
}

impl Software {
    fn link(&mut self, cx: &mut Call, id: u32) -> Result<&mut Link, Status> {
        let link = self.links.get_mut(&id).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(link.context);
        Ok(link)
    }

    pub(super) fn create_link(&mut self, cx: &mut Call, op: &LinkCreate) -> Result<(), Status> {
        cx.context = op.context;
        self.context(op.context)?;
        if self.links.contains_key(&op.link.0) {
            return Err(Status::INVALID_HANDLE);
        }
        if self.links.len() >= MOST {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.links.insert(op.link.0, Link { context: op.context.0, input: None, error_log: String::new() });
        Ok(())
    }

    pub(super) fn add_to_link(&mut self, cx: &mut Call, op: LinkAdd<'_>) -> Result<LinkAddReply, Status> {
        if op.kind > jit_input::LAST {
            return Err(Status::INVALID_VALUE);
        }
        let mut data = cx.input(op.data)?.collect(MAX_IMAGE)?;
        let context = ContextId(self.link(cx, op.link.0)?.context);
        let device = self.context(context)?.device;
        let gpu = self.device(device)?.gpu.clone();
        if op.kind == jit_input::PTX && data.last() != Some(&0) {
            data.push(0);
        }
        let link = self.link(cx, op.link.0)?;
        let known = matches!(op.kind, jit_input::PTX | jit_input::FATBINARY);
        let result = if link.input.is_some() {
            link.refuse(Status::NOT_SUPPORTED, "the software GPU links one input, and this is another")
        } else if !known {
            let why = format!("{}: the software GPU has no use for machine code and archives", op.name);
            link.refuse(Status::NOT_SUPPORTED, &why)
        } else if let Err(error) = gpu.load_module(&data) {
            link.refuse(code(&error), &format!("{}: {error}", op.name))
        } else {
            link.input = Some(data);
            0
        };
        Ok(LinkAddReply { result, info_log: String::new(), error_log: link.error_log.clone() })
    }

    pub(super) fn complete_link(
        &mut self,
        cx: &mut Call,
        op: LinkComplete,
    ) -> Result<LinkCompleteReply, Status> {
        let link = self.link(cx, op.link.0)?;
        let error_log = link.error_log.clone();
        let Some(image) = link.input.take() else {
            let result = Status::INVALID_VALUE.0;
            return Ok(LinkCompleteReply { result, size: 0, info_log: String::new(), error_log });
        };
        let size = image.len() as u64;
        let written = write_if_it_fits(cx, op.image, &image);
        self.link(cx, op.link.0)?.input = Some(image);
        written?;
        Ok(LinkCompleteReply { result: 0, size, info_log: String::new(), error_log })
    }

    pub(super) fn destroy_link(&mut self, cx: &mut Call, op: &LinkDestroy) -> Result<(), Status> {
        // One that is unknown has gone with its context.
        if let Some(link) = self.links.remove(&op.link.0) {
            cx.context = ContextId(link.context);
        }
        Ok(())
    }
}
