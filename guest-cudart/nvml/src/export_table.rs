//! `nvmlInternalGetExportTable`: a private function table that nvidia-smi requests by GUID and needs to
//! start. It is undocumented. What is known of its slots was observed with nvidia-smi and NVIDIA's library
//! 580: the arguments, the memory behind them before and after the call, and nvidia-smi's output. Unknown
//! slots return `NVML_ERROR_NOT_SUPPORTED`, which nvidia-smi shows as N/A.
//!
//! The first word is the table's size in bytes. A slot number is an index into the table.

use std::ffi::c_void;

use client::log;
use client::ops::nvml::{self, status};

use crate::device::{
    nvmlDeviceGetBoardPartNumber, nvmlDeviceGetDisplayActive, nvmlDeviceGetEnforcedPowerLimit,
    nvmlDeviceGetGpuOperationMode, nvmlDeviceGetPowerManagementDefaultLimit,
    nvmlDeviceGetPowerManagementLimitConstraints,
};
use crate::error::{Result, finish};
use crate::process::{none, nvmlDeviceGetGraphicsRunningProcesses_v3};
use crate::query::{block, front, non_null};
use crate::state::{self, Handle};

/// The table's GUID.
const NVIDIA_SMI: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// Called around every line that nvidia-smi prints, for tracing; the result does not matter.
const TRACE: usize = 26;
/// `(nvmlDevice_t device, unsigned int *supported)`: whether `dmon` and `pmon` can monitor the device.
const CAN_BE_WATCHED: usize = 72;
/// `(unsigned int index, char *address)`: the device's PCI address as text of at most 16 bytes.
const ADDRESS_BY_INDEX: usize = 81;
/// `(nvmlDevice_t device, nvmlViolationTime_t *time)`: how long the clocks were throttled because of
/// temperature.
const THERMAL_VIOLATION: usize = 138;
/// `(nvmlDevice_t device, unsigned long long since, unsigned int *processes, unsigned int *samples, sample
/// *list)`: each process's share of the device. A sample has 488 bytes.
const PROCESS_SAMPLES: usize = 145;
/// `(nvmlDevice_t device, unsigned int *count, entry *list)`: compute, graphics and MPS processes with names.
const PROCESSES: std::ops::RangeInclusive<usize> = 213..=215;

/// Functions that NVML also exports by name.
const PUBLIC: &[(usize, Slot)] = &[
    (29, nvmlDeviceGetGpuOperationMode as Slot),
    (31, nvmlDeviceGetDisplayActive as Slot),
    (46, nvmlDeviceGetPowerManagementLimitConstraints as Slot),
    (47, nvmlDeviceGetPowerManagementDefaultLimit as Slot),
    (108, nvmlDeviceGetEnforcedPowerLimit as Slot),
    (149, nvmlDeviceGetBoardPartNumber as Slot),
];

/// `NVML_PERF_POLICY_THERMAL`.
const THERMAL: u32 = 1;
/// Size in bytes of the short address in `nvmlPciInfo_t`.
const SHORT_ADDRESS: usize = 16;

const SLOTS: usize = 512;

/// The table's size or a function's address.
type Slot = *const c_void;

struct Table([Slot; SLOTS]);

// SAFETY: the pointers are only sizes and addresses of functions.
unsafe impl Sync for Table {}

extern "C" fn refused<const SLOT: usize>() -> u32 {
    log::debug(format_args!("slot {SLOT} of nvidia-smi's export table is unknown"));
    status::NOT_SUPPORTED
}

extern "C" fn nothing() -> u32 {
    status::SUCCESS
}

/// Returns from a function of the table, which has no name elsewhere.
fn end(slot: usize, result: Result) -> u32 {
    finish(&format!("slot {slot} of nvidia-smi's export table"), result)
}

unsafe extern "C" fn can_be_watched(device: Handle, supported: *mut u32) -> u32 {
    let answer = || {
        state::ordinal(state::connected()?, device)?;
        non_null(supported)?;
        // SAFETY: checked for NULL; nvidia-smi passes room for one word.
        unsafe { supported.write(1) };
        Ok(())
    };
    end(CAN_BE_WATCHED, answer())
}

unsafe extern "C" fn address_by_index(index: u32, address: *mut u8) -> u32 {
    let answer = || {
        let device = state::handle(state::connected()?, index)?;
        let mut text = [0; SHORT_ADDRESS];
        // SAFETY: nvidia-smi passes room for an address, which is at least this long.
        unsafe { front(device, nvml::PCI_INFO, &[], SHORT_ADDRESS, text.as_mut_ptr())? };
        non_null(address)?;
        // NVIDIA's library writes the text and its NUL, and nothing after it.
        let length = text.iter().position(|byte| *byte == 0).map_or(SHORT_ADDRESS, |end| end + 1);
        // SAFETY: checked for NULL; nvidia-smi passes room for an address.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), address, length) };
        Ok(())
    };
    end(ADDRESS_BY_INDEX, answer())
}

