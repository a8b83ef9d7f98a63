//! InfiniBand and RoCE through libibverbs: what the transport `verbs` is built of, for both of its ends.
//!
//! ```text
//!   Settings ─▶ Device (port, GID, MTU) ─▶ Domain ─▶ Unconnected ══ Queues over TCP ══▶ Link
//!                                            │
//!                                            └─▶ Registration, Slab, Region: memory that the device may use
//! ```
//!
//! In reading order:
//! - [`device`]: which device, port and address;
//! - [`memory`]: protection domains and registered memory; [`region`]: a client's scattered memory as one registration;
//! - [`queue`]: queue pairs and completion queues; [`credits`]: who may send how much;
//! - [`link`]: all of that as one connection with messages and writes;
//! - [`gpudirect`]: whether a transfer may go past host memory;
//! - [`sys`]: the C library's types, and its functions found at run time.
//!
//! A device's context and domain belong to one session, so a key is good for that session's memory and on that session's queue pairs only. A registration is revoked
//! before its memory goes, by the order in which things are dropped. Why the bindings are our own: `docs/decisions/0005-verbs-by-own-bindings.md`.

mod credits;
pub mod device;
mod error;
pub mod gpudirect;
pub mod link;
pub mod memory;
mod queue;
pub mod region;
mod sys;

use std::time::Duration;

use protocol::link::MAX_QUEUES;

pub use device::{Device, DeviceEvent, Port};
pub use error::VerbsError;
pub use link::{Event, Link, Put, Unconnected};
pub use memory::{Access, Domain, Registration, Segment, Slab};
pub use region::RegisteredRegion;

/// How to use verbs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Name of the RDMA device (`mlx5_2`), as `ibv_devices` lists it; `None`: the only one with an active port.
    pub device: Option<String>,
    /// Port, from 1.
    pub port: u8,
    /// Index in the port's GID table. `None`: RoCE v2 and IPv4 if there is one; on InfiniBand the LID.
    pub gid_index: Option<u8>,
    /// MTU in bytes; `None`: the port's.
    pub mtu: Option<u32>,
    /// Traffic class of the packets (RoCE: the IP header's TOS byte).
    pub traffic_class: u8,
    /// Queue pairs for data, 1 to 7; there is always one more, for messages.
    pub queue_pairs: u32,
    /// Requests under way on each queue pair.
    pub queue_depth: u32,
    /// A peer that does not answer for this long is gone.
    pub loss: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            device: None,
            port: 1,
            gid_index: None,
            mtu: None,
            traffic_class: 0,
            queue_pairs: 2,
            queue_depth: 128,
            loss: Duration::from_secs(10),
        }
    }
}

impl Settings {
    /// What is wrong whatever the host has.
    pub fn check(&self) -> Result<(), VerbsError> {
        let range = |name, value: u32, least: u32, most: u32| match value {
            v if (least..=most).contains(&v) => Ok(()),
            v => Err(VerbsError::Range { name, value: v.into(), least: least.into(), most: most.into() }),
        };
        range("rdma_queue_pairs", self.queue_pairs, 1, MAX_QUEUES as u32 - 1)?;
        range("rdma_queue_depth", self.queue_depth, 1, 1 << 14)?;
        range("rdma_port", self.port.into(), 1, 255)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let wrong = Settings { queue_pairs: 8, ..Settings::default() };
        assert_eq!(wrong.check().unwrap_err().to_string(), "rdma_queue_pairs 8: must be 1 to 7");
        assert!(Settings { queue_depth: 0, ..Settings::default() }.check().is_err());
        assert!(Settings::default().check().is_ok());
    }
}
