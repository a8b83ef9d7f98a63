//! What can go wrong with verbs, in words that an administrator can act on.

use std::io;

use thiserror::Error;

/// Why verbs could not be used, or stopped working.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// libibverbs is not on this host, or too old.
    #[error(
        "transport `verbs` needs {name}, which cannot be used: {reason} (Debian: packages libibverbs1 and ibverbs-providers)"
    )]
    Library {
        /// The library's name.
        name: String,
        /// The loader's words.
        reason: String,
    },
    /// The host has no RDMA device at all.
    #[error(
        "this host has no RDMA device: /sys/class/infiniband is empty (is the driver loaded? a virtual function bound to vfio-pci is not the host's)"
    )]
    NoDevices,
    /// No device has that name.
    #[error("no RDMA device is called {name:?}; this host has {have}")]
    NoDevice {
        /// The name asked for.
        name: String,
        /// Names that there are.
        have: String,
    },
    /// No name was given and the choice is not clear.
    #[error("rdma: no device is set and {why}: name one of {have}")]
    Ambiguous {
        /// Why none was taken.
        why: &'static str,
        /// Names that there are.
        have: String,
    },
    /// The port does not exist.
    #[error("RDMA device {device} has ports 1 to {count}, no port {port}")]
    NoPort {
        /// The device.
        device: String,
        /// The port asked for.
        port: u8,
        /// Ports that it has.
        count: u8,
    },
    /// The port is not up.
    #[error(
        "port {port} of RDMA device {device} is {state}: check the cable and the switch, for RoCE `ip link`, for InfiniBand the subnet manager"
    )]
    PortDown {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state, in words.
        state: &'static str,
    },
    /// No GID can be used.
    #[error(
        "port {port} of RDMA device {device} has no usable GID ({why}): give its network interface an IP address, or set gid_index of rdma"
    )]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// What was looked for.
        why: String,
    },
    /// The port has no local identifier.
    #[error("port {port} of RDMA device {device} has no LID: no subnet manager has configured it")]
    NoLid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
    },
    /// The port is not a member of the partition.
    #[error(
        "port {port} of RDMA device {device} is not in partition {partition:#06x}, only in {have}: the subnet manager decides that (partitions.conf of opensm); on Ethernet use a VLAN instead"
    )]
    NoPartition {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The P_Key asked for.
        partition: u16,
        /// The port's P_Keys.
        have: String,
    },
    /// The MTU is no MTU, or more than the port has.
    #[error(
        "rdma: mtu {mtu}: port {port} of RDMA device {device} can do 256, 512, 1024, 2048 and 4096 up to its own {active}, which follows the interface's MTU"
    )]
    Mtu {
        /// What was asked for, in bytes.
        mtu: u32,
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// What the port has, in bytes.
        active: u32,
    },
    /// A number that the device or this program cannot do.
    #[error("rdma: {name} {value}: must be {least} to {most}")]
    Range {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: u64,
        /// Least.
        least: u64,
        /// Most.
        most: u64,
    },
    /// Memory could not be registered because it may not be locked.
    #[error(
        "registering {bytes} bytes with the RDMA device: the limit of locked memory is {limit} bytes; raise it (LimitMEMLOCK= of the service, `ulimit -l`)"
    )]
    Memlock {
        /// Bytes.
        bytes: usize,
        /// The limit, in bytes.
        limit: u64,
    },
    /// The client's memory cannot be registered as one piece.
    #[error("a region of {size:#x} bytes cannot be registered with the RDMA device: {why}")]
    Region {
        /// Bytes.
        size: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A call failed.
    #[error("{what}: {source}")]
    Call {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The connection is broken: the peer cannot be reached through it any more. Another one may do.
    #[error("{0}")]
    Broken(String),
    /// A device has refused a request, or something was asked of a connection that it cannot do: another
    /// connection would end in the same way.
    #[error("{0}")]
    Wrong(String),
    /// The peer does not keep to the protocol.
    #[error("the peer does not keep to the protocol: {0}")]
    Peer(String),
}

impl VerbsError {
    pub(super) fn call(what: &str, source: io::Error) -> VerbsError {
        VerbsError::Call { what: what.to_owned(), source }
    }
}
