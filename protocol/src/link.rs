//! Between the host bridge and a server: the handshake, and the frames that follow it.
//!
//! ```text
//!   bridge                                    server
//!     │ ── Hello{CONTROL} ─────────────────────▶ │  refuses another version by name
//!     │ ◀──────────── Welcome{token} ─────────── │
//!     │ ── Hello{DATA, token, index} ──▶ …       │  tcp: as many data connections as the welcome says
//!     │ ── Attach + descriptors ───────▶ …       │  local: the channel's memory; the worker then reads the ring itself
//!     │ ◀═════════════ frames ══════════════════▶│
//! ```
//!
//! **tcp.** The control connection carries frames ([`FrameHeader`]) both ways. The bridge forwards records of the ring, unchanged and in order, in
//! [`frame::COMMANDS`]. Bulk data crosses on the data connections as [`DataHeader`]s, each followed by its bytes: for the *n*-th piece of bulk data
//! that command `seq` names ([`crate::data::DataUse`], counted from 0 over both directions). The bridge may send a command's `In` data before, with or after the command;
//! it keeps to the order of the commands of one stream. How much it may send is the server's to say, so that data of a stream that does not go on never stands before another's
//! ([`frame::DATA_GRANT`]): up to [`EAGER_PIECE`] bytes of each piece go without asking as long as [`EAGER`] bytes of the session lie nowhere yet, the rest when it is granted; a
//! [`HostIn::Late`](crate::data::HostIn) piece goes by grants alone. The server sends a command's `Out` data at any time after it took the command, and says
//! [`frame::DATA_SENT`] on the control connection before it says anything that depends on the data's arrival; the bridge takes nothing further off the control connection
//! until all of that data is in the client's memory. `DATA_SENT` comes exactly once for every command that names `Out` data, also when the command failed and fewer bytes, or none,
//! were sent. A piece of no bytes crosses as nothing at all.
//! Every data connection gets its own [`Hello`] (with the session's token) and its own [`Welcome`]; frames may follow once all are welcomed.
//!
//! **local.** A Unix stream socket. After the welcome the bridge sends [`frame::ATTACH`], and later [`frame::REGION_ADD`] and [`frame::REGION_REMOVE`], each answered by
//! [`frame::ACK`]; descriptors travel with the first byte of their frame. Commands, replies and progress cross in the channel's memory.
//!
//! **verbs.** The control connection stands for the session's whole life, for `ALIVE` and `BYE`. After the welcome both sides send one [`frame::QUEUES`], the bridge first; then
//! reliable connections stand between them: queue 0 for messages, the others for data. A message is a [`MessageHeader`] and some bytes; the bytes of all
//! messages one way, put together, are a stream of the same frames as on a control connection. The bridge *writes* `In` data, each piece a [`DataHeader`] and its bytes,
//! into slots of the server's memory that it knows to be free, and takes them in turn: cut as [`chunk_len`] says, the session's n-th piece goes to slot n modulo their number, so that
//! the server knows where data will lie before it comes. Data that its stream may not come to for long (while a host function is under way, or once a stream has waited for a word
//! of memory) and late data wait for grants instead ([`frame::DATA_ASK`]). Granted data has slots of its own ([`GRANTED_SLOTS`]), in any order: the server copies it out of them as it
//! comes, so it never waits for data of later commands, which lies in the other slots until those are executed. The server *writes* `Out` data to where the command says in the client's memory, by the key that a
//! [`frame::REGION_KEY`] has given it. Immediate data says what was written.
//! To end, the bridge sends [`frame::BYE`] and shuts its direction down; the worker lets go of all memory and then closes the socket. A worker that ends the session by itself does the
//! same: `BYE` with the reason, memory let go, socket closed. Whoever sees the socket closed may rely on the memory being touched no more.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The bytes `rGPUlink`. It and the version after it stay where they are in every version to come.
pub const MAGIC: u64 = u64::from_le_bytes(*b"rGPUlink");
/// Default TCP port of `rgpu-server`.
pub const DEFAULT_PORT: u16 = 9700;
/// Bytes of a frame's body at most.
pub const MAX_FRAME: u32 = 32 << 20;
/// Bytes of one piece on a data connection at most.
pub const MAX_DATA: u32 = 4 << 20;

