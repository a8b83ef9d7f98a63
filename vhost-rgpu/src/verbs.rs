//! Options of the transport `verbs`: keys of a section of the configuration, and flags.

use clap::Args;
use host_bridge::verbs::Settings;

/// Which RDMA device reaches the server, and how.
#[derive(Debug, Clone, Default, Args)]
pub struct Rdma {
    /// Transport verbs: RDMA device, as `ibv_devices` names it; by default the only one with an active port
    #[arg(long, value_name = "NAME")]
    pub rdma_device: Option<String>,
    /// Transport verbs: the device's port
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub rdma_port: Option<u8>,
    /// Transport verbs: index in the port's GID table; by default RoCE v2 and IPv4, or on InfiniBand the LID
    #[arg(long, value_name = "N")]
    pub rdma_gid_index: Option<u8>,
    /// Transport verbs: MTU [bytes: 256, 512, 1024, 2048 or 4096]; by default the port's
    #[arg(long, value_name = "N")]
    pub rdma_mtu: Option<u32>,
    /// Transport verbs: traffic class of the packets
    #[arg(long, value_name = "N")]
    pub rdma_traffic_class: Option<u8>,
    /// Transport verbs: queue pairs for data [2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=7))]
    pub rdma_queue_pairs: Option<u32>,
    /// Transport verbs: requests under way on each queue pair [128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub rdma_queue_depth: Option<u32>,
}

impl Rdma {
    /// As the transport wants them.
    pub fn settings(&self) -> Settings {
        let usual = Settings::default();
        Settings {
            device: self.rdma_device.clone(),
            port: self.rdma_port.unwrap_or(usual.port),
            gid_index: self.rdma_gid_index,
            mtu: self.rdma_mtu,
            traffic_class: self.rdma_traffic_class.unwrap_or(usual.traffic_class),
            queue_pairs: self.rdma_queue_pairs.unwrap_or(usual.queue_pairs),
            queue_depth: self.rdma_queue_depth.unwrap_or(usual.queue_depth),
            ..usual
        }
    }
}
