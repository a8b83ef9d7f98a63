//! Events, and events and memory shared between processes.

use std::ffi::{c_uint, c_void};

use crate::arguments::Out;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::types::{CUevent, CUipcEventHandle, CUipcMemHandle, CUstream};

api! {
    ctx unsafe fn cudaEventCreate(event: *mut CUevent) |d| d.cuEventCreate(event, 0);
    ctx cudaEventCreateWithFlags => cuEventCreate(event: *mut CUevent, flags: c_uint);
    ctx cudaEventRecord/cudaEventRecord_ptsz => cuEventRecord(event: CUevent, stream: CUstream);
    ctx cudaEventRecordWithFlags/cudaEventRecordWithFlags_ptsz => cuEventRecordWithFlags(
        event: CUevent, stream: CUstream, flags: c_uint);
    ctx cudaEventQuery => cuEventQuery(event: CUevent);
    ctx cudaEventSynchronize => cuEventSynchronize(event: CUevent);
    ctx cudaEventDestroy => cuEventDestroy_v2(event: CUevent);
    ctx fn cudaEventElapsedTime(milliseconds: Out<f32>, start: CUevent, end: CUevent) |d| {
        elapsed_time(d, milliseconds, start, end)
    };

    ctx cudaIpcGetEventHandle => cuIpcGetEventHandle(handle: *mut CUipcEventHandle, event: CUevent);
    ctx cudaIpcOpenEventHandle => cuIpcOpenEventHandle(event: *mut CUevent, handle: CUipcEventHandle);
    ctx cudaIpcGetMemHandle => cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: *mut c_void);
    ctx unsafe fn cudaIpcOpenMemHandle(address: *mut *mut c_void, handle: CUipcMemHandle, flags: c_uint) |d| {
        const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
        if flags != LAZY_ENABLE_PEER_ACCESS { return Err(Error::INVALID_VALUE) }
        d.cuIpcOpenMemHandle_v2(address, handle, flags)
    };
    ctx cudaIpcCloseMemHandle => cuIpcCloseMemHandle(address: *mut c_void);
}

/// `cudaEventElapsedTime`. The runtime checks the output pointer before the driver checks the events.
pub(crate) fn elapsed_time(d: &Driver, milliseconds: Out<f32>, start: CUevent, end: CUevent) -> Result {
    milliseconds.required()?;
    let mut elapsed = 0.0;
    // SAFETY: the output is a live local variable; the driver checks the events.
    unsafe { d.cuEventElapsedTime_v2(&mut elapsed, start, end)? };
    milliseconds.put(elapsed)
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::fake_driver::Fake;

    #[test]
    fn a_null_elapsed_time_is_an_invalid_value_whatever_the_events() {
        let _fake = Fake::new();
        let mut milliseconds = 0.0;
        // SAFETY: the output is NULL or a live local variable; the fake driver does not look into events.
        unsafe {
            assert_eq!(cudaEventElapsedTime(Out::NULL, ptr::null_mut(), ptr::null_mut()), 1);
            assert_eq!(
                cudaEventElapsedTime((&mut milliseconds).into(), ptr::null_mut(), ptr::null_mut()),
                400
            );
        }
    }
}
