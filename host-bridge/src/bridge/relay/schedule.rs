//! What goes to the server when, as far as transports differ in that.

use protocol::link::DataGrant;
use protocol::ops::OpInfo;
use protocol::wire::WireError;

use super::end::EndReason;
use super::ledger::Ledger;
use super::regions::{ClientMemory, Span};

/// A piece of `In` data that a command names. It has at least one byte.
#[derive(Debug)]
pub(in crate::bridge) struct Upload<M> {
    /// The command.
    pub(in crate::bridge) seq: u64,
    /// Which of the command's pieces of data.
    pub(in crate::bridge) piece: u32,
    /// Where it lies.
    pub(in crate::bridge) span: Span<M>,
    /// The server reads it only once the command's stream has come to it ([`protocol::data::HostIn::Late`]).
    pub(in crate::bridge) late: bool,
}

/// Which `In` data goes to the server when: what the transports have different rules for. It does no I/O; its
/// carrier takes out of it what may go now.
pub(in crate::bridge) trait Schedule {
    /// The client's memory, as the transport uses it.
    type Memory: ClientMemory;

    /// Most bytes of records that the server may have received and not taken
    /// ([`COMMANDS_TAKEN`](protocol::link::frame::COMMANDS_TAKEN)). `None`: the connection itself holds
    /// records back.
    const COMMANDS_AHEAD: Option<u64>;

    /// Whether the server acknowledges what it has received ([`RECEIVED`](protocol::link::frame::RECEIVED)),
    /// so that the session survives its connections.
    fn is_acknowledged(&self) -> bool;

    /// A command is about to be sent. Called for each, in order, before its data is [pushed](Self::push). The
    /// error: its body does not decode.
    fn command(&mut self, seq: u64, info: &OpInfo, body: &[u8]) -> Result<(), WireError>;

    /// Takes over a piece of data of the command that was announced last; pieces of a command come in order.
    /// True: the server must be asked to grant it before it has the command.
    fn push(&mut self, upload: Upload<Self::Memory>) -> bool;

    /// The server has room for a part of a piece. The command and the piece are the server's words and may
    /// not exist.
    fn grant(&mut self, grant: DataGrant) -> Result<(), EndReason>;

    /// Has a ledger note what has been done since the last call. Right after it the ledger commits.
    fn note(&mut self, _ledger: &mut Ledger) {}

    /// Acts on a frame of a kind that only this schedule knows. `Ok(false)`: it does not know it.
    fn frame(&mut self, kind: u32, body: &[u8]) -> Result<bool, EndReason>;
}
