//! The driver's linker.

use std::ffi::{CString, c_void};

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::module::JitOption;

use super::Cuda;
use super::api::{Api, CUlinkState};
use super::kernels::{LOG, Logs, jit_options};
use crate::driver::gpu::LinkInput;

/// A linker at work.
pub struct Link {
    api: &'static Api,
    state: CUlinkState,
    logs: Logs,
    /// The options that it was made with, which the driver writes to as long as it is there.
    _numbers: Vec<u32>,
    _values: Vec<*mut c_void>,
    /// The image that came of it: the driver's, until it goes.
    image: Option<(*const u8, usize)>,
}

// SAFETY: the driver API takes handles from any thread; the pointers are to memory that the linker, or this, owns.
unsafe impl Send for Link {}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: made by `start_link`, out of the session's table.
        let _ = unsafe { self.api.link_destroy(self.state) };
    }
}

impl Link {
    /// Adds an input: the driver's result, and the logs until now.
    pub(super) fn add(
        &mut self,
        mut input: LinkInput<'_>,
    ) -> Result<(Result<(), Status>, [String; 2]), Status> {
        let name = CString::new(input.name).map_err(|_| Status::INVALID_VALUE)?;
        let (mut numbers, mut values) = jit_options(input.options)?;
        // SAFETY: a linker that is there; as many bytes and options as the lengths say, of which the driver keeps none.
        let added = unsafe {
            self.api.link_add(
                self.state,
                input.kind,
                input.data.as_mut_ptr().cast(),
                input.data.len(),
                name.as_ptr(),
                numbers.len() as u32,
                numbers.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        Ok((added, self.logs.texts()))
    }

    /// Links, if that is not done yet: the driver's result, and the logs until now.
    pub(super) fn complete(&mut self) -> (Result<(), Status>, [String; 2]) {
        let mut result = Ok(());
        if self.image.is_none() {
            let (mut image, mut size): (*mut c_void, usize) = (std::ptr::null_mut(), 0);
            // SAFETY: a linker that is there; writes where its image is, and how long.
            result = unsafe { self.api.link_complete(self.state, &mut image, &mut size) };
            if result.is_ok() {
                self.image = Some((image.cast(), size));
            }
        }
        (result, self.logs.texts())
    }

    /// The image that came of it.
    pub(super) fn image(&self) -> Option<&[u8]> {
        let (at, size) = self.image.filter(|(at, _)| !at.is_null())?;
        // SAFETY: the driver has written as many bytes there, which stay until the linker goes.
        Some(unsafe { std::slice::from_raw_parts(at, size) })
    }
}

impl Cuda {
    pub(super) fn start_link(&self, context: ContextId, options: &[JitOption]) -> Result<Link, Status> {
        let mut logs = Logs::new(LOG);
        let (mut numbers, mut values) = jit_options(options)?;
        logs.ask(&mut numbers, &mut values);
        let mut state: CUlinkState = std::ptr::null_mut();
        let count = numbers.len() as u32;
        // SAFETY: options and logs, which have the room that the options say, are kept as long as the linker.
        let made =
            unsafe { self.api.link_create(count, numbers.as_mut_ptr(), values.as_mut_ptr(), &mut state) };
        self.note(context, made)?;
        Ok(Link { api: self.api, state, logs, _numbers: numbers, _values: values, image: None })
    }
}
