//! The port over the Unix socket of `vhost-rgpu`: [`protocol::native`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::descriptor::{Uncancelled, own};
use super::mapping::Mapping;
use super::{Pinned, Port, PortError, SEVERAL};
use crate::counters::{COUNTERS, add};
use crate::{lock, log};
use protocol::device::{Answer, Response, request};
use protocol::native::{MAGIC, Request};
use zerocopy::{FromZeros, IntoBytes};

/// After this long without an answer to its first request, a program reports that it waits. systemd may hold
/// its socket for a daemon that does not start.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to the daemon, with its channel.
pub struct Native {
    path: PathBuf,
    socket: OwnedFd,
    /// Held during a request and its reply: the daemon replies in order.
    turn: Mutex<()>,
    memory: OwnedFd,
    channel: Mapping,
    doorbell: OnceLock<OwnedFd>,
    next_region: AtomicU32,
    gone: AtomicBool,
}

impl Native {
    pub fn open(path: &Path, size: usize) -> Result<Native, PortError> {
        let error = |what| move |source| PortError::io(path, what, source);
        let socket = match connect(path) {
            Err(missing) if missing.kind() == io::ErrorKind::NotFound => {
                return Err(PortError::NoSocket { path: path.to_owned() });
            }
            Err(wrong) if is_other(path, &wrong) => return Err(PortError::NotOurs { path: path.to_owned() }),
            other => other.map_err(error("connecting"))?,
        };
        let memory = memfd(c"rgpu-channel", size).map_err(error("creating the channel's memory"))?;
        let channel = Mapping::shared(memory.as_fd(), size).map_err(error("mapping the channel"))?;
        channel.dont_fork();
        Ok(Native {
            path: path.to_owned(),
            socket,
            turn: Mutex::new(()),
            memory,
            channel,
            doorbell: OnceLock::new(),
            next_region: AtomicU32::new(1),
            gone: AtomicBool::new(false),
        })
    }

    /// Registers `size` bytes of a file.
    fn register(&self, memory: &OwnedFd, size: usize) -> Result<u32, PortError> {
        let region = self.next_region.fetch_add(1, Ordering::Relaxed);
        self.request(request::REGISTER_MEMORY, region, size, Some(memory.as_raw_fd()))?;
        Ok(region)
    }

    /// Sends a request and receives the reply, with its descriptor if any.
    fn request(
        &self,
        kind: u32,
        region: u32,
        size: usize,
        fd: Option<RawFd>,
    ) -> Result<Option<OwnedFd>, PortError> {
        let request = Request {
            magic: MAGIC,
            version: protocol::VERSION,
            kind,
            region,
            flags: 0,
            offset: 0,
            size: size as u64,
        };
        let _turn = lock(&self.turn);
        let _uncancelled = Uncancelled::begin();
        let error = |what| move |source| PortError::io(&self.path, what, source);
        match send(&self.socket, request.as_bytes(), fd) {
            // A daemon that accepts no more clients has sent its reason and closed the connection.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
            sent => sent.map_err(error("sending a request to vhost-rgpu"))?,
        }
        if kind == request::CREATE_CHANNEL && !self.answered_within(PATIENCE) {
            let (path, seconds) = (self.path.display(), PATIENCE.as_secs());
            log::warn(format_args!(
                "vhost-rgpu has not answered at {path} for {seconds} s, and this program waits for it: on the host, systemctl status vhost-rgpu shows whether it runs"
            ));
        }
        let mut response = Response::new_zeroed();
        let (n, fd) = receive(&self.socket, response.as_mut_bytes()).map_err(error("vhost-rgpu's answer"))?;
        if n == 0 {
            self.gone.store(true, Ordering::Relaxed);
            return Err(PortError::Refused {
                path: self.path.clone(),
                what: "vhost-rgpu closed the connection",
                reason: "see its log".to_owned(),
            });
        }
        if n != size_of::<Response>() {
            return Err(PortError::Refused {
                path: self.path.clone(),
                what: "another version of rgpu",
                reason: format!("a reply of {n} bytes instead of {}", size_of::<Response>()),
            });
        }
        match Answer::from_number(response.status) {
            Answer::Ok => Ok(fd),
            refused => Err(PortError::Refused {
                path: self.path.clone(),
                what: super::refusal(refused),
                reason: response.reason(),
            }),
        }
    }
}

