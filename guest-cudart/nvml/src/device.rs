//! Queries of one device. Functions of several versions that write the same bytes are one query. For
//! functions with a versioned structure, the structure's first word selects the query.

use client::ops::nvml;

use crate::query::{fields, front};
use crate::state::{Handle, connected, ordinal};

// Identity and capabilities.
query! {
    text nvmlDeviceGetName() = NAME;
    text nvmlDeviceGetUUID() = UUID;
    text nvmlDeviceGetSerial() = SERIAL;
    text nvmlDeviceGetBoardPartNumber() = BOARD_PART_NUMBER;
    text nvmlDeviceGetVbiosVersion() = VBIOS_VERSION;
    text nvmlDeviceGetInforomImageVersion() = INFOROM_IMAGE_VERSION;
    text nvmlDeviceGetInforomVersion(object) = INFOROM_VERSION;
    block nvmlDeviceGetGspFirmwareVersion() = GSP_FIRMWARE_VERSION;
    block nvmlDeviceGetPciInfo_v3() = PCI_INFO;
    versioned nvmlDeviceGetPciInfoExt = [PCI_INFO_EXT];
    block nvmlDeviceGetMemoryInfo() = MEMORY;
    versioned nvmlDeviceGetMemoryInfo_v2 = [MEMORY_V2];
    block nvmlDeviceGetBAR1MemoryInfo() = BAR1_MEMORY;
    block nvmlDeviceGetBrand() = BRAND;
    block nvmlDeviceGetArchitecture() = ARCHITECTURE;
    words nvmlDeviceGetCudaComputeCapability() [major, minor] = CUDA_COMPUTE_CAPABILITY;
    block nvmlDeviceGetMinorNumber() = MINOR_NUMBER;
    block nvmlDeviceGetBoardId() = BOARD_ID;
    block nvmlDeviceGetMultiGpuBoard() = MULTI_GPU_BOARD;
    block nvmlDeviceGetModuleId() = MODULE_ID;
    block nvmlDeviceGetBusType() = BUS_TYPE;
    block nvmlDeviceGetIrqNum() = IRQ_NUM;
    block nvmlDeviceGetNumGpuCores() = NUM_GPU_CORES;
    block nvmlDeviceGetMemoryBusWidth() = MEMORY_BUS_WIDTH;
    block nvmlDeviceGetPowerSource() = POWER_SOURCE;
    block nvmlDeviceGetAttributes_v2() = ATTRIBUTES;
    block nvmlDeviceGetInforomConfigurationChecksum() = INFOROM_CONFIGURATION_CHECKSUM;
    block nvmlDeviceGetDisplayMode() = DISPLAY_MODE;
    block nvmlDeviceGetDisplayActive() = DISPLAY_ACTIVE;
    block nvmlDeviceGetPersistenceMode() = PERSISTENCE_MODE;
    block nvmlDeviceGetComputeMode() = COMPUTE_MODE;
    words nvmlDeviceGetEccMode() [current, pending] = ECC_MODE;
    block nvmlDeviceGetDefaultEccMode() = DEFAULT_ECC_MODE;
    words nvmlDeviceGetMigMode() [current_mode, pending_mode] = MIG_MODE;
    block nvmlDeviceGetMaxMigDeviceCount() = MAX_MIG_DEVICE_COUNT;
    words nvmlDeviceGetGpuOperationMode() [current, pending] = GPU_OPERATION_MODE;
    block nvmlDeviceGetVirtualizationMode() = VIRTUALIZATION_MODE;
    versioned nvmlDeviceGetAddressingMode = [ADDRESSING_MODE];
    words nvmlDeviceGetGspFirmwareMode() [is_enabled, default_mode] = GSP_FIRMWARE_MODE;
    block nvmlDeviceGetAPIRestriction(api_type) = API_RESTRICTION;
    block nvmlDeviceGetAccountingMode() = ACCOUNTING_MODE;
    block nvmlDeviceGetAccountingBufferSize() = ACCOUNTING_BUFFER_SIZE;
    block nvmlDeviceGetConfComputeProtectedMemoryUsage() = PROTECTED_MEMORY;
}

