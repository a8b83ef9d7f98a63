//! NVML's questions to a software device. It answers what it knows, its name, memory and numbers, and to the rest (temperature, power, clocks,
//! utilization) that it has no such thing.

use protocol::Status;
use protocol::ops::Answer;
use protocol::ops::nvml::{
    self, NvmlOps, NvmlPair, NvmlPairReply, NvmlQuery, NvmlQueryReply, NvmlSystem, NvmlSystemReply, NvmlText,
    Query, status,
};
use protocol::wire::Bytes;

use super::{DRIVER_VERSION, Software, properties};
use crate::driver::call::Call;

/// `nvmlPciInfo_t`.
fn pci_info([domain, bus, device]: [u32; 3]) -> Vec<u8> {
    let field = |text: String, size: usize| {
        let mut bytes = text.into_bytes();
        bytes.resize(size, 0);
        bytes
    };
    let mut info = field(format!("{:04X}:{bus:02X}:{device:02X}.0", domain & 0xffff), 16);
    // No PCI device has these ids: there is none.
    for number in [domain, bus, device, 0, 0] {
        info.extend_from_slice(&number.to_le_bytes());
    }
    info.extend(field(format!("{domain:08X}:{bus:02X}:{device:02X}.0"), 32));
    info
}

fn words<const N: usize>(values: [u32; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn longs<const N: usize>(values: [u64; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Software {
    /// The answer to one question, or its status.
    fn nvml_answer(&self, op: &NvmlQuery<'_>) -> Result<Vec<u8>, u32> {
        let Some(query) = Query::by_number(op.query) else { return Err(status::FUNCTION_NOT_FOUND) };
        let device = self.device(op.device).map_err(|_| status::INVALID_ARGUMENT)?;
        let about = properties::describe(op.device, device.gpu.properties());
        let (free, total) = self.memory_of(&device.gpu);
        let used = total.saturating_sub(free);
        // NVML_COMPUTEMODE_DEFAULT, NVML_BUS_TYPE_UNKNOWN and "no board with several GPUs" are all 0.
        Ok(match query {
            q if q == nvml::NAME => about.name.into_bytes(),
            q if q == nvml::UUID => format!("GPU-{}", nvml::uuid_text(&about.uuid)).into_bytes(),
            q if q == nvml::PCI_INFO => pci_info(about.pci),
            q if q == nvml::MEMORY => longs([total, free, used]),
            q if q == nvml::MEMORY_V2 => {
                if op.input.get(..4) != Some(&words([40 | 2 << 24])[..]) {
                    return Err(status::ARGUMENT_VERSION_MISMATCH);
                }
                [words([40 | 2 << 24, 0]), longs([total, 0, free, used])].concat()
            }
            q if q == nvml::CUDA_COMPUTE_CAPABILITY => {
                let (major, minor) = device.gpu.properties().compute_capability;
                words([major, minor])
            }
            q if q == nvml::COMPUTE_MODE || q == nvml::BUS_TYPE || q == nvml::MULTI_GPU_BOARD => words([0]),
            _ => return Err(status::NOT_SUPPORTED),
        })
    }
}

impl NvmlOps<Call> for Software {
    fn nvml_system(&mut self, _cx: &mut Call, _op: NvmlSystem) -> Result<Answer<NvmlSystemReply>, Status> {
        Ok(Answer::Now(NvmlSystemReply {
            status: status::SUCCESS,
            device_count: self.devices.len() as u32,
            driver_version: NvmlText { status: status::NOT_SUPPORTED, text: String::new() },
            nvml_version: NvmlText {
                status: status::SUCCESS,
                text: concat!("13.", env!("CARGO_PKG_VERSION")).into(),
            },
            cuda_version: DRIVER_VERSION,
        }))
    }

    fn nvml_query(&mut self, _cx: &mut Call, op: NvmlQuery<'_>) -> Result<Answer<NvmlQueryReply>, Status> {
        Ok(Answer::Now(match self.nvml_answer(&op) {
            Ok(output) => NvmlQueryReply { status: status::SUCCESS, output: Bytes(output) },
            Err(status) => NvmlQueryReply { status, output: Bytes::default() },
        }))
    }

    fn nvml_pair(&mut self, _cx: &mut Call, op: NvmlPair) -> Result<Answer<NvmlPairReply>, Status> {
        self.device(op.device)?;
        self.device(op.peer)?;
        Ok(Answer::Now(NvmlPairReply { status: status::NOT_SUPPORTED, value: 0 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_information_has_the_size_of_its_structure() {
        let info = pci_info([0xffff, 0, 3]);
        assert_eq!(info.len(), 68);
        assert!(info.starts_with(b"FFFF:00:03.0\0"));
        assert!(info[36..].starts_with(b"0000FFFF:00:03.0\0"));
    }
}
