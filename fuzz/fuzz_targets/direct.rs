//! The data of a direct connection: headers followed by their bytes, until a correct peer would not send
//! them.
#![cfg_attr(not(standalone), no_main)]

use protocol::link::DirectHeader;
use protocol::ops::direct::MAX_PIECE;
use zerocopy::FromBytes;

rgpu_fuzz::target!(|stream: &[u8]| {
    let (mut rest, mut last) = (stream, 0);
    while let Ok((header, behind)) = DirectHeader::read_from_prefix(rest) {
        match header.check(last) {
            Ok(len) => {
                assert!(header.number > last && len as u64 <= MAX_PIECE && len == header.len as usize);
                last = header.number;
                rest = behind.get(len..).unwrap_or_default();
            }
            Err(why) => {
                assert!(!why.is_empty());
                return;
            }
        }
    }
});
