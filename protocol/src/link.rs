//! The link between the host bridge and a server: greetings, then frames.
//!
//! ```text
//!   bridge                                    server
//!     │ ── Hello{CONTROL} ─────────────────────▶ │  refuses another major version, naming both
//!     │ ◀──────────── Welcome{token} ─────────── │
//!     │ ── Hello{DATA, token, index} ──▶ …       │  tcp: as many data connections as the welcome says; under TLS, CONTROL likewise
//!     │ ── Attach + descriptors ───────▶ …       │  local: the channel's memory; the worker then reads the ring itself
//!     │ ◀═════════════ frames ══════════════════▶│
//! ```
//!
//! **Greetings.** [`Hello`] and [`Welcome`] begin with the sender's version and fingerprint ([`crate::version`]). Either side judges what it
//! receives by [`greeting`].
//!
//! **tcp.** The control connection carries frames ([`FrameHeader`]) both ways. The bridge forwards the records of the ring in [`frame::COMMANDS`],
//! unchanged and in order. Bulk data crosses on the data connections: [`DataHeader`]s, each followed by its bytes. A data header names the command
//! and counts the command's pieces of bulk data ([`crate::data::DataUse`], from 0, both directions together).
//!
//! - *In* (to the server): the bridge may send a command's data before, with or after the command, in the order of the commands of one stream. The
//!   server limits how much: the bridge may send *eagerly*, without a grant, as long as no more than [`Welcome::eager`] of the session's bytes
//!   await their place, and the rest when the server grants it ([`frame::DATA_GRANT`]). Of a piece of up to [`EAGER_PIECE`] bytes it sends all or nothing eagerly. So data of a stream that stands still never keeps another
//!   stream's data waiting. A [`HostIn::Late`](crate::data::HostIn) piece goes by grants alone.
//! - *Out* (to the client): the server sends a command's data at any time after it took the command. Before it says anything that depends on the
//!   data's arrival it sends [`frame::DATA_SENT`] on the control connection, and the bridge reads no further there until all of the data is in
//!   the client's memory. `DATA_SENT` comes exactly once for every command that names `Out` data, even when the command failed and fewer bytes, or
//!   none, were sent.
//!
//! The bytes that cross the control connection one way are a *stream*, and so are those of each data connection. Each end counts what it has received of
//! each stream, says so ([`frame::RECEIVED`]), and keeps what it has sent until the peer has said so. When a connection is lost, the bridge opens new ones
//! ([`purpose::RESUME`], `DATA`), both ends say what they have ([`frame::RESUMED`]), and every stream goes on behind that byte. Only
//! [`frame::BYE`] ends a session; a server keeps one without connections for [`Welcome::grace`] seconds.
//!
//! A server may have kept what its client has sent before ([`Welcome::cache`]). Then the bridge can tell it the hash of a block of *In* data ([`HASH_FLAG`]), and once the server has said that it has
//! the block ([`frame::DATA_KNOWN`]), refer to it ([`KNOWN_FLAG`]) where its bytes would be sent. All else is the same: what may go eagerly, and what needs a grant. The server keeps a block that it has said it has
//! until all of it has come, one way or the other. A bridge waits for no answer that it need not wait for, because a command may be executed no further than its data has come.
//!
//! A piece of no bytes is not sent at all. Every data connection has its own [`Hello`] (with the session's token) and [`Welcome`]; frames may
//! follow once all are welcomed.
//!
//! **TLS.** The connection on which the bridge greets the server is the daemon's alone, and stays open without frames as long as the session: on it the server may say
//! [`frame::BYE`]. After the welcome the bridge opens all of the session's connections, control and data, each with a TLS hello of its own that has the session's token as a name in the clear
//! ([`Welcome::token`]), and trusts the key with the fingerprint [`Welcome::session_key`] on them. Each begins with a [`Hello`] with token and secret, and a [`Welcome`].
//!
//! **local.** A Unix stream socket. After the welcome the bridge sends [`frame::ATTACH`], and later [`frame::REGION_ADD`] and
//! [`frame::REGION_REMOVE`]; the worker answers each with [`frame::ACK`]. Descriptors travel with the first byte of their frame. Commands, replies
//! and progress cross in the channel's memory. With [`ATTACH_SUCCESSION`], a socket that closes without a [`frame::BYE`] does not end the session: another
//! process of the bridge brings another socket ([`frame::TAKE_OVER`]). The session ends when nobody is left who could.
//!
//! **verbs.** The TCP control connection stays open for the whole session, for `ALIVE` and `BYE`. After the welcome both sides send one
//! [`frame::QUEUES`], the bridge first, and then connect their queue pairs: queue 0 for messages, the others for data. A message is a
//! [`MessageHeader`] and some bytes; the bytes of all messages one way form a stream of the same frames as on a control connection.
//!
//! - *In*: the bridge writes pieces (a [`DataHeader`] and its bytes) into free slots of the server's memory, cut as [`chunk_len`] says. The
//!   session's n-th piece goes to slot n modulo their number, so that the server knows in advance where data will lie. Data whose stream may stand
//!   still for long (behind a host function, or once a stream has waited for a word of memory) and late data wait for grants
//!   ([`frame::DATA_ASK`]). Granted data has slots of its own ([`GRANTED_SLOTS`]), in any order. The server copies it out as it comes, so it never
//!   waits for data of later commands, which stays in the other slots until those commands are executed.
//! - *Out*: the server writes to the place that the command names in the client's memory, by the key from a [`frame::REGION_KEY`]. Immediate data
//!   says what was written.
//!
//! **End.** The bridge sends [`frame::BYE`] and shuts its direction down; the worker releases all memory and then closes the socket. A worker that
//! ends the session does the same: `BYE` with the reason, memory released, socket closed. A closed socket therefore means that the peer no longer
//! touches the memory.

