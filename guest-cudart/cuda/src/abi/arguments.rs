//! abi::arguments

use crate::abi::result::Result;
use client::Status;

/// `Err(INVALID_VALUE)` for a NULL pointer.
#[inline]
pub(crate) fn non_null<T: ?Sized>(pointer: *const T) -> Result {
    if pointer.is_null() { Err(Status::INVALID_VALUE) } else { Ok(()) }
}

/// Writes a result through a program's pointer.
///
/// # Safety
/// `to` is NULL, which is an invalid value, or may be written.
#[inline]
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result {
    non_null(to)?;
    // SAFETY: not NULL, and the caller says that it may be written.
    unsafe { to.write(value) };
    Ok(())
}
