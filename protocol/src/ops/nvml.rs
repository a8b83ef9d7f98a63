//! NVML queries of management programs, forwarded one by one.
//!
//! NVML has many functions that read one value each, with a few different signatures. One operation serves
//! all of them, with a table of queries ([`QUERIES`]): the client exports the functions, and the server calls
//! the function of the same name in NVIDIA's library and returns the bytes that it wrote. Every answer has
//! NVML's own status, so what a device does not have is "not supported" for that query only.
//!
//! Numbers are stable and never reused. Statuses are `nvmlReturn_t`.

use crate::ops::ops;
use crate::schema::Hash;
use crate::wire::Bytes;

/// Maximum size of an answer in bytes.
pub const MAX_OUTPUT: usize = 3072;
/// Size of `nvmlFieldValue_t`, in bytes.
pub const FIELD_SIZE: usize = 40;
/// Maximum field values in one query.
pub const MAX_FIELDS: usize = 64;

/// Maximum processes in an answer.
pub const MOST_PROCESSES: usize = 256;

/// The statuses that rgpu itself returns.
pub mod status {
    /// The operation succeeded.
    pub const SUCCESS: u32 = 0;
    /// `nvmlInit` was not called.
    pub const UNINITIALIZED: u32 = 1;
    /// An argument is invalid.
    pub const INVALID_ARGUMENT: u32 = 2;
    /// Not available on this device.
    pub const NOT_SUPPORTED: u32 = 3;
    /// Nothing was found.
    pub const NOT_FOUND: u32 = 6;
    /// The caller's buffer is too small.
    pub const INSUFFICIENT_SIZE: u32 = 7;
    /// There is no driver, or it cannot be reached.
    pub const DRIVER_NOT_LOADED: u32 = 9;
    /// The library cannot be found.
    pub const LIBRARY_NOT_FOUND: u32 = 12;
    /// The library has no such function.
    pub const FUNCTION_NOT_FOUND: u32 = 13;
    /// The device can no longer be reached.
    pub const GPU_IS_LOST: u32 = 15;
    /// A structure's version is unknown.
    pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;
    /// Anything else.
    pub const UNKNOWN: u32 = 999;
}

/// The numbers of [`NvmlPair::question`].
pub mod pair {
    /// `nvmlDeviceGetTopologyCommonAncestor`.
    pub const TOPOLOGY_COMMON_ANCESTOR: u32 = 0;
    /// `nvmlDeviceOnSameBoard`.
    pub const ON_SAME_BOARD: u32 = 1;
    /// `nvmlDeviceGetP2PStatus`.
    pub const P2P_STATUS: u32 = 2;
}

/// What a function writes: its parameters after the device and the numeric arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// `(char *text, unsigned int length)`; the answer is the text, without NUL.
    Text,
    /// A pointer to this many bytes.
    Block(usize),
    /// This many pointers to `unsigned int`; the answer is the words in order.
    Words(usize),
    /// `(unsigned int *count, element *list)` with elements of this many bytes; the answer is the elements.
    List(usize),
    /// A pointer to a structure that begins with this version word, and whose fields the caller may have set.
    /// The query's input and the answer are both the whole structure, of [`struct_size`] bytes.
    Struct(u32),
    /// `(int count, nvmlFieldValue_t *values)`; input and answer are the values.
    Fields,
}

/// `NVML_STRUCT_VERSION`: the version word of a structure of `size` bytes.
const fn version(size: u32, version: u32) -> Output {
    Output::Struct(size | version << 24)
}

/// The size in bytes of a structure with this version word.
pub const fn struct_size(version: u32) -> usize {
    (version & 0xff_ffff) as usize
}

/// A query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// Its number on the wire.
    pub number: u32,
    /// NVML's function.
    pub function: &'static str,
    /// How many numeric arguments (each an `unsigned int` or an enumeration) the function takes after the
    /// device.
    pub arguments: usize,
    /// What it writes.
    pub output: Output,
    /// The minor version of the wire in which it appeared.
    pub since: u16,
}

