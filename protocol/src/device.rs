//! The virtio device as `docs/device.md` describes it: its configuration space, requests and events, byte for byte.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// virtio device type.
pub const DEVICE_TYPE: u32 = 38;
/// The bytes `rGPU`.
pub const CONFIG_MAGIC: u32 = u32::from_le_bytes(*b"rGPU");
/// Version of `docs/device.md`.
pub const DEVICE_VERSION: u32 = 1;
/// Queue index of requests.
pub const CONTROL_QUEUE: u16 = 0;
/// Queue index of the doorbell.
pub const DOORBELL_QUEUE: u16 = 1;
/// Queue index of events.
pub const EVENT_QUEUE: u16 = 2;
/// Number of queues.
pub const QUEUE_COUNT: usize = 3;
/// Largest `max_extents` a device offers.
pub const MAX_EXTENTS: u32 = 1 << 20;

/// The configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// [`CONFIG_MAGIC`].
    pub magic: u32,
    /// [`DEVICE_VERSION`].
    pub version: u32,
    /// Channel ids are below this.
    pub max_channels: u32,
    /// Extents in one request at most.
    pub max_extents: u32,
    /// Bytes of one channel at most.
    pub max_channel_size: u64,
    /// Bytes registered by one channel at most; 0: no limit.
    pub max_registered: u64,
    /// Zero.
    pub reserved: [u8; 32],
}

const _: () = assert!(size_of::<Config>() == 64);

/// A range of guest-physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Extent {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

/// What a request asks for, by number.
pub mod request {
    /// Make a channel.
    pub const CREATE_CHANNEL: u32 = 1;
    /// End a channel.
    pub const DESTROY_CHANNEL: u32 = 2;
    /// Register memory.
    pub const REGISTER_MEMORY: u32 = 3;
    /// Forget registered memory.
    pub const UNREGISTER_MEMORY: u32 = 4;
}

/// `flags` of `REGISTER_MEMORY`: the device only reads.
pub const REGISTER_READ_ONLY: u32 = 1;

/// A request's fixed part; [`Extent`]s follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Request {
    /// One of [`request`].
    pub kind: u32,
    /// Channel.
    pub channel: u32,
    /// Region, where the request has one.
    pub region: u32,
    /// Extents that follow.
    pub extent_count: u32,
    /// Bytes in all.
    pub size: u64,
    /// Flags.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// A response's status, by number; the same for a native client ([`crate::native`]) and for a server's welcome ([`crate::link`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Answer {
    /// Done.
    Ok = 0,
    /// The request makes no sense.
    Invalid = 1,
    /// A limit was met.
    NoResources = 2,
    /// No server could be reached.
    NoServer = 3,
    /// Somebody is of another version.
    Version = 4,
    /// The server refused.
    Denied = 5,
    /// The request is not known.
    Unsupported = 6,
    /// Only in a server's welcome: the session waits for its turn, and another welcome follows.
    Waiting = 7,
}

impl Answer {
    /// The answer of that number; an unknown number counts as [`Answer::Invalid`].
    pub fn from_number(number: u32) -> Answer {
        match number {
            0 => Answer::Ok,
            2 => Answer::NoResources,
            3 => Answer::NoServer,
            4 => Answer::Version,
            5 => Answer::Denied,
            6 => Answer::Unsupported,
            7 => Answer::Waiting,
            _ => Answer::Invalid,
        }
    }
}

/// A response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Response {
    /// [`Answer`], by number.
    pub status: u32,
    /// Zero.
    pub reserved: u32,
    /// Why: UTF-8, NUL-terminated.
    pub reason: [u8; 256],
}

impl Response {
    /// A response with its reason, cut to what fits.
    pub fn new(answer: Answer, reason: &str) -> Response {
        Response { status: answer as u32, reserved: 0, reason: text(reason) }
    }

    /// The reason as text.
    pub fn reason(&self) -> String {
        untext(&self.reason)
    }
}

/// `s` NUL-padded in `N` bytes, at least one NUL, cut at a character's boundary.
pub fn text<const N: usize>(s: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut n = s.len().min(N - 1);
    while !s.is_char_boundary(n) {
        n -= 1;
    }
    bytes[..n].copy_from_slice(&s.as_bytes()[..n]);
    bytes
}

/// The text before the first NUL; bytes that are not UTF-8 are replaced.
pub fn untext(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// `type` of an event: wake every waiter of the channel.
pub const EVENT_WAKE: u32 = 1;

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Event {
    /// [`EVENT_WAKE`].
    pub kind: u32,
    /// Channel.
    pub channel: u32,
}
