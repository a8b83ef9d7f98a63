//! Arbitrary bytes in place of compressed data, as a server may receive them in a session: the decoder, and
//! the claimed lengths.
#![cfg_attr(not(standalone), no_main)]

use host_bridge::endpoint::receive_compressed;
use protocol::link::DATA_FLAGS;

rgpu_fuzz::target!(|input: (u8, u32, bool, u32, &[u8])| {
    let (step, len, honest, says, bytes) = input;
    let says = if honest { bytes.len() as u32 } else { says };
    // Chunks of a length that inputs can stand for, mostly.
    for len in [len, len % 5000] {
        if let Some(chunk) = receive_compressed(len, says, bytes, usize::from(step) + 1) {
            assert_eq!(chunk.len() as u32, len & !DATA_FLAGS);
        }
    }
});
