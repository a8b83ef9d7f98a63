//! Refusals of guests' and native clients' requests, and the answers to them.

use host_bridge::bridge::{ConnectError, RegionError};
use host_bridge::framing::with_causes;
use host_bridge::memory::MemoryError;
use protocol::channel::GeometryError;
use protocol::device::Answer;

/// The answer to a refused request, with a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal(pub Answer, pub String);

/// A refusal of a malformed request.
pub fn invalid(text: impl Into<String>) -> Refusal {
    Refusal(Answer::Invalid, text.into())
}

/// A refusal because a resource of the host is exhausted.
pub fn no_resources(text: impl Into<String>) -> Refusal {
    Refusal(Answer::NoResources, text.into())
}

impl From<MemoryError> for Refusal {
    fn from(e: MemoryError) -> Refusal {
        let answer = match &e {
            MemoryError::Geometry(GeometryError::Version(_)) => Answer::Version,
            MemoryError::Map { .. } | MemoryError::Doorbell { .. } => Answer::NoResources,
            _ => Answer::Invalid,
        };
        Refusal(answer, with_causes(&e))
    }
}

impl From<RegionError> for Refusal {
    fn from(e: RegionError) -> Refusal {
        match e {
            RegionError::Memory(e) => e.into(),
            RegionError::InUse(_) | RegionError::Unknown(_) | RegionError::Over(_) => invalid(e.to_string()),
            RegionError::Limit { .. } | RegionError::NewMemory { .. } | RegionError::Verbs(_) => {
                no_resources(e.to_string())
            }
            RegionError::Refused { answer, .. } => Refusal(answer, e.to_string()),
        }
    }
}

impl From<ConnectError> for Refusal {
    fn from(e: ConnectError) -> Refusal {
        Refusal(e.answer(), e.to_string())
    }
}
