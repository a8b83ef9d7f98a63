//! Both ends of a direct connection whose other end does anything, over its socket and over verbs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rgpu_server::pieces_any;

fuzz_target!(|program: &[u8]| {
    pieces_any(program);
});
