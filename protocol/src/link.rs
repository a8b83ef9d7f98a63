//! The link between the bridge and a server: greetings, then frames.
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
//! **Greetings.** [`Hello`] and [`Welcome`] begin with the sender's version and fingerprint
//! ([`crate::version`]). Either side judges what it receives by [`greeting`].
//!
//! **tcp.** The control connection carries frames ([`FrameHeader`]) both ways. The bridge forwards the
//! records of the ring in [`frame::COMMANDS`], unchanged and in order. Bulk data crosses on the data
//! connections: [`DataHeader`]s, each followed by its bytes. A data header names the command and counts the
//! command's pieces of bulk data ([`crate::data::DataUse`], from 0, both directions together).
//!
//! - *In* (to the server): the bridge may send a command's data before, with or after the command, in the
//!   order of the commands of one stream. The server limits how much: the bridge may send *eagerly*, without
//!   a grant, while at most [`Welcome::eager`] of the session's bytes wait for room at the server, and the
//!   rest when the server grants it ([`frame::DATA_GRANT`]). A piece of up to [`EAGER_PIECE`] bytes is sent
//!   eagerly as a whole or not at all. So data of a stream that makes no progress never delays another
//!   stream's data. A [`HostIn::Late`](crate::data::HostIn) piece is sent only when granted.
//! - *Out* (to the client): the server sends a command's data at any time after it took the command. Before
//!   it sends anything that depends on the data's arrival, it sends [`frame::DATA_SENT`] on the control
//!   connection, and the bridge reads no further there until all of the data is in the client's memory.
//!   `DATA_SENT` comes exactly once for every command that names `Out` data, even when the command failed and
//!   fewer bytes, or none, were sent.
//!
//! The bytes that cross the control connection in one direction are a *stream*, and so are those of each data
//! connection. Each end acknowledges what it has received of each stream ([`frame::RECEIVED`]), and keeps
//! what it has sent until the peer has acknowledged it. When a connection is lost, the bridge opens new ones
//! ([`purpose::RESUME`], `DATA`), both ends report how much they have received ([`frame::RESUMED`]), and
//! every stream continues after that byte. Only [`frame::BYE`] ends a session; a server keeps one without
//! connections for [`Welcome::grace`] seconds.
//!
//! A server may have kept what its client has sent before ([`Welcome::cache`]). Then the bridge can send it
//! the hash of a block of *In* data ([`HASH_FLAG`]). Once the server has answered that it has the block
//! ([`frame::DATA_KNOWN`]), the bridge refers to the block ([`KNOWN_FLAG`]) instead of sending its bytes. The
//! rules of what may be sent eagerly and what needs a grant are the same. The server keeps a block that it
//! has reported until all of it has come, as a reference or as bytes. A bridge waits for such an answer only
//! if it must, because a command is executed only as far as its data has come.
//!
//! A piece of no bytes is not sent at all. Every data connection has its own [`Hello`] (with the session's
//! token) and [`Welcome`]; frames may follow once all are welcomed.
//!
//! **TLS.** The connection on which the bridge greets the server belongs to the daemon, and stays open
//! without frames as long as the session: the server may send [`frame::BYE`] on it. After the welcome the
//! bridge opens all of the session's connections, control and data. Each has its own TLS hello with the
//! session's token as a name in the clear ([`Welcome::token`]), and on each the bridge trusts the key with
//! the fingerprint [`Welcome::session_key`]. Each begins with a [`Hello`] with token and secret, and a
//! [`Welcome`].
//!
//! **local.** A Unix stream socket. After the welcome the bridge sends [`frame::ATTACH`], and later
//! [`frame::REGION_ADD`] and [`frame::REGION_REMOVE`], and [`frame::MEMORIES`] when the client has got other
//! memory; the worker answers each with [`frame::ACK`].
//! Descriptors travel with the first byte of their frame. Commands, replies and progress cross in the
//! channel's memory. With [`ATTACH_SUCCESSION`], a socket that closes without a [`frame::BYE`] does not end
//! the session: another process of the bridge passes in another socket ([`frame::TAKE_OVER`]). The session
//! ends when no process is left that could.
//!
//! **verbs.** The TCP control connection stays open for the whole session, for `ALIVE` and `BYE`. After the
//! welcome both sides send one [`frame::QUEUES`], the bridge first, and then connect their queue pairs: queue
//! 0 for messages, the others for data. A message is a [`MessageHeader`] and some bytes; the bytes of all
//! messages one way form a stream of the same frames as on a control connection.
//!
//! - *In*: the bridge writes pieces (a [`DataHeader`] and its bytes) into free slots of the server's memory,
//!   cut as [`chunk_len`] says. The session's n-th piece goes to slot n modulo their number, so that the
//!   server knows in advance where data will arrive. Data whose stream may not progress for a long time
//!   (after a host function, or once a stream has waited for a word of memory) and late data wait for grants
//!   ([`frame::DATA_ASK`]). Granted data has slots of its own ([`GRANTED_SLOTS`]), in any order. The server
//!   copies it out as it arrives, so it never waits for data of later commands, which stays in the other
//!   slots until those commands are executed.
//! - *Out*: the server writes to the place that the command names in the client's memory, with the key from a
//!   [`frame::REGION_KEY`]. Immediate data says what was written.
//!
//! **End.** The bridge sends [`frame::BYE`] and shuts its direction down; the worker releases all memory and
//! then closes the socket. A worker that ends the session does the same: `BYE` with the reason, memory
//! released, socket closed. A closed socket therefore means that the peer no longer touches the memory.

