//! The devices' current readings from NVML, for operators.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use protocol::ops::nvml::{self, NvmlQuery, Query, status};

use super::devices::Devices;
use super::library::{Library, ask, library};

/// Size of an `nvmlProcessUtilizationSample_t` in bytes: process ID, time in µs, and four percentages.
const SAMPLE: usize = 32;
/// Maximum number of samples read per device.
const MOST: usize = 1024;
/// Older samples are ignored.
const RECENT: Duration = Duration::from_secs(3);

/// A device's readings. `None` if NVML doesn't report a value.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// The device's number on this server.
    pub device: u32,
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Percentage of time in which a kernel ran, and in which memory was accessed.
    pub utilization: Option<(u32, u32)>,
    /// Bytes of memory: free and used.
    pub memory: Option<(u64, u64)>,
    /// °C.
    pub temperature: Option<u32>,
    /// W.
    pub power: Option<f64>,
    /// MHz of multiprocessors and of memory.
    pub clocks: Option<(u32, u32)>,
    /// Recent percentage of the multiprocessors' time used by each process, by process ID.
    pub processes: BTreeMap<u32, u32>,
}

/// The devices with these numbers. A device that does not answer has no figures.
///
/// # Errors
/// NVML's status, if the library doesn't exist.
pub fn read(all: &Devices, numbers: &[u32]) -> Result<Vec<Reading>, u32> {
    let library = library()?;
    let one = |number: &u32| {
        let device = all.get(*number);
        let name = device.map(|device| device.listed.name.clone()).unwrap_or_default();
        let blank = Reading { device: *number, name, ..Reading::default() };
        match device.and_then(|device| device.handle(library)) {
            Some(handle) => read_one(library, handle, blank),
            None => blank,
        }
    };
    Ok(numbers.iter().map(one).collect())
}

fn read_one(library: &Library, handle: usize, blank: Reading) -> Reading {
    let words = |query: &Query, argument: u32| -> Option<Vec<u32>> {
        let op = NvmlQuery { device: 0, query: query.number, arguments: [argument, 0, 0], input: &[] };
        let bytes = ask(library.of_query(query)?, handle, query, &op).ok()?;
        let (words, _) = bytes.as_chunks::<4>();
        Some(words.iter().map(|word| u32::from_ne_bytes(*word)).collect())
    };
    let first = |query: &Query, argument| words(query, argument)?.first().copied();
    let memory = library.ask(handle, nvml::MEMORY).ok().and_then(|bytes| {
        let (words, _) = bytes.as_chunks::<8>();
        let [_total, free, used] = <[[u8; 8]; 3]>::try_from(words).ok()?.map(u64::from_ne_bytes);
        Some((free, used))
    });
    Reading {
        uuid: library
            .ask(handle, nvml::UUID)
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .unwrap_or_default(),
        utilization: words(nvml::UTILIZATION_RATES, 0)
            .and_then(|rates| Some((*rates.first()?, *rates.get(1)?))),
        memory,
        // Sensor 0 is the GPU's.
        temperature: first(nvml::TEMPERATURE, 0),
        power: first(nvml::POWER_USAGE, 0).map(|milliwatts| f64::from(milliwatts) / 1000.0),
        // NVML_CLOCK_SM and NVML_CLOCK_MEM.
        clocks: first(nvml::CLOCK_INFO, 1).zip(first(nvml::CLOCK_INFO, 2)),
        processes: processes(library, handle),
        ..blank
    }
}

/// Recent share of the multiprocessors' time used by each process. Empty if NVML doesn't report it (on a
/// partitioned device), or if no process used any.
fn processes(library: &Library, handle: usize) -> BTreeMap<u32, u32> {
    let Some(function) = library.find(c"nvmlDeviceGetProcessUtilization") else { return BTreeMap::new() };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = now.saturating_sub(RECENT).as_micros() as usize;
    let mut count = MOST as u32;
    let mut samples = vec![0u64; MOST * SAMPLE / 8];
    let to = [samples.as_mut_ptr() as usize, std::ptr::from_mut(&mut count) as usize];
    // SAFETY: a device's handle, room for `count` samples, the count, and a time.
    match unsafe { function(handle, to[0], to[1], since, 0, 0) } {
        status::SUCCESS => latest(&samples, count as usize),
        _ => BTreeMap::new(),
    }
}

/// Each process's latest sample among the first `count`.
fn latest(samples: &[u64], count: usize) -> BTreeMap<u32, u32> {
    let mut latest: BTreeMap<u32, (u64, u32)> = BTreeMap::new();
    for sample in samples.chunks_exact(SAMPLE / 8).take(count) {
        let [pid, at, multiprocessors, _] = *sample else { continue };
        // The process ID and the first percentage are in the lower halves.
        let (pid, percent) = (pid as u32, (multiprocessors as u32).min(100));
        let before = latest.entry(pid).or_insert((at, percent));
        if at >= before.0 {
            *before = (at, percent);
        }
    }
    latest.into_iter().filter(|(pid, _)| *pid != 0).map(|(pid, (_, percent))| (pid, percent)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_sample_of_each_process_counts() {
        let samples = [7, 100, 30, 0, 8, 100, 5, 0, 7, 200, 40 | 9 << 32, 0, 7, 150, 90, 0, 9, 1, 1, 0];
        assert_eq!(latest(&samples, 4), BTreeMap::from([(7, 40), (8, 5)]));
        assert!(latest(&samples, 0).is_empty());
        assert!(latest(&[0; 4], 1).is_empty());
    }
}
