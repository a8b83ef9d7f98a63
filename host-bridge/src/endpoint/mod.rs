//! A worker's end of a session: where its commands come from, and where its replies, progress and data go.
//!
//! ```text
//!   dispatcher ──▶ Commands::next        records in order, one fetch each
//!   any thread ──▶ Client::reply         a sync operation's answer
//!                  Client::publish       stream words, errors
//!                  Client::source/sink   bulk data of a command: mapped memory (local), or a stream of chunks (tcp)
//! ```
//!
//! - `contract`: what a worker uses, whatever carries the session; `end`: how a session ends;
//! - [`local`]: the client's memory is mapped here and the ring is read in place; `succession`: how another
//!   process takes the bridge's place; `pause`: how it is left alone while the client's machine is stopped;
//! - [`verbs`]: as `tcp`, over InfiniBand or RoCE; bulk data comes into slots whose order is known ahead
//!   ([`planned_slots`]);
//! - [`tcp`]: records and small answers cross one connection, bulk data several others ([`incoming`],
//!   [`outgoing`], `outbox`); `stream`: the records and answers of both; `link`: its connections, which may
//!   be lost and replaced; [`cache`]: blocks that need not be sent again.
//!
//! A worker uses [`Commands`] and [`Client`] only. The one difference that it must know is that data is
//! [`Source::Mapped`], [`Source::Incoming`] or [`Source::Placed`], because only the worker knows how its
//! device reads each.

pub mod cache;
mod contract;
mod dispatcher_poll;
mod end;
pub mod incoming;
mod link;
pub mod local;
mod outbox;
pub mod outgoing;
mod pause;
pub mod planned_slots;
pub mod region;
pub(crate) mod stream;
mod succession;
pub mod tcp;
pub mod verbs;
mod wake;

pub use crate::compression::CompressUse;
pub use contract::{Client, Commands, Sink, Source, Survivor};
pub use dispatcher_poll::Polling;
pub use end::Lost;
#[doc(hidden)]
pub use incoming::receive_compressed;
pub use incoming::{Chunk, ChunkQueue, Grants, Incoming, Landing};
pub use local::LocalCommands;
pub use outbox::{Held, Unacknowledged};
pub use outgoing::{Leaving, Lent, Outgoing, Telling};
pub use pause::InUse;
pub use planned_slots::{Arrivals, Placed, PlacedChunk, StagingArea};
pub use region::{Mapped, Region};
pub use tcp::{Allowance, TcpClient, TcpCommands};
pub use verbs::{VerbsClient, VerbsCommands};
