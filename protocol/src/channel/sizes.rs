//! Sizes of the channel's parts, and how many of each there may be.

/// The bytes `rGPUchan`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"rGPUchan");
/// Bytes of the header.
pub const HEADER_SIZE: usize = 4096;
/// Bytes of a record's header.
pub const RECORD_HEADER: usize = 16;
/// Maximum size of a record, including its header, in bytes: a quarter of the smallest ring.
pub const MAX_RECORD: usize = 64 * 1024;
/// In place of a reply slot's number: the record is not answered.
pub const NO_SLOT: u16 = 0xffff;
/// Bytes of a reply slot: its words on one cache line, then the payload.
pub const SLOT_SIZE: usize = 64 + MAX_PAYLOAD;
/// Maximum payload of a reply in bytes.
pub const MAX_PAYLOAD: usize = if cfg!(loom) { 8 } else { 4096 };
/// Bytes of the progress area.
pub const PROGRESS_SIZE: usize = 64 * 1024;
/// Maximum devices of a process, in all its sessions together.
pub const MAX_DEVICES: u32 = 32;
/// Maximum servers of a process.
pub const MAX_SERVERS: usize = 16;
/// Size of the name by which a client asks for a server, including the NUL, in bytes.
pub const SERVER_NAME_SIZE: usize = 256;
/// Maximum contexts of a session, including primary ones.
pub const MAX_CONTEXTS: u32 = 64;
/// Maximum streams of a session, including default ones.
pub const MAX_STREAMS: u32 = ((PROGRESS_SIZE - 4096) / 8) as u32;
/// Size of the reason why a session was lost, including the NUL, in bytes.
pub const REASON_SIZE: usize = 256;
