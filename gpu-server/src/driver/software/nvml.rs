//! NVML answers for software devices: one for each query that programs make when they start, consistent with
//! what CUDA reports. What is measured on real GPUs (power, temperature, clocks) is constant here. What such
//! a device cannot have (NVLink, counters of ECC memory, an InfoROM, fans) is "not supported".

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use protocol::ops::device::DeviceInfoReply;
use protocol::ops::nvml::{self, FIELD_SIZE, MAX_FIELDS, NvmlPair, NvmlQuery, Output, Query, pair, status};
use software_gpu::{GpuConfig, Properties};

use super::{DRIVER_VERSION, NAME, numbers, properties};
use crate::config::Backing;
use crate::driver::nvml::answers::Answers;
use crate::driver::quota::Quota;
use crate::limits::Resource;

/// The driver's version: that of the series that introduced CUDA 13.0, as `cuDriverGetVersion` reports for
/// these devices.
const DRIVER: &str = "580.00";
/// NVML's version: CUDA's major number and the driver's.
const NVML: &str = "13.580.00";
/// A device's power in milliwatts, and its limit.
const POWER: u32 = 10_000;
const MOST_POWER: u32 = 100_000;
/// Degrees Celsius: now, and where a GPU slows down.
const TEMPERATURE: u32 = 30;
const HOTTEST: u32 = 90;
/// PCI Express: generation, lanes, and Mbit/s per lane.
const PCIE_GENERATION: u32 = 4;
const PCIE_WIDTH: u32 = 16;
const PCIE_SPEED: u32 = 16_000;
/// Microseconds over which encoders' and decoders' use is sampled.
const SAMPLING_PERIOD: u32 = 100_000;
/// For things that don't exist.
const NOTHING: u64 = 0;

/// `CUdevice_attribute` numbers: the memory's clock in kHz, and its bus in bits.
const MEMORY_CLOCK: u32 = 36;
const MEMORY_BUS: u32 = 37;

/// The devices of a session.
pub struct Devices {
    devices: Vec<Device>,
    quota: Quota,
    since: Instant,
}

/// A device, as CUDA describes it.
struct Device {
    number: u32,
    properties: Properties,
    about: DeviceInfoReply,
}

impl Devices {
    /// The devices that `backing` selects. The error is an NVML status.
    pub fn new(backing: &Backing, quota: Quota) -> Result<Devices, u32> {
        let device = |number: u32| {
            if number >= backing.software_devices {
                return Err(status::NOT_FOUND);
            }
            let config = GpuConfig {
                name: NAME.into(),
                memory_bytes: backing.software_memory,
                ..GpuConfig::default()
            };
            let properties = Properties::of(&config);
            let about = properties::describe(number, &properties);
            Ok(Device { number, properties, about })
        };
        let devices = numbers(backing).into_iter().map(device).collect::<Result<_, _>>()?;
        Ok(Devices { devices, quota, since: Instant::now() })
    }

    fn device(&self, ordinal: u32) -> Result<&Device, u32> {
        self.devices.get(ordinal as usize).ok_or(status::INVALID_ARGUMENT)
    }

    /// Millijoules since the session began.
    fn energy(&self) -> u64 {
        let millijoules = self.since.elapsed().as_millis() * u128::from(POWER) / 1000;
        u64::try_from(millijoules).unwrap_or(u64::MAX)
    }
}

