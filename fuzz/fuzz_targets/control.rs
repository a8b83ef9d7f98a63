//! A guest that does anything with its device: requests, descriptor chains, memory, doorbells, stops and
//! resets. The server may refuse or disappear.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vhost_rgpu::control_any;

fuzz_target!(|program: &[u8]| {
    control_any(program);
});