impl Query {
    /// Adds all that peers must agree on to a fingerprint.
    pub(crate) const fn hash(&self, hash: Hash) -> Hash {
        let (kind, size) = match self.output {
            Output::Text => (0, 0),
            Output::Block(size) => (1, size),
            Output::Words(count) => (2, count),
            Output::List(size) => (3, size),
            Output::Struct(version) => (4, version as usize),
            Output::Fields => (5, 0),
        };
        hash.number(self.number as u64)
            .text(self.function)
            .number(self.arguments as u64)
            .number(kind)
            .number(size as u64)
    }

    /// The query with a number.
    pub fn by_number(number: u32) -> Option<&'static Query> {
        QUERIES.binary_search_by_key(&number, |query| query.number).ok().map(|at| &QUERIES[at])
    }
}

macro_rules! queries {
    ($($number:literal $name:ident = $function:literal $arguments:literal $output:expr $(, since $since:literal)?;)*) => {
        $(
            #[doc = concat!("`", $function, "`.")]
            pub const $name: &Query = &Query {
                number: $number,
                function: $function,
                arguments: $arguments,
                output: $output,
                since: 0 $(+ $since)?,
            };
        )*
        /// All queries, by number.
        pub const QUERIES: &[Query] = &[$(*$name),*];
    };
}

use Output::{Block, Fields, List, Text, Words};

