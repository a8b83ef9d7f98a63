//! Errors: numbers, names and texts, the thread's last error, and the runtime's equivalents of the driver's
//! results.
//!
//! Since CUDA 10.1 the two libraries use the same numbers, so a driver's result is passed on unless the
//! runtime does not know its number. Differences between individual calls are handled in those calls (in CUDA
//! 12, for example, a bad launch is `cudaErrorInvalidConfiguration`, not `cudaErrorInvalidValue`).
//!
//! Only the driver knows that a context has failed: every later call fails again and sets the last error
//! again, but `cudaGetLastError` clears the last error as usual.

mod names;

use std::cell::Cell;
use std::ffi::c_int;

use names::ERRORS;

/// A `cudaError_t` other than `cudaSuccess`, or any number that a caller passed as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error(pub(crate) c_int);

pub(crate) type Result<T = ()> = core::result::Result<T, Error>;

impl Error {
    /// Whether a kernel fault has left the process's contexts unusable.
    pub(crate) fn is_fault(self) -> bool {
        matches!(self.0, 700 | 702 | 710 | 714..=719 | 721)
    }

    pub(crate) const INVALID_VALUE: Error = Error(1);
    pub(crate) const INVALID_CONFIGURATION: Error = Error(9);
    pub(crate) const INVALID_PITCH: Error = Error(12);
    pub(crate) const INVALID_SYMBOL: Error = Error(13);
    pub(crate) const INVALID_CHANNEL_DESCRIPTOR: Error = Error(20);
    pub(crate) const INVALID_MEMCPY_DIRECTION: Error = Error(21);
    pub(crate) const INSUFFICIENT_DRIVER: Error = Error(35);
    pub(crate) const DEVICES_UNAVAILABLE: Error = Error(46);
    pub(crate) const MISSING_CONFIGURATION: Error = Error(52);
    pub(crate) const INVALID_DEVICE_FUNCTION: Error = Error(98);
    pub(crate) const NO_DEVICE: Error = Error(100);
    pub(crate) const INVALID_DEVICE: Error = Error(101);
    /// The driver's `CUDA_ERROR_INVALID_CONTEXT`: no context is current, or an invalid one.
    pub(crate) const DEVICE_UNINITIALIZED: Error = Error(201);
    pub(crate) const INVALID_RESOURCE_HANDLE: Error = Error(400);
    pub(crate) const SYMBOL_NOT_FOUND: Error = Error(500);
    /// The driver's `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
    pub(crate) const CONTEXT_IS_DESTROYED: Error = Error(709);
    pub(crate) const NOT_PERMITTED: Error = Error(800);
    pub(crate) const NOT_SUPPORTED: Error = Error(801);
    pub(crate) const UNKNOWN: Error = Error(999);
}

fn entry(code: c_int) -> Option<&'static (i32, &'static str, &'static str)> {
    ERRORS.binary_search_by_key(&code, |entry| entry.0).ok().map(|at| &ERRORS[at])
}

/// The runtime's equivalent of a driver's `CUresult`.
#[inline]
pub(crate) fn from_driver(result: u32) -> Result {
    if result == 0 { Ok(()) } else { Err(of_driver_failure(result)) }
}

#[cold]
fn of_driver_failure(result: u32) -> Error {
    match c_int::try_from(result) {
        Ok(code) if entry(code).is_some() => Error(code),
        _ => Error::UNKNOWN,
    }
}

thread_local! {
    static LAST: Cell<c_int> = const { Cell::new(0) };
}

/// Converts a result to the number that a program gets, and keeps an error as the thread's last one.
#[inline]
pub(crate) fn remember(result: Result) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            LAST.set(error.0);
            error.0
        }
    }
}

/// The thread's last error, which is forgotten.
pub(crate) fn take_last() -> c_int {
    LAST.replace(0)
}

/// The thread's last error.
pub(crate) fn last() -> c_int {
    LAST.get()
}

/// An error's name and text, each with a NUL at its end.
pub(crate) fn texts(code: c_int) -> Option<(&'static str, &'static str)> {
    entry(code).map(|(_, name, text)| (*name, *text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::last_error::{cudaGetLastError, cudaPeekAtLastError};

    #[test]
    fn the_error_table_is_sorted_and_nul_terminated() {
        assert!(ERRORS.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(ERRORS.iter().all(|entry| entry.1.ends_with('\0') && entry.2.ends_with('\0')));
    }

    #[test]
    fn an_unknown_driver_result_becomes_unknown_error() {
        assert_eq!(from_driver(202), Err(Error::UNKNOWN));
        assert_eq!(from_driver(u32::MAX), Err(Error::UNKNOWN));
        assert_eq!(from_driver(2), Err(Error(2)));
        assert_eq!(from_driver(0), Ok(()));
    }

    #[test]
    fn getting_the_last_error_clears_it() {
        assert_eq!(remember(Err(Error::INVALID_VALUE)), 1);
        assert_eq!(remember(Ok(())), 0);
        assert_eq!(cudaPeekAtLastError(), 1);
        assert_eq!(cudaGetLastError(), 1);
        assert_eq!(cudaGetLastError(), 0);
    }

    #[test]
    fn a_failed_context_s_error_is_cleared_and_set_again_by_the_next_call() {
        let _ = remember(Err(Error(700)));
        assert_eq!(cudaGetLastError(), 700);
        assert_eq!((cudaPeekAtLastError(), cudaGetLastError()), (0, 0));
        let _ = remember(Err(Error(700)));
        assert_eq!(cudaPeekAtLastError(), 700);
    }
}
