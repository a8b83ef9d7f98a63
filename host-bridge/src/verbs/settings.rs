//! How to use verbs: the settings of an administrator, and what they may be.

use std::time::Duration;

use clap::{Args, value_parser};
use protocol::link::MAX_QUEUES;
use serde::{Deserialize, Serialize};

use super::error::VerbsError;

/// How to use verbs: one set of settings for both ends. `vhost-rgpu` and `rgpu-server` take them as the flags
/// that their names here stand for (`--rdma-device`), `vhost-rgpu` also as keys of a section `rdma` of its
/// configuration (`device`).
///
/// The client chooses how many queue pairs a session has and how deep they are, because they serve the
/// client's load. A server grants what the client requests, up to its configured limits. [`MOST_QUEUE_PAIRS`]
/// and [`MOST_DEPTH`] bound what a session can cost.
#[derive(Debug, Clone, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Transport verbs: name of the RDMA device, as ibv_devices lists it. By default the only one with an
    /// active port
    #[arg(id = "rdma.device", long = "rdma-device", value_name = "NAME")]
    pub device: Option<String>,
    /// Transport verbs: port of the RDMA device
    #[arg(id = "rdma.port", long = "rdma-port", value_name = "N", default_value_t = Settings::default().port, value_parser = value_parser!(u8).range(1..))]
    pub port: u8,
    /// Transport verbs: index in the port's GID table. By default an entry for RoCE v2 over IPv4; on
    /// InfiniBand the LID is used and no GID
    #[arg(id = "rdma.gid_index", long = "rdma-gid-index", value_name = "N")]
    pub gid_index: Option<u8>,
    /// Transport verbs, on InfiniBand: partition of the queue pairs by its P_Key, such as 0x8001. By default
    /// that of entry 0 in the port's table, usually the fabric's default partition
    #[arg(id = "rdma.partition", long = "rdma-partition", value_name = "P_KEY", value_parser = partition)]
    pub partition: Option<u16>,
    /// Transport verbs: MTU in bytes: 256, 512, 1024, 2048 or 4096. By default the port's own
    #[arg(id = "rdma.mtu", long = "rdma-mtu", value_name = "N", value_parser = value_parser!(u32).range(256..=4096))]
    pub mtu: Option<u32>,
    /// Transport verbs: traffic class of the packets; for RoCE the TOS byte of the IP header
    #[arg(id = "rdma.traffic_class", long = "rdma-traffic-class", value_name = "N", default_value_t = Settings::default().traffic_class)]
    pub traffic_class: u8,
    /// Transport verbs: queue pairs for the data of a session, 1 to 7; commands have one more. By default
    /// vhost-rgpu requests 2, and rgpu-server grants up to 7
    #[arg(id = "rdma.queue_pairs", long = "rdma-queue-pairs", value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(MOST_QUEUE_PAIRS)))]
    pub queue_pairs: Option<u32>,
    /// Transport verbs: maximum outstanding work requests on each queue pair. By default vhost-rgpu requests
    /// 128, and rgpu-server grants up to 256
    #[arg(id = "rdma.queue_depth", long = "rdma-queue-depth", value_name = "N", value_parser = value_parser!(u32).range(1..=i64::from(DEEPEST)))]
    pub queue_depth: Option<u32>,
    /// A peer that does not answer for this long is lost.
    #[arg(skip = Settings::default().loss)]
    #[serde(skip)]
    pub loss: Duration,
}

/// Number of queue pairs for data that a client requests by default.
pub const QUEUE_PAIRS: u32 = 2;
/// Number of outstanding requests on each of them that a client requests by default.
pub const DEPTH: u32 = 128;
/// Maximum number of queue pairs for data.
pub const MOST_QUEUE_PAIRS: u32 = MAX_QUEUES as u32 - 1;
/// Maximum number of outstanding requests on a queue pair.
pub(super) const DEEPEST: u32 = 1 << 14;
/// Number of outstanding requests that a server grants by default: the deepest queues that published
/// measurements use. Each costs it two receives, one of them with 8 KiB.
pub const MOST_DEPTH: u32 = 256;

