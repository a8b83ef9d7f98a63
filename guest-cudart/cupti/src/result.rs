//! Result codes: `CUptiResult`.

use std::ffi::{CStr, c_char};

pub type CUptiResult = u32;
/// The result of this library's functions.
pub type Result<T = ()> = std::result::Result<T, CUptiResult>;

pub const INVALID_PARAMETER: CUptiResult = 1;
pub const INVALID_CONTEXT: CUptiResult = 3;
pub const INVALID_OPERATION: CUptiResult = 7;
pub const PARAMETER_SIZE_NOT_SUFFICIENT: CUptiResult = 10;
pub const MAX_LIMIT_REACHED: CUptiResult = 12;
pub const NOT_INITIALIZED: CUptiResult = 15;
pub const QUEUE_EMPTY: CUptiResult = 18;
pub const INVALID_STREAM: CUptiResult = 20;
pub const INVALID_KIND: CUptiResult = 21;
pub const NOT_SUPPORTED: CUptiResult = 27;
pub const MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: CUptiResult = 39;
pub const UNKNOWN: CUptiResult = 999;

/// The codes' names in `cupti_result.h`, from 0 on without gaps.
pub const TEXTS: [&CStr; 47] = [
    c"CUPTI_SUCCESS",
    c"CUPTI_ERROR_INVALID_PARAMETER",
    c"CUPTI_ERROR_INVALID_DEVICE",
    c"CUPTI_ERROR_INVALID_CONTEXT",
    c"CUPTI_ERROR_INVALID_EVENT_DOMAIN_ID",
    c"CUPTI_ERROR_INVALID_EVENT_ID",
    c"CUPTI_ERROR_INVALID_EVENT_NAME",
    c"CUPTI_ERROR_INVALID_OPERATION",
    c"CUPTI_ERROR_OUT_OF_MEMORY",
    c"CUPTI_ERROR_HARDWARE",
    c"CUPTI_ERROR_PARAMETER_SIZE_NOT_SUFFICIENT",
    c"CUPTI_ERROR_API_NOT_IMPLEMENTED",
    c"CUPTI_ERROR_MAX_LIMIT_REACHED",
    c"CUPTI_ERROR_NOT_READY",
    c"CUPTI_ERROR_NOT_COMPATIBLE",
    c"CUPTI_ERROR_NOT_INITIALIZED",
    c"CUPTI_ERROR_INVALID_METRIC_ID",
    c"CUPTI_ERROR_INVALID_METRIC_NAME",
    c"CUPTI_ERROR_QUEUE_EMPTY",
    c"CUPTI_ERROR_INVALID_HANDLE",
    c"CUPTI_ERROR_INVALID_STREAM",
    c"CUPTI_ERROR_INVALID_KIND",
    c"CUPTI_ERROR_INVALID_EVENT_VALUE",
    c"CUPTI_ERROR_DISABLED",
    c"CUPTI_ERROR_INVALID_MODULE",
    c"CUPTI_ERROR_INVALID_METRIC_VALUE",
    c"CUPTI_ERROR_HARDWARE_BUSY",
    c"CUPTI_ERROR_NOT_SUPPORTED",
    c"CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED",
    c"CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_ON_DEVICE",
    c"CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_ON_NON_P2P_DEVICES",
    c"CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_WITH_MPS",
    c"CUPTI_ERROR_CDP_TRACING_NOT_SUPPORTED",
    c"CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED",
    c"CUPTI_ERROR_CUDA_COMPILER_NOT_COMPATIBLE",
    c"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
    c"CUPTI_ERROR_OLD_PROFILER_API_INITIALIZED",
    c"CUPTI_ERROR_OPENACC_UNDEFINED_ROUTINE",
    c"CUPTI_ERROR_LEGACY_PROFILER_NOT_SUPPORTED",
    c"CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
    c"CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES",
    c"CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED",
    c"CUPTI_ERROR_CMP_DEVICE_NOT_SUPPORTED",
    c"CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED",
    c"CUPTI_ERROR_SLI_DEVICE_NOT_SUPPORTED",
    c"CUPTI_ERROR_WSL_DEVICE_NOT_SUPPORTED",
    c"CUPTI_ERROR_INVALID_CHIP_NAME",
];

pub fn finish(result: Result) -> CUptiResult {
    result.err().unwrap_or(0)
}

/// Writes a value for the caller.
///
/// # Safety
/// `place` is NULL, or memory for a `T`.
pub unsafe fn put<T>(place: *mut T, value: T) -> Result {
    if place.is_null() {
        return Err(INVALID_PARAMETER);
    }
    // SAFETY: not NULL, so memory for a `T`, as the caller guarantees.
    unsafe { place.write(value) };
    Ok(())
}

fn text(result: CUptiResult) -> Option<&'static CStr> {
    let found = TEXTS.get(result as usize).copied();
    found.or((result == UNKNOWN).then_some(c"CUPTI_ERROR_UNKNOWN"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetResultString(
    result: CUptiResult,
    string: *mut *const c_char,
) -> CUptiResult {
    // SAFETY: the caller gives a place for an address.
    finish(text(result).ok_or(INVALID_PARAMETER).and_then(|text| unsafe { put(string, text.as_ptr()) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetErrorMessage(
    result: CUptiResult,
    string: *mut *const c_char,
) -> CUptiResult {
    // SAFETY: the caller gives a place for an address.
    unsafe { cuptiGetResultString(result, string) }
}
