//! The relay of a session whose server is on another host: it takes records off the ring, sends them and the data that they name, and writes what the server answers into the channel.
//!
//! ```text
//!   ring, slots, progress ◀──▶ Machine ◀── run: one thread ──▶ Carrier ◀──▶ the server
//!                              rules          the loop          sockets, or queue pairs
//! ```
//!
//! The rules of a session are in one state machine without I/O ([`machine`]). It touches the channel's memory, and beyond that sees bytes and tells bytes: records become frames in a
//! [`SendBuffer`](crate::framing::SendBuffer), frames become replies, progress, grants and settled data. A transport is a [`Carrier`]: it moves the bytes and nothing else. What differs between
//! transports in *what goes when* is a [`Schedule`], without I/O as well: [`flows`] for `tcp`, [`slots`] for `verbs`. So each rule is tested without a socket, in `tests`, by a carrier in memory
//! that delays, reorders and lies.
//!
//! In reading order:
//! - [`machine`]: records, frames, replies, progress, whether the server is there;
//! - [`regions`]: the memory that records may name; [`unsent`] and [`downloads`]: data under way to the server and from it; [`sent`]: what goes on a data connection;
//! - [`flows`], [`slots`]: the two schedules; [`pace`]: how much should be on its way; [`knowledge`]: what the server has already;
//! - [`compressed`]: where compressed bytes lie until the server has them ([`compression`](crate::compression) says when there are some);
//! - [`carrier`]: what a transport must do, and the loop that has it do so;
//! - [`handle`], [`mailbox`]: the relay as other threads see it;
//! - [`ledger`], [`succession`]: how another process goes on where this one ended.
//!
//! `fuzzing` has a client and a server that keep to nothing.

mod carrier;
mod compressed;
mod downloads;
mod flows;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod handle;
mod knowledge;
mod ledger;
mod machine;
mod mailbox;
mod pace;
mod regions;
mod sent;
mod slots;
mod succession;
#[cfg(test)]
mod survival_tests;
#[cfg(test)]
mod tests;
mod unsent;

use protocol::link::DataGrant;
use protocol::ops::OpInfo;
use protocol::wire::WireError;

pub(super) use self::carrier::{Carrier, Wakeups, run};
pub(super) use self::compressed::{Compressed, Room, file as compressed_file, rooms};
pub(super) use self::flows::{Carries, Chunk, Flows, ToHash};
#[cfg(fuzzing)]
pub use self::fuzzing::relay_any;
pub(super) use self::handle::RelayHandle;
pub use self::knowledge::CacheUse;
#[doc(hidden)]
pub use self::ledger::take_over_any;
pub(super) use self::ledger::{Ledger, file as ledger_file};
pub(super) use self::machine::{Machine, untrue};
pub(super) use self::mailbox::Mailbox;
pub(super) use self::regions::{ClientMemory, MemoryKey, Span};
pub(super) use self::sent::{Head, Sent};
pub(super) use self::slots::{Slots, Write};
pub(super) use self::succession::{AllMemory, Restored, RestoredLane, RestoredSlots, RestoredWrites};

/// Why a relay ended.
#[derive(Debug)]
pub(super) enum EndReason {
    /// The client did what no correct client does.
    Client(String),
    /// The server did what no correct server does.
    Server(String),
    /// A connection to the server broke.
    Gone(String),
    /// The server said goodbye.
    Bye(String),
    /// Something on this host failed.
    Here(String),
    /// [`Transport::close`](super::Transport::close).
    Asked(String),
    /// [`Transport::pause`](super::Transport::pause): the session goes on later.
    Paused,
}

impl EndReason {
    /// The reason in words, for the client and for a log.
    fn text(&self, server: &str) -> String {
        match self {
            EndReason::Client(what) => format!("malformed command in the channel: {what}"),
            EndReason::Server(what) => {
                format!("the server at {server} does not keep to the protocol: {what}")
            }
            EndReason::Gone(what) => format!("connection to the server at {server} lost: {what}"),
            EndReason::Bye(what) if what.is_empty() => format!("the server at {server} ended the session"),
            EndReason::Bye(what) => format!("the server at {server} ended the session: {what}"),
            EndReason::Here(what) => {
                format!("this host failed while talking to the server at {server}: {what}")
            }
            EndReason::Asked(what) => what.clone(),
            EndReason::Paused => "the session is paused".to_owned(),
        }
    }
}

/// A piece of `In` data that a command names. It has at least one byte.
#[derive(Debug)]
pub(super) struct Upload<M> {
    /// The command.
    pub(super) seq: u64,
    /// Which of the command's pieces of data.
    pub(super) piece: u32,
    /// Where it lies.
    pub(super) span: Span<M>,
    /// The server reads it only once the command's stream has come to it ([`protocol::data::HostIn::Late`]).
    pub(super) late: bool,
}

/// Which `In` data goes to the server when: what the transports have different rules for. It does no I/O; its carrier takes out of it what may go now.
pub(super) trait Schedule {
    /// The client's memory, as the transport uses it.
    type Memory: ClientMemory;

    /// Most bytes of records that the server may have received and not taken ([`COMMANDS_TAKEN`](protocol::link::frame::COMMANDS_TAKEN)). `None`: the connection itself holds records back.
    const COMMANDS_AHEAD: Option<u64>;

    /// Whether the server acknowledges what it has received ([`RECEIVED`](protocol::link::frame::RECEIVED)), so that the session survives its connections.
    fn is_acknowledged(&self) -> bool;

    /// A command is about to be sent. Called for each, in order, before its data is [pushed](Self::push). The error: its body does not decode.
    fn command(&mut self, seq: u64, info: &OpInfo, body: &[u8]) -> Result<(), WireError>;

    /// Takes over a piece of data of the command that was announced last; pieces of a command come in order. True: the server must be asked to grant it before it has the command.
    fn push(&mut self, upload: Upload<Self::Memory>) -> bool;

    /// The server has room for a part of a piece. The command and the piece are the server's words and may not exist.
    fn grant(&mut self, grant: DataGrant) -> Result<(), EndReason>;

    /// Has a ledger note what has been done since the last call. Right after it the ledger commits.
    fn note(&mut self, _ledger: &mut Ledger) {}

    /// Acts on a frame of a kind that only this schedule knows. `Ok(false)`: it does not know it.
    fn frame(&mut self, kind: u32, body: &[u8]) -> Result<bool, EndReason>;
}
