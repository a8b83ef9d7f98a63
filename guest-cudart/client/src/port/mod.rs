//! How this process reaches the host: the channel's memory, the doorbell, sleeping, and pinned memory.
//!
//! If `RGPU_SOCKET` is set, it names the Unix socket of `vhost-rgpu`. Otherwise `/dev/rgpu0` (or
//! `RGPU_DEVICE`) is used if it exists, as in a virtual machine; otherwise the daemon's default socket, as on
//! the host or in a container.

pub mod descriptor;
mod guest;
pub mod mapping;
mod native;

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::log::setting;
use mapping::Mapping;
use thiserror::Error;

/// Why there is no session. The messages are for the program's user and say what to do.
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
    /// The socket in `RGPU_SOCKET` does not exist.
    #[error("{path}: there is no such socket: start vhost-rgpu with it, or correct RGPU_SOCKET")]
    NoSocket {
        /// The socket.
        path: PathBuf,
    },
    /// The device or socket exists, but this user may not use it.
    #[error("{path}: permission denied: add this user to the group that owns it, or change its mode")]
    Permission {
        /// The device or socket.
        path: PathBuf,
    },
    /// The socket exists, but nobody is listening.
    #[error("{path}: nobody listens: start vhost-rgpu")]
    NoDaemon {
        /// The socket.
        path: PathBuf,
    },
    /// There is something else than a socket for programs.
    #[error("{path}: this is not vhost-rgpu's socket for programs: correct RGPU_SOCKET")]
    NotOurs {
        /// What the environment names.
        path: PathBuf,
    },
    /// The host refused.
    #[error("{path}: {what}: {reason}")]
    Refused {
        /// The device or socket.
        path: PathBuf,
        /// What was refused.
        what: &'static str,
        /// The host's reason.
        reason: String,
    },
    /// A step failed.
    #[error("{path}: {what}")]
    Io {
        /// The device or socket.
        path: PathBuf,
        /// The step.
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

/// A way to reach the host, with one channel. All methods can be called by any thread.
pub trait Port: Send + Sync {
    /// The channel's memory, which this port created.
    fn channel(&self) -> &Mapping;

    /// Presents the channel, whose header the caller has written, to the host. On success the session is
    /// requested or established.
    fn connect(&self) -> Result<(), PortError>;

    /// Rings the doorbell.
    fn kick(&self);

    /// Sleeps while the 32-bit word at `offset` of the channel equals `expected`, for at most `timeout`. May
    /// return early for any reason, so the caller checks again. Returns whether the host side woke this
    /// thread, as far as the system tells.
    fn wait(&self, offset: u64, expected: u32, timeout: Duration) -> bool;

    /// Whether the host side may still be alive. While a thread sleeps and nobody wakes it, this is called at
    /// least twice a second: a longer gap means that nobody slept, or that every sleep ended soon. Several
    /// threads may call it at the same time.
    fn alive(&self) -> bool;

    /// The reason, once [`Port::alive`] has returned false.
    fn why_dead(&self) -> String;

    /// Allocates `size` bytes of pinned memory (a multiple of the page size) and registers it with the host.
    /// `at` is its address (a multiple of the page size), where this process must have no mapping; with
    /// `None` the port chooses one.
    fn pin_new(&self, size: usize, at: Option<usize>) -> Result<Pinned, PortError>;

    /// Registers program memory with the host and returns its region. `None` if this port cannot do that, so
    /// that the memory must be treated as pageable.
    fn pin(&self, addr: usize, size: usize) -> Option<Result<u32, PortError>>;

    /// Registers memory that another port of this process created with [`Port::pin_new`], and returns its
    /// region in this port.
    fn pin_shared(&self, pinned: &Pinned) -> Result<u32, PortError>;

    /// Removes a registration. Returns when the host no longer uses the memory.
    fn unpin(&self, region: u32);

    /// The descriptors to close in a child after `fork`. An eventfd comes after the session's other ones.
    fn descriptors(&self) -> Vec<RawFd>;

    /// The port's path, for messages.
    fn path(&self) -> &Path;
}

/// Pinned memory made by [`Port::pin_new`].
#[derive(Debug)]
pub struct Pinned {
    /// The memory, in this process.
    pub mapping: Mapping,
    /// Its region.
    pub region: u32,
    /// The memory as a file, if another port may need it to register the memory.
    pub file: Option<OwnedFd>,
}

/// Whether the process has several servers.
static SEVERAL: AtomicBool = AtomicBool::new(false);

/// Called before a process opens its second session. From then on ports keep what
/// [other ports](Port::pin_shared) need.
pub(crate) fn several() {
    SEVERAL.store(true, Ordering::Relaxed);
}

/// The seconds that `RGPU_LOST_AFTER` asks for.
pub(crate) fn asked_lost_after() -> Option<u64> {
    setting::number("RGPU_LOST_AFTER", "seconds", 1..=86_400)
}

/// Opens the port that the environment selects, with a channel of `size` bytes.
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

/// Opens a port over a socket of `vhost-rgpu`, with a channel of `size` bytes.
pub fn at_socket(socket: &Path, size: usize) -> Result<Box<dyn Port>, PortError> {
    native::Native::open(socket, size).map(|port| Box::new(port) as Box<dyn Port>)
}

/// Explains a refusal by the host to a user.
fn refusal(answer: protocol::device::Answer) -> &'static str {
    use protocol::device::Answer;
    match answer {
        Answer::Ok => "accepted",
        Answer::Invalid => "the host refused the channel",
        Answer::NoResources => "no resources left on the host or the server",
        Answer::NoServer => {
            "no GPU server could be reached: check on the host that rgpu-server is running at the address in vhost-rgpu's configuration"
        }
        Answer::Version => "another version of rgpu",
        Answer::Denied => "the GPU server refused this client",
        Answer::Unsupported => {
            "the host does not know this request: install the same version of rgpu on both sides"
        }
        Answer::Waiting => "the host sent a reply that only servers send",
    }
}
