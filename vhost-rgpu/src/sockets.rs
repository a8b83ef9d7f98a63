//! Listening Unix sockets: created here, inherited from the previous keeper, or passed in by systemd.
//!
//! A stale socket file (left by a daemon that was killed) is replaced. A socket that another process listens
//! on is an error.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use handover::{Inherited, Places, Store};
use metrics::Place;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockname,
    getsockopt, listen, shutdown, socket, sockopt,
};
use nix::unistd::{Gid, Group, setfsgid};
use thiserror::Error;

use crate::config::Config;

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

/// Who may connect to a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Permissions of the socket's file.
    pub mode: u32,
    /// Name of the file's group. By default it is the one that the system gives it: the keeper's.
    pub group: Option<String>,
}

impl From<u32> for Access {
    /// With these permissions, for the keeper's group.
    fn from(mode: u32) -> Access {
        Access { mode, group: None }
    }
}

impl Access {
    /// The group that is named. An error says that this machine has none of that name.
    pub fn gid(&self) -> io::Result<Option<Gid>> {
        let Some(name) = &self.group else { return Ok(None) };
        let missing = || io::Error::other(format!("this machine has no group {name:?}"));
        Group::from_name(name)?.map(|group| Some(group.gid)).ok_or_else(missing)
    }

    /// Gives a socket's file its group and permissions.
    fn apply(&self, path: &Path) -> io::Result<()> {
        if let Some(gid) = self.gid()? {
            // An owner may give a file to a group of its own without CAP_CHOWN, which the unit does not have.
            let before = setfsgid(gid);
            let given = std::os::unix::fs::chown(path, None, Some(gid.as_raw()));
            setfsgid(before);
            given?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(self.mode))
    }
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

