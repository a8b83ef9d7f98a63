//! A relayed session whose client and server both do anything: records, overwritten memory, frames, data,
//! lost links, regions that are added and removed.
#![no_main]

use host_bridge::bridge::relay_any;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: &[u8]| relay_any(program));
