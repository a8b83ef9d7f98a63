//! A client that does anything with its session: operations with values and handles of which some are valid,
//! executed on the software GPU.
#![cfg_attr(not(standalone), no_main)]

use rgpu_server::session_any;

rgpu_fuzz::target!(|program: &[u8]| {
    session_any(program);
});
