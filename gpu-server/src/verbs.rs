//! Options of the transport `verbs`, from the command line to the worker.

use clap::Args;
use host_bridge::verbs::Settings;
use serde::{Deserialize, Serialize};

/// Which RDMA device serves sessions over verbs, and how.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
pub struct Rdma {
    /// RDMA device for clients that come over verbs, as `ibv_devices` names it; by default the only one with an active port
    #[arg(long, value_name = "NAME")]
    pub rdma_device: Option<String>,
    /// Its port
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub rdma_port: Option<u8>,
    /// Index in the port's GID table; by default RoCE v2 and IPv4, or on InfiniBand the LID
    #[arg(long, value_name = "N")]
    pub rdma_gid_index: Option<u8>,
    /// MTU [bytes: 256, 512, 1024, 2048 or 4096]; by default the port's
    #[arg(long, value_name = "N")]
    pub rdma_mtu: Option<u32>,
    /// Traffic class of the packets
    #[arg(long, value_name = "N")]
    pub rdma_traffic_class: Option<u8>,
    /// Queue pairs for data of one session at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=7))]
    pub rdma_queue_pairs: Option<u32>,
    /// Requests under way on each queue pair
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub rdma_queue_depth: Option<u32>,
}

impl Rdma {
    /// As the transport wants them. Unless told otherwise, a server has as many queue pairs as the client wishes.
    pub fn settings(&self) -> Settings {
        let usual = Settings::default();
        Settings {
            device: self.rdma_device.clone(),
            port: self.rdma_port.unwrap_or(usual.port),
            gid_index: self.rdma_gid_index,
            mtu: self.rdma_mtu,
            traffic_class: self.rdma_traffic_class.unwrap_or(usual.traffic_class),
            queue_pairs: self.rdma_queue_pairs.unwrap_or(7),
            queue_depth: self.rdma_queue_depth.unwrap_or(usual.queue_depth),
            ..usual
        }
    }
}