use thiserror::Error;
use zerocopy::FromBytes;

use crate::schema::{layouts, numbers};
use crate::version::{Mismatch, Speaks, Version};

/// The bytes `rGPUlink`, with which both greetings begin.
pub const MAGIC: u64 = u64::from_le_bytes(*b"rGPUlink");
/// Default TCP port of `rgpu-server`.
pub const DEFAULT_PORT: u16 = 9700;
/// Largest body of a frame, in bytes.
pub const MAX_FRAME: u32 = 32 << 20;
/// Most bytes behind one [`DataHeader`].
pub const MAX_DATA: u32 = 4 << 20;
/// Of longer pieces of `In` data the server says what it grants without being asked.
pub const EAGER_PIECE: u64 = 1 << 20;
/// Eager bytes of a session that any server lets await their place at one time.
pub const EAGER: u64 = 16 << 20;
/// Most bytes of a question ([`purpose::ASK`]).
pub const MAX_QUESTION: u32 = 4096;
/// Set in [`DataHeader::len`]: these bytes are eager.
pub const EAGER_FLAG: u32 = 1 << 31;
/// Set in [`DataHeader::len`]: no bytes follow but the BLAKE3 hash of so many bytes at this offset, which are a block ([`CACHE_BLOCK`]). The server says with [`frame::DATA_KNOWN`] whether it has them.
pub const HASH_FLAG: u32 = 1 << 30;
/// Set in [`DataHeader::len`]: no bytes follow, because they are part of a block that the server has said it has.
pub const KNOWN_FLAG: u32 = 1 << 29;
/// Set in [`DataHeader::len`]: the server may keep these bytes, so as to have them the next time.
pub const KEEP_FLAG: u32 = 1 << 28;
/// Set in [`DataHeader::len`], to a server of version 2.1 or later: the bytes follow compressed. First comes how many bytes that is, as u32, which are fewer than [`DataHeader::len`] says, then one LZ4
/// block without a header.
pub const COMPRESSED_FLAG: u32 = 1 << 27;
/// All flags of [`DataHeader::len`].
pub const DATA_FLAGS: u32 = EAGER_FLAG | HASH_FLAG | KNOWN_FLAG | KEEP_FLAG | COMPRESSED_FLAG;
/// The version from which on a server takes compressed data.
pub const COMPRESSED_SINCE: Version = Version { major: 2, minor: 1 };
/// Bytes of a block, the unit in which a server knows data: a piece is cut at multiples of this, and its last block may be shorter.
pub const CACHE_BLOCK: u64 = MAX_DATA as u64;
/// `flags` of [`Attach`]: the client's threads sleep by futex on the channel's words. Otherwise a write to the wake eventfd reaches them.
pub const ATTACH_FUTEX: u32 = 1;
/// `flags` of [`Attach`]: the bridge's process may be replaced by another one. The last descriptor is the socket of packets on which that one says so ([`frame::TAKE_OVER`]).
pub const ATTACH_SUCCESSION: u32 = 2;
/// `flags` of [`RegionAdd`]: a descriptor comes along, and extents are offsets in its file.
pub const REGION_OWN_MEMORY: u32 = 1;
/// `flags` of [`RegionAdd`]: the worker may only read.
pub const REGION_READ_ONLY: u32 = 2;
/// Most queues of a `verbs` session: one for messages, the others for data.
pub const MAX_QUEUES: usize = 8;
/// How many of a `verbs` server's slots, the last ones, are for granted data.
pub const GRANTED_SLOTS: u32 = 8;
/// Most bytes of records that a `verbs` bridge may have sent and the server not taken ([`frame::COMMANDS_TAKEN`]). The server reads everything else
/// at once, however long one command keeps it.
pub const COMMANDS_AHEAD: u64 = 1 << 20;
/// Bytes of a `tcp` session's control stream after whose arrival [`frame::RECEIVED`] says so, at the latest.
pub const ACKNOWLEDGE_CONTROL: u64 = 64 << 10;
/// The same for the stream of a data connection to the server.
pub const ACKNOWLEDGE_IN: u64 = 1 << 20;
/// The same for the stream of a data connection to the bridge.
pub const ACKNOWLEDGE_OUT: u64 = 1 << 20;
/// Where a piece's bytes begin in a slot, in bytes. The header ends there, so that one write carries both and the bytes are well aligned.
pub const SLOT_DATA: u32 = 64;
/// Most devices that a session can [ask for](Hello::devices). The field has a number in its type, because rustc 1.95 ends with an internal error at some uses of `Hello` otherwise.
pub const MAX_DEVICE_LIST: usize = 32;
/// `region` of [`RegionKey`]: the channel's arena.
pub const ARENA_KEY: u32 = u32::MAX;
/// `reserved` of the first [`DirectHeader`] on a connection, whose number is 0, to a server of version 2.2 or later: a [`DirectQueue`] follows, because the
/// connecting side would like to send pieces over verbs.
pub const DIRECT_VERBS: u32 = 1;
/// The version from which on a server understands [`DIRECT_VERBS`].
pub const DIRECT_VERBS_SINCE: Version = Version { major: 2, minor: 2 };

