//! Direct connections from a worker of one server to a worker of another, for copies between their GPUs.
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
//! That is how older peers copy. Since version 2.6 a copy is one command at each end: [`DirectSendAll`] sends
//! its pieces, each as soon as there is a buffer for it, and [`DirectReceiveAll`] lands each as soon as it
//! has come.
//!
//! ```text
//!  sending server                     client                      receiving server
//!        │ ◀── DirectSendAll ───────────│── DirectReceiveAll ───────────▶│
//!        │ ══ pieces ═══════════════════╪═══════════════════════════════▶│  lands them
//!        │                              │ ◀── all of them are landed ────│
//! ```
//!
//! A single piece can also be received without the client in between: [`DirectReceive`] says in advance where
//! it goes. That and [`DirectSendNow`] are for programs with kernels that wait for pieces. A command before
//! them may be waiting for such a kernel, so they are in the express lane, and name no stream.
//!
//! A connection carries pieces in one direction, from the server that opened it. The client gives each piece
//! a number that no earlier piece had.

use crate::handle::StreamId;
use crate::ops::copy::Pitched;
use crate::ops::ops;

/// Maximum size of a piece in bytes.
pub const MAX_PIECE: u64 = 1 << 20;
/// Number of pieces that each end has room for: the sending end until they are sent, the receiving end until
/// a stream has landed them.
pub const PIECES: usize = 16;
/// Maximum connections of a session in each direction that were not closed by [`DirectClose`].
pub const MAX_DIRECTS: usize = 64;
/// Maximum parts of memory that are named for a connection ([`DirectMemory`]).
pub const MAX_NAMED: usize = 1024;
/// Maximum copies of a connection that are not over, at each end ([`DirectSendAll`], [`DirectReceiveAll`]).
pub const MAX_COPIES: usize = 16;
/// Maximum addresses of a ticket.
pub const MAX_ADDRESSES: usize = 16;

crate::wire_struct! {
    /// Allows one connection to the server that made it, within a short time. A client only passes it on.
    pub struct DirectTicket {
        /// Its name, which is not secret.
        token: [u8; 16],
        /// Its secret.
        secret: [u8; 32],
        /// Under TLS, the SHA-256 of the public key that the connection's receiving end has.
        key: [u8; 32],
        /// Whether the server accepts only TLS at its TCP addresses.
        encrypted: bool,
        /// Where the server listens; at most [`MAX_ADDRESSES`].
        addresses: Vec<String>,
    }
}