/// What a connection is for, by number.
pub mod purpose {
    /// A session's control connection over TCP.
    pub const CONTROL: u32 = 1;
    /// A data connection of the session that the token names.
    pub const DATA: u32 = 2;
    /// A session of this host, over a Unix socket.
    pub const LOCAL: u32 = 3;
    /// The control connection of a session over verbs.
    pub const VERBS: u32 = 4;
}

/// What a client would like its session to be, in bits: [`Hello::wishes`], and in a channel's header. A hint: none of them gives a client anything that it could not have
/// otherwise.
pub mod wish {
    /// The session only asks NVML's questions. The server gives it a process without CUDA contexts, which refuses every other operation.
    pub const NVML_ONLY: u32 = 1;
    /// The client can be told to wait ([`Answer::Waiting`](crate::device::Answer::Waiting), [`State::Waiting`](crate::channel::State::Waiting)). One that cannot is left without an
    /// answer until its session begins.
    pub const MAY_WAIT: u32 = 2;
}

/// First message on every connection, from the bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`crate::VERSION`].
    pub version: u32,
    /// One of [`purpose`].
    pub purpose: u32,
    /// `DATA`: the session's token; otherwise zero.
    pub token: [u8; 16],
    /// `DATA`: which of the session's data connections this is. `CONTROL`: how many the bridge would like.
    pub index: u32,
    /// Process id of the program, in its own namespace; for people.
    pub pid: u32,
    /// Reply slots of the channel: replies name one below this.
    pub slot_count: u32,
    /// Bits of [`wish`]. Zero on a data connection.
    pub wishes: u32,
    /// Name of the virtual machine or host; for people and for admission. NUL-padded.
    pub client: [u8; 64],
    /// Name of the program; for people. NUL-padded.
    pub program: [u8; 32],
}

/// Answer to every [`Hello`].
///
/// While no worker is ready for a session, the server answers a bridge that [may wait](wish::MAY_WAIT) with [`Answer::Waiting`](crate::device::Answer::Waiting), again each second
/// or so; another `Welcome` follows. A bridge that closes its connection has left the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: u64,
    /// The server's [`crate::VERSION`], also when it refuses the bridge's.
    pub version: u32,
    /// [`crate::device::Answer`], by number.
    pub status: u32,
    /// Names the session on its data connections: random, not to be guessed.
    pub token: [u8; 16],
    /// Data connections that the bridge must open.
    pub data_connections: u32,
    /// With [`Answer::Waiting`](crate::device::Answer::Waiting): sessions that the server serves before this one.
    pub ahead: u32,
    /// The server's host name. NUL-padded.
    pub server: [u8; 64],
    /// Why the server refuses. NUL-padded.
    pub reason: [u8; 256],
}

/// Begins every frame; `len` bytes of body follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FrameHeader {
    /// One of [`frame`].
    pub kind: u32,
    /// Bytes of the body, at most [`MAX_FRAME`].
    pub len: u32,
}