// Current state.
query! {
    block nvmlDeviceGetGpuUptime_v1() = UPTIME;
    block nvmlDeviceGetUtilizationRates() = UTILIZATION_RATES;
    words nvmlDeviceGetEncoderUtilization() [utilization, sampling_period_us] = ENCODER_UTILIZATION;
    words nvmlDeviceGetDecoderUtilization() [utilization, sampling_period_us] = DECODER_UTILIZATION;
    words nvmlDeviceGetJpgUtilization() [utilization, sampling_period_us] = JPG_UTILIZATION;
    words nvmlDeviceGetOfaUtilization() [utilization, sampling_period_us] = OFA_UTILIZATION;
    block nvmlDeviceGetTemperature(sensor_type) = TEMPERATURE;
    versioned nvmlDeviceGetTemperatureV = [TEMPERATURE_V];
    block nvmlDeviceGetTemperatureThreshold(threshold_type) = TEMPERATURE_THRESHOLD;
    versioned nvmlDeviceGetMarginTemperature = [MARGIN_TEMPERATURE];
    block nvmlDeviceGetPowerUsage() = POWER_USAGE;
    block nvmlDeviceGetPowerManagementMode() = POWER_MANAGEMENT_MODE;
    block nvmlDeviceGetPowerManagementLimit() = POWER_MANAGEMENT_LIMIT;
    words nvmlDeviceGetPowerManagementLimitConstraints() [min_limit, max_limit] = POWER_MANAGEMENT_LIMIT_CONSTRAINTS;
    block nvmlDeviceGetPowerManagementDefaultLimit() = POWER_MANAGEMENT_DEFAULT_LIMIT;
    block nvmlDeviceGetEnforcedPowerLimit() = ENFORCED_POWER_LIMIT;
    block nvmlDeviceGetTotalEnergyConsumption() = TOTAL_ENERGY_CONSUMPTION;
    block nvmlDeviceGetPerformanceState() = PERFORMANCE_STATE;
    block nvmlDeviceGetPowerState() = POWER_STATE;
    block nvmlDeviceGetCurrentClocksThrottleReasons() = CLOCKS_THROTTLE_REASONS;
    block nvmlDeviceGetCurrentClocksEventReasons() = CLOCKS_THROTTLE_REASONS;
    block nvmlDeviceGetSupportedClocksThrottleReasons() = SUPPORTED_CLOCKS_THROTTLE_REASONS;
    block nvmlDeviceGetSupportedClocksEventReasons() = SUPPORTED_CLOCKS_THROTTLE_REASONS;
    block nvmlDeviceGetClockInfo(kind) = CLOCK_INFO;
    block nvmlDeviceGetMaxClockInfo(kind) = MAX_CLOCK_INFO;
    block nvmlDeviceGetApplicationsClock(clock_type) = APPLICATIONS_CLOCK;
    block nvmlDeviceGetDefaultApplicationsClock(clock_type) = DEFAULT_APPLICATIONS_CLOCK;
    block nvmlDeviceGetClock(clock_type, clock_id) = CLOCK;
    block nvmlDeviceGetMaxCustomerBoostClock(clock_type) = MAX_CUSTOMER_BOOST_CLOCK;
    words nvmlDeviceGetAutoBoostedClocksEnabled() [is_enabled, default_is_enabled] = AUTO_BOOSTED_CLOCKS_ENABLED;
    block nvmlDeviceGetAdaptiveClockInfoStatus() = ADAPTIVE_CLOCK_INFO_STATUS;
    block nvmlDeviceGetViolationStatus(perf_policy_type) = VIOLATION_STATUS;
    list nvmlDeviceGetSupportedMemoryClocks() = SUPPORTED_MEMORY_CLOCKS;
    list nvmlDeviceGetSupportedGraphicsClocks(memory_clock_mhz) = SUPPORTED_GRAPHICS_CLOCKS;
    block nvmlDeviceGetDynamicPstatesInfo() = DYNAMIC_PSTATES_INFO;
    block nvmlDeviceGetFanSpeed() = FAN_SPEED;
    block nvmlDeviceGetFanSpeed_v2(fan) = FAN_SPEED_V2;
    block nvmlDeviceGetNumFans() = NUM_FANS;
    block nvmlDeviceGetTargetFanSpeed(fan) = TARGET_FAN_SPEED;
    words nvmlDeviceGetMinMaxFanSpeed() [min_speed, max_speed] = MIN_MAX_FAN_SPEED;
    versioned nvmlDeviceGetFanSpeedRPM = [FAN_SPEED_RPM];
}

// PCIe links.
query! {
    block nvmlDeviceGetMaxPcieLinkGeneration() = MAX_PCIE_LINK_GENERATION;
    block nvmlDeviceGetGpuMaxPcieLinkGeneration() = GPU_MAX_PCIE_LINK_GENERATION;
    block nvmlDeviceGetMaxPcieLinkWidth() = MAX_PCIE_LINK_WIDTH;
    block nvmlDeviceGetCurrPcieLinkGeneration() = CURR_PCIE_LINK_GENERATION;
    block nvmlDeviceGetCurrPcieLinkWidth() = CURR_PCIE_LINK_WIDTH;
    block nvmlDeviceGetPcieThroughput(counter) = PCIE_THROUGHPUT;
    block nvmlDeviceGetPcieReplayCounter() = PCIE_REPLAY_COUNTER;
    block nvmlDeviceGetPcieLinkMaxSpeed() = PCIE_LINK_MAX_SPEED;
    block nvmlDeviceGetPcieSpeed() = PCIE_SPEED;
}