impl DirectHeader {
    /// The bytes that follow, if a correct peer sends this header after the piece with the number `last`.
    ///
    /// # Errors
    /// Says in words what is wrong.
    pub fn check(&self, last: u64) -> Result<usize, String> {
        let DirectHeader { number, len, reserved } = *self;
        if number <= last {
            return Err(format!("piece {number} after piece {last}"));
        }
        if u64::from(len) > crate::ops::direct::MAX_PIECE || reserved != 0 {
            return Err(format!("piece {number} with {len} bytes and {reserved} where 0 belongs"));
        }
        Ok(len as usize)
    }

    /// The header before a [`DirectQueue`].
    pub fn offer() -> DirectHeader {
        DirectHeader { number: 0, len: size_of::<DirectQueue>() as u32, reserved: DIRECT_VERBS }
    }
}

numbers! {
    /// What a connection is for.
    pub mod purpose: u32 {
        /// A session's control connection over TCP.
        CONTROL = 1;
        /// A data connection of the session that the token names.
        DATA = 2;
        /// A session of this host, over a Unix socket.
        LOCAL = 3;
        /// The control connection of a session over verbs.
        VERBS = 4;
        /// A new control connection of the session that the token and the secret name, whose connections were lost.
        RESUME = 5;
        /// A client gives a token of the server's for its key being known from now on. Only under TLS; nothing follows the answer.
        JOIN = 6;
        /// Ends the session that the token and the secret name: its bridge could not say so on the control connection. The server welcomes and closes.
        END = 7;
        /// A [direct connection](crate::ops::direct) from another server's worker. The token and the secret are a ticket's; [`DirectHeader`](super::DirectHeader)s follow the answer.
        DIRECT = 8;
        /// A question that needs no session, such as for a lease. [`Hello::index`](super::Hello) bytes of it follow at once, the answer is one [`ANSWER`](super::frame::ANSWER) behind the welcome.
        ASK = 9;
    }

    /// What a client asks of its session, in bits: in [`Hello::wishes`](super::Hello) and in a channel's header. These are hints: none gives a client
    /// anything that it could not have otherwise.
    pub mod wish: u32 {
        /// The session only asks NVML's questions. The server gives it a process without CUDA contexts, which refuses every other operation.
        NVML_ONLY = 1;
        /// The client understands that it has to wait ([`Answer::Waiting`](crate::device::Answer::Waiting),
        /// [`State::Waiting`](crate::channel::State::Waiting)). A client that does not is left without an answer until its session begins.
        MAY_WAIT = 2;
    }

    /// Kinds of frames, with their bodies.
    pub mod frame: u32 {
        /// Bridge → server: one or more records, as in the ring, without padding records.
        COMMANDS = 1;
        /// Server → bridge: [`ReplyHeader`](super::ReplyHeader), payload.
        REPLY = 2;
        /// Server → bridge: one or more [`ProgressUpdate`](super::ProgressUpdate)s.
        PROGRESS = 3;
        /// Server → bridge: [`DataSent`](super::DataSent).
        DATA_SENT = 4;
        /// Either way: the sender ends the session; the body is the reason as text. Empty: as asked.
        BYE = 5;
        /// Either way, empty: still here. A bridge that expects something from the server asks after a second of silence, and the server answers. A
        /// server that is silent for ten seconds on all of its connections (`verbs`: its queue pairs) while something is expected of it is lost.
        /// `local` needs none, since a worker's death closes its socket, and ignores one that comes.
        ALIVE = 6;
        /// Bridge → worker, `local`: [`Attach`](super::Attach), then its memories, then its extents. Descriptors: one for each memory, the doorbell
        /// eventfd, unless [`ATTACH_FUTEX`](super::ATTACH_FUTEX) is set the wake eventfd, and with [`ATTACH_SUCCESSION`](super::ATTACH_SUCCESSION) a
        /// socket of packets.
        ATTACH = 7;
        /// Bridge → worker, `local`: [`RegionAdd`](super::RegionAdd), then its extents. With [`REGION_OWN_MEMORY`](super::REGION_OWN_MEMORY): one
        /// descriptor, and the extents count in it.
        REGION_ADD = 8;
        /// Bridge → worker, `local`: u32 region. Acknowledged when the worker no longer touches it.
        REGION_REMOVE = 9;
        /// Worker → bridge, `local`: [`Ack`](super::Ack), to `ATTACH`, `REGION_ADD` and `REGION_REMOVE`, in order.
        ACK = 10;
        /// Either way, `verbs`, on the control connection, once: [`Queues`](super::Queues).
        QUEUES = 11;
        /// Bridge → server, `verbs`: [`RegionKey`](super::RegionKey). Comes before the first command that has the server write into that memory.
        REGION_KEY = 12;
        /// Server → bridge, `verbs`: one or more u32: slots that are free again, in the order in which they are to be written.
        SLOTS_FREE = 13;
        /// Server → bridge, `tcp`, `verbs`: one or more [`DataGrant`](super::DataGrant)s.
        DATA_GRANT = 14;
        /// Server → bridge, `tcp`: u64: this many more bytes of eager data have found their place, or were thrown away.
        DATA_PLACED = 15;
        /// Bridge → server: [`DataAsk`](super::DataAsk): that piece of data waits for a grant. Sent before the command, because a server may read
        /// nothing behind a command while it executes it. `tcp`: only for pieces of up to [`EAGER_PIECE`](super::EAGER_PIECE) bytes; the server
        /// grants others without being asked.
        DATA_ASK = 16;
        /// Server → bridge, `verbs`: u64: this many more bytes of records were taken to be executed ([`COMMANDS_AHEAD`](super::COMMANDS_AHEAD)).
        COMMANDS_TAKEN = 17;
        /// Either way, `tcp`: one or more [`Received`](super::Received): how much of the session's streams has come. The peer need not keep it any longer. A
        /// bridge says so here only of the control stream, because a server may read nothing behind a command while it executes it; of a data connection's
        /// stream it says so on that connection, by a [`DataHeader`](super::DataHeader) of no bytes whose `seq` is 0 and whose `offset` is the number.
        RECEIVED = 18;
        /// Either way, `tcp`: the first frame on each control connection but the session's first, before its stream goes on: a
        /// [`Received`](super::Received) for each of the session's streams, in order. It does not count as part of a stream.
        RESUMED = 19;
        /// Bridge → worker, `local`, as one packet on the socket of [`ATTACH_SUCCESSION`](super::ATTACH_SUCCESSION), empty: the descriptor that comes along is a
        /// stream socket, in place of the one whose process has ended.
        TAKE_OVER = 20;
        /// Worker → bridge, `local`, the first frame on such a socket: a [`RegionAdd`](super::RegionAdd) for each region that is registered. Its extents do not
        /// follow; `extent_count` says of how many pieces of memory the region is made. Of the requests before, the list alone says which were carried out.
        TAKEN_OVER = 21;
        /// Server → bridge, `tcp`: one or more [`DataKnown`](super::DataKnown), one for each [`HASH_FLAG`](super::HASH_FLAG).
        DATA_KNOWN = 22;
        /// Server → client, to a question ([`purpose::ASK`](super::purpose::ASK)): the answer as JSON.
        ANSWER = 23;
        /// Bridge → worker, `local`, as one packet on the socket of [`ATTACH_SUCCESSION`](super::ATTACH_SUCCESSION), empty: the client was stopped, and its memory must not be touched.
        PAUSE = 24;
        /// Worker → bridge, in the same way: nothing of the worker touches it any more, and commands stay in the ring. None comes if work that uses the memory does not end.
        PAUSED = 25;
        /// Bridge → worker, in the same way: the client goes on. [`TAKE_OVER`](Self::TAKE_OVER) says the same.
        CONTINUE = 26;
    }

    /// Kinds of [`ProgressUpdate`](super::ProgressUpdate).
    pub mod progress: u32 {
        /// `executed`.
        EXECUTED = 1;
        /// A stream's word.
        STREAM = 2;
        /// A context's error word.
        ERROR = 3;
        /// `released`, where the server knows more than the bridge. Over tcp it does not: the bridge releases what it has sent.
        RELEASED = 4;
        /// `output`: its value.
        OUTPUT = 5;
    }
}