impl Native {
    /// Whether the reply, or the connection's end, came in this time.
    fn answered_within(&self, time: Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let millis = i32::try_from(time.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one live `pollfd`. If a signal ends the wait, the report is omitted.
        unsafe { libc::poll(&raw mut poll, 1, millis) != 0 }
    }
}

impl Port for Native {
    fn channel(&self) -> &Mapping {
        &self.channel
    }

    fn connect(&self) -> Result<(), PortError> {
        let doorbell =
            self.request(request::CREATE_CHANNEL, 0, self.channel.len(), Some(self.memory.as_raw_fd()))?;
        let Some(doorbell) = doorbell else {
            return Err(PortError::Refused {
                path: self.path.clone(),
                what: "another version of rgpu",
                reason: "no doorbell came with the channel".to_owned(),
            });
        };
        // The daemon refuses a second connect, so the cell is empty.
        let _ = self.doorbell.set(doorbell);
        Ok(())
    }

    fn kick(&self) {
        if let Some(doorbell) = self.doorbell.get() {
            let one = 1u64.to_ne_bytes();
            add(&COUNTERS.system_calls, 1);
            let _uncancelled = Uncancelled::begin();
            // SAFETY: eight bytes of a live array. It fails only if the counter is at its maximum, which also
            // wakes the daemon.
            unsafe { libc::write(doorbell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    fn wait(&self, offset: u64, expected: u32, timeout: Duration) -> bool {
        add(&COUNTERS.system_calls, 1);
        let timeout =
            libc::timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
        // SAFETY: the offsets are those of words inside the channel, and the mapping lives as long as `self`.
        // The caller checks after any return.
        unsafe {
            let word = self.channel.base().add(offset as usize).cast::<u32>();
            libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, expected, &raw const timeout) == 0
        }
    }

    fn alive(&self) -> bool {
        if self.gone.load(Ordering::Relaxed) {
            return false;
        }
        let _uncancelled = Uncancelled::begin();
        let mut poll = libc::pollfd { fd: self.socket.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one live `pollfd`; no wait.
        let n = unsafe { libc::poll(&raw mut poll, 1, 0) };
        if n > 0 && poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
            self.gone.store(true, Ordering::Relaxed);
            return false;
        }
        true
    }

    fn why_dead(&self) -> String {
        format!("{}: vhost-rgpu closed the connection or was killed", self.path.display())
    }

    fn pin_new(&self, size: usize, at: Option<usize>) -> Result<Pinned, PortError> {
        let _uncancelled = Uncancelled::begin();
        let error = |what| move |source| PortError::io(&self.path, what, source);
        let memory = memfd(c"rgpu-pinned", size).map_err(|e| {
            let full = e.raw_os_error() == Some(libc::EMFILE);
            error("creating pinned memory")(if full { too_many_files() } else { e })
        })?;
        let mapping =
            Mapping::pinned(Some(memory.as_fd()), size, at).map_err(error("mapping pinned memory"))?;
        let region = self.register(&memory, size)?;
        // A process with one server does not keep the file, which saves a descriptor for each piece.
        let file = SEVERAL.load(Ordering::Relaxed).then_some(memory);
        Ok(Pinned { mapping, region, file })
    }

    /// The host cannot map the program's own memory, because it is not a memfd.
    fn pin(&self, _addr: usize, _size: usize) -> Option<Result<u32, PortError>> {
        None
    }

    fn pin_shared(&self, pinned: &Pinned) -> Result<u32, PortError> {
        let no_file = || io::Error::other("its file is closed");
        let memory = pinned.file.as_ref().ok_or_else(no_file);
        let memory = memory.map_err(|e| PortError::io(&self.path, "sharing pinned memory", e))?;
        self.register(memory, pinned.mapping.len())
    }

    fn unpin(&self, region: u32) {
        if let Err(error) = self.request(request::UNREGISTER_MEMORY, region, 0, None)
            && self.alive()
        {
            log::warn(format_args!("cannot unregister pinned memory: {}", error.line()));
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut fds = vec![self.socket.as_raw_fd(), self.memory.as_raw_fd()];
        fds.extend(self.doorbell.get().map(|fd| fd.as_raw_fd()));
        fds
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Whether a connection failed because the path names a socket of another kind, or no socket.
fn is_other(path: &Path, error: &io::Error) -> bool {
    let socket = || std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket());
    error.raw_os_error() == Some(libc::EPROTOTYPE)
        || error.kind() == io::ErrorKind::ConnectionRefused && !socket()
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call.
    let socket = own(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: zero is valid for every field of a `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket's path is too long"));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as _;
    }
    // SAFETY: the address is complete and its size is given.
    check(unsafe {
        libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as u32)
    })?;
    Ok(socket)
}

/// Why a file of `size` bytes cannot be made, if this process's limit for files is lower. The system would
/// not only refuse it, but also send a signal that ends the process.
fn over_file_limit(size: usize) -> Option<io::Error> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a plain system call that writes to a live structure.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    (known && limit.rlim_cur < size as u64).then(|| {
        let most = limit.rlim_cur;
        io::Error::other(format!("{size} bytes, and this process may make files of {most}: raise ulimit -f"))
    })
}

/// Why there is no descriptor for pinned memory, and what to do.
fn too_many_files() -> io::Error {
    let kept = if SEVERAL.load(Ordering::Relaxed) {
        ", among them one for each piece of pinned memory, because it has several servers"
    } else {
        ""
    };
    io::Error::other(format!("this process has as many open files as it may have{kept}: raise ulimit -n"))
}

/// A memfd of `size` bytes, sealed against shrinking: the host maps it, and would crash if the file became
/// shorter.
fn memfd(name: &std::ffi::CStr, size: usize) -> io::Result<OwnedFd> {
    if let Some(error) = over_file_limit(size) {
        return Err(error);
    }
    // SAFETY: plain system calls on a NUL-terminated name and a descriptor of this function.
    unsafe {
        let fd = own(libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING))?;
        check(libc::ftruncate(fd.as_raw_fd(), size as i64))?;
        check(libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW))?;
        Ok(fd)
    }
}

/// A buffer for a control message with one descriptor, correctly aligned.
#[repr(C, align(8))]
struct Control([u8; 32]);

fn send(socket: &OwnedFd, bytes: &[u8], fd: Option<RawFd>) -> io::Result<()> {
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 32]);
    // SAFETY: zero is valid for every field; the message then points to live buffers with their sizes, and
    // the control buffer has room for one header and one descriptor (CMSG_SPACE(4) is 24).
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        if let Some(fd) = fd {
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
        }
        loop {
            if libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 32]);
    // SAFETY: the message points to live buffers with their sizes, as in `send`. This function owns a
    // received descriptor.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<Control>() as _;
        let mut reset = false;
        let n = loop {
            let n = libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
            if n >= 0 {
                break n as usize;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                // Reported once if the daemon closed the connection without reading the request; what it sent
                // before can still be read.
                io::ErrorKind::ConnectionReset if !reset => reset = true,
                _ => return Err(error),
            }
        };
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let has_fd = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len as usize >= libc::CMSG_LEN(4) as usize;
        if has_fd {
            return Ok((n, Some(own(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned())?)));
        }
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(io::Error::other(
                "no number was free for the descriptor that came with it: this process has too many open files (ulimit -n)",
            ));
        }
        Ok((n, None))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_program_notices_that_nobody_answers_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // SAFETY: plain system calls on a live address with its size; the descriptor is this function's.
        let listening = unsafe {
            let socket =
                own(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0)).unwrap();
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as _;
            for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
                *to = *from as _;
            }
            let size = size_of_val(&address) as u32;
            check(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size)).unwrap();
            check(libc::listen(socket.as_raw_fd(), 1)).unwrap();
            socket
        };
        // As systemd does for a daemon that does not start.
        let native = Native::open(&path, 1 << 20).unwrap();
        assert!(!native.answered_within(Duration::ZERO));
        // SAFETY: a plain system call.
        let accepted =
            own(unsafe { libc::accept(listening.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut()) });
        drop(UnixStream::from(accepted.unwrap()));
        assert!(native.answered_within(Duration::from_secs(60)), "the end counts, too");
    }
}
