//! Which of this machine's processors and memory are near a device. The GPU is in another machine, so all are
//! equally near. NVML's answer for a device that belongs to no part of the machine is the whole machine.

use client::ops::nvml::status;

use crate::error::Result;
use crate::query::non_null;
use crate::state::{self, Handle};

/// The scopes: `NVML_AFFINITY_SCOPE_NODE`, `NVML_AFFINITY_SCOPE_SOCKET`.
const SCOPES: std::ops::RangeInclusive<u32> = 0..=1;
/// Bits of a word of a set.
const BITS: usize = u64::BITS as usize;

/// Where the kernel lists the processors and the NUMA nodes that are online.
const PROCESSORS: &str = "/sys/devices/system/cpu/online";
const NODES: &str = "/sys/devices/system/node/online";

/// The numbers in a list as the kernel writes it: `0-3,8`. `None` if it is not one.
fn numbers(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

/// The numbers in a list of the kernel, or 0 if there is none: a kernel without NUMA has one node.
fn online(list: &str) -> Vec<usize> {
    std::fs::read_to_string(list).ok().and_then(|text| numbers(&text)).unwrap_or_else(|| vec![0])
}

/// Writes a set of numbers as a bit mask of `size` words. Numbers beyond it are left out.
///
/// # Safety
///
/// `set` is NULL or has room for `size` words.
unsafe fn put(device: Handle, list: &str, size: u32, set: *mut u64, scope: u32) -> Result {
    state::ordinal(state::connected()?, device)?;
    non_null(set)?;
    if size == 0 || !SCOPES.contains(&scope) {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: checked for NULL; the caller guarantees room for `size` words.
    let words = unsafe {
        set.write_bytes(0, size as usize);
        std::slice::from_raw_parts_mut(set, size as usize)
    };
    for number in online(list) {
        if let Some(word) = words.get_mut(number / BITS) {
            *word |= 1 << (number % BITS);
        }
    }
    Ok(())
}

/// Lets the calling thread run on all processors.
fn run_anywhere(device: Handle) -> Result {
    state::ordinal(state::connected()?, device)?;
    // The kernel leaves out processors that don't exist and those that the thread's control group hasn't.
    // SAFETY: a set of processors is plain bits; the kernel only reads it.
    let done = unsafe {
        let mut all: libc::cpu_set_t = std::mem::zeroed();
        std::ptr::from_mut(&mut all).write_bytes(0xff, 1);
        libc::sched_setaffinity(0, size_of_val(&all), &raw const all)
    };
    if done == 0 { Ok(()) } else { Err(status::UNKNOWN) }
}

nvml! {
    fn nvmlDeviceGetCpuAffinity(device: Handle, size: u32, set: *mut u64) {
        put(device, PROCESSORS, size, set, *SCOPES.start())
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(device: Handle, size: u32, set: *mut u64, scope: u32) {
        put(device, PROCESSORS, size, set, scope)
    }

    fn nvmlDeviceGetMemoryAffinity(device: Handle, size: u32, set: *mut u64, scope: u32) {
        put(device, NODES, size, set, scope)
    }

    // All processors are ideal.
    fn nvmlDeviceSetCpuAffinity(device: Handle) {
        run_anywhere(device)
    }

    fn nvmlDeviceClearCpuAffinity(device: Handle) {
        run_anywhere(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lists_are_read() {
        assert_eq!(numbers("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(numbers("7"), Some(vec![7]));
        assert_eq!(numbers(""), None);
        assert_eq!(numbers("0-x"), None);
        assert_eq!(online("/nowhere"), [0]);
        assert!(online(PROCESSORS).len() <= online("/sys/devices/system/cpu/possible").len());
    }
}
