//! The virtio device of `docs/device.md`: its configuration space, requests and events, byte for byte.
//!
//! The device has its own version ([`DEVICE_VERSION`]), because the guest's kernel module does not depend on
//! what is in a channel. [`Extent`], [`Answer`], [`Response`] and the request kinds are also used on the
//! native socket and the link.

use crate::schema::{Layout, layouts, numbered, numbers};

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
/// Largest `max_extents` that a device offers.
pub const MAX_EXTENTS: u32 = 1 << 20;
/// `flags` of `REGISTER_MEMORY`: the device only reads.
pub const REGISTER_READ_ONLY: u32 = 1;
/// `type` of an event: wake every waiter of the channel.
pub const EVENT_WAKE: u32 = 1;

numbers! {
    /// What a request asks for.
    pub mod request: u32 {
        /// Create a channel.
        CREATE_CHANNEL = 1;
        /// End a channel.
        DESTROY_CHANNEL = 2;
        /// Register memory.
        REGISTER_MEMORY = 3;
        /// Unregister memory.
        UNREGISTER_MEMORY = 4;
    }
}

layouts! {
    /// A range of guest-physical memory.
    pub struct Extent {
        /// First address.
        pub addr: u64,
        /// Bytes.
        pub len: u64,
    }

    /// A response.
    pub struct Response {
        /// [`Answer`], by number.
        pub status: u32,
        /// Zero.
        pub reserved: u32,
        /// Why: UTF-8, NUL-terminated.
        pub reason: [u8; 256],
    }

    /// The configuration space.
    pub struct Config {
        /// [`CONFIG_MAGIC`].
        pub magic: u32,
        /// [`DEVICE_VERSION`].
        pub version: u32,
        /// Channel ids are below this.
        pub max_channels: u32,
        /// Maximum number of extents in one request.
        pub max_extents: u32,
        /// Maximum size of a channel in bytes.
        pub max_channel_size: u64,
        /// Maximum bytes that one channel may register; 0: no limit.
        pub max_registered: u64,
        /// Zero.
        pub reserved: [u8; 32],
    }

    /// A request's fixed part; [`Extent`]s follow.
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

    /// An event.
    pub struct Event {
        /// [`EVENT_WAKE`].
        pub kind: u32,
        /// Channel.
        pub channel: u32,
    }
}

const _: () = assert!(size_of::<Config>() == 64);

/// The layouts of this module, in two groups.
const SPLIT: (&[Layout], &[Layout]) = LAYOUTS.split_at(2);
/// The layouts that are part of the wire, because the native socket and the link use them too: [`Extent`] and
/// [`Response`].
pub const SHARED_LAYOUTS: &[Layout] = SPLIT.0;
/// The layouts that belong to the virtio device alone.
pub const DEVICE_LAYOUTS: &[Layout] = SPLIT.1;

numbered! {
    /// A response's status: of the device, of the native socket ([`crate::native`]) and of a server's welcome
    /// ([`crate::link`]).
    pub enum Answer {
        /// Done.
        Ok = 0,
        /// The request is malformed.
        Invalid = 1,
        /// A limit was reached.
        NoResources = 2,
        /// No server could be reached.
        NoServer = 3,
        /// A peer has another version.
        Version = 4,
        /// The server refused.
        Denied = 5,
        /// The request is not known.
        Unsupported = 6,
        /// Only in a server's welcome: the session is queued, and another welcome follows.
        Waiting = 7,
    }
}

impl Answer {
    /// The answer with this number; an unknown number counts as [`Answer::Invalid`].
    pub fn from_number(number: u32) -> Answer {
        Answer::with_number(number).unwrap_or(Answer::Invalid)
    }
}

impl Response {
    /// A response with its reason, which [`reason_text`] fits into the field.
    pub fn new(answer: Answer, reason: &str) -> Response {
        Response { status: answer as u32, reserved: 0, reason: reason_text(reason) }
    }

    /// The reason as text.
    pub fn reason(&self) -> String {
        untext(&self.reason)
    }
}

/// `s` NUL-padded in `N` bytes with at least one NUL, cut at a character boundary.
pub fn text<const N: usize>(s: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut n = s.len().min(N - 1);
    while !s.is_char_boundary(n) {
        n -= 1;
    }
    bytes[..n].copy_from_slice(&s.as_bytes()[..n]);
    bytes
}

/// A sentence for a user, like [`text`]; one that is too long ends with "…", so that its reader can tell.
pub fn reason_text<const N: usize>(sentence: &str) -> [u8; N] {
    const MORE: &str = "…";
    if sentence.len() < N {
        return text(sentence);
    }
    let mut n = N.saturating_sub(1 + MORE.len());
    while !sentence.is_char_boundary(n) {
        n -= 1;
    }
    text(&format!("{}{MORE}", &sentence[..n]))
}

/// The text before the first NUL; bytes that are not UTF-8 are replaced.
pub fn untext(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_is_too_long_says_so() {
        assert_eq!(untext(&reason_text::<16>("nine more bytes")), "nine more bytes");
        assert_eq!(untext(&reason_text::<16>("nine more bytes.")), "nine more by…");
        assert_eq!(untext(&reason_text::<16>("nine more béyond it")), "nine more b…");
        assert_eq!(reason_text::<16>("nine more bytes.")[15], 0);
        assert_eq!(untext(&text::<16>("nine more bytes.")), "nine more bytes");
    }
}
