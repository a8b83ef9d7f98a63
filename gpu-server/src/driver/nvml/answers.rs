//! What NVML queries need of NVIDIA's library, or of what takes its place.

use protocol::ops::nvml::{NvmlPair, NvmlQuery, Query};

/// The devices of one session, as NVML describes them. Errors are NVML statuses.
pub trait Answers: Send {
    /// Names of the devices, by ordinal.
    fn devices(&self) -> Vec<String>;

    /// The driver's version and NVML's.
    fn versions(&self) -> [Result<String, u32>; 2];

    /// `nvmlSystemGetCudaDriverVersion`.
    fn cuda_version(&self) -> u32;

    /// The number on the server of the device with an ordinal.
    fn number(&self, ordinal: u32) -> Result<u32, u32>;

    /// Answers a query about the device with an ordinal.
    fn query(&self, query: &'static Query, op: &NvmlQuery<'_>) -> Result<Vec<u8>, u32>;

    /// Answers a query about two devices.
    fn pair(&self, op: &NvmlPair) -> Result<u32, u32>;
}
