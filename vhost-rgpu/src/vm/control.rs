//! Parses requests of `controlq`: a guest's bytes become an [`Order`] or a [`Refusal`]. `docs/device.md` is
//! the specification.
//!
//! The bytes are a copy that was made once; nothing here touches guest memory.

use protocol::device::{Answer, Extent, REGISTER_READ_ONLY, Request, request};
use zerocopy::FromBytes;

use crate::config::Limits;
use crate::refusal::{Refusal, invalid, no_resources};

/// Bytes of a request without extents.
pub const FIXED: usize = size_of::<Request>();

/// A request that is valid as far as this can be determined without the device's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Create a channel in this memory.
    Create {
        /// Channel.
        channel: u32,
        /// Its memory, in order.
        extents: Vec<Extent>,
        /// Total bytes.
        size: u64,
    },
    /// Destroy a channel.
    Destroy {
        /// Channel.
        channel: u32,
    },
    /// Register memory.
    Register {
        /// Channel.
        channel: u32,
        /// Region.
        region: u32,
        /// Its memory, in order.
        extents: Vec<Extent>,
        /// Total bytes.
        size: u64,
        /// Whether the device only reads it.
        read_only: bool,
    },
    /// Unregister memory.
    Unregister {
        /// Channel.
        channel: u32,
        /// Region.
        region: u32,
    },
    /// Undo what a predecessor may have done for a request that this process refuses, so that the memory is
    /// the guest's again after the answer.
    Undo {
        /// Channel.
        channel: u32,
        /// The region that it was to register. `None`: it was to create the channel.
        region: Option<u32>,
        /// The answer.
        refusal: Refusal,
    },
}

/// What is left to do for a request that is refused, but that a predecessor with other limits may have begun
/// to execute.
pub fn undo(fixed: &[u8; FIXED], refusal: Refusal) -> Result<Order, Refusal> {
    match Request::read_from_bytes(fixed) {
        Ok(Request { kind: request::CREATE_CHANNEL, channel, .. }) => {
            Ok(Order::Undo { channel, region: None, refusal })
        }
        Ok(Request { kind: request::REGISTER_MEMORY, channel, region, .. }) => {
            Ok(Order::Undo { channel, region: Some(region), refusal })
        }
        _ => Err(refusal),
    }
}

/// The size in bytes of the extents after the fixed part. Checked before they are fetched.
pub fn extents_size(fixed: &[u8; FIXED], limits: &Limits) -> Result<usize, Refusal> {
    let request = Request::read_from_bytes(fixed).map_err(|_| invalid("the request is truncated"))?;
    if request.extent_count > limits.max_extents {
        let text =
            format!("{} extents in one request, the limit is {}", request.extent_count, limits.max_extents);
        return Err(no_resources(text));
    }
    Ok(request.extent_count as usize * size_of::<Extent>())
}