use thiserror::Error;
use zerocopy::{FromBytes, FromZeros};

use crate::device::{Answer, reason_text};
use crate::schema::{layouts, numbers};
use crate::version::OURS;
use crate::version::rules::{Mismatch, Speaks, Version};

/// The bytes `rGPUlink`, with which both greetings begin.
pub const MAGIC: u64 = u64::from_le_bytes(*b"rGPUlink");
/// Default TCP port of `rgpu-server`.
pub const DEFAULT_PORT: u16 = 9700;
/// Maximum size of a frame's body in bytes.
pub const MAX_FRAME: u32 = 32 << 20;
/// Maximum bytes after one [`DataHeader`].
pub const MAX_DATA: u32 = 4 << 20;
/// The server grants pieces of `In` data that are longer than this without being asked.
pub const EAGER_PIECE: u64 = 1 << 20;
/// Eager bytes of a session that every server lets wait for room at one time.
pub const EAGER: u64 = 16 << 20;
/// Maximum size of a question ([`purpose::ASK`]) in bytes.
pub const MAX_QUESTION: u32 = 4096;
/// Set in [`DataHeader::len`]: these bytes are eager.
pub const EAGER_FLAG: u32 = 1 << 31;
/// Set in [`DataHeader::len`]: instead of the bytes at this offset, which are a block ([`CACHE_BLOCK`]),
/// their BLAKE3 hash follows. The server answers with [`frame::DATA_KNOWN`] whether it has the block.
pub const HASH_FLAG: u32 = 1 << 30;
/// Set in [`DataHeader::len`]: no bytes follow, because they are part of a block that the server has reported
/// to have.
pub const KNOWN_FLAG: u32 = 1 << 29;
/// Set in [`DataHeader::len`]: the server may keep these bytes, so that they need not be sent again.
pub const KEEP_FLAG: u32 = 1 << 28;
/// Set in [`DataHeader::len`], to a server of version 2.1 or later, and to a bridge that
/// [takes it](wish::COMPRESSED): the bytes follow compressed. First comes their compressed size as u32, which
/// is less than [`DataHeader::len`], then one LZ4 block without a header.
pub const COMPRESSED_FLAG: u32 = 1 << 27;
/// All flags of [`DataHeader::len`].
pub const DATA_FLAGS: u32 = EAGER_FLAG | HASH_FLAG | KNOWN_FLAG | KEEP_FLAG | COMPRESSED_FLAG;
/// The first version in which a server takes compressed data.
pub const COMPRESSED_SINCE: Version = Version { major: 2, minor: 1 };
/// The first version in which a bridge takes compressed data, if it [says so](wish::COMPRESSED).
pub const COMPRESSED_OUT_SINCE: Version = Version { major: 2, minor: 2 };
/// The first version in which a session over verbs survives its connections and the bridge's process.
/// (Versions 2.2 to 2.4 had another way for connections alone; with them such a session ends.)
pub const VERBS_RESUME_SINCE: Version = Version { major: 2, minor: 5 };
/// The first version in which a server can do with several [keys](RegionKey) for a memory at a time.
pub const SEVERAL_KEYS_SINCE: Version = Version { major: 2, minor: 7 };
/// The first version in which a worker can be told of other [memories](frame::MEMORIES) of the client.
pub const MEMORIES_SINCE: Version = Version { major: 2, minor: 8 };
/// Bytes of a block, the unit in which a server knows data: a piece is cut at multiples of this, and its last
/// block may be shorter.
pub const CACHE_BLOCK: u64 = MAX_DATA as u64;
/// `flags` of [`Attach`]: the client's threads sleep by futex on the channel's words. Otherwise a write to
/// the wake eventfd reaches them.
pub const ATTACH_FUTEX: u32 = 1;
/// `flags` of [`Attach`]: another process may replace the bridge's process. The last descriptor is the packet
/// socket on which the new process announces itself ([`frame::TAKE_OVER`]).
pub const ATTACH_SUCCESSION: u32 = 2;
/// `flags` of [`RegionAdd`]: a descriptor is attached, and extents are offsets in its file.
pub const REGION_OWN_MEMORY: u32 = 1;
/// `flags` of [`RegionAdd`]: the worker may only read.
pub const REGION_READ_ONLY: u32 = 2;
/// Maximum queues of a `verbs` session: one for messages, the others for data.
pub const MAX_QUEUES: usize = 8;
/// How many of a `verbs` server's slots, the last ones, are for granted data.
pub const GRANTED_SLOTS: u32 = 8;
/// How many [keys](RegionKey) a `verbs` server knows at most: it forgets none before it is told one more.
/// Twice as many as a bridge has commands under way that wait for data, because keys that are void stay for a
/// while.
pub const REGION_KEYS: usize = 1 << 17;
/// Maximum bytes of records that a `verbs` bridge may have sent and the server not taken
/// ([`frame::COMMANDS_TAKEN`]). The server reads everything else at once, however long a command takes.
pub const COMMANDS_AHEAD: u64 = 1 << 20;
/// A peer acknowledges a `tcp` session's control stream ([`frame::RECEIVED`]) at least once in this many
/// bytes.
pub const ACKNOWLEDGE_CONTROL: u64 = 64 << 10;
/// The same for the stream of a data connection to the server.
pub const ACKNOWLEDGE_IN: u64 = 1 << 20;
/// The same for the stream of a data connection to the bridge.
pub const ACKNOWLEDGE_OUT: u64 = 1 << 20;
/// Offset of a piece's bytes in a slot, in bytes. The header ends there, so that one write carries both and
/// the bytes are aligned.
pub const SLOT_DATA: u32 = 64;
/// Maximum devices that a session can [ask for](Hello::devices). The field's type repeats the number, because
/// with the constant rustc 1.95 fails with an internal error at some uses of `Hello`.
pub const MAX_DEVICE_LIST: usize = 32;
/// `region` of [`RegionKey`]: the channel's arena.
pub const ARENA_KEY: u32 = u32::MAX;
/// `reserved` of the first [`DirectHeader`] on a connection, whose number is 0, to a server of version 2.2 or
/// later: a [`DirectQueue`] follows, because the connecting side would like to send pieces over verbs.
pub const DIRECT_VERBS: u32 = 1;
/// The version from which on a server understands [`DIRECT_VERBS`].
pub const DIRECT_VERBS_SINCE: Version = Version { major: 2, minor: 2 };

