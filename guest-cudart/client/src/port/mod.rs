//! The way from this process to the host: where a channel's memory comes from, the doorbell, sleeping, and pinned memory.
//!
//! `RGPU_SOCKET` names the Unix socket of `vhost-rgpu` and wins; otherwise `/dev/rgpu0` (or `RGPU_DEVICE`) if it is there, as in a
//! virtual machine; otherwise the daemon's usual socket, as on the host itself or in a container.

mod guest;
pub mod mapping;
mod native;

use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mapping::Mapping;
use thiserror::Error;

/// Why there is no session. The texts are for the program's user: each says what to do.
#[derive(Debug, Error)]
pub enum PortError {
    /// There is neither a device nor a socket.
    #[error(
        "there is no rgpu device here: in a virtual machine load the module (modprobe virtio_rgpu) and look for /dev/rgpu0; on the host start vhost-rgpu (socket {socket}), or set RGPU_SOCKET"
    )]
    Nothing {
        /// The socket that was looked for.
        socket: String,
    },
    /// The socket that `RGPU_SOCKET` names is not there.
    #[error("{path}: there is no such socket: start vhost-rgpu with it, or correct RGPU_SOCKET")]
    NoSocket {
        /// The socket.
        path: PathBuf,
    },
    /// The device or socket is there and cannot be used by this user.
    #[error("{path}: permission denied: add this user to the group that owns it, or change its mode")]
    Permission {
        /// The device or socket.
        path: PathBuf,
    },
    /// The socket is there and nobody listens.
    #[error("{path}: nobody listens: start vhost-rgpu")]
    NoDaemon {
        /// The socket.
        path: PathBuf,
    },
    /// The host answered, and refused.
    #[error("{path}: {what}: {reason}")]
    Refused {
        /// The device or socket.
        path: PathBuf,
        /// What was refused.
        what: &'static str,
        /// The host's reason.
        reason: String,
    },
    /// Something failed on the way.
    #[error("{path}: {what}")]
    Io {
        /// The device or socket.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

impl PortError {
    fn io(path: &Path, what: &'static str, source: io::Error) -> PortError {
        match source.kind() {
            io::ErrorKind::PermissionDenied => PortError::Permission { path: path.to_owned() },
            io::ErrorKind::ConnectionRefused => PortError::NoDaemon { path: path.to_owned() },
            _ => PortError::Io { path: path.to_owned(), what, source },
        }
    }

    /// The error and its cause in one line.
    pub fn line(&self) -> String {
        match std::error::Error::source(self) {
            Some(cause) => format!("{self}: {cause}"),
            None => self.to_string(),
        }
    }
}

/// A way to the host, with one channel. All methods may be called by any thread.
pub trait Port: Send + Sync {
    /// The channel's memory, made by this port.
    fn channel(&self) -> &Mapping;

    /// Tells the host of the channel, whose header the caller has written. On success the session stands.
    fn connect(&self) -> Result<(), PortError>;

    /// Rings the doorbell.
    fn kick(&self);

    /// Sleeps while the 32-bit word at `offset` of the channel equals `expected`, at most for `timeout`. May return early for any reason:
    /// the caller looks again. Returns whether the host side woke this thread, as far as the system tells.
    fn wait(&self, offset: u64, expected: u32, timeout: Duration) -> bool;

    /// Whether the host side may still be there. To be asked by whoever has slept for a while without being woken: that is what a port may
    /// go by.
    fn alive(&self) -> bool;

    /// What there is to say once [`Port::alive`] has been false.
    fn why_dead(&self) -> String;

    /// Allocates `size` bytes (a multiple of the page size) of pinned memory and registers it with the host. `at`: its address (a multiple of the page size), where this process must have
    /// nothing; `None` leaves the choice to the port.
    fn pin_new(&self, size: usize, at: Option<usize>) -> Result<Pinned, PortError>;

    /// Registers program memory with the host, if this port can; returns its region. `None`: this port cannot, and the memory is to be
    /// treated as pageable.
    fn pin(&self, addr: usize, size: usize) -> Option<Result<u32, PortError>>;

    /// Takes back a registration; returns when the host has let go of it.
    fn unpin(&self, region: u32);

    /// What must be closed in a child after `fork`.
    fn descriptors(&self) -> Vec<RawFd>;

    /// What the port is reached by, for messages.
    fn path(&self) -> &Path;
}

/// Pinned memory made by [`Port::pin_new`].
#[derive(Debug)]
pub struct Pinned {
    /// The memory, in this process.
    pub mapping: Mapping,
    /// Its region.
    pub region: u32,
}

/// Opens the port that the environment asks for, with a channel of `size` bytes.
pub fn open(size: usize) -> Result<Box<dyn Port>, PortError> {
    if let Some(socket) = std::env::var_os("RGPU_SOCKET").filter(|value| !value.is_empty()) {
        return at_socket(Path::new(&socket), size);
    }
    let named = std::env::var_os("RGPU_DEVICE").filter(|value| !value.is_empty());
    let device = named.clone().map_or_else(|| PathBuf::from("/dev/rgpu0"), PathBuf::from);
    if named.is_some() || device.exists() {
        return guest::Guest::open(&device, size).map(|port| Box::new(port) as Box<dyn Port>);
    }
    let socket = Path::new(protocol::native::DEFAULT_SOCKET);
    if socket.exists() {
        return at_socket(socket, size);
    }
    Err(PortError::Nothing { socket: protocol::native::DEFAULT_SOCKET.to_owned() })
}

/// The port over a socket of `vhost-rgpu`, with a channel of `size` bytes.
pub fn at_socket(socket: &Path, size: usize) -> Result<Box<dyn Port>, PortError> {
    native::Native::open(socket, size).map(|port| Box::new(port) as Box<dyn Port>)
}

/// What a refusal by the host means to a person.
fn refusal(answer: protocol::device::Answer) -> &'static str {
    use protocol::device::Answer;
    match answer {
        Answer::Ok => "accepted",
        Answer::Invalid => "the host refused the channel",
        Answer::NoResources => "no room on the host or the server",
        Answer::NoServer => {
            "no GPU server could be reached: on the host, see that rgpu-server runs where vhost-rgpu looks for it"
        }
        Answer::Version => "another version of rgpu",
        Answer::Denied => "the GPU server refused this client",
        Answer::Unsupported => "the host does not know this request",
        Answer::Waiting => "the host gave an answer that only servers give",
    }
}
