//! Which of the servers' devices the process's container has, and whether two processes are in one.
//!
//! A container started with some of the devices that `rgpuctl cdi generate` describes has a variable for
//! each: `RGPU_GPU_0`, `RGPU_GPU_1` …, or `RGPU_GPU_ALL`. CUDA and NVML show these devices and no others. The
//! variables only select: the server decides what a program may use.
//!
//! A container usually has a [PID namespace](pid_namespace) of its own as well, in which its processes have
//! other numbers than outside.

use std::os::unix::fs::MetadataExt;

/// Prefix of the variables.
const PREFIX: &str = "RGPU_GPU_";

/// The ordinals of the container's devices among `count`, in order. `None`: all of them, or there is no
/// container.
pub fn devices(count: usize) -> Option<Vec<u32>> {
    let names: Vec<String> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    chosen(names.iter().map(String::as_str), count)
}

/// The same for given names of variables.
fn chosen<'a>(variables: impl Iterator<Item = &'a str>, count: usize) -> Option<Vec<u32>> {
    let names: Vec<&str> = variables.filter_map(|name| name.strip_prefix(PREFIX)).collect();
    if names.is_empty() || names.contains(&"ALL") {
        return None;
    }
    let ordinals = names.iter().filter_map(|name| name.parse::<u32>().ok());
    let mut devices: Vec<u32> = ordinals.filter(|ordinal| (*ordinal as usize) < count).collect();
    devices.sort_unstable();
    devices.dedup();
    Some(devices)
}

/// Inode number of the calling process's PID namespace: what tells it from others of this machine. 0 if that
/// is not known.
pub fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |file| file.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_has_the_devices_that_its_variables_name() {
        let chosen = |names: &[&'static str]| chosen(["PATH"].iter().chain(names).copied(), 3);
        assert_eq!(chosen(&[]), None);
        assert_eq!(chosen(&["RGPU_GPU_2", "RGPU_GPU_0"]), Some(vec![0, 2]));
        assert_eq!(chosen(&["RGPU_GPU_2", "RGPU_GPU_ALL"]), None);
        assert_eq!(chosen(&["RGPU_GPU_1", "RGPU_GPU_7"]), Some(vec![1]));
        // A device that the server doesn't have, and nonsense.
        for name in ["RGPU_GPU_3", "RGPU_GPU_", "RGPU_GPU_-1", "RGPU_GPU_all"] {
            assert_eq!(chosen(&[name]), Some(vec![]), "{name}");
        }
    }

    #[test]
    fn a_process_knows_its_namespace() {
        assert_ne!(pid_namespace(), 0);
        assert_eq!(pid_namespace(), pid_namespace());
    }
}
