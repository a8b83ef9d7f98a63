//! Versions, the driver's entry points, profiler control, the driver's log.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::arguments::Out;
use crate::driver::{self, Driver, RUNTIME_VERSION};
use crate::error::{Error, Result};
use crate::types::CUuuid;

/// The flag of `cuGetProcAddress` that asks for the per-thread default stream's variants.
const PER_THREAD: u64 = 2;

api! {
    raw fn cudaDriverGetVersion(version: Out<c_int>) |_d| {
        version.required()?;
        version.put(driver::version()?)
    };
    raw fn cudaRuntimeGetVersion(version: Out<c_int>) |_d| version.put(RUNTIME_VERSION);
    init unsafe fn cudaGetDriverEntryPoint(symbol: *const c_char, function: *mut *mut c_void, flags: u64,
        status: *mut c_uint) |d| {
        entry_point(d, symbol, function, RUNTIME_VERSION, flags, status)
    };
    init unsafe fn cudaGetDriverEntryPoint_ptsz(symbol: *const c_char, function: *mut *mut c_void, flags: u64,
        status: *mut c_uint) |d| {
        entry_point(d, symbol, function, RUNTIME_VERSION, if flags == 0 { PER_THREAD } else { flags }, status)
    };
    init unsafe fn cudaGetDriverEntryPointByVersion(symbol: *const c_char, function: *mut *mut c_void, version: c_uint,
        flags: u64, status: *mut c_uint) |d| {
        entry_point(d, symbol, function, version.cast_signed(), flags, status)
    };
    init unsafe fn cudaGetDriverEntryPointByVersion_ptsz(symbol: *const c_char, function: *mut *mut c_void, version: c_uint,
        flags: u64, status: *mut c_uint) |d| {
        entry_point(d, symbol, function, version.cast_signed(), if flags == 0 { PER_THREAD } else { flags }, status)
    };
    init cudaGetExportTable => cuGetExportTable(table: *mut *const c_void, id: *const CUuuid);
    ctx cudaProfilerStart => cuProfilerStart();
    ctx cudaProfilerStop => cuProfilerStop();
}

/// Finds a function of the driver and stores the outcome in `status`. A function that is not found is no
/// error, even without a `status`: the pointer is then NULL.
unsafe fn entry_point(
    d: &Driver,
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_uint,
) -> Result {
    if symbol.is_null() || function.is_null() || flags > PER_THREAD {
        return Err(Error::INVALID_VALUE);
    }
    let mut found = 0;
    // SAFETY: checked for NULL above; the caller upholds the other requirements of `cudaGetDriverEntryPoint`.
    unsafe {
        let answer = d.cuGetProcAddress_v2(symbol, function, version, flags, &mut found);
        if found != 0 {
            function.write(std::ptr::null_mut());
        }
        if let Some(status) = status.as_mut() {
            *status = found;
        }
        if found != 0 { Ok(()) } else { answer }
    }
}

#[cfg(not(feature = "v12"))]
api! {
    init cudaLogsRegisterCallback => cuLogsRegisterCallback(
        callback: crate::types::CUlogsCallback, user_data: *mut c_void,
            handle: *mut crate::types::CUlogsCallbackHandle);
    init cudaLogsUnregisterCallback => cuLogsUnregisterCallback(handle: crate::types::CUlogsCallbackHandle);
    init cudaLogsCurrent => cuLogsCurrent(iterator: *mut c_uint, flags: c_uint);
    init cudaLogsDumpToFile => cuLogsDumpToFile(iterator: *mut c_uint, path: *const c_char, flags: c_uint);
    init cudaLogsDumpToMemory => cuLogsDumpToMemory(iterator: *mut c_uint, buffer: *mut c_char, size: *mut usize,
        flags: c_uint);
}
