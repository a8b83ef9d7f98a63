//! Memory that the server reads or writes once.

use crate::abi::result::Result;
use crate::process::driver::Driver;
use client::data::{HostRange, Place};
use client::{Status, log};

/// Bytes that the server can read or write: in the arena, or in pinned memory if they are too many.
pub(crate) enum Staging<'s> {
    Arena(client::arena::Block<'s>),
    Pinned { region: u32, mapping: client::port::mapping::Mapping },
}

impl Staging<'_> {
    pub fn new(driver: &'static Driver, len: usize) -> Result<Staging<'static>> {
        let session = driver.session;
        if len <= session.arena().largest() {
            return session.arena().alloc(session, len).map(Staging::Arena);
        }
        let pinned = session.port().pin_new(len.next_multiple_of(64 << 10), None).map_err(|error| {
            log::warn(format_args!("cannot allocate {len} bytes of staging memory: {}", error.line()));
            Status::OUT_OF_MEMORY
        })?;
        Ok(Staging::Pinned { region: pinned.region, mapping: pinned.mapping })
    }

    pub fn ptr(&self) -> *mut u8 {
        match self {
            Staging::Arena(block) => block.ptr(),
            Staging::Pinned { mapping, .. } => mapping.base(),
        }
    }

    pub fn range(&self, len: usize) -> HostRange {
        match self {
            Staging::Arena(block) => block.range(len),
            Staging::Pinned { region, .. } => {
                HostRange { place: Place::Region(*region), offset: 0, len: len as u64 }
            }
        }
    }

    /// Releases the memory. The server has answered and does not touch the bytes any more.
    pub fn done(self, driver: &Driver) {
        if let Staging::Pinned { region, mapping } = self {
            driver.session.port().unpin(region);
            drop(mapping);
        }
    }
}
