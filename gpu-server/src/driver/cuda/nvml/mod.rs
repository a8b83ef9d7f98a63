//! NVML queries to NVIDIA's library on this machine (`library`), about the devices that CUDA has listed
//! (`devices`). No query needs a context.

mod devices;
pub mod health;
mod library;
pub mod processes;
pub mod readings;

use protocol::ops::nvml::{self, NvmlPair, NvmlQuery, Query, status};

use self::devices::Device;
pub use self::devices::Devices;
use self::library::{Library, ask, library};
use crate::config::Backing;
use crate::driver::cuda;
use crate::driver::nvml::answers::Answers;
use crate::driver::quota::Quota;

/// The devices of a session.
pub struct Nvidia {
    devices: Vec<Device>,
    /// Their numbers on this server.
    numbers: Vec<u32>,
    quota: Quota,
}

impl Nvidia {
    /// The devices that `backing` selects. The error is an NVML status.
    pub fn new(backing: &Backing, quota: Quota) -> Result<Nvidia, u32> {
        library()?;
        let all = cuda::listed(backing).map_err(|error| {
            tracing::warn!("NVML: CUDA does not say which devices there are: {error}");
            status::DRIVER_NOT_LOADED
        })?;
        let numbers = match &*backing.devices {
            [] => (0..all.len() as u32).collect(),
            chosen => chosen.to_vec(),
        };
        let one = |number: &u32| all.get(*number as usize).cloned().map(Device::new);
        let devices = numbers.iter().map(one).collect::<Option<_>>().ok_or(status::NOT_FOUND)?;
        Ok(Nvidia { devices, numbers, quota })
    }

    /// A device's NVML handle.
    fn handle(&self, library: &Library, ordinal: u32) -> Result<usize, u32> {
        let device = self.devices.get(ordinal as usize).ok_or(status::INVALID_ARGUMENT)?;
        device.handle(library).ok_or(status::NOT_FOUND)
    }
}

impl Answers for Nvidia {
    fn devices(&self) -> Vec<String> {
        self.devices.iter().map(|device| device.listed.name.clone()).collect()
    }

    fn versions(&self) -> [Result<String, u32>; 2] {
        [c"nvmlSystemGetDriverVersion", c"nvmlSystemGetNVMLVersion"]
            .map(|function| library().and_then(|library| library.text(function)))
    }

    fn cuda_version(&self) -> u32 {
        let version = library().and_then(|library| library.number(c"nvmlSystemGetCudaDriverVersion_v2"));
        version.unwrap_or_else(|failure| {
            tracing::warn!("nvmlSystemGetCudaDriverVersion_v2: {failure}");
            0
        })
    }

    fn number(&self, ordinal: u32) -> Result<u32, u32> {
        self.numbers.get(ordinal as usize).copied().ok_or(status::INVALID_ARGUMENT)
    }

    fn query(&self, query: &'static Query, op: &NvmlQuery<'_>) -> Result<Vec<u8>, u32> {
        let library = library()?;
        let function = library.of_query(query).ok_or(status::FUNCTION_NOT_FOUND)?;
        let mut output = ask(function, self.handle(library, op.device)?, query, op)?;
        limit_memory(query, &mut output, &self.quota, self.number(op.device)?);
        Ok(output)
    }

    fn pair(&self, op: &NvmlPair) -> Result<u32, u32> {
        let library = library()?;
        let function = library.of_pair(op.question)?;
        let (device, peer) = (self.handle(library, op.device)?, self.handle(library, op.peer)?);
        let mut value = 0u32;
        let to = std::ptr::from_mut(&mut value) as usize;
        // SAFETY: two handles of the library, for the last query a number, and a place for one integer.
        let answer = unsafe {
            if op.question == nvml::pair::P2P_STATUS {
                function(device, peer, op.argument as usize, to, 0, 0)
            } else {
                function(device, peer, to, 0, 0, 0)
            }
        };
        if answer == status::SUCCESS { Ok(value) } else { Err(answer) }
    }
}

/// Limits the figures to the device memory that the session may use.
fn limit_memory(query: &Query, output: &mut [u8], quota: &Quota, number: u32) {
    // Offsets of total, free and used, in 64-bit words.
    let places = match query {
        q if q == nvml::MEMORY => [0, 1, 2],
        q if q == nvml::MEMORY_V2 => [1, 3, 4],
        _ => return,
    };
    let (words, _) = output.as_chunks_mut::<8>();
    let [total, free, _] = places.map(|place| words.get(place).map_or(0, |word| u64::from_le_bytes(*word)));
    let visible = quota.visible(number, free, total);
    if visible == (free, total) {
        // No limit applies. The second version counts what the driver reserves neither as free nor as used.
        return;
    }
    let (free, total) = visible;
    for (place, value) in places.into_iter().zip([total, free, total.saturating_sub(free)]) {
        if let Some(word) = words.get_mut(place) {
            *word = value.to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Resource;

    #[test]
    fn a_session_sees_no_more_memory_than_its_limit() {
        let bytes = |words: [u64; 3]| words.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let before = bytes([100, 90, 10]);
        let mut output = before.clone();
        limit_memory(nvml::MEMORY, &mut output, &Quota::default(), 0);
        assert_eq!(output, before);
        let quota = Quota::of_session(40);
        limit_memory(nvml::MEMORY, &mut output, &quota, 0);
        assert_eq!(output, bytes([40, 40, 0]));
        let _charge = quota.charge(Resource::Device(0), 30).unwrap();
        let mut output = before;
        limit_memory(nvml::MEMORY, &mut output, &quota, 0);
        assert_eq!(output, bytes([40, 10, 30]));
    }

    #[test]
    fn without_a_limit_reserved_memory_is_neither_free_nor_used() {
        let words = [40 | 2 << 24, 100, 7, 90, 3];
        let before: Vec<u8> = words.iter().flat_map(|value: &u64| value.to_le_bytes()).collect();
        let mut output = before.clone();
        limit_memory(nvml::MEMORY_V2, &mut output, &Quota::default(), 0);
        assert_eq!(output, before);
    }
}