layouts! {
    /// First message on every connection, from the bridge.
    pub struct Hello {
        /// [`MAGIC`].
        pub magic: u64,
        /// What the bridge speaks for this client: the older of its own version and the client's.
        pub version: Version,
        /// One of [`purpose`].
        pub purpose: u32,
        /// The fingerprint of `version`.
        pub fingerprint: u64,
        /// `DATA`, `RESUME`, `END`, and under TLS every connection of a session: the session's token. `DIRECT`: the ticket's. Otherwise zero.
        pub token: [u8; 16],
        /// `DATA`: which of the session's data connections this is. `CONTROL`: how many the bridge would like. `ASK`: bytes of the question, at most [`MAX_QUESTION`]. Otherwise zero.
        pub index: u32,
        /// Process id of the program, in its own namespace; for display.
        pub pid: u32,
        /// Reply slots of the channel. Replies name one below this.
        pub slot_count: u32,
        /// Bits of [`wish`]. Zero on a data connection.
        pub wishes: u32,
        /// Name of the virtual machine or host, for display. NUL-padded.
        pub client: [u8; 64],
        /// Name of the program, for display. NUL-padded.
        pub program: [u8; 32],
        /// `DATA`, `RESUME`, `END`, and under TLS every connection of a session: the session's secret. `JOIN`: the token's. `DIRECT`: the ticket's.
        /// A hello that opens a session: the key of the lease that it is to have, or zero. Otherwise zero.
        pub secret: [u8; 32],
        /// `DATA`, `RESUME`: which of the session's links the connection belongs to. The first link is 0; each attempt to resume has a higher number.
        pub attempt: u32,
        /// Zero.
        pub reserved: u32,
        /// The devices that the session asks for, by the server's numbers plus 1, in the order in which it is to have them. 0: no more; all 0: any.
        /// Zero on a data connection.
        pub devices: [u8; 32],
    }

    /// Answer to every [`Hello`].
    ///
    /// While no worker is ready for a session, the server answers a bridge that [may wait](wish::MAY_WAIT) with
    /// [`Answer::Waiting`](crate::device::Answer::Waiting), again each second or so; another `Welcome` follows. A bridge leaves the queue by closing
    /// its connection.
    pub struct Welcome {
        /// [`MAGIC`].
        pub magic: u64,
        /// The server's version, also when it refuses the bridge's.
        pub version: Version,
        /// [`crate::device::Answer`], by number.
        pub status: u32,
        /// The fingerprint of `version`.
        pub fingerprint: u64,
        /// Names the session on its other connections. Random.
        pub token: [u8; 16],
        /// Data connections that the bridge must open.
        pub data_connections: u32,
        /// With [`Answer::Waiting`](crate::device::Answer::Waiting): sessions that the server serves before this one.
        pub ahead: u32,
        /// The server's host name. NUL-padded.
        pub server: [u8; 64],
        /// Why the server refuses. NUL-padded.
        pub reason: [u8; 256],
        /// Proves that a later connection comes from the session's bridge. Random, and nobody else's to know.
        pub secret: [u8; 32],
        /// Seconds for which the server keeps the session when its connections are lost. 0: it ends with them.
        pub grace: u32,
        /// MiB of the session's data that may be sent eagerly and await their place, `tcp`. Fewer than [`EAGER`] stand for as many as that.
        pub eager: u32,
        /// Under TLS, the SHA-256 of the public key that the session's connections have; otherwise zero. The key exists for this session only, and the server's worker has it.
        pub session_key: [u8; 32],
        /// Whom the server takes the client for. NUL-padded.
        pub principal: [u8; 64],
        /// 1: the server keeps what the session sends over `tcp`, and need not be sent it again.
        pub cache: u32,
        /// Zero.
        pub unused: u32,
    }

    /// Begins every frame; `len` bytes of body follow.
    pub struct FrameHeader {
        /// One of [`frame`].
        pub kind: u32,
        /// Bytes of the body, at most [`MAX_FRAME`].
        pub len: u32,
    }

    /// An entry of [`frame::DATA_GRANT`]: there is room for the piece up to an offset, or there will be without anything else of the session
    /// happening first.
    pub struct DataGrant {
        /// The command.
        pub seq: u64,
        /// Which of its pieces of data.
        pub piece: u32,
        /// Zero.
        pub reserved: u32,
        /// Bytes before this offset may be sent.
        pub upto: u64,
    }

    /// Body of [`frame::DATA_ASK`].
    pub struct DataAsk {
        /// The command.
        pub seq: u64,
        /// Which of its pieces of data.
        pub piece: u32,
        /// Zero.
        pub reserved: u32,
    }

    /// Body of [`frame::REPLY`]; the payload follows.
    pub struct ReplyHeader {
        /// The command that it answers.
        pub seq: u64,
        /// Its reply slot.
        pub slot: u32,
        /// [`crate::Status`], by number.
        pub status: u32,
    }

    /// A change of one word of the progress area ([`crate::channel::Progress`]).
    pub struct ProgressUpdate {
        /// One of [`progress`].
        pub kind: u32,
        /// Stream or context; 0 where there is none. For [`progress::ERROR`], bit 31 means sticky.
        pub index: u32,
        /// The new `seq`.
        pub seq: u64,
        /// [`progress::ERROR`]: the [`crate::Status`], by number; 0 clears. [`progress::OUTPUT`]: the bytes. Otherwise 0.
        pub value: u64,
    }

    /// Body of [`frame::DATA_SENT`]: all `Out` data of a command has been sent.
    pub struct DataSent {
        /// The command.
        pub seq: u64,
        /// Bytes in all.
        pub bytes: u64,
    }

    /// Begins each part of a piece on a data connection; `len` bytes follow.
    pub struct DataHeader {
        /// The command that names the data.
        pub seq: u64,
        /// Offset of these bytes in that piece of bulk data.
        pub offset: u64,
        /// Which of the command's pieces of bulk data.
        pub piece: u32,
        /// Bytes that follow, at most [`MAX_DATA`]; over `tcp` with [`EAGER_FLAG`] where no grant covers them, with [`HASH_FLAG`], [`KNOWN_FLAG`] or [`KEEP_FLAG`] in a session with a cache, and with [`COMPRESSED_FLAG`] where fewer bytes follow.
        pub len: u32,
    }

    /// Begins each piece on a [direct connection](crate::ops::direct); `len` bytes follow.
    pub struct DirectHeader {
        /// The piece's number, which is higher than that of the one before.
        pub number: u64,
        /// Bytes that follow, from 1 to [`MAX_PIECE`](crate::ops::direct::MAX_PIECE). 0: the piece will not come.
        pub len: u32,
        /// Zero, or [`DIRECT_VERBS`].
        pub reserved: u32,
    }

    /// One end's queue pair for the pieces of a [direct connection](crate::ops::direct), as the other end must know it.
    pub struct DirectQueue since 2 {
        /// Its number. 0: this end cannot use verbs; `reason` says why, and the other fields are 0.
        pub queue_pair: u32,
        /// The first packet number.
        pub psn: u32,
        /// MTU of this end's port, in bytes. The smaller of the two is used.
        pub mtu: u32,
        /// Receiving end: receives that it has posted, each for one piece. Sending end: 0.
        pub receives: u32,
        /// InfiniBand's local identifier; 0 with RoCE.
        pub lid: u16,
        /// 1: packets carry a global route.
        pub global: u16,
        /// This end's GID, in network byte order.
        pub gid: [u8; 16],
        /// Why there is no queue pair. NUL-padded.
        pub reason: [u8; 220],
    }

    /// An entry of [`frame::DATA_KNOWN`].
    pub struct DataKnown {
        /// The command.
        pub seq: u64,
        /// Offset of the block in that piece of bulk data.
        pub offset: u64,
        /// Which of the command's pieces of bulk data.
        pub piece: u32,
        /// 1: the server has the block. 0: it does not.
        pub known: u32,
    }

    /// An entry of [`frame::RECEIVED`] and [`frame::RESUMED`].
    pub struct Received {
        /// The stream: 0 is the control connections', 1 the first data connections', and so on.
        pub stream: u32,
        /// Zero.
        pub reserved: u32,
        /// Bytes of the stream that have come since the session began, over all of its links. Greetings and [`frame::RESUMED`] are not part of a stream.
        pub bytes: u64,
    }

    /// Fixed part of [`frame::ATTACH`].
    pub struct Attach {
        /// Memories that follow.
        pub memory_count: u32,
        /// Extents that follow them: the channel's memory, in order.
        pub extent_count: u32,
        /// [`ATTACH_FUTEX`], [`ATTACH_SUCCESSION`].
        pub flags: u32,
        /// Zero.
        pub reserved: u32,
        /// The channel's size in bytes.
        pub size: u64,
    }

    /// One memory of the client: part of a file, at an address that [`crate::device::Extent`]s count in.
    pub struct Memory {
        /// First (guest-physical) address.
        pub addr: u64,
        /// Bytes.
        pub size: u64,
        /// Offset in the file.
        pub file_offset: u64,
    }

    /// Fixed part of [`frame::REGION_ADD`].
    pub struct RegionAdd {
        /// Region.
        pub region: u32,
        /// Extents that follow.
        pub extent_count: u32,
        /// [`REGION_OWN_MEMORY`], [`REGION_READ_ONLY`].
        pub flags: u32,
        /// Zero.
        pub reserved: u32,
        /// Bytes in all.
        pub size: u64,
    }

    /// Body of [`frame::ACK`]; the reason follows as text.
    pub struct Ack {
        /// [`crate::device::Answer`], by number.
        pub status: u32,
        /// Zero.
        pub reserved: u32,
    }

    /// Body of [`frame::QUEUES`]: what the peer needs to connect to this side's queue pairs and to use its memory.
    pub struct Queues {
        /// Queue pairs in all, 2 to [`MAX_QUEUES`]. The bridge says how many it would like; the server answers with as many or fewer, and the bridge
        /// leaves the others unused.
        pub count: u32,
        /// Receives that this side has ready on each queue.
        pub receives: u32,
        /// Largest message in bytes, header included.
        pub message: u32,
        /// MTU of this side's port, in bytes. The smaller of the two is used.
        pub mtu: u32,
        /// First packet number of each queue pair.
        pub psn: u32,
        /// InfiniBand's local identifier; 0 with RoCE.
        pub lid: u16,
        /// 1: packets carry a global route.
        pub global: u16,
        /// This side's GID, in network byte order.
        pub gid: [u8; 16],
        /// Numbers of the queue pairs; the first `count` are valid.
        pub queue_pairs: [u32; MAX_QUEUES],
        /// Server: address of its slots. Bridge: 0, as in the next three fields.
        pub slots_address: u64,
        /// Server: the slots' key.
        pub slots_key: u32,
        /// Server: number of slots, all free at first; more than [`GRANTED_SLOTS`].
        pub slots: u32,
        /// Server: bytes from one slot to the next. A piece's bytes begin [`SLOT_DATA`] bytes into its slot, its [`DataHeader`] right before them.
        pub slot_size: u32,
        /// Most writes that this side has under way on each queue. The bridge asks the server for as many as it has itself; the server answers with
        /// as many or fewer.
        pub depth: u32,
    }

    /// Begins every message of a `verbs` session; bytes of the stream of frames follow, or none.
    pub struct MessageHeader {
        /// Bytes that follow.
        pub len: u32,
        /// Which message of the session it is, counted from 0 each way. A device that loses or repeats one breaks what a reliable connection
        /// promises; this notices it.
        pub number: u32,
        /// For each queue: receives that the sender has posted again since its last message.
        pub credits: [u16; MAX_QUEUES],
    }

    /// Body of [`frame::REGION_KEY`]: memory of the client that the server may write until the bridge removes the region.
    pub struct RegionKey {
        /// Address of the first byte.
        pub address: u64,
        /// Bytes.
        pub size: u64,
        /// The region, or [`ARENA_KEY`] for the arena.
        pub region: u32,
        /// The key. It covers exactly this memory.
        pub key: u32,
    }
}

