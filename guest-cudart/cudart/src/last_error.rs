//! The functions for errors: the thread's last one, and names and texts.

use std::ffi::{c_char, c_int};

use crate::call_counts::{Call, Inside};
use crate::error;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> c_int {
    static CALL: Call = Call::new(c"cudaGetLastError", None);
    let inside = Inside::new(&CALL);
    inside.enter(|| ());
    let error = error::take_last();
    inside.leave(error);
    error
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> c_int {
    static CALL: Call = Call::new(c"cudaPeekAtLastError", None);
    let inside = Inside::new(&CALL);
    inside.enter(|| ());
    let error = error::last();
    inside.leave(error);
    error
}

const UNRECOGNIZED: &str = "unrecognized error code\0";

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    static CALL: Call = Call::new(c"cudaGetErrorName", None);
    let inside = Inside::new(&CALL);
    inside.enter(|| code);
    inside.leave(0);
    error::texts(code).map_or(UNRECOGNIZED, |(name, _)| name).as_ptr().cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    static CALL: Call = Call::new(c"cudaGetErrorString", None);
    let inside = Inside::new(&CALL);
    inside.enter(|| code);
    inside.leave(0);
    error::texts(code).map_or(UNRECOGNIZED, |(_, text)| text).as_ptr().cast()
}