ops! {
    /// Direct connections, and copies over them.
    trait DirectOps;

    /// Returns the key of this session's worker, which will open a connection.
    sync 0x0e01 direct_key: DirectKey
        [order None, may_block Never, lane Main]
    {
    } -> DirectKeyReply {
        /// SHA-256 of its public key.
        key: [u8; 32],
    }

    /// Makes a ticket for a connection to this session. Answered `CUDA_ERROR_OUT_OF_MEMORY` if the session
    /// has [`MAX_DIRECTS`], and `CUDA_ERROR_NOT_SUPPORTED` if the server gives out no tickets.
    sync 0x0e02 direct_offer: DirectOffer
        [order None, may_block Never, lane Main]
    {
        /// The connection's number, which no other connection to this session has.
        direct: u32,
        /// The key of the worker that will open it.
        key: [u8; 32],
    } -> DirectOfferReply {
        /// The ticket.
        ticket: DirectTicket,
    }

    /// Opens a connection to another server. The server connects only to addresses of the ticket that its
    /// operator allows.
    sync 0x0e03 direct_open: DirectOpen
        [order None, may_block Never, lane Main]
    {
        /// The connection's number, which no other connection from this session has.
        direct: u32,
        /// The other server's ticket.
        ticket: DirectTicket,
    } -> DirectOpenReply {
        /// Why there is no connection; empty if there is one.
        refusal: String,
    }

    /// Sends a piece when the stream reaches this command. If that is not possible, the other end is told
    /// that the piece will not come.
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

    /// Waits until a piece has come. An error means that it will not come; later pieces may have come.
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

    /// Copies a piece that has come to its place when the stream reaches this command. Each piece can be
    /// landed once.
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

    /// Receives a piece without the client: copies it to its place as soon as it has come, if that is device
    /// memory on a stream of the server's own, and then raises the progress word of the connection's stream
    /// to this command's number. The connection was [prepared](DirectPrepare), and the place is in
    /// [memory](DirectMemory) that was named for it. The pieces of a connection that are received like this
    /// are named in ascending order. A piece that will not come, or has another size, becomes a
    /// [`DirectFailures`] of the connection: neither it nor a later one is written then.
    async 0x0e07 direct_receive: DirectReceive
        [order None, may_block Never, lane Express, since 5]
    {
        /// A connection to this session.
        direct: u32,
        /// The piece's number.
        number: u64,
        /// Where its bytes go.
        dst: u64,
        /// The piece's size in bytes: at most [`MAX_PIECE`].
        len: u64,
    }

    /// Sends a piece at once, from device memory on a stream of the server's own, and raises the progress
    /// word of the connection's stream to this command's number when its bytes have been read. The connection
    /// was [prepared](DirectPrepare), and the bytes are in [memory](DirectMemory) that was named for it. If
    /// it cannot be sent, the other end is told that the piece will not come, and the word may stay as it is.
    async 0x0e08 direct_send_now: DirectSendNow
        [order None, may_block Never, lane Express, since 5]
    {
        /// A connection from this session.
        direct: u32,
        /// The piece's number.
        number: u64,
        /// Where its bytes are.
        src: u64,
        /// Their number: at most [`MAX_PIECE`].
        len: u64,
    }

    /// Waits until a [`DirectReceive`] has failed. The client asks at most once at a time.
    sync 0x0e09 direct_failures: DirectFailures
        [order None, may_block Never, lane Express, since 5]
    {
    } -> DirectFailuresReply {
        /// The connections that have failed since the last answer. Nothing more is received on them.
        directs: Vec<u32>,
    }

    /// Makes ready what [`DirectReceive`] or [`DirectSendNow`] need: buffers at this end, and what copies
    /// pieces. This and [`DirectMemory`] may wait for kernels that are running. Those two never do with
    /// mirrored memory; with device memory, NVIDIA's driver may let them wait for a call in another thread
    /// that waits for a kernel.
    sync 0x0e0a direct_prepare: DirectPrepare
        [order None, may_block Never, lane Main, since 5]
    {
        /// The connection's number.
        direct: u32,
        /// Whether it leads from this session.
        outgoing: bool,
        /// The connection's stream. Only its progress word and its context are used. No other connection uses
        /// it.
        stream: StreamId,
    } -> DirectPrepareReply {}

    /// Names memory that pieces of a prepared connection may be in: device memory, which is forgotten when it
    /// is freed, or a mirror's, which an older server refuses. Answered `CUDA_ERROR_OUT_OF_MEMORY` beyond
    /// [`MAX_NAMED`].
    sync 0x0e0b direct_memory: DirectMemory
        [order None, may_block Never, lane Main, since 5]
    {
        /// The connection's number.
        direct: u32,
        /// Whether it leads from this session.
        outgoing: bool,
        /// Its address. Memory of a kernel's module, and memory that the client shares, cannot be named.
        address: u64,
        /// Its size in bytes.
        len: u64,
        /// Whether pieces may be in it from now on. False: forgets what was named with this address and size.
        allowed: bool,
    } -> DirectMemoryReply {}

    /// Closes a connection, whose number may be used again then. Answered when no piece is being copied to or
    /// from the device's memory any more.
    sync 0x0e0c direct_close: DirectClose
        [order None, may_block Never, lane Main, since 5]
    {
        /// The connection's number.
        direct: u32,
        /// Whether it leads from this session. What was sent before still goes out.
        outgoing: bool,
    } -> DirectCloseReply {}

    /// Sends a box in pieces, on a stream of the server's own: at once, as far as there are buffers, and the
    /// others when there are. It waits for no stream, so whatever comes before the copy is over when the
    /// client says this. If a piece cannot be sent, the other end learns that it will not come, and neither
    /// does any later one. More than [`MAX_COPIES`] are an error (`CUDA_ERROR_OUT_OF_MEMORY`).
    async 0x0e0d direct_send_all: DirectSendAll
        [order None, may_block Never, lane Main, since 6]
    {
        /// A stream of the context that copies. Nothing is put on it.
        stream: StreamId,
        /// A connection from this session.
        direct: u32,
        /// The first piece's number. The others have the next ones.
        first: u64,
        /// Size of each piece in bytes, the last one's at most: at most [`MAX_PIECE`]. They are cut from the
        /// bytes of all rows, one after the other, without the gaps.
        piece: u64,
        /// Where the bytes are.
        src: Pitched,
        /// Width in bytes, height in rows, depth in slices.
        extent: [u64; 3],
    }

    /// Receives what a [`DirectSendAll`] sends: copies each piece to its place as soon as it has come, on a
    /// stream of the server's own, which waits for nothing. Answered when all are there. An error means that
    /// some will not come or could not be copied, and that nothing is written any more.
    /// `CUDA_ERROR_OUT_OF_MEMORY`: beyond [`MAX_COPIES`].
    sync 0x0e0e direct_receive_all: DirectReceiveAll
        [order None, may_block Never, lane Main, since 6]
    {
        /// A stream of the context that copies. Nothing is put on it.
        stream: StreamId,
        /// A connection to this session.
        direct: u32,
        /// The first piece's number, higher than those of all pieces that were received like this before.
        first: u64,
        /// As for the sending end.
        piece: u64,
        /// Where the bytes go.
        dst: Pitched,
        /// Width in bytes, height in rows, depth in slices: as many bytes as are sent.
        extent: [u64; 3],
    } -> DirectReceiveAllReply {}
}