impl DirectHeader {
    /// The number of bytes that follow, if a correct peer may send this header after the piece with the
    /// number `last`.
    ///
    /// # Errors
    /// What is wrong.
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
        /// A new control connection of the session that the token and the secret name, after its connections
        /// were lost.
        RESUME = 5;
        /// A client presents a token of the server, so that the server trusts the client's key from now on.
        /// Only under TLS; nothing follows the answer.
        JOIN = 6;
        /// Ends the session that the token and the secret name, if its bridge could not do so on the control
        /// connection. The server sends a welcome and closes.
        END = 7;
        /// A [direct connection](crate::ops::direct) from another server's worker. The token and the secret
        /// are a ticket's; [`DirectHeader`](super::DirectHeader)s follow the answer.
        DIRECT = 8;
        /// A question that needs no session, such as a request for a lease. Its
        /// [`Hello::index`](super::Hello) bytes follow at once; the answer is one
        /// [`ANSWER`](super::frame::ANSWER) after the welcome.
        ASK = 9;
    }

    /// A client's wishes for its session, as bits in [`Hello::wishes`](super::Hello) and in a channel's
    /// header. They are hints: none gives a client anything that it could not have without it.
    pub mod wish: u32 {
        /// The session only sends NVML queries. The server gives it a process without CUDA contexts, which
        /// refuses every other operation.
        NVML_ONLY = 1;
        /// The client understands that it has to wait ([`Answer::Waiting`](crate::device::Answer::Waiting),
        /// [`State::Waiting`](crate::channel::State::Waiting)). A client that does not gets no answer until
        /// its session begins.
        MAY_WAIT = 2;
        /// In a hello only: the bridge takes compressed data ([`COMPRESSED_FLAG`](super::COMPRESSED_FLAG)).
        /// Without it none may be sent to it.
        COMPRESSED = 4, since 2;
        /// In a hello of `local` only: with the welcome of its session, the bridge takes the writing end of a
        /// pipe. The client counts as gone once something is written there, or nobody holds that end. Without
        /// it, the client counts as gone when the connection is closed.
        PRESENCE = 8, since 7;
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
        /// Either way: the sender ends the session; the body is the reason as text. Empty: the session ends
        /// as intended.
        BYE = 5;
        /// Either way, empty: the sender is alive. A bridge that expects something from the server sends one
        /// after a second of silence, and the server answers. A server that is silent for ten seconds on all
        /// of its connections (`verbs`: its queue pairs) while something is expected of it counts as lost.
        /// `local` needs none, since a worker's death closes its socket, and ignores any.
        ALIVE = 6;
        /// Bridge → worker, `local`: [`Attach`](super::Attach), then its memories, then its extents.
        /// Descriptors: one for each memory, the doorbell eventfd, the wake eventfd (unless
        /// [`ATTACH_FUTEX`](super::ATTACH_FUTEX) is set), and with
        /// [`ATTACH_SUCCESSION`](super::ATTACH_SUCCESSION) a packet socket.
        ATTACH = 7;
        /// Bridge → worker, `local`: [`RegionAdd`](super::RegionAdd), then its extents. With
        /// [`REGION_OWN_MEMORY`](super::REGION_OWN_MEMORY): one descriptor, and the extents are offsets in
        /// its file.
        REGION_ADD = 8;
        /// Bridge → worker, `local`: u32 region. Acknowledged when the worker no longer touches it.
        REGION_REMOVE = 9;
        /// Worker → bridge, `local`: [`Ack`](super::Ack), to `ATTACH`, `REGION_ADD`, `REGION_REMOVE` and
        /// `MEMORIES`, in order.
        ACK = 10;
        /// Either way, `verbs`, the first frame on the session's first control connection, and behind
        /// `RESUMED` on others: [`Queues`](super::Queues).
        QUEUES = 11;
        /// Bridge → server, `verbs`: [`RegionKey`](super::RegionKey). Comes before the first command that has
        /// the server write into that memory. Between `RESUMED` and `QUEUES`, since version 2.5: the same
        /// memory has this key and address from now on, because another process of the bridge has it.
        REGION_KEY = 12;
        /// Server → bridge, `verbs`: one or more u32: slots that are free again, in the order in which they
        /// are to be written.
        SLOTS_FREE = 13;
        /// Server → bridge, `tcp`, `verbs`: one or more [`DataGrant`](super::DataGrant)s.
        DATA_GRANT = 14;
        /// Server → bridge, `tcp`: u64: this many more bytes of eager data have found room, or were
        /// discarded.
        DATA_PLACED = 15;
        /// Bridge → server: [`DataAsk`](super::DataAsk): that piece of data waits for a grant. Sent before
        /// the command, because a server may read nothing after a command while it executes it. `tcp`: only
        /// for pieces of up to [`EAGER_PIECE`](super::EAGER_PIECE) bytes; the server grants others without
        /// being asked.
        DATA_ASK = 16;
        /// Server → bridge, `verbs`: u64: the server has taken this many more bytes of records for execution
        /// ([`COMMANDS_AHEAD`](super::COMMANDS_AHEAD)).
        COMMANDS_TAKEN = 17;
        /// Either way, `tcp`, and since version 2.5 `verbs`: one or more [`Received`](super::Received): how
        /// much of the session's streams has come. (`verbs` has stream 0 alone.) The peer need not keep it
        /// any longer. A bridge acknowledges only the control stream in this way, because a server may read
        /// nothing after a command while it executes it. It acknowledges a data connection's stream on that
        /// connection, with a [`DataHeader`](super::DataHeader) of no bytes whose `seq` is 0 and whose
        /// `offset` is the number.
        RECEIVED = 18;
        /// Either way, the first frame on each control connection but the session's first: a
        /// [`Received`](super::Received) for each of the session's streams, in order, before the stream of
        /// `tcp` goes on; it does not count as part of a stream. `verbs`, since version 2.5: one for each
        /// queue. (Versions 2.2 to 2.4 counted requests of queue 0, too.)
        RESUMED = 19;
        /// Bridge → worker, `local`, as one packet on the socket of
        /// [`ATTACH_SUCCESSION`](super::ATTACH_SUCCESSION), empty: the attached descriptor is a stream
        /// socket, which replaces that of the process that has ended.
        TAKE_OVER = 20;
        /// Worker → bridge, `local`, the first frame on such a socket: a [`RegionAdd`](super::RegionAdd) for
        /// each region that is registered. Its extents do not follow; `extent_count` is the number of pieces
        /// of memory that the region consists of. Only this list says which of the earlier requests were
        /// carried out.
        TAKEN_OVER = 21;
        /// Server → bridge, `tcp`: one or more [`DataKnown`](super::DataKnown), one for each
        /// [`HASH_FLAG`](super::HASH_FLAG).
        DATA_KNOWN = 22;
        /// Server → client, to a question ([`purpose::ASK`](super::purpose::ASK)): the answer as JSON.
        ANSWER = 23;
        /// Bridge → worker, `local`, as one packet on the socket of
        /// [`ATTACH_SUCCESSION`](super::ATTACH_SUCCESSION), empty: the client was stopped, and the worker
        /// must not touch its memory.
        PAUSE = 24;
        /// Worker → bridge, in the same way: the worker no longer touches the memory and leaves commands in
        /// the ring. Not sent if work that uses the memory does not end.
        PAUSED = 25;
        /// Bridge → worker, in the same way: the client continues. [`TAKE_OVER`](Self::TAKE_OVER) implies the
        /// same.
        CONTINUE = 26;
        /// Server → bridge, `verbs`, between `RESUMED` and `QUEUES`: one or more [`Written`](super::Written),
        /// those of a queue in order: writes that the bridge's `RESUMED` does not count and that are in the
        /// client's memory. They came to a process that has ended.
        WRITTEN = 27, since 5;
        /// Bridge → worker, `local`: one or more [`Memory`](super::Memory)s, with a descriptor for each: the
        /// memories that the client has now, in which the extents of later `REGION_ADD`s lie. Channel and
        /// regions stay what they are. A worker that cannot map one of them refuses, and has none.
        MEMORIES = 28, since 8;
    }

    /// Kinds of [`ProgressUpdate`](super::ProgressUpdate).
    pub mod progress: u32 {
        /// `executed`.
        EXECUTED = 1;
        /// A stream's word.
        STREAM = 2;
        /// A context's error word.
        ERROR = 3;
        /// `released`. Not over tcp, where the bridge itself releases what it has sent.
        RELEASED = 4;
        /// `output`: its value.
        OUTPUT = 5;
        /// `watched`: its value. Comes before the progress and the answers by which the client learns that
        /// work is done, once a watch has asked for it ([`WATCH_TELLS`](crate::ops::memory::WATCH_TELLS)),
        /// whenever it changes. With the number N of the session's last watch:
        ///
        /// - 2 N: mirrors are as the client has them, by all that it has said.
        /// - 2 N + 1: they are so once the client has taken over the answer to this watch, which was sent.
        /// - 0: this is not known.
        WATCHED = 6, since 8;
    }
}