unsafe extern "C" fn thermal_violation(device: Handle, time: *mut u8) -> u32 {
    // SAFETY: nvidia-smi passes room for the structure, or NULL.
    end(THERMAL_VIOLATION, unsafe { block(device, nvml::VIOLATION_STATUS, &[THERMAL], time) })
}

unsafe extern "C" fn process_samples(
    device: Handle,
    _since: u64,
    processes: *mut u32,
    samples: *mut u32,
    _list: *mut u8,
) -> u32 {
    // SAFETY: nvidia-smi passes room for one word each, or NULL.
    end(PROCESS_SAMPLES, unsafe { none(device, processes).and_then(|()| none(device, samples)) })
}

macro_rules! rows {
    ($($row:literal)*) => {
        [$(
            refused::<{ $row * 16 }> as Slot, refused::<{ $row * 16 + 1 }> as Slot,
            refused::<{ $row * 16 + 2 }> as Slot, refused::<{ $row * 16 + 3 }> as Slot,
            refused::<{ $row * 16 + 4 }> as Slot, refused::<{ $row * 16 + 5 }> as Slot,
            refused::<{ $row * 16 + 6 }> as Slot, refused::<{ $row * 16 + 7 }> as Slot,
            refused::<{ $row * 16 + 8 }> as Slot, refused::<{ $row * 16 + 9 }> as Slot,
            refused::<{ $row * 16 + 10 }> as Slot, refused::<{ $row * 16 + 11 }> as Slot,
            refused::<{ $row * 16 + 12 }> as Slot, refused::<{ $row * 16 + 13 }> as Slot,
            refused::<{ $row * 16 + 14 }> as Slot, refused::<{ $row * 16 + 15 }> as Slot,
        )*]
    };
}

static TABLE: Table = {
    let mut slots =
        rows! { 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 };
    slots[0] = std::ptr::without_provenance(SLOTS * size_of::<Slot>());
    slots[TRACE] = nothing as Slot;
    slots[CAN_BE_WATCHED] = can_be_watched as Slot;
    slots[ADDRESS_BY_INDEX] = address_by_index as Slot;
    slots[THERMAL_VIOLATION] = thermal_violation as Slot;
    slots[PROCESS_SAMPLES] = process_samples as Slot;
    let mut next = 0;
    while next < PUBLIC.len() {
        slots[PUBLIC[next].0] = PUBLIC[next].1;
        next += 1;
    }
    let mut slot = *PROCESSES.start();
    while slot <= *PROCESSES.end() {
        // The format of their entries is not known, so all three lists are empty.
        slots[slot] = nvmlDeviceGetGraphicsRunningProcesses_v3 as Slot;
        slot += 1;
    }
    Table(slots)
};

nvml! {
    fn nvmlInternalGetExportTable(table: *mut *const Slot, id: *const [u8; 16]) {
        if table.is_null() || id.is_null() {
            return Err(status::INVALID_ARGUMENT);
        }
        let id = id.read_unaligned();
        if id != NVIDIA_SMI {
            log::warn(format_args!("nvmlInternalGetExportTable: unknown table {id:02x?}"));
            return Err(status::NOT_FOUND);
        }
        table.write(TABLE.0.as_ptr());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nvidia_smi_s_table_exists_and_begins_with_its_size() {
        let mut table: *const Slot = std::ptr::null();
        // SAFETY: the arguments are live local variables and constants; the table has more than one word.
        unsafe {
            assert_eq!(nvmlInternalGetExportTable(&mut table, &[0; 16]), status::NOT_FOUND);
            assert!(table.is_null());
            assert_eq!(nvmlInternalGetExportTable(&mut table, &NVIDIA_SMI), status::SUCCESS);
            assert_eq!((*table).addr(), 4096);
        }
    }

    #[test]
    fn known_slots_need_initialization_and_unknown_ones_are_not_supported() {
        let (mut word, mut text, mut time) = (7, [7; SHORT_ADDRESS], [7; 16]);
        // SAFETY: each argument is a live local variable of the size that the function writes.
        let answers = unsafe {
            [
                can_be_watched(std::ptr::null(), &mut word),
                address_by_index(0, text.as_mut_ptr()),
                thermal_violation(std::ptr::null(), time.as_mut_ptr()),
                process_samples(std::ptr::null(), 0, &mut word, &mut word, std::ptr::null_mut()),
            ]
        };
        assert_eq!(answers, [status::UNINITIALIZED; 4]);
        assert_eq!((word, text, time), (7, [7; SHORT_ADDRESS], [7; 16]));
        assert_eq!(refused::<231>(), status::NOT_SUPPORTED);
    }
}
