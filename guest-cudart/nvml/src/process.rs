//! Processes on a device, as this session sees them: none (see the crate's documentation). The server's NVML
//! would list the workers of all its clients, so these functions never ask it.

use std::ffi::c_char;

use client::ops::nvml::status;

use crate::error::Result;
use crate::query::{non_null, put_text};
use crate::state::{self, Handle};

/// Returns an empty list.
///
/// # Safety
///
/// `count` is NULL or writable.
pub(crate) unsafe fn none(device: Handle, count: *mut u32) -> Result {
    non_null(count)?;
    let connected = state::connected()?;
    state::ordinal(connected, device)?;
    // SAFETY: the caller guarantees that `count` is NULL or writable.
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

/// The version words of `nvmlProcessDetailList_v1_t` and `nvmlProcessesUtilizationInfo_v1_t`, both 24 bytes
/// long.
const LIST_V1: u32 = 24 | 1 << 24;

/// Checks the version of a structure that contains a count, and returns an empty list in it.
///
/// # Safety
///
/// `structure` is NULL or points to a structure as long as its first word says.
unsafe fn versioned(structure: *mut u32) -> Result {
    non_null(structure)?;
    // SAFETY: checked for NULL, and at least one word long.
    if unsafe { structure.read() } != LIST_V1 { Err(status::ARGUMENT_VERSION_MISMATCH) } else { Ok(()) }
}

nvml! {
    // Accounting is either off or concerns the server's processes.
    fn nvmlDeviceGetAccountingPids(device: Handle, count: *mut u32, _pids: *mut u32) {
        none(device, count)
    }

    // Version, process kind, count, array.
    fn nvmlDeviceGetRunningProcessDetailList(device: Handle, list: *mut u32) {
        versioned(list)?;
        none(device, list.add(2))
    }

    // Version, count, time, array.
    fn nvmlDeviceGetProcessesUtilizationInfo(device: Handle, info: *mut u32) {
        versioned(info)?;
        none(device, info.add(1))?;
        Err(status::NOT_FOUND)
    }

    fn nvmlDeviceGetProcessUtilization(device: Handle, _samples: *mut u8, count: *mut u32, _since: u64) {
        none(device, count)?;
        // What NVML returns if there are no samples.
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