impl Default for Settings {
    fn default() -> Self {
        Settings {
            device: None,
            port: 1,
            gid_index: None,
            partition: None,
            mtu: None,
            traffic_class: 0,
            queue_pairs: None,
            queue_depth: None,
            loss: Duration::from_secs(10),
        }
    }
}

/// A P_Key, decimal or hexadecimal.
fn partition(text: &str) -> Result<u16, String> {
    let number = text.strip_prefix("0x").map_or_else(|| text.parse(), |hex| u16::from_str_radix(hex, 16));
    number.map_err(|_| "a P_Key is a number such as 0x8001".to_owned())
}

impl Settings {
    /// Checks what does not depend on the host.
    pub fn check(&self) -> Result<(), VerbsError> {
        let range = |name, value: Option<u32>, least: u32, most: u32| match value {
            Some(v) if !(least..=most).contains(&v) => {
                Err(VerbsError::Range { name, value: v.into(), least: least.into(), most: most.into() })
            }
            _ => Ok(()),
        };
        range("queue_pairs", self.queue_pairs, 1, MOST_QUEUE_PAIRS)?;
        range("queue_depth", self.queue_depth, 1, DEEPEST)?;
        range("port", Some(self.port.into()), 1, 255)?;
        // The highest bit says how a port is a member, not of which partition.
        range("partition", self.partition.map(|key| u32::from(key & 0x7fff)), 1, 0x7fff)?;
        range("mtu", self.mtu, 256, 4096)
    }

    /// Number of queue pairs for data and of outstanding requests on each, for a client.
    pub(super) fn wish(&self) -> (u32, u32) {
        (self.queue_pairs.unwrap_or(QUEUE_PAIRS), self.queue_depth.unwrap_or(DEPTH))
    }

    /// The same for a server: the most that it grants.
    pub(super) fn grant(&self, (queue_pairs, depth): (u32, u32)) -> (u32, u32) {
        let most = (self.queue_pairs.unwrap_or(MOST_QUEUE_PAIRS), self.queue_depth.unwrap_or(MOST_DEPTH));
        (queue_pairs.min(most.0), depth.min(most.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let wrong = Settings { queue_pairs: Some(8), ..Settings::default() };
        assert_eq!(wrong.check().unwrap_err().to_string(), "rdma: queue_pairs 8: must be 1 to 7");
        assert!(Settings { queue_depth: Some(0), ..Settings::default() }.check().is_err());
        assert!(Settings { mtu: Some(9000), ..Settings::default() }.check().is_err());
        assert!(Settings { partition: Some(0x8000), ..Settings::default() }.check().is_err());
        assert!(Settings { partition: Some(0xffff), ..Settings::default() }.check().is_ok());
        assert!(Settings::default().check().is_ok());
    }

    #[test]
    fn a_partition_is_given_as_tools_print_it() {
        assert_eq!((partition("0x8001"), partition("32769")), (Ok(0x8001), Ok(0x8001)));
        assert!(["", "0x", "8001h", "0x18001", "-1"].into_iter().all(|text| partition(text).is_err()));
    }

    #[test]
    fn a_server_grants_what_is_asked_for_up_to_what_it_is_told() {
        let usual = Settings::default();
        assert_eq!(usual.wish(), (2, 128));
        assert_eq!(usual.grant(usual.wish()), (2, 128));
        assert_eq!(usual.grant((7, 2)), (7, 2));
        assert_eq!(usual.grant((7, 1 << 14)), (7, 256));
        let strict = Settings { queue_pairs: Some(1), queue_depth: Some(16), ..usual };
        assert_eq!(strict.grant((4, 128)), (1, 16));
        assert_eq!(strict.grant((1, 8)), (1, 8));
    }
}
