//! Return codes (`nvmlReturn_t`) and their texts.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use client::counters::{self, Call};
use client::ops::nvml::status;
use client::{Status, log};

/// The result of an exported function; the error is an `nvmlReturn_t`.
pub(crate) type Result<T = ()> = std::result::Result<T, u32>;

/// NVML's return code for a failed session.
pub(crate) fn of_session(failure: Status) -> u32 {
    match failure {
        Status::NOT_SUPPORTED => status::NOT_SUPPORTED,
        Status::DEVICE_UNAVAILABLE => status::GPU_IS_LOST,
        Status::INVALID_VALUE | Status::INVALID_DEVICE => status::INVALID_ARGUMENT,
        _ => status::UNKNOWN,
    }
}

/// Returns from an exported function.
#[inline]
pub(crate) fn finish(name: &str, result: Result) -> u32 {
    match result {
        Ok(()) => status::SUCCESS,
        Err(failure) => {
            log::debug(format_args!("{name}: {}", text(failure).to_string_lossy()));
            failure
        }
    }
}

/// Returns from a function that is not supported. Callers of NVML expect that (no GPU supports all of it), so
/// it is only logged at level `info`.
#[cold]
pub(crate) fn refuse(name: &str, logged: &AtomicBool) -> u32 {
    if !logged.swap(true, Ordering::Relaxed) {
        log::info(format_args!("{name} is not supported by rgpu and returns NVML_ERROR_NOT_SUPPORTED"));
    }
    status::NOT_SUPPORTED
}

fn text(failure: u32) -> &'static CStr {
    match failure {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"The operating system has blocked the request",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"vGPU operation is not available with ECC enabled",
        23 => c"Insufficient Resources",
        24 => c"Frequency Not Supported",
        25 => c"Argument version mismatch",
        26 => c"Deprecated",
        27 => c"Not Ready",
        28 => c"GPU Not Found",
        29 => c"Invalid State",
        30 => c"Reset type not supported",
        _ => c"Unknown Error",
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(failure: u32) -> *const c_char {
    static CALL: Call = Call::new("nvmlErrorString\0");
    let mut nobody_asks = MaybeUninit::uninit();
    let _inside = counters::enter(&CALL, &mut nobody_asks, || ());
    text(failure).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_own_text() {
        let texts: std::collections::HashSet<_> = (0..=30).map(text).collect();
        assert_eq!(texts.len(), 31);
        assert_eq!(text(12345), text(status::UNKNOWN));
    }

    #[test]
    fn a_lost_session_is_a_lost_gpu() {
        assert_eq!(of_session(Status::DEVICE_UNAVAILABLE), 15);
        assert_eq!(of_session(Status::NOT_SUPPORTED), 3);
        assert_eq!(of_session(Status(700)), 999);
    }
}
