//! Whether a daemon could make the sockets and files that its configuration names. Nothing is made: a daemon
//! may be running with them.
//!
//! A daemon that is to be replaced tells what it listens at itself, because the next program gets that. A
//! check that nobody else asked for does not know whose a socket is that somebody listens at, and lets it
//! pass: it is probably the running daemon's.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::Display;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, UnixAddr, bind, getsockname, setsockopt, socket,
    sockopt,
};
use nix::unistd::{AccessFlags, access};

/// The variable with which a daemon tells the program that may replace it that it can read where the daemon
/// listens from its standard input, one address a line. There may be more than a variable can have.
pub(crate) const LISTENS: &str = "RGPU_LISTENS";
/// How such a line begins.
const UNIX: &str = "unix:";
const TCP: &str = "tcp:";

/// Checks places for a daemon.
#[derive(Debug, Default)]
pub struct Places {
    /// Where the daemon that is to be replaced listens. `None`: none is.
    held: Option<(Vec<PathBuf>, Vec<SocketAddr>)>,
    /// What was asked about so far, as the messages name it: no two sockets can be at one place.
    asked: RefCell<HashSet<String>>,
}

impl Places {
    /// For the daemon that this process would replace, if it was [asked](crate::can_take_over) that.
    pub fn new() -> Places {
        let asked = std::env::var_os(LISTENS).is_some();
        let held = asked.then(|| parse(&io::read_to_string(io::stdin()).unwrap_or_default()));
        Places { held, ..Places::default() }
    }

    /// Fails if another of the daemon's sockets is there.
    fn once(&self, place: String) -> Result<(), String> {
        let wrong = format!("cannot listen at {place}: the configuration has another socket there");
        if self.asked.borrow_mut().insert(place) { Ok(()) } else { Err(wrong) }
    }

    /// Whether a daemon could listen at a Unix socket. It makes a missing folder.
    ///
    /// # Errors
    /// Why not.
    pub fn unix(&self, path: &Path) -> Result<(), String> {
        self.once(path.display().to_string())?;
        let wrong = |why: &dyn Display| format!("cannot listen at {}: {why}", path.display());
        if self.held.as_ref().is_some_and(|(paths, _)| paths.iter().any(|held| held == path)) {
            return Ok(());
        }
        if UnixAddr::new(path).is_err() {
            return Err(wrong(&"the path of a socket may have at most 107 bytes"));
        }
        match std::fs::symlink_metadata(path) {
            Ok(file) if !file.file_type().is_socket() => {
                return Err(wrong(&"exists and is not a socket; remove it or configure another path"));
            }
            Ok(_) if has_listener(path) => {
                let taken = wrong(&"another process does already; end it or configure another path");
                return if self.held.is_some() { Err(taken) } else { Ok(()) };
            }
            _ => {}
        }
        path.parent().map_or(Ok(()), |folder| self.folder(folder)).map_err(|why| wrong(&why))
    }

    /// Whether a daemon could listen at a TCP port.
    ///
    /// # Errors
    /// Why not.
    pub fn tcp(&self, host: &str, port: u16) -> Result<(), String> {
        // With 0, the system chooses one that is free.
        if port > 0 {
            self.once(format!("{host}, port {port}"))?;
        }
        let wrong = |e: io::Error| format!("cannot listen at {host}, port {port}: {e}");
        let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
        // Like the standard library, a daemon takes the first one that works.
        for address in (host, port).to_socket_addrs().map_err(wrong)? {
            let held = self.held.as_ref().map(|(_, addresses)| addresses);
            if held.is_some_and(|held| held.contains(&address)) {
                return Ok(());
            }
            // It is free by then: what the next program does not listen at is closed first.
            let leaves = held.is_none_or(|held| held.iter().any(|held| held.port() == port));
            match try_bind(address) {
                Ok(()) => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse && leaves => return Ok(()),
                Err(e) => failed = e,
            }
        }
        Err(wrong(failed))
    }

    /// Whether a daemon could make files in a folder, or the folder itself.
    ///
    /// # Errors
    /// Why not.
    pub fn folder(&self, folder: &Path) -> Result<(), String> {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let found = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
        let wrong = |why: &dyn Display| Err(format!("the folder {}: {why}", found.display()));
        if !found.is_dir() {
            return Err(format!("{} is not a folder", found.display()));
        }
        match access(found, AccessFlags::W_OK | AccessFlags::X_OK) {
            Ok(()) => Ok(()),
            Err(e @ nix::Error::EROFS) => {
                let e = io::Error::from(e);
                wrong(&format!("{e}; a systemd unit may write only to folders in its ReadWritePaths="))
            }
            Err(e) => wrong(&io::Error::from(e)),
        }
    }
}

