//! What is known of a session for those who look after it.

use std::time::Instant;

use protocol::device::text;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What a successor tells an operator of the session.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(in crate::bridge) struct About {
    /// When it began, in ns of CLOCK_MONOTONIC.
    pub(in crate::bridge) since: u64,
    pub(in crate::bridge) server_name: [u8; 64],
}

impl About {
    pub(in crate::bridge) fn now(server_name: &str) -> About {
        About { since: handover::clock::to_ns(Instant::now()), server_name: text(server_name) }
    }
}
