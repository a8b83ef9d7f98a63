//! Listening Unix sockets, created here or passed in by systemd.
//!
//! A stale socket file (left by a daemon that was killed) is replaced. A socket that another process listens on is an error.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, accept4, bind, connect, listen, shutdown,
    socket,
};
use thiserror::Error;

/// Why there is no listening socket.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Another process listens there.
    #[error("{}: another process listens on this socket; end it or configure another path", .0.display())]
    InUse(PathBuf),
    /// The path names another kind of file.
    #[error("{}: exists and is not a socket; remove it or configure another path", .0.display())]
    NotASocket(PathBuf),
    /// A system call failed.
    #[error("{}: {what}: {source}", path.display())]
    System {
        /// The path.
        path: PathBuf,
        /// Which one.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A listening socket. If this process created its file, the file is removed with it.
#[derive(Debug)]
pub struct Listening {
    fd: OwnedFd,
    file: Option<PathBuf>,
    /// Readable once the socket is stopped. (Shutting the socket down would break it for systemd, too.)
    stop: Arc<EventFd>,
}

impl Listening {
    fn new(fd: OwnedFd, file: Option<PathBuf>) -> io::Result<Listening> {
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Listening { fd, file, stop: Arc::new(stop) })
    }

    /// Listens at `path`; the socket's file gets permissions `mode`.
    pub fn bind(path: &Path, kind: SockType, mode: u32) -> Result<Listening, SocketError> {
        let failed =
            |what| move |source: io::Error| SocketError::System { path: path.to_owned(), what, source };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(failed("creating its folder"))?;
        }
        clear(path, kind)?;
        let address = UnixAddr::new(path).map_err(|e| failed("the path as a socket address")(e.into()))?;
        let fd = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None)
            .map_err(|e| failed("socket")(e.into()))?;
        bind(fd.as_raw_fd(), &address).map_err(|e| failed("bind")(e.into()))?;
        let listening = Listening::new(fd, Some(path.to_owned())).map_err(failed("eventfd"))?;
        // No process can connect before `listen`, so the permissions are set in time.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(failed("chmod"))?;
        listen(&listening.fd, Backlog::new(128).unwrap_or(Backlog::MAXCONN))
            .map_err(|e| failed("listen")(e.into()))?;
        Ok(listening)
    }

    /// Waits for a connection. `Ok(false)` if the socket was [stopped](Stopper::stop).
    pub fn wait(&self) -> io::Result<bool> {
        loop {
            let watch = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut watched = [watch(self.stop.as_fd()), watch(self.fd.as_fd())];
            match poll(&mut watched, PollTimeout::NONE) {
                Ok(_) => return Ok(!watched[0].any().unwrap_or(true)),
                Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Accepts one connection. `Ok(None)` if the socket was [stopped](Stopper::stop).
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        while self.wait()? {
            match accept4(self.fd.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
                // SAFETY: `accept4` has just created this descriptor, and nothing else owns it.
                Ok(fd) => return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
                Err(nix::Error::EINTR | nix::Error::ECONNABORTED | nix::Error::EAGAIN) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(None)
    }

    /// Like [`accept`](Self::accept), but waits and tries again when descriptors or memory run out: sessions return them when they end.
    pub fn accept_patiently(&self, what: &str) -> Option<OwnedFd> {
        loop {
            match self.accept() {
                Ok(connection) => return connection,
                Err(e) => {
                    tracing::error!("{what}: accepting a connection: {e}");
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        }
    }

    /// A handle that ends [`accept`](Self::accept) from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper::Listening(self.stop.clone())
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Ends a [`Listening`]'s accepts, or a connection's transfers.
#[derive(Debug)]
pub enum Stopper {
    /// A listening socket, which stays open.
    Listening(Arc<EventFd>),
    /// A connection, which ends for both sides.
    Connection(OwnedFd),
}

impl Stopper {
    /// A handle for a connection.
    pub fn for_connection(fd: &impl AsFd) -> io::Result<Stopper> {
        Ok(Stopper::Connection(fd.as_fd().try_clone_to_owned()?))
    }

    /// Ends it. Idempotent; never blocks.
    pub fn stop(&self) {
        match self {
            Stopper::Listening(stop) => drop(stop.write(1)),
            Stopper::Connection(fd) => drop(shutdown(fd.as_raw_fd(), Shutdown::Both)),
        }
    }
}

/// Removes a stale socket file.
fn clear(path: &Path, kind: SockType) -> Result<(), SocketError> {
    let system = |what, source| SocketError::System { path: path.to_owned(), what, source };
    let kind_of_file = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(system("stat", e)),
    };
    if !kind_of_file.is_socket() {
        return Err(SocketError::NotASocket(path.to_owned()));
    }
    let address = UnixAddr::new(path).map_err(|e| system("the path as a socket address", e.into()))?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, kind, flags, None).map_err(|e| system("socket", e.into()))?;
    match connect(probe.as_raw_fd(), &address) {
        Err(nix::Error::ECONNREFUSED) => {
            tracing::info!("{}: replacing a stale socket", path.display());
            std::fs::remove_file(path).map_err(|e| system("unlink", e))
        }
        Err(nix::Error::ENOENT) => Ok(()),
        // Connected, queue full, another type of socket, or not permitted: a process listens there.
        _ => Err(SocketError::InUse(path.to_owned())),
    }
}

/// Sockets that systemd passed in (`sd_listen_fds(3)`), by name.
#[derive(Debug, Default)]
pub struct Activated(HashMap<String, OwnedFd>);

impl Activated {
    /// The sockets of this process, from its environment. Call this once and early: it takes ownership of the descriptors.
    pub fn from_environment() -> Activated {
        let read = |name: &str| std::env::var(name).unwrap_or_default();
        Activated::from_values(&read("LISTEN_PID"), &read("LISTEN_FDS"), &read("LISTEN_FDNAMES"), 3)
    }

    fn from_values(pid: &str, count: &str, names: &str, first: i32) -> Activated {
        if pid.parse() != Ok(std::process::id()) {
            return Activated::default();
        }
        let count: i32 = count.parse().unwrap_or(0).clamp(0, 1024);
        let mut names = names.split(':');
        let mut sockets = HashMap::new();
        for number in first..first + count {
            let name = names.next().unwrap_or_default().to_owned();
            // SAFETY: LISTEN_PID is this process, so systemd passed these descriptors to it to own, and nothing else in this process uses their numbers.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            if let Err(e) = fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
                tracing::error!("cannot use descriptor {number} ({name:?}) from systemd: {e}");
                // The descriptor is not open, so there is nothing to close.
                std::mem::forget(fd);
                continue;
            }
            match sockets.entry(name) {
                Entry::Vacant(free) => drop(free.insert(fd)),
                Entry::Occupied(taken) => {
                    tracing::warn!(
                        "systemd passed two sockets named {:?}; the second is ignored",
                        taken.key()
                    );
                }
            }
        }
        Activated(sockets)
    }

    /// The socket with that name, or a new one at `path`.
    pub fn take_or_bind(
        &mut self,
        name: &str,
        path: &Path,
        kind: SockType,
        mode: u32,
    ) -> Result<Listening, SocketError> {
        match self.0.remove(name) {
            Some(fd) => {
                let what = nix::sys::socket::getsockopt(&fd, nix::sys::socket::sockopt::SockType);
                if what != Ok(kind) {
                    let text = format!(
                        "systemd's socket {name:?} is {what:?}, not {kind:?}: correct the .socket unit"
                    );
                    let source = io::Error::new(io::ErrorKind::InvalidInput, text);
                    return Err(SocketError::System {
                        path: path.to_owned(),
                        what: "socket activation",
                        source,
                    });
                }
                tracing::info!("using systemd's socket {name:?} instead of {}", path.display());
                Listening::new(fd, None).map_err(|source| SocketError::System {
                    path: path.to_owned(),
                    what: "eventfd",
                    source,
                })
            }
            None => Listening::bind(path, kind, mode),
        }
    }

    /// Names of sockets that were not taken.
    pub fn unused(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_refused() {
        let folder = folder();
        let path = folder.path().join("s");
        let mut first = Listening::bind(&path, SockType::SeqPacket, 0o600).unwrap();
        assert!(matches!(Listening::bind(&path, SockType::SeqPacket, 0o600), Err(SocketError::InUse(_))));
        assert!(matches!(Listening::bind(&path, SockType::Stream, 0o600), Err(SocketError::InUse(_))));
        // As after SIGKILL: the file stays and nothing listens.
        first.file = None;
        drop(first);
        assert!(path.exists());
        drop(Listening::bind(&path, SockType::SeqPacket, 0o600).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_not_replaced() {
        let folder = folder();
        let path = folder.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(Listening::bind(&path, SockType::Stream, 0o600), Err(SocketError::NotASocket(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn a_stopped_listener_accepts_nothing() {
        let folder = folder();
        let listening = Listening::bind(&folder.path().join("s"), SockType::Stream, 0o600).unwrap();
        let stopper = listening.stopper();
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| listening.accept().unwrap().is_none());
            stopper.stop();
            assert!(accepting.join().unwrap());
        });
    }

    #[test]
    fn sockets_from_systemd_are_found_by_name() {
        let folder = folder();
        let path = folder.path().join("s");
        let mut made = Listening::bind(&path, SockType::SeqPacket, 0o600).unwrap();
        made.file = None;
        let fd = made.fd.try_clone().unwrap();
        // Duplicated to a high number that parallel tests do not use.
        let number = fcntl(&fd, FcntlArg::F_DUPFD_CLOEXEC(700)).unwrap();
        let pid = std::process::id().to_string();
        assert!(Activated::from_values("1", "1", "native", number).0.is_empty());
        let mut activated = Activated::from_values(&pid, "1", "native", number);
        assert_eq!(activated.unused().collect::<Vec<_>>(), ["native"]);
        let wrong = activated.take_or_bind("native", &path, SockType::Stream, 0).unwrap_err().to_string();
        assert!(wrong.contains("native"), "{wrong}");
        let number = fcntl(&fd, FcntlArg::F_DUPFD_CLOEXEC(700)).unwrap();
        let mut activated = Activated::from_values(&pid, "1", "native", number);
        let taken = activated.take_or_bind("native", &path, SockType::SeqPacket, 0).unwrap();
        assert_eq!(activated.unused().count(), 0);
        drop(taken);
        assert!(path.exists(), "systemd's socket file stays");
    }
}
