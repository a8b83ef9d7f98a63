//! Processes on a device, as this session sees them: none (see the crate's documentation).

use std::ffi::c_char;

use client::ops::nvml::status;

use crate::error::Result;
use crate::shape::{non_null, put_text};
use crate::state::{self, Handle};

/// An empty list.
///
/// # Safety
/// `count` is NULL or may be written.
unsafe fn none(device: Handle, count: *mut u32) -> Result {
    non_null(count)?;
    let connected = state::connected()?;
    state::ordinal(connected, device)?;
    // SAFETY: the caller's.
    unsafe { count.write(0) };
    Ok(())
}

macro_rules! lists {
    ($($name:ident)*) => {
        nvml! { $(fn $name(device: Handle, count: *mut u32, _processes: *mut u8) { none(device, count) })* }
    };
}

lists! {
    nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3
    nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v2 nvmlDeviceGetGraphicsRunningProcesses_v3
    nvmlDeviceGetMPSComputeRunningProcesses nvmlDeviceGetMPSComputeRunningProcesses_v2
    nvmlDeviceGetMPSComputeRunningProcesses_v3
}

nvml! {
    fn nvmlDeviceGetProcessUtilization(device: Handle, _samples: *mut u8, count: *mut u32, _since: u64) {
        none(device, count)?;
        // What NVML says where there are no samples.
        Err(status::NOT_FOUND)
    }

    fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) {
        state::connected()?;
        non_null(name)?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| status::NOT_FOUND)?;
        let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
        put_text(program, name, length)
    }
}
