//! Processes on a device: this machine's programs that use it, as far as the calling process's PID namespace
//! knows them. The server's NVML would list the workers of all its clients, so these functions ask the server
//! for the client's programs instead.
//!
//! All are compute processes: nothing here draws, and nothing uses the server's MPS by itself. Of a process,
//! the server knows the memory that it uses, but not how busy it keeps the device.

use std::ffi::c_char;

use client::container::pid_namespace;
use client::ops::nvml::{NvmlProcess, NvmlProcesses, status};

use crate::error::{Result, of_session};
use crate::query::{non_null, put_text};
use crate::state::{self, Handle};

/// Sizes of `nvmlProcessInfo_v1_t`, `nvmlProcessInfo_v2_t` and `nvmlProcessDetail_v1_t` in words. Each begins
/// with the one before.
const INFO_V1: usize = 2;
const INFO_V2: usize = 3;
const DETAIL: usize = 4;
/// The GPU instance and compute instance of a process on a device without MIG.
const NO_INSTANCE: u64 = u64::MAX;

/// The processes on a device.
fn on(device: Handle) -> Result<Vec<NvmlProcess>> {
    let connected = state::connected()?;
    let (server, device) = connected.place(state::ordinal(connected, device)?)?;
    if !server.session.knows::<NvmlProcesses>() {
        return Ok(Vec::new());
    }
    let question = NvmlProcesses { device, namespace: pid_namespace() };
    let reply = server.session.call(&question).map_err(of_session)?;
    if reply.status == status::SUCCESS { Ok(reply.processes) } else { Err(reply.status) }
}

/// Writes a list of processes with entries of so many words. If there is too little room, the program learns
/// the number of processes.
///
/// # Safety
///
/// `count` is NULL or readable and writable; `list` is NULL or has room for `*count` entries.
unsafe fn put(processes: &[NvmlProcess], words: usize, count: *mut u32, list: *mut u8) -> Result {
    non_null(count)?;
    // SAFETY: checked for NULL; the caller makes it readable and writable.
    let room = unsafe { count.replace(processes.len() as u32) };
    if (room as usize) < processes.len() {
        return Err(status::INSUFFICIENT_SIZE);
    }
    if processes.is_empty() {
        return Ok(());
    }
    non_null(list)?;
    let size = words * size_of::<u64>();
    for (n, process) in processes.iter().enumerate() {
        // The last word is memory that is protected by confidential computing.
        let entry = [process.pid.into(), process.memory, NO_INSTANCE, 0u64];
        // SAFETY: the caller guarantees room for `room` entries of this size, and `n` is less; an entry is at
        // most as long as `entry`.
        unsafe { std::ptr::copy_nonoverlapping(entry.as_ptr().cast(), list.add(n * size), size) };
    }
    Ok(())
}

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

macro_rules! empty {
    ($($name:ident)*) => {
        nvml! { $(fn $name(device: Handle, count: *mut u32, _processes: *mut u8) { none(device, count) })* }
    };
}

empty! {
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

/// `NVML_PROCESS_MODE_COMPUTE`; the other kinds of processes are graphics and MPS.
const COMPUTE: u32 = 0;
const LAST_KIND: u32 = 2;

nvml! {
    fn nvmlDeviceGetComputeRunningProcesses(device: Handle, count: *mut u32, list: *mut u8) {
        non_null(count)?;
        put(&on(device)?, INFO_V1, count, list)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(device: Handle, count: *mut u32, list: *mut u8) {
        non_null(count)?;
        put(&on(device)?, INFO_V2, count, list)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: *mut u32, list: *mut u8) {
        non_null(count)?;
        put(&on(device)?, INFO_V2, count, list)
    }

    // Accounting is either off or concerns the server's processes.
    fn nvmlDeviceGetAccountingPids(device: Handle, count: *mut u32, _pids: *mut u32) {
        none(device, count)
    }

    // Version, process kind, count, array.
    fn nvmlDeviceGetRunningProcessDetailList(device: Handle, list: *mut u32) {
        versioned(list)?;
        let entries = list.add(4).cast::<*mut u8>().read();
        match list.add(1).read() {
            COMPUTE => put(&on(device)?, DETAIL, list.add(2), entries),
            kind if kind <= LAST_KIND => none(device, list.add(2)),
            _ => Err(status::INVALID_ARGUMENT),
        }
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
        put_name(pid, name, length)
    }
}

/// Writes the name of a process, cropped to `length` bytes with its NUL.
///
/// # Safety
/// `to` has room for `length` bytes.
unsafe fn put_name(pid: u32, to: *mut c_char, length: u32) -> Result {
    let room = length.checked_sub(1).ok_or(status::INVALID_ARGUMENT)?;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| status::NOT_FOUND)?;
    let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
    // SAFETY: as promised.
    unsafe { put_text(&program[..program.len().min(room as usize)], to, length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cropped_to_the_room_for_it() {
        let named = |length: u32| {
            let mut text = [0x55u8; 5];
            // SAFETY: room for five bytes.
            let result = unsafe { put_name(std::process::id(), text.as_mut_ptr().cast(), length) };
            (result, text)
        };
        let own = std::env::args().next().unwrap();
        let expected: Vec<u8> = own.bytes().take(4).chain([0]).collect();
        assert_eq!(named(5), (Ok(()), expected.try_into().unwrap()));
        assert_eq!(named(1), (Ok(()), [0, 0x55, 0x55, 0x55, 0x55]));
        assert_eq!(named(0), (Err(status::INVALID_ARGUMENT), [0x55; 5]));
    }

    const ALL: &[NvmlProcess] = &[NvmlProcess { pid: 7, memory: 100 }, NvmlProcess { pid: 8, memory: 200 }];

    /// What is answered with room for so many entries: the result, the count, and the words written.
    fn answered(all: &[NvmlProcess], words: usize, room: u32) -> (Result, u32, Vec<u64>) {
        let (mut count, mut list) = (room, vec![1u64; words * room as usize]);
        // SAFETY: the list has room for as many entries as the count says.
        let result = unsafe { put(all, words, &raw mut count, list.as_mut_ptr().cast()) };
        (result, count, list)
    }

    #[test]
    fn entries_of_each_version_begin_like_those_before() {
        assert_eq!(answered(ALL, INFO_V1, 2), (Ok(()), 2, vec![7, 100, 8, 200]));
        let second = vec![7, 100, NO_INSTANCE, 8, 200, NO_INSTANCE, 1, 1, 1];
        assert_eq!(answered(ALL, INFO_V2, 3), (Ok(()), 2, second));
        assert_eq!(answered(&ALL[..1], DETAIL, 1), (Ok(()), 1, vec![7, 100, NO_INSTANCE, 0]));
    }

    #[test]
    fn too_little_room_is_answered_with_the_number_of_processes() {
        assert_eq!(answered(ALL, INFO_V2, 0), (Err(status::INSUFFICIENT_SIZE), 2, vec![]));
        assert_eq!(answered(ALL, INFO_V1, 1), (Err(status::INSUFFICIENT_SIZE), 2, vec![1, 1]));
        assert_eq!(answered(&[], INFO_V2, 0), (Ok(()), 0, vec![]));
        let mut count = 2;
        // SAFETY: NULL pointers, which are allowed, and a count.
        unsafe {
            assert_eq!(
                put(ALL, INFO_V1, std::ptr::null_mut(), std::ptr::null_mut()),
                Err(status::INVALID_ARGUMENT)
            );
            assert_eq!(
                put(ALL, INFO_V1, &raw mut count, std::ptr::null_mut()),
                Err(status::INVALID_ARGUMENT)
            );
        }
    }
}
