//! Device memory used by processes, according to NVML.

use protocol::ops::nvml::status;

use super::devices::Devices;
use super::library::library;

/// Size of an `nvmlProcessInfo_t` in bytes: process ID, used bytes, and two numbers about MIG.
const ENTRY: usize = 24;
/// Maximum number of processes read per device.
const MOST: usize = 4096;
/// `NVML_VALUE_NOT_AVAILABLE`.
const UNKNOWN: u64 = u64::MAX;

/// A process's memory use on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// The process.
    pub pid: u32,
    /// The device's number on this server.
    pub device: u32,
    /// Bytes of its memory, if NVML knows them.
    pub bytes: Option<u64>,
}

/// What NVML answers for a device: the memory use of each process with a context on it, or its status, if
/// the library doesn't exist or doesn't report it.
pub type Answer = Result<Vec<Use>, u32>;

/// The answers for the devices with these numbers, in their order.
pub fn uses(all: &Devices, numbers: &[u32]) -> Vec<Answer> {
    let begin = || {
        let library = library()?;
        let function = library.find(c"nvmlDeviceGetComputeRunningProcesses_v3");
        Ok((library, function.ok_or(status::FUNCTION_NOT_FOUND)?))
    };
    let (library, function) = match begin() {
        Ok(found) => found,
        Err(failure) => return vec![Err(failure); numbers.len()],
    };
    let of = |device: &u32| {
        let handle = all.get(*device).and_then(|device| device.handle(library));
        let handle = handle.ok_or(status::NOT_FOUND)?;
        let mut count = MOST as u32;
        let mut entries = vec![0u64; MOST * ENTRY / 8];
        let to = [std::ptr::from_mut(&mut count) as usize, entries.as_mut_ptr() as usize];
        // SAFETY: a device's handle, a count, and room for as many entries as the count says.
        match unsafe { function(handle, to[0], to[1], 0, 0, 0) } {
            status::SUCCESS => Ok(read(&entries, count as usize, *device)),
            failure => Err(failure),
        }
    };
    numbers.iter().map(of).collect()
}

/// Reads the first `count` entries.
fn read(entries: &[u64], count: usize, device: u32) -> Vec<Use> {
    let one = |entry: &[u64]| match *entry {
        [pid, bytes, ..] => {
            Some(Use { pid: pid as u32, device, bytes: Some(bytes).filter(|bytes| *bytes != UNKNOWN) })
        }
        _ => None,
    };
    entries.chunks_exact(ENTRY / 8).take(count).filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_up_to_the_count_and_figures_may_be_unknown() {
        let entries = [7, 100, 0, 8 | 1 << 40, UNKNOWN, 0, 9, 300, 0, 10, 400, 0];
        let one = |pid, bytes| Use { pid, device: 2, bytes };
        let expected = [one(7, Some(100)), one(8, None), one(9, Some(300))];
        assert_eq!(read(&entries, 3, 2), expected);
        assert_eq!(read(&entries, 0, 2), []);
    }
}