queries! {
    1 NAME = "nvmlDeviceGetName" 0 Text;
    2 UUID = "nvmlDeviceGetUUID" 0 Text;
    3 SERIAL = "nvmlDeviceGetSerial" 0 Text;
    4 BOARD_PART_NUMBER = "nvmlDeviceGetBoardPartNumber" 0 Text;
    5 VBIOS_VERSION = "nvmlDeviceGetVbiosVersion" 0 Text;
    6 INFOROM_IMAGE_VERSION = "nvmlDeviceGetInforomImageVersion" 0 Text;
    7 INFOROM_VERSION = "nvmlDeviceGetInforomVersion" 1 Text;
    8 GSP_FIRMWARE_VERSION = "nvmlDeviceGetGspFirmwareVersion" 0 Block(64);
    9 PCI_INFO = "nvmlDeviceGetPciInfo_v3" 0 Block(68);
    10 PCI_INFO_EXT = "nvmlDeviceGetPciInfoExt" 0 version(64, 1);
    11 MEMORY = "nvmlDeviceGetMemoryInfo" 0 Block(24);
    12 MEMORY_V2 = "nvmlDeviceGetMemoryInfo_v2" 0 version(40, 2);
    13 BAR1_MEMORY = "nvmlDeviceGetBAR1MemoryInfo" 0 Block(24);
    14 BRAND = "nvmlDeviceGetBrand" 0 Block(4);
    15 ARCHITECTURE = "nvmlDeviceGetArchitecture" 0 Block(4);
    16 CUDA_COMPUTE_CAPABILITY = "nvmlDeviceGetCudaComputeCapability" 0 Words(2);
    17 MINOR_NUMBER = "nvmlDeviceGetMinorNumber" 0 Block(4);
    18 BOARD_ID = "nvmlDeviceGetBoardId" 0 Block(4);
    19 MULTI_GPU_BOARD = "nvmlDeviceGetMultiGpuBoard" 0 Block(4);
    20 MODULE_ID = "nvmlDeviceGetModuleId" 0 Block(4);
    21 BUS_TYPE = "nvmlDeviceGetBusType" 0 Block(4);
    22 IRQ_NUM = "nvmlDeviceGetIrqNum" 0 Block(4);
    23 NUM_GPU_CORES = "nvmlDeviceGetNumGpuCores" 0 Block(4);
    24 MEMORY_BUS_WIDTH = "nvmlDeviceGetMemoryBusWidth" 0 Block(4);
    25 POWER_SOURCE = "nvmlDeviceGetPowerSource" 0 Block(4);
    26 ATTRIBUTES = "nvmlDeviceGetAttributes_v2" 0 Block(40);
    27 INFOROM_CONFIGURATION_CHECKSUM = "nvmlDeviceGetInforomConfigurationChecksum" 0 Block(4);
    28 DISPLAY_MODE = "nvmlDeviceGetDisplayMode" 0 Block(4);
    29 DISPLAY_ACTIVE = "nvmlDeviceGetDisplayActive" 0 Block(4);
    30 PERSISTENCE_MODE = "nvmlDeviceGetPersistenceMode" 0 Block(4);
    31 COMPUTE_MODE = "nvmlDeviceGetComputeMode" 0 Block(4);
    32 ECC_MODE = "nvmlDeviceGetEccMode" 0 Words(2);
    33 DEFAULT_ECC_MODE = "nvmlDeviceGetDefaultEccMode" 0 Block(4);
    34 MIG_MODE = "nvmlDeviceGetMigMode" 0 Words(2);
    35 MAX_MIG_DEVICE_COUNT = "nvmlDeviceGetMaxMigDeviceCount" 0 Block(4);
    36 GPU_OPERATION_MODE = "nvmlDeviceGetGpuOperationMode" 0 Words(2);
    37 VIRTUALIZATION_MODE = "nvmlDeviceGetVirtualizationMode" 0 Block(4);
    38 ADDRESSING_MODE = "nvmlDeviceGetAddressingMode" 0 version(8, 1);
    39 GSP_FIRMWARE_MODE = "nvmlDeviceGetGspFirmwareMode" 0 Words(2);
    40 API_RESTRICTION = "nvmlDeviceGetAPIRestriction" 1 Block(4);
    41 UTILIZATION_RATES = "nvmlDeviceGetUtilizationRates" 0 Block(8);
    42 ENCODER_UTILIZATION = "nvmlDeviceGetEncoderUtilization" 0 Words(2);
    43 DECODER_UTILIZATION = "nvmlDeviceGetDecoderUtilization" 0 Words(2);
    44 JPG_UTILIZATION = "nvmlDeviceGetJpgUtilization" 0 Words(2);
    45 OFA_UTILIZATION = "nvmlDeviceGetOfaUtilization" 0 Words(2);
    46 TEMPERATURE = "nvmlDeviceGetTemperature" 1 Block(4);
    47 TEMPERATURE_V = "nvmlDeviceGetTemperatureV" 0 version(12, 1);
    48 TEMPERATURE_THRESHOLD = "nvmlDeviceGetTemperatureThreshold" 1 Block(4);
    49 MARGIN_TEMPERATURE = "nvmlDeviceGetMarginTemperature" 0 version(8, 1);
    50 POWER_USAGE = "nvmlDeviceGetPowerUsage" 0 Block(4);
    51 POWER_MANAGEMENT_MODE = "nvmlDeviceGetPowerManagementMode" 0 Block(4);
    52 POWER_MANAGEMENT_LIMIT = "nvmlDeviceGetPowerManagementLimit" 0 Block(4);
    53 POWER_MANAGEMENT_LIMIT_CONSTRAINTS = "nvmlDeviceGetPowerManagementLimitConstraints" 0 Words(2);
    54 POWER_MANAGEMENT_DEFAULT_LIMIT = "nvmlDeviceGetPowerManagementDefaultLimit" 0 Block(4);
    55 ENFORCED_POWER_LIMIT = "nvmlDeviceGetEnforcedPowerLimit" 0 Block(4);
    56 TOTAL_ENERGY_CONSUMPTION = "nvmlDeviceGetTotalEnergyConsumption" 0 Block(8);
    57 PERFORMANCE_STATE = "nvmlDeviceGetPerformanceState" 0 Block(4);
    58 POWER_STATE = "nvmlDeviceGetPowerState" 0 Block(4);
    59 CLOCKS_THROTTLE_REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons" 0 Block(8);
    60 SUPPORTED_CLOCKS_THROTTLE_REASONS = "nvmlDeviceGetSupportedClocksThrottleReasons" 0 Block(8);
    61 CLOCK_INFO = "nvmlDeviceGetClockInfo" 1 Block(4);
    62 MAX_CLOCK_INFO = "nvmlDeviceGetMaxClockInfo" 1 Block(4);
    63 APPLICATIONS_CLOCK = "nvmlDeviceGetApplicationsClock" 1 Block(4);
    64 DEFAULT_APPLICATIONS_CLOCK = "nvmlDeviceGetDefaultApplicationsClock" 1 Block(4);
    65 CLOCK = "nvmlDeviceGetClock" 2 Block(4);
    66 MAX_CUSTOMER_BOOST_CLOCK = "nvmlDeviceGetMaxCustomerBoostClock" 1 Block(4);
    67 AUTO_BOOSTED_CLOCKS_ENABLED = "nvmlDeviceGetAutoBoostedClocksEnabled" 0 Words(2);
    68 ADAPTIVE_CLOCK_INFO_STATUS = "nvmlDeviceGetAdaptiveClockInfoStatus" 0 Block(4);
    69 VIOLATION_STATUS = "nvmlDeviceGetViolationStatus" 1 Block(16);
    70 SUPPORTED_MEMORY_CLOCKS = "nvmlDeviceGetSupportedMemoryClocks" 0 List(4);
    71 SUPPORTED_GRAPHICS_CLOCKS = "nvmlDeviceGetSupportedGraphicsClocks" 1 List(4);
    72 DYNAMIC_PSTATES_INFO = "nvmlDeviceGetDynamicPstatesInfo" 0 Block(132);
    73 FAN_SPEED = "nvmlDeviceGetFanSpeed" 0 Block(4);
    74 FAN_SPEED_V2 = "nvmlDeviceGetFanSpeed_v2" 1 Block(4);
    75 NUM_FANS = "nvmlDeviceGetNumFans" 0 Block(4);
    76 TARGET_FAN_SPEED = "nvmlDeviceGetTargetFanSpeed" 1 Block(4);
    77 MIN_MAX_FAN_SPEED = "nvmlDeviceGetMinMaxFanSpeed" 0 Words(2);
    78 FAN_SPEED_RPM = "nvmlDeviceGetFanSpeedRPM" 0 version(12, 1);
    79 MAX_PCIE_LINK_GENERATION = "nvmlDeviceGetMaxPcieLinkGeneration" 0 Block(4);
    80 GPU_MAX_PCIE_LINK_GENERATION = "nvmlDeviceGetGpuMaxPcieLinkGeneration" 0 Block(4);
    81 MAX_PCIE_LINK_WIDTH = "nvmlDeviceGetMaxPcieLinkWidth" 0 Block(4);
    82 CURR_PCIE_LINK_GENERATION = "nvmlDeviceGetCurrPcieLinkGeneration" 0 Block(4);
    83 CURR_PCIE_LINK_WIDTH = "nvmlDeviceGetCurrPcieLinkWidth" 0 Block(4);
    84 PCIE_THROUGHPUT = "nvmlDeviceGetPcieThroughput" 1 Block(4);
    85 PCIE_REPLAY_COUNTER = "nvmlDeviceGetPcieReplayCounter" 0 Block(4);
    86 PCIE_LINK_MAX_SPEED = "nvmlDeviceGetPcieLinkMaxSpeed" 0 Block(4);
    87 PCIE_SPEED = "nvmlDeviceGetPcieSpeed" 0 Block(4);
    88 TOTAL_ECC_ERRORS = "nvmlDeviceGetTotalEccErrors" 2 Block(8);
    89 DETAILED_ECC_ERRORS = "nvmlDeviceGetDetailedEccErrors" 2 Block(32);
    90 MEMORY_ERROR_COUNTER = "nvmlDeviceGetMemoryErrorCounter" 3 Block(8);
    91 RETIRED_PAGES = "nvmlDeviceGetRetiredPages" 1 List(8);
    92 RETIRED_PAGES_PENDING_STATUS = "nvmlDeviceGetRetiredPagesPendingStatus" 0 Block(4);
    93 REMAPPED_ROWS = "nvmlDeviceGetRemappedRows" 0 Words(4);
    94 ROW_REMAPPER_HISTOGRAM = "nvmlDeviceGetRowRemapperHistogram" 0 Block(20);
    95 SRAM_ECC_ERROR_STATUS = "nvmlDeviceGetSramEccErrorStatus" 0 version(104, 1);
    96 REPAIR_STATUS = "nvmlDeviceGetRepairStatus" 0 version(12, 1);
    97 NVLINK_STATE = "nvmlDeviceGetNvLinkState" 1 Block(4);
    98 NVLINK_VERSION = "nvmlDeviceGetNvLinkVersion" 1 Block(4);
    99 NVLINK_CAPABILITY = "nvmlDeviceGetNvLinkCapability" 2 Block(4);
    100 NVLINK_REMOTE_PCI_INFO = "nvmlDeviceGetNvLinkRemotePciInfo_v2" 1 Block(68);
    101 NVLINK_ERROR_COUNTER = "nvmlDeviceGetNvLinkErrorCounter" 2 Block(8);
    102 NVLINK_REMOTE_DEVICE_TYPE = "nvmlDeviceGetNvLinkRemoteDeviceType" 1 Block(4);
    103 ENCODER_CAPACITY = "nvmlDeviceGetEncoderCapacity" 1 Block(4);
    104 ENCODER_STATS = "nvmlDeviceGetEncoderStats" 0 Words(3);
    105 FBC_STATS = "nvmlDeviceGetFBCStats" 0 Block(12);
    106 C2C_MODE_INFO = "nvmlDeviceGetC2cModeInfoV" 0 Block(4);
    107 CAPABILITIES = "nvmlDeviceGetCapabilities" 0 version(8, 1);
    108 PLATFORM_INFO_V1 = "nvmlDeviceGetPlatformInfo" 0 version(44, 1);
    109 PLATFORM_INFO_V2 = "nvmlDeviceGetPlatformInfo" 0 version(44, 2);
    110 PDI = "nvmlDeviceGetPdi" 0 version(16, 1);
    111 PERFORMANCE_MODES = "nvmlDeviceGetPerformanceModes" 0 version(2052, 1);
    112 CURRENT_CLOCK_FREQS = "nvmlDeviceGetCurrentClockFreqs" 0 version(2052, 1);
    113 FIELD_VALUES = "nvmlDeviceGetFieldValues" 0 Fields;
    114 VALIDATE_INFOROM = "nvmlDeviceValidateInforom" 0 Words(0);
    115 ACCOUNTING_MODE = "nvmlDeviceGetAccountingMode" 0 Block(4);
    116 ACCOUNTING_BUFFER_SIZE = "nvmlDeviceGetAccountingBufferSize" 0 Block(4);
    117 PROTECTED_MEMORY = "nvmlDeviceGetConfComputeProtectedMemoryUsage" 0 Block(24);
    118 REMAPPED_ROWS_V2 = "nvmlDeviceGetRemappedRows_v2" 0 Block(24);
    119 UNREPAIRABLE_MEMORY = "nvmlDeviceGetUnrepairableMemoryFlag_v1" 0 Block(4);
    120 UPTIME = "nvmlDeviceGetGpuUptime_v1" 0 Block(4);
}