// Errors.
query! {
    words nvmlDeviceValidateInforom() [] = VALIDATE_INFOROM;
    block nvmlDeviceGetTotalEccErrors(error_type, counter_type) = TOTAL_ECC_ERRORS;
    block nvmlDeviceGetDetailedEccErrors(error_type, counter_type) = DETAILED_ECC_ERRORS;
    block nvmlDeviceGetMemoryErrorCounter(error_type, counter_type, location_type) = MEMORY_ERROR_COUNTER;
    list nvmlDeviceGetRetiredPages(cause) = RETIRED_PAGES;
    block nvmlDeviceGetRetiredPagesPendingStatus() = RETIRED_PAGES_PENDING_STATUS;
    words nvmlDeviceGetRemappedRows() [corr_rows, unc_rows, is_pending, failure_occurred] = REMAPPED_ROWS;
    block nvmlDeviceGetRemappedRows_v2() = REMAPPED_ROWS_V2;
    block nvmlDeviceGetRowRemapperHistogram() = ROW_REMAPPER_HISTOGRAM;
    block nvmlDeviceGetUnrepairableMemoryFlag_v1() = UNREPAIRABLE_MEMORY;
    versioned nvmlDeviceGetSramEccErrorStatus = [SRAM_ECC_ERROR_STATUS];
    versioned nvmlDeviceGetRepairStatus = [REPAIR_STATUS];
}

// NVLink and the rest.
query! {
    block nvmlDeviceGetNvLinkState(link) = NVLINK_STATE;
    block nvmlDeviceGetNvLinkVersion(link) = NVLINK_VERSION;
    block nvmlDeviceGetNvLinkCapability(link, capability) = NVLINK_CAPABILITY;
    block nvmlDeviceGetNvLinkRemotePciInfo_v2(link) = NVLINK_REMOTE_PCI_INFO;
    block nvmlDeviceGetNvLinkErrorCounter(link, counter) = NVLINK_ERROR_COUNTER;
    block nvmlDeviceGetNvLinkRemoteDeviceType(link) = NVLINK_REMOTE_DEVICE_TYPE;
    block nvmlDeviceGetEncoderCapacity(encoder_query_type) = ENCODER_CAPACITY;
    words nvmlDeviceGetEncoderStats() [session_count, average_fps, average_latency] = ENCODER_STATS;
    block nvmlDeviceGetFBCStats() = FBC_STATS;
    block nvmlDeviceGetC2cModeInfoV() = C2C_MODE_INFO;
    versioned nvmlDeviceGetCapabilities = [CAPABILITIES];
    versioned nvmlDeviceGetPlatformInfo = [PLATFORM_INFO_V1, PLATFORM_INFO_V2];
    versioned nvmlDeviceGetPdi = [PDI];
    versioned nvmlDeviceGetPerformanceModes = [PERFORMANCE_MODES];
    versioned nvmlDeviceGetCurrentClockFreqs = [CURRENT_CLOCK_FREQS];
}

/// The sizes of `nvmlPciInfo_t` in bytes before it had a subsystem ID, and before it had a long bus ID.
const PCI_INFO_V1: usize = 32;
const PCI_INFO_V2: usize = 36;

nvml! {
    // The fabric connects the server's GPUs; this process cannot share memory over it.
    fn nvmlDeviceGetGpuFabricInfo(device: Handle, _info: *mut u8) {
        ordinal(connected()?, device)?;
        Err(nvml::status::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetGpuFabricInfoV(device: Handle, _info: *mut u8) {
        ordinal(connected()?, device)?;
        Err(nvml::status::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetPciInfo(device: Handle, pci: *mut u8) {
        front(device, nvml::PCI_INFO, &[], PCI_INFO_V1, pci)
    }

    fn nvmlDeviceGetPciInfo_v2(device: Handle, pci: *mut u8) {
        front(device, nvml::PCI_INFO, &[], PCI_INFO_V2, pci)
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo(device: Handle, link: u32, pci: *mut u8) {
        front(device, nvml::NVLINK_REMOTE_PCI_INFO, &[link], PCI_INFO_V2, pci)
    }

    fn nvmlDeviceGetFieldValues(device: Handle, count: i32, values: *mut u8) {
        fields(device, nvml::FIELD_VALUES, count, values)
    }
}
