//! The leases that there are.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use identity::Secret;
use serde::{Deserialize, Serialize};

use crate::limits::Limits;
use crate::parent::control::Refused;
use crate::parent::refusals::Reason;
use crate::parent::trust::Principal;
use crate::policy::{Grant, current_name};

/// The message for a lease that doesn't exist or belongs to another client, without telling which.
pub(in crate::parent) const UNKNOWN: &str =
    "this client has no such lease: its time was over, it was released, or rgpu-server was restarted";

/// The server's name for a lease, which is not a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::parent) struct LeaseId(pub(in crate::parent) u32);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// A lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::parent) struct Lease {
    pub(in crate::parent) id: LeaseId,
    pub(in crate::parent) key: [u8; 32],
    /// Its principal.
    pub(in crate::parent) principal: String,
    /// The same as it last proved to be that principal, when it took or renewed the lease. `None`: not known.
    #[serde(default)]
    pub(in crate::parent) holder: Option<Principal>,
    /// The account of that principal's sessions without a lease: its own name, or its group's.
    pub(in crate::parent) account: String,
    pub(in crate::parent) name: String,
    pub(in crate::parent) devices: Vec<u32>,
    pub(in crate::parent) exclusive: bool,
    /// Limit in bytes on each device; 0: none.
    pub(in crate::parent) memory: u64,
    pub(in crate::parent) weight: u32,
    /// The weight that all leases of the client share on a device. 0: not known, as an earlier version did
    /// not keep it.
    #[serde(default)]
    pub(in crate::parent) client_weight: u32,
    /// How long it lasts after it was granted or last renewed.
    pub(in crate::parent) lasts: Duration,
    #[serde(with = "past")]
    pub(in crate::parent) granted: Instant,
    #[serde(with = "past")]
    pub(in crate::parent) renewed: Instant,
}

/// Serializes points in time as the time passed since, so that another daemon can read them.
mod past {
    use std::time::Instant;

    use handover::clock;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Instant, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(clock::to_ns(*time))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Instant, D::Error> {
        u64::deserialize(from).map(clock::from_ns)
    }
}

impl Lease {
    /// The account of its sessions.
    pub(in crate::parent) fn account(&self) -> String {
        account(&self.account, self.id)
    }

    pub(in crate::parent) fn until(&self) -> Instant {
        self.renewed + self.lasts
    }

    /// Refuses a lease with devices that the rules do not give its owner any more.
    pub(in crate::parent) fn check_devices(&self, grant: &Grant) -> Result<(), Refused> {
        let allowed = &grant.limits.devices;
        let other = self.devices.iter().find(|number| !allowed.is_empty() && !allowed.contains(number));
        other.map_or(Ok(()), |number| {
            let why = format!("this client may not use GPU {number} of its lease any more");
            Err(Refused(Reason::NotAllowed, grant.rules.explain(why)))
        })
    }

    /// Narrows a client's limits to this lease.
    pub(in crate::parent) fn narrow(&self, limits: &mut Limits) {
        limits.principal = self.account();
        limits.owner = Some(self.account.clone());
        limits.devices.clone_from(&self.devices);
        limits.device_count = 0;
        limits.exclusive = self.exclusive;
        limits.weight = self.weight.min(limits.weight);
        limits.session.device_memory = at_most(limits.session.device_memory, self.memory);
        limits.total.device_memory = at_most(limits.total.device_memory, self.memory);
    }
}

#[cfg(test)]
impl Lease {
    /// A shared lease of a client for tests.
    pub(in crate::parent) fn fake(id: LeaseId, client: &str, devices: &[u32]) -> Lease {
        Lease {
            id,
            key: [0; 32],
            principal: client.into(),
            holder: None,
            account: client.into(),
            name: String::new(),
            devices: devices.to_vec(),
            exclusive: false,
            memory: 0,
            weight: Limits::WEIGHT,
            client_weight: Limits::WEIGHT,
            lasts: Duration::from_secs(3600),
            granted: Instant::now(),
            renewed: Instant::now(),
        }
    }
}

/// The smaller one of two limits, of which 0 is none.
pub(in crate::parent) fn at_most(one: u64, other: u64) -> u64 {
    match (one, other) {
        (0, limit) | (limit, 0) => limit,
        (one, other) => one.min(other),
    }
}

/// The account of a lease's sessions. No client's name contains a space, so none is the same.
pub(in crate::parent) fn account(of: &str, id: LeaseId) -> String {
    format!("{of} {id}")
}

/// All leases.
#[derive(Debug, Default)]
pub(in crate::parent) struct Leases(pub(in crate::parent) BTreeMap<LeaseId, Lease>);

impl Leases {
    /// The leases of a previous daemon.
    pub(in crate::parent) fn restore(leases: Vec<Lease>) -> Leases {
        let current = |lease: Lease| Lease {
            principal: current_name(&lease.principal),
            account: current_name(&lease.account),
            ..lease
        };
        Leases(leases.into_iter().map(|lease| (lease.id, current(lease))).collect())
    }

    pub(in crate::parent) fn all(&self) -> impl Iterator<Item = &Lease> {
        self.0.values()
    }

    pub(in crate::parent) fn has(&self, id: LeaseId) -> bool {
        self.0.contains_key(&id)
    }

    pub(in crate::parent) fn get(&self, id: LeaseId) -> Option<&Lease> {
        self.0.get(&id)
    }

    /// The lease with this key, if it belongs to this principal.
    pub(in crate::parent) fn find(&self, key: &[u8; 32], principal: &str) -> Option<&Lease> {
        self.0.values().find(|lease| Secret(lease.key).matches(key) && lease.principal == principal)
    }

    /// Bytes of a device that were promised to leases, of one account or of all.
    pub(in crate::parent) fn promised(&self, device: u32, of: Option<&str>) -> u64 {
        let those = self.all().filter(|lease| lease.devices.contains(&device) && !lease.exclusive);
        let those = those.filter(|lease| of.is_none_or(|account| lease.account == account));
        those.fold(0, |sum, lease| sum.saturating_add(lease.memory))
    }
}
