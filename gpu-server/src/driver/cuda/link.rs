//! The driver's linker.

use std::ffi::{CString, c_void};

use protocol::Status;
use protocol::ops::module::*;

use super::Cuda;
use super::api::{Api, CUlinkState};
use super::kernels::{LOG, Logs, MAX_IMAGE, jit_options, write_if_it_fits};
use crate::driver::call::Call;

/// Linkers of a session at most.
const MOST: usize = 256;

/// A linker at work.
pub(super) struct Link {
    pub(super) context: u32,
    api: &'static Api,
    state: CUlinkState,
    logs: Logs,
    /// The options that it was made with, which the driver writes to as long as it is there.
    _numbers: Vec<u32>,
    _values: Vec<*mut c_void>,
    /// The image that came of it: the driver's, until it goes.
    image: Option<(*const u8, usize)>,
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: made by `create_link`, out of the table.
        let _ = unsafe { self.api.link_destroy(self.state) };
    }
}

impl Cuda {
    fn link(&mut self, cx: &mut Call, id: u32) -> Result<&mut Link, Status> {
        let context = self.links.get(&id).ok_or(Status::INVALID_HANDLE)?.context;
        cx.context = protocol::handle::ContextId(context);
        self.enter_context(cx.context)?;
        self.links.get_mut(&id).ok_or(Status::INVALID_HANDLE)
    }

    pub(super) fn create_link(&mut self, cx: &mut Call, op: &LinkCreate) -> Result<(), Status> {
        cx.context = op.context;
        if self.links.contains_key(&op.link.0) {
            return Err(Status::INVALID_HANDLE);
        }
        if self.links.len() >= MOST {
            return Err(Status::OUT_OF_MEMORY);
        }
        self.enter_context(op.context)?;
        let mut logs = Logs::new(LOG);
        let (mut numbers, mut values) = jit_options(&op.options)?;
        logs.ask(&mut numbers, &mut values);
        let mut state: CUlinkState = std::ptr::null_mut();
        let count = numbers.len() as u32;
        // SAFETY: options and logs, which have the room that the options say, are kept as long as the linker.
        let made =
            unsafe { self.api.link_create(count, numbers.as_mut_ptr(), values.as_mut_ptr(), &mut state) };
        self.note(op.context, made)?;
        let link = Link {
            context: op.context.0,
            api: self.api,
            state,
            logs,
            _numbers: numbers,
            _values: values,
            image: None,
        };
        self.links.insert(op.link.0, link);
        Ok(())
    }

    pub(super) fn add_to_link(&mut self, cx: &mut Call, op: LinkAdd<'_>) -> Result<LinkAddReply, Status> {
        if op.kind > jit_input::LAST {
            return Err(Status::INVALID_VALUE);
        }
        let mut data = cx.input(op.data)?.collect(MAX_IMAGE)?;
        if op.kind == jit_input::PTX && data.last() != Some(&0) {
            data.push(0);
        }
        let name = CString::new(op.name).map_err(|_| Status::INVALID_VALUE)?;
        let (mut numbers, mut values) = jit_options(&op.options)?;
        let link = self.link(cx, op.link.0)?;
        // SAFETY: a linker that is there; as many bytes and options as the lengths say, of which the driver keeps none.
        let added = unsafe {
            link.api.link_add(
                link.state,
                op.kind,
                data.as_mut_ptr().cast(),
                data.len(),
                name.as_ptr(),
                numbers.len() as u32,
                numbers.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let [info_log, error_log] = link.logs.texts();
        let result = self.note(cx.context, added).err().unwrap_or(Status::SUCCESS).0;
        Ok(LinkAddReply { result, info_log, error_log })
    }

    pub(super) fn complete_link(
        &mut self,
        cx: &mut Call,
        op: LinkComplete,
    ) -> Result<LinkCompleteReply, Status> {
        let link = self.link(cx, op.link.0)?;
        let mut result = Ok(());
        if link.image.is_none() {
            let (mut image, mut size): (*mut c_void, usize) = (std::ptr::null_mut(), 0);
            // SAFETY: a linker that is there; writes where its image is, and how long.
            result = unsafe { link.api.link_complete(link.state, &mut image, &mut size) };
            if result.is_ok() {
                link.image = Some((image.cast(), size));
            }
        }
        let [info_log, error_log] = link.logs.texts();
        let image = link.image.filter(|(at, _)| !at.is_null());
        if let Some((at, size)) = image {
            // SAFETY: the driver has written as many bytes there, which stay until the linker goes.
            let bytes = unsafe { std::slice::from_raw_parts(at, size) };
            write_if_it_fits(cx, op.image, bytes)?;
        }
        let size = image.map_or(0, |(_, size)| size as u64);
        let result = self.note(cx.context, result).err().unwrap_or(Status::SUCCESS).0;
        Ok(LinkCompleteReply { result, size, info_log, error_log })
    }

    pub(super) fn destroy_link(&mut self, cx: &mut Call, op: &LinkDestroy) -> Result<(), Status> {
        // One that is unknown has gone with its context.
        let Some(link) = self.links.remove(&op.link.0) else { return Ok(()) };
        cx.context = protocol::handle::ContextId(link.context);
        drop(link);
        Ok(())
    }
}