/// Where this process listens, as a program reads it that is told so by [`LISTENS`].
pub(crate) fn listens() -> String {
    let numbers = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
    let address = |number| {
        let address = getsockname::<SockaddrStorage>(number).ok()?;
        if let Some(path) = address.as_unix_addr().and_then(UnixAddr::path) {
            return Some(format!("{UNIX}{}", path.to_str()?));
        }
        let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
        let v6 = address.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into()));
        v4.or(v6).map(|tcp| format!("{TCP}{tcp}"))
    };
    let all: Vec<String> = numbers.filter(|number| listens_at(*number)).filter_map(address).collect();
    all.join("\n")
}

fn parse(text: &str) -> (Vec<PathBuf>, Vec<SocketAddr>) {
    let paths = text.lines().filter_map(|line| line.strip_prefix(UNIX)).map(PathBuf::from);
    let addresses = text.lines().filter_map(|line| line.strip_prefix(TCP)?.parse().ok());
    (paths.collect(), addresses.collect())
}

/// Whether a descriptor is a listening socket.
fn listens_at(number: RawFd) -> bool {
    let (mut value, mut size) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    let to: *mut libc::c_int = &raw mut value;
    // SAFETY: writes at most `size` bytes to `value`. A number that is no socket, or not open, is an error.
    let failed =
        unsafe { libc::getsockopt(number, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, to.cast(), &raw mut size) };
    failed == 0 && value != 0
}

/// Whether a process listens at this Unix socket. Connecting to it would tell, too, but a daemon would take
/// that for a client.
fn has_listener(path: &Path) -> bool {
    /// `__SO_ACCEPTCON` of the kernel's net.h.
    const LISTENING: u32 = 1 << 16;
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    table.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let flags = fields.get(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & LISTENING != 0)
            && path.to_str().is_some_and(|path| line.ends_with(&format!(" {path}")))
    })
}

/// Binds a socket to an address for a moment, without listening.
fn try_bind(address: SocketAddr) -> io::Result<()> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    Ok(bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_that_cannot_be_made_is_found_before_it_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let places = Places::default();
        let why = |path: PathBuf| places.unix(&path).unwrap_err();
        assert_eq!(places.unix(&path("new/folder/s")), Ok(()));
        assert!(!path("new").exists());
        drop(UnixListener::bind(path("stale")).unwrap());
        assert_eq!(places.unix(&path("stale")), Ok(()));
        std::fs::write(path("precious"), "data").unwrap();
        assert!(why(path("precious")).contains("is not a socket"));
        assert!(why(path("precious/folder/s")).contains("precious is not a folder"));
        assert!(why(path(&"x".repeat(108))).contains("107 bytes"));
    }

    #[test]
    fn two_sockets_at_one_place_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let (places, path) = (Places::default(), folder.path().join("s"));
        assert_eq!(places.unix(&path), Ok(()));
        assert!(places.unix(&path).unwrap_err().contains("another socket there"));
        assert_eq!(places.unix(&folder.path().join("t")), Ok(()));
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        assert_eq!(places.tcp("127.0.0.1", free), Ok(()));
        assert!(places.tcp("127.0.0.1", free).unwrap_err().contains("another socket there"));
        assert_eq!([(); 2].map(|()| places.tcp("127.0.0.1", 0)), [Ok(()), Ok(())]);
    }

    #[test]
    fn only_what_the_daemon_itself_listens_at_is_free_for_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["own", "other"].map(|name| folder.path().join(name));
        let [_own, _other] = paths.each_ref().map(|path| UnixListener::bind(path).unwrap());
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [own, other] = ports.each_ref().map(|listener| listener.local_addr().unwrap());
        // Both are this process's, and so this text has all four.
        let all = listens();
        for place in paths.iter().map(|path| format!("unix:{}", path.display())) {
            assert!(all.lines().any(|line| line == place), "{place} in {all}");
        }
        assert!([own, other].iter().all(|port| all.lines().any(|line| line == format!("tcp:{port}"))));
        let check = |places: &Places| {
            let unix = paths.each_ref().map(|path| places.unix(path).is_ok());
            let tcp = [own, other].map(|address| places.tcp("127.0.0.1", address.port()).is_ok());
            (unix, tcp, places.tcp("0.0.0.0", own.port()).is_ok())
        };
        let held = parse(&format!("unix:{}\ntcp:{own}\n", paths[0].display()));
        let (unix, tcp, wider) = check(&Places { held: Some(held), ..Places::default() });
        assert_eq!((unix, tcp, wider), ([true, false], [true, false], true));
        // Without a daemon that says what it has, they may all be the running one's.
        assert_eq!(check(&Places::default()), ([true, true], [true, true], true));
        let why = Places::default().tcp("192.0.2.1", 9700).unwrap_err();
        assert!(why.contains("192.0.2.1, port 9700"), "{why}");
    }
}
