//! The bridge's end of a session: it connects one channel to one server, over one of several transports.
//!
//! ```text
//!  vhost-rgpu ──▶ Session ──▶ dyn Transport ─┬─ tcp    a relay thread takes records off the ring and moves bulk data
//!                    │                       ├─ verbs  the same over InfiniBand or RoCE, bulk data by the NIC
//!                    │                       └─ local  the server's worker has the channel mapped and reads the ring itself
//!                    └── SessionState: the channel's memory, the doorbell, counters, how the session ended; shared by both
//! ```
//!
//! In reading order:
//! - [`session`]: [`Session`], what a daemon holds for each channel; [`config`]: how it is configured;
//!   `error`: why there is none;
//! - [`saved`]: what of a session outlives the process that had it;
//! - `connect`: connections to a server, protected and greeted; `welcome`: the first message of each, and its
//!   answer;
//! - [`state`]: what session and transport share; the only code that writes into a channel when a session is
//!   lost;
//! - [`transport`]: what a session needs of a transport;
//! - `relay`: the rules of a session whose server is elsewhere, without I/O, and the loop that carries them
//!   out; `relayed`: such a session as a transport;
//! - `resume`: new connections for a session that has lost its own;
//! - [`tcp`] and [`verbs`]: what carries a relay's bytes; [`local`]: a server of this host, which needs no
//!   relay;
//! - [`counters`], `link` (how long the way to the server is), `socket` (a stream that never waits): small
//!   parts.
//!
//! Whatever a client does wrong ends its own session, with a readable reason, and no other session.

mod attempts;
pub mod config;
mod connect;
pub mod counters;
mod error;
mod link;
pub mod local;
mod relay;
mod relayed;
mod resume;
pub mod saved;
pub mod session;
mod socket;
pub mod state;
pub mod tcp;
pub mod transport;
pub mod verbs;
mod welcome;

pub use self::relay::CacheUse;
#[cfg(fuzzing)]
pub use self::relay::relay_any;
#[doc(hidden)]
pub use self::relay::take_over_any;
pub use self::state::{ChannelMemory, Wakeup, tell_lost};
pub use crate::compression::CompressUse;
pub use config::{Connector, Security, SessionConfig, TransportKind};
pub use connect::{ask, join};
pub use counters::Counters;
pub use error::{ConnectError, RegionError};
pub use link::LinkState;
pub use resume::finish_farewells;
pub use saved::{InheritedRegion, Saved};
pub use session::{Opened, Prepared, Session};
pub use transport::{Closed, RegionMemory, Transport};
pub use welcome::Turn;
