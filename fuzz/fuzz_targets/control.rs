//! A guest that does whatever it likes with its device: requests, descriptor chains, memory, doorbells, stops and resets, and a server that may refuse or vanish.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vhost_rgpu::control_any;

fuzz_target!(|program: &[u8]| {
    control_any(program);
});
