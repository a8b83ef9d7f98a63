//! Peers of the daemon that are not clients yet: bytes, hellos, TLS data that is changed in transit, silent
//! connections.
#![cfg_attr(not(standalone), no_main)]

use rgpu_server::handshake_any;

rgpu_fuzz::target!(|program: &[u8]| {
    handshake_any(program);
});
