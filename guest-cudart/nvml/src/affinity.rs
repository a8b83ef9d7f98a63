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
fn run_anywhere() -> Result {
    // More than any Linux kernel supports. The kernel leaves out those that don't exist and those that the
    // thread's control group hasn't.
    let all = [u64::MAX; 65_536 / BITS];
    // SAFETY: a set of processors is plain bits, as many as the size says; the kernel only reads them.
    let done = unsafe { libc::sched_setaffinity(0, size_of_val(&all), all.as_ptr().cast()) };
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

    // All processors are ideal, so the thread stays where the user has bound it (`taskset`, Slurm).
    fn nvmlDeviceSetCpuAffinity(device: Handle) {
        state::ordinal(state::connected()?, device)?;
        Ok(())
    }

    fn nvmlDeviceClearCpuAffinity(device: Handle) {
        state::ordinal(state::connected()?, device)?;
        run_anywhere()
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

    /// The processors that the calling thread may run on.
    fn processors() -> libc::cpu_set_t {
        // SAFETY: zero is an empty set, and the kernel writes at most its size.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &raw mut set), 0);
            set
        }
    }

    #[test]
    fn a_bound_thread_can_run_anywhere_again() {
        // In a thread of its own, as it is bound.
        let bound = std::thread::spawn(|| {
            let before = processors();
            // SAFETY: the sets are live local variables, and the numbers are within them.
            unsafe {
                let is_in = |number: &usize| libc::CPU_ISSET(*number, &before);
                let first = (0..libc::CPU_SETSIZE as usize).find(is_in).expect("a processor");
                let mut one: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(first, &mut one);
                assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &raw const one), 0);
                assert_eq!(libc::CPU_COUNT(&processors()), 1);
                run_anywhere().expect("processors");
                let after = processors();
                let lacks = |number: &usize| is_in(number) && !libc::CPU_ISSET(*number, &after);
                assert_eq!((0..libc::CPU_SETSIZE as usize).find(lacks), None);
            }
        });
        bound.join().expect("the thread");
    }
}
