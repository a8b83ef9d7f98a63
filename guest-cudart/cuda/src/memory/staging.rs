//! Memory that the server reads or writes once.

use crate::abi::result::Result;
use client::data::{HostRange, Place};
use client::port::mapping::Mapping;
use client::seq::Seq;
use client::session::Session;

/// Owner of blocks that no stream reads: none has this ID.
const NO_STREAM: u64 = u64::MAX;

/// Bytes that the server can read or write: in the arena, or in pinned memory if they are too many. Dropped
/// when the server does not touch them any more: it has answered, or was never told of them.
pub(crate) enum Staging<'s> {
    Arena(client::arena::Block<'s>),
    Pinned(Pinned),
}

/// Pinned memory of a [`Staging`].
pub(crate) struct Pinned {
    session: &'static Session,
    region: u32,
    mapping: Mapping,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.session.port().unpin(self.region);
    }
}

impl Staging<'_> {
    pub fn new(session: &'static Session, len: usize) -> Result<Staging<'static>> {
        if len <= session.arena().largest() {
            return session.arena().alloc(session, len).map(Staging::Arena);
        }
        let pinned = session.port().pin_new(len.next_multiple_of(64 << 10), None).map_err(|error| {
            session.no_memory(format_args!("cannot allocate {len} bytes of staging memory"), &error)
        })?;
        Ok(Staging::Pinned(Pinned { session, region: pinned.region, mapping: pinned.mapping }))
    }

    pub fn ptr(&self) -> *mut u8 {
        match self {
            Staging::Arena(block) => block.ptr(),
            Staging::Pinned(pinned) => pinned.mapping.base(),
        }
    }

    pub fn range(&self, len: usize) -> HostRange {
        match self {
            Staging::Arena(block) => block.range(len),
            Staging::Pinned(pinned) => {
                HostRange { place: Place::Region(pinned.region), offset: 0, len: len as u64 }
            }
        }
    }

    /// Releases the memory once the host has read it for command `seq`. Keep the returned value until the
    /// command is answered.
    pub fn read_by(self, seq: Seq) -> Option<Self> {
        match self {
            Staging::Arena(block) => {
                block.release_after(seq, NO_STREAM);
                None
            }
            Staging::Pinned(_) => Some(self),
        }
    }
}
