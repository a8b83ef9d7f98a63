//! The program's device variables: their addresses, and copies to and from them.

use std::ffi::{c_uint, c_void};

use crate::arguments::Out;
use crate::copy::{self, kind};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::registry;
use crate::types::CUstream;

/// The address of `count` bytes at `offset` in a variable.
///
/// # Errors
///
/// `cudaErrorInvalidSymbol` if there is no such variable; `cudaErrorInvalidValue` for bytes outside it.
pub(crate) fn place(d: &Driver, symbol: *const c_void, count: usize, offset: usize) -> Result<*mut c_void> {
    let (address, size) = registry::variable(d, symbol)?;
    if offset.checked_add(count).is_none_or(|end| end > size) {
        return Err(Error::INVALID_VALUE);
    }
    Ok(address.wrapping_byte_add(offset))
}

/// Checks that a copy in this direction can have a variable as its target (or, with `from`, as its source).
pub(crate) fn check_direction(direction: c_uint, from: bool) -> Result {
    let host = if from { kind::DEVICE_TO_HOST } else { kind::HOST_TO_DEVICE };
    match direction {
        kind::DEVICE_TO_DEVICE | kind::DEFAULT => Ok(()),
        other if other == host => Ok(()),
        _ => Err(Error::INVALID_MEMCPY_DIRECTION),
    }
}

api! {
    ctx fn cudaGetSymbolAddress(address: Out<*mut c_void>, symbol: *const c_void) |d| {
        address.required()?;
        address.put(registry::variable(d, symbol)?.0)
    };
    ctx fn cudaGetSymbolSize(size: Out<usize>, symbol: *const c_void) |d| {
        size.required()?;
        size.put(registry::variable(d, symbol)?.1)
    };
    ctx unsafe fn cudaMemcpyToSymbol/cudaMemcpyToSymbol_ptds(symbol: *const c_void, src: *const c_void, count: usize,
        offset: usize, direction: c_uint) |d, s| {
        check_direction(direction, false)?;
        copy::copy(d, s, place(d, symbol, count, offset)?, src, count, direction)
    };
    ctx unsafe fn cudaMemcpyFromSymbol/cudaMemcpyFromSymbol_ptds(dst: *mut c_void, symbol: *const c_void, count: usize,
        offset: usize, direction: c_uint) |d, s| {
        check_direction(direction, true)?;
        copy::copy(d, s, dst, place(d, symbol, count, offset)?, count, direction)
    };
    ctx unsafe fn cudaMemcpyToSymbolAsync/cudaMemcpyToSymbolAsync_ptsz(symbol: *const c_void, src: *const c_void,
        count: usize, offset: usize,
        direction: c_uint, stream: CUstream) |d, s| {
        check_direction(direction, false)?;
        copy::copy_async(d, s, place(d, symbol, count, offset)?, src, count, direction, stream)
    };
    ctx unsafe fn cudaMemcpyFromSymbolAsync/cudaMemcpyFromSymbolAsync_ptsz(dst: *mut c_void, symbol: *const c_void,
        count: usize, offset: usize,
        direction: c_uint, stream: CUstream) |d, s| {
        check_direction(direction, true)?;
        copy::copy_async(d, s, dst, place(d, symbol, count, offset)?, count, direction, stream)
    };
}
