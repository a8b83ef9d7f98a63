//! Why there is no session, or a region is not registered.

use std::io;

use identity::servers::CredentialsError;
use protocol::device::Answer;
use protocol::version::Mismatch;
use thiserror::Error;

use crate::memory::MemoryError;
use crate::verbs::VerbsError;

/// Why no session came about.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The server could not be reached.
    #[error("the server at {server} cannot be reached: {source}")]
    NoServer {
        /// Its address.
        server: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The server could be reached, and is not the one that this host trusts, or does not speak TLS.
    #[error("no protected connection to the server at {server}: {source}")]
    Unsafe {
        /// Its address.
        server: String,
        /// Why.
        source: io::Error,
    },
    /// This host cannot protect a connection to the server.
    #[error("no session with the server at {server}: {source}")]
    Credentials {
        /// Its address.
        server: String,
        /// Why.
        source: CredentialsError,
    },
    /// The server's version does not fit.
    #[error("{}", .mismatch.describe(&format!("the server at {server} speaks"), "this host speaks"))]
    Version {
        /// Its address.
        server: String,
        /// Why.
        mismatch: Mismatch,
    },
    /// The server refused.
    #[error("the server at {server} refused: {reason}")]
    Refused {
        /// Its address.
        server: String,
        /// Its answer.
        answer: Answer,
        /// Its words.
        reason: String,
    },
    /// What answered is no rgpu server, or a broken one.
    #[error("the server at {server} does not keep to the protocol: {what}")]
    Protocol {
        /// Its address.
        server: String,
        /// What it did.
        what: String,
    },
    /// Verbs cannot be used, or did not come about.
    #[error("this host cannot open a session over verbs: {source}")]
    Verbs {
        /// Why.
        source: VerbsError,
    },
    /// The client went away while it waited.
    #[error("the program gave up waiting for its turn at the server at {server}")]
    GivenUp {
        /// Its address.
        server: String,
    },
    /// Something on this host failed.
    #[error("this host cannot open a session: {source}")]
    Here {
        /// The system's answer.
        source: io::Error,
    },
}

impl ConnectError {
    /// The answer that a client gets.
    pub fn answer(&self) -> Answer {
        match self {
            ConnectError::NoServer { .. } | ConnectError::Protocol { .. } | ConnectError::Unsafe { .. } => {
                Answer::NoServer
            }
            ConnectError::Credentials { .. } => Answer::Denied,
            ConnectError::Version { .. } => Answer::Version,
            ConnectError::Refused { answer, .. } => *answer,
            ConnectError::Here { .. } | ConnectError::Verbs { .. } | ConnectError::GivenUp { .. } => {
                Answer::NoResources
            }
        }
    }
}

/// Why a region was not registered or unregistered.
#[derive(Debug, Error)]
pub enum RegionError {
    /// The id is taken.
    #[error("region {0} is registered already")]
    InUse(u32),
    /// The id is not known.
    #[error("region {0} is not registered")]
    Unknown(u32),
    /// A limit of this host.
    #[error(
        "region of {size} bytes: {held} bytes in {count} regions are registered, the limit is {limit} bytes in {max_count} regions"
    )]
    Limit {
        /// Bytes asked for.
        size: u64,
        /// Bytes that the session has registered.
        held: u64,
        /// Regions that the session has registered.
        count: usize,
        /// The most bytes.
        limit: u64,
        /// The most regions.
        max_count: usize,
    },
    /// The server does not know the memory, which the client has got since its session began.
    #[error("the server at {server} cannot be told of memory that was plugged into the guest: {reason}")]
    NewMemory {
        /// The server.
        server: String,
        /// Why.
        reason: String,
    },
    /// The memory is not the client's.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The server refused.
    #[error("{server} refused the region: {reason}")]
    Refused {
        /// The server.
        server: String,
        /// Its answer.
        answer: Answer,
        /// Its words.
        reason: String,
    },
    /// The RDMA device cannot use the memory.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The session is over.
    #[error("{0}")]
    Over(String),
}
