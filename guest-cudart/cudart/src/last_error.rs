//! The functions for errors: the thread's last one, and names and texts.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;

use crate::call_counts::{self, Call};
use crate::error;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> c_int {
    static CALL: Call = Call::new(c"cudaGetLastError", None);
    let mut arguments = MaybeUninit::uninit();
    let _inside = call_counts::enter(&CALL, &mut arguments, || ());
    error::take_last()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> c_int {
    static CALL: Call = Call::new(c"cudaPeekAtLastError", None);
    let mut arguments = MaybeUninit::uninit();
    let _inside = call_counts::enter(&CALL, &mut arguments, || ());
    error::last()
}

const UNRECOGNIZED: &str = "unrecognized error code\0";

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    static CALL: Call = Call::new(c"cudaGetErrorName", None);
    let mut arguments = MaybeUninit::uninit();
    let _inside = call_counts::enter(&CALL, &mut arguments, || code);
    error::texts(code).map_or(UNRECOGNIZED, |(name, _)| name).as_ptr().cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    static CALL: Call = Call::new(c"cudaGetErrorString", None);
    let mut arguments = MaybeUninit::uninit();
    let _inside = call_counts::enter(&CALL, &mut arguments, || code);
    error::texts(code).map_or(UNRECOGNIZED, |(_, text)| text).as_ptr().cast()
}
