//! A guest that does anything with its device: requests, descriptor chains, memory, doorbells, stops and
//! resets. The server may refuse or disappear.
#![cfg_attr(not(standalone), no_main)]

use vhost_rgpu::control_any;

rgpu_fuzz::target!(|program: &[u8]| {
    control_any(program);
});
