//! Memory that graphs allocate.

use std::ffi::c_void;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::memory::{graph_chunks, stream_ordered};
use crate::process::driver::{self, Driver, driver};
use client::Status;

/// Checks a device for functions on memory that its graphs keep.
pub(crate) fn device(device: i32) -> Result<(&'static Driver, u32)> {
    let ordinal = driver::device(device)?.ordinal;
    Ok((driver()?, ordinal))
}

api! {
    unsafe fn cuDeviceGetGraphMemAttribute(dev: i32, attribute: u32, value: *mut c_void) {
        non_null(value)?;
        let (_, device) = device(dev)?;
        // CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, …_HIGH, …_RESERVED_MEM_CURRENT, …_HIGH
        let bytes = *graph_chunks::figures(device).get(attribute as usize).ok_or(Status::INVALID_VALUE)?;
        // SAFETY: not NULL, and of the attribute's type according to CUDA's manual: 64 bits.
        unsafe { put(value.cast(), bytes) }
    }

    unsafe fn cuDeviceSetGraphMemAttribute(dev: i32, attribute: u32, value: *mut c_void) {
        non_null(value)?;
        let (_, device) = device(dev)?;
        // SAFETY: not NULL, and of the attribute's type according to CUDA's manual: 64 bits.
        let bytes = unsafe { value.cast::<u64>().read() };
        // The two high-water marks can only be reset to 0.
        if !matches!(attribute, 1 | 3) || bytes != 0 {
            return Err(Status::INVALID_VALUE);
        }
        graph_chunks::reset_high(device, attribute == 3);
        Ok(())
    }

    fn cuDeviceGraphMemTrim(dev: i32) {
        let (driver, device) = device(dev)?;
        graph_chunks::trim(driver, device);
        stream_ordered::collect(driver, driver::device(device as i32)?.server);
        Ok(())
    }
}