layouts! {
    /// First message on every connection, from the bridge.
    pub struct Hello {
        /// [`MAGIC`].
        pub magic: u64,
        /// The version that the bridge speaks for this client: the older of its own and the client's.
        pub version: Version,
        /// One of [`purpose`].
        pub purpose: u32,
        /// The fingerprint of `version`.
        pub fingerprint: u64,
        /// `DATA`, `RESUME`, `END`, and under TLS every connection of a session: the session's token.
        /// `DIRECT`: the ticket's. Otherwise zero.
        pub token: [u8; 16],
        /// `DATA`: which of the session's data connections this is. `CONTROL`: how many the bridge would
        /// like. `ASK`: bytes of the question, at most [`MAX_QUESTION`]. Otherwise zero.
        pub index: u32,
        /// Process id of the program, in its own namespace; for display.
        pub pid: u32,
        /// Number of reply slots of the channel. Replies name a slot below this.
        pub slot_count: u32,
        /// Bits of [`wish`]. Zero on a data connection.
        pub wishes: u32,
        /// Name of the virtual machine or host, for display. NUL-padded.
        pub client: [u8; 64],
        /// Name of the program, for display. NUL-padded.
        pub program: [u8; 32],
        /// `DATA`, `RESUME`, `END`, and under TLS every connection of a session: the session's secret.
        /// `JOIN`: the token's. `DIRECT`: the ticket's. A hello that opens a session: the key of the lease
        /// that the session uses, or zero. Otherwise zero.
        pub secret: [u8; 32],
        /// `DATA`, `RESUME`: which of the session's links the connection belongs to. The first link is 0;
        /// each attempt to resume has a higher number.
        pub attempt: u32,
        /// Zero.
        pub reserved: u32,
        /// The devices that the session asks for, by the server's numbers plus 1, in the order in which the
        /// session numbers them. 0: no more; all 0: any. Zero on a data connection.
        pub devices: [u8; 32],
    }

    /// Answer to every [`Hello`].
    ///
    /// While no worker is ready for a session, the server answers a bridge that [may wait](wish::MAY_WAIT)
    /// with [`Answer::Waiting`](crate::device::Answer::Waiting), again each second or so; another `Welcome`
    /// follows. A bridge leaves the queue by closing its connection.
    pub struct Welcome {
        /// [`MAGIC`].
        pub magic: u64,
        /// The server's version, also when it refuses the bridge.
        pub version: Version,
        /// [`crate::device::Answer`], by number.
        pub status: u32,
        /// The fingerprint of `version`.
        pub fingerprint: u64,
        /// Names the session on its other connections. Random.
        pub token: [u8; 16],
        /// Number of data connections that the bridge must open.
        pub data_connections: u32,
        /// With [`Answer::Waiting`](crate::device::Answer::Waiting): number of sessions that the server
        /// serves before this one.
        pub ahead: u32,
        /// The server's host name. NUL-padded.
        pub server: [u8; 64],
        /// Why the server refuses. NUL-padded.
        pub reason: [u8; 256],
        /// Proves that a later connection comes from the session's bridge. Random; the bridge tells nobody.
        pub secret: [u8; 32],
        /// Seconds for which the server keeps the session when its connections are lost. 0: it ends with
        /// them.
        pub grace: u32,
        /// `tcp`: MiB of the session's data that may be sent eagerly and wait for room. Less than [`EAGER`]
        /// stands for [`EAGER`].
        pub eager: u32,
        /// Under TLS, the SHA-256 of the public key that the session's connections use; otherwise zero. The
        /// key exists only for this session, in the server's worker.
        pub session_key: [u8; 32],
        /// The name under which the server knows the client. NUL-padded.
        pub principal: [u8; 64],
        /// 1: the server keeps what the session sends over `tcp`, so that it need not be sent again.
        pub cache: u32,
        /// Zero.
        pub unused: u32,
    }

    /// Precedes every frame; `len` bytes of body follow.
    pub struct FrameHeader {
        /// One of [`frame`].
        pub kind: u32,
        /// Bytes of the body, at most [`MAX_FRAME`].
        pub len: u32,
    }

    /// An entry of [`frame::DATA_GRANT`]: the server has room for the piece up to an offset, or will have it
    /// even if nothing else of the session happens first.
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
        /// [`progress::ERROR`]: the [`crate::Status`], by number; 0 clears. [`progress::OUTPUT`]: the bytes;
        /// [`progress::WATCHED`]: the word. Otherwise 0.
        pub value: u64,
    }

    /// Body of [`frame::DATA_SENT`]: all `Out` data of a command has been sent, or leaves now.
    pub struct DataSent {
        /// The command.
        pub seq: u64,
        /// Bytes in all.
        pub bytes: u64,
    }

    /// Precedes each part of a piece on a data connection; `len` bytes follow.
    pub struct DataHeader {
        /// The command that names the data.
        pub seq: u64,
        /// Offset of these bytes in that piece of bulk data.
        pub offset: u64,
        /// Which of the command's pieces of bulk data.
        pub piece: u32,
        /// Bytes that follow, at most [`MAX_DATA`]; over `tcp` with [`EAGER_FLAG`] if no grant covers them,
        /// with [`HASH_FLAG`], [`KNOWN_FLAG`] or [`KEEP_FLAG`] in a session with a cache, and with
        /// [`COMPRESSED_FLAG`] if fewer bytes follow.
        pub len: u32,
    }

    /// Precedes each piece on a [direct connection](crate::ops::direct); `len` bytes follow.
    pub struct DirectHeader {
        /// The piece's number, which is higher than that of the previous piece.
        pub number: u64,
        /// Bytes that follow, from 1 to [`MAX_PIECE`](crate::ops::direct::MAX_PIECE). 0: the piece will not
        /// come.
        pub len: u32,
        /// Zero, or [`DIRECT_VERBS`].
        pub reserved: u32,
    }

    /// One end's queue pair for the pieces of a [direct connection](crate::ops::direct), as the other end
    /// must know it.
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
        /// The stream: 0 for the control connection, 1 for the first data connection, and so on.
        pub stream: u32,
        /// Zero.
        pub reserved: u32,
        /// Bytes of the stream that have come since the session began, over all of the session's links.
        /// Greetings and [`frame::RESUMED`] are not part of a stream. `verbs`: of stream 0, bytes whose
        /// frames were acted on; of others, the peer's writes on this queue that were acted on, likewise.
        pub bytes: u64,
    }

    /// An entry of [`frame::WRITTEN`]: a write with immediate data.
    pub struct Written since 5 {
        /// The queue.
        pub queue: u32,
        /// The immediate data.
        pub immediate: u32,
        /// Bytes.
        pub len: u32,
        /// Zero.
        pub reserved: u32,
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

    /// A memory of the client: part of a file, at an address that [`crate::device::Extent`]s refer to.
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

    /// Body of [`frame::QUEUES`]: what the peer needs to connect to this side's queue pairs and to use this
    /// side's memory.
    pub struct Queues {
        /// Number of queue pairs, 2 to [`MAX_QUEUES`]. The bridge asks for a number; the server answers with
        /// that number or a lower one, and the bridge leaves the others unused.
        pub count: u32,
        /// Receives that this side has posted on each queue.
        pub receives: u32,
        /// Maximum size of a message in bytes, including its header.
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
        /// Server: bytes from one slot to the next. A piece's bytes begin [`SLOT_DATA`] bytes into its slot,
        /// its [`DataHeader`] right before them.
        pub slot_size: u32,
        /// Maximum writes that this side has in flight on each queue. The bridge sends its own number; the
        /// server answers with that number or a lower one.
        pub depth: u32,
    }

    /// Precedes every message of a `verbs` session; bytes of the stream of frames follow, or none.
    pub struct MessageHeader {
        /// Bytes that follow.
        pub len: u32,
        /// The message's number, counted from 0 in each direction. It detects a device that loses or repeats
        /// messages in spite of a reliable connection.
        pub number: u32,
        /// For each queue: receives that the sender has posted since its last message.
        pub credits: [u16; MAX_QUEUES],
    }

    /// Body of [`frame::REGION_KEY`]: memory of the client that the server may write, as far as commands wait
    /// for it. With this key from now on: an earlier one is valid only for writes that were posted.
    pub struct RegionKey {
        /// Address of the first byte.
        pub address: u64,
        /// Bytes.
        pub size: u64,
        /// The region, or [`ARENA_KEY`] for the arena.
        pub region: u32,
        /// The key. It covers all that commands before the next `REGION_KEY` of this memory wait for. Once
        /// nothing is awaited in the memory any more, neither this key nor an earlier one is valid.
        pub key: u32,
    }
}