/// Kinds of frames, by number, with their bodies.
pub mod frame {
    /// Bridge → server: one or more records, as in the ring, without padding records.
    pub const COMMANDS: u32 = 1;
    /// Server → bridge: [`super::ReplyHeader`], payload.
    pub const REPLY: u32 = 2;
    /// Server → bridge: one or more [`super::ProgressUpdate`]s.
    pub const PROGRESS: u32 = 3;
    /// Server → bridge: [`super::DataSent`].
    pub const DATA_SENT: u32 = 4;
    /// Either way: the sender ends the session; the body says why, as text. Empty: as asked.
    pub const BYE: u32 = 5;
    /// Either way, empty: still here. A bridge to which something is due asks so after a second of silence, and the server answers; a server that is silent on all of its connections
    /// (`verbs`: its queue pairs) for ten while something is due from it is lost. `local` needs none (a worker's death closes its socket); one that comes is ignored.
    pub const ALIVE: u32 = 6;
    /// Bridge → worker, `local`: [`super::Attach`], then its memories, then its extents; descriptors: one for each memory, then the doorbell eventfd, then, unless
    /// [`super::ATTACH_FUTEX`], the wake eventfd.
    pub const ATTACH: u32 = 7;
    /// Bridge → worker, `local`: [`super::RegionAdd`], then its extents. With [`super::REGION_OWN_MEMORY`]: one descriptor, extents count in it.
    pub const REGION_ADD: u32 = 8;
    /// Bridge → worker, `local`: u32 region. Acknowledged when the worker no longer touches it.
    pub const REGION_REMOVE: u32 = 9;
    /// Worker → bridge, `local`: [`super::Ack`], to `ATTACH`, `REGION_ADD` and `REGION_REMOVE`, in order.
    pub const ACK: u32 = 10;
    /// Either way, `verbs`, on the control connection, once: [`super::Queues`].
    pub const QUEUES: u32 = 11;
    /// Bridge → server, `verbs`: [`super::RegionKey`]. Comes before the first command that has the server write into that memory.
    pub const REGION_KEY: u32 = 12;
    /// Server → bridge, `verbs`: one or more u32: slots that are free again, in the order in which they are to be written.
    pub const SLOTS_FREE: u32 = 13;
    /// Server → bridge, `tcp`, `verbs`: one or more [`super::DataGrant`]s.
    pub const DATA_GRANT: u32 = 14;
    /// Server → bridge, `tcp`: u64: so many bytes more of eager data have found their place, or were thrown away.
    pub const DATA_PLACED: u32 = 15;
    /// Bridge → server: [`super::DataAsk`]: that piece of data waits for a grant. Sent before the command, because a server may read nothing behind a command while it executes it.
    /// `tcp`: the piece has no more than [`super::EAGER_PIECE`] bytes, for the server tells of others without being asked.
    pub const DATA_ASK: u32 = 16;
    /// Server → bridge, `verbs`: u64: so many bytes more of records were taken to be executed ([`super::COMMANDS_AHEAD`]).
    pub const COMMANDS_TAKEN: u32 = 17;
}

/// Of each piece of `In` data a bridge may send this many bytes eagerly, at most: without a grant.
pub const EAGER_PIECE: u64 = 1 << 20;
/// Eager bytes of a session that have not found their place yet, at most.
pub const EAGER: u64 = 16 << 20;
/// Set in [`DataHeader::len`]: these bytes are eager.
pub const EAGER_FLAG: u32 = 1 << 31;

/// An entry of [`frame::DATA_GRANT`]: there is room for that piece's data up to an offset, or will be without anything else of the session having to go on first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DataAsk {
    /// The command.
    pub seq: u64,
    /// Which of its pieces of data.
    pub piece: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`frame::REPLY`]; the payload follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ReplyHeader {
    /// Command that it answers.
    pub seq: u64,
    /// Its reply slot.
    pub slot: u32,
    /// [`crate::Status`], by number.
    pub status: u32,
}

/// One word of the progress area ([`crate::channel::Progress`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ProgressUpdate {
    /// One of [`progress`].
    pub kind: u32,
    /// Stream or context; 0 where there is none. For [`progress::ERROR`]: bit 31 says sticky.
    pub index: u32,
    /// The new `seq`.
    pub seq: u64,
    /// [`progress::ERROR`]: the [`crate::Status`], by number; 0 clears. [`progress::OUTPUT`]: the bytes. Otherwise 0.
    pub value: u64,
}

/// Kinds of progress, by number.
pub mod progress {
    /// `executed`.
    pub const EXECUTED: u32 = 1;
    /// A stream's word.
    pub const STREAM: u32 = 2;
    /// A context's error word.
    pub const ERROR: u32 = 3;
    /// `released`, where the server knows better than the bridge (it does not over tcp: the bridge releases what it has sent).
    pub const RELEASED: u32 = 4;
    /// `output`: its value.
    pub const OUTPUT: u32 = 5;
}

/// Body of [`frame::DATA_SENT`]: all data that command `seq` puts out has been sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DataSent {
    /// The command.
    pub seq: u64,
    /// Bytes in all.
    pub bytes: u64,
}

/// Begins every piece on a data connection; `len` bytes follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DataHeader {
    /// The command that names the data.
    pub seq: u64,
    /// Offset of these bytes in that piece of bulk data.
    pub offset: u64,
    /// Which of the command's pieces of bulk data.
    pub piece: u32,
    /// Bytes that follow, at most [`MAX_DATA`]; over `tcp` with [`EAGER_FLAG`] where no grant covers them.
    pub len: u32,
}

/// Fixed part of [`frame::ATTACH`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Attach {
    /// Memories that follow.
    pub memory_count: u32,
    /// Extents that follow them: the channel's memory, in order.
    pub extent_count: u32,
    /// [`ATTACH_FUTEX`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
    /// The channel's size in bytes.
    pub size: u64,
}

