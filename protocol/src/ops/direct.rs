//! Direct connections: from a worker of one server to a worker of another one, for copies between their GPUs.
//!
//! ```text
//!  sending server                     client                      receiving server
//!        │ ◀── DirectKey ───────────────│                                │
//!        │                              │── DirectOffer ────────────────▶│  makes a ticket
//!        │ ◀── DirectOpen(ticket) ──────│                                │
//!        │ ── connects, if its operator allows the address ─────────────▶│
//!        │ ◀── DirectSend(number) ──────│── DirectArrival(number) ──────▶│
//!        │ ══ the piece ════════════════╪═══════════════════════════════▶│
//!        │                              │── DirectLand(number) ─────────▶│
//! ```
//!
//! A connection carries pieces one way, from the server that has opened it. Each piece has a number, chosen by the client, which none before it had.

use crate::handle::StreamId;
use crate::ops::copy::Pitched;
use crate::ops::ops;

/// Most bytes of a piece.
pub const MAX_PIECE: u64 = 1 << 20;
/// Pieces that each end has room for: at the sending one until they are sent, at the receiving one until a stream has landed them.
pub const PIECES: usize = 16;
/// Most connections of a session, each way, open and closed.
pub const MAX_DIRECTS: usize = 64;
/// Most addresses of a ticket.
pub const MAX_ADDRESSES: usize = 16;

crate::wire_struct! {
    /// Allows one connection to the server that has made it, once and for a short time. For the client it is only something to pass on.
    pub struct DirectTicket {
        /// Its name, which is no secret.
        token: [u8; 16],
        /// Its secret.
        secret: [u8; 32],
        /// Under TLS, the SHA-256 of the public key that the connection's other end will have.
        key: [u8; 32],
        /// Whether the server speaks TLS, and nothing else, at its addresses of TCP.
        encrypted: bool,
        /// Where the server listens; at most [`MAX_ADDRESSES`].
        addresses: Vec<String>,
    }
}

ops! {
    /// Direct connections, and copies over them.
    trait DirectOps;

    /// The key of the worker of this session, which is to open a connection.
    sync 0x0e01 direct_key: DirectKey
        [order None, may_block Never, lane Main]
    {
    } -> DirectKeyReply {
        /// SHA-256 of its public key.
        key: [u8; 32],
    }

    /// Makes a ticket for a connection to this session. Answered `CUDA_ERROR_OUT_OF_MEMORY` if the session has [`MAX_DIRECTS`], and
    /// `CUDA_ERROR_NOT_SUPPORTED` if the server gives out no tickets.
    sync 0x0e02 direct_offer: DirectOffer
        [order None, may_block Never, lane Main]
    {
        /// The connection's number, which none to this session had.
        direct: u32,
        /// The key of the worker that is to open it.
        key: [u8; 32],
    } -> DirectOfferReply {
        /// The ticket.
        ticket: DirectTicket,
    }

    /// Opens a connection to another server. The server checks the ticket's addresses against those that its operator allows, and connects to no other.
    sync 0x0e03 direct_open: DirectOpen
        [order None, may_block Never, lane Main]
    {
        /// The connection's number, which none from this session had.
        direct: u32,
        /// The other server's ticket.
        ticket: DirectTicket,
    } -> DirectOpenReply {
        /// Why there is no connection; empty if there is one.
        refusal: String,
    }

    /// Sends a piece when its stream comes to it. Where this cannot be, the other end is told that the piece will not come.
    async 0x0e04 direct_send: DirectSend
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// A connection from this session.
        direct: u32,
        /// The piece's number.
        number: u64,
        /// Where its bytes are.
        src: Pitched,
        /// Width in bytes, height in rows, depth in slices: at most [`MAX_PIECE`] in all.
        extent: [u64; 3],
    }

    /// Waits until a piece has come. An error: it will not come; pieces behind it may have.
    sync 0x0e05 direct_arrival: DirectArrival
        [order None, may_block Never, lane Main]
    {
        /// A connection to this session.
        direct: u32,
        /// The piece's number.
        number: u64,
    } -> DirectArrivalReply {
        /// This piece and those after it up to this number have come.
        upto: u64,
    }

    /// Copies a piece that has come to its place when its stream comes to it. Each piece can be landed once.
    async 0x0e06 direct_land: DirectLand
        [order Streams, may_block Never, lane Main]
    {
        /// Stream.
        stream: StreamId,
        /// A connection to this session.
        direct: u32,
        /// The piece's number.
        number: u64,
        /// Where its bytes go.
        dst: Pitched,
        /// Width in bytes, height in rows, depth in slices: as many bytes as the piece has.
        extent: [u64; 3],
    }
}
