//! Peers of the daemon that are not clients yet: bytes, hellos, TLS data that is changed in transit, silent
//! connections.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rgpu_server::handshake_any;

fuzz_target!(|program: &[u8]| {
    handshake_any(program);
});
