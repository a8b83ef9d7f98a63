//! A relayed session whose client and server both do anything: records, overwritten memory, frames, data,
//! lost links, regions that are added and removed.
#![cfg_attr(not(standalone), no_main)]

use host_bridge::bridge::relay_any;

rgpu_fuzz::target!(|program: &[u8]| {
    relay_any(program);
});
