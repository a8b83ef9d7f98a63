//! Checked types for the pointers that programs pass, with this library's errors. See the crate `arguments`.

use crate::abi::result::Result;
use client::Status;

pub use arguments::Count;

/// Selects this library's errors.
#[derive(Clone, Copy)]
pub enum Cuda {}

impl arguments::Library for Cuda {
    type Error = Status;
    const INVALID_VALUE: Status = Status::INVALID_VALUE;
}

/// A place for a result, or NULL.
pub type Out<'a, T> = arguments::Out<'a, T, Cuda>;
/// A value that a function reads, or NULL.
pub type In<'a, T> = arguments::In<'a, T, Cuda>;
/// A value that a function reads and overwrites, or NULL.
pub type InOut<'a, T> = arguments::InOut<'a, T, Cuda>;
/// An array that a function reads, or NULL.
pub type Array<'a, T> = arguments::Array<'a, T, Cuda>;
/// An array that a function fills with results, or NULL.
pub type OutArray<'a, T> = arguments::OutArray<'a, T, Cuda>;
/// NUL-terminated text, or NULL.
pub type Text<'a> = arguments::Text<'a, Cuda>;

/// `Err(INVALID_VALUE)` for a NULL pointer.
#[inline]
pub(crate) fn non_null<T>(pointer: *const T) -> Result {
    arguments::non_null::<Cuda>(pointer)
}

/// Writes a result through a raw pointer of known type.
///
/// # Safety
/// `to` is NULL (reported as an invalid value) or valid for writes.
#[inline]
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result {
    non_null(to)?;
    // SAFETY: not NULL, and the caller promises that it is valid for writes.
    unsafe { to.write(value) };
    Ok(())
}
