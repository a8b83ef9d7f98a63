//! Fake peers for the tests of every crate. Each one plays a single role, so that a test can put the real
//! code opposite it:
//!
//! ```text
//!   program ── channel ──▶ bridge ══ link ══▶ server
//!   [`channel`]            [`native_host`]    [`server`]      what a test plays
//!   [`native_client`]      [`link`]
//! ```
//!
//! In reading order:
//! - [`channel`]: the program's end of a channel's shared memory;
//! - [`native_client`]: a program that connects to `vhost-rgpu`'s native socket;
//! - [`native_host`]: the host's end of that socket, for tests of the client library;
//! - [`session`]: a program and the bridge's [`Session`](host_bridge::bridge::Session) in one process, for
//!   tests of the bridge;
//! - [`link`]: a bridge that connects to `rgpu-server` over a Unix socket or TCP;
//! - [`server`]: a server that speaks TCP to a bridge and keeps "device memory" in a map;
//! - [`local_server`]: a server of this host whose workers map the client's memory;
//! - [`tcp_server`]: a server whose workers are the real ends of sessions over TCP, which outlive their
//!   connections;
//! - [`turns`]: a relay in front of a server, by which a test counts round trips;
//! - [`daemon`]: a real daemon as a child process;
//! - [`manager`]: a service manager that keeps descriptors for daemons;
//! - [`authority`]: an operator's certification authority.
//!
//! A peer panics when the other side breaks the protocol, unless its documentation says otherwise. A test
//! waits for a condition with [`until`] and never for a fixed time.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

pub mod authority;
pub mod channel;
#[cfg(feature = "folders")]
pub mod daemon;
pub mod link;
#[cfg(feature = "folders")]
pub mod local_server;
pub mod manager;
pub mod native_client;
#[cfg(feature = "folders")]
pub mod native_host;
pub mod resources;
pub mod server;
pub mod session;
#[cfg(feature = "folders")]
pub mod tcp_server;
pub mod turns;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::{Duration, Instant};

use host_bridge::bridge::SessionConfig;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::data::{HostRange, Place};
use protocol::device::Extent;

/// How long anything may take before a test fails. Nothing is measured against it.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// Waits until `condition` holds; `what` describes it when it never does.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// [`until`] for a condition that the calling test explains well enough.
pub fn eventually(condition: impl FnMut() -> bool) {
    until("a condition holds", condition);
}

/// Gives a session all the time that a busy machine may need, wherever it has a limit. A test of one of these
/// limits sets it again.
pub fn be_patient(config: &mut SessionConfig) {
    (config.connect_timeout, config.handshake_timeout) = (PATIENCE, PATIENCE);
    // Less for a link, so that a session whose link is lost silently continues before the test gives up.
    (config.silence, config.link_silence) = (PATIENCE, PATIENCE / 4);
}

/// A port of the loopback interface on which nothing listens.
///
/// It is below the range from which the kernel gives ports to outgoing connections and to whoever asks for
/// any port, and no other test gets it until this process ends. So it is still free when a daemon is started
/// on it later, or again after its end.
pub fn free_port() -> u16 {
    const FIRST: u64 = 12_000;
    const COUNT: u64 = 20_000;
    // The standard library's hash keys are random.
    let random = || (FIRST + RandomState::new().build_hasher().finish() % COUNT) as u16;
    let mut ports = std::iter::repeat_with(random).take(1000);
    let is_free = |port: &u16| reserve(*port) && std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.find(is_free).expect("a port is free")
}

/// Takes a name for the port that only one process of this machine can have, for the rest of this process's
/// life. False: somebody has it.
fn reserve(port: u16) -> bool {
    let name = SocketAddr::from_abstract_name(format!("rgpu-test-port-{port}")).unwrap();
    UnixListener::bind_addr(&name).map(std::mem::forget).is_ok()
}

/// A memfd of `size` bytes, not sealed.
pub fn memfd(size: u64) -> OwnedFd {
    let file = memfd_create(c"test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&file, size as i64).unwrap();
    file
}

/// A memfd of `size` bytes that cannot shrink, as the native socket requires.
pub fn sealed_memfd(size: u64) -> OwnedFd {
    let file = memfd(size);
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    file
}

/// `len` bytes that differ from one position to the next.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Scattered extents of odd sizes, `sum` bytes in all, between 24 and 64 MiB of a client's memory.
pub fn scattered(sum: u64, seed: u64) -> Vec<Extent> {
    let mut extents = Vec::new();
    let (mut left, mut x) = (sum, seed | 1);
    let base = 24 << 20;
    let mut block = 0;
    while left > 0 {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let len = (1 + (x >> 33) % 90_001).min(left);
        // Blocks of 128 KiB, visited in an order that is not ascending.
        let position = (block * 7 + 3) % 311;
        extents.push(Extent { addr: base + position * 0x2_0000 + (x >> 20) % 4096, len });
        block += 1;
        assert!(block < 311, "more than the test's memory holds");
        left -= len;
    }
    extents
}

/// A range of the channel's arena.
pub fn arena(offset: u64, len: u64) -> HostRange {
    HostRange { place: Place::Arena, offset, len }
}

/// A range of a registered region.
pub fn region(id: u32, offset: u64, len: u64) -> HostRange {
    HostRange { place: Place::Region(id), offset, len }
}

/// Checks that a generated file, or the part of a page between `<!-- MARKER -->` and `<!-- /MARKER -->`, is
/// up to date. With `UPDATE_DOCS` set, writes it first.
pub fn check_generated(path: &str, marker: Option<&str>, expected: &str) {
    let now = std::fs::read_to_string(path).unwrap_or_default();
    let expected = match marker {
        None => expected.to_owned(),
        Some(marker) => {
            let (begin, end) = (format!("<!-- {marker} -->\n"), format!("<!-- /{marker} -->"));
            let (before, rest) = now.split_once(&begin).expect("the page has the marker");
            let (_, after) = rest.split_once(&end).expect("the page has the closing marker");
            format!("{before}{begin}{expected}{end}{after}")
        }
    };
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &expected).unwrap();
    }
    let now = std::fs::read_to_string(path).unwrap_or_default();
    assert!(now == expected, "{path} is out of date: run this test with UPDATE_DOCS=1");
}