/// A UUID as NVML writes it after `GPU-` or `MIG-`.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex).join("-")
}

crate::wire_struct! {
    /// A text, or the status that explains why there is none.
    pub struct NvmlText {
        /// `nvmlReturn_t`.
        status: u32,
        /// The text, if the status is success.
        text: String,
    }
}

crate::wire_struct! {
    /// A program that uses a device.
    pub struct NvmlProcess {
        /// Its process id, in its own namespace.
        pid: u32,
        /// Bytes of the device's memory that it uses, its context included.
        memory: u64,
    }
}

ops! {
    /// NVML.
    trait NvmlOps;

    /// Everything that is not about a device: `nvmlInit`, `nvmlSystemGet…Version`.
    sync 0x0901 nvml_system: NvmlSystem
        [order None, may_block Never, lane Main]
    {} -> NvmlSystemReply {
        /// `nvmlReturn_t` of initializing the server's NVML.
        status: u32,
        /// Devices of this session; ordinals are below it.
        device_count: u32,
        /// `nvmlSystemGetDriverVersion`.
        driver_version: NvmlText,
        /// `nvmlSystemGetNVMLVersion`.
        nvml_version: NvmlText,
        /// `nvmlSystemGetCudaDriverVersion`: 13000 for 13.0.
        cuda_version: u32,
    }

    /// A query about one device.
    sync 0x0902 nvml_query: NvmlQuery<'a>
        [order None, may_block Never, lane Main]
    {
        /// Ordinal.
        device: u32,
        /// [`Query::number`].
        query: u32,
        /// The query's arguments; unused ones are 0.
        arguments: [u32; 3],
        /// What the program passes, for [`Output::Struct`] and [`Output::Fields`]; otherwise empty.
        input: &'a [u8],
    } -> NvmlQueryReply {
        /// `nvmlReturn_t`.
        status: u32,
        /// What the function wrote, if the status is success; at most [`MAX_OUTPUT`] bytes.
        output: Bytes,
    }

    /// A query about two devices of the session.
    sync 0x0903 nvml_pair: NvmlPair
        [order None, may_block Never, lane Main]
    {
        /// Ordinal.
        device: u32,
        /// Ordinal of the other device.
        peer: u32,
        /// One of [`pair`].
        question: u32,
        /// The kind of access, for `nvmlDeviceGetP2PStatus`; otherwise 0.
        argument: u32,
    } -> NvmlPairReply {
        /// `nvmlReturn_t`.
        status: u32,
        /// The answer, if the status is success.
        value: u32,
    }

    /// The client's programs that use a device: `nvmlDeviceGetComputeRunningProcesses`. They are those of the
    /// same principal, machine and [namespace](crate::ops::device::ProcessNamespace).
    sync 0x0904 nvml_processes: NvmlProcesses
        [order None, may_block Never, lane Main, since 8]
    {
        /// Ordinal.
        device: u32,
        /// Inode number of the PID namespace of whoever asks.
        namespace: u64,
    } -> NvmlProcessesReply {
        /// `nvmlReturn_t`.
        status: u32,
        /// The programs by process id, at most [`MOST_PROCESSES`], if the status is success.
        processes: Vec<NvmlProcess>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Wire, Writer};

    #[test]
    fn questions_are_in_order_and_found_by_number() {
        assert!(QUERIES.windows(2).all(|pair| pair[0].number < pair[1].number));
        assert!(QUERIES.iter().all(|query| Query::by_number(query.number) == Some(query)));
        assert_eq!(Query::by_number(0), None);
    }

    #[test]
    fn a_uuid_is_written_in_five_groups() {
        let uuid = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];
        assert_eq!(uuid_text(&uuid), "00010203-0405-0607-0809-0a0b0c0d0eff");
    }

    #[test]
    fn every_answer_fits() {
        for query in QUERIES {
            let size = match query.output {
                Output::Text => 0,
                Output::Block(size) => size,
                Output::Words(count) => count * 4,
                Output::List(size) => size,
                Output::Struct(version) => struct_size(version),
                Output::Fields => FIELD_SIZE * MAX_FIELDS,
            };
            assert!(size <= MAX_OUTPUT && query.arguments <= 3, "{}", query.function);
        }
        let process = NvmlProcess { pid: 1, memory: 2 };
        let reply = NvmlProcessesReply { status: 0, processes: vec![process; MOST_PROCESSES] };
        let mut bytes = Vec::new();
        reply.put(&mut Writer(&mut bytes));
        assert!(bytes.len() <= crate::channel::MAX_PAYLOAD, "{} bytes", bytes.len());
    }
}