/// Size of the parts into which a `verbs` bridge cuts `len` bytes of `In` data, in bytes (the last part is shorter). There are enough parts for each
/// of the `queues` for data to have two under way, so that the pipeline fills early, but none is below 64 KiB for that. Long data is cut into parts
/// of `most` bytes, what a slot holds.
pub fn chunk_len(len: u64, queues: u64, most: u64) -> u64 {
    const LEAST: u64 = 64 << 10;
    let even = (len / (2 * queues.max(1))).checked_next_multiple_of(4096).unwrap_or(most);
    even.clamp(LEAST.min(most), most)
}

/// Bytes with which a greeting of every version begins: magic and version.
const PREAMBLE: usize = 12;

const _: () = {
    assert!(std::mem::offset_of!(Hello, magic) == 0 && std::mem::offset_of!(Hello, version) + 4 == PREAMBLE);
    assert!(
        std::mem::offset_of!(Welcome, magic) == 0 && std::mem::offset_of!(Welcome, version) + 4 == PREAMBLE
    );
};

/// [`Hello`] or [`Welcome`].
pub trait Greeting: FromBytes {
    /// The sender's version and its fingerprint.
    fn claim(&self) -> (Version, u64);
}

impl Greeting for Hello {
    fn claim(&self) -> (Version, u64) {
        (self.version, self.fingerprint)
    }
}

