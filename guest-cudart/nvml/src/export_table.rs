//! `nvmlInternalGetExportTable`: a private table of functions that nvidia-smi asks for by GUID, and does not start
//! without. It has no documentation. What is known of its slots is what NVIDIA's open mock of NVML (k8s-test-infra) says
//! and what watching nvidia-smi confirmed; a slot that is not known answers `NVML_ERROR_NOT_SUPPORTED`, which nvidia-smi
//! shows as N/A.
//!
//! The first word is the table's size in bytes; a function's slot is its place in the table.

use std::ffi::c_void;

use client::log;
use client::ops::nvml::status;

use crate::process::nvmlDeviceGetComputeRunningProcesses_v3;
use crate::system::nvmlDeviceGetHandleByIndex_v2;

/// The table's GUID.
const NVIDIA_SMI: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// Called around every line that nvidia-smi prints, whatever it answers: its tracing.
const TRACE: usize = 26;
/// `(unsigned int index, nvmlDevice_t *device, …)`.
const HANDLE_BY_INDEX: usize = 81;
/// `(nvmlDevice_t device, unsigned int *count, entry *list)`: compute, graphics and MPS processes with their names.
const PROCESSES: std::ops::RangeInclusive<usize> = 213..=215;

const SLOTS: usize = 512;

/// A size or an address.
type Slot = *const c_void;

struct Table([Slot; SLOTS]);

// SAFETY: sizes and addresses of functions.
unsafe impl Sync for Table {}

extern "C" fn refused<const SLOT: usize>() -> u32 {
    log::debug(format_args!("slot {SLOT} of nvidia-smi's export table is not known"));
    status::NOT_SUPPORTED
}

extern "C" fn nothing() -> u32 {
    status::SUCCESS
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
    slots[HANDLE_BY_INDEX] = nvmlDeviceGetHandleByIndex_v2 as Slot;
    let mut slot = *PROCESSES.start();
    while slot <= *PROCESSES.end() {
        // All three are empty, whatever their entries look like.
        slots[slot] = nvmlDeviceGetComputeRunningProcesses_v3 as Slot;
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
            log::warn(format_args!("nvmlInternalGetExportTable: the table {id:02x?} is not known"));
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
    fn only_the_known_table_is_given_and_it_begins_with_its_size() {
        let mut table: *const Slot = std::ptr::null();
        // SAFETY: the arguments are live local variables and constants; the table has more than one word.
        unsafe {
            assert_eq!(nvmlInternalGetExportTable(&mut table, &[0; 16]), status::NOT_FOUND);
            assert!(table.is_null());
            assert_eq!(nvmlInternalGetExportTable(&mut table, &NVIDIA_SMI), status::SUCCESS);
            assert_eq!((*table).addr(), 4096);
        }
    }
}
