//! A session's streams and events.
//!
//! The table of streams is passed to the backend with each operation on a stream, because such an operation
//! may concern other streams, too: work on a legacy default stream is ordered with the blocking streams of
//! its context.

use protocol::handle::{ContextId, GreenId};

use super::ids::Ids;
use crate::shared_event::SharedEvent;
use crate::worker_protocol::Token;

/// One of the client's streams. `S` belongs to the backend.
pub struct Stream<S> {
    /// Its context; for a stream of a green context, the primary one.
    pub context: ContextId,
    /// The green context that it was made in.
    pub green: Option<GreenId>,
    /// Whether it is ordered with its context's legacy default stream.
    pub is_blocking: bool,
    /// The backend's.
    pub native: S,
}

/// One of the client's events. `E` belongs to the GPU.
pub struct Event<E> {
    pub context: ContextId,
    /// `CUevent_flags`.
    pub flags: u32,
    pub native: E,
    /// The token under which it is shared.
    pub token: Option<Token>,
    /// For an interprocess event: the state that sessions share.
    pub shared: Option<SharedEvent>,
}

/// Streams by the client's IDs.
pub type Streams<S> = Ids<Stream<S>>;