impl Greeting for Welcome {
    fn claim(&self) -> (Version, u64) {
        (self.version, self.fingerprint)
    }
}

/// Why a greeting is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadGreeting {
    /// Whoever sent it does not speak rgpu.
    #[error("it does not speak rgpu: its first bytes are {0:#x}")]
    Magic(u64),
    /// The sender's version does not fit.
    #[error("{}", .0.describe("the peer speaks", "this side speaks"))]
    Version(Mismatch),
}

/// Judges the bytes of a greeting that have come so far. `None`: more are needed, [`size_of::<T>()`](size_of) in all. A greeting comes with the
/// version that the two peers speak from now on.
///
/// Another major version is refused as soon as the first 12 bytes are there, since the rest may be shorter.
///
/// # Errors
/// [`BadGreeting`] if the two cannot talk to each other.
pub fn greeting<T: Greeting>(bytes: &[u8], ours: &Speaks<'_>) -> Result<Option<(T, Version)>, BadGreeting> {
    let Ok((magic, rest)) = u64::read_from_prefix(bytes) else { return Ok(None) };
    if magic != MAGIC {
        return Err(BadGreeting::Magic(magic));
    }
    let Ok((version, _)) = Version::read_from_prefix(rest) else { return Ok(None) };
    ours.check_major(version).map_err(BadGreeting::Version)?;
    let Ok((greeting, _)) = T::read_from_prefix(bytes) else { return Ok(None) };
    let (version, fingerprint) = greeting.claim();
    ours.agree(version, fingerprint).map(|agreed| Some((greeting, agreed))).map_err(BadGreeting::Version)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::version::{OURS, VERSION};
    use proptest::prelude::*;
    use zerocopy::{FromZeros, IntoBytes};

    fn hello() -> Hello {
        Hello { magic: MAGIC, version: VERSION, fingerprint: OURS.fingerprint(), ..Hello::new_zeroed() }
    }

    #[test]
    fn a_greeting_is_judged_when_enough_of_it_is_there() {
        let bytes = hello();
        let bytes = bytes.as_bytes();
        for len in 0..bytes.len() {
            assert_eq!(greeting::<Hello>(&bytes[..len], &OURS), Ok(None), "{len} bytes");
        }
        assert_eq!(greeting::<Hello>(bytes, &OURS), Ok(Some((hello(), VERSION))));
    }

    #[test]
    fn another_major_version_is_refused_after_twelve_bytes() {
        let theirs = Version { major: 1, minor: 0 };
        let other = Hello { version: theirs, ..hello() };
        let refused = greeting::<Hello>(&other.as_bytes()[..12], &OURS);
        assert_eq!(
            refused,
            Err(BadGreeting::Version(Mismatch { ours: VERSION, theirs, fingerprints: None }))
        );
        assert_eq!(greeting::<Hello>(&other.as_bytes()[..11], &OURS), Ok(None));
    }

    #[test]
    fn a_build_of_other_sources_is_refused() {
        let other = Hello { fingerprint: !OURS.fingerprint(), ..hello() };
        let refused = greeting::<Hello>(other.as_bytes(), &OURS).unwrap_err();
        assert!(refused.to_string().contains("different sources"), "{refused}");
    }

    /// A server of version 2.1 with a bridge of 2.0, and the reverse: the session speaks 2.0 either way.
    #[test]
    fn the_older_minor_version_is_spoken() {
        let fingerprints = [OURS.fingerprint(), 77];
        let (newer, older) =
            (Speaks::new(VERSION.major, &fingerprints), Speaks::new(VERSION.major, &fingerprints[..1]));
        for (mine, theirs) in [(newer, older), (older, newer)] {
            let said = Welcome {
                magic: MAGIC,
                version: theirs.version(),
                fingerprint: theirs.fingerprint(),
                ..Welcome::new_zeroed()
            };
            let (_, agreed) = greeting::<Welcome>(said.as_bytes(), &mine).unwrap().unwrap();
            assert_eq!(agreed, older.version());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..400), magic: bool, version: bool) {
            let mut bytes = bytes;
            // Rubbish seldom gets past the first check.
            for (right, good) in [(magic, &MAGIC.to_le_bytes()[..]), (version, VERSION.as_bytes())] {
                let at = if good.len() == 8 { 0 } else { 8 };
                if right && bytes.len() >= at + good.len() {
                    bytes[at..at + good.len()].copy_from_slice(good);
                }
            }
            if let Ok(Some((greeting, agreed))) = greeting::<Welcome>(&bytes, &OURS) {
                prop_assert!(greeting.magic == MAGIC && agreed <= VERSION && agreed <= greeting.version);
            }
            let _ = greeting::<Hello>(&bytes, &OURS);
        }
    }
}
