//! A service manager, as systemd is one for a daemon: it keeps the descriptors that the daemon gives it
//! (`sd_notify(3)`, `FDSTORE=1`), starts another daemon with them (`sd_listen_fds(3)`), and hears when a
//! daemon serves.

use std::ffi::OsStr;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use crate::until;

/// The numbers under which descriptors wait in the new process for their own.
const ABOVE: RawFd = 700;

type Kept = Vec<(String, OwnedFd)>;

/// What it has heard.
#[derive(Debug, Default)]
struct Heard {
    kept: Kept,
    /// What was said of the daemon's state, in order.
    said: Vec<String>,
    /// How often [`Manager::settle`] was heard.
    settled: u64,
}

/// A service manager. What it keeps is closed when it is dropped.
#[derive(Debug)]
pub struct Manager {
    socket: PathBuf,
    /// Removed with the manager.
    #[cfg(feature = "folders")]
    _folder: Option<tempfile::TempDir>,
    heard: Arc<Mutex<Heard>>,
}

#[cfg(feature = "folders")]
impl Default for Manager {
    fn default() -> Manager {
        Manager::new()
    }
}

impl Manager {
    /// One that keeps nothing yet.
    #[cfg(feature = "folders")]
    pub fn new() -> Manager {
        let folder = tempfile::tempdir().unwrap();
        let mut manager = Manager::at(folder.path().join("notify"));
        manager._folder = Some(folder);
        manager
    }

    /// One that keeps nothing yet, and listens at this path.
    pub fn at(path: PathBuf) -> Manager {
        let socket = UnixDatagram::bind(&path).unwrap();
        let heard = Arc::<Mutex<Heard>>::default();
        let for_thread = heard.clone();
        std::thread::spawn(move || while serve_one(&socket, &for_thread) {});
        Manager {
            socket: path,
            #[cfg(feature = "folders")]
            _folder: None,
            heard,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, text: &str) {
        let own = UnixDatagram::unbound().unwrap();
        own.send_to(text.as_bytes(), &self.socket).unwrap();
    }

    /// Waits until everything that was said so far is heard.
    fn settle(&self) {
        let before = self.lock().settled;
        self.say("SETTLE");
        until("the service manager has heard everything", || self.lock().settled > before);
    }

    /// Names of what it keeps.
    pub fn names(&self) -> Vec<String> {
        self.settle();
        self.lock().kept.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The text of the record that it keeps under this name, without steps that were added to it. `room` is
    /// how long it may be.
    pub fn record(&self, name: &str, room: u64) -> Option<serde_json::Value> {
        self.settle();
        let heard = self.lock();
        let (_, fd) = heard.kept.iter().find(|(other, _)| other == name)?;
        let text = handover::Text::open(fd.try_clone().unwrap(), room).read().unwrap();
        serde_json::Deserializer::from_slice(&text).into_iter().next()?.ok()
    }

    /// What daemons have said of their states so far: `READY=1` and the like, without the times that go with
    /// them.
    pub fn said(&self) -> Vec<String> {
        self.settle();
        self.lock().said.iter().filter_map(|text| text.lines().next()).map(str::to_owned).collect()
    }

    /// Keeps a descriptor as if a daemon had given it.
    pub fn put(&self, name: &str, fd: OwnedFd) {
        self.lock().kept.push((name.to_owned(), fd));
    }

    /// The command that starts `program` with what is kept.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.settle();
        let kept: Kept =
            self.lock().kept.iter().map(|(name, fd)| (name.clone(), fd.try_clone().unwrap())).collect();
        let names: Vec<&str> = kept.iter().map(|(name, _)| name.as_str()).collect();
        // The process id must be the daemon's: that of the shell, which the daemon replaces.
        let mut command = Command::new("sh");
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""])
            .arg(program)
            .env("NOTIFY_SOCKET", &self.socket)
            .env("LISTEN_FDS", kept.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"));
        // Out of the way of the numbers that they get.
        let high: Vec<OwnedFd> = kept
            .into_iter()
            .map(|(_, fd)| {
                let number = fcntl(fd.as_fd(), FcntlArg::F_DUPFD_CLOEXEC(ABOVE)).unwrap();
                // SAFETY: the kernel has just made this descriptor for this call, and nothing else owns it.
                unsafe { OwnedFd::from_raw_fd(number) }
            })
            .collect();
        // SAFETY: between fork and exec the closure makes system calls only, close_range and dup2, which are
        // async-signal-safe. What this process itself has inherited ends with it; dup2 clears close-on-exec
        // for the new numbers.
        unsafe {
            command.pre_exec(move || {
                if libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed()) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                for (number, fd) in (3..).zip(&high) {
                    if libc::dup2(fd.as_raw_fd(), number) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.say("END");
    }
}

/// Whether two descriptors refer to the same open file, of which systemd keeps one, whatever their names are.
fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    /// `KCMP_FILE` of linux/kcmp.h.
    const FILE: libc::c_int = 0;
    let own = std::process::id();
    // SAFETY: a plain system call, which compares two descriptors that are open during the call.
    unsafe { libc::syscall(libc::SYS_kcmp, own, own, FILE, one.as_raw_fd(), other.as_raw_fd()) == 0 }
}

/// Hears one message. False: the manager is gone.
fn serve_one(socket: &UnixDatagram, heard: &Mutex<Heard>) -> bool {
    let mut bytes = [0; 4096];
    let mut space = nix::cmsg_space!([RawFd; 16]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), flags).unwrap();
    let mut fds = Vec::new();
    for control in message.cmsgs().unwrap() {
        if let ControlMessageOwned::ScmRights(received) = control {
            // SAFETY: the kernel has just installed these descriptors in this process, and nothing else owns
            // them.
            fds.extend(received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let length = message.bytes;
    let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
    let name = value("FDNAME").unwrap_or("stored").to_owned();
    if value("FDSTORE") == Some("1") {
        for fd in fds {
            if !heard.kept.iter().any(|(_, there)| is_same(there, &fd)) {
                heard.kept.push((name.clone(), fd));
            }
        }
    } else if value("FDSTOREREMOVE") == Some("1") {
        heard.kept.retain(|(other, _)| *other != name);
    } else if text == "SETTLE" {
        heard.settled += 1;
    } else {
        heard.said.push(text.clone());
    }
    text != "END"
}
