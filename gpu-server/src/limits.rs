//! What a session may use, and what is counted for that.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a session may use. The daemon derives it from the client's identity and the operator's policy;
/// nothing that a client or worker says changes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Who opened the session, for accounting only: sessions with the same text share
    /// [`total`](Limits::total) and their turns on a GPU.
    pub principal: String,
    /// Under a lease: the account of the client's sessions without one, for which everything counts that the
    /// client has. `None`: the principal itself.
    #[serde(default)]
    pub owner: Option<String>,
    /// Numbers of the devices that it may use, as counted by `--devices`. Empty: all that the server shares.
    pub devices: Vec<u32>,
    /// How many of these devices a session gets, the least used ones. 0: all of them, or one if they are
    /// exclusive.
    pub device_count: u32,
    /// Whether its devices serve nobody else while it has a session.
    pub exclusive: bool,
    /// What one session may hold.
    pub session: Amounts,
    /// What all sessions of the principal together may hold.
    pub total: Amounts,
    /// Bytes that all sessions of the client may hold on each device, with all of its leases. 0: no limit.
    #[serde(default)]
    pub client_memory: u64,
    /// How many sessions of each kind the client may have with all of its leases, including waiting ones.
    /// 0: no limit. `None`: all but an eighth of the server's.
    pub sessions: Option<u32>,
    /// Its share of a GPU's time while others want it, too, in proportion to the weights. At least 1; the
    /// default is 100.
    pub weight: u32,
    /// While a principal with a higher priority has work for a GPU, those with lower ones wait. The default
    /// is 0.
    pub priority: i32,
    /// Maximum run time of a kernel in seconds. 0: no limit.
    pub kernel_seconds: u32,
    /// Whether its device memory may be moved to the server's memory while it is idle.
    pub swappable: bool,
    /// Seconds to keep it when its connections are lost. `None`: as long as the server keeps others.
    pub grace_seconds: Option<u32>,
}

impl Limits {
    /// The default weight.
    pub const WEIGHT: u32 = 100;

    /// The account of the client as a whole, with all of its leases.
    pub fn owner(&self) -> &str {
        self.owner.as_deref().unwrap_or(&self.principal)
    }

    /// How many devices the client may have at a time, with all of its leases. 0: no limit.
    pub fn most_devices(&self) -> usize {
        match self.device_count {
            0 if self.exclusive => self.devices.len().max(1),
            count => count as usize,
        }
    }
}

#[cfg(test)]
impl Limits {
    /// Those of a client for tests, or of its lease, written `CLIENT LEASE`.
    pub fn test(principal: &str) -> Limits {
        let owner = principal.split_once(' ').map(|(owner, _)| owner.to_owned());
        Limits { principal: principal.to_owned(), owner, ..Limits::default() }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            principal: String::new(),
            owner: None,
            devices: Vec::new(),
            device_count: 0,
            exclusive: false,
            session: Amounts::default(),
            total: Amounts::default(),
            client_memory: 0,
            sessions: None,
            weight: Limits::WEIGHT,
            priority: 0,
            kernel_seconds: 0,
            swappable: true,
            grace_seconds: None,
        }
    }
}

/// Amounts of memory. 0: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amounts {
    /// Bytes on each device.
    pub device_memory: u64,
    /// Bytes of this machine's memory that are page-locked for programs.
    pub pinned_memory: u64,
}

/// How many devices of a server have their use counted, by number.
pub const MOST_DEVICES: usize = 64;

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Resource {
    /// Memory of the device with this number.
    Device(u32),
    /// Page-locked memory of this machine.
    Pinned,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resource::Device(number) => write!(f, "memory of device {number}"),
            Resource::Pinned => f.write_str("page-locked memory"),
        }
    }
}
