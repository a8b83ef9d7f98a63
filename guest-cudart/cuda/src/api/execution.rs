//! Launches.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock};

use crate::abi::arguments::In;
use crate::abi::result::Result;
use crate::abi::types::launch_attr;
use crate::abi::types::{LaunchAttr, LaunchConfig};
use crate::code::library;
use crate::graph::node_work::{Kernel, Work};
use crate::graph::recording;
use crate::memory::managed::shared_blocks;
use crate::memory::{managed, pinned};
use crate::process::device_attributes::attr;
use crate::process::driver::Driver;
use crate::process::stream::{self, Stream};
use crate::streams::{event, stream_table};
use crate::work::launch::{self, Shape};
use client::Status;
use client::ops::launch::{Launch, LaunchAttribute};
use client::trace::RECORDER;

thread_local! {
    static BLOCK: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The events that a launch should record: when its blocks have started, or have allowed dependent work to
/// start. CUDA promises only best effort for both; here they are recorded when the kernel is done, which is
/// never too early. In a capture, what waits for them depends on the whole kernel.
///
/// # Safety
/// As for [`launch::attributes`].
pub(crate) unsafe fn events(config: &LaunchConfig) -> Result<Vec<usize>> {
    let mut found = Vec::new();
    for i in 0..config.numAttrs as usize {
        // SAFETY: guaranteed by the caller; `attributes` has checked that the array is not NULL.
        let LaunchAttr { id, value, .. } = unsafe { *config.attrs.add(i) };
        if matches!(id, launch_attr::PROGRAMMATIC_EVENT | launch_attr::LAUNCH_COMPLETION_EVENT) {
            found.push(value.0.first_chunk().map_or(0, |bytes| usize::from_le_bytes(*bytes)));
        }
    }
    Ok(found)
}

/// Launches a function, or adds the launch to a capture.
///
/// # Safety
/// As for [`launch::parameters`].
pub(crate) unsafe fn launch(
    handle: usize,
    shape: Shape,
    stream: usize,
    per_thread: bool,
    attributes: Vec<LaunchAttribute>,
    params: *const *const c_void,
    extra: *const *mut c_void,
) -> Result {
    let (driver, context, _lent) = stream_table::ready_on(stream)?;
    if handle == 0 {
        return Err(Status::INVALID_HANDLE);
    }
    let stream = stream_table::any(context, stream, per_thread)?;
    // A named stream says in which context, if that is of the same device.
    if stream.context.device != context.device {
        return Err(Status::INVALID_HANDLE);
    }
    let context = stream.context;
    let function = library::for_launch(handle, context)?;
    if !std::ptr::eq(function.context, context) {
        return Err(Status::INVALID_HANDLE);
    }
    launch::check_all(driver, &function, &shape, &attributes)?;
    if let Some(capture) = stream.capture() {
        let mut block = Vec::new();
        // SAFETY: guaranteed by the caller.
        unsafe { launch::parameters(&function, params, extra, &mut block) }?;
        pinned::reach(driver, context, &block);
        let attributes = stream::of_captured(&stream, attributes);
        let kernel = Kernel::new(handle, function, shape, attributes, &block);
        return recording::add(&capture, &stream, Work::Kernel(Arc::new(kernel)));
    }
    let append = |block: &mut Vec<u8>| {
        // Parameters are read first: they may be in managed memory, which reading fetches to the host.
        // SAFETY: guaranteed by the caller.
        unsafe { launch::parameters(&function, params, extra, block) }?;
        pinned::reach(driver, context, block);
        let _order = managed::before_work(driver)?;
        let op = Launch {
            function: function.known_id(),
            stream: stream.id,
            grid: shape.grid,
            block: shape.block,
            dynamic_shared: shape.shared,
            attributes: attributes.clone(),
            params: block,
        };
        let seq = stream.work(&op)?;
        RECORDER.kernel(seq.in_timeline(), &function.traced, || function.name.to_string_lossy());
        context.limits.launched(function.stack());
        function.launched(&shape.block)
    };
    let appended = BLOCK.try_with(|block| match block.try_borrow_mut() {
        Ok(mut block) => append(&mut block),
        Err(_) => append(&mut Vec::new()),
    });
    appended.unwrap_or_else(|_| append(&mut Vec::new()))?;
    wait_if_blocking(driver, &stream)
}

/// Whether launches wait for what they launch: `CUDA_LAUNCH_BLOCKING` is a number that is not 0.
static IS_BLOCKING: LazyLock<bool> =
    LazyLock::new(|| std::env::var("CUDA_LAUNCH_BLOCKING").is_ok_and(|value| is_not_zero(&value)));

/// Whether a text begins with a number that is not 0, as C's `atoi` reads it.
fn is_not_zero(text: &str) -> bool {
    let digits = text.trim_start().trim_start_matches(['+', '-']);
    digits.bytes().take_while(u8::is_ascii_digit).any(|digit| digit != b'0')
}

/// Called after a launch was appended. With `CUDA_LAUNCH_BLOCKING=1`, waits for it: its error is then the
/// launch's.
#[inline]
pub(crate) fn wait_if_blocking(driver: &'static Driver, stream: &Arc<Stream>) -> Result {
    if !*IS_BLOCKING {
        return Ok(());
    }
    let result = stream.synchronize();
    shared_blocks::after_wait(driver);
    result
}

pub(crate) fn cooperative() -> Vec<LaunchAttribute> {
    let mut value = [0; 64];
    value[0] = 1;
    vec![LaunchAttribute { id: launch_attr::COOPERATIVE, value }]
}

api! {
    unsafe fn cuLaunchKernel / cuLaunchKernel_ptsz(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize,
        params: *const *const c_void, extra: *const *mut c_void
    ) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { launch(function, Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared }, stream, pt, Vec::new(), params, extra) }
    }

    unsafe fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz(
        config: In<LaunchConfig>, function: usize, params: *const *const c_void, extra: *const *mut c_void
    ) |pt| {
        config.required()?;
        let c = config.get()?;
        let shape = Shape { grid: c.grid, block: c.block, shared: c.sharedMemBytes };
        // SAFETY: the array has as many attributes as the program says.
        let (attributes, events) = unsafe { (launch::attributes(&c)?, events(&c)?) };
        if attributes.iter().any(|attribute| attribute.id == launch_attr::COOPERATIVE && attribute.value[0] != 0) {
            let (driver, context, _lent) = stream_table::ready_on(c.hStream)?;
            let device = driver.devices.get(context.device as usize).ok_or(Status::INVALID_DEVICE)?;
            crate::api::occupancy::check_cooperative(device, function, &shape.grid, &shape.block, shape.shared)?;
        }
        if events.is_empty() {
            // SAFETY: the program passes what CUDA's manual requires.
            return unsafe { launch(function, shape, c.hStream, pt, attributes, params, extra) };
        }
        let (_, context, _lent) = stream_table::ready_on(c.hStream)?;
        let stream = stream_table::any(context, c.hStream, pt)?;
        let events = events.into_iter().map(event::of).collect::<Result<Vec<_>>>()?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { launch(function, shape, c.hStream, pt, attributes, params, extra) }?;
        events.iter().try_for_each(|event| match stream.capture() {
            Some(capture) => {
                event::record_in(event, capture, &stream);
                Ok(())
            }
            None => event::record_on(event, stream.clone()),
        })
    }

    unsafe fn cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize, params: *const *const c_void
    ) |pt| {
        let (driver, context, _lent) = stream_table::ready_on(stream)?;
        let device = driver.devices.get(context.device as usize).ok_or(Status::INVALID_DEVICE)?;
        if device.attribute(attr::COOPERATIVE_LAUNCH) == 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared };
        crate::api::occupancy::check_cooperative(device, function, &shape.grid, &shape.block, shared)?;
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { launch(function, shape, stream, pt, cooperative(), params, std::ptr::null()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_block_if_the_variable_is_a_number_other_than_0() {
        assert!(["1", " 1", "2", "10", "-1", "1x"].into_iter().all(is_not_zero));
        assert!(!["", "0", "00", "x1", "true"].into_iter().any(is_not_zero));
    }
}