    /// Listens at `path`.
    pub fn bind(path: &Path, kind: SockType, access: &Access) -> Result<Listening, SocketError> {
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
        access.apply(path).map_err(failed("its permissions"))?;
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

    /// Like [`accept`](Self::accept), but waits and tries again when descriptors or memory run out: sessions
    /// return them when they end. `stays` is called before each attempt; what it returns keeps this process
    /// in place while it has a connection that nobody has handled.
    pub fn accept_patiently<G>(&self, what: &str, stays: impl Fn() -> G) -> Option<(OwnedFd, G)> {
        loop {
            let accepted = self.wait().and_then(|goes_on| {
                let stays = stays();
                Ok(if goes_on { self.accept()?.map(|connection| (connection, stays)) } else { None })
            });
            match accepted {
                Ok(connection) => return connection,
                Err(e) => {
                    tracing::error!("{what}: accepting a connection: {e}");
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        }
    }

    /// The path where it listens, which systemd may have chosen.
    pub fn place(&self) -> Option<PathBuf> {
        place_of(&self.fd)
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

/// Whether the keeper could listen where its configuration says. A keeper that has already begun to take over
/// from another one has no way back.
pub fn check(config: &Config) -> anyhow::Result<()> {
    let places = Places::new();
    let paths =
        config.vms.iter().map(|vm| &vm.socket).chain(config.native.iter().map(|native| &native.socket));
    let mut paths = paths.chain(&config.status).chain(&config.admin);
    let metrics = match &config.metrics.listen {
        Some(Place::Unix(path)) => places.unix(path),
        Some(Place::Tcp(host, port)) => places.tcp(host, *port),
        None => Ok(()),
    };
    paths.try_for_each(|path| places.unix(path)).and(metrics).map_err(anyhow::Error::msg)
}

/// Permissions of the sockets of virtual machines and of programs that the configuration gives by default.
const DEFAULT_MODE: u32 = 0o660;

/// Prefix of names of listening sockets that the previous keeper created.
const OWN: &str = "own-";
/// Prefix of those that systemd created. systemd passes such a socket to each process that it starts, but not
/// to programs executed later.
const ACTIVATED: &str = "activated-";

/// Where listening sockets come from, and where they are kept for the next keeper.
#[derive(Debug)]
pub struct Sockets<'i> {
    /// What this process inherited. systemd names sockets as the configuration says (`sd_listen_fds(3)`).
    pub inherited: &'i mut Inherited,
    /// Keeps them.
    pub store: &'i Store,
}

impl Sockets<'_> {
    /// The socket with that name, or a new one at `path`. Who may connect to one of systemd's is for its unit
    /// to say.
    pub fn take_or_bind(
        &mut self,
        name: &str,
        path: &Path,
        kind: SockType,
        access: &Access,
    ) -> Result<Listening, SocketError> {
        if let Some(listening) = self.take(name, kind)? {
            let at = listening.place().unwrap_or_default();
            tracing::info!("using systemd's socket {name:?} at {}", at.display());
            for difference in differences(&at, path, access) {
                tracing::warn!(
                    "{difference}: the .socket unit of systemd's {name:?} decides that, not the configuration"
                );
            }
            return Ok(listening);
        }
        let system = |what, source| SocketError::System { path: path.to_owned(), what, source };
        let before = self.inherited.remove(&format!("{OWN}{name}"));
        // Its file may have been removed, or the configuration may name another.
        if let Some(fd) = before.filter(|fd| path.exists() && is_at(fd, path)) {
            // The configuration may give it to others than before.
            access.apply(path).map_err(|source| system("its permissions", source))?;
            let listening = Listening::new(fd, Some(path.to_owned()));
            return self.keep(OWN, name, path, listening.map_err(|source| system("eventfd", source))?);
        }
        self.store.forget(&format!("{OWN}{name}"));
        self.keep(OWN, name, path, Listening::bind(path, kind, access)?)
    }

    /// systemd's socket with that name, if it passed one.
    pub fn take(&mut self, name: &str, kind: SockType) -> Result<Option<Listening>, SocketError> {
        let before = self.inherited.remove(&format!("{ACTIVATED}{name}"));
        let Some(fd) = self.inherited.remove(name).or(before) else { return Ok(None) };
        let path = place_of(&fd).unwrap_or_default();
        let system = |what, source| SocketError::System { path: path.clone(), what, source };
        let what = getsockopt(&fd, sockopt::SockType);
        if what != Ok(kind) {
            let text =
                format!("systemd's socket {name:?} is {what:?}, not {kind:?}: correct the .socket unit");
            return Err(system("socket activation", io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        let listening = Listening::new(fd, None).map_err(|source| system("eventfd", source))?;
        self.keep(ACTIVATED, name, &path, listening).map(Some)
    }

    /// Keeps a socket for the next keeper.
    fn keep(
        &self,
        prefix: &str,
        name: &str,
        path: &Path,
        listening: Listening,
    ) -> Result<Listening, SocketError> {
        let kept = self.store.keep(&format!("{prefix}{name}"), &listening);
        let what = "keeping the socket";
        kept.map_err(|source| SocketError::System { path: path.to_owned(), what, source })?;
        Ok(listening)
    }

    /// Closes the sockets that nobody took. Logs names that are not the keeper's own.
    pub fn drop_others(&mut self) {
        for name in self.inherited.names("") {
            drop(self.inherited.remove(&name));
            if name.starts_with(OWN) || name.starts_with(ACTIVATED) {
                self.store.forget(&name);
            } else {
                tracing::warn!(
                    "systemd passed a socket named {name:?} that no section of the configuration uses"
                );
            }
        }
    }
}

/// The path that a socket is bound to.
fn place_of(fd: &OwnedFd) -> Option<PathBuf> {
    getsockname::<UnixAddr>(fd.as_raw_fd()).ok()?.path().map(Path::to_owned)
}

/// Whether a socket is bound to this path.
fn is_at(fd: &OwnedFd, path: &Path) -> bool {
    place_of(fd).is_some_and(|place| place == path)
}

/// What the configuration says otherwise than systemd's socket at `at` is. Nobody need have written there
/// what is the default.
fn differences(at: &Path, path: &Path, access: &Access) -> Vec<String> {
    let mut found = Vec::new();
    if at != path {
        found.push(format!("{} is at {}", path.display(), at.display()));
    }
    let Ok(file) = std::fs::metadata(at) else { return found };
    let mode = file.mode() & 0o777;
    if access.mode != mode && access.mode != DEFAULT_MODE {
        found.push(format!("{} has the permissions {mode:#o}, not {:#o}", at.display(), access.mode));
    }
    if let Some(group) = &access.group
        && !access.gid().is_ok_and(|gid| gid == Some(Gid::from_raw(file.gid())))
    {
        found.push(format!("{} is not of the group {group}", at.display()));
    }
    found
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
        let mut first = Listening::bind(&path, SockType::SeqPacket, &0o600.into()).unwrap();
        assert!(matches!(
            Listening::bind(&path, SockType::SeqPacket, &0o600.into()),
            Err(SocketError::InUse(_))
        ));
        assert!(matches!(
            Listening::bind(&path, SockType::Stream, &0o600.into()),
            Err(SocketError::InUse(_))
        ));
        // As after SIGKILL: the file stays and nothing listens.
        first.file = None;
        drop(first);
        assert!(path.exists());
        drop(Listening::bind(&path, SockType::SeqPacket, &0o600.into()).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_not_replaced() {
        let folder = folder();
        let path = folder.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(
            Listening::bind(&path, SockType::Stream, &0o600.into()),
            Err(SocketError::NotASocket(_))
        ));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn a_stopped_listener_accepts_nothing() {
        let folder = folder();
        let listening = Listening::bind(&folder.path().join("s"), SockType::Stream, &0o600.into()).unwrap();
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
        let mut made = Listening::bind(&path, SockType::SeqPacket, &0o600.into()).unwrap();
        made.file = None;
        let store = Store::default();
        let given = || Inherited::from_pairs([("native".to_owned(), made.fd.try_clone().unwrap())]);
        let mut inherited = given();
        let mut sockets = Sockets { inherited: &mut inherited, store: &store };
        let wrong =
            sockets.take_or_bind("native", &path, SockType::Stream, &0.into()).unwrap_err().to_string();
        assert!(wrong.contains("native"), "{wrong}");
        let mut inherited = given();
        let mut sockets = Sockets { inherited: &mut inherited, store: &store };
        let taken = sockets.take_or_bind("native", &path, SockType::SeqPacket, &0.into()).unwrap();
        assert_eq!(taken.place().as_ref(), Some(&path));
        drop(taken);
        assert!(path.exists(), "systemd's socket file stays");
        assert!(inherited.names("").is_empty());
        assert!(store.name_of("activated-native", &made.fd).is_some());
    }

    #[test]
    fn what_a_socket_unit_decides_otherwise_than_the_configuration_is_named() {
        let folder = folder();
        let path = folder.path().join("s");
        let _made = Listening::bind(&path, SockType::SeqPacket, &0o600.into()).unwrap();
        let found = |configured: &Path, access: &Access| differences(&path, configured, access);
        let (shown, none) = (path.display(), Vec::<String>::new());
        assert_eq!(found(&path, &0o600.into()), none);
        assert_eq!(found(&path, &DEFAULT_MODE.into()), none, "the default");
        assert_eq!(found(&path, &0o666.into()), [format!("{shown} has the permissions 0o600, not 0o666")]);
        let elsewhere = folder.path().join("mine");
        assert_eq!(found(&elsewhere, &0o600.into()), [format!("{} is at {shown}", elsewhere.display())]);
        let group = Some("no such group".to_owned());
        assert_eq!(
            found(&path, &Access { mode: 0o600, group }),
            [format!("{shown} is not of the group no such group")]
        );
    }

    #[test]
    fn a_socket_gets_the_group_and_permissions_that_the_configuration_names() {
        let folder = folder();
        let path = folder.path().join("s");
        // Only root may give a file to a group that it is not in.
        let other = if nix::unistd::geteuid().is_root() { Gid::from_raw(1) } else { Gid::effective() };
        let access = |mode: u32, gid: Gid| {
            let group = Group::from_gid(gid).unwrap().map(|group| group.name);
            Access { mode, group }
        };
        let is = || std::fs::metadata(&path).map(|file| (file.mode() & 0o777, file.gid())).unwrap();
        let mut before = Listening::bind(&path, SockType::Stream, &access(0o620, other)).unwrap();
        assert_eq!(is(), (0o620, other.as_raw()));
        // The next keeper's configuration says something else.
        before.file = None;
        let store = Store::default();
        let mut inherited = Inherited::from_pairs([("own-vm-a".to_owned(), before.fd.try_clone().unwrap())]);
        let mut sockets = Sockets { inherited: &mut inherited, store: &store };
        let own = access(0o600, Gid::effective());
        let _same = sockets.take_or_bind("vm-a", &path, SockType::Stream, &own).unwrap();
        assert_eq!(is(), (0o600, Gid::effective().as_raw()));
        let nobody = Access { mode: 0o660, group: Some("no such group".to_owned()) };
        let wrong = Listening::bind(&folder.path().join("t"), SockType::Stream, &nobody).unwrap_err();
        assert!(wrong.to_string().contains("no group \"no such group\""), "{wrong}");
    }

    #[test]
    fn the_next_keeper_inherits_the_socket_unless_its_path_changed() {
        let folder = folder();
        let path = folder.path().join("s");
        let mut before = Listening::bind(&path, SockType::Stream, &0o600.into()).unwrap();
        // An upgrade executes the next program, so nothing is dropped.
        before.file = None;
        let store = Store::default();
        let given = || Inherited::from_pairs([("own-status".to_owned(), before.fd.try_clone().unwrap())]);
        let mut inherited = given();
        let mut sockets = Sockets { inherited: &mut inherited, store: &store };
        let mut same = sockets.take_or_bind("status", &path, SockType::Stream, &0o600.into()).unwrap();
        same.file = None;
        let client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert!(same.accept().unwrap().is_some());
        drop(client);
        let mut inherited = given();
        let mut sockets = Sockets { inherited: &mut inherited, store: &store };
        let other = folder.path().join("other");
        let moved = sockets.take_or_bind("status", &other, SockType::Stream, &0o600.into()).unwrap();
        std::os::unix::net::UnixStream::connect(&other).unwrap();
        assert!(moved.accept().unwrap().is_some());
    }
}