/// Size in bytes of the parts into which a `verbs` bridge cuts `len` bytes of `In` data (the last part may be
/// shorter). There are enough parts for two in flight on each of the data `queues`, so that the pipeline
/// fills early, but for that no part is made smaller than 64 KiB. Long data is cut into parts of `most`
/// bytes, which is the room of a slot.
pub fn chunk_len(len: u64, queues: u64, most: u64) -> u64 {
    const LEAST: u64 = 64 << 10;
    let even = (len / (2 * queues.max(1))).checked_next_multiple_of(4096).unwrap_or(most);
    even.clamp(LEAST.min(most), most)
}

/// Size of the beginning that greetings of all versions share: magic and version.
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

impl Welcome {
    /// This version's answer, with no more than that.
    pub fn new(answer: Answer, reason: &str) -> Welcome {
        Welcome {
            magic: MAGIC,
            version: OURS.version(),
            status: answer as u32,
            fingerprint: OURS.fingerprint(),
            reason: reason_text(reason),
            ..Welcome::new_zeroed()
        }
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
    /// The sender does not speak rgpu.
    #[error("it does not speak rgpu: its first bytes are {0:#x}")]
    Magic(u64),
    /// This side does not speak the sender's version.
    #[error("{}", .0.describe("the peer speaks", "this side speaks"))]
    Version(Mismatch),
}

/// Checks the bytes of a greeting that have come so far. `None`: more are needed, [`size_of::<T>()`](size_of)
/// in all. A greeting is returned with the version that the two peers speak from now on.
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
            // Random bytes seldom pass the first check.
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