/// `flags` of [`Attach`]: the client's threads sleep by futex on the channel's words. Otherwise a write to the wake eventfd reaches them.
pub const ATTACH_FUTEX: u32 = 1;

/// One memory of the client: a piece of a file, at an address that [`crate::device::Extent`]s count in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Memory {
    /// First (guest-physical) address.
    pub addr: u64,
    /// Bytes.
    pub size: u64,
    /// Offset in the file.
    pub file_offset: u64,
}

/// Fixed part of [`frame::REGION_ADD`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
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

/// `flags` of [`RegionAdd`]: a descriptor comes along, and extents are offsets in its file.
pub const REGION_OWN_MEMORY: u32 = 1;
/// `flags` of [`RegionAdd`]: the worker may only read.
pub const REGION_READ_ONLY: u32 = 2;

/// Body of [`frame::ACK`]; the reason follows as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Ack {
    /// [`crate::device::Answer`], by number.
    pub status: u32,
    /// Zero.
    pub reserved: u32,
}

/// Queues of a `verbs` session at most: one for messages, the others for data.
pub const MAX_QUEUES: usize = 8;

/// Body of [`frame::QUEUES`]: what the peer must know to connect to this side's queue pairs, and to use its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Queues {
    /// Queue pairs in all, 2 to [`MAX_QUEUES`]. The bridge wishes; the server answers with as many or fewer, and the bridge leaves the others unused.
    pub count: u32,
    /// Receives that this side has ready on each queue.
    pub receives: u32,
    /// Bytes of a message at most, its header included.
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
    /// Numbers of the queue pairs; the first `count` count.
    pub queue_pairs: [u32; MAX_QUEUES],
    /// Server: address of its slots. Bridge: 0, as in what follows.
    pub slots_address: u64,
    /// Server: the slots' key.
    pub slots_key: u32,
    /// Server: how many slots there are, all free at first; more than [`GRANTED_SLOTS`].
    pub slots: u32,
    /// Server: bytes from one slot to the next. A piece's bytes begin [`SLOT_DATA`] bytes into its slot, its [`DataHeader`] right before them.
    pub slot_size: u32,
    /// Writes that this side has under way on each queue at most. The bridge wishes as many of the server as it has itself; the server answers with as many or fewer.
    pub depth: u32,
}

/// Of a `verbs` server's slots the last so many are for granted data.
pub const GRANTED_SLOTS: u32 = 8;

/// A `verbs` bridge sends no more records once so many bytes of them were not taken ([`frame::COMMANDS_TAKEN`]). Everything else that it says is read at once, however long the
/// server is at one command.
pub const COMMANDS_AHEAD: u64 = 1 << 20;

/// Where a piece's bytes begin in a slot, in bytes. The header ends there, so that one write carries both and the bytes are well aligned.
pub const SLOT_DATA: u32 = 64;

/// Bytes of the pieces into which a `verbs` bridge cuts `len` bytes of `In` data (the last is shorter): enough pieces for each of the `queues` for data to have two under way, so that
/// the pipeline fills early, but none below 64 KiB for that; `most`, which a slot holds, when there is much.
pub fn chunk_len(len: u64, queues: u64, most: u64) -> u64 {
    const LEAST: u64 = 64 << 10;
    let even = (len / (2 * queues.max(1))).checked_next_multiple_of(4096).unwrap_or(most);
    even.clamp(LEAST.min(most), most)
}

/// Begins every message of a `verbs` session; some bytes of the stream of frames follow, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MessageHeader {
    /// Bytes that follow.
    pub len: u32,
    /// Which message of the session it is, counted from 0 each way. A device that loses one or delivers one twice breaks what a reliable connection promises; here it is noticed.
    pub number: u32,
    /// For each queue: receives that the sender of this message has posted again since it last said so.
    pub credits: [u16; MAX_QUEUES],
}

/// Body of [`frame::REGION_KEY`]: memory of the client that the server may write, until the bridge forgets the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionKey {
    /// Address of the first byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// The region; [`ARENA_KEY`]: the arena.
    pub region: u32,
    /// The key. It covers exactly this memory.
    pub key: u32,
}

/// `region` of [`RegionKey`]: the channel's arena.
pub const ARENA_KEY: u32 = u32::MAX;
