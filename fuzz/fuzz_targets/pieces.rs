//! Both ends of a direct connection whose other end does anything, over its socket and over verbs.
#![cfg_attr(not(standalone), no_main)]

use rgpu_server::pieces_any;

rgpu_fuzz::target!(|program: &[u8]| {
    pieces_any(program);
});