/// Parses a complete request: its fixed part and the extents' bytes.
pub fn parse(fixed: &[u8; FIXED], extents: &[u8], limits: &Limits) -> Result<Order, Refusal> {
    let expected = extents_size(fixed, limits)?;
    if extents.len() != expected {
        return Err(invalid(format!("{} bytes of extents, but {expected} were announced", extents.len())));
    }
    let request = Request::read_from_bytes(fixed).map_err(|_| invalid("the request is truncated"))?;
    let Request { kind, channel, region, size, flags, reserved, .. } = request;
    if !matches!(kind, request::CREATE_CHANNEL..=request::UNREGISTER_MEMORY) {
        return Err(Refusal(Answer::Unsupported, format!("unknown request type {kind}")));
    }
    let known_flags = if kind == request::REGISTER_MEMORY { REGISTER_READ_ONLY } else { 0 };
    if flags & !known_flags != 0 || reserved != 0 {
        return Err(invalid(format!(
            "flags {flags:#x}, reserved {reserved:#x}: this request has no such bits"
        )));
    }
    let (list, _) = extents.as_chunks::<{ size_of::<Extent>() }>();
    let list: Vec<Extent> = list.iter().filter_map(|bytes| Extent::read_from_bytes(bytes).ok()).collect();
    let memory = |list: Vec<Extent>| {
        let sum = list.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.len));
        if list.is_empty() || size == 0 || sum != Some(size) {
            return Err(invalid(format!(
                "{} extents that do not add up to the {size} bytes announced",
                list.len()
            )));
        }
        if let Some(empty) = list.iter().position(|extent| extent.len == 0) {
            return Err(invalid(format!("extent {empty} is empty")));
        }
        Ok(list)
    };
    match kind {
        request::CREATE_CHANNEL => {
            if size > limits.max_channel_size {
                let text = format!("a channel of {size} bytes, the limit is {}", limits.max_channel_size);
                return Err(no_resources(text));
            }
            Ok(Order::Create { channel, extents: memory(list)?, size })
        }
        request::REGISTER_MEMORY => {
            let read_only = flags & REGISTER_READ_ONLY != 0;
            Ok(Order::Register { channel, region, extents: memory(list)?, size, read_only })
        }
        _ if !list.is_empty() || size != 0 => Err(invalid(format!("request type {kind} takes no extents"))),
        request::DESTROY_CHANNEL => Ok(Order::Destroy { channel }),
        _ => Ok(Order::Unregister { channel, region }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    fn limits() -> Limits {
        Limits {
            max_channels: 256,
            max_extents: 8,
            max_channel_size: 256 << 20,
            max_registered: 0,
            max_registered_extents: 8,
        }
    }

    fn fixed(request: Request) -> [u8; FIXED] {
        let mut bytes = [0; FIXED];
        bytes.copy_from_slice(request.as_bytes());
        bytes
    }

    fn create(size: u64, extent_count: u32) -> Request {
        Request {
            kind: request::CREATE_CHANNEL,
            channel: 1,
            region: 0,
            extent_count,
            size,
            flags: 0,
            reserved: 0,
        }
    }

    #[test]
    fn a_valid_request_becomes_an_order() {
        let extents = [Extent { addr: 0x1000, len: 0x1000 }, Extent { addr: 0x5000, len: 0x2000 }];
        let order = parse(&fixed(create(0x3000, 2)), extents.as_bytes(), &limits()).unwrap();
        assert_eq!(order, Order::Create { channel: 1, extents: extents.to_vec(), size: 0x3000 });
        let destroy = Request { kind: request::DESTROY_CHANNEL, ..create(0, 0) };
        assert_eq!(parse(&fixed(destroy), &[], &limits()), Ok(Order::Destroy { channel: 1 }));
    }

    #[test]
    fn each_kind_of_malformed_request_gets_its_own_answer() {
        let one = [Extent { addr: 0x1000, len: 0x1000 }];
        let wrap = [Extent { addr: 0, len: u64::MAX }, Extent { addr: 0, len: 0x1001 }];
        let empty = [Extent { addr: 0, len: 0 }, one[0]];
        let good = create(0x1000, 1);
        for (request, extents, answer) in [
            (Request { kind: 9, ..good }, &one[..], Answer::Unsupported),
            (Request { kind: 0, ..good }, &one[..], Answer::Unsupported),
            (Request { extent_count: 9, ..good }, &one[..], Answer::NoResources),
            (Request { extent_count: u32::MAX, ..good }, &one[..], Answer::NoResources),
            (Request { extent_count: 0, ..good }, &one[..], Answer::Invalid),
            (Request { size: 0x2000, ..good }, &one[..], Answer::Invalid),
            (Request { flags: 1, ..good }, &one[..], Answer::Invalid),
            (Request { reserved: 1, ..good }, &one[..], Answer::Invalid),
            (Request { size: u64::MAX, ..good }, &one[..], Answer::NoResources),
            (create(0x1000, 2), &wrap[..], Answer::Invalid),
            (create(0x1000, 2), &empty[..], Answer::Invalid),
            (Request { kind: request::DESTROY_CHANNEL, ..good }, &one[..], Answer::Invalid),
        ] {
            let refusal = parse(&fixed(request), extents.as_bytes(), &limits()).unwrap_err();
            assert_eq!(refusal.0, answer, "{request:?}: {}", refusal.1);
            assert!(!refusal.1.is_empty());
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::array::uniform32(any::<u8>()), extents in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes, &extents, &limits());
        }

        #[test]
        fn the_extents_of_an_accepted_request_add_up(kind in 0u32..6, channel in 0u32..300, lens in proptest::collection::vec(0u64..0x3000, 0..10), size in 0u64..0x8000) {
            let extents: Vec<Extent> = lens.iter().map(|len| Extent { addr: 0, len: *len }).collect();
            let request = Request { kind, channel, extent_count: extents.len() as u32, ..create(size, 0) };
            match parse(&fixed(request), extents.as_bytes(), &limits()) {
                Ok(Order::Create { extents, size, .. } | Order::Register { extents, size, .. }) => {
                    prop_assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), size);
                    prop_assert!(extents.len() <= 8);
                }
                Ok(_) => prop_assert!(extents.is_empty()),
                Err(refusal) => prop_assert!(refusal.0 != Answer::Ok),
            }
        }
    }
}
