//! Stand-ins for a session's client and its mirrored memory, of which a test looks at one side only.

#![cfg_attr(not(test), allow(dead_code, reason = "the fuzz targets use a part of it"))]

use std::sync::Arc;

use host_bridge::endpoint::{Client, Mapped, Region, Sink, Source};
use protocol::Status;
use protocol::data::HostRange;
use protocol::link::ProgressUpdate;
use protocol::ops::memory::WordPatch;

use crate::driver::beside::Beside;
use crate::driver::watches::Watches;

/// Something that a session sends its client.
pub(crate) enum Told<'a> {
    Reply { seq: u64, slot: u16, status: Status, payload: &'a [u8] },
    Published(&'a [ProgressUpdate]),
}

/// A client that passes on what the session sends. Results that go to its memory, wherever they should go
/// there, are written to the start of `memory`; without a region they are refused.
pub(crate) struct Listener<F> {
    pub told: F,
    pub memory: Option<Arc<Region>>,
}

impl<F: Fn(Told<'_>)> Listener<F> {
    /// One without memory.
    pub fn new(told: F) -> Listener<F> {
        Listener { told, memory: None }
    }
}

impl<F: Fn(Told<'_>) + Send + Sync> Client for Listener<F> {
    fn reply(&self, seq: u64, slot: u16, status: Status, payload: &[u8]) {
        (self.told)(Told::Reply { seq, slot, status, payload });
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        (self.told)(Told::Published(updates));
    }

    fn executed(&self, _seq: u64) {}

    fn source(&self, _seq: u64, _piece: u32, _range: HostRange) -> Result<Source, Status> {
        Err(Status::INVALID_VALUE)
    }

    fn sink(&self, _seq: u64, _piece: u32, range: HostRange) -> Result<Sink, Status> {
        let mapped = self.memory.as_ref().and_then(|memory| Mapped::of(memory, range.len));
        mapped.map(Sink::Mapped).ok_or(Status::INVALID_VALUE)
    }

    fn nothing_sent(&self, _seq: u64) {}

    fn lose(&self, _reason: &str) {}

    fn close(&self) {}

    fn streams_data(&self) -> bool {
        true
    }

    fn traffic(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// Mirrored memory at all addresses, which stays 0.
#[derive(Default)]
pub(crate) struct Zeros(Watches);

impl Beside for Zeros {
    fn is_needed(&self) -> bool {
        true
    }

    fn holds(&self, _address: u64, _len: u64) -> bool {
        true
    }

    fn read(&self, _address: u64, bytes: &mut [u8]) -> Result<(), Status> {
        bytes.fill(0);
        Ok(())
    }

    fn write(&self, _address: u64, _bytes: &[u8]) -> Result<(), Status> {
        Ok(())
    }

    fn patch(&self, _words: &[WordPatch]) -> Result<(), Status> {
        Ok(())
    }

    fn watches(&self) -> &Watches {
        &self.0
    }

    fn fail_device(&self, _number: u32, _status: Status) {}
}
