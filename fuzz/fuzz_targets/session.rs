//! A client that does anything with its session: operations with values and handles of which some are valid,
//! executed on the software GPU.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rgpu_server::session_any;

fuzz_target!(|program: &[u8]| {
    session_any(program);
});
