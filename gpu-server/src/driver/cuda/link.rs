//! The driver's linker.

use std::ffi::{CString, c_void};

use crate::driver::call::Result;
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::module::JitOption;

use super::Cuda;
use super::api::{Api, CUlinkState};
use super::kernels::{LOG, Logs, jit_options};
use crate::driver::gpu::LinkInput;

/// A linker with its inputs.
pub struct Link {
    api: &'static Api,
    state: CUlinkState,
    logs: Logs,
    /// The options it was made with. The driver writes to the logs in them as long as the linker exists.
    _numbers: Vec<u32>,
    _values: Vec<*mut c_void>,
    /// The linked image, which belongs to the driver until the linker is destroyed.
    image: Option<(*const u8, usize)>,
}

// SAFETY: the driver API takes handles from any thread; the pointers are to memory owned by the linker or by
// this.
unsafe impl Send for Link {}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: made by `start_link`, and removed from the session's table.
        let _ = unsafe { self.api.link_destroy(self.state) };
    }
}

impl Link {
    /// Adds an input. Returns the driver's result and the logs so far.
    pub(super) fn add(&mut self, mut input: LinkInput<'_>) -> Result<(Result, [String; 2])> {
        let name = CString::new(input.name).map_err(|_| Status::INVALID_VALUE)?;
        let (mut numbers, mut values) = jit_options(input.options)?;
        // SAFETY: a live linker; as many bytes and options as the lengths say, none of which the driver
        // keeps.
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

    /// Links, unless that was done before. Returns the driver's result and the logs so far.
    pub(super) fn complete(&mut self) -> (Result, [String; 2]) {
        let mut result = Ok(());
        if self.image.is_none() {
            let (mut image, mut size): (*mut c_void, usize) = (std::ptr::null_mut(), 0);
            // SAFETY: a live linker; writes the image's address and size.
            result = unsafe { self.api.link_complete(self.state, &mut image, &mut size) };
            if result.is_ok() {
                self.image = Some((image.cast(), size));
            }
        }
        (result, self.logs.texts())
    }

    /// The linked image.
    pub(super) fn image(&self) -> Option<&[u8]> {
        let (at, size) = self.image.filter(|(at, _)| !at.is_null())?;
        // SAFETY: the driver has written this many bytes there, which stay until the linker is destroyed.
        Some(unsafe { std::slice::from_raw_parts(at, size) })
    }
}

impl Cuda {
    pub(super) fn start_link(&self, context: ContextId, options: &[JitOption]) -> Result<Link> {
        let mut logs = Logs::new(LOG);
        let (mut numbers, mut values) = jit_options(options)?;
        logs.ask(&mut numbers, &mut values);
        let mut state: CUlinkState = std::ptr::null_mut();
        let count = numbers.len() as u32;
        // SAFETY: the options, and the logs with the sizes given in them, are kept as long as the linker.
        let made =
            unsafe { self.api.link_create(count, numbers.as_mut_ptr(), values.as_mut_ptr(), &mut state) };
        self.note(context, made)?;
        Ok(Link { api: self.api, state, logs, _numbers: numbers, _values: values, image: None })
    }
}