fn words<const N: usize>(values: [u32; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn longs<const N: usize>(values: [u64; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn padded(text: &str, size: usize) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(size, 0);
    bytes
}

/// Microseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

impl Device {
    fn attribute(&self, number: u32) -> u32 {
        let found = self.about.attributes.iter().find(|known| known.attribute == number);
        found.map_or(0, |known| known.value.max(0) as u32)
    }

    fn bus_id(&self) -> String {
        let [domain, bus, device] = self.about.pci;
        format!("{domain:08X}:{bus:02X}:{device:02X}.0")
    }

    /// `nvmlPciInfo_t`. No PCI device has these IDs.
    fn pci_info(&self) -> Vec<u8> {
        let [domain, bus, device] = self.about.pci;
        let short = format!("{:04X}:{bus:02X}:{device:02X}.0", domain & 0xffff);
        [padded(&short, 16), words([domain, bus, device, 0, 0]), padded(&self.bus_id(), 32)].concat()
    }

    /// `nvmlPciInfoExt_v1_t` after its version. The class is that of a 3D controller.
    fn pci_info_ext(&self) -> Vec<u8> {
        let [domain, bus, device] = self.about.pci;
        [words([domain, bus, device, 0, 0, 3, 2]), padded(&self.bus_id(), 32)].concat()
    }

    /// `nvmlDeviceArchitecture_t`.
    fn architecture(&self) -> u32 {
        match self.properties.compute_capability {
            (7, 0..=4) => 5,
            (7, _) => 6,
            (8, 9) => 8,
            (8, _) => 7,
            (9, _) => 9,
            (10.., _) => 10,
            _ => u32::MAX,
        }
    }

    /// A clock in MHz by `nvmlClockType_t`: graphics, SM, memory, video.
    fn clock(&self, kind: u32) -> Result<u32, u32> {
        match kind {
            0 | 1 | 3 => Ok(self.properties.clock_khz / 1000),
            2 => Ok(self.memory_clock()),
            _ => Err(status::INVALID_ARGUMENT),
        }
    }

    fn memory_clock(&self) -> u32 {
        self.attribute(MEMORY_CLOCK) / 1000
    }
}

/// A structure with a version word, followed by `rest`.
fn versioned(query: &Query, op: &NvmlQuery<'_>, rest: Vec<u8>) -> Result<Vec<u8>, u32> {
    let Output::Struct(version) = query.output else { return Err(status::UNKNOWN) };
    if op.input.len() != nvml::struct_size(version) || op.input.get(..4) != Some(&version.to_le_bytes()[..]) {
        return Err(status::ARGUMENT_VERSION_MISMATCH);
    }
    Ok([words([version]), rest].concat())
}

/// A field's value: an unsigned or signed integer, or a long.
enum Field {
    Word(u32),
    Signed(i32),
    Long(u64),
}

impl Devices {
    /// The value of one `NVML_FI_…` field.
    fn field(&self, id: u32, scope: u32) -> Option<Field> {
        Some(match id {
            // ECC_CURRENT, ECC_PENDING
            1 | 2 => Field::Word(0),
            // PERF_POLICY_POWER to PERF_POLICY_TOTAL_BASE_CLOCKS
            74..=81 => Field::Long(0),
            // MEMORY_TEMP
            82 => Field::Word(TEMPERATURE),
            // TOTAL_ENERGY_CONSUMPTION, ENERGY
            83 | 191 => Field::Long(self.energy()),
            // NVLINK_LINK_COUNT
            91 => Field::Word(0),
            // PCIE_REPLAY_COUNTER, PCIE_REPLAY_ROLLOVER_COUNTER
            94 | 95 => Field::Word(0),
            // POWER_AVERAGE, POWER_INSTANT; POWER_MIN_LIMIT to POWER_CURRENT_LIMIT, POWER_REQUESTED_LIMIT: of
            // the GPU, not of its memory or module.
            185 | 186 if scope == 0 => Field::Word(POWER),
            187..=190 | 192 if scope == 0 => Field::Word(MOST_POWER),
            // Distances from the hottest temperature: TEMPERATURE_SHUTDOWN_TLIMIT, …SLOWDOWN…, …MEM_MAX…,
            // …GPU_MAX….
            193 => Field::Signed(-5),
            194..=196 => Field::Signed(0),
            // CLOCKS_EVENT_REASON_…
            269..=271 => Field::Long(0),
            _ => return None,
        })
    }

    /// An array of `nvmlFieldValue_t`. The ID and scope are the program's.
    fn fields(&self, input: &[u8]) -> Result<Vec<u8>, u32> {
        let (values, rest) = input.as_chunks::<FIELD_SIZE>();
        if !rest.is_empty() || !(1..=MAX_FIELDS).contains(&values.len()) {
            return Err(status::INVALID_ARGUMENT);
        }
        let word = |value: &[u8; FIELD_SIZE], at: usize| {
            value[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
        };
        let answers = values.iter().map(|value| {
            let (id, scope) = (word(value, 0), word(value, 4));
            // `nvmlValueType_t`, `nvmlReturn_t`, `nvmlValue_t`
            let (kind, failure, bits) = match self.field(id, scope) {
                Some(Field::Word(number)) => (1, status::SUCCESS, u64::from(number)),
                Some(Field::Signed(number)) => (5, status::SUCCESS, u64::from(number.cast_unsigned())),
                Some(Field::Long(number)) => (3, status::SUCCESS, number),
                None => (0, status::NOT_SUPPORTED, 0),
            };
            [words([id, scope]), longs([now(), 0]), words([kind, failure]), longs([bits])].concat()
        });
        Ok(answers.flatten().collect())
    }
}

impl Answers for Devices {
    fn devices(&self) -> Vec<String> {
        self.devices.iter().map(|device| device.about.name.clone()).collect()
    }

    fn versions(&self) -> [Result<String, u32>; 2] {
        [Ok(DRIVER.into()), Ok(NVML.into())]
    }

    fn cuda_version(&self) -> u32 {
        DRIVER_VERSION
    }

    fn number(&self, ordinal: u32) -> Result<u32, u32> {
        self.device(ordinal).map(|device| device.number)
    }

    fn query(&self, query: &'static Query, op: &NvmlQuery<'_>) -> Result<Vec<u8>, u32> {
        let device = self.device(op.device)?;
        let (memory, held) = (device.about.total_memory, Resource::Device(device.number));
        let (free, total) =
            self.quota.visible(device.number, memory.saturating_sub(self.quota.held(held)), memory);
        let [first, second, _] = op.arguments;
        let choose = |values: &[u32]| values.get(first as usize).copied().ok_or(status::INVALID_ARGUMENT);
        Ok(match query {
            // Identity.
            q if q == nvml::NAME => device.about.name.clone().into_bytes(),
            q if q == nvml::UUID => format!("GPU-{}", nvml::uuid_text(&device.about.uuid)).into_bytes(),
            q if q == nvml::SERIAL => format!("1{:012}", device.number).into_bytes(),
            q if q == nvml::BOARD_PART_NUMBER => b"rgpu-software".to_vec(),
            q if q == nvml::VBIOS_VERSION => b"00.00.00.00.00".to_vec(),
            q if q == nvml::PCI_INFO => device.pci_info(),
            q if q == nvml::PCI_INFO_EXT => versioned(query, op, device.pci_info_ext())?,
            q if q == nvml::PDI => {
                versioned(query, op, [words([0]), longs([device.number.into()])].concat())?
            }
            // NVML_BRAND_UNKNOWN
            q if q == nvml::BRAND => words([0]),
            q if q == nvml::ARCHITECTURE => words([device.architecture()]),
            q if q == nvml::CUDA_COMPUTE_CAPABILITY => {
                let (major, minor) = device.properties.compute_capability;
                words([major, minor])
            }
            q if [nvml::MINOR_NUMBER, nvml::BOARD_ID, nvml::MODULE_ID].contains(&q) => words([device.number]),
            q if q == nvml::MULTI_GPU_BOARD => words([0]),
            // NVML_BUS_TYPE_PCIE
            q if q == nvml::BUS_TYPE => words([2]),
            q if q == nvml::NUM_GPU_CORES => words([device.properties.multiprocessors * 128]),
            q if q == nvml::MEMORY_BUS_WIDTH => words([device.attribute(MEMORY_BUS)]),
            // NVML_POWER_SOURCE_AC
            q if q == nvml::POWER_SOURCE => words([0]),

            // Memory.
            q if q == nvml::MEMORY => longs([total, free, total - free]),
            q if q == nvml::BAR1_MEMORY => longs([total, total, NOTHING]),
            q if q == nvml::MEMORY_V2 => {
                versioned(query, op, [words([0]), longs([total, NOTHING, free, total - free])].concat())?
            }
            q if q == nvml::PROTECTED_MEMORY => longs([NOTHING; 3]),

            // Modes: the daemon keeps the device open (persistence), everyone may use it, and features that
            // it lacks are off.
            q if q == nvml::PERSISTENCE_MODE => words([1]),
            q if [
                nvml::COMPUTE_MODE,
                nvml::DISPLAY_MODE,
                nvml::DISPLAY_ACTIVE,
                nvml::VIRTUALIZATION_MODE,
            ]
            .contains(&q) =>
            {
                words([0])
            }
            q if [nvml::DEFAULT_ECC_MODE, nvml::MAX_MIG_DEVICE_COUNT, nvml::ACCOUNTING_MODE].contains(&q) => {
                words([0])
            }
            q if [nvml::ECC_MODE, nvml::MIG_MODE, nvml::GSP_FIRMWARE_MODE].contains(&q) => words([0, 0]),
            q if q == nvml::C2C_MODE_INFO => words([0]),
            q if q == nvml::ADDRESSING_MODE || q == nvml::CAPABILITIES => versioned(query, op, words([0]))?,
            // Only administrators may set clocks: NVML_FEATURE_ENABLED.
            q if q == nvml::API_RESTRICTION => words([choose(&[1, 1])?]),

            // Activity.
            q if q == nvml::UTILIZATION_RATES => words([0, 0]),
            q if [
                nvml::ENCODER_UTILIZATION,
                nvml::DECODER_UTILIZATION,
                nvml::JPG_UTILIZATION,
                nvml::OFA_UTILIZATION,
            ]
            .contains(&q) =>
            {
                words([0, SAMPLING_PERIOD])
            }
            q if q == nvml::ENCODER_STATS || q == nvml::FBC_STATS => words([0, 0, 0]),

            // Temperature and power.
            q if q == nvml::TEMPERATURE => words([choose(&[TEMPERATURE])?]),
            q if q == nvml::TEMPERATURE_V => {
                // The program chooses a sensor, of which there is one.
                match op.input.get(4..8) {
                    Some([0, 0, 0, 0]) => versioned(query, op, words([0, TEMPERATURE]))?,
                    Some(_) => return Err(status::INVALID_ARGUMENT),
                    None => return Err(status::ARGUMENT_VERSION_MISMATCH),
                }
            }
            q if q == nvml::TEMPERATURE_THRESHOLD => match first {
                // Shutdown; slowdown, the memory's, the GPU's.
                0 => words([HOTTEST + 5]),
                1..=3 => words([HOTTEST]),
                4..=7 => return Err(status::NOT_SUPPORTED),
                _ => return Err(status::INVALID_ARGUMENT),
            },
            q if q == nvml::MARGIN_TEMPERATURE => versioned(query, op, words([HOTTEST - TEMPERATURE]))?,
            q if q == nvml::POWER_USAGE => words([POWER]),
            q if q == nvml::POWER_MANAGEMENT_MODE => words([1]),
            q if [
                nvml::POWER_MANAGEMENT_LIMIT,
                nvml::POWER_MANAGEMENT_DEFAULT_LIMIT,
                nvml::ENFORCED_POWER_LIMIT,
            ]
            .contains(&q) =>
            {
                words([MOST_POWER])
            }
            q if q == nvml::POWER_MANAGEMENT_LIMIT_CONSTRAINTS => words([MOST_POWER, MOST_POWER]),
            q if q == nvml::TOTAL_ENERGY_CONSUMPTION => longs([self.energy()]),
            q if q == nvml::PERFORMANCE_STATE || q == nvml::POWER_STATE => words([0]),

            // Clocks, which never change.
            q if [
                nvml::CLOCK_INFO,
                nvml::MAX_CLOCK_INFO,
                nvml::APPLICATIONS_CLOCK,
                nvml::DEFAULT_APPLICATIONS_CLOCK,
                nvml::MAX_CUSTOMER_BOOST_CLOCK,
            ]
            .contains(&q) =>
            {
                words([device.clock(first)?])
            }
            q if q == nvml::CLOCK && second < 4 => words([device.clock(first)?]),
            q if q == nvml::CLOCK => return Err(status::INVALID_ARGUMENT),
            q if q == nvml::SUPPORTED_MEMORY_CLOCKS => words([device.memory_clock()]),
            q if q == nvml::SUPPORTED_GRAPHICS_CLOCKS && first == device.memory_clock() => {
                words([device.clock(0)?])
            }
            q if q == nvml::SUPPORTED_GRAPHICS_CLOCKS => return Err(status::NOT_FOUND),
            q if q == nvml::ADAPTIVE_CLOCK_INFO_STATUS => words([0]),
            q if q == nvml::CLOCKS_THROTTLE_REASONS || q == nvml::SUPPORTED_CLOCKS_THROTTLE_REASONS => {
                longs([NOTHING])
            }
            q if q == nvml::VIOLATION_STATUS => longs([now(), NOTHING]),

            // The PCI Express link.
            q if [
                nvml::MAX_PCIE_LINK_GENERATION,
                nvml::GPU_MAX_PCIE_LINK_GENERATION,
                nvml::CURR_PCIE_LINK_GENERATION,
                // NVML_PCIE_LINK_MAX_SPEED_… has the same numbers as the generations.
                nvml::PCIE_LINK_MAX_SPEED,
            ]
            .contains(&q) =>
            {
                words([PCIE_GENERATION])
            }
            q if q == nvml::MAX_PCIE_LINK_WIDTH || q == nvml::CURR_PCIE_LINK_WIDTH => words([PCIE_WIDTH]),
            q if q == nvml::PCIE_SPEED => words([PCIE_SPEED]),
            q if q == nvml::PCIE_THROUGHPUT => words([choose(&[0, 0])?]),
            q if q == nvml::PCIE_REPLAY_COUNTER => words([0]),

            q if q == nvml::FIELD_VALUES => self.fields(op.input)?,
            _ => return Err(status::NOT_SUPPORTED),
        })
    }

    fn pair(&self, op: &NvmlPair) -> Result<u32, u32> {
        self.device(op.device)?;
        self.device(op.peer)?;
        let same = op.device == op.peer;
        match op.question {
            // NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SYSTEM
            pair::TOPOLOGY_COMMON_ANCESTOR => Ok(if same { 0 } else { 50 }),
            pair::ON_SAME_BOARD => Ok(same.into()),
            // NVML_P2P_STATUS_OK for reading and writing another device's memory, and
            // NVML_P2P_STATUS_NOT_SUPPORTED.
            pair::P2P_STATUS if op.argument < 5 => Ok(if op.argument < 2 && !same { 0 } else { 5 }),
            _ => Err(status::INVALID_ARGUMENT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use protocol::ops::nvml::QUERIES;

    fn devices() -> Devices {
        let line = "rgpu-server --backend software --software-memory 1G --software-devices 2 --devices 1,0";
        let backing = crate::config::Arguments::parse_from(line.split(' ')).serve.worker.backing;
        Devices::new(&backing, Quota::of_session(1 << 29)).unwrap()
    }

    fn ask(query: &'static Query, arguments: [u32; 3]) -> Result<Vec<u8>, u32> {
        let mut input = Vec::new();
        match query.output {
            Output::Struct(version) => {
                input.extend_from_slice(&version.to_le_bytes());
                input.resize(nvml::struct_size(version), 0);
            }
            Output::Fields => input = [words([82, 0]), vec![0; FIELD_SIZE - 8]].concat(),
            _ => {}
        }
        devices().query(query, &NvmlQuery { device: 0, query: query.number, arguments, input: &input })
    }

    #[test]
    fn every_answer_has_the_size_of_its_shape() {
        let mut answered = 0;
        for query in QUERIES {
            let answer = match ask(query, [0; 3]) {
                Ok(answer) => answer,
                Err(failure) => {
                    assert!(
                        [status::NOT_SUPPORTED, status::NOT_FOUND].contains(&failure),
                        "{}",
                        query.function
                    );
                    continue;
                }
            };
            answered += 1;
            let fits = match query.output {
                Output::Text => answer.len() < 96 && !answer.contains(&0),
                Output::Block(size) => answer.len() == size,
                Output::Words(count) => answer.len() == 4 * count,
                Output::List(size) => answer.len().is_multiple_of(size),
                Output::Struct(version) => answer.len() == nvml::struct_size(version),
                Output::Fields => answer.len() == FIELD_SIZE,
            };
            assert!(fits, "{} answers {} bytes", query.function, answer.len());
        }
        assert!(answered > 70, "{answered} questions are answered");
    }

    #[test]
    fn what_programs_ask_when_they_start_is_answered() {
        assert_eq!(ask(nvml::CLOCK_INFO, [2, 0, 0]), Ok(words([1000])));
        assert_eq!(ask(nvml::MAX_CLOCK_INFO, [1, 0, 0]), Ok(words([1000])));
        assert_eq!(ask(nvml::CLOCK_INFO, [9, 0, 0]), Err(status::INVALID_ARGUMENT));
        assert_eq!(ask(nvml::MEMORY_BUS_WIDTH, [0; 3]), Ok(words([64])));
        assert_eq!(ask(nvml::SUPPORTED_GRAPHICS_CLOCKS, [1000, 0, 0]), Ok(words([1000])));
        assert_eq!(ask(nvml::SUPPORTED_GRAPHICS_CLOCKS, [1, 0, 0]), Err(status::NOT_FOUND));
        assert_eq!(ask(nvml::POWER_USAGE, [0; 3]), Ok(words([POWER])));
        assert_eq!(devices().versions(), [Ok("580.00".into()), Ok("13.580.00".into())]);
        assert_eq!(devices().cuda_version(), 13000);
    }

    #[test]
    fn a_session_sees_no_more_memory_than_its_limit() {
        assert_eq!(ask(nvml::MEMORY, [0; 3]), Ok(longs([1 << 29, 1 << 29, 0])));
    }

    #[test]
    fn a_device_has_cudas_uuid_whatever_its_ordinal() {
        let uuid = ask(nvml::UUID, [0; 3]).unwrap();
        // The session's device 0 is the server's device 1.
        assert!(uuid.ends_with(b"0001"), "{}", String::from_utf8_lossy(&uuid));
        assert!(ask(nvml::PCI_INFO, [0; 3]).unwrap().starts_with(b"FFFF:00:01.0\0"));
    }

    #[test]
    fn only_the_field_that_a_device_lacks_is_refused() {
        let input =
            [words([82, 43]), vec![0; FIELD_SIZE - 8], words([12345, 0]), vec![0; FIELD_SIZE - 8]].concat();
        let answer = devices().fields(&input).unwrap();
        let word = |at: usize| u32::from_le_bytes(*answer[at..].first_chunk().unwrap());
        assert_eq!((word(0), word(4), word(24), word(28), word(32)), (82, 43, 1, 0, TEMPERATURE));
        assert_eq!((word(40), word(68)), (12345, status::NOT_SUPPORTED));
        assert_eq!(devices().fields(&input[1..]), Err(status::INVALID_ARGUMENT));
        assert_eq!(devices().fields(&[]), Err(status::INVALID_ARGUMENT));
    }

    #[test]
    fn a_structure_of_another_version_is_refused() {
        let query = |input: &[u8]| {
            let op = NvmlQuery { device: 0, query: nvml::MEMORY_V2.number, arguments: [0; 3], input };
            devices().query(nvml::MEMORY_V2, &op)
        };
        let right = [words([40 | 2 << 24]), vec![0; 36]].concat();
        assert!(query(&right).is_ok());
        for wrong in [&right[..39], &[], &[words([40 | 1 << 24]), vec![0; 36]].concat()] {
            assert_eq!(query(wrong), Err(status::ARGUMENT_VERSION_MISMATCH));
        }
    }
}
